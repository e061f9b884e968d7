"""The sequences of the batch and the pool rows of their new tokens, which are the same for every layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from undivided.arguments.checks import as_integer, listed
from undivided.arguments.layout import LAYOUTS, Layout
from undivided.cache._ledger.compaction import Compaction, checked_indices, compact
from undivided.cache._ledger.pages import Pages, Places
from undivided.cache._ledger.slots import Slots
from undivided.cache._storage import Counts, Storage
from undivided.errors import CacheFullError, InputError, did_you_mean

FORMATS = tuple(layout for layout in LAYOUTS if layout != "bhsd")


class BatchPages(Pages):
    """The ledger of a paged batch, with the arguments of `InferenceParams` in its errors."""

    argument = "step_dict"
    hint = "omit sequences that have ended, pass fewer tokens of a prompt at a time, or increase total_num_pages"


class Step(NamedTuple):
    """One iteration of the model, per row of the batch.

    Args:
        slots: ledger slot of the sequence.
        counts: new tokens.
        before, after: cached tokens before and after the step.
        rows: row of each new token in the flattened pools.
    """

    slots: Counts
    counts: Counts
    before: Counts
    after: Counts
    rows: list[int]


class Batch:
    """Sequences by id; each has a slot of the ledger while it is in the batch."""

    def __init__(self, ledger: Slots | Pages, max_sequences: int, max_len: int) -> None:
        self.ledger, self.max_sequences, self.max_len = ledger, max_sequences, max_len
        self.slots: dict[Hashable, int] = {}

    @property
    def sequences(self) -> OrderedDict[Hashable, int]:
        """The tokens of each sequence, in the order of the last step."""
        return OrderedDict(zip(self.slots, map(self.ledger.lengths.__getitem__, self.slots.values()), strict=True))

    def step(self, step_dict: object, storages: Iterable[Storage], begin: Callable[[Step], None]) -> Step:
        """The step of these new tokens, after freeing finished sequences and copying shared pages in each storage.
        begin: called before the ledger has the new tokens."""
        counts = self._check_counts(step_dict)
        own = {slot for name, slot in self.slots.items() if name in counts}
        # besides those of sequences that have ended, those of an interrupted call, which gave no sequence its slot
        ended = [slot for slot, length in enumerate(self.ledger.lengths) if length and slot not in own]
        # a copy replaces the ledger only after everything fits
        ledger = self.ledger.copy() if ended else self.ledger
        for slot in ended:
            ledger.free(slot)
        slots = self._assign_slots(counts)
        new = [0] * self.max_sequences
        for name, slot in slots.items():
            new[slot] = counts[name]
        before = tuple([ledger.lengths[slot] for slot in slots.values()])
        plan = ledger.plan(tuple(new))
        for storage in storages:
            storage.copy(plan.copies, storage.k.shape[1])
        after = tuple([plan.lengths[slot] for slot in slots.values()])
        rows = [row for slot in slots.values() for row in ledger.rows(plan, slot, new[slot])]
        step = Step(tuple(slots.values()), tuple(counts.values()), before, after, rows)
        begin(step)
        ledger.commit(plan)
        self.ledger, self.slots = ledger, slots
        return step

    @property
    def changes(self) -> int:
        """A number that changes whenever the pages of a slot do."""
        return self.ledger.changes if isinstance(self.ledger, Pages) else 0

    def tables(self, slots: Counts, rank: int) -> list[list[int]]:
        """The pages of these slots on a rank, or the slots themselves if not paged."""
        ledger = self.ledger
        return [ledger.pages_on_rank(rank, slot) if isinstance(ledger, Pages) else [slot] for slot in slots]

    def evicted_places(self, slots: Counts) -> list[Places] | None:
        """The places of the evicted pages of these slots, on all ranks, if there are any, otherwise None."""
        ledger = self.ledger
        if not isinstance(ledger, Pages) or not any(ledger.evicted):
            return None
        return [ledger.evicted_places[slot] for slot in slots]

    def _check_counts(self, step_dict: object) -> dict[Hashable, int]:
        if not isinstance(step_dict, Mapping):
            must = "map the id of each sequence to its new tokens"
            raise InputError("step_dict", must, type(step_dict).__name__, hint="OrderedDict(zip(seq_ids, new_tokens))")
        counts = {
            name: count if type(count) is int and count >= 0 else as_integer(f"step_dict[{name!r}]", count, 0)
            for name, count in step_dict.items()
        }
        for name in counts:
            if isinstance(name, Tensor):
                must = "have ids that equal those of the next step, which tensors do not"
                raise InputError("step_dict", must, repr(name), hint="OrderedDict(zip(seq_ids.tolist(), new_tokens))")
        if len(counts) > self.max_sequences:
            must = f"hold at most max_batch_size={self.max_sequences} sequences"
            raise CacheFullError("step_dict", must, len(counts))
        for name, count in counts.items():
            cached = self.ledger.lengths[self.slots[name]] if name in self.slots else 0
            if cached + count > self.max_len:
                must = f"leave the sequence within max_sequence_length={self.max_len}"
                raise InputError(f"step_dict[{name!r}]", must, f"{count} new tokens after {cached}")
        return counts

    def _assign_slots(self, names: Iterable[Hashable]) -> dict[Hashable, int]:
        """The slot of each sequence: its own, or an unused one."""
        own = {name: self.slots[name] for name in names if name in self.slots}
        unused = iter(sorted(set(range(self.max_sequences)) - set(own.values())))
        return {name: own[name] if name in own else next(unused) for name in names}

    def fork(self, src: Hashable, dst: Hashable, storages: Iterable[Storage]) -> None:
        """Start sequence dst as a copy of src."""
        slot = self._slot("src", src)
        slots = self._slots_with("dst", dst)  # `Pages.fork` releases what an interrupted call left in the slot
        pairs = [(slot, slots[dst])]
        for storage in storages:
            storage.copy(*self.ledger.fork_copies(pairs))
        self.ledger.fork(pairs)
        self.slots = slots

    def remember(self, tokens: list[int], name: Hashable, complete: Callable[[int, int], int]) -> None:
        """Index the full pages of a sequence, which begins with these tokens. complete: how many of the first tokens of
        a slot, which has this many, every layer has received."""
        ledger, slot = self.paged_ledger("share the pages of a prompt"), self._slot("seq_id", name)
        if len(tokens) > ledger.lengths[slot]:
            must = f"be at most the {ledger.lengths[slot]} cached tokens of {name!r}"
            raise InputError("tokens", must, len(tokens))
        if len(tokens) > (received := complete(slot, ledger.lengths[slot])):
            must = f"be at most the {received} tokens of {name!r} that every layer has received"
            raise InputError("tokens", must, len(tokens), hint="call it after the model ran, with all its layers")
        ledger.remember(slot, tokens)

    def match(self, tokens: list[int], name: Hashable) -> int:
        """The number of a prompt's first tokens that are in indexed pages; the new sequence starts with these pages."""
        ledger, slots = self.paged_ledger("share the pages of a prompt"), self._slots_with("seq_id", name)
        if ledger.lengths[slots[name]]:  # what an interrupted call left in the slot
            ledger.free(slots[name])
        count = ledger.match(slots[name], tokens[:-1])
        self.slots = slots
        return count

    def forget_prefixes(self) -> None:
        """Give up the indexed pages of prompts; sequences keep theirs."""
        if isinstance(self.ledger, Pages):
            self.ledger.forget()

    def truncate(self, name: Hashable, length: int) -> None:
        """Drop the last tokens of a sequence."""
        slot = self._slot("seq_id", name)
        lengths = self.ledger.lengths
        if as_integer("length", length, 0) > lengths[slot]:
            raise InputError("length", f"be at most the {lengths[slot]} cached tokens of {name!r}", length)
        self.ledger.truncate((*lengths[:slot], length, *lengths[slot + 1 :]))

    def free(self, name: Hashable) -> None:
        """Drop a sequence."""
        self.ledger.free(self._slot("seq_id", name))
        del self.slots[name]

    def compaction(
        self, indices: Mapping[Hashable, Sequence[int]], counts: Mapping[Hashable, int]
    ) -> Compaction[Slots | Pages]:
        """The compaction of the last tokens of sequences, which have these numbers of them."""
        if not isinstance(indices, Mapping):
            raise InputError("indices", "map the id of a sequence to a list of ints", type(indices).__name__)
        kept = {}
        for name, chosen in indices.items():
            slot = self._slot("indices", name)
            kept[slot] = counts[name], checked_indices(f"indices[{name!r}]", chosen, counts[name])
        return compact(self.ledger, kept)

    def paged_ledger(self, purpose: str) -> Pages:
        """The ledger, or InputError if the batch is not paged."""
        if not isinstance(self.ledger, Pages):
            raise InputError("is_paged", f"be True to {purpose}", False)
        return self.ledger

    def _slots_with(self, argument: str, name: Hashable) -> dict[Hashable, int]:
        """The slots with one for a new sequence."""
        _check_id(argument, name)
        if name in self.slots:
            raise InputError(argument, "not be the id of a sequence in the batch", repr(name))
        if len(self.slots) == self.max_sequences:
            must = f"be one of at most max_batch_size={self.max_sequences} sequences"
            raise CacheFullError(argument, must, repr(name), hint="free(seq_id) a sequence that has ended")
        return {**self.slots, name: min(set(range(self.max_sequences)) - set(self.slots.values()))}

    def _slot(self, argument: str, name: Hashable) -> int:
        _check_id(argument, name)
        if name not in self.slots:
            hint = f"the batch has {listed(list(map(repr, self.slots))) or 'no sequence'}"
            raise InputError(argument, "be the id of a sequence in the batch", repr(name), hint)
        return self.slots[name]


def _check_id(argument: str, name: object) -> None:
    """InputError for the id of a sequence that cannot be a key of a dictionary."""
    try:
        hash(name)
    except TypeError:
        raise InputError(argument, "be hashable", repr(name)) from None


def pool_sizes(
    is_paged: bool, page_size: int | None, pages: int | None, max_len: int, max_sequences: int, ranks: int
) -> tuple[int, int]:
    """(tokens per page, pages) of a pool of each rank; by default enough for all sequences at full length. A cache that
    is not paged has one page per sequence."""
    if page_size is None and is_paged:
        raise InputError("page_size", "be given with is_paged=True", None, hint="16 to 256 tokens")
    size = max_len if page_size is None else as_integer("page_size", page_size, 1)
    enough = max_sequences * -(-max_len // (size * ranks))
    number = enough if pages is None else as_integer("total_num_pages", pages, 1)
    return (size, number) if is_paged else (max_len, max_sequences)


def padded(counts: Counts, entries: int, device: torch.device | None) -> Tensor:
    """The counts, then zeros, int32 [entries]; on the CPU if there is no device yet."""
    if not any(counts):  # between two steps
        return torch.zeros(entries, dtype=torch.int32, device=device or "cpu")
    return torch.tensor([*counts, *[0] * (entries - len(counts))], dtype=torch.int32, device=device or "cpu")


def cumulative(counts: Counts, entries: int, device: torch.device | None) -> Tensor:
    """0 and the cumulative counts, the last one repeated, int32 [entries + 1]."""
    offsets = tuple(accumulate(counts))
    return padded((0, *offsets, *offsets[-1:] * (entries - len(counts))), entries + 1, device)


def checked_format(value: object) -> Layout:
    """A layout of TransformerEngine's caches, or InputError."""
    if not isinstance(value, str) or value not in FORMATS:
        hint = did_you_mean(value, FORMATS)
        if isinstance(value, str) and value == "bhsd":
            hint = "x.transpose(1, 2) of a 'bhsd' tensor is 'bshd', without a copy"
        raise InputError("qkv_format", f"be one of {', '.join(map(repr, FORMATS))}", repr(value), hint)
    return value
