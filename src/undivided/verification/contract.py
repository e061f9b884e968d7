"""The contract on a device: every case of the catalogue, in every dtype, with every backend that the machine has.

The tests run it on the CPU; on a GPU it needs neither pytest nor a network: ``scripts/gpu-check --only contract``, or

    python -m undivided.verification.contract --device cuda --jobs 8 --json contract.json

With --jobs the cases run in processes of their own, so that a kernel that faults or hangs costs its case alone, and
kernels are compiled side by side. What is known is written as it comes: a run that is cut off leaves its lines.
"""

from __future__ import annotations

import argparse
import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from undivided._machine import Machine
from undivided.backends import all_backends, get
from undivided.backends._base import Backend
from undivided.verification import inputs, runs
from undivided.verification.cases import CASES, Case
from undivided.verification.inputs import DIFFERENTIABLE, Inputs
from undivided.verification.lines import Line, Lines, Task, in_processes, pending

COMPILES = frozenset({"flex"})
"""Backends that compile for every new shape, seconds each: `SAMPLE` stands for all cases."""
SAMPLE = frozenset({"gqa-4", "documents-thd-causal", "dense-with-holes", "predicate-even-distances"})

PATIENCE = 180.0
"""Seconds that one case may take with all backends, compiling included, before its process is ended."""


def asked(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[Inputs, runs.Request]:
    """A case's tensors, with NaN wherever nothing may look, and the request that backends are run on."""
    built = inputs.build(case, dtype, device=device, poison=True)
    rest = dict(built.arguments)
    tensors = {name: rest.pop(name, None) for name in DIFFERENTIABLE}
    layout = rest.pop("layout")
    gradients = case.needs is None or bool(case.needs)
    return built, runs.request(tensors, layout, rest, gradients, (built.grad_out, built.grad_lse))


def available(device: str) -> tuple[Backend, ...]:
    """Every backend that this machine has for tensors on the device."""
    machine, kind = Machine.this(device), device.split(":")[0]
    return tuple(
        backend for backend in all_backends() if kind in backend.limits.devices and not backend.unavailable(machine)
    )


def tasks(device: str, backends: Sequence[Backend], cases: Iterable[Case]) -> list[Task]:
    """What there is to do: bf16 of all cases first, so that a run that is cut off has seen every case."""
    found = []
    for case in cases:
        for dtype in case.dtypes:
            name = _named(dtype)
            chosen = tuple(
                backend.name
                for backend in backends
                if backend.name not in COMPILES or (case.name in SAMPLE and dtype == torch.bfloat16)
            )
            if chosen:
                found.append(Task(device, case.name, name, chosen))
    return sorted(found, key=lambda task: task.dtype != "bfloat16")


def contract(
    device: str,
    backends: tuple[Backend, ...] | None = None,
    cases: tuple[Case, ...] = tuple(CASES.values()),
    told: Callable[[Line], None] = lambda line: None,
) -> list[Line]:
    """Run it in this process.

    Args:
        device: where the tensors are.
        backends: all that this machine has if None.
        told: called with each line as it is known.
    """
    chosen = available(device) if backends is None else backends
    lines = []
    for task in tasks(device, chosen, cases):
        for line in lines_of(task):
            told(line)
            lines.append(line)
    return lines


def lines_of(task: Task) -> list[Line]:
    """A line for each backend of a task."""
    dtype = getattr(torch, task.dtype)
    known = functools.cache(lambda: asked(CASES[task.case], dtype, task.device)[1])
    return [Line(task.case, task.dtype, name, *_verdict(get(name), known)) for name in task.backends]


def _verdict(backend: Backend, known: Callable[[], runs.Request]) -> tuple[str, tuple[str, ...]]:
    try:
        outcome = runs.run(backend, known())
    except Exception as error:  # one kernel's failure is a line of the report, and the others still run
        return "wrong", (f"raised {type(error).__name__}: {error}", traceback.format_exc(limit=-6))
    wrong = tuple(
        f"{row.quantity}: error {row.error:.2e}, budget {row.budget:.2e} {row.note}".rstrip()
        for row in outcome.rows
        if not row.ok
    )
    if wrong:
        return "wrong", wrong
    return ("right", ()) if outcome.rows else ("refused", outcome.reasons)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", action="append", help="only this one; may be repeated")
    parser.add_argument("--filter", default="", help="only cases that have this in their name")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0 runs in this one")
    parser.add_argument("--seconds", type=float, default=3600.0, help="end after this time, with --jobs")
    parser.add_argument("--json", type=Path, help="write every line here, as it comes")
    parser.add_argument("--resume", action="store_true", help="keep the lines of the file, run the rest")
    return parser


def main() -> int:
    """The command: a line for each wrong answer, a count for each backend; 1 if anything was wrong, 2 if some was not
    run."""
    arguments = _parser().parse_args()
    print(f"{Machine.this(arguments.device)}", flush=True)
    named = arguments.backend or [backend.name for backend in available(arguments.device)]
    cases = [case for case in CASES.values() if arguments.filter in case.name]
    planned = tasks(arguments.device, [get(name) for name in named], cases)
    report = Lines(arguments.json, arguments.resume)
    left = pending(planned, report.lines)
    found = (
        in_processes(left, lines_of, jobs=arguments.jobs, seconds=arguments.seconds, patience=PATIENCE)
        if arguments.jobs
        else (line for task in left for line in lines_of(task))
    )
    try:
        for line in found:
            report.add(line)
    finally:
        report.write()
    return report.end(planned)


if __name__ == "__main__":
    sys.exit(main())
