"""The parts of a mask, which is their intersection: their fields, and the checks of their values.

A part is a small frozen value. It keeps its tensors as the caller passed them, so that a backend can pass them on to
its kernel; ``normal_form`` translates them to ranges of keys. ``check_values`` runs when a part is built from CPU
tensors, and again after a tensor was changed in place. ``check_call`` compares sizes with those of the call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from undivided.arguments.checks import check_at_least, check_memory, check_offsets
from undivided.arguments.shapes import broadcast_hint, broadcasts
from undivided.arguments.tensors import readable, versions
from undivided.errors import InputError
from undivided.masks._memory import DerivedValues

Size = int | Tensor
Field = int | Tensor | None


class CallSizes(NamedTuple):
    """The sizes of one attention call, whether it is in layout "thd", and the name of its mask argument."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    sequences: int
    packed: bool
    argument: str


@dataclass(frozen=True, eq=False)
class Part(DerivedValues):
    """One description of a set of pairs."""

    name: ClassVar[str]
    __match_args__: ClassVar[tuple[str, ...]]

    def fields(self) -> tuple[Field, ...]:
        """The fields in the order of the constructor; ``Mask.flatten`` writes them."""
        return tuple(getattr(self, name) for name in self.__match_args__)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(value for value in self.fields() if isinstance(value, Tensor))

    def validate(self) -> None:
        """Check the values once per version of the tensors, if they are readable."""
        if torch.compiler.is_compiling():
            return
        tensors = self.tensors
        for tensor in tensors:
            check_memory(self.name, tensor)
        if not readable(*tensors):
            return
        now = versions(tensors)
        if now is None or self.__dict__.get("_valid") != now:
            self.check_values()
            self.__dict__["_valid"] = now

    def check_values(self) -> None:
        """Raise InputError if a value is wrong for every call."""

    def check_call(self, call: CallSizes) -> None:
        """Raise InputError if the part does not fit the sizes of the call."""


@dataclass(frozen=True, eq=False)
class Lengths(Part):
    """Real lengths and starts of each batch element, int ``[B]``. ``q=None``: every query row is real."""

    name: ClassVar[str] = "lengths"
    kv: Tensor
    q: Tensor | None = None
    kv_start: Tensor | None = None
    q_start: Tensor | None = None

    def check_values(self) -> None:
        for argument in ("kv", "q", "kv_start", "q_start"):
            check_at_least(argument, getattr(self, argument), 0)

    def check_call(self, call: CallSizes) -> None:
        if call.packed:
            hint = "masks.documents(cu_seqlens), where cu_seqlens are the cumulative lengths"
            raise InputError(call.argument, "describe packed tokens by documents", "lengths", hint)
        check_entries(call, "lengths", self.kv, call.batch, "batch elements")
        hint = "lengths are numbers of tokens, one for each batch element; cumulative lengths go to masks.documents"
        for side, length, start, limit in (
            ("kv", self.kv, self.kv_start, call.kv_len),
            ("q", self.q, self.q_start, call.q_len),
        ):
            if length is None and start is None:
                continue
            if not readable(length, start):
                continue
            end = length if start is None else start
            if start is not None and length is not None:
                end = start.long() + length
            if end is not None and end.numel() and int(end.max()) > limit:
                what = f"{side}_start + {side}" if start is not None and length is not None else side
                raise InputError(
                    call.argument,
                    f"have lengths({what}) of at most {limit}, the {side} length of the call",
                    int(end.max()),
                    hint if start is None else None,
                )


@dataclass(frozen=True, eq=False)
class Documents(Part):
    """Documents packed one after another: real offsets ``[N+1]``, and padded offsets if there are gaps."""

    name: ClassVar[str] = "documents"
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    padded_q: Tensor | None = None
    padded_kv: Tensor | None = None
    max_q: int | None = None
    max_kv: int | None = None
    total_q: int | None = None
    total_kv: int | None = None

    def longest(self, side: str) -> int | None:
        """Tokens of the longest document on side "q" or "kv", from ``max_`` or CPU offsets; None if neither exists."""
        limit: int | None = getattr(self, f"max_{side}")
        offsets: Tensor = getattr(self, f"cu_seqlens_{side}")
        if limit is not None or not readable(offsets):
            return limit
        return int(offsets.diff().max()) if offsets.numel() > 1 else 0

    def tokens(self, side: str) -> int:
        """Tokens that the tensors of side "q" or "kv" must have. Reads the offsets."""
        total: int | None = getattr(self, f"total_{side}")
        return int(self._ends(side)[1][-1]) if total is None else total

    def _ends(self, side: str) -> tuple[str, Tensor]:
        """Name and value of the offsets in memory of the documents on side "q" or "kv"."""
        name = f"cu_seqlens_{side}" if getattr(self, f"padded_{side}") is None else f"padded_{side}"
        return name, getattr(self, name)

    def check_values(self) -> None:
        for side in ("q", "kv"):
            real: Tensor = getattr(self, f"cu_seqlens_{side}")
            padded: Tensor | None = getattr(self, f"padded_{side}")
            limit: int | None = getattr(self, f"max_{side}")
            check_offsets(f"cu_seqlens_{side}", real)
            longest = int(real.diff().max()) if real.numel() > 1 else 0
            if limit is not None and limit < longest:
                raise InputError(f"max_{side}", f"be at least the longest document ({longest})", limit)
            if padded is not None:
                check_at_least(f"padded_{side}", padded, 0)
                lengths, slots = real.long().diff(), padded.long().diff()
                short = (slots < lengths).nonzero()
                if short.numel():
                    n = int(short[0])
                    raise InputError(
                        f"padded_{side}",
                        f"leave room for document {n} of length {int(lengths[n])}",
                        f"{int(slots[n])} slots",
                        f"padded_{side} holds the offset of each document in memory, then the total",
                    )

    def check_call(self, call: CallSizes) -> None:
        if call.batch != 1:
            raise InputError(
                call.argument,
                "have layout 'thd' for masks.documents, or a dense layout with a batch of 1",
                f"a batch of {call.batch}",
                "use layout='thd', or masks.lengths for a padded batch, or masks.document_ids [B, S]",
            )
        for side, tokens in (("q", call.q_len), ("kv", call.kv_len)):
            self._check_end(call.argument, side, tokens)

    def _check_end(self, argument: str, side: str, tokens: int) -> None:
        """Raise unless the documents of one side end at the last token of the call, or ``total`` is its length."""
        total: int | None = getattr(self, f"total_{side}")
        if total is not None and total != tokens:
            raise InputError(argument, f"have total_{side} of {tokens}, the {side} tokens of the call", total)
        name, offsets = self._ends(side)
        if not readable(offsets):
            return
        end = int(offsets[-1])
        if end > tokens:
            hint = "the last offset is the number of tokens: documents of 3 and 7 tokens are [0, 3, 10]"
            raise InputError(argument, f"have {name}[-1] of at most {tokens}, the {side} tokens", end, hint)
        if end < tokens and total is None:
            raise InputError(
                argument,
                f"have {name}[-1] of {tokens}, the {side} tokens",
                end,
                f"append the missing offsets; if the last {tokens - end} tokens are padding, pass masks.documents "
                f"total_{side}={tokens}, or padded offsets that end there",
            )


@dataclass(frozen=True, eq=False)
class DocumentIds(Part):
    """The document id of each token, int ``[B|1, S]``; a negative id marks padding."""

    name: ClassVar[str] = "document_ids"
    ids_q: Tensor
    ids_kv: Tensor

    def check_call(self, call: CallSizes) -> None:
        for argument, ids, length in (("ids_q", self.ids_q, call.q_len), ("ids_kv", self.ids_kv, call.kv_len)):
            if ids.shape[1] != length or ids.shape[0] not in (1, call.batch):
                shape = f"[{call.batch}, {length}]" if call.batch == 1 else f"[{call.batch} or 1, {length}]"
                hint = "pass ids_kv too: queries and keys differ in length" if argument == "ids_kv" else None
                raise InputError(
                    call.argument, f"have document_ids({argument}) of shape {shape}", list(ids.shape), hint
                )


@dataclass(frozen=True, eq=False)
class Prefix(Part):
    """The first ``length`` keys of each sequence: an int, or int ``[B]`` (packed: one entry per document)."""

    name: ClassVar[str] = "prefix"
    length: Size

    def check_values(self) -> None:
        check_at_least("n", self.length, 0)

    def check_call(self, call: CallSizes) -> None:
        check_entries(call, "prefix(n)", self.length, call.sequences, "sequences")


@dataclass(frozen=True, eq=False)
class GlobalBand(Part):
    """``window(left, right) | prefix(prefix)``: a band joined to the first keys of the sequence."""

    name: ClassVar[str] = "global"
    left: int | None
    right: int | None
    prefix: Size

    def check_values(self) -> None:
        check_at_least("n", self.prefix, 0)

    def check_call(self, call: CallSizes) -> None:
        check_entries(call, "prefix(n)", self.prefix, call.sequences, "sequences")


@dataclass(frozen=True, eq=False)
class Chunk(Part):
    """Chunks of ``size`` tokens, each attending to itself only; ``offset`` is the position of the first query."""

    name: ClassVar[str] = "chunks"
    size: int
    offset: Field = None

    def check_call(self, call: CallSizes) -> None:
        check_entries(call, "chunks(offset)", self.offset, call.sequences, "sequences")


@dataclass(frozen=True, eq=False)
class Dense(Part):
    """A boolean tensor ``[B|1, H|1, Sq|1, Sk|1]``, True = attend."""

    name: ClassVar[str] = "dense"
    tensor: Tensor

    def check_call(self, call: CallSizes) -> None:
        sizes = (call.batch, call.heads, call.q_len, call.kv_len)
        if not broadcasts(self.tensor.shape, sizes):
            shape = self.tensor.shape[2:] if self.tensor.shape[:2] == (1, 1) else self.tensor.shape
            raise InputError(
                call.argument,
                f"have dense(tensor) broadcastable to [batch, heads, Sq, Sk] = {list(sizes)}",
                list(shape),
                broadcast_hint(shape, sizes, "masks.dense(tensor{})"),
            )


@dataclass(frozen=True, eq=False)
class Tree(Part):
    """The parent of each drafted token among the queries of its sequence, int ``[B|1, Sq]``; -1 for a root."""

    name: ClassVar[str] = "tree"
    parents: Tensor

    def check_values(self) -> None:
        own = torch.arange(self.parents.shape[1], device=self.parents.device)
        wrong = (self.parents < -1) | (self.parents >= own)
        if bool(wrong.any()):
            row, node = wrong.nonzero()[0].tolist()
            raise InputError(
                "parents",
                "be -1, or the index of an earlier query of the same sequence",
                f"parents[{row}, {node}] = {int(self.parents[row, node])}",
                "number the nodes so that every parent comes before its children",
            )

    def check_call(self, call: CallSizes) -> None:
        rows, nodes = self.parents.shape
        if nodes != call.q_len or rows not in (1, call.batch):
            shape = f"[{call.q_len}] or [{call.batch}, {call.q_len}]"
            raise InputError(call.argument, f"have tree(parents) of shape {shape}", list(self.parents.shape))


@dataclass(frozen=True, eq=False)
class Blocks(Part):
    """The key blocks chosen for each query block and head, int ``[B|1, T, A, n]``; -1 is an entry without a block.

    ``q_block`` None: all queries of a sequence are one block.
    """

    name: ClassVar[str] = "blocks"
    q_block: int | None
    kv_block: int
    table: Tensor

    def check_values(self) -> None:
        check_at_least("table", self.table, -1)

    def check_call(self, call: CallSizes) -> None:
        sequences, heads, q_blocks, _ = self.table.shape
        shape = list(self.table.shape)
        if sequences not in (1, call.sequences):
            raise InputError(call.argument, f"have a block table for 1 or {call.sequences} sequences", f"{shape}")
        if not heads or call.heads % heads:
            raise InputError(call.argument, f"have a block table for a divisor of {call.heads} heads", f"{shape}")
        needed = 1 if self.q_block is None else -(-call.q_len // self.q_block)
        are_rows = call.sequences == call.batch and not call.packed  # documents may be shorter than the call
        if q_blocks > needed or (q_blocks < needed and are_rows):
            must = f"have a block table for {needed} query blocks, of {self.q_block} of {call.q_len} queries"
            raise InputError(call.argument, must, f"{shape}")
        last = -(-call.kv_len // self.kv_block) - 1
        if readable(self.table) and self.table.numel() and int(self.table.max()) > last:
            must = f"choose key blocks of at most {last}: {call.kv_len} keys in blocks of {self.kv_block}"
            raise InputError(call.argument, must, int(self.table.max()))


@dataclass(frozen=True, eq=False)
class Origin(Part):
    """The numbers of the first sequence and head of the call in a larger one, by which dropout draws. Allows every
    pair. `Mask.with_first_head` sets the head."""

    name: ClassVar[str] = "origin"
    sequence: int
    head: int


P = TypeVar("P", bound=Part)


def find_part(parts: Iterable[Part], kind: type[P]) -> P | None:
    """The first part of a kind; None if there is none."""
    return next((part for part in parts if isinstance(part, kind)), None)


def check_entries(call: CallSizes, what: str, value: Field, count: int, unit: str) -> None:
    """Raise InputError unless a tensor has one entry per batch element or sequence."""
    if isinstance(value, Tensor) and value.shape[0] != count:
        must, entries = f"have one entry of {what} for each of the {count} {unit}", value.shape[0]
        is_cumulative = what == "lengths" and entries == count + 1
        hint = "cu_seqlens.diff(), if these are cumulative lengths" if is_cumulative else None
        raise InputError(call.argument, must, f"{entries} entries", hint)
