"""The arguments of a layer's attention, and the checks that `undivided.attention` does not make."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from undivided.arguments.checks import as_integer, check_int_dtype, check_tensor, check_type, checked_flag
from undivided.arguments.shapes import broadcasts
from undivided.arguments.tensors import is_dense, readable
from undivided.errors import InputError, _rebuild_input_error
from undivided.integrations.transformers._model_mask import ModelMask
from undivided.integrations.transformers.cache._states import CachedStates

_TENSORS = ("position_bias", "sinks", "indices", "block_indices", "cu_seq_lens_q", "cu_seq_lens_k")
_FLAGS = ("is_causal", "output_attentions")
_LENGTHS = ("max_length_q", "max_length_k")


class LayerArguments(NamedTuple):
    """The arguments of `attention` for one layer, in its order and with its names, without those that it ignores."""

    module: nn.Module
    query: Tensor
    key: Tensor | CachedStates
    value: Tensor | CachedStates
    attention_mask: ModelMask | Tensor | None
    dropout: float
    scaling: float | None
    is_causal: bool | None
    softcap: float | None
    s_aux: Tensor | None
    position_bias: Tensor | None
    sinks: Tensor | None
    indices: Tensor | None
    block_indices: Tensor | None
    cu_seq_lens_q: Tensor | None
    cu_seq_lens_k: Tensor | None
    max_length_q: int | None
    max_length_k: int | None
    output_attentions: bool | None


def check_arguments(arguments: LayerArguments) -> None:
    """InputError unless the arguments have their types, and the tensors fit the query and the keys.

    `undivided.attention` checks ``scaling``, ``softcap``, ``s_aux`` and all that other tensors must fulfil.
    """
    module = arguments.module
    check_type("module", module, nn.Module, "a torch.nn.Module")
    for name in ("query", "key", "value"):
        _check_states(name, getattr(arguments, name))
    for name in _TENSORS:
        if (tensor := getattr(arguments, name)) is not None:
            check_tensor(name, tensor)
    for name in _FLAGS:
        if (flag := getattr(arguments, name)) is not None:
            checked_flag(name, flag)
    for name in _LENGTHS:
        if (length := getattr(arguments, name)) is not None:
            as_integer(name, length, 0)
    if not isinstance(arguments.dropout, int | float):
        raise InputError("dropout", "be a number from 0 to 1", repr(arguments.dropout))
    if arguments.cu_seq_lens_q is None and arguments.cu_seq_lens_k is not None:
        hint = "cu_seq_lens_q=cu_seq_lens_k if the queries are the tokens of the keys"
        raise InputError("cu_seq_lens_q", "be given with cu_seq_lens_k", None, hint=hint)
    _check_mask(arguments.attention_mask)
    batch, heads, q_len, _ = arguments.query.shape
    _check_sinks(arguments.sinks, (batch, heads, q_len, 1))
    _check_indices(arguments.indices, (batch, q_len), arguments.key.shape[2])
    _check_blocks(arguments.block_indices, module, (batch, heads, q_len))


def with_shapes_of_caller(error: InputError, arguments: LayerArguments) -> InputError:
    """An error about the query, the key or the value, which `undivided.attention` got as [B, S, H, D], with the shape
    that the caller passed; and a hint that fits it."""
    states = getattr(arguments, error.argument) if error.argument in ("query", "key", "value") else None
    if not isinstance(states, Tensor):
        return error
    first, _, hint = str(error).partition("\n  HINT: ")
    batch, heads, length, size = states.shape
    first = first.replace(str([batch, length, heads, size]), str(list(states.shape)))
    if "fit layout=" in hint:
        hint = "query, key and value are [B, H, S, D]; these shapes would fit [B, S, H, D]" if "bhsd" in hint else ""
    message = f"{first}\n  HINT: {hint}" if hint else first
    return _rebuild_input_error(message, error.argument, hint or None)


def check_documents(arguments: LayerArguments) -> None:
    """InputError unless packed documents are in one row, and end with its tokens. Offsets on a GPU are not read."""
    cu_q, cu_k = arguments.cu_seq_lens_q, arguments.cu_seq_lens_k
    if cu_q is None:
        return
    batch, _, q_len, _ = arguments.query.shape
    if batch != 1:
        hint = "DataCollatorWithFlattening(return_flash_attn_kwargs=True) packs the texts of a batch into one row"
        raise InputError("cu_seq_lens_q", "be given with a batch of one row", f"{batch} rows", hint=hint)
    kv_len = arguments.key.shape[2]
    if cu_k is None and kv_len != q_len:
        raise InputError("cu_seq_lens_k", f"be given if there are {kv_len} keys for {q_len} queries", None)
    _check_end("cu_seq_lens_q", cu_q, q_len, "query")
    if cu_k is not None and cu_k is not cu_q:
        _check_end("cu_seq_lens_k", cu_k, kv_len, "key")


def _check_end(name: str, offsets: Tensor, tokens: int, states: str) -> None:
    """InputError if the last offset is not the number of tokens. `masks.documents` checks all else about offsets."""
    if torch.compiler.is_compiling() or not offsets.is_cpu or not readable(offsets):
        return
    if offsets.dim() == 1 and offsets.numel() and offsets[-1] != tokens:
        hint = "documents of 3 and 7 tokens are [0, 3, 10]; tokens of padding at the end are one more document"
        raise InputError(name, f"end with the {tokens} tokens of {states}", offsets[-1].item(), hint=hint)


def _check_states(name: str, states: object) -> None:
    if isinstance(states, CachedStates):
        return
    if type(states) is not Tensor or not is_dense(states):  # `undivided.attention` checks all others
        check_tensor(name, states)
    assert isinstance(states, Tensor)
    if states.dim() != 4:
        raise InputError(name, "have four axes [B, H, S, D]", list(states.shape))


def _check_mask(mask: object) -> None:
    if mask is None or isinstance(mask, ModelMask):
        return
    if not isinstance(mask, Tensor):
        raise InputError("attention_mask", "be the result of model_mask, a tensor or None", type(mask).__name__)
    check_tensor("attention_mask", mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        must = "be bool (True = attend) or a floating-point bias"
        raise InputError("attention_mask", must, mask.dtype, hint="attention_mask.bool()")
    if mask.dim() == 0:
        raise InputError("attention_mask", "have axes [B|1, H|1, Sq|1, Sk]", "none")


def _check_sinks(sinks: Tensor | None, shape: tuple[int, ...]) -> None:
    if sinks is not None and not (sinks.dim() == 4 and broadcasts(sinks.shape, shape)):
        raise InputError("sinks", f"have shape [B, H, Sq, 1] = {list(shape)}", list(sinks.shape))


def _check_indices(indices: Tensor | None, rows: tuple[int, int], kv_len: int) -> None:
    if indices is None:
        return
    check_int_dtype("indices", indices)
    if indices.dim() != 3 or not broadcasts(indices.shape[:2], rows):
        raise InputError("indices", f"have shape [B, Sq, n] = [{rows[0]}, {rows[1]}, n]", list(indices.shape))
    if indices.is_cpu and readable(indices) and indices.numel() and not torch.compiler.is_compiling():
        lowest, highest = (int(number) for number in indices.aminmax())
        if lowest < 0 or highest >= kv_len:
            raise InputError("indices", f"number keys, 0 to {kv_len - 1}", lowest if lowest < 0 else highest)


def _check_blocks(blocks: Tensor | None, module: nn.Module, rows: tuple[int, int, int]) -> None:
    if blocks is None:
        return
    check_int_dtype("block_indices", blocks)
    batch, heads, q_len = rows
    groups = blocks.shape[1] if blocks.dim() == 4 else 0
    if groups == 0 or heads % groups or not broadcasts((blocks.shape[0], blocks.shape[2]), (batch, q_len)):
        must = f"have shape [B, G, Sq, n] = [{batch}, G, {q_len}, n], where G divides the {heads} heads"
        raise InputError("block_indices", must, list(blocks.shape))
    if not hasattr(getattr(module, "indexer", None), "block_size"):
        raise InputError("block_indices", "be None for a layer without indexer.block_size", type(module).__name__)
