"""`LayerCaches`: the caches of all layers, and what starts, shortens or ends sequences between two steps."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from undivided.arguments.checks import as_integer, listed
from undivided.arguments.graphs import outside_of_graphs
from undivided.arguments.tensors import is_traced, versions
from undivided.cache._checks import checked_token_ids
from undivided.cache._ledger import eviction
from undivided.cache._ledger.compaction import Compaction
from undivided.cache._ledger.missing_tokens import MissingTokens
from undivided.cache._ledger.pages import Pages
from undivided.cache._ledger.slots import Slots
from undivided.cache._ranks import PageRanks, compact_on_all_ranks
from undivided.cache._storage import Memory, Storage, TokenSpec
from undivided.errors import InputError
from undivided.masks import Mask

if TYPE_CHECKING:
    from undivided.cache._batch import Batch, Step

T = TypeVar("T")


class StepNotes(NamedTuple):
    """What layers note of a step.

    Args:
        callers: the id of the layer that has called, by its number.
        computed: what they share, by key: the tensor from which it was computed, its `versions` then, and the value.
    """

    callers: dict[int, int]
    computed: dict[Hashable, tuple[Tensor, object, Any]]


class LayerCaches(ABC):
    """The caches of all layers, and the operations that start, shorten or end sequences between two steps."""

    _batch: Batch
    _ranks: PageRanks | None
    _step: Step | None
    _sequences: tuple[object, object, OrderedDict[Hashable, int]] | None = None
    """`sequences` when they were last read, after the lengths and the slots, of which a change replaces one."""
    _noted: tuple[Step | None, StepNotes] | None = None  # the last step that layers have called, and their notes

    def __init__(self, spec: TokenSpec) -> None:
        self._spec = spec
        self._storages: dict[int, Storage] = {}
        self._missing_tokens = MissingTokens()

    @property
    def num_heads_kv(self) -> int:
        """Key/value heads in this process; with a mesh, those of this rank."""
        return self._spec.kv_heads

    @property
    def head_dim_k(self) -> int:
        """Head size of queries and keys."""
        return self._spec.head_dim

    @property
    def head_dim_v(self) -> int:
        """Head size of values."""
        return self._spec.value_dim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the new keys and values, and of the queries."""
        return self._spec.dtype

    @property
    def quantize(self) -> str | None:
        """The format of the cached keys and values, or None."""
        return self._spec.format

    @property
    def memory(self) -> Memory:
        """The bytes of the caches that are allocated, and those of the same caches in bfloat16; `print` shows them."""
        by_layer = [storage.memory for storage in self._storages.values()]
        return Memory(*map(sum, zip((0, 0, 0), *by_layer, strict=True)))

    @property
    def batch_size(self) -> int:
        """The number of sequences in the step."""
        return 0 if self._step is None else len(self._step.slots)

    @property
    def free_pages(self) -> int | None:
        """The number of pages that no sequence uses; over ranks, of the rank with the fewest. None if not paged."""
        ledger = self._batch.ledger
        return min(ledger.free_pages) if isinstance(ledger, Pages) else None

    @property
    def sequences(self) -> OrderedDict[Hashable, int]:
        """The cached tokens of each sequence, those of the step included, in the order of the batch."""
        lengths, slots, read = self._batch.ledger.lengths, self._batch.slots, self._sequences
        if read is None or read[0] is not lengths or read[1] is not slots:
            read = self._sequences = lengths, slots, self._batch.sequences
        return read[2]

    @abstractmethod
    def _set_step(self, step: Step | None) -> None:
        """Set the step; None: `pre_step` must follow."""

    def _current_step(self) -> Step:
        """The step; InputError if there is none."""
        if self._step is None or not self._step.slots:
            got = "no step" if self._step is None else "a step without sequences, pre_step({})"
            hint = "inference_params.pre_step(OrderedDict(zip(seq_ids, new_tokens)))"
            raise InputError("inference_params", "have a step with sequences before the model runs", got, hint=hint)
        return self._step

    def _start_receiving(self, step: Step | None) -> None:
        """End the last step, and note which layers it has not called. step: the next one."""
        new, lengths = {}, self._batch.ledger.lengths
        if step is not None:
            before = dict(zip(step.slots, step.before, strict=True))
            new = {slot: before[slot] for slot, count in zip(step.slots, step.counts, strict=True) if count}
            lengths = tuple([before.get(slot, 0) for slot in range(len(lengths))])
        self._step = None
        self._missing_tokens.start(self._storages, new, lengths)

    def _check_received(self, layer_number: int) -> None:
        """InputError if a layer lacks tokens of earlier steps."""
        number, hint = as_integer("layer_number", layer_number, 0), "call every layer in every step"
        if number in self._storages:
            missing = self._missing_tokens.lacking.get(number)
            if not missing:
                return
            slot, first = next(iter(missing.items()))
            name = next(name for name, own in self._batch.slots.items() if own == slot)
            got = f"{number}, which lacks the token at position {first} of {name!r}"
            hint += f", or truncate({name!r}, {first}) and compute these tokens again"
        elif any(self._current_step().before):
            got = f"{number}, which received none"
            layers = [str(layer) for layer in self._storages]
            hint += f"; layers with tokens: {listed(layers)}" if layers else ", before the next pre_step"
        else:
            return
        must = "be that of a layer that received all earlier tokens of the step's sequences"
        raise InputError("layer_number", must, got, hint)

    @outside_of_graphs
    def remember(self, tokens: Sequence[int] | Tensor, seq_id: Hashable) -> None:
        """Index the full pages of a sequence by the tokens they hold, so that `match` finds them.

        Call it after all layers have received the tokens. The pages stay after the sequence has ended; the least
        recently used ones are given up when the pool needs pages.

        Args:
            tokens: token ids of the sequence from its start, at most as many as are cached: a list of ints or an int
                tensor [n]. Two sequences with equal tokens must have equal keys and values in every layer.
            seq_id: id of a sequence in the batch.

        Raises:
            InputError: not paged, the sequence does not exist or has fewer tokens, or a layer lacks some of them.
                Nothing changes.

        >>> import torch, undivided
        >>> params = undivided.InferenceParams(4, 64, 1, 8, torch.float32, is_paged=True, page_size=4)
        >>> params.pre_step({"a": 6})
        >>> out = params.attend(1, *(torch.randn(1, 6, 1, 8) for _ in range(3)))
        >>> params.remember([5, 3, 8, 8, 1, 2], "a")
        >>> params.match([5, 3, 8, 8, 9], "b")                      # "b" needs to compute the last token only
        4
        >>> params.pre_step({"b": 1})                               # "a" has ended
        >>> dict(params.sequences)
        {'b': 5}
        """
        complete = functools.partial(self._missing_tokens.complete, self._storages)
        self._batch.remember(checked_token_ids(tokens), seq_id, complete)

    @outside_of_graphs
    def match(self, tokens: Sequence[int] | Tensor, seq_id: Hashable) -> int:
        """The number of a prompt's first tokens that the cache has; a new sequence starts with them, between two steps.

        Only full pages match, and never the last token of the prompt: its query computes the first new token. Pass the
        number of the other tokens to the next `pre_step`; the sequence ends if that lacks its id.

        Args:
            tokens: token ids of the prompt, as for `remember`.
            seq_id: a new id.

        Returns:
            The number of tokens that the cache has already, a multiple of the page size, or 0.

        Raises:
            InputError: not paged, the id exists, or there are max_batch_size sequences. Nothing changes.

        Source: Kwon et al. 2023 (arXiv:2309.06180), shared prefixes of PagedAttention.

        >>> import torch, undivided
        >>> params = undivided.InferenceParams(4, 64, 1, 8, torch.float32, is_paged=True, page_size=4)
        >>> params.match([5, 3, 8, 8, 9], "a")
        0
        """
        count = self._batch.match(checked_token_ids(tokens), seq_id)
        self._set_step(None)
        return count

    def fork(self, src: Hashable, dst: Hashable) -> None:
        """Start sequence dst as a copy of src, between two steps. Pages are shared until one of the two changes.

        Args:
            src: id of a sequence in the batch.
            dst: a new id.

        Raises:
            InputError: src does not exist, dst exists, or there are max_batch_size sequences. Nothing changes.
        """
        self._batch.fork(src, dst, self._storages.values())
        self._set_step(None)
        self._missing_tokens.fork(self._batch.slots[src], self._batch.slots[dst])

    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Drop the last tokens of a sequence, between two steps, for example after a rejected draft.

        Args:
            seq_id: id of the sequence.
            length: number of tokens that remain, int.

        Raises:
            InputError: the sequence does not exist, or has fewer tokens. Nothing changes.
        """
        self._batch.truncate(seq_id, length)
        self._set_step(None)

    def free(self, seq_id: Hashable) -> None:
        """End a sequence between two steps, for example to start another with `match` or `fork` in its place.

        A sequence that is missing from `pre_step` ends there, too.

        Args:
            seq_id: id of the sequence.

        Raises:
            InputError: the sequence does not exist.
        """
        self._batch.free(seq_id)
        self._set_step(None)

    def evict(self, mask: Mask) -> int:
        """As `PagedKVCache.evict`, between two steps.

        Args:
            mask: the mask of all layers, or one that allows at least what the mask of each allows. Tensors per
                sequence, such as that of a prefix, are in the order of `sequences`.

        Returns:
            The number of released pages, counted for each sequence.

        Raises:
            InputError: not paged, or not such a mask.
        """
        ledger = self._batch.paged_ledger("evict pages")
        released = eviction.evict(ledger, mask, tuple(self._batch.slots.values()))
        self._set_step(None)
        return released

    def keep(self, indices: Mapping[Hashable, Sequence[int]]) -> None:
        """Keep some of the step's new tokens, after the model ran, for example the accepted path of a draft tree.

        Args:
            indices: which of its new tokens stay, by sequence id: ascending ints, from 0; the others are dropped. A
                sequence that is missing keeps all.

        Raises:
            InputError: there is no step, a sequence is not in it, or an index is wrong. Nothing changes.
        """

        def compaction() -> Compaction[Slots | Pages]:
            counts = dict(zip(self._batch.slots, self._current_step().counts, strict=False))
            return self._batch.compaction(indices, counts)

        kept = compact_on_all_ranks(self._ranks, compaction)
        writes = kept.read(self._storages.values())
        self._step = None
        self._batch.ledger = kept.ledger
        kept.write(writes)
        self._set_step(None)


def check_caller(params: LayerCaches, layer_number: int, layer: object) -> None:
    """Raise InputError if a layer has called the step with this number: its tokens would be replaced.

    Args:
        params: the caches.
        layer_number: number of the layer.
        layer: the layer.
    """
    caller = _step_notes(params).callers.get(layer_number)
    if caller is None:
        return
    if caller == id(layer):
        hint = "pre_step(...) before each run of the model; truncate(seq_id, length) first to repeat a run"
        got = f"a second call of layer {layer_number} in one step"
        raise InputError("inference_params", "have a step for each run of the model", got, hint=hint)
    got = f"{layer_number} from two layers"
    hint = "layer_number=1 at construction, 2 for the next layer; another model has an InferenceParams of its own"
    raise InputError("layer_number", "be that of one layer: its cache has the keys of one", got, hint=hint)


def note_caller(params: LayerCaches, layer_number: int, layer: object) -> None:
    """Note that a layer's call has succeeded, for `check_caller`. A call that failed may be repeated."""
    _step_notes(params).callers[layer_number] = id(layer)


def once_per_step(params: LayerCaches, key: Hashable, tensor: Tensor, compute: Callable[[], T]) -> T:
    """``compute()``, the same object for all layers of a step that ask for this key with this tensor, unchanged.

    Args:
        params: the caches.
        key: what the value depends on besides the tensor and the step.
        tensor: from which it is computed.
        compute: without arguments.
    """
    contents = None if is_traced() or tensor.requires_grad else versions((tensor,))
    if contents is None:
        return compute()
    computed, key = _step_notes(params).computed, (key, id(tensor))
    kept = computed.get(key)
    if kept is None or kept[0] is not tensor or kept[1] != contents:  # copies of the caches have other tensors
        kept = computed[key] = tensor, contents, compute()
    shared: T = kept[2]
    return shared


def _step_notes(params: LayerCaches) -> StepNotes:
    """What layers have noted of the current step."""
    step = params._current_step()
    if params._noted is None or params._noted[0] is not step:
        params._noted = step, StepNotes({}, {})
    return params._noted[1]
