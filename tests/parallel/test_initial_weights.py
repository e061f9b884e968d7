"""Initial weights on ranks: other numbers in each part, the same ones in each copy."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from tensor_layers import BATCH, HIDDEN, LENGTH
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from undivided import InputError, TransformerLayer
from undivided.nn.blocks.initial_weights import DividedInit
from undivided.parallel import parallelize


def make_layer(**options: Any) -> TransformerLayer:
    return TransformerLayer(HIDDEN, 64, 4, attn_input_format="bshd", attention_dropout=0.0, **options)


def local(parameter: Any) -> torch.Tensor:
    part: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part.detach().contiguous()


def differ(parameter: Any) -> bool:
    """Whether all ranks have other numbers, as this rank sees it."""
    return _distinct(parameter) == distributed.get_world_size()


def agree(parameter: Any) -> bool:
    """Whether all ranks have the same numbers."""
    return _distinct(parameter) == 1


def _distinct(parameter: Any) -> int:
    own = local(parameter)
    parts = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, own)
    return len({part.numpy().tobytes() for part in parts})


def divided_weights(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attention, layer.layernorm_mlp
    return [attention.layernorm_qkv.query_weight, attention.proj.weight, mlp.fc1_weight, mlp.fc2_weight]


def with_a_later_group() -> list[bool]:
    """Whether parts from equal seeds differ if the group is set later, and are those of a layer that is built with
    the group."""
    found = []
    for device in ("meta", "cpu"):
        torch.manual_seed(0)
        layer = make_layer(tp_size=2, set_parallel_mode=True, device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer.set_tensor_parallel_group(distributed.group.WORLD)
        if device == "meta":
            layer.to_empty(device="cpu")
            layer.reset_parameters()
        found += [differ(weight) for weight in divided_weights(layer)]
    torch.manual_seed(0)
    built = make_layer(tp_group=distributed.group.WORLD, set_parallel_mode=True)
    found += [torch.equal(a, b) for a, b in zip(layer.parameters(), built.parameters(), strict=True)]
    return found


def of_dtensors() -> list[bool]:
    """Whether parts differ for equal seeds and copies agree for other seeds, after `parallelize` on the meta device."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    layer = parallelize(make_layer(num_gqa_groups=1, device="meta"), mesh)
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    layer.reset_parameters()
    found = [differ(weight) for weight in divided_weights(layer)]
    torch.manual_seed(distributed.get_rank())
    layer.reset_parameters()
    projections = layer.self_attention.layernorm_qkv
    found += [agree(projections.key_weight), agree(projections.value_weight), agree(layer.layernorm_mlp.fc2_bias)]
    return found + [differ(weight) for weight in divided_weights(layer)]


def of_shards() -> list[bool]:
    """The same of FSDP2, alone and around a layer with a group."""
    meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    found = []
    for options in ({}, {"tp_group": meshes.get_group("tensor"), "set_parallel_mode": True}):
        layer = make_layer(device="meta", **options)
        fully_shard(layer, mesh=meshes["data"])
        layer.to_empty(device="cpu")
        torch.manual_seed(0)
        layer.reset_parameters()
        found += [differ(weight) for weight in divided_weights(layer)]
    return found


def after_pickling() -> tuple[str, str]:
    """The errors of a parallelized layer that was pickled, and of its group."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    loaded = pickle.loads(pickle.dumps(parallelize(make_layer(), mesh)))
    with pytest.raises(InputError) as error:
        loaded(torch.randn(BATCH, LENGTH, HIDDEN))
    with pytest.raises(InputError) as other:
        loaded.set_tensor_parallel_group(distributed.group.WORLD)
    return str(error.value), str(other.value)


def test_ranks_draw_other_parts_and_the_same_copies() -> None:
    later, dtensors, shards, pickled = run_ranks(2, with_a_later_group, of_dtensors, of_shards, after_pickling)
    for answers in (later, dtensors, shards):
        for answer in answers:
            assert isinstance(answer, list), answer
            assert all(answer), answer
    for answer in pickled:
        assert isinstance(answer, tuple), answer
        assert answer[0].startswith("module must have the 2 ranks of parallelize, got a layer that was pickled")
        assert "HINT: build a new layer and parallelize it; save_checkpoint and load_checkpoint keep" in answer[0]
        assert "tp_group must not be set after parallelize" in answer[1]


class Group:
    """The processes of a group."""

    def __init__(self, *processes: int) -> None:
        self.processes = processes


def test_equal_parts_of_ranks_that_are_not_consecutive_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "get_process_group_ranks", lambda group: list(group.processes))
    draw = DividedInit(torch.nn.init.normal_, 2, None, None)
    assert not draw.may_be_equal(Group(0, 2))  # type: ignore[arg-type]
    draw(torch.empty(2))
    assert draw.may_be_equal(Group(2, 3))  # type: ignore[arg-type]
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_rank", lambda: 3)
    draw(torch.empty(2))
    assert draw.may_be_equal(Group(1, 3))  # type: ignore[arg-type]
    assert not draw.may_be_equal(Group(2, 3))  # type: ignore[arg-type]


def test_weights_drawn_before_torch_distributed_warn_of_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(tp_size=2, set_parallel_mode=True)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        with pytest.warns(UserWarning, match=r"were drawn before its tensor parallel rank was known.*reset_parameters"):
            layer.set_tensor_parallel_group(distributed.group.WORLD)
        layer.reset_parameters()
        layer.set_tensor_parallel_group(distributed.group.WORLD)
    finally:
        distributed.destroy_process_group()
