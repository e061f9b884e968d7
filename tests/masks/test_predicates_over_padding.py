"""Predicates are evaluated for real tokens only: their tensors need not cover padding.

Flamingo's text tokens attend to the images of their own chunk (Alayrac et al. 2022, arXiv:2204.14198): the predicate
compares `text_time[q]` with `media_time[k]`, and these tensors are as long as the text and the images, not as the
padded batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.backends import flex
from undivided.cache import KVCache
from undivided.errors import InputError
from undivided.machine import Machine
from undivided.masks import Mask

Q_LENGTHS, KV_LENGTHS = [5, 0, 7], [4, 3, 6]  # of at most 9 queries and 7 keys
Q_LEN, KV_LEN = 9, 7
TEXT_TIME, MEDIA_TIME = torch.tensor([0, 0, 1, 1, 1, 2, 2]), torch.tensor([0, 0, 0, 1, 2, 2])
MISSING = flex._no_compiler(Machine.this())
NEEDS_COMPILER = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
OURS = ["reference", "native", "torch_flash"]
BACKENDS = [*OURS, pytest.param("flex", marks=[NEEDS_COMPILER, pytest.mark.slow])]
"""FlexAttention compiles for each mask, which takes seconds."""


def flamingo(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return TEXT_TIME[q] == MEDIA_TIME[k]


def flat(pieces: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The pieces one after another, and the offset of each."""
    lengths = torch.tensor([len(piece) for piece in pieces])
    return torch.cat(pieces), lengths.cumsum(0) - lengths


TEXT, TEXT_START = flat([TEXT_TIME[:n] for n in Q_LENGTHS])
MEDIA, MEDIA_START = flat([MEDIA_TIME[:n] for n in KV_LENGTHS])


def ragged(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The same over packed tensors without padding."""
    return TEXT[TEXT_START[b] + q] == MEDIA[MEDIA_START[b] + k]


def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each sequence computed alone, without padding: [B, Sq, H, D], 0 in the padding."""
    out = torch.zeros(*q.shape[:3], v.shape[-1])
    for n, (rows, keys) in enumerate(zip(Q_LENGTHS, KV_LENGTHS, strict=True)):
        pairs = TEXT_TIME[:rows, None] == MEDIA_TIME[:keys]
        alone = [t[n : n + 1, :size].transpose(1, 2) for t, size in ((q, rows), (k, keys), (v, keys))]
        found = torch.nn.functional.scaled_dot_product_attention(*alone, attn_mask=pairs)
        out[n, :rows] = torch.nan_to_num(found[0].transpose(0, 1))  # a row without keys is NaN there and 0 here
    return out


def tensors(*lengths: int, batch: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, n, 2, 16, generator=generator) for n in lengths]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fn", [flamingo, ragged], ids=["longest-sequence", "one-after-another"])
def test_tensors_as_long_as_the_real_lengths(fn: Callable[..., Tensor], backend: str) -> None:
    q, k, v = tensors(Q_LEN, KV_LEN, KV_LEN)
    mask = masks.lengths(torch.tensor(KV_LENGTHS), torch.tensor(Q_LENGTHS)) & masks.predicate(fn)
    with torch.no_grad():
        found = undivided.attention(q, k, v, layout="bshd", mask=mask, backend=backend)
    torch.testing.assert_close(found, expected(q, k, v))


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_gradients_with_tensors_as_long_as_the_real_lengths(backend: str) -> None:
    inputs = [t.requires_grad_() for t in tensors(Q_LEN, KV_LEN, KV_LEN)]
    mask = masks.lengths(torch.tensor(KV_LENGTHS), torch.tensor(Q_LENGTHS)) & masks.predicate(ragged)
    found = undivided.attention(*inputs, layout="bshd", mask=mask, backend=backend)
    wanted = expected(*inputs)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(wanted.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_padding_on_the_left() -> None:
    """Raw indices count from the start of the tensor: a captured tensor that ends with the sequence is enough."""
    start, real = torch.tensor([2, 0]), torch.tensor([3, 5])
    table = torch.tensor([1, 2, 0, 1, 2])
    mask = masks.lengths(real, real, start, start) & masks.predicate(lambda b, h, q, k: table[:5][q] >= table[:5][k])
    pairs = mask.to_dense(2, 1, 9, 9)
    assert torch.equal(pairs[0, 0, 2:5, 2:5], table[2:, None] >= table[2:])
    assert torch.equal(pairs[1, 0, :5, :5], table[:, None] >= table)
    assert int(pairs.sum()) == int(pairs[0, 0, 2:5, 2:5].sum() + pairs[1, 0, :5, :5].sum())


@pytest.mark.parametrize("padded", [False, True], ids=["tokens-after-the-documents", "gaps-between-documents"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_in_thd(padded: bool, backend: str) -> None:
    """10 tokens; the captured tensor covers them up to the last real one."""
    cu = torch.tensor([0, 3, 3, 7])
    at = torch.tensor([0, 4, 4, 9]) if padded else cu
    real = torch.tensor([0, 1, 2, 4, 5, 6, 7] if padded else range(7))
    table = torch.full((int(real[-1]) + 1,), 9)
    table[real] = torch.tensor([0, 1, 0, 1, 0, 0, 1])
    mask = masks.documents(cu, padded_q=at, padded_kv=at, total_q=10, total_kv=10) & masks.predicate(
        lambda b, h, q, k: table[q] == table[k]
    )
    q, k, v = (t[0] for t in tensors(10, 10, 10, batch=1))
    with torch.no_grad():
        found = undivided.attention(q, k, v, layout="thd", mask=mask, backend=backend)
    wanted = torch.zeros_like(v)
    for rows in (real[:3], real[3:]):
        alone = [t[rows].transpose(0, 1) for t in (q, k, v)]
        pairs = table[rows, None] == table[rows]
        wanted[rows] = torch.nn.functional.scaled_dot_product_attention(*alone, attn_mask=pairs).transpose(0, 1)
    torch.testing.assert_close(found, wanted)


def test_a_cache_that_is_not_full() -> None:
    """The buffer has room for 12 keys; the captured tensor covers the 6 real ones."""
    q, k, v = tensors(1, 6, 6, batch=2)
    cache = KVCache(2, 12, 2, 16, dtype=torch.float32)
    cache.append(k, v)
    mask = masks.predicate(lambda b, h, i, j: MEDIA_TIME[j] == 2)
    wanted = undivided.attention(q, k, v, layout="bshd", mask=masks.dense((MEDIA_TIME == 2)[None]))
    torch.testing.assert_close(cache.attend(q, mask), wanted)


def seen_shapes(mask_of: Callable[[Mask], Mask], batch: int) -> list[list[int]]:
    shapes: list[list[int]] = []

    def fn(*indices: Tensor) -> Tensor:
        shapes.extend(list(index.shape) for index in indices)
        return sum(indices[1:]) % 2 == 0  # no range of keys describes it

    form = mask_of(masks.predicate(fn)).normal_form(batch, 2, 4, 4, torch.device("cpu"))
    shapes.clear()
    form.allowed(slice(0, batch), slice(0, 4), slice(0, 4), slice(0, 2))
    return shapes


def test_indices_keep_their_shapes() -> None:
    """One call if all sequences have the same padding, otherwise one call per sequence."""
    one_call = [[3, 1, 1, 1], [1, 2, 1, 1], [1, 1, 4, 1], [1, 1, 1, 4]]
    assert seen_shapes(lambda fn: fn, 3) == one_call
    assert seen_shapes(lambda fn: fn & masks.lengths([4, 4, 4]), 3) == one_call
    assert seen_shapes(lambda fn: fn & masks.lengths([2, 2, 2]), 3) == one_call
    assert seen_shapes(lambda fn: fn & masks.lengths([2, 4, 0]), 3) == [[1, 1, 1, 1], *one_call[1:]] * 2


@pytest.mark.parametrize("batch", [0, 2])
def test_sequences_without_any_token_are_not_evaluated(batch: int) -> None:
    def never(*indices: Tensor) -> Tensor:
        raise AssertionError("there is nothing real to evaluate")

    nothing = torch.zeros(batch, dtype=torch.int64)
    mask = masks.lengths(nothing, nothing) & masks.predicate(never if batch else flamingo)
    assert not mask.to_dense(batch, 1, 4, 4).any()


def test_a_tensor_that_is_too_short_is_named() -> None:
    q, k, v = tensors(Q_LEN, KV_LEN, KV_LEN)
    message = r"fn must be defined for every real query and key \(q_idx up to 8, kv_idx up to 6\), got IndexError"
    with pytest.raises(InputError, match=message) as caught:
        undivided.attention(q, k, v, layout="bshd", mask=masks.predicate(flamingo))
    assert "masks.lengths(kv, q) & masks.predicate(fn)" in str(caught.value)


def test_a_compiled_call() -> None:
    q, k, v = tensors(Q_LEN, KV_LEN, KV_LEN)
    mask: Any = masks.lengths(torch.tensor(KV_LENGTHS), torch.tensor(Q_LENGTHS)) & masks.predicate(ragged)
    compiled = torch.compile(
        lambda *t: undivided.attention(*t, layout="bshd", mask=mask), backend="aot_eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(q, k, v), expected(q, k, v))
    torch._dynamo.reset()
