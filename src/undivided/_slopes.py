"""ALiBi's usual slopes, and whether a tensor is known to hold them.

cuDNN computes them itself and takes no others. Whether a tensor holds them cannot be read without waiting for its device, so
it is known of those that were made here and not written to since.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from undivided._tensors import versions

_made: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Tensors of usual slopes, and the in-place version that they were made with."""


def usual_slopes(heads: int, device: torch.device | str = "cpu") -> Tensor:
    """ALiBi's slopes, fp32 [heads]: powers of 2^(-8/n), n the power of two at or below; odd powers of 2^(-4/n) beyond n.

    Source: Press et al. 2022 (arXiv:2108.12409).

    >>> usual_slopes(6).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    """
    if torch.compiler.is_compiling():
        return _computed(heads, device)
    with torch.inference_mode(False):  # an inference tensor would not say whether it was written to
        slopes = _computed(heads, device)
    _made[slopes] = versions((slopes,))
    return slopes


def _computed(heads: int, device: torch.device | str) -> Tensor:
    n = 1 << int(math.log2(heads))
    first = torch.arange(1, n + 1, dtype=torch.float32, device=device) * (-8 / n)
    rest = torch.arange(1, 2 * (heads - n) + 1, 2, dtype=torch.float32, device=device) * (-4 / n)
    return torch.exp2(torch.cat((first, rest)))


def are_usual(slopes: Tensor) -> bool:
    """Whether the slopes are known to be the usual ones: False for the same numbers from elsewhere.

    >>> slopes = usual_slopes(8)
    >>> are_usual(slopes), are_usual(slopes.clone()), are_usual(slopes.mul_(2))
    (True, False, False)
    """
    made_with = _made.get(slopes)
    return made_with is not None and made_with == versions((slopes,))
