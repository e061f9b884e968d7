"""`Cache`: the base class of `KVCache` and `PagedKVCache`, which differ only in where a token is stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from undivided.arguments.checks import as_integer
from undivided.arguments.graphs import outside_of_graphs
from undivided.arguments.layout import Layout
from undivided.arguments.signature import checked_methods
from undivided.cache import _attend
from undivided.cache._attend import CachedCall, CachedSequences
from undivided.cache._checks import as_list, attends, checked_counts, checked_tokens, packed_counts
from undivided.cache._ledger.compaction import Compaction, checked_indices, compact
from undivided.cache._ledger.ledger import Ledger
from undivided.cache._ledger.slots import Slots
from undivided.cache._ranks import PageRanks, compact_on_all_ranks
from undivided.cache._storage import Counts, Memory, Storage
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.request.checks import check_layout

Lengths = Sequence[int] | Tensor


class LastAppend(NamedTuple):
    """The tokens of the last append.

    Args:
        counts: real tokens of each sequence.
        padded: tokens of each sequence with padding; of all sequences, if packed.
        is_current: whether the sequences are as this append left them.
    """

    counts: Counts
    padded: int
    is_current: bool = True


@checked_methods("fork", "free", "keep", "truncate")
class Cache(ABC):
    """Cached keys and values of one layer: a `KVCache` or a `PagedKVCache`."""

    _ledger: Ledger
    _ranks: PageRanks | None = None

    def __init__(self, ledger: Ledger, storage: Storage, batch: int, layout: Layout) -> None:
        check_layout(layout)
        self._ledger, self._storage = ledger, storage
        self.batch, self.layout = batch, layout
        self._last: LastAppend | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of cached tokens of each sequence."""
        return self._ledger.lengths

    @property
    def lengths_tensor(self) -> Tensor:
        """`lengths` as an int32 tensor [B] on the cache's device, for example for the positions of new tokens."""
        return torch.tensor(self._ledger.lengths, dtype=torch.int32, device=self.device)

    @property
    def k(self) -> Tensor:
        """The memory of the keys, for custom kernels: [B, max_len, N, Dk], or pages [num_pages, page_size, N, Dk].

        Of a quantised cache, the quantised keys; int4 has Dk / 2 bytes per head.
        """
        return self._storage.k

    @property
    def v(self) -> Tensor:
        """The memory of the values: as `k`, with head size Dv."""
        return self._storage.v

    @property
    def k_scale(self) -> Tensor | None:
        """The scales of a quantised cache's keys: fp32, `k` without its last axis; int4 has one per 32 elements.

        None if the cache is not quantised.
        """
        return self._storage.pools.k_scale

    @property
    def v_scale(self) -> Tensor | None:
        """The scales of the values: as `k_scale`."""
        return self._storage.pools.v_scale

    @property
    def quantize(self) -> str | None:
        """The format of the cached keys and values, or None."""
        return self._storage.spec.format

    @property
    def memory(self) -> Memory:
        """The bytes of the values and scales, and those of the same cache in bfloat16; `print` shows them."""
        return self._storage.memory

    @property
    def device(self) -> torch.device:
        """The device of keys and values."""
        return self._storage.k.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the new keys and values, and of the queries."""
        return self._storage.spec.dtype

    def truncate(self, lengths: Lengths) -> None:
        """Drop the last tokens, so that ``lengths[b]`` tokens of sequence b remain, for example after a rejected draft.

        Args:
            lengths: a list of B ints or an int tensor [B], at most the cached tokens.

        Raises:
            InputError: the lengths are wrong. The cache is unchanged.
        """
        remaining = checked_counts("lengths", lengths, self.batch)
        for n, (after, before) in enumerate(zip(remaining, self.lengths, strict=True)):
            if after > before:
                raise InputError(f"lengths[{n}]", f"be at most the {before} cached tokens of sequence {n}", after)
        self._ledger.truncate(remaining)
        self._note_change()

    def fork(self, src: int | Lengths, dst: int | Lengths) -> None:
        """Make sequence dst a copy of src; the previous tokens of dst are dropped.

        Args:
            src, dst: indices of sequences, or lists or int tensors of indices forked all at once:
                ``fork([1, 0], [0, 1])`` swaps two sequences.

        Raises:
            InputError: a sequence does not exist, the lists differ in length, or a dst occurs twice. The cache is
                unchanged.
        """
        pairs = self._pairs(src, dst)
        self._storage.copy(*self._ledger.fork_copies(pairs))
        self._note_change()
        self._ledger.fork(pairs)

    def free(self, i: int) -> None:
        """Drop sequence i; a new sequence may start in its place.

        Args:
            i: index of the sequence.

        Raises:
            InputError: the sequence does not exist.
        """
        self._ledger.free(self._sequence("i", i))
        self._note_change()

    def _note_change(self) -> None:
        """Note that the sequences have changed since the last append."""
        if self._last is not None:
            self._last = self._last._replace(is_current=False)

    def _queries(self, q_lengths: Lengths | None, q_len: int) -> Counts | None:
        """The number of real queries of each sequence; None if all are real."""
        last = self._last
        if self.layout == "thd":
            if q_lengths is None and last is not None and last.is_current:
                q_lengths = last.counts
            return packed_counts("q_lengths", q_lengths, self.batch, q_len)
        if q_lengths is None:
            if last is None or last.counts.count(last.padded) == self.batch:
                return None
            if last.is_current and last.padded == q_len:
                return last.counts
            if not last.is_current and last.padded != q_len:  # not the queries of that append
                return None
            cause = "q has another number of tokens" if last.is_current else "sequences have changed since"
            hint = f"the last append had {list(last.counts)} real of {last.padded} tokens; q has {q_len} per sequence"
            raise InputError("q_lengths", f"be given if the last append had lengths and {cause}", None, hint=hint)
        counts = checked_counts("q_lengths", q_lengths, self.batch, q_len, "queries in q")
        return None if counts.count(q_len) == self.batch else counts

    def _sequence(self, name: str, value: object) -> int:
        if (number := as_integer(name, value, 0)) >= self.batch:
            raise InputError(name, f"be a sequence of the cache, 0 to {self.batch - 1}", number)
        return number

    def _pairs(self, src: int | Lengths, dst: int | Lengths) -> list[tuple[int, int]]:
        sources, targets = _indices("src", src), _indices("dst", dst)
        if len(sources) != len(targets):
            raise InputError("dst", f"be as many sequences as src ({len(sources)})", len(targets))
        pairs = [(self._sequence("src", a), self._sequence("dst", b)) for a, b in zip(sources, targets, strict=True)]
        if len({target for _, target in pairs}) != len(pairs):
            raise InputError("dst", "name every sequence once", list(targets))
        return pairs

    @outside_of_graphs
    def append(self, k: Tensor, v: Tensor, lengths: Lengths | None = None) -> None:
        """Append new tokens to each sequence.

        Axes: B batch, S new tokens, N key/value heads, D head size, T new tokens of all sequences.

        Args:
            k: new keys in the cache's layout: [B, S, N, Dk] in "bshd", [S, B, N, Dk] in "sbhd", [B, N, S, Dk] in
                "bhsd", [T, N, Dk] in "thd"; in the cache's dtype (any dtype under autocast), never quantised: a
                quantised cache quantises them here.
            v: new values, as k with head size Dv.
            lengths: number of real tokens of each sequence, which come first: a list of B ints or an int tensor [B]
                (reading a tensor on a GPU waits for it). None: all S. In "thd", the tokens of each sequence.

        Raises:
            InputError: the tokens have another shape, dtype or device, require gradients, or do not fit. The cache is
                unchanged.
        """
        storage, batch, layout = self._storage, self.batch, self.layout
        new = checked_tokens(k, v, lengths, layout=layout, batch=batch, spec=storage.spec, device=storage.k.device)
        plan = self._ledger.plan(new.counts)
        before, count = self._ledger.lengths, new.counts[0]
        if isinstance(self._ledger, Slots) and new.all_real and _equal(new.counts) and _equal(before):
            if count:
                storage.fill(before[0], new)
        else:
            storage.copy(plan.copies, storage.k.shape[1])
            rows = [row for n, count in enumerate(new.counts) for row in self._ledger.rows(plan, n, count)]
            storage.write(storage.rows(rows), new)
        self._note_change()
        self._ledger.commit(plan)
        self._last = LastAppend(new.counts, new.k.shape[1])

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
        batch_invariant: bool | None = ...,
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
        batch_invariant: bool | None = ...,
        return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...

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
        batch_invariant: bool | None = ...,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]: ...

    @attends
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
        batch_invariant: bool | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of q over all cached tokens: `undivided.attention` with this cache's keys, values and lengths.

        The queries are the last tokens of their sequence: causal masks and windows are aligned bottom-right by the
        sequence's own length.

        Args:
            q: queries in the cache's layout, with a number of heads that N divides; usually the queries of the tokens
                appended last.
            mask: any of `undivided.masks` but lengths and documents, joined by ``&`` and ``|``; `pages` chooses keys.
                None: causal. ``masks.window(None, None)`` masks only missing tokens. The cache adds the lengths; the
                default alignment is bottom-right, for at most as many queries as cached tokens. Key j is the j-th token
                of its sequence. The query index of predicate, blocks and dense counts the rows of this call: the
                position of row i is i + length - rows, which ``predicate(fn, positions=True)`` passes.
            q_lengths: number of real queries of each sequence, which come first, as `lengths` of `append`; other rows
                give 0. None: the lengths of the last append if it had any, otherwise all. Required if sequences have
                changed between that append and its queries.
            bias: as in `undivided.attention`, with Sk = max(lengths); not in "thd".
            scale, softcap, alibi_slopes, sinks, backend, deterministic, batch_invariant, return_lse: as in
                `undivided.attention`.

        Returns:
            The output in q's layout and dtype, [.., H, Dv]; with return_lse, (output, lse).

        Raises:
            InputError: an argument is wrong, or q_lengths is required.
            NoBackendError: no allowed backend can run the problem.
        """
        options: dict[str, Any] = {}
        has_scores = not (bias is None and scale is None and softcap is None and alibi_slopes is None and sinks is None)
        has_rules = not (backend is None and deterministic is None and batch_invariant is None)
        if has_scores or has_rules or return_lse is not False:  # passing nine keywords on takes three microseconds
            options = {
                "bias": bias,
                "scale": scale,
                "softcap": softcap,
                "alibi_slopes": alibi_slopes,
                "sinks": sinks,
                "backend": backend,
                "deterministic": deterministic,
                "batch_invariant": batch_invariant,
                "return_lse": return_lse,
            }
        return _attend.attend(self._call(q, mask, q_lengths, options))

    def _call(self, q: Tensor, mask: Mask | None, q_lengths: Lengths | None, options: dict[str, Any]) -> CachedCall:
        """The call of `attend`; InputError if q or q_lengths are wrong."""
        q_len = _attend.checked_query(q, self.layout, self.batch, self._storage.spec)
        counts = self._queries(q_lengths, q_len)
        return CachedCall(q, self._cached_sequences(), self.layout, counts, mask, options)

    def keep(self, indices: Sequence[Sequence[int] | Tensor]) -> None:
        """Keep some of the tokens that were appended last, for example the accepted path of a draft tree.

        Args:
            indices: for each sequence, which of its tokens of the last `append` stay: ascending ints, from 0; they
                become its last tokens. The others are dropped. An empty list drops all.

        Raises:
            InputError: there was no append, or an index is wrong. The cache is unchanged.

        >>> import torch, undivided
        >>> cache = undivided.KVCache(1, 8, 1, 4, dtype=torch.float32)
        >>> tree = torch.arange(4.0).view(1, 4, 1, 1).expand(1, 4, 1, 4)
        >>> cache.append(tree, tree)
        >>> cache.keep([[0, 2, 3]])
        >>> cache.lengths, cache.k[0, :3, 0, 0].tolist()
        ((3,), [0.0, 2.0, 3.0])
        """
        compaction = compact_on_all_ranks(self._ranks, lambda: self._compaction(indices))
        writes = compaction.read([self._storage])
        self._note_change()
        self._ledger = compaction.ledger
        compaction.write(writes)

    def _compaction(self, indices: Sequence[Sequence[int] | Tensor]) -> Compaction[Ledger]:
        if self._last is None or not self._last.is_current:
            raise InputError("indices", "be given directly after append", "no append, or another change since it")
        if not isinstance(indices, Sequence) and not (isinstance(indices, Tensor) and indices.dim()):
            raise InputError("indices", "be a list of lists of ints", type(indices).__name__)
        if len(indices) != self.batch:
            raise InputError("indices", f"be one list for each of the {self.batch} sequences", len(indices))
        kept = {
            n: (count, checked_indices(f"indices[{n}]", indices[n], count)) for n, count in enumerate(self._last.counts)
        }
        return compact(self._ledger, kept)

    @abstractmethod
    def _cached_sequences(self) -> CachedSequences:
        """The keys, values and lengths that `attend` reads."""


def _indices(name: str, value: int | Lengths) -> Sequence[object]:
    """The indices of one or several sequences, not yet checked."""
    is_list = value.dim() > 0 if isinstance(value, Tensor) else isinstance(value, list | tuple | range)
    return as_list(name, value, "be an int, a list of ints, or an int tensor [n]") if is_list else [value]


def _equal(counts: Counts) -> bool:
    return counts.count(counts[0]) == len(counts)
