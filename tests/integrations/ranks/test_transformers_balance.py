"""The balancing loss of experts over ranks is that of one process over all tokens, and so are its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers_models import build

import undivided
from undivided.context_parallel import simulate
from undivided.integrations.transformers import parallelize, register, shard_batch

LENGTH, ROWS, WEIGHT = 21, 4, 0.7
TOLERANCE = 2e-5
SHAPES = ({"context": 4}, {"context": 2, "tensor": 2}, {"data": 2, "context": 2}, {"data": 2, "tensor": 2}, {"data": 4})
"""Of meshes of four ranks."""


def make(name: str = "mixtral", **options: Any) -> nn.Module:
    """A model that computes the balancing loss, the same on every rank."""
    register()
    torch.manual_seed(0)
    return build(name, "undivided", output_router_logits=True, router_aux_loss_coef=WEIGHT, **options).train()


def batch_of(kind: str) -> dict[str, Tensor]:
    """Rows with different numbers of padding tokens, or packed texts in each row."""
    ids = torch.randint(3, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    if kind == "packed":
        starts = torch.tensor([0, 7, 9])
        positions = torch.arange(LENGTH) - starts[torch.searchsorted(starts, torch.arange(LENGTH), right=True) - 1]
        return {"input_ids": ids, "labels": ids, "position_ids": positions.expand(ROWS, -1)}
    real = torch.ones_like(ids)
    for row in range(1, ROWS):
        real[row, LENGTH - 5 * row :] = 0
    return {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, -100)}


def gradient_errors(model: nn.Module, found: dict[str, Tensor]) -> dict[str, float]:
    """The gradients that differ from those of one process, relative to their norms."""
    errors = {}
    for name, parameter in model.named_parameters():
        error = float((found[name] - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-6))
        if not error < TOLERANCE:
            errors[name] = error
    return errors


@pytest.mark.parametrize(
    ("name", "kind", "world"), [("mixtral", "padded", 3), ("mixtral", "packed", 2), ("qwen3-moe", "padded", 2)]
)
def test_the_balancing_loss_of_context_ranks_is_that_of_one_process(name: str, kind: str, world: int) -> None:
    batch, one = batch_of(kind), make(name)
    expected = one(**batch, use_cache=False)
    expected.loss.backward()
    plain = make(name)(**batch, use_cache=False, output_router_logits=False).loss
    assert float(expected.loss.detach() - plain.detach()) > 0.5 * WEIGHT  # it is no small part of the loss
    models = [make(name) for _ in range(world)]

    def step(group: Any) -> tuple[float, float]:
        context = undivided.ContextParallel(group)
        model = parallelize(models[context.rank], context)
        output = model(**shard_batch(batch, context))
        output.loss.backward()
        assert model.router_aux_loss_coef == WEIGHT
        return float(output.loss.detach()), float(output.aux_loss.detach())

    answers = simulate(world, step)
    assert sum(loss for loss, _ in answers) == pytest.approx(float(expected.loss.detach()), rel=TOLERANCE)
    for _, balance in answers:
        assert balance == pytest.approx(float(expected.aux_loss.detach()), rel=TOLERANCE)
    gradients = {
        label: sum(dict(model.named_parameters())[label].grad for model in models)
        for label, _ in one.named_parameters()
    }
    assert gradient_errors(one, gradients) == {}


def test_the_balancing_loss_without_labels_and_after_an_error() -> None:
    batch = {"input_ids": batch_of("packed")["input_ids"]}
    with torch.no_grad():
        expected = make()(**batch, use_cache=False).aux_loss

    def step(group: Any) -> tuple[float, str, float]:
        context = undivided.ContextParallel(group)
        model = parallelize(make(), context)
        part = shard_batch(batch, context)
        with pytest.raises(undivided.InputError) as error, torch.no_grad():
            model(**part, return_dict=False)
        with pytest.raises(AttributeError), torch.no_grad():
            model(**part, attention_mask=3)
        with torch.no_grad():
            output = model(**part)
        assert output.loss is None
        return float(output.aux_loss), str(error.value), model.router_aux_loss_coef

    for balance, message, weight in simulate(2, step):
        assert balance == pytest.approx(float(expected), rel=TOLERANCE)
        assert message.startswith("return_dict must be True with output_router_logits on several ranks, got False")
        assert weight == WEIGHT


def on_mesh(shape: dict[str, int]) -> dict[str, Any]:
    """In each rank: the difference of the loss from one process, and the gradients that differ."""
    batch, one, model = batch_of("padded"), make(), make()
    expected = one(**batch, use_cache=False)
    expected.loss.backward()
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    parallelize(model, mesh)
    axes = [axis for axis in ("data", "context") if axis in shape]
    shards = mesh[tuple(axes)]._flatten("shards") if len(axes) > 1 else mesh[axes[0]]
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=shards)
    if "data" in shape:
        rows = ROWS // shape["data"]
        first = rows * mesh["data"].get_local_rank()
        batch = {name: value[first : first + rows] for name, value in batch.items()}
    loss = model(**shard_batch(batch, mesh)).loss
    (loss * shards.size()).backward()  # FSDP averages over its ranks
    summed = loss.detach().clone()
    distributed.all_reduce(summed)
    gradients = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in model.named_parameters()
    }
    difference = float(summed) / shape.get("tensor", 1) / float(expected.loss.detach()) - 1
    return {"loss": difference, "gradients": gradient_errors(one, gradients)}


def on_all_meshes() -> list[dict[str, Any]]:
    return [on_mesh(shape) for shape in SHAPES]


@pytest.mark.slow
def test_the_balancing_loss_on_meshes_is_that_of_one_process() -> None:
    (answers,) = run_ranks(4, on_all_meshes)
    for answer in answers:
        assert isinstance(answer, list), answer
        for shape, found in zip(SHAPES, answer, strict=True):
            assert abs(found["loss"]) < TOLERANCE, (shape, found)
            assert found["gradients"] == {}, (shape, found)
