# Sourced by the scripts of this folder: where we are, how we speak, how we fail.
# Exit codes everywhere: 0 good, 1 a failed check, 2 wrong usage or environment.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
script=${0##*/}

# say TEXT...: one line of progress with the seconds since this script began.
say() { printf '[%s %4ds] %s\n' "$script" "$SECONDS" "$*"; }

# fail TEXT...: one message that says what to do, then exit code 2.
fail() {
  printf 'ci/%s: %s\n' "$script" "$*" >&2
  exit 2
}

# Compiling against LibTorch takes up to 2 GB a file: as many jobs as cores, and as memory bears.
job_count() {
  local cores memory_gb
  cores=$(nproc)
  memory_gb=$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
  local by_memory=$((memory_gb / 2 > 0 ? memory_gb / 2 : 1))
  echo $((cores < by_memory ? cores : by_memory))
}
