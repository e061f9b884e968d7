"""The bytes, work and memory of each strategy and placement, counted from the row ranges of the mask without a run.

Bytes, exchanges and pairs are exactly those that `Traffic` counts in a run. Memory follows the moments of a run
(`memory`); the tensors alive in simulated ranks were within 12 % of it. Time is an estimate from two numbers of the
machine, which only orders the options: transfers that a ring hides behind computation cost nothing until they take
longer than the computation.

Legend: W ranks, [ring, heads] the mesh, S tokens, H query heads, N key heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from undivided.arguments.checks import INT64_MAX, checked_choice
from undivided.arguments.signature import checked_call
from undivided.context_parallel._schedule import STRATEGIES, MeshRanks, Strategy
from undivided.context_parallel.plan.arrivals import count_arrivals
from undivided.context_parallel.plan.counts import Counts, PlanSizes, Work
from undivided.context_parallel.plan.memory import PeakMemory
from undivided.context_parallel.sharding import (
    MAX_LENGTH,
    PLACEMENTS,
    Placement,
    PlacementName,
    document_edges,
    head_pairs,
    imbalance,
)
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.request.checks import checked_mask
from undivided.request.flops import training_flops

FLOPS, BANDWIDTH = 4e14, 5e10
"""Defaults per rank: attention on an H100 (about 400 TFLOP/s in bf16), and one network port of 400 Gb/s."""

MAX_GROUP = 8
"""Most ranks of the heads axis of a mesh: the GPUs of one node, whose links are the fastest."""


@dataclass(frozen=True, eq=False)
class Option:
    """The counts of one strategy with one placement; tensors are int64 [W], one number per rank.

    Attributes:
        strategy, placement: as for `ContextParallel`.
        shape: the mesh [ring, heads].
        pairs: allowed pairs that a rank computes, summed over batch elements and heads.
        forward, backward: bytes that a rank sends in a forward and in a backward pass.
        steps: exchanges of a forward pass in which a rank takes part.
        inference: peak bytes of a forward pass alone.
        memory: peak bytes of a forward and a backward pass. The scratch memory of kernels, and the mask with its
            schedule, which all layers share, come on top of both.
        seconds: estimated time of a forward and a backward pass of the slowest rank.
    """

    strategy: Strategy
    placement: PlacementName
    shape: tuple[int, int]
    pairs: Tensor
    forward: Tensor
    backward: Tensor
    steps: Tensor
    inference: Tensor
    memory: Tensor
    seconds: float

    @cached_property
    def balance(self) -> float:
        """The largest over the mean pairs of the ranks; 1 is perfectly even."""
        return imbalance(self.pairs)


@dataclass(frozen=True, eq=False)
class Plan:
    """All options, the recommended one first; ``print`` shows them as a table.

    Attributes:
        options: the options, best first.
        title: the mask and sizes, in one line.

    >>> from undivided import masks
    >>> plan(4096, 8, 64, masks.causal(), world=4).best.pairs.sum().item() == 8 * 4096 * 4097 // 2
    True
    """

    options: tuple[Option, ...]
    title: str

    @property
    def best(self) -> Option:
        """The recommended option."""
        return self.options[0]

    @property
    def reason(self) -> str:
        """Why `best` is recommended, in one sentence."""
        best = self.best
        sends = f"{_amount(int((best.forward + best.backward).max()))} sent by the busiest rank"
        text = f"{best.strategy}, {best.placement}: work even to {best.balance:.3f}, {sends}"
        others = [o for o in self.options[1:] if o.strategy != best.strategy]
        if not others:
            return f"{text}."
        slower = others[0].seconds / best.seconds - 1 if best.seconds else 0.0
        other = f"{others[0].strategy}, {others[0].placement}"
        if slower >= 0.005:
            return f"{text}; {other} would take {slower:.0%} longer."
        memory = int(others[0].memory.max()) / int(best.memory.max())
        return f"{text}; {other} takes as long and needs {memory:.2f} times the memory."

    def __str__(self) -> str:
        rows = [COLUMNS, *(cells(option) for option in self.options)]
        widths = [max(len(row[n]) for row in rows) for n in range(len(COLUMNS))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.title, "", *lines, "", f"Recommended: {self.reason}"])


@checked_call
def plan(
    seq_len: int,
    heads: int,
    head_dim: int,
    mask: Mask | None = None,
    world: int = 8,
    strategy: Strategy | None = None,
    placement: PlacementName | None = None,
    *,
    kv_len: int | None = None,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    flops: float = FLOPS,
    bandwidth: float = BANDWIDTH,
) -> Plan:
    """The `Plan` of a call: what each strategy and placement sends, computes and holds, and which one is recommended.

    Args:
        seq_len: number of queries of the whole sequence.
        heads, head_dim: number and size of the query heads.
        mask: of the whole sequence; None is every pair.
        world: number of ranks.
        strategy, placement: count only this one; None counts all. The heads axis of "ring+all_to_all" is the largest
            number, up to 8, that divides both the number of ranks and the number of key heads.
        kv_len, kv_heads, value_dim: number of keys and of key heads, and size of the value heads; None if they are
            those of the queries.
        batch: number of sequences.
        dtype: of q, k and v.
        flops, bandwidth: FLOP/s that attention reaches on a rank, and bytes/s that a rank sends. They only affect the
            estimated time.

    Returns:
        A `Plan`: ``.options`` with exact counts for every rank, ``.best``, ``.reason``, and a table as text.

    Raises:
        InputError: a size or a rate is not a positive number, the mask does not fit the sizes, or the strategy has no
            mesh for these sizes.

    >>> from undivided import masks
    >>> ring = plan(4096, 8, 64, masks.window(255, 0), world=4, strategy="ring", placement="contiguous")
    >>> ring.best.forward.tolist()  # 255 keys of 8 heads of 2 x 64 bfloat16; the last sends nothing
    [522240, 522240, 522240, 0]
    >>> ring.best.pairs.tolist()
    [1836032, 2097152, 2097152, 2097152]
    """
    kv_heads, value_dim = heads if kv_heads is None else kv_heads, head_dim if value_dim is None else value_dim
    sizes = PlanSizes(batch, heads, kv_heads, head_dim, value_dim, dtype)
    keys = seq_len if kv_len is None else kv_len
    _check(seq_len, keys, world, sizes, strategy, placement)
    for rate_name, rate in (("flops", flops), ("bandwidth", bandwidth)):
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
            raise InputError(rate_name, "be a positive number", repr(rate))
    mask = checked_mask(mask)
    mask.check(batch, heads, seq_len, keys, packed=False, device=torch.device("cpu"))
    form = mask.normal_form(batch, heads, seq_len, keys, "cpu")
    strategies = STRATEGIES if strategy is None else (strategy,)
    shapes = {name: mesh_shape(name, world, kv_heads) for name in strategies}
    per_head, options, packed = head_pairs(form), [], len(document_edges(mask, "kv", keys)) > 2
    for name in PLACEMENTS if placement is None else (placement,):
        owners = Placement.of(name, world, seq_len, kv_len, mask, form)
        counted: dict[tuple[int, int], tuple[Work, Tensor]] = {}
        for strategy_name, shape in shapes.items():
            if shape is None:
                continue
            if shape not in counted:
                ranks = MeshRanks(form, owners, shape, sizes.heads, sizes.kv_heads)
                counted[shape] = Work(ranks, per_head), count_arrivals(form, owners, ranks)
            counts = Counts(strategy_name, *counted[shape], sizes)
            memory = PeakMemory(counts, packed and name != "contiguous")
            sent = counts.forward, counts.backward, counts.steps
            peaks, seconds = (memory.forward(), memory.backward()), _seconds(counts, flops, bandwidth)
            options.append(Option(strategy_name, name, shape, counts.work.pairs, *sent, *peaks, seconds))
    if not options:
        raise InputError("strategy", f"have a mesh for {world} ranks and {sizes.kv_heads} key heads", repr(strategy))
    options.sort(key=_sort_key)
    lengths = f"{seq_len:,}" if keys == seq_len else f"{seq_len:,} x {keys:,}"
    return Plan(
        tuple(options),
        f"{mask!r}, {lengths} tokens, {heads} heads ({sizes.kv_heads} of keys) of {head_dim}, {world} ranks",
    )


def _check(q_len: int, kv_len: int, world: int, sizes: PlanSizes, strategy: object, placement: object) -> None:
    """Raise InputError for a size, dtype, strategy or placement that is wrong."""
    named = {
        "seq_len": q_len,
        "kv_len": kv_len,
        "world": world,
        "batch": sizes.batch,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "head_dim": sizes.qk_dim,
        "value_dim": sizes.v_dim,
    }
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(name, "be a positive number", repr(value))
        if value > MAX_LENGTH:
            raise InputError(name, f"be at most {MAX_LENGTH}", value)
    pairs, values = q_len * kv_len, (q_len + kv_len) * world * (sizes.qk_dim + sizes.v_dim + 1) * 8
    if sizes.batch * sizes.heads * max(pairs, values) > INT64_MAX:
        raise InputError("seq_len", "leave the counts of pairs and bytes within 64 bits", q_len)
    if sizes.heads % sizes.kv_heads:
        raise InputError("kv_heads", f"divide heads ({sizes.heads})", sizes.kv_heads)
    if not isinstance(sizes.dtype, torch.dtype):
        raise InputError("dtype", "be a torch.dtype", repr(sizes.dtype))
    if strategy is not None:
        checked_choice("strategy", strategy, STRATEGIES)
    if placement is not None:
        checked_choice("placement", placement, PLACEMENTS)


def mesh_shape(strategy: Strategy, world: int, kv_heads: int) -> tuple[int, int] | None:
    """The mesh [ring, heads]; None if a mesh of two axes is impossible."""
    if strategy == "ring+all_to_all":
        limit = min(MAX_GROUP, kv_heads, world - 1)
        group = max((n for n in range(2, limit + 1) if world % n == 0 and kv_heads % n == 0), default=1)
        return (world // group, group) if group > 1 else None
    return (1, world) if strategy == "all_to_all" else (world, 1)


def _seconds(counts: Counts, flops: float, bandwidth: float) -> float:
    """The estimated time of the slowest rank, forward and backward.

    Rounds are hidden behind computation, except for the first group of heads of an all-gather; an all-to-all is not.
    """
    work = counts.work.pairs.to(torch.float64) * training_flops(1, counts.sizes.qk_dim, counts.sizes.v_dim) / flops
    hidden = 3 * counts.round_bytes / bandwidth
    exposed = ((counts.forward + counts.backward) / bandwidth - hidden).clamp(min=0)
    if counts.strategy == "all_gather":
        exposed, hidden = exposed + hidden / 4, hidden * 3 / 4
    return float((exposed + torch.maximum(work, hidden)).max())


def _amount(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{_short(count / size)} {unit}"
    return f"{count} B"


def _short(number: float) -> str:
    """The number with three digits."""
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def _sort_key(option: Option) -> tuple[float, int, int]:
    """The fastest first; if times agree to two digits, the option that sends least, then the one that holds least."""
    return (float(f"{option.seconds:.2g}"), int((option.forward + option.backward).sum()), int(option.memory.max()))


COLUMNS = ("strategy", "placement", "mesh", "balance", "steps", "sent", "max", "memory", "time")
"""The columns of a plan; the table is at most 80 characters wide."""

LEGEND = "steps: exchanges of the busiest rank, forward. sent, max: mean and largest bytes per rank, both passes."


def cells(option: Option) -> tuple[str, ...]:
    """An option as text, one cell for each of `COLUMNS`."""
    sent = (option.forward + option.backward).to(torch.float64)
    return (
        option.strategy,
        option.placement,
        "x".join(map(str, option.shape)),
        f"{option.balance:.3f}",
        str(int(option.steps.max())),
        _amount(round(float(sent.mean()))),
        _amount(int(sent.max())),
        _amount(int(option.memory.max())),
        _duration(option.seconds),
    )


def _duration(seconds: float) -> str:
    return f"{_short(seconds)} s" if seconds >= 1 else f"{_short(seconds * 1e3)} ms"
