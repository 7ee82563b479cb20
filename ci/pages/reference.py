"""Pages of reference out of the public headers: one page a room, one chapter a header, one section a declaration.

A header is a contract in plain comments. So the text of a page is those comments, in their order, and the code below each is
the declaration that it speaks about.
"""
import os
import re

PUBLIC = os.path.join("impl", "include", "shardproof")
COMMENT = re.compile(r"^\s*//(?: (.*)|$)")
NAMESPACE = re.compile(r"^(?:inline )?namespace ([\w:]+) \{$")
TYPE = re.compile(r"^(?:template <.*>\s*)?(?:struct|class|enum class|enum) (?:\[\[\w+\]\] )?(\w+)(?![\w;]*;)")
ALIAS = re.compile(r"^using (\w+) =")
MACRO = re.compile(r"^#\s*define (\w+)")
FUNCTION = re.compile(r"([A-Za-z_]\w*|operator\S+)\(")
IGNORED = re.compile(r"^\s*(#\s*(pragma|include|ifdef|ifndef|if|endif|else|undef)\b|\}\s*// namespace)")


def markdown_of(lines):
    """The text of a comment. Lines that it indents are drawings or code, and stay as they are."""
    out, fence = [], False
    for line in lines:
        in_item = bool(out) and out[-1].lstrip().startswith("- ")
        indented = line.startswith("  ") and (fence or not in_item)
        if indented != fence and (indented or line.strip()):
            out += ["", "```text"] if indented else ["```", ""]
            fence = indented
        out.append(line if fence else escaped(line))
    if fence:
        out.append("```")
    return "\n".join(out)


def escaped(line):
    """What Markdown would take for markup, but for code in back-ticks and lists."""
    parts = re.split(r"(`[^`]*`)", line)
    parts[::2] = [re.sub(r"([*\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", part.replace("<", "&lt;").replace(">", "&gt;"))
                  for part in parts[::2]]
    return "".join(parts)


def names_of(code):
    """What a declaration declares, or nothing for one that only announces a name. Functions may share a comment."""
    text = " ".join(line.strip() for line in code)
    if re.match(r"^(class|struct) \w+;$", text):
        return []
    for pattern in (TYPE, ALIAS, MACRO):
        if match := pattern.match(text):
            return [match.group(1)]
    found = []
    for line in code:
        bare = re.sub(r"^template <[^>]*>\s*", "", line)
        if re.match(r"[A-Za-z]", line) and (match := FUNCTION.search(bare) or re.search(r"(\w+) = ", bare)):
            if match.group(1) not in found:
                found.append(match.group(1))
    return found


def sections_of(text):
    """The comment at the top of a header, and then (namespace, comment, code) for each declaration, all as lists of lines."""
    lines = text.split("\n")
    top = []
    while lines and (match := COMMENT.match(lines[0])):
        top.append(match.group(1) or "")
        lines.pop(0)
    sections, namespaces, comment, code, depth = [], [], [], [], 0

    def close():
        if code:
            sections.append(("::".join(namespaces[1:]), list(comment), list(code)))
            comment.clear()
        code.clear()

    for line in lines:
        if depth == 0 and not code and (match := NAMESPACE.match(line)):
            namespaces.append(match.group(1))
            comment.clear()
        elif depth == 0 and re.match(r"^\}\s*// namespace", line):
            close()
            if namespaces:
                namespaces.pop()
        elif depth == 0 and IGNORED.match(line):
            close()
        elif depth == 0 and not line.strip():
            close()
            comment.clear()
        elif depth == 0 and (match := COMMENT.match(line)):
            close()
            comment.append(match.group(1) or "")
        else:
            code.append(line)
            bare = re.sub(r"//.*|\"(?:[^\"\\]|\\.)*\"", "", line)
            depth += bare.count("{") + bare.count("(") - bare.count("}") - bare.count(")")
    close()
    return top, sections


def chapter(header, text):
    """The chapter of one header, e.g. of algebra/layout.h."""
    top, sections = sections_of(text)
    out = [f"## {header}", "", markdown_of(top), "", "```cpp", f"#include <shardproof/{header}>", "```", ""]
    last = None
    for namespace, comment, code in sections:
        names = names_of(code)
        if not names and not comment:
            continue
        title = ", ".join("::".join(part for part in (namespace, name) if part) for name in names)
        if title and title != last:
            out += [f"### {escaped(title)}", ""]
        last = title
        if comment:
            out += [markdown_of(comment), ""]
        out += ["```cpp", *code, "```", ""]
    return "\n".join(out)


def headers_of(root):
    """Room -> its public headers, as paths behind shardproof/. The headers above the rooms have the room `.`."""
    found = {}
    for folder, _, names in os.walk(os.path.join(root, PUBLIC)):
        room = os.path.relpath(folder, os.path.join(root, PUBLIC))
        for name in sorted(names):
            if name.endswith(".h") and name != "shardproof.h":
                found.setdefault(room, []).append(name if room == "." else f"{room}/{name}")
    return found


def pages(root, rooms):
    """Path -> text of all pages of reference. `rooms` is their order, bottom up; the pages go from the top down."""
    headers = headers_of(root)
    order = [room for room in reversed(rooms) if room in headers] + [room for room in headers if room not in rooms]
    out = {}
    rows = []
    for room in order:
        title = "shardproof" if room == "." else room
        path = f"reference/{title.replace('/', '_')}.md"
        text = [f"# {title}", ""]
        for header in headers[room]:
            with open(os.path.join(root, PUBLIC, header), encoding="utf-8") as file:
                content = file.read()
            text.append(chapter(header, content))
            sentence = re.match(r".*?\.(?=\s|$)", " ".join(sections_of(content)[0]))
            link = f"{os.path.basename(path)}#{re.sub(r'[^a-z0-9_]', '', header)}"
            rows.append(f"| [`{header}`]({link}) | {escaped(sentence.group(0)) if sentence else ''} |")
        out[path] = "\n".join(text)
    out["reference/index.md"] = "\n".join([
        "# Reference", "",
        "These pages are the public headers. Their comments are the contract, and `shardproof/shardproof.h` includes most of",
        "them. Rooms are listed from the top down; each uses those below it.", "",
        "| header | what it holds |", "|---|---|", *rows, ""])
    return out
