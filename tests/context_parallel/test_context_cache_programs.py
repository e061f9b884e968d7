"""Random programs of operations on a cache over ranks give what one process gives, and lose no page."""

from __future__ import annotations

from collections import Counter

from cache_programs import run_program

OPERATIONS = {"append", "append_and_keep", "attend", "fork", "truncate", "free", "remember", "match", "evict"}


def test_random_programs_on_ranks_equal_one_process() -> None:
    done: Counter[str] = Counter()
    for seed in range(40):
        done += run_program(seed)
    assert set(done) == OPERATIONS | {"refused"}
    assert min(done.values()) >= 10, done
