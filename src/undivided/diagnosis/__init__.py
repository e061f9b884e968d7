"""Known attention errors: their causes and fixes.

entries   the table, one entry per error      _entry    the fields of an entry
_values   facts from the values in a text     _report   the answer and its output
_page     docs/troubleshooting.md               modules   a program: layers and caches on a device, against the CPU
"""

from __future__ import annotations

import re
import traceback
from typing import NamedTuple

from undivided.arguments.signature import checked_call
from undivided.diagnosis._entry import MESSAGE, WORDS, Entry
from undivided.diagnosis._report import Diagnosis, Finding
from undivided.diagnosis._values import observed
from undivided.errors import InputError

__all__ = ["Diagnosis", "Entry", "Finding", "diagnose"]

_MAX_CHARACTERS = 60_000  # of a longer log, only the start and the end are searched
_NOISE = re.compile(r"\x1b\[[0-9;]*m|^(?:\[rank\d+\]:|\([\w ]+pid=\d+\)|E {3})\s?", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "[^"]*", line \d+|^Traceback \(most recent call last\)', re.MULTILINE)


@checked_call
def diagnose(problem: str | BaseException) -> Diagnosis:
    """A `Diagnosis`: the known errors in a text or an exception, with causes, fixes and calls that avoid them.

    Args:
        problem: an exception (its causes and contexts are searched too), or any text: a message, a whole traceback or
            log, a description in your own words, or the id of an entry.

    Returns:
        A `Diagnosis` with the most specific error first: ``print`` it; ``.known`` is whether an error was recognised.

    Raises:
        InputError: the problem is neither a text nor an exception, or it is empty.

    Source: each entry names its own (``.entries[0].source``): the code that raises the error, or reports of it.

    >>> answer = diagnose("RuntimeError: No available kernel. Aborting execution.")
    >>> answer.entries[0].id
    'sdpa-no-kernel'
    >>> diagnose("KeyError: 'x'").known
    False
    """
    from undivided.diagnosis.entries import TABLE

    text = _NOISE.sub("", _text(problem))
    by_id = [entry for entry in TABLE if entry.id == text.strip()]
    if by_id:
        return Diagnosis((Finding(by_id[0], ()),), ())
    flat, has_frames = " ".join(text.split()), bool(_FRAME.search(text))
    messages = _without_frames(text) if has_frames else flat
    matches = []
    for entry in TABLE:
        match = entry.find(messages if entry.weight == WORDS else flat, has_frames)
        if match is not None:
            facts = tuple(entry.reads(match, flat)) if entry.reads else ()
            matches.append(_Match(entry.weight, _match_length(match), Finding(entry, facts)))
    matches.sort(key=lambda found: (found.weight, found.length), reverse=True)  # ties stay in the order of the table
    has_message = any(found.weight >= MESSAGE for found in matches)  # then matches of descriptions are dropped
    findings = tuple(found.finding for found in matches if not has_message or found.weight >= MESSAGE)
    return Diagnosis(findings, tuple(observed(flat).items()))


class _Match(NamedTuple):
    """What was found for an entry that matches. Larger weights, then longer matches, are more specific."""

    weight: int
    length: int
    finding: Finding


def _match_length(match: re.Match[str]) -> int:
    """The length of the match; 0 for patterns that are anchored at the start, because they may span the whole text."""
    return 0 if match.re.pattern.startswith(r"\A") else len(match[0])


def _text(problem: str | BaseException) -> str:
    if isinstance(problem, BaseException):
        text = "".join("".join(traceback.format_exception(e, chain=False)) for e in _chain(problem))
    elif isinstance(problem, str):
        text = problem
    else:
        raise InputError("problem", "be a text or an exception", type(problem).__name__, "diagnose(str(x))")
    if not text.strip():
        raise InputError("problem", "contain the text of an error", "an empty text", "paste the traceback")
    half = _MAX_CHARACTERS // 2
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:half]}\n{text[-half:]}"


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and all its causes and contexts, also those that ``from None`` hides, the earliest first."""
    chain: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and all(one is not other for other in chain):
            chain.append(one)
            waiting += [one.__context__, one.__cause__]
    return chain[::-1]


def _without_frames(text: str) -> str:
    """A traceback without its stack frames: the messages without the code around them."""
    return " ".join(" ".join(line for line in text.splitlines() if not line[:1].isspace()).split())
