"""Hidden states of the layers: their format, checked against all other arguments of a call.

    sbhd  [s, b, hidden]    bshd  [b, s, hidden]    thd  [t, hidden], packed sequences

The format is always given and never guessed. A [b, s, hidden] tensor that is passed as "sbhd" has legal shapes
throughout a layer. So every argument that implies a number of sequences or a length is compared with the format:
cu_seqlens, masks, a cache, the output of the encoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from undivided.arguments.checks import check_tensor
from undivided.arguments.graphs import outside_of_graphs
from undivided.arguments.layout import Layout
from undivided.arguments.tensors import is_autocast
from undivided.cache import InferenceParams
from undivided.errors import InputError
from undivided.nn.arguments.formats import FORMATS, OTHER_FORMAT, format_named
from undivided.nn.arguments.sequences import check_offsets, differ

_FORMAT_HINT = (
    "look at hidden_states.shape: 'bshd' if it is [batch, seq, hidden], the batch size first (PyTorch's batch_first); "
    "'sbhd' if it is [seq, batch, hidden] (Megatron's order, and TransformerEngine's default); "
    "'thd' if it is [tokens, hidden], packed sequences, with cu_seqlens_q"
)
_AXES = {"sbhd": "[seq, batch, hidden]", "bshd": "[batch, seq, hidden]", "thd": "[tokens, hidden]"}


class HiddenSizes(NamedTuple):
    """Batch size and length of hidden states in one format."""

    batch: int
    length: int


class Evidence(NamedTuple):
    """The number of sequences and the length that an argument implies; None if it implies none."""

    name: str
    batch: int | None = None
    length: int | None = None

    def fits(self, sizes: HiddenSizes) -> bool:
        """Whether these sizes agree with the evidence."""
        fits_batch = self.batch is None or self.batch == sizes.batch
        return fits_batch and (self.length is None or self.length == sizes.length)

    def __str__(self) -> str:
        parts = ((self.batch, "sequences"), (self.length, "tokens each"))
        return f"{self.name} ({', '.join(f'{n} {what}' for n, what in parts if n is not None)})"


def checked_layer_format(argument: str, value: object) -> Layout:
    """The format of a layer's hidden states; InputError unless it was given."""
    if (format := format_named(value)) is not None:
        return format
    choices = ", ".join(map(repr, FORMATS))
    if value is not None:
        raise InputError(argument, f"be one of {choices}", repr(value), hint=_FORMAT_HINT)
    raise InputError(argument, f"be given (there is no default): one of {choices}", None, hint=_FORMAT_HINT)


def check(name: str, x: object, hidden_size: int, format: Layout, like: Tensor) -> None:
    """Raise InputError if axes, features, device or dtype are wrong. `like` is a parameter of the layer."""
    if x is None:
        raise InputError(name, "be a torch.Tensor", None)
    check_tensor(name, x)
    assert isinstance(x, Tensor)
    axes = 2 if format == "thd" else 3
    if x.dim() != axes:
        must = f"have {axes} axes {_AXES[format]} in qkv_format={format!r}"
        raise InputError(name, must, list(x.shape), hint=_axes_hint(x))
    if x.shape[-1] != hidden_size:
        raise InputError(name, f"have hidden_size ({hidden_size}) features", f"{x.shape[-1]} in {list(x.shape)}")
    if not x.is_floating_point():
        raise InputError(name, "be a floating-point tensor", x.dtype, f"{name}.to({like.dtype})")
    mesh = getattr(like, "device_mesh", None)  # FSDP keeps shards elsewhere while they are not used
    if x.device != like.device and (mesh is None or x.device.type != mesh.device_type):
        hint = f"{name}.to({str(like.device)!r}), or the layer.to({str(x.device)!r})"
        if like.is_meta:
            hint = (
                "the parameters have no memory: load them into layer.to_empty(device=...). accelerate loads a "
                "whole layer with preload_module_classes=['TransformerLayer', 'MultiheadAttention']"
            )
        raise InputError(name, f"be on the parameters' device ({like.device})", x.device, hint=hint)
    is_sharded = type(like) is not torch.nn.Parameter  # FSDP's shards have another dtype than the weight of a call
    if x.dtype != like.dtype and not is_sharded and not is_autocast(x.device):
        hint = f"{name}.to({like.dtype}), the layer.to({x.dtype}), or torch.autocast"
        raise InputError(name, f"have the parameters' dtype ({like.dtype})", x.dtype, hint=hint)


def _axes_hint(x: Tensor) -> str | None:
    """What hidden states with another number of axes may be."""
    if x.dim() == 3:
        return (
            "a batch of one is packed as x.squeeze(), [tokens, hidden]"
            if 1 in x.shape[:2]
            else "a padded batch is 'bshd' or 'sbhd' with a padding mask type"
        )
    if x.dim() == 2:
        return "packed sequences are 'thd', with cu_seqlens_q; one sequence alone is x[None] in 'bshd'"
    return None


def sizes(x: Tensor, format: Layout) -> HiddenSizes:
    """Batch size and length of hidden states that are not packed."""
    return HiddenSizes(x.shape[1], x.shape[0]) if format == "sbhd" else HiddenSizes(x.shape[0], x.shape[1])


def sequence_count(x: Tensor, format: Layout, cu_seqlens: Tensor | None) -> int:
    """The number of sequences."""
    if format != "thd":
        return sizes(x, format).batch
    assert cu_seqlens is not None
    return cu_seqlens.shape[0] - 1


def check_evidence(x: Tensor, format: Layout, implied: Iterator[Evidence], params: InferenceParams | None) -> None:
    """Raise InputError if an argument contradicts the format and fits the other one, or x is not that of the step.

    Other checks report what else fits neither format.
    """
    if format != "thd":
        here, there = sizes(x, format), sizes(x, OTHER_FORMAT[format])
        for evidence in implied:
            if not evidence.fits(here) and evidence.fits(there):
                hint = f"pre_step with {here.batch} sequences, or " if evidence.name == "inference_params" else ""
                raise _swapped(x, format, str(evidence), hint)
    if params is not None:
        _check_step(x, format, params)


@outside_of_graphs
def _check_step(x: Tensor, format: Layout, params: InferenceParams) -> None:
    """Raise InputError unless hidden states have the sequences and tokens that `pre_step` announced."""
    before, after = params.sequences_pre_step, params.sequences
    counts = [after[name] - before[name] for name in before]
    if not counts:
        return  # the cache reports it
    if format == "thd":
        if x.shape[0] != sum(counts):
            hint = f"padding of a step is left out: hidden_states[:{sum(counts)}]" if x.shape[0] > sum(counts) else None
            must = f"have the {sum(counts)} tokens that pre_step announced"
            raise InputError("hidden_states", must, x.shape[0], hint)
        return
    batch, length = sizes(x, format)
    if batch != len(counts):
        hint = "a sequence without new tokens, or an idle row, has 0 in pre_step" if batch > len(counts) else None
        raise InputError("hidden_states", f"have the {len(counts)} sequences that pre_step announced", batch, hint)
    if length < max(counts):
        must = f"have the {max(counts)} tokens per sequence that pre_step announced"
        raise InputError("hidden_states", must, length)


def check_encoder_output(x: Tensor, encoder: object, hidden_size: int, format: Layout, like: Tensor) -> None:
    """Raise InputError unless an encoder output is as `check` requires, with as many sequences as hidden states x."""
    check("encoder_output", encoder, hidden_size, format, like)
    assert isinstance(encoder, Tensor)
    if format == "thd" or sizes(x, format).batch == sizes(encoder, format).batch:
        return
    other = OTHER_FORMAT[format]
    if sizes(x, other).batch == sizes(encoder, other).batch:
        raise _swapped(x, format, f"encoder_output {list(encoder.shape)}")
    batch = sizes(x, format).batch
    hint = "encoder_output.transpose(0, 1)" if encoder.shape[0 if format == "sbhd" else 1] == batch else None
    must = f"have the batch size of hidden_states ({batch}) in qkv_format={format!r}"
    raise InputError("encoder_output", must, list(encoder.shape), hint=hint)


def check_no_encoder_output(encoder: object) -> None:
    """Raise InputError for an encoder output, which self-attention does not have."""
    if encoder is None:
        return
    got = f"a tensor {list(encoder.shape)}" if isinstance(encoder, Tensor) else type(encoder).__name__
    hint = (
        "MultiheadAttention projects hidden_states itself: mha(x), or attention_type='cross' at construction; for "
        "given q, k, v use DotProductAttention"
    )
    raise InputError("encoder_output", "be None with attention_type='self'", got, hint)


def check_no_cross_attention(
    encoder: object, mask: object, cu_seqlens_q: Tensor | None, cu_seqlens_kv: Tensor | None
) -> None:
    """Raise InputError for arguments of a cross-attention, which an encoder does not have."""
    hint = "layer_type='decoder' at construction has cross-attention"
    for name, value in (("encoder_output", encoder), ("enc_dec_attn_mask", mask)):
        if value is not None:
            raise InputError(name, "be None with layer_type='encoder'", type(value).__name__, hint=hint)
    if cu_seqlens_kv is not None:
        check_tensor("cu_seqlens_kv", cu_seqlens_kv)
    if cu_seqlens_kv is not None and (cu_seqlens_q is None or differ(cu_seqlens_q, cu_seqlens_kv)):
        must = "be cu_seqlens_q or None with layer_type='encoder'"
        raise InputError("cu_seqlens_kv", must, f"a tensor {list(cu_seqlens_kv.shape)}", hint=hint)


def padded_offsets(
    is_cross: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    padded_q: Tensor | None,
    padded_kv: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """cu_seqlens_q_padded and cu_seqlens_kv_padded of packed sequences, each from the other arguments if it is None.

    In self-attention both are those of hidden_states. In cross-attention a side without padded offsets has no padding.
    """
    if padded_q is None and padded_kv is None:
        return None, None
    if is_cross:
        return cu_seqlens_q if padded_q is None else padded_q, cu_seqlens_kv if padded_kv is None else padded_kv
    if padded_q is not None and padded_kv is not None:
        check_offsets("cu_seqlens_q_padded", padded_q)
        check_offsets("cu_seqlens_kv_padded", padded_kv)
        if differ(padded_q, padded_kv):
            must = "be cu_seqlens_q_padded or None in self-attention, whose queries and keys lie together"
            raise InputError("cu_seqlens_kv_padded", must, f"a tensor {list(padded_kv.shape)} with other values")
    own = padded_kv if padded_q is None else padded_q
    return own, own


def _swapped(x: Tensor, format: Layout, evidence: str, hint: str = "") -> InputError:
    batch, length = sizes(x, format)
    other = OTHER_FORMAT[format]
    must = f"agree with {evidence}: in {format!r} hidden_states {list(x.shape)} are {batch} sequences of {length}"
    hint = f"{hint}qkv_format={other!r}, {_AXES[other]}, would fit; or hidden_states.transpose(0, 1)"
    return InputError("qkv_format", must, repr(format), hint)


def evidence_of_call(
    mask: object,
    padding: bool,
    bias: object,
    cu_seqlens_q: object,
    cu_seqlens_kv: object,
    params: InferenceParams | None,
) -> Iterator[Evidence]:
    """What each argument of a call implies about the sizes of hidden states. padding: of the mask type."""
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        # one entry more than sequences; with a cache, one more than its largest batch
        if params is None and isinstance(offsets, Tensor) and offsets.dim() == 1 and offsets.numel():
            yield Evidence(name, offsets.shape[0] - 1)
    if isinstance(mask, tuple | list) and mask:
        mask = mask[0]
    # [b, 1, 1, s], or of pairs [b | 1, h | 1, sq | 1, skv]
    if isinstance(mask, Tensor) and not mask.is_nested and mask.dim() == 4:
        batch, _, queries, keys = (n if n != 1 else None for n in mask.shape)
        yield Evidence("attention_mask", batch, keys if padding else queries)
    if isinstance(bias, Tensor) and not bias.is_nested and bias.dim() == 4:  # [b | 1, h | 1, sq | 1, skv]
        batch, _, queries, _ = (n if n != 1 else None for n in bias.shape)
        yield Evidence("core_attention_bias", batch, queries)
    if params is not None and params.batch_size:
        yield Evidence("inference_params", params.batch_size)
