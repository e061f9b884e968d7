"""Errors of the flash-attn package."""

from __future__ import annotations

from undivided.diagnosis import _values
from undivided.diagnosis._entry import PRECISE, Entry

_EXPLAIN = """
    q = torch.empty(2, 1024, 16, {d}, dtype=torch.{dtype}, device="meta")
    packages = {{"flash_attn": "2.8.3"}}
    machine = undivided.Machine.named("{gpu}", packages=packages)
    decision = undivided.explain(q, q, q, layout="bshd", machine=machine)
    # the backend that runs instead, and why
    print(decision.chosen.name, decision.reasons["flash_attn"])
    """

_PACKED = """
    # 3 and 7 tokens, packed
    q, k, v = (torch.randn(10, 8, 64) for _ in range(3))
    # int64 is accepted; checked before anything runs
    cu_seqlens = torch.tensor([0, 3, 10])
    out = undivided.attention(
        q,
        k,
        v,
        layout="thd",
        mask=masks.documents(cu_seqlens) & masks.causal(),
    )
    """

ENTRIES = (
    Entry(
        id="flash-dtype",
        title="flash-attn supports only fp16 and bf16",
        patterns=(r"FlashAttention only supports? fp16(?:,| and) bf16",),
        example="RuntimeError: FlashAttention only support fp16 and bf16 data type",
        cause="""The tensors are float32: no autocast, weights loaded without torch_dtype, or a norm or rotary
            embedding that returned float32 inside autocast.""",
        confirm="Print q.dtype just before the call.",
        fix="""Run under torch.autocast("cuda", torch.bfloat16), load with torch_dtype="auto", or cast q and k after
            the rotary embedding.""",
        call=_EXPLAIN.format(d=64, dtype="float32", gpu="a100"),
        source="Dao-AILab/flash-attention#622, QwenLM/Qwen3#406, unslothai/unsloth#827",
    ),
    Entry(
        id="flash-head-256",
        title="flash-attn supports head sizes up to 256",
        patterns=(r"FlashAttention (?:forward|backward) only supports head dimension at most (?P<limit>\d+)",),
        example="RuntimeError: FlashAttention forward only supports head dimension at most 256",
        cause="The model has a larger head size (512 in some global layers), or heads and head size were swapped.",
        confirm="Print q.shape: the last axis is the head size.",
        fix="""attn_implementation="sdpa" or "eager" for these layers; check the reshape if the model's head size
            is smaller.""",
        call=_EXPLAIN.format(d=512, dtype="bfloat16", gpu="a100"),
        source="Dao-AILab/flash-attention#67, vllm-project/vllm#38887",
        reads=lambda match, text: [f"The limit here is {match['limit']}.", *_values.head_size(match, text)],
    ),
    Entry(
        id="flash-head-8",
        title="flash-attn's head size must be a multiple of 8 (of 32 in some builds)",
        patterns=(
            r"must have a head_size that is a multiple of 8",
            r"head[_ ]?(?:dim(?:ension)?|size)\w* (?:must|should) be (?:divisible by|a multiple of) 8",
            r"does not support headdim not being a multiple of 32",
        ),
        example="RuntimeError: query, key, value, and out_ must have a head_size that is a multiple of 8",
        cause="""The kernel reads 16 bytes at a time. The Python functions pad the tensors; direct calls of the C++
            operators and builds with FLASHATTENTION_DISABLE_UNEVEN_K do not.""",
        confirm="q.shape[-1] % 8 is not 0 (% 32 if the message names 32).",
        fix="Pad q, k and v with zeros to the next multiple, pass the old softmax_scale, and slice the output.",
        call="""
            # any head size
            q, k, v = (torch.randn(2, 16, 8, 35) for _ in range(3))
            out = undivided.attention(q, k, v, layout="bshd", mask=masks.causal())
            """,
        source="Dao-AILab/flash-attention#28, csrc/flash_attn/flash_api.cpp",
        reads=_values.head_size,
    ),
    Entry(
        id="flash-ampere",
        title="flash-attn needs an Ampere GPU or newer",
        patterns=(r"FlashAttention only supports (?P<gpu>Ampere|Turing|Hopper|Volta)\b[^.]{0,40}GPUs or newer",),
        example="RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
        cause="V100 (7.0), T4 and RTX 20 (7.5) and older lack the instructions that version 2 uses.",
        confirm="torch.cuda.get_device_capability() is below (8, 0).",
        fix="""attn_implementation="sdpa": its efficient kernel runs from compute capability 5.0 on. Use float16 on these
            GPUs, not bfloat16.""",
        call=_EXPLAIN.format(d=64, dtype="float16", gpu="t4"),
        source="facebookresearch/locate-3d#22, if-ai/ComfyUI-IF_Trellis#40",
        reads=lambda match, text: [f"It needs {match['gpu']} or newer."],
    ),
    Entry(
        id="flash-cpu",
        title="flash-attn was called with CPU tensors",
        patterns=(
            r"Could not run 'flash_attn(?:_\d)?::\w+' with arguments from the 'CPU' backend",
            r"\b(?:q|k|v|cu_seqlens_[qk]|kcache|vcache) must be on CUDA",
        ),
        example="""NotImplementedError: Could not run 'flash_attn::_flash_attn_varlen_forward' with arguments from the
            'CPU' backend.""",
        cause="The package has only GPU kernels; the model, or an offloaded part of it, is on the CPU.",
        confirm="q.device is cpu.",
        fix="""Move the model before the first call, or load it with attn_implementation="sdpa".""",
        call="""
            q, k, v = (torch.randn(2, 16, 8, 64) for _ in range(3))
            # the same call on any device
            out = undivided.attention(q, k, v, layout="bshd", mask=masks.causal())
            """,
        source="Dao-AILab/flash-attention#1022, Dao-AILab/flash-attention#185",
    ),
    Entry(
        id="flash-cu-seqlens-dtype",
        title="cu_seqlens must be int32",
        patterns=(r"(?P<name>cu_seqlens_\w+|seqused_k|block_table|leftpad_k) must have dtype (?:torch\.)?int32",),
        example="RuntimeError: cu_seqlens_q must have dtype int32",
        cause="cumsum of an int32 tensor returns int64 unless dtype= is given.",
        confirm="Print cu_seqlens.dtype.",
        fix="lengths.cumsum(0, dtype=torch.int32), with a 0 prepended: F.pad(..., (1, 0)).",
        call=_PACKED,
        source="huggingface/transformers modeling_qwen2_vl.py, Dao-AILab/flash-attention csrc/flash_attn/flash_api.cpp",
        reads=lambda match, text: [f"It is {match['name']}."],
    ),
    Entry(
        id="flash-heads",
        title="flash-attn: the key heads do not divide the query heads",
        patterns=(r"Number of heads in key/value must divide number of heads in query",),
        example="RuntimeError: Number of heads in key/value must divide number of heads in query",
        cause="""The tensors are in [B, H, S, D] order, so that lengths are read as heads; or tensor parallelism
            split the query heads only.""",
        confirm="Print the shapes: flash-attn's order is [B, S, H, D], packed [T, H, D].",
        fix="q.transpose(1, 2) before the call (and after it, on the output).",
        call="""
            q, k, v = (torch.randn(2, h, 16, 64) for h in (8, 2, 2))
            # no transposes: the layout is an argument
            out = undivided.attention(q, k, v, layout="bhsd")
            """,
        source="Dao-AILab/flash-attention csrc/flash_attn/flash_api.cpp",
    ),
    Entry(
        id="flash-shape",
        title="flash-attn: key or value does not have the shape that the query implies",
        patterns=(
            r"\b(?P<name>q|k|v|out|dout|kcache|vcache) must have shape \((?P<expected>(?:batch_size|total_)[\w, ]+)\)",
        ),
        example="RuntimeError: k must have shape (batch_size, seqlen_k, num_heads_k, head_size)",
        cause="""k and v differ in length or heads (a cache updated for only one of them), their batch differs from
            that of q, or d_v differs from d_qk, which version 2 does not support.""",
        confirm="Print the three shapes and compare them with the message.",
        fix="Update both caches; pad v with zeros to the head size of q and slice the output.",
        call="""
            q, k, v = (torch.randn(2, 16, 8, d) for d in (192, 192, 128))
            # [2, 16, 8, 128]
            out = undivided.attention(q, k, v, layout="bshd")
            """,
        source="Dao-AILab/flash-attention csrc/flash_attn/flash_api.cpp",
        reads=lambda match, text: [f"{match['name']} should be ({match['expected']})."],
    ),
    Entry(
        id="flash-illegal-access",
        title="A flash kernel reads outside its tensors",
        patterns=(
            r"\A(?=.*(?:flash_?attn|flash_attention|varlen|cu_seqlens)).*?an illegal memory access was encountered",
        ),
        example="""  out, lse = flash_attn_gpu.varlen_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k)
            RuntimeError: CUDA error: an illegal memory access was encountered""",
        cause="""cu_seqlens does not end at the number of tokens, or max_seqlen is below the longest sequence: neither
            is checked. Or a tensor has more than 2^31 elements: version 2 uses 32-bit offsets. CUDA reports errors
            late, so the stack frame may belong to another call.""",
        confirm="""Run with CUDA_LAUNCH_BLOCKING=1. Check cu_seqlens[0] == 0, cu_seqlens[-1] == len(q),
            cu_seqlens.diff().max() <= max_seqlen, q.numel() < 2**31.""",
        fix="Correct the offsets; if a tensor is too large, split the batch or use version 3.",
        call=_PACKED,
        source="Dao-AILab/flash-attention#1311, Dao-AILab/flash-attention#1773, Dao-AILab/flash-attention#2214",
        weight=PRECISE,
    ),
    Entry(
        id="flash-undefined-symbol",
        title="The flash-attn wheel was built for another PyTorch",
        patterns=(r"flash_attn_?\d?_cuda\S*: undefined symbol: ?(?P<symbol>\w+)",),
        example="""ImportError: flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so: undefined symbol:
            _ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE""",
        cause="Its extension is linked against one PyTorch version, CUDA version and ABI; the installed PyTorch differs.",
        confirm="""Compare torch.__version__, torch.version.cuda and torch.compiled_with_cxx11_abi() with the wheel's
            name.""",
        fix="""pip uninstall flash-attn, then install the wheel whose name has this torch, CUDA, Python and cxx11abi; or
            build it: pip install flash-attn --no-build-isolation --no-cache-dir.""",
        call="""
            # a failed import is a reason, not a crash
            for row in undivided.backends():
                print(row.name, row.why_not)
            """,
        source="Dao-AILab/flash-attention#931, Dao-AILab/flash-attention#1832",
        reads=_values.symbol,
    ),
    Entry(
        id="flash-page-256",
        title="flash-attn's page size must be a multiple of 256",
        patterns=(r"Paged KV cache block size must be divisible by (?P<limit>\d+)",),
        example="RuntimeError: Paged KV cache block size must be divisible by 256",
        cause="Version 2 of the package reads whole tiles from a page (128 on ROCm); vLLM's own build supports 16.",
        confirm="Print k_cache.shape[1].",
        fix="Use pages of 256 tokens, flash-attn 3 (any size), or vLLM's vllm-flash-attn.",
        call="""
            # pages of 16 tokens
            pool = torch.randn(8, 16, 2, 64)
            table = torch.tensor([[5, 2], [1, 7]], dtype=torch.int32)
            mask = masks.lengths([20, 30]) & masks.causal(align="bottom_right")
            out = undivided.attention(
                torch.randn(2, 1, 8, 64),
                pool,
                pool,
                layout="bshd",
                pages=table,
                mask=mask,
            )
            """,
        source="Dao-AILab/flash-attention#828, Dao-AILab/flash-attention#1720, Dao-AILab/flash-attention#1627",
        reads=lambda match, text: [f"This build requires a multiple of {match['limit']}."],
    ),
    Entry(
        id="flash-backward-head",
        title="flash-attn's backward for this head size needs a data-centre GPU",
        patterns=(r"FlashAttention backward for head dim > (?P<limit>\d+) requires",),
        example="RuntimeError: FlashAttention backward for head dim > 192 requires A100/A800 or H100/H800",
        cause="Its tiles need more shared memory than RTX cards, A10 and A40 have.",
        confirm="It runs under torch.no_grad(); the head size is above the limit.",
        fix="""attn_implementation="sdpa" for training, or a newer flash-attn (2.5.5 has no such limit without
            dropout).""",
        call=_EXPLAIN.format(d=256, dtype="bfloat16", gpu="rtx4090"),
        source="Dao-AILab/flash-attention#277, Dao-AILab/flash-attention#328",
        reads=lambda match, text: [f"The limit here is {match['limit']}.", *_values.head_size(match, text)],
    ),
)
