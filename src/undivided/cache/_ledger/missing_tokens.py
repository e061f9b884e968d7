"""`MissingTokens`: which layers of a model lack tokens of the sequences, because a step ran without them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from undivided.cache._storage import Counts


class MissingTokens:
    """The layers that the current step has called, and the first token that each layer lacks of a sequence.

    Most steps call every layer, and no layer lacks a token.
    """

    def __init__(self) -> None:
        self.called: set[int] = set()
        self.lacking: dict[int, dict[int, int]] = {}  # position of the first missing token, by layer and slot
        self._new: Mapping[int, int] = {}
        self._lengths: Counts = ()

    def start(self, layers: Iterable[int], new: Mapping[int, int], lengths: Counts) -> None:
        """Start a step.

        Args:
            layers: all layers with memory.
            new: position of the first new token, by slot of a sequence with new tokens.
            lengths: tokens of each slot without the new ones.
        """
        if self._new:
            for layer in layers:
                if layer not in self.called:
                    self._add(layer, self._new)
        self.called, self._new, self._lengths = set(), new, lengths
        if self.lacking:
            remaining = {
                layer: {slot: first for slot, first in missing.items() if lengths[slot] > first}
                for layer, missing in self.lacking.items()
            }
            self.lacking = {layer: missing for layer, missing in remaining.items() if missing}

    def allocate(self, layer: int) -> None:
        """Note that a layer has got its memory: it lacks all earlier tokens."""
        self._add(layer, {slot: 0 for slot, length in enumerate(self._lengths) if length})

    def fork(self, source: int, target: int) -> None:
        """Note that a slot has become a copy of another one."""
        for missing in self.lacking.values():
            if source in missing:
                missing[target] = missing[source]

    def complete(self, layers: Iterable[int], slot: int, length: int) -> int:
        """How many of the first tokens of a slot, which has this many, every layer has received."""
        new = self._new.get(slot, length)
        received = [length if layer in self.called else new for layer in layers]
        return min([length, *received, *(missing.get(slot, length) for missing in self.lacking.values())])

    def _add(self, layer: int, first: Mapping[int, int]) -> None:
        if first:
            self.lacking[layer] = {**first, **self.lacking.get(layer, {})}
