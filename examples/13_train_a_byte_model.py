"""Train a small language model on packed documents, stop, continue from the checkpoint, and generate from its caches.

The model is built from TransformerLayer: RMSNorm, SwiGLU, rotary positions, grouped heads, and a sliding window in
every second layer. Documents are files of Python's own library, packed one after another: no padding, and no file
attends to another. `undivided demo --train` runs 1000 steps of such a model and draws the loss; this example runs
twelve.

    python examples/13_train_a_byte_model.py
"""

import io
import sysconfig
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from undivided import InferenceParams, RotaryPositionEmbedding, TransformerLayer

END, WIDTH, HEADS, GROUPS, LAYERS, LONGEST = 256, 64, 4, 2, 2, 256  # tokens 0 to 255 are bytes


class ByteModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(END + 1, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.rotary = RotaryPositionEmbedding(WIDTH // HEADS)
        options = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "num_gqa_groups": GROUPS}
        options |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        options |= {"self_attn_mask_type": "padding_causal", "attn_input_format": "thd"}
        self.layers = nn.ModuleList(
            TransformerLayer(
                WIDTH, 2 * WIDTH, HEADS, layer_number=n + 1, window_size=None if n % 2 else (31, 0), **options
            )
            for n in range(LAYERS)
        )
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor, offsets: Tensor, caches: InferenceParams | None = None) -> Tensor:
        """The logits [t, 257] of the token after each of the packed tokens [t]."""
        x, angles = self.embedding(tokens), self.rotary(LONGEST)
        for layer in self.layers:
            x = layer(x, cu_seqlens_q=offsets, cu_seqlens_kv=offsets, rotary_pos_emb=angles, inference_params=caches)
        return functional.linear(self.norm(x), self.embedding.weight)


def batch(documents: list[bytes], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pieces of eight random documents, packed: tokens [t] and cu_seqlens."""
    pieces = []
    for n in torch.randint(len(documents), (8,), generator=generator).tolist():
        length = int(torch.randint(32, LONGEST - 1, (), generator=generator))
        start = int(torch.randint(max(len(documents[n]) - length, 1), (), generator=generator))
        pieces.append([END, *documents[n][start : start + length]])
    return torch.tensor([token for piece in pieces for token in piece]), torch.tensor([0, *map(len, pieces)]).cumsum(
        0, dtype=torch.int32
    )


def train(model: ByteModel, optimiser: torch.optim.Optimizer, generator: torch.Generator, steps: int) -> list[float]:
    """The losses in nats per byte; the first token of a document has no byte before it, so nothing predicts it."""
    losses = []
    for _ in range(steps):
        tokens, offsets = batch(documents, generator)
        predicted = torch.ones(len(tokens), dtype=torch.bool).index_fill(0, offsets[:-1].long(), False)[1:]
        loss = functional.cross_entropy(model(tokens, offsets)[:-1][predicted], tokens[1:][predicted])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


@torch.no_grad()
def generate(model: ByteModel, prompts: list[bytes], count: int) -> list[bytes]:
    """The prompts, each continued by `count` drawn bytes; all share one pool of pages for keys and values."""
    caches = InferenceParams(
        len(prompts), LONGEST, GROUPS, WIDTH // HEADS, torch.float32, is_paged=True, page_size=16, qkv_format="thd"
    )
    texts, new = [[*prompt] for prompt in prompts], [[END, *prompt] for prompt in prompts]
    for _ in range(count):
        caches.pre_step(OrderedDict((n, len(tokens)) for n, tokens in enumerate(new)))
        offsets = torch.tensor([0, *map(len, new)]).cumsum(0, dtype=torch.int32)
        last = model(torch.tensor([token for tokens in new for token in tokens]), offsets, caches)
        last = last[offsets[1:].long() - 1, :END]
        new = torch.multinomial((last / 0.7).softmax(-1), 1).tolist()
        for text, tokens in zip(texts, new, strict=True):
            text += tokens
    return [bytes(text) for text in texts]


files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
documents = [text for file in files if len(text := file.read_bytes()) > LONGEST]
print(f"{len(documents)} files to train on")

torch.manual_seed(0)
model, generator = ByteModel(), torch.Generator().manual_seed(0)
optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3)
losses = train(model, optimiser, generator, 6)

checkpoint = io.BytesIO()  # or a file: everything on which the next step depends
torch.save([model.state_dict(), optimiser.state_dict(), generator.get_state()], checkpoint)
losses += train(model, optimiser, generator, 6)
print("losses:", " ".join(f"{loss:.2f}" for loss in losses))

checkpoint.seek(0)
weights, state, drawn = torch.load(checkpoint)
resumed = ByteModel()
resumed.load_state_dict(weights)
optimiser = torch.optim.AdamW(resumed.parameters(), lr=4e-3)
optimiser.load_state_dict(state)
train(resumed, optimiser, torch.Generator().set_state(drawn), 6)
same = all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
print("continued from the checkpoint, bitwise equal:", same)
assert same

# after twelve steps it has learned little more than which bytes are common
for text in generate(model, [b"def ", b"import "], 40):
    print(repr(text.decode(errors="replace")))
