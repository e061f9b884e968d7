"""Pages, examples and messages are plain technical English: phrases that once made them hard to read do not come back.

`scripts/check` runs codespell and proselint; this file has what those tools cannot know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WHERE = (
    *("README.md", "CONTRIBUTING.md", "DESIGN.md", "CHANGELOG.md", "docs", "examples", "src", "tests"),
    *("scripts", "cmake", ".github", "pyproject.toml"),
)
"""Files, and folders with all text files below them."""
EXCEPT = ("docs/troubleshooting.md", "docs/reference/hugging-face.md", "tests/test_prose.py")
"""Pages that are generated (their text is in src), and this file."""
SUFFIXES = {".md", ".py", ".h", ".cc", ".sh", ".js", ".toml", ".txt", ".cmake", ".yml", ".yaml"}
"""And files without one in `scripts`, which are shell scripts."""

COUNTED = """backend batch block byte call case chunk core decision document element file head key layer launch line
machine mask page pass platform process processor program query rank row run score second sequence step text thread
tile token unit variable wheel""".split()
A_UNIT = rf"an? ({'|'.join(COUNTED)})\b"
THINGS = "int bool float string tensor number multiple range mask page file option error question".split()

PHRASES = [
    # a regular expression, and what to write in its place
    (rf"\b((one|two|three) \w+|once) {A_UNIT}", "one per row, once per call"),
    (rf"\b(bytes|cycles|integers?|microseconds|operations|us|bits|warps) {A_UNIT}", "cycles per row"),
    (rf"\ban? (row|line|page|file|call) {A_UNIT}", "a row per sequence"),
    (rf"(?<!there\s)\b(is|are|was|were) no ({'|'.join(THINGS)})s?\b", "is not an int, is not a multiple of 64"),
    (r"\bNone where\b|\b0 where it is\b", "None if there is none, 0 if broadcast"),
    (r"\bwhere (there (is|are) (none|no|one|two|any)|nothing is|none (can|is))\b", "if there is none"),
    (r"\b(must|has to|have to) be said\b|\b(is|are) (always )?said\b", "is required, is given"),
    (r"\bunasked\b|\bif asked\b|\bwhat is asked\b|\b(is|are|was|were) asked (for|about)\b", "on request, is requested"),
    (r"\bto be had\b|\bmust be there\b", "is unavailable, must exist"),
    (r"\bbeliefs?\b", "default rank"),
    (r"\bstands? against\b", "is refused because"),
    (r"(?<!auditwheel\s)(?<!auditwheel\"\s)\brepair(s|ed|ing)?\b(?!-wheel-command)", "fix"),
    (r"\bwill do\b", "is enough"),
    (r"\bhow many times as\b|\band in brackets which\b", "1.9x PyTorch, 72 % of peak"),
    (r"\bfor ever\b|\bthrown away\b|\bthe whole's\b", "permanently, discarded, of the whole"),
    (r"\bsoften(s|ed|ing)?\b", "softmax"),
    (r"\b(kernel|rank|thread|backend|mask|copy) (talks?|believes?|tells?|asks?|wants?|likes?|trusts?)\b", "no persons"),
]


def _pages() -> Iterator[Path]:
    for name in WHERE:
        path = ROOT / name
        for page in sorted(path.rglob("*")) if path.is_dir() else [path]:
            is_text = page.suffix in SUFFIXES or (name == "scripts" and not page.suffix and page.is_file())
            if is_text and page.relative_to(ROOT).as_posix() not in EXCEPT:
                yield page


def _found(text: str) -> list[str]:
    """The phrases in a text, with their lines and replacements. A phrase may go on in the next line."""
    found = []
    for phrase, instead in PHRASES:
        for match in re.finditer(phrase.replace(" ", r"[\s#*]+"), text, re.IGNORECASE):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{line}: {' '.join(match.group().split())!r}; write: {instead}")
    return found


@pytest.mark.parametrize("page", list(_pages()), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_phrase_that_is_hard_to_read(page: Path) -> None:
    found = _found(page.read_text(encoding="utf-8"))
    assert not found, "\n".join(f"{page.relative_to(ROOT)}:{line}" for line in found)


@pytest.mark.parametrize(
    "text",
    [
        "one file a backend and one row a sequence",
        "once a call",
        "5 cycles a key",
        "is no multiple of 64",
        "None where there is none",
        "the layout must be said",
        "the package is not to be had",
        "ranks by belief",
        "what stands against it",
        "backends that were asked for",
        "the error and its repair",
        "meta tensors will do",
        "how many times as fast",
        "the length is\n    # said",
    ],
)
def test_a_phrase_is_found(text: str) -> None:
    assert _found(text)


@pytest.mark.parametrize("text", ["one row per sequence", "None if there is none", "a file a.py", "two a100 machines"])
def test_plain_english_is_not(text: str) -> None:
    assert not _found(text)
