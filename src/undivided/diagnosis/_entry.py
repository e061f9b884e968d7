"""`Entry`, one known error of the table."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

PRELUDE = "import torch, undivided\nfrom undivided import masks\n"
"""The first lines of every snippet."""

WORDS, MESSAGE, PRECISE = range(3)
"""Weight of a match: a description in free words; the text of an error; a text that also identifies the cause."""

ATTENTION = r"attention|attn|sdpa|\bqkv?\b|flash"
"""Words in tracebacks that concern attention."""

_TEXTS = ("id", "title", "example", "cause", "confirm", "fix", "call", "source")
"""The fields of an entry that a reader of its JSON needs."""

Reader = Callable[[re.Match[str], str], Sequence[str]]
"""A function from a match and the whole text to sentences about the values in it."""


@dataclass(frozen=True)
class Entry:
    """One known error.

    Attributes:
        id: its name, for links and for ``undivided diagnose ID``.
        title: a description in one line.
        patterns: regular expressions of which one must match; case and white space are ignored.
        example: the text of the error.
        cause: why it is raised.
        confirm: how to check that this is the cause.
        fix: the fix.
        call: the undivided call that avoids the error; runs after `PRELUDE`.
        source: where the error is documented.
        near: a pattern that a text with stack frames must also contain, so that errors of other code do not match.
        weight: the weight of a match; entries with a larger weight come first.
        reads: returns facts from the values in the text.

    >>> import undivided
    >>> entry = undivided.diagnose("sdpa-no-kernel").entries[0]
    >>> entry.title
    'Every kernel that sdpa_kernel(...) allows refused the inputs'
    """

    id: str
    title: str
    patterns: tuple[str, ...]
    example: str
    cause: str
    confirm: str
    fix: str
    call: str
    source: str
    near: str = ""
    weight: int = MESSAGE
    reads: Reader | None = None

    def __post_init__(self) -> None:
        for prose in ("title", "cause", "confirm", "fix", "source"):
            object.__setattr__(self, prose, " ".join(getattr(self, prose).split()))
        object.__setattr__(self, "call", inspect.cleandoc(self.call))
        object.__setattr__(self, "example", inspect.cleandoc(self.example))

    @property
    def snippet(self) -> str:
        """The call with its imports; it runs unchanged."""
        return f"{PRELUDE}\n{self.call}\n"

    def find(self, text: str, has_frames: bool) -> re.Match[str] | None:
        """The longest match of its patterns in a text of one line; None if there is none.

        has_frames: whether the original text had stack frames.
        """
        if has_frames and self.near and not compiled(self.near).search(text):
            return None
        matches = [match for pattern in self.patterns if (match := compiled(pattern).search(text))]
        return max(matches, key=lambda match: len(match[0]), default=None)

    def to_dict(self) -> dict[str, str]:
        """Its texts, by field."""
        return {name: getattr(self, name) for name in _TEXTS}


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """The compiled pattern; compiled at first use, so that the import of the library compiles none."""
    return re.compile(pattern, re.IGNORECASE)
