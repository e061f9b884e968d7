"""A paged cache whose pages are spread over the ranks of a context."""

from undivided.context_parallel.cache.paged import ContextPagedKVCache

__all__ = ["ContextPagedKVCache"]
