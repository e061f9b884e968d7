"""What every argument of a module must be, and which are accepted at their default alone, with the reason.

TransformerEngine's signatures hold arguments for FP8, tensor parallelism and communication overlap. They are kept, so
that a call needs no change; a value that asks for something which does not happen here is an error, never ignored.
"""

from __future__ import annotations

import numbers
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from undivided._arguments import as_integer
from undivided.errors import InputError, _rebuild_input_error


class Refused(NamedTuple):
    """An argument that has one legal value, and why."""

    default: object
    reason: str


_TENSOR_PARALLEL = (
    "heads are this rank's own: num_attention_heads // tp_size and num_gqa_groups // tp_size at construction"
)
_FP8 = "there is no FP8 attention here: inputs are float16, bfloat16, float32 or float64"
_SCORE_MOD = "it is a program for cuDNN; a condition on positions is masks.predicate(fn) in undivided.attention"

AT_CONSTRUCTION: dict[str, Refused] = {
    "sequence_parallel": Refused(False, _TENSOR_PARALLEL),
    "tp_size": Refused(1, _TENSOR_PARALLEL),
    "tp_group": Refused(None, _TENSOR_PARALLEL),
    "get_rng_state_tracker": Refused(
        None, "dropout follows torch's generator: ranks that hold different heads seed it differently themselves"
    ),
}
AT_CALL: dict[str, Refused] = {
    "fp8_output": Refused(False, _FP8),
    "bf16_backward": Refused(False, _FP8),
    "score_mod": Refused(None, _SCORE_MOD),
    "score_mod_bprop": Refused(None, _SCORE_MOD),
    "score_mod_tensors": Refused(None, _SCORE_MOD),
    "score_mod_bprop_tensors": Refused(None, _SCORE_MOD),
}

_LAYER_TENSOR_PARALLEL = (
    "every rank holds whole parameters; FSDP shards them, heads are divided by hand with DotProductAttention"
)
_OVERLAP = "there is no tensor parallel communication to overlap with"
_WGRAD = "gradients go to .grad; there is no main_grad here"
LAYERS_AT_CONSTRUCTION: dict[str, Refused] = {
    "tp_group": Refused(None, _LAYER_TENSOR_PARALLEL),
    "tp_size": Refused(1, _LAYER_TENSOR_PARALLEL),
    "sequence_parallel": Refused(False, _LAYER_TENSOR_PARALLEL),
    "set_parallel_mode": Refused(False, _LAYER_TENSOR_PARALLEL),
    "get_rng_state_tracker": AT_CONSTRUCTION["get_rng_state_tracker"],
    "fuse_wgrad_accumulation": Refused(False, _WGRAD),
}
ATTENTION_LAYER_AT_CONSTRUCTION = LAYERS_AT_CONSTRUCTION | {
    name: Refused(False, _OVERLAP)
    for name in ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")
}
TRANSFORMER_LAYER_AT_CONSTRUCTION = LAYERS_AT_CONSTRUCTION | {
    name: Refused(default, _OVERLAP)
    for name, default in (
        ("ub_tp_comm_overlap", False),
        ("ub_overlap_ag", True),
        ("ub_overlap_rs", True),
        ("ub_overlap_rs_dgrad", False),
        ("ub_bulk_dgrad", True),
        ("ub_bulk_wgrad", True),
    )
}
LAYERS_AT_CALL: dict[str, Refused] = {
    "is_first_microbatch": Refused(
        None, "there are no FP8 weights to keep from one microbatch to the next, and gradients add up as they always do"
    )
}


def check_refused(table: Mapping[str, Refused], given: Mapping[str, object]) -> None:
    """Raise for every argument that is not at its one legal value."""
    for name, (default, reason) in table.items():
        value = given[name]
        if value is default or (isinstance(value, int | str) and value == default):
            continue
        raise InputError(name, f"be {default!r}", _short(value), hint=reason)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else type(value).__name__


def checked_choice(argument: str, value: object, choices: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in choices:
        return value
    raise InputError(argument, f"be one of {', '.join(map(repr, choices))}", repr(value))


def checked_integer(argument: str, value: object, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        hint = "x.item() makes one of a tensor" if isinstance(value, Tensor) else None
        raise InputError(argument, "be an int", _short(value), hint=hint)
    return as_integer(argument, int(value), at_least)


def checked_number(argument: str, value: object, least: float, most: float, words: str) -> float:
    """A finite number within [least, most]; `words` say so in the message."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_real or not -sys.float_info.max <= value <= sys.float_info.max:  # type: ignore[operator]
        raise InputError(argument, f"be {words}", _short(value))
    assert isinstance(value, numbers.Real)
    if not least <= float(value) <= most:
        raise InputError(argument, f"be {words}", repr(value))
    return float(value)


def checked_flag(argument: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InputError(argument, "be True or False", repr(value))
    return value


def checked_heads(num_attention_heads: object, num_gqa_groups: object) -> tuple[int, int]:
    """(query heads, key/value heads)."""
    heads = checked_integer("num_attention_heads", num_attention_heads, 1)
    if num_gqa_groups is None:
        return heads, heads
    groups = checked_integer("num_gqa_groups", num_gqa_groups, 1)
    if heads % groups:
        raise InputError("num_gqa_groups", f"divide num_attention_heads ({heads})", groups)
    return heads, groups


def checked_channels(kv_channels: Any) -> tuple[int, int]:
    """(head size of queries and keys, head size of values)."""
    if isinstance(kv_channels, tuple | list):
        if len(kv_channels) != 2:
            raise InputError("kv_channels", "be an int or a pair (of queries and keys, of values)", repr(kv_channels))
        qk, v = kv_channels
        return checked_integer("kv_channels[0]", qk, 1), checked_integer("kv_channels[1]", v, 1)
    size = checked_integer("kv_channels", kv_channels, 1)
    return size, size


_NAMES = {
    "q": "query_layer",
    "k": "key_layer",
    "v": "value_layer",
    "layout": "qkv_format",
    "bias": "core_attention_bias",
    "sinks": "softmax_offset",
    "tensor": "attention_mask",
    "max_q": "max_seqlen_q",
    "max_kv": "max_seqlen_kv",
    "padded_q": "cu_seqlens_q_padded",
    "padded_kv": "cu_seqlens_kv_padded",
    "scale": "softmax_scale",
    "dropout_p": "attention_dropout",
    "new_k": "key_layer",
    "new_v": "value_layer",
}


# What a mask finds fault with, by the word that its message has for it.
_MASK_WORDS = {
    "padded_q[": "cu_seqlens_q_padded",
    "padded_kv[": "cu_seqlens_kv_padded",
    "cu_seqlens_q[": "cu_seqlens_q",
    "cu_seqlens_kv[": "cu_seqlens_kv",
    "lengths": "cu_seqlens",
    "dense": "attention_mask",
}


def in_module_words(error: InputError) -> InputError:
    """The error of `undivided.attention` or a mask under the name that the module's caller used."""
    name = _NAMES.get(error.argument)
    if error.argument == "mask":
        name = next((name for word, name in _MASK_WORDS.items() if word in str(error)), None)
    if name is None:
        return error
    message = name + str(error).removeprefix(error.argument)
    return _rebuild_input_error(message, name, error.hint)


def renamed(error: InputError, names: Mapping[str, str]) -> InputError:
    """The error with the words that a caller of an outer module used, argument and text alike."""
    message = str(error)
    for inner, outer in names.items():
        message = re.sub(rf"\b{inner}\b", outer, message)
    argument = names.get(error.argument, error.argument)
    return _rebuild_input_error(message, argument, message.partition("\n  HINT: ")[2] or None)
