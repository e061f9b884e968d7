"""batch_invariant=True: a row's result has the same bits however its sequence is batched, packed, cut or stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import levels
import pytest
import torch
from test_native import needs_library
from torch import Tensor

import undivided
from undivided import InputError, NoBackendError, masks
from undivided.masks import Mask

pytestmark = needs_library

LENGTHS = [3, 70, 1, 333, 130]
MASKS: dict[str, Mask] = {
    "causal": masks.causal("bottom_right"),
    "window": masks.window(40, 0, "bottom_right"),
    "window and sinks": masks.window(40, 0, "bottom_right") | masks.sinks(5),
    "chunks": masks.causal("bottom_right") & masks.chunks(48, "bottom_right"),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(4, 2, 64, 64), (8, 1, 128, 128), (3, 3, 40, 24), (6, 2, 33, 80)]


class Sequences:
    """Some sequences, and the result of each in a call of its own, [S, H, Dv]."""

    def __init__(self, mask: Mask, dtype: torch.dtype, sizes: tuple[int, int, int, int], **options: Any) -> None:
        torch.manual_seed(0)
        heads, kv_heads, qk_dim, v_dim = sizes
        self.mask, self.options = mask, {"batch_invariant": True, **options}
        self.q = [torch.randn(n, heads, qk_dim).to(dtype) * 3 for n in LENGTHS]
        self.k = [torch.randn(n, kv_heads, qk_dim).to(dtype) for n in LENGTHS]
        self.v = [torch.randn(n, kv_heads, v_dim).to(dtype) for n in LENGTHS]
        self.alone = [
            self.attention(q[None], k[None], v[None], mask)[0] for q, k, v in zip(self.q, self.k, self.v, strict=True)
        ]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, layout: str = "bshd", **more: Any) -> Tensor:
        out: Tensor = undivided.attention(q, k, v, layout=layout, mask=mask, **self.options, **more)
        return out

    def check(self, results: list[Tensor]) -> None:
        for n, (result, alone) in enumerate(zip(results, self.alone, strict=True)):
            assert torch.equal(result, alone), f"sequence {n}"


def padded(tensors: list[Tensor], left: bool = False) -> Tensor:
    """[B, S, H, D], filled with NaN."""
    longest = max(map(len, tensors)) + 7
    out = torch.full((len(tensors), longest, *tensors[0].shape[1:]), float("nan"), dtype=tensors[0].dtype)
    for row, t in zip(out, tensors, strict=True):
        row[slice(longest - len(t), longest) if left else slice(0, len(t))] = t
    return out


def in_a_batch(s: Sequences) -> list[Tensor]:
    lengths = torch.tensor(LENGTHS)
    out = s.attention(padded(s.q).nan_to_num(), padded(s.k), padded(s.v), s.mask & masks.lengths(lengths, lengths))
    return [row[:n] for row, n in zip(out, LENGTHS, strict=True)]


def after_padding(s: Sequences) -> list[Tensor]:
    q, k, v = padded(s.q, True).nan_to_num(), padded(s.k, True), padded(s.v, True)
    lengths = torch.tensor(LENGTHS)
    starts = q.shape[1] - lengths
    out = s.attention(q, k, v, s.mask & masks.lengths(lengths, lengths, starts, starts))
    return [row[start:] for row, start in zip(out, starts.tolist(), strict=True)]


def offsets() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).int()


def in_a_pack(s: Sequences) -> list[Tensor]:
    out = s.attention(torch.cat(s.q), torch.cat(s.k), torch.cat(s.v), s.mask & masks.documents(offsets()), "thd")
    return list(out.split(LENGTHS))


def in_another_layout(s: Sequences) -> list[Tensor]:
    each = [[t[None].transpose(1, 2).contiguous() for t in tensors] for tensors in (s.q, s.k, s.v)]
    return [s.attention(*one, s.mask, "bhsd")[0].transpose(0, 1) for one in zip(*each, strict=True)]


def in_chunks(s: Sequences) -> list[Tensor]:
    outs = []
    for q, k, v in zip(s.q, s.k, s.v, strict=True):
        pieces, end = [], 0
        for piece in q.split(37):
            end += len(piece)
            pieces.append(s.attention(piece[None], k[None, :end], v[None, :end], s.mask)[0])
        outs.append(torch.cat(pieces))
    return outs


def paged(page_size: int) -> Callable[[Sequences], list[Tensor]]:
    def run(s: Sequences) -> list[Tensor]:
        columns = -(-max(LENGTHS) // page_size)
        table = torch.randperm(len(LENGTHS) * columns).int().view(len(LENGTHS), columns)
        pools = []
        for tensors in (s.k, s.v):
            pool = torch.full((table.numel(), page_size, *tensors[0].shape[1:]), float("nan"), dtype=tensors[0].dtype)
            for row, t in zip(table, tensors, strict=True):
                for page, piece in zip(row, t.split(page_size), strict=False):
                    pool[page, : len(piece)] = piece
            pools.append(pool)
        lengths = torch.tensor(LENGTHS)
        out = s.attention(padded(s.q).nan_to_num(), *pools, s.mask & masks.lengths(lengths, lengths), pages=table)
        packed = s.attention(torch.cat(s.q), *pools, s.mask & masks.documents(offsets(), offsets()), "thd", pages=table)
        for row, n, other in zip(out, LENGTHS, packed.split(LENGTHS), strict=True):
            assert torch.equal(row[:n], other)
        return [row[:n] for row, n in zip(out, LENGTHS, strict=True)]

    return run


WAYS: dict[str, Callable[[Sequences], list[Tensor]]] = {
    "in a batch": in_a_batch,
    "after padding": after_padding,
    "in a pack": in_a_pack,
    "in another layout": in_another_layout,
    "in chunks": in_chunks,
    "in pages of 16": paged(16),
    "in pages of 7": paged(7),
    "in pages of 128": paged(128),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_bits_are_those_of_each_sequence_alone(
    way: str, mask: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    s = Sequences(MASKS[mask], dtype, sizes)
    s.check(WAYS[way](s))


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 8)},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 0.5, 8)},
    "scale": {"scale": 0.02},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("option", OPTIONS)
def test_the_bits_are_the_same_with_every_option(way: str, option: str) -> None:
    s = Sequences(MASKS["window and sinks"], torch.bfloat16, (8, 2, 64, 64), **OPTIONS[option])
    s.check(WAYS[way](s))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("level", levels.here())
def test_the_bits_are_the_same_on_every_level_and_number_of_threads(level: str, threads: int, way: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with levels.running(level, 1):
            s = Sequences(MASKS["window"], dtype, (8, 2, 64, 64))
        with levels.running(level, threads):
            s.check(WAYS[way](s))


def test_the_result_is_right() -> None:
    q, k, v = torch.randn(2, 150, 4, 64), torch.randn(2, 150, 2, 64), torch.randn(2, 150, 2, 64)
    report = undivided.verify(
        q, k, v, layout="bshd", mask=masks.window(30, 0) | masks.sinks(3), batch_invariant=True, backends=["native"]
    )
    assert report.ok
    assert report.backends == ("native",)


def test_each_setting_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 8, 2, 16)

    def chosen(**options: Any) -> bool:
        return undivided.explain(q, q, q, layout="bshd", **options).problem.batch_invariant

    assert not chosen()
    assert chosen(batch_invariant=True)
    monkeypatch.setenv("UNDIVIDED_BATCH_INVARIANT", "1")
    assert chosen()
    assert not chosen(batch_invariant=False)
    undivided.set_backends(batch_invariant=False)
    try:
        assert not chosen()
        undivided.set_backends(batch_invariant=True)
        monkeypatch.delenv("UNDIVIDED_BATCH_INVARIANT")
        assert chosen()
        with undivided.use_backends("native"):
            assert chosen()
    finally:
        undivided.set_backends()


def test_backends_that_cannot_promise_it_say_so() -> None:
    q = torch.randn(1, 8, 2, 16)
    reasons = undivided.explain(q, q, q, layout="bshd", batch_invariant=True).reasons
    assert all("batch-invariant" in " ".join(reasons[name]) for name in ("reference", "torch_flash", "flex"))
    with pytest.raises(NoBackendError, match="batch-invariant results"):
        undivided.attention(q, q, q, layout="bshd", batch_invariant=True, backend="reference")
    with pytest.raises(NoBackendError, match="document ids"):
        undivided.attention(
            q, q, q, layout="bshd", batch_invariant=True, mask=masks.document_ids(torch.zeros(1, 8, dtype=torch.int32))
        )


def test_bad_values_are_refused() -> None:
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(InputError, match="batch_invariant must be True, False or None, got 1"):
        undivided.attention(q, q, q, layout="bshd", batch_invariant=1)  # type: ignore[call-overload]
    with pytest.raises(InputError, match="batch_invariant must be"):
        undivided.set_backends(batch_invariant="yes")  # type: ignore[arg-type]
    pool, table = torch.randn(4, 4, 2, 16), torch.arange(4, dtype=torch.int32)[None]
    starts = masks.lengths([9], kv_start=[3])
    with pytest.raises(InputError, match="start each sequence at a page"):
        undivided.attention(q, pool, pool, layout="bshd", pages=table, mask=starts, batch_invariant=True)


def test_a_compiled_call_has_the_same_bits() -> None:
    q = torch.randn(3, 5, 2, 16)
    call = torch.compile(
        lambda x: undivided.attention(x, x, x, layout="bshd", batch_invariant=True), backend="aot_eager"
    )
    alone = torch.cat([undivided.attention(x, x, x, layout="bshd", batch_invariant=True) for x in q.split(1)])
    assert torch.equal(call(q), alone)
