"""Arguments of TransformerEngine that are accepted at one value only, with the reasons.

TransformerEngine's signatures have arguments for FP8 and for the overlap of communication with computation. They are
kept, so that calls need no change. A value that requests an unsupported feature is an error and is never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from undivided.errors import InputError


class FixedArgument(NamedTuple):
    """An argument with a single legal value, and the reason; `optional` if None means the same."""

    default: object
    reason: str
    optional: bool = False


_FP8 = "FP8 attention is not supported: inputs are float16, bfloat16, float32 or float64"
_SCORE_MOD = (
    "score functions for cuDNN are not supported; for a condition on positions, masks.predicate(fn) in "
    "undivided.attention"
)

AT_CALL: dict[str, FixedArgument] = {
    "fp8_output": FixedArgument(False, _FP8, optional=True),
    "bf16_backward": FixedArgument(False, _FP8, optional=True),
    "score_mod": FixedArgument(None, _SCORE_MOD),
    "score_mod_bprop": FixedArgument(None, _SCORE_MOD),
    "score_mod_tensors": FixedArgument(None, _SCORE_MOD),
    "score_mod_bprop_tensors": FixedArgument(None, _SCORE_MOD),
}

_OVERLAP = "communication of tensor parallelism does not overlap with computation"
_WGRAD = "gradients are in .grad; main_grad is not supported"
LAYERS_AT_CONSTRUCTION: dict[str, FixedArgument] = {"fuse_wgrad_accumulation": FixedArgument(False, _WGRAD)}
OVERLAPS = "ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"
"""Kinds of overlap; in a TransformerLayer they have no effect without ub_tp_comm_overlap."""
ATTENTION_LAYER_AT_CONSTRUCTION = LAYERS_AT_CONSTRUCTION | {name: FixedArgument(False, _OVERLAP) for name in OVERLAPS}
TRANSFORMER_LAYER_AT_CONSTRUCTION = LAYERS_AT_CONSTRUCTION | {"ub_tp_comm_overlap": FixedArgument(False, _OVERLAP)}


def check_refused(table: Mapping[str, FixedArgument], arguments: Mapping[str, object]) -> None:
    """Raise InputError for an argument that does not have its single legal value."""
    for name, (default, reason, optional) in table.items():
        value = arguments[name]
        if value is default or (value is None and optional) or (isinstance(value, int | str) and value == default):
            continue
        raise InputError(name, f"be {default!r}", shorten(value), hint=reason)


def shorten(value: object) -> str:
    """The repr of a value for an error, or the name of its type if the repr is long."""
    text = repr(value)
    return text if len(text) <= 60 else type(value).__name__
