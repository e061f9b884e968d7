"""`Case`: a problem to try, described without tensors.

`undivided.verification.inputs.build` makes the tensors.

Axes of a bias: b batch, h heads, q query rows, k keys, 1 broadcast; fewer letters are fewer dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from undivided.arguments.layout import Layout
from undivided.masks import Mask
from undivided.quantization import Format

__all__ = ["EVERY_DTYPE", "FULL_AND_HALF", "Case", "Memory"]

Memory = Literal["contiguous", "packed-qkv", "sliced", "strided-last", "shared-kv", "latent"]

FULL_AND_HALF = (torch.float32, torch.bfloat16)
EVERY_DTYPE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Case:
    """One problem to try.

    Attributes:
        name: what is special about the case.
        layout, batch, q_len, kv_len, heads, kv_heads, qk_dim, v_dim: sizes; in thd the batch is 1 and lengths are
            totals. kv_len, kv_heads and v_dim default to q_len, heads and qk_dim.
        mask: builds the mask; None is every pair.
        memory: how q, k and v are stored: "contiguous" in the layout; "packed-qkv" (views of one projection); "sliced"
            (every second row of a larger buffer, not aligned); "strided-last" (the stride of the last axis is not 1);
            "shared-kv" (one key/value row expanded over the batch, stride 0); "latent" (v is the first columns of k).
        bias: its axes, or None. bias_dtype: None is the dtype of q. bias_holes: a tenth of the entries is -inf, and one
            whole row.
        scale, softcap, dropout_p, dropout_seed: as for `attention`.
        alibi: "h", "bh", "usual" (the slopes of Press et al.) or None.
        sinks: whether there are sinks.
        return_lse: also return the lse, and send a gradient through it.
        quantized: the format of keys and values, or None; then nothing has a gradient.
        page_size: keys and values are page pools; kv_len is then max_pages * page_size (times the documents in thd).
        shared_pages: with page_size, the number of pages from the first one on that all sequences share.
        needs: the arguments that need a gradient; None is all that can have one.
        magnitude: the scale of q and k.
        dtypes: the dtypes in which the case is tried.
        tags: the groups of the case; see `by_tag`.

    >>> Case("four heads share one", heads=4, kv_heads=1, v_dim=8).sizes
    (2, 13, 13, 4, 1, 16, 8)
    """

    name: str
    layout: Layout = "bshd"
    batch: int = 2
    q_len: int = 13
    kv_len: int | None = None
    heads: int = 4
    kv_heads: int | None = None
    qk_dim: int = 16
    v_dim: int | None = None
    mask: Callable[[], Mask] | None = None
    memory: Memory = "contiguous"
    bias: str | None = None
    bias_dtype: torch.dtype | None = None
    bias_holes: bool = False
    scale: float | None = None
    softcap: float | None = None
    alibi: Literal["h", "bh", "usual"] | None = None
    sinks: bool = False
    dropout_p: float = 0.0
    dropout_seed: int = 1234
    return_lse: bool = False
    page_size: int | None = None
    shared_pages: int = 0
    quantized: Format | None = None
    needs: tuple[str, ...] | None = None
    magnitude: float = 1.0
    dtypes: tuple[torch.dtype, ...] = FULL_AND_HALF
    tags: frozenset[str] = frozenset()

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """(B, Sq, Sk, H, N, Dk, Dv)."""
        kv_len = self.q_len if self.kv_len is None else self.kv_len
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        v_dim = self.qk_dim if self.v_dim is None else self.v_dim
        return self.batch, self.q_len, kv_len, self.heads, kv_heads, self.qk_dim, v_dim

    def in_layout(self, layout: Layout) -> Case:
        """The same problem in another layout, contiguous in memory. (Packed documents fit any layout with batch 1.)"""
        return replace(self, layout=layout, memory="contiguous")

    def __str__(self) -> str:
        return self.name
