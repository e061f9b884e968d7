"""Processes that talk over gloo on the loopback interface, for the tests that need real ones."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT = 20.0
"""Of the process group, in seconds: what a rank waits for another."""


def run_ranks(
    world: int, function: Callable[..., Any], *arguments: Any, patience: float = 300.0
) -> list[Any]:
    """``function(*arguments)`` in each of `world` new processes, whose default group is gloo; what each returned, by rank.

    A rank whose function raises gives the traceback as text; one that ends without a word gives None. None outlives this.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world):
            ours, theirs = spawn.Pipe(duplex=False)
            process = spawn.Process(
                target=_rank, args=(rank, world, f"{folder}/store", theirs, function, arguments), daemon=True
            )
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return [_answer(end, patience) for end in ends]
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _answer(end: Connection, patience: float) -> Any:
    try:
        return end.recv() if end.poll(patience) else f"no answer within {patience:g} s"
    except EOFError:
        return None


def _rank(
    rank: int,
    world: int,
    store: str,
    end: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # a file to meet at: no port that another test could take
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(store)}", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    try:
        end.send(function(*arguments))
    except Exception:
        end.send(traceback.format_exc())
    finally:
        end.close()
        os._exit(0)  # without waiting for ranks that have died
