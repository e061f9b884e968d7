"""Recorded graphs: derivatives that nobody needed when they were recorded, packages, and transforms inside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import undivided
from undivided import masks
from undivided.errors import InputError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        out: Tensor = x + functional.scaled_dot_product_attention(q, k, v)[:, 0]
        return out


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.projection(x).unsqueeze(2)
        out: Tensor = undivided.attention(x, x, x, layout="bshd", mask=masks.causal()).squeeze(2)
        return out


def gradients(function: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> list[Tensor]:
    """Of the input and of the parameters."""
    leaf = x.clone().requires_grad_()
    return list(torch.autograd.grad(function(leaf).square().sum(), [leaf, *module.parameters()]))


def recorded(how: str, module: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    if how == "export, frozen":
        module.requires_grad_(False)
        program = torch.export.export(module, (x,)).module()
        module.requires_grad_(True)
        return program.requires_grad_(True)
    guard = torch.inference_mode() if "inference" in how else torch.no_grad()
    with guard:
        if how == "make_fx":
            return make_fx(module)(x)  # type: ignore[no-any-return]
        if how == "jit.trace":
            return torch.jit.trace(module, x)  # type: ignore[no-any-return]
        program = torch.export.export(module, (x.clone(),)).module()
    return torch.compile(program, backend="aot_eager") if "compiled" in how else program


@pytest.mark.parametrize(
    "how", ["export", "export, inference", "export, frozen", "export, compiled", "make_fx", "jit.trace"]
)
@pytest.mark.parametrize("kind", [Block, Packed])
@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_graph_that_was_recorded_without_gradients_has_them(kind: type[nn.Module], how: str) -> None:
    torch.manual_seed(0)
    module, x = kind(), torch.randn(2, 5, 8)
    with undivided.replace_sdpa():
        want = gradients(module, module, x)
        function = recorded(how, module, x)
        owner = module if how in ("make_fx", "jit.trace") else function
        if isinstance(owner, torch._dynamo.OptimizedModule):
            owner = owner._orig_mod
        if how == "make_fx":  # the parameters are constants of the graph
            leaf = x.clone().requires_grad_()
            found, want = list(torch.autograd.grad(function(leaf).square().sum(), leaf)), want[:1]
        else:
            found = gradients(function, function if how == "jit.trace" else owner, x)  # type: ignore[arg-type]
    for mine, other in zip(found, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_a_trace_with_gradients_passes_its_own_check() -> None:
    module, x = Packed().eval(), torch.randn(2, 5, 8)
    traced = torch.jit.trace(module, x)
    torch.testing.assert_close(traced(2 * x), module(2 * x))


class Masked(nn.Module):
    """Attention with a mask in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.eye(5).bool())

    def forward(self, x: Tensor) -> Tensor:
        return undivided.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], self.mask)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_reads_a_mask_in_a_buffer_that_ran_before() -> None:
    """The trace took the mask that the earlier call had kept: a constant, which no state dict changed."""
    module, x = Masked(), torch.randn(2, 5, 8)
    module(x)
    traced = torch.jit.trace(module, x)
    module.load_state_dict({"mask": torch.rand(5, 5) < 0.5})
    traced.load_state_dict(module.state_dict())
    torch.testing.assert_close(traced(x), module(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", ["padding", "padding_causal"])
def test_a_trace_takes_other_lengths_and_another_kind_of_padding(kind: str) -> None:
    """What the trace read of its example stayed in it: padding on the right, without holes."""

    def padded(*rows: list[int]) -> tuple[Tensor, Tensor]:
        mask = torch.tensor(rows).bool()[:, None, None]
        return torch.randn(len(rows), mask.shape[-1], 2, 8), mask

    layer = undivided.DotProductAttention(2, 8, qkv_format="bshd", attn_mask_type=kind)
    traced = torch.jit.trace(lambda x, mask: layer(x, x, x, mask), padded([0, 0, 0, 1], [0, 0, 0, 0]))
    others = {
        "right": padded([0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 1]),
        "left": padded([1, 1, 0, 0], [1, 0, 0, 0]),
        "holes": padded([0, 1, 0, 0], [1, 0, 1, 0]),
    }
    for name, (x, mask) in others.items():
        torch.testing.assert_close(traced(x, mask), layer(x, x, x, mask), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("needed", [(True, False), (False, True), (True, True)])
def test_the_cpp_wrapper_of_inductor_has_gradients(needed: tuple[bool, bool]) -> None:
    """It ended the process if an operator returned a list of one tensor."""

    def attend(q: Tensor, k: Tensor) -> Tensor:
        return undivided.attention(q, k, k, layout="bshd", mask=masks.causal())

    with torch._inductor.config.patch(cpp_wrapper=True):
        compiled = torch.compile(attend, fullgraph=True)
        torch.manual_seed(0)
        leaves = [torch.randn(1, 6, 2, 16).requires_grad_(need) for need in needed]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found, expected = (torch.autograd.grad(f(*leaves).square().sum(), wanted) for f in (compiled, attend))
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "lengths"])
def test_packages_of_aot_inductor_run(mask: str, tmp_path: Path) -> None:
    """They pass an empty list of tensors as None."""

    class Attend(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            chosen = masks.causal() if mask == "causal" else masks.lengths(torch.tensor([4]))
            return undivided.attention(q, k, k, layout="bshd", mask=chosen)

    q, k = torch.randn(2, 1, 6, 2, 16)
    with torch.no_grad():
        program = torch.export.export(Attend(), (q, k))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attend.pt2"))
        torch.testing.assert_close(torch._inductor.aoti_load_package(path)(q, k), Attend()(q, k))


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, kinds: Any, arguments: Any = (), options: Any = None) -> Any:
        return function(*arguments, **(options or {}))


def attend(q: Tensor) -> Tensor:
    return undivided.attention(q, q, q, layout="bshd", mask=masks.causal())


def sdpa(q: Tensor) -> Tensor:
    return undivided.scaled_dot_product_attention(q, q, q)


@pytest.fixture
def point_and_tangent() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)


@pytest.mark.parametrize("function", [attend, sdpa])
class TestForwardMode:
    """Tangents were dropped without an error wherever the operator was called."""

    @pytest.mark.parametrize("mode", [Looking, lambda: FlopCounterMode(display=False)])
    def test_under_a_mode(self, mode: Any, function: Any, point_and_tangent: tuple[Tensor, Tensor]) -> None:
        want = torch.func.jvp(function, *((x,) for x in point_and_tangent))[1]
        with mode(), forward_ad.dual_level():
            out = forward_ad.unpack_dual(function(forward_ad.make_dual(*point_and_tangent)))
        torch.testing.assert_close(out.tangent, want)

    @pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
    def test_linearize(self, function: Any, point_and_tangent: tuple[Tensor, Tensor]) -> None:
        q, tangent = point_and_tangent
        torch.testing.assert_close(
            torch.func.linearize(function, q)[1](tangent), torch.func.jvp(function, (q,), (tangent,))[1]
        )

    @pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
    def test_inside_a_compiled_function(
        self, backend: str, function: Any, point_and_tangent: tuple[Tensor, Tensor]
    ) -> None:
        def derivative(q: Tensor, tangent: Tensor) -> Tensor:
            result: Tensor = torch.func.jvp(function, (q,), (tangent,))[1]
            return result

        compiled = torch.compile(derivative, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(*point_and_tangent), derivative(*point_and_tangent))

    def test_dual_tensors_of_a_compiled_function_are_refused(
        self, function: Any, point_and_tangent: tuple[Tensor, Tensor]
    ) -> None:
        compiled = torch.compile(function, backend="eager")
        with forward_ad.dual_level(), pytest.raises(InputError, match="must have no tangents"):
            compiled(forward_ad.make_dual(*point_and_tangent))


@pytest.mark.parametrize("function", [attend, sdpa])
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_transforms_inside_a_compiled_function(backend: str, function: Any) -> None:
    def loss(q: Tensor) -> Tensor:
        result: Tensor = function(q).square().sum()
        return result

    q = torch.randn(3, 1, 6, 2, 8)
    for transformed in (
        torch.func.vmap(function),
        torch.func.vmap(torch.func.grad(loss)),
        lambda q: torch.func.jacrev(function)(q[0]),
    ):
        compiled = torch.compile(lambda q, f=transformed: f(q), backend=backend)
        torch.testing.assert_close(compiled(q), transformed(q), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # PyTorch's own
@pytest.mark.parametrize("backend", ["native", "reference", "torch_flash"])
@pytest.mark.parametrize("name", ["causal", "lengths"])
def test_compiled_autograd_runs_the_backward_of_an_eager_call(name: str, backend: str) -> None:
    """Traced, the backward of `native` read memory that traced tensors do not have; with lengths it raised an error."""
    lengths = torch.tensor([3, 5])
    mask = masks.causal() if name == "causal" else masks.lengths(lengths, lengths)
    q = torch.randn(2, 6, 2, 16, requires_grad=True)
    out = undivided.attention(q, q, q, layout="bshd", mask=mask, backend=backend).square().sum()
    (want,) = torch.autograd.grad(out, q, retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        out.backward()
    assert q.grad is not None
    torch.testing.assert_close(q.grad, want)


SIZES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "rotary": lambda x, n: undivided.RotaryPositionEmbedding(16)(n),
    "window": lambda x, n: undivided.attention(x, x, x, layout="bshd", mask=masks.window(n // 2, 0)),
    "chunks": lambda x, n: undivided.attention(x, x, x, layout="bshd", mask=masks.chunks(n // 2)),
    "prefix": lambda x, n: undivided.attention(x, x, x, layout="bshd", mask=masks.causal() | masks.prefix(n // 2)),
    "sinks": lambda x, n: undivided.attention(x, x, x, layout="bshd", mask=masks.window(2, 0) | masks.sinks(n // 4)),
    "lengths": lambda x, n: undivided.attention(x, x, x, layout="bshd", mask=masks.lengths([n - 1])),
    "documents": lambda x, n: undivided.attention(
        x[0], x[0], x[0], layout="thd", mask=masks.documents(torch.tensor([0, 4]), total_q=n, max_q=n)
    ),
}


class OfSizes(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = SIZES[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, x.shape[1])


@pytest.mark.parametrize("name", SIZES)
def test_numbers_that_follow_from_sizes_are_taken_in_graphs(name: str) -> None:
    """torch.compile makes the size of the second call a symbol, which has no attributes."""
    model = OfSizes(name)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for length in (8, 9, 11):
        x = torch.randn(1, length, 2, 16)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_numbers_that_follow_from_sizes_stay_dynamic_in_exported_programs(name: str, strict: bool) -> None:
    """Without ``strict`` the program had the size of the example, and failed for any other one."""
    model, length = OfSizes(name), torch.export.Dim("length", min=5, max=64)
    example = torch.randn(1, 8, 2, 16)
    program = torch.export.export(model, (example,), dynamic_shapes=({1: length},), strict=strict).module()
    for size in (5, 8, 11):
        x = torch.randn(1, size, 2, 16)
        torch.testing.assert_close(program(x), model(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", [name for name in SIZES if name != "lengths"])
def test_a_trace_refuses_numbers_that_are_tensors_and_takes_ints(name: str) -> None:
    """The hint was ``x.item()``, which a size outside of the trace does not have."""
    x, model = torch.randn(1, 8, 2, 16), OfSizes(name)
    with pytest.raises(InputError, match=r"must be an int, got tensor.*\n.*int\(x\).*constant of the trace"):
        torch.jit.trace(model, (x,))
    trace = torch.jit.trace(lambda x: SIZES[name](x, int(x.shape[1])), (x,))
    torch.testing.assert_close(trace(x), model(x))


def test_a_number_of_symbolic_tracing_is_refused_with_what_records_the_call() -> None:
    proxy: Any = torch.fx.Proxy(torch.fx.Graph().placeholder("length"))
    with pytest.raises(InputError, match=r"must be an int, got Proxy.*\n.*torch\.fx\.wrap"):
        masks.window(proxy, 0)


class AnyMode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["reference", "torch_flash", "native"])
@pytest.mark.parametrize("how", ["compiled", "mode", "flop counter", "selective checkpoint"])
def test_every_backend_has_gradients_in_a_recorded_call(how: str, backend: str) -> None:
    """The reference runs autograd, which recorded nothing below the operator: all gradients were 0."""
    torch._dynamo.reset()
    given = [torch.randn(2, 9, 4, 8) for _ in range(3)]
    grad = torch.randn(2, 9, 4, 8)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = undivided.attention(q, k, v, layout="bshd", mask=masks.causal(), backend=backend)
        return out

    def recorded_call(*tensors: Tensor) -> Tensor:
        if how == "compiled":
            out: Tensor = torch.compile(call, backend="aot_eager", fullgraph=True)(*tensors)
            return out
        if how == "selective checkpoint":
            contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
            result: Tensor = checkpoint(call, *tensors, use_reentrant=False, context_fn=contexts)
            return result
        with FlopCounterMode(display=False) if how == "flop counter" else AnyMode():
            return call(*tensors)

    def gradients_of(function: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in given]
        return list(torch.autograd.grad(function(*leaves), leaves, grad))

    for found, expected in zip(gradients_of(recorded_call), gradients_of(call), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("options", "message_start"),
    [
        ({"backend": "native|math"}, "backend must be one of"),
        ({"backend": "nothing"}, "backend must be one of"),
        ({"deterministic": "True"}, "deterministic must be True, False or None, got 'True'"),
        ({"batch_invariant": 1}, "batch_invariant must be True, False or None, got 1"),
    ],
)
def test_errors_of_wrong_choices_on_fake_tensors(options: dict[str, Any], message_start: str) -> None:
    with FakeTensorMode():
        q = torch.empty(1, 4, 2, 8)
    with pytest.raises(InputError) as caught:
        undivided.attention(q, q, q, layout="bshd", **options)
    assert str(caught.value).startswith(message_start)
