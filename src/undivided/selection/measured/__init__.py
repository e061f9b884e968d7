"""Measured rates of backends, and the estimates by which selection orders the backends.

A table has, for kinds of problems on an architecture, the rate that each backend reached in one run: operations on
pairs per second, or bytes read per second in decoding. Only rates of the same run are compared, so each entry has one
run. The package's table is ``rates.json``, made from reports in ``benchmarks/``; a user's table (UNDIVIDED_RANKS, or
a file in the cache folder) comes before it. Both are read once, at the first selection; `undivided ranks` writes them,
and `undivided ranks --measure` measures the user's.

Lengths are rounded up to powers of two, because selection reads no more of them (see `decision.selection_key`).
"""

from undivided.selection.measured.cells import TableCell, architecture, table_cell, work
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
from undivided.selection.measured.table import (
    PACKAGE_TABLE,
    SCHEMA,
    EntryCounts,
    MeasuredRates,
    Run,
    Table,
    count_entries,
    merged,
    merged_tables,
    read,
    tables,
    user_table_path,
    write,
)

__all__ = [
    "FOREIGN_TIE",
    "NEAR",
    "PACKAGE_TABLE",
    "SCHEMA",
    "SHORT",
    "TIE",
    "MeasuredRates",
    "Estimate",
    "TableCell",
    "EntryCounts",
    "Run",
    "Table",
    "architecture",
    "count_entries",
    "estimate",
    "fastest_first",
    "merged_tables",
    "is_foreign",
    "merged",
    "nearest",
    "table_cell",
    "read",
    "tables",
    "tie",
    "user_table_path",
    "work",
    "write",
]
