"""Architectures of Hugging Face Transformers, tiny and with random weights, give eager's outputs and gradients.

A selection: one of each family, and all that once failed. The whole table is `docs/reference/hugging-face.md`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from undivided.integrations.transformers import _attention, _weights, register
from undivided.integrations.transformers.sweep import (
    ModelOutcome,
    __main__,
    _compare,
    _inputs,
    _models,
    _table,
    compare,
)

transformers = pytest.importorskip("transformers", reason="the transformers library is not installed")
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


def test_the_comparison_detects_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: for attention that is one thousandth too large, missing weights, and an error."""
    register()
    ours = _weights.attend
    monkeypatch.setattr(_attention, "repeated", lambda *args: None)
    monkeypatch.setattr(_weights, "attend", lambda *args, **options: 1.001 * ours(*args, **options))
    found = compare("llama")
    assert {outcome.state for outcome in found.values()} == {"differs"}
    assert all("of its norm" in outcome.detail for outcome in found.values())
    monkeypatch.setattr(_weights, "attend", ours)
    monkeypatch.setattr(_attention, "collects_weights", lambda module: False)
    assert compare("gpt2")["weights"] == ModelOutcome("differs", "other results: ['attentions[0]', 'attentions[1]']")

    def refuse(*args: Any, **options: Any) -> Any:
        raise ValueError("not today")

    monkeypatch.setattr(_weights, "attend", refuse)
    assert compare("llama")["none"] == ModelOutcome("fails", "ValueError: not today")


def test_attention_that_never_ran_does_not_count() -> None:
    register()
    assert {outcome.state for outcome in compare("bloom").values()} == {"unused"}
    assert compare("layoutxlm") == {"": ModelOutcome("unbuilt", "there is no module modeling_layoutxlm")}


def test_amplified_rounding_is_distinguished_from_an_error() -> None:
    expected = {"out": torch.ones(10), "grad a": torch.ones(10), "grad b": torch.zeros(10)}
    off = {name: tensor + 1e-3 for name, tensor in expected.items()}
    assert _compare.difference(expected, expected, 1e-9) == ""
    assert _compare.difference(off, expected, 2e-2) == "grad b: 3.2e+27 of its norm"
    assert "out: 1.0e-03" in _compare.difference({**expected, "out": off["out"]}, expected, 1e-4)
    assert _compare.difference({**expected, "out": off["out"]}, expected, 2e-3) == ""
    assert "other results" in _compare.difference({}, expected, 1)
    assert "shape [2] instead of [10]" in _compare.difference({**expected, "out": torch.ones(2)}, expected, 1)
    assert _compare.difference({**expected, "out": torch.full((10,), torch.nan)}, expected, 1)


def test_padding_of_the_texts() -> None:
    assert _inputs.real_tokens("none") is None
    right, left = _inputs.real_tokens("right"), _inputs.real_tokens("left")
    assert right is not None
    assert left is not None
    assert right.sum(1).tolist() == left.sum(1).tolist() == [11, 7, 10]
    assert torch.equal(right.flip(1), left)


def test_the_page_counts_and_explains(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    """The command compares the architectures that are named and writes a page about them."""
    path = tmp_path / "page.md"
    __main__.main(["llama", "granite_swa", "bloom", "layoutxlm", "git", "--write", str(path)])
    text = path.read_text()
    assert "| equal in all their cases | 1 |" in text
    assert "| not equal in some case | 2 |" in text
    assert "Cases that ran on Undivided: 15, of which 9 are equal." in text
    assert "| `granite_swa` | weights: `eager` returns the weights before the sinks take their share" in text
    assert "| `git` | none, right, left, packed, weights: transformers picks its attention class from a table" in text
    assert "| `layoutxlm` | there is no module modeling_layoutxlm |" in text
    assert "## Not running on Undivided" in text
    printed = capsys.readouterr().out
    assert printed.startswith("llama: none equal, right equal, left equal, packed equal, weights equal")
    assert "Cases that ran on Undivided: 15" in printed


@pytest.mark.parametrize("model_type", ["llama", "clip", "qwen2_vl"])
def test_tiny_configurations_are_small_all_through(model_type: str) -> None:
    config = _models.tiny_config(transformers.AutoConfig.for_model(model_type).__class__, _models.VARIANTS[0])
    for one in (config, *(getattr(config, name) for name in config.sub_configs)):
        assert getattr(one, "hidden_size", 0) <= 32
        assert getattr(one, "num_hidden_layers", 0) <= 2
        assert getattr(one, "vocab_size", 0) <= 99


def test_equal_kinds_come_before_the_worst() -> None:
    assert _table.kind({"none": ModelOutcome("equal"), "left": ModelOutcome("differs")}) == "unequal"
    assert _table.kind({"none": ModelOutcome("unused"), "left": ModelOutcome("equal")}) == "equal"
    assert _table.kind({"none": ModelOutcome("unused")}) == "unused"
    assert _table.kind({"": ModelOutcome("unbuilt")}) == "unbuilt"
