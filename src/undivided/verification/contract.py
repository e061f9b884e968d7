"""The contract on a device: every case of the catalogue, in every dtype, with every backend that the machine has.

The tests run it on the CPU; on a GPU it needs neither pytest nor a network: ``scripts/gpu-check``, or

    python -m undivided.verification.contract --device cuda
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from undivided._machine import Machine
from undivided.backends import all_backends
from undivided.backends._base import Backend
from undivided.verification import inputs, runs
from undivided.verification.cases import CASES, Case
from undivided.verification.inputs import DIFFERENTIABLE, Inputs

COMPILES = frozenset({"flex"})
"""Backends that compile for every new shape, seconds each: `SAMPLE` stands for all cases."""
SAMPLE = frozenset({"gqa-4", "documents-thd-causal", "dense-with-holes", "predicate-even-distances"})


class Line(NamedTuple):
    """One case in one dtype with one backend: verdict "right", "wrong" or "refused", and what was wrong or why refused."""

    case: str
    dtype: str
    backend: str
    verdict: str
    detail: tuple[str, ...]


def asked(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[Inputs, runs.Request]:
    """A case's tensors, with NaN wherever nothing may look, and the request that backends are run on."""
    built = inputs.build(case, dtype, device=device, poison=True)
    rest = dict(built.arguments)
    tensors = {name: rest.pop(name, None) for name in DIFFERENTIABLE}
    layout = rest.pop("layout")
    gradients = case.needs is None or bool(case.needs)
    return built, runs.request(tensors, layout, rest, gradients, (built.grad_out, built.grad_lse))


def contract(
    device: str, backends: tuple[Backend, ...] | None = None, cases: tuple[Case, ...] = tuple(CASES.values()),
    told: Callable[[Line], None] = lambda line: None,
) -> list[Line]:  # fmt: skip
    """Run it.

    Args:
        device: where the tensors are.
        backends: all that this machine has if None.
        told: called with each line as it is known.
    """
    machine = Machine.this(device)
    if backends is None:
        backends = tuple(
            backend
            for backend in all_backends()
            if device.split(":")[0] in backend.limits.devices and not backend.unavailable(machine)
        )
    lines = []
    for line in _lines(device, backends, cases):
        told(line)
        lines.append(line)
    return lines


def _lines(device: str, backends: tuple[Backend, ...], cases: tuple[Case, ...]) -> Iterator[Line]:
    for case in cases:
        for dtype in case.dtypes:
            name = str(dtype).removeprefix("torch.")
            known = functools.cache(lambda case=case, dtype=dtype: asked(case, dtype, device)[1])
            for backend in backends:
                if backend.name in COMPILES and (case.name not in SAMPLE or dtype != torch.float16):
                    continue
                yield Line(case.name, name, backend.name, *_verdict(backend, known))


def _verdict(backend: Backend, known: Callable[[], runs.Request]) -> tuple[str, tuple[str, ...]]:
    try:
        outcome = runs.run(backend, known())
    except Exception as error:  # one kernel's failure is a line of the report, and the others still run
        return "wrong", (f"raised {type(error).__name__}: {error}",)
    wrong = tuple(
        f"{row.quantity}: error {row.error:.2e}, budget {row.budget:.2e} {row.note}".rstrip()
        for row in outcome.rows
        if not row.ok
    )
    if wrong:
        return "wrong", wrong
    return ("right", ()) if outcome.rows else ("refused", outcome.reasons)


def main() -> int:
    """The command: a line for each wrong answer, a count for each backend; 1 where anything was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", action="append", help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="write every line here")
    arguments = parser.parse_args()
    chosen = None
    if arguments.backend:
        chosen = tuple(backend for backend in all_backends() if backend.name in arguments.backend)

    def told(line: Line) -> None:
        if line.verdict == "wrong":
            print(
                f"WRONG {line.backend} {line.case} {line.dtype}: {'; '.join(line.detail)[:400]}", flush=True
            )

    print(f"{Machine.this(arguments.device)}", flush=True)
    lines = contract(arguments.device, chosen, told=told)
    for name in sorted({line.backend for line in lines}):
        counts = dict.fromkeys(("right", "wrong", "refused"), 0)
        for line in lines:
            if line.backend == name:
                counts[line.verdict] += 1
        print(f"{name}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps([line._asdict() for line in lines], indent=1) + "\n")
    return int(any(line.verdict == "wrong" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
