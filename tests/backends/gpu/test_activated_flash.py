"""FlashAttention 3 or 4 activated in place of PyTorch's flash kernel
(torch.nn.attention.activate_flash_attention_impl)."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import fake_gpu_kernels as fake
import pytest
import torch
from adapter_check import MASKS, check, tensors
from calls import problem_of
from torch.nn.attention import _registry, current_flash_attention_impl

import undivided
from undivided import machine as _machine
from undivided import masks
from undivided.arguments import checks
from undivided.backends import torch_flash
from undivided.backends.torch_flash import cuda
from undivided.machine import Machine
from undivided.request.problem import Problem
from undivided.selection.decision import decide, select
from undivided.selection.policy import Policy

CAPABILITY = {"a100": (8, 0), "h100": (9, 0), "b200": (10, 0), "rtx5090": (12, 0)}


def activate(monkeypatch: pytest.MonkeyPatch, impl: str | None) -> None:
    """Activate as `activate_flash_attention_impl` does, without importing the package."""
    only_name = torch.__version__ < "2.11"  # from then on PyTorch keeps a handle, too
    active = impl if impl is None or only_name else (impl, object())
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_ACTIVE", active)
    assert current_flash_attention_impl() == impl


def machine(gpu: str, impl: str | None) -> Machine:
    return Machine("cuda", gpu.upper(), CAPABILITY[gpu], torch="2.13.0", flash_impl=impl)


def ask(dim: int = 128, dtype: torch.dtype = torch.bfloat16, v_dim: int = 0, grad: bool = True, **more: Any) -> Problem:
    q, k, v = (
        torch.empty(2, 512, 4, d, dtype=dtype, device="meta", requires_grad=grad) for d in (dim, dim, v_dim or dim)
    )
    return problem_of(q, k, v, layout="bshd", device="cuda", **more)


ALIBI = ask(grad=False, alibi_slopes=torch.empty(4, device="meta"), mask=masks.causal())
DETERMINISTIC = ask(256)._replace(deterministic=True)
"""Runs on FlashAttention-2, not on 3."""


@pytest.mark.parametrize(
    ("gpu", "impl", "problem", "pieces"),
    [
        ("h100", "FA3", ask(mask=masks.window(64, 0)), []),
        ("h100", "FA4", ask(mask=masks.causal()), []),
        ("b200", "FA4", ask(mask=masks.causal()), []),
        ("a100", "FA3", ask(), ["compute capability 8.0 (min 9.0)"]),
        ("b200", "FA3", ask(), ["compute capability 10.0 (max 9.0)"]),
        ("rtx5090", "FA4", ask(), ["compute capability 12.0 (max 10.9)"]),
        ("h100", "FA3", ask(320), ["head_dim=320 (max 256)"]),
        ("b200", "FA4", ask(192), ["head_dim=192 (max 128"]),
        ("b200", "FA4", ask(256, mask=masks.window(64, 0)), ["head_dim=256 with window"]),
        ("h100", "FA3", ask(dtype=torch.float32), ["dtype=float32"]),
        ("h100", "FA3", ask(dropout_p=0.1), ["dropout (it draws"]),
        ("h100", "FA4", ask(v_dim=64), ["value head size"]),
        ("h100", "FA4", ask(softcap=5.0), ["softcap (PyTorch's operator has no argument"]),
        ("h100", "FA3", ALIBI, ["ALiBi slopes (PyTorch's operators refuse them with this implementation"]),
        ("h100", "FA4", ask(sinks=torch.empty(4, device="meta")), ["sinks"]),
        ("h100", "FA3", DETERMINISTIC, ["deterministic gradients for head_dim=256"]),
        ("h100", "FA5", ask(), ["FA5 is active in place of PyTorch's flash kernel, and its limits are not known"]),
    ],
)
def test_the_limits_are_those_of_what_is_active(gpu: str, impl: str, problem: Problem, pieces: list[str]) -> None:
    reasons = torch_flash.BACKEND.reasons(problem, machine(gpu, impl))
    assert len(reasons) == len(pieces), reasons
    for piece, reason in zip(pieces, reasons, strict=True):
        assert piece in reason
        assert impl in reason


def test_older_versions_of_pytorch_are_refused_because_their_limits_are_unknown() -> None:
    old = Machine("cuda", "H100", (9, 0), torch="2.11.0", flash_impl="FA4")
    assert torch_flash.BACKEND.reasons(ask(), old) == ["FA4, which is active: torch 2.11.0 (needs 2.13 or later)"]


def test_old_gpus_are_supported_again_by_pytorchs_own_kernel() -> None:
    assert torch_flash.BACKEND.reasons(ask(), machine("a100", None)) == []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device that torch says is an H100."""
    properties = types.SimpleNamespace(name="H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(checks, "_available", {torch.device("cuda:77")})
    yield "cuda:77"
    _machine._probe.cache_clear()


def test_activation_is_seen_after_the_machine_was_probed(monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    """The same machine object for the same implementation, so that decisions stay cached; another one for another."""
    policy = Policy(allowed=("torch_flash", "reference"), allowed_by="test")
    own = Machine.this(gpu)
    assert own.flash_impl is None
    assert own is Machine.this(gpu)
    assert select(DETERMINISTIC, own, policy).backend.name == "torch_flash"
    activate(monkeypatch, "FA3")
    theirs = Machine.this(gpu)
    assert theirs.flash_impl == "FA3"
    assert theirs is Machine.this(gpu)
    assert select(DETERMINISTIC, theirs, policy).backend.name == "reference"
    activate(monkeypatch, None)
    assert Machine.this(gpu) is own
    assert select(DETERMINISTIC, Machine.this(gpu), policy).backend.name == "torch_flash"


def test_a_program_that_never_imported_the_registry_has_no_activated_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_machine.sys.modules, "torch.nn.attention")
    assert _machine.active_flash_impl() is None


def test_the_summary_names_the_activated_kernel() -> None:
    h100 = machine("h100", "FA3")
    assert "torch's flash is FA3" in str(decide(ask(), h100, Policy()))
    row = next(row for row in undivided.backends(h100) if row.name == "torch_flash")
    assert row.available
    assert "FA3" in row.summary
    assert (
        "FA3" not in next(row for row in undivided.backends(machine("h100", None)) if row.name == "torch_flash").summary
    )


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int, int]]:
    """PyTorch's operators with FlashAttention 3 behind them: -inf in rows without keys, garbage multiplied by 0."""
    calls: list[tuple[bool, int, int]] = []

    def sides(causal: bool, left: int, right: int) -> fake.Band:
        return None if left == -1 else left, 0 if causal else None if right == -1 else right

    def forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, debug, *, scale, window_size_left, window_size_right
    ):
        assert not any(t.isnan().any() for t in (q, k, v))
        calls.append((is_causal, window_size_left, window_size_right))
        band = sides(is_causal, window_size_left, window_size_right)
        return *fake.flash(q, k, v, scale, band, cu_q=cu_q, cu_k=cu_k, empty_lse=-torch.inf), None, None, None

    def backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        cu_q,
        cu_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        rng,
        unused,
        *,
        scale,
        window_size_left,
        window_size_right,
    ):
        assert not any(t.isnan().any() for t in (q, k, v))
        calls.append((is_causal, window_size_left, window_size_right))
        band = sides(is_causal, window_size_left, window_size_right)
        return fake.gradients(lambda q, k, v: fake.flash(q, k, v, scale, band, cu_q=cu_q, cu_k=cu_k), (q, k, v), grad)

    found = types.SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)
    monkeypatch.setattr(cuda, "OPS", found)
    return calls


@pytest.mark.parametrize("mask", MASKS)
def test_the_same_operators_are_called(monkeypatch: pytest.MonkeyPatch, operators: list[Any], mask: str) -> None:
    activate(monkeypatch, "FA4")
    check(cuda, *tensors(6, 5), mask=MASKS[mask]())
    assert (
        operators[0]
        == operators[1]
        == {
            "full": (False, -1, -1),
            "causal": (True, -1, -1),
            "window-2-1": (False, 2, 1),
            "left-only": (False, 0, -1),
            "right-only": (False, -1, 1),
        }[mask]
    )


def test_garbage_behind_the_last_document_is_cleared(monkeypatch: pytest.MonkeyPatch, operators: list[Any]) -> None:
    activate(monkeypatch, "FA3")
    q, k, v = tensors(10, 10, "thd")
    q[8:], k[8:], v[8:] = (torch.nan,) * 3
    mask = masks.documents(torch.tensor([0, 3, 3, 8]), total_q=10) & masks.causal()
    check(cuda, q, k, v, layout="thd", mask=mask)
