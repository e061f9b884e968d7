"""Shapes that broadcast to [batch, heads, queries, keys], and hints for those that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_VIEWS: Sequence[tuple[str, tuple[int | None, ...]]] = (
    ("[:, None, None]", (0, None, None, 1)),
    ("[:, None]", (0, None, 1, 2)),
    ("[:, :, None]", (0, 1, None, 2)),
    (".transpose(-1, -2)", (None, None, 1, 0)),
    (".transpose(-1, -2)", (None, 0, 2, 1)),
    (".transpose(-1, -2)", (0, 1, 3, 2)),
    (".transpose(0, 1)", (1, 0, 2, 3)),
    (".transpose(1, 2)", (0, 2, 1, 3)),
    (".permute(0, 3, 1, 2)", (0, 3, 1, 2)),
)
"""Views of a tensor, and the axis of the tensor that each of the four axes is; None is a new axis."""


def broadcasts(shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a tensor of this shape can be expanded to these sizes; missing axes are added in front. A size that a
    graph does not know fits: the operator checks it when it runs."""
    one: Callable[[Any], bool] = bool
    same: Callable[[Any], bool] = bool
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_false as one
        from torch.fx.experimental.symbolic_shapes import guard_or_true as same
    # not `in`, which torch.compile evaluates as `is` for an int and a dynamic size
    return len(shape) <= len(sizes) and all(
        one(have == 1) or same(have == size) for have, size in zip(reversed(shape), reversed(sizes), strict=False)
    )


def broadcast_hint(shape: Sequence[int], sizes: Sequence[int], written: str) -> str | None:
    """The change by which a tensor would broadcast to [batch, heads, queries, keys].

    Args:
        shape: of the tensor.
        sizes: of the call, four.
        written: how the caller writes the tensor, with a place for the change, such as ``"bias{}"``.

    Returns:
        The hint; None if no single change is enough.

    >>> broadcast_hint([2, 7], [2, 4, 5, 7], "bias{}")
    'did you mean bias[:, None, None]?'
    >>> broadcast_hint([7, 5], [2, 4, 5, 7], "bias{}")
    'did you mean bias.transpose(-1, -2)?'
    >>> broadcast_hint([5, 8], [2, 4, 5, 7], "bias{}")
    'it is for 8 keys, and the call has 7'
    """
    for change in _changes(shape, sizes):
        return f"did you mean {written.format(change)}?"
    named = zip(reversed(shape), reversed(sizes), ("keys", "queries", "heads", "batch elements"), strict=False)
    wrong = [(have, size, name) for have, size, name in named if have not in (1, size)]
    if len(shape) > len(sizes) or len(wrong) != 1:
        return None
    have, size, name = wrong[0]
    return f"it is for {have} {name}, and the call has {size}"


def _changes(shape: Sequence[int], sizes: Sequence[int]) -> Iterator[str]:
    """The views that fit, the most likely first, then copies of the key heads for their query heads."""
    for change, axes in _VIEWS:
        if len(shape) == sum(axis is not None for axis in axes):
            viewed = [1 if axis is None else shape[axis] for axis in axes]
            if broadcasts(viewed, sizes):
                yield change
    if len(shape) >= 3 and 0 < shape[-3] < sizes[1] and sizes[1] % shape[-3] == 0:
        repeated = [*shape[:-3], sizes[1], *shape[-2:]]
        if broadcasts(repeated, sizes):
            yield f".repeat_interleave({sizes[1] // shape[-3]}, -3)"
