"""Checkpoints of training: saved on one mesh and loaded on another, and read without this library."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_models import LENGTH, VOCABULARY, WAYS, Model, adam, refused
from gloo_ranks import losses_of, run_ranks
from tensor_layers import make_layer
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from undivided import ContextParallel, masks
from undivided.parallel import (
    checkpoint_steps,
    load_checkpoint,
    own_state_dict,
    parallelize,
    save_checkpoint,
    whole_state_dict,
)

Mesh = tuple[int, int, int]
"""Ranks of the axes data, context and tensor."""


def divided(way: str, shape: Mesh) -> tuple[nn.Module, ContextParallel | None, int, int]:
    """The model on a mesh, its context ranks, this data rank, and the number of ranks that FSDP averages over."""
    if math.prod(shape) == 1:
        return Model(way), None, 0, 1
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "context", "tensor"))
    if way == "parallelize":
        model = parallelize(Model(way), mesh["tensor"])
    else:
        whole = Model(way).state_dict()
        model = Model(way, tp_group=mesh.get_group("tensor"), set_parallel_mode=True)
        model.load_state_dict(own_state_dict(model, whole) if shape[2] > 1 else whole)
    context = ContextParallel(mesh.get_group("context")).bind(LENGTH, mask=masks.causal())
    shards = mesh["data", "context"]._flatten("shards")
    for layer in model.layers:
        layer.set_context_parallel_group(context)
    if shards.size() > 1:
        for module in (*model.layers, model):
            fully_shard(module, mesh=shards)
    return model, context, mesh["data"].get_local_rank(), shards.size()


def train(way: str, shape: Mesh, folder: str, steps: range, save: bool = True) -> list[float]:
    """The losses of some steps after the newest checkpoint, which has as many as came before."""
    torch.manual_seed(distributed.get_rank() if distributed.is_initialized() else 0)
    model, context, data_rank, share = divided(way, shape)
    optimizer = adam(model)
    if steps.start:
        with torch.no_grad():  # what is loaded has to replace these
            for parameter in model.parameters():
                parameter.zero_()
        found = load_checkpoint(folder, model, optimizer)
        assert found is not None
        assert (found.step, found.values) == (steps.start, {"seen": [steps.start, "steps"]})
    losses = []
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (4, LENGTH), generator=draw).chunk(shape[0])[data_rank]
        labels = tokens * 3 % VOCABULARY
        if context is not None:
            tokens, labels = context.shard(tokens, dim=1), context.shard(labels, dim=1)
        loss = cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / (4 * LENGTH)
        (loss * share).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if distributed.is_initialized():
            distributed.all_reduce(total)
        losses.append(float(total) / shape[2])
    if save:
        save_checkpoint(folder, steps.stop, model, optimizer, values={"seen": [steps.stop, "steps"]})
    return losses


def in_turn(way: str, folder: Path, *meshes: Mesh) -> list[float]:
    """The losses of two steps on each mesh in turn, from the checkpoint of the one before."""
    losses: list[float] = []
    for number, shape in enumerate(meshes):
        run = functools.partial(train, way, shape, str(folder), range(2 * number, 2 * number + 2))
        if math.prod(shape) == 1:
            losses += run()
            continue
        (answers,) = run_ranks(math.prod(shape), run)
        for answer in answers:
            assert isinstance(answer, list), answer
            assert answer == pytest.approx(answers[0], rel=1e-6)
        losses += answers[0]
    return losses


def alone(way: str, folder: Path, steps: int) -> list[float]:
    """The losses of one process without an interruption."""
    return train(way, (1, 1, 1), str(folder), range(steps), save=False)


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way == "tp_group")) for way in WAYS])
def test_training_goes_on_from_two_tensor_ranks_to_one_and_back(way: str, tmp_path: Path) -> None:
    found = in_turn(way, tmp_path, (1, 1, 2), (1, 1, 1), (1, 1, 2))
    assert found == pytest.approx(alone(way, tmp_path, 6), rel=1e-5)
    assert found[0] - found[-1] > 0.1  # Adam has moved the parameters
    assert checkpoint_steps(tmp_path) == [2, 4, 6]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_from_eight_ranks_to_four_and_one_with_other_tensor_ranks(way: str, tmp_path: Path) -> None:
    """FSDP2 over data and context ranks, tensor ranks 2, 4, 1 and 2, Adam's moments of all."""
    found = in_turn(way, tmp_path, (2, 2, 2), (1, 1, 4), (1, 1, 1), (2, 1, 2))
    assert found == pytest.approx(alone(way, tmp_path, 8), rel=1e-5)


@pytest.mark.slow
def test_the_losses_of_the_example_on_three_meshes_are_those_of_one_process() -> None:
    rows = losses_of("23_checkpoint_on_another_mesh.py", 1, pattern=r"^ +\d+ +(\d) .* ([0-9.]+) +([0-9.]+)$")
    assert [ranks for ranks, _, _ in rows] == ["8"] * 4 + ["4"] * 4 + ["1"] * 4
    assert all(abs(float(found) - float(expected)) < 3e-5 for _, found, expected in rows)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_checkpoint_of_ranks_is_that_of_one_process(way: str, tmp_path: Path) -> None:
    """Names, sizes and numbers, read by torch.distributed.checkpoint alone."""
    one, two = tmp_path / "one", tmp_path / "two"
    train(way, (1, 1, 1), str(one), range(2))
    (answers,) = run_ranks(2, functools.partial(train, way, (1, 1, 2), str(two), range(2)))
    assert isinstance(answers[0], list), answers[0]
    states = []
    for folder in (one, two):
        model = Model(way)
        expected = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        path = next(folder.glob("step-*"))
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        moments = {name: torch.zeros(saved[name].size) for name in saved if name.startswith("optimizer.state.")}
        assert len(moments) == 3 * len(list(model.parameters()))
        state = {"model": expected, **moments}
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(state, checkpoint_id=path)
        states.append(state["model"] | moments)
        assert saved.keys() == {*moments, *(f"model.{name}" for name in expected), "undivided"}
    for name, value in states[0].items():
        assert states[1][name].shape == value.shape
        assert float((states[1][name] - value).norm()) <= 1e-4 * float(value.norm()), name


def states_of_wrapped_layers() -> list[str]:
    """What differs between a checkpoint of one process and what ranks gather after loading it, by way of wrapping."""
    whole = make_layer({}, "bshd").state_dict()
    differences = []
    for wrap in WRAPPERS:
        layer = make_layer({}, "bshd", tp_group=distributed.group.WORLD, set_parallel_mode=True)
        layer.reset_parameters()
        model = wrap(layer)
        renamed = {_name(model, name): value for name, value in whole.items()}
        assert renamed.keys() == model.state_dict().keys()
        model.load_state_dict(own_state_dict(model, renamed))
        gathered = whole_state_dict(model)
        differences += [name for name, value in renamed.items() if not torch.equal(gathered.pop(name), value)]
        differences += list(gathered)
    return differences


def _name(model: nn.Module, name: str) -> str:
    """The name of a whole layer's parameter in the state dict of a wrapped layer."""
    return next(key for key in model.state_dict() if key.replace("_orig_mod.", "").removeprefix("0.") == name)


def _with_wrapped_blocks(layer: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    for parent, name in (
        (layer.self_attention, "proj"),
        (layer.self_attention, "layernorm_qkv"),
        (layer, "layernorm_mlp"),
    ):
        setattr(parent, name, wrap(parent.get_submodule(name)))
    return layer


WRAPPERS: list[Callable[[nn.Module], nn.Module]] = [
    checkpoint_wrapper,
    torch.compile,
    lambda layer: nn.Sequential(checkpoint_wrapper(layer)),
    lambda layer: _with_wrapped_blocks(layer, checkpoint_wrapper),
    lambda layer: _with_wrapped_blocks(layer, torch.compile),
    lambda layer: torch.compile(checkpoint_wrapper(_with_wrapped_blocks(layer, checkpoint_wrapper))),
]
"""Recomputed and compiled layers, as a whole and in part."""


def test_whole_checkpoints_of_wrapped_layers_have_the_names_of_their_state_dicts() -> None:
    for differences in run_ranks(2, states_of_wrapped_layers)[0]:
        assert differences == []


def whole_states_of_dtensors() -> list[str]:
    """The errors of functions for plain parameters."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    layer = parallelize(Model("parallelize"), mesh["tensor"])
    sharded = Model("tp_group", tp_group=mesh.get_group("tensor"), set_parallel_mode=True)
    fully_shard(sharded, mesh=mesh["data"])
    calls = (
        lambda: whole_state_dict(layer),
        lambda: own_state_dict(layer, layer.state_dict()),
        lambda: whole_state_dict(sharded),
    )
    return [refused(call) for call in calls]


def test_whole_state_dicts_of_dtensors_are_refused_with_what_to_call() -> None:
    (answers,) = run_ranks(2, whole_states_of_dtensors)
    for answer in answers:
        assert isinstance(answer, list), answer
        for message, layers in zip(answer, ("parallelize", "parallelize", "DTensors"), strict=True):
            assert layers in message.splitlines()[0]
            assert "HINT: get_model_state_dict" in message
