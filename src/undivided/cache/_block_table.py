"""`BlockTable`: the pages of sequences as a tensor, of which only the rows that changed are made anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from undivided.arguments.tensors import values_are_traced


class BlockTable:
    """Lists of pages as an int32 tensor [sequences, pages of the longest].

    It has 0 after the end of a list, and for an evicted page. Its in-place version is 0 until a caller writes to it. A
    step of decoding changes one or two lists; to read all of 32 sequences of 200 pages each takes milliseconds.
    """

    def __init__(self) -> None:
        self._made_from: tuple[object, torch.device] | None = None
        self._lists: list[list[int]] = []
        self._tensor = torch.empty(0, dtype=torch.int32)

    def __reduce__(self) -> tuple[type[BlockTable], tuple[()]]:
        """A copy is empty: a copied tensor has no version counter if it is made in inference mode."""
        return BlockTable, ()

    def updated(self, state: object, read: Callable[[], list[list[int]]], device: torch.device) -> Tensor:
        """The table of the lists of pages that `read` returns. Earlier results keep their values.

        Args:
            state: a value that differs if the lists do; `read` is called for a new one only.
            read: returns the lists, in a list of its own. The pages in a list that it returned before are the same as
                then: a change replaces the list.
            device: device of the table.
        """
        if self._made_from == (state, device):
            return self._tensor
        if values_are_traced():  # a fake tensor cannot serve the next call
            return _rows(read(), device)
        before, last, lists = self._lists, self._tensor, read()
        table = last
        changed = [n for n, (old, new) in enumerate(zip(before, lists, strict=False)) if old is not new]
        is_similar = self._made_from is not None and self._made_from[1] == device and len(before) == len(lists)
        if not is_similar or 2 * len(changed) > len(lists):
            table = _rows(lists, device)
        elif changed or _width(lists) != last.shape[1]:
            table = _with_rows(last, lists, changed)
        self._tensor, self._made_from, self._lists = table, (state, device), lists  # at once: see Pages
        return table


def _width(lists: Sequence[list[int]]) -> int:
    return max([1, *map(len, lists)])


def _rows(lists: Sequence[list[int]], device: torch.device, width: int | None = None) -> Tensor:
    """The rows of these lists, with this many pages or those of the longest."""
    width = width or _width(lists)
    rows = [pages if len(pages) == width else [*pages, *[0] * (width - len(pages))] for pages in lists]
    with torch.inference_mode(False):  # its version counter says whether it was checked
        # evicted pages are negative; a Python loop over all pages would take twice as long as the tensor
        table = torch.tensor(rows, dtype=torch.int32, device="cpu").clamp(min=0)
        return table.to(device).reshape(len(lists), width)


def _with_rows(table: Tensor, lists: Sequence[list[int]], changed: Sequence[int]) -> Tensor:
    """A copy of the table that is as wide as these lists are long, with new rows for the changed ones."""
    width, device = _width(lists), table.device
    with torch.inference_mode(False):
        copy = pad(table, (0, width - table.shape[1]))
        if not changed:
            return copy
        rows = _rows([lists[n] for n in changed], device, width)
        return copy.index_copy(0, torch.tensor(changed, device=device), rows)
