"""`Cache`: the stand-in for DynamicCache, plain and quantised, in generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import undivided
from undivided import InputError
from undivided.quantization import FORMATS

transformers = pytest.importorskip("transformers")
from undivided.integrations.transformers import Cache, register  # noqa: E402
from undivided.integrations.transformers._names import cache_name  # noqa: E402

NAMES = ["Llama", "Qwen3", "Gemma3"]


def model_of(name: str, implementation: str = "undivided") -> Any:
    register()
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "eos_token_id": None}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": 0}
    if name == "Gemma3":
        sizes |= {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    config = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.set_attn_implementation(implementation)
    return model


def prompts() -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 64, (2, 21), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(tokens)
    real[1, :6] = 0
    return {"input_ids": tokens.masked_fill(real == 0, 0), "attention_mask": real}


def generate(model: Any, cache: Any, **options: Any) -> Any:
    settings = {"max_new_tokens": 14, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**prompts(), **{cache_name(model): cache}, **settings, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("implementation", ["undivided", "eager"])
def test_the_plain_cache_gives_the_tokens_of_dynamic_cache(name: str, implementation: str) -> None:
    model = model_of(name, implementation)
    expected = generate(model, transformers.DynamicCache(config=model.config))
    found = generate(model, Cache(config=model.config))
    assert torch.equal(found.sequences, expected.sequences)
    assert (torch.stack(found.logits) - torch.stack(expected.logits)).abs().max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("format", FORMATS)
def test_quantised_logits_are_near_those_of_the_plain_cache(name: str, format: str) -> None:
    model = model_of(name)
    expected = generate(model, Cache(config=model.config))
    cache = Cache(config=model.config, quantize=format)
    found = generate(model, cache)
    first = [result.logits[0] for result in (found, expected)]
    error = (first[0] - first[1]).norm() / first[1].norm()
    assert 0 < error < {"int8": 0.02, "fp8_e4m3": 0.08, "fp8_e5m2": 0.15, "int4": 0.2}[format]
    assert cache.memory.values + cache.memory.scales < 0.6 * cache.memory.bfloat16
    decision = undivided.last_decision()
    assert decision is not None
    assert decision.problem.quantized == format  # read in place


def test_eager_attention_reads_a_quantised_cache_too() -> None:
    plain = generate(model_of("Llama"), Cache(quantize="int8"))
    eager = generate(model_of("Llama", "eager"), Cache(quantize="int8"))
    assert (torch.stack(plain.logits) - torch.stack(eager.logits)).abs().max() < 1e-4


def test_beams_are_reordered() -> None:
    model = model_of("Llama")
    expected = model.generate(**prompts(), max_new_tokens=10, num_beams=3, do_sample=False)
    cache = {cache_name(model): Cache()}
    found = model.generate(**prompts(), max_new_tokens=10, num_beams=3, do_sample=False, **cache)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("rows", [[1], [1, 0, 1], [1, 0]])
def test_reordering_gives_the_batch_of_its_index(rows: list[int], quantize: str | None) -> None:
    states = torch.arange(1.0, 3.0)[:, None, None, None].expand(2, 1, 3, 4)
    cache = Cache(quantize=quantize)
    cache.update(states, states, 0)
    cache.reorder_cache(torch.tensor(rows))
    torch.testing.assert_close(cache.layers[0].keys[:, 0, 0, 0], torch.tensor(rows) + 1.0)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_prompt_under_autocast_goes_on_without(quantize: str | None) -> None:
    """The next token was refused, because the cache had the dtype of autocast."""
    model, tokens = model_of("Llama"), prompts()["input_ids"]
    caches: list[Any] = [transformers.DynamicCache(), Cache(quantize=quantize)]
    logits = []
    with torch.no_grad():
        for cache in caches:
            with torch.autocast("cpu", torch.bfloat16):
                model(tokens, **{cache_name(model): cache})
            logits.append(model(tokens[:, :3], **{cache_name(model): cache}).logits)
    assert logits[1].dtype == caches[1].layers[0].keys.dtype == torch.float32
    assert (logits[1] - logits[0]).abs().max() < (1e-4 if quantize is None else 0.2)


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("beams", [1, 3])
def test_models_with_an_encoder_that_build_their_cross_attention_cache(beams: int, quantize: str | None) -> None:
    """T5Gemma builds one of the class that it got, with the keywords of DynamicCache."""
    register()
    part = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    part |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 8, "eos_token_id": None}
    config = transformers.T5GemmaConfig(encoder=part, decoder=part, vocab_size=64, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    model = transformers.T5GemmaForConditionalGeneration(config).eval()
    model.set_attn_implementation("undivided")
    options = {"max_new_tokens": 14, "num_beams": beams, "do_sample": False, "decoder_start_token_id": 1}
    expected = model.generate(**prompts(), **options)
    caches = Cache(config=config, quantize=quantize), Cache(quantize=quantize)
    cache = transformers.EncoderDecoderCache(*caches)
    found = model.generate(**prompts(), **options, **{cache_name(model): cache})
    assert found.shape == expected.shape
    assert quantize is not None or torch.equal(found, expected)
    assert caches[0].get_seq_length() == 14


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_refused_crop_changes_no_layer(quantize: str | None) -> None:
    """The full layer before the one that refuses had lost its tokens, and the next logits were wrong."""
    cache = Cache(config=model_of("Gemma3").config, quantize=quantize)
    cache.layers[:] = cache.layers[1:]  # the full layer first
    keys = torch.randn(1, 2, 12, 32)
    states = [cache.update(keys, keys, layer) for layer in range(2)]
    with pytest.raises(InputError, match="crop must be called while past tokens are recorded"):
        cache.crop(-2)
    assert [layer.get_seq_length() for layer in cache.layers] == [12, 12]
    assert states[0][0].shape[2] == 12


def test_wrong_formats_are_refused() -> None:
    with pytest.raises(InputError, match="quantize must be one of"):
        Cache(quantize="int2")
    with pytest.raises(InputError, match="offloading must be False"):
        Cache(offloading=True)
    states, stored = torch.randn(1, 1, 2, 4), Cache()
    stored.update(states, states, 0)
    for method in ("offload", "prefetch"):
        with pytest.raises(InputError, match=f"{method} must not be called"):
            getattr(stored.layers[0], method)()
    model = model_of("Llama")
    cache = {cache_name(model): Cache(quantize="int8")}
    with pytest.raises(InputError, match="require"):
        model(**prompts(), **cache)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_compiled_model_has_the_cache_in_its_graphs(quantize: str | None) -> None:
    """Each layer left its graph to look at storages; only the mask does, as with a DynamicCache."""
    model = model_of("Llama")
    name, tokens = cache_name(model), torch.randint(1, 64, (2, 95), generator=torch.Generator().manual_seed(1))

    def logits(network: Any) -> list[torch.Tensor]:
        cache = Cache(quantize=quantize)
        pieces = tokens.split([21, 1, 73], dim=1)  # the memory grows for the last one
        return [network(piece, **{name: cache}).logits for piece in pieces]

    with torch.no_grad():
        expected, breaks = logits(model), []
        for cache in (transformers.DynamicCache(), Cache(quantize=quantize)):
            torch._dynamo.reset()
            breaks.append(torch._dynamo.explain(model)(tokens, **{name: cache}).graph_break_count)
        torch._dynamo.reset()
        found = logits(torch.compile(model, backend="eager"))
    torch._dynamo.reset()
    assert breaks[0] == breaks[1]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ((2, 5, 4, 8), "key_states.permute(0, 2, 1, 3), if its axes are 'bshd'"),
        ((5, 2, 4, 8), "key_states.permute(1, 2, 0, 3), if its axes are 'sbhd'"),
        ((2, 2, 5, 8), None),
    ],
)
def test_states_of_another_shape_are_refused_without_arguments_of_other_caches(
    shape: tuple[int, ...], hint: str | None
) -> None:
    cache = Cache()
    cache.update(*[torch.randn(2, 4, 5, 8)] * 2, 0)
    with pytest.raises(InputError, match=r"key_states must have shape \[2, 4, new, 8\]") as caught:
        cache.update(*[torch.randn(shape)] * 2, 0)
    assert caught.value.hint == hint
