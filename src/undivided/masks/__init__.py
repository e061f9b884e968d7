"""Masks: which query may attend to which key.

A mask is an exact set of pairs (i, j) of a query row and a key. Each function of this module returns one such set;
``&`` intersects two sets, and ``window(...) | sinks(n)`` adds the first n keys to a window. A structured mask takes
memory proportional to the sequence length, not to its square. ``dense``, ``blocks`` and ``pages`` take that of their
tables; ``predicate`` is evaluated in blocks.

Positions count within a sequence: i' = i - q_start and j' = j - kv_start. A sequence is a batch element (the whole
length of the tensor, or the length that ``lengths`` gives) or a document. If a sequence has n = kv_len - q_len more
keys than queries, ``align`` decides which key is the query's own key, i' + d:

    align="top_left"      d = 0    the first query's own key is the first key
    align="bottom_right"  d = n    the last query's own key is the last key (decoding, chunked prefill)

``align=None`` is accepted if both alignments agree, that is if n = 0 for every sequence. A mask has one alignment.

Values of CPU tensors are checked when the mask is built, and again after a tensor was changed in place. On a GPU,
and during compilation, only shapes are checked, so that the host does not wait for the device.

>>> import torch
>>> print(causal() & document_ids(torch.tensor([0, 0, 0, 1, 1])))
causal() & document_ids(<int64 [1, 5]>)
  0 1 2 3 4
0 ■ · · · ·
1 ■ ■ · · ·
2 ■ ■ ■ · ·
3 · · · ■ ·
4 · · · ■ ■
"""

from undivided.arguments.signature import checked_methods
from undivided.masks._blocks import blocks, pages
from undivided.masks._constructors import (
    FULL,
    causal,
    chunks,
    dense,
    document_ids,
    documents,
    lengths,
    predicate,
    prefix,
    sinks,
    window,
)
from undivided.masks._drawing import describe_structure as describe
from undivided.masks._mask import Mask
from undivided.masks._structure import Structure
from undivided.masks._trees import tree
from undivided.masks.normal_form import NormalForm

__all__ = [
    "FULL",
    "Mask",
    "NormalForm",
    "Structure",
    "blocks",
    "causal",
    "chunks",
    "dense",
    "describe",
    "document_ids",
    "documents",
    "lengths",
    "pages",
    "predicate",
    "prefix",
    "sinks",
    "tree",
    "window",
]

checked_methods("draw", "intervals", "plot", "to_dense")(Mask)
