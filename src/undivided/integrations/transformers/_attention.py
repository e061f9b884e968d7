"""The attention of a layer with the signature of transformers: query, key, value [B, H, S, D], a mask, and keywords."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from undivided import masks
from undivided.context_parallel.context import ContextParallel
from undivided.errors import InputError
from undivided.integrations.transformers._active import TENSOR_RANKS, active_batch
from undivided.integrations.transformers._arguments import (
    LayerArguments,
    check_arguments,
    check_documents,
    with_shapes_of_caller,
)
from undivided.integrations.transformers._continuous_batching import attention as paged_attention
from undivided.integrations.transformers._continuous_batching import is_paged_cache
from undivided.integrations.transformers._latent import absorb_queries, expand, expand_output, has_latents, pays_off
from undivided.integrations.transformers._masks import packed_mask, within_documents
from undivided.integrations.transformers._model_mask import ModelMask
from undivided.integrations.transformers._patterns import Pattern
from undivided.integrations.transformers._positions import report_recurrent_layers, report_restarts
from undivided.integrations.transformers._repeated import repeated
from undivided.integrations.transformers._weights import collects_weights, output_and_weights
from undivided.integrations.transformers.cache._states import CachedStates
from undivided.masks import Mask
from undivided.nn.arguments.error_names import rename_arguments
from undivided.nn.blocks.tensor_ranks import TensorRanks
from undivided.request.seed import draw_seed

_NUMBERS, _FLAGS = frozenset({int, float}), frozenset({bool, type(None)})
_NOT_OVER_RANKS = ("position_bias", "sinks", "indices", "block_indices", "cu_seq_lens_q")
"""Arguments that need the tokens of all ranks."""
_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The arguments that describe packed documents."""
_NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "mask": "attention_mask",
    "scale": "scaling",
    "sinks": "s_aux",
    "dropout_p": "dropout",
    **dict(zip(("cu_seqlens_q", "cu_seqlens_kv", "max_q", "max_kv"), _DOCUMENTS, strict=True)),
}
"""The names of arguments here, by those of `undivided.attention` and `masks.documents`."""

REFUSED = ("head_mask", "cache")
"""Unsupported keywords of some models that change the result: factors of heads, and caches of an unknown kind."""
_ENCODER_DECODER = (
    "for an encoder-decoder model, put a cache of yours into EncoderDecoderCache(cache, another), and leave out "
    "prefill_chunk_size of generate, with which transformers cuts the attention_mask of the encoder"
)
"""The hint for an encoder's mask that has fewer keys than a layer."""
_NOT_A_DECODER = "config.is_decoder=True for a model that generates with a cache"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | CachedStates,
    value: Tensor | CachedStates,
    attention_mask: ModelMask | Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    output_attentions: bool | None = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """(output, weights) of a layer: the registered function, `undivided.attention` with the names of transformers.

    Args:
        module: the layer; its ``is_causal`` applies if there is no mask.
        query: ``[B, H, Sq, D]``, floating point.
        key, value: ``[B, N, Sk, D]``, where N divides H; they are never expanded. Those of a quantised `Cache` are
            read in place.
        attention_mask: the result of `model_mask`; or a tensor ``[B|1, H|1, Sq|1, Sk]``: bool, True = attend, or a
            bias.
        dropout: probability; layers pass 0 in evaluation.
        scaling: factor of the scores; None is 1/sqrt(D).
        is_causal: overrides that of the layer.
        softcap: ``c * tanh(score / c)``.
        s_aux: sinks, ``[H]``.
        position_bias: bias of the scores, ``[B|1, H, Sq, Sk]``.
        sinks: sinks of single tokens, ``[B, H, Sq, 1]``.
        indices: the only keys that each query attends to, int ``[B, Sq, n]``.
        block_indices: the only blocks of keys, int ``[B, G, Sq, n]`` for G groups of heads, -1 for none.
        cu_seq_lens_q, cu_seq_lens_k: cumulative lengths of documents packed into a batch of one. A RuntimeWarning
            names a model, once, whose other layers (convolutions, recurrences) do not keep the documents apart.
        max_length_q, max_length_k: the longest of them.
        output_attentions: also return the weights, computed by the reference.
        others: ignored (positions and windows, which the mask contains). A RuntimeWarning names a kind of layer, once,
            whose ``position_ids`` start again at 0 within a row, but whose mask has no documents.

    Returns:
        The output ``[B, Sq, H, D]``, and the weights ``[B, H, Sq, Sk]`` or None.

    Raises:
        InputError: an argument does not fit, or is unsupported and changes the result.

    >>> layer = torch.nn.Module()
    >>> layer.is_causal = True
    >>> q, k = torch.randn(1, 8, 5, 16), torch.randn(1, 2, 5, 16)
    >>> attention(layer, q, k, k)[0].shape
    torch.Size([1, 5, 8, 16])
    """
    if is_paged_cache(others.get("cache")):
        documents = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
        keywords = others | dict(zip(_DOCUMENTS, documents, strict=True))
        return _over_paged_cache(module, query, key, value, keywords, scaling, softcap, s_aux), None
    _check_refused(others)
    if isinstance(attention_mask, ModelMask) and cu_seq_lens_q is None and "position_ids" in others:
        report_restarts(module, attention_mask, others["position_ids"])
    # bare: all arguments that few models have are None; plain: there is only a mask, a scale, a softcap and sinks
    is_bare = position_bias is sinks is indices is block_indices is cu_seq_lens_q is cu_seq_lens_k is None
    is_bare = is_bare and max_length_q is max_length_k is None
    fits_one_row = is_bare and _fits_one_row(attention_mask, query, key, value)
    # arguments of a wrong type do not count as plain, so that `check_arguments` sees and refuses them
    is_plain = is_bare and not fits_one_row and type(dropout) in _NUMBERS and dropout == 0
    is_plain = is_plain and type(is_causal) in _FLAGS and (output_attentions is None or output_attentions is False)
    if is_plain and isinstance(attention_mask, ModelMask) and not collects_weights(module):
        out = repeated(module, query, key, value, attention_mask, scaling, softcap, s_aux)
        if out is not None:
            return out, None
    arguments = LayerArguments(
        module=module,
        query=query,
        key=key,
        value=value,
        attention_mask=attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        softcap=softcap,
        s_aux=s_aux,
        position_bias=position_bias,
        sinks=sinks,
        indices=indices,
        block_indices=block_indices,
        cu_seq_lens_q=cu_seq_lens_q,
        cu_seq_lens_k=cu_seq_lens_k,
        max_length_q=max_length_q,
        max_length_k=max_length_k,
        output_attentions=output_attentions,
    )
    if fits_one_row:
        return _in_one_row(arguments)
    check_arguments(arguments)
    if cu_seq_lens_q is not None and "seq_idx" not in others:  # which other layers read
        report_recurrent_layers(module)
    needs_weights = bool(output_attentions) or collects_weights(module)
    context = None
    if active_batch() is not None or getattr(attention_mask, "context", None) is not None:
        context = _context(arguments, needs_weights)
    check_documents(arguments)
    try:
        return _checked_attention(arguments, context, needs_weights)
    except InputError as error:
        mask_is_bias = isinstance(attention_mask, Tensor) and attention_mask.dtype != torch.bool
        bias = "attention_mask" if position_bias is None or mask_is_bias else "position_bias"
        raise with_shapes_of_caller(rename_arguments(error, {**_NAMES, "bias": bias}), arguments) from None


def _checked_attention(
    arguments: LayerArguments, context: ContextParallel | None, needs_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """(output, weights) of a layer whose arguments were checked, with its sequence over the ranks of a context."""
    module, query, key, value = arguments.module, arguments.query, arguments.key, arguments.value
    is_absorbed = False
    if has_latents(module):
        query, key, value, is_absorbed = _latent_states(module, query, cast(Tensor, key), value)
    mask, bias = _mask_and_bias(arguments)
    options: dict[str, Any] = {
        "layout": "bshd",
        "mask": mask,
        "bias": bias,
        "scale": arguments.scaling,
        "softcap": arguments.softcap,
        "sinks": arguments.s_aux,
        "dropout_p": arguments.dropout,
    }
    if context is not None:
        options["context_parallel"] = context
    if arguments.dropout:
        options |= _seed_and_mask(module, query, options, needs_weights)
    out, weights = output_and_weights(query, key, value, arguments.sinks, options, needs_weights)
    return expand_output(module, out) if is_absorbed else out, weights


def _check_refused(others: dict[str, Any]) -> None:
    for name in REFUSED:
        if others.get(name) is not None:
            hint = "attn_implementation='eager' computes this layer"
            raise InputError(name, "be None", type(others[name]).__name__, hint=hint)


def _over_paged_cache(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    keywords: dict[str, Any],
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The output over the cache of continuous batching, whose engine passes lengths and offsets in its own form."""
    if has_latents(module):
        key, value = expand(module, key)
    cache, layer = keywords["cache"], cast(int, module.layer_idx)
    return paged_attention(query, key, value, cache, layer, keywords, scale=scale, softcap=softcap, sinks=sinks)


def _fits_one_row(mask: object, *states: object) -> bool:
    """Whether the mask has a form for all rows in one, and these queries, keys and values have its rows and tokens."""
    if not isinstance(mask, ModelMask) or mask.in_one_row is None:
        return False
    return all(type(one) is Tensor and one.dim() == 4 and one.shape[::2] == mask.shape[::2] for one in states)


def _in_one_row(arguments: LayerArguments) -> tuple[Tensor, Tensor | None]:
    """The attention of a layer with the documents of all rows in one row, for batch-invariant results.

    Rows that follow one another in memory are not copied.
    """
    mask = cast(ModelMask, arguments.attention_mask)
    rows = mask.shape[0], mask.shape[2]
    states = arguments.query, cast(Tensor, arguments.key), cast(Tensor, arguments.value)
    query, key, value = (one.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2) for one in states)
    joined = arguments._replace(query=query, key=key, value=value, attention_mask=mask.in_one_row)
    out, weights = attention(*joined)
    if weights is not None:  # those of the keys in the query's own row
        weights = weights[0].unflatten(2, rows).unflatten(1, rows).diagonal(dim1=1, dim2=3).permute(3, 0, 1, 2)
    return out[0].unflatten(0, rows), weights


def _latent_states(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor | CachedStates
) -> tuple[Tensor, Tensor, Tensor | CachedStates, bool]:
    """(query, key, value) of a layer of `use_latents`, and whether they are latents, because that is less work."""
    q_len = query.shape[2]
    if q_len and pays_off(module, q_len):
        return absorb_queries(module, query), key, value, True
    return query, *expand(module, key), False


def _mask_and_bias(arguments: LayerArguments) -> tuple[Mask | None, Tensor | None]:
    """(mask, bias) of all arguments that hide keys or add to the scores."""
    module, documents = arguments.module, arguments.cu_seq_lens_q
    causal = getattr(module, "is_causal", True) if arguments.is_causal is None else arguments.is_causal
    heads, q_len, kv_len = *arguments.query.shape[1:3], arguments.key.shape[2]
    mask, bias = _read_attention_mask(module, arguments.attention_mask, q_len, kv_len, causal)
    if documents is not None:
        mask = _document_mask(arguments, documents, mask, causal)
    for selected in _selected_keys(module, arguments.indices, arguments.block_indices, heads, kv_len):
        mask = masks.dense(selected) if mask is None else mask & masks.dense(selected)
    if arguments.position_bias is not None:
        bias = arguments.position_bias if bias is None else arguments.position_bias + bias
    return mask, bias


def _read_attention_mask(
    module: nn.Module, attention_mask: ModelMask | Tensor | None, q_len: int, kv_len: int, causal: bool
) -> tuple[Mask | None, Tensor | None]:
    """(mask, bias) from a layer's ``attention_mask``; None has the meaning of PyTorch's function."""
    if isinstance(attention_mask, ModelMask):
        if attention_mask.shape[2:] == (1, kv_len) != (q_len, kv_len):  # one row, broadcast over the queries
            return masks.dense(attention_mask.to_dense()), None
        if attention_mask.shape[2:] != (q_len, kv_len):
            raise InputError(
                "attention_mask",
                f"be for {q_len} queries and {kv_len} keys, as this layer has",
                f"one for {attention_mask.shape[2]} and {attention_mask.shape[3]}",
                hint=_hint_of_fewer_keys(module, attention_mask) if attention_mask.shape[3] < kv_len else None,
            )
        return attention_mask.mask, None
    if attention_mask is None:
        return masks.causal(align="top_left") if causal and q_len > 1 else None, None
    if attention_mask.dim() and attention_mask.shape[-1] not in (1, kv_len):
        longer = attention_mask.shape[-1] > kv_len
        hint = f"this layer's cache keeps the last {kv_len} keys: attention_mask[..., -{kv_len}:]" if longer else None
        must = f"have {kv_len} keys, as this layer has"
        raise InputError("attention_mask", must, list(attention_mask.shape), hint=hint)
    return (masks.dense(attention_mask), None) if attention_mask.dtype == torch.bool else (None, attention_mask)


def _hint_of_fewer_keys(module: nn.Module, mask: ModelMask) -> str | None:
    """What to change if a mask that is not causal has fewer keys than the layer: it is of an encoder, or no cache."""
    if mask.pattern.right is not None:
        return None
    return _NOT_A_DECODER if getattr(module, "is_decoder", None) is False else _ENCODER_DECODER


def _document_mask(arguments: LayerArguments, cu_q: Tensor, mask: Mask | None, causal: bool) -> Mask:
    """The mask within documents packed into a batch of one; `mask` is that of ``attention_mask``."""
    cu_kv = cu_q if arguments.cu_seq_lens_k is None else arguments.cu_seq_lens_k
    documents = cu_q, cu_kv, arguments.max_length_q, arguments.max_length_k
    attention_mask = arguments.attention_mask
    if isinstance(attention_mask, ModelMask):
        return within_documents(attention_mask, *documents)
    if attention_mask is None:
        return packed_mask(Pattern(right=0 if causal else None), *documents)
    return packed_mask(Pattern(), *documents) & (masks.FULL if mask is None else mask)


def _selected_keys(
    module: nn.Module, indices: Tensor | None, blocks: Tensor | None, heads: int, kv_len: int
) -> list[Tensor]:
    """The keys that a layer selected for its queries, bool ``[B, 1|H, Sq, Sk]``."""
    selected = []
    if indices is not None:
        no_keys = torch.zeros((*indices.shape[:2], kv_len), dtype=torch.bool, device=indices.device)
        selected.append(no_keys.scatter(-1, indices.long(), True)[:, None])
    if blocks is not None:
        size: int = module.indexer.block_size  # type: ignore[union-attr, assignment]
        count = -(-kv_len // size)
        no_blocks = torch.zeros((*blocks.shape[:3], count + 1), dtype=torch.bool, device=blocks.device)
        keys = no_blocks.scatter(-1, blocks.masked_fill(blocks < 0, count), True)[..., :count]
        keys = keys.repeat_interleave(size, dim=-1)[..., :kv_len]
        selected.append(keys.repeat_interleave(heads // blocks.shape[1], dim=1))
    return selected


def _context(arguments: LayerArguments, needs_weights: bool) -> ContextParallel:
    """The ranks that the sequence is spread over; raises InputError for what needs the tokens of all ranks."""
    refused: dict[str, object] = {"output_attentions": True if needs_weights else None}
    refused |= {name: getattr(arguments, name) for name in _NOT_OVER_RANKS}
    for name, value in refused.items():
        if value is not None:
            raise InputError(name, "be None if the sequence is spread over ranks", type(value).__name__)
    mask = arguments.attention_mask
    context = mask.context if isinstance(mask, ModelMask) else None
    if context is None:
        must = "be built by the model from the batch of shard_batch, because the sequence is spread over ranks"
        raise InputError("attention_mask", must, type(mask).__name__)
    return context


def _seed_and_mask(module: nn.Module, query: Tensor, options: dict[str, Any], needs_weights: bool) -> dict[str, Any]:
    """The seed and the mask of a dropout, as options, if the call must not draw the seed itself.

    Ranks agree on the seed, and the mask knows which heads of the layer these are: as in one process. Output and
    weights drop the same entries.
    """
    context: ContextParallel | None = options.get("context_parallel")
    ranks: TensorRanks | None = getattr(module, TENSOR_RANKS, None)
    if ranks is None:
        if context is not None:
            return {"dropout_seed": context.seed()}
        return {"dropout_seed": draw_seed(query.device)} if needs_weights else {}
    seed = ranks.agree_on_seed(draw_seed(query.device) if context is None else context.seed(), query.device)
    mask = masks.FULL if options["mask"] is None else options["mask"]
    return {"dropout_seed": seed, "mask": mask.with_first_head(ranks.rank * query.shape[1])}
