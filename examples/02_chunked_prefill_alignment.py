"""Chunked prefill: with more keys than queries, causal has two meanings, and only bottom-right is correct here.

The wrong corner is drawn beside the right one, and both are compared with one pass over the whole prompt.
"""

import torch

import undivided
from undivided import masks

torch.manual_seed(0)
prompt, chunk = 10, 4
q, k, v = (torch.randn(1, prompt, 4, 32) for _ in range(3))
whole = undivided.attention(q, k, v, layout="bshd", mask=masks.causal())

# The prompt in chunks: each chunk's queries attend to all keys so far, including their own.
for start in range(0, prompt, chunk):
    stop = min(start + chunk, prompt)
    part = undivided.attention(
        q[:, start:stop], k[:, :stop], v[:, :stop], layout="bshd", mask=masks.causal(align="bottom_right")
    )
    assert torch.allclose(part, whole[:, start:stop], atol=1e-6)
print("bottom-right: every chunk equals its rows of the whole prompt")
print(masks.causal(align="bottom_right").draw(4, 8))

# Top-left is PyTorch's is_causal: the chunk's first query would attend to the first key only.
print("\ntop-left, for the same chunk: its queries do not attend to their own keys")
print(masks.causal(align="top_left").draw(4, 8))
wrong = torch.nn.functional.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in (q[:, 4:8], k[:, :8], v[:, :8])), is_causal=True
).transpose(1, 2)
print(
    f"with is_causal=True the second chunk has an error of {(wrong - whole[:, 4:8]).norm() / whole[:, 4:8].norm():.0%}"
)

# The alignment is required if the two differ.
try:
    undivided.attention(q[:, 4:8], k[:, :8], v[:, :8], layout="bshd", mask=masks.causal())
except undivided.InputError as error:
    print(f"\n{error}")
