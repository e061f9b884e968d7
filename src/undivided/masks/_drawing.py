"""Descriptions of masks: one line, a small picture in text, and a plot of any size.

The plot counts the allowed pairs under each pixel from the ranges. This takes O(S + pixels) for structured masks, and
one pass over blocks of rows for dense masks; no S x S tensor is built.
"""

from __future__ import annotations

import importlib.util
import math
import textwrap
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from undivided.arguments.checks import as_integer, check_type
from undivided.arguments.tensors import dtype_name, readable
from undivided.errors import InputError
from undivided.masks._fields import MaskFields
from undivided.masks._parts import (
    Blocks,
    Chunk,
    Dense,
    DocumentIds,
    Documents,
    Field,
    GlobalBand,
    Lengths,
    Origin,
    Part,
    Prefix,
    Tree,
)
from undivided.masks._predicate import Predicate
from undivided.masks._structure import Structure
from undivided.masks.normal_form import NormalForm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALLOWED, MASKED = "■", "·"
EXAMPLE = 8  # size of the picture of a mask without sizes
LARGEST_PICTURE = 32  # a longer line does not fit a terminal
MAX_DRAWN_PAIRS = 1 << 22  # of a picture in text: 8 MiB of characters
PLOT_INCHES = 5
TITLE_POINTS, TITLE_COLUMNS = 9, 60  # fixed width: 60 letters of 9 * 0.6 points are 4.5 of the 5 inches


def as_calls(mask: MaskFields) -> str:
    """The mask in one line, as the calls that build it.

    >>> from undivided import masks
    >>> as_calls(masks.window(3, 0, align="bottom_right") & masks.prefix(5))
    "window(3, 0, align='bottom_right') & prefix(5)"
    """
    align = f"align={mask.align!r}" if mask.align else ""
    unions = [part for part in mask.parts if isinstance(part, GlobalBand) and _has_sinks(part.right, *mask.band)]
    words = [] if unions or mask.band == (None, None) else [_band(*mask.band, align)]
    for part in mask.parts:
        if part in unions:
            words.append(f"{_band(part.left, part.right, align)} | sinks({_value(part.prefix)})")
        else:
            words.append(_describe_part(part, align))
    if not words:
        return _band(None, None, align) if align else "every pair"
    return " & ".join(f"({word})" if " | " in word and len(words) > 1 else word for word in words)


def describe_structure(structure: Structure) -> str:
    """The structure of a mask in one line, without its values.

    Args:
        structure: ``mask.structure``.

    Returns:
        The names of the bands and parts, joined by ``&`` and ``|``, and the alignment.

    >>> from undivided.masks import *
    >>> describe((causal(align="bottom_right") & lengths([2, 3])).structure)
    'causal & lengths (bottom-right)'
    """
    check_type("structure", structure, Structure, "the structure of a mask, mask.structure")
    outer = (structure.left, structure.right)
    words = []
    if not any(name == GlobalBand.name and _has_sinks(fields[1], *outer) for name, *fields in structure.detail):
        if "causal" in structure.kinds:
            words.append("causal")
        elif outer != (None, None):
            words.append(f"window({structure.left}, {structure.right})")
    for name, *fields in structure.detail:
        if name == GlobalBand.name:
            left, right, _ = fields
            band = "causal" if (left, right) == (None, 0) else f"window({left}, {right})"
            words.append(f"({band} | {'sinks' if _has_sinks(right, *outer) else 'prefix'})")
        elif name == Chunk.name:
            words.append(f"chunks({fields[0]})")
        else:
            words.append(str(name))
    align = f" ({structure.align.replace('_', '-')})" if structure.align else ""
    return (" & ".join(words) or "every pair") + align


def _band(left: int | None, right: int | None, align: str) -> str:
    return _call("causal", align) if (left, right) == (None, 0) else _call("window", f"{left}, {right}", align)


def _has_sinks(right: object, outer_left: int | None, outer_right: int | None) -> bool:
    """Whether a union has the right side of the mask's own band: then it is ``window(left, right) | sinks(n)``."""
    return outer_left is None and right is not None and right == outer_right


def _call(name: str, *arguments: str) -> str:
    return f"{name}({', '.join(argument for argument in arguments if argument)})"


def _describe_documents(part: Documents) -> Iterator[str]:
    """The arguments of `masks.documents`, without those of the keys that are the same as those of the queries."""
    same = part.cu_seqlens_kv is part.cu_seqlens_q
    yield _value(part.cu_seqlens_q)
    if not same:
        yield _value(part.cu_seqlens_kv)
    for name in ("padded", "max", "total"):
        q, kv = getattr(part, f"{name}_q"), getattr(part, f"{name}_kv")
        if q is not None:
            yield f"{name}_q={_value(q)}"
        if kv is not None and not (same and kv is q):
            yield f"{name}_kv={_value(kv)}"


def _describe_part(part: Part, align: str) -> str:
    match part:
        case Lengths():
            named = zip(("kv", "q", "kv_start", "q_start"), part.fields(), strict=True)
            return _call("lengths", *(f"{name}={_value(value)}" for name, value in named if value is not None))
        case Documents():
            return _call("documents", *_describe_documents(part))
        case DocumentIds():
            return _call("document_ids", _value(part.ids_q), "" if part.ids_kv is part.ids_q else _value(part.ids_kv))
        case Prefix():
            return _call("prefix", _value(part.length))
        case GlobalBand():
            return f"{_band(part.left, part.right, align)} | prefix({_value(part.prefix)})"
        case Chunk():
            offset = "" if part.offset is None else f"offset={_value(part.offset)}"
            return _call("chunks", str(part.size), align, offset)
        case Dense():
            return _call("dense", _value(part.tensor))
        case Origin():
            firsts = (("sequences", part.sequence), ("heads", part.head))
            return " & ".join(f"{name} from {n}" for name, n in firsts if n)
        case Tree():
            return _call("tree", _value(part.parents[0] if len(part.parents) == 1 else part.parents))
        case Blocks():
            if part.q_block is None:
                return _call("pages", _value(part.table), str(part.kv_block))
            return _call("blocks", str(part.q_block), str(part.kv_block), _value(part.table))
        case Predicate():
            name = getattr(part.fn, "__name__", type(part.fn).__name__)
            return _call("predicate", name, *["positions=True"] * part.positions)
    return part.name


def _value(value: Field) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    if value.dim() == 1 and value.numel() <= EXAMPLE and _is_in_memory(value):
        return str(value.tolist())
    return f"<{dtype_name(value.dtype)} {list(value.shape)}>"


def _is_in_memory(tensor: Tensor) -> bool:
    return readable(tensor) and (not tensor.numel() or tensor.data_ptr() != 0)


def natural_sizes(mask: MaskFields) -> tuple[int, int, int, int]:
    """Sizes of a small call that shows the mask: (batch, heads, query rows, keys)."""
    batch = heads = 1
    q_len = kv_len = 0
    for part in mask.parts:
        match part:
            case Lengths():
                batch = part.kv.numel()
                kv_len = _end(part.kv, part.kv_start)
                q_len = kv_len if part.q is None else _end(part.q, part.q_start)
            case Documents():
                q_len, kv_len = (part.tokens(side) for side in ("q", "kv"))
            case DocumentIds():
                batch = max(batch, len(part.ids_q), len(part.ids_kv))
                q_len, kv_len = part.ids_q.shape[1], part.ids_kv.shape[1]
            case Tree():
                batch, q_len = max(batch, len(part.parents)), part.parents.shape[1]
                kv_len = max(kv_len, q_len)
            case Blocks():
                batch, heads = max(batch, part.table.shape[0]), math.lcm(heads, part.table.shape[1])
                q_len = max(q_len, part.table.shape[2] * (part.q_block or 1))
                kv_len = max(kv_len, part.kv_block * (int(part.table.max()) + 1 if part.table.numel() else 1))
            case Dense():
                batch, heads = max(batch, part.tensor.shape[0]), max(heads, part.tensor.shape[1])
                q_len, kv_len = part.tensor.shape[2:]
            case Prefix(n) | GlobalBand(prefix=n) | Chunk(offset=n) if (
                isinstance(n, Tensor) and "documents" not in mask.kinds
            ):
                batch = max(batch, n.numel())
    return batch, heads, q_len or EXAMPLE, kv_len or EXAMPLE


def _end(length: Tensor, start: Tensor | None) -> int:
    end = length if start is None else length.long() + start
    return int(end.max()) if end.numel() else 0


def draw(form: NormalForm, index: int = 0, head: int = 0) -> str:
    """One batch element of a form as text: one row per query, one column per key."""
    one = slice(index, index + 1)
    shown = form.allowed(one, slice(None), slice(None), slice(head, head + 1))[0, 0]
    if not _is_in_memory(shown):
        raise InputError("mask", "hold readable values to be drawn", "fake, traced or wrapped tensors")
    pairs = shown.tolist()
    width = len(str(max(form.q_len - 1, 0)))
    ruler = " ".join(str(key % 10) for key in range(form.kv_len))
    rows = [
        f"{row:>{width}} " + " ".join(ALLOWED if allowed else MASKED for allowed in line)
        for row, line in enumerate(pairs)
    ]
    return "\n".join([f"{'':>{width}} {ruler}".rstrip(), *rows])


def density(form: NormalForm, height: int, width: int) -> Tensor:
    """The share of allowed pairs under each pixel, fp32 ``[height, width]``, of batch element 0 and all heads."""
    rows, keys = _pixel_edges(form.q_len, height), _pixel_edges(form.kv_len, width)
    counts = form.counts(rows, keys)[0].to(torch.float64).mean(0).cpu()
    area = torch.tensor(rows, device="cpu").diff()[:, None] * torch.tensor(keys, device="cpu").diff()
    return (counts / area.clamp(min=1)).to(torch.float32)


def _pixel_edges(length: int, pixels: int) -> list[int]:
    pixels = max(1, min(pixels, length))
    return [length * pixel // pixels for pixel in range(pixels + 1)]


def check_format(argument: str, path: str | PathLike[str]) -> None:
    """Raise InputError unless the file name of a picture ends in a format that matplotlib writes."""
    from matplotlib.backend_bases import FigureCanvasBase

    if not isinstance(path, str | PathLike):
        raise InputError(argument, "be a path", type(path).__name__)
    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix.lower().removeprefix(".") not in formats:
        raise InputError(argument, f"end in .{', .'.join(formats)}", repr(str(path)), hint="mask.png")


def require_matplotlib(argument: str) -> None:
    """InputError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(argument, "have matplotlib installed", "no matplotlib", hint="pip install 'undivided[plot]'")


def check_text(batch: int, q_len: int, kv_len: int) -> None:
    """InputError if a picture in text would be too large, or if a size is not an int of at least 0."""
    sizes = {"batch": batch, "q_len": q_len, "kv_len": kv_len}
    pairs = math.prod(as_integer(name, size, 0) for name, size in sizes.items())
    if pairs > MAX_DRAWN_PAIRS:
        must = f"be at most {MAX_DRAWN_PAIRS} for a picture in text"
        raise InputError(" * ".join(sizes), must, pairs, "mask.plot(q_len, kv_len, path) draws any size")


def check_plot(path: str | PathLike[str] | None, pixels: int) -> None:
    """InputError if `plot` would raise one."""
    require_matplotlib("Mask.plot")
    as_integer("pixels", pixels, 1)
    if path is not None:
        check_format("path", path)


def plot(form: NormalForm, title: str, path: str | PathLike[str] | None, pixels: int) -> Figure:
    """A figure of the density of allowed pairs, saved if a path is given. The arguments have passed `check_plot`."""
    from matplotlib.figure import Figure

    lines = textwrap.wrap(title, TITLE_COLUMNS, break_on_hyphens=False)
    height = PLOT_INCHES + (len(lines) - 4) * TITLE_POINTS / 60  # 4 lines fit above the square picture of 5 x 5 inches
    figure = Figure(figsize=(PLOT_INCHES, height), layout="constrained")
    figure.suptitle("\n".join(lines), family="monospace", size=TITLE_POINTS)
    axes = figure.add_subplot()
    image = axes.imshow(
        density(form, pixels, pixels).numpy(),
        extent=(0, form.kv_len, form.q_len, 0),
        cmap="Blues",
        vmin=0,
        vmax=1,
        interpolation="nearest",
        aspect="auto" if form.q_len != form.kv_len else "equal",
    )
    axes.set(xlabel="key", ylabel="query")
    figure.colorbar(image, label="share of allowed pairs", shrink=0.8)
    if path is not None:
        figure.savefig(path)
    return figure
