"""Measured rates of backends, and the estimates by which selection orders the backends.

A table has, for kinds of problems on an architecture, the rate that each backend reached in one run: operations on
pairs per second, or bytes read per second in decoding. Only rates of the same run are compared, so each entry has one
run. The package's table is ``rates.json``, made from reports in ``benchmarks/``; a user's table (UNDIVIDED_RANKS, or
a file in the cache folder) comes before it. Both are read once, at the first selection; `undivided ranks` writes them,
and `undivided ranks --measure` measures the user's.

Lengths are rounded up to powers of two, because selection reads no more of them (see `decision.selection_key`).
"""

from undivided.selection.measured.estimates import (
    FOREIGN_TIE,
    NEAR,
    SHORT,
    TIE,
    Estimate,
    estimate,
    fastest_first,
    is_foreign,
    nearest,
    tie,
)
from undivided.selection.measured.places import Place, architecture, place, work
from undivided.selection.measured.table import (
    OURS,
    SCHEMA,
    MeasuredRates,
    PlaceCounts,
    Run,
    Table,
    count_places,
    in_force,
    merged,
    read,
    tables,
    users_path,
    write,
)

__all__ = [
    "FOREIGN_TIE",
    "NEAR",
    "OURS",
    "SCHEMA",
    "SHORT",
    "TIE",
    "MeasuredRates",
    "Estimate",
    "Place",
    "PlaceCounts",
    "Run",
    "Table",
    "architecture",
    "count_places",
    "estimate",
    "fastest_first",
    "in_force",
    "is_foreign",
    "merged",
    "nearest",
    "place",
    "read",
    "tables",
    "tie",
    "users_path",
    "work",
    "write",
]
