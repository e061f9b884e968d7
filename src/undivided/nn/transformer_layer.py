"""`TransformerLayer`: TransformerEngine's module, with its names and arguments, on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from undivided.arguments.checks import as_integer, checked_choice, checked_flag
from undivided.cache import InferenceParams
from undivided.errors import InputError
from undivided.nn._layer_attentions import attention_arguments, attention_of_layer
from undivided.nn.arguments import hidden_states as hidden
from undivided.nn.arguments.checks import check_names, checked_number
from undivided.nn.arguments.error_names import CROSS_ATTENTION, SELF_ATTENTION, call_with_names
from undivided.nn.arguments.mask_types import check_mask_options
from undivided.nn.arguments.refused import OVERLAPS, TRANSFORMER_LAYER_AT_CONSTRUCTION, check_refused
from undivided.nn.arguments.tensor_parallel import checked_tensor_arguments
from undivided.nn.blocks.divided import DividedModule
from undivided.nn.blocks.drop_path import drop_path_scale
from undivided.nn.blocks.initial_weights import Init
from undivided.nn.blocks.inner_attribute import InnerAttribute
from undivided.nn.blocks.mlp import Activation, LayerNormMLP
from undivided.nn.blocks.module import checked_dtype, checked_init
from undivided.nn.blocks.normalization import Normalization, checked_norm
from undivided.nn.blocks.rank_calls import on_all_ranks
from undivided.nn.blocks.residual import output_and_residual
from undivided.nn.multihead_attention import MultiheadAttention
from undivided.nn.rotary.in_attention import RotaryPosEmb

_FLAGS = ("apply_residual_connection_post_layernorm", "output_layernorm", "parallel_attention_mlp")
"""Arguments that become attributes of the same name."""


class TransformerLayer(DividedModule):
    """A transformer layer, with the constructor and forward arguments of TransformerEngine, in their order.

    ``x = x + dropout(attention(norm(x)))``; in a "decoder", ``x = x + dropout(cross_attention(norm(x),
    encoder_output))``; then ``x = x + dropout(mlp(norm(x)))``. docs/how-to/coming-from-transformer-engine.md describes
    every argument.

    Axes: b batch, s sequence, t packed tokens, h query heads, g key/value heads.

    Args:
        hidden_size: features of hidden_states.
        ffn_hidden_size: features between the two maps of the feed-forward block.
        num_attention_heads, num_gqa_groups: h, and its divisor g; g is h if None.
        layernorm_epsilon: epsilon of the normalisations.
        hidden_dropout, attention_dropout: probabilities of dropping an entry of a block's output, and an attention
            weight, in training mode only.
        init_method, output_layer_init_method: functions that initialise the weights of q, k, v and fc1, and of proj and
            fc2. None: normal distribution with standard deviation 0.023.
        layer_number: number of the layer, from 1, under which `inference_params` caches its keys and values.
        kv_channels: head size, or the pair (queries and keys, values); hidden_size / h if None.
        self_attn_mask_type, window_size, bottom_right_diagonal: of the self-attention, as in `DotProductAttention`.
        enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal: of the cross-attention.
        params_dtype: dtype of the parameters; torch's default if None.
        seq_length, micro_batch_size: hints, without effect.
        apply_residual_connection_post_layernorm: whether residuals are normalised inputs of the blocks.
        output_layernorm: whether to normalise the output of the layer instead of the input of its self-attention
            (BERT).
        parallel_attention_mlp: whether to compute ``x + dropout(attention(norm(x)) + mlp(norm(x)))`` (Falcon).
        layer_type: "encoder", or "decoder" with cross-attention.
        drop_path_rate: probability of omitting the self-attention or the feed-forward block for a whole sequence, in
            training mode only.
        fuse_qkv_params, qkv_weight_interleaved, zero_centered_gamma, normalization, rotary_pos_interleaved,
            qk_norm_type, qk_norm_eps, qk_norm_before_rope, softmax_type: as in `MultiheadAttention`.
        bias: whether the linear maps have biases.
        activation: "gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu" or
            "clamped_swiglu".
        activation_params: of clamped_swiglu: "limit" (default 7), "alpha" (1.702) and "glu_linear_offset" (1).
        device: device of the parameters; torch's default if None.
        attn_input_format: "sbhd" for hidden_states [s, b, hidden], "bshd" for [b, s, hidden], "thd" for [t, hidden].
            Required, because shapes do not reveal a wrong format.
        name: stored unchanged.
        softmax_scale, softcap, backend: beyond TransformerEngine, as in `DotProductAttention`.
        tp_group, tp_size, set_parallel_mode, sequence_parallel, get_rng_state_tracker: tensor parallel ranks, as in
            `MultiheadAttention`. hidden_dropout is that of one process with rank 0's generator state, which is sent.
        fuse_wgrad_accumulation, ub_tp_comm_overlap: accepted at their defaults only; another value is an error with the
            reason.
        ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad: hints, without effect.

    Raises:
        InputError: an argument is wrong. The message has its name, its value, the limit and a fix.

    Source: the interface of transformer_engine.pytorch.TransformerLayer, and the names and shapes of its parameters.

    >>> import torch
    >>> layer = TransformerLayer(64, 128, 4, num_gqa_groups=2, activation="swiglu", normalization="RMSNorm",
    ...                          attn_input_format="bshd")
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    apply_residual_connection_post_layernorm: bool
    output_layernorm: bool
    parallel_attention_mlp: bool
    layer_number = InnerAttribute("self_attention", "layer_number")
    self_attn_mask_type = InnerAttribute("self_attention", "attn_mask_type")
    window_size = InnerAttribute("self_attention", "window_size")
    bottom_right_diagonal = InnerAttribute("self_attention", "bottom_right_diagonal")
    enc_dec_attn_mask_type = InnerAttribute("inter_attention", "attn_mask_type")
    enc_dec_window_size = InnerAttribute("inter_attention", "window_size")
    enc_dec_bottom_right_diagonal = InnerAttribute("inter_attention", "bottom_right_diagonal")

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
        arguments = dict(locals())
        super().__init__()
        check_refused(TRANSFORMER_LAYER_AT_CONSTRUCTION, arguments)
        for hint in OVERLAPS:
            checked_flag(hint, arguments[hint])
        self.attn_input_format = hidden.checked_layer_format("attn_input_format", attn_input_format)
        self.layer_type = checked_choice("layer_type", layer_type, ("encoder", "decoder"))
        for flag in _FLAGS:
            setattr(self, flag, checked_flag(flag, arguments[flag]))
        self._check_parallel()
        self.tensor_parallel = checked_tensor_arguments(
            tp_group, tp_size, sequence_parallel, get_rng_state_tracker, self.attn_input_format, set_parallel_mode
        )
        self.hidden_dropout = checked_number("hidden_dropout", hidden_dropout, 0, 1, "a number from 0 to 1")
        self.drop_path_rate = checked_number("drop_path_rate", drop_path_rate, 0, 1, "a number from 0 to 1")
        check_names(name, backend)
        self.name = name
        norm = checked_norm(normalization, layernorm_epsilon, zero_centered_gamma)
        dtype = checked_dtype(params_dtype)
        normalises = not self.output_layernorm
        self.self_attention = attention_of_layer(arguments, "self", normalises, self._returns_normalised("self"))
        options = enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal
        call_with_names(CROSS_ATTENTION, check_mask_options, *options)
        if layer_type == "decoder":
            self.inter_attention = attention_of_layer(arguments, "cross", True, self._returns_normalised("cross"))
        ffn_size = as_integer("ffn_hidden_size", ffn_hidden_size, 1)
        self.layernorm_mlp = LayerNormMLP(
            norm,
            hidden_size,
            self.tensor_parallel.own_features("ffn_hidden_size", ffn_size),
            Activation(activation, activation_params),
            self.tensor_parallel.divided_init(checked_init("init_method", init_method)),
            self.tensor_parallel.divided_init(checked_init("output_layer_init_method", output_layer_init_method)),
            bias,
            device,
            dtype,
        )
        if output_layernorm:
            self.layernorm = Normalization(norm, hidden_size, device, dtype)
        self.set_tensor_parallel_group(tp_group)

    def _check_parallel(self) -> None:
        if not self.parallel_attention_mlp:
            return
        if self.layer_type != "encoder":
            raise InputError("parallel_attention_mlp", "be False in a decoder", True)
        for other in ("apply_residual_connection_post_layernorm", "output_layernorm"):
            if getattr(self, other):
                raise InputError("parallel_attention_mlp", f"be False with {other}", True)

    def _returns_normalised(self, kind: str) -> bool:
        """Whether the residual of this attention is its normalised input."""
        return self.apply_residual_connection_post_layernorm and (kind == "cross" or not self.output_layernorm)

    def reset_parameters(self) -> None:
        """Initialise every parameter, for example after `to_empty`."""
        for module in self.children():
            if isinstance(module, MultiheadAttention | LayerNormMLP | Normalization):
                module.reset_parameters()

    def _set_ranks_of_blocks(self, tp_group: Any, check: bool) -> None:
        ranks = self.tensor_parallel.ranks
        self.layernorm_mlp.ranks = ranks
        if self.output_layernorm:  # without sequence parallelism, its gradients are the same on all ranks
            self.layernorm.ranks = ranks if ranks is not None and ranks.sequence_axis is not None else None
        for module in self.children():
            if isinstance(module, MultiheadAttention):
                module.set_tensor_parallel_group(tp_group, check)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Distribute sequences over ranks, as `DotProductAttention.set_context_parallel_group`.

        Args:
            cp_group, cp_global_ranks, cp_stream, cp_comm_type: as there.
        """
        for module in self.children():
            if isinstance(module, MultiheadAttention):
                module.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    @on_all_ranks
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
        """The output of the layer. Arguments that are None have their values from the constructor.

        Args:
            hidden_states: [s, b, hidden], [b, s, hidden] or [t, hidden], depending on `attn_input_format`.
            attention_mask: mask of the self-attention, bool, True = masked out.
            encoder_output: input of a decoder's cross-attention, in the same format.
            enc_dec_attn_mask: mask of the cross-attention: a pair of padding masks, or pairs for "arbitrary".
            self_attn_mask_type, window_size, bottom_right_diagonal, enc_dec_attn_mask_type, enc_dec_window_size,
                enc_dec_bottom_right_diagonal: as in the constructor.
            cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q: of hidden_states.
            cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv: of encoder_output; by default those of hidden_states.
            is_first_microbatch: a hint, without effect.
            checkpoint_core_attention, inference_params, rotary_pos_emb, core_attention_bias_type, core_attention_bias,
                alibi_slopes, fast_zero_fill, pad_between_seqs: as in `MultiheadAttention.forward`.

        Returns:
            A tensor with the shape of hidden_states.

        Raises:
            InputError: an argument is wrong, or two arguments contradict each other, such as the format and the mask.
            NoBackendError: no allowed backend can run the problem.
        """
        if is_first_microbatch is not None:
            checked_flag("is_first_microbatch", is_first_microbatch)
        arguments = attention_arguments(
            self.self_attention,
            self.inter_attention if self.layer_type == "decoder" else None,
            hidden_states,
            cu_seqlens_q,
            shared={
                "checkpoint_core_attention": checkpoint_core_attention,
                "inference_params": inference_params,
                "rotary_pos_emb": rotary_pos_emb,
                "core_attention_bias_type": core_attention_bias_type,
                "core_attention_bias": core_attention_bias,
                "alibi_slopes": alibi_slopes,
                "cu_seqlens_q_padded": cu_seqlens_q_padded,
                "max_seqlen_q": max_seqlen_q,
                "fast_zero_fill": fast_zero_fill,
                "pad_between_seqs": pad_between_seqs,
            },
            self_only={
                "attention_mask": attention_mask,
                "attn_mask_type": self_attn_mask_type,
                "window_size": window_size,
                "bottom_right_diagonal": bottom_right_diagonal,
            },
            cross_only={
                "attention_mask": enc_dec_attn_mask,
                "attn_mask_type": enc_dec_attn_mask_type,
                "window_size": enc_dec_window_size,
                "bottom_right_diagonal": enc_dec_bottom_right_diagonal,
                "encoder_output": encoder_output,
                "cu_seqlens_kv": cu_seqlens_kv,
                "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
                "max_seqlen_kv": max_seqlen_kv,
            },
        )
        self.tensor_parallel.check_ranks()
        self._agree_on_dropout(hidden_states)
        shared, offsets = arguments.shared, arguments.document_offsets
        attention_out, residual = self._run_attention("self", hidden_states, shared, **arguments.self_only)
        if self.parallel_attention_mlp:
            mlp_out, _ = self._run_mlp(hidden_states)
            return self._add_residual(attention_out + mlp_out, hidden_states, offsets, drop_path=True)
        x = self._add_residual(attention_out, residual, offsets, drop_path=True)
        if self.layer_type == "decoder":
            attention_out, residual = self._run_attention("cross", x, shared, **arguments.cross_only)
            x = self._add_residual(attention_out, residual, offsets, drop_path=False)
        mlp_out, residual = self._run_mlp(x)
        x = self._add_residual(mlp_out, residual, offsets, drop_path=True)
        return self.layernorm(x) if self.output_layernorm else x

    def _run_attention(self, kind: str, x: Tensor, common: Mapping[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
        """The output of an attention module, and its residual."""
        name, names = ("self_attention", SELF_ATTENTION) if kind == "self" else ("inter_attention", CROSS_ATTENTION)
        out = call_with_names(names, getattr(self, name), x, **common, **options)
        return output_and_residual(name, out, x, self._returns_normalised(kind))

    def _run_mlp(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output of the feed-forward block, and its residual."""
        is_normalised = self.apply_residual_connection_post_layernorm
        return output_and_residual("layernorm_mlp", self.layernorm_mlp(x), x, is_normalised, may_be_pair=True)

    def _add_residual(self, out: Tensor, residual: Tensor, cu_seqlens: Tensor | None, drop_path: bool) -> Tensor:
        """residual + dropout(out); with drop_path, without out for the dropped sequences."""
        ranks = self.tensor_parallel.ranks
        if self.training and self.hidden_dropout:
            dropout = functional.dropout if ranks is None else ranks.dropout
            out = dropout(out, self.hidden_dropout)
        if drop_path and self.training and self.drop_path_rate:
            cp = self.self_attention.core_attention.context_parallel
            out = out * drop_path_scale(out, self.drop_path_rate, self.attn_input_format, cu_seqlens, ranks, cp)
        return residual + out

    def _agree_on_dropout(self, x: Tensor) -> None:
        """Give the generators of tensor parallel ranks one state, if the layer drops elements or sequences."""
        ranks = self.tensor_parallel.ranks
        if ranks is not None and self.training and (self.hidden_dropout or self.drop_path_rate):
            ranks.agree_on_generators(x.device)

    def extra_repr(self) -> str:
        """The arguments that the submodules do not print, for `repr`."""
        parts = [f"layer_type={self.layer_type!r}", f"attn_input_format={self.attn_input_format!r}"]
        parts += [f"{key}={getattr(self, key)}" for key in ("hidden_dropout", "drop_path_rate") if getattr(self, key)]
        parts += [f"{flag}=True" for flag in _FLAGS if getattr(self, flag)]
        return ", ".join(parts)
