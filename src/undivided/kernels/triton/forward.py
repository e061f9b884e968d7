"""Output and log-sum-exp, by FlashAttention's online softmax (Dao et al. 2022, arXiv:2205.14135; Milakov and Gimelshein
2018).

Memory traffic: a program reads its query rows once and each key tile that its rows need once; it writes its output rows
once. Rows are (query, head of the group) pairs: with GROUP = 1 a tile of rows belongs to one head; in decoding the rows
of all heads that share a key/value head are in one tile, so that its keys are read once. With SPLITS > 1 (split-KV) each
program computes an equal share of the tiles and `combine_kernel` merges their results in a fixed order: results are
bit-reproducible.

Strides: every last axis has stride 1; all others are free. Of q, DIM_STEP columns are kept in registers; the others are
contracted in steps of MORE_STEP and loaded again for every tile.

Quantised keys and values are dequantised in registers to the dtype of q.
"""

# The arguments of kernels are grouped: pointers, strides, sizes, constants.
# fmt: off

import triton
import triton.language as tl

from undivided.kernels.triton.key_ranges import (
    allowed_pairs,
    ancestor_pairs,
    count_tiles,
    hull,
    load_runs,
    nth_tile,
    row_ranges,
    tiles_before,
    vertical,
)
from undivided.kernels.triton.merging import merge, normalised
from undivided.kernels.triton.parts import (
    accumulate,
    dot_columns,
    join_columns,
    load_parts,
    select_rows,
    split_columns,
    zero_parts,
)
from undivided.kernels.triton.quantized import INT4, load_numbers, load_scales, stored_rows
from undivided.kernels.triton.tile import (
    LOG2E,
    ScoreTerms,
    dot,
    dropout_keep,
    finish_scores,
    load_descriptor_rows,
    next_weights,
    row_features,
    store_columns,
    tile_page,
)


@triton.jit
def block_pairs(
    block, q_len, places, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, PLACES: tl.constexpr, INVARIANT: tl.constexpr
):
    """(pairs of (query, head) of a block [M], the number that they are below, the key at which tiles begin)."""
    o_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    end, origin = q_len * GROUP, 0
    if PLACES:
        place = places + block * 3
        o_m = tl.load(place) + tl.arange(0, BLOCK_M)
        end = tl.load(place + 1)
        if INVARIANT:
            origin = tl.load(place + 2)
    return o_m, end, origin


@triton.jit
def pieces_of(runs, TILES: tl.constexpr):
    """[first, last) piece of TILES tiles that a block of rows needs."""
    first = tl.where(runs.last > runs.first, runs.first, runs.first2) // TILES
    return first, (tl.maximum(runs.last, runs.last2) + TILES - 1) // TILES


@triton.jit
def load_columns(rows, first, ok_m, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH columns from `first` on of rows [M] of pointers, [M, WIDTH]; 0 outside."""
    o_d = first + tl.arange(0, WIDTH)
    return tl.load(rows[:, None] + o_d[None, :], mask=ok_m[:, None] & (o_d < DIM)[None, :], other=0.0)


@triton.jit
def dot_more_columns(
    qk, q_rows, ok_m, k_rows, ok_n,
    DIM: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr, CHECKED: tl.constexpr, FORMAT: tl.constexpr,
    dtype: tl.constexpr, PTX: tl.constexpr, PRECISION: tl.constexpr,
):
    """qk plus the products of the columns from FIRST on, which are not kept in registers."""
    for d in tl.static_range(FIRST, DIM, STEP):
        q_tile = load_columns(q_rows, d, ok_m, DIM, STEP)
        k_tile = load_numbers(k_rows, ok_n, DIM, d, STEP, d + STEP <= DIM, CHECKED, FORMAT, dtype, False, PTX)
        qk = dot(q_tile, tl.trans(k_tile), qk, PRECISION)
    return qk


@triton.jit
def forward_kernel(
    q, k, v, k_scale, v_scale, out, lse, tiles, ranges, bias, dense, slopes, row_at, key_at, sequence, position, sinks, seed,
    pages, ancestors, tree_first,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, out_z, out_b, out_h, out_s, lse_z, lse_b, lse_h, tiles_b, ranges_b,
    bias_b, bias_h, bias_q, bias_k, dense_b, dense_h, dense_q, dense_k, slopes_b, slopes_h, slopes_q, row_at_b, key_at_b,
    sequence_b, position_b, places, places_b, pages_b, k_page, v_page, num_pages, k_scale_b, k_scale_h, k_scale_s, k_scale_page,
    v_scale_b, v_scale_h, v_scale_s, v_scale_page, ancestors_b, ancestors_q, tree_first_b, nodes, q_len, kv_len, value_steps, first_row,
    pieces, scale, softcap, threshold, survivor, dropout_head,
    GROUP: tl.constexpr, HEADS_PER_KV: tl.constexpr, QK_DIM: tl.constexpr, V_DIM: tl.constexpr, DIM_STEP: tl.constexpr,
    VALUE_STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr,
    DENSE: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, DROPOUT: tl.constexpr,
    PAGE: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, PLAIN: tl.constexpr,
    TMA: tl.constexpr, CLEAN: tl.constexpr, SPECIALISE: tl.constexpr, FORMAT: tl.constexpr, PTX: tl.constexpr,
    PLACES: tl.constexpr, INVARIANT: tl.constexpr, MORE_STEP: tl.constexpr, LATENT: tl.constexpr, TREE: tl.constexpr,
    WORDS: tl.constexpr, PIECE: tl.constexpr,
):
    """One block of rows of one head (or group of heads), one split of its keys, one step of value columns.

    TMA: k and v are tensor descriptors of blocks [1, 1, BLOCK_N, D].
    CLEAN: keys that no row may attend to may be NaN, and are replaced by 0. 1: they are before the first or after the
        last key of the block's rows; 2: anywhere; 3: anywhere, and those of 1 are not even read (chosen blocks, whose
        last page may end after the memory).
    FORMAT: of k and v, from `quantization.FORMAT_CODES`. PTX: as in `quantized.load_numbers`.
    PLACES: blocks of rows lie where `places` says (`kernels.triton.blocks`, `backends.triton.invariant`). With SPLITS > 1,
        the partial result [z, h, i] is then of group h and row i % BLOCK_M of block i // BLOCK_M.
    INVARIANT: tiles of keys begin where `places` says (`backends.triton.invariant`), and none is full. PIECE keys at a time
        are summed from zero (`kernels.triton.merging`). With SPLITS > 1 a program computes every SPLITS-th of `pieces`
        pieces, and writes each: its sums to out [Z, B, G, (query, head) pairs, Dv], its largest scores and its sums of
        weights to lse [2, Z, B, G, pairs].
    LATENT: v is the first DIM_STEP columns of k in memory, so that a tile of both is loaded once.
    WORDS: k and v are 16-bit words of so many numbers each; 0 for numbers as they are. Columns 0, WORDS, 2 WORDS, ... are
        multiplied apart from columns 1, WORDS + 1, ..., and so on.
    TREE: rows are nodes of a draft tree; ancestors [B|1, rows, nodes] bytes, and tree_first [B|1, rows], the key of node 0.
    DROPOUT: 0 for none; 2 if the position of every key is its index (ALIGNED in `tile.dropout_keep`), otherwise 1.
    PLAIN: scores are just ``scale * qk`` with scale > 0, so that the maximum is found before the scale is applied.

    The grid is (blocks of rows * value_steps * SPLITS, heads / GROUP, batch). q, out, lse, bias and dense
    begin at row `first_row` of the mask's tables.
    """
    DTYPE: tl.constexpr = q.dtype.element_ty
    ONE_PAGE: tl.constexpr = PAGE > 0 and PAGE % BLOCK_N == 0 and not INVARIANT
    SCALED_ROWS: tl.constexpr = FORMAT != 0 and FORMAT != INT4
    # weights times scales may be out of the range of float16; there, the values are scaled
    SCALED_WEIGHTS: tl.constexpr = SCALED_ROWS and q.dtype.element_ty != tl.float16
    program = tl.program_id(0)
    share = program % SPLITS
    split = share.to(tl.int64)
    step = program // SPLITS % value_steps
    block = program // SPLITS // value_steps
    h, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    n_head = (h * GROUP // HEADS_PER_KV).to(tl.int64)

    # the rows of this block, and what depends on them alone
    o_m, end_m, origin = block_pairs(block, q_len, places + b * places_b, GROUP, BLOCK_M, PLACES, INVARIANT)
    rows = o_m // GROUP
    heads = (h * GROUP + o_m % GROUP).to(tl.int64)
    ok_m = o_m < end_m
    key_ranges = row_ranges(ranges + b * ranges_b, rows + first_row, ok_m, COLUMNS)
    first_key, last_key = 0, kv_len
    if CLEAN == 1 or CLEAN == 3:
        first_key, last_key = hull(key_ranges, COLUMNS)
    key_ranges = vertical(key_ranges)
    q_rows = q + b * q_b + heads * q_h + rows.to(tl.int64) * q_s  # [M] pointers
    bias_rows = (bias + b * bias_b + heads * bias_h + rows.to(tl.int64) * bias_q)[:, None]
    dense_rows = (dense + b * dense_b + heads * dense_h + rows.to(tl.int64) * dense_q)[:, None]
    tree, ancestor_rows = 0, 0
    if TREE:
        tree = tl.load(tree_first + b * tree_first_b + rows, mask=ok_m, other=0)[:, None]
        ancestor_rows = (ancestors + b * ancestors_b + rows.to(tl.int64) * ancestors_q)[:, None]
    slope, at_m, i_m, b_m = row_features(
        rows, ok_m, first_row, slopes, row_at, position, sequence, slopes_b, slopes_h, slopes_q, row_at_b, position_b,
        sequence_b, b, heads, 1, ALIBI, DROPOUT,
    )
    key_positions = key_at + b * key_at_b
    terms = ScoreTerms(bias_rows, bias_k, dense_rows, dense_k, slope, at_m, key_positions, scale, softcap)
    seed_value = 0
    if DROPOUT:
        seed_value = tl.load(seed)
    if not TMA:
        k_head, v_head = k + n_head * k_h, v + n_head * v_h
        k_scales, v_scales = k_scale + n_head * k_scale_h, v_scale + n_head * v_scale_h
        if not PAGE:
            k_head, v_head = k_head + b * k_b, v_head + b * v_b
            k_scales, v_scales = k_scales + b * k_scale_b, v_scales + b * v_scale_b

    unit = scale * LOG2E if PLAIN else 1.0
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_parts(BLOCK_M, VALUE_STEP, WORDS)
    q_tile = load_columns(q_rows, 0, ok_m, QK_DIM, DIM_STEP)
    q_parts = split_columns(q_tile, BLOCK_M, DIM_STEP, WORDS)

    # the loop over tiles of keys
    runs = load_runs(tiles + b * tiles_b + block * 8)
    edges, whole = count_tiles(runs)
    from_piece, to_piece = 0, 1
    all_top, all_total, all_acc = m, total, acc[0]
    if INVARIANT:
        TILES: tl.constexpr = PIECE // BLOCK_N  # of a piece
        from_piece, to_piece = share, pieces
        if SPLITS == 1:
            from_piece, to_piece = pieces_of(runs, TILES)
    for piece in range(from_piece, to_piece, SPLITS):  # all keys at once, unless INVARIANT
        if INVARIANT:
            m = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total, acc = tl.zeros([BLOCK_M], tl.float32), zero_parts(BLOCK_M, VALUE_STEP, WORDS)
        for masked in tl.static_range(2):
            if masked or not (BIAS or DENSE or INVARIANT):  # with these no tile is full
                count = edges if masked else whole
                from_tile, to_tile = count * share // SPLITS, count * (share + 1) // SPLITS
                if INVARIANT:
                    from_tile, to_tile = tiles_before(piece * TILES, runs), tiles_before((piece + 1) * TILES, runs)
                for n in tl.range(from_tile, to_tile, warp_specialize=SPECIALISE):
                    tile = nth_tile(n, runs, masked == 0)
                    start_n = origin + tile * BLOCK_N
                    o_n = start_n + tl.arange(0, BLOCK_N)
                    ok_n = (o_n >= first_key) & (o_n < tl.minimum(last_key, kv_len))

                    # the scores of the tile
                    if TMA:
                        k_parts = (load_descriptor_rows(k, b, n_head, tile * BLOCK_N, BLOCK_N, DIM_STEP),)
                    else:
                        page, row = tile_page(start_n, o_n, kv_len, pages + b * pages_b, num_pages, PAGE, ONE_PAGE)
                        k_rows = stored_rows(
                            k_head, k_scales, page, row, k_page, k_s, k_scale_page, k_scale_s, BLOCK_N, ONE_PAGE
                        )
                        v_rows = stored_rows(
                            v_head, v_scales, page, row, v_page, v_s, v_scale_page, v_scale_s, BLOCK_N, ONE_PAGE
                        )
                        k_parts = load_parts(
                            k_rows, ok_n, QK_DIM, 0, DIM_STEP, QK_DIM >= DIM_STEP, masked, FORMAT, DTYPE, False, PTX,
                            WORDS,
                        )
                    qk = dot_columns(q_parts, k_parts, PRECISION)
                    if QK_DIM > DIM_STEP:
                        qk = dot_more_columns(
                            qk, q_rows, ok_m, k_rows, ok_n, QK_DIM, DIM_STEP, MORE_STEP, masked, FORMAT, DTYPE, PTX,
                            PRECISION,
                        )
                    if SCALED_ROWS:
                        qk *= load_scales(k_rows, ok_n)[None, :]

                    # the mask, and what else changes scores
                    keys, allowed = o_n[None, :], True
                    if masked:
                        allowed = allowed_pairs(keys, kv_len, ok_m[:, None], key_ranges, COLUMNS)
                        if TREE:
                            allowed &= ancestor_pairs(keys - tree, ok_m[:, None], ancestor_rows, nodes)
                    if PLAIN:  # the scale is applied in the exponent, by a multiply-add at no extra cost
                        s = qk
                        if masked:
                            s = tl.where(allowed, qk, float("-inf"))
                    else:
                        s, allowed, _, _ = finish_scores(
                            qk, allowed, keys, ok_m[:, None], kv_len, terms, masked, BIAS, DENSE, ALIBI, SOFTCAP
                        )

                    # the online softmax
                    p, shrink, m, total = next_weights(s, m, total, unit, masked)
                    if DROPOUT:
                        keep = dropout_keep(
                            o_n, kv_len, key_positions, i_m, heads + dropout_head, b_m, seed_value, threshold,
                            DROPOUT == 2, BLOCK_N,
                        )
                        p = tl.where(keep, p * survivor, 0.0)

                    # the values
                    if TMA:
                        v_parts = (load_descriptor_rows(v, b, n_head, tile * BLOCK_N, BLOCK_N, VALUE_STEP),)
                    elif LATENT:
                        v_parts = k_parts
                    else:
                        v_parts = load_parts(
                            v_rows, ok_n, V_DIM, step * VALUE_STEP, VALUE_STEP, V_DIM % VALUE_STEP == 0, masked, FORMAT,
                            DTYPE, not SCALED_WEIGHTS, PTX, WORDS,
                        )
                    if SCALED_WEIGHTS:
                        factor = load_scales(v_rows, ok_n)
                    if masked and CLEAN >= 2:  # keys that no row of the block sees may be NaN, and 0 * NaN is NaN
                        used = tl.max(allowed.to(tl.int32), 0) > 0
                        v_parts = select_rows(v_parts, used, WORDS)
                        if SCALED_WEIGHTS:
                            factor = tl.where(used, factor, 0.0)
                    elif masked and CLEAN == 1 and TMA:
                        v_parts = select_rows(v_parts, ok_n, WORDS)
                    if SCALED_WEIGHTS:
                        p *= factor[None, :]
                    acc = accumulate(acc, shrink, p, v_parts, PRECISION, WORDS)

        if INVARIANT and SPLITS == 1:
            all_top, all_total, some, keep, add = merge(all_top, all_total, tl.fma(m, unit, 0.0), total)
            all_acc = tl.where(some[:, None], tl.fma(all_acc, keep[:, None], acc[0] * add[:, None]), all_acc)
        elif INVARIANT:
            written = out + tl.cast(piece, tl.int64) * out_z + b * out_b + h * out_h + o_m.to(tl.int64) * out_s
            store_columns(written, acc[0], step * VALUE_STEP, ok_m, V_DIM, VALUE_STEP)
            if step == 0:
                written = lse + tl.cast(piece, tl.int64) * lse_z + b * lse_b + h * lse_h + o_m
                tl.store(written, tl.fma(m, unit, 0.0), mask=ok_m)
                tl.store(written + pieces * lse_z, total, mask=ok_m)

    # the output and the log-sum-exp
    if INVARIANT and SPLITS > 1:
        return
    top = m * unit
    if INVARIANT:
        top, total = all_top, all_total
    natural, divisor = normalised(top, total)
    result = all_acc if INVARIANT else join_columns(acc, BLOCK_M, VALUE_STEP, WORDS)
    result = result / divisor[:, None]
    if SINKS:
        sink = tl.load(sinks + heads, mask=ok_m, other=0.0)
        result *= tl.where(total != 0, tl.sigmoid(natural - sink), 0.0)[:, None]
    if PLACES and SPLITS > 1:
        heads, rows = heads * 0 + h, block * BLOCK_M + tl.arange(0, BLOCK_M)
    o_rows = out + split * out_z + b * out_b + heads * out_h + rows.to(tl.int64) * out_s
    store_columns(o_rows, result, step * VALUE_STEP, ok_m, V_DIM, VALUE_STEP)
    if step == 0:
        tl.store(lse + split * lse_z + b * lse_b + heads * lse_h + rows, natural, mask=ok_m)
