"""Flags that several commands share."""

from __future__ import annotations

from enum import StrEnum

import torch


class Dtype(StrEnum):
    """Dtypes by their short names."""

    fp16 = "fp16"
    bf16 = "bf16"
    fp32 = "fp32"
    fp64 = "fp64"


DTYPES = {
    Dtype.fp16: torch.float16, Dtype.bf16: torch.bfloat16, Dtype.fp32: torch.float32, Dtype.fp64: torch.float64,
}  # fmt: skip
