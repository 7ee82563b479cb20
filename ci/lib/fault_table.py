"""What ci/faults says of its rows: tables for a terminal and for a page, and how far cases and guesses explain failures."""
import math
import re


def seeds_in_words(row):
    found = sorted(cases for cases in row["by_seed"] if cases is not None)
    if row["check"].startswith("ctest"):
        return f"by {len(found)} of {len(row['by_seed'])} runs"
    median = f", median {found[len(found) // 2]}" if found else ""
    return f"by {len(found)} of {len(row['by_seed'])} seeds{median}"


def describe(row):
    text = f"{row['id']:<8} {row['verdict']:<8} {row['seconds']:5.1f} s"
    if row["verdict"] == "killed":
        seeds = f" ({seeds_in_words(row)})" if row.get("by_seed") else ""
        return f"{text}  after {row['cases']} case{'' if row['cases'] == 1 else 's'}{seeds}: {row['by']}"
    return f"{text}  {row['by'] or row['title']}"


def print_table(rows, out):
    width = max(len(row["title"]) for row in rows)
    print(f"\n{'fault':<8} {'title':<{width}} {'verdict':<8} {'cases':>6}  killed by", file=out)
    for row in rows:
        print(f"{row['id']:<8} {row['title']:<{width}} {row['verdict']:<8} {row['cases']:>6}  {row['by']}",
              file=out)
        if row["case"]:
            print(f"{'':<8} minimal: {row['case']}", file=out)
    killed, survived, errors = (sum(row["verdict"] == verdict for row in rows)
                                for verdict in ("killed", "survived", "error"))
    for row in rows:
        if row.get("by_seed") and None in row["by_seed"]:
            print(f"{row['id']}: found {seeds_in_words(row)}", file=out)
    print_explained([row for row in rows if "mesh(" in row["case"]], out)
    print(f"\n{len(rows)} planted bugs: {killed} killed, {survived} survived, {errors} errors", file=out)


def is_small(case):
    """Whether the text is that of a case with at most 2 ranks, 1 layer and 2 steps."""
    meshes = re.findall(r"\bmesh\(([^)]*)\)", case)  # also those of loads
    ranks = max(math.prod(int(size) for size in re.findall(r"=([0-9]+)", mesh)) for mesh in meshes)
    sizes = re.search(r"\b(?:widths|channels)=([0-9-]+)", case)
    layers = re.search(r"\blayers=([0-9]+)", case)
    depth = sizes.group(1).count("-") if sizes else int(layers.group(1)) if layers else 1
    steps = sum(int(times or 1) for times in re.findall(r"\bstep\b(?:\*([0-9]+))?", case.split(" : ", 1)[-1]))
    return ranks <= 2 and depth <= 1 and steps <= 2


def print_explained(rows, out):
    """How far the minimal cases and the guesses explain what `verify` killed."""
    if not rows:
        return
    small, guessed = (100 * sum(bool(holds(row)) for row in rows) / len(rows)
                      for holds in (lambda row: is_small(row["case"]), lambda row: row["guess"]))
    print(f"\n{len(rows)} have a minimal case: {small:.0f}% of them with at most 2 ranks, 1 layer and 2 steps, "
          f"{guessed:.0f}% with a guess; found after {sorted(row['cases'] for row in rows)[len(rows) // 2]} cases in the "
          "median", file=out)
    print_guesses(rows, out)
    different = [row for row in rows if row.get("replicas")]
    if different:
        found = sum(row["replicas"] == "found" for row in different)
        print(f"{len(different)} leave replicas different: --check=fingerprint finds {found} of them in that step", file=out)
        for row in different:
            if row["replicas"] == "missed":
                print(f"  not {row['id']}: {row['case']}", file=out)


def print_guesses(rows, out):
    """How many guesses are right, and those that are wrong."""
    wrong = [row for row in rows if row["guess_is"] == "wrong"]
    right = sum(row["guess_is"] == "right" for row in rows)
    guesses = right + len(wrong)
    if guesses:
        print(f"{right} guesses of {guesses} are right ({100 * right / guesses:.0f}%), {100 * right / len(rows):.0f}% of all",
              file=out)
    for row in wrong:
        print(f"  wrong for {row['id']}: {row['guess']}", file=out)


def write_markdown(rows, path):
    """The first table of harness/faults/README.md."""
    def cell(text):
        return text.replace("|", "\\|").replace("\n", " ")

    with open(path, "w", encoding="utf-8") as file:
        file.write("| bug | what is planted | check | found after | by | seconds |\n|---|---|---|---|---|---|\n")
        for row in rows:
            unit = "test" if row["check"].startswith("ctest") else "case"
            after = f"{row['cases']} {unit}{'' if row['cases'] == 1 else 's'}" if row["verdict"] == "killed" else row["verdict"]
            after += f" ({seeds_in_words(row)})" if row.get("by_seed") else ""
            by = re.split(r"[:,]", re.sub(r"^step \d+: ", "", row["by"]))[0]
            by = by if len(by) <= 80 or " " not in by else by[:77] + "..."  # names of tests stay whole
            file.write(f"| {row['id']} | {cell(row['title'])} | {row['check'].split()[0]} | {after} | {cell(by)} | "
                       f"{row['seconds']:.0f} |\n")
