"""Attention over chosen pages of a cache, and options of `attend` that reach the kernel."""

from __future__ import annotations

import pytest
import torch

import undivided
from undivided import PagedKVCache, masks

LENGTHS = (50, 33)


def filled(layout: str, quantize: str | None = None) -> tuple[PagedKVCache, list[torch.Tensor]]:
    torch.manual_seed(0)
    cache = PagedKVCache(32, 8, 2, 32, batch=2, dtype=torch.float32, layout=layout, quantize=quantize)
    keys = [torch.randn(length, 2, 32) for length in LENGTHS]
    padded = torch.nn.utils.rnn.pad_sequence(keys, batch_first=True)
    new = torch.cat(keys) if layout == "thd" else padded
    cache.append(new, new, lengths=LENGTHS)
    return cache, keys


@pytest.mark.parametrize(("quantize", "tolerance"), [(None, 1e-5), ("int8", 0.03)])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_a_step_over_chosen_pages_is_attention_over_their_keys(
    layout: str, quantize: str | None, tolerance: float
) -> None:
    cache, keys = filled(layout, quantize)
    q = torch.randn(2, 4, 32) if layout == "thd" else torch.randn(2, 1, 4, 32)
    chosen = torch.tensor([[[0, 6], [1, 2]], [[0, 4], [3, -1]]])  # per key head
    out = cache.attend(q, masks.pages(chosen, 8), q_lengths=[1, 1]).view(2, 4, 32)
    for i, key in enumerate(keys):
        for h in range(4):
            pages = [page for page in chosen[i, h // 2].tolist() if page >= 0]
            seen = torch.cat([key[page * 8 : (page + 1) * 8, h // 2] for page in pages])
            weights = (seen @ q.view(2, 4, 32)[i, h] * 32**-0.5).softmax(0)
            torch.testing.assert_close(out[i, h], weights @ seen, rtol=tolerance, atol=tolerance)


def test_a_cache_gives_batch_invariant_results_if_a_call_requests_them() -> None:
    cache, keys = filled("bshd")
    q = torch.randn(2, 1, 4, 32)
    out = cache.attend(q, q_lengths=[1, 1], batch_invariant=True)
    for i, key in enumerate(keys):
        alone = undivided.attention(q[i : i + 1], key[None], key[None], layout="bshd", batch_invariant=True)
        assert torch.equal(out[i : i + 1], alone)
