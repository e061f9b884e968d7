"""One `Mask` for the attention operators of a graph that have the same mask.

An operator takes a mask as a string and tensors (`Mask.flatten`). If each built a mask of its own, each layer, and each
backward, would check it again and compute its ranges and tables again. They share one in two ways:

- *Masks without tensors, or with small ones on the CPU*, are kept as those that layers build (`masks._kept`).
- *Graphs with gradients.* One more operator, ``undivided::mask``, takes the mask and returns an empty tensor, its
  handle, which has the `Mask` as a Python attribute. PyTorch removes equal operators from such graphs, so that all
  layers, and the backward, have one handle.

All other operators build their masks: in graphs without gradients those with large tensors, or with some on a GPU.
A look-up by identity would be wrong there: Inductor uses the memory of one buffer, and its tensor object, for another
one in the same graph, and the in-place version of the tensor does not show that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from undivided.masks import Mask
from undivided.masks._kept import kept
from undivided.masks._predicate import Predicate
from undivided.masks._spec import names_tensors

_library = torch.library.Library("undivided", "FRAGMENT")
_library.define("mask(Tensor[] tensors, str spec, SymInt[] numbers) -> Tensor")
_ATTRIBUTE = "_undivided_mask"


def handle(spec: str, tensors: list[Tensor], numbers: list[int]) -> Tensor:
    """The handle of a mask, as an operator of the graph that is being recorded; the arguments are of `Mask.flatten`."""
    result: Tensor = torch.ops.undivided.mask(tensors, spec, numbers)
    return result


def read(handle: Tensor | None, spec: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Mask:
    """The mask of an operator: that of its handle, a recent one, or a new one.

    Args:
        handle: the result of `handle`. It has lost the mask if PyTorch saved a copy.
        spec, tensors, numbers: the mask by `Mask.flatten`; a mask without tensors comes with a placeholder.
    """
    mask = getattr(handle, _ATTRIBUTE, None)
    if mask is not None:
        assert isinstance(mask, Mask)
        return mask
    if Predicate.name in spec:  # whose function belongs to the caller
        return Mask.unflatten(spec, tensors, numbers)
    if not names_tensors(spec):
        tensors = ()
    return _unflatten(spec, len(tensors), *tensors, *numbers)


@kept
def _unflatten(spec: str, count: int, *values: Any) -> Mask:
    """The mask of a string, so many tensors, and numbers."""
    return Mask.unflatten(spec, values[:count], values[count:])


@torch.library.impl(_library, "mask", "CompositeExplicitAutograd")
def _build(tensors: list[Tensor], spec: str, numbers: Sequence[int]) -> Tensor:
    result: Tensor = _empty(tensors, spec, numbers)
    setattr(result, _ATTRIBUTE, read(None, spec, tensors, numbers))
    return result


@torch.library.register_fake("undivided::mask", lib=_library)  # type: ignore[untyped-decorator]
def _empty(tensors: list[Tensor], spec: str, numbers: Sequence[int]) -> Tensor:
    result: Tensor = tensors[0].new_empty(0, dtype=torch.uint8)
    return result


_library.impl("mask", _empty, "FuncTorchDynamicLayerFrontMode")
