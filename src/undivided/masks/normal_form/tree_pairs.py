"""The pairs of a draft tree: each query with the keys before the tree, its ancestors and itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undivided.arguments.tensors import readable, scattered
from undivided.errors import InputError
from undivided.masks.normal_form.copies import int64_copy
from undivided.masks.normal_form.pairs import Index, index_tensor, narrow
from undivided.masks.normal_form.positions import Geometry


@dataclass(frozen=True, eq=False)
class TreePairs:
    """The pairs of nodes with their ancestors; keys before the tree are visible to all. Kernels read the tensors, which
    are contiguous.

    Args:
        ancestors: whether node n of the same sequence is an ancestor of a row, or the row itself, bool
            ``[B|1, Sq, nodes]``.
        first: raw index of the key of each row's node 0, int32 ``[B|1, Sq]``.
    """

    ancestors: Tensor
    first: Tensor

    @staticmethod
    def for_call(parents: Tensor, geometry: Geometry) -> TreePairs:
        """The pairs of a call.

        Raises:
            InputError: in a pack, a parent that is not before its child in the same document.
        """
        parents = int64_copy(parents, geometry.device)
        position, rows = geometry.q_position, parents.shape[1]
        if geometry.real_rows is not None:
            parents = torch.where(geometry.real_rows, parents, -1)
        wrong = parents >= position.clamp(min=0)  # padding before a sequence has negative positions
        if readable(wrong) and bool(wrong.any()):
            batch, row = wrong.nonzero()[0].tolist()
            raise InputError(
                "parents",
                "be -1, or the index of an earlier query of the same sequence",
                f"{int(parents[batch, row])} for query {int(position[batch if len(position) > 1 else 0, row])}",
                "in a pack, indices start at 0 in every document",
            )
        nodes = max(int(position.max()) + 1 if readable(position) and position.numel() else rows, 1)
        parents, position = torch.broadcast_tensors(parents, position)
        first_row = torch.arange(rows, device=geometry.device) - position  # of each row's sequence
        root = nodes  # one past the nodes: the parent of every root
        node = torch.where(position >= 0, position, root)  # of each row: itself, then its parent, and so on
        ancestors = torch.zeros((*position.shape, nodes + 1), dtype=torch.bool, device=geometry.device)
        for _ in range(nodes):
            ancestors = scattered(ancestors, 2, node[..., None], True)
            parent = parents.gather(1, (first_row + node).clamp(0, rows - 1)) if rows else node
            node = torch.where((node == root) | (parent < 0), root, parent)
            if readable(node) and bool((node == root).all()):
                break
        first = geometry.anchor - geometry.q_position + geometry.per_row(geometry.kv_start)
        return TreePairs(ancestors[..., :nodes].contiguous(), first.to(torch.int32).contiguous())

    def pairs(self, batch: slice, heads: slice, rows: Index, keys: Index) -> Tensor:
        """Allowed pairs, bool ``[b|1, 1, r, k]``."""
        del heads
        first = narrow(self.first, 0, batch)[:, rows, None]
        ancestors = narrow(self.ancestors, 0, batch)[:, rows]
        (batches,) = torch.broadcast_shapes(first.shape[:1], ancestors.shape[:1])
        first, ancestors = first.expand(batches, -1, -1), ancestors.expand(batches, -1, -1)
        if isinstance(keys, slice):
            return _pairs_of_slice(first, ancestors, keys)[:, None]
        node = index_tensor(keys, first.device) - first
        is_ancestor = ancestors.gather(2, node.clamp(0, ancestors.shape[2] - 1))
        return ((node < 0) | (is_ancestor & (node < ancestors.shape[2])))[:, None]


def _pairs_of_slice(first: Tensor, ancestors: Tensor, keys: slice) -> Tensor:
    """Allowed pairs, bool ``[b, r, k]``: the nodes are written over the comparison, because a tree has few of them."""
    count = keys.stop - keys.start
    allowed = torch.arange(keys.start, keys.stop + 1, device=first.device) < first
    column = first + torch.arange(ancestors.shape[2], device=first.device) - keys.start
    outside = (column < 0) | (column >= count)
    allowed = scattered(allowed, 2, torch.where(outside, count, column), ancestors)
    return allowed[..., :count]  # without the column for nodes outside of the slice
