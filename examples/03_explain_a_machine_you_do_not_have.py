"""Selection is a pure function: it can be evaluated for another machine, with tensors that have no data.

The table names the backend that would run on it, and why each of the others would not.
"""

import torch

import undivided
from undivided import Machine, masks

q = torch.empty(48, 16534, 18, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)

old = Machine(device="cuda", name="A100", compute_capability=(8, 0), cudnn="8.9.7")
decision = undivided.explain(q, q, q, layout="bshd", mask=masks.causal(), machine=old)
print(decision)

# Require cuDNN: an explicit request never falls back, and the reasons name the limits.
required = undivided.explain(q, q, q, layout="bshd", mask=masks.causal(), machine=old, backend="cudnn")
assert required.chosen is None
print()
for reason in required.reasons["cudnn"]:
    print("cudnn:", reason)

# The same problem after an upgrade.
new = Machine.named("a100", cudnn="9.10.2", packages={"flash_attn": "2.8.4", "cudnn_frontend": "1.15.0"})
upgraded = undivided.explain(q, q, q, layout="bshd", mask=masks.causal(), machine=new, backend="cudnn")
print("\nafter the upgrade:", upgraded.chosen)
