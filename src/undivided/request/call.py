"""What a backend is called with: the problem, and the options that were checked and completed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from undivided.masks import Mask
from undivided.masks.normal_form import NormalForm
from undivided.request.problem import Problem


class CheckedMask:
    """A mask that was checked against a problem, and its normal form; remembered until a tensor of the mask changes."""

    __slots__ = ("form", "key", "mask", "pages", "problem")

    def __init__(self, mask: Mask, problem: Problem, key: object = None) -> None:
        self.mask, self.problem = mask, problem
        self.form: NormalForm | None = None
        self.key = key
        """What it is remembered by, held so that nothing else gets its id."""
        self.pages: tuple[Tensor, int, int] | None = None
        """The block table that was checked last, its in-place version, and the pool's pages."""


@dataclass(eq=False, slots=True)
class Call:
    """One attention call, without the tensors that may have gradients: autograd keeps it until the backward.

    problem: what selection decided on. mask: with the lengths of pages, if there are any. scale: 1/sqrt(Dk) if the
    request had none. dropout_seed: drawn if the request had none. pages: the block table of k and v, or None.
    needs: which of `Tensors` need a gradient.
    """

    problem: Problem
    mask: Mask
    scale: float
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Tensor | None = None
    pages: Tensor | None = None
    needs: tuple[bool, ...] = (False,) * 6
    checked_mask: CheckedMask | None = field(default=None, repr=False)
    """Where repeated calls find the mask's normal form."""

    def normal_form(self, like: Tensor) -> NormalForm:
        """The mask's row ranges and positions for these sizes on the device of `like`, built at the first use."""
        checked, problem = self.checked_mask, self.problem
        if checked is None:
            checked = self.checked_mask = CheckedMask(self.mask, problem)
        if checked.form is None:
            sizes = problem.batch, problem.heads, problem.q_len, problem.kv_len
            checked.form = self.mask.normal_form(*sizes, like.device)
        return checked.form

    def with_problem(self, problem: Problem, **changes: Any) -> Call:
        """The same call of another problem."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return Call(**{**fields, "problem": problem, **changes})
