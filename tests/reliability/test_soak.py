"""The soak programs, for a short time."""

from __future__ import annotations

import pytest
import soak


def test_memory_and_bounded_maps_do_not_grow() -> None:
    soak.soak_calls(400, seed=1)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_paged_cache_in_use_loses_no_page(quantize: str | None) -> None:
    model = soak.Model(3, quantize)
    for _ in range(600):
        model.step()
    model.end()
    assert set(model.done) == {"append", "attend", "fork", "truncate", "keep", "free", "match"}


def test_a_lost_page_is_found() -> None:
    model = soak.Model(4)
    for _ in range(50):
        model.step()
    model.cache._ledger.unused[0].pop()
    with pytest.raises(AssertionError):
        model.check()
