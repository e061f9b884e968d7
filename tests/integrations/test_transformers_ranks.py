"""Models of transformers on several processes: losses and gradients equal those of one process.

Starting processes costs more than what they compute, so one start does everything; each difference names its case.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import DataCollatorWithFlattening
from transformers_models import build

from undivided.integrations.transformers import parallelize, register, shard_batch

NAMES = ("llama", "qwen3", "gemma-3", "mixtral")
LENGTH = 22  # not a multiple of the ranks
TOLERANCE = 2e-5
"""Of a gradient's norm and of a loss, relative: fp32 sums of another order."""


def batches(data_ranks: int) -> dict[str, list[dict[str, Any]]]:
    """By kind, a batch for each data rank; their numbers of labels differ."""
    draw = torch.Generator().manual_seed(1)
    kinds: dict[str, list[dict[str, Any]]] = {"padded": [], "packed": []}
    for rank in range(data_ranks):
        ids = torch.randint(3, 50, (2, LENGTH), generator=draw)
        real = torch.ones_like(ids)
        real[0, -3:], real[1, : 5 + rank] = 0, 0
        labels = ids.masked_fill(real == 0, -100)
        kinds["padded"].append({"input_ids": ids, "attention_mask": real, "labels": labels})
        lengths = (9, 3, 10 - rank)
        texts = [{"input_ids": torch.randint(3, 50, (n,), generator=draw).tolist()} for n in lengths]
        collate = DataCollatorWithFlattening(return_flash_attn_kwargs=rank % 2 == 1)
        kinds["packed"].append(dict(collate(texts)))
    return kinds


def alone(model: nn.Module, given: list[dict[str, Any]]) -> Tensor:
    """The loss of one process: the sum over all batches, divided by the number of their labels."""
    count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in given)
    losses = [model(**batch, use_cache=False, num_items_in_batch=count).loss for batch in given]
    return torch.stack(losses).sum()


def on_mesh(model: nn.Module, given: list[dict[str, Any]], mesh: DeviceMesh) -> Tensor:
    """This rank's share of the loss."""
    has_data = "data" in (mesh.mesh_dim_names or ())
    own = given[mesh["data"].get_local_rank() if has_data else 0]
    loss: Tensor = model(**shard_batch(own, mesh)).loss
    return loss


def total(loss: Tensor, tensor_ranks: int) -> float:
    """The loss of all ranks, from the share of each; the tensor ranks compute the same one."""
    summed = loss.detach().clone()
    distributed.all_reduce(summed)
    return float(summed) / tensor_ranks


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(shape: dict[str, int], names: tuple[str, ...], checkpointed: bool = False) -> list[str]:
    """In each rank: what differs from one process, in a training step and an evaluation after it."""
    register()
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    sharded = [axis for axis in ("data", "context") if axis in shape]
    shards = mesh[tuple(sharded)]._flatten("shards") if len(sharded) > 1 else mesh[sharded[0]]
    tensor_ranks, wrong = shape.get("tensor", 1), []
    for name in names:
        for kind, given in batches(shape.get("data", 1)).items():
            one, model = build(name, "undivided").train(), build(name, "undivided").train()
            if checkpointed:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            parallelize(model, mesh)
            for layer in (*model.model.layers, model):
                fully_shard(layer, mesh=shards)
            steps = [torch.optim.SGD(m.parameters(), 0.05, foreach=False) for m in (one, model)]
            expected, found = alone(one, given), on_mesh(model, given, mesh)
            expected.backward()
            (found * shards.size()).backward()  # FSDP averages over its ranks
            what = f"{name} {kind} {shape}"
            wrong += _loss_difference(what, float(expected.detach()), total(found, tensor_ranks))
            gradients = {label: p.grad for label, p in one.named_parameters()}
            for label, parameter in model.named_parameters():
                exact, grad = gradients[label], whole(parameter.grad)
                error = float((grad - exact).norm() / exact.norm().clamp(min=1e-6))
                wrong += [f"{what} gradient of {label}: {error:.1e}"] if not error < TOLERANCE else []
            for optimizer in steps:
                optimizer.step()
            with torch.no_grad():
                one.eval(), model.eval()
                results = float(alone(one, given)), total(on_mesh(model, given, mesh), tensor_ranks)
            wrong += _loss_difference(f"{what} after a step", *results)
    return wrong


def _loss_difference(what: str, expected: float, found: float) -> list[str]:
    return [] if abs(found - expected) < TOLERANCE * expected else [f"{what} loss: {found} instead of {expected}"]


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_one_process() -> None:
    shapes = ({"context": 4}, {"data": 2, "context": 2}, {"context": 2, "tensor": 2})
    jobs = [functools.partial(compare, shape, NAMES, "data" in shape) for shape in shapes]
    for answers in run_ranks(4, *jobs):
        assert answers == [[]] * 4, "\n".join(map(str, answers))
