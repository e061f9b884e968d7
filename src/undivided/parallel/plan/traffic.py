"""Bytes that a rank sends for each axis of a mesh, in one step of training.

Collectives count as ring algorithms send them: an all-gather or a reduce-scatter of N bytes over n ranks sends
``(n - 1) / n * N`` per rank, an all-reduce twice as much (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms"). The counts equal those of runs with gloo exactly; what they leave out stands beside each function.

Legend: t tensor ranks, c context ranks, n ranks that share parameters, e bytes of a number.
"""

from __future__ import annotations

from typing import NamedTuple

from undivided.parallel.plan.model import Model

__all__ = ["Passes", "gather_bytes", "parameter_bytes", "tensor_bytes"]

GATES_ARE_GATHERED = True
"""`parallelize` gathers the features of a gated activation before it multiplies them: see `tensor_bytes`."""


class Passes(NamedTuple):
    """Bytes that a rank sends in a forward and in a backward pass."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """The sum."""
        return self.forward + self.backward


def gather_bytes(size: float, ranks: int) -> float:
    """Bytes that a rank sends in an all-gather to `size` bytes, or in a reduce-scatter of `size` bytes.

    >>> gather_bytes(1000, 4)
    750.0
    """
    return size * (ranks - 1) / ranks


def tensor_bytes(
    model: Model, tokens: int, tensor: int, itemsize: int, *, sequence_parallel: bool = True, recompute: bool = False
) -> Passes:
    """Bytes that a rank sends in one layer, for the tokens of one batch, because `tensor` ranks divide it.

    Without sequence parallelism each of the two blocks ends with an all-reduce of the hidden states in the forward
    pass, and another one in the backward pass (Shoeybi et al. 2019, arXiv:1909.08053, section 3). With sequence
    parallelism each all-reduce is a reduce-scatter, and an all-gather before the block: two of each per pass, the same
    bytes (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2). The gathered input of a block is kept for the
    backward pass, so it is not gathered a third time. Recomputed activations repeat the forward pass without its last
    collective, on whose result no gradient depends (`torch.utils.checkpoint` stops there).

    A gated activation sends more (`GATES_ARE_GATHERED`): its input [tokens, 2 ffn] is gathered in the forward pass, and
    two tensors [tokens, ffn] in the backward pass.

    Not counted: the sums of the gradients of norms and output biases over tensor ranks, some `hidden` numbers per
    layer, summed when the optimizer reads them; on the CPU the comparison of arguments, 16 bytes per layer and rank.

    Args:
        tokens: tokens of the batch that this tensor group has: sequences times their length on one context rank.
        itemsize: bytes of a number of the hidden states.

    >>> model = Model(1, 1024, 16, 16, 64, 4096, 1000, gated=False)
    >>> tensor_bytes(model, 2048, 2, 2)  # 4 collectives of 2048 x 1024 x 2 bytes, of which half is sent
    Passes(forward=8388608.0, backward=8388608.0)
    """
    one = gather_bytes(tokens * model.hidden * itemsize, tensor)
    forward = backward = 4 * one
    if model.gated and GATES_ARE_GATHERED:
        gates = gather_bytes(tokens * 2 * model.ffn * itemsize, tensor)
        forward, backward = forward + gates, backward + gates
    again = forward - one * (1 if sequence_parallel else 2) if recompute else 0
    return Passes(forward, backward + again)


def parameter_bytes(model: Model, tensor: int, ranks: int, itemsize: int, gradient_itemsize: int) -> Passes:
    """Bytes that a rank sends for one batch because `ranks` ranks share every parameter (FSDP2's `fully_shard`).

    Each layer is gathered in the forward pass and again in the backward pass, and its gradients are reduced and
    scattered (Rajbhandari et al. 2020, arXiv:1910.02054, section 7: 3 times the parameters; Zhao et al. 2023,
    arXiv:2304.11277). The embedding, the last norm and the head are the outermost unit, which stays gathered between
    the passes.

    Not counted: FSDP2 pads the first axis of a parameter to a multiple of `ranks`.

    Args:
        itemsize, gradient_itemsize: bytes of a number of gathered parameters, and of reduced gradients.

    >>> model = Model(1, 1024, 16, 16, 64, 4096, 1000, gated=False)
    >>> parameter_bytes(model, 1, 2, 2, 4).forward == model.parameters  # half of 2 bytes per parameter
    True
    """
    layers = model.layers * model.layer_parameters(tensor)
    everything = layers + model.outer_parameters
    forward = gather_bytes(everything * itemsize, ranks)
    return Passes(forward, gather_bytes(layers * itemsize, ranks) + gather_bytes(everything * gradient_itemsize, ranks))
