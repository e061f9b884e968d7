"""Masks as ranges of keys: where sequences lie, the ranges of each row, and the pairs that no range describes."""
