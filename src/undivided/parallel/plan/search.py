"""The meshes of a cluster: what each sends, holds and takes, and the best one.

A mesh is (data, context, tensor), the tensor axis innermost: its ranks are on one node. Parameters are shared by the
data and context ranks together (FSDP2), the sequence by the context ranks, and heads and features by the tensor ranks.
There is no pipeline axis. Bytes equal those of runs (`traffic`); memory and time are estimates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from undivided.arguments.checks import check_type, checked_choice, checked_flag
from undivided.context_parallel._schedule import STRATEGIES, Strategy
from undivided.context_parallel.plan import Option, mesh_shape
from undivided.context_parallel.plan import plan as plan_attention
from undivided.context_parallel.sharding import PLACEMENTS, PlacementName
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.parallel.plan import memory as _memory
from undivided.parallel.plan import traffic as _traffic
from undivided.parallel.plan.cluster import Cluster
from undivided.parallel.plan.memory import Bytes
from undivided.parallel.plan.model import Model, check_count
from undivided.request.flops import forward_flops, training_flops

__all__ = ["Axis", "MeshOption", "TrainingPlan", "plan_training"]

_GRADIENT_BYTES = 4
"""Gradients are reduced in fp32."""
_RECOMPUTE_FACTOR = 1 + forward_flops(1, 1, 1) / training_flops(1, 1, 1)
"""How much longer attention takes with a second forward pass; queries and values of a model have one head size."""
MAX_CONTEXT, MAX_LENGTH = 1024, 1 << 24
"""Most context ranks and tokens: counting keys between all pairs of more ranks takes minutes."""


@dataclass(frozen=True)
class Axis:
    """What one axis of a mesh costs a rank in one step.

    name: "data" (with context: the ranks that share parameters), "context" or "tensor". size: number of ranks.
    sent: bytes that a rank sends. network: the part of them that crosses the network. seconds: of sending them.
    """

    name: str
    size: int
    sent: float
    network: float
    seconds: float


@dataclass(frozen=True)
class MeshOption:
    """One mesh.

    Attributes:
        data, context, tensor: the sizes of the axes.
        recompute: whether activations are recomputed in the backward pass.
        strategy, placement: of context parallelism; "" on one context rank.
        micro_batches: batches of one sequence whose gradients a rank adds up in a step.
        axes: the costs of each axis.
        memory: bytes of a rank.
        longest: tokens of the longest sequence that fits, 0 if none does.
        seconds: estimated time of a step.
        fits: whether the memory suffices.
    """

    data: int
    context: int
    tensor: int
    recompute: bool
    strategy: str
    placement: str
    micro_batches: int
    axes: tuple[Axis, ...]
    memory: Bytes
    longest: int
    seconds: float
    fits: bool

    @property
    def mesh(self) -> str:
        """The sizes of the axes, data x context x tensor."""
        return f"{self.data}x{self.context}x{self.tensor}"

    @property
    def network(self) -> float:
        """Bytes that a rank sends over the network."""
        return sum(axis.network for axis in self.axes)

    @property
    def intra(self) -> float:
        """Bytes that a rank sends within its node."""
        return sum(axis.sent - axis.network for axis in self.axes)


@dataclass(frozen=True)
class TrainingPlan:
    """All meshes, those that fit first, the fastest of them first.

    Attributes:
        options: the meshes, best first.
        model, cluster: what they are for.
        seq_len, batch: tokens per sequence, and sequences per step.
    """

    options: tuple[MeshOption, ...]
    model: Model
    cluster: Cluster
    seq_len: int
    batch: int

    @property
    def best(self) -> MeshOption | None:
        """The fastest mesh that fits; None if none does."""
        return self.options[0] if self.options[0].fits else None

    @property
    def longest(self) -> MeshOption:
        """The mesh with the longest sequence."""
        return max(self.options, key=lambda option: (option.longest, -option.seconds))

    @property
    def smallest(self) -> MeshOption:
        """The mesh that needs the least memory."""
        return min(self.options, key=lambda option: option.memory.total)


def plan_training(
    model: Model,
    cluster: Cluster,
    seq_len: int = 8192,
    batch: int | None = None,
    mask: Mask | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    recompute: bool | None = None,
    data: int | None = None,
    context: int | None = None,
    tensor: int | None = None,
    strategy: Strategy | None = None,
    placement: PlacementName = "zigzag",
) -> TrainingPlan:
    """The `TrainingPlan` of a model on a cluster: the bytes per link, the memory and the time of every mesh.

    Args:
        model: sizes; `PRESETS` has some.
        cluster: nodes, links and memory.
        seq_len: tokens per sequence.
        batch: sequences of one step, over all ranks; None is one per GPU.
        mask: of a sequence; None is every pair. Use ``masks.causal()`` for a language model.
        dtype: of hidden states and gathered parameters. Parameters, gradients and Adam's moments are kept in fp32.
        recompute: whether activations are recomputed; None tries both.
        data, context, tensor: only meshes with this size of the axis; None is every size.
        strategy, placement: of context parallelism, as for `ContextParallel`; None is the fastest strategy.

    Returns:
        A `TrainingPlan`. Sequence parallelism is on wherever the tensor axis has more than one rank.

    Raises:
        InputError: a size is wrong, or no mesh divides the ranks, the heads, the features and the batch.

    Source: the functions in `traffic` and `memory` name theirs.

    >>> from undivided import masks
    >>> from undivided.parallel.plan.model import PRESETS
    >>> plan = plan_training(PRESETS["8b"], Cluster(1, 8), 4096, mask=masks.causal())
    >>> plan.best.mesh, plan.best.memory.total < 74e9
    ('8x1x1', True)
    """
    check_type("model", model, Model, "an undivided.parallel.plan.Model")
    check_type("cluster", cluster, Cluster, "an undivided.parallel.plan.Cluster")
    check_type("dtype", dtype, torch.dtype, "a torch.dtype")
    if recompute is not None:
        checked_flag("recompute", recompute)
    if strategy is not None:
        checked_choice("strategy", strategy, STRATEGIES)
    checked_choice("placement", placement, PLACEMENTS)
    sequences = cluster.ranks if batch is None else batch
    for name, number, largest in (("seq_len", seq_len, MAX_LENGTH), ("batch", sequences, 1 << 32)):
        check_count(name, number, largest)
    requested = {"data": data, "context": context, "tensor": tensor}
    for name, value in requested.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(name, "be a positive integer or None", repr(value))
    planner = _Planner(model, cluster, seq_len, sequences, mask, dtype, strategy, placement)
    meshes = [
        mesh
        for mesh in planner.meshes()
        if all(value is None or value == size for value, size in zip(requested.values(), mesh, strict=True))
    ]
    if not meshes:
        planner.refuse({name: value for name, value in requested.items() if value is not None})
    choices = (False, True) if recompute is None else (recompute,)
    options = [planner.option(*mesh, recomputes) for mesh in meshes for recomputes in choices]
    options.sort(key=lambda o: (not o.fits, o.seconds if o.fits else o.memory.total, o.memory.total))
    return TrainingPlan(tuple(options), model, cluster, seq_len, planner.batch)


@dataclass
class _Planner:
    """The arguments that all meshes of a plan share, and the plans of attention that some of them share."""

    model: Model
    cluster: Cluster
    seq_len: int
    batch: int
    mask: Mask | None
    dtype: torch.dtype
    strategy: Strategy | None
    placement: PlacementName
    attention: dict[tuple[int, int], Option] = field(default_factory=dict)

    def meshes(self) -> Iterator[tuple[int, int, int]]:
        """(data, context, tensor) that divide ranks, heads, features, tokens and batch."""
        model, ranks = self.model, self.cluster.ranks
        for tensor in _divisors(self.cluster.gpus):
            divides_keys = model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0
            if model.heads % tensor or model.ffn % tensor or not divides_keys:
                continue
            for context in _divisors(ranks // tensor):
                data = ranks // tensor // context
                step = context * tensor
                # groups of consecutive ranks lie within a node, or cover whole nodes
                is_aligned = self.cluster.gpus % step == 0 or step % self.cluster.gpus == 0
                divides_tokens = context <= MAX_CONTEXT and step <= self.seq_len and self.batch % data == 0
                if divides_tokens and is_aligned and self._has_strategy(context, tensor):
                    yield data, context, tensor

    def _has_strategy(self, context: int, tensor: int) -> bool:
        """Whether the requested strategy has a mesh for these ranks."""
        if self.strategy is None or context == 1:
            return True
        return mesh_shape(self.strategy, context, max(self.model.kv_heads // tensor, 1)) is not None

    def refuse(self, requested: dict[str, int]) -> None:
        """Raise InputError: there is no mesh."""
        model, cluster = self.model, self.cluster
        text = ", ".join(f"{name}={size}" for name, size in requested.items()) or f"batch={self.batch}"
        raise InputError(
            ", ".join(requested) or "batch",
            f"fit a mesh of {cluster.ranks} ranks: tensor divides the {cluster.gpus} GPUs of a node, {model.heads} "
            f"heads ({model.kv_heads} of keys) and {model.ffn} features, data divides the {self.batch} sequences, and "
            f"context is at most {MAX_CONTEXT}",
            text,
            hint="leave out a size of the mesh, or choose another batch",
        )

    def option(self, data: int, context: int, tensor: int, recompute: bool) -> MeshOption:
        """The costs of one mesh."""
        model, cluster, e = self.model, self.cluster, self.dtype.itemsize
        tokens = -(-self.seq_len // context)
        micro = self.batch // data
        attention = self._attention_option(context, tensor)
        shared = data * context
        tensor_sent = micro * model.layers * _traffic.tensor_bytes(model, tokens, tensor, e, recompute=recompute).both
        layer_sent = float((attention.forward * (1 + recompute) + attention.backward).max())
        parameters = _traffic.parameter_bytes(model, tensor, shared, e, _GRADIENT_BYTES).both
        context_group = cluster.group(context, tensor)
        axes = (
            self._axis("data", shared, micro * parameters, cluster.group(shared, tensor).ring_share()),
            self._axis("context", context, micro * model.layers * layer_sent, context_group.peer_share()),
            self._axis("tensor", tensor, tensor_sent, cluster.group(tensor, 1).ring_share()),
        )
        attention_seconds = model.layers * attention.seconds * (_RECOMPUTE_FACTOR if recompute else 1.0)
        computing = micro * (self._linear_seconds(tokens, tensor, recompute) + attention_seconds)
        memory = self._memory(shared, tensor, tokens, attention, recompute)
        available = cluster.memory - cluster.reserve
        step = context * tensor
        room = (available - memory.states - memory.parameters) / (memory.growing / self.seq_len)
        return MeshOption(
            data,
            context,
            tensor,
            recompute,
            attention.strategy if context > 1 else "",
            attention.placement if context > 1 else "",
            micro,
            axes,
            memory,
            max(int(room) // step * step, 0),
            max(computing + axes[2].seconds, axes[0].seconds),
            memory.total <= available,
        )

    def _attention_option(self, context: int, tensor: int) -> Option:
        """Context parallelism of one layer with one sequence."""
        key = context, tensor
        if key not in self.attention:
            model, cluster = self.model, self.cluster
            share = cluster.group(context, tensor).peer_share()
            bandwidth = 1 / cluster.seconds(1.0, share) if context > 1 else cluster.intra
            self.attention[key] = plan_attention(
                self.seq_len,
                model.heads // tensor,
                model.head_dim,
                self.mask,
                context,
                self.strategy if context > 1 else None,
                self.placement,
                kv_heads=max(model.kv_heads // tensor, 1),
                dtype=self.dtype,
                flops=cluster.flops,
                bandwidth=bandwidth,
            ).best
        return self.attention[key]

    def _axis(self, name: str, size: int, sent: float, share: float) -> Axis:
        return Axis(name, size, sent, sent * share, self.cluster.seconds(sent, share))

    def _linear_seconds(self, tokens: int, tensor: int, recompute: bool) -> float:
        """The time of the linear maps for one batch: 2 FLOP per multiply-add, and twice as many in the backward pass.

        Sequence parallelism divides the tokens of the head.
        """
        layers = self.model.layers * self.model.layer_multiply_adds * (4 if recompute else 3) / tensor
        head = self.model.hidden * self.model.vocabulary * 3 / tensor
        return 2 * tokens * (layers + head) / self.cluster.flops

    def _memory(self, shared: int, tensor: int, tokens: int, attention: Option, recompute: bool) -> Bytes:
        model, e = self.model, self.dtype.itemsize
        divided = tensor > 1

        def activations(recomputes: bool) -> float:
            return _memory.activation_bytes(model, tensor, e, sequence_parallel=divided, recompute=recomputes)

        # the backward pass recomputes one layer at a time
        per_token = model.layers * activations(recompute) + (activations(False) if recompute else 0)
        return Bytes(
            _memory.state_bytes(model, tensor, shared),
            _memory.gathered_bytes(model, tensor, shared, e, _GRADIENT_BYTES),
            round(tokens * per_token),
            int(attention.memory.max()),
            round(tokens * _memory.logit_bytes(model, tensor, e, sequence_parallel=divided)),
        )


def _divisors(number: int) -> list[int]:
    """The divisors of a number, ascending.

    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
