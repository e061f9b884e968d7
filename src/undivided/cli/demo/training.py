"""The second part of ``undivided demo``: trains a model on packed documents, and generates text with paged caches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from undivided.cli._terminal import mark, print_table, print_text, print_title, progress, table
from undivided.cli.demo.byte_model import Size, generate
from undivided.cli.demo.byte_training import Corpus, Recipe, Training, bigram_loss, train

Report = dict[str, Any]
PROMPTS = (b"import ", b"def __init__(self", b"class ")
CHECKPOINT_EVERY = 50
MARGIN = 0.25
"""Nats per byte by which a trained model must be better than a bigram model."""


def train_and_generate(recipe: Recipe, checkpoint: Path | None, out: Path | None, quiet: bool) -> Report:
    """The report of a training run (continued from the checkpoint if it exists), with generated text."""
    corpus = Corpus.of_library()
    start = time.perf_counter()
    if checkpoint is not None and checkpoint.exists():
        run = Training.load(checkpoint, corpus)
    else:
        run = Training(Size(), recipe, corpus)
    resumed = run.done
    with progress(run.recipe.steps - run.done + 2, quiet) as step:
        step("bigram model")
        bigrams = bigram_loss(corpus)
        train(
            run,
            checkpoint,
            CHECKPOINT_EVERY,
            lambda done, loss: step(f"step {done} of {run.recipe.steps}: loss {loss:.2f}, bigrams {bigrams:.2f}"),
        )
        step("held-out files")
        held_out = run.held_out_loss()
    seconds = time.perf_counter() - start
    texts = generate(run.model, PROMPTS, 160, temperature=0.7, seed=0)
    report: Report = {
        "steps": run.done,
        "resumed_at": resumed,
        "tokens_per_step": run.recipe.tokens,
        "seconds": round(seconds, 1),
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "threads": torch.get_num_threads(),
        "files": {"train": len(corpus.train), "held_out": len(corpus.held_out)},
        "loss": {"held_out": held_out, "bigrams": bigrams, "first": run.losses[0], "last": run.losses[-1]},
        "ok": held_out < bigrams - MARGIN,
        "texts": [text.decode(errors="replace") for text in texts],
    }
    if out is not None:
        report["picture"] = str(_draw(out / "training.png", run.losses, bigrams, held_out))
    return report


def _draw(path: Path, losses: list[float], bigrams: float, held_out: float) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color="#1f5fa8", linewidth=1, label="batches of training files")
    axes.axhline(bigrams, color="#9aa3ad", linestyle="--", label=f"bigrams, held-out files: {bigrams:.2f}")
    axes.plot([len(losses)], [held_out], "o", color="#c0392b", label=f"this model, held-out files: {held_out:.2f}")
    axes.set(title="Loss of a byte model on Python's library", xlabel="step", ylabel="nats per byte", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
    return path


def show(screen: Console, report: Report) -> None:
    """Print the model, its losses and its text."""
    loss = report["loss"]
    print_title(screen, "A model trained on packed documents")
    resumed = f", continued from step {report['resumed_at']}" if report["resumed_at"] else ""
    print_text(
        screen,
        f"{report['parameters']:,} parameters in TransformerLayers (RMSNorm, SwiGLU, rotary, 4 query heads on 2 key "
        f"heads, a window of 64 in every other layer); {report['steps']} steps of {report['tokens_per_step']:,} "
        f"packed bytes of {report['files']['train']} library files{resumed}; {report['seconds']:.0f} s on "
        f"{report['threads']} threads.",
    )
    rows = table("nats per byte, held-out files", "loss", "", right=("loss",))
    rows.add_row("this model", f"{loss['held_out']:.3f}", mark(report["ok"]))
    rows.add_row(Text("bigram model", "dim"), f"{loss['bigrams']:.3f}")
    print_table(screen, rows, before=1)
    print_title(screen, "Generated text: three sequences in one pool of pages")
    for text in report["texts"]:
        print_text(screen, text, "cyan", after=1)
    if "picture" in report:
        print_text(screen, report["picture"])
