"""The size of the largest tensor that was created, for tests of memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Records the most bytes, and the most elements, that the storage of any tensor made under it holds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                size = tensor.untyped_storage().nbytes()
                self.bytes = max(self.bytes, size)
                self.elements = max(self.elements, size // tensor.element_size())
        return out
