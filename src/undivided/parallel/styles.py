"""Where `parallelize` places the parameters of the layers' blocks, as styles for PyTorch's `parallelize_module`.

PyTorch's ColwiseParallel and RowwiseParallel accept torch.nn.Linear only, and communicate by DTensor's operators. The
blocks hold several weights with TransformerEngine's names. `DividedParameters` distributes them as DTensors in the same
way; the blocks compute with a rank's parts, and communicate by `TensorRanks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from undivided.nn import DotProductAttention
from undivided.nn.blocks.linear import Linear
from undivided.nn.blocks.tensor_ranks import TensorRanks


class DividedParameters(ParallelStyle):
    """A style that makes the parameters of a block DTensors: those with a placement are divided, the others are not."""

    def __init__(self, placements: Mapping[str, Placement]) -> None:
        super().__init__()
        self.placements = placements

    def _apply(self, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        return distribute_module(module, mesh, self._partition)

    def _partition(self, name: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            value = distribute_tensor(parameter, mesh, [self.placements.get(key, Replicate())])
            module.register_parameter(key, torch.nn.Parameter(value, parameter.requires_grad))


REPLICATED = DividedParameters({})
"""Every rank has all parameters whole."""
OUTPUT = DividedParameters({"weight": Shard(1)})
"""The output projection: its input features are divided, and the output is summed."""
MLP = DividedParameters({"fc1_weight": Shard(0), "fc1_bias": Shard(0), "fc2_weight": Shard(1)})
"""The feed-forward block: the features between its maps are divided, and the output is summed."""
SINKS = DividedParameters({"softmax_offset": Shard(0)})
"""The attention: the heads of learnable sinks are divided."""


def heads_style(projection: Linear, kv_heads: int, ranks: int) -> DividedParameters:
    """The style of a projection to queries, keys and values: output features are divided.

    Those of keys and values are not if the number of ranks does not divide the number of key heads.
    """
    whole = ("layer_norm_", "key_", "value_") if kv_heads % ranks else ("layer_norm_",)
    return DividedParameters(
        {name: Shard(0) for name, _ in projection.named_parameters() if not name.startswith(whole)}
    )


class OwnScores:
    """A hook before an attention that keeps only this rank's heads of a call's slopes, bias and mask.

    heads: the number of heads of all ranks.
    """

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
