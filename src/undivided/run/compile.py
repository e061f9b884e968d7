"""`attention` as one opaque operator and its backward, for torch.compile, dispatch modes and tensor subclasses.

    undivided::attention            (tensors, the mask's tensors, a spec) -> (out, lse)
    undivided::attention_backward   the same, with out, lse and their gradients -> gradients

An eager call bypasses PyTorch's dispatcher and runs a kernel that reads memory. The operator is used under a
TorchDispatchMode (fake tensors, make_fx, AOT and torch.export, selective checkpointing, FLOP counters), under
``torch.jit.trace``, and for tensors whose class has ``__torch_dispatch__``: they intercept one operator, as with
PyTorch's own attention, and fake tensors get shapes.

The graph contains the operator; validation and selection run inside it, at run time, on the real tensors. So new
lengths do not recompile, a change of policy takes effect, and a wrong argument raises the same `InputError` as in eager
mode. The static part (layout, the mask's structure, which inputs need gradients) is a constant string, the spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.layout import Layout
from undivided.backends._base import Backend
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.quantization import head_size
from undivided.request.call import Call
from undivided.request.checks import check_seed, checked_mask
from undivided.request.normalise import check_kinds_and_sizes
from undivided.request.request import Options, Request, Tensors
from undivided.request.result import lse_dtype
from undivided.run import autograd
from undivided.run.flops import register_if_counting
from undivided.run.prepare import prepare
from undivided.selection import switches as _sdp_switches
from undivided.selection.policy import policy

_library = torch.library.Library("undivided", "DEF")
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, Tensor? alibi_slopes, Tensor[] mask, "
    "Tensor? dropout_seed, Tensor? pages, str spec, float? scale, float? softcap, float dropout_p"
)
_library.define(f"attention({_ARGUMENTS}, Tensor? k_scale, Tensor? v_scale) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward({_ARGUMENTS}, Tensor out, Tensor lse, Tensor grad_out, Tensor? grad_lse) -> Tensor[]"
)


class _Spec(NamedTuple):
    """The static part of a call. `needs` has a letter y or n for each differentiable input."""

    layout: str
    mask: str
    needs: str
    backend: str
    deterministic: str
    return_lse: str
    switches: str = "-"
    """PyTorch's switches when the graph was traced, or "-" for a call that does not depend on them."""
    batch_invariant: str = "None"

    @staticmethod
    def read(text: str) -> _Spec:
        return _Spec(*text.split("|"))

    @property
    def needed(self) -> tuple[bool, ...]:
        return tuple(letter == "y" for letter in self.needs)


def attention(request: Request, switches: str = "-") -> Tensor | tuple[Tensor, Tensor]:
    """The result of the request, from one call of the operator."""
    tensors, options = request.tensors, request.options
    # under torch.jit.trace sizes are tensors
    if not (torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None):
        check_kinds_and_sizes(request)
    mask_text, mask_tensors = checked_mask(options.mask).flatten()
    grad = torch.is_grad_enabled()
    needs = ["y" if grad and t is not None and t.requires_grad else "n" for t in tensors]
    spec = (
        str(options.layout),
        mask_text,
        "".join(needs),
        "" if request.backend is None else str(request.backend),
        str(request.deterministic),
        "y" if options.return_lse else "n",
        switches,
        str(request.batch_invariant),
    )
    seed = _seed(options, tensors.q.device)
    numbers = options.scale, options.softcap, float(options.dropout_p)
    scales = options.k_scale, options.v_scale
    call = (*tensors, mask_tensors, seed, options.pages, "|".join(spec), *numbers, *scales)
    if torch.compiler.is_compiling():
        out, lse = torch.ops.undivided.attention(*call)
    else:
        out, lse = _call_operator(call)
    return (out, lse) if options.return_lse else out


def _seed(options: Options, device: torch.device) -> Tensor | None:
    """The seed as a tensor for the operator; None without dropout."""
    seed = options.dropout_seed
    if isinstance(seed, int) and not 0 <= seed < 2**63:
        check_seed(seed, device)  # raises here, because the values of a tensor are not checked
    if not options.dropout_p:
        return None
    if isinstance(seed, Tensor):
        return seed
    # an int is a constant of the graph; None is drawn inside the graph at every call
    return torch.randint(2**62, (), device=device) if seed is None else torch.tensor(seed, device=device)


def _call_operator(call: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """The result of the operator; InputError if the classes of the tensors or the active modes do not support it."""
    register_if_counting()
    try:
        out, lse = torch.ops.undivided.attention(*call)
    except (AssertionError, NotImplementedError, TypeError) as error:  # what PyTorch raises for that
        kinds = sorted(
            {type(t).__name__ for t in (*call[:6], *call[6], *call[7:9], *call[13:]) if isinstance(t, Tensor)}
        )
        raise InputError(
            "q, k, v and the other tensors",
            "be of classes that take undivided::attention together",
            ", ".join(kinds),
            hint="under a FakeTensorMode every tensor is a fake one: mode.from_tensor(x)",
        ) from error
    return out, lse


def _prepare(*arguments: Any) -> tuple[Backend, Call, Tensors]:
    """The operator's arguments as a checked request with its decision, for the real tensors of this call."""
    mask_tensors, seed, pages, spec_text, scale, softcap, dropout_p, *scales = arguments[6:]
    spec = _Spec.read(spec_text)
    mask, return_lse = Mask.unflatten(spec.mask, mask_tensors), spec.return_lse == "y"
    options = Options(cast(Layout, spec.layout), mask, scale, softcap, dropout_p, seed, return_lse, pages, *scales)
    request = Request(Tensors(*arguments[:6]), options)
    flags: dict[str, Any] = {"None": None, "True": True, "False": False}
    deterministic = flags.get(spec.deterministic, spec.deterministic)
    batch_invariant = flags.get(spec.batch_invariant, spec.batch_invariant)
    switches = ""
    if spec.switches != "-":
        switches = _sdp_switches.combine(spec.switches, _sdp_switches.read())
    allowed = policy(spec.backend or None, deterministic, switches, batch_invariant)
    decision, call, tensors = prepare(request, allowed, spec.needed)
    return decision.backend, call, tensors


@torch.library.impl(_library, "attention", "CompositeExplicitAutograd")
def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        backend, call, tensors = _prepare(*arguments)
        problem = call.problem
        out, lse = autograd.forward(backend, call, tensors)
        if not problem.lse_is_read:  # the fake implementation returns this shape in any case
            shape = problem.batch, problem.heads, problem.q_len
            lse = tensors.q.new_zeros(shape, dtype=lse_dtype(problem.dtype))
    return out.contiguous(), (lse.squeeze(0) if problem.packed else lse).contiguous()


@torch.library.impl(_library, "attention_backward", "CompositeExplicitAutograd")
def _run_backward(*arguments: Any) -> list[Tensor]:
    *given, out, lse, grad_out, grad_lse = arguments
    with torch.no_grad():
        # selected again: out and lse have the same meaning for every backend
        backend, call, tensors = _prepare(*given)
        found = autograd.gradients(backend, call, out, lse, grad_out, grad_lse, *tensors)
    return [_as_gradient(g, t) for g, t, n in zip(found, given[:6], call.needs, strict=True) if n]


def _as_gradient(gradient: Tensor | None, tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if gradient is None else gradient.reshape(tensor.shape).contiguous()


@torch.library.register_fake("undivided::attention", lib=_library)  # type: ignore[untyped-decorator]
def _shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    spec = _Spec.read(rest[6])
    out = q.new_empty((*q.shape[:-1], head_size(v)))
    batch, length, heads, _ = _layout.sizes(q.shape, cast(Layout, spec.layout))
    shape = (heads, length) if spec.layout == "thd" else (batch, heads, length)
    return out, q.new_empty(shape, dtype=lse_dtype(q.dtype))


@torch.library.register_fake("undivided::attention_backward", lib=_library)  # type: ignore[untyped-decorator]
def _gradient_shapes(*arguments: Any) -> list[Tensor]:
    needed = _Spec.read(arguments[9]).needed
    return [t.new_empty(t.shape) for t, n in zip(arguments[:6], needed, strict=True) if n]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors = [*inputs[:6], *inputs[6], inputs[7], inputs[8], *output]
    ctx.save_for_backward(*tensors)
    ctx.mask_tensors, ctx.rest = len(inputs[6]), inputs[9:13]
    ctx.set_materialize_grads(False)
    if _Spec.read(inputs[9]).return_lse != "y":
        ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    saved: Sequence[Tensor | None] = ctx.saved_tensors
    inputs, mask = saved[:6], list(saved[6 : 6 + ctx.mask_tensors])
    seed, pages, out, lse = saved[6 + ctx.mask_tensors :]
    if grad_out is None:
        assert out is not None
        grad_out = torch.zeros_like(out)
    found = iter(
        torch.ops.undivided.attention_backward(*inputs, mask, seed, pages, *ctx.rest, out, lse, grad_out, grad_lse)
    )
    needed = _Spec.read(ctx.rest[0]).needed
    gradients = [next(found) if n else None for n in needed]
    return (*gradients, [None] * len(mask), *[None] * 8)  # 8: the arguments after the mask


torch.library.register_autograd("undivided::attention", _differentiate, setup_context=_save, lib=_library)


def _reshape_like(gradients: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if g is None or t is None else g.reshape(t.shape) for g, t in zip(gradients, tensors, strict=True)]


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], *inputs[6], inputs[7], inputs[8], *inputs[13:])
    ctx.mask_tensors, ctx.rest = len(inputs[6]), inputs[9:13]
    ctx.set_materialize_grads(False)


def _differentiate_backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Derivatives of the backward by the reference, in plain operations that modes and subclasses can intercept."""
    saved: Sequence[Any] = ctx.saved_tensors
    inputs, mask = saved[:6], list(saved[6 : 6 + ctx.mask_tensors])
    seed, pages, _, _, *grads = saved[6 + ctx.mask_tensors :]
    _, call, tensors = _prepare(*inputs, mask, seed, pages, *ctx.rest)
    given = iter(gradients)
    # the bias of `tensors` has four axes
    grad_gradients = _reshape_like([next(given) if n else None for n in call.needs], tensors)
    for_grad_out, for_grad_lse, *found = autograd.double_backward(call, *tensors, *grads, *grad_gradients)
    for_inputs = _reshape_like(found, inputs)
    nothing = [None] * (2 + len(ctx.rest) + 2)  # seed, pages, the rest, out, lse
    return (*for_inputs, [None] * len(mask), *nothing, for_grad_out, for_grad_lse)


torch.library.register_autograd(
    "undivided::attention_backward", _differentiate_backward, setup_context=_save_backward, lib=_library
)
