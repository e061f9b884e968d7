"""The parallel styles of the layers' blocks, for `parallelize_module`.

PyTorch's ColwiseParallel and RowwiseParallel accept torch.nn.Linear only. These distribute the parameters of blocks
with several weights in the same way; DTensor's operators do the arithmetic and the communication.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from undivided.nn.arguments.formats import Heads


class _Style(ParallelStyle):
    """A style that places parameters by name, the input, and the output."""

    input: Placement = Replicate()

    def _apply(self, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        return distribute_module(module, mesh, self._partition, self._enter, self._leave)

    def _partition(self, name: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            value = distribute_tensor(parameter, mesh, [self.placement(key, mesh)])
            module.register_parameter(key, torch.nn.Parameter(value, parameter.requires_grad))

    def placement(self, name: str, mesh: DeviceMesh) -> Placement:
        """The placement of a parameter."""
        return Replicate()

    def _enter(self, module: torch.nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [self.input], run_check=False), *inputs[1:]

    def _leave(self, module: torch.nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return self._local(outputs, self.input)

    def _local(self, tensor: DTensor, placement: Placement) -> Tensor:
        return tensor.redistribute(placements=[placement]).to_local()


class _SequenceStyle(_Style):
    """A style whose input is a part of the sequence, or the whole sequence if the axis is None."""

    def __init__(self, sequence: int | None) -> None:
        super().__init__()
        self.input = Replicate() if sequence is None else Shard(sequence)


class DividedHeads(_SequenceStyle):
    """Query, key and value projections: output features over ranks; too few key heads are replicated."""

    def __init__(self, heads: Heads, sequence: int | None) -> None:
        super().__init__(sequence)
        self.heads = heads

    def placement(self, name: str, mesh: DeviceMesh) -> Placement:
        """The placement of a parameter."""
        if name.startswith("layer_norm_"):
            return Replicate()
        replicated = name.startswith(("key_", "value_")) and self.heads.kv % mesh.size()
        return Replicate() if replicated else Shard(0)

    def _leave(self, module: torch.nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        parts, x = outputs
        return tuple(self._own_heads(part, mesh) for part in parts), self._local(x, self.input)

    def _own_heads(self, part: DTensor, mesh: DeviceMesh) -> Tensor:
        """This rank's features of a part."""
        if not part.placements[0].is_replicate():
            return self._local(part, Shard(part.ndim - 1))
        # every rank uses one head of the replicated ones, so the gradient is the sum over ranks
        whole = part.to_local(grad_placements=[Partial()])
        head = mesh.get_local_rank() * self.heads.kv // mesh.size()
        size = whole.shape[-1] // self.heads.kv
        return whole.narrow(-1, head * size, size)


class DividedOutput(_SequenceStyle):
    """The output projection: input features over ranks, the output summed."""

    def placement(self, name: str, mesh: DeviceMesh) -> Placement:
        """The placement of a parameter."""
        return Shard(1) if name == "weight" else Replicate()

    def _enter(self, module: torch.nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        x = inputs[0]
        return DTensor.from_local(x, mesh, [Shard(x.ndim - 1)], run_check=False), *inputs[1:]

    def _leave(self, module: torch.nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        (out,), x = outputs
        return (self._local(out, self.input),), x


class DividedMLP(_SequenceStyle):
    """The feed-forward block: the features between its maps over ranks, the output summed."""

    def placement(self, name: str, mesh: DeviceMesh) -> Placement:
        """The placement of a parameter."""
        return {"fc1_weight": Shard(0), "fc1_bias": Shard(0), "fc2_weight": Shard(1)}.get(name, Replicate())

    def _leave(self, module: torch.nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(self._local(tensor, self.input) for tensor in outputs)


class SequenceNorm(_SequenceStyle):
    """A normalisation of a part of the sequence, whose parameters are replicated."""


class HeadNorm(_Style):
    """A normalisation of each head, whose parameters are replicated: ranks have different heads."""

    def _enter(self, module: torch.nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        x = inputs[0]
        return (DTensor.from_local(x, mesh, [Shard(x.ndim - 2)], run_check=False),)

    def _leave(self, module: torch.nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return self._local(outputs, Shard(outputs.ndim - 2))


class DividedSinks(_Style):
    """Learnable sinks of the attention, which takes and returns plain tensors: heads over ranks."""

    def _apply(self, module: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
        return distribute_module(module, mesh, self._partition)

    def placement(self, name: str, mesh: DeviceMesh) -> Placement:
        """The placement of a parameter."""
        return Shard(0)


class OwnScores:
    """A hook before the attention of a call: this rank's heads of the slopes, the bias and the mask of all heads."""

    def __init__(self, mesh: DeviceMesh, heads: int) -> None:
        self.mesh, self.heads = mesh, heads

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call, of this rank's heads."""
        own = {
            "alibi_slopes": self._own(options.get("alibi_slopes"), -1),
            "core_attention_bias": self._own(options.get("core_attention_bias"), -3),
            "attention_mask": self._own(options.get("attention_mask"), -3),
        }
        return args, {**options, **own}

    def _own(self, value: Any, axis: int) -> Any:
        """The part of a tensor whose axis has all heads; anything else as it is. Ranks have different heads, so the
        gradient is the sum over ranks."""
        if not isinstance(value, Tensor) or value.dim() < -axis:
            return value
        if value.requires_grad:
            shared = DTensor.from_local(value, self.mesh, [Replicate()], run_check=False)
            value = shared.to_local(grad_placements=[Partial()])
        if value.shape[axis] != self.heads:
            return value
        count = self.heads // self.mesh.size()
        return value.narrow(axis, self.mesh.get_local_rank() * count, count)
