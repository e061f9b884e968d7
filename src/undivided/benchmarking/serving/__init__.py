"""The competitors of the suite "serving"."""

from undivided.benchmarking.serving.competitors import MAKERS, Group, groups

__all__ = ["MAKERS", "Group", "groups"]
