"""Attention over parts of the keys, merged: the basis of split caches and of context parallelism.

Each part returns its output and log-sum-exp, and the merged result equals attention over all keys.
"""

from itertools import pairwise

import torch

import undivided
from undivided import masks

torch.manual_seed(0)
q = torch.randn(2, 3, 8, 64)  # 3 new tokens in each of 2 sequences
k, v = torch.randn(2, 1000, 2, 64), torch.randn(2, 1000, 2, 64)  # and 1000 cached tokens
sinks = torch.randn(8)

# Each part returns its output and the log-sum-exp of its scores. Sinks are applied once, at the end.
bounds = [0, 400, 900, 1000]
parts = []
for start, stop in pairwise(bounds):
    # global causal positions, clipped to the keys of this part
    mask = masks.dense(masks.causal(align="bottom_right").to_dense(1, 1, 3, 1000)[..., start:stop])
    parts.append(undivided.attention(q, k[:, start:stop], v[:, start:stop], layout="bshd", mask=mask, return_lse=True))
outs, lses = zip(*parts, strict=True)
out, lse = undivided.merge(outs, lses, sinks=sinks)

whole = undivided.attention(q, k, v, layout="bshd", mask=masks.causal(align="bottom_right"), sinks=sinks)
print(f"merged from {len(parts)} parts: relative error {(out - whole).norm() / whole.norm():.1e}")
assert torch.allclose(out, whole, atol=1e-5)
