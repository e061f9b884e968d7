"""The competitors of a benchmark: the library's choice, requested backends, and other implementations.

Every competitor gets the problem in its own best form (layout, masks and block structures are built in advance). It has
a call that is timed, and results that are verified. A competitor that cannot compute a problem is absent, with a
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from undivided import masks
from undivided.arguments import layout as _layout
from undivided.benchmarking.catalogue import Benchmark
from undivided.benchmarking.catalogue.benchmark import Absent
from undivided.errors import InputError
from undivided.functional import attention
from undivided.machine import Machine
from undivided.masks import Mask
from undivided.quantization import dequantize
from undivided.request.call import Call
from undivided.request.normalise import normalise
from undivided.request.problem import Problem
from undivided.request.request import Request, Tensors
from undivided.selection.decision import decide
from undivided.selection.policy import current_policy
from undivided.verification.cases import Case
from undivided.verification.contract import available
from undivided.verification.inputs import Inputs, build

__all__ = [
    "OTHERS",
    "Absent",
    "Competitor",
    "PreparedBenchmark",
    "competitors",
    "make_all",
    "prepare",
    "selectable_backends",
    "wrong_entries",
]

OTHERS = ("sdpa", "math", "onnxruntime", "flex", "vllm")
"""Competitors that are not backends of this library; "flex" compiles for seconds and is timed only if requested, and
"vllm" takes part in the suite "serving" alone."""

_call_sdpa: Callable[..., Tensor] = scaled_dot_product_attention  # typed for calls with tuples and dictionaries

MAX_SCORE_BYTES = 1 << 29
"""Largest score matrix of PyTorch's math path in bytes; it holds a few of them at a time."""


@dataclass(frozen=True, eq=False)
class Competitor:
    """One implementation in a benchmark.

    label: the exact implementation: a backend, a version. prepared: the problem. call: the call that is timed.
    results: computes "out" and, for a backward, "dq", "dk", "dv", each as [B, heads, S, D].
    """

    name: str
    label: str
    prepared: PreparedBenchmark
    call: Callable[[], object]
    results: Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class PreparedBenchmark:
    """A benchmark with its tensors."""

    benchmark: Benchmark
    inputs: Inputs
    call: Call
    tensors: Tensors

    @property
    def problem(self) -> Problem:
        """The problem that is computed."""
        return self.call.problem

    @property
    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as [B, H, S, D], detached."""
        q, k, v = (x.detach() for x in self.tensors.heads_first(self.problem.layout))
        return q, k, v

    @property
    def floating_kv(self) -> tuple[Tensor, Tensor]:
        """k and v as they are stored, detached; quantised numbers in the dtype of q."""
        k, v = self.tensors.k.detach(), self.tensors.v.detach()
        k_scale, v_scale, dtype = self.call.k_scale, self.call.v_scale, self.problem.dtype
        if k_scale is None or v_scale is None:
            return k, v
        return dequantize(k, k_scale, dtype), dequantize(v, v_scale, dtype)

    @property
    def grad_out(self) -> Tensor:
        """The gradient of the output as [B, H, S, D]."""
        return _layout.heads_first(self.inputs.grad_out, self.problem.layout)


def prepare(benchmark: Benchmark, device: str = "cpu") -> PreparedBenchmark:
    """The benchmark with its tensors.

    >>> from undivided.benchmarking.catalogue import benchmarks
    >>> prepare(benchmarks("small")[0]).problem.q_len
    1
    """
    inputs = build(benchmark.case, benchmark.dtype, device=device)
    if benchmark.batch_invariant:
        inputs = replace(inputs, arguments={**inputs.arguments, "batch_invariant": True})
    return PreparedBenchmark(benchmark, inputs, *normalise(Request.from_keywords(**inputs.arguments)))


def selectable_backends(device: str) -> tuple[str, ...]:
    """The backends between which selection chooses on this device; measured ranks are made of these.

    >>> "reference" in selectable_backends("cpu")
    False
    """
    excluded = {"reference", "flex"} | ({"triton"} if device == "cpu" else set())  # interpreted on a CPU
    return tuple(backend.name for backend in available(device) if backend.name not in excluded)


def competitors(
    prepared: PreparedBenchmark,
    backends: Sequence[str] = ("native",),
    others: Sequence[str] = ("sdpa", "math", "onnxruntime"),
) -> tuple[list[Competitor], dict[str, str]]:
    """The competitors, and the reasons of those that are absent.

    The first is "undivided": a whole call with the backend that it chooses. A requested backend that is the chosen one
    is not timed twice.
    """
    makers: dict[str, Callable[[PreparedBenchmark], Competitor]] = {"undivided": partial(_ours, backend=None)}
    makers |= {name: partial(_ours, backend=name) for name in backends}
    if prepared.benchmark.without is not None:
        makers["without"] = partial(_plain_counterpart, case=prepared.benchmark.without)
    makers |= {name: _MAKERS[name] for name in others if name in _MAKERS}
    return make_all(prepared, makers)


def make_all(
    prepared: PreparedBenchmark, makers: Mapping[str, Callable[[PreparedBenchmark], Competitor]]
) -> tuple[list[Competitor], dict[str, str]]:
    """The competitors that these functions make, and the reasons of those that are absent."""
    participants: list[Competitor] = []
    absent: dict[str, str] = {}
    for name, make in makers.items():
        try:
            competitor = make(prepared)
        except Absent as why:
            absent[name] = str(why)
        except InputError:
            raise
        except Exception as error:  # a kernel that fails is absent, and the others are timed
            absent[name] = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        else:
            participants.append(competitor)
    return participants, absent


def wrong_entries(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The entries of a reported case in which a result of this library is wrong."""
    return [entry for entry in case["entries"] if not entry["ok"] and entry["name"] not in OTHERS]


def _ours(prepared: PreparedBenchmark, backend: str | None, name: str | None = None) -> Competitor:
    """A call of the library with a backend, or with the one that it chooses."""
    arguments = dict(prepared.inputs.arguments)
    batch_invariant = arguments.get("batch_invariant")
    policy = current_policy(backend, batch_invariant=batch_invariant)
    decision = decide(prepared.problem, Machine.this(arguments["q"].device), policy)
    if decision.chosen is None:
        raise Absent("; ".join(decision.reasons.get(backend or "", ())) or "no backend can run it")
    default = decide(prepared.problem, decision.machine, current_policy(None, batch_invariant=batch_invariant)).chosen
    if backend is not None and decision.chosen is default:
        raise Absent("undivided chose it")
    call = partial(attention, **arguments, backend=backend)
    layout = prepared.problem.layout
    leaves = tuple(arguments[x] for x in "qkv")
    return _competitor(
        name or backend or "undivided",
        decision.chosen.name,
        prepared,
        call,
        leaves,
        prepared.inputs.grad_out,
        lambda x: _layout.heads_first(x, layout),
    )


def _plain_counterpart(prepared: PreparedBenchmark, case: Case) -> Competitor:
    """The same tensors without the feature of the case."""
    original, benchmark = prepared.inputs.arguments, prepared.benchmark
    mask = original["mask"]
    if case.mask != benchmark.case.mask:
        mask = case.mask() if case.mask else _every_pair(prepared)
    arguments = {
        **original,
        "mask": mask,
        "bias": None,
        "softcap": case.softcap,
        "alibi_slopes": None,
        "sinks": None,
        "dropout_p": case.dropout_p,
        "dropout_seed": case.dropout_seed if case.dropout_p else None,
        "batch_invariant": None,
    }
    if case.quantized != benchmark.case.quantized:
        k, v = prepared.floating_kv
        arguments |= {"k": k, "v": v, "k_scale": None, "v_scale": None}
    if case.shared_pages != benchmark.case.shared_pages:  # each sequence has pages of its own
        table = original["pages"]
        arguments |= {name: original[name][table.flatten().long()] for name in "kv"}
        arguments["pages"] = torch.arange(table.numel(), dtype=table.dtype, device=table.device).view_as(table)
    call, tensors = normalise(Request.from_keywords(**arguments))
    inputs = Inputs(case, arguments, prepared.inputs.grad_out, None)
    return _ours(PreparedBenchmark(prepared.benchmark, inputs, call, tensors), None, "without")


def _every_pair(prepared: PreparedBenchmark) -> Mask | None:
    """The mask that allows every pair: packed tokens are one document."""
    problem = prepared.problem
    return masks.documents([0, problem.q_len], [0, problem.kv_len]) if problem.packed else None


def _competitor(
    name: str,
    label: str,
    prepared: PreparedBenchmark,
    forward: Callable[[], Tensor],
    leaves: tuple[Tensor, ...],
    grad: Tensor,
    heads_first: Callable[[Tensor], Tensor] = lambda x: x,
) -> Competitor:
    """A competitor from its forward; a backward is timed alone, on a retained graph."""
    if not prepared.benchmark.backward:
        return Competitor(name, label, prepared, forward, lambda: {"out": heads_first(forward())})
    out = forward()
    call = partial(torch.autograd.grad, out, leaves, grad, retain_graph=True)

    def results() -> dict[str, Tensor]:
        quantities = (out.detach(), *call())
        return {key: heads_first(x) for key, x in zip(("out", "dq", "dk", "dv"), quantities, strict=True)}

    return Competitor(name, label, prepared, call, results)


def _torch_competitor(name: str, prepared: PreparedBenchmark, forward: Callable[..., Tensor], label: str) -> Competitor:
    """PyTorch's function on the same memory, viewed as [B, H, S, D]."""
    leaves = tuple(x.requires_grad_(prepared.benchmark.backward) for x in prepared.heads_first)
    return _competitor(name, label, prepared, partial(forward, *leaves), leaves, prepared.grad_out)


def _sdpa(prepared: PreparedBenchmark) -> Competitor:
    if prepared.problem.packed:
        return _torch_competitor("sdpa", prepared, _sdpa_per_document(prepared), "torch SDPA, one call per document")
    return _torch_competitor("sdpa", prepared, partial(_call_sdpa, **_sdpa_arguments(prepared)), "torch SDPA")


def _math(prepared: PreparedBenchmark) -> Competitor:
    problem = prepared.problem
    if problem.packed:
        raise Absent("one call per document would be the same as sdpa")
    row_bytes = problem.batch * problem.heads * problem.kv_len * problem.dtype.itemsize
    expanded_keys = 0 if problem.heads == problem.kv_heads else row_bytes * problem.qk_dim
    largest = max(row_bytes * problem.q_len, expanded_keys)
    if largest > MAX_SCORE_BYTES:
        raise Absent(f"its score matrices would take {largest / 2**30:.1f} GiB each")
    arguments = _sdpa_arguments(prepared)

    def forward(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return _call_sdpa(*tensors, **arguments)

    return _torch_competitor("math", prepared, forward, "torch SDPA, math")


def _sdpa_arguments(prepared: PreparedBenchmark) -> dict[str, Any]:
    """The problem as arguments of PyTorch's function; masks and biases become one tensor."""
    problem, call, tensors = prepared.problem, prepared.call, prepared.tensors
    if problem.page_size is not None:
        raise Absent("it does not read pages")
    if call.softcap is not None:
        raise Absent("it has no softcap")
    if call.dropout_p:
        raise Absent("it draws its own dropout pattern, which cannot be verified")
    arguments: dict[str, Any] = {"scale": call.scale, "enable_gqa": problem.heads != problem.kv_heads}
    if problem.mask.kinds == {"causal"} and problem.align != "bottom_right":
        return arguments | {"is_causal": True}
    if problem.mask.kinds:
        heads = problem.heads if problem.mask.kinds & {"dense", "predicate"} else 1
        sizes = (problem.batch, heads, problem.q_len, problem.kv_len)
        arguments["attn_mask"] = call.mask.to_dense(*sizes, tensors.q.device)
    bias = tensors.bias
    if tensors.alibi_slopes is not None:
        form = call.normal_form(tensors.q)
        distance = ((form.q_position + form.shift)[:, :, None] - form.kv_position[:, None, :]).abs()
        slopes = tensors.alibi_slopes[None, :, None, None]
        bias = (-slopes * distance[:, None]).to(problem.dtype)
    if bias is not None:
        if "attn_mask" in arguments:
            bias = bias.masked_fill(~arguments["attn_mask"], -torch.inf)
        arguments["attn_mask"] = bias.detach()
    return arguments


def _sdpa_per_document(prepared: PreparedBenchmark) -> Callable[..., Tensor]:
    """A function with one call per document of a packed batch, the fastest way with PyTorch's function."""
    kinds, features = prepared.problem.mask.kinds, prepared.problem.features - {"backward"}
    if not kinds <= {"documents", "causal"} or features:
        raise Absent("one call per document is timed only on plain and causal documents")
    is_causal = "causal" in kinds
    form = prepared.call.normal_form(prepared.tensors.q)
    lengths = torch.bincount(form.q_sequence.flatten().long()).tolist()

    def forward(*tensors: Tensor) -> Tensor:
        documents = zip(*(x.split(lengths, dim=2) for x in tensors), strict=True)
        return torch.cat([_call_sdpa(*document, is_causal=is_causal) for document in documents], dim=2)

    return forward


def _flex(prepared: PreparedBenchmark) -> Competitor:
    from undivided.backends import flex

    if prepared.benchmark.backward and prepared.problem.device == "cpu":
        raise Absent("FlexAttention has no backward on a CPU")
    reasons = flex.BACKEND.reasons(prepared.problem, Machine.this(prepared.tensors.q.device))
    if reasons:
        raise Absent("; ".join(reasons))
    kernel, layout = flex.bind_kernel(prepared.call, prepared.tensors), prepared.problem.layout
    return _competitor(
        "flex",
        "FlexAttention, compiled",
        prepared,
        lambda: _layout.from_heads_first(kernel(), layout),
        prepared.tensors[:3],
        prepared.inputs.grad_out,
        lambda x: _layout.heads_first(x, layout),
    )


def _onnxruntime(prepared: PreparedBenchmark) -> Competitor:
    from undivided.benchmarking import onnx

    problem = prepared.problem
    if prepared.benchmark.backward:
        raise Absent("it has no backward")
    is_causal = problem.mask.kinds == {"causal"}
    extras = problem.features - {"backward"}
    if (problem.mask.kinds and not is_causal) or extras or problem.packed or problem.q_len != problem.kv_len:
        raise Absent("its MultiHeadAttention is timed only on plain and causal problems")
    attend = onnx.multi_head_attention(prepared.call, prepared.tensors, is_causal)
    return Competitor("onnxruntime", attend.label, prepared, attend.call, lambda: {"out": attend.out()})


_MAKERS: Mapping[str, Callable[[PreparedBenchmark], Competitor]] = {
    "sdpa": _sdpa,
    "math": _math,
    "onnxruntime": _onnxruntime,
    "flex": _flex,
}
