"""Leaves out mutants that cannot compile, before a compiler is asked.

universalmutator changes text, and most of what it makes of C++ is no C++: `vector<int>` becomes `vector<=int>`, and `int64_t`
becomes `int(64+1)_t`. A mutant that is left out here is not lost to the sample, since another is drawn in its place. The source
is formatted by clang-format, so operators between two operands have a space on each side, and those of one operand and the
brackets of templates do not.
"""
import re

OPERATORS = "<>+-*/%&|=!^"
BRACKETS = "()[]{}"
# What a line begins with that only declares, so that later lines need it.
DECLARES = re.compile(r"\s*(const |static |auto |using |template|struct |class |enum |namespace |#|"
                      r"[\w:]+(<[^;=()]*>)?[&*]? \w+( =|;|\(|\{|\[))")


def in_text(line, at):
    """Whether this place of the line lies in a string, a character or a comment."""
    quote = None
    for i, letter in enumerate(line[:at]):
        if quote:
            if letter == quote and line[i - 1] != "\\":
                quote = None
        elif letter in "\"'" and not (letter == "'" and line[i - 1:i].isdigit()):
            quote = letter
        elif line.startswith("//", i):
            return True
    return quote is not None


def changed_part(before, after):
    """Where the lines begin to differ, and how far: (start, end in `before`, end in `after`)."""
    start = 0
    while start < min(len(before), len(after)) and before[start] == after[start]:
        start += 1
    tail = 0
    while tail < min(len(before), len(after)) - start and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    return start, len(before) - tail, len(after) - tail


def run_of_operators(line, at):
    """The whole operator of which the letter at this place is a part: (start, end)."""
    start = end = at
    while start > 0 and line[start - 1] in OPERATORS:
        start -= 1
    while end < len(line) and line[end] in OPERATORS:
        end += 1
    return start, end


def keeps_an_operator(before, after, start):
    """Whether the operator at this place has become another that may stand there."""
    begin, end = run_of_operators(before, start)
    old = before[begin:end]
    new = after[begin:run_of_operators(after, min(start, len(after) - 1))[1]]
    if old in ("++", "--"):
        return new in ("++", "--")
    between_operands = before[begin - 1:begin] == " " and before[end:end + 1] in (" ", "\n", "")
    if between_operands:
        return old not in ("=", "&&") or new in ("||", "&&", "+=", "-=")
    return old in ("-", "!") and new == ""


def is_in_a_loop(lines, index):
    """Whether a line above, of which this one is a part by its indentation, begins a loop."""
    depth = len(lines[index]) - len(lines[index].lstrip())
    for line in reversed(lines[:index]):
        own = len(line) - len(line.lstrip())
        if line.strip() and own < depth:
            depth = own
            if re.match(r"\s*(for|while|do)\b", line):
                return True
    return False


def is_a_statement(lines, index):
    """Whether the line is one statement, and needed by no declaration below."""
    line, above = lines[index], next((text for text in reversed(lines[:index]) if text.strip()), "{")
    return (line.rstrip().endswith(";") and above.rstrip()[-1] in ";{}:" and not DECLARES.match(line) and
            all(line.count(a) == line.count(b) for a, b in ("()", "[]", "{}")))


def is_plausible(lines, number, text):
    """Whether line `number` (from 1) can have become `text` in a source that compiles."""
    index, before = number - 1, lines[number - 1]
    after = text.splitlines(keepends=True)
    if len(after) > 1:  # a statement was put behind the line
        return before.rstrip().endswith(";") and is_in_a_loop(lines, index)
    if text.strip().startswith("/*"):
        return is_a_statement(lines, index)
    if any(before.count(bracket) != text.count(bracket) for bracket in BRACKETS) and "(1==" not in text and "(0==" not in text:
        if not re.search(r"\(\d+[+-]1\)", text):  # a number that became a sum
            return False
    start, end, end_after = changed_part(before, text)
    if in_text(before, start):
        return False
    digits = re.compile(r"[\d.]")
    if start < len(before) and digits.match(before[start:start + 1] or " ") or digits.match(before[start - 1:start] or " "):
        first = start
        while first > 0 and before[first - 1].isdigit():
            first -= 1
        last = max(end, start)
        while last < len(before) and before[last].isdigit():
            last += 1
        return not re.match(r"[\w:.]", before[first - 1:first] or " ") and not re.match(r"[\w:]", before[last:last + 1] or " ")
    if start < len(before) and before[start] in OPERATORS or before[start - 1:start] and before[start - 1] in OPERATORS:
        at = start if start < len(before) and before[start] in OPERATORS else start - 1
        return keeps_an_operator(before, text, at)
    if "(1==1)" in text or "(0==1)" in text:
        part = before[start:end]
        return all(part.count(a) == part.count(b) for a, b in ("()", "[]", "{}")) and "=" not in part.replace("==", "")
    # Neither a part of a word ("send" has an "end"), nor arguments that were swapped across brackets.
    word = re.compile(r"\w")
    cut = any(word.match(a or " ") and word.match(b or " ")
              for a, b in ((before[start - 1:start], before[start:start + 1]), (before[end - 1:end], before[end:end + 1])))
    return not cut and not (re.search(r"[(\[{] *,", text) and not re.search(r"[(\[{] *,", before)) and end_after >= start
