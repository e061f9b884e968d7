"""Gradients of the native kernel for numbers of any size, and for memory that must not be read."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from native_gradients import ALLOWED, DTYPES, _long_values, check, everything, gradients, native, tensors_of
from native_oracle import SCALES, apart, needs_library

import undivided
from undivided import masks
from undivided.backends.native import evaluated
from undivided.kernels import cpu
from undivided.masks import Mask

pytestmark = needs_library


@DTYPES
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_values_with_large_norms(dtype: torch.dtype, dropout: float) -> None:
    """Gradients of fp16 scores are scaled on AMX; these overflow, and everything is computed again in fp32."""
    torch.manual_seed(0)
    tensors, grads, arguments = _long_values(dtype)
    check(tensors, grads, layout="bhsd", dropout_p=dropout, dropout_seed=3, **arguments)
    tensors, grads = everything(dtype, (1, 4, 70, 150))
    tensors["v"].detach().mul_(4096)
    check(tensors, grads, layout="bhsd", mask=masks.causal("bottom_right"), dropout_p=dropout, dropout_seed=3)


@pytest.mark.parametrize("several_calls", [False, True])
def test_a_failed_attempt_is_repeated_in_fresh_buffers(several_calls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of the first attempt, sums included, do not affect the second one, whichever of its calls fails."""
    if several_calls:
        monkeypatch.setattr(evaluated, "MASK_PAIRS", 1)
    tensors, grads = everything(torch.float16, (1, 4, 70, 150))
    mask = masks.predicate(lambda b, h, i, j: (i + j + h) % 3 != 0) & masks.causal("bottom_right")
    attempt, run, calls = cpu.GRADIENT_FIELDS.index("attempt"), cpu.Library.backward, []

    def fails(self: cpu.Library, record: bytes, gradients: bytes, number: int) -> int | None:
        run(self, record, gradients, number)
        calls.append(cpu.GRADIENT_RECORD.unpack(gradients)[attempt])
        return None if calls[-1] == 1 or len(calls) < made else number + 1

    made, results = 10**6, []
    monkeypatch.setattr(cpu.Library, "backward", fails)
    want = gradients(tensors, "native", grads, torch.float32, layout="bhsd", mask=mask)
    for made in range(1, len(calls) + 1):
        calls.clear()
        results.append(gradients(tensors, "native", grads, layout="bhsd", mask=mask))
        assert calls == [0] * made + [1] * (3 if several_calls else 1)
    assert len(results) == (3 if several_calls else 1)
    for result in results:
        for name, x in result.items():
            assert torch.equal(x, results[0][name])
            assert apart(x, want[name].double()) < ALLOWED[torch.float16], name


@DTYPES
def test_small_gradients_do_not_vanish(dtype: torch.dtype) -> None:
    """Gradients of 2^-9 times the usual size, which is small for fp16 over 700 keys, and rows of 2^-10 times that of
    others."""
    tensors, (grad, grad_lse) = tensors_of("blocks", dtype)
    check(tensors, (grad * 2**-9, grad_lse * 2**-9), layout="bhsd")
    grad[:, :, 7::64] *= 1024
    grads = grad, torch.zeros_like(grad_lse)
    got = gradients(tensors, "native", grads, layout="bhsd")["q"]
    want = gradients(tensors, "reference", grads, torch.float64, layout="bhsd")["q"]
    for start in range(64):
        assert apart(got[:, :, start::64], want[:, :, start::64]) < ALLOWED[dtype]


@pytest.mark.parametrize(
    ("of_q", "of_v", "of_grad"),
    [
        (of_q, of_v, of_grad)
        for of_q, of_v in SCALES
        for of_grad in (1, 2.0**-60, 2.0**20)
        if of_grad * of_v >= 2.0**-126  # what fp32 has no range for is 0
    ],
)
def test_numbers_keep_their_precision_at_any_scale(of_q: float, of_v: float, of_grad: float) -> None:
    """fp32 may be computed as sums of two halves; numbers beyond their range are just as exact."""
    tensors, (grad, grad_lse) = tensors_of("tiles", torch.float32)
    scaled = {"q": tensors["q"] * of_q, "k": tensors["k"] / of_q, "v": tensors["v"] * of_v}
    tensors = {name: t.detach().requires_grad_() for name, t in scaled.items()}
    grads = grad * of_grad, grad_lse * (of_grad * of_v)
    got = gradients(tensors, "native", grads, layout="bhsd")
    want = gradients(tensors, "reference", grads, torch.float64, layout="bhsd")
    for name, x in got.items():
        assert apart(x, want[name]) < ALLOWED[torch.float32], name


@pytest.mark.parametrize(
    ("name", "number"),
    [
        (name, number)
        for name in ("q", "k", "v", "grad")
        for number in (255.5, 1e-4, 1e-35, 1e20, torch.inf, torch.nan)
        if not (name in "qk" and number == 1e20)  # no order of sums gets such scores right
    ],
)
def test_numbers_of_any_size(name: str, number: float) -> None:
    tensors, (grad, grad_lse) = tensors_of("tiles", torch.float32)
    given = {**tensors, "grad": grad}
    with torch.no_grad():
        given[name][0, 1, 7] *= number if number < 1 else 1
        given[name][0, 1, 7, 5] = number
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(gradients(tensors, "native", (grad, grad_lse), layout="bhsd"))
    finally:
        torch.set_num_threads(before)
    want = gradients(tensors, "reference", (grad, grad_lse), torch.float64, layout="bhsd")
    for of, x in results[0].items():
        torch.testing.assert_close(x, results[1][of], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(x.isfinite(), want[of].isfinite()), of
        fine = want[of].isfinite().all(-1)
        # scores of 100 and more, of q or k, are known to 100 * 2^-24 and more
        most = (2 if name in "qk" and number == 255.5 else 1) * ALLOWED[torch.float32]
        assert apart(x[fine], want[of][fine]) < most, of


@pytest.mark.parametrize("of_q", [1, 2.0**-8, 2.0**-40])
@pytest.mark.parametrize("none", [slice(0, 256), slice(256, 512), slice(0, 512)])
def test_rows_without_a_gradient(none: slice, of_q: float) -> None:
    """Whole blocks of rows with a gradient of 0, from which no scale can be computed."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(1, 2, 512, 64) for name in "qkv"}
    tensors["q"] *= of_q
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    grads = torch.randn(1, 2, 512, 64), torch.zeros(1, 2, 512)
    grads[0][:, :, none] = 0
    got = gradients(tensors, "native", grads, layout="bhsd")
    want = gradients(tensors, "reference", grads, torch.float64, layout="bhsd")
    assert not got["q"][:, :, none].any()
    for name, x in got.items():
        assert apart(x, want[name]) < ALLOWED[torch.float32], name


@pytest.mark.parametrize("bits", [-6, -12, -18, -24, -40])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_rows_of_small_gradients_keep_their_precision(mask: str, bits: int) -> None:
    """Single rows, and whole documents, whose keys have small gradients too."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(1, 2, 600, 64).requires_grad_() for name in "qkv"}
    grads = torch.randn(1, 2, 600, 64), torch.zeros(1, 2, 600)
    documents = masks.document_ids(torch.arange(600) // 150)
    seen = documents if mask == "full" else documents & masks.causal()
    grads[0][:, :, 150:300] *= 2.0**bits
    grads[0][:, :, 303::7] *= 2.0**bits
    got = gradients(tensors, "native", grads, layout="bhsd", mask=seen)
    want = gradients(tensors, "reference", grads, torch.float64, layout="bhsd", mask=seen)
    for start in range(0, 600, 150):
        for name, x in got.items():
            document = slice(start, start + 150)
            assert apart(x[:, :, document], want[name][:, :, document]) < ALLOWED[torch.float32], name
    small = torch.arange(303, 600, 7)
    assert apart(got["q"][:, :, small], want["q"][:, :, small]) < ALLOWED[torch.float32]


@pytest.mark.skipif(getattr(cpu.load(), "level", None) != "amx", reason="without AMX-FP16 fp32 is not two fp16")
@pytest.mark.parametrize(("scale", "attempts"), [(1, [True]), (2**-12, [False, True]), (2**-90, [False, False, True])])
def test_values_out_of_range_are_computed_by_the_next_attempt(
    scale: float, attempts: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = cpu.Library.backward, []

    def counts(self: cpu.Library, record: bytes, of: bytes, attempt: int) -> int | None:
        following = run(self, record, of, attempt)
        calls.append(following is None)
        return following

    monkeypatch.setattr(cpu.Library, "backward", counts)
    tensors, grads = tensors_of("tiles", torch.float32)
    tensors["v"].detach()[0, 1, 7] *= scale
    gradients(tensors, "native", grads, layout="bhsd")
    assert calls == attempts


@DTYPES
def test_memory_of_an_earlier_call_does_not_affect_results(dtype: torch.dtype) -> None:
    """NaN, in this case, in the unused lanes of a panel and the unused keys of a block."""
    spoiled = {name: torch.full((1, 2, 700, 64), torch.nan).to(torch.bfloat16) for name in "qkv"}
    native(spoiled, [torch.full((1, 2, 700, 64), torch.nan), torch.zeros(1, 2, 700)], layout="bhsd")
    for size in ("one-short-of-a-tile", "blocks"):
        tensors, grads = tensors_of(size, dtype)
        check(tensors, grads, layout="bhsd", mask=masks.causal("bottom_right"))


@DTYPES
def test_rows_with_a_non_finite_gradient_do_not_affect_others(dtype: torch.dtype) -> None:
    tensors, (grad, grad_lse) = tensors_of("blocks", dtype)
    grad[:, :, 65], grad[:, :, 1099] = torch.nan, torch.inf
    got = gradients(tensors, "native", (grad, grad_lse), layout="bhsd")
    want = gradients(tensors, "reference", (grad, grad_lse), torch.float64, layout="bhsd")
    assert got["q"][:, :, 65].isnan().all()
    assert not got["k"].isfinite().any()
    fine = torch.ones(1100, dtype=torch.bool)
    fine[[65, 1099]] = False
    assert apart(got["q"][:, :, fine], want["q"][:, :, fine]) < ALLOWED[dtype]


@DTYPES
def test_unused_memory_may_hold_anything(dtype: torch.dtype) -> None:
    """Odd gaps between documents and in a dense mask, in the inputs and in the incoming gradient."""
    torch.manual_seed(0)
    spans, lengths = [0, 9, 21, 64], [5, 7, 28]
    mask = masks.documents([0, 5, 12, 40], padded_q=spans) & masks.causal()
    tensors = {name: torch.randn(64, 2, 32).to(dtype) for name in "qkv"}
    grads = [torch.randn(64, 2, 32).to(dtype), torch.randn(2, 64)]
    clean = native(tensors, grads, layout="thd", mask=mask)
    for start, length, stop in zip(spans, lengths, spans[1:], strict=False):
        for t in (*tensors.values(), grads[0]):
            t[start + length : stop] = torch.nan
        grads[1][:, start + length : stop] = torch.inf
    got = native(tensors, grads, layout="thd", mask=mask)
    for name in got:
        assert torch.equal(got[name], clean[name])

    kept = torch.ones(1, 1, 1, 333, dtype=torch.bool)
    kept[..., 5:8] = kept[..., 101:130] = kept[..., 301:] = False
    q, k, v = (torch.randn(1, 2, n, 32).to(dtype) for n in (40, 333, 333))
    poison = ~kept[0, 0, 0]
    tensors = {"q": q, "k": k, "v": v}
    grads = [torch.randn(1, 2, 40, 32), torch.randn(1, 2, 40)]
    wanted = native(tensors, grads, layout="bhsd", mask=masks.dense(kept))
    tensors["k"][:, :, poison] = tensors["v"][:, :, poison] = torch.nan
    got = native(tensors, grads, layout="bhsd", mask=masks.dense(kept))
    for name in got:
        assert torch.equal(got[name], wanted[name])


@DTYPES
@pytest.mark.parametrize("number", [math.nan, math.inf, 1e30, 1e-30], ids=str)
@pytest.mark.parametrize("hidden_by", ["mask", "bias"])
@pytest.mark.parametrize("q_len", [40, 100, 600], ids="{}-rows".format)
def test_what_a_mask_or_a_bias_hides_does_not_change_a_bit(
    q_len: int, hidden_by: str, number: float, dtype: torch.dtype
) -> None:
    """It does not even change the kernel: fp32 may be computed as sums of two halves, which cannot represent every
    number."""
    torch.manual_seed(0)
    seen = torch.rand(q_len, 333) < 0.5
    seen[:, 5:8] = seen[:, 101:130] = seen[:, 301:] = False
    hidden = ~seen.any(0)
    by: dict[str, Any] = {
        "mask": {"mask": masks.dense(seen)},
        "bias": {"bias": torch.randn(q_len, 333).masked_fill(~seen, -math.inf)},
    }[hidden_by]
    tensors = {name: torch.randn(1, 4, n, 64).to(dtype) for name, n in (("q", q_len), ("k", 333), ("v", 333))}
    grads = [torch.randn(1, 4, q_len, 64), torch.randn(1, 4, q_len)]
    results = []
    for filler in (0.0, number):
        for name in "kv":
            tensors[name][:, :, hidden] = torch.tensor(filler).to(dtype)  # inf if fp16 has no such number
        out = undivided.attention(**tensors, **by, layout="bhsd", backend="native")
        results.append({"out": out, **native(tensors, grads, layout="bhsd", **by)})
    for name, x in results[0].items():
        assert x.isfinite().all()
        assert torch.equal(x, results[1][name]), name


def random_mask(draw: random.Random, q_len: int, kv_len: int) -> Mask | None:
    kinds: list[Callable[[], Mask | None]] = [
        lambda: None,
        lambda: masks.causal("top_left"),
        lambda: masks.causal("bottom_right"),
        lambda: masks.window(draw.randrange(40), draw.randrange(9), "bottom_right"),
        lambda: masks.window(draw.randrange(9), 0, "top_left") | masks.prefix(draw.randrange(5)),
        lambda: masks.chunks(draw.randrange(1, 60), "top_left"),
        lambda: masks.dense(torch.rand(1, 1, q_len, kv_len) > draw.random()),
        lambda: masks.lengths(torch.tensor([draw.randrange(kv_len + 1), kv_len])),
        lambda: masks.documents(_cuts(draw, q_len), _cuts(draw, kv_len)),
    ]
    return draw.choice(kinds)()


def _cuts(draw: random.Random, length: int) -> list[int]:
    return [0, *sorted(draw.randrange(length + 1) for _ in range(3)), length]


@pytest.mark.parametrize("seed", range(40))
def test_random_problems(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    n, group = draw.choice([1, 2]), draw.choice([1, 3])
    q_len, kv_len = draw.choice([1, 7, 33, 130, 200]), draw.choice([1, 6, 65, 140, 300])
    dk, dv = draw.choice([1, 8, 17, 48, 64]), draw.choice([3, 16, 40, 64])
    dtype = draw.choice(list(ALLOWED))
    mask = random_mask(draw, q_len, kv_len)
    batch = 1 if mask is not None and "documents" in mask.kinds else 2
    heads = n * group
    shapes = {"q": (batch, heads, q_len, dk), "k": (batch, n, kv_len, dk), "v": (batch, n, kv_len, dv)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors = {name: t.to(dtype) for name, t in tensors.items()}
    if draw.random() < 0.3:
        full = (batch, heads, q_len, kv_len)
        tensors["bias"] = torch.randn([draw.choice([1, size]) for size in full]).to(draw.choice([dtype, torch.float32]))
    if draw.random() < 0.3:
        tensors["sinks"] = torch.randn(heads)
    arguments: dict[str, Any] = {"layout": "bhsd", "mask": mask}
    if draw.random() < 0.3:
        arguments |= {"softcap": 1.5}
    if draw.random() < 0.3:
        arguments |= {"dropout_p": 0.25, "dropout_seed": seed}
    for name, t in tensors.items():
        t.requires_grad_(name == "q" or draw.random() < 0.8)
    check(tensors, (torch.randn(batch, heads, q_len, dv), torch.randn(batch, heads, q_len)), **arguments)


def test_gradients_of_q_alone_skip_the_products_for_k_and_v() -> None:
    tensors, grads = tensors_of("tiles", torch.float32)
    whole = gradients(tensors, "native", grads, layout="bhsd")
    for name in "qkv":
        some = {n: t.detach().requires_grad_(n == name) for n, t in tensors.items()}
        assert torch.equal(gradients(some, "native", grads, layout="bhsd")[name], whole[name])


def test_an_incoming_gradient_with_stride_0_is_read_correctly() -> None:
    """`sum().backward()` gives a gradient with stride 0; the kernel reads contiguous rows."""
    q = torch.randn(1, 2, 50, 16, requires_grad=True)
    (got,) = torch.autograd.grad(undivided.attention(q, q, q, layout="bhsd", backend="native").sum(), q)
    (want,) = torch.autograd.grad(undivided.attention(q, q, q, layout="bhsd", backend="reference").sum(), q)
    assert apart(got, want.double()) < 1e-5
