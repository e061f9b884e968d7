"""`InnerAttribute`: an attribute of a layer that belongs to a module in it, read and set there."""

from __future__ import annotations

from typing import Any

import torch


class InnerAttribute:
    """A descriptor; what is set applies to the next call.

    Args:
        module: name of the module in the layer.
        name: name of the attribute there.
    """

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __get__(self, layer: torch.nn.Module | None, owner: type) -> Any:
        return self if layer is None else getattr(getattr(layer, self.module), self.name)

    def __set__(self, layer: torch.nn.Module, value: object) -> None:
        setattr(getattr(layer, self.module), self.name, value)
