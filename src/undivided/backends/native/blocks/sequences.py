"""``VirtualSequences``: a call over chosen key blocks as a call of one sequence per query block.

Axes: see `rows`; n entries of a row of the block table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.backends.native.blocks.pools import find_pools, page_size, token_major, with_padding
from undivided.backends.native.blocks.rows import Rows
from undivided.masks import Mask
from undivided.masks.normal_form import BlockPairs, NormalForm, Ranges
from undivided.masks.normal_form.bounds import tidy
from undivided.masks.normal_form.positions import Geometry
from undivided.request.call import Call, CheckedMask
from undivided.request.request import Tensors

GATHERED_BYTES = 1 << 26
"""Keys, values and their gradients that the backward copies at a time: 64 MiB."""


@dataclass(frozen=True, eq=False)
class VirtualPart:
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


@dataclass(frozen=True, eq=False)
class VirtualSequences:
    """A call as a call of V sequences over their chosen blocks."""

    call: Call
    tensors: Tensors
    pairs: BlockPairs
    rows: Rows

    @staticmethod
    def of_call(call: Call, tensors: Tensors, pairs: BlockPairs, joins_heads: bool = False) -> VirtualSequences:
        """The virtual sequences of a call for which `block_pairs` is not None. joins_heads: see `Rows.of_call`; `parts`
        requires one key head per sequence."""
        return VirtualSequences(call, tensors, pairs, Rows.of_call(pairs, call.problem, joins_heads))

    @cached_property
    def table(self) -> Tensor:
        """The chosen blocks of each virtual sequence in ascending order, int64 ``[N, U, A, n]``; no block: `limit`."""
        table = self.pairs.table.expand(self.rows.sequences, -1, -1, -1)[:, :, : self.rows.blocks]
        used = max(int((table < self.pairs.limit).sum(-1).max()), 1)
        units = self.rows.units // table.shape[1]
        return table[..., :used].repeat_interleave(units, 1).contiguous()

    @cached_property
    def key_start(self) -> Tensor:
        """Raw index of the first key of each sequence, int64 ``[N]``."""
        start = self.pairs.geometry.kv_start
        return start if isinstance(start, Tensor) else torch.full((self.rows.sequences,), start)

    @cached_property
    def form(self) -> NormalForm:
        """The ranges of each row among the chosen keys of its virtual sequence."""
        size, table = self.pairs.kv_block, self.table
        raw = self.rows.take(self.call.normal_form(self.tensors.q).ranges).long()
        if self.rows.real is not None:
            raw = raw * self.rows.real[..., None]
        columns = raw.shape[-1]
        bounds = (raw - self.key_start[:, None, None]).clamp(min=0)
        bounds = bounds.view(self.rows.sequences, 1, self.rows.blocks, self.rows.size * columns)
        bounds = bounds.expand(-1, self.rows.units, -1, -1).contiguous()
        block = bounds // size
        place = torch.searchsorted(table, block)
        inside = table.gather(3, place.clamp(max=table.shape[3] - 1)) == block
        bounds = place * size + torch.where(inside & (place < table.shape[3]), bounds - block * size, 0)
        virtual, keys = bounds.shape[0] * bounds.shape[1] * bounds.shape[2], table.shape[3] * size
        ranges = tidy(bounds.view(virtual, self.rows.size, columns).clamp_(max=keys))
        geometry = Geometry(virtual, self.rows.size, keys, ranges.device, 0, self.rows.size, 0, keys)
        return NormalForm(ranges, keys, virtual, self.rows.group, (), geometry)

    def paged_call(self) -> tuple[Call, Tensors]:
        """The call whose pages are the chosen blocks, and its tensors; keys are read in place if strides allow."""
        call, problem = self.call, self.call.problem
        operands = token_major(self.tensors, call)
        page = page_size(self.pairs.kv_block, call, operands[0])
        first, token = self._places(operands[0], page)
        heads, units = self.rows.key_heads, self.rows.units
        head = (torch.arange(units) * problem.kv_heads // units)[:, None, None]
        places = torch.broadcast_tensors(first, token, head)
        in_place = find_pools(operands, (page, heads), places)
        if in_place is None:
            in_place = find_pools([with_padding(x, page) for x in operands], (page, heads), places)
            assert in_place is not None
        pools, index = in_place
        table = index.reshape(-1, index.shape[-1]).to(torch.int32).contiguous()
        k_scale, v_scale = pools[2:] if len(pools) > 2 else (None, None)
        paged = self.virtual_call(self.form, page, pages=table, k_scale=k_scale, v_scale=v_scale)
        return paged, Tensors(self.heads(self.tensors.q), pools[0], pools[1], None, None, None)

    def parts(self) -> Iterator[VirtualPart]:
        """The virtual sequences in parts whose copied keys take at most `GATHERED_BYTES`."""
        k, v = token_major(self.tensors, self.call)
        size, columns = self.pairs.kv_block, self.table.shape[3]
        table, origin = self.table.flatten(0, 2), self.key_start.repeat_interleave(self.rows.units * self.rows.blocks)
        order = torch.arange(len(table))
        sequence = order // (self.rows.units * self.rows.blocks)
        head = order // self.rows.blocks % self.rows.units // (self.rows.units // self.call.problem.kv_heads)
        step = max(GATHERED_BYTES // (columns * size * (k.shape[3] + v.shape[3]) * 8), 1)
        for start in range(0, len(table), step):
            span = slice(start, start + step)
            token = (table[span, :, None] * size + torch.arange(size)).flatten(1) + origin[span, None]
            token = token.clamp(0, self.call.problem.kv_len - 1)
            index = sequence[span, None] * (not self.rows.packed), token, head[span, None]
            ranges = self.form.ranges[span]
            form = dataclasses.replace(self.form, ranges=ranges, batch=len(ranges), geometry=None)
            yield VirtualPart(span, form, k[index][:, None], v[index][:, None], sequence[span], table[span], head[span])

    def _places(self, k: Tensor, page: int) -> tuple[Tensor, Tensor]:
        """The batch element (or page of the pool) and the row of each virtual page's start, ``[N, U, A, n]``."""
        token = self._tokens(page)
        sequence = torch.arange(1 if self.rows.packed else self.rows.sequences)[:, None, None, None]
        if self.call.pages is None:
            return sequence, token.clamp(0, self.call.problem.kv_len - 1)
        size, places = k.shape[1], self.call.pages.long()
        places = places.reshape(1, -1) if self.rows.packed else places
        place = places[sequence, (token // size).clamp(max=places.shape[1] - 1)]
        return place.clamp(0, len(k) - 1), token % size

    def _tokens(self, page: int) -> Tensor:
        """Raw index of the first key of each virtual page, ``[N, U, A, n]``; any for pages that no row sees."""
        key = torch.where(self.table < self.pairs.limit, self.table * self.pairs.kv_block, 0)
        if (parts := self.pairs.kv_block // page) > 1:
            key = (key[..., None] + torch.arange(parts) * page).flatten(3)
        return key + self.key_start[:, None, None, None]

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
