"""``VirtualSequences``: a call over chosen key blocks as a call of one sequence per query block.

Axes: see `rows`; n entries of a row of the block table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.arguments.tensors import is_traced, versions
from undivided.backends.shared.chosen.pools import PoolViews, find_pools, page_size, token_major, with_padding
from undivided.backends.shared.chosen.rows import BlockRows
from undivided.masks import Mask
from undivided.masks.normal_form import BlockPairs, NormalForm, Ranges
from undivided.masks.normal_form.bounds import tidy
from undivided.masks.normal_form.positions import Geometry
from undivided.request.call import Call, CheckedMask
from undivided.request.problem import Problem
from undivided.request.request import Tensors

GATHERED_BYTES = 1 << 26
"""Keys, values and their gradients that the backward copies at a time: 64 MiB."""

MAX_KEYS_OF_A_TILE = 256
"""Keys that a kernel on a GPU reads at a time."""


@dataclass(frozen=True, eq=False)
class GatheredSequences:
    """Some virtual sequences with copies of their keys and values.

    Args:
        span: which of the V.
        form: their ranges.
        k, v: copies of the chosen keys and values, ``[v, 1, n * kv_block, D]``.
        sequence, head: sequence and key head of each, int64 ``[v]``.
        table: blocks of each, int64 ``[v, n]``.
    """

    span: slice
    form: NormalForm
    k: Tensor
    v: Tensor
    sequence: Tensor
    table: Tensor
    head: Tensor


class VirtualProblem(NamedTuple):
    """The problem of some virtual sequences, and their mask with what kernels keep with it.

    Args:
        span: which of the V.
        problem, checked: of the call.
        strides: of q, k and v, and what is kept with them; None if the kernel reads them itself.
    """

    span: slice
    problem: Problem
    checked: CheckedMask
    strides: layout.Strides | None


class ChosenPages(NamedTuple):
    """The chosen blocks as pages, for one block table and operands of the same sizes and strides.

    Args:
        operands: sizes and strides of k, v and their scales.
        pages, version: the caller's block table and its `versions`; None without one.
        size: tokens of a page.
        table: the block table of the virtual sequences.
        views: how the operands are seen as pages.
        problems: problems of the virtual sequences, by what they depend on besides.
    """

    operands: object
    pages: Tensor | None
    version: object
    size: int
    table: Tensor
    views: PoolViews
    problems: dict[Hashable, list[VirtualProblem]]


@dataclass(eq=False)
class ChosenSequences:
    """The chosen blocks of every virtual sequence: what follows from the mask and the sizes of a call.

    Args:
        pairs: the mask.
        rows: the query rows as rows of query blocks.
        ranges: the ranges of the mask's normal form, int ``[B|1, Sq, 2 * C]``.
    """

    pairs: BlockPairs
    rows: BlockRows
    ranges: Tensor
    pages: ChosenPages | None = None
    """Those of the last call."""

    @staticmethod
    def of_call(
        call: Call, tensors: Tensors, pairs: BlockPairs, joins_heads: bool, reads_values: bool
    ) -> ChosenSequences:
        """The chosen blocks of a call, kept with its checked mask; not if a CUDA graph is captured, whose memory holds
        nothing before a replay."""
        form, checked = call.normal_form(tensors.q), call.checked_mask
        assert checked is not None
        key, keeps = ("blocks", joins_heads, reads_values), reads_values or not is_traced()
        chosen: ChosenSequences | None = checked.derived.get(key) if keeps else None
        if chosen is not None:
            return chosen
        chosen = ChosenSequences(pairs, BlockRows.of_call(pairs, call.problem, joins_heads, reads_values), form.ranges)
        if keeps:
            checked.derived[key] = chosen
        return chosen

    @cached_property
    def table(self) -> Tensor:
        """The chosen blocks of each virtual sequence in ascending order, int64 ``[N, U, A, n]``; no block: `limit`."""
        table = self.pairs.table.expand(self.rows.sequences, -1, -1, -1)[:, :, : self.rows.blocks]
        used = table.shape[3]
        if self.rows.reads_values:
            used = max(int((table < self.pairs.limit).sum(-1).max()), 1)
        units = self.rows.units // table.shape[1]
        return table[..., :used].repeat_interleave(units, 1).contiguous()

    @property
    def has_starts(self) -> bool:
        """Whether the keys of a sequence may begin after the first."""
        start = self.pairs.geometry.kv_start
        return isinstance(start, Tensor) or start != 0

    @cached_property
    def key_start(self) -> Tensor:
        """Raw index of the first key of each sequence, int64 ``[N]``."""
        start = self.pairs.geometry.kv_start
        if isinstance(start, Tensor):
            return start
        return torch.full((self.rows.sequences,), start, dtype=torch.int64, device=self.pairs.geometry.device)

    @cached_property
    def form(self) -> NormalForm:
        """The ranges of each row among the chosen keys of its virtual sequence."""
        size, table = self.pairs.kv_block, self.table
        raw = self.rows.take(self.ranges).long()
        if self.rows.real is not None:
            raw = raw * self.rows.real[..., None]
        columns = raw.shape[-1]
        bounds = (raw - self.key_start[:, None, None]).clamp(min=0) if self.has_starts else raw
        bounds = bounds.view(self.rows.sequences, 1, self.rows.blocks, self.rows.size * columns)
        bounds = bounds.expand(-1, self.rows.units, -1, -1).contiguous()
        block = bounds // size
        place = torch.searchsorted(table, block)
        inside = table.gather(3, place.clamp(max=table.shape[3] - 1)) == block
        bounds = place * size + torch.where(inside & (place < table.shape[3]), bounds - block * size, 0)
        virtual, keys = math.prod(bounds.shape[:3]), table.shape[3] * size
        return self.form_of(tidy(bounds.view(virtual, self.rows.size, columns).clamp_(max=keys)))

    def form_of(self, ranges: Tensor) -> NormalForm:
        """The form of virtual sequences with these ranges."""
        virtual, size, keys = len(ranges), self.rows.size, self.table.shape[3] * self.pairs.kv_block
        geometry = Geometry(virtual, size, keys, ranges.device, 0, size, 0, keys)
        return NormalForm(ranges, keys, virtual, self.rows.group, (), geometry)


@dataclass(frozen=True, eq=False)
class VirtualSequences:
    """A call as a call of V sequences over their chosen blocks."""

    call: Call
    tensors: Tensors
    chosen: ChosenSequences

    @staticmethod
    def of_call(
        call: Call, tensors: Tensors, pairs: BlockPairs, joins_heads: bool = False, reads_values: bool = True
    ) -> VirtualSequences:
        """The virtual sequences of a call for which `block_pairs` is not None. joins_heads: see `BlockRows.of_call`;
        `gathered` requires one key head per sequence, and that values may be read."""
        return VirtualSequences(call, tensors, ChosenSequences.of_call(call, tensors, pairs, joins_heads, reads_values))

    @property
    def rows(self) -> BlockRows:
        """The query rows as rows of query blocks."""
        return self.chosen.rows

    def paged_call(self) -> tuple[Call, Tensors]:
        """The call whose pages are the chosen blocks, and its tensors; keys are read in place if strides allow."""
        operands = token_major(self.tensors, self.call)
        pages = self._cached_pages(operands)
        if pages is None:
            size = page_size(self.chosen.pairs.kv_block, self.call, operands[0])
            shape, starts = (size, self.rows.key_heads), self._page_starts(operands[0], size)
            found = find_pools(operands, shape, starts)
            if found is None:
                operands = [with_padding(x, size) for x in operands]
                found = find_pools(operands, shape, starts)
            assert found is not None
            pages = self._keep_pages(operands, size, *found)
        k, v, *scales = pages.views.apply(operands)
        k_scale, v_scale = scales or (None, None)
        call = self.virtual_call(self.chosen.form, pages.size, pages=pages.table, k_scale=k_scale, v_scale=v_scale)
        return call, Tensors(self.heads(self.tensors.q), k, v, None, None, None)

    def paged_calls(self, at_once: int) -> list[tuple[Call, Tensors]] | None:
        """`paged_call` in calls of at most so many virtual sequences, with the masks of earlier calls; None if strides
        do not allow that keys are read in place. No value is read."""
        operands = token_major(self.tensors, self.call)
        if (pages := self._cached_pages(operands)) is None:
            size = page_size(self.chosen.pairs.kv_block, self.call, operands[0])
            starts, largest = self._page_starts(operands[0], size), self._largest_starts(operands[0], size)
            if (found := find_pools(operands, (size, self.rows.key_heads), starts, largest)) is None:
                return None
            pages = self._keep_pages(operands, size, *found)
        q, (k, v, *scales) = self.heads(self.tensors.q), pages.views.apply(operands)
        key = (self.call.problem, at_once, q.stride())
        if (problems := pages.problems.get(key)) is None:
            spans = [slice(start, start + at_once) for start in range(0, len(q), at_once)]
            problems = pages.problems[key] = [self._virtual_problem(span, pages.size, q, k, v) for span in spans]
        k_scale, v_scale = scales or (None, None)
        calls = []
        for span, problem, checked, strides in problems:
            call = self.call.with_problem(
                problem,
                mask=checked.mask,
                checked_mask=checked,
                strides=strides,
                pages=pages.table if len(problems) == 1 else pages.table[span],
                k_scale=k_scale,
                v_scale=v_scale,
            )
            calls.append((call, Tensors(q[span] if len(problems) > 1 else q, k, v, None, None, None)))
        return calls

    def _virtual_problem(self, span: slice, page: int, q: Tensor, k: Tensor, v: Tensor) -> VirtualProblem:
        """What is kept of the call of some virtual sequences."""
        form = self.chosen.form
        if len(q) > span.stop - span.start:
            form = self.chosen.form_of(form.ranges[span])
        call = self.virtual_call(form, page)
        assert call.checked_mask is not None
        strides = layout.Strides(q, k, v, "bhsd", paged=True)
        return VirtualProblem(span, call.problem, call.checked_mask, strides)

    def _cached_pages(self, operands: list[Tensor]) -> ChosenPages | None:
        """What an earlier call found for the same block table and operands like these."""
        cached, pages = self.chosen.pages, self.call.pages
        if cached is None or cached.pages is not pages or cached.operands != _sizes_and_strides(operands):
            return None
        if pages is not None and cached.version != versions((pages,)):
            return None
        return cached if cached.views.fit(operands) else None

    def _keep_pages(self, operands: list[Tensor], size: int, views: PoolViews, index: Tensor) -> ChosenPages:
        """What `find_pools` found, for this call and the next one."""
        table = index.reshape(-1, index.shape[-1]).to(torch.int32).contiguous()
        if not self.rows.reads_values:
            table = _with_slack(table)
        pages = self.call.pages
        version = None if pages is None else versions((pages,))
        result = ChosenPages(_sizes_and_strides(operands), pages, version, size, table, views, {})
        if pages is None or version is not None:
            self.chosen.pages = result
        return result

    def _page_starts(self, k: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Batch, token and first head of each page's start among the caller's keys, ``[N, U, A, n]``; head None: 0."""
        first, token = self._places(k, size)
        units = self.rows.units
        if units == 1:
            return first, token, None
        head = torch.arange(units, device=k.device) * self.call.problem.kv_heads // units
        return first, token, head[:, None, None]

    def _largest_starts(self, k: Tensor, size: int) -> tuple[int, int, int]:
        """Upper limits of `_page_starts`."""
        problem, units = self.call.problem, self.rows.units
        head = (units - 1) * problem.kv_heads // units
        if self.call.pages is not None:
            return len(k) - 1, k.shape[1] - size, head
        return (0 if self.rows.packed else self.rows.sequences - 1), problem.kv_len - 1, head

    def gathered(self) -> Iterator[GatheredSequences]:
        """The virtual sequences, some at a time, whose copied keys take at most `GATHERED_BYTES`."""
        k, v = token_major(self.tensors, self.call)
        chosen, copies = self.chosen, self.rows.units * self.rows.blocks
        size, columns = chosen.pairs.kv_block, chosen.table.shape[3]
        table, origin = chosen.table.flatten(0, 2), chosen.key_start.repeat_interleave(copies)
        order = torch.arange(len(table))
        sequence = order // copies
        head = order // self.rows.blocks % self.rows.units // (self.rows.units // self.call.problem.kv_heads)
        step = max(GATHERED_BYTES // (columns * size * (k.shape[3] + v.shape[3]) * 8), 1)
        for start in range(0, len(table), step):
            span = slice(start, start + step)
            token = (table[span, :, None] * size + torch.arange(size)).flatten(1) + origin[span, None]
            token = token.clamp(0, self.call.problem.kv_len - 1)
            index = sequence[span, None] * (not self.rows.packed), token, head[span, None]
            ranges = chosen.form.ranges[span]
            form = dataclasses.replace(chosen.form, ranges=ranges, batch=len(ranges), geometry=None)
            yield GatheredSequences(
                span, form, k[index][:, None], v[index][:, None], sequence[span], table[span], head[span]
            )

    def _places(self, k: Tensor, page: int) -> tuple[Tensor, Tensor]:
        """The batch element (or page of the pool) and the row of each virtual page's start, ``[N, U, A, n]``."""
        token = self._tokens(page)
        sequence = torch.arange(1 if self.rows.packed else self.rows.sequences, device=k.device)[:, None, None, None]
        if self.call.pages is None:
            return sequence, token.clamp(0, self.call.problem.kv_len - 1)
        size, places = k.shape[1], self.call.pages.long()
        places = places.reshape(1, -1) if self.rows.packed else places
        place = places[sequence, (token // size).clamp(max=places.shape[1] - 1)]
        return place.clamp(0, len(k) - 1), token % size

    def _tokens(self, page: int) -> Tensor:
        """Raw index of the first key of each virtual page, ``[N, U, A, n]``; any for pages that no row sees."""
        chosen, pairs = self.chosen, self.chosen.pairs
        key = torch.where(chosen.table < pairs.limit, chosen.table * pairs.kv_block, 0)
        if (pages := pairs.kv_block // page) > 1:
            key = (key[..., None] + torch.arange(pages, device=key.device) * page).flatten(3)
        return key + chosen.key_start[:, None, None, None] if chosen.has_starts else key

    def heads(self, tensor: Tensor) -> Tensor:
        """q, out or its gradient as heads of the virtual sequences, ``[V, G, size, D]``."""
        return self.rows.take_heads(layout.heads_first(tensor, self.call.problem.layout).transpose(1, 2))

    def row_values(self, values: Tensor) -> Tensor:
        """One number per row ``[B, H, Sq]`` as ``[V, G, size]``."""
        return self.rows.take_heads(values.transpose(1, 2)[..., None])[..., 0].contiguous()

    def virtual_call(self, form: NormalForm, page: int | None, **changes: Any) -> Call:
        """The call of the virtual sequences of a form."""
        problem, group, mask = self.call.problem, self.rows.group, Mask(parts=(Ranges(form),))
        features = problem.features - {"gqa", "paged"}
        features |= ({"gqa"} if group > self.rows.key_heads else set()) | ({"paged"} if page else set())
        problem = problem._replace(
            layout="bhsd",
            batch=form.batch,
            heads=group,
            kv_heads=self.rows.key_heads,
            q_len=self.rows.size,
            kv_len=form.kv_len,
            mask=mask.structure,
            features=features,
            documents=None,
            page_size=page,
        )
        checked = CheckedMask(mask, problem)
        checked.keep(form)
        return self.call.with_problem(problem, mask=mask, checked_mask=checked, **changes)


def _with_slack(table: Tensor) -> Tensor:
    """The table in memory that goes on for a tile: kernels read entries of a whole tile, and use those of its keys."""
    memory = table.new_zeros(table.numel() + MAX_KEYS_OF_A_TILE)
    memory[: table.numel()] = table.flatten()
    return memory[: table.numel()].view(table.shape)


def _sizes_and_strides(operands: list[Tensor]) -> object:
    return [(x.shape, x.stride()) for x in operands]
