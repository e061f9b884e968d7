"""NaN in keys that no query may attend to, and in queries without keys, stays out of results under every mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import undivided
from undivided import masks
from undivided.kernels.triton import config

window, causal, sinks = masks.window, masks.causal, masks.prefix(2)
DENSE = {
    "a window at the end": window(2, 0, "bottom_right"),
    "a window at the start": window(3, 0, "top_left"),
    "a window to both sides": window(1, 1, "bottom_right"),
    "causal from the start": causal("top_left"),
    "a window and sinks": window(2, 0, "bottom_right") | sinks,
    "chunks": masks.chunks(5, "bottom_right"),
    "lengths, a window and sinks": masks.lengths([50, 31]) & (window(2, 0, "bottom_right") | sinks),
    "lengths of both and a window": masks.lengths([50, 31], [3, 2]) & window(2, 0, "bottom_right"),
}
PACKED = {
    "documents and a window": window(2, 0, "bottom_right"),
    "documents, a window and sinks": window(2, 0, "bottom_right") | sinks,
}


def _compare(q: torch.Tensor, kv_len: tuple[int, ...], mask: masks.Mask, layout: Any, gradients: bool) -> None:
    k, v = torch.randn(*kv_len, 2, 16), torch.randn(*kv_len, 2, 16)
    sizes = (1, q.shape[0], kv_len[0]) if layout == "thd" else (q.shape[0], q.shape[1], kv_len[1])
    used = mask.to_dense(sizes[0], 1, sizes[1], sizes[2])[:, 0].any(1)
    used = used[0] if layout == "thd" else used
    assert not used.all()
    results = []
    for backend in ("reference", "triton"):
        leaves = [t.clone().requires_grad_(gradients) for t in (q, k, v)]
        with torch.no_grad():
            for leaf in leaves[1:]:
                leaf[~used] = torch.nan
        out = undivided.attention(*leaves, layout=layout, mask=mask, backend=backend)
        grads = torch.autograd.grad(out.square().sum(), leaves) if gradients else ()
        results.append([out, *grads])
    for got, expected in zip(*reversed(results), strict=True):
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize(
    ("name", "q_len"), [(name, q_len) for name in DENSE for q_len in (1, 3) if q_len == 3 or "both" not in name]
)
def test_keys_that_no_query_sees(name: str, q_len: int, gradients: bool) -> None:
    torch.manual_seed(0)
    _compare(torch.randn(2, q_len, 2, 16), (2, 50), DENSE[name], "bshd", gradients)


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("name", PACKED)
def test_keys_that_no_query_of_their_document_sees(name: str, gradients: bool) -> None:
    torch.manual_seed(0)
    mask = masks.documents([0, 3, 5], [0, 50, 90]) & PACKED[name]
    _compare(torch.randn(5, 2, 16), (90,), mask, "thd", gradients)


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "gradients"])
def test_keys_beyond_a_prefix_of_a_sequence_with_as_many_queries(gradients: bool) -> None:
    torch.manual_seed(0)
    _compare(torch.randn(2, 20, 2, 16), (2, 20), masks.prefix(3), "bshd", gradients)


def _heads_that_hide_a_row() -> masks.Mask:
    seen = torch.rand(1, 2, 6, 9) < 0.7
    seen[:, 1, 2] = False  # the ranges are those of both heads
    return masks.dense(seen)


HIDDEN_ROWS = {
    "blocks": lambda: masks.blocks(1, 1, [[-1], [0], [-1], [2], [0], [1]]),
    "blocks of each head": lambda: masks.blocks(2, 4, [[[0], [-1], [1]], [[-1], [-1], [0]]]),
    "a dense mask of each head": _heads_that_hide_a_row,
    "a dense mask and a window": lambda: (
        masks.window(1, 1, "top_left") & masks.dense((torch.arange(9) % 6 == 0).expand(6, 9))
    ),
}


@pytest.mark.parametrize("name", HIDDEN_ROWS)
def test_rows_without_keys_whose_ranges_hold_some_may_be_nan(name: str) -> None:
    """Rows were set to 0 by their ranges alone: a NaN in Q reached dk, and one in the output's gradient dv."""
    torch.manual_seed(0)
    mask = HIDDEN_ROWS[name]()
    hidden = ~mask.to_dense(1, 2, 6, 9).expand(1, 2, 6, 9).any(-1).transpose(1, 2)
    assert hidden.any()
    q, k, v, grad = (torch.randn(1, length, 2, 16) for length in (6, 9, 9, 6))
    q[hidden], grad[hidden] = torch.nan, torch.nan
    results = []
    for backend in ("triton", "reference"):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = undivided.attention(*leaves, layout="bshd", mask=mask, backend=backend)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    for found, expected in zip(*results, strict=True):
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def _bias(sizes: tuple[int, ...], hidden: tuple[Any, ...]) -> torch.Tensor:
    bias = torch.randn(sizes)
    bias[hidden] = -torch.inf
    return bias


HIDING_BIASES = {
    "no mask": (lambda: None, lambda: _bias((1, 2, 6, 9), (..., 2, slice(None)))),
    "one head": (lambda: None, lambda: _bias((1, 2, 6, 9), (0, 1, 4))),
    "all heads": (lambda: None, lambda: _bias((6, 1), (2,))),
    "causal": (lambda: masks.causal("bottom_right"), lambda: _bias((1, 2, 6, 9), (0, 1, 4))),
    "keys of a window": (lambda: masks.window(1, 1, "top_left"), lambda: _bias((6, 9), (3, slice(2, 5)))),
    "a union": (lambda: masks.window(1, 0, "bottom_right") | sinks, lambda: _bias((6, 9), (3,))),
}


@pytest.mark.parametrize("described", [False, True], ids=["", "descriptors"])
@pytest.mark.parametrize("name", HIDING_BIASES)
def test_rows_whose_bias_hides_every_key_may_be_nan(name: str, described: bool) -> None:
    """A NaN in Q reached dk, and one in the output's gradient dv."""
    torch.manual_seed(0)
    make_mask, make_bias = HIDING_BIASES[name]
    mask, bias = make_mask(), make_bias()
    allowed = torch.ones(1, 2, 6, 9, dtype=torch.bool) if mask is None else mask.to_dense(1, 2, 6, 9)
    hidden = ~(allowed & (bias > -torch.inf)).any(-1).transpose(1, 2)
    assert hidden.any()
    assert not hidden.all()
    q, k, v, grad = (torch.randn(1, length, 2, 16) for length in (6, 9, 9, 6))
    q[hidden], grad[hidden] = torch.nan, torch.nan
    tensors = q, k, v, bias, torch.randn(2)
    results = []
    tile = config.INTERPRETED._replace(descriptors=described)
    with config.trial("forward", tile), config.trial("rows", tile), config.trial("keys", tile):
        for backend in ("triton", "reference"):
            leaves = [tensor.clone().requires_grad_() for tensor in tensors]
            options: dict[str, Any] = {"mask": mask, "bias": leaves[3], "sinks": leaves[4], "softcap": 5.0}
            out, lse = undivided.attention(*leaves[:3], layout="bshd", return_lse=True, backend=backend, **options)
            results.append([out, lse, *torch.autograd.grad(out, leaves, grad)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_keys_of_pages_between_two_ranges() -> None:
    torch.manual_seed(0)
    q, pool = torch.randn(1, 3, 2, 16), torch.randn(4, 16, 2, 16)
    pages = torch.tensor([[2, 0, 3]], dtype=torch.int32)
    pool[2, 2:], pool[0], pool[3, :9], pool[3, 14:], pool[1] = (torch.nan,) * 5
    mask = masks.lengths([46]) & (window(2, 0, "bottom_right") | sinks)
    found, expected = (
        undivided.attention(q, pool, pool, layout="bshd", mask=mask, pages=pages, backend=backend)
        for backend in ("triton", "reference")
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
