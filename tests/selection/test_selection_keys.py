"""What a decision's key keeps of a problem's lengths, what a cached decision is made for, and the notes of the last."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from calls import problem_of
from selection_problems import MACHINES

import undivided
from undivided import InputError, Machine, masks
from undivided.backends import all_backends
from undivided.request.problem import Problem
from undivided.selection import decision as selection
from undivided.selection import measured
from undivided.selection.order import default_rank
from undivided.selection.policy import current_policy

MACHINE = Machine("cpu", isa="avx2")


def problem(**fields: object) -> Problem:
    q = torch.empty(2, 40, 4, 64)
    return problem_of(q, q, q, layout="bshd")._replace(**fields)


def test_lengths_of_one_magnitude_and_divisibility_share_a_key() -> None:
    def key(length: int) -> Problem:
        return selection.selection_key(problem(q_len=1, kv_len=length))

    assert key(320) == key(384) == key(448)
    assert key(24) == key(24)
    assert len({key(length) for length in (15, 16, 24, 32, 33, 264, 272, 288, 320, 513)}) == 10


@pytest.mark.parametrize(
    "documents", [(300, 100, 1000), (3, 2000, 1000), (3, 100, 4000), (3, None, 1000), (3, 100, None)]
)
def test_documents_of_other_lengths_have_another_key(documents: tuple[int, int | None, int | None]) -> None:
    one, other = (selection.selection_key(problem(documents=found)) for found in ((3, 100, 1000), documents))
    assert one != other
    assert other == selection.selection_key(problem(documents=documents))


def same_key(problem: Problem, draw: random.Random) -> Problem | None:
    """Another problem with the same key, if one is found."""
    key = selection.selection_key(problem)
    for _ in range(200):
        lengths = [draw.randint(length // 2 + 1, 2 * length) // 64 * 64 for length in (problem.q_len, problem.kv_len)]
        other = problem._replace(q_len=lengths[0], kv_len=lengths[1])
        if other != problem and min(lengths) > 0 and selection.selection_key(other) == key:
            return other
    return None


@pytest.mark.parametrize("name", MACHINES)
def test_problems_of_one_key_and_common_sizes_have_the_same_ranks(name: str) -> None:
    machine, draw, compared = MACHINES[name], random.Random(7), 0
    mask = masks.causal(align="bottom_right").structure
    for _ in range(100):
        one = problem(
            device=machine.device,
            dtype=draw.choice([torch.float32, torch.bfloat16]),
            batch=draw.choice([1, 4, 16]),
            heads=(heads := draw.choice([1, 4, 16])),
            kv_heads=heads,
            q_len=64 * draw.randint(1, 40),
            kv_len=64 * draw.randint(1, 40),
            qk_dim=(dim := draw.choice([16, 64, 128])),
            v_dim=dim,
        )
        if draw.random() < 0.5:
            one = one._replace(mask=mask, align="bottom_right")
        if draw.random() < 0.5:
            one = one._replace(features=frozenset({"backward"}))
        other = same_key(one, draw)
        if other is None:
            continue
        compared += 1
        for backend in all_backends():
            ranks = [default_rank(backend, each, machine) for each in (one, other)]
            assert ranks[0] == ranks[1], (backend.name, one, other)
    assert compared > 20


def test_a_cached_decision_is_for_the_machine_and_problem_of_the_request() -> None:
    for kv_len in (320, 384):
        asked = problem(q_len=1, kv_len=kv_len)
        found = selection.select(asked, MACHINE, current_policy())
        assert found.machine is MACHINE
        assert found.problem.kv_len == kv_len


@pytest.mark.parametrize("longer", [(3, 100, 100_000), (3, 1, 100)])
def test_the_place_of_packed_documents_depends_on_their_longest_lengths(longer: tuple[int, int, int]) -> None:
    pack = problem(layout="thd", batch=1, q_len=300, kv_len=100_000, documents=(3, 100, 100))
    assert measured.table_cell(pack, MACHINE) != measured.table_cell(pack._replace(documents=longer), MACHINE)


@pytest.mark.parametrize("argument", ["deterministic", "batch_invariant"])
def test_a_flag_of_the_policy_that_is_not_a_bool_is_named(argument: str) -> None:
    with pytest.raises(InputError) as caught:
        current_policy(**{argument: 1})  # type: ignore[arg-type]
    assert caught.value.argument == argument


def test_the_last_decision_has_the_notes_of_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 4, 2, 8)
    undivided.attention(q, q, q, layout="bshd", mask=masks.causal(), backend="reference")
    found = undivided.last_decision()
    assert found is not None
    assert found.notes == ()
    assert found.chosen is not None
    monkeypatch.setattr(type(found.chosen), "last_notes", lambda *_: ["read once"])
    noted = undivided.last_decision()
    assert noted is not None
    assert noted.notes == ("read once",)
    assert dataclasses.replace(noted, notes=()).chosen is found.chosen
