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

# take_targets ARGUMENTS...: puts what stands between a first --build and -- into `targets`, and the rest into `arguments`.
take_targets() {
  targets=() arguments=()
  if [[ ${1:-} == --build ]]; then
    shift
    while [[ $# -gt 0 && $1 != -- ]]; do
      targets+=("$1")
      shift
    done
    [[ $# -eq 0 ]] || shift
  fi
  arguments=("$@")
}

# The newest torch of which there are locks, or the one that .venv has where ci/setup has made one.
torch_of_venv() {
  local stamp=$root/.venv/.shardproof-ready known
  known=$(printf '%s\n' "$root"/ci/requirements/torch-*.in | sed 's/.*torch-//; s/\.in$//' | sort -V | tail -n 1)
  [[ ! -f $stamp ]] || known=$(sed -n 's/.* with torch //p' "$stamp")
  echo "$known"
}

# install_locked NAME [OPTION OF PIP...]: installs what ci/requirements/NAME.lock has into build-NAME, an environment of its own
# for the interpreter $python. It does nothing where that is there, and needs a network only where it is not.
install_locked() {
  local lock=$root/ci/requirements/$1.lock folder=$root/build-$1
  local stamp=$folder/.ready
  [[ ! -f $stamp || $(<"$stamp") != "$(sha256sum <"$lock")" ]] || return 0
  say "installing ci/requirements/$1.lock into build-$1"
  "${python:-python3}" -m venv "$folder" ||
    fail "python3 -m venv failed; its output is above. On Debian: apt-get install python3-venv"
  "$folder/bin/python" -m pip install --quiet --no-input --disable-pip-version-check --require-hashes "${@:2}" -r "$lock" ||
    fail "pip failed; its output is above. Check that this machine reaches a Python package index"
  sha256sum <"$lock" >"$stamp"
}
