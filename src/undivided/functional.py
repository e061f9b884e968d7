"""The public functions: each makes a request, prepares it, and runs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Never, cast, overload

import torch
from torch import Tensor

from undivided.arguments.checks import check_tensor
from undivided.arguments.graphs import outside_of_graphs, traces_each_function
from undivided.arguments.layout import Layout
from undivided.arguments.signature import missing_as_required, raise_as_type_error, unknown_arguments
from undivided.arguments.tensors import is_dtensor, is_observed
from undivided.errors import InputError
from undivided.machine import Machine
from undivided.masks import Mask
from undivided.request.foreign import keyword_hint
from undivided.request.request import KEYWORDS, Options, Request, Tensors, new_tuple
from undivided.run import autograd, dispatch, dtensors
from undivided.run.dispatch import ContextParallelLike
from undivided.run.prepare import decide_request, prepare
from undivided.sdpa import scaled_dot_product_attention
from undivided.selection.decision import Decision
from undivided.selection.policy import current_policy

__all__ = ["attention", "explain", "scaled_dot_product_attention"]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    mask: Mask | None = ...,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    backend: str | None = ...,
    deterministic: bool | None = ...,
    batch_invariant: bool | None = ...,
    return_lse: Literal[False] = ...,
    pages: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    context_parallel: ContextParallelLike | None = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    mask: Mask | None = ...,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    backend: str | None = ...,
    deterministic: bool | None = ...,
    batch_invariant: bool | None = ...,
    return_lse: Literal[True],
    pages: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    context_parallel: ContextParallelLike | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    mask: Mask | None = ...,
    bias: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    dropout_p: float = ...,
    dropout_seed: int | Tensor | None = ...,
    backend: str | None = ...,
    deterministic: bool | None = ...,
    batch_invariant: bool | None = ...,
    return_lse: bool,
    pages: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    context_parallel: ContextParallelLike | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


@missing_as_required
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *more: Never,
    layout: Layout,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    return_lse: bool = False,
    pages: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    context_parallel: ContextParallelLike | None = None,
    **unknown: Never,  # `more` and `unknown` are for the errors of wrong calls
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention: any layout, any mask, any device, and the same answer from every backend.

    ``softmax(mask(softcap(scale * q @ k^T) + alibi + bias)) @ v``, computed in fp32 (fp64 for fp64 inputs). A query row
    with no allowed key gives 0. What the mask hides, such as padding or the unused part of a cache, may contain
    anything, NaN included.

    Axes: B batch, S sequence (Sq queries, Sk keys), H query heads, N key/value heads, D head size (Dk of queries and
    keys, Dv of values), T packed tokens (Tq queries, Tk keys).

    Args:
        q: [B, Sq, H, Dk] in "bshd", [Sq, B, H, Dk] in "sbhd", [B, H, Sq, Dk] in "bhsd", [Tq, H, Dk] in "thd";
            float16, bfloat16, float32 or float64. The last axis should have stride 1: with another stride only the
            backend `reference` can run, or `flex` if it is requested.
        k: like q, with Sk keys and N heads, where N divides H. Query head h attends to key head ``h // (H / N)``;
            nothing is expanded to H heads.
        v: like k, with head size Dv.
        layout: the order of the axes: "bshd", "sbhd", "bhsd" or "thd". Required, because it is never inferred.
        mask: which queries attend to which keys (`undivided.masks`); None allows every pair. "thd" requires
            ``masks.documents`` or ``masks.document_ids``.
        bias: added to the scores; broadcastable to [B, H, Sq, Sk] ([H, Tq, Tk] in thd); -inf counts as masked.
        scale: factor of the scores; 1/sqrt(Dk) if None.
        softcap: if c is given, each score becomes ``c * tanh(score / c)``.
        alibi_slopes: [H] or [sequences, H]; adds ``-slope * |i + d - j|`` to the score of query i and key j. d is 0 if
            the mask is aligned top-left, and the number of keys minus that of queries if bottom-right.
        sinks: [H] logits; head h adds ``exp(sinks[h])`` to the denominator of its softmax.
        dropout_p: probability with which an attention weight becomes 0. Which weights do depends on the seed, the
            sequence, the head and the positions only: not on the backend, layout or packing.
        dropout_seed: an int or a 0-d int64 tensor; None draws one from torch's generator.
        backend: the name of the backend, or of the family, that must run; if it cannot, the call raises. None lets
            selection choose.
        deterministic: whether results must repeat bit for bit; None follows torch.use_deterministic_algorithms and
            UNDIVIDED_DETERMINISTIC.
        batch_invariant: whether a row's result must depend on its own query, keys and values only: not on the batch,
            packing, padding, layout, chunks of the prefill, page size or threads. None follows `set_backends` and
            UNDIVIDED_BATCH_INVARIANT.
        return_lse: also return the log-sum-exp of the allowed scores, [B, H, Sq] ([H, Tq] in thd), fp32 (fp64 for fp64
            inputs), natural logarithm, differentiable.
        pages: block table of a paged cache, int32 [B, max_pages]. k and v are then pools [pages, page_size, N, D], and
            the mask contains the number of keys of each sequence (`masks.lengths`; `masks.documents` in thd).
        k_scale, v_scale: fp32 scales of quantised keys and values (`undivided.quantization`). k and v are then int8,
            float8_e4m3fn, float8_e5m2 or, for int4, uint8 [.., D/2], in any layout or in pages. Each scale has the
            shape of its tensor without the last axis (int4: with D/32 in its place). Nothing may require a gradient.
        context_parallel: an `undivided.ContextParallel`, if the sequence is spread over ranks. q, k and v are then the
            tokens of this rank; the mask and the keys of the bias are those of the whole sequence, and dropout_seed
            must be given.

    q, k, v, bias, sinks and alibi_slopes may all be DTensors of one mesh, sharded on batch or heads or replicated: each
    rank computes its part of the result, a DTensor placed as q, without communication. The mask then describes the
    whole tensors, not the part of a rank.

    Returns:
        The output in q's layout and dtype, [.., H, Dv]; with return_lse, (output, lse).

    Raises:
        InputError: an argument is wrong; the message names it, its value, the limit, and a fix. For a missing or
            unknown one, such as a keyword of another library, the error is also a TypeError.
        NoBackendError: no allowed backend can run the call; the message lists every backend's reasons.

    Source: Vaswani et al. 2017 (arXiv:1706.03762); tiled softmax from Dao et al. 2022 (arXiv:2205.14135).

    >>> import torch, undivided
    >>> from undivided import masks
    >>> q = torch.randn(10, 8, 64)                                          # two documents of 3 and 7 tokens, packed
    >>> k, v = torch.randn(10, 2, 64), torch.randn(10, 2, 64)
    >>> mask = masks.documents(torch.tensor([0, 3, 10])) & masks.causal()
    >>> undivided.attention(q, k, v, layout="thd", mask=mask).shape
    torch.Size([10, 8, 64])
    """
    if unknown or more:
        raise_as_type_error(_unknown_or_too_many, unknown, more)
    if autograd.any_autocast():
        q, k, v = autograd.cast_under_autocast(q, k, v, k_scale)
    options = new_tuple(
        Options, (layout, mask, scale, softcap, dropout_p, dropout_seed, return_lse, pages, k_scale, v_scale)
    )
    request = new_tuple(
        Request,
        (new_tuple(Tensors, (q, k, v, bias, sinks, alibi_slopes)), options, backend, deterministic, batch_invariant),
    )
    if context_parallel is not None:
        return dispatch.context_attention(request, _checked_context(context_parallel))
    if torch.compiler.is_compiling() or is_observed(
        q, k, v, mask, bias, sinks, alibi_slopes, dropout_seed, pages, k_scale, v_scale
    ):
        return dispatch.attention(request)
    if traces_each_function():
        return dispatch.untraced_attention(request)
    decision, call, tensors = prepare(request, current_policy(backend, deterministic, batch_invariant))
    return autograd.run(decision.backend, call, tensors)


@outside_of_graphs
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool | None = None,
    return_lse: bool = False,
    pages: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    context_parallel: ContextParallelLike | None = None,
    machine: Machine | None = None,
    **unknown: Never,
) -> Decision:
    """The `Decision` for these arguments: which backend `attention` would run, and why not the others. Runs nothing.

    torch.compile runs it outside of its graphs; with ``fullgraph=True`` it must be called before the compiled function.

    Args:
        machine: the machine to decide for; this one if None. The device of a described machine replaces that of the
            tensors.
        context_parallel: as for `attention`; the answer is for this rank's largest piece of work.
        q, k, v, layout, mask, bias, scale, softcap, alibi_slopes, sinks, dropout_p, dropout_seed, backend,
            deterministic, batch_invariant, return_lse, pages, k_scale, v_scale: as for `attention`; meta tensors are
            enough.

    Returns:
        A `Decision`: ``print`` it for the table, read ``.chosen`` (None if no backend can run it) and ``.reasons``.

    Raises:
        InputError: an argument is wrong or unknown.

    >>> import torch, undivided
    >>> q = torch.empty(48, 16534, 18, 128, dtype=torch.bfloat16, device="meta")
    >>> a100 = undivided.Machine(
    ...     device="cuda", compute_capability=(8, 0), cudnn="8.9.7", packages={"cudnn_frontend": "1.14.0"})
    >>> undivided.explain(q, q, q, layout="bshd", machine=a100).reasons["cudnn"][0]
    'query length 16534 is not a multiple of 64 (cuDNN 8.9.7; any length from 9.0)'
    """
    if unknown:
        raise _unknown_keywords("explain", unknown, {*_ARGUMENTS, "machine"}).as_also(TypeError)
    if machine is not None and not isinstance(machine, Machine):
        raise InputError("machine", "be an undivided.Machine or None", type(machine).__name__, "Machine.named('a100')")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not is_dtensor(tensor):
            check_tensor(name, tensor)
    q, k, v = autograd.cast_under_autocast(q, k, v, k_scale, _uninitialised)
    request = Request(
        Tensors(q, k, v, bias, sinks, alibi_slopes),
        Options(layout, mask, scale, softcap, dropout_p, dropout_seed, return_lse, pages, k_scale, v_scale),
        backend,
        deterministic,
        batch_invariant,
    )
    machine, device = _machine_and_device(machine, q)
    context = None if context_parallel is None else _checked_context(context_parallel)
    if dtensors.has_dtensors(request):
        request, _ = dtensors.local_request(request, None if context is None else context.groups_for_dtensors())
    if context is not None:
        return context.explain(request, machine, device)
    policy = current_policy(backend, deterministic, batch_invariant)
    return decide_request(request, machine, policy, device)


def _uninitialised(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor like the given one in another dtype, for a decision, which reads no values."""
    return torch.empty_like(tensor, dtype=dtype, requires_grad=tensor.requires_grad)


def _machine_and_device(machine: Machine | None, q: Tensor) -> tuple[Machine, str | None]:
    """The machine to decide for, and the device that replaces that of the tensors; None keeps theirs."""
    device = None if machine is None else machine.device
    if device is None and q.is_meta:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return machine or Machine.this(device or q.device), device


def _unknown_or_too_many(unknown: Mapping[str, object], more: Sequence[object]) -> InputError:
    """The error for what `attention` was given beyond its arguments, by keyword or by position."""
    return _unknown_keywords("attention", unknown, _ARGUMENTS) if unknown else _too_many(more)


def _unknown_keywords(function: str, keywords: Mapping[str, object], known: Collection[str]) -> InputError:
    """The error for keywords that a function does not have."""
    return unknown_arguments(function, keywords, sorted(known), keyword_hint(keywords, _ARGUMENTS))


def _too_many(more: Sequence[object]) -> InputError:
    """The error for arguments of `attention` by position after q, k and v."""
    name = "mask" if isinstance(more[0], Mask) else "layout"
    value = repr(more[0]) if isinstance(more[0], str) else "..."
    must = "be called with at most q, k and v by position"
    return InputError("attention", must, f"{3 + len(more)} arguments", f"{name}={value}")


def _checked_context(context_parallel: object) -> ContextParallelLike:
    """The argument, if it has the attributes of a ContextParallel; otherwise InputError."""
    if not hasattr(context_parallel, "traffic"):
        raise InputError(
            "context_parallel",
            "be an undivided.ContextParallel or None",
            type(context_parallel).__name__,
            hint="undivided.ContextParallel(group).bind(q_len)",
        )
    return cast(ContextParallelLike, context_parallel)


_ARGUMENTS = KEYWORDS | {"context_parallel"}
