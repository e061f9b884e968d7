"""Copies of a layer with a context group share the group; a pickled one has none."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from torch import distributed

import undivided
from undivided import InputError, TransformerLayer
from undivided.context_parallel import simulate
from undivided.context_parallel.exchange.simulate import SimulatedGroup


def copies(group: Any) -> tuple[list[bool], str]:
    """Whether an average and a copy give the output of a layer with a group; the error of one that was pickled."""
    torch.manual_seed(0)
    layer = TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd")
    layer.set_context_parallel_group(group)
    x = torch.randn(2, 8, 32)
    expected = layer(x)
    averaged = torch.optim.swa_utils.AveragedModel(layer)
    equal = [torch.equal(other(x), expected) for other in (averaged, copy.deepcopy(layer))]
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with pytest.raises(InputError) as error:
        loaded(x)
    loaded.set_context_parallel_group(group)
    return [*equal, torch.equal(loaded(x), expected)], str(error.value)


def over_gloo() -> tuple[list[bool], str]:
    return copies(distributed.group.WORLD)


def check(answers: list[Any]) -> None:
    for answer in answers:
        assert isinstance(answer, tuple), answer
        equal, message = answer
        assert equal == [True] * 3
        assert message.startswith("context_parallel must have a group to attend with, got ContextParallel(rank ")
        assert "set_context_parallel_group(group)" in message


def test_copies_of_a_layer_with_a_context_group_attend_over_it() -> None:
    (answers,) = run_ranks(2, over_gloo)
    check(answers)


def test_copies_of_a_layer_with_a_simulated_group_attend_over_it() -> None:
    check(simulate(2, copies))


def test_a_copy_of_a_context_counts_in_the_same_traffic() -> None:
    def step(group: SimulatedGroup) -> bool:
        cp = undivided.ContextParallel(group)
        other = copy.deepcopy(cp)
        q = torch.zeros(1, 4, 2, 8)
        undivided.attention(q, q, q, layout="bshd", context_parallel=other)
        return other.traffic is cp.traffic and cp.traffic.messages > 0

    assert simulate(2, step) == [True, True]
