# Sourced after _env.sh: other builds of the native library, and commands that run with one of them.

# A copy of src with this library in it, in the library's folder.
copy_with() { # library
  local build="${1%/*}"
  rm -rf "$build/src" && cp -r src "$build/src"
  cp "$1" "$build/src/undivided/kernels/cpu/"
  # The checkout's package is on sys.path through a finder of its own; -P and PYTHONPATH alone would not replace it.
  printf 'import sys\nsys.meta_path[:] = [f for f in sys.meta_path if "Scikit" not in type(f).__name__]\n' >"$build/sitecustomize.py"
}

# Runs a command with the package of that copy; the status is the command's.
run_with() { # library, command...
  local build
  build="$(cd "${1%/*}" && pwd)"
  shift
  env PYTHONPATH="$build:$build/src:$PWD" "$@"
}

# The levels of this machine, the lowest first.
levels_here() { .venv/bin/python -c 'from undivided.kernels import cpu; print(*cpu.load().levels)'; }
