"""PyTorch's switches decide which backends scaled_dot_product_attention may run; wrong arguments are named."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sdpa_calls import BFLOAT, SHAPES, ours, qkv
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_upper_left

import undivided
from undivided import sdpa
from undivided.errors import InputError, NoBackendError
from undivided.request.request import Request
from undivided.run import prepare
from undivided.run.sdpa import repeated
from undivided.selection.policy import current_policy

# torch's own forward mode scripts its decompositions when it is first used


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the backends that were chosen, call by call."""
    names: list[str] = []
    select = prepare.select

    def noted(*args: Any) -> Any:
        decision = select(*args)
        names.append(decision.backend.name)
        return decision

    def noted_again(*args: Any) -> Any:
        out = run(*args)
        decision = undivided.last_decision()
        if out is not None and decision is not None:
            names.append(decision.backend.name)
        return out

    run = repeated.run
    monkeypatch.setattr(prepare, "select", noted)
    monkeypatch.setattr(repeated, "run", noted_again)
    return names


@pytest.fixture
def switches() -> Iterator[None]:
    """Restores all switches after a test."""
    on = [getattr(torch._C, f"_get_{name}_sdp_enabled")() for name in ("flash", "mem_efficient", "cudnn", "math")]
    yield
    for set_to, was in zip(("flash", "mem_efficient", "cudnn", "math"), on, strict=True):
        getattr(torch.backends.cuda, f"enable_{set_to}_sdp")(was)


def test_only_math_runs_the_reference(ran: list[str]) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        ours(*qkv())
    ours(*qkv())
    assert ran[0] == "reference"
    assert ran[1] != "reference"


def test_allowing_only_flash_raises_its_reasons() -> None:
    """PyTorch would raise "No available kernel" here, or warn and fall back to math."""
    q, k, v = qkv()
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]), pytest.raises(NoBackendError) as error:
        ours(q.double(), k.double(), v[..., :3].double(), dropout_p=0.5)
    reasons = error.value.decision.reasons
    assert any("value head size" in reason for reason in reasons["torch_flash"])
    reason = "switched off by sdpa_kernel or torch.backends.cuda.enable_math_sdp(False)"
    assert reason in reasons["reference"]


def test_only_flash_runs_flash(ran: list[str]) -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        ours(*qkv())
    assert all(name not in ("reference", "flex") for name in ran)


@pytest.mark.parametrize("kernel", ["EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_allowing_only_a_family_without_a_cpu_kernel_is_an_error(kernel: str) -> None:
    with sdpa_kernel(getattr(SDPBackend, kernel)), pytest.raises(NoBackendError, match="no backend can run"):
        ours(*qkv())


@pytest.mark.usefixtures("switches")
def test_global_switches_are_read_at_the_call(ran: list[str]) -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    ours(*qkv())
    torch.backends.cuda.enable_flash_sdp(True)
    ours(*qkv())
    torch.backends.cuda.enable_math_sdp(False)
    ours(*qkv())
    assert ran[0] == "reference"
    assert ran[1] == ran[2] != "reference"


def test_set_priority_gives_the_order(ran: list[str]) -> None:
    both = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(both, set_priority=True):
        ours(*qkv())
    with sdpa_kernel(both):  # PyTorch's default order is not ours, and no order was requested
        ours(*qkv())
    with sdpa_kernel(both[::-1], set_priority=True):
        ours(*qkv())
    assert ran[0] == "reference"
    assert ran[1] == ran[2] != "reference"


def test_use_backends_stays_in_force_under_pytorchs_switches(ran: list[str]) -> None:
    both = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with undivided.use_backends("torch_flash"), sdpa_kernel(both, set_priority=True):
        ours(*qkv())
    assert ran == ["torch_flash"]


def test_attention_ignores_pytorchs_switches() -> None:
    q, k, v = qkv()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        undivided.attention(q, k, v, layout="bhsd")


def test_every_switch_is_named_in_its_reason() -> None:
    for letter, family, switch in (
        ("f", "flash", "flash"),
        ("e", "efficient", "mem_efficient"),
        ("c", "fused", "cudnn"),
        ("m", "math", "math"),
    ):
        reasons = dict(current_policy(switches=f"{letter}:").disabled)
        assert f"enable_{switch}_sdp(False)" in reasons[family]
        assert len(reasons) == (2 if letter == "f" else 1)
    assert current_policy(switches="") == current_policy()


@pytest.mark.usefixtures("switches")
def test_switches_reach_a_compiled_call_from_inside_and_from_outside() -> None:
    torch._dynamo.reset()
    q, k, v = qkv()

    def inside(q: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return ours(q, k, v)

    with pytest.raises(NoBackendError):
        torch.compile(inside, fullgraph=True, backend="aot_eager")(q)
    outside = torch.compile(lambda q: ours(q, k, v), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outside(q), ours(q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(NoBackendError):
        outside(q)
    torch.testing.assert_close(outside(q), ours(q, k, v))


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_a_compiled_call_follows_the_switches_of_its_caller(kernel: SDPBackend) -> None:
    torch._dynamo.reset()
    q, k, v = qkv()
    compiled = torch.compile(lambda q: ours(q, k, v), backend="aot_eager")
    families = []
    for allowed in (kernel, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, None):
        with sdpa_kernel(allowed) if allowed else contextlib.nullcontext():
            compiled(q)
        families.append(undivided.last_decision().backend.family)  # type: ignore[union-attr]
    assert families == ["math" if kernel is SDPBackend.MATH else "flash", "math", "flash", "flash"]


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("outside", [SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION, None])
def test_switches_inside_a_compiled_function_replace_those_of_its_caller(
    outside: SDPBackend | None, compiler: str
) -> None:
    torch._dynamo.reset()
    q, k, v = qkv()

    def inside(q: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            return ours(q, k, v)

    compiled = torch.compile(inside, fullgraph=True, backend=compiler)
    for _ in range(2):
        with sdpa_kernel(outside) if outside else contextlib.nullcontext():
            compiled(q)
        assert undivided.last_decision().backend.family == "flash"  # type: ignore[union-attr]


@pytest.mark.usefixtures("switches")
def test_all_switches_on_inside_replace_those_of_the_caller() -> None:
    torch._dynamo.reset()
    q, k, v = qkv()
    every = list(SDPBackend.__members__.values())[1:]

    def inside(q: Tensor) -> Tensor:
        with sdpa_kernel(every):
            return ours(q, k, v)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        torch.compile(inside, fullgraph=True, backend="aot_eager")(q)


@pytest.mark.parametrize("name", ["4d", "3d", "2d", "5d", "6d", "one-key-head", "gqa", "key-batch-1", "one-query-head"])
def test_tensors_are_reshaped_by_views(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = SHAPES[name].inputs()
    mask = torch.ones(inputs[0].shape[-2], inputs[1].shape[-2], dtype=torch.bool)
    seen: list[Tensor] = []
    attend = sdpa._attend

    def spied(request: Request, *kept: Any) -> Tensor:
        assert request.options.mask is not None
        seen.extend((*request.tensors[:3], *request.options.mask.tensors))
        return attend(request, *kept)

    monkeypatch.setattr(sdpa, "_attend", spied)
    ours(*inputs, mask, enable_gqa=SHAPES[name].enable_gqa)
    assert all(t.dim() == 4 for t in seen)
    assert [t.data_ptr() for t in seen[:3]] == [t.data_ptr() for t in inputs]
    assert seen[3].untyped_storage().nbytes() == mask.untyped_storage().nbytes()


Q, K = torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 5, 8)


WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "not-a-tensor": (([1.0], K, K), {}, "query must be a torch.Tensor, got list"),
    "mask-not-a-tensor": ((Q, K, K, [True]), {}, "attn_mask must be a torch.Tensor or None, got list"),
    "one-dimension": ((Q[0, 0, 0], K, K), {}, r"query must have at least 2 axes .* got \[8\]"),
    "gqa-without-heads": ((Q[0, 0], K[0, 0], K[0, 0]), {"enable_gqa": True}, "query must have at least 3 axes .*heads"),
    "integers": ((Q.int(), K.int(), K.int()), {}, "query must be float16, .* got torch.int32"),
    "complex": ((Q.cfloat(), K.cfloat(), K.cfloat()), {}, "query must be float16, .* got torch.complex64"),
    "dtypes": ((Q, K.double(), K), {}, r"key must have the dtype of query .*got torch.float64\n.*\n  HINT: key.to"),
    "value-dtype": ((Q, K, K.half()), {}, "value must have the dtype of query"),
    "device": ((Q, K.to("meta"), K), {}, "key must be on the device of query .* got meta"),
    "head-size": ((Q, K[..., :7], K), {}, r"key must have the head size of query \(8\).* got 7"),
    "lengths": ((Q, K, K[:, :, :4]), {}, r"value must have the length of key \(5\), got 4"),
    "fewer-heads": (
        (Q, K[:, :2], K[:, :2]),
        {},
        r"key must broadcast to \[2, 4, \.\.\.\].*\n.*\n  HINT: enable_gqa=True",
    ),
    "batches": ((Q, K[:1].expand(3, 4, 5, 8), K), {}, r"key must broadcast to \[2, 4, \.\.\.\]"),
    "heads-do-not-divide": (
        (Q, K[:, :3], K[:, :3]),
        {"enable_gqa": True},
        r"key must have a number of heads that divides query's \(4\), got 3",
    ),
    "value-heads-do-not-divide": ((Q, K, K[:, :3]), {"enable_gqa": True}, "value must have a number of heads"),
    "causal-bias-and-causal": (
        (Q, K, K, causal_upper_left(3, 5)),
        {"is_causal": True},
        "attn_mask must not be combined with is_causal=True, because it is a causal mask itself, got both",
    ),
    "mask-shape": (
        (Q, K, K, torch.ones(3, 4, dtype=torch.bool)),
        {},
        r"attn_mask must broadcast to .* = \[2, 4, 3, 5\], got \[3, 4\]",
    ),
    "mask-of-too-many-axes": ((Q[0], K[0], K[0], torch.zeros(1, 4, 3, 5)), {}, r"attn_mask must broadcast to"),
    "mask-without-heads": ((Q, K, K, torch.zeros(2, 3, 5)), {}, r"attn_mask must broadcast to .*got \[2, 3, 5\]"),
    "mask-integers": (
        (Q, K, K, torch.ones(3, 5).long()),
        {},
        r"attn_mask must be bool or float32, got torch.int64\n.*\n  HINT: attn_mask.bool\(\)",
    ),
    "mask-dtype": (
        (Q.half(), K.half(), K.half(), torch.ones(3, 5, dtype=BFLOAT)),
        {},
        "attn_mask must be bool or float32 or float16, got torch.bfloat16",
    ),
    "mask-device": ((Q, K, K, torch.ones(3, 5, device="meta")), {}, "attn_mask must be on the device of query"),
    "dropout": ((Q, K, K), {"dropout_p": 2.0}, "dropout_p must be a number from 0 to 1, got 2.0"),
    "negative-dropout": ((Q, K, K), {"dropout_p": -0.1}, "dropout_p must be a number from 0 to 1, got -0.1"),
    "scale": ((Q, K, K), {"scale": float("inf")}, "scale must be a number from -1e30"),
    "causal": ((Q, K, K), {"is_causal": 1}, "is_causal must be True or False, got 1"),
    "scale-of-two": ((Q, K, K), {"scale": torch.ones(2)}, "scale must be a number, or a tensor that holds one"),
    "gqa": ((Q, K, K), {"enable_gqa": None}, "enable_gqa must be True or False, got None"),
}


@pytest.mark.parametrize(("args", "options", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(args: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.compile(message, re.DOTALL)):
        ours(*args, **options)


@pytest.mark.parametrize("name", ["gqa-without-heads", "head-size", "causal"])
def test_an_error_is_of_the_type_that_pytorch_raises(name: str) -> None:
    args, options, _ = WRONG[name]
    with pytest.raises((IndexError, RuntimeError, TypeError)) as theirs:
        torch.nn.functional.scaled_dot_product_attention(*args, **options)
    with pytest.raises(InputError) as error:
        ours(*args, **options)
    assert isinstance(error.value, theirs.type)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_that_is_not_jagged_is_an_error_with_a_hint() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(4, 3, 8), torch.zeros(4, 5, 8)], layout=torch.strided)
    with pytest.raises(InputError, match=r"(?s)query must be a dense.*HINT: for jagged"):
        ours(nested, nested, nested)


def test_a_scale_may_be_a_tensor_as_in_pytorch() -> None:
    q, k, v = qkv()
    torch.testing.assert_close(ours(q, k, v, scale=torch.tensor(0.3)), ours(q, k, v, scale=0.3))
