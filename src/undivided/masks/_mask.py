"""``Mask``: an intersection of parts and one band, with one alignment. ``masks`` exports the functions that build one.

A mask is a small frozen value. Backends ``take`` parts from it, the library's own kernels read its ``normal_form``, and
``flatten`` passes it through an opaque operator. Derived values are cached in the mask, by sizes and by the in-place
versions of its tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from undivided.arguments.checks import INT32_MAX, as_device, as_integer, check_mask_devices
from undivided.arguments.tensors import is_traced, readable
from undivided.errors import InputError, did_you_mean
from undivided.masks import _algebra, _drawing, _kept, _spec
from undivided.masks._alignment import resolve
from undivided.masks._fields import MaskFields
from undivided.masks._parts import Blocks, CallSizes, Chunk, Dense, Documents, GlobalBand, Origin, find_part
from undivided.masks._predicate import Predicate
from undivided.masks.normal_form import NormalForm, ranges
from undivided.masks.normal_form.large_forms import LARGE

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Mask(MaskFields):
    """An intersection of parts and of one band ``i' + d - left <= j' <= i' + d + right``, with one alignment.

    The functions of ``undivided.masks`` build masks. Masks are compared by identity. The tensors belong to the caller:
    after a tensor was changed in place, the mask describes the new values, and cached results are dropped.

    Args:
        align: "top_left", "bottom_right", or None if both agree.
        left, right: keys of the band before and after the query's own; None: unbounded.
        parts: the other descriptions; the mask is the intersection of all.

    >>> from undivided.masks import *
    >>> mask = causal(align="bottom_right") & lengths([2, 3])
    >>> sorted(mask.kinds), mask.band
    (['causal', 'lengths'], (None, 0))
    >>> mask.to_dense(batch=2, heads=1, q_len=2, kv_len=3).int().tolist()
    [[[[1, 0, 0], [1, 1, 0]]], [[[1, 1, 0], [1, 1, 1]]]]
    """

    def with_padded_kv(self, padded_kv: Tensor) -> Mask:
        """The same mask with other offsets of the keys in memory: document n's keys start at ``padded_kv[n]``.

        Args:
            padded_kv: int ``[N + 1]``.

        Returns:
            A new mask.
        """
        parts = tuple(
            dataclasses.replace(part, padded_kv=padded_kv, total_kv=None) if isinstance(part, Documents) else part
            for part in self.parts
        )
        return dataclasses.replace(self, parts=parts)

    def with_first_head(self, first_head: int) -> Mask:
        """The same mask for a call with some heads of a layer: dropout has the pattern of these heads.

        Tensors and predicates of the mask still describe the heads of the call.

        Args:
            first_head: index of the call's first head among those of the layer, at least 0; the others follow it.

        Returns:
            The mask, the same object for repeated calls.

        Raises:
            InputError: ``first_head`` is not an int of at least 0.

        >>> from undivided.masks import *
        >>> causal().with_first_head(4)
        causal() & heads from 4
        """
        first_head = as_integer("first_head", first_head, 0)
        origin = find_part(self.parts, Origin) or Origin(0, 0)
        if first_head == origin.head:
            return self
        return self.cached(("first_head", first_head), self._with_origin, Origin(origin.sequence, first_head))

    def _with_origin(self, origin: Origin) -> Mask:
        others = tuple(part for part in self.parts if not isinstance(part, Origin))
        return dataclasses.replace(self, parts=(*others, origin))

    def take(self, name: str) -> tuple[Any, Mask]:
        """One kind of part, and the mask without it.

        Args:
            name: one of ``kinds``, or "band" for causal or window.

        Returns:
            ``(part, rest)``. The part is None if there is none; True for "causal"; (left, right) for "window" and
            "band"; the part for "lengths" and "documents"; a tuple of tensors or functions for "dense" and
            "predicate"; a tuple of parts for other names.

        Raises:
            InputError: no mask has a part of this name.

        >>> from undivided.masks import *
        >>> window_, rest = (window(4, 0, align="top_left") & prefix(9)).take("window")
        >>> window_, rest
        ((4, 0), prefix(9))
        """
        if name not in _spec.TAKEN_NAMES:
            must = f"be one of {', '.join(sorted(_spec.TAKEN_NAMES))}"
            raise InputError("name", must, repr(name), did_you_mean(name, _spec.TAKEN_NAMES))
        return _algebra.split(self, name)

    def __and__(self, other: Mask) -> Mask:
        return _kept.joined(_algebra.intersection, self, other)

    def __or__(self, other: Mask) -> Mask:
        return _kept.joined(_algebra.union, self, other)

    __rand__, __ror__ = __and__, __or__  # another type on the left has the same error

    def check(
        self,
        batch: int,
        heads: int,
        q_len: int,
        kv_len: int,
        *,
        packed: bool,
        device: torch.device,
        argument: str = "mask",
    ) -> None:
        """Raise InputError unless the mask fits a call. Repeated checks of the same sizes are cheap.

        Args:
            batch, heads, q_len, kv_len: sizes of the call.
            packed: whether the call is in layout "thd".
            device: device of the query.
            argument: name of the mask in the error.

        Raises:
            InputError: the sizes or the device do not fit.
        """
        key = ("check", batch, heads, q_len, kv_len, packed, device)
        call = CallSizes(batch, heads, q_len, kv_len, batch, packed, argument)
        self.cached(key, self._check, call, device)

    def _check(self, call: CallSizes, device: torch.device) -> bool:
        for side, length in (("q", call.q_len), ("kv", call.kv_len)):
            if not self.is_full and length > INT32_MAX:
                raise InputError(
                    call.argument, f"be for a {side} length of at most {INT32_MAX}: positions have 32 bits", length
                )
        for part in self.parts:
            part.validate()
            if isinstance(part, Documents):
                call = call._replace(sequences=part.cu_seqlens_q.shape[0] - 1)
        for part in self.parts:
            part.check_call(call)
        check_mask_devices(call.argument, self.tensors, device)
        return True

    def resolved_align(self, batch: int, q_len: int, kv_len: int, *, needed: bool = False) -> str | None:
        """The alignment for a call: "top_left", "bottom_right", "both" if they agree, or None if none matters.

        Args:
            batch, q_len, kv_len: sizes of the call.
            needed: whether the call needs an alignment also without the mask (ALiBi).

        Returns:
            The alignment.

        Raises:
            InputError: the two differ, or cannot be compared without waiting for a GPU, and ``align`` is None.
        """
        shaped = (self.left, self.right) != (None, None) or any(
            isinstance(part, Chunk | GlobalBand) or (isinstance(part, Predicate) and part.positions)
            for part in self.parts
        )
        if not shaped and not needed:
            return None
        key = ("align", q_len, kv_len)
        return self.cached(key, resolve, self.align, self.parts, q_len, kv_len, self.is_full)

    def normal_form(self, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device | str) -> NormalForm:
        """The mask as ranges of keys per row, cached for these sizes. The mask must have passed ``check``.

        Args:
            batch, heads, q_len, kv_len: sizes of the call.
            device: device of the ranges.

        Returns:
            The ``NormalForm``.

        >>> from undivided.masks import *
        >>> causal().normal_form(1, 1, 3, 3, "cpu").ranges.tolist()
        [[[0, 1], [0, 2], [0, 3]]]
        """
        sizes, device = (batch, heads, q_len, kv_len), as_device("device", device)
        return self.cached(("form", sizes, device), self._normal_form, sizes, device)

    def _normal_form(self, sizes: tuple[int, int, int, int], device: torch.device) -> NormalForm:
        batch, _, q_len, kv_len = sizes
        align = self.resolved_align(batch, q_len, kv_len)
        bottom_right = self.align == "bottom_right" and align != "both"

        def build() -> NormalForm:
            # autograd may save a form that was first built in inference mode
            with torch.inference_mode(False), torch.no_grad():
                return ranges.build(self.parts, self.band, bottom_right, sizes, device)

        static = not any(part.tensors or isinstance(part, Predicate) for part in self.parts)
        is_shared = static and q_len + kv_len <= ranges.SHARED_TOKENS and not is_traced()
        form = ranges.shared_form((self.flatten()[0], bottom_right, sizes, device), build) if is_shared else build()
        LARGE.hold(form, self, ("form", sizes, device))
        return form

    def intervals(self, q_len: int, kv_len: int, *, batch: int = 1, device: torch.device | str = "cpu") -> Tensor:
        """The keys of each row as ranges ``[start, stop)``.

        For dense tensors and predicates, the smallest range that contains the row's keys of all heads.

        Args:
            q_len, kv_len, batch: sizes of the call.
            device: device of the result.

        Returns:
            int32 ``[B|1, Sq, 2|4]``; a row without keys is [0, 0).

        Raises:
            InputError: the sizes do not fit the mask.

        >>> from undivided.masks import *
        >>> (window(1, 0, align="top_left") | prefix(1)).intervals(4, 4).tolist()
        [[[0, 1, 0, 0], [0, 2, 0, 0], [0, 3, 0, 0], [0, 1, 2, 4]]]
        """
        by_head = [part.tensor for part in self.parts if isinstance(part, Dense)]
        by_head += [part.table for part in self.parts if isinstance(part, Blocks)]
        heads = math.lcm(*(tensor.shape[1] for tensor in by_head))
        return self._checked_form(batch, heads, q_len, kv_len, device).ranges.clone()  # the caller may write to it

    def to_dense(self, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device | str = "cpu") -> Tensor:
        """Every pair as a boolean tensor, for tests and inspection.

        Args:
            batch, heads, q_len, kv_len: sizes of the call.
            device: device of the result.

        Returns:
            Bool ``[batch, heads, q_len, kv_len]``, an expanded view.

        Raises:
            InputError: the sizes do not fit the mask.
        """
        form = self._checked_form(batch, heads, q_len, kv_len, device)
        everything = slice(None)
        return form.allowed(everything, everything, everything, everything).expand(batch, heads, q_len, kv_len)

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on a device; the mask itself if they are there already.

        The longest document is read from CPU offsets first, so that no kernel waits for it later. Tensors that a
        predicate captures are not moved.

        Args:
            device: a torch.device or its name.

        Returns:
            A mask of the same pairs.

        Raises:
            InputError: ``device`` is not a device.

        >>> from undivided.masks import *
        >>> mask = causal() & lengths([2, 3])
        >>> mask.to("cpu") is mask, mask.to("meta").tensors[0].device.type
        (True, 'meta')
        """
        target = as_device("device", device)
        tensors = self.tensors
        moved = [tensor.to(target) for tensor in tensors]
        if all(new is old for new, old in zip(moved, tensors, strict=True)):
            return self
        parts = tuple(
            dataclasses.replace(part, max_q=part.longest("q"), max_kv=part.longest("kv"))
            if isinstance(part, Documents)
            else part
            for part in self.parts
        )
        return Mask.unflatten(_spec.write(self.align, self.band, parts, tensors), moved)

    def flatten(self, numbers: list[int] | None = None) -> tuple[str, list[Tensor]]:
        """The mask as a constant string and its tensors, for operators that take no Python objects.

        Args:
            numbers: receives the ints of the mask, which may be symbolic; None: they are in the string.

        Returns:
            ``(spec, tensors)``.

        >>> from undivided.masks import *
        >>> spec, tensors = (causal() & lengths([2, 3])).flatten()
        >>> spec
        'None;None,0;lengths,t0,None,None,None'
        """
        tensors = list(self.tensors)
        return _spec.write(self.align, self.band, self.parts, tensors, numbers), tensors

    @staticmethod
    def unflatten(spec: str, tensors: Sequence[Tensor], numbers: Sequence[int] = ()) -> Mask:
        """The mask that ``flatten`` took apart.

        Args:
            spec, tensors, numbers: the results of ``flatten``.

        Returns:
            A mask of the same pairs.
        """
        align, (left, right), parts = _spec.read(spec, tensors, numbers)
        return Mask(align, left, right, parts)

    def __repr__(self) -> str:
        return _drawing.as_calls(self)

    def __str__(self) -> str:
        sizes = _drawing.natural_sizes(self) if readable(*self.tensors) else None
        if sizes is None or max(sizes[2:]) > _drawing.LARGEST_PICTURE:
            return repr(self)
        try:
            self.check(*sizes, packed=False, device=torch.device("cpu"))
            form = self.normal_form(*sizes, "cpu")
            return f"{self!r}\n{_drawing.draw(form)}" if form.ranges.shape[0] else repr(self)
        except InputError as error:
            return f"{self!r}\n({error})"
        except Exception as error:  # of a predicate's function
            return f"{self!r}\n({type(error).__name__}: {error})"

    def draw(self, q_len: int, kv_len: int, batch: int = 1) -> str:
        """The allowed pairs of head 0 as text, one picture per batch element.

        Args:
            q_len, kv_len, batch: sizes of the call.

        Returns:
            One row of text per query, one column per key.

        Raises:
            InputError: the sizes do not fit the mask, or the picture has more than 4 Mi pairs.

        >>> from undivided.masks import *
        >>> print(causal(align="bottom_right").draw(2, 4))
          0 1 2 3
        0 ■ ■ ■ ·
        1 ■ ■ ■ ■
        """
        _drawing.check_text(batch, q_len, kv_len)
        form = self._checked_form(batch, 1, q_len, kv_len, "cpu")
        return "\n\n".join(_drawing.draw(form, index) for index in range(batch))

    def plot(
        self,
        q_len: int,
        kv_len: int,
        path: str | PathLike[str] | None = None,
        *,
        batch: int = 1,
        heads: int = 1,
        pixels: int = 512,
    ) -> Figure:
        """A matplotlib figure of the share of allowed pairs under each pixel, for a call of any size.

        Args:
            q_len, kv_len, batch, heads: sizes of the call; batch element 0 and the mean over heads are drawn.
            path: file to save the figure to. None: not saved.
            pixels: width and height of the image, at most one pixel per row and key.

        Returns:
            The figure.

        Raises:
            InputError: the sizes do not fit the mask, ``path`` does not end in a format that matplotlib writes, or
                matplotlib is not installed.
        """
        _drawing.check_plot(path, pixels)
        return _drawing.plot(self._checked_form(batch, heads, q_len, kv_len, "cpu"), repr(self), path, pixels)

    def _checked_form(self, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device | str) -> NormalForm:
        """The normal form for sizes that the caller passes as numbers, which are unchecked."""
        for argument, size in (("batch", batch), ("heads", heads), ("q_len", q_len), ("kv_len", kv_len)):
            as_integer(argument, size, 0)
        self.check(batch, heads, q_len, kv_len, packed=False, device=as_device("device", device))
        return self.normal_form(batch, heads, q_len, kv_len, device)
