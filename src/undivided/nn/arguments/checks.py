"""Checks of single arguments: choices, numbers, flags, head counts and head sizes."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from undivided.arguments.checks import as_device, as_integer, check_type, checked_flag, is_finite
from undivided.arguments.tensors import readable
from undivided.errors import InputError
from undivided.nn.arguments.formats import Heads
from undivided.nn.arguments.refused import shorten
from undivided.request.checks import heads_hint


def checked_number(argument: str, value: object, least: float, most: float, words: str) -> float:
    """The value as a finite float; InputError, with `words`, unless it lies in [least, most]."""
    if not is_finite(value):
        raise InputError(argument, f"be {words}", shorten(value))
    assert isinstance(value, numbers.Real)
    if not least <= float(value) <= most:
        raise InputError(argument, f"be {words}", repr(value))
    return float(value)


def checked_heads(num_attention_heads: object, num_gqa_groups: object) -> tuple[int, int]:
    """(query heads, key/value heads)."""
    heads = as_integer("num_attention_heads", num_attention_heads, 1)
    if num_gqa_groups is None:
        return heads, heads
    groups = as_integer("num_gqa_groups", num_gqa_groups, 1)
    if heads % groups:
        must = f"divide num_attention_heads ({heads})"
        raise InputError("num_gqa_groups", must, groups, heads_hint(heads, groups) if groups < heads else None)
    return heads, groups


def checked_channels(kv_channels: Any) -> tuple[int, int]:
    """(head size of queries and keys, head size of values)."""
    if isinstance(kv_channels, tuple | list):
        if len(kv_channels) != 2:
            raise InputError("kv_channels", "be an int or a pair (queries and keys, values)", repr(kv_channels))
        qk, v = kv_channels
        return as_integer("kv_channels[0]", qk, 1), as_integer("kv_channels[1]", v, 1)
    size = as_integer("kv_channels", kv_channels, 1)
    return size, size


def checked_device(value: torch.device | str | None) -> torch.device | None:
    """The device; None if it is None; InputError if it is not a device."""
    return None if value is None else as_device("device", value)


def check_names(name: object, backend: object) -> None:
    """Raise InputError unless the name of a layer and that of its backend are text or None."""
    for argument, value in (("name", name), ("backend", backend)):
        if value is not None:
            check_type(argument, value, str, "a str or None")


def checked_optional_flag(argument: str, value: bool | None) -> bool | None:
    """The value; InputError unless it is a bool or None."""
    return None if value is None else checked_flag(argument, value)


def checked_sizes(hidden_size: int, num_attention_heads: object, num_gqa_groups: object, kv_channels: Any) -> Heads:
    """The heads of a layer; their size is hidden_size / num_attention_heads by default."""
    heads, groups = checked_heads(num_attention_heads, num_gqa_groups)
    if kv_channels is None:
        if hidden_size % heads:
            hint = "set the head size with kv_channels=..."
            raise InputError("hidden_size", f"be divisible by num_attention_heads ({heads})", hidden_size, hint=hint)
        kv_channels = hidden_size // heads
    return Heads(heads, groups, *checked_channels(kv_channels))


def check_numbers(layer_number: object, seq_length: object, micro_batch_size: object) -> None:
    """Raise InputError unless the number of a layer, and hints that are numbers, are positive ints or None."""
    named = ("layer_number", layer_number), ("seq_length", seq_length), ("micro_batch_size", micro_batch_size)
    for name, value in named:
        if value is not None:
            as_integer(name, value, 1)


def check_call_hints(checkpoint_core_attention: object, fast_zero_fill: object, num_splits: object) -> None:
    """Raise InputError unless the hints of a call have their types."""
    checked_flag("checkpoint_core_attention", checkpoint_core_attention)
    checked_flag("fast_zero_fill", fast_zero_fill)
    if num_splits is not None:
        as_integer("num_splits", num_splits, 0)


def shared_offsets(cu_seqlens_q: Tensor | None, cu_seqlens_kv: Tensor | None) -> Tensor | None:
    """cu_seqlens_kv, but cu_seqlens_q if its values are known to be the same: one tensor means one packing."""
    q, kv = cu_seqlens_q, cu_seqlens_kv
    if q is kv or not (isinstance(q, Tensor) and isinstance(kv, Tensor)):
        return kv
    is_comparable = readable(q, kv) and q.shape == kv.shape and kv.dtype in (torch.int32, torch.int64)
    return q if is_comparable and bool((q == kv).all()) else kv
