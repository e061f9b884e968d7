"""Masks from TransformerEngine's arguments: the mask type, the window, the diagonal.

mask type                      pairs
no_mask                        all
padding                        both real
causal                         j <= i                                 top-left, whatever the lengths
causal_bottom_right            j <= i + kv_len - q_len
padding_causal                 both real, j <= i                      top-left in each sequence
padding_causal_bottom_right    both real, j <= i + kv_len - q_len     with the real lengths of each sequence
arbitrary                      attention_mask is False
"""

from __future__ import annotations

import functools
import warnings
from typing import NamedTuple

import torch

from undivided import masks
from undivided.arguments.checks import as_integer
from undivided.errors import InputError, did_you_mean
from undivided.masks import Mask
from undivided.masks._alignment import Align
from undivided.nn.arguments.checks import checked_optional_flag


class MaskType(NamedTuple):
    """A mask type. `bottom_right` is None if the type does not define the diagonal."""

    name: str
    padding: bool = False
    causal: bool = False
    bottom_right: bool | None = None


MASK_TYPES: dict[str, MaskType] = {
    kind.name: kind
    for kind in (
        MaskType("no_mask"),
        MaskType("padding", padding=True),
        MaskType("causal", causal=True, bottom_right=False),
        MaskType("causal_bottom_right", causal=True, bottom_right=True),
        MaskType("padding_causal", padding=True, causal=True, bottom_right=False),
        MaskType("padding_causal_bottom_right", padding=True, causal=True, bottom_right=True),
        MaskType("arbitrary"),
    )
}
_ALIASES = {"causal_padding": "padding_causal"}

Window = tuple[int, int]


def checked_mask_type(value: object, own: str | None = None) -> MaskType:
    """The mask type with this name, in which a comma may replace an underscore, as in TransformerEngine.

    Args:
        value: the name.
        own: the name that a module has, for a call without one.
    """
    value = own if value is None else value
    name = value.replace(",", "_") if isinstance(value, str) else None
    kind = None if name is None else MASK_TYPES.get(_ALIASES.get(name, name))
    if kind is None:
        hint = did_you_mean(value, MASK_TYPES) if isinstance(value, str) else None
        raise InputError("attn_mask_type", f"be one of {', '.join(map(repr, MASK_TYPES))}", repr(value), hint)
    return kind


def checked_window(value: object) -> Window | None:
    """A pair of ints of at least -1 (-1 is unbounded), or None."""
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2:
        hint = f"({value}, 0) allows {value} earlier keys" if isinstance(value, int) else None
        raise InputError("window_size", "be a pair (left, right)", repr(value), hint=hint)
    left, right = (as_integer(f"window_size[{n}]", side, -1) for n, side in enumerate(value))
    return left, right


def check_mask_options(attn_mask_type: object, window_size: object, bottom_right_diagonal: bool | None) -> None:
    """Raise InputError unless the options of a mask are valid or None, where no attention uses them."""
    if attn_mask_type is not None:
        checked_mask_type(attn_mask_type)
    checked_window(window_size)
    checked_optional_flag("bottom_right_diagonal", bottom_right_diagonal)


def normalise_window(kind: MaskType, window: Window | None) -> Window:
    """The window for a mask type. It is changed in the same cases as in TransformerEngine, with `warn_of_window`."""
    if window is None:
        return (-1, 0) if kind.causal else (-1, -1)
    if kind.causal:
        return window[0], 0
    return (-1, -1) if window == (-1, 0) else window


def warn_of_window(kind: MaskType, window: Window | None) -> None:
    """Warn of a window that `normalise_window` changes."""
    if window is None or (normal := normalise_window(kind, window)) == window:
        return
    if kind.causal:
        _warn(f"window_size {window} becomes {normal}: attn_mask_type={kind.name!r} allows no later key")
    else:
        _warn(
            f"window_size {window} becomes {normal}: attn_mask_type={kind.name!r} is not causal; "
            "use a causal attn_mask_type to mask later keys"
        )


def is_bottom_right(kind: MaskType, requested: bool | None) -> bool:
    """Whether the diagonal ends in the bottom right corner: decided by the mask type, or else by the caller."""
    return requested is not False if kind.bottom_right is None else kind.bottom_right


def band(kind: MaskType, window: Window | None, bottom_right_diagonal: bool | None) -> Mask:
    """The mask of the causal diagonal and the window. Its alignment is always set, because ALiBi uses it too. It warns
    of arguments that the mask type overrides."""
    warn_of_window(kind, window)
    bottom_right = is_bottom_right(kind, bottom_right_diagonal)
    if bottom_right_diagonal is not None and bottom_right_diagonal is not bottom_right:
        given = f"bottom_right_diagonal={bottom_right_diagonal}"
        _warn(f"{given} has no effect: attn_mask_type={kind.name!r} defines the diagonal")
    left, right = normalise_window(kind, window)
    align: Align = "bottom_right" if bottom_right else "top_left"
    return masks.window(left, right, align) if torch.compiler.is_compiling() else _band(left, right, align)


# Cached, so that the results that a mask caches live from call to call.
@functools.lru_cache(maxsize=64)
def _band(left: int, right: int, align: Align) -> Mask:
    return masks.window(left, right, align)


def _warn(text: str) -> None:
    if not torch.compiler.is_compiling():
        warnings.warn(text, UserWarning, stacklevel=2)
