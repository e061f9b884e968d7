"""Train an unmodified Hugging Face model whose sequences are spread over ranks; the losses equal those of one process.

    torchrun --nproc-per-node 4 examples/20_hugging_face_over_ranks.py
    python examples/20_hugging_face_over_ranks.py                        # one process: the same losses

A Gemma 3 with random weights: every other layer has a sliding window, and texts are packed without padding.
`parallelize` and `shard_batch` are the two changes; FSDP2 shards parameters over the same ranks. Rank 0 also trains the
model alone, for the table. Requires `pip install ".[transformers]"` in a checkout.
"""

import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import DataCollatorWithFlattening, Gemma3ForCausalLM, Gemma3TextConfig

from undivided.integrations.transformers import parallelize, register, shard_batch

VOCABULARY, STEPS = 97, 6
LENGTHS = [130, 57, 3, 66, 143]  # texts of a batch; 399 tokens, not divisible by 4 ranks

register()
torch.manual_seed(0)  # the same parameters and texts on every rank
config = Gemma3TextConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    sliding_window=32,
    layer_types=["sliding_attention", "full_attention"],
    attn_implementation="undivided",
)
collate = DataCollatorWithFlattening()
draw = torch.Generator().manual_seed(0)


def make_batch():
    """Texts that count on by 3 from a random token, packed into one row."""
    begins = torch.randint(VOCABULARY, (len(LENGTHS),), generator=draw).tolist()
    texts = [
        [(begin + 3 * n) % VOCABULARY for n in range(length)] for begin, length in zip(begins, LENGTHS, strict=True)
    ]
    return collate([{"input_ids": text} for text in texts])


def make_model():
    torch.manual_seed(0)
    return Gemma3ForCausalLM(config).train()


alone = make_model()
optimiser = torch.optim.AdamW(alone.parameters(), lr=3e-3)
is_parallel = "WORLD_SIZE" in os.environ
rank = 0
if is_parallel:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    model = parallelize(make_model(), mesh)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh["context"])
    shared_optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)

if rank == 0:
    print("step  one process" + (f"  {dist.get_world_size()} ranks  tokens here" if is_parallel else ""))
for step in range(STEPS):
    batch = make_batch()
    row = f"{step:4}"
    if rank == 0:
        loss = alone(**batch, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        row += f"  {loss:11.5f}"
    if is_parallel:
        part = shard_batch(batch, mesh)
        share = model(**part).loss  # this rank's labels, divided by the number of all labels
        shared_optimiser.zero_grad()
        (share * mesh.size()).backward()  # FSDP averages over its ranks
        shared_optimiser.step()
        total = share.detach().clone()
        dist.all_reduce(total)
        row += f"  {total:7.5f}  {part['input_ids'].numel():5} of {sum(LENGTHS)}"
    if rank == 0:
        print(row)

if is_parallel:
    dist.destroy_process_group()
    time.sleep(1)  # a thread of gloo may still hold the last loss, and aborts a process that ends then
