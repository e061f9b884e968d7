"""Problems that users reported with other attention libraries, each as a test of this library."""

from __future__ import annotations

import itertools
from typing import Any

import brute_force
import pytest
import torch
from torch import Tensor

import undivided
from undivided import DotProductAttention, InputError, Machine, masks

CU = [0, 300, 1100, 2048]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def packed_documents(dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """2048 tokens of three documents, 16 heads of 64, and their offsets."""
    q, k, v = (torch.randn(2048, 16, 64).to(dtype) for _ in range(3))
    return q, k, v, torch.tensor(CU, dtype=torch.int32)


def able_backends(*tensors: Tensor, **call: Any) -> list[str]:
    """Every backend that can run this call on this machine."""
    names = [row.name for row in undivided.backends()]
    return [name for name in names if undivided.explain(*tensors, **call, backend=name).chosen is not None]


def test_packed_half_precision_documents_are_the_same_on_every_backend() -> None:
    """TransformerEngine's documented way to separate documents: thd, a padding type, int32 cu_seqlens."""
    q, k, v, cu_seqlens = packed_documents()
    mask = masks.documents(cu_seqlens)
    slow = ("flex", "triton")  # one compiles for minutes, the other's interpreter runs for minutes
    names = [name for name in able_backends(q, k, v, layout="thd", mask=mask) if name not in slow]
    assert len(names) >= 2, names
    wide = [t.double() for t in (q, k, v)]
    want = torch.cat(
        [
            undivided.attention(*(t[None, a:b] for t in wide), layout="bshd", backend="reference")[0]
            for a, b in itertools.pairwise(CU)
        ]
    ).flatten(-2)
    for name in names:
        attention = DotProductAttention(16, 64, qkv_format="thd", attn_mask_type="padding", backend=name)
        out = attention(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
        assert out.dtype == torch.float16
        assert brute_force.error(out, want) < 1e-3, name  # fp16 has 11 bits: rounding alone is 2e-4


def test_the_same_documents_as_one_dense_sequence_give_another_result() -> None:
    """There is no error message: every document except the first attends to those before it."""
    q, k, v, cu_seqlens = packed_documents(torch.float32)
    apart = DotProductAttention(16, 64, qkv_format="thd", attn_mask_type="padding_causal")
    as_one = DotProductAttention(16, 64, qkv_format="sbhd", attn_mask_type="causal")
    right = apart(q, k, v, cu_seqlens_q=cu_seqlens)
    leaked = as_one(*(t[:, None] for t in (q, k, v)))[:, 0]
    torch.testing.assert_close(right[:300], leaked[:300], rtol=1e-4, atol=1e-5)
    assert brute_force.error(leaked[300:], right[300:]) > 0.3


@pytest.mark.parametrize("kind", ["causal", "no_mask", "padding_causal", "padding"])
def test_document_offsets_with_a_dense_batch_of_one_are_an_error_that_says_thd(kind: str) -> None:
    """sbhd, batch 1, cu_seqlens [0, 300, 1100, 2048]: other libraries are right by accident, or crash on the device."""
    q, k, v, cu_seqlens = packed_documents(torch.float32)
    attention = DotProductAttention(16, 64, qkv_format="sbhd", attn_mask_type=kind)
    with pytest.raises(InputError, match="qkv_format='thd'") as caught:
        attention(*(t[:, None] for t in (q, k, v)), cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    assert caught.value.argument == "cu_seqlens_q"


def test_lengths_of_a_dense_batch_come_from_offsets_with_a_padding_type() -> None:
    q, k, v = (torch.randn(9, 2, 4, 8) for _ in range(3))
    attention = DotProductAttention(4, 8, qkv_format="sbhd", attn_mask_type="padding_causal")
    out = attention(q, k, v, cu_seqlens_q=torch.tensor([0, 4, 13], dtype=torch.int32))
    alone = DotProductAttention(4, 8, qkv_format="sbhd")
    torch.testing.assert_close(out[:4, :1], alone(*(t[:4, :1] for t in (q, k, v))))
    torch.testing.assert_close(out[:, 1:], alone(*(t[:, 1:] for t in (q, k, v))))
    assert not out[4:, 0].any()


def test_a_batch_first_tensor_in_a_sequence_first_layer_is_detected_by_the_offsets() -> None:
    """[batch, seq, ..] given to a layer of format sbhd runs with the two swapped, unless something contradicts it."""
    x = torch.randn(2, 48, 4, 8)
    attention = DotProductAttention(4, 8, qkv_format="sbhd", attn_mask_type="padding")
    with pytest.raises(InputError, match=r"would fit qkv_format='bshd'"):
        attention(x, x, x, cu_seqlens_q=torch.tensor([0, 40, 88]))
    with pytest.raises(InputError, match=r"HINT: .*'sbhd' if your batch size is 48, 'bshd' if it is 2"):
        DotProductAttention(4, 8)(x, x, x)


def test_a_length_that_old_cudnn_refuses_is_explained_before_a_run() -> None:
    """[48, 16534, 18, 128] in bf16 on an A100: 16534 is 22 more than a multiple of 64, which cuDNN 8.9.7 needs."""
    q = torch.empty(48, 16534, 18, 128, dtype=torch.bfloat16, device="meta")

    def on(cudnn: str) -> undivided.Decision:
        packages = {"cudnn_frontend": "1.18.0"}
        machine = Machine(device="cuda", compute_capability=(8, 0), cudnn=cudnn, packages=packages)
        return undivided.explain(q, q, q, layout="bshd", mask=masks.causal(), machine=machine)

    old = on("8.9.7")
    for name in ("cudnn", "torch_cudnn"):
        for side in ("query", "key"):
            reason = f"{side} length 16534 is not a multiple of 64 (cuDNN 8.9.7; any length from 9.0)"
            assert reason in old.reasons[name]
            assert reason in str(old)
    assert old.chosen is not None, "another kernel runs it, and the table says which"
    assert old.chosen.family != "math"
    for newer in ("9.1.0", "9.10.2"):
        assert not [r for reasons in on(newer).reasons.values() for r in reasons if "multiple of 64" in r]


@pytest.mark.parametrize("window", [None, (5, 0)])
def test_prefill_decoding_and_chunked_prefill_equal_the_full_pass(window: tuple[int, int] | None) -> None:
    """Causal for unequal lengths: the new queries are the last ones, which is bottom-right; top-left is wrong,
    silently."""
    length, heads, groups = 24, 8, 2
    q, k, v = (torch.randn(2, length, n, 16) for n in (heads, groups, groups))
    attention = DotProductAttention(
        heads, 16, groups, qkv_format="bshd", attn_mask_type="causal_bottom_right", window_size=window
    )
    full = attention(q, k, v)
    for cuts in ([0, 24], [0, 10, *range(11, 25)], [0, 7, 8, 20, 24], list(range(25))):
        parts = [attention(q[:, a:b], k[:, :b], v[:, :b]) for a, b in itertools.pairwise(cuts)]
        torch.testing.assert_close(torch.cat(parts, 1), full)
    top_left = attention(q[:, 7:8], k[:, :8], v[:, :8], attn_mask_type="causal")
    assert brute_force.error(top_left, full[:, 7:8]) > 0.3


def test_chunked_prefill_of_sequences_at_different_places() -> None:
    """Two sequences, 6 and 3 tokens in the cache, 4 and 2 new ones: each diagonal ends in its own corner."""
    old, new = torch.tensor([6, 3]), torch.tensor([4, 2])
    total = old + new
    q, k, v = (torch.randn(2, 10, 4, 8) for _ in range(3))
    full = DotProductAttention(4, 8, qkv_format="bshd")(q, k, v)
    chunk = torch.stack(
        [torch.nn.functional.pad(q[b, old[b] : total[b]], (0, 0, 0, 0, 0, int(4 - new[b]))) for b in range(2)]
    )
    attention = DotProductAttention(
        4, 8, qkv_format="bshd", attn_mask_type="padding_causal_bottom_right", attention_type="cross"
    )

    def offsets(lengths: Tensor) -> Tensor:
        return torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()))

    out = attention(chunk, k, v, cu_seqlens_q=offsets(new), cu_seqlens_kv=offsets(total))
    for b in range(2):
        torch.testing.assert_close(out[b, : new[b]], full[b, old[b] : total[b]])
        assert not out[b, new[b] :].any()


def test_llama_3_grouped_heads_are_the_expanded_ones() -> None:
    q = torch.randn(1, 64, 32, 128)
    k, v = (torch.randn(1, 64, 8, 128) for _ in range(2))
    grouped = DotProductAttention(32, 128, num_gqa_groups=8, qkv_format="bshd")(q, k, v)
    expanded = DotProductAttention(32, 128, qkv_format="bshd")(q, *(t.repeat_interleave(4, 2) for t in (k, v)))
    torch.testing.assert_close(grouped, expanded)
    other_order = DotProductAttention(32, 128, qkv_format="bshd")(q, *(t.repeat(1, 1, 4, 1) for t in (k, v)))
    assert not torch.allclose(grouped, other_order), "key head h // 4 serves query head h, not key head h % 8"


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["kernels", "flex"])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (1, 2)])
def test_a_window_has_both_its_ends_on_every_backend(left: int, right: int, compiled: bool) -> None:
    """cuDNN's left edge is exclusive: with `left` unchanged it omits a key of every row, and outputs differ a lot."""
    length = 9
    q, k = (torch.randn(1, length, 2, 16) for _ in range(2))
    v = torch.eye(length)[None, :, None].expand(1, length, 2, length).contiguous()
    mask = masks.window(left, right)
    wanted = {(i, j) for i in range(length) for j in range(length) if i - left <= j <= i + right}
    exclusive = {(i, j) for i, j in wanted if j != i - left}
    assert wanted - exclusive == {(i, i - left) for i in range(left, length)}
    able = able_backends(q, k, v, layout="bshd", mask=mask)
    assert len(able) >= 2, able
    for name in (name for name in able if (name == "flex") == compiled):
        out = undivided.attention(q, k, v, layout="bshd", mask=mask, backend=name)
        assert {(int(i), int(j)) for i, j in (out[0, :, 0] > 0).nonzero()} == wanted, name
    wide = torch.randn(1, length, 2, 16)
    inclusive = undivided.attention(q, k, wide, layout="bshd", mask=mask)
    narrower = masks.window(left - 1, right) if left else mask & masks.dense(~torch.eye(length, dtype=torch.bool))
    off_by_one = undivided.attention(q, k, wide, layout="bshd", mask=narrower)
    assert brute_force.error(off_by_one, inclusive) > 0.1
