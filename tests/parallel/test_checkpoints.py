"""Checkpoints of training: saved on one mesh and loaded on another, an interrupted save, and wrong input."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gloo_ranks import losses_of, run_ranks
from torch import distributed, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from undivided import ContextParallel, InputError, RotaryPositionEmbedding, TransformerLayer, masks
from undivided.parallel import (
    checkpoint_steps,
    load_checkpoint,
    own_state_dict,
    parallelize,
    save_checkpoint,
    whole_state_dict,
)
from undivided.parallel.checkpoint import folder as folders
from undivided.parallel.checkpoint.state import Header

HIDDEN, VOCABULARY, LENGTH = 32, 31, 24
Mesh = tuple[int, int, int]
"""Ranks of the axes data, context and tensor."""
WAYS: dict[str, dict[str, Any]] = {
    "parallelize": {"num_gqa_groups": 2},
    "tp_group": {"num_gqa_groups": 4, "fuse_qkv_params": True, "qkv_weight_interleaved": False},
}


class Model(nn.Module):
    """The logits of the next token; its layers have gated activations, biases and learnable sinks."""

    def __init__(self, way: str, hidden: int = HIDDEN, layers: int = 2, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(
            TransformerLayer(
                hidden,
                48,
                4,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                activation="swiglu",
                softmax_type="learnable",
                qk_norm_type="RMSNorm",
                attn_input_format="bshd",
                **{**WAYS[way], **options},
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, VOCABULARY)
        self.rotary = RotaryPositionEmbedding(hidden // 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, freqs = self.embedding(tokens), self.rotary(LENGTH)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=freqs)
        logits: torch.Tensor = self.head(x)
        return logits


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """With moments that decide the next steps, and two groups."""
    others = [p for name, p in model.named_parameters() if not name.startswith("head")]
    return torch.optim.AdamW([{"params": others}, {"params": model.head.parameters(), "lr": 3e-3}], lr=1e-2)


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


@pytest.mark.parametrize("way", WAYS)
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


def trained(folder: Path | str, *steps: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that were saved after some steps."""
    model = Model("parallelize", **options)
    optimizer = adam(model)
    for step in steps:
        save_checkpoint(folder, step, model, optimizer)
    return model, optimizer


def numbers(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("moment", ["writing", "renaming", "deleting"])
def test_an_interrupted_save_leaves_the_checkpoint_before_it(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(tmp_path, 4)
    saved = numbers(model)
    with torch.no_grad():
        model.head.bias.add_(1)

    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    place: tuple[Any, str] = {
        "writing": (dcp.FileSystemWriter, "finish"),  # all ranks have written their files
        "renaming": (folders, "_write_to_disk"),
        "deleting": (Path, "rename"),
    }[moment]
    # the same step again: the one before has to stay until the new one is complete
    calls = {"renaming": 4, "deleting": 4, "writing": 5}
    with monkeypatch.context() as patched:
        if moment == "deleting":  # after the old one was renamed, before the new one is
            rename, count = Path.rename, iter(range(9))
            patched.setattr(Path, "rename", lambda *a: interrupt() if next(count) == 1 else rename(*a))
        else:
            patched.setattr(*place, interrupt)
        with pytest.raises((KeyboardInterrupt, dcp.api.CheckpointException)):
            save_checkpoint(tmp_path, calls[moment], model, optimizer)
    assert checkpoint_steps(tmp_path) == [4]
    found = load_checkpoint(tmp_path, model, optimizer)
    assert found is not None
    expected = saved[-1] + 1 if moment == "renaming" else saved[-1]  # complete before the interruption
    assert torch.equal(model.head.bias, expected)
    save_checkpoint(tmp_path, calls[moment], model, optimizer)
    assert not [
        path.name for path in tmp_path.iterdir() if not path.name.startswith("step-0000000") or "." in path.name
    ]


def test_earlier_checkpoints_are_deleted_after_a_new_one_is_complete(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path, 2, 4, 6, 100)
    save_checkpoint(tmp_path, 8, model, optimizer, keep=2)
    assert checkpoint_steps(tmp_path) == [6, 8, 100]


def test_only_parameters_are_loaded_without_an_optimizer(tmp_path: Path) -> None:
    model, _ = trained(tmp_path, 4)
    other = Model("parallelize")
    for parameter in other.parameters():
        parameter.data.zero_()
    assert load_checkpoint(tmp_path, other) == (4, {})
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert load_checkpoint(tmp_path / "other", other) is None


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_with_all_names_and_sizes(tmp_path: Path) -> None:
    trained(tmp_path, 4)

    def load(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> str:
        before = numbers(model)
        message = refused(lambda: load_checkpoint(tmp_path, model, optimizer, **options))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return message

    found = load(Model("parallelize", layers=3))
    assert found.startswith(
        "model must have the 42 parameters of step-00000004, got 19 that the checkpoint lacks: layers.2."
    )
    assert "and 13 more\n  HINT: build the model of the checkpoint: the same number of layers" in found
    assert "without 19 that it has: layers.1." in load(Model("parallelize", layers=1))
    found = load(Model("parallelize", hidden=64))
    assert "embedding.weight [31, 64] instead of [31, 32]" in found
    assert "HINT: build the model of the checkpoint: the same hidden size" in found
    fused = load(Model("parallelize", fuse_qkv_params=True))
    assert "lacks: layers.0.self_attention.layernorm_qkv.bias" in fused
    assert "HINT: undivided.integrations.checkpoints.from_transformer_engine" in fused
    model = Model("parallelize")
    found = load(model, torch.optim.Adagrad(model.parameters()))
    assert (
        "optimizer must have the 123 tensors of step-00000004, got 41 that the checkpoint lacks: embedding.weight.sum"
        in found
    )
    assert "HINT: build the optimizer of the checkpoint" in found
    assert load(model, step=5) == "step must be that of a complete checkpoint (4), got 5"
    theirs = nn.Module()
    theirs.q_proj = nn.Linear(2, 2)
    other = tmp_path / "theirs"
    save_checkpoint(other, 0, theirs)
    message = refused(lambda: load_checkpoint(other, Model("parallelize")))
    assert "HINT: undivided.integrations.checkpoints.from_hugging_face(state, model)" in message
    message = refused(lambda: load_checkpoint(other, theirs, torch.optim.Adam(theirs.parameters())))
    assert message == "optimizer must be None, because step-00000000 has no optimizer state, got an optimizer"


def test_damaged_and_foreign_checkpoints_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path, 4)
    (file,) = (tmp_path / "step-00000004").glob("*.distcp")
    os.truncate(file, file.stat().st_size - 1)
    found = refused(lambda: load_checkpoint(tmp_path, model, optimizer))
    assert found.startswith("folder must have all files of step-00000004, got damaged: __0_0.distcp (")
    assert found.endswith("\n  HINT: copy it again, or pass an earlier step")
    file.unlink()
    assert "__0_0.distcp (absent)" in refused(lambda: load_checkpoint(tmp_path, model, optimizer))
    shutil.rmtree(tmp_path / "step-00000004")
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "step-4")
    assert "have checkpoints of save_checkpoint, got step-4" in refused(lambda: load_checkpoint(tmp_path, model))


class Evil:
    """Unpickling it without restrictions creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_checkpoint_runs_no_code_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch unpickles the list of contents, and entries that are not tensors, without restrictions."""
    model, mark = nn.Linear(2, 2), tmp_path / "mark"
    save_checkpoint(tmp_path, 1, model)
    contents = tmp_path / "step-00000001" / ".metadata"
    right = contents.read_bytes()
    for wrong in (pickle.dumps(Evil(mark)), right[: len(right) // 2], b"", b"\xff", pickle.dumps(3)):
        contents.write_bytes(wrong)
        assert "have the contents of a checkpoint in step-00000001/.metadata" in refused(
            lambda: load_checkpoint(tmp_path, model)
        )
    metadata = pickle.loads(right)
    for index, place in metadata.storage_data.items():
        metadata.storage_data[index] = dataclasses.replace(place, relative_path=f"../{place.relative_path}")
    contents.write_bytes(pickle.dumps(metadata))
    assert "got a file in another folder, ../__0_0.distcp" in refused(lambda: load_checkpoint(tmp_path, model))
    monkeypatch.setattr(Header, "to_bytes", lambda self: Evil(mark))
    save_checkpoint(tmp_path, 2, model)
    with pytest.raises((InputError, CheckpointException), match="have checkpoints of tensors and plain values"):
        load_checkpoint(tmp_path, model)
    assert not mark.exists()


def test_wrong_arguments_of_checkpoints_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    file = tmp_path / "file"
    file.touch()
    wrong: list[tuple[str, Callable[[], object]]] = [
        ("step must be an int of at least 0, got -1", lambda: save_checkpoint(tmp_path, -1, model)),
        ("step must be an int of at least 0, got True", lambda: load_checkpoint(tmp_path, model, step=True)),
        (
            "keep must be a positive number of checkpoints or None, got 0",
            lambda: save_checkpoint(tmp_path, 1, model, keep=0),
        ),
        ("model must be a torch.nn.Module, got dict", lambda: save_checkpoint(tmp_path, 1, {})),  # type: ignore[arg-type]
        ("optimizer must be a torch.optim.Optimizer or None, got list", lambda: load_checkpoint(tmp_path, model, [])),  # type: ignore[arg-type]
        ("folder must be a path, got int", lambda: checkpoint_steps(3)),  # type: ignore[arg-type]
        ("folder must be a folder, got the file file", lambda: load_checkpoint(file, model)),
        ("values must be a dictionary of tensors", lambda: save_checkpoint(tmp_path, 1, model, values=[1])),  # type: ignore[arg-type]
        ("got a dictionary of Linear", lambda: save_checkpoint(tmp_path, 1, model, values={"model": model})),
    ]
    for message, call in wrong:
        assert message in refused(call)
    assert checkpoint_steps(tmp_path) == []
