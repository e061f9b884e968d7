"""The calls of PyTorch's memory-efficient kernel, dense and packed, with a fake kernel, because there is no GPU."""

from __future__ import annotations

import types
from dataclasses import replace

import fake_gpu_kernels as fake
import pytest
import torch
from adapter_check import Recorder, build_call, check, check_against_reference, tensors
from calls import problem_of

from undivided import masks
from undivided.backends import torch_efficient
from undivided.machine import Machine
from undivided.selection.decision import decide
from undivided.selection.policy import Policy
from undivided.verification.cases import CASES, Case


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """PyTorch's operators, with their schemas' argument order and the operators' own checks."""
    record = Recorder()

    def check_packing(q, k, cu_q, cu_k, max_q, max_k):
        if cu_q is not None:
            assert q.shape[0] == k.shape[0] == 1
            assert cu_q.dtype == cu_k.dtype == torch.int32
            assert cu_q.shape == cu_k.shape
            assert 0 < max_q <= q.shape[1]
            assert 0 < max_k <= k.shape[1]

    def forward(q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout_p, mask_type, *, compute_log_sumexp, scale):
        record.add("forward", bias=bias, cu_q=cu_q, cu_k=cu_k, longest=(max_q, max_k), mask_type=mask_type)
        check_packing(q, k, cu_q, cu_k, max_q, max_k)
        assert fake.are_aligned(q, k, v), "no kernel found to launch!"
        assert compute_log_sumexp
        assert dropout_p == 0.0
        assert cu_q is not None or (cu_k, max_q, max_k) == (None, None, None)
        if bias is not None:
            assert cu_q is None
            assert bias.shape == (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
            assert all(stride % 8 == 0 for stride in bias.stride()[:3])
        out, lse = fake.efficient(q, k, v, scale, mask_type, bias=bias, cu_q=cu_q, cu_k=cu_k, max_q=max_q)
        return out, lse, None, None, 0, 0

    def backward(
        grad,
        q,
        k,
        v,
        bias,
        out,
        cu_q,
        cu_k,
        max_q,
        max_k,
        lse,
        dropout_p,
        seed,
        offset,
        mask_type,
        wants_bias,
        *,
        scale,
        num_splits_key,
    ):
        record.add("backward", lse=lse, splits=num_splits_key)
        check_packing(q, k, cu_q, cu_k, max_q, max_k)
        assert fake.are_aligned(grad, q, k, v)
        assert out.is_contiguous()  # its strides are not read
        return fake.efficient_gradients(
            q,
            k,
            v,
            grad,
            lse,
            scale,
            mask_type,
            splits=num_splits_key,
            bias=bias,
            bias_grad=wants_bias,
            cu_q=cu_q,
            cu_k=cu_k,
            max_q=max_q,
        )

    fakes = types.SimpleNamespace(_efficient_attention_forward=forward, _efficient_attention_backward=backward)
    monkeypatch.setattr(torch_efficient, "OPS", fakes)
    return record


@pytest.mark.parametrize("bias_shape", [None, (4, 5, 7), (2, 1, 1, 7), (5, 1)])
def test_dense(kernel: Recorder, bias_shape: tuple[int, ...] | None) -> None:
    q, _, _ = tensors(5, 7)
    k, v = torch.randn(2, 7, 4, 8, dtype=q.dtype), torch.randn(2, 7, 4, 6, dtype=q.dtype)
    bias = None if bias_shape is None else torch.randn(bias_shape, dtype=q.dtype)
    for align, number in (("top_left", 1), ("bottom_right", 2)):
        fresh = (t.detach().clone() for t in (q, k, v))
        check(torch_efficient.BACKEND, *fresh, mask=masks.causal(align), bias=bias)  # type: ignore[arg-type]
        assert kernel.last("forward")["mask_type"] == number
        assert kernel.last("backward")["lse"].shape == (2, 4, 32)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "documents"])
def test_keys_after_the_last_query_may_be_nan(kernel: Recorder, packed: bool, backward: bool) -> None:
    """The kernel multiplies what it masks by 0."""
    q, k, v = documents(5, 7) if packed else tensors(5, 7, heads=2)
    mask = masks.causal("top_left")
    if packed:
        mask &= masks.documents([0, 2, 5], [0, 3, 7])
    unseen = ~mask.to_dense(1, 1, 5, 7)[0, 0].any(0)
    for tensor in (k, v):
        (tensor if packed else tensor.transpose(0, 1))[unseen] = torch.nan
    check(torch_efficient.BACKEND, q, k, v, layout="thd" if packed else "bshd", mask=mask, backward=backward)


@pytest.mark.parametrize("heads", [1, 4])
def test_rows_that_do_not_start_at_16_bytes_are_copied(kernel: Recorder, heads: int) -> None:
    rows = torch.randn(2, 7, 4, 9, dtype=torch.float64)
    q, k, v = (rows[:, :n, :heads, at : at + 8].detach() for n, at in ((5, 1), (7, 0), (7, 1)))
    check(torch_efficient.BACKEND, q, k, v)


def documents(q_len: int, kv_len: int, v_dim: int = 8) -> tuple[torch.Tensor, ...]:
    """q, k, v of four heads each, packed."""
    torch.manual_seed(q_len)
    return tuple(torch.randn(n, 4, d, dtype=torch.float64) for n, d in ((q_len, 8), (kv_len, 8), (kv_len, v_dim)))


def test_documents_with_a_tail(kernel: Recorder) -> None:
    """Tokens after the last document hold NaN; the kernel writes neither their output nor their gradients."""
    q, k, v = documents(40, 40, v_dim=12)
    for t in (q, k, v):
        t[38:] = torch.nan
    cu = torch.tensor([0, 3, 3, 38])
    check(torch_efficient.BACKEND, q, k, v, layout="thd", mask=masks.documents(cu, total_q=40) & masks.causal())
    call = kernel.last("forward")
    assert call["cu_q"].tolist() == call["cu_k"].tolist() == [0, 3, 3, 38]
    assert call["longest"] == (35, 35)
    assert call["mask_type"] == 1  # both alignments agree: the offset of the diagonal is 0
    padded = kernel.last("backward")["lse"]
    assert padded.shape == (3, 4, 64)
    assert (padded[0, :, 3:] == torch.inf).all()
    assert (padded[1] == torch.inf).all()


CROSS = masks.documents(torch.tensor([0, 5, 7, 9, 9, 12]), torch.tensor([0, 3, 3, 8, 10, 13]))
"""More queries than keys; queries without keys; more keys; keys without queries; as many."""


@pytest.mark.parametrize(
    ("mask", "number"),
    [(CROSS, 0), (CROSS & masks.causal("top_left"), 1), (CROSS & masks.causal("bottom_right"), 2)],
    ids=["every-pair", "top-left", "bottom-right"],
)
def test_documents_with_different_query_and_key_lengths(kernel: Recorder, mask: masks.Mask, number: int) -> None:
    check(torch_efficient.BACKEND, *documents(12, 13), layout="thd", mask=mask)
    assert kernel.last("forward")["mask_type"] == number


def test_rows_without_keys_become_a_separate_document(kernel: Recorder) -> None:
    """Needed only under a bottom-right mask: a diagonal that starts before the first key would leave whole tiles
    unmasked."""
    mask = CROSS & masks.causal("bottom_right")
    check(torch_efficient.BACKEND, *documents(12, 13), layout="thd", mask=mask, backward=False)
    call = kernel.last("forward")
    assert call["cu_q"].tolist() == [0, 2, 5, 7, 7, 7, 9, 9, 9, 9, 12]
    assert call["cu_k"].tolist() == [0, 0, 3, 3, 3, 3, 8, 8, 10, 10, 13]
    assert call["longest"] == (5, 5)


def test_keys_are_not_split_if_a_document_may_have_no_query(kernel: Recorder) -> None:
    """With keys split and no causal mask, the backward starts at a row modulo the number of rows."""
    q, k, v = documents(12, 12)
    same = masks.documents(torch.tensor([0, 5, 5, 12]))
    for mask, splits in ((CROSS, 1), (same, None), (same & masks.causal(), None)):
        keys = torch.cat([k, k[:1]]), torch.cat([v, v[:1]])
        k_, v_ = (t.detach() for t in (keys if mask is CROSS else (k, v)))
        check(torch_efficient.BACKEND, q.detach(), k_, v_, layout="thd", mask=mask)
        assert kernel.last("backward")["splits"] == splits


def test_the_longest_document_is_at_most_all_tokens(kernel: Recorder) -> None:
    """A caller's bound may be larger; PyTorch's backward refuses that."""
    mask = masks.documents(torch.tensor([0, 3, 9]), max_q=64, max_kv=64)
    check(torch_efficient.BACKEND, *documents(9, 9), layout="thd", mask=mask)
    assert kernel.last("forward")["longest"] == (9, 9)


MACHINES = {"a100": Machine.named("a100", "9.8.0"), "h100": Machine.named("h100", "9.20.0")}


def allowed(case: Case) -> bool:
    """Whether the kernel may run the case on one of the machines, in fp32."""
    problem = build_call(case)[0].problem
    problem = problem._replace(dtype=torch.float32, bias_dtype=None if problem.bias_dtype is None else torch.float32)
    return any(not torch_efficient.BACKEND.reasons(problem, machine) for machine in MACHINES.values())


# no kernel of PyTorch's has a gradient through the log-sum-exp: cases that ask for one are tried without gradients
TRIED = [replace(case, needs=()) if case.return_lse else case for case in CASES.values()]
CATALOGUE = [case for case in TRIED if allowed(case)]


@pytest.mark.parametrize("case", CATALOGUE, ids=lambda case: case.name)
def test_the_adapter_equals_the_reference(kernel: Recorder, case: Case) -> None:
    check_against_reference(torch_efficient.BACKEND, case)


def test_the_catalogue_has_packed_documents() -> None:
    names = {case.name for case in CATALOGUE}
    assert names >= {
        "plain-thd-one-document",
        "documents-thd-every-pair",
        "documents-empty-ones-thd",
        "documents-cross-attention-thd",
        "documents-queries-without-keys-thd",
        "documents-chunked-prefill-thd",
        "value-head-narrower-thd",
    }
    assert names >= {"bias-full", "bias-with-minus-infinity"}


def test_documents_of_unknown_length_run_on_request_only() -> None:
    """The log-sum-exp of a document is padded to the longest one; if its length is unknown, only the caller can
    decide."""
    q = torch.empty(64, 4, 32, device="meta")
    cu = torch.empty(5, dtype=torch.int32, device="meta")
    for sizes, hesitates in (({}, True), ({"max_q": 32, "max_kv": 32}, False)):
        mask = masks.documents(cu, **sizes) & masks.causal()  # type: ignore[arg-type]
        problem = problem_of(q, q, q, layout="thd", mask=mask, device="cuda")
        decision = decide(problem, MACHINES["a100"], Policy(allowed=("efficient", "reference")))
        assert decision.chosen is not None
        assert decision.chosen.name == ("reference" if hesitates else "torch_efficient")
        assert torch_efficient.BACKEND.reasons(problem, MACHINES["a100"]) == []


def test_keys_beyond_32_bit_offsets() -> None:
    """The forward kernel multiplies the index of a key by the row stride in 32 bits."""
    for tokens, refused in ((1 << 20, False), ((1 << 20) + 1, True)):
        q, k = (torch.empty(1, n, 16, 128, device="meta") for n in (64, tokens))
        problem = problem_of(q, k, k, layout="bshd", device="cuda")
        reasons = torch_efficient.BACKEND.reasons(problem, MACHINES["a100"])
        assert reasons == (["key length=1048577 (max 1048576)"] if refused else [])
        in_heads = (t.transpose(1, 2) for t in (q, k, k))  # the rows of one head lie together
        problem = problem_of(*in_heads, layout="bhsd", device="cuda")
        assert torch_efficient.BACKEND.reasons(problem, MACHINES["a100"]) == []
