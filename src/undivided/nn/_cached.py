"""Attention over the cache of `InferenceParams`: the mask, and the checks of other arguments.

New tokens are the last ones of their sequences, so causal masks and windows are aligned bottom-right, as in
TransformerEngine, and the mask type of the training works unchanged. The lengths come from the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undivided.arguments.checks import as_integer
from undivided.arguments.graphs import outside_of_graphs
from undivided.arguments.layout import Layout
from undivided.arguments.tensors import is_autocast, readable
from undivided.cache import InferenceParams
from undivided.cache._layer_caches import check_caller, note_caller
from undivided.context_parallel import ContextParallel
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.nn.arguments import sequences
from undivided.nn.arguments.checks import checked_optional_flag
from undivided.nn.arguments.formats import QKV, with_length
from undivided.nn.arguments.mask_types import (
    MaskType,
    Window,
    band,
    checked_mask_type,
    checked_window,
    normalise_window,
)
from undivided.nn.arguments.sequences import SequenceArguments
from undivided.nn.blocks.rank_calls import attending
from undivided.nn.rotary.checks import check_rows


def checked_params(params: object) -> InferenceParams | None:
    """The cache or None; InputError for another type."""
    if params is not None and not isinstance(params, InferenceParams):
        raise InputError("inference_params", "be an undivided.InferenceParams", type(params).__name__)
    return params


def check_cross_attention(
    params: InferenceParams | None,
    cp: ContextParallel | None,
    own_mask_type: str,
    own_window: Window | None,
    mask_type: str | None,
    window_size: object,
    bias_type: object,
) -> None:
    """InputError if cross-attention with a cache has a context group, or a mask that depends on query positions.

    A step has only some of the queries. A diagonal that ends bottom-right depends on their final number, which is not
    known during generation.

    Args:
        params, cp: the cache and the context group, if any.
        own_mask_type, own_window: mask type and window of the layer, which apply if the call has none.
        mask_type, window_size, bias_type: those of the call.
    """
    if params is None:
        return
    if cp is not None:
        must = "be None for cross-attention with a context group: ranks hold parts of its keys, but whole steps"
        raise InputError("inference_params", must, "a cache", hint="a decoder without set_context_parallel_group")
    kind = checked_mask_type(mask_type, own_mask_type)
    window = checked_window(own_window if window_size is None else window_size)
    must = "not depend on the positions of the queries in cross-attention with inference_params"
    hint = "'no_mask', 'padding' or 'arbitrary', with window_size=(-1, -1), or whole sequences without inference_params"
    if kind.causal:
        raise InputError("attn_mask_type", must, repr(kind.name), hint=hint)
    if normalise_window(kind, window) != (-1, -1):
        raise InputError("window_size", must, window, hint=hint)
    if bias_type == "alibi":
        raise InputError("core_attention_bias_type", must, repr(bias_type), hint="'no_bias'")


def check_ranks(params: InferenceParams, cp: ContextParallel | None) -> None:
    """InputError unless the pages of the cache are on the ranks of the layer's context group."""
    own = params.context_parallel
    if cp is None and own is not None:
        must = f"be a cache of one process for a layer without a context group, or one of {own.world} ranks with it"
        hint = "set_context_parallel_group(cp) with the ContextParallel of the cache"
        raise InputError("inference_params", must, f"a cache over {own.world} ranks", hint=hint)
    if cp is not None and own is None:
        hint = "InferenceParams(..., is_paged=True, page_size=64, context_parallel=cp)"
        must = f"have its pages on the {cp.world} ranks of the layer's context group"
        raise InputError("inference_params", must, "a cache of one process", hint=hint)
    if cp is not None and cp is not own and _ranks(cp) != _ranks(own):
        must = f"have its pages on the ranks of the layer's context group, {_ranks(cp)}"
        raise InputError("inference_params", must, _ranks(own))


def _ranks(cp: ContextParallel) -> str:
    """This rank's place in a context, and the processes of its groups."""
    return f"rank {cp.rank} of {cp.world}, processes {cp.process_groups()}"


@outside_of_graphs
def with_cached_keys(inputs: QKV, params: InferenceParams) -> QKV:
    """The inputs with the number of keys of the longest cached sequence, and the new tokens of all ranks."""
    inputs = inputs._replace(cached=max(params.sequences.values(), default=0))
    if (length := params.sharded_length) is None:
        return inputs
    return inputs._replace(q=with_length(inputs.q, length, inputs.format))


def rows_of_positions(freqs: Tensor, positions: Tensor, format: Layout) -> Tensor:
    """The rows of freqs for tokens at these positions, as freqs whose rows are the tokens.

    Args:
        freqs: angles of all positions, [s, 1, 1, ..].
        positions: [b, tokens], in "thd" [tokens].
    """
    if freqs.shape[1] != 1:
        raise InputError("freqs", "have 1 at axis 1 in a sharded step", list(freqs.shape))
    check_rows(freqs, positions, 0)
    rows = freqs[:, 0, 0][positions.to(freqs.device)]
    return rows[:, None, None] if format == "thd" else rows.transpose(0, 1).unsqueeze(2)


def mask(
    arguments: SequenceArguments,
    kind: MaskType,
    inputs: QKV,
    window: Window | None,
    bottom_right: bool | None,
    params: InferenceParams,
) -> Mask:
    """The mask of the new tokens and the cached keys."""
    _check_offsets(arguments, params)
    if any(hint is not None for hint in arguments.hints()):
        _check_hints(arguments, inputs, params)
    if kind.bottom_right is None and bottom_right is False:
        hint = "new tokens are the last of their sequences"
        raise InputError("bottom_right_diagonal", "not be False with inference_params", False, hint=hint)
    diagonal = band(kind._replace(bottom_right=True), window, None)
    if kind.name == "arbitrary":
        return diagonal & sequences.arbitrary_mask(arguments.attention_mask, inputs)
    if arguments.attention_mask is not None:
        hint = "inference_params.pre_step sets the number of real tokens; for other masks, attn_mask_type='arbitrary'"
        raise InputError("attention_mask", "be None with inference_params", "a tensor", hint=hint)
    return diagonal


@outside_of_graphs
def attend(params: InferenceParams, layer: Any, inputs: QKV, mask: Mask, options: dict[str, Any]) -> Tensor:
    """The attention of the new tokens of a layer, which has the attribute `layer_number`, over its cache."""
    q, k, v, format = inputs.q, inputs.k, inputs.v, inputs.format
    if params.context_parallel is None and torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        must = "be used without gradients (a cache has no backward)"
        hint = "call under torch.no_grad() or torch.inference_mode()"
        raise InputError("inference_params", must, "keys and values that require gradients", hint=hint)
    if k.dtype != params.dtype and not is_autocast(k.device):
        must = f"have the dtype of the layer's keys ({k.dtype})"
        raise InputError("inference_params", must, params.dtype, hint=f"InferenceParams(..., dtype={k.dtype})")
    check_caller(params, layer.layer_number, layer)
    with attending(params.context_parallel):
        out = params.attend(layer.layer_number, q, k, v, format, mask=mask, **options)
    note_caller(params, layer.layer_number, layer)
    assert isinstance(out, Tensor)
    return out


def _check_offsets(arguments: SequenceArguments, params: InferenceParams) -> None:
    """Raise InputError for offsets that differ from the lengths of the cache."""
    for name, offsets in arguments.offsets().items():
        sequences.check_offsets(name, offsets)
        step_offsets = [params.cu_seqlens_q]
        if "_kv" in name:  # of the new keys, or of these and the cached ones
            step_offsets.append(params.cu_seqlens_kv)
        if readable(offsets) and not any(_same_offsets(offsets, expected) for expected in step_offsets):
            hint = f"pre_step received {params.cu_seqlens_q.diff().tolist()[: params.batch_size]} new tokens"
            raise InputError(name, "be those of inference_params, or None", offsets.tolist()[:8], hint=hint)


@outside_of_graphs
def _check_hints(arguments: SequenceArguments, inputs: QKV, params: InferenceParams) -> None:
    """Raise InputError for maximum lengths and a padding flag that contradict the cache."""
    before, after = params.sequences_pre_step, params.sequences
    new = max((after[name] - before[name] for name in before), default=0)
    for name, longest, what in (
        ("max_seqlen_q", new, "new tokens"),
        ("max_seqlen_kv", inputs.kv_len(), "cached tokens"),
    ):
        value = getattr(arguments, name)
        if value is not None and as_integer(name, value, 0) < longest and inputs.packed():
            raise InputError(name, f"be at least the {what} of the longest sequence ({longest})", value)
    if checked_optional_flag("pad_between_seqs", arguments.pad_between_seqs) and inputs.packed():
        hint = "new tokens of the sequences of a step are packed without padding"
        raise InputError("pad_between_seqs", "be False or None with inference_params", True, hint=hint)


def _same_offsets(offsets: Tensor, step_offsets: Tensor) -> bool:
    """Whether offsets agree; a batch that is not full repeats its last offset."""
    a, b = offsets.long(), step_offsets.cpu().long()
    longest = max(a.shape[0], b.shape[0])
    a, b = (torch.cat((t, t[-1:].expand(longest - t.shape[0]))) for t in (a, b))
    return torch.equal(a, b)
