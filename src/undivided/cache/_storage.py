"""Storage of keys and values: pools of pages, and checked new tokens that are written to them.

Legend: P pages, R rows (tokens) of a page, B sequences, S new tokens, T new tokens of all sequences, N key/value heads,
D head size (Dk, Dv).

A contiguous cache is a pool whose page b holds sequence b and is as long as the longest possible sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.arguments.checks import as_integer, check_tensor
from undivided.arguments.layout import Layout
from undivided.arguments.tensors import has_dispatch
from undivided.errors import InputError
from undivided.request.checks import DTYPES

Counts = tuple[int, ...]


class Heads(NamedTuple):
    """The sizes and the dtype of a cached token."""

    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    @staticmethod
    def checked(
        kv_heads: int,
        head_dim: int,
        value_dim: int | None,
        dtype: object,
        names: tuple[str, str, str] = ("kv_heads", "head_dim", "value_dim"),
    ) -> Heads:
        """The heads; InputError if a size is not positive or attention does not support the dtype."""
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
            raise InputError("dtype", "be torch.float16, bfloat16, float32 or float64", dtype)
        sizes = (kv_heads, head_dim, head_dim if value_dim is None else value_dim)
        heads, dim, v_dim = (as_integer(name, size, 1) for name, size in zip(names, sizes, strict=True))
        return Heads(heads, dim, v_dim, dtype)


class NewTokens(NamedTuple):
    """Tokens to write.

    Args:
        k, v: [B, S, N, Dk] and [B, S, N, Dv]; if packed, [1, T, N, D], one sequence after another.
        counts: real tokens of each sequence, the first ones.
        packed: whether the tokens are packed.
    """

    k: Tensor
    v: Tensor
    counts: Counts
    packed: bool

    @property
    def all_real(self) -> bool:
        """Whether k and v have no padding."""
        return self.packed or self.counts.count(self.k.shape[1]) == len(self.counts)

    def rows(self) -> tuple[Tensor, Tensor]:
        """The real tokens, one sequence after another: [T, N, Dk] and [T, N, Dv]."""
        k, v = self.k.flatten(0, 1), self.v.flatten(0, 1)
        if self.all_real:
            return k, v
        padded = self.k.shape[1]
        real = [row for b, count in enumerate(self.counts) for row in range(b * padded, b * padded + count)]
        index = torch.tensor(real, dtype=torch.int64, device=k.device)
        return k.index_select(0, index), v.index_select(0, index)


class Storage:
    """The pools of one layer: k [P, R, N, Dk] and v [P, R, N, Dv], uninitialised."""

    def __init__(self, pages: int, page_size: int, heads: Heads, device: torch.device) -> None:
        self.heads = heads
        with torch.inference_mode(False):  # an inference tensor cannot be written to outside of inference mode
            shape = (pages, page_size, heads.kv_heads)
            self.k = torch.empty(*shape, heads.head_dim, dtype=heads.dtype, device=device)
            self.v = torch.empty(*shape, heads.value_dim, dtype=heads.dtype, device=device)
            self._k_rows, self._v_rows = self.k.flatten(0, 1), self.v.flatten(0, 1)

    def fill(self, position: int, new: NewTokens) -> None:
        """Write the tokens of sequence b to page b from ``position`` on. All are real, and their number is equal."""
        k, v = new.k, new.v
        if new.packed:
            k, v = (t.squeeze(0).unflatten(0, (len(new.counts), -1)) for t in (k, v))
        self.k[:, position : position + k.shape[1]] = k
        self.v[:, position : position + k.shape[1]] = v

    def write(self, rows: Tensor, new: NewTokens) -> None:
        """Write the real tokens to these rows of the flattened pools, int64 [T]."""
        k, v = new.rows()
        self._k_rows.index_copy_(0, rows, k.to(self.heads.dtype))
        self._v_rows.index_copy_(0, rows, v.to(self.heads.dtype))

    def copy(self, pages: Sequence[tuple[int, int]], rows: int) -> None:
        """Copy the first rows of a page to another page for each pair (from, to), all at once."""
        if not pages or not rows:
            return
        source, target = torch.tensor(pages, dtype=torch.int64, device=self.k.device).unbind(1)
        for pool in (self.k, self.v):
            pool[target, :rows] = pool[source, :rows]

    def move(self, source: Sequence[int], target: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """Write the tokens of some rows of the flattened pools to others, after `copy` of whole pages."""
        read, write = (torch.tensor(rows, dtype=torch.int64, device=self.k.device) for rows in (source, target))
        tokens = [pool.index_select(0, read) for pool in (self._k_rows, self._v_rows)]
        self.copy(copies, self.k.shape[1])
        for pool, moved in zip((self._k_rows, self._v_rows), tokens, strict=True):
            pool.index_copy_(0, write, moved)


def checked_tokens(
    k: Tensor,
    v: Tensor,
    lengths: object,
    *,
    layout: Layout,
    batch: int,
    heads: Heads,
    device: torch.device,
    names: tuple[str, str, str] = ("k", "v", "lengths"),
) -> NewTokens:
    """New keys and values in canonical order with their counts; InputError if they do not fit."""
    k_name, v_name, lengths_name = names
    expected = _expected_shape(layout, batch, heads.kv_heads)
    for name, tensor, dim in ((k_name, k, heads.head_dim), (v_name, v, heads.value_dim)):
        check_tensor(name, tensor)
        if tensor.dim() == _layout.rank(layout):
            found = _layout.sizes(tensor.shape, layout)
            if found[0] == (1 if layout == "thd" else batch) and found[2:] == (heads.kv_heads, dim):
                _check_dtype_and_device(name, tensor, heads.dtype, device)
                continue
        raise InputError(name, f"have shape {expected.format(dim=dim)} in {layout!r}", list(tensor.shape))
    k, v = _layout.canonical(k, layout), _layout.canonical(v, layout)
    if k.shape[1] != v.shape[1]:
        raise InputError(v_name, f"have the length of {k_name} ({k.shape[1]})", v.shape[1])
    if layout == "thd":
        return NewTokens(k, v, packed_counts(lengths_name, lengths, batch, k.shape[1]), True)
    if lengths is None:
        return NewTokens(k, v, (k.shape[1],) * batch, False)
    return NewTokens(k, v, checked_counts(lengths_name, lengths, batch, k.shape[1], f"new tokens in {k_name}"), False)


def _expected_shape(layout: Layout, batch: int, kv_heads: int) -> str:
    axes = {"b": f"{batch}", "s": "new", "h": f"{kv_heads}", "d": "{dim}", "t": "tokens"}
    return f"[{', '.join(axes[letter] for letter in layout)}]"


def _check_dtype_and_device(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InputError(
            name,
            "not require a gradient (a cache has no backward)",
            f"{name} with requires_grad=True",
            hint="call under torch.no_grad() or torch.inference_mode()",
        )
    if tensor.device != device:
        raise InputError(name, f"be on the device of the cache ({device})", str(tensor.device))
    if tensor.dtype != dtype and not (tensor.is_floating_point() and torch.is_autocast_enabled(device.type)):
        raise InputError(name, f"have the dtype of the cache ({dtype})", str(tensor.dtype), f"{name}.to({dtype})")


def checked_counts(name: str, value: object, batch: int, limit: int | None = None, unit: str = "") -> Counts:
    """One count per sequence, from a list, a tuple or an int tensor [batch]."""
    value = _as_list(name, value, f"be a list of {batch} ints or an int tensor [{batch}]")
    if len(value) != batch:
        raise InputError(name, f"have an entry for each of the {batch} sequences", f"{len(value)} entries")
    counts = tuple([as_integer(f"{name}[{n}]", item, 0) for n, item in enumerate(value)])
    if limit is not None and max(counts) > limit:
        raise InputError(name, f"be at most the {unit} ({limit})", max(counts))
    return counts


def packed_counts(name: str, value: object, batch: int, tokens: int) -> Counts:
    """The packed tokens of each sequence; InputError unless they sum to `tokens`."""
    if value is None and batch == 1:
        return (tokens,)
    if value is None:
        raise InputError(
            name, "be given in layout 'thd'", None, hint=f"the number of tokens of each of the {batch} sequences, or 0"
        )
    counts = checked_counts(name, value, batch)
    if sum(counts) != tokens:
        raise InputError(name, f"sum to the {tokens} packed tokens", f"{list(counts)}, which is {sum(counts)}")
    return counts


def checked_token_ids(name: str, value: object) -> list[int]:
    """Token ids from a list, a tuple or an int tensor [n]."""
    ids = _as_list(name, value, "be a list of ints or an int tensor [n]")
    return [as_integer(f"{name}[{n}]", item) for n, item in enumerate(ids)]


def _as_list(name: str, value: object, must: str) -> Sequence[object]:
    """The entries of a list, a tuple or an int tensor of one axis; InputError with this rule otherwise."""
    if isinstance(value, Tensor):
        if value.dim() != 1 or value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise InputError(name, must, f"{value.dtype} {list(value.shape)}")
        check_tensor(name, value)
        if value.is_meta or has_dispatch(value):
            raise InputError(name, "hold values", f"a {type(value).__name__} on {value.device}")
        return value.tolist()
    if not isinstance(value, list | tuple):
        raise InputError(name, must, type(value).__name__)
    return value
