"""A benchmark, from its tensors to its figures: prepare, verify, time between probes, compare with the goal.

A competitor whose results are outside the error budget is not timed. The figures are plain values for JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from undivided.benchmarking import competitors as _competitors
from undivided.benchmarking import peak, serving, timing
from undivided.benchmarking.catalogue import Benchmark
from undivided.benchmarking.competitors import Competitor, PreparedBenchmark
from undivided.benchmarking.peak import Probe
from undivided.benchmarking.ranks import describe_place
from undivided.benchmarking.timing import ProbedMeasurement
from undivided.machine import Machine
from undivided.request.flops import backward_flops, forward_flops
from undivided.verification.budget import UNDECIDED
from undivided.verification.report import finite
from undivided.verification.sample import Sample, build_sample

__all__ = ["Settings", "mark_contended", "problem_fields", "run", "run_small", "verify"]

Entry = dict[str, Any]
TimedCase = dict[str, Any]


@dataclass(eq=False)
class Settings:
    """The settings of a run.

    Attributes:
        backends: our backends that are timed in addition to the chosen one.
        others: the other competitors.
        device: "cpu" or "cuda".
        patience: seconds of timing per benchmark.
        small_patience: seconds of timing per benchmark of the suite "small".
        attempts: largest number of attempts if a run is disturbed.
        clock: of the stopwatch and the probes on a CPU; `time.process_time`, for one thread, leaves out the time in
            which other processes have the core.
        best: the largest rate of each probe so far.
    """

    backends: Sequence[str] = ("native",)
    others: Sequence[str] = ("sdpa", "math", "onnxruntime", "vllm")
    device: str = "cpu"
    patience: float = 1.0
    small_patience: float = 0.1
    attempts: int = timing.ATTEMPTS
    clock: timing.Clock = time.perf_counter
    best: dict[str, float] = field(default_factory=dict)

    def hurried(self) -> Settings:
        """The same settings for a quick run."""
        return dataclasses.replace(self, patience=0.3, small_patience=0.03, attempts=2)

    @functools.cached_property
    def witness(self) -> timing.Witness | None:
        """The witness, one for all runs, because it stores its best time; None without a matrix unit."""
        call = peak.witness_call() if self.device == "cpu" else None
        return timing.Witness(call) if call else None

    def race(self, competitors: Mapping[str, timing.Function], patience: float) -> timing.Race:
        """The times of alternating competitors."""
        watch = timing.stopwatch(self.device, self.clock)
        return timing.race(competitors, patience, watch, self.witness, self.attempts)


def run(benchmark: Benchmark, settings: Settings) -> TimedCase:
    """The case that a benchmark reports: its figures, as plain values for JSON.

    >>> from undivided.benchmarking.catalogue import benchmarks
    >>> from undivided.benchmarking.runs import Settings
    >>> case = run(benchmarks("small")[0], Settings(backends=(), others=("sdpa",), patience=0.001, attempts=1))
    >>> [entry["name"] for entry in case["entries"]], case["entries"][0]["ok"]
    (['undivided', 'sdpa'], True)
    """
    prepared = _competitors.prepare(benchmark, settings.device)
    participants, absent = _participants(prepared, settings)
    entries, right = verify(participants)
    probe = _probe(prepared, settings)
    calls: dict[str, timing.Function] = {competitor.name: competitor.call for competitor in right}
    if probe.turn is not None:
        calls[probe.what] = probe.turn
    result = _measure_and_keep_best(lambda: settings.race(calls, settings.patience), probe, settings)
    seconds, turns, slowed, witness = result.value
    used = probe.work / seconds[probe.what] if probe.turn is not None else result.peak
    rate = {
        "what": probe.what,
        "unit": probe.unit,
        "before": result.before.rate,
        "after": result.after.rate,
        "share": min(result.before.share, result.after.share),
        "used": used,
        "attempts": result.attempts,
        "contended": result.contended or slowed,
        "witness": witness,
    }
    case = problem_fields(prepared) | {"turns": turns, "rate": rate, "entries": entries, "absent": absent}
    if benchmark.goal.pairs is not None:
        problem = prepared.problem
        case["share_of_pairs"] = _pairs(prepared) / (problem.batch * problem.q_len * problem.kv_len)
    _add_figures(case, seconds, benchmark)
    return case


def _participants(prepared: PreparedBenchmark, settings: Settings) -> tuple[list[Competitor], dict[str, str]]:
    """The competitors; those of the suite "serving" take a packed batch apart, each in its own way."""
    if prepared.benchmark.suite != "serving":
        return _competitors.competitors(prepared, settings.backends, settings.others)
    ours, absent = _competitors.competitors(prepared, settings.backends, ())
    makers = {
        name: make
        for name, make in serving.MAKERS.items()
        if name in settings.others or name not in _competitors.OTHERS
    }
    others, missing = _competitors.make_all(prepared, makers)
    return ours + others, absent | missing


def run_small(
    group: Sequence[Benchmark], settings: Settings, step: Callable[[str], None] = lambda _: None
) -> list[TimedCase]:
    """The cases of small benchmarks, timed between one pair of probes, because a probe takes longer than they do.

    step: called with the name of each benchmark before it is verified.
    """
    ready = []
    for benchmark in group:
        step(f"{benchmark.suite}: {benchmark.name}")
        prepared = _competitors.prepare(benchmark, settings.device)
        participants, absent = _competitors.competitors(prepared, settings.backends, ("sdpa",))
        entries, right = verify(participants)
        ready.append(
            (
                problem_fields(prepared) | {"entries": entries, "absent": absent},
                {competitor.name: competitor.call for competitor in right},
            )
        )

    def race_all() -> list[timing.Race]:
        return [settings.race(calls, settings.small_patience) for _, calls in ready]

    probe = peak.arithmetic_probe(group[0].dtype, settings.device, settings.clock)
    result = _measure_and_keep_best(race_all, probe, settings)
    for (case, _), (seconds, turns, slowed, witness), benchmark in zip(ready, result.value, group, strict=True):
        rate = {"contended": result.contended or slowed, "attempts": result.attempts, "witness": witness}
        case |= {"turns": turns, "rate": rate}
        _add_figures(case, seconds, benchmark)
    return [case for case, _ in ready]


def mark_contended(cases: Sequence[TimedCase]) -> None:
    """Mark each case whose witness or probe was slow compared with the best of the whole run.

    During the run a case is compared with the best so far, which is slow too if the run begins on a busy machine.

    >>> early, late = ({"rate": {"contended": False, "witness": seconds}} for seconds in (2e-3, 1e-3))
    >>> mark_contended([early, late])
    >>> early["rate"]["contended"], late["rate"]["contended"]
    (True, False)
    """
    rates = [case["rate"] for case in cases]
    fastest = min((rate["witness"] for rate in rates if rate["witness"]), default=0.0)
    probed = [rate for rate in rates if "what" in rate]  # small problems share a probe, and do not report it
    best: dict[str, float] = {}
    for rate in probed:
        best[rate["what"]] = max(best.get(rate["what"], 0.0), rate["before"], rate["after"])
    for rate in rates:
        rate["contended"] |= rate["witness"] > timing.SLOWER * fastest
    for rate in probed:
        rate["contended"] |= min(rate["before"], rate["after"]) < (1 - timing.SHORTFALL) * best[rate["what"]]


def _measure_and_keep_best(measure: Callable[[], Any], probe: Probe, settings: Settings) -> ProbedMeasurement[Any]:
    """The measurement between two probes; the best rate of the probe is kept in the settings."""
    best = settings.best.get(probe.what, 0.0)
    result = timing.measure_between_probes(measure, probe.measure, best, settings.attempts)
    settings.best[probe.what] = max(best, result.before.rate, result.after.rate)
    return result


def _probe(prepared: PreparedBenchmark, settings: Settings) -> Probe:
    if prepared.benchmark.reads:
        return peak.read_probe(_bytes_read(prepared), settings.device, settings.clock)
    return peak.arithmetic_probe(prepared.problem.dtype, settings.device, settings.clock)


def verify(participants: Sequence[Competitor]) -> tuple[list[Entry], list[Competitor]]:
    """An entry for each competitor, and the competitors whose results are within the budget."""
    samples: dict[PreparedBenchmark, Sample] = {}
    entries, right = [], []
    for competitor in participants:
        prepared = competitor.prepared
        if prepared not in samples:
            grad = prepared.inputs.grad_out if prepared.benchmark.backward else None
            samples[prepared] = build_sample(prepared.call, prepared.tensors, grad)
        entry: Entry = {"name": competitor.name, "label": competitor.label, "note": ""}
        entry |= _judge(competitor, samples[prepared])
        entries.append(entry)
        if entry["ok"]:
            right.append(competitor)
    return entries, right


def _judge(competitor: Competitor, sample: Sample) -> Entry:
    try:
        results = competitor.results()
        measured = {name: sample.error(name, value) for name, value in results.items()}
    except Exception as error:  # whatever a kernel raises is reported
        return {"ok": False, "errors": {}, "note": f"raised {type(error).__name__}: {' '.join(str(error).split())}"}
    errors = {
        name: {
            "error": finite(error),
            "budget": finite(sample.max_errors[name]),
            "ok": name not in sample.undecided and error <= sample.max_errors[name],
        }
        for name, error in measured.items()
    }
    entry: Entry = {"ok": all(x["ok"] for x in errors.values()) and bool(errors), "errors": errors}
    if undecided := sample.undecided & errors.keys():
        entry["note"] = f"{', '.join(sorted(undecided))}: {UNDECIDED}"
    return entry


def problem_fields(prepared: PreparedBenchmark) -> TimedCase:
    """The fields of a case that describe its problem."""
    benchmark, problem = prepared.benchmark, prepared.problem
    return {
        "suite": benchmark.suite,
        "name": benchmark.name,
        "problem": str(problem),
        "place": describe_place(problem, Machine.this(prepared.tensors.q.device)),
        "backward": benchmark.backward,
        "operations": operations(prepared),
        "bytes": _bytes_read(prepared) if benchmark.reads else None,
    }


def operations(prepared: PreparedBenchmark) -> float:
    """The FLOP of the allowed pairs in the pass that is timed."""
    problem = prepared.problem
    count = backward_flops if prepared.benchmark.backward else forward_flops
    return float(count(_pairs(prepared) * problem.heads, problem.qk_dim, problem.v_dim))


def _pairs(prepared: PreparedBenchmark) -> int:
    """The allowed pairs of one head, over the batch; a dense mask counts in full, because its tiles are computed."""
    problem, call = prepared.problem, prepared.call
    if call.mask.is_full:
        return problem.batch * problem.q_len * problem.kv_len
    ranges = call.normal_form(prepared.tensors.q).ranges.long()
    lengths = (ranges[..., 1::2] - ranges[..., 0::2]).clamp(min=0)
    return int(lengths.sum()) * (problem.batch if ranges.shape[0] == 1 else 1)


def _bytes_read(prepared: PreparedBenchmark) -> int:
    """The bytes of the keys and values within the lengths, each read once; latents are both."""
    problem, is_latent = prepared.problem, prepared.benchmark.case.memory == "latent"
    row = problem.kv_heads * (problem.qk_dim + (0 if is_latent else problem.v_dim)) * problem.dtype.itemsize
    if problem.packed:
        documents, _ = prepared.call.mask.take("documents")
        return int(documents.cu_seqlens_kv[-1]) * row
    return _pairs(prepared) // max(problem.q_len, 1) * row


def _add_figures(case: TimedCase, seconds: Mapping[str, float], benchmark: Benchmark) -> None:
    """Add the figures to a case: seconds, rate, fraction of the peak, ratio to our time, results of the goals."""
    ours = seconds.get("undivided")
    work = case["bytes"] or case["operations"]
    for entry in case["entries"]:
        if (time := seconds.get(entry["name"])) is None:
            continue
        entry |= {"seconds": time, "per_second": work / time, "of_ours": time / ours if ours else None}
        if used := case["rate"].get("used"):
            entry["fraction"] = work / time / used
    case["goals"] = list(_goals(case, benchmark)) if ours else []


def _goals(case: TimedCase, benchmark: Benchmark) -> Iterator[dict[str, Any]]:
    goal = benchmark.goal
    entries = {entry["name"]: entry for entry in case["entries"] if "seconds" in entry}
    ours = entries["undivided"]
    if goal.fraction is not None:
        yield _goal("reads" if benchmark.reads else "peak", goal.fraction, ours["fraction"])
    for name, factor in goal.faster:
        if name in entries and factor * (entries[name].get("fraction") or 0) <= 1:
            yield _goal(f"x {name}", factor, entries[name]["of_ours"])
    if goal.within is not None and "without" in entries:
        yield _goal("x without it", goal.within, ours["seconds"] / entries["without"]["seconds"], at_most=True)
    # our own GPU kernel, whether it was chosen or timed in addition
    kernel = ours if ours["label"] == "triton" else entries.get("triton")
    if kernel is not None:
        if goal.kernel is not None:
            yield _goal("peak by triton", goal.kernel, kernel["fraction"])
        for name, factor in goal.kernel_faster:
            if name in entries:
                yield _goal(f"x {name} by triton", factor, entries[name]["seconds"] / kernel["seconds"])
    if goal.pairs is not None and case.get("share_of_pairs") and "without" in entries:
        predicted = entries["without"]["seconds"] * case["share_of_pairs"]
        yield _goal("x its pairs", goal.pairs, ours["seconds"] / predicted, at_most=True)
    others = [entry["of_ours"] for name, entry in entries.items() if name not in ("undivided", "without")]
    if goal.best is not None and others:
        yield _goal("x the best other", goal.best, 1 / min(others), at_most=True)
    if goal.allowance is not None and "sdpa" in entries:
        limit = goal.allowance[0] * entries["sdpa"]["seconds"] + goal.allowance[1]
        yield _goal("seconds", limit, ours["seconds"], at_most=True)


def _goal(what: str, target: float, measured: float, at_most: bool = False) -> dict[str, Any]:
    """The result of one goal; `short` is the relative distance by which it is missed."""
    short = measured / target - 1 if at_most else 1 - measured / target
    return {
        "what": what,
        "wanted": target,
        "found": measured,
        "at_most": at_most,
        "met": short <= 0,
        "short": max(short, 0.0),
    }
