"""Storage of keys and values: pools of pages, and checked new tokens that are written to them.

Legend: P pages, R rows (tokens) of a page, B sequences, S new tokens, T new tokens of all sequences, N key/value heads,
D head size (Dk, Dv).

A contiguous cache is a pool whose page b holds sequence b and is as long as the longest possible sequence. A quantised
cache has pools of scales beside those of the quantised values; new tokens are quantised when they are written.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from undivided.arguments.checks import as_integer, check_memory
from undivided.cache import _appended
from undivided.errors import InputError
from undivided.quantization import DTYPES as FORMAT_DTYPES
from undivided.quantization import Format, check_format, check_head_size, dequantize, empty, quantize
from undivided.request.checks import DTYPES

Counts = tuple[int, ...]
_HUGE_PAGE, _MIN_HUGE_POOL = 2 << 20, 4 << 20
"""Bytes of a huge page, and of the smallest pool for which they are advised
(docs/decisions/2026-12-01-huge-pages.md)."""


class TokenSpec(NamedTuple):
    """The sizes and the dtype of a cached token, and the format of its keys and values if they are quantised."""

    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    format: Format | None = None

    @staticmethod
    def checked(
        kv_heads: int,
        head_dim: int,
        value_dim: int | None,
        dtype: object,
        names: tuple[str, str, str] = ("kv_heads", "head_dim", "value_dim"),
        quantize: object = None,
        mesh: object = None,
    ) -> TokenSpec:
        """The sizes; InputError if a size is not positive, or dtype or format are not supported. With a mesh, those of
        one of its ranks."""
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
            raise InputError("dtype", "be torch.float16, bfloat16, float32 or float64", dtype)
        sizes = (kv_heads, head_dim, head_dim if value_dim is None else value_dim)
        heads, dim, v_dim = (as_integer(name, size, 1) for name, size in zip(names, sizes, strict=True))
        heads = heads if mesh is None else _own_heads(names[0], heads, mesh)
        format = check_quantize(quantize)
        if format is not None:
            if dtype == torch.float64:
                hint = "dtype=torch.float32, the dtype of the queries and of the new tokens"
                raise InputError("dtype", "not be float64 in a quantised cache", dtype, hint=hint)
            for name, size in zip(names[1:], (dim, v_dim), strict=True):
                check_head_size(name, size, format, is_size=True)
        return TokenSpec(heads, dim, v_dim, dtype, format)


def _own_heads(name: str, heads: int, mesh: Any) -> int:
    """The key heads of each rank of a mesh, as `undivided.parallel.parallelize` divides them."""
    if getattr(mesh, "ndim", None) != 1 or not hasattr(mesh, "get_local_rank"):
        hint = 'select one axis, such as mesh["tensor"]'
        raise InputError("mesh", "be a DeviceMesh with one axis, or None", type(mesh).__name__, hint=hint)
    ranks: int = mesh.size()
    if heads % ranks and ranks % heads:
        raise InputError(name, f"be a multiple or a divisor of the {ranks} ranks of mesh", heads)
    return max(1, heads // ranks)


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


class TargetRows(NamedTuple):
    """Where new tokens are written.

    Args:
        rows: rows of the flattened pools, int64 [n].
        tokens: the real tokens, counted over all sequences, that are written there, int64 [n]. None: all, in order.
    """

    rows: Tensor
    tokens: Tensor | None = None


class Memory(NamedTuple):
    """The bytes of a cache.

    Args:
        values: bytes of the keys and values.
        scales: bytes of their scales; 0 if the cache is not quantised.
        bfloat16: bytes that the same cache would have in bfloat16.

    >>> print(Memory(2_097_152, 131_072, 4_194_304))
    2.1 MiB (values 2.0 MiB, scales 128.0 KiB; 0.53 x its size in bfloat16)
    """

    values: int
    scales: int
    bfloat16: int

    def __str__(self) -> str:
        total = self.values + self.scales
        split = f"values {_size(self.values)}, scales {_size(self.scales)}; " if self.scales else ""
        return f"{_size(total)} ({split}{total / max(self.bfloat16, 1):.2f} x its size in bfloat16)"


class Pools(NamedTuple):
    """The pools of one layer.

    Args:
        k, v: [P, R, N, Dk] and [P, R, N, Dv]; if quantised, with the dtype and the last axis of the format.
        k_scale, v_scale: their scales, fp32 [P, R, N], in int4 [P, R, N, groups]; None if they are not quantised.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """The scales of keys and values; empty if they are not quantised."""
        return tuple([scale for scale in self[2:] if scale is not None])

    def pages(self, start: int, stop: int) -> Pools:
        """Views of these pages."""
        return self.each(lambda pool: pool[start:stop])

    def tokens(self, start: int, stop: int) -> Pools:
        """Views of these tokens of every page."""
        return self.each(lambda pool: pool[:, start:stop])

    def each(self, function: Callable[[Tensor], Tensor]) -> Pools:
        """The results of a function for each pool."""
        return Pools(function(self.k), function(self.v), *map(function, self.scales))

    def as_dtype(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values that are not quantised."""
        if self.k_scale is None or self.v_scale is None:
            return self.k, self.v
        return dequantize(self.k, self.k_scale, dtype), dequantize(self.v, self.v_scale, dtype)


class Storage:
    """The pools of one layer, uninitialised."""

    def __init__(self, pages: int, page_size: int, spec: TokenSpec, device: torch.device) -> None:
        self.spec = spec
        with torch.inference_mode(False):  # an inference tensor cannot be written to outside of inference mode
            shape = (pages, page_size, spec.kv_heads)
            (k, k_scale), (v, v_scale) = (_pool(shape, d, spec, device) for d in (spec.head_dim, spec.value_dim))
            self._set_pools(Pools(k, v, k_scale, v_scale))

    def __getstate__(self) -> dict[str, Any]:
        """The pools, as bytes if they are 8-bit floats, which only `torch.load` could read."""
        state = {name: value for name, value in self.__dict__.items() if name not in ("k", "v", "_all_pools")}
        return {**state, "pools": self.pools.each(_as_bytes)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy or an unpickled storage, which may be made in inference mode and be written to outside of it."""
        self.__dict__.update(state)
        dtype = self.spec.dtype if self.spec.format is None else FORMAT_DTYPES[self.spec.format]
        with torch.inference_mode(False):
            k, v, *scales = self.pools.each(lambda pool: pool.clone() if pool.is_inference() else pool)
            self._set_pools(Pools(k.view(dtype), v.view(dtype), *scales))

    def _set_pools(self, pools: Pools) -> None:
        self.pools, self.k, self.v = pools, pools.k, pools.v
        self._all_pools = (pools.k, pools.v, *pools.scales)
        for pool in self._all_pools:
            _advise_huge_pages(pool)

    @property
    def _checked_pools(self) -> tuple[Tensor, ...]:
        """The pools; InputError if the memory of one was resized: PyTorch's indexing does not check that."""
        for name, pool in zip(Pools._fields, self._all_pools, strict=False):
            check_memory(f"cache.{name}", pool)
        return self._all_pools

    @property
    def _rows(self) -> tuple[Tensor, ...]:
        """The rows of each pool, as bytes if PyTorch cannot index its dtype."""
        return tuple([_as_bytes(pool.flatten(0, 1)) for pool in self._checked_pools])

    @property
    def description(self) -> str:
        """The format and the bytes, for `repr`."""
        format = "" if self.spec.format is None else f"quantize={self.spec.format!r}, "
        return f"{format}memory={self.memory}"

    @property
    def memory(self) -> Memory:
        """The bytes of the pools."""
        values = self.k.nbytes + self.v.nbytes
        tokens = self.k.shape[0] * self.k.shape[1] * self.spec.kv_heads
        wide = 2 * tokens * (self.spec.head_dim + self.spec.value_dim)
        return Memory(values, sum(scale.nbytes for scale in self.pools.scales), wide)

    def fill(self, position: int, new: NewTokens) -> None:
        """Write the tokens of sequence b to page b from ``position`` on. All are real, and their number is equal."""
        k, v = new.k, new.v
        if new.packed:
            k, v = (t.squeeze(0).unflatten(0, (len(new.counts), -1)) for t in (k, v))
        if _appended.append(self._all_pools, self.spec.format, k, v, first_row=position):
            return
        end = position + k.shape[1]
        for pool, tokens in zip(self._checked_pools, self._encoded(k, v), strict=True):
            pool[:, position:end] = tokens

    def rows(self, rows: Sequence[int]) -> TargetRows:
        """These rows of the flattened pools, for the real tokens in order; storages of other layers can use them."""
        return TargetRows(torch.tensor(rows, dtype=torch.int64, device=self.k.device))

    def write(self, rows: TargetRows, new: NewTokens) -> None:
        """Write the real tokens to these rows."""
        if not rows.rows.numel():
            return
        k, v = (new.k, new.v) if new.all_real else (t[None] for t in new.rows())
        if rows.tokens is not None:
            k, v = (t.flatten(0, 1).index_select(0, rows.tokens)[None] for t in (k, v))
        if _appended.append(self._all_pools, self.spec.format, k, v, rows.rows):
            return
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        for pool, tokens in zip(self._rows, self._encoded(k, v), strict=True):
            numbers = _as_bytes(tokens)
            pool.index_copy_(0, rows.rows, numbers if numbers.dtype == pool.dtype else numbers.to(pool.dtype))

    def copy(self, pages: Sequence[tuple[int, int]], rows: int) -> None:
        """Copy the first rows of a page to another page for each pair (from, to), all at once."""
        self.prepared_copy(pages, rows)()

    def prepared_copy(self, pages: Sequence[tuple[int, int]], rows: int) -> Callable[[], None]:
        """The writes of `copy`, after everything was read.

        Reading takes memory, so it may fail; then no pool has changed, and the caller can repeat the copy.
        """
        if not pages or not rows:
            return lambda: None
        source, target = torch.tensor(pages, dtype=torch.int64, device=self.k.device).unbind(1)
        copied = [pool[source, :rows] for pool in self._checked_pools]

        def write() -> None:
            for pool, tokens in zip(self._all_pools, copied, strict=True):
                pool[target, :rows] = tokens

        return write

    def prepared_move(
        self, source: Sequence[int], target: Sequence[int], copies: Sequence[tuple[int, int]]
    ) -> Callable[[], None]:
        """The writes of the tokens of some rows of the flattened pools to others, after those of `copy` of whole pages;
        everything was read, as in `prepared_copy`."""
        read, write_to = (torch.tensor(rows, dtype=torch.int64, device=self.k.device) for rows in (source, target))
        pools, write_pages = self._rows, self.prepared_copy(copies, self.k.shape[1])
        moved = [pool.index_select(0, read) for pool in pools]

        def write() -> None:
            write_pages()
            for pool, tokens in zip(pools, moved, strict=True):
                pool.index_copy_(0, write_to, tokens)

        return write

    def gather(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of these pages, int [.., n], as k and v [.., n, R, N, D] in the dtype of the tokens."""
        return Pools(*[pool[pages] for pool in self._checked_pools]).as_dtype(self.spec.dtype)

    def with_page_size(self, start: int, stop: int, page_size: int, pages: Tensor | None = None) -> Storage:
        """A storage of another page size with a copy of these tokens of every page, or of these pages, int64 [n]."""
        count = self.k.shape[0] if pages is None else len(pages)
        new = Storage(count, page_size, self.spec, self.k.device)
        for source, target in zip(self._checked_pools, new._all_pools, strict=True):
            tokens = source[:, start:stop]
            target[:, : stop - start] = tokens if pages is None else tokens[pages]
        return new

    def with_dtype(self, dtype: torch.dtype) -> Storage:
        """A storage of tokens of another dtype with a copy of all tokens; in quantised form they stay as they are."""
        pages, page_size = self.k.shape[:2]
        new = Storage(pages, page_size, self.spec._replace(dtype=dtype), self.k.device)
        for source, target in zip(self._checked_pools, new._all_pools, strict=True):
            target.copy_(source)
        return new

    def _encoded(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The tokens in the form of each pool, in memory of their own."""
        if self.spec.format is None:
            return tuple([t.clone() if any(_share_memory(t, pool) for pool in self._all_pools) else t for t in (k, v)])
        keys, values = quantize(k, self.spec.format), quantize(v, self.spec.format)
        return keys.values, values.values, keys.scale, values.scale


def _pool(shape: tuple[int, int, int], dim: int, spec: TokenSpec, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """An uninitialised pool for this head size, and its scales if it is quantised."""
    if spec.format is None:
        return torch.empty(*shape, dim, dtype=spec.dtype, device=device), None
    return empty(spec.format, (*shape, dim), device)


def _advise_huge_pages(pool: Tensor) -> None:
    """Advise Linux to use huge pages for a large pool on the CPU, unless the machine never does."""
    if torch.compiler.is_compiling():
        return
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or type(pool) is not Tensor or not pool.is_cpu or pool.nbytes < _MIN_HUGE_POOL:
        return
    start, stop = pool.data_ptr() + _HUGE_PAGE - 1, pool.data_ptr() + pool.nbytes
    start, stop = start - start % _HUGE_PAGE, stop - stop % _HUGE_PAGE
    _madvise()(start, stop - start, advice)  # a kernel without huge pages returns an error, and nothing changes


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return cast(Callable[[int, int, int], int], function)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The tensor, as uint8 if its elements have one byte: PyTorch cannot index 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are in the same storage. torch.compile copies before it writes, and traces no storages."""
    if torch.compiler.is_compiling():
        return False
    try:
        same: bool = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    except NotImplementedError:  # tensors of torch.func have no storage
        return False
    return same


def _size(count: int) -> str:
    """Bytes in the largest binary unit."""
    units = ("B", "KiB", "MiB", "GiB")
    power = min(max(count.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{count / 1024**power:.{1 if power else 0}f} {units[power]}"


def check_quantize(format: object) -> Format | None:
    """The format of a cache, or None; InputError if it is unknown."""
    if format is not None:
        check_format("quantize", format)
    return cast(Format | None, format)
