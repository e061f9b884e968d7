"""The flags that describe a problem, a mask and a machine."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial, reduce
from itertools import accumulate
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from undivided import masks
from undivided.arguments.checks import as_vector
from undivided.arguments.layout import sizes
from undivided.cli._flags import flag_name
from undivided.cli._mask_words import parse
from undivided.errors import InputError, did_you_mean
from undivided.machine import Machine


class Dtype(StrEnum):
    """The dtypes by their short names."""

    fp16 = "fp16"
    bf16 = "bf16"
    fp32 = "fp32"
    fp64 = "fp64"


class LayoutName(StrEnum):
    """The layouts."""

    bshd = "bshd"
    sbhd = "sbhd"
    bhsd = "bhsd"
    thd = "thd"


DTYPES = {Dtype.fp16: torch.float16, Dtype.bf16: torch.bfloat16, Dtype.fp32: torch.float32, Dtype.fp64: torch.float64}
_PYTORCH_NAMES = {
    **{str(dtype).removeprefix("torch."): name.value for name, dtype in DTYPES.items()},
    "half": "fp16",
    "float": "fp32",
    "double": "fp64",
}


def short_dtype(text: str) -> str:
    """The short name of a dtype that is given by a name of PyTorch; any other text is unchanged.

    >>> short_dtype("torch.bfloat16"), short_dtype("half"), short_dtype("fp32")
    ('bf16', 'fp16', 'fp32')
    """
    return _PYTORCH_NAMES.get(text.removeprefix("torch."), text)


def _dtype(text: str) -> Dtype:
    """The dtype of a --dtype flag; typer passes the default, too."""
    name = short_dtype(text)
    if name not in list(Dtype):
        near = did_you_mean(text, (*Dtype, *_PYTORCH_NAMES))
        known = f"{text!r} is not one of {', '.join(map(repr, map(str, Dtype)))}"
        raise typer.BadParameter(f"{known}; {near}" if near else f"{known}.")
    return Dtype(name)


def dtype_flag(help: str, names: Iterable[str] = Dtype, parser: Callable[[str], str] = _dtype, **options: Any) -> Any:
    """A --dtype flag, which takes the names of PyTorch, too.

    Args:
        help: the text of --help.
        names: the short names that it shows.
        parser: the function that reads a value.
        options: of `typer.Option`.
    """
    text = f"{help} PyTorch's names (float32, bfloat16, half, ...) mean the same."
    return typer.Option(help=text, parser=parser, metavar=f"<{'|'.join(names)}>", **options)


_mask_flag, _shape_flag, _attention_flag, _machine_flag = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Mask", "Shapes", "Attention", "Machine")
)


@dataclass(frozen=True)
class MaskFlags:
    """The flags of a mask: an expression, parts, or both (their intersection)."""

    mask: Annotated[str | None, _mask_flag(help="Expression as in Python: 'causal() & window(256, 0)'.")] = None
    align: Annotated[str | None, _mask_flag(help="top_left or bottom_right, for all parts of the mask.")] = None
    window: Annotated[str | None, _mask_flag(help="Sliding window LEFT,RIGHT; -1 is unbounded.")] = None
    documents: Annotated[str | None, _mask_flag(help="Lengths of packed documents, such as 3,7,20.")] = None
    kv_documents: Annotated[str | None, _mask_flag(help="Lengths of their keys, if they differ.")] = None
    lengths: Annotated[str | None, _mask_flag(help="Number of real keys of each batch element.")] = None
    q_lengths: Annotated[
        str | None, _mask_flag(help="Number of real queries; default: --lengths if q and kv are equally long.")
    ] = None
    prefix: Annotated[int | None, _mask_flag(help="Allow the first N keys.")] = None
    chunks: Annotated[int | None, _mask_flag(help="Attention within chunks of N tokens.")] = None

    def build(self, q_len: int, kv_len: int) -> masks.Mask | None:
        """The intersection of all parts; None without parts."""
        for flag, needed in (("kv_documents", "documents"), ("q_lengths", "lengths")):
            if getattr(self, flag) is not None and getattr(self, needed) is None:
                must = f"be given together with {flag_name(needed)}"
                raise InputError(flag_name(flag), must, repr(getattr(self, flag)))
        parts = [parse(self.mask)] if self.mask and self.mask != "none" else []
        if self.window is not None:
            left, *rest = integers("--window", self.window)
            if len(rest) != 1:
                raise InputError("--window", "be two numbers LEFT,RIGHT", repr(self.window))
            parts.append(masks.window(left, rest[0]))
        if self.documents is not None:
            q = _offsets("--documents", self.documents)
            parts.append(
                masks.documents(q, _offsets("--kv-documents", self.kv_documents) if self.kv_documents else None)
            )
        if self.lengths is not None:
            parts.append(self._lengths(self.lengths, q_len == kv_len))
        if self.prefix is not None:
            parts.append(masks.prefix(self.prefix))
        if self.chunks is not None:
            parts.append(masks.chunks(self.chunks))
        if self.align is not None:
            parts.append(masks.window(None, None, align=self.align))  # type: ignore[arg-type]
        return reduce(operator.and_, parts) if parts else None

    def _lengths(self, text: str, is_self: bool) -> masks.Mask:
        kv = as_vector("--lengths", integers("--lengths", text))
        if self.q_lengths is not None:
            return masks.lengths(kv, integers("--q-lengths", self.q_lengths))
        return masks.lengths(kv, kv if is_self else None)


@dataclass(frozen=True)
class ProblemFlags(MaskFlags):
    """The flags of one attention call: shapes and options."""

    q: Annotated[str, _shape_flag("--q", help="Sizes of the query in the order of --layout, such as 2x1024x8x64.")] = (
        "2x256x8x64"
    )
    kv: Annotated[str | None, _shape_flag("--kv", help="Sizes of key and value; default: those of --q.")] = None
    kv_heads: Annotated[
        int | None, _shape_flag(min=1, help="Number of key/value heads (GQA); not together with --kv.")
    ] = None
    v_dim: Annotated[int | None, _shape_flag(min=1, help="Head size of the value; default: that of the key.")] = None
    layout: Annotated[LayoutName, _shape_flag(help="Order of the axes.")] = LayoutName.bshd
    dtype: Annotated[Dtype, dtype_flag("Dtype of queries, keys and values.", rich_help_panel="Shapes")] = Dtype.fp32
    bias: Annotated[str | None, _attention_flag(help="Axes of an additive bias, 1 if broadcast: 1hqk, ...")] = None
    alibi: Annotated[bool, _attention_flag("--alibi", help="Use ALiBi slopes.")] = False
    sinks: Annotated[bool, _attention_flag("--sinks", help="Use one sink per head.")] = False
    softcap: Annotated[float | None, _attention_flag(help="Softcap c: c * tanh(score / c).")] = None
    scale: Annotated[float | None, _attention_flag(help="Factor of the scores; default: 1/sqrt(head size).")] = None
    dropout: Annotated[float, _attention_flag(help="Dropout probability.")] = 0.0
    lse: Annotated[bool, _attention_flag("--lse", help="Also return the log-sum-exp.")] = False
    deterministic: Annotated[
        bool, _attention_flag("--deterministic", help="Require results that repeat bit for bit.")
    ] = False
    batch_invariant: Annotated[
        bool, _attention_flag("--batch-invariant", help="Require rows that do not depend on the batch.")
    ] = False
    backend: Annotated[str | None, _attention_flag(help="The backend or family that must run.")] = None

    def arguments(self, device: str, grad: bool) -> dict[str, Any]:
        """The arguments for `undivided.attention`. On the meta device nothing is allocated."""
        q_shape, k_shape, v_shape = self._shapes()
        batch, q_len, heads, _ = sizes(torch.Size(q_shape), self.layout.value)
        kv_len = sizes(torch.Size(k_shape), self.layout.value)[1]

        def tensor(shape: list[int], dtype: torch.dtype = DTYPES[self.dtype]) -> Tensor:
            if device == "meta":
                return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)
            try:
                return torch.randn(shape).to(device, dtype).requires_grad_(grad)
            except RuntimeError as error:  # of the allocator
                size = "x".join(map(str, shape))
                raise InputError("--q, --kv", "have sizes that fit into memory", size) from error

        size = {"b": batch, "h": heads, "q": q_len, "k": kv_len, "1": 1}
        return {
            "q": tensor(q_shape),
            "k": tensor(k_shape),
            "v": tensor(v_shape),
            "layout": self.layout.value,
            "mask": self.build(q_len, kv_len),
            "bias": None if self.bias is None else tensor([size[axis] for axis in _bias_axes(self.bias)]),
            "alibi_slopes": None if not self.alibi else tensor([heads], torch.float32),
            "sinks": None if not self.sinks else tensor([heads], torch.float32),
            "softcap": self.softcap,
            "scale": self.scale,
            "dropout_p": self.dropout,
            "return_lse": self.lse,
            "deterministic": self.deterministic or None,
            "batch_invariant": self.batch_invariant or None,
            "backend": self.backend,
        }

    def _shapes(self) -> tuple[list[int], list[int], list[int]]:
        q = shape("--q", self.q, self.layout)
        k = shape("--kv", self.kv, self.layout) if self.kv is not None else list(q)
        if self.kv_heads is not None:
            if self.kv is not None:
                raise InputError("--kv-heads", "be given without --kv, which contains the key heads", self.kv_heads)
            k[self.layout.index("h")] = self.kv_heads
        return q, k, [*k[:-1], k[-1] if self.v_dim is None else self.v_dim]


@dataclass(frozen=True)
class MachineFlags:
    """The flags of a described machine."""

    device: Annotated[
        str | None, _machine_flag(help="cpu, or the name of a GPU: a100, h100, ...; default: this machine.")
    ] = None
    cudnn: Annotated[str | None, _machine_flag(help="Version of cuDNN on that machine.")] = None
    package: Annotated[
        list[str] | None, _machine_flag(help="NAME=VERSION of an installed package; may be repeated.")
    ] = None

    def machine(self) -> Machine | None:
        """The described machine; None is this machine."""
        if self.device is None:
            if self.cudnn is not None or self.package:
                raise InputError(
                    "--cudnn, --package", "be given together with --device", "no --device", hint="--device a100"
                )
            return None
        if self.device == "cpu" and self.cudnn is not None:
            raise InputError("--cudnn", "describe a GPU", "--device cpu", hint="--device a100")
        return Machine.named(self.device, self.cudnn, dict(map(_package, self.package or [])))

    def unknown_packages(self) -> str:
        """A line that asks for the packages of a described GPU machine if none is given, otherwise nothing."""
        if self.device in (None, "cpu") or self.package:
            return ""
        flags = "--package triton=3.6.0" + (" --cudnn 9.19.0" if self.cudnn is None else "")
        return f"its packages are unknown and count as not installed; name them: {flags}\n"


def shape(flag: str, text: str, layout: str) -> list[int]:
    """The sizes in a text: ``"48x16534x18x128"`` is ``[48, 16534, 18, 128]``."""
    parts = text.lower().split("x")
    if len(parts) != len(layout) or not all(part.isdecimal() for part in parts):
        example = "x".join(layout.upper())
        with_x = "x".join(re.findall(r"\d+", text))
        hint = with_x if with_x != text.lower() and with_x.count("x") == len(layout) - 1 else None
        raise InputError(flag, f"be {len(layout)} sizes {example} for layout {layout}", repr(text), hint)
    numbers = list(map(int, parts))
    if math.prod(numbers) >= 2**62:
        raise InputError(flag, "hold fewer than 2**62 numbers", repr(text))
    return numbers


def integers(flag: str, text: str) -> list[int]:
    """The integers in a text: ``"64,512"`` is ``[64, 512]``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(flag, "be whole numbers separated by commas", repr(text)) from None


def _offsets(flag: str, text: str) -> list[int]:
    lengths = integers(flag, text)
    if min(lengths) < 0:
        raise InputError(flag, "be lengths of at least 0", repr(text))
    return [0, *accumulate(lengths)]


def _bias_axes(text: str) -> str:
    if len(text) != 4 or any(letter not in (axis, "1") for letter, axis in zip(text, "bhqk", strict=True)):
        raise InputError("--bias", "be bhqk with 1 for every broadcast axis, such as 1hqk", repr(text))
    return text


def _package(text: str) -> tuple[str, str]:
    name, equals, version = text.partition("=")
    if not equals:
        raise InputError("--package", "be NAME=VERSION, such as flash_attn=2.8.4", repr(text))
    return name.strip(), version.strip("= ")
