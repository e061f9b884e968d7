"""The largest score of each head, computed block by block of the score matrix.

No fused kernel returns it, so this is a second pass over q . k^T: half the multiplications of a forward pass, in fp32
PyTorch operations, with the memory of one block. It runs only on request.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from undivided.arguments.layout import Layout
from undivided.context_parallel import ContextParallel
from undivided.context_parallel.max_logit import update_maxima
from undivided.masks import Mask
from undivided.request.normalise import normalise
from undivided.request.request import Options, Request, Tensors
from undivided.request.result import lse_dtype
from undivided.run.autograd import cast_under_autocast

_library = torch.library.Library("undivided", "FRAGMENT")
_library.define(
    "max_logit(Tensor q, Tensor k, Tensor? bias, Tensor? alibi_slopes, Tensor[] mask, str spec, SymInt[] numbers, "
    "str layout, float scale, float? softcap) -> Tensor"
)


def max_logit(
    q: Tensor,
    k: Tensor,
    mask: Mask,
    layout: Layout,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    scale: float,
    softcap: float | None,
    context_parallel: ContextParallel | None = None,
) -> Tensor:
    """The largest allowed score of each head, scaled and biased, fp32 [H], without gradient; -inf without pairs."""
    q, k, _ = cast_under_autocast(q, k, k)
    if context_parallel is not None:
        return context_parallel.max_logit(
            q, k, layout=layout, mask=mask, bias=bias, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes
        )
    if torch.compiler.is_compiling():
        numbers: list[int] = []
        spec, tensors = mask.flatten(numbers)
        # detached, because the operator has no derivative
        bias, alibi_slopes = (None if t is None else t.detach() for t in (bias, alibi_slopes))
        compiled: Tensor = torch.ops.undivided.max_logit(
            q.detach(), k.detach(), bias, alibi_slopes, tensors, spec, numbers, layout, scale, softcap
        )
        return compiled
    with torch.no_grad():
        inputs, options = Tensors(q, k, k, bias, None, alibi_slopes), Options(layout, mask, scale, softcap)
        call, inputs = normalise(Request(inputs, options))
        maxima = q.new_full((call.problem.heads,), -torch.inf, dtype=lse_dtype(q.dtype))
        if not q.is_meta:
            update_maxima(maxima, call, inputs)
        return maxima


@torch.library.impl(_library, "max_logit", "CompositeExplicitAutograd")
def _run(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    mask: list[Tensor],
    spec: str,
    numbers: list[int],
    layout: str,
    scale: float,
    softcap: float | None,
) -> Tensor:
    return max_logit(q, k, Mask.unflatten(spec, mask, numbers), cast(Layout, layout), bias, slopes, scale, softcap)


@torch.library.register_fake("undivided::max_logit", lib=_library)  # type: ignore[untyped-decorator]
def _shape(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((q.shape[-2],), dtype=lse_dtype(q.dtype))
