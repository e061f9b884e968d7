"""``undivided report``: one HTML file with the machine, verification, benchmarks and the mask explorer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from undivided._files import read_json
from undivided.cli._exit_codes import INTERRUPTED
from undivided.cli._flags import refuse_together
from undivided.cli._mask_words import parse
from undivided.cli._paths import file_to_write, reason_of
from undivided.cli._terminal import complain, console, print_json, progress
from undivided.cli.commands.doctor import findings
from undivided.errors import InputError

DEFAULT_MASK = "causal() & documents([0, 3, 7, 12])"


def report(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file to write.")] = Path("report.html"),
    bench: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A report that `undivided bench --json` wrote; default: a quick run."),
    ] = None,
    no_bench: Annotated[bool, typer.Option("--no-bench", help="Leave out the benchmarks.")] = False,
    mask: Annotated[str, typer.Option(help="The first mask of the explorer.")] = DEFAULT_MASK,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write one HTML file: this machine, its backends, a verification, benchmarks and a mask explorer.

    The file refers to nothing outside of it. A quick benchmark takes about a minute. Exit code 1 if a backend is wrong.
    """
    from undivided.masks._drawing import require_matplotlib
    from undivided.report.page import render, require_jinja2
    from undivided.report.values import PROBLEMS, quick_benchmark, quick_plan, verifications

    require_jinja2("report")
    if no_bench:
        refuse_together("--no-bench", {"--bench": bench})
    else:
        require_matplotlib("the benchmarks of the report")
    parse(mask)
    file_to_write("--out", out)
    benchmark = None if bench is None else read_report("--bench", bench)
    steps = len(PROBLEMS) + (quick_plan().steps if not no_bench and bench is None else 0)
    with progress(steps, quiet=as_json) as step:
        verified = verifications(step)
        if not no_bench and bench is None:
            benchmark = quick_benchmark(step)
            if benchmark["interrupted"]:
                complain(f"interrupted: {out} was not written")
                raise typer.Exit(INTERRUPTED)
    out.write_text(render(findings(), verified, benchmark, mask), encoding="utf-8")
    ok = all(result.ok for _, result in verified)
    if as_json:
        print_json(
            {"file": str(out), "bytes": out.stat().st_size, "verified": {n: r.ok for n, r in verified}, "ok": ok}
        )
    else:
        console().print(f"written to {out}", markup=False, soft_wrap=True)
    if not ok:
        raise typer.Exit(1)


def read_report(flag: str, path: Path) -> dict[str, Any]:
    """The benchmark report in a file.

    Raises:
        InputError: the file cannot be read, is not JSON, or is not a report of this version.
    """
    from undivided.benchmarking import markdown

    try:
        contents: dict[str, Any] = read_json(path)
        markdown(contents)  # reads every field
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        got = f"{path} ({reason_of(error)})"
        raise InputError(flag, "be a report that `undivided bench --json` wrote", got) from None
    return contents
