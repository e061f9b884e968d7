"""Tables of measured rates: what they hold, the files they are in, and the two that apply."""

from __future__ import annotations

import functools
import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from undivided._files import read_json, replace_text, users_file
from undivided.errors import InputError

SCHEMA = 1
"""The version of the files."""
PACKAGE_TABLE = Path(__file__).with_name("rates.json")
"""The package's own table."""


class Run(NamedTuple):
    """The run that rates are from: date, machine, commit, torch version, and report."""

    when: str
    machine: str
    commit: str
    torch: str
    report: str


class MeasuredRates(NamedTuple):
    """Rates by backend, all from one run."""

    run: Run
    rates: Mapping[str, float]


Table = Mapping[str, Mapping[tuple[int, int], MeasuredRates]]
"""kind -> (length, work) -> entry."""


def user_table_path() -> Path:
    """The path of the user's table: UNDIVIDED_RANKS, or a file in the cache folder."""
    return users_file("UNDIVIDED_RANKS", "ranks.json")


@functools.cache
def tables() -> tuple[Table, ...]:
    """The user's table, then the package's. A user's file that cannot be parsed, or that UNDIVIDED_RANKS
    names and does not exist, is left out with a warning."""
    ours, path = read(PACKAGE_TABLE), user_table_path()
    try:
        if os.environ.get("UNDIVIDED_RANKS") and not os.path.exists(path):  # which raises nothing, unlike Path.exists
            raise InputError("UNDIVIDED_RANKS", "name a file that exists", str(path))
        return read(path), ours
    except InputError as error:
        warnings.warn(f"{error}; the package's own ranks are used", RuntimeWarning, stacklevel=2)
        return (ours,)


def merged_tables() -> Table:
    """The tables as one, the user's entries first."""
    return functools.reduce(merged, reversed(tables()))


class EntryCounts(NamedTuple):
    """Where the measurements on an architecture come from.

    users, ours: the number of measured problems in the user's table and in the package's. when: the date of the
    user's newest.
    """

    users: int
    ours: int
    when: str


def count_entries(architecture: str) -> EntryCounts:
    """What the tables hold on an architecture, such as "amx".

    >>> count_entries("no such level")
    EntryCounts(users=0, ours=0, when='')
    """
    *users, ours = [
        [entry for kind, cells in table.items() if kind.split("/")[0] == architecture for entry in cells.values()]
        for table in tables()
    ]
    own = [entry for entries in users for entry in entries]
    return EntryCounts(len(own), len(ours), max((entry.run.when[:10] for entry in own), default=""))


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
        detail = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split()) or type(error).__name__
        raise InputError(str(path), "be a table of ranks, as `undivided ranks` writes it", detail) from None


def _parsed(contents: Any) -> Table:
    if not isinstance(contents, Mapping):
        raise ValueError(f"a JSON document of another type ({type(contents).__name__})")
    if contents["schema"] != SCHEMA:
        raise ValueError(f"schema {contents['schema']} (this version reads {SCHEMA})")
    runs = {name: Run(**fields) for name, fields in contents["runs"].items()}
    for name, run in runs.items():
        if not all(isinstance(field, str) for field in run):
            raise ValueError(f"run {name} has a field that is not text")
    table: dict[str, dict[tuple[int, int], MeasuredRates]] = {}
    for kind, cells in contents["rates"].items():
        for cell, (run, rates) in cells.items():
            length, size = map(int, cell.split("/"))
            rates = {str(name): float(rate) for name, rate in rates.items()}
            if not all(0 < rate < math.inf for rate in rates.values()):
                raise ValueError(f"a rate that is not a positive number in {kind} {cell}")
            table.setdefault(kind, {})[length, size] = MeasuredRates(runs[run], rates)
    return table


def write(path: Path, table: Table) -> None:
    """Write a table to a file, with one line per entry."""
    runs = sorted({entry.run for cells in table.values() for entry in cells.values()})
    names = {run: f"{number}" for number, run in enumerate(runs)}
    kinds = []
    for kind, cells in sorted(table.items()):
        lines = [
            f"   {json.dumps(f'{length}/{size}')}: {json.dumps([names[run], dict(sorted(rates.items()))])}"
            for (length, size), (run, rates) in sorted(cells.items())
        ]
        kinds.append(f"  {json.dumps(kind)}: {{\n" + ",\n".join(lines) + "\n  }")
    listed = ",\n".join(f"  {json.dumps(names[run])}: {json.dumps(run._asdict())}" for run in runs)
    text = f'{{\n "schema": {SCHEMA},\n "runs": {{\n{listed}\n }},\n "rates": {{\n' + ",\n".join(kinds) + "\n }\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)


def merged(old: Table, new: Table) -> Table:
    """The entries of both tables; if both have an entry, the new one."""
    return {kind: {**old.get(kind, {}), **new.get(kind, {})} for kind in {**old, **new}}
