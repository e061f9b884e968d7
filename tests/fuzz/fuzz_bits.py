"""Whether `native` with batch_invariant gives the bits of a sequence alone, for fuzz_backends.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from fuzz_problems import Spec, arguments
from torch import Tensor

import undivided
from undivided import masks
from undivided.arguments import layout
from undivided.arguments.layout import Layout
from undivided.cli._mask_words import parse


def other_bits(spec: Spec) -> Iterator[str]:
    """Which results of `native` with batch_invariant have other bits if a sequence, or its last rows, are computed
    alone and with another number of threads."""
    if not {"bias", "dense", "dropout"}.isdisjoint(spec.options):  # those of a sequence would have to be cut out
        return
    given = arguments(spec)
    tensors = {name: _sequences(spec, given, name) for name in ("q", "k", "v")}
    same = {name: value for name, value in given.items() if name not in ("q", "k", "v", "pages", "mask", "layout")}
    band = (
        None if given["mask"] is None else parse(spec.mask) if spec.mask else masks.window(None, None, "bottom_right")
    )

    def computed(threads: int, **call: Any) -> tuple[Tensor, Tensor]:
        torch.set_num_threads(threads)
        out, lse = undivided.attention(**same, **call, backend="native", return_lse=True)
        return out, lse

    with _threads_kept():
        q, k, v = (given[name] for name in ("q", "k", "v"))
        pages = given.get("pages")
        out, lse = computed(spec.threads, q=q, k=k, v=v, pages=pages, mask=given["mask"], layout=spec.layout)
        outs = _sequences(spec, {"q": out}, "q")
        if spec.layout == "thd":
            lses = lse.split(spec.q_lens, -1)
        else:
            lses = [row[:, :n] for row, n in zip(lse, spec.q_lens, strict=True)]
        for n, (q, k, v) in enumerate(zip(*tensors.values(), strict=True)):
            some = () if "top_left" in spec.mask else (1, 3)
            for last in {len(q), *(min(len(q), n) for n in some)} if len(q) and len(k) else ():
                at = slice(len(q) - last, None)
                alone, alone_lse = computed(
                    int(spec.options["batch_invariant"]), q=q[None, at], k=k[None], v=v[None], mask=band, layout="bshd"
                )
                if not torch.equal(alone[0].nan_to_num(), outs[n][at].nan_to_num()):
                    yield f"native out: other bits in the last {last} rows of sequence {n} alone"
                if not torch.equal(alone_lse.flatten().nan_to_num(), lses[n][..., at].flatten().nan_to_num()):
                    yield f"native lse: other bits in the last {last} rows of sequence {n} alone"


@contextmanager
def _threads_kept() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _sequences(spec: Spec, given: dict[str, Any], name: str) -> list[Tensor]:
    """The rows of each sequence, [S, H, D]."""
    tensor, lens = given[name], spec.q_lens if name == "q" else spec.kv_lens
    if name != "q" and "pages" in given:
        return [tensor[pages.long()].flatten(0, 1)[:n] for pages, n in zip(given["pages"], lens, strict=True)]
    if spec.layout == "thd":
        return list(tensor.split(lens))
    rows = layout.canonical(tensor, cast(Layout, spec.layout))
    return [row[:n] for row, n in zip(rows, lens, strict=True)]
