"""The attentions of a `TransformerLayer`: which arguments of the layer, and of its call, each of them receives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from undivided.cache import InferenceParams
from undivided.nn.arguments.error_names import CROSS_ATTENTION, SELF_ATTENTION, call_with_names
from undivided.nn.arguments.mask_types import checked_mask_type
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
    renamed = {
        inner: arguments[outer] for inner, outer in names.items() if outer in arguments and inner != "attention_mask"
    }
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


class MaskOfCall(NamedTuple):
    """An attention, and the arguments of a call that decide its mask."""

    attention: MultiheadAttention
    attn_mask_type: str | None
    attention_mask: object

    def needs_offsets(self) -> bool:
        """Whether the real lengths of sequences come from cu_seqlens."""
        kind = checked_mask_type(self.attention.attn_mask_type if self.attn_mask_type is None else self.attn_mask_type)
        return self.attention.qkv_format == "thd" or (kind.padding and self.attention_mask is None)


def offsets_of_queries(
    cu_seqlens_q: Tensor | None, of_self: MaskOfCall, of_cross: MaskOfCall, params: InferenceParams | None
) -> tuple[Tensor | None, Tensor | None]:
    """cu_seqlens_q for the self-attention and the cross-attention of a decoder.

    An attention whose mask needs no lengths refuses them, so it gets none if the other attention needs them, or a cache
    compares them with its step. If nothing needs them, both get and refuse them.
    """
    by_self = call_with_names(SELF_ATTENTION, of_self.needs_offsets) or params is not None
    by_cross = call_with_names(CROSS_ATTENTION, of_cross.needs_offsets)
    return cu_seqlens_q if by_self or not by_cross else None, cu_seqlens_q if by_cross or not by_self else None
