"""Problems that backends once disagreed on, and a few new ones. fuzz_backends.py draws as many as there is time for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import fuzz_backends as fuzz
import pytest

from undivided.verification.report import Row

PAST = [fuzz.Spec(**line) for line in json.loads(Path(__file__).with_name("past_failures.json").read_text())]


@pytest.mark.parametrize("spec", PAST, ids=lambda spec: str(spec.seed))
def test_past_failures(spec: fuzz.Spec) -> None:
    assert not fuzz.failure(spec, fuzz.BACKENDS)


@pytest.mark.parametrize("number", range(24))
def test_random_problems_at_the_edges_of_tiles(number: int) -> None:
    assert not fuzz.failure(fuzz.draw(number), fuzz.BACKENDS)


def test_a_wrong_result_is_found_and_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = next(spec for spec in map(fuzz.draw, range(100)) if len(spec.q_lens) > 1 and spec.options)
    monkeypatch.setattr(fuzz, "failure", lambda spec, backends=None: "wrong" if max(spec.kv_lens) >= 3 else "")
    smaller = fuzz.shrink(spec, ["native"])
    assert max(smaller.kv_lens) == 3
    assert len(smaller.q_lens) == 1
    assert not smaller.options


@pytest.mark.parametrize(("every", "found"), [(1, True), (4, False)], ids=["often", "once"])
def test_a_gradient_of_few_numbers_is_wrong_if_it_is_so_for_other_tensors(
    every: int, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = Row("native", "dsinks", 0.5, 0.01)
    monkeypatch.setattr(fuzz, "_wrong_rows", lambda spec, backends: [] if (spec.seed - 100) % every else [row])
    assert ("dsinks" in fuzz.failure(replace(fuzz.draw(0), seed=100))) is found
