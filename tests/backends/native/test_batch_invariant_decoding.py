"""batch_invariant=True: rows that decode have the bits of their rows in a prefill, with every kind of mask, format of
keys and values, number of rows, page size, level and number of threads."""

from __future__ import annotations

from typing import Any

import levels
import pytest
import torch
from native_oracle import ALLOWED, apart, needs_library
from torch import Tensor

import undivided
from undivided import masks
from undivided.masks import Mask
from undivided.quantization import FORMATS, Format, quantize

pytestmark = needs_library

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(4, 2, 64, 64), (2, 2, 32, 96), (8, 1, 128, 32), (6, 2, 288, 64)]
CAUSAL = masks.causal("bottom_right")
MASKS: dict[str, Mask] = {
    "causal": CAUSAL,
    "window": masks.window(40, 0, "bottom_right"),
    "window and global keys": masks.window(33, 0, "bottom_right") | masks.sinks(5),
    "long window and global keys": masks.window(140, 0, "bottom_right") | masks.sinks(131),
    "chunks": CAUSAL & masks.chunks(48, "bottom_right"),
}
TOKENS = 300
ENDS = [(1, 1), (1, 2), (2, 5), (1, 40), (4, 128), (1, 129), (3, 146), (5, 192), (8, 260), (2, 271), (1, 300),
        (9, 300), (13, 131), (16, 290), (33, 200), (64, 300), (7, 7)]  # fmt: skip
"""New tokens, and the number of keys of the sequence with them."""


class Case:
    """A sequence, and its result in one prefill, [S, H, Dv]."""

    def __init__(self, mask: Mask, dtype: torch.dtype, sizes: tuple[int, int, int, int], format: Format | None = None):
        torch.manual_seed(0)
        heads, kv_heads, qk_dim, v_dim = sizes
        self.mask = mask
        self.q = torch.randn(TOKENS, heads, qk_dim).to(dtype) * 3
        self.k, self.v = torch.randn(TOKENS, kv_heads, qk_dim).to(dtype), torch.randn(TOKENS, kv_heads, v_dim).to(dtype)
        self.scales: dict[str, Any] = {}
        if format is not None:
            (self.k, k_scale), (self.v, v_scale) = quantize(self.k, format), quantize(self.v, format)
            self.scales = {"k_scale": k_scale, "v_scale": v_scale}
        self.options: dict[str, Any] = {"mask": mask, "batch_invariant": True, "backend": "native"}
        scales: dict[str, Any] = {name: scale[None] for name, scale in self.scales.items()}
        self.whole = undivided.attention(
            self.q[None], self.k[None], self.v[None], layout="bshd", **scales, **self.options
        )[0]

    def alone(self, new: int, end: int) -> Tensor:
        """The last tokens of the first ``end``, as a dense call."""
        scales: dict[str, Any] = {name: scale[None, :end] for name, scale in self.scales.items()}
        q, k, v = self.q[None, end - new : end], self.k[None, :end], self.v[None, :end]
        out: Tensor = undivided.attention(q, k, v, layout="bshd", **scales, **self.options)
        return out[0]

    def pages(self, x: Tensor, size: int, order: Tensor) -> Tensor:
        """A pool of pages, those of the sequence in this order; the end of the last one is 0, or NaN if it can be."""
        fill = float("nan") if x.dtype.is_floating_point and x.element_size() > 1 else 0
        padded = torch.full((len(order) * size, *x.shape[1:]), fill, dtype=torch.float32).to(x.dtype)
        pool = torch.empty(len(order), size, *x.shape[1:], dtype=x.dtype)
        if x.element_size() == 1:  # fp8 cannot be indexed
            padded, x, to = padded.view(torch.uint8), x.view(torch.uint8), pool.view(torch.uint8)
        else:
            to = pool
        padded[: len(x)] = x
        to[order] = padded.view(to.shape)
        return pool

    def as_a_pack(self, page_size: int) -> list[Tensor]:
        """All of `ENDS` as sequences of one pack, over the same pages."""
        order = torch.randperm(-(-TOKENS // page_size))
        k, v = self.pages(self.k, page_size, order), self.pages(self.v, page_size, order)
        scales: dict[str, Any] = {name: self.pages(scale, page_size, order) for name, scale in self.scales.items()}
        q_ends, k_ends = [0], [0]
        for new, end in ENDS:
            q_ends.append(q_ends[-1] + new)
            k_ends.append(k_ends[-1] + end)
        q = torch.cat([self.q[end - new : end] for new, end in ENDS])
        options: dict[str, Any] = {**self.options, "mask": self.mask & masks.documents(q_ends, k_ends)}
        table = order.int().expand(len(ENDS), -1).contiguous()
        out: Tensor = undivided.attention(q, k, v, layout="thd", pages=table, **scales, **options)
        return list(out.split([new for new, _ in ENDS]))

    def check(self, results: list[Tensor]) -> None:
        for (new, end), result in zip(ENDS, results, strict=True):
            assert torch.equal(result, self.whole[end - new : end]), (new, end)

    def check_all(self, *page_sizes: int) -> None:
        self.check([self.alone(new, end) for new, end in ENDS])
        for page_size in page_sizes:
            self.check(self.as_a_pack(page_size))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", [None, *FORMATS])
def test_decoded_rows_have_the_bits_of_a_prefill(
    format: Format | None, dtype: torch.dtype, mask: str, sizes: tuple[int, int, int, int]
) -> None:
    Case(MASKS[mask], dtype, sizes, format).check_all(7, 16, 128)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("format", [None, *FORMATS])
@pytest.mark.parametrize("level", levels.parameters())
def test_they_have_them_on_every_level_and_number_of_threads(level: str, format: Format | None, threads: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for mask in ("causal", "window and global keys"):
            with levels.running(level, 1):
                case = Case(MASKS[mask], dtype, (8, 2, 64, 64), format)
            with levels.running(level, threads):
                case.check_all(16)


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"sinks": torch.linspace(-1, 1, 8)}, {"scale": 0.02}], ids=str)
@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_they_have_them_with_every_option(format: Format | None, options: dict[str, Any]) -> None:
    case = Case(MASKS["window and global keys"], torch.bfloat16, (8, 2, 64, 64), format)
    case.options |= options
    scales: dict[str, Any] = {name: scale[None] for name, scale in case.scales.items()}
    case.whole = undivided.attention(case.q[None], case.k[None], case.v[None], layout="bshd", **scales, **case.options)[
        0
    ]
    case.check_all(16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_only_a_later_row_of_a_draft_sees_does_not_reach_the_earlier_ones(dtype: torch.dtype) -> None:
    """The later rows' keys have a weight of 0 in the earlier rows, and 0 * NaN is NaN."""
    case = Case(CAUSAL, dtype, (4, 2, 64, 64))
    clean = case.whole
    case.k[147], case.v[148], case.v[149] = torch.inf, torch.nan, torch.inf
    drafts = case.alone(4, 150)
    assert torch.equal(drafts[0], clean[146])
    for row, end in enumerate((147, 148, 149, 150)):
        assert torch.equal(drafts[row].nan_to_num(7.0), case.alone(1, end)[0].nan_to_num(7.0))
    assert drafts[2].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_scales_that_only_a_later_row_of_a_draft_sees_do_not_reach_the_earlier_ones(
    format: Format, dtype: torch.dtype
) -> None:
    case = Case(CAUSAL, dtype, (4, 2, 64, 64), format)
    clean = case.whole
    case.scales["k_scale"][147], case.scales["v_scale"][148], case.scales["v_scale"][149] = (
        torch.nan,
        torch.nan,
        torch.inf,
    )
    drafts = case.alone(4, 150)
    assert torch.equal(drafts[0], clean[146])
    for row, end in enumerate((147, 148, 149, 150)):
        assert torch.equal(drafts[row].nan_to_num(7.0), case.alone(1, end)[0].nan_to_num(7.0))
    assert drafts[2].isnan().all()


@pytest.mark.parametrize("format", [None, "int8", "int4"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_each_has_the_log_sum_exp_of_its_row_in_a_prefill(tokens: int, format: Format | None) -> None:
    case = Case(MASKS["window and global keys"], torch.bfloat16, (4, 2, 64, 64), format)
    scales: dict[str, Any] = {name: scale[None] for name, scale in case.scales.items()}
    options: dict[str, Any] = {"layout": "bshd", "return_lse": True, **case.options, **scales}
    _, whole = undivided.attention(case.q[None], case.k[None], case.v[None], **options)
    _, lse = undivided.attention(case.q[None, -tokens:], case.k[None], case.v[None], **options)
    assert torch.equal(lse, whole[:, :, -tokens:])


@pytest.mark.parametrize("format", [None, *FORMATS])
def test_the_results_of_decoded_rows_are_right(format: Format | None) -> None:
    case = Case(MASKS["window and global keys"], torch.bfloat16, (8, 2, 64, 64), format)
    scales: dict[str, Any] = {name: scale[None] for name, scale in case.scales.items()}
    k, v = (x[None] if format else x[None].double() for x in (case.k, case.v))
    want = undivided.attention(
        case.q[None, -2:].double(), k, v, layout="bshd", backend="reference", mask=case.mask, **scales
    )
    assert apart(case.alone(2, TOKENS), want[0]) < ALLOWED[torch.bfloat16]
