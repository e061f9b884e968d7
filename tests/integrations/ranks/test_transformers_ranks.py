"""Models of transformers on several processes: losses and gradients equal those of one process.

Starting processes costs more than what they compute, so one start does everything; each difference names its case.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gloo_ranks import losses_of, run_ranks
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import DataCollatorWithFlattening, DynamicCache
from transformers_models import build

import undivided
from undivided.context_parallel import RankError, simulate
from undivided.integrations.transformers import parallelize, register, shard_batch
from undivided.integrations.transformers._names import cache_name
from undivided.integrations.transformers._patterns import Packed, Pattern
from undivided.integrations.transformers.parallel._shard import SequenceShard
from undivided.integrations.transformers.parallel._tensor import _with_summed_gradients

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


def compare(
    shape: dict[str, int], names: tuple[str, ...], checkpointed: bool = False, dropout: float = 0.0
) -> list[str]:
    """In each rank: what differs from one process, in a training step and an evaluation after it."""
    register()
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    sharded = [axis for axis in ("data", "context") if axis in shape]
    shards = mesh[tuple(sharded)]._flatten("shards") if len(sharded) > 1 else mesh[sharded[0]]
    tensor_ranks, wrong = shape.get("tensor", 1), []
    for name in names:
        for kind, given in batches(shape.get("data", 1)).items():
            one, model = (build(name, "undivided", attention_dropout=dropout).train() for _ in range(2))
            if checkpointed:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            parallelize(model, mesh)
            for layer in (*model.model.layers, model):
                fully_shard(layer, mesh=shards)
            steps = [torch.optim.SGD(m.parameters(), 0.05, foreach=False) for m in (one, model)]
            torch.manual_seed(7)  # what dropout draws: that of the first rank
            expected = alone(one, given)
            torch.manual_seed(7 + 100 * distributed.get_rank())
            found = on_mesh(model, given, mesh)
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


def save_and_load(folder: str) -> dict[str, float]:
    """In each rank: how far the parameters of a model on a mesh are from those that were saved."""
    register()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
    exact = build("gemma-3", "undivided").state_dict()
    model = parallelize(build("gemma-3", "undivided"), mesh)
    fully_shard(model, mesh=mesh["context"])
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    dcp.save(model.state_dict(), checkpoint_id=folder)
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("context",))
    other = parallelize(build("gemma-3", "undivided"), line)
    state = {name: torch.zeros_like(value) for name, value in other.state_dict().items()}
    dcp.load(state, checkpoint_id=folder)
    found = {"another mesh": state} | ({"rank 0": full} if distributed.get_rank() == 0 else {})
    return {
        where: max(float((saved[name] - value).abs().max()) for name, value in exact.items())
        for where, saved in found.items()
    }


def _loss_difference(what: str, expected: float, found: float) -> list[str]:
    return [] if abs(found - expected) < TOLERANCE * expected else [f"{what} loss: {found} instead of {expected}"]


def refused(call: Callable[[], object]) -> str:
    """The error of a call."""
    try:
        call()
    except (undivided.InputError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def masked_by_ids(shard: SequenceShard) -> object:
    """The mask of a user's ids of this rank's tokens, which say nothing of the other ranks' tokens."""
    own = shard.context.positions(within_documents=False).numel()
    return shard.model_mask(Pattern(packed=Packed(torch.zeros(1, own, dtype=torch.int64), None)), 1, own)


def errors() -> dict[str, str]:
    """In each rank: the errors of wrong calls. The ranks go on together after each."""
    register()
    rank = distributed.get_rank()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("context",))
    tensor = init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",))
    named = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    ids = torch.arange(3, 3 + LENGTH)[None]
    batch = {"input_ids": ids, "labels": ids}
    other = build("llama", "undivided")
    if rank == 2:
        nn.init.zeros_(other.lm_head.weight)
    model = parallelize(build("llama", "undivided"), mesh)
    sharded = fully_shard(build("llama", "undivided"), mesh=mesh)
    dropping = build("llama", "undivided")
    dropping.model.layers[0].mlp.act_fn = nn.Dropout(0.1)
    calls: dict[str, Callable[[], object]] = {
        "axis": lambda: parallelize(build("llama", "undivided"), named),
        "implementation": lambda: parallelize(build("llama", "sdpa"), mesh),
        "type": lambda: parallelize(build("gpt-2", "undivided"), mesh),
        "plan": lambda: parallelize(build("gpt-2", "undivided"), tensor),
        "heads": lambda: parallelize(build("llama", "undivided"), tensor),
        "noise": lambda: parallelize(build("mixtral", "undivided", router_jitter_noise=0.1), mesh),
        "dropout": lambda: parallelize(dropping, mesh),
        "parameters": lambda: parallelize(other, mesh),
        "order": lambda: parallelize(sharded, mesh),
        "twice": lambda: parallelize(model, mesh),
        "whole batch": lambda: model(**batch),
        "cache": lambda: model(**{**shard_batch(batch, mesh), "use_cache": True}),
        "cache object": lambda: model(**{**shard_batch(batch, mesh), cache_name(model): DynamicCache()}),
        "ids": lambda: masked_by_ids(shard_batch(batch, mesh)["shard"]),
        "generate": lambda: model.generate(ids, max_new_tokens=1, do_sample=False),
        "uneven": lambda: shard_batch({"input_ids": ids[:, : LENGTH - (rank == 1)]}, mesh),
        "text": lambda: shard_batch({"input_ids": ids + (rank == 3)}, mesh),
        "one refuses": lambda: shard_batch({"input_ids": ids if rank else ids[0]}, mesh),
        "short": lambda: shard_batch({"input_ids": ids[:, :3]}, mesh),
        "entry": lambda: shard_batch({"input_ids": ids, "pixel_values": ids}, mesh),
        "no label": lambda: shard_batch({"input_ids": ids, "labels": ids.new_full(ids.shape, -100)}, mesh),
    }
    found = {name: refused(call) for name, call in calls.items()}
    found["after"] = f"{float(model(**shard_batch(batch, mesh)).loss.detach()):.3f}"
    return found


def check_errors(answers: list[Any]) -> None:
    """The errors name the argument, on every rank."""
    for rank, found in enumerate(answers):
        assert isinstance(found, dict), found
        assert found["axis"].startswith("InputError: mesh must have axes with names out of 'data', 'context', 'tensor'")
        assert "attn_implementation must be 'undivided', got 'sdpa'" in found["implementation"]
        assert "got 'gpt2'" in found["type"]
        assert "model must have a tensor parallel plan for the 4 ranks of the axis 'tensor'" in found["plan"]
        assert "num_key_value_heads must be a multiple of the 4 ranks of the axis 'tensor', got 2" in found["heads"]
        assert "router_jitter_noise must be 0 on several context or tensor ranks, got 0.1" in found["noise"]
        message = (
            "model must have no dropout outside of the attention on several context or tensor ranks, got 1: model."
        )
        assert f"{message}layers.0.mlp.act_fn (p=0.1)" in found["dropout"]
        assert re.search("model must be the same on every rank.* on rank 2", found["parameters"])
        assert "call parallelize before fully_shard" in found["order"]
        assert "model must be parallelized once" in found["twice"]
        for name in ("whole batch", "generate"):
            assert "batch must come from shard_batch: the model is on 4 context ranks" in found[name]
        assert "use_cache must be absent on several context ranks, got True" in found["cache"]
        assert re.search("(cache|past_key_values) must be absent on several context ranks", found["cache object"])
        assert "mask_function must be causal, a window, chunks or bidirectional if the sequence" in found["ids"]
        assert re.search("input_ids must be the same on every rank.* on rank 1", found["uneven"])
        assert re.search("input_ids must be the same on every rank.* on rank 3", found["text"])
        own = "InputError: input_ids must be a tensor [B, S]" if rank == 0 else "RankError: another rank refused"
        assert found["one refuses"].startswith(own)
        assert "at least one token for each of the 4 context ranks, got 3" in found["short"]
        assert "batch must have only the entries input_ids" in found["entry"]
        assert "labels must have a label other than -100" in found["no label"]
        assert 0 < float(found["after"]) < 10


def test_a_model_without_values_or_on_two_devices_is_refused() -> None:
    register()
    model = build("llama", "undivided")
    model.lm_head.to("meta")

    def call(group: Any) -> str:
        return refused(lambda: parallelize(model, undivided.ContextParallel(group)))

    (found,) = simulate(1, call)
    assert "model must have parameters with values on one device, got cpu, meta" in found
    model.to("meta")
    (found,) = simulate(1, call)
    assert "values on one device, got meta\n  HINT: load or initialise the parameters" in found


@pytest.mark.parametrize("with_offsets", [False, True])
def test_each_text_of_the_flattening_collator_is_alone_on_several_ranks(with_offsets: bool) -> None:
    """Logits of packed texts are those of each text in a batch of its own."""
    register()
    texts = [[3 + (7 * n + length) % 40 for n in range(length)] for length in (9, 1, 3, 10)]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=with_offsets)
    batch = dict(collate([{"input_ids": text} for text in texts]))
    one, models = build("llama", "undivided"), [build("llama", "undivided") for _ in range(3)]

    def step(group: Any) -> Tensor:
        context = undivided.ContextParallel(group)
        part = shard_batch(batch, context)
        logits = parallelize(models[context.rank], context)(**part).logits.detach()
        return part["shard"].context.unshard(logits, dim=1)

    packed = simulate(3, step)[0]
    for text, found in zip(texts, packed[0].split([len(text) for text in texts]), strict=True):
        exact = one(torch.tensor([text]), use_cache=False).logits.detach()[0]
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma-2", "gpt-oss", "mistral", "qwen2", "qwen3-moe"])
def test_other_models_and_strategies_equal_one_process(name: str) -> None:
    """Simulated ranks: each strategy and placement in turn over padded and packed batches."""
    register()
    options = itertools.cycle(
        [("ring", "contiguous"), ("all_gather", "zigzag"), ("all_to_all", "balanced"), ("ring", "balanced")]
    )
    for kind, given in batches(2).items():
        strategy, placement = next(options)
        batch = given[1]
        one = build(name, "undivided").train()
        expected = alone(one, [batch])
        expected.backward()
        models = [build(name, "undivided").train() for _ in range(2)]

        def step(
            group: Any, batch: Any = batch, models: Any = models, how: Any = (strategy, placement)
        ) -> tuple[float, Tensor]:
            context = undivided.ContextParallel(group, *how)
            part = shard_batch(batch, context)
            output = parallelize(models[context.rank], context)(**part)
            output.loss.backward()
            return float(output.loss.detach()), part["shard"].context.unshard(output.logits.detach(), dim=1)

        results = simulate(2, step)
        assert not _loss_difference(kind, float(expected.detach()), sum(loss for loss, _ in results))
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        exact = one(**batch, use_cache=False).logits.detach()
        torch.testing.assert_close(results[0][1][real], exact[real], rtol=1e-4, atol=1e-5)
        for label, parameter in one.named_parameters():
            found = sum(dict(model.named_parameters())[label].grad for model in models)
            error = float((found - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-6))
            assert error < TOLERANCE, f"{kind} {label}: {error:.1e}"


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_one_process_and_errors_name_the_argument(tmp_path: Path) -> None:
    jobs = [
        functools.partial(compare, {"context": 4}, NAMES),
        functools.partial(compare, {"context": 2, "tensor": 2}, NAMES),
        functools.partial(compare, {"data": 2, "context": 2}, ("gemma-3",), checkpointed=True),
        functools.partial(compare, {"context": 2, "tensor": 2}, ("qwen3", "mixtral"), checkpointed=True, dropout=0.3),
    ]
    *compared, loaded, found = run_ranks(4, *jobs, functools.partial(save_and_load, str(tmp_path)), errors)
    assert loaded == [{"another mesh": 0.0, "rank 0": 0.0}, *[{"another mesh": 0.0}] * 3]
    for answers in compared:
        assert answers == [[]] * 4, "\n".join(map(str, answers))
    check_errors(found)


@pytest.mark.slow
def test_the_example_prints_the_losses_of_one_process() -> None:
    losses = losses_of("20_hugging_face_over_ranks.py", 2, pattern=r"^ +\d+ +([0-9.]+) +([0-9.]+)")
    assert len(losses) == 6
    for alone_, shared in losses:
        assert abs(float(alone_) - float(shared)) < 5e-5


def summed_gradients() -> float:
    """The relative error of a batch of gradients of a norm over the heads of a rank."""
    rank = distributed.get_rank()
    inputs = [torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    whole, norm = nn.RMSNorm(8), nn.RMSNorm(8)
    norm.forward = _with_summed_gradients(norm, init_device_mesh("cpu", (2,)))
    upstream = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(2))
    out = norm(inputs[rank])
    (found,) = torch.autograd.grad(out, norm.weight, upstream, retain_graph=True, is_grads_batched=True)
    each = [torch.stack([whole(x).mul(g).sum() for x in inputs]).sum() for g in upstream]
    wanted = torch.stack([torch.autograd.grad(loss, whole.weight)[0] for loss in each])
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.slow
def test_gradients_of_norms_over_the_heads_of_a_rank_come_in_batches() -> None:
    (errors,) = run_ranks(2, summed_gradients)
    assert max(errors) < TOLERANCE, errors
