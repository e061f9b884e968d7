"""Calls and tensors of a backend, from the keywords of `attention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from undivided.request.call import Call
from undivided.request.normalise import normalise
from undivided.request.problem import Problem
from undivided.request.request import Request, Tensors


def call_of(
    q: Tensor, k: Tensor, v: Tensor, *, device: str | None = None, needs: tuple[bool, ...] | None = None, **options: Any
) -> tuple[Call, Tensors]:
    """The checked call and its tensors; `device` replaces theirs."""
    return normalise(Request.from_keywords(q, k, v, **options), device, needs)


def problem_of(q: Tensor, k: Tensor, v: Tensor, *, device: str | None = None, **options: Any) -> Problem:
    """What selection sees of it."""
    return call_of(q, k, v, device=device, **options)[0].problem
