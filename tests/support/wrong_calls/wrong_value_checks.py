"""What comes of a valid call if one argument has another value."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from public_call_inputs import PublicCall
from torch import Tensor
from wrong_values import VALUES, fits, parameter_types, state, variants

import undivided

CALLBACKS = {"init_method", "output_layer_init_method", "get_rng_state_tracker", "function", "step"}
"""Functions of the caller, whose own errors pass."""
SLOW = {("backends", "None")}
"""Valid values that take seconds."""
REFUSED = (
    *("fuse_wgrad_accumulation", "fp8_output", "bf16_backward", "ub_tp_comm_overlap"),
    *("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"),
)
"""Flags of TransformerEngine whose only legal value may be written as 0 too."""
LENIENT = {name: {"0"} for name in REFUSED} | {
    "scale": {"a 0-d tensor"},  # PyTorch's function takes it too
    "enc_dec_attn_mask_type": {"None"},  # at construction of an encoder, which has no such mask
}
"""Values of another type that an argument takes, because they have one meaning."""


def wrong_outcomes(make: Callable[[], PublicCall]) -> list[str]:
    """The outcomes that are neither a valid result nor an error of ours, one line each."""
    return list(_outcomes(make))


def _outcomes(make: Callable[[], PublicCall]) -> Iterator[str]:
    call = make()
    before = state(call.owner)
    kinds = _parameter_types(call.function)
    for argument, label, value in _wrong_arguments(call):
        error: Exception | None = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of values that have no effect
                call.function(**{**call.arguments, argument: value})
        except Exception as raised:
            error = raised
        is_changed = state(call.owner) != before
        if error is None:
            if not fits(kinds.get(argument, "Any"), value) and label not in LENIENT.get(argument, ()):
                yield f"{argument}={label} is accepted as {kinds[argument]}"
        elif not isinstance(error, undivided.InputError | undivided.NoBackendError):
            yield f"{argument}={label}: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
        elif is_changed:
            yield f"{argument}={label} changed the object, then raised {type(error).__name__}"
        if is_changed:
            call = make()
            before = state(call.owner)
    if call.is_valid:
        call.function(**call.arguments)


def _wrong_arguments(call: PublicCall) -> Iterator[tuple[str, str, Any]]:
    """(argument, label, value) of each call."""
    for argument, valid in call.arguments.items():
        if argument in call.constant:
            continue
        for label, value in VALUES.items():
            if not (argument in CALLBACKS and callable(value)) and (argument, label) not in SLOW:
                yield argument, label, value
        if isinstance(valid, Tensor):
            for label, value in variants(valid):
                yield argument, label, value


def _parameter_types(function: Any) -> dict[str, Any]:
    """The annotation of each parameter; those of `attention` for options that are passed on to it."""
    own = function.forward if isinstance(function, torch.nn.Module) else function
    return parameter_types(undivided.attention) | parameter_types(own)
