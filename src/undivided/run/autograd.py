"""Running a backend under autograd: first derivatives by the backend, all others by the reference.

forward            the chosen backend
backward           the same backend, by recomputation from (out, lse)
double backward    the reference, block by block, whatever ran before
forward mode, vmap and torch.func    the reference as plain tensor operations
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from undivided.arguments import layout as _layout
from undivided.arguments.checks import check_tensor
from undivided.arguments.tensors import is_autocast, is_dtensor, is_observed, versions
from undivided.backends import reference
from undivided.backends._base import Backend, Gradients
from undivided.backends.shared.leaves import leaf_gradients
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import Result, lse_dtype
from undivided.run import large_scores
from undivided.run.batches import map_hidden_batch, vmap_rule

_TENSOR_COUNT = len(Tensors._fields)
_functorch_stack = torch._C._functorch.peek_interpreter_stack
any_autocast = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device: a third of the cost of the query for one device, and mostly False."""


def run(backend: Backend, call: Call, tensors: Tensors) -> Tensor | tuple[Tensor, Tensor]:
    """What `attention` returns: out in the caller's layout, and lse [B, H, Sq] or [H, T] if it was requested."""
    features = call.problem.features
    if _functorch_stack() is not None or has_tangent(tensors):
        result = run_plain_operations(call, tensors)
        return public_shapes(result, call.problem) if "lse" in features else result.out
    if "backward" not in features:
        if tensors.q.is_meta or any_autocast() or is_on_other_gpu(tensors.q):
            result = forward(backend, call, tensors)
        else:
            result = backend.forward(call, tensors)
        return public_shapes(result, call.problem) if "lse" in features else result.out
    inputs: tuple[Tensor | None, ...] = tensors
    if inputs[3] is inputs[4] is inputs[5] is None:
        inputs = inputs[:3]  # every argument of an autograd.Function costs time, even None
        if "lse" not in features and (out_BHSD := backend.recorded(call, tensors)) is not None:
            return _with_second_derivative(out_BHSD, backend, call)
    return _apply((backend, call), *inputs)  # type: ignore[no-untyped-call, no-any-return]


def _no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which torch.autocast is off for the device."""
    return torch.autocast(device.type, enabled=False) if is_autocast(device) else nullcontext()


def run_plain_operations(call: Call, tensors: Tensors) -> Result:
    """The result by tensor operations that have every derivative and batching rule."""
    with _no_autocast(tensors.q.device):
        return reference.plain_operations(call, tensors)


def public_shapes(result: Result, problem: Problem) -> tuple[Tensor, Tensor]:
    """(out, lse) in the shapes for the caller: lse is [H, T] in thd."""
    return result.out, result.lse.squeeze(0) if problem.packed else result.lse


def _with_second_derivative(out_BHSD: Tensor, backend: Backend, call: Call) -> Tensor:
    """The output that PyTorch recorded, in the caller's layout. Its gradients have no derivative: if one may be needed,
    those of `_AttentionBackward` replace them."""
    assert out_BHSD.grad_fn is not None
    out_BHSD.grad_fn.register_hook(functools.partial(_replace_gradients, backend, call))
    return _layout.from_heads_first(out_BHSD, call.problem.layout).contiguous()


def _replace_gradients(
    backend: Backend, call: Call, grads: tuple[Tensor | None, ...], grad_outputs: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...] | None:
    """Called after the node's backward; reads the tensors that the node saved, so that none are kept twice."""
    if not torch.is_grad_enabled() or (grad := grad_outputs[0]) is None:
        return None
    node = torch._C._current_autograd_node()
    q, k, v, out, lse = (getattr(node, f"_saved_{name}") for name in ("query", "key", "value", "output", "logsumexp"))
    call = call.with_problem(call.problem._replace(layout="bhsd"))
    arguments = (backend, call, out, lse, grad, None, q, k, v)
    recorded = map_hidden_batch(_AttentionBackward.apply, *arguments, None, None, None)[:3]
    return tuple(None if old is None else new for old, new in zip(grads, recorded, strict=True))


def is_on_other_gpu(q: Tensor) -> bool:
    """Whether a tensor is on a GPU other than the current one, on which Triton, cuDNN and others launch kernels."""
    return q.is_cuda and q.get_device() != torch.cuda.current_device()


def forward(backend: Backend, call: Call, tensors: Tensors) -> Result:
    """The result of a backend's forward on the device of the tensors, with autocast off, because backends choose their
    own precision."""
    q = tensors.q
    if is_on_other_gpu(q):
        with torch.cuda.device(q.device):
            return forward(backend, call, tensors)
    if q.is_meta:
        problem = call.problem
        out = q.new_empty((*q.shape[:-1], problem.v_dim))
        return Result(out, q.new_empty((problem.batch, problem.heads, problem.q_len), dtype=lse_dtype(problem.dtype)))
    if any_autocast():
        with torch.autocast(q.device.type, enabled=False):
            return backend.forward(call, tensors)
    return backend.forward(call, tensors)


def backward(
    backend: Backend, call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """The gradients of a backend's backward on the device of the tensors, with autocast off."""
    if is_on_other_gpu(tensors.q):
        with torch.cuda.device(tensors.q.device):
            return backward(backend, call, tensors, result, grad_out, grad_lse)
    if tensors.q.is_meta:
        return [
            torch.empty_like(t) if t is not None and needed else None
            for t, needed in zip(tensors, call.needs, strict=True)
        ]
    if any_autocast():
        with torch.autocast(tensors.q.device.type, enabled=False):
            return backend.backward(call, tensors, result, grad_out, grad_lse)
    return backend.backward(call, tensors, result, grad_out, grad_lse)


def cast_under_autocast(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None = None, cast: Callable[..., Tensor] = Tensor.to
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, cast under autocast as for scaled_dot_product_attention: all but float64, to the autocast dtype.
    Quantised k and v, which have a scale, stay as they are.

    cast: returns a tensor in a dtype, ``cast(tensor, dtype)``.
    """
    if not any_autocast() or not isinstance(q, Tensor) or not is_autocast(q.device):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    if k_scale is not None:
        return _cast("q", q, dtype, cast), k, v
    q, k, v = (_cast(name, t, dtype, cast) for name, t in (("q", q), ("k", k), ("v", v)))
    return q, k, v


def _cast(name: str, tensor: Tensor, dtype: torch.dtype, cast: Callable[..., Tensor]) -> Tensor:
    if not isinstance(tensor, Tensor) or tensor.dtype == dtype:
        return tensor
    if not is_dtensor(tensor):
        check_tensor(name, tensor)
    return cast(tensor, dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


def has_tangent(tensors: Tensors) -> bool:
    """Whether forward-mode differentiation is active; like torch.func, it needs plain operations."""
    return forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )


class _Attention(torch.autograd.Function):
    """The chosen backend as one differentiable operation."""

    @staticmethod
    def forward(
        ctx: Any, backend_and_call: tuple[Backend, Call], *inputs: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        backend, call = backend_and_call
        out, lse = public_shapes(forward(backend, call, Tensors(*inputs)), call.problem)  # type: ignore[arg-type]
        ctx.save_for_backward(*inputs, out, lse)
        ctx.prepared = backend, call, unsaved_state(call)
        ctx.set_materialize_grads(False)
        return (out, lse) if "lse" in call.problem.features else out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        # compiled autograd: a kernel reads memory, which a traced tensor does not have
        if torch.compiler.is_compiling():
            from undivided.arguments import _graph_break

            derivatives: tuple[Tensor | None, ...] = _graph_break.call(
                _Attention.backward, (ctx, grad_out, grad_lse), {}
            )
            return derivatives
        *inputs, out, lse = ctx.saved_tensors  # raises PyTorch's error if the graph was freed
        backend, call, before = ctx.prepared
        inputs[:3], out = _as_saved(call.problem, *inputs[:3]), out.contiguous()
        count, lse = len(inputs), lse.contiguous()
        if grad_out is None and grad_lse is None:
            free_prepared(ctx)
            return (None,) * (1 + count)
        inputs += [None] * (_TENSOR_COUNT - count)
        check_unchanged(call, before)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        arguments = (backend, call, out, lse, grad_out, grad_lse, *inputs)
        found = map_hidden_batch(_gradients_to_derive(), *arguments)[:count]
        free_prepared(ctx)
        return (None, *found)


_keeps_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


def free_prepared(ctx: Any) -> None:
    """Free `ctx.prepared`, which holds the mask and the pages, where PyTorch frees the saved tensors: at the end of a
    backward without ``retain_graph``. The output and the loss may live longer."""
    if not _keeps_graph():
        ctx.prepared = None


def _as_saved(problem: Problem, *operands: Tensor) -> list[Tensor]:
    """q, k and v with the contiguous rows that were saved: hooks for saved tensors may return others.

    Raises:
        RuntimeError: a hook returned another dtype.
    """
    for name, tensor in zip("qkv", operands, strict=True):
        if tensor.dtype != problem.dtype:
            raise RuntimeError(f"a hook for saved tensors returned {name} in {tensor.dtype}, not in {problem.dtype}")
    return [t if t.stride(-1) == 1 or "strided" in problem.features else t.contiguous() for t in operands]


_apply = super(torch.autograd.Function, _Attention).apply
"""`_Attention.apply` without its checks for torch.func: they cost as much as the rest, and `run` has done them."""


def unsaved_state(call: Call) -> object:
    """What changes with the tensors that autograd does not save: those of the mask, and pages."""
    mask, pages = call.mask, call.pages
    return mask.state() if mask.parts else (), None if pages is None else versions((pages,))


def check_unchanged(call: Call, before: object) -> None:
    """RuntimeError if the mask or the pages were changed in place since `before`, an `unsaved_state`."""
    if unsaved_state(call) != before:
        raise RuntimeError(
            "the mask's tensors (lengths, cu_seqlens, tensors of a predicate) or the pages were changed in place "
            "between forward and backward; pass a clone, or call backward first"
        )


def gradients(
    backend: Backend,
    call: Call,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    *inputs: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs, from out, lse and their gradients in the caller's shapes."""
    for name, grad in (("grad_out", grad_out), ("grad_lse", grad_lse)):
        if grad is not None:
            check_tensor(name, grad)
    if is_observed(grad_out, grad_lse, None):
        backend = reference.BACKEND  # plain operations, for dispatch modes and wrapped gradients
    if call.problem.packed:
        lse, grad_lse = lse.unsqueeze(0), None if grad_lse is None else grad_lse.unsqueeze(0)
    tensors, result = Tensors._make(inputs), Result(out, lse)
    rows = None
    if backend is not reference.BACKEND:
        rows = large_scores.rows_beyond(call, tensors, lse, grad_out, grad_lse)
    if rows is None:
        return tuple(backward(backend, call, tensors, result, grad_out, grad_lse))
    others = large_scores.without_rows(grad_out, rows, call)
    others_lse = None if grad_lse is None else grad_lse.masked_fill(rows, 0.0)
    found = backward(backend, call, tensors, result, others, others_lse)
    with _no_autocast(out.device):
        return tuple(large_scores.add_rows(found, rows, call, tensors, result, grad_out, grad_lse))


def _gradients_to_derive() -> Callable[..., Sequence[Tensor | None]]:
    """`gradients`, as an operation with a derivative and a batching rule if either may be needed."""
    if torch.is_grad_enabled() or _functorch_stack() is not None:
        return _AttentionBackward.apply
    return gradients


class _AttentionBackward(torch.autograd.Function):
    """The backward as a separate operation, so that it has a derivative and a batching rule."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        return gradients(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        _, call, _, _, grad_out, grad_lse, *tensors = inputs
        ctx.save_for_backward(*tensors, grad_out, grad_lse)
        ctx.prepared = call, unsaved_state(call)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grad_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        call, before = ctx.prepared
        check_unchanged(call, before)
        derivatives = double_backward(call, *saved, *grad_gradients)
        free_prepared(ctx)
        return (None,) * 4 + derivatives

    @staticmethod
    def vmap(info: Any, axes: tuple[Any, ...], *arguments: Any) -> Any:
        return vmap_rule(_AttentionBackward, info, axes, arguments)


class _DoubleBackward(torch.autograd.Function):
    """The double backward as a separate operation, so that it has a batching rule."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor | None, ...]:
        return _double_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        """Saves nothing: if a third derivative may follow, `_recorded_double_backward` runs instead."""

    @staticmethod
    def vmap(info: Any, axes: tuple[Any, ...], *arguments: Any) -> Any:
        return vmap_rule(_DoubleBackward, info, axes, arguments)


def double_backward(call: Call, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The derivatives of the backward with respect to (grad_out, grad_lse, *inputs). `tensors`: the inputs, grad_out,
    grad_lse, and the gradients of the backward's results."""
    assert tensors[0] is not None
    derive = _recorded_double_backward if torch.is_grad_enabled() else _DoubleBackward.apply
    with _no_autocast(tensors[0].device):
        return map_hidden_batch(derive, call, *tensors)


def _double_backward(call: Call, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Derivatives for (grad_out, grad_lse, *inputs), block by block: O(S * block) memory. `tensors`: as in
    `double_backward`."""
    (*inputs, grad_out, grad_lse), grad_gradients = tensors[: _TENSOR_COUNT + 2], tensors[_TENSOR_COUNT + 2 :]
    if grad_lse is not None and call.problem.packed:
        grad_lse = grad_lse.unsqueeze(0)
    assert grad_out is not None
    for_inputs, for_grad_out, for_grad_lse = reference.BACKEND.double_backward(
        call, Tensors._make(inputs), grad_out, grad_lse, grad_gradients
    )
    if for_grad_lse is not None and call.problem.packed:
        for_grad_lse = for_grad_lse.squeeze(0)
    return for_grad_out, for_grad_lse, *for_inputs


def _recorded_double_backward(call: Call, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The same as operations that autograd records, for a third derivative: O(S^2) memory."""
    # views, so that one tensor given as q, k and v counts as three inputs
    *inputs, grad_out, grad_lse = (None if t is None else t.view_as(t) for t in tensors[: _TENSOR_COUNT + 2])
    grad_gradients = tensors[_TENSOR_COUNT + 2 :]
    result = reference.plain_operations(call, Tensors._make(inputs))
    out, lse = public_shapes(result, call.problem)
    outputs = [(o, g) for o, g in ((out, grad_out), (lse, grad_lse)) if g is not None]
    first = leaf_gradients([o for o, _ in outputs], [g for _, g in outputs], inputs, create_graph=True)
    pairs = [
        (g, o)
        for g, o in zip(first, grad_gradients, strict=True)
        if g is not None and g.requires_grad and o is not None
    ]
    derivatives = leaf_gradients(
        [g for g, _ in pairs], [o for _, o in pairs], [grad_out, grad_lse, *inputs], create_graph=True
    )
    return tuple(derivatives)
