"""Native libraries with other thresholds: the sources of the kernel, and headers in which some values are replaced.

The compile commands are those of cmake/CMakeLists.txt. Only the level in question is compiled; the others are empty
tables, which the library never selects. A library that was built before, from the same sources, is not built again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src/undivided/kernels/cpu"
HEADERS = (SOURCES / "abi/tuning.h", SOURCES / "abi/tuning_levels.h")
BUILDS = ROOT / "build/tune-cpu"
AMX = {"amx": "amx", "amx_bf16": "amx"}
"""The target that compiles a level, if it has another name."""


class BuildError(Exception):
    """A library could not be built; the text is the compiler's first error."""


class Command(NamedTuple):
    """How one object is compiled: the arguments without the output, and the CMake target that it belongs to."""

    arguments: tuple[str, ...]
    target: str


def replaced(header: str, name: str, value: int) -> str:
    """The text of a header with another value of one constant or field, wherever it is set: of a field, at every level.

    Raises:
        BuildError: there is no such constant.
    """
    constant, _, member = name.partition(".")
    pattern = rf"\b{constant} = (\{{[^}}]*\}}|[^,;]+)(?=[,;])"
    struct = re.search(rf"struct (\w+) \{{\s*\w+ ([^;]+);\s*\}};[^;]*?constexpr \1 [^;]*\b{constant} = ", header)
    if member and struct is None:
        raise BuildError(f"{constant} is not a struct")

    def put(match: re.Match[str]) -> str:
        if not member or struct is None:
            return f"{constant} = {value}"
        members = [field.strip() for field in struct[2].split(",")]
        values = [text.strip() for text in match[1].strip("{}").split(",")]
        values[members.index(member)] = str(value)
        return f"{constant} = {{{', '.join(values)}}}"

    text, count = re.subn(pattern, put, header)
    if not count:
        raise BuildError(f"there is no constant {constant}")
    return text


def changed_headers(changes: Mapping[str, int]) -> dict[str, str]:
    """The texts of HEADERS with other values of some constants and fields, by the name of the file.

    Raises:
        BuildError: there is no such constant.
    """
    headers = {path.name: path.read_text("utf-8") for path in HEADERS}
    for name, value in changes.items():
        declared = re.compile(rf"\b{name.partition('.')[0]} = ")
        file = next((file for file, text in headers.items() if declared.search(text)), HEADERS[0].name)
        headers[file] = replaced(headers[file], name, value)
    return headers


class Builder:
    """Builds libraries for one level.

    level: of the native kernel. optimize: replaces -O3 and -O2; "" keeps them. jobs: compilers at a time.
    """

    def __init__(self, level: str, optimize: str = "", jobs: int = 1) -> None:
        self.level, self._optimize, self._jobs = level, optimize, jobs
        self._commands = _commands()
        compiled = {f"level_{AMX.get(level, level)}"} | ({"level_avx512_bf16"} if level in AMX else set())
        self._stubs = sorted(
            {one.target for one in self._commands if one.target.startswith("level_")} - compiled - {"level_"}
        )
        self._used = [one for one in self._commands if one.target not in self._stubs]
        paths = sorted(path for path in SOURCES.glob("*/*") if path.suffix in (".h", ".cc"))
        text = "".join(_without_comments(path.read_text("utf-8")) for path in paths)
        self._sources = hashlib.sha256(f"{text}{self._used}{optimize}".encode()).hexdigest()

    def values(self, names: Iterable[str]) -> dict[str, int]:
        """The current values of constants, as the compiler reads them at this level.

        Raises:
            BuildError: one does not exist.
        """
        names = list(names)
        compiler, *flags = self._compile_of_level().arguments
        places = (name if name.startswith("k") else f"kTuning.{name}" for name in names)
        lines = "".join(f'std::printf("%.0f\\n", (double)undivided::tuning::{place});' for place in places)
        BUILDS.mkdir(parents=True, exist_ok=True)
        source, program = BUILDS / f"values-{os.getpid()}.cc", BUILDS / f"values-{os.getpid()}"
        source.write_text(f'#include <cstdio>\n#include "abi/tuning.h"\nint main() {{ {lines} }}\n', "utf-8")
        try:
            defines = [flag for flag in flags if flag.startswith(("-D", "-I", "-std", "-m"))]
            _run([compiler, *defines, str(source), "-o", str(program)])
            numbers = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout.split()
        finally:
            source.unlink(missing_ok=True)
            program.unlink(missing_ok=True)
        return dict(zip(names, map(int, numbers), strict=True))

    def library(self, changes: Mapping[str, int]) -> Path:
        """The path of the library with these values, built if it was not yet.

        Raises:
            BuildError: a constant does not exist, or the compiler refuses the value.
        """
        headers = changed_headers(changes)
        text = "".join((self._sources, self.level, *map(_without_comments, headers.values())))
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        folder = BUILDS / key
        library = folder / "libundivided_cpu.so"
        if not library.exists():
            self._build(folder, headers, library)
        return library

    def _build(self, folder: Path, headers: Mapping[str, str], library: Path) -> None:
        include = folder / "include/abi"
        include.mkdir(parents=True, exist_ok=True)
        for file, text in headers.items():
            (include / file).write_text(text, "utf-8")
        names = (level for stub in self._stubs for level in _levels_of(stub.removeprefix("level_")))
        tables = "\n".join(f'extern const Kernels kernels_{name} = {{"{name}"}};' for name in names)
        stubs = folder / "stubs.cc"
        stubs.write_text(f'#include "abi/kernels.h"\nnamespace undivided {{\n{tables}\n}}\n', "utf-8")
        small = next(one for one in self._used if one.target == "undivided_cpu")
        work = [(one.arguments, folder / f"{number}.o") for number, one in enumerate(self._used)]
        work.append(((*small.arguments[:-1], "-w", str(stubs)), folder / "stubs.o"))
        with ThreadPoolExecutor(self._jobs) as pool:
            list(pool.map(lambda one: self._compile(one[0], include.parent, one[1]), work))
        objects = [str(path) for _, path in work]
        fresh = library.with_suffix(f".{os.getpid()}")
        _run([small.arguments[0], "-shared", *objects, "-o", str(fresh)])
        fresh.replace(library)
        for path in objects:
            Path(path).unlink()

    def _compile(self, arguments: tuple[str, ...], include: Path, target: Path) -> None:
        compiler, *rest = arguments
        if self._optimize:
            rest = [self._optimize if one in ("-O3", "-O2") else one for one in rest]
        _run([compiler, f"-I{include}", *rest[:-1], "-c", rest[-1], "-o", str(target)])

    def _compile_of_level(self) -> Command:
        target = f"level_{AMX.get(self.level, self.level)}"
        command = next((one for one in self._commands if one.target == target), None)
        if command is None:
            raise BuildError(f"this build has no level {self.level}")
        return command


def _without_comments(text: str) -> str:
    return re.sub(r"\s*//[^\n]*", "", text)


def _levels_of(target: str) -> tuple[str, ...]:
    """The levels that one target compiles."""
    return ("amx", "amx_bf16") if target == "amx" else (target,)


def _commands() -> list[Command]:
    """The compile commands of a fresh configuration; the last argument is the source file.

    Raises:
        BuildError: CMake failed, or there is no compiler.
    """
    folder = BUILDS / "cmake"
    _run([_cmake(), "-S", str(ROOT / "cmake"), "-B", str(folder), "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"])
    commands = []
    for entry in json.loads((folder / "compile_commands.json").read_text("utf-8")):
        words = shlex.split(entry["command"])
        output = words[words.index("-o") + 1]
        skipped = {"-c", "-o", output, words[-1]}
        target = re.search(r"CMakeFiles/(\w+)\.dir", output)
        assert target is not None, output
        commands.append(Command((*(word for word in words if word not in skipped), words[-1]), target[1]))
    return commands


def _cmake() -> str:
    """The cmake of the environment, else of the system."""
    own = ROOT / ".venv/bin/cmake"
    return str(own) if own.exists() else "cmake"


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in lines if "error" in line.lower()]
        raise BuildError((errors or lines or ["failed without a message"])[0])
