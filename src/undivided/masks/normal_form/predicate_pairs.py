"""``PredicatePairs``: the pairs of a mask that was passed as a function."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undivided.arguments.shapes import broadcasts
from undivided.arguments.tensors import readable
from undivided.errors import InputError
from undivided.masks._predicate import PredicateFunction
from undivided.masks.normal_form.pairs import Index, index_tensor
from undivided.masks.normal_form.positions import Geometry


@dataclass(frozen=True, eq=False)
class PredicatePairs:
    """The pairs of a function, evaluated only for real queries and real keys.

    The ranges of the mask exclude padding. Here the index of a padding token is replaced by that of a real token, so
    that the function may index tensors that cover the real tokens only.

    Args:
        fn: the function.
        device: device of the index tensors.
        rows, keys: the raw index, or the position, at which each row and key is evaluated, int64 ``[B|1, Sq]`` and
            ``[B|1, Sk]``; the index is -1 if its batch element has no real token. None: the own index of each.
        positions: whether they are positions, of which those of queries before the first key are negative.
    """

    fn: PredicateFunction
    device: torch.device
    rows: Tensor | None = None
    keys: Tensor | None = None
    positions: bool = False

    @staticmethod
    def for_call(fn: PredicateFunction, geometry: Geometry, positions: bool = False) -> PredicatePairs:
        """The pairs of a function for a call with this geometry."""
        if not geometry.batch:
            return PredicatePairs(fn, geometry.device)
        if positions:
            own = _evaluated_positions(geometry.anchor, geometry.real_rows)
            of_keys = _evaluated_positions(geometry.kv_position, geometry.real_keys)
            return PredicatePairs(fn, geometry.device, own, of_keys, positions)
        rows, keys = _evaluated_indices(geometry.real_rows), _evaluated_indices(geometry.real_keys)
        return PredicatePairs(fn, geometry.device, rows, keys)

    def pairs(self, batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
        """Allowed pairs, bool ``[b|1, h|1, r|1, k|1]``."""
        q_idx, kv_idx = (index_tensor(index, self.device) for index in (rows, keys))
        if all(table is None or table.shape[0] == 1 for table in (self.rows, self.keys)):
            return self._block(batch, heads, _index_at(self.rows, 0, q_idx), _index_at(self.keys, 0, kv_idx))
        if batch.start >= batch.stop:
            return torch.zeros((0, 1, 1, 1), dtype=torch.bool, device=self.device)
        blocks = (  # one call per batch element: fn expects one index per row and key
            self._block(slice(n, n + 1), heads, _index_at(self.rows, n, q_idx), _index_at(self.keys, n, kv_idx))
            for n in range(batch.start, batch.stop)
        )
        return torch.cat(torch.broadcast_tensors(*blocks))

    def _block(self, batch: slice, heads: slice, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        indices = () if self.positions else (q_idx, kv_idx)
        if any(bool((index[:1] < 0).any()) for index in indices if readable(index)):  # no real token
            return torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=self.device)
        b, h = (index_tensor(index, self.device) for index in (batch, heads))
        b, h, q_idx = b[:, None, None, None], h[None, :, None, None], q_idx[None, None, :, None]
        kv_idx = kv_idx[None, None, None, :]
        sizes = (b.numel(), h.numel(), q_idx.numel(), kv_idx.numel())
        try:
            allowed = self.fn(b, h, q_idx, kv_idx)
        except IndexError as error:
            raise InputError(
                "fn",
                f"be defined for every real query and key ({_largest_indices(q_idx, kv_idx)})",
                f"IndexError: {error}",
                "padding that the mask describes is not evaluated: masks.lengths(kv, q) & masks.predicate(fn)",
            ) from error
        if isinstance(allowed, bool):
            allowed = torch.full((1, 1, 1, 1), allowed, device=self.device)
        if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
            got = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
            raise InputError("fn", "return a bool tensor", got, "predicates are fn(b, h, q_idx, kv_idx) -> bool")
        if not broadcasts(allowed.shape, sizes):
            hint = "compute with the indices alone, and look up tensors by them: table[b, q_idx] == table[b, kv_idx]"
            raise InputError("fn", f"return a tensor broadcastable to {list(sizes)}", list(allowed.shape), hint)
        return allowed[(None,) * (4 - allowed.dim())]


def _evaluated_indices(real: Tensor | None) -> Tensor | None:
    """Per token its own index if it is real, otherwise the first real index or -1, int64 ``[B|1, S]``; None if all are
    real."""
    if real is None or (readable(real) and bool(real.all())):
        return None
    index = torch.arange(real.shape[1], device=real.device)
    first = torch.where(real, index, real.shape[1]).amin(1, keepdim=True)
    return _shared(torch.where(real, index, torch.where(first < real.shape[1], first, -1)))


def _evaluated_positions(positions: Tensor, real: Tensor | None) -> Tensor:
    """Per token its own position if it is real, otherwise that of the first real token or 0, int64 ``[B|1, S]``."""
    if (first := _evaluated_indices(real)) is None:
        return _shared(positions)
    own = positions.expand(first.shape[0], -1) if positions.shape[0] == 1 else positions
    first = first.expand(own.shape[0], -1)
    return _shared(torch.where(first < 0, 0, own.gather(1, first.clamp(min=0))))


def _shared(table: Tensor) -> Tensor:
    """The table, with one row if all are equal."""
    same = readable(table) and bool((table == table[:1]).all())
    return table[:1] if same else table


def _index_at(table: Tensor | None, n: int, index: Tensor) -> Tensor:
    return index if table is None else table[n if table.shape[0] > 1 else 0][index]


def _largest_indices(q_idx: Tensor, kv_idx: Tensor) -> str:
    named = (("q_idx", q_idx), ("kv_idx", kv_idx))
    return ", ".join(f"{name} up to {int(index.max())}" for name, index in named if index.numel())
