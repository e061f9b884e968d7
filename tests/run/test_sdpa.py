"""`undivided.scaled_dot_product_attention` is PyTorch's: the same results and gradients, its switches, and clear
errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import undivided
from undivided import sdpa
from undivided.errors import InputError, NoBackendError
from undivided.request.request import Request
from undivided.run import prepare
from undivided.selection import switches as _sdp_switches
from undivided.selection.policy import policy

ours = undivided.scaled_dot_product_attention
# torch's own forward mode scripts its decompositions when it is first used
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch.jit.script:DeprecationWarning")
HALF, BFLOAT, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


def math(*args: Any, **options: Any) -> Tensor:
    """PyTorch's own definition."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **options)


@dataclass(frozen=True)
class Case:
    """Shapes and arguments of one call; `mask` is a shape, with its kind."""

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype = DOUBLE
    mask: tuple[int, ...] | None = None
    mask_kind: str = "bool"
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal, "scale": self.scale, "enable_gqa": self.enable_gqa}

    def inputs(self) -> list[Tensor]:
        """query, key, value and, if there is one, the mask."""
        generator = torch.Generator().manual_seed(hash((self.query, self.key, self.value)) % 1000)
        shapes = (self.query, self.key, self.value)
        found = [torch.randn(shape, generator=generator, dtype=DOUBLE).to(self.dtype) for shape in shapes]
        if self.mask is None:
            return found
        allowed = torch.rand(self.mask, generator=generator) < 0.6
        if self.mask_kind == "bool":
            return [*found, allowed]
        added = torch.randn(self.mask, generator=generator, dtype=DOUBLE)
        if self.mask_kind == "with -inf":
            added = added.masked_fill(~allowed, -torch.inf)
        return [*found, added.to(torch.float32 if self.mask_kind == "float32" else self.dtype)]


def outputs(function: Callable[..., Tensor], case: Case, dtype: torch.dtype) -> list[Tensor]:
    """The result and the gradients of everything that has one, computed in `dtype`."""
    inputs = [t if t.dtype == torch.bool else t.to(dtype) for t in case.inputs()]
    if case.mask_kind == "float32" and dtype == case.dtype:
        inputs[3:] = [mask.to(SINGLE) for mask in inputs[3:]]
    leaves = [t.requires_grad_() for t in inputs if t.is_floating_point()]
    out = function(*inputs, **case.options)
    gradients = torch.autograd.grad(out, leaves, upstream(out, case).to(out.dtype))
    return [out.detach(), *gradients]


def upstream(out: Tensor, case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator, dtype=DOUBLE).to(case.dtype)


ROUNDINGS = {HALF: 1, BFLOAT: 1, SINGLE: 16, DOUBLE: 16}
"""Half types: of the result. Others: the handful of sums, products and an exp that any order of operations has."""


def assert_is_pytorchs(case: Case, reference: Callable[..., Tensor] = math) -> None:
    """Our error against float64 is at most twice PyTorch's own in this dtype plus a few roundings.

    Relative to the norm of the result; to that of the incoming gradient where everything cancels (a single key, say).
    """
    truth = outputs(reference, case, DOUBLE)
    floor = upstream(truth[0], case).double().norm()
    for exact, mine, theirs in zip(
        truth, outputs(ours, case, case.dtype), outputs(reference, case, case.dtype), strict=True
    ):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        rounding = ROUNDINGS[case.dtype] * torch.finfo(case.dtype).eps * max(exact.norm(), floor)
        assert (mine - exact).norm() <= 2 * (theirs - exact).norm() + rounding, case


SHAPES: dict[str, Case] = {
    "2d": Case((3, 4), (5, 4), (5, 6)),
    "3d": Case((2, 3, 4), (2, 5, 4), (2, 5, 4)),
    "4d": Case((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)),
    "5d": Case((2, 3, 2, 3, 4), (2, 3, 2, 5, 4), (2, 3, 2, 5, 6)),
    "6d": Case((2, 1, 3, 2, 3, 4), (2, 1, 3, 2, 5, 4), (2, 1, 3, 2, 5, 4)),
    "query-4d-key-3d": Case((2, 3, 3, 4), (3, 5, 4), (3, 5, 4)),
    "query-2d-key-4d": Case((3, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
    "key-batch-1": Case((2, 3, 3, 4), (1, 3, 5, 4), (1, 3, 5, 4)),
    "query-batch-1": Case((1, 3, 3, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
    "one-key-head": Case((2, 3, 3, 4), (2, 1, 5, 4), (2, 1, 5, 4)),
    "one-query-head": Case((2, 1, 3, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
    "key-and-value-broadcast-apart": Case((1, 3, 3, 4), (2, 1, 5, 4), (3, 1, 3, 5, 4)),
    "5d-broadcast-in-the-middle": Case((2, 3, 2, 3, 4), (2, 1, 2, 5, 4), (1, 3, 1, 5, 4)),
    "gqa": Case((2, 6, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4), enable_gqa=True),
    "gqa-3d": Case((6, 3, 4), (2, 5, 4), (2, 5, 4), enable_gqa=True),
    "gqa-5d-broadcast": Case((2, 2, 6, 3, 4), (2, 1, 2, 5, 4), (2, 2, 5, 6), enable_gqa=True),
    "gqa-key-and-value-heads-differ": Case((2, 6, 3, 4), (2, 2, 5, 4), (2, 3, 5, 4), enable_gqa=True),
    "gqa-of-as-many-heads": Case((2, 3, 3, 4), (2, 3, 5, 4), (2, 3, 5, 4), enable_gqa=True),
    "no-keys": Case((2, 3, 3, 4), (2, 3, 0, 4), (2, 3, 0, 4)),
    "no-queries": Case((2, 3, 0, 4), (2, 3, 5, 4), (2, 3, 5, 4)),
    "no-batch": Case((0, 3, 3, 4), (0, 3, 5, 4), (0, 3, 5, 4)),
    "no-heads": Case((2, 0, 3, 4), (2, 0, 5, 4), (2, 0, 5, 4)),
    "no-values": Case((2, 3, 3, 4), (2, 3, 5, 4), (2, 3, 5, 0)),
    "no-head-size": Case((2, 3, 3, 0), (2, 3, 5, 0), (2, 3, 5, 4)),
    "no-head-size-2d": Case((3, 0), (5, 0), (5, 4)),
    "no-heads-gqa": Case((2, 0, 3, 4), (2, 0, 5, 4), (2, 0, 5, 4), enable_gqa=True),
}


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["every-pair", "causal"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_rank_and_broadcast(shape: Case, causal: bool, dtype: torch.dtype) -> None:
    assert_is_pytorchs(replace(shape, dtype=dtype, is_causal=causal))


MASKS = [(), (7,), (5, 7), (1, 7), (5, 1), (1, 1), (3, 5, 7), (1, 5, 7), (2, 3, 5, 7), (2, 1, 5, 7), (2, 1, 1, 7)]


@pytest.mark.parametrize("kind", ["bool", "with -inf", "added", "float32"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_every_rank_of_mask(mask: tuple[int, ...], kind: str) -> None:
    assert_is_pytorchs(replace(SHAPES["4d"], mask=mask, mask_kind=kind))


IN_FIVE = [(2, 3, 2, 3, 5), (1, 1, 2, 3, 5), (2, 1, 1, 3, 5), (1, 3, 2, 1, 5), (3, 1, 3, 5), (2, 3, 5), (3, 5), (5,)]


@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("mask", IN_FIVE, ids=str)
def test_every_rank_of_mask_in_five_dimensions(mask: tuple[int, ...], kind: str) -> None:
    assert_is_pytorchs(replace(SHAPES["5d"], mask=mask, mask_kind=kind))


def joined(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """PyTorch's definition with the causal part joined to the mask by hand."""
    causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    both = mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -torch.inf)
    return math(query, key, value, both, **{**options, "is_causal": False})


@pytest.mark.parametrize("kind", ["bool", "with -inf", "added", "float32"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", ["4d", "gqa", "3d"])
def test_a_mask_and_is_causal_both_apply(shape: str, mask: tuple[int, ...], kind: str) -> None:
    """PyTorch's CPU kernel accepts both, and programs rely on it: here every dtype and rank is tested, with
    gradients."""
    case = SHAPES[shape]
    heads, q_len, kv_len = case.query[-3], case.query[-2], case.key[-2]
    sizes = (case.query[0], heads, q_len, kv_len)[-len(mask) :] if mask else ()
    fitting = tuple(1 if n == 1 else size for n, size in zip(mask, sizes, strict=True))
    if shape == "3d":
        fitting = fitting[-3:]
    # joining rounds the gradient of a float32 mask once more
    for dtype in (SINGLE, BFLOAT) if kind == "float32" else (SINGLE, BFLOAT, DOUBLE):
        assert_is_pytorchs(replace(case, mask=fitting, mask_kind=kind, dtype=dtype, is_causal=True), reference=joined)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_and_is_causal_equal_pytorchs_kernel(kind: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(grad=True, dtype=dtype)
    mask = torch.rand(3, 5) < 0.6
    mask[:, 0] = True
    if kind == "float":
        mask = torch.randn(3, 5).masked_fill(~mask, -torch.inf).to(dtype)
    mine, theirs = (f(q, k, v, mask, is_causal=True) for f in (ours, F.scaled_dot_product_attention))
    up = torch.randn_like(mine)
    found, expected = (torch.autograd.grad(out, (q, k, v), up) for out in (mine, theirs))
    tolerance = 4 * torch.finfo(dtype).eps
    for a, b in zip((mine, *found), (theirs, *expected), strict=True):
        assert (a - b).double().norm() <= tolerance * max(b.double().norm(), up.double().norm())


def test_a_mask_and_is_causal_are_an_error_if_only_the_math_kernel_is_allowed() -> None:
    """As in PyTorch, whose math kernel takes one of them."""
    q, k, v = qkv()
    mask = torch.ones(3, 5, dtype=torch.bool)
    with sdpa_kernel(SDPBackend.MATH):
        for function in (F.scaled_dot_product_attention, ours):
            with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set when is_causal=True"):
                function(q, k, v, mask, is_causal=True)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any call that PyTorch's definition takes: shapes that broadcast, fewer heads, masks that broadcast, and the
    rest."""
    common = draw(st.lists(st.integers(1, 3), max_size=3))
    q_len, kv_len, size, value_size = (draw(st.integers(1, most)) for most in (9, 11, 9, 9))
    grouped = draw(st.booleans()) and len(common) > 0
    heads = ([draw(st.sampled_from([1, 2, 6]))], [draw(st.sampled_from([1, 2]))]) if grouped else ([], [])
    if grouped:
        heads = ([6], heads[1])
        common = common[:-1]

    def some(shape: list[int]) -> list[int]:
        kept = [draw(st.sampled_from([n, n, 1])) for n in shape]
        return kept[draw(st.integers(0, len(kept))) :] if draw(st.booleans()) else kept

    query, key, value = some(common), some(common), some(common)
    scores = [*torch.broadcast_shapes(query, key), *heads[0], q_len, kv_len]
    case = Case(
        (*query, *heads[0], q_len, size),
        (*key, *heads[1], kv_len, size),
        (*value, *heads[1], kv_len, value_size),
        dtype=draw(st.sampled_from([HALF, BFLOAT, SINGLE, DOUBLE])),
        scale=draw(st.sampled_from([None, 0.3, -0.5])),
        enable_gqa=grouped,
    )
    kind = draw(st.sampled_from(["none", "causal", "bool", "with -inf", "added", "float32"]))
    if kind in ("none", "causal"):
        return replace(case, is_causal=kind == "causal")
    return replace(case, mask=tuple(some(scores)), mask_kind=kind)


@settings(max_examples=600, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_call(case: Case) -> None:
    assert_is_pytorchs(case)


def qkv(grad: bool = False, dtype: torch.dtype = SINGLE) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


@pytest.mark.parametrize("number", [False, True], ids=["bool", "-inf"])
def test_a_row_without_a_key_is_zero_and_has_no_gradient(number: bool) -> None:
    q, k, v = qkv(grad=True)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    out = ours(q, k, v, torch.zeros(3, 5).masked_fill(~mask, -torch.inf) if number else mask)
    out.sum().backward()
    assert (out[:, :, 1] == 0).all()
    assert (out[:, :, 0] != 0).all()
    assert (q.grad[:, :, 1] == 0).all()
    assert q.grad.isfinite().all()


def test_what_a_boolean_mask_hides_may_be_nan() -> None:
    """PyTorch's result would be NaN: it multiplies what it masks."""
    q, k, v = qkv()
    mask = torch.tensor([True, True, True, False, False])
    clean = ours(q, k, v, mask)
    k[:, :, 3:], v[:, :, 3:] = torch.nan, torch.inf
    assert torch.equal(ours(q, k, v, mask), clean)
    assert math(q, k, v, mask).isnan().any()


def test_a_boolean_mask_is_read_again_at_every_call() -> None:
    q, k, v = qkv()
    mask = torch.ones(3, 5, dtype=torch.bool)
    ours(q, k, v, mask)
    mask[:, 2:] = False
    torch.testing.assert_close(ours(q, k, v, mask), math(q, k, v, mask))


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")  # it gives zeros
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 5), (5, 3), (4, 4)])
def test_causal_biases_of_pytorch_are_structure(bias: Callable[..., Any], q_len: int, kv_len: int) -> None:
    q, k, v = torch.randn(1, 2, q_len, 8), torch.randn(1, 2, kv_len, 8), torch.randn(1, 2, kv_len, 8)
    diagonal = kv_len - q_len if bias is causal_lower_right else 0
    dense = torch.ones(q_len, kv_len, dtype=torch.bool).tril(diagonal)
    torch.testing.assert_close(ours(q, k, v, bias(q_len, kv_len)), math(q, k, v, dense))
    with pytest.raises(InputError, match=r"attn_mask must be for \d queries and \d keys"):
        ours(q, k, v, bias(q_len, kv_len + 1))


def weights(p: float, seed: int = 0) -> Tensor:
    """Attention weights after dropout, [2, 3, 64, 256], where all of them were 1/256."""
    torch.manual_seed(seed)
    q, k = torch.zeros(2, 3, 64, 8), torch.zeros(2, 3, 256, 8)
    return 256 * ours(q, k, torch.eye(256).expand(2, 3, 256, 256), dropout_p=p)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_drops_at_its_rate_and_scales_the_rest(p: float) -> None:
    found = weights(p)
    rate = (found == 0).double().mean().item()
    assert abs(rate - p) < 4 * (p * (1 - p) / found.numel()) ** 0.5 + 2**-16
    kept = found[found != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - p)), rtol=1e-3, atol=0)


def test_dropout_follows_torchs_generator_and_is_always_applied() -> None:
    assert torch.equal(weights(0.5), weights(0.5))
    assert not torch.equal(weights(0.5), weights(0.5, seed=1))
    with torch.no_grad(), torch.inference_mode():
        assert (weights(0.5) == 0).any()
    assert (weights(1.0) == 0).all()


@pytest.mark.parametrize("mask_dtype", [None, SINGLE, HALF, BFLOAT], ids=str)
def test_autocast_casts_as_pytorch_does(mask_dtype: torch.dtype | None) -> None:
    q, k, v = qkv(grad=True)
    mask = None if mask_dtype is None else (1000 + 3 * torch.randn(3, 5)).to(mask_dtype)  # bfloat16 has steps of 4
    with torch.autocast("cpu", dtype=BFLOAT):
        mine, theirs = ours(q, k.to(BFLOAT), v, mask), math(q, k.to(BFLOAT), v, mask)
    assert mine.dtype == theirs.dtype == BFLOAT
    assert (mine - theirs).norm() <= 0.01 * theirs.norm()
    (grad,) = torch.autograd.grad(mine.sum(), [q])
    assert grad.dtype == SINGLE


def test_autocast_leaves_float64_alone() -> None:
    q, k, v = qkv(dtype=DOUBLE)
    with torch.autocast("cpu", dtype=BFLOAT):
        out = ours(q, k, v, torch.zeros(3, 5, dtype=DOUBLE))
    torch.testing.assert_close(out, math(q, k, v))


@pytest.mark.parametrize("masked", ["none", "bool", "added", "bool of each"])
def test_vmap(masked: str) -> None:
    q, k, v = qkv()
    mask = {"none": None, "bool": torch.rand(3, 5) < 0.6, "added": torch.randn(3, 5)}.get(masked)
    if masked == "bool of each":
        mask = torch.rand(2, 1, 3, 5) < 0.6
        each = torch.vmap(ours)(q, k, v, mask)
    else:
        each = torch.vmap(lambda *x: ours(*x, attn_mask=mask))(q, k, v)
    torch.testing.assert_close(each, math(q, k, v, mask))


def test_per_sample_gradients() -> None:
    q, k, v = qkv(dtype=DOUBLE)
    mask = torch.rand(3, 5) < 0.6

    def loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda q, k, v: function(q, k, v, mask).square().sum()

    mine = torch.vmap(torch.func.grad(loss(ours), argnums=(0, 1, 2)))(q, k, v)
    theirs = torch.func.grad(loss(math), argnums=(0, 1, 2))(q, k, v)
    torch.testing.assert_close(mine, theirs)


def test_forward_mode() -> None:
    q, k, v = qkv(dtype=DOUBLE)
    bias = torch.randn(3, 5, dtype=DOUBLE)
    tangents = tuple(torch.randn_like(t) for t in (q, k, v, bias))
    mine = torch.func.jvp(ours, (q, k, v, bias), tangents)
    torch.testing.assert_close(mine, torch.func.jvp(math, (q, k, v, bias), tangents))


def test_second_derivatives() -> None:
    inputs = [torch.randn(1, 2, n, 2, dtype=DOUBLE, requires_grad=True) for n in (2, 3, 3)]
    bias = torch.randn(2, 3, dtype=DOUBLE, requires_grad=True)
    assert torch.autograd.gradgradcheck(ours, (*inputs, bias))


def test_meta_tensors_give_shape_and_dtype() -> None:
    q, k, v = (t.to("meta", HALF) for t in qkv())
    mask = torch.ones(3, 5, dtype=torch.bool, device="meta")
    for out in (ours(q, k, v, mask), ours(q, k, v, is_causal=True), ours(q[0], k[0], v[0])):
        assert (out.device.type, out.dtype, out.shape[-3:]) == ("meta", HALF, (4, 3, 8))


COMPILED: dict[str, Callable[..., Tensor]] = {
    "plain": lambda q, k, v, m: ours(q, k, v),
    "causal": lambda q, k, v, m: ours(q, k, v, is_causal=True, scale=0.3),
    "bool": lambda q, k, v, m: ours(q, k, v, m > 0),
    "added": lambda q, k, v, m: ours(q, k, v, m),
    "3d": lambda q, k, v, m: ours(q[0], k[0], v[0], m),
    "one-key-head": lambda q, k, v, m: ours(q, k[:, :1], v[:, :1]),
    "5d": lambda q, k, v, m: ours(q[None], k[None], v, m),
    "lower-right": lambda q, k, v, m: ours(q, k, v, torch.ones(3, 5, dtype=torch.bool).tril(2)),
}


@pytest.mark.parametrize("call", COMPILED.values(), ids=COMPILED)
def test_compiled_whole(call: Callable[..., Tensor]) -> None:
    torch._dynamo.reset()
    inputs = [*qkv(grad=True), torch.randn(3, 5, requires_grad=True)]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = [compiled(*inputs), call(*inputs)]
    torch.testing.assert_close(*found)
    mine, eager = (torch.autograd.grad(out.sin().sum(), inputs, allow_unused=True) for out in found)
    torch.testing.assert_close(mine[:3], eager[:3])


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the backends that were chosen, call by call."""
    names: list[str] = []
    select = prepare.select

    def noted(*args: Any) -> Any:
        decision = select(*args)
        names.append(decision.backend.name)
        return decision

    monkeypatch.setattr(prepare, "select", noted)
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
    said = "switched off by sdpa_kernel or torch.backends.cuda.enable_math_sdp(False)"
    assert said in reasons["reference"]


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
        said = dict(policy(switches=f"{letter}:").disabled)
        assert f"enable_{switch}_sdp(False)" in said[family]
        assert len(said) == (2 if letter == "f" else 1)
    assert policy(switches="") == policy()


@pytest.mark.parametrize(
    ("traced", "now", "both"),
    [("", "", ""), ("fm:", "", "fm:"), ("", "c:", "c:"), ("fm:", "cm:01234", "cfm:01234"), ("f:", "f:", "f:")],
)
def test_switches_of_tracing_and_of_running_are_combined(traced: str, now: str, both: str) -> None:
    assert _sdp_switches.combine(traced, now) == both


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


@pytest.mark.parametrize("name", ["4d", "3d", "2d", "5d", "6d", "one-key-head", "gqa", "key-batch-1", "one-query-head"])
def test_tensors_are_reshaped_by_views(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = SHAPES[name].inputs()
    mask = torch.ones(inputs[0].shape[-2], inputs[1].shape[-2], dtype=torch.bool)
    seen: list[Tensor] = []
    attend = sdpa._attend

    def spied(request: Request) -> Tensor:
        assert request.options.mask is not None
        seen.extend((*request.tensors[:3], *request.options.mask.tensors))
        return attend(request)

    monkeypatch.setattr(sdpa, "_attend", spied)
    ours(*inputs, mask, enable_gqa=SHAPES[name].enable_gqa)
    assert all(t.dim() == 4 for t in seen)
    assert [t.data_ptr() for t in seen] == [t.data_ptr() for t in (*inputs, mask)]


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
        r"key must broadcast to \[2, 4, '...'\].*\n.*\n  HINT: enable_gqa=True",
    ),
    "batches": ((Q, K[:1].expand(3, 4, 5, 8), K), {}, r"key must broadcast to \[2, 4, '...'\]"),
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
    "scale": ((Q, K, K), {"scale": float("inf")}, "scale must be a finite number"),
    "causal": ((Q, K, K), {"is_causal": 1}, "is_causal must be True or False, got 1"),
    "scale-of-two": ((Q, K, K), {"scale": torch.ones(2)}, "scale must be a number, or a tensor that holds one"),
    "gqa": ((Q, K, K), {"enable_gqa": None}, "enable_gqa must be True or False, got None"),
}


@pytest.mark.parametrize(("args", "options", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named(args: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.compile(message, re.DOTALL)):
        ours(*args, **options)


def test_a_nested_tensor_is_an_error_with_a_hint() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(4, 3, 8), torch.zeros(4, 5, 8)], layout=torch.jagged)
    with pytest.raises(InputError, match="query must be a dense"):
        ours(nested, nested, nested)


def test_a_scale_may_be_a_tensor_as_in_pytorch() -> None:
    q, k, v = qkv()
    torch.testing.assert_close(ours(q, k, v, scale=torch.tensor(0.3)), ours(q, k, v, scale=0.3))
