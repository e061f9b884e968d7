"""Functions of positions: the pairs of structured masks, and the same rows whatever a step has of a sequence."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import ContextParallel, InferenceParams, InputError, KVCache, PagedKVCache, masks
from undivided.context_parallel import ContextPagedKVCache, simulate
from undivided.masks import Mask

HEADS, KV_HEADS, DIM = 4, 2, 16


def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """``window(5, 0)``, as a function."""
    return (i >= j) & (i - j <= 5)


def strided(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & ((i - j + h) % 3 != 1)


KV, Q = torch.tensor([9, 4, 0]), torch.tensor([6, 2, 0])
CALLS: dict[str, tuple[int, int, int, Mask | None, Any]] = {
    "equal": (1, 9, 9, None, None),
    "bottom-right": (2, 3, 9, None, "bottom_right"),
    "top-left": (2, 3, 9, None, "top_left"),
    "more-queries-than-keys": (1, 9, 3, None, "bottom_right"),
    "lengths": (3, 6, 9, masks.lengths(KV, Q), "bottom_right"),
    "lengths-of-keys": (3, 6, 9, masks.lengths(KV), "bottom_right"),
    "left-padding": (3, 9, 9, masks.lengths(KV, KV, kv_start=9 - KV, q_start=9 - KV), None),
    "documents": (1, 9, 9, masks.documents([0, 2, 2, 9]), None),
    "documents-of-a-cache": (1, 5, 12, masks.documents([0, 2, 5], [0, 4, 12]), "bottom_right"),
    "padded-documents": (1, 8, 12, masks.documents([0, 2, 5], [0, 4, 8], [0, 4, 8], [0, 5, 12]), "bottom_right"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_pairs_are_those_of_the_structured_mask(name: str) -> None:
    batch, q_len, kv_len, tokens, align = CALLS[name]
    found, expected = masks.predicate(near, positions=True, align=align), masks.window(5, 0, align)
    if tokens is not None:
        found, expected = found & tokens, expected & tokens
    sizes = batch, 1, q_len, kv_len
    assert torch.equal(found.to_dense(*sizes).expand(sizes), expected.to_dense(*sizes).expand(sizes))


def tokens(*lengths: int) -> list[list[Tensor]]:
    """[q, k, v] of each sequence, [n, heads, dim]."""
    torch.manual_seed(0)
    return [[torch.randn(n, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)] for n in lengths]


def whole(sequence: list[Tensor], mask: Mask) -> Tensor:
    q, k, v = (t[None] for t in sequence)
    return undivided.attention(q, k, v, layout="bshd", mask=mask, backend="reference")[0]


LENGTHS, STEPS = (20, 13), ((20, 13), (7, 1), (1, 5))
MASKS = {
    "alone": masks.predicate(strided, positions=True),
    "in-a-window": masks.predicate(strided, positions=True) & masks.window(9, 0),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("kind", ["rows", "pages", "layers", "ranks"])
def test_a_cache_gives_the_rows_of_one_pass(kind: str, layout: Any, step: tuple[int, ...], name: str) -> None:
    """A function of raw indices counts the rows of the call: a decoded token would see the first key alone."""
    mask, sequences = MASKS[name], tokens(*LENGTHS)

    def generate(group: object = None) -> list[Tensor]:
        options: dict[str, Any] = {"dtype": torch.float32, "layout": layout}
        cache: Any = None
        if kind == "rows":
            cache = KVCache(2, 20, KV_HEADS, DIM, **options)
        elif kind == "pages":
            cache = PagedKVCache(20, 4, KV_HEADS, DIM, batch=2, **options)
        elif kind == "ranks":
            cache = ContextPagedKVCache(ContextParallel(group), 20, 4, KV_HEADS, DIM, batch=2, **options)
        else:
            cache = InferenceParams(2, 20, KV_HEADS, DIM, torch.float32, is_paged=True, page_size=4, qkv_format=layout)
        rows: list[list[Tensor]] = [[], []]
        at = [0, 0]
        while at != list(LENGTHS):
            counts = [min(new, end - start) for new, start, end in zip(step, at, LENGTHS, strict=True)]
            parts = [[t[start : start + n] for t in s] for s, start, n in zip(sequences, at, counts, strict=True)]
            new = [
                torch.cat(p) if layout == "thd" else torch.nn.utils.rnn.pad_sequence(p, batch_first=True)
                for p in zip(*parts, strict=True)
            ]
            if kind == "layers":
                cache.pre_step(OrderedDict(enumerate(counts)))
                out = cache.attend(1, *new, mask=mask)
            else:
                cache.append(*new[1:], lengths=counts)
                out = cache.attend(new[0], mask)
            split = out.split(counts) if layout == "thd" else [o[:n] for o, n in zip(out, counts, strict=True)]
            for found, part in zip(rows, split, strict=True):
                found.append(part)
            at = [a + n for a, n in zip(at, counts, strict=True)]
        return [torch.cat(found) for found in rows]

    found = simulate(2, generate)[1] if kind == "ranks" else generate()
    for rows, sequence in zip(found, sequences, strict=True):
        torch.testing.assert_close(rows, whole(sequence, mask))


@pytest.mark.parametrize("backend", ["reference", "native", "torch_flash", "triton", "flex"])
def test_every_backend_evaluates_positions(backend: str) -> None:
    q, k, v = torch.randn(2, 5, 2, DIM), torch.randn(2, 12, 2, DIM), torch.randn(2, 12, 2, DIM)
    own = masks.lengths(torch.tensor([12, 7]), torch.tensor([5, 3]))
    call: dict[str, Any] = {"layout": "bshd", "mask": masks.predicate(near, positions=True, align="bottom_right") & own}
    decision = undivided.explain(q, k, v, backend=backend, **call)
    if decision.chosen is None:
        pytest.skip(decision.reasons[backend][0])
    out = undivided.attention(q, k, v, backend=backend, **call)
    structured = masks.window(5, 0, "bottom_right") & own
    torch.testing.assert_close(out, undivided.attention(q, k, v, layout="bshd", mask=structured, backend="reference"))


def test_verification_and_compilation_and_context_ranks_evaluate_positions() -> None:
    q, k, v = (torch.randn(1, 16, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    mask = masks.predicate(near, positions=True, align="bottom_right")
    assert undivided.verify(q[:, 8:], k, v, layout="bshd", mask=mask).ok
    expected = undivided.attention(q[:, 8:], k, v, layout="bshd", mask=masks.window(5, 0, "bottom_right"))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q: Tensor, mask: Mask) -> Tensor:
        return undivided.attention(q, k, v, layout="bshd", mask=mask) * 1

    torch.testing.assert_close(compiled(q[:, 8:], mask), expected)
    torch.testing.assert_close(compiled(q[:, 8:], pickle.loads(pickle.dumps(mask))), expected)

    def on_rank(group: object) -> Tensor:
        cp = ContextParallel(group)
        own = (cp.shard(t, "bshd") for t in (q, k, v))
        out = undivided.attention(*own, layout="bshd", mask=masks.predicate(near, positions=True), context_parallel=cp)
        return cp.unshard(out, "bshd")

    for out in simulate(2, on_rank):
        torch.testing.assert_close(out, undivided.attention(q, k, v, layout="bshd", mask=masks.window(5, 0)))


def test_the_head_and_the_sequence_remain_indices() -> None:
    seen: list[list[int]] = []

    def note(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen.append([*b.flatten().tolist(), *i.flatten().tolist()])
        return i >= j

    cache = PagedKVCache(20, 4, 2, DIM, batch=2, dtype=torch.float32)
    new = torch.randn(2, 6, 2, DIM)
    cache.append(new, new)
    cache.attend(new[:, :1], masks.predicate(note, positions=True), q_lengths=[1, 1])
    assert {tuple(row) for row in seen} <= {(0, 5), (1, 5), (0, 1, 5)}


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match=r"align must be None without positions=True: indices have no alignment"):
        masks.predicate(near, align="bottom_right")
    with pytest.raises(InputError, match=r"positions must be True or False, got 1"):
        masks.predicate(near, positions=1)  # type: ignore[arg-type]
    q = torch.randn(1, 3, 2, DIM)
    k = torch.randn(1, 9, 2, DIM)
    with pytest.raises(InputError, match=r"align must be given(.|\n)*in causal, window, chunks or predicate"):
        undivided.attention(q, k, k, layout="bshd", mask=masks.predicate(near, positions=True))
    cache = KVCache(1, 9, 2, DIM, dtype=torch.float32, layout="thd")
    cache.append(k[0], k[0], lengths=[9])
    with pytest.raises(InputError, match=r"in layout 'thd', got predicate\(near\)\n  HINT: masks.predicate\(fn, posi"):
        cache.attend(q[0], masks.predicate(near), q_lengths=[3])
    with pytest.raises(InputError, match=r"in layout 'thd', got .*dense.*\n  HINT: pass padded"):
        cache.attend(q[0], MASKS["alone"] & masks.dense(torch.ones(3, 9) > 0), q_lengths=[3])
