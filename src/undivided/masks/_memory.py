"""Values derived from a frozen object, kept in its ``__dict__``, and tensors compared by identity."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class DerivedValues:
    """A base for frozen dataclasses that keep derived values in ``_names``; copies and pickles leave these out."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@dataclass(frozen=True, eq=False)
class TensorIdentities:
    """Tensors compared by identity: a function may capture another tensor later, in the same memory."""

    tensors: Sequence[Tensor]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorIdentities) or len(self.tensors) != len(other.tensors):
            return False
        return all(map(operator.is_, self.tensors, other.tensors))
