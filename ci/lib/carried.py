"""Planted bugs that one build carries: a function whose body a bug changes has that body as well as the true one, and a
variable of the environment says which of them runs. A module of Python has a second text."""
import itertools
import os
import re
import zlib

import anchors

VARIABLE = "SHARDPROOF_PLANTED"  # the number of the bug that is planted

# Sources may be compiled in groups. The variable is read once for each of them, before any function of it can have run.
SWITCH = f"""\
#ifndef {VARIABLE}
#define {VARIABLE}
#include <cstdlib>
static inline bool shardproof_planted(int bug) {{
  static const int planted = [] {{
    const char* number = std::getenv("{VARIABLE}");
    return number ? std::atoi(number) : 0;
  }}();
  return bug == planted;
}}
#endif
"""

# Python imports this before any program. It is in the folder of the package, and so on the path of whoever imports that.
LOADER = """\
import importlib.machinery
import os

TREE, TEXTS = {tree!r}, os.path.join({texts!r}, os.environ.get({variable!r}, "0"))


def get_code(self, name):
    path = self.get_filename(name)
    planted = os.path.join(TEXTS, os.path.relpath(os.path.realpath(path), TREE))
    return self.source_to_code(self.get_data(planted), path) if os.path.isfile(planted) else true(self, name)


true = importlib.machinery.SourceFileLoader.get_code
if os.path.isdir(TEXTS):
    importlib.machinery.SourceFileLoader.get_code = get_code
"""


def number_of(bug):
    """The same in each catalogue, so that a new bug changes no file but its own."""
    return zlib.crc32(bug.encode()) >> 1


def pieces(text):
    """The text in pieces: what is outside of bodies of functions, and each of these, take turns."""
    borders = itertools.chain((0,), *(scope.body for scope in anchors.scopes_of_cpp(text)), (len(text),))
    return [text[first:end] for first, end in itertools.pairwise(borders)]


def within_bodies(before, after):
    """Whether two texts differ in bodies of functions alone."""
    return pieces(before)[::2] == pieces(after)[::2]


def with_bodies(path, text, bugs):
    """The text with the bodies of the bugs, {id: text}, which compilers and debuggers name as planted/ID."""
    changed = {bug: pieces(bug_text) for bug, bug_text in bugs.items()}
    out, line = [SWITCH, f'#line 1 "{path}"\n'], 1
    for index, piece in enumerate(pieces(text)):
        others = {bug: theirs[index] for bug, theirs in changed.items() if theirs[index] != piece}
        for bug, body in others.items():
            out.append(f'\nif (shardproof_planted({number_of(bug)})) {{\n#line 1 "planted/{bug}"\n{body}\n}} else')
        if others:
            out.append(f' {{\n#line {line} "{path}"\n')
        out.append(piece)
        line += piece.count("\n")
        if others:
            out.append(f'\n}}\n#line {line} "{path}"\n')
    return "".join(out)


class Carried:
    """The bugs, {id: {path: text}}, that can be carried by the build of a tree; text_of(path) is what it has there, or None."""

    def __init__(self, bugs, text_of, python):
        self.text_of = text_of
        self.bugs = {bug: texts for bug, texts in bugs.items()
                     if texts and all(self.can_be(path, text, python) for path, text in texts.items())}

    def can_be(self, path, text, python):
        true = self.text_of(path)
        if true is None or text is None:  # a file that comes or goes
            return False
        return python and path.endswith(".py") or path.endswith(".cpp") and within_bodies(true, text)

    def of(self, path):
        """The texts of the bugs that change a file, {id: text}."""
        return {bug: texts[path] for bug, texts in self.bugs.items() if path in texts}

    def sources(self, root):
        """{path: text} of the files of C++ that carry bugs."""
        paths = {path for texts in self.bugs.values() for path in texts if path.endswith(".cpp")}
        return {path: with_bodies(os.path.join(root, path), self.text_of(path), self.of(path)) for path in paths}

    def modules(self):
        """{path: text} of the modules of Python, in a folder for each bug."""
        return {os.path.join(str(number_of(bug)), path): text for bug, texts in self.bugs.items()
                for path, text in texts.items() if path.endswith(".py")}

    def leave_out(self, output):
        """Leaves out the bugs that do not compile by the output of a compiler, and returns their ids. Where it names none in an
        error, it is those of its notes, or those that change a function that has an error, or all of a file that has one."""
        named = (set(re.findall(r"planted/([^\s:]+):\d+:\d+: (?:fatal )?error\b", output)),
                 set(re.findall(r"planted/([^\s:]+):\d+", output)), *self.around(output))
        found = next((bugs for bugs in named if bugs & self.bugs.keys()), set()) & self.bugs.keys()
        for bug in found:
            del self.bugs[bug]
        return sorted(found)

    def around(self, output):
        """The bugs that change the functions, and those that change the files, in whose true text a compiler found errors."""
        in_functions, in_files = set(), set()
        for said, line in re.findall(r"^(\S+\.cpp):(\d+):\d+: (?:fatal )?error\b", output, re.MULTILINE):
            for path in {path for texts in self.bugs.values() for path in texts if said.endswith(path)}:
                true, bugs = pieces(self.text_of(path)), self.of(path)
                ends = itertools.accumulate(piece.count("\n") for piece in true)
                at = next((index for index, end in enumerate(ends) if int(line) <= end + 1), 0)
                in_functions |= {bug for bug, text in bugs.items() if pieces(text)[at] != true[at]}
                in_files |= bugs.keys()
        return in_functions, in_files
