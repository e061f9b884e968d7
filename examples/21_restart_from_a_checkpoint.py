"""Train through the death of a process: torchrun restarts the ranks, which go on from the last checkpoint.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1     # or ranks may meet at the addresses of the attempt before
    torchrun --nproc-per-node 2 --max-restarts 1 examples/21_restart_from_a_checkpoint.py --folder run --kill-at 5
    python examples/21_restart_from_a_checkpoint.py              # one process, nothing is killed: the same losses

At step 5 of the first attempt the last rank kills itself. Its peers get an error, torchrun ends them and starts all
ranks again. They load the newest complete checkpoint and repeat the steps after it, with the same losses.

- A checkpoint (`torch.distributed.checkpoint`) has parameters, optimiser state and the step; each rank writes a share.
- It is complete when rank 0 has renamed its folder, so that a death while it is written does no harm.
- The batch is a function of the step, so that a repeated step reads the same tokens.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import undivided
from undivided import TransformerLayer, masks
from undivided.parallel import rank_errors

HIDDEN, HEADS, VOCABULARY, TOKENS, STEPS, EVERY = 32, 4, 61, 120, 8, 2


class Model(torch.nn.Module):
    """The logits of the next token."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.layer = TransformerLayer(
            HIDDEN,
            2 * HIDDEN,
            HEADS,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            self_attn_mask_type="causal",
            attn_input_format="bshd",
        )
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens)))


def newest(folder):
    """The newest complete checkpoint, or None."""
    found = sorted(folder.glob("step-*[0-9]")) if folder else []
    return found[-1] if found else None


def save(folder, step, model, optimiser):
    """Write a checkpoint; all ranks call it."""
    names, states = get_state_dict(model, optimiser)
    unfinished = folder / f"step-{step:04}.unfinished"
    dcp.save({"model": names, "optimiser": states, "step": step}, checkpoint_id=unfinished)  # returns on all ranks
    if rank == 0:
        unfinished.rename(folder / f"step-{step:04}")


def load(path, model, optimiser):
    """Read a checkpoint; the number of finished steps."""
    names, states = get_state_dict(model, optimiser)
    state = {"model": names, "optimiser": states, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"])
    return state["step"]


parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, help="of the checkpoints; none are written without it")
parser.add_argument("--kill-at", type=int, help="the step of the first attempt at which the last rank kills itself")
arguments = parser.parse_args()
is_parallel = "WORLD_SIZE" in os.environ
if is_parallel and arguments.folder is None:
    parser.error("--folder is required under torchrun: all ranks and attempts use the same one")
folder = arguments.folder
if folder:
    folder.mkdir(parents=True, exist_ok=True)

torch.manual_seed(0)  # the same parameters on every rank
model = Model()
rank, world = 0, 1
context = undivided.ContextParallel(rank=0, world=1)
if is_parallel:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("context",))
    context = undivided.ContextParallel(mesh.get_group())
    model.layer.set_context_parallel_group(context)
    fully_shard(model, mesh=mesh)
context = context.bind(TOKENS, mask=masks.causal())
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)

first = 0
if (path := newest(folder)) is not None:
    first = load(path, model, optimiser)
    if rank == 0:
        print(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)} goes on after {first} steps", flush=True)

for step in range(first, STEPS):
    tokens = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(step))
    labels = tokens * 3 % VOCABULARY
    if step == arguments.kill_at and rank == world - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    own = context.shard(labels, dim=1)
    with rank_errors(f"step {step}"):  # of FSDP2 too: an error that names the rank
        logits = model(context.shard(tokens, dim=1))
        share = cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum") / TOKENS
        (share * world).backward()  # FSDP averages over its ranks
    optimiser.step()
    optimiser.zero_grad()
    total = share.detach().clone()
    if is_parallel:
        dist.all_reduce(total)
    if rank == 0:
        print(f"step {step}: loss {total:.5f}", flush=True)
    if (step + 1) % EVERY == 0 and folder:
        save(folder, step + 1, model, optimiser)

if is_parallel:
    dist.destroy_process_group()
    time.sleep(1)  # a thread of gloo may still hold tensors of the last checkpoint, and aborts a process that ends then
