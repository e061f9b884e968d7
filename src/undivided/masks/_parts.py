"""The parts that a mask is an intersection of: what they hold, and when their values make sense.

A part is a small frozen value. Its tensors are kept as the caller gave them, so that a backend can hand them
to its kernel; what they mean as ranges of keys is worked out in ``_intervals.py``. Values are checked by
``check_values`` when a part is built from CPU tensors, and again after one was changed in place; sizes are
checked against the call by ``check_call``.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from undivided.errors import InputError

if TYPE_CHECKING:
    from undivided.masks._intervals import NormalForm

Size = int | Tensor
Field = int | Tensor | None
PredicateFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

INT32_MAX = 2**31 - 1


class Call(NamedTuple):
    """The sizes of one attention call, and the name under which it received the mask."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    sequences: int
    argument: str


def readable(*tensors: Tensor | None) -> bool:
    """Whether the values may be looked at: plain CPU tensors, outside of torch.compile."""
    if torch.compiler.is_compiling():
        return False
    return all(
        t is None or (t.device.type == "cpu" and type(t) in (Tensor, torch.nn.Parameter)) for t in tensors
    )


def is_traced() -> bool:
    """Whether torch.compile, torch.func or a CUDA graph looks on: what is made now means nothing to the next call."""
    return (
        torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or is_captured()
    )


def is_captured() -> bool:
    """Whether a CUDA graph is being captured: nothing is computed until it is replayed, and then in memory of its own."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def versions(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The tensors' in-place counters, or None where one has none (inference tensors, tracing)."""
    if torch.compiler.is_compiling():
        return None
    try:
        return tuple([t._version for t in tensors])
    except RuntimeError:  # raised by inference tensors; asking each first would cost every call
        return None


class Remembers:
    """Keeps derived values beside a frozen dataclass's fields; copies and pickles leave them behind."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class Part(Remembers):
    """One description in a mask. Subclasses are frozen dataclasses and list their fields in order."""

    name: ClassVar[str]

    def fields(self) -> tuple[Field, ...]:
        """The part's fields, in the order of its constructor: what ``flatten`` writes down."""
        raise NotImplementedError

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(value for value in self.fields() if isinstance(value, Tensor))

    def validate(self) -> None:
        """Check the values once for every version of the tensors, where they may be read at all."""
        tensors = self.tensors
        if not readable(*tensors):
            return
        now = versions(tensors)
        if now is None or self.__dict__.get("_valid") != now:
            self.check_values()
            self.__dict__["_valid"] = now

    def check_values(self) -> None:
        """Raise InputError where a value makes no sense whatever the call."""

    def check_call(self, call: Call) -> None:
        """Raise InputError where the part does not fit the sizes of the call."""


@dataclass(frozen=True, eq=False)
class Lengths(Part):
    """Real lengths (and starts) of each batch element, int ``[B]``; ``q`` None: every query row is real."""

    name: ClassVar[str] = "lengths"
    kv: Tensor
    q: Tensor | None = None
    kv_start: Tensor | None = None
    q_start: Tensor | None = None

    def fields(self) -> tuple[Field, ...]:
        return (self.kv, self.q, self.kv_start, self.q_start)

    def check_values(self) -> None:
        for argument in ("kv", "q", "kv_start", "q_start"):
            check_at_least(argument, getattr(self, argument), 0)

    def check_call(self, call: Call) -> None:
        check_entries(call, "lengths", self.kv, call.batch, "batch elements")
        for side, length, start, limit in (
            ("kv", self.kv, self.kv_start, call.kv_len),
            ("q", self.q, self.q_start, call.q_len),
        ):
            if length is None and start is None:
                continue
            if not readable(length, start):
                continue
            end = start if length is None else length if start is None else start + length
            if end is not None and end.numel() and int(end.max()) > limit:
                what = f"{side}_start + {side}" if start is not None and length is not None else side
                raise InputError(
                    call.argument, f"have lengths({what}) of at most {limit}, the {side} length of the call",
                    int(end.max()),
                )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Documents(Part):
    """Documents packed one after another: real offsets ``[N+1]``, and padded ones where there are gaps."""

    name: ClassVar[str] = "documents"
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    padded_q: Tensor | None = None
    padded_kv: Tensor | None = None
    max_q: int | None = None
    max_kv: int | None = None

    def fields(self) -> tuple[Field, ...]:
        return (
            self.cu_seqlens_q, self.cu_seqlens_kv, self.padded_q, self.padded_kv, self.max_q, self.max_kv,
        )  # fmt: skip

    def longest(self, side: str) -> int | None:
        """The longest document of side "q" or "kv": as given, or read from CPU offsets; None elsewhere."""
        given: int | None = getattr(self, f"max_{side}")
        offsets: Tensor = getattr(self, f"cu_seqlens_{side}")
        if given is not None or not readable(offsets):
            return given
        return int(offsets.diff().max()) if offsets.numel() > 1 else 0

    def check_values(self) -> None:
        for side in ("q", "kv"):
            real: Tensor = getattr(self, f"cu_seqlens_{side}")
            padded: Tensor | None = getattr(self, f"padded_{side}")
            most: int | None = getattr(self, f"max_{side}")
            check_offsets(f"cu_seqlens_{side}", real)
            longest = int(real.diff().max()) if real.numel() > 1 else 0
            if most is not None and most < longest:
                raise InputError(f"max_{side}", f"be at least the longest document ({longest})", most)
            if padded is not None:
                check_at_least(f"padded_{side}", padded, 0)
                short = (padded.diff() < real.diff()).nonzero()
                if short.numel():
                    n = int(short[0])
                    raise InputError(
                        f"padded_{side}", f"leave room for document {n} of length {int(real.diff()[n])}",
                        f"{int(padded.diff()[n])} slots",
                        f"padded_{side} holds the offset of each document in memory, then the total",
                    )  # fmt: skip

    def check_call(self, call: Call) -> None:
        if call.batch != 1:
            raise InputError(
                call.argument, "be used with packed documents on a batch of one", f"a batch of {call.batch}",
                "use layout='thd', or masks.lengths for a padded batch, or masks.document_ids [B, S]",
            )  # fmt: skip
        for side, limit in (("q", call.q_len), ("kv", call.kv_len)):
            for argument in (f"padded_{side}", f"cu_seqlens_{side}"):
                offsets: Tensor | None = getattr(self, argument)
                if offsets is not None and readable(offsets) and int(offsets[-1]) > limit:
                    raise InputError(
                        call.argument, f"have {argument}[-1] of at most {limit}, the {side} tokens", int(offsets[-1]),
                    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class DocumentIds(Part):
    """The document of each token, int ``[B|1, S]``; a negative id is padding."""

    name: ClassVar[str] = "document_ids"
    ids_q: Tensor
    ids_kv: Tensor

    def fields(self) -> tuple[Field, ...]:
        return (self.ids_q, self.ids_kv)

    def check_call(self, call: Call) -> None:
        for argument, ids, length in (
            ("ids_q", self.ids_q, call.q_len),
            ("ids_kv", self.ids_kv, call.kv_len),
        ):
            if ids.shape[1] != length or ids.shape[0] not in (1, call.batch):
                shape = f"[{call.batch}, {length}]" if call.batch == 1 else f"[{call.batch} or 1, {length}]"
                hint = (
                    "give ids_kv as well: queries and keys differ in length" if argument == "ids_kv" else None
                )
                raise InputError(
                    call.argument, f"have document_ids({argument}) of shape {shape}", list(ids.shape), hint
                )


@dataclass(frozen=True, eq=False)
class Prefix(Part):
    """The first ``length`` keys of each sequence: an int, or int ``[B]`` (packed: one entry a document)."""

    name: ClassVar[str] = "prefix"
    length: Size

    def fields(self) -> tuple[Field, ...]:
        return (self.length,)

    def check_values(self) -> None:
        check_at_least("n", self.length, 0)

    def check_call(self, call: Call) -> None:
        check_entries(call, "prefix(n)", self.length, call.sequences, "sequences")


@dataclass(frozen=True, eq=False)
class GlobalBand(Part):
    """``window(left, right) | prefix(prefix)``: a band, and the first keys of the sequence beside it."""

    name: ClassVar[str] = "global"
    left: int | None
    right: int | None
    prefix: Size

    def fields(self) -> tuple[Field, ...]:
        return (self.left, self.right, self.prefix)

    def check_values(self) -> None:
        check_at_least("n", self.prefix, 0)

    def check_call(self, call: Call) -> None:
        check_entries(call, "prefix(n)", self.prefix, call.sequences, "sequences")


@dataclass(frozen=True, eq=False)
class Chunk(Part):
    """Chunks of ``size`` tokens that see only themselves; ``offset`` is where the first query stands."""

    name: ClassVar[str] = "chunks"
    size: int
    offset: Field = None

    def fields(self) -> tuple[Field, ...]:
        return (self.size, self.offset)

    def check_call(self, call: Call) -> None:
        check_entries(call, "chunks(offset)", self.offset, call.sequences, "sequences")


@dataclass(frozen=True, eq=False)
class Dense(Part):
    """An arbitrary boolean tensor ``[B|1, H|1, Sq|1, Sk|1]``, True = attend."""

    name: ClassVar[str] = "dense"
    tensor: Tensor

    def fields(self) -> tuple[Field, ...]:
        return (self.tensor,)

    def check_call(self, call: Call) -> None:
        want = (call.batch, call.heads, call.q_len, call.kv_len)
        if any(have not in (1, size) for have, size in zip(self.tensor.shape, want, strict=True)):
            raise InputError(
                call.argument, f"have dense(tensor) broadcastable to [batch, heads, q, kv] = {list(want)}",
                list(self.tensor.shape),
            )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Ranges(Part):
    """A normal form as it is: what is left of a mask for some rows and keys. Not for callers, and not for compiled graphs."""

    name: ClassVar[str] = "ranges"
    form: NormalForm

    def fields(self) -> tuple[Field, ...]:
        return ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.form.ranges,)


@dataclass(frozen=True, eq=False)
class Predicate(Part):
    """A function of the indices; the handle finds it again from inside an opaque operator."""

    name: ClassVar[str] = "predicate"
    fn: PredicateFunction
    handle: int

    def fields(self) -> tuple[Field, ...]:
        return (self.handle,)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def captured(self) -> tuple[Tensor, ...]:
        """The tensors that the function closes over: they, too, may change in place."""
        return tuple(_captured(self.fn, frozenset(), depth=6))

    def __reduce__(self) -> tuple[Any, ...]:
        return (register_predicate, (self.fn,))


_predicates: WeakValueDictionary[int, Predicate] = WeakValueDictionary()
_handles = itertools.count(1)


def register_predicate(fn: PredicateFunction) -> Predicate:
    part = Predicate(fn, next(_handles))
    _predicates[part.handle] = part
    return part


def find_predicate(handle: int) -> Predicate:
    part = _predicates.get(handle)
    if part is None:
        raise InputError(
            "mask", "be kept alive while its compiled graph runs", f"a released predicate (handle {handle})",
            "keep the mask that masks.predicate returned in a variable outside of the compiled function",
        )  # fmt: skip
    return part


def _captured(value: object, names: frozenset[str], depth: int) -> list[Tensor]:
    """The tensors that a function can reach: what it closes over, its defaults, the globals it names, and of every object
    among them the attributes that it names."""
    if isinstance(value, Tensor):
        return [value]
    if depth == 0 or isinstance(value, type | ModuleType | str | int | float):
        return []
    inner: list[object] = []
    if isinstance(value, list | tuple):
        inner = list(value)
    elif isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, functools.partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, MethodType):
        names |= _names(getattr(value.__func__, "__code__", None))
        inner = [value.__func__, value.__self__]
    elif isinstance(value, FunctionType):
        names |= _names(value.__code__)
        for cell in value.__closure__ or ():
            try:
                inner.append(cell.cell_contents)
            except ValueError:  # a cell that is not filled yet holds nothing to watch
                continue
        inner += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        inner += [value.__globals__[name] for name in names if name in value.__globals__]
    else:
        inner = _attributes(value, names)
    return [tensor for item in inner for tensor in _captured(item, names, depth - 1)]


def _names(code: CodeType | None) -> frozenset[str]:
    if code is None:
        return frozenset()
    return frozenset(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def _attributes(value: object, names: frozenset[str]) -> list[object]:
    """Of an object, the attributes of these names: its own, a module's tensors and children, its class's methods."""
    own = [getattr(value, "__dict__", {})]
    if isinstance(value, torch.nn.Module):
        own += [value._buffers, value._parameters, value._modules]
    found = [attributes[name] for attributes in own for name in names if name in attributes]
    called = "forward" if isinstance(value, torch.nn.Module) else "__call__"
    for name in (*names, called):
        member = getattr(type(value), name, None)
        member = member.fget if isinstance(member, property) else member
        if isinstance(member, FunctionType):
            found.append(MethodType(member, value))
    return found


def as_integer(argument: str, value: object, at_least: int | None = None) -> int:
    """``value`` as an int of at least ``at_least``, or InputError."""
    if isinstance(value, bool | Tensor | float | str) or not hasattr(value, "__index__"):
        raise InputError(argument, "be an int", repr(value))
    number = value if isinstance(value, int) else operator.index(value)
    if at_least is not None and number < at_least:
        raise InputError(argument, f"be at least {at_least}", number)
    return number


def as_vector(argument: str, value: object, hint: str | None = None) -> Tensor:
    """``value`` (an int tensor ``[N]`` or a list of ints) as a tensor, or InputError."""
    if isinstance(value, list | tuple):
        numbers = [as_integer(f"{argument}[{n}]", item) for n, item in enumerate(value)]
        if any(abs(number) > INT32_MAX for number in numbers):
            raise InputError(argument, f"hold values of at most {INT32_MAX}", max(numbers, key=abs))
        return torch.tensor(numbers, dtype=torch.int32, device="cpu")
    if not isinstance(value, Tensor):
        raise InputError(argument, "be an int tensor or a list of ints", type(value).__name__, hint)
    check_int_dtype(argument, value)
    if value.dim() != 1:
        raise InputError(argument, "have one dimension", f"shape {list(value.shape)}", hint)
    return value


def check_int_dtype(argument: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8):
        raise InputError(argument, "have an integer dtype", tensor.dtype, f"{argument}.to(torch.int32)")


def check_at_least(argument: str, value: Field, least: int) -> None:
    if value is None:
        return
    smallest = value if isinstance(value, int) else int(value.min()) if value.numel() else least
    if smallest < least:
        raise InputError(argument, f"be at least {least}", smallest)


def check_offsets(argument: str, offsets: Tensor) -> None:
    hint = "cu_seqlens are cumulative: documents of length 3 and 2 are [0, 3, 5]"
    if int(offsets[0]) != 0:
        raise InputError(argument, "start at 0", int(offsets[0]), hint)
    if offsets.numel() > 1 and int(offsets.diff().min()) < 0:
        raise InputError(
            argument, "never decrease", offsets.tolist() if offsets.numel() < 10 else "a decrease", hint
        )


def check_entries(call: Call, what: str, value: Field, count: int, of: str) -> None:
    if isinstance(value, Tensor) and value.shape[0] != count:
        raise InputError(
            call.argument,
            f"have one entry of {what} for each of the {count} {of}",
            f"{value.shape[0]} entries",
        )
