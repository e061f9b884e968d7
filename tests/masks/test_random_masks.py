"""Random intersections of masks are the intersections of their pairs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mask_pairs import (
    ALIGNS,
    CPU,
    Case,
    Rule,
    agree,
    causal_rule,
    check_order,
    check_rows,
    check_tiles,
    chunks_rule,
    dense_rule,
    either,
    ids_rule,
    prefix_rule,
    sinks_rule,
    window_rule,
)
from torch import Tensor

from undivided import masks
from undivided.masks import FULL, Mask


@dataclass
class Drawn:
    mask: Mask
    rules: list[Rule] = field(default_factory=list)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A call with lengths, documents or neither, and up to four more parts."""
    kind = draw(st.sampled_from(["plain", "lengths", "documents"]))
    batch = 1 if kind == "documents" else draw(st.integers(1, 2))
    q_len, kv_len = draw(st.integers(0, 7)), draw(st.integers(0, 7))
    heads, align = draw(st.integers(1, 2)), draw(st.sampled_from(ALIGNS))
    case = Case(FULL, batch, q_len, kv_len, heads=heads, align=align)
    if kind == "lengths":
        case = with_lengths(draw, case)
    elif kind == "documents":
        case = with_documents(draw, case)
    count = len(case.sequences) or batch
    mask, rules = case.mask, list(case.rules)
    for part in draw(st.lists(st.sampled_from(list(PARTS)), max_size=4)):
        drawn = PARTS[part](draw, case, count)
        mask = mask & drawn.mask if draw(st.booleans()) else drawn.mask & mask
        rules += drawn.rules
    return replace(case, mask=mask, rules=tuple(rules))


def with_lengths(draw: st.DrawFn, case: Case) -> Case:
    def side(limit: int, starts: bool) -> tuple[list[int], list[int]]:
        start = [draw(st.integers(0, limit)) if starts else 0 for _ in range(case.batch)]
        return start, [draw(st.integers(0, limit - one)) for one in start]

    starts = draw(st.booleans())
    kv_start, kv = side(case.kv_len, starts)
    if draw(st.booleans()):
        q_start, q = side(case.q_len, starts)
        mask = masks.lengths(kv, q, kv_start, q_start) if starts else masks.lengths(kv, q)
    else:
        q_start, q = [0] * case.batch, [case.q_len] * case.batch
        mask = masks.lengths(kv, kv_start=kv_start if starts else None)
    return replace(case, mask=mask, sequences=tuple(zip(q_start, q, kv_start, kv, strict=True)))


def with_documents(draw: st.DrawFn, case: Case) -> Case:
    count = draw(st.integers(1, 3))

    def side(limit: int, padded: bool) -> tuple[list[int], list[int]]:
        slots = sorted(draw(st.lists(st.integers(0, limit), min_size=count, max_size=count)))
        slots = [0, *slots]
        sizes = [draw(st.integers(0, b - a)) if padded else b - a for a, b in pairwise(slots)]
        return slots, sizes

    padded = draw(st.booleans())
    (slots_q, q), (slots_kv, kv) = side(case.q_len, padded), side(case.kv_len, padded)
    cu_q, cu_kv = ([sum(sizes[:n]) for n in range(count + 1)] for sizes in (q, kv))
    totals = {"total_q": case.q_len, "total_kv": case.kv_len}
    slots = (slots_q, slots_kv) if padded else (None, None)
    mask = masks.documents(cu_q, cu_kv, *slots, **totals)
    sequences = tuple(zip(slots_q[:-1], q, slots_kv[:-1], kv, strict=True))
    return replace(case, mask=mask, sequences=sequences, packed=True)


def drawn_sides(draw: st.DrawFn) -> tuple[int | None, int | None]:
    side = st.none() | st.integers(0, 3)
    return draw(side), draw(side)


def drawn_count(draw: st.DrawFn, count: int, low: int = 0) -> int | list[int]:
    if draw(st.booleans()):
        return draw(st.integers(low, 5))
    return draw(st.lists(st.integers(low, 5), min_size=count, max_size=count))


def drawn_causal(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    return Drawn(masks.causal(case.align), [causal_rule])  # type: ignore[arg-type]


def drawn_window(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    left, right = drawn_sides(draw)
    return Drawn(masks.window(left, right, case.align), [window_rule(left, right)])  # type: ignore[arg-type]


def drawn_prefix(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    n = drawn_count(draw, count)
    return Drawn(masks.prefix(n), [prefix_rule(n)])


def drawn_union(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    (left, right), n = drawn_sides(draw), drawn_count(draw, count)
    first, rule = (masks.sinks, sinks_rule) if draw(st.booleans()) else (masks.prefix, prefix_rule)
    mask = masks.window(left, right, case.align) | first(n)  # type: ignore[arg-type]
    return Drawn(mask, [either(window_rule(left, right), rule(n))])


def drawn_chunks(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    size = draw(st.integers(1, 4))
    offset = None if draw(st.booleans()) else drawn_count(draw, count, low=-3)
    return Drawn(masks.chunks(size, case.align, offset), [chunks_rule(size, offset)])  # type: ignore[arg-type]


def drawn_ids(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    def ids(length: int) -> list[list[int]]:
        rows = draw(st.sampled_from([1, case.batch]))
        one = st.lists(st.integers(-1, 2), min_size=length, max_size=length)
        return [sorted(draw(one)) if draw(st.booleans()) else draw(one) for _ in range(rows)]

    ids_q, ids_kv = ids(case.q_len), ids(case.kv_len)
    as_ids = [torch.tensor(rows, dtype=torch.int32).view(len(rows), -1) for rows in (ids_q, ids_kv)]
    return Drawn(masks.document_ids(*as_ids), [ids_rule(ids_q, ids_kv)])


def drawn_dense(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    full = (case.batch, case.heads, case.q_len, case.kv_len)
    shape = [size if draw(st.booleans()) else 1 for size in full]
    tensor = torch.rand(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < 0.6
    return Drawn(masks.dense(tensor), [dense_rule(tensor)])


def drawn_predicate(draw: st.DrawFn, case: Case, count: int) -> Drawn:
    a, c = draw(st.integers(1, 4)), draw(st.integers(0, 2))
    fn: Callable[..., Tensor] = lambda b, h, q, k: (q + a * k + c * h + b) % 3 != 0  # noqa: E731
    return Drawn(masks.predicate(fn), [lambda p: (p.row + a * p.key + c * p.h + p.b) % 3 != 0])


PARTS: dict[str, Callable[[st.DrawFn, Case, int], Drawn]] = {
    "causal": drawn_causal,
    "window": drawn_window,
    "prefix": drawn_prefix,
    "union": drawn_union,
    "chunks": drawn_chunks,
    "ids": drawn_ids,
    "dense": drawn_dense,
    "predicate": drawn_predicate,
}


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_any_intersection_of_parts_is_the_intersection_of_their_pairs(case: Case) -> None:
    agree(case)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases(), st.randoms(use_true_random=False))
def test_a_shard_of_rows_and_keys_is_those_rows_and_keys_of_the_whole(case: Case, choose: random.Random) -> None:
    sizes = (case.batch, case.heads, case.q_len, case.kv_len)
    form, dense = case.mask.normal_form(*sizes, CPU), case.mask.to_dense(*sizes)
    rows = torch.tensor(choose.sample(range(case.q_len), case.q_len // 2), dtype=torch.int64)
    keys = torch.tensor(sorted(choose.sample(range(case.kv_len), case.kv_len // 2)), dtype=torch.int64)
    shard, wanted = form.shard(rows, keys), dense[:, :, rows][..., keys]
    everything = slice(None)
    assert torch.equal(shard.allowed(everything, everything, everything, everything).expand(wanted.shape), wanted)
    check_order(shard.ranges)
    check_tiles(shard, wanted)
    check_rows(shard, wanted)
    assert torch.equal(shard.q_position, form.q_position[:, rows])
    assert torch.equal(shard.kv_position, form.kv_position[:, keys])
    assert torch.equal(shard.q_sequence, form.q_sequence[:, rows])
