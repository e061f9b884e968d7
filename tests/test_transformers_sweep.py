"""Architectures of Hugging Face Transformers, tiny and with random weights, give eager's outputs and gradients.

A selection: one of each family, and all that once failed. The whole table is `docs/reference/hugging-face.md`.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")

from undivided.integrations.transformers import _attention, register
from undivided.integrations.transformers.sweep import Outcome, __main__, _compare, _inputs, _models, _table, compare

pytestmark = pytest.mark.filterwarnings("ignore")  # of a library that is not ours

TEXT = (
    "bert gpt2 opt gpt_neox llama mixtral qwen3_moe gemma2 gemma3_text cohere2 deepseek_v3 deepseek_v32 phi3 olmo2 "
    "modernbert diffllama jamba qwen3_next llama4_text granite_swa gpt_oss bart t5 mbart blenderbot splinter"
).split()
COMPUTING = (
    "gemma4 gemma4_unified lfm2_vl lightglue pp_doclayout_v2 doge lasr_encoder hy_v4 inkling2 minimax_m3_vl_text "
    "siglip2_vision_model bigbird_pegasus"
).split()
"""They slice, reshape, join or add their mask, or choose keys."""
OTHERS = "vit clip clipseg aimv2 siglip dinov2 swin whisper wav2vec2 qwen2_vl gemma4_vision mobilebert".split()
EXPECTED = {"granite_swa": {"weights": "differs"}}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*TEXT, *COMPUTING, *OTHERS])
def test_an_architecture_is_equal_in_every_case(model_type: str) -> None:
    register()
    found = compare(model_type)
    states = {case: EXPECTED.get(model_type, {}).get(case, "equal") for case in found}
    assert {case: outcome.state for case, outcome in found.items()} == states, found
    assert "none" in found
    if model_type in TEXT:
        assert {"right", "left"} <= found.keys()
