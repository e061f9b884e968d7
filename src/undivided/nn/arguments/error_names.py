"""Errors with the argument names of the module that the caller used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from undivided.errors import InputError, _rebuild_input_error

_MODULE_NAMES = {
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


# Names of arguments in the attention modules, and in a transformer layer.
SELF_ATTENTION = {"qkv_format": "attn_input_format", "attn_mask_type": "self_attn_mask_type"}
CROSS_ATTENTION = {
    "qkv_format": "attn_input_format",
    "attn_mask_type": "enc_dec_attn_mask_type",
    "attention_mask": "enc_dec_attn_mask",
    "window_size": "enc_dec_window_size",
    "bottom_right_diagonal": "enc_dec_bottom_right_diagonal",
}

# Names of tensors in the attention modules, and in the layers that compute them.
_HIDDEN = dict.fromkeys(("query_layer", "key_layer", "value_layer"), "hidden_states")
TENSORS_OF_LAYER = {
    "self": _HIDDEN,
    "cross": {**_HIDDEN, "key_layer": "encoder_output", "value_layer": "encoder_output"},
}
"""By the attention_type of the layer."""

# The module's argument, by the word in the message of a mask.
_NAMES_BY_MASK_WORD = {
    "padded_q[": "cu_seqlens_q_padded",
    "padded_kv[": "cu_seqlens_kv_padded",
    "cu_seqlens_q[": "cu_seqlens_q",
    "cu_seqlens_kv[": "cu_seqlens_kv",
    "lengths": "cu_seqlens",
    "dense": "attention_mask",
}


def with_module_names(error: InputError) -> InputError:
    """An error of `undivided.attention`, a cache or a mask, with the argument names of `DotProductAttention`."""
    name = _MODULE_NAMES.get(error.argument, error.argument)
    if error.argument == "mask":
        name = next((name for word, name in _NAMES_BY_MASK_WORD.items() if word in str(error)), name)
    first, newline, hint = str(error).partition("\n  HINT: ")
    if "masks.documents total" in hint:
        hint = "its last offset is the number of tokens in memory, with those after the last sequence"
        if not name.endswith("_padded"):
            hint = f"if the last tokens are padding, {name}_padded with offsets that end there"
    elif error.argument != "mask":
        hint = re.sub(rf"(?<!')\b{error.argument}\b(?!')", name, hint)
    message = _with_names_in_text(name + first.removeprefix(error.argument) + newline + hint)
    if message == str(error):
        return error
    return _rebuild_input_error(message, name, message.partition("\n  HINT: ")[2] or None)


def _with_names_in_text(message: str) -> str:
    """The message with the module's names of padded offsets, formats, and tensors whose attribute is read."""
    for word in ("padded_q", "padded_kv"):
        message = re.sub(rf"\b{word}\b", _MODULE_NAMES[word], message)
    for word in ("q", "k", "v"):
        message = re.sub(rf"\b{word}(?=\.[a-z])", _MODULE_NAMES[word], message)
    return re.sub(r"\blayout(?= ')", _MODULE_NAMES["layout"], message)


def rename_arguments(error: InputError, names: Mapping[str, str]) -> InputError:
    """The error with the argument names of an outer module, in the argument and in the text."""
    message = str(error)
    for inner, outer in names.items():
        message = re.sub(rf"\b{inner}\b", outer, message)
    argument = names.get(error.argument, error.argument)
    return _rebuild_input_error(message, argument, message.partition("\n  HINT: ")[2] or None)


def call_with_names(names: Mapping[str, str], function: Any, *args: Any, **kwargs: Any) -> Any:
    """The function's result; its errors have the argument names of an outer module."""
    try:
        return function(*args, **kwargs)
    except InputError as error:
        raise rename_arguments(error, names) from None
