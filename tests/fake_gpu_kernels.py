"""Stand-ins for GPU kernels, with the kernels' own conventions, computed by plain torch on the CPU.

Each keeps what makes its kernel different: +inf for the log-sum-exp of rows without keys, memory that it does not write
left NaN, bottom-right alignment, an exclusive left edge. They are written from the kernels' documentation, not from ours.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Band = tuple[int | None, int | None]


def plain(
    q: Tensor, k: Tensor, v: Tensor, scale: float, allowed: Tensor, *, softcap: float = 0.0, bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[H, S, D] attention of one sequence -> (out [H, S, Dv], lse [H, S] with the sinks in it, -inf without keys)."""
    k, v = (t.repeat_interleave(q.shape[0] // t.shape[0], 0) for t in (k, v))
    score = scale * (q @ k.mT)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias
    score = score.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        score = torch.cat([score, sinks[:, None, None].expand(*score.shape[:2], 1)], -1)
    lse = score.logsumexp(-1)
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return weight[..., : k.shape[1]] @ v, lse


def band_pairs(q_len: int, kv_len: int, band: Band, shift: int) -> Tensor:
    """Pairs with ``i + shift - left <= j <= i + shift + right``, both ends included."""
    i, j = torch.arange(q_len)[:, None] + shift, torch.arange(kv_len)
    allowed = torch.ones(q_len, kv_len, dtype=torch.bool)
    if band[0] is not None:
        allowed &= j >= i - band[0]
    if band[1] is not None:
        allowed &= j <= i + band[1]
    return allowed


def sequences(q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> Iterator[tuple[Any, Any]]:
    """Index of each sequence's rows and keys: batch elements, or slices of packed tokens."""
    if cu_q is None or cu_k is None:
        yield from ((b, b) for b in range(q.shape[0]))
        return
    for n in range(len(cu_q) - 1):
        yield slice(int(cu_q[n]), int(cu_q[n + 1])), slice(int(cu_k[n]), int(cu_k[n + 1]))


def flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, *, cu_q: Tensor | None = None, cu_k: Tensor | None = None,
    softcap: float = 0.0, slopes: Tensor | None = None, sinks: Tensor | None = None, empty_lse: float = torch.inf,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """FlashAttention: [B, S, H, D] or packed [T, H, D]; bottom-right; unwritten memory is NaN."""
    out = torch.full((*q.shape[:-1], v.shape[-1]), torch.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:-1], torch.nan, dtype=q.dtype)
    for n, (rows, keys) in enumerate(sequences(q, k, cu_q, cu_k)):
        one, ones = q[rows].transpose(0, 1), [t[keys].transpose(0, 1) for t in (k, v)]
        shift = ones[0].shape[1] - one.shape[1]
        allowed = band_pairs(one.shape[1], ones[0].shape[1], band, shift)
        bias = None
        if slopes is not None:
            distance = (torch.arange(one.shape[1])[:, None] + shift - torch.arange(ones[0].shape[1])).abs()
            bias = -(slopes if slopes.dim() == 1 else slopes[n])[:, None, None] * distance
        found, total = plain(one, *ones, scale, allowed, softcap=softcap, bias=bias, sinks=sinks)
        empty = ~allowed.any(-1)
        out[rows] = found.masked_fill(empty[:, None], 0.0).transpose(0, 1)
        lse[rows] = total.masked_fill(empty, empty_lse).transpose(0, 1)
    return out, lse.transpose(-1, -2).contiguous()


def gradients(
    run: Callable[..., tuple[Tensor, Tensor]],
    tensors: tuple[Tensor, ...],
    grad: Tensor,
    grad_lse: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of ``run(*tensors)``, whose rows that are not written (NaN) have none."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    with torch.enable_grad():
        out, lse = run(*leaves)
    written = ~out.isnan()
    outputs, grads = [out[written]], [grad[written]]
    if grad_lse is not None:
        real = lse.isfinite()
        outputs, grads = [*outputs, lse[real]], [*grads, grad_lse[real]]
    return torch.autograd.grad(outputs, leaves, grads)


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Any,
    block_mask: Any,
    scale: float,
    enable_gqa: bool,
    return_aux: Any,
) -> Any:
    """FlexAttention without its kernels: [B, H, S, D], functions called on broadcasting indices."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    assert return_aux.lse
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    sizes = (*q.shape[:3], k.shape[2])
    index = [torch.arange(n).view([-1 if axis == a else 1 for a in range(4)]) for axis, n in enumerate(sizes)]
    score = scale * (q @ k.mT)
    if score_mod is not None:
        score = score_mod(score, *index)
    allowed = torch.ones((), dtype=torch.bool) if block_mask is None else block_mask.mask_mod(*index)
    score = score.masked_fill(~allowed, -torch.inf)
    lse = score.logsumexp(-1)
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    return weight @ v, types.SimpleNamespace(lse=lse)


class FakeCudnn(types.ModuleType):
    """The parts of cudnn-frontend that the adapter touches; graphs compute when executed."""

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

    def __init__(self, **given: Any) -> None:
        self.given, self.ragged = given, None

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("set_"):
            raise AttributeError(name)

        def setter(value: Any) -> FakeNode:
            self.__dict__.setdefault("given", {})[name.removeprefix("set_")] = value
            return self

        return setter

    def set_ragged_offset(self, node: FakeNode) -> None:
        self.ragged = node

    def view(self, memory: dict[int, Tensor], sequence: int, length: int) -> Tensor:
        """One sequence's [H, S, D] in the memory that the graph was given, read by its own strides and offsets."""
        tensor, (_, heads, _, size) = memory[self.given["uid"]], self.given["dim"]
        step, *strides = self.given["stride"]
        start = sequence * step if self.ragged is None else int(memory[self.ragged.given["uid"]][sequence])
        return torch.as_strided(tensor, (heads, length, size), strides, tensor.storage_offset() + start)


class FakeGraph:
    """A forward or a backward, with cuDNN's exclusive left edge."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings, self.executed = settings, 0
        self.inputs: dict[str, Any] = {}
        self.outputs: dict[str, FakeNode] = {}

    def __getattr__(self, name: str) -> Any:
        if name in (
            "validate",
            "build_operation_graph",
            "check_support",
            "build_plans",
            "create_execution_plans",
        ):
            return lambda *_: None
        raise AttributeError(name)

    def get_workspace_size(self) -> int:
        return 0

    def tensor(self, **given: Any) -> FakeNode:
        return FakeNode(**given)

    def sdpa(self, **given: Any) -> tuple[FakeNode, ...]:
        self.inputs, self.outputs = given, {"o": FakeNode(), "stats": FakeNode()}
        return tuple(self.outputs.values())

    def sdpa_backward(self, **given: Any) -> tuple[FakeNode, ...]:
        self.inputs, self.outputs = given, {"dq": FakeNode(), "dk": FakeNode(), "dv": FakeNode()}
        return tuple(self.outputs.values())

    def execute(self, memory: dict[int, Tensor], workspace: Tensor, handle: str) -> None:
        assert handle == "handle" == self.settings["handle"]
        self.executed += 1
        for name in ("q", "k", "v"):
            assert not memory[self.inputs[name].given["uid"]].isnan().any(), (
                "garbage would be multiplied by 0"
            )
        count = self.inputs["q"].given["dim"][0]
        for n in range(count):
            self._sequence(memory, n)

    def _length(self, memory: dict[int, Tensor], side: str, sequence: int) -> int:
        if self.inputs["use_padding_mask"]:
            return int(memory[self.inputs[f"seq_len_{side}"].given["uid"]].flatten()[sequence])
        return self.inputs["q" if side == "q" else "k"].given["dim"][2]  # type: ignore[no-any-return]

    def _sequence(self, memory: dict[int, Tensor], n: int) -> None:
        given, (rows, keys) = self.inputs, (self._length(memory, "q", n), self._length(memory, "kv", n))
        q = given["q"].view(memory, n, rows)
        k, v = (given[name].view(memory, n, keys) for name in "kv")
        left, right = given["diagonal_band_left_bound"], given["diagonal_band_right_bound"]
        shift = keys - rows if given["diagonal_alignment"] == "bottom_right" else 0
        allowed = band_pairs(
            rows, keys, (None if left is None else left - 1, right), shift
        )  # exclusive on the left

        def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return plain(q, k, v, given["attn_scale"], allowed)

        if "stats" in self.outputs:
            out, lse = run(q, k, v)
            self.outputs["o"].view(memory, n, rows).copy_(out)
            self.outputs["stats"].view(memory, n, rows).copy_(lse.unsqueeze(-1))
            return
        _, lse = run(q, k, v)
        stats = given["stats"].view(memory, n, rows)[..., 0]
        assert torch.allclose(stats.masked_fill(stats == torch.inf, -torch.inf), lse)
        grads = gradients(run, (q, k, v), given["dO"].view(memory, n, rows))
        for name, grad, length in zip(("dq", "dk", "dv"), grads, (rows, keys, keys), strict=True):
            self.outputs[name].view(memory, n, length).copy_(grad)
