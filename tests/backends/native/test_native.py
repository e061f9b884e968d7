"""The native kernel: every instruction set, every thread count, and a missing library.

`test_backends.py` tests attention for every backend. This file tests what only this backend has: tiles and panels, odd
sizes at their edges, instruction-set levels, and threads.
"""

from __future__ import annotations

import itertools

import forked_processes
import levels
import pytest
import torch
from native_oracle import ALLOWED, MASKS, SIZES, agree, check, needs_library, oracle

import undivided
from undivided import masks


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", SIZES)
def test_odd_sizes_and_tile_edges(size: str, mask: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    b, h, n, q_len, kv_len, dk, dv = SIZES[size]
    q = torch.randn(b, h, q_len, dk).to(dtype)
    k, v = torch.randn(b, n, kv_len, dk).to(dtype), torch.randn(b, n, kv_len, dv).to(dtype)
    check(q, k, v, MASKS[mask](q_len, kv_len))


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("level", levels.others())
def test_every_other_level_of_this_machine(level: str) -> None:
    """A level that it lacks is refused: test_native_library.py."""
    program = (
        "import math, pytest, test_native as t, test_native_numbers as n, test_native_options as o\n"
        "from native_oracle import ALLOWED, SIZES\n"
        "from undivided.kernels import cpu\n"
        f"assert cpu.load().level == {level!r}\n"
        "for size in SIZES:\n"
        "  for mask in ('full', 'causal', 'globals', 'dense'):\n"
        "    for dtype in ALLOWED:\n"
        "      t.test_odd_sizes_and_tile_edges(size, mask, dtype)\n"
        "for dtype in ALLOWED:\n"
        "  t.test_packed_documents('before', dtype)\n"
        "  t.test_packed_documents('ten-around', dtype)\n"
        "  for q_len in (40, 3, 1):\n"
        "    for value in (math.nan, math.inf):\n"
        "      n.test_non_finite_values_stay_in_their_column_or_row(q_len, dtype, value)\n"
        "n.test_early_and_late_keys_have_equal_weight_among_many()\n"
        "for case in o.DROPPED:\n"
        "  for dtype in ALLOWED:\n"
        "    with pytest.MonkeyPatch.context() as patch:\n"
        "      o.test_dropout_drops_what_the_reference_drops(case, dtype, patch)\n"
    )
    ran = forked_processes.run(program, environment={"UNDIVIDED_ISA": level})
    assert ran.returncode == 0, ran.stderr


# Batch, heads, key/value heads, query and key length: more units than threads, fewer, one head that is cut for them,
# and so many partial results that the threads share their merging.
SHARED: dict[str, tuple[int, int, int, int, int]] = {
    "prefill": (2, 4, 2, 700, 3000),
    "window": (2, 4, 2, 700, 3000),
    "one-head": (1, 1, 1, 300, 900),
    "short-heads": (5, 18, 9, 12, 20),
    "decode": (2, 4, 2, 1, 3000),
    "decode-bshd": (2, 4, 2, 1, 3000),
    "merge": (8, 32, 8, 1, 3000),
    "merge-bshd": (8, 32, 8, 1, 3000),
}


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("case", SHARED)
def test_the_result_does_not_depend_on_the_number_of_threads(case: str, dtype: torch.dtype) -> None:
    batch, heads, kv_heads, q_len, kv_len = SHARED[case]
    mask = masks.window(100, 7, "bottom_right") if case == "window" else masks.causal("bottom_right")
    q = torch.randn(batch, heads, q_len, 64).to(dtype)
    k, v = (torch.randn(batch, kv_heads, kv_len, 64).to(dtype) for _ in range(2))
    layout = "bshd" if case.endswith("bshd") else "bhsd"
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 16):
            torch.set_num_threads(threads)
            results.append(undivided.attention(q, k, v, layout=layout, mask=mask, backend="native", return_lse=True))
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def packed_lengths() -> list[int]:
    """Offsets of documents that end anywhere within a panel of rows and a tile of keys; some are shorter than a vector,
    and one has more keys than AMX processes at once."""
    draw = torch.Generator().manual_seed(0)
    lengths = [int(torch.randint(1, most, (), generator=draw)) for _ in range(5) for most in (4, 12, 40, 90, 260)]
    lengths.insert(9, 530)
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


@needs_library
@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("seen", ["before", "all", "before-and-the-first-five", "ten-around"])
def test_packed_documents(seen: str, dtype: torch.dtype) -> None:
    """Rows of a document are computed in the same steps wherever their block begins, so the number of threads does not
    matter."""
    torch.manual_seed(0)
    offsets = packed_lengths()
    mask = masks.documents(offsets) if seen == "all" else masks.documents(offsets) & masks.causal()
    if seen == "ten-around":  # where rows of a document begin to see other first keys than the rows beside them
        mask = masks.documents(offsets) & masks.window(5, 4)
    if seen == "before-and-the-first-five":
        mask = (masks.causal() | masks.prefix(5)) & masks.documents(offsets)
    q, k, v = (torch.randn(1, heads, offsets[-1], 64).to(dtype) for heads in (4, 2, 2))
    q = q * 4  # largest scores then keep changing
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(undivided.attention(q, k, v, layout="bhsd", mask=mask, backend="native", return_lse=True))
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
    allowed, (out, lse), wanted = mask.to_dense(1, 4, offsets[-1], offsets[-1]), results[0], []
    for start, stop in itertools.pairwise(offsets):  # the definition of a document alone: all pairs take seconds
        rows = slice(start, stop)
        assert not allowed[:, :, rows, :start].any()
        assert not allowed[:, :, rows, stop:].any()
        wanted.append(oracle(*(t[:, :, rows] for t in (q, k, v)), allowed[:, :, rows, rows]))
    agree(out, lse, *(torch.cat(parts, 2) for parts in zip(*wanted, strict=True)))
