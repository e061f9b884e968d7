"""``Mask``: an intersection of parts, one band and one alignment. ``masks.py`` builds them.

A mask is a small frozen value: structure for a backend to ``take`` from, ``normal_form`` for our own kernels,
``flatten`` for an opaque operator. What is worked out is remembered beside it, by sizes and by the in-place
versions of its tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from undivided._arguments import INT32_MAX, as_integer
from undivided._tensors import is_captured, is_traced, readable, versions
from undivided.errors import InputError
from undivided.masks import _drawing, _spec
from undivided.masks._alignment import Align, resolve
from undivided.masks._memory import SHARED_TOKENS, Identical, Remembers, shared
from undivided.masks._parts import Call, Chunk, Dense, Documents, GlobalBand, Lengths, Part, Prefix
from undivided.masks._predicate import Predicate
from undivided.masks._structure import Structure, detail_of, kinds_of
from undivided.masks.normal_form import ranges
from undivided.masks.normal_form.intervals import NormalForm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")

_FIRST_KEYS = ((None, None), (None, 0))  # the bands of prefix(n) and of sinks(n)
OWN_ENTRIES = 16  # results remembered by one mask: sizes differ by layer kind and by step, rarely by more


@dataclass(frozen=True, eq=False, repr=False)
class Mask(Remembers):
    """An intersection of parts, of one band ``i' + d - left <= j' <= i' + d + right``, with one alignment.

    Built by the functions of this module; compared by identity. The tensors are the caller's: a mask whose
    tensor is changed in place means the new values from then on, and nothing computed before is used again.

    >>> from undivided.masks import *
    >>> mask = causal(align="bottom_right") & lengths([2, 3])
    >>> sorted(mask.kinds), mask.band
    (['causal', 'lengths'], (None, 0))
    >>> mask.to_dense(batch=2, heads=1, q_len=2, kv_len=3).int().tolist()
    [[[[1, 0, 0], [1, 1, 0]]], [[[1, 1, 0], [1, 1, 1]]]]
    """

    align: Align | None = None
    left: int | None = None
    right: int | None = None
    parts: tuple[Part, ...] = ()

    @property
    def band(self) -> tuple[int | None, int | None]:
        """``(left, right)`` of the band that causal and window parts make together; None is unbounded."""
        return self.left, self.right

    @property
    def is_full(self) -> bool:
        """Whether nothing is masked: no band and no part. (An alignment may remain, for ALiBi.)"""
        return self.is_band and self.left is None and self.right is None

    @property
    def is_band(self) -> bool:
        """Whether it is causal, a window or every pair, and nothing else."""
        return len(self.parts) == 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor in the mask once, in the order of ``flatten``."""
        known = self.__dict__.get("_tensors")
        if known is not None:
            return known  # type: ignore[no-any-return]
        found: list[Tensor] = []
        for part in self.parts:
            for tensor in part.tensors:
                if not any(tensor is other for other in found):
                    found.append(tensor)
        if not torch.compiler.is_compiling():
            self.__dict__["_tensors"] = tuple(found)
        return tuple(found)

    @property
    def kinds(self) -> frozenset[str]:
        """What is there: ``causal`` or ``window`` for the band, and the constructors' names; ``global`` for a
        window with a prefix or sinks; and ``q_lengths``, ``starts``, ``padded`` where lengths or documents hold
        those.
        """
        return kinds_of(self.band, self.parts)

    @property
    def structure(self) -> Structure:
        """The mask without its tensors, to select a kernel by."""
        found = self.__dict__.get("_structure")
        if found is None:
            detail = tuple(detail_of(part) for part in self.parts)
            found = Structure(self.align, self.left, self.right, self.kinds, detail)
            self.__dict__["_structure"] = found
        return found

    @property
    def document_sizes(self) -> tuple[int, int | None, int | None] | None:
        """Number of documents, longest query and key length (None where only a GPU knows), or None."""
        for part in self.parts:
            if isinstance(part, Documents):
                return part.cu_seqlens_q.shape[0] - 1, part.longest("q"), part.longest("kv")
        return None

    def with_padded_kv(self, padded_kv: Tensor) -> Mask:
        """The same mask where document n's keys begin at ``padded_kv[n]``, int ``[N + 1]``."""
        parts = tuple(
            dataclasses.replace(part, padded_kv=padded_kv, total_kv=None) if isinstance(part, Documents) else part
            for part in self.parts
        )
        return dataclasses.replace(self, parts=parts)

    def take(self, name: str) -> tuple[Any, Mask]:
        """One kind of part, or None, and the mask that remains without it.

        ``causal`` gives True; ``window`` and ``band`` give (left, right), the latter for causal as well;
        ``lengths`` and ``documents`` give the part; ``dense`` and ``predicate`` a tuple of tensors or
        functions; the other names a tuple of parts.

        >>> from undivided.masks import *
        >>> window_, rest = (window(4, 0, align="top_left") & prefix(9)).take("window")
        >>> window_, rest
        ((4, 0), prefix(9))
        """
        if name in ("causal", "window", "band"):
            if (self.left is None and self.right is None) or (name != "band" and name not in self.kinds):
                return None, self
            return (True if name == "causal" else self.band), Mask(self.align, None, None, self.parts)
        taken = tuple(part for part in self.parts if part.name == name)
        if not taken:
            return None, self
        rest = Mask(self.align, self.left, self.right, tuple(part for part in self.parts if part.name != name))
        if isinstance(taken[0], Lengths | Documents):
            return taken[0], rest
        return tuple(_taken(part) for part in taken), rest

    def __and__(self, other: Mask) -> Mask:
        other = _operand("&", other)
        both = self.parts + tuple(part for part in other.parts if not any(part is mine for mine in self.parts))
        if sum(isinstance(part, Lengths | Documents) for part in both) > 1:
            raise InputError(
                "mask",
                "describe its sequences once",
                f"{self!r} & {other!r}",
                "keep one of lengths(...) and documents(...)",
            )
        return Mask(_one_align(self, other, "&"), _least(self.left, other.left), _least(self.right, other.right), both)

    def __or__(self, other: Mask) -> Mask:
        other = _operand("|", other)
        band, first = (other, self) if other.is_band else (self, other)
        bare = len(first.parts) == 1 and isinstance(first.parts[0], Prefix) and first.band in _FIRST_KEYS
        if not bare or not band.is_band:
            raise InputError(
                "mask",
                "join causal or window to a bare prefix or sinks with `|`",
                f"{self!r} | {other!r}",
                "`&` binds tighter than `|`: write (causal() | prefix(n)) & lengths(kv)",
            )
        align = _one_align(self, other, "|")
        if band.left is None and first.right == 0:  # every key up to the query's own holds the sinks
            return Mask(align, None, band.right)
        if band.is_full:
            return Mask(align)
        length = first.parts[0].fields()[0]
        assert isinstance(length, int | Tensor)
        # Sinks after the query's own key lie in the window, or in neither: the band's right side bounds both.
        right = band.right if first.right == 0 else None
        return Mask(align, None, right, (GlobalBand(band.left, band.right, length),))

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
        """Raise InputError unless the mask fits these sizes. Cheap when it was checked for them already."""
        key = ("check", batch, heads, q_len, kv_len, packed, device)
        self.remembered(key, lambda: self._check(Call(batch, heads, q_len, kv_len, batch, argument), packed, device))

    def _check(self, call: Call, packed: bool, device: torch.device) -> bool:
        for side, length in (("q", call.q_len), ("kv", call.kv_len)):
            if not self.is_full and length > INT32_MAX:
                raise InputError(
                    call.argument, f"be for a {side} length of at most {INT32_MAX}: positions have 32 bits", length
                )
        for part in self.parts:
            part.validate()
            if isinstance(part, Documents):
                call = call._replace(sequences=part.cu_seqlens_q.shape[0] - 1)
            if packed and isinstance(part, Lengths):
                raise InputError(
                    call.argument,
                    "describe packed tokens by documents",
                    "lengths",
                    "masks.documents(cu_seqlens), where cu_seqlens are the cumulative lengths",
                )
        for part in self.parts:
            part.check_call(call)
        for tensor in self.tensors:
            if tensor.device != device and tensor.device.type != "cpu" and device.type != "meta":
                raise InputError(call.argument, f"be on {device}, as the query, or on the CPU", tensor.device)
        return True

    def resolved_align(self, batch: int, q_len: int, kv_len: int, *, needed: bool = False) -> str | None:
        """The alignment for these sizes: "both" where the two agree, None where none matters.

        Args:
            batch, q_len, kv_len: sizes of the call.
            needed: something outside the mask needs one too (ALiBi).
        Raises:
            InputError: they differ, or cannot be compared without waiting for a GPU, and the mask does not
            say.
        """
        shaped = (self.left, self.right) != (None, None) or any(
            isinstance(part, Chunk | GlobalBand) for part in self.parts
        )
        if not shaped and not needed:
            return None
        return self.remembered(
            ("align", q_len, kv_len), lambda: resolve(self.align, self.parts, q_len, kv_len, self.is_full)
        )

    def normal_form(self, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device | str) -> NormalForm:
        """The mask as ranges of keys for every row (see ``NormalForm``), remembered for these sizes.

        >>> from undivided.masks import *
        >>> causal().normal_form(1, 1, 3, 3, "cpu").ranges.tolist()
        [[[0, 1], [0, 2], [0, 3]]]
        """
        sizes = (batch, heads, q_len, kv_len)
        return self.remembered(("form", sizes, device), lambda: self._normal_form(sizes, torch.device(device)))

    def _normal_form(self, sizes: tuple[int, int, int, int], device: torch.device) -> NormalForm:
        batch, _, q_len, kv_len = sizes
        align = self.resolved_align(batch, q_len, kv_len)
        bottom_right = self.align == "bottom_right" and align != "both"

        def build() -> NormalForm:
            # A form that is made while serving may be saved by autograd later.
            with torch.inference_mode(False), torch.no_grad():
                return ranges.build(self.parts, self.band, bottom_right, sizes, device)

        static = not any(part.tensors or isinstance(part, Predicate) for part in self.parts)
        if static and q_len + kv_len <= SHARED_TOKENS and not is_traced():
            return shared((self.flatten()[0], bottom_right, sizes, device), build)
        return build()

    def intervals(self, q_len: int, kv_len: int, *, batch: int = 1, device: torch.device | str = "cpu") -> Tensor:
        """Each row's keys as ranges ``[start, stop)``: int32 ``[B|1, Sq, 2|4]``; no keys are [0, 0).

        Dense tensors and predicates give the smallest range that holds the row's keys, over all heads.

        >>> from undivided.masks import *
        >>> (window(1, 0, align="top_left") | prefix(1)).intervals(4, 4).tolist()
        [[[0, 1, 0, 0], [0, 2, 0, 0], [0, 3, 0, 0], [0, 1, 2, 4]]]
        """
        heads = max([1, *(part.tensor.shape[1] for part in self.parts if isinstance(part, Dense))])
        return self._checked_form(batch, heads, q_len, kv_len, device).ranges

    def to_dense(self, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device | str = "cpu") -> Tensor:
        """Every pair, bool ``[batch, heads, q_len, kv_len]``, as an expanded view: for tests and eyes."""
        form = self._checked_form(batch, heads, q_len, kv_len, device)
        everything = slice(None)
        return form.allowed(everything, everything, everything, everything).expand(batch, heads, q_len, kv_len)

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on a device: itself if they are there already.

        What is known of documents on the CPU (the longest one) goes along, so that no kernel waits to read it. Tensors
        that a predicate closes over stay where they are.

        Args:
            device: a torch.device or its name.

        Returns:
            A mask that means the same pairs.

        Raises:
            InputError: ``device`` is not a device.

        >>> from undivided.masks import *
        >>> mask = causal() & lengths([2, 3])
        >>> mask.to("cpu") is mask, mask.to("meta").tensors[0].device.type
        (True, 'meta')
        """
        try:
            target = torch.device(device)
        except (RuntimeError, TypeError):
            raise InputError("device", "be a torch.device or its name", repr(device)) from None
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

    def flatten(self) -> tuple[str, list[Tensor]]:
        """The mask as a constant string and its tensors, to pass through an operator.

        >>> from undivided.masks import *
        >>> spec, tensors = (causal() & lengths([2, 3])).flatten()
        >>> spec
        'None;None,0;lengths,t0,None,None,None'
        """
        tensors = list(self.tensors)
        return _spec.write(self.align, self.band, self.parts, tensors), tensors

    @staticmethod
    def unflatten(spec: str, tensors: Sequence[Tensor]) -> Mask:
        """The mask that ``flatten`` took apart."""
        align, (left, right), parts = _spec.read(spec, tensors)
        return Mask(align, left, right, parts)

    def __repr__(self) -> str:
        return _drawing.describe(self)

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

    def draw(self, q_len: int, kv_len: int, batch: int = 1) -> str:
        """The allowed pairs of every batch element as text, head 0.

        Raises:
            InputError: the sizes do not fit the mask, or there are more pairs than anybody reads.

        >>> from undivided.masks import *
        >>> print(causal(align="bottom_right").draw(2, 4))
          0 1 2 3
        0 ■ ■ ■ ·
        1 ■ ■ ■ ■
        """
        form = self._checked_form(batch, 1, q_len, kv_len, "cpu")
        if (pairs := batch * q_len * kv_len) > _drawing.MOST_DRAWN:
            raise InputError(
                "batch * q_len * kv_len",
                f"be at most {_drawing.MOST_DRAWN} for a picture in text",
                pairs,
                "mask.plot(q_len, kv_len, path) draws any size",
            )
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
        """Plot the share of allowed pairs under each pixel with matplotlib, for a call of any size."""
        return _drawing.plot(self._checked_form(batch, heads, q_len, kv_len, "cpu"), repr(self), path, pixels)

    def _checked_form(self, batch: int, heads: int, q_len: int, kv_len: int, device: torch.device | str) -> NormalForm:
        """The normal form for sizes that come from the caller himself, and not from checked tensors."""
        for argument, size in (("batch", batch), ("heads", heads), ("q_len", q_len), ("kv_len", kv_len)):
            as_integer(argument, size, 0)
        self.check(batch, heads, q_len, kv_len, packed=False, device=torch.device(device))
        return self.normal_form(batch, heads, q_len, kv_len, device)

    def state(self) -> object:
        """A value that differs once a tensor of the mask, or one that its predicates reach, has been changed in place
        (None where that cannot be told: inference tensors)."""
        watched = self.__dict__.get("_watched")
        if watched is not None:
            return versions(watched)
        if "predicate" not in self.structure.kinds:
            self.__dict__["_watched"] = self.tensors
            return versions(self.tensors)
        captured = [tensor for part in self.parts if isinstance(part, Predicate) for tensor in part.captured()]
        now = versions((*self.tensors, *captured))
        return None if now is None else (now, Identical(captured))

    def remembered(self, key: object, build: Callable[..., T], *arguments: object) -> T:
        """``build(*arguments)``, or its last result for this key if no tensor has changed since.

        In a CUDA graph tensors on the GPU are read again at every replay, so that lengths may change between them;
        those of the CPU cannot be read there, and what was worked out before the capture stands.
        """
        if is_traced() and not (is_captured() and self._is_on_host()):
            return build(*arguments)
        now: object = ()
        if self.parts:
            now = self.state()
            if now is None:
                return build(*arguments)
        memory: dict[object, tuple[object, T]] = self.__dict__.setdefault("_memory", {})
        found = memory.get(key)
        if found is not None and found[0] == now:
            return found[1]
        result = build(*arguments)
        memory[key] = (now, result)
        if len(memory) > OWN_ENTRIES:
            memory.pop(next(iter(list(memory))), None)
        return result

    def _is_on_host(self) -> bool:
        """Whether it has tensors, all on the CPU."""
        return bool(self.tensors) and all(tensor.device.type == "cpu" for tensor in self.tensors)


def _operand(sign: str, other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    hint = "masks.dense(tensor) makes a mask of a boolean tensor" if isinstance(other, Tensor) else None
    raise InputError("mask", f"be joined to another mask by `{sign}`", type(other).__name__, hint)


def _one_align(a: Mask, b: Mask, sign: str) -> Align | None:
    if a.align is not None and b.align is not None and a.align != b.align:
        raise InputError(
            "mask", "have one alignment", f"{a!r} {sign} {b!r}", "give both the same align, or only one of them any"
        )
    return b.align if a.align is None else a.align


def _least(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _taken(part: Part) -> object:
    if isinstance(part, Dense):
        return part.tensor
    return part.fn if isinstance(part, Predicate) else part
