"""Which rows may share a block if some values are NaN or infinite.

The products of a block meet each of its rows with each of its keys, a hidden pair with a weight of 0, and 0 * NaN is
NaN. Keys that no row of a block sees are cleared before; so rows share a block if they see the same of the keys that
are not finite, and a row that is not finite itself has a block of its own. Finite inputs take the largest blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from undivided.arguments.tensors import is_traced, readable
from undivided.request.call import Call
from undivided.request.request import Tensors

_PAIRS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class RowCuts:
    """ends: where the rows of each batch element must be cut. by_head: whether each head is a block of its own, because
    the allowed pairs depend on it."""

    ends: list[list[int]]
    by_head: bool


def find_row_cuts(
    call: Call, tensors: Tensors, row_tensors: Sequence[Tensor], key_tensors: Sequence[Tensor]
) -> RowCuts | None:
    """Where rows must be cut into blocks, so that no NaN reaches a row that does not see it; None if nowhere.

    row_tensors [B, H, Sq, D] and key_tensors [B, N, Sk, D] are multiplied besides q, k and v.

    Only on the CPU: elsewhere reading values would wait for the device, and under tracing there are none.
    """
    if (call.mask.is_full and tensors.bias is None) or is_traced():
        return None
    q, k, v = tensors.heads_first(call.problem.layout)
    of_rows, of_keys = (q, *row_tensors), (k, v, *key_tensors)
    used = (*of_rows, *of_keys) if tensors.bias is None else (*of_rows, *of_keys, tensors.bias)
    if not readable(*used) or all(bool(torch.isfinite(t).all()) for t in (*of_rows, *of_keys)):
        return None
    rows, keys = _nonfinite_tokens(of_rows), _nonfinite_tokens(of_keys)
    ends, by_head = [], False
    for b in range(call.problem.batch):
        cuts = [0]
        for start, pairs in _allowed(call, tensors, b):
            cuts += [start + i for i in _cuts(pairs, rows[b, start : start + pairs.shape[2]], keys[b])]
            by_head |= pairs.shape[1] > 1
        ends.append([*cuts[1:], call.problem.q_len])
    return RowCuts(ends, by_head) if by_head or any(len(end) > 1 for end in ends) else None


def _nonfinite_tokens(tensors: Sequence[Tensor]) -> Tensor:
    """Which tokens have a NaN or an infinity in one of the tensors [B, H, S, D], bool [B, S]."""
    return torch.stack([~torch.isfinite(t).all(-1).all(1) for t in tensors]).any(0)


def _allowed(call: Call, tensors: Tensors, b: int) -> Iterator[tuple[int, Tensor]]:
    """Rows of a batch element, in order, as the first one's index and their allowed pairs, bool [1, H|1, R, Sk]; each
    begins with the last row of the one before it."""
    problem, bias = call.problem, tensors.bias
    size = max(_PAIRS_AT_ONCE // max(problem.heads * problem.kv_len, 1), 1)
    batch, everything = slice(b, b + 1), slice(None)
    for start in range(0, max(problem.q_len - 1, 1), size):
        rows = slice(start, min(start + size + 1, problem.q_len))
        pairs = torch.ones(1, 1, rows.stop - start, problem.kv_len, dtype=torch.bool)
        if not call.mask.is_full:
            pairs = (
                call.normal_form(tensors.q).allowed(batch, rows, everything, everything).expand(1, -1, *pairs.shape[2:])
            )
        if bias is not None:
            own_bias = bias.detach()[batch if bias.shape[0] > 1 else everything]
            pairs = pairs & (own_bias[:, :, rows if own_bias.shape[2] > 1 else everything] != -torch.inf)
        yield start, pairs


def _cuts(allowed: Tensor, nonfinite_rows: Tensor, nonfinite_keys: Tensor) -> list[int]:
    """The rows that must not be in one block with the row before them.

    >>> causal = torch.ones(1, 1, 4, 4).tril().bool()
    >>> _cuts(causal, torch.tensor([False] * 4), torch.tensor([False, False, True, False]))
    [2]
    """
    is_alone = nonfinite_rows & allowed.any(-1).any(1)[0]  # rows without keys are cleared
    pairs = allowed[0][..., nonfinite_keys]
    is_cut = (pairs[:, 1:] != pairs[:, :-1]).any(-1).any(0) | is_alone[1:] | is_alone[:-1]
    return [int(i) + 1 for i in is_cut.nonzero().flatten()]
