"""The output of ``undivided demo``."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from undivided._units import human
from undivided.arguments.tensors import dtype_name
from undivided.cli._terminal import mark, print_decision, print_table, print_text, print_title, shaded, table
from undivided.cli.demo.batch import HEAD_DIM, HEADS, KV_HEADS, PackedBatch
from undivided.cli.demo.documents import Document
from undivided.selection.decision import Decision

Report = dict[str, Any]
_BARS = "▁▂▃▄▅▆▇█"


def introduce(screen: Console, documents: list[Document], batch: PackedBatch) -> None:
    """Print the documents and the mask, before the work starts."""
    screen.print(Text("Undivided: one call, any layout, any mask, and the same answer from every kernel", "bold"))
    print_title(screen, "The documents")
    bars = "".join(_BARS[min(7, 8 * length // (batch.longest + 1))] for length in batch.lengths)
    print_text(
        screen,
        f"{len(documents)} files of Python's library, {min(batch.lengths)} to {batch.longest} bytes, one byte per "
        f"token:\n"
        f"{bars}  {documents[0].name} to {documents[-1].name}\nembedded as {HEADS} query heads on "
        f"{KV_HEADS} key/value heads "
        f"of {HEAD_DIM}, {dtype_name(batch.q.dtype)}.",
    )
    print_title(screen, "The mask, packed")
    print_text(
        screen, f"Causal within each document, {batch.tokens} packed tokens. Rows are queries, columns are keys."
    )
    form = batch.packed_mask().normal_form(1, 1, batch.tokens, batch.tokens, "cpu")
    print_text(screen, shaded(form), "cyan")


def show(screen: Console, report: Report, decision: Decision) -> None:
    """Print all results."""
    _agreement(screen, report)
    _savings(screen, report)
    _decision(screen, decision)
    if report["times"]:
        _times(screen, report)
    _training(screen, report)
    if report.get("files"):
        print_title(screen, "Pictures")
        print_text(screen, "\n".join(report["files"]))
    _summary(screen, report)


def _agreement(screen: Console, report: Report) -> None:
    print_title(screen, "Do they agree?")
    print_text(
        screen,
        "Relative error of the output and of the gradients, compared with an fp64 oracle (PyTorch's plain softmax, one "
        "document at a time). The padding holds NaN; in our outputs and gradients it must be 0.",
    )
    names = ("out", "dq", "dk", "dv")
    rows = table("way", *names, "", right=names)
    for run in report["runs"]:
        errors = [f"{run['errors'][name]:.1e}" for name in names]
        rows.add_row(Text(run["name"], "" if run["ours"] else "dim"), *errors, mark(run["ok"]))
    rows.add_row(
        Text("allowed: 2 x plain + 1 rounding", "dim"),
        *(Text(f"{report['budget'][name]:.1e}", "dim") for name in names),
    )
    print_table(screen, rows, before=1)


def _savings(screen: Console, report: Report) -> None:
    print_title(screen, "What packing saves")
    rows = table("", "packed", "padded", "packed / padded", right=("packed", "padded", "packed / padded"))
    for label, key, unit in (
        ("tokens", "tokens", ""),
        ("query-key pairs per head", "pairs", ""),
        ("q, k, v and output", "bytes", "B"),
    ):
        packed, padded = report[key]["packed"], report[key]["padded"]
        cells = [human(n, unit) if unit else f"{n:,}" for n in (packed, padded)]
        rows.add_row(label, *cells, f"{packed / padded:.1%}")
    rows.add_row("dense mask that SDPA needs", "none", human(report["bytes"]["dense_mask"], "B"), "")
    print_table(screen, rows)
    leak = report["leak"]
    print_title(screen, "What goes wrong without document boundaries")
    print_text(
        screen,
        f"The same tokens as one long causal sequence: no error is raised, {leak['share_of_pairs']:.0%} of the pairs "
        f"({leak['pairs']:,}) cross documents, and the relative error of the output is {leak['error']:.0%}.",
    )


def _decision(screen: Console, decision: Decision) -> None:
    print_title(screen, "Which kernel, and why not the others")
    print_text(screen, f"{decision.problem}\non {decision.machine}")
    print_decision(screen, decision, before=1)


def _times(screen: Console, report: Report) -> None:
    rounds = report["times"][0]["rounds"]
    machine = report["machine"]
    print_title(screen, "How long")
    print_text(
        screen,
        f"Median of {rounds} round{'s' * (rounds > 1)}, in which all ways alternate, on {machine['threads']} "
        f"thread{'s' * (machine['threads'] != 1)} "
        f"({machine['isa']}). SDPA's dense mask is built before the timing.",
    )
    right = ("forward", "backward", "x packed")
    rows = table("way", *right, right=right)
    for row in report["times"]:
        cells = [_seconds(row["forward_seconds"]), _seconds(row["backward_seconds"]), f"{row['ratio']:.2f}"]
        rows.add_row(Text(row["name"], "dim" if row["name"].startswith("SDPA") else ""), *cells)
    print_table(screen, rows, before=1)


def _training(screen: Console, report: Report) -> None:
    print_title(screen, "One training step through DotProductAttention")
    print_text(
        screen,
        "A small next-byte model on the same documents, with the module and arguments of TransformerEngine; only "
        "qkv_format differs.",
    )
    right = ("loss", "after the step", "gradients differ by")
    rows = table("qkv_format", *right, "", right=right)
    for row in report["training"]:
        figures = [f"{row['loss']:.6f}", f"{row['loss_after']:.6f}", f"{row['gradient_difference']:.1e}"]
        rows.add_row(row["format"], *figures, mark(row["ok"]))
    print_table(screen, rows, before=1)


def _summary(screen: Console, report: Report) -> None:
    print_title(screen, "What you saw")
    ours = [run for run in report["runs"] if run["ours"]]
    worst = max(max(run["errors"].values()) for run in ours)
    pairs, bytes_ = report["pairs"], report["bytes"]
    same = ", bit for bit" if report["identical"] else ""
    verdict = (
        f"returned the same result for {len(ours)} arrangements{same} (relative error at most {worst:.1e}, gradients "
        f"included)"
        if report["ok"]
        else "did NOT return the same result everywhere: see the crosses above, and please report it"
    )
    text = (
        f"One function, called with different layouts and masks, {verdict}. Packing computed "
        f"{pairs['packed'] / pairs['padded']:.1%} of the pairs of the padded batch in "
        f"{bytes_['packed'] / bytes_['padded']:.0%} of its memory, without attention between documents. The library "
        "names the kernel that ran, and the reason."
    )
    if report["times"]:
        text += _speed(report["times"])
    print_text(screen, f"{text}\nTotal time: {report['seconds']} s.")


def _speed(times: list[Report]) -> str:
    ratio = {row["name"]: row["ratio"] for row in times}
    masked, causal = ratio["SDPA, padded, dense mask"], ratio["SDPA, padded, is_causal"]
    alone = ratio["SDPA, one document at a time"]
    return (
        f" PyTorch's SDPA on the padded batch took {masked:.1f} times as long with its dense mask and {causal:.1f} "
        f"times with is_causal; called once per document, {alone:.2f} times."
    )


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.1f} ms"
