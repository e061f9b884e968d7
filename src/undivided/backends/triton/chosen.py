"""The forward of chosen key blocks: each query block is a sequence of its own, whose pages are its chosen blocks.

Nothing here waits for the device: sequences have as many rows and pages as they may have. What follows from the mask,
the block table and the strides is kept with the checked mask, so that a repeated call launches only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from undivided.arguments import layout
from undivided.arguments.tensors import has_dispatch
from undivided.backends.shared.chosen import VirtualSequences, block_pairs, evaluated_note
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result

MAX_SEQUENCES = 65535
"""Sequences of one launch: the limit of the third axis of a CUDA grid (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability")."""

MAX_EXCESS = 4
"""If documents of a pack are so much shorter than the longest may be that the sequences would have more than this many
times the rows of the pack, the mask is evaluated for every pair."""


def forward(call: Call, tensors: Tensors, run: Callable[[Call, Tensors], Result]) -> Result | None:
    """The result, from `run` for the virtual sequences; None if the mask must be evaluated for every pair."""
    virtual = _sequences(call, tensors)
    calls = None if virtual is None else virtual.paged_calls(MAX_SEQUENCES)
    if virtual is None or calls is None:
        return None
    results = [run(*one) for one in calls]
    out, lse = results[0]
    if len(results) > 1:
        out, lse = (torch.cat(each) for each in zip(*results, strict=True))
    out_BSHD = virtual.rows.restored(out, 0.0)
    lse_BSHD = virtual.rows.restored(lse[..., None], -torch.inf)
    lse = lse_BSHD[..., 0].transpose(1, 2).contiguous()
    return Result(layout.from_canonical(out_BSHD, call.problem.layout).contiguous(), lse)


def notes(call: Call, tensors: Tensors) -> list[str]:
    """Whether only the chosen blocks are computed, and if not, why. How many there are is known on the device only."""
    if any(has_dispatch(tensor) for tensor in tensors[:3]):
        return []
    if _sequences(call, tensors) is None:
        return [evaluated_note(call)]
    return ["only the chosen key blocks are computed, in the forward"]


def _sequences(call: Call, tensors: Tensors) -> VirtualSequences | None:
    """The virtual sequences of a call; None if its mask must be evaluated for every pair."""
    if "document_ids" in call.problem.mask.kinds:  # keys of other documents, and unused memory, lie between its keys
        return None
    pairs = block_pairs(call, tensors, reads_values=False)
    if pairs is None:
        return None
    virtual = VirtualSequences.of_call(call, tensors, pairs, joins_heads=True, reads_values=False)
    return virtual if virtual.rows.excess <= MAX_EXCESS else None
