"""Pages that no later query of a sequence can see: which they are, and the check that no later mask shows them.

Causal masks, windows, sinks, prefixes and chunks, joined by ``&`` and ``|``, hide more of the old keys from every later
query, and never show a hidden one again. So the next query of a sequence decides which of its keys are still needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from undivided import masks
from undivided.cache._ledger.pages import Pages, Places
from undivided.cache._masks import CausalBand, align
from undivided.cache._storage import Counts
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.masks._parts import Chunk
from undivided.request.foreign import mask_hint

_EVICTABLE = frozenset({"causal", "window", "prefix", "global", "chunks"})

Ranges = Sequence[tuple[int, int]]


def evict(ledger: Pages, mask: Mask, sequences: Sequence[int]) -> int:
    """Release every full page whose keys `mask` hides from all later queries; the number of pages of all sequences.

    Args:
        ledger: changed.
        mask: the mask of all later calls.
        sequences: their numbers in the ledger, in the order of the batch.
    """
    if not isinstance(mask, Mask):  # None does not mean every pair here
        hint = None if isinstance(mask, bool) else mask_hint(mask)
        got = None if mask is None else type(mask).__name__
        raise InputError("mask", "be the undivided.masks.Mask of all later calls", got, hint=hint)
    check_evictable(mask, "consist of causal, window, sinks, prefix and chunks, bottom-right, to evict pages")
    count = 0
    lengths = tuple([ledger.lengths[n] for n in sequences])
    if (band := CausalBand.of_mask(mask)) is not None:
        for n, length in zip(sequences, lengths, strict=True):
            hidden = _held_between(ledger.evicted_places[n], *_hidden_places(band, length, ledger.page_size))
            ledger.evict(n, hidden)
            count += len(hidden)
        return count
    for n, (ranges,) in zip(sequences, visible(mask, lengths) if lengths else (), strict=True):
        hidden = [p for p in ledger.held_places(n) if _first_seen(ranges, (p, p + 1), ledger.page_size) is None]
        ledger.evict(n, hidden)
        count += len(hidden)
    return count


def check_evictable(mask: Mask, must: str) -> None:
    """InputError unless the mask hides from every later query what it hides from the next one."""
    has_offset = any(isinstance(part, Chunk) and part.offset is not None for part in mask.parts)
    if mask.kinds - _EVICTABLE or mask.align == "top_left" or has_offset:
        raise InputError("mask", must, repr(mask), hint="masks.window(4095, 0) | masks.sinks(4)")


def check_hidden(mask: Mask, evicted: Sequence[Places], lengths: Counts, counts: Counts, page_size: int) -> None:
    """InputError if a query of the last `counts` tokens of each sequence sees a key on one of its evicted pages."""
    evicted = tuple(evicted)
    if (band := CausalBand.of_mask(mask)) is not None and _hides_all(band, evicted, lengths, counts, page_size):
        return
    key = "evicted", evicted, lengths, counts, page_size
    mask.cached(key, lambda: _check_hidden(mask, evicted, lengths, counts, page_size))


def _check_hidden(mask: Mask, evicted: Sequence[Places], lengths: Counts, counts: Counts, page_size: int) -> bool:
    must = "hide the evicted keys"
    check_evictable(mask, must)
    # of more queries than tokens, the first ones see no key
    before = tuple([max(0, length - count) for length, count in zip(lengths, counts, strict=True)])
    # no later query sees more of the keys before it than the first query; but each sees its own key
    ends = [places[-1][1] * page_size if places else 0 for places in evicted]
    rows = max(1, *[end - start for end, start in zip(ends, before, strict=True)])
    for n, queries in enumerate(visible(mask, before, rows)):
        for i, ranges in enumerate(queries[: lengths[n] - before[n]], before[n]):
            for places in evicted[n]:
                if (p := _first_seen(ranges, places, page_size)) is not None:
                    keys = f"a mask that shows keys {p * page_size} to {(p + 1) * page_size - 1}"
                    hint = "attend with the mask of evict(), or a narrower one, and before evict()"
                    raise InputError("mask", f"{must} of sequence {n}", f"{keys} to its query {i}", hint)
    return True


def visible(mask: Mask, lengths: Counts, queries: int = 1) -> list[list[Ranges]]:
    """For each sequence and each of its next queries the ranges of keys, [start, stop), that the query sees, the keys
    of these queries included."""
    with torch.inference_mode(False):
        with_next = torch.tensor(lengths, dtype=torch.int32, device="cpu") + queries
        mask = align(mask) & masks.lengths(with_next)
        table = mask.intervals(queries, max(lengths) + queries, batch=len(lengths))
    return [[list(zip(row[::2], row[1::2], strict=True)) for row in sequence] for sequence in table.tolist()]


def _hidden_places(band: CausalBand, query: int, page_size: int) -> tuple[int, int]:
    """The places (first, stop) of the full pages whose keys are hidden from a query at this position and from all later
    ones."""
    if band.left is None:
        return 0, 0
    return -(-band.first_keys // page_size), (query - band.left) // page_size


def _hides_all(band: CausalBand, evicted: Sequence[Places], lengths: Counts, counts: Counts, page_size: int) -> bool:
    """Whether a band hides the evicted pages of each sequence from its last `counts` tokens."""
    for places, length, count in zip(evicted, lengths, counts, strict=True):
        if places:
            first, stop = _hidden_places(band, max(0, length - count), page_size)
            if places[0][0] < first or places[-1][1] > stop:
                return False
    return True


def _held_between(evicted: Places, first: int, stop: int) -> list[int]:
    """The places from first to stop that are not evicted."""
    held: list[int] = []
    for start, end in evicted:
        held += range(first, min(start, stop))
        first = max(first, end)
    return [*held, *range(first, stop)]


def _first_seen(ranges: Ranges, places: tuple[int, int], page_size: int) -> int | None:
    """The first of the pages at these places that has a key of the ranges, or None."""
    first, stop = (place * page_size for place in places)
    starts = [max(start, first) for start, end in ranges if max(start, first) < min(end, stop)]
    return min(starts) // page_size if starts else None
