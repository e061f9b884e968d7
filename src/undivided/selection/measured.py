"""Measured rates of backends, and the estimates by which selection orders the backends.

A table has, for kinds of problems on an architecture, the rate that each backend reached in one run: operations on
pairs per second, or bytes read per second in decoding. Only rates of the same run are compared, so each entry has one
run. The package's table is ``measured.json``, made from reports in ``benchmarks/``; a user's table (UNDIVIDED_RANKS, or
a file in the cache folder) comes before it. Both are read once, at the first selection; `undivided ranks` writes them,
and `undivided ranks --measure` measures the user's.

Lengths are rounded up to powers of two, because selection reads no more of them (see `decision.selection_key`).
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from undivided._files import read_json, users_file
from undivided._units import span
from undivided.errors import InputError
from undivided.kernels import cpu
from undivided.machine import Machine
from undivided.request.problem import Problem

SCHEMA = 1
NEAR = (1, 2)
"""By how many powers of two a measured problem may differ in key length and in work. The suites increase both by
factors of four, so that there are no gaps."""
SHORT = 16
"""Up to this number of keys, only an entry with the same rounded number applies: with twice as many keys another kernel
may be the fastest (measured: `docs/decisions/2026-11-21-ranks-by-measurement.md`)."""
TIE = 0.05
"""Rates within this fraction are equal: repeated runs differ by a few percent."""
FOREIGN_TIE = 0.5
"""The same for rates that were measured on a CPU of another vendor at the same level: the ratio of two backends differs
by a factor of two between vendors (measured: `docs/decisions/2026-11-24-ranks-of-every-level.md`)."""

_GRADIENTS = 2.5
"""A backward has five matrix products, a forward two."""
_SAME = frozenset("backward lse lse_grad bias_grad sinks_grad alibi_grad flipped strided some_heads".split())
"""Features that do not change the kind of a problem."""


class Run(NamedTuple):
    """The run that rates are from: date, machine, commit, torch version, and report."""

    when: str
    machine: str
    commit: str
    torch: str
    report: str


class Place(NamedTuple):
    """The place of a problem in a table.

    kind: ``sm90/bfloat16/forward/128/causal+gqa``: architecture, dtype, pass, largest head size, masks and features.
    length, work: bits of the key length, rounded up to a power of two, and of the work.
    """

    kind: str
    length: int
    work: int


class Entry(NamedTuple):
    """Rates by backend, all from one run."""

    run: Run
    rates: Mapping[str, float]


Table = Mapping[str, Mapping[tuple[int, int], Entry]]
"""kind -> (length, work) -> entry."""


class Estimate(NamedTuple):
    """The estimated time of a problem with a backend: its work, divided by the rate of the nearest measured problem.

    seconds: forward, and backward if there are gradients. rate: work per second. unit: of the work, "FLOP" or "B". run:
        the run that the rate is from.
    """

    seconds: float
    rate: float
    unit: str
    run: Run

    def __str__(self) -> str:
        return f"est. {span(self.seconds)}, from bench {self.run.when[:10]}, {self.run.machine}"


# The place of a problem


def architecture(device: str, machine: Machine) -> str | None:
    """ "sm90" of a GPU, "amx" or "avx2" of a CPU (the native kernel's level); None if it is not known.

    "sm90+FA3" if another implementation replaces PyTorch's own flash kernel, whose rates are different.

    >>> architecture("cuda", Machine.named("h200"))
    'sm90'
    """
    if device == "cpu":
        library = cpu.load() if machine.probed else ""
        return machine.isa.lower() or None if isinstance(library, str) else library.level
    if device == "cuda" and machine.compute_capability is not None and not machine.hip:
        return "sm{}{}".format(*machine.compute_capability) + (f"+{machine.flash_impl}" if machine.flash_impl else "")
    return None


def place(problem: Problem, machine: Machine) -> Place | None:
    """The place of this problem; None on an architecture that has no name."""
    on = architecture(problem.device, machine)
    if on is None:
        return None
    rounded = problem._replace(q_len=_up(problem.q_len), kv_len=_up(problem.kv_len))
    if problem.documents is not None:
        count, longest_q, longest_kv = problem.documents
        rounded = rounded._replace(documents=(_up(count), _up(longest_q), _up(longest_kv)))
    dtype, width = str(problem.dtype).removeprefix("torch."), max(32, _up(max(problem.qk_dim, problem.v_dim)))
    kind = f"{on}/{dtype}/{_pass(problem)}/{width}/{_structure(problem)}"
    _, longest = _longest(rounded)
    return Place(kind, longest.bit_length(), int(work(rounded)).bit_length())


def _up(length: int | None) -> int:
    return 1 << (length - 1).bit_length() if length else 0


def _pass(problem: Problem) -> str:
    if "backward" in problem.features:
        return "training"
    longest_q, _ = _longest(problem)
    return "decode" if longest_q == 1 else "forward"


def _structure(problem: Problem) -> str:
    """``full``, ``causal+gqa``: masks and features, in alphabetical order."""
    words = problem.mask.kinds | (problem.features - _SAME)
    if _pass(problem) == "decode" and problem.align != "top_left":
        words -= {"causal"}  # the last query attends to every key
    if problem.deterministic:
        words |= {"deterministic"}
    return "+".join(sorted(words)) or "full"


def _longest(problem: Problem) -> tuple[int, int]:
    """The longest sequence of queries and of keys; the number of tokens if the lengths are only on a GPU."""
    _, longest_q, longest_kv = problem.documents or (0, None, None)
    return longest_q or problem.q_len, longest_kv or problem.kv_len


def work(problem: Problem) -> float:
    """Operations of the pairs in its band, or bytes of keys and values in decoding. Lengths that depend on
    values of tensors count in full.

    >>> import torch, undivided
    >>> q = torch.empty(1, 4, 2, 8, device="meta")
    >>> mask = undivided.masks.causal()
    >>> work(undivided.explain(q, q, q, layout="bshd", mask=mask).problem)  # 2 heads, 10 pairs, 2 * 8 multiply-adds
    640.0
    """
    if _pass(problem) == "decode":
        row = problem.kv_heads * (problem.qk_dim + problem.v_dim) * problem.dtype.itemsize
        return float(problem.batch * problem.kv_len * row)
    longest_q, longest_kv = _longest(problem)
    sequences = problem.batch * problem.q_len / max(longest_q, 1)
    pairs = sequences * problem.heads * _pairs(problem, longest_q, longest_kv)
    forward = 2.0 * pairs * (problem.qk_dim + problem.v_dim)
    return forward * (1 + _GRADIENTS) if _pass(problem) == "training" else forward


def _pairs(problem: Problem, q_len: int, kv_len: int) -> int:
    """Number of pairs in the band of one sequence and head."""
    left, right = problem.mask.left, problem.mask.right
    shift = kv_len - q_len if problem.align == "bottom_right" else 0
    above = 0 if left is None else _keys_before(shift - left, q_len, kv_len)
    return (q_len * kv_len if right is None else _keys_before(shift + right + 1, q_len, kv_len)) - above


def _keys_before(first: int, q_len: int, kv_len: int) -> int:
    """Number of keys before ``row + first``, summed over the rows."""
    some = min(max(-first, 0), q_len)
    whole = min(max(kv_len - first, some), q_len)
    return (whole - some) * (some + whole - 1) // 2 + (whole - some) * first + (q_len - whole) * kv_len


# Measurements


def nearest(problem: Problem, machine: Machine) -> Entry | None:
    """The entry of the nearest measured problem of this kind, within `NEAR` in key length and work, or None."""
    at = place(problem, machine)
    if at is None:
        return None
    for table in tables():
        entries = table.get(at.kind, {})
        near = [(distance, one) for one in entries if (distance := _distance(at, *one)) is not None]
        if near:
            return entries[min(near)[1]]
    return None


def _distance(at: Place, length: int, work: int) -> int | None:
    """The powers of two between a place and a measured one; None if there are more than `NEAR`."""
    longer, more = abs(length - at.length), abs(work - at.work)
    reach = NEAR[0] if min(length, at.length) > SHORT.bit_length() else 0
    return longer + more if longer <= reach and more <= NEAR[1] else None


def estimate(entry: Entry | None, name: str, problem: Problem) -> Estimate | None:
    """The estimated time of this problem with the backend of this name; None if it was not measured."""
    rate = entry.rates.get(name) if entry is not None else None
    if entry is None or rate is None:
        return None
    return Estimate(work(problem) / rate, rate, "B" if _pass(problem) == "decode" else "FLOP", entry.run)


def tie(entry: Entry, device: str, machine: Machine) -> float:
    """The fraction within which the rates of an entry are equal on this machine: `TIE`, or `FOREIGN_TIE`.

    >>> entry = Entry(Run("2027-01-02", "AMD EPYC, 1 thread", "abc", "2.13", "a.json"), {})
    >>> tie(entry, "cpu", Machine(processor="AMD Ryzen")), tie(entry, "cpu", Machine(processor="Intel(R) Xeon(R)"))
    (0.05, 0.5)
    """
    return FOREIGN_TIE if is_foreign(entry.run, device, machine) else TIE


def is_foreign(run: Run, device: str, machine: Machine) -> bool:
    """Whether a run was made on a CPU of another vendor than this machine's; False if the machine names no CPU."""
    ours = _vendor(machine.processor)
    return device == "cpu" and ours not in ("", _vendor(run.machine))


def _vendor(processor: str) -> str:
    """The first word of a processor's name, "amd" or "intel"; "" of a described machine without one."""
    word = re.match(r"[A-Za-z]*", processor)
    return word[0].lower() if word else ""


def fastest_first(names: Sequence[str], rates: Mapping[str, float], tie: float = TIE) -> Iterator[str]:
    """The names, fastest first; of those within `tie` of the fastest remaining one, the first in the given order.

    >>> list(fastest_first(["a", "b", "c"], {"a": 10.0, "b": 20.0, "c": 20.5}))
    ['b', 'c', 'a']
    """
    left = list(names)
    while left:
        best = max(rates[name] for name in left)
        yield (found := next(name for name in left if rates[name] >= (1 - tie) * best))
        left.remove(found)


# Files

OURS = Path(__file__).with_name("measured.json")


def users_path() -> Path:
    """The path of the user's table: UNDIVIDED_RANKS, or a file in the cache folder."""
    return users_file("UNDIVIDED_RANKS", "ranks.json")


@functools.cache
def tables() -> tuple[Table, ...]:
    """The user's table, then the package's. A user's file that cannot be parsed, or that UNDIVIDED_RANKS
    names and does not exist, is left out with a warning."""
    ours, path = read(OURS), users_path()
    try:
        if os.environ.get("UNDIVIDED_RANKS") and not path.exists():
            raise InputError("UNDIVIDED_RANKS", "name a file that exists", str(path))
        return read(path), ours
    except InputError as error:
        warnings.warn(f"{error}; the package's own ranks are used", RuntimeWarning, stacklevel=2)
        return (ours,)


def in_force() -> Table:
    """The tables as one, the user's entries first."""
    return functools.reduce(merged, reversed(tables()))


class PlaceCounts(NamedTuple):
    """Where the measurements on an architecture come from.

    users, ours: the number of places in the user's table and in the package's. when: the date of the user's newest.
    """

    users: int
    ours: int
    when: str


def count_places(on: str) -> PlaceCounts:
    """What the tables hold on an architecture, such as "amx".

    >>> count_places("no such level")
    PlaceCounts(users=0, ours=0, when='')
    """
    *users, ours = [
        [entry for kind, places in table.items() if kind.split("/")[0] == on for entry in places.values()]
        for table in tables()
    ]
    own = [entry for entries in users for entry in entries]
    return PlaceCounts(len(own), len(ours), max((entry.run.when[:10] for entry in own), default=""))


def read(path: Path) -> Table:
    """The table in a file; an empty one if there is none.

    Raises:
        InputError: the file is not a table.
    """
    try:
        return _parsed(read_json(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        detail = " ".join(str(error).split()) or type(error).__name__
        raise InputError(str(path), "be a table of ranks, as `undivided ranks` writes it", detail) from None


def _parsed(found: Mapping[str, Any]) -> Table:
    if found["schema"] != SCHEMA:
        raise ValueError(f"schema {found['schema']} (this version reads {SCHEMA})")
    runs = {name: Run(**fields) for name, fields in found["runs"].items()}
    for name, run in runs.items():
        if not all(isinstance(field, str) for field in run):
            raise ValueError(f"run {name} has a field that is not text")
    table: dict[str, dict[tuple[int, int], Entry]] = {}
    for kind, places in found["rates"].items():
        for at, (run, rates) in places.items():
            length, size = map(int, at.split("/"))
            rates = {str(name): float(rate) for name, rate in rates.items()}
            if not all(0 < rate < math.inf for rate in rates.values()):
                raise ValueError(f"a rate that is not a positive number in {kind} {at}")
            table.setdefault(kind, {})[length, size] = Entry(runs[run], rates)
    return table


def write(path: Path, table: Table) -> None:
    """Write a table to a file, with one line per entry."""
    runs = sorted({entry.run for places in table.values() for entry in places.values()})
    names = {run: f"{number}" for number, run in enumerate(runs)}
    kinds = []
    for kind, places in sorted(table.items()):
        lines = [
            f"   {json.dumps(f'{length}/{size}')}: {json.dumps([names[run], dict(sorted(rates.items()))])}"
            for (length, size), (run, rates) in sorted(places.items())
        ]
        kinds.append(f"  {json.dumps(kind)}: {{\n" + ",\n".join(lines) + "\n  }")
    listed = ",\n".join(f"  {json.dumps(names[run])}: {json.dumps(run._asdict())}" for run in runs)
    text = f'{{\n "schema": {SCHEMA},\n "runs": {{\n{listed}\n }},\n "rates": {{\n' + ",\n".join(kinds) + "\n }\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def merged(old: Table, new: Table) -> Table:
    """The entries of both tables; if both have an entry, the new one."""
    return {kind: {**old.get(kind, {}), **new.get(kind, {})} for kind in {**old, **new}}
