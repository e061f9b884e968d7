"""Warnings of packed documents that a model does not keep apart.

Positions that start again at 0 within a row mark documents. Most models of transformers read the documents of a mask
from them, but not in every call; then the documents attend to each other.

Cumulative lengths are read by attention only. Convolutions and recurrences continue from one document to the next.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TypeGuard

from torch import Tensor, nn

from undivided.arguments.tensors import is_traced, jit_trace
from undivided.integrations.transformers._model_mask import ModelMask

_reported: set[type] = set()
"""Kinds of layers that a warning has named."""
_read_on_devices: set[type] = set()
"""Kinds of layers whose positions were read from a GPU: once, because the host waits for them."""


_RECURRENT = frozenset({"conv", "linear_attention", "mamba", "hybrid", "hybrid_sliding"})
"""Names in ``config.layer_types`` of layers that have a state or a convolution along the sequence."""


def report_recurrent_layers(module: nn.Module) -> None:
    """Warn, once per kind of layer, of cumulative lengths for a model some of whose layers do not read them."""
    if type(module) in _reported or is_traced() or jit_trace() is not None:
        return
    layer_types = getattr(getattr(module, "config", None), "layer_types", None)
    if not isinstance(layer_types, list | tuple) or not (found := sorted(_RECURRENT.intersection(layer_types))):
        return
    _reported.add(type(module))
    warnings.warn(
        f"the model of {type(module).__name__} has layers of the kinds {', '.join(found)}: cumulative lengths separate "
        "documents in its attention, but these layers may continue from one document to the next. One document per "
        "row keeps them apart",
        RuntimeWarning,
        stacklevel=3,
    )


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
