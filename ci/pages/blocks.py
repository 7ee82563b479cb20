"""The blocks of code in the documents, each of a kind that says how it is tested, or why it is not.

A block begins with its language and its kind, as in

    ```sh run

KINDS has the kinds. The site shows the language only.
"""
import dataclasses
import re

# Kinds that a test executes.
RUN = {
    "run": "is executed by every run of the tests, in a copy of the tree's folders",
    "nightly": "is executed by the nightly tests, because it takes minutes",
    "from": "is part of a source that is built and run by the tests: from=PATH",
}
# Kinds that no test executes, and why.
NOT_RUN = {
    "installs": "installs something on the machine, or needs a package index",
    "launcher": "needs a launcher, several machines, or a service that a test machine does not have",
    "gpu": "needs a GPU",
    "edits": "changes the sources of this tree, or looks at what such a change did; ci/faults tests the same in a copy",
    "long": "runs for longer than a night's tests may, or is one of the two commands that run the tests",
    "shape": "shows the shape of a command or a program: words in capitals, and names such as model, are the reader's own",
}
# Languages that hold no code: what a program prints, drawings, and the words of a notation.
NO_CODE = {"text"}
FENCE = re.compile(r"^( *)(`{3,})(\S*)(?: +(.*?))? *$")


@dataclasses.dataclass
class Block:
    line: int  # of the fence, from 1
    language: str
    kind: str  # "" where there is none
    source: str  # of the kind `from`
    text: str


def blocks_of(markdown):
    """The fenced blocks of a page, and the lines where an indented block begins."""
    found, indented = [], []
    lines = markdown.split("\n")
    number = 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence:
            end = number + 1
            while end < len(lines) and lines[end].strip() != fence.group(2):
                end += 1
            kind, _, source = (fence.group(4) or "").partition("=")
            text = "\n".join(line[len(fence.group(1)):] for line in lines[number + 1:end]) + "\n"
            found.append(Block(number + 1, fence.group(3), kind, source, text))
            number = end
        elif begins_indented(lines, number):
            indented.append(number + 1)
            while number + 1 < len(lines) and (lines[number + 1].startswith("    ") or not lines[number + 1].strip()):
                number += 1
        number += 1
    return found, indented


def begins_indented(lines, number):
    """Whether an indented block begins here, and not what goes on with an item of a list."""
    if not re.match(r" {4}\S", lines[number]) or (number > 0 and lines[number - 1].strip()):
        return False
    before = [line for line in lines[:number] if line.strip() and not line.startswith(" ")]
    return not before or not re.match(r"([-*]|\d+\.) ", before[-1])


def without_kinds(markdown):
    return "\n".join(re.sub(FENCE, r"\1\2\3", line) for line in markdown.split("\n"))


def explained_in_command(line):
    """Whether words follow a command after a gap, as an explanation does, without the # that begins one."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "x", line.strip())
    return re.match(r"[^#'\"]*\S {3,}[A-Za-z]", bare) is not None


def violations(markdown, read):
    """(line, message) of each block that says neither how it is tested nor why it is not. `read`: path -> text, or None.

    And of each line of a shell's block that could not be pasted into a shell."""
    blocks, indented = blocks_of(markdown)
    for block in blocks:
        for offset, line in enumerate(block.text.split("\n"), 1):
            if block.language == "sh" and explained_in_command(line):
                yield block.line + offset, "an explanation of a command begins with #, so that the line can be pasted"
    for line in indented:
        yield line, "a block without a kind; begin it with ```sh run, ```text or another kind (ci/pages/blocks.py)"
    for block in blocks:
        if block.language in NO_CODE and not block.kind:
            continue
        if block.kind not in RUN and block.kind not in NOT_RUN:
            kinds = ", ".join([*RUN, *NOT_RUN])
            yield block.line, f"the block's kind is '{block.kind}'; kinds are {kinds}, and ```text for what is no code"
        elif block.kind == "from":
            text = read(block.source)
            if text is None:
                yield block.line, f"there is no file {block.source}"
            elif flat(block.text) not in flat(text):
                yield block.line, f"the block is not a part of {block.source}"
        elif block.kind in ("run", "nightly") and block.language not in ("sh", "python"):
            yield block.line, f"blocks of {block.language} cannot be executed alone; name a source that is built: from=PATH"


def flat(text):
    """Without indentation and empty lines, which a page may leave out."""
    return "\n".join(line.strip() for line in text.split("\n") if line.strip()) + "\n"
