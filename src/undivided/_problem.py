"""Request -> Problem + Operands: the one place where arguments are validated.

A `Problem` describes what is asked without a tensor in it: it is frozen, hashable, and all that selection looks at.
`Operands` are the tensors themselves, in the caller's layout, with views of them in the orders that kernels take.

Legend: B batch, S sequence (Sq queries, Sk keys), H query heads, N key/value heads, D head size (Dk, Dv).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from undivided import _layout, masks
from undivided._intervals import NormalForm
from undivided._layout import LAYOUTS, Layout
from undivided.errors import InputError
from undivided.masks import Mask, Structure

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Problem(NamedTuple):
    """What is asked, without tensors. Built once, validated once, never changed.

    device: "cpu", "cuda", ... where it is to run.
    dtype: of q, k, v and the result.
    layout: of q, k, v and the result.
    batch, heads, kv_heads, q_len, kv_len, qk_dim, v_dim: sizes; in thd q_len and kv_len are the totals of all documents.
    mask: the mask's structure; mask.kinds names its parts.
    align: "both" where top-left and bottom-right agree, "top_left", "bottom_right", or None where it does not matter.
    features: what the problem needs of a backend beyond plain attention; see `FEATURES`.
    bias: which axes of the bias are broadcast, as "bhqk" with 1 for a broadcast axis, e.g. "1h1k"; None without a bias.
    documents: (number, longest query, longest key length) of packed documents; lengths are None where only the device knows.
    page_size: of a paged key/value cache, or None.
    deterministic: the result must repeat bit for bit.
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

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed documents (thd)."""
        return self.layout == "thd"

    def __str__(self) -> str:
        q = f"q {self.batch}x{self.q_len}x{self.heads}x{self.qk_dim}"
        kv = f"kv {self.batch}x{self.kv_len}x{self.kv_heads}x{self.qk_dim}"
        if self.v_dim != self.qk_dim:
            kv += f"/{self.v_dim}"
        parts = [
            f"{q} (BxSxHxD), {kv}",
            f"{str(self.dtype).removeprefix('torch.')} {self.layout} on {self.device}",
        ]
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
    "paged": "paged keys and values",
    "strided": "a last axis whose stride is not 1",
}
"""Every feature a problem may need, in words."""


_NOTHING = torch.empty(0)


@dataclass(eq=False)
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
    _normal_form: NormalForm | None = field(default=None, repr=False)

    def heads_first(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as [B, H, S, D]; pages are gathered (a copy, for backends that read no block table)."""
        if self.pages is not None:
            k, v = (self._gathered(pool).transpose(1, 2) for pool in (self.k, self.v))
            return _layout.heads_first(self.q, self.layout), k, v
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
        if self._normal_form is None:
            self._normal_form = self.mask.normal_form(
                problem.batch, problem.heads, problem.q_len, problem.kv_len, self.q.device
            )
        return self._normal_form

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The inputs that may have gradients, in the order gradients are returned."""
        return self.q, self.k, self.v, self.bias, self.sinks, self.alibi_slopes

    def with_differentiable(self, tensors: Sequence[Tensor | None]) -> Operands:
        """The same operands around other tensors in that order."""
        q, k, v, bias, sinks, slopes = tensors
        assert q is not None and k is not None and v is not None
        return Operands(
            q, k, v, self.layout, self.mask, self.scale, self.softcap, bias, slopes, sinks,
            self.dropout_p, self.dropout_seed, self.pages, self.needs, self._normal_form,
        )  # fmt: skip

    def release(self) -> Operands:
        """Let go of the differentiable tensors; what remains is kept until the backward."""
        self.q = self.k = self.v = _NOTHING
        self.bias = self.sinks = self.alibi_slopes = None
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
    _check_layout(layout)
    key, needs = _signature(
        q, k, v, layout, bias, softcap, alibi_slopes, sinks, dropout_p, return_lse, pages, device, needs
    )
    known = _problems.get(key)
    if known is None:
        known = _build(
            q, k, v, layout, bias, softcap, alibi_slopes, sinks, dropout_p, return_lse, pages, device, needs
        )
        if len(_problems) >= _MOST_PROBLEMS:
            _problems.clear()
        _problems[key] = known
    if mask is not None or layout == "thd" or alibi_slopes is not None or pages is not None:
        given = _as_mask(mask)
        with_mask: Callable[[], tuple[Mask, Problem]] = _WithMask(known, given, q.device, alibi_slopes, pages)
        mask, known = given.remembered(("problem", key), with_mask)
    if bias is not None:
        bias = bias if bias.dim() == 4 else bias[(None,) * (4 - bias.dim())]
    if dropout_p:
        dropout_seed = _seed(dropout_seed, q.device)
    scale = known.qk_dim**-0.5 if scale is None else _scale(scale)
    operands = Operands(
        q, k, v, layout, mask or masks.FULL, scale, softcap, bias, alibi_slopes, sinks, dropout_p, dropout_seed, pages,
        needs,
    )  # fmt: skip
    return known, operands


_problems: dict[object, Problem] = {}
_MOST_PROBLEMS = 4096


_NO_GRADIENTS = (False,) * 6


def _signature(
    q: Tensor, k: Tensor, v: Tensor, layout: str, bias: Tensor | None, softcap: float | None,
    alibi_slopes: Tensor | None, sinks: Tensor | None, dropout_p: float, return_lse: bool, pages: Tensor | None,
    device: str | None, needs: tuple[bool, ...] | None,
) -> tuple[object, tuple[bool, ...]]:  # fmt: skip
    """Everything that `_build` looks at, so that a repeated call is a dictionary look-up; and what needs a gradient."""
    try:
        if needs is None:
            needs = _NO_GRADIENTS
            if torch.is_grad_enabled():
                inputs = (q, k, v, bias, sinks, alibi_slopes)
                needs = tuple([t is not None and t.requires_grad for t in inputs])
        key: tuple[object, ...] = (
            layout, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
            q.stride(), k.stride(), v.stride(), return_lse, device, needs,
        )  # fmt: skip
        if (
            bias is None
            and softcap is None
            and alibi_slopes is None
            and sinks is None
            and not dropout_p
            and pages is None
        ):
            return key, needs
        _check_scalars(
            softcap, dropout_p, return_lse
        )  # before they become part of a key: True == 1, lists have no hash
        extras = tuple(
            None if t is None else (t.shape, t.dtype, t.device) for t in (bias, alibi_slopes, sinks, pages)
        )
        return (*key, *extras, softcap is None, bool(dropout_p)), needs
    except (AttributeError, TypeError, RuntimeError):
        for name, value in (("q", q), ("k", k), ("v", v)):
            _check_tensor(name, value)
        for name, value in (
            ("bias", bias),
            ("alibi_slopes", alibi_slopes),
            ("sinks", sinks),
            ("pages", pages),
        ):
            if value is not None:
                _check_tensor(name, value)
        _check_scalars(softcap, dropout_p, return_lse)
        raise


def _build(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, bias: Tensor | None, softcap: float | None,
    alibi_slopes: Tensor | None, sinks: Tensor | None, dropout_p: float, return_lse: bool, pages: Tensor | None,
    device: str | None, needs: tuple[bool, ...],
) -> Problem:  # fmt: skip
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor)
    _check_scalars(softcap, dropout_p, return_lse)
    _check_ranks(q, k, v, layout, pages)
    _check_kinds(q, k, v)
    batch, q_len, heads, qk_dim = _layout.sizes(q.shape, layout)
    if pages is None:
        _check_shapes(q, k, v, layout)
        _, kv_len, kv_heads, _ = _layout.sizes(k.shape, layout)
        page_size = None
    else:
        kv_len, kv_heads, page_size = _check_pages(q, k, v, layout, pages)
    v_dim = v.shape[-1]
    for name, extra in (("bias", bias), ("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if extra is not None:
            _check_extra(name, extra, q)
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise InputError("sinks", f"have shape [heads] = [{heads}]", list(sinks.shape))
    if pages is not None and (needs[1] or needs[2]):
        raise InputError(
            "pages", "be used without gradients of k and v (a cache is read, not trained through)",
            "k or v with requires_grad=True", hint="call under torch.no_grad(), or pass k and v unpaged",
        )  # fmt: skip
    backward = any(needs)
    flags = {
        "backward": backward,
        "bias": bias is not None,
        "bias_grad": needs[3],
        "sinks": sinks is not None,
        "sinks_grad": needs[4],
        "alibi": alibi_slopes is not None,
        "alibi_grad": needs[5],
        "softcap": softcap is not None,
        "dropout": dropout_p > 0,
        "gqa": heads != kv_heads,
        "value_dim": v_dim != qk_dim,
        "lse": return_lse,
        "lse_grad": return_lse and backward,
        "paged": pages is not None,
        "strided": not (_unit_stride(q) and _unit_stride(k) and _unit_stride(v)),
    }
    return Problem(
        device=device or q.device.type, dtype=q.dtype, layout=layout, batch=batch, heads=heads, kv_heads=kv_heads,
        q_len=q_len, kv_len=kv_len, qk_dim=qk_dim, v_dim=v_dim, mask=masks.FULL.structure, align=None,
        features=frozenset(name for name, present in flags.items() if present), bias=None if bias is None else _check_bias(bias, layout, batch, heads, q_len, kv_len),
        page_size=page_size,
    )  # fmt: skip


def _unit_stride(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1 or tensor.numel() == 0


def _check_layout(layout: object) -> None:
    if layout not in LAYOUTS:
        raise InputError(
            "layout", f"be one of {', '.join(map(repr, LAYOUTS))}", repr(layout),
            hint="b batch, s sequence, h heads, d head size, t packed tokens; the letters are the order of q's axes",
        )  # fmt: skip


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise InputError(name, "be a torch.Tensor", type(value).__name__)
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else str(value.layout)
        hint = (
            "pass its values in layout='thd' with mask=masks.documents(offsets)" if value.is_nested else None
        )
        raise InputError(name, "be a dense (strided) tensor", kind, hint=hint)


def _check_scalars(softcap: object, dropout_p: object, return_lse: object) -> None:
    if softcap is not None and (not _is_number(softcap) or not 0 < float(softcap) < math.inf):  # type: ignore[arg-type]
        raise InputError("softcap", "be a positive number or None", repr(softcap))
    if not _is_number(dropout_p) or not 0 <= float(dropout_p) <= 1:  # type: ignore[arg-type]
        raise InputError("dropout_p", "be a number from 0 to 1", repr(dropout_p))
    if not isinstance(return_lse, bool):
        raise InputError("return_lse", "be True or False", repr(return_lse))


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _scale(scale: float) -> float:
    if not _is_number(scale) or not math.isfinite(scale):
        raise InputError("scale", "be a finite number or None (1/sqrt(head size))", repr(scale))
    return float(scale)


def _check_ranks(q: Tensor, k: Tensor, v: Tensor, layout: Layout, pages: Tensor | None) -> None:
    ranks = {"q": _layout.rank(layout)} | dict.fromkeys(
        ("k", "v"), _layout.rank(layout) if pages is None else 4
    )
    axes = {"q": ", ".join(layout)} | dict.fromkeys(("k", "v"), ", ".join(layout))
    if pages is not None:
        axes |= dict.fromkeys(("k", "v"), "pages, page size, kv heads, head size")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != ranks[name]:
            hint = None
            if tensor.dim() == 3 and ranks[name] == 4 and pages is None:
                hint = (
                    "a [batch, seq, hidden] tensor has its heads still together: "
                    "x.unflatten(-1, (heads, head_dim)), then layout='bshd'"
                )
            elif tensor.dim() == 4 and ranks[name] == 3:
                hint = "thd is for packed tokens without a batch axis; a padded batch is 'bshd', 'sbhd' or 'bhsd'"
            raise InputError(
                name,
                f"have {ranks[name]} axes [{axes[name]}]",
                f"{tensor.dim()} axes {list(tensor.shape)}",
                hint=hint,
            )


def _check_kinds(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype not in DTYPES:
        raise InputError("q", "be float16, bfloat16, float32 or float64", str(q.dtype))
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise InputError(
                name, f"have the dtype of q ({q.dtype})", str(tensor.dtype),
                hint=f"{name}.to(q.dtype), or run under torch.autocast",
            )  # fmt: skip
        if tensor.device != q.device:
            raise InputError(
                name, f"be on the device of q ({q.device})", str(tensor.device), hint=f"{name}.to(q.device)"
            )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> None:
    batch, q_len, heads, qk_dim = _layout.sizes(q.shape, layout)
    k_batch, kv_len, kv_heads, k_dim = _layout.sizes(k.shape, layout)
    v_batch, v_len, v_heads, v_dim = _layout.sizes(v.shape, layout)
    hint = _layout_hint(q, k, v, layout)
    if qk_dim == 0 or v_dim == 0 or heads == 0:
        name, tensor = ("v", v) if v_dim == 0 else ("q", q)
        raise InputError(name, "have at least one head and a head size of at least 1", list(tensor.shape))
    if k_dim != qk_dim:
        raise InputError("k", f"have the head size of q ({qk_dim})", f"{k_dim} in {list(k.shape)}", hint=hint)
    if k_batch != batch:
        raise InputError(
            "k", f"have the batch size of q ({batch})", f"{k_batch} in {list(k.shape)}", hint=hint
        )
    for what, of_k, of_v in (
        ("batch size", k_batch, v_batch),
        ("length", kv_len, v_len),
        ("heads", kv_heads, v_heads),
    ):
        if of_k != of_v:
            raise InputError("v", f"have the {what} of k ({of_k})", f"{of_v} in {list(v.shape)}", hint=hint)
    _check_heads(heads, kv_heads, k, hint)


def _check_heads(heads: int, kv_heads: int, k: Tensor, hint: str | None) -> None:
    if kv_heads == 0 or heads % kv_heads:
        raise InputError(
            "k",
            f"have a number of heads that divides q's ({heads})",
            f"{kv_heads} in {list(k.shape)}",
            hint=hint,
        )


def _layout_hint(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> str | None:
    """If the shapes make no sense in this layout but do in exactly one other, say so."""
    fitting = []
    for other in LAYOUTS:
        if other == layout or _layout.rank(other) != q.dim():
            continue
        (b, _, h, d), (kb, ks, kh, kd), (vb, vs, vh, _) = (_layout.sizes(t.shape, other) for t in (q, k, v))
        if (b, d) == (kb, kd) and (kb, ks, kh) == (vb, vs, vh) and kh and h % kh == 0:
            fitting.append(other)
    return f"these shapes would fit layout={fitting[0]!r}" if len(fitting) == 1 else None


def _check_pages(q: Tensor, k: Tensor, v: Tensor, layout: Layout, pages: Tensor) -> tuple[int, int, int]:
    """(kv_len, kv_heads, page_size) of a paged cache."""
    _check_tensor("pages", pages)
    batch, _, heads, qk_dim = _layout.sizes(q.shape, layout)
    if pages.dtype != torch.int32 or pages.dim() != 2:
        raise InputError(
            "pages", "be an int32 block table [sequences, max_pages]", f"{pages.dtype} {list(pages.shape)}"
        )
    if layout != "thd" and pages.shape[0] != batch:
        raise InputError("pages", f"have one row a sequence of q ({batch})", list(pages.shape))
    if k.shape[:3] != v.shape[:3]:
        raise InputError("v", f"have the pages, page size and heads of k {list(k.shape[:3])}", list(v.shape))
    if k.shape[3] != qk_dim:
        raise InputError("k", f"have the head size of q ({qk_dim})", f"{k.shape[3]} in {list(k.shape)}")
    if pages.device != q.device:
        raise InputError("pages", f"be on the device of q ({q.device})", str(pages.device))
    page_size, kv_heads = k.shape[1], k.shape[2]
    _check_heads(heads, kv_heads, k, None)
    rows = pages.shape[0] if layout == "thd" else 1
    return rows * pages.shape[1] * page_size, kv_heads, page_size


def _check_extra(name: str, tensor: Tensor, q: Tensor) -> None:
    _check_tensor(name, tensor)
    if not tensor.is_floating_point():
        hint = (
            "a boolean mask goes to mask=masks.dense(tensor), True = attend"
            if tensor.dtype == torch.bool
            else None
        )
        raise InputError(name, "be a floating-point tensor", str(tensor.dtype), hint=hint)
    if tensor.device != q.device:
        raise InputError(name, f"be on the device of q ({q.device})", str(tensor.device))


def _check_bias(bias: Tensor, layout: Layout, batch: int, heads: int, q_len: int, kv_len: int) -> str:
    full = (batch, heads, q_len, kv_len)
    words = (
        f"[heads, Tq, Tk] = {list(full[1:])}" if layout == "thd" else f"[batch, heads, Sq, Sk] = {list(full)}"
    )
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    if bias.dim() > 4 or any(size not in (1, limit) for size, limit in zip(shape, full, strict=True)):
        raise InputError("bias", f"be broadcastable to {words}", list(bias.shape))
    return "".join(
        "1" if size == 1 != limit else axis for axis, size, limit in zip("bhqk", shape, full, strict=True)
    )


def _check_slopes(slopes: Tensor, problem: Problem, sequences: int) -> None:
    if tuple(slopes.shape) not in ((problem.heads,), (sequences, problem.heads)):
        raise InputError(
            "alibi_slopes", f"have shape [heads] = [{problem.heads}] or [sequences, heads] = [{sequences}, {problem.heads}]",
            list(slopes.shape),
        )  # fmt: skip


def _seed(seed: int | Tensor | None, device: torch.device) -> int | Tensor:
    """The dropout seed; None draws one from torch's generator, so that checkpoint recomputation repeats it."""
    if seed is None:
        return torch.empty((), dtype=torch.int64, device=device).random_()
    if isinstance(seed, Tensor):
        if seed.dim() != 0 or seed.dtype != torch.int64:
            raise InputError(
                "dropout_seed", "be an int or a 0-d int64 tensor", f"{seed.dtype} {list(seed.shape)}"
            )
        return seed.clone()  # the caller may count it up in place before the backward
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool) or not 0 <= int(seed) < 2**63:
        raise InputError("dropout_seed", "be an int from 0 to 2**63 - 1 or a 0-d int64 tensor", repr(seed))
    return int(seed)


def _as_mask(mask: object) -> Mask:
    if mask is None:
        return masks.FULL
    if isinstance(mask, Mask):
        return mask
    hint = None
    if isinstance(mask, Tensor):
        hint = "masks.dense(tensor) for booleans (True = attend); bias=tensor for numbers that are added"
    raise InputError("mask", "be an undivided.masks.Mask or None", type(mask).__name__, hint=hint)


class _WithMask(NamedTuple):
    """Checks a mask against the sizes and puts its structure into the problem, when called."""

    problem: Problem
    mask: Mask
    device: torch.device
    slopes: Tensor | None
    pages: Tensor | None

    def __call__(self) -> tuple[Mask, Problem]:
        problem, mask, device, slopes, pages = self
        if problem.layout == "thd" and not mask.kinds & {"documents", "document_ids"}:
            raise InputError(
                "mask", "say where the documents are in layout 'thd'", masks.describe(mask.structure),
                hint="mask=masks.documents(cu_seqlens) & ..., so that packed documents cannot see each other",
            )  # fmt: skip
        if pages is not None:
            mask = _paged_mask(mask, problem, pages)
        mask.check(
            problem.batch, problem.heads, problem.q_len, problem.kv_len, packed=problem.packed, device=device
        )
        align = mask.resolved_align(problem.batch, problem.q_len, problem.kv_len, needed=slopes is not None)
        documents = mask.document_sizes
        if slopes is not None:
            _check_slopes(slopes, problem, documents[0] if documents else problem.batch)
        return mask, problem._replace(mask=mask.structure, align=align, documents=documents)


def _paged_mask(mask: Mask, problem: Problem, pages: Tensor) -> Mask:
    """With pages the mask carries the lengths; in thd each sequence's keys start at its own first page."""
    if not mask.kinds & {"lengths", "documents"}:
        raise InputError(
            "mask", "carry the keys' lengths when pages is given", masks.describe(mask.structure),
            hint="mask=masks.lengths(kv_lengths), or masks.documents(cu_seqlens_q, cu_seqlens_kv) in thd",
        )  # fmt: skip
    if problem.layout != "thd":
        return mask
    assert problem.page_size is not None
    starts = torch.arange(pages.shape[0] + 1, dtype=torch.int32, device=pages.device) * (
        pages.shape[1] * problem.page_size
    )
    return mask.with_padded_kv(starts)
