"""The native kernel's gradients: every instruction set, every thread count, every feature at once, memory.

`test_backends.py` tests gradients for every backend. This file tests what only this backend has: tiles and blocks, odd
sizes at their edges, units of keys that are added in turn, and sums whose order must not depend on the number of
threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import forked_processes
import levels
import pytest
import torch
from native_gradients import DTYPES, _long_values, check, everything, gradients, native, tensors_of
from native_oracle import MASKS, SIZES, needs_library
from torch import Tensor

from undivided import masks
from undivided.backends.native import evaluated

pytestmark = needs_library


@DTYPES
@pytest.mark.parametrize("mask", ["full", "causal", "globals", "dense"])
@pytest.mark.parametrize("size", SIZES)
def test_odd_sizes_and_tile_edges(size: str, mask: str, dtype: torch.dtype) -> None:
    tensors, grads = tensors_of(size, dtype)
    _, _, _, q_len, kv_len, _, _ = SIZES[size]
    check(tensors, grads, layout="bhsd", mask=MASKS[mask](q_len, kv_len))


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
    monkeypatch.setattr(evaluated, "MASK_PAIRS", 1)
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


@pytest.mark.slow
@pytest.mark.parametrize("level", levels.others())
def test_every_other_level_of_this_machine(level: str) -> None:
    program = (
        "import torch, test_native_backward as t, test_native_gradient_numbers as n\n"
        "from native_gradients import ALLOWED\n"
        "for dtype in ALLOWED:\n"
        "  for size in ('odd', 'one-short-of-a-tile', 'values-narrower'):\n"
        "    for mask in ('globals', 'dense'):\n"
        "      t.test_odd_sizes_and_tile_edges(size, mask, dtype)\n"
        "  for rows in (16, 33):\n"
        "    t.test_partly_filled_panels(rows, dtype)\n"
        "  for bias in t.BIASES[1::3]:\n"
        "    t.test_bias_of_any_broadcast_sinks_slopes_softcap_and_dropout(bias, dtype)\n"
        "  t.test_slopes_of_every_document_and_dropout_within_it(dtype)\n"
        "  t.test_the_result_does_not_depend_on_the_number_of_threads('one-head', dtype)\n"
        "  n.test_unused_memory_may_hold_anything(dtype)\n"
        "  for mask in t.FEW:\n"
        "    for rows, keys in ((5, 3), (23, 24), (24, 25), (60, 90)):\n"
        "      t.test_heads_of_few_tokens(rows, keys, mask, dtype)\n"
        "  t.test_unused_memory_may_hold_anything_with_few_tokens('bshd', dtype)\n"
        "  n.test_values_with_large_norms(dtype, 0.25)\n"
        "  n.test_small_gradients_do_not_vanish(dtype)\n"
        "for mask in ('full', 'causal'):\n"
        "  t.test_odd_sizes_and_tile_edges('blocks', mask, torch.float32)\n"
        "  n.test_rows_of_small_gradients_keep_their_precision(mask, -12)\n"
    )
    ran = forked_processes.run(program, environment={"UNDIVIDED_ISA": level})
    assert ran.returncode == 0, ran.stderr


def _one_head(dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor], dict[str, Any]]:
    tensors = {name: torch.randn(1, 1, 700, 64).to(dtype).requires_grad_() for name in "qkv"}
    return tensors, (torch.randn(1, 1, 700, 64), torch.randn(1, 1, 700)), {"mask": masks.causal()}


def _some_heads(dtype: torch.dtype) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor], dict[str, Any]]:
    """One thread takes whole heads, two share the blocks of their keys."""
    tensors = {name: torch.randn(1, 6, 300, 40).to(dtype).requires_grad_() for name in "qkv"}
    return tensors, (torch.randn(1, 6, 300, 40), torch.randn(1, 6, 300)), {"mask": masks.window(100, 5)}


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
