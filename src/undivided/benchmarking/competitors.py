"""Who takes part in a benchmark: the library's choice, backends asked for, and what else computes the same.

Every competitor is given the problem as it likes it best (its own layout, masks and block structures built beforehand),
and offers a call to be timed and its results to be judged. What it cannot compute it is absent from, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from undivided import _layout
from undivided._call import Call
from undivided._machine import Machine
from undivided._normalise import normalise
from undivided._policy import policy
from undivided._problem import Problem
from undivided._request import Request, Tensors
from undivided._selection import decide
from undivided.benchmarking.catalogue import Benchmark
from undivided.errors import InputError
from undivided.functional import attention
from undivided.verification.cases import Case
from undivided.verification.contract import available
from undivided.verification.inputs import Inputs, build

__all__ = ["OTHERS", "Absent", "Competitor", "Prepared", "competitors", "prepare", "rivals"]

OTHERS = ("sdpa", "math", "onnxruntime", "flex")
"""Competitors that are not backends of this library; "flex" compiles for seconds and takes part only when asked for."""

_attend: Callable[..., Tensor] = scaled_dot_product_attention  # called with tuples and dictionaries

MOST_SCORES = 1 << 29
"""Bytes of scores that PyTorch's math path may hold; it holds a few such tables at a time."""


class Absent(Exception):
    """Why a competitor does not take part."""


@dataclass(frozen=True, eq=False)
class Competitor:
    """One that takes part.

    label: what it is, exactly: a backend, a version. prepared: the problem that it computes. call: what is timed.
    results: "out" and, of a backward, "dq", "dk", "dv", each as [B, heads, S, D].
    """

    name: str
    label: str
    prepared: Prepared
    call: Callable[[], object]
    results: Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A benchmark with its tensors."""

    benchmark: Benchmark
    inputs: Inputs
    call: Call
    tensors: Tensors

    @property
    def problem(self) -> Problem:
        """What is computed."""
        return self.call.problem

    @property
    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as [B, H, S, D], without history."""
        q, k, v = (x.detach() for x in self.tensors.heads_first(self.problem.layout))
        return q, k, v

    @property
    def grad_out(self) -> Tensor:
        """The gradient of the output as [B, H, S, D]."""
        return _layout.heads_first(self.inputs.grad_out, self.problem.layout)


def prepare(benchmark: Benchmark, device: str = "cpu") -> Prepared:
    """Draw the tensors of a benchmark.

    >>> from undivided.benchmarking.catalogue import benchmarks
    >>> prepare(benchmarks("small")[0]).problem.q_len
    1
    """
    inputs = build(benchmark.case, benchmark.dtype, device=device)
    return Prepared(benchmark, inputs, *normalise(Request.of(**inputs.arguments)))


def rivals(device: str) -> tuple[str, ...]:
    """The backends that selection chooses between on this device: what ranks are made of.

    >>> "reference" in rivals("cpu")
    False
    """
    unasked = {"reference", "flex"} | ({"triton"} if device == "cpu" else set())  # there it is interpreted
    return tuple(backend.name for backend in available(device) if backend.name not in unasked)


def competitors(
    prepared: Prepared, backends: Sequence[str] = ("native",), others: Sequence[str] = ("sdpa", "math", "onnxruntime")
) -> tuple[list[Competitor], dict[str, str]]:
    """Those that take part, and why each of the rest does not.

    The first is "undivided": one whole call, the backend chosen. A backend that was asked for and is the chosen one is
    not timed twice.
    """
    found: list[Competitor] = []
    absent: dict[str, str] = {}
    makers: dict[str, Callable[[Prepared], Competitor]] = {"undivided": partial(_ours, backend=None)}
    makers |= {name: partial(_ours, backend=name) for name in backends}
    if prepared.benchmark.without is not None:
        makers["without"] = partial(_without, case=prepared.benchmark.without)
    makers |= {name: _MAKERS[name] for name in others}
    for name, make in makers.items():
        try:
            made = make(prepared)
        except Absent as why:
            absent[name] = str(why)
        except InputError:
            raise
        except Exception as error:  # a kernel that fails takes no part, and the others are timed
            absent[name] = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        else:
            found.append(made)
    return found, absent


# the library


def _ours(prepared: Prepared, backend: str | None, name: str | None = None) -> Competitor:
    arguments = dict(prepared.inputs.arguments)
    decision = decide(prepared.problem, Machine.this(arguments["q"].device), policy(backend))
    if decision.chosen is None:
        raise Absent("; ".join(decision.reasons.get(backend or "", ())) or "no backend can run it")
    by_itself = decide(prepared.problem, decision.machine, policy(None)).chosen
    if backend is not None and decision.chosen is by_itself:
        raise Absent("it is what undivided chose")
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


def _without(prepared: Prepared, case: Case) -> Competitor:
    """The same problem without what the case adds, over the same tensors."""
    arguments = {
        **prepared.inputs.arguments,
        "mask": case.mask() if case.mask else None,
        "bias": None,
        "softcap": case.softcap,
        "alibi_slopes": None,
        "sinks": None,
        "dropout_p": case.dropout_p,
        "dropout_seed": None,
    }
    call, tensors = normalise(Request.of(**arguments))
    inputs = Inputs(case, arguments, prepared.inputs.grad_out, None)
    return _ours(Prepared(prepared.benchmark, inputs, call, tensors), None, "without")


def _competitor(
    name: str,
    label: str,
    prepared: Prepared,
    forward: Callable[[], Tensor],
    leaves: tuple[Tensor, ...],
    grad: Tensor,
    heads_first: Callable[[Tensor], Tensor] = lambda x: x,
) -> Competitor:
    """A competitor from its forward; the backward is timed alone, over a graph that is kept."""
    if not prepared.benchmark.backward:
        return Competitor(name, label, prepared, forward, lambda: {"out": heads_first(forward())})
    out = forward()
    call = partial(torch.autograd.grad, out, leaves, grad, retain_graph=True)

    def results() -> dict[str, Tensor]:
        found = (out.detach(), *call())
        return {key: heads_first(x) for key, x in zip(("out", "dq", "dk", "dv"), found, strict=True)}

    return Competitor(name, label, prepared, call, results)


# PyTorch


def _torch(name: str, prepared: Prepared, forward: Callable[..., Tensor], label: str) -> Competitor:
    """PyTorch's function on the same memory as [B, H, S, D]."""
    leaves = tuple(x.requires_grad_(prepared.benchmark.backward) for x in prepared.heads_first)
    return _competitor(name, label, prepared, partial(forward, *leaves), leaves, prepared.grad_out)


def _sdpa(prepared: Prepared) -> Competitor:
    if prepared.problem.packed:
        return _torch("sdpa", prepared, _documents(prepared), "torch SDPA, a document at a time")
    return _torch("sdpa", prepared, partial(_attend, **_sdpa_arguments(prepared)), "torch SDPA")


def _math(prepared: Prepared) -> Competitor:
    problem = prepared.problem
    if problem.packed:
        raise Absent("a document at a time it is as sdpa")
    row = problem.batch * problem.heads * problem.kv_len * problem.dtype.itemsize
    expanded = 0 if problem.heads == problem.kv_heads else row * problem.qk_dim
    largest = max(row * problem.q_len, expanded)
    if largest > MOST_SCORES:
        raise Absent(f"its tables would take {largest / 2**30:.1f} GiB each")
    arguments = _sdpa_arguments(prepared)

    def forward(*tensors: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return _attend(*tensors, **arguments)

    return _torch("math", prepared, forward, "torch SDPA, math")


def _sdpa_arguments(prepared: Prepared) -> dict[str, Any]:
    """The problem in the words of PyTorch's function; masks and biases as one tensor, built here."""
    problem, call, tensors = prepared.problem, prepared.call, prepared.tensors
    if problem.page_size is not None:
        raise Absent("it reads no pages")
    if call.softcap is not None:
        raise Absent("it has no softcap")
    if call.dropout_p:
        raise Absent("it draws a pattern of its own, which nothing can check")
    arguments: dict[str, Any] = {"scale": call.scale, "enable_gqa": problem.heads != problem.kv_heads}
    if problem.mask.kinds == {"causal"} and problem.align != "bottom_right":
        return arguments | {"is_causal": True}
    if problem.mask.kinds:
        heads = problem.heads if problem.mask.kinds & {"dense", "predicate"} else 1
        sizes = (problem.batch, heads, problem.q_len, problem.kv_len)
        arguments["attn_mask"] = call.mask.to_dense(*sizes, tensors.q.device)
    bias = tensors.bias
    if tensors.alibi_slopes is not None:
        form = call.normal_form(tensors.q.device)
        distance = ((form.q_position + form.shift)[:, :, None] - form.kv_position[:, None, :]).abs()
        slopes = tensors.alibi_slopes[None, :, None, None]
        bias = (-slopes * distance[:, None]).to(problem.dtype)
    if bias is not None:
        if "attn_mask" in arguments:
            bias = bias.masked_fill(~arguments["attn_mask"], -torch.inf)
        arguments["attn_mask"] = bias.detach()
    return arguments


def _documents(prepared: Prepared) -> Callable[..., Tensor]:
    """One call for each document of a packed batch: the strongest that PyTorch's function offers."""
    kinds, features = prepared.problem.mask.kinds, prepared.problem.features - {"backward"}
    if not kinds <= {"documents", "causal"} or features:
        raise Absent("a document at a time it is timed on plain and causal documents only")
    is_causal = "causal" in kinds
    form = prepared.call.normal_form(prepared.tensors.q.device)
    lengths = torch.bincount(form.q_sequence.flatten().long()).tolist()

    def forward(*tensors: Tensor) -> Tensor:
        parts = zip(*(x.split(lengths, dim=2) for x in tensors), strict=True)
        return torch.cat([_attend(*part, is_causal=is_causal) for part in parts], dim=2)

    return forward


def _flex(prepared: Prepared) -> Competitor:
    from undivided.backends import flex

    if prepared.benchmark.backward and prepared.problem.device == "cpu":
        raise Absent("FlexAttention has no backward on a CPU")
    reasons = flex.BACKEND.reasons(prepared.problem, Machine.this(prepared.tensors.q.device))
    if reasons:
        raise Absent("; ".join(reasons))
    call = flex.prepared(prepared.call, prepared.tensors)
    leaves = prepared.tensors.heads_first(prepared.problem.layout)
    return _competitor("flex", "FlexAttention, compiled", prepared, call, leaves, prepared.grad_out)


def _onnxruntime(prepared: Prepared) -> Competitor:
    from undivided.benchmarking import onnx

    problem = prepared.problem
    if prepared.benchmark.backward:
        raise Absent("it has no backward")
    is_causal = problem.mask.kinds == {"causal"}
    extras = problem.features - {"backward"}
    if (problem.mask.kinds and not is_causal) or extras or problem.packed or problem.q_len != problem.kv_len:
        raise Absent("its MultiHeadAttention is timed on plain and causal problems only")
    try:
        attend = onnx.multi_head_attention(prepared.call, prepared.tensors, is_causal)
    except onnx.Unavailable as why:
        raise Absent(str(why)) from None
    return Competitor("onnxruntime", attend.label, prepared, attend.call, lambda: {"out": attend.out()})


_MAKERS: Mapping[str, Callable[[Prepared], Competitor]] = {
    "sdpa": _sdpa,
    "math": _math,
    "onnxruntime": _onnxruntime,
    "flex": _flex,
}
