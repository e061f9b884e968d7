"""Masks made inside of ``torch.func.vmap``, from another value for each element, equal a loop over the elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.masks import Mask

# vmap makes copies for it, which PyTorch reports once per process, in whichever test is first
pytestmark = pytest.mark.filterwarnings("ignore:torch.searchsorted")

Case = tuple[Callable[[Tensor], Mask], Tensor]

LENGTHS = torch.tensor([[1], [4], [2]])
CASES: dict[str, Case] = {
    "lengths": (lambda n: masks.lengths(n), LENGTHS),
    "lengths-of-both": (lambda n: masks.lengths(n, n), LENGTHS),
    "lengths-causal": (lambda n: masks.lengths(kv=n) & masks.causal(align="top_left"), LENGTHS),
    "lengths-start": (lambda n: masks.lengths(kv=4 - n, kv_start=n), LENGTHS),
    "documents": (
        lambda offsets: masks.documents(offsets) & masks.causal(),
        torch.tensor([[0, 2, 4], [0, 1, 4], [0, 4, 4]]),
    ),
    "document-ids": (
        lambda ids: masks.document_ids(ids),
        torch.tensor([[[0, 0, 1, 1]], [[0, 1, 0, 1]], [[0, 0, 0, 0]]]),
    ),
    "prefix": (lambda n: masks.prefix(n) | masks.causal(), LENGTHS),
    "dense": (lambda pairs: masks.dense(pairs) & masks.window(2, 0), torch.arange(48).view(3, 4, 4) % 5 > 1),
    "tree": (lambda parents: masks.tree(parents), torch.tensor([[[-1, 0, 0, 1]], [[-1, -1, 0, 1]], [[-1, 0, 1, 2]]])),
    "blocks": (
        lambda table: masks.blocks(2, 2, table),
        torch.tensor([[[[[0, -1], [0, 1]]]], [[[[1, -1], [1, 0]]]], [[[[0, 0], [1, 1]]]]]),
    ),
    "predicate": (lambda n: masks.predicate(lambda b, h, i, j: i + n[0] > j), LENGTHS),
}


@pytest.mark.parametrize("backend", [None, "native"], ids=["chosen", "native"])
@pytest.mark.parametrize("name", CASES)
def test_a_mask_of_each_element_equals_a_loop(name: str, backend: str | None) -> None:
    make, values = CASES[name]
    queries = torch.randn(3, 1, 2, 4, 8)

    def attend(x: Tensor, value: Tensor) -> Tensor:
        return undivided.attention(x, x, x, mask=make(value), layout="bhsd", backend=backend)

    def gradient(x: Tensor, value: Tensor) -> Tensor:
        return torch.func.grad(lambda y: attend(y, value).square().sum())(x)

    for function in (attend, gradient):
        each = torch.stack([function(x, value) for x, value in zip(queries, values, strict=True)])
        torch.testing.assert_close(torch.vmap(function)(queries, values), each)
        shared = torch.vmap(function, in_dims=(None, 0))(queries[0], values)
        torch.testing.assert_close(shared, torch.stack([function(queries[0], value) for value in values]))


def test_masks_under_nested_vmaps_equal_loops() -> None:
    queries, lengths = torch.randn(2, 3, 1, 4, 1, 8), torch.tensor([[[1], [2], [4]], [[3], [4], [1]]])

    def attend(x: Tensor, n: Tensor) -> Tensor:
        return undivided.attention(x, x, x, mask=masks.lengths(n), layout="bshd")

    each = [
        torch.stack([attend(*pair) for pair in zip(*row, strict=True)]) for row in zip(queries, lengths, strict=True)
    ]
    torch.testing.assert_close(torch.vmap(torch.vmap(attend))(queries, lengths), torch.stack(each))


def test_packs_and_pages_of_each_element_equal_a_loop() -> None:
    packs, offsets = torch.randn(3, 8, 2, 8), torch.tensor([[0, 2, 8], [0, 1, 8], [0, 8, 8]])

    def attend(x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return undivided.attention(x, x, x, mask=masks.documents(cu_seqlens) & masks.causal(), layout="thd")

    each = torch.stack([attend(*pair) for pair in zip(packs, offsets, strict=True)])
    torch.testing.assert_close(torch.vmap(attend)(packs, offsets), each)
    pools, tables = torch.randn(6, 4, 2, 8), torch.tensor([[[0, 1]], [[3, 2]], [[5, 4]]], dtype=torch.int32)

    def decode(x: Tensor, pages: Tensor) -> Tensor:
        mask = masks.lengths(kv=torch.tensor([7]))
        return undivided.attention(x[None], pools, pools, mask=mask, pages=pages, layout="bshd")

    each = torch.stack([decode(*pair) for pair in zip(packs, tables, strict=True)])
    torch.testing.assert_close(torch.vmap(decode)(packs, tables), each)
