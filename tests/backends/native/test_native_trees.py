"""Draft trees: the kernel reads the nodes alone, and gives the numbers of the mask of all pairs."""

from __future__ import annotations

import random
from typing import Any

import levels
import pytest
import torch
from native_oracle import ALLOWED, apart, needs_library
from torch import Tensor

import undivided
from undivided import masks
from undivided.backends.native.call import Records
from undivided.kernels import cpu
from undivided.masks import Mask

pytestmark = needs_library
DTYPES = pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
LEVELS = pytest.mark.parametrize("level", levels.here())


def parents(nodes: int, seed: int) -> list[int]:
    """A random tree, or several."""
    rng = random.Random(seed)
    return [rng.randrange(-1, node) for node in range(nodes)]


def padded() -> tuple[Mask, tuple[int, int, int]]:
    """Three sequences with trees of their own, beginning anywhere in a block of keys, of up to 150 nodes."""
    trees = torch.full((3, 150), -1)
    counts, lengths = [150, 3, 40], [151, 300, 170]
    for n, count in enumerate(counts):
        trees[n, :count] = torch.tensor(parents(count, n))
    return masks.tree(trees) & masks.lengths(lengths, counts), (3, 150, 300)


def packed() -> tuple[Mask, tuple[int, int, int]]:
    counts, keys = (5, 70, 1, 8), (200, 71, 1, 129)
    tree = [parent for n, count in enumerate(counts) for parent in parents(count, n)]
    ends = [torch.tensor((0, *sizes)).cumsum(0) for sizes in (counts, keys)]
    return masks.tree(tree) & masks.documents(*ends), (1, sum(counts), sum(keys))


def one(also: Mask = masks.FULL) -> tuple[Mask, tuple[int, int, int]]:
    return masks.tree(parents(33, 5)) & also, (2, 33, 290)


PROBLEMS = {
    "padded": padded(),
    "packed": packed(),
    "one": one(),
    "window": one(masks.window(100, None, align="bottom_right")),
}


def tensors(layout: str, batch: int, q_len: int, kv_len: int, dtype: torch.dtype) -> list[Tensor]:
    sizes = ((q_len, 4), (kv_len, 2), (kv_len, 2))
    first = () if layout == "thd" else (batch,)
    return [torch.randn(*first, length, heads, 32).to(dtype).requires_grad_() for length, heads in sizes]


def results(mask: Mask, operands: list[Tensor], layout: str, **options: Any) -> list[Tensor]:
    out, lse = undivided.attention(*operands, layout=layout, mask=mask, return_lse=True, **options)
    seen = lse.isfinite()
    grads = torch.autograd.grad(out.float().square().sum() + lse[seen].sum(), operands)
    return [out.detach(), lse[seen].detach(), *grads]


@LEVELS
@DTYPES
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_tree_is_the_mask_of_its_pairs(name: str, dtype: torch.dtype, level: str) -> None:
    mask, (batch, q_len, kv_len) = PROBLEMS[name]
    layout = "thd" if name == "packed" else "bshd"
    pairs = masks.dense(mask.to_dense(batch, 1, q_len, kv_len))
    if layout == "thd":
        pairs = pairs & masks.documents([0, q_len], [0, kv_len])
    torch.manual_seed(0)
    operands = tensors(layout, batch, q_len, kv_len, dtype)
    expected = results(pairs, [t.detach().double().requires_grad_() for t in operands], layout)
    with levels.running(level, 1):
        found = results(mask, operands, layout, backend="native")
    for ours, right in zip(found, expected, strict=True):
        assert apart(ours, right) < 2 * ALLOWED[dtype]


@DTYPES
def test_a_pack_of_trees_over_pages_has_the_numbers_of_its_sequences(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths, count = [130, 40, 77], 9
    trees = torch.tensor([parents(count, n) for n in range(3)])
    q = torch.randn(3, count, 4, 32).to(dtype)
    k, v = (torch.randn(30, 16, 2, 32).to(dtype) for _ in range(2))
    table = torch.randperm(30)[:27].int().view(3, 9)
    options: dict[str, Any] = {"pages": table, "backend": "native"}
    mask = masks.tree(trees.flatten()) & masks.documents(count * torch.arange(4), torch.tensor([0, *lengths]).cumsum(0))
    pack = undivided.attention(q.flatten(0, 1), k, v, layout="thd", mask=mask, **options).unflatten(0, (3, count))
    for n, length in enumerate(lengths):
        alone = table[n, : -(-length // 16)].long()
        keys, values = (pool[alone].flatten(0, 1)[None, :length].double() for pool in (k, v))
        expected = undivided.attention(q[n : n + 1].double(), keys, values, layout="bshd", mask=masks.tree(trees[n]))
        assert apart(pack[n : n + 1], expected) < ALLOWED[dtype]


def test_the_mask_of_a_tree_has_entries_for_nodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the 4096 keys before them, which every layer of a step would evaluate again."""
    records: list[dict[str, float]] = []
    of_rows = Records.record

    def recording(self: Records, rows: slice) -> bytes:
        record = of_rows(self, rows)
        records.append(dict(zip(cpu.FIELDS, cpu.RECORD.unpack(record), strict=True)))
        return record

    monkeypatch.setattr(Records, "record", recording)
    q, k = torch.randn(2, 8, 4, 32), torch.randn(2, 4096, 2, 32)
    mask = masks.tree(parents(8, 0))
    with torch.no_grad():
        for _ in range(2):
            undivided.attention(q, k, k, layout="bshd", mask=mask, backend="native")
    assert len(records) == 2
    assert {(one["dense_keys"], one["dense_q"]) for one in records} == {(8, 8)}
    assert records[0]["dense"] == records[1]["dense"]  # evaluated once
