"""Keys in place as pages: pools that overlap, one page for each unit of a tensor's memory."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import pad

from undivided.arguments import layout
from undivided.arguments.checks import INT32_MAX
from undivided.request.call import Call
from undivided.request.request import Tensors


def token_major(tensors: Tensors, call: Call) -> list[Tensor]:
    """k and v as ``[B, Sk, N, D]`` or pools of pages, and their scales."""
    if call.pages is not None:
        scales = [x for x in (call.k_scale, call.v_scale) if x is not None]
        return [tensors.k, tensors.v, *scales]
    return [layout.heads_first(x, call.problem.layout).transpose(1, 2) for x in (tensors.k, tensors.v)]


def page_size(kv_block: int, call: Call, k: Tensor) -> int:
    """Keys of a virtual page: a whole block, or the largest part of it that no page of the cache cuts."""
    return kv_block if call.pages is None else math.gcd(kv_block, k.shape[1])


def _steps(tensor: Tensor) -> tuple[int, ...]:
    """Strides of batch, token and head; 0 for an axis of one element."""
    return tuple(tensor.stride(axis) if tensor.shape[axis] > 1 else 0 for axis in range(3))


def _unit(tensor: Tensor) -> int:
    """The largest step of which every stride is a multiple."""
    return math.gcd(*_steps(tensor)) or 1


def with_padding(tensor: Tensor, page: int) -> Tensor:
    """A contiguous copy with rows of 0 after each sequence, so that a page that starts in it ends in it."""
    return pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, page)).contiguous()


def common_steps(operands: list[Tensor]) -> tuple[int, ...] | None:
    """Strides of batch, token and head in units of each tensor's memory; None if tensors differ in them, so that one
    page index cannot serve all."""
    steps = [tuple(step // unit for step in _steps(x)) for x in operands for unit in (_unit(x),)]
    return steps[0] if all(other == steps[0] for other in steps) else None


class PoolViews(NamedTuple):
    """How tensors are seen as overlapping pages ``[count, page, heads, D]``.

    Args:
        sizes, strides: of each view.
        footprints: elements from each tensor's first to the last that its view reads.
    """

    sizes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    footprints: list[int]

    def fit(self, operands: list[Tensor]) -> bool:
        """Whether each view ends in the memory of its tensor."""
        return all(
            footprint <= x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
            for x, footprint in zip(operands, self.footprints, strict=True)
        )

    def apply(self, operands: list[Tensor]) -> list[Tensor]:
        """The views of these tensors, which they `fit`."""
        views = zip(operands, self.sizes, self.strides, strict=True)
        return [x.as_strided(sizes, strides) for x, sizes, strides in views]


def find_pools(
    operands: list[Tensor],
    size: tuple[int, int],
    places: tuple[Tensor, Tensor, Tensor | None],
    largest: tuple[int, int, int] | None = None,
) -> tuple[PoolViews, Tensor] | None:
    """How each tensor is seen as pages, one for each unit of its memory; and the page, int64, at each place.

    Args:
        operands: k, v and their scales.
        size: tokens and heads of a page.
        places: batch, token and first head; None: head 0.
        largest: upper limits of the places. No value is read then, and a view names the first token of each page only,
            because a page may end after the memory; the kernel must not read tokens that no row sees.

    None if one page index cannot serve all tensors or needs more than 32 bits, or a page would end after the memory of
    its tensor.
    """
    steps = common_steps(operands)
    if steps is None:
        return None
    batch, token, head = places
    index = batch * steps[0] + token * steps[1]
    if head is not None:
        index = index + head * steps[2]
    if largest is None:
        last = int(index.max())
    else:
        last, size = sum(place * step for place, step in zip(largest, steps, strict=True)), (1, size[1])
    if last > INT32_MAX:
        return None
    views = PoolViews([], [], [])
    for x in operands:
        unit, inner, strides = _unit(x), (*size, *x.shape[3:]), x.stride()[1:]
        views.sizes.append((last + 1, *inner))
        views.strides.append((unit, *strides))
        inside = sum((count - 1) * stride for count, stride in zip(inner, strides, strict=True)) + 1
        views.footprints.append(last * unit + inside)
    return (views, index) if views.fit(operands) else None
