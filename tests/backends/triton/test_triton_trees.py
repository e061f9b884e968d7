"""Draft trees of the `triton` backend: the kernel reads the ancestors of each row; nothing is evaluated per pair."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import undivided
from undivided import masks
from undivided.backends.triton import inputs as triton_inputs
from undivided.backends.triton.blocks import all_blocks
from undivided.masks import Mask, NormalForm
from undivided.request.normalise import normalise
from undivided.request.request import Request

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels need a GPU without Triton's interpreter", allow_module_level=True)

PARENTS = [-1, 0, 0, 2, 1, 3]
PACKED = [-1, 0, 0, 2, -1, 0, 1, -1]
QUERIES, KEYS = [0, 4, 7, 8], [0, 55, 76, 140]


def batch(**options: Any) -> dict[str, Any]:
    q, k, v = torch.randn(2, 6, 4, 32), torch.randn(2, 90, 2, 32), torch.randn(2, 90, 2, 32)
    return {"q": q, "k": k, "v": v, "layout": "bshd", "mask": masks.tree(PARENTS), **options}


def of_lengths() -> dict[str, Any]:
    """A tree for each sequence, after prefixes of different lengths; unused keys are NaN."""
    parents = torch.tensor([PARENTS, [-1, -1, 0, 1, 1, 4]])
    lengths = [83, 20]
    arguments = batch(mask=masks.tree(parents) & masks.lengths(lengths))
    for row, length in enumerate(lengths):
        arguments["k"][row, length:] = arguments["v"][row, length:] = torch.nan
    return arguments


def pack(**options: Any) -> dict[str, Any]:
    q, k, v = torch.randn(8, 4, 32), torch.randn(140, 2, 32), torch.randn(140, 2, 32)
    mask = masks.tree(PACKED) & masks.documents(QUERIES, KEYS)
    return {"q": q, "k": k, "v": v, "layout": "thd", "mask": mask, **options}


def pages() -> dict[str, Any]:
    pools = [torch.randn(12, 16, 2, 32) for _ in range(2)]
    table = torch.randperm(12).int().view(2, 6)
    mask = masks.tree(PARENTS) & masks.lengths([90, 33])
    return {"q": torch.randn(2, 6, 4, 32), "k": pools[0], "v": pools[1], "pages": table, "layout": "bshd", "mask": mask}


CALLS = {
    "batch": batch,
    "a tree for each sequence": of_lengths,
    "a pack": pack,
    "pages": pages,
    "softcap": lambda: batch(softcap=3.0),
    "window": lambda: batch(mask=masks.tree(PARENTS) & masks.window(20, 0, align="bottom_right")),
    "one node": lambda: batch(q=torch.randn(2, 1, 4, 32), mask=masks.tree([-1])),
    "bfloat16": lambda: {n: t.bfloat16() if isinstance(t, torch.Tensor) else t for n, t in batch().items()},
}


@pytest.mark.parametrize("name", CALLS)
def test_no_pair_is_evaluated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    arguments = CALLS[name]()
    expected, expected_lse = undivided.attention(**arguments, backend="reference", return_lse=True)

    def evaluated(*arguments: Any) -> None:
        raise AssertionError("the mask was evaluated")

    monkeypatch.setattr(NormalForm, "allowed", evaluated)
    found, lse = undivided.attention(**arguments, backend="triton", return_lse=True)
    tolerance = 1e-5 if found.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_a_tree_with_another_condition_is_evaluated() -> None:
    mask = masks.tree(PARENTS) & masks.predicate(lambda b, h, q, k: (q + k) % 3 != 0)
    arguments = batch(mask=mask)
    found, expected = (undivided.attention(**arguments, backend=name) for name in ("triton", "reference"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_tree_are_those_of_the_reference() -> None:
    arguments = batch()
    for name in "qkv":
        arguments[name].requires_grad_()
    up = torch.randn(2, 6, 4, 32)
    found, expected = (
        torch.autograd.grad(undivided.attention(**arguments, backend=name), [arguments[n] for n in "qkv"], up)
        for name in ("triton", "reference")
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["batch", "a pack", "pages", "window"])
def test_tiles_before_the_tree_need_no_mask(name: str) -> None:
    arguments = CALLS[name]()
    call, tensors = normalise(Request.from_keywords(**arguments))
    inputs = triton_inputs.KernelInputs(call, tensors)
    all_runs = [blocks.tile_ranges for blocks in all_blocks(inputs, next(inputs.rows(reads_tree=True)))]
    whole = sum(int((runs[..., 2] - runs[..., 1]).sum()) for runs in all_runs)
    visited = sum(int((runs[..., 3] - runs[..., 0]).sum()) for runs in all_runs)
    masked = visited - whole
    assert masked <= 2 * sum(runs.shape[0] * runs.shape[1] for runs in all_runs)
    assert whole > 0 or name == "window"


def test_a_block_of_a_pack_visits_the_tiles_of_its_own_document_alone() -> None:
    """In blocks of rows that follow one another, one block would visit the keys of all documents."""

    def tiles(mask: Mask, new: int, cached: int) -> int:
        q, k = torch.randn(new, 4, 16), torch.randn(cached, 2, 16)
        call, tensors = normalise(Request.from_keywords(q, k, k, layout="thd", mask=mask))
        inputs = triton_inputs.KernelInputs(call, tensors)
        return sum(
            int((b.tile_ranges[..., 3] - b.tile_ranges[..., 0]).sum()) * 4 // b.group
            for b in all_blocks(inputs, next(inputs.rows(reads_tree=True)))
        )

    one = tiles(masks.tree([-1, 0, 0]) & masks.documents([0, 3], [0, 128]), 3, 128)
    mask = masks.tree([-1, 0, 0] * 20) & masks.documents(list(range(0, 61, 3)), list(range(0, 2561, 128)))
    assert tiles(mask, 60, 2560) == 20 * one
