"""onnxruntime's MultiHeadAttention as a competitor: a model with one node, built when it is first needed.

Source: github.com/microsoft/onnxruntime, docs/ContribOperators.md, com.microsoft.MultiHeadAttention.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from undivided.request.call import Call
from undivided.request.request import Tensors

__all__ = ["Attend", "Unavailable", "multi_head_attention"]

OPSET = 17
"""Version of the standard operators, of which the model uses none; onnxruntime has it since 1.12."""


class Unavailable(Exception):
    """The reason why onnxruntime cannot take part."""


@dataclass(frozen=True, eq=False)
class Attend:
    """A session with its inputs: `call` runs it, `out` runs it and returns [B, H, S, Dv]."""

    label: str
    call: Callable[[], Any]
    out: Callable[[], Tensor]


def multi_head_attention(call: Call, tensors: Tensors, is_causal: bool) -> Attend:
    """A session of onnxruntime on the same values, in its own layout [B, S, H * D].

    Its threads do not spin between calls (``session.intra_op.allow_spinning`` 0), which would slow the next competitor.

    Raises:
        Unavailable: onnx or onnxruntime is not installed, or the problem is not fp32 on a CPU.
    """
    problem = call.problem
    for package in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise Unavailable(f"{package} is not installed (pip install 'undivided[bench]')")
    if problem.dtype != torch.float32 or problem.device != "cpu":
        raise Unavailable(
            f"{str(problem.dtype).removeprefix('torch.')} on {problem.device} (it is timed only in fp32 on a CPU)"
        )
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    model = _model(problem.heads, call.scale, is_causal)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feed = {
        name: x.detach().transpose(1, 2).flatten(2).contiguous().numpy()
        for name, x in zip(("query", "key", "value"), tensors.heads_first(call.problem.layout), strict=True)
    }

    def run() -> Any:
        return session.run(None, feed)[0]

    def out() -> Tensor:
        result: Tensor = torch.from_numpy(run())
        return result.unflatten(2, (problem.heads, problem.v_dim)).transpose(1, 2)  # type: ignore[no-any-return]

    return Attend(f"onnxruntime {onnxruntime.__version__} MultiHeadAttention", run, out)


def _model(heads: int, scale: float, is_causal: bool) -> bytes:
    """The serialised model."""
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
    graph = helper.make_graph([node], "attention", [tensors[name] for name in inputs], [tensors["out"]])
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    serialised: bytes = model.SerializeToString()
    return serialised
