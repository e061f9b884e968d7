"""The backends that the caller allows: argument > context manager > environment, read at every call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import undivided
from undivided import InputError, NoBackendError, masks, set_backends, use_backends
from undivided.backends import reference, torch_flash
from undivided.masks import Mask

# fp64, which our own kernel refuses: so nothing here depends on whether it was built
Q = torch.randn(1, 8, 2, 16, dtype=torch.float64)


pytestmark = pytest.mark.usefixtures("default_policy")


def chosen(**arguments: object) -> str:
    return undivided.explain(Q, Q, Q, layout="bshd", **arguments).backend.name  # type: ignore[arg-type]


def reasons(backend: str, **arguments: object) -> tuple[str, ...]:
    return undivided.explain(Q, Q, Q, layout="bshd", **arguments).reasons[backend]  # type: ignore[arg-type]


DEFAULT = chosen()


def test_the_default_is_not_the_reference() -> None:
    assert DEFAULT == "torch_flash"


def test_undivided_backends_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDIVIDED_BACKENDS", "reference")
    assert chosen() == "reference"
    assert reasons("torch_flash") == ("not among UNDIVIDED_BACKENDS=reference",)
    monkeypatch.setenv("UNDIVIDED_BACKENDS", "torch_flash")
    assert chosen() == "torch_flash"
    monkeypatch.delenv("UNDIVIDED_BACKENDS")
    assert chosen() == DEFAULT


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("reference,torch_flash", "reference"),
        ("torch_flash,reference", "torch_flash"),
        (" math , flash ", "reference"),
        ("unfused", "reference"),
        ("flash", "torch_flash"),
        ("", DEFAULT),
        ("  ", DEFAULT),
    ],
)
def test_undivided_backends_is_an_order_of_names_and_families(
    monkeypatch: pytest.MonkeyPatch, text: str, want: str
) -> None:
    monkeypatch.setenv("UNDIVIDED_BACKENDS", text)
    assert chosen() == want


def test_the_next_allowed_backend_runs_what_the_first_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDIVIDED_BACKENDS", "torch_flash,reference")
    assert chosen(softcap=1.0) == "reference"
    monkeypatch.setenv("UNDIVIDED_BACKENDS", "torch_flash")
    with pytest.raises(NoBackendError, match="not among UNDIVIDED_BACKENDS=torch_flash"):
        undivided.attention(Q, Q, Q, layout="bshd", softcap=1.0)


@pytest.mark.parametrize("text", ["flashattention", "reference,nope", "Reference"])
def test_an_unknown_name_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("UNDIVIDED_BACKENDS", text)
    with pytest.raises(InputError, match=r"must be one of .*reference.*, got '(flashattention|nope|Reference)'"):
        undivided.attention(Q, Q, Q, layout="bshd")


NVTE = {
    "NVTE_FLASH_ATTN": ("torch_flash", "reference"),
    "NVTE_UNFUSED_ATTN": ("reference", "torch_flash"),
    "NVTE_FUSED_ATTN": ("cudnn", "torch_flash"),
}


@pytest.mark.parametrize("variable", NVTE)
def test_transformer_engines_switches_are_aliases(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    loser, winner = NVTE[variable]
    monkeypatch.setenv(variable, "0")
    assert f"switched off by {variable}=0" in reasons(loser)
    assert chosen() == winner
    monkeypatch.setenv(variable, "1")
    assert chosen() == DEFAULT


def test_all_of_transformer_engines_switches_off_leave_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in NVTE:
        monkeypatch.setenv(variable, "0")
    with pytest.raises(NoBackendError, match="switched off by NVTE_UNFUSED_ATTN=0"):
        undivided.attention(Q, Q, Q, layout="bshd")


@pytest.mark.parametrize(
    ("variable", "value", "want"),
    [
        ("UNDIVIDED_DETERMINISTIC", "1", True),
        ("UNDIVIDED_DETERMINISTIC", "0", False),
        ("UNDIVIDED_DETERMINISTIC", "", False),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", True),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", False),
    ],
)
def test_determinism_is_set_by_the_environment_unless_the_argument_is_given(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, want: bool
) -> None:
    monkeypatch.setenv(variable, value)
    for argument, expected in ((None, want), (True, True), (False, False)):
        decision = undivided.explain(Q, Q, Q, layout="bshd", deterministic=argument)
        assert decision.problem.deterministic == expected


def test_the_environment_is_seen_however_it_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    os.environ["UNDIVIDED_BACKENDS"] = "reference"
    try:
        assert chosen() == "reference"
        os.environ.pop("UNDIVIDED_BACKENDS")
        assert chosen() == DEFAULT
        os.environ.update(UNDIVIDED_BACKENDS="reference")
        assert chosen() == "reference"
    finally:
        os.environ.pop("UNDIVIDED_BACKENDS", None)


def test_set_backends_holds_until_it_is_called_again() -> None:
    set_backends("reference")
    assert chosen() == "reference"
    assert reasons("torch_flash") == ("not among set_backends=reference",)
    set_backends()
    assert chosen() == DEFAULT


def test_use_backends_without_with_changes_nothing() -> None:
    use_backends("reference")
    assert chosen() == DEFAULT


def test_use_backends_in_a_with_ends_with_the_block() -> None:
    with use_backends("reference"):
        assert chosen() == "reference"
    assert chosen() == DEFAULT


def test_use_backends_is_an_order() -> None:
    with use_backends("reference", "torch_flash"):
        assert chosen() == "reference"
    with use_backends("flash", "math"):
        assert chosen() == "torch_flash"
        assert chosen(softcap=1.0) == "reference"


def test_the_inner_block_wins_and_the_outer_returns() -> None:
    with use_backends("reference"):
        with use_backends("torch_flash"):
            assert chosen() == "torch_flash"
            with use_backends():
                assert chosen() == DEFAULT
        assert chosen() == "reference"
    assert chosen() == DEFAULT


def test_a_block_returns_to_what_the_process_has_set() -> None:
    set_backends("reference")
    with use_backends("torch_flash"):
        assert chosen() == "torch_flash"
    assert chosen() == "reference"


def test_an_exception_restores() -> None:
    def fail() -> None:
        with use_backends("reference"):
            raise KeyError("inside")

    with pytest.raises(KeyError):
        fail()
    assert chosen() == DEFAULT


def test_an_unknown_name_raises_and_changes_nothing() -> None:
    with pytest.raises(InputError, match=r"backend must be one of .*, got 'cudn'"):
        use_backends("reference", "cudn")
    with pytest.raises(InputError, match="got 'cudn'"):
        use_backends.disable("cudn")
    with pytest.raises(InputError, match="got 'cudn'"):
        set_backends("reference", "cudn")
    with pytest.raises(InputError, match=r"disable must be one of .*, got 'cudn'"):
        set_backends("reference", disable=["cudn"])
    with pytest.raises(InputError, match="disable must be a list of names, got 'flash'"):
        set_backends(disable="flash")
    assert chosen() == DEFAULT


def test_disable_forbids_some_and_leaves_the_rest() -> None:
    with use_backends.disable("torch_flash"):
        assert chosen() == "reference"
        assert reasons("torch_flash") == ("switched off by use_backends.disable",)
    assert chosen() == DEFAULT
    with use_backends.disable("flash"):
        assert chosen() == "reference"


def test_disable_adds_to_what_is_set() -> None:
    with use_backends("torch_flash", "reference"), use_backends.disable("torch_flash"):
        assert chosen() == "reference"
        with use_backends.disable("math"), pytest.raises(NoBackendError):
            undivided.attention(Q, Q, Q, layout="bshd")
        assert chosen() == "reference"


def test_set_backends_can_disable() -> None:
    set_backends(disable=["flash"])
    assert chosen() == "reference"
    assert reasons("torch_flash") == ("switched off by set_backends(disable=...)",)
    with use_backends.disable("reference"), pytest.raises(NoBackendError):
        undivided.attention(Q, Q, Q, layout="bshd")
    set_backends()
    assert chosen() == DEFAULT


def test_a_block_in_one_thread_does_not_affect_another() -> None:
    inside, done = threading.Event(), threading.Event()

    def narrow() -> str:
        with use_backends("reference"):
            inside.set()
            assert done.wait(10)
            return chosen()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(narrow)
        assert inside.wait(10)
        assert chosen() == DEFAULT
        done.set()
        assert other.result() == "reference"


def test_set_backends_reaches_every_thread() -> None:
    set_backends("reference")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(chosen).result() == "reference"


def test_a_block_may_be_entered_again() -> None:
    block = use_backends("reference")
    for _ in range(2):
        with block:
            assert chosen() == "reference"
        assert chosen() == DEFAULT


def test_a_block_may_be_entered_inside_itself() -> None:
    with use_backends("reference") as block:
        with block, use_backends("torch_flash"), block:
            assert chosen() == "reference"
        assert chosen() == "reference"
    assert chosen() == DEFAULT


def in_turns(block: use_backends) -> Iterator[str]:
    """What a generator chooses in a block that stays open between its values."""
    with block:
        yield chosen()
        yield chosen()


def test_a_block_ends_itself_while_later_ones_are_open() -> None:
    first, second = in_turns(use_backends("reference")), in_turns(use_backends("torch_flash"))
    assert next(first) == "reference"
    assert next(second) == "torch_flash"
    first.close()
    assert chosen() == "torch_flash"
    second.close()
    assert chosen() == DEFAULT


def test_what_a_block_disables_is_allowed_again_while_later_blocks_are_open() -> None:
    outer, inner = use_backends.disable("native"), use_backends.disable("torch_flash")
    outer.__enter__()
    inner.__enter__()
    assert chosen() == "reference"
    switched_off = ("switched off by use_backends.disable",)
    assert reasons("native")[:1] == switched_off
    outer.__exit__(None, None, None)
    assert reasons("native")[:1] != switched_off
    assert reasons("torch_flash")[:1] == switched_off
    inner.__exit__(None, None, None)
    assert chosen() == DEFAULT


def test_a_block_that_was_entered_in_another_thread_ends_none_of_this_one() -> None:
    block = use_backends("reference")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(block.__enter__).result()
    with use_backends("torch_flash"):
        block.__exit__(None, None, None)
        assert chosen() == "torch_flash"


@pytest.mark.parametrize(
    ("mask", "expected"),
    [(masks.lengths([7]), ["torch_flash"]), (None, [])],  # without a mask PyTorch's operator records itself
    ids=["lengths", "plain"],
)
def test_the_forward_and_the_backward_are_chosen_together(
    mask: Mask | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    for backend in (reference.BACKEND, torch_flash.BACKEND):
        backward = type(backend).backward
        monkeypatch.setattr(
            type(backend),
            "backward",
            lambda self, *a, backward=backward: (ran.append(self.name), backward(self, *a))[1],
        )
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    with use_backends("torch_flash"):
        out = undivided.attention(q, q, q, layout="bshd", mask=mask)
    with use_backends("reference"):
        out.sum().backward()
    assert ran == expected


def test_the_context_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDIVIDED_BACKENDS", "reference")
    with use_backends("torch_flash"):
        assert chosen() == "torch_flash"
    assert chosen() == "reference"


def test_a_switched_off_family_stays_off_in_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    with use_backends("torch_flash", "reference"):
        assert chosen() == "reference"


def test_an_argument_that_the_context_forbids_raises_rather_than_run() -> None:
    with use_backends("torch_flash"), pytest.raises(NoBackendError, match="not among use_backends=torch_flash"):
        undivided.attention(Q, Q, Q, layout="bshd", backend="reference")


def test_an_argument_picks_among_what_the_context_allows() -> None:
    with use_backends("torch_flash", "reference"):
        assert chosen(backend="reference") == "reference"


def test_an_unknown_backend_argument_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"backend must be one of .*math.*reference.*unfused, got 'fast'"):
        undivided.attention(Q, Q, Q, layout="bshd", backend="fast")


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [("batch_invariant", "set_backends and each call have"), ("disable", r"use_backends\.disable\(names\)")],
)
def test_use_backends_names_what_has_an_argument_that_it_lacks(keyword: str, hint: str) -> None:
    with pytest.raises(undivided.InputError, match=f"got '{keyword}'\n  HINT: {hint}"):
        undivided.use_backends(**{keyword: True})  # type: ignore[call-arg]
