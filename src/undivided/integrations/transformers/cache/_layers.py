"""The layers of `Cache`: keys and values in one storage that grows, instead of a new tensor for every token.

Legend: B batch, N key/value heads, S tokens, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from undivided.cache._checks import TokenNames, checked_tokens
from undivided.cache._storage import Storage, TokenSpec
from undivided.errors import InputError
from undivided.integrations.transformers.cache._states import CachedStates

ROOM = 64
"""The smallest number of tokens by which a storage grows."""

States = Tensor | CachedStates
_TOKEN_NAMES = TokenNames("key_states", "value_states", layout=None, kv_heads=None)


class _StoredLayer:
    """The base of both kinds of layers: the tokens from `_start` to `_end` of the storage are cached."""

    def __init__(self, quantize: str | None, max_len: int) -> None:
        self._quantize, self._max_len = quantize, max_len
        self.reset()

    def reset(self) -> None:
        """Drop all tokens and their memory."""
        self.storage: Storage | None = None
        self._start = self._end = 0
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the memory for states of these shapes, ``[B, N, S, D]``."""
        batch, heads, count, dim = key_states.shape
        self.dtype, self.device = value_states.dtype, value_states.device  # keys may be wider under autocast
        spec = TokenSpec.checked(heads, dim, value_states.shape[-1], self.dtype, quantize=self._quantize)
        self.storage = Storage(batch, max(self._max_len, _with_room(count)), spec, self.device)
        self.is_initialized = True

    @property
    def keys(self) -> Tensor | None:
        """The cached keys, ``[B, N, S, D]``, dequantised."""
        return self._dense(0)

    @property
    def values(self) -> Tensor | None:
        """The cached values, ``[B, N, S, D]``, dequantised."""
        return self._dense(1)

    def _dense(self, index: int) -> Tensor | None:
        if self.storage is None:
            return None
        pools = self.storage.pools.tokens(self._start, self._end)
        return pools.as_dtype(self.storage.spec.dtype)[index].transpose(1, 2)

    def _append(self, key_states: Tensor, value_states: Tensor) -> int:
        """The number of new tokens, after they are written, quantised if the cache is."""
        if self.storage is None:
            self.lazy_initialization(key_states, value_states)
        storage = self.storage
        assert storage is not None
        if torch.promote_types(value_states.dtype, storage.spec.dtype) != storage.spec.dtype:
            storage = self._widen(value_states.dtype)  # the text before was computed under autocast
        batch = storage.k.shape[0]
        new = checked_tokens(
            key_states,
            value_states,
            None,
            layout="bhsd",
            batch=batch,
            spec=storage.spec,
            device=storage.k.device,
            names=_TOKEN_NAMES,
        )
        count = new.k.shape[1]
        if self._end + count > storage.k.shape[1]:
            storage = self._move(_with_room(self._end - self._start + count))
        storage.fill(self._end, new)
        self._end += count
        return count

    def _widen(self, dtype: torch.dtype) -> Storage:
        """A new storage of the cached tokens in a wider dtype; in quantised form they stay as they are."""
        assert self.storage is not None
        self.dtype = torch.promote_types(dtype, self.storage.spec.dtype)
        self.storage = self.storage.with_dtype(self.dtype)
        return self.storage

    def _move(self, page_size: int, rows: Tensor | None = None) -> Storage:
        """A new storage, which starts with the cached tokens of these rows of the batch, or of all."""
        assert self.storage is not None
        self.storage = self.storage.with_page_size(self._start, self._end, page_size, rows)
        self._start, self._end = 0, self._end - self._start
        return self.storage

    def _states(self, start: int) -> tuple[States, States]:
        """Keys and values from this token of the storage on, ``[B, N, S, D]``: views, or quantised states."""
        assert self.storage is not None
        spec, pools = self.storage.spec, self.storage.pools.tokens(start, self._end)
        if pools.k_scale is None or pools.v_scale is None:
            return pools.k.transpose(1, 2), pools.v.transpose(1, 2)
        k = CachedStates(pools.k, pools.k_scale, spec.head_dim, spec.dtype)
        return k, CachedStates(pools.v, pools.v_scale, spec.value_dim, spec.dtype)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b of the batch becomes a copy of row ``beam_idx[b]``; rows that stay are not copied."""
        if self.storage is not None and beam_idx.shape[0] != self.storage.k.shape[0]:
            self._select(beam_idx)
        elif self.storage is not None:
            pairs = [(source, row) for row, source in enumerate(beam_idx.tolist()) if source != row]
            self.storage.copy(pairs, self._end)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        if self.storage is not None:
            self._select(torch.arange(self.storage.k.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows of the batch: their indices, or a bool for every row."""
        if self.storage is not None:
            self._select(torch.arange(self.storage.k.shape[0])[indices.cpu()])

    def offload(self) -> None:
        """Raises InputError: the memory of this cache stays on its device."""
        raise _not_offloaded("offload")

    def prefetch(self) -> None:
        """Raises InputError, as `offload`."""
        raise _not_offloaded("prefetch")

    def _select(self, rows: Tensor) -> None:
        assert self.storage is not None
        self._move(self.storage.k.shape[1], rows.to(self.storage.k.device))

    def _remove(self, tokens_to_remove: int) -> None:
        """Drop the last tokens, ``-tokens_to_remove`` of them."""
        if tokens_to_remove > 0:
            hint = f"crop({-tokens_to_remove}) removes the last {tokens_to_remove} tokens"
            raise InputError("tokens_to_remove", "be at most 0", tokens_to_remove, hint=hint)
        self._end = max(self._start, self._end + tokens_to_remove)


class FullLayer(_StoredLayer, DynamicLayer):  # type: ignore[misc]
    """All tokens of a layer; `DynamicLayer` defines the interface."""

    def update(self, key_states: Tensor, value_states: Tensor, *unused: Any, **ignored: Any) -> tuple[States, States]:
        """All keys and values, ``[B, N, S, D]``, after new tokens are appended."""
        self._append(key_states, value_states)
        return self._states(0)

    def get_seq_length(self) -> int:
        """The number of cached tokens."""
        return self._end

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens."""
        self._remove(tokens_to_remove)


class SlidingLayer(_StoredLayer, DynamicSlidingWindowLayer):  # type: ignore[misc]
    """The last tokens of a layer with a window; `DynamicSlidingWindowLayer` defines the interface.

    Tokens that left the window stay in memory until the storage is full; then the others move to its start.
    """

    def __init__(self, sliding_window: int, quantize: str | None, max_len: int) -> None:
        self.sliding_window, self.record_past = sliding_window, False
        self._sliding_window_tensor = torch.tensor(sliding_window)
        super().__init__(quantize, min(max_len, 2 * sliding_window))

    def reset(self) -> None:
        """Drop all tokens and their memory."""
        super().reset()
        self.cumulative_length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *unused: Any, **ignored: Any) -> tuple[States, States]:
        """The keys and values that the queries of new tokens see, ``[B, N, S, D]``, after these are appended."""
        count = self._append(key_states, value_states)
        self.cumulative_length += count
        first = max(self._start, self._end - count - self.sliding_window + 1)
        if not self.record_past:
            self._forget()
        return self._states(first)

    def check_crop(self) -> None:
        """InputError if tokens that left the window may be missing after a crop."""
        if self.cumulative_length >= self.sliding_window and not self.record_past:
            hint = "activate_past_recording() before the tokens are appended"
            what = f"{self.cumulative_length} tokens in a window of {self.sliding_window}"
            raise InputError("crop", "be called while past tokens are recorded", what, hint=hint)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last ``-tokens_to_remove`` tokens, and then all that left the window."""
        self.check_crop()
        end = self._end
        self._remove(tokens_to_remove)
        self.cumulative_length -= end - self._end
        self._forget()

    def _forget(self) -> None:
        """Give up the tokens that the next query does not see."""
        self._start = max(self._start, self._end - self.sliding_window + 1)


def _not_offloaded(method: str) -> InputError:
    hint = "transformers' DynamicCache(offloading=True)"
    return InputError(method, "not be called: this cache stays on the device of its model", "a call", hint=hint)


def _with_room(count: int) -> int:
    """The tokens of a storage for `count` tokens, so that the cost of growing is constant per token."""
    return count + max(count // 2, ROOM)
