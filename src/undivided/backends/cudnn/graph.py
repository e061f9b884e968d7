"""A cuDNN call as a graph: built once per problem, cached, executed.

cuDNN's left edge is exclusive: keys in ``(i + d - left_bound, i + d + right_bound]``, so a window's left side is passed
as ``left + 1``. Packed documents are a batch of ragged rows: an offset (in elements) for each document's start, and its
real length. Statistics of dense sequences are contiguous ``[B, H, S, 1]`` in every layout: the forward below cuDNN 9.12
and the backward below 9.26 assume that and ignore the declared strides.

Source: cudnn-frontend, python/pygraph/sdpa.cpp for the arguments (1.23); scaled_dot_product_flash_attention.h for what
each means and for the statistics (1.32, `post_validate_node` and the backward's `pre_validate_node`).
"""

from __future__ import annotations

import importlib
import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undivided._bounded import Bounded
from undivided.backends.shared.documents import as_offsets, packed_documents, sequence_lengths
from undivided.backends.shared.kernel_inputs import clean_views
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors

# Graphs are compiled for sizes. Sizes that change at every step of packed training are rounded up, so that few graphs
# are built: the longest document to 128 (a tile), the number of tokens to 1024 (it only sizes the workspace).
_LONGEST_MULTIPLE, _TOTAL_MULTIPLE = 128, 1024

_KEY_TENSORS = frozenset({"k", "v", "dk", "dv"})
_TOKEN_TENSORS = frozenset({"q", "o", "stats", "do", "dq"}) | _KEY_TENSORS
"""Tensors over tokens. All others (bias, sinks, tables, lengths) have four axes already and are passed unchanged."""

_KEY_TILE = 128
"""Keys of a tile of the backward on SM90 (see `CudnnCall.for_backward`)."""


class CudnnCall(NamedTuple):
    """One call: the problem, its tensors as [B, S, H, D] or packed [T, H, D], and the length of each sequence.

    `extra` has the other inputs: bias [1|B, 1|H, Sq, Sk], sink [1, H, 1, 1], table_k and table_v [B, 1, pages, 1].
    """

    problem: Problem
    scale: float
    band: tuple[int | None, int | None]
    q: Tensor
    k: Tensor
    v: Tensor
    lengths: dict[str, Tensor]
    starts: dict[str, Tensor]
    extra: dict[str, Tensor]

    @property
    def packed(self) -> bool:
        """Whether documents are packed."""
        return bool(self.starts)

    @staticmethod
    def from_call(call: Call, tensors: Tensors, extra: dict[str, Tensor]) -> CudnnCall:
        """The cuDNN call of a call."""
        problem = call.problem
        documents = packed_documents(call)
        padding = sequence_lengths(call)
        lengths: dict[str, Tensor] = {}
        starts: dict[str, Tensor] = {}
        q, k, v = clean_views(call, tensors)
        if documents is None:
            problem = problem._replace(kv_len=k.shape[1])
        if documents is not None:
            for side, real, padded in (
                ("q", documents.cu_seqlens_q, documents.padded_q),
                ("kv", documents.cu_seqlens_kv, documents.padded_kv),
            ):
                lengths[side] = as_offsets(real.diff(), q)
                starts[side] = (real if padded is None else padded).to(device=q.device, dtype=torch.int64)
        elif padding is not None:
            full = full_lengths(problem.batch, problem.q_len, q)
            lengths = {"q": full if padding.q is None else as_offsets(padding.q, q), "kv": as_offsets(padding.kv, q)}
        return CudnnCall(problem, call.scale, call.mask.band, q, k, v, lengths, starts, extra)

    def for_backward(self) -> CudnnCall:
        """The call for the backward: without sinks, with the rows of packed queries one after another, and with
        explicit lengths if keys do not fill their last tile.

        With ragged rows cuDNN writes dq at the row stride of q, whatever stride dq has (seen with cuDNN 9.19 on SM90:
        queries that are views of one projection of q, k and v got the gradients of other rows).

        On SM90 the backward gives the missing keys of that tile score 0 instead of -inf, which overflows if a row's
        log-sum-exp is below -88: NaN gradients, reported up to cuDNN 9.26 and for a single query. A padding mask, which
        explicit lengths turn on, avoids it (cudnn-frontend issues 160 and 1072, pytorch issue 196678); the frontend
        adds one itself up to cuDNN 9.15.
        """
        problem = self.problem
        q = self.q.contiguous() if self.packed else self.q
        without_sinks = self._replace(q=q, extra={name: t for name, t in self.extra.items() if name != "sink"})
        if self.lengths or (problem.kv_len % _KEY_TILE == 0 and problem.q_len > 1):
            return without_sinks
        lengths = {"q": problem.q_len, "kv": problem.kv_len}
        return without_sinks._replace(lengths={s: full_lengths(problem.batch, n, self.q) for s, n in lengths.items()})

    def empty_stats(self, dtype: torch.dtype) -> Tensor:
        """Uninitialised statistics: [B, H, Sq], or [T, H] if documents are packed."""
        shape = self.q.shape[:2] if self.packed else (self.q.shape[0], self.q.shape[2], self.q.shape[1])
        return torch.empty(shape, dtype=dtype, device=self.q.device)

    def dims(self, name: str, tensor: Tensor) -> tuple[list[int], list[int]]:
        """(sizes, strides) of a tensor as cuDNN sees it, [B, H, S, D]."""
        if name not in _TOKEN_TENSORS:
            return list(tensor.shape), list(tensor.stride())
        if not self.packed:
            view = tensor.unsqueeze(-1) if name == "stats" else tensor.transpose(1, 2)
            return list(view.shape), list(view.stride())
        count, (max_q, max_kv) = self.lengths["q"].shape[0], self.problem.longest_lengths
        length = _round_up(max_kv if name in _KEY_TENSORS else max_q, _LONGEST_MULTIPLE)
        size = 1 if name == "stats" else tensor.shape[2]
        stride = [tensor.stride(1), tensor.stride(0), 1]
        return [count, tensor.shape[1], length, size], [length * tensor.stride(0), *stride]

    def run(self, build: Any, tensors: dict[str, Tensor]) -> None:
        """Execute the graph of this call that `build` (`forward_graph` or `backward_graph`) builds first for a new
        problem. `tensors`: what it reads and writes besides q, k, v and `extra`."""
        tensors = {"q": self.q, "k": self.k, "v": self.v, **tensors, **self.extra}
        for side, lengths in self.lengths.items():
            tensors[f"length_{side}"] = lengths.view(-1, 1, 1, 1)
        if self.packed:
            for name in [n for n in tensors if n in _TOKEN_TENSORS]:
                starts = self.starts["kv" if name in _KEY_TENSORS else "q"]
                tensors[f"offset_{name}"] = (starts * tensors[name].stride(0)).view(-1, 1, 1, 1)
        cudnn = importlib.import_module("cudnn")
        handle = _handle(cudnn, self.q.device)
        uids = {name: n for n, name in enumerate(sorted(tensors), 1)}
        described = tuple(
            (name, *map(tuple, self.dims(name, t))) for name, t in tensors.items() if not name.startswith("offset")
        )
        plain = self.problem._replace(q_len=0, kv_len=0, documents=None) if self.packed else self.problem
        key = (build, plain, self.scale, described, self.totals(), self.q.device)
        if key not in _graphs:
            graph = cudnn.pygraph(
                io_data_type=_types(cudnn)[self.q.dtype],
                intermediate_data_type=cudnn.data_type.FLOAT,
                compute_data_type=cudnn.data_type.FLOAT,
                handle=handle,
            )
            _graphs[key] = _build(cudnn, graph, self, build, tensors, uids)
        graph = _graphs[key]
        workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=self.q.device)
        graph.execute({uids[name]: tensor for name, tensor in tensors.items()}, workspace, handle=handle)

    def options(self, cudnn: Any, nodes: dict[str, Any]) -> dict[str, Any]:
        """The arguments that forward and backward share."""
        left, right = self.band
        align = cudnn.diagonal_alignment
        return {
            "attn_scale": self.scale,
            "bias": nodes.get("bias"),
            "use_alibi_mask": "alibi" in self.problem.features,
            "use_padding_mask": bool(self.lengths),
            "seq_len_q": nodes.get("length_q"),
            "seq_len_kv": nodes.get("length_kv"),
            "diagonal_alignment": align.BOTTOM_RIGHT if self.problem.align == "bottom_right" else align.TOP_LEFT,
            "diagonal_band_left_bound": None if left is None else left + 1,  # cuDNN leaves the left edge out
            "diagonal_band_right_bound": right,
        }

    def totals(self) -> tuple[int, int] | None:
        """Upper bounds of the packed tokens (queries, keys); None for dense sequences."""
        if not self.packed:
            return None
        return _round_up(self.q.shape[0], _TOTAL_MULTIPLE), _round_up(self.k.shape[0], _TOTAL_MULTIPLE)


_graphs: Bounded[object, Any] = Bounded(256)


class _Handles(threading.local):
    """The handles of a thread, by device: a handle has one stream, and threads have streams of their own."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, Any] = {}


_handles = _Handles()


def full_lengths(batch: int, length: int, like: Tensor) -> Tensor:
    """The same length for every sequence, int32 [B]."""
    return torch.full((batch,), length, dtype=torch.int32, device=like.device)


def _handle(cudnn: Any, device: torch.device) -> Any:
    handles = _handles.by_device
    if device not in handles:
        handles[device] = cudnn.create_handle()
    if device.type == "cuda":
        cudnn.set_stream(handle=handles[device], stream=torch.cuda.current_stream(device).cuda_stream)
    return handles[device]


def _types(cudnn: Any) -> dict[torch.dtype, Any]:
    kinds = cudnn.data_type
    return {
        torch.float16: kinds.HALF,
        torch.bfloat16: kinds.BFLOAT16,
        torch.float32: kinds.FLOAT,
        torch.int32: kinds.INT32,
        torch.int64: kinds.INT64,
    }


def _build(
    cudnn: Any, graph: Any, cudnn_call: CudnnCall, build: Any, tensors: dict[str, Tensor], uids: dict[str, int]
) -> Any:
    """Describe the inputs, add the operation, describe its outputs, and compile."""
    nodes: dict[str, Any] = {}
    outputs = {"o", "stats"} if build is forward_graph else {"dq", "dk", "dv"}
    # offsets first: the tensors refer to them
    for name in sorted(set(tensors) - outputs, key=lambda name: not name.startswith("offset")):
        dim, stride = cudnn_call.dims(name, tensors[name])
        kind = _types(cudnn)[tensors[name].dtype]
        nodes[name] = graph.tensor(name=name, dim=dim, stride=stride, data_type=kind, uid=uids[name])
        if f"offset_{name}" in nodes:
            nodes[name].set_ragged_offset(nodes[f"offset_{name}"])
    for name, node in build(cudnn, graph, cudnn_call, nodes).items():
        dim, stride = cudnn_call.dims(name, tensors[name])
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


def forward_graph(cudnn: Any, graph: Any, cudnn_call: CudnnCall, nodes: dict[str, Any]) -> dict[str, Any]:
    """Attention and its statistics."""
    options = cudnn_call.options(cudnn, nodes)
    if "sink" in nodes:  # an argument that older frontends do not have
        options["sink_token"] = nodes["sink"]
    if "table_k" in nodes:
        options |= {
            "paged_attention_k_table": nodes["table_k"],
            "paged_attention_v_table": nodes["table_v"],
            "paged_attention_max_seq_len_kv": cudnn_call.problem.kv_len,
        }
    out, stats = graph.sdpa(name="sdpa", q=nodes["q"], k=nodes["k"], v=nodes["v"], generate_stats=True, **options)
    return {"o": out, "stats": stats}


def backward_graph(cudnn: Any, graph: Any, cudnn_call: CudnnCall, nodes: dict[str, Any]) -> dict[str, Any]:
    """Gradients of q, k and v; that of the bias goes into the graph's input "dbias". The statistics contain the
    sinks."""
    total_q, total_kv = cudnn_call.totals() or (None, None)
    dq, dk, dv = graph.sdpa_backward(
        name="sdpa_backward",
        q=nodes["q"],
        k=nodes["k"],
        v=nodes["v"],
        o=nodes["o"],
        dO=nodes["do"],
        stats=nodes["stats"],
        dBias=nodes.get("dbias"),
        max_total_seq_len_q=total_q,
        max_total_seq_len_kv=total_kv,
        use_deterministic_algorithm=cudnn_call.problem.deterministic,
        **cudnn_call.options(cudnn, nodes),
    )
    return {"dq": dq, "dk": dk, "dv": dv}


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
