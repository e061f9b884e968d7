"""The table: one entry per error, by area."""

from __future__ import annotations

from undivided.diagnosis._entry import Entry
from undivided.diagnosis.entries import (
    cudnn_and_te,
    flash_attn,
    flex_and_nested,
    frameworks,
    ours,
    sdpa,
    sdpa_limits,
    symptoms,
)

AREAS: dict[str, tuple[Entry, ...]] = {
    "PyTorch's scaled_dot_product_attention": sdpa.ENTRIES,
    "What PyTorch's attention does not do": sdpa_limits.ENTRIES,
    "FlexAttention and nested tensors": flex_and_nested.ENTRIES,
    "flash-attn": flash_attn.ENTRIES,
    "cuDNN, TransformerEngine and context parallelism": cudnn_and_te.ENTRIES,
    "transformers and xFormers": frameworks.ENTRIES,
    "Wrong or slow without an error": symptoms.ENTRIES,
    "Undivided's own errors": ours.ENTRIES,
}
"""Entries by area, in the order of the page."""

TABLE: tuple[Entry, ...] = tuple(entry for entries in AREAS.values() for entry in entries)
"""All entries."""
