"""Suites: which benchmarks run, one after the other, and the report they make."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import itertools
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from undivided._machine import Machine
from undivided.benchmarking import memory as _memory
from undivided.benchmarking.catalogue import DTYPES, GPU_SUITES, SUITES, Benchmark, benchmarks
from undivided.benchmarking.overhead import BUDGET_MICROSECONDS, overhead
from undivided.benchmarking.runs import Settings, run, run_small
from undivided.errors import InputError
from undivided.kernels import cpu

__all__ = ["SCHEMA", "Plan", "execute", "plan"]

SCHEMA = 1
"""Of the report; it changes when a reader of an older one would misunderstand it."""

_OVERHEAD = {False: (31, 200), True: (5, 50)}
"""(turns, calls) of the study of the overhead; True is quick."""


@dataclass(frozen=True)
class Plan:
    """What will run: single problems, groups of small ones, and whether the overhead and the memory are looked at."""

    single: tuple[Benchmark, ...]
    small: tuple[tuple[Benchmark, ...], ...]
    overhead: bool
    memory: bool
    quick: bool

    @property
    def steps(self) -> int:
        """How many steps of progress it takes."""
        few = 6 * self.overhead + 2 * self.memory
        return len(self.single) + sum(map(len, self.small)) + few


def plan(
    suites: Sequence[str] = SUITES, dtypes: Sequence[str] = tuple(DTYPES), filter: str = "", quick: bool = False
) -> Plan:
    """Choose benchmarks.

    Args:
        suites: of `SUITES` and `GPU_SUITES`. dtypes: of `DTYPES`; the overhead and the memory are looked at in fp32.
        filter: a part of ``suite/name``, such as ``forward/bf16-d128``; empty for all.
        quick: only those that stand for others.

    Raises:
        InputError: an unknown suite or dtype, or nothing is left.

    >>> [benchmark.name for benchmark in plan(["forward"], ["bf16"], quick=True).single]
    ['bf16-d128-2048-full', 'bf16-d128-2048-causal']
    """
    for flag, words, known in (("suite", suites, (*SUITES, *GPU_SUITES)), ("dtype", dtypes, tuple(DTYPES))):
        for word in words:
            if word not in known:
                raise InputError(flag, f"be one of {', '.join(known)}", repr(word))
    wanted = {DTYPES[name] for name in dtypes}
    chosen = [
        benchmark
        for suite in (*SUITES, *GPU_SUITES)
        if suite in suites and suite not in ("overhead", "memory")
        for benchmark in benchmarks(suite)
        if benchmark.dtype in wanted and (benchmark.quick or not quick) and filter in f"{suite}/{benchmark.name}"
    ]
    small = [benchmark for benchmark in chosen if benchmark.suite == "small"]
    groups = itertools.groupby(small, key=lambda one: (one.dtype, one.backward, one.case.qk_dim))
    made = Plan(
        tuple(benchmark for benchmark in chosen if benchmark.suite != "small"),
        tuple(tuple(group) for _, group in groups),
        "overhead" in suites and filter in "overhead",
        "memory" in suites and filter in "memory",
        quick,
    )
    if not made.steps:
        raise InputError(
            "filter", "leave something to run", repr(filter), hint="parts of suite/name, such as forward/bf16"
        )
    return made


def execute(
    planned: Plan, settings: Settings, threads: int | None = None, step: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Run a plan; the report holds nothing but what JSON can. An interrupt (Ctrl-C) ends it with what was found so far.

    Args:
        planned, settings: what, and how. threads: of every competitor; torch's own number if None.
        step: called with the name of each benchmark as it begins.

    Returns:
        The report; "failed" says why the overhead or the memory is not in it, where it was asked for.
    """
    with _threads(threads):
        report = begun(planned, settings)
        try:
            _fill(report, planned, settings, step)
        except KeyboardInterrupt:
            report["interrupted"] = True
    return report


def begun(planned: Plan, settings: Settings) -> dict[str, Any]:
    """A report without a case: where and when, of what, and how."""
    return {
        "schema": SCHEMA,
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(settings.device),
        "commit": commit(),
        "quick": planned.quick,
        "settings": {name: getattr(settings, name) for name in ("backends", "others", "patience", "attempts")},
        "interrupted": False,
        "failed": {},
        "cases": [],
    }


def _fill(report: dict[str, Any], planned: Plan, settings: Settings, step: Callable[[str], None]) -> None:
    """Run a plan into a report, one finding after the other, so that what was found is kept whatever comes."""
    for benchmark in planned.single:
        step(f"{benchmark.suite}: {benchmark.name}")
        report["cases"].append(run(benchmark, settings))
    for group in planned.small:
        report["cases"] += run_small(group, settings, step)
    lengths = _memory.QUICK_LENGTHS if planned.quick else _memory.LENGTHS
    further: dict[str, Callable[[], Any]] = {}
    if planned.overhead:
        further["overhead"] = lambda: _overhead(*_OVERHEAD[planned.quick], step)
    if planned.memory:
        further["memory"] = lambda: _memory.memory(lengths, step=step)
    for name, look in further.items():
        try:
            report[name] = look()
        except RuntimeError as error:
            report["failed"][name] = str(error)


@contextlib.contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _overhead(turns: int, calls: int, step: Callable[[str], None]) -> dict[str, Any]:
    with _threads(1):  # threads would wait for each other longer than these calls last
        rows = overhead(turns, calls, lambda name: step(f"overhead: {name}"))
    return {
        "turns": turns,
        "calls": calls,
        "budget_microseconds": BUDGET_MICROSECONDS,
        "problems": [dataclasses.asdict(row) | {"above_backend": row.above_backend} for row in rows],
    }


def machine(device: str = "cpu") -> dict[str, Any]:
    """What ran: the processor, its instruction sets, threads, and versions.

    >>> machine()["threads"] >= 1
    True
    """
    library = cpu.load()
    found = {
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "native": library if isinstance(library, str) else library.level,
        "UNDIVIDED_ISA": os.environ.get("UNDIVIDED_ISA"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "undivided": _version("undivided"),
        "onnxruntime": _version("onnxruntime"),
    }
    if device != "cpu":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["libraries"] = str(Machine.this(device))
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of a checkout, where this is one, with ``+`` where sources differ from it."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    return f"{name}+" if name and git("status", "--porcelain", "--", "src", "cmake") else name or None
