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
from transformers import DynamicCache, StaticCache, masking_utils

import undivided
from undivided import masks
from undivided.errors import InputError
from undivided.integrations.transformers import Cache, _repeated, model_mask, register
from undivided.integrations.transformers._attention import attention
from undivided.integrations.transformers._model_mask import MaskSizes, ModelMask
from undivided.integrations.transformers._patterns import Pattern
from undivided.run.replay import PreparedCall

pytestmark = pytest.mark.filterwarnings("ignore")  # of a library that is not ours

LAYER = nn.Module()
CAUSAL = masks.causal(align="bottom_right")


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What layers prepare, in their order; what earlier tests have prepared is forgotten."""
    calls: list[object] = []
    prepare = PreparedCall.prepare

    def recording(*arguments: Any) -> PreparedCall | None:
        calls.append(call := prepare(*arguments))
        return call

    monkeypatch.setattr(PreparedCall, "prepare", recording)
    monkeypatch.setattr(_repeated, "_steps", {})
    return calls


def mask_of(mask: masks.Mask = CAUSAL, q_len: int = 3) -> ModelMask:
    return ModelMask(mask, Pattern(), MaskSizes(1, q_len, 7), torch.device("cpu"))


def step(
    length: int, padding: Tensor | None = None, left: int | None = None, kv_len: int | None = None, batch: int = 3
) -> ModelMask:
    """The mask of a step of decoding with so many tokens, among so many keys, if a cache has more."""
    window = None if left is None else masking_utils.sliding_window_causal_mask_function(left + 1)
    causal = window or masking_utils.causal_mask_function
    return model_mask(batch, 1, kv_len or length, length - 1, mask_function=causal, attention_mask=padding)


def new_states(
    kv_len: int, dtype: torch.dtype = torch.float32, batch: int = 3, v_dim: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(batch, 4, 1, 16), torch.randn(batch, 2, kv_len, 16), torch.randn(batch, 2, kv_len, v_dim)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def by_itself(mask: ModelMask, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """The output of a layer whose mask is dense, so that nothing is prepared for it."""
    dense = masks.dense(mask.to_dense())
    return undivided.attention(q, k, v, layout="bhsd", mask=dense, sinks=sinks).transpose(1, 2)


def states(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 7, 16), torch.randn(1, 2, 7, 16)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def expected(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out: Tensor = undivided.attention(q, k, v, layout="bshd", mask=CAUSAL, **options)
    return out


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache, Cache], ids=["dynamic", "static", "undivided"])
@pytest.mark.parametrize(("name", "kinds_of_layers"), [("llama", 1), ("gemma-2", 2), ("mistral", 1), ("gpt-oss", 2)])
def test_a_step_prepares_one_call_for_each_kind_of_layer(
    name: str, kinds_of_layers: int, kind: Any, prepared: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def recording(*arguments: Any) -> PreparedCall | None:
        prepared.append(call := with_keys(*arguments))
        return call

    with_keys = PreparedCall.with_keys
    monkeypatch.setattr(PreparedCall, "with_keys", recording)
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
    mask, options = mask_of(), dict(options)
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
    mask, tensors = mask_of(), states()
    with torch.no_grad():
        attention(LAYER, *tensors, mask)
        with undivided.use_backends("reference"):
            attention(LAYER, *tensors, mask)
            decision = undivided.last_decision()
    assert len(prepared) == 2
    assert decision is not None
    assert decision.backend.name == "reference"


def test_the_last_decision_is_that_of_the_last_layer(prepared: list[object]) -> None:
    mask, tensors = mask_of(), states()
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


def negated(mask: ModelMask, *tensors: Tensor) -> Tensor:
    """The numbers at the pointers of keys and values are not theirs."""
    q, k, v = tensors
    return attention(LAYER, q, torch._neg_view(-k), torch._neg_view(-v), mask)[0]


@pytest.mark.parametrize("call", [flops, autocast, weights, vmap, gradients, negated])
def test_calls_that_something_else_sees_are_prepared_as_usual(call: Callable[..., Tensor]) -> None:
    mask, tensors = mask_of(), states()
    with torch.no_grad():
        attention(LAYER, *tensors, mask)
        out = call(mask, *tensors)
        tolerance = {"rtol": 0.02, "atol": 0.02} if call is autocast else {"rtol": 1.3e-6, "atol": 1e-5}
        torch.testing.assert_close(out.float(), expected(*tensors), **tolerance)


def test_a_mask_of_single_pairs_is_no_range() -> None:
    pairs, tensors = torch.rand(1, 1, 3, 7) < 0.5, states()
    mask = mask_of(masks.dense(pairs))
    with torch.no_grad():
        for _ in range(2):
            out = attention(LAYER, *tensors, mask)[0]
            ours = undivided.attention(*tensors, layout="bhsd", mask=masks.dense(pairs)).transpose(1, 2)
            torch.testing.assert_close(out, ours, rtol=0, atol=0)


def test_a_mask_of_other_sizes_is_refused_also_after_one_that_fits() -> None:
    mask, (q, k, v) = mask_of(), states()
    with torch.no_grad():
        attention(LAYER, q, k, v, mask)
        with pytest.raises(InputError, match="be for 2 queries and 7 keys, as this layer has"):
            attention(LAYER, q[:, :, :2], k, v, mask)


@pytest.mark.parametrize("place", range(3))
def test_nested_tensors_after_dense_ones_are_refused(place: int) -> None:
    mask, states = mask_of(), [torch.randn(1, 2, n, 16) for n in (3, 7, 7)]
    attention(LAYER, *states, mask)
    states[place] = torch.nested.nested_tensor(list(states[place]))
    with pytest.raises(InputError, match="got a nested tensor"):
        attention(LAYER, *states, mask)


def test_copies_of_a_mask_prepare_their_own_calls(prepared: list[object]) -> None:
    mask, tensors = mask_of(), states()
    with torch.no_grad():
        attention(LAYER, *tensors, mask)
        for other in (copy.deepcopy(mask), copy.copy(mask), pickle.loads(pickle.dumps(mask))):
            torch.testing.assert_close(attention(LAYER, *tensors, other)[0], expected(*tensors), rtol=0, atol=0)
    assert len(prepared) == 4


LEFT = [4, 0, 9]  # padding in front of each sequence


def left_padding(length: int) -> Tensor:
    return torch.arange(length) >= torch.tensor(LEFT)[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("window", [None, 12], ids=["causal", "window"])
@pytest.mark.parametrize("is_padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kv_len", [None, 70], ids=["growing", "fixed"])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["no-sinks", "sinks"])
def test_steps_of_decoding_run_what_an_earlier_one_has_prepared(
    has_sinks: bool, kv_len: int | None, is_padded: bool, window: int | None, dtype: torch.dtype, prepared: list[object]
) -> None:
    """The keys lie elsewhere in each step, and their memory is that of the step before if the allocator likes."""
    register()
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    with torch.no_grad():
        for length in range(33, 65):
            mask = step(length, left_padding(length) if is_padded else None, window, kv_len)
            for v_dim in (16, 8):
                tensors = new_states(kv_len or length, dtype, v_dim=v_dim)
                sinks = torch.randn(4).to(dtype) if has_sinks else None
                out = attention(LAYER, *tensors, mask, s_aux=sinks)[0]
                found = undivided.last_decision()
                right = by_itself(mask, *tensors, sinks=sinks)
                torch.testing.assert_close(out, right, rtol=tolerance, atol=tolerance)
                assert found is not None
                assert found.problem.kv_len == (kv_len or length)
    if found.backend.name == "native" and dtype != torch.float64:
        assert len(prepared) == 2 * (1 if kv_len else 6)  # classes of the number of keys: see `length_class`


def test_a_step_after_the_padding_was_changed_in_place_sees_the_new_values() -> None:
    register()
    padding, tensors = left_padding(40), new_states(40)
    with torch.no_grad():
        for start in (3, 0, 20, 7):
            padding[:] = torch.arange(40) >= start
            out = attention(LAYER, *tensors, step(40, padding))[0]
            q, k, v = tensors
            torch.testing.assert_close(out, by_itself(step(40), q, k, v) if not start else alone(start, q, k, v))


def alone(start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return undivided.attention(q, k[:, :, start:], v[:, :, start:], layout="bhsd").transpose(1, 2)


def test_a_mask_keeps_the_values_that_its_padding_had() -> None:
    register()
    padding, (q, k, v) = left_padding(40), new_states(40)
    padding[:] = torch.arange(40) >= 6
    mask = step(40, padding)
    padding.zero_()
    with torch.no_grad():
        torch.testing.assert_close(attention(LAYER, q, k, v, mask)[0], alone(6, q, k, v))
    assert mask.mask.to_dense(3, 1, 1, 40).sum() == 3 * 34


@pytest.mark.parametrize("real", ["holes", "no key", "strided", "numbers"])
def test_steps_whose_real_keys_are_no_simple_range(real: str) -> None:
    register()
    padding = left_padding(40)
    if real == "holes":
        padding[1, 5:7] = False
    elif real == "no key":
        padding[2] = False
    elif real == "strided":
        padding = padding.repeat_interleave(2, 1)[:, ::2]
    tensors = new_states(40)
    with torch.no_grad():
        for _ in range(2):
            mask = step(40, padding.long() if real == "numbers" else padding)
            assert torch.equal(mask.to_dense()[:, 0, 0], padding)
            torch.testing.assert_close(attention(LAYER, *tensors, mask)[0], by_itself(mask, *tensors))


def test_a_step_with_keys_of_another_batch_or_whose_memory_is_gone_is_refused() -> None:
    register()
    q, k, v = new_states(40)
    with torch.no_grad():
        for length in (39, 40):
            attention(LAYER, *new_states(length), step(length, left_padding(length)))
        with pytest.raises(InputError, match="batch"):
            attention(LAYER, *(t[:2] for t in (q, k, v)), step(40, left_padding(40)))
        with pytest.raises(InputError, match="k must have the batch size"):
            attention(LAYER, q, k[:2], v, step(40, left_padding(40)))
        mask = step(40, left_padding(40))
        attention(LAYER, q, k, v, mask)
        k.untyped_storage().resize_(8)
        for again in (mask, step(40, left_padding(40))):
            with pytest.raises(RuntimeError, match="storage"):  # PyTorch's, because a layer transposes its keys
                attention(LAYER, q, k, v, again)


def test_the_mask_of_a_step_in_a_compiled_layer() -> None:
    register()
    torch.compiler.reset()
    compiled = torch.compile(lambda q, k, v, mask: attention(LAYER, q, k, v, mask)[0], backend="eager")
    with torch.no_grad():
        for length in (40, 41, 44):
            mask, tensors = step(length, left_padding(length)), new_states(length)
            torch.testing.assert_close(compiled(*tensors, mask), by_itself(mask, *tensors))
    torch.compiler.reset()


def test_copies_of_the_mask_of_a_step() -> None:
    register()
    mask, tensors = step(40, left_padding(40)), new_states(40)
    with torch.no_grad():
        for other in (copy.deepcopy(mask), copy.copy(mask), pickle.loads(pickle.dumps(mask))):
            torch.testing.assert_close(attention(LAYER, *tensors, other)[0], by_itself(mask, *tensors))
