"""The normal form of a mask: the positions of sequences, ranges of keys per row, and pairs that are not ranges."""

from undivided.masks.normal_form.block_pairs import BlockPairs
from undivided.masks.normal_form.intervals import NormalForm
from undivided.masks.normal_form.pairs import DensePairs, IdPairs, RangePairs, SelectedPairs
from undivided.masks.normal_form.predicate_pairs import PredicatePairs
from undivided.masks.normal_form.ranges import Ranges

__all__ = [
    "BlockPairs",
    "DensePairs",
    "IdPairs",
    "NormalForm",
    "PredicatePairs",
    "RangePairs",
    "Ranges",
    "SelectedPairs",
]
