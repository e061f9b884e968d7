"""The budget of a problem that is too large for a full oracle: checked on a sample of its heads and rows.

Parts of attention are independent of each other. An output row and its gradient depend on that row of q and on all
keys; the gradients of the keys and values of a head depend on that head. So the check is exact for the sampled parts,
with the oracle and the budget of `undivided.verification.budget`, and covers nothing else. The sample of a small
problem is the whole problem.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.verification import oracle
from undivided.verification.budget import FACTOR, distance, norm, undecided_quantities
from undivided.verification.pieces import OraclePiece, Quantities, Upstream, kv_span
from undivided.verification.plain_attention import orders, plain_piece

__all__ = ["Sample", "build_sample"]

MAX_FULL_PAIRS = 1 << 18
"""Largest problem that is checked in full, in (query, key) pairs over all heads."""

ROWS = 32
"""Query rows of each sampled block."""

PAIRS_AT_ONCE = 1 << 26
"""Largest score matrix of a computation, 512 MiB in fp64: the rows of a whole head of 65536 tokens are 64 blocks."""


@dataclass(frozen=True, eq=False)
class Sample:
    """The right answer for some pieces of a problem, and the largest error that each quantity may have there.

    right: the entries of each quantity in the pieces, flat, in fp64. zero: where they must be exactly 0.
    max_errors: the largest relative error of each quantity.
    undecided: the quantities for which plain arithmetic gives no budget.
    """

    problem: Problem
    pieces: tuple[OraclePiece, ...]
    right: Mapping[str, Tensor]
    zero: Mapping[str, Tensor]
    max_errors: Mapping[str, float]
    undecided: frozenset[str] = frozenset()

    def error(self, name: str, value: Tensor) -> float:
        """The relative error of "out", "dq", "dk" or "dv" in the sample, from the full tensor [B, heads, S, D]."""
        right = self.right[name]
        sampled = torch.cat([value[_slices(name, piece, self.problem)].flatten() for piece in self.pieces])
        return distance(sampled, right, self.zero[name]) / (norm(right) or 1.0)

    def met(self, name: str, value: Tensor) -> bool:
        """Whether the sample of a quantity is within its budget; False if it is undecided."""
        return name not in self.undecided and self.error(name, value) <= self.max_errors[name]


def build_sample(call: Call, tensors: Tensors, grad_out: Tensor | None) -> Sample:
    """The sample of a problem, with its oracle and its budget.

    Args:
        call, tensors: as `undivided.request.normalise.normalise` returns them.
        grad_out: gradient of the output in the caller's layout, if dq, dk and dv are checked; otherwise None.

    >>> import undivided
    >>> from undivided.request.normalise import normalise
    >>> from undivided.request.request import Request
    >>> q, k, v = (torch.randn(1, 4, 3000, 16) for _ in range(3))
    >>> sample = build_sample(*normalise(Request.from_keywords(q, k, v, layout="bhsd")), None)
    >>> sample.right["out"].numel() == 2 * 2 * 32 * 16                                  # two heads, two blocks of rows
    True
    >>> out = undivided.attention(q, k, v, layout="bhsd")
    >>> sample.met("out", out), sample.met("out", 1.001 * out)
    (True, False)
    """
    problem = call.problem
    with torch.no_grad():
        names = ("out",) if grad_out is None else ("out", "dq", "dk", "dv")
        upstream = None if grad_out is None else Upstream(grad_out)
        pieces = _pieces(problem, whole_heads=grad_out is not None)
        gather = functools.partial(_gather, pieces, problem, names)
        right = gather(lambda piece: oracle.piece_oracle(piece, call, tensors, upstream))
        reached = gather(lambda piece: _expand(oracle.piece_reach(piece, call, tensors), problem))
        worst = dict.fromkeys(names, 0.0)
        for order in orders(problem.dtype, tensors.q.device):
            plain = gather(functools.partial(_plain_piece, call, tensors, upstream, order))
            worst = {name: max(worst[name], distance(plain[name], right[name])) for name in names}
    eps = torch.finfo(problem.dtype).eps
    norms = {name: norm(right[name]) for name in names}
    max_errors = {name: FACTOR * worst[name] / (norms[name] or 1.0) + eps for name in names}
    zero = {name: reached[name] == 0 for name in names}
    return Sample(problem, pieces, right, zero, max_errors, undecided_quantities(worst, norms))


def _plain_piece(call: Call, tensors: Tensors, upstream: Upstream | None, order: int, piece: OraclePiece) -> Quantities:
    """The quantities of a piece by plain attention in the dtype of the problem."""
    return plain_piece(piece, call, tensors, upstream, call.problem.dtype, order)


def _pieces(problem: Problem, whole_heads: bool) -> tuple[OraclePiece, ...]:
    """One piece if the problem is small; otherwise parts of the first and of the last head group."""
    rows = slice(0, problem.q_len)
    if problem.batch * problem.heads * problem.q_len * problem.kv_len <= MAX_FULL_PAIRS:
        return (OraclePiece(slice(0, problem.batch), slice(0, problem.heads), rows),)
    group = problem.heads // problem.kv_heads
    first, last = ([rows], [rows]) if whole_heads else _row_blocks(problem.q_len)
    corners = [(0, 0, block) for block in first] + [(problem.batch - 1, problem.kv_heads - 1, block) for block in last]
    return tuple(
        OraclePiece(slice(b, b + 1), slice(n * group, (n + 1) * group), block)
        for i, (b, n, block) in enumerate(corners)
        if (b, n, block) not in corners[:i]  # with one head, the first is the last
    )


def _row_blocks(length: int) -> tuple[list[slice], list[slice]]:
    """Rows of the first head, from the start and the middle, and of the last head, from the middle and the end."""
    if length <= 4 * ROWS:
        return [slice(0, length)], [slice(0, length)]
    middle = (length - ROWS) // 2 | 1  # an odd row starts inside a tile of every size
    head, body, tail = (slice(start, start + ROWS) for start in (0, middle, length - ROWS))
    return [head, body], [body, tail]


def _slices(name: str, piece: OraclePiece, problem: Problem) -> tuple[slice, ...]:
    """The slices of a piece in a full quantity [B, heads, S, D]."""
    if name in ("dk", "dv"):
        return piece.batch, kv_span(piece, problem)
    return tuple(piece)


def _expand(reached: Quantities, problem: Problem) -> Quantities:
    """Counts of pairs in the shape of the quantities: one count for each entry of a row."""
    sizes = {"out": problem.v_dim, "dq": problem.qk_dim, "dk": problem.qk_dim, "dv": problem.v_dim}
    return {name: reached[name].expand(*reached[name].shape[:-1], size) for name, size in sizes.items()}


def _gather(
    pieces: tuple[OraclePiece, ...],
    problem: Problem,
    names: tuple[str, ...],
    compute: Callable[[OraclePiece], Quantities],
) -> dict[str, Tensor]:
    """The quantities that `compute` returns for all pieces, each one flat and in fp64."""
    computed = [_computed_in_blocks(piece, problem, names, compute) for piece in pieces]
    return {name: torch.cat([quantities[name].flatten() for quantities in computed]) for name in names}


def _computed_in_blocks(
    piece: OraclePiece, problem: Problem, names: tuple[str, ...], compute: Callable[[OraclePiece], Quantities]
) -> Quantities:
    """The quantities of a piece in fp64, from blocks of its rows: rows follow one another, sums over rows are added."""
    heads, sequences = (span.stop - span.start for span in (piece.heads, piece.batch))
    step = max(PAIRS_AT_ONCE // max(sequences * heads * problem.kv_len, 1), ROWS)
    whole: Quantities = {}
    for start in range(piece.rows.start, max(piece.rows.stop, piece.rows.start + 1), step):
        block = compute(piece._replace(rows=slice(start, min(start + step, piece.rows.stop))))
        for name in names:
            added = block[name].double()
            if name not in whole:
                whole[name] = added
            else:
                whole[name] = torch.cat((whole[name], added), 2) if name in ("out", "dq") else whole[name] + added
    return whole
