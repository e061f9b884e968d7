"""FSDP2 around layers that are divided over tensor ranks, and their checkpoints on another mesh."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gloo_ranks import losses_of, run_ranks
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from undivided import TransformerLayer
from undivided.parallel import parallelize

HIDDEN, LENGTH, BATCH = 32, 8, 4


def make_layer() -> TransformerLayer:
    torch.manual_seed(0)
    return TransformerLayer(
        HIDDEN, 64, 4, num_gqa_groups=2, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd"
    )


def train_and_reload(folder: str) -> tuple[list[tuple[float, float]], float, float]:
    """Losses of one process and of the ranks; differences of parameters after training, and after loading."""
    whole, layer = make_layer(), make_layer()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize(layer, mesh["tensor"], sequence_parallel=True)
    fully_shard(layer, mesh=mesh["data"])
    optimizers = [torch.optim.SGD(module.parameters(), 0.1, momentum=0.9) for module in (whole, layer)]
    losses = []
    for _ in range(3):
        x = torch.randn(BATCH, LENGTH, HIDDEN)
        own = x.chunk(2, 0)[mesh["data"].get_local_rank()].chunk(2, 1)[mesh["tensor"].get_local_rank()]
        expected = whole(x).square().mean()
        # FSDP takes the mean over data ranks, and tensor parallelism the sum over parts of the sequence
        loss = layer(own).square().sum() / (BATCH // 2 * LENGTH * HIDDEN)
        for value, optimizer in zip((expected, loss), optimizers, strict=True):
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        total = loss.detach().clone()
        distributed.all_reduce(total)
        losses.append((expected.item(), total.item() / 2))
    trained = [p.full_tensor().detach() for p in layer.parameters()]
    updated = max(float((a - b).abs().max()) for a, b in zip(trained, whole.parameters(), strict=True))
    dcp.save(layer.state_dict(), checkpoint_id=folder)
    other = make_layer()
    parallelize(other, init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",)))
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state)
    loaded = [p.full_tensor().detach() for p in other.parameters()]
    return losses, updated, max(float((a - b).abs().max()) for a, b in zip(trained, loaded, strict=True))


def test_training_equals_one_process_and_a_checkpoint_loads_on_another_mesh(tmp_path: Path) -> None:
    (answers,) = run_ranks(4, functools.partial(train_and_reload, str(tmp_path / "checkpoint")))
    for answer in answers:
        assert isinstance(answer, tuple), answer
        losses, updated, loaded = answer
        for expected, found in losses:
            assert abs(found - expected) < 1e-6 * expected
        assert updated < 1e-6
        assert loaded == 0


@pytest.mark.slow
def test_losses_on_data_context_and_tensor_axes_are_those_of_one_process() -> None:
    """The example on 8 ranks: packed documents, windows, recomputed activations, accumulated gradients."""
    one, eight = (torch.tensor(losses_of("18_train_on_a_mesh.py", ranks)) for ranks in (1, 8))
    assert len(one) == 6
    torch.testing.assert_close(eight, one, rtol=0, atol=5e-5)
