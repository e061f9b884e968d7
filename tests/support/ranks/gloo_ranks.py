"""Processes that communicate over gloo on the loopback interface, for tests that need real processes."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import forked_processes

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TIMEOUT = 300.0
"""Timeout of the default group, in seconds: a rank may wait for another one that has more work."""


def run_ranks(world: int, *functions: Callable[[], Any], patience: float = 400.0) -> list[list[Any]]:
    """Each function in turn in each of `world` new processes, whose default group is gloo; results by function and
    rank.

    A function that raises gives the traceback as text; a rank that ends without a word gives None for what is left.
    None of them outlives this.
    """
    context = forked_processes.context()
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, world, f"{folder}/store", theirs, functions, dict(os.environ))
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return [[_answer(end, patience) for end in ends] for _ in functions]
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def losses_of(
    example: str,
    ranks: int,
    patience: float = 300.0,
    pattern: str = r"loss +([0-9.]+)",
    restarts: int = 0,
    arguments: Sequence[str] = (),
) -> list[Any]:
    """The numbers that an example prints, as one process or started by torchrun; tuples of several groups as text."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    torchrun += ["--max-restarts", str(restarts)]
    done = subprocess.run(
        [sys.executable, *(torchrun if ranks > 1 else []), EXAMPLES / example, *arguments],
        capture_output=True,
        text=True,
        timeout=patience,
        # the last one: ranks of a second attempt would otherwise find the addresses of the first
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(pattern, done.stdout, re.MULTILINE)
    return [float(loss) if isinstance(loss, str) else loss for loss in found]


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
    functions: tuple[Callable[[], Any], ...],
    environment: dict[str, str],
) -> None:
    os.environ |= environment | {"GLOO_SOCKET_IFNAME": "lo"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # a file to meet at: no port that another test could take
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(store)}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    for function in functions:
        try:
            end.send(function())
        except Exception:
            end.send(traceback.format_exc())
    end.close()
    os._exit(0)  # without waiting for ranks that have died
