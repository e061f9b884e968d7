"""batch_invariant=True: a row's result has the same bits however its sequence is batched, packed, cut or stored."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import levels
import pytest
import torch
from invariance import DECODING_WAYS, MASKS, Sequences
from invariance import WAYS as FEW_WAYS
from native_oracle import needs_library
from torch import Tensor

import undivided
from undivided import InputError, NoBackendError, masks
from undivided.masks import Mask

pytestmark = needs_library

WAYS = {**FEW_WAYS, **DECODING_WAYS}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(4, 2, 64, 64), (8, 1, 128, 128), (3, 3, 40, 24), (6, 2, 33, 80), (6, 2, 288, 96)]


def _problems() -> Iterator[Any]:
    """Every way with every mask, dtype and size; the way changes fastest, so that all ways share the sequences. One
    token at a time is as slow as all other ways together: a quarter of its problems, with every size and every mask in
    every dtype, stands for the others where slow tests are left out."""
    for (i, sizes), (j, dtype), (n, mask) in itertools.product(enumerate(SIZES), enumerate(DTYPES), enumerate(MASKS)):
        for way in WAYS:
            marks = [pytest.mark.slow] * (way == "token by token" and (i + j + n) % len(MASKS) != 0)
            yield pytest.param(way, mask, dtype, sizes, id=f"{sizes}-{dtype}-{mask}-{way}", marks=marks)


@functools.lru_cache(maxsize=1)
def _sequences(mask: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]) -> Sequences:
    return Sequences(MASKS[mask], dtype, sizes)


@pytest.mark.parametrize(("way", "mask", "dtype", "sizes"), list(_problems()))
def test_the_bits_are_those_of_each_sequence_alone(
    way: str, mask: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    s = _sequences(mask, dtype, sizes)
    torch.manual_seed(0)
    s.check(WAYS[way](s))


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.linspace(-1, 1, 8)},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 0.5, 8)},
    "scale": {"scale": 0.02},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("option", OPTIONS)
def test_the_bits_are_the_same_with_every_option(way: str, option: str) -> None:
    s = Sequences(MASKS["window and sinks"], torch.bfloat16, (8, 2, 64, 64), **OPTIONS[option])
    s.check(WAYS[way](s))


@pytest.mark.parametrize(
    ("threads", "way"),
    [
        pytest.param(threads, way, marks=[pytest.mark.slow] * (way == "token by token" and threads < 3))
        for threads in (1, 2, 3)
        for way in WAYS
    ],
)
@pytest.mark.parametrize("level", levels.parameters())
def test_the_bits_are_the_same_on_every_level_and_number_of_threads(level: str, threads: int, way: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with levels.running(level, 1):
            s = Sequences(MASKS["window"], dtype, (8, 2, 64, 64))
        with levels.running(level, threads):
            s.check(WAYS[way](s))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": torch.linspace(-1, 1, 8)}], ids=str)
def test_a_decoded_row_has_the_log_sum_exp_of_its_row_in_a_prefill(dtype: torch.dtype, options: dict[str, Any]) -> None:
    q, k, v = torch.randn(1, 300, 8, 64).to(dtype), *(torch.randn(1, 300, 2, 64).to(dtype) for _ in range(2))
    k[0, 7, 1], v[0, 9, 0] = torch.inf, torch.nan
    options = {"layout": "bshd", "batch_invariant": True, "return_lse": True, "backend": "native", **options}
    out, lse = undivided.attention(q, k, v, mask=masks.causal(), **options)
    for i in (9, 30, 127, 128, 299):
        one, one_lse = undivided.attention(q[:, i : i + 1], k[:, : i + 1], v[:, : i + 1], **options)
        assert torch.equal(one[0, 0].nan_to_num(7.0), out[0, i].nan_to_num(7.0))
        assert torch.equal(one_lse[0, :, 0].nan_to_num(7.0), lse[0, :, i].nan_to_num(7.0))


def gradients(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Mask | None) -> list[Tensor]:
    """dq, dk and dv."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = undivided.attention(*leaves, layout="bshd", mask=mask, batch_invariant=True)
    return list(torch.autograd.grad(out, leaves, grad))


@pytest.mark.parametrize(
    "mask", [None, masks.causal(), masks.window(20, 0) | masks.sinks(3), masks.causal() & masks.chunks(30)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(3, 600, 2, 64), (3, 70, 4, 64), (5, 8, 3, 40)], ids=str)
def test_gradients_depend_neither_on_the_batch_nor_on_the_threads(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, mask: Mask | None
) -> None:
    """Few heads of 600 tokens were cut into more parts, until a batch had enough of them: their sums differed."""
    batch, tokens, heads, dim = sizes
    given = [torch.randn(batch, tokens, heads, dim).to(dtype) for _ in range(4)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = gradients(*given, mask)
        for threads in (1, 3):
            torch.set_num_threads(threads)
            alone = [gradients(*(t[b : b + 1] for t in given), mask) for b in range(batch)]
            for whole, parts in zip(together, zip(*alone, strict=True), strict=True):
                assert torch.equal(whole, torch.cat(parts))
    finally:
        torch.set_num_threads(before)


def test_the_result_is_right() -> None:
    q, k, v = torch.randn(2, 150, 4, 64), torch.randn(2, 150, 2, 64), torch.randn(2, 150, 2, 64)
    report = undivided.verify(
        q, k, v, layout="bshd", mask=masks.window(30, 0) | masks.sinks(3), batch_invariant=True, backends=["native"]
    )
    assert report.ok
    assert report.backends == ("native",)


def test_each_setting_chooses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 8, 2, 16)

    def chosen(**options: Any) -> bool:
        return undivided.explain(q, q, q, layout="bshd", **options).problem.batch_invariant

    assert not chosen()
    assert chosen(batch_invariant=True)
    monkeypatch.setenv("UNDIVIDED_BATCH_INVARIANT", "1")
    assert chosen()
    assert not chosen(batch_invariant=False)
    undivided.set_backends(batch_invariant=False)
    try:
        assert not chosen()
        undivided.set_backends(batch_invariant=True)
        monkeypatch.delenv("UNDIVIDED_BATCH_INVARIANT")
        assert chosen()
        with undivided.use_backends("native"):
            assert chosen()
    finally:
        undivided.set_backends()


def test_backends_that_cannot_promise_it_say_so() -> None:
    q = torch.randn(1, 8, 2, 16)
    reasons = undivided.explain(q, q, q, layout="bshd", batch_invariant=True).reasons
    assert all("batch-invariant" in " ".join(reasons[name]) for name in ("reference", "torch_flash", "flex"))
    with pytest.raises(NoBackendError, match="batch-invariant results"):
        undivided.attention(q, q, q, layout="bshd", batch_invariant=True, backend="reference")
    with pytest.raises(NoBackendError, match="document ids"):
        undivided.attention(
            q, q, q, layout="bshd", batch_invariant=True, mask=masks.document_ids(torch.zeros(1, 8, dtype=torch.int32))
        )


def test_bad_values_are_refused() -> None:
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(InputError, match="batch_invariant must be True, False or None, got 1"):
        undivided.attention(q, q, q, layout="bshd", batch_invariant=1)  # type: ignore[call-overload]
    with pytest.raises(InputError, match="batch_invariant must be"):
        undivided.set_backends(batch_invariant="yes")  # type: ignore[arg-type]
    pool, table = torch.randn(4, 4, 2, 16), torch.arange(4, dtype=torch.int32)[None]
    starts = masks.lengths([9], kv_start=[3])
    with pytest.raises(InputError, match="start each sequence at a page"):
        undivided.attention(q, pool, pool, layout="bshd", pages=table, mask=starts, batch_invariant=True)


def test_a_compiled_call_has_the_same_bits() -> None:
    q = torch.randn(3, 5, 2, 16)
    call = torch.compile(
        lambda x: undivided.attention(x, x, x, layout="bshd", batch_invariant=True), backend="aot_eager"
    )
    alone = torch.cat([undivided.attention(x, x, x, layout="bshd", batch_invariant=True) for x in q.split(1)])
    assert torch.equal(call(q), alone)
