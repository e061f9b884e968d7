"""Suites: the benchmarks that run, one after the other, and their report."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import itertools
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from undivided.arguments.checks import as_integer, check_type, checked_flag
from undivided.benchmarking import memory as _memory
from undivided.benchmarking.catalogue import DTYPES, GPU_SUITES, SUITES, Benchmark, benchmarks
from undivided.benchmarking.overhead import BUDGET_MICROSECONDS, overhead
from undivided.benchmarking.runs import Settings, mark_contended, run, run_small
from undivided.errors import InputError, did_you_mean
from undivided.kernels import cpu
from undivided.machine import Machine, processor_name

__all__ = ["SCHEMA", "Plan", "execute", "plan"]

SCHEMA = 1
"""Version of the report; it changes when readers of older reports would misunderstand a new one."""

_OVERHEAD = {False: (31, 200), True: (5, 50)}
"""(turns, calls) of the overhead suite; True is quick."""


@dataclass(frozen=True)
class Plan:
    """The benchmarks to run, in order.

    Attributes:
        single: problems that are timed one by one.
        small: groups of small problems; each group is timed between one pair of probes.
        overhead, memory: whether the overhead of a call and the memory of long sequences are measured.
        quick: whether the run is a quick one.

    >>> from undivided.benchmarking import plan
    >>> planned = plan(["small"], quick=True)
    >>> planned.overhead, planned.quick, planned.steps > 0
    (False, True, True)
    """

    single: tuple[Benchmark, ...]
    small: tuple[tuple[Benchmark, ...], ...]
    overhead: bool
    memory: bool
    quick: bool

    @property
    def steps(self) -> int:
        """The number of progress steps."""
        others = 6 * self.overhead + 2 * self.memory
        return len(self.single) + sum(map(len, self.small)) + others


def plan(
    suites: Sequence[str] = SUITES, dtypes: Sequence[str] = tuple(DTYPES), filter: str = "", quick: bool = False
) -> Plan:
    """The benchmarks of some suites.

    Args:
        suites: names from `SUITES` and `GPU_SUITES`.
        dtypes: names from `DTYPES`; overhead and memory are always measured in fp32.
        filter: text that ``suite/name`` contains, such as ``forward/bf16-d128``; empty selects all.
        quick: select only a representative part.

    Returns:
        A `Plan`, for `execute`.

    Raises:
        InputError: a suite or dtype is unknown, or nothing is selected.

    >>> [benchmark.name for benchmark in plan(["forward"], ["bf16"], quick=True).single]
    ['bf16-d128-2048-full', 'bf16-d128-2048-causal']
    """
    for flag, names, known in (("suite", suites, (*SUITES, *GPU_SUITES)), ("dtype", dtypes, tuple(DTYPES))):
        if not isinstance(names, list | tuple):
            raise InputError(f"{flag}s", "be a list of names", repr(names))
        for name in names:
            if not isinstance(name, str) or name not in known:
                raise InputError(flag, f"be one of {', '.join(known)}", repr(name), did_you_mean(name, known))
    check_type("filter", filter, str, "a str")
    checked_flag("quick", quick)
    selected_dtypes = {DTYPES[name] for name in dtypes}
    selected = [
        benchmark
        for suite in (*SUITES, *GPU_SUITES)
        if suite in suites and suite not in ("overhead", "memory")
        for benchmark in benchmarks(suite)
        if benchmark.dtype in selected_dtypes
        and (benchmark.quick or not quick)
        and filter in f"{suite}/{benchmark.name}"
    ]
    small = [benchmark for benchmark in selected if benchmark.suite == "small"]
    groups = itertools.groupby(small, key=lambda one: (one.dtype, one.backward, one.case.qk_dim))
    planned = Plan(
        tuple(benchmark for benchmark in selected if benchmark.suite != "small"),
        tuple(tuple(group) for _, group in groups),
        "overhead" in suites and filter in "overhead",
        "memory" in suites and filter in "memory",
        quick,
    )
    if not planned.steps:
        raise InputError(
            "filter", "select at least one benchmark", repr(filter), hint="text in suite/name, such as forward/bf16"
        )
    return planned


def execute(
    planned: Plan, settings: Settings, threads: int | None = None, step: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """The report of a plan, as plain values for JSON. An interrupt (Ctrl-C) ends the run and keeps its results so far.

    Args:
        planned: the benchmarks, from `plan`.
        settings: the settings of the run.
        threads: number of threads of every competitor; None is that of torch.
        step: called with the name of each benchmark before it starts.

    Returns:
        The report, for `tables` and `markdown`. If overhead or memory failed, "failed" holds the reason.

    Raises:
        InputError: an argument is wrong.

    >>> from undivided.benchmarking.runs import Settings
    >>> quick = Settings(backends=(), others=("sdpa",), small_patience=0.001, attempts=1)
    >>> report = execute(plan(["small"], ["fp32"], "b1-h1-1-d32"), quick)
    >>> [case["name"] for case in report["cases"]]
    ['fp32-b1-h1-1-d32', 'fp32-b1-h1-1-d32-backward']
    """
    check_type("planned", planned, Plan, "a Plan, from plan()")
    check_type("settings", settings, Settings, "the Settings of a run")
    if threads is not None:
        as_integer("threads", threads, 1)
    if not callable(step):
        raise InputError("step", "be a function of a name", repr(step))
    with _threads(threads):
        report = empty_report(planned, settings)
        try:
            _fill(report, planned, settings, step)
        except KeyboardInterrupt:
            report["interrupted"] = True
    mark_contended(report["cases"])
    return report


def empty_report(planned: Plan, settings: Settings) -> dict[str, Any]:
    """A report without cases: the time, the machine, the commit and the settings."""
    return {
        "schema": SCHEMA,
        **provenance(settings.device),
        "quick": planned.quick,
        "settings": {name: getattr(settings, name) for name in ("backends", "others", "patience", "attempts")}
        | {"clock": "processor time" if settings.clock is time.process_time else "wall time"},
        "interrupted": False,
        "failed": {},
        "cases": [],
    }


def provenance(device: str = "cpu") -> dict[str, Any]:
    """When, on which machine and at which commit a report is measured."""
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"when": when, "machine": machine(device), "commit": commit()}


def _fill(report: dict[str, Any], planned: Plan, settings: Settings, step: Callable[[str], None]) -> None:
    """Run a plan and add each result to the report at once, so that an interrupted run keeps its results."""
    for benchmark in planned.single:
        step(f"{benchmark.suite}: {benchmark.name}")
        report["cases"].append(run(benchmark, settings))
    for group in planned.small:
        report["cases"] += run_small(group, settings, step)
    lengths = _memory.QUICK_LENGTHS if planned.quick else _memory.LENGTHS
    others: dict[str, Callable[[], Any]] = {}
    if planned.overhead:
        others["overhead"] = lambda: _overhead(*_OVERHEAD[planned.quick], step)
    if planned.memory:
        others["memory"] = lambda: _memory.memory(lengths, step=step)
    for name, measure in others.items():
        try:
            report[name] = measure()
        except RuntimeError as error:
            report["failed"][name] = str(error)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    previous = torch.get_num_threads()
    torch.set_num_threads(count or previous)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def _overhead(turns: int, calls: int, step: Callable[[str], None]) -> dict[str, Any]:
    with _threads(1):  # synchronising threads takes longer than these calls
        rows = overhead(turns, calls, lambda name: step(f"overhead: {name}"))
    return {
        "turns": turns,
        "calls": calls,
        "budget_microseconds": BUDGET_MICROSECONDS,
        "problems": [dataclasses.asdict(row) | {"above_backend": row.above_backend} for row in rows],
    }


def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine: processor, instruction sets, threads and versions.

    >>> machine()["threads"] >= 1
    True
    """
    library = cpu.load()
    values = {
        "processor": processor_name(),
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
        values["gpu"] = torch.cuda.get_device_name(device)
        values["libraries"] = str(Machine.this(device))
    return values


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit if this is a checkout, with ``+`` if the sources differ from it; None otherwise."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    return f"{name}+" if name and git("status", "--porcelain", "--", "src", "cmake") else name or None
