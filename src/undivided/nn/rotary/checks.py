"""Checks of the arguments of `apply_rotary_pos_emb`: shapes, positions, and the kind of pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.arguments.checks import as_integer, check_tensor
from undivided.arguments.layout import Layout
from undivided.arguments.tensors import readable
from undivided.errors import InputError
from undivided.nn.arguments.sequences import check_offsets
from undivided.request.checks import DTYPES


def check(
    t: Tensor,
    freqs: Tensor,
    format: Layout,
    start: Tensor | None,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> None:
    """Raise InputError if types, shapes, devices or offsets are wrong."""
    for name, tensor in (("t", t), ("freqs", freqs)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            hint = "rope(length), or rope.cos_sin(length)" if isinstance(tensor, torch.nn.Module) else None
            raise InputError(name, "be a floating-point tensor", got, hint)
        check_tensor(name, tensor)
    if t.dtype not in DTYPES:
        raise InputError("t", "be float16, bfloat16, float32 or float64", t.dtype)
    if freqs.device != t.device:
        raise InputError("freqs", f"be on the device of t ({t.device})", freqs.device, "freqs.to(t.device)")
    if t.dim() != layout.axis_count(format):
        axes = f"[{', '.join(format)}]"
        raise InputError("t", f"have the axes {axes} in tensor_format={format!r}", list(t.shape))
    _check_freqs(t, freqs, format)
    as_integer("cp_size", cp_size, 1)
    if as_integer("cp_rank", cp_rank, 0) >= cp_size:
        raise InputError("cp_rank", f"be below cp_size ({cp_size})", cp_rank)
    sequences, length = layout.sizes(t.shape, format)[:2]
    if format == "thd":
        sequences = _check_packed(t, cu_seqlens, cp_size)
    elif cu_seqlens is not None:
        hint = "in sbhd and bshd every sequence starts at position 0, or at its start_positions"
        raise InputError("cu_seqlens", f"be None in tensor_format={format!r}", "a tensor", hint=hint)
    elif cp_size > 1 and length % 2:
        raise InputError("t", "have an even number of tokens (two chunks) with cp_size above 1", length)
    _check_start(start, freqs, sequences)


def _check_freqs(t: Tensor, freqs: Tensor, format: Layout) -> None:
    batch = 1 if format == "thd" else layout.sizes(t.shape, format)[0]
    axes = "[s, 1, 1, d2], or [s, 1, 1, 2, d2 / 2] of cos_sin"
    if freqs.dim() not in (4, 5) or freqs.shape[2] != 1 or (freqs.dim() == 5 and freqs.shape[3] != 2):
        raise InputError("freqs", f"have the axes {axes}", list(freqs.shape))
    if freqs.shape[1] not in (1, batch):
        raise InputError("freqs", f"have 1 or batch ({batch}) at axis 1", f"{freqs.shape[1]} in {list(freqs.shape)}")
    if freqs.dtype not in (torch.float32, torch.float64):
        raise InputError(
            "freqs",
            "be float32",
            freqs.dtype,
            hint="in a half-precision dtype, neighbouring positions have equal angles; FSDP2 casts them unless its "
            "MixedPrecisionPolicy has cast_forward_inputs=False",
        )
    channels = freqs.shape[-1] * (2 if freqs.dim() == 5 else 1)
    if channels > t.shape[-1] or channels % 2:
        must = f"have an even number of channels, at most the head size ({t.shape[-1]})"
        raise InputError("freqs", must, f"{channels} in {list(freqs.shape)}")


def _check_packed(t: Tensor, cu_seqlens: Tensor | None, cp_size: int) -> int:
    """The number of packed sequences; InputError if cu_seqlens are wrong."""
    if cu_seqlens is None:
        hint = "cumulative lengths: sequences of 3 and 2 tokens are [0, 3, 5], int32"
        raise InputError("cu_seqlens", "be given in tensor_format='thd'", None, hint=hint)
    check_offsets("cu_seqlens", cu_seqlens)
    if readable(cu_seqlens):
        if int(cu_seqlens[0]) != 0 or (cu_seqlens.numel() > 1 and int(cu_seqlens.diff().min()) < 0):
            raise InputError("cu_seqlens", "start at 0 and never decrease", cu_seqlens.tolist()[:8])
        if int(cu_seqlens[-1]) > t.shape[0] * cp_size:
            must = f"end at the tokens of t at most ({t.shape[0] * cp_size})"
            raise InputError("cu_seqlens", must, int(cu_seqlens[-1]))
        if cp_size > 1 and bool((cu_seqlens.diff() % (2 * cp_size)).any()):
            hint = "pad every sequence; cu_seqlens are then the padded offsets"
            must = f"hold lengths that 2 * cp_size ({2 * cp_size}) divides"
            raise InputError("cu_seqlens", must, cu_seqlens.diff().tolist()[:8], hint=hint)
    return cu_seqlens.shape[0] - 1


def _check_start(start: Tensor | None, freqs: Tensor, sequences: int) -> None:
    if start is None:
        return
    if not isinstance(start, Tensor) or start.dtype not in (torch.int32, torch.int64):
        got = start.dtype if isinstance(start, Tensor) else type(start).__name__
        hint = "start_positions.int()" if isinstance(start, Tensor) else "torch.tensor(start_positions)"
        raise InputError("start_positions", "be an int32 or int64 tensor", got, hint)
    check_tensor("start_positions", start)
    if start.device.type not in (freqs.device.type, "cpu"):
        must = f"be on the device of freqs ({freqs.device}) or the CPU"
        raise InputError("start_positions", must, start.device, "start_positions.to(freqs.device)")
    if tuple(start.shape) != (sequences,):
        raise InputError("start_positions", f"have one position for each of {sequences} sequences", list(start.shape))
    if freqs.shape[1] != 1:
        hint = "these freqs already differ per sequence"
        raise InputError("start_positions", "be None if freqs have a batch axis", "a tensor", hint=hint)
    if readable(start) and start.numel() and int(start.min()) < 0:
        raise InputError("start_positions", "be at least 0", int(start.min()))


def check_rows(freqs: Tensor, positions: Tensor | None, length: int) -> None:
    """Raise InputError if a position has no row in freqs. Positions on a GPU are not read."""
    if positions is not None:
        if not readable(positions):
            return
        length = int(positions.max()) + 1 if positions.numel() else 0
    if length > freqs.shape[0]:
        hint = f"RotaryPositionEmbedding(...)({length})"
        raise InputError("freqs", f"have a row for each of {length} positions", freqs.shape[0], hint=hint)


def check_pairs(rows: Tensor, interleaved: bool) -> None:
    """Raise InputError for angles of the other kind of pairs, which have the same shapes. rows: those of the tokens."""
    if not readable(rows):
        return
    one, other = (rows[..., ::2], rows[..., 1::2]) if interleaved else rows.chunk(2, -1)
    if not torch.equal(one, other):
        hint = (
            f"RotaryPositionEmbedding(..., interleaved={interleaved}), or its cos_sin, which fits both kinds of pairs"
        )
        must = f"have one angle for both channels of a pair with interleaved={interleaved}"
        raise InputError("freqs", must, "two", hint=hint)
