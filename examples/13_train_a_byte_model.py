"""Train a small language model on packed documents, stop, continue from the checkpoint, and generate from its caches.

The model is built from TransformerLayer in `undivided.cli.byte_model`. Documents are files of Python's own
library, packed one after another: no padding, and no file attends to another. `undivided demo --train` runs 1000 steps
and draws the loss; this example runs twelve.

    python examples/13_train_a_byte_model.py
"""

import tempfile
from pathlib import Path

import torch

from undivided.cli.byte_model import Size, generate
from undivided.cli.byte_training import Corpus, Recipe, Training, bigram_loss

corpus = Corpus.of_library()
size = Size(features=64, layers=2, heads=4, kv_heads=2, hidden=128, window=32, longest=256)
print(f"{len(corpus.train)} files to train on, {len(corpus.held_out)} held out")
print(f"a bigram model: {bigram_loss(corpus):.3f} nats per byte on the held-out files")

run = Training(size, Recipe(steps=12, tokens=1024, warm_up=4), corpus)
for _ in range(6):
    run.step()
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "model.pt"
    run.save(file)
    resumed = Training.load(file, corpus)
for _ in range(6):
    run.step()
    resumed.step()
print("losses:", " ".join(f"{loss:.2f}" for loss in run.losses))

same = all(torch.equal(a, b) for a, b in zip(run.model.parameters(), resumed.model.parameters(), strict=True))
print("continued from the checkpoint, bitwise equal:", same)

# after twelve steps it has learned little more than which bytes are common
for text in generate(run.model, [b"def ", b"import "], 40, temperature=0.7, seed=0):
    print(repr(text.decode(errors="replace")))
