"""Trains models that nobody here wrote, plain and sharded, and compares them; `ci/zoo` runs it.

Parts: every module of torch's own module database, a tiny config of every type of transformers, and the smallest model of each
family of timm. Each model has a process of its own, and cases that the engine of `shardproof.verify` draws: strategies, units,
meshes, options, numerics and histories. A run that is broken off goes on where it was, if it has the same --json.

The exit code is 0 if every value is equal, or expected.txt names the model. It is 1 if a value is wrong, an error does not say
what is wrong, a rank hangs or a process crashes. It is 2 if the usage or the environment is wrong.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import random
import sys
import time
import warnings
from typing import Any, Iterator

from .children import run_all
from .page import models, page

PARTS = ("torch", "transformers", "timm")
BAD = ("WRONG", "unclear error", "hang", "crash")
EXPECTED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "expected.txt")


def parsed(arguments: "list[str]") -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ci/zoo", description=__doc__.split("\n", 1)[0], allow_abbrev=False)
    option = parser.add_argument
    option("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    option("--only", action="append", metavar="PATTERN", help="only models of these names, e.g. 'qwen*'; may be repeated")
    option("--sample", type=int, metavar="N", help="so many models of each part, at random by --seed")
    option("--seed", type=int, default=1, help="draws the sample and the cases (1)")
    option("--cases", type=int, default=4, metavar="N", help="of each model (4)")
    option("--case", metavar="LINE", help="only this case, which a report printed")
    option("--seconds", type=float, default=8, help="for the cases of a model behind the first one (8)")
    option("--limit", type=float, default=120, help="seconds after which a model is stopped (120)")
    option("--memory", type=float, default=10, metavar="GIB", help="addresses that a model may use (10)")
    option("--at-once", type=int, default=2, help="processes (2)")
    option("--minutes", type=float, help="begin no model after so many")
    option("--json", metavar="FILE", help="add a line for each model; models that it has are not run again")
    option("--again", metavar="VERDICT", action="append", default=[], help="run models with this verdict in --json again")
    option("--markdown", metavar="FILE", help="write the table of all results")
    option("--models", metavar="FILE", help="write the names of the models by their verdicts")
    option("--list", action="store_true", help="print the names of the models")
    options = parser.parse_args(arguments)
    if options.sample is not None and options.sample < 1 or options.cases < 1 or options.at_once < 1:
        parser.error("--sample, --cases and --at-once must be at least 1")
    return options


def expected_ones() -> "dict[tuple[str, str], tuple[str, str]]":
    """(part, name) -> (verdict, reason) of the lines 'part | name | verdict | reason'."""
    found = {}
    with open(EXPECTED, encoding="utf-8") as file:
        for line in file:
            if line.strip() and not line.startswith("#"):
                part, name, verdict, reason = (word.strip() for word in line.split("|", 3))
                found[part, name] = (verdict, reason)
    return found


def read(path: "str | None") -> "dict[tuple[str, str], dict]":
    """The results of a file, the last of each model."""
    if not path or not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.endswith("\n")]
    return {(row["part"], row["model"]): row for row in rows}


def chosen(part: str, module: Any, options: argparse.Namespace) -> "list[str]":
    names = [name for name in module.names() if not options.only or any(fnmatch.fnmatchcase(name, p) for p in options.only)]
    if options.sample is not None and options.sample < len(names):
        names = sorted(random.Random(f"{options.seed} {part}").sample(names, options.sample))
    return names


def rows_of(module: Any, name: str, options: argparse.Namespace) -> "Iterator[dict]":
    """In the process of a model."""
    import torch

    from .judge import rows_of as judged
    from .model import NotBuildable, said

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    try:
        models = module.build(name)
    except NotBuildable as error:
        yield {"verdict": "not buildable", "detail": str(error)}
        return
    except Exception as error:  # whatever the code of others raises
        yield {"verdict": "not buildable", "detail": said(error)}
        return
    yield from judged(models, name, options.seed, options.cases, options.seconds, options.case)


def result_of(part: str, name: str, seed: int, ended: dict) -> dict:
    """A line of --json."""
    from .judge import worst

    rows = ended["rows"]
    about = next((row.pop("about") for row in rows if row.get("about")), {})
    for row in rows:
        row.pop("about", None)
    shown = worst(rows)
    return {
        "part": part,
        "model": name,
        "seed": seed,
        "verdict": shown["verdict"],
        "detail": shown.get("detail", ""),
        "case": shown.get("case", ""),
        "label": shown.get("label", ""),
        "log": shown.get("log", ""),
        "cases": sum("case" in row for row in rows),
        "compared": sum(row["verdict"] in ("equal", "close") for row in rows),
        "values": sum(row.get("values", 0) for row in rows),
        "seconds": ended["seconds"],
        "mib": ended["mib"],
        "about": about,
    }


def run_part(part: str, options: argparse.Namespace, known: dict, report: Any) -> "dict[tuple[str, str], dict]":
    """The results of a part, those that are known included."""
    module = importlib.import_module(f".of_{part}", __package__)
    names = chosen(part, module, options)
    if options.list:
        print("\n".join(f"{part} {name}" for name in names))
        return {}
    found = {(part, name): known[part, name] for name in names if (part, name) in known}
    waiting = [name for name in names if (part, name) not in found or found[part, name]["verdict"] in options.again]
    limits = {"at_once": options.at_once, "seconds": options.limit, "memory_gib": options.memory}
    end = time.monotonic() + options.minutes * 60 if options.minutes is not None else None
    done = run_all(waiting, lambda name: rows_of(module, name, options), end=end, **limits)
    for number, (name, ended) in enumerate(done, 1):
        result = result_of(part, name, options.seed, ended)
        found[part, name] = result
        report(result)
        detail = result["detail"][:200] if result["verdict"] not in ("equal", "not buildable") else ""
        print(f"{number}/{len(waiting)} {part} {name}: {result['verdict']}, {ended['seconds']:.1f} s  {detail}", flush=True)
    return found


def conclude(found: "dict[tuple[str, str], dict]") -> int:
    """Prints totals and what is not as expected. Returns the exit code."""
    expected, unexpected = expected_ones(), 0
    for part in PARTS:
        verdicts = [row["verdict"] for (of, _), row in found.items() if of == part]
        if verdicts:
            counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(sorted(verdicts)))
            print(f"{part}: {len(verdicts)} models: {counts}")
    for (part, name), row in sorted(found.items()):
        if row["verdict"] not in BAD:
            continue
        known = expected.get((part, name))
        if known is not None and known[0] == row["verdict"]:
            print(f"expected: {part} {name}: {row['verdict']}: {known[1]}")
            continue
        unexpected += 1
        print(f"{row['verdict']}: {part} {name} {row['label']}: {row['detail'][:600]}")
        if row["case"]:
            print(f"  again: ci/zoo --part {part} --only '{name}' --seed {row['seed']} --case '{row['case']}'")
    compared = sum(row["values"] for row in found.values())
    print(f"ci/zoo: {len(found)} models, {compared:,} values compared, {unexpected} not as expected")
    return 1 if unexpected else 0


def main(arguments: "list[str]") -> int:
    options = parsed(arguments)
    known = read(options.json)
    report = open(options.json, "a", encoding="utf-8") if options.json else None

    def add(result: dict) -> None:
        if report is not None:
            report.write(json.dumps(result) + "\n")
            report.flush()

    found: "dict[tuple[str, str], dict]" = {}
    for part in options.part or PARTS:
        found.update(run_part(part, options, known, add))
    if options.list:
        return 0
    if options.markdown:
        with open(options.markdown, "w", encoding="utf-8") as file:
            file.write(page(found, expected_ones()))
    if options.models:
        with open(options.models, "w", encoding="utf-8") as file:
            file.write(models(found))
    if not found:
        print("ci/zoo: no model has such a name; --list prints the names", file=sys.stderr)
        return 2
    return conclude(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
