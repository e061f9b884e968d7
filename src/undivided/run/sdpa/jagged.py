"""Jagged nested tensors as packed tokens, for `scaled_dot_product_attention`.

The sequences of a jagged tensor lie one after another in one buffer, which is layout "thd" with a mask of documents.
PyTorch's own function copies them to padded tensors on a CPU, and refuses is_causal there.

Source: PyTorch's documentation of ``torch.nested``, and ``jagged_scaled_dot_product_attention`` for what it accepts.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from undivided import masks
from undivided.errors import InputError
from undivided.masks import Mask

_BUILD = "torch.nested.nested_tensor_from_jagged(values, query.offsets()).transpose(1, 2)"

_directly = torch._C.DisableTorchFunctionSubclass
"""Under it, attributes are read without a call of the class of jagged tensors, which takes 10 us each time."""


def is_jagged(*tensors: object) -> bool:
    """Whether one of them is a jagged nested tensor."""
    with _directly():
        return any(isinstance(t, Tensor) and t.layout is torch.jagged for t in tensors)


def has_jagged_heads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether all are [B, H, S, D] with a jagged H: their values are dense tensors [all heads, S, D]."""
    with _directly():
        return all(is_jagged(t) and t.dim() == 4 and _ragged_axis(t) == 1 for t in (query, key, value))


def packed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Mask]:
    """The tokens of all sequences, [T, H, D] each, and the mask of the pairs of one sequence.

    Raises:
        InputError: one of the tensors is not jagged, or not in S; they have different numbers of sequences, or key and
            value different sequences.
    """
    with _directly():
        q, k, v = (_tokens(name, t) for name, t in (("query", query), ("key", key), ("value", value)))
        if not _are_alike(key, value):
            raise InputError("value", "have the sequences of key", "others", hint=_BUILD.replace("query", "key"))
        of_query, of_key = (len(_sequences(t)[0]) - 1 for t in (query, key))
        if of_query != of_key:
            raise InputError("key", f"have as many sequences as query ({of_query})", of_key)
        extents = _extents("q", query, q)
        if not _are_alike(query, key):
            extents |= _extents("kv", key, k)
    return q, k, v, masks.documents(**extents)


def like(query: Tensor, out: Tensor) -> Tensor:
    """A jagged tensor of the axes and sequences of query, from results [T, H, D] of its tokens, or from those of all
    heads [all heads, S, D] if `has_jagged_heads`."""
    with _directly():
        nested = torch.nested.nested_tensor_from_jagged(
            out.squeeze(1) if query.dim() == 3 else out,
            *_sequences(query),
            min_seqlen=cast(Any, query)._maybe_min_seqlen,
            max_seqlen=cast(Any, query)._maybe_max_seqlen,
        )
        return nested.transpose(1, 2) if _ragged_axis(query) == 2 else nested


def _ragged_axis(tensor: Tensor) -> int:
    return int(cast(Any, tensor)._ragged_idx)


def _tokens(name: str, tensor: Tensor) -> Tensor:
    if not is_jagged(tensor):
        raise InputError(name, "be jagged, if one of the tensors is", "a dense tensor", hint=_BUILD)
    if tensor.dim() == 3 and _ragged_axis(tensor) == 1:
        return tensor.values().unsqueeze(1)
    if tensor.dim() == 4 and _ragged_axis(tensor) == 2:
        return tensor.values().transpose(0, 1)
    got = f"{tensor.dim()} axes, of which axis {_ragged_axis(tensor)} is jagged"
    raise InputError(
        name,
        "be [B, H, S, D] with a jagged S, or [B, S, D]",
        got,
        hint=f"{name}.transpose(1, 2), if it is [B, S, H, D]",
    )


def _sequences(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """The offsets of a jagged tensor's sequences, and their lengths, None if there are no gaps."""
    jagged = cast(Any, tensor)
    return jagged.offsets(), jagged.lengths()


def _are_alike(a: Tensor, b: Tensor) -> bool:
    """Whether two jagged tensors have the same sequences. Those on a GPU are not read: only the same objects count."""

    def equal(x: Tensor | None, y: Tensor | None) -> bool:
        return x is y or (x is not None and y is not None and x.is_cpu and y.is_cpu and x.equal(y))

    return all(map(equal, _sequences(a), _sequences(b)))


def _extents(side: str, tensor: Tensor, tokens: Tensor) -> dict[str, Any]:
    """The arguments of `masks.documents` for one side, "q" or "kv"."""
    offsets, lengths = _sequences(tensor)
    longest = None if offsets.is_cpu else cast(Any, tensor)._max_seqlen
    total = tokens.shape[0]
    if lengths is None:
        return {f"cu_seqlens_{side}": offsets, f"max_{side}": longest, f"total_{side}": total}
    real = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    return {f"cu_seqlens_{side}": real, f"padded_{side}": offsets, f"max_{side}": longest, f"total_{side}": total}
