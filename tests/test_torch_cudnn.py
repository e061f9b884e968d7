"""How cuDNN is called through PyTorch's operators: against a stand-in, for there is no GPU here."""

from __future__ import annotations

import types

import pytest
import torch

import fake_gpu_kernels as fake
from adapter_check import Recorder, check, tensors
from undivided import masks
from undivided.backends import torch_cudnn


def test_torch_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Recorder()

    def run_with(causal, scale):
        def run(q, k, v):  # [B, H, S, D], top-left
            allowed = fake.band_pairs(q.shape[2], k.shape[2], (None, 0 if causal else None), 0)
            found = [fake.plain(q[b], k[b], v[b], scale, allowed) for b in range(len(q))]
            return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])

        return run

    def forward(q, k, v, bias, cu_q, cu_k, max_q, max_k, lse_wanted, dropout_p, causal, debug, *, scale):
        record.add("forward", sizes=(max_q, max_k), causal=causal)
        assert (bias, cu_q, cu_k, lse_wanted, dropout_p, debug) == (None, None, None, True, 0.0, False)
        out, lse = run_with(causal, scale)(q, k, v)
        # cuDNN's output has q's memory order, its statistics a last axis of 1 in older versions
        return torch.empty_like(q).copy_(out), lse.unsqueeze(-1), *(None,) * 7

    def backward(
        grad, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, dropout_p, causal, *, scale
    ):
        assert grad.stride() == out.stride()
        assert lse.shape == (2, 4, 5)
        return fake.gradients(run_with(causal, scale), (q, k, v), grad)

    fakes = types.SimpleNamespace(_cudnn_attention_forward=forward, _cudnn_attention_backward=backward)
    monkeypatch.setattr(torch_cudnn, "OPS", fakes)
    for layout in ("bshd", "bhsd", "sbhd"):
        check(torch_cudnn.BACKEND, *tensors(5, 7, layout), layout=layout, mask=masks.causal("top_left"))
        assert record.last("forward") == {"sizes": (5, 7), "causal": True}
