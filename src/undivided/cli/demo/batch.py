"""Documents as a batch of queries, keys and values, packed and padded.

Legend: T tokens of all documents, B documents, S the longest one, H query heads, N key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from undivided import masks
from undivided.cli.demo.documents import Document

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
HIDDEN = 256
"""Size of the embedding of a byte."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """q [T, H, D], k and v [T, N, D], and the gradient of the output [T, H, D], for every arrangement."""

    lengths: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """S, the length of the padded batch."""
        return max(self.lengths)

    @property
    def offsets(self) -> Tensor:
        """cu_seqlens: the starts of the documents, and the end."""
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def packed_mask(self) -> masks.Mask:
        """The mask of the packed tokens: causal within each document."""
        return masks.documents(self.offsets) & masks.causal()

    def padded_mask(self) -> masks.Mask:
        """The mask of the padded batch, with the same pairs."""
        real = torch.tensor(self.lengths)
        return masks.lengths(real, real) & masks.causal()

    def arrange(self, packed: Tensor, layout: str, fill: float = 0.0) -> Tensor:
        """[T, X, D] in `layout`: a copy for "thd", otherwise padded with `fill`, contiguous."""
        if layout == "thd":
            return packed.clone()
        size = {"b": len(self.lengths), "s": self.longest, "h": packed.shape[1], "d": packed.shape[2]}
        padded = packed.new_full([size[axis] for axis in layout], fill)
        _as_bshd(padded, layout)[self._document(), self._position()] = packed
        return padded

    def pack(self, tensor: Tensor, layout: str) -> Tensor:
        """The real tokens of an arranged tensor, [T, X, D]."""
        if layout == "thd":
            return tensor
        return _as_bshd(tensor, layout)[self._document(), self._position()]

    def padding(self, tensor: Tensor, layout: str) -> Tensor:
        """The padding of an arranged tensor."""
        if layout == "thd":
            return tensor[:0]
        is_real = torch.arange(self.longest) < torch.tensor(self.lengths).unsqueeze(-1)
        return _as_bshd(tensor, layout)[~is_real]

    def _document(self) -> Tensor:
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))

    def _position(self) -> Tensor:
        return torch.cat([torch.arange(length) for length in self.lengths])


def _as_bshd(tensor: Tensor, layout: str) -> Tensor:
    return tensor.permute([layout.index(axis) for axis in "bshd"])


def embed(documents: Sequence[Document], dtype: torch.dtype, seed: int = 0) -> PackedBatch:
    """The documents after a seeded random embedding and projection, with entries of unit variance."""
    draw = torch.Generator().manual_seed(seed)
    text = torch.frombuffer(bytearray(b"".join(document.text for document in documents)), dtype=torch.uint8)
    hidden = torch.randn(256, HIDDEN, generator=draw)[text.long()]

    def project(heads: int) -> Tensor:
        weight = torch.randn(HIDDEN, heads * HEAD_DIM, generator=draw) / HIDDEN**0.5
        tensor: Tensor = (hidden @ weight).unflatten(-1, (heads, HEAD_DIM)).to(dtype)
        return tensor

    q, k, v = project(HEADS), project(KV_HEADS), project(KV_HEADS)
    grad = torch.randn(len(text), HEADS, HEAD_DIM, generator=draw).to(dtype)
    return PackedBatch(tuple(map(len, documents)), q, k, v, grad)
