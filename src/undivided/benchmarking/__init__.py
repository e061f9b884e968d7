"""Benchmarks: results are verified before they are timed, competitors alternate, the peak of the machine is measured.

    catalogue    problems and goals                     competitors, onnx   the implementations that are timed
    timing       turns, medians, disturbed runs         peak                the peak rates of the machine
    runs         one problem, from tensors to figures   overhead, memory    cost of a call, peak memory
    suites       all problems, into one report          report              the report as tables and Markdown
    tasks        one problem in a separate process      __main__            the benchmarks with torch alone
    ranks        measured ranks from a report           tuning              tile sizes of the Triton kernels
    measurement  measured ranks under a time limit      roofline            the time that a problem should take
    serving      competitors on packed batches

Machines are shared and noisy: compare figures only with figures of the same run.
"""

from __future__ import annotations

from undivided.benchmarking.catalogue import DTYPES, SUITES
from undivided.benchmarking.report import markdown, tables
from undivided.benchmarking.suites import Plan, execute, plan

__all__ = ["DTYPES", "SUITES", "Plan", "execute", "markdown", "plan", "tables"]
