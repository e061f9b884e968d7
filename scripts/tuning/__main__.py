"""``scripts/tune-cpu``: what each threshold of the native kernel is worth on this processor."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))


def main(words: Sequence[str]) -> int:
    """Measure, or list; 0 if every library was built and every result is right, else 1."""
    options = _options(words)
    if options.level:
        os.environ["UNDIVIDED_ISA"] = options.level  # before the library is loaded

    from thresholds import BY_NAME
    from variants import Builder, BuildError

    from undivided.errors import InputError
    from undivided.kernels import cpu

    unknown = [name for name in options.names if name not in BY_NAME]
    try:
        library = cpu.load()
        if unknown:
            raise InputError("NAME", f"be one of {', '.join(BY_NAME)}", ", ".join(unknown))
        if isinstance(library, str):
            raise InputError("--level", "be a level that can be measured", library)
        if options.values and len(options.names) != 1:
            raise InputError("--values", "be given for one threshold", str(len(options.names)))
        os.environ["UNDIVIDED_ISA"] = library.level
        builder = Builder(library.level, options.optimize, options.jobs)
        chosen = [BY_NAME[name] for name in options.names or BY_NAME]
        chosen = [one for one in chosen if options.names or not one.levels or library.level in one.levels]
        current = builder.values(one.name for one in chosen)
    except (InputError, BuildError) as error:
        print(f"tune-cpu: {error}", file=sys.stderr)
        return 2
    if options.list:
        return _list(chosen, current, library.level)
    reports = [_measure(one, current[one.name], builder, options) for one in chosen]
    if options.json:
        options.json.write_text(json.dumps(_report(library.level, reports), indent=1) + "\n", encoding="utf-8")
    return int(any(report["failed"] for report in reports))


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("scripts/tune-cpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="thresholds; default: all that count at the level")
    parser.add_argument("--list", action="store_true", help="list the thresholds and measure nothing")
    parser.add_argument("--level", default=os.environ.get("UNDIVIDED_ISA"), help="the level; default: the one in use")
    parser.add_argument("--values", type=_numbers, help="values to try, such as 96,192, for one threshold")
    parser.add_argument("--filter", default="", help="time only problems whose name contains this")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing per problem (1)")
    parser.add_argument("--build-only", action="store_true", help="build the libraries, to time them later")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at a time (1); each takes about 1 GB")
    parser.add_argument(
        "--optimize",
        default="",
        metavar="FLAG",
        help="compile with this instead of -O3, such as --optimize=-O1, to try the tool quickly",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    return parser.parse_args(words)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _list(chosen: Sequence[Any], current: dict[str, int], level: str) -> int:
    print(f"level {level}")
    for one in chosen:
        values = ", ".join(map(str, one.values))
        print(f"{one.name} = {current[one.name]}: {one.decides}; tries {values}")
        print(f"    {', '.join(problem.name for problem in one.problems)}")
    return 0


def _measure(threshold: Any, current: int, builder: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Build and time one threshold, and print its table."""
    import torch
    from measure import load, measure, recommended
    from variants import BuildError

    values = dict.fromkeys((current, *(options.values or threshold.values)))
    libraries, refused = {}, {}
    for value in values:
        print(f"tune-cpu: {threshold.name} = {value}", file=sys.stderr)
        try:
            changes = {} if value == current else {threshold.name: value}
            libraries[value] = load(builder.library(changes), builder.level)
        except BuildError as error:
            refused[value] = str(error)
    report = {
        "name": threshold.name, "decides": threshold.decides, "current": current, "refused": refused,
        "rows": [], "recommended": current, "failed": bool(refused),
    }  # fmt: skip
    if options.build_only or current not in libraries:
        for value, why in refused.items():
            print(f"{threshold.name} = {value} was not built: {why}")
        return report
    torch.set_num_threads(threshold.threads or os.cpu_count() or 1)
    problems = [one for one in threshold.problems if options.filter in one.name]
    rows = [measure(problem, libraries, current, options.seconds) for problem in problems]
    report["rows"] = [row._asdict() for row in rows]
    report["threads"] = torch.get_num_threads()
    report["recommended"] = recommended(rows, current)
    report["failed"] = bool(refused) or any(row.wrong for row in rows)
    _print(report, [value for value in libraries if value != current])
    return report


def _print(report: dict[str, Any], others: Sequence[int]) -> None:
    """The table of one threshold, as Markdown."""
    threads = f"{report['threads']} thread{'s' * (report['threads'] != 1)}"
    print(f"\n{report['name']} = {report['current']}: {report['decides']}; {threads}")
    print("times as fast as with the current value, median of turns; spread: between the quartiles\n")
    print(f"| problem | {' | '.join(map(str, others))} | spread |")
    print(f"|---|{'--:|' * (len(others) + 1)}")
    for row in report["rows"]:
        cells = ["wrong" if value in row["wrong"] else f"{row['ratios'][value]:.2f}" for value in others]
        print(f"| {row['problem']} | {' | '.join(cells)} | {row['spread']:.2f} |")
    for value, why in report["refused"].items():
        print(f"\n{value} was not built: {why}")
    verdict = "keep" if report["recommended"] == report["current"] else "recommended:"
    print(f"\n{report['name']}: {verdict} {report['recommended']}", flush=True)


def _report(level: str, reports: list[dict[str, Any]]) -> dict[str, Any]:
    from undivided.benchmarking import suites

    return {"machine": suites.machine() | {"native": level}, "commit": suites.commit(), "thresholds": reports}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
