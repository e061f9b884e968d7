"""No speed without a verification: what is wrong shows no figures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_benchmarks import TINY, entries, hurried, tiny
from torch import Tensor

from undivided import masks
from undivided.benchmarking import competitors, runs
from undivided.benchmarking.catalogue import Benchmark, Goal
from undivided.benchmarking.competitors import Competitor, PreparedBenchmark, prepare
from undivided.request.normalise import normalise
from undivided.request.request import Request
from undivided.verification import sample as sample_module
from undivided.verification.sample import build_sample


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
