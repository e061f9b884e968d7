"""Handles of the replacement, and the tools of PyTorch that see through it."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from interrupts import is_interrupted
from sdpa_models import PYTORCHS, LanguageModel, encoder, q, results
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

import undivided
from undivided.integrations import torch_sdpa


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert F.scaled_dot_product_attention is PYTORCHS
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_repr_of_a_handle() -> None:
    replaced = undivided.replace_sdpa()
    assert replaced.active
    assert F.scaled_dot_product_attention is not PYTORCHS
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"
    x = q()
    F.scaled_dot_product_attention(x, x, value=x)
    assert repr(replaced) == "<replace_sdpa: active, 1 calls>"
    replaced.restore()
    assert repr(replaced) == "<replace_sdpa: restored, 1 calls>"
    assert F.scaled_dot_product_attention is PYTORCHS
    F.scaled_dot_product_attention(x, x, x)
    replaced.restore()
    assert (replaced.active, replaced.calls) == (False, 1)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_handles_may_be_restored_in_any_order(order: tuple[int, ...]) -> None:
    handles = [undivided.replace_sdpa() for _ in range(3)]
    x = q()
    for n in order:
        F.scaled_dot_product_attention(x, x, x)
        assert not torch.backends.mha.get_fastpath_enabled()
        handles[n].restore()
    assert [handles[n].calls for n in order] == [1, 2, 3]
    assert F.scaled_dot_product_attention is PYTORCHS


def installs_or_removes(code: CodeType) -> bool:
    return code.co_filename == torch_sdpa.__file__ and code.co_name in {"_install", "_remove"}


@pytest.mark.parametrize("enabled", [True, False])
def test_an_interrupt_at_any_line_restores(enabled: bool) -> None:
    def replace() -> None:
        with undivided.replace_sdpa():
            pass

    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        line = 1
        while is_interrupted(replace, line, installs_or_removes):
            assert F.scaled_dot_product_attention is PYTORCHS
            assert torch.backends.mha.get_fastpath_enabled() == enabled
            assert not torch_sdpa._active
            replace()
            assert F.scaled_dot_product_attention is PYTORCHS
            assert torch.backends.mha.get_fastpath_enabled() == enabled
            line += 1
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert line > 12


def test_an_exception_restores() -> None:
    with pytest.raises(RuntimeError, match="mine"), undivided.replace_sdpa():
        raise RuntimeError("mine")


def test_the_fast_path_stays_off_where_it_was_off() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with undivided.replace_sdpa():
            assert not torch.backends.mha.get_fastpath_enabled()
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_another_librarys_replacement_stays_and_falls_back_to_pytorch() -> None:
    """Another library wraps our function, and keeps it after our replacement ended and when it starts again."""
    replaced, x = undivided.replace_sdpa(), q()
    kept, served = F.scaled_dot_product_attention, []

    def theirs(*args: Any, **options: Any) -> Tensor:
        served.append(1)
        return kept(*args, **options)

    F.scaled_dot_product_attention = theirs
    try:
        F.scaled_dot_product_attention(x, x, x)
        replaced.restore()
        assert F.scaled_dot_product_attention is theirs
        torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x), PYTORCHS(x, x, x))
        assert (replaced.calls, len(served)) == (1, 2)
        with undivided.replace_sdpa() as again:
            F.scaled_dot_product_attention(x, x, x)
        assert (again.calls, len(served)) == (1, 2)
        assert F.scaled_dot_product_attention is theirs
        torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x), PYTORCHS(x, x, x))
    finally:
        F.scaled_dot_product_attention = PYTORCHS


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("layout", "calls"), [(torch.jagged, 1), (torch.strided, 0)], ids=["jagged", "strided"])
def test_nested_tensors_are_left_to_pytorch_unless_they_are_jagged(layout: torch.layout, calls: int) -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=layout)
    heads_first = nested.transpose(1, 2)
    if layout is torch.strided:
        heads_first = heads_first.contiguous()
    with undivided.replace_sdpa() as replaced:
        found = F.scaled_dot_product_attention(heads_first, heads_first, heads_first)
    expected = F.scaled_dot_product_attention(heads_first, heads_first, heads_first)
    for a, b in zip(found.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(a, b)
    assert replaced.calls == calls


def test_errors_are_ours_and_pytorchs_while_it_is_active() -> None:
    x = q()
    with undivided.replace_sdpa():
        with pytest.raises(undivided.InputError, match="attn_mask must broadcast") as error:
            F.scaled_dot_product_attention(x, x, x, torch.ones(5, 4, dtype=torch.bool))
        assert isinstance(error.value, RuntimeError)
        with pytest.raises(TypeError, match="value"):
            F.scaled_dot_product_attention(x, x)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.5))


@pytest.mark.parametrize("record", [torch.jit.script, lambda m: torch.jit.trace(m, (q(),))], ids=["script", "trace"])
def test_torchscript_contains_pytorchs_operator(record: Callable[[nn.Module], Any]) -> None:
    """A TorchScript program runs where this library is not installed, in C++ for one."""
    module, x = (Scaled(), torch.randn(2, 3, 7, 8))  # another batch, other heads and another length than were traced
    with undivided.replace_sdpa():
        program = record(module)
        found = program(x)
    assert "aten::scaled_dot_product_attention" in str(program.inlined_graph)
    torch.testing.assert_close(found, module(x))
    torch.testing.assert_close(program(x), module(x))


@pytest.mark.parametrize(
    "make",
    [lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True)],
    ids=["multihead-attention", "encoder-layer"],
)
def test_pytorchs_modules_can_be_scripted(make: Callable[[], nn.Module]) -> None:
    module, x = make().eval(), torch.randn(2, 5, 8)
    with undivided.replace_sdpa():
        program = torch.jit.script(module)
    args = (x, x, x) if isinstance(module, nn.MultiheadAttention) else (x,)
    torch.testing.assert_close(program(*args), module(*args))


def test_the_torchscript_entry_of_the_replacement_is_removed_with_it() -> None:
    table = torch.jit._builtins._get_builtin_table()
    before = dict(table)
    first, second = undivided.replace_sdpa(), undivided.replace_sdpa()
    first.restore()
    assert torch.jit._builtins._find_builtin(F.scaled_dot_product_attention) == "aten::scaled_dot_product_attention"
    second.restore()
    assert table == before


def test_torch_fx_traces_symbolically_and_the_graph_contains_ours() -> None:
    module, x = Scaled(), q()
    with undivided.replace_sdpa() as replaced:
        graph = torch.fx.symbolic_trace(module)
        assert replaced.calls == 0
        (node,) = [n for n in graph.graph.nodes if "attention" in str(n.target)]
        assert node.target is F.scaled_dot_product_attention
        torch.testing.assert_close(graph(x), module(x))
        assert replaced.calls == 2
    torch.testing.assert_close(graph(x), module(x))
    assert replaced.calls == 2


def test_what_refers_to_the_replacement_can_be_pickled() -> None:
    with undivided.replace_sdpa():
        attend = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        pickled = [pickle.dumps(attend)]
    pickled.append(pickle.dumps(attend))
    assert [pickle.loads(one).func for one in pickled] == [attend.func, attend.func]


@pytest.mark.filterwarnings(
    "ignore:`isinstance.treespec, LeafSpec.`:FutureWarning"
)  # torch 2.13 in its own run_decompositions
@pytest.mark.parametrize("strict", [False, True], ids=["not-strict", "strict"])
@pytest.mark.parametrize("decomposed", [False, True], ids=["whole", "decomposed"])
def test_torch_export_contains_ours_for_every_length(strict: bool, decomposed: bool) -> None:
    module = Scaled()
    with undivided.replace_sdpa() as replaced:
        program = torch.export.export(module, (q(),), dynamic_shapes=({2: torch.export.Dim("length")},), strict=strict)
        assert replaced.calls > 0
    if decomposed:
        program = program.run_decompositions()
    assert "undivided.attention" in str(program.graph)
    longer = torch.randn(1, 2, 11, 8)
    torch.testing.assert_close(program.module()(longer), module(longer))


class Tagged(Tensor):
    """A tensor that sees every function that is called with it, and keeps its class."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_tensor_with_a_torch_function_sees_the_call_as_it_sees_pytorchs() -> None:
    x = torch.randn(1, 2, 5, 8).as_subclass(Tagged)
    expected = F.scaled_dot_product_attention(x, x, x)
    Tagged.seen.clear()
    with undivided.replace_sdpa() as replaced:
        found = F.scaled_dot_product_attention(x, x, x)
        assert Tagged.seen == [F.scaled_dot_product_attention]
    assert replaced.calls == 1
    assert type(found) is type(expected) is Tagged
    torch.testing.assert_close(found.as_subclass(Tensor), expected.as_subclass(Tensor))


def test_a_default_device_does_not_change_the_call() -> None:
    """It is a mode that sees every function."""
    x = q()
    with torch.device("cpu"), undivided.replace_sdpa() as replaced:
        found = F.scaled_dot_product_attention(x, x, x)
    assert replaced.calls == 1
    torch.testing.assert_close(found, PYTORCHS(x, x, x))


@pytest.mark.parametrize(
    "make",
    [lambda: (encoder(), (torch.randn(2, 7, 16),)), lambda: (LanguageModel(), (torch.randint(50, (2, 9)),))],
    ids=["encoder", "language-model"],
)
def test_compiled_models_follow_the_replacement(make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]) -> None:
    """Traced while active: ours is in the graph, and counted as it is traced. Afterwards PyTorch's own is traced
    again."""
    torch._dynamo.reset()
    module, args = make()
    graphs: list[str] = []

    def note(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        graphs.append(str(graph.graph))
        return make_boxed_func(graph.forward)

    compiled = torch.compile(module, fullgraph=True, backend=aot_autograd(fw_compiler=note))
    expected = results(module, *args)
    for active in (False, True, False):
        graphs.clear()
        if active:
            with undivided.replace_sdpa() as replaced:
                found = results(compiled, *args)
                calls = replaced.calls
                results(compiled, *args)
            assert calls == replaced.calls > 0
            assert "undivided.attention" in graphs[0]
        else:
            found = results(compiled, *args)
            assert not any("undivided" in graph for graph in graphs)
        torch.testing.assert_close(found, expected)
    torch._dynamo.reset()


def test_only_the_attribute_is_replaced() -> None:
    """A name that was bound before stays PyTorch's, as the documentation says."""
    x = q()
    with undivided.replace_sdpa() as replaced:
        PYTORCHS(x, x, x)
    assert replaced.calls == 0
    names = replaced.bound_before
    assert f"{__name__}.PYTORCHS" in names
    assert not [name for name in names if name.startswith(("torch.", "undivided."))]
    assert torch_sdpa._active == []
