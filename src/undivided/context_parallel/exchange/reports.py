"""Reports of failed exchanges: each rank follows them to the rank that the others wait for.

If rank 0 waits for rank 1, and rank 1 for rank 2, rank 0 alone would name rank 1, which has not failed. So every rank
writes the peer of its failed exchange to the store of the group, and reads what that peer has written.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed

PATIENCE, CLOSED_PATIENCE = 5.0, 2.0
"""Seconds that a rank waits for the reports of others, whose timeouts end at about the same time; and if a connection
was closed, which gloo also does when the other rank has met a timeout and is about to report it."""
_POLL_SECONDS, _FRESH_SECONDS = 0.05, 60.0

_PROBE_TAG = 0x7FFF0001
"""The tag of messages that no rank receives."""

T = TypeVar("T")


class FailureReport(NamedTuple):
    """What a rank writes after a failure: the ranks that it knows to have failed, and its error."""

    failed: list[int]
    text: str


def find_cause(group: Any, rank: int, peers: Sequence[int], text: str) -> tuple[int, str] | None:
    """The rank that did not fail but is waited for, and the report that names it.

    Args:
        group: of torch.distributed.
        rank, peers: this rank, and those of its failed exchange.
        text: the error of this rank, which is written for the others.

    Returns:
        (rank, text of the report); None if the peer has reported nothing, or the store of the group cannot be read.
    """

    def follow(store: Any) -> tuple[int, str] | None:
        store.set(_key(rank), json.dumps(FailureReport(list(peers), text)))
        deadline = time.monotonic() + (PATIENCE if "imed out" in text else CLOSED_PATIENCE)
        seen, next_peers, cause = {rank}, list(peers), None
        while len(next_peers) == 1 and next_peers[0] not in seen:
            seen.add(next_peers[0])
            report = _read(store, next_peers[0], deadline)
            if report is None:
                return cause
            next_peers = report.failed
            cause = (next_peers[0], report.text) if len(next_peers) == 1 else None
        return None

    return _with_store(group, follow, None)


def find_process(process: int, peers: Sequence[int], text: str) -> tuple[int, str] | None:
    """The process that another one waited for in a group that this process is not in, and the report that names it.

    Args:
        process, peers: this process, and those of its failed exchange, numbered as in the default group.
        text: the error of this process, which is written for those of other groups.

    Returns:
        (process, text of the report); None if there is no such report.
    """

    def follow(store: Any) -> tuple[int, str] | None:
        store.set(_process_key(process), json.dumps([time.time(), list(peers), text]))
        seen, next_peers, cause = {process}, list(peers), None
        while len(next_peers) == 1 and next_peers[0] not in seen and store.check([_process_key(next_peers[0])]):
            seen.add(next_peers[0])
            written, next_peers, report = json.loads(store.get(_process_key(next_peers[0])))
            if time.time() - written > _FRESH_SECONDS:
                return None  # of an earlier failure
            cause = (next_peers[0], report) if len(next_peers) == 1 else None
        return None if cause is None or cause[0] in seen else cause

    return _with_store(distributed.group.WORLD, follow, None)


def _write_report(group: Any, rank: int, report: FailureReport) -> None:
    """Write the report of a rank for the others."""
    _with_store(group, lambda store: store.set(_key(rank), json.dumps(report)), None)


def _read_reports(group: Any, ranks: Sequence[int], patience: float) -> dict[int, FailureReport]:
    """The reports that these ranks have written, after waiting for all of them at most so many seconds."""

    def read(store: Any) -> dict[int, FailureReport]:
        deadline = time.monotonic() + patience
        reports = {rank: _read(store, rank, deadline) for rank in ranks}
        return {rank: report for rank, report in reports.items() if report is not None}

    return _with_store(group, read, {})


def _failed_by_reports(group: Any, ranks: Sequence[int]) -> list[int]:
    """The failed ranks that the reports of these ranks name. A rank adds them to its report once it knows them."""

    def read(store: Any) -> list[int]:
        deadline = time.monotonic() + PATIENCE + CLOSED_PATIENCE  # they write after at most the first of these
        while True:
            reports = [_read(store, rank, deadline) for rank in ranks]
            failed = {rank for report in reports if report is not None for rank in report.failed}
            if failed or time.monotonic() >= deadline:
                return sorted(failed)
            time.sleep(_POLL_SECONDS)

    return _with_store(group, read, [])


def failed_ranks(group: Any, rank: int, world: int, text: str) -> list[int]:
    """The ranks that have failed in a collective, which may be this one; empty if they cannot be found.

    Args:
        group: of torch.distributed.
        rank, world: this rank of the group, and their number.
        text: the error of this rank, which is written for the others.
    """
    peers = [peer for peer in range(world) if peer != rank]
    timed_out = "imed out" in text or "imeout" in text
    candidates = peers if timed_out else [peer for peer in peers if _is_closed(group, peer)]
    _write_report(group, rank, FailureReport([], text))
    reports = _read_reports(group, candidates or peers, PATIENCE if timed_out else CLOSED_PATIENCE)
    failed = [peer for peer in candidates if peer not in reports]
    if not failed:  # those that it cannot reach have met the failure of another one
        failed = _failed_by_reports(group, candidates or peers)
    _write_report(group, rank, FailureReport(failed, text))
    return failed


def rank_names(ranks: Sequence[int], own: int | None = None) -> str:
    """Ranks as an error names them, and which of them is this one.

    >>> rank_names([1, 2], 2)
    'ranks 1, 2 (this one)'
    """
    names = ", ".join(f"{rank} (this one)" if rank == own else str(rank) for rank in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


def _is_closed(group: Any, peer: int) -> bool:
    """Whether the connection of gloo to a rank is closed."""
    try:
        distributed.isend(torch.zeros(1), group=group, group_dst=peer, tag=_PROBE_TAG)
    except RuntimeError:
        return True
    return False


def _with_store(group: Any, function: Callable[[Any], T], default: T) -> T:
    """The function's result for the store of a group; the default if the store has ended with its process."""
    results: list[T] = []

    def work() -> None:
        try:
            results.append(function(group.get_group_store()))
        except (AttributeError, RuntimeError, ValueError):
            return

    # a thread, because an operation on a store whose process has ended may block
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(2 * PATIENCE)
    return results[0] if results else default


def _read(store: Any, rank: int, deadline: float) -> FailureReport | None:
    """The report of a rank; None if there is none until the deadline."""
    while not store.check([_key(rank)]):
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_SECONDS)
    return FailureReport(*json.loads(store.get(_key(rank))))


def _process_key(process: int) -> str:
    return f"undivided/failed-process/{process}"


def _key(rank: int) -> str:
    return f"undivided/failed/{rank}"
