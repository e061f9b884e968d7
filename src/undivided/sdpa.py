"""PyTorch's scaled_dot_product_attention on our backends: the same arguments and results, any rank, any broadcasting.

The tensors become views in the layout in which query lies in memory, the mask becomes a `masks.Mask` or a bias, and
PyTorch's switches become part of the policy.

Legend: leading axes [...], H heads, L queries, S keys, E head size, Ev value head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Never, cast

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from undivided.arguments.checks import check_tensor
from undivided.arguments.layout import Layout, from_heads_first, heads_first
from undivided.arguments.signature import missing_as_required, raise_as_type_error, unknown_arguments
from undivided.arguments.tensors import is_dtensor, is_observed
from undivided.errors import InputError, NoBackendError, did_you_mean
from undivided.masks import Mask
from undivided.request.request import KEYWORDS, Options, Request, Tensors, new_tuple
from undivided.run import autograd, dispatch
from undivided.run.prepare import prepare
from undivided.run.sdpa import jagged, repeated
from undivided.run.sdpa.errors import NO_KERNEL, as_pytorch_error
from undivided.run.sdpa.masks import CAUSAL, KeptCalls, MaskOrBias, mask_or_bias
from undivided.run.sdpa.sizes import is_plain, is_size, layout_in_memory, output_shape
from undivided.selection import switches as _sdp_switches
from undivided.selection.policy import current_policy

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@missing_as_required
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unknown: Never,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: the same arguments, the same results, on our backends.

    ``softmax(scale * query @ key^T + attn_mask) @ value``. Every backend follows the same rules: a row with no
    allowed key is 0, values that a boolean mask hides do not affect a result, and attn_mask and is_causal may be
    combined.

    Args:
        query: [..., H, L, E], or fewer axes down to [L, E]; float16, bfloat16, float32 or float64. Jagged nested
            tensors [B, H, L, E], sequences of different lengths, are computed as packed tokens, without padding.
        key: [..., H, S, E]; axes before S broadcast against query's and value's.
        value: [..., H, S, Ev].
        attn_mask: broadcastable to [..., H, L, S]. Boolean: True = attend. Otherwise added to the scores, in query's
            dtype or float32, differentiable. ``torch.nn.attention.bias.causal_lower_right`` and ``causal_upper_left``
            are recognised as causal masks.
        dropout_p: probability of dropping a weight; applied whenever it is above 0, because there is no training flag.
        is_causal: query i attends to keys 0 to i (top-left), also if L and S differ; attn_mask, if given, applies
            too.
        scale: factor of the scores; 1/sqrt(E) if None.
        enable_gqa: key and value may have fewer heads; their number divides query's.

    Returns:
        [..., H, L, Ev] in query's dtype.

    Raises:
        InputError: an argument is wrong; the message names it, its value, the limit and a fix. The error is also of
            the type that PyTorch raises (RuntimeError, TypeError, ...) and contains PyTorch's message.
        NoBackendError: PyTorch's switches (``torch.nn.attention.sdpa_kernel``, ``torch.backends.cuda.enable_*_sdp``),
            or `undivided.use_backends` leave no backend that can run the call; the message lists every backend's
            reasons.

    Source: PyTorch's documentation of ``torch.nn.functional.scaled_dot_product_attention``.

    >>> import torch, undivided
    >>> q, k, v = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 7, 64), torch.randn(2, 2, 7, 32)
    >>> undivided.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).shape
    torch.Size([2, 8, 5, 32])
    """
    if unknown:
        name = min(unknown)
        hint = did_you_mean(name, _NAMES) or (f"undivided.attention has {name}=" if name in KEYWORDS else None)
        raise_as_type_error(unknown_arguments, "scaled_dot_product_attention", unknown, _NAMES, hint)
    call_key = repeated.call_key(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if call_key is not None and (same := repeated.run(call_key, query, key, value, attn_mask, is_causal)) is not None:
        return same
    try:
        if not type(query) is type(key) is type(value) is Tensor and jagged.is_jagged(query, key, value):
            return _attend_jagged(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        query, key, value = autograd.cast_under_autocast(query, key, value)
        _check_flags(is_causal, enable_gqa)
        if is_plain(query, key, value, enable_gqa):
            return _attend_plain(query, key, value, attn_mask, dropout_p, is_causal, scale, call_key)
        return _attend_broadcast(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    except InputError as error:
        if torch.compiler.is_compiling():
            raise
        call = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if others := tuple(x for x in call[:4] if not isinstance(x, Tensor) and has_torch_function((x,))):
            return handle_torch_function(scaled_dot_product_attention, others, *call)  # torch.fx records it
        raise as_pytorch_error(error, *call) from None
    except NoBackendError as error:
        error.args = (f"{error.args[0]}\n  PYTORCH: {NO_KERNEL}",)
        raise


def _attend_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    call_key: tuple[object, ...] | None,
) -> Tensor:
    """The result for tensors [B, H, S, D] with nothing to broadcast; call_key as for `_attend`."""
    q, k, v = query, key, value
    layout = layout_in_memory(query)
    if layout != "bhsd":
        q, k, v = _in_layout(query, key, value, layout)
    mask, bias, calls = _mask_of_call(attn_mask, query, query.shape, key.shape[-2], is_causal)
    out = _attend(_request(q, k, v, bias, layout, mask, scale, dropout_p), call_key, attn_mask, calls)
    return heads_first(out, layout)


def _attend_broadcast(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The result for tensors that need checks, or views as [B, H, S, D]."""
    shape = output_shape(query, key, value, enable_gqa)
    if is_dtensor(query) or is_dtensor(key) or is_dtensor(value):
        sizes = " and ".join(str(list(t.shape)) for t in (query, key))
        hint = "q.unsqueeze(0), k.expand(..) before the call"
        raise InputError("query", "be [B, H, S, D] as key is, if they are DTensors", sizes, hint=hint)
    if is_size(shape[-1], 0) or any(is_size(size, 0) for size in shape[:-2]):
        _, bias, _ = _mask_of_call(attn_mask, query, shape, key.shape[-2], is_causal)  # checks
        return _empty_result(query, key, value, None if bias is None else attn_mask, enable_gqa)
    if is_size(query.shape[-1], 0):
        query, key = _pad_empty_head(query), _pad_empty_head(key)
    q, k, v = _as_four_axes(query, key, value, shape, enable_gqa)
    mask, bias, calls = _mask_of_call(attn_mask, query, shape, key.shape[-2], is_causal)
    out = _attend(_request(q, k, v, bias, "bhsd", mask, scale, dropout_p), None, attn_mask, calls)
    return out.reshape(shape)


def _attend_jagged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: object,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """The result for jagged nested tensors, each sequence by itself."""
    if attn_mask is not None:
        hint = "undivided.attention(..., layout='thd', mask=masks.documents(query.offsets()) & your mask)"
        raise InputError("attn_mask", "be None, if query is jagged", "a mask", hint=hint)
    if jagged.has_jagged_heads(query, key, value):
        q, k, v = query.values(), key.values(), value.values()
        out = scaled_dot_product_attention(q, k, v, None, dropout_p, is_causal, scale, enable_gqa)
        return jagged.like(query, out)
    q, k, v, mask = jagged.packed(query, key, value)
    q, k, v = autograd.cast_under_autocast(q, k, v)
    _check_flags(is_causal, enable_gqa)
    output_shape(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), enable_gqa)  # checks
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        must = f"have as many heads as key ({k.shape[1]}), and query a multiple of them, if they are jagged"
        raise InputError("value", must, f"{v.shape[1]}, query {q.shape[1]}")
    request = _request(q, k, v, None, "thd", mask & CAUSAL if is_causal else mask, scale, dropout_p)
    return jagged.like(query, _attend(request))


def _mask_of_call(
    attn_mask: Tensor | None, query: Tensor, shape: Sequence[int], kv_len: int, is_causal: bool
) -> MaskOrBias:
    """attn_mask and is_causal as `mask_or_bias` returns them; attn_mask may be None."""
    if attn_mask is None:
        return MaskOrBias(CAUSAL if is_causal else None)
    return mask_or_bias(attn_mask, query, shape, kv_len, is_causal)


def _request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    layout: Layout,
    mask: Mask | None,
    scale: float | Tensor | None,
    dropout_p: float,
) -> Request:
    if isinstance(scale, Tensor):
        scale = _number(scale)
    options = new_tuple(Options, (layout, mask, scale, None, dropout_p, None, False, None, None, None))
    return new_tuple(Request, (new_tuple(Tensors, (q, k, v, bias, None, None)), options, None, None, None))


def _attend(
    request: Request,
    call_key: tuple[object, ...] | None = None,
    attn_mask: Tensor | None = None,
    calls: KeptCalls | None = None,
) -> Tensor:
    """Prepare and run.

    Args:
        request: the arguments of `undivided.attention`.
        call_key: the key under which later calls find the prepared call, or None.
        attn_mask: as the caller passed it.
        calls: those of a boolean attn_mask, or None.
    """
    q, k, v, bias, *_ = request.tensors
    if torch.compiler.is_compiling() or is_observed(q, k, v, request.options.mask, bias):
        return cast(Tensor, dispatch.attention(request, _sdp_switches.read_for_graph()))
    decision, call, tensors = prepare(request, current_policy(switches=_sdp_switches.read()))
    if call_key is not None:
        out = repeated.keep_and_run(call_key, attn_mask, calls, decision, call, tensors)
        if out is not None:
            return out
    return autograd.run(decision.backend, call, tensors)  # type: ignore[return-value]  # no lse was requested


def _check_flags(is_causal: object, enable_gqa: object) -> None:
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool | torch.SymBool):
            raise InputError(name, "be True or False", repr(flag))


def _number(scale: Tensor) -> float:
    if scale.numel() != 1 or scale.is_meta:
        got = "a meta tensor" if scale.is_meta else list(scale.shape)
        raise InputError("scale", "be a number, or a tensor that holds one", got)
    return float(scale)


def _in_layout(query: Tensor, key: Tensor, value: Tensor, layout: Layout) -> Sequence[Tensor]:
    """Views in the layout; InputError if a tensor has lost its memory, of which PyTorch makes no views."""
    try:
        return [from_heads_first(tensor, layout) for tensor in (query, key, value)]
    except RuntimeError:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_tensor(name, tensor)
        raise


def _as_four_axes(
    query: Tensor, key: Tensor, value: Tensor, shape: Sequence[int], enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors as [B, H, S, D]: views, unless the strides of the leading axes cannot be merged."""
    batch = shape[:-3]
    heads = shape[-3] if len(shape) > 2 else 1
    tensors = (t if t.dim() >= 4 else t[(None,) * (4 - t.dim())] for t in (query, key, value))
    q, k, v = tensors
    kv_heads = k.shape[-3]
    if kv_heads != v.shape[-3]:  # different numbers of heads: the only case in which key and value are expanded
        kv_heads = heads
        if enable_gqa:
            k, v = (t.repeat_interleave(heads // t.shape[-3], -3) for t in (k, v))
    return _fold(q, batch, heads), _fold(k, batch, kv_heads), _fold(v, batch, kv_heads)


def _fold(tensor: Tensor, batch: Sequence[int], heads: int) -> Tensor:
    """[..., H, S, D] with its leading axes expanded to `batch`, as [B, H, S, D]."""
    if not batch:
        batch = (1,)
    if tensor.shape[-3] != heads or tuple(tensor.shape[:-3]) != tuple(batch):
        tensor = tensor.expand(*batch, heads, *tensor.shape[-2:])
    return tensor if tensor.dim() == 4 else tensor.reshape(math.prod(batch), heads, *tensor.shape[-2:])


def _pad_empty_head(tensor: Tensor) -> Tensor:
    """A tensor of head size 0, padded with one column of zeros: every score is 0, and kernels need a column."""
    return torch.nn.functional.pad(tensor, (0, 1))


def _empty_result(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, enable_gqa: bool) -> Tensor:
    """The empty result if there is no head, no batch element or no value to weigh, with its (zero) gradients.

    bias: an attn_mask that is added to the scores, as the caller passed it, or None.
    """
    if enable_gqa:
        heads = query.shape[-3]
        key, value = (
            t.repeat_interleave(heads // t.shape[-3], -3) if heads else t[..., :0, :, :] for t in (key, value)
        )
    scores = query @ key.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    return scores @ value
