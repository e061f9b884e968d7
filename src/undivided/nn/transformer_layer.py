"""`TransformerLayer`: TransformerEngine's module, its names and arguments, on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from undivided.cache import InferenceParams
from undivided.errors import InputError
from undivided.nn.arguments import hidden_states as hidden
from undivided.nn.arguments.checks import (
    LAYERS_AT_CALL,
    LAYERS_AT_CONSTRUCTION,
    TRANSFORMER_LAYER_AT_CONSTRUCTION,
    check_refused,
    checked_choice,
    checked_flag,
    checked_integer,
    checked_number,
    renamed,
)
from undivided.nn.arguments.sequences import differ
from undivided.nn.blocks.mlp import Activation, LayerNormMLP
from undivided.nn.blocks.module import Init, Module, checked_dtype, checked_init
from undivided.nn.blocks.normalization import Normalization
from undivided.nn.multihead_attention import MultiheadAttention, RotaryPosEmb, checked_norm

# What the attention modules call an argument, and what the layer calls it.
_SELF = {"qkv_format": "attn_input_format", "attn_mask_type": "self_attn_mask_type"}
_INTER = {
    "qkv_format": "attn_input_format",
    "attn_mask_type": "enc_dec_attn_mask_type",
    "attention_mask": "enc_dec_attn_mask",
    "window_size": "enc_dec_window_size",
    "bottom_right_diagonal": "enc_dec_bottom_right_diagonal",
}


class TransformerLayer(Module):
    """A layer of a transformer, with TransformerEngine's constructor and forward arguments, in their order.

    ``x = x + dropout(attention(norm(x)))``, in a "decoder" ``x = x + dropout(cross_attention(norm(x),
    encoder_output))``, then ``x = x + dropout(mlp(norm(x)))``. Every argument is described in
    docs/how-to/coming-from-transformer-engine.md.

    Axes: b batch, s sequence, t packed tokens, h query heads, g key/value heads.

    Args:
        hidden_size: features of hidden_states.
        ffn_hidden_size: features between the two maps of the feed-forward block.
        num_attention_heads, num_gqa_groups: h, and g that divides it; g is h if None.
        layernorm_epsilon: of the normalisations.
        hidden_dropout, attention_dropout: probabilities of dropping an entry of a block's output, and an attention
            weight, in training mode alone.
        init_method, output_layer_init_method: start a weight (of q, k, v and fc1; of proj and fc2); normal of 0.023 if
            None.
        layer_number: of this layer, from 1; names its cache in `inference_params`.
        kv_channels: head size, or the pair (of queries and keys, of values); hidden_size / h if None.
        self_attn_mask_type, window_size, bottom_right_diagonal: of the self-attention, as in `DotProductAttention`.
        enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal: of the cross-attention.
        params_dtype: of the parameters; torch's default if None.
        seq_length, micro_batch_size: hints, without effect.
        apply_residual_connection_post_layernorm: add a block's output to its normalised input, not to its input.
        output_layernorm: normalise the output of the layer, not the input of its self-attention (BERT).
        parallel_attention_mlp: ``x + dropout(attention(norm(x)) + mlp(norm(x)))`` (Falcon).
        layer_type: "encoder", or "decoder" with cross-attention.
        drop_path_rate: probability of leaving out self-attention or feed-forward block for a whole sequence, in
        training. fuse_qkv_params, qkv_weight_interleaved, zero_centered_gamma, normalization, rotary_pos_interleaved,
        qk_norm_type,
            qk_norm_eps, qk_norm_before_rope, softmax_type: as in `MultiheadAttention`.
        bias: of the linear maps.
        activation: "gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu" or
            "clamped_swiglu".
        activation_params: of clamped_swiglu: "limit" (7), "alpha" (1.702), "glu_linear_offset" (1).
        device: of the parameters; torch's default if None.
        attn_input_format: "sbhd" for hidden_states [s, b, hidden], "bshd" for [b, s, hidden], "thd" for [t, hidden].
            There is no default: a wrong one is not seen in the shapes.
        name: kept.
        softmax_scale, softcap, backend: beyond TransformerEngine, as in `DotProductAttention`.
        tp_group, tp_size, sequence_parallel, set_parallel_mode, get_rng_state_tracker, fuse_wgrad_accumulation, ub_*:
        accepted
            at their defaults; anything else is an error with the reason.

    Raises:
        InputError: an argument is wrong; the message names it, its value, the limit, and a repair.

    Source: the interface of transformer_engine.pytorch.TransformerLayer, and the names and shapes of its parameters.

    >>> layer = TransformerLayer(64, 128, 4, num_gqa_groups=2, activation="swiglu", normalization="RMSNorm",
    ...                          attn_input_format="bshd")
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    apply_residual_connection_post_layernorm: bool
    output_layernorm: bool
    parallel_attention_mlp: bool

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        kv_channels: int | tuple[int, int] | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Any = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str | None = None,
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        *,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        backend: str | None = None,
    ) -> None:
        given = dict(locals())
        super().__init__()
        check_refused(TRANSFORMER_LAYER_AT_CONSTRUCTION, given)
        self.attn_input_format = hidden.checked_format("attn_input_format", attn_input_format)
        self.layer_type = checked_choice("layer_type", layer_type, ("encoder", "decoder"))
        for flag in _FLAGS:
            setattr(self, flag, checked_flag(flag, given[flag]))
        self._check_parallel()
        self.hidden_dropout = checked_number("hidden_dropout", hidden_dropout, 0, 1, "a number from 0 to 1")
        self.drop_path_rate = checked_number("drop_path_rate", drop_path_rate, 0, 1, "a number from 0 to 1")
        self.name = name
        norm = checked_norm(normalization, layernorm_epsilon, zero_centered_gamma)
        dtype = checked_dtype(params_dtype)
        self.self_attention = self._attention(given, "self")
        self.layer_number = self.self_attention.layer_number
        if layer_type == "decoder":
            self.inter_attention = self._attention(given, "cross")
        self.layernorm_mlp = LayerNormMLP(
            norm,
            hidden_size,
            checked_integer("ffn_hidden_size", ffn_hidden_size, 1),
            Activation(activation, activation_params),
            checked_init("init_method", init_method),
            checked_init("output_layer_init_method", output_layer_init_method),
            bias,
            device,
            dtype,
        )
        if output_layernorm:
            self.layernorm = Normalization(norm, hidden_size, device, dtype)

    def _check_parallel(self) -> None:
        if not self.parallel_attention_mlp:
            return
        if self.layer_type != "encoder":
            raise InputError("parallel_attention_mlp", "be False in a decoder", True)
        for other in ("apply_residual_connection_post_layernorm", "output_layernorm"):
            if getattr(self, other):
                raise InputError("parallel_attention_mlp", f"be False with {other}", True)

    def _attention(self, given: Mapping[str, Any], kind: str) -> MultiheadAttention:
        """The self-attention or the cross-attention."""
        words = _SELF if kind == "self" else _INTER
        passed = {inner: given[outer] for inner, outer in words.items() if outer in given and inner != "attention_mask"}
        window = {name: given[name] for name in ("window_size", "bottom_right_diagonal")}
        arguments = {name: given[name] for name in _PASSED} | window | passed
        module: MultiheadAttention = _renaming(
            words,
            MultiheadAttention,
            **arguments,
            attention_type=kind,
            input_layernorm=kind == "cross" or not self.output_layernorm,
            return_layernorm_output=self._returns_normalised(kind),
        )
        return module

    def _returns_normalised(self, kind: str) -> bool:
        """Whether the residual of this attention is its normalised input."""
        return self.apply_residual_connection_post_layernorm and (kind == "cross" or not self.output_layernorm)

    def reset_parameters(self) -> None:
        """Start every parameter, as after `to_empty`."""
        for module in self.children():
            if isinstance(module, MultiheadAttention | LayerNormMLP | Normalization):
                module.reset_parameters()

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Tensor parallelism: only None is accepted.

        Raises:
            InputError: a group is given.
        """
        check_refused({"tp_group": LAYERS_AT_CONSTRUCTION["tp_group"]}, {"tp_group": tp_group})

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Context parallelism, as `DotProductAttention.set_context_parallel_group`."""
        for module in self.children():
            if isinstance(module, MultiheadAttention):
                module.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None,
        rotary_pos_emb: RotaryPosEmb | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> Tensor:
        """The layer. What is not given here is as at construction.

        Args:
            hidden_states: [s, b, hidden], [b, s, hidden] or [t, hidden], as `attn_input_format` says.
            attention_mask: of the self-attention, bool, True = masked out.
            encoder_output: what a decoder's cross-attention looks at, in the same format.
            enc_dec_attn_mask: of the cross-attention: a pair of padding masks, or of pairs for "arbitrary".
            self_attn_mask_type, window_size, bottom_right_diagonal, enc_dec_attn_mask_type, enc_dec_window_size,
                enc_dec_bottom_right_diagonal: as at construction.
            cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q: of hidden_states.
            cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv: of encoder_output; without it, those of hidden_states.
            is_first_microbatch: accepted at None.
            checkpoint_core_attention, inference_params, rotary_pos_emb, core_attention_bias_type, core_attention_bias,
                alibi_slopes, fast_zero_fill, pad_between_seqs: as for `MultiheadAttention`, for both of a decoder's.

        Returns:
            Like hidden_states.

        Raises:
            InputError: an argument is wrong, or two contradict each other: the format and the mask, for example.
            NoBackendError: no allowed backend can run it.
        """
        check_refused(LAYERS_AT_CALL, {"is_first_microbatch": is_first_microbatch})
        both = {
            "checkpoint_core_attention": checkpoint_core_attention,
            "inference_params": inference_params,
            "rotary_pos_emb": rotary_pos_emb,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "max_seqlen_q": max_seqlen_q,
            "fast_zero_fill": fast_zero_fill,
            "pad_between_seqs": pad_between_seqs,
        }
        if self.layer_type == "encoder":
            _check_encoder(encoder_output, enc_dec_attn_mask, cu_seqlens_q, cu_seqlens_kv)
        else:  # before the self-attention puts anything into a cache
            _renaming(_INTER, self.inter_attention.check, hidden_states, encoder_output, inference_params)
        offsets = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
        attended, residual = self._attended(
            "self",
            hidden_states,
            both,
            attention_mask=attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
        )
        if self.parallel_attention_mlp:
            fed, _ = self.layernorm_mlp(hidden_states)
            return self._added(attended + fed, hidden_states, offsets, path=True)
        x = self._added(attended, residual, offsets, path=True)
        if self.layer_type == "decoder":
            attended, residual = self._attended(
                "cross",
                x,
                both,
                attention_mask=enc_dec_attn_mask,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                encoder_output=encoder_output,
                cu_seqlens_kv=cu_seqlens_kv,
                cu_seqlens_kv_padded=cu_seqlens_kv_padded,
                max_seqlen_kv=max_seqlen_kv,
            )
            x = self._added(attended, residual, offsets, path=False)
        fed, normalised = self.layernorm_mlp(x)
        x = self._added(fed, normalised if self.apply_residual_connection_post_layernorm else x, offsets, path=True)
        return self.layernorm(x) if self.output_layernorm else x

    def _attended(self, kind: str, x: Tensor, both: Mapping[str, Any], **given: Any) -> tuple[Tensor, Tensor]:
        """The output of an attention module, and what it is added to."""
        module = self.self_attention if kind == "self" else self.inter_attention
        out = _renaming(_SELF if kind == "self" else _INTER, module, x, **both, **given)
        return out if self._returns_normalised(kind) else (out, x)

    def _added(self, out: Tensor, residual: Tensor, cu_seqlens: Tensor | None, path: bool) -> Tensor:
        """residual + dropout(out), without out for the sequences that a path drops."""
        if self.training and self.hidden_dropout:
            out = functional.dropout(out, self.hidden_dropout)
        if path and self.training and self.drop_path_rate:
            out = out * self._kept(out, cu_seqlens)
        return residual + out

    def _kept(self, out: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """1 / (1 - rate) for each sequence that is kept, 0 for the others, broadcastable to out."""
        keep = 1 - self.drop_path_rate
        count = hidden.sequences(out, self.attn_input_format, cu_seqlens)
        scale = torch.rand(count, device=out.device).lt(keep).to(out.dtype) / max(keep, 1e-30)
        if self.attn_input_format != "thd":
            return scale[None, :, None] if self.attn_input_format == "sbhd" else scale[:, None, None]
        assert cu_seqlens is not None
        ends, token = cu_seqlens[1:].to(out.device).long(), torch.arange(out.shape[0], device=out.device)
        return scale[torch.searchsorted(ends, token, right=True).clamp(max=count - 1)][:, None]

    def extra_repr(self) -> str:
        """What the parts do not say."""
        parts = [f"layer_type={self.layer_type!r}", f"attn_input_format={self.attn_input_format!r}"]
        parts += [
            f"{name}={getattr(self, name)}" for name in ("hidden_dropout", "drop_path_rate") if getattr(self, name)
        ]
        parts += [f"{flag}=True" for flag in _FLAGS if getattr(self, flag)]
        return ", ".join(parts)


_FLAGS = ("apply_residual_connection_post_layernorm", "output_layernorm", "parallel_attention_mlp")
_PASSED = (
    "hidden_size",
    "num_attention_heads",
    "num_gqa_groups",
    "kv_channels",
    "attention_dropout",
    "layernorm_epsilon",
    "init_method",
    "output_layer_init_method",
    "layer_number",
    "params_dtype",
    "fuse_qkv_params",
    "zero_centered_gamma",
    "qkv_weight_interleaved",
    "rotary_pos_interleaved",
    "bias",
    "normalization",
    "device",
    "qk_norm_type",
    "qk_norm_eps",
    "qk_norm_before_rope",
    "seq_length",
    "micro_batch_size",
    "softmax_type",
    "softmax_scale",
    "softcap",
    "backend",
)


def _renaming(names: Mapping[str, str], function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except InputError as error:
        raise renamed(error, names) from None


def _check_encoder(encoder: object, mask: object, cu_seqlens_q: Tensor | None, cu_seqlens_kv: Tensor | None) -> None:
    """An encoder has no cross-attention, and nothing that is given for one may go unnoticed."""
    hint = "layer_type='decoder' at construction has cross-attention"
    for name, value in (("encoder_output", encoder), ("enc_dec_attn_mask", mask)):
        if value is not None:
            raise InputError(name, "be None with layer_type='encoder'", type(value).__name__, hint=hint)
    if cu_seqlens_kv is not None and (cu_seqlens_q is None or differ(cu_seqlens_q, cu_seqlens_kv)):
        must = "be that of the queries, or None, with layer_type='encoder'"
        raise InputError("cu_seqlens_kv", must, f"a tensor {list(cu_seqlens_kv.shape)}", hint=hint)
