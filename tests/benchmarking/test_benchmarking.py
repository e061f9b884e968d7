"""Benchmarks: what is timed and what is not, disturbed runs, goals, the report and its tables. No test depends on a
time."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import undivided
from undivided import benchmarking, masks
from undivided.benchmarking import competitors, memory, peak, report, runs, suites, timing
from undivided.benchmarking.catalogue import DTYPES, SUITES, Benchmark, Goal, benchmarks
from undivided.benchmarking.catalogue.serving import STEPS
from undivided.benchmarking.competitors import Competitor, Prepared, prepare
from undivided.benchmarking.runs import Settings
from undivided.benchmarking.timing import Reading, Steady
from undivided.cli._app import app
from undivided.kernels import cpu
from undivided.verification.cases import Case
from undivided.verification.sample import sample_of

SINGLE = tuple(suite for suite in SUITES if suite not in ("overhead", "memory"))
TINY = Case("tiny", layout="bhsd", batch=1, q_len=24, heads=2, qk_dim=16, needs=())
QUIET = peak.Probe("a rate", "FLOP/s", lambda: Reading(1e9))


def tiny(**changes: Any) -> Benchmark:
    """A benchmark that takes no time, with whatever is to be tried."""
    case = {name: changes.pop(name) for name in list(changes) if name in TINY.__dataclass_fields__}
    return Benchmark("forward", replace(TINY, **case), changes.pop("dtype", torch.float32), **changes)


class Clock:
    """A stopwatch on which every call takes as long as was said; the calls are made all the same."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.calls = seconds, list[tuple[str, int]]()

    def __call__(self, function: Callable[[], object], calls: int) -> float:
        name = str(function())
        self.calls.append((name, calls))
        return calls * self.seconds[name]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that always does the same, and is asked at no cost."""
    monkeypatch.setattr(peak, "arithmetic", lambda dtype, device, clock: QUIET)
    monkeypatch.setattr(peak, "reading", lambda size, device, clock: QUIET)
    monkeypatch.setattr(peak, "tiles", lambda: None)


def hurried(**changes: Any) -> Settings:
    return Settings(
        **{"patience": 0.0, "small_patience": 0.0, "attempts": 1, "backends": (), "others": ("sdpa", "math"), **changes}
    )


def entries(case: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in case["entries"]}


class TestTurns:
    def test_competitors_take_turns_and_the_median_counts(self) -> None:
        order, spans = [], iter([1.0, 1.0, 9.0, 1.0, 2.0, 8.0, 1.0, 2.0])

        def watch(function: Callable[[], object], calls: int) -> float:
            order.append(function())
            return calls * next(spans)

        found, turns, _ = timing.race({"a": lambda: "a", "b": lambda: "b"}, 0.0, watch)
        assert order == ["a", "b"] * 4, "once to see how long they take, then three turns"
        assert turns == 3
        assert found == {"a": 2.0, "b": 2.0}

    def test_nobody_takes_no_turns(self) -> None:
        assert timing.race({}, 1.0)[0] == {}

    def test_short_calls_are_repeated_within_a_turn_and_long_ones_are_not(self) -> None:
        clock = Clock(long=0.5, short=1e-5)
        times, turns, _ = timing.race({"long": lambda: "long", "short": lambda: "short"}, 5.1, clock)
        assert times == pytest.approx({"long": 0.5, "short": 1e-5})
        assert turns == math.floor(5.1 / 0.504)
        assert dict(clock.calls[2:]) == {"long": 1, "short": 400}

    @pytest.mark.parametrize(
        ("patience", "turns"), [(0.0, timing.MIN_TURNS), (1e9, timing.MAX_TURNS)], ids=["none", "endless"]
    )
    def test_there_are_never_too_few_turns_nor_too_many(self, patience: float, turns: int) -> None:
        assert timing.race({"a": lambda: "a"}, patience, Clock(a=0.1))[1] == turns

    @pytest.mark.parametrize(
        ("witnessed", "found"),
        [([1.0, 1.4], (2.0, False)), ([1.0, 3.0, 1.2, 1.0], (2.5, False)), ([3.0, 1.0, 2.0, 1.0], (2.5, True))],
        ids=["calm", "calm-again", "never-calm"],
    )
    def test_a_witness_has_a_disturbed_race_run_again(
        self, witnessed: list[float], found: tuple[float, bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It looks before and after, five calls each time; its best is 1."""
        looks = iter([x for x in (1.0, *witnessed) for _ in range(5)])
        witness = timing.Witness(lambda: None, lambda function, calls: next(looks))
        assert witness.slowness() == 1.0
        spans = iter([2.0] * 4 + [2.5] * 3)
        monkeypatch.setattr(timing, "PAUSE", 0.0)
        race = timing.race({"a": lambda: "a"}, 0.0, lambda function, calls: calls * next(spans), witness, attempts=2)
        assert (race.seconds, race.contended) == ({"a": found[0]}, found[1])

    def test_a_gpu_is_timed_by_events(self) -> None:
        assert timing.stopwatch("cuda:1") is timing._by_events
        assert timing.stopwatch("cpu") is timing._by_clock

    def test_processor_time_leaves_out_the_time_in_which_the_core_runs_something_else(self) -> None:
        watch = timing.stopwatch(clock=time.process_time)
        assert watch(lambda: time.sleep(0.05), 1) < 0.04
        assert watch(lambda: sum(range(100_000)), 3) > 0


class TestDisturbedRuns:
    def steady(self, *readings: Reading | float, best: float = 0.0, attempts: int = 3) -> Steady[int]:
        seen = iter([r if isinstance(r, Reading) else Reading(r) for r in readings])
        values = iter(range(10))
        found = timing.steady(lambda: next(values), lambda: next(seen), best, attempts)
        assert next(seen, None) is None, "every probe was called"
        return found

    def test_a_calm_run_is_made_once(self) -> None:
        found = self.steady(100.0, 97.0)
        assert (found.value, found.attempts, found.contended, found.peak) == (0, 1, False, 100.0)

    def test_a_disturbed_run_is_repeated(self) -> None:
        found = self.steady(100.0, 80.0, 99.0, 100.0)
        assert (found.value, found.attempts, found.contended) == (1, 2, False)

    def test_the_calmest_of_disturbed_runs_counts_and_is_marked(self) -> None:
        found = self.steady(100.0, 50.0, 100.0, 90.0, 100.0, 60.0)
        assert (found.value, found.attempts, found.contended) == (1, 3, True)
        assert (found.before.rate, found.after.rate) == (100.0, 90.0)

    def test_a_machine_that_is_busy_from_beginning_to_end_is_found_by_the_best_it_has_shown(self) -> None:
        assert self.steady(50.0, 50.0, best=100.0, attempts=1).contended
        assert not self.steady(90.0, 90.0, best=100.0, attempts=1).contended

    def test_a_machine_that_was_never_idle_is_found_by_the_share_of_its_threads(self) -> None:
        assert self.steady(Reading(50.0, 0.6), Reading(50.0, 0.6), attempts=1).contended
        assert not self.steady(Reading(50.0, 0.97), Reading(50.0, 0.96), attempts=1).contended

    def test_drift_of_seven_percent_is_the_limit(self) -> None:
        assert not self.steady(100.0, 93.0, attempts=1).contended
        assert self.steady(100.0, 92.9, attempts=1).contended


class TestPeak:
    def test_every_probe_gives_a_rate_and_a_share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peak, "BURST", 1e-4)
        monkeypatch.setattr(peak, "SIDE", 32)
        monkeypatch.setattr(peak, "MAX_SECONDS", 0.0)
        probes = [*(peak.arithmetic(dtype) for dtype in DTYPES.values()), peak.reading(4096)]
        for probe in probes:
            rate, share = probe.measure()
            assert 0 < rate < math.inf
            assert share > 0
        assert [probe.unit for probe in probes] == ["FLOP/s"] * 3 + ["B/s"]

    def test_by_processor_time_a_probe_that_must_wait_has_its_whole_share(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        library = cpu.load()
        if isinstance(library, str):
            pytest.skip("needs the native library")
        monkeypatch.setattr(peak, "BURST", 1e-3)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        real = library.peak
        monkeypatch.setattr(library, "peak", lambda *words: (time.sleep(0.02), real(*words))[1])
        assert peak.multiply_adds(library, torch.float32).share < 0.5
        waited = peak.multiply_adds(library, torch.float32, time.process_time)
        assert waited.share > 0.95
        assert waited.rate > 2 * peak.multiply_adds(library, torch.float32).rate

    def test_a_forced_instruction_set_is_held_against_its_own_peak(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peak, "_products_are_fast", lambda library, dtype: True)
        native = not isinstance(peak.cpu.load(), str)
        monkeypatch.delenv("UNDIVIDED_ISA", raising=False)
        assert "matrix product" in peak.arithmetic(torch.bfloat16).what
        monkeypatch.setenv("UNDIVIDED_ISA", "avx2")
        assert ("multiply-adds" in peak.arithmetic(torch.bfloat16).what) == native

    def test_without_the_native_library_products_stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peak.cpu, "load", lambda: "not built")
        assert peak.arithmetic(torch.float32).what == "float32 matrix product"


class TestCatalogue:
    @pytest.mark.parametrize("suite", SINGLE)
    def test_names_are_unique_and_some_are_quick(self, suite: str) -> None:
        found = benchmarks(suite)
        assert len({one.name for one in found}) == len(found)
        assert 0 < sum(one.quick for one in found) < len(found)

    def test_every_goal_of_a_feature_has_the_problem_without_it(self) -> None:
        for suite in SINGLE:
            for one in benchmarks(suite):
                assert (one.goal.within is None) == (one.without is None)

    def test_only_a_backward_asks_for_gradients(self) -> None:
        for suite in SINGLE:
            assert all((one.case.needs is None) == one.backward for one in benchmarks(suite))

    def test_packed_documents_hold_8192_tokens_of_the_lengths_they_say(self) -> None:
        for one in benchmarks("mask"):
            if one.case.layout == "thd" and one.case.mask is not None:
                shortest, longest = map(int, one.case.name.split("-")[1:])
                lengths = one.case.mask().normal_form(1, 1, 8192, 8192, torch.device("cpu")).q_sequence.flatten()
                counts = torch.bincount(lengths.long())[:-1]  # the last is cut where 8192 is reached
                assert shortest <= int(counts.min())
                assert int(counts.max()) <= longest

    @pytest.mark.parametrize(("suites", "dtypes"), [(["speed"], ["fp32"]), (["forward"], ["fp8"])])
    def test_what_is_not_there_is_refused(self, suites: list[str], dtypes: list[str]) -> None:
        with pytest.raises(undivided.InputError):
            benchmarking.plan(suites, dtypes)

    def test_a_filter_that_leaves_nothing_is_refused(self) -> None:
        with pytest.raises(undivided.InputError, match="select at least one"):
            benchmarking.plan(filter="nothing like this")

    def test_the_whole_is_the_sum_of_its_suites(self) -> None:
        whole = benchmarking.plan()
        assert whole.steps == sum(benchmarking.plan([suite]).steps for suite in SUITES)
        assert whole.overhead
        assert whole.memory
        assert benchmarking.plan(quick=True).steps < whole.steps / 5


@pytest.mark.usefixtures("quiet")
class TestVerificationFirst:
    def wrong(self, by: float) -> Callable[[Prepared], Competitor]:
        def make(prepared: Prepared) -> Competitor:
            right = competitors._sdpa(prepared)
            return replace(right, results=lambda: {name: by * x for name, x in right.results().items()})

        return make

    def test_a_wrong_competitor_shows_no_speed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(competitors._MAKERS, "sdpa", self.wrong(1.001))  # type: ignore[arg-type]
        case = runs.run(tiny(goal=Goal(faster=(("sdpa", 2.0),))), hurried())
        found = entries(case)
        assert found["undivided"]["ok"]
        assert found["math"]["seconds"] > 0
        assert not found["sdpa"]["ok"]
        assert found["sdpa"]["errors"]["out"]["error"] > found["sdpa"]["errors"]["out"]["budget"]
        assert not {"seconds", "per_second", "of_ours", "fraction"} & set(found["sdpa"])
        assert not case["goals"], "nothing is compared with a wrong answer"

    def test_a_right_competitor_shows_its_speed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(competitors._MAKERS, "sdpa", self.wrong(1.0))  # type: ignore[arg-type]
        assert entries(runs.run(tiny(), hurried()))["sdpa"]["seconds"] > 0

    def test_a_wrong_gradient_is_as_bad_as_a_wrong_output(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def make(prepared: Prepared) -> Competitor:
            right = competitors._sdpa(prepared)
            return replace(right, results=lambda: right.results() | {"dk": 0 * right.results()["dk"]})

        monkeypatch.setitem(competitors._MAKERS, "sdpa", make)  # type: ignore[arg-type]
        found = entries(runs.run(tiny(needs=None, backward=True), hurried()))
        assert set(found["undivided"]["errors"]) == {"out", "dq", "dk", "dv"}
        assert "seconds" in found["undivided"]
        assert not found["sdpa"]["ok"]
        assert "seconds" not in found["sdpa"]

    def test_nothing_of_the_library_is_shown_where_the_library_is_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attention = competitors.attention
        monkeypatch.setattr(competitors, "attention", lambda *t, **kw: 1.01 * attention(*t, **kw))
        case = runs.run(tiny(goal=Goal(fraction=0.5)), hurried())
        assert not entries(case)["undivided"]["ok"]
        assert "seconds" not in entries(case)["undivided"]
        assert not case["goals"]

    def test_the_problem_without_a_feature_is_verified_as_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attention = competitors.attention

        def wrong_when_plain(*tensors: Tensor, **arguments: Any) -> Any:
            factor = 1.0 if arguments.get("softcap") else 1.01
            return factor * attention(*tensors, **arguments)

        one = tiny(softcap=5.0, without=TINY, goal=Goal(within=1.35))
        assert all(entry["ok"] for entry in runs.run(one, hurried())["entries"])
        monkeypatch.setattr(competitors, "attention", wrong_when_plain)
        case = runs.run(one, hurried())
        assert {name: entry["ok"] for name, entry in entries(case).items()} == {"undivided": True, "without": False}
        assert not case["goals"]

    def test_what_raises_is_wrong_and_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def raising() -> dict[str, Tensor]:
            raise RuntimeError("no such kernel")

        def make(prepared: Prepared) -> Competitor:
            return Competitor("sdpa", "broken", prepared, raising, raising)

        monkeypatch.setitem(competitors._MAKERS, "sdpa", make)  # type: ignore[arg-type]
        found = entries(runs.run(tiny(), hurried()))["sdpa"]
        assert not found["ok"]
        assert "no such kernel" in found["note"]

    @pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
    def test_a_sample_finds_one_wrong_row_among_those_it_looks_at(self, backward: bool) -> None:
        case = replace(TINY, q_len=640, heads=3, needs=None if backward else ())
        prepared = prepare(Benchmark("forward", case, torch.float32, backward=backward))
        sample = sample_of(prepared.call, prepared.tensors, prepared.inputs.grad_out if backward else None)
        assert len(sample.pieces) == (2 if backward else 4), "too large to be looked at whole"
        results = competitors._sdpa(prepared).results()
        for name, value in results.items():
            assert sample.error(name, value) <= sample.allowed[name]
            spoiled = value.clone()
            spoiled[0, 2, -1] = 0.0
            assert sample.error(name, spoiled) > sample.allowed[name]
            missing = value.clone()
            missing[0, 0, 3, 1] = math.nan
            assert sample.error(name, missing) == math.inf

    def test_a_sample_requires_exact_zeros_where_nothing_reaches(self) -> None:
        case = replace(TINY, mask=lambda: masks.causal("bottom_right"), kv_len=8, q_len=12)
        prepared = prepare(Benchmark("forward", case, torch.float32))
        sample = sample_of(prepared.call, prepared.tensors, None)
        out = competitors._ours(prepared, None).results()["out"].clone()
        assert sample.error("out", out) <= sample.allowed["out"]
        out[0, 0, 0, 0] = 1e-30
        assert sample.error("out", out) == math.inf


@pytest.mark.usefixtures("quiet")
class TestFigures:
    def run(self, benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> dict[str, Any]:
        monkeypatch.setattr(timing, "race", lambda calls, *_: timing.Race({n: seconds[n] for n in calls}, 7))
        return runs.run(benchmark, hurried())

    def test_fractions_ratios_and_goals(self, monkeypatch: pytest.MonkeyPatch) -> None:
        goal = Goal(fraction=0.9, faster=(("sdpa", 2.0), ("onnxruntime", 1.2)))
        case = self.run(tiny(goal=goal), monkeypatch, undivided=1e-4, sdpa=3e-4, math=5e-4)
        ours = entries(case)["undivided"]
        assert case["operations"] == 4 * 24 * 24 * 16 * 2
        assert ours["per_second"] == pytest.approx(case["operations"] / 1e-4)
        assert ours["fraction"] == pytest.approx(case["operations"] / 1e-4 / 1e9)
        assert entries(case)["math"]["of_ours"] == pytest.approx(5.0)
        fraction, faster = case["goals"]
        assert not fraction["met"]
        assert fraction["short"] == pytest.approx(1 - ours["fraction"] / 0.9)
        assert (faster["what"], faster["met"], faster["short"]) == ("x sdpa", True, 0.0)

    def test_decoding_is_held_against_reads_that_took_turns_with_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reads = replace(QUIET, what="read", turn=lambda: None, work=3e6)
        monkeypatch.setattr(peak, "reading", lambda size, device, clock: reads)
        decoding = replace(tiny(name="decode", q_len=1, kv_len=24, reads=True), suite="decode")
        case = self.run(decoding, monkeypatch, undivided=1e-4, sdpa=3e-4, math=5e-4, read=1e-3)
        assert case["rate"]["used"] == pytest.approx(3e9)
        assert case["rate"]["before"] != case["rate"]["used"]
        assert entries(case)["undivided"]["fraction"] == pytest.approx(case["bytes"] / 1e-4 / 3e9)
        assert "read" not in entries(case)

    def test_causal_counts_the_pairs_it_allows(self) -> None:
        assert runs.operations(prepare(tiny(mask=masks.causal))) == 4 * (24 * 25 // 2) * 16 * 2
        assert runs.operations(prepare(tiny(mask=masks.causal, backward=True, needs=None))) == 10 * 300 * 16 * 2
        packed = tiny(layout="thd", mask=lambda: masks.documents([0, 10, 24]))
        assert runs.operations(prepare(packed)) == 4 * (10**2 + 14**2) * 16 * 2

    def test_decoding_is_held_against_what_it_reads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one = tiny(
            batch=2, q_len=1, kv_len=24, mask=lambda: masks.lengths([24, 7]), reads=True, goal=Goal(fraction=0.1)
        )
        case = self.run(one, monkeypatch, undivided=1e-5, sdpa=1e-5, math=1e-5)
        assert case["bytes"] == (24 + 7) * 2 * 2 * 16 * 4
        assert case["goals"][0]["what"] == "reads"
        assert entries(case)["undivided"]["fraction"] == pytest.approx(case["bytes"] / 1e-5 / 1e9)

    def test_a_feature_is_held_against_the_same_problem_without_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one = tiny(softcap=5.0, without=TINY, goal=Goal(within=1.35))
        case = self.run(one, monkeypatch, undivided=3e-4, without=2e-4)
        assert set(case["absent"]) >= {"sdpa", "math"}
        assert case["goals"][0]["found"] == pytest.approx(1.5)
        assert case["goals"][0]["short"] == pytest.approx(1.5 / 1.35 - 1)

    def test_a_small_problem_has_an_allowance(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one = tiny(goal=Goal(allowance=(1.05, 15e-6)))
        times = {"undivided": 40e-6, "sdpa": 20e-6}
        monkeypatch.setattr(timing, "race", lambda *_: timing.Race(times, 3))
        (case,) = runs.run_small([one], hurried())
        assert not case["goals"][0]["met"]
        assert case["goals"][0]["wanted"] == pytest.approx(36e-6)

    def test_the_best_of_a_probe_is_remembered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rates = iter([100.0, 100.0, 60.0, 60.0])
        slower = peak.Probe("a rate", "FLOP/s", lambda: Reading(next(rates)))
        monkeypatch.setattr(peak, "arithmetic", lambda dtype, device, clock: slower)
        settings = hurried()
        assert [runs.run(tiny(), settings)["rate"]["contended"] for _ in range(2)] == [False, True]


@pytest.mark.usefixtures("quiet")
class TestCompetitors:
    @pytest.mark.parametrize("suite", [suite for suite in SINGLE if suite != "serving"])
    def test_every_kind_of_problem_is_computed_rightly_by_all_that_take_part(self, suite: str) -> None:
        """The catalogue made small: its features, layouts and directions, not its sizes."""
        seen = set()
        for one in benchmarks(suite):
            case = replace(
                one.case,
                name="small",
                q_len=min(one.case.q_len, 40),
                heads=4,
                kv_heads=2 if one.reads else 4,
                qk_dim=32,
                batch=min(one.case.batch, 2),
                **_shrunk(one.case),
            )
            without = None if one.without is None else replace(one.without, q_len=40, heads=4, qk_dim=32)
            key = (
                case.layout,
                case.batch,
                str(case.mask and case.mask()),
                case.bias,
                case.softcap,
                case.alibi,
                case.dropout_p,
                case.page_size,
                one.backward,
                one.dtype,
            )
            if key in seen:
                continue
            seen.add(key)
            result = runs.run(replace(one, case=case, without=without, goal=Goal()), hurried())
            for entry in result["entries"]:
                assert entry["ok"], (one.name, entry)
            assert entries(result)["undivided"]["seconds"] > 0

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    @pytest.mark.parametrize("name", STEPS)
    def test_every_serving_step_is_computed_rightly_by_all_that_take_part(self, name: str, dtype: str) -> None:
        """The steps made small: their phases and page tables, not their sizes."""
        step = STEPS[name]
        new = tuple(min(count, 9) for count in step.new)
        past = (
            min(cached - count, 20 + i) for i, (count, cached) in enumerate(zip(step.new, step.cached, strict=True))
        )
        cached = tuple(count + earlier for count, earlier in zip(new, past, strict=True))
        options = dict(step.options) | ({"shared_pages": 1} if "shared_pages" in step.options else {})
        chosen = step.chosen and (0, 1)
        small = replace(step, new=new, cached=cached, page_size=step.page_size and 16, chosen=chosen, options=options)
        one = replace(small.benchmark("small", DTYPES[dtype]), goal=Goal())
        result = runs.run(one, hurried(others=("sdpa", "onnxruntime")))
        for entry in result["entries"]:
            assert entry["ok"], (one.name, entry)
        expected = {"undivided", "separate", "sdpa"} | ({"without"} if one.without else set())
        if step.page_size and not step.batch_invariant and not {"memory", "shared_pages"} & options.keys():
            expected |= {"cache"}
        assert expected <= entries(result).keys()
        assert entries(result)["undivided"]["seconds"] > 0

    def test_the_chosen_backend_is_not_timed_twice(self) -> None:
        chosen = undivided.explain(*(torch.empty(1, 2, 24, 16) for _ in range(3)), layout="bhsd").backend.name
        found, absent = competitors.competitors(prepare(tiny()), (chosen, "reference"), ())
        assert [one.name for one in found] == ["undivided", "reference"]
        assert absent[chosen] == "undivided chose it"

    def test_a_backend_that_cannot_is_absent_with_its_reasons(self) -> None:
        _, absent = competitors.competitors(prepare(tiny()), ("flash_attn",), ())
        assert "device=cpu" in absent["flash_attn"]

    @pytest.mark.parametrize(
        ("changes", "name", "why"),
        [
            pytest.param({"softcap": 5.0}, "sdpa", "softcap", id="softcap"),
            pytest.param({"dropout_p": 0.1}, "sdpa", "its own dropout pattern", id="dropout"),
            pytest.param(
                {"q_len": 1, "kv_len": 24, "page_size": 4, "layout": "bshd", "mask": lambda: masks.lengths([24])},
                "math",
                "not read pages",
                id="pages",
            ),
            pytest.param({"needs": None, "backward": True}, "flex", "no backward", id="flex-backward"),
            pytest.param({"needs": None, "backward": True}, "onnxruntime", "no backward", id="onnxruntime-backward"),
            pytest.param(
                {"mask": lambda: masks.window(3, 0)}, "onnxruntime", "plain and causal", id="onnxruntime-window"
            ),
        ],
    )
    def test_what_another_cannot_compute_it_is_absent_from(self, changes: dict[str, Any], name: str, why: str) -> None:
        found, absent = competitors.competitors(prepare(tiny(**changes)), (), (name,))
        assert name not in {one.name for one in found}
        assert why in absent[name]

    def test_math_stays_away_where_its_tables_would_fill_the_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(competitors, "MAX_SCORE_BYTES", 1000)
        assert "GiB" in competitors.competitors(prepare(tiny()), (), ("math",))[1]["math"]

    def test_onnxruntime_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        absent = competitors.competitors(prepare(tiny()), (), ("onnxruntime",))[1]
        assert "pip install 'undivided[bench]'" in absent["onnxruntime"]

    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    def test_onnxruntime_gives_the_right_numbers(self, causal: bool) -> None:
        one = tiny(q_len=200, mask=masks.causal if causal else None)
        found = entries(runs.run(one, hurried(others=("onnxruntime",))))["onnxruntime"]
        assert found["ok"], found
        assert found["seconds"] > 0


def _shrunk(case: Case) -> dict[str, Any]:
    """Masks of the catalogue for 40 tokens, and 48 keys to decode over."""
    if case.q_len == 1 and case.kv_len is not None:
        lengths = [48, 17][: case.batch] if case.mask is not None else None
        return {"kv_len": 48, "mask": (lambda: masks.lengths(lengths)) if lengths else None}
    if case.mask is None:
        return {}
    kinds = case.mask().kinds
    if "documents" in kinds:
        return {"mask": lambda: masks.documents([0, 11, 40]) & masks.causal()}
    if "dense" in kinds:
        pairs = torch.rand(1, 1, 40, 40, generator=torch.Generator().manual_seed(0)) < 0.75
        return {"mask": lambda: masks.dense(pairs)}
    return {"mask": lambda: masks.window(7, 0)} if "window" in kinds else {}


@pytest.fixture(scope="module")
def small_report() -> dict[str, Any]:
    """A report of one problem of every suite, in no time: small sizes, a machine that is not asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak, "arithmetic", lambda dtype, device, clock: QUIET)
        patch.setattr(peak, "reading", lambda size, device, clock: QUIET)
        patch.setattr(
            memory,
            "memory",
            lambda lengths, step: [
                {
                    "tokens": 4096,
                    "dtype": "float32",
                    "backend": "native",
                    "bytes": 5 << 20,
                    "bytes_a_token": 1280.0,
                    "tensors": 4 << 20,
                    "error": 1e-7,
                    "budget": 3e-7,
                },
                {
                    "tokens": 16384,
                    "dtype": "float32",
                    "backend": "native",
                    "bytes": 21 << 20,
                    "bytes_a_token": 1344.0,
                    "tensors": 16 << 20,
                    "error": 1e-7,
                    "budget": 3e-7,
                    "growth": 1.05,
                    "met": True,
                },
            ],
        )
        patch.setattr(suites, "_OVERHEAD", {True: (1, 1), False: (1, 1)})
        goal = Goal(fraction=1e9, faster=(("sdpa", 1e-9),))
        single = (
            tiny(goal=goal),
            tiny(name="documents", layout="thd", mask=lambda: masks.documents([0, 9, 24])),
            replace(tiny(name="decode", q_len=1, kv_len=24, reads=True), suite="decode"),
        )
        small = (replace(tiny(name="b1", goal=Goal(allowance=(1e-9, 1e-9))), suite="small"),)
        plan = benchmarking.Plan(single, (small,), overhead=True, memory=True, quick=True)
        steps: list[str] = []
        report = benchmarking.execute(plan, hurried(), threads=1, step=steps.append)
        assert len(steps) == plan.steps - 2, "the memory's own steps are faked away"
    return report


@pytest.mark.usefixtures("quiet")
def test_an_interrupted_run_keeps_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = benchmarking.Plan((tiny(), tiny(name="second")), (), overhead=True, memory=False, quick=True)

    def interrupt(name: str) -> None:
        if "second" in name:
            raise KeyboardInterrupt

    report = benchmarking.execute(plan, hurried(), step=interrupt)
    assert report["interrupted"]
    assert [case["name"] for case in report["cases"]] == ["fp32-tiny"]
    assert "interrupted" in benchmarking.markdown(report).splitlines()[0]


class TestReport:
    def test_json_holds_machine_commit_and_settings(self, small_report: dict[str, Any]) -> None:
        assert json.loads(json.dumps(small_report, allow_nan=False)) == json.loads(json.dumps(small_report))
        assert small_report["schema"] == suites.SCHEMA
        machine = small_report["machine"]
        assert {"processor", "isa", "native", "threads", "torch", "UNDIVIDED_ISA", "onnxruntime", "cores"} <= set(
            machine
        )
        assert machine["threads"] == 1
        assert small_report["commit"] is None or len(small_report["commit"]) >= 7

    def test_every_case_has_its_problem_and_how_it_was_measured(self, small_report: dict[str, Any]) -> None:
        for case in small_report["cases"]:
            assert {
                "suite",
                "name",
                "problem",
                "operations",
                "bytes",
                "turns",
                "rate",
                "entries",
                "absent",
                "goals",
            } <= set(case)
            assert {"contended", "attempts"} <= set(case["rate"])
            for entry in case["entries"]:
                assert entry["ok"], (case["name"], entry)
                assert {"name", "label", "ok", "errors", "seconds", "per_second", "of_ours"} <= set(entry)

    def test_tables_show_every_case_once(self, small_report: dict[str, Any]) -> None:
        found = {table.title: table for table in benchmarking.tables(small_report)}
        assert list(found) == ["Forward", "Decoding", "Small problems", "Overhead of a call", "Memory"]
        for table in found.values():
            assert all(len(row) == len(table.columns) for row in table.rows)
        assert [row[0].text for row in found["Forward"].rows] == ["fp32-tiny", "fp32-documents"]
        assert found["Decoding"].columns[:3] == ("case", "time", "reads")
        assert found["Forward"].columns == ("case", "time", "peak", "sdpa", "math", "goal")

    def test_a_goal_that_is_missed_says_by_how_much(self, small_report: dict[str, Any]) -> None:
        goal = benchmarking.tables(small_report)[0].rows[0][-1]
        assert goal.tone == "bad"
        assert "peak -100 %" in goal.text
        assert "x sdpa met" in goal.text

    def test_markdown_is_the_same_tables(self, small_report: dict[str, Any]) -> None:
        text = benchmarking.markdown(small_report)
        lines = text.splitlines()
        assert "1 threads" in lines[0]
        assert text.endswith("\n")
        for table in benchmarking.tables(small_report):
            start = lines.index(f"**{table.title}**") + 2
            rows = lines[start : start + 2 + len(table.rows)]
            assert all(row.count(" | ") == len(table.columns) - 1 for row in rows)
            assert rows[1].count("--:") == len(table.numbers)

    def test_a_contended_case_is_marked(self, small_report: dict[str, Any]) -> None:
        copy = json.loads(json.dumps(small_report))
        copy["cases"][0]["rate"]["contended"] = True
        table = benchmarking.tables(copy)[0]
        assert table.rows[0][0].text.endswith("~")
        assert any(note.startswith("~") for note in table.notes)

    def test_a_wrong_competitor_has_a_word_where_its_figure_would_be(self, small_report: dict[str, Any]) -> None:
        copy = json.loads(json.dumps(small_report))
        for entry in copy["cases"][0]["entries"]:
            if entry["name"] == "sdpa":
                entry["ok"] = False
                for key in ("seconds", "per_second", "of_ours", "fraction"):
                    del entry[key]
        row = benchmarking.tables(copy)[0].rows[0]
        assert [cell.text for cell in row].count("WRONG") == 1

    @pytest.mark.parametrize("bad", [{}, {"schema": 0}, []], ids=["empty", "old", "list"])
    def test_what_is_no_report_is_refused(self, bad: Any) -> None:
        with pytest.raises(undivided.InputError, match="schema"):
            benchmarking.tables(bad)

    @pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.5 s"), (0.00123, "1.23 ms"), (4e-6, "4 us")])
    def test_spans(self, seconds: float, text: str) -> None:
        assert report.span(seconds) == text


class TestMemory:
    def test_growth_is_relative_to_the_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fake(command: list[str], **rest: Any) -> Any:
            tokens = int(command[-2])
            row = {"tokens": tokens, "bytes": 1000 * tokens if tokens < 60 else 30 * tokens**2}
            return type("Done", (), {"returncode": 0, "stdout": json.dumps(row), "stderr": ""})

        monkeypatch.setattr("undivided.benchmarking.memory.subprocess.run", fake)
        rows = memory.memory((20, 40, 80))
        assert [row.get("met") for row in rows] == [None, True, False]

    def test_a_process_that_fails_ends_it(self) -> None:
        with pytest.raises(RuntimeError, match="no_such_dtype"):
            memory.memory((16,), "no_such_dtype")

    @pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read as Linux counts it")
    def test_a_short_sequence_is_measured_in_a_process_of_its_own(self) -> None:
        (row,) = memory.memory((2048,))
        assert row["error"] <= row["budget"]
        assert row["tensors"] == 4 * 2048 * memory.HEAD_SIZE * 4
        assert row["tensors"] <= row["bytes"] < 2048**2 * 4, "less than one matrix of scores"


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "120"}, catch_exceptions=False)


@pytest.mark.usefixtures("quiet")
class TestCommand:
    SMALL = ("--suite", "small", "--filter", "small/fp32-b1-h1-1-d32", "--dtype", "fp32")

    def test_json_goes_to_a_file_and_its_tables_to_the_terminal(self, tmp_path: Path) -> None:
        path = tmp_path / "found" / "here.json"
        done = command(*self.SMALL, "--quick", "--suite", "small", "--filter", "fp32-b1-h8-1-d64", "--json", str(path))
        assert done.exit_code == 0, done.output
        assert "Small problems" in done.stdout
        written = json.loads(path.read_text())
        assert [case["name"] for case in written["cases"]] == ["fp32-b1-h8-1-d64", "fp32-b1-h8-1-d64-backward"]
        shown = command("--markdown", str(path))
        assert shown.exit_code == 0
        assert shown.stdout == benchmarking.markdown(written)

    def test_json_goes_to_stdout(self) -> None:
        done = command("--quick", "--suite", "small", "--filter", "fp32-b1-h8-1-d64", "--json", "-", "--threads", "1")
        assert json.loads(done.stdout)["machine"]["threads"] == 1

    def test_exit_code_is_1_where_the_library_is_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attention = competitors.attention
        monkeypatch.setattr(competitors, "attention", lambda *t, **kw: 1.01 * attention(*t, **kw))
        done = command("--quick", "--suite", "small", "--filter", "fp32-b1-h8-1-d64")
        assert done.exit_code == 1

    def test_nothing_is_timed_where_the_overhead_is_red(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Red:
            ok = False

        monkeypatch.setattr("undivided.benchmarking.overhead.verify", lambda *tensors, **arguments: Red())
        done = command("--suite", "overhead", "--quick")
        assert done.exit_code == 1
        assert "verification failed" in done.stderr

    def test_the_overhead_names_its_unit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(suites, "_OVERHEAD", {True: (1, 1)})
        done = command("--suite", "overhead", "--quick")
        assert done.exit_code == 0
        assert "microseconds" in done.stdout

    def test_processor_time_is_named_in_the_report_and_above_its_tables(self) -> None:
        words = ("--quick", "--suite", "small", "--filter", "fp32-b1-h8-1-d64", "--threads", "1", "--processor-time")
        report = json.loads(command(*words, "--json", "-").stdout)
        assert report["settings"]["clock"] == "processor time"
        assert "processor time" in benchmarking.markdown(report).splitlines()[0]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--suite", "speed"], "forward"),
            (["--processor-time", "--threads", "2"], "for one thread of a CPU"),
            (["--dtype", "fp8"], "bf16"),
            (["--competitor", "abacus"], "onnxruntime"),
            (["--backend", "warp_drive", "--quick", "--suite", "decode", "--filter", "bf16-bhsd-batch1"], "warp_drive"),
            (["--filter", "nothing like this"], "forward/bf16"),
            (["--markdown", "no_such_file.json"], "no_such_file.json"),
            (["--device", "cuda"], "no CUDA device"),
        ],
        ids=["suite", "processor-time", "dtype", "competitor", "backend", "filter", "file", "device"],
    )
    def test_wrong_input_is_one_message_and_exit_code_2(
        self, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        done = command(*arguments)
        assert done.exit_code == 2
        assert said in done.stderr
        assert "Traceback" not in done.output
