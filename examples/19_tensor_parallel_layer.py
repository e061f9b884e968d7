"""One transformer layer over 2 and 4 tensor ranks beside one process: output, gradients and losses, with dropout.

    python examples/19_tensor_parallel_layer.py         # starts four processes that communicate over gloo

Two ways divide the layer. `parallelize` replaces the parameters of a layer by DTensors, for FSDP2 and distributed
checkpoints. `tp_group=` and `set_parallel_mode=True` are TransformerEngine's: every rank constructs the layer with the
sizes of the whole and holds local parameters. With sequence parallelism a rank's hidden states are its part of the
sequence. Ranks start from generators of different states, and still drop what one process drops.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing import spawn

from undivided import TransformerLayer
from undivided.parallel import own_state_dict, parallelize

SIZES = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 8, "num_gqa_groups": 4}
OPTIONS = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "normalization": "RMSNorm", "attn_input_format": "bshd"}
BATCH, LENGTH, STEPS = 2, 48, 3


def train(layer, own):
    """Output, gradient of the input and loss of every step. `own` takes the rank's part of a tensor."""
    optimiser = torch.optim.SGD(layer.parameters(), lr=2.0)
    results = []
    draw = torch.Generator().manual_seed(1)
    inputs, target = (torch.randn(BATCH, LENGTH, SIZES["hidden_size"], generator=draw) for _ in range(2))
    for step in range(STEPS):
        x = own(inputs).clone().requires_grad_()
        torch.manual_seed(step + 100 * own.rank)
        out = layer(x)
        loss = (out - own(target)).square().sum() / target.numel()
        loss.backward()
        results.append((out.detach(), x.grad, loss.detach()))
        optimiser.step()
        optimiser.zero_grad()
    return results


class Part:
    """The part of a sequence that a rank has."""

    def __init__(self, rank=0, ranks=1, divided=False):
        self.rank, self.ranks, self.divided = rank, ranks, divided

    def __call__(self, tensor):
        return tensor.chunk(self.ranks, 1)[self.rank] if self.divided else tensor


def compare(group, way, sequence_parallel, whole, expected):
    """The row of a table: the largest differences from one process, relative to the largest entry, and the losses."""
    own = Part(group.rank(), group.size(), sequence_parallel)
    if way == "parallelize":
        layer = TransformerLayer(**SIZES, **OPTIONS)
        layer.load_state_dict(whole)
        parallelize(layer, DeviceMesh.from_group(group, "cpu"), sequence_parallel)
    else:
        parallel = {"tp_group": group, "set_parallel_mode": True, "sequence_parallel": sequence_parallel}
        layer = TransformerLayer(**SIZES, **OPTIONS, **parallel)
        layer.load_state_dict(own_state_dict(layer, whole))
    found = train(layer, own)
    differences = []
    for index in (0, 1):  # outputs and gradients of the last step, which depend on updated parameters
        ours, theirs = found[-1][index], expected[-1][index]
        gap = (ours - own(theirs)).abs().max() / theirs.abs().max()
        dist.all_reduce(gap, dist.ReduceOp.MAX, group=group)
        differences.append(float(gap))
    losses = torch.stack([loss for *_, loss in found])
    if sequence_parallel:
        dist.all_reduce(losses, group=group)
    row = f"{way:12} {group.size():5} {'yes' if sequence_parallel else 'no':>9}"
    return f"{row} {differences[0]:10.1e} {differences[1]:10.1e}   " + " ".join(f"{loss:.5f}" for loss in losses)


def run(rank, store):
    """What each process does."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    pair, everyone = dist.new_group([0, 1]), dist.group.WORLD
    torch.manual_seed(0)
    layer = TransformerLayer(**SIZES, **OPTIONS)
    whole = {name: value.clone() for name, value in layer.state_dict().items()}
    expected = train(layer, Part())
    if rank == 0:
        print(f"{'way':12} ranks  sequence     output   gradient   losses of {STEPS} steps")
        print(f"{'alone':12} {1:5} {'':31}   " + " ".join(f"{loss:.5f}" for *_, loss in expected))
    for group in (pair, everyone):
        if rank >= dist.get_world_size(group):  # -1 on a rank that is not in the group
            continue
        for way in ("parallelize", "tp_group"):
            for sequence_parallel in (False, True):
                row = compare(group, way, sequence_parallel, whole, expected)
                if rank == 0:
                    print(row)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(run, (f"{folder}/store",), nprocs=4)
