"""Tensors for a case: seeded, of unit scale, stored as the case requires, and NaN in memory that must not be read.

Values are drawn in one order of axes and then rearranged, so a case has the same values in every layout.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import undivided.functional
from undivided.arguments import layout
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.quantization import Format, quantize
from undivided.request.request import Tensors
from undivided.request.slopes import usual_slopes
from undivided.verification.cases import Case

__all__ = ["Inputs", "build", "padding", "random_gradient"]

_SEQUENCES = frozenset({"lengths", "documents", "document_ids"})


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments of one call of `attention`, by name, and gradients for its outputs."""

    case: Case
    arguments: Mapping[str, Any]
    grad_out: Tensor
    grad_lse: Tensor | None

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that need a gradient, by name."""
        return {name: t for name in Tensors._fields if (t := self.arguments.get(name)) is not None and t.requires_grad}

    def attention(self, **overrides: Any) -> Any:
        """The result of ``undivided.attention`` with these arguments, some of them overridden."""
        return undivided.functional.attention(**{**self.arguments, **overrides})


def build(
    case: Case, dtype: torch.dtype | None = None, *, device: str = "cpu", seed: int = 0, poison: bool = False
) -> Inputs:
    """Random tensors for a case.

    Args:
        case: the case.
        dtype: of q, k and v; None is the first dtype of the case.
        device: of the tensors. The tensors of the mask stay on the CPU.
        seed: of all random values.
        poison: write NaN to every row, key, page and gap in memory that lies outside the real lengths, documents and
            used pages, and to the upstream gradients there.

    Returns:
        `Inputs`: ``inputs.attention()`` runs the case.

    >>> from undivided.verification.cases import get
    >>> inputs = build(get("documents-padded-offsets-thd"), poison=True)
    >>> int(inputs.arguments["q"].isnan().any(-1).any(-1).sum())                             # 13 rows, 9 of them real
    4
    >>> bool(inputs.attention().isfinite().all())
    True
    """
    dtype = dtype or case.dtypes[0]
    draw = _Draw(seed, dtype, device)
    batch, q_len, kv_len, heads, kv_heads, qk_dim, v_dim = case.sizes
    q = draw(batch, q_len, heads, qk_dim, scale=case.magnitude)
    k = draw(batch, kv_len, kv_heads, qk_dim, scale=case.magnitude)
    v = k[..., :v_dim] if case.memory == "latent" else draw(batch, kv_len, kv_heads, v_dim)
    extras = _extras(case, draw)
    grad_out, grad_lse = draw(batch, q_len, heads, v_dim), draw(batch, heads, q_len).float()
    mask = case.mask() if case.mask is not None else None
    dead_rows, dead_keys = padding(_with_page_starts(case, mask), case.sizes[:4], device)
    if poison:
        q, grad_out = (x.masked_fill(dead_rows[..., None, None], torch.nan) for x in (q, grad_out))
        k, v = (x.masked_fill(dead_keys[..., None, None], torch.nan) for x in (k, v))
        grad_lse = grad_lse.masked_fill(dead_rows[:, None], torch.nan)
    arguments = {"layout": case.layout, "mask": mask, "return_lse": case.return_lse, **extras}
    if case.quantized is not None:
        keys = _quantized(case.quantized, {"k": k, "v": v}, dead_keys if poison else None)
    else:
        keys = {"k": k, "v": v}
    if case.page_size is None:
        arguments |= dict(zip(("q", *keys), _store(case, q, *keys.values()), strict=True))
    else:
        arguments |= {"q": _contiguous(q, case), **_paged(case, keys, dead_keys, poison)}
    if case.memory == "latent":
        arguments["v"] = arguments["k"][..., :v_dim]
    for name in _names_with_gradient(case, arguments):
        arguments[name].requires_grad_()
    grad_lse = grad_lse.squeeze(0) if case.layout == "thd" else grad_lse
    if dtype == torch.float64:
        grad_lse = grad_lse.double()
    return Inputs(case, arguments, _contiguous(grad_out, case), grad_lse if case.return_lse else None)


_LARGE = 1 << 22
"""Entries from which a GPU draws the values itself: a CPU takes seconds for the keys of a long sequence."""


class _Draw:
    """Normal random tensors from one seed; all but large ones are drawn on the CPU, the same for every device."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self.dtype, self.device, self._seed = dtype, torch.device(device), seed
        self._large: torch.Generator | None = None

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        if self.device.type == "cuda" and math.prod(shape) >= _LARGE:
            if self._large is None:
                self._large = torch.Generator(self.device).manual_seed(self._seed)
            values = torch.randn(shape, generator=self._large, dtype=torch.float32, device=self.device)
            return values.mul_(scale).to(dtype or self.dtype)
        values = torch.randn(shape, generator=self._generator, dtype=torch.float64, device="cpu") * scale
        return values.to(dtype or self.dtype).to(self.device)


def random_gradient(out: Tensor, seed: int = 0) -> Tensor:
    """A random gradient for an output, of the same shape, dtype and device.

    >>> random_gradient(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    """
    return _Draw(seed, out.dtype, str(out.device))(*out.shape)


def _extras(case: Case, draw: _Draw) -> dict[str, Any]:
    """The arguments besides q, k, v and the mask."""
    batch, q_len, kv_len, heads, *_ = case.sizes
    extras: dict[str, Any] = {"scale": case.scale, "softcap": case.softcap, "dropout_p": case.dropout_p}
    if case.dropout_p:
        extras["dropout_seed"] = case.dropout_seed
    if case.bias is not None:
        sizes = {"b": batch, "h": heads, "q": q_len, "k": kv_len, "1": 1}
        extras["bias"] = draw(*(sizes[axis] for axis in case.bias), dtype=case.bias_dtype)
    if case.bias_holes:
        holes = draw(*extras["bias"].shape) > 1.3  # a tenth of the entries
        holes[..., 3, :] = True
        extras["bias"] = extras["bias"].masked_fill(holes, -torch.inf)
    if case.alibi == "usual":
        extras["alibi_slopes"] = usual_slopes(heads, draw.device)
    elif case.alibi is not None:
        sequences = _sequences(case) if case.alibi == "bh" else 1
        slopes = draw(sequences, heads, dtype=torch.float32).abs() * 0.2
        extras["alibi_slopes"] = slopes if case.alibi == "bh" else slopes.squeeze(0)
    if case.sinks:
        extras["sinks"] = draw(heads, dtype=torch.float32)
    return extras


def _sequences(case: Case) -> int:
    """The number of sequences: documents if the mask has them, else batch elements."""
    sizes = case.mask().document_sizes if case.mask is not None else None
    return case.batch if sizes is None else sizes[0]


def padding(mask: Mask | None, sizes: tuple[int, ...], device: str = "cpu") -> tuple[Tensor, Tensor]:
    """The rows [B, Sq] and keys [B, Sk] that are padding: bool, in no sequence or in one without keys or without rows.

    >>> from undivided import masks
    >>> rows, keys = padding(masks.lengths([2, 3]) & masks.causal(align="top_left"), (2, 1, 3, 1))
    >>> keys.int().tolist()
    [[0, 0, 1], [0, 0, 0]]
    """
    batch, q_len, kv_len, _ = sizes
    if mask is None or not mask.kinds & _SEQUENCES:
        nowhere = torch.zeros(batch, 1, dtype=torch.bool, device=device)
        return nowhere.expand(batch, q_len), nowhere.expand(batch, kv_len)
    parts = tuple(part for part in mask.parts if part.name in _SEQUENCES)
    sequences = dataclasses.replace(mask, left=None, right=None, parts=parts)
    pairs = sequences.to_dense(batch, 1, q_len, kv_len, device)[:, 0]
    return ~pairs.any(2), ~pairs.any(1)


def _names_with_gradient(case: Case, arguments: Mapping[str, Any]) -> list[str]:
    present = [name for name in Tensors._fields if arguments.get(name) is not None]
    return [name for name in present if case.needs is None or name in case.needs]


def _contiguous(x_BSHD: Tensor, case: Case) -> Tensor:
    return layout.from_canonical(x_BSHD, case.layout).contiguous()


def _quantized(format: Format, tensors: Mapping[str, Tensor], dead_keys: Tensor | None) -> dict[str, Tensor]:
    """Quantised keys and values [B, Sk, N, ..], and their scales; `dead_keys` get any values, and NaN as scales."""
    quantized: dict[str, Tensor] = {}
    for name, x in tensors.items():
        quantized[name], quantized[f"{name}_scale"] = quantize(x, format)
        if dead_keys is not None:
            quantized[name].view(torch.uint8)[dead_keys] = _ANY_BYTE
            quantized[f"{name}_scale"][dead_keys] = torch.nan
    return quantized


_ANY_BYTE = 0x7F
"""NaN in both types of 8 bits, and the largest int8."""


def _unused(like: Tensor, shape: tuple[int, ...], poison: bool = True) -> Tensor:
    """Memory that must not be read: NaN, or any integers; 0 without poison."""
    if like.itemsize == 1:
        return torch.full(shape, _ANY_BYTE if poison else 0, dtype=torch.uint8, device=like.device).view(like.dtype)
    return like.new_full(shape, torch.nan if poison else 0.0)


def _store(case: Case, *tensors_BSHD: Tensor) -> tuple[Tensor, ...]:
    """q, k, v in the layout of the case, stored as it requires. Gaps between rows are NaN."""
    tensors = [_contiguous(x, case) for x in tensors_BSHD]
    if case.memory in ("contiguous", "latent"):
        return tuple(tensors)
    if case.memory == "packed-qkv":
        packed = torch.cat(tensors, dim=-2 if case.layout != "bhsd" else 1)
        return tuple(torch.split(packed, [x.shape[-2] for x in tensors], dim=-2))
    if case.memory == "strided-last":
        return tuple(x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in tensors)
    if case.memory == "sliced":
        return tuple(map(_sliced, tensors))
    if case.memory == "shared-kv":
        shared = [layout.from_canonical(x[:1].expand_as(x), case.layout) for x in tensors_BSHD[1:]]
        return tensors[0], *shared
    raise InputError("memory", "be a storage that `Case` documents", repr(case.memory))


def _sliced(x: Tensor) -> Tensor:
    """The same values as every second row of a larger buffer, with an offset of 3 entries."""
    buffer = _unused(x, (*(2 * size + 1 for size in x.shape[:-1]), x.shape[-1] + 5))
    slices = (*(slice(1, None, 2) for _ in x.shape[:-1]), slice(3, 3 + x.shape[-1]))
    buffer[slices] = x
    return buffer[slices]


def _with_page_starts(case: Case, mask: Mask | None) -> Mask | None:
    """The mask with the keys of each sequence starting at its first page, in thd."""
    if case.page_size is None or case.layout != "thd" or mask is None:
        return mask
    rows = _sequences(case)
    return mask.with_padded_kv(torch.arange(rows + 1) * (case.sizes[2] // rows))


def _paged(case: Case, keys: Mapping[str, Tensor], dead_keys: Tensor, poison: bool) -> dict[str, Tensor]:
    """Page pools in a shuffled order with three unused pages, and the block table. Shared pages are those of the first
    sequence; the others' pages in their place are unused.

    With poison, the unused pages are NaN, and entries of the block table for pages without a real key are -1.
    """
    assert case.page_size is not None
    rows = _sequences(case)
    pages = dead_keys.numel() // case.page_size
    order = torch.randperm(pages + 3, generator=torch.Generator().manual_seed(7))[:pages].to(dead_keys.device)
    arguments: dict[str, Tensor] = {}
    for name, x in keys.items():
        pool = _unused(x, (pages + 3, case.page_size, *x.shape[2:]), poison)
        pool[order] = x.reshape(pages, case.page_size, *x.shape[2:])
        arguments[name] = pool
    table = order.to(torch.int32).reshape(rows, -1)
    if case.shared_pages:
        replaced = table[1:, : case.shared_pages].flatten()
        for pool in arguments.values():
            pool[replaced] = _unused(pool, tuple(pool[replaced].shape), poison)
        table[1:, : case.shared_pages] = table[0, : case.shared_pages].clone()
    if poison:
        unused = dead_keys.reshape(rows, -1, case.page_size).all(-1)
        table = table.masked_fill(unused, -1)
    return arguments | {"pages": table}
