"""Competitors of benchmarks: what they compute is right, and who is absent is named with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_benchmarks import SINGLE, entries, hurried, tiny

import undivided
from undivided import masks
from undivided.benchmarking import competitors, runs
from undivided.benchmarking.catalogue import DTYPES, GPU_SUITES, Goal, benchmarks
from undivided.benchmarking.catalogue.serving import STEPS
from undivided.benchmarking.competitors import prepare
from undivided.benchmarking.serving.competitors import _copied_keys
from undivided.verification.cases import Case


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

    @pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
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
