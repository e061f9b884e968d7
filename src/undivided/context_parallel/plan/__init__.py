"""The cost of every strategy and placement, counted from the mask without a run."""

from undivided.context_parallel.plan.recommendation import BANDWIDTH, COLUMNS, FLOPS, LEGEND, Option, Plan, cells, plan

__all__ = ["BANDWIDTH", "COLUMNS", "FLOPS", "LEGEND", "Option", "Plan", "cells", "plan"]
