"""Planners of `torch.distributed.checkpoint` for plain tensors of which each rank has a part.

Layers built with `tp_group` have such tensors. A rank's rows may come from several places of the whole, such as its
queries, keys and values in one weight, so each run of rows is a chunk. FSDP2 may have sharded the part again.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from undivided.errors import InputError
from undivided.parallel.state import Division


class TensorPart(NamedTuple):
    """Some rows or columns of a rank's tensor (a view), and where they begin in the whole tensor."""

    view: Tensor
    offsets: torch.Size

    @property
    def metadata(self) -> ChunkStorageMetadata:
        """The place of the chunk, for a plan."""
        return ChunkStorageMetadata(self.offsets, self.view.shape)


class DividedTensor:
    """A rank's part of a tensor: its chunks, and the size of the whole.

    Attributes:
        size: of the whole tensor.
        chunks: the runs of rows, or of columns, that this rank has.

    Args:
        part: a plain tensor, or a DTensor of the ranks that FSDP2 divides the part over.
        division: how tensor parallel ranks divide the whole.
    """

    def __init__(self, part: Tensor, division: Division) -> None:
        _, axis, sizes, ranks = division
        whole = list(part.shape)
        whole[axis] = sum(sizes) * ranks.size
        self.size = torch.Size(whole)
        self.chunks: list[TensorPart] = []
        local, place = _local(part)
        start, stop = place[axis], place[axis] + local.shape[axis]
        run_start = 0  # of each run, within the part of this tensor parallel rank
        for size in sizes:
            low, high = max(start, run_start), min(stop, run_start + size)
            if low < high and local.numel():
                offsets = list(place)
                offsets[axis] = run_start * ranks.size + ranks.rank * size + low - run_start
                self.chunks.append(TensorPart(local.narrow(axis, low - start, high - low), torch.Size(offsets)))
            run_start += size

    def find(self, index: MetadataIndex) -> Tensor:
        """The view of a chunk of this rank."""
        return next(chunk.view for chunk in self.chunks if chunk.offsets == index.offset)


class SavePlanner(DefaultSavePlanner):
    """Writes a rank's chunks of divided tensors, and everything else as PyTorch does.

    Args:
        divided: the divided tensors of the state, by name.
    """

    def __init__(self, divided: dict[str, DividedTensor]) -> None:
        super().__init__()
        self.divided = divided

    def create_local_plan(self) -> SavePlan:
        """The plan of what this rank writes."""
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.index.fqn not in self.divided]
        for name, tensor in self.divided.items():
            for chunk in tensor.chunks:
                data = TensorWriteData(chunk.metadata, TensorProperties.create_from_tensor(chunk.view), tensor.size)
                items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The object of an item."""
        tensor = self.divided.get(index.fqn)
        return super().lookup_object(index) if tensor is None else tensor.find(index)


class LoadPlanner(DefaultLoadPlanner):
    """Reads a rank's chunks of divided tensors in place, and everything else as PyTorch does.

    Args:
        divided: the divided tensors, by name. They are absent in the state that is loaded.
    """

    def __init__(self, divided: dict[str, DividedTensor]) -> None:
        super().__init__()
        self.divided = divided

    def create_local_plan(self) -> LoadPlan:
        """The plan of what this rank reads."""
        plan = super().create_local_plan()
        assert self.metadata is not None
        for name, tensor in self.divided.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            plan.items += create_read_items_for_chunk_list(name, saved, [chunk.metadata for chunk in tensor.chunks])
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take an entry that is not a tensor, without running code of the file as PyTorch's planner would."""
        name = read_item.dest_index.fqn
        try:
            self.original_state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise InputError("folder", "have checkpoints of tensors and plain values", f"in {name}: {error}") from error

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor of an item."""
        tensor = self.divided.get(index.fqn)
        view: Tensor = super().lookup_tensor(index) if tensor is None else tensor.find(index)
        return view


def _local(part: Tensor) -> tuple[Tensor, list[int]]:
    """The tensor in the memory of this rank, and where it begins in the part."""
    if not hasattr(part, "to_local"):
        return part.detach(), [0] * part.dim()
    sharded: Any = part
    (chunk,) = sharded.__create_chunk_list__()
    return sharded.detach().to_local(), list(chunk.offsets)
