"""FSDP2 around layers that are divided over tensor ranks, and their checkpoints on another mesh."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gloo_ranks import losses_of, run_ranks
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from undivided import ContextParallel, RotaryPositionEmbedding, TransformerLayer, masks
from undivided.parallel import own_state_dict, parallelize

HIDDEN, LENGTH, BATCH = 32, 8, 4
VOCABULARY, DOCUMENTS = 31, ([20, 7, 3, 18], [11, 25, 12])
TOKENS = sum(DOCUMENTS[0])
State = dict[str, torch.Tensor]


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


class Model(torch.nn.Module):
    """Logits of packed tokens, from a layer with full attention and one with a window."""

    def __init__(self, hidden_dropout: float = 0.0, **parallel: Any) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        options: dict[str, Any] = {"hidden_dropout": hidden_dropout, "attention_dropout": 0.2, "activation": "swiglu"}
        self.layers = torch.nn.ModuleList(
            TransformerLayer(
                HIDDEN,
                48,
                4,
                num_gqa_groups=2,
                self_attn_mask_type="padding_causal",
                attn_input_format="thd",
                window_size=window,
                **options,
                **parallel,
            )
            for window in (None, (9, 0))
        )
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY)
        self.rotary = RotaryPositionEmbedding(HIDDEN // 4)

    def forward(self, tokens: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        x, freqs = self.embedding(tokens), self.rotary(TOKENS)
        for layer in self.layers:  # recomputed in the backward: dropout has to repeat
            x = checkpoint(layer, x, cu_seqlens_q=offsets, rotary_pos_emb=freqs, use_reentrant=False)
        return self.head(x)


def batch(number: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(10 * number + data_rank)
    tokens = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
    offsets = torch.tensor([0, *DOCUMENTS[data_rank]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return tokens, tokens * 3 % VOCABULARY, offsets


def loss_of(model: torch.nn.Module, number: int, data_rank: int, context: ContextParallel | None) -> torch.Tensor:
    """This rank's share of the mean loss of a step, which accumulates the gradients of two batches."""
    tokens, labels, offsets = batch(number, data_rank)
    if context is not None:
        own = context.bind(TOKENS, mask=masks.documents(offsets) & masks.causal())
        for layer in model.layers:
            layer.set_context_parallel_group(own)
        tokens, labels = own.shard(tokens, dim=0), own.shard(labels, dim=0)
    # the other ranks of a data rank have other generators, and drop what its first rank draws
    offset = 0 if context is None else 1000 * (distributed.get_rank() % 4)
    torch.manual_seed(100 * number + data_rank + offset)
    logits = model(tokens, offsets).float()
    return cross_entropy(logits, labels, reduction="sum") / (2 * len(DOCUMENTS) * TOKENS)


def train_alone(dtype: torch.dtype) -> tuple[State, list[float]]:
    """Parameters and losses of one process, which computes in `dtype` and updates in fp32."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    losses = []
    for step in range(2):
        total = 0.0
        for number, data_rank in itertools.product(range(2), range(2)):
            worker = copy.deepcopy(model).to(dtype) if dtype != torch.float32 else model
            loss = loss_of(worker, 2 * step + number, data_rank, None)
            loss.backward()
            total += loss.item()
            if worker is not model:
                for ours, theirs in zip(model.parameters(), worker.parameters(), strict=True):
                    ours.grad = theirs.grad.float() if ours.grad is None else ours.grad + theirs.grad.float()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, losses


def train_on_mesh(
    dtype: torch.dtype, hidden_dropout: float = 0.0, way: str = "parallelize"
) -> tuple[State, Callable[[State], State], list[float]]:
    """The same on data, context and tensor ranks; and a function from parameters of one process to those of a rank."""
    torch.manual_seed(0)
    model = Model(hidden_dropout)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "context", "tensor"))
    cut: Callable[[State], State] = dict
    if way == "parallelize":
        parallelize(model, mesh["tensor"])
    else:
        whole, model = model, Model(hidden_dropout, tp_group=mesh.get_group("tensor"), set_parallel_mode=True)
        cut = functools.partial(own_state_dict, model)
        model.load_state_dict(cut(whole.state_dict()))
    context = ContextParallel(mesh["context"].get_group())
    shards = mesh["data", "context"]._flatten("shards")
    policy = MixedPrecisionPolicy()
    if dtype != torch.float32:
        # angles of rotary embeddings stay fp32
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.layers:
        layer.set_context_parallel_group(context)
    for module in (*model.layers, model):
        fully_shard(module, mesh=shards, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)
    losses = []
    for step in range(2):
        total = torch.zeros(())
        for number in range(2):
            loss = loss_of(model, 2 * step + number, mesh["data"].get_local_rank(), context)
            (loss * shards.size()).backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        distributed.all_reduce(total, group=shards.get_group())
        losses.append(total.item())
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}, cut, losses


def compare_mesh() -> dict[str, Any]:
    """What the ranks and one process computed, as numbers."""
    torch.manual_seed(0)
    start = {name: p.detach() for name, p in Model().named_parameters()}
    (exact, losses), (half, _) = train_alone(torch.float32), train_alone(torch.bfloat16)

    def error(found: State, cut: Callable[[State], State] = dict, losses: object = None) -> float:
        """The error of the updates, relative to their norm."""
        right, before = cut(exact), cut(start)
        norms = [((p - right[name]).norm(), (right[name] - before[name]).norm()) for name, p in found.items()]
        wrong, moved = zip(*norms, strict=True)
        return float(torch.stack(wrong).norm() / torch.stack(moved).norm())

    ours, dropped = train_on_mesh(torch.float32), train_on_mesh(torch.float32, hidden_dropout=0.1)
    return {
        "losses": list(zip(ours[2], losses, strict=True)),
        "errors": [error(*ours), error(*train_on_mesh(torch.float32, way="group"))],
        "bf16": (error(*train_on_mesh(torch.bfloat16)), error(half)),
        "hidden dropout": (error(*dropped), dropped[2]),
    }


@pytest.mark.slow
def test_training_on_data_context_and_tensor_axes_updates_parameters_as_one_process() -> None:
    """Packed documents, a window, dropout, recomputation and accumulation, in fp32 and in mixed precision."""
    (answers,) = run_ranks(8, compare_mesh)
    for answer in answers:
        assert isinstance(answer, dict), answer
        for ours, theirs in answer["losses"]:
            assert abs(ours - theirs) < 1e-5
        assert max(answer["errors"]) < 1e-5
        ours, theirs = answer["bf16"]
        assert 0 < ours < 2 * theirs < 0.2
        # the ranks of the context axis drop hidden states by their own generators, those of the tensor axis alike
        assert answer["hidden dropout"] == answers[0]["hidden dropout"]
        assert 0.01 < answer["hidden dropout"][0] < 1


@pytest.mark.slow
def test_losses_on_data_context_and_tensor_axes_are_those_of_one_process() -> None:
    """The example on 8 ranks: packed documents, windows, recomputed activations, accumulated gradients."""
    one, eight = (torch.tensor(losses_of("18_train_on_a_mesh.py", ranks)) for ranks in (1, 8))
    assert len(one) == 6
    torch.testing.assert_close(eight, one, rtol=0, atol=5e-5)
