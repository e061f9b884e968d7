"""Errors of torch.nn.functional.scaled_dot_product_attention about its arguments."""

from __future__ import annotations

from undivided.diagnosis import _values
from undivided.diagnosis._entry import ATTENTION, WORDS, Entry

ENTRIES = (
    Entry(
        id="sdpa-no-kernel",
        title="Every kernel that sdpa_kernel(...) allows refused the inputs",
        patterns=(r"No available kernel\. ?Aborting execution",),
        example="RuntimeError: No available kernel. Aborting execution.",
        cause="""Only some kernels were allowed (sdpa_kernel(...), torch.backends.cuda.enable_*_sdp), usually not the
            math one, and each of them refuses something: a mask, dropout, float32, the head size, the GPU. The reasons
            are warnings, printed before the error.""",
        confirm="""Read the warnings "... kernel not used because:" above the error, or run the same call with no
            sdpa_kernel: if that works, the restriction is the cause.""",
        fix="""Allow one more kernel (sdpa_kernel([FLASH_ATTENTION, EFFICIENT_ATTENTION, MATH])), or remove what the
            warning names: pass is_causal instead of a mask, cast to bfloat16, set dropout_p to 0.""",
        call="""
            q, k, v = (torch.randn(2, 8, 16, 64) for _ in range(3))
            # math runs what flash cannot
            with undivided.use_backends("flash", "math"):
                out = undivided.attention(
                    q, k, v, layout="bhsd", mask=masks.causal(), dropout_p=0.1
                )
            print(
                undivided.explain(
                    q, k, v, layout="bhsd", mask=masks.causal(), dropout_p=0.1
                )
            )
            """,
        source="facebookresearch/sam2#57, lucidrains/x-transformers#143, pytorch/torchtitan#2065",
        reads=_values.kernel_warnings,
    ),
    Entry(
        id="sdpa-no-viable-backend",
        title="sdpa_kernel(...) or the switches allow no kernel of this device",
        patterns=(r"No viable backend for scaled_dot_product_attention was found",),
        example="""RuntimeError: No viable backend for scaled_dot_product_attention was found. This is likely due to
            turning off both the math kernel and the fused kernels.""",
        cause="""The kernels allowed by sdpa_kernel(...) or the enable_*_sdp switches do not exist on this device:
            efficient and cuDNN attention are for GPUs only. With nested tensors it also means that all refused.""",
        confirm="""Print torch.backends.cuda.flash_sdp_enabled(), mem_efficient_sdp_enabled(), math_sdp_enabled(), and
            look for sdpa_kernel around the call. The switches show what is allowed, not what is available.""",
        fix="Allow MATH too, or choose the list of kernels by q.device.type.",
        call="""
            q, k, v = (torch.randn(2, 8, 16, 64) for _ in range(3))
            # selects a backend of the device
            out = undivided.attention(q, k, v, layout="bhsd")
            """,
        source="intel/torch-xpu-ops#2426, pytorch/pytorch aten/src/ATen/native/transformers/attention.cpp",
        reads=_values.kernel_warnings,
    ),
    Entry(
        id="sdpa-head-count",
        title="Query and key have different numbers of heads, without enable_gqa=True",
        patterns=(
            r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\) "
            r"at non-singleton dimension 1\b",
        ),
        example="""RuntimeError: The size of tensor a (8) must match the size of tensor b (2) at non-singleton
            dimension 1""",
        cause="""scaled_dot_product_attention repeats no heads unless enable_gqa=True; the matrix product then fails
            with a broadcasting message that names neither heads nor arguments. The same text comes from tensors in
            [B, S, H, D] order and from a mask of three dimensions.""",
        confirm="Print q.shape, k.shape, v.shape and mask.shape: axis 1 is the head axis of [B, H, S, D].",
        fix="""Pass enable_gqa=True (PyTorch 2.5 and later) if the key heads divide the query heads; transpose
            [B, S, H, D] tensors; add the head axis to a 3-D mask with mask[:, None].""",
        call="""
            q = torch.randn(2, 8, 16, 64)
            k, v = torch.randn(2, 2, 16, 64), torch.randn(2, 2, 16, 64)
            # 8 query heads, 2 key heads: never expanded
            out = undivided.attention(q, k, v, layout="bhsd")
            """,
        source="pytorch/pytorch#139769, ModelTC/LightX2V#1472",
        near=ATTENTION,
        reads=_values.heads,
    ),
    Entry(
        id="sdpa-mask-shape",
        title="The mask does not fit the scores [B, H, Sq, Sk]",
        patterns=(
            r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\) "
            r"at non-singleton dimension (?P<dim>[23])\b",
        ),
        example="""RuntimeError: The size of tensor a (4) must match the size of tensor b (7) at non-singleton
            dimension 3""",
        cause="""The mask is broadcast to the scores [B, H, Sq, Sk]. A padding mask [B, Sk] is aligned with the wrong
            axes, and with a cache Sk is longer than Sq.""",
        confirm="Compare mask.shape with (B, H, q.shape[-2], k.shape[-2]).",
        fix="""Add the missing axes to a padding mask, mask[:, None, None, :], and build a causal mask for the cached
            length, not for the new tokens.""",
        call="""
            q, k, v = (torch.randn(2, 8, 16, 64) for _ in range(3))
            # lengths instead of a mask tensor
            out = undivided.attention(
                q, k, v, layout="bhsd", mask=masks.lengths([9, 16])
            )
            """,
        source="pytorch/pytorch documentation of scaled_dot_product_attention",
        near=ATTENTION,
        reads=_values.mask_sizes,
    ),
    Entry(
        id="sdpa-mask-and-causal",
        title="attn_mask and is_causal were both given",
        patterns=(r"Explicit attn_mask should not be set when is_causal=True",),
        example="""RuntimeError: _scaled_dot_product_attention: Explicit attn_mask should not be set when
            is_causal=True""",
        cause="""PyTorch documents the two as exclusive, but only some kernels check it: the CPU flash kernel silently
            intersects them, the math kernel raises. So the error can appear when the device or dtype changes.""",
        confirm="Both arguments are in the call; it works with either one left out.",
        fix="Pass one mask that combines both, with is_causal=False.",
        call="""
            q, k, v = (torch.randn(2, 8, 16, 64) for _ in range(3))
            out = undivided.attention(
                q,
                k,
                v,
                layout="bhsd",
                mask=masks.causal() & masks.lengths([9, 16], [9, 16]),
            )
            """,
        source="jingyaogong/minimind#382, nari-labs/dia#170",
    ),
    Entry(
        id="sdpa-mask-dtype",
        title="The mask is neither boolean nor of the query's dtype",
        patterns=(
            r"Expected attn_mask dtype to be bool or (?:float or )?to match query dtype, but got "
            r"attn_mask\.dtype: (?P<a>[\w: ]+?) and query\.dtype: (?P<b>[\w: ]+?) instead",
            r"Expected attn_mask dtype to be bool or (?:float or )?to match query dtype",
        ),
        example="""RuntimeError: Expected attn_mask dtype to be bool or float or to match query dtype, but got
            attn_mask.dtype: long int and  query.dtype: float instead.""",
        cause="""An integer mask (a tokenizer's attention_mask is int64), or a float mask that stayed float64 or
            float32 while the model runs in half precision.""",
        confirm="Print mask.dtype and q.dtype.",
        fix="""mask.bool() for 0/1 masks, where True must mean attend (nn.MultiheadAttention's key_padding_mask
            means the opposite); mask.to(q.dtype) for masks that are added.""",
        call="""
            q, k, v = (torch.randn(2, 8, 16, 64) for _ in range(3))
            # as a tokenizer returns it
            attention_mask = torch.tensor([[1] * 9 + [0] * 7, [1] * 16])
            out = undivided.attention(
                q, k, v, layout="bhsd", mask=masks.lengths(attention_mask.sum(1))
            )
            """,
        source="mahmoodlab/TITAN#11",
        reads=lambda match, text: [f"The mask is {match['a']}, the query {match['b']}."] if match.re.groups else [],
    ),
    Entry(
        id="sdpa-dtypes",
        title="Query, key and value have different dtypes",
        patterns=(
            r"Expected query, key, and value to have the same dtype, but got query\.dtype: (?P<q>[\w: ]+?),? "
            r"key\.dtype: (?P<k>[\w: ]+?),? and value\.dtype: (?P<v>[\w: ]+?) instead",
            r"Expected query, key, and value to have the same dtype",
        ),
        example="""RuntimeError: Expected query, key, and value to have the same dtype, but got query.dtype: float
            key.dtype: c10::BFloat16 and value.dtype: float instead.""",
        cause="""A step between the projections and the attention returned float32 (rotary embeddings, a norm over q
            and k), or a cache was allocated in another dtype.""",
        confirm="Print q.dtype, k.dtype, v.dtype just before the call.",
        fix="Cast back after the rotary embedding (q.to(v.dtype)), allocate the cache in the model's dtype.",
        call="""
            q, k, v = (torch.randn(2, 8, 16, 64) for _ in range(3))
            # casts all three, as SDPA does
            with torch.autocast("cpu", torch.bfloat16):
                out = undivided.attention(q, k.bfloat16(), v, layout="bhsd")
            """,
        source="nari-labs/dia#158, pytorch/pytorch#119162",
        reads=lambda match, text: (
            [f"query {match['q']}, key {match['k']}, value {match['v']}."] if match.re.groups else []
        ),
    ),
    Entry(
        id="sdpa-devices",
        title="Query, key and value are on different devices",
        patterns=(r"Expected query, key, and value to have the same device type",),
        example="""RuntimeError: Expected query, key, and value to have the same device type, but got query.device:
            cuda:0 key.device: cpu and value.device: cpu instead.""",
        cause="A cache, a mask or part of the model stayed on the CPU (or on meta, where weights were not loaded).",
        confirm="Print q.device, k.device, v.device.",
        fix="Move cache and buffers too, with model.to(device); load the weights of meta tensors.",
        call="""
            q, k, v = (torch.randn(2, 16, 8, 64) for _ in range(3))
            out = undivided.attention(
                q, k.to(q.device), v.to(q.device), layout="bshd"
            )
            """,
        source="pytorch/pytorch aten/src/ATen/native/transformers/attention.cpp",
    ),
    Entry(
        id="sdpa-gqa-divide",
        title="enable_gqa=True, but the key heads do not divide the query heads",
        patterns=(r"Number of heads in key and value must divide the number of heads in",),
        example="RuntimeError: Number of heads in key and value must divide the number of heads in query",
        cause="""Each key head must serve equally many query heads. Often the tensors are in [B, S, H, D] order, so that
            lengths are read as heads, or tensor parallelism split the query heads and not the key heads.""",
        confirm="Print q.shape and k.shape; axis 1 is the head axis.",
        fix="Transpose to [B, H, S, D], or repeat or shard the key heads so that they divide.",
        call="""
            q, k, v = (torch.randn(2, 16, h, 64) for h in (12, 4, 4))
            # with the layout given, lengths are not read as heads
            out = undivided.attention(q, k, v, layout="bshd")
            """,
        source="pytorch/pytorch aten/src/ATen/native/transformers/sdp_utils.h",
    ),
    Entry(
        id="sdpa-head-size",
        title="Query and key have different head sizes",
        patterns=(
            r"Expected size for first two dimensions of batch2 tensor to be: \[(?P<a>\d+, ?\d+)\] "
            r"but got: \[(?P<b>\d+, ?\d+)\]",
        ),
        example="RuntimeError: Expected size for first two dimensions of batch2 tensor to be: [8, 16] but got: [8, 32].",
        cause="""q @ k^T needs the same head size in both. Often q or k was reshaped with the number of heads of the
            other, or only one of them has the rotary part.""",
        confirm="Print q.shape[-1] and k.shape[-1]: they must be equal; v may differ.",
        fix="Reshape each tensor with its own number of heads: k.view(B, S, kv_heads, head_dim).",
        call="""
            # d_qk and d_v may differ
            q, k, v = (torch.randn(2, 16, 8, d) for d in (192, 192, 128))
            out = undivided.attention(q, k, v, layout="bshd")
            """,
        source="pytorch/pytorch documentation of scaled_dot_product_attention",
        near=ATTENTION,
    ),
    Entry(
        id="sdpa-fused-refused",
        title="PyTorch warns why a fused kernel was not used; the O(S^2) one runs instead",
        patterns=(
            r"(?:Flash attention|Memory efficient|cuDNN(?: attention)?) kernel not used because",
            r"Flash Attention does not support non-null attn_mask",
            r"(?:Both|All) fused kernels (?:do not|requires?|of cpp)",
            r"Flash attention requires q,k,v to have the same last dimension",
        ),
        example="""UserWarning: Flash Attention does not support non-null attn_mask. (Triggered internally at
            aten/src/ATen/native/transformers/sdp_utils_cpp.h:262.)""",
        cause="""PyTorch prints these warnings only under sdpa_kernel(...). Otherwise it falls back silently to the math
            kernel, which stores the whole score matrix.""",
        confirm="torch._fused_sdp_choice(q, k, v, ...) returns 0 if the math kernel would run.",
        fix="""Remove the cause in the warning: is_causal=True instead of a causal mask, packing instead of a padding
            mask, half precision, four dimensions, a last stride of 1, dropout 0, equal head sizes.""",
        call="""
            q, k, v = (torch.randn(2, 8, 16, 64) for _ in range(3))
            # the reasons, without running anything
            print(undivided.explain(q, k, v, layout="bhsd", mask=masks.window(4, 0)))
            """,
        source="Dao-AILab/flash-attention#1321, lucidrains/x-transformers#143",
        weight=WORDS,
        reads=_values.kernel_warnings,
    ),
)
