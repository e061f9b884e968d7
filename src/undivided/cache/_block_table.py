"""`BlockTable`: the pages of sequences as a tensor, of which only the rows that changed are made anew."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


class BlockTable:
    """Lists of pages as an int32 tensor [sequences, pages of the longest].

    It has 0 after the end of a list, and for an evicted page. A step of decoding changes one or two lists; to read all
    of 32 sequences of 200 pages each takes milliseconds.
    """

    def __init__(self) -> None:
        self._lists: list[list[int]] = []
        self._tensor = torch.zeros(0, 1, dtype=torch.int32)

    def of(self, lists: Sequence[list[int]], device: torch.device) -> Tensor:
        """The table of these lists. Earlier results keep their values.

        Args:
            lists: the pages of each sequence. A list that was given before is the same as then: a change replaces it.
            device: device of the table.
        """
        before, last = self._lists, self._tensor
        width = max([1, *map(len, lists)])
        self._lists = list(lists)
        changed = [n for n, (old, new) in enumerate(zip(before, lists, strict=False)) if old is not new]
        with torch.inference_mode(False):  # its version counter says whether it was checked
            if len(before) != len(lists) or 2 * len(changed) > len(lists) or last.device != device:
                self._tensor = _rows(lists, width, device)
            elif changed or width != last.shape[1]:
                kept = min(width, last.shape[1])
                table = torch.zeros(len(lists), width, dtype=torch.int32, device=device)
                table[:, :kept] = last[:, :kept]
                if changed:
                    table[torch.tensor(changed, device=device)] = _rows([lists[n] for n in changed], width, device)
                self._tensor = table
        return self._tensor


def _rows(lists: Sequence[list[int]], width: int, device: torch.device) -> Tensor:
    if not lists:
        return torch.zeros(0, width, dtype=torch.int32, device=device)
    numbers = array("i")
    for pages in lists:
        numbers.extend(pages if min(pages, default=0) >= 0 else [max(page, 0) for page in pages])
        numbers.extend([0] * (width - len(pages)))
    return torch.frombuffer(numbers, dtype=torch.int32).view(len(lists), width).to(device, copy=True)
