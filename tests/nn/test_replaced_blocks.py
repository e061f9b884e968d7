"""Modules that users put in place of a layer's blocks, such as a mixture of experts for `layernorm_mlp`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_cases import HIDDEN, layer
from torch import Tensor, nn

from undivided import InputError


class Returns(nn.Module):
    """A block that returns what a function makes of its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, **options: Any) -> Any:
        return self.function(x)


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("block", [nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64), nn.Identity(), Returns(torch.sin)])
@pytest.mark.parametrize("parallel", [False, True])
def test_a_feed_forward_block_may_return_one_tensor(batch: int, block: nn.Module, parallel: bool) -> None:
    module = layer("bshd", parallel_attention_mlp=parallel)
    module.set_submodule("layernorm_mlp", block)
    x = torch.randn(batch, 5, HIDDEN, dtype=torch.float64)
    y = x + module.self_attention(x)
    torch.testing.assert_close(module(x), y + block(x if parallel else y))


def test_a_feed_forward_block_may_return_its_normalised_input_too() -> None:
    module = layer("bshd", apply_residual_connection_post_layernorm=True)
    module.set_submodule("layernorm_mlp", Returns(lambda x: [x.sin(), x.cos()]))
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    out, normalised = module.self_attention(x)
    y = normalised + out
    torch.testing.assert_close(module(x), y.cos() + y.sin())


@pytest.mark.parametrize(
    ("post_norm", "returned", "expected"),
    [
        (
            True,
            lambda x: x,
            "return (output, normalised input) with apply_residual_connection_post_layernorm, got a tensor",
        ),
        (
            True,
            lambda x: (x, None),
            "return (output, normalised input) with apply_residual_connection_post_layernorm, got a tuple of 2",
        ),
        (False, lambda x: (x, x, x), "return a tensor, or (output, normalised input), got a tuple of 3"),
        (False, lambda x: None, "return a tensor, or (output, normalised input), got NoneType"),
    ],
)
def test_another_result_of_a_feed_forward_block_is_refused(post_norm: bool, returned: Any, expected: str) -> None:
    module = layer("bshd", apply_residual_connection_post_layernorm=post_norm)
    module.set_submodule("layernorm_mlp", Returns(returned))
    with pytest.raises(InputError) as caught:
        module(torch.randn(2, 5, HIDDEN, dtype=torch.float64))
    assert str(caught.value) == f"layernorm_mlp must {expected}"


@pytest.mark.parametrize(
    ("post_norm", "returned", "expected"),
    [
        (
            True,
            lambda x: x,
            "return (output, normalised input) with apply_residual_connection_post_layernorm, got a tensor",
        ),
        (False, lambda x: (x, x), "return a tensor, got a tuple of 2"),
    ],
)
@pytest.mark.parametrize("name", ["self_attention", "inter_attention"])
def test_another_result_of_an_attention_is_refused(name: str, post_norm: bool, returned: Any, expected: str) -> None:
    module = layer("bshd", layer_type="decoder", apply_residual_connection_post_layernorm=post_norm)
    getattr(module, name).forward = lambda x, **options: returned(x)
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    with pytest.raises(InputError) as caught:
        module(x, encoder_output=x)
    assert str(caught.value) == f"{name} must {expected}"


def test_a_compiled_layer_with_another_feed_forward_block() -> None:
    module = layer("bshd")
    module.set_submodule("layernorm_mlp", nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64))
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))
