"""What lets masks remember: values beside a frozen mask, tensors by identity, and the forms that masks share."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from undivided.masks.normal_form.intervals import NormalForm

# Forms of masks without tensors, shared by every mask that says the same: a model builds masks.causal() in
# each layer. 64 forms of at most 2 x 64 Ki tokens stay under 100 MB, and 1 MB in the usual case.
SHARED_FORMS = 64
SHARED_TOKENS = 1 << 17
_shared_forms: OrderedDict[object, NormalForm] = OrderedDict()


class Remembers:
    """Keeps derived values beside a frozen dataclass's fields; copies and pickles leave them behind."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@dataclass(frozen=True, eq=False)
class Identical:
    """Tensors that are equal to no others: a function may close over another one tomorrow, in the same memory."""

    tensors: Sequence[Tensor]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identical) or len(self.tensors) != len(other.tensors):
            return False
        return all(map(operator.is_, self.tensors, other.tensors))


def shared(key: object, build: Callable[[], NormalForm]) -> NormalForm:
    """The form of a mask without tensors, from the bounded cache that all such masks share."""
    form = _shared_forms.get(key)
    if form is None:
        form = build()
        if type(form.ranges) is not Tensor:  # a fake tensor means nothing to the next call
            return form
        _shared_forms[key] = form
        if len(_shared_forms) > SHARED_FORMS:
            _shared_forms.popitem(last=False)
    return form
