"""Packs of sequences that prefill, verify drafts and decode: each is computed as it would be alone."""

from __future__ import annotations

from typing import Any

import forked_processes
import levels
import pytest
import torch
from native_oracle import ALLOWED, apart, needs_library
from torch import Tensor

import undivided
from undivided import masks
from undivided.masks import Mask

pytestmark = needs_library
DTYPES = pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))

PAGE, HEADS, KV_HEADS, DIM = 16, 8, 2, 32
PACKS = {  # (query rows, keys) of each sequence
    "decoding": [(1, 700), (1, 33), (1, 64), (1, 1500), (1, 1)],
    "drafts": [(2, 900), (4, 300), (8, 1700), (3, 90)],
    "prefill": [(130, 130), (64, 64), (70, 333), (512, 512)],
    "mixed": [(1, 700), (4, 300), (70, 333), (3, 3), (1, 50), (0, 20), (130, 130), (1, 1000), (5, 5), (2, 2), (1, 600)],
}
MASKS: dict[str, Mask] = {
    "causal": masks.causal("bottom_right"),
    "full": masks.window(None, None),
    "window": masks.window(40, 0, align="bottom_right"),
    "window-and-sinks": masks.window(40, 0, align="bottom_right") | masks.sinks(3, align="bottom_right"),
}


class Pack:
    """The tensors of a pack, in pages or not, and its arguments."""

    def __init__(self, sizes: list[tuple[int, int]], dtype: torch.dtype, paged: bool) -> None:
        torch.manual_seed(0)
        self.sizes = sizes
        rows, keys = zip(*sizes, strict=True)
        self.cu_q, self.cu_kv = (torch.tensor([0, *n]).cumsum(0).int() for n in (rows, keys))
        self.q = torch.randn(int(self.cu_q[-1]), HEADS, DIM).to(dtype)
        self.pages = None
        shape: tuple[int, ...] = (int(self.cu_kv[-1]),)
        if paged:
            width = -(-max(keys) // PAGE)
            self.pages = torch.randperm(width * len(sizes)).int().view(len(sizes), width)
            shape = (width * len(sizes), PAGE)
        self.k, self.v = (torch.randn(*shape, KV_HEADS, DIM).to(dtype) for _ in range(2))

    def run(self, mask: Mask, **options: Any) -> Tensor:
        mask = mask & masks.documents(self.cu_q, self.cu_kv)
        options = {"backend": "native", **options}
        return undivided.attention(self.q, self.k, self.v, layout="thd", mask=mask, pages=self.pages, **options)

    def alone(self, n: int, mask: Mask, **options: Any) -> Tensor:
        """The rows of sequence n, from a call of its own."""
        q = self.q[self.cu_q[n] : self.cu_q[n + 1]].unsqueeze(0)
        k, v, pages, keys = self.k, self.v, None, self.sizes[n][1]
        if self.pages is not None:
            pages, mask = self.pages[n : n + 1], mask & masks.lengths([keys])
        else:
            k, v = (t[self.cu_kv[n] : self.cu_kv[n + 1]].unsqueeze(0) for t in (k, v))
        return undivided.attention(q, k, v, layout="bshd", mask=mask, pages=pages, backend="native", **options)[0]


@DTYPES
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("pack", PACKS)
def test_a_pack_equals_the_reference(pack: str, mask: str, paged: bool, dtype: torch.dtype) -> None:
    found = Pack(PACKS[pack], dtype, paged)
    wanted = found.run(MASKS[mask], backend="reference")
    assert apart(found.run(MASKS[mask]), wanted.double()) < 2 * ALLOWED[dtype]


@DTYPES
@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_sequence_of_a_mixed_pack_is_near_the_same_sequence_alone(mask: str, paged: bool, dtype: torch.dtype) -> None:
    pack = Pack(PACKS["mixed"], dtype, paged)
    out = pack.run(MASKS[mask])
    for n, (rows, _) in enumerate(pack.sizes):
        if rows:
            wanted = pack.alone(n, MASKS[mask])
            assert apart(out[pack.cu_q[n] : pack.cu_q[n + 1]], wanted.double()) < 2 * ALLOWED[dtype]


@DTYPES
def test_a_sequence_that_decodes_or_prefills_has_its_own_bits(dtype: torch.dtype) -> None:
    """Whatever else is in the pack, and in which order, if its keys are too few to be split."""
    sizes = PACKS["mixed"]
    whole = Pack(sizes, dtype, paged=True)
    out = whole.run(MASKS["causal"])
    for n in (2, 6):  # prefill
        assert torch.equal(out[whole.cu_q[n] : whole.cu_q[n + 1]], whole.alone(n, MASKS["causal"]))


@DTYPES
@pytest.mark.parametrize(
    ("batch", "rows", "heads", "kv_heads", "keys"),
    [
        (32, 8, 4, 1, 2048),
        (8, 1, 16, 1, 1024),
        (16, 2, 7, 1, 1024),
        (64, 1, 4, 1, 40),
        (32, 5, 4, 1, 40),
        (4, 1, 4, 1, 200),
        (32, 12, 4, 4, 16),
    ],
    ids=[
        "blocks-of-rows",
        "a-panel-of-rows",
        "fewer-rows-than-a-panel",
        "one-row-over-few-keys",
        "few-rows-and-keys",
        "no-more-rows-in-all-than-are-decoded",
        "small-documents",
    ],
)
def test_a_pack_of_equal_sequences_has_the_bits_of_the_batch(
    batch: int, rows: int, heads: int, kv_heads: int, keys: int, dtype: torch.dtype
) -> None:
    """Both are cut into the same work: a sequence of a pack is not split as if threads had nothing else to do."""
    torch.manual_seed(0)
    q = torch.randn(batch, rows, heads, 16).to(dtype)
    k, v = (torch.randn(batch, keys, kv_heads, 16).to(dtype) for _ in range(2))
    each = undivided.attention(q, k, v, layout="bshd", backend="native")
    mask = masks.documents([n * rows for n in range(batch + 1)], [n * keys for n in range(batch + 1)])
    packed = undivided.attention(*(t.flatten(0, 1) for t in (q, k, v)), layout="thd", mask=mask, backend="native")
    assert torch.equal(packed, each.flatten(0, 1))


@DTYPES
@pytest.mark.parametrize("pack", PACKS)
def test_the_threads_share_a_pack(pack: str, dtype: torch.dtype) -> None:
    found, threads = Pack(PACKS[pack], dtype, paged=True), torch.get_num_threads()
    outs = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outs.append(found.run(MASKS["causal"], return_lse=True))
    finally:
        torch.set_num_threads(threads)
    for out, lse in outs[1:]:
        assert torch.equal(out, outs[0][0])
        assert torch.equal(lse, outs[0][1])


@DTYPES
@pytest.mark.parametrize("options", ["softcap", "sinks", "alibi", "dropout", "bias-free-scale"])
def test_options_reach_every_sequence(options: str, dtype: torch.dtype) -> None:
    given: dict[str, Any] = {
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": torch.linspace(-1, 1, HEADS)},
        "alibi": {"alibi_slopes": torch.linspace(0.1, 1, HEADS)},
        "dropout": {"dropout_p": 0.3, "dropout_seed": 7},
        "bias-free-scale": {"scale": -0.3},
    }[options]
    pack = Pack(PACKS["mixed"], dtype, paged=options != "dropout")
    wanted = pack.run(MASKS["causal"], backend="reference", **given)
    assert apart(pack.run(MASKS["causal"], **given), wanted.double()) < 2 * ALLOWED[dtype]


@DTYPES
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_sequence(value: float, dtype: torch.dtype) -> None:
    """In keys, values and queries of one sequence, and in pages and rows that no sequence has."""
    pack = Pack(PACKS["mixed"], dtype, paged=True)
    clean = pack.run(MASKS["causal"])
    assert pack.pages is not None
    for n, (_, keys) in enumerate(pack.sizes):  # after the last key of each sequence
        for page in range(pack.pages.shape[1]):
            rows = slice(max(keys - page * PAGE, 0), PAGE)
            pack.k[pack.pages[n, page], rows] = pack.v[pack.pages[n, page], rows] = value
    assert torch.equal(pack.run(MASKS["causal"]), clean)
    for n in (0, 2, 10):
        poisoned = Pack(PACKS["mixed"], dtype, paged=True)
        assert poisoned.pages is not None
        first = int(poisoned.pages[n, 0])
        poisoned.k[first] = poisoned.v[first] = value
        out = poisoned.run(MASKS["causal"])
        others = torch.ones(len(out), dtype=torch.bool)
        others[poisoned.cu_q[n] : poisoned.cu_q[n + 1]] = False
        assert torch.equal(out[others], clean[others])
        assert not out[~others].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("level", levels.others())
def test_every_other_level_of_this_machine(level: str) -> None:
    program = (
        "import test_native_packs as t\n"
        "from undivided.kernels import cpu\n"
        f"assert cpu.load().level == {level!r}\n"
        "for dtype in t.ALLOWED:\n"
        "  for pack in t.PACKS:\n"
        "    for mask in t.MASKS:\n"
        "      t.test_a_pack_equals_the_reference(pack, mask, True, dtype)\n"
        "  t.test_the_threads_share_a_pack('mixed', dtype)\n"
        "  t.test_a_sequence_that_decodes_or_prefills_has_its_own_bits(dtype)\n"
        "  t.test_what_is_not_finite_stays_in_its_sequence(t.torch.nan, dtype)\n"
    )
    ran = forked_processes.run(program, environment={"UNDIVIDED_ISA": level})
    assert ran.returncode == 0, ran.stderr
