# Sourced by the scripts beside it: enter the repository and make .venv hold what pyproject.toml and constraints.txt ask for.
# A first run creates it; later runs cost one checksum.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# CMake takes make by default, which many images with ninja lack
if [ -z "${CMAKE_GENERATOR:-}" ] && ! command -v make >/dev/null && command -v ninja >/dev/null; then
  export CMAKE_GENERATOR=Ninja
fi

say() { printf 'undivided: %s\n' "$*" >&2; }

make_venv() {
  local python
  for python in python3 python3.13 python3.12 python3.11 python3.14 python; do
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null || continue
    say "creating .venv with $("$python" --version)"
    "$python" -m venv .venv && return
  done
  say "a Python from 3.11 to 3.14 with its venv module is needed, and none was found"
  return 1
}

# What the environment depends on besides the packages: the folder, because a moved or copied one points at the old sources;
# the native library's sources; and what this processor can run, because the library has no levels beyond it.
stamp() {
  {
    pwd
    cat pyproject.toml constraints.txt cmake/CMakeLists.txt cmake/*.cc src/undivided/kernels/cpu/*/*.{h,cc}
    grep -m 1 -E '^(flags|Features)' /proc/cpuinfo 2>/dev/null || true
  } | cksum
}

is_current() { [ "$(cat .venv/undivided-stamp 2>/dev/null)" = "$(stamp)" ]; }

install() {
  local stamp
  stamp="$(stamp)"
  .venv/bin/python -m pip --version >/dev/null 2>&1 || make_venv
  say "installing the package, torch and the development tools into .venv (minutes the first time)"
  .venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev,docs]" \
    -C cmake.define.UNDIVIDED_HIGHEST_LEVEL=native </dev/null >&2
  printf '%s\n' "$stamp" >.venv/undivided-stamp
}

set_up() {
  is_current && return
  ( # of two scripts at a time, one installs and the other waits for it
    if command -v flock >/dev/null; then flock 9; fi
    is_current || install
  ) 9<pyproject.toml
}

set_up
