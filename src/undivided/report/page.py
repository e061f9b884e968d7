"""The report as one HTML file without references to anything outside of it."""

from __future__ import annotations

import base64
import datetime
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from undivided._version import __version__
from undivided.errors import InputError
from undivided.report import EXPLORER_SCRIPTS
from undivided.report.plots import THEMES, charts

FOLDER = Path(__file__).parent


def require_jinja2(argument: str) -> None:
    """InputError if jinja2 is not installed."""
    if importlib.util.find_spec("jinja2") is None:
        raise InputError(argument, "have jinja2 installed", "no jinja2", hint="pip install 'undivided[report]'")


def render(
    findings: Mapping[str, Any],
    verified: Sequence[tuple[str, Any]],
    benchmark: Mapping[str, Any] | None,
    expression: str,
) -> str:
    """The HTML of the report. Every value is escaped.

    Args:
        findings: the findings of `undivided doctor`: machine, backends, environment.
        verified: name and `undivided.verification.Report` of each problem.
        benchmark: a benchmark report, or None.
        expression: the first expression of the mask explorer.

    Returns:
        The page.

    Raises:
        InputError: `benchmark` is not a report of this version.
    """
    import jinja2
    from markupsafe import Markup

    from undivided.benchmarking.report import headline, tables

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Files of this package. "</" would end the element, so that it is written as an escape of the same text.
    scripts = "\n".join(path.read_text(encoding="utf-8") for path in EXPLORER_SCRIPTS)
    script = Markup(scripts.replace("</", "<\\/"))
    style = Markup((FOLDER / "report.css").read_text(encoding="utf-8"))
    return environment.get_template("report.html.jinja").render(
        version=__version__,
        date=datetime.date.today().isoformat(),
        findings=findings,
        verified=[(name, report.to_dict()) for name, report in verified],
        tables=tables(benchmark) if benchmark else [],
        headline=headline(benchmark) if benchmark else "",
        charts=_pictures(benchmark) if benchmark else [],
        expression=expression,
        script=script,
        style=style,
    )


def _pictures(benchmark: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Title, alternative text and one data URL per theme of every chart."""
    themes = {theme: charts(benchmark, theme) for theme in THEMES}
    return [
        {
            "title": chart.title,
            "alternative": chart.alternative,
            "sources": {
                theme: "data:image/svg+xml;base64," + base64.b64encode(themes[theme][number].svg()).decode()
                for theme in THEMES
            },
        }
        for number, chart in enumerate(themes["light"])
    ]
