"""What `KVCache` and `PagedKVCache` have in common: everything but where a token lies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from undivided._arguments import as_integer
from undivided._layout import Layout
from undivided._validation import check_layout
from undivided.cache import _attend
from undivided.cache._attend import Held, outside_of_graphs
from undivided.cache._ledger import Ledger, Slots
from undivided.cache._storage import Counts, Storage, checked_counts, checked_tokens, packed_counts
from undivided.errors import InputError
from undivided.masks import Mask

Lengths = Sequence[int] | Tensor


class Cache(ABC):
    """Cached keys and values of one layer. Made by `KVCache` or `PagedKVCache`."""

    def __init__(self, ledger: Ledger, storage: Storage, batch: int, layout: Layout) -> None:
        check_layout(layout)
        self._ledger, self._storage = ledger, storage
        self.batch, self.layout = batch, layout
        self._last: tuple[Counts, int] | None = None  # of the last append: real tokens, and length with padding

    @property
    def lengths(self) -> tuple[int, ...]:
        """The cached tokens of each sequence."""
        return self._ledger.lengths

    @property
    def lengths_tensor(self) -> Tensor:
        """`lengths` as an int32 tensor [batch] on the cache's device, e.g. for the positions of new tokens."""
        return torch.tensor(self._ledger.lengths, dtype=torch.int32, device=self.device)

    @property
    def k(self) -> Tensor:
        """The keys' memory, for kernels of one's own: [B, max_len, N, Dk], or pages [num_pages, page_size, N, Dk]."""
        return self._storage.k

    @property
    def v(self) -> Tensor:
        """The values' memory, as `k`."""
        return self._storage.v

    @property
    def device(self) -> torch.device:
        """Where keys and values lie."""
        return self._storage.k.device

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self._storage.heads.dtype

    @outside_of_graphs
    def append(self, k: Tensor, v: Tensor, lengths: Lengths | None = None) -> None:
        """Put new tokens behind those that are there.

        Axes: B batch, S new tokens, N key/value heads, D head size, T new tokens of all sequences.

        Args:
            k: new keys in the cache's layout: [B, S, N, Dk] in "bshd", [S, B, N, Dk] in "sbhd", [B, N, S, Dk] in
                "bhsd", [T, N, Dk] in "thd"; the cache's dtype (under autocast any).
            v: new values, as k with head size Dv.
            lengths: how many of the S are real, the first of each sequence: a list of B ints or an int tensor [B] (on
                the CPU, or reading it waits for the device); None: all. In "thd" how many of the T each sequence has.

        Raises:
            InputError: tokens of another shape, dtype or device, that need gradients, or for which there is no room.
                Nothing has changed then.
        """
        storage = self._storage
        new = checked_tokens(
            k, v, lengths, layout=self.layout, batch=self.batch, heads=storage.heads, device=storage.k.device
        )
        plan = self._ledger.plan(new.counts)
        before, count = self._ledger.lengths, new.counts[0]
        if isinstance(self._ledger, Slots) and new.all_real and _equal(new.counts) and _equal(before):
            if count:
                storage.fill(before[0], new)
        else:
            storage.copy(plan.copies, storage.k.shape[1])
            rows = [row for n, count in enumerate(new.counts) for row in self._ledger.rows(plan, n, count)]
            if rows:
                storage.write(torch.tensor(rows, dtype=torch.int64, device=storage.k.device), new)
        self._ledger.commit(plan)
        self._last = new.counts, new.k.shape[1]

    @overload
    def attend(
        self,
        q: Tensor,
        mask: Mask | None = ...,
        q_lengths: Lengths | None = ...,
        *,
        bias: Tensor | None = ...,
        scale: float | None = ...,
        softcap: float | None = ...,
        alibi_slopes: Tensor | None = ...,
        sinks: Tensor | None = ...,
        backend: str | None = ...,
        deterministic: bool | None = ...,
        return_lse: Literal[False] = ...,
    ) -> Tensor: ...

    @overload
    def attend(
        self,
        q: Tensor,
        mask: Mask | None = ...,
        q_lengths: Lengths | None = ...,
        *,
        bias: Tensor | None = ...,
        scale: float | None = ...,
        softcap: float | None = ...,
        alibi_slopes: Tensor | None = ...,
        sinks: Tensor | None = ...,
        backend: str | None = ...,
        deterministic: bool | None = ...,
        return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

    @outside_of_graphs
    def attend(
        self,
        q: Tensor,
        mask: Mask | None = None,
        q_lengths: Lengths | None = None,
        *,
        bias: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        backend: str | None = None,
        deterministic: bool | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of q over everything cached: `undivided.attention` with this cache's keys, values and lengths.

        The queries of a sequence are its last tokens: causal and windows are aligned bottom-right by its own length.

        Args:
            q: queries in the cache's layout, of any number of heads that N divides: usually those of the tokens that
                were appended last.
            mask: causal, window, sinks, chunks, prefix, dense, document_ids or predicate, and what ``&`` and ``|`` make
                of them; None is causal. ``masks.window(None, None)`` hides nothing but what is not there. The lengths
                come from the cache; an alignment that is left out is bottom-right. Key j is the j-th token of its
                sequence.
            q_lengths: how many of the queries are real, the first of each sequence, as `lengths` of `append`; rows
                beyond give 0. None: all, or, if the last append was given lengths, the same.
            bias: as in `undivided.attention`, Sk being the longest of `lengths`; not in "thd".
            scale, softcap, alibi_slopes, sinks, backend, deterministic, return_lse: as in `undivided.attention`.

        Returns:
            The output in q's layout and dtype, [.., H, Dv]; with return_lse, (output, lse).

        Raises:
            InputError: an argument is wrong; q_lengths is needed, and not there.
            NoBackendError: no allowed backend can run it.
        """
        q_len = _attend.checked_query(q, self.layout, self.batch, self._storage.heads)
        return _attend.attend(
            q,
            self._held(),
            self.layout,
            self._queries(q_lengths, q_len),
            mask,
            bias=bias,
            scale=scale,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            backend=backend,
            deterministic=deterministic,
            return_lse=return_lse,
        )

    def truncate(self, lengths: Lengths) -> None:
        """Forget the last tokens, so that ``lengths[b]`` remain of sequence b: how a rejected draft is taken back.

        Args:
            lengths: a list of B ints or an int tensor [B], none above what is there.

        Raises:
            InputError: not that. Nothing has changed then.
        """
        remaining = checked_counts("lengths", lengths, self.batch)
        for n, (after, before) in enumerate(zip(remaining, self.lengths, strict=True)):
            if after > before:
                raise InputError(f"lengths[{n}]", f"be at most the {before} cached tokens of sequence {n}", after)
        self._ledger.truncate(remaining)
        self._last = None

    def fork(self, src: int | Sequence[int], dst: int | Sequence[int]) -> None:
        """Make sequence dst the same as src; what dst held is forgotten.

        Args:
            src, dst: numbers of sequences; or lists of them, forked all at once: ``fork([1, 0], [0, 1])`` swaps two.

        Raises:
            InputError: no such sequence, lists of unequal length, or the same dst twice. Nothing has changed then.
        """
        pairs = self._pairs(src, dst)
        self._storage.copy(*self._ledger.forked(pairs))
        self._ledger.fork(pairs)
        self._last = None

    def free(self, i: int) -> None:
        """Forget sequence i; another may begin in its place.

        Raises:
            InputError: no such sequence.
        """
        self._ledger.free(self._sequence("i", i))
        self._last = None

    @abstractmethod
    def _held(self) -> Held:
        """What `attend` reads."""

    def _queries(self, q_lengths: Lengths | None, q_len: int) -> Counts | None:
        """The real queries of each sequence; None where all are."""
        if self.layout == "thd":
            if q_lengths is None and self._last is not None:
                return packed_counts("q_lengths", self._last[0], self.batch, q_len)
            return packed_counts("q_lengths", q_lengths, self.batch, q_len)
        if q_lengths is None:
            if self._last is None:
                return None
            counts, padded = self._last
            if counts.count(padded) == self.batch:
                return None
            if padded != q_len:
                raise InputError(
                    "q_lengths",
                    "be given where the last append was, and q has another length than it",
                    None,
                    hint=f"the last tokens were {list(counts)} of {padded}, and q has {q_len} of each sequence",
                )
            return counts
        counts = checked_counts("q_lengths", q_lengths, self.batch, q_len, "queries in q")
        return None if counts.count(q_len) == self.batch else counts

    def _sequence(self, name: str, value: object) -> int:
        number = as_integer(name, value, 0)
        if number >= self.batch:
            raise InputError(name, f"be a sequence of the cache, 0 to {self.batch - 1}", number)
        return number

    def _pairs(self, src: int | Sequence[int], dst: int | Sequence[int]) -> list[tuple[int, int]]:
        sources, targets = (list(x) if isinstance(x, list | tuple) else [x] for x in (src, dst))
        if len(sources) != len(targets):
            raise InputError("dst", f"be as many sequences as src ({len(sources)})", len(targets))
        pairs = [(self._sequence("src", a), self._sequence("dst", b)) for a, b in zip(sources, targets, strict=True)]
        if len({target for _, target in pairs}) != len(pairs):
            raise InputError("dst", "name every sequence once", targets)
        return pairs


def _equal(counts: Counts) -> bool:
    return counts.count(counts[0]) == len(counts)
