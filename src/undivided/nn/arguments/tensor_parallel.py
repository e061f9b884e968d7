"""TransformerEngine's arguments of tensor parallelism: tp_group, tp_size, sequence_parallel, set_parallel_mode and
get_rng_state_tracker."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from torch import Tensor

from undivided.arguments.checks import as_integer, checked_flag
from undivided.arguments.layout import SEQUENCE_AXIS
from undivided.arguments.signature import takes
from undivided.errors import InputError
from undivided.nn.arguments.formats import Heads
from undivided.nn.blocks.initial_weights import DividedInit, Init
from undivided.nn.blocks.tensor_ranks import TensorRanks, Tracker, group_size, tensor_ranks
from undivided.request.slopes import usual_slopes


class TensorArguments(NamedTuple):
    """The checked arguments.

    Attributes:
        size: the number of ranks.
        ranks: the ranks; None if there is one, or if they are not known yet.
        tracker: `get_rng_state_tracker`, or None.
        sequence_axis: the axis of hidden states of which a rank has its part; None: a rank has the whole sequence.
        is_parallelized: whether `parallelize` has divided the layer.
    """

    size: int
    ranks: TensorRanks | None
    tracker: Tracker | None
    sequence_axis: int | None
    is_parallelized: bool = False

    def own_heads(self, heads: Heads) -> Heads:
        """The heads of one rank, from those of the layer."""
        for name, count in (("num_attention_heads", heads.q), ("num_gqa_groups", heads.kv)):
            if count % self.size:
                raise InputError(name, f"be a multiple of tp_size ({self.size})", count)
        return heads._replace(q=heads.q // self.size, kv=heads.kv // self.size)

    def own_slopes(self, bias_type: str, slopes: Tensor | None, q: Tensor) -> Tensor | None:
        """The given slopes. If ALiBi has none, on several ranks: the rank's part of the usual slopes of all heads."""
        if self.size == 1 or slopes is not None or bias_type != "alibi":
            return slopes
        if self.ranks is None:
            hint = "set_tensor_parallel_group(group), by which the heads of this rank are known; or pass their slopes"
            raise InputError("alibi_slopes", f"be given with tp_size={self.size} without a group", None, hint=hint)
        return self.ranks.own(usual_slopes(self.size * q.shape[-2], q.device), 0)

    def own_features(self, argument: str, count: int) -> int:
        """The features of one rank, from those of the layer."""
        if count % self.size:
            raise InputError(argument, f"be a multiple of tp_size ({self.size})", count)
        return count // self.size

    def divided_init(self, init: Init) -> Init:
        """The initialisation of a weight of which each rank has its part."""
        is_whole = self.size == 1 and self.tracker is None
        return init if is_whole else DividedInit(init, self.size, self.ranks, self.tracker)

    def check_ranks(self) -> None:
        """Raise InputError if the ranks are needed and unknown."""
        if self.size > 1 and self.ranks is None:
            if self.is_parallelized:
                hint = "build a new layer and parallelize it; save_checkpoint and load_checkpoint keep its parameters"
                got = "a layer that was pickled without its ranks"
                raise InputError("module", f"have the {self.size} ranks of parallelize", got, hint=hint)
            hint = "layer.set_tensor_parallel_group(group), before the first call"
            raise InputError("tp_group", f"be set before a call with tp_size={self.size}", None, hint=hint)

    def with_group(self, tp_group: object, check: bool) -> TensorArguments:
        """The arguments with the ranks of a group, which may be None; InputError after `parallelize`."""
        if self.is_parallelized:
            hint = "set_tensor_parallel_group is for layers that were built with tp_size"
            raise InputError("tp_group", "not be set after parallelize", type(tp_group).__name__, hint=hint)
        return self._replace(ranks=tensor_ranks(tp_group, self.size, self.sequence_axis, check))


def checked_tensor_arguments(
    tp_group: Any,
    tp_size: object,
    sequence_parallel: object,
    get_rng_state_tracker: Any,
    format: str | None = None,
    set_parallel_mode: object = True,
) -> TensorArguments:
    """The arguments; InputError if one is wrong. A group decides the number of ranks, as in TransformerEngine.

    Args:
        tp_group, tp_size, sequence_parallel, get_rng_state_tracker, set_parallel_mode: those of the caller.
        format: that of hidden states; None if there are no hidden states.
    """
    size = as_integer("tp_size", tp_size, 1)
    if tp_group is not None:
        size = group_size(tp_group)
    if not checked_flag("set_parallel_mode", set_parallel_mode) and size > 1:
        hint = "with False, each rank would have all rows of the projections but only some heads"
        raise InputError("set_parallel_mode", f"be True with {size} tensor parallel ranks", False, hint=hint)
    tracker = get_rng_state_tracker
    hint = "a function without arguments that returns an object with fork(), such as a CudaRNGStatesTracker"
    if tracker is not None and not callable(tracker):
        raise InputError("get_rng_state_tracker", "be a function or None", type(tracker).__name__, hint=hint)
    if tracker is not None and not takes(tracker, 0):
        got = f"one with the arguments {inspect.signature(tracker)}"
        raise InputError("get_rng_state_tracker", "be a function without arguments", got, hint=hint)
    is_divided = checked_flag("sequence_parallel", sequence_parallel) and size > 1
    axis = SEQUENCE_AXIS[format] if is_divided and format is not None else None
    return TensorArguments(size, tensor_ranks(tp_group, size, axis), tracker, axis)
