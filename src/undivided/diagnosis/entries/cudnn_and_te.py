"""Errors of cuDNN's fused attention, of TransformerEngine and of context parallelism."""

from __future__ import annotations

from undivided.diagnosis import _values
from undivided.diagnosis._entry import ATTENTION, PRECISE, WORDS, Entry

_EXPLAIN = """
    q = torch.empty(48, 16534, 18, 128, dtype=torch.bfloat16, device="meta")
    machine = undivided.Machine(
        device="cuda", compute_capability=(8, 0), cudnn="8.9.7"
    )
    # every backend's reasons
    print(
        undivided.explain(
            q, q, q, layout="bshd", mask=masks.causal(), machine=machine
        )
    )
    """

_PACKED = """
    # 3 and 7 tokens, packed
    q, k, v = (torch.randn(10, 8, 64) for _ in range(3))
    out = undivided.attention(
        q,
        k,
        v,
        layout="thd",
        mask=masks.documents([0, 3, 10]) & masks.causal(),
    )
    """

_LAYOUT = """
    # [batch, sequence, hidden]
    x = torch.randn(2, 16, 512)
    q, k, v = (x.view(2, 16, 8, 64) for _ in range(3))
    # there is no default layout
    out = undivided.attention(q, k, v, layout="bshd", mask=masks.causal())
    """

_MERGED = """
    # 7 tokens: any length, split anywhere
    q, k, v = (torch.randn(1, 7, 8, 64) for _ in range(3))
    parts = [
        undivided.attention(
            q, k[:, s], v[:, s], layout="bshd", return_lse=True
        )
        for s in (slice(4), slice(4, 7))
    ]
    out, lse = undivided.merge(
        [out for out, _ in parts], [lse for _, lse in parts], layout="bshd"
    )
    """

_TE_LAYER = (
    r"(?:\bte\.(?:TransformerLayer|MultiheadAttention)|attn_input_format|transformer_engine/pytorch/transformer\.py|"
    r"transformer_engine.{0,200}(?:TransformerLayer|MultiheadAttention))"
)
_PLANS = r"No (?:valid execution plans built|execution plans (?:built successfully|support the graph))"

ENTRIES = (
    Entry(
        id="te-default-layout",
        title="cuDNN refuses a TransformerEngine layer: is its input [batch, sequence, hidden]? The default is sbhd",
        patterns=(rf"\A(?=.*{_TE_LAYER}).*?{_PLANS}",),
        example="""  y = transformer_layer(x)  # te.TransformerLayer, x: [1, 2048, 12288]
            RuntimeError: cuDNN Error: [cudnn_frontend] Error: No valid execution plans built.""",
        cause="""TransformerEngine's layers read their input as [sequence, batch, hidden] unless attn_input_format (or
            qkv_format) is set. With a batch-first input the two are exchanged: cuDNN may refuse the unusual shape, other
            backends run it and mix the sequences of the batch.""",
        confirm="Swap the first two axes of the input (x.transpose(0, 1)): if the error disappears, this is the cause.",
        fix="""Pass attn_input_format="bshd" to TransformerLayer, qkv_format="bshd" to MultiheadAttention and
            DotProductAttention.""",
        call=_LAYOUT,
        source="NVIDIA/TransformerEngine#1350, NVIDIA/TransformerEngine#195",
        weight=PRECISE,
        reads=_values.alignment,
    ),
    Entry(
        id="cudnn-no-plan",
        title="cuDNN found no kernel: check the layout (sbhd or bshd), then the length (a multiple of 64 before cuDNN 9.0)",
        patterns=(_PLANS,),
        example="RuntimeError: cuDNN Error: [cudnn_frontend] Error: No valid execution plans built.",
        cause="""Two causes are the most frequent. The layout: an input in the order sbhd (TransformerEngine's default) is
            read as bshd, or the reverse, so that batch and length are exchanged. The length: cuDNN before 9.0 supports
            only multiples of 64. Otherwise no engine of this cuDNN supports the graph on this GPU: a head size or mask
            that this version lacks (often only in the backward), or a GPU newer than the library.""",
        confirm="""Print q.shape and compare it with the layout setting (qkv_format, attn_input_format); print length % 64
            and torch.backends.cudnn.version(). Then set CUDNN_LOGLEVEL_DBG=2 (before 9: CUDNN_LOGERR_DBG=1) and
            CUDNN_LOGDEST_DBG=stderr for cuDNN's messages; try head size 128; try without gradients.""",
        fix="""Set the layout of the tensors (qkv_format="bshd" or attn_input_format="bshd"). Pad the length to a
            multiple of 64, or upgrade cuDNN to 9.0 or later. To run without cuDNN, in PyTorch:
            torch.backends.cuda.enable_cudnn_sdp(False). In TransformerEngine: NVTE_FUSED_ATTN=0 selects flash-attn or
            the unfused path.""",
        call=_EXPLAIN,
        source="NVIDIA/TransformerEngine#1591, NVIDIA/TransformerEngine#651, YanWenKun/ComfyUI-Docker#140",
        near=rf"{ATTENTION}|cudnn",
        reads=_values.alignment,
    ),
    Entry(
        id="cudnn-execution-failed",
        title="cuDNN's attention failed while running or loading its kernel",
        patterns=(r"CUDNN_STATUS_EXECUTION_FAILED",),
        example="""RuntimeError: fused_attn_f16_arbitrary_seqlen.cu:373 in function operator(): cuDNN Error:
            CUDNN_STATUS_EXECUTION_FAILED""",
        cause="""The kernel could not be compiled or loaded (libraries of two CUDA or cuDNN versions in one process, a
            missing NVRTC), or it read bad offsets: cu_seqlens of the wrong dtype or beyond the tokens.""",
        confirm="""CUDNN_LOGLEVEL_DBG=2 CUDNN_LOGDEST_DBG=stderr shows a Reason; "rtc->loadModule()" means a library
            problem. Compare torch.backends.cudnn.version() with the cuDNN version in the logs. Run with
            CUDA_LAUNCH_BLOCKING=1.""",
        fix="""Keep only one cuDNN in the environment (pip's nvidia-cudnn, no other on LD_LIBRARY_PATH); check
            cu_seqlens; set NVTE_FUSED_ATTN=0 in the meantime.""",
        call=_EXPLAIN,
        source="NVIDIA/TransformerEngine#1116, NVIDIA/TransformerEngine#1407, NVIDIA/Megatron-LM#1882",
        near=ATTENTION,
        reads=lambda match, text: [
            *(["The Reason is rtc->loadModule(): a library problem, not the inputs."] if "loadModule" in text else []),
            *_values.alignment(match, text),
        ],
    ),
    Entry(
        id="te-no-backend",
        title="TransformerEngine: every attention backend was disabled",
        patterns=(r"No dot product attention (?:backend is available|support) for the provided inputs",),
        example="""ValueError: No dot product attention backend is available for the provided inputs. Please run with
            NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 to find out the reasons for disabling all backends.""",
        cause="""Each backend was disabled by a condition. Usual ones: a front end set NVTE_FUSED_ATTN or
            NVTE_UNFUSED_ATTN to 0; flash-attn is missing or outside the accepted versions; head sizes 192/128 (MLA)
            or above 256 in training; context parallelism, which the unfused path does not support; float32.""",
        confirm='Run with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2: each "Disabling ..." line is a reason.',
        fix="""Remove the reasons of one backend: unset the NVTE_* variables, install a flash-attn in the accepted range,
            upgrade cuDNN, pad the length to a multiple of 64 (cuDNN 8) or v to the head size of q.""",
        call=_EXPLAIN,
        source="NVIDIA/TransformerEngine#1321, NVIDIA/TransformerEngine#2285, NVIDIA/TransformerEngine#3006",
        reads=_values.alignment,
    ),
    Entry(
        id="te-cp-only",
        title="Context parallelism is on and neither flash nor fused attention can run",
        patterns=(r"Context parallelism is only implemented with Flash Attention(?: and Fused Attention| v1)?",),
        example="AssertionError: Context parallelism is only implemented with Flash Attention and Fused Attention!",
        cause="""Selection chose the unfused path, which has no context parallelism; the error does not say why flash
            and fused attention were refused. The usual reasons are a length that is not a multiple of 64 under cuDNN 8,
            flash switched off (use_flash_attention, NVTE_FLASH_ATTN), a bias or an arbitrary mask.""",
        confirm="NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 prints the reasons; print the sequence length modulo 64.",
        fix="""Switch flash attention on and install flash-attn; pad the length to a multiple of 64 and of
            2 * ranks; cuDNN 9 takes any length.""",
        call=_EXPLAIN,
        source="NVIDIA/TransformerEngine transformer_engine/pytorch/attention.py, NVIDIA/TransformerEngine#2541",
        reads=_values.alignment,
    ),
    Entry(
        id="te-thd-padding",
        title='TransformerEngine: qkv_format="thd" needs a mask type with "padding" in its name',
        patterns=(
            r"Attention mask type must be padding or padding_causal for qkv_format=thd",
            r"THD format requires padding mask type, got (?P<got>\w+)",
        ),
        example="AssertionError: Attention mask type must be padding or padding_causal for qkv_format=thd!",
        cause="""Packed sequences have lengths, and only mask types with "padding" use them. For thd, "padding" has the
            meaning of no_mask for dense tensors, and "padding_causal" that of causal.""",
        confirm="attn_mask_type is causal or no_mask.",
        fix='attn_mask_type="padding_causal" (or "padding"), with cu_seqlens_q and cu_seqlens_kv.',
        call=_PACKED,
        source="NVIDIA/TransformerEngine#1005, NVIDIA/TransformerEngine#1015, NVIDIA/TransformerEngine#1110",
    ),
    Entry(
        id="te-layout",
        title="TransformerEngine does not recognise the memory layout of q, k and v",
        patterns=(r"The provided qkv memory layout is not supported!?",),
        example="RuntimeError: The provided qkv memory layout is not supported!",
        cause="""It infers the layout from pointers and strides. That fails for expanded key heads, tensors of different
            formats, a last axis that is not contiguous, rotary embeddings on two of the three tensors, and tensors in
            [B, H, S, D].""",
        confirm="Print shape and stride of q, k, v; none may have stride 0 or a last stride other than 1.",
        fix="Pass contiguous tensors in the format of qkv_format; use num_gqa_groups instead of expand.",
        call="""
            qkv = torch.randn(2, 16, 3, 8, 64)
            # views, any strides: nothing is guessed or copied
            q, k, v = qkv.unbind(2)
            out = undivided.attention(q, k, v, layout="bshd", mask=masks.causal())
            """,
        source="NVIDIA/TransformerEngine#544, NVIDIA/TransformerEngine#455, NVIDIA/TransformerEngine#681",
    ),
    Entry(
        id="te-cu-seqlens-dtype",
        title="TransformerEngine: cu_seqlens must be int32",
        patterns=(r"cu_seqlens_q and cu_seqlens_k?q?v? must both be in dtype torch\.int32",),
        example="AssertionError: cu_seqlens_q and cu_seqlens_q must both be in dtype torch.int32!",
        cause="cumsum of integers returns int64 unless dtype= is given; other libraries require int64.",
        confirm="Print cu_seqlens_q.dtype.",
        fix="cu_seqlens.to(torch.int32).",
        call=_PACKED,
        source="NVIDIA/TransformerEngine transformer_engine/pytorch/attention/dot_product_attention",
    ),
    Entry(
        id="te-dense-cu-seqlens",
        title="cu_seqlens of packed documents with a dense format",
        patterns=(
            r"\A(?=.*(?:cu_seqlens|fused_?attn|FusedAttention)).*?device-side assert",
            r"cu_seqlens .{0,60}(?:sbhd|bshd).{0,80}(?:assert|wrong|differ)",
        ),
        example="""  out = attention(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
            RuntimeError: CUDA error: device-side assert triggered""",
        cause="""In sbhd and bshd, cu_seqlens are cumulative lengths of the batch elements, batch + 1 of them. Documents
            packed into a batch of one do not fit: flash-attn runs them by accident, cuDNN asserts on the device.""",
        confirm="len(cu_seqlens) - 1 is not the batch size, or cu_seqlens[-1] is not the number of tokens.",
        fix="""qkv_format="thd" with [T, H, D] tensors, the same cu_seqlens and attn_mask_type "padding_causal".""",
        call=_PACKED,
        source="NVIDIA/TransformerEngine#1259",
        weight=PRECISE,
    ),
    Entry(
        id="te-cache-full",
        title="TransformerEngine's paged KV cache has no free page",
        patterns=(r"KV cache is full!?",),
        example="RuntimeError: KV cache is full!",
        cause="""InferenceParams has room for max_batch_size * max_sequence_length tokens. Finished sequences keep their
            pages until a step omits their id.""",
        confirm="Compare the number of active sequences and of their tokens with the two limits.",
        fix="Leave finished sequences out of pre_step's dictionary; size the cache for the longest prompt plus output.",
        call="""
            # your own pool and block table: any number of pages
            pool = torch.randn(64, 16, 2, 64)
            table = torch.arange(8, dtype=torch.int32).view(2, 4)
            mask = masks.lengths([20, 64]) & masks.causal(align="bottom_right")
            out = undivided.attention(
                torch.randn(2, 1, 8, 64),
                pool,
                pool,
                layout="bshd",
                pages=table,
                mask=mask,
            )
            """,
        source="NVIDIA/TransformerEngine transformer_engine/pytorch/attention/inference.py",
    ),
    Entry(
        id="cp-divisible",
        title="Context parallelism: the length is not a multiple of twice the ranks",
        patterns=(
            r"Sequence length per GPU needs to be divisible by 2",
            r"(?:seq\w*[_ ]len\w*|sequence length).{0,60}(?:divisible by|multiple of) ?\(?2 ?\* ?(?:cp_size|context)",
        ),
        example="AssertionError: Sequence length per GPU needs to be divisible by 2!",
        cause="Each rank owns two chunks, one from each end, so that causal work is balanced: 2 * ranks equal chunks.",
        confirm="Print sequence_length % (2 * context_parallel_size).",
        fix="""Pad to a multiple of 2 * ranks (and of tensor parallel size times ranks). Pad every packed sequence; pass
            the real lengths as cu_seqlens and the padded ones as cu_seqlens_padded.""",
        call=_MERGED,
        source="NVIDIA/TransformerEngine#1930, NVIDIA/Megatron-LM#1669, NVIDIA-NeMo/RL#3563",
        reads=_values.ranks,
    ),
    Entry(
        id="te-cuda-only",
        title="TransformerEngine's attention supports only CUDA tensors",
        patterns=(r"DotProductAttention only supports CUDA tensors",),
        example="AssertionError: DotProductAttention only supports CUDA tensors.",
        cause="There is no CPU path, so its models cannot be tested or debugged without a GPU.",
        confirm="q.is_cuda is False.",
        fix="Move inputs and module to a GPU.",
        call=_LAYOUT,
        source="NVIDIA/TransformerEngine transformer_engine/pytorch/attention/dot_product_attention",
    ),
    Entry(
        id="te-flash-version",
        title="The installed flash-attn is outside the range that TransformerEngine accepts",
        patterns=(
            r"Supported flash-attn versions are (?P<range>[^F]+?)\.? Found flash-attn (?P<found>[\w.]+?)\.?(?: |$)",
        ),
        example="Supported flash-attn versions are >= 2.1.1, <= 2.7.4.post1. Found flash-attn 2.8.3.",
        cause="""Each TransformerEngine release has a highest flash-attn version that it was tested with. Depending on
            the release, a newer one is treated as not installed, or is used with this warning.""",
        confirm="NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 shows whether flash attention was disabled for this reason.",
        fix="Install a version in the range, or a newer TransformerEngine.",
        call="""
            print(
                [
                    (row.name, row.version, row.why_not)
                    for row in undivided.backends()
                    if row.family == "flash"
                ]
            )
            """,
        source="NVIDIA/TransformerEngine#689, NVIDIA/TransformerEngine#1123, NVIDIA/TransformerEngine#3403",
        weight=WORDS,
        reads=lambda match, text: [f"Found {match['found']}, accepted {match['range']}."],
    ),
    Entry(
        id="te-debug-log",
        title="TransformerEngine's log says why a backend was disabled",
        patterns=(r"Disabling (?:Flash|Fused|Unfused)\w*(?: \d)? ",),
        example="[DEBUG | DotProductAttention]: Disabling FusedAttention as no backend supports the provided input",
        cause="""A condition of the selection is not met. "No backend supports the provided input" comes from the check
            for cuDNN, which gives no reason.""",
        confirm='The line "Selected backend" after it shows what ran.',
        fix="""Look up the property in the message; for cuDNN compare head size, mask, length and version with its
            support matrix.""",
        call=_EXPLAIN,
        source="NVIDIA/TransformerEngine#1321, NVIDIA/TransformerEngine#2354",
        weight=WORDS,
        reads=_values.alignment,
    ),
)
