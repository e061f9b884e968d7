"""No speed without a verification; figures and competitors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_benchmarks import QUIET, SINGLE, TINY, entries, hurried, tiny
from torch import Tensor

import undivided
from undivided import masks
from undivided.benchmarking import competitors, peak, runs, suites, timing
from undivided.benchmarking.catalogue import DTYPES, GPU_SUITES, Benchmark, Goal, benchmarks
from undivided.benchmarking.catalogue.serving import STEPS
from undivided.benchmarking.competitors import Competitor, PreparedBenchmark, prepare
from undivided.benchmarking.serving.competitors import _copied_keys
from undivided.benchmarking.timing import ProbeResult
from undivided.request.normalise import normalise
from undivided.request.request import Request
from undivided.verification import sample as sample_module
from undivided.verification.cases import Case
from undivided.verification.sample import build_sample


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that always does the same, and is asked at no cost."""
    monkeypatch.setattr(peak, "arithmetic_probe", lambda dtype, device, clock: QUIET)
    monkeypatch.setattr(peak, "read_probe", lambda size, device, clock: QUIET)
    monkeypatch.setattr(peak, "witness_call", lambda: None)


@pytest.mark.usefixtures("quiet")
class TestVerificationFirst:
    def wrong(self, by: float) -> Callable[[PreparedBenchmark], Competitor]:
        def make(prepared: PreparedBenchmark) -> Competitor:
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
        def make(prepared: PreparedBenchmark) -> Competitor:
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

        def make(prepared: PreparedBenchmark) -> Competitor:
            return Competitor("sdpa", "broken", prepared, raising, raising)

        monkeypatch.setitem(competitors._MAKERS, "sdpa", make)  # type: ignore[arg-type]
        found = entries(runs.run(tiny(), hurried()))["sdpa"]
        assert not found["ok"]
        assert "no such kernel" in found["note"]

    @pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
    def test_a_sample_finds_one_wrong_row_among_those_it_looks_at(self, backward: bool) -> None:
        case = replace(TINY, q_len=640, heads=3, needs=None if backward else ())
        prepared = prepare(Benchmark("forward", case, torch.float32, backward=backward))
        sample = build_sample(prepared.call, prepared.tensors, prepared.inputs.grad_out if backward else None)
        assert len(sample.pieces) == (2 if backward else 4), "too large to be looked at whole"
        results = competitors._sdpa(prepared).results()
        for name, value in results.items():
            assert sample.error(name, value) <= sample.max_errors[name]
            spoiled = value.clone()
            spoiled[0, 2, -1] = 0.0
            assert sample.error(name, spoiled) > sample.max_errors[name]
            missing = value.clone()
            missing[0, 0, 3, 1] = math.nan
            assert sample.error(name, missing) == math.inf

    def test_a_sample_of_a_single_head_has_its_first_rows(self) -> None:
        q, k, v = (torch.randn(1, 1, 2048, 16) for _ in range(3))
        sample = build_sample(*normalise(Request.from_keywords(q, k, v, layout="bhsd")), None)
        rows = [piece.rows for piece in sample.pieces]
        assert (rows[0].start, rows[-1].stop, len(rows)) == (0, 2048, 3)

    def test_a_sample_without_a_budget_is_not_met(self) -> None:
        """Plain attention in fp32 is not finite there: every finite result was within the infinite budget."""
        q, v = torch.full((1, 1, 600, 8), 1e30), torch.randn(1, 1, 600, 8)
        sample = build_sample(*normalise(Request.from_keywords(q, q, v, layout="bhsd")), None)
        assert sample.undecided == {"out"}
        assert not sample.met("out", v.mean(2, keepdim=True).expand_as(v))
        assert not sample.met("out", torch.zeros_like(v))

    def test_no_speed_is_reported_without_a_budget(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = sample_module.build_sample

        def undecided(*arguments: Any) -> sample_module.Sample:
            return replace(found(*arguments), undecided=frozenset({"out"}))

        monkeypatch.setattr(runs, "build_sample", undecided)
        case = runs.run(tiny(), hurried())
        assert not any(entry["ok"] for entry in case["entries"])
        assert all("no digit right" in entry["note"] for entry in case["entries"])

    def test_a_sample_in_blocks_of_rows_is_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The scores of a head of 65536 tokens do not fit into the memory of a GPU in fp64."""
        prepared = competitors.prepare(tiny(backward=True, q_len=700, heads=2, mask=masks.causal))
        arguments = prepared.call, prepared.tensors, prepared.inputs.grad_out
        whole = build_sample(*arguments)
        monkeypatch.setattr(sample_module, "PAIRS_AT_ONCE", 1)
        blocks = build_sample(*arguments)
        for name in ("out", "dq", "dk", "dv"):
            torch.testing.assert_close(blocks.right[name], whole.right[name], rtol=1e-12, atol=1e-12)
            assert torch.equal(blocks.zero[name], whole.zero[name])
            assert 0.5 < blocks.max_errors[name] / whole.max_errors[name] < 2

    def test_a_sample_requires_exact_zeros_where_nothing_reaches(self) -> None:
        case = replace(TINY, mask=lambda: masks.causal("bottom_right"), kv_len=8, q_len=12)
        prepared = prepare(Benchmark("forward", case, torch.float32))
        sample = build_sample(prepared.call, prepared.tensors, None)
        out = competitors._ours(prepared, None).results()["out"].clone()
        assert sample.error("out", out) <= sample.max_errors["out"]
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


@pytest.mark.usefixtures("quiet")
class TestCompetitors:
    @pytest.mark.parametrize("suite", [*(suite for suite in SINGLE if suite != "serving"), *GPU_SUITES])
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
                inexact = case.alibi and entry["name"] in ("sdpa", "math")  # their bias has the dtype of q
                assert entry["ok"] or inexact, (one.name, entry)
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

    @pytest.mark.parametrize("options", [{}, {"memory": "latent"}], ids=["paged", "latents"])
    def test_separate_calls_read_a_copy_of_the_keys(self, options: dict[str, Any]) -> None:
        """They followed the packed call in each turn, read its keys from the caches, and seemed 1.3 times as fast."""
        step = replace(STEPS["decode-16x3k"], new=(1, 1), cached=(20, 30), page_size=16, options=options)
        prepared = prepare(replace(step.benchmark("small", torch.float32), goal=Goal()))
        k, v = prepared.tensors.k, prepared.tensors.v
        k_copy, v_copy = _copied_keys(prepared)
        assert torch.equal(k_copy, k)
        assert torch.equal(v_copy, v)
        assert k_copy.untyped_storage().data_ptr() != k.untyped_storage().data_ptr()
        assert v_copy.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()
        is_latent = v.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        assert (v_copy.untyped_storage().data_ptr() == k_copy.untyped_storage().data_ptr()) == is_latent

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
        page_size = case.page_size and min(case.page_size, 16)
        return {"kv_len": 48, "mask": (lambda: masks.lengths(lengths)) if lengths else None, "page_size": page_size}
    if case.mask is None:
        return {}
    kinds = case.mask().kinds
    if "documents" in kinds:
        return {"mask": lambda: masks.documents([0, 11, 40]) & masks.causal()}
    if "dense" in kinds:
        pairs = torch.rand(1, 1, 40, 40, generator=torch.Generator().manual_seed(0)) < 0.75
        return {"mask": lambda: masks.dense(pairs)}
    return {"mask": lambda: masks.window(7, 0)} if "window" in kinds else {}
