"""`MultiheadAttention`: TransformerEngine's module, with its names and arguments, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undivided.arguments.checks import as_integer, checked_choice, checked_flag
from undivided.cache import InferenceParams
from undivided.errors import InputError
from undivided.nn import _cached
from undivided.nn.arguments import hidden_states as hidden
from undivided.nn.arguments.checks import check_names, check_numbers, checked_device, checked_sizes
from undivided.nn.arguments.error_names import TENSORS_OF_LAYER, call_with_names
from undivided.nn.arguments.mask_types import checked_mask_type, checked_window
from undivided.nn.arguments.refused import ATTENTION_LAYER_AT_CONSTRUCTION, check_refused
from undivided.nn.arguments.tensor_parallel import checked_tensor_arguments
from undivided.nn.blocks.divided import DividedModule
from undivided.nn.blocks.initial_weights import Init
from undivided.nn.blocks.inner_attribute import InnerAttribute
from undivided.nn.blocks.linear import Linear, OutputLinear
from undivided.nn.blocks.module import checked_dtype, checked_init
from undivided.nn.blocks.normalization import Normalization, checked_norm, checked_qk_norms
from undivided.nn.blocks.projections import projections, split_kv, split_q, split_qkv
from undivided.nn.blocks.rank_calls import on_all_ranks
from undivided.nn.dot_product_attention import DotProductAttention
from undivided.nn.rotary.in_attention import RotaryPosEmb, rotate_queries_and_keys

_FLAGS = """
    return_bias return_layernorm_output input_layernorm fuse_qkv_params qkv_weight_interleaved rotary_pos_interleaved
    qk_norm_before_rope
""".split()  # arguments that become attributes of the same name


class MultiheadAttention(DividedModule):
    """Attention with its projections, with the constructor and forward arguments of TransformerEngine, in their order.

    ``proj(attention(rotary(norm(q)), rotary(norm(k)), v))``. q, k and v are linear maps of hidden_states (for "cross",
    k and v of encoder_output). docs/how-to/coming-from-transformer-engine.md describes every argument.

    Axes: b batch, s sequence, t packed tokens, h query heads, g key/value heads, d head size.

    Args:
        hidden_size: features of hidden_states and of the output.
        num_attention_heads, num_gqa_groups: h, and its divisor g; g is h if None.
        kv_channels: d, or the pair (queries and keys, values); hidden_size / h if None.
        attention_dropout: probability of dropping a weight, in training mode only.
        layernorm_epsilon: epsilon of the input normalisation.
        init_method, output_layer_init_method: functions that initialise the weights of q, k, v and of the output. None:
            normal distribution with standard deviation 0.023.
        layer_number: number of the layer, from 1, under which `inference_params` caches its keys and values.
        attn_mask_type, window_size, bottom_right_diagonal: as in `DotProductAttention`.
        params_dtype: dtype of the parameters; torch's default if None.
        return_bias: whether to return (output without bias, bias).
        return_layernorm_output: whether to return the normalised input too, as the last result.
        input_layernorm: whether to normalise hidden_states first.
        attention_type: "self", or "cross" for keys and values from encoder_output.
        fuse_qkv_params: whether q, k and v share one weight.
        zero_centered_gamma: whether normalisations of hidden states multiply by 1 + weight; q_norm, k_norm: weight.
        qkv_weight_interleaved: whether the rows of a fused weight are grouped by key/value head (q, k, v of a head
            together), or by q, k and v.
        rotary_pos_interleaved: see `apply_rotary_pos_emb`.
        bias: whether the projections have biases.
        normalization: "LayerNorm" or "RMSNorm".
        device: device of the parameters; torch's default if None.
        qkv_format: "sbhd" for hidden_states [s, b, hidden], "bshd" for [b, s, hidden], "thd" for [t, hidden]. Required.
        name: stored unchanged.
        qk_norm_type, qk_norm_eps: normalisation of each head's queries and keys: "L2Normalization", "RMSNorm",
            "LayerNorm" or None.
        qk_norm_before_rope: whether this normalisation precedes the rotation.
        seq_length, micro_batch_size: hints, without effect.
        softmax_type: as in `DotProductAttention`.
        softmax_scale, softcap, backend: beyond TransformerEngine, as in `DotProductAttention`.
        tp_group, tp_size, set_parallel_mode, sequence_parallel: the tensor parallel ranks, or their number until
            `set_tensor_parallel_group`. Each rank holds its part of the weights, as plain tensors; with
            sequence_parallel, hidden_states and the output are its consecutive part of the sequence.
        get_rng_state_tracker: returns an object whose ``fork()`` is the context in which weights, and the seed of
            attention_dropout, are drawn. None: ranks draw different weights, and drop what one process would.
        fuse_wgrad_accumulation, ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad:
            accepted at their defaults only; another value is an error with the reason.

    Raises:
        InputError: an argument is wrong. The message has its name, its value, the limit and a fix.

    Source: the interface of transformer_engine.pytorch.MultiheadAttention, and the names and shapes of its parameters.

    >>> import torch
    >>> layer = MultiheadAttention(64, 4, num_gqa_groups=2, qkv_format="bshd")
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    layernorm_qkv: Linear
    qkv: Linear
    key_value: Linear
    layernorm_query: Linear
    query_layer: Linear
    return_bias: bool
    return_layernorm_output: bool
    input_layernorm: bool
    fuse_qkv_params: bool
    qkv_weight_interleaved: bool
    rotary_pos_interleaved: bool
    qk_norm_before_rope: bool
    layer_number = InnerAttribute("core_attention", "layer_number")
    attn_mask_type = InnerAttribute("core_attention", "attn_mask_type")
    window_size = InnerAttribute("core_attention", "window_size")
    bottom_right_diagonal = InnerAttribute("core_attention", "bottom_right_diagonal")

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int] | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Any = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str | None = None,
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
        *,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        backend: str | None = None,
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        check_refused(ATTENTION_LAYER_AT_CONSTRUCTION, arguments)
        check_numbers(layer_number, seq_length, micro_batch_size)
        self.qkv_format = hidden.checked_layer_format("qkv_format", qkv_format)
        self.attention_type = checked_choice("attention_type", attention_type, ("self", "cross"))
        self.hidden_size = as_integer("hidden_size", hidden_size, 1)
        self.tensor_parallel = checked_tensor_arguments(
            tp_group, tp_size, sequence_parallel, get_rng_state_tracker, self.qkv_format, set_parallel_mode
        )
        heads = checked_sizes(hidden_size, num_attention_heads, num_gqa_groups, kv_channels)
        self.heads = self.tensor_parallel.own_heads(heads)
        check_names(name, backend)
        self.name, device = name, checked_device(device)
        for flag in _FLAGS:
            setattr(self, flag, checked_flag(flag, arguments[flag]))
        self.qkv_weight_interleaved = self.qkv_weight_interleaved and fuse_qkv_params
        if return_layernorm_output and not input_layernorm:
            raise InputError("return_layernorm_output", "be False without input_layernorm", True)
        norm = checked_norm(normalization, layernorm_epsilon, zero_centered_gamma)
        dtype = checked_dtype(params_dtype)
        bias = checked_flag("bias", bias)
        divided = self.tensor_parallel.divided_init
        init = divided(checked_init("init_method", init_method))
        output_init = divided(checked_init("output_layer_init_method", output_layer_init_method))
        projected = projections(
            self.heads,
            hidden_size,
            norm if self.input_layernorm else None,
            init,
            bias,
            device,
            dtype,
            is_cross=self.attention_type == "cross",
            fused=self.fuse_qkv_params,
        )
        for module, projection in projected.items():
            setattr(self, module, projection)
        self.q_norm, self.k_norm = checked_qk_norms(qk_norm_type, qk_norm_eps, self.heads.qk_dim, device, dtype)
        self.core_attention = DotProductAttention(
            num_attention_heads,
            kv_channels=(self.heads.qk_dim, self.heads.v_dim),
            num_gqa_groups=num_gqa_groups,
            attention_dropout=attention_dropout,
            qkv_format=qkv_format,
            attn_mask_type=attn_mask_type,
            bottom_right_diagonal=bottom_right_diagonal,
            tp_size=self.tensor_parallel.size,
            get_rng_state_tracker=get_rng_state_tracker,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_scale=softmax_scale,
            softmax_type=softmax_type,
            backend=backend,
            softcap=softcap,
            device=device,
        )
        self.window_size = checked_window(window_size)  # unchanged, as a call may have another mask type
        self.proj = OutputLinear(self.heads.q * self.heads.v_dim, {"": hidden_size}, output_init, bias, device, dtype)
        self.set_tensor_parallel_group(tp_group)

    def reset_parameters(self) -> None:
        """Initialise every parameter, for example after `to_empty`."""
        for module in self.children():
            if isinstance(module, Linear | Normalization | DotProductAttention):
                module.reset_parameters()

    def _set_ranks_of_blocks(self, tp_group: Any, check: bool) -> None:
        for module in self.children():
            if isinstance(module, Linear | Normalization):
                module.ranks = self.tensor_parallel.ranks
        self.core_attention.set_tensor_parallel_group(tp_group, check)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Distribute sequences over ranks, as `DotProductAttention.set_context_parallel_group`.

        Args:
            cp_group, cp_global_ranks, cp_stream, cp_comm_type: as there.
        """
        self.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    @on_all_ranks
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
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
    ) -> Tensor | tuple[Tensor | None, ...]:
        """The attention output. Arguments that are None have their values from the constructor.

        Args:
            hidden_states: [s, b, hidden], [b, s, hidden] or [t, hidden], depending on `qkv_format`.
            encoder_output: input of the keys and values for "cross", in the same format.
            rotary_pos_emb: angles of `RotaryPositionEmbedding`, or a pair for queries and keys. Positions count within
                each packed sequence, and continue after cached tokens.
            inference_params: cache of earlier keys and values; "cross" reads only positions, for rotary_pos_emb, and
                refuses masks that depend on them (causal masks, windows, ALiBi).
            is_first_microbatch: a hint, without effect.
            attention_mask, attn_mask_type, window_size, bottom_right_diagonal, checkpoint_core_attention,
                core_attention_bias_type, core_attention_bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv,
                cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, fast_zero_fill,
                pad_between_seqs: as in `DotProductAttention.forward`.

        Returns:
            The output, with the shape of hidden_states; with return_bias or return_layernorm_output, a tuple of the
            output, the bias and the normalised input.

        Raises:
            InputError: an argument is wrong, or two arguments contradict each other, such as the format and the mask.
            NoBackendError: no allowed backend can run the problem.
        """
        if is_first_microbatch is not None:
            checked_flag("is_first_microbatch", is_first_microbatch)
        self.check(
            hidden_states, encoder_output, inference_params, attn_mask_type, window_size, core_attention_bias_type
        )
        padding = checked_mask_type(attn_mask_type, self.core_attention.attn_mask_type).padding
        is_whole = self.core_attention.context_parallel is None and self.tensor_parallel.sequence_axis is None
        if is_whole:  # otherwise arguments describe all ranks together
            others = attention_mask, padding, core_attention_bias, cu_seqlens_q, cu_seqlens_kv, inference_params
            hidden.check_evidence(hidden_states, self.qkv_format, hidden.evidence_of_call(*others), inference_params)
        if self.qkv_format == "thd":
            offsets = cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded
            cu_seqlens_q_padded, cu_seqlens_kv_padded = hidden.padded_offsets(self.attention_type == "cross", *offsets)
        q, k, v, normalised = self._project(hidden_states, encoder_output)
        if self.qk_norm_before_rope:
            q, k = self._normalise(q, k)
        if rotary_pos_emb is not None:
            q, k = rotate_queries_and_keys(
                q,
                k,
                rotary_pos_emb,
                format=self.qkv_format,
                interleaved=self.rotary_pos_interleaved,
                offsets_q=cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded,
                offsets_kv=cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded,
                params=inference_params,
                is_padded=cu_seqlens_q_padded is not None,
                is_cross=self.attention_type == "cross",
                cp=self.core_attention.context_parallel,
            )
        if not self.qk_norm_before_rope:
            q, k = self._normalise(q, k)
        context = call_with_names(
            TENSORS_OF_LAYER[self.attention_type],
            self.core_attention,
            q,
            k,
            v,
            attention_mask=attention_mask,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            checkpoint_core_attention=checkpoint_core_attention,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            fast_zero_fill=fast_zero_fill,
            inference_params=inference_params if self.attention_type == "self" else None,
            pad_between_seqs=pad_between_seqs,
        )
        return self._outputs(context, normalised)

    def check(
        self, x: Tensor, encoder: object, params: object, mask_type: str | None, window: object, bias_type: object
    ) -> None:
        """Raise the errors of a call with these hidden states, encoder output, cache and options of the mask.

        Args:
            x, encoder, params: hidden_states, encoder_output and inference_params of the call.
            mask_type, window, bias_type: its attn_mask_type, window_size and core_attention_bias_type.

        Raises:
            InputError: one of them is wrong.
        """
        self.tensor_parallel.check_ranks()
        weight, format = self.proj.weight, self.qkv_format
        hidden.check("hidden_states", x, self.hidden_size, format, weight)
        params = _cached.checked_params(params)
        if self.attention_type == "self":
            hidden.check_no_encoder_output(encoder)
            return
        hidden.check_encoder_output(x, encoder, self.hidden_size, format, weight)
        core = self.core_attention
        own = core.context_parallel, core.attn_mask_type, core.window_size
        _cached.check_cross_attention(params, *own, mask_type, window, bias_type)

    def _project(self, x: Tensor, encoder: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [.., h, d], k [.., g, d], v [.., g, d_v], and x, normalised if the layer does that."""
        if self.attention_type == "self":
            *outputs, normalised = (self.layernorm_qkv if self.input_layernorm else self.qkv)(x)
            return *split_qkv(outputs, self.heads, self.qkv_weight_interleaved), normalised
        q, normalised = (self.layernorm_query if self.input_layernorm else self.query_layer)(x)
        *outputs, _ = self.key_value(encoder)
        return split_q(q, self.heads), *split_kv(outputs, self.heads, self.qkv_weight_interleaved), normalised

    def _normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))

    def _outputs(self, context: Tensor, normalised: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        out, _ = self.proj(context, add_bias=not self.return_bias)
        outputs: tuple[Tensor | None, ...] = (out,)
        if self.return_bias:
            outputs += (self.proj.whole_bias(),)
        if self.return_layernorm_output:
            outputs += (normalised,)
        return out if len(outputs) == 1 else outputs

    def extra_repr(self) -> str:
        """The arguments that the submodules do not print, for `repr`."""
        parts = [f"hidden_size={self.hidden_size}", f"attention_type={self.attention_type!r}"]
        parts += [f"{flag}=True" for flag in _FLAGS if getattr(self, flag)]
        return ", ".join(parts)
