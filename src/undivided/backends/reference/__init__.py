"""The reference: attention in readable PyTorch. It is the specification; every other backend matches it or refuses.

`scores` and `attend` define the semantics of one block of query rows as plain differentiable operations. Forward,
backward and double backward loop over blocks of query rows, each with the keys that its rows may attend to, so that
memory is O(S * block) and the cost follows the allowed pairs. Gradients are those of `attend`, computed block by block.

Legend: B batch, H query heads, N key/value heads, R query rows of the block, K keys of the block, D head size.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.arguments.tensors import readable
from undivided.backends._base import ALL_FEATURES, ALL_MASK_KINDS, Backend, Gradients, Limits
from undivided.backends.reference.block_gradients import Accumulators, partial_gradients
from undivided.backends.reference.row_cuts import find_row_cuts
from undivided.backends.shared.block import Block, block_slopes, distance, hide
from undivided.backends.shared.empty_rows import result_without_keys
from undivided.backends.shared.leaves import leaf_gradients, make_leaves, recording
from undivided.kernels import philox
from undivided.masks.normal_form import NormalForm
from undivided.request.call import Call
from undivided.request.checks import DTYPES
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import Result, lse_dtype, sink_factor

SCORES_PER_BLOCK = 1 << 22
"""Entries of the score matrix computed at once. 16 MiB in fp32: several such temporaries fit in or near the last-level
cache."""

MIN_ROWS = 16
"""A block has at least this many query rows; if they do not fit, the heads are split."""

MAX_ROWS = 256
"""Query rows of a block under a mask. A larger block would need more keys per row under a window or documents."""


class Scores(NamedTuple):
    """One block before its softmax.

    score: [B, H, R, K], -inf where masked.
    v: [B, N, K, Dv], 0 in keys that no row may attend to.
    some_row: rows that have a key, [B|1, H|1, R, 1]; None if all have one.
    allowed: the allowed pairs, [B|1, H|1, R, K]; None for all.
    """

    score: Tensor
    v: Tensor
    some_row: Tensor | None
    allowed: Tensor | None


def scores(block: Block, call: Call, tensors: Tensors, slices: Sequence[Tensor | None]) -> Scores:
    """``mask(softcap(scale * q . k) - slope * |i + d - j| + bias)`` of one block; `slices` comes from `_slices`."""
    q, k, v, bias, _, slopes = slices
    assert q is not None and k is not None and v is not None
    some_row = None
    allowed = _allowed(block, call, tensors, bias)
    if allowed is not None:
        q, k, v, some_row = hide(allowed, q, k, v)
    score = _grouped_matmul(q, k.transpose(-1, -2)) * call.scale
    if call.softcap is not None:
        if allowed is not None:  # a hidden score may overflow; its gradient would be 0 times NaN
            score = score.masked_fill(~allowed, 0.0)
        score = call.softcap * torch.tanh(score / call.softcap)
    if slopes is not None:
        score = score - slopes * distance(block, call.normal_form(tensors.q)).to(score.dtype)
    if bias is not None:
        score = score + bias
    if allowed is not None:
        score = score.masked_fill(~allowed, -torch.inf)
    return Scores(score, v, some_row, allowed)


def attend(block: Block, call: Call, tensors: Tensors, slices: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """(out [B, H, R, Dv], lse [B, H, R]) of one block. With `scores`, this is the specification.

    ``softmax(scores) @ v`` with sinks in the denominator and dropout on the weights. Rows without an allowed key give 0
    and -inf, whatever they contain.
    """
    score, v, some_row, allowed = scores(block, call, tensors, slices)
    lse, weights = _softmax(score)
    sinks = slices[4]
    if sinks is not None:
        weights = weights * sink_factor(lse, sinks).unsqueeze(-1)
    if allowed is not None:  # a NaN in a row's total must not reach the keys that the row does not see
        weights = weights.masked_fill(~allowed, 0.0)
    if call.dropout_p > 0:
        survivors = _survivors(block, call, tensors)
        weights = weights.masked_fill(~survivors, 0.0) * philox.survivor_scale(call.dropout_p)
    out = _grouped_matmul(weights, v)
    if call.dropout_p > 0:  # a row with a NaN score is NaN, whichever of its weights are dropped
        out = out + lse.detach().masked_fill(~lse.isnan(), 0.0).unsqueeze(-1)
    # a row without a key is already 0; torch.where stops the gradient that comes back to it
    return out if some_row is None else torch.where(some_row, out, 0.0), lse


def score_blocks(call: Call, tensors: Tensors) -> Iterator[tuple[Block, Tensor]]:
    """The masked scores, block by block, for users that need scores and not outputs."""
    tensors = call.dense_tensors(tensors, lse_dtype(call.problem.dtype))
    for block in _blocks(call, tensors):
        yield block, scores(block, call, tensors, _slices(block, call, tensors)).score


def _softmax(score: Tensor) -> tuple[Tensor, Tensor]:
    """(lse, weights) over the last axis; a row of -inf gives lse -inf and weights 0, with zero gradients."""
    if score.shape[-1] == 0:
        return score.new_full(score.shape[:-1], -torch.inf), score
    largest = score.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    exponential = torch.exp(score - largest)
    total = exponential.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (largest + total.log()).masked_fill(empty, -torch.inf).squeeze(-1)
    return lse, exponential / total


def _grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """[B, H, R, X] @ [B, N, X, Y]: each of the N right heads serves H / N left heads without being expanded."""
    batch, heads, rows, inner = left.shape
    kv_heads = right.shape[1]
    grouped = left.reshape(batch, kv_heads, heads // kv_heads * rows, inner)
    return (grouped @ right).reshape(batch, heads, rows, right.shape[-1])


def _allowed(block: Block, call: Call, tensors: Tensors, bias: Tensor | None) -> Tensor | None:
    """Allowed pairs of the block, bool [B|1, H|1, R, K]; None if all are. A bias of -inf counts as masked."""
    allowed = None
    if not call.mask.is_full:
        form = call.normal_form(tensors.q)
        if not block.is_covered(form):
            allowed = block.allowed(form)
    if bias is not None:
        finite = bias.detach() != -torch.inf
        allowed = finite if allowed is None else allowed & finite
        return allowed.expand(
            *allowed.shape[:2], block.rows.stop - block.rows.start, block.keys.stop - block.keys.start
        )
    return allowed


def _survivors(block: Block, call: Call, tensors: Tensors) -> Tensor:
    """Which weights survive dropout, bool [B, H, R, K]."""
    form = call.normal_form(tensors.q)
    assert call.dropout_seed is not None
    heads = torch.arange(block.heads.start, block.heads.stop, device=tensors.q.device) + form.first_head
    return philox.keep(
        call.dropout_seed,
        block.slice_rows(form.sequence_number)[:, None, :, None],
        heads[None, :, None, None],
        block.slice_rows(form.q_position)[:, None, :, None],
        block.slice_keys(form.kv_position)[:, None, None, :],
        call.dropout_p,
    )


def _blocks(
    call: Call, tensors: Tensors, row_tensors: Sequence[Tensor] = (), key_tensors: Sequence[Tensor] = ()
) -> Iterator[Block]:
    """All blocks, in order. Together they cover every (batch, head, row) once.

    row_tensors [B, H, Sq, D] and key_tensors [B, N, Sk, D]: what a block multiplies besides q, k and v.
    """
    problem = call.problem
    form = None if call.mask.is_full else call.normal_form(tensors.q)
    batches = problem.batch
    row_cuts = find_row_cuts(call, tensors, row_tensors, key_tensors)
    if row_cuts is not None or problem.batch * problem.heads * problem.q_len * problem.kv_len > SCORES_PER_BLOCK:
        batches = 1
    for b in range(0, problem.batch, max(batches, 1)):
        batch = slice(b, b + batches)
        group = problem.heads // problem.kv_heads
        heads = _heads_per_block(problem, form, batch)
        ends = [problem.q_len] if row_cuts is None else row_cuts.ends[b]
        step = 1 if row_cuts is not None and row_cuts.by_head else heads * group
        for h in range(0, problem.heads, step):
            q_heads = slice(h, min(h + step, problem.heads))
            kv_heads = slice(h // group, (q_heads.stop - 1) // group + 1)
            max_pairs = SCORES_PER_BLOCK // ((q_heads.stop - h) * batches)
            for rows, keys in _row_blocks(problem, form, batch, max_pairs, ends):
                yield Block(batch, q_heads, kv_heads, rows, keys)


def _heads_per_block(problem: Problem, form: NormalForm | None, batch: slice) -> int:
    """How many key/value heads fit into a block of MIN_ROWS rows; fewer heads per block mean more iterations."""
    width: int = 1
    for start in range(0, problem.q_len, MAX_ROWS):
        keys = _keys(form, problem, batch, slice(start, min(start + MIN_ROWS, problem.q_len)))
        width = max(width, int(keys.stop) - int(keys.start))
    per_head = width * MIN_ROWS * (problem.heads // problem.kv_heads) * int(batch.stop - batch.start)
    return min(max(SCORES_PER_BLOCK // per_head, 1), problem.kv_heads)


def _row_blocks(
    problem: Problem, form: NormalForm | None, batch: slice, max_pairs: int, ends: list[int]
) -> Iterator[tuple[slice, slice]]:
    """(rows, keys) with about `max_pairs` pairs each, but at least MIN_ROWS rows unless one of `ends` is there."""
    start, size = (0, problem.q_len if form is None or problem.q_len * problem.kv_len <= max_pairs // 4 else MAX_ROWS)
    while start < problem.q_len:
        end = ends[bisect.bisect_right(ends, start)]
        rows = slice(start, min(start + size, end))
        keys = _keys(form, problem, batch, rows)
        pairs = (rows.stop - rows.start) * (keys.stop - keys.start)
        if pairs > max_pairs and rows.stop - rows.start > MIN_ROWS:
            size = max(max_pairs // (keys.stop - keys.start), MIN_ROWS)
            rows = slice(start, min(start + size, end))
            keys = _keys(form, problem, batch, rows)
        yield rows, keys
        start = rows.stop


def _keys(form: NormalForm | None, problem: Problem, batch: slice, rows: slice) -> slice:
    """The keys that these rows need; all keys if reading the ranges would wait for a device or be traced."""
    if form is None or not readable(form.ranges):
        return slice(0, problem.kv_len)
    return slice(*form.hull(batch, rows))


def _slices(block: Block, call: Call, tensors: Tensors) -> list[Tensor | None]:
    """The block's slice of every input, in the precision of the softmax: q [B, H, R, D], k, v [B, N, K, D], bias
    [B|1, H|1, R|1, K|1], sinks [H], slopes [B|1, H, R|1, 1]."""
    problem = call.problem
    precision = lse_dtype(problem.dtype)
    q, k, v = tensors.heads_first(call.problem.layout)
    slopes = tensors.alibi_slopes
    form = call.normal_form(tensors.q) if slopes is not None and slopes.dim() == 2 else None
    slices: list[Tensor | None] = [
        q[block.batch, block.heads, block.rows],
        k[block.batch, block.kv_heads, block.keys],
        v[block.batch, block.kv_heads, block.keys],
        None if tensors.bias is None else block.slice_pairs(tensors.bias),
        None if tensors.sinks is None else tensors.sinks[block.heads],
        None if slopes is None else block_slopes(slopes, block, form),
    ]
    return [None if tensor is None else tensor.to(precision) for tensor in slices]


def plain_operations(call: Call, tensors: Tensors) -> Result:
    """The result by operations without in-place writes, which forward mode, vmap and higher derivatives require."""
    problem = call.problem
    tensors = call.dense_tensors(tensors, lse_dtype(problem.dtype))
    blocks = list(_blocks(call, tensors))
    if not blocks:
        return result_without_keys(problem, tensors.q).in_layout(problem.layout)
    results = [attend(block, call, tensors, _slices(block, call, tensors)) for block in blocks]
    # blocks are ordered by batch, then heads, then rows: concatenate rows first
    for axis, start in ((2, "rows"), (1, "heads"), (0, "batch")):
        results, blocks = _concatenate(results, blocks, axis, start)
    out, lse = results[0]
    return Result(layout.from_heads_first(out.to(problem.dtype), problem.layout), lse)


def _concatenate(
    results: list[tuple[Tensor, Tensor]], blocks: list[Block], axis: int, name: str
) -> tuple[list[tuple[Tensor, Tensor]], list[Block]]:
    """Join neighbours along one axis; a block that starts at 0 along it begins a new group."""
    joined: list[list[tuple[Tensor, Tensor]]] = []
    firsts = []
    for result, block in zip(results, blocks, strict=True):
        if getattr(block, name).start == 0:
            joined.append([])
            firsts.append(block)
        joined[-1].append(result)
    return [(torch.cat([p[0] for p in g], axis), torch.cat([p[1] for p in g], axis)) for g in joined], firsts


class Reference(Backend):
    """PyTorch operations, block by block; runs every problem."""

    name = "reference"
    family = "math"
    summary = "readable PyTorch, blockwise; the specification"
    limits = Limits(
        devices=frozenset({"cpu", "cuda", "mps", "xpu", "meta"}),
        dtypes=frozenset(DTYPES),
        masks=ALL_MASK_KINDS,
        alignments=frozenset({"top_left", "bottom_right"}),
        features=ALL_FEATURES,
    )

    def forward(self, call: Call, tensors: Tensors) -> Result:
        """Attention, block by block."""
        problem = call.problem
        tensors = call.dense_tensors(tensors, lse_dtype(problem.dtype))
        result = result_without_keys(problem, tensors.q)
        out_BHSD = result.out.transpose(1, 2)
        for block in _blocks(call, tensors):
            out, lse = attend(block, call, tensors, _slices(block, call, tensors))
            out_BHSD[block.batch, block.heads, block.rows] = out.to(problem.dtype)
            result.lse[block.batch, block.heads, block.rows] = lse
        return result.in_layout(problem.layout)

    def backward(
        self,
        call: Call,
        tensors: Tensors,
        result: Result,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        rows: Tensor | None = None,
    ) -> Gradients:
        """The gradient of `attend`, block by block, accumulated in the precision of the softmax.

        rows [B, H, Sq]: where grad_out or grad_lse is not 0. Blocks without such a row are skipped.
        """
        problem = call.problem
        tensors = call.dense_tensors(tensors, lse_dtype(problem.dtype))
        sums = Accumulators(call, tensors)
        grad_out_BHSD = layout.heads_first(grad_out, problem.layout)
        out_BHSD = layout.heads_first(result.out, problem.layout)
        row_tensors = [grad_out_BHSD]
        if "partial" in problem.features:
            row_tensors += [out_BHSD, result.lse.unsqueeze(-1)]
        for block in _blocks(call, tensors, row_tensors):
            where = (block.batch, block.heads, block.rows)
            if rows is not None and not rows[where].any():
                continue
            with recording():
                leaves = make_leaves(_slices(block, call, tensors), call.needs)
                out, lse = attend(block, call, tensors, leaves)
            outputs, grads = [out], [grad_out_BHSD[where].to(out.dtype)]
            if grad_lse is not None:
                outputs.append(lse)
                grads.append(grad_lse[where].to(lse.dtype))
            if "partial" in problem.features:
                whole = Result(out_BHSD[where].to(out.dtype), result.lse[where].to(lse.dtype))
                outputs, grads = [out, lse], partial_gradients(Result(out, lse), whole, grads)
            sums.add(block, leaf_gradients(outputs, grads, leaves))
        return sums.finish()

    def double_backward(
        self,
        call: Call,
        tensors: Tensors,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        grad_gradients: Sequence[Tensor | None],
    ) -> tuple[Gradients, Tensor, Tensor | None]:
        """The derivative of `backward` along grad_gradients: for the inputs, for grad_out and for grad_lse."""
        problem = call.problem
        precision = lse_dtype(problem.dtype)
        tensors = call.dense_tensors(tensors, precision)
        sums = Accumulators(call, tensors)
        outer = Tensors._make(
            g if g is not None else None if t is None else torch.zeros_like(t)
            for g, t in zip(grad_gradients, tensors, strict=True)
        )
        grad_out_BHSD = layout.heads_first(grad_out, problem.layout)
        for_grad_out = torch.zeros_like(grad_out, dtype=precision)
        for_grad_lse = None if grad_lse is None else torch.zeros_like(grad_lse)
        outer_q, *outer_kv = outer.heads_first(problem.layout)
        for block in _blocks(call, tensors, [grad_out_BHSD, outer_q], outer_kv):
            where = (block.batch, block.heads, block.rows)
            with recording():
                leaves = make_leaves(_slices(block, call, tensors), call.needs)
                out, lse = attend(block, call, tensors, leaves)
                grads = [grad_out_BHSD[where].to(precision).requires_grad_()]
                outputs = [out]
                if grad_lse is not None:
                    outputs.append(lse)
                    grads.append(grad_lse[where].detach().clone().requires_grad_())
                inner = leaf_gradients(outputs, grads, leaves, create_graph=True)
            pairs = [
                (g, o)
                for g, o in zip(inner, _slices(block, call, outer), strict=True)
                if g is not None and g.requires_grad and o is not None
            ]
            gradients = leaf_gradients([g for g, _ in pairs], [o for _, o in pairs], [*leaves, *grads])
            sums.add(block, gradients[: len(leaves)])
            layout.heads_first(for_grad_out, problem.layout)[where] = _or_zero(gradients[len(leaves)])
            if for_grad_lse is not None:
                for_grad_lse[where] = _or_zero(gradients[len(leaves) + 1])
        return sums.finish(), for_grad_out.to(grad_out.dtype), for_grad_lse


def _or_zero(tensor: Tensor | None) -> Tensor | float:
    return 0.0 if tensor is None else tensor


BACKEND = Reference()
