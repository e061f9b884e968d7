"""What a step of generation over paged ranks sends is what `cached_step` says; counted, on gloo too."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from command_runs import answer, refused, run
from gloo_ranks import run_ranks
from torch import distributed

import undivided
from undivided import InferenceParams, InputError, MultiheadAttention
from undivided.context_parallel import simulate
from undivided.context_parallel.plan import cached_step

HEADS, GROUPS, SIZE, BATCH, PAGE = 4, 2, 8, 2, 4
STEPS = ((17, True), (1, False), (12, True), (40, False))
"""New tokens of each sequence, and whether ranks divide them."""


def counted(group: Any) -> tuple[list[int], list[int]]:
    """Bytes that this rank sends in one layer in each step, and bytes of its pools that hold a token."""
    cp = undivided.ContextParallel(group)
    torch.manual_seed(0)
    layer = MultiheadAttention(
        HEADS * SIZE, HEADS, num_gqa_groups=GROUPS, attention_dropout=0.0, qkv_format="bshd", layer_number=1
    ).eval()
    layer.set_context_parallel_group(cp)
    params = InferenceParams(
        BATCH, 128, GROUPS, SIZE, torch.float32, is_paged=True, page_size=PAGE, qkv_format="bshd", context_parallel=cp
    )
    sent, held, length = [], [], 0
    for new, sharded in STEPS:
        params.pre_step(OrderedDict((name, new) for name in range(BATCH)), sharded=sharded)
        x = torch.randn(BATCH, new, HEADS * SIZE)
        own = params.shard(x) if sharded else x
        cp.traffic.reset()
        with torch.no_grad():
            layer(own, inference_params=params)
        sent.append(cp.traffic.bytes_sent)
        length += new
        tokens = sum((n // PAGE) % cp.world == cp.rank for n in range(length))
        held.append(tokens * BATCH * GROUPS * 2 * SIZE * 4)
    return sent, held


def counted_on_gloo() -> tuple[list[int], list[int]]:
    return counted(distributed.group.WORLD)


def planned(world: int) -> tuple[list[int], list[int]]:
    sent, held, length = [], [], 0
    for new, sharded in STEPS:
        sizes: dict[str, Any] = {"kv_heads": GROUPS, "batch": BATCH, "dtype": torch.float32, "page_size": PAGE}
        step = cached_step(new, length, HEADS, SIZE, world, sharded=sharded, **sizes)
        sent.append(step.sent)
        held.append(step.cache)
        length += new
    return sent, held


def check(answers: list[Any], world: int) -> None:
    for found in answers:
        assert isinstance(found, tuple), found
    for number, expected in enumerate(planned(world)):
        assert [max(of_ranks) for of_ranks in zip(*(found[number] for found in answers), strict=True)] == expected


def test_gloo_ranks_send_and_hold_what_is_planned() -> None:
    (answers,) = run_ranks(3, counted_on_gloo)
    check(answers, 3)


@pytest.mark.parametrize("world", [2, 5])
def test_other_numbers_of_ranks(world: int) -> None:
    check(simulate(world, counted), world)


@pytest.mark.parametrize("by", ["all_gather", "ring"])
@pytest.mark.parametrize(("world", "rows"), [(2, 5), (3, 7), (4, 3)])
def test_both_ways_to_merge_rows_that_the_ranks_do_not_divide(by: Any, world: int, rows: int) -> None:
    def rank(group: Any) -> int:
        cp = undivided.ContextParallel(group)
        q, k = torch.randn(1, rows, 1, 8), torch.randn(1, 10, 1, 8)
        cp.decode(q, k, k, torch.arange(10) * world + cp.rank, 10 * world, layout="bshd", by=by)
        return cp.traffic.bytes_sent

    step = cached_step(rows, 10 * world - rows, 1, 8, world, dtype=torch.float32, sharded=False, by=by)
    assert max(simulate(world, rank)) == step.sent


def test_one_rank_sends_nothing_and_wrong_sizes_are_refused() -> None:
    assert cached_step(5, 0, 2, 8, 1).sent == cached_step(5, 0, 2, 8, 1, sharded=False).sent == 0
    with pytest.raises(InputError, match="new must be an integer of at least 1, got 0"):
        cached_step(0, 3, 2, 8)
    with pytest.raises(InputError, match="cached must be an integer of at least 0, got -1"):
        cached_step(1, -1, 2, 8)
    for name in ("kv_heads", "value_dim"):
        with pytest.raises(InputError, match=f"{name} must be an integer of at least 1, got 0"):
            cached_step(1, 3, 2, 8, **{name: 0})  # type: ignore[arg-type]


def test_the_command_prints_both_ways() -> None:
    words = ("plan", "4096", "--cached", "1000000", "--world", "4", "--kv-heads", "8")
    shown = answer(*words)
    assert [(step["sharded"], step["sent"] >> 20) for step in shown] == [(False, 96), (True, 84)]
    text = run(*words).stdout
    assert "sharded=True" in text
    assert "1,000,000 cached" in text
    assert "1 new token per sequence over 64 cached" in run("plan", "1", "--cached", "64", "--world", "2").stdout
    assert "--cached" in refused("plan", "8", "--page-size", "4")
    assert "--kv-len" in refused("plan", "8", "--cached", "4", "--kv-len", "9")
