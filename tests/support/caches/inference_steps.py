"""Two layers that attend over `InferenceParams`, compared with one pass over all tokens, for its tests."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from token_lists import POISON, joined, parted
from torch import Tensor

import undivided
from undivided import InferenceParams, masks
from undivided.cache._ledger.pages import Pages

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 5


LAYERS = (1, 2)


def new_params(paged: bool, format: str = "bshd", **changes: Any) -> InferenceParams:
    """Room for 3 sequences of 20 tokens, filled with NaN; if paged, 11 pages of 4 tokens, too few for all at once."""
    pool = {"is_paged": True, "page_size": 4, "total_num_pages": 11} if paged else {}
    sizes: dict[str, Any] = {"dtype": torch.float32, "head_dim_v": VALUE_DIM, "qkv_format": format, "device": "cpu"}
    lengths = {"max_batch_size": 3, "max_sequence_length": 20}
    params = InferenceParams(num_heads_kv=KV_HEADS, head_dim_k=DIM, **lengths | pool | sizes | changes)
    for layer in LAYERS:
        params.allocate_memory(layer)
        for pool_of_layer in (params._storages[layer].k, params._storages[layer].v):
            pool_of_layer.fill_(POISON)
    return params


def new_tokens(count: int) -> list[Tensor]:
    """[q, k, v] of some tokens, [n, H, D]."""
    return [torch.randn(count, h, d) for h, d in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))]


def in_one_pass(tokens: list[Tensor], mask: masks.Mask | None = None) -> Tensor:
    q, k, v = (t[None] for t in tokens)
    return undivided.attention(
        q, k, v, layout="bshd", mask=masks.causal() if mask is None else mask, backend="reference"
    )[0]


class Model:
    """Two layers of attention, and all tokens of each sequence as plain tensors."""

    def __init__(self, params: InferenceParams, mask: masks.Mask | None = None) -> None:
        self.params, self.mask = params, mask
        self.seen: dict[object, list[list[Tensor]]] = {}

    def step(self, new: dict[object, int]) -> None:
        """One iteration, compared with one pass over all tokens."""
        self.params.pre_step(OrderedDict(new))
        for name in set(self.seen) - set(new):
            del self.seen[name]
        for layer in LAYERS:
            tokens = {name: new_tokens(count) for name, count in new.items()}
            q, k, v = (joined([t[n] for t in tokens.values()], self.params.qkv_format) for n in range(3))
            out = self.params.attend(layer, q, k, v, mask=self.mask)
            assert isinstance(out, Tensor)
            found = parted(out, self.params.qkv_format, list(new.values()))
            for (name, brought), got in zip(tokens.items(), found, strict=True):
                layers = self.seen.setdefault(name, [new_tokens(0) for _ in LAYERS])
                layers[layer - 1] = [torch.cat(pair) for pair in zip(layers[layer - 1], brought, strict=True)]
                want = in_one_pass(layers[layer - 1], self.mask)
                torch.testing.assert_close(got, want[len(want) - len(got) :])
        assert self.params.sequences == OrderedDict((n, len(self.seen[n][0][0])) for n in new)


def state(params: InferenceParams) -> tuple[object, ...]:
    """All that a refused call must not change, in values that `==` compares."""
    storages = [t.nan_to_num(1e9).tolist() for s in params._storages.values() for t in (s.k, s.v)]
    ledger = params._batch.ledger
    pages: tuple[object, ...] = ()
    if isinstance(ledger, Pages):
        pages = (list(ledger.unused[0]), list(ledger.references), [list(table) for table in ledger.tables])
    return params.sequences, params.batch_size, dict(params._batch.slots), ledger.lengths, pages, storages
