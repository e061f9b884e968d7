"""Reports of failed exchanges: each rank follows them to the rank that the others wait for.

A rank that waits for a rank that waits for a third one would name the wrong one. So every rank writes the peer of its
failed exchange to the store of the group, and reads what that peer has written.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

PATIENCE, CLOSED_PATIENCE = 5.0, 2.0
"""Seconds that a rank waits for the reports of others, whose timeouts end at about the same time; and if a connection
was closed, which gloo also does when the other rank has met a timeout and is about to report it."""
_POLL_SECONDS = 0.05


def find_cause(group: Any, rank: int, peers: Sequence[int], text: str) -> tuple[int, str] | None:
    """The rank that did not fail but is waited for, and the report that names it.

    Args:
        group: of torch.distributed.
        rank, peers: this rank, and those of its failed exchange.
        text: the error of this rank, which is written for the others.

    Returns:
        (rank, text of the report); None if the peer has reported nothing, or the store of the group cannot be read.
    """
    found: list[tuple[int, str] | None] = []

    def work() -> None:
        try:
            found.append(_follow(group.get_group_store(), rank, peers, text))
        except (AttributeError, RuntimeError, ValueError):  # the store has ended with its process
            return

    # a thread, because an operation on a store whose process has ended may block
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(2 * PATIENCE)
    return found[0] if found else None


def _follow(store: Any, rank: int, peers: Sequence[int], text: str) -> tuple[int, str] | None:
    store.set(_key(rank), json.dumps([list(peers), text]))
    deadline = time.monotonic() + (PATIENCE if "imed out" in text else CLOSED_PATIENCE)
    seen, cause, report = {rank}, None, ""
    while len(peers) == 1 and peers[0] not in seen:
        seen.add(peers[0])
        answer = _read(store, peers[0], deadline)
        if answer is None:
            return cause if cause is None else (cause, report)
        peers, report = answer
        cause = peers[0] if len(peers) == 1 else None
    return None


def _read(store: Any, rank: int, deadline: float) -> tuple[list[int], str] | None:
    """The report of a rank; None if there is none until the deadline."""
    while not store.check([_key(rank)]):
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_SECONDS)
    peers, text = json.loads(store.get(_key(rank)))
    return peers, text


def _key(rank: int) -> str:
    return f"undivided/failed/{rank}"
