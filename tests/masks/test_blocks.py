"""masks.blocks and masks.pages against pairs that are looked up one by one, and the kernel that reads only them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import InputError, masks
from undivided.masks import Mask
from undivided.quantization import Format, quantize


def random_table(rng: random.Random, *shape: int, blocks: int) -> Tensor:
    numbers = [rng.randrange(-1, blocks) for _ in range(torch.Size(shape).numel())]
    return torch.tensor(numbers, dtype=torch.int32).view(shape)


def chosen_pairs(table: Tensor, q_block: int, kv_block: int, heads: int, q_len: int, kv_len: int) -> Tensor:
    """The pairs of one sequence by definition, bool [H, q, k]; table [T, A, n]."""
    pairs = torch.zeros(heads, q_len, kv_len, dtype=torch.bool)
    for h in range(heads):
        for i in range(q_len):
            for block in table[h * len(table) // heads, i // q_block].tolist():
                if block >= 0:
                    pairs[h, i, block * kv_block : (block + 1) * kv_block] = True
    return pairs


@pytest.mark.parametrize("seed", range(20))
def test_a_query_block_sees_its_chosen_key_blocks(seed: int) -> None:
    rng = random.Random(seed)
    batch, heads, q_len, kv_len = rng.randint(1, 3), rng.choice([1, 4, 6]), rng.randint(1, 20), rng.randint(1, 40)
    q_block, kv_block = rng.randint(1, 8), rng.randint(1, 12)
    groups = rng.choice([t for t in range(1, heads + 1) if heads % t == 0])
    rows, columns = -(-q_len // q_block), -(-kv_len // kv_block)
    table = random_table(rng, batch, groups, rows, rng.randint(0, 4), blocks=columns)
    pairs = torch.stack([chosen_pairs(one, q_block, kv_block, heads, q_len, kv_len) for one in table])
    found = masks.blocks(q_block, kv_block, table).to_dense(batch, heads, q_len, kv_len)
    assert torch.equal(found, pairs)


def test_blocks_count_positions_within_each_document() -> None:
    rng = random.Random(1)
    table = random_table(rng, 2, 2, 3, 2, blocks=3)
    mask = masks.blocks(4, 5, table) & masks.documents([0, 10, 17], [0, 13, 26])
    found = mask.to_dense(1, 2, 17, 26)[0]
    assert torch.equal(found[:, :10, :13], chosen_pairs(table[0], 4, 5, 2, 10, 13))
    assert torch.equal(found[:, 10:, 13:], chosen_pairs(table[1], 4, 5, 2, 7, 13))
    assert not found[:, :10, 13:].any()
    assert not found[:, 10:, :13].any()


def test_pages_are_blocks_for_all_queries() -> None:
    table = torch.tensor([[[0, 3], [1, -1]], [[2, 2], [4, 0]]])
    pages = masks.pages(table, 3).to_dense(2, 4, 5, 14)
    assert torch.equal(pages, masks.blocks(5, 3, table[:, :, None]).to_dense(2, 4, 5, 14))
    assert torch.equal(
        masks.pages([1, 4], 3).to_dense(1, 1, 1, 14)[0, 0, 0].nonzero().flatten(), torch.tensor([3, 4, 5, 12, 13])
    )


@pytest.mark.parametrize("options", [{}, {"bias": torch.zeros(4, 4)}, {"return_lse": True}], ids=str)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_an_empty_batch_has_an_empty_result(backend: str, options: dict[str, Any]) -> None:
    q = torch.randn(0, 4, 2, 8, requires_grad=True)
    mask = masks.blocks(2, 2, [[0], [1]])
    result = undivided.attention(q, q, q, layout="bshd", mask=mask, backend=backend, **options)
    out = result[0] if isinstance(result, tuple) else result
    assert out.shape == q.shape
    out.sum().backward()


def test_padding_between_documents_needs_no_query_blocks() -> None:
    x, table = torch.randn(5, 2, 8), torch.zeros(2, 1, 1, 1, dtype=torch.long)  # one query block of 2 for each document
    expected = undivided.attention(
        x[[0, 1, 3]], x[[0, 1, 3]], x[[0, 1, 3]], layout="thd", mask=masks.documents([0, 2, 3])
    )
    padded = masks.documents([0, 2, 3], padded_q=[0, 3, 5], padded_kv=[0, 3, 5], max_q=2, max_kv=2)
    found = undivided.attention(x, x, x, layout="thd", mask=padded & masks.blocks(2, 2, table))
    torch.testing.assert_close(found[[0, 1, 3]], expected)


def test_one_document_in_a_larger_buffer_needs_its_own_query_blocks() -> None:
    """As each of several documents does: a table for all rows of the buffer was required."""
    q, table = torch.randn(8, 2, 16), torch.tensor([[0], [1]])
    mask = masks.documents([0, 4], total_q=8) & masks.blocks(2, 2, table)
    out = undivided.attention(q, q, q, layout="thd", mask=mask)
    alone = masks.documents([0, 4]) & masks.blocks(2, 2, table)
    assert torch.equal(out[:4], undivided.attention(q[:4], q[:4], q[:4], layout="thd", mask=alone))
    assert not out[4:].any()
    with pytest.raises(InputError, match="a block table for 2 query blocks, of 2 queries, per document"):
        undivided.attention(q, q, q, layout="thd", mask=mask & masks.blocks(2, 2, table[:1]))


def test_a_table_that_changed_in_place_is_read_again() -> None:
    table = torch.tensor([[0], [0]])
    mask = masks.blocks(2, 2, table)
    before = mask.to_dense(1, 1, 4, 4).clone()
    table[1, 0] = 1
    assert not torch.equal(mask.to_dense(1, 1, 4, 4), before)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "thd"])
@pytest.mark.parametrize("seed", range(8))
def test_native_equals_the_same_mask_as_a_dense_tensor(layout: str, seed: int) -> None:
    rng = random.Random(f"{layout}{seed}")
    torch.manual_seed(seed)
    kv_heads, group, dim = rng.randint(1, 3), rng.choice([1, 2, 4]), rng.choice([16, 80])
    heads, q_block, kv_block = kv_heads * group, rng.choice([1, 3, 16, 64]), rng.choice([4, 16, 32, 64])
    groups = rng.choice([t for t in range(1, heads + 1) if heads % t == 0])
    if layout == "thd":
        batch, q_lens, kv_lens = 1, [rng.randint(1, 50) for _ in range(3)], [rng.randint(1, 90) for _ in range(3)]
        q_len, kv_len, sequences = sum(q_lens), sum(kv_lens), 3
        ends = [[0, *torch.tensor(lens).cumsum(0).tolist()] for lens in (q_lens, kv_lens)]
        rest = masks.documents(*ends) & masks.causal("bottom_right")
        rows, columns = -(-max(q_lens) // q_block), -(-max(kv_lens) // kv_block)
    else:
        batch = sequences = rng.randint(1, 3)
        q_len, kv_len = rng.randint(1, 100), rng.randint(1, 200)
        q_lens, kv_lens = ([rng.randint(0, size) for _ in range(batch)] for size in (q_len, kv_len))
        rest = rng.choice([
            masks.FULL, masks.causal("bottom_right"), masks.lengths(kv_lens, q_lens), masks.window(30, 5, "top_left"),
            masks.lengths(kv_lens, q_lens, [kv_len - n for n in kv_lens], [q_len - n for n in q_lens]),
            masks.window(20, 0, "bottom_right") | masks.sinks(3),
        ])  # fmt: skip
        rows, columns = -(-q_len // q_block), -(-kv_len // kv_block)
    mask = masks.blocks(q_block, kv_block, random_table(rng, sequences, groups, rows, 4, blocks=columns)) & rest
    if layout == "thd":
        same = masks.dense(mask.to_dense(batch, heads, q_len, kv_len)) & masks.documents(*ends)
    else:
        same = masks.dense(mask.to_dense(batch, heads, q_len, kv_len))

    def tensor(length: int, count: int) -> Tensor:
        sizes = {
            "bhsd": (batch, count, length, dim), "bshd": (batch, length, count, dim),
            "sbhd": (length, batch, count, dim), "thd": (length, count, dim),
        }  # fmt: skip
        return torch.randn(sizes[layout], requires_grad=True)

    q, k, v = tensor(q_len, heads), tensor(kv_len, kv_heads), tensor(kv_len, kv_heads)
    grad = torch.randn_like(q)
    results = []
    for one in (mask, same):
        out, lse = undivided.attention(q, k, v, mask=one, layout=layout, backend="native", return_lse=True)
        results.append(
            (
                out,
                lse,
                *torch.autograd.grad((out, lse.nan_to_num(neginf=0.0).sum()), (q, k, v), (grad, torch.tensor(1.0))),
            )
        )
    for blocks, dense in zip(*results, strict=True):
        assert torch.equal(blocks.isinf(), dense.isinf())
        torch.testing.assert_close(blocks, dense, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "quantized"),
    [("bhsd", None), ("bshd", None), ("thd", None), ("bshd", "int8"), ("thd", "int8"), ("thd", "int4")],
)
def test_heads_with_one_table_equal_heads_with_equal_tables(layout: Any, quantized: Format | None) -> None:
    torch.manual_seed(4)
    q, k, v = torch.randn(3, 1, 8, 64), *(torch.randn(15, 16, 4, 64) for _ in range(2))
    pages = torch.randperm(15).view(3, 5).int()
    options: dict[str, Any] = {}
    lengths: Mask = masks.lengths([80, 33, 70])
    table = torch.tensor([[[0, 2, 4]], [[0, 2, -1]], [[1, 3, -1]]])
    if layout == "thd":
        q, lengths = q.flatten(0, 1), masks.documents([0, 1, 2, 3], [0, 80, 113, 183])
    if quantized:
        (k, k_scale), (v, v_scale) = quantize(k, quantized), quantize(v, quantized)
        options = {"pages": pages, "k_scale": k_scale, "v_scale": v_scale}
    elif layout != "bhsd":
        options = {"pages": pages}
    else:
        q, k, v = q.transpose(1, 2), *(x.view(3, 80, 4, 64).transpose(1, 2) for x in (k, v))
    one, some, all_heads = (
        undivided.attention(
            q, k, v, mask=lengths & masks.pages(table.expand(3, tables, 3), 16), layout=layout, backend="native",
            return_lse=True, **options,
        )
        for tables in (1, 2, 8)
    )  # fmt: skip
    for found, of_one, of_each in zip(some, one, all_heads, strict=True):
        torch.testing.assert_close(of_one, of_each, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found, of_each, rtol=1e-5, atol=1e-6)


def test_keys_that_are_not_chosen_reach_nothing() -> None:
    q, k, v = (torch.randn(1, 64, 2, 32) for _ in range(3))
    k[:, 16:32], v[:, 16:32] = torch.nan, torch.nan
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    mask = masks.blocks(16, 16, [[0, -1], [0, 2], [2, -1], [3, 0]])
    out = undivided.attention(q, k, v, mask=mask, layout="bshd", backend="native")
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (out, *gradients))
    assert all(not x[:, 16:32].any() for x in gradients[1:])


def test_explain_says_whether_only_chosen_blocks_are_computed() -> None:
    q = torch.randn(1, 64, 4, 16)
    mask = masks.blocks(16, 16, [[0], [0], [1], [3]])
    assert "only the chosen key blocks are computed: 25.0%" in str(undivided.explain(q, q, q, mask=mask, layout="bshd"))
    report = str(undivided.explain(q, q, q, mask=mask, layout="bshd", sinks=torch.zeros(4)))
    assert "the block table is evaluated for every pair: sinks" in report


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: masks.blocks(0, 1, [[0]]), "q_block must be at least 1, got 0"),
    (lambda: masks.blocks(1, 1, [[-2]]), "table must be at least -1, got -2"),
    (lambda: masks.blocks(1, 1, "0"), "table must be an int tensor or nested lists"),  # type: ignore[arg-type]
    (lambda: masks.blocks(1, 1, [[0], [0, 1]]), "table must be nested lists of ints, of equal lengths"),
    (lambda: masks.blocks(1, 1, torch.zeros(3, 1)), "table must have an integer dtype"),
    (lambda: masks.pages(torch.zeros(1, 3) > 0, 4), "table must hold the numbers of the chosen blocks"),
    (lambda: masks.pages([[[[1]]]], 4), "table must have 1 to 3 dimensions"),
    (lambda: masks.blocks(4, 4, [[0]]).to_dense(1, 1, 8, 8), "a block table for 2 query blocks, of 4 of 8 queries"),
    (lambda: masks.blocks(4, 4, [[0], [2]]).to_dense(1, 1, 8, 8), "choose key blocks of at most 1: 8 keys"),
    (lambda: masks.blocks(4, 4, [[[0], [0]]] * 3).to_dense(1, 4, 8, 8), "a block table for a divisor of 4 heads"),
    (lambda: masks.pages([[0]] * 3, 4).to_dense(2, 1, 8, 8), "a block table for 1 or 2 sequences"),
    (
        lambda: (masks.blocks(4, 4, [[0]]) & masks.documents([0, 8])).to_dense(1, 1, 8, 8),
        "a block table for 2 query blocks",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("build", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_wrong_tables_are_refused_with_their_limit(build: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("[", r"\[")):
        build()
