"""What each strategy and placement would send, compute and hold, counted from the mask's row ranges without running
anything.

Bytes, exchanges and pairs are those that `Traffic` counts in a run, exactly. Memory follows a run moment by moment
(`memory`) and is within a tenth or so of what is alive in one. Time is an estimate from two numbers of the machine, to
rank strategies
by: what a ring hides behind work costs nothing until it is more than the work.

Legend: W ranks, R x A the mesh [ring, heads], S tokens, H query heads, N key heads, D head size, e bytes of an entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from undivided import masks
from undivided.context_parallel._schedule import STRATEGIES, Ranks, Strategy
from undivided.context_parallel.plan.arrivals import arriving
from undivided.context_parallel.plan.counts import Counts, Sizes, Work
from undivided.context_parallel.plan.memory import Memory
from undivided.context_parallel.sharding import (
    PLACEMENTS,
    Placement,
    PlacementName,
    document_edges,
    head_pairs,
    imbalance,
)
from undivided.errors import InputError
from undivided.masks import Mask

FLOPS, BANDWIDTH = 4e14, 5e10
"""Of a rank, by default: attention on an H100 (about 400 TFLOP/s in bf16), and one 400 Gb/s port."""

LARGEST_LINE = 8
"""Ranks that trade heads on the mesh, at most: those of a node, whose links are the fastest."""


@dataclass(frozen=True, eq=False)
class Option:
    """One strategy with one placement, by rank: int64 [W].

    shape: the mesh [ring, heads]. pairs: allowed pairs that it computes, over batch elements and heads.
    forward, backward: bytes that it sends in each. steps: exchanges that it takes part in, forward.
    inference, memory: bytes held at the fullest moment of a forward pass alone, and of forward and backward. Kernels'
    own scratch, and the mask with its schedule, which all layers share, come on top.
    seconds: estimated for a forward and a backward pass of the slowest rank.
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
        """Largest over mean pairs."""
        return imbalance(self.pairs)


@dataclass(frozen=True, eq=False)
class Plan:
    """Every option, the recommended one first, and why it is. ``print`` it for the table."""

    options: tuple[Option, ...]
    title: str

    @property
    def best(self) -> Option:
        """The recommended option."""
        return self.options[0]

    @property
    def reason(self) -> str:
        """Why it is recommended, in a sentence."""
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
        return f"{text}; {other} takes as long and holds {memory:.2f} times the memory."

    def __str__(self) -> str:
        rows = [HEAD, *(cells(option) for option in self.options)]
        widths = [max(len(row[n]) for row in rows) for n in range(len(HEAD))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.title, "", *lines, "", f"Recommended: {self.reason}"])


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
    """Count what each strategy and placement sends, computes and holds, and recommend one.

    Args:
        seq_len: query tokens of the whole sequence.
        heads, head_dim: of the queries.
        mask: of the whole; None is every pair.
        world: ranks.
        strategy, placement: only this one; all if None. "ring+all_to_all" takes the largest number of ranks for its
            heads that divides both the ranks and the key heads, up to 8.
        kv_len, kv_heads, value_dim: of the keys, where they differ from the queries'.
        batch: sequences side by side.
        dtype: of q, k and v.
        flops, bandwidth: FLOP/s that attention reaches and bytes/s that it sends at, of a rank: only the estimate of
            time.

    Returns:
        A `Plan`: ``.options`` with exact counts for every rank, ``.best``, ``.reason``, and a table as text.

    Raises:
        InputError: a size is not a positive number, or the mask does not fit the sizes.

    >>> from undivided import masks
    >>> found = plan(4096, 8, 64, masks.window(255, 0), world=4, strategy="ring", placement="contiguous")
    >>> found.best.forward.tolist()  # 255 keys of 8 heads of 2 x 64 bfloat16; the last sends nothing
    [522240, 522240, 522240, 0]
    >>> found.best.pairs.tolist()
    [1836032, 2097152, 2097152, 2097152]
    """
    sizes = Sizes(batch, heads, heads if kv_heads is None else kv_heads, head_dim, value_dim or head_dim, dtype)
    keys = seq_len if kv_len is None else kv_len
    _check(seq_len, keys, world, sizes, strategy, placement)
    mask = masks.FULL if mask is None else mask
    mask.check(batch, heads, seq_len, keys, packed=False, device=torch.device("cpu"))
    form = mask.normal_form(batch, heads, seq_len, keys, "cpu")
    shapes = {way: _shape(way, world, sizes) for way in (STRATEGIES if strategy is None else (strategy,))}
    per_head, found, packed = head_pairs(form), [], len(document_edges(mask, "kv", keys)) > 2
    for name in PLACEMENTS if placement is None else (placement,):
        placed = Placement.of(name, world, seq_len, kv_len, mask, form)
        known: dict[tuple[int, int], tuple[Work, Tensor]] = {}
        for way, shape in shapes.items():
            if shape is None:
                continue
            if shape not in known:
                ranks = Ranks(form, placed, shape, sizes.heads, sizes.kv_heads)
                known[shape] = Work(ranks, per_head), arriving(form, placed, ranks)
            counts = Counts(way, *known[shape], sizes)
            memory = Memory(counts, packed and name != "contiguous")
            found.append(_option(counts, memory, name, flops, bandwidth))
    if not found:
        raise InputError("strategy", f"have a mesh for {world} ranks and {sizes.kv_heads} key heads", repr(strategy))
    found.sort(key=_rank)
    lengths = f"{seq_len:,}" if keys == seq_len else f"{seq_len:,} x {keys:,}"
    return Plan(
        tuple(found),
        f"{mask!r}, {lengths} tokens, {heads} heads ({sizes.kv_heads} of keys) of {head_dim}, {world} ranks",
    )


def _check(q_len: int, kv_len: int, world: int, sizes: Sizes, strategy: object, placement: object) -> None:
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
        if not isinstance(value, int) or value < 1:
            raise InputError(name, "be a positive number", repr(value))
    if sizes.heads % sizes.kv_heads:
        raise InputError("kv_heads", f"divide heads ({sizes.heads})", sizes.kv_heads)
    if strategy is not None and strategy not in STRATEGIES:
        raise InputError("strategy", f"be one of {', '.join(map(repr, STRATEGIES))}, or None", repr(strategy))
    if placement is not None and placement not in PLACEMENTS:
        raise InputError("placement", f"be one of {', '.join(map(repr, PLACEMENTS))}, or None", repr(placement))


def _shape(strategy: Strategy, world: int, sizes: Sizes) -> tuple[int, int] | None:
    """The mesh [ring, heads]; None where a mesh of two axes would have only one."""
    if strategy == "ring+all_to_all":
        most = min(LARGEST_LINE, sizes.kv_heads, world - 1)
        line = max((n for n in range(2, most + 1) if world % n == 0 and sizes.kv_heads % n == 0), default=1)
        return (world // line, line) if line > 1 else None
    return (1, world) if strategy == "all_to_all" else (world, 1)


def _option(counts: Counts, memory: Memory, name: PlacementName, flops: float, bandwidth: float) -> Option:
    """With the time of the slowest rank: 2 products forward and 5 backward of 2 FLOP a pair and entry.

    What comes in rounds is hidden behind work, all but the first group of heads of an all-gather; trading heads waits.
    """
    work = counts.pairs.to(torch.float64) * counts.flops_of_pair / flops
    hidden = 3 * counts.in_rounds / bandwidth
    exposed = ((counts.forward + counts.backward) / bandwidth - hidden).clamp(min=0)
    if counts.strategy == "all_gather":
        exposed, hidden = exposed + hidden / 4, hidden * 3 / 4
    seconds = float((exposed + torch.maximum(work, hidden)).max())
    return Option(
        counts.strategy,
        name,
        counts.shape,
        counts.pairs,
        counts.forward,
        counts.backward,
        counts.steps,
        memory.forward(),
        memory.backward(),
        seconds,
    )


def _amount(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{_short(count / size)} {unit}"
    return f"{count} B"


def _short(number: float) -> str:
    """Three digits."""
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def _rank(option: Option) -> tuple[float, int, int]:
    """The fastest first; of those within the second digit, what sends and holds the least."""
    return (float(f"{option.seconds:.2g}"), int((option.forward + option.backward).sum()), int(option.memory.max()))


HEAD = ("strategy", "placement", "mesh", "balance", "steps", "sent", "most", "memory", "time")
"""The columns of a plan; 80 characters with what is under them."""

LEGEND = "steps: exchanges of the busiest rank, forward. sent: by a rank, mean and most, forward and backward."


def cells(option: Option) -> tuple[str, ...]:
    """An option as text, under `HEAD`."""
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
