"""The functions that build masks, one per description of a set of pairs. ``undivided.masks`` exports them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from undivided.arguments.checks import INT32_MAX, as_integer, as_vector, check_tensor, checked_flag, ids_tensor
from undivided.arguments.signature import checked_call
from undivided.errors import InputError
from undivided.masks._alignment import Align, checked_align, checked_side
from undivided.masks._kept import kept
from undivided.masks._mask import Mask
from undivided.masks._parts import Chunk, Dense, DocumentIds, Documents, Lengths, Part, Prefix, Size
from undivided.masks._predicate import PredicateFunction, check_signature, register_predicate

Ints = Tensor | Sequence[int]

_NAMES_OF_WINDOW = {"window_size": ("left= and right=, as masks.window(*window_size)",)}
_KV = ("kv=",)
_NAMES_OF_LENGTHS = dict.fromkeys(("lengths", "seqlens", "kv_lengths", "cache_seqlens", "seqused_k"), _KV)
_NAMES_OF_DOCUMENTS = {
    "max_seqlen_q": ("max_q=",),
    **dict.fromkeys(("max_seqlen_k", "max_seqlen_kv"), ("max_kv=",)),
    "cu_seqlens_k": ("cu_seqlens_kv=",),
}
"""Hints for keywords of other libraries."""

FULL = Mask()
"""Every pair: the meaning of ``mask=None``."""


@checked_call
def causal(align: Align | None = None) -> Mask:
    """The pairs of a query and a key at or before the query's own key: ``j' <= i' + d``.

    Args:
        align: "top_left" (d = 0) or "bottom_right" (d = kv_len - q_len). None, the default, requires that both agree.

    Returns:
        The pairs on and below the diagonal that ``align`` places.

    Raises:
        InputError: ``align`` is another value.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), self-attention of the decoder.

    >>> causal(align="bottom_right").intervals(2, 3).tolist()
    [[[0, 2], [0, 3]]]
    """
    return _band(checked_align(align), None, 0)


@functools.partial(checked_call, other_names=_NAMES_OF_WINDOW)
def window(left: int | None, right: int | None, align: Align | None = None) -> Mask:
    """The pairs of a query and a key near the query's own key: ``i' + d - left <= j' <= i' + d + right``.

    Args:
        left: number of keys before the query's own key, int; None (or -1) means unbounded.
        right: number of keys after it. masks.window(256, 0) is the 256 keys before the query's own, and its own; for a
            tuple of both, masks.window(*window_size).
        align: "top_left" (d = 0) or "bottom_right" (d = kv_len - q_len). None, the default, requires that both agree.

    Returns:
        The pairs in a band around the diagonal that ``align`` places.

    Raises:
        InputError: a side is not an int or is below -1, or ``align`` is another value.

    Source: Beltagy et al. 2020 (arXiv:2004.05150, Longformer), sliding window attention.

    >>> window(1, 0).intervals(4, 4).tolist()
    [[[0, 1], [0, 2], [1, 3], [2, 4]]]
    """
    return _band(checked_align(align), checked_side("left", left), checked_side("right", right))


@kept
@functools.partial(checked_call, other_names=_NAMES_OF_LENGTHS)
def lengths(kv: Ints, q: Ints | None = None, kv_start: Ints | None = None, q_start: Ints | None = None) -> Mask:
    """The pairs of real tokens of each batch element: ``0 <= j' < kv[b]`` and ``0 <= i' < q[b]``.

    ``i' = i - q_start[b]`` and ``j' = j - kv_start[b]``.

    Args:
        kv: number of real keys of each batch element, any integer dtype ``[B]`` or a list.
        q: number of real queries, same kind as kv. None: every row is real. A padded self-attention batch is
            ``lengths(n, n)``.
        kv_start, q_start: index of the first real token (left padding), same kind as kv. None: 0.

    Returns:
        The pairs of a real query and a real key.

    Raises:
        InputError: the values are not integers, shapes differ, a value is negative, or ``q_start`` is given without
            ``q``.

    >>> lengths([1, 2], kv_start=[2, 0]).intervals(1, 3, batch=2).tolist()
    [[[2, 3]], [[0, 2]]]
    """
    keys = as_vector("kv", kv)
    queries = keys if q is kv else _optional_vector("q", q)
    key_start = _optional_vector("kv_start", kv_start)
    query_start = key_start if q_start is kv_start else _optional_vector("q_start", q_start)
    for argument, value in (("q", queries), ("kv_start", key_start), ("q_start", query_start)):
        if value is not None and value.shape != keys.shape:
            raise InputError(argument, f"have an entry for each of kv's {keys.shape[0]}", f"{value.shape[0]} entries")
    if query_start is not None and queries is None:
        raise InputError("q", "be given with q_start", None, "q is the number of real rows from q_start on")
    return from_part(Lengths(keys, queries, key_start, query_start))


@kept
@functools.partial(checked_call, other_names=_NAMES_OF_DOCUMENTS)
def documents(
    cu_seqlens_q: Ints,
    cu_seqlens_kv: Ints | None = None,
    padded_q: Ints | None = None,
    padded_kv: Ints | None = None,
    max_q: int | None = None,
    max_kv: int | None = None,
    total_q: int | None = None,
    total_kv: int | None = None,
) -> Mask:
    """The pairs of a query and a key of the same document, for documents packed one after another (varlen).

    ``document(i) == document(j)``. Document n starts at token ``padded[n]`` and has
    ``cu_seqlens[n + 1] - cu_seqlens[n]`` tokens. Tokens that belong to no document (in a gap, or after the last
    document) are padding: their rows give 0, and no query sees them.

    The last offset must equal the number of tokens in the tensors, so that a forgotten document is an error and not
    a block of zero rows. If a buffer of fixed size holds fewer tokens than its size, pass its size as ``total_q`` and
    ``total_kv``. Offsets on a GPU are not read: there, tokens after the last offset are always padding.

    Args:
        cu_seqlens_q: cumulative real lengths of the queries ``[0, l_0, l_0 + l_1, ...]``, any integer dtype
            ``[N + 1]`` or a list.
        cu_seqlens_kv: cumulative real lengths of the keys. None: the same as those of the queries.
        padded_q, padded_kv: index of the first token of each document, then the total, if there are gaps between
            documents; same kind as cu_seqlens_q. None: no gaps. ``padded_kv`` defaults to ``padded_q`` if
            ``cu_seqlens_kv`` is None or ``cu_seqlens_q`` itself; so do ``max_kv`` and ``total_kv``.
        max_q, max_kv: number of tokens of the longest document, int, for kernels that need it on the host. None: read
            from offsets on the CPU.
        total_q, total_kv: number of tokens in the tensors of queries and of keys, int, if the documents may end
            before the last token. None: the last offset is the number of tokens.

    Returns:
        The pairs of a query and a key of one document.

    Raises:
        InputError: the offsets are not integers, do not start at 0 or decrease, the numbers of documents differ, a
            gap is too small, or a ``max_`` is below the longest document. At the call: the last offset, or
            ``total_``, is not the number of tokens.

    Source: ``cu_seqlens_q`` and ``cu_seqlens_k`` of flash-attn's ``flash_attn_varlen_func``.

    >>> documents([0, 2, 3]).intervals(3, 3).tolist()
    [[[0, 2], [0, 2], [2, 3]]]
    >>> documents([0, 1, 3], padded_q=[0, 2, 4]).intervals(4, 4).tolist()
    [[[0, 1], [0, 0], [2, 4], [2, 4]]]
    >>> documents([0, 2, 3], total_q=5).intervals(5, 5).tolist()
    [[[0, 2], [0, 2], [2, 3], [0, 0], [0, 0]]]
    """
    same = cu_seqlens_kv is None or cu_seqlens_kv is cu_seqlens_q
    real_q = as_vector("cu_seqlens_q", cu_seqlens_q)
    real_kv = real_q if same else as_vector("cu_seqlens_kv", cu_seqlens_kv)
    slots_q = _optional_vector("padded_q", padded_q)
    shared = padded_kv is padded_q or (padded_kv is None and same)
    slots_kv = slots_q if shared else _optional_vector("padded_kv", padded_kv)
    if real_q.shape[0] < 1:
        raise InputError("cu_seqlens_q", "hold N + 1 offsets for N documents", "none", "no documents are [0]")
    for argument, value in (("cu_seqlens_kv", real_kv), ("padded_q", slots_q), ("padded_kv", slots_kv)):
        if value is not None and value.shape != real_q.shape:
            must = f"have as many entries as cu_seqlens_q ({real_q.shape[0]})"
            raise InputError(argument, must, f"{value.shape[0]} entries")
    longest_q, room_q = _optional_count("max_q", max_q), _optional_count("total_q", total_q)
    longest_kv = longest_q if same and max_kv is None else _optional_count("max_kv", max_kv)
    room_kv = room_q if same and total_kv is None else _optional_count("total_kv", total_kv)
    return from_part(Documents(real_q, real_kv, slots_q, slots_kv, longest_q, longest_kv, room_q, room_kv))


@kept
@checked_call
def document_ids(ids_q: Tensor | Sequence[int], ids_kv: Tensor | Sequence[int] | None = None) -> Mask:
    """The pairs of a query and a key with the same id: ``ids_q[b, i] == ids_kv[b, j] >= 0``.

    Positions stay those of the rows: unlike ``documents``, ids start no new sequence.

    Args:
        ids_q: ids of the queries, any integer dtype ``[B, Sq]``, or ``[1, Sq]``, ``[Sq]`` or a list for every batch
            element. A negative id marks padding.
        ids_kv: ids of the keys, the same with Sk. None: the same as those of the queries.

    Returns:
        The pairs with equal ids that are not padding.

    Raises:
        InputError: the ids are not integers, have another number of dimensions, or two different batch sizes.

    >>> document_ids([7, 7, -1, 3]).intervals(4, 4).tolist()
    [[[0, 2], [0, 2], [0, 0], [3, 4]]]
    """
    queries = ids_tensor("ids_q", ids_q)
    keys = queries if ids_kv is None or ids_kv is ids_q else ids_tensor("ids_kv", ids_kv)
    if queries.shape[0] != keys.shape[0] and 1 not in (queries.shape[0], keys.shape[0]):
        raise InputError("ids_kv", f"have the batch size of ids_q ({queries.shape[0]})", keys.shape[0])
    return from_part(DocumentIds(queries, keys))


@kept
@checked_call
def prefix(n: int | Ints) -> Mask:
    """The pairs of any query and one of the first n keys of its sequence: ``j' < n``.

    ``causal() | prefix(n)`` is the mask of a prefix-LM. A prefix is not causal: in ``causal() | prefix(n)`` and
    ``window(left, 0) | prefix(n)`` the first n - 1 queries see keys after their own. To keep the first keys in addition
    to a streaming window without looking ahead, use ``sinks(n)``.

    Args:
        n: number of keys, an int, or one number per batch element (packed: per document), any integer dtype ``[B]``
            or a list.

    Returns:
        The pairs of any query and one of the first n keys.

    Raises:
        InputError: ``n`` is not an integer, or is negative.

    Source: Raffel et al. 2020 (arXiv:1910.10683), prefix LM.

    >>> (causal() | prefix(2)).intervals(4, 4).tolist()
    [[[0, 2], [0, 2], [0, 3], [0, 4]]]
    """
    return from_part(Prefix(_size("n", n, 0)))


@kept
@checked_call
def sinks(n: int | Ints, align: Align | None = None) -> Mask:
    """The causal pairs of a query and one of the first n keys: ``j' < n`` and ``j' <= i' + d``.

    ``window(left, 0) | sinks(n)`` is a streaming window: each query sees its last left + 1 keys and the first n keys,
    and never a later key, so that tokens may arrive one at a time, in chunks or all at once.

    Args:
        n: number of keys, an int, or one number per batch element (packed: per document), any integer dtype ``[B]``
            or a list.
        align: "top_left" (d = 0) or "bottom_right" (d = kv_len - q_len). None, the default, requires that both agree.

    Returns:
        The mask ``causal(align) & prefix(n)``.

    Raises:
        InputError: ``n`` is not an integer or is negative, or ``align`` is another value.

    Source: Xiao et al. 2023 (arXiv:2309.17453), attention sinks of StreamingLLM.

    >>> (window(1, 0) | sinks(2)).intervals(5, 5).tolist()
    [[[0, 1, 0, 0], [0, 2, 0, 0], [0, 3, 0, 0], [0, 4, 0, 0], [0, 2, 3, 5]]]
    """
    return causal(align) & prefix(n)


@kept
@checked_call
def chunks(size: int, align: Align | None = None, offset: int | Ints | None = None) -> Mask:
    """The pairs of a query and a key in the same chunk: ``floor(p_q / size) == floor(p_k / size)``.

    ``p_q = i' + offset`` and ``p_k = j' - d + offset`` are absolute positions.

    Args:
        size: number of tokens per chunk, int.
        align: "top_left" (d = 0) or "bottom_right" (d = kv_len - q_len). None, the default, requires that both agree.
        offset: position of the first query in its sequence, an int, any integer dtype ``[B]`` or a list. None: the
            first key is the start of the sequence, so the first query has position d.

    Returns:
        The pairs of a query and a key of one chunk, keys after the query included.

    Raises:
        InputError: ``size`` is not a positive integer, ``offset`` is not an integer, or ``align`` is another value.

    >>> chunks(2).intervals(3, 3).tolist()
    [[[0, 2], [0, 2], [2, 3]]]
    >>> chunks(2, align="bottom_right").intervals(1, 4).tolist()
    [[[2, 4]]]
    """
    first = None if offset is None else _size("offset", offset)
    return from_part(Chunk(min(as_integer("size", size, 1), INT32_MAX), first), checked_align(align))


@checked_call
def dense(tensor: Tensor) -> Mask:
    """The pairs that are True in a boolean tensor: ``tensor[b, h, i, j]``.

    Args:
        tensor: bool ``[Sq, Sk]``, or four dimensions that broadcast to ``[B, H, Sq, Sk]``; True = attend.

    Returns:
        The pairs whose entry is True.

    Raises:
        InputError: the tensor is not boolean (scores to add are ``bias=``), or has another number of dimensions.

    Source: the boolean ``attn_mask`` of ``torch.nn.functional.scaled_dot_product_attention``.

    >>> dense(torch.tensor([[True, False, True]])).intervals(1, 3).tolist()
    [[[0, 3]]]
    """
    check_tensor("tensor", tensor)
    if tensor.dtype != torch.bool:
        raise InputError("tensor", "be boolean, True = attend", tensor.dtype, "scores to add to q . k go to bias=")
    if tensor.dim() not in (2, 4):
        hints = {
            1: "make it two: tensor[None] for [Sk]",
            3: "make it four: tensor[:, None] for [B, Sq, Sk], tensor[None] for [H, Sq, Sk]",
        }
        must = "have 2 dimensions [Sq, Sk] or 4 [B|1, H|1, Sq, Sk]"
        raise InputError("tensor", must, f"shape {list(tensor.shape)}", hints.get(tensor.dim()))
    return from_part(Dense(tensor if tensor.dim() == 4 else tensor[None, None]))


@checked_call
def predicate(fn: PredicateFunction, positions: bool = False, align: Align | None = None) -> Mask:
    """The pairs for which a function of the indices is True: ``fn(b, h, i, j)``, evaluated block by block.

    Args:
        fn: ``fn(b, h, q_idx, kv_idx) -> bool tensor``, the convention of FlexAttention's ``mask_mod``. It receives
            int64 tensors that broadcast, ``[B, 1, 1, 1]``, ``[1, H, 1, 1]``, ``[1, 1, r, 1]`` and ``[1, 1, 1, k]``:
            raw indices into the tensors (packed: b = 0). It must be a pure function; tensors that it captures may
            change in place between calls. It may be evaluated for any real query with any real key, including pairs
            that other parts of the mask hide, and never for padding described by ``lengths`` or ``documents``: the
            tensors that it captures need not cover padding.
        positions: whether ``fn`` gets positions ``i' + d`` and ``j'`` within a sequence in place of raw indices, so
            that ``q_idx >= kv_idx`` is `causal`, also in a cache and for documents.
        align: "top_left" or "bottom_right", for positions; as in `causal`.

    Returns:
        The pairs for which ``fn`` is True.

    Raises:
        InputError: an argument is wrong, or the predicate is built inside torch.compile.

    Source: ``mask_mod`` in PyTorch's documentation of ``torch.nn.attention.flex_attention``.

    >>> predicate(lambda b, h, q, k: (q + k) % 2 == 0).intervals(2, 4).tolist()
    [[[0, 3], [1, 4]]]
    >>> predicate(lambda b, h, q, k: q >= k, positions=True, align="bottom_right").intervals(2, 4).tolist()
    [[[0, 3], [0, 4]]]
    """
    if not callable(fn):
        hint = "masks.dense(tensor), for a boolean tensor" if isinstance(fn, Tensor) else None
        raise InputError("fn", "be a function fn(b, h, q_idx, kv_idx)", type(fn).__name__, hint)
    if torch.compiler.is_compiling():
        raise InputError(
            "mask",
            "be built outside of torch.compile if it holds a predicate",
            "masks.predicate(fn)",
            "build the mask before the compiled function and pass it in",
        )
    check_signature(fn)
    if not checked_flag("positions", positions) and align is not None:
        raise InputError("align", "be None without positions=True: indices have no alignment", repr(align))
    return from_part(register_predicate(fn, positions), checked_align(align))


def _band(align: Align | None, left: int | None, right: int | None) -> Mask:
    """The mask of a band: one object for equal arguments, so that calls which build it anew share what it caches."""
    return Mask(align, left, right) if torch.compiler.is_compiling() else _kept_band(align, left, right)


@functools.lru_cache(maxsize=64)
def _kept_band(align: Align | None, left: int | None, right: int | None) -> Mask:
    return Mask(align, left, right)


def from_part(part: Part, align: Align | None = None) -> Mask:
    """The mask of one part, after the checks of its values."""
    part.validate()
    return Mask(align, None, None, (part,))


def _optional_count(argument: str, value: int | None) -> int | None:
    return None if value is None else as_integer(argument, value, 0)


def _optional_vector(argument: str, value: Ints | None) -> Tensor | None:
    return None if value is None else as_vector(argument, value)


def _size(argument: str, value: int | Ints, at_least: int | None = None) -> Size:
    if isinstance(value, Tensor | list | tuple) and not (type(value) is Tensor and value.dim() == 0):
        return as_vector(argument, value, f"{argument} is an int, or one int per sequence")
    number = as_integer(argument, value, at_least)
    if abs(number) > INT32_MAX:
        raise InputError(argument, f"be at most {INT32_MAX}", number)
    return number
