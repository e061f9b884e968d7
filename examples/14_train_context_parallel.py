"""Train a small transformer whose sequence is divided among ranks; the losses equal those of one process.

    torchrun --nproc-per-node 4 examples/14_train_context_parallel.py
    python examples/14_train_context_parallel.py                        # one process: the same losses

Every rank has all parameters and a part of the tokens (zigzag, of packed documents). Two changes make it parallel: the
layers get the group, and tokens and labels are sharded. Gradients of parameters are summed over the ranks, as in data
parallelism.
"""

import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import undivided
from undivided import RotaryPositionEmbedding, TransformerLayer, masks

HIDDEN, HEADS, GROUPS, VOCABULARY, LAYERS, STEPS = 64, 4, 2, 97, 2, 8
LENGTHS = [130, 57, 3, 210, 99]  # packed documents; 499 tokens, not divisible by 4 ranks

if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    cp = undivided.ContextParallel(strategy="ring")
else:
    cp = undivided.ContextParallel(rank=0, world=1)
offsets = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
cp = cp.bind(sum(LENGTHS), mask=masks.documents(offsets) & masks.causal())

torch.manual_seed(0)  # the same parameters and data on every rank
tokens = torch.randint(VOCABULARY, (sum(LENGTHS),))
labels = tokens.roll(-1) * 3 % VOCABULARY
embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
layers = torch.nn.ModuleList(
    TransformerLayer(
        HIDDEN,
        2 * HIDDEN,
        HEADS,
        GROUPS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        self_attn_mask_type="padding_causal",
        attn_input_format="thd",
        layer_number=number + 1,
    )
    for number in range(LAYERS)
)
head = torch.nn.Linear(HIDDEN, VOCABULARY)
parameters = [*embedding.parameters(), *layers.parameters(), *head.parameters()]
if cp.world > 1:
    for layer in layers:
        layer.set_context_parallel_group(cp)
freqs = RotaryPositionEmbedding(HIDDEN // HEADS)(max(LENGTHS))
optimiser = torch.optim.AdamW(parameters, lr=3e-3)
my_tokens, my_labels = cp.shard(tokens, dim=0), cp.shard(labels, dim=0)

for step in range(STEPS):
    x = embedding(my_tokens)
    for layer in layers:
        x = layer(x, cu_seqlens_q=offsets, rotary_pos_emb=freqs)
    loss = cross_entropy(head(x), my_labels, reduction="sum") / tokens.numel()  # this rank's share of the mean
    optimiser.zero_grad()
    loss.backward()
    total = loss.detach().clone()
    if cp.world > 1:
        for tensor in [total, *(p.grad for p in parameters)]:
            dist.all_reduce(tensor)
    optimiser.step()
    if cp.rank == 0:
        print(f"step {step}: loss {total:.5f}, {my_tokens.numel()} of {tokens.numel()} tokens here")

if "WORLD_SIZE" in os.environ:
    dist.destroy_process_group()
