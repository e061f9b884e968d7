"""Charts of a benchmark report: throughput over length, ratios to each competitor, roofline. matplotlib draws them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from undivided.benchmarking.report import BenchmarkReport, headline, tables
from undivided.report.chart_data import OURS, Point, geometric_mean, points, ratios, roofs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THEMES = {
    "light": {"ink": "#1c2330", "paper": "#ffffff", "grid": "#d5dae1"},
    "dark": {"ink": "#e6eaf0", "paper": "#12161d", "grid": "#39424f"},
}
COLOURS = {
    "light": ("#1f5fa8", "#b5520a", "#2b7a3d", "#8a3b9c", "#8a6d00", "#a11212"),
    "dark": ("#6aa9f2", "#f0a35e", "#7fce90", "#d59be4", "#e0c552", "#ff9c9c"),
}
LINE_STYLES = {OURS: "-", "sdpa": "--"}
"""The entries that have lines in the chart of throughput, with the styles of their lines."""


@dataclass(frozen=True)
class Chart:
    """One chart: its file name, its title, a text that replaces it, and the figure."""

    name: str
    title: str
    alternative: str
    figure: Figure

    def svg(self) -> bytes:
        """The chart as SVG."""
        import matplotlib

        buffer = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": self.name}):
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        return buffer.getvalue()


def charts(report: BenchmarkReport, theme: str = "light") -> list[Chart]:
    """The charts that the cases of a report allow.

    Args:
        report: the result of `undivided.benchmarking.execute`.
        theme: "light" or "dark".

    Returns:
        Throughput over length, ratios, roofline; fewer if the report lacks such cases.

    Raises:
        InputError: it is not a report of this version.
    """
    tables(report)  # checks the report
    timed = points(report)
    possible = [_throughput(timed, theme), _ratios(report, theme), _roofline(report, timed, theme)]
    return [chart for chart in possible if chart is not None]


def write(report: BenchmarkReport, folder: Path) -> list[Path]:
    """Write the charts of a report to a folder as PNG, and return their paths."""
    paths = []
    for chart in charts(report):
        path = folder / f"{chart.name}.png"
        chart.figure.suptitle(headline(report), fontsize=8)
        chart.figure.savefig(path)
        paths.append(path)
    return paths


def _figure(theme: str, width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained", facecolor=THEMES[theme]["paper"])


def _style(axes: Axes, theme: str, title: str) -> None:
    """Give a panel its title, the colours of the theme, and a grid behind what is drawn."""
    colours = THEMES[theme]
    axes.set_facecolor(colours["paper"])
    axes.set_title(title, color=colours["ink"], fontsize=10)
    axes.tick_params(colors=colours["ink"], which="both", labelsize=8)
    axes.xaxis.label.set_color(colours["ink"])
    axes.yaxis.label.set_color(colours["ink"])
    axes.grid(color=colours["grid"], linewidth=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colours["ink"])


def _legend(axes: Axes, theme: str) -> None:
    axes.legend(fontsize=7, labelcolor=THEMES[theme]["ink"], facecolor=THEMES[theme]["paper"], framealpha=0.6)


RatesByLine = dict[tuple[str, str, str], dict[int, float]]
"""Rates by length, for each (dtype, line, entry)."""


def _throughput(timed: list[Point], theme: str) -> Chart | None:
    """Rates over the number of keys: a panel per dtype, a colour per line, PyTorch's dashed."""
    lines: RatesByLine = {}
    for point in timed:
        if point.suite in ("forward", "backward", "gpu", "small") and point.name in LINE_STYLES:
            lines.setdefault((point.dtype, point.line, point.name), {})[point.length] = point.rate
    lines = {key: line for key, line in lines.items() if len(line) > 1 and (key[0], key[1], OURS) in lines}
    if not lines:
        return None
    dtypes = list(dict.fromkeys(dtype for dtype, _, _ in lines))
    figure = _figure(theme, 3.6 * len(dtypes) + 0.8, 3.8)
    panels = figure.subplots(1, len(dtypes), squeeze=False)[0]
    for dtype, axes in zip(dtypes, panels, strict=True):
        _plot_lines(axes, lines, dtype, theme)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlabel("keys")
        axes.set_ylim(bottom=0)
        _style(axes, theme, dtype)
        _legend(axes, theme)
    panels[0].set_ylabel("GFLOP/s; dashed: PyTorch's SDPA")
    highest, _, title = max((max(line.values()), *key[:2]) for key, line in lines.items() if key[2] == OURS)
    alternative = (
        f"Throughput over the number of keys, {len(lines)} lines. The highest of undivided is {highest / 1e9:.0f} "
        f"GFLOP/s ({title}). The tables below hold every figure."
    )
    return Chart("throughput", "Throughput over length", alternative, figure)


def _plot_lines(axes: Axes, lines: RatesByLine, dtype: str, theme: str) -> None:
    """Plot the lines of one dtype, as many as there are colours."""
    titles = dict.fromkeys(title for line_dtype, title, _ in lines if line_dtype == dtype)
    for title, colour in zip(titles, COLOURS[theme], strict=False):
        for name, style in LINE_STYLES.items():
            line = lines.get((dtype, title, name))
            if line is None:
                continue
            lengths = sorted(line)
            axes.plot(
                lengths,
                [line[length] / 1e9 for length in lengths],
                color=colour,
                linestyle=style,
                marker="o",
                markersize=3,
                label=(title.partition("-")[2] or title) if name == OURS else None,
            )


def _ratios(report: BenchmarkReport, theme: str) -> Chart | None:
    """Bars of each competitor's time divided by ours: a panel per competitor, a bar per group of cases."""
    by_name = ratios(report)
    if not by_name:
        return None
    height = max(2.4, 0.24 * max(map(len, by_name.values())) + 1.2)
    figure = _figure(theme, 3.2 * len(by_name) + 1.0, height)
    panels = figure.subplots(1, len(by_name), squeeze=False)[0]
    texts = []
    for (name, groups), axes, colour in zip(by_name.items(), panels, COLOURS[theme] * len(by_name), strict=False):
        every = [value for values in groups.values() for value in values]
        _plot_ratios(axes, groups, colour, THEMES[theme]["ink"])
        _scale_ratios(axes, every)
        axes.set_ylim(max(map(len, by_name.values())) - 0.4, -0.6)
        axes.set_xlabel("its time / our time")
        _style(axes, theme, name)
        texts.append(f"{name} {geometric_mean(every):.2f} ({min(every):.2f} to {max(every):.2f})")
    alternative = f"Time of each competitor divided by ours, geometric mean and range: {', '.join(texts)}."
    return Chart("ratios", "Ratios to the other implementations", alternative, figure)


def _plot_ratios(axes: Axes, groups: dict[str, list[float]], colour: str, ink: str) -> None:
    """Plot a bar per group: from a ratio of 1 to the geometric mean, with the range of the ratios."""
    means = [geometric_mean(values) for values in groups.values()]
    low = [max(mean - min(values), 0.0) for mean, values in zip(means, groups.values(), strict=True)]
    high = [max(max(values) - mean, 0.0) for mean, values in zip(means, groups.values(), strict=True)]
    widths = [mean - 1 for mean in means]
    axes.barh(
        list(groups), widths, left=1, height=0.7, color=colour, alpha=0.75, xerr=[low, high], ecolor=ink, capsize=2
    )
    for row, (mean, values) in enumerate(zip(means, groups.values(), strict=True)):
        end = max(1.0, *values)  # right of the bar and of its range, where nothing else is
        axes.annotate(
            f"{mean:.2f} x", (end, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7, color=ink
        )
    axes.axvline(1, color=ink, linewidth=1)


def _scale_ratios(axes: Axes, values: Sequence[float]) -> None:
    """An axis with several numbers on it: linear if the ratios are similar, otherwise logarithmic."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high = min(1.0, *values), max(1.0, *values)
    if high / low < 4:
        margin = high - low
        axes.set_xlim(low - 0.05 * margin if low < 1 else 1.0, high + 0.3 * margin)  # room for the labels
        axes.xaxis.set_major_locator(MaxNLocator(5))
    else:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.1 if low < 1 else 1.0, high * (high / low) ** 0.25)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 100 else (1,)))
        axes.xaxis.set_minor_formatter("")
    axes.xaxis.set_major_formatter("{x:g}")


def _colour_of_peak(colours: dict[str, str], dtype: str, ink: str) -> str:
    """The colour of the peak that was measured for a dtype; ink if none was."""
    return next((colour for what, colour in colours.items() if what.startswith(dtype)), ink)


def _roofline(report: BenchmarkReport, timed: list[Point], theme: str) -> Chart | None:
    """Our rates over FLOP per byte, below the measured peaks: a colour per dtype, a marker per suite."""
    import numpy
    from matplotlib.ticker import LogLocator

    flops, reads = roofs(report)
    ours = [point for point in timed if point.name == OURS and point.intensity > 0]
    if not ours or not flops:
        return None
    figure = _figure(theme, 7.6, 4.4)
    axes = figure.subplots()
    low, high = min(p.intensity for p in ours) / 2, max(p.intensity for p in ours) * 2
    x = numpy.geomspace(low, high, 200)
    colours = dict(zip(flops, COLOURS[theme], strict=False))
    for what, rate in flops.items():
        roof = numpy.minimum(rate, reads * x) if reads else numpy.full_like(x, rate)
        axes.plot(x, roof / 1e9, color=colours.get(what), linewidth=1.2, label=what)
    ink = THEMES[theme]["ink"]
    suites = list(dict.fromkeys(point.suite for point in ours))
    for suite, marker in zip(suites, "osD^vPX*", strict=False):
        chosen = [point for point in ours if point.suite == suite]
        axes.scatter(
            [p.intensity for p in chosen],
            [p.rate / 1e9 for p in chosen],
            s=16,
            marker=marker,
            facecolors="none",
            edgecolors=[_colour_of_peak(colours, p.dtype, ink) for p in chosen],
        )
        axes.scatter([], [], s=16, marker=marker, facecolors="none", edgecolors=ink, label=suite)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis, subs in ((axes.xaxis, (1,)), (axes.yaxis, (1, 2, 5))):  # numbers such as 20, not 2 x 10^1
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.set_xlabel("FLOP per byte of q, k, v and output")
    axes.set_ylabel("GFLOP/s")
    _style(axes, theme, "undivided and the measured peaks, a colour per dtype")
    _legend(axes, theme)
    slope = "The slope is the measured read rate." if reads else "The report has no read rate, so there is no slope."
    peaks = ", ".join(f"{what} {rate / 1e9:.0f} GFLOP/s" for what, rate in flops.items())
    alternative = f"Roofline of {len(ours)} cases. Peaks: {peaks}. {slope}"
    return Chart("roofline", "Roofline", alternative, figure)
