"""The argument of a backend: the problem, and the options after checks and with defaults filled in."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from undivided.arguments.layout import Strides, from_canonical
from undivided.masks import Mask
from undivided.masks.normal_form import NormalForm
from undivided.masks.normal_form.large_forms import LARGE
from undivided.quantization import unchecked_dequantize
from undivided.request.problem import Problem
from undivided.request.request import Tensors, gather_pages


class CheckedMask:
    """A mask that was checked for a problem, and its normal form; cached until a tensor of the mask changes.

    Threads that share a mask share it.
    """

    form: NormalForm | None = None
    """Set once, by `keep`."""

    def __init__(self, mask: Mask | None, problem: Problem, key: object = None, given: Mask | None = None) -> None:
        self.mask = mask
        """None: the mask that keeps this object. A reference to it would keep both alive until the garbage collector
        runs, and the memory of their tensors."""
        self.problem = problem
        self.range_record: bytes | None = None
        """The fields of the native kernel's record for the form; None before its first call."""
        self.derived: dict[Hashable, Any] = {}
        """What backends derive from the mask, by keys of their own: launches of `triton`, block tables of `native`."""
        self.derived_earlier: dict[Hashable, Any] = {}
        """As `derived`, of an earlier step, whose mask has the same structure: `triton` takes over its launches."""
        self.key = key
        """The object whose id is the cache key, kept alive so that no other object gets it."""
        self._holder = None if given is None else weakref.ref(given)
        """The mask that keeps this object."""
        self.checked_pages: tuple[Tensor, object, int] | None = None
        """The block table that was checked last, its `versions`, and the number of pages of the pool."""

    def keep(self, form: NormalForm) -> NormalForm:
        """The form that was kept first: another thread may have built one too, and records hold addresses of it."""
        kept: NormalForm = self.__dict__.setdefault("form", form)
        if self._holder is not None:
            LARGE.hold(kept, self, None)
        return kept

    def _take_use(self, _: Hashable) -> bool:
        """Whether this object was used since the last call, as a holder of a large form."""
        mask = None if self._holder is None else self._holder()
        return mask is not None and mask._take_use(id(self.key))

    def _drop(self, _: Hashable) -> None:
        """Let the mask drop this object and with it the form, which calls that are running still hold."""
        mask = None if self._holder is None else self._holder()
        if mask is not None:
            mask._drop(id(self.key))


@dataclass(eq=False, slots=True)
class Call:
    """One attention call, without the tensors that may have gradients; autograd keeps it until the backward.

    problem: the problem that selection decided on. mask: includes the lengths of a paged cache, if there is one.
    scale: 1/sqrt(Dk) if the request had none. dropout_seed: `prepare` draws one if the request had none. pages: the
    block table of k and v, or None. k_scale, v_scale: the scales of quantised k and v, or None.
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
    """Caches the mask's normal form for repeated calls."""
    strides: Strides | None = field(default=None, repr=False)
    """Those of the tensors that were prepared with the call, for its first run; None: read them."""
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def normal_form(self, like: Tensor) -> NormalForm:
        """The mask's row ranges and positions for these sizes on the device of `like`, built at the first use."""
        checked, problem = self.checked_mask, self.problem
        if checked is None:
            checked = self.checked_mask = CheckedMask(self.mask, problem)
        if checked.form is None:
            sizes = problem.batch, problem.heads, problem.q_len, problem.kv_len
            return checked.keep(self.mask.normal_form(*sizes, like.device))
        return checked.form

    def dense_tensors(self, tensors: Tensors, dtype: torch.dtype) -> Tensors:
        """The tensors with k and v in the problem's layout: pages gathered in order, and quantised numbers in `dtype`.
        Those that are neither paged nor quantised keep their dtype."""
        layout = self.problem.layout
        tensors = tensors.without_pages(self.pages, layout)
        if self.k_scale is None or self.v_scale is None:
            return tensors
        k_scale, v_scale = self.k_scale, self.v_scale
        if self.pages is not None:
            k_scale, v_scale = (
                from_canonical(gather_pages(pool, self.pages, layout), layout) for pool in (k_scale, v_scale)
            )
        k = unchecked_dequantize(tensors.k, k_scale, dtype)
        return tensors._replace(k=k, v=unchecked_dequantize(tensors.v, v_scale, dtype))

    def with_memory(self, pages: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None) -> Call:
        """The same call for tensors of the same kind elsewhere, with their block table and scales."""
        first = self.problem, self.mask, self.scale, self.softcap, self.dropout_p, self.dropout_seed
        return Call(*first, pages, self.needs, self.checked_mask, self.strides, k_scale, v_scale)

    def with_form(self, mask: Mask, form: NormalForm) -> Call:
        """The same call for another mask of the same structure, whose normal form is known. The result has no block
        table or scales: `with_memory` adds them."""
        call, checked = self.with_memory(None, None, None), CheckedMask(mask, self.problem)
        checked.keep(form)
        if self.checked_mask is not None:
            checked.derived_earlier = self.checked_mask.derived
        call.mask, call.checked_mask = mask, checked
        return call

    def with_problem(self, problem: Problem, **changes: Any) -> Call:
        """A copy of the call with another problem, for other tensors, and with other changed fields."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return Call(**{**fields, "strides": None, "problem": problem, **changes})
