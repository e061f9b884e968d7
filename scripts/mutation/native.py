"""A random sample of small changes of the native drivers, each run with a part of the native tests.

`scripts/mutate native` runs it. A mutant differs in one token of the scheduling files or of the check of records: a
comparison, a sign, an integer, `&&`, `||`, `min`, `max`, `true`, `false`. CMake builds all levels once, AMX (and
AVX-512 if it is not here) emulated in C++; of a mutant only its file is compiled, and mutants that do not compile are
drawn again. The tests run at the best level of this machine, and those of all levels also at AMX, whose paths the
others do not have. At most CASES cases of each test function run, chosen by --seed (of ALL_CASES all), and none that
takes longer than SLOW; those that take little time come first. Mutants of the threads also run with the tests of forks.

A mutant is killed if a test fails, if the process dies, does not end, or needs more than three times --seconds of the
processor. It survives if no test fails, or if its tests take more than --seconds ("no time": undecided).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from _pytest.runner import runtestprotocol
from forks import DEADLOCK, NO_TIME, failing_test, in_a_child

from undivided.kernels import cpu

SOURCES = Path("src/undivided/kernels/cpu")
MUTATED = ("abi/check.cc", "schedule/*.cc")
TESTS = ("tests/backends/native/test_native*.py", "tests/backends/native/test_batch_invariant.py")
CASES, SLOW = 16, 0.6
ALL_CASES = "test_native_records"  # quick, and each case is another line of abi/check.cc
TEAM_TESTS = ("test_thread_team.py", "test_native_forks.py", "test_native_library.py")
TOKENS = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*#[^\n]*|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|[A-Za-z_][\w:]*|\d[\w.']*"
    r"|<<|>>|->|\+\+|--|[<>=!+\-*/&|]=|&&|\|\||\S",
    re.DOTALL | re.MULTILINE,
)
CHANGES = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "+=": "-=", "-=": "+=",
    "&&": "||", "||": "&&", "std::min": "std::max", "std::max": "std::min", "true": "false", "false": "true",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed token of a file."""

    path: Path
    start: int
    old: str
    new: str

    def __str__(self) -> str:
        text = self.path.read_text()
        begin, end = text.rfind("\n", 0, self.start) + 1, text.find("\n", self.start)
        line = f"{text[begin : self.start]}[{self.old} -> {self.new}]{text[self.start + len(self.old) : end]}"
        return f"{self.path.relative_to(SOURCES)}:{text.count(chr(10), 0, begin) + 1} {line.strip()}"

    def text(self) -> str:
        """The whole changed file."""
        text = self.path.read_text()
        return text[: self.start] + self.new + text[self.start + len(self.old) :]


def mutants(path: Path) -> Iterator[Mutant]:
    """All mutants of a file, also those that do not compile."""
    for token in TOKENS.finditer(path.read_text()):
        old = token.group()
        new = str(int(old) + 1) if old.isdigit() else CHANGES.get(old)
        if new is not None:
            yield Mutant(path, token.start(), old, new)


class Builder:
    """The library at every level, from objects of which a mutant replaces one."""

    def __init__(self, folder: Path) -> None:
        self.folder, cmake = folder.absolute(), folder.absolute() / "cmake"
        emulated = "AMX" if "avx512_bf16" in cpu.load().levels else "AVX512"  # the latter with AMX
        options = [f"-DUNDIVIDED_EMULATE_{emulated}=ON", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
        subprocess.run(["cmake", "-S", "cmake", "-B", cmake, *options], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["cmake", "--build", cmake, f"-j{os.cpu_count()}"], check=True, stdout=subprocess.DEVNULL)
        self.library = cmake / "libundivided_cpu.so"
        self.commands = {}
        for entry in json.loads((cmake / "compile_commands.json").read_text()):
            path = Path(entry["file"])
            if path.stem != "kernels":
                self.commands[path.relative_to(SOURCES.absolute())] = shlex.split(entry["command"])
        self.levels = [path for path in cmake.rglob("*.o") if path.name.startswith("kernels.")]
        self.drivers = {path: self._compile(SOURCES / path, path, f"{path.stem}.o") for path in self.commands}

    def build(self, mutant: Mutant, number: int) -> Path | None:
        """The library with a mutant; None if it does not compile."""
        source, path = self.folder / f"mutant{os.getpid()}.cc", mutant.path.relative_to(SOURCES)
        source.write_text(mutant.text())
        try:
            changed = self._compile(source, path, f"{source.stem}.o")
        except subprocess.CalledProcessError:
            return None
        library = self.folder / f"mutant{os.getpid()}_{number}.so"
        objects = [*self.levels, *(self.drivers | {path: changed}).values()]
        subprocess.run(["g++", "-shared", "-pthread", *objects, "-o", library], check=True)
        return library

    def _compile(self, source: Path, path: Path, name: str) -> Path:
        """The object of `source`, which stands for the driver `path`: without optimization, which takes longest."""
        command, target = list(self.commands[path]), self.folder / name
        for option, value in (("-o", target), ("-c", source.absolute())):
            command[command.index(option) + 1] = str(value)
        include = f"-I{(SOURCES / path).parent.absolute()}"
        subprocess.run([*command, "-O0", "-w", include], check=True, capture_output=True)
        return target


def use(library: Path) -> None:
    """Let the native backend of this process load another library."""
    import levels

    cpu.path = lambda: library
    cpu.load.cache_clear()
    levels._library.cache_clear()
    cpu.load().lost_level = None  # tests of notes would see it


def choose_levels(builder: Builder) -> None:
    """Tests without a level run at the best level of this machine, those of all levels also at the emulated one."""
    import levels

    best = cpu.load().level
    os.environ["UNDIVIDED_ISA"] = best
    known = cpu.Library(builder.library).levels
    chosen = tuple(dict.fromkeys((best, known[-1])))
    levels.here = lambda: chosen


def some_cases(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """At most CASES of each test function."""
    cases = defaultdict(list)
    for item in items:
        if "every_level_" not in item.name:  # starts processes
            cases[item.nodeid.partition("[")[0]].append(item)
    choose = random.Random(seed)
    most = {name: len(some) if ALL_CASES in name else min(CASES, len(some)) for name, some in cases.items()}
    return [item for name, some in cases.items() for item in choose.sample(some, most[name])]


def test_times(library: Path, items: list[pytest.Item]) -> str:
    """JSON: of each test that passes, its number and its processor time."""
    use(library)
    times = []
    for n, item in enumerate(items):
        begin = time.process_time()
        reports = runtestprotocol(item, log=False, nextitem=items[n + 1] if n + 1 < len(items) else None)
        if all(report.passed for report in reports):
            times.append((n, time.process_time() - begin))
    return json.dumps(times)


def failing_test_with(library: Path, items: list[pytest.Item], seconds: float) -> str:
    """`failing_test` with another library."""
    use(library)
    return failing_test(items, seconds)


def failing_process_test(mutant: Mutant, library: Path, folder: Path) -> str:
    """The first test of forks and teams that fails with a copy of the package that has the mutant; "" if none does."""
    package = folder / f"package{os.getpid()}"
    shutil.copytree("src", package, dirs_exist_ok=True)
    shutil.copy(library, package / "undivided/kernels/cpu/libundivided_cpu.so")
    (package / mutant.path.relative_to("src")).write_text(mutant.text())
    (package / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'Scikit' not in type(f).__name__]\n"
    )
    tests = [f"tests/backends/native/library/{name}" for name in TEAM_TESTS]
    command = [sys.executable, "-m", "pytest", "-xq", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    command += ["-k", "unit_runs_once or fork or child"]
    environment = os.environ | {"PYTHONPATH": str(package)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLOCK)
    except subprocess.TimeoutExpired:
        return "a process that does not end"
    finally:
        shutil.rmtree(package)
    failed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else "a process" if done.returncode else ""


class Sample:
    """A pytest plugin that runs the sample in place of the tests."""

    def __init__(self, builder: Builder, chosen: Iterator[Mutant], options: argparse.Namespace) -> None:
        self.builder, self.chosen, self.options = builder, chosen, options

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Print the verdict on each mutant, and the score."""
        items = self._quick(some_cases(session.items, self.options.seed))
        killed = ran = 0
        while ran < self.options.count and (mutant := next(self.chosen, None)):
            library = self.builder.build(mutant, ran)
            if library is None:
                continue
            ran += 1
            seconds = self.options.seconds
            failure = in_a_child(functools.partial(failing_test_with, library, items, seconds), 3 * seconds)
            if failure == "" and mutant.path.stem == "thread_team":
                failure = failing_process_test(mutant, library, self.builder.folder)
            killed += failure not in ("", NO_TIME)
            verdict = {"": "survived", NO_TIME: "no time", None: "died"}.get(failure, f"killed by {failure}")
            print(f"{mutant}\n    {verdict}; {killed} of {ran} killed", flush=True)
            library.unlink()
        return True

    def _quick(self, items: list[pytest.Item]) -> list[pytest.Item]:
        """The tests that pass and take little time, the shortest first."""
        text = in_a_child(lambda: test_times(self.builder.library, items), DEADLOCK)
        assert text is not None, "the tests did not end"
        times = [(n, seconds) for n, seconds in json.loads(text) if seconds < SLOW]
        print(f"{len(times)} of {len(items)} tests, in {sum(t for _, t in times):.0f} s", flush=True)
        return [items[n] for n, _ in sorted(times, key=lambda row: row[1])]


def main() -> int:
    """Run a sample; returns pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=[""], help="mutants with one of these texts")
    parser.add_argument("--seconds", type=float, default=60, help="of the processor per mutant")
    parser.add_argument("--build", type=Path, default=Path("build/mutation/native"), help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    every = [m for pattern in MUTATED for path in sorted(SOURCES.glob(pattern)) for m in mutants(path)]
    chosen = [m for m in every if any(text in str(m) for text in options.only)]
    random.Random(options.seed).shuffle(chosen)
    print(f"{len(chosen)} mutants, seed {options.seed}", flush=True)
    builder = Builder(options.build)
    sys.path.insert(0, "tests/support/native")  # pytest does so too, but later
    choose_levels(builder)
    tests = [str(path) for pattern in TESTS for path in sorted(Path().glob(pattern))]
    plugin = Sample(builder, iter(chosen), options)
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main())
