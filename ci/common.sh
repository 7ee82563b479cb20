# The scripts of this folder source this file. It has the root of the tree, progress lines and errors.
# All of them exit with 0 if all is well, with 1 if a check failed, and with 2 for wrong usage or environment.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
script=${0##*/}

# say TEXT...: prints one line of progress, with the seconds since the script began.
say() { printf '[%s %4ds] %s\n' "$script" "$SECONDS" "$*"; }

# fail TEXT...: prints one message, which says what to do, and exits with 2.
fail() {
  printf 'ci/%s: %s\n' "$script" "$*" >&2
  exit 2
}

# Prints how many jobs a build may run: one for each core, but compiling a file against LibTorch takes up to 2 GB of memory.
job_count() {
  local cores memory_gb
  cores=$(nproc)
  memory_gb=$(awk '/^MemAvailable/ {print int($2 / 1048576)}' /proc/meminfo)
  local by_memory=$((memory_gb / 2 > 0 ? memory_gb / 2 : 1))
  echo $((cores < by_memory ? cores : by_memory))
}
