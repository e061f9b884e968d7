"""Ray Train starts the processes of a context parallel training, here two on one machine; the losses equal one process.

    pip install "ray[train]"
    python examples/cluster/ray_train.py

Ray calls `train` in each worker, after it has initialised torch.distributed. What is inside is as under torchrun.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig, report
from ray.train.torch import TorchTrainer
from torch.nn.functional import mse_loss

import undivided

HIDDEN, TOKENS, STEPS, WORKERS = 32, 48, 4, 2


def train(config):
    torch.manual_seed(0)
    layer = undivided.TransformerLayer(
        HIDDEN, 64, 4, 2, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd"
    )
    context = undivided.ContextParallel(dist.group.WORLD) if dist.is_initialized() else None
    own = (context or undivided.ContextParallel(rank=0, world=1)).bind(TOKENS, mask=undivided.masks.causal())
    if context is not None:
        layer.set_context_parallel_group(own)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x, target = torch.randn(2, 1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(STEPS):
        loss = mse_loss(layer(own.shard(x, dim=1)), own.shard(target, dim=1), reduction="sum") / x.numel()
        loss.backward()
        total = loss.detach().clone()
        if context is not None:
            for gradient in [total, *(parameter.grad for parameter in layer.parameters())]:
                dist.all_reduce(gradient)  # each rank has the share of its tokens
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    if context is not None:
        with tempfile.TemporaryDirectory() as folder:  # Ray keeps the metrics of reports that have a checkpoint
            torch.save(layer.state_dict(), os.path.join(folder, "layer.pt"))
            checkpoint = Checkpoint.from_directory(folder) if dist.get_rank() == 0 else None
            report({"losses": losses, "workers": dist.get_world_size()}, checkpoint=checkpoint)
    return losses


if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=False, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="undivided"),
    )
    found = trainer.fit().metrics
    for step, (loss, expected) in enumerate(zip(found["losses"], train({}), strict=True)):
        print(f"step {step}: {loss:.6f} on {found['workers']} workers, {expected:.6f} in one process")
