"""Train on 8 ranks, go on with 4, and finish in one process, from checkpoints; the losses are those of one process.

    python examples/23_checkpoint_on_another_mesh.py     # starts torchrun for each mesh, and prints one table

| steps | ranks | data x context x tensor |
|---|---|---|
| 0 to 3 | 8 | 2 x 2 x 2 |
| 4 to 7 | 4 | 1 x 1 x 4 |
| 8 to 11 | 1 | |

`undivided.parallel.save_checkpoint` writes the parameters and Adam's moments by `torch.distributed.checkpoint`: each
rank what it has, under the names of one process. `load_checkpoint` reads what a rank of another mesh holds.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import undivided
from undivided import RotaryPositionEmbedding, TransformerLayer, masks
from undivided.parallel import load_checkpoint, parallelize, save_checkpoint

HIDDEN, HEADS, GROUPS, VOCABULARY, TOKENS, SEQUENCES, STEPS = 64, 4, 2, 97, 128, 4, 4
MESHES = [(2, 2, 2), (1, 1, 4), (1, 1, 1)]  # four steps on each


class Model(torch.nn.Module):
    """The logits of the next token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)  # the same parameters on every rank
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = torch.nn.ModuleList(
            TransformerLayer(
                HIDDEN,
                2 * HIDDEN,
                HEADS,
                GROUPS,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                activation="swiglu",
                normalization="RMSNorm",
                attn_input_format="bshd",
            )
            for _ in range(2)
        )
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)
        self.rotary = RotaryPositionEmbedding(HIDDEN // HEADS)

    def forward(self, tokens):
        x, freqs = self.embedding(tokens), self.rotary(TOKENS)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=freqs)
        return self.head(x)


def spread(model, shape):
    """The model on a mesh, its context ranks, the data rank, and the ranks that FSDP2 averages over."""
    context = undivided.ContextParallel(rank=0, world=1)
    if shape == (1, 1, 1):
        return model, context.bind(TOKENS, mask=masks.causal()), 0, 1
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "context", "tensor"))
    parallelize(model, mesh["tensor"])
    context = undivided.ContextParallel(mesh.get_group("context")).bind(TOKENS, mask=masks.causal())
    shards = mesh["data", "context"]._flatten("shards")
    for layer in model.layers:
        layer.set_context_parallel_group(context)
    for module in (*model.layers, model):
        fully_shard(module, mesh=shards)
    return model, context, mesh["data"].get_local_rank(), shards.size()


def train(shape, folder, last):
    """The losses of the steps after the newest checkpoint, up to the step `last`; rank 0 prints them."""
    model, context, data_rank, share = spread(Model(), shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = load_checkpoint(folder, model, optimizer) if folder else None
    losses = []
    for step in range(found.step if found else 0, last):
        tokens = torch.randint(VOCABULARY, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(step))
        tokens = tokens.chunk(shape[0])[data_rank]
        own, labels = context.shard(tokens, dim=1), context.shard(tokens * 3 % VOCABULARY, dim=1)
        loss = cross_entropy(model(own).flatten(0, 1), labels.flatten(), reduction="sum") / (SEQUENCES * TOKENS)
        (loss * share).backward()  # FSDP averages over its ranks
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= shape[2]  # the tensor ranks compute the same loss
        losses.append(float(total))
    if folder:
        save_checkpoint(folder, last, model, optimizer, keep=2)
    return losses


def start(number, folder):
    """The losses of the processes of one mesh."""
    ranks = str(torch.Size(MESHES[number]).numel())
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    command = [*torchrun, __file__, "--mesh", str(number), "--folder", folder]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]


parser = argparse.ArgumentParser()
parser.add_argument("--mesh", type=int, help="the number of the mesh, in a process that torchrun has started")
parser.add_argument("--folder", help="of the checkpoints")
arguments = parser.parse_args()

if arguments.mesh is not None:
    dist.init_process_group("gloo")
    losses = train(MESHES[arguments.mesh], arguments.folder, STEPS * (arguments.mesh + 1))
    if dist.get_rank() == 0:
        for loss in losses:
            print(f"loss {loss:.6f}")
    dist.destroy_process_group()
    time.sleep(1)  # a thread of gloo may still hold the last loss, and aborts a process that ends then
else:
    alone = train((1, 1, 1), None, STEPS * len(MESHES))
    print("step  ranks  mesh       loss  one process")
    with tempfile.TemporaryDirectory() as folder:
        for number, shape in enumerate(MESHES):
            for step, loss in enumerate(start(number, folder), STEPS * number):
                mesh = " x ".join(map(str, shape))
                print(f"{step:4}  {torch.Size(shape).numel():5}  {mesh}  {loss:.5f}  {alone[step]:11.5f}", flush=True)
