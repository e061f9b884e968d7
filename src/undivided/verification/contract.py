"""The contract on a device: every case of the catalogue, in every dtype, on every backend that the machine has.

The tests run it on the CPU. On a GPU it needs neither pytest nor a network: ``scripts/gpu-check --only contract``, or

    python -m undivided.verification.contract --device cuda --jobs 8 --json contract.json

With --jobs the cases run in separate processes: a kernel that faults or hangs loses only its own case, and kernels
compile in parallel. Results are written as they arrive, so an interrupted run keeps its lines.
"""

from __future__ import annotations

import argparse
import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence

import torch

from undivided.arguments.tensors import dtype_name
from undivided.backends import all_backends, get
from undivided.backends._base import Backend
from undivided.machine import Machine
from undivided.request.request import Tensors
from undivided.verification import inputs, lines, runs
from undivided.verification.cases import CASES, Case
from undivided.verification.inputs import Inputs
from undivided.verification.lines import Line, Task, command_parser

COMPILES = frozenset({"flex"})
"""Backends that compile for seconds for every new shape: they run only the cases of `SAMPLE`."""
SAMPLE = frozenset({"gqa-4", "documents-thd-causal", "dense-with-holes", "predicate-even-distances"})

TASK_SECONDS = 180.0
"""Time limit of one case on all backends, compiling included."""


def build_case_trial(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[Inputs, runs.Trial]:
    """The inputs of a case, with NaN in all memory that must not be read, and the trial of these for the backends."""
    call_inputs = inputs.build(case, dtype, device=device, poison=True)
    rest = dict(call_inputs.arguments)
    tensors = {name: rest.pop(name, None) for name in Tensors._fields}
    layout = rest.pop("layout")
    gradients = case.needs is None or bool(case.needs)
    grads = (call_inputs.grad_out, call_inputs.grad_lse)
    return call_inputs, runs.build_trial(tensors, layout, rest, gradients, grads)


def available(device: str) -> tuple[Backend, ...]:
    """The backends that this machine has for tensors on the device."""
    machine, kind = Machine.this(device), device.split(":")[0]
    return tuple(backend for backend in all_backends() if backend.runs_on(kind) and not backend.unavailable(machine))


def tasks(device: str, backends: Sequence[Backend], cases: Iterable[Case]) -> list[Task]:
    """All tasks, bf16 first, so that an interrupted run has tried every case."""
    planned = []
    for case in cases:
        for dtype in case.dtypes:
            names = tuple(
                backend.name
                for backend in backends
                if backend.name not in COMPILES or (case.name in SAMPLE and dtype == torch.bfloat16)
            )
            if names:
                planned.append(Task(device, case.name, dtype_name(dtype), names))
    return sorted(planned, key=lambda task: task.dtype != "bfloat16")


def contract(
    device: str, backends: tuple[Backend, ...] | None = None, cases: tuple[Case, ...] = tuple(CASES.values())
) -> list[Line]:
    """The lines of a run in this process.

    Args:
        device: the device of the tensors.
        backends: the backends to run; None is all that this machine has.
        cases: the cases to run.
    """
    selected = available(device) if backends is None else backends
    return [line for task in tasks(device, selected, cases) for line in task_lines(task)]


def task_lines(task: Task) -> list[Line]:
    """One line for each backend of a task."""
    dtype = getattr(torch, task.dtype)
    trial = functools.cache(lambda: build_case_trial(CASES[task.case], dtype, task.device)[1])
    return [Line(task.case, task.dtype, name, *_verdict(get(name), trial)) for name in task.backends]


def _verdict(backend: Backend, trial: Callable[[], runs.Trial]) -> tuple[str, tuple[str, ...]]:
    """(verdict, details) of one backend."""
    try:
        outcome = runs.run(backend, trial())
    except Exception as error:  # the failure of one kernel is a line of the report; the others still run
        return "wrong", (f"raised {type(error).__name__}: {error}", traceback.format_exc(limit=-6))
    for verdict, undecided in (("wrong", False), ("undecided", True)):
        rows = [row for row in outcome.rows if not row.ok and row.undecided is undecided]
        if rows:
            return verdict, tuple(
                f"{row.quantity}: error {row.error:.2e}, budget {row.budget:.2e} {row.note}".rstrip() for row in rows
            )
    return ("right", ()) if outcome.rows else ("refused", outcome.reasons)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(__doc__, "run only cases whose names contain this text")
    parser.add_argument("--backend", action="append", help="run only this backend; may be repeated")
    parser.add_argument("--jobs", type=int, default=0, help="number of processes; 0 runs in this one, without limit")
    return parser


def main() -> int:
    """The exit code of the command: 1 if anything was wrong, 2 if something was not run or is undecided."""
    arguments = _parser().parse_args()
    print(f"{Machine.this(arguments.device)}", flush=True)
    names = arguments.backend or [backend.name for backend in available(arguments.device)]
    cases = [case for case in CASES.values() if arguments.filter in case.name]
    planned = tasks(arguments.device, [get(name) for name in names], cases)
    return lines.run(planned, task_lines, arguments, TASK_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
