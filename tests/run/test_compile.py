"""torch.compile: one opaque operator, the same answers, no recompilation for new lengths, the same errors."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

import undivided
from undivided import masks
from undivided.kernels import cpu
from undivided.masks import Mask
from undivided.quantization import Format, quantize
from undivided.run.operator_arguments import Arguments
from undivided.run.prepare import prepare


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def qkv(length: int, kv_length: int | None = None, grad: bool = True) -> list[Tensor]:
    q = torch.randn(2, length, 4, 16)
    k, v = (torch.randn(2, kv_length or length, 2, 16) for _ in range(2))
    return [t.requires_grad_(grad) for t in (q, k, v)]


def assert_same_with_gradients(compiled: Callable[..., Tensor], eager: Callable[..., Tensor], *args: Any) -> None:
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    ours, theirs = compiled(*args), eager(*args)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(theirs)
    for a, b in zip(
        torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(theirs, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(a, b)


MASKS: dict[str, Callable[[Tensor], Mask | None]] = {
    "no mask": lambda n: None,
    "causal": lambda n: masks.causal(),
    "causal and lengths": lambda n: masks.causal() & masks.lengths(n, n),
    "window joined to a prefix, inside lengths": lambda n: (masks.window(3, 0) | masks.prefix(2)) & masks.lengths(n, n),
    "chunks": lambda n: masks.chunks(4),
    "dense": lambda n: masks.dense(torch.ones(9, 9, dtype=torch.bool).tril(1)),
    "document ids": lambda n: masks.document_ids(torch.tensor([0, 0, 0, 1, 1, 1, 1, -1, -1])),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_built_inside_the_compiled_function_gives_the_eager_answer_and_gradients(mask) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
        return undivided.attention(2 * q, k, v, layout="bshd", mask=mask(n)).sin()

    assert_same_with_gradients(
        torch.compile(layer, fullgraph=True, backend="aot_eager"), layer, *qkv(9), torch.tensor([7, 9])
    )


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_built_outside_the_compiled_function_gives_the_eager_answer_and_gradients(mask) -> None:
    built = mask(torch.tensor([7, 9]))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return undivided.attention(2 * q, k, v, layout="bshd", mask=built).sin()

    assert_same_with_gradients(torch.compile(layer, fullgraph=True, backend="aot_eager"), layer, *qkv(9))


def test_inductor_compiles_packed_documents_with_bias_dropout_softcap_sinks_slopes_and_lse() -> None:
    def layer(q: Tensor, k: Tensor, bias: Tensor, sinks: Tensor, slopes: Tensor, cu: Tensor) -> Tensor:
        out, lse = undivided.attention(
            q,
            k,
            k,
            layout="thd",
            mask=masks.documents(cu) & masks.causal(),
            bias=bias,
            sinks=sinks,
            alibi_slopes=slopes,
            dropout_p=0.3,
            dropout_seed=5,
            softcap=4.0,
            return_lse=True,
        )
        return out.sum(-1) * lse.T.exp()

    q, k = torch.randn(7, 4, 16, requires_grad=True), torch.randn(7, 2, 16, requires_grad=True)
    bias = torch.randn(4, 7, 7, requires_grad=True)
    sinks, slopes = torch.randn(4, requires_grad=True), torch.rand(4, requires_grad=True)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    assert_same_with_gradients(torch.compile(layer, fullgraph=True), layer, q, k, bias, sinks, slopes, cu)


def test_new_lengths_of_the_same_structure_do_not_recompile() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, n: Tensor) -> Tensor:
        return undivided.attention(q, k, v, layout="bshd", mask=masks.lengths(n, n) & masks.causal())

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for length in (7, 9):  # the first is compiled as it is, the second tells the compiler that lengths move
        compiled(*qkv(length), torch.tensor([length - 2, length]))
    before = compiled_graphs()
    for length in (11, 16, 23, 64):
        n = torch.tensor([length - 3, length])
        torch.testing.assert_close(compiled(*(x := qkv(length)), n), layer(*x, n))
    assert compiled_graphs() == before == 2


def test_explain_runs_outside_of_graphs() -> None:
    def layer(x: Tensor) -> Tensor:
        decision = undivided.explain(x, x, x, layout="bshd", mask=masks.causal())
        return x + len(decision.backend.name) + len(decision.reasons)

    x = torch.randn(1, 4, 2, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = torch.compile(layer, backend="eager")(x)
    torch.testing.assert_close(compiled, layer(x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="call it outside of what fullgraph=True compiles"):
        torch.compile(layer, fullgraph=True, backend="eager")(x)


NUMBERS: dict[str, Callable[[Tensor, int], Mask]] = {
    "longest-document": lambda cu, n: masks.documents(cu, max_q=n) & masks.causal(),
    "tokens": lambda cu, n: masks.documents(cu - torch.tensor([0, 0, 1]), max_q=n, total_q=n + 4),
    "prefix": lambda cu, n: masks.documents(cu) & (masks.causal() | masks.prefix(n)),
    "chunks": lambda cu, n: masks.documents(cu) & masks.chunks(n),
    "window": lambda cu, n: masks.documents(cu) & masks.window(n - 3, n - 4),
    "window-and-sinks": lambda cu, n: masks.documents(cu) & (masks.window(n - 4, 0) | masks.sinks(1)),
}


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", NUMBERS)
def test_new_numbers_in_a_mask_do_not_recompile(name: str, compiler: str) -> None:
    """In the constant string of the operator, a number that the compiler keeps symbolic was an error."""

    def layer(q: Tensor, k: Tensor, cu: Tensor, n: int) -> Tensor:
        return undivided.attention(2 * q, k, k, layout="thd", mask=NUMBERS[name](cu, n)).sin()

    compiled = torch.compile(layer, fullgraph=True, backend=compiler)
    for n in (5, 6, 7, 8, 9):
        q, k = (torch.randn(n + 4, heads, 16, requires_grad=True) for heads in (4, 2))
        assert_same_with_gradients(compiled, layer, q, k, torch.tensor([0, n, n + 4]), n)
        assert compiled_graphs() <= 2


def test_decoding_over_a_growing_cache_does_not_recompile() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return undivided.attention(q, k, v, layout="bshd", mask=masks.causal("bottom_right"))

    with torch.no_grad():
        for kv_length in (5, 6):
            step(*qkv(1, kv_length, grad=False))
        before = compiled_graphs()
        for kv_length in (7, 20, 300):
            step(*qkv(1, kv_length, grad=False))
    assert compiled_graphs() == before


def test_a_predicate_built_outside_runs_inside_the_graph() -> None:
    band = masks.predicate(lambda b, h, q, k: (q >= k) & (q - k < 3))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return undivided.attention(q, k, v, layout="bshd", mask=band)

    args = qkv(8, grad=False)
    torch.testing.assert_close(layer(*args), undivided.attention(*args, layout="bshd", mask=masks.window(2, 0)))


@pytest.mark.parametrize("needed", [False, True], ids=["forward", "gradients"])
def test_predicates_that_each_call_builds_share_their_graphs(needed: bool) -> None:
    """The number by which a graph finds its predicate was a constant: each call compiled anew."""

    def layer(q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
        band = masks.predicate(lambda b, h, q, k: (q >= k) & (q - k < width))  # breaks the graph
        return undivided.attention(q, k, v, layout="bshd", mask=band)

    compiled, args = torch.compile(layer, backend="aot_eager"), qkv(8, grad=needed)
    graphs = []
    for width in (1, 2, 3, 4, 5):
        out, want = compiled(*args, width), layer(*args, width)
        torch.testing.assert_close(out, want)
        if needed:
            torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), args) for x in (out, want)))
        graphs.append(compiled_graphs())
    assert graphs[1:] == graphs[1:2] * 4


def test_a_predicate_that_a_call_builds_lives_until_its_backward_and_no_longer() -> None:
    """The backward raised an error: the mask was released with the function that built it."""
    parts: list[weakref.ref[Any]] = []

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        band = masks.predicate(lambda b, h, q, k: (q + k) % 3 > 0)
        parts.append(weakref.ref(band.parts[0]))
        return undivided.attention(q, k, v, layout="bshd", mask=band).square().sum()

    args = qkv(8)
    want = torch.autograd.grad(layer(*args), args)
    for observed in (FlopCounterMode(display=False), nullcontext()):
        function = layer if isinstance(observed, FlopCounterMode) else torch.compile(layer, backend="aot_eager")
        with observed:
            loss = function(*args)
            gc.collect()
            torch.testing.assert_close(torch.autograd.grad(loss, args), want)
        del loss
    torch._dynamo.reset()
    gc.collect()
    assert [part() for part in parts] == [None] * 3


ON_META = torch.zeros(1, 1, 3, 3, device="meta")
WRONG_AT_RUN_TIME: dict[str, Callable[[Tensor], dict[str, object]]] = {
    "align": lambda q: {"k": q[:, :2], "v": q[:, :2], "mask": masks.causal()},
    "layout": lambda q: {"layout": "BSHD"},
    "layout-with-a-bar": lambda q: {"layout": "bs|hd"},
    "backend": lambda q: {"backend": "natif"},
    "backend-without-a-name": lambda q: {"backend": ""},
    "axes": lambda q: {"q": q.flatten(2)},
    "no-axes": lambda q: {"q": q[0, 0, 0, 0]},
    "device-of-k": lambda q: {"k": q.to("meta")},
    "device-of-bias": lambda q: {"bias": ON_META},
    "device-of-mask": lambda q: {"mask": masks.dense(ON_META == 0)},
}


@pytest.mark.parametrize("wrong", WRONG_AT_RUN_TIME.values(), ids=WRONG_AT_RUN_TIME)
def test_a_wrong_call_raises_the_same_error_as_in_eager_mode(wrong: Callable[[Tensor], dict[str, object]]) -> None:
    """Wrong axes were an IndexError of the compiler, and with a tensor on meta the output was uninitialised memory."""

    def layer(q: Tensor) -> Tensor:
        arguments: dict[str, Any] = {"q": q, "k": q, "v": q, "layout": "bshd", **wrong(q)}
        return undivided.attention(**arguments)

    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(undivided.InputError) as eager:
        layer(q)
    with pytest.raises(undivided.InputError) as compiled:
        torch.compile(layer, fullgraph=True, backend="aot_eager")(q)
    assert str(compiled.value) == str(eager.value)


WRONG_TYPES: dict[str, Any] = {
    "k": [1.0],
    "v": None,
    "alibi_slopes": [1.0, 2.0],
    "layout": 3,
    "scale": "1",
    "softcap": [30.0],
    "dropout_p": True,
    "return_lse": 1,
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_an_argument_of_a_wrong_type_raises_the_same_error_as_in_eager_mode(name: str) -> None:
    """They were errors of the compiler or of Python, or were taken for something else."""

    def layer(q: Tensor) -> Tensor:
        return undivided.attention(**{"q": q, "k": q, "v": q, "layout": "bshd", name: WRONG_TYPES[name]})

    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(undivided.InputError) as eager:
        layer(q)
    with pytest.raises(undivided.InputError) as compiled:
        torch.compile(layer, backend="aot_eager")(q)
    assert str(compiled.value) == str(eager.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"deterministic": "yes"},
        {"backend": 3},
        {"layout": None},
        {"dropout_p": 0.5, "dropout_seed": -1},
        {"dropout_p": 0.5, "dropout_seed": "1"},
    ],
    ids=lambda wrong: f"{list(wrong)[-1]}-{list(wrong.values())[-1]}",
)
def test_a_constant_of_the_wrong_kind_is_an_input_error_when_compiled(wrong: dict[str, object]) -> None:
    """A KeyError, TypeErrors, and a negative seed that was accepted."""
    torch._dynamo.reset()
    q = torch.randn(1, 4, 2, 8)
    arguments = {"layout": "bshd", **wrong}
    with pytest.raises(undivided.InputError, match=f"{list(wrong)[-1]} must"):
        torch.compile(lambda x: undivided.attention(x, x, x, **arguments), backend="aot_eager")(q)


def test_a_call_that_cannot_be_traced_runs_unseen_by_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it traces the selection, and writes a guard per entry of its caches: 57 seconds for 3000 of them."""
    seen = []

    def recorded(*arguments: Any) -> Any:
        seen.append(callable(torch._C._dynamo.eval_frame.get_eval_frame_callback()))
        return prepare(*arguments)

    for module in (undivided.functional, undivided.run.dispatch):
        monkeypatch.setattr(module, "prepare", recorded)
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(undivided.InputError, match="dropout_seed must"):
        torch.compile(
            lambda x: undivided.attention(x, x, x, layout="bshd", dropout_p=0.5, dropout_seed=-1), backend="eager"
        )(q)
    assert seen == [False]


def test_a_change_of_policy_is_seen_without_recompiling(capfd, monkeypatch) -> None:
    monkeypatch.setenv("UNDIVIDED_LOG", "info")
    layer = torch.compile(
        lambda q, k, v: undivided.attention(q, k, v, layout="bshd"), fullgraph=True, backend="aot_eager"
    )
    args = qkv(6, grad=False)
    with undivided.use_backends("torch_flash"):
        layer(*args)
    with undivided.use_backends("reference"):
        layer(*args)
    log = capfd.readouterr().err
    assert "torch_flash for" in log
    assert "reference for" in log
    assert compiled_graphs() == 1


def test_an_explicit_backend_that_cannot_run_raises_with_its_reasons() -> None:
    layer = torch.compile(
        lambda q, k, v: undivided.attention(q, k, v, layout="bshd", softcap=3.0, backend="torch_flash"),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(undivided.NoBackendError, match="no support for softcap"):
        layer(*qkv(6, grad=False))


def test_dropout_without_a_seed_draws_a_new_pattern_at_every_call_and_repeats_under_manual_seed() -> None:
    layer = torch.compile(
        lambda q: undivided.attention(q, q, q, layout="bshd", dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    q = torch.randn(1, 16, 2, 8)
    torch.manual_seed(3)
    first, second = layer(q), layer(q)
    torch.manual_seed(3)
    assert not torch.equal(first, second)
    torch.testing.assert_close(layer(q), first)


def test_compiled_calls_and_vmap_draw_the_seeds_of_eager_calls() -> None:
    """Seeds differed in their highest bit: half of the calls had another pattern."""
    q = torch.randn(1, 16, 2, 8)

    def layer(q: Tensor) -> Tensor:
        return undivided.attention(q, q, q, layout="bshd", dropout_p=0.5)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    batched = torch.vmap(layer, randomness="same")
    for seed in range(8):
        found = []
        for call in (layer, compiled, lambda q: batched(q[None])[0]):
            torch.manual_seed(seed)
            found.append(call(q))
        torch.testing.assert_close(found, [found[0]] * 3)


def test_autocast_inside_the_graph_casts_as_in_eager_mode() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return undivided.attention(q, k, v, layout="bshd", mask=masks.causal())

    args = qkv(6, grad=False)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(*args)
    assert compiled.dtype == torch.bfloat16
    torch.testing.assert_close(compiled, layer(*args))


def test_the_operator_has_the_arguments_of_its_named_tuple_in_their_order() -> None:
    names = [argument.name for argument in torch.ops.undivided.attention.default._schema.arguments]
    assert names == list(Arguments._fields)
    of_backward = [argument.name for argument in torch.ops.undivided.attention_backward.default._schema.arguments]
    assert of_backward[:15] == names[:15]


# PyTorch 2.15's own: opcheck reads the gradients of copies
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_operator_passes_opcheck_with_and_without_gradients() -> None:
    n = torch.tensor([3, 7])
    spec, tensors = (masks.lengths(n, n) & masks.causal()).flatten()
    for needs, lse in (("yyynnn", "y"), ("nnnnnn", "n")):
        q, k, v = qkv(7, grad="y" in needs)
        text = f"bshd|{spec}|{needs}|None|{lse}"
        call = (q, k, v, None, None, None, tensors, None, None, text, None, None, 0.0, [], None, None, None)
        results = torch.library.opcheck(torch.ops.undivided.attention.default, call)
        assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_the_operator_passes_opcheck_with_quantised_keys(format: Format) -> None:
    q = torch.randn(2, 7, 4, 32)
    (k, k_scale), (v, v_scale) = (quantize(torch.randn(2, 7, 2, 32), format) for _ in range(2))
    spec, tensors = masks.causal().flatten()
    text = f"bshd|{spec}|nnnnnn|None|y"
    call = (q, k, v, None, None, None, tensors, None, None, text, None, None, 0.0, [], None, k_scale, v_scale)
    results = torch.library.opcheck(torch.ops.undivided.attention.default, call)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.skipif(isinstance(cpu.load(), str), reason="the native kernel is not built")
@pytest.mark.parametrize("case", ["plain", "masked", "paged"])
def test_the_operator_passes_opcheck_when_the_native_kernel_runs(case: str) -> None:
    n = torch.tensor([3, 7])
    mask = {"plain": masks.FULL, "masked": masks.lengths(n, n) & masks.window(2, 1), "paged": masks.lengths(n)}[case]
    text, tensors = mask.flatten()
    q, k, v = qkv(7, grad=False)
    pages = None
    if case == "paged":
        k, v = (torch.randn(5, 4, 2, 16) for _ in range(2))
        pages = torch.tensor([[4, -1], [0, 2]], dtype=torch.int32)
    spec = f"bshd|{text}|nnnnnn|None|y|-|None|=native"
    call = (q, k, v, None, None, None, tensors, None, pages, spec, None, None, 0.0, [], None, None, None)
    results = torch.library.opcheck(torch.ops.undivided.attention.default, call)
    assert set(results.values()) == {"SUCCESS"}
    asked = {"layout": "bshd", "mask": mask, "pages": pages, "return_lse": True}
    out, lse = torch.ops.undivided.attention(*call)
    want, want_lse = undivided.attention(q, k, v, backend="reference", **asked)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


def test_sbhd_bhsd_and_thd_keep_their_layout_through_the_graph() -> None:
    for layout, shape in (("sbhd", (5, 2, 4, 16)), ("bhsd", (2, 4, 5, 16)), ("thd", (5, 4, 16))):
        x = torch.randn(shape)
        mask = masks.documents([0, 2, 5]) if layout == "thd" else masks.causal()

        def layer(x: Tensor, layout: str = layout, mask: Mask = mask) -> tuple[Tensor, Tensor]:
            return undivided.attention(x, x, x, layout=layout, mask=mask, return_lse=True)

        ours, theirs = torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
        assert ours[0].is_contiguous()
        assert theirs[0].is_contiguous()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_flop_counter_counts_the_products_of_all_pairs(layout: str) -> None:
    q = torch.randn(2, 8, 8, 16, requires_grad=True)
    k, v = (torch.randn(2, *((8, 2) if layout == "bshd" else (2, 8)), d, requires_grad=True) for d in (16, 24))
    with FlopCounterMode(display=False) as counter:
        out = undivided.attention(q, k, v, layout=layout, mask=masks.causal())
    pairs = 2 * 8 * 8 * 8
    assert counter.get_total_flops() == 2 * pairs * (16 + 24)
    with FlopCounterMode(display=False) as counter:
        undivided.attention(q, k, v, layout=layout).sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (16 + 24) + 2 * pairs * (3 * 16 + 2 * 24)
    assert out.shape == (2, 8, 8, 24)
