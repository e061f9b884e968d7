"""Modes and tracers of PyTorch (make_fx, export, AOT, jit, checkpoints) see one operator, and get its results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, nop
from small_calls import FULL, att, x
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from undivided import masks

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")


class Seen(TorchDispatchMode):
    """The names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_one_operator_and_its_backward() -> None:
    q = x(True)
    with Seen() as seen:
        att(q, mask=FULL).sum().backward()
    assert [name for name in seen.names if "undivided" in name] == [
        "undivided.attention.default",
        "undivided.attention_backward.default",
    ]
    ours, q.grad = q.grad, None
    att(q, mask=FULL).sum().backward()
    torch.testing.assert_close(ours, q.grad)


def test_a_backward_alone_under_a_mode_is_plain_operations() -> None:
    q = x(True)
    out = att(q, mask=masks.causal())
    traced = make_fx(lambda g: torch.autograd.grad(out, q, g, retain_graph=True)[0])(x())
    grad = x()
    torch.testing.assert_close(traced(grad), torch.autograd.grad(out, q, grad)[0])


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("transform", ["none", "autograd", "vmap", "func-grad", "functionalize"])
def test_make_fx_traces_what_the_eager_call_computes(mode: str, transform: str) -> None:
    def call(q: Tensor) -> Tensor:
        return att(q, mask=masks.causal()).sin()

    functions = {
        "none": call,
        "autograd": lambda q: torch.autograd.grad(call(q).sum(), q)[0],
        "vmap": torch.func.vmap(lambda q: call(q[None])),
        "func-grad": torch.func.grad(lambda q: call(q).sum()),
        "functionalize": torch.func.functionalize(call),
    }
    function, leaf = functions[transform], transform == "autograd"
    graph, q = make_fx(function, tracing_mode=mode)(x(leaf)), x(leaf)
    torch.testing.assert_close(graph(q), function(q))
    opaque = any("undivided.attention" in str(node.target) for node in graph.graph.nodes)
    assert opaque == (transform in ("none", "autograd"))


def test_symbolic_sizes_stay_symbolic() -> None:
    graph = make_fx(lambda q: att(q, mask=masks.causal()), tracing_mode="symbolic")(x())
    longer = torch.randn(2, 9, 2, 8)
    torch.testing.assert_close(graph(longer), att(longer, mask=masks.causal()))


class Model(torch.nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return att(q, mask=masks.causal())


@pytest.mark.parametrize("strict", [True, False])
def test_export_keeps_the_operator(strict: bool) -> None:
    program = torch.export.export(Model(), (x(),), strict=strict).run_decompositions()
    q = x()
    torch.testing.assert_close(program.module()(q), Model()(q))
    assert any(str(node.target) == "undivided.attention.default" for node in program.graph.nodes)


def test_aot_function_has_the_eager_gradients() -> None:
    traced, q = aot_function(lambda q: Model()(q).sin(), fw_compiler=nop), x(True)
    traced(q).sum().backward()
    ours, q.grad = q.grad, None
    Model()(q).sin().sum().backward()
    torch.testing.assert_close(ours, q.grad)


def test_jit_trace_computes_new_values() -> None:
    """The trace once recorded uninitialised memory."""
    traced, q = torch.jit.trace(lambda q: att(q), (x(),)), x()
    torch.testing.assert_close(traced(q), att(q))


def test_selective_checkpointing_can_keep_the_result() -> None:
    q, counted = x(True), Seen()

    def policy(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        keep = op == torch.ops.undivided.attention.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    with counted:
        checkpoint(
            lambda q: att(q.sin()),
            q,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        ).sum().backward()
    assert counted.names.count("undivided.attention.default") == 1
    ours, q.grad = q.grad, None
    att(q.sin()).sum().backward()
    torch.testing.assert_close(ours, q.grad)


@pytest.mark.parametrize("context", [Seen, lambda: FlopCounterMode(display=False), contextlib.nullcontext])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_second_derivatives_are_right_under_every_mode(context: Callable[[], Any], compiled: bool) -> None:
    """The operator's backward had no derivative: under torch.compile(backend="eager") a second one was silently 0."""
    options = {"bias": torch.randn(2, 4, 4, requires_grad=True), "sinks": torch.randn(2, requires_grad=True)}
    leaves = [x(True), x(True), x(True), *options.values()]

    def twice(call: Callable[..., Any]) -> tuple[Tensor, ...]:
        out, lse = call(*leaves[:3], mask=FULL, return_lse=True, **options)
        loss = out.square().sum() + lse[..., :3].square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    call = torch.compile(att, backend="eager") if compiled else att
    with context():
        found = twice(call)
    torch.testing.assert_close(found, twice(att))
    torch._dynamo.reset()
