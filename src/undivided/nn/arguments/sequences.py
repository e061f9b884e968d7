"""Masks of real tokens and sequences, from attention_mask or cu_seqlens.

In thd, cu_seqlens are the offsets of packed sequences; in sbhd and bshd, the cumulative lengths of the batch elements.
In attention_mask, True means masked out, the opposite of `masks.dense`.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from undivided import masks
from undivided.arguments.checks import as_integer, check_tensor
from undivided.arguments.shapes import broadcast_hint, broadcasts
from undivided.arguments.tensors import readable
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.masks._kept import TensorMasks
from undivided.nn.arguments.checks import checked_optional_flag
from undivided.nn.arguments.formats import QKV
from undivided.nn.arguments.mask_types import MaskType

_OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


class SequenceArguments(NamedTuple):
    """The arguments of a call that describe sequences. pad_between_seqs None: cu_seqlens_*_padded decide."""

    attention_mask: Tensor | tuple[Tensor, Tensor] | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    pad_between_seqs: bool | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors among the arguments."""
        mask = self.attention_mask if isinstance(self.attention_mask, tuple | list) else (self.attention_mask,)
        return tuple(t for t in (*mask, *self.offsets().values()) if isinstance(t, Tensor))

    def offsets(self) -> dict[str, Tensor]:
        """The cu_seqlens arguments that are not None, by name."""
        offsets = {name: getattr(self, name) for name in _OFFSETS}
        return {name: value for name, value in offsets.items() if value is not None}

    def hints(self) -> tuple[int | None, int | None, bool | None]:
        """(max_seqlen_q, max_seqlen_kv, pad_between_seqs), which follow from the offsets too."""
        return self.max_seqlen_q, self.max_seqlen_kv, self.pad_between_seqs

    def offsets_in_memory(self) -> tuple[Tensor | None, Tensor | None]:
        """(of queries, of keys): where packed sequences lie, which differs from cu_seqlens if there is padding."""
        q = self.cu_seqlens_q if self.cu_seqlens_q_padded is None else self.cu_seqlens_q_padded
        kv = self.cu_seqlens_kv if self.cu_seqlens_kv_padded is None else self.cu_seqlens_kv_padded
        return q, kv


def check(arguments: SequenceArguments, kind: MaskType, inputs: QKV, attention_type: str) -> None:
    """Raise InputError if the mask type and the format do not use an argument, or need one that is missing."""
    if inputs.packed() and not kind.padding:
        padded = {"no_mask": "padding", "arbitrary": "padding"}.get(kind.name, f"padding_{kind.name}")
        hint = f"attn_mask_type={padded!r} separates packed sequences; without padding it equals {kind.name!r}"
        raise InputError("attn_mask_type", "be a padding type with qkv_format='thd'", repr(kind.name), hint=hint)
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        if (value := getattr(arguments, name)) is not None:
            as_integer(name, value, 0)
    checked_optional_flag("pad_between_seqs", arguments.pad_between_seqs)
    for name, offsets in arguments.offsets().items():
        check_offsets(name, offsets)
    if kind.name != "arbitrary" and not kind.padding and arguments.attention_mask is not None:
        must = f"be None with attn_mask_type={kind.name!r}, which does not use it"
        hint = (
            f"leave it out for {kind.name!r} alone, as TransformerEngine ignores it; attn_mask_type='padding', "
            "'padding_causal', ... or 'arbitrary' uses it"
        )
        raise InputError("attention_mask", must, _describe(arguments.attention_mask), hint=hint)
    _check_padding_of_offsets(arguments, inputs)
    if inputs.packed():
        _check_packed(arguments, inputs, attention_type)
    elif arguments.offsets() and not kind.padding:
        _refuse_offsets(arguments, kind, inputs)


def check_offsets(name: str, offsets: object) -> None:
    """Raise InputError unless cumulative lengths have the right type and shape."""
    if not isinstance(offsets, Tensor):
        hint = "torch.tensor([...], dtype=torch.int32)"
        raise InputError(name, "be an int32 or int64 tensor", type(offsets).__name__, hint=hint)
    if offsets.dtype not in (torch.int32, torch.int64):
        raise InputError(name, "be int32 or int64", offsets.dtype, hint=f"{name}.to(torch.int32)")
    if offsets.dim() != 1 or not offsets.numel():
        hint = "sequences of 3 and 2 tokens are [0, 3, 5]"
        raise InputError(name, "have one axis of (number of sequences + 1) offsets", list(offsets.shape), hint=hint)


def _refuse_offsets(arguments: SequenceArguments, kind: MaskType, inputs: QKV) -> None:
    """Raise InputError for offsets that the mask type does not use, as sequences would attend to each other."""
    name = next(iter(arguments.offsets()))
    masked = f"padding_{kind.name}" if kind.causal else "padding"
    raise InputError(
        name,
        f"be None with attn_mask_type={kind.name!r} in qkv_format={inputs.format!r}, which does not use it",
        _describe(arguments.offsets()[name]),
        hint=f"for the lengths of the batch elements attn_mask_type={masked!r}; for sequences packed into one row "
        f"qkv_format='thd' with attn_mask_type={masked!r} and tensors [tokens, heads, head_dim]",
    )


def _check_padding_of_offsets(arguments: SequenceArguments, inputs: QKV) -> None:
    padded = {name: offsets for name, offsets in arguments.offsets().items() if name.endswith("_padded")}
    if padded and not inputs.packed():
        name = next(iter(padded))
        hint = "in sbhd and bshd every batch element starts a row; cu_seqlens_q has its length"
        raise InputError(name, f"be None in qkv_format={inputs.format!r}", _describe(padded[name]), hint=hint)
    if arguments.pad_between_seqs and inputs.packed() and not padded:
        hint = "cu_seqlens_q_padded are the offsets of sequences in memory; cu_seqlens_q only their lengths"
        raise InputError("pad_between_seqs", "be given with cu_seqlens_q_padded", True, hint=hint)


def _check_packed(arguments: SequenceArguments, inputs: QKV, attention_type: str) -> None:
    if arguments.attention_mask is not None:
        hint = "cu_seqlens_q defines the sequences; for other conditions, undivided.attention(mask=)"
        must = "be None in qkv_format='thd'"
        raise InputError("attention_mask", must, _describe(arguments.attention_mask), hint=hint)
    hint = "cumulative lengths: three sequences of 300, 800 and 1248 tokens are [0, 300, 1100, 2348], int32"
    if arguments.cu_seqlens_q is None:
        raise InputError("cu_seqlens_q", "be given in qkv_format='thd'", None, hint=hint)
    if arguments.cu_seqlens_kv is None and (attention_type == "cross" or inputs.q_len() != inputs.kv_len()):
        raise InputError("cu_seqlens_kv", "be given if keys are not packed as the queries", None, hint=hint)
    if arguments.pad_between_seqs is False:
        for side in ("q", "kv"):
            real, padded = getattr(arguments, f"cu_seqlens_{side}"), getattr(arguments, f"cu_seqlens_{side}_padded")
            if differ(real, padded):
                must = f"not be False if cu_seqlens_{side}_padded differs from cu_seqlens_{side}"
                raise InputError("pad_between_seqs", must, False, hint="omit it: the offsets decide")


def differ(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether the values are known to differ, without waiting for a device."""
    if a is None or b is None or a is b or torch.compiler.is_compiling():
        return False
    return a.device.type == b.device.type == "cpu" and not torch.equal(a.long(), b.long())


_recent: TensorMasks[Mask] = TensorMasks(8)
"""All layers of a model receive the same tensors."""


def mask(arguments: SequenceArguments, kind: MaskType, inputs: QKV, attention_type: str, diagonal: Mask) -> Mask:
    """`diagonal`, restricted to the real tokens of each sequence and to the pairs of an arbitrary mask."""

    def build() -> Mask:
        sequences = _sequence_mask(arguments, kind, inputs, attention_type)
        return diagonal if sequences is None else diagonal & sequences

    if not kind.padding and kind.name != "arbitrary":
        return build()
    key = (
        tuple(t is not None for t in arguments),
        arguments.hints(),
        kind.name,
        attention_type,
        inputs.format,
        inputs.q.shape,
        inputs.k.shape,
        diagonal.align,
        diagonal.band,
    )
    return _recent.get(key, arguments.tensors(), build)


def _sequence_mask(arguments: SequenceArguments, kind: MaskType, inputs: QKV, attention_type: str) -> Mask | None:
    """The mask of real tokens and sequences; None if the mask type has neither."""
    if inputs.packed():
        return _packed_mask(arguments)
    if kind.name == "arbitrary":
        return arbitrary_mask(arguments.attention_mask, inputs)
    if not kind.padding:
        return None
    if arguments.attention_mask is not None and arguments.offsets():
        must = f"be None if {next(iter(arguments.offsets()))} is given"
        raise InputError("attention_mask", must, _describe(arguments.attention_mask), hint="pass one of the two")
    if arguments.offsets():
        return _lengths_mask(arguments, inputs, attention_type)
    return _padding_mask(arguments.attention_mask, inputs, kind, attention_type)


def _packed_mask(arguments: SequenceArguments) -> Mask:
    """The mask of packed documents. Arguments of the queries also serve the keys if those have none."""
    q, kv = arguments.cu_seqlens_q, arguments.cu_seqlens_kv
    assert q is not None
    padded_q, padded_kv = arguments.cu_seqlens_q_padded, arguments.cu_seqlens_kv_padded
    max_q, max_kv = arguments.max_seqlen_q, arguments.max_seqlen_kv
    if kv is None or kv is q:
        kv, max_kv = q, max_q if max_kv is None else max_kv
        padded_q = padded_kv if padded_q is None else padded_q
        padded_kv = padded_q if padded_kv is None else padded_kv
    return masks.documents(q, kv, padded_q, padded_kv, max_q, max_kv)


def _lengths_mask(arguments: SequenceArguments, inputs: QKV, attention_type: str) -> Mask:
    """The mask of the lengths of batch elements, from their cumulative sums."""
    q, kv = arguments.cu_seqlens_q, arguments.cu_seqlens_kv
    if q is None:
        raise InputError("cu_seqlens_q", "be given with cu_seqlens_kv", None)
    if kv is None and (attention_type == "cross" or inputs.q_len() != inputs.kv_len()):
        case = "for cross-attention" if attention_type == "cross" else "if keys and queries differ in length"
        raise InputError("cu_seqlens_kv", f"be given {case}", None)
    for name, offsets in arguments.offsets().items():
        if offsets.shape[0] != inputs.batch() + 1:
            count = offsets.shape[0] - 1
            hint = inputs.other_format_hint(count)
            if hint is None and inputs.batch() == 1:
                hint = "sequences packed into one row are qkv_format='thd': tensors [tokens, heads, head_dim]"
            must = f"have {inputs.batch() + 1} offsets for a batch of {inputs.batch()} in qkv_format={inputs.format!r}"
            raise InputError(name, must, offsets.shape[0], hint=hint)
        if readable(offsets):
            _check_lengths(name, offsets.tolist(), inputs.kv_len() if name == "cu_seqlens_kv" else inputs.q_len())
    n = q.diff()
    return masks.lengths(n if kv is None or kv is q else kv.diff(), n)


def _check_lengths(name: str, offsets: list[int], limit: int) -> None:
    """Raise InputError unless offsets start at 0, never decrease, and no sequence is longer than its row."""
    lengths = [stop - start for start, stop in itertools.pairwise(offsets)]
    if offsets[0] != 0 or min(lengths, default=0) < 0:
        hint = "batch elements of 3 and 2 tokens are [0, 3, 5]"
        raise InputError(name, "start at 0 and never decrease", offsets[:8], hint=hint)
    longest = max(lengths, default=0)
    if longest > limit:
        hint = "the differences of its entries are the lengths of the batch elements, without padding"
        raise InputError(name, f"have at most {limit} tokens per batch element, the length of a row", longest, hint)


def _padding_mask(attention_mask: object, inputs: QKV, kind: MaskType, attention_type: str) -> Mask:
    """The mask of real tokens, from one boolean padding mask or a pair for queries and keys."""
    if attention_mask is None:
        must = f"be given (or cu_seqlens_q) with attn_mask_type={kind.name!r}"
        hint = f"without padding, use {kind.name.removeprefix('padding_').replace('padding', 'no_mask')!r}"
        raise InputError("attention_mask", must, None, hint=hint)
    if isinstance(attention_mask, tuple | list):
        if len(attention_mask) != 2:
            must = "be a tensor, or a pair for the queries and the keys"
            raise InputError("attention_mask", must, f"{len(attention_mask)} tensors")
        q = _real_tokens("attention_mask[0]", attention_mask[0], inputs, inputs.q_len())
        if attention_mask[1] is attention_mask[0]:
            return _mask_of_real_tokens(q, q)
        return _mask_of_real_tokens(q, _real_tokens("attention_mask[1]", attention_mask[1], inputs, inputs.kv_len()))
    if attention_type == "cross" or inputs.q_len() != inputs.kv_len():
        case = "in cross-attention" if attention_type == "cross" else "if their lengths differ"
        must = f"be a pair for the queries and the keys {case}"
        hint = "attention_mask=(mask_q [b, 1, 1, sq], mask_kv [b, 1, 1, skv])"
        raise InputError("attention_mask", must, _describe(attention_mask), hint=hint)
    real = _real_tokens("attention_mask", attention_mask, inputs, inputs.q_len())
    return _mask_of_real_tokens(real, real)


def _real_tokens(name: str, mask: object, inputs: QKV, length: int) -> Tensor:
    """Real tokens from a padding mask [b, 1, 1, length], bool [b, length]."""
    mask = _boolean(name, mask)
    if tuple(mask.shape) != (inputs.batch(), 1, 1, length):
        hint = inputs.other_format_hint(mask.shape[0])
        if mask.dim() == 2 and tuple(mask.shape) == (inputs.batch(), length):
            hint = f"{name}[:, None, None, :]"
        elif mask.dim() == 4 and mask.shape[2] == inputs.q_len() > 1:
            hint = "for a mask of pairs, attn_mask_type='arbitrary'"
        must = f"have shape [batch, 1, 1, length] = [{inputs.batch()}, 1, 1, {length}]"
        raise InputError(name, must, list(mask.shape), hint=hint)
    return ~mask[:, 0, 0]


def _mask_of_real_tokens(q: Tensor, kv: Tensor) -> Mask:
    """The mask of real queries and keys.

    Positions count from the first real token of a row to the last one; padding in between keeps its place and is
    masked. Only tensor operations are used, so that nothing waits for a GPU.
    """
    q_start, q_length = _span(q)
    kv_start, kv_length = (q_start, q_length) if kv is q else _span(kv)
    if readable(q, kv) and not any(_has_holes(real, n) for real, n in ((q, q_length), (kv, kv_length))):
        if not q_start.any() and not kv_start.any():
            return masks.lengths(kv_length, q_length)
        return masks.lengths(kv_length, q_length, kv_start, q_start)
    ids = -(~q).int()
    return masks.lengths(kv_length, q_length, kv_start, q_start) & masks.document_ids(
        ids, ids if kv is q else -(~kv).int()
    )


def _span(real: Tensor) -> tuple[Tensor, Tensor]:
    """First real token and number of tokens up to the last one of each row, int32 [b]; 0 and 0 if there is none."""
    if not real.shape[1]:
        zero = real.new_zeros(real.shape[0], dtype=torch.int32)
        return zero, zero
    some = real.any(1)
    start = real.int().argmax(1).int()
    stop = (real.shape[1] - real.int().flip(1).argmax(1).int()) * some
    return start, stop - start


def _has_holes(real: Tensor, length: Tensor) -> bool:
    return not torch.equal(real.sum(1).int(), length)


def arbitrary_mask(attention_mask: object, inputs: QKV) -> Mask:
    """The mask of an attention_mask that holds pairs."""
    if attention_mask is None:
        must = "be given with attn_mask_type='arbitrary'"
        raise InputError("attention_mask", must, None, "bool, True = masked out, broadcastable to [b, h, sq, skv]")
    if isinstance(attention_mask, tuple | list):
        must = "be one tensor with attn_mask_type='arbitrary'"
        raise InputError("attention_mask", must, "a pair", "for a pair of padding masks, attn_mask_type='padding'")
    tensor = _boolean("attention_mask", attention_mask)
    sizes = (inputs.batch(), inputs.q.shape[-2], inputs.q_len(), inputs.kv_len())
    if tensor.dim() not in (2, 4) or not broadcasts(tensor.shape, sizes):
        hint = "attention_mask[:, None] for [b, sq, skv]" if tensor.dim() == 3 else None
        hint = hint or inputs.other_format_hint(tensor.shape[0])
        hint = hint or broadcast_hint(tensor.shape, sizes, "attention_mask{}")
        must = f"be broadcastable to [b, h, sq, skv] = {list(sizes)}"
        raise InputError("attention_mask", must, list(tensor.shape), hint=hint)
    return masks.dense(~tensor)


def _boolean(name: str, mask: object) -> Tensor:
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        check_tensor(name, mask)
        return mask
    if not isinstance(mask, Tensor):
        raise InputError(name, "be a bool tensor, True = masked out", type(mask).__name__)
    hint = "integers: mask.bool() if 1 is masked out, ~mask.bool() if 1 is attended to"
    if mask.is_floating_point():
        hint = "numbers to add are core_attention_bias, with core_attention_bias_type='post_scale_bias'"
    raise InputError(name, "be bool, True = masked out", mask.dtype, hint=hint)


def _describe(value: object) -> str:
    if isinstance(value, Tensor) and not value.is_nested:
        return f"a tensor {list(value.shape)}"
    return f"a {type(value).__name__}"
