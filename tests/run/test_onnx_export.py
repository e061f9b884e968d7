"""Graphs of torch.onnx.export: operations that ONNX has, for sizes that may change."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.modules import module as torch_modules

import undivided
from undivided import masks
from undivided.errors import InputError

BATCH, Q_LEN, KV_LEN = Dim("batch", min=1), Dim("q_len", min=2), Dim("kv_len", min=2)
OF_Q, OF_KV = {0: BATCH, 1: Q_LEN}, {0: BATCH, 1: KV_LEN}


class _Call(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: Tensor) -> Any:
        return self.call(*tensors)


@pytest.fixture(autouse=True)
def exporting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The new exporter needs a package that the tests do not; it records what torch.export does with this flag."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", torch.compiler.is_exporting)
    yield
    torch_modules._global_buffer_registration_hooks.clear()  # an export that raises leaves one (PyTorch 2.10)


def recorded(call: nn.Module, inputs: tuple[Tensor, ...], sizes: Any = None) -> ExportedProgram:
    """The program of a call, in which every operation is one of PyTorch's."""
    program = torch.export.export(call, inputs, dynamic_shapes=sizes)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not [name for name in names if "undivided" in name]
    return program


# PyTorch 2.10 exports grouped heads with another size of v for one length only
VALUE_SIZE = 16 if torch.__version__ < "2.11" else 8


def inputs(batch: int, q_len: int, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k = torch.randn(batch, q_len, 4, 16), torch.randn(batch, kv_len, 2, 16)
    return q, k, torch.randn(batch, kv_len, 2, VALUE_SIZE)


CROSS: dict[str, Any] = {
    "all pairs": {},
    "scale": {"scale": 0.3},
    "top-left": {"mask": masks.causal("top_left")},
    "bottom-right": {"mask": masks.causal("bottom_right")},
    "window": {"mask": masks.window(2, 1, "bottom_right")},
}


@pytest.mark.parametrize("name", CROSS)
def test_calls_are_pytorchs_function_for_any_sizes(name: str) -> None:
    call = functools.partial(undivided.attention, layout="bshd", **CROSS[name])
    program = recorded(_Call(call), inputs(2, 5, 7), ((OF_Q, OF_KV, OF_KV),))
    assert "scaled_dot_product_attention" in str(program.graph)
    for sizes in ((2, 5, 7), (3, 6, 4), (1, 2, 13)):
        tensors = inputs(*sizes)
        torch.testing.assert_close(program.module()(*tensors), call(*tensors))


def _padded(q: Tensor, n: Tensor) -> Tensor:
    return undivided.attention(q, q, q, layout="bshd", mask=masks.lengths(n, n) & masks.causal())


def _padded_on_the_left(q: Tensor, n: Tensor) -> Tensor:
    mask = masks.lengths(n, n, q.shape[1] - n, q.shape[1] - n)
    return undivided.attention(q, q, q, layout="bshd", mask=mask & masks.window(1, 0, "top_left"))


def _padded_on_both_sides(q: Tensor, n: Tensor) -> Tensor:
    mask = masks.lengths(n - 1, n - 2, torch.ones_like(n), q.shape[1] - n) & masks.window(1, 1, "bottom_right")
    return undivided.attention(q, q, q, layout="bshd", mask=mask)


def _new_tokens(q: Tensor, n: Tensor) -> Tensor:
    mask = masks.lengths(n) & masks.causal("bottom_right")
    return undivided.attention(torch.stack([q[:, -2], q[:, -1]], 1), q, q, layout="bshd", mask=mask)


def _documents(q: Tensor, n: Tensor) -> Tensor:
    ids = torch.arange(q.shape[1]).unsqueeze(0) // 2 - (n % 2).unsqueeze(1)
    return undivided.attention(q, q, q, layout="bshd", mask=masks.document_ids(ids) & masks.causal())


def _bias_and_mask(q: Tensor, n: Tensor) -> Tensor:
    bias = q[:, :, :, 0].transpose(1, 2).unsqueeze(2)
    return undivided.attention(q, q, q, layout="bshd", bias=bias, mask=masks.lengths(n))


CALLS = [_padded, _padded_on_the_left, _padded_on_both_sides, _new_tokens, _documents, _bias_and_mask]


@pytest.mark.parametrize("call", CALLS)
def test_masks_from_inputs_of_the_graph(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    program = recorded(_Call(call), (torch.randn(2, 5, 4, 16), torch.tensor([5, 3])), ((OF_Q, {0: BATCH}),))
    for length, n in ((5, [2, 5]), (7, [7, 3, 4])):
        tensors = torch.randn(len(n), length, 4, 16), torch.tensor(n)
        torch.testing.assert_close(program.module()(*tensors), call(*tensors))


OTHERS: dict[str, Any] = {
    "softcap": {"softcap": 2.0, "mask": masks.causal("top_left")},
    "sinks": {"sinks": torch.tensor([0.5, 1.0, -1.0, 0.0])},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "mask": masks.window(3, 0, "top_left")},
    "lse": {"return_lse": True},
    "prefix": {"mask": masks.causal("top_left") | masks.prefix(2)},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_are_plain_operations_for_constant_sizes(name: str) -> None:
    call = functools.partial(undivided.attention, layout="bshd", **OTHERS[name])
    tensors = inputs(2, 5, 7)
    torch.testing.assert_close(recorded(_Call(call), tensors).module()(*tensors), call(*tensors))
    with pytest.raises(InputError, match=r"must have constant sizes in torch\.onnx\.export") as caught:
        recorded(_Call(call), tensors, ((OF_Q, OF_KV, OF_KV),))
    assert "dynamic_shapes=None" in str(caught.value)


@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "padding", "padding_causal"])
def test_layers_for_any_sizes(mask_type: str) -> None:
    layer = undivided.TransformerLayer(32, 64, 4, attn_input_format="bshd", self_attn_mask_type=mask_type).eval()
    sizes: Any = [OF_Q]
    tensors, others = [torch.randn(2, 5, 32)], [torch.randn(3, 7, 32)]
    if "padding" in mask_type:
        sizes.append({0: BATCH, 3: Q_LEN})
        tensors.append(torch.arange(5) >= torch.tensor([5, 3]).view(2, 1, 1, 1))
        others.append(torch.arange(7) >= torch.tensor([2, 7, 1]).view(3, 1, 1, 1))
    program = recorded(_Call(layer), tuple(tensors), (tuple(sizes),))
    for call in (tensors, others):
        torch.testing.assert_close(program.module()(*call), layer(*call))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_runtime_computes_the_rows_without_keys_too(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("onnxruntime")
    monkeypatch.undo()
    q, mask = torch.randn(2, 4, 5, 16), torch.rand(2, 1, 5, 5) > 0.3
    mask[0, 0, 2] = False

    def call(q: Tensor, mask: Tensor) -> Tensor:
        return undivided.scaled_dot_product_attention(q, q, q, mask)

    file = io.BytesIO()
    torch.onnx.export(_Call(call), (q, mask), file, dynamo=False, input_names=["q", "mask"])
    session = runtime.InferenceSession(file.getvalue())
    (out,) = session.run(None, {"q": q.numpy(), "mask": mask.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), call(q, mask))


def test_replaced_models_for_any_sizes() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    with undivided.replace_sdpa():
        program = recorded(_Call(layer), (torch.randn(2, 5, 32),), ((OF_Q,),))
        x = torch.randn(3, 7, 32)
        torch.testing.assert_close(program.module()(x), layer(x))
