"""`shard_batch`: one rank's part of a batch, and what the ranks must know of the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from undivided import masks
from undivided.arguments.signature import checked_call
from undivided.context_parallel import ContextParallel
from undivided.context_parallel._schedule import Strategy
from undivided.context_parallel.exchange.collectives import Communicator, ProcessGroup, SingleRank
from undivided.context_parallel.exchange.groups import group_of
from undivided.context_parallel.exchange.handshake import SharedArguments, digest, prepare_on_all_ranks
from undivided.context_parallel.sharding import PlacementName
from undivided.errors import InputError
from undivided.integrations.transformers._patterns import Packed
from undivided.integrations.transformers.parallel._axes import checked_mesh, size
from undivided.integrations.transformers.parallel._shard import SequenceShard

IGNORED = -100
"""The label that has no loss, in all models of transformers."""
DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
PER_TOKEN = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels")
INTEGERS = ("input_ids", "position_ids", "labels", "shift_labels")
KEYS = (*PER_TOKEN, *DOCUMENTS, "num_items_in_batch")
"""The entries of a batch that can be divided."""


class _WholeBatch(NamedTuple):
    """A checked batch of all tokens; labels are those of the next tokens."""

    tokens_name: str
    tokens: Tensor
    positions: Tensor
    labels: Tensor | None
    padding: Tensor | None
    packed: Packed | None
    offsets: Tensor | None


@checked_call
def shard_batch(
    batch: Mapping[str, Any],
    ranks: DeviceMesh | ContextParallel,
    strategy: Strategy | None = None,
    placement: PlacementName | None = None,
) -> dict[str, Any]:
    """This rank's part of a batch, for a model that `parallelize` changed: ``model(**shard_batch(batch, mesh))``.

    Labels are shifted before they are divided, so that none is lost between ranks. The loss of the model is then this
    rank's share: the sum over its labels, divided by the number of labels of all ranks. The shares of the context and
    data ranks add up to the loss of one process, and so do their gradients.

    Args:
        batch: as for the model on one process, the same on all context and tensor ranks: ``input_ids`` or
            ``inputs_embeds``, and ``attention_mask`` ``[B, S]``, ``position_ids``, ``labels`` (or ``shift_labels``),
            ``cu_seq_lens_q`` and its companions. Packed documents are given as for one process: by positions that
            restart, without an attention mask, or by cumulative lengths. ``num_items_in_batch``, the number of labels
            that the loss is divided by, is counted over the ranks of the axis "data" if it is absent; give the number
            of all batches whose gradients are accumulated.
        ranks: a mesh with the axis "context"; or a `ContextParallel`.
        strategy, placement: as for `undivided.ContextParallel`, of a mesh. None is "ring" and "zigzag".

    Returns:
        The arguments of the model. The entry ``shard`` is a `SequenceShard`; it is absent on a single context rank.

    Raises:
        InputError: an entry is unknown, has the wrong shape or differs between the ranks, there are fewer tokens than
            ranks, or there is no label.
        RankError: another rank refused its batch, or failed.

    >>> import torch, undivided
    >>> part = shard_batch({"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]},
    ...                    undivided.ContextParallel(rank=0, world=2))
    >>> part["input_ids"].tolist(), part["labels"].tolist(), part["num_items_in_batch"]
    ([[0, 1, 6, 7]], [[1, 2, 7, -100]], 7)
    """
    mesh = None if isinstance(ranks, ContextParallel) else checked_mesh(ranks)
    context, axes = _context(ranks, mesh, strategy, placement)
    whole = prepare_on_all_ranks(axes or (), axes is not None, lambda: _checked_batch(batch, context.world))
    result: dict[str, Any] = {"use_cache": False}
    if whole.labels is not None:
        count = batch.get("num_items_in_batch")
        result["num_items_in_batch"] = _label_count(whole.labels, mesh) if count is None else count
    if context.world == 1:
        unchanged = ("attention_mask", "position_ids", *DOCUMENTS)
        result |= {name: batch[name] for name in unchanged if batch.get(name) is not None}
        return result | _parts(whole, None)
    shard = _shard(whole, context)
    return result | _parts(whole, shard.context) | {"shard": shard}


def _parts(whole: _WholeBatch, context: ContextParallel | None) -> dict[str, Tensor]:
    """This rank's tensors; without a context, the tokens and the shifted labels of the whole batch."""
    tensors = {whole.tokens_name: whole.tokens}
    if whole.labels is not None:
        tensors |= {"labels": whole.labels, "shift_labels": whole.labels}
    if context is None:
        return tensors
    tensors["position_ids"] = whole.positions
    return {name: context.shard(tensor, dim=1) for name, tensor in tensors.items()}


def _context(
    ranks: object, mesh: DeviceMesh | None, strategy: Strategy | None, placement: PlacementName | None
) -> tuple[ContextParallel, tuple[Communicator, Communicator] | None]:
    """The ranks of the sequence, and the axes of all ranks that have the same batch (None if there is no group)."""
    if mesh is None:
        assert isinstance(ranks, ContextParallel)
        for name, value in (("strategy", strategy), ("placement", placement)):
            if value is not None:
                raise InputError(name, "be None with a ContextParallel, which has its own", repr(value))
        return ranks, ranks._axes
    strategy, placement = strategy or "ring", placement or "zigzag"
    axes = [
        ProcessGroup(group_of(mesh, axis)) if size(mesh, axis) > 1 else SingleRank() for axis in ("context", "tensor")
    ]
    if size(mesh, "context") == 1:
        return ContextParallel(None, strategy, placement, rank=0, world=1), (axes[0], axes[1])
    return ContextParallel(group_of(mesh, "context"), strategy, placement), (axes[0], axes[1])


def _checked_batch(batch: Mapping[str, Any], world: int) -> tuple[_WholeBatch, SharedArguments]:
    """The batch, and the values that must be the same on all ranks."""
    if not isinstance(batch, Mapping):
        raise InputError("batch", "be a mapping of names to tensors", type(batch).__name__)
    entries = {name: value for name, value in batch.items() if value is not None}
    if unknown := sorted(entries.keys() - set(KEYS)):
        hint = "leave out what the model does not need; other entries cannot be divided"
        raise InputError("batch", f"have only the entries {', '.join(KEYS)}", ", ".join(unknown), hint=hint)
    tokens_name = _tokens_name(entries)
    tokens = entries[tokens_name]
    for name in PER_TOKEN:
        if name in entries:
            _check_shape(name, entries[name], tokens)
    if tokens.is_meta:
        raise InputError(tokens_name, "have values, which all ranks compare", "a tensor on meta")
    length = tokens.shape[1]
    if length < world:
        raise InputError(tokens_name, f"have at least one token for each of the {world} context ranks", length)
    positions = entries.get("position_ids")
    offsets = _checked_offsets(entries, tokens)
    real = entries.get("attention_mask")
    packed = None if positions is None or real is not None or offsets is not None else _documents(positions, tokens)
    if positions is None:
        positions = torch.arange(length, device=tokens.device)[None]
    padding = None if real is None or bool(real.bool().all()) else real.bool()
    whole = _WholeBatch(tokens_name, tokens, positions, _next_labels(entries), padding, packed, offsets)
    shared = {name: f"{list(v.shape)} {v.dtype} {digest(v):x}" for name, v in entries.items() if isinstance(v, Tensor)}
    if "num_items_in_batch" in entries:
        shared["num_items_in_batch"] = f"{_checked_count(entries['num_items_in_batch']):g}"
    return whole, {name: shared.get(name) for name in (*PER_TOKEN, "cu_seq_lens_q", "num_items_in_batch")}


def _tokens_name(entries: dict[str, Any]) -> str:
    """The entry that has the tokens."""
    names = [name for name in ("input_ids", "inputs_embeds") if name in entries]
    if len(names) != 1:
        raise InputError("batch", "have either input_ids or inputs_embeds", " and ".join(names) or "neither")
    return names[0]


def _check_shape(name: str, value: object, tokens: object) -> None:
    """Raise InputError unless an entry has one value for each token."""
    axes = 3 if name == "inputs_embeds" else 2
    if not isinstance(value, Tensor) or value.dim() != axes:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(name, f"be a tensor [B, S{', hidden' if axes == 3 else ''}]", got)
    assert isinstance(tokens, Tensor)
    if value.device != tokens.device:
        raise InputError(name, f"be on the device of the tokens ({tokens.device})", value.device)
    batch, length = tokens.shape[:2]
    if name in INTEGERS and (value.is_floating_point() or value.is_complex()):
        raise InputError(name, "have an integer dtype", value.dtype)
    one_row = name == "position_ids" and value.shape[0] == 1
    if value.shape[1] != length or (value.shape[0] != batch and not one_row):
        raise InputError(name, f"have the {batch} x {length} tokens of the batch", list(value.shape))


def _checked_offsets(entries: dict[str, Any], tokens: Tensor) -> Tensor | None:
    """The cumulative lengths of the documents, int ``[documents + 1]``."""
    offsets, keys = entries.get("cu_seq_lens_q"), entries.get("cu_seq_lens_k")
    if offsets is None:
        if others := [name for name in DOCUMENTS if name in entries]:
            raise InputError("cu_seq_lens_q", f"be given with {others[0]}", "None")
        return None
    if "attention_mask" in entries:
        raise InputError("attention_mask", "be None if documents are packed", "a tensor")
    for name, value in (("cu_seq_lens_q", offsets), ("cu_seq_lens_k", keys)):
        if value is not None and not (isinstance(value, Tensor) and value.dim() == 1 and value.numel() > 1):
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(name, "be a tensor [documents + 1]", got)
        if value is not None and value.device not in (tokens.device, torch.device("cpu")):
            raise InputError(name, f"be on the device of the tokens ({tokens.device}) or on the CPU", value.device)
    assert isinstance(offsets, Tensor)
    if tokens.shape[0] != 1:
        raise InputError(_tokens_name(entries), "have one row if cu_seq_lens_q is given", tokens.shape[0])
    if int(offsets[0]) != 0 or int(offsets[-1]) != tokens.shape[1]:
        raise InputError("cu_seq_lens_q", f"go from 0 to the {tokens.shape[1]} tokens", offsets.tolist())
    if keys is not None and not torch.equal(keys.to(offsets), offsets):
        raise InputError("cu_seq_lens_k", "equal cu_seq_lens_q", keys.tolist())
    return offsets


def _documents(positions: Tensor, tokens: Tensor) -> Packed | None:
    """The documents of positions that restart, as transformers reads them; None if there is one per sequence."""
    positions = positions.expand(tokens.shape[0], -1)
    ids = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    return Packed(ids, positions) if bool(ids[:, -1].any()) else None


def _next_labels(entries: dict[str, Any]) -> Tensor | None:
    """The label of the next token, for each token."""
    if "shift_labels" in entries:
        shifted: Tensor = entries["shift_labels"]
        return shifted
    if "labels" not in entries:
        return None
    return torch.nn.functional.pad(entries["labels"][:, 1:], (0, 1), value=IGNORED)


def _label_count(labels: Tensor, mesh: DeviceMesh | None) -> int:
    """The number of labels of all data ranks."""
    count = (labels != IGNORED).sum()
    if mesh is not None and size(mesh, "data") > 1:
        counts = ProcessGroup(group_of(mesh, "data")).gather(count.cpu()[None], "the count of labels of data ranks")
        count = torch.cat(counts).sum()
    if not int(count):
        raise InputError("labels", f"have a label other than {IGNORED}", "none")
    return int(count)


def _checked_count(count: Any) -> float:
    """The number of labels that a caller gave."""
    is_number = isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1)
    if not is_number or not float(count) > 0:
        raise InputError("num_items_in_batch", "be a positive number of labels", repr(count))
    return float(count)


def _shard(whole: _WholeBatch, context: ContextParallel) -> SequenceShard:
    tokens = whole.tokens
    batch, length = tokens.shape[:2]
    mask = masks.causal()
    offsets = whole.offsets
    if offsets is None and whole.packed is not None and batch == 1:
        begins = whole.packed.ids[0].diff().nonzero().flatten() + 1
        offsets = torch.cat((begins.new_tensor([0]), begins, begins.new_tensor([length])))
    if offsets is not None:
        mask = mask & masks.documents(offsets.to(torch.int32).cpu())
    bound = context.bind(length, mask=mask)
    return SequenceShard(bound, batch, length, tokens.device, whole.padding, whole.packed, whole.offsets)
