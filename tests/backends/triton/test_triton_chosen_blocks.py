"""Chosen key blocks of the `triton` backend, under Triton's interpreter: only their tiles are visited, and NaN in the
other blocks and in memory after the last key reaches nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks, quantization
from undivided.backends.triton import chosen, forward
from undivided.kernels.triton import config

pytestmark = pytest.mark.skipif(not config.is_interpreted(), reason="needs Triton's interpreter")


class Visits:
    """The key tiles that launches visit, and the sequences of each launch."""

    def __init__(self) -> None:
        self.tiles, self.sequences = 0, list[int]()

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> Visits:
        launch = forward.launch

        def counted(kernel: Any, grid: Any, facts: Any, tensors: dict[str, Tensor], *more: Any) -> Any:
            if "tiles" in tensors:
                runs = tensors["tiles"].expand(grid[2], -1, -1).long()
                self.tiles += int((runs[..., 3] - runs[..., 0] + runs[..., 7] - runs[..., 4]).sum())
                self.sequences.append(grid[2])
            return launch(kernel, grid, facts, tensors, *more)

        monkeypatch.setattr(forward, "launch", counted)
        return self


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> Visits:
    return Visits().watch(monkeypatch)


def agree(q: Tensor, k: Tensor, v: Tensor, clean: tuple[Tensor, Tensor] | None = None, **options: Any) -> None:
    """out and lse are those of the reference, which gets `clean` keys and values in place of k and v."""
    out, lse = undivided.attention(q, k, v, backend="triton", return_lse=True, **options)
    expected = undivided.attention(q, *(clean or (k, v)), backend="reference", return_lse=True, **options)
    assert out.stride() == torch.empty(out.shape).stride()
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, expected[1], rtol=1e-4, atol=1e-4)


def tokens(*lengths: int, heads: tuple[int, int] = (4, 2), batch: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    q_len, kv_len = lengths
    return [torch.randn(batch, s, h, 16) for s, h in ((q_len, heads[0]), (kv_len, heads[1]), (kv_len, heads[1]))]


def pools(pages: int, size: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 1, 8, 32), *torch.randn(2, 2 * pages, size, 2, 32)]


# unsorted, repeated and -1 entries; tables for all heads, for each key head, for each head
TABLES: dict[str, list[Any]] = {
    "one": [[[3, 0, -1, 3]], [[-1, -1, 2, 1]]],
    "key heads": [[[3, 0, -1], [2, 2, 2]], [[-1, -1, -1], [0, 1, 3]]],
    "heads": [[[h % 4, -1] for h in range(8)], [[3, h % 4] for h in range(8)]],
}


class TestPages:
    """Decoding over chosen pages of a cache."""

    @pytest.mark.parametrize("page", [2, 8, 12, 16])
    @pytest.mark.parametrize("table", TABLES)
    def test_pages_of_any_size(self, page: int, table: str, visits: Visits) -> None:
        mask = masks.lengths([60, 33]) & masks.pages(TABLES[table], page)
        pages = torch.randperm(16).view(2, 8).int()
        agree(*pools(8, 8), layout="bshd", mask=mask, pages=pages)
        assert visits.sequences == [{"one": 2, "key heads": 4, "heads": 16}[table]]

    @pytest.mark.parametrize("format", ["int8", "int4", "fp8_e4m3", "fp8_e5m2"])
    def test_quantised_keys(self, format: quantization.Format, visits: Visits) -> None:
        q, k, v = pools(8, 8)
        (k, k_scale), (v, v_scale) = (quantization.quantize(x, format) for x in (k, v))
        mask = masks.lengths([60, 33]) & masks.pages(TABLES["key heads"], 8)
        pages = torch.randperm(16).view(2, 8).int()
        agree(q, k, v, layout="bshd", mask=mask, pages=pages, k_scale=k_scale, v_scale=v_scale)
        assert visits.sequences == [4]

    @pytest.mark.parametrize("options", [{"softcap": 2.0}, {"scale": -0.3}, {"softcap": 1.0, "scale": 2.0}])
    def test_scale_and_softcap(self, options: dict[str, float], visits: Visits) -> None:
        mask = masks.lengths([60, 33]) & masks.pages(TABLES["one"], 8)
        agree(*pools(8, 8), layout="bshd", mask=mask, pages=torch.arange(16).view(2, 8).int(), **options)
        assert visits.sequences == [2]

    def test_packed_sequences(self, visits: Visits) -> None:
        """With the length of the longest, which a call on a GPU cannot read."""
        q, k, v = pools(8, 8)
        mask = masks.documents([0, 1, 2], [0, 60, 93], max_q=1, max_kv=60) & masks.pages(TABLES["one"], 8)
        agree(q[:, 0], k, v, layout="thd", mask=mask, pages=torch.randperm(16).view(2, 8).int())
        assert visits.sequences == [2]

    def test_chosen_tiles_alone_are_visited(self, visits: Visits) -> None:
        """2 of 16 pages of 64 keys, in two tiles each or fewer; NaN is in all others and after the lengths."""
        q, k, v = (torch.randn(2, 1, 8, 16), *torch.randn(2, 32, 64, 2, 16))
        table, pages = torch.tensor([[1, 5], [15, 0]]), torch.randperm(32).view(2, 16).int()
        poisoned = [torch.full_like(x, torch.nan) for x in (k, v)]
        for b, row in enumerate(table.tolist()):
            for page in row:
                used = 64 if page < 15 else 40
                for x, good in zip(poisoned, (k, v), strict=True):
                    x[pages[b, page], :used] = good[pages[b, page], :used]
        mask = masks.lengths([1024, 1000]) & masks.pages(table, 64)
        agree(q, *poisoned, (k, v), layout="bshd", mask=mask, pages=pages)
        tile = config.INTERPRETED.block_n
        assert visits.tiles == 2 * 2 * 64 // tile - (64 - 40) // tile


MASKS: dict[str, tuple[int, int, Callable[[], Any]]] = {  # a table with a query block per row
    "causal": (37, 37, masks.causal),
    "bottom-right": (20, 45, lambda: masks.causal("bottom_right")),
    "window-and-prefix": (33, 33, lambda: masks.window(9, 0) | masks.prefix(3)),
    "two-sides": (33, 40, lambda: masks.window(5, 12, "top_left")),
    "lengths": (20, 45, lambda: masks.lengths([45, 0], [20, 7])),
    "starts": (20, 45, lambda: masks.lengths([30, 21], [13, 9], [7, 15], [7, 2]) & masks.causal("bottom_right")),
}


class TestBlocks:
    @pytest.mark.parametrize("q_block", [1, 3, 16, 40])
    @pytest.mark.parametrize("name", MASKS)
    def test_query_blocks_of_any_size(self, name: str, q_block: int, visits: Visits) -> None:
        q_len, kv_len, mask = MASKS[name]
        blocks = -(-q_len // q_block)
        table = torch.randint(-1, 5, (2, 2, blocks, 3), generator=torch.Generator().manual_seed(1))
        table = table.clamp(max=-(-kv_len // 10) - 1)
        agree(*tokens(q_len, kv_len), layout="bshd", mask=masks.blocks(q_block, 10, table) & mask())
        assert len(visits.sequences) == 1
        assert visits.sequences[0] == 2 * 2 * blocks

    @pytest.mark.parametrize("name", MASKS)
    def test_nan_in_keys_that_no_row_sees(self, name: str) -> None:
        """The last block ends after the memory of the keys, so that nothing there may be read either."""
        q_len, kv_len, mask = MASKS[name]
        q, k, v = tokens(q_len, kv_len)
        table = torch.randint(-1, 4, (2, 2, -(-q_len // 8), 2), generator=torch.Generator().manual_seed(1))
        mask = masks.blocks(8, 10, table) & mask()
        seen = mask.to_dense(batch=2, heads=4, q_len=q_len, kv_len=kv_len).any(2).unflatten(1, (2, 2)).any(2).mT
        hidden = ~seen.expand(2, kv_len, 2)[..., None]
        poisoned = [torch.cat([x.masked_fill(hidden, torch.nan), torch.full_like(x, torch.nan)], 1) for x in (k, v)]
        agree(q, *(x[:, :kv_len] for x in poisoned), (k, v), layout="bshd", mask=mask)

    @pytest.mark.parametrize("layout", ["bhsd", "sbhd", "thd"])
    def test_layouts(self, layout: Any, visits: Visits) -> None:
        q, k, v = tokens(32, 48, batch=1 if layout == "thd" else 2)
        mask = masks.blocks(8, 16, [[0, 2], [1, 1], [2, 0], [-1, -1]])
        if layout == "thd":
            mask = mask & masks.documents([0, 20, 32], [0, 24, 48], max_q=20)
        axes = {"bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3), "thd": (0, 1, 2, 3)}[layout]
        given = [x.permute(axes).contiguous() for x in (q, k, v)]
        agree(*(x[0] if layout == "thd" else x for x in given), layout=layout, mask=mask)
        assert visits.sequences == [2 * (3 if layout == "thd" else 4)]

    def test_the_number_of_visited_tiles_is_that_of_the_chosen_blocks(self, visits: Visits) -> None:
        """One block of 64 keys of 16 for each of 8 query blocks."""
        tile = config.INTERPRETED.block_n
        q, k, v = tokens(128, 1024, batch=1)
        agree(q, k, v, layout="bshd", mask=masks.blocks(16, 64, torch.arange(8)[:, None] * 2))
        assert visits.sequences == [8]
        assert visits.tiles == 8 * 64 // tile

    def test_more_sequences_than_a_grid_has_are_launched_in_parts(
        self, visits: Visits, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chosen, "MAX_SEQUENCES", 3)
        mask = masks.blocks(8, 10, torch.randint(-1, 4, (2, 1, 4, 2))) & masks.lengths([40, 23])
        for _ in range(2):
            agree(*tokens(32, 40), layout="bshd", mask=mask)
        assert visits.sequences == [3, 3, 2] * 2

    def test_gradients_are_those_of_the_reference(self) -> None:
        grads = []
        for backend in ("triton", "reference"):
            given = [x.requires_grad_() for x in tokens(33, 40)]
            mask = masks.blocks(8, 10, [[0], [1], [3], [2], [0]])
            out, lse = undivided.attention(*given, layout="bshd", mask=mask, backend=backend, return_lse=True)
            grads.append(torch.autograd.grad(out.square().sum() + lse.sin().sum(), given))
        for found, expected in zip(*grads, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class TestEvaluatedForEveryPair:
    """Calls whose virtual sequences would be wrong, or larger than the call."""

    def note(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
        (note,) = undivided.explain(q, k, v, backend="triton", **options).notes
        return note

    def test_explain_says_which(self) -> None:
        q, k, v = tokens(32, 40)
        mask = masks.blocks(8, 10, [[0], [1], [3], [2]])
        assert self.note(q, k, v, layout="bshd", mask=mask) == "only the chosen key blocks are computed, in the forward"
        with_sinks = self.note(q, k, v, layout="bshd", mask=mask, sinks=torch.zeros(4))
        assert with_sinks == "the block table is evaluated for every pair: sinks"

    def test_sinks(self, visits: Visits) -> None:
        mask = masks.blocks(8, 10, [[0], [1], [3], [2]])
        agree(*tokens(32, 40), layout="bshd", mask=mask, sinks=torch.randn(4))
        assert visits.sequences == [2]

    def test_keys_and_values_of_different_strides(self, visits: Visits) -> None:
        q, k, v = tokens(32, 40)
        mask = masks.blocks(8, 10, [[0], [1], [3], [2]])
        k = k.transpose(1, 2).contiguous().transpose(1, 2)
        agree(q, k, v, layout="bshd", mask=mask)
        assert visits.sequences == [2]
        assert "other conditions" in self.note(q, k, v, layout="bshd", mask=mask)

    def test_documents_of_unknown_length_whose_rows_would_be_mostly_padding(self, visits: Visits) -> None:
        q, k, v = (x[0] for x in tokens(40, 80, batch=1))
        cu = torch.arange(0, 41, 5)
        mask = masks.documents(cu, 2 * cu, max_q=40, max_kv=80) & masks.pages([1, 0], 4)
        agree(q, k, v, layout="thd", mask=mask)
        assert visits.sequences == [1]

    def test_sequences_that_start_inside_a_page(self, visits: Visits) -> None:
        mask = masks.lengths([57, 33], None, [3, 0]) & masks.pages([0, 2], 8)
        agree(*pools(8, 8), layout="bshd", mask=mask, pages=torch.arange(16).view(2, 8).int())
        assert visits.sequences == [2]
        assert visits.tiles > 2
