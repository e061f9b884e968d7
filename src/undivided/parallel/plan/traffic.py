"""Bytes that a rank sends for each axis of a mesh, in one step of training.

Collectives count as ring algorithms send them: an all-gather or a reduce-scatter of N bytes over n ranks sends
``(n - 1) / n * N`` per rank, an all-reduce twice as much (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
algorithms"). The counts equal those of runs with gloo exactly; what they leave out stands beside each function.

Legend: t tensor ranks, c context ranks, n ranks that share parameters, e bytes of a number.
"""

from __future__ import annotations

from typing import NamedTuple

from undivided.parallel.plan.model import Model

__all__ = ["PassBytes", "gather_bytes", "parameter_bytes", "tensor_bytes"]


class PassBytes(NamedTuple):
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
) -> PassBytes:
    """Bytes that a rank sends in one layer, for the tokens of one batch, because `tensor` ranks divide it.

    Without sequence parallelism each of the two blocks ends with an all-reduce of the hidden states in the forward
    pass, and another one in the backward pass (Shoeybi et al. 2019, arXiv:1909.08053, section 3). With sequence
    parallelism each all-reduce is a reduce-scatter, and an all-gather before the block: two of each per pass, the same
    bytes (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2). The gathered input of a block is kept for the
    backward pass, so it is not gathered a third time. Recomputed activations repeat the forward pass without its last
    collective, on whose result no gradient depends (`torch.utils.checkpoint` stops there).

    A gated activation sends more with `parallelize`, in each pass: a rank's rows of the first map are consecutive, so a
    rank exchanges up to two tensors [tokens, ffn / t] with ranks that multiply them (`undivided.nn.blocks.halves`).

    The backward pass also adds up the gradients of parameters that all ranks have and use for different tokens (norms
    and output biases under sequence parallelism) or for different heads (fewer key heads than ranks).

    Not counted: on the CPU the comparison of arguments, 16 bytes per layer and rank.

    Args:
        tokens: tokens of the batch that this tensor group has: sequences times their length on one context rank.
        itemsize: bytes of a number of the hidden states.

    >>> model = Model(1, 1024, 16, 16, 64, 4096, 1000, gated=False)
    >>> tensor_bytes(model, 2048, 2, 2)  # 4 collectives of 2048 x 1024 x 2 bytes, of which half is sent; and two norms
    PassBytes(forward=8388608.0, backward=8392704.0)
    """
    one = gather_bytes(tokens * model.hidden * itemsize, tensor)
    forward = backward = 4 * one
    if model.gated:
        gates = min(2, tensor - 1) * tokens * model.ffn / tensor * itemsize
        forward, backward = forward + gates, backward + gates
    backward += 2 * gather_bytes(_shared_parameters(model, tensor, sequence_parallel) * itemsize, tensor)
    again = forward - one * (1 if sequence_parallel else 2) if recompute else 0
    return PassBytes(forward, backward + again)


def _shared_parameters(model: Model, tensor: int, sequence_parallel: bool) -> int:
    """The parameters of a layer whose gradients are summed over the tensor ranks."""
    tokens = model.hidden * 2 * (1 + model.norm_bias + model.bias) if sequence_parallel else 0
    heads = 2 * model.kv_heads * model.head_dim * (model.hidden + model.bias) if model.kv_heads % tensor else 0
    return tokens + heads


def parameter_bytes(model: Model, tensor: int, ranks: int, itemsize: int, gradient_itemsize: int) -> PassBytes:
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
    backward = gather_bytes(layers * itemsize, ranks) + gather_bytes(everything * gradient_itemsize, ranks)
    return PassBytes(forward, backward)
