"""Benchmarks: what is timed and what is not, disturbed runs, goals, the report and its tables. No test depends on a
time."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from tiny_benchmarks import SINGLE

import undivided
from undivided import benchmarking
from undivided.benchmarking import peak, timing
from undivided.benchmarking.catalogue import DTYPES, SUITES, benchmarks
from undivided.benchmarking.timing import ProbedMeasurement, ProbeResult
from undivided.kernels import cpu


class Clock:
    """A stopwatch on which every call takes as long as was given; the calls are made all the same."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.calls = seconds, list[tuple[str, int]]()

    def __call__(self, function: Callable[[], object], calls: int) -> float:
        name = str(function())
        self.calls.append((name, calls))
        return calls * self.seconds[name]


class TestTurns:
    def test_competitors_take_turns_and_the_median_counts(self) -> None:
        order = []
        spans = {"a": iter([1.0, 9.0, 2.0, 1.0]), "b": iter([1.0, 1.0, 8.0, 2.0])}

        def watch(function: Callable[[], object], calls: int) -> float:
            order.append(name := str(function()))
            return calls * next(spans[name])

        race = timing.race({"a": lambda: "a", "b": lambda: "b"}, 0.0, watch)
        assert [sorted(order[i : i + 2]) for i in (0, 2, 4, 6)] == [["a", "b"]] * 4, "a look, then three turns"
        assert race.turns == 3
        assert race.seconds == {"a": 2.0, "b": 2.0}

    def test_no_competitor_always_follows_the_same_one(self) -> None:
        """The first of a fixed order ran after the one that empties the caches, and seemed a fifth slower."""
        order: list[str] = []
        competitors = {name: lambda name=name: order.append(name) for name in "abc"}
        timing.turn_times(competitors, 15, dict.fromkeys(competitors, 1))
        assert set(itertools.pairwise(order)) >= set(itertools.permutations("abc", 2))

    def test_nobody_takes_no_turns(self) -> None:
        assert timing.race({}, 1.0).seconds == {}

    def test_short_calls_are_repeated_within_a_turn_and_long_ones_are_not(self) -> None:
        clock = Clock(long=0.5, short=1e-5)
        race = timing.race({"long": lambda: "long", "short": lambda: "short"}, 5.1, clock)
        assert race.seconds == pytest.approx({"long": 0.5, "short": 1e-5})
        assert race.turns == math.floor(5.1 / 0.504)
        assert dict(clock.calls[2:]) == {"long": 1, "short": 400}

    @pytest.mark.parametrize(
        ("patience", "turns"), [(0.0, timing.MIN_TURNS), (1e9, timing.MAX_TURNS)], ids=["none", "endless"]
    )
    def test_there_are_never_too_few_turns_nor_too_many(self, patience: float, turns: int) -> None:
        assert timing.race({"a": lambda: "a"}, patience, Clock(a=0.1)).turns == turns

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
        assert race.witness == (2.0 if found[1] else max(witnessed[-2:]))

    def test_a_gpu_is_timed_by_events_in_its_own_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        current = ["cuda:0"]

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.device: str | None = None

            def record(self) -> None:
                self.device = current[-1]

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                assert self.device == end.device == "cuda:1"
                return 5.0

        @contextlib.contextmanager
        def device(name: str) -> Iterator[None]:
            current.append(name)
            yield
            current.pop()

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
        assert timing.stopwatch("cuda:1")(lambda: None, 2) == 5e-3

    def test_a_cpu_is_timed_by_a_clock(self) -> None:
        assert timing.stopwatch("cpu") is timing._by_clock

    def test_processor_time_leaves_out_the_time_in_which_the_core_runs_something_else(self) -> None:
        watch = timing.stopwatch(clock=time.process_time)
        assert watch(lambda: time.sleep(0.05), 1) < 0.04
        assert watch(lambda: sum(range(100_000)), 3) > 0


class TestDisturbedRuns:
    def measure(self, *probes: ProbeResult | float, best: float = 0.0, attempts: int = 3) -> ProbedMeasurement[int]:
        seen = iter([r if isinstance(r, ProbeResult) else ProbeResult(r) for r in probes])
        values = iter(range(10))
        found = timing.measure_between_probes(lambda: next(values), lambda: next(seen), best, attempts)
        assert next(seen, None) is None, "every probe was called"
        return found

    def test_a_calm_run_is_made_once(self) -> None:
        found = self.measure(100.0, 97.0)
        assert (found.value, found.attempts, found.contended, found.peak) == (0, 1, False, 100.0)

    def test_a_disturbed_run_is_repeated(self) -> None:
        found = self.measure(100.0, 80.0, 99.0, 100.0)
        assert (found.value, found.attempts, found.contended) == (1, 2, False)

    def test_the_calmest_of_disturbed_runs_counts_and_is_marked(self) -> None:
        found = self.measure(100.0, 50.0, 100.0, 90.0, 100.0, 60.0)
        assert (found.value, found.attempts, found.contended) == (1, 3, True)
        assert (found.before.rate, found.after.rate) == (100.0, 90.0)

    def test_a_machine_that_is_busy_from_beginning_to_end_is_found_by_the_best_it_has_shown(self) -> None:
        assert self.measure(50.0, 50.0, best=100.0, attempts=1).contended
        assert not self.measure(90.0, 90.0, best=100.0, attempts=1).contended

    def test_a_machine_that_was_never_idle_is_found_by_the_share_of_its_threads(self) -> None:
        assert self.measure(ProbeResult(50.0, 0.6), ProbeResult(50.0, 0.6), attempts=1).contended
        assert not self.measure(ProbeResult(50.0, 0.97), ProbeResult(50.0, 0.96), attempts=1).contended

    def test_drift_of_seven_percent_is_the_limit(self) -> None:
        assert not self.measure(100.0, 93.0, attempts=1).contended
        assert self.measure(100.0, 92.9, attempts=1).contended


class TestPeak:
    def test_every_probe_gives_a_rate_and_a_share(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peak, "BURST", 1e-4)
        monkeypatch.setattr(peak, "SIDE", 32)
        monkeypatch.setattr(peak, "MAX_SECONDS", 0.0)
        probes = [*(peak.arithmetic_probe(dtype) for dtype in DTYPES.values()), peak.read_probe(4096)]
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
        assert peak.multiply_add_rate(library, torch.float32).share < 0.5
        waited = peak.multiply_add_rate(library, torch.float32, time.process_time)
        assert waited.share > 0.95
        assert waited.rate > 2 * peak.multiply_add_rate(library, torch.float32).rate

    def test_a_forced_instruction_set_is_held_against_its_own_peak(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peak, "_products_are_fast", lambda library, dtype: True)
        native = not isinstance(peak.cpu.load(), str)
        monkeypatch.delenv("UNDIVIDED_ISA", raising=False)
        assert "matrix product" in peak.arithmetic_probe(torch.bfloat16).what
        monkeypatch.setenv("UNDIVIDED_ISA", "avx2")
        assert ("multiply-adds" in peak.arithmetic_probe(torch.bfloat16).what) == native

    def test_without_the_native_library_products_stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(peak.cpu, "load", lambda: "not built")
        assert peak.arithmetic_probe(torch.float32).what == "float32 matrix product"


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
