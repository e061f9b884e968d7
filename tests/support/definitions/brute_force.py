"""Attention by definition: plain loops over (query, key) pairs in float64, written from the rules alone.

It shares no code with the library. A `Places` has the sequence and the position of every row and key, or marks it as
padding. A rule is a function ``(n, i, j) -> bool`` of positions within one sequence, n = kv_len -
q_len of it. `attend` visits every pair; scores, weights and outputs are float64 tensors, so that autograd
differentiates the definition. Sizes must be small: a pair costs tens of microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Place = tuple[int, int] | None  # (sequence, position within it), None: padding
Rule = Callable[[int, int, int], bool]
Condition = Callable[[int, int, int, int], bool]  # (batch row, head, raw row, raw key)


@dataclass(frozen=True)
class Places:
    """rows[b][i] and keys[b][j]: the place of every raw index; n[s]: kv_len - q_len of sequence s."""

    rows: list[list[Place]]
    keys: list[list[Place]]
    n: list[int]


def whole(batch: int, q_len: int, kv_len: int) -> Places:
    """Every batch element is one sequence with the length of the tensors."""
    return padded(batch, q_len, kv_len, [kv_len] * batch, [q_len] * batch)


def padded(
    batch: int,
    q_len: int,
    kv_len: int,
    kv: Sequence[int],
    q: Sequence[int] | None = None,
    kv_start: Sequence[int] | None = None,
    q_start: Sequence[int] | None = None,
) -> Places:
    """Batch elements with real lengths, and starts if the padding is on the left."""
    q = q or [q_len] * batch
    kv_start, q_start = kv_start or [0] * batch, q_start or [0] * batch

    def line(b: int, length: int, start: int, size: int) -> list[Place]:
        return [(b, x - start) if 0 <= x - start < size else None for x in range(length)]

    return Places(
        [line(b, q_len, q_start[b], q[b]) for b in range(batch)],
        [line(b, kv_len, kv_start[b], kv[b]) for b in range(batch)],
        [kv[b] - q[b] for b in range(batch)],
    )


def packed(
    cu_q: Sequence[int],
    cu_kv: Sequence[int] | None = None,
    slots_q: Sequence[int] | None = None,
    slots_kv: Sequence[int] | None = None,
    tokens_q: int | None = None,
    tokens_kv: int | None = None,
) -> Places:
    """Packed documents in a batch of one, each at the start of its slot."""
    slots_kv = slots_kv or (cu_kv if cu_kv is not None else slots_q)
    cu_kv = cu_kv or cu_q
    slots_q, slots_kv = slots_q or cu_q, slots_kv or cu_kv

    def line(cu: Sequence[int], slots: Sequence[int], tokens: int | None) -> list[Place]:
        places: list[Place] = [None] * (slots[-1] if tokens is None else tokens)
        for s in range(len(cu) - 1):
            for x in range(cu[s + 1] - cu[s]):
                places[slots[s] + x] = (s, x)
        return places

    n = [(cu_kv[s + 1] - cu_kv[s]) - (cu_q[s + 1] - cu_q[s]) for s in range(len(cu_q) - 1)]
    return Places([line(cu_q, slots_q, tokens_q)], [line(cu_kv, slots_kv, tokens_kv)], n)


def shift(align: str, n: int) -> int:
    """d: 0 for top-left, n for bottom-right."""
    return n if align == "bottom_right" else 0


def causal(align: str = "top_left") -> Rule:
    return lambda n, i, j: j <= i + shift(align, n)


def window(left: int | None, right: int | None, align: str = "top_left") -> Rule:
    def rule(n: int, i: int, j: int) -> bool:
        middle = i + shift(align, n)
        return (left is None or middle - left <= j) and (right is None or j <= middle + right)

    return rule


def prefix(length: int) -> Rule:
    return lambda n, i, j: j < length


def chunks(size: int, align: str = "top_left") -> Rule:
    return lambda n, i, j: (i + shift(align, n)) // size == j // size


def either(*rules: Rule) -> Rule:
    return lambda n, i, j: any(rule(n, i, j) for rule in rules)


def allowed(places: Places, rules: Sequence[Rule] = (), condition: Condition | None = None) -> Condition:
    """Whether a pair of raw indices is allowed: real tokens of one sequence, by every rule and the condition."""

    def pair(b: int, h: int, i: int, j: int) -> bool:
        row, key = places.rows[b][i], places.keys[b][j]
        if row is None or key is None or row[0] != key[0]:
            return False
        if condition is not None and not condition(b, h, i, j):
            return False
        return all(rule(places.n[row[0]], row[1], key[1]) for rule in rules)

    return pair


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: Places | None = None,
    rules: Sequence[Rule] = (),
    *,
    condition: Condition | None = None,
    align: str = "top_left",
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """(out [B, H, Sq, Dv], lse [B, H, Sq]) of q [B, H, Sq, Dk], k [B, N, Sk, Dk], v [B, N, Sk, Dv], all float64."""
    (batch, heads, q_len, head_dim), (kv_heads, kv_len) = q.shape, k.shape[1:3]
    places = places or whole(batch, q_len, kv_len)
    may = allowed(places, rules, condition)
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    if bias is not None:
        bias = bias.expand(batch, heads, q_len, kv_len)
    outs, lses = [], []
    for b in range(batch):
        for h in range(heads):
            group = h // (heads // kv_heads)
            for i in range(q_len):
                keys = [j for j in range(kv_len) if may(b, h, i, j)]
                if bias is not None:
                    keys = [j for j in keys if bias[b, h, i, j] != -math.inf]
                if not keys:
                    outs.append(v.new_zeros(v.shape[-1]))
                    lses.append(v.new_full((), -math.inf))
                    continue
                row = places.rows[b][i]
                assert row is not None
                scores = []
                for j in keys:
                    score = scale * torch.dot(q[b, h, i], k[b, group, j])
                    if softcap is not None:
                        score = softcap * torch.tanh(score / softcap)
                    if slopes is not None:
                        slope = slopes[h] if slopes.dim() == 1 else slopes[row[0], h]
                        key = places.keys[b][j]
                        assert key is not None
                        score = score - slope * abs(row[1] + shift(align, places.n[row[0]]) - key[1])
                    if bias is not None:
                        score = score + bias[b, h, i, j]
                    scores.append(score)
                line = torch.stack(scores)
                lse = torch.logsumexp(line, 0)
                whole_sum = lse if sinks is None else torch.logaddexp(lse, sinks[h])
                weights = torch.exp(line - whole_sum)
                if dropout_p:
                    factors = [survival(seed, row[0], h, row[1], places.keys[b][j][1], dropout_p) for j in keys]  # type: ignore[index]
                    weights = weights * torch.tensor(factors, dtype=torch.float64)
                outs.append(
                    sum((w * v[b, group, j] for w, j in zip(weights, keys, strict=True)), v.new_zeros(v.shape[-1]))
                )
                lses.append(lse)
    out = torch.stack(outs).reshape(batch, heads, q_len, v.shape[-1])
    return out, torch.stack(lses).reshape(batch, heads, q_len)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int) -> tuple[int, int, int, int]:
    """Philox4x32 (Salmon et al. 2011) on Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        one, two = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = two >> 32 ^ c1 ^ k0, two & 0xFFFFFFFF, one >> 32 ^ c3 ^ k1, one & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def survival(seed: int, sequence: int, head: int, i: int, j: int, dropout_p: float) -> float:
    """The dropout factor of one pair: 0, or the scale of kept weights."""
    words = philox4x32((j // 8, i, head, sequence), (seed & 0xFFFFFFFF, seed >> 32), rounds=7)
    draw = words[j % 8 // 2] >> 16 * (j % 2) & 0xFFFF
    limit = round(65536 * dropout_p)
    return 0.0 if draw < limit else 1 / (1 - limit / 65536)


def error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, in float64; -inf must be at the same places."""
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape, (got.shape, want.shape)
    hidden = want == -math.inf
    assert torch.equal(got == -math.inf, hidden), "-inf stands elsewhere"
    got, want = got[~hidden], want[~hidden]
    assert bool(got.isfinite().all()), "not finite"
    size = float(want.norm())
    difference = float((got - want).norm())
    return difference / size if size else difference
