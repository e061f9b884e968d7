"""Problems that backends once disagreed on, and a few new ones. fuzz_backends.py draws as many as there is time for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import fuzz_backends as fuzz
import pytest
from fuzz_problems import Spec, draw

from undivided.backends import reference

PAST = [Spec(**line) for line in json.loads(Path(__file__).with_name("past_failures.json").read_text())]


@pytest.mark.parametrize("spec", PAST, ids=lambda spec: str(spec.seed))
def test_past_failures(spec: Spec) -> None:
    assert not fuzz.failure(spec, fuzz.BACKENDS)


@pytest.mark.parametrize("number", range(24))
def test_random_problems_at_the_edges_of_tiles(number: int) -> None:
    assert not fuzz.failure(draw(number), fuzz.BACKENDS)


def test_a_wrong_result_is_found_and_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = next(spec for spec in map(draw, range(100)) if len(spec.q_lens) > 1 and spec.options)
    monkeypatch.setattr(fuzz, "failure", lambda spec, backends=None: "wrong" if max(spec.kv_lens) >= 3 else "")
    smaller = fuzz.shrink(spec, ["native"])
    assert max(smaller.kv_lens) == 3
    assert len(smaller.q_lens) == 1
    assert not smaller.options


def test_a_wrong_gradient_of_a_single_number_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.BACKEND.backward
    monkeypatch.setattr(reference.BACKEND, "backward", lambda *a: [x if x is None else x * 1.01 for x in right(*a)])
    spec = replace(draw(0), dtype="fp32", mask="", page_size=0, factor=1.0, kv_heads=1, group=1, options={"sinks": 1})
    assert "reference dsinks" in fuzz.failure(spec, ["reference"])
