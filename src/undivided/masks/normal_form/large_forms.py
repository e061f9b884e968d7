"""`LARGE`: the large forms that masks keep, whose memory is limited for the whole process.

Masks such as ``causal()`` live as long as the process, and each keeps the forms of many sizes. A form of a million
tokens takes 8 to 32 MiB, so a limit on their number alone would leave a gigabyte in use.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import NamedTuple, Protocol

from torch import Tensor

from undivided.masks.normal_form.intervals import NormalForm


class Holder(Protocol):
    """What keeps forms under keys: a mask, what a mask keeps for its calls, or the forms that masks share."""

    def _take_use(self, key: Hashable) -> bool:
        """Whether what is under the key was used since the last call."""

    def _drop(self, key: Hashable) -> None:
        """Drop what is under the key."""


class _Record(NamedTuple):
    form: weakref.ref[NormalForm]
    size: int
    holders: dict[tuple[int, Hashable], weakref.ref[Holder]]
    """By the holder's id and its key."""


class LargeForms:
    """Forms of at least `smallest` bytes, which their holders drop if all take more than `most` bytes.

    The oldest that was not used since it was last considered goes first. The newest two always stay: layers of two
    kinds may take turns.
    """

    def __init__(self, smallest: int, most: int) -> None:
        self.smallest, self.most = smallest, most
        self._records: dict[int, _Record] = {}
        """By the form's id, the oldest first; a record goes with its form."""

    @property
    def size(self) -> int:
        """The bytes of the forms."""
        return sum([record.size for record in list(self._records.values())])

    def hold(self, form: NormalForm, holder: Holder, key: Hashable) -> None:
        """Note that a holder keeps a form under a key; others may be dropped."""
        # of each row the ranges, their copy for kernels (`NormalForm.table`), and its position as an int64
        size = 2 * form.ranges.nbytes + 8 * form.ranges.shape[:2].numel()
        if size < self.smallest or type(form.ranges) is not Tensor:
            return
        number = id(form)
        record = self._records.get(number)
        if record is None:
            reference = weakref.ref(form, lambda _: self._records.pop(number, None))
            record = self._records[number] = _Record(reference, size, {})
        for name, other in list(record.holders.items()):
            if other() is None:
                record.holders.pop(name, None)
        record.holders[id(holder), key] = weakref.ref(holder)
        self._limit(number)

    def _limit(self, newest: int) -> None:
        """Let holders drop forms other than the newest until the limit is met."""
        size = self.size
        for number, record in 2 * list(self._records.items()):  # twice: a form that was used stays the first time
            if size <= self.most or len(self._records) <= 2:
                return
            if number == newest or number not in self._records:
                continue
            holders = [(holder, key) for (_, key), ref in list(record.holders.items()) if (holder := ref()) is not None]
            self._records.pop(number, None)
            if sum(holder._take_use(key) for holder, key in holders):  # each one, unlike `any`
                self._records[number] = record
                continue
            size -= record.size
            for holder, key in holders:
                holder._drop(key)


LARGE = LargeForms(smallest=256 << 10, most=128 << 20)
