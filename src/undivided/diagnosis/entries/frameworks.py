"""Errors of transformers and xFormers."""

from __future__ import annotations

from undivided.diagnosis import _values
from undivided.diagnosis._entry import WORDS, Entry

_ANY_DEVICE = """
    # no package to install, any device
    q, k, v = (torch.randn(2, 8, 16, 64) for _ in range(3))
    out = undivided.attention(q, k, v, layout="bhsd", mask=masks.causal())
    """

ENTRIES = (
    Entry(
        id="xformers-no-operator",
        title="xFormers: no operator supports these inputs",
        patterns=(r"No operator found for `memory_efficient_attention_(?P<which>forward|backward)`",),
        example="""NotImplementedError: No operator found for `memory_efficient_attention_forward` with inputs:
                 query : shape=(1, 257, 6, 64) (torch.float32)
            `fa2F@v2.5.7` is not supported because:
                device=cpu (supported: {'cuda'})
                dtype=torch.float32 (supported: {torch.float16, torch.bfloat16})""",
        cause="""Its operators are for CUDA, most for fp16 and bf16, and each has limits; the list under the error
            shows them. "xFormers wasn't build with CUDA support" means a wheel for another PyTorch; "too new" means a
            GPU that the wheel does not support.""",
        confirm="Read the reasons; python -m xformers.info lists the operators of the wheel.",
        fix="""Remove the reason of one operator (device, dtype, head size, bias type), reinstall xformers for this
            PyTorch, or switch to SDPA.""",
        call=_ANY_DEVICE,
        source="facebookresearch/xformers#1143, unslothai/unsloth#400",
        reads=lambda match, text: [f"It is the {match['which']} pass.", *_values.operator_reasons(match, text)],
    ),
    Entry(
        id="hf-flash-toggled",
        title='transformers: attn_implementation="flash_attention_2" without a usable flash-attn',
        patterns=(
            r"FlashAttention2 has been toggled on, but it cannot be used due to the following error: (?P<why>[^.]{0,120})",
            r"FlashAttention ?[234] has been toggled on, but it cannot be used",
        ),
        example="""ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error:
            the package flash_attn seems to be not installed. Please refer to the documentation""",
        cause="""The argument or the model's config requests it, and the package is missing or too old, or there is no
            CUDA device.""",
        confirm="""python -c "import flash_attn" prints the real error; look for _attn_implementation in the config.""",
        fix="""attn_implementation="sdpa" (it needs no package), or install flash-attn for this PyTorch: pip install
            flash-attn --no-build-isolation.""",
        call=_ANY_DEVICE,
        source="huggingface/transformers src/transformers/modeling_utils.py",
        reads=lambda match, text: [f"The reason given: {match['why'].strip()}."] if match.re.groups else [],
    ),
    Entry(
        id="hf-no-sdpa",
        title="transformers: the model class has no SDPA support",
        patterns=(
            r"\b(?P<model>\w{1,80}) does not support an attention implementation through "
            r"torch\.nn\.functional\.scaled_dot_product_attention",
        ),
        example="""ValueError: InternVLChatModel does not support an attention implementation through
            torch.nn.functional.scaled_dot_product_attention yet.""",
        cause="The class (often remote code) does not declare _supports_sdpa, and sdpa was requested, or became default.",
        confirm="The class in the message has no _supports_sdpa = True.",
        fix="""attn_implementation="eager"; or set _supports_sdpa on the class if its code calls SDPA itself.""",
        call=_ANY_DEVICE,
        source="huggingface/transformers#28005",
        reads=lambda match, text: [f"The class is {match['model']}."],
    ),
    Entry(
        id="hf-no-flash",
        title="transformers: the model class has no Flash Attention support",
        patterns=(r"\b(?P<model>\w{1,80}) does not support Flash Attention (?P<version>[\d.]+?)\.?0? yet",),
        example="""ValueError: NemotronHForCausalLM does not support Flash Attention 2.0 yet. Please request to add
            support where the model is hosted, on its model hub page""",
        cause="The class does not declare support for it; encoder-decoder and remote models often do not.",
        confirm="The class in the message has no _supports_flash_attn (or _supports_flash_attn_2).",
        fix="""attn_implementation="sdpa" or "eager"; for composite models set it only for the part that supports it.""",
        call=_ANY_DEVICE,
        source="huggingface/transformers src/transformers/modeling_utils.py",
        reads=lambda match, text: [f"The class is {match['model']}."],
    ),
    Entry(
        id="hf-flash-dtype",
        title="transformers: Flash Attention with a float32 model",
        patterns=(
            r"Flash Attention [\d.]+ only supports torch\.float16 and torch\.bfloat16 dtypes, but the current dy?t?y?pe "
            r"in (?P<model>\w+) is (?P<dtype>torch\.\w+)",
            r"You are attempting to use Flash Attention [\d.]+ without specifying a torch dtype",
        ),
        example="""Flash Attention 2 only supports torch.float16 and torch.bfloat16 dtypes, but the current dype in
            Qwen3ForCausalLM is torch.float32.""",
        cause="The model was loaded without torch_dtype, so that its weights are float32.",
        confirm="print(model.dtype).",
        fix="""from_pretrained(..., torch_dtype="auto"), or train under autocast; with FSDP mixed precision the warning
            can be ignored.""",
        call="""
            # float32 runs too
            q, k, v = (torch.randn(2, 8, 16, 64) for _ in range(3))
            out = undivided.attention(q, k, v, layout="bhsd", mask=masks.causal())
            """,
        source="huggingface/transformers src/transformers/modeling_utils.py, QwenLM/Qwen3#406",
        reads=lambda match, text: [f"{match['model']} is {match['dtype']}."] if match.re.groups else [],
    ),
    Entry(
        id="hf-output-attentions",
        title="transformers: fused attention returns no attention weights",
        patterns=(
            r"`?(?:sdpa|scaled_dot_product_attention|flash)`? ?attention does not support `output_attentions=True`",
            r"scaled_dot_product_attention` does not support `output_attentions=True`",
        ),
        example="`sdpa` attention does not support `output_attentions=True` or `head_mask`.",
        cause="Fused kernels never store the weights; out.attentions is then empty or the model falls back to eager.",
        confirm="output_attentions=True is in the call or the config.",
        fix="""Use attn_implementation="eager" if the weights are needed.""",
        call="""
            q, k, v = (torch.randn(1, 16, 2, 64) for _ in range(3))
            eye = torch.eye(16).view(1, 16, 1, 16).expand(1, 16, 2, 16)
            # v is the identity, so the output is the weights [B, Sq, H, Sk]
            weights = undivided.attention(
                q, k, eye, layout="bshd", mask=masks.causal()
            )
            """,
        source="huggingface/transformers src/transformers/integrations/sdpa_attention.py",
        weight=WORDS,
    ),
    Entry(
        id="hf-padding-side",
        title="transformers: batched generation with padding on the right",
        patterns=(r"batched generation with padding_side='right'",),
        example="""ValueError: You are attempting to perform batched generation with padding_side='right' this may lead
            to unexpected behaviour for Flash Attention version of Qwen2.""",
        cause="""New tokens are appended after the padding, which then is between real tokens: it would be attended to,
            or positions would shift.""",
        confirm="tokenizer.padding_side is right.",
        fix="""tokenizer.padding_side = "left" before tokenizing.""",
        call="""
            # one new token each
            q = torch.randn(2, 1, 8, 64)
            k, v = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 8, 64)
            # padding on the left
            left = masks.lengths([9, 16], kv_start=[7, 0])
            # padding on the right
            right = masks.lengths([9, 16])
            out = undivided.attention(q, k, v, layout="bshd", mask=left)
            """,
        source="huggingface/transformers modeling_qwen2.py",
    ),
)
