"""Charts of the demo, drawn with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from undivided.cli.demo.batch import PackedBatch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, THEIRS, LIGHT = "#1f5fa8", "#9aa3ad", 0.5


def draw(folder: Path, batch: PackedBatch, report: dict[str, Any]) -> list[Path]:
    """The paths of the pictures after they were saved: the packed mask, and the bars."""
    mask, bars = folder / "mask.png", folder / "demo.png"
    batch.packed_mask().plot(batch.tokens, batch.tokens, mask)
    _bars(report, bars)
    return [mask, bars]


def _bars(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    times = report["times"]
    figure = Figure(figsize=(9, 5.2 if times else 2.6), dpi=150, layout="constrained")
    if times:
        axes = figure.subplots(2, 1, height_ratios=[2, 3])
        _times(axes[1], times)
    else:
        axes = [figure.subplots()]
    _counts(axes[0], report)
    figure.savefig(path)


def _counts(axes: Axes, report: dict[str, Any]) -> None:
    """Bars of the packed counts relative to the padded ones."""
    labels = {"tokens": "tokens", "bytes": "bytes of q, k, v, output", "pairs": "query-key pairs"}
    shares = [100 * report[key]["packed"] / report[key]["padded"] for key in labels]
    axes.barh(list(labels.values()), [100] * 3, color=THEIRS, alpha=LIGHT)
    drawn = axes.barh(list(labels.values()), shares, color=OURS)
    axes.bar_label(drawn, [f"{share:.1f} %" for share in shares], padding=4)
    axes.set(title="Work and memory of packing (blue) relative to padding", xlim=(0, 100))
    axes.xaxis.set_major_formatter("{x:.0f} %")
    _finish(axes)


def _times(axes: Axes, times: list[dict[str, Any]]) -> None:
    """Stacked bars of the times, forward and backward."""
    names = [row["name"] for row in times]
    forward = [1e3 * row["forward_seconds"] for row in times]
    backward = [1e3 * row["backward_seconds"] for row in times]
    colours = [THEIRS if name.startswith("SDPA") else OURS for name in names]
    axes.barh(names, forward, color=colours)
    drawn = axes.barh(names, backward, left=forward, color=colours, alpha=LIGHT)
    labels = [f"{f + b:.0f} ms ({row['ratio']:.2f} x)" for f, b, row in zip(forward, backward, times, strict=True)]
    axes.bar_label(drawn, labels, padding=4)
    axes.set(
        title="Time: forward (dark) and backward (light)",
        xlabel="ms, median",
        xlim=(0, 1.25 * max(map(sum, zip(forward, backward, strict=True)))),
    )
    _finish(axes)


def _finish(axes: Axes) -> None:
    """Put the first bar on top, and leave out the frame on two sides."""
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
