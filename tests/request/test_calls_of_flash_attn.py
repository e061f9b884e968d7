"""What docs/how-to/coming-from-flash-attn.md says about the arguments of flash-attn holds, and it names each of them.

The names are those of flash-attn 2.8.4, of version 3 (its folder hopper) and of version 4 (flash_attn.cute).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import undivided
from undivided import masks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "coming-from-flash-attn.md"
DENSE_AND_VARLEN = """
q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap
alibi_slopes deterministic return_attn_probs block_table
seqused_q seqused_k qv q_descale k_descale v_descale attention_chunk num_splits pack_gqa sm_margin
min_seqlen_k gather_kv_indices page_table learnable_sink score_mod score_mod_bwd mask_mod aux_tensors aux_scalars
block_sparse_tensors return_lse scheduler_metadata seqlen_k_per_split disable_scheduler_metadata
""".split()
WITH_CACHE = """
q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale causal
window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse
qv page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens attention_chunk scheduler_metadata pack_gqa
sm_margin
""".split()


@pytest.mark.parametrize(
    ("heading", "arguments"),
    [
        ("flash_attn_func and flash_attn_varlen_func, argument by argument", DENSE_AND_VARLEN),
        ("flash_attn_with_kvcache", WITH_CACHE),
    ],
)
def test_the_page_names_every_argument(heading: str, arguments: list[str]) -> None:
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`(\w+)(?:=[^`]*)?`", rows))
    assert [name for name in arguments if name not in named] == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [("q_descale", "queries are not quantised"), ("k_descale", "k_scale=, fp32"), ("v_descale", "v_scale=, fp32")],
)
def test_factors_of_fp8_have_hints(name: str, hint: str) -> None:
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(undivided.InputError, match=hint):
        undivided.attention(q, q, q, layout="bshd", **{name: torch.ones(1, 2)})  # type: ignore[arg-type]


def dense_attention(scores: torch.Tensor, allowed: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax over the allowed keys of [B, H, Sq, Sk], times values [B, Sk, H, D]."""
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v)


def test_scores_from_the_values_are_wider_queries_and_keys() -> None:
    """``qv``: scores q k^T + qv v^T, scaled by 1/sqrt of both sizes together."""
    q, qv = torch.randn(1, 5, 4, 16), torch.randn(1, 5, 4, 32)
    k, v = torch.randn(1, 7, 4, 16), torch.randn(1, 7, 4, 32)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) + torch.einsum("bqhd,bkhd->bhqk", qv, v)
    expected = dense_attention(scores / (16 + 32) ** 0.5, torch.ones(5, 7, dtype=torch.bool).tril(7 - 5), v)
    wide = torch.cat((q, qv), -1), torch.cat((k, v), -1)
    out = undivided.attention(*wide, v, layout="bshd", mask=masks.causal("bottom_right"))
    torch.testing.assert_close(out, expected)


def test_gathered_keys_are_blocks_of_one_key() -> None:
    """``gather_kv_indices`` [B, S, n]; an entry of -1 is no key."""
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 9, 4, 16), torch.randn(2, 9, 4, 16)
    indices = torch.tensor([[[0, 8], [3, -1], [5, 2]], [[1, -1], [7, 6], [0, 4]]])
    allowed = torch.zeros(2, 1, 3, 10, dtype=torch.bool).scatter_(-1, indices[:, None] % 10, True)[..., :9]
    expected = dense_attention(torch.einsum("bqhd,bkhd->bhqk", q, k) / 4, allowed, v)
    out = undivided.attention(q, k, v, layout="bshd", mask=masks.blocks(1, 1, indices[:, None]))
    torch.testing.assert_close(out, expected)


def test_the_rows_of_lse_are_those_of_flash_attn() -> None:
    """[B, H, S] or [H, T], with -inf for a query without any key."""
    q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 16)
    out, lse = undivided.attention(q, k, v, layout="bshd", mask=masks.causal("bottom_right"), return_lse=True)
    assert lse.shape == (2, 4, 5)
    assert (lse == -torch.inf).sum(-1).tolist() == [[2] * 4] * 2
    assert not out[:, :2].any()
