"""Benchmarks without the command line's packages, for a machine that has torch and nothing else:

    python -m undivided.benchmarking --device cuda --suite gpu --json benchmark.json

`undivided bench` is the same with tables and a progress bar.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from undivided._machine import Machine
from undivided.backends import all_backends
from undivided.benchmarking import execute, markdown, plan
from undivided.benchmarking.catalogue import GPU_SUITES, SUITES
from undivided.benchmarking.runs import Settings


def main() -> int:
    """Run a suite, print its tables as Markdown, write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--suite", action="append", choices=(*SUITES, *GPU_SUITES), help="gpu if not given")
    parser.add_argument("--filter", default="", help="only what has this in suite/name")
    parser.add_argument("--quick", action="store_true", help="only problems that stand for others")
    parser.add_argument("--json", type=Path, help="write the report here")
    arguments = parser.parse_args()
    planned = plan(arguments.suite or GPU_SUITES, filter=arguments.filter, quick=arguments.quick)
    settings = Settings(_available(arguments.device), ("sdpa", "flex"), arguments.device)
    report = execute(planned, settings, step=lambda name: print(name, file=sys.stderr, flush=True))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print(markdown(report))
    return int(
        any(
            entry["name"] == "undivided" and not entry["ok"]
            for case in report["cases"]
            for entry in case["entries"]
        )
    )


def _available(device: str) -> tuple[str, ...]:
    """Every backend of ours that the machine has, but the reference: at these sizes it takes seconds."""
    machine, kind = Machine.this(device), device.split(":")[0]
    return tuple(
        backend.name
        for backend in all_backends()
        if kind in backend.limits.devices
        and not backend.unavailable(machine)
        and backend.name not in ("reference", "flex")
    )


if __name__ == "__main__":
    sys.exit(main())
