"""The plain reference: attention in the input's own precision, whose error is the yardstick for a kernel's error.

It computes the definition with plain tensor operations. Its backward is that of fused kernels, by recomputation from
the rounded output: ``dS = P * (dP - rowsum(dO * O))``. It can sum over keys and head entries in other orders, which
changes nothing but the rounding; its error is sampled in this way, and a second order in fp64 stands in for a lower
precision if the inputs are fp64. `nearby` gives more samples for problems of few pairs.

Legend: B batch, H query heads, N key/value heads, R query rows of a piece, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from undivided.kernels import philox
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.verification.oracle import attend, input_gradients, reachable, scores
from undivided.verification.pieces import (
    Leaves,
    OraclePiece,
    PairTables,
    Quantities,
    Upstream,
    add,
    pair_tables,
    piece_leaves,
    piece_upstream,
    row_zeros,
    split,
    zeros,
)

__all__ = ["IN_SEQUENCE", "nearby", "orders", "plain", "plain_piece"]

RANDOM_ORDERS = 3
"""Orders of summation, of which the largest error counts: a gradient of four sinks is only four numbers, and a single
order may be accurate in all of them by chance. Measured over the catalogue with six seeds; see the decision note."""

IN_SEQUENCE, REVERSED = -1, -2
"""The order in which every product of a sum over a head is added to the sum of those before it, and that of memory
backwards. The forward sums backwards (`_recompute`), so that in REVERSED it has the order of memory, as kernels have: a
large entry near the beginning of a head rounds all later sums."""

LARGEST_CHANGE = 1 / 32
"""The largest relative change of a number in `nearby`: eight roundings of bfloat16, so that few numbers stay."""


def orders(dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    """The orders of summation whose largest error counts for tensors of this dtype on this device.

    A thread of a GPU adds the products of an fp32 sum one after another, and has more rounding errors than a processor,
    whose lanes add parts of it. (Matrix units add the products of half types in fp32, which hardly shows.)
    """
    if dtype == torch.float64:
        return tuple(range(1, RANDOM_ORDERS + 1))  # order 0 is that of the oracle
    return (
        *range(RANDOM_ORDERS),
        REVERSED,
        *([IN_SEQUENCE] if device.type == "cuda" and dtype == torch.float32 else []),
    )


def nearby(tensors: Tensors, upstream: Upstream, seed: int) -> tuple[Tensors, Upstream]:
    """The inputs of a problem with each number changed at random: almost the same, with rounding errors of their own.

    Zeros, infinities and NaN stay, and so do integers.

    Args:
        tensors, upstream: of the problem.
        seed: for the changes.

    >>> tensors = Tensors(*(torch.full((1, 1, 1, 2), x) for x in (1.0, torch.inf, 0.0)))
    >>> near, _ = nearby(tensors, Upstream(torch.ones(1, 1, 1, 2)), seed=0)
    >>> bool(near.q.ne(1).all()), near.q.sub(1).abs().max().item() <= 1 / 32, near.k.tolist(), near.v.tolist()
    (True, True, [[[[inf, inf]]]], [[[[0.0, 0.0]]]])
    """
    generator = torch.Generator("cpu").manual_seed(seed)

    def changed(x: Tensor | None) -> Tensor | None:
        if x is None or not x.is_floating_point():
            return x
        random = torch.rand(x.shape, generator=generator, dtype=torch.float64, device="cpu")
        return (x.detach().double() * (1 + LARGEST_CHANGE * (2 * random - 1)).to(x.device)).to(x.dtype)

    return Tensors._make(map(changed, tensors)), Upstream._make(map(changed, upstream))


def plain(call: Call, tensors: Tensors, upstream: Upstream, precision: torch.dtype, order: int = 0) -> Quantities:
    """The quantities of `oracle`, computed in a low precision.

    order: 0 sums in the order of memory; IN_SEQUENCE too, and adds the products of queries and keys, and of gradients
        and values, one after another; REVERSED sums backwards; any other number seeds a random order.
    """
    totals = zeros(call, tensors) | row_zeros(call, tensors)
    for piece in split(call.problem):
        add(totals, piece, call, tensors, plain_piece(piece, call, tensors, upstream, precision, order))
    return totals


def plain_piece(
    piece: OraclePiece, call: Call, tensors: Tensors, upstream: Upstream | None, precision: torch.dtype, order: int = 0
) -> Quantities:
    """`plain` for one piece; without an upstream only out and lse."""
    tables = pair_tables(piece, call, tensors)
    leaves = piece_leaves(piece, call, tensors, precision)
    multiply = _in_sequence if order == IN_SEQUENCE else torch.matmul
    shuffle = _Shuffle(0 if order == IN_SEQUENCE else order, leaves)
    shuffled = shuffle.leaves(leaves)
    tables = PairTables(*(shuffle.keys(t, -1) for t in tables))  # type: ignore[arg-type]
    if upstream is None:
        with torch.no_grad():
            out, lse = attend(shuffled, tables, call, multiply)
        return shuffle.restore({"out": out, "lse": lse})
    grad_out, grad_lse = piece_upstream(piece, call.problem, upstream, tables, precision)
    return shuffle.restore(_recompute(shuffled, tables, call, shuffle.values(grad_out), grad_lse, multiply))


def _in_sequence(a: Tensor, b: Tensor) -> Tensor:
    """a [.., R, D] @ b [.., D, K], each product added to the sum of those before it."""
    total = torch.zeros((), dtype=a.dtype, device=a.device)
    for d in range(a.shape[-1]):
        total = torch.addcmul(total, a[..., d, None], b[..., d, None, :])
    return total


class _Shuffle:
    """A random order of keys, of the entries of query and key heads, and of those of value heads; 0 is the identity,
    and REVERSED the order backwards."""

    def __init__(self, order: int, like: Leaves) -> None:
        generator = torch.Generator("cpu").manual_seed(order)

        def permutation(size: int) -> Tensor:
            if order > 0:
                return torch.randperm(size, generator=generator, device="cpu").to(like.q.device)
            indices = torch.arange(size, device=like.q.device)
            return indices.flip(0) if order == REVERSED else indices

        self._keys, self._entries, self._values = (
            permutation(n) for n in (like.k.shape[2], like.k.shape[3], like.v.shape[3])
        )

    def keys(self, x: Tensor | None, axis: int) -> Tensor | None:
        """A tensor with its keys in this order, unless it is broadcast over them."""
        return x if x is None or x.shape[axis] != self._keys.numel() else x.index_select(axis, self._keys)

    def values(self, x: Tensor) -> Tensor:
        """A tensor with the entries of its value heads in this order."""
        return x.index_select(-1, self._values)

    def leaves(self, leaves: Leaves) -> Leaves:
        """New leaves with the values in this order."""
        q, k, v, bias, *rest = (None if x is None else x.detach() for x in leaves)
        assert q is not None and k is not None and v is not None
        q, k = (x.index_select(-1, self._entries) for x in (q, k))
        shuffled = (q, self.keys(k, -2), self.keys(self.values(v), -2), self.keys(bias, -1), *rest)
        return Leaves(*(None if x is None else x.requires_grad_() for x in shuffled))  # type: ignore[arg-type]

    def restore(self, results: Quantities) -> Quantities:
        """Results in the order of the inputs."""
        keys, entries, values = (x.argsort() for x in (self._keys, self._entries, self._values))
        axes = {
            "out": [(-1, values)],
            "dq": [(-1, entries)],
            "dk": [(-2, keys), (-1, entries)],
            "dv": [(-2, keys), (-1, values)],
        }
        if "dbias" in results and results["dbias"].shape[-1] > 1:
            axes["dbias"] = [(-1, keys)]
        for name in axes.keys() & results.keys():
            for axis, indices in axes[name]:
                results[name] = results[name].index_select(axis, indices)
        return results


def _recompute(
    leaves: Leaves,
    tables: PairTables,
    call: Call,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    multiply: Callable[[Tensor, Tensor], Tensor],
) -> Quantities:
    """Out, lse and gradients of a piece as fused kernels compute them, but dense and in one precision.

    The backward has only out and lse of the forward, and recomputes the scores with other rounding errors (here the
    forward sums the entries of a head in reverse). If one key has almost all of the weight, that is most of the error.
    """
    forward = leaves._replace(q=leaves.q.flip(-1), k=leaves.k.flip(-1))
    out, lse = (x.detach() for x in attend(forward, tables, call, multiply))
    with torch.enable_grad():
        score = scores(leaves, tables, call, multiply)
    empty, precision = tables.empty_rows, leaves.q.dtype
    quantities = {"out": out, "lse": lse}
    lse = lse.unsqueeze(-1).masked_fill(empty, 0.0)
    weights_without_sinks = torch.exp(score.detach() - lse)
    sinks = None if leaves.sinks is None else leaves.sinks.detach()
    weights = (
        weights_without_sinks if sinks is None else weights_without_sinks * torch.sigmoid(lse - sinks).to(precision)
    )
    survival = 1.0 if tables.kept is None else tables.kept.to(precision) * philox.survivor_scale(call.dropout_p)
    v = reachable(leaves.v, tables).detach()
    delta = (grad_out * out).sum(-1, keepdim=True)
    grad_score = weights * (multiply(grad_out, v.transpose(-1, -2)) * survival - delta)
    if grad_lse is not None:
        grad_score = grad_score + weights_without_sinks * grad_lse.unsqueeze(-1)
    quantities |= input_gradients(score, None, leaves, grad_score.to(precision), None)
    grad_v = (weights * survival).transpose(-1, -2) @ grad_out
    quantities["dv"] = grad_v.unflatten(1, (leaves.v.shape[1], -1)).sum(2)
    if sinks is not None:
        sink_weight = (1 - torch.sigmoid(lse - sinks)).masked_fill(empty, 0.0).to(precision)
        quantities["dsinks"] = -(sink_weight * delta)
    return quantities
