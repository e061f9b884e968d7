"""``build``: the normal form of a mask from its parts. This module alone defines which keys a part allows.

Ranges are computed in positions j' within a sequence, where a bound is an int, one number per sequence or one per row,
and are converted to raw keys at the end. Temporaries take O(S) memory, and nothing waits for a GPU.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from undivided.arguments.tensors import is_traced, readable
from undivided.masks._parts import (
    Blocks,
    Chunk,
    Dense,
    DocumentIds,
    Field,
    GlobalBand,
    Origin,
    Part,
    Prefix,
    Size,
    Tree,
    find_part,
)
from undivided.masks._predicate import Predicate
from undivided.masks.normal_form.block_pairs import BlockPairs
from undivided.masks.normal_form.bounds import row_hull, tidy
from undivided.masks.normal_form.copies import int64_copy, on_device
from undivided.masks.normal_form.intervals import NormalForm
from undivided.masks.normal_form.large_forms import LARGE
from undivided.masks.normal_form.pairs import BLOCK_PAIRS, DensePairs, Extra, IdPairs, RangePairs, all_pairs, row_blocks
from undivided.masks.normal_form.positions import Geometry, private_copy
from undivided.masks.normal_form.predicate_pairs import PredicatePairs
from undivided.masks.normal_form.row_blocks import reached_keys, row_blocks_by_reach
from undivided.masks.normal_form.tree_pairs import TreePairs

# Forms of masks without tensors, shared by all equal masks: each layer of a model may build its own masks.causal().
# Usually they take 1 MB. `LARGE` limits the memory of large ones: 64 of 2 x 64 Ki tokens could take 160 MB.
SHARED_FORMS = 64
SHARED_TOKENS = 1 << 17


class _SharedForms(OrderedDict[Hashable, NormalForm]):
    """The shared forms as a `Holder` of large ones; the least recently used is the first."""

    def _take_use(self, key: Hashable) -> bool:
        """False: what uses a form is a mask, which holds it too."""
        return False

    def _drop(self, key: Hashable) -> None:
        """Forget a form."""
        self.pop(key, None)


_shared_forms = _SharedForms()
_MANY_PAIRS = 1 << 20
"""Pairs from which on functions are evaluated for the keys that the other parts of a mask allow, instead of all."""

Bound = Size | None
Range = tuple[Size, Size]


@dataclass(frozen=True, eq=False)
class Ranges(Part):
    """A part that is a finished normal form: the rest of a mask for some rows and keys. For internal use only, and not
    in compiled graphs."""

    name: ClassVar[str] = "ranges"
    form: NormalForm

    def fields(self) -> tuple[Field, ...]:
        """None: this part cannot be written to a compiled graph."""
        return ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The ranges of the form."""
        return (self.form.ranges,)


def shared_form(key: Hashable, build: Callable[[], NormalForm]) -> NormalForm:
    """The form of a mask without tensors, from the bounded cache of all such masks."""
    form = _shared_forms.get(key)
    if form is not None:
        _shared_forms[key] = _shared_forms.pop(key, form)  # the last used is the last to go
    else:
        form = build()
        if type(form.ranges) is not Tensor:  # a fake tensor cannot serve the next call
            return form
        _shared_forms[key] = form
        LARGE.hold(form, _shared_forms, key)
        if len(_shared_forms) > SHARED_FORMS:
            _shared_forms.popitem(last=False)
    return form


def build(
    parts: Sequence[Part],
    band: tuple[int | None, int | None],
    bottom_right: bool,
    sizes: tuple[int, int, int, int],
    device: torch.device,
) -> NormalForm:
    """The normal form of an intersection of parts and a band, for sizes ``(batch, heads, q_len, kv_len)``."""
    batch, heads, q_len, kv_len = sizes
    if (finished := find_part(parts, Ranges)) is not None:
        return finished.form
    geometry = Geometry.from_parts(parts, bottom_right, batch, q_len, kv_len, device)
    keys: Range = (0, geometry.per_row(geometry.kv_size))
    base = _within(keys, *_band(geometry, *band))
    extras: list[Extra] = []
    for part in parts:
        if isinstance(part, Prefix):
            base = _within(base, None, geometry.per_row(private_copy(part.length, device)))
        elif isinstance(part, Chunk):
            base = _within(base, *_chunk(geometry, part))
        elif isinstance(part, DocumentIds):
            raw, whole, pairs = _same_ids(part, batch, device)
            base = _within_raw(geometry, base, raw)
            if not readable(whole) or not bool(whole.all()):
                extras.append(pairs)
        elif isinstance(part, Tree):
            extras.append(TreePairs.for_call(part.parents, geometry))
        elif isinstance(part, Blocks):
            extras.append(BlockPairs.for_call(part, geometry, heads))
    evaluated = _evaluated_parts(parts, geometry)
    if evaluated:
        hull, is_whole = _row_hull(evaluated, geometry, heads, base)
        base = _within_raw(geometry, base, hull)
        if is_whole:
            evaluated = []
    unions = [part for part in parts if isinstance(part, GlobalBand)]
    for part in unions[1:]:
        extras.append(RangePairs(_union_ranges(geometry, keys, part)))
        base = _within(base, None, _union_stop(geometry, part))
    ranges = _union_ranges(geometry, base, unions[0]) if unions else _pack(geometry, base)
    form = NormalForm(ranges, kv_len, batch, heads, (*extras, *evaluated), geometry)
    for part in parts:
        if isinstance(part, Origin):
            form = dataclasses.replace(form, first_head=part.head, first_sequence=part.sequence)
    return form


def last_query_form(
    lengths: Sequence[int], left: int | None, kv_len: int, heads: int, device: torch.device, sinks: int = 0
) -> NormalForm:
    """The form of a causal mask for one query per sequence, its last token, in calls that read no positions.

    Args:
        lengths: keys of each sequence.
        left: keys before its own that a query sees. None: all.
        sinks: first keys of each sequence that a query sees besides.
        kv_len: keys of a row of the batch, padding included.
        heads: query heads.
        device: device of the ranges.

    >>> last_query_form([3, 1], 1, 4, 1, torch.device("cpu")).ranges.tolist()
    [[[1, 3]], [[0, 1]]]
    >>> last_query_form([9, 3], 1, 16, 1, torch.device("cpu"), sinks=2).ranges.tolist()
    [[[0, 2, 7, 9]], [[0, 3, 0, 0]]]
    """
    ranges = [[[0 if left is None else max(stop - 1 - left, 0), stop]] for stop in lengths]
    if sinks:
        ranges = [[[0, sinks, start, stop] if start > sinks else [0, stop, 0, 0]] for ((start, stop),) in ranges]
    with torch.inference_mode(False):  # tensors with version counters, as those of other forms
        return NormalForm(torch.tensor(ranges, dtype=torch.int32, device=device), kv_len, len(lengths), heads)


def _within(keys: Range, start: Bound, stop: Bound) -> Range:
    """The intersection with another range; None is unbounded."""
    return _max(keys[0], start), _min(keys[1], stop)


def _within_raw(geometry: Geometry, keys: Range, raw: Range) -> Range:
    """The intersection with a range of raw keys."""
    origin = geometry.per_row(geometry.kv_start)
    return _within(keys, raw[0] - origin, raw[1] - origin)


def _max(a: Size, b: Bound) -> Size:
    if b is None:
        return a
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)


def _min(a: Size, b: Bound) -> Size:
    if b is None:
        return a
    if isinstance(a, Tensor):
        return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, Tensor) else min(a, b)


def _band(geometry: Geometry, left: int | None, right: int | None) -> tuple[Bound, Bound]:
    start = None if left is None else geometry.anchor - left
    return start, None if right is None else geometry.anchor + (right + 1)


def _chunk(geometry: Geometry, part: Chunk) -> Range:
    shift = geometry.per_row(geometry.shift)
    offset = shift if part.offset is None else geometry.per_row(private_copy(part.offset, geometry.device))
    start = (geometry.q_position + offset).div(part.size, rounding_mode="floor") * part.size + (shift - offset)
    return start, start + part.size


def _union_ranges(geometry: Geometry, keys: Range, part: GlobalBand) -> Tensor:
    """Packed ranges of ``keys & (band | prefix)``: one if the band is unbounded on the left, otherwise two."""
    prefix = geometry.per_row(private_copy(part.prefix, geometry.device))
    start, stop = _band(geometry, part.left, part.right)
    if start is None:
        return _pack(geometry, _within(keys, None, _union_stop(geometry, part)))
    return _pack(geometry, _within(keys, None, prefix), _within(keys, _max(start, prefix), stop))


def _union_stop(geometry: Geometry, part: GlobalBand) -> Bound:
    """One past the last key of ``band | prefix``; None: unbounded."""
    stop = _band(geometry, None, part.right)[1]
    return None if stop is None else _max(stop, geometry.per_row(private_copy(part.prefix, geometry.device)))


def _pack(geometry: Geometry, *keys: Range) -> Tensor:
    """Ranges of positions j' as ranges of raw keys, int32 ``[B|1, Sq, 2 * len(keys)]``; empty for padding rows."""
    origin = geometry.per_row(geometry.kv_start)
    raw = [bound + origin if isinstance(origin, Tensor) else bound for pair in keys for bound in pair]
    real = geometry.real_rows
    batch = max((value.shape[0] for value in (*raw, real) if isinstance(value, Tensor)), default=1)
    if geometry.batch == 0:
        batch = 0
    # a recorded graph loses what is written in place, which nothing in it seems to read
    if len(raw) == 2 and isinstance(raw[0], int) and raw[0] == 0 and not is_traced():
        # the common case, with half the operators
        ranges = torch.zeros(batch, geometry.q_len, 2, dtype=torch.int32, device=geometry.device)
        stop = _min(_max(raw[1], 0), geometry.kv_len)
        ranges[..., 1] = stop if real is None else real * stop
        return ranges
    columns = [value if isinstance(value, Tensor) else torch.full((), value, device=geometry.device) for value in raw]
    bounds = torch.stack([column.expand(batch, geometry.q_len) for column in columns], -1).to(torch.int64)
    bounds = bounds.clamp(0, geometry.kv_len)
    return tidy(bounds if real is None else bounds * real[..., None])


def _same_ids(part: DocumentIds, batch: int, device: torch.device) -> tuple[Range, Tensor, IdPairs]:
    """Per row the keys ``[first, last + 1)`` with its id, whether all keys in between have it, and the pairs."""
    ids_q, ids_kv = (int64_copy(ids, device) for ids in (part.ids_q, part.ids_kv))
    pairs = IdPairs(ids_q, ids_kv)
    if ids_q.shape[0] != ids_kv.shape[0]:
        ids_q, ids_kv = (ids.expand(batch, -1).contiguous() for ids in (ids_q, ids_kv))
    if not ids_kv.shape[1]:
        return (0, 0), torch.ones_like(ids_q, dtype=torch.bool), pairs
    ids, order = ids_kv.sort(dim=1, stable=True)
    low, high = torch.searchsorted(ids, ids_q), torch.searchsorted(ids, ids_q, right=True)
    has_keys = (high > low) & (ids_q >= 0)
    first = order.gather(1, low.clamp(max=ids.shape[1] - 1))
    last = order.gather(1, (high - 1).clamp(min=0)) + 1
    start, stop = torch.where(has_keys, first, 0), torch.where(has_keys, last, 0)
    return (start, stop), ~has_keys | (stop - start == high - low), pairs


def _evaluated_parts(parts: Sequence[Part], geometry: Geometry) -> list[Extra]:
    """The parts whose ranges are unknown until they are evaluated."""
    extras: list[Extra] = []
    for part in parts:
        if isinstance(part, Dense):
            extras.append(DensePairs(on_device(part.tensor, geometry.device)))
        elif isinstance(part, Predicate):
            extras.append(PredicatePairs.for_call(part.fn, geometry, part.positions))
    return extras


def _row_hull(extras: Sequence[Extra], geometry: Geometry, heads: int, base: Range) -> tuple[Range, bool]:
    """Per row the keys ``[first, last + 1)`` that any head may see, evaluated one block of rows at a time; and whether
    every head is known to see all of them, so that the ranges are the whole mask: padding, causal masks, windows.

    base: the keys that the other parts allow. Functions are evaluated for these only, if they are few.
    """
    batch, all_heads, keys = slice(0, geometry.batch), slice(0, heads), slice(0, geometry.kv_len)
    if not geometry.q_len or not geometry.kv_len:
        return (0, 0), False
    pairs_per_row = geometry.batch * heads * geometry.kv_len
    if pairs_per_row * geometry.q_len > BLOCK_PAIRS or not all(isinstance(extra, DensePairs) for extra in extras):
        # fewer if they are the same in all sequences or heads; also refuses a function that returns a fixed shape
        pairs_per_row = all_pairs(extras, batch, all_heads, slice(0, 1), slice(0, 1)).numel() * geometry.kv_len
    form = _narrow_form(extras, geometry, heads, base)
    blocks: Iterator[slice] = row_blocks(geometry.q_len, pairs_per_row)
    if form is not None:
        blocks = row_blocks_by_reach(form, geometry.q_len, max(BLOCK_PAIRS * geometry.kv_len // pairs_per_row, 1))
    starts, stops, is_whole = [], [], True
    for rows in blocks:
        if form is not None:
            keys = reached_keys(form, rows)
        pairs = all_pairs(extras, batch, all_heads, rows, keys)
        allowed = pairs.squeeze(1) if pairs.shape[1] == 1 else pairs.any(1)
        start, stop = row_hull(allowed.expand(-1, -1, keys.stop - keys.start))
        is_whole = is_whole and _fills(pairs, start, stop, keys.stop - keys.start)
        starts.append((start + keys.start).expand(-1, rows.stop - rows.start))
        stops.append((stop + keys.start).expand(-1, rows.stop - rows.start))
    start, stop = (bounds[0] if len(bounds) == 1 else torch.cat(bounds, 1) for bounds in (starts, stops))
    return (start.to(torch.int64), stop.to(torch.int64)), is_whole


def _fills(pairs: Tensor, start: Tensor, stop: Tensor, keys: int) -> bool:
    """Whether pairs ``[b|1, h|1, r|1, k|1]``, of which `start` and `stop` are the hulls, are known to have no gap."""
    if not readable(pairs):
        return False
    in_hulls = int((stop - start).clamp(min=0).sum()) * pairs.shape[1]
    return int(pairs.count_nonzero()) * (keys // pairs.shape[3]) == in_hulls


def _narrow_form(extras: Sequence[Extra], geometry: Geometry, heads: int, base: Range) -> NormalForm | None:
    """The form of these keys alone, if functions are evaluated faster for them than for all keys; otherwise None."""
    pairs = geometry.q_len * geometry.kv_len
    if pairs < _MANY_PAIRS or not any(isinstance(extra, PredicatePairs) for extra in extras) or is_traced():
        return None
    ranges = _pack(geometry, base)
    if not readable(ranges) or 4 * int((ranges[..., 1] - ranges[..., 0]).amax(0).sum()) > pairs:
        return None
    return NormalForm(ranges, geometry.kv_len, geometry.batch, heads, (), geometry)
