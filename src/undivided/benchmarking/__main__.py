"""Benchmarks without the command line's packages, for a machine that has torch and nothing else:

    python -m undivided.benchmarking --device cuda --json benchmark.json

Each problem runs in a process that is replaced when a kernel breaks or hangs it, problems that stand for others first,
and the report is written after each, so that a run that is cut off keeps what it has; --resume goes on from there. With
--warm, all kernels are compiled before anything is timed, side by side. With --ranks the rates go into a table for
selection (see `undivided ranks`). `undivided bench` is the same with tables and a progress bar.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from undivided._measured import read
from undivided.benchmarking import markdown, plan
from undivided.benchmarking.catalogue import GPU_SUITES, SUITES
from undivided.benchmarking.competitors import rivals
from undivided.benchmarking.ranks import add
from undivided.benchmarking.suites import begun
from undivided.benchmarking.tasks import OTHERS, Task, settings, timed, warmed
from undivided.verification import workers

TASK_SECONDS = 240.0
"""Seconds that one problem may take, compiling included, before its process is ended."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--suite", action="append", choices=(*SUITES, *GPU_SUITES), help="the GPU's if not given")
    parser.add_argument("--filter", default="", help="only what has this in suite/name")
    parser.add_argument("--quick", action="store_true", help="only problems that stand for others")
    parser.add_argument("--json", type=Path, help="write the report here, after every problem")
    parser.add_argument("--ranks", type=Path, metavar="FILE", help="put the rates into this table for selection")
    parser.add_argument("--resume", action="store_true", help="keep the cases of the report, run the rest")
    parser.add_argument("--seconds", type=float, default=3600.0, help="end after this time")
    parser.add_argument("--patience", type=float, default=0.5, help="seconds of timing for one problem")
    parser.add_argument("--warm", type=int, default=0, metavar="JOBS", help="compile first, in so many processes")
    return parser


def main() -> int:
    """Run a suite, print its tables as Markdown, write the report; 1 where we were wrong, 2 where something was not
    run."""
    given = _parser().parse_args()
    until = time.monotonic() + given.seconds
    if given.ranks is not None:
        read(given.ranks)  # what is no table is found before minutes are spent
    planned = plan(given.suite or GPU_SUITES, filter=given.filter, quick=given.quick)
    backends = rivals(given.device)
    report = _report(given, begun(planned, settings(given.device, backends, given.patience)))
    known = {(case["suite"], case["name"]) for case in report["cases"]}
    tasks = [
        Task(one.suite, one.name, given.device, backends, given.patience)
        for one in sorted((*planned.single, *itertools.chain(*planned.small)), key=lambda one: not one.quick)
        if (one.suite, one.name) not in known
    ]
    if given.warm:
        _warm(tasks, given.warm, until - time.monotonic())
    for done in workers.work(tasks, timed, task_seconds=TASK_SECONDS, seconds=max(until - time.monotonic(), 0.0)):
        task = done.task
        if done.value is None:
            report["failed"][f"{task.suite}/{task.name}"] = done.failure
            print(f"FAILED {task.suite}/{task.name}: {' '.join(done.failure.split())[-600:]}", flush=True)
        else:
            report["cases"].append(done.value)
            _print_wrong(done.value)
        _write(given.json, report)
    left = len(tasks) + len(known) - len(report["cases"]) - len(report["failed"])
    report["interrupted"] = left > 0
    _write(given.json, report)
    if given.ranks is not None:
        kept = given.json.name if given.json is not None else "a report that was not kept"
        print(f"{given.ranks}: {add(report, kept, given.ranks)}", file=sys.stderr)
    print(markdown(report))
    if left:
        print(f"not run: {left} (the time was over; --resume runs the rest)")
    return 1 if report["failed"] or any(map(_is_wrong, report["cases"])) else 2 if left else 0


def _warm(tasks: list[Task], jobs: int, seconds: float) -> None:
    """Compile for at most half of the time that is left."""
    start, count = time.monotonic(), 0
    for _ in workers.work(tasks, warmed, jobs=jobs, task_seconds=TASK_SECONDS, seconds=seconds / 2):
        count += 1
    took = time.monotonic() - start
    print(f"compiled for {count} of {len(tasks)} problems in {took:.0f} s", file=sys.stderr, flush=True)


def _report(given: argparse.Namespace, fresh: dict[str, Any]) -> dict[str, Any]:
    if not given.resume or given.json is None or not given.json.exists():
        return fresh
    found: dict[str, Any] = json.loads(given.json.read_text(encoding="utf-8"))
    return found | {"failed": {}}


def _write(path: Path | None, report: Mapping[str, Any]) -> None:
    if path is not None:
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        fresh.replace(path)


def _ours(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [entry for entry in case["entries"] if entry["name"] not in OTHERS]


def _is_wrong(case: Mapping[str, Any]) -> bool:
    return any(not entry["ok"] for entry in _ours(case))


def _print_wrong(case: Mapping[str, Any]) -> None:
    for entry in _ours(case):
        if not entry["ok"]:
            words = entry.get("note") or entry["errors"]
            print(f"WRONG {case['suite']}/{case['name']} {entry['name']}: {words}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
