"""A tensor rank that comes with other arguments, ends or hangs is an error on the others that names it."""

from __future__ import annotations

import datetime
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from gloo_ranks import run_ranks
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from undivided import (
    ContextParallel,
    DotProductAttention,
    InferenceParams,
    InputError,
    MultiheadAttention,
    TransformerLayer,
)
from undivided.context_parallel import RankError
from undivided.parallel import load_checkpoint, parallelize, rank_errors, save_checkpoint

HIDDEN, HANG = 48, 6.0
WAYS = ("parallelize", "group")
OPTIONS: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1, "attn_input_format": "bshd"}
OTHER_ARGUMENTS: dict[str, Any] = {
    "self_attn_mask_type": "no_mask",
    "window_size": (2, 0),
    "cu_seqlens_q": torch.tensor([0, 3, 7]),
    "attention_mask": torch.zeros(2, 1, 1, 8, dtype=torch.bool),
    "core_attention_bias_type": "alibi",
    "rotary_pos_emb": torch.zeros(8, 1, 1, 8),
    "max_seqlen_q": 8,
    "inference_params": InferenceParams(2, 8, 3, 8, torch.float32),
}
"""Arguments of a call that one rank has and the other one does not."""


def layer_of(way: str, group: Any = None, **changes: Any) -> TransformerLayer:
    group = distributed.group.WORLD if group is None else group
    torch.manual_seed(0)
    if way == "group":
        return TransformerLayer(HIDDEN, 96, 6, tp_group=group, set_parallel_mode=True, **OPTIONS | changes)
    return parallelize(TransformerLayer(HIDDEN, 96, 6, **OPTIONS | changes), DeviceMesh.from_group(group, "cpu"))


def refused(call: Callable[[], object]) -> str:
    """The error of a call on this rank."""
    with pytest.raises(InputError) as error:
        call()
    return str(error.value)


def other_arguments(way: str) -> dict[str, str]:
    """The errors of calls in which the last rank comes with another argument, by the argument."""
    last, layer, x = (
        distributed.get_rank() == distributed.get_world_size() - 1,
        layer_of(way),
        torch.randn(2, 8, HIDDEN),
    )
    found = {}
    for name, value in OTHER_ARGUMENTS.items():
        found[name] = refused(lambda name=name, value=value: layer(x, **{name: value} if last else {}))
    decoder = layer_of(way, layer_type="decoder")
    encoded = torch.randn(2, 5 + last, HIDDEN)
    found["encoder_output"] = refused(lambda: decoder(x, encoder_output=encoded))
    second = layer_of(way, layer_number=2)
    found["layer"] = refused(lambda: (second if last else layer)(x))
    if way == "group":
        with_sequence = layer_of(way, sequence_parallel=last)
        found["sequence_parallel"] = refused(lambda: with_sequence(x))
    layer.train(not last)
    found["training"] = refused(lambda: layer(x))
    layer.train()
    layer.self_attention.core_attention.attention_dropout = 0.3 if last else 0.1
    found["attention_dropout"] = refused(lambda: layer(x))
    layer.self_attention.core_attention.attention_dropout = 0.1
    with torch.set_grad_enabled(not last):
        found["torch.is_grad_enabled()"] = refused(lambda: layer(x))
    layer.self_attention.proj.requires_grad_(not last)
    found["frozen parameters"] = refused(lambda: layer(x))
    layer.self_attention.proj.requires_grad_()
    found["hidden_states"] = refused(lambda: layer(x.requires_grad_(last)))
    layer(x.detach().requires_grad_()).sum().backward()  # the next call works
    return found


def by_parallelize() -> dict[str, str]:
    return other_arguments("parallelize")


def by_group() -> dict[str, str]:
    return other_arguments("group")


def attention_modules() -> list[str]:
    """The errors of a `DotProductAttention` and a `MultiheadAttention`, called with and built from other options."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    group: Any = {"tp_group": distributed.group.WORLD}
    core = DotProductAttention(4, 16, qkv_format="bshd", **group)
    q = torch.randn(2, 5, 4 // world, 16)
    attention = MultiheadAttention(
        HIDDEN, 6, qkv_format="bshd", set_parallel_mode=True, softcap=None if rank == 0 else 3.0, **group
    )
    found = [
        refused(lambda: core(q, q, q, window_size=(2 - rank, 0))),
        refused(lambda: attention(torch.randn(2, 8, HIDDEN))),
    ]
    core(q, q, q)
    return found


def without_comparison() -> list[bool]:
    """Whether a layer with ``check=False`` computes without comparing."""
    found = []
    with mock.patch("undivided.nn.blocks.tensor_ranks.compare_ranks", side_effect=AssertionError):
        for way in WAYS:
            layer = layer_of(way)
            with pytest.raises(AssertionError):
                layer(torch.randn(2, 8, HIDDEN))
            if way == "group":
                layer.set_tensor_parallel_group(distributed.group.WORLD, check=False)
            else:
                mesh = DeviceMesh.from_group(distributed.group.WORLD, "cpu")
                layer = parallelize(TransformerLayer(HIDDEN, 96, 6, **OPTIONS), mesh, check=False)
            found.append(bool(layer(torch.randn(2, 8, HIDDEN)).isfinite().all()))
    return found


def pickled() -> str:
    """What a layer says that another process has loaded, which has no group yet."""
    layer = layer_of("group")
    loaded = pickle.loads(pickle.dumps(layer))
    found = refused(lambda: loaded(torch.randn(2, 8, HIDDEN)))
    loaded.set_tensor_parallel_group(distributed.group.WORLD)
    loaded(torch.randn(2, 8, HIDDEN)).sum().backward()
    return found


def fails(step: str, way: str, how: str) -> str:
    """What the first rank is told when the last one ends or sleeps in a step of a layer."""
    last = distributed.get_rank() == distributed.get_world_size() - 1
    layer = layer_of(way, distributed.new_group(timeout=datetime.timedelta(seconds=HANG)))
    x = torch.randn(2, 8, HIDDEN, requires_grad=True)
    layer(x).sum().backward()

    def fail(*_: object) -> None:
        if how == "ends":
            os._exit(3)
        time.sleep(HANG + 8)

    if last:
        part = layer.self_attention.core_attention
        if step == "forward":
            part.register_forward_hook(fail)
        else:
            part.register_full_backward_hook(fail)
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        layer(x).sum().backward()
    assert last or time.monotonic() - start < HANG + 8
    return str(error.value)


def test_a_tensor_rank_with_other_arguments_is_named_on_every_rank_with_the_argument_and_the_values() -> None:
    *found, attentions, unchecked, loaded = run_ranks(
        2, by_parallelize, by_group, attention_modules, without_comparison, pickled
    )
    for answers in found:
        for answer in answers:
            assert isinstance(answer, dict), answer
            for name, text in answer.items():
                assert text.startswith(f"{name} must be the same on every rank, got "), text
                assert "on rank 0; " in text, text
            assert answer["window_size"].endswith("got None on rank 0; (2, 0) on rank 1")
            assert answer["cu_seqlens_q"].endswith("got None on rank 0; [3], torch.int64, [0, 3, 7] on rank 1")
            assert answer["training"].endswith("got True on rank 0; False on rank 1")
            assert answer["layer"].endswith("got TransformerLayer 1 on rank 0; TransformerLayer 2 on rank 1")
    for answer in attentions:
        assert answer[0] == "window_size must be the same on every rank, got (2, 0) on rank 0; (1, 0) on rank 1", answer
        assert answer[1].startswith("layer.core_attention must be the same on every rank, got DotProductAttention("), (
            answer
        )
    assert unchecked == [[True, True]] * 2, unchecked
    for answer in loaded:
        assert answer.startswith("tp_group must be set before a call with tp_size=2"), answer


def ends_in_forward_of_parallelize() -> str:
    return fails("forward", "parallelize", "ends")


def ends_in_forward_of_group() -> str:
    return fails("forward", "group", "ends")


def ends_in_backward_of_parallelize() -> str:
    return fails("backward", "parallelize", "ends")


def ends_in_backward_of_group() -> str:
    return fails("backward", "group", "ends")


def sleeps_in_forward_of_group() -> str:
    return fails("forward", "group", "sleeps")


def sleeps_in_backward_of_parallelize() -> str:
    return fails("backward", "parallelize", "sleeps")


STEPS = {
    ends_in_forward_of_parallelize: "the sum of outputs in TransformerLayer 1",
    ends_in_forward_of_group: "the sum of outputs in TransformerLayer 1",
    ends_in_backward_of_parallelize: "the gradient of the gather of hidden states in TransformerLayer 1",
    ends_in_backward_of_group: "the gradient of the gather of hidden states in TransformerLayer 1",
    sleeps_in_forward_of_group: "the sum of outputs in TransformerLayer 1",
    sleeps_in_backward_of_parallelize: "the gradient of the gather of hidden states in TransformerLayer 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("function", STEPS, ids=lambda function: function.__name__)
def test_a_tensor_rank_that_fails_inside_a_layer_is_named_with_the_step(function: Callable[[], str]) -> None:
    (answers,) = run_ranks(3, function)
    for rank, text in enumerate(answers[:2]):
        expected = f"rank {rank} of 3: {STEPS[function]} failed: rank 2 ended or did not take part in time\n  CAUSE: "
        assert text.startswith(expected), text
    if "sleeps" in function.__name__:  # and what it meets when it wakes up
        assert "failed: rank 2 (this one) ended or did not take part in time" in answers[2], answers[2]


def test_other_errors_pass_and_a_mesh_of_several_axes_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"^a matrix of another size$"), rank_errors("the training step"):
        raise RuntimeError("a matrix of another size")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
        with pytest.raises(InputError, match="group must be a mesh with one axis, got 2 axes"):
            rank_errors("the training step", mesh)
        with pytest.raises(InputError, match=r"group must have 1 axis for strategy='ring', got 2 \('data', 'tensor'\)"):
            ContextParallel(mesh)
    finally:
        distributed.destroy_process_group()


CHECKPOINT_STEPS = ("saving the checkpoint of step 2", "finding the checkpoint to load")


def without_a_rank(call: Callable[[str, torch.nn.Module], object]) -> str:
    """What the first ranks are told when the last one has ended before a call with a folder of checkpoints."""
    layer, folders = torch.nn.Linear(4, 4), [tempfile.mkdtemp()]
    distributed.broadcast_object_list(folders, src=0)
    save_checkpoint(folders[0], 1, layer)
    if distributed.get_rank() == distributed.get_world_size() - 1:
        os._exit(3)
    with pytest.raises(RankError) as error:
        call(folders[0], layer)
    return str(error.value)


def saves() -> str:
    return without_a_rank(lambda folder, layer: save_checkpoint(folder, 2, layer))


def loads() -> str:
    return without_a_rank(load_checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "step"), [(saves, CHECKPOINT_STEPS[0]), (loads, CHECKPOINT_STEPS[1])])
def test_a_rank_that_ends_before_a_checkpoint_is_named(function: Callable[[], str], step: str) -> None:
    (answers,) = run_ranks(3, function)
    for rank, text in enumerate(answers[:2]):
        assert text.startswith(f"rank {rank} of 3: {step} failed: rank 2 ended or did not take part in time"), text
