"""Checks of what a caller passes to a cache: new keys and values, numbers of tokens, and token ids.

Legend: B sequences, T new tokens of all sequences, N key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.checks import INT64_MAX, as_integer, check_tensor
from undivided.arguments.graphs import outside_of_graphs
from undivided.arguments.layout import Layout
from undivided.arguments.tensors import has_dispatch, is_autocast, is_batched
from undivided.cache._storage import Counts, NewTokens, TokenSpec
from undivided.errors import InputError
from undivided.request.foreign import CACHE_HINTS

F = TypeVar("F", bound=Callable[..., Any])

_HEADS = ("kv_heads=", "num_heads_kv=")
_BATCH = ("batch=", "max_batch_size=")
_LONGEST = ("max_len=", "max_sequence_length=")
_POOL = ("num_pages=", "total_num_pages=")

SIZE_NAMES = {
    **dict.fromkeys(("num_kv_heads", "num_key_value_heads", "num_heads_kv", "kv_heads", "num_gqa_groups"), _HEADS),
    **dict.fromkeys(("max_batch_size", "batch_size", "batch"), _BATCH),
    **dict.fromkeys(("max_seq_len", "max_seqlen", "max_length", "max_cache_len", "max_len"), _LONGEST),
    **dict.fromkeys(("num_blocks", "num_gpu_blocks", "num_pages"), _POOL),
    "max_sequence_length": ("max_len=",),
    "total_num_pages": ("num_pages=",),
    "block_size": ("page_size=",),
    "head_size": ("head_dim=", "head_dim_k="),
    "head_dim": ("head_dim_k=",),
    "layout": ("qkv_format=",),
    "qkv_format": ("layout=",),
}
"""The hints of `checked_call` for the constructors of caches."""

_ATTEND_NAMES = {name: (hint,) for name, hint in CACHE_HINTS.items()}


def attends(attend: F) -> F:
    """`attend` of a cache, outside of graphs, with hints for keywords of other libraries."""
    return outside_of_graphs(attend, _ATTEND_NAMES)


class TokenNames(NamedTuple):
    """The names of the arguments that `checked_tokens` checks, and of their owner. None if it has no such argument."""

    k: str = "k"
    v: str = "v"
    layout: str | None = "layout"
    kv_heads: str | None = "kv_heads"
    owner: str = "the cache"


_NAMES = TokenNames()


def checked_tokens(
    k: Tensor,
    v: Tensor,
    lengths: object,
    *,
    layout: Layout,
    batch: int,
    spec: TokenSpec,
    device: torch.device,
    names: TokenNames = _NAMES,
    announced: Counts | None = None,
) -> NewTokens:
    """New keys and values in canonical order with their counts; InputError if they do not fit. `announced`: the counts
    that `pre_step` received, in place of lengths."""
    k_name, v_name = names.k, names.v
    for name, tensor, dim in ((k_name, k, spec.head_dim), (v_name, v, spec.value_dim)):
        check_tensor(name, tensor)
        if tensor.dim() == _layout.axis_count(layout):
            sizes = _layout.sizes(tensor.shape, layout)
            if sizes[0] == (1 if layout == "thd" else batch) and sizes[2:] == (spec.kv_heads, dim):
                _check_dtype_and_device(name, tensor, spec.dtype, device)
                continue
        axes = {"b": batch, "s": "new", "h": spec.kv_heads, "d": dim, "t": "tokens"}
        must = f"have shape [{', '.join(str(axes[letter]) for letter in layout)}] in {layout!r}"
        raise InputError(
            name, must, list(tensor.shape), _shape_hint(name, tensor, layout, batch, spec.kv_heads, dim, names)
        )
    k, v = _layout.canonical(k, layout), _layout.canonical(v, layout)
    if k.shape[1] != v.shape[1]:
        raise InputError(v_name, f"have the length of {k_name} ({k.shape[1]})", v.shape[1])
    if announced is not None:
        _check_announced(k_name, k.shape[1], layout, announced)
        return NewTokens(k, v, announced, layout == "thd")
    if layout == "thd":
        return NewTokens(k, v, packed_counts("lengths", lengths, batch, k.shape[1]), True)
    if lengths is None:
        return NewTokens(k, v, (k.shape[1],) * batch, False)
    return NewTokens(k, v, checked_counts("lengths", lengths, batch, k.shape[1], f"new tokens in {k_name}"), False)


def _check_announced(name: str, tokens: int, layout: Layout, announced: Counts) -> None:
    """InputError unless there are as many new tokens as `pre_step` received; padding may follow them."""
    if layout == "thd":
        if tokens != sum(announced):
            raise InputError(name, f"have the {sum(announced)} tokens that pre_step announced", tokens)
    elif tokens < max(announced):
        raise InputError(name, f"have the {max(announced)} tokens per sequence that pre_step announced", tokens)


def _shape_hint(
    name: str, tensor: Tensor, layout: Layout, batch: int, kv_heads: int, dim: int, names: TokenNames
) -> str | None:
    """A hint for new tokens of a wrong shape: another layout that they fit, or heads that are divided over ranks."""
    for other in _layout.LAYOUTS:
        if other != layout and tensor.dim() == _layout.axis_count(other):
            other_batch, _, heads, size = _layout.sizes(tensor.shape, other)
            if (other_batch, heads, size) == (batch, kv_heads, dim):
                return _hint_of_layout(name, other, layout, names)
    if tensor.dim() != _layout.axis_count(layout) or names.kv_heads is None:
        return None
    own_batch, _, heads, size = _layout.sizes(tensor.shape, layout)
    if heads and heads < kv_heads and kv_heads % heads == 0:
        return f"if the heads are divided over ranks: mesh=mesh['tensor'] for the cache, or {heads} key heads"
    if heads and heads != kv_heads and (size, own_batch) == (dim, 1 if layout == "thd" else batch):
        return f"{names.kv_heads}={heads} at the construction of {names.owner}"
    return None


def _hint_of_layout(name: str, found: Layout, layout: Layout, names: TokenNames) -> str | None:
    """A hint for a tensor that fits another layout: the caller's argument if it takes that layout, or a view."""
    if names.layout is not None and (found != "bhsd" or names.layout == "layout"):
        owner = f", an argument of {names.owner}" if names.layout == "layout" else ""
        return f"this shape would fit {names.layout}={found!r}{owner}"
    if len(found) != len(layout):
        return None
    axes = ", ".join(str(found.index(axis)) for axis in layout)
    return f"{name}.permute({axes}), if its axes are {found!r}"


def _check_dtype_and_device(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        hint = "call under torch.no_grad() or torch.inference_mode()"
        raise InputError(name, "not require a gradient (a cache has no backward)", "requires_grad=True", hint=hint)
    if (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is not None
        and is_batched(tensor)
    ):
        must = "be one tensor, not a batch of torch.vmap, because a cache is written in place"
        hint = "append the whole batch outside of vmap; attend() may be called in it"
        raise InputError(name, must, f"a batch of tensors {list(tensor.shape)}", hint=hint)
    if tensor.device != device:
        hint = f"{name}.to({str(device)!r})"
        raise InputError(name, f"be on the device of the cache ({device})", str(tensor.device), hint=hint)
    if tensor.dtype != dtype and not (_is_cast(tensor.dtype) and is_autocast(device)):
        raise InputError(name, f"have the dtype of the cache ({dtype})", str(tensor.dtype), f"{name}.to({dtype})")


def _is_cast(dtype: torch.dtype) -> bool:
    """Whether autocast converts it: an 8-bit float has a scale, which the cache does not know."""
    return dtype.is_floating_point and dtype.itemsize > 1


def checked_counts(name: str, value: object, batch: int, limit: int | None = None, unit: str = "") -> Counts:
    """One count per sequence, from a list, a tuple or an int tensor [batch]."""
    value = as_list(name, value, f"be a list of {batch} ints or an int tensor [{batch}]")
    if len(value) != batch:
        hint = f"{name}.diff(), if these are cumulative" if len(value) == batch + 1 and value[0] == 0 else None
        raise InputError(name, f"have an entry for each of the {batch} sequences", f"{len(value)} entries", hint)
    counts = cast(Counts, tuple(value))
    if not _are_ints(counts, 0):
        counts = tuple([as_integer(f"{name}[{n}]", item, 0) for n, item in enumerate(value)])
    if limit is not None and max(counts) > limit:
        raise InputError(name, f"be at most the {unit} ({limit})", max(counts))
    return counts


def packed_counts(name: str, value: object, batch: int, tokens: int) -> Counts:
    """The packed tokens of each sequence; InputError unless they sum to `tokens`."""
    if value is None and batch == 1:
        return (tokens,)
    if value is None:
        hint = f"the number of tokens of each of the {batch} sequences, or 0"
        raise InputError(name, "be given in layout 'thd'", None, hint=hint)
    counts = checked_counts(name, value, batch)
    if sum(counts) != tokens:
        raise InputError(name, f"sum to the {tokens} packed tokens", f"{list(counts)}, which is {sum(counts)}")
    return counts


def checked_token_ids(tokens: object) -> list[int]:
    """Token ids from a list, a tuple or an int tensor [n]."""
    ids = as_list("tokens", tokens, "be a list of ints or an int tensor [n]")
    if _are_ints(ids, -INT64_MAX):
        return list(cast(Sequence[int], ids))
    return [as_integer(f"tokens[{n}]", item) for n, item in enumerate(ids)]


def _are_ints(values: Sequence[Any], least: int) -> bool:
    """Whether all values are plain ints of at least this and at most 64 bits, without a call for each: prompts are
    long."""
    return set(map(type, values)) == {int} and min(values) >= least and max(values) <= INT64_MAX


def as_list(name: str, value: object, must: str) -> Sequence[object]:
    """The entries of a list, a tuple, a range or an int tensor of one axis; InputError with this rule otherwise."""
    if isinstance(value, Tensor):
        if value.dim() != 1 or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise InputError(name, must, f"{value.dtype} {list(value.shape)}")
        check_tensor(name, value)
        if value.is_meta or has_dispatch(value):
            raise InputError(name, "hold values", f"a {type(value).__name__} on {value.device}")
        return value.tolist()
    if not isinstance(value, list | tuple | range):
        raise InputError(name, must, type(value).__name__)
    return value
