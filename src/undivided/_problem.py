"""Request -> Problem + Operands: the one place where arguments are validated.

A `Problem` describes what is asked without a tensor in it: it is frozen, hashable, and all that selection looks at.
`Operands` are the tensors themselves, in the caller's layout, with views of them in the orders that kernels take.

Legend: B batch, S sequence (Sq queries, Sk keys), H query heads, N key/value heads, D head size (Dk, Dv).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undivided import _layout, masks
from undivided._arguments import check_memory, check_tensor
from undivided._layout import Layout
from undivided._slopes import are_usual
from undivided._tensors import span, versions
from undivided._validation import (
    check_bias,
    check_extras,
    check_kinds,
    check_layout,
    check_page_numbers,
    check_pages,
    check_ranks,
    check_scalars,
    check_shapes,
    check_slopes,
    checked_mask,
    checked_scale,
    checked_seed,
)
from undivided.errors import InputError
from undivided.masks import Mask, Structure
from undivided.masks.normal_form import NormalForm


class Problem(NamedTuple):
    """What is asked, without tensors. Built once, validated once, never changed.

    device: "cpu", "cuda", ... where it is to run.
    dtype: of q, k, v and the result.
    layout: of q, k, v and the result.
    batch, heads, kv_heads, q_len, kv_len, qk_dim, v_dim: sizes; in thd q_len and kv_len are the totals of all
        documents.
    mask: the mask's structure; mask.kinds names its parts.
    align: "both" where top-left and bottom-right agree, "top_left", "bottom_right", or None where it does not matter.
    features: what the problem needs of a backend beyond plain attention; see `FEATURES`.
    bias: which axes of the bias are broadcast, as "bhqk" with 1 for a broadcast axis, e.g. "1h1k"; None without a bias.
    documents: (number, longest query, longest key length) of packed documents; lengths are None where only the device
        knows.
    page_size: of a paged key/value cache, or None.
    deterministic: the result must repeat bit for bit.
    bias_dtype: of the bias, which need not be that of q; None without one.
    usual_slopes: the ALiBi slopes are known to be the usual ones (see `_slopes`).
    """

    device: str
    dtype: torch.dtype
    layout: Layout
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    qk_dim: int
    v_dim: int
    mask: Structure
    align: str | None
    features: frozenset[str]
    bias: str | None = None
    documents: tuple[int, int | None, int | None] | None = None
    page_size: int | None = None
    deterministic: bool = False
    bias_dtype: torch.dtype | None = None
    usual_slopes: bool = False

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed documents (thd)."""
        return self.layout == "thd"

    @property
    def lse_is_read(self) -> bool:
        """Whether a forward's log-sum-exp is returned, or needed for the gradients."""
        return "lse" in self.features or "backward" in self.features

    def __str__(self) -> str:
        q = f"q {self.batch}x{self.q_len}x{self.heads}x{self.qk_dim}"
        kv = f"kv {self.batch}x{self.kv_len}x{self.kv_heads}x{self.qk_dim}"
        if self.v_dim != self.qk_dim:
            kv += f"/{self.v_dim}"
        parts = [f"{q} (BxSxHxD), {kv}", f"{str(self.dtype).removeprefix('torch.')} {self.layout} on {self.device}"]
        parts.append(f"mask {masks.describe(self.mask)}")
        if self.align in ("top_left", "bottom_right"):
            parts.append(self.align.replace("_", "-"))
        if self.features:
            parts.append("needs " + ", ".join(sorted(self.features)))
        return "; ".join(parts)


FEATURES: dict[str, str] = {
    "backward": "gradients",
    "bias": "an additive bias",
    "bias_grad": "the gradient of the bias",
    "alibi": "ALiBi slopes",
    "alibi_grad": "the gradient of the ALiBi slopes",
    "softcap": "softcap",
    "sinks": "sinks",
    "sinks_grad": "the gradient of the sinks",
    "dropout": "dropout",
    "gqa": "fewer key/value heads than query heads",
    "value_dim": "a value head size other than the query's",
    "lse": "the log-sum-exp returned",
    "lse_grad": "the gradient through the log-sum-exp",
    "partial": "the gradient of a part of the keys, from the whole's output and log-sum-exp",
    "some_heads": "dropout for heads that do not start at the first",
    "paged": "paged keys and values",
    "flipped": "a scale of 0 or below",
    "strided": "a last axis whose stride is not 1",
}
"""Every feature a problem may need, in words."""


_NOTHING = torch.empty(0)


class Bound:
    """A mask that was checked against a problem, and its normal form; remembered until a tensor of the mask changes."""

    __slots__ = ("form", "found", "mask", "pages", "problem")

    def __init__(self, mask: Mask, problem: Problem, found: object = None) -> None:
        self.mask, self.problem = mask, problem
        self.found = found
        """Held, so that nothing else gets its id."""
        self.form: NormalForm | None = None
        self.pages: tuple[Tensor, int, int] | None = None
        """The block table that was checked last, its in-place version, and the pool's pages."""


@dataclass(eq=False, slots=True)
class Operands:
    """The tensors of a problem, in the caller's layout; every other order is a view.

    q [.., H, Dk], k [.., N, Dk], v [.., N, Dv] in `layout`; with `pages`, k and v are pools [pages, page_size, N, D].
    bias is 4-D and broadcastable to [B, H, Sq, Sk]; alibi_slopes is [H] or [sequences, H]; sinks is [H].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    mask: Mask
    scale: float
    softcap: float | None = None
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Tensor | None = None
    pages: Tensor | None = None
    needs: tuple[bool, ...] = (False,) * 6
    """Which of `differentiable` need a gradient."""
    bound: Bound | None = field(default=None, repr=False)
    """Where repeated calls find the mask's normal form."""
    _unpaged: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as [B, H, S, D]; pages are gathered (a copy, for backends that read no block table)."""
        if self.pages is not None:
            if self._unpaged is None:
                self._unpaged = self._gathered(self.k).transpose(1, 2), self._gathered(self.v).transpose(1, 2)
            return _layout.heads_first(self.q, self.layout), *self._unpaged
        layout = self.layout
        return (
            _layout.heads_first(self.q, layout),
            _layout.heads_first(self.k, layout),
            _layout.heads_first(self.v, layout),
        )

    def _gathered(self, pool: Tensor) -> Tensor:
        """The pages of every sequence, in order: [B, max_pages * page_size, N, D] (one long row in thd)."""
        assert self.pages is not None
        pages = self.pages.clamp(0, max(pool.shape[0] - 1, 0))
        rows = pool[pages].flatten(1, 2)
        return rows.flatten(0, 1).unsqueeze(0) if self.layout == "thd" else rows

    def normal_form(self, problem: Problem) -> NormalForm:
        """The mask's row ranges and positions for these sizes, built when first asked for."""
        bound = self.bound
        if bound is None:
            bound = self.bound = Bound(self.mask, problem)
        if bound.form is None:
            bound.form = self.mask.normal_form(
                problem.batch, problem.heads, problem.q_len, problem.kv_len, self.q.device
            )
        return bound.form

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The inputs that may have gradients, in the order gradients are returned."""
        return self.q, self.k, self.v, self.bias, self.sinks, self.alibi_slopes

    def with_differentiable(self, tensors: Sequence[Tensor | None]) -> Operands:
        """The same operands around other tensors in that order."""
        q, k, v, bias, sinks, slopes = tensors
        assert q is not None and k is not None and v is not None
        return Operands(
            q,
            k,
            v,
            self.layout,
            self.mask,
            self.scale,
            self.softcap,
            bias,
            slopes,
            sinks,
            self.dropout_p,
            self.dropout_seed,
            self.pages,
            self.needs,
            self.bound,
        )

    def release(self) -> Operands:
        """Let go of the differentiable tensors; what remains is kept until the backward."""
        self.q = self.k = self.v = _NOTHING
        self.bias = self.sinks = self.alibi_slopes = self._unpaged = None
        return self


def normalise(
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
    return_lse: bool = False,
    pages: Tensor | None = None,
    device: str | None = None,
    needs: tuple[bool, ...] | None = None,
) -> tuple[Problem, Operands]:
    """Check every argument and describe the request.

    `device` replaces the tensors' own (for described machines); `needs` says which of (q, k, v, bias, sinks,
    alibi_slopes) need a gradient where the tensors do not (inside a compiled graph).

    Raises:
        InputError: naming the argument that is wrong.
    """
    check_layout(layout)
    if needs is None:
        needs = _needs(q, k, v, bias, sinks, alibi_slopes) if torch.is_grad_enabled() else _NO_GRADIENTS
    if scale is not None:
        scale = checked_scale(scale)
    flipped = scale is not None and scale <= 0
    request = (
        q,
        k,
        v,
        bias,
        sinks,
        alibi_slopes,
        pages,
        layout,
        softcap,
        dropout_p,
        return_lse,
        device,
        flipped,
        needs,
    )
    key = _signature(request)
    try:
        found = _problems.get(key)
    except TypeError:  # a symbolic size has no hash
        found = _specialised(build(*request)), None
    if found is None:
        found = build(*request), (span(q), span(k), span(v))
        if len(_problems) >= _MOST_PROBLEMS:
            _problems.clear()
        _problems[key] = found
    known, spans = found
    if spans is not None:
        _check_memory(q, k, v, spans)
    if not (bias is sinks is alibi_slopes is pages is None):
        for name, tensor in (("bias", bias), ("sinks", sinks), ("alibi_slopes", alibi_slopes), ("pages", pages)):
            if tensor is not None:
                check_memory(name, tensor)
    bound = None
    if mask is not None or layout == "thd" or alibi_slopes is not None or pages is not None:
        # `found` stands for its key, whose hash would cost five times as much: the mask holds it, so its id is its own
        bound = checked_mask(mask).remembered(id(found), _with_mask, found, mask, q.device, alibi_slopes, pages)
        mask, known = bound.mask, bound.problem
        if "dense" in known.mask.kinds:  # kernels read it, and other masks only what was worked out from them
            for tensor in mask.take("dense")[0]:
                check_memory("mask", tensor)
        if pages is not None:
            _check_pages_once(bound, pages, k.shape[0])
    if bias is not None:
        bias = bias if bias.dim() == 4 else bias[(None,) * (4 - bias.dim())]
    if dropout_p or dropout_seed is not None:
        dropout_seed = checked_seed(dropout_seed, q.device)
    scale = known.qk_dim**-0.5 if scale is None else scale
    softcap = None if softcap is None else float(softcap)
    operands = Operands(
        q,
        k,
        v,
        layout,
        mask or masks.FULL,
        scale,
        softcap,
        bias,
        alibi_slopes,
        sinks,
        dropout_p,
        dropout_seed,
        pages,
        needs,
        bound,
    )
    return known, operands


def _check_pages_once(bound: Bound, pages: Tensor, pool: int) -> None:
    """Once for all layers of a model that read the same block table."""
    version = versions((pages,))
    known = bound.pages
    if known is not None and version is not None and known[0] is pages and known[1:] == (version[0], pool):
        return
    check_page_numbers(bound.mask, pages, pool, bound.problem.page_size or 1)
    bound.pages = None if version is None else (pages, version[0], pool)


def _needs(*inputs: Tensor | None) -> tuple[bool, ...]:
    q, k, v, *others = inputs
    try:
        first = (q.requires_grad, k.requires_grad, v.requires_grad)  # type: ignore[union-attr]
    except AttributeError:  # not tensors: the checks to come say so
        return _NO_GRADIENTS
    if others[0] is others[1] is others[2] is None:
        return _NEEDS[first]
    return (*first, *(getattr(tensor, "requires_grad", False) for tensor in others))


def _specialised(problem: Problem) -> Problem:
    """With the sizes that symbolic ones stand for: plain operations are traced for these."""
    names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "qk_dim", "v_dim")
    return problem._replace(**{name: int(getattr(problem, name)) for name in names})  # type: ignore[arg-type]


def _check_memory(q: Tensor, k: Tensor, v: Tensor, spans: tuple[int, int, int]) -> None:
    """InputError unless the storages hold what sizes and strides say: they can be resized at any time."""
    of_q, of_k, of_v = spans
    try:
        size = q.itemsize
        if (
            q.untyped_storage().nbytes() >= (of_q + q.storage_offset()) * size
            and k.untyped_storage().nbytes() >= (of_k + k.storage_offset()) * size
            and v.untyped_storage().nbytes() >= (of_v + v.storage_offset()) * size
        ):
            return
    except NotImplementedError:  # sparse, or of torch.func: no storage
        pass
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)


_problems: dict[object, tuple[Problem, tuple[int, int, int] | None]] = {}
_MOST_PROBLEMS = 4096
_NO_GRADIENTS = (False,) * 6
_NEEDS = {qkv: (*qkv, False, False, False) for qkv in itertools.product((False, True), repeat=3)}


class _Request(NamedTuple):
    """The arguments that make a Problem, before they are checked: the mask comes later, scale and seed are values."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    pages: Tensor | None
    layout: Layout
    softcap: float | None
    dropout_p: float
    return_lse: bool
    device: str | None
    flipped: bool
    """A scale of 0 or below: kernels that scale after they have masked with -inf get it wrong."""
    needs: tuple[bool, ...]


def _signature(request: tuple[Any, ...]) -> object:
    """Everything that `build` looks at in the fields of a `_Request`, so that a repeated call is a dictionary
    look-up."""
    q, k, v, bias, sinks, slopes, pages, layout, softcap, dropout_p, return_lse, device, flipped, needs = request
    try:
        key: tuple[object, ...] = (
            layout,
            q.shape,
            k.shape,
            v.shape,
            q.dtype,
            k.dtype,
            v.dtype,
            q.is_cpu or q.device,  # a bool is compared at a third of the price of a device
            k.is_cpu or k.device,
            v.is_cpu or v.device,
            q.stride(),
            k.stride(),
            v.stride(),
            return_lse,
            device,
            flipped,
            needs,
        )
        if softcap is None and dropout_p == 0 and bias is sinks is slopes is pages is None:
            return key
        if softcap is not None or dropout_p != 0:  # now, for the key keeps only whether they are there
            check_scalars(softcap, dropout_p, return_lse)
        kinds = [None if t is None else (t.shape, t.dtype, t.device, t.layout) for t in (bias, sinks, slopes, pages)]
        usual = slopes is not None and are_usual(slopes)
        return (*key, *kinds, usual, softcap is None, bool(dropout_p))
    except (AttributeError, TypeError, RuntimeError):
        _check_tensors(_Request(*request))
        check_scalars(softcap, dropout_p, return_lse)
        raise


def _check_tensors(request: _Request) -> None:
    for name, tensor in zip(request._fields[:7], request[:7], strict=True):
        if tensor is not None or name in ("q", "k", "v"):
            check_tensor(name, tensor)


def build(*fields: Any) -> Problem:
    """The Problem of the fields of a `_Request`, all of them checked but the mask."""
    request = _Request(*fields)
    q, k, v, bias, sinks, slopes, pages, layout, softcap, dropout_p, return_lse, device, _, needs = request
    _check_tensors(request)
    check_scalars(softcap, dropout_p, return_lse)
    check_ranks(q, k, v, layout, pages)
    check_kinds(q, k, v)
    batch, q_len, heads, qk_dim = _layout.sizes(q.shape, layout)
    page_size = None
    if pages is None:
        check_shapes(q, k, v, layout)
        _, kv_len, kv_heads, _ = _layout.sizes(k.shape, layout)
    else:
        kv_len, kv_heads, page_size = check_pages(q, k, v, layout, pages, gradients=needs[1] or needs[2])
    check_extras(q, bias, sinks, slopes, heads)
    return Problem(
        device=device or q.device.type,
        dtype=q.dtype,
        layout=layout,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        qk_dim=qk_dim,
        v_dim=v.shape[-1],
        mask=masks.FULL.structure,
        align=None,
        features=_features(request, heads != kv_heads),
        page_size=page_size,
        bias=None if bias is None else check_bias(bias, layout, batch, heads, q_len, kv_len),
        bias_dtype=None if bias is None else bias.dtype,
        usual_slopes=slopes is not None and are_usual(slopes),
    )


def _features(request: _Request, grouped: bool) -> frozenset[str]:
    q, k, v, needs = request.q, request.k, request.v, request.needs
    present = {
        "backward": any(needs),
        "bias": request.bias is not None,
        "bias_grad": needs[3],
        "sinks": request.sinks is not None,
        "sinks_grad": needs[4],
        "alibi": request.alibi_slopes is not None,
        "alibi_grad": needs[5],
        "softcap": request.softcap is not None,
        "dropout": request.dropout_p > 0,
        "gqa": grouped,
        "value_dim": v.shape[-1] != q.shape[-1],
        "lse": request.return_lse,
        "lse_grad": request.return_lse and any(needs),
        "paged": request.pages is not None,
        "flipped": request.flipped,
        "strided": not all(t.stride(-1) == 1 or t.shape[-1] == 1 or t.numel() == 0 for t in (q, k, v)),
    }
    return frozenset(name for name, needed in present.items() if needed)


def _with_mask(
    found: tuple[Problem, object], mask: Mask | None, device: torch.device, slopes: Tensor | None, pages: Tensor | None
) -> Bound:
    """Check the mask against the sizes and put its structure into the problem."""
    problem = found[0]
    mask = mask or masks.FULL
    if problem.layout == "thd" and not mask.kinds & {"documents", "document_ids"}:
        raise InputError(
            "mask",
            "say where the documents are in layout 'thd'",
            masks.describe(mask.structure),
            hint="mask=masks.documents(cu_seqlens) & ..., so that packed documents cannot see each other",
        )
    if pages is not None:
        mask = _paged_mask(mask, problem, pages)
    mask.check(problem.batch, problem.heads, problem.q_len, problem.kv_len, packed=problem.packed, device=device)
    align = mask.resolved_align(problem.batch, problem.q_len, problem.kv_len, needed=slopes is not None)
    documents = mask.document_sizes
    if slopes is not None:
        check_slopes(slopes, problem.heads, documents[0] if documents else problem.batch)
    return Bound(mask, problem._replace(mask=mask.structure, align=align, documents=documents), found)


def _paged_mask(mask: Mask, problem: Problem, pages: Tensor) -> Mask:
    """With pages the mask carries the lengths; in thd each sequence's keys start at its own first page."""
    if not mask.kinds & {"lengths", "documents"}:
        raise InputError(
            "mask",
            "carry the keys' lengths when pages is given",
            masks.describe(mask.structure),
            hint="mask=masks.lengths(kv_lengths), or masks.documents(cu_seqlens_q, cu_seqlens_kv) in thd",
        )
    if problem.layout != "thd":
        return mask
    assert problem.page_size is not None
    sequences = (mask.document_sizes or (0,))[0]
    if sequences != pages.shape[0]:
        raise InputError("pages", f"have one row a document of the mask ({sequences})", list(pages.shape))
    starts = torch.arange(pages.shape[0] + 1, dtype=torch.int32, device=pages.device) * (
        pages.shape[1] * problem.page_size
    )
    return mask.with_padded_kv(starts)
