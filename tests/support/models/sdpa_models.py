"""Models that call PyTorch's scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PYTORCHS = F.scaled_dot_product_attention


class Attention(nn.Module):
    """The attention of a usual language model, with grouped heads and rotary positions."""

    def __init__(self, size: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, size // heads
        self.qkv = nn.Linear(size, (heads + 2 * kv_heads) * self.head_size)
        self.project = nn.Linear(size, size)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).split([n * self.head_size for n in (self.heads, self.kv_heads, self.kv_heads)], -1)
        q, k, v = (t.view(b, s, -1, self.head_size).transpose(1, 2) for t in (q, k, v))
        q, k = self.rotate(q), self.rotate(k)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=0.0, enable_gqa=self.heads != self.kv_heads
        )
        projected: Tensor = self.project(out.transpose(1, 2).reshape(b, s, -1))
        return projected

    def rotate(self, x: Tensor) -> Tensor:
        half = self.head_size // 2
        angle = torch.arange(x.shape[2])[:, None] * 100 ** (-torch.arange(half) / half)
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.attend = nn.ModuleList(Attention(32, 4, 2) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        for attend, norm in zip(self.attend, self.norms, strict=True):
            x = x + attend(norm(x), mask)
        logits: Tensor = self.head(x)
        return logits


def results(module: nn.Module, *args: Any, **options: Any) -> list[Tensor]:
    """The output and the gradients of every parameter."""
    out = module(*args, **options)
    out = out[0] if isinstance(out, tuple) else out
    gradients = torch.autograd.grad(out.square().sum(), list(module.parameters()), allow_unused=True)
    return [out, *(g for g in gradients if g is not None)]


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def q(grad: bool = False) -> Tensor:
    return torch.randn(1, 2, 5, 8, requires_grad=grad)
