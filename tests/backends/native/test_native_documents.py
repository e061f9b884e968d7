"""Gradients of packed documents, which the native kernel computes one by one."""

from __future__ import annotations

import math
from typing import Any

import levels
import pytest
import torch
from native_gradients import ALLOWED, DTYPES, check, gradients
from native_oracle import needs_library
from torch import Tensor

import undivided
from undivided import masks

pytestmark = needs_library

LENGTHS = {
    "few-of-one-size": [40, 40, 40],
    "tiny": [1, 2, 1, 5, 3, 1, 8, 2, 4, 1],
    "unequal": [3, 130, 64, 700, 1, 257, 33],
    "one-long": [900, 20, 20, 20],
}


def pack(
    lengths: list[int], heads: int, kv_heads: int, dtype: torch.dtype, dim: int = 32
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    total = sum(lengths)
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
    tensors = {name: torch.randn(total, n, dim).to(dtype).requires_grad_() for name, n in sizes.items()}
    return tensors, (torch.randn(total, heads, dim).to(dtype), torch.randn(heads, total))


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


@DTYPES
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_documents_of_any_length(lengths: str, causal: bool, dtype: torch.dtype) -> None:
    tensors, grads = pack(LENGTHS[lengths], 4, 2, dtype)
    mask = masks.documents(offsets(LENGTHS[lengths]))
    check(tensors, grads, layout="thd", mask=mask & masks.causal() if causal else mask)


@DTYPES
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_documents_with_padding_and_unequal_queries_and_keys(align: Any, dtype: torch.dtype) -> None:
    """Some documents have no query, some no key; the padding holds NaN."""
    torch.manual_seed(0)
    q_of, kv_of = torch.tensor([0, 5, 5, 85, 95, 160]), torch.tensor([0, 9, 40, 40, 140, 150])
    room_q, room_kv = q_of + torch.tensor([0, 3, 3, 10, 10, 30]), kv_of + torch.tensor([0, 0, 7, 9, 9, 50])
    mask = masks.documents(q_of, kv_of, padded_q=room_q, padded_kv=room_kv) & masks.causal(align)
    q, k, v = torch.randn(190, 4, 32), torch.randn(200, 2, 32), torch.randn(200, 2, 32)
    real = mask.to_dense(1, 1, 190, 200)[0, 0]
    grads = torch.randn(190, 4, 32).to(dtype), torch.zeros(4, 190)
    found = []
    for filler in (0.0, math.nan):
        q[~real.any(1)], k[~real.any(0)], v[~real.any(0)] = filler, filler, filler
        tensors = {name: t.clone().to(dtype).requires_grad_() for name, t in zip("qkv", (q, k, v), strict=True)}
        if filler == 0:
            check(tensors, grads, layout="thd", mask=mask)
        found.append(gradients(tensors, "native", grads, layout="thd", mask=mask))
    for name, x in found[0].items():
        assert torch.equal(found[1][name], x), name
        assert not x[~real.any(1 if name == "q" else 0)].any(), name


EXTRAS = {
    "bias": lambda heads, total: {"bias": torch.randn(heads, total, total).requires_grad_()},
    "bias-of-all-heads": lambda heads, total: {"bias": torch.randn(1, total, total).requires_grad_()},
    "bias-of-keys": lambda heads, total: {"bias": torch.randn(heads, 1, total).requires_grad_()},
    "bias-of-rows": lambda heads, total: {"bias": torch.randn(1, total, 1).requires_grad_()},
    "sinks": lambda heads, total: {"sinks": torch.randn(heads).requires_grad_()},
    "slopes": lambda heads, total: {"alibi_slopes": torch.rand(heads).requires_grad_()},
}


@DTYPES
@pytest.mark.parametrize("extra", EXTRAS)
def test_documents_with_extras(extra: str, dtype: torch.dtype) -> None:
    lengths = [7, 100, 1, 60]
    tensors, grads = pack(lengths, 4, 2, dtype)
    tensors |= EXTRAS[extra](4, sum(lengths))
    mask = masks.documents(offsets(lengths)) & masks.causal()
    check(tensors, grads, layout="thd", mask=mask, softcap=3.0, dropout_p=0.2, dropout_seed=5)


@DTYPES
def test_documents_and_a_dense_mask(dtype: torch.dtype) -> None:
    lengths = [30, 100, 61]
    tensors, grads = pack(lengths, 4, 2, dtype)
    torch.manual_seed(1)
    check(
        tensors, grads, layout="thd", mask=masks.documents(offsets(lengths)) & masks.dense(torch.rand(191, 191) > 0.3)
    )


@DTYPES
@pytest.mark.parametrize("lengths", LENGTHS)
def test_gradients_of_documents_do_not_depend_on_the_number_of_threads(lengths: str, dtype: torch.dtype) -> None:
    """Threads share a large document; a small one is computed by one thread."""
    tensors, grads = pack(LENGTHS[lengths], 4, 2, dtype, dim=64)
    mask = masks.documents(offsets(LENGTHS[lengths])) & masks.causal()
    for level in levels.here():
        found = []
        for threads in (1, 2, 3, 16):
            with levels.running(level, threads):
                found.append(gradients(tensors, "native", grads, layout="thd", mask=mask))
        for other in found[1:]:
            for name, x in other.items():
                assert torch.equal(x, found[0][name]), (level, name)


@pytest.mark.parametrize("batch_invariant", [False, True])
@DTYPES
def test_gradients_of_a_document_do_not_depend_on_the_others(dtype: torch.dtype, batch_invariant: bool) -> None:
    """In all bits. NaN in another document sends a problem on AMX from tiles of fp16 to vectors, whose sums differ."""
    lengths = [50, 300, 70]
    tensors, grads = pack(lengths, 4, 2, dtype)
    options = {"mask": masks.documents(offsets(lengths)) & masks.causal(), "batch_invariant": batch_invariant}
    want = gradients(tensors, "native", grads, layout="thd", **options)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor[:50] *= 3
    got = gradients(tensors, "native", grads, layout="thd", **options)
    for name, x in want.items():
        assert torch.equal(got[name][50:350], x[50:350]), name
    with torch.no_grad():
        for tensor in tensors.values():
            tensor[350:] = math.nan
    got = gradients(tensors, "native", grads, layout="thd", **options)
    allowed = 0.0 if batch_invariant else ALLOWED[dtype]
    for name, x in want.items():
        difference, size = (t.double().norm() for t in (got[name][50:350] - x[50:350], x[50:350]))
        assert difference <= allowed * size, name


@pytest.mark.parametrize("threads", [1, 2])
def test_gradients_of_documents_need_little_extra_memory(threads: int) -> None:
    """Buffers for all rows were once mapped again at every call: four times the memory of the results, on two
    threads."""
    resource = pytest.importorskip("resource")
    lengths = [500] * 20
    tensors, (grad, _) = pack(lengths, 8, 2, torch.float32, dim=64)
    mask = masks.documents(offsets(lengths)) & masks.causal()
    faults, before = [], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(3):
            out = undivided.attention(**tensors, layout="thd", mask=mask, backend="native")
            first = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.autograd.grad(out, list(tensors.values()), grad)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - first)
    finally:
        torch.set_num_threads(before)
    results = sum(t.nbytes for t in tensors.values())
    assert min(faults) * resource.getpagesize() < 1.2 * results + (4 << 20)
