"""The attentions of a `TransformerLayer`: which arguments of the layer, and of its call, each of them receives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undivided.cache import InferenceParams
from undivided.nn.arguments import hidden_states as hidden
from undivided.nn.arguments.error_names import CROSS_ATTENTION, SELF_ATTENTION, call_with_names
from undivided.nn.arguments.mask_types import check_mask_options, checked_mask_type
from undivided.nn.multihead_attention import MultiheadAttention

_SHARED_ARGUMENTS = """
    hidden_size num_attention_heads num_gqa_groups kv_channels attention_dropout layernorm_epsilon init_method
    output_layer_init_method layer_number params_dtype fuse_qkv_params zero_centered_gamma
    qkv_weight_interleaved rotary_pos_interleaved bias normalization device qk_norm_type qk_norm_eps
    qk_norm_before_rope seq_length micro_batch_size softmax_type softmax_scale softcap backend
    tp_group tp_size get_rng_state_tracker sequence_parallel set_parallel_mode
""".split()  # passed on to MultiheadAttention unchanged


def attention_of_layer(
    arguments: Mapping[str, Any], kind: str, input_layernorm: bool, return_layernorm_output: bool
) -> MultiheadAttention:
    """A new module for self-attention or cross-attention.

    Args:
        arguments: those of the layer.
        kind: "self" or "cross".
        input_layernorm, return_layernorm_output: as in `MultiheadAttention`.
    """
    names = SELF_ATTENTION if kind == "self" else CROSS_ATTENTION
    # the names that are not in the arguments are those of a call
    renamed = {inner: arguments[outer] for inner, outer in names.items() if outer in arguments}
    window = {name: arguments[name] for name in ("window_size", "bottom_right_diagonal")}
    shared = {name: arguments[name] for name in _SHARED_ARGUMENTS} | window | renamed
    module: MultiheadAttention = call_with_names(
        names,
        MultiheadAttention,
        **shared,
        attention_type=kind,
        input_layernorm=input_layernorm,
        return_layernorm_output=return_layernorm_output,
    )
    return module


class AttentionArguments(NamedTuple):
    """The arguments of a call of a layer, by the attention that receives them.

    shared: those of both attentions.
    self_only, cross_only: those of the self-attention and of the cross-attention.
    document_offsets: the offsets of the documents in hidden_states, with padding if there is any; None if not given.
    """

    shared: Mapping[str, Any]
    self_only: Mapping[str, Any]
    cross_only: Mapping[str, Any]
    document_offsets: Tensor | None


def attention_arguments(
    self_attention: MultiheadAttention,
    cross_attention: MultiheadAttention | None,
    hidden_states: Tensor,
    cu_seqlens_q: Tensor | None,
    shared: Mapping[str, Any],
    self_only: Mapping[str, Any],
    cross_only: Mapping[str, Any],
) -> AttentionArguments:
    """The arguments of each attention, with cu_seqlens_q for those that take it.

    Args:
        self_attention, cross_attention: of the layer; an encoder has no cross-attention (None), and its self-attention
            receives the padded offsets and the greatest length of the keys.
        hidden_states, cu_seqlens_q: of the call.
        shared, self_only, cross_only: the other arguments of the call.

    Raises:
        InputError: an argument of the cross-attention is wrong.
    """
    padded, params = shared["cu_seqlens_q_padded"], shared["inference_params"]
    mask_type, window = cross_only["attn_mask_type"], cross_only["window_size"]
    encoder_output, mask = cross_only["encoder_output"], cross_only["attention_mask"]
    if cross_attention is None:
        hidden.check_no_cross_attention(encoder_output, mask, cu_seqlens_q, cross_only["cu_seqlens_kv"])
        diagonal = cross_only["bottom_right_diagonal"]
        call_with_names(CROSS_ATTENTION, check_mask_options, mask_type, window, diagonal)
        key_arguments = {name: cross_only[name] for name in ("cu_seqlens_kv_padded", "max_seqlen_kv")}
        padded = key_arguments["cu_seqlens_kv_padded"] if padded is None else padded
        self_only, cross_only = {**self_only, **key_arguments, "cu_seqlens_q": cu_seqlens_q}, {}
    else:  # before self-attention changes a cache
        call_with_names(
            CROSS_ATTENTION,
            cross_attention.check,
            hidden_states,
            encoder_output,
            params,
            mask_type,
            window,
            bias_type=shared["core_attention_bias_type"],
        )
        own_mask = MaskOfCall(self_attention, self_only["attn_mask_type"], self_only["attention_mask"])
        cross_mask = MaskOfCall(cross_attention, mask_type, mask)
        own_offsets, cross_offsets = offsets_of_queries(
            cu_seqlens_q, own_mask, cross_mask, params, hidden_states.device
        )
        self_only = {**self_only, "cu_seqlens_q": own_offsets}
        cross_only = {**cross_only, "cu_seqlens_q": cross_offsets}
    return AttentionArguments(shared, self_only, cross_only, cu_seqlens_q if padded is None else padded)


class MaskOfCall(NamedTuple):
    """An attention, and the arguments of a call that decide its mask."""

    attention: MultiheadAttention
    attn_mask_type: str | None
    attention_mask: object

    def needs_offsets(self) -> bool:
        """Whether the real lengths of sequences come from cu_seqlens."""
        kind = checked_mask_type(self.attn_mask_type, self.attention.attn_mask_type)
        return self.attention.qkv_format == "thd" or (kind.padding and self.attention_mask is None)


def offsets_of_queries(
    cu_seqlens_q: Tensor | None,
    own_mask: MaskOfCall,
    cross_mask: MaskOfCall,
    params: InferenceParams | None,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None]:
    """cu_seqlens_q for the self-attention and the cross-attention of a decoder.

    An attention whose mask needs no lengths refuses them. So it gets None if only the other attention needs them. If
    neither does, both get them and refuse them. With a cache the self-attention compares them with the step, and the
    cross-attention gets those of the step, which the caller may omit: the cache's have an entry for each sequence that
    it may hold.
    """
    self_needs = call_with_names(SELF_ATTENTION, own_mask.needs_offsets) or params is not None
    cross_needs = call_with_names(CROSS_ATTENTION, cross_mask.needs_offsets)
    if params is not None and cross_needs:
        return cu_seqlens_q, params.cu_seqlens_q[: params.batch_size + 1].to(device)
    if self_needs == cross_needs:
        return cu_seqlens_q, cu_seqlens_q
    return (cu_seqlens_q, None) if self_needs else (None, cu_seqlens_q)
