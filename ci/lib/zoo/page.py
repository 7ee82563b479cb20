"""docs/zoo.md, and the list of models beside this file, out of the results."""

from __future__ import annotations

import importlib.metadata
import textwrap

TITLES = {
    "torch": "Modules of torch",
    "transformers": "Types of transformers",
    "timm": "Families of timm",
}
MEANINGS = {
    "equal": "every value is equal: in bits where sums have an order, and as `verify` allows where they have none",
    "close": "bits differ, within what `verify` allows of sums in another order",
    "clear error": "sharding refuses the model, and says what to do",
    "WRONG": "a value is wrong, and nothing says so",
    "unclear error": "an error that does not say what is wrong",
    "hang": "ranks wait for each other for ever",
    "crash": "the process ends by a signal",
    "slow": "it was not done in time",
    "not buildable": "plain PyTorch has nothing to compare: it cannot be made small, needs what is not here, or is random",
}
SHOWN = tuple(MEANINGS)
LISTED = ("equal", "close", "not buildable")  # what the list has; the page has the others, with their reasons
# Errors that many models meet, in fewer words.
ERRORS = (
    ("has no data here", "a forward reads a parameter while its unit does not run, and the error names both"),
    ("ranks disagree on call", "ranks call different collectives, and the error names both calls"),
    ("was changed in place after it was sharded", "a forward changes a parameter in place, and the error names it"),
    ("must be floating", "a parameter is not floating, and the error names it"),
)

HEAD = """# The zoo

Models that nobody here wrote are trained plain and sharded, and every value is compared. `ci/zoo` does it with the
engine of `shardproof.verify` ([python.md](python.md)). A model's first case saves on two ranks and loads on three, and
compares what `eval` and `generate` give. Further cases are drawn over strategies, units, meshes, optimizers, options,
numerics and histories. Each model has a process of its own with limits of time and memory.

```sh installs
ci/zoo                            # everything; with --json FILE a run goes on where it was broken off
ci/zoo --part torch --sample 20   # 20 modules, others with another --seed
ci/zoo --part transformers --only 'qwen*' --json rows.jsonl
ci/zoo --json rows.jsonl --markdown docs/zoo.md --models ci/lib/zoo/models.md   # this page, the list
```

The parts are every module of the database that `torch.testing` has of torch's modules, with some of its inputs, and
what that database leaves out; a tiny config of every type of `transformers`, made by what its fields are called; and of
each family of `timm` the smallest model, made smaller where its class takes sizes. The first call installs
`ci/requirements/zoo-*.lock` into `build-zoo-*`. A sample runs by night, and a small one of torch's modules in every run
of the tests. The exit code is 1 where a value is wrong, an error does not say what is wrong, a rank hangs or a process
crashes, unless `ci/lib/zoo/expected.txt` has the model and the reason.
"""


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def wrapped(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def totals(found: dict) -> str:
    rows = ["| part | tried | " + " | ".join(SHOWN[:-1]) + " | not buildable | values |", "|---" * (len(SHOWN) + 3) + "|"]
    for part, title in TITLES.items():
        of = [row for (each, _), row in found.items() if each == part]
        if of:
            counts = [sum(row["verdict"] == verdict for row in of) for verdict in SHOWN]
            values = sum(row["values"] for row in of)
            rows.append(f"| {title} | {len(of) - counts[-1]} | " + " | ".join(map(str, counts)) + f" | {values:,} |")
    return "\n".join(rows)


def grouped(of: dict, verdict: str, part: str, reason) -> "dict[str, list[str]]":
    """Each reason, with the models that have it."""
    names: "dict[str, list[str]]" = {}
    for name, row in sorted(of.items()):
        if row["verdict"] == verdict:
            names.setdefault(reason(name, row), []).append(shown(part, name, row) if verdict != "not buildable" else name)
    return names


def reasons_of(of: dict, verdict: str, expected: dict, part: str) -> str:
    """The models with a verdict that needs a reason."""
    def reason(name: str, row: dict) -> str:
        text = plain(expected.get((part, name), ("", ""))[1] or row["detail"])
        return next((kind for known, kind in ERRORS if known in text), text[:300])

    found = grouped(of, verdict, part, reason)
    return "\n".join(wrapped(f"- {', '.join(names)}: {text}") for text, names in found.items())


def names_of(of: dict, verdict: str, part: str) -> str:
    """The models with a verdict that needs no reason, or one word of it."""
    if verdict == "not buildable":
        found = grouped(of, verdict, part, lambda _, row: reason_of(row["detail"]))
        return "\n".join(wrapped(f"- {text}: {', '.join(names)}") for text, names in found.items())
    return wrapped(", ".join(shown(part, name, row) for name, row in sorted(of.items()) if row["verdict"] == verdict))


def shown(part: str, name: str, row: dict) -> str:
    return f"{row['about'].get('class', name)}" if part == "timm" else name


def plain(text: str) -> str:
    """Text that is no markdown."""
    return " ".join(text.replace("|", "/").replace("`", "'").replace("<", "(").replace(">", ")").split())


def reason_of(detail: str) -> str:
    """The kind of a reason, since the whole one is in the rows."""
    kinds = (
        ("requires the", "a library that is not installed"),
        ("No module named", "a library that is not installed"),
        ("parameters", "too large"),
        ("no input is known", "inputs unknown"),
        ("no inputs are known", "inputs unknown"),
        ("no class", "no class"),
        ("cannot be compared", "random"),
        ("plain loss", "not finite"),
        ("more than", "slow"),
    )
    return next((kind for text, kind in kinds if text in detail), "sizes that do not fit")


def chapters(found: dict, verdicts: tuple, text) -> "list[str]":
    out = []
    for part, title in TITLES.items():
        of = {name: row for (each, name), row in found.items() if each == part}
        for verdict in verdicts:
            count = sum(row["verdict"] == verdict for row in of.values())
            if count:
                heading = verdict.capitalize() if verdict.islower() else verdict
                out += ["", f"## {heading}: {count} of {title.split()[-1]}", "", text(of, verdict, part)]
    return out


def page(found: dict, expected: dict) -> str:
    """The whole text."""
    parts = [HEAD, "## Totals\n", totals(found), ""]
    packages = ", ".join(f"{package} {version_of(package)}" for package in ("torch", "transformers", "timm", "torchvision"))
    parts += [wrapped(f"With {packages}. *Tried* are those that plain PyTorch trains here. "
                      "[The list](../ci/lib/zoo/models.md) has the names. The columns:"), ""]
    parts += [wrapped(f"- *{verdict}*: {meaning}") for verdict, meaning in MEANINGS.items()]
    rest = tuple(verdict for verdict in SHOWN if verdict not in LISTED)
    parts += chapters(found, rest, lambda of, verdict, part: reasons_of(of, verdict, expected, part))
    return "\n".join(parts) + "\n"


def models(found: dict) -> str:
    """The names of all other models."""
    head = "[docs/zoo.md](../../../docs/zoo.md) says what was tried, and has the rest."
    return "\n".join(["# The models of the zoo", "", head, *chapters(found, LISTED, names_of)]) + "\n"
