"""A Griffe extension: docstrings of this project, as mkdocstrings expects them."""

from __future__ import annotations

import re
from typing import Any

import griffe

SECTION = re.compile(r"^(\s*)(Args|Attributes|Raises|Returns|Yields|Source):\s*$")


class Docstrings(griffe.Extension):
    """Fences around examples, one line for the names of several arguments, and no parameters of type Never."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of one module, class or function."""
        if obj.docstring is not None:
            obj.docstring.value = _fenced(_joined(obj.docstring.value))

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Remove parameters that only the errors of wrong calls use."""
        shown = (parameter for parameter in func.parameters if str(parameter.annotation) != "Never")
        func.parameters = griffe.Parameters(*shown)


def _fenced(text: str) -> str:
    """Doctest examples as code blocks. An example ends at an empty line."""
    lines: list[str] = []
    inside = False
    for line in [*text.splitlines(), ""]:
        starts = line.lstrip().startswith(">>>")
        if starts and not inside:
            lines += ["", "```pycon"]
        if inside and not line.strip():
            lines.append("```")
        inside = bool(line.strip()) and (inside or starts)
        lines.append(line.lstrip() if starts else line)
    return "\n".join(lines).rstrip()


def _joined(text: str) -> str:
    """``a, b,`` and ``c: words`` of an Args section on one line: names may not be divided."""
    lines: list[str] = []
    indent = -1  # of the items of the section that is open
    for line in text.splitlines():
        if (match := SECTION.match(line)) and match[2] in ("Args", "Attributes"):
            indent = len(match[1]) + 4
        elif line.strip() and len(line) - len(line.lstrip()) < indent:
            indent = -1
        elif indent >= 0 and lines and re.fullmatch(r" *[\w*]+(, [\w*]+)*,", lines[-1]):
            lines[-1] += " " + line.strip()
            continue
        lines.append(line)
    return "\n".join(lines)
