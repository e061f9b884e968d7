"""Jagged nested tensors in scaled_dot_product_attention: each sequence by itself, without padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import undivided
from undivided import InputError

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

LENGTHS, OTHERS = [5, 17, 0, 64, 1], [7, 3, 4, 64, 2]
ours = undivided.scaled_dot_product_attention


def offsets_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def jagged(values: Tensor, offsets: Tensor) -> Tensor:
    """[B, H, j, D] from tokens [T, H, D]."""
    nested: Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
    return nested.transpose(1, 2)


def tokens(lengths: Sequence[int], heads: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sum(lengths), heads, dim, dtype=dtype, requires_grad=True)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], kv: Sequence[int], **options: Any) -> Tensor:
    """PyTorch's function for each sequence, tokens [T, H, D]."""
    parts = (t.transpose(0, 1).split(list(n), 1) for t, n in ((q, lengths), (k, kv), (v, kv)))
    outs = [
        F.scaled_dot_product_attention(*(t.unsqueeze(0) for t in part), **options)[0]
        for part in zip(*parts, strict=True)
    ]
    return torch.cat(outs, 1).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kv", [LENGTHS, OTHERS], ids=["self", "cross"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=["full", "causal", "scale"])
def test_each_sequence_is_as_alone(options: dict[str, Any], kv: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    leaves = tokens(LENGTHS, 4, 32, dtype), tokens(kv, 2, 32, dtype), tokens(kv, 2, 16, dtype)
    of_keys = offsets_of(kv)
    of_queries = of_keys if kv == LENGTHS else offsets_of(LENGTHS)
    q, k, v = (jagged(t, o) for t, o in zip(leaves, (of_queries, of_keys, of_keys), strict=True))
    out = ours(q, k, v, enable_gqa=True, **options)
    assert out.shape[:2] == (5, 4)
    assert out.shape[2] == q.shape[2]
    expected = one_by_one(*leaves, LENGTHS, kv, enable_gqa=True, **options)
    found = out.transpose(1, 2).values()
    weight = torch.randn_like(expected)
    pairs = [(found, expected)]
    pairs += zip(*(torch.autograd.grad(x, leaves, weight) for x in (found, expected)), strict=True)
    limit = 1e-5 if dtype is torch.float32 else 2e-2
    for got, want in pairs:
        assert (got - want).double().norm() <= limit * want.double().norm()


def test_equal_offsets_are_the_same_sequences() -> None:
    q, k, v = (jagged(tokens(LENGTHS, 2, 8), offsets_of(LENGTHS)) for _ in range(3))
    torch.testing.assert_close(
        ours(q, k, v).transpose(1, 2).values(),
        one_by_one(*(t.transpose(1, 2).values() for t in (q, k, v)), LENGTHS, LENGTHS),
    )


def test_tokens_in_gaps_are_not_read() -> None:
    x = torch.randn(3, 10, 2, 8)
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])
    expected = [row[a : a + n] for row, a, n in zip(x, starts.tolist(), lengths.tolist(), strict=True)]
    hidden = torch.ones(3, 10, dtype=torch.bool)
    for row, a, n in zip(hidden, starts.tolist(), lengths.tolist(), strict=True):
        row[a : a + n] = False
    x[hidden] = math.nan
    nested = torch.nested.narrow(x, 1, starts, lengths, layout=torch.jagged).transpose(1, 2)
    out = ours(nested, nested, nested, is_causal=True)
    assert out.shape == nested.shape
    for got, part in zip(out.unbind(), expected, strict=True):
        part = part.transpose(0, 1)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(part, part, part, is_causal=True))


def test_three_axes_are_one_head() -> None:
    values = torch.randn(sum(LENGTHS), 8)
    nested = torch.nested.nested_tensor_from_jagged(values, offsets_of(LENGTHS))
    out = ours(nested, nested, nested)
    assert out.shape == nested.shape
    one = values.unsqueeze(1)
    torch.testing.assert_close(out.values().unsqueeze(1), one_by_one(one, one, one, LENGTHS, LENGTHS))


def test_jagged_heads_are_pytorchs() -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 6, 8), torch.randn(5, 6, 8)], layout=torch.jagged)
    found, expected = (f(nested, nested, nested) for f in (ours, F.scaled_dot_product_attention))
    assert found.shape == expected.shape
    torch.testing.assert_close(found.values(), expected.values())


def test_dropout_repeats_with_its_seed() -> None:
    q = jagged(tokens(LENGTHS, 2, 8), offsets_of(LENGTHS))
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(ours(q, q, q, dropout_p=0.5).values())
    assert results[0].equal(results[1])
    assert not results[0].equal(results[2])


def test_autocast_casts_the_tokens() -> None:
    q = jagged(tokens(LENGTHS, 2, 8), offsets_of(LENGTHS))
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(q, q, q)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.values().float(), ours(q, q, q).values(), rtol=2e-2, atol=2e-2)


def test_inference_mode() -> None:
    q = jagged(tokens(LENGTHS, 2, 8), offsets_of(LENGTHS))
    with torch.inference_mode():
        out = ours(q, q, q)
    torch.testing.assert_close(out.values().clone(), ours(q, q, q).values())


class Block(nn.Module):
    """Self-attention of jagged hidden states [B, j, C], with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.project(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_of_jagged_states_trains_with_the_replacement(compiled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    values = torch.randn(sum(LENGTHS), 32)
    found: list[Tensor] = []
    with undivided.replace_sdpa() as replaced:
        called = torch.compile(model, backend="aot_eager") if compiled else model
        out = called(torch.nested.nested_tensor_from_jagged(values, offsets_of(LENGTHS))).values()
        found = [out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))]
    assert replaced.calls == 2 or compiled
    total = torch.zeros(())
    outs = []
    for part in values.split(LENGTHS):
        outs.append(model(part.unsqueeze(0))[0])
        total = total + outs[-1].square().sum()
    expected = [torch.cat(outs), *torch.autograd.grad(total, list(model.parameters()))]
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def wrong() -> dict[str, tuple[tuple[Tensor, ...], dict[str, Any], str]]:
    offsets = offsets_of([3, 5])
    q, narrow = (jagged(torch.randn(8, heads, 8), offsets) for heads in (4, 2))
    other = jagged(torch.randn(8, 4, 8), offsets_of([4, 4]))
    three = jagged(torch.randn(8, 4, 8), offsets_of([3, 3, 2]))
    tokens_first = q.transpose(1, 2)
    dense = torch.randn(2, 4, 8, 8)
    return {
        "mask": ((q, q, q), {"attn_mask": torch.zeros(8, 8)}, "attn_mask must be None.*layout='thd'"),
        "dense-key": ((q, dense, q), {}, "key must be jagged.*nested_tensor_from_jagged"),
        "dense-query": ((dense, q, q), {}, "query must be jagged"),
        "not-transposed": ((q, tokens_first, q), {}, r"key must be \[B, H, S, D\].*key.transpose\(1, 2\)"),
        "value-of-other-sequences": ((q, q, other), {}, "value must have the sequences of key"),
        "number-of-sequences": ((q, three, three), {}, r"key must have as many sequences as query \(2\), got 3"),
        "heads": ((q, narrow, narrow), {}, "key must broadcast.*enable_gqa=True"),
        "heads-of-value": (
            (q, narrow, q),
            {"enable_gqa": True},
            r"value must have as many heads as key \(2\).*got 4, query 4",
        ),
        "head-size": (
            (q, jagged(torch.randn(8, 4, 16), offsets), q),
            {},
            r"key must have the head size of query \(8\)",
        ),
        "dtype": ((q, q.double(), q.double()), {}, "key must have the dtype of query"),
    }


@pytest.mark.parametrize("case", wrong())
def test_a_wrong_jagged_tensor_is_named(case: str) -> None:
    tensors, options, message = wrong()[case]
    with pytest.raises(InputError, match=f"(?s){message}"):
        ours(*tensors, **options)
