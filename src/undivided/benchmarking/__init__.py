"""Benchmarks: interleaved, verified before anything is timed, and held against what the machine can do at most.

catalogue    what is timed, and the goals           competitors, onnx   who takes part
timing       turns, medians, disturbed runs         peak                what the machine can do
runs         one problem, from tensors to figures   overhead, memory    what a call costs, what it holds
suites       all of it, into one report             report              the report as tables and Markdown
tasks        one problem in a process of its own    __main__            all of it without the command line's packages

Machines are shared and noisy: compare figures of one run with each other, not with those of another.
"""

from __future__ import annotations

from undivided.benchmarking.catalogue import DTYPES, SUITES
from undivided.benchmarking.report import markdown, tables
from undivided.benchmarking.suites import Plan, execute, plan

__all__ = ["DTYPES", "SUITES", "Plan", "execute", "markdown", "plan", "tables"]
