"""TransformerEngine's tracker of random states, as far as layers and checkpoints use it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class Tracker:
    """Another default generator within `fork`."""

    def __init__(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    def get_states(self) -> Tensor:
        return self.state

    def set_states(self, state: Tensor) -> None:
        self.state = state

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(outside)
