"""Checks of quantised keys and values, and of their scales."""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments.checks import check_device, check_memory
from undivided.errors import InputError
from undivided.quantization import Format, check_scale, format_of, names_of_dtypes
from undivided.request.checks import check_float
from undivided.request.request import Tensors


def check_quantized(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, needs: tuple[bool, ...]
) -> Format:
    """The format of k and v, or InputError. At least one of the scales is given."""
    check_float("q", q)
    for name, scale, other in (("k_scale", k_scale, "v_scale"), ("v_scale", v_scale, "k_scale")):
        if scale is None:
            hint = "values, scale = undivided.quantization.quantize(x, 'int8') for keys and for values"
            raise InputError(name, f"be given if {other} is", "None", hint=hint)
    format = format_of(k.dtype)
    if format is None:
        hint = "k, k_scale = undivided.quantization.quantize(k, 'int8')"
        raise InputError("k", f"be quantised if k_scale is given ({names_of_dtypes()})", str(k.dtype), hint=hint)
    if v.dtype != k.dtype:
        hint = f"v, v_scale = undivided.quantization.quantize(v, {format!r})"
        raise InputError("v", f"have the format of k ({k.dtype} for {format})", str(v.dtype), hint=hint)
    for name, tensor in (("k", k), ("v", v)):
        check_device(name, tensor, q.device)
    for name, scale, operand, values in (("k_scale", k_scale, "k", k), ("v_scale", v_scale, "v", v)):
        assert scale is not None
        check_scale(name, scale, operand, values)
    if any(needs):
        names = [name for name, need in zip(Tensors._fields, needs, strict=True) if need]
        _refuse_gradients(", ".join(names))
    return format


def check_scale_tensors(k_scale: Tensor, v_scale: Tensor) -> None:
    """InputError if a scale requires a gradient, or its memory is gone."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_memory(name, scale)
        if scale.requires_grad and torch.is_grad_enabled():
            _refuse_gradients(name)


def _refuse_gradients(names: str) -> None:
    raise InputError(
        names,
        "not require a gradient if k and v are quantised (they are for inference)",
        "requires_grad=True",
        hint="call under torch.no_grad() or torch.inference_mode()",
    )
