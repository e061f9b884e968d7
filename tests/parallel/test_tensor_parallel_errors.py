"""Layers that a mesh cannot divide, ranks whose inputs differ, and a rank that ends."""

from __future__ import annotations

import functools
import os
import re
import unittest.mock
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from tensor_layers import BATCH, HIDDEN, LENGTH, make_layer
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrizations, parametrize, prune

import undivided
from undivided import InputError, TransformerLayer
from undivided.context_parallel import RankError
from undivided.parallel import clip_grad_norm_, own_state_dict, parallelize, save_checkpoint, whole_state_dict


def uneven_batches() -> list[str]:
    """The errors of ranks with other shapes of hidden states, by both ways, with and without sequence parallelism."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    mesh, found = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",)), []
    for sequence_parallel in (False, True):
        layers = [
            make_layer({}, "bshd"),
            make_layer(
                {},
                "bshd",
                tp_group=distributed.group.WORLD,
                set_parallel_mode=True,
                sequence_parallel=sequence_parallel,
            ),
        ]
        parallelize(layers[0], mesh, sequence_parallel)
        for layer in layers:
            with pytest.raises(InputError) as error:
                layer(torch.randn(BATCH + rank, LENGTH, HIDDEN))
            found.append(str(error.value))
            layer(torch.randn(BATCH, LENGTH, HIDDEN))  # the next call works
    return found


def test_other_shapes_on_another_rank_are_an_error_on_every_rank() -> None:
    """gloo ended the processes: its thread met a message of another size than its own."""
    (answers,) = run_ranks(2, uneven_batches)
    found = "[2, 8, 32], torch.float32 on rank 0; [3, 8, 32], torch.float32 on rank 1"
    for answer in answers:
        assert answer == [f"hidden_states must be the same on every rank, got {found}"] * 4, answer


def a_rank_that_ends() -> str:
    """What the other rank is told."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tensor",))
    layer = parallelize(make_layer({}, "bshd"), mesh)
    layer(torch.randn(BATCH, LENGTH, HIDDEN))
    if distributed.get_rank() == 1:
        os._exit(3)
    with pytest.raises(RankError) as error:
        layer(torch.randn(BATCH, LENGTH, HIDDEN))
    return str(error.value)


def test_a_tensor_rank_that_ended_is_named() -> None:
    ((text, ended),) = run_ranks(2, a_rank_that_ends)
    assert ended is None
    assert re.match(r"rank 0 of 2: the comparison of arguments of TransformerLayer 1 with rank 1 failed: ", text), text


@pytest.fixture
def mesh() -> Any:
    """A mesh that claims four ranks, for checks that come before communication."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    one = init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
    with unittest.mock.patch.object(type(one), "size", return_value=4):
        yield one
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 2}, "num_attention_heads must be a multiple of the 4 ranks of mesh, got 2"),
        ({"ffn_hidden_size": 66}, "ffn_hidden_size must be a multiple of the 4 ranks of mesh, got 66"),
        ({"num_attention_heads": 12, "hidden_size": 48, "num_gqa_groups": 3}, "num_gqa_groups must be a multiple or a"),
        ({"fuse_qkv_params": True, "qkv_weight_interleaved": False}, "qkv_weight_interleaved must be True"),
        (
            {"fuse_qkv_params": True, "num_gqa_groups": 2},
            "num_gqa_groups must be a multiple of the 4 ranks of mesh with",
        ),
    ],
)
def test_layers_that_the_ranks_do_not_divide_are_refused(mesh: Any, changes: dict[str, Any], message: str) -> None:
    sizes = {"hidden_size": HIDDEN, "ffn_hidden_size": 64, "num_attention_heads": 4, "attn_input_format": "bshd"}
    layer = TransformerLayer(**sizes | {"hidden_dropout": 0.0, "attention_dropout": 0.0} | changes)
    with pytest.raises(InputError, match=re.escape(message)):
        parallelize(layer, mesh)
    assert all(type(p) is torch.nn.Parameter for p in layer.parameters())


def _share(layers: torch.nn.Sequential) -> None:
    layers[1].layernorm_mlp.fc1_weight = layers[0].layernorm_mlp.fc1_weight


def _share_within(layers: torch.nn.Sequential) -> None:
    layers[1].qkv.key_weight = layers[1].qkv.query_weight


LOST: dict[str, tuple[Callable[[torch.nn.Sequential], object], str]] = {
    "shared": (
        _share,
        r"have each parameter of its layers in one place, got the same one as 0\..*fc1_weight and 1\..*fc1_weight",
    ),
    "shared-in-a-module": (_share_within, r"have each parameter .*, got the same one as 1\..*_weight and 1\..*_weight"),
    "hook": (
        lambda layers: layers[1].proj.bias.register_hook(print),
        r"have no hooks on .*, got hooks on 1\.proj\.bias",
    ),
    "accumulation-hook": (
        lambda layers: layers[1].proj.bias.register_post_accumulate_grad_hook(print),
        r"have no hooks on .*, got hooks on 1\.proj\.bias",
    ),
}


@pytest.mark.parametrize("name", LOST)
def test_parameters_with_what_their_replacements_would_lose_are_refused(mesh: Any, name: str) -> None:
    """Two layers were no longer tied, and hooks were not called any more."""
    change, message = LOST[name]
    attention = undivided.MultiheadAttention(HIDDEN, 4, qkv_format="bshd")
    model = torch.nn.Sequential(make_layer({}, "bshd"), make_layer({}, "bshd") if name == "shared" else attention)
    change(model)
    with pytest.raises(InputError, match=f"module must {message}"):
        parallelize(model, mesh)
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())


def test_a_layer_is_divided_in_one_way_only(mesh: Any) -> None:
    layer = TransformerLayer(HIDDEN, 64, 4, attn_input_format="bshd", tp_size=2, set_parallel_mode=True)
    with pytest.raises(InputError, match="tp_size must be 1 for parallelize, got 2"):
        parallelize(layer, mesh)
    whole = TransformerLayer(HIDDEN, 64, 4, attn_input_format="bshd")
    with pytest.raises(InputError, match="tp_group must be set before a call with tp_size=2"):
        own_state_dict(layer, whole.state_dict())
    with pytest.raises(InputError, match="tp_group must have the 2 ranks of tp_size, got 1"):
        layer.set_tensor_parallel_group(distributed.group.WORLD)
    with pytest.raises(InputError, match="tp_group must contain this process"):
        layer.set_tensor_parallel_group(distributed.GroupMember.NON_GROUP_MEMBER)
    with unittest.mock.patch.object(type(mesh), "size", return_value=1):
        parallelize(whole, mesh)
    with pytest.raises(InputError, match="tp_group must not be set after parallelize, got ProcessGroup"):
        whole.set_tensor_parallel_group(distributed.group.WORLD)


def test_parametrized_weights_are_refused(mesh: Any, tmp_path: Path) -> None:
    """Ranks would have parts of the weights that they are computed from, and count those as whole."""
    message = (
        r"module must have no parametrized weights in layers that ranks divide, got .*{}\n.*remove_parametrizations"
    )
    layer = TransformerLayer(HIDDEN, 64, 4, attn_input_format="bshd")
    parametrizations.weight_norm(layer.self_attention.proj, "weight")
    with pytest.raises(InputError, match=message.format("proj.weight")):
        parallelize(layer, mesh)
    layer = TransformerLayer(HIDDEN, 64, 4, attn_input_format="bshd", tp_size=2, set_parallel_mode=True)
    parametrizations.weight_norm(layer.layernorm_mlp, "fc1_weight")
    calls: list[Callable[[], object]] = [
        lambda: clip_grad_norm_(layer, 1.0),
        lambda: save_checkpoint(tmp_path, 1, layer),
        lambda: whole_state_dict(layer),
        lambda: own_state_dict(layer, {}),
    ]
    for call in calls:
        with pytest.raises(InputError, match=message.format("layernorm_mlp.fc1_weight")):
            call()


def weight_norm(block: torch.nn.Module, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(block, name)


HOOKS: dict[str, Callable[[torch.nn.Module, str], Any]] = {
    "weight_norm": weight_norm,
    "spectral_norm": torch.nn.utils.spectral_norm,
    "prune": functools.partial(prune.random_unstructured, amount=0.5),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_weights_that_a_hook_computes_are_refused(mesh: Any, tmp_path: Path, hook: str) -> None:
    """The older functions of torch.nn.utils leave no parametrization."""
    message = r"module must have no parametrized weights in layers that ranks divide, got {}\n.*remove_weight_norm"
    layer = TransformerLayer(HIDDEN, 64, 4, attn_input_format="bshd")
    HOOKS[hook](layer.self_attention.proj, "weight")
    layer(torch.randn(BATCH, LENGTH, HIDDEN))
    with pytest.raises(InputError, match=message.format("proj.weight")):
        parallelize(layer, mesh)
    layer = TransformerLayer(HIDDEN, 64, 4, attn_input_format="bshd", tp_size=2, set_parallel_mode=True)
    HOOKS[hook](layer.layernorm_mlp, "fc1_weight")
    calls: list[Callable[[], object]] = [
        lambda: clip_grad_norm_(layer, 1.0),
        lambda: save_checkpoint(tmp_path, 1, layer),
        lambda: whole_state_dict(layer),
        lambda: own_state_dict(layer, {}),
    ]
    for call in calls:
        with pytest.raises(InputError, match=message.format("layernorm_mlp.fc1_weight")):
            call()


class Summand(torch.nn.Module):
    """A parametrization whose result is a sum over ranks."""

    def forward(self, weight: Any) -> Any:
        return DTensor.from_local(weight.to_local(), weight.device_mesh, [Partial()], run_check=False)


def test_summands_of_a_weight_are_not_used_as_the_weight(mesh: Any) -> None:
    layer = TransformerLayer(HIDDEN, 64, 4, attn_input_format="bshd")
    with unittest.mock.patch.object(type(mesh), "size", return_value=1):
        parallelize(layer, mesh)
        parametrize.register_parametrization(layer.layernorm_mlp, "fc1_weight", Summand(), unsafe=True)
        with pytest.raises(InputError, match=r"have parameters that are sharded or replicated, got P\(sum\)"):
            layer(torch.randn(BATCH, LENGTH, HIDDEN))


def place(block: torch.nn.Module, name: str, mesh: Any, placement: Any) -> None:
    value = block.get_parameter(name).detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    block.register_parameter(name, torch.nn.Parameter(distribute_tensor(value, mesh, [placement])))


def misplaced_parameters() -> list[str]:
    """The errors of layers whose parameters are placed otherwise than `parallelize` places them."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)), []
    whole, columns, rows = (parallelize(make_layer({}, "bshd"), mesh) for _ in range(3))
    for name in ("fc1_weight", "fc1_bias", "fc2_weight"):
        place(whole.layernorm_mlp, name, mesh, Replicate())
    place(columns.self_attention.proj, "weight", mesh, Shard(0))
    place(rows.layernorm_mlp, "layer_norm_weight", mesh, Shard(0))
    undivided_attention = undivided.MultiheadAttention(HIDDEN, 4, qkv_format="bshd")
    place(undivided_attention.proj, "weight", mesh, Shard(0))
    for layer in (whole, columns, rows, undivided_attention):
        with pytest.raises(InputError) as error:
            layer(torch.randn(BATCH, LENGTH, HIDDEN))
        found.append(str(error.value))
    return found


def test_parameters_that_are_placed_otherwise_are_refused() -> None:
    """Without an error, the feed-forward block returned twice its output, or the projection half of its features."""
    expected = [
        "module must have fc1_weight sharded on axis 0 over its 2 tensor ranks, got R over 2 ranks",
        "module must have weight sharded on axis 1 over its 2 tensor ranks, got S(0) over 2 ranks",
        "module must have the whole layer_norm_weight on every rank, got S(0) over 2 ranks",
        "module must have the whole weight on every rank, got S(0) over 2 ranks",
    ]
    for found in run_ranks(2, misplaced_parameters)[0]:
        assert isinstance(found, list), found
        for text, message in zip(found, expected, strict=True):
            assert text.startswith(message), text
            assert "HINT: undivided.parallel.parallelize(module, mesh)" in text


def test_a_module_without_layers_and_a_wrong_mesh_are_refused(mesh: Any) -> None:
    with pytest.raises(InputError, match="module must contain a layer of undivided, got Linear"):
        parallelize(torch.nn.Linear(2, 2), mesh)
    with pytest.raises(InputError, match="mesh must be a DeviceMesh with one axis, got int"):
        parallelize(undivided.MultiheadAttention(HIDDEN, 4, qkv_format="bshd"), 4)  # type: ignore[arg-type]
