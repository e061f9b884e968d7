"""A benchmark, from its tensors to its figures: prepare, verify, time between probes, compare with the goal.

A competitor whose results are outside the error budget is not timed. What comes out are plain values that JSON can
hold.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from undivided._machine import Machine
from undivided.benchmarking import competitors as _competitors
from undivided.benchmarking import peak, timing
from undivided.benchmarking.catalogue import Benchmark
from undivided.benchmarking.competitors import Competitor, Prepared
from undivided.benchmarking.peak import Probe
from undivided.benchmarking.ranks import described
from undivided.benchmarking.timing import Steady, Stopwatch
from undivided.verification.sample import Sample, sample_of

__all__ = ["Settings", "run", "run_small"]

Entry = dict[str, Any]
Case = dict[str, Any]


@dataclass(eq=False)
class Settings:
    """How to run.

    backends: of ours, timed beside the chosen one. others: who else takes part. device: "cpu" or "cuda".
    patience: seconds of timing for one benchmark, and for a small one. attempts: how often a disturbed run is made at
        most.
    watch: takes the time. best: the largest that each probe has shown so far.
    """

    backends: Sequence[str] = ("native",)
    others: Sequence[str] = ("sdpa", "math", "onnxruntime")
    device: str = "cpu"
    patience: float = 1.0
    small_patience: float = 0.1
    attempts: int = timing.ATTEMPTS
    watch: Stopwatch | None = None
    best: dict[str, float] = field(default_factory=dict)

    def hurried(self) -> Settings:
        """The same for a quick run."""
        return dataclasses.replace(self, patience=0.3, small_patience=0.03, attempts=2)

    @functools.cached_property
    def witness(self) -> timing.Witness | None:
        """One for all runs: it remembers its best."""
        call = peak.tiles() if self.device == "cpu" else None
        return timing.Witness(call) if call else None

    def race(self, competitors: Mapping[str, timing.Call], patience: float) -> timing.Race:
        """Competitors in turns."""
        return timing.race(competitors, patience, self.stopwatch, self.witness, self.attempts)

    @property
    def stopwatch(self) -> Stopwatch:
        """The given one, or that of the device."""
        return self.watch or timing.stopwatch(self.device)


def run(benchmark: Benchmark, settings: Settings) -> Case:
    """Time one benchmark.

    >>> from undivided.benchmarking.catalogue import benchmarks
    >>> from undivided.benchmarking.runs import Settings
    >>> found = run(benchmarks("small")[0], Settings(backends=(), others=("sdpa",), patience=0.001, attempts=1))
    >>> [entry["name"] for entry in found["entries"]], found["entries"][0]["ok"]
    (['undivided', 'sdpa'], True)
    """
    prepared = _competitors.prepare(benchmark, settings.device)
    found, absent = _competitors.competitors(prepared, settings.backends, settings.others)
    entries, right = _verified(found)
    probe = _probe(prepared, settings)
    calls: dict[str, timing.Call] = {competitor.name: competitor.call for competitor in right}
    if probe.turn is not None:
        calls[probe.what] = probe.turn
    timed = _steadily(lambda: settings.race(calls, settings.patience), probe, settings)
    seconds, turns, slowed = timed.value
    used = probe.work / seconds[probe.what] if probe.turn is not None else timed.peak
    rate = {
        "what": probe.what,
        "unit": probe.unit,
        "before": timed.before.rate,
        "after": timed.after.rate,
        "share": min(timed.before.share, timed.after.share),
        "used": used,
        "attempts": timed.attempts,
        "contended": timed.contended or slowed,
    }
    case = _described(prepared) | {"turns": turns, "rate": rate, "entries": entries, "absent": absent}
    if benchmark.goal.pairs is not None:
        problem = prepared.problem
        case["share_of_pairs"] = _pairs(prepared) / (problem.batch * problem.q_len * problem.kv_len)
    _with_figures(case, seconds, benchmark)
    return case


def run_small(
    group: Sequence[Benchmark], settings: Settings, step: Callable[[str], None] = lambda _: None
) -> list[Case]:
    """Time small benchmarks between one pair of probes: a probe takes longer than they do.

    step: called with the name of each as its turn to be verified comes.
    """
    ready = []
    for benchmark in group:
        step(f"{benchmark.suite}: {benchmark.name}")
        prepared = _competitors.prepare(benchmark, settings.device)
        found, absent = _competitors.competitors(prepared, settings.backends, ("sdpa",))
        entries, right = _verified(found)
        ready.append(
            (
                _described(prepared) | {"entries": entries, "absent": absent},
                {competitor.name: competitor.call for competitor in right},
            )
        )

    def all_of_them() -> list[timing.Race]:
        return [settings.race(calls, settings.small_patience) for _, calls in ready]

    probe = peak.arithmetic(group[0].dtype, settings.device)
    timed = _steadily(all_of_them, probe, settings)
    for (case, _), (seconds, turns, slowed), benchmark in zip(ready, timed.value, group, strict=True):
        case |= {"turns": turns, "rate": {"contended": timed.contended or slowed, "attempts": timed.attempts}}
        _with_figures(case, seconds, benchmark)
    return [case for case, _ in ready]


def _steadily(measure: Callable[[], Any], probe: Probe, settings: Settings) -> Steady[Any]:
    found = timing.steady(measure, probe.measure, settings.best.get(probe.what, 0.0), settings.attempts)
    settings.best[probe.what] = max(settings.best.get(probe.what, 0.0), found.before.rate, found.after.rate)
    return found


def _probe(prepared: Prepared, settings: Settings) -> Probe:
    if prepared.benchmark.reads:
        return peak.reading(_bytes_read(prepared), settings.device)
    return peak.arithmetic(prepared.problem.dtype, settings.device)


# verification


def _verified(found: Sequence[Competitor]) -> tuple[list[Entry], list[Competitor]]:
    """An entry for each competitor, and those whose results are right."""
    samples: dict[Prepared, Sample] = {}
    entries, right = [], []
    for competitor in found:
        prepared = competitor.prepared
        if prepared not in samples:
            grad = prepared.inputs.grad_out if prepared.benchmark.backward else None
            samples[prepared] = sample_of(prepared.call, prepared.tensors, grad)
        entry: Entry = {"name": competitor.name, "label": competitor.label, "note": ""}
        entry |= _judged(competitor, samples[prepared])
        entries.append(entry)
        if entry["ok"]:
            right.append(competitor)
    return entries, right


def _judged(competitor: Competitor, sample: Sample) -> Entry:
    try:
        results = competitor.results()
        far = {name: sample.error(name, value) for name, value in results.items()}
    except Exception as error:  # whatever a kernel raises is a finding
        return {"ok": False, "errors": {}, "note": f"raised {type(error).__name__}: {' '.join(str(error).split())}"}
    errors = {
        name: {"error": _finite(error), "budget": sample.allowed[name], "ok": error <= sample.allowed[name]}
        for name, error in far.items()
    }
    return {"ok": all(x["ok"] for x in errors.values()) and bool(errors), "errors": errors}


# figures


def _described(prepared: Prepared) -> Case:
    benchmark, problem = prepared.benchmark, prepared.problem
    return {
        "suite": benchmark.suite,
        "name": benchmark.name,
        "problem": str(problem),
        "place": described(problem, Machine.this(prepared.tensors.q.device)),
        "backward": benchmark.backward,
        "operations": operations(prepared),
        "bytes": _bytes_read(prepared) if benchmark.reads else None,
    }


def operations(prepared: Prepared) -> float:
    """What the allowed pairs cost: a multiply-add is two, and a backward multiplies five times where a forward does
    twice."""
    problem = prepared.problem
    pairs = _pairs(prepared) * problem.heads
    if prepared.benchmark.backward:
        return 2.0 * pairs * (3 * problem.qk_dim + 2 * problem.v_dim)
    return 2.0 * pairs * (problem.qk_dim + problem.v_dim)


def _pairs(prepared: Prepared) -> int:
    """Allowed pairs of one head, over the batch. A dense mask counts whole: tiles of it are computed and then
    masked."""
    problem, call = prepared.problem, prepared.call
    if call.mask.is_full:
        return problem.batch * problem.q_len * problem.kv_len
    ranges = call.normal_form(prepared.tensors.q.device).ranges.long()
    lengths = (ranges[..., 1::2] - ranges[..., 0::2]).clamp(min=0)
    return int(lengths.sum()) * (problem.batch if ranges.shape[0] == 1 else 1)


def _bytes_read(prepared: Prepared) -> int:
    """The keys and values within the lengths, once."""
    problem = prepared.problem
    row = problem.kv_heads * (problem.qk_dim + problem.v_dim) * problem.dtype.itemsize
    return _pairs(prepared) // max(problem.q_len, 1) * row


def _with_figures(case: Case, seconds: Mapping[str, float], benchmark: Benchmark) -> None:
    """Add to a case what was timed: seconds, rate, fraction of the peak, times ours; and how the goal fared."""
    ours = seconds.get("undivided")
    work = case["bytes"] or case["operations"]
    for entry in case["entries"]:
        if (time := seconds.get(entry["name"])) is None:
            continue
        entry |= {"seconds": time, "per_second": work / time, "of_ours": time / ours if ours else None}
        if used := case["rate"].get("used"):
            entry["fraction"] = work / time / used
    case["goals"] = list(_goals(case, benchmark)) if ours else []


def _goals(case: Case, benchmark: Benchmark) -> list[dict[str, Any]]:
    goal, found = benchmark.goal, []
    entries = {entry["name"]: entry for entry in case["entries"] if "seconds" in entry}
    ours = entries["undivided"]
    if goal.fraction is not None:
        what = "reads" if benchmark.reads else "peak"
        found.append(_goal(what, goal.fraction, ours["fraction"]))
    for name, factor in goal.faster:
        if name in entries:
            found.append(_goal(f"x {name}", factor, entries[name]["of_ours"]))
    if goal.within is not None and "without" in entries:
        found.append(_goal("x without it", goal.within, ours["seconds"] / entries["without"]["seconds"], at_most=True))
    found += _goals_of_the_kernel(entries, benchmark)
    if goal.pairs is not None and case.get("share_of_pairs") and "without" in entries:
        predicted = entries["without"]["seconds"] * case["share_of_pairs"]
        found.append(_goal("x its pairs", goal.pairs, ours["seconds"] / predicted, at_most=True))
    others = [entry["of_ours"] for name, entry in entries.items() if name not in ("undivided", "without")]
    if goal.best is not None and others:
        found.append(_goal("x the best other", goal.best, 1 / min(others), at_most=True))
    if goal.allowance is not None and "sdpa" in entries:
        allowed = goal.allowance[0] * entries["sdpa"]["seconds"] + goal.allowance[1]
        found.append(_goal("seconds", allowed, ours["seconds"], at_most=True))
    return found


def _goals_of_the_kernel(entries: Mapping[str, Entry], benchmark: Benchmark) -> list[dict[str, Any]]:
    """Those of our own GPU kernel: chosen, or timed beside what was."""
    goal, chosen = benchmark.goal, entries["undivided"]
    kernel = chosen if chosen["label"] == "triton" else entries.get("triton")
    if kernel is None:
        return []
    found = [] if goal.kernel is None else [_goal("peak by triton", goal.kernel, kernel["fraction"])]
    for name, factor in goal.kernel_faster:
        if name in entries:
            ratio = entries[name]["seconds"] / kernel["seconds"]
            found.append(_goal(f"x {name} by triton", factor, ratio))
    return found


def _goal(what: str, wanted: float, found: float, at_most: bool = False) -> dict[str, Any]:
    """One goal; `short` is how far it is missed, relative to what was wanted."""
    short = found / wanted - 1 if at_most else 1 - found / wanted
    return {
        "what": what,
        "wanted": wanted,
        "found": found,
        "at_most": at_most,
        "met": short <= 0,
        "short": max(short, 0.0),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
