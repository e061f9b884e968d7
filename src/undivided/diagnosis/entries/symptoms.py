"""Faults without an error, found from a description in free words."""

from __future__ import annotations

from undivided.diagnosis._entry import WORDS, Entry

ENTRIES = (
    Entry(
        id="nan-masked-rows",
        title="NaN from rows that may attend to nothing",
        patterns=(
            r"\bnans?\b.{0,120}\b(?:mask|padd|all -?inf|fully)",
            r"(?:fully[ -]masked|masked out|all[ -]padd\w*|padding mask).{0,120}\bnans?\b",
            r"Function '(?:Softmax|ScaledDotProduct)\w*Backward\d' returned nan values",
        ),
        example="scaled_dot_product_attention gives NaN for the padding rows of my mask",
        cause="""The softmax of a row of -inf is 0 / 0. PyTorch's kernels return 0 there since 2.5; older ones, some
            GPU kernels, hand-written attention and nn.MultiheadAttention do not. A NaN in a masked key or value is
            another cause: 0 * NaN is NaN.""",
        confirm="(~mask).all(-1).any() is True, or torch.isnan(k).any() is, because padding was never written.",
        fix="""Let padding rows attend to themselves and ignore their output; zero the unused part of the cache; use
            torch.finfo(dtype).min instead of -inf.""",
        call="""
            q, k, v = (torch.randn(2, 16, 8, 64) for _ in range(3))
            # NaN in the padding
            k[0, 9:], v[0, 9:] = float("nan"), float("nan")
            # and a sequence of length 0
            out = undivided.attention(
                q, k, v, layout="bshd", mask=masks.lengths([9, 0])
            )
            assert out.isfinite().all() and (out[1] == 0).all()
            """,
        source="pytorch/pytorch#103749, pytorch/pytorch#103963, pytorch/pytorch#101967, huggingface/transformers#38690",
        weight=WORDS,
    ),
    Entry(
        id="window-off-by-one",
        title="Two sliding windows differ by one key",
        patterns=(
            r"(?:sliding[ _-]window|window[_ ]size|swa\b).{0,160}(?:off[ -]by[ -]one|differ|deviat|mismatch|wrong)",
            r"(?:off[ -]by[ -]one|differ\w*|deviat\w*|mismatch).{0,160}(?:sliding[ _-]window|window[_ ]size)",
        ),
        example="large deviations between flash and fused attention outputs when sliding window attention is active",
        cause="""There are two conventions: [i - left, i + right], both ends included (flash-attn, TransformerEngine,
            Undivided), or a number of keys, (i - w, i] (cuDNN, transformers' sliding_window, xFormers). The same
            number gives one key more or less.""",
        confirm="Compare with a tiny window (2 or 3) on distinct values: a long window hides the difference.",
        fix="flash-attn's window_size for sliding_window=w tokens is (w - 1, 0); cuDNN's bound is left + 1.",
        call="""
            # 4 keys: the query's own and 3 before it
            print(masks.window(3, 0))
            q, k, v = (torch.randn(1, 16, 8, 64) for _ in range(3))
            out = undivided.attention(q, k, v, layout="bshd", mask=masks.window(3, 0))
            """,
        source="NVIDIA/TransformerEngine#1197, huggingface/transformers#39408, facebookresearch/xformers#923",
        weight=WORDS,
    ),
    Entry(
        id="causal-alignment",
        title="Causal attention with fewer queries than keys: aligned top-left or bottom-right",
        patterns=(
            r"(?:is_causal|causal).{0,200}(?:kv[ -]?cache|decod|chunked|L ?!= ?S|top[ -]left|bottom[ -]right|seqlen_q ?!= ?"
            r"seqlen_k|different lengths|unequal)",
            r"(?:kv[ -]?cache|decod\w*|chunked prefill).{0,160}(?:is_causal|causal)",
        ),
        example="is_causal=True gives the same vector at every step of generation with a KV cache",
        cause="""With L queries and S > L keys, PyTorch's is_causal lets query 0 attend only to key 0 (top-left);
            flash-attn since 2.1 lets the last query attend to every key (bottom-right), which decoding and chunked
            prefill need. Neither raises an error.""",
        confirm="With one query and n keys, the output equals v[0]: the query attended only to the first key.",
        fix="""torch.nn.attention.bias.causal_lower_right(L, S) as attn_mask; is_causal=False for a single query.""",
        call="""
            q, k, v = (torch.randn(1, n, 8, 64) for n in (4, 20, 20))
            # required if the lengths differ
            mask = masks.causal(align="bottom_right")
            out = undivided.attention(q, k, v, layout="bshd", mask=mask)
            """,
        source="pytorch/pytorch#108108, pytorch/pytorch#144858, thu-ml/SageAttention#372",
        weight=WORDS,
    ),
    Entry(
        id="packed-documents-leak",
        title="Packed documents attend to each other",
        patterns=(
            r"(?:pack\w*|concatenat\w*).{0,160}(?:attend|attention|leak|contaminat).{0,80}(?:each other|across|other|cross)",
            r"(?:cross[ -]contaminat|leak)\w*.{0,120}(?:pack|document|sequence)",
        ),
        example="documents packed into one sequence attend to each other",
        cause="""A packed batch ran as one dense causal sequence, so that each document attends to all before it. No
            error is raised; the loss is only slightly wrong.""",
        confirm="Change a token of the first document: the output of the second must not change.",
        fix="Pass cu_seqlens to the packed (thd, varlen) function of the library; restart the position ids per document.",
        call="""
            # 3 and 7 tokens
            q, k, v = (torch.randn(10, 8, 64) for _ in range(3))
            out = undivided.attention(
                q,
                k,
                v,
                layout="thd",
                mask=masks.documents([0, 3, 10]) & masks.causal(),
            )
            """,
        source="NVIDIA/TransformerEngine#1259, NVIDIA/TransformerEngine#1110",
        weight=WORDS,
    ),
    Entry(
        id="slow-on-cpu",
        title="Attention on the CPU is slow, and half precision even slower",
        patterns=(
            r"(?:bf16|bfloat16|fp16|float16|half).{0,80}slow\w*.{0,80}(?:fp32|float32|cpu)",
            r"cpu.{0,80}(?:bf16|bfloat16|fp16|float16).{0,80}slow",
            r"(?:attention|sdpa).{0,60}slow.{0,60}\bcpu\b",
        ),
        example="bfloat16 attention is much slower than float32 on my CPU",
        cause="""Without AMX, PyTorch's matrix library converts half types to float32 first; a single query has too
            little work for its threads. 3-D inputs, dropout and different head sizes run on the math path.""",
        confirm="Compare with the time in float32; look for avx512_bf16 and amx in /proc/cpuinfo.",
        fix="Use float32 on such CPUs, four dimensions, and dropout 0.",
        call="""
            q, k, v = (
                torch.randn(1, 64, 8, 64, dtype=torch.bfloat16) for _ in range(3)
            )
            # the backend that runs here, and why
            print(undivided.explain(q, k, v, layout="bshd"))
            """,
        source="pytorch/pytorch#146508, pytorch/torchchat#1253, pytorch/pytorch#133458",
        weight=WORDS,
    ),
    Entry(
        id="silent-fallback",
        title="Memory or time grows with the square of the length, without an error",
        patterns=(
            r"(?:falls? ?back|fallback|silently|quadratic|O\(S\^?2\)|memory spike).{0,160}(?:math|unfused|eager|attention)",
            r"(?:math|unfused|eager) (?:backend|kernel|path).{0,120}(?:silent|memory|slow|instead)",
        ),
        example="SDPA silently falls back to the math kernel, memory use is 71 GB",
        cause="""Every fused kernel was refused, and PyTorch chose the plain one without a warning. The enable_*_sdp
            switches show what is allowed, not what ran.""",
        confirm="A profile shows softmax and bmm (or addmm) instead of one attention kernel.",
        fix="For a test, allow only fused kernels, sdpa_kernel([...]): then the fallback is an error with reasons.",
        call="""
            q, k, v = (torch.randn(2, 16, h, 64) for h in (8, 2, 2))
            decision = undivided.explain(
                q, k, v, layout="bshd", mask=masks.window(4, 0)
            )
            print(decision.chosen.name, decision.reasons)
            """,
        source="unslothai/unsloth#8225, Comfy-Org/ComfyUI#15190, PriorLabs/TabPFN#947",
        weight=WORDS,
    ),
    Entry(
        id="cp-lost-tokens",
        title="Context parallelism gives other results than one rank",
        patterns=(
            r"(?:context[ -]parallel\w*|\bcp\b ?(?:=|size|enabled|on\b)).{0,200}(?:differ|inconsistent|mismatch|wrong|drop)",
            r"(?:differ\w*|inconsistent|mismatch|wrong).{0,160}(?:context[ -]parallel\w*|\bcp[_ =])",
        ),
        example="results are inconsistent compared to when context parallelism is disabled (length 7, cp=2)",
        cause="""Real lengths that are not a multiple of 2 * ranks are rounded down (7 becomes 6), or tokens were split
            into contiguous shares although the library expects one chunk from each end; partial outputs in bf16 add
            rounding errors.""",
        confirm="Compare with a length that is a multiple of 2 * ranks, in float32.",
        fix="""Pad each sequence to the multiple and pass real and padded offsets; split the batch with the library's
            own function.""",
        call="""
            # ranks with 4 and 3 keys: nothing is rounded
            q, k, v = (torch.randn(1, 7, 8, 64) for _ in range(3))
            whole = undivided.attention(q, k, v, layout="bshd")
            parts = [
                undivided.attention(
                    q, k[:, s], v[:, s], layout="bshd", return_lse=True
                )
                for s in (slice(4), slice(4, 7))
            ]
            out, _ = undivided.merge(
                [o for o, _ in parts], [lse for _, lse in parts], layout="bshd"
            )
            torch.testing.assert_close(out, whole)
            """,
        source="NVIDIA/TransformerEngine#1930, NVIDIA/Megatron-LM#1669, NVIDIA/TransformerEngine#1557",
        weight=WORDS,
    ),
)
