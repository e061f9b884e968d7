"""TransformerLayer: a Llama layer, packed and padded, generation from a cache, and the error for a wrong format.

Packed and padded tokens give the same rows, and so does one token at a time.
"""

from collections import OrderedDict

import torch

from undivided import InferenceParams, RotaryPositionEmbedding, TransformerLayer

torch.manual_seed(0)
HIDDEN, HEADS, GROUPS, SIZE = 256, 8, 2, 32


def layer(number: int, attn_input_format: str) -> TransformerLayer:
    """One layer; every second one attends to the last 16 tokens only."""
    return TransformerLayer(
        HIDDEN,
        683,
        HEADS,
        GROUPS,
        layer_number=number,
        window_size=(15, 0) if number % 2 == 0 else None,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="padding_causal",
        attn_input_format=attn_input_format,
    )


layers = [layer(number, "thd") for number in (1, 2)]
print(layers[1])

# YaRN: four times the length in training. Cosines and sines are computed once for all layers.
rope = RotaryPositionEmbedding(
    SIZE, scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
).cos_sin(256)

# Three documents, packed: positions and attention restart in each. One training step.
lengths = [5, 70, 42]
cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
x = torch.randn(sum(lengths), HIDDEN)
packed = x
for module in layers:
    packed = module(packed, cu_seqlens_q=cu_seqlens, rotary_pos_emb=rope)
packed.square().mean().backward()
norm = torch.stack([p.grad.norm() for module in layers for p in module.parameters()]).norm()
print(f"\npacked: {list(packed.shape)}, {len(lengths)} documents, norm of the gradients {norm:.3f}")

# The same weights in a padded batch.
padded = torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True)
for module in layers:
    side_by_side = layer(module.layer_number, "bshd")
    side_by_side.load_state_dict(module.state_dict())
    padded = side_by_side(padded, cu_seqlens_q=cu_seqlens, rotary_pos_emb=rope)
difference = max((a[:n] - b).abs().max().item() for a, n, b in zip(padded, lengths, packed.split(lengths), strict=True))
print(f"padded: {list(padded.shape)}, differs by at most {difference:.1e}")
assert difference < 1e-4

# Step by step: prompts of different lengths, then new tokens of each, with keys and values in pages.
cache = InferenceParams(
    max_batch_size=3,
    max_sequence_length=128,
    num_heads_kv=GROUPS,
    head_dim_k=SIZE,
    dtype=torch.float32,
    is_paged=True,
    page_size=16,
    qkv_format="thd",
)
found = [[] for _ in lengths]
done = [0] * len(lengths)
with torch.inference_mode():
    for counts in ([3, 60, 30], [1, 8, 10], [1, 1, 1], [0, 1, 1]):
        cache.pre_step(OrderedDict(zip("abc", counts, strict=True)))
        tokens = [doc[at : at + n] for doc, at, n in zip(x.split(lengths), done, counts, strict=True)]
        out = torch.cat(tokens)
        for module in layers:
            out = module.eval()(out, inference_params=cache, rotary_pos_emb=rope)
        for n, part in enumerate(out.split(counts)):
            found[n].append(part)
            done[n] += counts[n]
difference = (torch.cat([torch.cat(parts) for parts in found]) - packed).abs().max()
print(f"step by step from the cache: differs by at most {difference:.1e}")
assert done == lengths
assert difference < 1e-4

# A batch with swapped axes has valid shapes in every layer. cu_seqlens reveal the mistake.
try:
    layer(1, "sbhd")(padded, cu_seqlens_q=cu_seqlens)
except ValueError as error:
    print(f"\n{error}")
