"""The catalogue of named cases: what the tests and ``verify`` try, and what gates the benchmarks.

A case is a description without tensors; `undivided.verification.inputs.build` makes the tensors.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from undivided.errors import InputError
from undivided.verification.case import Case
from undivided.verification.case_tables import (
    ARBITRARY,
    CAUSAL,
    DROPOUT,
    HEADS,
    MEMORY,
    PACKED,
    PADDED,
    PAGED,
    PLAIN,
    QUANTIZED,
    SCORES,
    SIZES,
)

__all__ = ["CASES", "TAGS", "Case", "by_tag", "get"]


def _catalogue(*groups: Iterable[Case]) -> Mapping[str, Case]:
    """The cases of all groups by name; raises ValueError if a name is used twice."""
    cases: dict[str, Case] = {}
    for group in groups:
        for case in group:
            if case.name in cases:
                raise ValueError(f"two cases are called {case.name}")
            cases[case.name] = case
    return MappingProxyType(cases)


CASES: Mapping[str, Case] = _catalogue(
    PLAIN, MEMORY, SIZES, HEADS, CAUSAL, PADDED, PACKED, ARBITRARY, SCORES, DROPOUT, PAGED, QUANTIZED
)
"""All cases by name."""

TAGS = frozenset(tag for case in CASES.values() for tag in case.tags)
"""The groups of `case_tables`, and "smoke"."""


def by_tag(*tags: str) -> tuple[Case, ...]:
    """The cases that have all of these tags, in the order of the catalogue.

    Raises:
        InputError: no case has one of the tags.

    >>> by_tag("smoke", "packed")[0].name
    'documents-thd-causal'
    """
    for tag in tags:
        if tag not in TAGS:
            raise InputError("tag", f"be one of {', '.join(sorted(TAGS))}", repr(tag))
    return tuple(case for case in CASES.values() if case.tags.issuperset(tags))


def get(name: str) -> Case:
    """The case with this name.

    Raises:
        InputError: there is no such case.

    >>> get("gqa-4").kv_heads
    2
    """
    if name in CASES:
        return CASES[name]
    near = difflib.get_close_matches(str(name), CASES, n=3)
    hint = f"near it: {', '.join(near)}" if near else None
    raise InputError("case", f"be one of the {len(CASES)} cases of undivided.verification.cases", repr(name), hint)
