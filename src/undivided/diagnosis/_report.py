"""The answer of `diagnose`, and how it prints."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from undivided.diagnosis._entry import Entry

WIDTH = 80

HELPFUL = (
    "the whole traceback, and any warnings or log lines before it",
    "shapes, dtypes, devices and strides of q, k and v; their layout (bshd, sbhd, bhsd, thd)",
    "the mask: its type, shape, dtype; causal or not; cu_seqlens; the window",
    "versions: PyTorch, CUDA, cuDNN, flash-attn, TransformerEngine; the GPU",
    "`undivided doctor`: this machine, its libraries, the variables that are set",
    "`undivided explain --q 2x1024x16x64 ...`: which backends take the problem, and why the others do not",
    "TransformerEngine: NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints each reason; "
    "cuDNN: CUDNN_LOGLEVEL_DBG=2 CUDNN_LOGDEST_DBG=stderr; CUDA: CUDA_LAUNCH_BLOCKING=1 names the right line",
)
"""What to give somebody who helps."""


@dataclass(frozen=True)
class Finding:
    """A known error, and what the values in the text say about this case of it."""

    entry: Entry
    facts: tuple[str, ...]

    def parts(self) -> dict[str, str]:
        """Its prose, by heading, in the order to read."""
        entry = self.entry
        here = {"here": " ".join(self.facts)} if self.facts else {}
        return {"cause": entry.cause, **here, "confirm": entry.confirm, "fix": entry.repair}

    def to_dict(self) -> dict[str, Any]:
        """The entry's words, the facts, and the snippet as it runs."""
        return {**self.entry.to_dict(), "facts": list(self.facts), "snippet": self.entry.snippet}


@dataclass(frozen=True)
class Diagnosis:
    """What is known about an error. ``print`` it.

    ``.known`` is whether anything was recognised, ``.entries`` what, the most specific first, ``.findings`` the same
    with what the values in the text say, ``.observed`` the versions, sizes and shapes that were read.
    """

    findings: tuple[Finding, ...]
    observed: tuple[tuple[str, str], ...]

    @property
    def known(self) -> bool:
        """Whether anything was recognised."""
        return bool(self.findings)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The known errors, the most specific first."""
        return tuple(finding.entry for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "known": self.known,
            "findings": [finding.to_dict() for finding in self.findings],
            "observed": dict(self.observed),
            "helpful": [] if self.known else list(HELPFUL),
        }

    def __str__(self) -> str:
        blocks = [_told(self.findings[0])] if self.known else [_unknown()]
        if self.findings[1:]:
            blocks.append("Also in this text:")
            blocks += [
                _wrapped(f"{finding.entry.title} ({finding.entry.id})", "  ", "    ") for finding in self.findings[1:]
            ]
        if self.observed:
            seen = "; ".join(f"{name} {value}" for name, value in self.observed)
            blocks.append(_wrapped(f"Read in the text: {seen}", "", "  "))
        return "\n".join(blocks)


def _told(finding: Finding) -> str:
    entry = finding.entry
    lines = [_wrapped(f"{entry.title} ({entry.id})", "", "  ")]
    for heading, prose in finding.parts().items():
        lines.append(_wrapped(prose, f"  {heading:<9}", " " * 11))
    lines += ["", *(f"      {line}".rstrip() for line in entry.snippet.splitlines()), ""]
    lines.append(_wrapped(entry.source, "  source   ", " " * 11))
    return "\n".join(lines)


def _unknown() -> str:
    lines = ["Not an attention error that is known here. What would help somebody to find it:"]
    return "\n".join(lines + [_wrapped(line, "  - ", "    ") for line in HELPFUL])


def _wrapped(prose: str, first: str, rest: str) -> str:
    return textwrap.fill(
        prose, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
