"""The balancing loss of experts over the tokens of all context and data ranks.

    experts * sum_e (choices of expert e / tokens) * (sum of its probabilities / tokens)

is a product of means over all tokens, so it is not the sum of what ranks compute from their own tokens. Instead each
rank sums over its tokens, and these sums, 2 numbers per expert and the number of tokens, are added up.

Source: Fedus et al. 2022 (arXiv:2101.03961), equations 4 to 6; `load_balancing_loss_func` of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from undivided.context_parallel.exchange.collectives import Communicator

COEFFICIENT = "router_aux_loss_coef"
"""The attribute of a model by which the balancing loss is multiplied before it is added to the loss."""


def spread_balancing_loss(
    output: Any, coefficient: float, model: Any, real: Tensor | None, ranks: Sequence[Communicator]
) -> None:
    """Replace the balancing loss of a rank's own tokens by that of all tokens, and add this rank's share to its loss.

    Args:
        output: of a model with router logits, whose loss has no balancing loss yet. It is changed in place.
        coefficient: of the balancing loss.
        model: of transformers, with the attributes num_experts and num_experts_per_tok.
        real: the tokens of this rank that are not padding, [B, S]; None if all are real.
        ranks: the groups over which tokens are divided.
    """
    own = _sums(output.router_logits, model.num_experts, model.num_experts_per_tok, real)
    total = own.detach().cpu()
    for group in ranks:
        total = torch.stack(group.gather(total, "the sums of the balancing loss")).sum(0)
    count = math.prod(group.world for group in ranks)
    # the values of all ranks; they all add a share of the same loss, so that the gradient of a rank's own sums is
    # `count` times that of its share
    sums = total.to(own.device) + count * (own - own.detach())
    choices, probabilities, tokens = sums[: model.num_experts], sums[model.num_experts : -1], sums[-1].detach()
    balance = model.num_experts * (choices * probabilities).sum() / tokens.square()
    output.aux_loss = balance
    if output.loss is not None:
        output.loss = output.loss + coefficient * balance.to(output.loss.device) / count


def _sums(logits: Sequence[Tensor], experts: int, chosen: int, real: Tensor | None) -> Tensor:
    """fp32 [2 experts + 1] over the layers: choices of each expert, sums of its probabilities, number of tokens."""
    choices = probabilities = tokens = torch.zeros((), device=logits[0].device)
    for layer in logits:
        weights = torch.softmax(layer.to(logits[0].device), -1)
        is_real = torch.ones_like(weights[:, 0]) if real is None else real.reshape(-1).to(weights)
        is_chosen = torch.nn.functional.one_hot(weights.topk(chosen).indices, experts).sum(1)
        choices = choices + (is_chosen * is_real[:, None]).float().sum(0)
        probabilities = probabilities + (weights.float() * is_real[:, None]).sum(0)
        tokens = tokens + is_real.float().sum()
    return torch.cat((choices, probabilities, tokens[None]))
