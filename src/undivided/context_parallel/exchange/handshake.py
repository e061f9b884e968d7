"""The check, before anything else is sent, that all ranks make the same call.

Every rank sends a flag that says whether it refused its arguments, a hash of all values that must be the same on all
ranks, a hash of those of the layer that makes the call, and its place in the grid of ranks: 56 bytes. If the hashes are
equal and no flag is set, the check is over. Otherwise every rank sees that; all of them then exchange texts, and raise.

Nothing is cached between calls: a rank that skipped the check would leave the other ranks waiting for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from undivided.arguments.modes import hidden_from_checkpoints
from undivided.context_parallel._index import hash_entries
from undivided.context_parallel.exchange.collectives import Communicator, RankError, gather_all, process_groups
from undivided.context_parallel.exchange.reports import rank_names
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.request.problem import Problem

TEXT_BYTES = 480
"""Length of each text that a rank sends if the ranks differ; longer texts are cut."""

_PREPARED, _REFUSED, _SEED = range(3)
"""The first number that a rank sends: whether a hash of arguments, nothing valid, or a seed follows."""

_NO_CALLER = 0
"""The number that a rank sends instead of a hash if no caller has arguments to compare."""

SharedArguments = Mapping[str, object]
"""The values that must be the same on all ranks, by the name of the argument that they come from."""

CALL = "the call"
"""The name of the first of them: calls over different exchanges must not be taken for each other."""

T = TypeVar("T")


class _Caller(threading.local):
    """What makes the calls of this thread.

    Attributes:
        describe: returns the arguments of the caller that all ranks must share; None without a caller that says so.
    """

    describe: Callable[[], SharedArguments] | None = None


_caller = _Caller()


@contextlib.contextmanager
def called_by(describe: Callable[[], SharedArguments]) -> Iterator[None]:
    """The context of a caller, such as a layer, whose own arguments are compared in each of its calls.

    Ranks without a caller are not compared with the others: a compiled layer is none.

    Args:
        describe: returns the arguments that all ranks must share.
    """
    before, _caller.describe = _caller.describe, describe
    try:
        yield
    finally:
        _caller.describe = before


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
        try:
            compare_ranks(axes, shared, error)
        except RankError as lost:  # of a rank that does not answer: this rank's own error says more
            raise lost if error is None else error from lost
    if error is not None:
        raise error
    assert prepared is not None
    return prepared


@hidden_from_checkpoints
def compare_ranks(
    axes: Sequence[Communicator],
    shared: SharedArguments | None,
    error: Exception | None,
    step: str = "the comparison of arguments",
) -> None:
    """Raise on every rank unless all ranks share the same arguments and none has an error.

    Args:
        axes: of the mesh, the ring first.
        shared: the values that must be the same on all ranks; None if there is an error. If several differ, the error
            names the first one.
        error: what this rank raised while it prepared the call.
        step: what is compared, for errors.

    Raises:
        Exception: this rank's own error.
        InputError: an argument differs between ranks.
        RankError: another rank refused its arguments.
    """
    texts = {} if shared is None else _texts(shared)
    of_caller = {} if shared is None or _caller.describe is None else _texts(_caller.describe())
    state = _PREPARED if error is None else _REFUSED
    rows = _gather_numbers(axes, state, _hash_of(texts), step, _hash_of(of_caller) if of_caller else _NO_CALLER)
    callers = {caller for _, _, caller, *_ in rows} - {_NO_CALLER}
    if rows[0][0] != _PREPARED or any(row[:2] != rows[0][:2] for row in rows) or len(callers) > 1:
        _raise_difference(axes, texts | of_caller, error, step)
    _check_grid([row[3:] for row in rows])


@hidden_from_checkpoints
def tell_of_error(axes: Sequence[Communicator], error: Exception) -> None:
    """Make the other ranks raise `RankError` in the call that they compare next, which this rank will not make.

    Args:
        axes: of the mesh, the ring first.
        error: why this rank will not make it; the other ranks show its text.
    """
    step = "the report of an error"
    with contextlib.suppress(RankError):  # of a rank that does not answer: this rank's own error says more
        _gather_numbers(axes, _REFUSED, _hash(""), step)
        _gather_descriptions(axes, {}, error, step)


@hidden_from_checkpoints
def agree_on_seed(axes: Sequence[Communicator], seed: int) -> int:
    """The seed of rank 0.

    Raises:
        InputError: another rank makes another call.
        RankError: another rank refused its arguments.
    """
    step = "the exchange of the dropout's seed"
    rows = _gather_numbers(axes, _SEED, seed, step)
    if any(state != _SEED for state, *_ in rows):
        _raise_difference(axes, {CALL: "ContextParallel.seed(), for dropout in training mode"}, None, step)
    return rows[0][1]


def _gather_numbers(
    axes: Sequence[Communicator], state: int, number: int, step: str, caller: int = _NO_CALLER
) -> list[list[int]]:
    """The state, the number and the caller of every rank, and its place: in two axes, the first process of its group
    and its rank there."""
    groups = process_groups(axes)
    place = [groups[0][0], axes[0].rank, groups[1][0], axes[1].rank] if len(groups) == 2 else [0] * 4
    sent = torch.tensor([state, number, caller, *place], dtype=torch.int64, device="cpu")
    return [row.tolist() for row in gather_all(axes, sent, step)]


def _check_grid(places: Sequence[Sequence[int]]) -> None:
    """InputError unless the ranks of each group of one axis have the same rank in the groups of the other axis.

    PyTorch orders a group by the numbers of its processes, so that groups of a mesh in another order are no grid.
    """
    column_of: dict[int, int] = {}
    row_of: dict[int, int] = {}
    for ring, ring_rank, heads, heads_rank in places:
        if column_of.setdefault(ring, heads_rank) != heads_rank or row_of.setdefault(heads, ring_rank) != ring_rank:
            hint = "a group sorts its processes: make the groups of a mesh with ascending numbers"
            must = "be two groups whose processes are in the same order in all of them"
            raise InputError("group", must, f"groups that begin with the processes {ring} and {heads}", hint=hint)


def _raise_difference(
    axes: Sequence[Communicator], texts: Mapping[str, str], error: Exception | None, step: str
) -> NoReturn:
    """Exchange texts with the other ranks, which do the same, and raise the errors of `compare_ranks`."""
    answers = _gather_descriptions(axes, texts, error, step)
    if error is not None:
        raise error
    refusals = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text is not None]
    if refusals:
        raise RankError(f"another rank refused its arguments: {'; '.join(refusals)}")
    raise _difference([described for _, described in answers], _processes(axes))


def _gather_descriptions(
    axes: Sequence[Communicator], texts: Mapping[str, str], error: Exception | None, step: str
) -> list[tuple[str | None, dict[str, tuple[int, str]]]]:
    """The error of every rank, if any, and its arguments: hash and text by name."""
    refusal = None if error is None else str(error)[:TEXT_BYTES]
    described = {name: (_hash(text), text[:TEXT_BYTES]) for name, text in texts.items()}
    return [json.loads(text) for text in _gather_texts(axes, json.dumps([refusal, described]), step)]


def _processes(axes: Sequence[Communicator]) -> str | None:
    """The hint that says which processes the ranks of a single group are; None if they have the same numbers."""
    groups = process_groups(axes)
    if len(groups) != 1 or groups[0] == list(range(len(groups[0]))):
        return None
    return f"the ranks of the group are the processes {groups[0]}"


def _difference(described: Sequence[Mapping[str, tuple[int, str]]], hint: str | None) -> InputError:
    """The error for the first argument that differs, from every rank's arguments: hash and text by name."""
    names = dict.fromkeys(itertools.chain(*described))
    name = next(name for name in names if any(texts.get(name) != described[0].get(name) for texts in described))
    ranks_by_text: dict[str, list[int]] = {}
    for rank, texts in enumerate(described):
        ranks_by_text.setdefault(texts[name][1] if name in texts else "nothing", []).append(rank)
    values = "; ".join(f"{text} on {rank_names(ranks)}" for text, ranks in ranks_by_text.items())
    return InputError(name, "be the same on every rank", values, hint=hint)


def _gather_texts(axes: Sequence[Communicator], text: str, step: str) -> list[str]:
    """The text of every rank."""
    data = text.encode()
    lengths = [int(n) for n in gather_all(axes, torch.tensor(len(data), device="cpu"), step)]
    padded = torch.tensor(list(data.ljust(max(lengths))), dtype=torch.uint8, device="cpu")
    return [bytes(row[:n].tolist()).decode() for row, n in zip(gather_all(axes, padded, step), lengths, strict=True)]


def _texts(shared: SharedArguments) -> dict[str, str]:
    return {name: str(value) for name, value in shared.items()}


def _hash_of(texts: Mapping[str, str]) -> int:
    return _hash("\0".join(itertools.chain(*texts.items())))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def describe_sizes(**sizes: object) -> str:
    """Sizes with their names, as an error shows them.

    >>> describe_sizes(batch=2, heads=8)
    'batch=2, heads=8'
    """
    return ", ".join(f"{name}={value}" for name, value in sizes.items())


def describe_queries(problem: Problem) -> str:
    """The sizes and the dtype of the queries of a problem, as an error shows them."""
    return describe_sizes(
        layout=problem.layout,
        batch=problem.batch,
        tokens=problem.q_len,
        heads=problem.heads,
        head_size=problem.qk_dim,
        dtype=problem.dtype,
    )


def describe_mask(mask: Mask) -> str:
    """A text that differs between different masks, except in values on a GPU and in what predicates compute."""
    return mask.cached(("description",), lambda: f"{mask!r} ({_value_digest(mask):016x})")


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
    return int(hash_entries(bits)) & (2**64 - 1)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""


def _value_digest(mask: Mask) -> int:
    """A hash of the values of the mask's tensors on the CPU, and of the shapes of all its tensors."""
    hasher = hashlib.blake2b(digest_size=8)
    for tensor in mask.tensors:
        hasher.update(str(tuple(tensor.shape)).encode())
        if tensor.device.type == "cpu":
            hasher.update(str(int(hash_entries(tensor.detach().reshape(-1).to(torch.int64)))).encode())
    return int.from_bytes(hasher.digest(), "little")
