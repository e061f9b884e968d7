"""`MultiheadAttention`: TransformerEngine's module, its names and arguments, on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from undivided.cache import InferenceParams
from undivided.context_parallel.sharding import Side
from undivided.errors import InputError
from undivided.nn._context_parallel import rows_of_angles
from undivided.nn.arguments import hidden_states as hidden
from undivided.nn.arguments.checks import (
    ATTENTION_LAYER_AT_CONSTRUCTION,
    LAYERS_AT_CALL,
    LAYERS_AT_CONSTRUCTION,
    check_refused,
    checked_channels,
    checked_choice,
    checked_flag,
    checked_heads,
    checked_integer,
    checked_number,
    renamed,
)
from undivided.nn.arguments.formats import Heads
from undivided.nn.arguments.mask_types import checked_mask_type
from undivided.nn.blocks import normalization as normalizations
from undivided.nn.blocks.linear import LayerNormLinear, Linear
from undivided.nn.blocks.module import Init, Module, checked_dtype, checked_init
from undivided.nn.blocks.normalization import L2Normalization, Norm, Normalization
from undivided.nn.blocks.projections import kv_parts, qkv_parts, split_kv, split_q, split_qkv
from undivided.nn.dot_product_attention import DotProductAttention
from undivided.nn.rotary.rotation import Turn, rotate, turn

_QK_NORMS = ("L2Normalization", "RMSNorm", "LayerNorm")
RotaryPosEmb = Tensor | tuple[Tensor, Tensor]


class MultiheadAttention(Module):
    """Attention with its projections, with TransformerEngine's constructor and forward arguments, in their order.

    ``proj(attention(rotary(norm(q)), rotary(norm(k)), v))`` with q, k, v linear in hidden_states (k and v in
    encoder_output, for "cross"), which are normalised first with input_layernorm. Every argument is described in
    docs/how-to/coming-from-transformer-engine.md.

    Axes: b batch, s sequence, t packed tokens, h query heads, g key/value heads, d head size.

    Args:
        hidden_size: features of hidden_states and of the output.
        num_attention_heads: h.
        kv_channels: d, or the pair (of queries and keys, of values); hidden_size / h if None.
        attention_dropout: probability of dropping a weight, in training mode alone.
        layernorm_epsilon: of the input's normalisation.
        init_method, output_layer_init_method: start a weight (of q, k, v; of the output); normal of 0.023 if None.
        layer_number: of this layer, from 1; names its cache in `inference_params`.
        attn_mask_type, window_size, bottom_right_diagonal: as in `DotProductAttention`.
        num_gqa_groups: g; h if None.
        params_dtype: of the parameters; torch's default if None.
        return_bias: return (output without its bias, bias).
        return_layernorm_output: return the normalised input as well, last.
        input_layernorm: normalise hidden_states first.
        attention_type: "self", or "cross": keys and values of encoder_output.
        fuse_qkv_params: one weight for q, k and v, not three.
        zero_centered_gamma: normalisations multiply by 1 + weight.
        qkv_weight_interleaved: in a fused weight, q, k, v of each key/value head lie together; else all q, all k, all
            v.
        rotary_pos_interleaved: see `apply_rotary_pos_emb`.
        bias: of the projections.
        normalization: "LayerNorm" or "RMSNorm".
        device: of the parameters; torch's default if None.
        qkv_format: "sbhd" for hidden_states [s, b, hidden], "bshd" for [b, s, hidden], "thd" for [t, hidden]; no
            default.
        name: kept.
        qk_norm_type, qk_norm_eps: "L2Normalization", "RMSNorm" or "LayerNorm" of each head's queries and keys.
        qk_norm_before_rope: normalise them before they are turned, not after.
        seq_length, micro_batch_size: hints, without effect.
        softmax_type: as in `DotProductAttention`.
        softmax_scale, softcap, backend: beyond TransformerEngine, as in `DotProductAttention`.
        tp_group, tp_size, sequence_parallel, set_parallel_mode, get_rng_state_tracker, fuse_wgrad_accumulation, ub_*:
        accepted
            at their defaults; anything else is an error with the reason.

    Raises:
        InputError: an argument is wrong; the message names it, its value, the limit, and a repair.

    Source: the interface of transformer_engine.pytorch.MultiheadAttention, and the names and shapes of its parameters.

    >>> layer = MultiheadAttention(64, 4, num_gqa_groups=2, qkv_format="bshd")
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    layernorm_qkv: Linear
    qkv: Linear
    layernorm_query: Linear
    query_layer: Linear
    return_bias: bool
    return_layernorm_output: bool
    input_layernorm: bool
    fuse_qkv_params: bool
    qkv_weight_interleaved: bool
    rotary_pos_interleaved: bool
    qk_norm_before_rope: bool

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
        given = dict(locals())
        super().__init__()
        check_refused(ATTENTION_LAYER_AT_CONSTRUCTION, given)
        _check_hints(seq_length, micro_batch_size)
        self.qkv_format = hidden.checked_format("qkv_format", qkv_format)
        self.attention_type = checked_choice("attention_type", attention_type, ("self", "cross"))
        self.hidden_size = checked_integer("hidden_size", hidden_size, 1)
        self.heads = _checked_sizes(hidden_size, num_attention_heads, num_gqa_groups, kv_channels)
        self.layer_number = 1 if layer_number is None else checked_integer("layer_number", layer_number, 1)
        self.name = name
        for flag in _FLAGS:
            setattr(self, flag, checked_flag(flag, given[flag]))
        self.qkv_weight_interleaved = self.qkv_weight_interleaved and fuse_qkv_params
        if return_layernorm_output and not input_layernorm:
            raise InputError("return_layernorm_output", "be False without input_layernorm", True)
        norm = checked_norm(normalization, layernorm_epsilon, zero_centered_gamma)
        dtype = checked_dtype(params_dtype)
        bias = checked_flag("bias", bias)
        self._make_projections(norm, checked_init("init_method", init_method), bias, device, dtype)
        self.q_norm, self.k_norm = _qk_norms(qk_norm_type, qk_norm_eps, self.heads.qk_dim, device, dtype)
        self.core_attention = DotProductAttention(
            num_attention_heads,
            kv_channels=(self.heads.qk_dim, self.heads.v_dim),
            num_gqa_groups=num_gqa_groups,
            attention_dropout=attention_dropout,
            qkv_format=qkv_format,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_scale=softmax_scale,
            softmax_type=softmax_type,
            backend=backend,
            softcap=softcap,
            device=device,
        )
        output_init = checked_init("output_layer_init_method", output_layer_init_method)
        context_size = self.heads.q * self.heads.v_dim
        self.proj = Linear(context_size, {"": hidden_size}, output_init, bias, device, dtype)

    def _make_projections(
        self, norm: Norm, init: Init, bias: bool, device: torch.device | str | None, dtype: torch.dtype
    ) -> None:
        """`layernorm_qkv` or `qkv`; `layernorm_query` or `query_layer`, and `key_value`."""
        fused, heads, size = self.fuse_qkv_params, self.heads, self.hidden_size

        def make(parts: dict[str, int], normalised: bool) -> Linear:
            if normalised:
                return LayerNormLinear(norm, size, parts, init, bias, device, dtype)
            return Linear(size, parts, init, bias, device, dtype)

        if self.attention_type == "self":
            parts = qkv_parts(heads, fused)
            setattr(self, "layernorm_qkv" if self.input_layernorm else "qkv", make(parts, self.input_layernorm))
            return
        if self.input_layernorm:
            self.layernorm_query = make({"" if fused else "query": heads.q * heads.qk_dim}, True)
        else:
            self.query_layer = make({"": heads.q * heads.qk_dim}, False)
        self.key_value = make(kv_parts(heads, fused), False)

    def reset_parameters(self) -> None:
        """Start every parameter, as after `to_empty`."""
        for module in self.children():
            if isinstance(module, Linear | Normalization | DotProductAttention):
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
        self.core_attention.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

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
        """Attention. What is not given here is as at construction.

        Args:
            hidden_states: [s, b, hidden], [b, s, hidden] or [t, hidden], as `qkv_format` says.
            encoder_output: for "cross", keys and values are of this one, in the same format.
            rotary_pos_emb: angles of `RotaryPositionEmbedding`, or a pair for queries and keys. Positions count within
                each packed sequence, and from what is cached.
            inference_params: the keys and values of earlier tokens; "cross" takes the positions of its queries from it.
            is_first_microbatch: accepted at None.
            attention_mask, attn_mask_type, window_size, bottom_right_diagonal, checkpoint_core_attention,
                core_attention_bias_type, core_attention_bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv,
                cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, fast_zero_fill,
                pad_between_seqs: as for `DotProductAttention`.

        Returns:
            The output, like hidden_states; a tuple with the bias (return_bias) and the normalised input
            (return_layernorm_output) behind it, where they were asked for.

        Raises:
            InputError: an argument is wrong, or two contradict each other: the format and the mask, for example.
            NoBackendError: no allowed backend can run it.
        """
        check_refused(LAYERS_AT_CALL, {"is_first_microbatch": is_first_microbatch})
        self.check(hidden_states, encoder_output, inference_params)
        padding = checked_mask_type(
            self.core_attention.attn_mask_type if attn_mask_type is None else attn_mask_type
        ).padding
        if (
            self.core_attention.context_parallel is None
        ):  # else what is said of sequences is of the whole, which is not here
            hidden.check_evidence(
                hidden_states,
                self.qkv_format,
                "qkv_format",
                hidden.evidence(
                    attention_mask, padding, core_attention_bias, cu_seqlens_q, cu_seqlens_kv, inference_params
                ),
            )
        q, k, v, normalised = self._projected(hidden_states, encoder_output)
        if self.qk_norm_before_rope:
            q, k = self._normalised(q, k)
        if rotary_pos_emb is not None:
            begins_q = cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded
            begins_kv = cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded
            q, k = self._turned(q, k, rotary_pos_emb, begins_q, begins_kv, inference_params)
        if not self.qk_norm_before_rope:
            q, k = self._normalised(q, k)
        context = self.core_attention(
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

    def check(self, x: Tensor, encoder: Tensor | None, params: InferenceParams | None) -> None:
        """Raise what a call would for these hidden states, encoder's output and cache.

        Raises:
            InputError: one of them is wrong.
        """
        weight, format = self.proj.weight, self.qkv_format
        # a shard of FSDP has another dtype than what the projection will see
        like = weight if type(weight) is torch.nn.Parameter else None
        hidden.check("hidden_states", x, self.hidden_size, format, "qkv_format", like)
        if params is not None and not isinstance(params, InferenceParams):
            raise InputError("inference_params", "be an undivided.InferenceParams", type(params).__name__)
        if self.attention_type == "self":
            if encoder is not None:
                raise InputError(
                    "encoder_output", "be None with attention_type='self'", f"a tensor {list(encoder.shape)}"
                )
            return
        hidden.check("encoder_output", encoder, self.hidden_size, format, "qkv_format", like)
        assert encoder is not None
        hidden.check_encoder(x, encoder, format, "qkv_format")

    def _projected(self, x: Tensor, encoder: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [.., h, d], k [.., g, d], v [.., g, d_v], and x as the projection saw it."""
        if self.attention_type == "self":
            parts, mapped = (self.layernorm_qkv if self.input_layernorm else self.qkv)(x)
            return *split_qkv(parts, self.heads, self.qkv_weight_interleaved), mapped
        (q,), mapped = (self.layernorm_query if self.input_layernorm else self.query_layer)(x)
        parts, _ = self.key_value(encoder)
        return split_q(q, self.heads), *split_kv(parts, self.heads, self.qkv_weight_interleaved), mapped

    def _normalised(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (q, k) if self.q_norm is None or self.k_norm is None else (self.q_norm(q), self.k_norm(k))

    def _turned(
        self,
        q: Tensor,
        k: Tensor,
        rotary: RotaryPosEmb,
        begins_q: Tensor | None,
        begins_kv: Tensor | None,
        params: InferenceParams | None,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys turned by their positions. In self-attention these are the same: one Turn serves both."""
        of_q, of_k = rotary if isinstance(rotary, tuple | list) else (rotary, rotary)
        starts = None if params is None else params.get_seqlens_pre_step()[: params.batch_size]
        if self.qkv_format != "thd":  # there they are lengths: every row begins at its first position
            begins_q = begins_kv = None
        elif params is not None:
            begins_q = params.cu_seqlens_q[: params.batch_size + 1]

        cp = self.core_attention.context_parallel

        def turn_at(t: Tensor, freqs: Tensor, start: Tensor | None, begins: Tensor | None, of: Side = "q") -> Turn:
            if cp is not None:
                freqs = rows_of_angles(freqs, t, self.qkv_format, cp, begins, of)
                begins = None if begins is None else begins.new_tensor([0, t.shape[0]])
            return turn(t, freqs, self.qkv_format, start, self.rotary_pos_interleaved, begins)

        try:
            turn_q = turn_at(q, of_q, starts, begins_q)
            if self.attention_type == "cross":
                turn_k = turn_at(k, of_k, None, begins_kv, "kv")
            else:
                turn_k = turn_q if of_k is of_q else turn_at(k, of_k, starts, begins_q)
        except InputError as error:
            raise renamed(error, {"freqs": "rotary_pos_emb"}) from None
        return rotate(q, turn_q), rotate(k, turn_k)

    def _outputs(self, context: Tensor, normalised: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        (out,), _ = self.proj(context, add_bias=not self.return_bias)
        outputs: tuple[Tensor | None, ...] = (out,)
        if self.return_bias:
            outputs += (self.proj.bias,)
        if self.return_layernorm_output:
            outputs += (normalised,)
        return out if len(outputs) == 1 else outputs

    def extra_repr(self) -> str:
        """What the parts do not say."""
        parts = [f"hidden_size={self.hidden_size}", f"attention_type={self.attention_type!r}"]
        parts += [f"{flag}=True" for flag in _FLAGS if getattr(self, flag)]
        return ", ".join(parts)


_FLAGS = (
    "return_bias",
    "return_layernorm_output",
    "input_layernorm",
    "fuse_qkv_params",
    "qkv_weight_interleaved",
    "rotary_pos_interleaved",
    "qk_norm_before_rope",
)


def checked_norm(kind: object, eps: object, zero_centered: object) -> Norm:
    """The normalisation of a layer."""
    return Norm(
        checked_choice("normalization", kind, normalizations.KINDS),
        checked_number("layernorm_epsilon", eps, 0, 1e30, "a number of at least 0"),
        checked_flag("zero_centered_gamma", zero_centered),
    )


def _check_hints(seq_length: object, micro_batch_size: object) -> None:
    for name, value in (("seq_length", seq_length), ("micro_batch_size", micro_batch_size)):
        if value is not None:
            checked_integer(name, value, 1)


def _checked_sizes(hidden_size: int, num_attention_heads: object, num_gqa_groups: object, kv_channels: Any) -> Heads:
    heads, groups = checked_heads(num_attention_heads, num_gqa_groups)
    if kv_channels is None:
        if hidden_size % heads:
            hint = "kv_channels=... says the head size"
            raise InputError("hidden_size", f"be divisible by num_attention_heads ({heads})", hidden_size, hint=hint)
        kv_channels = hidden_size // heads
    return Heads(heads, groups, *checked_channels(kv_channels))


def _qk_norms(
    kind: object, eps: object, size: int, device: torch.device | str | None, dtype: torch.dtype
) -> tuple[Module | None, Module | None]:
    eps = checked_number("qk_norm_eps", eps, 0, 1e30, "a number of at least 0")
    if kind is None:
        return None, None
    kind = checked_choice("qk_norm_type", kind, _QK_NORMS)
    if kind == "L2Normalization":
        return L2Normalization(eps), L2Normalization(eps)
    norm = Norm(kind, eps)
    return Normalization(norm, size, device, dtype), Normalization(norm, size, device, dtype)
