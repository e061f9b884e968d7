"""Masks describe sets of pairs, combine with & and |, and print as drawings.

A million tokens take megabytes, because a mask is stored as ranges of keys per row.
"""

import torch

import undivided
from undivided import masks

print(masks.causal() & masks.window(3, 0))  # the last four tokens, including the query's own
print(masks.window(2, 0) | masks.sinks(1))  # a window, and always the first key
print(masks.causal() | masks.prefix(3))  # prefix-LM: the first three tokens attend to each other
print(masks.causal() & masks.documents([0, 3, 8]))  # packed documents of 3 and 5 tokens
print(masks.chunks(4) & masks.causal())  # chunked attention

# A mask is stored as ranges, not as a square: each row's keys are one range, or two.
form = (masks.window(1023, 0) | masks.sinks(4)).intervals(1_000_000, 1_000_000)
print(f"a million tokens: {tuple(form.shape)} numbers, {form.numel() * form.element_size() / 1e6:.0f} MB")

# Other masks are boolean tensors or functions.
checkerboard = masks.predicate(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx) % 2 == 0)
print((checkerboard & masks.causal()).draw(6, 6))

torch.manual_seed(0)
q, k, v = (torch.randn(1, 6, 2, 16) for _ in range(3))
dense = (checkerboard & masks.causal()).to_dense(1, 1, 6, 6)
by_function = undivided.attention(q, k, v, layout="bshd", mask=checkerboard & masks.causal())
by_tensor = undivided.attention(q, k, v, layout="bshd", mask=masks.dense(dense))
assert torch.allclose(by_function, by_tensor, atol=1e-6)
