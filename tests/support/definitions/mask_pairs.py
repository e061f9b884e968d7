"""Places of tokens, and masks as sets of pairs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from undivided import masks
from undivided.masks import Mask

CPU = torch.device("cpu")


Rule = Callable[["Place"], bool]


@dataclass(frozen=True)
class Place:
    """One pair within its sequence: positions i', j', real lengths, alignment, raw indices."""

    i: int
    j: int
    q_len: int
    kv_len: int
    align: str | None
    sequence: int
    b: int
    h: int
    row: int
    key: int

    @property
    def d(self) -> int:
        return self.kv_len - self.q_len if self.align == "bottom_right" else 0


@dataclass(frozen=True)
class Case:
    """A call, its sequences, the rules of its mask, and the mask that the library built."""

    mask: Mask
    batch: int
    q_len: int
    kv_len: int
    heads: int = 1
    rules: tuple[Rule, ...] = ()
    align: str | None = None
    # (q_start, q_len, kv_start, kv_len) of each sequence; of each batch element, or of the documents of the only one
    sequences: tuple[tuple[int, int, int, int], ...] = ()
    packed: bool = False

    def places(self, b: int, h: int, row: int, key: int) -> Iterator[Place]:
        """The pair within each sequence that contains both its row and its key."""
        sequences = self.sequences or tuple((0, self.q_len, 0, self.kv_len) for _ in range(self.batch))
        for n, (q_start, q_len, kv_start, kv_len) in enumerate(sequences):
            i, j = row - q_start, key - kv_start
            if (self.packed or n == b) and 0 <= i < q_len and 0 <= j < kv_len:
                yield Place(i, j, q_len, kv_len, self.align, n, b, h, row, key)

    def pairs(self) -> set[tuple[int, int, int, int]]:
        indices = product(range(self.batch), range(self.heads), range(self.q_len), range(self.kv_len))
        return {
            index for index in indices if any(all(rule(place) for rule in self.rules) for place in self.places(*index))
        }


def pairs_of(tensor: Tensor) -> set[tuple[int, ...]]:
    return {tuple(index) for index in tensor.nonzero().tolist()}


def agree(case: Case) -> None:
    """Assert that every representation of the mask has the pairs of the definition."""
    sizes = (case.batch, case.heads, case.q_len, case.kv_len)
    expected = case.pairs()
    case.mask.check(*sizes, packed=case.packed, device=CPU)
    dense = case.mask.to_dense(*sizes)
    assert pairs_of(dense) == expected
    form = case.mask.normal_form(*sizes, CPU)
    ranges = form.ranges
    assert ranges.dtype == torch.int32
    assert ranges.shape[0] in (1, case.batch)
    assert ranges.shape[1] == case.q_len
    check_order(ranges)
    painted = paint(ranges, case.kv_len)
    expected_any_head = {(b, i, j) for b, _, i, j in expected}
    if form.exact:
        assert pairs_of(painted.expand(case.batch, -1, -1)) == expected_any_head
    else:
        assert pairs_of(painted.expand(case.batch, -1, -1)) >= expected_any_head
    assert form.pairs == len(expected)
    check_rows(form, dense)
    check_blocks(form, dense)
    check_tiles(form, dense)
    again = Mask.unflatten(*case.mask.flatten())
    assert torch.equal(again.to_dense(*sizes), dense)
    assert again.structure == case.mask.structure


def check_order(ranges: Tensor) -> None:
    for row in ranges.flatten(0, 1).tolist():
        pairs = [row[n : n + 2] for n in range(0, len(row), 2)]
        assert all(start < stop or [start, stop] == [0, 0] for start, stop in pairs)
        if len(pairs) == 2 and pairs[1] != [0, 0]:
            assert pairs[0][0] < pairs[0][1] < pairs[1][0], "two ranges: both used, disjoint, apart, in order"


def paint(ranges: Tensor, kv_len: int) -> Tensor:
    painted = torch.zeros(*ranges.shape[:2], kv_len, dtype=torch.bool)
    for b, row in product(range(ranges.shape[0]), range(ranges.shape[1])):
        bounds = ranges[b, row].tolist()
        for n in range(0, len(bounds), 2):
            painted[b, row, bounds[n] : bounds[n + 1]] = True
    return painted


def check_rows(form: masks.NormalForm, dense: Tensor) -> None:
    rows = form.rows_allowed if form.rows_allowed.dim() == 3 else form.rows_allowed[:, None]
    assert torch.equal(rows.expand(dense.shape[:3]), dense.any(-1))


def check_blocks(form: masks.NormalForm, dense: Tensor) -> None:
    choose = random.Random(0)
    for _ in range(4):
        cuts = [sorted(choose.choices(range(size + 1), k=2)) for size in dense.shape]
        batch, heads, rows, keys = (slice(start, stop) for start, stop in cuts)
        block = form.allowed(batch, rows, keys, heads)
        assert block.shape[2:] == dense[batch, heads, rows, keys].shape[2:]
        if batch.start < batch.stop and heads.start < heads.stop:
            assert torch.equal(block.expand(dense[batch, heads, rows, keys].shape), dense[batch, heads, rows, keys])
        keys_used = paint(form.ranges, form.kv_len).expand(dense.shape[0], -1, -1)[batch, rows].nonzero()[:, 2]
        hull = (int(keys_used.min()), int(keys_used.max()) + 1) if len(keys_used) else (0, 0)
        assert form.hull(batch, rows) == hull


def check_tiles(form: masks.NormalForm, dense: Tensor) -> None:
    block_q, block_k = 3, 2
    tiles = form.tiles(block_q, block_k)
    wanted = (*dense.shape[:2], -(-dense.shape[2] // block_q), -(-dense.shape[3] // block_k))
    assert tiles.dtype == torch.uint8
    assert tiles.shape[2:] == wanted[2:]
    for b, h, row, key in product(*(range(size) for size in wanted)):
        tile = dense[b, h, row * block_q : (row + 1) * block_q, key * block_k : (key + 1) * block_k]
        value = 2 if tile.all() else 1 if tile.any() else 0
        assert tiles.expand(wanted)[b, h, row, key] == value


def causal_rule(place: Place) -> bool:
    return place.j <= place.i + place.d


def window_rule(left: int | None, right: int | None) -> Rule:
    return lambda place: (
        (left is None or place.i + place.d - left <= place.j)
        and (right is None or place.j <= place.i + place.d + right)
    )


def prefix_rule(n: int | list[int]) -> Rule:
    return lambda place: place.j < (n if isinstance(n, int) else n[place.sequence])


def sinks_rule(n: int | list[int]) -> Rule:
    return lambda place: prefix_rule(n)(place) and causal_rule(place)


def chunks_rule(size: int, offset: int | list[int] | None) -> Rule:
    def rule(place: Place) -> bool:
        shift = place.d if offset is None else offset if isinstance(offset, int) else offset[place.sequence]
        return (place.i + shift) // size == (place.j - place.d + shift) // size

    return rule


def ids_rule(ids_q: list[list[int]], ids_kv: list[list[int]]) -> Rule:
    def rule(place: Place) -> bool:
        mine, its = ids_q[place.b % len(ids_q)][place.row], ids_kv[place.b % len(ids_kv)][place.key]
        return mine >= 0 and mine == its

    return rule


def dense_rule(tensor: Tensor) -> Rule:
    def rule(place: Place) -> bool:
        index = (place.b, place.h, place.row, place.key)
        return bool(tensor[tuple(n if size > 1 else 0 for n, size in zip(index, tensor.shape, strict=True))])

    return rule


def either(*rules: Rule) -> Rule:
    return lambda place: any(rule(place) for rule in rules)


ALIGNS = ["top_left", "bottom_right"]
