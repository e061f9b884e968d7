"""TransformerEngine's DotProductAttention on any device: grouped heads, packed documents, window, learnable sink.

The packed result equals each document alone, and an argument that does not fit gives a clear error.
"""

import torch

from undivided import DotProductAttention

torch.manual_seed(0)
attention = DotProductAttention(
    num_attention_heads=8,
    kv_channels=64,
    num_gqa_groups=2,
    qkv_format="thd",  # [tokens, heads, head size], packed
    attn_mask_type="padding_causal",  # causal within each document
    window_size=(127, 0),  # 128 keys: the 127 before the query's own, and its own
    softmax_type="learnable",
)
print(attention)

lengths = [5, 300, 42]
cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
q = torch.randn(sum(lengths), 8, 64, requires_grad=True)
k, v = (torch.randn(sum(lengths), 2, 64) for _ in range(2))
packed = attention(q, k, v, cu_seqlens_q=cu_seqlens)
packed.square().sum().backward()
print(f"output {list(packed.shape)}: {len(lengths)} documents, heads joined")
print(f"the learnable offset has a gradient for each head: {attention.softmax_offset.grad.norm():.2f}")

# One document at a time, as a batch of one.
alone = torch.cat(
    [
        attention(a[None], b[None], c[None], qkv_format="bshd", attn_mask_type="causal")[0]
        for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    ]
)
print(f"packed and alone differ by at most {(packed - alone).abs().max():.1e}")
assert torch.allclose(packed, alone, atol=1e-5)

# An error names what is wrong and how to fix it.
try:
    attention(q, k, v, cu_seqlens_q=cu_seqlens, attn_mask_type="causal")
except ValueError as error:
    print(f"\n{error}")
