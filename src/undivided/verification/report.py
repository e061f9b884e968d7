"""What a verification found: for every backend and quantity an error, a budget and a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Report", "Row"]


@dataclass(frozen=True)
class Row:
    """One backend and one quantity.

    quantity: "out", "lse", or the gradient of an argument: "dq", "dk", "dv", "dbias", "dsinks", "dalibi_slopes".
    error: relative to the norm of the right answer; inf where it is NaN, missing, or not exact where it must be.
    budget: the largest error allowed. note: what was raised, where nothing came back.
    """

    backend: str
    quantity: str
    error: float
    budget: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is within the budget."""
        return self.error <= self.budget


@dataclass(frozen=True)
class Report:
    """The outcome of `undivided.verify`. ``print`` it for the table.

    problem: what was asked, in words.
    rows: one for every backend that ran and every quantity it returned.
    refused: the reasons of the backends that did not run at all, by name.
    unchecked: what was not checked of a backend that ran, and its reasons, by name.

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
        """Whether something ran, and all that ran is within its budget."""
        return bool(self.rows) and not self.failures

    @property
    def failures(self) -> tuple[Row, ...]:
        """The rows that are outside their budget."""
        return tuple(row for row in self.rows if not row.ok)

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends that ran, in order."""
        return tuple(dict.fromkeys(row.backend for row in self.rows))

    def of(self, backend: str) -> dict[str, Row]:
        """The rows of one backend, by quantity; empty where it refused."""
        return {row.quantity: row for row in self.rows if row.backend == backend}

    def to_dict(self) -> dict[str, Any]:
        """As plain values that JSON can hold; an infinite error is None.

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
                    "error": _finite(row.error),
                    "budget": _finite(row.budget),
                    "ok": row.ok,
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
        before = None
        for row in self.rows:
            name = row.backend if row.backend != before else ""
            numbers = f"{row.error:>7.1e}  {row.budget:>7.1e}  {'ok' if row.ok else 'WRONG'}"
            line = f"  {name:<{width}}  {row.quantity:<{quantities}}  {numbers}"
            lines.append(f"{line}  {row.note}" if row.note else line)
            before = row.backend
        for word, which in (("not checked", self.unchecked), ("refused", self.refused)):
            lines += [line for name, reasons in which.items() for line in _listed(name, width, word, reasons)]
        return "\n".join(lines)

    def _headline(self) -> str:
        wrong = len({row.backend for row in self.failures})
        right = len(self.backends) - wrong
        counts = [(wrong, "WRONG"), (right, "right"), (len(self.refused), "refused")]
        said = [f"{_backends(n) if not i else n} {word}" for i, (n, word) in enumerate(c for c in counts if c[0])]
        return ", ".join(said) or "nothing ran"


def _backends(count: int) -> str:
    return f"{count} backend{'' if count == 1 else 's'}"


def _listed(name: str, width: int, word: str, reasons: Iterable[str]) -> list[str]:
    first, *rest = reasons
    indent = " " * (width + 4 + len(word) + 2)
    return [f"  {name:<{width}}  {word}: {first}", *(f"{indent}{reason}" for reason in rest)]


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
