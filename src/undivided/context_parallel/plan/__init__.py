"""The cost of every strategy and placement, counted from the mask without running anything."""

from undivided.context_parallel.plan.recommendation import BANDWIDTH, FLOPS, HEAD, LEGEND, Option, Plan, cells, plan

__all__ = ["BANDWIDTH", "FLOPS", "HEAD", "LEGEND", "Option", "Plan", "cells", "plan"]
