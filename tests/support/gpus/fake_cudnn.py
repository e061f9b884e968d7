"""A fake cudnn-frontend: graphs that compute, by plain torch on the CPU, what its sources specify.

Written from cudnn-frontend (python/pygraph/sdpa.cpp; node/scaled_dot_product_flash_attention.h, node/softmax.h and
utils/attn_score_modifiers.h), not from our adapter: the order of scale, bias, ALiBi, padding and band, the exclusive
left edge, statistics that contain the sink, gradients from the statistics that they are given. If cuDNN is known to
misbehave, the fake refuses (-inf in a bias, misaligned rows, statistics that are not packed) or misbehaves in the same
way (rows without keys are NaN, masked values are multiplied by 0).
"""

from __future__ import annotations

import math
import types
from typing import Any

import torch
from fake_gpu_kernels import band_pairs
from torch import Tensor

KEY_TILE = 128

COMMON = frozenset(
    "q k v attn_scale bias use_alibi_mask use_padding_mask seq_len_q seq_len_kv diagonal_alignment "
    "diagonal_band_left_bound "
    "diagonal_band_right_bound dropout rng_dump compute_data_type name".split()
)
FORWARD = COMMON | frozenset(
    "block_mask paged_attention_k_table paged_attention_v_table paged_attention_max_seq_len_kv generate_stats "
    "sink_token".split()
)
BACKWARD = COMMON | frozenset(
    "o dO stats dBias max_total_seq_len_q max_total_seq_len_kv use_deterministic_algorithm "
    "sink_token dSink_token".split()
)
"""Keywords of pygraph.sdpa and pygraph.sdpa_backward (1.23) that are not deprecated."""


class FakeCudnn(types.ModuleType):
    """The parts of cudnn-frontend that the adapter touches."""

    def __init__(self) -> None:
        super().__init__("cudnn")
        self.data_type = types.SimpleNamespace(
            HALF="half", BFLOAT16="bf16", FLOAT="float", INT32="int32", INT64="int64"
        )
        self.diagonal_alignment = types.SimpleNamespace(TOP_LEFT="top_left", BOTTOM_RIGHT="bottom_right")
        self.heur_mode = types.SimpleNamespace(A="a", FALLBACK="fallback")
        self.graphs: list[FakeGraph] = []

    def create_handle(self) -> str:
        return "handle"

    def pygraph(self, **settings: Any) -> FakeGraph:
        self.graphs.append(FakeGraph(settings))
        return self.graphs[-1]


class FakeNode:
    """A tensor of a graph: sizes, strides, and offsets where it is ragged."""

    def __init__(self, **arguments: Any) -> None:
        self.attributes = arguments
        self.ragged: FakeNode | None = None

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def setter(value: Any) -> FakeNode:
            self.__dict__.setdefault("attributes", {})[name.removeprefix("set_")] = value
            return self

        return setter

    def set_ragged_offset(self, node: FakeNode) -> None:
        self.ragged = node

    def whole(self, memory: dict[int, Tensor]) -> Tensor:
        """The tensor in the memory that the graph was given, by its own sizes and strides."""
        tensor = memory[self.attributes["uid"]]
        return torch.as_strided(tensor, self.attributes["dim"], self.attributes["stride"], tensor.storage_offset())

    def view(self, memory: dict[int, Tensor], sequence: int, length: int) -> Tensor:
        """One sequence's [H, S, D]."""
        tensor, (_, heads, _, size) = memory[self.attributes["uid"]], self.attributes["dim"]
        step, *strides = self.attributes["stride"]
        start = sequence * step if self.ragged is None else int(memory[self.ragged.attributes["uid"]][sequence])
        return torch.as_strided(tensor, (heads, length, size), strides, tensor.storage_offset() + start)

    def check_aligned(self, memory: dict[int, Tensor]) -> None:
        """Rows start at multiples of 16 bytes."""
        tensor = memory[self.attributes["uid"]]
        sizes = zip(self.attributes["stride"][:3], self.attributes["dim"], strict=False)
        steps = [stride * tensor.element_size() for stride, size in sizes if size > 1]
        assert not any(step % 16 for step in (tensor.data_ptr(), *steps)), "misaligned"
        assert self.attributes["stride"][3] == 1

    def check_packed(self) -> None:
        """The statistics of dense sequences: [B, H, S, 1] without gaps."""
        _, heads, length, one = self.attributes["dim"]
        assert self.ragged is not None or self.attributes["stride"] == [heads * length, length, 1, 1]
        assert one == 1


class FakeGraph:
    """A forward or a backward."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.executed = settings, 0
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, FakeNode] = {}

    def __getattr__(self, name: str) -> Any:
        if name in ("validate", "build_operation_graph", "check_support", "build_plans", "create_execution_plans"):
            return lambda *_: None
        raise AttributeError(name)

    def get_workspace_size(self) -> int:
        return 0

    def tensor(self, **arguments: Any) -> FakeNode:
        return FakeNode(**arguments)

    def sdpa(self, **arguments: Any) -> tuple[FakeNode, ...]:
        assert arguments.keys() <= FORWARD, arguments.keys() - FORWARD
        self.inputs, self.outputs = arguments, {"o": FakeNode(), "stats": FakeNode()}
        return tuple(self.outputs.values())

    def sdpa_backward(self, **arguments: Any) -> tuple[FakeNode, ...]:
        assert arguments.keys() <= BACKWARD, arguments.keys() - BACKWARD
        self.inputs, self.outputs = arguments, {"dq": FakeNode(), "dk": FakeNode(), "dv": FakeNode()}
        return tuple(self.outputs.values())

    def execute(self, memory: dict[int, Tensor], workspace: Tensor, handle: str) -> None:
        assert handle == "handle" == self.settings["handle"]
        self.executed += 1
        self._check(memory)
        for n in range(self.inputs["q"].attributes["dim"][0]):
            self._sequence(memory, n)

    def _check(self, memory: dict[int, Tensor]) -> None:
        """The checks of the frontend, and further ones."""
        arguments, nodes = self.inputs, self.inputs | self.outputs
        for name in ("q", "k", "v", "o", "dO", "dq", "dk", "dv"):
            if name in nodes:
                nodes[name].check_aligned(memory)
        nodes["stats"].check_packed()
        if "dO" in arguments and nodes["q"].ragged is not None:
            rows = [memory[nodes[name].attributes["uid"]].stride(0) for name in ("q", "dq")]
            assert rows[0] == rows[1], "dq would be written at the offsets of q"
        bottom_right = (
            arguments["diagonal_alignment"] == "bottom_right" and arguments["diagonal_band_right_bound"] is not None
        )
        if (bias := arguments.get("bias")) is not None:
            assert not bottom_right
            assert bias.attributes["data_type"] == arguments["q"].attributes["data_type"]
            batch, heads, *pairs = bias.attributes["dim"]
            assert batch in (1, arguments["q"].attributes["dim"][0])
            assert heads in (1, arguments["q"].attributes["dim"][1])
            assert pairs == [arguments["q"].attributes["dim"][2], arguments["k"].attributes["dim"][2]]
            assert not (memory[bias.attributes["uid"]] == -torch.inf).any()
        if arguments.get("use_alibi_mask"):
            assert not bottom_right
            assert arguments["use_padding_mask"] is ("dO" in arguments)
        if arguments.get("sink_token") is not None:
            assert arguments["q"].attributes["dim"][2] > 1
        if "dO" in arguments:
            fills_tiles = (
                arguments["k"].attributes["dim"][2] % KEY_TILE == 0 and arguments["q"].attributes["dim"][2] > 1
            )
            assert arguments["use_padding_mask"] or fills_tiles, "NaN gradients on SM90"

    def _length(self, memory: dict[int, Tensor], side: str, sequence: int) -> int:
        if self.inputs["use_padding_mask"]:
            return int(memory[self.inputs[f"seq_len_{side}"].attributes["uid"]].flatten()[sequence])
        return self.inputs["q" if side == "q" else "k"].attributes["dim"][2]  # type: ignore[no-any-return]

    def _sequence(self, memory: dict[int, Tensor], n: int) -> None:
        arguments, (rows, keys) = self.inputs, (self._length(memory, "q", n), self._length(memory, "kv", n))
        q = arguments["q"].view(memory, n, rows)
        k, v = (self._keys(memory, name, n, keys) for name in "kv")
        group = q.shape[0] // k.shape[0]
        k, v = (t.repeat_interleave(group, 0) for t in (k, v))
        score = self._scores(memory, n, q, k, keys)
        if "dO" not in arguments:
            self._forward(memory, n, score, v)
            return
        self._backward(memory, n, score, (q, k, v), group)

    def _keys(self, memory: dict[int, Tensor], name: str, n: int, length: int) -> Tensor:
        """Keys or values of one sequence, [H, S, D]; of a paged cache whole tiles, whatever stands behind the last
        key."""
        node, table = self.inputs[name], self.inputs.get(f"paged_attention_{name}_table")
        if table is None:
            return node.view(memory, n, length)  # type: ignore[no-any-return]
        longest, page = self.inputs["paged_attention_max_seq_len_kv"], node.attributes["dim"][2]
        assert table.attributes["data_type"] == "any" or table.attributes["data_type"] == "int32"
        assert page & (page - 1) == 0
        assert table.attributes["dim"][2] * page == longest
        assert 1 <= length <= longest
        index = torch.arange(min(-(-length // KEY_TILE) * KEY_TILE, longest))
        pages = table.whole(memory)[n, 0, index // page, 0].long()
        return node.whole(memory)[pages, :, index % page].transpose(0, 1)  # type: ignore[no-any-return]

    def _scores(self, memory: dict[int, Tensor], n: int, q: Tensor, k: Tensor, keys: int) -> Tensor:
        """Scale, bias, ALiBi, padding, band: [H, Sq, Sk], -inf where masked."""
        arguments, rows, columns = self.inputs, q.shape[1], k.shape[1]
        score = arguments["attn_scale"] * (q @ k.mT)
        if (bias := arguments.get("bias")) is not None:
            tensor = bias.whole(memory)
            score = score + tensor[n if tensor.shape[0] > 1 else 0][:, :rows, :columns]
        if arguments.get("use_alibi_mask"):
            assert arguments["diagonal_band_right_bound"] == 0
            index = torch.arange(columns) - torch.arange(rows)[:, None]
            score = score + alibi_slopes(q.shape[0])[:, None, None].to(score.dtype) * index
        left, right = arguments["diagonal_band_left_bound"], arguments["diagonal_band_right_bound"]
        shift = keys - rows if arguments["diagonal_alignment"] == "bottom_right" else 0
        band = (None if left is None else left - 1, right)  # exclusive on the left
        allowed = band_pairs(rows, columns, band, shift) & (torch.arange(columns) < keys)
        masked: Tensor = score.masked_fill(~allowed, -torch.inf)
        return masked

    def _forward(self, memory: dict[int, Tensor], n: int, score: Tensor, v: Tensor) -> None:
        """A plain softmax, its maximum subtracted: NaN where that is -inf."""
        rows, keys = score.shape[1:]
        if not keys:  # a sequence of none (cudnn-frontend issue 943)
            self.outputs["o"].view(memory, n, rows).fill_(torch.nan)
            self.outputs["stats"].view(memory, n, rows).fill_(torch.nan)
            return
        largest = score.amax(-1, keepdim=True)
        sink = None
        if (node := self.inputs.get("sink_token")) is not None:
            assert node.attributes["dim"] == [1, score.shape[0], 1, 1]
            sink = node.whole(memory).view(-1, 1, 1)
            largest = torch.maximum(largest, sink)
        weight = torch.exp(score - largest)
        total = weight.sum(-1, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink - largest)
        self.outputs["o"].view(memory, n, rows).copy_(weight @ v / total)
        self.outputs["stats"].view(memory, n, rows).copy_(largest + total.log())

    def _backward(
        self, memory: dict[int, Tensor], n: int, score: Tensor, tensors: tuple[Tensor, ...], group: int
    ) -> None:
        """The recomputation from the statistics: P = exp(score - stats), dS = P * (dO V^T - sum(dO * O))."""
        arguments, (q, k, v) = self.inputs, tensors
        out, grad, stats = (arguments[name].view(memory, n, score.shape[1]) for name in ("o", "dO", "stats"))
        weight = torch.exp(score - stats)
        change = weight * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
        if (dbias := arguments.get("dBias")) is not None:
            whole = dbias.whole(memory)
            whole[n if whole.shape[0] > 1 else 0] += change.sum_to_size(whole.shape[1:])
        change = arguments["attn_scale"] * change
        grads = {"dq": change @ k, "dk": change.mT @ q, "dv": weight.mT @ grad}
        for name, result in grads.items():
            if name != "dq":
                result = result.unflatten(0, (-1, group)).sum(1)
            self.outputs[name].view(memory, n, result.shape[1]).copy_(result)


def alibi_slopes(heads: int) -> Tensor:
    """cuDNN's own slopes (cudnn_frontend_utils.h, `get_alibi_slope`)."""
    n = 1 << int(math.log2(heads))
    exponents = [i + 1.0 for i in range(n)] + [(i + 1) * 0.5 for i in range(0, 2 * (heads - n), 2)]
    return torch.tensor([2.0 ** (-8.0 * e / n) for e in exponents])
