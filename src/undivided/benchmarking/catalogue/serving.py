"""The suite "serving": batches as an engine packs them; sequences decode, prefill, or verify drafts.

A feature is timed against the same batch without it: a quantised cache, a shared prefix, a tree of drafts, chosen
pages, batch-invariant results. The others are timed against other implementations.

A line of the suite is one entry of `STEPS`; a feature of the library that is measured here adds an entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch

from undivided import masks
from undivided.benchmarking.catalogue.benchmark import BFLOAT, FLOAT, Benchmark, Goal
from undivided.masks import Mask
from undivided.verification.cases import Case

PAGE = 128
"""Tokens per page."""


@dataclass(frozen=True)
class EngineStep:
    """One step of an engine: the new tokens and the cached tokens, new ones included, of each sequence.

    Attributes:
        new, cached: tokens per sequence.
        page_size: None if the keys are packed as the queries are.
        quick: whether ``--quick`` runs it.
        tree: the parent of each new token, for a tree of drafts in each sequence; None if they follow one another.
        chosen: the pages of each sequence that its queries see; None if all.
        batch_invariant: the results must not depend on the batch.
        within: largest ratio to the time without quantisation, shared pages, tree, chosen pages and batch invariance;
            None if there is no such feature. The best other is a goal if there is none, or only a tree.
        reads: fraction of the read rate that reading the keys must reach; None if the arithmetic is the limit.
        options: fields of the `Case`.
    """

    new: tuple[int, ...]
    cached: tuple[int, ...]
    page_size: int | None = PAGE
    quick: bool = False
    tree: tuple[int, ...] | None = None
    chosen: tuple[int, ...] | None = None
    batch_invariant: bool = False
    within: float | None = None
    reads: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def mask(self) -> Mask:
        """Causal within each sequence, or its tree; the new tokens are its last ones."""
        new, cached = ([0, *accumulate(counts)] for counts in (self.new, self.cached))
        within_sequence = masks.causal("bottom_right")
        if self.tree is not None:
            within_sequence = masks.tree([parent for count in self.new for parent in self.tree[:count]])
        if self.chosen is not None:
            within_sequence = within_sequence & masks.pages([list(self.chosen)] * len(self.new), self.page_size or PAGE)
        return masks.documents(new, cached) & within_sequence

    def benchmark(self, name: str, dtype: torch.dtype) -> Benchmark:
        """The problem with its goal, and the same problem without the features that `within` is about."""
        case, plain = self.case(name), replace(self, tree=None, chosen=None).case(name)
        beside_others = self.within is None or self.tree is not None
        goal = Goal(best=1.05 if beside_others else None, within=self.within, fraction=self.reads)
        return Benchmark(
            "serving",
            case,
            dtype,
            without=None if self.within is None else replace(plain, quantized=None, shared_pages=0),
            goal=goal,
            reads=self.reads is not None,
            quick=self.quick and dtype == BFLOAT,
            batch_invariant=self.batch_invariant,
        )

    def case(self, name: str) -> Case:
        """The problem: 32 heads on 8 of size 128 if `options` do not change them, packed."""
        width = None if self.page_size is None else -(-max(self.cached) // self.page_size) * self.page_size
        keys = sum(self.cached) if width is None else width * len(self.cached)
        sizes: dict[str, Any] = {"q_len": sum(self.new), "kv_len": keys, "heads": 32, "kv_heads": 8, "qk_dim": 128}
        packed: dict[str, Any] = {"layout": "thd", "batch": 1, "mask": self.mask, "page_size": self.page_size}
        return Case(name, needs=(), **{**sizes, **packed, **self.options})


def _decode(**fields: Any) -> EngineStep:
    """16 sequences decode over 3072 keys."""
    return EngineStep((1,) * 16, (3072,) * 16, **fields)


_TREE = (-1, 0, 0, 1, 1, 2, 2, 3)
_LATENTS = {"heads": 16, "kv_heads": 1, "qk_dim": 576, "v_dim": 512, "memory": "latent"}
"""DeepSeek V2 Lite's."""
STEPS: Mapping[str, EngineStep] = MappingProxyType(
    {
        "decode-16x3k": _decode(quick=True),
        "decode-16-mixed": EngineStep((1,) * 16, tuple(range(256, 256 * 17, 256))),
        "decode-32x128": EngineStep((1,) * 32, (128,) * 32),
        "decode-64x1-64": EngineStep((1,) * 64, tuple(range(1, 65)), page_size=16),
        "drafts-4-64x20-146": EngineStep((4,) * 64, tuple(range(20, 148, 2)), page_size=16),
        "prompts-64x1-64": EngineStep(tuple(range(1, 65)), tuple(range(1, 65)), page_size=16),
        "mixed-4x256-after-2k-16-decode": EngineStep((256,) * 4 + (1,) * 16, (2304,) * 4 + (3072,) * 16),
        "mixed-512-after-0-31-decode": EngineStep((512,) + (1,) * 31, (512,) + (1024,) * 31),
        "drafts-2-8x4k": EngineStep((2,) * 8, (4096,) * 8),
        "drafts-4-8x4k": EngineStep((4,) * 8, (4096,) * 8),
        "drafts-8-8x4k": EngineStep((8,) * 8, (4096,) * 8),
        "prefill-8x512": EngineStep((512,) * 8, (512,) * 8, page_size=None),
        "tree-8-8x4k": EngineStep((8,) * 8, (4096,) * 8, tree=_TREE, within=1.05),
        "chosen-6-of-24-pages-16x3k": _decode(within=0.3, chosen=(0, 5, 10, 15, 22, 23)),
        "latents-4x2k": EngineStep((1,) * 4, (2048,) * 4, options=_LATENTS, reads=1 / 1.15),
        "latents-64-after-1k-3-decode": EngineStep((64,) + (1,) * 3, (1088,) + (2048,) * 3, options=_LATENTS),
        "int8-16x3k": _decode(within=0.6, options={"quantized": "int8"}),
        "fp8_e4m3-16x3k": _decode(within=0.6, options={"quantized": "fp8_e4m3"}),
        "fp8_e5m2-16x3k": _decode(within=0.6, options={"quantized": "fp8_e5m2"}),
        "int4-16x3k": _decode(within=0.4, options={"quantized": "int4"}),
        "shared-2k-of-32x2.25k": EngineStep(
            (1,) * 32, (2304,) * 32, within=0.25, options={"shared_pages": 2048 // PAGE}
        ),
        "batch-invariant-16x3k": _decode(within=1.25, batch_invariant=True),
        "batch-invariant-4x256-after-2k-16-decode": EngineStep(
            (256,) * 4 + (1,) * 16, (2304,) * 4 + (3072,) * 16, within=1.25, batch_invariant=True
        ),
    }
)


def serving() -> Iterator[Benchmark]:
    """Packed batches of sequences in different phases; those with a feature of `EngineStep` are timed in bf16 alone."""
    for dtype in (FLOAT, BFLOAT):
        for name, step in STEPS.items():
            if dtype == BFLOAT or step.tree or (step.within is None and not step.options):
                yield step.benchmark(name, dtype)
