"""`cudnn`: cuDNN's attention through nvidia-cudnn-frontend: windows, per-sequence lengths, packed and padded documents.

A call is a graph, built once for each problem and kept. cuDNN's left edge is exclusive: keys in
``(i + d - left_bound, i + d + right_bound]``, so a window's left side is passed as ``left + 1``. Packed documents are a
batch of ragged rows: an offset (in elements) for each document's start, and its real length. cuDNN's statistics are the
natural log-sum-exp.

Source of the limits: `_cudnn_rules`; cudnn-frontend 1.23, python/pygraph/sdpa.cpp for the arguments.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undivided import _layout
from undivided._machine import Machine
from undivided._problem import Operands, Problem
from undivided._result import Result, lse_dtype
from undivided.backends import _cudnn_rules, _gpu
from undivided.backends._base import Backend, Gradients, Limits, limit_reasons
from undivided.masks._parts import Lengths

# Graphs are compiled for sizes. Those that change from step to step when documents are packed are rounded up, so that
# the graphs repeat: the longest document to 128 (a tile), the total of tokens to 1024 (a workspace size only).
_ROUND_LONGEST, _ROUND_TOTAL = 128, 1024
_MOST_GRAPHS = 256


class Cudnn(Backend):
    """cuDNN through its own frontend."""

    name = "cudnn"
    family = "fused"
    summary = "cuDNN's attention through nvidia-cudnn-frontend: windows, lengths, packed documents"
    how_to_get = "pip install nvidia-cudnn-frontend, and cuDNN 9"
    limits = Limits(
        devices=frozenset({"cuda"}),
        dtypes=_gpu.HALF,
        head_dim_multiple=8,
        masks=frozenset({"causal", "window", "lengths", "q_lengths", "documents", "padded"}),
        alignments=frozenset({"top_left", "bottom_right"}),
        features=frozenset({"backward", "gqa", "lse", "value_dim"}),
        compute_capability=((8, 0), (12, 1)),
        # 1.14: the band arguments of the Python interface
        packages=(("cudnn_frontend", (1, 14), None),),
        notes={
            "dropout": "it draws its own pattern",
            "bias": "rows whose bias is all -inf are not defined",
            "alibi": "cuDNN computes slopes of its own",
            "softcap": "only as a graph of one's own",
            "sinks": "whether its statistics contain them is not documented",
            "paged": "not written yet",
            "lse_grad": "cuDNN's backward has no input for it",
        },
    )

    def rank(self, problem: Problem, machine: Machine) -> float:
        """By the table in `_gpu`."""
        return _gpu.rank(self.name, machine)

    def unavailable(self, machine: Machine) -> str | None:
        """No GPU, no package, or neither."""
        if machine.version("cudnn") is None and _gpu.no_gpu(machine) is None:
            return "cuDNN is not installed"
        return _gpu.no_gpu(machine) or super().unavailable(machine)

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The limits, then what they cannot say."""
        reasons = limit_reasons(self.limits, problem, machine)
        reasons += _gpu.hip_reasons(problem, machine) + _gpu.size_reasons(problem)
        if problem.device == "cuda":
            reasons += _cudnn_rules.reasons(problem, machine)
        if "lengths" in problem.mask.kinds and problem.q_len == 1:
            reasons.append(
                "per-sequence lengths for one query (what lies beyond them would be cleared in a copy of the cache)"
            )
        sizes = (problem.qk_dim, problem.v_dim)
        frontend = machine.version("cudnn_frontend")
        large = (
            "backward" in problem.features
            and min(sizes) > 192
            and (machine.compute_capability or (0,))[0] == 10
        )
        if large and frontend is not None and frontend < (1, 24):
            reasons.append(
                "head_dim=256 with gradients on compute capability 10.x (nvidia-cudnn-frontend from 1.24)"
            )
        return reasons

    def forward(self, problem: Problem, operands: Operands) -> Result:
        """Attention by a forward graph."""
        call = _Call.of(problem, operands)
        out = torch.empty(*call.q.shape[:-1], problem.v_dim, dtype=call.q.dtype, device=call.q.device)
        stats = torch.empty(call.q.shape[:-1], dtype=lse_dtype(problem.dtype), device=call.q.device)
        call.run("forward", _forward_graph, {"q": call.q, "k": call.k, "v": call.v, "o": out, "stats": stats})
        if call.packed:
            out, stats = out.unsqueeze(0), stats.unsqueeze(0)
        form = operands.normal_form(problem) if _gpu.has_rows_without_keys(problem) else None
        return Result(*_gpu.settle(out, stats.transpose(1, 2), form))

    def backward(
        self, problem: Problem, operands: Operands, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Gradients by a backward graph."""
        call = _Call.of(problem, operands)
        out, grad = result.out, _layout.canonical(grad_out, problem.layout)
        if _gpu.has_rows_without_keys(problem):
            grad = _gpu.clear_rows(grad, operands.normal_form(problem))
        stats = _gpu.for_kernel(result.lse).transpose(1, 2)
        if call.packed:
            out, grad, stats = out[0], grad[0], stats[0]
        tensors = {"q": call.q, "k": call.k, "v": call.v, "o": out.contiguous(), "stats": stats.contiguous()}
        tensors["do"] = grad.contiguous()
        # ragged gradients are written for real tokens only: the rest starts, and stays, at 0
        grads = {
            f"d{name}": torch.zeros(tensors[name].shape, dtype=out.dtype, device=out.device) for name in "qkv"
        }
        call.run("backward", _backward_graph, tensors | grads)
        dq, dk, dv = (
            _layout.restore(g.unsqueeze(0) if call.packed else g, problem.layout) for g in grads.values()
        )
        return dq, dk, dv, None, None, None


class _Call(NamedTuple):
    """One call: the problem, its tensors as [B, S, H, D] or packed [T, H, D], and lengths of each sequence."""

    problem: Problem
    scale: float
    band: tuple[int | None, int | None]
    q: Tensor
    k: Tensor
    v: Tensor
    lengths: dict[str, Tensor]
    starts: dict[str, Tensor]

    @property
    def packed(self) -> bool:
        """Whether documents are packed."""
        return bool(self.starts)

    @staticmethod
    def of(problem: Problem, operands: Operands) -> _Call:
        """The call of these operands."""
        found = _gpu.documents(operands)
        part = next((part for part in operands.mask.parts if isinstance(part, Lengths)), None)
        lengths: dict[str, Tensor] = {}
        starts: dict[str, Tensor] = {}
        q, k, v = _gpu.views(problem, operands)
        if found is not None or part is not None:
            q, k, v = _gpu.cleaned(problem, operands, operands.normal_form(problem))
        if found is not None:
            q, k, v = q[0], k[0], v[0]
            for side, real, padded in (
                ("q", found.cu_seqlens_q, found.padded_q), ("kv", found.cu_seqlens_kv, found.padded_kv),
            ):  # fmt: skip
                lengths[side] = _gpu.offsets(real.diff(), q)
                starts[side] = (real if padded is None else padded).to(device=q.device, dtype=torch.int64)
        elif part is not None:
            full = torch.full((problem.batch,), problem.q_len, dtype=torch.int32, device=q.device)
            lengths = {
                "q": full if part.q is None else _gpu.offsets(part.q, q),
                "kv": _gpu.offsets(part.kv, q),
            }
        return _Call(problem, operands.scale, operands.mask.band, q, k, v, lengths, starts)

    def dims(self, name: str, tensor: Tensor) -> tuple[list[int], list[int]]:
        """(sizes, strides) of a tensor as cuDNN sees it, [B, H, S, D]."""
        if not self.packed:
            tensor = tensor.unsqueeze(-1) if name == "stats" else tensor
            view = tensor.transpose(1, 2)
            return list(view.shape), list(view.stride())
        count, (max_q, max_kv) = self.lengths["q"].shape[0], _gpu.longest(self.problem)
        length = _rounded(max_kv if name in ("k", "v", "dk", "dv") else max_q, _ROUND_LONGEST)
        size = 1 if name == "stats" else tensor.shape[2]
        stride = [tensor.stride(1), tensor.stride(0), 1]
        return [count, tensor.shape[1], length, size], [length * tensor.stride(0), *stride]

    def run(self, what: str, build: Any, tensors: dict[str, Tensor]) -> None:
        """Execute the graph of this call, building it where it is new."""
        for side, lengths in self.lengths.items():
            tensors[f"length_{side}"] = lengths.view(-1, 1, 1, 1)
        if self.packed:
            for name in [n for n in tensors if not n.startswith("length")]:
                starts = self.starts["kv" if name in ("k", "v", "dk", "dv") else "q"]
                tensors[f"offset_{name}"] = (starts * tensors[name].stride(0)).view(-1, 1, 1, 1)
        cudnn = importlib.import_module("cudnn")
        handle = _handle(cudnn, self.q.device)
        uids = {name: n for n, name in enumerate(sorted(tensors), 1)}
        described = tuple(
            (name, *map(tuple, self.dims(name, t))) for name, t in tensors.items() if _is_data(name)
        )
        plain = self.problem._replace(q_len=0, kv_len=0, documents=None) if self.packed else self.problem
        key = (what, plain, self.scale, described, self._totals(), self.q.device)
        if key not in _graphs:
            if len(_graphs) >= _MOST_GRAPHS:
                _graphs.clear()
            graph = cudnn.pygraph(
                io_data_type=_types(cudnn)[self.q.dtype], intermediate_data_type=cudnn.data_type.FLOAT,
                compute_data_type=cudnn.data_type.FLOAT, handle=handle,
            )  # fmt: skip
            _graphs[key] = _built(cudnn, graph, self, build, tensors, uids)
        graph = _graphs[key]
        workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=self.q.device)
        graph.execute({uids[name]: tensor for name, tensor in tensors.items()}, workspace, handle=handle)

    def options(self, cudnn: Any, nodes: dict[str, Any]) -> dict[str, Any]:
        """The arguments that forward and backward share."""
        left, right = self.band
        align = cudnn.diagonal_alignment
        return {
            "attn_scale": self.scale,
            "use_padding_mask": bool(self.lengths),
            "seq_len_q": nodes.get("length_q"),
            "seq_len_kv": nodes.get("length_kv"),
            "diagonal_alignment": align.BOTTOM_RIGHT
            if self.problem.align == "bottom_right"
            else align.TOP_LEFT,
            "diagonal_band_left_bound": None if left is None else left + 1,  # cuDNN leaves the left edge out
            "diagonal_band_right_bound": right,
        }

    def _totals(self) -> tuple[int, int] | None:
        if not self.packed:
            return None
        return _rounded(self.q.shape[0], _ROUND_TOTAL), _rounded(self.k.shape[0], _ROUND_TOTAL)


_graphs: dict[object, Any] = {}
_handles: dict[torch.device, Any] = {}


def _handle(cudnn: Any, device: torch.device) -> Any:
    if device not in _handles:
        _handles[device] = cudnn.create_handle()
    if device.type == "cuda":
        cudnn.set_stream(handle=_handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return _handles[device]


def _is_data(name: str) -> bool:
    return not name.startswith(("length", "offset"))


def _types(cudnn: Any) -> dict[torch.dtype, Any]:
    kinds = cudnn.data_type
    return {
        torch.float16: kinds.HALF, torch.bfloat16: kinds.BFLOAT16, torch.float32: kinds.FLOAT,
        torch.int32: kinds.INT32, torch.int64: kinds.INT64,
    }  # fmt: skip


def _built(
    cudnn: Any, graph: Any, call: _Call, build: Any, tensors: dict[str, Tensor], uids: dict[str, int]
) -> Any:
    """Describe the inputs, add the operation, describe its outputs, and compile."""
    nodes: dict[str, Any] = {}
    outputs = {"o", "stats"} if build is _forward_graph else {"dq", "dk", "dv"}

    def shape(name: str) -> tuple[list[int], list[int]]:
        tensor = tensors[name]
        return call.dims(name, tensor) if _is_data(name) else (list(tensor.shape), [1, 1, 1, 1])

    for name in sorted(set(tensors) - outputs, key=_is_data):  # offsets first: the tensors refer to them
        dim, stride = shape(name)
        kind = _types(cudnn)[tensors[name].dtype]
        nodes[name] = graph.tensor(name=name, dim=dim, stride=stride, data_type=kind, uid=uids[name])
        if f"offset_{name}" in nodes:
            nodes[name].set_ragged_offset(nodes[f"offset_{name}"])
    for name, node in build(cudnn, graph, call, nodes).items():
        dim, stride = shape(name)
        node.set_uid(uids[name]).set_output(True).set_dim(dim).set_stride(stride)
        node.set_data_type(_types(cudnn)[tensors[name].dtype])
        if f"offset_{name}" in nodes:
            node.set_ragged_offset(nodes[f"offset_{name}"])
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph


def _forward_graph(cudnn: Any, graph: Any, call: _Call, nodes: dict[str, Any]) -> dict[str, Any]:
    out, stats = graph.sdpa(
        name="sdpa",
        q=nodes["q"],
        k=nodes["k"],
        v=nodes["v"],
        generate_stats=True,
        **call.options(cudnn, nodes),
    )
    return {"o": out, "stats": stats}


def _backward_graph(cudnn: Any, graph: Any, call: _Call, nodes: dict[str, Any]) -> dict[str, Any]:
    total_q, total_kv = call._totals() or (None, None)
    dq, dk, dv = graph.sdpa_backward(
        name="sdpa_backward", q=nodes["q"], k=nodes["k"], v=nodes["v"], o=nodes["o"], dO=nodes["do"],
        stats=nodes["stats"], max_total_seq_len_q=total_q, max_total_seq_len_kv=total_kv,
        use_deterministic_algorithm=call.problem.deterministic, **call.options(cudnn, nodes),
    )  # fmt: skip
    return {"dq": dq, "dk": dk, "dv": dv}


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


BACKEND = Cudnn()
