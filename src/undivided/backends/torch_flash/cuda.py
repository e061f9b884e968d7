"""The CUDA half of `torch_flash`: PyTorch's copy of FlashAttention-2, called below SDPA.

The kernel aligns causal masks bottom-right, so SDPA refuses its causal flag for unequal lengths. A direct call gives
bottom-right alignment, and also windows, packed documents and the log-sum-exp, which SDPA does not offer.

Source of the limits: PyTorch, aten/src/ATen/native/transformers/cuda (sdp_utils.cpp, attention_backward.cu) and
flash_attn/flash_api.cpp; torch/nn/attention/varlen.py for packed tokens.

A program may replace that kernel by FlashAttention 3 or 4 (``torch.nn.attention.activate_flash_attention_impl``). The
operators stay the same; the limits are those of the version, restricted to what torch/nn/attention/_fa3.py and _fa4.py
(2.13) accept. The active version is read at every call. This library never activates one, because the setting is
global.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from undivided.backends._base import Gradients, Limits, limit_reasons
from undivided.backends.shared import flash_attn_rules, gpu_rules
from undivided.backends.shared.empty_rows import clear_tail_
from undivided.backends.shared.flash_attn_arguments import (
    flash_attn_band,
    for_backward,
    in_callers_layout,
    kernel_result,
    packing_arguments,
)
from undivided.backends.shared.kernel_inputs import align, clean_views
from undivided.machine import Machine, active_flash_impl
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import Result

OPS = torch.ops.aten

LIMITS = Limits(
    devices=frozenset({"cuda"}),
    dtypes=gpu_rules.HALF,
    max_head_dim=256,
    head_dim_multiple=8,
    masks=frozenset({"causal", "window", "documents"}),
    alignments=frozenset({"bottom_right"}),
    features=frozenset({"backward", "gqa", "lse"}),
    compute_capability=((8, 0), (12, 1)),
    packages=(("torch", (2, 6), None),),
    notes={
        "dropout": "it draws its own pattern",
        "alibi": "PyTorch builds its kernel without them",
        "softcap": "PyTorch's operator has no argument for it",
        "lse_grad": "PyTorch's operator returns lse as a constant",
        "lengths": "PyTorch's operator takes lengths of packed tokens only",
    },
)


def _activated(limits: Limits, highest: tuple[int, int]) -> Limits:
    """The limits of a flash-attn package activated in PyTorch: only features that PyTorch's operators have arguments
    for, without ALiBi."""
    return dataclasses.replace(
        limits,
        features=limits.features & LIMITS.features,
        compute_capability=((9, 0), highest),
        packages=(("torch", (2, 13), None),),  # earlier versions were not examined
        notes=LIMITS.notes | {"alibi": "PyTorch's operators refuse them with this implementation"},
    )


_Rules = tuple[Limits, Callable[[Problem, Machine], list[str]]]
ACTIVATED: dict[str, _Rules] = {
    "FA3": (_activated(flash_attn_rules.LIMITS_3, (9, 0)), flash_attn_rules.extra_reasons_3),
    # _fa4.py requires a major version of 9 or 10
    "FA4": (_activated(flash_attn_rules.LIMITS_4, (10, 9)), flash_attn_rules.extra_reasons_4),
}


def reasons(problem: Problem, machine: Machine) -> list[str]:
    """Every reason why PyTorch's flash operators, with the kernel that is active, cannot run this on CUDA."""
    common = gpu_rules.hip_reasons(problem, machine) + gpu_rules.size_reasons(problem)
    impl = machine.flash_impl
    if impl is not None:
        return common + _activated_reasons(impl, problem, machine)
    return limit_reasons(LIMITS, problem, machine) + common + flash_attn_rules.large_head_reasons(problem, machine)


def _activated_reasons(impl: str, problem: Problem, machine: Machine) -> list[str]:
    if impl not in ACTIVATED:
        return [
            f"{impl} is active in place of PyTorch's flash kernel, and its limits are not known "
            "(torch.nn.attention.restore_flash_attention_impl() deactivates it)"
        ]
    limits, extra_reasons = ACTIVATED[impl]
    reasons = limit_reasons(limits, problem, machine)
    if machine.compute_capability is not None:
        reasons += extra_reasons(problem, machine)
    return [f"{impl}, which is active: {reason}" for reason in reasons]


def forward(call: Call, tensors: Tensors) -> Result:
    """Attention by ``aten::_flash_attention_forward``."""
    causal, left, right = _band(call)
    q, k, v = _tensors(call, tensors)
    packing = _pack(call, tensors)
    out, lse, *_ = OPS._flash_attention_forward(
        q, k, v, *packing, 0.0, causal, False, scale=call.scale, window_size_left=left, window_size_right=right
    )
    return kernel_result(call, tensors, out, lse)


def backward(call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None) -> Gradients:
    """Gradients by ``aten::_flash_attention_backward``."""
    causal, left, right = _band(call)
    q, k, v = _tensors(call, tensors)
    packing = _pack(call, tensors)
    grad, out, lse = for_backward(call, tensors, result, grad_out, own_tokens=active_flash_impl() is None)
    # without dropout the random state is not read, but the schema requires two tensors
    unused = (torch.zeros(2, dtype=torch.uint64, device=q.device), torch.zeros(0, dtype=torch.uint64, device=q.device))
    with _deterministic(call.problem):
        grads = OPS._flash_attention_backward(
            align(grad.contiguous()),
            q,
            k,
            v,
            out.contiguous(),
            lse,
            *packing,
            0.0,
            causal,
            *unused,
            scale=call.scale,
            window_size_left=left,
            window_size_right=right,
        )
    cu_q, cu_k = packing[:2]
    if cu_q is not None and cu_k is not None:
        grads = [clear_tail_(grad, cu) for grad, cu in zip(grads, (cu_q, cu_k, cu_k), strict=True)]
    return [*in_callers_layout(call, grads), None, None, None]


_flag = threading.Lock()


@contextmanager
def _deterministic(problem: Problem) -> Iterator[None]:
    """Sets PyTorch's global determinism flag for one call: its kernels read nothing else. One thread at a time, so that
    none restores the flag while another launches."""
    if not problem.deterministic:
        yield
        return
    with _flag:
        is_on, only_warns = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(is_on, warn_only=only_warns)


def _band(call: Call) -> tuple[bool, int, int]:
    """(causal, left, right); an activated version gets a causal mask by its flag alone, as in FlashAttention 4's
    interface."""
    causal, left, right = flash_attn_band(call)
    return causal, left, -1 if causal and active_flash_impl() is not None else right


def _tensors(call: Call, tensors: Tensors) -> tuple[Tensor, ...]:
    """q, k, v, with 0 where no pair reads what the kernel may load; FlashAttention 2 loads only tokens of its
    document."""
    return clean_views(call, tensors, own_tokens=active_flash_impl() is None)


_Packing = tuple[Tensor | None, Tensor | None, int, int]


def _pack(call: Call, tensors: Tensors) -> _Packing:
    """(cu_q, cu_k, max_q, max_k); cu_q and cu_k are None for dense sequences."""
    problem = call.problem
    packing = packing_arguments(call, tensors)
    if not packing:
        return None, None, problem.q_len, problem.kv_len
    return packing["cu_seqlens_q"], packing["cu_seqlens_k"], packing["max_seqlen_q"], packing["max_seqlen_k"]
