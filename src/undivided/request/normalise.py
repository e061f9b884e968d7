"""Request -> Call: the only place where arguments are checked.

The problem of a request is computed once per `_signature` (shapes, dtypes, devices, options) and cached; the mask
caches its own part. A repeated call takes two dictionary look-ups.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from undivided import masks
from undivided._bounded import Bounded
from undivided.arguments import layout as _layout
from undivided.arguments.checks import check_memory, check_tensor
from undivided.arguments.layout import LAYOUTS, Strides
from undivided.arguments.tensors import footprint, readable, versions
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.quantization import head_size
from undivided.request.call import Call, CheckedMask
from undivided.request.checks import (
    check_axes,
    check_bias,
    check_dtypes_and_devices,
    check_layout,
    check_optional_tensors,
    check_page_numbers,
    check_pages,
    check_scalars,
    check_shapes,
    check_slopes,
    checked_mask,
    checked_scale,
)
from undivided.request.foreign import tensor_hint
from undivided.request.problem import Problem
from undivided.request.quantized import check_quantized, check_scale_tensors
from undivided.request.request import OPTIONAL_TENSORS, Conditions, Request, Tensors, new_tuple
from undivided.request.seed import check_seed, checked_seed
from undivided.request.slopes import are_usual


class CachedProblem(NamedTuple):
    """The problem of a signature, cached under it.

    footprints: the bytes from the first to the last element of q, k and v, and those of one element of q. strides:
    those of the call. Both are None if sizes are symbolic.
    """

    problem: Problem
    footprints: tuple[int, int, int, int] | None
    strides: Strides | None


def normalise(
    request: Request, device: str | None = None, needs: tuple[bool, ...] | None = None
) -> tuple[Call, Tensors]:
    """(call, tensors): the checked call, and the request's tensors with a bias of four axes.

    Args:
        request: the arguments of the caller.
        device: replaces the device of the tensors, for machines that are only described.
        needs: which of the tensors need a gradient; None reads requires_grad, which a compiled graph does not have.

    Raises:
        InputError: an argument is wrong.
    """
    tensors, options = request.tensors, request.options
    q, k, v, bias, sinks, slopes = tensors
    layout, mask, scale, softcap, dropout_p, seed, return_lse, pages, k_scale, v_scale = options
    if type(layout) is not str or layout not in LAYOUTS:
        check_layout(layout)
    if type(return_lse) is not bool:  # 0 and False have one key below
        check_scalars(options)
    if needs is None:
        needs = _needs(tensors) if torch.is_grad_enabled() else _NO_GRADIENTS
    if scale is not None:
        scale = checked_scale(scale)
    conditions = new_tuple(Conditions, (device, needs, scale is not None and scale <= 0))
    cached = _cached_problem(request, conditions)
    problem, footprints, strides = cached
    if footprints is not None and not _are_in_memory(q, k, v, footprints):
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            check_tensor(name, tensor)
    if not (bias is sinks is slopes is pages is k_scale is v_scale is None):
        _check_optional_memory(request)
    checked = None
    if mask is not None or layout == "thd" or slopes is not None or pages is not None:
        mask, checked = _mask_for_problem(cached, checked_mask(mask), q, k, slopes, pages)
        problem = checked.problem
    if bias is not None and bias.dim() < 4:
        tensors = tensors._replace(bias=bias[(None,) * (4 - bias.dim())])
    if slopes is not None and slopes.dim() == 2 and slopes.shape[0] == 0:
        tensors = tensors._replace(alibi_slopes=slopes.sum(0))  # padding rows read slopes, also of no sequence
    if seed is not None:
        seed = checked_seed(seed, q.device)
    if scale is None:
        scale = problem.qk_dim**-0.5
    if softcap is not None:
        softcap = float(softcap)
    if mask is None:
        mask = masks.FULL
    # by position: keywords cost twice as much
    call = Call(problem, mask, scale, softcap, dropout_p, seed, pages, needs, checked, strides, k_scale, v_scale)
    return call, tensors


def _cached_problem(request: Request, conditions: Conditions) -> CachedProblem:
    """The problem of the request without its mask, found by its signature or computed."""
    key = _signature(request, conditions)
    try:
        cached = _problems.get(key)
    except TypeError:  # a symbolic size has no hash
        return CachedProblem(_with_concrete_sizes(checked_problem(request, conditions)), None, None)
    if cached is None:
        problem, (q, k, v, *_), options = checked_problem(request, conditions), request.tensors, request.options
        cached = CachedProblem(
            problem, _footprints(q, k, v), Strides(q, k, v, options.layout, options.pages is not None)
        )
        _problems[key] = cached
    return cached


def _check_optional_memory(request: Request) -> None:
    """InputError if the memory of an optional tensor is gone, or a scale requires a gradient."""
    options = request.options
    optional = zip((*OPTIONAL_TENSORS, "pages"), (*request.tensors[3:], options.pages), strict=True)
    for name, tensor in optional:
        if tensor is not None:
            check_memory(name, tensor)
    if options.k_scale is not None and options.v_scale is not None:
        check_scale_tensors(options.k_scale, options.v_scale)


def _mask_for_problem(
    cached: CachedProblem, mask: Mask, q: Tensor, k: Tensor, slopes: Tensor | None, pages: Tensor | None
) -> tuple[Mask, CheckedMask]:
    """The mask of the call after its checks, and what the given mask caches of them, with the problem."""
    # the key is the id of `cached`: hashing the signature costs five times as much; the mask keeps `cached` alive
    checked = mask.cached(id(cached), _with_mask, cached, mask, q.device, slopes, pages)
    if checked.mask is not None:
        mask = checked.mask
    if "dense" in checked.problem.mask.kinds:  # kernels read this tensor; of other masks they read the normal form
        for tensor in mask.take("dense")[0]:
            check_memory("mask", tensor)
    if pages is not None:
        _check_pages_once(checked, mask, pages, k.shape[0])
    return mask, checked


def _needs(tensors: Tensors) -> tuple[bool, ...]:
    """Which of the tensors require a gradient."""
    q, k, v, bias, sinks, slopes = tensors
    try:
        needs = _NEEDS[q.requires_grad, k.requires_grad, v.requires_grad]
    except (AttributeError, KeyError):  # not tensors: `normalise` raises
        needs = _NO_GRADIENTS
    if bias is sinks is slopes is None:
        return needs
    return (*needs[:3], *(getattr(t, "requires_grad", False) for t in (bias, sinks, slopes)))


def _are_in_memory(q: Tensor, k: Tensor, v: Tensor, footprints: tuple[int, int, int, int]) -> bool:
    """Whether the storages, which can be resized at any time, hold all elements; False if there is no storage."""
    q_end, k_end, v_end, size = footprints
    try:
        return (
            q.untyped_storage().nbytes() >= q_end + q.storage_offset() * size
            and k.untyped_storage().nbytes() >= k_end + k.storage_offset() * size
            and v.untyped_storage().nbytes() >= v_end + v.storage_offset() * size
        )
    except NotImplementedError:  # sparse tensors, those of torch.func
        return False


def check_fake_request(request: Request) -> None:
    """InputError if an argument is wrong; for fake tensors, whose call never reaches the checks at run time."""
    tensors, options = request.tensors, request.options
    check_layout(options.layout)
    if options.scale is not None:
        checked_scale(options.scale)
    needs = tuple(torch.is_grad_enabled() and getattr(t, "requires_grad", False) for t in tensors)
    problem = checked_problem(request, Conditions(None, needs, False))
    check_seed(options.dropout_seed, tensors.q.device)
    sizes = problem.batch, problem.heads, problem.q_len, problem.kv_len
    checked_mask(options.mask).check(*sizes, packed=problem.packed, device=tensors.q.device)


def check_types(request: Request) -> None:
    """InputError if an argument is of a wrong type; for graphs while they are recorded, in which sizes and numbers may
    be symbolic: the operator checks them at run time."""
    options = request.options
    if not isinstance(options.layout, str):
        check_layout(options.layout)
    _check_tensors(request)
    if isinstance(options.scale, _NOT_NUMBER_TYPES):
        checked_scale(options.scale)
    wrong = isinstance(options.softcap, _NOT_NUMBER_TYPES) or isinstance(options.dropout_p, _NOT_NUMBER_TYPES)
    if wrong or not isinstance(options.return_lse, bool):
        check_scalars(options)


def _check_pages_once(checked: CheckedMask, mask: Mask, pages: Tensor, pool: int) -> None:
    """Check the page numbers, once for all layers of a model that share a block table."""
    version = versions((pages,))
    last = checked.checked_pages
    if last is not None and version is not None and last[0] is pages and last[1:] == (version, pool):
        return
    check_page_numbers(mask, pages, pool, checked.problem.page_size or 1)
    checked.checked_pages = None if version is None else (pages, version, pool)


def _footprints(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    size = q.itemsize  # of k and v too, unless they are quantised: then their offsets count as larger than they are
    return footprint(q) * size, footprint(k) * k.itemsize, footprint(v) * v.itemsize, size


def _with_concrete_sizes(problem: Problem) -> Problem:
    """The problem with concrete sizes in place of symbolic ones."""
    names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "qk_dim", "v_dim")
    return problem._replace(**{name: int(getattr(problem, name)) for name in names})  # type: ignore[arg-type]


_problems: Bounded[object, CachedProblem] = Bounded(4096)
_NO_GRADIENTS = (False,) * 6
_NUMBER_TYPES = (float, int)
_NOT_NUMBER_TYPES = (bool, str, complex, list, tuple, Tensor)
_NEEDS = {qkv: (*qkv, False, False, False) for qkv in itertools.product((False, True), repeat=3)}


def _signature(request: Request, conditions: Conditions) -> object:
    """Everything that `checked_problem` reads, as a dictionary key."""
    q, k, v, bias, sinks, slopes = request.tensors
    layout, _, _, softcap, dropout_p, _, return_lse, pages, k_scale, v_scale = request.options
    try:
        key: tuple[object, ...] = (
            layout,
            q.shape,
            k.shape,
            v.shape,
            q.dtype,
            k.dtype,
            v.dtype,
            # one bool in place of three devices and of three tuples costs less to hash and to compare
            (q.is_cpu and k.is_cpu and v.is_cpu) or (q.device, k.device, v.device),
            # contiguous tensors need no strides here: a kernel reads no stride of an axis of size 1
            (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()) or (q.stride(), k.stride(), v.stride()),
            return_lse,
            conditions,
        )
        no_dropout = type(dropout_p) in _NUMBER_TYPES and dropout_p == 0  # False and tensors are errors
        if softcap is None and no_dropout and bias is sinks is slopes is k_scale is v_scale is None:
            return key if pages is None else (*key, pages.shape, pages.dtype, pages.device, pages.layout)
        if softcap is not None or not no_dropout:  # checked here, because the key has only whether they are given
            check_scalars(request.options)
        kinds = [None if t is None else (t.shape, t.dtype, t.device, t.layout) for t in (bias, sinks, slopes, pages)]
        usual = slopes is not None and are_usual(slopes)
        scales = [None if t is None else (t.shape, t.dtype, t.device, t.stride()) for t in (k_scale, v_scale)]
        return (*key, *kinds, usual, softcap is None, bool(dropout_p), *scales)
    except (AttributeError, TypeError, RuntimeError, ValueError):
        _check_tensors(request)
        check_scalars(request.options)
        raise


def _check_tensors(request: Request) -> None:
    options = request.options
    optional = (("pages", options.pages), ("k_scale", options.k_scale), ("v_scale", options.v_scale))
    for name, tensor in (*zip(Tensors._fields, request.tensors, strict=True), *optional):
        if tensor is not None or name in ("q", "k", "v"):
            check_tensor(name, tensor, tensor_hint(name, tensor))


def checked_problem(request: Request, conditions: Conditions) -> Problem:
    """The problem of a request. Checks everything except the mask (checked later) and scale and seed (values)."""
    (q, k, v, bias, _, slopes), options, needs = request.tensors, request.options, conditions.needs
    layout, pages = options.layout, options.pages
    _check_tensors(request)
    check_scalars(options)
    check_axes(q, k, v, layout, pages)
    quantized = None
    if options.k_scale is options.v_scale is None:
        check_dtypes_and_devices(q, k, v)
    else:
        quantized = check_quantized(q, k, v, options.k_scale, options.v_scale, needs)
    batch, q_len, heads, qk_dim = _layout.sizes(q.shape, layout)
    page_size = None
    if pages is None:
        check_shapes(q, k, v, layout)
        _, kv_len, kv_heads, _ = _layout.sizes(k.shape, layout)
    else:
        kv_len, kv_heads, page_size = check_pages(q, k, v, layout, pages, gradients=needs[1] or needs[2])
    check_optional_tensors(request.tensors, heads)
    return Problem(
        device=conditions.device or q.device.type,
        dtype=q.dtype,
        layout=layout,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        qk_dim=qk_dim,
        v_dim=head_size(v),
        mask=masks.FULL.structure,
        align=None,
        features=_features(request, conditions, heads != kv_heads),
        page_size=page_size,
        bias=None if bias is None else check_bias(bias, layout, batch, heads, q_len, kv_len),
        bias_dtype=None if bias is None else bias.dtype,
        usual_slopes=slopes is not None and are_usual(slopes),
        quantized=quantized,
    )


def _features(request: Request, conditions: Conditions, grouped: bool) -> frozenset[str]:
    (q, k, v, bias, sinks, slopes), options, needs = request.tensors, request.options, conditions.needs
    present = {
        "backward": any(needs),
        "bias": bias is not None,
        "bias_grad": needs[3],
        "sinks": sinks is not None,
        "sinks_grad": needs[4],
        "alibi": slopes is not None,
        "alibi_grad": needs[5],
        "softcap": options.softcap is not None,
        "dropout": options.dropout_p > 0,
        "gqa": grouped,
        "value_dim": head_size(v) != q.shape[-1],
        "lse": options.return_lse,
        "lse_grad": options.return_lse and any(needs),
        "paged": options.pages is not None,
        "quantized": options.k_scale is not None,
        "flipped": conditions.scale_not_positive,
        "strided": not all(t.stride(-1) == 1 or t.shape[-1] == 1 or t.numel() == 0 for t in (q, k, v)),
    }
    return frozenset(name for name, needed in present.items() if needed)


def _with_mask(
    cached: CachedProblem, mask: Mask, device: torch.device, slopes: Tensor | None, pages: Tensor | None
) -> CheckedMask:
    """The mask after its checks, and the problem with the mask's structure."""
    problem = cached.problem
    if problem.layout == "thd" and not mask.kinds & {"documents", "document_ids"}:
        raise InputError(
            "mask",
            "contain documents or document_ids in layout 'thd'",
            masks.describe(mask.structure),
            hint="mask=masks.documents(cu_seqlens) & ..., or masks.document_ids(ids) & ..., so that packed documents "
            "cannot see each other",
        )
    given = mask
    if pages is not None:
        mask = _paged_mask(mask, problem, pages)
    mask.check(problem.batch, problem.heads, problem.q_len, problem.kv_len, packed=problem.packed, device=device)
    align = mask.resolved_align(problem.batch, problem.q_len, problem.kv_len, needed=slopes is not None)
    documents = mask.document_sizes
    if slopes is not None:
        check_slopes(slopes, problem.heads, documents[0] if documents else problem.batch)
    if "dropout" in problem.features and any(origin.head for origin in mask.take("origin")[0] or ()):
        problem = problem._replace(features=problem.features | {"some_heads"})
    problem = problem._replace(mask=mask.structure, align=align, documents=documents)
    holder = None if torch.compiler.is_compiling() else given
    return CheckedMask(None if mask is given else mask, problem, cached, holder)


def _paged_mask(mask: Mask, problem: Problem, pages: Tensor) -> Mask:
    """The mask for a paged cache: it must have the lengths; in thd each sequence's keys start at its first page."""
    if not mask.kinds & {"lengths", "documents"}:
        raise InputError(
            "mask",
            "contain the keys' lengths if pages is given",
            masks.describe(mask.structure),
            hint="mask=masks.lengths(kv_lengths), or masks.documents(cu_seqlens_q, cu_seqlens_kv) in thd",
        )
    if problem.layout != "thd":
        if "documents" in mask.kinds:
            hint = "layout='thd' with a row of pages per document, or masks.document_ids and masks.lengths"
            raise InputError("mask", "have no documents if pages is given in a dense layout", repr(mask), hint=hint)
        return mask
    assert problem.page_size is not None
    sequences = (mask.document_sizes or (0,))[0]
    if sequences != pages.shape[0]:
        raise InputError("pages", f"have one row per document of the mask ({sequences})", list(pages.shape))
    slot = pages.shape[1] * problem.page_size
    starts = mask.take("documents")[0].padded_kv
    if starts is not None and readable(starts) and starts.tolist() == [n * slot for n in range(sequences + 1)]:
        return mask  # of a cache, which has made it for these pages
    return mask.with_padded_kv(torch.arange(sequences + 1, dtype=torch.int32, device=pages.device) * slot)
