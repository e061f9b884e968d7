"""`attention` as one opaque operator and its backward, for torch.compile, dispatch modes and tensor subclasses.

    undivided::attention            (tensors, the mask's tensors, a spec) -> (out, lse)
    undivided::attention_backward   the same, with out, lse and their gradients -> a gradient for each tensor

An eager call bypasses PyTorch's dispatcher and runs a kernel that reads memory. The operator is used under a
TorchDispatchMode (fake tensors, make_fx, AOT and torch.export, selective checkpointing, FLOP counters), under
``torch.jit.trace``, and for tensors whose class has ``__torch_dispatch__``: they intercept one operator, as with
PyTorch's own attention, and fake tensors get shapes.

The graph contains the operator; validation and selection run inside it, at run time, on the real tensors. So new
lengths do not recompile, a change of policy takes effect, and a wrong argument raises the same `InputError` as in eager
mode. The static part (layout, the mask's structure, which inputs need gradients) is a constant string, the spec. The
ints of a mask, such as the longest document, are arguments of their own, which may be symbolic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.checks import check_device, check_mask_devices
from undivided.arguments.layout import LAYOUTS, Layout
from undivided.arguments.tensors import has_dispatch
from undivided.errors import InputError
from undivided.masks._predicate import keep_with
from undivided.quantization import head_size
from undivided.request.call import Call
from undivided.request.checks import checked_mask
from undivided.request.normalise import check_types
from undivided.request.request import OPTIONAL_TENSORS, Options, Request, Tensors
from undivided.request.result import lse_dtype
from undivided.request.seed import check_seed, draw_seed
from undivided.run import autograd, onnx_export, repeated_operator, shared_masks
from undivided.run.flop_counter import register_if_counting
from undivided.run.operator_arguments import (
    ANY_SWITCHES,
    FLAGS,
    NO_BAR,
    SCHEMA,
    Arguments,
    BackwardArguments,
    SavedArguments,
    Spec,
)
from undivided.run.prepare import prepare
from undivided.selection import switches as _sdp_switches
from undivided.selection.decision import Decision
from undivided.selection.policy import Policy, check_backend, check_flag, current_policy

_TENSOR_COUNT = len(Tensors._fields)
_library = torch.library.Library("undivided", "DEF")
_library.define(f"attention({SCHEMA}, Tensor? k_scale, Tensor? v_scale) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward({SCHEMA}, Tensor out, Tensor lse, Tensor grad_out, Tensor? grad_lse) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"  # Inductor's C++ wrapper ends the process for lists of one
)


def attention(request: Request, switches: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """The result of the request, from one call of the operator.

    switches: PyTorch's, for a call that depends on them.
    """
    tensors, options = request.tensors, request.options
    if torch.compiler.is_compiling():
        check_types(request)
    elif request.backend is not None:  # a graph's backend is checked at run time
        check_backend(request.backend)
    check_flag("deterministic", request.deterministic)
    check_flag("batch_invariant", request.batch_invariant)
    mask = checked_mask(options.mask)
    if onnx_export.is_exporting():
        return onnx_export.attention(request, mask)
    mask_numbers: list[int] = []
    mask_text, mask_tensors = mask.flatten(mask_numbers)
    # AOTInductor's packages pass an empty list as None, so lists get an entry that the mask does not read
    mask_numbers = mask_numbers or [0]
    spec = _spec(request, mask_text, switches)
    seed = _seed(options, tensors.q.device)
    handle = None
    if torch.compiler.is_compiling() and mask_tensors and "y" in spec.needs:
        handle = shared_masks.handle(mask_text, mask_tensors, mask_numbers)
    arguments = Arguments(
        *tensors,
        mask=mask_tensors or [tensors.q],
        dropout_seed=seed,
        pages=options.pages,
        spec="|".join(spec),
        scale=options.scale,
        softcap=options.softcap,
        dropout_p=float(options.dropout_p),
        numbers=mask_numbers,
        mask_handle=handle,
        k_scale=options.k_scale,
        v_scale=options.v_scale,
    )
    if torch.compiler.is_compiling():
        out, lse = torch.ops.undivided.attention(*arguments)
    else:
        out, lse = _call_operator(arguments)
    return (out, lse) if options.return_lse else out


def _spec(request: Request, mask_text: str, switches: str | None) -> Spec:
    """The static part of a request, whose mask has this text."""
    # torch.jit.trace records again without gradients, and requires the same graph
    may_need = torch.is_grad_enabled() and torch._C._get_tracing_state() is None
    needs = ["y" if may_need and t is not None and t.requires_grad else "n" for t in request.tensors]
    return Spec(
        layout=str(request.options.layout).replace("|", NO_BAR),
        mask=mask_text,
        needs="".join(needs),
        backend="" if request.backend is None else f"={request.backend}",
        deterministic=str(request.deterministic),
        return_lse="y" if request.options.return_lse else "n",
        switches=ANY_SWITCHES if switches is None else switches,
        batch_invariant=str(request.batch_invariant),
    )


def _seed(options: Options, device: torch.device) -> Tensor | None:
    """The seed as a tensor for the operator; None without dropout."""
    seed = options.dropout_seed
    if not isinstance(seed, Tensor):
        check_seed(seed, device)  # from here on the seed is a tensor, whose value is not checked
    if not options.dropout_p:
        return None
    if isinstance(seed, Tensor):
        return seed
    # an int is a constant of the graph; None is drawn inside the graph at every call
    return draw_seed(device) if seed is None else torch.tensor(seed, device=device)


def _call_operator(arguments: Arguments) -> tuple[Tensor, Tensor]:
    """The result of the operator; InputError if the classes of the tensors or the active modes do not support it."""
    register_if_counting()
    try:
        out, lse = torch.ops.undivided.attention(*arguments)
    except (AssertionError, NotImplementedError, TypeError) as error:  # what PyTorch raises for such classes and modes
        tensors = (*arguments.saved, arguments.k_scale, arguments.v_scale)
        kinds = sorted({type(tensor).__name__ for tensor in tensors if isinstance(tensor, Tensor)})
        raise InputError(
            "q, k, v and the other tensors",
            "be of classes that take undivided::attention together",
            ", ".join(kinds),
            hint="under a FakeTensorMode every tensor is a fake one: mode.from_tensor(x)",
        ) from error
    return out, lse


def _policy(spec: Spec) -> Policy:
    """The backends that the caller allows where the graph runs."""
    switches = ""
    if spec.switches != ANY_SWITCHES:
        switches = spec.switches or _sdp_switches.read()
    return current_policy(spec.requested_backend, FLAGS[spec.deterministic], FLAGS[spec.batch_invariant], switches)


def _prepare(args: Arguments) -> tuple[Decision, Call, Tensors]:
    """(decision, call, tensors) of the operator's arguments: the request, checked and decided on the real tensors."""
    spec = Spec.read(args.spec)
    options = Options(
        layout=cast(Layout, spec.layout),
        mask=shared_masks.read(args.mask_handle, spec.mask, args.mask, args.numbers),
        scale=args.scale,
        softcap=args.softcap,
        dropout_p=args.dropout_p,
        dropout_seed=args.dropout_seed,
        return_lse=spec.return_lse == "y",
        pages=args.pages,
        k_scale=args.k_scale,
        v_scale=args.v_scale,
    )
    return prepare(Request(args.tensors, options), _policy(spec), spec.needed)


@torch.library.impl(_library, "attention", "CompositeExplicitAutograd")
def _run(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator; lse is a tensor without elements if nothing reads it."""
    args = Arguments(*arguments)
    call_key = repeated_operator.call_key(args)
    if call_key is not None:
        same = repeated_operator.run(call_key, args, _policy(Spec.read(args.spec)))
        if same is not None:
            return same, _empty_lse(args.q)
    if autograd.has_tangent(args.tensors):
        must = "have no tangents where a recorded graph runs: its operator has no forward-mode derivative"
        raise InputError("q, k, v and the other tensors", must, "dual tensors", "torch.func.jvp, or the eager function")
    with torch.no_grad():
        decision, call, tensors = _prepare(args)
        problem = call.problem
        out, lse = autograd.forward(decision.backend, call, tensors)
        if call_key is not None:
            repeated_operator.keep(call_key, args, decision, call, tensors)
        if not problem.lse_is_read:
            return out.contiguous(), _empty_lse(args.q)
    lse = (lse.squeeze(0) if problem.packed else lse).contiguous()
    keep_with(lse, call.mask.parts)  # the backward pass reads lse
    return out.contiguous(), lse


def _run_transformed(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Under torch.func in a compiled function, the plain operations that an eager call has there."""
    args = Arguments(*arguments)
    _, call, tensors = _prepare(args)
    return autograd.public_shapes(autograd.run_plain_operations(call, tensors), call.problem)


_library.impl("attention", _run_transformed, "FuncTorchDynamicLayerFrontMode")


@torch.library.impl(_library, "attention_backward", "CompositeExplicitAutograd")
def _run_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """A gradient for each of `Tensors`; a tensor without elements if it is not needed."""
    args, out, lse, grad_out, grad_lse = BackwardArguments.read(arguments)
    with torch.no_grad():
        # the backend is selected again and may be another: out and lse have the same meaning for every backend
        decision, call, tensors = _prepare(args)
        backend = decision.backend
        if lse.numel() == 0:
            out, lse = autograd.public_shapes(autograd.forward(backend, call, tensors), call.problem)
        gradients = autograd.gradients(backend, call, out, lse, grad_out, grad_lse, *tensors)
    results = []
    for gradient, tensor, is_needed in zip(gradients, args.tensors, call.needs, strict=True):
        if not is_needed or tensor is None:
            results.append(_empty_gradient(args.q))
            continue
        if gradient is None or tensor.numel() == 0:
            gradient = torch.zeros_like(tensor)
        results.append(gradient.reshape(tensor.shape).contiguous())
    return tuple(results)


def _empty_lse(q: Tensor) -> Tensor:
    """In place of a log-sum-exp that nothing reads."""
    return q.new_empty(0, dtype=lse_dtype(q.dtype))


def _empty_gradient(q: Tensor) -> Tensor:
    """In place of a gradient that is not needed."""
    return q.new_empty(0)


@torch.library.register_fake("undivided::attention", lib=_library)  # type: ignore[untyped-decorator]
def _shapes(*arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator without their values."""
    args = Arguments(*arguments)
    q, spec = args.q, Spec.read(args.spec)
    if not has_dispatch(q):
        _check_devices(args)
    out = q.new_empty((*q.shape[:-1], head_size(args.v)))
    if not spec.reads_lse:
        return out, _empty_lse(q)
    layout = cast(Layout, spec.layout)
    if layout not in LAYOUTS or q.dim() != _layout.axis_count(layout):
        return out, q.new_empty(q.shape[:-1], dtype=lse_dtype(q.dtype))  # the operator refuses it at run time
    batch, length, heads, _ = _layout.sizes(q.shape, layout)
    shape = (heads, length) if layout == "thd" else (batch, heads, length)
    return out, q.new_empty(shape, dtype=lse_dtype(q.dtype))


def _check_devices(args: Arguments) -> None:
    """InputError if a tensor is not on the device of q: for one on the meta device PyTorch computes no more than the
    shapes."""
    named = dict(zip(("k", "v", *OPTIONAL_TENSORS), args.tensors[1:], strict=True))
    named |= {"pages": args.pages, "k_scale": args.k_scale, "v_scale": args.v_scale}
    for name, tensor in named.items():
        if tensor is not None:
            check_device(name, tensor, args.q.device)
    check_mask_devices("mask", args.mask, args.q.device)


@torch.library.register_fake("undivided::attention_backward", lib=_library)  # type: ignore[untyped-decorator]
def _gradient_shapes(*arguments: Any) -> tuple[Tensor, ...]:
    """The results of the backward without their values."""
    args = BackwardArguments.read(arguments).of_forward
    needed = zip(args.tensors, Spec.read(args.spec).needed, strict=True)
    return tuple(
        [t.new_empty(t.shape) if is_needed and t is not None else _empty_gradient(args.q) for t, is_needed in needed]
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep the arguments of the operator and its results for the backward."""
    args = Arguments(*inputs)
    SavedArguments.write(ctx, args, *output)
    if Spec.read(args.spec).return_lse != "y":
        ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    """The gradients of all arguments of the operator, from one call of its backward."""
    args, (out, lse) = SavedArguments.read(ctx)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    needed = ctx.needs_input_grad[:_TENSOR_COUNT]  # the spec has those of when the graph was recorded
    needs = "".join("y" if is_needed else "n" for is_needed in needed)
    args = args._replace(spec="|".join(Spec.read(args.spec)._replace(needs=needs)))
    computed = torch.ops.undivided.attention_backward(*args.of_backward, out, lse, grad_out, grad_lse)
    gradients = [gradient if is_needed else None for gradient, is_needed in zip(computed, needed, strict=True)]
    return (*gradients, *_gradients_of_others(args))


def _gradients_of_others(args: Arguments) -> list[Any]:
    """The gradients of the arguments after `Tensors`, which have none: a list of None for the mask's list of tensors,
    and None for each other one, but for `numbers`: PyTorch takes an empty list of numbers for one of tensors."""
    gradients = dict.fromkeys(args._fields[_TENSOR_COUNT:])
    return list((gradients | {"mask": [None] * len(args.mask), "numbers": None if args.numbers else []}).values())


torch.library.register_autograd("undivided::attention", _differentiate, setup_context=_save, lib=_library)


def _reshape_like(gradients: Sequence[Tensor | None], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients in the shapes of their tensors; None without a gradient or a tensor."""
    return [None if g is None or t is None else g.reshape(t.shape) for g, t in zip(gradients, tensors, strict=True)]


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the derivatives of the backward need; they compute out and lse again."""
    args, _, _, grad_out, grad_lse = BackwardArguments.read(inputs)
    SavedArguments.write(ctx, args, grad_out, grad_lse)


def _differentiate_backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    """Derivatives of the backward by the reference, in plain operations that modes and subclasses can intercept."""
    args, (grad_out, grad_lse) = SavedArguments.read(ctx)
    _, call, tensors = _prepare(args)
    needed = [g if is_needed else None for g, is_needed in zip(gradients, call.needs, strict=True)]
    grad_gradients = _reshape_like(needed, tensors)  # the bias of `tensors` has four axes
    for_grad_out, for_grad_lse, *for_tensors = autograd.double_backward(
        call, *tensors, grad_out, grad_lse, *grad_gradients
    )
    for_others = _gradients_of_others(args)[:-2]  # the backward has no scales
    for_out = for_lse = None  # `double_backward` computes both again from the tensors
    return (*_reshape_like(for_tensors, args.tensors), *for_others, for_out, for_lse, for_grad_out, for_grad_lse)


torch.library.register_autograd(
    "undivided::attention_backward", _differentiate_backward, setup_context=_save_backward, lib=_library
)
