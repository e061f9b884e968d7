"""What PyTorch's attention functions and modules do not do."""

from __future__ import annotations

from undivided.diagnosis import _values
from undivided.diagnosis._entry import ATTENTION, Entry

_SCORES = r"(?:scaled_dot_product|attention|attn_weights|attn_scores|softmax|baddbmm)"
_SIZE = r"(?:.{0,60}?tried to allocate (?P<size>[\d.]+) ?(?P<unit>[KMGT]i?B))?"

ENTRIES = (
    Entry(
        id="sdpa-double-backward",
        title="No second derivative through a fused attention kernel",
        patterns=(r"derivative for aten::_scaled_dot_product_(?P<kernel>\w+)_backward is not implemented",),
        example="""RuntimeError: derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is not
            implemented""",
        cause="""Fused kernels have a first derivative only. Gradient penalties, meta-learning, Hessians and forces
            from energies need the derivative of the backward.""",
        confirm="A caller of the attention uses create_graph=True (or torch.func.hessian).",
        fix="Run that part under sdpa_kernel(SDPBackend.MATH), with O(S^2) memory.",
        call="""
            q = torch.randn(1, 16, 4, 32, requires_grad=True)
            out = undivided.attention(q, q, q, layout="bshd", mask=masks.causal())
            (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
            # it has a derivative with every backend
            gradient.square().sum().backward()
            """,
        source="pytorch/pytorch#116350, pytorch/pytorch#181177, learnables/learn2learn#429",
        reads=lambda match, text: [f"The kernel is {match['kernel']}."],
    ),
    Entry(
        id="sdpa-forward-ad",
        title="No forward-mode derivative (jvp) through a fused attention kernel",
        patterns=(r"Trying to use forward AD with _scaled_dot_product_(?P<kernel>\w+)",),
        example="""NotImplementedError: Trying to use forward AD with _scaled_dot_product_flash_attention_for_cpu that
            does not support it because it has not been implemented yet.""",
        cause="Fused kernels have no forward-mode rule.",
        confirm="The call is inside torch.func.jvp, jacfwd, hessian or forward_ad.dual_level.",
        fix="Run it under sdpa_kernel(SDPBackend.MATH).",
        call="""
            q = torch.randn(1, 16, 4, 32)
            out, tangent = torch.func.jvp(
                lambda x: undivided.attention(x, x, x, layout="bshd"), (q,), (q,)
            )
            """,
        source="pytorch/pytorch#117629, pytorch/pytorch#146901",
        reads=lambda match, text: [f"The kernel is {match['kernel']}."],
    ),
    Entry(
        id="sdpa-not-compiled-flash",
        title="This PyTorch build has no flash kernel for this GPU",
        patterns=(r"Torch was not compiled with (?:flash|memory efficient) attention",),
        example="UserWarning: 1Torch was not compiled with flash attention.",
        cause="""The build does not contain it (mostly Windows wheels of 2.2 to 2.4, some ROCm builds, custom builds).
            Installing the flash-attn package does not help: SDPA has a kernel of its own.""",
        confirm="torch.backends.cuda.is_flash_attention_available() is False.",
        fix="""It is only a warning: the efficient kernel runs instead, and results are correct. A newer PyTorch wheel
            has the kernel; on a GPU before Ampere no build does.""",
        call="""
            # the available backends, and why others are not
            for row in undivided.backends():
                print(row.name, row.available, row.why_not)
            """,
        source="pytorch/pytorch#108175, Comfy-Org/ComfyUI#3265, dotnet/TorchSharp#1375",
    ),
    Entry(
        id="varlen-on-cpu",
        title="torch.nn.attention.varlen has no CPU kernel",
        patterns=(r"Could not run 'aten::_flash_attention_forward' with arguments from the '(?P<device>\w+)' backend",),
        example="""NotImplementedError: Could not run 'aten::_flash_attention_forward' with arguments from the 'CPU'
            backend.""",
        cause="varlen_attn calls the CUDA flash kernel directly; there is none for other devices.",
        confirm="The tensors are on the device in the message.",
        fix="Run it on a GPU, or one call per sequence on the CPU.",
        call="""
            # 3 and 7 tokens, packed
            q, k, v = (torch.randn(10, 8, 64) for _ in range(3))
            out = undivided.attention(
                q,
                k,
                v,
                layout="thd",
                mask=masks.documents([0, 3, 10]) & masks.causal(),
            )
            """,
        source="intel/torch-xpu-ops#2442",
        reads=lambda match, text: [f"The tensors are on {match['device']}."],
    ),
    Entry(
        id="attention-out-of-memory",
        title="Out of memory while storing an S x S score matrix",
        patterns=(rf"{_SCORES}.{{0,600}}?out of memory{_SIZE}", rf"out of memory{_SIZE}.{{0,300}}?{_SCORES}"),
        example="""torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 GiB. (raised in
            scaled_dot_product_attention)""",
        cause="""An unfused path ran: eager attention, or SDPA's math kernel, which runs without a warning for a mask
            with grouped-query heads, float32 with a head size above the limit, or a mask that needs a gradient. It
            stores scores of 4 * B * H * Sq * Sk bytes, and several copies in training.""",
        confirm="""The requested size grows with the square of the length. torch._fused_sdp_choice(...) == 0 means
            the math kernel.""",
        fix="""Make a fused kernel possible (is_causal=True instead of a mask, bfloat16, attn_implementation="sdpa"
            instead of "eager"); repeat the key heads if the cause is grouped-query attention with a mask.""",
        call="""
            q, k, v = (torch.randn(1, 512, h, 64) for h in (8, 2, 2))
            # the decision, before allocating
            decision = undivided.explain(q, k, v, layout="bshd", mask=masks.causal())
            # computed in blocks: O(S) memory
            out = undivided.attention(q, k, v, layout="bshd", mask=masks.causal())
            """,
        source="unslothai/unsloth#8225, Comfy-Org/ComfyUI#15135, PriorLabs/TabPFN#947",
        reads=_values.allocation,
    ),
    Entry(
        id="bias-alignment",
        title="The bias of an efficient kernel is not aligned in memory",
        patterns=(
            r"attn_bias(?:_ptr)? is not correctly aligned(?: \((?P<stride>\w+)\))?",
            r"attn_bias\.stride\(-2\) % 8 != 0",
        ),
        example="""RuntimeError: attn_bias is not correctly aligned (strideM). attn_bias.stride(2) = 66, and should be
            a multiple of 4.""",
        cause="The CUTLASS kernel reads a bias in vectors of 4 or 8, so its row stride must be a multiple of that.",
        confirm="The key length is not a multiple of 8, or the bias is a slice or an expanded view of another tensor.",
        fix="Allocate a wider bias and slice it: torch.zeros(B, H, Sq, ceil8(Sk))[..., :Sk].",
        call="""
            q, k, v = (torch.randn(2, 8, 43, 64) for _ in range(3))
            # any strides
            out = undivided.attention(
                q, k, v, layout="bhsd", bias=torch.randn(8, 43, 43)
            )
            """,
        source="facebookresearch/xformers#813, vllm-project/vllm#407",
    ),
    Entry(
        id="mha-mask-shape",
        title="nn.MultiheadAttention: the mask does not fit",
        patterns=(
            r"The shape of the (?P<rank>[23])D attn_mask is .{0,60}? but should be (?P<expected>\([\d, ]+\))",
            r"Expected key_padded_mask\.shape\[\d\] to be \d+, but got \d+",
        ),
        example="RuntimeError: The shape of the 2D attn_mask is torch.Size([3, 3]), but should be (4, 4).",
        cause="""attn_mask must be [Sq, Sk] or [B * heads, Sq, Sk]; key_padding_mask [B, Sk]. With batch_first=False,
            the default, the first axis of the input is the sequence.""",
        confirm="Print the shapes, and module.batch_first.",
        fix="Pass batch_first=True if inputs are [B, S, E]; repeat a mask per batch element once per head.",
        call="""
            q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
            out = undivided.attention(
                q, k, v, layout="bshd", mask=masks.lengths([3, 4])
            )
            """,
        source="pytorch/pytorch torch/nn/functional.py, multi_head_attention_forward",
    ),
    Entry(
        id="mha-embedding",
        title="nn.MultiheadAttention: the last axis is not embed_dim",
        patterns=(r"was expecting embedding dimension of (?P<a>\d+), but got (?P<b>\d+)",),
        example="AssertionError: was expecting embedding dimension of 16, but got 8",
        cause="The input is transposed or still split into heads, or key and value have other sizes.",
        confirm="Print query.shape; its last axis must be embed_dim.",
        fix="Pass [B, S, embed_dim] with batch_first=True; set kdim= and vdim= for other key and value sizes.",
        call="""
            # split into heads
            q, k, v = (torch.randn(2, 16, 8, 64) for _ in range(3))
            out = undivided.attention(q, k, v, layout="bshd").flatten(2)
            """,
        source="pytorch/pytorch torch/nn/functional.py, multi_head_attention_forward",
        reads=lambda match, text: [f"embed_dim is {match['a']}, the input has {match['b']}."],
    ),
    Entry(
        id="mha-causal-hint",
        title="nn.MultiheadAttention: is_causal is a hint about a mask, not a mask",
        patterns=(r"Need attn_mask if specifying the is_causal hint",),
        example="RuntimeError: Need attn_mask if specifying the is_causal hint.",
        cause="Unlike scaled_dot_product_attention, the module also needs the causal mask.",
        confirm="The call has is_causal=True and no attn_mask.",
        fix="Pass attn_mask=nn.Transformer.generate_square_subsequent_mask(S) with it.",
        call="""
            q, k, v = (torch.randn(2, 16, 8, 64) for _ in range(3))
            out = undivided.attention(q, k, v, layout="bshd", mask=masks.causal())
            """,
        source="pytorch/pytorch#134616",
    ),
    Entry(
        id="sdpa-fp8",
        title="fp8 tensors were passed to a kernel that does not support them",
        patterns=(r'\w{1,60}"? not implemented for \'Float8_(?P<kind>\w+)\'',),
        example="NotImplementedError: \"mul_cpu_reduced_float\" not implemented for 'Float8_e4m3fn'",
        cause="PyTorch's attention computes in 16 bits or more; fp8 is only a storage type.",
        confirm="Print q.dtype.",
        fix="Cast (and scale) before the call: q.to(torch.bfloat16).",
        call="""
            q, k, v = (
                torch.randn(2, 16, 8, 64).to(torch.float8_e4m3fn) for _ in range(3)
            )
            out = undivided.attention(
                *(x.to(torch.bfloat16) for x in (q, k, v)), layout="bshd"
            )
            """,
        source="pytorch/pytorch, raised by torch 2.13 on CPUs",
        near=ATTENTION,
    ),
)
