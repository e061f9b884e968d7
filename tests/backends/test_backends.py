"""The contract: on every case, every backend is right within its error budget, or refuses with a reason.

Never a wrong number. Inputs are poisoned: NaN is in all memory outside the real lengths, documents and pages, in gaps
of memory, and in the upstream gradients of rows without a key.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import undivided
from undivided import masks
from undivided.arguments import layout as _layout
from undivided.backends import all_backends, get
from undivided.backends._base import Backend
from undivided.verification import contract, inputs, runs
from undivided.verification.budget import distance
from undivided.verification.cases import CASES, Case, by_tag
from undivided.verification.inputs import Inputs

SAMPLED = {"flex": contract.SAMPLE}
"""Backends that compile for every new shape, seconds each: a few cases stand for all."""

BACKENDS = all_backends()
HERE = tuple(backend for backend in BACKENDS if backend.runs_on("cpu"))
FAST_HERE = tuple(backend for backend in HERE if backend.name not in SAMPLED)

LAYOUT_CASES = [
    case
    for case in CASES.values()
    if case.layout != "thd"
    and case.memory == "contiguous"
    and case.page_size is None
    and 0 not in case.sizes
    and case.tags & {"plain", "heads", "causal", "padded", "dropout"}
    and case.needs is None
]
SLOW_IN_THE_INTERPRETER = {
    "one-short-of-tiles-511-by-1023",
    "nine-heads-batch-five",
    "one-past-a-tile-257",
    "window-long-300",
    "lengths-67-by-129",
}
COMPILED_ON_EVERY_CHANGE = {"dense-with-holes"}


def _is_slow(backend: Backend, case: Case, dtype: torch.dtype) -> bool:
    """Whether a test runs only where all do: Triton's interpreter takes seconds for each, as the compiler of
    FlexAttention does, and 16-bit types run the same code as fp32, of which a few cases are enough."""
    if backend.name == "flex":
        return case.name not in COMPILED_ON_EVERY_CHANGE
    half = dtype != torch.float32 and torch.float32 in case.dtypes and case.name not in contract.SAMPLE
    return backend.name == "triton" and (half or case.name in SLOW_IN_THE_INTERPRETER)


def _named(value: object) -> str | None:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value.name if isinstance(value, Backend | Case) else None


def _problems() -> Iterator[Any]:
    """Every case in every dtype with every backend, triton's interpreted; the backend changes fastest, so that all
    share one oracle."""
    for case in CASES.values():
        for dtype in case.dtypes:
            for backend in BACKENDS:
                sample = SAMPLED.get(backend.name)
                if sample is None or (case.name in sample and dtype == torch.float32):
                    marks = [pytest.mark.slow] * _is_slow(backend, case, dtype)
                    yield pytest.param(case, dtype, backend, id=f"{case}-{_named(dtype)}-{backend.name}", marks=marks)


_trial = functools.lru_cache(maxsize=2)(contract.build_case_trial)


def _bytes(built: Inputs) -> list[Tensor]:
    """Every input's memory, gaps and NaN included."""
    tensors = [value.detach() for value in built.arguments.values() if isinstance(value, Tensor)]
    return [torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).clone() for t in tensors]


@pytest.mark.parametrize(("case", "dtype", "backend"), list(_problems()))
def test_right_within_its_budget_or_refused_with_a_reason(case: Case, dtype: torch.dtype, backend: Backend) -> None:
    built, trial = _trial(case, dtype)
    before = _bytes(built)
    outcome = runs.run(backend, trial)
    if not outcome.rows:
        assert all(isinstance(reason, str) and reason.strip() for reason in outcome.reasons)
        with pytest.raises(undivided.NoBackendError) as refused, torch.no_grad():
            built.attention(backend=backend.name)
        assert refused.value.decision.reasons[backend.name]
    wrong = [
        f"{row.quantity}: error {row.error:.2e}, budget {row.budget:.2e} {row.note}"
        for row in outcome.rows
        if not row.ok
    ]
    assert not wrong, "\n".join(wrong)
    for tensor, was in zip(_bytes(built), before, strict=True):
        assert torch.equal(tensor, was), "an input was written to"


@pytest.mark.parametrize("case", list(CASES.values()), ids=str)
def test_the_reference_refuses_nothing(case: Case) -> None:
    built = inputs.build(case)
    problem = undivided.explain(**built.arguments, backend="reference")
    assert problem.chosen is get("reference")


@pytest.mark.parametrize("backend", [b for b in BACKENDS if not b.runs_on("cpu")], ids=_named)
def test_gpu_backends_give_the_missing_gpu_as_reason(backend: Backend) -> None:
    q = torch.randn(1, 8, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(undivided.NoBackendError) as refused:
        undivided.attention(q, q, q, layout="bshd", backend=backend.name)
    assert any(reason.startswith("device=cpu (runs on") for reason in refused.value.decision.reasons[backend.name])


def _run(built: Inputs, backend: Backend) -> dict[str, Tensor]:
    """out, lse and gradients in [B, S, H, D], by name."""
    layout = built.case.layout
    returned = built.attention(backend=backend.name)
    out, lse = returned if built.case.return_lse else (returned, None)
    found: dict[str, Tensor] = {"out": out}
    outputs, grads = [out], [built.grad_out]
    if lse is not None and built.grad_lse is not None:
        found["lse"], outputs, grads = lse, [out, lse], [built.grad_out, built.grad_lse]
    for name, grad in zip(built.leaves, torch.autograd.grad(outputs, list(built.leaves.values()), grads), strict=True):
        found[f"d{name}"] = grad
    in_layout = ("out", "dq", "dk", "dv")
    return {name: _layout.canonical(x, layout) if name in in_layout else x for name, x in found.items()}


def _apart(one: Tensor, other: Tensor, name: str, trial: runs.Trial) -> float:
    """How far two results are apart, in budgets."""
    budget = trial.budget
    return distance(one, other) / budget.scale[name] / budget.max_errors[name]


def _refuses(built: Inputs, backend: Backend) -> bool:
    """Whether it refuses, which it may with a reason."""
    decision = undivided.explain(**built.arguments, backend=backend.name)
    assert decision.chosen is backend or decision.reasons[backend.name]
    return decision.chosen is not backend


@pytest.mark.parametrize(
    "backend",
    [pytest.param(backend, marks=[pytest.mark.slow] * (backend.name == "triton")) for backend in FAST_HERE],
    ids=_named,
)
@pytest.mark.parametrize("case", LAYOUT_CASES, ids=str)
def test_a_layout_is_only_strides(case: Case, backend: Backend) -> None:
    """The same numbers in bshd, sbhd and bhsd give the same result, forward and backward.

    Within the budget, not bitwise: torch's matrix product chooses its blocks by strides.
    """
    first, trial = _trial(case.in_layout("bshd"), torch.float32)
    if _refuses(first, backend):
        return
    want = _run(first, backend)
    for layout in ("sbhd", "bhsd"):
        got = _run(inputs.build(case.in_layout(layout), poison=True), backend)
        for name in want:
            assert _apart(got[name], want[name], name, trial) < 1, f"{name} in {layout}"


@pytest.mark.parametrize("backend", FAST_HERE, ids=_named)
def test_packed_documents_are_a_dense_batch_of_one(backend: Backend) -> None:
    case = CASES["documents-thd-causal"]
    packed, trial = _trial(case, torch.float32)
    if _refuses(packed, backend):
        return
    dense = _run(inputs.build(case.in_layout("bshd")), backend)
    for name, x in _run(packed, backend).items():
        assert _apart(x, dense[name], name, trial) < 1, name


@pytest.mark.parametrize("backend", FAST_HERE, ids=_named)
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "thd"])
@pytest.mark.parametrize("name", ["plain-bshd", "window-left3", "gqa-4"])
def test_the_output_is_contiguous_and_gradients_have_the_strides_of_their_inputs(
    name: str, layout: Any, backend: Backend
) -> None:
    case = CASES[name].in_layout(layout) if layout != "thd" else CASES["documents-thd-causal"]
    built = inputs.build(case)
    if _refuses(built, backend):
        return
    out = built.attention(backend=backend.name)
    out.backward(built.grad_out)
    assert out.is_contiguous()
    for leaf, tensor in built.leaves.items():
        assert tensor.grad is not None
        assert tensor.grad.stride() == tensor.stride(), leaf


class _Copies(TorchDispatchMode):
    """Records every operation that reads q, k or v, except views and the kernel."""

    KERNEL = "_scaled_dot_product_flash_attention_for_cpu"

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self._storages = {t.untyped_storage().data_ptr() for t in tensors}
        self.kernels, self.copies = 0, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        reads = [x for x in args if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in self._storages]
        self.kernels += self.KERNEL in func.name()
        if reads and not func.is_view and self.KERNEL not in func.name() and func.name() != "aten::detach":
            self.copies.append(func.name())
        return result


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("memory", ["contiguous", "packed-qkv"])
@pytest.mark.parametrize("name", ["plain-bshd", "causal-square"])
@pytest.mark.usefixtures("seen_inside")
def test_torch_flash_does_not_copy_its_inputs(name: str, memory: Any, layout: Any) -> None:
    """One forward call and one backward call on the caller's memory: no clone, no contiguous."""
    case = CASES[name].in_layout(layout)
    built = inputs.build(dataclasses.replace(case, memory=memory if layout != "bhsd" else "contiguous"))
    with _Copies(*built.leaves.values()) as seen:
        built.attention(backend="torch_flash").backward(built.grad_out)
    assert seen.kernels == 2
    assert not seen.copies


@pytest.mark.parametrize("backend", FAST_HERE, ids=_named)
@pytest.mark.parametrize("case", by_tag("smoke"), ids=str)
def test_the_same_call_gives_the_same_bits(case: Case, backend: Backend) -> None:
    built = inputs.build(case)
    if _refuses(built, backend):
        return
    first, second = _run(built, backend), _run(built, backend)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("backend", FAST_HERE, ids=_named)
def test_rows_without_a_key_are_zero_next_to_any_garbage(backend: Backend) -> None:
    """Padding rows once came back as NaN from a kernel that multiplies what it masks."""
    q, k, v = (torch.randn(2, 6, 2, 16) for _ in range(3))
    k[1], v[1] = torch.nan, torch.inf
    out = undivided.attention(q, k, v, layout="bshd", mask=masks.lengths([6, 0]), backend=backend.name)
    assert not out[1].any()
    assert out[0].isfinite().all()
