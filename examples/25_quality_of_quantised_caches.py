"""What a quantised cache costs in quality: logits and perplexity of a small model that reads a text from its cache.

A byte model of two layers with head size 32 is trained for a few seconds on the Zen of Python, and then reads the text
in steps of 32 tokens, from a plain cache and from one of each format. The table of docs/learn/quantized-caches.md is
the output of this program. A larger model has more numbers to average over, and loses less: measure your own.

    python examples/25_quality_of_quantised_caches.py
"""

import codecs
import contextlib
import io
from collections import OrderedDict

import torch

from undivided import InferenceParams
from undivided.cli.demo.byte_model import END, ByteModel, Size
from undivided.quantization import FORMATS

with contextlib.redirect_stdout(io.StringIO()):
    import this  # the Zen of Python, in ROT13

SIZE = Size(features=64, layers=2, heads=2, kv_heads=1, hidden=128, window=128, longest=1024)
STEPS, PIECE = 100, 32  # of the training; tokens that are read at once

text = torch.tensor([END, *codecs.decode(this.s, "rot13").encode()])
torch.manual_seed(0)
model = ByteModel(SIZE)
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
whole = torch.tensor([0, len(text)], dtype=torch.int32)
for _ in range(STEPS):
    optimiser.zero_grad()
    model.loss(text, whole).backward()
    optimiser.step()


@torch.no_grad()
def read(quantize: str | None) -> torch.Tensor:
    """The logits [t, 257] after each token, from a cache that holds the tokens before it."""
    caches = InferenceParams(
        1, SIZE.longest, SIZE.kv_heads, SIZE.features // SIZE.heads, torch.float32, qkv_format="thd", quantize=quantize
    )
    scores = []
    for tokens in text.split(PIECE):
        caches.pre_step(OrderedDict({0: len(tokens)}))
        scores.append(model(tokens, torch.tensor([0, len(tokens)], dtype=torch.int32), caches))
    return torch.cat(scores)


plain = read(None)
print(f"{'':9}  logit error  same next token  perplexity")
for name in (None, *FORMATS):
    scores = read(name)
    error = float((scores - plain).norm() / plain.norm())
    same = float((scores.argmax(-1) == plain.argmax(-1)).float().mean())
    perplexity = float(torch.nn.functional.cross_entropy(scores[:-1], text[1:]).exp())
    print(f"{name or 'plain':9}  {error:11.2%}  {same:15.1%}  {perplexity:10.3f}")
