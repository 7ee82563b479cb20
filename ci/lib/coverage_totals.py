"""What ci/coverage counted, in three lines, and whether it is as much as asked for."""
import argparse
import json
import sys

PARTS = ("lines", "branches", "functions")


def parse(arguments):
    parser = argparse.ArgumentParser(prog="ci/coverage", description=__doc__, allow_abbrev=False)
    parser.add_argument("summary", help="what llvm-cov export -summary-only has written")
    parser.add_argument("--lines-min", type=float, default=0, metavar="PERCENT")
    parser.add_argument("--branches-min", type=float, default=0, metavar="PERCENT")
    return parser.parse_args(arguments)


def main(arguments):
    """0, or 1 where less was run than asked for."""
    options = parse(arguments)
    with open(options.summary, encoding="utf-8") as file:
        totals = json.load(file)["data"][0]["totals"]
    for part in PARTS:
        print(f"{part}: {totals[part]['percent']:.1f}% ({totals[part]['covered']:,} of {totals[part]['count']:,})")
    few = [(part, least) for part, least in (("lines", options.lines_min), ("branches", options.branches_min))
           if totals[part]["percent"] < least]
    for part, least in few:
        print(f"ci/coverage: {totals[part]['percent']:.2f}% of the {part} ran, and {least:g}% are asked for", file=sys.stderr)
    return 1 if few else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
