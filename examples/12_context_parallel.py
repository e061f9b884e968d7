"""One sequence over four ranks: any mask, forward and backward, the bytes sent, and a plan for more ranks.

The ranks are threads of this process, so nothing has to be launched. With `torchrun` the only difference is
that `undivided.ContextParallel()` takes the process group (see examples/14_train_context_parallel.py).
"""

import torch

import undivided
from undivided import masks
from undivided.context_parallel import plan, simulate

torch.manual_seed(0)
LENGTH, RANKS = 1001, 4  # no length has to be divisible
q = torch.randn(1, LENGTH, 8, 32)
k, v = torch.randn(1, LENGTH, 2, 32), torch.randn(1, LENGTH, 2, 32)
mask = masks.window(63, 0) | masks.sinks(4)  # a window with four global tokens

whole = [t.clone().requires_grad_() for t in (q, k, v)]
alone = undivided.attention(*whole, layout="bshd", mask=mask)
alone.square().sum().backward()


def step(group, strategy, placement):
    """The output, dk and the bytes sent by one rank, which runs this on its own tokens."""
    cp = undivided.ContextParallel(group, strategy, placement).bind(LENGTH, mask=mask)
    mine = [cp.shard(t, layout="bshd").requires_grad_() for t in (q, k, v)]
    out = undivided.attention(*mine, layout="bshd", mask=mask, context_parallel=cp)
    sent = cp.traffic.bytes_sent
    out.square().sum().backward()
    return cp.unshard(out.detach(), layout="bshd"), cp.unshard(mine[1].grad, layout="bshd"), sent


print(f"{'strategy':14}{'placement':12}{'output':>9}{'dk':>9}   bytes sent forward, by rank")
for strategy in ("ring", "all_gather", "all_to_all"):
    for placement in ("zigzag", "contiguous", "balanced"):
        results = simulate(RANKS, lambda group, s=strategy, p=placement: step(group, s, p))
        out, dk, _ = results[0]
        far = (out - alone).abs().max(), (dk - whole[1].grad).abs().max()
        print(f"{strategy:14}{placement:12}{far[0]:9.1e}{far[1]:9.1e}   {[sent for *_, sent in results]}")
        assert max(far) < 1e-4

# Before renting 64 GPUs for a million tokens: exact bytes and pairs, from the mask's row ranges alone.
print()
print(plan(1 << 20, 32, 128, masks.window(4095, 0) | masks.sinks(4), world=64, kv_heads=8))
