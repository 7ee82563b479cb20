"""Runs one command with a time limit, and says what came of it."""
import os
import re
import signal
import subprocess
import time
import xml.etree.ElementTree

PASSED, FAILED, TIMED_OUT = "passed", "failed", "timed out"
NO_GPU, NO_TIME, NOT_RUN = "no GPU", "no time", "not run"
# Statuses that a stage keeps when a later call continues.
FINAL = (PASSED,)

# What commands, tests and their skips say where no GPU or no driver is.
SAYS_NO_GPU = re.compile(r"CUDA cannot be used here: no (GPU|driver)|needs a GPU and its driver, and this machine shows none"
                         r"|^no (GPU|driver)$", re.MULTILINE)


running = set()  # processes of commands, which stages side by side start in threads


def run(command, log, seconds, environment):
    """The exit code, None where the time was over. The command and all that it started are gone afterwards."""
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"$ {command}\n")
        file.flush()
        process = subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                   env=environment, start_new_session=True)
        running.add(process)
        try:
            return process.wait(timeout=max(seconds, 1))
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_group(process)
            running.discard(process)


def end_group(process):
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        until = time.monotonic() + 5
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)


def count_junit(path):
    """Numbers of tests passed, failed and skipped."""
    try:
        suite = xml.etree.ElementTree.parse(path).getroot()
    except (OSError, xml.etree.ElementTree.ParseError):
        return None
    number = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped", "disabled")}
    failed, skipped = number["failures"] + number["errors"], number["skipped"] + number["disabled"]
    return number["tests"] - failed - skipped, failed, skipped


def count_google_test(output):
    lines = re.findall(r"^\[ +(PASSED|FAILED|SKIPPED) +\] (\d+) tests?", output, re.MULTILINE)
    found = {word: int(count) for word, count in lines}
    return (found.get("PASSED", 0), found.get("FAILED", 0), found.get("SKIPPED", 0)) if found else None


def telling_line(output):
    """The first that a compiler or linker calls an error, else the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("$ ")]
    errors = (line for line in lines if re.search(r"(^|\s)(fatal )?error: |undefined reference", line))
    return next(errors, lines[-1] if lines else "no output")[:200]


def judge(code, output, has_gpu, counts=None):
    """(status, what to say). Tests that are skipped where a GPU is are a failure: something was to be tested and was not."""
    if code is None:
        return TIMED_OUT, telling_line(output)
    counts = counts or count_google_test(output)
    told = f"{counts[0]} passed, {counts[1]} failed, {counts[2]} skipped" if counts else telling_line(output)
    if counts and counts[1] > 0:
        return FAILED, told
    lacks_gpu = counts[2] > 0 if counts else code != 0 and SAYS_NO_GPU.search(output) is not None
    if lacks_gpu:
        return (FAILED if has_gpu else NO_GPU), told
    return (PASSED if code == 0 else FAILED), told if code == 0 else f"exit code {code}: {told}"
