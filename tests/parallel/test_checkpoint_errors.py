"""Checkpoints after an interrupted save, damaged files, files with code in them, and wrong input."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_models import Model, refused, trained
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from undivided import InputError
from undivided.parallel import checkpoint_steps, load_checkpoint, save_checkpoint
from undivided.parallel.checkpoint import folder as folders
from undivided.parallel.checkpoint.state import Header


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
        "renaming": (folders, "_sync_names"),
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


def test_a_file_that_cannot_be_read_is_an_input_error(tmp_path: Path) -> None:
    """PyTorch's error is a BaseException, which no fallback to an earlier step catches."""
    model, optimizer = trained(tmp_path, 4)
    (file,) = (tmp_path / "step-00000004").glob("*.distcp")
    content = bytearray(file.read_bytes())
    end = content.rindex(b"PK\x05\x06")  # of the last archive
    content[end : end + 4] = b"\0\0\0\0"
    file.write_bytes(content)
    found = refused(lambda: load_checkpoint(tmp_path, model, optimizer))
    assert found.startswith("folder must have readable files of step-00000004, got ")
    assert "pass an earlier step" in found


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
