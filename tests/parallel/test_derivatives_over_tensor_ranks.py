"""Batches of incoming gradients, torch.func and second derivatives of layers over tensor ranks equal one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from tensor_layers import BATCH, HIDDEN, LENGTH, make_layer
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

from undivided import InputError, TransformerLayer
from undivided.parallel import own_state_dict, parallelize

Score = dict[str, Any]


def draw(*shape: int) -> Tensor:
    """Numbers that are the same on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(shape[0]))


def batched(layer: TransformerLayer, x: Tensor, scores: Score) -> list[Tensor]:
    """Gradients of the input and of the tensor of the scores, for three incoming gradients at once."""
    leaves = [t.requires_grad_() for t in (x, *scores.values()) if isinstance(t, Tensor)]
    return list(torch.autograd.grad(layer(x, **scores), leaves, draw(3, *x.shape), is_grads_batched=True))


def func_grad(layer: TransformerLayer, x: Tensor, scores: Score) -> list[Tensor]:
    return [torch.func.grad(lambda x: layer(x, **scores).square().sum())(x)]


def vmap(layer: TransformerLayer, x: Tensor, scores: Score) -> list[Tensor]:
    return [torch.func.vmap(lambda x: layer(x[None], **scores)[0])(x)]


def jvp(layer: TransformerLayer, x: Tensor, scores: Score) -> list[Tensor]:
    return list(torch.func.jvp(lambda x: layer(x, **scores), (x,), (draw(*x.shape),)))


def second(layer: TransformerLayer, x: Tensor, scores: Score) -> list[Tensor]:
    (gradient,) = torch.autograd.grad(layer(x.requires_grad_(), **scores).square().sum(), x, create_graph=True)
    return list(torch.autograd.grad(gradient.square().sum(), x))


Function = Callable[[TransformerLayer, Tensor, Score], list[Tensor]]
TRANSFORMS: tuple[Function, ...] = func_grad, vmap, jvp
CHOICES: dict[str, list[tuple[Function, str]]] = {
    "parallelize": [(batched, "no_bias"), (batched, "alibi"), (batched, "post_scale_bias"), (second, "no_bias")],
    "group": [(function, "no_bias") for function in (batched, second, *TRANSFORMS)],
}


def scores(kind: str) -> Score:
    """Terms of the scores of all heads."""
    if kind == "alibi":
        return {"core_attention_bias_type": kind, "alibi_slopes": draw(4).abs().float()}
    if kind == "post_scale_bias":
        return {"core_attention_bias_type": kind, "core_attention_bias": draw(1, 4, LENGTH, LENGTH)}
    return {}


def divided(way: str, case: dict[str, Any]) -> TransformerLayer:
    """The layer over all ranks."""
    if way == "parallelize":
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tensor",))
        return parallelize(make_layer(case, "bshd"), mesh)
    layer = make_layer(case, "bshd", tp_group=distributed.group.WORLD, set_parallel_mode=True)
    layer.load_state_dict(own_state_dict(layer, make_layer(case, "bshd").state_dict()))
    return layer


def gaps() -> dict[str, float]:
    """The largest difference from one process, relative to the largest number, by function, way and scores."""
    found = {}
    case = {"params_dtype": torch.float64, "normalization": "RMSNorm", "activation": "swiglu"}
    for way, choices in CHOICES.items():
        for function, kind in choices:
            whole, layer = make_layer(case, "bshd"), divided(way, case)
            results = [function(module, draw(BATCH, LENGTH, HIDDEN), scores(kind)) for module in (layer, whole)]
            found[f"{function.__name__}-{way}-{kind}"] = max(
                float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in zip(*results, strict=True)
            )
    return found


def refusals() -> list[str]:
    """The errors of transforms over parameters that are DTensors, which PyTorch does not transform."""
    layer, found = divided("parallelize", {"params_dtype": torch.float64}), []
    for function in TRANSFORMS:
        with pytest.raises(InputError) as error:
            function(layer, draw(BATCH, LENGTH, HIDDEN), {})
        found.append(str(error.value))
    return found


def shared_block() -> float:
    """The largest difference of the gradients of two layers that share a feed-forward block from one process."""
    gradients = []
    for is_divided in (True, False):
        model = torch.nn.Sequential(*(make_layer({"params_dtype": torch.float64}, "bshd") for _ in range(2)))
        model[1].layernorm_mlp = model[0].layernorm_mlp
        if is_divided:
            parallelize(model, init_device_mesh("cpu", (distributed.get_world_size(),)))
        model(draw(BATCH, LENGTH, HIDDEN)).square().sum().backward()
        gradients.append([p.grad.full_tensor() if is_divided else p.grad for p in model.parameters()])  # type: ignore[operator, union-attr]
    return max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))


@pytest.fixture(scope="module")
def answers() -> list[list[Any]]:
    return run_ranks(2, gaps, shared_block, refusals)


def test_derivatives_equal_those_of_one_process(answers: list[list[Any]]) -> None:
    """The sums over ranks left out what PyTorch hides in a batch of gradients, without an error."""
    for differences in answers[0]:
        assert isinstance(differences, dict), differences
        assert len(differences) == sum(map(len, CHOICES.values()))
        assert max(differences.values()) < 1e-12, differences


def test_layers_may_share_a_block(answers: list[list[Any]]) -> None:
    assert all(isinstance(gap, float) and gap < 1e-10 for gap in answers[1]), answers[1]


def test_transforms_of_dtensors_are_refused(answers: list[list[Any]]) -> None:
    for texts in answers[2]:
        assert len(texts) == len(TRANSFORMS), texts
        assert all("must have plain parameters under torch.func and vmap, got a DTensor" in text for text in texts)
