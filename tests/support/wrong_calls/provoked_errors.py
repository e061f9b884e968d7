"""Errors that calls provoke, for the tests of the diagnosis."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

import undivided

FIELD = {
    "te-default-layout": """\
Traceback (most recent call last):
  File "/usr/lib/python3.12/site-packages/transformer_engine/pytorch/transformer.py", line 730, in forward
    self_attention_outputs = self.self_attention(
  File "/usr/lib/python3.12/site-packages/transformer_engine/pytorch/cpp_extensions/fused_attn.py", line 267
    output_tensors = tex.fused_attn_fwd(
RuntimeError: transformer_engine/common/fused_attn/fused_attn_f16_arbitrary_seqlen.cu:394 in function operator(): cuDNN
Error: [cudnn_frontend] Error: No valid execution plans built.. For more information, enable cuDNN error logging""",
    "cudnn-no-plan": """\
  File "comfy/ldm/modules/attention.py", line 482, in attention_pytorch
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
RuntimeError: cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.""",
    "cudnn-execution-failed": """\
[rank13]:   File "/usr/lib/python3.10/dist-packages/transformer_engine/pytorch/attention.py", line 5428, in forward
[rank13]:     out_ret, aux_ctx_tensors = fused_attn_fwd(
E! CuDNN (v90100 70) function cudnnBackendFinalize() called:
e!         Error: CUDNN_STATUS_EXECUTION_FAILED; Reason: rtc->loadModule()""",
    "te-no-backend": """\
[DEBUG    | DotProductAttention]: Disabling FlashAttention as FlashAttention 2 is not installed
[DEBUG    | DotProductAttention]: Disabling FusedAttention as no backend supports the provided input
[rank0]: Traceback (most recent call last):
[rank0]:   File "dot_product_attention.py", line 1417, in forward
[rank0]:     raise ValueError(
[rank0]: ValueError: No dot product attention support for the provided inputs!""",
    "te-cp-only": """\
  File "/usr/lib/python3.10/dist-packages/transformer_engine/pytorch/attention.py", line 2290, in forward
    assert (
AssertionError: Context parallelism is only implemented with Flash Attention and Fused Attention!""",
    "sdpa-no-kernel": """\
test_sdpa.py:14: UserWarning: Memory efficient kernel not used because: (Triggered internally at sdp_utils.cpp:718.)
  torch.nn.functional.scaled_dot_product_attention(
test_sdpa.py:14: UserWarning: Flash Attention does not support non-null attn_mask. (Triggered internally at a.h:269.)
  torch.nn.functional.scaled_dot_product_attention(
Traceback (most recent call last):
  File "test_sdpa.py", line 14, in <module>
RuntimeError: No available kernel.  Aborting execution.""",
    "attention-out-of-memory": """\
  File "modeling_llama.py", line 201, in eager_attention_forward
    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity of 79.15 GiB""",
    "flash-undefined-symbol": """\
  File "/usr/lib/python3.10/site-packages/flash_attn/flash_attn_interface.py", line 10, in <module>
    import flash_attn_2_cuda as flash_attn_cuda
ImportError: /usr/lib/python3.10/site-packages/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so: undefined symbol:
_ZN3c104cuda9SetDeviceEi""",
    "flash-illegal-access": """\
  File "/usr/lib/python3.12/site-packages/flash_attn/flash_attn_interface.py", line 198, in _flash_attn_varlen_backward
    out = flash_attn_cuda.varlen_bwd(
RuntimeError: CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call""",
    "te-dense-cu-seqlens": """\
  File "train.py", line 20, in <module>
    output_fused = attention_kernel(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
RuntimeError: CUDA error: device-side assert triggered""",
    "xformers-no-operator": """\
  File "/usr/lib/python3.10/site-packages/xformers/ops/fmha/dispatch.py", line 63, in _run_priority_list
    raise NotImplementedError(msg)
NotImplementedError: No operator found for `memory_efficient_attention_forward` with inputs:
     query       : shape=(10, 4096, 1, 64) (torch.float32)
     attn_bias   : <class 'NoneType'>
`fa3F@0.0.0` is not supported because:
    requires device with capability <= (9, 0) but your GPU has capability (12, 0) (too new)
`cutlassF-pt` is not supported because:
    xFormers wasn't build with CUDA support""",
}


def q(*shape: int, **options: Any) -> torch.Tensor:
    return torch.randn(*(shape or (1, 8, 4, 16)), **options)


def raised(call: Callable[[], Any]) -> Exception:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as error:
            return error
    raise AssertionError("nothing was raised: the error is fixed in this PyTorch, and its entry should say so")


def ids(answer: undivided.diagnosis.Diagnosis) -> list[str]:
    return [entry.id for entry in answer.entries]
