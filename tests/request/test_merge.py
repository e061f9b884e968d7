"""Attention over disjoint sets of keys merges into attention over their union."""

from __future__ import annotations

import math

import brute_force
import pytest
import torch
from brute_force import error
from torch import Tensor

import undivided
from undivided import InputError, masks
from undivided.request.result import Result, merge_into

KEYS = 12
SPLITS = {
    "halves": [slice(0, 6), slice(6, 12)],
    "uneven": [slice(0, 1), slice(1, 9), slice(9, 12)],
    "every-key-alone": [slice(n, n + 1) for n in range(KEYS)],
    "interleaved": [slice(n, KEYS, 3) for n in range(3)],
    "out-of-order": [slice(6, 12), slice(0, 6)],
    "one-part": [slice(0, 12)],
    "an-empty-part": [slice(0, 5), slice(5, 5), slice(5, 12)],
}


def qkv(dtype: torch.dtype = torch.float64, requires_grad: bool = False) -> list[Tensor]:
    """[B, S, H, D] with 5 queries, 12 keys, 4 heads over 2."""
    make = torch.Generator().manual_seed(0)
    shapes = ((2, 5, 4, 3), (2, KEYS, 2, 3), (2, KEYS, 2, 6))
    return [torch.randn(s, generator=make, dtype=torch.float64).to(dtype).requires_grad_(requires_grad) for s in shapes]


def parts_of(x: list[Tensor], split: list[slice]) -> tuple[list[Tensor], list[Tensor]]:
    q, k, v = x
    found = [undivided.attention(q, k[:, s], v[:, s], layout="bshd", return_lse=True) for s in split]
    return [out for out, _ in found], [lse for _, lse in found]


@pytest.mark.parametrize("name", SPLITS)
def test_any_split_of_the_keys_merges_to_the_whole_with_its_gradients(name: str) -> None:
    x = qkv(requires_grad=True)
    out, lse = undivided.merge(*parts_of(x, SPLITS[name]))
    want, want_lse = undivided.attention(*x, layout="bshd", return_lse=True)
    assert error(out, want) < 1e-14
    assert error(lse, want_lse) < 1e-14
    pulls = [torch.randn_like(t) for t in (out, lse)]
    got = torch.autograd.grad((out, lse), x, pulls)
    for name_, a, b in zip("qkv", got, torch.autograd.grad((want, want_lse), x, pulls), strict=True):
        assert error(a, b) < 1e-13, name_


@pytest.mark.parametrize("name", ["halves", "an-empty-part"])
def test_sinks_are_applied_once_by_merge_with_their_gradient(name: str) -> None:
    x = qkv(requires_grad=True)
    sinks = torch.tensor([0.0, -3.0, 2.0, 40.0], dtype=torch.float64, requires_grad=True)
    out, lse = undivided.merge(*parts_of(x, SPLITS[name]), sinks=sinks)
    want, want_lse = undivided.attention(*x, layout="bshd", sinks=sinks, return_lse=True)
    assert error(out, want) < 1e-14
    assert error(lse, want_lse) < 1e-14
    pull = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, [*x, sinks], pull), torch.autograd.grad(want, [*x, sinks], pull), strict=True
    ):
        assert error(a, b) < 1e-13


def test_masks_that_are_disjoint_merge_and_a_row_that_no_part_sees_is_empty() -> None:
    x = qkv()
    seen = torch.zeros(5, KEYS, dtype=torch.bool)
    seen[0, :2], seen[1, 2:9], seen[3, ::2] = True, True, True  # rows 2 and 4 see nothing
    left = torch.arange(KEYS) < 4
    parts = [
        undivided.attention(*x, layout="bshd", mask=masks.dense(seen & side), return_lse=True) for side in (left, ~left)
    ]
    out, lse = undivided.merge(*zip(*parts, strict=True), sinks=torch.zeros(4, dtype=torch.float64))
    first = [t.transpose(1, 2) for t in x]
    want, want_lse = brute_force.attend(
        *first, condition=lambda b, h, i, j: bool(seen[i, j]), sinks=torch.zeros(4, dtype=torch.float64)
    )
    assert error(out.transpose(1, 2), want) < 1e-13
    assert error(lse, want_lse) < 1e-13
    assert bool((out[:, [2, 4]] == 0).all())
    assert bool((lse[..., [2, 4]] == -math.inf).all())


def test_rows_without_keys_pass_zero_gradients_and_no_nan() -> None:
    outs = [torch.zeros(1, 2, 1, 3, requires_grad=True) for _ in range(2)]
    lses = [torch.full((1, 1, 2), -math.inf, requires_grad=True) for _ in range(2)]
    sinks = torch.zeros(1, requires_grad=True)
    out, _ = undivided.merge(outs, lses, sinks)
    for grad in torch.autograd.grad(out.sum(), [*outs, *lses, sinks]):
        assert bool((grad == 0).all())


def test_a_part_without_keys_may_hold_garbage_in_its_empty_rows() -> None:
    out, lse = undivided.attention(*qkv(), layout="bshd", return_lse=True)
    merged, merged_lse = undivided.merge(
        [out, torch.full_like(out, math.nan)], [lse, torch.full_like(lse, -math.inf)], layout="bshd"
    )
    assert error(merged, out) < 1e-14
    assert error(merged_lse, lse) < 1e-14


def test_garbage_of_a_part_without_keys_reaches_no_gradient() -> None:
    outs = [torch.randn(1, 2, 1, 4, requires_grad=True), torch.full((1, 2, 1, 4), math.nan, requires_grad=True)]
    lses = [torch.zeros(1, 1, 2, requires_grad=True), torch.full((1, 1, 2), -math.inf, requires_grad=True)]
    out, lse = undivided.merge(outs, lses, layout="bshd")
    gradients = torch.autograd.grad((out.sum(), lse.sum()), [*outs, *lses])
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_packed_parts_merge() -> None:
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, 2, 4, generator=make, dtype=torch.float64).requires_grad_() for _ in range(3))
    documents = masks.documents([0, 4, 9])
    want, want_lse = undivided.attention(q, k, v, layout="thd", mask=documents, return_lse=True)
    half = torch.arange(9) % 2 == 0
    parts = [
        undivided.attention(q, k, v, layout="thd", mask=documents & masks.dense(side.expand(9, 9)), return_lse=True)
        for side in (half, ~half)
    ]
    out, lse = undivided.merge(*zip(*parts, strict=True))
    assert error(out, want) < 1e-14
    assert error(lse, want_lse) < 1e-14
    pull = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), pull), torch.autograd.grad(want, (q, k, v), pull), strict=True):
        assert error(a, b) < 1e-13


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_the_merged_output_keeps_layout_and_dtype(layout: str) -> None:
    order = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}[layout]
    q, k, v = (t.permute(order) for t in qkv(torch.bfloat16))
    axis = {"bshd": 1, "sbhd": 0, "bhsd": 2}[layout]
    parts = [
        undivided.attention(q, k.narrow(axis, *s), v.narrow(axis, *s), layout=layout, return_lse=True)  # type: ignore[call-overload]
        for s in ((0, 7), (7, 5))
    ]
    out, lse = undivided.merge(*zip(*parts, strict=True))
    want, want_lse = undivided.attention(q, k, v, layout=layout, return_lse=True)  # type: ignore[call-overload]
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert out.is_contiguous()
    assert error(out, want) < 2**-8  # each part and the sum are rounded once to 8 bits
    assert error(lse, want_lse) < 1e-6


def test_far_apart_lses_neither_overflow_nor_lose_the_larger() -> None:
    outs = [torch.full((1, 1, 1, 1), value) for value in (1.0, 2.0)]
    out, lse = undivided.merge(outs, [torch.full((1, 1, 1), 3e4), torch.full((1, 1, 1), -3e4)], layout="bshd")
    assert float(out) == 1.0
    assert float(lse) == 3e4


def test_gradients_through_merge_are_those_of_finite_differences() -> None:
    make = torch.Generator().manual_seed(0)
    outs = [torch.randn(1, 3, 2, 2, generator=make, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lses = [torch.randn(1, 2, 3, generator=make, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    sinks = torch.randn(2, generator=make, dtype=torch.float64, requires_grad=True)
    run = lambda *t: undivided.merge(t[:3], t[3:6], t[6])  # noqa: E731
    assert torch.autograd.gradcheck(run, [*outs, *lses, sinks])
    assert torch.autograd.gradgradcheck(run, [*outs, *lses, sinks])


def test_an_ambiguous_layout_is_required() -> None:
    out, lse = torch.randn(2, 4, 4, 8), torch.randn(2, 4, 4)
    with pytest.raises(InputError) as caught:
        undivided.merge([out], [lse])
    assert str(caught.value) == (
        "layout must be given, as [2, 4, 4, 8] fits bshd and bhsd, got None\n  HINT: merge(outs, lses, layout='bshd')"
    )
    for layout in ("bshd", "bhsd"):
        undivided.merge([out], [lse], layout=layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_merging_in_place_is_merging(dtype: torch.dtype) -> None:
    """Nine rows, so that half-precision parts are merged in several pieces; the first two rows see no key."""
    make = torch.Generator().manual_seed(1)
    outs = [torch.randn(2, 9, 4, 6, generator=make, dtype=torch.float64) for _ in range(3)]
    lses = [3 * torch.randn(2, 4, 9, generator=make, dtype=torch.float64) for _ in outs]
    for out, lse in zip(outs, lses, strict=True):
        out[:, :2], lse[..., :2] = 0, -math.inf
    outs = [out.to(dtype) for out in outs]
    total = Result(torch.zeros(2, 9, 4, 6, dtype=torch.float64), torch.full((2, 4, 9), -math.inf, dtype=torch.float64))
    for out, lse in zip(outs, lses, strict=True):
        merge_into(total, Result(out, lse))
    want, want_lse = undivided.merge([out.double() for out in outs], lses, layout="bshd")
    assert error(total.out, want) < 1e-14
    assert torch.equal(total.lse.isinf(), want_lse.isinf())
    assert error(total.lse[..., 2:], want_lse[..., 2:]) < 1e-14


def test_merging_in_place_of_scores_near_the_lowest_number_is_an_average() -> None:
    """fp32 does not represent log(2) beside such an lse: both weights were 1."""
    for lse in (-1e9, torch.finfo(torch.float32).min):
        total = Result(torch.zeros(1, 1, 1, 4), torch.full((1, 1, 1), -math.inf))
        for value in (2.0, 4.0):
            merge_into(total, Result(torch.full((1, 1, 1, 4), value), torch.full((1, 1, 1), lse)))
        assert total.out.unique().tolist() == [3.0]


@pytest.mark.parametrize(("layout", "shape"), [("bshd", "bshd"), ("sbhd", "sbhd"), ("bhsd", "bhsd"), ("thd", "shd")])
def test_a_result_is_viewed_as_bshd_and_back(layout: str, shape: str) -> None:
    sizes = {"b": 1 if layout == "thd" else 2, "s": 3, "h": 4, "d": 5}
    out = torch.randn([sizes[axis] for axis in shape])
    canonical = Result(out, torch.empty(0)).canonical(layout)  # type: ignore[arg-type]
    assert canonical.out.shape == (sizes["b"], 3, 4, 5)
    assert canonical.in_layout(layout).out.equal(out)  # type: ignore[arg-type]
    assert canonical.out[0, 1, 2, 3] == out[tuple({"b": 0, "s": 1, "h": 2, "d": 3}[axis] for axis in shape)]
