"""`InferenceParams`: the caches of all layers of a model, with the interface of TransformerEngine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from undivided.arguments.checks import as_device, as_integer, check_tensor
from undivided.arguments.graphs import outside_of_graphs
from undivided.arguments.layout import Layout
from undivided.arguments.signature import checked_methods
from undivided.cache import _attend
from undivided.cache._attend import CachedCall, CachedSequences
from undivided.cache._batch import Batch, BatchPages, Step, checked_format, cumulative, padded, pool_sizes
from undivided.cache._block_table import BlockTable
from undivided.cache._checks import SIZE_NAMES, TokenNames, checked_tokens
from undivided.cache._ledger.pages import Pages
from undivided.cache._ledger.slots import Slots
from undivided.cache._ranks import checked_ranks
from undivided.cache._sharded_steps import LayerCall, ShardedSteps
from undivided.cache._storage import Storage, TargetRows, TokenSpec
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.request.result import Output

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_TOKEN_NAMES = TokenNames("new_k", "new_v", "qkv_format", "num_heads_kv", "InferenceParams")


@checked_methods("__init__", other_names=SIZE_NAMES)
@checked_methods("allocate_memory", "evict", "fork", "free", "has_memory", "keep", "truncate")
class InferenceParams(ShardedSteps):
    """The key/value caches of all layers of a model, and the sequences of the batch.

    Before each iteration, `pre_step` receives the sequences of the batch and the number of their new tokens. Then the
    model runs: each layer appends its keys and values to its own cache and attends to all cached tokens. Row r of the
    batch is the r-th sequence of the step. A layer needs one call::

        out = inference_params.attend(self.layer_number, q, k, v, mask=masks.causal())

    Beyond TransformerEngine: any number of new tokens per step, sequences in any order, fewer pages than they all could
    need, `fork`, `truncate`, `match`, `evict`, and any device.

    Axes: b sequences of the step, s new tokens, t packed new tokens, h query heads, g key/value heads, d head size.

    Args:
        max_batch_size: maximum number of sequences in the batch.
        max_sequence_length: maximum number of tokens per sequence.
        num_heads_kv: key/value heads, g. Required.
        head_dim_k: head size of queries and keys. Required.
        dtype: dtype of the cached keys and values. Required.
        head_dim_v: head size of values; head_dim_k if None.
        is_paged: whether sequences take pages from one pool as they grow.
        total_num_pages: pages of each layer's pool, if paged. None: enough for all sequences at full length.
        page_size: tokens per page; required if paged.
        max_ctx_len: accepted for compatibility; only max_sequence_length limits new tokens.
        qkv_format: default format of the tensors that layers pass: "bshd", "sbhd" or "thd".
        custom_cache_manager: only None is accepted.
        device: device of the caches. None: the device of the first keys.
        quantize: format in which keys and values are stored, as in `KVCache`. `attend` and the layers of this library
            read it in place; `step` is refused.
        mesh: the ranks that layers are divided over by `undivided.parallel.parallelize`, as in `KVCache`:
            num_heads_kv then counts the heads of all ranks.
        context_parallel: an `undivided.ContextParallel`, whose ranks the pages are spread over: page p of every
            sequence is on rank p % ranks, and total_num_pages counts those of each rank. Layers need the same group
            (`set_context_parallel_group`). All ranks make the same calls.

    Raises:
        InputError: an argument is wrong or missing.

    Source: the interface of transformer_engine.pytorch.InferenceParams.

    >>> import torch, undivided
    >>> from collections import OrderedDict
    >>> params = undivided.InferenceParams(4, 64, num_heads_kv=2, head_dim_k=16, dtype=torch.float32)
    >>> params.pre_step(OrderedDict(a=5, b=3))                  # two prompts
    >>> q, k, v = torch.randn(2, 5, 8, 16), torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 16)
    >>> params.attend(1, q, k, v).shape                         # layer 1
    torch.Size([2, 5, 8, 16])
    >>> params.pre_step(OrderedDict(b=1, c=4))                  # a has ended, c is new
    >>> params.attend(1, q[:, :4], k[:, :4], v[:, :4]).shape, dict(params.sequences)
    (torch.Size([2, 4, 8, 16]), {'b': 4, 'c': 4})
    """

    _batch: Batch
    _rows: TargetRows | None  # pool rows of the new tokens, on the device
    _table: BlockTable

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
        quantize: str | None = None,
        mesh: DeviceMesh | None = None,
        context_parallel: Any = None,
    ) -> None:
        for name, value in (("num_heads_kv", num_heads_kv), ("head_dim_k", head_dim_k), ("dtype", dtype)):
            if value is None:
                raise InputError(name, "be given", None, "num_heads_kv, head_dim_k and dtype are those of the keys")
        if custom_cache_manager is not None:
            raise InputError("custom_cache_manager", "be None", type(custom_cache_manager).__name__)
        assert num_heads_kv is not None and head_dim_k is not None
        names = "num_heads_kv", "head_dim_k", "head_dim_v"
        super().__init__(TokenSpec.checked(num_heads_kv, head_dim_k, head_dim_v, dtype, names, quantize, mesh))
        self.max_batch_size = as_integer("max_batch_size", max_batch_size, 1)
        self.max_sequence_length = as_integer("max_sequence_length", max_sequence_length, 1)
        if not isinstance(is_paged, bool):
            raise InputError("is_paged", "be True or False", repr(is_paged))
        self.is_paged, self.qkv_format = is_paged, checked_format(qkv_format)
        self.context_parallel, self._ranks = context_parallel, checked_ranks(context_parallel)
        if self._ranks is not None and not is_paged:
            raise InputError("is_paged", "be True with context_parallel: pages are what ranks hold", False)
        sizes = self.max_sequence_length, self.max_batch_size
        self.page_size, self.total_num_pages = pool_sizes(is_paged, page_size, total_num_pages, *sizes, self._world)
        if max_ctx_len is not None and as_integer("max_ctx_len", max_ctx_len, 1) > self.max_sequence_length:
            raise InputError("max_ctx_len", f"be at most max_sequence_length ({max_sequence_length})", max_ctx_len)
        self.device = None if device is None else as_device("device", device)
        self._layers: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Drop all sequences. The memory stays allocated."""
        ledger: Slots | Pages = Slots(self.max_batch_size, self.max_sequence_length)
        if self.is_paged:
            ledger = BatchPages(self.total_num_pages, self.page_size, self.max_batch_size, self._world)
        self._batch, self._table = Batch(ledger, self.max_batch_size, self.max_sequence_length), BlockTable()
        self._set_step(None)

    @property
    def _world(self) -> int:
        return 1 if self._ranks is None else self._ranks.world

    def allocate_memory(self, layer_number: int) -> None:
        """Allocate the cache of a layer: now if the device is known, otherwise when the first keys arrive.

        Repeated calls have no effect.

        Args:
            layer_number: number of the layer, int.

        Raises:
            InputError: layer_number is not an int.
        """
        number = as_integer("layer_number", layer_number, 0)
        if self.device is not None and number not in self._storages:
            sizes = self.total_num_pages, self.page_size, self._spec, self.device
            self._storages[number] = Storage(*sizes) if self._ranks is None else self._ranks.storage(*sizes)
            self._missing_tokens.allocate(number)
            self._batch.forget_prefixes()  # the layer lacks their tokens
        self._layers.add(number)

    def has_memory(self, layer_number: int) -> bool:
        """Whether `allocate_memory` was called for a layer, or the layer has received keys.

        Args:
            layer_number: number of the layer.

        Returns:
            True or False.

        Raises:
            InputError: layer_number is not an int.
        """
        return as_integer("layer_number", layer_number) in self._layers

    @outside_of_graphs
    def pre_step(self, step_dict: Mapping[Hashable, int], *, sharded: bool = False) -> None:
        """Start an iteration, before the model runs: set the sequences of the batch and the number of their new tokens.

        Args:
            step_dict: number of new tokens (0 or more) by sequence id (any hashable), in the order of the batch. A new
                id starts a sequence; an id that is missing has ended, and its memory is freed.
            sharded: with context_parallel, whether each rank has a part of the new tokens (`shard`), as for a long
                prompt. Otherwise every rank has all of them, as for decoding.

        Raises:
            CacheFullError: there are too many sequences, or too few pages. Nothing changes.
            InputError: a sequence is too long, or an argument is wrong. Nothing changes.
        """
        if not isinstance(sharded, bool) or (sharded and self._ranks is None):
            raise InputError("sharded", "be True or False, and False without context_parallel", repr(sharded))
        step = self._batch.step(step_dict, self._storages.values(), self._start_receiving)
        length = None
        if sharded:
            length = sum(step.counts) if self.qkv_format == "thd" else max(step.counts, default=0)
        self._set_step(step, length)

    @outside_of_graphs
    def step(
        self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int, str]:
        """The caches of a layer, after its new tokens are appended. `attend` does the same and computes attention.

        A second call for the same layer and step replaces the tokens of the first.

        Args:
            layer_number: number of the layer, int. All layers are called from the first step of a sequence on.
            new_k, new_v: keys and values in qkv_format, [b, s, g, d], [s, b, g, d] or [t, g, d]. The first tokens of
                each sequence are real, as many as `pre_step` received.
            qkv_format: "bshd", "sbhd" or "thd"; the constructor's if None.

        Returns:
            (k_cache, v_cache, cu_seqlens_q, cu_seqlens_kv, max_sequence_length, format). The caches are
            [b, max_sequence_length, g, d] in the order of the batch (a copy if sequences have ended or moved); if
            paged, the pools [pages, page_size, g, d], to be read with `page_table`. format is "bshd", "sbhd_2bshd" or
            "thd_2bshd", depending on the format of the queries.

        Raises:
            InputError: tokens do not match `pre_step`, an earlier step lacked the layer, or the caches are quantised.
        """
        if self._ranks is not None:
            hint = "attend(layer_number, q, k, v) reads the pages of all ranks"
            raise InputError("context_parallel", "be None for step(), which returns the caches", "ranks", hint=hint)
        if self.quantize is not None:
            hint = "attend(layer_number, q, k, v) reads the cache in place; convert_paged_to_nonpaged gives a copy"
            raise InputError("quantize", "be None for step(), which returns the caches", repr(self.quantize), hint)
        format = self.qkv_format if qkv_format is None else checked_format(qkv_format)
        storage = self._append(layer_number, new_k, new_v, format)
        k, v = storage.k, storage.v
        if not self.is_paged:
            cached = self._cached_sequences(storage)
            k, v = cached.pools[:2] if cached.pages is None else (pool[cached.pages[:, 0]] for pool in (k, v))
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
        """Attention of a layer's new tokens over all cached tokens of their sequences, the new ones included.

        Args:
            layer_number, new_k, new_v, qkv_format: as in `step`. A second call in one step replaces the tokens of the
                first; the layers of this library refuse it.
            q: their queries, [.., h, d]; in a sharded step all three are those of this rank.
            mask: as in `KVCache.attend`, where predicate, blocks and dense count the rows of this call. None: causal.
            options: bias, scale, softcap, alibi_slopes, sinks, backend, deterministic, batch_invariant and return_lse,
                as in `undivided.attention`.

        Returns:
            The output in q's format, 0 in padding rows; with return_lse, (output, lse).

        Raises:
            InputError: the tokens do not match `pre_step`, or an argument is wrong, or differs between ranks.
            NoBackendError: no allowed backend can run the problem.
            RankError: another rank refused its arguments, or failed (with context_parallel).
        """
        layer_call = LayerCall(layer_number, q, new_k, new_v, qkv_format, mask, options)
        if self._ranks is None:
            _attend.check_options(options)
            return _attend.attend(self._call(layer_call))
        if self._sharded is not None:
            return self._attend_sharded(layer_call)
        return self._ranks.attend(lambda: self._call(layer_call))

    def _call(self, layer_call: LayerCall) -> CachedCall:
        """The call of `attend` over the cache of a layer, after its new tokens are appended."""
        layer_number, q, new_k, new_v, qkv_format, mask, options = layer_call
        format = self.qkv_format if qkv_format is None else checked_format(qkv_format)
        step = self._current_step()
        q_len = _attend.checked_query(q, format, len(step.slots), self._spec)
        storage = self._append(layer_number, new_k, new_v, format, q_len)
        counts = None if format != "thd" and step.counts.count(q_len) == len(step.counts) else step.counts
        return CachedCall(q, self._cached_sequences(storage), format, counts, mask, options)

    def _append(
        self, layer_number: int, new_k: Tensor, new_v: Tensor, format: Layout, q_len: int | None = None
    ) -> Storage:
        """The storage of a layer, after the step's tokens were written to it. q_len: the tokens that the query has."""
        step = self._current_step()
        storage = self._storages.get(layer_number) if type(layer_number) is int else None
        if storage is None:
            check_tensor("new_k", new_k)
            self._check_received(layer_number)
            if self.device is None:
                self.device = new_k.device
                self._set_step(step, self._sharded)
            self.allocate_memory(layer_number)
            storage = self._storages[layer_number]
        elif layer_number in self._missing_tokens.lacking:
            self._check_received(layer_number)
        tokens = checked_tokens(
            new_k,
            new_v,
            None,
            layout=format,
            batch=len(step.slots),
            spec=self._spec,
            device=storage.k.device,
            names=_TOKEN_NAMES,
            announced=step.counts,
        )
        if q_len is not None and tokens.k.shape[1] != q_len:
            raise InputError("q", f"have the tokens of new_k ({tokens.k.shape[1]})", q_len)
        if step.rows:
            if self._rows is None:
                self._rows = storage.rows(step.rows)
            storage.write(self._rows, tokens)
        self._missing_tokens.called.add(layer_number)
        return storage

    def _set_step(self, step: Step | None, sharded: int | None = None) -> None:
        """Set the step, and compute once what every layer needs of it. sharded: the tokens that ranks divide."""
        if step is None:
            self._start_receiving(None)
        before, counts, after = ((), (), ()) if step is None else (step.before, step.counts, step.after)
        self._sharded, self._step, self._rows, batch = sharded, step, None, self._batch
        self._sequences = None if step is None else (batch.ledger.lengths, batch.slots, batch.sequences)
        self.sequences_pre_step = OrderedDict(zip(batch.slots, before, strict=False))
        self._seqlens_pre_step = padded(before, self.max_batch_size, self.device)
        self.cu_seqlens_q = cumulative(counts, self.max_batch_size, self.device)
        self.cu_seqlens_kv = cumulative(after, self.max_batch_size, self.device)

    def _cached_sequences(self, storage: Storage) -> CachedSequences:
        step = self._current_step()
        first, count = step.slots[0], len(step.slots)
        if not self.is_paged and step.slots == tuple(range(first, first + count)):
            return CachedSequences(storage.pools.pages(first, first + count), step.after)
        evicted = self._batch.evicted_places(step.slots)
        digest = 0 if self._ranks is None else self._batch.paged_ledger("have ranks").digest()
        return CachedSequences(storage.pools, step.after, self.page_table, evicted, digest)

    @property
    def page_table(self) -> Tensor:
        """The pages of each sequence in order, int32 [b, pages of the longest]; 0 after the end of a sequence.

        Over ranks, those of this rank. If not paged, the cache row of each sequence, [b, 1].
        """
        slots = () if self._step is None else self._step.slots
        rank = 0 if self._ranks is None else self._ranks.rank
        state, device = (slots, self._batch.changes), self.device or torch.device("cpu")
        return self._table.updated(state, lambda: self._batch.tables(slots, rank), device)

    def get_seqlens_pre_step(self) -> Tensor:
        """The cached tokens of each sequence before the step, which is the position of its first new token.

        Returns:
            int32 [max_batch_size], 0 after the last sequence.
        """
        return self._seqlens_pre_step

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """A contiguous copy of the keys and values of the batch, in `dtype` also if the caches are quantised.

        Args:
            layer_number: number of the layer.

        Returns:
            (k, v), each [b, tokens, g, d]. Values after the end of a sequence are undefined.

        Raises:
            InputError: the layer has no cache, there is no step, or the pages are on several ranks.
        """
        if self._ranks is not None:
            raise InputError("context_parallel", "be None for a contiguous copy: a rank has some of the pages", "ranks")
        self._current_step()
        if as_integer("layer_number", layer_number) not in self._storages:
            raise InputError("layer_number", "be that of a layer with a cache", layer_number)
        storage = self._storages[layer_number]
        k, v = storage.gather(self.page_table)
        return k.flatten(1, 2), v.flatten(1, 2)

    def __repr__(self) -> str:
        sizes = f", total_num_pages={self.total_num_pages}, page_size={self.page_size}, free_pages={self.free_pages}"
        paged = sizes if self.is_paged else ""
        quantized = f", quantize={self.quantize!r}, memory={self.memory}" if self.quantize else ""
        return (
            f"InferenceParams(max_batch_size={self.max_batch_size}, max_sequence_length={self.max_sequence_length}, "
            f"num_heads_kv={self.num_heads_kv}, head_dim_k={self.head_dim_k}, head_dim_v={self.head_dim_v}, "
            f"dtype={self.dtype}{paged}{quantized}, sequences={dict(self.sequences)})"
        )
