"""Layers that share a mask run what the first of them has prepared, and get the results of calls by themselves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="the transformers library is not installed")

import transformers_models as models  # beside this file; it imports transformers
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, StaticCache

import undivided
from undivided import masks
from undivided.errors import InputError
from undivided.integrations.transformers import Cache, register
from undivided.integrations.transformers._attention import attention
from undivided.integrations.transformers._model_mask import ModelMask, Sizes
from undivided.integrations.transformers._patterns import Pattern
from undivided.run.replay import Prepared

pytestmark = pytest.mark.filterwarnings("ignore")  # of a library that is not ours

LAYER = nn.Module()
CAUSAL = masks.causal(align="bottom_right")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What layers prepare, in their order."""
    calls: list[object] = []
    of = Prepared.of

    def recording(*arguments: Any) -> Prepared | None:
        calls.append(call := of(*arguments))
        return call

    monkeypatch.setattr(Prepared, "of", recording)
    return calls


def model_mask(mask: masks.Mask = CAUSAL, q_len: int = 3) -> ModelMask:
    return ModelMask(mask, Pattern(), Sizes(1, q_len, 7), torch.device("cpu"))


def states(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 7, 16), torch.randn(1, 2, 7, 16)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def expected(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out: Tensor = undivided.attention(q, k, v, layout="bshd", mask=CAUSAL, **options)
    return out


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache, Cache], ids=["dynamic", "static", "undivided"])
@pytest.mark.parametrize(("name", "kinds_of_layers"), [("llama", 1), ("gemma-2", 2), ("mistral", 1)])
def test_a_step_prepares_one_call_for_each_kind_of_layer(
    name: str, kinds_of_layers: int, kind: Any, prepared: list[object]
) -> None:
    register()
    networks = [models.build(name, implementation) for implementation in ("eager", "undivided")]
    length = {"max_cache_len": 16} if kind is StaticCache else {}
    caches = [DynamicCache(config=networks[0].config), kind(config=networks[1].config, **length)]
    text = models.tokens()[:, :9]
    with torch.no_grad():
        for part in text.split((7, 1, 1), 1):
            prepared.clear()
            eager, ours = (
                network(part, past_key_values=cache).logits for network, cache in zip(networks, caches, strict=True)
            )
            torch.testing.assert_close(ours, eager, rtol=1.3e-6, atol=1e-5)
            assert len(prepared) == kinds_of_layers


@pytest.mark.parametrize(
    ("names", "options"),
    [
        ({"scaling": 0.1}, {"scale": 0.1}),
        ({"softcap": 2.0}, {"softcap": 2.0}),
        ({}, {"of": lambda q, k, v: (q, k, v[..., :8])}),
        ({}, {"of": lambda q, k, v: (q, k, v.mT.contiguous().mT)}),
        ({}, {"of": lambda *tensors: tuple(t.bfloat16() for t in tensors)}),
    ],
    ids=["scale", "softcap", "head size of values", "strides", "dtype"],
)
def test_a_layer_that_differs_is_prepared_by_itself(
    names: dict[str, Any], options: dict[str, Any], prepared: list[object]
) -> None:
    mask, options = model_mask(), dict(options)
    change = options.pop("of", lambda *tensors: tensors)
    with torch.no_grad():
        for _ in range(2):
            tensors = states()
            torch.testing.assert_close(attention(LAYER, *tensors, mask)[0], expected(*tensors), rtol=0, atol=0)
            tensors = change(*tensors)
            out = attention(LAYER, *tensors, mask, **names)[0]
            torch.testing.assert_close(out, expected(*tensors, **options), rtol=0, atol=0)
    assert len(prepared) == 2


def test_a_layer_under_another_policy_is_prepared_by_itself(prepared: list[object]) -> None:
    mask, tensors = model_mask(), states()
    with torch.no_grad():
        attention(LAYER, *tensors, mask)
        with undivided.use_backends("reference"):
            attention(LAYER, *tensors, mask)
            decision = undivided.last_decision()
    assert len(prepared) == 2
    assert decision is not None
    assert decision.backend.name == "reference"


def test_the_last_decision_is_that_of_the_last_layer(prepared: list[object]) -> None:
    mask, tensors = model_mask(), states()
    with torch.no_grad():
        attention(LAYER, *tensors, mask)
        undivided.attention(*tensors, layout="bhsd", backend="reference")
        attention(LAYER, *tensors, mask)
    decision = undivided.last_decision()
    assert len(prepared) == 1
    assert decision is not None
    assert decision.backend.name != "reference"


def flops(mask: ModelMask, *tensors: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        out = attention(LAYER, *tensors, mask)[0]
    assert counter.get_total_flops() > 0
    return out


def autocast(mask: ModelMask, *tensors: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(LAYER, *tensors, mask)[0]
    assert out.dtype == torch.bfloat16
    return out


def weights(mask: ModelMask, *tensors: Tensor) -> Tensor:
    out, found = attention(LAYER, *tensors, mask, output_attentions=True)
    assert found is not None
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 4, 3))
    return out


def vmap(mask: ModelMask, *tensors: Tensor) -> Tensor:
    return torch.vmap(lambda *t: attention(LAYER, *t, mask)[0])(*(t[None] for t in tensors))[0]


def gradients(mask: ModelMask, *tensors: Tensor) -> Tensor:
    with torch.enable_grad():
        q = tensors[0].clone().requires_grad_()
        out = attention(LAYER, q, *tensors[1:], mask)[0]
        out.sum().backward()
    assert q.grad is not None
    return out.detach()


@pytest.mark.parametrize("call", [flops, autocast, weights, vmap, gradients])
def test_calls_that_something_else_sees_are_prepared_as_usual(call: Callable[..., Tensor]) -> None:
    mask, tensors = model_mask(), states()
    with torch.no_grad():
        attention(LAYER, *tensors, mask)
        out = call(mask, *tensors)
        tolerance = {"rtol": 0.02, "atol": 0.02} if call is autocast else {"rtol": 1.3e-6, "atol": 1e-5}
        torch.testing.assert_close(out.float(), expected(*tensors), **tolerance)


def test_a_mask_of_single_pairs_is_no_range() -> None:
    pairs, tensors = torch.rand(1, 1, 3, 7) < 0.5, states()
    mask = model_mask(masks.dense(pairs))
    with torch.no_grad():
        for _ in range(2):
            out = attention(LAYER, *tensors, mask)[0]
            ours = undivided.attention(*tensors, layout="bhsd", mask=masks.dense(pairs)).transpose(1, 2)
            torch.testing.assert_close(out, ours, rtol=0, atol=0)


def test_a_mask_of_other_sizes_is_refused_also_after_one_that_fits() -> None:
    mask, (q, k, v) = model_mask(), states()
    with torch.no_grad():
        attention(LAYER, q, k, v, mask)
        with pytest.raises(InputError, match="be for 2 queries and 7 keys, as this layer has"):
            attention(LAYER, q[:, :, :2], k, v, mask)


def test_copies_of_a_mask_prepare_their_own_calls(prepared: list[object]) -> None:
    mask, tensors = model_mask(), states()
    with torch.no_grad():
        attention(LAYER, *tensors, mask)
        for other in (copy.deepcopy(mask), copy.copy(mask), pickle.loads(pickle.dumps(mask))):
            torch.testing.assert_close(attention(LAYER, *tensors, other)[0], expected(*tensors), rtol=0, atol=0)
    assert len(prepared) == 4
