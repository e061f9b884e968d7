"""Groups that PyTorch gives 30 minutes take over a shorter timeout of the default group."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from gloo_ranks import run_ranks
from torch import distributed

from undivided.context_parallel import ContextParallel, RankError
from undivided.context_parallel.exchange.collectives import ProcessGroup

SHORT = datetime.timedelta(seconds=4)


@pytest.fixture
def default_group() -> Iterator[None]:
    """A default group of one rank with a short timeout."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1, timeout=SHORT)
    yield
    distributed.destroy_process_group()


def timeout_of(group: distributed.ProcessGroup) -> datetime.timedelta:
    found: datetime.timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found


def test_only_a_group_with_the_default_timeout_takes_over_that_of_the_default_group(default_group: None) -> None:
    group = distributed.new_group()
    assert timeout_of(group) == datetime.timedelta(minutes=30), "PyTorch passes the timeout on by itself now"
    ContextParallel(group)
    assert timeout_of(group) == SHORT
    other = datetime.timedelta(seconds=50)
    group = distributed.new_group(timeout=other)
    ContextParallel(group)
    assert timeout_of(group) == other


def waits() -> dict[str, tuple[float, str]]:
    """In the first rank: seconds that a receive and a gather wait for a rank that sleeps, and the errors."""
    distributed.group.WORLD.set_timeout(SHORT)
    found = {}
    for what in ("exchange", "gather"):
        group = ProcessGroup(distributed.new_group())
        if distributed.get_rank() == 1:
            time.sleep(SHORT.seconds + 10)
            continue
        start, buffer = time.monotonic(), torch.zeros(3)
        call: Callable[[], object] = partial(group.gather, buffer, "a step")
        if what == "exchange":
            call = group.exchange({}, {1: [buffer]}, "a step")
        with pytest.raises(RankError) as error:
            call()
        found[what] = time.monotonic() - start, str(error.value)
        time.sleep(max(0, start + SHORT.seconds + 8 - time.monotonic()))
    return found


@pytest.mark.slow
def test_receives_and_gathers_of_a_new_group_wait_for_the_timeout_of_the_default_group() -> None:
    """A receive of gloo waits for the timeout with which the group was created, whatever `set_timeout` says later."""
    ((found, _),) = run_ranks(2, waits)
    assert isinstance(found, dict), found
    for seconds, text in found.values():
        assert SHORT.seconds <= seconds < SHORT.seconds + 10, found
        assert text.startswith("rank 0 of 2: a step with rank 1 failed: Timed out"), text
