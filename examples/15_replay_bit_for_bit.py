"""A generation replayed as training input: the log-probabilities have the same bits.

Policy gradients compare the probabilities of a rollout (one token at a time, prompts padded to one batch) with those of
the training step (whole sequences). Their attention adds in another order, so they differ although the weights are the
same. With ``batch_invariant=True`` they do not. A matrix product of PyTorch depends on its number of rows too, so this
example computes the linear layers one token at a time. The model is a small Llama with random weights.
Requires `pip install ".[transformers]"` in a checkout.
"""

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import undivided
from undivided.integrations.transformers import register

register()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    attn_implementation="undivided",
    eos_token_id=None,
    pad_token_id=0,
)
model = LlamaForCausalLM(config).eval()
lengths = [40, 17, 31]
prompts = torch.randint(1, 256, (3, 40))
real = torch.arange(40) >= 40 - torch.tensor(lengths)[:, None]
prompts = prompts.masked_fill(~real, 0)  # padded on the left


class LinearByToken(torch.nn.Linear):
    """A linear layer whose result for a token does not depend on the number of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, 1, x.shape[-1]).unbind()
        return torch.cat([functional.linear(t, self.weight, self.bias) for t in tokens]).view(*x.shape[:-1], -1)


def rollout() -> tuple[Tensor, Tensor]:
    """24 sampled tokens per prompt, and their log-probabilities."""
    torch.manual_seed(1)
    out = model.generate(
        prompts,
        attention_mask=real.long(),
        max_new_tokens=24,
        do_sample=True,
        top_k=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new = out.sequences[:, 40:]
    return new, torch.stack(out.logits, 1).log_softmax(-1).gather(2, new[..., None])[..., 0]


def training(new: Tensor) -> Tensor:
    """The log-probabilities of these tokens from one forward per sequence, without padding, with gradients."""
    rows = []
    for prompt, length, tokens in zip(prompts, lengths, new, strict=True):
        sequence = torch.cat([prompt[40 - length :], tokens])[None]
        logits = model(sequence).logits[0, length - 1 : -1]
        rows.append(logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
    return torch.stack(rows)


for module in model.modules():
    if isinstance(module, torch.nn.Linear):
        module.__class__ = LinearByToken
for invariant in (False, True):
    undivided.set_backends(batch_invariant=invariant)
    new, log_probabilities = rollout()
    replayed = training(new)
    equal = int((replayed == log_probabilities).sum())
    print(f"batch_invariant={invariant}: {equal} of {replayed.numel()} log-probabilities equal, ", end="")
    print(f"largest difference {float((replayed - log_probabilities).detach().abs().max()):.1e}")
assert equal == replayed.numel()
replayed.sum().backward()
norm = float(model.model.embed_tokens.weight.grad.norm())
print(f"gradients of the replay: norm {norm:.2f}")
