"""The cost of every strategy and placement, counted from the mask without a run."""

from undivided.context_parallel.plan.cached import CachedStep, cached_step
from undivided.context_parallel.plan.recommendation import (
    BANDWIDTH,
    COLUMNS,
    FLOPS,
    LEGEND,
    Option,
    Plan,
    cells,
    mesh_shape,
    plan,
)

__all__ = [
    "BANDWIDTH",
    "COLUMNS",
    "FLOPS",
    "LEGEND",
    "CachedStep",
    "Option",
    "Plan",
    "cached_step",
    "cells",
    "mesh_shape",
    "plan",
]
