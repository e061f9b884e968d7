"""docs/troubleshooting.md, generated from the table: ``python -m undivided.diagnosis > docs/troubleshooting.md``."""

from __future__ import annotations

import re
import textwrap

from undivided.diagnosis._entry import PRELUDE, Entry
from undivided.diagnosis._report import HELPFUL, wrap
from undivided.diagnosis.entries import AREAS, TABLE

_REFERENCE = re.compile(r"\b([\w.-]+/[\w.-]+)#(\d+)")
_WIDTH = 110


def page() -> str:
    """The text of the page."""
    head = f"""
        # Troubleshooting

        {len(TABLE)} known errors of attention calls: the cause, how to confirm it, and the fix.
        `undivided diagnose "the text"`, `python train.py 2>&1 | undivided diagnose` and `undivided.diagnose(exception)`
        look up an error and explain the values in its text. Each snippet runs after

        """
    parts = [textwrap.dedent(head).strip(), f"```python\n{PRELUDE}```", _contents()]
    for area, entries in AREAS.items():
        parts += [f"## {area}", *(_section(entry) for entry in entries)]
    parts += ["## An error that is not here", "This information would help to find the cause:"]
    parts.append("\n".join(wrap(line, "- ", "  ", _WIDTH) for line in HELPFUL))
    parts.append("*This page is generated: `python -m undivided.diagnosis > docs/troubleshooting.md`.*")
    return "\n\n".join(parts) + "\n"


def _contents() -> str:
    """A list of the areas, each with the titles of its entries as links."""
    rows = []
    for area, entries in AREAS.items():
        rows += [f"- {area}", *(f"    - [{_escape(entry.title)}](#{entry.id})" for entry in entries)]
    return "\n".join(rows)


def _section(entry: Entry) -> str:
    prose = {"Cause": entry.cause, "Confirm": entry.confirm, "Fix": entry.fix}
    return "\n\n".join(
        [
            f"### {entry.id}",
            f"**{entry.title}.**",
            f"```text\n{entry.example}\n```",
            *(wrap(f"*{heading}.* {_escape(words)}", width=_WIDTH) for heading, words in prose.items()),
            f"```python\n{entry.call}\n```",
            f"Source: {_link(entry.source)}",
        ]
    )


def _escape(prose: str) -> str:
    """The prose with Markdown's special characters escaped."""
    return re.sub(r"([*<\[\]]|(?<!\w)_)", r"\\\1", prose)


def _link(source: str) -> str:
    return _REFERENCE.sub(r"[\1#\2](https://github.com/\1/issues/\2)", source)
