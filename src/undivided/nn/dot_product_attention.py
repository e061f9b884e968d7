"""`DotProductAttention`: TransformerEngine's module, with its names and arguments, on any device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from undivided.arguments.checks import as_integer, checked_choice, checked_flag
from undivided.cache import InferenceParams
from undivided.errors import InputError
from undivided.functional import attention
from undivided.masks import Mask
from undivided.nn import _cached, _context_parallel
from undivided.nn._max_logit import max_logit
from undivided.nn.arguments import formats, sequences
from undivided.nn.arguments.checks import (
    check_call_hints,
    check_names,
    checked_channels,
    checked_device,
    checked_heads,
    checked_number,
    checked_optional_flag,
    shared_offsets,
)
from undivided.nn.arguments.error_names import with_module_names
from undivided.nn.arguments.formats import QKV, Heads, InputTensors
from undivided.nn.arguments.mask_types import band, checked_mask_type, checked_window, normalise_window, warn_of_window
from undivided.nn.arguments.refused import AT_CALL, check_refused
from undivided.nn.arguments.scores import ScoreTerms, score_terms
from undivided.nn.arguments.sequences import SequenceArguments
from undivided.nn.arguments.tensor_parallel import checked_tensor_arguments
from undivided.nn.blocks.divided import DividedModule
from undivided.nn.blocks.module import local_parameter
from undivided.nn.blocks.rank_calls import attending, on_all_ranks
from undivided.nn.blocks.tensor_ranks import dropout_seed


class DotProductAttention(DividedModule):
    """Scaled dot-product attention, with the constructor and forward arguments of TransformerEngine, in their order.

    ``softmax(mask(scale * q @ k^T + bias)) @ v``, computed by `undivided.attention`: with its kernels, errors and
    semantics on every device. docs/how-to/coming-from-transformer-engine.md describes every argument.

    Axes: b batch, s sequence (sq queries, skv keys), t packed tokens, h query heads, g key/value heads, d head size.

    Args:
        num_attention_heads: h, the query heads.
        kv_channels: head size, or the pair (queries and keys, values).
        num_gqa_groups: g, the key/value heads, a divisor of h. None: h.
        attention_dropout: probability of dropping a weight, in training mode only.
        qkv_format: "sbhd", "bshd" or "thd". Required here or at the call.
        attn_mask_type: "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
            "padding_causal_bottom_right" or "arbitrary".
        window_size: (left, right) keys around the query's own, both ends included; -1 means unbounded.
        bottom_right_diagonal: whether the window and ALiBi are aligned bottom-right, if the mask type does not decide.
        attention_type: "self", or "cross" if keys and values belong to other sequences.
        softmax_scale: scale of the scores; 1/sqrt(d of the keys) if None.
        softmax_type: "vanilla", "off-by-one" (adds 1 to the denominator) or "learnable" (adds exp(softmax_offset)).
        return_max_logit: whether to return the largest score of each head too (a second pass over q . k^T).
        layer_number: number of the layer, under which `inference_params` caches its keys and values.
        name: stored unchanged.
        cp_group, cp_global_ranks, cp_stream, cp_comm_type: context parallelism, see `set_context_parallel_group`.
        tp_size, tp_group: tensor parallel ranks; h and g are divided by their number, and a call has one rank's heads.
            With a group, dropout is that of one process.
        get_rng_state_tracker: returns an object whose ``fork()`` is the context in which the seed of dropout is drawn.
        sequence_parallel: without effect, as sequences are whole in an attention.
        backend: as in `undivided.attention`.
        softcap: ``c * tanh(score / c)``, applied before a bias.
        device: device of `softmax_offset`.

    Raises:
        InputError: an argument is wrong. The message has its name, its value, the limit and a fix.

    Source: the interface of transformer_engine.pytorch.DotProductAttention.

    >>> import torch
    >>> attention = DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="thd", attn_mask_type="padding_causal")
    >>> q, k, v = torch.randn(10, 4, 16), torch.randn(10, 2, 16), torch.randn(10, 2, 16)
    >>> attention(q, k, v, cu_seqlens_q=torch.tensor([0, 3, 10], dtype=torch.int32)).shape
    torch.Size([10, 64])
    """

    softmax_offset: torch.nn.Parameter | None

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
        *,
        backend: str | None = None,
        softcap: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        heads = Heads(*checked_heads(num_attention_heads, num_gqa_groups), *checked_channels(kv_channels))
        self.tensor_parallel = checked_tensor_arguments(tp_group, tp_size, sequence_parallel, get_rng_state_tracker)
        self.heads = self.tensor_parallel.own_heads(heads)
        self.attention_dropout = checked_number("attention_dropout", attention_dropout, 0, 1, "a number from 0 to 1")
        self.qkv_format = None if qkv_format is None else formats.checked_format(qkv_format)
        kind = checked_mask_type(attn_mask_type)
        self.attn_mask_type = kind.name
        window = checked_window(window_size)
        warn_of_window(kind, window)
        self.window_size = None if window is None else normalise_window(kind, window)
        self.bottom_right_diagonal = checked_optional_flag("bottom_right_diagonal", bottom_right_diagonal)
        self.attention_type = checked_choice("attention_type", attention_type, ("self", "cross"))
        self.softmax_type = checked_choice("softmax_type", softmax_type, ("vanilla", "off-by-one", "learnable"))
        self.return_max_logit = checked_flag("return_max_logit", return_max_logit)
        self._set_numbers(softmax_scale, softcap, layer_number)
        check_names(name, backend)
        self.name, self.backend = name, backend
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        offset, device = None, checked_device(device)
        if self.softmax_type == "learnable":
            offset = torch.nn.Parameter(torch.empty(self.heads.q, dtype=torch.float32, device=device))
        self.register_parameter("softmax_offset", offset)
        self.reset_parameters()

    def _set_numbers(self, softmax_scale: float | None, softcap: float | None, layer_number: int | None) -> None:
        self.softmax_scale = self.heads.qk_dim**-0.5
        if softmax_scale is not None:
            words = "a finite number, or None for 1/sqrt(head size)"
            self.softmax_scale = checked_number("softmax_scale", softmax_scale, -1e30, 1e30, words)
        if softcap is not None:
            softcap = checked_number("softcap", softcap, 1e-30, 1e30, "a positive number or None")
        self.softcap = softcap
        self.layer_number = 1 if layer_number is None else as_integer("layer_number", layer_number, 0)
        self._is_numbered = layer_number is not None

    def reset_parameters(self) -> None:
        """Initialise a learnable `softmax_offset` with 0, which equals "off-by-one"."""
        if self.softmax_offset is not None:
            torch.nn.init.zeros_(self.softmax_offset)

    def set_context_parallel_group(
        self, cp_group: Any, cp_global_ranks: Any = None, cp_stream: Any = None, cp_comm_type: str = "p2p"
    ) -> None:
        """Distribute sequences over ranks.

        q, k and v are then the tokens of this rank; masks, cu_seqlens and the keys of a bias describe the whole
        sequences. The results equal those of one process, in training mode too.

        Args:
            cp_group: a process group, a DeviceMesh, the pair (all-to-all group, ring group) for "a2a+p2p", or an
                `undivided.ContextParallel`, bound if the ranks do not divide the tokens. None: no context parallelism.
            cp_global_ranks: the ranks of the group; only their number is checked.
            cp_stream: a hint, without effect on the result.
            cp_comm_type: "p2p" (ring), "all_gather", "a2a" (exchanges rows for heads) or "a2a+p2p". Rank r holds
                chunks r and 2 * ranks - 1 - r of each sequence, as in TransformerEngine, unless it is bound otherwise.

        Raises:
            InputError: an argument is wrong.
        """
        self.context_parallel = _context_parallel.context_parallel_group(
            cp_group, cp_global_ranks, cp_stream, cp_comm_type
        )
        self.cp_comm_type = cp_comm_type

    @on_all_ranks
    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The attention output. Arguments that are None have their values from the constructor.

        Args:
            query_layer, key_layer, value_layer: [s, b, h, d], [b, s, h, d] or [t, h, d], depending on `qkv_format`.
            attention_mask: bool, True = masked out: [b, 1, 1, s] for padding types, in cross-attention a pair of them
                for queries and keys; broadcastable to [b, h, sq, skv] for "arbitrary".
            qkv_format, attn_mask_type, window_size, bottom_right_diagonal: as in the constructor.
            cu_seqlens_q, cu_seqlens_kv: cumulative real lengths, int [b + 1]: of packed sequences in thd, of the batch
                elements in other formats. cu_seqlens_kv defaults to cu_seqlens_q.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: offsets of packed sequences in memory, int [b + 1].
            max_seqlen_q, max_seqlen_kv: length of the longest sequence; avoids waiting for a GPU in thd.
            checkpoint_core_attention: whether to save only q, k and v for the backward and recompute the rest.
            core_attention_bias_type: "no_bias", "pre_scale_bias", "post_scale_bias" or "alibi".
            core_attention_bias: broadcastable to [b, h, sq, skv].
            alibi_slopes: fp32 [h] or [b, h], for "alibi". None: the standard slopes.
            pad_between_seqs: whether there is padding between packed sequences; its place is in cu_seqlens_*_padded.
            fast_zero_fill, num_splits: hints, without effect on the result.
            qkv_layer, kv_layer: instead, one tensor of q, k and v, or one of k and v.
            qkv_interleave_dim: -3 for [.., 3, h, d], -2 for [.., h, 3, d] (kv_layer: 2 instead of 3).
            inference_params: cache of earlier keys and values, under `layer_number`. New ones are appended, masks are
                aligned bottom-right, and the lengths come from the cache; omit cu_seqlens. With a context group, the
                cache has the same (``InferenceParams(context_parallel=)``), and q, k and v are all new tokens, or those
                of this rank after ``pre_step(..., sharded=True)``.
            fp8_output, bf16_backward, score_mod, score_mod_bprop, score_mod_tensors,
                score_mod_bprop_tensors: accepted at their defaults only; another value is an error with the reason.

        Returns:
            [s, b, h * d], [b, s, h * d] or [t, h * d], with d of the values; with return_max_logit, a pair with the
            largest scores, fp32 [h].

        Raises:
            InputError: an argument is wrong, or two arguments contradict each other.
            NoBackendError: no allowed backend can run the problem.
        """
        check_refused(
            AT_CALL,
            {
                "fp8_output": fp8_output,
                "bf16_backward": bf16_backward,
                "score_mod": score_mod,
                "score_mod_bprop": score_mod_bprop,
                "score_mod_tensors": score_mod_tensors,
                "score_mod_bprop_tensors": score_mod_bprop_tensors,
            },
        )
        check_call_hints(checkpoint_core_attention, fast_zero_fill, num_splits)
        format = formats.checked_format(self.qkv_format if qkv_format is None else qkv_format, query_layer)
        tensors = InputTensors(query_layer, key_layer, value_layer, qkv_layer, kv_layer)
        inputs = formats.checked_inputs(tensors, qkv_interleave_dim, format, self.heads)
        if self.attention_type == "self":
            cu_seqlens_kv = shared_offsets(cu_seqlens_q, cu_seqlens_kv)
        arguments = SequenceArguments(
            attention_mask=attention_mask,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            pad_between_seqs=pad_between_seqs,
        )
        try:
            params = _cached.checked_params(inference_params)
            # full: the sizes that masks and biases describe, with cached keys and those of all ranks
            if params is not None:
                _cached.check_ranks(params, self.context_parallel)
                full = _cached.with_cached_keys(inputs, params)
            elif self.context_parallel is not None:
                full = _context_parallel.global_inputs(inputs, self.context_parallel, arguments.offsets_in_memory())
            else:
                full = inputs
            scores = score_terms(
                core_attention_bias_type,
                core_attention_bias,
                self.tensor_parallel.own_slopes(core_attention_bias_type, alibi_slopes, inputs.q),
                full._replace(q=inputs.q),  # a bias has the rows of this rank, and the keys of all ranks
                self.softmax_scale,
                self.softcap,
            )
            mask = self._mask(arguments, full, attn_mask_type, window_size, bottom_right_diagonal, params)
            if params is not None:
                return self._attend_cached(inputs, mask, scores, params)
            with attending(self.context_parallel):
                return self._attend(inputs, mask, scores, checkpoint_core_attention)
        except InputError as error:
            raise with_module_names(error) from None

    def _mask(
        self,
        arguments: SequenceArguments,
        inputs: QKV,
        attn_mask_type: str | None,
        window_size: tuple[int, int] | None,
        bottom_right_diagonal: bool | None,
        params: InferenceParams | None,
    ) -> Mask:
        kind = checked_mask_type(attn_mask_type, self.attn_mask_type)
        window = checked_window(self.window_size if window_size is None else window_size)
        bottom_right = self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal
        bottom_right = checked_optional_flag("bottom_right_diagonal", bottom_right)
        if params is not None:
            return _cached.mask(arguments, kind, inputs, window, bottom_right, params)
        diagonal = band(kind, window, bottom_right)
        sequences.check(arguments, kind, inputs, self.attention_type)
        return sequences.mask(arguments, kind, inputs, self.attention_type, diagonal)

    def _attend(self, inputs: QKV, mask: Mask, scores: ScoreTerms, recompute: bool) -> Tensor | tuple[Tensor, Tensor]:
        q, k, v, format = inputs.q, inputs.k, inputs.v, inputs.format
        cp = self.context_parallel
        dropout = self.attention_dropout if self.training else 0.0
        seed = None
        if dropout:
            ranks = self.tensor_parallel.ranks
            seed = dropout_seed(None if cp is None else cp.seed, ranks, self.tensor_parallel.tracker, q)
            mask = mask if ranks is None else mask.with_first_head(ranks.rank * self.heads.q)
        core = functools.partial(
            attention,
            layout=format,
            mask=mask,
            dropout_p=dropout,
            context_parallel=cp,
            dropout_seed=seed,
            **self._options(q, scores),
        )
        largest = None
        if self.return_max_logit:  # first, as torch.compile fails for floats that a checkpoint's body reads first
            largest = max_logit(
                q, k, mask, format, scores.bias, scores.alibi_slopes, self.softmax_scale, self.softcap, cp
            )
        out = checkpoint(core, q, k, v, use_reentrant=False) if recompute else core(q, k, v)
        out = out.flatten(-2)
        return out if largest is None else (out, largest)

    def _attend_cached(self, inputs: QKV, mask: Mask, scores: ScoreTerms, params: InferenceParams) -> Tensor:
        if self.training and self.attention_dropout:
            must = "be used in evaluation mode, or without attention_dropout"
            raise InputError("inference_params", must, "training mode", hint="module.eval()")
        if self.return_max_logit:
            raise InputError("inference_params", "be None with return_max_logit", "a cache")
        if not self._is_numbered:
            hint = "layer_number=1 at construction, 2 for the next layer: caches are found by it"
            raise InputError("inference_params", "be used with a layer_number", None, hint=hint)
        return _cached.attend(params, self, inputs, mask, self._options(inputs.q, scores)).flatten(-2)

    def _options(self, q: Tensor, scores: ScoreTerms) -> dict[str, Any]:
        return {
            "bias": scores.bias,
            "scale": self.softmax_scale,
            "softcap": self.softcap,
            "alibi_slopes": scores.alibi_slopes,
            "sinks": self._sinks(q),
            "backend": self.backend,
        }

    def _sinks(self, q: Tensor) -> Tensor | None:
        if self.softmax_type == "off-by-one":
            return torch.zeros(self.heads.q, dtype=torch.float32, device=q.device)
        own: Tensor | None = local_parameter("softmax_offset", self.softmax_offset, 0, self.tensor_parallel.ranks)
        return own

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults, for `repr`."""
        q, kv, qk_dim, v_dim = self.heads
        parts = [f"num_attention_heads={q}", f"kv_channels={qk_dim if qk_dim == v_dim else (qk_dim, v_dim)}"]
        if kv != q:
            parts.append(f"num_gqa_groups={kv}")
        if self.attention_dropout:
            parts.append(f"attention_dropout={self.attention_dropout}")
        parts += [f"qkv_format={self.qkv_format!r}", f"attn_mask_type={self.attn_mask_type!r}"]
        for name in ("window_size", "softcap", "backend"):
            if (value := getattr(self, name)) is not None:
                parts.append(f"{name}={value!r}")
        if self.softmax_type != "vanilla":
            parts.append(f"softmax_type={self.softmax_type!r}")
        return ", ".join(parts)
