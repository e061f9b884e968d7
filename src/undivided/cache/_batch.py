"""Which sequences are in the batch, and which rows of the pools their new tokens take: the same for every layer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from undivided._arguments import as_integer
from undivided.cache._ledger import Pages, Slots
from undivided.cache._storage import Counts, Storage
from undivided.errors import InputError


class PagesOfBatch(Pages):
    """Pages that a step takes."""

    argument = "step_dict"
    hint = "leave out a sequence that has ended, bring fewer tokens of a prompt at a time, or more total_num_pages"


class Step(NamedTuple):
    """What an iteration brings. Row r of the tensors is sequence r here."""

    slots: Counts
    counts: Counts
    before: Counts
    after: Counts
    rows: list[int]
    """Of each new token in the flattened pools."""


class Batch:
    """Sequences by their ids, each in a slot of the ledger while it is there."""

    def __init__(self, ledger: Slots | Pages, max_sequences: int, max_len: int) -> None:
        self.ledger, self.max_sequences, self.max_len = ledger, max_sequences, max_len
        self.slots: dict[Hashable, int] = {}

    @property
    def sequences(self) -> OrderedDict[Hashable, int]:
        """The tokens of each sequence, in the order of the last step."""
        return OrderedDict((name, self.ledger.lengths[slot]) for name, slot in self.slots.items())

    def step(self, step_dict: object, storages: Iterable[Storage]) -> Step:
        """Let sequences leave, come and grow; pages that are shared and will be written to are copied in each
        storage."""
        counts = self._checked(step_dict)
        ended = [slot for name, slot in self.slots.items() if name not in counts]
        # a copy takes the ledger's place once there is room for everything
        ledger = self.ledger.copy() if ended else self.ledger
        for slot in ended:
            ledger.free(slot)
        slots = self._assigned(counts)
        new = [0] * self.max_sequences
        for name, slot in slots.items():
            new[slot] = counts[name]
        before = tuple([ledger.lengths[slot] for slot in slots.values()])
        plan = ledger.plan(tuple(new))
        for storage in storages:
            storage.copy(plan.copies, storage.k.shape[1])
        ledger.commit(plan)
        self.ledger, self.slots = ledger, slots
        after = tuple([ledger.lengths[slot] for slot in slots.values()])
        rows = [row for slot in slots.values() for row in ledger.rows(plan, slot, new[slot])]
        return Step(tuple(slots.values()), tuple(counts.values()), before, after, rows)

    def _checked(self, step_dict: object) -> dict[Hashable, int]:
        if not isinstance(step_dict, Mapping):
            raise InputError(
                "step_dict",
                "map the id of each sequence to its new tokens",
                type(step_dict).__name__,
                hint="OrderedDict(zip(seq_ids, new_tokens))",
            )
        counts = {name: as_integer(f"step_dict[{name!r}]", count, 0) for name, count in step_dict.items()}
        if len(counts) > self.max_sequences:
            must = f"hold at most max_batch_size={self.max_sequences} sequences"
            raise InputError("step_dict", must, len(counts))
        for name, count in counts.items():
            cached = self.ledger.lengths[self.slots[name]] if name in self.slots else 0
            if cached + count > self.max_len:
                raise InputError(
                    f"step_dict[{name!r}]",
                    f"leave the sequence within max_sequence_length={self.max_len}",
                    f"{count} new tokens after {cached}",
                )
        return counts

    def _assigned(self, names: Iterable[Hashable]) -> dict[Hashable, int]:
        """The slot of each: its own, or one that is not used by these."""
        kept = {name: self.slots[name] for name in names if name in self.slots}
        unused = iter(sorted(set(range(self.max_sequences)) - set(kept.values())))
        return {name: kept[name] if name in kept else next(unused) for name in names}

    def fork(self, src: Hashable, dst: Hashable, storages: Iterable[Storage]) -> None:
        """Begin sequence dst as src is."""
        slot = self._slot("src", src)
        if dst in self.slots:
            raise InputError("dst", "be the id of no sequence", repr(dst))
        if len(self.slots) == self.max_sequences:
            raise InputError("dst", f"be one of at most max_batch_size={self.max_sequences} sequences", repr(dst))
        slots = self._assigned([*self.slots, dst])
        pairs = [(slot, slots[dst])]
        for storage in storages:
            storage.copy(*self.ledger.forked(pairs))
        self.ledger.fork(pairs)
        self.slots = slots

    def truncate(self, name: Hashable, length: int) -> None:
        """Forget the last tokens of a sequence."""
        slot = self._slot("seq_id", name)
        lengths = self.ledger.lengths
        if as_integer("length", length, 0) > lengths[slot]:
            raise InputError("length", f"be at most the {lengths[slot]} cached tokens of {name!r}", length)
        self.ledger.truncate((*lengths[:slot], length, *lengths[slot + 1 :]))

    def _slot(self, argument: str, name: Hashable) -> int:
        if name not in self.slots:
            raise InputError(argument, "be the id of a sequence in the batch", repr(name))
        return self.slots[name]
