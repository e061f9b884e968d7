"""A small language model of bytes, built from `TransformerLayer`, which ``undivided demo --train`` trains.

It has RMSNorm, SwiGLU, rotary positions, fewer key/value heads than query heads, and a sliding window in every other
layer. Tokens are packed (thd). It is an example of a model that is built from the layers of this library.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from undivided.cache import InferenceParams
from undivided.nn import RotaryPositionEmbedding, TransformerLayer

END = 256
"""The token at the start and end of a document; 0 to 255 are bytes."""


@dataclass(frozen=True)
class Size:
    """The sizes of a model.

    Attributes:
        features, layers: size of the hidden state, number of layers.
        heads, kv_heads: number of query heads and of key/value heads.
        hidden: hidden features of the MLP.
        window: keys of the sliding window.
        longest: tokens of the longest document.
        dropout: probability with which training drops attention weights.

    >>> Size(heads=8).heads
    8
    """

    features: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 320
    window: int = 64
    longest: int = 1024
    dropout: float = 0.0


class ByteModel(nn.Module):
    """The logits of the next byte, for packed documents.

    >>> model = ByteModel(Size(features=32, layers=2, heads=2, kv_heads=1, hidden=48))
    >>> model(torch.tensor([END, 104, 105, END, 72]), torch.tensor([0, 3, 5], dtype=torch.int32)).shape
    torch.Size([5, 257])
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(END + 1, size.features)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.rotary = RotaryPositionEmbedding(size.features // size.heads)
        self.layers = nn.ModuleList(
            TransformerLayer(
                size.features,
                size.hidden,
                size.heads,
                num_gqa_groups=size.kv_heads,
                layer_number=number,
                hidden_dropout=0.0,
                attention_dropout=size.dropout,
                normalization="RMSNorm",
                activation="swiglu",
                bias=False,
                self_attn_mask_type="padding_causal",
                attn_input_format="thd",
                window_size=(size.window - 1, 0) if number % 2 else None,
            )
            for number in range(1, size.layers + 1)
        )
        self.norm = nn.RMSNorm(size.features)

    def forward(self, tokens: Tensor, cu_seqlens: Tensor, inference_params: InferenceParams | None = None) -> Tensor:
        """The logits [t, 257] of the token after each token.

        Args:
            tokens: int64 [t], of all documents, packed.
            cu_seqlens: int32 [documents + 1], the starts of the documents, and the end.
            inference_params: the caches to continue from during generation.
        """
        x = self.embedding(tokens)
        angles = self.rotary(self.size.longest)
        longest = int(cu_seqlens.diff().max()) if inference_params is None else None  # a cache counts its own keys
        for layer in self.layers:
            x = layer(
                x,
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
                rotary_pos_emb=angles,
                inference_params=inference_params,
            )
        return functional.linear(self.norm(x), self.embedding.weight)

    def loss(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """The mean loss in nats per byte, over all tokens but the first of each document."""
        scores = self(tokens, cu_seqlens)
        first = torch.zeros_like(tokens, dtype=torch.bool).index_fill_(0, cu_seqlens[:-1].long(), True)
        follows = ~first[1:]
        return functional.cross_entropy(scores[:-1][follows], tokens[1:][follows])


@torch.no_grad()
def generate(model: ByteModel, prompts: Sequence[bytes], count: int, temperature: float, seed: int) -> list[bytes]:
    """The prompts, each continued by up to `count` bytes; all share one pool of pages for keys and values.

    A document that ends leaves the batch, and its pages become free for the others.

    Args:
        model: the model.
        prompts: the starts of the documents.
        count: largest number of new bytes.
        temperature: divisor of the logits.
        seed: of the sampling.
    """
    size, generator = model.size, torch.Generator().manual_seed(seed)
    caches = InferenceParams(
        len(prompts),
        size.longest,
        size.kv_heads,
        size.features // size.heads,
        torch.float32,
        is_paged=True,
        page_size=16,
        qkv_format="thd",
    )
    texts = {n: bytearray(prompt) for n, prompt in enumerate(prompts)}
    new = OrderedDict((n, [END, *prompt]) for n, prompt in enumerate(prompts))
    for _ in range(count):
        caches.pre_step(OrderedDict((n, len(tokens)) for n, tokens in new.items()))
        offsets = torch.tensor([0, *(len(tokens) for tokens in new.values())], dtype=torch.int32).cumsum(0).int()
        scores = model(torch.tensor([token for tokens in new.values() for token in tokens]), offsets, caches)
        last = scores[offsets[1:].long() - 1] / temperature
        drawn = torch.multinomial(last.softmax(-1), 1, generator=generator).flatten().tolist()
        new = OrderedDict((n, [token]) for n, token in zip(new, drawn, strict=True) if token != END)
        for n, tokens in new.items():
            texts[n].append(tokens[0])
        if not new:
            break
    return [bytes(text) for text in texts.values()]
