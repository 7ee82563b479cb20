"""Planted bugs that are found again by what they change: file, function, the old lines and the new ones (docs/faults.md)."""
import ast
import dataclasses
import functools
import os
import re

from planting import Trouble, source_files

CPP = (".cpp", ".h", ".cu", ".cuh")
QUIET = re.compile(r"""//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])+'"""
                   r"|^[ \t]*#(?:\\\n|[^\n])*", re.DOTALL | re.MULTILINE)
INITIALIZER = re.compile(r"\)[^()]*(?<!:):(?!:).*[\w>]\s*$", re.DOTALL)  # a member that a constructor initializes with braces


@dataclasses.dataclass
class Edit:
    path: str  # where it was written for
    function: str  # or class; "" is anywhere
    old: list
    new: list

    def __str__(self):
        function = f" in {self.function}" if self.function else ""
        return f"`{next(line for line in self.old if squeezed(line)).strip()}` of {self.path}{function}"


@dataclasses.dataclass
class Scope:
    name: str
    first: int  # number of the line, from 0
    end: int
    body: tuple = ()  # of a function of C++ that lies in no other: where what is between its braces begins and ends


@dataclasses.dataclass
class Place:
    path: str
    first: int
    end: int

    def __str__(self):
        return f"{self.path}:{self.first + 1}"


def squeezed(line):
    return "".join(line.split())


def read_edits(text, source):
    """Those of a text that has, behind its header, `@ FILE FUNCTION` and lines as in a diff: kept, `-` or `+`."""
    edits = []
    for number, line in enumerate(text.splitlines(), 1):
        sign = line[:1]
        if sign == "@":
            path, _, function = line[1:].strip().partition(" ")
            edits.append(Edit(path, function.strip(), [], []))
        elif not line.strip() or not edits and sign == "#":
            continue
        elif not edits or sign not in " -+":
            raise Trouble(f"{source}:{number}: `{line}` is no line of an edit, which begins with `@ FILE FUNCTION`; the others "
                          "begin with a space, - or +")
        else:
            if sign != "+":
                edits[-1].old.append(line[1:])
            if sign != "-":
                edits[-1].new.append(line[1:])
    for edit in edits:
        if not edit.path or not any(map(squeezed, edit.old)):
            raise Trouble(f"{source}: `@ {edit.path} {edit.function}` lacks a line that is there now, which is kept or has a -")
    return edits


def language(path):
    suffix = os.path.splitext(path)[1]
    return CPP if suffix in CPP else (suffix,)


def scopes(path, text):
    """The functions and classes of a file, those of C++ as far as brackets tell."""
    return scopes_of_cpp(text) if path.endswith(CPP) else scopes_of_python(text) if path.endswith(".py") else []


@functools.cache
def scopes_of_python(text):
    found = []

    def visit(nodes, prefix):
        for node in nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found.append(Scope(prefix + node.name, first - 1, node.end_lineno))
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            else:
                visit(ast.iter_child_nodes(node), prefix)

    visit(ast.parse(text).body, "")
    return found


@functools.cache
def scopes_of_cpp(text):
    code = QUIET.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    found, outer = [], []  # outer: of each open brace the name, whether it holds functions, where it begins, and its own place
    begin = brackets = 0
    for match in re.finditer(r"[{}();]", code):
        sign, place = match[0], match.start()
        outside = not outer or outer[-1][1]
        if outside and (brackets or sign == "(" or sign == "{" and INITIALIZER.search(code[begin:place])):
            brackets += 1 if sign in "({" else -1 if sign in ")}" else 0
        elif sign == "{":
            name, holds = heading(code[begin:place]) if outside else ("", False)
            if name and outer and outer[-1][0]:
                name = outer[-1][0] + "::" + name
            outer.append((name, holds, begin + len(code[begin:]) - len(code[begin:].lstrip()), place))
            begin = place + 1
        elif sign == "}" and outer:
            name, holds, start, brace = outer.pop()
            if name:
                body = () if holds else (brace + 1, place)
                found.append(Scope(name, code.count("\n", 0, start), code.count("\n", 0, place) + 1, body))
            begin = place + 1
        elif sign == ";":
            begin = place + 1
    return found


def heading(text):
    """The name of the function or class whose brace opens behind this text, and whether there may be functions in it."""
    text = re.sub(r"\b(?:public|private|protected)\s*:(?!:)|\[\[.*?\]\]|\balignas\([^)]*\)|->", " ", text)
    before = None
    while text != before:  # brackets of templates
        before, text = text, re.sub(r"<[^<>]*>", " ", text)
    text = " ".join(text.split())
    if re.match(r"(?:inline )?namespace\b|extern$", text):
        return "", True
    kind = re.match(r"(?:template )*(?:class|struct|union) ((?:[\w ]|::)+)[^(]*$", text)
    if kind:
        return kind[1].replace(" final", "").split()[-1], True
    name = re.match(r"[^=(]*?((?:[\w:]+::)?operator ?(?:\( ?\)|[^\w(]+|[\w: ]+)|[\w:~]+) ?\(", text)
    return (name[1] if name else ""), False


@functools.cache
def joined(text):
    """A text without white space, and the lines that begin, and those that end, at each place of it."""
    starts, ends, size = {}, {}, 0
    lines = [squeezed(line) for line in text.split("\n")]
    for number, line in enumerate(lines):
        if line:
            starts[size] = number
            size += len(line)
            ends[size] = number + 1
    return "".join(lines), starts, ends


def matches(text, old):
    """(first, end) of each run of lines that is the old one, white space aside."""
    whole, starts, ends = joined(text)
    wanted = "".join(map(squeezed, old))
    found, place = [], whole.find(wanted)
    while place >= 0:
        if place in starts and place + len(wanted) in ends:
            found.append((starts[place], ends[place + len(wanted)]))
        place = whole.find(wanted, place + 1)
    return found


def indent(line):
    return len(line) - len(line.lstrip())


def shifted(line, by):
    """The line indented by so many spaces more."""
    return " " * (indent(line) + by) + line.strip() if line.strip() else ""


def listed(found):
    return ", ".join(map(str, found[:4])) + (", ..." if len(found) > 4 else "")


class Tree:
    """The files that edits may change: those for which allowed(path) is true."""

    def __init__(self, root, allowed):
        self.root = root
        self.paths = sorted(path for path in source_files(root) if allowed(path))
        self.text = functools.cache(self.read)

    def read(self, path):
        with open(os.path.join(self.root, path), encoding="utf-8") as file:
            return file.read()

    def places(self, paths, edit):
        """Where the old lines are in these files, and in the function if one is given."""
        found = []
        for path in paths:
            text = self.text(path)
            runs = matches(text, edit.old)
            if runs and edit.function:
                around = [scope for scope in scopes(path, text) if scope.name == edit.function]
                runs = [run for run in runs if any(scope.first <= run[0] and run[1] <= scope.end for scope in around)]
            found += [Place(path, *run) for run in runs]
        return found

    def find(self, edit):
        """The one place of an edit, in the file that it names or else in any other."""
        others = [path for path in self.paths if path.endswith(language(edit.path))]
        found = self.places([path for path in self.paths if path == edit.path], edit) or self.places(others, edit)
        if len(found) == 1:
            return found[0]
        if found:
            raise Trouble(f"{edit} does not find its place: it is in {len(found)} places: {listed(found)}")
        outside = self.places(others, dataclasses.replace(edit, function=""))
        raise Trouble(f"{edit} does not find its place: it is in no file that may be changed"
                      f"{', but outside of the function: ' + listed(outside) if outside else ''}")

    def planted(self, edits):
        """{path: text} of the files that the edits change, and what was found elsewhere than in the file that it names."""
        found = sorted(((self.find(edit), edit) for edit in edits), key=lambda entry: entry[0].first, reverse=True)
        files, begun = {}, {}
        for place, edit in found:
            lines = files.setdefault(place.path, self.text(place.path).split("\n"))
            if place.end > begun.get(place.path, len(lines)):
                raise Trouble(f"{edit} changes lines that another edit changes, too")
            begun[place.path] = place.first
            by = indent(lines[place.first]) - indent(next(line for line in edit.old if squeezed(line)))
            lines[place.first:place.end] = [shifted(line, by) for line in edit.new]
        moved = [f"{edit} is at {place} now" for place, edit in reversed(found) if place.path != edit.path]
        return {path: "\n".join(lines) for path, lines in files.items()}, moved
