"""Benchmarks for a machine that has torch and none of the packages of the command line:

    python -m undivided.benchmarking --device cuda --json benchmark.json

The problems run in a separate process, which is replaced if a kernel faults or hangs; those of --quick come first. The
report is written after every problem, so an interrupted run keeps its results, and --resume continues it. With --warm
all kernels are compiled in parallel before anything is timed. With --ranks the rates are added to a table for selection
(see `undivided ranks`). `undivided bench` does the same with tables and a progress bar.

With --host it prints how long the host takes for small calls, and writes that instead (`overhead.host_times`).
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

from undivided._files import read_json, replace_text
from undivided.benchmarking import markdown, plan
from undivided.benchmarking.catalogue import GPU_SUITES, SUITES
from undivided.benchmarking.competitors import selectable_backends, wrong_entries
from undivided.benchmarking.overhead import HostTime, host_times
from undivided.benchmarking.ranks import add
from undivided.benchmarking.suites import empty_report
from undivided.benchmarking.tasks import TASK_OTHERS, BenchmarkTask, compile_task, others, run_task, settings
from undivided.machine import Machine
from undivided.selection.measured import read
from undivided.verification import workers

TASK_SECONDS = 240.0
"""Time limit of one problem, compiling included."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--suite", action="append", choices=(*SUITES, *GPU_SUITES), help="may be repeated; default: the GPU suites"
    )
    parser.add_argument("--filter", default="", help="run only problems whose suite/name contains this text")
    parser.add_argument(
        "--other", action="append", choices=TASK_OTHERS, help="of the other competitors, only this one; may be repeated"
    )
    parser.add_argument("--host", action="store_true", help="time small calls on the host, and nothing else")
    parser.add_argument("--quick", action="store_true", help="run only a representative selection")
    parser.add_argument("--json", type=Path, help="write the report to this file, after every problem")
    parser.add_argument("--ranks", type=Path, metavar="FILE", help="add the rates to this table for selection")
    parser.add_argument("--resume", action="store_true", help="keep the problems of the report and run the rest")
    parser.add_argument("--seconds", type=float, default=3600.0, help="time limit")
    parser.add_argument("--patience", type=float, default=0.5, help="seconds of timing per problem")
    parser.add_argument(
        "--warm", type=int, default=0, metavar="JOBS", help="compile all kernels first, in this number of processes"
    )
    return parser


def main() -> int:
    """The exit code of the command: 1 if a problem failed or one of our results was wrong, 2 if some were not run."""
    options = _parser().parse_args()
    if options.host:
        return _report_host_times(options.device, options.json)
    deadline = time.monotonic() + options.seconds
    if options.ranks is not None:
        read(options.ranks)  # fail before minutes are spent if the file is not a table
    planned = plan(options.suite or GPU_SUITES, filter=options.filter, quick=options.quick)
    backends = selectable_backends(options.device)
    competing = tuple(options.other or others(options.device))
    fresh = empty_report(planned, settings(options.device, backends, competing, options.patience))
    report = _report_to_continue(options) or fresh
    done_before = {(case["suite"], case["name"]) for case in report["cases"]}
    selected = sorted((*planned.single, *itertools.chain(*planned.small)), key=lambda benchmark: not benchmark.quick)
    tasks = [
        BenchmarkTask(benchmark.suite, benchmark.name, options.device, backends, competing, options.patience)
        for benchmark in selected
        if (benchmark.suite, benchmark.name) not in done_before
    ]
    if options.warm:
        _warm(tasks, options.warm, deadline - time.monotonic())
    _run_tasks(tasks, report, options.json, deadline)
    left = len(tasks) + len(done_before) - len(report["cases"]) - len(report["failed"])
    report["interrupted"] = left > 0
    _write(options.json, report)
    if options.ranks is not None:
        source = options.json.name if options.json is not None else "a report that was not saved"
        print(f"{options.ranks}: {add(report, source, options.ranks)}", file=sys.stderr)
    print(markdown(report))
    if left:
        print(f"not run: {left} (time limit; --resume runs the rest)")
    if report["failed"] or any(map(wrong_entries, report["cases"])):
        return 1
    return 2 if left else 0


def _run_tasks(tasks: list[BenchmarkTask], report: dict[str, Any], path: Path | None, deadline: float) -> None:
    """Run the tasks until the deadline. Each result is added to the report, which is written at once."""
    seconds = max(deadline - time.monotonic(), 0.0)
    for done in workers.work(tasks, run_task, task_seconds=TASK_SECONDS, seconds=seconds):
        name = f"{done.task.suite}/{done.task.name}"
        if done.value is None:
            report["failed"][name] = done.failure
            print(f"FAILED {name}: {' '.join(done.failure.split())[-600:]}", flush=True)
        else:
            report["cases"].append(done.value)
            for entry in wrong_entries(done.value):
                print(f"WRONG {name} {entry['name']}: {entry.get('note') or entry['errors']}", flush=True)
        _write(path, report)


def _report_host_times(device: str, path: Path | None) -> int:
    """Print and write the host's times of small calls; returns the exit code."""
    machine, times = str(Machine.this(device)), list[HostTime]()
    print(machine, flush=True)
    for row in host_times(device):
        if not times or row.problem != times[-1].problem:
            print(row.problem)
        print(f"{row.competitor:>18} {row.microseconds:9.1f} us", flush=True)
        times.append(row)
    _write(path, {"machine": machine, "times": [row._asdict() for row in times]})
    return 0


def _warm(tasks: list[BenchmarkTask], jobs: int, seconds: float) -> None:
    """Compile the kernels of all tasks, in at most half of the time that is left."""
    start, count = time.monotonic(), 0
    for _ in workers.work(tasks, compile_task, jobs=jobs, task_seconds=TASK_SECONDS, seconds=seconds / 2):
        count += 1
    took = time.monotonic() - start
    print(f"compiled for {count} of {len(tasks)} problems in {took:.0f} s", file=sys.stderr, flush=True)


def _report_to_continue(options: argparse.Namespace) -> dict[str, Any] | None:
    """The report that --resume continues, without its failures; None if there is none."""
    if not options.resume or options.json is None or not options.json.exists():
        return None
    report: dict[str, Any] = read_json(options.json)
    return report | {"failed": {}}


def _write(path: Path | None, report: Mapping[str, Any]) -> None:
    """Replace the file by the report; nothing if there is no path."""
    if path is not None:
        replace_text(path, json.dumps(report, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
