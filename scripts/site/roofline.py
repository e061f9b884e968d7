"""The page of rooflines: what bounds a call on each level, prediction beside measurement, from `benchmarks/`."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from plots import PAINT, read_report, themed

from undivided.benchmarking.roofline import LEVELS, CasePrediction, case_predictions


class Report(NamedTuple):
    """A report of `benchmarks/`, the heading of its section, and what a reader has to know of it."""

    file: str
    heading: str
    remark: str = ""


_LOADS = (
    "The peak of this report is that of multiply-adds without loads. With loads, as it is measured now, it is .933 of "
    "it, because [the clock is lower](../decisions/2026-11-30-clock-of-products.md): fractions become 1.07 times as "
    "high, and most of the time that the model does not explain is gone."
)
REPORTS = {
    "avx512-bf16": Report("2026-11-23-native-zen5-avx512-bf16.json", "Level avx512_bf16: AMD EPYC, Zen 5"),
    "avx512": Report("2026-11-24-native-zen5-avx512.json", "Level avx512, forced: AMD EPYC, Zen 5"),
    "avx2": Report("2026-11-24-native-zen5-avx2.json", "Level avx2, forced: AMD EPYC, Zen 5"),
    "avx512-bf16-zen4": Report("2026-11-30-native-zen4-avx512-bf16.json", "Level avx512_bf16: AMD EPYC, Zen 4"),
    "avx512-zen4": Report("2026-11-25-native-zen4-avx512.json", "Level avx512, forced: AMD EPYC, Zen 4"),
    "avx2-zen4": Report("2026-11-25-native-zen4-avx2.json", "Level avx2, forced: AMD EPYC, Zen 4"),
    "avx512-emerald-rapids": Report(
        "2026-11-29-native-emerald-rapids-avx512.json", "Level avx512: Intel Xeon, Emerald Rapids without AMX", _LOADS
    ),
    "avx2-zen3": Report("2026-11-29-native-zen3-avx2.json", "Level avx2: AMD EPYC, Zen 3"),
    "amx-bf16": Report("2026-11-22-native-granite-rapids-amx-bf16.json", "Level amx_bf16: Intel Xeon, Granite Rapids"),
}
"""By the name of the picture."""
TERMS = {"products": "a", "reads": "a", "edges": "d", "softmax": "b", "packing": "soft", "memory": "c"}
"""The terms of a prediction, and their colours."""
BOUNDS = {
    "products": "the multiply-adds themselves",
    "reads": "the memory: every key and value is read once",
    "edges": "pairs that are computed and masked: a micro-kernel covers whole vectors of rows",
    "softmax": "vector instructions of the softmax, of which the exponential is half",
    "packing": "keys and values that are converted or interleaved once per block of rows",
    "memory": "queries, keys, values and results, which come from memory and go there",
}


def _kinds(report: str) -> Iterator[tuple[str, list[CasePrediction]]]:
    """The cases of a report by kind."""
    order = ("prefill", "window", "documents", "decode")
    in_order = sorted(case_predictions(read_report(report)), key=lambda case: order.index(case.kind))
    for kind, group in groupby(in_order, key=lambda case: case.kind):
        yield kind, list(group)


def pictures() -> dict[str, str]:
    """The SVG text of one plot per report."""
    return {
        f"roofline-{name}": _bars(f"roofline-{name}", heading, report) for name, (report, heading, _) in REPORTS.items()
    }


def _bars(name: str, heading: str, report: str) -> str:
    """For each case, the predicted parts as fractions of the measured time."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    cases = [case for _, group in _kinds(report) for case in group]
    style = {
        "svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), PAINT["ink"]),
        "axes.edgecolor": PAINT["line"], "legend.labelcolor": PAINT["ink"],
    }  # fmt: skip
    with plt.rc_context(style):
        figure, axis = plt.subplots(figsize=(8, 1.2 + 0.22 * len(cases)), layout="constrained")
        labelled: set[str] = set()
        for y, case in enumerate(cases):
            left = 0.0
            for term, seconds in case.predicted.terms.items():
                if case.predicted.overlap and term != case.predicted.bound:
                    continue
                share = seconds / case.measured
                label = None if term in labelled else term
                axis.barh(y, share, left=left, height=0.75, color=PAINT[TERMS[term]], label=label)
                labelled.add(term)
                left += share
        axis.axvline(1, color=PAINT["ink"], linewidth=1)
        axis.set_yticks(range(len(cases)), [case.name for case in cases])
        axis.set_ylim(len(cases) - 0.4, -0.6)
        axis.set_xlabel("predicted seconds of each part, divided by the measured time; the line is 1")
        axis.set_title(heading, loc="left", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.4, -0.06), ncols=6)
        text = themed(figure)
        plt.close(figure)
    return text


def _table(group: list[CasePrediction]) -> str:
    """One row per case."""
    terms = list(group[0].predicted.terms)
    head = ["case", "time", "of the peak", "predicted", "time / predicted", *terms, "bound by"]
    rows = ["| " + " | ".join(head) + " |", "|---|" + "--:|" * (len(head) - 2) + "---|"]
    for case in group:
        cells = [
            case.name + " ~" * case.disturbed,
            f"{case.measured * 1e3:.3g} ms",
            f"{case.peak / case.measured:.2f}",
            f"{case.peak / case.predicted.seconds:.2f}",
            f"{case.ratio:.2f}",
            *(f"{case.predicted.terms[term] / case.measured:.2f}" for term in terms),
            case.predicted.bound,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _generation(heading: str) -> str:
    """The generation of processors that a heading ends with."""
    return heading.rsplit(", ", 1)[1]


def _errors() -> str:
    """How far the model is off, by level and kind."""
    rows = ["| level | processor | kind | lines | time / predicted, median | least | most |"]
    rows.append("|---|---|---|--:|--:|--:|--:|")
    for report, heading, _ in REPORTS.values():
        level = read_report(report)["machine"]["native"]
        for kind, group in _kinds(report):
            ratios = [case.ratio for case in group if not case.disturbed] or [float("nan")]
            cells = (f"{number:.2f}" for number in (statistics.median(ratios), min(ratios), max(ratios)))
            rows.append(f"| {level} | {_generation(heading)} | {kind} | {len(ratios)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _sections() -> Iterator[str]:
    for name, (report, heading, remark) in REPORTS.items():
        contents = read_report(report)
        machine = contents["machine"]
        yield f"## {heading}"
        yield (
            f"{machine['processor']}, level `{machine['native']}`, {machine['threads']} "
            f"thread{'s' * (machine['threads'] != 1)}, {contents['settings'].get('clock', 'wall time')}, "
            f"PyTorch {machine['torch']}, commit {contents['commit']}, {contents['when'][:10]}. "
            f"[Report](../../benchmarks/{report})."
        )
        if remark:
            yield textwrap.fill(remark, 120, break_long_words=False, break_on_hyphens=False)
        yield f"![{heading}: predicted parts of the measured time](../pictures/roofline-{name}.svg)"
        for kind, group in _kinds(report):
            yield f"### {kind.capitalize()}, {machine['native']}, {_generation(heading)}"
            yield _table(group)


def page() -> str:
    """docs/reference/roofline.md."""
    shapes = "\n".join(
        f"| `{name}` | {one.lanes} x {one.vectors} | {one.group} | {one.rows[0]}, {one.rows[1]} | {one.softmax:g} | "
        f"{one.packing} |"
        for name, one in LEVELS.items()
    )
    bounds = "\n".join(f"| {name} | {text} |" for name, text in BOUNDS.items())
    sections = "\n\n".join(_sections())
    return f"""# Rooflines

This page compares measured times of the native kernel with a roofline model and shows which part bounds each call. The
model is `src/undivided/benchmarking/roofline.py`: arithmetic on peaks that the same run measured. It has no fitted
constant: where it is wrong, something is missing in the model or in the kernel.

| part | what it is |
|---|---|
{bounds}

In prefill the parts add up. In decoding they overlap, and the larger counts. Of a case:

- *of the peak*: the fraction that was reached, as in the benchmark's tables; *predicted*: the fraction that the model
  expects;
- *time / predicted*: 1.10 means that the call took a tenth longer than the model explains;
- each part's column is its predicted time divided by the measured time. If the columns of a prefill add up to less than
  1, the model does not explain the rest;
- *bound by*: the largest part other than the products, if these parts are a tenth of the prediction.

## How wrong the model is

A *level* is the instruction set (ISA) for which the native kernel was compiled. Lines that other load disturbed (~
below) do not count.

{_errors()}

It leaves out what it cannot derive from measured peaks: loads and stores of the micro-kernels, traffic between the
caches, page walks and page faults, uneven threads, the call itself. In fp32 on AMX products run on tiles of 16-bit
elements, which share loads; these lines are not modelled. Gradients are not modelled either. A report without decoding
has no read rate; then memory counts as nothing.

## The constants

From the sources: `simd/vec.h`, `simd/math.h`, `forward/softmax.h`, `abi/tuning_levels.h`. The softmax is in vector
instructions per vector of pairs.

| level | rows of a panel | keys at a time | rows of a block, fp32 and 16-bit | softmax | packing, in rows |
|---|--:|--:|--:|--:|--:|
{shapes}

Traffic that the model leaves out, by count. A panel of 48 rows reads 8 (D_qk + D_v) / 96 bytes
per pair from the second-level cache in fp32: 21 bytes at D 128, or 9 GB/s at the speed of the Zen 5 core below. Its
scores, written and read in the first-level cache, take 20 bytes per pair whatever the head size: three loads and two
stores beside the 256 multiply-adds of a vector of pairs at D 128. A row of keys in another page each time
(`bshd`, many heads) touches two pages per key and block of rows, 1 / 192 per pair.

{sections}

*This page is generated from the reports in `benchmarks/`: `scripts/docs --write`. `undivided bench --json` writes such
a report on any machine.*
"""
