"""Decisions are cached by what selection looks at, and the caches are bounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import problem_of
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_problems import BF16, FP32, MACHINES, PROBLEMS, TORCH

import undivided
from undivided import InputError, Machine, masks
from undivided import machine as machine_module
from undivided._bounded import Bounded
from undivided.backends import all_backends, reference
from undivided.request.problem import Problem
from undivided.selection import decision as selection
from undivided.selection.order import default_rank
from undivided.selection.policy import Policy, current_policy


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems that were really decided, with the caches emptied first."""
    for cache in (selection._decisions, selection._by_class):
        monkeypatch.setattr(selection, {id(selection._decisions): "_decisions"}.get(id(cache), "_by_class"), {})
    seen: list[Problem] = []
    decide = selection.decide

    def counting(problem: Problem, machine: Machine, policy: Policy) -> selection.Decision:
        seen.append(problem)
        return decide(problem, machine, policy)

    monkeypatch.setattr(selection, "decide", counting)
    return seen


def test_a_repeated_problem_is_decided_once(decided: list[Problem]) -> None:
    q = torch.randn(1, 40, 2, 16)
    for _ in range(3):
        undivided.attention(q, q, q, layout="bshd")
    assert len(decided) == 1
    undivided.attention(q, q, q, layout="bshd", softcap=1.0)
    assert len(decided) == 2


def test_decoding_shares_decisions_between_lengths(decided: list[Problem]) -> None:
    q, kv = torch.randn(1, 1, 2, 8), torch.randn(1, 1024, 2, 8)
    for length in range(513, 1025):
        out = undivided.attention(q, kv[:, :length], kv[:, :length], layout="bshd", mask=masks.causal("bottom_right"))
        assert out.shape == q.shape
    assert len(decided) == 7  # one for every divisibility by 1, 2, ..., 64
    select = selection.select(problem_of(q, kv[:, :700], kv[:, :700], layout="bshd"), Machine.this(), current_policy())
    assert select.problem.kv_len == 700, "a shared decision still prints the problem it is for"


def test_the_identity_of_a_predicate_does_not_affect_the_decision(decided: list[Problem]) -> None:
    q = torch.randn(1, 8, 2, 8)
    for shift in range(5):
        mask = masks.predicate(lambda b, h, i, j, shift=shift: i + shift >= j)  # type: ignore[misc]
        undivided.attention(q, q, q, layout="bshd", mask=mask)
    assert len(decided) == 1


def test_values_of_lengths_do_not_affect_the_decision(decided: list[Problem]) -> None:
    q = torch.randn(2, 8, 2, 8)
    for n in range(1, 9):
        undivided.attention(q, q, q, layout="bshd", mask=masks.lengths([n, 1]))
    assert len(decided) == 1


def test_gradients_affect_the_decision(decided: list[Problem]) -> None:
    q = torch.randn(1, 8, 2, 8)
    undivided.attention(q, q, q, layout="bshd")
    undivided.attention(q.requires_grad_(), q, q, layout="bshd")
    assert ["backward" in problem.features for problem in decided] == [False, True]


def test_policies_and_machines_affect_the_decision(decided: list[Problem]) -> None:
    problem = problem_of(*(torch.randn(1, 8, 2, 8) for _ in range(3)), layout="bshd")
    anything = Policy()
    first = selection.select(problem, MACHINES["cpu"], anything)
    assert selection.select(problem, MACHINES["cpu"], anything) is first
    assert selection.select(problem, MACHINES["cpu"], Policy()).backend is first.backend
    assert selection.select(problem, MACHINES["cpu"], Policy(forced="reference")).backend.name == "reference"
    twin = Machine("cpu", torch=TORCH, isa="AVX512")
    assert selection.select(problem, twin, Policy()).machine is twin
    assert len(decided) == 3


def test_the_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_decisions", Bounded(5))
    for length in range(1, 20):
        q = torch.randn(1, length, 1, 4)
        undivided.attention(q, q, q, layout="bshd")
        assert len(selection._decisions) <= 5


def test_reasons_are_built_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original = type(reference.BACKEND).reasons

    def reasons(self: Any, problem: Problem, machine: Machine) -> list[str]:
        asked.append(self.name)
        return original(self, problem, machine)

    monkeypatch.setattr(type(reference.BACKEND), "reasons", reasons)
    decision = undivided.explain(**PROBLEMS["plain"], machine=MACHINES["cpu"])
    assert asked == []
    assert decision.reasons
    assert asked == ["reference"]


STRUCTURES = [arguments["mask"].structure for arguments in PROBLEMS.values() if arguments["mask"] is not None]


@st.composite
def lengths_of_one_class(draw: st.DrawFn) -> tuple[int, int]:
    """Two lengths that selection must not distinguish."""
    if draw(st.booleans()):
        length = draw(st.integers(0, 16))
        return length, length
    bits, step = draw(st.integers(5, 34)), 2 ** draw(st.integers(0, 6))
    low, high = 2 ** (bits - 1), 2**bits  # in (low, high]
    assert low % step == 0 or step > low
    numbers = st.integers(low // step, high // step).map(lambda n: n * step)
    fitting = numbers.filter(lambda x: low < x <= high and (step == 64 or x // step % 2 == 1))
    first = 64 * max(1, high // 64) if step == 64 and high < 64 else draw(fitting)
    return (first, first) if step == 64 and high < 64 else (first, draw(fitting))


@st.composite
def problems_of_one_key(draw: st.DrawFn) -> tuple[Problem, Problem]:
    q, kv, count, most_q, most_kv = (draw(lengths_of_one_class()) for _ in range(5))
    packed = draw(st.booleans())
    heads, kv_heads = draw(st.sampled_from([(8, 8), (8, 2)]))
    dims = draw(st.tuples(*[st.sampled_from([8, 40, 64, 96, 100, 128, 192, 200, 256, 320, 512])] * 2))
    features = draw(st.frozensets(st.sampled_from(sorted(reference.BACKEND.limits.features))))
    base = Problem(
        device=draw(st.sampled_from(["cpu", "cuda"])),
        dtype=draw(st.sampled_from([BF16, torch.float16, FP32])),
        layout="thd" if packed else "bshd",
        batch=1 if packed else draw(st.sampled_from([0, 1, 7])),
        heads=heads,
        kv_heads=kv_heads,
        q_len=q[0],
        kv_len=kv[0],
        qk_dim=dims[0],
        v_dim=dims[1],
        mask=draw(st.sampled_from([masks.FULL.structure, *STRUCTURES])),
        align=draw(st.sampled_from([None, "both", "top_left", "bottom_right"])),
        features=features,
        bias=draw(st.sampled_from(["bhqk", "1h1k"])) if "bias" in features else None,
        documents=(count[0], most_q[0], most_kv[0]) if packed else None,
        page_size=draw(st.sampled_from([16, 256])) if "paged" in features else None,
        deterministic=draw(st.booleans()),
    )
    documents = (count[1], most_q[1], most_kv[1]) if packed else None
    return base, base._replace(q_len=q[1], kv_len=kv[1], documents=documents)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(problems_of_one_key(), st.sampled_from(sorted(MACHINES)))
def test_problems_with_one_selection_key_get_the_same_reasons_from_every_backend(
    pair: tuple[Problem, Problem], name: str
) -> None:
    one, other = pair
    if selection.selection_key(one) != selection.selection_key(other):
        return  # the two lengths compare differently
    machine = MACHINES[name]
    for backend in all_backends():
        reasons = [backend.reasons(problem, machine) for problem in pair]
        assert bool(reasons[0]) == bool(reasons[1]), (backend, one, other, reasons)
        assert default_rank(backend, one, machine) == default_rank(backend, other, machine)
        assert backend.only_when_asked(one, machine) == backend.only_when_asked(other, machine)


@pytest.mark.parametrize(("one", "other"), [(100, 101), (64, 65), (1023, 1025), (3, 4), (0, 1), (128, 96)])
def test_lengths_that_a_backend_may_distinguish_have_different_keys(one: int, other: int) -> None:
    problem = problem_of(*(torch.empty(1, 1, 1, 8) for _ in range(3)), layout="bshd")
    keys = {selection.selection_key(problem._replace(kv_len=length)) for length in (one, other)}
    assert len(keys) == 2


def test_whether_queries_outnumber_keys_is_in_the_key() -> None:
    problem = problem_of(*(torch.empty(1, 1, 1, 8) for _ in range(3)), layout="bshd")
    sizes = [(129, 131), (131, 129), (131, 131)]
    keys = {selection.selection_key(problem._replace(q_len=q, kv_len=kv)) for q, kv in sizes}
    assert len(keys) == 3


def test_machines_are_described_by_name_and_compare_by_value() -> None:
    assert Machine.named("A100", cudnn="9.1.0") == Machine("cuda", "A100", (8, 0), "9.1.0")
    assert Machine.named("cpu").device == "cpu"
    assert hash(Machine.named("h100")) == hash(Machine.named("H100"))


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]
    monkeypatch.setattr(machine_module, "as_device", lambda _, device: torch.device(device))
    monkeypatch.setattr(machine_module, "_probe", lambda device, _: device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    assert Machine.this("cuda") == "cuda:0"  # type: ignore[comparison-overlap]
    current[0] = 1
    assert Machine.this("cuda") == Machine.this("cuda:1") == "cuda:1"  # type: ignore[comparison-overlap]


def test_this_machine_is_probed_once() -> None:
    assert Machine.this() is Machine.this("cpu")
    assert Machine.this().probed
    assert Machine.this().torch == torch.__version__
    assert Machine.this().version("torch") == tuple(int(n) for n in torch.__version__.split("+")[0].split("."))


def test_an_unknown_machine_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"device must be cpu or one of v100, t4, a100.*got 'a1000'"):
        Machine.named("a1000")
