"""ALiBi's usual slopes, and whether a tensor is known to hold them.

cuDNN computes the slopes itself and supports no others. Reading a tensor would wait for its device, so only tensors
that this module created and not modified since are known to hold them.
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

from undivided.arguments.checks import as_device, as_integer
from undivided.arguments.signature import checked_call
from undivided.arguments.tensors import has_dispatch, is_traced, versions

_usual: dict[tuple[int, torch.device], tuple[Tensor, tuple[object, ...] | None]] = {}
"""(number of heads, device) -> the slopes, and `versions` of them when they were created."""


_returned: dict[int, tuple[weakref.ref[Tensor], tuple[object, ...]]] = {}
"""The tensors of `alibi_slopes` that are alive, by id, and `versions` of each when it was created."""


@checked_call
def alibi_slopes(heads: int, device: torch.device | str = "cpu") -> Tensor:
    """The usual ALiBi slopes, for ``attention(alibi_slopes=...)``: fp32 [heads], a new tensor at every call.

    For n heads, n a power of two: 2^(-8/n), 2^(-16/n), ..., 2^-8. Otherwise the slopes of the power of two below n,
    followed by every other slope of twice that power. cuDNN supports no other slopes: it can run with a tensor
    of this function as long as the tensor is not modified. A copy is not recognised; other backends take any slopes.

    Args:
        heads: number of query heads, at least 1.
        device: the device of the tensor.

    Returns:
        The slopes, float32 [heads].

    Raises:
        InputError: ``heads`` is not an int, or is below 1, or ``device`` is not a device.

    Source: Press et al. 2022 (arXiv:2108.12409), section 3 and its published code for other numbers of heads.

    >>> import undivided
    >>> undivided.alibi_slopes(4).tolist(), undivided.alibi_slopes(3).tolist()
    ([0.25, 0.0625, 0.015625, 0.00390625], [0.0625, 0.00390625, 0.25])
    """
    slopes = _compute(as_integer("heads", heads, 1), as_device("device", device))
    if not is_traced() and (version := versions((slopes,))) is not None:
        key = id(slopes)
        _returned[key] = weakref.ref(slopes, lambda _: _returned.pop(key, None)), version
    return slopes


def usual_slopes(heads: int, device: torch.device | str = "cpu") -> Tensor:
    """ALiBi's slopes, fp32 [heads], as in `alibi_slopes`: the same tensor at every call, unless it was modified.

    Source: Press et al. 2022 (arXiv:2108.12409).

    >>> usual_slopes(6).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    if is_traced():
        return _compute(heads, device)
    key = (heads, torch.empty(0, dtype=torch.float32, device=device).device)
    slopes, version = _usual.get(key, (None, None))
    if slopes is None or versions((slopes,)) != version:
        with torch.inference_mode(False):  # an inference tensor has no version counter
            slopes = _compute(heads, device)
        _usual[key] = slopes, versions((slopes,))
    return slopes


def _compute(heads: int, device: torch.device | str) -> Tensor:
    n = 1 << int(math.log2(heads))
    first = torch.arange(1, n + 1, dtype=torch.float32, device=device) * (-8 / n)
    rest = torch.arange(1, 2 * (heads - n) + 1, 2, dtype=torch.float32, device=device) * (-4 / n)
    return torch.exp2(torch.cat((first, rest)))


def are_usual(slopes: Tensor) -> bool:
    """Whether the slopes are known to be the usual ones: False for equal numbers from elsewhere.

    >>> slopes = usual_slopes(8)
    >>> are_usual(slopes), are_usual(slopes.detach()), are_usual(slopes.clone()), are_usual(slopes.mul_(2))
    (True, True, False, False)
    """
    if slopes.dim() != 1 or torch.compiler.is_compiling() or has_dispatch(slopes):
        return False
    if (returned := _returned.get(id(slopes))) is not None and returned[0]() is slopes:
        return returned[1] == versions((slopes,))
    usual, version = _usual.get((slopes.shape[0], slopes.device), (None, None))
    if usual is None or version is None or versions((slopes,)) != version:
        return False
    if usual is slopes:
        return True
    # a view or detached tensor shares memory and version; `_usual` keeps the memory from being reused
    same = slopes.dtype == usual.dtype and slopes.stride() == usual.stride() and slopes.device.type != "meta"
    return same and slopes.data_ptr() == usual.data_ptr()
