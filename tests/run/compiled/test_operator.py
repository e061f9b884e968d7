"""The operator of compiled graphs: its arguments, and the checks of torch.library.opcheck."""

from __future__ import annotations

import pytest
import torch
from compiled_calls import qkv

import undivided
from undivided import masks
from undivided.kernels import cpu
from undivided.quantization import Format, quantize
from undivided.run.operator_arguments import Arguments

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_the_operator_has_the_arguments_of_its_named_tuple_in_their_order() -> None:
    names = [argument.name for argument in torch.ops.undivided.attention.default._schema.arguments]
    assert names == list(Arguments._fields)
    of_backward = [argument.name for argument in torch.ops.undivided.attention_backward.default._schema.arguments]
    assert of_backward[:15] == names[:15]


# PyTorch 2.15's own: opcheck reads the gradients of copies
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_the_operator_passes_opcheck_with_and_without_gradients() -> None:
    n = torch.tensor([3, 7])
    spec, tensors = (masks.lengths(n, n) & masks.causal()).flatten()
    for needs, lse in (("yyynnn", "y"), ("nnnnnn", "n")):
        q, k, v = qkv(7, grad="y" in needs)
        text = f"bshd|{spec}|{needs}|None|{lse}"
        call = (q, k, v, None, None, None, tensors, None, None, text, None, None, 0.0, [], None, None, None)
        results = torch.library.opcheck(torch.ops.undivided.attention.default, call)
        assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_the_operator_passes_opcheck_with_quantised_keys(format: Format) -> None:
    q = torch.randn(2, 7, 4, 32)
    (k, k_scale), (v, v_scale) = (quantize(torch.randn(2, 7, 2, 32), format) for _ in range(2))
    spec, tensors = masks.causal().flatten()
    text = f"bshd|{spec}|nnnnnn|None|y"
    call = (q, k, v, None, None, None, tensors, None, None, text, None, None, 0.0, [], None, k_scale, v_scale)
    results = torch.library.opcheck(torch.ops.undivided.attention.default, call)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.skipif(isinstance(cpu.load(), str), reason="the native kernel is not built")
@pytest.mark.parametrize("case", ["plain", "masked", "paged"])
def test_the_operator_passes_opcheck_when_the_native_kernel_runs(case: str) -> None:
    n = torch.tensor([3, 7])
    mask = {"plain": masks.FULL, "masked": masks.lengths(n, n) & masks.window(2, 1), "paged": masks.lengths(n)}[case]
    text, tensors = mask.flatten()
    q, k, v = qkv(7, grad=False)
    pages = None
    if case == "paged":
        k, v = (torch.randn(5, 4, 2, 16) for _ in range(2))
        pages = torch.tensor([[4, -1], [0, 2]], dtype=torch.int32)
    spec = f"bshd|{text}|nnnnnn|None|y|-|None|=native"
    call = (q, k, v, None, None, None, tensors, None, pages, spec, None, None, 0.0, [], None, None, None)
    results = torch.library.opcheck(torch.ops.undivided.attention.default, call)
    assert set(results.values()) == {"SUCCESS"}
    asked = {"layout": "bshd", "mask": mask, "pages": pages, "return_lse": True}
    out, lse = torch.ops.undivided.attention(*call)
    want, want_lse = undivided.attention(q, k, v, backend="reference", **asked)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
