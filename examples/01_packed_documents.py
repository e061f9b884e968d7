"""Packed documents: the same result as one document at a time, without padding and without leaks.

As one long sequence in a dense layout nothing is raised, and every document but the first is wrong; layout thd refuses
the call without documents.
"""

import torch

import undivided
from undivided import masks

lengths = [5, 300, 42]
offsets = torch.tensor([0, *lengths]).cumsum(0)  # [0, 5, 305, 347]: the start of each document, and the end

torch.manual_seed(0)
q = torch.randn(sum(lengths), 8, 64, requires_grad=True)  # [tokens, heads, head size]
k = torch.randn(sum(lengths), 2, 64, requires_grad=True)  # 2 key/value heads serve 8 query heads
v = torch.randn(sum(lengths), 2, 64, requires_grad=True)

packed = undivided.attention(q, k, v, layout="thd", mask=masks.documents(offsets) & masks.causal())
packed.square().sum().backward()

# One document at a time, each as a batch of one: slow, but it needs no document mask.
alone = torch.cat(
    [
        undivided.attention(a[None], b[None], c[None], layout="bshd", mask=masks.causal())[0]
        for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    ]
)
print(f"packed and alone differ by at most {(packed - alone).abs().max():.1e}")
assert torch.allclose(packed, alone, atol=1e-6)

# Padded: the mask has the real lengths, and the padding may hold anything.
real = torch.tensor(lengths)
padded = [torch.nn.utils.rnn.pad_sequence(x.detach().split(lengths), True, float("nan")) for x in (q, k, v)]
batch = undivided.attention(*padded, layout="bshd", mask=masks.lengths(real, real) & masks.causal())
rows = torch.cat([row[:length] for row, length in zip(batch, lengths, strict=True)])
print(f"packed and padded differ by at most {(packed - rows).abs().max():.1e}, with NaN in the padding")
assert torch.allclose(packed, rows, atol=1e-6)

# As one long sequence in layout bshd nothing is raised, and every document but the first is wrong.
leaked = undivided.attention(q[None], k[None], v[None], layout="bshd", mask=masks.causal())[0]
print(f"as one long sequence the output has an error of {(leaked - packed).norm() / packed.norm():.0%}")
