"""Gradients by recomputation from the output and the log-sum-exp (Dao et al. 2022, arXiv:2205.14135, algorithm 4).

With ``p = exp(s - lse)`` (without sinks), ``w = p * sigmoid(lse - sink)`` the weights of the forward, ``g`` the gradient
of the output and ``delta = sum(g * out)``:

    dv = (dropout(w))^T g          ds = w * (dropout(g v^T) - delta) + p * dlse
    dq = scale * (ds * rate) k     dk = scale * (ds * rate)^T q          dbias = ds      dslope = -ds * |i + d - j|

where rate is the derivative of the softcap. `delta_kernel` writes delta. Then there are three passes, each
deterministic: `rows_kernel` writes dq and the row sums for ALiBi, `keys_kernel` writes dk and dv (summed over the heads
of the group), `pairs_kernel` writes dbias.

Memory traffic: the pass over rows reads a key tile once per block of rows, the pass over keys reads q and g once per key
tile.
"""

# The arguments of kernels are grouped: pointers, strides, sizes, constants.
# fmt: off

import triton
import triton.language as tl

from undivided.kernels.triton.key_ranges import (
    allowed_pairs,
    count_tiles,
    horizontal,
    hull,
    load_runs,
    nth_tile,
    row_ranges,
    vertical,
)
from undivided.kernels.triton.score_gradient import (
    HeadRows,
    load_first,
    load_statistics,
    load_step,
    product,
    score_gradient,
)
from undivided.kernels.triton.tile import (
    ScoreTerms,
    dot,
    dropout_keep,
    load_descriptor_rows,
    row_features,
    store_columns,
)


@triton.jit
def delta_kernel(
    g, out, delta, g_b, g_h, g_s, out_b, out_h, out_s, heads, q_len,
    V_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):
    """delta = sum(g * out) of a block of rows of one head, in fp32, contiguous [B, H, Sq].

    The grid is (blocks of rows, heads, batch). WIDTH: V_DIM, rounded up to a power of two.
    """
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    o_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_d = tl.arange(0, WIDTH)
    rows = o_m.to(tl.int64)[:, None]
    inside = (o_m < q_len)[:, None] & (o_d < V_DIM)[None, :]
    g_tile = tl.load(g + b * g_b + h * g_h + rows * g_s + o_d[None, :], mask=inside, other=0.0)
    out_tile = tl.load(out + b * out_b + h * out_h + rows * out_s + o_d[None, :], mask=inside, other=0.0)
    total = tl.sum(g_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(delta + (b * heads + h) * q_len + o_m, total, mask=o_m < q_len)


@triton.jit
def rows_kernel(
    q, k, v, g, dq, dslope, lse, factor, delta, grad_lse, tiles, ranges, bias, dense, slopes, row_at, key_at, sequence,
    position, seed,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, g_b, g_h, g_s, dq_b, dq_h, dq_s, tiles_b, ranges_b,
    bias_b, bias_h, bias_q, bias_k, dense_b, dense_h, dense_q, dense_k, slopes_b, slopes_h, slopes_q, row_at_b, key_at_b,
    sequence_b, position_b, q_len, kv_len, heads, steps, first_row, row_values, scale, softcap, threshold, survivor, dropout_head,
    HEADS_PER_KV: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM_STEP: tl.constexpr, VALUE_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr, DENSE: tl.constexpr,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, GRAD_LSE: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, CLEAN: tl.constexpr, TMA: tl.constexpr, SPECIALISE: tl.constexpr, WITH_SLOPES: tl.constexpr,
):
    """dq of one block of rows of one head, DIM_STEP columns; with WITH_SLOPES also the row sums of the slopes' gradient.

    The grid is (blocks of rows * steps, heads, batch). lse, factor, delta, grad_lse and dslope are contiguous
    [B, H, row_values]; `first_row` is where this call's rows begin in them and in the mask's tables. CLEAN, TMA and DROPOUT
    are as in `forward.forward_kernel`.
    """
    block, step = tl.program_id(0) // steps, tl.program_id(0) % steps
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    n_head = h // HEADS_PER_KV

    # the rows of this block, and what depends on them alone
    o_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    ok_m = o_m < q_len
    key_ranges = row_ranges(ranges + b * ranges_b, o_m + first_row, ok_m, COLUMNS)
    offsets = (b * heads + h) * row_values + o_m + first_row
    statistics = load_statistics(lse, factor, delta, grad_lse, offsets, ok_m, 1, SINKS, GRAD_LSE)
    rows = o_m.to(tl.int64)
    bias_rows = (bias + b * bias_b + h * bias_h + rows * bias_q)[:, None]
    dense_rows = (dense + b * dense_b + h * dense_h + rows * dense_q)[:, None]
    slope, at_m, i_m, b_m = row_features(
        o_m, ok_m, first_row, slopes, row_at, position, sequence, slopes_b, slopes_h, slopes_q, row_at_b, position_b,
        sequence_b, b, h, 1, ALIBI, DROPOUT,
    )
    seed_value = 0
    if DROPOUT:
        seed_value = tl.load(seed)
    key_positions = key_at + b * key_at_b
    terms = ScoreTerms(bias_rows, bias_k, dense_rows, dense_k, slope, at_m, key_positions, scale, softcap)
    first_key, last_key = 0, kv_len
    if CLEAN == 1:
        first_key, last_key = hull(key_ranges, COLUMNS)
    key_ranges = vertical(key_ranges)
    ok_rows = ok_m[:, None]
    q_rows = HeadRows(q + b * q_b + h * q_h, rows * q_s, ok_m)
    g_rows = HeadRows(g + b * g_b + h * g_h, rows * g_s, ok_m)
    k_head, v_head = q_rows.base, g_rows.base  # unused placeholders with TMA
    if not TMA:
        k_head, v_head = k + b * k_b + n_head * k_h, v + b * v_b + n_head * v_h
    runs = load_runs(tiles + b * tiles_b + block * 8)
    edges, whole = count_tiles(runs)
    acc = tl.zeros([BLOCK_M, DIM_STEP], tl.float32)
    slope_sum = tl.zeros([BLOCK_M], tl.float32)
    h_m = o_m * 0 + h + dropout_head
    q_tile = load_first(q_rows, QK_DIM, DIM_STEP, True)
    g_tile = load_first(g_rows, V_DIM, VALUE_STEP, True)

    # the loop over tiles of keys
    for masked in tl.static_range(2):
        if masked or not (BIAS or DENSE):  # with these no tile is full
            for n in tl.range(0, edges if masked else whole, warp_specialize=SPECIALISE):
                tile = nth_tile(n, runs, masked == 0)
                o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                ok_n = (o_n >= first_key) & (o_n < tl.minimum(last_key, kv_len))
                keys = o_n.to(tl.int64)
                k_rows, v_rows = HeadRows(k_head, keys * k_s, ok_n), HeadRows(v_head, keys * v_s, ok_n)

                # the products of the tile
                if TMA:
                    k_tile = load_descriptor_rows(k, b, n_head, tile * BLOCK_N, BLOCK_N, DIM_STEP)
                    v_tile = load_descriptor_rows(v, b, n_head, tile * BLOCK_N, BLOCK_N, VALUE_STEP)
                else:
                    k_tile = load_first(k_rows, QK_DIM, DIM_STEP, masked)
                    v_tile = load_first(v_rows, V_DIM, VALUE_STEP, masked)
                qk = product(q_tile, q_rows, k_tile, k_rows, QK_DIM, DIM_STEP, PRECISION)
                gv = product(g_tile, g_rows, v_tile, v_rows, V_DIM, VALUE_STEP, PRECISION)

                # the gradient of its scores
                allowed = True
                if masked:
                    allowed = allowed_pairs(o_n[None, :], kv_len, ok_rows, key_ranges, COLUMNS)
                keep = True
                if DROPOUT:
                    keep = dropout_keep(
                        o_n, kv_len, key_positions, i_m, h_m, b_m, seed_value, threshold, DROPOUT == 2, BLOCK_N
                    )
                _, ds, allowed, rate, distance = score_gradient(
                    qk, gv, allowed, o_n[None, :], ok_rows, kv_len, terms, statistics, keep, survivor,
                    masked, BIAS, DENSE, ALIBI, SOFTCAP, SINKS, GRAD_LSE, DROPOUT,
                )
                if WITH_SLOPES:
                    slope_sum -= tl.sum(ds * distance, 1)

                # dq
                if QK_DIM > DIM_STEP:
                    k_tile = load_step(k_rows, step * DIM_STEP, QK_DIM, DIM_STEP, False)
                if masked and CLEAN == 2:
                    used = tl.max(allowed.to(tl.int32), 0) > 0
                    k_tile = tl.where(used[:, None], k_tile, 0.0)
                elif masked and CLEAN == 1 and TMA:
                    k_tile = tl.where(ok_n[:, None], k_tile, 0.0)
                acc = dot((ds * rate).to(k_tile.dtype), k_tile, acc, PRECISION)

    store_columns(dq + b * dq_b + h * dq_h + rows * dq_s, acc * scale, step * DIM_STEP, ok_m, QK_DIM, DIM_STEP)
    if WITH_SLOPES:
        if step == 0:
            tl.store(dslope + offsets, slope_sum, mask=ok_m)


@triton.jit
def _sees(run, tile, MASKED: tl.constexpr):
    """Whether a block of rows needs the tile, and every pair of it is allowed; with MASKED, whether it needs the tile, and
    some pairs must be masked."""
    runs = load_runs(run)
    whole = (tile >= runs.full_first) & (tile < runs.full_last)
    whole |= (tile >= runs.full_first2) & (tile < runs.full_last2)
    if MASKED:
        needed = (tile >= runs.first) & (tile < runs.last)
        needed |= (tile >= runs.first2) & (tile < runs.last2)
        return needed & (whole == 0)
    return whole


@triton.jit
def _write(to, values, inside, ADD: tl.constexpr):
    """Store the values; with ADD, add them to what is stored."""
    if ADD:
        values += tl.load(to, mask=inside, other=0.0)
    tl.store(to, values.to(to.dtype.element_ty), mask=inside)


@triton.jit
def keys_kernel(
    q, k, v, g, dk, dv, lse, factor, delta, grad_lse, columns, tiles, ranges, bias, dense, slopes, row_at, key_at, sequence,
    position, seed,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, g_b, g_h, g_s, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s,
    columns_b, tiles_b, ranges_b,
    bias_b, bias_h, bias_q, bias_k, dense_b, dense_h, dense_q, dense_k, slopes_b, slopes_h, slopes_q, row_at_b, key_at_b,
    sequence_b, position_b, q_len, kv_len, heads, steps, first_row, row_values, scale, softcap, threshold, survivor, dropout_head,
    HEADS_PER_KV: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM_STEP: tl.constexpr, VALUE_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr, DENSE: tl.constexpr,
    ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, GRAD_LSE: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, ADD: tl.constexpr, GAPLESS: tl.constexpr, CLEAN: tl.constexpr,
    TMA: tl.constexpr, WITH_K: tl.constexpr, WITH_V: tl.constexpr,
):
    """dk and dv of one key tile of one key/value head, one step of the columns of each.

    Scores are k q^T [N, M], the orientation that both products need. The grid is (key tiles * steps, key/value heads,
    batch). With ADD the sums are added to dk and dv (fp32), because the rows come in several launches. WITH_K, WITH_V:
    whether this launch computes dk, dv.
    """
    tile, step = tl.program_id(0) // steps, tl.program_id(0) % steps
    n_head, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)

    # the keys of this tile
    o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    ok_n = o_n < kv_len
    keys = o_n.to(tl.int64)
    k_rows = HeadRows(k + b * k_b + n_head * k_h, keys * k_s, ok_n)
    v_rows = HeadRows(v + b * v_b + n_head * v_h, keys * v_s, ok_n)
    blocks = columns + b * columns_b + tile * 4
    partial_first, partial_last, whole_first, whole_last = (
        tl.load(blocks), tl.load(blocks + 1), tl.load(blocks + 2), tl.load(blocks + 3),
    )
    key_positions = key_at + b * key_at_b
    seed_value = 0
    if DROPOUT:
        seed_value = tl.load(seed)
    acc_k = tl.zeros([BLOCK_N, DIM_STEP], tl.float32)
    acc_v = tl.zeros([BLOCK_N, VALUE_STEP], tl.float32)
    k_tile = load_first(k_rows, QK_DIM, DIM_STEP, True)
    v_tile = load_first(v_rows, V_DIM, VALUE_STEP, True)

    # the loops over heads of the group and over blocks of rows
    for member in range(0, HEADS_PER_KV):
        h = n_head * HEADS_PER_KV + member
        q_head, g_head = k_rows.base, v_rows.base  # unused placeholders with TMA
        if not TMA:
            q_head, g_head = q + b * q_b + h * q_h, g + b * g_b + h * g_h
        for masked in tl.static_range(2):
            if masked or not (BIAS or DENSE):  # with these no tile is full
                for block in range(partial_first if masked else whole_first, partial_last if masked else whole_last):
                    visit = True
                    if masked or not GAPLESS:
                        visit = _sees(tiles + b * tiles_b + block * 8, tile, masked)
                    if visit:
                        o_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
                        ok_m = o_m < q_len
                        rows = o_m.to(tl.int64)
                        if masked and CLEAN > 0 and COLUMNS > 0:  # rows without keys may hold NaN
                            key_ranges = row_ranges(ranges + b * ranges_b, o_m + first_row, ok_m, COLUMNS)
                            ok_m = (key_ranges.stop > key_ranges.start) | (key_ranges.stop2 > key_ranges.start2)
                        offsets = (b * heads + h) * row_values + o_m + first_row
                        if DENSE or BIAS:  # it may hide every key of a range
                            ok_m = ok_m & (tl.load(lse + offsets, mask=ok_m, other=float("-inf")) != float("-inf"))
                        q_rows, g_rows = HeadRows(q_head, rows * q_s, ok_m), HeadRows(g_head, rows * g_s, ok_m)
                        if TMA:
                            q_tile = load_descriptor_rows(q, b, h, block * BLOCK_M, BLOCK_M, DIM_STEP)
                            g_tile = load_descriptor_rows(g, b, h, block * BLOCK_M, BLOCK_M, VALUE_STEP)
                            if masked and CLEAN > 0 and (COLUMNS > 0 or BIAS):
                                q_tile = tl.where(ok_m[:, None], q_tile, 0.0)
                                g_tile = tl.where(ok_m[:, None], g_tile, 0.0)
                        else:
                            q_tile = load_first(q_rows, QK_DIM, DIM_STEP, True)
                            g_tile = load_first(g_rows, V_DIM, VALUE_STEP, True)
                        slope, at_m, i_m, b_m = row_features(
                            o_m, ok_m, first_row, slopes, row_at, position, sequence, slopes_b, slopes_h, slopes_q,
                            row_at_b, position_b, sequence_b, b, h, 0, ALIBI, DROPOUT,
                        )

                        # the products of the tile
                        kq = product(k_tile, k_rows, q_tile, q_rows, QK_DIM, DIM_STEP, PRECISION)
                        vg = kq  # an unused placeholder for dv alone
                        if WITH_K:
                            vg = product(v_tile, v_rows, g_tile, g_rows, V_DIM, VALUE_STEP, PRECISION)

                        # the gradient of its scores
                        # statistics are loaded after the products: kept in registers across them, they would spill
                        statistics = load_statistics(lse, factor, delta, grad_lse, offsets, ok_m, 0, SINKS, GRAD_LSE)
                        allowed = True
                        if masked:
                            key_ranges = row_ranges(ranges + b * ranges_b, o_m + first_row, ok_m, COLUMNS)
                            key_ranges = horizontal(key_ranges)
                            allowed = allowed_pairs(o_n[:, None], kv_len, ok_m[None, :], key_ranges, COLUMNS)
                        keep = True
                        if DROPOUT:
                            h_m = o_m * 0 + h + dropout_head
                            keep = dropout_keep(o_n, kv_len, key_positions, i_m, h_m, b_m, seed_value, threshold,
                                                DROPOUT == 2, BLOCK_N)
                            keep = tl.trans(keep)
                        bias_rows = (bias + b * bias_b + h * bias_h + rows * bias_q)[None, :]
                        dense_rows = (dense + b * dense_b + h * dense_h + rows * dense_q)[None, :]
                        terms = ScoreTerms(
                            bias_rows, bias_k, dense_rows, dense_k, slope, at_m, key_positions, scale, softcap
                        )
                        w, ds, allowed, rate, _ = score_gradient(
                            kq, vg, allowed, o_n[:, None], ok_m[None, :], kv_len, terms, statistics, keep, survivor,
                            masked, BIAS, DENSE, ALIBI, SOFTCAP, SINKS, GRAD_LSE, DROPOUT,
                        )

                        # dk and dv
                        if QK_DIM > DIM_STEP or V_DIM > VALUE_STEP:  # a step may be beyond the columns of one of the two
                            q_tile = load_step(q_rows, step * DIM_STEP, QK_DIM, DIM_STEP, False)
                            g_tile = load_step(g_rows, step * VALUE_STEP, V_DIM, VALUE_STEP, False)
                        if WITH_V:
                            acc_v = dot(w.to(g_tile.dtype), g_tile, acc_v, PRECISION)
                        if WITH_K:
                            acc_k = dot((ds * rate).to(q_tile.dtype), q_tile, acc_k, PRECISION)

    if WITH_K:
        o_d = step * DIM_STEP + tl.arange(0, DIM_STEP)
        to_k = (dk + b * dk_b + n_head * dk_h + keys * dk_s)[:, None] + o_d[None, :]
        _write(to_k, acc_k * scale, ok_n[:, None] & (o_d < QK_DIM)[None, :], ADD)
    if WITH_V:
        o_v = step * VALUE_STEP + tl.arange(0, VALUE_STEP)
        to_v = (dv + b * dv_b + n_head * dv_h + keys * dv_s)[:, None] + o_v[None, :]
        _write(to_v, acc_v, ok_n[:, None] & (o_v < V_DIM)[None, :], ADD)


@triton.jit
def pairs_kernel(
    q, k, v, g, dbias, lse, factor, delta, grad_lse, tiles, ranges, bias, dense, slopes, row_at, key_at, sequence, position,
    seed,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, g_b, g_h, g_s, dbias_b, dbias_h, dbias_q, tiles_b, ranges_b,
    bias_b, bias_h, bias_q, bias_k, dense_b, dense_h, dense_q, dense_k, slopes_b, slopes_h, slopes_q, row_at_b, key_at_b,
    sequence_b, position_b, q_len, kv_len, heads, own_batch, own_heads, batches, first_row, row_values, scale, softcap,
    threshold, survivor, dropout_head,
    HEADS_PER_KV: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM_STEP: tl.constexpr, VALUE_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, DENSE: tl.constexpr, ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, GRAD_LSE: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):
    """The gradient of the scores, summed over the batch elements and heads that share a bias: dbias fp32 [b, h, Sq, Sk].

    The grid is (key tiles, blocks of rows, own_batch * own_heads); own_batch and own_heads are the bias' own sizes.
    """
    tile, block, own = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own_b, own_h = own // own_heads, own % own_heads
    o_m, o_n = block * BLOCK_M + tl.arange(0, BLOCK_M), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    ok_m, ok_n = o_m < q_len, o_n < kv_len
    rows, keys = o_m.to(tl.int64), o_n.to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    seed_value = 0
    if DROPOUT:
        seed_value = tl.load(seed)
    # one iteration for each batch element and head that shares this slice of the bias
    for turn in range(0, (batches // own_batch) * (heads // own_heads)):
        b = (own_b + turn // (heads // own_heads)).to(tl.int64)
        h = (own_h + turn % (heads // own_heads)).to(tl.int64)
        run = tiles + b * tiles_b + block * 8
        needed = ((tile >= tl.load(run)) & (tile < tl.load(run + 3))) | (
            (tile >= tl.load(run + 4)) & (tile < tl.load(run + 7))
        )
        if needed:
            n_head = h // HEADS_PER_KV
            offsets = (b * heads + h) * row_values + o_m + first_row
            statistics = load_statistics(lse, factor, delta, grad_lse, offsets, ok_m, 1, SINKS, GRAD_LSE)
            slope, at_m, i_m, b_m = row_features(
                o_m, ok_m, first_row, slopes, row_at, position, sequence, slopes_b, slopes_h, slopes_q, row_at_b,
                position_b, sequence_b, b, h, 1, ALIBI, DROPOUT,
            )
            q_rows = HeadRows(q + b * q_b + h * q_h, rows * q_s, ok_m)
            g_rows = HeadRows(g + b * g_b + h * g_h, rows * g_s, ok_m)
            k_rows = HeadRows(k + b * k_b + n_head * k_h, keys * k_s, ok_n)
            v_rows = HeadRows(v + b * v_b + n_head * v_h, keys * v_s, ok_n)
            q_tile, k_tile = load_first(q_rows, QK_DIM, DIM_STEP, True), load_first(k_rows, QK_DIM, DIM_STEP, True)
            g_tile, v_tile = load_first(g_rows, V_DIM, VALUE_STEP, True), load_first(v_rows, V_DIM, VALUE_STEP, True)
            qk = product(q_tile, q_rows, k_tile, k_rows, QK_DIM, DIM_STEP, PRECISION)
            gv = product(g_tile, g_rows, v_tile, v_rows, V_DIM, VALUE_STEP, PRECISION)
            key_ranges = row_ranges(ranges + b * ranges_b, o_m + first_row, ok_m, COLUMNS)
            allowed = allowed_pairs(o_n[None, :], kv_len, ok_m[:, None], vertical(key_ranges), COLUMNS)
            key_positions = key_at + b * key_at_b
            keep = True
            if DROPOUT:
                h_m = o_m * 0 + h + dropout_head
                keep = dropout_keep(
                    o_n, kv_len, key_positions, i_m, h_m, b_m, seed_value, threshold, DROPOUT == 2, BLOCK_N
                )
            bias_rows = (bias + b * bias_b + h * bias_h + rows * bias_q)[:, None]
            dense_rows = (dense + b * dense_b + h * dense_h + rows * dense_q)[:, None]
            terms = ScoreTerms(bias_rows, bias_k, dense_rows, dense_k, slope, at_m, key_positions, scale, softcap)
            _, ds, _, _, _ = score_gradient(
                qk, gv, allowed, o_n[None, :], ok_m[:, None], kv_len, terms, statistics, keep, survivor,
                True, True, DENSE, ALIBI, SOFTCAP, SINKS, GRAD_LSE, DROPOUT,
            )
            acc += ds
    out = dbias + own_b.to(tl.int64) * dbias_b + own_h.to(tl.int64) * dbias_h + rows * dbias_q
    tl.store(out[:, None] + keys[None, :], acc, mask=ok_m[:, None] & ok_n[None, :])
