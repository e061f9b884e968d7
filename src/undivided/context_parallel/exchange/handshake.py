"""The check, before anything else is sent, that all ranks make the same call.

Every rank sends one hash for each value that must be the same on all ranks, and a flag that says whether it refused its
arguments. If all hashes are equal and no flag is set, the check is over. Otherwise every rank sees that; all of them
then exchange texts, and all raise.

Nothing is cached between calls: a rank that skipped the check would leave the other ranks waiting for it.
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

TEXT_BYTES = 480
"""Length of the text that a rank sends if the ranks differ; longer texts are cut."""

SharedArguments = Mapping[str, object]
"""The values that must be the same on all ranks, by the name of the argument that they come from."""

_MAX_HASHES = 12
"""Length of the first message: the flag, and one hash for each value."""

T = TypeVar("T")


def prepare_on_all_ranks(
    axes: Sequence[Communicator], check: bool, prepare: Callable[[], tuple[T, SharedArguments]]
) -> T:
    """What `prepare` returns first, after all ranks have prepared with the same shared arguments.

    Args:
        axes: of the mesh, the ring first.
        check: False skips the comparison between ranks.
        prepare: returns (what this rank needs for the call, the arguments that all ranks must share). If it raises, the
            other ranks raise too, instead of waiting for this one.

    Raises:
        Exception: what `prepare` raised on this rank, or one of the errors of `compare_ranks`.
    """
    prepared, shared, error = None, None, None
    try:
        prepared, shared = prepare()
    except Exception as raised:
        error = raised
    if check:
        compare_ranks(axes, shared, error)
    if error is not None:
        raise error
    assert prepared is not None
    return prepared


def compare_ranks(axes: Sequence[Communicator], shared: SharedArguments | None, error: Exception | None) -> None:
    """Raise on every rank unless all ranks share the same arguments and none has an error.

    Args:
        axes: of the mesh, the ring first.
        shared: the values that must be the same on all ranks; None if there is an error.
        error: what this rank raised while it prepared the call.

    Raises:
        Exception: this rank's own error.
        InputError: an argument differs between ranks.
        RankError: another rank refused its arguments.
    """
    texts = {} if shared is None else {name: str(value) for name, value in shared.items()}
    hashes = [0 if error is None else 1, *(_hash(text) for text in texts.values())]
    hashes += [0] * (_MAX_HASHES - len(hashes))
    sent = torch.tensor(hashes[:_MAX_HASHES], dtype=torch.int64)
    rows = [tuple(row.tolist()) for row in gather_all(axes, sent, "the comparison of arguments")]
    if error is None and all(row == rows[0] for row in rows) and not rows[0][0]:
        return
    first = next((n for n in range(1, _MAX_HASHES) if any(row[n] != rows[0][n] for row in rows)), 0)
    own = list(texts.items())
    name, value = own[first - 1] if 0 < first <= len(own) else ("context_parallel", "")
    received = [_decode_text(t) for t in gather_all(axes, _encode_text(str(error) if error is not None else value))]
    if error is not None:
        raise error
    if any(row[0] for row in rows):
        refusals = "; ".join(f"rank {rank}: {received[rank]}" for rank, row in enumerate(rows) if row[0])
        raise RankError(f"another rank refused its arguments: {refusals}")
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(received):
        ranks_by_text.setdefault(text, []).append(rank)
    values = "; ".join(
        f"{text} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for text, ranks in ranks_by_text.items()
    )
    raise InputError(name, "be the same on every rank", values)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _encode_text(text: str) -> Tensor:
    data = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    return torch.tensor(list(data), dtype=torch.uint8)


def _decode_text(data: Tensor) -> str:
    return bytes(data.tolist()).rstrip(b"\0").decode(errors="ignore")


def describe_mask(mask: Mask) -> str:
    """A text that differs between different masks, except in values on a GPU and in what predicates compute."""
    return mask.cached(("words",), lambda: f"{mask!r} ({_value_digest(mask):016x})")


def bit_sum(tensor: Tensor) -> int:
    """The sum of a tensor's entries, read as integers of the same size: the same on every machine and in any order.

    >>> bit_sum(torch.tensor([1.0, 1.0]))
    2130706432
    """
    flat = tensor.detach().reshape(-1)
    if flat.dtype not in _INTEGERS.values() and flat.dtype != torch.bool:
        flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
        flat = flat.view(_INTEGERS[flat.element_size()])
    return int(flat.sum(dtype=torch.int64))


def digest(tensor: Tensor) -> int:
    """A hash of a small tensor's entries, which also depends on their order.

    >>> digest(torch.tensor([1, 2])) == digest(torch.tensor([2, 1]))
    False
    """
    flat = tensor.detach().reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()]).to(torch.int64)
    return int(_mixed(bits)) & (2**64 - 1)


def _mixed(values: Tensor) -> Tensor:
    """The sum of int64 [n], each with a factor of its place."""
    factors = torch.arange(values.numel(), device=values.device) * 6364136223846793005 + 1442695040888963407
    return ((values + 1) * (factors ^ (factors >> 29))).sum()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


def _value_digest(mask: Mask) -> int:
    """A hash of the values of the mask's tensors on the CPU, and of the shapes of all its tensors."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in mask.tensors:
        found.update(str(tuple(tensor.shape)).encode())
        if tensor.device.type == "cpu":
            found.update(str(int(_mixed(tensor.detach().reshape(-1).to(torch.int64)))).encode())
    return int.from_bytes(found.digest(), "little")
