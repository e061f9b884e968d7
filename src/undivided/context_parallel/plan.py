"""What each strategy and placement would send, compute and hold, counted from the mask's row ranges without running anything.

Bytes and pairs are those that `Traffic` counts in a run, exactly. Memory is the tensors that a layer's attention holds at its
fullest, kernels' own scratch left out. Time is an estimate from two numbers of the machine, to rank strategies by: what a
ring hides behind work costs nothing until it is more than the work.

Legend: W ranks, R x A the mesh [ring, heads], S tokens, H query heads, N key heads, D head size, e bytes of an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from undivided import masks
from undivided._result import lse_dtype
from undivided.context_parallel._index import count
from undivided.context_parallel._pieces import Share, union_of_rows
from undivided.context_parallel._schedule import STRATEGIES, Ranks, Strategy
from undivided.context_parallel.all_gather import head_groups
from undivided.context_parallel.sharding import PLACEMENTS, Placement, PlacementName, head_pairs, imbalance
from undivided.errors import InputError
from undivided.masks import Mask, NormalForm

FLOPS, BANDWIDTH = 4e14, 5e10
"""Of a rank, by default: attention on an H100 (about 400 TFLOP/s in bf16), and one 400 Gb/s port."""

LARGEST_LINE = 8
"""Ranks that trade heads on the mesh, at most: those of a node, whose links are the fastest."""


@dataclass(frozen=True, eq=False)
class Option:
    """One strategy with one placement, by rank: int64 [W].

    shape: the mesh [ring, heads]. pairs: allowed pairs that it computes, over batch elements and heads.
    forward, backward: bytes that it sends in each. memory: bytes held at the fullest moment, forward and backward.
    seconds: estimated for a forward and a backward pass of the slowest rank.
    """

    strategy: Strategy
    placement: PlacementName
    shape: tuple[int, int]
    pairs: Tensor
    forward: Tensor
    backward: Tensor
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
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
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
        strategy, placement: only this one; all if None. "ring+all_to_all" takes the largest number of ranks for its heads
            that divides both the ranks and the key heads, up to 8.
        kv_len, kv_heads, value_dim: of the keys, where they differ from the queries'.
        batch: sequences side by side.
        dtype: of q, k and v.
        flops, bandwidth: FLOP/s that attention reaches and bytes/s that it sends at, of a rank: only the estimate of time.

    Returns:
        A `Plan`: ``.options`` with exact counts for every rank, ``.best``, ``.reason``, and a table as text.

    Raises:
        InputError: a size is not a positive number, or the mask does not fit the sizes.

    >>> from undivided import masks
    >>> found = plan(4096, 8, 64, masks.window(255, 0), world=4, strategy="ring", placement="contiguous")
    >>> found.best.forward.tolist()                   # 255 keys of 8 heads of 2 x 64 bfloat16, and nothing from the last rank
    [522240, 522240, 522240, 0]
    >>> found.best.pairs.tolist()
    [1836032, 2097152, 2097152, 2097152]
    """
    sizes = _Sizes(
        batch, heads, heads if kv_heads is None else kv_heads, head_dim, value_dim or head_dim, dtype
    )
    keys = seq_len if kv_len is None else kv_len
    _check(seq_len, keys, world, sizes, strategy, placement)
    mask = masks.FULL if mask is None else mask
    mask.check(batch, heads, seq_len, keys, packed=False, device=torch.device("cpu"))
    form = mask.normal_form(batch, heads, seq_len, keys, "cpu")
    found = []
    for name in PLACEMENTS if placement is None else (placement,):
        placed = Placement.of(name, world, seq_len, kv_len, mask, form)
        counts: dict[tuple[int, int], list[Tensor]] = {}
        for way in STRATEGIES if strategy is None else (strategy,):
            shape = _shape(way, world, sizes)
            if shape is not None:
                ranks = Ranks(form, placed, shape, sizes.heads, sizes.kv_heads)
                if shape not in counts:
                    counts[shape] = _arriving(form, placed, ranks)
                found.append(
                    _Counted(form, ranks, counts[shape], sizes, way).option(way, name, flops, bandwidth)
                )
    if not found:
        raise InputError(
            "strategy", f"have a mesh for {world} ranks and {sizes.kv_heads} key heads", repr(strategy)
        )
    found.sort(key=_rank)
    lengths = f"{seq_len:,}" if keys == seq_len else f"{seq_len:,} x {keys:,}"
    return Plan(
        tuple(found),
        f"{mask!r}, {lengths} tokens, {heads} heads ({sizes.kv_heads} of keys) of {head_dim}, {world} ranks",
    )


@dataclass(frozen=True)
class _Sizes:
    batch: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    dtype: torch.dtype

    @property
    def entry(self) -> int:
        """Bytes of an entry of q, k, v and the output."""
        return self.batch * self.dtype.itemsize

    @property
    def lse(self) -> int:
        """Bytes of the log-sum-exp of one row and head."""
        return self.batch * lse_dtype(self.dtype).itemsize


def _check(q_len: int, kv_len: int, world: int, sizes: _Sizes, strategy: object, placement: object) -> None:
    named = {"seq_len": q_len, "kv_len": kv_len, "world": world, "batch": sizes.batch, "heads": sizes.heads,
             "kv_heads": sizes.kv_heads, "head_dim": sizes.qk_dim, "value_dim": sizes.v_dim}  # fmt: skip
    for name, value in named.items():
        if not isinstance(value, int) or value < 1:
            raise InputError(name, "be a positive number", repr(value))
    if sizes.heads % sizes.kv_heads:
        raise InputError("kv_heads", f"divide heads ({sizes.heads})", sizes.kv_heads)
    if strategy is not None and strategy not in STRATEGIES:
        raise InputError("strategy", f"be one of {', '.join(map(repr, STRATEGIES))}, or None", repr(strategy))
    if placement is not None and placement not in PLACEMENTS:
        raise InputError(
            "placement", f"be one of {', '.join(map(repr, PLACEMENTS))}, or None", repr(placement)
        )


def _shape(strategy: Strategy, world: int, sizes: _Sizes) -> tuple[int, int] | None:
    """The mesh [ring, heads]; None where a mesh of two axes would have only one."""
    if strategy == "ring+all_to_all":
        most = min(LARGEST_LINE, sizes.kv_heads, world - 1)
        line = max((n for n in range(2, most + 1) if world % n == 0 and sizes.kv_heads % n == 0), default=1)
        return (world // line, line) if line > 1 else None
    return (1, world) if strategy == "all_to_all" else (world, 1)


def _arriving(form: NormalForm, placement: Placement, ranks: Ranks) -> list[Tensor]:
    """For every rank, how many keys it asks of every place on the ring, int64 [R]; none of its own."""
    asked_of = _Counter(form, placement, ranks)
    found = []
    for place in range(ranks.ring):
        of_line: Tensor | None = None
        for member in range(ranks.members):
            shares = ranks.shares(place, member) if ranks.members > 1 else ()
            if ranks.ring == 1:
                asked = torch.zeros(1, dtype=torch.int64)
            elif not shares or any(share.rows.numel() == ranks.lines[place].numel() for share in shares):
                of_line = asked_of(ranks.lines[place]) if of_line is None else of_line
                asked = of_line.clone()
            else:
                asked = asked_of(union_of_rows(shares))
            asked[place] = 0
            found.append(asked)
    return found


class _Counter:
    """How many keys of every place on the ring some rows need."""

    def __init__(self, form: NormalForm, placement: Placement, ranks: Ranks) -> None:
        self._form, self._places = form, ranks.ring
        self._owner = placement.kv_owner.div(ranks.members, rounding_mode="floor")
        step = (
            form.kv_len + 1
        )  # keys of one place after those of another, each in a block of numbers of its own
        self._starts = torch.arange(ranks.ring)[:, None] * step
        self._keys = torch.cat([line + n * step for n, line in enumerate(ranks.key_lines)])

    def __call__(self, rows: Tensor) -> Tensor:
        """int64 [R]."""
        form = self._form
        if not form.exact:
            needed = form.shard(rows, torch.arange(form.kv_len)).keys_allowed
            return torch.bincount(self._owner[needed], minlength=self._places)
        starts, stops = _union(form.ranges.index_select(1, rows).reshape(-1, 2).to(torch.int64))
        if starts.numel() * self._places > form.kv_len:
            edges = torch.zeros(form.kv_len + 1, dtype=torch.int64)
            edges.index_add_(0, starts, torch.ones_like(starts)).index_add_(0, stops, -torch.ones_like(stops))
            return torch.bincount(self._owner[edges.cumsum(0)[:-1] > 0], minlength=self._places)
        ends = [torch.searchsorted(self._keys, self._starts + end) for end in (starts, stops)]
        return (ends[1] - ends[0]).sum(1)


def _union(ranges: Tensor) -> tuple[Tensor, Tensor]:
    """Disjoint ranges of the same keys, ascending: (starts, stops)."""
    ranges = ranges[ranges[:, 1] > ranges[:, 0]]
    if not len(ranges):
        return ranges[:, 0], ranges[:, 1]
    ranges = ranges[ranges[:, 0].argsort()]
    reach = ranges[:, 1].cummax(0).values
    first = torch.cat([torch.ones(1, dtype=torch.bool), ranges[1:, 0] > reach[:-1]])
    last = torch.cat([first[1:], torch.ones(1, dtype=torch.bool)])
    return ranges[first, 0], reach[last]


class _Counted:
    """The counts of one strategy with one placement, by rank."""

    def __init__(
        self, form: NormalForm, ranks: Ranks, arriving: Sequence[Tensor], sizes: _Sizes, strategy: Strategy
    ) -> None:
        world = ranks.ring * ranks.members
        self.ranks, self.sizes, self.arriving, self.strategy = ranks, sizes, arriving, strategy
        self.forward, self.backward, self.traded = (torch.zeros(world, dtype=torch.int64) for _ in range(3))
        self.pairs = torch.zeros(world, dtype=torch.int64)
        per_head = head_pairs(form)
        for place in range(ranks.ring):
            for member in range(ranks.members):
                self._ring(place, member)
            shares = [ranks.shares(place, member) for member in range(ranks.members)]
            if ranks.members > 1:
                self._heads(place, shares)
            for rank, of_rank in zip(ranks.line(place), shares, strict=True):
                self.pairs[rank] = _pairs_of(of_rank, per_head)

    def _key_bytes(self, member: int) -> int:
        """Of one key and its value, all heads of a member."""
        heads = count(self.ranks.span(member))
        return heads * (self.sizes.qk_dim + self.sizes.v_dim) * self.sizes.entry

    def _ring(self, place: int, member: int) -> None:
        """Keys come, in the backward again, and their gradients go back."""
        here = place * self.ranks.members + member
        arriving = self.arriving[here] * self._key_bytes(member)
        senders = torch.arange(self.ranks.ring) * self.ranks.members + member
        self.forward[senders] += arriving
        self.backward[senders] += arriving
        self.backward[here] += arriving.sum()

    def _heads(self, place: int, members: Sequence[Sequence[Share]]) -> None:
        """Rows of all members come to one, and the results go back; gradients the other way round."""
        line, sizes = self.ranks.line(place), self.sizes
        shares = [(member, share) for member, of in enumerate(members) for share in of]
        if not shares:
            return
        owner = torch.tensor([member for member, _ in shares])
        heads = torch.tensor([count(share.heads) for _, share in shares])
        # a share is a stretch of the line's rows, so its ends say how many of a rank's rows are in it
        ends = torch.stack([torch.stack([share.rows[0], share.rows[-1] + 1]) for _, share in shares])
        of_key = torch.tensor([self._key_bytes(member) for member in range(len(line))])
        here = slice(line.start, line.stop)
        for number, peer in enumerate(line):
            common = torch.searchsorted(self.ranks.rows[peer], ends).diff(dim=1)[:, 0] * heads
            entries = torch.zeros(len(line), dtype=torch.int64).index_add_(0, owner, common)
            there = entries * sizes.qk_dim * sizes.entry + of_key * self.ranks.keys[peer].numel()
            back = entries * sizes.v_dim * sizes.entry
            self.traded[here] += there
            entries[number] = there[number] = back[number] = 0  # to itself
            self.forward[peer] += there.sum()
            self.forward[here] += back + entries * sizes.lse
            self.backward[peer] += back.sum()
            self.backward[here] += there

    def _memory(self) -> Tensor:
        """q, k, v, output and lse; what was traded; keys that are being used and on their way; sums in fp32."""
        sizes, found = self.sizes, []
        for rank, (rows, keys) in enumerate(zip(self.ranks.rows, self.ranks.keys, strict=True)):
            of_row = sizes.heads * ((sizes.qk_dim + sizes.v_dim) * sizes.entry + sizes.lse)
            of_key = sizes.kv_heads * (sizes.qk_dim + sizes.v_dim) * sizes.entry
            place, member = divmod(rank, self.ranks.members)
            used = self._key_buffers(rank, self._key_bytes(member), place)
            sums = rows.numel() * sizes.heads * (sizes.qk_dim + sizes.v_dim + 1) * sizes.lse
            gradients = sizes.lse * (of_key // sizes.entry) * keys.numel() + used * sizes.lse // sizes.entry
            found.append(
                rows.numel() * of_row
                + keys.numel() * of_key
                + int(self.traded[rank])
                + used
                + sums
                + gradients
            )
        return torch.tensor(found)

    def _key_buffers(self, rank: int, of_key: int, place: int) -> int:
        """Keys of other ranks here at one time: of two rounds, or of two groups of heads and their copy in order."""
        arriving = self.arriving[rank]
        if self.strategy == "all_gather":
            groups = len(head_groups(self.ranks.span(0)))
            own = self.ranks.keys[rank].numel()
            return (2 * int(arriving.sum()) + int(arriving.sum()) + own) * of_key // groups
        by_round = arriving.roll(-place).flip(0)  # in round t from place - t
        return int((by_round + by_round.roll(-1)).max()) * of_key if len(by_round) > 1 else 0

    def option(self, strategy: Strategy, placement: PlacementName, flops: float, bandwidth: float) -> Option:
        """With the time of the slowest rank: 2 products forward and 5 backward of 2 FLOP a pair and entry."""
        sizes = self.sizes
        of_pair = 2 * (sizes.qk_dim + sizes.v_dim) * 3.5
        work = self.pairs.to(torch.float64) * of_pair / flops
        hidden = torch.zeros_like(work)
        for rank, asked in enumerate(self.arriving):
            hidden[rank] = 3 * int(asked.sum()) * self._key_bytes(rank % self.ranks.members) / bandwidth
        sent = (self.forward + self.backward).to(torch.float64) / bandwidth
        exposed = (sent - hidden).clamp(
            min=0
        )  # trading heads waits; what comes in rounds is hidden behind work
        if strategy == "all_gather":
            exposed, hidden = exposed + hidden / 4, hidden * 3 / 4
        seconds = float((exposed + torch.maximum(work, hidden)).max())
        shape = (self.ranks.ring, self.ranks.members)
        return Option(
            strategy, placement, shape, self.pairs, self.forward, self.backward, self._memory(), seconds
        )


def _pairs_of(shares: Sequence[Share], per_head: Tensor) -> int:
    total = 0
    for share in shares:
        some = per_head if per_head.shape[0] == 1 else per_head[share.heads]
        repeated = count(share.heads) // max(some.shape[0], 1)
        total += int(some.index_select(1, share.rows).sum()) * repeated
    return total


def _amount(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def _rank(option: Option) -> tuple[float, int, int]:
    """The fastest first; of those within the second digit, what sends and holds the least."""
    return (
        float(f"{option.seconds:.2g}"),
        int((option.forward + option.backward).sum()),
        int(option.memory.max()),
    )


HEAD = ("strategy", "placement", "mesh", "balance", "sent/rank", "most", "memory", "time")


def cells(option: Option) -> tuple[str, ...]:
    """An option as text, under `HEAD`."""
    sent = (option.forward + option.backward).to(torch.float64)
    return (
        option.strategy, option.placement, "x".join(map(str, option.shape)), f"{option.balance:.3f}",
        _amount(round(float(sent.mean()))), _amount(int(sent.max())), _amount(int(option.memory.max())),
        _duration(option.seconds),
    )  # fmt: skip


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
