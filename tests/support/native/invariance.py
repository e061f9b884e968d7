"""The same sequences in calls of their own, in batches, packs, chunks and pages, to compare their bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.arguments.layout import Layout
from undivided.masks import Mask

LENGTHS = [3, 70, 1, 333, 130]
MASKS: dict[str, Mask] = {
    "causal": masks.causal("bottom_right"),
    "window": masks.window(40, 0, "bottom_right"),
    "window and sinks": masks.window(40, 0, "bottom_right") | masks.sinks(5),
    "chunks": masks.causal("bottom_right") & masks.chunks(48, "bottom_right"),
}


class Sequences:
    """Some sequences, and the result of each in a call of its own, [S, H, Dv]."""

    def __init__(
        self,
        mask: Mask,
        dtype: torch.dtype,
        sizes: tuple[int, int, int, int],
        lengths: Sequence[int] = LENGTHS,
        chunk: int = 37,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        heads, kv_heads, qk_dim, v_dim = sizes
        self.lengths, self.chunk = list(lengths), chunk
        self.mask, self.options = mask, {"batch_invariant": True, **options}
        self.q = [torch.randn(n, heads, qk_dim).to(dtype) * 3 for n in lengths]
        self.k = [torch.randn(n, kv_heads, qk_dim).to(dtype) for n in lengths]
        self.v = [torch.randn(n, kv_heads, v_dim).to(dtype) for n in lengths]
        self.alone = [
            self.attention(q[None], k[None], v[None], mask)[0] for q, k, v in zip(self.q, self.k, self.v, strict=True)
        ]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, layout: Layout = "bshd", **more: Any) -> Tensor:
        options: dict[str, Any] = {**self.options, **more}
        out: Tensor = undivided.attention(q, k, v, layout=layout, mask=mask, **options)
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
    lengths = torch.tensor(s.lengths)
    out = s.attention(padded(s.q).nan_to_num(), padded(s.k), padded(s.v), s.mask & masks.lengths(lengths, lengths))
    return [row[:n] for row, n in zip(out, s.lengths, strict=True)]


def after_padding(s: Sequences) -> list[Tensor]:
    q, k, v = padded(s.q, True).nan_to_num(), padded(s.k, True), padded(s.v, True)
    lengths = torch.tensor(s.lengths)
    starts = q.shape[1] - lengths
    out = s.attention(q, k, v, s.mask & masks.lengths(lengths, lengths, starts, starts))
    return [row[start:] for row, start in zip(out, starts.tolist(), strict=True)]


def offsets(s: Sequences) -> Tensor:
    return torch.tensor([0, *s.lengths]).cumsum(0).int()


def in_a_pack(s: Sequences) -> list[Tensor]:
    out = s.attention(torch.cat(s.q), torch.cat(s.k), torch.cat(s.v), s.mask & masks.documents(offsets(s)), "thd")
    return list(out.split(s.lengths))


def in_another_layout(s: Sequences) -> list[Tensor]:
    each = ([t[None].transpose(1, 2).contiguous() for t in tensors] for tensors in (s.q, s.k, s.v))
    return [s.attention(q, k, v, s.mask, "bhsd")[0].transpose(0, 1) for q, k, v in zip(*each, strict=True)]


def in_chunks(s: Sequences) -> list[Tensor]:
    return in_chunks_of(s, s.chunk)


def token_by_token(s: Sequences) -> list[Tensor]:
    return in_chunks_of(s, 1)


def tokens_as_a_batch(s: Sequences) -> list[Tensor]:
    """Each token decodes as a sequence of its own, whose keys end with it."""
    outs = []
    for q, k, v in zip(s.q, s.k, s.v, strict=True):
        keys, values = (x.expand(len(q), *x.shape) for x in (k, v))
        lengths = masks.lengths(torch.arange(len(q)) + 1, torch.ones(len(q), dtype=torch.int64))
        outs.append(s.attention(q[:, None], keys, values, s.mask & lengths)[:, 0])
    return outs


def tokens_as_a_pack(s: Sequences) -> list[Tensor]:
    """The same in pages, packed: one token per document."""
    outs = []
    for q, k, v in zip(s.q, s.k, s.v, strict=True):
        size, count = 32, -(-len(k) // 32)
        k_pool, v_pool = (torch.full((count, size, *x.shape[1:]), float("nan"), dtype=x.dtype) for x in (k, v))
        for pool, x in ((k_pool, k), (v_pool, v)):
            pool.flatten(0, 1)[: len(x)] = x
        pages = torch.arange(count).int().expand(len(q), count).contiguous()
        q_ends, k_ends = list(range(len(q) + 1)), [0, *((torch.arange(len(q)) + 1).cumsum(0).tolist())]
        documents = masks.documents(q_ends, k_ends)
        outs.append(s.attention(q, k_pool, v_pool, s.mask & documents, "thd", pages=pages))
    return outs


def in_chunks_of(s: Sequences, size: int) -> list[Tensor]:
    outs = []
    for q, k, v in zip(s.q, s.k, s.v, strict=True):
        pieces, end = [], 0
        for piece in q.split(size):
            end += len(piece)
            pieces.append(s.attention(piece[None], k[None, :end], v[None, :end], s.mask)[0])
        outs.append(torch.cat(pieces))
    return outs


def paged(page_size: int) -> Callable[[Sequences], list[Tensor]]:
    def run(s: Sequences) -> list[Tensor]:
        columns = -(-max(s.lengths) // page_size)
        table = torch.randperm(len(s.lengths) * columns).int().view(len(s.lengths), columns)
        pools = []
        for tensors in (s.k, s.v):
            pool = torch.full((table.numel(), page_size, *tensors[0].shape[1:]), float("nan"), dtype=tensors[0].dtype)
            for row, t in zip(table, tensors, strict=True):
                for page, piece in zip(row, t.split(page_size), strict=False):
                    pool[page, : len(piece)] = piece
            pools.append(pool)
        k, v = pools
        lengths = torch.tensor(s.lengths)
        out = s.attention(padded(s.q).nan_to_num(), k, v, s.mask & masks.lengths(lengths, lengths), pages=table)
        packed = s.attention(torch.cat(s.q), k, v, s.mask & masks.documents(offsets(s), offsets(s)), "thd", pages=table)
        for row, n, other in zip(out, s.lengths, packed.split(s.lengths), strict=True):
            assert torch.equal(row[:n], other)
        return [row[:n] for row, n in zip(out, s.lengths, strict=True)]

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

DECODING_WAYS: dict[str, Callable[[Sequences], list[Tensor]]] = {
    "token by token": token_by_token,
    "tokens as a batch": tokens_as_a_batch,
    "tokens as a pack": tokens_as_a_pack,
}
"""Ways of many calls or rows, too many for an interpreter."""
