"""Train the byte model on a mesh of 2 x 2 x 2 processes: data, context and tensor parallelism, beside one process.

    torchrun --nproc-per-node 8 examples/18_train_on_a_mesh.py  # the losses beside those of one process
    python examples/18_train_on_a_mesh.py                       # one process alone

Each axis is PyTorch's own machinery around an unchanged model, that of examples/13:

- tensor: `undivided.parallel.parallelize` gives each rank its heads and feed-forward features;
- context: the layers get a `ContextParallel` of the axis, and tokens and labels are sharded;
- data and context together: FSDP2 (`fully_shard`) shards parameters and averages gradients.

Documents are packed, every other layer has a sliding window, attention weights are dropped, activations are recomputed
in the backward, a step accumulates the gradients of two batches, and their norm is clipped.
"""

import functools
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import undivided
from undivided import masks
from undivided.cli.demo.byte_model import END, ByteModel, Size
from undivided.cli.demo.byte_training import pack
from undivided.parallel import clip_grad_norm_, parallelize

SIZE = Size(features=64, layers=2, heads=4, kv_heads=2, hidden=128, window=32, longest=200, dropout=0.1)
STEPS, BATCHES, DATA_RANKS, TOKENS, NO_LABEL = 6, 2, 2, 256, -100
FILES = ("bisect", "colorsys", "copy", "heapq", "keyword", "operator", "stat", "textwrap")  # of Python's library
LIBRARY = Path(sysconfig.get_path("stdlib"))
DOCUMENTS = [torch.tensor([END, *(LIBRARY / f"{name}.py").read_bytes(), END]) for name in FILES]


def batch(number, data_rank):
    """The tokens, the labels and the offsets of the packed pieces of documents that a data rank reads."""
    draw = torch.Generator().manual_seed(1000 * number + data_rank)
    tokens, offsets = pack(DOCUMENTS, SIZE.longest, TOKENS, draw)
    labels = tokens.roll(-1)
    labels[offsets[1:].long() - 1] = NO_LABEL  # the last token of a piece
    return tokens, labels, offsets


def train(model, mesh=None):
    """The loss and the norm of the gradients of every step; without a mesh, those of one process."""
    data_ranks, share = range(DATA_RANKS), 1
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    if mesh is not None:
        parallelize(model, mesh["tensor"])
        context = undivided.ContextParallel(mesh["context"].get_group())
        shards = mesh["data", "context"]._flatten("shards")
        for module in (*model.layers, model):
            fully_shard(module, mesh=shards)
        data_ranks, share = [mesh["data"].get_local_rank()], shards.size()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    results = []
    for step in range(STEPS):
        total = torch.zeros(())
        numbers = range(BATCHES * step, BATCHES * (step + 1))
        every = {(number, rank): batch(number, rank) for number in numbers for rank in range(DATA_RANKS)}
        count = sum(int((labels != NO_LABEL).sum()) for _, labels, _ in every.values())
        for number in numbers:
            for data_rank in data_ranks:
                tokens, labels, offsets = every[number, data_rank]
                torch.manual_seed(1000 * number + data_rank)  # what dropout draws
                if mesh is not None:
                    own = context.bind(TOKENS, mask=masks.documents(offsets) & masks.causal())
                    for layer in model.layers:
                        layer.set_context_parallel_group(own)
                    tokens, labels = own.shard(tokens, dim=0), own.shard(labels, dim=0)
                summed = cross_entropy(model(tokens, offsets), labels, reduction="sum", ignore_index=NO_LABEL)
                loss = summed / count  # this rank's share of the mean
                (loss * share).backward()  # FSDP averages over its ranks
                total += loss.detach()
        norm = clip_grad_norm_(model, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        if mesh is not None:
            dist.all_reduce(total)
            total /= mesh["tensor"].size()  # the tensor ranks compute the same loss
        results.append((float(total), float(norm)))
    return results


def model():
    """The same parameters in every process."""
    torch.manual_seed(0)
    return ByteModel(SIZE)


if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (DATA_RANKS, 2, 2), mesh_dim_names=("data", "context", "tensor"))
    divided = train(model(), mesh)
    if dist.get_rank() == 0:
        print("step                8 processes  one process  difference")
        for step, ((ours, norm), (one, alone)) in enumerate(zip(divided, train(model()), strict=True)):
            print(f"{step:4}  loss           {ours:10.5f}   {one:10.5f}     {abs(ours - one):.0e}")
            print(f"{'':4}  gradients' norm {norm:9.5f}   {alone:10.5f}     {abs(norm - alone):.0e}")
    dist.destroy_process_group()
    time.sleep(1)  # a thread of gloo may still hold the last loss, and aborts a process that ends then
else:
    for step, (loss, norm) in enumerate(train(model())):
        print(f"{step:4}  loss {loss:.5f}, gradients' norm {norm:.5f}")
