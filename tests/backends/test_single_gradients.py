"""Gradients of some inputs alone are those of all inputs together.

A backend leaves out what no gradient needs. Frozen layers and constant slopes, sinks and biases are such calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided.errors import NoBackendError
from undivided.verification import inputs
from undivided.verification.cases import CASES, Case

OPTIONAL = ("bias", "sinks", "alibi_slopes")


def _cases() -> Iterator[Any]:
    for case in CASES.values():
        leaves = list(inputs.build(case).leaves)
        for backend in ("native", "reference", "triton"):
            if not leaves or (backend == "triton" and not set(OPTIONAL) & set(leaves)):
                continue
            marks = [pytest.mark.slow] * (backend == "triton")  # its interpreter
            yield pytest.param(case, leaves, backend, id=f"{case}-{backend}", marks=marks)


def _gradients(case: Case, leaves: list[str], backend: str) -> dict[str, Tensor]:
    """The gradients of these inputs, with all others constant."""
    built = inputs.build(case)
    changed = {name: leaf.detach().requires_grad_(name in leaves) for name, leaf in built.leaves.items()}
    given = {**built.arguments, **changed}
    result = undivided.attention(**given, backend=backend)
    out = result[0] if isinstance(result, tuple) else result
    gradient = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    found = torch.autograd.grad(out, [given[name] for name in leaves], gradient)
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize(("case", "leaves", "backend"), list(_cases()))
def test_one_gradient_alone(case: Case, leaves: list[str], backend: str) -> None:
    try:
        together = _gradients(case, leaves, backend)
    except NoBackendError:  # tests/backends/test_backends.py looks at the reasons
        return
    for name in leaves:
        alone = _gradients(case, [name], backend)[name]
        torch.testing.assert_close(alone, together[name], rtol=1e-4, atol=1e-5, equal_nan=True)
