"""The layers of a step over a cache share the rotation of its tokens, as long as it is the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from undivided import InferenceParams
from undivided.nn import MultiheadAttention, RotaryPositionEmbedding
from undivided.nn.rotary import in_attention

ROPE = RotaryPositionEmbedding(16)
LAYERS = 3


@pytest.fixture
def rotations(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The angles from which a rotation was computed, in their order."""
    used: list[Tensor] = []
    compute = in_attention.compute_rotation

    def recording(t: Tensor, freqs: Tensor, *rest: Any) -> Any:
        used.append(freqs)
        return compute(t, freqs, *rest)

    monkeypatch.setattr(in_attention, "compute_rotation", recording)
    return used


def model(**options: Any) -> list[MultiheadAttention]:
    torch.manual_seed(0)
    common: dict[str, Any] = {"qkv_format": "bshd", "attention_dropout": 0.0, "attn_mask_type": "causal"}
    layers = [MultiheadAttention(64, 4, 16, layer_number=n + 1, **common, **options) for n in range(LAYERS)]
    return [layer.eval() for layer in layers]


def cache() -> InferenceParams:
    return InferenceParams(2, 64, num_heads_kv=4, head_dim_k=16, dtype=torch.float32)


def run(layers: list[MultiheadAttention], x: Tensor, params: InferenceParams | None, angles: list[Any]) -> Tensor:
    for layer, freqs in zip(layers, angles, strict=True):
        x = layer(x, rotary_pos_emb=freqs, inference_params=params)
    return x


@pytest.mark.parametrize("length", [64, 1024], ids=["small angles", "large angles"])
def test_a_step_computes_one_rotation(length: int, rotations: list[Tensor]) -> None:
    layers, angles, params = model(), ROPE(length), cache()
    x = torch.randn(2, 12, 64)
    with torch.no_grad():
        expected = run(layers, x, None, [angles] * LAYERS)
        rotations.clear()
        for start, stop in ((0, 10), (10, 11), (11, 12)):
            params.pre_step({"a": stop - start, "b": stop - start})
            out = run(layers, x[:, start:stop], params, [angles] * LAYERS)
            torch.testing.assert_close(out, expected[:, start:stop], rtol=1.3e-6, atol=1e-5)
    assert len(rotations) == 3


def test_layers_with_other_angles_have_their_own(rotations: list[Tensor]) -> None:
    local, own = RotaryPositionEmbedding(16, rotary_base=100.0)(1024), ROPE(1024)
    layers, params, x = model(), cache(), torch.randn(2, 8, 64)
    angles = [own, local, own]
    with torch.no_grad():
        expected = run(layers, x, None, angles)
        rotations.clear()
        params.pre_step({"a": 8, "b": 8})
        torch.testing.assert_close(run(layers, x, params, angles), expected, rtol=1.3e-6, atol=1e-5)
    assert len(rotations) == 2


def test_angles_for_queries_and_keys(rotations: list[Tensor]) -> None:
    pair = ROPE(1024), RotaryPositionEmbedding(16, rotary_base=100.0)(1024)
    layers, params, x = model(), cache(), torch.randn(2, 8, 64)
    with torch.no_grad():
        expected = run(layers, x, None, [pair] * LAYERS)
        rotations.clear()
        params.pre_step({"a": 8, "b": 8})
        torch.testing.assert_close(run(layers, x, params, [pair] * LAYERS), expected, rtol=1.3e-6, atol=1e-5)
    assert len(rotations) == 2


@pytest.mark.parametrize("length", [64, 1024], ids=["small angles", "large angles"])
def test_angles_that_change_between_layers_are_read_again(length: int, rotations: list[Tensor]) -> None:
    angles, layers, params, x = ROPE(length), model()[:2], cache(), torch.randn(2, 8, 64)
    with torch.no_grad():
        first = run(layers[:1], x, None, [angles])
        expected = run(layers[1:], first, None, [angles * 2])
        rotations.clear()
        params.pre_step({"a": 8, "b": 8})
        first = run(layers[:1], x, params, [angles])
        angles *= 2
        torch.testing.assert_close(run(layers[1:], first, params, [angles]), expected, rtol=1.3e-6, atol=1e-5)
    assert len(rotations) == 2


def test_large_angles_without_a_version_are_read_by_every_layer(rotations: list[Tensor]) -> None:
    with torch.inference_mode():
        angles, params = ROPE(1024), cache()
        params.pre_step({"a": 8, "b": 8})
        run(model(), torch.randn(2, 8, 64), params, [angles] * LAYERS)
    assert len(rotations) == LAYERS


def test_a_copy_within_a_step_has_no_angles_of_the_original() -> None:
    """The copy keeps another tensor, whose place in memory new angles may take."""
    layers, params, x, angles = model()[:2], cache(), torch.randn(2, 8, 64), ROPE(1024)
    with torch.no_grad():
        params.pre_step({"a": 8, "b": 8})
        first = run(layers[:1], x, params, [angles])
        other = copy.deepcopy(params)
        assert other._noted is not None
        computed = other._noted[1].computed
        ((name, _), entry) = next(iter(computed.items()))
        assert entry[0] is not angles
        expected = run(layers[1:], first, None, [angles * 2])
        twice = angles * 2
        computed[name, id(twice)] = entry
        torch.testing.assert_close(run(layers[1:], first, other, [twice]), expected, rtol=1.3e-6, atol=1e-5)
