"""Known attention errors: cause and repair.

entries  the table, one entry an error      _entry   what an entry is
_values  what the numbers in a text say     _report  the answer, and how it prints      _page  docs/troubleshooting.md
"""

from __future__ import annotations

import re
import traceback

from undivided.diagnosis._entry import MESSAGE, WORDS, Entry
from undivided.diagnosis._report import Diagnosis, Finding
from undivided.diagnosis._values import observed
from undivided.errors import InputError

__all__ = ["Diagnosis", "Entry", "Finding", "diagnose"]

_MOST_READ = 60_000  # characters; of a longer log its beginning and its end, where errors stand
_NOISE = re.compile(r"\x1b\[[0-9;]*m|^(?:\[rank\d+\]:|\([\w ]+pid=\d+\)|E {3})\s?", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "[^"]*", line \d+|^Traceback \(most recent call last\)', re.MULTILINE)


def diagnose(problem: str | BaseException) -> Diagnosis:
    """The known errors in a text or an exception, the most specific first, each with cause, repair and a call that
    avoids it.

    Args:
        problem: an exception (its causes and contexts are read too), or any text: a message, a whole traceback or
            log, a description in your words, or the id of an entry.

    Returns:
        A `Diagnosis`: ``print`` it; ``.known`` says whether anything was recognised.

    Raises:
        InputError: neither a text nor an exception, or an empty one.

    Source: each entry names its own (``.entries[0].source``): the code that raises the error, or reports of it.

    >>> answer = diagnose("RuntimeError: No available kernel. Aborting execution.")
    >>> answer.entries[0].id
    'sdpa-no-kernel'
    >>> diagnose("KeyError: 'x'").known
    False
    """
    from undivided.diagnosis.entries import TABLE

    text = _NOISE.sub("", _text(problem))
    named = [entry for entry in TABLE if entry.id == text.strip()]
    if named:
        return Diagnosis((Finding(named[0], ()),), ())
    flat, framed = " ".join(text.split()), bool(_FRAME.search(text))
    spoken = _spoken(text) if framed else flat
    found = []
    for place, entry in enumerate(TABLE):
        match = entry.find(spoken if entry.weight == WORDS else flat, framed)
        if match is not None:
            said = tuple(entry.reads(match, flat)) if entry.reads else ()
            found.append((-entry.weight, -_width(match), place, Finding(entry, said)))
    found.sort(key=lambda row: row[:3])
    told = any(-row[0] >= MESSAGE for row in found)  # then guesses from words add nothing
    findings = tuple(row[3] for row in found if not told or -row[0] >= MESSAGE)
    return Diagnosis(findings, tuple(observed(flat).items()))


def _width(match: re.Match[str]) -> int:
    """How much was matched; patterns that begin with the text do so to look at all of it, which says nothing."""
    return 0 if match.re.pattern.startswith(r"\A") else len(match[0])


def _text(problem: str | BaseException) -> str:
    if isinstance(problem, BaseException):
        text = "".join("".join(traceback.format_exception(e, chain=False)) for e in _chain(problem))
    elif isinstance(problem, str):
        text = problem
    else:
        raise InputError("problem", "be a text or an exception", type(problem).__name__, "diagnose(str(x))")
    if not text.strip():
        raise InputError("problem", "hold the text of an error", "an empty text", "paste the traceback")
    half = _MOST_READ // 2
    return text if len(text) <= _MOST_READ else f"{text[:half]}\n{text[-half:]}"


def _chain(error: BaseException) -> list[BaseException]:
    """The exception and all that led to it, also where ``from None`` hides it."""
    chain: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and all(one is not other for other in chain):
            chain.append(one)
            waiting += [one.__context__, one.__cause__]
    return chain[::-1]


def _spoken(text: str) -> str:
    """A traceback without its frames: what was said, not the code that stands around it."""
    return " ".join(" ".join(line for line in text.splitlines() if not line[:1].isspace()).split())
