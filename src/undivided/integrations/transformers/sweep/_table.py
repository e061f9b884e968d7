"""The page with the results: how many architectures are equal, and one line for each of the others."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from undivided.integrations.transformers.sweep._compare import ModelOutcome
from undivided.integrations.transformers.sweep._known import EXPLAINED

Outcomes = Mapping[str, ModelOutcome]

INTRODUCTION = """# Hugging Face architectures

Every model type of transformers {transformers} (torch {torch}) with a tiny configuration and random weights: outputs
and the gradients of all weights with `attn_implementation="undivided"`, against `eager`, in float32.

- A tensor is equal within {tolerance} of its norm; what exceeds that must agree to {exact} in float64.
- Text is compared without padding (`none`), padded on the `right` and on the `left` (rows of padding are left out), and
  with position ids that begin again (`packed`); `weights` are the results of `output_attentions=True`. A model that
  takes no mask or no positions has fewer cases.
- An architecture counts as equal only if its attention ran on Undivided.

This page is written by `python -m undivided.integrations.transformers.sweep --write docs/reference/hugging-face.md`.

| architectures | |
|---|--:|
| equal in all their cases | {equal} |
| not equal in some case | {unequal} |
| not running on Undivided: attention of their own, or none | {unused} |
| not built or not run by the sweep | {unbuilt} |
| in all | {all} |

Cases that ran on Undivided: {cases}, of which {equal_cases} are equal.
"""

SECTIONS = """
## Not equal

| architecture | why |
|---|---|
{unequal}
## Equal

{equal}

## Not running on Undivided

Their attention does not go through the library's interface, or they have none: they run as they do with `eager`.

{unused}

## Not built or not run

The sweep's configuration or inputs do not suit them; the reason is the library's own message.

| architecture | reason |
|---|---|
{unbuilt}"""

CLASS_TABLE = "transformers picks its attention class from a table that has no place for registered names"

KINDS = ("unequal", "equal", "unused", "unbuilt")
"""The kinds of architectures."""


def page(outcomes_by_model: Mapping[str, Outcomes], versions: Mapping[str, str], limits: Mapping[str, str]) -> str:
    """The page for these outcomes, in Markdown."""
    by_kind: dict[str, list[str]] = {one: [] for one in KINDS}
    for name, outcomes in outcomes_by_model.items():
        by_kind[kind(outcomes)].append(name)
    states = Counter(outcome.state for outcomes in outcomes_by_model.values() for outcome in outcomes.values())
    introduction = INTRODUCTION.format(
        **versions,
        **limits,
        **{one: len(names) for one, names in by_kind.items()},
        all=len(outcomes_by_model),
        cases=states["equal"] + states["differs"] + states["fails"],
        equal_cases=states["equal"],
    )
    return introduction + SECTIONS.format(
        unequal=_rows({name: explanation(name, outcomes_by_model[name]) for name in by_kind["unequal"]}),
        equal=_names(by_kind["equal"]),
        unused=_names(by_kind["unused"]),
        unbuilt=_rows({name: _short(outcomes_by_model[name][""].detail) for name in by_kind["unbuilt"]}),
    )


def kind(outcomes: Outcomes) -> str:
    """The kind of an architecture, one of `KINDS`."""
    states = {outcome.state for outcome in outcomes.values()}
    if states & {"differs", "fails"}:
        return "unequal"
    return "equal" if "equal" in states else "unused" if "unused" in states else "unbuilt"


def explanation(name: str, outcomes: Outcomes) -> str:
    """The cases in which it is not equal, and why."""
    bad = {case: one for case, one in outcomes.items() if one.state in ("differs", "fails")}
    first = next(iter(bad.values()))
    why = CLASS_TABLE if first.detail == "KeyError: 'undivided'" else EXPLAINED.get(name, _short(first.detail))
    return f"{', '.join(bad)}: {why}"


def _rows(texts: Mapping[str, str]) -> str:
    """A row of a table for each architecture."""
    return "".join(f"| `{name}` | {text} |\n" for name, text in texts.items())


def _names(names: Sequence[str]) -> str:
    """The names of architectures, separated by commas, in lines."""
    return textwrap.fill(", ".join(f"`{name}`" for name in names), 140, break_on_hyphens=False, break_long_words=False)


def _short(text: str, limit: int = 120) -> str:
    text = text.replace("|", "\\|")
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
