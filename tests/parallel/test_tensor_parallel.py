"""Layers divided over the ranks of a mesh equal one process: outputs, losses and gradients."""

from __future__ import annotations

import functools
import itertools
import re
import unittest.mock
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import undivided
from undivided import InputError, TransformerLayer
from undivided.parallel import parallelize

HIDDEN, LENGTH, BATCH = 32, 8, 2
CASES: list[dict[str, Any]] = [
    {},
    {"num_gqa_groups": 2, "normalization": "RMSNorm", "activation": "swiglu", "window_size": (3, 0)},
    {"fuse_qkv_params": True, "qk_norm_type": "RMSNorm", "output_layernorm": True},
    {"apply_residual_connection_post_layernorm": True, "bias": False, "num_gqa_groups": 1},
    {"softmax_type": "learnable", "scores": "post_scale_bias"},
    {"softmax_type": "off-by-one", "num_gqa_groups": 2, "scores": "alibi"},
]
"""Arguments of a layer, and the terms of the scores of its call."""
FORMATS = ("bshd", "sbhd")


def make_layer(case: dict[str, Any], format: str) -> TransformerLayer:
    torch.manual_seed(0)
    options = {name: value for name, value in case.items() if name != "scores"}
    layer = TransformerLayer(
        HIDDEN, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format=format, **options
    )
    for name, parameter in layer.named_parameters():
        if name.endswith("softmax_offset"):
            torch.nn.init.normal_(parameter)
    return layer


def score_terms(case: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call: slopes, or a bias that differs by head and gets a gradient."""
    kind = case.get("scores", "no_bias")
    terms: dict[str, Any] = {"core_attention_bias_type": kind}
    if kind == "post_scale_bias":
        draw = torch.Generator().manual_seed(1)
        terms["core_attention_bias"] = torch.randn(1, 4, LENGTH, LENGTH, generator=draw).requires_grad_()
    return terms


def run_case(case: dict[str, Any], format: str, sequence_parallel: bool) -> dict[str, float]:
    """The largest relative difference from one process, by the name of the result."""
    whole, layer = make_layer(case, format), make_layer(case, format)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tensor",))
    names = [name for name, _ in layer.named_parameters()]
    assert parallelize(layer, mesh, sequence_parallel) is layer
    assert [name for name, _ in layer.named_parameters()] == names
    axis = FORMATS.index(format) ^ 1
    shape = (BATCH, LENGTH, HIDDEN) if format == "bshd" else (LENGTH, BATCH, HIDDEN)
    x = torch.randn(shape, requires_grad=True)
    weight = torch.randn(shape)
    terms, own_terms = score_terms(case), score_terms(case)
    expected = whole(x, **terms)
    (expected * weight).sum().backward()

    def own(t: torch.Tensor) -> torch.Tensor:
        return t.chunk(mesh.size(), axis)[mesh.get_local_rank()] if sequence_parallel else t

    part = own(x.detach()).clone().requires_grad_()
    out = layer(part, **own_terms)
    (out * own(weight)).sum().backward()
    found = {"out": (out, own(expected)), "x": (part.grad, own(x.grad))}
    for name, term in own_terms.items():
        if isinstance(term, torch.Tensor) and term.requires_grad:
            found[name] = term.grad, terms[name].grad
    for (name, p), q in zip(layer.named_parameters(), whole.parameters(), strict=True):
        found[name] = p.grad.full_tensor(), q.grad
    return {
        name: float((a.detach() - b.detach()).abs().max() / b.abs().max().clamp(min=1e-3))
        for name, (a, b) in found.items()
    }


def run_cases() -> list[tuple[dict[str, Any], str, bool, dict[str, float]]]:
    choices = itertools.product(CASES, FORMATS, (False, True))
    return [(*choice, run_case(*choice)) for choice in choices]


@functools.cache
def results(world: int) -> list[list[Any]]:
    return run_ranks(world, run_cases)


@pytest.mark.parametrize("world", [2, 4])
def test_outputs_and_gradients_equal_one_process(world: int) -> None:
    for answers in results(world)[0]:
        assert isinstance(answers, list), answers
        assert len(answers) == len(CASES) * 4
        for case, format, sequence_parallel, differences in answers:
            for name, difference in differences.items():
                assert difference < 2e-5, (case, format, sequence_parallel, name, difference)


@pytest.fixture
def mesh() -> Any:
    """A mesh that claims four ranks, for checks that come before communication."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    one = init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
    with unittest.mock.patch.object(type(one), "size", return_value=4):
        yield one
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 2}, "num_attention_heads must be a multiple of the 4 ranks of mesh, got 2"),
        ({"ffn_hidden_size": 66}, "ffn_hidden_size must be a multiple of the 4 ranks of mesh, got 66"),
        ({"num_attention_heads": 12, "hidden_size": 48, "num_gqa_groups": 3}, "num_gqa_groups must be a multiple or a"),
        ({"fuse_qkv_params": True, "qkv_weight_interleaved": False}, "qkv_weight_interleaved must be True"),
        (
            {"fuse_qkv_params": True, "num_gqa_groups": 2},
            "num_gqa_groups must be a multiple of the 4 ranks of mesh with",
        ),
        ({"hidden_dropout": 0.1}, "hidden_dropout must be 0 for tensor parallelism, got 0.1"),
        ({"attention_dropout": 0.1}, "attention_dropout must be 0 for tensor parallelism, got 0.1"),
        ({"layer_type": "decoder"}, "attention_type must be 'self'"),
    ],
)
def test_layers_that_the_ranks_do_not_divide_are_refused(mesh: Any, changes: dict[str, Any], message: str) -> None:
    sizes = {"hidden_size": HIDDEN, "ffn_hidden_size": 64, "num_attention_heads": 4, "attn_input_format": "bshd"}
    layer = TransformerLayer(**sizes | {"hidden_dropout": 0.0, "attention_dropout": 0.0} | changes)
    with pytest.raises(InputError, match=re.escape(message)):
        parallelize(layer, mesh)
    assert all(type(p) is torch.nn.Parameter for p in layer.parameters())


def test_a_module_without_layers_and_a_wrong_mesh_are_refused(mesh: Any) -> None:
    with pytest.raises(InputError, match="module must contain a layer of undivided, got Linear"):
        parallelize(torch.nn.Linear(2, 2), mesh)
    with pytest.raises(InputError, match="mesh must be a DeviceMesh with one axis, got int"):
        parallelize(undivided.MultiheadAttention(HIDDEN, 4, qkv_format="bshd"), 4)  # type: ignore[arg-type]
