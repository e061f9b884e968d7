"""`RotaryPositionEmbedding`: the angles of rotary position embeddings.

A pair of channels at position p is rotated by the angle ``p * frequency(pair)``, so that q . k depends on the distance
of the positions only. Angles, cosines and sines are at least fp32. `scaling` has the methods for longer contexts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from undivided.arguments.checks import as_integer, checked_flag
from undivided.errors import InputError
from undivided.nn.arguments.checks import checked_device, checked_number
from undivided.nn.rotary import scaling as methods


class RotaryPositionEmbedding(torch.nn.Module):
    """The angles of rotary position embeddings, for `apply_rotary_pos_emb` and `rotary_pos_emb` of the layers.

    ``angle[p, i] = p * rotary_base^(-2 i / dim)`` for position p and pair i.

    Args:
        dim: head size, even.
        rotary_percent: share of the channels that are rotated, the first ones; the others pass unchanged.
        seq_len_interpolation_factor: positions are divided by this factor (linear interpolation), or by
            (offset + max_seq_len) / pretrained_max_position_embeddings if that is larger; TransformerEngine leaves the
            offset out. Requires pretrained_max_position_embeddings.
        pretrained_max_position_embeddings: sequence length of the training, in tokens.
        rotary_base: base of the frequencies.
        interleaved: whether channels 2 i and 2 i + 1 are a pair (GPT-J), or i and i + dim / 2 (GPT-NeoX, Llama).
        scaling: a method for longer contexts, with the keys of a model's config.json: ``{"rope_type": "linear",
            "factor": ...}``; ``"dynamic"`` also needs "original_max_position_embeddings"; ``"yarn"`` needs the same,
            with the options "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim" and "truncate";
            ``"llama3"`` also needs "low_freq_factor" and "high_freq_factor"; ``"longrope"`` needs
            "original_max_position_embeddings", "short_factor", "long_factor" (a number per pair each), and "factor" or
            "attention_factor". A call that reaches beyond the original length has the long factors at all positions.
            ``"proportional"`` has the options "partial_rotary_factor", the share of the pairs that are rotated, and
            "factor".
        device: device of the frequencies.

    Raises:
        InputError: an argument is wrong.

    Source: Su et al. 2021, RoFormer (arXiv:2104.09864); the interface of transformer_engine.pytorch.

    >>> rope = RotaryPositionEmbedding(64, rotary_base=500000.0)
    >>> rope(128).shape
    torch.Size([128, 1, 1, 64])
    """

    inv_freq: Tensor
    long_inv_freq: Tensor | None  # of calls beyond the original length, with "longrope"

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
        self.dim = int(as_integer("dim", dim, 2) * percent)
        if self.dim < 2 or self.dim % 2:
            size = f"{dim}" if percent == 1.0 else f"{dim} * {percent} = {self.dim}"
            raise InputError("dim", "be an even number of rotated channels", size)
        self.rotary_base = checked_number("rotary_base", rotary_base, 1.0001, 1e30, "a number above 1")
        self.interleaved = checked_flag("interleaved", interleaved)
        if pretrained_max_position_embeddings is not None:
            as_integer("pretrained_max_position_embeddings", pretrained_max_position_embeddings, 1)
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.scaling = methods.checked_scaling(scaling, pretrained_max_position_embeddings, self.dim)
        self._check_interpolation()
        self.attention_factor = methods.attention_factor(self.scaling)
        inv_freq, long_inv_freq = self._frequencies(checked_device(device))
        self.register_buffer("inv_freq", inv_freq)
        self.register_buffer("long_inv_freq", long_inv_freq, persistent=False)

    def _check_interpolation(self) -> None:
        if self.seq_len_interpolation_factor is None:
            return
        name = "seq_len_interpolation_factor"
        checked_number(name, self.seq_len_interpolation_factor, 1e-6, 1e9, "a positive number or None")
        if self.pretrained_max_position_embeddings is None:
            hint = "scaling={'rope_type': 'linear', 'factor': ...} needs no length"
            must = "be given with pretrained_max_position_embeddings"
            raise InputError(name, must, self.seq_len_interpolation_factor, hint=hint)
        if self.scaling.kind != "default":
            hint = "pass one of the two"
            raise InputError(name, "be None with scaling", self.seq_len_interpolation_factor, hint=hint)

    def _frequencies(self, device: torch.device | str | None) -> tuple[Tensor, Tensor | None]:
        arguments = (self.scaling, self.dim, self.rotary_base, device)
        return methods.scaled_frequencies(*arguments), methods.long_frequencies(*arguments)

    def reset_parameters(self) -> None:
        """Compute the frequencies again, for example after `to_empty`."""
        self.inv_freq, self.long_inv_freq = self._frequencies(self.inv_freq.device)

    def _apply(self, fn: Any, recurse: bool = True) -> RotaryPositionEmbedding:
        """Move the frequencies, but keep them fp32: bf16 distinguishes only 256 positions. Without values, on the meta
        device, they are computed."""
        before, before_long = self.inv_freq, self.long_inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before.is_meta:
            self.reset_parameters()
        elif self.inv_freq.dtype != torch.float32:
            self.inv_freq = before.to(self.inv_freq.device)  # which may be loaded ones, of another base
            self.long_inv_freq = None if before_long is None else before_long.to(self.inv_freq.device)
        return self

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """The angles of positions ``offset .. offset + max_seq_len - 1``.

        With an attention factor (YaRN), which angles cannot express, the result of `cos_sin`. Both results can be
        sliced and indexed by position: ``rope(4096)[positions]``.

        Args:
            max_seq_len: number of positions, int.
            offset: first position, int.

        Returns:
            fp32 [max_seq_len, 1, 1, dim].

        Raises:
            InputError: an argument is not an int of at least 0.
        """
        if self.attention_factor != 1.0:
            return self.cos_sin(max_seq_len, offset)
        angles = self._angles(max_seq_len, offset)
        both = torch.stack((angles, angles), -1 if self.interleaved else -2)
        return both.flatten(1)[:, None, None]

    def cos_sin(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """The cosines and sines of the angles, times the attention factor.

        Accepted wherever angles are; a model with many layers computes the cosines once this way.

        Args:
            max_seq_len, offset: as in `forward`.

        Returns:
            fp32 [max_seq_len, 1, 1, 2, dim / 2].

        Raises:
            InputError: an argument is not an int of at least 0.
        """
        angles = self._angles(max_seq_len, offset)
        table = torch.stack((angles.cos(), angles.sin()), 1) * self.attention_factor
        return table[:, None, None]

    def _angles(self, max_seq_len: int, offset: int) -> Tensor:
        """The angle of each position and pair, fp32 [max_seq_len, dim / 2]."""
        as_integer("max_seq_len", max_seq_len, 0)
        as_integer("offset", offset, 0)
        length = offset + max_seq_len
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=self.inv_freq.device) + offset
        factor, trained = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and trained is not None:
            positions = positions / (length / trained if length > trained * factor else factor)
        frequencies = (self.inv_freq, self.long_inv_freq)
        inv_freq = methods.frequencies_for_length(self.scaling, *frequencies, self.dim, self.rotary_base, length)
        return positions[:, None] * inv_freq  # not a matmul, which autocast rounds

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults, for `repr`."""
        parts = [f"dim={self.dim}", f"rotary_base={self.rotary_base:g}"]
        if self.interleaved:
            parts.append("interleaved=True")
        if self.scaling.kind != "default":
            parts.append(f"scaling={self.scaling.kind!r}")
        if self.seq_len_interpolation_factor is not None:
            parts.append(f"seq_len_interpolation_factor={self.seq_len_interpolation_factor}")
        return ", ".join(parts)
