"""What a profile of torch.profiler or of `bench --profile` says: kernels, operators of the host, and memory over time.

    python bench/read_profile.py TRACE.json...
"""

import collections
import json
import sys

ROWS = 12
POINTS = 20  # of the timeline of memory
KERNELS, HOST = ("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op", "cuda_runtime", "cuda_driver")


def table(events, title):
    """Names by the time that they take, of which what they call is a part."""
    times, counts = collections.Counter(), collections.Counter()
    for event in events:
        times[event["name"]] += event["dur"]
        counts[event["name"]] += 1
    lines = [f"{title}: {len(events)}"]
    return lines + [f"{time / 1e3:10.2f} ms x{counts[name]:<6} {name[:100]}" for name, time in times.most_common(ROWS)]


def on_gpu(event):
    return event["args"].get("Device Type") == 1


def memory(events):
    """The most that was in use in each of POINTS parts of the step: on the GPU, or on the host where no GPU allocates."""
    events = [event for event in events if on_gpu(event)] or events
    if not events:
        return ["memory: no allocations"]
    place = "GPU" if on_gpu(events[0]) else "host"
    begin = min(event["ts"] for event in events)
    length = max(max(event["ts"] for event in events) - begin, 1e-3)
    most = {}
    for event in events:
        part = min(POINTS - 1, int((event["ts"] - begin) / length * POINTS))
        most[part] = max(most.get(part, 0), event["args"]["Total Allocated"])
    top = max(max(most.values()), 1)
    lines = [f"memory of the {place}, at most {top / 2**20:.1f} MiB; from the first allocation to the last, "
             f"{length / 1e3:.1f} ms:"]
    for part, value in sorted(most.items()):
        lines.append(f"{part * length / POINTS / 1e3:10.2f} ms {value / 2**20:10.1f} MiB {'#' * round(40 * value / top)}")
    return lines


def page(trace):
    events = trace["traceEvents"]
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    lines = memory([event for event in events if event.get("name") == "[memory]"])
    lines += table([event for event in timed if event.get("cat") in HOST], "calls of the host")
    kernels = [event for event in timed if event.get("cat") in KERNELS]
    lines += table(kernels, "kernels and copies on the device")
    return lines + [f"{sum(event['dur'] for event in kernels) / 1e3:.1f} ms of kernels; {lines[0].split(';')[0]}"]


def main(paths):
    if not paths:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as file:
            print(f"== {path}", *page(json.load(file, strict=False)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
