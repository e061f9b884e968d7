"""Caches: steps of any size equal one pass over the whole sequence, and a refused call has no effect."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from brute_force import error
from cache_steps import (
    DIM,
    HEADS,
    KINDS,
    KV_HEADS,
    LENGTHS,
    VALUE_DIM,
    Cache,
    Kind,
    in_one_pass,
    new_cache,
    new_sequences,
    step,
)
from token_lists import joined, parted
from torch import Tensor

import undivided
from undivided import InputError, KVCache, masks
from undivided.masks import Mask
from undivided.masks.normal_form import ranges

LAYOUTS = ("bshd", "sbhd", "bhsd", "thd")


OF_PAIRS = "keys-of-even-position"  # refused if packed, as raw indices are not positions there


ATTENTIONS = {
    "causal": Kind(None),
    "window-left3": Kind(masks.window(3, 0)),
    "window-of-one": Kind(masks.window(0, 0)),
    "chunks-of-4-causal": Kind(masks.chunks(4) & masks.causal()),
    "prefix-lm": Kind(masks.causal() | masks.prefix(2), first=2),
    "window-beside-2-global-keys": Kind(masks.window(2, 0) | masks.prefix(2), first=2),
    "window-beside-2-sinks": Kind(masks.window(2, 0) | masks.sinks(2)),
    "first-5-keys-alone": Kind(masks.causal() & masks.prefix(5)),
    "two-windows-with-global-keys": Kind(
        (masks.window(5, 0) | masks.prefix(2)) & (masks.window(2, 0) | masks.prefix(4)), first=4
    ),
    OF_PAIRS: Kind(masks.causal() & masks.predicate(lambda b, h, q, k: k % 2 == 0)),
    "alibi": Kind(None, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])}),
    "alibi-in-a-window": Kind(masks.window(4, 0), {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])}),
    "sinks": Kind(None, {"sinks": torch.tensor([0.0, 1.0, -1.0, 2.0])}),
    "softcap-and-scale": Kind(None, {"softcap": 1.5, "scale": 0.7}),
    "sinks-softcap-window": Kind(masks.window(3, 0), {"sinks": torch.ones(HEADS), "softcap": 2.0}),
}


@pytest.mark.parametrize(
    ("layout", "attention"),
    [(layout, name) for layout in LAYOUTS for name in ATTENTIONS if (layout, name) != ("thd", OF_PAIRS)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_different_lengths_equal_one_pass(kind: str, layout: str, attention: str) -> None:
    """Each sequence appends 0 to 4 tokens per step, and different sequences a different number."""
    how = ATTENTIONS[attention]
    chance = random.Random(f"{kind} {layout} {attention}")
    sequences, cache = new_sequences(), new_cache(kind, layout=layout)
    found: list[list[Tensor]] = [[] for _ in sequences]
    while any(at < len(s[0]) for at, s in zip(cache.lengths, sequences, strict=True)):
        least = 0 if any(cache.lengths) else how.first
        ends = [min(at + chance.randint(least, 4), len(s[0])) for at, s in zip(cache.lengths, sequences, strict=True)]
        tokens = [[t[at:end] for t in s] for s, at, end in zip(sequences, cache.lengths, ends, strict=True)]
        for seen, out in zip(found, step(cache, tokens, how), strict=True):
            seen.append(out)
    for seen, sequence in zip(found, sequences, strict=True):
        torch.testing.assert_close(torch.cat(seen), in_one_pass(sequence, how))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("size", [1, 3, 4, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_one_size_equal_one_pass(kind: str, size: int, attention: str) -> None:
    """Sequences of equal length, in chunks of 1, of 3, of a page, and all at once, without lengths."""
    how = ATTENTIONS[attention]
    sequences, cache = new_sequences((12, 12)), new_cache(kind, batch=2)
    bounds = [0, *range(max(size, how.first), 12, size), 12]
    found = []
    for start, stop in itertools.pairwise(bounds):
        q, k, v = (torch.stack([s[n][start:stop] for s in sequences]) for n in range(3))
        cache.append(k, v)
        found.append(cache.attend(q, how.mask, **how.options))
    for out, sequence in zip(torch.cat(found, 1), sequences, strict=True):
        torch.testing.assert_close(out, in_one_pass(sequence, how))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_other_dtypes(kind: str, dtype: torch.dtype) -> None:
    sequences, cache = new_sequences(dtype=dtype), new_cache(kind, dtype=dtype)
    found = [
        step(cache, [[t[start : start + 5] for t in s] for s in sequences], Kind(None)) for start in range(0, 13, 5)
    ]
    for outs, sequence in zip(zip(*found, strict=True), sequences, strict=True):
        check_within_budget(torch.cat(outs), sequence)


def check_within_budget(out: Tensor, sequence: list[Tensor]) -> None:
    """At most twice the error of one pass in the same dtype, plus one rounding, against one pass in float64."""
    want = in_one_pass([t.double() for t in sequence], Kind(None))
    plain = in_one_pass(sequence, Kind(None))
    assert error(out, want) <= 2 * error(plain, want) + torch.finfo(out.dtype).eps


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_per_pair_end_with_the_longest_sequence(kind: str) -> None:
    """Bias, dense masks and document ids have Sk = the longest length, even if pages have more room."""
    sequences, cache = new_sequences(), new_cache(kind)
    bias, dense, ids = (torch.randn(1, HEADS, 13, 13), torch.rand(13, 13) < 0.7, torch.tensor([[0] * 3 + [1] * 10]))
    per_key, one_column = torch.randn(1, 1, 1, 13), torch.randn(1, HEADS, 13, 1)

    def given(rows: slice, keys: int) -> list[tuple[Mask, Tensor | None]]:
        return [
            (masks.causal(), bias[:, :, rows, :keys]),
            (masks.causal() & masks.dense(dense[rows, :keys]), None),
            (masks.causal() & masks.document_ids(ids[:, rows], ids[:, :keys]), None),
            (masks.causal() & masks.dense(dense[rows, :1]), per_key[..., :keys]),
            (masks.causal(), one_column[:, :, rows]),
        ]

    for start, stop in ((0, 6), (6, 7), (7, 13)):
        tokens = [[t[start:stop] for t in s] for s in sequences]
        counts = [len(q) for q, _, _ in tokens]
        q, k, v = (joined([t[n] for t in tokens], "bshd") for n in range(3))
        cache.append(k, v, lengths=counts)
        for case, (mask, added) in enumerate(given(slice(start, start + q.shape[1]), max(cache.lengths))):
            for out, sequence in zip(parted(cache.attend(q, mask, bias=added), "bshd", counts), sequences, strict=True):
                length = len(sequence[0])
                of_all, bias_of_all = given(slice(0, length), length)[case]
                q1, k1, v1 = (t[None] for t in sequence)
                want = undivided.attention(
                    q1, k1, v1, layout="bshd", mask=of_all, bias=bias_of_all, backend="reference"
                )
                torch.testing.assert_close(out, want[0, start:stop])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_query_of_a_batch_element_can_have_slopes_of_its_own(kind: str, layout: str) -> None:
    slopes = torch.rand(3, HEADS)
    sequences, cache = new_sequences(), new_cache(kind, layout=layout)
    for start in range(0, 13, 4):
        outs = step(cache, [[t[start : start + 4] for t in s] for s in sequences], Kind(None, {"alibi_slopes": slopes}))
        for out, sequence, own in zip(outs, sequences, slopes, strict=True):
            want = in_one_pass(sequence, Kind(None, {"alibi_slopes": own}))
            torch.testing.assert_close(out, want[start : start + 4])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_log_sum_exp(kind: str, layout: str) -> None:
    """lse [B, H, Sq], packed [H, T]; -inf in rows that are not tokens."""
    sequences, cache = new_sequences(), new_cache(kind, layout=layout)
    q, k, v = (joined([s[n] for s in sequences], layout) for n in range(3))
    cache.append(k, v, lengths=LENGTHS)
    _, lse = cache.attend(q, return_lse=True)
    found = lse.split(LENGTHS, 1) if layout == "thd" else [row[:, :n] for row, n in zip(lse, LENGTHS, strict=True)]
    for got, sequence in zip(found, sequences, strict=True):
        q1, k1, v1 = (t[None] for t in sequence)
        _, want = undivided.attention(
            q1, k1, v1, layout="bshd", mask=masks.causal(), return_lse=True, backend="reference"
        )
        torch.testing.assert_close(got, want[0])
    assert layout == "thd" or bool((lse[1, :, LENGTHS[1] :] == -torch.inf).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_queries_of_another_sequence(kind: str, layout: str) -> None:
    """Cross-attention: the keys are cached once, and any number of queries sees all of them."""
    sequences, cache = new_sequences(), new_cache(kind, layout=layout)
    cache.append(*(joined([s[n] for s in sequences], layout) for n in (1, 2)), lengths=LENGTHS)
    everything = masks.window(None, None)
    for counts in ((2, 2, 2), (1, 1, 1), (20, 0, 3)):
        queries = [torch.randn(n, HEADS, DIM) for n in counts]
        out = cache.attend(joined(queries, layout), everything, q_lengths=torch.tensor(counts))
        for got, q, (_, k, v) in zip(parted(out, layout, counts), queries, sequences, strict=True):
            want = undivided.attention(q[None], k[None], v[None], layout="bshd", backend="reference")
            torch.testing.assert_close(got, want[0])


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_cache_gives_0(kind: str) -> None:
    cache = new_cache(kind)
    assert not cache.attend(torch.randn(3, 2, HEADS, DIM), masks.window(None, None)).any()
    assert not cache.attend(torch.randn(3, 2, HEADS, DIM), q_lengths=[0, 0, 0]).any()
    assert cache.lengths == (0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [None, masks.window(1, 0) | masks.sinks(1)], ids=["causal", "window"])
def test_more_queries_than_tokens_are_refused_under_a_causal_mask(kind: str, mask: Mask | None) -> None:
    """They stand before their sequence, and gave 0 without an error, also before the first `append`."""
    cache, q = new_cache(kind), torch.randn(3, 4, HEADS, DIM)
    with pytest.raises(
        InputError, match=r"q must have at most the 0 cached tokens of sequence 0, got 1\n  HINT: append"
    ):
        cache.attend(q[:, :1], mask)
    step(cache, new_sequences((4, 3, 4)), Kind(None))
    with pytest.raises(InputError, match="q must have at most the 3 cached tokens of sequence 1, got 4"):
        cache.attend(q, mask, [4, 4, 4])
    assert cache.attend(q, mask, [4, 3, 4])[:, :3].any(-1).all()
    assert cache.attend(q, masks.window(None, None), [4, 4, 4]).any(-1).all()  # cross-attention


def test_more_packed_queries_than_tokens_are_refused() -> None:
    cache = new_cache("contiguous", layout="thd")
    k, v = torch.randn(4, KV_HEADS, DIM), torch.randn(4, KV_HEADS, VALUE_DIM)
    cache.append(k, v, lengths=[2, 1, 1])
    with pytest.raises(InputError, match="q must have at most the 1 cached tokens of sequence 2, got 2"):
        cache.attend(torch.randn(4, HEADS, DIM), q_lengths=[1, 1, 2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_created_in_inference_mode_is_written_to_outside_and_vice_versa(kind: str) -> None:
    sequences = new_sequences()
    with torch.inference_mode():
        cache = new_cache(kind)
        step(cache, [[t[:5] for t in s] for s in sequences], Kind(None))
    step(cache, [[t[5:6] for t in s] for s in sequences], Kind(None))
    with torch.inference_mode():
        outs = step(cache, [[t[6:] for t in s] for s in sequences], Kind(None))
    for out, sequence in zip(outs, sequences, strict=True):
        torch.testing.assert_close(out, in_one_pass(sequence, Kind(None))[6:])


@pytest.mark.parametrize("inference", [False, True], ids=["no-grad", "inference-mode"])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_with_the_same_lengths_compute_the_mask_once(
    kind: str, layout: str, inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model has one cache per layer, and all layers share one mask of the lengths, also in inference mode."""
    built = []
    build = ranges.build
    monkeypatch.setattr(ranges, "build", lambda *arguments: built.append(1) or build(*arguments))
    for window in (None, masks.window(2, 0)):
        lengths = (5, 3, 2 + inference)  # other lengths than those of other tests
        sequences, caches = new_sequences(lengths), [new_cache(kind, layout=layout) for _ in range(4)]
        built.clear()
        with torch.inference_mode(inference):
            for cache in caches:
                step(cache, sequences, Kind(window))
        assert len(built) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_layer_is_not_compiled_again_for_every_length(kind: str) -> None:
    """The cache stays outside of the graphs; the rest is compiled twice: for a prompt and for a token."""
    graphs = []

    def compiler(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def layer(cache: Cache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append(k * 2, v * 2)
        return cache.attend(q) + 1

    torch.compiler.reset()
    compiled, sequences = torch.compile(layer, backend=compiler), new_sequences((14, 14))
    caches, made = (new_cache(kind, batch=2), new_cache(kind, batch=2)), []
    with torch.no_grad():
        for start, stop in [(0, 5), *((n, n + 1) for n in range(5, 14))]:
            tokens = [torch.stack([s[n][start:stop] for s in sequences]) for n in range(3)]
            torch.testing.assert_close(compiled(caches[0], *tokens), layer(caches[1], *tokens))
            made.append(len(graphs))
    assert made[-1] == made[2], made


def test_under_autocast_new_tokens_are_cast_to_the_cache() -> None:
    cache = new_cache("contiguous", dtype=torch.bfloat16)
    (sequence,) = new_sequences((4,), torch.bfloat16)
    q, k, v = (t.float().expand(3, *t.shape) for t in sequence)
    with torch.autocast("cpu", torch.bfloat16):
        cache.append(k, v.bfloat16())
        out = cache.attend(q)
    assert out.dtype == torch.bfloat16
    check_within_budget(out[1], sequence)


def test_lengths_are_on_the_host_and_on_the_device() -> None:
    cache = new_cache("paged")
    step(cache, new_sequences((2, 0, 5)), Kind(None))
    assert cache.lengths == (2, 0, 5)
    assert cache.lengths_tensor.dtype == torch.int32
    assert cache.lengths_tensor.tolist() == [2, 0, 5]
    assert "lengths=[2, 0, 5]" in repr(cache)
    assert "lengths=[0, 0, 0]" in repr(new_cache("contiguous"))


@pytest.mark.parametrize("mask", [masks.window(None, None), masks.FULL], ids=["window", "FULL"])
def test_a_mask_of_every_key_has_a_diagonal_for_alibi(mask: Mask) -> None:
    cache = undivided.KVCache(2, 16, 4, 16, dtype=torch.float32)
    slopes = torch.rand(4)
    q, k, v = torch.randn(3, 2, 6, 4, 16)
    cache.append(k, v)
    for token in (slice(5, 6), slice(3, 6)):
        out = cache.attend(q[:, token], mask, alibi_slopes=slopes)
        every = masks.window(None, None, align="bottom_right")
        want = undivided.attention(q[:, token], k, v, layout="bshd", mask=every, alibi_slopes=slopes)
        torch.testing.assert_close(out, want)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no Linux with huge pages")
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_large_pools_ask_for_huge_pages(quantize: Any) -> None:
    cache = KVCache(1, 32768, kv_heads=4, head_dim=64, dtype=torch.float32, quantize=quantize)
    advised = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, stop = (int(address, 16) for address in found.groups())
        elif line.startswith("VmFlags:"):
            advised |= start <= cache._storage.k.data_ptr() + (3 << 20) < stop and "hg" in line.split()
    assert advised
