"""``undivided demo``: attention over real documents, checked, then timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from undivided.arguments.tensors import dtype_name
from undivided.cli._options import DTYPES, Dtype, dtype_flag
from undivided.cli._paths import file_to_write, folder_to_write
from undivided.cli._terminal import console, decision_json, print_json, progress
from undivided.cli.demo import charts, comparison, text, training
from undivided.cli.demo.batch import PackedBatch, embed
from undivided.cli.demo.byte_training import Recipe
from undivided.cli.demo.documents import Document, collect
from undivided.cli.demo.training import train_and_generate
from undivided.cli.demo.training_step import FORMATS, training_steps
from undivided.errors import InputError
from undivided.functional import explain
from undivided.masks._drawing import require_matplotlib
from undivided.selection.decision import Decision
from undivided.verification.budget import FACTOR

Report = dict[str, Any]


class DemoSizes(NamedTuple):
    """Number of documents, tokens of the longest, rounds of timing, and steps of training."""

    documents: int
    longest: int
    rounds: int
    steps: int


DEFAULT = DemoSizes(documents=24, longest=1024, rounds=3, steps=Recipe.steps)
QUICK = DemoSizes(documents=8, longest=256, rounds=1, steps=20)


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder for pictures (PNG) of the mask, the counts and the times.")
    ] = None,
    documents: Annotated[
        int | None, typer.Option(min=2, max=256, help="Number of files of Python's library; default: 24.")
    ] = None,
    longest: Annotated[
        int | None, typer.Option(min=64, max=16384, help="Tokens (bytes) of the longest document; default: 1024.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=0, max=100, help="Rounds of timing, 0 for none; default: 3.")
    ] = None,
    dtype: Annotated[Dtype, dtype_flag("Dtype of queries, keys and values.")] = Dtype.fp32,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Smaller defaults, a few seconds: 8 documents of up to 256 tokens, 1 round, 20 steps."
        ),
    ] = False,
    train: Annotated[
        bool, typer.Option("--train", help="Also train a byte model on packed files, and generate text.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, max=100_000, help=f"Steps of --train; default: {Recipe.steps}.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint file that --train writes, and from which it continues.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Attention over real documents, packed and padded: checked, counted, explained and timed.

    The documents are files of Python's library, of very different lengths. It takes about half a minute on two cores.
    """
    given = {"documents": documents, "longest": longest, "rounds": rounds, "steps": steps}
    sizes = (QUICK if quick else DEFAULT)._replace(**{name: n for name, n in given.items() if n is not None})
    if not train:
        _refuse_without_train({"--checkpoint": checkpoint, "--steps": steps})
    if checkpoint is not None:
        file_to_write("--checkpoint", checkpoint)
    start = time.perf_counter()
    if out is not None:
        require_matplotlib("--out")
        folder_to_write("--out", out)
    chosen = collect(sizes.documents, min(48, sizes.longest), sizes.longest)
    batch = embed(chosen, DTYPES[dtype])
    screen = None if as_json else console()
    if screen:
        text.introduce(screen, chosen, batch)
    report = _check(batch, chosen, sizes.rounds, quiet=as_json)
    if out is not None:
        report["files"] = [str(path) for path in charts.draw(out, batch, report)]
    report["seconds"] = round(time.perf_counter() - start, 1)
    if screen:
        text.show(screen, report, _decide(batch))
    if train:
        report["model"] = train_and_generate(Recipe(steps=sizes.steps), checkpoint, out, quiet=as_json)
        if screen:
            training.show(screen, report["model"])
    if not screen:
        print_json(report)
    if not report["ok"]:
        raise typer.Exit(1)


def _refuse_without_train(flags: Mapping[str, object]) -> None:
    """InputError if one of these flags, which only --train uses, was given."""
    for flag, value in flags.items():
        if value is not None:
            raise InputError(flag, "be given together with --train", value)


def _check(batch: PackedBatch, chosen: list[Document], rounds: int, quiet: bool) -> Report:
    """The report of the comparison: errors of every way, and its times if all are right."""
    ours, torchs = comparison.our_ways(batch), comparison.torch_ways(batch)
    raced = [*ours[:2], *torchs]
    steps = 2 * len(chosen) + len(ours) + len(torchs) + 1 + rounds * len(raced) + len(FORMATS)
    with progress(steps, quiet) as step:
        truth = comparison.oracle(batch, torch.float64, lambda: step("fp64 oracle, one document at a time"))
        plain = comparison.plain(batch, lambda: step("plain PyTorch, for the error budget"))
        budget = _budget(comparison.errors(plain, truth), batch.q.dtype)
        runs, identical = _runs([*ours, *torchs], batch, truth, budget, step)
        step("one long sequence")
        report = _facts(batch, chosen) | {
            "budget": budget,
            "runs": runs,
            "identical": identical,
            "leak": {"error": comparison.leak(batch, truth), **_leaked_pairs(batch)},
            "decision": decision_json(_decide(batch)),
            "training": training_steps(batch, chosen, step),
        }
        report["ok"] = all(row["ok"] for row in (*runs, *report["training"]))
        report["times"] = _times(comparison.race(raced, batch, rounds, step)) if rounds and report["ok"] else []
    return report


def _budget(plain: dict[str, float], dtype: torch.dtype) -> dict[str, float]:
    """The error budget: twice the error of plain arithmetic in the same precision, plus one rounding."""
    return {name: FACTOR * error + torch.finfo(dtype).eps for name, error in plain.items()}


def _runs(
    ways: list[comparison.Way],
    batch: PackedBatch,
    truth: comparison.Results,
    budget: dict[str, float],
    step: Callable[[str], None],
) -> tuple[list[Report], bool]:
    """The verdicts on all ways, and whether all of ours returned the same bits."""
    verdicts, first, identical = [], None, True
    for way in ways:
        step(f"checking: {way.name}")
        outcome, is_clean = comparison.run(way, batch)
        verdicts.append(_verdict(way, is_clean, comparison.errors(outcome, truth), budget))
        first = outcome if first is None else first
        if way.is_ours:
            identical = identical and all(map(torch.equal, outcome, first))
    return verdicts, identical


def _verdict(way: comparison.Way, is_clean: bool, errors: dict[str, float], budget: dict[str, float]) -> Report:
    within = all(errors[name] <= budget[name] for name in errors)
    return {
        "name": way.name,
        "ours": way.is_ours,
        "errors": errors,
        "padding_is_zero": is_clean,
        "padding_held_nan": way.poison != 0,
        "ok": within and (is_clean or not way.is_ours),
    }


def _facts(batch: PackedBatch, chosen: list[Document]) -> Report:
    """The exact counts of tokens, pairs and bytes, packed and padded."""
    padded = len(batch.lengths) * batch.longest
    per_token = (2 * batch.q[0].numel() + batch.k[0].numel() + batch.v[0].numel()) * batch.q.element_size()
    allowed = batch.packed_mask().normal_form(1, 1, batch.tokens, batch.tokens, "cpu").pairs
    return {
        "machine": {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "isa": torch.backends.cpu.get_cpu_capability(),
        },
        "dtype": dtype_name(batch.q.dtype),
        "documents": [{"name": document.name, "tokens": len(document)} for document in chosen],
        "tokens": {"packed": batch.tokens, "padded": padded},
        "pairs": {"packed": allowed, "padded": padded * batch.longest},
        "bytes": {
            "packed": batch.tokens * per_token,
            "padded": padded * per_token,
            "dense_mask": padded * batch.longest,
        },
    }


def _leaked_pairs(batch: PackedBatch) -> Report:
    total = batch.tokens * (batch.tokens + 1) // 2
    within = sum(length * (length + 1) // 2 for length in batch.lengths)
    return {"pairs": total - within, "share_of_pairs": 1 - within / total}


def _decide(batch: PackedBatch) -> Decision:
    leaves = [x.detach().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    return explain(*leaves, layout="thd", mask=batch.packed_mask())


def _times(times: dict[str, list[tuple[float, float]]]) -> list[Report]:
    """The median times, and their ratios to those of the first way."""
    medians = {name: list(map(statistics.median, zip(*rounds, strict=True))) for name, rounds in times.items()}
    base = sum(next(iter(medians.values())))
    return [
        {
            "name": name,
            "forward_seconds": forward,
            "backward_seconds": backward,
            "ratio": (forward + backward) / base,
            "rounds": len(times[name]),
        }
        for name, (forward, backward) in medians.items()
    ]
