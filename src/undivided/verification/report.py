"""The result of a verification: an error, a budget and a verdict for every backend and quantity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Report", "Row", "finite"]


@dataclass(frozen=True)
class Row:
    """The error of one quantity of one backend.

    Attributes:
        backend: name of the backend.
        quantity: "out", "lse", or the gradient of an argument: "dq", "dk", "dv", "dbias", "dsinks", "dalibi_slopes".
        error: relative to the norm of the right answer; inf if the quantity is missing or NaN, or an entry that must
            be exact is not.
        budget: the largest allowed error.
        note: what was raised, or what else is wrong; empty otherwise.
        undecided: whether plain attention has no digit right, so that there is nothing to compare with.

    >>> Row("native", "out", 1e-7, 3e-7).ok
    True
    """

    backend: str
    quantity: str
    error: float
    budget: float
    note: str = ""
    undecided: bool = False

    @property
    def ok(self) -> bool:
        """Whether the error is finite and within the budget, and the quantity is not undecided."""
        return not self.undecided and self.error <= self.budget and math.isfinite(self.error)

    @property
    def verdict(self) -> str:
        """ "ok", "WRONG" or "undecided"."""
        return "undecided" if self.undecided else "ok" if self.ok else "WRONG"


@dataclass(frozen=True)
class Report:
    """The result of `undivided.verify`. ``print`` shows it as a table.

    Attributes:
        problem: a description of the problem.
        rows: one `Row` for every backend that ran and every quantity that it returned.
        refused: the reasons of the backends that did not run, by name.
        unchecked: the quantities that a backend that ran did not return, with its reasons, by name.

    >>> report = Report("a problem", (Row("reference", "out", 1e-7, 3e-7),), {"flex": ("no support for sinks",)})
    >>> report.ok
    True
    >>> print(report)
    1 backend right, 1 refused: a problem
      backend    quantity    error   budget
      reference  out       1.0e-07  3.0e-07  ok
      flex       refused: no support for sinks
    """

    problem: str
    rows: tuple[Row, ...]
    refused: Mapping[str, tuple[str, ...]]
    unchecked: Mapping[str, tuple[str, ...]] = ()  # type: ignore[assignment]

    def __post_init__(self) -> None:
        object.__setattr__(self, "refused", dict(self.refused))
        object.__setattr__(self, "unchecked", dict(self.unchecked))

    @property
    def ok(self) -> bool:
        """Whether at least one backend ran, and all rows are within their budgets."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def failures(self) -> tuple[Row, ...]:
        """The rows that are outside their budget; undecided rows are not among them."""
        return tuple(row for row in self.rows if not row.ok and not row.undecided)

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that ran, in order."""
        return tuple(dict.fromkeys(row.backend for row in self.rows))

    def of(self, backend: str) -> dict[str, Row]:
        """The rows of one backend.

        Args:
            backend: its name.

        Returns:
            A `Row` by quantity; empty if the backend refused.
        """
        return {row.quantity: row for row in self.rows if row.backend == backend}

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values for JSON; an infinite error is None.

        Returns:
            A dictionary of strings, numbers, lists and dictionaries.

        >>> Report("a problem", (Row("x", "out", math.inf, 1e-7),), {}).to_dict()["rows"][0]["error"] is None
        True
        """
        return {
            "ok": self.ok,
            "problem": self.problem,
            "rows": [
                {
                    "backend": row.backend,
                    "quantity": row.quantity,
                    "error": finite(row.error),
                    "budget": finite(row.budget),
                    "ok": row.ok,
                    "undecided": row.undecided,
                    "note": row.note,
                }
                for row in self.rows
            ],
            "refused": {name: list(reasons) for name, reasons in self.refused.items()},
            "unchecked": {name: list(reasons) for name, reasons in self.unchecked.items()},
        }

    def __str__(self) -> str:
        width = max(map(len, ("backend", *self.backends, *self.refused)))
        quantities = max(map(len, ("quantity", *(row.quantity for row in self.rows))))
        lines = [f"{self._headline()}: {self.problem}"]
        if self.rows:
            lines.append(f"  {'backend':<{width}}  {'quantity':<{quantities}}  {'error':>7}  {'budget':>7}")
        previous = None
        for row in self.rows:
            name = row.backend if row.backend != previous else ""
            numbers = f"{row.error:>7.1e}  {row.budget:>7.1e}  {row.verdict}"
            line = f"  {name:<{width}}  {row.quantity:<{quantities}}  {numbers}"
            lines.append(f"{line}  {row.note}" if row.note else line)
            previous = row.backend
        for label, by_name in (("not checked", self.unchecked), ("refused", self.refused)):
            lines += [
                line for name, reasons in by_name.items() for line in _format_reasons(name, width, label, reasons)
            ]
        return "\n".join(lines)

    def _headline(self) -> str:
        wrong = {row.backend for row in self.failures}
        undecided = {row.backend for row in self.rows if row.undecided} - wrong
        right = len(self.backends) - len(wrong) - len(undecided)
        counts = [
            (len(wrong), "WRONG"),
            (len(undecided), "undecided"),
            (right, "right"),
            (len(self.refused), "refused"),
        ]
        texts = [f"{_backends(n) if not i else n} {word}" for i, (n, word) in enumerate(c for c in counts if c[0])]
        return ", ".join(texts) or "nothing ran"


def _backends(count: int) -> str:
    return f"{count} backend{'' if count == 1 else 's'}"


def _format_reasons(name: str, width: int, label: str, reasons: Iterable[str]) -> list[str]:
    first, *rest = reasons
    indent = " " * (width + 4 + len(label) + 2)
    return [f"  {name:<{width}}  {label}: {first}", *(f"{indent}{reason}" for reason in rest)]


def finite(number: float) -> float | None:
    """The number, or None in place of an infinity or NaN, which JSON does not have."""
    return number if math.isfinite(number) else None
