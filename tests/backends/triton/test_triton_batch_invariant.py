"""batch_invariant=True of the `triton` backend under Triton's interpreter: the order of its sums is that of the
sequence.

A GPU computes each element of a product of tiles from its row and its column alone. The products of the interpreter are
those of a BLAS library, which adds some rows of a tile in another order; so they are replaced here.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from calls import call_of
from invariance import MASKS, WAYS, Sequences
from torch import Tensor

import undivided
from undivided import masks
from undivided.backends.triton import blocks, forward, invariant
from undivided.backends.triton.inputs import KernelInputs

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels need a GPU without Triton's interpreter", allow_module_level=True)

LENGTHS = [3, 37, 1, 50]
CHUNK = 11
SIZES = (2, 1, 16, 16)
SOME_WAYS = ["in a pack", "in chunks", "in pages of 7"]


@pytest.fixture(autouse=True)
def _products_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        found = d.data.copy()
        for n in range(a.data.shape[1]):
            found += a.data[:, n, None] * b.data[n]
        return interpreter.TensorHandle(found, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("way", WAYS)
def test_the_bits_are_those_of_each_sequence_alone(way: str) -> None:
    s = Sequences(MASKS["window and sinks"], torch.float32, SIZES, LENGTHS, CHUNK, backend="triton")
    s.check(WAYS[way](s))


@pytest.mark.parametrize("way", SOME_WAYS)
@pytest.mark.parametrize(
    "mask", ["causal", *(pytest.param(mask, marks=pytest.mark.slow) for mask in ("window", "chunks"))]
)
def test_the_bits_are_the_same_with_every_mask(mask: str, way: str) -> None:
    s = Sequences(MASKS[mask], torch.float32, SIZES, LENGTHS, CHUNK, backend="triton")
    s.check(WAYS[way](s))


@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [(torch.bfloat16, (4, 1, 33, 24)), (torch.float16, (3, 3, 16, 40)), (torch.float32, (2, 2, 264, 264))],
    ids=str,
)
@pytest.mark.parametrize("way", ["in a pack", "in chunks"])
def test_the_bits_are_the_same_in_every_dtype_and_size(
    way: str, dtype: torch.dtype, sizes: tuple[int, int, int, int]
) -> None:
    s = Sequences(MASKS["window"], dtype, sizes, [3, 40], CHUNK, backend="triton")
    s.check(WAYS[way](s))


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"sinks": torch.linspace(-1, 1, 2)},
        {"alibi_slopes": torch.linspace(0.1, 0.5, 2)},
        {"scale": -0.2},
    ],
    ids=["softcap", "sinks", "alibi", "a negative scale"],
)
def test_the_bits_are_the_same_with_every_option(options: dict[str, Any]) -> None:
    s = Sequences(MASKS["window and sinks"], torch.float32, SIZES, LENGTHS, CHUNK, backend="triton", **options)
    s.check(WAYS["in a pack"](s))


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "piece"), [("causal", 32), ("window and sinks", 64)])
def test_the_bits_do_not_depend_on_how_many_programs_share_the_keys(
    mask: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program merges its pieces in registers; of several each writes its pieces, and another kernel merges."""
    monkeypatch.setattr(invariant, "INTERPRETED_PIECE", piece)
    results, split = [], set()
    s = Sequences(MASKS[mask], torch.float32, SIZES, [3, 100], 40, backend="triton", sinks=torch.tensor([0.5, -1.0]))
    compute = blocks._batch_invariant

    def told(*arguments: Any) -> blocks.LaunchBlocks:
        found = compute(*arguments)
        split.add(found.splits)
        return found

    monkeypatch.setattr(blocks, "_batch_invariant", told)
    for processors in (0, 1000):
        monkeypatch.setattr(blocks, "processors", lambda device, processors=processors: processors)
        results.append(torch.cat([out.flatten() for way in SOME_WAYS for out in WAYS[way](s)]))
    assert min(split) == 1 < max(split)
    assert torch.equal(*results)


def test_many_pieces_are_computed_by_one_program_rather_than_written(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(1, 2, 2, 16), torch.randn(1, 100, 1, 16)
    call, tensors = call_of(q, k, k, layout="bshd", batch_invariant=True)
    inputs = KernelInputs(call, tensors)
    (rows,) = inputs.rows()
    assert blocks._batch_invariant(inputs, rows).splits == 4
    monkeypatch.setattr(blocks, "MAX_PIECE_BYTES", 4 * 2 * 2 * 16 * 4 - 1)
    assert blocks._batch_invariant(inputs, rows).splits == 1


@pytest.mark.parametrize(("invariant_too", "pieces"), [(False, {0}), (True, {0, 3, 4})])
def test_only_calls_in_pieces_are_compiled_for_their_number(
    invariant_too: bool, pieces: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles a number of 1, and numbers that are divisible by 16, apart from others."""
    found, launch = set(), forward.launch

    def told(*arguments: Any) -> Any:
        found.add(arguments[4]().get("pieces", 0))
        return launch(*arguments)

    monkeypatch.setattr(forward, "launch", told)
    for keys in (20, 96, 128):
        k = torch.randn(1, keys, 1, 16)
        undivided.attention(
            torch.randn(1, 1, 2, 16), k, k, layout="bshd", backend="triton", batch_invariant=invariant_too
        )
    assert {n for n in found if isinstance(n, int)} == pieces


def test_one_row_at_a_time_gives_the_bits_of_the_prefill() -> None:
    q, k, v = (torch.randn(1, 40, heads, 16) for heads in (2, 1, 1))

    def attend(first: int, last: int) -> Tensor:
        out: Tensor = undivided.attention(
            q[:, first:last],
            k[:, :last],
            v[:, :last],
            layout="bshd",
            mask=masks.causal("bottom_right"),
            batch_invariant=True,
            backend="triton",
        )
        return out

    assert torch.equal(torch.cat([attend(n, n + 1) for n in range(40)], 1), attend(0, 40))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_the_bits_are_the_same_with_quantised_pages(format: str) -> None:
    lengths, heads, dim = [5, 70], 2, 32
    k, v = (torch.randn(sum(lengths), 1, dim) for _ in range(2))
    q = torch.randn(2, heads, dim)

    def decoded(page_size: int, first: int, last: int) -> Tensor:
        some = lengths[first:last]
        at = slice(sum(lengths[:first]), sum(lengths[:last]))
        cache = undivided.PagedKVCache(
            24, page_size, 1, dim, batch=len(some), dtype=torch.float32, layout="thd", quantize=format
        )
        cache.append(k[at], v[at], lengths=some)
        out: Tensor = cache.attend(q[first:last], q_lengths=[1] * len(some), batch_invariant=True, backend="triton")
        return out

    together = decoded(16, 0, 2)
    assert torch.equal(together, torch.cat([decoded(7, 0, 1), decoded(32, 1, 2)]))


def test_rows_outside_of_all_documents_are_zero() -> None:
    """Padding between and after documents belongs to a block of rows, too."""
    q, k, v = (torch.randn(50, 2, 16) for _ in range(3))
    mask = masks.documents([0, 3, 21], padded_q=[0, 8, 50], padded_kv=[0, 8, 50]) & masks.causal()
    out, lse = undivided.attention(
        q, k, v, layout="thd", mask=mask, batch_invariant=True, backend="triton", return_lse=True
    )
    want, want_lse = undivided.attention(q, k, v, layout="thd", mask=mask, backend="reference", return_lse=True)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert not out[3:8].any()
    assert not out[26:].any()


def test_the_result_is_right_and_has_gradients() -> None:
    q, k, v = torch.randn(2, 70, 4, 32), torch.randn(2, 70, 2, 32), torch.randn(2, 70, 2, 32)
    mask = masks.window(30, 0) | masks.sinks(3)
    report = undivided.verify(
        q, k, v, layout="bshd", mask=mask, batch_invariant=True, backends=["triton"], gradients=True
    )
    assert report.ok
    assert report.backends == ("triton",)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": masks.document_ids(torch.zeros(1, 8, dtype=torch.int32))}, "of document ids (masks.documents says"),
        ({"mask": masks.tree([-1, 0, 0, 1, 2, 3, 4, 5])}, "with tree, whose pairs are added in an order of their own"),
        ({"bias": torch.zeros(1, 1, 8, 8)}, "with bias, whose pairs"),
        ({"mask": (masks.window(3, 0) | masks.sinks(1)) & (masks.window(5, 0) | masks.sinks(2))}, "with two unions"),
    ],
    ids=["document ids", "tree", "bias", "two unions"],
)
def test_what_has_no_fixed_order_is_refused(options: dict[str, Any], reason: str) -> None:
    q = torch.randn(1, 8, 2, 16)
    reasons = undivided.explain(q, q, q, layout="bshd", batch_invariant=True, **options).reasons["triton"]
    assert f"batch-invariant results {reason}" in " ".join(reasons)
