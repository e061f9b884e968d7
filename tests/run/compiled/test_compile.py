"""torch.compile: one opaque operator, the same answers, no recompilation for new lengths."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compiled_calls import compiled_graphs, qkv
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import undivided
from undivided import masks
from undivided.masks import Mask

pytestmark = pytest.mark.usefixtures("fresh_compiler")


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


OF_TENSORS: dict[str, Callable[..., Tensor]] = {
    "scale": lambda q, x: undivided.attention(q, q, q, layout="bshd", scale=x),
    "whole scale": lambda q, x: undivided.attention(q, q, q, layout="bshd", scale=int(4 * x)),
    "softcap": lambda q, x: undivided.attention(q, q, q, layout="bshd", softcap=x),
    "dropout_p": lambda q, x: undivided.attention(q, q, q, layout="bshd", dropout_p=x, dropout_seed=5),
    "scale of sdpa": lambda q, x: undivided.scaled_dot_product_attention(q, q, q, scale=x),
    "scale of sdpa, broadcast": lambda q, x: undivided.scaled_dot_product_attention(q, q[:1], q[:1], scale=x),
    "dropout_p of sdpa": lambda q, x: undivided.scaled_dot_product_attention(q, q, q, dropout_p=x),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of PyTorch after a graph break, about 2 * q
@pytest.mark.parametrize("call", OF_TENSORS.values(), ids=OF_TENSORS)
def test_numbers_that_are_values_of_tensors_give_the_eager_answer(call: Callable[..., Tensor]) -> None:
    """They were errors of the operator's schema, or of guards on values that the compiler does not know."""

    def layer(q: Tensor, number: Tensor) -> Tensor:
        return call(2 * q, (1 * number).item()).sin()

    def seeded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: function(*args) if torch.manual_seed(3) else None

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(layer, backend="aot_eager")
        for number in (0.25, 0.5, 0.75):
            q = torch.randn(2, 5, 4, 16, requires_grad=True)
            assert_same_with_gradients(seeded(compiled), seeded(layer), q, torch.tensor(number))
    assert compiled_graphs() >= 2  # one before the call, one after it


def test_a_graph_that_must_be_whole_names_the_number_that_is_the_value_of_a_tensor() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, number: Tensor) -> Tensor:
            return undivided.attention(q, q, q, layout="bshd", softcap=number.item())

    inputs = torch.randn(2, 5, 4, 16), torch.tensor(2.0)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="call it outside of what fullgraph=True compiles"):
        torch.compile(Layer(), backend="eager", fullgraph=True)(*inputs)
    with pytest.raises(undivided.InputError, match="softcap must be known while a program is recorded"):
        torch.export.export(Layer(), inputs)


NUMBERS: dict[str, Callable[[Tensor, int], Mask]] = {
    "longest-document": lambda cu, n: masks.documents(cu, max_q=n) & masks.causal(),
    "tokens": lambda cu, n: masks.documents(cu - torch.tensor([0, 0, 1]), max_q=n, total_q=n + 4),
    "prefix": lambda cu, n: masks.documents(cu) & (masks.causal() | masks.prefix(n)),
    "chunks": lambda cu, n: masks.documents(cu) & masks.chunks(n),
    "window": lambda cu, n: masks.documents(cu) & masks.window(n - 3, n - 4),
    "window-and-sinks": lambda cu, n: masks.documents(cu) & (masks.window(n - 4, 0) | masks.sinks(1)),
}


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("mask_shape", [None, (5, 5), (2, 1, 5, 5), (2, 8, 5, 5)])
@pytest.mark.parametrize("axis", [-4, -3, -2, -1])
def test_a_graph_runs_with_sizes_that_it_does_not_know(axis: int, mask_shape: tuple[int, ...] | None) -> None:
    q, k, v = torch.randn(3, 2, 8, 5, 16)
    scores = [None] if mask_shape is None else [torch.randn(mask_shape), torch.rand(mask_shape) < 0.7]
    for attn_mask in scores:
        _assert_compiles_without_size(axis, q, k, v, attn_mask)
        if axis > -4 and mask_shape is None:
            _assert_compiles_without_size(axis, q[0], k[0], v[0], attn_mask)


def _assert_compiles_without_size(axis: int, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> None:
    for tensor in (q, k, v):
        torch._dynamo.decorators.mark_unbacked(tensor, axis % q.dim())
    compiled = torch.compile(undivided.scaled_dot_product_attention, backend="eager", fullgraph=True)
    expected = undivided.scaled_dot_product_attention(q, k, v, attn_mask)
    torch.testing.assert_close(compiled(q, k, v, attn_mask), expected)


def test_sizes_that_a_graph_does_not_know_are_checked_when_it_runs() -> None:
    compiled = torch.compile(undivided.scaled_dot_product_attention, backend="eager", fullgraph=True)
    fitting = (2, 8, 5, 16)
    calls = (
        ((fitting, fitting, fitting), None),
        (((3, 8, 5, 16), fitting, fitting), r"k must have the batch size of q \(3\), got 2"),
        ((fitting, (2, 8, 6, 16), fitting), r"v must have the length of k \(6\), got 5"),
    )
    for shapes, message in calls:
        tensors = [torch.randn(shape) for shape in shapes]
        for tensor in tensors:
            for axis in (0, 2):
                torch._dynamo.decorators.mark_unbacked(tensor, axis)
        if message is None:
            compiled(*tensors)
        else:
            with pytest.raises(undivided.InputError, match=message):
                compiled(*tensors)
