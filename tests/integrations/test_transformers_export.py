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


@pytest.mark.parametrize("name", NAMES)
def test_exported_models_without_a_padding_mask(name: str) -> None:
    register()
    network = models.build(name, "undivided").eval()
    constants = {} if name == "bert" else {"use_cache": False}
    with torch.no_grad():
        program = exported(network, input_ids=models.tokens())
        ids = models.tokens()[:1, :5].expand(3, 5)
        found, expected = program(input_ids=ids, **constants)[0], network(input_ids=ids, **constants)[0]
    torch.testing.assert_close(found, expected)
