"""Two benchmark reports: which of our times changed beyond noise."""

from __future__ import annotations

from dataclasses import dataclass

from undivided._units import duration
from undivided.benchmarking.competitors import OTHERS
from undivided.benchmarking.report import BenchmarkReport, Cell, Table, TimedCase, tables
from undivided.benchmarking.timing import DRIFT
from undivided.report.chart_data import OURS

RULE = (
    f"A change counts if our time differs by more than the largest of: {100 * DRIFT:.0f} %; the difference of the "
    "probes of the machine before and after, in either run; the change of every other competitor in the same case, "
    "whose code is the same. A case that either run marks as disturbed (~) never counts."
)
"""The rule for noise, for the help and below the table."""

CONDITIONS = ("processor", "gpu", "threads", "native", "UNDIVIDED_ISA", "torch", "onnxruntime")


@dataclass(frozen=True)
class Change:
    """Our times of one case in two reports: `noise` is the relative change that does not count."""

    case: str
    old: float
    new: float
    noise: float
    disturbed: bool

    @property
    def ratio(self) -> float:
        """The new time relative to the old one."""
        return self.new / self.old

    @property
    def factor(self) -> float:
        """The longer of the two times relative to the shorter one."""
        return max(self.ratio, 1 / self.ratio)

    @property
    def verdict(self) -> str:
        """One of "faster", "slower", "same" and "disturbed"."""
        if self.disturbed:
            return "disturbed"
        if self.factor - 1 <= self.noise:
            return "same"
        return "faster" if self.ratio < 1 else "slower"


def changes(old: BenchmarkReport, new: BenchmarkReport) -> list[Change]:
    """The change of every case that both reports timed.

    Args:
        old, new: results of `undivided.benchmarking.execute`.

    Returns:
        One `Change` per case, in the order of the new report.

    Raises:
        InputError: one of the two is not a report of this version.

    >>> changes({"schema": 1, "cases": []}, {"schema": 1, "cases": []})
    []
    """
    for report in (old, new):
        tables(report)  # checks the report
    old_cases = {(case["suite"], case["name"]): case for case in old["cases"]}
    common = []
    for case in new["cases"]:
        earlier = old_cases.get((case["suite"], case["name"]))
        now, then = _times(case), _times(earlier) if earlier else {}
        if earlier is None or OURS not in now or OURS not in then:
            continue
        others = now.keys() & then.keys() & set(OTHERS)  # entries of our own code may have changed
        changes_of_others = [max(now[name] / then[name], then[name] / now[name]) - 1 for name in others]
        noise = max([DRIFT, *changes_of_others, _drift(case), _drift(earlier)])
        disturbed = case["rate"]["contended"] or earlier["rate"]["contended"]
        name = f"{case['suite']}/{case['name']}"
        common.append(Change(name, then[OURS], now[OURS], noise, disturbed))
    return common


def comparison(old: BenchmarkReport, new: BenchmarkReport) -> Table:
    """The changes beyond noise as a table, with what else differs between the two runs as notes.

    Args:
        old, new: results of `undivided.benchmarking.execute`.

    Returns:
        A `Table`: one row per change that counts, the largest first.

    Raises:
        InputError: one of the two is not a report of this version.
    """
    common = changes(old, new)
    counted = [change for change in common if change.verdict in ("faster", "slower")]
    counted.sort(key=lambda change: change.factor, reverse=True)
    rows = tuple(
        (
            Cell(change.case),
            Cell(duration(change.old)),
            Cell(duration(change.new)),
            Cell(f"{change.factor:.2f} x {change.verdict}", "good" if change.ratio < 1 else "bad"),
            Cell(f"{1 + change.noise:.2f} x"),
        )
        for change in counted
    )
    verdicts = [change.verdict for change in common]
    totals = ", ".join(f"{verdicts.count(word)} {word}" for word in ("faster", "slower", "same", "disturbed"))
    notes = [f"{len(common)} cases in both reports: {totals}.", RULE]
    if different := _differing_conditions(old, new):
        notes.insert(1, f"The runs differ in more than the library: {'; '.join(different)}.")
    return Table("Changes beyond noise", ("case", "old", "new", "change", "noise"), rows, tuple(notes))


def _times(case: TimedCase) -> dict[str, float]:
    """Seconds by the name of an entry, of those that were timed."""
    return {entry["name"]: entry["seconds"] for entry in case["entries"] if entry.get("seconds")}


def _drift(case: TimedCase) -> float:
    """The relative difference of the probes before and after a case; 0 if the report has none."""
    rate = case["rate"]
    if not rate.get("before") or not rate.get("after"):
        return 0.0
    return float(max(rate["before"], rate["after"]) / min(rate["before"], rate["after"]) - 1)


def _differing_conditions(old: BenchmarkReport, new: BenchmarkReport) -> list[str]:
    then, now = old["machine"], new["machine"]
    return [f"{name} {then.get(name)} and {now.get(name)}" for name in CONDITIONS if then.get(name) != now.get(name)]
