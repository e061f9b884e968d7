"""Plots of the reports in ``benchmarks/``: one report per plot; lines of a disturbed machine are hatched."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import svg

ROOT = Path(__file__).resolve().parents[2]
REPORTS = {
    # plot: (report, words)
    "amx": ("2026-11-22-native-granite-rapids-amx.json", "level amx, one thread"),
    "amx-bf16": ("2026-11-22-native-granite-rapids-amx-bf16.json", "level amx_bf16, one thread"),
    "zen5": ("2026-11-23-native-zen5-avx512-bf16.json", "Zen 5, level avx512_bf16, one thread"),
    "two-threads": ("2026-11-22-native-two-threads-granite-rapids-amx-bf16.json", "level amx_bf16, two threads"),
}
SENTINELS = {f"#0000{number:02x}": name for number, name in enumerate(svg.THEME, start=1)}
"""Colours for Matplotlib that are replaced by the names of the theme."""
PAINT = {name: colour for colour, name in SENTINELS.items()}


def read_report(name: str) -> dict[str, Any]:
    """A report in `benchmarks/`."""
    report: dict[str, Any] = json.loads((ROOT / "benchmarks" / name).read_text(encoding="utf-8"))
    return report


def read_cases(report: str) -> list[dict[str, Any]]:
    """The cases of a report in `benchmarks/`."""
    cases: list[dict[str, Any]] = read_report(report)["cases"]
    return cases


def ratio(case: dict[str, Any]) -> float | None:
    """PyTorch's time divided by ours."""
    seconds = {entry["name"]: entry.get("seconds") for entry in case["entries"] if entry["ok"]}
    return seconds["sdpa"] / seconds["undivided"] if seconds.get("sdpa") and seconds.get("undivided") else None


def themed(figure: Any) -> str:
    """The SVG text of a figure, with the colours of the theme."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = re.sub(
        r"<\?xml.*?\?>\s*|<!DOCTYPE.*?>\s*|<metadata>.*?</metadata>\s*", "", buffer.getvalue(), flags=re.DOTALL
    )
    for colour, theme in SENTINELS.items():
        text = text.replace(colour, f"var(--p-{theme})")
    text = re.sub(r"(<svg[^>]*>)", lambda match: match[1] + svg.STYLE, text, count=1)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def _bars(name: str, title: str, rows: list[tuple[str, float, bool]]) -> str:
    """Horizontal bars of times SDPA; a disturbed one is hatched and has no number."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    style = {
        "svg.hashsalt": name,
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), PAINT["ink"]),
        "axes.edgecolor": PAINT["line"],
        "hatch.color": PAINT["soft"],
    }
    with plt.rc_context(style):
        figure, axis = plt.subplots(figsize=(8, 0.6 + 0.26 * len(rows)), layout="constrained")
        for y, (_, ratio, disturbed) in enumerate(rows):
            axis.barh(
                y, ratio, height=0.7, color="none" if disturbed else PAINT["a"],
                edgecolor=PAINT["soft"] if disturbed else PAINT["a"], hatch="////" if disturbed else None,
            )  # fmt: skip
            axis.annotate(
                "disturbed" if disturbed else f"{ratio:.2f}",
                (ratio, y),
                (4, 0),
                textcoords="offset points",
                va="center",
                color=PAINT["soft"] if disturbed else PAINT["ink"],
            )
        axis.axvline(1, color=PAINT["c"], linewidth=1.2)
        axis.set_yticks(range(len(rows)), [label for label, _, _ in rows])
        axis.invert_yaxis()
        axis.set_xlabel("PyTorch's time divided by ours; the line is 1")
        axis.set_title(title, loc="left", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.1)
        text = themed(figure)
        plt.close(figure)
    return text


def _errors(name: str, report: str) -> str:
    """Measured errors beside their budgets, forward, by dtype."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    style = {
        "svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), PAINT["ink"]),
        "axes.edgecolor": PAINT["line"], "grid.color": PAINT["line"], "legend.labelcolor": PAINT["ink"],
    }  # fmt: skip
    cases = [case for case in read_cases(report) if case["suite"] == "forward" and "2048" in case["name"]]
    with plt.rc_context(style):
        figure, axis = plt.subplots(figsize=(8, 0.9 + 0.3 * len(cases)), layout="constrained")
        for y, case in enumerate(cases):
            entries = {entry["name"]: entry["errors"]["out"] for entry in case["entries"] if entry.get("errors")}
            first = {"label": None} if y else {}
            ours, theirs = entries["undivided"], entries.get("sdpa")
            axis.plot([ours["error"], ours["budget"]], [y, y], color=PAINT["line"], linewidth=3, zorder=1)
            axis.scatter(ours["error"], y, color=PAINT["a"], zorder=3, **{"label": "Undivided", **first})
            if theirs:
                axis.scatter(
                    theirs["error"], y, color=PAINT["b"], marker="s", zorder=2, **{"label": "PyTorch's SDPA", **first}
                )
            axis.scatter(
                ours["budget"], y, color=PAINT["c"], marker="|", s=160, zorder=3, **{"label": "budget", **first}
            )
        axis.set_xscale("log")
        axis.set_yticks(range(len(cases)), [case["name"] for case in cases])
        axis.invert_yaxis()
        axis.set_xlabel("||out - oracle|| / ||oracle||, the oracle in fp64")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", linewidth=0.6)
        axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.45, 1.18), ncols=3)
        text = themed(figure)
        plt.close(figure)
    return text


SUITES = {"forward": "Forward", "backward": "Backward alone", "mask": "Masks and scores", "decode": "Decoding"}


def plots() -> dict[str, str]:
    """The SVG text of every plot by name."""
    texts = {}
    for machine, (report, words) in REPORTS.items():
        for suite, heading in SUITES.items():
            rows = [
                (case["name"], times, bool(case.get("rate", {}).get("contended")))
                for case in read_cases(report)
                if case["suite"] == suite and (times := ratio(case)) is not None
            ]
            # ratios of another order of magnitude would hide all others: the table in benchmarks/README.md has them
            rows = [row for row in rows if row[1] < 20]
            if rows:
                texts[f"perf-{machine}-{suite}"] = _bars(f"perf-{machine}-{suite}", f"{heading}, {words}", rows)
    texts["error-budget"] = _errors("error-budget", REPORTS["amx"][0])
    return texts
