"""The suite "serving": batches as an engine packs them; sequences decode, prefill, or verify drafts.

A line of the suite is one entry of `STEPS`; a feature of the library that is measured here adds an entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from undivided import masks
from undivided.benchmarking.catalogue.benchmark import BFLOAT, FLOAT, Benchmark, Goal
from undivided.masks import Mask
from undivided.verification.cases import Case

PAGE = 128
"""Tokens per page."""


@dataclass(frozen=True)
class Step:
    """One step of an engine: the new tokens and the cached tokens, new ones included, of each sequence.

    Attributes:
        new, cached: tokens per sequence.
        page_size: None if the keys are packed as the queries are.
        quick: whether ``--quick`` runs it.
        options: fields of the `Case`.
    """

    new: tuple[int, ...]
    cached: tuple[int, ...]
    page_size: int | None = PAGE
    quick: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def mask(self) -> Mask:
        """Causal within each sequence; the new tokens are its last ones."""
        new, cached = ([0, *accumulate(counts)] for counts in (self.new, self.cached))
        return masks.documents(new, cached) & masks.causal("bottom_right")

    def case(self, name: str) -> Case:
        """The problem: 32 heads on 8 of size 128, packed."""
        width = None if self.page_size is None else -(-max(self.cached) // self.page_size) * self.page_size
        keys = sum(self.cached) if width is None else width * len(self.cached)
        return Case(
            name,
            layout="thd",
            batch=1,
            q_len=sum(self.new),
            kv_len=keys,
            heads=32,
            kv_heads=8,
            qk_dim=128,
            mask=self.mask,
            page_size=self.page_size,
            needs=(),
            **self.options,
        )


STEPS: Mapping[str, Step] = MappingProxyType(
    {
        "decode-16x3k": Step((1,) * 16, (3072,) * 16, quick=True),
        "decode-16-mixed": Step((1,) * 16, tuple(range(256, 256 * 17, 256))),
        "decode-32x128": Step((1,) * 32, (128,) * 32),
        "mixed-4x256-after-2k-16-decode": Step((256,) * 4 + (1,) * 16, (2304,) * 4 + (3072,) * 16),
        "mixed-512-after-0-31-decode": Step((512,) + (1,) * 31, (512,) + (1024,) * 31),
        "drafts-2-8x4k": Step((2,) * 8, (4096,) * 8),
        "drafts-4-8x4k": Step((4,) * 8, (4096,) * 8),
        "drafts-8-8x4k": Step((8,) * 8, (4096,) * 8),
        "prefill-8x512": Step((512,) * 8, (512,) * 8, page_size=None),
    }
)


def serving() -> Iterator[Benchmark]:
    """Packed batches of sequences in different phases. Goal: at most 1.05 of the best other, separate calls too."""
    for dtype in (FLOAT, BFLOAT):
        for name, step in STEPS.items():
            yield Benchmark(
                "serving", step.case(name), dtype, goal=Goal(best=1.05), quick=step.quick and dtype == BFLOAT
            )
