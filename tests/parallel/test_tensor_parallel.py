"""Layers divided over the ranks of a mesh equal one process: outputs, losses and gradients."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from rng_tracker import Tracker
from tensor_layers import BATCH, HIDDEN, LENGTH, make_layer
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import undivided
from undivided import DotProductAttention, InferenceParams, MultiheadAttention, masks
from undivided.parallel import own_state_dict, parallelize, whole_state_dict

CASES: list[dict[str, Any]] = [
    {},
    {"num_gqa_groups": 2, "normalization": "RMSNorm", "activation": "swiglu", "window_size": (3, 0)},
    {"fuse_qkv_params": True, "qk_norm_type": "RMSNorm", "output_layernorm": True},
    {"apply_residual_connection_post_layernorm": True, "bias": False, "num_gqa_groups": 1},
    {"softmax_type": "learnable", "scores": "post_scale_bias"},
    {"softmax_type": "off-by-one", "num_gqa_groups": 2, "scores": "alibi"},
    {"attention_dropout": 0.3, "hidden_dropout": 0.2, "drop_path_rate": 0.3, "num_gqa_groups": 2},
    {"layer_type": "decoder", "attention_dropout": 0.3, "activation": "geglu"},
    {"layer_type": "decoder", "fuse_qkv_params": True, "qkv_weight_interleaved": False, "output_layernorm": True},
    {"layer_type": "decoder", "fuse_qkv_params": True, "qk_norm_type": "RMSNorm", "hidden_dropout": 0.2},
]
"""Arguments of a layer, and the terms of the scores of its call."""
FORMATS = ("bshd", "sbhd", "thd")
OFFSETS = torch.tensor([0, 5, 16], dtype=torch.int32)


def call_arguments(case: dict[str, Any], format: str) -> dict[str, Any]:
    """Arguments of a call of one process: slopes, a bias that differs by head and gets a gradient, an encoder."""
    kind = case.get("scores", "no_bias")
    draw = torch.Generator().manual_seed(1)
    terms: dict[str, Any] = {"core_attention_bias_type": kind}
    if kind == "post_scale_bias":
        terms["core_attention_bias"] = torch.randn(1, 4, LENGTH, LENGTH, generator=draw).requires_grad_()
    if case.get("layer_type") == "decoder":
        terms["encoder_output"] = torch.randn(shape_of(format), generator=draw).requires_grad_()
    if format == "thd":
        terms["cu_seqlens_q"] = OFFSETS
        terms["cu_seqlens_kv"] = OFFSETS
    return terms


def shape_of(format: str) -> tuple[int, ...]:
    shapes = {"bshd": (BATCH, LENGTH, HIDDEN), "sbhd": (LENGTH, BATCH, HIDDEN), "thd": (BATCH * LENGTH, HIDDEN)}
    return shapes[format]


def run_case(case: dict[str, Any], format: str, sequence_parallel: bool, way: str) -> dict[str, float]:
    """The largest relative difference from one process, by the name of the result."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    whole = make_layer(case, format)
    if way == "parallelize":
        layer = make_layer(case, format)
        names = [name for name, _ in layer.named_parameters()]
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",))
        assert parallelize(layer, mesh, sequence_parallel) is layer
        assert [name for name, _ in layer.named_parameters()] == names
    else:
        layer = make_layer(case, format, tp_size=world, set_parallel_mode=True, sequence_parallel=sequence_parallel)
        layer.set_tensor_parallel_group(distributed.group.WORLD)
        layer.load_state_dict(own_state_dict(layer, whole.state_dict()))
        gathered = whole_state_dict(layer)
        assert all(torch.equal(gathered.pop(name), value) for name, value in whole.state_dict().items())
        assert not gathered

    def own(t: torch.Tensor, divided: bool = sequence_parallel, axis: int = int(format == "bshd")) -> torch.Tensor:
        return t.chunk(world, axis)[rank] if divided else t

    torch.manual_seed(2)
    x, weight = torch.randn(shape_of(format), requires_grad=True), torch.randn(shape_of(format))
    arguments = call_arguments(case, format)
    torch.manual_seed(3)
    expected = whole(x, **arguments)
    (expected * weight).sum().backward()

    leaves = {"x": x} | {name: t for name, t in arguments.items() if getattr(t, "requires_grad", False)}
    cut = {"x": own, "encoder_output": own, "core_attention_bias": lambda t: own(t, way == "group", 1)}
    given = {name: cut[name](leaf.detach()).clone().requires_grad_() for name, leaf in leaves.items()}
    torch.manual_seed(3 + rank)  # the ranks drop what the first rank draws
    out = layer(given["x"], **arguments | {name: leaf for name, leaf in given.items() if name != "x"})
    (out * own(weight)).sum().backward()

    found = {"out": (out, own(expected))} | {name: (given[name].grad, cut[name](leaves[name].grad)) for name in leaves}
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    if way == "group":
        gradients = own_state_dict(layer, gradients)
    for name, p in layer.named_parameters():
        found[name] = p.grad.full_tensor() if way == "parallelize" else p.grad, gradients[name]
    for name, (ours, theirs) in found.items():
        assert ours.shape == theirs.shape, name
    return {
        name: float((a.detach() - b.detach()).abs().max() / b.abs().max().clamp(min=1e-3))
        for name, (a, b) in found.items()
    }


def choices(world: int) -> list[tuple[dict[str, Any], str, bool, str]]:
    """Every case with and without sequence parallelism, in one of the formats each, by both ways of dividing."""
    found: list[tuple[dict[str, Any], str, bool, str]] = []
    for number, case in enumerate(CASES):
        for sequence_parallel in (False, True):
            format = FORMATS[(number + 2 * sequence_parallel) % 3]
            if format == "thd" and case.get("scores") == "post_scale_bias":
                format = "bshd"
            if case.get("qkv_weight_interleaved", True):
                found.append((case, format, sequence_parallel, "parallelize"))
            if case.get("num_gqa_groups", 4) % world == 0:
                found.append((case, format, sequence_parallel, "group"))
    return found


def run_cases() -> list[tuple[dict[str, Any], str, bool, str, dict[str, float]]]:
    return [(*choice, run_case(*choice)) for choice in choices(distributed.get_world_size())]


def core_attention() -> list[float]:
    """The largest differences of an attention alone, built for a group, from one process: outputs and gradients."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    options: dict[str, Any] = {"attention_dropout": 0.4, "softmax_type": "learnable", "qkv_format": "bshd"}
    whole = DotProductAttention(8, 4, 4, **options)
    part = DotProductAttention(8, 4, 4, tp_group=distributed.group.WORLD, **options)
    torch.manual_seed(1)
    torch.nn.init.normal_(whole.softmax_offset)
    assert part.heads.q == 8 // world
    part.load_state_dict({"softmax_offset": whole.softmax_offset.detach().chunk(world)[rank]})
    inputs = [torch.randn(2, 9, heads, 4, requires_grad=True) for heads in (8, 4, 4)]
    own = [t.detach().chunk(world, 2)[rank].requires_grad_() for t in inputs]
    found = []
    for recompute in (False, True):
        call = {"core_attention_bias_type": "alibi", "checkpoint_core_attention": recompute}
        torch.manual_seed(5)
        expected = whole(*inputs, **call).chunk(world, -1)[rank]
        torch.manual_seed(5 + rank)
        out = part(*own, **call)
        wanted = torch.autograd.grad(expected.square().sum(), [*inputs, whole.softmax_offset])
        wanted = [g.chunk(world, g.dim() // 2)[rank] for g in wanted]
        ours = torch.autograd.grad(out.square().sum(), [*own, part.softmax_offset])
        found += [float((a - b).detach().abs().max()) for a, b in zip((out, *ours), (expected, *wanted), strict=True)]
    return found


def generators() -> tuple[torch.Tensor, torch.Tensor, bool, bool]:
    """First rows of weights drawn without and with a tracker; whether dropout and weights came from the tracker."""
    rank, group = distributed.get_rank(), distributed.group.WORLD
    options: dict[str, Any] = {"qkv_format": "bshd", "tp_group": group, "set_parallel_mode": True}
    torch.manual_seed(0)
    drawn = MultiheadAttention(HIDDEN, 4, **options).qkv.query_weight[0].detach()
    tracker = Tracker(10 + rank)
    tracked = MultiheadAttention(HIDDEN, 4, get_rng_state_tracker=lambda: tracker, **options)
    weight = tracked.qkv.query_weight
    torch.manual_seed(10 + rank)
    same_weight = torch.equal(weight, torch.empty_like(weight).normal_(0, 0.023))
    core, heads = tracked.core_attention, tracked.core_attention.heads.q
    q, tracker.state = torch.randn(1, 6, heads, 8), torch.Generator().manual_seed(20 + rank).get_state()
    out = core(q, q, q, qkv_format="bshd")
    seed = torch.randint(2**62, (), generator=torch.Generator().manual_seed(20 + rank))
    mask = masks.causal().with_first_head(rank * heads)
    alone = undivided.attention(q, q, q, layout="bshd", mask=mask, dropout_p=0.1, dropout_seed=seed)
    return drawn, weight[0].detach(), same_weight, torch.equal(out, alone.flatten(-2))


def generation() -> float:
    """The largest difference of tokens with a cache on each rank from one pass of one process."""
    world = distributed.get_world_size()
    case = {"window_size": (5, 0), "activation": "swiglu", "layer_number": 1}
    whole = make_layer(case, "bshd").eval()
    layers = [make_layer(case, "bshd").eval() for _ in range(2)]
    layers[1] = make_layer(case, "bshd", tp_group=distributed.group.WORLD, set_parallel_mode=True).eval()
    layers[1].load_state_dict(own_state_dict(layers[1], whole.state_dict()))
    parallelize(layers[0], init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",)))
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(7))
    gaps = []
    with torch.no_grad():
        expected = whole(x)
        for layer in layers:
            cache = InferenceParams(BATCH, LENGTH, 4 // world, HIDDEN // 4, torch.float32)
            for start, stop in ((0, 5), (5, 6), (6, LENGTH)):
                cache.pre_step(OrderedDict((name, stop - start) for name in range(BATCH)))
                out = layer(x[:, start:stop], inference_params=cache)
                gaps.append(float((out - expected[:, start:stop]).abs().max()))
    return max(gaps)


def compiled() -> float:
    """The largest difference of compiled layers with dropout from one process, and of their gradients."""
    case = {"attention_dropout": 0.3, "hidden_dropout": 0.2}
    world = distributed.get_world_size()
    whole, layer = make_layer(case, "bshd"), make_layer(case, "bshd")
    parallelize(layer, init_device_mesh("cpu", (world,), mesh_dim_names=("tensor",)))
    other = make_layer(case, "bshd", tp_group=distributed.group.WORLD, set_parallel_mode=True)
    other.load_state_dict(own_state_dict(other, whole.state_dict()))
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(8))
    torch.manual_seed(9)
    expected = whole(x)
    expected.sin().sum().backward()
    gaps = []
    for divided in (layer, other):
        torch.manual_seed(9 + distributed.get_rank())
        out = torch.compile(divided, backend="eager")(x)
        gaps.append(float((out - expected).abs().max()))
        out.sin().sum().backward()
    for ours, theirs in zip(layer.parameters(), whole.parameters(), strict=True):
        gaps.append(float((ours.grad.full_tensor() - theirs.grad).abs().max() / theirs.grad.abs().max().clamp(min=1)))
    return max(gaps)


def with_context_parallelism() -> float:
    """The largest difference from one process on ranks of a context and a tensor axis, with attention dropout."""
    mesh = init_device_mesh("cpu", (2, distributed.get_world_size() // 2), mesh_dim_names=("context", "tensor"))
    whole, layer = (make_layer({"attention_dropout": 0.4}, "bshd") for _ in range(2))
    parallelize(layer, mesh["tensor"], sequence_parallel=True)
    context = undivided.ContextParallel(mesh.get_group("context")).bind(LENGTH)
    layer.set_context_parallel_group(context)
    torch.manual_seed(6)
    x = torch.randn(BATCH, LENGTH, HIDDEN)
    expected = whole(x)
    torch.manual_seed(6 + distributed.get_rank())
    torch.randn(BATCH, LENGTH, HIDDEN)

    def own(t: torch.Tensor) -> torch.Tensor:
        return context.shard(t, dim=1).chunk(mesh["tensor"].size(), 1)[mesh["tensor"].get_local_rank()]

    return float((checkpoint(layer, own(x), use_reentrant=False) - own(expected)).abs().max())


def check_cases(answers: list[Any], world: int) -> None:
    """Outputs and gradients of layers, with and without sequence parallelism."""
    for answer in answers:
        assert isinstance(answer, list), answer
        assert len(answer) == len(choices(world)) >= 3 * len(CASES)
        for *choice, differences in answer:
            for name, difference in differences.items():
                assert difference < 2e-5, (choice, name, difference)


def check_core_attention(answers: list[Any]) -> None:
    """An attention with a group drops what one process drops."""
    for differences in answers:
        assert isinstance(differences, list), differences
        assert len(differences) == 10
        assert max(differences) < 1e-5, differences


def check_generators(answers: list[Any]) -> None:
    """Weights and seeds are drawn in the context of a tracker. Without one, ranks whose generators agree still draw
    different weights."""
    for answer in answers:
        assert isinstance(answer, tuple), answer
        assert answer[2:] == (True, True)
    for rows in zip(*(answer[:2] for answer in answers), strict=True):
        assert len({tuple(row.tolist()) for row in rows}) == len(answers)


@pytest.mark.slow
@pytest.mark.parametrize("world", [4])
def test_layers_over_ranks_equal_one_process(world: int) -> None:
    """All in one launch of the ranks, which takes longer than what they compute. Two ranks leave fewer cases: none has
    fewer key heads than ranks."""
    functions = run_cases, core_attention, generators, with_context_parallelism, generation, compiled
    cases, cores, drawn, *numbers = run_ranks(world, *functions)
    check_cases(cases, world)
    check_core_attention(cores)
    check_generators(drawn)
    for difference in itertools.chain.from_iterable(numbers):
        assert isinstance(difference, float), difference
        assert difference < 2e-6
