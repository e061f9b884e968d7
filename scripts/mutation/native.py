"""A random sample of small changes of the native drivers, each run with the native tests at the generic level.

`scripts/mutate native` runs it. A mutant differs in one token of the scheduling files or of the check of records: a
comparison, a sign, an integer, `&&`, `||`, `min`, `max`, `true`, `false`. Only its file and the library are built anew;
mutants that do not compile are drawn again. A mutant is killed if a test fails, if the process dies, or if it needs
more than three times --seconds of the processor. It survives if no test fails, or if its tests take more than --seconds
("no time": undecided). Tests that take little time run first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
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
TESTS = ("records", "levels", "packs", "decode", "prefixes", "documents", "quantized")
COMPILER = ["g++", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-w", f"-I{SOURCES}"]
KERNEL = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions"]
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
    """The library at the generic level, from objects of which a mutant replaces one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        files = [*SOURCES.glob("abi/*.cc"), *SOURCES.glob("schedule/*.cc")]
        self.objects = {path: folder / f"{path.parent.name}_{path.stem}.o" for path in files}
        for path, target in self.objects.items():
            options = [*KERNEL, "-DUNDIVIDED_LEVEL=generic"] if path.stem == "kernels" else ["-O1"]
            if not target.exists() or target.stat().st_mtime < max(p.stat().st_mtime for p in SOURCES.rglob("*.[hc]*")):
                subprocess.run([*COMPILER, *options, "-c", path, "-o", target], check=True)
        self.library = self._link("original", self.objects)

    def build(self, mutant: Mutant, number: int) -> Path | None:
        """The library with a mutant; None if it does not compile."""
        source, target = self.folder / "mutant.cc", self.folder / "mutant.o"
        source.write_text(mutant.text())
        command = [*COMPILER, "-O1", f"-I{mutant.path.parent}", "-c", source, "-o", target]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            return None
        return self._link(f"mutant{number}", self.objects | {mutant.path: target})

    def _link(self, name: str, objects: dict[Path, Path]) -> Path:
        path = self.folder / f"{name}.so"
        subprocess.run(["g++", "-shared", "-pthread", *objects.values(), "-o", path], check=True)
        return path


def use(library: Path) -> None:
    """Let the native backend of this process load another library."""
    import levels

    cpu.path = lambda: library
    cpu.load.cache_clear()
    levels._library.cache_clear()
    cpu.load().lost_level = (
        None  # a build of the generic level alone notes that it is slow, which tests of notes would see
    )


def test_times(library: Path, items: list[pytest.Item]) -> str:
    """JSON: of each test that passes, its number and its processor time."""
    use(library)
    found = []
    for n, item in enumerate(items):
        begin = time.process_time()
        reports = runtestprotocol(item, log=False, nextitem=items[n + 1] if n + 1 < len(items) else None)
        if all(report.passed for report in reports):
            found.append((n, time.process_time() - begin))
    return json.dumps(found)


def failing_test_with(library: Path, items: list[pytest.Item], seconds: float) -> str:
    """`failing_test` with another library."""
    use(library)
    return failing_test(items, seconds)


class Sample:
    """A pytest plugin that runs the sample in place of the tests."""

    def __init__(self, builder: Builder, chosen: Iterator[Mutant], count: int, seconds: float) -> None:
        self.builder, self.chosen, self.count, self.seconds = builder, chosen, count, seconds

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Print the verdict on each mutant, and the score."""
        text = in_a_child(lambda: test_times(self.builder.library, session.items), DEADLOCK)
        assert text is not None, "the tests did not end"
        times = sorted(json.loads(text), key=lambda row: row[1])
        items = [session.items[n] for n, _ in times]
        print(f"{len(items)} of {len(session.items)} tests pass, in {sum(t for _, t in times):.0f} s", flush=True)
        killed = ran = 0
        while ran < self.count and (mutant := next(self.chosen, None)):
            library = self.builder.build(mutant, ran)
            if library is None:
                continue
            ran += 1
            found = in_a_child(lambda: failing_test_with(library, items, self.seconds), 3 * self.seconds)  # noqa: B023
            killed += found not in ("", NO_TIME)
            verdict = {"": "survived", NO_TIME: "no time", None: "died"}.get(found, f"killed by {found}")
            print(f"{mutant}\n    {verdict}; {killed} of {ran} killed", flush=True)
            library.unlink()
        return True


def main() -> int:
    """Run a sample; returns pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=40, help="of the processor per mutant")
    parser.add_argument("--build", type=Path, default=Path("build/mutation/native"), help="default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [m for pattern in MUTATED for path in sorted(SOURCES.glob(pattern)) for m in mutants(path)]
    random.Random(options.seed).shuffle(found)
    print(f"{len(found)} mutants, seed {options.seed}", flush=True)
    builder = Builder(options.build)
    os.environ["UNDIVIDED_TEST_LEVELS"] = "generic"
    os.environ["UNDIVIDED_ISA"] = "generic"
    tests = [f"tests/backends/native/test_native_{name}.py" for name in TESTS]
    plugin = Sample(builder, iter(found), options.count, options.seconds)
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main())
