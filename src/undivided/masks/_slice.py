"""``slice_mask``: the mask of some sequences and heads of a call, for a rank that holds only these."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor

from undivided.masks._mask import Mask
from undivided.masks._parts import Blocks, Dense, Documents, Origin, Part, find_part
from undivided.masks._predicate import Predicate, PredicateFunction, register_predicate


@dataclasses.dataclass(frozen=True)
class CallSlice:
    """Some sequences of ``batch`` and some heads of ``heads``: consecutive numbers, from start to stop."""

    batch: int
    sequences: tuple[int, int]
    heads: int
    own_heads: tuple[int, int]

    @property
    def is_whole(self) -> bool:
        """Whether it contains everything."""
        return self.sequences == (0, self.batch) and self.own_heads == (0, self.heads)


def slice_mask(mask: Mask, kept: CallSlice, with_origin: bool) -> Mask:
    """The mask of a slice of a call; cached, so that a repeated call finds its normal form.

    Args:
        mask: of all sequences and heads; it has passed ``check``.
        kept: the sequences and heads that remain.
        with_origin: keep the numbers of the first sequence and head, which dropout draws by.

    Returns:
        A mask for a call of these sequences and heads.

    >>> from undivided import masks
    >>> half = CallSlice(batch=4, sequences=(2, 4), heads=8, own_heads=(0, 8))
    >>> slice_mask(masks.causal() & masks.lengths([1, 2, 3, 4]), half, with_origin=False)
    causal() & lengths(kv=[3, 4])
    """
    if kept.is_whole:
        return mask
    return mask.cached(("slice", kept, with_origin), _build, mask, kept, with_origin)


def _build(mask: Mask, kept: CallSlice, with_origin: bool) -> Mask:
    parts = [_select(part, kept) for part in mask.parts if not isinstance(part, Origin)]
    if with_origin:
        whole = find_part(mask.parts, Origin) or Origin(0, 0)
        parts.append(Origin(whole.sequence + kept.sequences[0], whole.head + kept.own_heads[0]))
    return dataclasses.replace(mask, parts=tuple(parts))


def _select(part: Part, kept: CallSlice) -> Part:
    """A part of the mask for the slice. A pack of documents has a batch of one, and its documents stay together."""
    start, stop = kept.sequences
    if isinstance(part, Predicate):
        return register_predicate(_with_offsets(part.fn, start, kept.own_heads[0]), part.positions)
    if isinstance(part, Dense):
        dense = _rows(part.tensor, kept)
        return Dense(dense if dense.shape[1] == 1 else dense[:, slice(*kept.own_heads)])
    if isinstance(part, Blocks):
        return dataclasses.replace(part, table=_table(_rows(part.table, kept), kept))
    if isinstance(part, Documents) or (start, stop) == (0, kept.batch):
        return part
    sliced: dict[int, Tensor] = {}  # one tensor for both sides stays one: alignments are compared by it
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = sliced.setdefault(id(value), _rows(value, kept))
    return dataclasses.replace(part, **changes)


def _rows(tensor: Tensor, kept: CallSlice) -> Tensor:
    """The rows of the kept sequences of a tensor with one row per sequence, or one for all."""
    start, stop = kept.sequences
    if (start, stop) == (0, kept.batch) or (tensor.dim() > 1 and tensor.shape[0] == 1):
        return tensor
    return tensor[start:stop]


def _table(table: Tensor, kept: CallSlice) -> Tensor:
    """The rows of a block table ``[B|1, T, A, n]`` for the kept heads, of which T rows have equally many each."""
    start, stop = kept.own_heads
    if table.shape[1] == 1 or (start, stop) == (0, kept.heads):
        return table
    group = kept.heads // table.shape[1]
    step = math.gcd(group, start, stop)  # heads per row of the result
    return table[:, torch.arange(start, stop, step, device=table.device) // group]


def _with_offsets(fn: PredicateFunction, sequence: int, head: int) -> PredicateFunction:
    """The function, called with the numbers of sequences and heads in the whole."""

    @functools.wraps(fn)
    def shifted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return fn(b + sequence, h + head, q_idx, kv_idx)

    return shifted
