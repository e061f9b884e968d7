"""What the table of known errors is made of."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache

PRELUDE = "import torch, undivided\nfrom undivided import masks\n"
"""What every snippet begins with."""

WORDS, MESSAGE, PRECISE = range(3)
"""How much a match says: a description in somebody's words; the text of an error; that and which of its causes it
is."""

ATTENTION = r"attention|attn|sdpa|\bqkv?\b|flash"
"""What stands in a traceback that has to do with attention."""

Reader = Callable[[re.Match[str], str], Sequence[str]]
"""From a match and the whole text to what the values in it say, in sentences."""


@dataclass(frozen=True)
class Entry:
    """One known error.

    Args:
        id: its name, for links and for ``undivided diagnose ID``.
        title: what it is, in a line.
        patterns: regular expressions, any of them; case and white space do not matter.
        example: what it looks like.
        cause: why it is raised. confirm: how to see that this is it. repair: what to do, where one is.
        call: the undivided call that avoids it; runs after `PRELUDE`.
        source: where this is known from.
        near: what must stand somewhere in a text that has stack frames, so that other code's error is not taken for it.
        weight: how much a match says; the most decides which entry comes first.
        reads: what the values in the text say.
    """

    id: str
    title: str
    patterns: tuple[str, ...]
    example: str
    cause: str
    confirm: str
    repair: str
    call: str
    source: str
    near: str = ""
    weight: int = MESSAGE
    reads: Reader | None = None

    def __post_init__(self) -> None:
        for prose in ("title", "cause", "confirm", "repair", "source"):
            object.__setattr__(self, prose, " ".join(getattr(self, prose).split()))
        object.__setattr__(self, "call", inspect.cleandoc(self.call))
        object.__setattr__(self, "example", inspect.cleandoc(self.example))

    @property
    def snippet(self) -> str:
        """The call, with its imports: runs as it stands."""
        return f"{PRELUDE}\n{self.call}\n"

    def find(self, text: str, framed: bool) -> re.Match[str] | None:
        """The longest match of its patterns in a text of one line, `framed` if that text had stack frames."""
        if framed and self.near and not compiled(self.near).search(text):
            return None
        found = [match for pattern in self.patterns if (match := compiled(pattern).search(text))]
        return max(found, key=lambda match: len(match[0]), default=None)

    def to_dict(self) -> dict[str, str]:
        """Its words, by field."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.type == "str" and f.name != "near"}


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Compiled when first needed: importing the library compiles none."""
    return re.compile(pattern, re.IGNORECASE)
