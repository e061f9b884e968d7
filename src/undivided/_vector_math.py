"""Works around a race of Intel's MKL, which PyTorch's wheels for x86 contain.

PyTorch computes ``exp``, ``log`` and others on the CPU by MKL, each thread a part of the tensor. MKL chooses the code
of a function in its first call. If several threads make that call at once, one of them may run code of half the digits
(relative error 1e-4), in that call only. The first result of the backend "reference" was wrong by 3e-5 in 7 of 60
processes with two threads (Intel Emerald Rapids, PyTorch 2.13), and in none of 90 after these calls.

Source: https://github.com/pytorch/pytorch/issues/188792 (oneMKL 2024.2; not seen with 2025.0 and later).
"""

import torch

FUNCTIONS = ("cos", "exp", "exp2", "log", "log1p", "sin", "sqrt", "tanh")
"""What this library calls on tensors."""


def choose_code() -> None:
    """Call each function once on the calling thread, in both precisions. Takes some milliseconds the first time."""
    if not torch.backends.mkl.is_available():
        return
    for dtype in (torch.float32, torch.float64):
        few_numbers = torch.ones(16, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(few_numbers)
