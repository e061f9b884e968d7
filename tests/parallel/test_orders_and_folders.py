"""Meshes whose processes do not ascend, and checkpoint folders and steps that differ between processes, are refused."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

import undivided
from undivided.parallel import checkpoint_steps, load_checkpoint, parallelize, save_checkpoint


def error_of(call: Callable[[], object]) -> str:
    """The type and the text of the error of a call; "" if there is none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def divided() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = undivided.TransformerLayer(32, 64, 4, attn_input_format="bshd")
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tensor",))
    return parallelize(layer, mesh)


def own_parts(layer: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.to_local().clone() for parameter in layer.parameters() if isinstance(parameter, DTensor)]


def errors_of_orders() -> list[str]:
    layer = undivided.TransformerLayer(32, 64, 4, attn_input_format="bshd")
    snake = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=("data", "tensor"))
    found = [error_of(lambda: parallelize(layer, snake["tensor"]))]
    linear = torch.nn.Linear(4, 4)
    backwards = DeviceMesh("cpu", [3, 2, 1, 0])

    def divide(name: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(key, torch.nn.Parameter(part))

    distribute_module(linear, backwards, divide)
    return [*found, error_of(lambda: save_checkpoint("not written", 1, linear))]


def errors_of_folders(folder: str) -> list[str]:
    """Saves that differ between the ranks after one that does not, then loads."""
    rank, layer, shared = torch.distributed.get_rank(), divided(), Path(folder) / "shared"
    found = [
        error_of(lambda: save_checkpoint(shared, 1, layer)),
        error_of(lambda: save_checkpoint(shared, 2, layer, keep=1)),
        error_of(lambda: save_checkpoint(shared, 3 + rank, layer, keep=1)),
        error_of(lambda: save_checkpoint(shared if rank == 0 else shared.with_name("own"), 5, layer, keep=1)),
        str(checkpoint_steps(shared)),
        error_of(lambda: save_checkpoint(shared, 6, layer)),
    ]
    before = own_parts(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(1)
    changed = own_parts(layer)
    found += [error_of(lambda: load_checkpoint(shared, layer, step=2 if rank == 0 else 6))]
    if rank == 1:
        shared.with_name("other").mkdir()
    os.chdir(folder if rank == 0 else shared.with_name("other"))  # each machine has a folder of this name of its own
    found.append(error_of(lambda: load_checkpoint(shared.name, layer)))
    kept = own_parts(layer)
    load_checkpoint(shared, layer)
    loaded = own_parts(layer)
    return [*found, str(_equal(kept, changed)), str(_equal(loaded, before))]


def _equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def test_processes_that_do_not_ascend_are_refused_on_all_ranks() -> None:
    """FSDP gathered halves of different parameters, and checkpoints had the parts of other ranks."""
    (found,) = run_ranks(4, errors_of_orders)
    for of_parallelize, of_checkpoint in found:
        assert "mesh must have processes whose numbers ascend along every axis" in of_parallelize
        assert "model must have processes whose numbers ascend along every axis" in of_checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(2, functools.partial(errors_of_folders, str(tmp_path_factory.mktemp("checkpoints"))))[0]


def test_a_save_into_several_folders_is_an_error_and_deletes_nothing(folders: list[Any]) -> None:
    """It succeeded, deleted the checkpoints before it, and could not be loaded."""
    for first, second, step, folder, steps, again, *_ in folders:
        assert (first, second, again) == ("", "", "")
        assert step.startswith("InputError: step must be the same on all ranks, got 3 on rank 0, 4 on rank 1")
        assert "__1_0.distcp (absent)" in folder
        assert "HINT: save to a folder that all ranks share" in folder
        assert steps == "[2]"


def test_a_load_that_differs_between_ranks_is_an_error_on_all_before_anything_is_loaded(folders: list[Any]) -> None:
    """Half of each tensor came from another step; or one rank waited for the timeout of the group."""
    for *_, step, _folder, kept, loaded in folders:
        assert step.startswith("InputError: step must be the same on all ranks, got 2 on rank 0, 6 on rank 1")
        assert (kept, loaded) == ("True", "True")
    assert folders[0][-3].startswith("RankError: another rank failed: rank 1: folder must have step-00000006 on every")
    assert folders[1][-3].startswith("InputError: folder must have step-00000006 on every rank, got FileNotFoundError")
