"""Options of the native kernel, what it reads in place, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from native_oracle import ALLOWED, LIBRARY, apart, check, needs_library, oracle

import undivided
from undivided import NoBackendError, masks
from undivided.backends.native import evaluated
from undivided.kernels import cpu
from undivided.masks import Mask
from undivided.masks.normal_form import row_blocks as normal_form_blocks


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("q_len", [70, 2])
def test_softcap_sinks_alibi_and_bias_together(q_len: int, dtype: torch.dtype) -> None:
    q = torch.randn(2, 4, q_len, 64).to(dtype)
    k, v = (torch.randn(2, 2, 150, 64).to(dtype) for _ in range(2))
    bias = torch.randn(1, 4, 1, 150).to(dtype)
    bias[..., 3:6] = -math.inf
    sinks, slopes = torch.randn(4), torch.rand(4)
    out = undivided.attention(
        q,
        k,
        v,
        layout="bhsd",
        mask=masks.causal("bottom_right"),
        bias=bias,
        softcap=2.0,
        sinks=sinks,
        alibi_slopes=slopes,
        backend="native",
    )
    i, j = torch.arange(q_len).unsqueeze(1), torch.arange(150)
    distance = (i + 150 - q_len - j).abs()
    allowed = (j <= i + 150 - q_len) & (bias != -math.inf)
    extra = bias.double().masked_fill(bias == -math.inf, 0.0) - slopes.double()[:, None, None] * distance
    want, lse = oracle(q, k, v, allowed, lambda s: 2 * torch.tanh(s / 2) + extra)
    want = want * torch.sigmoid(lse - sinks.double()[:, None]).unsqueeze(-1)
    assert apart(out, want) < ALLOWED[dtype]


@needs_library
def test_softcap_and_sinks_when_decoding() -> None:
    q, k, v = torch.randn(1, 4, 1, 64), torch.randn(1, 2, 500, 64), torch.randn(1, 2, 500, 64)
    sinks = torch.randn(4)
    out = undivided.attention(q, k, v, layout="bhsd", softcap=3.0, sinks=sinks, backend="native")
    want, lse = oracle(q, k, v, torch.ones(1, 4, 1, 500, dtype=torch.bool), lambda s: 3 * torch.tanh(s / 3))
    assert apart(out, want * torch.sigmoid(lse - sinks.double()[:, None]).unsqueeze(-1)) < 1e-6


DROPPED: dict[str, tuple[str, tuple[int, ...], int, Callable[[], Mask | None]]] = {
    # layout, q's shape, keys, mask: odd starts, so that the keys of a counter straddle tiles and bf16 pairs
    "full": ("bhsd", (2, 4, 45, 32), 150, lambda: None),
    "few-rows": ("bhsd", (2, 4, 1, 32), 150, lambda: None),
    "left-padded": (
        "bhsd",
        (2, 4, 45, 32),
        150,
        lambda: masks.lengths([140, 133], kv_start=[5, 17]) & masks.causal("bottom_right"),
    ),
    "documents": ("thd", (150, 4, 32), 150, lambda: masks.documents([0, 5, 12, 113, 150]) & masks.causal()),
    "blocks-of-rows": ("bhsd", (1, 4, 70, 32), 150, lambda: masks.predicate(lambda b, h, i, j: (i + j + h) % 3 != 0)),
}


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("case", DROPPED)
def test_dropout_drops_what_the_reference_drops(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the identity as values the output is the weights: zeros are at the same places, the rest is close."""
    monkeypatch.setattr(evaluated, "MASK_PAIRS", 1)
    torch.manual_seed(0)
    layout, shape, keys, mask = DROPPED[case]
    q = torch.randn(shape).to(dtype)
    k = torch.randn(*((keys, 2) if layout == "thd" else (shape[0], 2, keys)), 32).to(dtype)
    v = torch.eye(keys, dtype=dtype)
    v = v[:, None].expand(keys, 2, keys) if layout == "thd" else v.expand(shape[0], 2, keys, keys)
    weights, want = (
        undivided.attention(
            q, k, v, layout=layout, mask=mask(), dropout_p=0.3, dropout_seed=1 << 40 | 77, backend=backend
        )
        for backend in ("native", "reference")
    )  # type: ignore[call-overload]
    assert torch.equal(weights == 0, want == 0)
    assert float((want == 0).float().mean()) > 0.2
    assert apart(weights, want.double()) < ALLOWED[dtype]


@needs_library
def test_dropout_of_everything_gives_zeros() -> None:
    q = torch.randn(1, 2, 40, 16)
    assert not undivided.attention(q, q, q, layout="bhsd", dropout_p=1.0, backend="native").any()


@needs_library
def test_a_mask_evaluated_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluated, "MASK_PAIRS", 1)
    q, k, v = (torch.randn(2, 2, 100, 16) for _ in range(3))
    ids = torch.randint(0, 3, (2, 100))
    check(q, k, v, masks.document_ids(ids) & masks.causal())


@needs_library
def test_views_are_read_in_place() -> None:
    """q, k, v as slices of one tensor, and heads broadcast by a stride of 0."""
    packed = torch.randn(2, 90, 3, 4, 32)
    q, k, v = (t.transpose(1, 2) for t in packed.unbind(2))
    check(q, k, v, None)
    check(q, k[:, :1].expand(2, 4, 90, 32), v[:, :, ::2][:, :, :45].repeat_interleave(2, 2), None)


@needs_library
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
def test_calls_of_the_same_sizes_have_strides_of_their_own(layout: str) -> None:
    """A call's strides are remembered with its sizes: a dense call, then views of the same sizes, then a dense one."""
    shape, seed = (1, 3, 1, 16), torch.Generator().manual_seed(0)
    for strides in (None, (7, 96, 5, 1), (3, 16, 999, 1), (1000, 32, 40, 1), None):
        q, k, v = torch.randn(3, *shape, generator=seed)
        if strides is not None:
            q, k, v = (torch.empty(2048).as_strided(shape, strides).copy_(t) for t in (q, k, v))
        got = undivided.attention(q, k, v, layout=layout, backend="native")  # type: ignore[arg-type]
        want = undivided.attention(q, k, v, layout=layout, backend="reference")  # type: ignore[arg-type]
        assert apart(got, want.double()) < ALLOWED[torch.float32]


@needs_library
def test_what_it_refuses() -> None:
    q = torch.randn(1, 8, 2, 16, dtype=torch.float64)
    with pytest.raises(NoBackendError) as caught:
        undivided.attention(q, q, q, layout="bshd", backend="native")
    assert "dtype=float64 (supports bfloat16, float16, float32)" in caught.value.decision.reasons["native"]
    strided = torch.randn(1, 8, 2, 32)[..., ::2]
    with pytest.raises(NoBackendError) as caught:
        undivided.attention(strided, strided, strided, layout="bshd", backend="native")
    wanted = "no support for a last axis whose stride is not 1 (its rows are contiguous)"
    assert wanted in caught.value.decision.reasons["native"]


@needs_library
def test_a_record_of_another_version_is_refused() -> None:
    assert isinstance(LIBRARY, cpu.Library)
    with pytest.raises(RuntimeError, match="another version"):
        LIBRARY.forward(cpu.RECORD.pack(*[0] * len(cpu.FIELDS)))


@needs_library
def test_evaluated_pairs_are_those_that_the_ranges_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were those of every row and key."""
    all_pairs, sizes, counts = evaluated.all_pairs, list[int](), []

    def count(*arguments: Any) -> torch.Tensor:
        pairs = all_pairs(*arguments)
        sizes.append(pairs.numel())
        return pairs

    monkeypatch.setattr(evaluated, "all_pairs", count)
    for tokens in (2048, 4096, 8192):
        q = torch.randn(1, tokens, 1, 16)
        mask = masks.window(16, 0) & masks.document_ids(torch.arange(tokens)[None] % 2)
        undivided.attention(q, q, q, layout="bshd", mask=mask, backend="native")
        counts.append(sum(sizes))
        sizes.clear()
    assert counts[1] < 2.2 * counts[0]
    assert counts[2] < 2.2 * counts[1]


IDS = masks.document_ids(torch.arange(300).expand(2, -1) // torch.tensor([[5], [3]]) % 2)
EVALUATED = {
    "ids": IDS & masks.window(9, 3),
    "ids-of-each-length": IDS & masks.window(40, 0) & masks.lengths([300, 113], [300, 113]),
    "two-unions": (masks.window(9, 0) | masks.sinks(2)) & (masks.window(5, 0) | masks.sinks(1)),
    "by-head": masks.predicate(lambda b, h, i, j: (i + j + h + b) % 3 > 0) & masks.window(20, 0),
    "rows-without-keys": IDS & masks.window(9, 3) & masks.lengths([300, 0], [300, 0]),
}


@needs_library
@pytest.mark.parametrize("mask", EVALUATED)
def test_masks_evaluated_for_the_keys_of_each_block(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normal_form_blocks, "MIN_SAVED_PAIRS", 1)
    q, k, v, dout = (torch.randn(2, 2, 300, 16, dtype=torch.float64) for _ in range(4))
    found, right = (
        gradients_of(EVALUATED[mask], backend, *(x.to(dtype) for x in (q, k, v, dout)))
        for backend, dtype in (("native", torch.float32), ("reference", torch.float64))
    )
    for x, want in zip(found, right, strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1e-4, atol=1e-4)


def gradients_of(mask: masks.Mask, backend: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The output and the gradients of q, k and v."""
    *leaves, dout = tensors
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = undivided.attention(*leaves, layout="bhsd", mask=mask, backend=backend)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))
