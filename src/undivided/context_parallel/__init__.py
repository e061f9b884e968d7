"""Context parallelism: attention over sequences whose tokens are spread over ranks, for every mask."""

from undivided.context_parallel.context import ContextParallel
from undivided.context_parallel.exchange.collectives import RankError, Traffic
from undivided.context_parallel.exchange.simulate import simulate
from undivided.context_parallel.paged_cache import ContextPagedKVCache
from undivided.context_parallel.plan import Plan, plan
from undivided.context_parallel.sharding import Placement

__all__ = ["ContextPagedKVCache", "ContextParallel", "Placement", "Plan", "RankError", "Traffic", "plan", "simulate"]
