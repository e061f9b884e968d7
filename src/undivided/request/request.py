"""The arguments of `attention` as values: the tensors that may have gradients, and the options.

Nothing is checked here. `undivided.request.normalise` checks a request and turns it into a `Call`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.layout import Layout
from undivided.arguments.tensors import is_lazy, materialise
from undivided.masks import Mask

new_tuple = tuple.__new__
"""``new_tuple(Tensors, (...))`` is ``Tensors(...)`` at half the cost, for the tuples that every call creates."""


class Tensors(NamedTuple):
    """The inputs that may have gradients, in the order in which gradients are returned.

    q [.., H, Dk], k [.., N, Dk] and v [.., N, Dv] have the request's layout; with pages, k and v are pools
    [pages, page_size, N, D]. bias is broadcastable to [B, H, Sq, Sk], sinks is [H], alibi_slopes is [H] or
    [sequences, H]. Quantised k and v have the dtype and the last axis of their format.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None

    def heads_first(self, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as [B, H, S, D], views."""
        q, k, v = self[:3]
        return _layout.heads_first(q, layout), _layout.heads_first(k, layout), _layout.heads_first(v, layout)

    def materialised(self) -> Tensors:
        """The tensors, with copies of those that are lazy: for kernels that read what is at a pointer."""
        for tensor in self:
            if tensor is not None and is_lazy(tensor):
                return Tensors._make(None if t is None else materialise(t) for t in self)
        return self

    def without_pages(self, pages: Tensor | None, layout: Layout) -> Tensors:
        """The tensors with k and v in `layout`: copies of the pages of every sequence, in order."""
        if pages is None:
            return self
        k, v = (_layout.from_canonical(gather_pages(pool, pages, layout), layout) for pool in (self.k, self.v))
        return self._replace(k=k, v=v)


def gather_pages(pool: Tensor, pages: Tensor, layout: Layout) -> Tensor:
    """The pages of every sequence, in order: [B, max_pages * page_size, N, ..], or one long row for thd."""
    rows = pool[pages.clamp(0, max(pool.shape[0] - 1, 0))].flatten(1, 2)
    return rows.flatten(0, 1).unsqueeze(0) if layout == "thd" else rows


class Options(NamedTuple):
    """Everything else that an attention call takes; see `undivided.attention` for each."""

    layout: Layout
    mask: Mask | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int | Tensor | None = None
    return_lse: bool = False
    pages: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class Conditions(NamedTuple):
    """What a problem depends on besides tensors and options.

    device: replaces that of the tensors, for machines that are only described; None for theirs.
    needs: which of `Tensors` need a gradient.
    scale_not_positive: whether the scale is 0 or below (wrong in kernels that scale after masking with -inf).
    """

    device: str | None
    needs: tuple[bool, ...]
    scale_not_positive: bool


class Request(NamedTuple):
    """The arguments of one call of `attention`.

    >>> import torch
    >>> q = torch.randn(1, 4, 2, 8)
    >>> Request.from_keywords(q, q, q, layout="bshd", softcap=5.0).options.softcap
    5.0
    """

    tensors: Tensors
    options: Options
    backend: str | None = None
    deterministic: bool | None = None
    batch_invariant: bool | None = None

    @staticmethod
    def from_keywords(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        backend: str | None = None,
        deterministic: bool | None = None,
        batch_invariant: bool | None = None,
        **options: Any,
    ) -> Request:
        """A request from the keywords of `attention`; `options` are the fields of `Options`."""
        tensors = Tensors(q, k, v, bias, sinks, alibi_slopes)
        return Request(tensors, Options(**options), backend, deterministic, batch_invariant)


OPTIONAL_TENSORS = Tensors._fields[3:]
RULES = Request._fields[2:]
"""The arguments that decide which backend may run."""
KEYWORDS = frozenset((*OPTIONAL_TENSORS, *Options._fields, *RULES))
"""The keywords of `attention` that make a request."""
