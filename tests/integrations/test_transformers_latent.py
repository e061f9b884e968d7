"""Latent attention (MLA): the logits, gradients and tokens of the expanded layers, from the latents alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import undivided
from undivided import InputError

transformers = pytest.importorskip("transformers")
from undivided.integrations.transformers import register, use_latents  # noqa: E402
from undivided.integrations.transformers._names import cache_name  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
NAMES = ["DeepseekV2", "DeepseekV3", "Glm4MoeLite"]


def model_of(name: str, **sizes: int) -> Any:
    register()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.set_attn_implementation("undivided")
    return model


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 64, (2, 30), generator=generator)
    real = torch.ones(2, 30, dtype=torch.int64)
    real[1, :9] = 0  # padded on the left
    return tokens.masked_fill(real == 0, 0), real


def logits(model: Any) -> torch.Tensor:
    tokens, real = prompts()
    return model(tokens, attention_mask=real).logits[real.bool()]


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_tokens_are_those_of_the_expanded_layers(name: str) -> None:
    model = model_of(name)
    tokens, real = prompts()

    def results() -> tuple[torch.Tensor, torch.Tensor, Any]:
        with torch.no_grad():
            whole = logits(model)
            cache = {cache_name(model): transformers.DynamicCache()}
            model(tokens[:1, :29], **cache)
            step = model(tokens[:1, 29:], **cache).logits
            out = model.generate(tokens, attention_mask=real, max_new_tokens=12, do_sample=False, pad_token_id=0)
        return whole, step, out

    expected = results()
    assert use_latents(model) == 2
    found = results()
    assert (found[0] - expected[0]).abs().max() < 1e-5
    assert (found[1] - expected[1]).abs().max() < 1e-5
    assert torch.equal(found[2], expected[2])


@pytest.mark.parametrize("value_size", [24, 32])
def test_a_single_head_attends_to_latents_too(value_size: int) -> None:
    """Its results were left in the space of the latents, which has one head as well."""
    model = model_of("DeepseekV3", num_attention_heads=1, num_key_value_heads=1, v_head_dim=value_size)
    tokens, _ = prompts()

    def step() -> torch.Tensor:
        cache = {cache_name(model): transformers.DynamicCache()}
        with torch.no_grad():
            model(tokens[:1, :29], **cache)
            result: torch.Tensor = model(tokens[:1, 29:], **cache).logits
        return result

    expected = step()
    use_latents(model)
    assert (step() - expected).abs().max() < 1e-5


def test_a_step_reads_the_latents_once_for_all_heads() -> None:
    model = model_of("DeepseekV3")
    use_latents(model)
    cache = {cache_name(model): transformers.DynamicCache()}
    with torch.no_grad():
        model(prompts()[0], **cache)
        model(prompts()[0][:, :1], **cache)
    decision = undivided.last_decision()
    assert decision is not None
    assert (decision.problem.kv_heads, decision.problem.qk_dim, decision.problem.v_dim) == (1, 40, 32)


def test_many_new_tokens_are_expanded() -> None:
    model = model_of("DeepseekV3")
    use_latents(model)
    with torch.no_grad():
        model(torch.randint(1, 64, (1, 200)))
    decision = undivided.last_decision()
    assert decision is not None
    assert decision.problem.kv_heads == 8


def test_the_gradients_are_those_of_the_expanded_layers() -> None:
    model = model_of("DeepseekV3")

    def gradient() -> torch.Tensor:
        model.zero_grad()
        logits(model).square().sum().backward()
        return torch.cat([layer.self_attn.kv_b_proj.weight.grad.flatten() for layer in model.model.layers])

    expected = gradient()
    use_latents(model)
    assert (gradient() - expected).norm() < 1e-5 * expected.norm()


def test_another_implementation_still_works() -> None:
    model = model_of("DeepseekV3")
    with torch.no_grad():
        expected = logits(model)
        use_latents(model)
        model.set_attn_implementation("sdpa")
        assert (logits(model) - expected).abs().max() < 1e-5


def test_models_that_cannot_are_refused_and_unchanged() -> None:
    with pytest.raises(InputError, match="model must have layers with latent attention, got Linear"):
        use_latents(torch.nn.Linear(2, 2))
    model = model_of("DeepseekV3")
    last = model.model.layers[1].self_attn
    last.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(last.kv_b_proj.weight.shape[0]))
    with pytest.raises(InputError, match="kv_b_proj must have no bias"):
        use_latents(model)
    assert "expand_kv" not in vars(model.model.layers[0].self_attn)


class Adapted(torch.nn.Module):
    """A linear layer with an adapter of low rank, as those of peft."""

    bias = None

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.low = torch.nn.Linear(base.in_features, 4)
        self.high = torch.nn.Linear(4, base.out_features)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.high(self.low(x))
        return result


def test_adapters_of_the_projection_are_refused() -> None:
    """Steps multiplied by the weight without the adapter."""
    model = model_of("DeepseekV3")
    last = model.model.layers[1].self_attn
    plain = last.kv_b_proj
    last.kv_b_proj = Adapted(plain)
    with pytest.raises(InputError, match=r"kv_b_proj must multiply by its weight alone.*got Adapted"):
        use_latents(model)
    last.kv_b_proj = plain
    use_latents(model)
    last.kv_b_proj = Adapted(plain)
    with pytest.raises(InputError, match="merge_and_unload"), torch.no_grad():
        model(prompts()[0][:, :1])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_attend_to_their_own_latents(duplicate: Callable[[Any], Any]) -> None:
    """Its layers could not be pickled, so that it could be neither saved whole nor sent to a process."""
    model = model_of("DeepseekV3")
    use_latents(model)
    with torch.no_grad():
        expected = logits(model)
        copied = duplicate(model)
        for weight in model.parameters():
            weight.zero_()
        assert torch.equal(logits(copied), expected)
