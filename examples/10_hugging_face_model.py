"""A Hugging Face model on Undivided: one name changes; logits, gradients and generated tokens stay the same.

The model is a small Gemma 2 with random weights: softcap, grouped heads, a sliding window in every second layer. For
trained weights call ``from_pretrained(..., attn_implementation="undivided")``. Requires `pip install ".[transformers]"`
in a checkout.
"""

import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from undivided.integrations.transformers import model_mask, register

register()  # once; afterwards every model accepts the name
torch.manual_seed(0)
config = Gemma2Config(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    sliding_window=32,
    attn_implementation="undivided",
    eos_token_id=None,
)
model = Gemma2ForCausalLM(config).eval()
prompts = torch.randint(3, 512, (2, 50))
real = torch.ones_like(prompts)
real[1, :20] = 0  # the second prompt is shorter, and padded on the left


def step() -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    out = model(prompts, attention_mask=real, labels=prompts.masked_fill(real.cumsum(1) <= 1, -100))
    out.loss.backward()
    weight = model.model.layers[0].self_attn.q_proj.weight
    return out.logits[real.bool()].detach(), weight.grad.clone()


def answer() -> torch.Tensor:
    return model.generate(prompts, attention_mask=real, max_new_tokens=20, do_sample=False)[:, 50:]


ours, our_tokens = step(), answer()
model.set_attn_implementation("eager")  # the same weights, with transformers' own attention
eager, eager_tokens = step(), answer()
model.set_attn_implementation("undivided")
print(f"logits differ by at most {(ours[0] - eager[0]).abs().max():.1e}, the largest is {eager[0].abs().max():.1f}")
print(f"gradients differ by at most {(ours[1] - eager[1]).abs().max():.1e}, the largest is {eager[1].abs().max():.1e}")
print(f"the 20 generated tokens of each prompt are the same: {torch.equal(our_tokens, eager_tokens)}")
assert torch.allclose(ours[0], eager[0], atol=1e-4)
assert torch.allclose(ours[1], eager[1], atol=1e-5)
assert torch.equal(our_tokens, eager_tokens)

# A mask passes through the model as structure, in memory proportional to the text, never as a length x length tensor.
mask = model_mask(2, 50, 50, attention_mask=real.bool())
print(f"\nthe padding mask of the layers: {mask}")

# Two documents in one row: positions restart, and the documents do not attend to each other.
text = prompts[:1]
positions = torch.cat((torch.arange(30), torch.arange(20)))[None]
with torch.no_grad():
    packed = model(text, position_ids=positions, use_cache=False).logits
    alone = [model(text[:, :30], use_cache=False).logits, model(text[:, 30:], use_cache=False).logits]
print(f"packed and alone differ by at most {(packed - torch.cat(alone, 1)).abs().max():.1e}")
assert torch.allclose(packed, torch.cat(alone, 1), atol=1e-4)

# Attention weights are computed only on request, by the reference.
with torch.no_grad():
    weights = model(text, output_attentions=True).attentions
print(f"attention weights of {len(weights)} layers, {list(weights[0].shape)}; each row sums to 1")
assert torch.allclose(weights[0].sum(-1), torch.ones(1, 8, 50), atol=1e-5)
