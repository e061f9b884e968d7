"""Attention over chosen pages of a cache, and options of `attend` that reach the kernel."""

from __future__ import annotations

import pytest
import torch
from native_oracle import needs_library

import undivided
from undivided import PagedKVCache, masks, quantization
from undivided.backends import get, native
from undivided.kernels.triton import config
from undivided.request.normalise import normalise
from undivided.request.request import Request

LENGTHS = (50, 33)
KEEPING = ("native", "triton") if config.is_interpreted() else ("native",)
"""Backends that keep what they found for a mask."""


def filled(layout: str, quantize: str | None = None) -> tuple[PagedKVCache, list[torch.Tensor]]:
    torch.manual_seed(0)
    cache = PagedKVCache(32, 8, 2, 32, batch=2, dtype=torch.float32, layout=layout, quantize=quantize)
    keys = [torch.randn(length, 2, 32) for length in LENGTHS]
    padded = torch.nn.utils.rnn.pad_sequence(keys, batch_first=True)
    new = torch.cat(keys) if layout == "thd" else padded
    cache.append(new, new, lengths=LENGTHS)
    return cache, keys


@pytest.mark.parametrize(("quantize", "tolerance"), [(None, 1e-5), ("int8", 0.03)])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_a_step_over_chosen_pages_is_attention_over_their_keys(
    layout: str, quantize: str | None, tolerance: float
) -> None:
    cache, keys = filled(layout, quantize)
    q = torch.randn(2, 4, 32) if layout == "thd" else torch.randn(2, 1, 4, 32)
    chosen = torch.tensor([[[0, 6], [1, 2]], [[0, 4], [3, -1]]])  # per key head
    out = cache.attend(q, masks.pages(chosen, 8), q_lengths=[1, 1]).view(2, 4, 32)
    for i, key in enumerate(keys):
        for h in range(4):
            pages = [page for page in chosen[i, h // 2].tolist() if page >= 0]
            seen = torch.cat([key[page * 8 : (page + 1) * 8, h // 2] for page in pages])
            weights = (seen @ q.view(2, 4, 32)[i, h] * 32**-0.5).softmax(0)
            torch.testing.assert_close(out[i, h], weights @ seen, rtol=tolerance, atol=tolerance)


def test_a_cache_gives_batch_invariant_results_if_a_call_requests_them() -> None:
    cache, keys = filled("bshd")
    q = torch.randn(2, 1, 4, 32)
    out = cache.attend(q, q_lengths=[1, 1], batch_invariant=True)
    for i, key in enumerate(keys):
        alone = undivided.attention(q[i : i + 1], key[None], key[None], layout="bshd", batch_invariant=True)
        assert torch.equal(out[i : i + 1], alone)


@needs_library
class TestRepeatedCalls:
    """A call keeps what it found for the same mask and block table; the reference does not."""

    pages, chosen = 4, torch.tensor([[[0, 2]], [[1, 3]]], dtype=torch.int32)

    def operands(self, quantize: quantization.Format | None = None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        pool = torch.randn(3, 2 * self.pages, 8, 2, 32)
        table = torch.randperm(2 * self.pages).view(2, self.pages).int()
        k, v = pool[0], pool[1]
        if quantize is None:
            return {"k": k, "v": v}, table
        (k, k_scale), (v, v_scale) = quantization.quantize(k, quantize), quantization.quantize(v, quantize)
        return {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}, table

    def agree(self, operands: dict[str, torch.Tensor], table: torch.Tensor, mask: masks.Mask, **options: float) -> None:
        q = torch.randn(2, 1, 4, 32)
        *outs, expected = (
            undivided.attention(q, **operands, layout="bshd", mask=mask, pages=table, backend=backend, **options)
            for backend in (*KEEPING, "reference")
        )
        for out in outs:
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("quantize", [None, "int8", "int4"])
    def test_other_keys_and_scales_of_the_same_sizes(self, quantize: quantization.Format | None) -> None:
        mask = masks.lengths(torch.tensor([30, 27])) & masks.pages(self.chosen, 8)
        _, table = self.operands()
        for _ in range(3):
            self.agree(self.operands(quantize)[0], table, mask)

    def test_other_options(self) -> None:
        mask = masks.lengths(torch.tensor([30, 27])) & masks.pages(self.chosen, 8)
        operands, table = self.operands()
        for options in ({}, {"scale": 0.7}, {"scale": -0.7}, {"softcap": 1.0}, {"softcap": 3.0}, {}):
            self.agree(operands, table, mask, **options)

    def test_a_request_for_batch_invariance_reaches_the_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mask = masks.lengths(torch.tensor([30, 27])) & masks.pages(self.chosen, 8)
        operands, table = self.operands()
        seen, forward = [], native.Native.forward
        monkeypatch.setattr(native.Native, "forward", lambda *a: seen.append(a[1].problem) or forward(*a))
        for wanted in (False, True, False):
            seen.clear()
            q = torch.randn(2, 1, 4, 32)
            undivided.attention(q, **operands, layout="bshd", mask=mask, pages=table, batch_invariant=wanted)
            assert [problem.batch_invariant for problem in seen] == [wanted, wanted]  # the call, and its sequences

    def test_other_strides(self) -> None:
        mask = masks.lengths(torch.tensor([30, 27])) & masks.pages(self.chosen, 8)
        operands, table = self.operands()
        wide = {name: torch.cat([x, torch.full_like(x, torch.nan)], 2)[:, :, :2] for name, x in operands.items()}
        for given in (operands, wide, operands):
            self.agree(given, table, mask)

    def test_keys_and_values_of_different_strides(self) -> None:
        mask = masks.lengths(torch.tensor([30, 27])) & masks.pages(self.chosen, 8)
        operands, table = self.operands()
        for name in ("k", "v", "k"):
            x = operands[name]
            self.agree({**operands, name: torch.cat([x, torch.full_like(x, torch.nan)], 2)[:, :, :2]}, table, mask)

    def test_other_strides_in_one_call(self) -> None:
        mask = masks.lengths(torch.tensor([30, 27])) & masks.pages(self.chosen, 8)
        operands, table = self.operands()
        request = Request.from_keywords(torch.randn(2, 1, 4, 32), **operands, layout="bshd", mask=mask, pages=table)
        call, tensors = normalise(request)
        wide = [torch.cat([x, torch.full_like(x, torch.nan)], 2)[:, :, :2] for x in operands.values()]
        for backend in map(get, KEEPING):
            outs = [
                backend.forward(call.with_problem(call.problem), tensors._replace(k=k, v=v)).out
                for k, v in (operands.values(), wide)
            ]
            assert torch.equal(*outs), backend

    def test_tables_that_change_in_place(self) -> None:
        chosen = self.chosen.clone()
        mask = masks.lengths(torch.tensor([30, 27])) & masks.pages(chosen, 8)
        operands, table = self.operands()
        self.agree(operands, table, mask)
        table.copy_(table.flip(1))
        self.agree(operands, table, mask)
        chosen.copy_(torch.tensor([[[1, 3]], [[0, 1]]]))
        self.agree(operands, table, mask)
        self.agree(operands, table.clone(), mask)
        with torch.inference_mode():
            for _ in range(2):
                self.agree(operands, torch.randperm(8).view(2, 4).int(), mask)

    def test_blocks_without_a_block_table(self) -> None:
        mask = masks.blocks(8, 8, torch.tensor([[[0, 2], [1, 3]]]))
        for layout in ("bshd", "bhsd", "bshd"):
            for _ in range(2):
                q, k = torch.randn(2, 16, 4, 32), torch.randn(2, 32, 2, 32)
                heads_first = (lambda x: x.transpose(1, 2).contiguous()) if layout == "bhsd" else (lambda x: x)
                q, k = heads_first(q), heads_first(k)
                *outs, expected = (
                    undivided.attention(q, k, k, layout=layout, mask=mask, backend=backend)
                    for backend in (*KEEPING, "reference")
                )
                for out in outs:
                    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
