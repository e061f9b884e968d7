"""The default dtype and device of the process change nothing: buffers name both, or a kernel writes past their ends."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided.backends import get
from undivided.verification import contract, inputs
from undivided.verification.cases import CASES, Case

PACKAGE = Path(undivided.__file__).parent


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def _cases() -> Iterator[Any]:
    for case in CASES.values():
        if torch.float32 in case.dtypes:
            yield pytest.param("native", case, id=f"native-{case.name}")
    for backend in ("reference", "torch_flash", "triton"):
        for name in sorted(contract.SAMPLE):
            yield pytest.param(backend, CASES[name], id=f"{backend}-{name}")


@pytest.mark.parametrize(("backend", "case"), list(_cases()))
def test_a_default_dtype_and_device_change_nothing(backend: str, case: Case) -> None:
    def run(built: inputs.Inputs) -> list[Tensor]:
        returned = built.attention(backend=backend)
        outputs = list(returned) if case.return_lse else [returned]
        grads = [built.grad_out, built.grad_lse][: len(outputs)]
        leaves = list(built.leaves.values())
        return [*outputs, *torch.autograd.grad(outputs, leaves, grads)] if leaves else outputs

    changed, plain = inputs.build(case), inputs.build(case)
    if undivided.explain(**plain.arguments, backend=backend).chosen is not get(backend):
        return  # refused
    with defaults(torch.bfloat16, "meta"):
        found = run(changed)
    for one, other in zip(found, run(plain), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("folder", ["backends", "cache", "kernels", "run", "request"])
def test_every_new_tensor_has_a_dtype(folder: str) -> None:
    for path in (PACKAGE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"torch.zeros", "torch.empty", "torch.ones"}:
                assert any(keyword.arg == "dtype" for keyword in node.keywords), f"{path}:{node.lineno}"
