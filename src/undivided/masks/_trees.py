"""``tree``: the mask of a draft tree."""

from __future__ import annotations

from collections.abc import Sequence

from undivided.arguments.checks import ids_tensor
from undivided.arguments.signature import checked_call
from undivided.masks._constructors import Ints, causal, from_part
from undivided.masks._mask import Mask
from undivided.masks._parts import Tree


@checked_call
def tree(parents: Ints | Sequence[Sequence[int]]) -> Mask:
    """The pairs of a drafted token with the cached tokens, its ancestors and itself: speculative decoding with a tree.

    The queries of a sequence are the nodes of its tree, and its last keys; the keys before them are the prefix, which
    every node sees. The mask is part of ``causal(align="bottom_right")``: a chain, ``tree([-1, 0, 1, ...])``, is equal
    to it. Other masks count indices, not depths: ``window`` after ``&`` hides by index.

    Args:
        parents: the parent of each node, an index among the queries of the same sequence, -1 for a root; any integer
            dtype, ``[Sq]`` or a list for every batch element, or ``[B, Sq]`` or a list of lists; packed ``[Tq]``. A
            parent comes before its children. Entries of padding rows are -1.

    Returns:
        The pairs of a node with the prefix, its ancestors and itself.

    Raises:
        InputError: parents are not integers, below -1, or not before their children (so no cycle is possible), or have
            another number of dimensions.

    Source: Miao et al. 2024, SpecInfer (arXiv:2305.09781); Cai et al. 2024, Medusa (arXiv:2401.10774).

    >>> tree([-1, 0, 0, 2]).to_dense(batch=1, heads=1, q_len=4, kv_len=6).int().tolist()
    [[[[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 1, 1]]]]
    """
    return causal(align="bottom_right") & from_part(Tree(ids_tensor("parents", parents)))
