"""Masks of chosen key blocks: each query block becomes a sequence of its own, whose pages are its chosen blocks.

The keys of such a sequence are the chosen blocks in ascending order, so a range of keys stays a range, and a kernel
that reads pages computes the chosen blocks only. `native` may read values of tensors; `triton` may not, because that
would wait for the GPU.
"""

from __future__ import annotations

import math

from torch import Tensor

from undivided.backends.shared.chosen.pools import common_steps, token_major
from undivided.backends.shared.chosen.sequences import GatheredSequences, VirtualSequences
from undivided.masks.normal_form import BlockPairs
from undivided.request.call import Call
from undivided.request.request import Tensors

__all__ = ["GENERAL", "GatheredSequences", "VirtualSequences", "block_pairs", "evaluated_note"]

GENERAL = frozenset({"bias", "alibi", "sinks", "dropout", "partial"})
"""Features whose values depend on the position of a key or on the head, which the virtual sequences do not have."""


def block_pairs(call: Call, tensors: Tensors, reads_values: bool) -> BlockPairs | None:
    """The chosen blocks, if the kernel can read them alone; None if the mask is evaluated for all pairs.

    reads_values: whether values of tensors may be read on the host.
    """
    problem = call.problem
    if "blocks" not in problem.mask.kinds or problem.features & GENERAL:
        return None
    form = call.normal_form(tensors.q)
    if len(form.extras) != 1 or not isinstance(form.extras[0], BlockPairs) or form.row_index is not None:
        return None
    pairs = form.extras[0]
    if not problem.batch or not problem.q_len or not problem.kv_len or not pairs.table.numel():
        return None
    if call.pages is None and call.k_scale is not None:
        return None
    if not reads_values and common_steps(token_major(tensors, call)) is None:  # copies of all keys would help
        return None
    return pairs if call.pages is None or _starts_at_page(call, tensors, pairs, reads_values) else None


def _starts_at_page(call: Call, tensors: Tensors, pairs: BlockPairs, reads_values: bool) -> bool:
    """Whether the first key of each sequence is known to be the first of a virtual page."""
    start = pairs.geometry.kv_start
    if not isinstance(start, Tensor) or call.problem.packed:  # a packed document starts at the first of its pages
        return True
    return reads_values and not bool((start % math.gcd(pairs.kv_block, tensors.k.shape[1])).any())


def evaluated_note(call: Call) -> str:
    """What `explain` says if the mask is evaluated for all pairs."""
    features = sorted(call.problem.features & GENERAL)
    return f"the block table is evaluated for every pair: {', '.join(features) or 'other conditions'}"
