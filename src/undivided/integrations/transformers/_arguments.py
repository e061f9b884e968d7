"""Checks of what a layer of transformers passes to the attention, as far as `undivided.attention` does not see it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from undivided.arguments.checks import as_integer, check_int_dtype, check_tensor, check_type, checked_flag
from undivided.arguments.shapes import broadcasts
from undivided.arguments.tensors import is_dense, is_traced, jit_trace, readable
from undivided.errors import InputError
from undivided.integrations.transformers._cached_states import CachedStates
from undivided.integrations.transformers._model_mask import ModelMask

_TENSORS = ("position_bias", "sinks", "indices", "block_indices", "cu_seq_lens_q", "cu_seq_lens_k")


def check_arguments(given: Mapping[str, Any]) -> None:
    """InputError unless the arguments of `attention`, by name, have their types and these tensors fit the states."""
    check_type("module", given["module"], nn.Module, "a torch.nn.Module")
    for name in ("query", "key", "value"):
        _check_states(name, given[name])
    for name in _TENSORS:
        if given[name] is not None:
            check_tensor(name, given[name])
    for name in ("is_causal", "output_attentions"):
        if given[name] is not None:
            checked_flag(name, given[name])
    for name in ("max_length_q", "max_length_k"):
        if given[name] is not None:
            as_integer(name, given[name], 0)
    if not isinstance(given["dropout"], int | float):
        raise InputError("dropout", "be a number from 0 to 1", repr(given["dropout"]))
    if given["cu_seq_lens_q"] is None and given["cu_seq_lens_k"] is not None:
        hint = "cu_seq_lens_q=cu_seq_lens_k if the queries are the tokens of the keys"
        raise InputError("cu_seq_lens_q", "be given with cu_seq_lens_k", None, hint=hint)
    _check_mask(given["attention_mask"])
    batch, heads, q_len, _ = given["query"].shape
    _check_sinks(given["sinks"], (batch, heads, q_len, 1))
    _check_indices(given["indices"], given["key"].shape[2])
    _check_blocks(given["block_indices"], given["module"])


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
    if mask.dim() == 0:
        raise InputError("attention_mask", "have axes [B|1, H|1, Sq|1, Sk]", "none")


def _check_sinks(sinks: Tensor | None, shape: tuple[int, ...]) -> None:
    if sinks is not None and not (sinks.dim() == 4 and broadcasts(sinks.shape, shape)):
        raise InputError("sinks", f"have shape [B, H, Sq, 1] = {list(shape)}", list(sinks.shape))


def _check_indices(indices: Tensor | None, kv_len: int) -> None:
    if indices is None:
        return
    check_int_dtype("indices", indices)
    if indices.dim() != 3:
        raise InputError("indices", "have shape [B, Sq, n]", list(indices.shape))
    if indices.is_cpu and readable(indices) and indices.numel() and not torch.compiler.is_compiling():
        lowest, highest = (int(number) for number in indices.aminmax())
        if lowest < 0 or highest >= kv_len:
            raise InputError("indices", f"number keys, 0 to {kv_len - 1}", lowest if lowest < 0 else highest)


def _check_blocks(blocks: Tensor | None, module: nn.Module) -> None:
    if blocks is None:
        return
    check_int_dtype("block_indices", blocks)
    if blocks.dim() != 4:
        raise InputError("block_indices", "have shape [B, G, Sq, n]", list(blocks.shape))
    if not hasattr(getattr(module, "indexer", None), "block_size"):
        raise InputError("block_indices", "be None for a layer without indexer.block_size", type(module).__name__)


_reported: set[type] = set()
"""Kinds of layers whose positions a warning has named."""
_read_on_devices: set[type] = set()
"""Kinds of layers whose positions were read from a GPU: once, because the host waits for them."""


def report_restarts(module: nn.Module, mask: ModelMask, positions: object) -> None:
    """Warn, once per kind of layer, of positions that start again at 0 in a row whose causal mask has no documents: the
    model did not read the documents from its positions, and they attend to each other."""
    if mask.has_read_positions or mask.sizes.q_len < 2 or type(module) in _reported:
        return
    if is_traced() or jit_trace() is not None:
        return
    mask.has_read_positions = True
    if not _is_one_document(mask) or not _are_positions(positions, mask):
        return
    if not positions.is_cpu:
        if type(module) in _read_on_devices:
            return
        _read_on_devices.add(type(module))
    if not _restart(positions, mask.pattern.padding):
        return
    _reported.add(type(module))
    warnings.warn(
        f"the position_ids of {type(module).__name__} start again at 0 within a row, but its mask has no documents: "
        "they attend to each other, as with other implementations. Pass cu_seq_lens_q and cu_seq_lens_k "
        "(DataCollatorWithFlattening(return_flash_attn_kwargs=True)). Most models read documents from position_ids, "
        "but only with use_cache=False and without an attention_mask",
        RuntimeWarning,
        stacklevel=3,
    )


def _is_one_document(mask: ModelMask) -> bool:
    """Whether a mask is causal over whole rows, each of which begins with its first token."""
    pattern = mask.pattern
    return mask.context is None and pattern.packed is None and pattern.right == 0 and not mask.sizes.q_offset


def _are_positions(positions: object, mask: ModelMask) -> TypeGuard[Tensor]:
    """Whether these are the positions of the tokens of a mask, in memory, with padding masks that cover them."""
    batch, q_len = mask.sizes[:2]
    if type(positions) is not Tensor or tuple(positions.shape) not in {(1, q_len), (batch, q_len)} or positions.is_meta:
        return False
    return all(real.shape[0] == batch and real.shape[1] >= q_len for real in mask.pattern.padding)


def _restart(positions: Tensor, padding: Sequence[Tensor]) -> bool:
    """Whether a real token has position 0 after a real token with a higher position."""
    q_len = positions.shape[1]
    starts = (positions[:, 1:] == 0) & (positions[:, :-1] > 0)
    for real in padding:
        starts = starts & real[:, 1:q_len].bool() & real[:, : q_len - 1].bool()
    return bool(starts.any())
