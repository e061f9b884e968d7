"""Packs of documents that decode, prefill or verify drafts in one call of the `triton` backend, under Triton's
interpreter."""

from __future__ import annotations

import os
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.backends.triton import inputs as triton_inputs
from undivided.backends.triton import packs
from undivided.backends.triton.blocks import all_blocks
from undivided.masks import Mask
from undivided.quantization import quantize
from undivided.request.normalise import normalise
from undivided.request.request import Request

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels need a GPU without Triton's interpreter", allow_module_level=True)

PAGE = 16
NEW = {
    "decoding": [1, 1, 1, 1, 1],
    "drafts": [4, 1, 3, 2, 1],
    "mixed": [1, 70, 1, 1, 40],
    "some without tokens": [0, 1, 0, 45, 1],
}
CACHED = [7, 90, 200, 41, 40]


def offsets(counts: list[int]) -> list[int]:
    return [0, *accumulate(counts)]


def pack(new: list[int], more_rows: int = 0, heads: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Queries, and keys and values in a pool of pages whose unused memory is NaN."""
    torch.manual_seed(0)
    cached = [max(c, n) for c, n in zip(CACHED, new, strict=False)]
    columns = -(-max(cached) // PAGE)
    table = torch.randperm(len(new) * columns).int().view(len(new), columns)
    pools = []
    for _ in range(2):
        pool = torch.full((table.numel(), PAGE, 2, 16), float("nan"))
        for row, count in zip(table, cached, strict=True):
            for n in range(count):
                pool[row[n // PAGE], n % PAGE] = torch.randn(2, 16)
        pools.append(pool.to(dtype))
    q = torch.randn(sum(new) + more_rows, heads, 16).to(dtype)
    return {"q": q, "k": pools[0], "v": pools[1], "pages": table, "layout": "thd", "cached": cached}


def both(arguments: dict[str, Any], mask: Mask, **more: Any) -> tuple[Tensor, Tensor]:
    given = {name: value for name, value in arguments.items() if name != "cached"}
    results = [
        undivided.attention(**given, mask=mask, backend=name, return_lse=True, **more)
        for name in ("triton", "reference")
    ]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    return results[0]  # type: ignore[return-value]


def documents(new: list[int], cached: list[int], **more: Any) -> Mask:
    return masks.documents(torch.tensor(offsets(new)), torch.tensor(offsets(cached)), **more)


KINDS = {
    "causal": masks.causal("bottom_right"),
    "window and sinks": masks.window(20, 0, "bottom_right") | masks.sinks(3),
    "every key": None,
}


# every pair of a pack, a kind of mask, and lengths known or not: the interpreter is slow
@pytest.mark.parametrize(
    ("name", "kind", "known"),
    [
        pytest.param(name, kind, known, id=f"{name}-{kind}-{'known lengths' if known else 'an upper bound'}")
        for i, name in enumerate(NEW)
        for j, kind in enumerate(KINDS)
        for known in [(i + j) % 2 == 0]
    ],
)
def test_they_agree_with_the_reference(name: str, kind: str, known: bool) -> None:
    arguments = pack(NEW[name])
    mask = documents(NEW[name], arguments["cached"], **({} if known else {"max_q": 1000}))
    within = KINDS[kind]
    both(arguments, mask if within is None else mask & within)


@pytest.mark.parametrize("max_q", [None, 4, 1000])
def test_rows_after_all_documents_are_zero(max_q: int | None) -> None:
    arguments = pack([1, 4, 1], more_rows=50)
    mask = documents([1, 4, 1], arguments["cached"], max_q=max_q, total_q=56) & masks.causal("bottom_right")
    out, lse = both(arguments, mask)
    assert not out[6:].any()
    assert (lse[..., 6:] == -torch.inf).all()


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"scale": -0.3},
        {"sinks": torch.linspace(-1, 1, 4)},
        {"alibi_slopes": torch.linspace(0.1, 0.4, 4)},
        {"dropout_p": 0.3, "dropout_seed": 7},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("name", ["mixed", "drafts"])
def test_they_agree_with_every_option(name: str, options: dict[str, Any]) -> None:
    arguments = pack(NEW[name])
    both(arguments, documents(NEW[name], arguments["cached"]) & masks.causal("bottom_right"), **options)


@pytest.mark.parametrize("heads", [2, 6, 2 * 66])
def test_they_agree_for_every_number_of_heads_per_key_head(heads: int) -> None:
    arguments = pack([1, 1, 35], heads=heads)
    both(arguments, documents([1, 1, 35], arguments["cached"]) & masks.causal("bottom_right"))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_they_agree_with_quantised_pages(format: str) -> None:
    arguments = pack(NEW["mixed"])
    wide = {name: torch.nn.functional.pad(arguments[name], (0, 16)) for name in ("q", "k", "v")}
    (k, k_scale), (v, v_scale) = (quantize(wide[name], format) for name in ("k", "v"))  # type: ignore[arg-type]
    arguments |= {"q": wide["q"], "k": k, "v": v}
    mask = documents(NEW["mixed"], arguments["cached"]) & masks.causal("bottom_right")
    both(arguments, mask, k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize("gaps", [True, False])
def test_packed_keys_without_pages_agree_and_padding_between_them_is_not_read(gaps: bool) -> None:
    torch.manual_seed(1)
    new, cached = NEW["mixed"], CACHED
    gap = 5 * gaps
    q, k, v = (torch.full((sum(n) + gap * len(n), h, 16), torch.nan) for n, h in ((new, 4), (cached, 2), (cached, 2)))
    starts_q, starts_k = (offsets([n + gap for n in counts]) for counts in (new, cached))
    for n, c, at, key in zip(new, cached, starts_q, starts_k, strict=False):
        q[at : at + n] = torch.randn(n, 4, 16)
        k[key : key + c], v[key : key + c] = torch.randn(2, c, 2, 16)
    padded = {"padded_q": torch.tensor(starts_q), "padded_kv": torch.tensor(starts_k)}
    mask = documents(new, cached, **(padded if gaps else {})) & masks.causal("bottom_right")
    both({"q": q.nan_to_num(), "k": k, "v": v, "layout": "thd"}, mask)


def test_a_block_visits_the_tiles_of_its_own_document_alone() -> None:
    new = [1] * 40 + [100]
    cached = [64] * 40 + [100]
    q, k = torch.randn(sum(new), 4, 16), torch.randn(sum(cached), 2, 16)
    mask = documents(new, cached) & masks.causal("bottom_right")
    call, tensors = normalise(Request.from_keywords(q, k, k, layout="thd", mask=mask))
    inputs = triton_inputs.KernelInputs(call, tensors)
    launches = all_blocks(inputs, next(inputs.rows()))
    tiles = [
        (blocks.tile_ranges[..., 3] - blocks.tile_ranges[..., 0]).sum().item() * 4 // blocks.group
        for blocks in launches
    ]
    long, short = launches
    assert (long.group, short.group) == (1, 2)
    assert tiles[1] == 40 * 2 * 64 // short.tile.block_n
    assert tiles[0] <= 4 * -(-100 // long.tile.block_m) * (-(-100 // long.tile.block_n) + 1)
    full = short.tile_ranges[..., 2] - short.tile_ranges[..., 1]
    assert int(full.sum()) == 40 * 64 // short.tile.block_n, "no tile of a decoding document needs its mask"


def test_documents_whose_keys_are_their_queries_have_blocks_that_follow_one_another() -> None:
    q = torch.randn(60, 4, 16)
    call, tensors = normalise(Request.from_keywords(q, q, q, layout="thd", mask=masks.documents([0, 20, 60])))
    assert not packs.applies(call, call.normal_form(tensors.q))


@pytest.mark.parametrize("packed", [True, False], ids=["a pack", "a batch"])
@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("page", [16, 7, 32])
def test_no_entry_beyond_the_block_table_is_read(
    page: int, batch_invariant: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tile of a sequence may end after the last page of the table."""
    from triton.runtime import interpreter

    memory = torch.zeros(20_000, dtype=torch.int32)
    table = memory[10_000 : 10_000 + 2 * 3].view(2, 3)
    table.copy_(torch.randperm(6).view(2, 3))
    first, size = memory.data_ptr(), memory.numel() * 4
    read: list[int] = []
    load = interpreter.InterpreterBuilder.create_masked_load

    def recorded(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        places = pointers.data[mask.data].astype("int64") - first
        read.extend(places[(places >= 0) & (places < size)].tolist())
        return load(self, pointers, mask, *more)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", recorded)
    k, v = torch.randn(2, 6, page, 2, 16)
    keys, new = 3 * page, 3
    mask: Mask = masks.lengths([keys, keys], [new, new]) & masks.causal("bottom_right")
    q = torch.randn(2, new, 4, 16)
    if packed:
        mask, q = documents([new, new], [keys, keys]) & masks.causal("bottom_right"), q.flatten(0, 1)
    options: dict[str, Any] = {"layout": "thd" if packed else "bshd", "pages": table, "mask": mask}
    undivided.attention(q, k, v, backend="triton", batch_invariant=batch_invariant, **options)
    assert min(read) == 10_000 * 4
    assert max(read) == (10_000 + 5) * 4
