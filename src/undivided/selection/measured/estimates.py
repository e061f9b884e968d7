"""The estimated time of a problem with a backend, from the nearest measured problem, and the order that follows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from undivided._units import duration
from undivided.machine import Machine
from undivided.request.problem import Problem
from undivided.selection.measured import table
from undivided.selection.measured.cells import TableCell, pass_of, table_cell, work
from undivided.selection.measured.table import MeasuredRates, Run

NEAR = (1, 2)
"""By how many powers of two a measured problem may differ in key length and in work. The suites increase both by
factors of four, so that there are no gaps."""
SHORT = 16
"""Up to this number of keys, only an entry with the same rounded number applies: with twice as many keys another kernel
may be the fastest (measured: `docs/decisions/2026-11-21-ranks-by-measurement.md`)."""
TIE = 0.05
"""Rates within this fraction are equal: repeated runs differ by a few percent."""
FOREIGN_TIE = 0.5
"""The same for rates that were measured on a CPU of another vendor at the same level: the ratio of two backends differs
by a factor of two between vendors (measured: `docs/decisions/2026-11-24-ranks-of-every-level.md`)."""


class Estimate(NamedTuple):
    """The estimated time of a problem with a backend: its work, divided by the rate of the nearest measured problem.

    seconds: forward, and backward if there are gradients. rate: work per second. unit: of the work, "FLOP" or "B". run:
        the run that the rate is from.
    """

    seconds: float
    rate: float
    unit: str
    run: Run

    def __str__(self) -> str:
        return f"est. {duration(self.seconds)}, from bench {self.run.when[:10]}, {self.run.machine}"


def nearest(problem: Problem, machine: Machine) -> MeasuredRates | None:
    """The entry of the nearest measured problem of this kind, within `NEAR` in key length and work, or None."""
    own = table_cell(problem, machine)
    if own is None:
        return None
    for rates in table.tables():
        entries = rates.get(own.kind, {})
        near = [(distance, sizes) for sizes in entries if (distance := _distance(own, *sizes)) is not None]
        if near:
            return entries[min(near)[1]]
    return None


def _distance(own: TableCell, length: int, work: int) -> int | None:
    """The powers of two between a cell and a measured one; None if there are more than `NEAR`."""
    length_steps, work_steps = abs(length - own.length), abs(work - own.work)
    reach = NEAR[0] if min(length, own.length) > SHORT.bit_length() else 0
    return length_steps + work_steps if length_steps <= reach and work_steps <= NEAR[1] else None


def estimate(entry: MeasuredRates | None, name: str, problem: Problem) -> Estimate | None:
    """The estimated time of this problem with the backend of this name; None if it was not measured."""
    rate = entry.rates.get(name) if entry is not None else None
    if entry is None or rate is None:
        return None
    return Estimate(work(problem) / rate, rate, "B" if pass_of(problem) == "decode" else "FLOP", entry.run)


def tie(entry: MeasuredRates, device: str, machine: Machine) -> float:
    """The fraction within which the rates of an entry are equal on this machine: `TIE`, or `FOREIGN_TIE`.

    >>> entry = MeasuredRates(Run("2027-01-02", "AMD EPYC, 1 thread", "abc", "2.13", "a.json"), {})
    >>> tie(entry, "cpu", Machine(processor="AMD Ryzen")), tie(entry, "cpu", Machine(processor="Intel(R) Xeon(R)"))
    (0.05, 0.5)
    """
    return FOREIGN_TIE if is_foreign(entry.run, device, machine) else TIE


def is_foreign(run: Run, device: str, machine: Machine) -> bool:
    """Whether a run was made on a CPU of another vendor than this machine's; False if the machine names no CPU."""
    ours = _vendor(machine.processor)
    return device == "cpu" and ours not in ("", _vendor(run.machine))


def _vendor(processor: str) -> str:
    """The first word of a processor's name, "amd" or "intel"; "" of a described machine without one."""
    word = re.match(r"[A-Za-z]*", processor)
    return word[0].lower() if word else ""


def fastest_first(names: Sequence[str], rates: Mapping[str, float], tie: float = TIE) -> Iterator[str]:
    """The names, fastest first; of those within `tie` of the fastest remaining one, the first in the given order.

    >>> list(fastest_first(["a", "b", "c"], {"a": 10.0, "b": 20.0, "c": 20.5}))
    ['b', 'c', 'a']
    """
    left = list(names)
    while left:
        best = max(rates[name] for name in left)
        first = next(name for name in left if rates[name] >= (1 - tie) * best)
        yield first
        left.remove(first)
