"""Formats: q, k and v from the arguments of a call, checked against the format and the sizes of the module.

    sbhd  [s, b, h, d]    bshd  [b, s, h, d]    thd  [t, h, d], packed sequences

A format is always given and never guessed. If the sizes contradict it, the error names the format that they fit.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from undivided.arguments import layout
from undivided.arguments.checks import check_tensor
from undivided.arguments.layout import Layout
from undivided.arguments.tensors import is_autocast
from undivided.errors import InputError

FORMATS: tuple[Layout, ...] = ("sbhd", "bshd", "thd")
OTHER_FORMAT: dict[str, Layout] = {"sbhd": "bshd", "bshd": "sbhd"}
_FORMATS_HINT = (
    "'sbhd' is [seq, batch, heads, head_dim] (Megatron's order, and TransformerEngine's default), "
    "'bshd' is [batch, seq, heads, head_dim], 'thd' is [tokens, heads, head_dim] of packed sequences"
)


class Heads(NamedTuple):
    """Query heads, key/value heads, and head sizes of a module."""

    q: int
    kv: int
    qk_dim: int
    v_dim: int


class QKV(NamedTuple):
    """Query, key and value of a call, and their format; `cached` is the longest sequence of a cache, in tokens. It has
    methods, not properties: torch.compile of PyTorch 2.10 cannot trace those of a NamedTuple."""

    q: Tensor
    k: Tensor
    v: Tensor
    format: Layout
    cached: int | None = None

    def packed(self) -> bool:
        """Whether sequences are packed."""
        return self.format == "thd"

    def batch(self) -> int:
        """Batch size; 1 if packed."""
        return layout.sizes(self.q.shape, self.format)[0]

    def q_len(self) -> int:
        """Number of query rows."""
        return layout.sizes(self.q.shape, self.format)[1]

    def kv_len(self) -> int:
        """Number of keys, cached ones included."""
        return layout.sizes(self.k.shape, self.format)[1] if self.cached is None else self.cached

    def other_format_hint(self, batch: int) -> str | None:
        """A hint if the other dense format would give `batch` sequences; otherwise None."""
        other = OTHER_FORMAT.get(self.format)
        if other is None or batch == self.batch() or layout.sizes(self.q.shape, other)[0] != batch:
            return None
        return f"with {batch} sequences, query_layer {list(self.q.shape)} would fit qkv_format={other!r}"


def format_named(value: object) -> Layout | None:
    """The format with this name; None if there is none."""
    for name in FORMATS:
        if isinstance(value, str) and value == name:
            return name
    return None


def checked_format(
    value: object, q: object = None, argument: str = "qkv_format", tensor: str = "query_layer"
) -> Layout:
    """The format; InputError unless it was given at construction or at the call."""
    if (format := format_named(value)) is not None:
        return format
    if value is not None:
        is_bhsd = isinstance(value, str) and value == "bhsd"
        hint = "x.transpose(1, 2) of a 'bhsd' tensor is 'bshd', without a copy" if is_bhsd else _FORMATS_HINT
        raise InputError(argument, f"be one of {', '.join(map(repr, FORMATS))}", repr(value), hint=hint)
    hint = _FORMATS_HINT
    if isinstance(q, Tensor) and q.dim() == 4:
        a, b = q.shape[:2]
        hint += f". {tensor} is {list(q.shape)}: 'sbhd' if your batch size is {b}, 'bshd' if it is {a}"
    elif isinstance(q, Tensor) and q.dim() == 3:
        hint += f". {tensor} is {list(q.shape)}, three axes: 'thd', or [batch, seq, hidden] before the split into heads"
    must = "be given at construction or at the call" if argument == "qkv_format" else "be given"
    raise InputError(argument, f"{must} (there is no default)", None, hint=hint)


def with_length(tensor: Tensor, length: int, format: Layout) -> Tensor:
    """A tensor with this many tokens per sequence and the same other sizes, without memory: for checks of sizes."""
    shape = list(layout.canonical(tensor, format).shape)
    shape[1] = length
    return layout.from_canonical(tensor.new_empty(()).expand(shape), format)


class InputTensors(NamedTuple):
    """The tensors of a call: three, or query_layer and kv_layer, or qkv_layer alone; the others are None."""

    query_layer: Tensor | None
    key_layer: Tensor | None
    value_layer: Tensor | None
    qkv_layer: Tensor | None
    kv_layer: Tensor | None


def checked_inputs(tensors: InputTensors, interleave_dim: int, format: Layout, heads: Heads) -> QKV:
    """q, k and v in this format; InputError if one of the tensors is wrong."""
    q, k, v = _unpack(tensors, interleave_dim, layout.axis_count(format))
    inputs = QKV(q, k, v, format)
    _check(inputs, heads)
    return inputs


def _unpack(tensors: InputTensors, interleave_dim: int, axes: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v: the tensors themselves, or views of qkv_layer or kv_layer. axes: of q, k and v in this format."""
    if not isinstance(interleave_dim, int) or interleave_dim not in (-3, -2):
        raise InputError("qkv_interleave_dim", "be -3 ([.., 3, h, d]) or -2 ([.., h, 3, d])", repr(interleave_dim))
    query, key, value, qkv, kv = tensors
    separate = {"query_layer": query, "key_layer": key, "value_layer": value, "kv_layer": kv}
    if qkv is not None:
        _check_none(separate, "qkv_layer")
        q, k, v = _split("qkv_layer", qkv, 3, interleave_dim, axes)
        return q, k, v
    if kv is not None:
        _check_none({name: separate[name] for name in ("key_layer", "value_layer")}, "kv_layer")
        key, value = _split("kv_layer", kv, 2, interleave_dim, axes)
    for name, tensor in (("query_layer", query), ("key_layer", key), ("value_layer", value)):
        if not isinstance(tensor, Tensor):
            got = None if tensor is None else type(tensor).__name__
            hint = "pass query_layer with key_layer and value_layer or with kv_layer, or qkv_layer alone"
            raise InputError(name, "be a torch.Tensor", got, hint=hint if tensor is None else None)
    assert query is not None and key is not None and value is not None
    return query, key, value


def _check_none(tensors: dict[str, Tensor | None], packed: str) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            hint = f"{packed} contains it"
            raise InputError(name, f"be None with {packed}", f"a tensor {list(tensor.shape)}", hint=hint)


def _split(name: str, packed: Tensor, count: int, dim: int, axes: int) -> tuple[Tensor, ...]:
    """The `count` tensors of `axes` axes that are views of one, along its axis `dim`."""
    if not isinstance(packed, Tensor):
        raise InputError(name, "be a torch.Tensor", type(packed).__name__)
    if packed.dim() != axes + 1 or packed.shape[dim] != count:
        hint = None
        other_dim = -2 if dim == -3 else -3
        if packed.dim() == axes + 1 and packed.shape[other_dim] == count:
            hint = f"these sizes would fit qkv_interleave_dim={other_dim}"
        order = f"[.., {count}, h, d]" if dim == -3 else f"[.., h, {count}, d]"
        must = f"have {axes + 1} axes {order} with qkv_interleave_dim={dim}"
        raise InputError(name, must, list(packed.shape), hint=hint)
    return packed.unbind(dim)


def _check(inputs: QKV, heads: Heads) -> None:
    """Raise InputError if axes, heads, head sizes, batch, lengths, dtypes or devices are wrong."""
    # name, tensor, number of heads, the argument that has this number, head size
    expected = (
        ("query_layer", inputs.q, heads.q, "num_attention_heads", heads.qk_dim),
        ("key_layer", inputs.k, heads.kv, "num_gqa_groups", heads.qk_dim),
        ("value_layer", inputs.v, heads.kv, "num_gqa_groups", heads.v_dim),
    )
    for name, tensor, _, _, _ in expected:
        check_tensor(name, tensor)
        _check_axes(name, tensor, inputs.format, heads)
    for name, tensor, count, argument, _ in expected:
        if tensor.shape[-2] != count:
            got, hint = f"{tensor.shape[-2]} in {list(tensor.shape)}", _heads_hint(tensor, count, argument)
            raise InputError(name, f"have {count} heads ({argument}) at axis {tensor.dim() - 2}", got, hint=hint)
    for name, tensor, _, _, size in expected:
        if tensor.shape[-1] != size:
            is_value = name == "value_layer"
            hint = "for another head size of values, kv_channels=(queries and keys, values)" if is_value else None
            must = f"have head size {size} (kv_channels)"
            raise InputError(name, must, f"{tensor.shape[-1]} in {list(tensor.shape)}", hint=hint)
    _check_lengths(inputs)
    _check_dtypes_and_devices(inputs)


def _check_axes(name: str, tensor: Tensor, format: Layout, heads: Heads) -> None:
    """Raise InputError unless a tensor has the number of axes of the format."""
    axes = layout.axis_count(format)
    if tensor.dim() == axes:
        return
    hint = None
    if tensor.dim() == 3 and tuple(tensor.shape[1:]) in ((heads.q, heads.qk_dim), (heads.kv, heads.qk_dim)):
        hint = "[tokens, heads, head_dim] is qkv_format='thd', with cu_seqlens_q and a padding mask type"
    elif tensor.dim() == 3 and axes == 4:
        hint = (
            "split the heads of a [batch, seq, hidden] tensor: "
            f"x.unflatten(-1, ({heads.q}, {heads.qk_dim})), then qkv_format='bshd' ('sbhd' for [seq, batch, hidden])"
        )
    elif tensor.dim() == 4:
        hint = "thd has no batch axis; a padded batch is 'bshd' or 'sbhd' with a padding mask type"
    must = f"have {axes} axes [{', '.join(format)}] in qkv_format={format!r}"
    raise InputError(name, must, f"{tensor.dim()} axes {list(tensor.shape)}", hint=hint)


def _heads_hint(tensor: Tensor, count: int, argument: str) -> str | None:
    if tensor.dim() == 4 and tensor.shape[1] == count:
        return "[batch, heads, seq, head_dim] is 'bhsd': x.transpose(1, 2) is 'bshd', without a copy"
    if argument == "num_gqa_groups":
        return f"set the number of key and value heads with num_gqa_groups={tensor.shape[-2]} at construction"
    return None


def _check_lengths(inputs: QKV) -> None:
    q, k, v, format = inputs.q, inputs.k, inputs.v, inputs.format
    if k.shape[:-1] != v.shape[:-1]:
        must = f"have the axes {list(k.shape[:-1])} of key_layer before its head size"
        raise InputError("value_layer", must, list(v.shape))
    batch = layout.sizes(k.shape, format)[0]
    if batch != inputs.batch():
        other = OTHER_FORMAT[format]
        hint = None
        if layout.sizes(k.shape, other)[0] == layout.sizes(q.shape, other)[0]:
            hint = f"these shapes would fit qkv_format={other!r}"
        must = f"have query_layer's batch size ({inputs.batch()}) in qkv_format={format!r}"
        raise InputError("key_layer", must, f"{batch} in {list(k.shape)}", hint=hint)


def _check_dtypes_and_devices(inputs: QKV) -> None:
    q = inputs.q
    for name, tensor in (("key_layer", inputs.k), ("value_layer", inputs.v)):
        if tensor.dtype != q.dtype and not is_autocast(q.device):
            hint = f"{name}.to(query_layer.dtype), or autocast"
            raise InputError(name, f"have query_layer's dtype ({q.dtype})", tensor.dtype, hint=hint)
        if tensor.device != q.device:
            hint = f"{name}.to(query_layer.device)"
            raise InputError(name, f"be on query_layer's device ({q.device})", tensor.device, hint)
