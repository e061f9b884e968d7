"""Where `parallelize` places the parameters of the layers' blocks, as styles for PyTorch's `parallelize_module`.

PyTorch's ColwiseParallel and RowwiseParallel accept torch.nn.Linear only, and communicate by DTensor's operators. The
blocks hold several weights with TransformerEngine's names. These styles distribute them as DTensors in the same way;
the blocks compute with a rank's parts, and communicate by `TensorRanks`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from undivided.nn import DotProductAttention
from undivided.nn.arguments.formats import Heads
from undivided.nn.blocks.tensor_ranks import TensorRanks


class Replicated(ParallelStyle):
    """Every rank has the whole parameters."""

    def _apply(self, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        return distribute_module(module, mesh, self._partition)

    def _partition(self, name: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            value = distribute_tensor(parameter, mesh, [self.placement(key, mesh)])
            module.register_parameter(key, torch.nn.Parameter(value, parameter.requires_grad))

    def placement(self, name: str, mesh: DeviceMesh) -> Placement:
        """The placement of a parameter."""
        return Replicate()


class DividedHeads(Replicated):
    """Query, key and value projections: output features over ranks; too few key heads are replicated."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.heads = heads

    def placement(self, name: str, mesh: DeviceMesh) -> Placement:
        """The placement of a parameter."""
        if name.startswith("layer_norm_"):
            return Replicate()
        replicated = name.startswith(("key_", "value_")) and self.heads.kv % mesh.size()
        return Replicate() if replicated else Shard(0)


class DividedOutput(Replicated):
    """The output projection: input features over ranks, the output summed."""

    def placement(self, name: str, mesh: DeviceMesh) -> Placement:
        """The placement of a parameter."""
        return Shard(1) if name == "weight" else Replicate()


class DividedMLP(Replicated):
    """The feed-forward block: the features between its maps over ranks, the output summed."""

    def placement(self, name: str, mesh: DeviceMesh) -> Placement:
        """The placement of a parameter."""
        return {"fc1_weight": Shard(0), "fc1_bias": Shard(0), "fc2_weight": Shard(1)}.get(name, Replicate())


class DividedSinks(Replicated):
    """Learnable sinks of the attention: heads over ranks."""

    def placement(self, name: str, mesh: DeviceMesh) -> Placement:
        """The placement of a parameter."""
        return Shard(0)


class OwnScores:
    """A hook before the attention of a call: this rank's heads of the slopes, the bias and the mask of all heads."""

    def __init__(self, heads: int) -> None:
        self.heads = heads

    def __call__(
        self, module: DotProductAttention, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call, of this rank's heads."""
        axes = {"alibi_slopes": -1, "core_attention_bias": -3, "attention_mask": -3}
        ranks = module.tensor_parallel.ranks
        own = {name: self._own(options.get(name), axis, ranks) for name, axis in axes.items()}
        return args, {**options, **own}

    def _own(self, value: Any, axis: int, ranks: TensorRanks | None) -> Any:
        """The part of a tensor whose axis has all heads; anything else unchanged. Ranks have different heads, so the
        gradient is the sum over ranks."""
        if not isinstance(value, Tensor) or value.dim() < -axis or ranks is None:
            return value
        if value.requires_grad:
            value = ranks.shared(value)
        return ranks.own(value, axis) if value.shape[axis] == self.heads else value
