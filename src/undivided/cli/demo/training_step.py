"""One training step of a small next-byte model on the same documents, packed and padded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from undivided.cli.demo.batch import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, PackedBatch
from undivided.cli.demo.documents import Document
from undivided.nn import DotProductAttention
from undivided.verification.budget import relative_error

FORMATS = ("thd", "sbhd", "bshd")
LEARNING_RATE = 0.1
AGREEMENT = 1e-5
"""Largest relative difference of a gradient between formats: fp32 sums of some ten thousand terms in other orders."""

_IGNORED = -100


class NextByteModel(nn.Module):
    """A model of the next byte: embedding, attention, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.attention = DotProductAttention(HEADS, HEAD_DIM, KV_HEADS, attn_mask_type="padding_causal")
        self.output = nn.Linear(HEADS * HEAD_DIM, 256)

    def forward(self, text: Tensor, qkv_format: str, cu_seqlens: Tensor) -> Tensor:
        """The logits of the byte that follows each byte; text is [T], [S, B] or [B, S]."""
        heads = self.qkv(self.embedding(text)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=-2)
        mixed = self.attention(q, k, v, qkv_format=qkv_format, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
        logits: Tensor = self.output(mixed)
        return logits


def training_steps(
    batch: PackedBatch, documents: list[Document], step: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """The same step in each format: its loss before and after, and how far its gradients differ from those of thd."""
    text = torch.frombuffer(bytearray(b"".join(document.text for document in documents)), dtype=torch.uint8).long()
    following = torch.cat([text[1:], text[:1]])
    following[batch.offsets[1:] - 1] = _IGNORED  # nothing follows the last byte of a document
    cu_seqlens = batch.offsets.int()
    rows: list[dict[str, Any]] = []
    first: list[Tensor] = []
    for qkv_format in FORMATS:
        step(f"training step: {qkv_format}")
        inputs = _arrange(text, batch, qkv_format, 0)
        targets = _arrange(following, batch, qkv_format, _IGNORED)
        loss, loss_after, gradients = _step(inputs, targets, qkv_format, cu_seqlens)
        first = first or gradients
        difference = max(relative_error(a, b) for a, b in zip(gradients, first, strict=True))
        rows.append(
            {
                "format": qkv_format,
                "loss": loss,
                "loss_after": loss_after,
                "gradient_difference": difference,
                "ok": difference <= AGREEMENT and abs(loss - (rows[0]["loss"] if rows else loss)) <= AGREEMENT * loss,
            }
        )
    return rows


def _arrange(tokens: Tensor, batch: PackedBatch, qkv_format: str, fill: int) -> Tensor:
    """Tokens [T] as [T], [S, B] or [B, S]."""
    if qkv_format == "thd":
        return tokens
    padded = batch.arrange(tokens[:, None, None], qkv_format, fill)
    return padded.flatten(1)  # the head and the head size are 1


def _step(text: Tensor, following: Tensor, qkv_format: str, cu_seqlens: Tensor) -> tuple[float, float, list[Tensor]]:
    """(loss, loss after one step of gradient descent, gradients) of a model with fixed initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = NextByteModel()

    def loss() -> Tensor:
        logits = model(text, qkv_format, cu_seqlens)
        return nn.functional.cross_entropy(logits.flatten(0, -2), following.flatten(), ignore_index=_IGNORED)

    before = loss()
    before.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()
    with torch.no_grad():
        after = loss()
    return before.item(), after.item(), gradients
