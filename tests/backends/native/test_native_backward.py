"""The native kernel's gradients: every instruction set, every thread count, every feature at once, memory.

`test_backends.py` tests gradients for every backend. This file tests what only this backend has: tiles and blocks, odd
sizes at their edges, units of keys that are added in turn, and sums whose order must not depend on the number of
threads.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_native import LEVELS, MASKS, SCALES, SIZES, apart, needs_library
from torch import Tensor

import undivided
from undivided import masks
from undivided.backends.native import call
from undivided.kernels import cpu
from undivided.masks import Mask

pytestmark = needs_library

# Largest relative errors of the norm: fp32 some roundings, 16-bit types one of P and dS and one of the result.
ALLOWED = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
DTYPES = pytest.mark.parametrize("dtype", ALLOWED, ids=[str(dtype).removeprefix("torch.") for dtype in ALLOWED])


def gradients(
    tensors: dict[str, Tensor],
    backend: str,
    grads: tuple[Tensor, Tensor],
    dtype: torch.dtype | None = None,
    **arguments: Any,
) -> dict[str, Tensor]:
    """The gradient of every tensor that requires one; dtype converts the inputs first."""
    used = {}
    for name, t in tensors.items():
        used[name] = (t if dtype is None else t.to(dtype)).detach().requires_grad_(t.requires_grad)
    out, lse = undivided.attention(**used, backend=backend, return_lse=True, **arguments)
    wanted = {name: t for name, t in used.items() if t.requires_grad}
    returned = [grads[0].to(out), grads[1].to(lse)]
    found = torch.autograd.grad((out, lse), list(wanted.values()), returned)
    return dict(zip(wanted, found, strict=True))


def check(tensors: dict[str, Tensor], grads: tuple[Tensor, Tensor], **arguments: Any) -> None:
    """Against the reference in fp64, from the same rounded inputs."""
    got = gradients(tensors, "native", grads, **arguments)
    want = gradients(tensors, "reference", grads, torch.float64, **arguments)
    largest = max(float(x.norm()) for x in want.values())
    for name, x in got.items():
        assert x.dtype == tensors[name].dtype
        assert x.isfinite().all(), name
        # a difference that cancels (with one key, all of dq) is measured relative to its terms: delta is computed from
        # the rounded output
        error = float((x.double() - want[name]).norm()) / max(float(want[name].norm()), 0.3 * largest, 1e-30)
        allowed = max(ALLOWED[tensors[name].dtype], ALLOWED[tensors["q"].dtype])
        assert error < allowed, f"d{name}: {error:.1e}"


def tensors_of(size: str, dtype: torch.dtype, seed: int = 0) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(seed)
    b, h, n, q_len, kv_len, dk, dv = SIZES[size]
    tensors = {
        "q": torch.randn(b, h, q_len, dk),
        "k": torch.randn(b, n, kv_len, dk),
        "v": torch.randn(b, n, kv_len, dv),
    }
    tensors = {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}
    return tensors, (torch.randn(b, h, q_len, dv).to(dtype), torch.randn(b, h, q_len))


@DTYPES
@pytest.mark.parametrize("mask", ["full", "causal", "globals", "dense"])
@pytest.mark.parametrize("size", SIZES)
def test_odd_sizes_and_tile_edges(size: str, mask: str, dtype: torch.dtype) -> None:
    tensors, grads = tensors_of(size, dtype)
    _, _, _, q_len, kv_len, _, _ = SIZES[size]
    check(tensors, grads, layout="bhsd", mask=MASKS[mask](q_len, kv_len))


def everything(dtype: torch.dtype, bias: tuple[int, ...]) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Grouped heads with bias, sinks and slopes, all of which require gradients."""
    torch.manual_seed(0)
    tensors = {
        "q": torch.randn(2, 4, 70, 24),
        "k": torch.randn(2, 2, 150, 24),
        "v": torch.randn(2, 2, 150, 40),
        "bias": torch.randn(bias),
        "sinks": torch.randn(4),
        "alibi_slopes": torch.rand(4),
    }
    for name in "qkv":
        tensors[name] = tensors[name].to(dtype)
    tensors["bias"][..., 3:6] = -torch.inf if bias[-1] > 1 else 0.5
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    return tensors, (torch.randn(2, 4, 70, 40).to(dtype), torch.randn(2, 4, 70))


BIASES = [
    (2, 4, 70, 150),
    (1, 4, 70, 150),
    (2, 1, 70, 150),
    (1, 1, 70, 150),
    (1, 4, 1, 150),
    (2, 4, 70, 1),
    (1, 1, 1, 1),
]


@DTYPES
@pytest.mark.parametrize("bias", BIASES, ids=lambda shape: "x".join(map(str, shape)))
def test_bias_of_any_broadcast_sinks_slopes_softcap_and_dropout(bias: tuple[int, ...], dtype: torch.dtype) -> None:
    tensors, grads = everything(dtype, bias)
    check(tensors, grads, layout="bhsd", mask=masks.causal("bottom_right"), softcap=2.0, dropout_p=0.2, dropout_seed=9)


@DTYPES
def test_softcap_without_a_mask(dtype: torch.dtype) -> None:
    """Nothing is added to the scores then; the kernel once read memory of another call."""
    tensors, grads = tensors_of("odd", dtype)
    check(tensors, grads, layout="bhsd", softcap=1.5)


@DTYPES
def test_slopes_of_every_document_and_dropout_within_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = {name: torch.randn(150, 2, 32).to(dtype).requires_grad_() for name in "qkv"}
    tensors["alibi_slopes"] = torch.rand(4, 2).requires_grad_()
    mask = masks.documents([0, 5, 12, 113, 150]) & masks.causal()
    grads = torch.randn(150, 2, 32).to(dtype), torch.randn(2, 150)
    check(tensors, grads, layout="thd", mask=mask, dropout_p=0.3, dropout_seed=2)


@DTYPES
def test_a_mask_evaluated_in_blocks_of_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """dk and dv are then sums over several calls, in fp32."""
    monkeypatch.setattr(call, "MASK_PAIRS", 1)
    tensors, grads = everything(dtype, (1, 4, 70, 150))
    mask = masks.predicate(lambda b, h, i, j: (i + j + h) % 3 != 0)
    check(tensors, grads, layout="bhsd", mask=mask & masks.causal("bottom_right"), dropout_p=0.2, dropout_seed=9)


@DTYPES
@pytest.mark.parametrize("rows", [5, 16, 20, 33, 52, 65])
def test_partly_filled_panels(rows: int, dtype: torch.dtype) -> None:
    """Products skip missing rows; keys end anywhere within the tile of a micro-kernel."""
    torch.manual_seed(rows)
    for width, keys in ((24, rows), (40, 100), (72, 127)):
        tensors = {"q": (1, 4, rows, width), "k": (1, 2, keys, width), "v": (1, 2, keys, width)}
        made = {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in tensors.items()}
        grads = torch.randn(1, 4, rows, width), torch.randn(1, 4, rows)
        check(made, grads, layout="bhsd", mask=masks.window(40, 7, "bottom_right"))


FEW = {
    "full": lambda keys: None,
    "causal": lambda keys: masks.causal("bottom_right"),
    "window-some-rows-empty": lambda keys: masks.window(2, 0, "top_left"),
    "two-ranges": lambda keys: masks.window(1, 0, "bottom_right") | masks.prefix(2),
    "lengths": lambda keys: masks.lengths(torch.tensor([keys, keys // 3]), torch.tensor([1, 20])),
}


@DTYPES
@pytest.mark.parametrize("mask", FEW)
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (20, 2), (9, 5), (16, 16), (23, 48), (49, 30), (24, 50), (128, 97)])
def test_heads_of_few_tokens(rows: int, keys: int, mask: str, dtype: torch.dtype) -> None:
    """Lanes are keys, in panels. Grouped heads, and head sizes that do not fill a group of columns."""
    torch.manual_seed(rows)
    for heads, qk_dim, v_dim in ((2, 16, 80), (4, 64, 64)):
        made = {"q": (2, heads, max(rows, 20), qk_dim), "k": (2, 2, keys, qk_dim), "v": (2, 2, keys, v_dim)}
        if mask != "lengths":
            made["q"] = (2, heads, rows, qk_dim)
        tensors = {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in made.items()}
        tensors["sinks"] = torch.randn(heads).requires_grad_()
        grads = torch.randn(*made["q"][:3], v_dim).to(dtype), torch.randn(made["q"][:3])
        check(tensors, grads, layout="bhsd", mask=FEW[mask](keys))


@DTYPES
@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
def test_unused_memory_may_hold_anything_with_few_tokens(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    order = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3)}[layout]
    mask = masks.lengths(torch.tensor([11, 0, 16]), torch.tensor([3, 16, 0]))
    mask &= masks.causal("bottom_right")
    tensors = {name: torch.randn(3, 16, 2, 32).to(dtype).permute(order) for name in "qkv"}
    grads = [torch.randn(3, 16, 2, 32).to(dtype).permute(order), torch.randn(3, 2, 16)]
    clean = native(tensors, grads, layout=layout, mask=mask)
    for names, lengths in (("q", (3, 0, 0)), ("kv", (11, 0, 0))):
        for batch, length in enumerate(lengths):
            for name in names:
                tensors[name].permute(order)[batch, length:] = torch.nan
            if names == "q":
                grads[0].permute(order)[batch, length:] = torch.nan
                grads[1][batch, :, length:] = torch.inf
    for name, x in native(tensors, grads, layout=layout, mask=mask).items():
        assert torch.equal(x, clean[name]), name


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_of_this_machine(level: str) -> None:
    program = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import test_native_backward as t\n"
        "for dtype in t.ALLOWED:\n"
        "  for size in ('odd', 'one-short-of-a-tile', 'values-narrower'):\n"
        "    for mask in ('globals', 'dense'):\n"
        "      t.test_odd_sizes_and_tile_edges(size, mask, dtype)\n"
        "  for rows in (16, 33):\n"
        "    t.test_partly_filled_panels(rows, dtype)\n"
        "  for bias in t.BIASES[1::3]:\n"
        "    t.test_bias_of_any_broadcast_sinks_slopes_softcap_and_dropout(bias, dtype)\n"
        "  t.test_slopes_of_every_document_and_dropout_within_it(dtype)\n"
        "  t.test_the_result_does_not_depend_on_the_number_of_threads('one-head', dtype)\n"
        "  t.test_unused_memory_may_hold_anything(dtype)\n"
        "  for mask in t.FEW:\n"
        "    for rows, keys in ((5, 3), (23, 24), (24, 25), (60, 90)):\n"
        "      t.test_heads_of_few_tokens(rows, keys, mask, dtype)\n"
        "  t.test_unused_memory_may_hold_anything_with_few_tokens('bshd', dtype)\n"
        "  t.test_values_with_large_norms(dtype, 0.25)\n"
        "  t.test_small_gradients_do_not_vanish(dtype)\n"
        "for mask in ('full', 'causal'):\n"
        "  t.test_odd_sizes_and_tile_edges('blocks', mask, t.torch.float32)\n"
        "  t.test_rows_of_small_gradients_keep_their_precision(mask, -12)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"UNDIVIDED_ISA": level}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def _one_head(dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor], dict[str, Any]]:
    tensors = {name: torch.randn(1, 1, 700, 64).to(dtype).requires_grad_() for name in "qkv"}
    return tensors, (torch.randn(1, 1, 700, 64), torch.randn(1, 1, 700)), {"mask": masks.causal()}


def _some_heads(dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor], dict[str, Any]]:
    """One thread takes whole heads, two share the blocks of their keys."""
    tensors = {name: torch.randn(1, 6, 300, 40).to(dtype).requires_grad_() for name in "qkv"}
    return tensors, (torch.randn(1, 6, 300, 40), torch.randn(1, 6, 300)), {"mask": masks.window(100, 5)}


def _long_values(dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor], dict[str, Any]]:
    """Gradients of scores that overflow fp16 with the usual scale, in some rows of one head."""
    tensors = {name: torch.randn(1, 2, 500, 64).to(dtype) for name in "qkv"}
    tensors["v"][:, 1, 300:] *= 4096
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    return tensors, (torch.randn(1, 2, 500, 64), torch.randn(1, 2, 500)), {"mask": masks.causal()}


def _shared_bias(dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor], dict[str, Any]]:
    tensors, grads = everything(dtype, (1, 1, 70, 150))
    return tensors, grads, {"mask": masks.causal("bottom_right"), "dropout_p": 0.1, "dropout_seed": 1}


def _few_tokens(dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor], dict[str, Any]]:
    tensors = {name: torch.randn(8, 32, 17, 64).to(dtype).requires_grad_() for name in "qkv"}
    return tensors, (torch.randn(8, 32, 17, 64), torch.randn(8, 32, 17)), {"mask": masks.causal()}


CASES: dict[str, Callable[[torch.dtype], tuple[dict[str, Tensor], tuple[Tensor, Tensor], dict[str, Any]]]] = {
    "one-head": _one_head,
    "some-heads": _some_heads,
    "few-tokens": _few_tokens,
    "long-values": _long_values,
    "shared-bias": _shared_bias,
}


@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_the_result_does_not_depend_on_the_number_of_threads(case: str, dtype: torch.dtype) -> None:
    """One head: units of keys are added to the same rows of dq in a fixed order, whichever thread runs them."""
    torch.manual_seed(0)
    tensors, grads, arguments = CASES[case](dtype)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            results.append(gradients(tensors, "native", grads, layout="bhsd", **arguments))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for name, x in other.items():
            assert torch.equal(x, results[0][name]), name


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


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_failed_attempt_is_repeated_in_fresh_buffers(in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of the first attempt, sums included, do not affect the second one, whichever of its calls fails."""
    if in_parts:
        monkeypatch.setattr(call, "MASK_PAIRS", 1)
    tensors, grads = everything(torch.float16, (1, 4, 70, 150))
    mask = masks.predicate(lambda b, h, i, j: (i + j + h) % 3 != 0) & masks.causal("bottom_right")
    attempt, run, calls = cpu.GRADIENT_FIELDS.index("attempt"), cpu.Library.backward, []

    def fails(self: cpu.Library, record: bytes, gradients: bytes, number: int) -> int | None:
        run(self, record, gradients, number)
        calls.append(cpu.GRADIENT_RECORD.unpack(gradients)[attempt])
        return None if calls[-1] == 1 or len(calls) < parts else number + 1

    parts, results = 10**6, []
    monkeypatch.setattr(cpu.Library, "backward", fails)
    want = gradients(tensors, "native", grads, torch.float32, layout="bhsd", mask=mask)
    for parts in range(1, len(calls) + 1):
        calls.clear()
        results.append(gradients(tensors, "native", grads, layout="bhsd", mask=mask))
        assert calls == [0] * parts + [1] * (3 if in_parts else 1)
    assert len(results) == (3 if in_parts else 1)
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


def native(tensors: dict[str, Tensor], grads: list[Tensor], **arguments: Any) -> dict[str, Tensor]:
    """Gradients of all of them."""
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    return gradients(leaves, "native", (grads[0], grads[1]), **arguments)


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
            tensors[name][:, :, hidden] = filler
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
