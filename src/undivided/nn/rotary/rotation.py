"""`apply_rotary_pos_emb`: the rotation of queries and keys.

Memory traffic: three passes over a tensor (times the cosine, exchange of its pairs, plus these times the sine).
Autograd saves cosines and sines, not the tensor.

Axes: b batch, s sequence, t packed tokens, h heads, d head size, d2 <= d rotated channels, r = d2 / 2 pairs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.arguments.checks import checked_flag
from undivided.arguments.layout import Layout
from undivided.arguments.signature import checked_call
from undivided.nn.arguments.formats import checked_format
from undivided.nn.arguments.other_names import NAMES_OF_ROTATION
from undivided.nn.rotary import checks


class Rotation(NamedTuple):
    """Cosines and signed sines per token, which broadcast over the heads in one format."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


@functools.partial(checked_call, other_names=NAMES_OF_ROTATION)
def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str | None = None,
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Queries or keys with their channel pairs rotated by the angles of their positions.

    ``out[i] = t[i] cos(angle) - t[j] sin(angle)`` and ``out[j] = t[j] cos(angle) + t[i] sin(angle)`` for the pair (i,
    j).

    Args:
        t: [s, b, h, d], [b, s, h, d] or [t, h, d], depending on `tensor_format`.
        freqs: fp32 angles of positions 0, 1, ...: [s2, 1, 1, d2] from `RotaryPositionEmbedding`, [s2, b, 1, d2] with
            angles per sequence, or [s2, 1, 1, 2, d2 / 2] from `cos_sin`. s2 covers every position; d2 <= d, and the
            channels from d2 on pass unchanged.
        tensor_format: "sbhd", "bshd" or "thd". Required.
        start_positions: position of each sequence's first token, int [b] (thd: of each packed sequence).
        interleaved: whether pairs are channels 2 i and 2 i + 1, or i and i + d2 / 2.
        fused: a hint, without effect on the result.
        cu_seqlens: offsets of packed sequences, int [b + 1], thd only; padded offsets if there are any. Positions
            count from each offset.
        cp_size, cp_rank: context parallelism: each sequence is divided into 2 * cp_size equal chunks, and t holds
            chunks cp_rank and 2 * cp_size - 1 - cp_rank. cu_seqlens describe the whole sequences.

    Returns:
        A tensor with the shape and dtype of t.

    Raises:
        InputError: shapes disagree, or a position has no row in freqs.

    Source: the interface of transformer_engine.pytorch.attention.apply_rotary_pos_emb.

    >>> from undivided.nn import RotaryPositionEmbedding
    >>> q = torch.randn(2, 5, 4, 64)
    >>> apply_rotary_pos_emb(q, RotaryPositionEmbedding(64)(5), "bshd").shape
    torch.Size([2, 5, 4, 64])
    """
    checked_flag("fused", fused)
    format = checked_format(tensor_format, t, argument="tensor_format", tensor="t")
    return rotate(t, compute_rotation(t, freqs, format, start_positions, interleaved, cu_seqlens, cp_size, cp_rank))


def compute_rotation(
    t: Tensor,
    freqs: Tensor,
    format: Layout,
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Rotation:
    """The rotation for the tokens of t; queries and keys of the same tokens can share it."""
    checks.check(t, freqs, format, start_positions, cu_seqlens, cp_size, cp_rank)
    length = layout.sizes(t.shape, format)[1]
    positions: Tensor | None
    if format == "thd":
        assert cu_seqlens is not None
        positions = _packed_positions(length, cu_seqlens, start_positions, cp_size, cp_rank, t.device)
    else:
        positions = _dense_positions(length, start_positions, cp_size, cp_rank, t.device)
    checks.check_rows(freqs, positions, length)
    checked_flag("interleaved", interleaved)
    rows, is_table = _rows(freqs, positions, length, format), freqs.dim() == 5
    if not is_table:
        checks.check_pairs(rows, interleaved)
    cos, sin = _pairs(rows, is_table, interleaved)
    axis = -1 if interleaved else -2
    return Rotation(torch.stack((cos, cos), axis).flatten(-2), torch.stack((-sin, sin), axis).flatten(-2), interleaved)


def rotate(t: Tensor, rotation: Rotation) -> Tensor:
    """t with its pairs rotated, in the dtype of t."""
    size = rotation.cos.shape[-1]
    rotated, rest = (t, None) if size == t.shape[-1] else t.split((size, t.shape[-1] - size), -1)
    other = rotated.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if rotation.interleaved else rotated.roll(size // 2, -1)
    out = torch.addcmul(rotated * rotation.cos, other, rotation.sin).to(t.dtype)
    return out if rest is None else torch.cat((out, rest), -1)


def _dense_positions(
    length: int, start: Tensor | None, cp_size: int, cp_rank: int, device: torch.device
) -> Tensor | None:
    """The position of each token, [s], or [b, s] if sequences have start positions; None for 0 .. s - 1."""
    if cp_size == 1 and start is None:
        return None
    positions = torch.arange(length, device=device)
    if cp_size > 1:
        positions = _rank_positions(positions, length // 2, cp_size, cp_rank)
    return positions if start is None else start.to(device).long()[:, None] + positions


def _packed_positions(
    tokens: int, cu_seqlens: Tensor, start: Tensor | None, cp_size: int, cp_rank: int, device: torch.device
) -> Tensor:
    """The position of each token in its sequence, [t]; 0 after the last sequence."""
    offsets = cu_seqlens.to(device).long() // cp_size
    token = torch.arange(tokens, device=device)
    sequence = torch.searchsorted(offsets[1:], token, right=True).clamp(max=offsets.shape[0] - 2)
    positions = token - offsets[sequence]
    if cp_size > 1:
        positions = _rank_positions(positions, offsets.diff()[sequence] // 2, cp_size, cp_rank)
    if start is not None:
        positions = positions + start.to(device).long()[sequence]
    return torch.where(token < offsets[-1], positions, 0)


def _rank_positions(local: Tensor, chunk: Tensor | int, cp_size: int, cp_rank: int) -> Tensor:
    """Positions of a rank's tokens: the first half is chunk cp_rank of 2 * cp_size, the second the opposite chunk."""
    shift = torch.where(local < chunk, cp_rank, 2 * cp_size - 2 - cp_rank)
    return local + shift * chunk


def _rows(freqs: Tensor, positions: Tensor | None, length: int, format: Layout) -> Tensor:
    """The row of freqs for each token: [s, b | 1, 1, ..], [b | 1, s, 1, ..] or [t, 1, ..]."""
    if positions is not None and (positions.dim() == 2 or format == "thd"):
        rows = freqs[:, 0, 0][positions].unsqueeze(positions.dim())
        return rows.transpose(0, 1) if format == "sbhd" else rows
    rows = freqs[:length] if positions is None else freqs[positions]
    return rows.transpose(0, 1) if format == "bshd" else rows


def _pairs(rows: Tensor, is_table: bool, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each pair, [.., r]. The two channels of a pair share an angle."""
    if is_table:
        cos, sin = rows.unbind(-2)
        return cos, sin
    angles = rows[..., ::2] if interleaved else rows[..., : rows.shape[-1] // 2]
    return angles.cos(), angles.sin()
