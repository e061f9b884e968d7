"""Rotary position embeddings: TransformerEngine's names, on any device, and the methods for longer contexts.

A head's channels are taken in pairs, and a pair at position p turns by the angle ``p * frequency(pair)``. Then q . k
depends on the distance of their positions alone. Angles, cosines and sines are fp32 at least, whatever the tensors are.

Memory traffic: three passes over a tensor (times the cosine, its pairs exchanged, plus them times the sine); autograd
keeps cosines and sines, not the tensor. The methods for longer contexts are in `scaling`.

Axes: b batch, s sequence, t packed tokens, h heads, d head size, d2 <= d the channels that turn, r = d2 / 2 pairs.
Source: Su et al. 2021, RoFormer (arXiv:2104.09864); the interface of transformer_engine.pytorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undivided import _layout
from undivided._layout import Layout
from undivided.errors import InputError
from undivided.nn.arguments.checks import checked_flag, checked_integer, checked_number
from undivided.nn.arguments.formats import checked_format
from undivided.nn.rotary import checks
from undivided.nn.rotary import scaling as methods


class RotaryPositionEmbedding(torch.nn.Module):
    """The angles of rotary position embeddings, for `apply_rotary_pos_emb` and the layers' `rotary_pos_emb`.

    ``angle[p, i] = p * rotary_base^(-2 i / dim)`` for position p and pair i.

    Args:
        dim: head size, even.
        rotary_percent: the part of the channels that turns, the first ones; the others pass unchanged.
        seq_len_interpolation_factor: positions are divided by it (linear interpolation); needs
            pretrained_max_position_embeddings, beyond whose multiple positions are divided by what the length asks for.
        pretrained_max_position_embeddings: the length that the model was trained with.
        rotary_base: of the frequencies.
        interleaved: whether channels 2 i and 2 i + 1 are a pair (GPT-J), or i and i + dim / 2 (GPT-NeoX, Llama).
        scaling: a method for longer contexts, in the words of models' configurations: ``{"rope_type": "linear",
            "factor"}``, ``"dynamic"`` (with "original_max_position_embeddings" besides), ``"yarn"`` (with "beta_fast",
            "beta_slow", "attention_factor", "mscale", "mscale_all_dim" and "truncate" as options) or ``"llama3"`` (with
            "low_freq_factor" and "high_freq_factor").
        device: of the frequencies.

    Raises:
        InputError: an argument is wrong.

    >>> rope = RotaryPositionEmbedding(64, rotary_base=500000.0)
    >>> rope(128).shape
    torch.Size([128, 1, 1, 64])
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        *,
        scaling: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        percent = checked_number("rotary_percent", rotary_percent, 1e-6, 1.0, "a number above 0 and up to 1")
        self.dim = int(checked_integer("dim", dim, 2) * percent)
        if self.dim < 2 or self.dim % 2:
            given = f"{dim}" if percent == 1.0 else f"{dim} * {percent} = {self.dim}"
            raise InputError("dim", "be an even number of channels that turn", given)
        self.rotary_base = checked_number("rotary_base", rotary_base, 1.0001, 1e30, "a number above 1")
        self.interleaved = checked_flag("interleaved", interleaved)
        if pretrained_max_position_embeddings is not None:
            checked_integer("pretrained_max_position_embeddings", pretrained_max_position_embeddings, 1)
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.scaling = methods.checked_scaling(scaling, pretrained_max_position_embeddings)
        self._check_interpolation()
        self.attention_factor = methods.attention_factor(self.scaling)
        self.register_buffer("inv_freq", self._frequencies(device))

    def _check_interpolation(self) -> None:
        if self.seq_len_interpolation_factor is None:
            return
        name = "seq_len_interpolation_factor"
        checked_number(name, self.seq_len_interpolation_factor, 1e-6, 1e9, "a positive number or None")
        if self.pretrained_max_position_embeddings is None:
            hint = "scaling={'rope_type': 'linear', 'factor': ...} needs no length"
            raise InputError(
                name, "come with pretrained_max_position_embeddings", self.seq_len_interpolation_factor, hint=hint
            )
        if self.scaling.kind != "default":
            raise InputError(
                name, "be None with scaling", self.seq_len_interpolation_factor, hint="give one of the two"
            )

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        return methods.scaled(self.scaling, self.dim, self.rotary_base, device)

    def reset_parameters(self) -> None:
        """Work the frequencies out again, as after `to_empty`."""
        self.inv_freq = self._frequencies(self.inv_freq.device)

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryPositionEmbedding:
        """Move, but never to a half type: bf16 tells no more than 256 positions apart."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.inv_freq.dtype != torch.float32:
            self.reset_parameters()
        return self

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles of positions ``offset .. offset + max_seq_len - 1``, fp32 [max_seq_len, 1, 1, dim].

        With an attention factor (YaRN), which angles cannot hold, what `cos_sin` returns. Both can be sliced and
        indexed by
        position: ``rope(4096)[positions]``.

        Args:
            max_seq_len: how many positions.
            offset: the first one.
        """
        if self.attention_factor != 1.0:
            return self.cos_sin(max_seq_len, offset)
        angles = self._angles(max_seq_len, offset)
        both = torch.stack((angles, angles), -1 if self.interleaved else -2)
        return both.flatten(1)[:, None, None]

    def cos_sin(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Cosines and sines, times the attention factor, fp32 [max_seq_len, 1, 1, 2, dim / 2].

        Wherever angles are taken this is taken as well; a model of many layers works cosines out once this way.

        Args:
            max_seq_len, offset: as in `forward`.
        """
        angles = self._angles(max_seq_len, offset)
        table = torch.stack((angles.cos(), angles.sin()), 1) * self.attention_factor
        return table[:, None, None]

    def _angles(self, max_seq_len: int, offset: int) -> Tensor:
        """[max_seq_len, dim / 2]"""
        checked_integer("max_seq_len", max_seq_len, 0)
        checked_integer("offset", offset, 0)
        inv_freq = self.inv_freq
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=inv_freq.device) + offset
        factor, trained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and trained is not None:
            positions = positions / (max_seq_len / trained if max_seq_len > trained * factor else factor)
        inv_freq = methods.of_length(self.scaling, inv_freq, self.dim, self.rotary_base, offset + max_seq_len)
        return positions[:, None] * inv_freq  # not a matmul, which autocast would round

    def extra_repr(self) -> str:
        """The arguments that make a difference."""
        parts = [f"dim={self.dim}", f"rotary_base={self.rotary_base:g}"]
        if self.interleaved:
            parts.append("interleaved=True")
        if self.scaling.kind != "default":
            parts.append(f"scaling={self.scaling.kind!r}")
        if self.seq_len_interpolation_factor is not None:
            parts.append(f"seq_len_interpolation_factor={self.seq_len_interpolation_factor}")
        return ", ".join(parts)


class Turn(NamedTuple):
    """Cosines and signed sines for every token, ready to broadcast over the heads of one format."""

    cos: Tensor
    sin: Tensor
    interleaved: bool


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
    """Turn the channel pairs of queries or keys by their positions' angles.

    ``out[i] = t[i] cos(angle) - t[j] sin(angle)`` and ``out[j] = t[j] cos(angle) + t[i] sin(angle)`` for the pair (i,
    j).

    Args:
        t: [s, b, h, d], [b, s, h, d] or [t, h, d], as `tensor_format` says.
        freqs: fp32 angles [s2, 1, 1, d2] of positions 0, 1, ... as `RotaryPositionEmbedding` gives them, [s2, b, 1, d2]
            where each sequence has its own, or its `cos_sin` [s2, 1, 1, 2, d2 / 2]. s2 covers every position, d2 <= d;
            channels from d2 on pass unchanged.
        tensor_format: "sbhd", "bshd" or "thd"; there is no default.
        start_positions: int [b], the position of each sequence's first token (in thd of each packed sequence).
        interleaved: whether pairs are channels 2 i and 2 i + 1, or i and i + d2 / 2.
        fused: a hint, without effect on the result.
        cu_seqlens: int [b + 1], where packed sequences begin (thd alone): positions count from there. The padded
            offsets, where there are any.
        cp_size, cp_rank: context parallelism: each sequence is cut in 2 * cp_size equal chunks and t holds chunks
            cp_rank and 2 * cp_size - 1 - cp_rank. cu_seqlens are those of the whole sequences.

    Returns:
        A tensor like t.

    Raises:
        InputError: shapes disagree, or a position has no row in freqs.

    Source: the interface of transformer_engine.pytorch.attention.apply_rotary_pos_emb.

    >>> q = torch.randn(2, 5, 4, 64)
    >>> apply_rotary_pos_emb(q, RotaryPositionEmbedding(64)(5), "bshd").shape
    torch.Size([2, 5, 4, 64])
    """
    checked_flag("fused", fused)
    format = checked_format(tensor_format, t, argument="tensor_format", tensor="t")
    return rotate(t, turn(t, freqs, format, start_positions, interleaved, cu_seqlens, cp_size, cp_rank))


def turn(
    t: Tensor,
    freqs: Tensor,
    format: Layout,
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Turn:
    """What `rotate` needs, once for the queries and the keys of the same tokens."""
    checks.check(t, freqs, format, start_positions, cu_seqlens, cp_size, cp_rank)
    length = _layout.sizes(t.shape, format)[1]
    positions: Tensor | None
    if format == "thd":
        assert cu_seqlens is not None
        positions = _packed_positions(length, cu_seqlens, start_positions, cp_size, cp_rank, t.device)
    else:
        positions = _dense_positions(length, start_positions, cp_size, cp_rank, t.device)
    checks.check_rows(freqs, positions, length)
    checks.check_pairs(freqs, checked_flag("interleaved", interleaved))
    rows = _rows(freqs, positions, length, format)
    cos, sin = _pairs(rows, freqs.dim() == 5, interleaved)
    axis = -1 if interleaved else -2
    return Turn(torch.stack((cos, cos), axis).flatten(-2), torch.stack((-sin, sin), axis).flatten(-2), interleaved)


def rotate(t: Tensor, by: Turn) -> Tensor:
    """t with its pairs turned, in t's dtype."""
    size = by.cos.shape[-1]
    turning, rest = (t, None) if size == t.shape[-1] else t.split((size, t.shape[-1] - size), -1)
    other = turning.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if by.interleaved else turning.roll(size // 2, -1)
    out = torch.addcmul(turning * by.cos, other, by.sin).to(t.dtype)
    return out if rest is None else torch.cat((out, rest), -1)


def _dense_positions(
    length: int, start: Tensor | None, cp_size: int, cp_rank: int, device: torch.device
) -> Tensor | None:
    """[s], or [b, s] where sequences start at their own positions; None for 0 .. s - 1."""
    if cp_size == 1 and start is None:
        return None
    positions = torch.arange(length, device=device)
    if cp_size > 1:
        positions = _on_rank(positions, length // 2, cp_size, cp_rank)
    return positions if start is None else start.to(device).long()[:, None] + positions


def _packed_positions(
    tokens: int, cu_seqlens: Tensor, start: Tensor | None, cp_size: int, cp_rank: int, device: torch.device
) -> Tensor:
    """[t]: each token's position in its own sequence; 0 behind the last sequence."""
    offsets = cu_seqlens.to(device).long() // cp_size
    token = torch.arange(tokens, device=device)
    sequence = torch.searchsorted(offsets[1:], token, right=True).clamp(max=offsets.shape[0] - 2)
    positions = token - offsets[sequence]
    if cp_size > 1:
        positions = _on_rank(positions, offsets.diff()[sequence] // 2, cp_size, cp_rank)
    if start is not None:
        positions = positions + start.to(device).long()[sequence]
    return torch.where(token < offsets[-1], positions, 0)


def _on_rank(local: Tensor, chunk: Tensor | int, cp_size: int, cp_rank: int) -> Tensor:
    """Positions of a rank's tokens: its first half is chunk cp_rank of 2 * cp_size, its second the one opposite."""
    shift = torch.where(local < chunk, cp_rank, 2 * cp_size - 2 - cp_rank)
    return local + shift * chunk


def _rows(freqs: Tensor, positions: Tensor | None, length: int, format: Layout) -> Tensor:
    """The rows of freqs for every token: [s, b | 1, 1, ..], [b | 1, s, 1, ..] or [t, 1, ..]."""
    if positions is not None and (positions.dim() == 2 or format == "thd"):
        rows = freqs[:, 0, 0][positions].unsqueeze(positions.dim())
        return rows.transpose(0, 1) if format == "sbhd" else rows
    rows = freqs[:length] if positions is None else freqs[positions]
    return rows.transpose(0, 1) if format == "bshd" else rows


def _pairs(rows: Tensor, is_table: bool, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every pair, [.., r]. The two channels of a pair share an angle."""
    if is_table:
        cos, sin = rows.unbind(-2)
        return cos, sin
    angles = rows[..., ::2] if interleaved else rows[..., : rows.shape[-1] // 2]
    return angles.cos(), angles.sin()
