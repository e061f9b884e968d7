"""The problem that a request poses to a backend, without its tensors: all that selection reads of a request.

Legend: B batch, S sequence (Sq queries, Sk keys), H query heads, N key/value heads, D head size (Dk, Dv).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from undivided import masks
from undivided.arguments.layout import Layout
from undivided.arguments.tensors import dtype_name
from undivided.masks import Structure
from undivided.quantization import Format


class Problem(NamedTuple):
    """The request without its tensors: validated when it is built, then never changed.

    device: "cpu", "cuda", ...: the device that it runs on.
    dtype: of q, k, v and the result; only of q and the result if k and v are quantised.
    layout: of q, k, v and the result.
    batch, heads, kv_heads, q_len, kv_len, qk_dim, v_dim: sizes; in thd q_len and kv_len are the totals of all
        documents.
    mask: the mask's structure; mask.kinds names its parts.
    align: "both" if top-left and bottom-right agree, "top_left", "bottom_right", or None if it does not matter.
    features: what the problem needs of a backend beyond plain attention; see `FEATURES`.
    bias: which axes of the bias are broadcast, as "bhqk" with 1 for a broadcast axis, e.g. "1h1k"; None without a bias.
    documents: (number, longest query, longest key length) of packed documents; lengths are None if only the device
        knows.
    page_size: of a paged key/value cache, or None.
    deterministic: the result must be bit-reproducible.
    batch_invariant: a row's result must depend on its own query, keys and values only.
    bias_dtype: dtype of the bias, which may differ from that of q; None without a bias.
    usual_slopes: the ALiBi slopes are known to be the usual ones (see `undivided.request.slopes`).
    quantized: the format of quantised k and v, or None.
    """

    device: str
    dtype: torch.dtype
    layout: Layout
    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    qk_dim: int
    v_dim: int
    mask: Structure
    align: str | None
    features: frozenset[str]
    bias: str | None = None
    documents: tuple[int, int | None, int | None] | None = None
    page_size: int | None = None
    deterministic: bool = False
    bias_dtype: torch.dtype | None = None
    usual_slopes: bool = False
    batch_invariant: bool = False
    quantized: Format | None = None

    @property
    def packed(self) -> bool:
        """Whether the sequences are packed documents (thd)."""
        return self.layout == "thd"

    @property
    def longest_lengths(self) -> tuple[int, int]:
        """The longest query and key length of any document; an upper bound if only the device knows the lengths."""
        _, q, kv = self.documents or (0, None, None)
        return min(q or self.q_len, self.q_len), min(kv or self.kv_len, self.kv_len)

    @property
    def lse_is_read(self) -> bool:
        """Whether a forward's log-sum-exp is returned, or needed for the gradients."""
        return "lse" in self.features or "backward" in self.features

    def __str__(self) -> str:
        batch, axes = ("", "TxHxD") if self.packed else (f"{self.batch}x", "BxSxHxD")
        q = f"q {batch}{self.q_len}x{self.heads}x{self.qk_dim}"
        kv = f"kv {batch}{self.kv_len}x{self.kv_heads}x{self.qk_dim}"
        if self.v_dim != self.qk_dim:
            kv += f"/{self.v_dim}"
        texts = [f"{q} ({axes}), {kv}", f"{dtype_name(self.dtype)} {self.layout} on {self.device}"]
        if self.quantized is not None:
            texts.append(f"keys and values in {self.quantized}")
        texts.append(f"mask {masks.describe(self.mask)}")
        if self.align in ("top_left", "bottom_right") and self.align != self.mask.align:  # of ALiBi without a mask
            texts.append(self.align.replace("_", "-"))
        needs = sorted(self.features) + ["batch_invariant"] * self.batch_invariant
        if needs:
            texts.append("needs " + ", ".join(needs))
        return "; ".join(texts)


FEATURES: dict[str, str] = {
    "backward": "gradients",
    "bias": "an additive bias",
    "bias_grad": "the gradient of the bias",
    "alibi": "ALiBi slopes",
    "alibi_grad": "the gradient of the ALiBi slopes",
    "softcap": "softcap",
    "sinks": "sinks",
    "sinks_grad": "the gradient of the sinks",
    "dropout": "dropout",
    "gqa": "fewer key/value heads than query heads",
    "value_dim": "a value head size other than the query's",
    "lse": "the log-sum-exp returned",
    "lse_grad": "the gradient through the log-sum-exp",
    "partial": "the gradient of a part of the keys, from the output and log-sum-exp of all keys",
    "some_heads": "dropout for heads that do not start at the first",
    "paged": "paged keys and values",
    "quantized": "quantised keys and values",
    "flipped": "a scale of 0 or below",
    "strided": "a last axis whose stride is not 1",
}
"""Description of every feature, by name."""
