"""torch.export records models of Hugging Face Transformers for every batch, length and padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="the transformers library is not installed")

import transformers_models as models  # beside this file; it imports transformers

from undivided.integrations.transformers import register

pytestmark = pytest.mark.filterwarnings("ignore")  # of a library that is not ours

NAMES = ["llama", "mistral", "gemma-2", "gpt-oss", "llama-4", "bert"]


def exported(network: Any, **tensors: Tensor) -> Any:
    """The network as a graph of its outputs for every size of the batch and the sequence."""
    axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    constants = {} if network.config.model_type == "bert" else {"use_cache": False}
    shapes: dict[str, Any] = dict.fromkeys(tensors, axes) | dict.fromkeys(constants)
    return torch.export.export(network, (), tensors | constants, dynamic_shapes=shapes, strict=False).module()


@pytest.mark.parametrize("name", NAMES)
def test_exported_models_take_other_sizes_and_paddings(name: str) -> None:
    register()
    network = models.build(name, "undivided").eval()
    text, real = models.tokens(), models.real_tokens("left")
    constants = {} if name == "bert" else {"use_cache": False}
    with torch.no_grad():
        program = exported(network, input_ids=text, attention_mask=real)
        for rows, length, padding in ((2, text.shape[1], 0), (3, 9, 2), (2, 17, 5)):
            ids = text[:1, torch.arange(length) % text.shape[1]].expand(rows, length)
            mask = torch.ones_like(ids)
            mask[0, :padding] = 0
            mask[1, length - padding :] = 0
            found = program(input_ids=ids, attention_mask=mask, **constants)[0]
            expected = network(input_ids=ids, attention_mask=mask, **constants)[0]
            torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in {"gemma-2", "gpt-oss", "llama-4"})) for name in NAMES],
)
def test_exported_models_without_a_padding_mask(name: str) -> None:
    register()
    network = models.build(name, "undivided").eval()
    constants = {} if name == "bert" else {"use_cache": False}
    with torch.no_grad():
        program = exported(network, input_ids=models.tokens())
        ids = models.tokens()[:1, :5].expand(3, 5)
        found, expected = program(input_ids=ids, **constants)[0], network(input_ids=ids, **constants)[0]
    torch.testing.assert_close(found, expected)


class FirstOutput(torch.nn.Module):
    """The first output of a model, of its ids and its padding mask."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        constants = {} if self.network.config.model_type == "bert" else {"use_cache": False}
        found: Tensor = self.network(input_ids=ids, attention_mask=mask, **constants)[0]
        return found


def traced(network: Any, *inputs: Tensor) -> Any:
    """The network as a TorchScript program, for servers that run no Python."""
    return torch.jit.trace(FirstOutput(network), inputs, check_trace=False)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma-2", "llama-4", "bert", "modernbert"])
def test_traced_models_take_other_sizes_and_paddings(name: str) -> None:
    """Sizes are tensors while a graph is recorded, which the mask refused.

    In fp64, because a model's own rounding in fp32 is above the tolerance: up to 1.6e-5 of 5.5 with any attention.
    """
    register()
    network = models.build(name, "undivided").eval().double()
    with torch.no_grad():
        program = traced(network, models.tokens(), models.real_tokens("left"))
        for rows, length in ((3, 11), (2, 7), (3, 16)):
            ids, mask = models.tokens(rows, length, seed=1), models.real_tokens("right", rows, length)
            expected = network(input_ids=ids, attention_mask=mask)[0]
            torch.testing.assert_close(program(ids, mask)[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_traced_models_without_a_padding_mask(name: str) -> None:
    register()
    network = models.build(name, "undivided").eval()
    with torch.no_grad():
        program, ids = traced(network, models.tokens()), models.tokens(seed=1)
        torch.testing.assert_close(program(ids), network(input_ids=ids)[0])


@pytest.mark.parametrize("name", ["llama", "mistral", "llama-4"])
def test_models_on_the_meta_device_are_not_asked_for_their_padding(name: str) -> None:
    """As with eager; it is how a server finds the sizes of results before it has the weights."""
    register()
    network = models.build(name, "undivided").to("meta")
    text, real = models.tokens().to("meta"), models.real_tokens("left").to("meta")
    assert network(text, attention_mask=real).logits.shape == (3, 11, 50)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma-2", marks=pytest.mark.slow)])
def test_a_decoder_with_a_static_cache_is_exported(name: str) -> None:
    """As ExecuTorch does it: the position of the token is an input of the graph."""
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    register()
    network = models.build(name, "undivided").eval()
    sizes = {"batch_size": 1, "max_cache_len": 32}
    network.generation_config.update(cache_implementation="static", use_cache=True, cache_config=sizes)
    text = models.tokens()[:1]
    with torch.no_grad():
        expected = network(text, use_cache=False).logits
        module = TorchExportableModuleForDecoderOnlyLM(network, **sizes, device=torch.device("cpu"))
        step = module.export(input_ids=text[:, :1], cache_position=torch.tensor([0]), strict=False).module()
        steps = [step(input_ids=text[:, n : n + 1], cache_position=torch.tensor([n])) for n in range(text.shape[1])]
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=1e-4, atol=1e-5)
