"""Training of a `ByteModel` on packed documents, with checkpoints that continue bit for bit.

The documents are files of Python's library; one in eight is held out. A batch packs random pieces of files into a fixed
number of tokens: no padding, and no attention between pieces.
"""

from __future__ import annotations

import math
import sysconfig
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from undivided.cli.demo.byte_model import END, ByteModel, Size
from undivided.cli.demo.documents import library_files
from undivided.errors import InputError

SMALLEST_FILE = 256
"""Bytes of the smallest document of a `Corpus`."""


@dataclass(frozen=True)
class Recipe:
    """The hyperparameters of a training run.

    Attributes:
        steps: optimiser steps.
        tokens: tokens per step.
        rate: highest learning rate.
        warm_up: steps of the warm-up.
        seed: of the weights and the batches.

    >>> Recipe(steps=10).tokens
    2048
    """

    steps: int = 1000
    tokens: int = 2048
    rate: float = 4e-3
    warm_up: int = 20
    seed: int = 0


@dataclass(frozen=True)
class Corpus:
    """Documents as int64 tokens, each with END at its start and end: for training, and held out."""

    train: list[Tensor]
    held_out: list[Tensor]

    @classmethod
    def of_library(cls) -> Corpus:
        """All source files of Python's library with at least SMALLEST_FILE bytes; every eighth is held out.

        Raises:
            InputError: this Python has too few source files.
        """
        names = sorted(name for name, size in library_files() if size >= SMALLEST_FILE)
        if len(names) < 16:
            raise InputError("documents", "be found: 16 source files of Python's library", len(names))
        library = Path(sysconfig.get_path("stdlib"))
        tokens = [_tokens((library / name).read_bytes()) for name in names]
        held_out = tokens[::8]
        return cls([t for n, t in enumerate(tokens) if n % 8], held_out)


def _tokens(text: bytes) -> Tensor:
    return torch.tensor([END, *text, END])


def pack(documents: list[Tensor], longest: int, total: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random pieces of random documents with `total` tokens together: (tokens [total], cu_seqlens int32)."""
    weights = torch.tensor([float(len(document)) for document in documents])
    pieces: list[Tensor] = []
    room = total
    while room > 1:
        document = documents[int(torch.multinomial(weights, 1, generator=generator))]
        limit = min(longest, room, len(document))
        length = int(torch.randint(min(64, limit), limit + 1, (), generator=generator))
        length = length if room - length > 1 else limit
        start = int(torch.randint(len(document) - length + 1, (), generator=generator))
        pieces.append(document[start : start + length])
        room -= length
    lengths = torch.tensor([0, *map(len, pieces)], dtype=torch.int32)
    return torch.cat(pieces), lengths.cumsum(0, dtype=torch.int32)


def bigram_loss(corpus: Corpus) -> float:
    """The loss in nats per byte of a bigram model on the held-out files (with 1 added to every count)."""
    counts = torch.ones(END + 1, END + 1, dtype=torch.float64)
    for document in corpus.train:
        pairs = document[:-1] * (END + 1) + document[1:]
        counts.view(-1).index_add_(0, pairs, torch.ones(len(pairs), dtype=torch.float64))
    logs = (counts / counts.sum(1, keepdim=True)).log()
    total = sum(-logs[document[:-1], document[1:]].sum() for document in corpus.held_out)
    return float(total / sum(len(document) - 1 for document in corpus.held_out))


class Training:
    """A model, its optimiser and its stream of batches, which a checkpoint stores.

    >>> corpus = Corpus([_tokens(b"abab" * 30)] * 2, [_tokens(b"ab" * 40)])
    >>> small = Size(features=16, layers=2, heads=2, kv_heads=1, hidden=24, window=8, longest=64)
    >>> run = Training(small, Recipe(steps=3, tokens=64), corpus)
    >>> losses = [run.step() for _ in range(3)]
    >>> run.done, len(losses)
    (3, 3)
    """

    def __init__(self, size: Size, recipe: Recipe, corpus: Corpus) -> None:
        self.recipe, self.corpus, self.done = recipe, corpus, 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.model = ByteModel(size)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.rate, betas=(0.9, 0.98), weight_decay=0.05
        )
        self.batches = torch.Generator().manual_seed(recipe.seed)
        self.losses: list[float] = []

    def step(self) -> float:
        """The loss in nats per byte of one more step."""
        recipe = self.recipe
        for group in self.optimiser.param_groups:
            group["lr"] = recipe.rate * self._schedule()
        tokens, offsets = pack(self.corpus.train, self.model.size.longest, recipe.tokens, self.batches)
        loss = self.model.loss(tokens, offsets)
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.done += 1
        self.losses.append(float(loss.detach()))
        return self.losses[-1]

    def _schedule(self) -> float:
        """The factor of the learning rate: a linear warm-up, then half a cosine down to a tenth."""
        if self.done < self.recipe.warm_up:
            return (self.done + 1) / self.recipe.warm_up
        steps = max(self.recipe.steps - self.recipe.warm_up, 1)
        return 0.55 + 0.45 * math.cos(math.pi * min((self.done - self.recipe.warm_up) / steps, 1.0))

    @torch.no_grad()
    def held_out_loss(self, pieces: int = 8) -> float:
        """The loss in nats per byte on the held-out files, always on the same pieces."""
        generator = torch.Generator().manual_seed(1)
        total = 0.0
        for _ in range(pieces):
            tokens, offsets = pack(self.corpus.held_out, self.model.size.longest, self.recipe.tokens, generator)
            total += float(self.model.loss(tokens, offsets))
        return total / pieces

    def save(self, path: Path) -> None:
        """Write a checkpoint with everything on which the next step depends; the file is replaced atomically."""
        state: dict[str, Any] = {
            "size": asdict(self.model.size),
            "recipe": asdict(self.recipe),
            "done": self.done,
            "losses": self.losses,
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "batches": self.batches.get_state(),
        }
        fresh = path.with_name(path.name + ".new")
        torch.save(state, fresh)
        fresh.replace(path)

    @classmethod
    def load(cls, path: Path, corpus: Corpus) -> Training:
        """The training of a checkpoint, which continues bit for bit as if it had not been interrupted.

        Raises:
            InputError: the file is not a checkpoint of this training.
        """
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the pickles of other programs; the error below is enough
                state = torch.load(path, weights_only=True)
            run = cls(Size(**state["size"]), Recipe(**state["recipe"]), corpus)
            run.model.load_state_dict(state["model"])
            run.optimiser.load_state_dict(state["optimiser"])
            run.batches.set_state(state["batches"])
            run.done, run.losses = state["done"], state["losses"]
        except (OSError, RuntimeError, KeyError, TypeError, ValueError, EOFError) as error:
            raise InputError("--checkpoint", "be a checkpoint that this training wrote", f"{path} ({error})") from error
        except Exception as error:  # of the unpickler
            raise InputError("--checkpoint", "be a checkpoint that this training wrote", str(path)) from error
        return run


def train(run: Training, checkpoint: Path | None, every: int, on_step: Callable[[int, float], None]) -> None:
    """Run all remaining steps, and write a checkpoint every `every` steps and at the end."""
    while run.done < run.recipe.steps:
        loss = run.step()
        on_step(run.done, loss)
        if checkpoint is not None and (run.done % every == 0 or run.done == run.recipe.steps):
            run.save(checkpoint)
