"""Ways to compute attention over a batch of documents, compared with an oracle and timed alternately."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from undivided import masks
from undivided.arguments.layout import Layout
from undivided.cli.demo.batch import PackedBatch
from undivided.functional import attention
from undivided.verification.budget import relative_error

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


class Results(NamedTuple):
    """The output and gradients of the real tokens, packed."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@dataclass(frozen=True)
class Way:
    """One way to compute a batch: the layout of its tensors ("thd" is packed), the value of the padding, the call."""

    name: str
    layout: Layout
    call: AttentionFunction
    poison: float = 0.0
    is_ours: bool = True


def our_ways(batch: PackedBatch) -> list[Way]:
    """The ways of this library: packed, padded in every layout with NaN in the padding, and one document at a time."""
    packed, padded = batch.packed_mask(), batch.padded_mask()

    def with_mask(layout: Layout, mask: masks.Mask) -> AttentionFunction:
        return lambda q, k, v: attention(q, k, v, layout=layout, mask=mask)

    one = _each_document(
        batch, lambda q, k, v: attention(q[None], k[None], v[None], layout="bshd", mask=masks.causal())[0]
    )
    layouts: tuple[Layout, ...] = ("bshd", "sbhd", "bhsd")
    return [
        Way("packed, thd", "thd", with_mask("thd", packed)),
        *(Way(f"padded, {layout}", layout, with_mask(layout, padded), poison=torch.nan) for layout in layouts),
        Way("one document at a time", "thd", one),
    ]


def torch_ways(batch: PackedBatch) -> list[Way]:
    """The ways of PyTorch's scaled_dot_product_attention. Its dense mask is built here, before the timing."""
    count, longest = len(batch.lengths), batch.longest
    dense = batch.padded_mask().to_dense(count, 1, longest, longest).contiguous()

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return [
        Way("SDPA, padded, dense mask", "bhsd", masked, is_ours=False),
        Way("SDPA, padded, is_causal", "bhsd", causal, is_ours=False),
        Way("SDPA, one document at a time", "thd", _each_document(batch, _sdpa_one_document), is_ours=False),
    ]


def _sdpa_one_document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention of one document, [S, H, D] to [S, H, D]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def _each_document(batch: PackedBatch, one_document: AttentionFunction) -> AttentionFunction:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        documents = zip(*(x.split(batch.lengths) for x in (q, k, v)), strict=True)
        return torch.cat([one_document(*document) for document in documents])

    return call


def oracle(batch: PackedBatch, dtype: torch.dtype, step: Callable[[], None] = lambda: None) -> Results:
    """The results of PyTorch's plain softmax(q k^T) v in `dtype`, one document at a time, without our code."""
    return _torch_math(batch, dtype, step, lambda x: x)


def plain(batch: PackedBatch, step: Callable[[], None] = lambda: None) -> Results:
    """As `oracle`, in the batch's own dtype; in fp64, whose rounding would be that of the oracle, with the entries of
    queries and keys in reverse."""
    is_fp64 = batch.q.dtype == torch.float64
    return _torch_math(batch, batch.q.dtype, step, lambda x: x.flip(-1) if is_fp64 else x)


def _torch_math(
    batch: PackedBatch, dtype: torch.dtype, step: Callable[[], None], order: Callable[[Tensor], Tensor]
) -> Results:
    """As `oracle`, with the entries of queries and keys in an order of its own."""
    results: list[tuple[Tensor, ...]] = []
    for q, k, v, grad in zip(*(x.split(batch.lengths) for x in (batch.q, batch.k, batch.v, batch.grad)), strict=True):
        step()
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(SDPBackend.MATH):
            out = _sdpa_one_document(order(leaves[0]), order(leaves[1]), leaves[2])
            results.append((out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))))
    out, dq, dk, dv = (torch.cat(documents) for documents in zip(*results, strict=True))
    return Results(out, dq, dk, dv)


def run(way: Way, batch: PackedBatch) -> tuple[Results, bool]:
    """The results of one run, and whether output and gradients are exactly 0 in the padding."""
    leaves = [batch.arrange(x, way.layout, way.poison).requires_grad_() for x in (batch.q, batch.k, batch.v)]
    out = way.call(*leaves)
    gradients = torch.autograd.grad(out, leaves, batch.arrange(batch.grad, way.layout))
    results = (out.detach(), *gradients)
    is_clean = not any(bool((batch.padding(x, way.layout) != 0).any()) for x in results)
    out, dq, dk, dv = (batch.pack(x, way.layout) for x in results)
    return Results(out, dq, dk, dv), is_clean


def errors(results: Results, truth: Results) -> dict[str, float]:
    """The relative errors ``|x - truth| / |truth|`` of the output and of each gradient."""
    pairs = zip(Results._fields, results, truth, strict=True)
    return {name: relative_error(x, y) for name, x, y in pairs}


def leak(batch: PackedBatch, truth: Results) -> float:
    """The relative error of the output if the packed documents run as one long causal sequence."""
    with torch.no_grad():
        q, k, v = (x[None] for x in (batch.q, batch.k, batch.v))
        return relative_error(attention(q, k, v, layout="bshd", mask=masks.causal())[0], truth.out)


MAX_SECONDS = 20.0
"""Seconds after which no new round starts; there is at least one round."""


def race(
    ways: Sequence[Way], batch: PackedBatch, rounds: int, step: Callable[[str], None]
) -> dict[str, list[tuple[float, float]]]:
    """The seconds (forward, backward) of every round by way; ways alternate, so that other load affects all alike."""
    ready = {}
    for way in ways:
        leaves = [batch.arrange(x, way.layout).requires_grad_() for x in (batch.q, batch.k, batch.v)]
        ready[way.name] = leaves, batch.arrange(batch.grad, way.layout)
    times: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    start = time.perf_counter()
    for _ in range(rounds):
        if time.perf_counter() - start > MAX_SECONDS:
            break
        for way in ways:
            step(f"timing: {way.name}")
            leaves, grad = ready[way.name]
            forward_start = time.perf_counter()
            out = way.call(*leaves)
            middle = time.perf_counter()
            torch.autograd.grad(out, leaves, grad)
            times[way.name].append((middle - forward_start, time.perf_counter() - middle))
    return times
