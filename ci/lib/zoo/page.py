"""docs/zoo.md out of the results."""

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

HEAD = """# The zoo

Models that nobody here wrote are trained plain and sharded, and every value is compared. `ci/zoo` does it with the engine of
`shardproof.verify` ([python.md](python.md)). A model's first case saves on two ranks and loads on three, and compares what
`eval` and `generate` give. Further cases are drawn over strategies, units, meshes, optimizers, options, numerics and histories.
Each model has a process of its own with limits of time and memory.

```sh installs
ci/zoo                            # everything; with --json FILE a run goes on where it was broken off
ci/zoo --part torch --sample 20   # 20 modules, others with another --seed
ci/zoo --part transformers --only 'qwen*' --json rows.jsonl
ci/zoo --json rows.jsonl --markdown docs/zoo.md   # writes this page
```

The parts are every module of the database that `torch.testing` has of torch's modules, with some of its inputs, and what that
database leaves out; a tiny config of every type of `transformers`, made by what its fields are called; and of each family of
`timm` the smallest model, made smaller where its class takes sizes. The first call installs `ci/requirements/zoo.lock` into
`build-zoo`. A sample runs by night, and a small one of torch's modules in every run of the tests. The exit code is 1 where a
value is wrong, an error does not say what is wrong, a rank hangs or a process crashes, unless `ci/lib/zoo/expected.txt` has the
model and the reason.
"""


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def wrapped(text: str) -> str:
    return textwrap.fill(text, 150, break_long_words=False, break_on_hyphens=False)


def totals(found: dict) -> str:
    rows = ["| part | tried | " + " | ".join(SHOWN[:-1]) + " | not buildable | values |", "|---" * (len(SHOWN) + 3) + "|"]
    for part, title in TITLES.items():
        of = [row for (each, _), row in found.items() if each == part]
        if of:
            counts = [sum(row["verdict"] == verdict for row in of) for verdict in SHOWN]
            values = sum(row["values"] for row in of)
            rows.append(f"| {title} | {len(of) - counts[-1]} | " + " | ".join(map(str, counts)) + f" | {values:,} |")
    return "\n".join(rows)


def names_of(of: dict, verdict: str, expected: dict, part: str) -> str:
    """The models with a verdict: their names, or a line for each with the reason."""
    chosen = {name: row for name, row in sorted(of.items()) if row["verdict"] == verdict}
    if verdict in ("equal", "close"):
        return wrapped(", ".join(shown(part, name, row) for name, row in chosen.items()))
    if verdict == "not buildable":
        return wrapped("; ".join(f"{name} ({reason_of(row['detail'])})" for name, row in chosen.items()))
    lines = []
    for name, row in chosen.items():
        reason = expected.get((part, name), ("", ""))[1] or row["detail"]
        lines.append(wrapped(f"- {shown(part, name, row)}: {plain(reason)[:300]}"))
    return "\n".join(lines)


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


def page(found: dict, expected: dict) -> str:
    """The whole text."""
    parts = [HEAD, "## Totals\n", totals(found), ""]
    packages = ", ".join(f"{package} {version_of(package)}" for package in ("torch", "transformers", "timm", "torchvision"))
    parts += [wrapped(f"With {packages}. *Tried* are those that plain PyTorch trains here. The columns:"), ""]
    parts += [wrapped(f"- *{verdict}*: {meaning}") for verdict, meaning in MEANINGS.items()]
    for part, title in TITLES.items():
        of = {name: row for (each, name), row in found.items() if each == part}
        if not of:
            continue
        parts += ["", f"## {title}"]
        for verdict in SHOWN:
            count = sum(row["verdict"] == verdict for row in of.values())
            if count:
                heading = verdict.capitalize() if verdict.islower() else verdict
                parts += ["", f"### {heading}: {count} of {title.split()[-1]}", ""]
                parts += [names_of(of, verdict, expected, part)]
    return "\n".join(parts) + "\n"
