"""Errors of FlexAttention and of nested tensors."""

from __future__ import annotations

from undivided.diagnosis._entry import WORDS, Entry

_PREDICATE = """
    # any head size, any length
    q, k, v = (torch.randn(1, 8, 40, 24) for _ in range(3))
    # the same function as a mask_mod
    mask = masks.predicate(lambda b, h, i, j: (i - j).abs() % 3 == 0)
    out = undivided.attention(
        q.requires_grad_(), k, v, layout="bhsd", mask=mask
    )
    # on the CPU too
    out.sum().backward()
    """

_PACKED = """
    # 3 and 7 tokens, packed: no nested tensor
    q, k, v = (torch.randn(10, 8, 64) for _ in range(3))
    out = undivided.attention(
        q,
        k,
        v,
        layout="thd",
        mask=masks.documents([0, 3, 10]) & masks.causal(),
    )
    """

_JAGGED = """
    # 3 and 7 tokens
    tokens, offsets = torch.randn(10, 8, 64), torch.tensor([0, 3, 10])
    jagged = torch.nested.nested_tensor_from_jagged(tokens, offsets)
    q = k = v = jagged.transpose(1, 2)
    out = undivided.scaled_dot_product_attention(q, k, v, is_causal=True)
    """

ENTRIES = (
    Entry(
        id="flex-cpu-backward",
        title="FlexAttention does not train on the CPU",
        patterns=(r"FlexAttention does not support backward on (?P<device>CPU|MPS)",),
        example="""NotImplementedError: FlexAttention does not support backward on CPU. Please set the input
            requires_grad to False or use another device.""",
        cause="Its CPU kernel is for inference; any input that requires a gradient is refused.",
        confirm="q.requires_grad is True (parameters before it make it so).",
        fix="Wrap inference in torch.no_grad(), or train with another function.",
        call=_PREDICATE,
        source="pytorch/pytorch#148752, huggingface/transformers#40352",
    ),
    Entry(
        id="flex-cpu-lse",
        title="Compiled FlexAttention on the CPU returns no log-sum-exp",
        patterns=(
            r"torch\.compile on CPU only supports inference and `return_lse` is not supported",
            r"Returning max scores is not supported on CPU",
        ),
        example="""InductorError: LoweringException: NotImplementedError: torch.compile on CPU only supports inference
            and `return_lse` is not supported yet.""",
        cause="""The CPU template writes only the output. Models with attention sinks need the log-sum-exp, so they fail
            with attn_implementation="flex_attention" on a CPU.""",
        confirm="return_lse=True, return_aux=AuxRequest(...), or a gradient is requested.",
        fix="Run it uncompiled (it stores the scores), or use another implementation on the CPU.",
        call="""
            q, k, v = (torch.randn(1, 8, 40, 64) for _ in range(3))
            out, lse = undivided.attention(
                q, k, v, layout="bhsd", sinks=torch.zeros(8), return_lse=True
            )
            """,
        source="huggingface/transformers#40345",
    ),
    Entry(
        id="flex-heads",
        title="FlexAttention: different numbers of heads without enable_gqa",
        patterns=(
            r"Expect query and key/value to have the same number of heads but got Hq=(?P<a>\d+) and Hkv=(?P<b>\d+)",
        ),
        example="""ValueError: Expect query and key/value to have the same number of heads but got Hq=8 and Hkv=2. Try
            setting enable_gqa=True for GQA.""",
        cause="Grouped-query attention must be enabled explicitly.",
        confirm="The message has both numbers.",
        fix="flex_attention(..., enable_gqa=True), if Hkv divides Hq.",
        call="""
            q, k, v = (torch.randn(2, h, 16, 64) for h in (8, 2, 2))
            out = undivided.attention(q, k, v, layout="bhsd")
            """,
        source="pytorch/pytorch torch/nn/attention/flex_attention.py",
        reads=lambda match, text: (
            [f"{match['a']} query heads, {match['b']} key heads: {int(match['a']) // int(match['b'])} to one."]
            if int(match["b"]) and int(match["a"]) % int(match["b"]) == 0
            else [f"{match['b']} does not divide {match['a']}: not grouped-query attention."]
        ),
    ),
    Entry(
        id="flex-rank",
        title="FlexAttention supports only [B, H, S, D]",
        patterns=(r"NYI: query, key, and value must be 4D tensors",),
        example="NotImplementedError: NYI: query, key, and value must be 4D tensors",
        cause="Packed [T, H, D] and unbatched tensors are not accepted.",
        confirm="q.dim() is not 4.",
        fix="q[None].transpose(1, 2) for packed tensors, with a document mask as the block mask.",
        call=_PACKED,
        source="pytorch/pytorch torch/nn/attention/flex_attention.py",
    ),
    Entry(
        id="flex-power-of-two",
        title="FlexAttention of older PyTorch: head sizes must be powers of 2",
        patterns=(
            r"NYI: Currently non power of 2 embedding dimension are not supported\. Got E=(?P<a>\d+) and Ev=(?P<b>\d+)",
            r"Shape element \d must be a power of 2",
        ),
        example="""ValueError: NYI: Currently non power of 2 embedding dimension are not supported. Got E=72 and
            Ev=72.""",
        cause="Triton blocks are powers of 2 and older versions did not pad them; decoding was fixed last.",
        confirm="The head size is not a power of 2, for example 72, 80 or 96.",
        fix="Upgrade PyTorch, or pad q, k and v with zeros to the next power of 2 and pass the old scale.",
        call=_PREDICATE,
        source="unslothai/unsloth#4036, meta-pytorch/attention-gym#127, pytorch/pytorch#133321",
        reads=lambda match, text: (
            [f"Head size {match['a']}; the next power of 2 is {1 << (int(match['a']) - 1).bit_length()}."]
            if match.re.groups
            else []
        ),
    ),
    Entry(
        id="flex-head-sizes",
        title="FlexAttention: query and key have different head sizes",
        patterns=(
            r"Expect query and key/value to have the same embedding dimension but got E=(?P<a>\d+) and E=(?P<b>\d+)",
        ),
        example="""ValueError: Expect query and key/value to have the same embedding dimension but got E=16 and E=8.""",
        cause="q and k were split into heads differently, or q carries a rotary part that k lacks.",
        confirm="Compare q.shape[-1] and k.shape[-1].",
        fix="Concatenate the rotary part to both; only v may have another head size.",
        call="""
            q, k, v = (torch.randn(1, 8, 16, d) for d in (48, 48, 32))
            out = undivided.attention(q, k, v, layout="bhsd")
            """,
        source="pytorch/pytorch torch/nn/attention/flex_attention.py",
        reads=lambda match, text: [f"Query {match['a']}, key {match['b']}."],
    ),
    Entry(
        id="flex-block-mask-size",
        title="The BlockMask was created for other lengths",
        patterns=(
            r"block_mask was created for block_mask\.shape=(?P<a>\([\d, ]+\)) but got "
            r"q_len=(?P<q>\d+) and kv_len=(?P<k>\d+)",
            r"block_mask was created for a smaller length than you're using it for",  # torch 2.15
        ),
        example="""ValueError: block_mask was created for block_mask.shape=(1, 1, 128, 128) but got q_len=256 and
            kv_len=256.""",
        cause="A block mask belongs to one pair of lengths; with a cache or varying batches they change each step.",
        confirm="Compare block_mask.shape with the lengths of q and k; up to torch 2.13 the message has both.",
        fix="Create one for each pair of lengths, or create one large mask and use block_mask._adjust.",
        call="""
            # a mask without lengths, for all of them
            mask = masks.window(64, 0, align="bottom_right")
            for queries, keys in ((40, 40), (1, 41)):
                q, k, v = (torch.randn(1, 8, n, 64) for n in (queries, keys, keys))
                out = undivided.attention(q, k, v, layout="bhsd", mask=mask)
            """,
        source="pytorch/pytorch#141486, meta-pytorch/attention-gym#54",
        reads=lambda match, text: (
            [f"Created for {match['a']}, called with {match['q']} queries and {match['k']} keys."]
            if "a" in match.groupdict()
            else []
        ),
    ),
    Entry(
        id="flex-cpu-dtype",
        title="Compiled FlexAttention on the CPU: this dtype or processor is not supported",
        patterns=(
            r"are supported in FlexAttention for CPU device\. Found input tensors are",
            r"torch\.compile on current platform is not supported for CPU",
        ),
        example="""NotImplementedError: `torch.float` , `torch.float16` and `torch.bfloat16` are supported in
            FlexAttention for CPU device. Found input tensors are `torch.float64`.""",
        cause="The CPU template needs x86 with AVX2, Linux or Windows, and does not support float64.",
        confirm="Print q.dtype, platform.machine() and torch.backends.cpu.get_cpu_capability().",
        fix="Cast to float32, or call flex_attention uncompiled.",
        call="""
            q, k, v = (
                torch.randn(1, 8, 16, 64, dtype=torch.float64) for _ in range(3)
            )
            out = undivided.attention(q, k, v, layout="bhsd", mask=masks.causal())
            """,
        source="pytorch/pytorch torch/_inductor/kernel/flex/flex_cpu.py",
    ),
    Entry(
        id="flex-uncompiled",
        title="FlexAttention runs uncompiled and stores the whole score matrix",
        patterns=(r"flex_attention called without torch\.compile\(\)",),
        example="UserWarning: flex_attention called without torch.compile() - this will use an unfused implementation",
        cause="Outside torch.compile it runs a plain implementation: correct, but slow and with O(S^2) memory.",
        confirm="The call is not inside torch.compile.",
        fix="Compile it once, at module level: flex_attention = torch.compile(flex_attention).",
        call=_PREDICATE,
        source="pytorch/pytorch torch/nn/attention/flex_attention.py",
        weight=WORDS,
    ),
    Entry(
        id="flex-nested",
        title="FlexAttention does not support nested tensors",
        patterns=(
            r"flex_attention does not support NestedTensor inputs",
            r"call_function flex_attention\(\*\(NestedTensor",  # up to 2.12
        ),
        example="NotImplementedError: flex_attention does not support NestedTensor inputs",
        cause="PyTorch removed the support for jagged inputs.",
        confirm="q.is_nested is True.",
        fix="Pad, or use the packed values: x.values() with a document mask from x.offsets().",
        call=_PACKED,
        source="pytorch/pytorch#138993",
    ),
    Entry(
        id="nested-causal",
        title="Nested tensors with is_causal=True find no kernel on the CPU",
        patterns=(
            r"Nested tensors for query / key are not supported when (?:is_causal=True|an explicit attn_mask is set)",
            r"Masks are not yet supported!",
        ),
        example="""RuntimeError: _scaled_dot_product_attention: Nested tensors for query / key are not supported when
            is_causal=True""",
        cause="""On CPUs nested tensors run only on the math path, which supports neither causal nor explicit masks for
            them. The fused GPU kernels support causal jagged attention.""",
        confirm="It works with is_causal=False.",
        fix="Pad to a dense batch with a mask, or loop over q.unbind().",
        call=_JAGGED,
        source="pytorch/pytorch#156660, pytorch/pytorch#138993",
    ),
    Entry(
        id="nested-contiguous",
        title="Nested tensors must be contiguous",
        patterns=(r"If inputs are nested tensors they must be contiguous",),
        example="RuntimeError: scaled_dot_product_attention: If inputs are nested tensors they must be contiguous",
        cause="transpose(1, 2) makes strided nested tensors non-contiguous, which their kernels do not support.",
        confirm="The tensors were created without layout=torch.jagged.",
        fix="torch.nested.nested_tensor(..., layout=torch.jagged), or .contiguous() after the transpose.",
        call=_JAGGED,
        source="pytorch/pytorch#136270",
    ),
)
