"""Train on a mesh of 2 x 2 x 2 processes: data, context and tensor parallelism at once; the losses equal one process.

    torchrun --nproc-per-node 8 examples/18_train_on_a_mesh.py  # the losses beside those of one process
    python examples/18_train_on_a_mesh.py                       # one process alone

Each axis is PyTorch's own machinery around unchanged layers:

- tensor: `undivided.parallel.parallelize` gives each rank its heads and feed-forward features;
- context: the layers get a `ContextParallel` of the axis, and tokens and labels are sharded;
- data and context together: FSDP2 (`fully_shard`) shards parameters and averages gradients.

Documents are packed, every other layer has a sliding window, attention weights are dropped, activations are recomputed
in the backward, and a step accumulates the gradients of two batches.
"""

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import undivided
from undivided import RotaryPositionEmbedding, TransformerLayer, masks
from undivided.parallel import parallelize

HIDDEN, HEADS, GROUPS, VOCABULARY, LAYERS, STEPS, BATCHES = 64, 4, 2, 97, 2, 6, 2
LENGTHS = ([130, 57, 3, 66], [31, 200, 25])  # packed documents of the two data ranks, equally many tokens
TOKENS = sum(LENGTHS[0])


class Model(torch.nn.Module):
    """The logits of the next token."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList(
            TransformerLayer(
                HIDDEN,
                2 * HIDDEN,
                HEADS,
                GROUPS,
                hidden_dropout=0.0,
                attention_dropout=0.1,
                normalization="RMSNorm",
                self_attn_mask_type="padding_causal",
                attn_input_format="thd",
                window_size=(31, 0) if number % 2 else None,
                layer_number=number + 1,
            )
            for number in range(LAYERS)
        )
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)
        self.rotary = RotaryPositionEmbedding(HIDDEN // HEADS)

    def forward(self, tokens, offsets):
        x, freqs = self.embedding(tokens), self.rotary(TOKENS)
        for layer in self.layers:
            x = checkpoint(layer, x, cu_seqlens_q=offsets, rotary_pos_emb=freqs, use_reentrant=False)
        return self.head(x)


def batch(number, data_rank):
    """The tokens, the labels and the offsets of the documents that a data rank reads."""
    draw = torch.Generator().manual_seed(1000 * number + data_rank)
    tokens = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
    offsets = torch.tensor([0, *LENGTHS[data_rank]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return tokens, tokens * 3 % VOCABULARY, offsets


def train(model, mesh=None):
    """The losses of the steps; without a mesh, those of one process."""
    data_ranks, share = [0, 1], 1
    if mesh is not None:
        parallelize(model, mesh["tensor"])
        context = undivided.ContextParallel(mesh["context"].get_group())
        for layer in model.layers:
            layer.set_context_parallel_group(context)
        shards = mesh["data", "context"]._flatten("shards")
        for layer in (*model.layers, model):
            fully_shard(layer, mesh=shards)
        data_ranks, share = [mesh["data"].get_local_rank()], shards.size()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        total = torch.zeros(())
        for number in range(BATCHES):
            for data_rank in data_ranks:
                tokens, labels, offsets = batch(BATCHES * step + number, data_rank)
                torch.manual_seed(1000 * (BATCHES * step + number) + data_rank)  # what dropout draws
                if mesh is not None:
                    own = context.bind(TOKENS, mask=masks.documents(offsets) & masks.causal())
                    for layer in model.layers:
                        layer.set_context_parallel_group(own)
                    tokens, labels = own.shard(tokens, dim=0), own.shard(labels, dim=0)
                summed = cross_entropy(model(tokens, offsets), labels, reduction="sum")
                loss = summed / (BATCHES * len(LENGTHS) * TOKENS)  # this rank's share of the mean
                (loss * share).backward()  # FSDP averages over its ranks
                total += loss.detach()
        optimiser.step()
        optimiser.zero_grad()
        if mesh is not None:
            dist.all_reduce(total)
            total /= mesh["tensor"].size()  # the tensor ranks compute the same loss
        losses.append(float(total))
    return losses


def model():
    """The same parameters in every process."""
    torch.manual_seed(0)
    return Model()


if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "context", "tensor"))
    divided = train(model(), mesh)
    if dist.get_rank() == 0:
        for step, (ours, one) in enumerate(zip(divided, train(model()), strict=True)):
            print(f"step {step}: loss {ours:.5f}, in one process {one:.5f}, difference {abs(ours - one):.0e}")
    dist.destroy_process_group()
    time.sleep(1)  # a thread of gloo may still hold the last loss, and aborts a process that ends then
else:
    for step, loss in enumerate(train(model())):
        print(f"step {step}: loss {loss:.5f}")
