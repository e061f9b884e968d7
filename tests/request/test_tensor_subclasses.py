"""Tensors without plain memory never reach a pointer: they go through one operator, or are refused by name.

A FakeTensor, a DTensor, a storage that FSDP had freed, a default device of "meta": each once ended the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fuzz_values import FunctionOnly, _collective, _distributed, _escaped, _functional, _logging, _mesh, _two
from small_calls import FULL, SHAPE, att, x
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import undivided
from undivided import InputError, KVCache, PagedKVCache, masks

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of (nested|MaskedTensors):UserWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
]
FAKE = FakeTensorMode()


@pytest.fixture(autouse=True, scope="module")
def _no_group_is_left() -> Iterator[None]:
    """The process group of the DTensors ends with these tests."""
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()
    _mesh.cache_clear()


def resized(to: int, begin: int = 0) -> Tensor:
    tensor = torch.randn(2, *SHAPE)[begin]
    tensor.untyped_storage().resize_(to)
    return tensor


def set_to_less() -> Tensor:
    storage = torch.randn(64).untyped_storage()
    tensor = torch.empty(0).set_(storage, 0, SHAPE, (64, 16, 8, 1))
    storage.resize_(128)
    return tensor


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(3, 2, 8)], layout=layout)


# one tensor, and the words of the refusal
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "freed-storage": (lambda: resized(0), "256 bytes in memory, got a storage of 0 bytes"),
    "freed-storage-of-a-view": (lambda: resized(0, 1), "512 bytes in memory, got a storage of 0 bytes"),
    "half-a-storage": (lambda: resized(300, 1), "512 bytes in memory, got a storage of 300 bytes"),
    "set-to-a-storage-that-shrank": (set_to_less, "256 bytes in memory, got a storage of 128 bytes"),
    "dtensor": (lambda: _distributed(x()), "mixture, got a plain tensor\n  HINT: .*distribute_tensor"),
    "masked": (
        lambda: torch.masked.masked_tensor(x(), torch.ones(SHAPE, dtype=torch.bool)),
        "plain tensor, got a MaskedTensor\n  HINT: .*get_data",
    ),
    "nested-strided": (lambda: nested(torch.strided), "dense .strided. tensor, got a nested tensor\n  HINT: "),
    "nested-jagged": (lambda: nested(torch.jagged), "dense .strided. tensor, got a nested tensor\n  HINT: "),
    "sparse": (lambda: x().to_sparse(), "dense .strided. tensor, got torch.sparse_coo"),
    "mkldnn": (lambda: x().to_mkldnn(), "dense .strided. tensor, got torch._mkldnn"),
    "lazy": (lambda: torch.nn.parameter.UninitializedParameter(), "initialized, got UninitializedParameter"),
    "escaped-vmap": (lambda: _escaped(torch.func.vmap)(torch.randn(2, *SHAPE)), "memory of its own"),
    "escaped-grad": (lambda: _escaped(torch.func.grad)(x()), "memory of its own"),
    "functional-alone": (lambda: _functional(x()), "under the FunctionalTensorMode that made it"),
}
OTHERS: dict[str, Callable[[Any], Any]] = {
    "q": lambda t: att(t, x(), x()),
    "k": lambda t: att(x(), t, x()),
    "v": lambda t: att(x(), x(), t),
    "fp64": lambda t: undivided.attention(x().double(), t, t, layout="bshd"),
    "bias": lambda t: att(x(), bias=t),
    "sinks": lambda t: att(x(), sinks=t),
    "alibi_slopes": lambda t: att(x(), alibi_slopes=t),
    "mask-lengths": lambda t: att(x(), mask=masks.lengths(t)),
    "mask-documents": lambda t: masks.documents(t),
    "mask-ids": lambda t: masks.document_ids(t),
    "mask-prefix": lambda t: masks.prefix(t),
    "sdpa": lambda t: undivided.scaled_dot_product_attention(t, x(), x()),
    "sdpa-mask": lambda t: undivided.scaled_dot_product_attention(x(), x(), x(), t),
    "explain": lambda t: undivided.explain(x(), t, x(), layout="bshd"),
    "verify": lambda t: undivided.verify(x(), t, x(), layout="bshd"),
    "merge-outs": lambda t: undivided.merge([x(), t], [torch.zeros(1, 2, 4)] * 2),
    "merge-sinks": lambda t: undivided.merge([x()], [torch.zeros(1, 2, 4)], t, layout="bshd"),
    "kv-cache": lambda t: KVCache(1, 8, 2, 8, dtype=torch.float32).append(t, x()),
    "paged-kv-cache": lambda t: PagedKVCache(4, 4, 2, 8, batch=1, dtype=torch.float32).append(x(), t),
    "module": lambda t: undivided.DotProductAttention(2, 8, qkv_format="bshd")(t, x(), x()),
    "layer": lambda t: undivided.MultiheadAttention(16, 2, qkv_format="bshd")(t),
    "rotary": lambda t: undivided.apply_rotary_pos_emb(t, torch.zeros(4, 1, 1, 8), "bshd"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_that_no_kernel_can_read_are_refused_by_name(kind: str) -> None:
    make, words = REFUSED[kind]
    for name in "qkv":
        with pytest.raises(InputError, match=rf"(?s){name} (must|is, not a) ?.*{words}"):
            OTHERS[name](make())


@pytest.mark.parametrize("place", OTHERS)
@pytest.mark.parametrize("kind", REFUSED)
def test_every_tensor_is_checked(kind: str, place: str) -> None:
    with pytest.raises(InputError):
        OTHERS[place](REFUSED[kind][0]())


def test_the_hint_for_jagged_tensors_is_a_call_that_runs() -> None:
    q = k = v = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged)
    heads_first = q.transpose(1, 2)
    with pytest.raises(InputError) as error:
        undivided.attention(q, k, v, layout="bshd")
    suggested = re.search(r"undivided\.attention\(.*?\)\)\)", str(error.value))
    assert suggested, error.value
    found = eval(suggested[0], {"undivided": undivided, "masks": masks, "q": q, "k": k, "v": v})
    theirs = F.scaled_dot_product_attention(heads_first, heads_first, heads_first)
    torch.testing.assert_close(found, theirs.transpose(1, 2).values())


def test_a_storage_freed_between_two_calls_is_detected() -> None:
    """The sizes and strides are those of a call that was checked before."""
    q, bias, dense = x(), torch.randn(4, 4), torch.ones(4, 4, dtype=torch.bool)
    mask = masks.dense(dense)
    kept = q.clone()
    for tensor, options in ((q, {}), (bias, {"bias": bias}), (dense, {"mask": mask})):
        first = att(q, **options)
        values, size = tensor.clone(), tensor.untyped_storage().nbytes()
        tensor.untyped_storage().resize_(0)
        with pytest.raises(InputError, match=r"in memory"):
            att(q, **options)
        tensor.untyped_storage().resize_(size)
        tensor.copy_(values)
        torch.testing.assert_close(att(q, **options), first)
    torch.testing.assert_close(q, kept)


def test_a_storage_may_be_freed_between_forward_and_backward_of_another_tensor() -> None:
    q, grad = x(True), x()
    out = att(q, backend="native")  # PyTorch's own kernel raises PyTorch's message
    grad.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="grad_out must have its 256 bytes in memory"):
        out.backward(grad)


@pytest.mark.parametrize("backend", ["native", "torch_flash", "reference"])
def test_a_negated_view_is_read_with_its_sign(backend: str) -> None:
    q, k, v, grad = x(True), x(True), x(True), x()
    negated = [torch._neg_view(t.detach()).requires_grad_() for t in (q, k, v)]
    options = {"mask": FULL if backend != "torch_flash" else masks.causal(), "backend": backend}
    att(*negated, **options).backward(torch._neg_view(grad))
    right = [(-t.detach()).requires_grad_() for t in (q, k, v)]
    att(*right, **options).backward(-grad)
    for ours, theirs in zip(negated, right, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("mask", [None, masks.dense(torch.ones(4, 4, dtype=torch.bool))], ids=["plain", "dense"])
def test_zeros_without_memory_are_zeros(mask: masks.Mask | None) -> None:
    zero, q = torch._efficientzerotensor(SHAPE), x(True)
    torch.testing.assert_close(att(zero, mask=mask), torch.zeros(SHAPE))
    att(q, mask=mask).backward(zero)
    assert not q.grad.any()


def test_buffers_of_the_kernel_are_on_the_device_of_its_inputs() -> None:
    """``torch.set_default_device("meta")`` ended the process: the log-sum-exp was created there."""
    q, sinks = x(True), torch.zeros(2, requires_grad=True)
    with torch.device("meta"):
        out, lse = att(q, mask=FULL, sinks=sinks, return_lse=True)
        (out.sum() + lse[..., :3].sum()).backward()
    assert {out.device.type, lse.device.type, q.grad.device.type} == {"cpu"}
    other = [t.detach().requires_grad_() for t in (q, sinks)]
    out, lse = att(other[0], mask=FULL, sinks=other[1], return_lse=True)
    (out.sum() + lse[..., :3].sum()).backward()
    torch.testing.assert_close([q.grad, sinks.grad], [t.grad for t in other])


def fake_qkv(gradient: bool = True) -> list[Tensor]:
    return [FAKE.from_tensor(x()).requires_grad_(gradient) for _ in range(3)]


def test_fake_tensors_give_fake_tensors_with_gradients() -> None:
    q, k, v = fake_qkv()
    out, lse = att(q, k, v, mask=masks.causal(), return_lse=True)
    assert isinstance(out, FakeTensor)
    assert (out.shape, lse.shape, out.device.type) == (q.shape, (1, 2, 4), "cpu")
    (out.sum() + lse.sum()).backward()
    assert all(isinstance(t.grad, FakeTensor) and t.grad.shape == t.shape for t in (q, k, v))
    assert isinstance(undivided.scaled_dot_product_attention(q, k, v, is_causal=True), FakeTensor)


def test_under_a_fake_mode_everything_that_a_model_creates_is_fake() -> None:
    with FAKE:
        n = torch.tensor([3])
        q, bias, sinks, seed = (
            torch.randn(SHAPE, requires_grad=True),
            torch.randn(4, 4),
            torch.randn(2),
            torch.tensor(3),
        )
        out = att(
            q, mask=masks.causal() & masks.lengths(n, n), bias=bias, sinks=sinks, dropout_p=0.1, dropout_seed=seed
        )
        out.sum().backward()
        assert isinstance(q.grad, FakeTensor)
        layer = undivided.MultiheadAttention(16, 2, qkv_format="bshd")
        assert isinstance(layer(torch.randn(1, 4, 16)), FakeTensor)
        cache = KVCache(1, 8, 2, 8, dtype=torch.float32)
        cache.append(q.detach(), q.detach())
        assert isinstance(cache.attend(q.detach()), FakeTensor)
    torch.testing.assert_close(att(x(), mask=FULL).shape, SHAPE)  # nothing fake was remembered


def test_fake_tensors_that_are_wrong_are_refused_as_real_ones() -> None:
    q, k, v = fake_qkv()
    with pytest.raises(InputError, match="k must have the head size of q"):
        att(q, k[..., :4], v)
    with pytest.raises(InputError, match="mask must have one entry of lengths"):
        att(q, k, v, mask=masks.lengths(torch.tensor([3, 4])))
    with pytest.raises(
        InputError, match="be of classes that take undivided::attention together, got FakeTensor, Tensor"
    ):
        att(q, x(), v)
    real = x()
    with FAKE, pytest.raises(InputError, match="of classes that take undivided::attention together"):
        att(real)


@pytest.mark.parametrize("place", ["bias", "sinks", "alibi_slopes", "mask-lengths"])
def test_one_fake_tensor_among_real_ones_is_refused(place: str) -> None:
    make = {"bias": (4, 4), "mask-lengths": (1,)}.get(place, (2,))
    tensor = torch.ones(make, dtype=torch.int64 if place == "mask-lengths" else torch.float32)
    with pytest.raises(InputError, match="of classes that take undivided::attention together"):
        OTHERS[place](FAKE.from_tensor(tensor))


@pytest.mark.parametrize("wrap", [_two, _logging, _collective], ids=["two", "logging", "collective"])
def test_a_class_that_passes_operators_on_gets_its_result(wrap: Callable[[Tensor], Tensor]) -> None:
    plain = x()
    found = att(wrap(plain), mask=masks.causal())
    inner = getattr(found, "a", getattr(found, "elem", found))
    torch.testing.assert_close(inner, att(plain, mask=masks.causal()))


def test_two_tensors_have_gradients_and_are_gradients() -> None:
    q = _two(x()).requires_grad_()
    att(q).sum().backward()
    assert type(q.grad).__name__ == "TwoTensor"
    plain = x(True)
    att(plain).backward(_two(x()))
    assert type(plain.grad).__name__ == "TwoTensor"


def test_a_class_with_torch_function_alone_has_plain_memory() -> None:
    q = x().as_subclass(FunctionOnly)
    found = att(q, mask=FULL)
    assert type(found) is FunctionOnly
    torch.testing.assert_close(found.as_subclass(Tensor), att(q.as_subclass(Tensor), mask=FULL))
    torch.testing.assert_close(att(torch.nn.Parameter(x().zero_())).detach(), torch.zeros(SHAPE))
