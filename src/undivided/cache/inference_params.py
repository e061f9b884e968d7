"""`InferenceParams`: the caches of all layers of a model, with TransformerEngine's interface."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from undivided._arguments import as_integer, check_tensor
from undivided._layout import LAYOUTS, Layout
from undivided.cache import _attend
from undivided.cache._attend import Held, Output, outside_of_graphs
from undivided.cache._batch import Batch, PagesOfBatch, Step
from undivided.cache._ledger import Pages, Slots
from undivided.cache._storage import Counts, Heads, Storage, checked_tokens
from undivided.errors import InputError
from undivided.masks import Mask

FORMATS = tuple(layout for layout in LAYOUTS if layout != "bhsd")


class InferenceParams:
    """The keys and values of every layer of a model, and which sequences are in the batch: TransformerEngine's
    interface.

    Each iteration says with `pre_step` which sequences are in the batch and how many new tokens each brings; then the
    model runs, and each of its layers puts its keys and values into its own cache and attends to all of them. Row r of
    the batch is the r-th sequence of the step. A layer needs one call::

        out = inference_params.attend(self.layer_number, q, k, v, mask=masks.causal())

    Beyond TransformerEngine: a sequence may bring any number of tokens at any step (prompts in chunks, drafts),
    sequences may come in any order, the pages may be fewer than all sequences could need, `fork` and `truncate`, any
    device.

    Args:
        max_batch_size: sequences at a time.
        max_sequence_length: tokens that a sequence may have.
        num_heads_kv: key/value heads.
        head_dim_k: head size of queries and keys.
        dtype: of the cached keys and values.
        head_dim_v: head size of values; head_dim_k if None.
        is_paged: whether sequences take pages from one pool as they grow.
        total_num_pages: where is_paged, pages of the pool of each layer; None: as many as all sequences could need. May
            be fewer.
        page_size: where is_paged, tokens of a page; to be given.
        max_ctx_len: accepted; new tokens are limited by max_sequence_length alone.
        qkv_format: "bshd", "sbhd" or "thd": of the tensors that layers pass, unless they say another.
        custom_cache_manager: only None.
        device: of the caches; None: that of the first keys they are given.

    Raises:
        InputError: an argument is wrong, or needed and not there.

    Source: the interface of transformer_engine.pytorch.InferenceParams.

    >>> import torch, undivided
    >>> from collections import OrderedDict
    >>> params = undivided.InferenceParams(4, 64, num_heads_kv=2, head_dim_k=16, dtype=torch.float32)
    >>> params.pre_step(OrderedDict(a=5, b=3))                  # two prompts
    >>> q, k, v = torch.randn(2, 5, 8, 16), torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 16)
    >>> params.attend(1, q, k, v).shape                         # layer 1
    torch.Size([2, 5, 8, 16])
    >>> params.pre_step(OrderedDict(b=1, c=4))                  # a has left, c is new
    >>> params.attend(1, q[:, :4], k[:, :4], v[:, :4]).shape, dict(params.sequences)
    (torch.Size([2, 4, 8, 16]), {'b': 4, 'c': 4})
    """

    _batch: Batch
    _step: Step | None
    _rows: Tensor | None  # those of the step, on the device
    _table: Tensor | None  # `page_table`, once it was asked for

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Any = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        for name, value in (("num_heads_kv", num_heads_kv), ("head_dim_k", head_dim_k), ("dtype", dtype)):
            if value is None:
                raise InputError(name, "be given", None)
        if custom_cache_manager is not None:
            raise InputError(
                "custom_cache_manager", "be None: the caches are our own", type(custom_cache_manager).__name__
            )
        assert num_heads_kv is not None and head_dim_k is not None
        self._heads = Heads.checked(
            num_heads_kv, head_dim_k, head_dim_v, dtype, ("num_heads_kv", "head_dim_k", "head_dim_v")
        )
        self.max_batch_size = as_integer("max_batch_size", max_batch_size, 1)
        self.max_sequence_length = as_integer("max_sequence_length", max_sequence_length, 1)
        if not isinstance(is_paged, bool):
            raise InputError("is_paged", "be True or False", repr(is_paged))
        self.is_paged, self.qkv_format = is_paged, _checked_format(qkv_format)
        self.page_size, self.total_num_pages = self._pool(page_size, total_num_pages)
        if max_ctx_len is not None and as_integer("max_ctx_len", max_ctx_len, 1) > self.max_sequence_length:
            raise InputError("max_ctx_len", f"be at most max_sequence_length ({max_sequence_length})", max_ctx_len)
        self.device = None if device is None else torch.device(device)
        self._storages: dict[int, Storage] = {}
        self._layers: set[int] = set()
        self.reset()

    def _pool(self, page_size: int | None, total: int | None) -> tuple[int, int]:
        """(tokens of a page, pages); a cache that is not paged has one page for each sequence."""
        if not self.is_paged:
            return self.max_sequence_length, self.max_batch_size
        if page_size is None:
            raise InputError("page_size", "be given where is_paged", None, hint="16 to 256 tokens")
        size = as_integer("page_size", page_size, 1)
        most = self.max_batch_size * -(-self.max_sequence_length // size)
        return size, most if total is None else as_integer("total_num_pages", total, 1)

    @property
    def num_heads_kv(self) -> int:
        """Key/value heads."""
        return self._heads.kv_heads

    @property
    def head_dim_k(self) -> int:
        """Head size of queries and keys."""
        return self._heads.head_dim

    @property
    def head_dim_v(self) -> int:
        """Head size of values."""
        return self._heads.value_dim

    @property
    def dtype(self) -> torch.dtype:
        """Of the cached keys and values."""
        return self._heads.dtype

    def reset(self) -> None:
        """Forget every sequence. The memory is kept."""
        ledger = (
            PagesOfBatch(self.total_num_pages, self.page_size, self.max_batch_size)
            if self.is_paged
            else Slots(self.max_batch_size, self.max_sequence_length)
        )
        self._batch = Batch(ledger, self.max_batch_size, self.max_sequence_length)
        self._set_step(None)

    def allocate_memory(self, layer_number: int) -> None:
        """Make the cache of a layer: now where the device is known, else when its first keys come. Repeating it is no
        harm.

        Raises:
            InputError: layer_number is no int.
        """
        number = as_integer("layer_number", layer_number, 0)
        if self.device is not None and number not in self._storages:
            storage = Storage(self.total_num_pages, self.page_size, self._heads, self.device)
            self._storages[number] = storage
        self._layers.add(number)

    def has_memory(self, layer_number: int) -> bool:
        """Whether `allocate_memory` was called for this layer, or it has been given keys."""
        return layer_number in self._layers

    @outside_of_graphs
    def pre_step(self, step_dict: Mapping[Hashable, int]) -> None:
        """Say what the next iteration brings, before the model runs.

        Args:
            step_dict: new tokens of each sequence, 0 or more, by an id of any kind, in the order of the batch. An id
                that is not known begins a sequence; one that is left out has ended, and its memory is free.

        Raises:
            InputError: too many sequences, one that gets too long, or no pages for all. Nothing has changed then.
        """
        self._set_step(self._batch.step(step_dict, self._storages.values()))

    @outside_of_graphs
    def step(
        self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int, str]:
        """Put a layer's new tokens into its cache, and hand the whole cache over.

        `attend` does this and the attention. Where a layer is called twice in a step, the second call replaces the
        first.

        Args:
            layer_number: of the layer.
            new_k, new_v: keys and values in qkv_format; of each sequence the first tokens are real, as many as
                `pre_step` was told.
            qkv_format: "bshd", "sbhd" or "thd"; that of the constructor if None.

        Returns:
            (k_cache, v_cache, cu_seqlens_q, cu_seqlens_kv, max_sequence_length, format). The caches are
            [b, max_sequence_length, g, d] in the batch's order (a copy, once sequences have left or changed places), or
            where paged the pools [pages, page_size, g, d], to be read with `page_table`. format is "bshd", "sbhd_2bshd"
            or "thd_2bshd", as the queries are.

        Raises:
            InputError: tokens that do not fit what `pre_step` was told.
        """
        format = self.qkv_format if qkv_format is None else _checked_format(qkv_format)
        storage = self._write(layer_number, new_k, new_v, format)
        k, v = storage.k, storage.v
        if not self.is_paged:
            held = self._held(storage)
            k, v = (held.k, held.v) if held.pages is None else (pool[held.pages[:, 0]] for pool in (k, v))
        output = "bshd" if format == "bshd" else f"{format}_2bshd"
        return k, v, self.cu_seqlens_q, self.cu_seqlens_kv, self.max_sequence_length, output

    @outside_of_graphs
    def attend(
        self,
        layer_number: int,
        q: Tensor,
        new_k: Tensor,
        new_v: Tensor,
        qkv_format: str | None = None,
        *,
        mask: Mask | None = None,
        **options: Any,
    ) -> Output:
        """Put a layer's new tokens into its cache, and attend to everything that it holds of their sequences.

        Args:
            layer_number, new_k, new_v, qkv_format: as for `step`.
            q: queries of the same tokens, [.., h, d].
            mask: as for `KVCache.attend`: causal if None, aligned bottom-right where it does not say; never with
                lengths.
            options: bias, scale, softcap, alibi_slopes, sinks, backend, deterministic, return_lse of
                `undivided.attention`.

        Returns:
            The output in q's format, 0 in rows that are padding; with return_lse, (output, lse).

        Raises:
            InputError: tokens that do not fit what `pre_step` was told, or an argument is wrong.
            NoBackendError: no allowed backend can run it.
        """
        format = self.qkv_format if qkv_format is None else _checked_format(qkv_format)
        step = self._checked()
        q_len = _attend.checked_query(q, format, len(step.slots), self._heads)
        axis = format.index("t" if format == "thd" else "s")
        check_tensor("new_k", new_k)
        if new_k.dim() == q.dim() and new_k.shape[axis] != q_len:
            raise InputError("q", f"have the tokens of new_k ({new_k.shape[axis]})", q_len)
        storage = self._write(layer_number, new_k, new_v, format)
        all_real = format != "thd" and step.counts.count(q_len) == len(step.counts)
        counts = None if all_real else step.counts
        return _attend.attend(q, self._held(storage), format, counts, mask, **options)

    def _write(self, layer_number: int, new_k: Tensor, new_v: Tensor, format: Layout) -> Storage:
        step = self._checked()
        check_tensor("new_k", new_k)
        if self.device is None:
            self._move(new_k.device)
        self.allocate_memory(layer_number)
        storage = self._storages[layer_number]
        device = storage.k.device
        tokens = checked_tokens(
            new_k,
            new_v,
            step.counts,
            layout=format,
            batch=len(step.slots),
            heads=self._heads,
            device=device,
            names=("new_k", "new_v", "the step's tokens"),
        )
        if step.rows:
            if self._rows is None:
                self._rows = torch.tensor(step.rows, dtype=torch.int64, device=device)
            storage.write(self._rows, tokens)
        return storage

    def _move(self, device: torch.device) -> None:
        self.device = device
        self._set_step(self._step)

    def _checked(self) -> Step:
        if self._step is None or not self._step.slots:
            raise InputError(
                "inference_params",
                "be told of the sequences before the model runs",
                "no step",
                hint="inference_params.pre_step(OrderedDict(zip(seq_ids, new_tokens)))",
            )
        return self._step

    def _set_step(self, step: Step | None) -> None:
        """What is asked of a step in every layer is worked out once."""
        before, counts, after = ((), (), ()) if step is None else (step.before, step.counts, step.after)
        self._step, self._rows, self._table = step, None, None
        self.sequences = self._batch.sequences
        self.sequences_pre_step = OrderedDict(zip(self._batch.slots, before, strict=False))
        self._seqlens_pre_step = self._padded(before)
        self.cu_seqlens_q, self.cu_seqlens_kv = self._cumulative(counts), self._cumulative(after)

    def _held(self, storage: Storage) -> Held:
        step = self._checked()
        first, count = step.slots[0], len(step.slots)
        if not self.is_paged and step.slots == tuple(range(first, first + count)):
            return Held(storage.k[first : first + count], storage.v[first : first + count], step.after)
        return Held(storage.k, storage.v, step.after, self.page_table)

    @property
    def page_table(self) -> Tensor:
        """The pages of each sequence of the batch in order, int32 [b, pages of the longest]; 0 beyond a sequence's.
        Where not paged, the row of the cache that holds each sequence, [b, 1].
        """
        if self._table is None:
            slots = self._step.slots if self._step is not None else ()
            tables: Sequence[Sequence[int]] = [[slot] for slot in slots]
            if isinstance(ledger := self._batch.ledger, Pages):
                tables = [ledger.tables[slot] for slot in slots]
            self._table = _attend.table(tables, self.device or torch.device("cpu"))
        return self._table

    @property
    def batch_size(self) -> int:
        """Sequences of the step."""
        return 0 if self._step is None else len(self._step.slots)

    def get_seqlens_pre_step(self) -> Tensor:
        """Cached tokens of each sequence before the step, int32 [max_batch_size]: the position of its first new
        token."""
        return self._seqlens_pre_step

    def _padded(self, counts: Counts) -> Tensor:
        padded = [*counts, *[0] * (self.max_batch_size - len(counts))]
        return torch.tensor(padded, dtype=torch.int32, device=self.device)

    def _cumulative(self, counts: Counts) -> Tensor:
        offsets = [0, *accumulate(counts)]
        offsets += offsets[-1:] * (self.max_batch_size - len(counts))
        return torch.tensor(offsets, dtype=torch.int32, device=self.device)

    def fork(self, src: Hashable, dst: Hashable) -> None:
        """Begin sequence dst with all that src has, between two steps. Pages are shared until one of the two is written
        to.

        Raises:
            InputError: src is not there, dst is, or there are max_batch_size sequences already. Nothing has changed
                then.
        """
        self._batch.fork(src, dst, self._storages.values())
        self._set_step(None)

    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Forget the last tokens of a sequence, between two steps: how a rejected draft is taken back.

        Raises:
            InputError: the sequence is not there, or has fewer tokens. Nothing has changed then.
        """
        self._batch.truncate(seq_id, length)
        self._set_step(None)

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the batch as [b, tokens, g, d]: a copy. What is beyond a sequence's length is anything.

        Raises:
            InputError: the layer has no cache, or there is no step.
        """
        self._checked()
        if layer_number not in self._storages:
            raise InputError("layer_number", "be that of a layer with a cache", layer_number)
        storage, pages = self._storages[layer_number], self.page_table
        return storage.k[pages].flatten(1, 2), storage.v[pages].flatten(1, 2)

    def __repr__(self) -> str:
        paged = f", total_num_pages={self.total_num_pages}, page_size={self.page_size}" if self.is_paged else ""
        return (
            f"InferenceParams(max_batch_size={self.max_batch_size}, max_sequence_length={self.max_sequence_length}, "
            f"num_heads_kv={self.num_heads_kv}, head_dim_k={self.head_dim_k}, head_dim_v={self.head_dim_v}, "
            f"dtype={self.dtype}{paged}, sequences={dict(self.sequences)})"
        )


def _checked_format(value: object) -> Layout:
    if value not in FORMATS:
        raise InputError("qkv_format", f"be one of {', '.join(map(repr, FORMATS))}", repr(value))
    return value
