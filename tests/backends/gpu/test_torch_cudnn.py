"""The calls of cuDNN through PyTorch's operators, dense and packed, with a fake kernel, because there is no GPU."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import fake_gpu_kernels as fake
import pytest
import torch
from adapter_check import Recorder, build_call, check, check_against_reference, tensors
from calls import problem_of
from described_gpus import described
from torch import Tensor

from undivided import masks
from undivided.backends import torch_cudnn
from undivided.machine import Machine
from undivided.selection.decision import decide
from undivided.selection.policy import Policy
from undivided.verification.cases import CASES, Case


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """[B, H, S, D], top-left."""
    allowed = fake.band_pairs(q.shape[2], k.shape[2], (None, 0 if causal else None), 0)
    found = [fake.plain(q[b], k[b], v[b], scale, allowed) for b in range(len(q))]
    return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])


def packed(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, longest: tuple[int, int], causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """[T, H, D] with offsets, top-left; statistics [T, H, 1]. Rows without keys and the tail are not written."""
    for t in (q, k, v):
        assert t.is_contiguous()
        assert not t.isnan().any(), "what is masked may be multiplied by 0"
    assert cu_q.dtype == cu_k.dtype == torch.int32
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype)
    lse = torch.full((*q.shape[:-1], 1), torch.nan, dtype=q.dtype)
    for rows, keys in fake.sequences(q, k, cu_q, cu_k):
        one, *ones = (t[at].transpose(0, 1) for t, at in ((q, rows), (k, keys), (v, keys)))
        q_len, kv_len = one.shape[1], ones[0].shape[1]
        assert q_len <= longest[0]
        assert kv_len <= longest[1]
        if kv_len:
            allowed = fake.band_pairs(q_len, kv_len, (None, 0 if causal else None), 0)
            found, total = fake.plain(one, *ones, scale, allowed)
            out[rows], lse[rows, :, 0] = found.transpose(0, 1), total.T
    return out, lse


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """PyTorch's operators, with their schemas' argument order."""
    record = Recorder()

    def forward(q, k, v, bias, cu_q, cu_k, max_q, max_k, lse_wanted, dropout_p, causal, debug, *, scale):
        record.add("forward", sizes=(max_q, max_k), causal=causal, cu_q=cu_q, cu_k=cu_k)
        assert (bias, lse_wanted, dropout_p, debug) == (None, True, 0.0, False)
        assert fake.are_aligned(q, k, v)
        if cu_q is not None:
            return *packed(q, k, v, cu_q, cu_k, (max_q, max_k), causal, scale), *(None,) * 7
        out, lse = dense(q, k, v, causal, scale)
        # cuDNN's output has q's memory order, its statistics a last axis of 1 in older versions
        order = torch.empty_like(q[..., :1]).expand_as(out) if out.shape != q.shape else q
        return torch.empty_like(order).copy_(out), lse.unsqueeze(-1), *(None,) * 7

    def backward(grad, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, dropout_p, causal, *, scale):
        assert cu_q is None, "it would take the head size for the longest document"
        assert grad.stride() == out.stride()
        assert fake.are_aligned(q, k, v, grad, out)
        assert lse.shape == (*q.shape[:3], 1), "its sizes are those of cuDNN's graph"
        return fake.gradients(lambda *t: dense(*t, causal, scale), (q, k, v), grad)

    fakes = types.SimpleNamespace(_cudnn_attention_forward=forward, _cudnn_attention_backward=backward)
    monkeypatch.setattr(torch_cudnn, "OPS", fakes)
    return record


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_keys_after_the_last_query_may_be_nan(kernel: Recorder, layout: str) -> None:
    """cuDNN multiplies what it masks by 0."""
    q, k, v = tensors(5, 7, layout)
    for tensor in (k, v):
        tensor.narrow(layout.index("s"), 5, 2).fill_(torch.nan)
    check(torch_cudnn.BACKEND, q, k, v, layout=layout, mask=masks.causal("top_left"))


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_dense(kernel: Recorder, layout: str) -> None:
    check(torch_cudnn.BACKEND, *tensors(5, 7, layout), layout=layout, mask=masks.causal("top_left"))
    call = kernel.last("forward")
    assert call["sizes"] == (5, 7)
    assert call["causal"]
    assert call["cu_q"] is None


def test_rows_that_do_not_start_at_16_bytes_are_copied(kernel: Recorder) -> None:
    base = torch.randn(2, 5, 4, 9, dtype=torch.float64)
    q, k, v = base[..., 1:], base[..., :8], base[:, :, :2, :8]
    check(torch_cudnn.BACKEND, q.detach(), k[:, :, :2].detach(), v.detach())


@pytest.mark.parametrize("stats", ["[T, H, 1]", "[H, T]"])
def test_documents(kernel: Recorder, stats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of one projection, a document without keys, and NaN after the last document; PyTorch's layouts of
    statistics."""
    if stats == "[H, T]":
        token_major = torch_cudnn.OPS._cudnn_attention_forward

        def head_major(*given: Any, **named: Any) -> tuple[Any, ...]:
            out, lse, *rest = token_major(*given, **named)
            return out, lse[..., 0].T.contiguous(), *rest

        monkeypatch.setattr(torch_cudnn.OPS, "_cudnn_attention_forward", head_major)
    torch.manual_seed(0)
    qkv = torch.randn(12, 3, 4, 8, dtype=torch.float64)
    qkv[9:] = torch.nan
    q, k, v = qkv.unbind(1)
    cu_q, cu_kv = torch.tensor([0, 5, 7, 9]), torch.tensor([0, 3, 3, 9])
    mask = masks.documents(cu_q, cu_kv, total_q=12, total_kv=12) & masks.causal("top_left")
    check(torch_cudnn.BACKEND, q, k, v, layout="thd", mask=mask, backward=False)
    call = kernel.last("forward")
    assert call["cu_q"].tolist() == [0, 5, 7, 9]
    assert call["cu_k"].tolist() == [0, 3, 3, 9]
    assert call["sizes"] == (128, 128)


def test_queries_without_keys_in_documents_that_fill_every_token(kernel: Recorder) -> None:
    """As many keys as queries in total, but none in the second document, whose queries may therefore hold NaN."""
    q, k, v = (torch.randn(9, 4, 8, dtype=torch.float64) for _ in range(3))
    q[4:] = torch.nan
    mask = masks.documents(torch.tensor([0, 4, 9]), torch.tensor([0, 9, 9]))
    check(torch_cudnn.BACKEND, q, k, v, layout="thd", mask=mask, backward=False)


MACHINES = {"a100": described("a100", "9.8.0"), "h100": described("h100", "9.20.0")}


def allowed(case: Case) -> bool:
    """Whether cuDNN may run the case on one of the machines, in bf16."""
    problem = build_call(case)[0].problem._replace(dtype=torch.bfloat16)
    return any(not torch_cudnn.BACKEND.reasons(problem, machine) for machine in MACHINES.values())


# the operators have no gradient through the log-sum-exp, and none of documents: such cases are tried without gradients
FORWARD_ONLY = [replace(case, name=f"{case.name}-forward", needs=()) for case in CASES.values()]
CATALOGUE = [
    case if allowed(case) else forward
    for case, forward in zip(CASES.values(), FORWARD_ONLY, strict=True)
    if allowed(case) or allowed(forward)
]


@pytest.mark.parametrize("case", CATALOGUE, ids=lambda case: case.name)
def test_the_adapter_equals_the_reference(kernel: Recorder, case: Case) -> None:
    check_against_reference(torch_cudnn.BACKEND, case)


def test_the_catalogue_has_packed_documents() -> None:
    assert {case.name for case in CATALOGUE} >= {
        "plain-bshd",
        "gqa-4",
        "every-second-row-bshd",
        "documents-thd-causal-forward",
        "documents-empty-ones-thd-forward",
        "documents-cross-attention-thd-forward",
        "documents-queries-without-keys-thd-forward",
        "packed-qkv-thd-forward",
    }


def test_documents_run_on_request_only() -> None:
    """PyTorch builds a graph at every such call."""
    q = torch.empty(64, 4, 64, dtype=torch.bfloat16, device="meta")
    mask = masks.documents(torch.tensor([0, 24, 64])) & masks.causal()
    problem = problem_of(q, q, q, layout="thd", mask=mask, device="cuda")
    for policy, name in ((Policy(forced="torch_cudnn"), "torch_cudnn"), (Policy(), "cudnn")):
        machine = described("h100", "9.20.0", {"cudnn_frontend": "1.23.0"})
        chosen = decide(problem, machine, policy).chosen
        assert chosen is not None
        assert chosen.name == name


@pytest.mark.parametrize(
    ("gpu", "cudnn", "torch_version", "tokens", "piece"),
    [
        ("a100", "9.20.0", "2.13", 64, "packed documents on compute capability 8.0 (min 9.0)"),
        ("rtx5090", "9.20.0", "2.13", 64, "packed documents on compute capability 12.0 (9.0 to 11.0)"),
        ("h100", "9.5.0", "2.13", 64, "packed documents (cuDNN 9.5.0"),
        ("h100", "9.20.0", "2.14", 64, "packed documents with torch 2.14 (its operator was read up to 2.13)"),
        ("h100", "9.20.0", "2.13", 1 << 24, "query length 16777216 (max 4194304: PyTorch's offsets are int32)"),
    ],
)
def test_refused_documents(gpu: str, cudnn: str, torch_version: str, tokens: int, piece: str) -> None:
    q = torch.empty(tokens, 4, 64, dtype=torch.bfloat16, device="meta")
    mask = masks.documents(torch.tensor([0, 24, 64]), total_q=tokens)
    problem = problem_of(q, q, q, layout="thd", mask=mask, device="cuda")
    machine = replace(Machine.named(gpu, cudnn), torch=torch_version)
    assert any(piece in reason for reason in torch_cudnn.BACKEND.reasons(problem, machine))
