"""The norm of gradients of modules that are divided in several ways is that of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from tensor_layers import BATCH, HIDDEN, LENGTH, make_layer
from torch import distributed
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from undivided import DotProductAttention, InputError
from undivided.parallel import clip_grad_norm_, own_state_dict, parallelize, whole_state_dict

CASE: dict[str, Any] = {"num_gqa_groups": 2, "softmax_type": "learnable", "fuse_qkv_params": True}
MOST = 0.05


class Model(torch.nn.Module):
    """A layer between maps that no rank divides, with a parameter that gets no gradient."""

    def __init__(self, **parallel: Any) -> None:
        super().__init__()
        self.layer = make_layer(CASE, "bshd", **parallel)
        self.first, self.last = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, 3)
        self.unused = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.layer(self.first(x))) * 1.0  # FSDP2 warns about a view
        return out


def backward(model: Model) -> Model:
    x = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()
    return model


def divided(way: str, fsdp: bool) -> Model:
    """The model of one process on data and tensor ranks, after a backward of the same batch on both data ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Model()
    if way == "parallelize":
        parallelize(model, mesh["tensor"])
    else:
        whole, model = model, Model(tp_group=mesh.get_group("tensor"), set_parallel_mode=True)
        model.load_state_dict(own_state_dict(model, whole.state_dict()))
    if fsdp:
        for module in (model.layer, model):
            fully_shard(module, mesh=mesh["data"])
    return backward(model)


def compare() -> list[tuple[Any, ...]]:
    """Ways, norms of the ranks, of one process, and the norm after clipping."""
    found = []
    for way in ("parallelize", "tp_group"):
        for fsdp in (False, True):
            for kind in (2.0, 3.0, math.inf):
                whole, model = backward(Model()), divided(way, fsdp)
                expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), MOST, kind)
                norms = clip_grad_norm_(model, MOST, kind), clip_grad_norm_(model, math.inf, kind)
                found.append((way, fsdp, kind, *map(float, norms), float(expected)))
    return found


def one_attention() -> tuple[bool, float]:
    """Whether the sinks of an attention alone are gathered, and the norm of their gradients of 1."""
    options: dict[str, Any] = {"softmax_type": "learnable", "qkv_format": "bshd", "attention_dropout": 0.0}
    attention = DotProductAttention(8, 4, tp_group=distributed.group.WORLD, **options)
    offset = attention.softmax_offset
    assert offset is not None
    torch.nn.init.constant_(offset, distributed.get_rank())
    offset.grad = torch.ones_like(offset)
    whole = whole_state_dict(attention)["softmax_offset"]
    return torch.equal(whole, torch.arange(4.0).repeat_interleave(2)), float(clip_grad_norm_(attention, 1.0))


def test_norms_of_divided_gradients_are_those_of_one_process() -> None:
    for answers, alone in zip(*run_ranks(4, compare, one_attention), strict=True):
        assert isinstance(answers, list), answers
        assert len(answers) == 12
        for *case, norm, clipped, expected in answers:
            assert norm == pytest.approx(expected, rel=1e-5), case
            assert norm > 2 * MOST
            assert clipped == pytest.approx(MOST, rel=1e-4), case
        assert alone == (True, pytest.approx(math.sqrt(8)))


def recomputed() -> list[float]:
    """The norms of a layer with a group, and of the wrapper that recomputes it."""
    layer = make_layer(CASE, "bshd", tp_group=distributed.group.WORLD, set_parallel_mode=True)
    layer(torch.randn(BATCH, LENGTH, HIDDEN)).square().sum().backward()
    return [float(clip_grad_norm_(module, math.inf)) for module in (layer, checkpoint_wrapper(layer))]


def one_nan() -> list[float]:
    """The largest gradient after one rank got NaN in a divided weight, and after it got infinity."""
    layer = parallelize(make_layer(CASE, "bshd"), init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))
    layer(torch.randn(BATCH, LENGTH, HIDDEN)).sum().backward()
    found = []
    for value in (math.nan, math.inf):
        if distributed.get_rank() == 1:
            layer.layernorm_mlp.fc1_weight.grad.to_local()[0, 0] = value
        found.append(float(clip_grad_norm_(layer, math.inf, math.inf)))
    return found


def test_norms_of_recomputed_layers_and_of_nan_are_the_same_on_every_rank() -> None:
    """The wrapper gives the parameters other names; gloo's maximum ignores NaN."""
    wrapped, nans = run_ranks(2, recomputed, one_nan)
    for norms, largest in zip(wrapped, nans, strict=True):
        assert isinstance(norms, list), norms
        assert norms == [wrapped[0][0]] * 2
        assert isinstance(largest, list), largest
        assert math.isnan(largest[0])
        assert largest[1] == math.inf


def test_one_process_clips_as_pytorch_does() -> None:
    ours, theirs = backward(Model()), backward(Model())
    assert clip_grad_norm_(ours, MOST) == pytest.approx(
        float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), MOST))
    )
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        if a.grad is None:
            assert b.grad is None
        else:
            torch.testing.assert_close(a.grad, b.grad)
    assert clip_grad_norm_(torch.nn.Linear(2, 2), 1.0) == 0
    assert clip_grad_norm_(torch.nn.Identity(), 1.0) == 0


def test_wrong_arguments_and_norms_that_are_not_finite_are_refused() -> None:
    layer = torch.nn.Linear(2, 1, bias=False)
    with pytest.raises(InputError, match="max_norm must be a number of at least 0, got -1"):
        clip_grad_norm_(layer, -1.0)
    with pytest.raises(InputError, match=r"norm_type must be a number greater than 0, at least 0\.001, got 0"):
        clip_grad_norm_(layer, 1.0, 0)
    layer.weight.grad = torch.tensor([[math.nan, 1.0]])
    with pytest.raises(InputError, match="module must have gradients of a finite norm, got nan"):
        clip_grad_norm_(layer, 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(layer, 1.0).isnan()
