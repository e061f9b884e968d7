"""One folder per step. It is written under another name, and renamed when it is complete."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed

from undivided.context_parallel.exchange.collectives import RankError
from undivided.errors import InputError

Value = TypeVar("Value")

_NAME = re.compile(r"step-(\d+)(\.replaced)?")


def unfinished_path(folder: Path, step: int) -> Path:
    """The path of a checkpoint while it is written."""
    return folder / f"step-{step:08}.unfinished"


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """The complete checkpoints of a folder by step, in the order of the steps."""
    checkpoints: dict[int, Path] = {}
    paths = (
        sorted(folder.iterdir()) if folder.is_dir() else []
    )  # step-N comes before step-N.replaced, which counts only if there is no other
    for path in paths:
        name = _NAME.fullmatch(path.name)
        if name and (path / ".metadata").is_file():
            checkpoints.setdefault(int(name[1]), path)
    return dict(sorted(checkpoints.items()))


def begin(folder: Path, step: int) -> None:
    """Create an empty folder to write a checkpoint to, without what an interrupted call has left there."""
    path = unfinished_path(folder, step)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def finish(folder: Path, step: int, keep: int | None) -> None:
    """Give a written checkpoint its name, and delete checkpoints of earlier steps, except for the last ones.

    A checkpoint of the same step is renamed before and deleted after, so that one of the two is complete at any time.

    Args:
        folder, step: of the checkpoint.
        keep: how many checkpoints of steps up to this one are left; None is all.
    """
    path = folder / f"step-{step:08}"
    replaced = path.with_name(f"{path.name}.replaced")
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    unfinished_path(folder, step).rename(path)
    _sync_names(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    if keep is not None:
        earlier = [path for number, path in complete_checkpoints(folder).items() if number <= step]
        for path in earlier[:-keep]:
            shutil.rmtree(path, ignore_errors=True)


def on_first_rank(action: Callable[[], Value]) -> Value:
    """The result of a function that rank 0 calls, on all ranks; or its error.

    Raises:
        OSError, InputError: the function raised one.
    """
    outcome: list[Any] = [None, None]
    if not _is_parallel() or distributed.get_rank() == 0:
        try:
            outcome[0] = action()
        except (OSError, InputError) as error:
            outcome[1] = error
    if _is_parallel():
        distributed.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    value: Value = outcome[0]
    return value


def on_all_ranks(action: Callable[[], Value]) -> Value:
    """The result of a function that every rank calls; if it raises on one of them, an error on all.

    Raises:
        OSError, InputError: the function raised one on this rank.
        RankError: it did so on another rank.
    """
    try:
        value = action()
    except (OSError, InputError) as error:
        _gather(str(error))
        raise
    if refused := [f"rank {rank}: {text}" for rank, text in enumerate(_gather(None)) if text is not None]:
        raise RankError(f"another rank failed: {'; '.join(refused)}")
    return value


def check_same(argument: str, value: object) -> None:
    """InputError on all ranks if they have different values."""
    values = _gather(value)
    if any(other != values[0] for other in values):
        got = ", ".join(f"{other} on rank {rank}" for rank, other in enumerate(values[:8]))
        raise InputError(argument, "be the same on all ranks", got)


def _gather(value: object) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [value]
    if _is_parallel():
        values *= distributed.get_world_size()
        distributed.all_gather_object(values, value)
    return values


def _is_parallel() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def wait_before_exit() -> None:
    """Wait for all ranks, so that a program that ends right after a checkpoint is aborted less often.

    A thread of gloo keeps the tensors of an operation for a moment, and aborts the process if Python ends during that
    time (torch 2.13). A barrier has no tensors of Python. `destroy_process_group` at the program's end waits for that
    thread.
    """
    if _is_parallel():
        distributed.barrier()


def _sync_names(folder: Path) -> None:
    """Write the names in a folder to the disk, so that they outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems do not have it
        pass
    finally:
        os.close(descriptor)
