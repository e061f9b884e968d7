"""Problems for the tests of verification."""

from __future__ import annotations

from typing import Any

import torch
from calls import call_of
from torch import Tensor

from undivided import masks
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.verification import inputs
from undivided.verification.cases import Case
from undivided.verification.oracle import Upstream

DTYPES = (torch.float32, torch.bfloat16)


def request_of(case: Case, dtype: torch.dtype) -> tuple[Call, Tensors, Upstream]:
    """The call, tensors and upstream gradients of a case, with NaN in memory outside the real lengths."""
    built = inputs.build(case, dtype, poison=True)
    call, given = call_of(**built.arguments)
    shape = (call.problem.batch, call.problem.heads, call.problem.q_len)
    return (call, given, Upstream(built.grad_out, None if built.grad_lse is None else built.grad_lse.reshape(shape)))


def window_problem(dtype: torch.dtype = torch.float32) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """q, k and v of a sliding window with grouped heads, and the other arguments of `verify`."""
    built = inputs.build(Case("window", q_len=40, heads=8, kv_heads=2, mask=lambda: masks.window(3, 0)), dtype)
    arguments = dict(built.arguments)
    del arguments["return_lse"]
    return (arguments.pop("q"), arguments.pop("k"), arguments.pop("v")), arguments
