"""The answer of `diagnose` and its output."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from undivided.diagnosis._entry import Entry

WIDTH = 80

HELPFUL = (
    "the whole traceback, and any warnings or log lines before it",
    "shapes, dtypes, devices and strides of q, k and v; their layout (bshd, sbhd, bhsd, thd)",
    "the mask: its type, shape and dtype; whether it is causal; cu_seqlens; the window",
    "versions: PyTorch, CUDA, cuDNN, flash-attn, TransformerEngine; the GPU",
    "the output of `undivided doctor`: the machine, its libraries and environment variables",
    "the output of `undivided explain --q 2x1024x16x64 ...`: the possible backends, and why others refuse",
    "TransformerEngine: NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints each reason; "
    "cuDNN: CUDNN_LOGLEVEL_DBG=2 CUDNN_LOGDEST_DBG=stderr; CUDA: CUDA_LAUNCH_BLOCKING=1 shows the right line",
)
"""The information that a bug report needs."""


@dataclass(frozen=True)
class Finding:
    """A known error, and the facts that the values in the text give about this case.

    >>> import undivided
    >>> finding = undivided.diagnose("RuntimeError: No available kernel. Aborting execution.").findings[0]
    >>> list(finding.parts())
    ['cause', 'confirm', 'fix']
    """

    entry: Entry
    facts: tuple[str, ...]

    def parts(self) -> dict[str, str]:
        """The texts of the error by heading, in reading order."""
        entry = self.entry
        here = {"here": " ".join(self.facts)} if self.facts else {}
        return {"cause": entry.cause, **here, "confirm": entry.confirm, "fix": entry.fix}

    def to_dict(self) -> dict[str, Any]:
        """The texts of the entry, the facts and the snippet, for JSON."""
        return {**self.entry.to_dict(), "facts": list(self.facts), "snippet": self.entry.snippet}


@dataclass(frozen=True)
class Diagnosis:
    """The answer of `undivided.diagnose`. ``print`` shows it as text.

    Attributes:
        findings: the known errors, the most specific first, with facts from the values in the text.
        observed: (name, value) of the versions, sizes and shapes in the text.

    >>> import undivided
    >>> undivided.diagnose("KeyError: 'x'").entries
    ()
    """

    findings: tuple[Finding, ...]
    observed: tuple[tuple[str, str], ...]

    @property
    def known(self) -> bool:
        """Whether an error was recognised."""
        return bool(self.findings)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The known errors, the most specific first."""
        return tuple(finding.entry for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The answer as plain values for JSON."""
        return {
            "known": self.known,
            "findings": [finding.to_dict() for finding in self.findings],
            "observed": dict(self.observed),
            "helpful": [] if self.known else list(HELPFUL),
        }

    def __str__(self) -> str:
        blocks = [_format(self.findings[0])] if self.known else [_unknown()]
        if self.findings[1:]:
            blocks.append("Also in this text:")
            blocks += [
                wrap(f"{finding.entry.title} ({finding.entry.id})", "  ", "    ") for finding in self.findings[1:]
            ]
        if self.observed:
            values = "; ".join(f"{name} {value}" for name, value in self.observed)
            blocks.append(wrap(f"Found in the text: {values}", "", "  "))
        return "\n".join(blocks)


def _format(finding: Finding) -> str:
    entry = finding.entry
    lines = [wrap(f"{entry.title} ({entry.id})", "", "  ")]
    for heading, prose in finding.parts().items():
        lines.append(wrap(prose, f"  {heading:<9}", " " * 11))
    lines += ["", *(f"      {line}".rstrip() for line in entry.snippet.splitlines()), ""]
    lines.append(wrap(entry.source, "  source   ", " " * 11))
    return "\n".join(lines)


def _unknown() -> str:
    lines = ["This attention error is unknown. This information would help to find the cause:"]
    return "\n".join(lines + [wrap(line, "  - ", "    ") for line in HELPFUL])


def wrap(prose: str, first: str = "", rest: str = "", width: int = WIDTH) -> str:
    """The prose in lines of at most `width` characters; `first` and `rest` begin the first line and the others."""
    return textwrap.fill(
        prose, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
