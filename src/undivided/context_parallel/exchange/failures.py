"""`rank_errors`: failures of collectives as errors that name the step and the ranks that ended or do not answer.

A collective involves all ranks of its group, and PyTorch's error names none. After one has failed, each rank finds out
which ranks it can no longer reach, writes them to the store of the group, and reads what the others have written. A
rank that has written has not failed: it has met the failure of another one.
"""

from __future__ import annotations

from typing import Any

from torch import distributed

from undivided.arguments.checks import check_type
from undivided.arguments.signature import checked_call
from undivided.context_parallel.exchange.collectives import RankError, first_line
from undivided.context_parallel.exchange.groups import check_exists, group_of
from undivided.context_parallel.exchange.reports import failed_ranks, rank_names
from undivided.errors import InputError

_ERRORS: Any = getattr(distributed, "DistError", ())  # PyTorch may be built without it
_GLOO = ("/gloo/", "Application timeout caused pair closure")
"""Parts of the texts of gloo's errors, which are plain RuntimeErrors."""


@checked_call
class rank_errors:  # a context manager that reads as a phrase, like contextlib.suppress
    """A context that raises failures of communication as `RankError`, which names the step and the failed ranks.

    It costs a microsecond unless there is a failure. Then it waits some seconds for the reports of the other ranks.
    The layers enter it by themselves in their forward pass. Use it around a whole training step for everything else:
    the backward, FSDP2 and the optimizer. A group that has failed is not usable any more.

    Args:
        step: what is done, for the error.
        group: a process group or a `DeviceMesh` with one axis, whose ranks the error numbers; None: all processes.

    Raises:
        RankError: a collective failed, because a rank ended or did not take part within the group's timeout.
        InputError: the mesh has several axes, or the group was destroyed or does not contain this process.

    >>> import torch
    >>> with rank_errors("the training step"):
    ...     print(torch.ones(2).sum())
    tensor(2.)
    """

    def __init__(self, step: str, group: Any = None) -> None:
        check_type("step", step, str, "a str")
        if hasattr(group, "mesh_dim_names"):
            if group.ndim != 1:
                hint = "None for all processes, or one axis of the mesh"
                raise InputError("group", "be a mesh with one axis", f"{group.ndim} axes", hint=hint)
            group = group_of(group, argument="group")
        self.step, self.group = step, group

    def __enter__(self) -> None:
        if self.group is not None:
            check_exists(self.group)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and is_communication_error(error) and distributed.is_initialized():
            group = distributed.group.WORLD if self.group is None else self.group
            raise _rank_error(self.step, group, error) from error


def is_communication_error(error: RuntimeError) -> bool:
    """Whether PyTorch or gloo raised the error because a collective failed.

    >>> is_communication_error(RuntimeError("a matrix of another size"))
    False
    """
    if isinstance(error, RankError):
        return False
    return isinstance(error, _ERRORS) or any(words in str(error) for words in _GLOO)


def _rank_error(step: str, group: Any, error: RuntimeError) -> RankError:
    """The error of this rank, with the failed ranks as far as they can be found."""
    rank, world = distributed.get_rank(group), distributed.get_world_size(group)
    start, why = f"rank {rank} of {world}: {step} failed", first_line(error)
    failed = failed_ranks(group, rank, world, f"{start}: {why}")
    ended = f": {rank_names(failed, rank)} ended or did not take part in time" if failed else ""
    return RankError(
        f"{start}{ended}\n  CAUSE: {why}\n"
        "  HINT: look at the output of the failed rank; the ranks of the group are the processes "
        f"{distributed.get_process_group_ranks(group)}"
    )
