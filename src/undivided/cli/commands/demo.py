"""``undivided demo``: the library's main job on real documents, checked, then timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from undivided.cli import _charts
from undivided.cli._options import DTYPES, Dtype
from undivided.cli._paths import file_to_write, folder_to_write
from undivided.cli._terminal import console, decision_json, print_json, progress
from undivided.cli.byte_training import Recipe
from undivided.cli.demo import comparison, text, training
from undivided.cli.demo.batch import Batch, embed
from undivided.cli.demo.documents import Document, collect
from undivided.cli.demo.training import train_and_generate
from undivided.cli.demo.training_step import FORMATS, training_steps
from undivided.errors import InputError
from undivided.functional import explain
from undivided.selection.decision import Decision
from undivided.verification.budget import FACTOR

Report = dict[str, Any]

USUAL, QUICK = (24, 1024, 3, Recipe.steps), (8, 256, 1, 20)
"""Documents, tokens of the longest, rounds of timing, steps of training."""


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder for pictures (PNG) of the mask, the pairs and the times.")
    ] = None,
    documents: Annotated[
        int | None, typer.Option(min=2, max=256, help="How many of the library's files to take; 24 if not given.")
    ] = None,
    longest: Annotated[
        int | None, typer.Option(min=64, max=16384, help="Tokens (bytes) of the longest document; 1024 if not given.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=0, max=100, help="Rounds of timing, 0 for none; 3 if not given.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of queries, keys and values.")] = Dtype.fp32,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds: 8 documents, 256, 1 and 20 if not given.")
    ] = False,
    train: Annotated[
        bool, typer.Option("--train", help="Then train a byte model on packed files, and generate text.")
    ] = False,
    steps: Annotated[
        int | None, typer.Option(min=1, max=100_000, help=f"Steps of --train; {Recipe.steps} if not given.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="File that --train writes, and continues if it exists.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Attention over real documents, packed and padded: checked, counted, explained, timed.

    The documents are files of Python's own library, of very different lengths. About half a minute on two cores.
    """
    usual = QUICK if quick else USUAL
    sizes = (documents, longest, rounds, steps)
    documents, longest, rounds, recipe_steps = (
        given if given is not None else size for given, size in zip(sizes, usual, strict=True)
    )
    for flag, given in (("--checkpoint", checkpoint), ("--steps", steps)):
        if given is not None and not train:
            raise InputError(flag, "come with --train", given)
    if checkpoint is not None:
        file_to_write("--checkpoint", checkpoint)
    begun = time.perf_counter()
    if out is not None:
        _charts.require("--out")
        folder_to_write("--out", out)
    chosen = collect(documents, min(48, longest), longest)
    batch = embed(chosen, DTYPES[dtype])
    screen = None if as_json else console()
    if screen:
        text.introduce(screen, chosen, batch)
    report = _check(batch, chosen, rounds, quiet=as_json)
    if out is not None:
        report["files"] = [str(path) for path in _charts.draw(out, batch, report)]
    report["seconds"] = round(time.perf_counter() - begun, 1)
    if screen:
        text.show(screen, report, _decide(batch))
    if train:
        report["model"] = train_and_generate(Recipe(steps=recipe_steps), checkpoint, out, quiet=as_json)
        if screen:
            training.show(screen, report["model"])
    if not screen:
        print_json(report)
    if not report["ok"]:
        raise typer.Exit(1)


def _check(batch: Batch, chosen: list[Document], rounds: int, quiet: bool) -> Report:
    """Every way against the oracle, then, if all agree, against the clock."""
    ours, torchs = comparison.our_ways(batch), comparison.torch_ways(batch)
    raced = [*ours[:2], *torchs]
    steps = 2 * len(chosen) + len(ours) + len(torchs) + 1 + rounds * len(raced) + len(FORMATS)
    with progress(steps, quiet) as step:
        truth = comparison.oracle(batch, torch.float64, lambda: step("fp64 oracle, a document at a time"))
        plain = comparison.oracle(batch, batch.q.dtype, lambda: step("plain PyTorch, for the error budget"))
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
    """Twice the error of plain arithmetic in the same precision, plus one rounding."""
    return {name: FACTOR * error + torch.finfo(dtype).eps for name, error in plain.items()}


def _runs(
    ways: list[comparison.Way],
    batch: Batch,
    truth: comparison.Outcome,
    budget: dict[str, float],
    step: Callable[[str], None],
) -> tuple[list[Report], bool]:
    """The verdict on every way, and whether all of ours gave the same bits."""
    verdicts, first, identical = [], None, True
    for way in ways:
        step(f"checking: {way.name}")
        outcome, is_clean = comparison.run(way, batch)
        verdicts.append(_verdict(way, is_clean, comparison.errors(outcome, truth), budget))
        first = outcome if first is None else first
        if way.is_ours:
            identical = identical and all(map(torch.equal, outcome, first))
    return verdicts, identical


def _verdict(way: comparison.Way, is_clean: bool, found: dict[str, float], budget: dict[str, float]) -> Report:
    within = all(found[name] <= budget[name] for name in found)
    return {
        "name": way.name,
        "ours": way.is_ours,
        "errors": found,
        "padding_is_zero": is_clean,
        "padding_held_nan": way.poison != 0,
        "ok": within and (is_clean or not way.is_ours),
    }


def _facts(batch: Batch, chosen: list[Document]) -> Report:
    """Exact counts: what packing saves."""
    padded = len(batch.lengths) * batch.longest
    per_token = (2 * batch.q[0].numel() + batch.k[0].numel() + batch.v[0].numel()) * batch.q.element_size()
    allowed = batch.packed_mask().normal_form(1, 1, batch.tokens, batch.tokens, "cpu").pairs
    return {
        "machine": {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "isa": torch.backends.cpu.get_cpu_capability(),
        },
        "dtype": str(batch.q.dtype).removeprefix("torch."),
        "documents": [{"name": document.name, "tokens": len(document)} for document in chosen],
        "tokens": {"packed": batch.tokens, "padded": padded},
        "pairs": {"packed": allowed, "padded": padded * batch.longest},
        "bytes": {
            "packed": batch.tokens * per_token,
            "padded": padded * per_token,
            "dense_mask": padded * batch.longest,
        },
    }


def _leaked_pairs(batch: Batch) -> Report:
    everything = batch.tokens * (batch.tokens + 1) // 2
    right = sum(length * (length + 1) // 2 for length in batch.lengths)
    return {"pairs": everything - right, "share_of_pairs": 1 - right / everything}


def _decide(batch: Batch) -> Decision:
    leaves = [x.detach().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    return explain(*leaves, layout="thd", mask=batch.packed_mask())


def _times(times: dict[str, comparison.Times]) -> list[Report]:
    """Medians, and each as a multiple of the first way's."""
    rows = []
    base = sum(next(iter(times.values())).medians)
    for name, measured in times.items():
        forward, backward = measured.medians
        rows.append(
            {
                "name": name,
                "forward_seconds": forward,
                "backward_seconds": backward,
                "ratio": (forward + backward) / base,
                "rounds": len(measured.forward),
            }
        )
    return rows
