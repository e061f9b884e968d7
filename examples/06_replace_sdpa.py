"""An unmodified model on Undivided: PyTorch's function is replaced within a block, and its calls are counted.

Outputs and gradients equal those without the block.
"""

import torch
import torch.nn.functional as F
from torch import nn

import undivided

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(d_model=128, nhead=8, dropout=0.0, batch_first=True)
model = nn.TransformerEncoder(layer, num_layers=4)
tokens = torch.randn(2, 100, 128)
lengths = torch.tensor([100, 60])
padding = torch.arange(100) >= lengths[:, None]  # True = padding, as in PyTorch's modules
causal = nn.Transformer.generate_square_subsequent_mask(100).isinf()


def train_step() -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    out = model(tokens, mask=causal, src_key_padding_mask=padding)
    out[~padding].square().mean().backward()
    weight = model.layers[0].self_attn.in_proj_weight
    return out.detach(), weight.grad.clone()


out, gradient = train_step()
with undivided.replace_sdpa() as replaced:
    ours, our_gradient = train_step()

print(f"{replaced.calls} attention calls ran on Undivided, one per layer")
print(f"outputs differ by at most {(ours - out)[~padding].abs().max():.1e}")
print(f"gradients differ by at most {(our_gradient - gradient).abs().max():.1e}")
assert replaced.calls == 4
assert torch.allclose(ours[~padding], out[~padding], atol=1e-5)
assert torch.allclose(our_gradient, gradient, atol=1e-5)

# By default nn.MultiheadAttention computes its weights itself and does not call the function.
attention = nn.MultiheadAttention(128, 8, batch_first=True)
with undivided.replace_sdpa() as replaced:
    attention(tokens, tokens, tokens)
    print(f"need_weights=True: {replaced.calls} calls")
    attention(tokens, tokens, tokens, need_weights=False)
    print(f"need_weights=False: {replaced.calls} call")

# PyTorch's own switches apply. If no backend is left, the error lists every reason.
q, bias = torch.randn(2, 8, 100, 16), torch.zeros(100, 100, requires_grad=True)
with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION), undivided.replace_sdpa():
    try:
        F.scaled_dot_product_attention(q, q, q, attn_mask=bias, dropout_p=0.1)
    except undivided.NoBackendError as error:
        print("flash only, with a learned bias and dropout:")
        print(*(f"  {reason}" for reason in error.decision.reasons["torch_flash"]), sep="\n")
