"""The checks of attention's arguments, one function per concept. Masks are checked by `Mask.check`.

Each raises `InputError` naming the argument, its value, the limit, and a fix where one step is enough.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided import masks
from undivided._bounded import Bounded
from undivided.arguments import layout as _layout
from undivided.arguments.checks import REQUIRED, as_type_error, check_device, check_tensor, is_finite
from undivided.arguments.layout import LAYOUTS, Layout
from undivided.arguments.shapes import broadcast_hint, broadcasts
from undivided.arguments.tensors import is_lazy, readable, versions
from undivided.errors import InputError, did_you_mean
from undivided.masks import Mask
from undivided.quantization import format_of, head_size
from undivided.request.foreign import mask_hint
from undivided.request.request import OPTIONAL_TENSORS, Options, Tensors

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_layout(layout: object) -> None:
    """InputError unless it is the name of a layout."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        near = did_you_mean(layout, LAYOUTS) if isinstance(layout, str) else None
        letters = "b batch, s sequence, h heads, d head size, t packed tokens; the letters are the order of q's axes"
        hint = letters if near is None else f"{near} {letters}"
        error = InputError("layout", f"be one of {', '.join(map(repr, LAYOUTS))}", repr(layout), hint)
        raise as_type_error(error) if layout is REQUIRED else error


_SMALLEST, _LARGEST = 1e-30, 1e30  # kernels compute with them, and with the inverse of softcap, in fp32


def check_scalars(options: Options) -> None:
    """InputError unless softcap, dropout_p and return_lse are valid."""
    softcap, dropout_p = options.softcap, options.dropout_p
    if softcap is not None and not (is_finite(softcap) and _SMALLEST <= float(softcap) <= _LARGEST):
        no_cap = is_finite(softcap) and (softcap == 0 or softcap > _LARGEST)
        hint = "softcap=None, for no cap" if no_cap else None
        raise InputError("softcap", "be a number from 1e-30 to 1e30, or None", repr(softcap), hint)
    if not is_finite(dropout_p) or not 0 <= dropout_p <= 1:
        is_percentage = isinstance(dropout_p, int | float) and 2 <= dropout_p <= 100
        hint = f"{dropout_p / 100:g}, if it is a percentage" if is_percentage else None
        raise InputError("dropout_p", "be a number from 0 to 1", repr(dropout_p), hint)
    if not isinstance(options.return_lse, bool):
        raise InputError("return_lse", "be True or False", repr(options.return_lse))


def checked_scale(scale: float) -> float:
    """The scale as a float, or InputError."""
    if not is_finite(scale) or not -_LARGEST <= float(scale) <= _LARGEST:
        hint = "float(scale); if it is learned, scale=1.0 and q * scale" if isinstance(scale, Tensor) else None
        raise InputError("scale", "be a number from -1e30 to 1e30, or None for 1/sqrt(head size)", repr(scale), hint)
    return float(scale)


def check_axes(q: Tensor, k: Tensor, v: Tensor, layout: Layout, pages: Tensor | None) -> None:
    """InputError unless q, k and v have the axes of the layout; pools of pages have four axes."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        rank, axes = _layout.axis_count(layout), ", ".join(layout)
        if pages is not None and name != "q":
            rank, axes = 4, "pages, page size, kv heads, head size"
        if tensor.dim() != rank:
            hint = None
            if tensor.dim() == 3 and rank == 4 and pages is None:
                hint = (
                    "a [batch, seq, hidden] tensor has its heads still together: "
                    "x.unflatten(-1, (heads, head_dim)), then layout='bshd'\n"
                    f"        one sequence is {name}[None]; packed tokens are layout='thd'"
                )
            elif tensor.dim() == 4 and rank == 3:
                hint = "thd is for packed tokens without a batch axis; a padded batch is 'bshd', 'sbhd' or 'bhsd'"
            raise InputError(name, f"have {rank} axes [{axes}]", f"{tensor.dim()} axes {list(tensor.shape)}", hint=hint)


def check_float(name: str, tensor: Tensor) -> None:
    """InputError unless it has one of `DTYPES`."""
    if tensor.dtype not in DTYPES:
        hint = f"{name}.float()" if tensor.dtype in (torch.bool, torch.int32, torch.int64) else None
        if format_of(tensor.dtype) is not None:
            hint = "keys and values can be quantised, queries cannot"
        raise InputError(name, "be float16, bfloat16, float32 or float64", str(tensor.dtype), hint)


def check_dtypes_and_devices(q: Tensor, k: Tensor, v: Tensor) -> None:
    """InputError unless q, k and v share a supported dtype and a device."""
    check_float("q", q)
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            hint = f"{name}.to(q.dtype), or run under torch.autocast"
            if format_of(tensor.dtype) is not None:
                hint = "quantised keys and values require k_scale= and v_scale= (undivided.quantization.quantize)"
            raise InputError(name, f"have the dtype of q ({q.dtype})", str(tensor.dtype), hint=hint)
        check_device(name, tensor, q.device)


def check_shapes(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> None:
    """InputError unless the sizes of q, k and v fit together in this layout."""
    batch, _, heads, qk_dim = _layout.sizes(q.shape, layout)
    k_batch, kv_len, kv_heads, _ = _layout.sizes(k.shape, layout)
    v_batch, v_len, v_heads, _ = _layout.sizes(v.shape, layout)
    k_dim = head_size(k)
    _check_not_empty(q, v, heads, qk_dim)
    same = k_batch == v_batch == batch and kv_len == v_len and kv_heads == v_heads and k_dim == qk_dim
    if same and kv_heads and heads % kv_heads == 0:
        return
    hint = _layout_hint(q, k, v, layout)
    if k_dim != qk_dim:
        hint = hint or "q and k share a head size; only v may have another"
        raise InputError("k", f"have the head size of q ({qk_dim})", f"{k_dim} in {list(k.shape)}", hint=hint)
    if k_batch != batch:
        if k_batch == v_batch == 1:
            hint = hint or "the batch axis is not broadcast: expand k and v, which copies nothing"
        raise InputError("k", f"have the batch size of q ({batch})", f"{k_batch} in {list(k.shape)}", hint=hint)
    sizes = ("batch size", k_batch, v_batch), ("length", kv_len, v_len), ("number of heads", kv_heads, v_heads)
    for what, k_size, v_size in sizes:
        if k_size != v_size:
            hint = hint or "k and v may differ in their head sizes only"
            raise InputError("v", f"have the {what} of k ({k_size})", f"{v_size} in {list(v.shape)}", hint=hint)
    _check_heads(heads, kv_heads, k, hint)


def _check_not_empty(q: Tensor, v: Tensor, heads: int, qk_dim: int) -> None:
    """InputError if there is no query head, or a head size of 0."""
    if heads == 0 or qk_dim == 0 or head_size(v) == 0:
        name, tensor = ("v", v) if head_size(v) == 0 else ("q", q)
        raise InputError(name, "have at least one head and a head size of at least 1", list(tensor.shape))


def _check_heads(heads: int, kv_heads: int, k: Tensor, hint: str | None) -> None:
    if kv_heads == 0 or heads % kv_heads:
        raise InputError(
            "k",
            f"have a number of heads that divides q's ({heads})",
            f"{kv_heads} in {list(k.shape)}",
            hint=hint or heads_hint(heads, kv_heads),
        )


def heads_hint(heads: int, kv_heads: int) -> str:
    """A hint for a number of key heads that does not divide that of the query heads."""
    if kv_heads > heads:
        return "k has more heads than q: were q and k given in the other order?"
    if heads > 1024:  # a list of divisors would be too long
        return f"grouped-query attention needs a number of key heads that divides the query heads ({heads})"
    *fewer, most = (str(n) for n in range(1, heads + 1) if heads % n == 0)
    divisors = f"{', '.join(fewer)} or {most}" if fewer else most
    return (
        f"grouped-query attention needs {divisors} key heads for {heads} query heads, so that each serves equally many"
    )


def _layout_hint(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> str | None:
    """A hint for another layout that these shapes fit: if there is just one in which the sequence is longer, because
    the sequence is mostly the longest axis."""
    here = max(_layout.sizes(q.shape, layout)[1], _layout.sizes(k.shape, layout)[1])
    fitting = []
    for other in LAYOUTS:
        if other == layout or _layout.axis_count(other) != q.dim():
            continue
        (b, s, h, d), (kb, ks, kh, kd), (vb, vs, vh, _) = (_layout.sizes(t.shape, other) for t in (q, k, v))
        fits = (b, d) == (kb, kd) and (kb, ks, kh) == (vb, vs, vh) and kh and h % kh == 0
        if fits and max(s, ks) > here:
            fitting.append(other)
    return f"these shapes would fit layout={fitting[0]!r}" if len(fitting) == 1 else None


def check_pages(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, pages: Tensor, gradients: bool
) -> tuple[int, int, int]:
    """(kv_len, kv_heads, page_size) of a paged cache, or InputError."""
    if gradients:
        raise InputError(
            "pages",
            "be used without gradients of k and v (a cache is read, not trained through)",
            "k or v with requires_grad=True",
            hint="call under torch.no_grad(), or pass k and v unpaged",
        )
    batch, _, heads, qk_dim = _layout.sizes(q.shape, layout)
    if pages.dtype != torch.int32 or pages.dim() != 2:
        raise InputError(
            "pages",
            "be an int32 block table [sequences, max_pages]",
            f"{pages.dtype} {list(pages.shape)}",
            hint="pages.to(torch.int32)" if pages.dim() == 2 else None,
        )
    _check_not_empty(q, v, heads, qk_dim)
    if layout != "thd" and pages.shape[0] != batch:
        raise InputError("pages", f"have one row per sequence of q ({batch})", list(pages.shape))
    if k.shape[:3] != v.shape[:3]:
        raise InputError("v", f"have the pages, page size and heads of k {list(k.shape[:3])}", list(v.shape))
    if head_size(k) != qk_dim:
        raise InputError("k", f"have the head size of q ({qk_dim})", f"{head_size(k)} in {list(k.shape)}")
    check_device("pages", pages, q.device)
    page_size, kv_heads = k.shape[1], k.shape[2]
    if k.shape[0] == 0 or page_size == 0:
        raise InputError("k", "have at least one page of at least one key when pages is given", list(k.shape))
    swapped = kv_heads > page_size and heads % kv_heads and heads % page_size == 0
    hint = "did you mean k.transpose(1, 2)? Pools are [pages, page size, kv heads, head size]" if swapped else None
    _check_heads(heads, kv_heads, k, hint)
    rows = pages.shape[0] if layout == "thd" else 1
    return rows * pages.shape[1] * page_size, kv_heads, page_size


def check_page_numbers(mask: Mask, pages: Tensor, pool: int, page_size: int) -> None:
    """InputError unless the pool has each page in use (CPU only)."""
    if pages.numel() == 0:
        return
    if readable(pages):  # mostly every entry is valid: then the dozen operations below are not needed
        lowest, highest = _page_range(pages)
        if lowest >= 0 and highest < pool:
            return
    lengths, documents = mask.take("lengths")[0], mask.take("documents")[0]
    if lengths is not None:
        ends, start = lengths.kv, lengths.kv_start
    else:
        ends, start = documents.cu_seqlens_kv.long().diff(), None
    if not readable(pages, ends, start):
        return
    first_keys = torch.arange(pages.shape[1], device=pages.device) * page_size
    real = first_keys < (ends if start is None else ends.long() + start).unsqueeze(1)
    wrong = real & ((pages < 0) | (pages >= pool))
    if bool(wrong.any()):
        raise InputError(
            "pages",
            f"number pages of the pool, 0 to {pool - 1}, wherever a sequence has keys",
            int(pages[wrong][0]),
            hint="only entries beyond a sequence's length may hold anything else",
        )


_page_ranges: Bounded[object, tuple[object, tuple[int, int]]] = Bounded(1024)
"""By the place of a small block table: its contents, and its smallest and largest entry."""


def _page_range(pages: Tensor) -> tuple[int, int]:
    """The smallest and the largest entry of a block table on the CPU. Each layer of a model may have its own table,
    which changes only once per page."""
    place = pages.data_ptr(), pages.storage_offset(), pages.shape, pages.stride(), pages.dtype
    content, kept = None if is_lazy(pages) else versions((pages,)), _page_ranges.get(place)
    if kept is not None and kept[0] == content:
        return kept[1]
    lowest, highest = pages.aminmax()
    page_range = int(lowest), int(highest)
    if content is not None and isinstance(content[0], bytes):
        _page_ranges[place] = content, page_range
    return page_range


def check_optional_tensors(tensors: Tensors, heads: int) -> None:
    """InputError unless the kinds of the optional tensors and the shape of sinks are valid; other checks come later."""
    q, sinks = tensors.q, tensors.sinks
    for name, tensor in zip(OPTIONAL_TENSORS, tensors[3:], strict=True):
        if tensor is None:
            continue
        check_tensor(name, tensor)
        if not tensor.is_floating_point():
            hint = f"{name}.to(q.dtype)"
            if tensor.dtype == torch.bool:
                hint = "a boolean mask goes to mask=masks.dense(tensor), True = attend"
            raise InputError(name, "be a floating-point tensor", str(tensor.dtype), hint=hint)
        check_device(name, tensor, q.device)
    if sinks is not None and tuple(sinks.shape) != (heads,):
        hint = "sinks.flatten()" if sinks.numel() == heads else "one sink for each query head"
        raise InputError("sinks", f"have shape [heads] = [{heads}]", list(sinks.shape), hint)


def check_bias(bias: Tensor, layout: Layout, batch: int, heads: int, q_len: int, kv_len: int) -> str:
    """Which axes of the bias are broadcast, as in `Problem.bias`, or InputError."""
    full = (batch, heads, q_len, kv_len)
    words = f"[heads, Tq, Tk] = {list(full[1:])}" if layout == "thd" else f"[batch, heads, Sq, Sk] = {list(full)}"
    if not broadcasts(bias.shape, full):
        hint = broadcast_hint(bias.shape, full, "bias{}")
        raise InputError("bias", f"be broadcastable to {words}", list(bias.shape), hint)
    shape = (1,) * (4 - bias.dim()) + tuple(bias.shape)
    return "".join("1" if size == 1 != limit else axis for axis, size, limit in zip("bhqk", shape, full, strict=True))


def check_slopes(slopes: Tensor, heads: int, sequences: int) -> None:
    """InputError unless there is one slope per head, or per sequence and head."""
    if tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        raise InputError(
            "alibi_slopes",
            f"have shape [heads] = [{heads}] or [sequences, heads] = [{sequences}, {heads}]",
            list(slopes.shape),
            "alibi_slopes.flatten()" if slopes.numel() == heads else None,
        )


def checked_mask(mask: object) -> Mask:
    """The mask; all pairs if None; InputError if it is not a mask."""
    if mask is None:
        return masks.FULL
    if isinstance(mask, Mask):
        return mask
    hint = mask_hint(mask)
    if isinstance(mask, Tensor):
        hint = "masks.dense(tensor) for booleans (True = attend); bias=tensor for numbers that are added"
    raise InputError("mask", "be an undivided.masks.Mask or None", type(mask).__name__, hint=hint)
