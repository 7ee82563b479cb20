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
    """Which part of `before` became another: (start, end)."""
    start = 0
    while start < min(len(before), len(after)) and before[start] == after[start]:
        start += 1
    tail = 0
    while tail < min(len(before), len(after)) - start and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    return start, len(before) - tail


def letter(line, at):
    """The letter at this place; a space beyond either end."""
    return line[at] if 0 <= at < len(line) else " "


def is_digit(text):
    return text.isdigit() or text == "."


def are_balanced(text):
    return all(text.count(a) == text.count(b) for a, b in ("()", "[]", "{}"))


def has_brackets_of(before, after):
    """Whether no bracket came or went, but those of a condition or a number that became a sum."""
    if re.search(r"\([01]==|\(\d+[+-]1\)", after):
        return True
    return all(before.count(bracket) == after.count(bracket) for bracket in BRACKETS)


def is_a_number(line, start, end):
    """Whether the digits around this part are a number of their own, and no part of a name or of a fraction."""
    while letter(line, start - 1).isdigit():
        start -= 1
    while letter(line, end).isdigit():
        end += 1
    return not re.match(r"[\w:.]", letter(line, start - 1)) and not re.match(r"[\w:]", letter(line, end))


def is_a_condition(text):
    return are_balanced(text) and "=" not in text.replace("==", "")


def cuts_a_word(line, at):
    """Whether this place lies inside of a word, as that of "end" in "send" does."""
    return bool(re.match(r"\w\w", letter(line, at - 1) + letter(line, at)))


def has_arguments_of(before, after):
    """Whether no argument went across a bracket, which leaves a comma behind it."""
    lost = re.compile(r"[(\[{] *,")
    return not lost.search(after) or bool(lost.search(before))


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
    return (line.rstrip().endswith(";") and above.rstrip()[-1] in ";{}:" and not DECLARES.match(line) and are_balanced(line))


def is_plausible(lines, number, text):
    """Whether line `number` (from 1) can have become `text` in a source that compiles."""
    index, before = number - 1, lines[number - 1]
    if len(text.splitlines()) > 1:  # a statement was put behind the line
        return before.rstrip().endswith(";") and is_in_a_loop(lines, index)
    if text.strip().startswith("/*"):
        return is_a_statement(lines, index)
    if not has_brackets_of(before, text):
        return False
    start, end = changed_part(before, text)
    if in_text(before, start):
        return False
    here, left = letter(before, start), letter(before, start - 1)
    if is_digit(here) or is_digit(left):
        return is_a_number(before, start, end)
    if here in OPERATORS:
        return keeps_an_operator(before, text, start)
    if left in OPERATORS:
        return keeps_an_operator(before, text, start - 1)
    if "(1==1)" in text or "(0==1)" in text:
        return is_a_condition(before[start:end])
    return not cuts_a_word(before, start) and not cuts_a_word(before, end) and has_arguments_of(before, text)
