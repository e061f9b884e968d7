"""Speculative decoding with a draft tree: the tokens of greedy decoding, in fewer steps of the model.

A cheap guess proposes several continuations as a tree. The model reads all nodes in one step: `masks.tree` shows each
node the cached text, its ancestors and itself, and its position is its depth. The longest path that greedy decoding
would have taken stays in the cache (`keep`), the rest is dropped. The model is a small byte-level Transformer, trained
here for some seconds on the Zen of Python; the guess looks up what followed the last letters earlier in the text.
"""

import codecs
import contextlib
import io
import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import undivided
from undivided import PagedKVCache, apply_rotary_pos_emb, masks

with contextlib.redirect_stdout(io.StringIO()):
    import this
TEXT = codecs.decode(this.s, "rot13").encode()
HEADS, KV_HEADS, SIZE, LAYERS = 4, 2, 32, 2
torch.manual_seed(0)
rotary = undivided.RotaryPositionEmbedding(SIZE)(2048)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, (HEADS + 2 * KV_HEADS) * SIZE), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, at: Tensor, cache: PagedKVCache | None, mask: masks.Mask) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, SIZE))
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        q, k = (apply_rotary_pos_emb(t, rotary[at], "bshd") for t in (q, k))
        if cache is None:
            out = undivided.attention(q, k, v, layout="bshd", mask=mask)
        else:
            cache.append(k, v)
            out = cache.attend(q, mask)
        x = x + self.out(out.flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, HEADS * SIZE)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HEADS * SIZE, 256)

    def forward(self, tokens: Tensor, at: Tensor, caches: list[PagedKVCache] | None, mask: masks.Mask) -> Tensor:
        x = self.embedding(tokens)
        for n, layer in enumerate(self.layers):
            x = layer(x, at, None if caches is None else caches[n], mask)
        return self.head(x)


def new_caches() -> list[PagedKVCache]:
    return [PagedKVCache(64, 16, KV_HEADS, SIZE, batch=1, dtype=torch.float32) for _ in range(LAYERS)]


def greedy(model: Model, prompt: bytes, count: int) -> tuple[bytes, int]:
    """The next tokens, one step of the model for each."""
    caches, new, text = new_caches(), list(prompt), bytearray(prompt)
    while len(text) < len(prompt) + count:
        at = torch.arange(len(text) - len(new), len(text))
        logits = model(torch.tensor([new]), at, caches, masks.causal("bottom_right"))
        new = [int(logits[0, -1].argmax())]
        text += bytes(new)
    return bytes(text), count


def guess(text: bytes, branches: int = 3, depth: int = 5) -> tuple[list[int], list[int]]:
    """A tree (tokens, parents) of what followed the last letters, where they occurred in the training text."""
    tokens, parents = [text[-1]], [-1]  # the root is the last token, which the model has not read yet
    for length in (6, 4, 2):
        ending, found = text[-length:], -1
        for _ in range(branches):
            found = TEXT.find(ending, found + 1)
            if found < 0:
                break
            node = 0
            for token in TEXT[found + length : found + length + depth]:
                known = [n for n, parent in enumerate(parents) if parent == node and tokens[n] == token]
                if not known:
                    tokens.append(token)
                    parents.append(node)
                node = known[0] if known else len(tokens) - 1
    return tokens, parents


def speculative(model: Model, prompt: bytes, count: int) -> tuple[bytes, int]:
    """The same tokens; each step of the model reads a tree."""
    caches, text, steps = new_caches(), bytearray(prompt), 0
    model(torch.tensor([list(prompt[:-1])]), torch.arange(len(prompt) - 1), caches, masks.causal("bottom_right"))
    while len(text) < len(prompt) + count:
        tokens, parents = guess(bytes(text))
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        at = len(text) - 1 + torch.tensor(depths)
        choices = model(torch.tensor([tokens]), at, caches, masks.tree(parents))[0].argmax(-1).tolist()
        path = [0]
        while True:
            text.append(choices[path[-1]])
            children = [n for n, parent in enumerate(parents) if parent == path[-1] and tokens[n] == text[-1]]
            if not children:
                break
            path.append(children[0])
        for cache in caches:
            cache.keep([path])
        steps += 1
    return bytes(text[: len(prompt) + count]), steps


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data, at = torch.tensor(list(TEXT)), torch.arange(128)
for _ in range(120):
    starts = torch.randint(len(TEXT) - 129, (4,))
    batch = torch.stack([data[start : start + 129] for start in starts])
    logits = model(batch[:, :-1], at, None, masks.causal())
    loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"trained: loss {loss.item():.2f}")

with torch.inference_mode():
    results = {}
    for decode in (greedy, speculative):
        start = time.perf_counter()
        results[decode.__name__], steps = decode(model, b"Although practicality beats purity.\n", 160)
        print(f"{decode.__name__:12} {steps:4} steps of the model, {time.perf_counter() - start:.2f} s")
assert results["greedy"] == results["speculative"]
print("The texts are equal:\n" + results["greedy"].decode(errors="replace"))
