"""Attention in graphs of ``torch.onnx.export``, which run without this library: operations that ONNX has.

A call that PyTorch's scaled_dot_product_attention can express with a mask of all pairs is that function, for sizes that
may change. Any other consists of plain operations of the reference, whose number depends on the sizes, so that these
must be constants.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from undivided.arguments.layout import from_heads_first
from undivided.arguments.tensors import jit_trace
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.masks._alignment import resolve
from undivided.masks._parts import Dense, DocumentIds, Lengths, Part, find_part
from undivided.request.request import Request
from undivided.run import autograd
from undivided.run.prepare import prepare
from undivided.selection.policy import current_policy


def is_exporting() -> bool:
    """Whether torch.onnx.export records the call. Does not import torch.onnx, which would cost every program."""
    onnx = sys.modules.get("torch.onnx")
    return onnx is not None and bool(onnx.is_in_onnx_export())


is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]  # else a graph depends on all modules


def attention(request: Request, mask: Mask) -> Tensor | tuple[Tensor, Tensor]:
    """The result of a request, from operations that ONNX has.

    Args:
        request: the request, whose types are checked.
        mask: its mask, checked.

    Raises:
        InputError: the request needs plain operations, and a size is not a constant.
    """
    if _is_sdpa(request, mask):
        return _sdpa(request, mask)
    if jit_trace() is not None or any(isinstance(n, torch.SymInt) for t in request.tensors[:3] for n in t.shape):
        must = "have constant sizes in torch.onnx.export(dynamo=True) if there is more than a mask, a bias and a scale"
        hint = "dynamic_shapes=None; or masks of masks.dense, document_ids, lengths, causal and window, joined by &"
        raise InputError("q, k and v", must, "sizes that may change", hint)
    policy = current_policy("reference", request.deterministic, request.batch_invariant)
    _, call, tensors = prepare(request, policy)
    out, lse = autograd.public_shapes(autograd.run_plain_operations(call, tensors), call.problem)
    return (out, lse) if request.options.return_lse else out


def _is_sdpa(request: Request, mask: Mask) -> bool:
    """Whether PyTorch's function can express the request by its mask, its bias and its scale."""
    (_, _, _, _, sinks, slopes), options = request.tensors, request.options
    if options.layout == "thd" or options.return_lse or options.dropout_p or options.softcap is not None:
        return False
    if any(tensor is not None for tensor in (sinks, slopes, options.pages, options.k_scale)):
        return False
    kinds = [type(part) for part in mask.parts]
    return all(kind in (Dense, DocumentIds, Lengths) for kind in kinds) and kinds.count(Lengths) <= 1


def _sdpa(request: Request, mask: Mask) -> Tensor:
    """The result of PyTorch's function, under the name that `replace_sdpa` does not replace."""
    bias, options = request.tensors.bias, request.options
    q, k, v = request.tensors.heads_first(options.layout)
    allowed, is_causal = None, False
    if mask.parts or mask.band != (None, None):
        align = resolve(mask.align, mask.parts, q.shape[2], k.shape[2], False) if mask.band != (None, None) else None
        is_causal = not mask.parts and bias is None and mask.band == (None, 0) and align != "bottom_right"
        if not is_causal:
            allowed = _allowed_pairs(mask, align, q.shape[2], k.shape[2], q.device)
    scores = allowed
    if bias is not None:
        scores = bias.to(q.dtype) if allowed is None else bias.to(q.dtype).masked_fill(~allowed, -torch.inf)
    has_groups = bool(q.shape[1] != k.shape[1])
    out = torch._C._nn.scaled_dot_product_attention(
        q, k, v, scores, 0.0, is_causal, scale=options.scale, enable_gqa=has_groups
    )
    if allowed is not None:  # runtimes differ in rows without keys
        out = out.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return from_heads_first(out, options.layout)


def _allowed_pairs(mask: Mask, align: str | None, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """The pairs of the mask, bool [B|1, H|1, Sq|1, Sk].

    They are those of `Mask.normal_form`, which a graph for sizes that may change cannot use: it evaluates pairs in
    blocks, whose number depends on the sizes, and takes no sizes that are tensors, as torch.jit.trace has them.
    """
    lengths = find_part(mask.parts, Lengths)
    row = torch.arange(q_len, device=device)[:, None]
    key = torch.arange(kv_len, device=device)
    left, right = mask.band
    allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device).expand(1, 1, 1, kv_len)
    real_rows: int | Tensor = q_len
    real_keys: int | Tensor = kv_len
    if lengths is not None:
        row, key = row - _column(lengths.q_start), key - _column(lengths.kv_start)
        real_keys = _column(lengths.kv)
        allowed = allowed & (key >= 0) & (key < real_keys)
        if lengths.q is not None:
            real_rows = _column(lengths.q)
            allowed = allowed & (row >= 0) & (row < real_rows)
    shift = real_keys - real_rows if align == "bottom_right" else 0
    if left is not None:
        allowed = allowed & (key >= row + shift - left)
    if right is not None:
        allowed = allowed & (key <= row + shift + right)
    for part in mask.parts:
        if not isinstance(part, Lengths):
            allowed = allowed & _pairs_of(part)
    return allowed


def _column(value: Tensor | None) -> Tensor | int:
    """A number for each batch element as [B, 1, 1, 1]; 0 if None."""
    return 0 if value is None else value.view(-1, 1, 1, 1)


def _pairs_of(part: Part) -> Tensor:
    if isinstance(part, Dense):
        return part.tensor
    assert isinstance(part, DocumentIds)
    ids_q, ids_kv = part.ids_q[:, None, :, None], part.ids_kv[:, None, None, :]
    return (ids_q == ids_kv) & (ids_q >= 0)
