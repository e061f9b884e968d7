"""Sequences of different lengths as plain lists of tensors, and as one tensor in a layout, for the tests of the
caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

POISON = float("nan")


def joined(sequences: Sequence[Tensor], layout: str, length: int | None = None) -> Tensor:
    """Sequences [n_i, H, D] as one tensor in this layout; all other entries are NaN. A row has `length` tokens, or as
    many as the longest."""
    if layout == "thd":
        return torch.cat(list(sequences))
    longest = max(len(s) for s in sequences) if length is None else length
    rows = sequences[0].new_full((len(sequences), longest, *sequences[0].shape[1:]), POISON)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: len(sequence)] = sequence
    return {"bshd": rows, "sbhd": rows.transpose(0, 1), "bhsd": rows.transpose(1, 2)}[layout]


def parted(tensor: Tensor, layout: str, counts: Sequence[int]) -> list[Tensor]:
    """The inverse of `joined`. What is beyond a sequence must be 0, as in an output."""
    if layout == "thd":
        return list(tensor.split(list(counts)))
    rows = {"bshd": tensor, "sbhd": tensor.transpose(0, 1), "bhsd": tensor.transpose(1, 2)}[layout]
    for row, count in zip(rows, counts, strict=True):
        assert not row[count:].any(), "a row that is no token is 0"
    return [row[:count] for row, count in zip(rows, counts, strict=True)]
