"""The memory of a rank in training, by what it is for.

Legend: t tensor ranks, n ranks that share parameters, e bytes of a number.
"""

from __future__ import annotations

from typing import NamedTuple

from undivided.parallel.plan.model import Model

__all__ = ["STATE_BYTES", "Bytes", "activation_bytes", "logit_bytes", "state_bytes", "gathered_bytes"]

STATE_BYTES = 16
"""Bytes per parameter: a parameter, its gradient and Adam's two moments in fp32. With half-precision copies of
parameters and gradients in place of the fp32 gradient it is the same (Rajbhandari et al. 2020, arXiv:1910.02054,
section 3.1: 2 + 2 + 12). Activations, gathered parameters and buffers come on top."""


class Bytes(NamedTuple):
    """Bytes of a rank.

    states: parameters, gradients and Adam's moments. parameters: gathered ones, and gradients before they are
    scattered. activations: kept for the backward pass. attention: of one layer at its fullest moment. logits: of the
    head, and their gradients.
    """

    states: int
    parameters: int
    activations: int
    attention: int
    logits: int

    @property
    def total(self) -> int:
        """The sum."""
        return sum(self)

    @property
    def growing(self) -> int:
        """The bytes that grow with the sequence."""
        return self.activations + self.attention + self.logits


def state_bytes(model: Model, tensor: int, ranks: int) -> int:
    """`STATE_BYTES` of this rank's share of the parameters.

    >>> from undivided.parallel.plan.model import PRESETS
    >>> state_bytes(PRESETS["8b"], 1, 8) / 1e9
    16.060522496
    """
    parameters = model.layers * model.layer_parameters(tensor) + model.outer_parameters
    return -(-STATE_BYTES * parameters // ranks)


def gathered_bytes(model: Model, tensor: int, ranks: int, itemsize: int, gradient_itemsize: int) -> int:
    """Bytes of parameters and gradients that are gathered or not yet scattered; 0 if ranks share nothing.

    Two layers (the next one is gathered while one computes), the gradients of one in both dtypes, and the outermost
    unit with its gradients.
    """
    if ranks == 1:
        return 0
    layer = model.layer_parameters(tensor) * (3 * itemsize + gradient_itemsize)
    return layer + 2 * model.outer_parameters * itemsize


def activation_bytes(model: Model, tensor: int, itemsize: int, *, sequence_parallel: bool, recompute: bool) -> float:
    """Bytes per token that a layer keeps for the backward pass; exactly those of a `TransformerLayer` on a CPU.

    Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1) count ``34 h`` bytes with e = 2 without the scores, which
    flash attention does not keep: 2 h inputs of the norms, 2 h inputs of the blocks, 4 h of attention and 8 h of the
    feed-forward block are ``16 h`` numbers or 32 h bytes, and 2 h bytes are dropout masks, which are recomputed here.
    With other sizes the numbers are those below. Added are the lse, 4 bytes per head, and what norms keep: a LayerNorm
    its mean and deviation, an RMSNorm its input and its result in fp32 (a fused kernel keeps less). A gated block keeps
    the two halves of its input, the activated half and their product. Sequence parallelism divides what the norms keep
    by t. It does not divide the inputs of the blocks, because a gathered input is kept and not gathered again.

    With `recompute` (activation checkpointing of each layer) only the layer's input is kept.

    >>> model = Model(1, 64, 4, 4, 16, 256, 100, gated=False, norm_bias=True)
    >>> activation_bytes(model, 1, 2, sequence_parallel=False, recompute=False)  # 32 h, the lse, and 8 of norms
    2072.0
    """
    parts = tensor if sequence_parallel else 1
    if recompute:
        return model.hidden * itemsize / parts
    norm = (model.hidden + 2) * itemsize if model.norm_bias else 2 * model.hidden * 4 + 4
    inputs = 2 * norm / parts + 2 * model.hidden * itemsize
    keys = 2 * model.kv_heads / (1 if model.kv_heads % tensor else tensor) * model.head_dim
    attention = 2 * model.heads * model.head_dim / tensor + keys
    inner = (4 if model.gated else 2) * model.ffn / tensor
    return inputs + (attention + inner) * itemsize + 4 * model.heads / tensor


def logit_bytes(model: Model, tensor: int, itemsize: int, *, sequence_parallel: bool) -> float:
    """Bytes per token of the logits, of their softmax in fp32, and of their gradient in fp32."""
    return model.vocabulary * (itemsize + 8) / (tensor if sequence_parallel else 1)
