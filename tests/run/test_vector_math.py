"""The import chooses the code of MKL's vector functions on one thread, before several threads can make that call."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import undivided
from undivided import _vector_math

OF_MKL = "acos asin atan cos cosh erf erfc erfinv exp exp2 expm1 lgamma log log10 log1p log2 sin sinh sqrt tan tanh"

RECORD_IMPORT = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            x = args[0]
            print(function.overloadpacket.__name__, x.dtype, x.device, x.numel())
        return function(*args, **(kwargs or {}))

with Calls():
    import undivided
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="PyTorch was built without MKL")
def test_the_import_calls_each_function_on_a_few_numbers() -> None:
    lines = subprocess.run([sys.executable, "-c", RECORD_IMPORT], capture_output=True, text=True, check=True).stdout
    calls = {tuple(line.split()) for line in lines.splitlines()}
    expected = {
        (name, dtype, "cpu", "16") for name in _vector_math.FUNCTIONS for dtype in ("torch.float32", "torch.float64")
    }
    assert expected <= calls


def test_every_function_that_the_library_calls_is_chosen() -> None:
    """Triton's kernels have functions of the same names, which are not PyTorch's."""
    call = re.compile(rf"(?<!math)\.({'|'.join(OF_MKL.split())})_?\(")
    root = Path(undivided.__file__).parent
    found = {
        name
        for path in root.rglob("*.py")
        if "triton" not in path.relative_to(root).parts
        for name in call.findall(path.read_text())
    }
    assert {"exp", "log", "tanh"} <= found <= set(_vector_math.FUNCTIONS)
