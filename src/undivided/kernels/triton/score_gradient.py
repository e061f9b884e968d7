"""The gradient of one tile of scores, for the three passes of `backward`, whose docstring has the formulas."""

# The arguments of kernels are grouped: pointers, strides, sizes, constants.
# fmt: off

from typing import NamedTuple

import triton
import triton.language as tl

from undivided.kernels.triton.tile import LOG2E, dot, finish_scores, load_rows


class RowStatistics(NamedTuple):
    """What the gradients of scores need of each row: values with an axis of length 1, that of keys."""

    lse: tl.tensor  # in base 2; +inf without keys, so that the weights are 0
    factor: tl.tensor  # of the sinks
    delta: tl.tensor
    grad_lse: tl.tensor


class HeadRows(NamedTuple):
    """Rows of one head: element offsets [N] from `base`, and whether a row exists [N]."""

    base: tl.tensor
    offsets: tl.tensor
    ok: tl.tensor


@triton.jit
def load_first(rows, DIM: tl.constexpr, WIDTH: tl.constexpr, CHECKED: tl.constexpr):
    """The first WIDTH columns of `HeadRows`, [N, WIDTH]; 0 outside. Not CHECKED: all rows exist."""
    return load_rows(rows.base, rows.offsets, rows.ok, DIM, 0, WIDTH, DIM >= WIDTH, CHECKED)


@triton.jit
def load_step(rows, first, DIM: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """WIDTH columns from `first` on of `HeadRows`, [N, WIDTH]; 0 outside. WHOLE: all these columns exist."""
    return load_rows(rows.base, rows.offsets, rows.ok, DIM, first, WIDTH, WHOLE, True)


@triton.jit
def product(a, left, b, right, DIM: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr):
    """left @ right^T of `HeadRows` over DIM columns, STEP at a time; a and b are the first steps of left and right."""
    acc = dot(a, tl.trans(b), tl.zeros([a.shape[0], b.shape[0]], tl.float32), PRECISION)
    for d in tl.static_range(STEP, DIM, STEP):
        a = load_step(left, d, DIM, STEP, d + STEP <= DIM)
        b = load_step(right, d, DIM, STEP, d + STEP <= DIM)
        acc = dot(a, tl.trans(b), acc, PRECISION)
    return acc


@triton.jit
def score_gradient(
    qk, gv, allowed, keys, ok_rows, kv_len, terms, statistics, keep, survivor,
    MASKED: tl.constexpr, BIAS: tl.constexpr, DENSE: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, GRAD_LSE: tl.constexpr, DROPOUT: tl.constexpr,
):
    """(weights after dropout, ds, allowed pairs, rate, distance) of one tile, from ``q k^T`` and ``g v^T``. keep: which
    weights survive dropout. Other arguments are as in `finish_scores`."""
    s, allowed, rate, distance = finish_scores(
        qk, allowed, keys, ok_rows, kv_len, terms, MASKED, BIAS, DENSE, ALIBI, SOFTCAP
    )
    p = tl.exp2(s - statistics.lse)
    if MASKED:
        p = tl.where(allowed, p, 0.0)
        gv = tl.where(allowed, gv, 0.0)
    w = p
    if SINKS:
        w = p * statistics.factor
    dropped = w
    if DROPOUT:
        dropped = tl.where(keep, w * survivor, 0.0)
        gv = tl.where(keep, gv * survivor, 0.0)
    ds = w * (gv - statistics.delta)
    if GRAD_LSE:
        ds += p * statistics.grad_lse
    if MASKED:
        ds = tl.where(allowed, ds, 0.0)
        if SOFTCAP:
            rate = tl.where(allowed, rate, 0.0)  # it is NaN if q or k is
    return dropped, ds, allowed, rate, distance


@triton.jit
def load_statistics(
    lse, factor, delta, grad_lse, offsets, ok_m, AXIS: tl.constexpr, SINKS: tl.constexpr, GRAD_LSE: tl.constexpr
):
    """The `RowStatistics` of rows at these offsets [M], with an axis AXIS of length 1."""
    natural = tl.load(lse + offsets, mask=ok_m, other=float("-inf"))
    base2 = tl.where(natural == float("-inf"), float("inf"), natural * LOG2E)
    d = tl.load(delta + offsets, mask=ok_m, other=0.0)
    f = tl.full(d.shape, 1.0, tl.float32)
    if SINKS:
        f = tl.load(factor + offsets, mask=ok_m, other=0.0)
    g = d * 0.0
    if GRAD_LSE:
        g = tl.load(grad_lse + offsets, mask=ok_m, other=0.0)
    return RowStatistics(
        tl.expand_dims(base2, AXIS), tl.expand_dims(f, AXIS), tl.expand_dims(d, AXIS), tl.expand_dims(g, AXIS)
    )
