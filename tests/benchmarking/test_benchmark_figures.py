"""Figures of benchmarks: fractions of the peak, ratios, goals, and contention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiny_benchmarks import QUIET, TINY, entries, hurried, tiny

from undivided import masks
from undivided.benchmarking import peak, runs, suites, timing
from undivided.benchmarking.catalogue import Benchmark, Goal
from undivided.benchmarking.competitors import prepare
from undivided.benchmarking.timing import ProbeResult


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

    def test_a_speedup_that_needs_more_than_the_peak_is_no_goal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        goal, operations = Goal(faster=(("sdpa", 2.0),)), 4 * 24 * 24 * 16 * 2
        for share_of_peak, goals in ((0.4, 1), (0.6, 0)):
            sdpa = operations / (share_of_peak * 1e9)
            case = self.run(tiny(goal=goal), monkeypatch, undivided=sdpa, sdpa=sdpa, math=sdpa)
            assert entries(case)["sdpa"]["fraction"] == pytest.approx(share_of_peak)
            assert len(case["goals"]) == goals

    def test_decoding_is_held_against_reads_that_took_turns_with_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reads = replace(QUIET, what="read", turn=lambda: None, work=3e6)
        monkeypatch.setattr(peak, "read_probe", lambda size, device, clock: reads)
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
        slower = peak.Probe("a rate", "FLOP/s", lambda: ProbeResult(next(rates)))
        monkeypatch.setattr(peak, "arithmetic_probe", lambda dtype, device, clock: slower)
        settings = hurried()
        assert [runs.run(tiny(), settings)["rate"]["contended"] for _ in range(2)] == [False, True]

    def test_a_run_that_begins_on_a_busy_machine_is_judged_by_its_best_at_the_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rates = iter([60.0, 60.0, 100.0, 100.0])
        faster = peak.Probe("a rate", "FLOP/s", lambda: ProbeResult(next(rates)))
        monkeypatch.setattr(peak, "arithmetic_probe", lambda dtype, device, clock: faster)
        settings = hurried()
        cases = [runs.run(tiny(), settings) for _ in range(2)]
        assert [case["rate"]["contended"] for case in cases] == [False, False]
        taken = iter(cases)
        monkeypatch.setattr(suites, "run", lambda benchmark, settings: next(taken))
        report = suites.execute(suites.plan(["forward"], ["bf16"], quick=True), settings)
        assert [case["rate"]["contended"] for case in report["cases"]] == [True, False]

    def test_a_witness_that_becomes_faster_marks_the_cases_before(self) -> None:
        cases = [{"rate": {"contended": False, "witness": seconds}} for seconds in (2.5e-3, 1.4e-3, 1e-3, 0.0)]
        runs.mark_contended(cases)
        assert [case["rate"]["contended"] for case in cases] == [True, False, False, False]
