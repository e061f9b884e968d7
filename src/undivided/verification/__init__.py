"""Verification: every backend against an fp64 oracle, on one's own problem or on the catalogue of cases.

cases    what to try          inputs   tensors for it
oracle   what is right        budget   how far from it a kernel may be
runs     one backend at work  report   what was found
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from undivided import _autograd
from undivided._layout import Layout
from undivided._request import Options, Tensors
from undivided.backends import all_backends, is_called, names_and_families
from undivided.backends._base import Backend
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.verification.report import Report, Row
from undivided.verification.runs import request, run

__all__ = ["Report", "Row", "verify"]


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    pages: Tensor | None = None,
    backends: Sequence[str] | None = None,
    gradients: bool = True,
    **unknown: Any,
) -> Report:
    """Run every backend that can run this problem, and hold each against an oracle in fp64.

    ``||x - oracle|| / ||oracle|| <= 2 * error of plain attention in the input's dtype + one rounding`` for the output,
    the log-sum-exp and every gradient x. What the mask leaves without a pair must be exactly 0. The oracle is dense and
    slow: it visits every pair of query and key twice, in pieces that fit in memory.

    Args:
        backends: names or families to run; None is all of them. backend: the same for one, as in `attention`.
        gradients: check the gradients of q, k, v, bias, sinks and alibi_slopes, whether or not they require one. A
            backend that has no gradient for some is asked for those that require one (q, k, v if none does), then for
            the output only.
        q, k, v, layout, mask, bias, scale, softcap, alibi_slopes, sinks, dropout_p, dropout_seed, deterministic,
            return_lse, pages: as for `attention`. Tensors are left as they are: gradients are taken of views of them,
            along random upstream gradients.

    Returns:
        A `Report`: ``.ok``, ``.rows`` (backend, quantity, error, budget), ``.refused`` (reasons by backend),
        ``.to_dict()``; ``print`` it for the table. What a kernel raises is a failed row.

    Raises:
        InputError: an argument is wrong, or NaN or infinity stands where the mask lets it be seen.

    Source: the budget is that of the flash-attention tests, github.com/Dao-AILab/flash-attention: twice the error of a
    plain low-precision attention.

    >>> import torch, undivided
    >>> from undivided import masks
    >>> q, k, v = torch.randn(2, 9, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    >>> report = undivided.verify(q, k, v, layout="bshd", mask=masks.causal(), backends=["reference", "torch_flash"])
    >>> report.ok
    True
    >>> report.backends
    ('reference', 'torch_flash')
    >>> sorted(report.of("torch_flash"))
    ['dk', 'dq', 'dv', 'lse', 'out']
    """
    _check_arguments(q, unknown)
    chosen = _chosen([backend] if backend is not None else backends)
    device = q.device.type if isinstance(q, Tensor) else "cpu"
    if torch.is_autocast_enabled(device):
        q, k, v = _autograd.autocast(q, k, v)
    if dropout_p and dropout_seed is None:
        dropout_seed = int(torch.randint(2**62, ()))  # one pattern for all of them
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device, enabled=False):
        tensors = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks, "alibi_slopes": alibi_slopes}
        options = Options(layout, mask, scale, softcap, dropout_p, dropout_seed, return_lse, pages)._asdict()
        rest = {**options, "deterministic": deterministic}
        asked = request(tensors, rest.pop("layout"), rest, gradients)
        outcomes = {candidate.name: run(candidate, asked) for candidate in chosen}
    return Report(
        str(asked.budget.problem),
        tuple(row for outcome in outcomes.values() for row in outcome.rows),
        {name: outcome.reasons for name, outcome in outcomes.items() if not outcome.rows},
        {name: outcome.reasons for name, outcome in outcomes.items() if outcome.rows and outcome.reasons},
    )


def _check_arguments(q: object, unknown: Mapping[str, object]) -> None:
    if isinstance(q, Tensor) and q.is_meta:
        hint = "undivided.explain takes meta tensors, and runs nothing"
        raise InputError("q", "hold values, for verify computes with them", "a meta tensor", hint)
    if unknown:
        known = ", ".join(sorted({*Tensors._fields[3:], *Options._fields, "backend", "deterministic"}))
        raise InputError(
            "verify", f"be given arguments of attention ({known}), backends= or gradients=", sorted(unknown)
        )


def _chosen(words: Sequence[str] | None) -> list[Backend]:
    """The backends of these names and families, in the order they were given; all where None."""
    if words is None:
        return list(all_backends())
    if not isinstance(words, list | tuple):
        raise InputError("backends", "be a list of names, or None", repr(words))
    for word in words:
        if not isinstance(word, str) or word not in names_and_families():
            raise InputError("backends", f"name only {', '.join(sorted(names_and_families()))}", repr(word))
    return list(
        dict.fromkeys(candidate for word in words for candidate in all_backends() if is_called(candidate, word))
    )
