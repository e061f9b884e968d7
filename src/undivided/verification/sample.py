"""The budget of a problem that is too large to compute whole in fp64: held on a sample of its heads and rows.

Attention falls into parts that are right or wrong by themselves. An output row and its gradient depend on that row of q
and on all keys; the gradients of a head's keys and values depend on that head. So a sample is exact on what it looks
at, by the oracle and the budget of `undivided.verification.budget`, and says nothing of the rest; a small problem is
its own sample, whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from undivided._call import Call
from undivided._problem import Problem
from undivided._request import Tensors
from undivided.verification import oracle
from undivided.verification.budget import FACTOR, ORDERS, distance
from undivided.verification.pieces import Piece, Quantities, Upstream, kv_span
from undivided.verification.plain_attention import plain_piece

__all__ = ["Sample", "sample_of"]

WHOLE = 1 << 18
"""Pairs of query and key, over all heads, of a problem that is looked at whole."""

ROWS = 32
"""Query rows of each stretch of a sampled head."""


@dataclass(frozen=True, eq=False)
class Sample:
    """The right answer on some pieces of a problem, and how far from it each quantity may be.

    right, zero: each quantity's entries in the pieces, flat, in fp64, and where they must be exactly 0.
    allowed: the largest relative error of each quantity.
    """

    problem: Problem
    pieces: tuple[Piece, ...]
    right: Mapping[str, Tensor]
    zero: Mapping[str, Tensor]
    allowed: Mapping[str, float]

    def error(self, name: str, value: Tensor) -> float:
        """The relative error of "out", "dq", "dk" or "dv", given whole as [B, heads, S, D]."""
        right = self.right[name]
        found = torch.cat([value[_where(name, piece, self.problem)].flatten() for piece in self.pieces])
        return distance(found, right, self.zero[name]) / (float(right.norm()) or 1.0)


def sample_of(call: Call, tensors: Tensors, grad_out: Tensor | None) -> Sample:
    """Compute the oracle and the budget on a sample.

    Args:
        call, tensors: as `undivided._normalise.normalise` gives them.
        grad_out: gradient of the output in the caller's layout, where dq, dk and dv are to be judged; else None.

    >>> import undivided
    >>> from undivided._normalise import normalise
    >>> from undivided._request import Request
    >>> q, k, v = (torch.randn(1, 4, 3000, 16) for _ in range(3))
    >>> sample = sample_of(*normalise(Request.of(q, k, v, layout="bhsd")), None)
    >>> sample.right["out"].numel() == 2 * 2 * 32 * 16                               # two heads, two stretches of rows
    True
    >>> out = undivided.attention(q, k, v, layout="bhsd")
    >>> sample.error("out", out) <= sample.allowed["out"] < sample.error("out", 1.001 * out)
    True
    """
    problem = call.problem
    with torch.no_grad():
        names = ("out",) if grad_out is None else ("out", "dq", "dk", "dv")
        upstream = None if grad_out is None else Upstream(grad_out)
        pieces = _pieces(problem, whole_heads=grad_out is not None)
        gather = functools.partial(_gathered, pieces, names)
        right = gather(lambda piece: oracle.piece_oracle(piece, call, tensors, upstream))
        reached = gather(lambda piece: _expanded(oracle.piece_reach(piece, call, tensors), problem))
        worst = dict.fromkeys(names, 0.0)
        for order in range(ORDERS):

            def plain_values(piece: Piece, order: int = order) -> Quantities:
                return plain_piece(piece, call, tensors, upstream, problem.dtype, order)

            plain = gather(plain_values)
            worst = {name: max(worst[name], distance(plain[name], right[name])) for name in names}
    eps = torch.finfo(problem.dtype).eps
    allowed = {name: FACTOR * worst[name] / (float(right[name].norm()) or 1.0) + eps for name in names}
    return Sample(problem, pieces, right, {name: reached[name] == 0 for name in names}, allowed)


def _pieces(problem: Problem, whole_heads: bool) -> tuple[Piece, ...]:
    """Everything where it is small; else the first group of heads of the first sequence and the last group of the
    last."""
    rows = slice(0, problem.q_len)
    if problem.batch * problem.heads * problem.q_len * problem.kv_len <= WHOLE:
        return (Piece(slice(0, problem.batch), slice(0, problem.heads), rows),)
    group = problem.heads // problem.kv_heads
    first, last = ([rows], [rows]) if whole_heads else _stretches(problem.q_len)
    corners = {(0, 0): first, (problem.batch - 1, problem.kv_heads - 1): last}
    return tuple(
        Piece(slice(b, b + 1), slice(n * group, (n + 1) * group), stretch)
        for (b, n), stretches in corners.items()
        for stretch in stretches
    )


def _stretches(length: int) -> tuple[list[slice], list[slice]]:
    """Rows of the first head, from the beginning and the middle, and of the last, from the middle and the end."""
    if length <= 4 * ROWS:
        return [slice(0, length)], [slice(0, length)]
    middle = (length - ROWS) // 2 | 1  # an odd row begins inside every tile
    head, body, tail = (slice(start, start + ROWS) for start in (0, middle, length - ROWS))
    return [head, body], [body, tail]


def _where(name: str, piece: Piece, problem: Problem) -> tuple[slice, ...]:
    """Where a piece lies in a whole quantity [B, heads, S, D]."""
    if name in ("dk", "dv"):
        return piece.batch, kv_span(piece, problem)
    return tuple(piece)


def _expanded(reached: Quantities, problem: Problem) -> Quantities:
    """Counts of pairs in the shape of the quantities: one for each entry of a row."""
    sizes = {"out": problem.v_dim, "dq": problem.qk_dim, "dk": problem.qk_dim, "dv": problem.v_dim}
    return {name: reached[name].expand(*reached[name].shape[:-1], size) for name, size in sizes.items()}


def _gathered(
    pieces: tuple[Piece, ...], names: tuple[str, ...], of: Callable[[Piece], Quantities]
) -> dict[str, Tensor]:
    """What `of` finds in every piece, each quantity flat and in fp64."""
    found = [of(piece) for piece in pieces]
    return {name: torch.cat([one[name].double().flatten() for one in found]) for name in names}
