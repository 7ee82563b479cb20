"""The files that ci/gpu leaves: results.json after every stage, and one page for people."""
import json
import os
import statistics


def write_results(path, results):
    """Whole or not at all, since the machine may be taken away at any moment."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1)
    os.replace(path + ".new", path)


def read_results(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def rows_of(path):
    rows = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                rows.append(json.loads(line))
    except (OSError, ValueError):
        pass  # a stage that was cut off leaves what it had
    return rows


def figure(row):
    """A JSON object of a benchmark as one line, None for other objects."""
    kind = row.get("type")
    if kind == "bench":
        return (f"{row['model']} {row['precision']} on {row['device']}, {row['contestant']}: {row['step_ms_median']:.1f} ms a "
                f"step, {row['ratio_median']:.3f} of the unsharded step, peak {row['peak_mib']:.0f} MiB")
    if kind == "python_step":
        return (f"{row['model']} {row['precision']} on {row['device']} from Python, {row['contestant']}: "
                f"{row['step_ms_median']:.1f} ms a step ({row['step_ms_min']:.1f} to {row['step_ms_max']:.1f}), peak "
                f"{row['peak_mib']:.0f} MiB")
    if kind == "kernel":
        return f"{row['kernel']}: {row['gb_per_s_median']:.0f} GB/s, {row['share_of_copy_median']:.2f} of a copy"
    if kind == "bench_checkpoint":
        theirs = f", PyTorch {statistics.median(row['pytorch_ms']):.0f} ms" if row.get("pytorch_ms") else ""
        return f"checkpoint, {row['timed']}: {statistics.median(row['ours_ms']):.0f} ms{theirs}"
    return None


def page(results, stages, json_of):
    machine = results["machine"]
    gpu = ", ".join(machine["gpus"]) or "no GPU"
    lines = [f"# GPU run of {results['begun']}", "",
             f"{gpu}; torch {machine['torch']} for Python {machine['python']}; {machine['cores']} cores; "
             f"seed {results['seed']}.", ""]
    first = results.get("first_verdict_seconds")
    if first is not None:
        lines += [f"From the start of ci/gpu to the verdict of the first kernel: {first:.1f} s.", ""]
    lines += [f"- {note}" for note in results["notes"]] + [""]
    lines += ["| stage | | seconds | |", "|---|---|---|---|"]
    for stage in stages:
        result = results["stages"].get(stage.name, {"status": "not run", "seconds": 0, "detail": ""})
        title, detail = (text.replace("|", "\\|") for text in (stage.title, result["detail"]))
        lines.append(f"| {stage.name}: {title} | **{result['status']}** | {result['seconds']:.0f} | {detail} |")
    figures = [text for stage in stages for text in map(figure, rows_of(json_of(stage))) if text]
    if figures:
        lines += ["", "## Figures", ""] + [f"- {text}" for text in figures]
    return "\n".join(lines) + "\n"
