"""Verification: every backend is compared with an fp64 oracle, on a user's problem or on the catalogue of cases.

case, case_tables, cases    the problems                inputs          their tensors
pieces, oracle              the right answer            plain_attention, budget   the allowed error
runs                        one backend on one problem  report          the result
sample                      problems that are too large for a full oracle
contract, capture, lines, workers                       the whole catalogue on a device, in processes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Never

import torch
from torch import Tensor

from undivided.arguments.checks import checked_flag
from undivided.arguments.layout import Layout
from undivided.arguments.signature import checked_call, unknown_arguments
from undivided.backends import all_backends, has_name, names_and_families
from undivided.backends._base import Backend
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.request.checks import check_scalars
from undivided.request.foreign import keyword_hint
from undivided.request.request import KEYWORDS, Options, Tensors
from undivided.request.seed import draw_number
from undivided.run import autograd
from undivided.verification.report import Report, Row
from undivided.verification.runs import build_trial, run

__all__ = ["Report", "Row", "verify"]


@checked_call
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
    batch_invariant: bool | None = None,
    return_lse: bool = False,
    pages: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backends: Sequence[str] | None = None,
    gradients: bool = True,
    **unknown: Never,
) -> Report:
    """A `Report` that compares every backend that can run this problem with an oracle in fp64.

    ``||x - oracle|| / ||oracle|| <= 2 * error of plain attention in the input's dtype + one rounding`` must hold for
    the output, the log-sum-exp and every gradient x. The error of plain attention in a gradient of few numbers, such as
    that of sinks, follows from the errors of all rows. Entries that no allowed pair reaches must be exactly 0. With
    gradients the output of a call without them is compared too, because kernels may compute it in another way. A
    quantity of which plain attention has no digit right, such as gradients for scores of 1e7 in fp32, is undecided, and
    the report is not ok. The oracle is dense and slow: it computes every (query, key) pair twice, in pieces that fit in
    memory.

    Args:
        q, k, v: floating-point tensors in `layout`, as for `attention`. They and all other tensors stay unchanged:
            gradients are taken of views of them, with random upstream gradients.
        layout, mask, bias, scale, softcap, alibi_slopes, sinks, dropout_p, dropout_seed, deterministic,
            batch_invariant, return_lse, pages, k_scale, v_scale: as for `attention`. Without a seed, all backends use
            the same random one.
        backend: the only backend to run, as for `attention`.
        backends: names or families of the backends to run; None is all.
        gradients: check the gradients of q, k, v, bias, sinks and alibi_slopes, whether or not they require one. A
            backend without some of these gradients is run with those that the tensors require (q, k, v if none does),
            and if it refuses these too, without gradients.

    Returns:
        A `Report`: ``.ok``, ``.rows`` (backend, quantity, error, budget, verdict), ``.refused`` (reasons by backend),
        ``.to_dict()``; ``print`` shows it as a table. A kernel that raises gives a failed row.

    Raises:
        InputError: an argument is wrong, or the inputs hold NaN or infinity where the mask does not hide it.

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
    options = Options(layout, mask, scale, softcap, dropout_p, dropout_seed, return_lse, pages, k_scale, v_scale)
    check_scalars(options)
    checked_flag("gradients", gradients)
    selected = _select([backend] if backend is not None else backends)
    device = q.device.type if isinstance(q, Tensor) else "cpu"
    q, k, v = autograd.cast_under_autocast(q, k, v, k_scale)
    if dropout_p and dropout_seed is None:
        options = options._replace(dropout_seed=draw_number())  # the same pattern for all backends
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device, enabled=False):
        tensors = Tensors(q, k, v, bias, sinks, alibi_slopes)._asdict()
        rest = {**options._asdict(), "deterministic": deterministic, "batch_invariant": batch_invariant}
        trial = build_trial(tensors, rest.pop("layout"), rest, gradients)
        outcomes = {candidate.name: run(candidate, trial) for candidate in selected}
    return Report(
        str(trial.budget.problem),
        tuple(row for outcome in outcomes.values() for row in outcome.rows),
        {name: outcome.reasons for name, outcome in outcomes.items() if not outcome.rows},
        {name: outcome.reasons for name, outcome in outcomes.items() if outcome.rows and outcome.reasons},
    )


def _check_arguments(q: object, unknown: Mapping[str, object]) -> None:
    if isinstance(q, Tensor) and q.is_meta:
        hint = "undivided.explain takes meta tensors, and runs nothing"
        raise InputError("q", "hold values, because verify computes with them", "a meta tensor", hint)
    if unknown:
        known = sorted({*KEYWORDS, "backends", "gradients"})
        raise unknown_arguments("verify", unknown, known, keyword_hint(unknown, known)).as_also(TypeError)


def _select(names: Sequence[str] | None) -> list[Backend]:
    """The backends with these names or families, in the order of the list; None is all."""
    if names is None:
        return list(all_backends())
    if not isinstance(names, list | tuple):
        raise InputError("backends", "be a list of names, or None", repr(names))
    for name in names:
        if not isinstance(name, str) or name not in names_and_families():
            raise InputError("backends", f"contain only {', '.join(sorted(names_and_families()))}", repr(name))
    return list(dict.fromkeys(candidate for name in names for candidate in all_backends() if has_name(candidate, name)))
