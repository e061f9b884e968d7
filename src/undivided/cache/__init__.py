"""Caches of keys and values: what generates text, serves many sequences, and takes drafts back."""

from undivided.cache.contiguous import KVCache
from undivided.cache.inference_params import InferenceParams
from undivided.cache.paged import PagedKVCache

__all__ = ["InferenceParams", "KVCache", "PagedKVCache"]
