"""The error budget of a kernel: at most twice the error of plain low-precision arithmetic, plus one rounding.

    error(x)  = ||x - oracle|| / ||oracle||                       Frobenius norm, in fp64
    budget    = 2 * error(plain) + eps                            plain: the worst of some orders of summation

A gradient that is a sum over rows (of sinks, slopes, a bias of one number per row or fewer) may be a single number,
in which plain arithmetic has hardly any error by chance. The rows' errors r are many, and if they are independent, the
norm of the error of n sums exceeds (1 + DEVIATIONS / sqrt(n)) * ||r|| once in 100,000 problems. The budget is at least
that.

Exact values are required where no allowed pair exists: output rows and gradients are 0, their lse is -inf. There is no
absolute tolerance: a result of zeros has error 1. If plain arithmetic cannot distinguish the right answer from 0 (the
gradient of q with a single key is 0), a relative error is undefined, and the absolute norms are compared; then there is
one rounding in fp32 of the terms that cancel besides.

If the error of plain arithmetic is above LIMIT, or it is NaN or infinite, it says nothing about a kernel: the quantity
is undecided. So are all gradients if that of v is: the backward recomputes the weights from the log-sum-exp, and the
gradient of v shows whether they have a digit right (scores of 1e7 in fp32 have none).

A log-sum-exp is a logarithm: one rounding of its sum is an absolute error of eps, however small it is. Its budget has
that in addition. (Plain arithmetic has no such error in a row of one key, whose sum is 1.)

Kernels compute the weights of the backward as exp2 of a difference of scaled numbers, which rounds the exponent once
more than plain arithmetic does; its scores may even be exact. The budget of dv is at least a rounding of the lse.

In a problem of few pairs, plain arithmetic may be accurate by chance in every order of summation. Its error is then at
least that in some problems nearby, and the budgets of dq and dk have the rounding of the terms that may cancel.

The norm of a whole tensor hides rows with small norms, such as the last ones under a causal mask. So each block of rows
of a head (256 numbers) has a budget too, a wide one that finds rows without a right digit (zeros, memory that was not
written):

    error(block)  <=  max(||oracle|| / 2, 8 * error(plain), its share of half of the budget of the tensor)

A single row of a block, such as the gradient of the last key, may still be lost in it. So no row may be exactly 0 that
plain arithmetic distinguishes from 0: whose norm exceeds 8 times the error of plain arithmetic in it, and SMALLEST_ROW
times the largest norm of a row. (Weights below 2^-126 are 0 in most kernels.)

The reasons are in docs/decisions/2026-11-20-error-budget.md and 2026-11-24-gradients-of-single-numbers.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.errors import InputError
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import lse_dtype
from undivided.verification import oracle
from undivided.verification.pieces import NAMES, Upstream, per_row
from undivided.verification.plain_attention import nearby, orders
from undivided.verification.plain_attention import plain as plain_attention

__all__ = ["UNDECIDED", "Budget", "budget_for", "distance", "relative_error", "undecided_quantities"]

UNDECIDED = "plain attention in this precision has no digit right"
"""Why a quantity is undecided."""

FACTOR = 2
"""A kernel rounds about as often as the plain reference, but in other places: twice the error leaves room for that."""

LIMIT = 0.5
"""The largest relative error of plain arithmetic from which a budget follows. Zeros, whose error is 1, exceed it."""

DEVIATIONS = 3.5
"""The norm of n errors with normal distributions exceeds their standard deviation times (sqrt(n) + DEVIATIONS) in fewer
than one of 100,000 problems. From 13 numbers on, FACTOR is wider."""


FEW_PAIRS, NEARBY_PROBLEMS = 256, 8
"""A problem of fewer pairs is sampled by problems nearby, which have about this number together; by 8 at most."""

ROW_QUANTITIES = ("out", "dq", "dk", "dv")
"""The quantities [B, heads, S, D], which have rows."""

SMALLEST_ROW = 1e-6
"""The norm of a row, relative to the largest one, up to which it may be 0."""

BLOCK_NUMBERS, BLOCK_FACTOR = 256, 8
"""Numbers in a block of rows, at least, and how much larger than that of plain arithmetic its error may be."""


def distance(value: Tensor, right: Tensor, zero: Tensor | None = None) -> float:
    """``||value - right||`` over the finite entries of `right`; inf if an entry that must be exact is not.

    Infinities must agree exactly, and a NaN in `value` gives inf.

    Args:
        value, right: tensors of the same shape, any floating-point dtype.
        zero: bool, where `value` must be exactly 0.

    >>> distance(torch.zeros(4), torch.ones(4))
    2.0
    >>> distance(torch.tensor([1.0, 2.0]), torch.tensor([-torch.inf, 2.0]))
    inf
    """
    if value.shape != right.shape:
        return math.inf
    value, right = value.detach().double(), right.detach().double()
    finite = right.isfinite()
    if not bool((value.isfinite() == finite).all()) or not bool((value[~finite] == right[~finite]).all()):
        return math.inf
    if zero is not None and bool(value[zero & finite].any()):
        return math.inf
    return float((value[finite] - right[finite]).norm())


def relative_error(value: Tensor, right: Tensor) -> float:
    """``||value - right|| / ||right||``; the absolute norm if `right` is 0.

    Args:
        value, right: tensors of the same shape, any floating-point dtype.

    >>> relative_error(torch.zeros(3), torch.ones(3))
    1.0
    """
    return distance(value, right) / (norm(right) or 1.0)


def norm(right: Tensor) -> float:
    """The norm of the finite entries, in fp64."""
    return float(right[right.isfinite()].double().norm())


@dataclass(frozen=True, eq=False)
class Budget:
    """The right answer of one problem, and the largest error that each quantity may have.

    Attributes:
        right: out [B, H, Sq, Dv], lse [B, H, Sq], dq, dk, dv [B, heads, S, D], dbias, dsinks, dalibi_slopes, in fp64.
        scale: the norm to which the error of each quantity is relative.
        max_errors: the largest error of each quantity.
        zero: where each quantity must be exactly 0 (lse: -inf).
        block_errors: the largest norm of the error of each block of rows, [B, heads, blocks], of out, dq, dk and dv.
        not_zero: the rows of these, [B, heads, S], that must not be 0.
        undecided: the quantities for which plain arithmetic gives no budget.
    """

    problem: Problem
    right: Mapping[str, Tensor]
    scale: Mapping[str, float]
    max_errors: Mapping[str, float]
    zero: Mapping[str, Tensor]
    block_errors: Mapping[str, Tensor]
    not_zero: Mapping[str, Tensor]
    undecided: frozenset[str] = frozenset()

    def error(self, name: str, value: Tensor | None) -> float:
        """The relative error of a quantity in the caller's layout; inf if it is missing or an exact value is wrong.

        If a block of rows exceeds its budget, the error exceeds that of the quantity as many times.
        """
        if value is None:
            return math.inf
        right = self.right[name]
        if name in ROW_QUANTITIES:
            if value.dim() != layout.axis_count(self.problem.layout) or self.has_lost_rows(name, value):
                return math.inf
            value = layout.heads_first(value, self.problem.layout)
        elif name == "lse" and self.problem.packed:
            value = value.unsqueeze(0)
        elif name == "dbias" and value.dim() < 4:
            value = value[(None,) * (4 - value.dim())]
        error = distance(value, right, None if name == "lse" else self.zero.get(name)) / self.scale[name]
        if name in self.block_errors and math.isfinite(error):
            excess = float((_block_norms(value.detach().double() - right) / self.block_errors[name]).max())
            if excess > 1:
                return max(error, excess * self.max_errors[name])
        return error

    def has_lost_rows(self, name: str, value: Tensor) -> bool:
        """Whether a row of a quantity in the caller's layout is 0 that must not be."""
        if name not in self.not_zero or value.dim() != layout.axis_count(self.problem.layout):
            return False
        value = layout.heads_first(value.detach(), self.problem.layout)
        return value.shape[:-1] == self.not_zero[name].shape and bool(
            (self.not_zero[name] & (value == 0).all(-1)).any()
        )

    def met(self, name: str, value: Tensor | None) -> bool:
        """Whether a quantity is within its budget; False if it is undecided."""
        return name not in self.undecided and self.error(name, value) <= self.max_errors[name]


def budget_for(call: Call, tensors: Tensors, upstream: Upstream) -> Budget:
    """The budget of every quantity of a problem, from its oracle and its plain reference.

    Args:
        call, tensors: as `undivided.request.normalise.normalise` returns them.
        upstream: gradients of out (in the caller's layout) and of lse ([B, H, Sq], or None).

    Raises:
        InputError: the inputs hold NaN or infinity where the mask does not hide it.

    >>> import undivided
    >>> from undivided.request.normalise import normalise
    >>> from undivided.request.request import Request
    >>> q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
    >>> call, tensors = normalise(Request.from_keywords(q, k, v, layout="bshd"))
    >>> budget = budget_for(call, tensors, Upstream(torch.randn(1, 6, 2, 8)))
    >>> budget.met("out", undivided.attention(q, k, v, layout="bshd"))
    True
    >>> budget.met("out", torch.zeros_like(q))
    False
    """
    problem = call.problem
    with torch.no_grad():
        right = oracle.oracle(call, tensors, upstream)
        zero = oracle.unreachable(call, tensors)
        right["lse"].masked_fill_(zero["lse"], -torch.inf)
        must_be_finite = (x[~zero[name]] if name in zero else x for name, x in right.items())
        if not all(bool(x.isfinite().all()) for x in must_be_finite):
            raise InputError(
                "q, k, v",
                "be finite where the mask does not hide them, and give finite results in float64",
                "NaN or infinity",
                hint="masks.lengths or masks.documents describe padding, which may hold any values",
            )
        plain = _plain_errors(call, tensors, upstream, right)
        errors = plain.quantities
        right = {name: x for name, x in right.items() if name in errors}
        norms = {name: norm(x) for name, x in right.items()}
    scale = {name: size if size > errors[name] else 1.0 for name, size in norms.items()}
    max_errors = {name: FACTOR * errors[name] / scale[name] + _rounding(name, call, tensors) for name in right}
    cancellation = {  # the rounding of two terms whose difference may be 0, as it is for a single key
        name: _rounding("lse", call, tensors) * _size_of_terms(name, call, tensors, upstream)
        for name in {"dq", "dk"} & norms.keys()
        if problem.quantized is None
    }
    weights = _rounding_of_weights(right["lse"], problem.dtype)
    if "dv" in max_errors:
        max_errors["dv"] = max(max_errors["dv"], weights * norms["dv"] / scale["dv"] + _rounding("dv", call, tensors))
    for name, rounding in cancellation.items():
        if norms[name] <= errors[name] or _nearby_count(problem):
            max_errors[name] += (rounding + weights * norms[name]) / scale[name]
    if "lse" in max_errors:
        entries = math.sqrt(int(right["lse"].isfinite().sum()))
        max_errors["lse"] += _rounding("lse", call, tensors) * entries / scale["lse"]
    decided = {name for name in plain.blocks if norms[name] > 0 and errors[name] * BLOCK_FACTOR <= norms[name]}
    blocks = {
        name: _block_budget(right[name], plain.blocks[name], max_errors[name] * scale[name]).clamp(
            min=cancellation.get(name, 0.0)
        )
        for name in decided
    }
    smallest = torch.finfo(problem.dtype).smallest_normal
    not_zero = {name: _rows_that_are_not_zero(right[name], plain.rows[name].clamp(min=smallest)) for name in decided}
    undecided = undecided_quantities(errors, norms)
    return Budget(problem, right, scale, max_errors, zero, blocks, not_zero, undecided)


def _rows_that_are_not_zero(right: Tensor, plain: Tensor) -> Tensor:
    """The rows [B, heads, S] that must not be 0. plain: the error of plain arithmetic in each."""
    norms: Tensor = right.norm(dim=-1)
    return norms.gt(torch.maximum(BLOCK_FACTOR * plain, SMALLEST_ROW * norms.amax()))


def _block_budget(right: Tensor, plain: Tensor, largest: float) -> Tensor:
    """The largest error of each block of rows. plain: that of plain arithmetic; largest: the budget of the tensor."""
    share = largest / FACTOR * math.sqrt(_block_rows(right) / right.shape[:-1].numel())
    return torch.maximum(LIMIT * _block_norms(right), BLOCK_FACTOR * plain).clamp(min=share)


def _block_norms(x: Tensor) -> Tensor:
    """The norms of the finite entries of blocks of rows: [B, heads, S, D] to [B, heads, blocks]."""
    squares = x.where(x.isfinite(), 0.0).square().sum(-1)
    rows = _block_rows(x)
    whole = torch.nn.functional.pad(squares, (0, -squares.shape[-1] % rows))
    return whole.unflatten(-1, (-1, rows)).sum(-1).sqrt() if whole.numel() else whole


def _block_rows(x: Tensor) -> int:
    return -(-BLOCK_NUMBERS // max(x.shape[-1], 1))


def undecided_quantities(errors: Mapping[str, float], norms: Mapping[str, float]) -> frozenset[str]:
    """The quantities of which plain arithmetic, with these absolute errors, has no digit right.

    norms: of the right answer.
    """
    names = set()
    for name, error in errors.items():
        # of other gradients, larger errors than the norm mean that their terms cancel; the absolute error is compared
        cancels = error >= norms[name] and name not in ("out", "dv")
        if not math.isfinite(error) or (error > LIMIT * norms[name] and not cancels):
            names.add(name)
    if "dv" in names:
        names |= {name for name in errors if name not in ("out", "lse")}
    return frozenset(names)


def _plain_errors(call: Call, tensors: Tensors, upstream: Upstream, right: Mapping[str, Tensor]) -> _Distances:
    """The largest distances of plain arithmetic from the right answer: of each quantity, and of the blocks and the rows
    of out, dq, dk and dv. Bfloat16 replaces float16 if that overflows.

    For sums over rows the distance is at least what those of the rows' shares lead to.
    """
    worst = _Distances(dict.fromkeys(right, 0.0), {}, {})
    for order in orders(call.problem.dtype, tensors.q.device):
        worst = worst.maximum(_distances(call, tensors, upstream, order, right))
    # nearby problems alone never make a quantity undecided
    largest = {name: LIMIT / FACTOR / 2 * norm(x) for name, x in right.items()}
    for seed in range(_nearby_count(call.problem)):
        near = nearby(tensors, upstream, seed)
        near_right = oracle.oracle(call, *near)
        near_right["lse"].masked_fill_(right["lse"] == -torch.inf, -torch.inf)
        found = _distances(call, *near, seed + 1, near_right)
        if all(map(math.isfinite, found.quantities.values())):  # otherwise it overflows
            worst = worst.maximum(found.capped(largest))
    errors = worst.quantities
    for name in [name for name in right if per_row(name) in right]:
        deviations = 1 + DEVIATIONS / math.sqrt(right[name].numel() or 1)
        errors[name] = max(errors[name], errors.pop(per_row(name)) * max(1.0, deviations / FACTOR))
    return worst


class _Distances(NamedTuple):
    """Distances from the right answer: of quantities, and the norms of those of blocks and of rows."""

    quantities: dict[str, float]
    blocks: dict[str, Tensor]
    rows: dict[str, Tensor]

    def maximum(self, other: _Distances) -> _Distances:
        """The larger of the two distances of each quantity, block and row."""
        quantities = {name: max(distance, other.quantities[name]) for name, distance in self.quantities.items()}
        blocks = {name: torch.maximum(self.blocks.get(name, norms), norms) for name, norms in other.blocks.items()}
        rows = {name: torch.maximum(self.rows.get(name, norms), norms) for name, norms in other.rows.items()}
        return _Distances(quantities, blocks, rows)

    def capped(self, largest: Mapping[str, float]) -> _Distances:
        """The distances, but none above the largest one for its quantity."""
        quantities = {name: min(distance, largest[name]) for name, distance in self.quantities.items()}
        blocks = {name: norms.clamp(max=largest[name]) for name, norms in self.blocks.items()}
        rows = {name: norms.clamp(max=largest[name]) for name, norms in self.rows.items()}
        return _Distances(quantities, blocks, rows)


def _distances(call: Call, tensors: Tensors, upstream: Upstream, order: int, right: Mapping[str, Tensor]) -> _Distances:
    """The distances of plain arithmetic in one order of summation."""
    dtype = call.problem.dtype
    plain = plain_attention(call, tensors, upstream, dtype, order)
    quantities = {name: distance(plain[name], right[name]) for name in right}
    if dtype == torch.float16 and not all(map(math.isfinite, quantities.values())):
        plain = plain_attention(call, tensors, upstream, torch.bfloat16, order)
        quantities = {name: distance(plain[name], right[name]) for name in right}
    differences = {name: plain[name].double() - right[name] for name in ROW_QUANTITIES if name in right}
    blocks = {name: _block_norms(difference) for name, difference in differences.items()}
    return _Distances(quantities, blocks, {name: difference.norm(dim=-1) for name, difference in differences.items()})


def _nearby_count(problem: Problem) -> int:
    """How many nearby problems are sampled; 0 for a problem of many pairs."""
    pairs = problem.batch * problem.heads * problem.q_len * problem.kv_len
    return min(NEARBY_PROBLEMS, (FEW_PAIRS - 1) // pairs) if pairs else 0


def _size_of_terms(name: str, call: Call, tensors: Tensors, upstream: Upstream) -> float:
    """About the norm of the two terms of dq or dk that cancel."""
    factors = (_typical(tensors.v), _typical(tensors.k if name == "dq" else tensors.q), math.sqrt(call.problem.qk_dim))
    return 2 * abs(call.scale) * norm(upstream.out) * math.prod(factors)


def _rounding_of_weights(lse: Tensor, dtype: torch.dtype) -> float:
    """The relative error of weights that a backward computes as ``exp2(S * log2(e) - lse * log2(e))``."""
    finite = lse[lse.isfinite()]
    return torch.finfo(lse_dtype(dtype)).eps * float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _typical(x: Tensor) -> float:
    """The deviation of numbers with a normal distribution that have this median; padding may hold any others."""
    finite = x.detach()[x.isfinite()]
    return 1.5 * float(finite.abs().median()) if finite.numel() else 0.0


def _rounding(name: str, call: Call, tensors: Tensors) -> float:
    """One rounding of the input's dtype (lse: fp32 or fp64), or of the gradient's dtype if that is coarser."""
    problem = call.problem
    if name == "lse":
        return torch.finfo(lse_dtype(problem.dtype)).eps
    dtypes = [problem.dtype]
    if name[1:] in NAMES:
        tensor = tensors[NAMES.index(name[1:])]
        dtypes += [] if tensor is None or not tensor.is_floating_point() else [tensor.dtype]
    return max(torch.finfo(dtype).eps for dtype in dtypes)
