"""Before anything is sent: do all ranks mean the same call?

Every rank shows a few numbers, one for each thing that must agree, and whether it has refused its arguments. Where all
is well that is the end of it. Else every rank sees that it is not, so all of them go on to exchange words, and all
raise.

Nothing is remembered between calls: a rank that found its problem in a cache and skipped this would leave the others
    waiting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from undivided.context_parallel.exchange.collectives import Communicator, RankError, gather_all
from undivided.errors import InputError
from undivided.masks import Mask

TEXT = 480
"""Bytes of words a rank may say when something is wrong."""

Said = Mapping[str, object]
"""What must agree, by the name of the argument that it comes from."""


T = TypeVar("T")


def agreed(axes: Sequence[Communicator], check: bool, prepare: Callable[[], tuple[T, Said]]) -> T:
    """What this rank prepares for a call, once all ranks have said the same about theirs; `shake_hands` says what is
    raised.

    Args:
        check: whether ranks talk about it at all.
        prepare: gives it with what must agree. What it raises is told to the others, which would wait for this rank
            otherwise.
    """
    ready, words, error = None, None, None
    try:
        ready, words = prepare()
    except Exception as raised:
        error = raised
    if check:
        shake_hands(axes, words, error)
    if error is not None:
        raise error
    assert ready is not None
    return ready


def shake_hands(axes: Sequence[Communicator], said: Said | None, error: Exception | None) -> None:
    """Raise on every rank unless all say the same and none has an error of its own.

    Args:
        axes: of the mesh, the ring first.
        said: what must agree; None where there is an error.
        error: why this rank cannot go on.

    Raises:
        Exception: this rank's own error.
        InputError: an argument differs between ranks.
        RankError: another rank refused its arguments.
    """
    words = {} if said is None else {name: str(value) for name, value in said.items()}
    numbers = [0 if error is None else 1, *(_number(text) for text in words.values())]
    numbers += [0] * (_MOST - len(numbers))
    rows = [tuple(row.tolist()) for row in gather_all(axes, torch.tensor(numbers[:_MOST], dtype=torch.int64))]
    if error is None and all(row == rows[0] for row in rows) and not rows[0][0]:
        return
    first = next((n for n in range(1, _MOST) if any(row[n] != rows[0][n] for row in rows)), 0)
    refused = any(row[0] for row in rows)
    mine = list(words.items())
    name, value = mine[first - 1] if 0 < first <= len(mine) else ("context_parallel", "")
    texts = [_read(t) for t in gather_all(axes, _written(str(error) if error is not None else value))]
    if error is not None:
        raise error
    if refused:
        said_by = "; ".join(f"rank {r}: {texts[r]}" for r, row in enumerate(rows) if row[0])
        raise RankError(f"another rank refused its arguments: {said_by}")
    ways: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ways.setdefault(text, []).append(rank)
    got = "; ".join(
        f"{text} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for text, ranks in ways.items()
    )
    raise InputError(name, "be the same on every rank", got)


_MOST = 12


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _written(text: str) -> Tensor:
    data = text.encode()[:TEXT].ljust(TEXT, b"\0")
    return torch.tensor(list(data), dtype=torch.uint8)


def _read(data: Tensor) -> str:
    return bytes(data.tolist()).rstrip(b"\0").decode(errors="ignore")


def mask_words(mask: Mask) -> str:
    """A mask in words that differ where masks differ; values on a GPU and what predicates compute are not looked at."""
    return mask.remembered(("words",), lambda: f"{mask!r} ({_values(mask):016x})")


def _values(mask: Mask) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in mask.tensors:
        digest.update(str(tuple(tensor.shape)).encode())
        if tensor.device.type == "cpu":
            flat = tensor.detach().reshape(-1).to(torch.int64)
            weights = torch.arange(flat.numel()) * 6364136223846793005 + 1442695040888963407
            digest.update(str(int(((flat + 1) * (weights ^ (weights >> 29))).sum())).encode())
    return int.from_bytes(digest.digest(), "little")
