"""Problems that backends once disagreed on, and a few new ones. fuzz_backends.py draws as many as there is time for."""

from __future__ import annotations

import json
from pathlib import Path

import fuzz_backends as fuzz
import pytest

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
