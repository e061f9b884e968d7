"""The mask of a model for one call: a pattern, a padding mask, sizes and offsets as an undivided `Mask`.

Query row i has the absolute position ``i + q_offset``, key row j has ``j + kv_offset`` (a cache that keeps a window
drops its first keys). So the diagonal is ``j = i + d`` with ``d = q_offset - kv_offset``. In undivided's bottom-right
masks the last real query of a sequence is aligned with its last real key. The real lengths are chosen here so that the
two diagonals agree.

Legend: B batch, Sq queries, Sk keys.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any, cast

import torch
from torch import Tensor

from undivided import masks
from undivided.arguments.checks import as_device, as_integer, check_tensor, check_type, checked_flag
from undivided.arguments.tensors import is_traced, jit_trace, readable, values_are_traced
from undivided.errors import InputError
from undivided.integrations.transformers._active import active_batch
from undivided.integrations.transformers._model_mask import MaskSizes, ModelMask, hides_nothing, keys_of_one_query
from undivided.integrations.transformers._patterns import MaskFunction, Packed, Pattern, is_recorded, read
from undivided.masks import FULL, Mask
from undivided.selection.policy import current_policy

MANY_PAIRS = 1 << 22
"""Pairs of a query and a key from which on an unknown mask function is worth a warning: those of 2048 tokens."""

_reported: set[str] = set()
"""Names of the mask functions that a warning has named."""


def model_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | ModelMask | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    **unused: Any,
) -> ModelMask:
    """The mask of a model, once per kind of layer and forward pass: the registered mask function.

    Args:
        batch_size, q_length, kv_length: sizes of the call; the keys are all that the cache returns.
        q_offset, kv_offset: absolute positions of the first query and of the first key.
        mask_function: of absolute positions; None is every pair.
        attention_mask: the real keys from position 0 on, bool ``[B, S]``; keys beyond S are not real. None: all are
            real. A mask that already exists (``generate`` creates it before the model) is returned.
        use_vmap: whether the function takes single positions instead of tensors.
        device: of the model's tensors.
        dtype: of the model's hidden states.
        config: the model's configuration.
        unused: arguments of other implementations.

    Returns:
        A `ModelMask`, for the ``attention_mask`` of `attention`. A RuntimeWarning names a function of unknown
        structure, once, if it has many pairs.

    Raises:
        InputError: an argument is wrong.

    >>> mask = model_mask(1, 2, 4, q_offset=2, mask_function=lambda b, h, q, k: k <= q)
    >>> mask.to_dense()[0, 0].int().tolist()
    [[1, 1, 1, 0], [1, 1, 1, 1]]
    """
    if isinstance(attention_mask, ModelMask):
        return attention_mask
    records_offset = isinstance(q_offset, Tensor) and values_are_traced()  # torch.export, with a static cache
    sizes = MaskSizes(
        _as_size("batch_size", batch_size, 0),
        _as_size("q_length", q_length, 0),
        _as_size("kv_length", kv_length, 0),
        0 if records_offset else _as_size("q_offset", q_offset),
        _as_size("kv_offset", kv_offset),
    )
    _check_arguments(mask_function, attention_mask, use_vmap, dtype)
    if attention_mask is not None and not is_traced():
        _check_rows(attention_mask, sizes.batch)
    pattern = Pattern() if mask_function is None else read(mask_function)
    if (active := active_batch()) is not None:
        return active.model_mask(pattern, batch_size, q_length)
    if pattern.rest and not is_traced() and q_length * kv_length >= MANY_PAIRS:
        _report_evaluation(pattern, sizes)
    if use_vmap:
        pattern = dataclasses.replace(pattern, rest=tuple(map(_over_positions, pattern.rest)))
    if attention_mask is not None:
        pattern = pattern.with_padding(attention_mask)
    device = as_device("device", device)
    is_additive = config is not None and not takes_booleans(type(config))
    if records_offset:
        pattern = Pattern(padding=pattern.padding, rest=(_from_offset(pattern, cast(Tensor, q_offset)),))
    keys = keys_of_one_query(pattern, sizes, device)
    pairs = to_mask(pattern, sizes, device) if keys is None else None
    mask = ModelMask(pairs, pattern, sizes, device, dtype if is_additive else torch.bool, keys=keys)
    if current_policy().batch_invariant and (in_one_row := _in_one_row(pattern, sizes)) is not None:
        pattern, sizes = in_one_row
        mask.in_one_row = ModelMask(to_mask(pattern, sizes, device), pattern, sizes, device, mask.dtype)
    return mask


def _check_arguments(mask_function: object, attention_mask: object, use_vmap: object, dtype: object) -> None:
    """InputError unless these arguments of `model_mask` have their types and shapes."""
    if mask_function is not None and not callable(mask_function):
        raise InputError("mask_function", "be a function of positions, or None", type(mask_function).__name__)
    if attention_mask is not None:
        check_tensor("attention_mask", attention_mask)
        assert isinstance(attention_mask, Tensor)
        if attention_mask.dim() != 2:
            raise InputError("attention_mask", "have shape [B, S]", list(attention_mask.shape))
    checked_flag("use_vmap", use_vmap)
    check_type("dtype", dtype, torch.dtype, "a torch.dtype")


def _check_rows(attention_mask: Tensor, batch: int) -> None:
    """InputError if an attention_mask that hides keys has another number of rows than the text."""
    rows = attention_mask.shape[0]
    if rows != batch and not (readable(attention_mask) and bool(attention_mask.all())):
        raise InputError("attention_mask", f"have a row for each of the {batch} of the text", f"{rows} rows")


def _from_offset(pattern: Pattern, q_offset: Tensor) -> MaskFunction:
    """A pattern without its padding as a function of the rows of a call, whose first query has this position."""
    allows = dataclasses.replace(pattern, padding=()).allows

    def of_rows(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return allows(b, h, q + q_offset, k)

    return of_rows


def _as_size(argument: str, value: int | Tensor, at_least: int | None = None) -> int:
    """A size as an int, or as the symbol that torch.export has for it; torch.jit.trace has tensors."""
    if isinstance(value, Tensor) and value.numel() == 1 and (at_least is None or jit_trace() is not None):
        return int(value)
    return as_integer(argument, value, at_least)


def within_documents(model_mask: ModelMask, cu_q: Tensor, cu_kv: Tensor, max_q: int | None, max_kv: int | None) -> Mask:
    """The pattern of a model within packed documents, cached for layers with the same tensors."""
    if model_mask.documents is None or model_mask.documents[0] is not cu_q or model_mask.documents[1] is not cu_kv:
        pattern, sizes = model_mask.pattern, model_mask.sizes
        mask = (
            packed_mask(pattern, cu_q, cu_kv, max_q, max_kv)
            & _opaque(pattern, sizes, model_mask.device)
            & _key_map(pattern, sizes)
        )
        if pattern.packed is not None and pattern.packed.positions is None:  # the documents of a mask function
            mask = mask & masks.document_ids(pattern.packed.ids)
        model_mask.documents = cu_q, cu_kv, mask
    return model_mask.documents[2]


def takes_booleans(config_class: type) -> bool:
    """Whether a model of this configuration supports boolean masks, those of "sdpa" and "flex_attention".

    Transformers checks this only for its own implementations. Other models (for example an encoder inside a larger
    model that computes attention itself) compute with the additive masks of "eager", if they compute with their mask at
    all.
    """
    takes = _boolean_support.get(config_class)
    if takes is None:
        from transformers import PreTrainedModel

        classes, supported = [PreTrainedModel], []
        while classes:
            classes += (model_class := classes.pop()).__subclasses__()
            if model_class.config_class is config_class:
                has_own = model_class._supports_sdpa or model_class._supports_flex_attn
                supported.append(has_own or model_class._supports_attention_backend)
        takes = any(supported)
        if not supported:  # its model is not imported yet
            return True
        _boolean_support[config_class] = takes
    return takes


_boolean_support: dict[type, bool] = {}
"""The results of `takes_booleans`."""


def to_mask(pattern: Pattern, sizes: MaskSizes, device: torch.device) -> Mask:
    """The mask of a pattern for these sizes; bands, chunks, documents and padding keep their structure.

    >>> to_mask(Pattern(left=2, right=0), MaskSizes(1, 1, 8, q_offset=4), torch.device("cpu"))
    window(2, None, align='bottom_right') & lengths(kv=[5])
    """
    if not _fits(pattern, sizes):
        pattern = Pattern(padding=pattern.padding, rest=(dataclasses.replace(pattern, padding=()).allows,))
    mask = _opaque(pattern, sizes, device)
    if pattern.packed is not None:
        return mask & _documents(pattern, pattern.packed) & _band(pattern) & _key_map(pattern, sizes)
    at_run_time = is_recorded() or device.type == "meta"  # which keys are real, and the sizes, are known then
    stop = sizes.end if pattern.right == 0 else sizes.kv_len  # the last query attends to no key from there on
    if not at_run_time:
        pattern = _without_redundant_limits(pattern, sizes)
    real = _real_keys(pattern.padding, sizes)
    if real is not None and at_run_time:
        mask, real = mask & masks.dense(real[:, None, None, :]), None
    if real is not None and not bool(real[:, :stop].all()):
        mask = mask & _padding(real, stop, pattern.has_diagonal, device)
    elif stop < sizes.kv_len:
        mask = mask & masks.lengths(torch.full((sizes.batch,), stop, device=device))
    for chunk in pattern.chunks:
        offset = sizes.q_offset - chunk.start
        mask = mask & masks.chunks(chunk.size, align="bottom_right", offset=offset.to(device))
    return mask & _band(pattern)


def packed_mask(pattern: Pattern, cu_q: Tensor, cu_kv: Tensor, max_q: int | None, max_kv: int | None) -> Mask:
    """The mask of a pattern within packed documents, from their cumulative lengths, int ``[N + 1]``."""
    same = cu_q is cu_kv or torch.equal(cu_q, cu_kv)
    documents = masks.documents(cu_q, None if same else cu_kv, max_q=max_q, max_kv=None if same else max_kv)
    for chunk in pattern.chunks:
        documents = documents & masks.chunks(chunk.size, align="bottom_right")
    return documents & _band(pattern)


def _fits(pattern: Pattern, sizes: MaskSizes) -> bool:
    """Whether lengths can align undivided's diagonal with that of the model, or the pattern has no diagonal."""
    if pattern.packed is not None:
        batch, tokens = pattern.packed.ids.shape
        return sizes == MaskSizes(batch, tokens, tokens)  # self-attention without a cache
    if not pattern.has_diagonal:
        return True
    if pattern.right == 0:  # keys after the last query are hidden, so they need not be real
        return sizes.diagonal >= 0 and sizes.end <= sizes.kv_len
    return sizes.diagonal >= 0 and sizes.end == sizes.kv_len


def _without_redundant_limits(pattern: Pattern, sizes: MaskSizes) -> Pattern:
    """The pattern without limits that hide nothing for these sizes, which would only slow kernels down."""
    left, right = pattern.left, pattern.right
    if left is not None and left >= sizes.end - 1:
        left = None
    if right is not None and (sizes.diagonal + right >= sizes.kv_len - 1 or (right == 0 and sizes.q_len == 1)):
        right = None
    chunks = tuple(chunk for chunk in pattern.chunks if not hides_nothing(chunk, pattern, sizes))
    return dataclasses.replace(pattern, left=left, right=right, chunks=chunks)


def _band(pattern: Pattern) -> Mask:
    if pattern.left is None and pattern.right is None:
        return FULL
    return masks.window(pattern.left, pattern.right, align="bottom_right")


def _report_evaluation(pattern: Pattern, sizes: MaskSizes) -> None:
    """Warn, once per function and process, that a mask costs time in proportion to its pairs."""
    names = [getattr(fn, "__qualname__", repr(fn)) for fn in pattern.rest]
    if new := [name for name in names if name not in _reported]:
        _reported.update(new)
        warnings.warn(
            f"the structure of the mask function {' and '.join(new)} is unknown: it is evaluated for every pair of a "
            f"query and a key, here {sizes.q_len} x {sizes.kv_len}; causal masks, windows, chunks, packed documents "
            "and padding are known",
            RuntimeWarning,
            stacklevel=2,
        )


def _opaque(pattern: Pattern, sizes: MaskSizes, device: torch.device) -> Mask:
    """The remaining mask functions as predicates of the indices of this call; torch.export records their pairs."""
    mask = FULL
    for fn in pattern.rest:
        of_rows = _with_offsets(fn, sizes)
        mask = mask & (masks.dense(_pairs(of_rows, sizes, device)) if is_recorded() else masks.predicate(of_rows))
    return mask


def _pairs(fn: MaskFunction, sizes: MaskSizes, device: torch.device) -> Tensor:
    """The pairs that a function of this call's indices allows, bool ``[B, 1, Sq, Sk]``."""
    b, q, k = (torch.arange(size, device=device) for size in (sizes.batch, sizes.q_len, sizes.kv_len))
    pairs = fn(b[:, None, None, None], b.new_zeros(()), q[:, None], k)
    return pairs.expand(sizes.batch, 1, sizes.q_len, sizes.kv_len)


def _with_offsets(fn: MaskFunction, sizes: MaskSizes) -> MaskFunction:
    """A function of absolute positions as a function of the rows of this call."""

    def of_rows(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return fn(b, h, q + sizes.q_offset, k + sizes.kv_offset)

    return of_rows


def _over_positions(fn: MaskFunction) -> MaskFunction:
    """A function of single positions as a function of broadcastable tensors of positions."""

    def of_tensors(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        batched = fn
        for axis in (3, 2, 1, 0):
            batched = torch.vmap(batched, in_dims=tuple(0 if axis == n else None for n in range(4)))
        with TransformGetItemToIndex():  # vmap cannot index a tensor by a position otherwise
            return batched(b.flatten(), h.flatten(), q.flatten(), k.flatten())

    return of_tensors


def _real_keys(padding: tuple[Tensor, ...], sizes: MaskSizes) -> Tensor | None:
    """The real keys of the call, bool ``[B, Sk]``, from masks that start at position 0; None if all are real."""
    real = None
    for key_mask in padding:
        part = key_mask.to(torch.bool)
        if sizes.kv_offset or part.shape[1] > sizes.kv_len:  # torch.jit.trace would record the length of a slice
            part = part[:, sizes.kv_offset : sizes.kv_offset + sizes.kv_len]
        if part.shape[1] < sizes.kv_len:
            part = torch.nn.functional.pad(part, (0, sizes.kv_len - part.shape[1]))
        real = part if real is None else real & part
    return real


def _key_map(pattern: Pattern, sizes: MaskSizes) -> Mask:
    """The real keys as a dense mask of keys, for sequences whose lengths follow from documents."""
    real = _real_keys(pattern.padding, sizes)
    return FULL if real is None or bool(real.all()) else masks.dense(real[:, None, None, :])


def _padding(real: Tensor, stop: int, has_diagonal: bool, device: torch.device) -> Mask:
    """The mask of the real keys of each sequence before `stop`, from bool ``[B, Sk]``.

    If the mask has a diagonal, the lengths include padding on the right, because queries there are aligned with it, and
    a prefix removes the padding from the keys. Padding between real keys becomes a dense mask of keys.
    """
    first, end, count = _span(real[:, :stop])
    last = end.new_full(end.shape, stop) if has_diagonal else end
    mask = FULL
    if bool(first.any()) or bool((last < real.shape[1]).any()):
        start = first.to(device) if bool(first.any()) else None
        mask = mask & masks.lengths((last - first).to(device), kv_start=start)
    if bool((end < last).any()):
        mask = mask & masks.prefix((end - first).to(device))
    if bool((end - first != count).any()):
        mask = mask & masks.dense(real[:, None, None, :])
    return mask


def _span(real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(first real key, last + 1, number of real keys) of bool ``[B, S]``, with one transfer from a GPU."""
    index = torch.arange(real.shape[1], device=real.device)
    first = torch.where(real, index, real.shape[1]).amin(1)
    end = torch.where(real, index + 1, 0).amax(1)
    first, end, count = torch.stack((torch.minimum(first, end), end, real.sum(1))).cpu()
    return first, end, count


def _documents(pattern: Pattern, packed: Packed) -> Mask:
    """The mask of packed documents; chunks become smaller documents."""
    ids = _ids_of_chunks(pattern, packed)
    if ids.shape[0] > 1:
        return masks.document_ids(ids)
    begins = (ids[0, 1:] != ids[0, :-1]).nonzero().flatten() + 1
    ends = begins.new_tensor([0]), begins, begins.new_tensor([ids.shape[1]])
    return masks.documents(torch.cat(ends))


def _ids_of_chunks(pattern: Pattern, packed: Packed) -> Tensor:
    """The ids of the packed documents, or of their chunks if the pattern has chunks, int ``[B, S]``."""
    ids = packed.ids
    for chunk in pattern.chunks:
        assert packed.positions is not None  # chunks of whole rows are among `Pattern.rest`
        index = (packed.positions - chunk.start[:, None]).div(chunk.size, rounding_mode="floor")
        index = index - index.min()
        ids = ids * (index.max() + 1) + index
    return ids


def _in_one_row(pattern: Pattern, sizes: MaskSizes) -> tuple[Pattern, MaskSizes] | None:
    """The pattern and sizes of several rows of packed documents, put one after another into one row.

    `masks.documents` says where each of them starts, which batch-invariant results need. None if the rows have no
    documents, if there is only one, or if a mask function counts rows and positions.
    """
    if pattern.packed is None or sizes.batch < 2 or pattern.rest or not _fits(pattern, sizes):
        return None
    ids, real = _ids_of_chunks(pattern, pattern.packed), _real_keys(pattern.padding, sizes)
    rows = torch.arange(sizes.batch, device=ids.device)[:, None]
    packed = Packed((ids + rows * (ids.max() + 1)).reshape(1, -1), None)
    padding = () if real is None else (real.reshape(1, -1),)
    tokens = sizes.batch * sizes.q_len
    return Pattern(pattern.left, pattern.right, (), packed, padding), MaskSizes(1, tokens, tokens)
