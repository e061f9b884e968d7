"""Caches of keys and values: for generation, for serving many sequences, and for speculative decoding."""

from undivided.cache.contiguous import KVCache
from undivided.cache.inference_params import InferenceParams
from undivided.cache.paged import PagedKVCache

__all__ = ["InferenceParams", "KVCache", "PagedKVCache"]
