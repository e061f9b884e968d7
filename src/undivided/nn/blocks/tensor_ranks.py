"""`TensorRanks`: the ranks that the heads and features of a layer are divided over, and what they agree on.

Each rank has its own attention heads and feed-forward features. What stays whole (hidden states and normalisations) is
the same on every rank; with sequence parallelism each rank has its consecutive part of the sequence.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.nn import functional

from undivided.arguments.modes import hidden_from_checkpoints
from undivided.context_parallel.exchange.collectives import ProcessGroup, SingleRank
from undivided.context_parallel.exchange.failures import rank_errors
from undivided.context_parallel.exchange.groups import check_exists
from undivided.context_parallel.exchange.handshake import SharedArguments, compare_ranks
from undivided.context_parallel.exchange.timeouts import adopt_timeout
from undivided.errors import InputError
from undivided.nn.blocks.exchanged import exchanged
from undivided.nn.blocks.rank_calls import running_call
from undivided.request.seed import draw_seed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Tracker = Callable[[], Any]
"""TransformerEngine's `get_rng_state_tracker`: returns an object whose `fork()` is a context with its generator."""


class Move(NamedTuple):
    """Placements of a DTensor before and after a redistribution."""

    before: Any
    after: Any


class TensorRanks:
    """The ranks of a process group.

    Args:
        group: the process group.
        sequence_axis: the axis of hidden states of which a rank has its part; None: a rank has the whole sequence.
        check: whether the ranks compare the arguments of every call.
    """

    def __init__(self, group: distributed.ProcessGroup, sequence_axis: int | None, check: bool = True) -> None:
        from torch.distributed.tensor import Partial, Replicate, Shard

        self.group, self.sequence_axis, self.check = group, sequence_axis, check
        check_exists(group, "tp_group")
        adopt_timeout(group)
        self.rank, self.size = group.rank(), group.size()
        # placements of DTensors
        self._whole, self._summand = Replicate(), Partial()
        self._hidden_states = self._whole if sequence_axis is None else Shard(sequence_axis)
        self._meshes: dict[str, DeviceMesh] = {}
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        for kind in {"cpu"} if accelerator is None else {"cpu", accelerator.type}:
            self._mesh(kind)  # before any call, in which torch.compile cannot create a mesh

    def __deepcopy__(self, memo: object) -> TensorRanks:
        return self  # a copy of a layer has the same ranks

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _no_ranks, ()  # a process that loads a layer sets its own group

    def compare(self, shared: SharedArguments, call: str) -> None:
        """Raise on every rank unless all ranks share these values.

        Args:
            shared: the values by the name of the argument.
            call: the layer that is called, for errors.

        Raises:
            InputError: a value differs.
            RankError: another rank has ended, or makes no such call within the group's timeout.
        """
        axes = (SingleRank(), ProcessGroup(self.group))
        compare_ranks(axes, shared, None, f"the comparison of arguments of {call}")

    def errors(self, step: str) -> AbstractContextManager[None]:
        """A context that raises failures of communication with the name of the step and of the failed ranks."""
        if torch.compiler.is_compiling():
            return contextlib.nullcontext()
        return rank_errors(f"{step} in {running_call()}", self.group)

    @hidden_from_checkpoints
    def agree_on_seed(self, seed: Tensor | int, device: torch.device) -> Tensor:
        """The seed of the first rank, a 0-d int64 tensor on the device."""
        sent = torch.as_tensor(seed, dtype=torch.int64, device=device).clone()
        with self.errors("the broadcast of the dropout's seed"):
            distributed.broadcast(sent, group=self.group, group_src=0)
        return sent

    @hidden_from_checkpoints
    def agree_on_generators(self, device: torch.device) -> None:
        """Set torch's default generator of the device to the state of the first rank's."""
        generators: Any = torch.random if device.type == "cpu" else torch.get_device_module(device)
        where = () if device.type == "cpu" else (device,)
        state = generators.get_rng_state(*where).to(device)
        with self.errors("the broadcast of the generators' states"):
            distributed.broadcast(state, group=self.group, group_src=0)
        generators.set_rng_state(state.cpu(), *where)

    def dropout(self, x: Tensor, p: float) -> Tensor:
        """Hidden states after the dropout of one process, whose generator has the state of this rank's."""
        axis = self.sequence_axis
        if axis is None:
            return functional.dropout(x, p)
        shape, own = list(x.shape), x.shape[axis]
        shape[axis] = own * self.size
        noise = functional.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), p)
        return x * noise.narrow(axis, self.rank * own, own)

    def own(self, tensor: Tensor, axis: int) -> Tensor:
        """This rank's consecutive part of a tensor along an axis, a view."""
        count = tensor.shape[axis] // self.size
        return tensor.narrow(axis, self.rank * count, count)

    def enter(self, x: Tensor) -> Tensor:
        """Hidden states of the whole sequence, for the maps of this rank; the gradient is the sum over ranks."""
        gather, scatter = Move(self._hidden_states, self._whole), Move(self._summand, self._hidden_states)
        return self._move(x, "the gather of hidden states", gather, scatter)

    def leave(self, x: Tensor) -> Tensor:
        """Hidden states that are the sum over ranks; with sequence parallelism this rank's part of them."""
        scatter, gather = Move(self._summand, self._hidden_states), Move(self._hidden_states, self._whole)
        return self._move(x, "the sum of outputs", scatter, gather)

    def shared(self, parameter: Tensor) -> Tensor:
        """A parameter that ranks apply to different heads or tokens: its gradient is the sum over ranks."""
        whole = self._whole
        return self._move(parameter, "a shared parameter", Move(whole, whole), Move(self._summand, whole))

    def gather_features(self, x: Tensor) -> Tensor:
        """The features of all ranks, [.., ranks * features]; the gradient is this rank's part of the sum over ranks."""
        from torch.distributed.tensor import Shard

        own = Shard(x.ndim - 1)
        return self._move(x, "the gather of features", Move(own, self._whole), Move(self._summand, own))

    def _move(self, x: Tensor, what: str, forward: Move, backward: Move) -> Tensor:
        """x after a move, its gradient after another one; DTensor does the communication."""
        if not torch.compiler.is_compiling():
            exchanges = (functools.partial(self.redistribute, move) for move in (forward, backward))
            return exchanged(x, what, *exchanges)
        from torch.distributed.tensor import DTensor

        placed = DTensor.from_local(x, self._mesh(x.device.type), [forward.before], run_check=False)
        return placed.redistribute(placements=[forward.after]).to_local(grad_placements=[backward.before])

    def redistribute(self, move: Move, x: Tensor, step: str) -> Tensor:
        """This rank's tensor after a move, without gradient. step: what is moved, for errors."""
        from torch.distributed.tensor import DTensor

        if move.before == move.after:
            return x.view_as(x)
        with rank_errors(step, self.group):
            placed = DTensor.from_local(x, self._mesh(x.device.type), [move.before], run_check=False)
            return placed.redistribute(placements=[move.after]).to_local()

    def _mesh(self, kind: str) -> DeviceMesh:
        """The ranks as a mesh of a type of device."""
        from torch.distributed.device_mesh import DeviceMesh

        if kind not in self._meshes:
            self._meshes[kind] = DeviceMesh.from_group(self.group, kind)
        return self._meshes[kind]


def _no_ranks() -> None:
    """What the ranks of a pickled layer become."""


def tensor_ranks(tp_group: object, tp_size: int, sequence_axis: int | None, check: bool = True) -> TensorRanks | None:
    """The ranks of a group; None without a group or with one rank.

    Raises:
        InputError: it is not a process group, or does not have `tp_size` ranks.
    """
    if tp_group is None:
        return None
    size = group_size(tp_group)
    if size != tp_size:
        hint = "tp_size at construction decides the shapes of the parameters"
        raise InputError("tp_group", f"have the {tp_size} ranks of tp_size", size, hint=hint)
    assert isinstance(tp_group, distributed.ProcessGroup)
    return None if size == 1 else TensorRanks(tp_group, sequence_axis, check)


def group_size(tp_group: object) -> int:
    """The number of ranks of a process group; InputError if this process is not one of them."""
    check_exists(tp_group, "tp_group")
    if not isinstance(tp_group, distributed.ProcessGroup):
        hint = 'mesh.get_group("tensor") of a DeviceMesh, or torch.distributed.new_group(ranks)'
        raise InputError("tp_group", "be a torch.distributed process group or None", type(tp_group).__name__, hint=hint)
    return tp_group.size()


def dropout_seed(
    cp_seed: Callable[[], int] | None, ranks: TensorRanks | None, tracker: Tracker | None, q: Tensor
) -> Tensor | int | None:
    """The seed of the dropout of an attention: an int, a 0-d int64 tensor, or None to draw one in the call.

    Args:
        cp_seed: the seed on which context parallel ranks agree; None without them.
        ranks: the tensor parallel ranks, which agree on the seed of the first one, unless there is a tracker.
        tracker: draws the seed in its context, without communication between tensor parallel ranks.
        q: the queries, whose device the seed is drawn on.
    """

    def draw() -> Tensor | int:
        return draw_seed(q.device) if cp_seed is None else cp_seed()

    if tracker is not None:
        with forked(tracker):
            return draw()
    if ranks is not None:
        return ranks.agree_on_seed(draw(), q.device)
    return None if cp_seed is None else cp_seed()


def forked(tracker: Tracker) -> AbstractContextManager[Any]:
    """The context in which a tracker's generator is the default one; InputError if the tracker has none."""
    states = tracker()
    context = states.fork() if callable(getattr(states, "fork", None)) else None
    if not isinstance(context, AbstractContextManager):
        must = "return an object whose fork() is a context manager"
        hint = "lambda: tracker, where tracker is a CudaRNGStatesTracker"
        raise InputError("get_rng_state_tracker", must, type(states).__name__, hint=hint)
    return context
