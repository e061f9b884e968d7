"""Continuous batching of transformers (``model.generate_batch``): each layer reads the paged cache in place.

The library packs the new tokens of all requests into one row, and stores keys and values in pages of its own cache.
Full attention reads these pages through a block table, so nothing is gathered. Sliding windows are ring buffers in that
cache; the library gathers their few keys.

Legend: B requests, T new tokens of all requests, H heads, N key/value heads, D head size, P pages of the longest
request.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undivided import masks
from undivided.errors import InputError
from undivided.functional import attention as attend
from undivided.masks import Mask

CAUSAL = masks.causal(align="bottom_right")
GATHERED = "_undivided_gathered"
"""The attribute of a cache with the layers that get all keys, gathered."""
INPUTS = "_undivided_inputs"
"""The attribute of a cache with the `SharedInputs` of each type of layer."""
NEW = "_undivided_new"
"""The attribute of a cache with the new keys and values of layers, until their attention."""
_WITHOUT_PAGES = "model.generate instead of model.generate_batch"
SWITCH = "switch_to_cb_friendly_attn"
"""The manager's method that refuses implementations it does not know."""


class SharedInputs(NamedTuple):
    """The inputs of attention that the layers of one type share in one forward pass.

    Args:
        offsets: the library's ``cu_seq_lens_q``; a new tensor object begins a new pass.
        layer: the first layer of this type; it begins a new pass, too: a CUDA graph is captured with the tensors of the
            pass before, and must contain what follows from their values.
        mask: causal or a window, within each request.
        pages: block table, int32 [B, P]; None if the keys are not read from pages.
    """

    offsets: Tensor
    layer: int
    mask: Mask
    pages: Tensor | None


def is_paged_cache(cache: object) -> bool:
    """Whether this is the cache of continuous batching; its class is not imported, because transformers is optional."""
    return hasattr(cache, "layer_to_allocator")


def attention(
    query: Tensor, key: Tensor, value: Tensor, cache: Any, layer: int, arguments: Any, **options: Any
) -> Tensor:
    """The output [1, T, H, D] of a layer, after its new keys and values were written to the cache.

    Args:
        query: [1, H, T, D].
        key, value: [1, N, T, D], the new tokens.
        cache: the ``PagedAttentionCache``.
        layer: index of the layer.
        arguments: the library's keywords of the call: cumulative lengths, read and write indices.
        options: of `undivided.attention`.
    """
    _check_keywords(arguments)
    allocator = cache.layer_to_allocator[layer]
    read_index, write_index = (arguments[name][allocator.index] for name in ("read_index", "write_index"))
    k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
    reads_pages = False
    if not _store_if_gathered(cache, layer, key, value, read_index, write_index):
        reads_pages = _window(allocator) is None and len(read_index) > 0
        if reads_pages:
            allocator.update(k, v, layer, read_index[:0], write_index)  # with nothing to read, `update` only writes
            k, v = allocator.get_cache_for_block_table(layer)
        else:
            k, v = allocator.update(k, v, layer, read_index, write_index)
    total_kv = None if reads_pages else k.shape[0]
    inputs = _shared_inputs(cache, allocator, layer, arguments, query.shape[2], total_kv)
    out: Tensor = attend(query[0].transpose(0, 1), k, v, layout="thd", mask=inputs.mask, pages=inputs.pages, **options)
    return out[None]


def _check_keywords(arguments: Any) -> None:
    """InputError if the library's keywords of a call are not those that `attention` reads."""
    if arguments.get("block_table") is not None:
        raise InputError(
            "block_table", "be None", "a tensor", hint="ContinuousBatchingConfig(max_blocks_per_request=0)"
        )
    if missing := [name for name in ("read_index", "write_index") if arguments.get(name) is None]:
        must = (
            "be passed on to the attention by each layer of the model, for continuous batching with any implementation"
        )
        raise InputError(missing[0], must, None, hint=_WITHOUT_PAGES)


def _store_if_gathered(
    cache: Any, layer: int, key: Tensor, value: Tensor, read_index: Tensor, write_index: Tensor
) -> bool:
    """Whether these are the keys and values of all requests, because the layer computes with what the cache returns.

    Such a layer (DiffLlama, JetMoE) is found in its first step, when there is nothing to read. The keys of that step
    are written to the cache here, and from then on the cache returns all keys to the layer.
    """
    gathered: set[int] = cache.__dict__.setdefault(GATHERED, set())
    if layer in gathered:
        return True
    allocator, new = cache.layer_to_allocator[layer], cache.__dict__.get(NEW, {}).pop(layer, None)
    is_changed = new is not None and not (new[0] is key and new[1] is value)
    has_pages = _window(allocator) is None
    if is_changed and (not has_pages or _fits(allocator, layer, *new)):
        if len(read_index):
            must = "be what the cache returned if cached keys are read"
            raise InputError("key", must, "another", hint=_WITHOUT_PAGES)
        allocator.update(*(one[0].transpose(0, 1) for one in new), layer, read_index, write_index)
        gathered.add(layer)
        return True
    if has_pages and not _fits(allocator, layer, key, value):
        heads, size = allocator.get_cache_for_block_table(layer)[0].shape[-2:]
        must = f"have {heads} heads of {size}, as the paged cache, when the layer calls the attention"
        found = f"{key.shape[1]} and {value.shape[1]} heads of {key.shape[3]} and {value.shape[3]}"
        raise InputError("key and value", must, found, hint=_WITHOUT_PAGES)
    return False


def _fits(allocator: Any, layer: int, key: Tensor, value: Tensor) -> bool:
    """Whether the paged cache of a layer stores heads of this number and size."""
    stored = allocator.get_cache_for_block_table(layer)
    return all(page.shape[-2:] == new.shape[1::2] for page, new in zip(stored, (key, value), strict=True))


def _window(allocator: Any) -> int | None:
    """The tokens that a query sees, its own included; None if they are all."""
    return getattr(allocator, "sliding_window", None)


def _shared_inputs(
    cache: Any, allocator: Any, layer: int, arguments: Any, total_q: int, total_kv: int | None
) -> SharedInputs:
    """The mask and block table of this forward pass, computed by the first layer of each attention type.

    Both totals count the padding behind the tokens of the last request. There are no keys but pages if `total_kv` is
    None.
    """
    by_type: dict[str, SharedInputs] = cache.__dict__.setdefault(INPUTS, {})
    inputs = by_type.get(allocator.layer_type)
    if inputs is None or inputs.offsets is not arguments["cu_seq_lens_q"] or inputs.layer == layer:
        inputs = by_type[allocator.layer_type] = _new_inputs(allocator, layer, arguments, total_q, total_kv)
    return inputs


def _new_inputs(allocator: Any, layer: int, arguments: Any, total_q: int, total_kv: int | None) -> SharedInputs:
    offsets, kind = arguments["cu_seq_lens_q"], allocator.layer_type
    longest = {"max_q": arguments["max_length_q"], "max_kv": arguments["max_length_k"][kind]}
    with torch.inference_mode(False):  # the tensors of a mask have version counters
        cu_q, cu_kv = offsets.clone(), arguments["cu_seq_lens_k"][kind].to(torch.int32, copy=True)
        documents = masks.documents(cu_q, cu_kv, **longest, total_q=total_q, total_kv=total_kv)
        window = _window(allocator)
        mask = CAUSAL if window is None else masks.window(window - 1, 0, align="bottom_right")
        pages = None
        if total_kv is None:
            rows = arguments["read_index"][allocator.index]
            pages = _block_table(rows, cu_kv, allocator.tokens_per_page, longest["max_kv"])
    return SharedInputs(offsets, layer, mask & documents, pages)


def _block_table(rows: Tensor, cu_kv: Tensor, page_size: int, longest: int) -> Tensor:
    """The page of each request's tokens 0, page_size, ..., from the physical rows of all tokens, without a wait for a
    GPU."""
    first = torch.arange(0, longest, page_size, device=rows.device)
    token = cu_kv[:-1, None] + first
    pages = rows[token.clamp(max=len(rows) - 1)] // page_size
    return pages.where(token < cu_kv[1:, None], 0).to(torch.int32)


def accept(name: str) -> None:
    """Let continuous batching run models with this attention implementation, whose layers get the cache itself."""
    try:
        from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache
    except ImportError:  # an older version
        return
    _accept_in_manager(ContinuousBatchingManager, name)
    _pass_on_cache(PagedAttentionCache, name)


def _accept_in_manager(manager: Any, name: str) -> None:
    """Let the manager keep this implementation; it knows a fixed list."""
    switch = getattr(manager, SWITCH, None)
    if switch is None or getattr(switch, "accepts_undivided", False):
        return

    @functools.wraps(switch)
    def switch_others(self: Any, model: Any, *args: Any, **options: Any) -> None:
        if model.config._attn_implementation != name:
            switch(self, model, *args, **options)

    switch_others.accepts_undivided = True  # type: ignore[attr-defined]
    setattr(manager, SWITCH, switch_others)


def _pass_on_cache(paged_cache: Any, name: str) -> None:
    """Let the cache pass itself to this implementation, which then updates it, as transformers did before 5.24.

    From 5.24 on, the layers update it, and `update` gathers all cached keys. Before, attention implementations did.
    """
    gather = paged_cache.update
    if getattr(gather, "passes_on_cache", False):
        return

    @functools.wraps(gather, updated=())  # not the attributes of torch.compiler.disable
    def update(
        self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        if self.config._attn_implementation != name:
            return gather(self, key_states, value_states, layer_idx, kwargs)  # type: ignore[no-any-return]
        kwargs["cache"] = self
        if layer_idx in self.__dict__.get(GATHERED, ()):
            return gather(self, key_states, value_states, layer_idx, dict(kwargs))  # type: ignore[no-any-return]
        self.__dict__.setdefault(NEW, {})[layer_idx] = key_states, value_states
        return key_states, value_states

    update.passes_on_cache = True  # type: ignore[attr-defined]
    paged_cache.update = update
