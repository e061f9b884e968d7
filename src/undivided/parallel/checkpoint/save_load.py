"""`save_checkpoint` and `load_checkpoint`: a model and its optimizer, on any mesh."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from undivided.arguments.checks import check_type
from undivided.arguments.signature import checked_call
from undivided.context_parallel.exchange.failures import rank_errors
from undivided.context_parallel.exchange.groups import check_ascending
from undivided.errors import InputError
from undivided.parallel.checkpoint import folder as folders
from undivided.parallel.checkpoint.compare import check_entries, check_files, check_header
from undivided.parallel.checkpoint.divided import DividedTensor, LoadPlanner, SavePlanner
from undivided.parallel.checkpoint.optimizer_state import check_optimizer, state_for_loading, state_for_saving
from undivided.parallel.checkpoint.reader import Reader
from undivided.parallel.checkpoint.state import (
    HEADER,
    Header,
    TrainingState,
    checked_values,
    set_training_state,
    training_state,
)

StrPath = str | os.PathLike[str]


class Checkpoint(NamedTuple):
    """What `load_checkpoint` returns.

    Args:
        step: the number of finished steps.
        values: those that `save_checkpoint` was given.

    >>> Checkpoint(step=12, values={"tokens": 4096}).values["tokens"]
    4096
    """

    step: int
    values: dict[str, Any]


@checked_call
def save_checkpoint(
    folder: StrPath,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    values: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> None:
    """Write the folder ``step-00000012`` (of step 12), which loads on any mesh. All ranks call it.

    `torch.distributed.checkpoint` writes it: each rank its own tensors, each tensor once. Layers divided by
    `parallelize`, by ``tp_group`` or by FSDP2 give the same checkpoint as those of one process. The folder gets its
    name when all ranks have written, so that an interrupted call leaves the checkpoints before it as they were. A
    checkpoint of the same step is replaced.

    Args:
        folder: of all checkpoints, on a file system that all ranks share.
        step: the number of finished steps.
        model, optimizer: those of the training; without an optimizer only the parameters are written.
        values: what else `load_checkpoint` returns: tensors, numbers, text, lists and dictionaries. Those of rank 0
            are written.
        keep: how many checkpoints of steps up to this one are left, for example 3; None leaves all.

    Raises:
        InputError: an argument is wrong, an optimizer has state that is not divided as its parameters, or the ranks
            wrote to different folders. The checkpoints before it are left as they were.
        OSError: rank 0 cannot create or rename the folder.
        torch.distributed.checkpoint.api.CheckpointException: a rank cannot write.
        RankError: a rank ended, or did not call it within the timeout of the default group.

    >>> import tempfile, undivided
    >>> layer = undivided.TransformerLayer(32, 64, 4, attn_input_format="bshd")
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> folder = tempfile.mkdtemp()
    >>> save_checkpoint(folder, 12, layer, optimizer, values={"tokens": 4096})
    >>> load_checkpoint(folder, layer, optimizer)
    Checkpoint(step=12, values={'tokens': 4096})
    """
    folder, step = _checked_folder(folder), _checked_step(step)
    if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 1):
        raise InputError("keep", "be a positive number of checkpoints or None", repr(keep))
    _check_model_and_optimizer(model, optimizer)
    plain = checked_values(values)
    with state_for_saving(optimizer):
        state = training_state(model, optimizer)
    entries = state.tensors | {HEADER: Header(step, plain, state.groups).to_bytes()}
    with rank_errors(f"saving the checkpoint of step {step}"), _without_group_warning():
        folders.check_same("step", step)
        folders.on_first_rank(lambda: folders.begin(folder, step))
        save(entries, checkpoint_id=folders.unfinished_path(folder, step), planner=SavePlanner(_divided_tensors(state)))
        folders.on_first_rank(lambda: _finish(folder, step, keep))
        folders.wait_before_exit()


@checked_call
def load_checkpoint(
    folder: StrPath, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, step: int | None = None
) -> Checkpoint | None:
    """Load a checkpoint of `save_checkpoint` into a model and an optimizer, on any mesh. All ranks call it.

    Each rank reads what it holds, and runs no code of the files. The model is built and divided as for training, before
    the call; numbers of other dtypes are converted.

    Args:
        folder: of all checkpoints.
        model, optimizer: what is loaded; without an optimizer only the parameters are.
        step: of the checkpoint; None is the newest complete one.

    Returns:
        The step and the values; None if step is None and there is no complete checkpoint.

    Raises:
        InputError: there is no such step, a file is absent, too short or unreadable, or the model or the optimizer has
            other names or sizes. Nothing has been loaded then, except that parameters may have changed before a file
            was found unreadable: load another step. Changed bytes within a tensor are not noticed.
        RankError: another rank found such an error, ended, or did not call it within the timeout of the default group.

    >>> import tempfile, undivided
    >>> layer = undivided.TransformerLayer(32, 64, 4, attn_input_format="bshd")
    >>> load_checkpoint(tempfile.mkdtemp(), layer) is None
    True
    """
    folder = _checked_folder(folder)
    _check_model_and_optimizer(model, optimizer)
    step = None if step is None else _checked_step(step)
    with rank_errors("finding the checkpoint to load"):
        folders.check_same("step", step)
        checkpoints = folders.on_first_rank(lambda: folders.complete_checkpoints(folder))
    if step is not None and step not in checkpoints:
        raise InputError(
            "step", f"be that of a complete checkpoint ({', '.join(map(str, checkpoints)) or 'none'})", step
        )
    if not checkpoints:
        return None
    path = checkpoints[max(checkpoints) if step is None else step]
    reader = Reader(path)
    with rank_errors(f"reading the contents of {path.name}"):
        metadata, header = folders.on_all_ranks(lambda: _read_contents(reader, path))
    with state_for_loading(model, optimizer):
        state = training_state(model, optimizer)
        divided = _divided_tensors(state)
        sizes = {
            name: divided[name].size if name in divided else value.shape if isinstance(value, Tensor) else None
            for name, value in state.tensors.items()
        }
        with rank_errors(f"comparing the model with {path.name}"):
            unused = folders.on_all_ranks(lambda: _check_fit(metadata, header, sizes, path, optimizer is not None))
        tensors = {name: value for name, value in state.tensors.items() if name not in unused}
        read_in_place = {name: tensor for name, tensor in divided.items() if name not in unused}
        entries = {name: value for name, value in tensors.items() if name not in divided}
        with rank_errors(f"loading {path.name}"), _without_group_warning(), _unreadable_as_input_error(path):
            load(entries, storage_reader=reader, planner=LoadPlanner(read_in_place))
        set_training_state(model, optimizer, tensors | entries, header.groups)
    return Checkpoint(header.step, header.values)


@checked_call
def checkpoint_steps(folder: StrPath) -> list[int]:
    """The steps of the complete checkpoints in a folder, from the first to the newest.

    Args:
        folder: of all checkpoints; it need not exist.

    Returns:
        The steps, each of which `load_checkpoint` takes.

    >>> checkpoint_steps("no such folder")
    []
    """
    return list(folders.complete_checkpoints(_checked_folder(folder)))


def _finish(folder: Path, step: int, keep: int | None) -> None:
    """Finish a checkpoint if all of its files are in the folder; otherwise raise InputError."""
    path = folders.unfinished_path(folder, step)
    check_files(Reader(path).read_metadata(), path, "save to a folder that all ranks share")
    folders.finish(folder, step, keep)


def _read_contents(reader: Reader, path: Path) -> tuple[Metadata, Header]:
    """What a checkpoint has, after its files were checked."""
    try:
        metadata = reader.read_metadata()
        check_header(metadata, path)
        check_files(metadata, path)
        return metadata, _read_header(reader)
    except OSError as error:
        hint = "load from a folder that all ranks share"
        raise InputError("folder", f"have {path.name} on every rank", type(error).__name__, hint=hint) from error


def _check_fit(
    metadata: Metadata, header: Header, sizes: Mapping[str, torch.Size | None], path: Path, has_optimizer: bool
) -> set[str]:
    """Compare a model, and perhaps an optimizer, with a checkpoint; returns what `check_entries` does."""
    if has_optimizer and header.groups is None:
        raise InputError("optimizer", f"be None, because {path.name} has no optimizer state", "an optimizer")
    return check_entries(metadata, sizes, path, header.groups if has_optimizer else None)


def _read_header(reader: Reader) -> Header:
    """What a checkpoint has besides tensors of parameters; every rank reads it for itself."""
    entries: dict[str, Any] = {HEADER: b""}
    with _without_group_warning():
        load(entries, storage_reader=reader, planner=LoadPlanner({}), no_dist=True)
    return Header.from_bytes(entries[HEADER])


def _divided_tensors(state: TrainingState) -> dict[str, DividedTensor]:
    return {name: DividedTensor(state.tensors[name], division) for name, division in state.divisions.items()}


def _checked_folder(folder: object) -> Path:
    if not isinstance(folder, str | os.PathLike):
        raise InputError("folder", "be a path", type(folder).__name__)
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise InputError("folder", "be a folder", f"the file {path.name}")
    return path


def _checked_step(step: object) -> int:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise InputError("step", "be an int of at least 0", repr(step))
    return step


def _check_model_and_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    check_type("model", model, torch.nn.Module, "a torch.nn.Module")
    for mesh in {parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)}:
        check_ascending(mesh, "model")
    if optimizer is not None:
        check_type("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer or None")
        check_optimizer(optimizer)
        own = set(map(id, model.parameters()))
        if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
            raise InputError("optimizer", "have parameters of model only", "parameters of another one")


@contextlib.contextmanager
def _unreadable_as_input_error(path: Path) -> Iterator[None]:
    """A context that raises PyTorch's error for an unreadable file as InputError.

    Its own type is a BaseException, which no ``except Exception`` of a program catches.
    """
    try:
        yield
    except CheckpointException as error:
        hint = "copy it again, or pass an earlier step; parameters may have changed"
        causes = sorted({f"{type(cause).__name__} on rank {rank}" for rank, (cause, _) in error.failures.items()})
        raise InputError("folder", f"have readable files of {path.name}", ", ".join(causes), hint=hint) from error


@contextlib.contextmanager
def _without_group_warning() -> Iterator[None]:
    """A context without PyTorch's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
