"""onnxruntime's MultiHeadAttention and GroupQueryAttention as competitors: models with one node, built when needed.

Source: github.com/microsoft/onnxruntime, docs/ContribOperators.md, com.microsoft.MultiHeadAttention and
com.microsoft.GroupQueryAttention.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from undivided.arguments.tensors import dtype_name
from undivided.benchmarking.catalogue.benchmark import Absent
from undivided.request.call import Call
from undivided.request.request import Tensors

__all__ = ["OnnxAttention", "group_query_attention", "multi_head_attention"]

OPSET = 17
"""Version of the standard operators, of which the model uses none; onnxruntime has it since 1.12."""


@dataclass(frozen=True, eq=False)
class OnnxAttention:
    """An attention operator in a session with its inputs.

    `call` runs it; `out` runs it too and returns the output, whose axes each function below documents.
    """

    label: str
    call: Callable[[], Any]
    out: Callable[[], Tensor]


def multi_head_attention(call: Call, tensors: Tensors, is_causal: bool) -> OnnxAttention:
    """MultiHeadAttention on the same values, in its own layout [B, S, H * D]; `out` returns [B, H, S, Dv].

    Its threads do not spin between calls (``session.intra_op.allow_spinning`` 0), which would slow the next competitor.

    Raises:
        Absent: onnx or onnxruntime is not installed, or the problem is not fp32 on a CPU.
    """
    problem = call.problem
    build_model = partial(_multi_head_model, problem.heads, call.scale, is_causal)
    session, version = _session(problem.dtype, problem.device, build_model)
    feed = {
        name: x.detach().transpose(1, 2).flatten(2).contiguous().numpy()
        for name, x in zip(("query", "key", "value"), tensors.heads_first(call.problem.layout), strict=True)
    }

    def run() -> Any:
        return session.run(None, feed)[0]

    def out() -> Tensor:
        result: Tensor = torch.from_numpy(run())
        return result.unflatten(2, (problem.heads, problem.v_dim)).transpose(1, 2)  # type: ignore[no-any-return]

    return OnnxAttention(f"onnxruntime {version} MultiHeadAttention", run, out)


def _session(dtype: torch.dtype, device: str, build_model: Callable[[], bytes]) -> tuple[Any, str]:
    """A session of a model with the threads of torch, and the version of onnxruntime; Absent if it cannot be timed."""
    for package in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise Absent(f"{package} is not installed (pip install 'undivided[bench]')")
    if dtype != torch.float32 or device != "cpu":
        raise Absent(f"{dtype_name(dtype)} on {device} (it is timed only in fp32 on a CPU)")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(build_model(), options, providers=["CPUExecutionProvider"])
    return session, onnxruntime.__version__


def group_query_attention(scale: float, q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor]) -> OnnxAttention:
    """GroupQueryAttention on the last tokens of some sequences; its cache holds the earlier ones and grows in place.

    `out` returns [B, S, H, D].

    Args:
        scale: factor of the scores.
        q: [B, S, H, D]; causal, and the last of each sequence.
        k, v: one [L, N, D] per sequence.

    Raises:
        Absent: onnx or onnxruntime is not installed, or the problem is not fp32 on a CPU.
    """
    batch, new, heads, dim = q.shape
    kv_heads, longest = k[0].shape[1], max(map(len, k))
    session, version = _session(q.dtype, q.device.type, partial(_group_query_model, heads, kv_heads, scale))
    from onnxruntime import OrtValue

    def last(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([x[len(x) - new :].flatten(1) for x in tensors])

    def past(tensors: Sequence[Tensor]) -> Any:
        room = torch.zeros(batch, kv_heads, longest, dim)
        for row, x in zip(room, tensors, strict=True):
            row[:, : len(x) - new] = x[: len(x) - new].transpose(0, 1)
        return OrtValue.ortvalue_from_numpy(room.numpy())

    caches = {"key": past(k), "value": past(v)}
    binding = session.io_binding()
    feed = {"query": q.flatten(2), "key": last(k), "value": last(v)}
    feed["seqlens_k"] = torch.tensor([len(x) - 1 for x in k], dtype=torch.int32)
    feed["total_sequence_length"] = torch.tensor(longest, dtype=torch.int32)
    kept = {name: OrtValue.ortvalue_from_numpy(x.contiguous().numpy()) for name, x in feed.items()}
    for name, value in kept.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in caches.items():  # the same memory on both sides: nothing is copied
        binding.bind_ortvalue_input(f"past_{name}", value)
        binding.bind_ortvalue_output(f"present_{name}", value)
    result = torch.empty(batch, new, heads * dim)
    binding.bind_ortvalue_output("out", OrtValue.ortvalue_from_numpy(result.numpy()))

    def run() -> Tensor:
        session.run_with_iobinding(binding)
        return result.unflatten(2, (heads, dim))  # type: ignore[no-any-return]

    return OnnxAttention(f"onnxruntime {version} GroupQueryAttention", run, run)


def _group_query_model(heads: int, kv_heads: int, scale: float) -> bytes:
    """A serialised model with one GroupQueryAttention node."""
    from onnx import TensorProto, helper

    names: dict[str, list[str | int]] = {name: ["batch", "new", name] for name in ("query", "key", "value")}
    names |= {f"past_{name}": ["batch", kv_heads, "longest", "dim"] for name in ("key", "value")}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name, sizes in names.items()]
    inputs.append(helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, ["batch"]))
    inputs.append(helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, []))
    sizes: dict[str, list[str | int]] = {"out": ["batch", "new", "query"]}
    sizes |= {f"present_{name}": ["batch", kv_heads, "longest", "dim"] for name in ("key", "value")}
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in sizes.items()]
    node = helper.make_node(
        "GroupQueryAttention",
        [one.name for one in inputs],
        list(sizes),
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=kv_heads,
        scale=scale,
    )
    return _serialised(node, inputs, outputs)


def _serialised(node: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> bytes:
    from onnx import helper

    graph = helper.make_graph([node], "attention", inputs, outputs)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    serialised: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
    return serialised


def _multi_head_model(heads: int, scale: float, is_causal: bool) -> bytes:
    """A serialised model with one MultiHeadAttention node."""
    from onnx import TensorProto, helper

    tensors = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", length, width])
        for name, length, width in (
            ("query", "q_len", "hidden"),
            ("key", "kv_len", "hidden"),
            ("value", "kv_len", "v_hidden"),
            ("out", "q_len", "v_hidden"),
        )
    }
    inputs = ["query", "key", "value"]
    node = helper.make_node(
        "MultiHeadAttention",
        inputs,
        ["out"],
        domain="com.microsoft",
        num_heads=heads,
        scale=scale,
        unidirectional=int(is_causal),
    )
    return _serialised(node, [tensors[name] for name in inputs], [tensors["out"]])
