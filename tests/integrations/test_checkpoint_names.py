"""Parameters of transformers and of TransformerEngine in undivided's layers, and back, by one table of names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from undivided import InputError, MultiheadAttention, RotaryPositionEmbedding, TransformerLayer
from undivided.integrations.checkpoints import NAMES, from_hugging_face, from_transformer_engine, to_hugging_face

HIDDEN, FEATURES, HEADS, GROUPS, SIZE, VOCABULARY = 48, 80, 4, 2, 16, 61
NAMED = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FEATURES,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": SIZE,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}
CONFIGURATIONS = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama with biases": transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen 2": transformers.Qwen2Config(**{**SIZES, "head_dim": HIDDEN // HEADS}),
    "qwen 3": transformers.Qwen3Config(**SIZES),
    "qwen 3, tied": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
}
FUSED: dict[str, dict[str, bool]] = {
    "a weight each": {},
    "one weight": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "one weight, interleaved": {"fuse_qkv_params": True},
}


class Model(nn.Module):
    """A decoder of undivided's layers."""

    def __init__(self, config: Any, **options: Any) -> None:
        super().__init__()
        size = getattr(config, "head_dim", None) or HIDDEN // HEADS
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(
            TransformerLayer(
                HIDDEN,
                FEATURES,
                HEADS,
                GROUPS,
                layernorm_epsilon=1e-5,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                kv_channels=size,
                activation="swiglu",
                normalization="RMSNorm",
                qk_norm_type="RMSNorm" if config.model_type == "qwen3" else None,
                qk_norm_eps=1e-5,
                qk_norm_before_rope=True,
                attn_input_format="bshd",
                **{"bias": config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False)), **options},
            )
            for _ in range(2)
        )
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.rotary = RotaryPositionEmbedding(size)

    def forward(self, tokens: Tensor) -> Tensor:
        x, freqs = self.embedding(tokens), self.rotary(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=freqs)
        logits: Tensor = self.head(self.norm(x))
        return logits


def their_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGURATIONS[name])
    for parameter in model.parameters():  # norms and biases too
        parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    loaded: nn.Module = model.eval()
    return loaded


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_model_of_transformers_gives_the_same_logits_here_and_comes_back_unchanged(name: str, fused: str) -> None:
    theirs = their_model(name)
    ours = Model(CONFIGURATIONS[name], **FUSED[fused]).eval()
    named = NAMED | ({"head.weight": "model.embed_tokens.weight"} if "tied" in name else {})
    like = {key: value for key, value in theirs.state_dict().items() if "tied" not in name or key != "lm_head.weight"}
    ours.load_state_dict(from_hugging_face(like, ours, named))
    tokens = torch.randint(VOCABULARY, (2, 37))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours(tokens)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    back = to_hugging_face(ours.state_dict(), ours, named, like=like)
    assert back.keys() == like.keys()
    assert all(torch.equal(back[key], like[key]) for key in like)


@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
@pytest.mark.parametrize("source", FUSED)
@pytest.mark.parametrize("target", FUSED)
def test_layers_of_transformer_engine_with_other_weights_give_the_same_output(
    source: str, target: str, layer_type: str
) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layer_type": layer_type, "attn_input_format": "bshd"}
    one = TransformerLayer(HIDDEN, FEATURES, HEADS, GROUPS, **sizes, **FUSED[source]).eval()
    for parameter in one.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    other = TransformerLayer(HIDDEN, FEATURES, HEADS, GROUPS, **sizes, **FUSED[target]).eval()
    interleaved = {"a weight each": None, "one weight": False, "one weight, interleaved": True}[source]
    state = one.state_dict() | {"self_attention._extra_state": torch.tensor([])}
    other.load_state_dict(from_transformer_engine(state, other, interleaved))
    x, encoder = torch.randn(2, 9, HIDDEN), torch.randn(2, 5, HIDDEN)
    more = {"encoder_output": encoder} if layer_type == "decoder" else {}
    torch.testing.assert_close(other(x, **more), one(x, **more))


def test_a_state_needs_no_memory_of_the_model_that_it_is_for() -> None:
    theirs = their_model("qwen 3").state_dict()
    with torch.device("meta"):
        ours = Model(CONFIGURATIONS["qwen 3"])
    state = from_hugging_face(theirs, ours, NAMED)
    shared = theirs["model.layers.1.self_attn.k_proj.weight"]
    assert state["layers.1.self_attention.layernorm_qkv.key_weight"].data_ptr() == shared.data_ptr()


def test_every_name_of_the_table_is_that_of_a_layer_of_both_projects() -> None:
    config = CONFIGURATIONS["qwen 3"]
    ours = dict(Model(config, bias=True, softmax_type="learnable").layers[0].named_parameters())
    theirs = transformers.AutoModelForCausalLM.from_config(config).model.layers[0].state_dict()
    assert {here.format("weight") for here, _ in NAMES} == {name for name in ours if not name.endswith("bias")}
    names = {name.format("weight") for _, there in NAMES for name in there} - {"self_attn.sinks"}
    assert names == set(theirs)


def without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key != name}


def test_errors_of_conversions_list_names_sizes_and_a_fix() -> None:
    config = CONFIGURATIONS["llama"]
    theirs, ours = their_model("llama").state_dict(), Model(config)
    layer = "model.layers.1."

    def error(state: Any, model: Any = ours, names: dict[str, str] | None = NAMED, **options: Any) -> str:
        with pytest.raises(InputError) as caught:
            from_hugging_face(state, model, names, **options)
        return str(caught.value)

    found = error(without(theirs, f"{layer}mlp.up_proj.weight"))
    assert "1 unknown: model.layers.1.mlp.gate_proj.weight" in found
    found = error(without(theirs, f"{layer}self_attn.o_proj.weight"))
    assert "1 absent: layers.1.self_attention.proj.weight" in found
    assert "HINT" in found
    gemma = theirs | {f"{layer}pre_feedforward_layernorm.weight": torch.zeros(HIDDEN)}
    assert "1 unknown: model.layers.1.pre_feedforward_layernorm.weight" in error(gemma)
    wide = theirs | {f"{layer}self_attn.k_proj.weight": torch.zeros(64, HIDDEN)}
    assert "key_weight [64, 48] instead of [32, 48]" in error(wide)
    assert "3 unknown: lm_head.weight, model.embed_tokens.weight, model.norm.weight" in error(theirs, names=None)
    assert "names must name entries of state for 'embedding.weight', got 'wte'" in error(
        theirs, names={"embedding.weight": "wte"}
    )
    assert "18 unknown: model.layers.0" in error(theirs, layers="transformer.h")
    assert "state must be a mapping" in error([1])
    assert "model must be a torch.nn.Module, got dict" in error(theirs, {})
    assert "names must be a mapping of names in model to names in transformers" in error(theirs, names={"a": 1})  # type: ignore[dict-item]
    assert "must be a tensor, got int" in error({"a": 1})
    assert "contain an undivided.TransformerLayer, got Linear" in error(theirs, nn.Linear(2, 2))
    assert "layer_type='decoder' in the layer" in error(
        theirs, TransformerLayer(48, 80, 4, layer_type="decoder", attn_input_format="bshd")
    )
    biased = their_model("llama with biases").state_dict()
    found = error(biased)
    assert "12 unknown" in found
    assert "layers.0.layernorm_mlp.fc1_bias" in found


def test_a_bias_that_the_other_model_lacks_is_left_out_only_if_it_is_0() -> None:
    config = CONFIGURATIONS["qwen 2"]
    theirs, ours = their_model("qwen 2").state_dict(), Model(config)
    ours.load_state_dict(from_hugging_face(theirs, ours, NAMED))
    assert not ours.layers[0].self_attention.proj.bias.any()
    ours.layers[0].self_attention.proj.bias.data[3] = 0.5
    with pytest.raises(InputError, match=r"1 unknown: model\.layers\.0\.self_attn\.o_proj\.bias"):
        to_hugging_face(ours.state_dict(), ours, NAMED, like=theirs)


def test_errors_of_other_directions_name_the_argument() -> None:
    fused = MultiheadAttention(HIDDEN, HEADS, qkv_format="bshd", fuse_qkv_params=True)
    plain = MultiheadAttention(HIDDEN, HEADS, qkv_format="bshd")
    with pytest.raises(
        InputError, match=r"qkv_weight_interleaved must be True or False, because state has 'qkv\.weight'"
    ):
        from_transformer_engine(fused.state_dict(), plain)
    with pytest.raises(InputError, match="qkv_weight_interleaved must be True, False or None, got 'yes'"):
        from_transformer_engine(fused.state_dict(), plain, "yes")  # type: ignore[arg-type]
    other = MultiheadAttention(2 * HIDDEN, HEADS, qkv_format="bshd", fuse_qkv_params=True)
    with pytest.raises(InputError, match=r"state\['qkv\.weight'\] must have 144 rows, got \[288, 96\]"):
        from_transformer_engine(other.state_dict(), plain, True)
    unbiased = MultiheadAttention(HIDDEN, HEADS, qkv_format="bshd", bias=False)
    with pytest.raises(InputError, match=r"4 absent: key_bias|4 absent: proj\.bias, qkv\.key_bias"):
        from_transformer_engine(unbiased.state_dict(), plain)
    ours = Model(CONFIGURATIONS["llama"])
    with pytest.raises(
        InputError, match=r"names must name all parameters outside of the layers, got embedding\.weight"
    ):
        to_hugging_face(ours.state_dict(), ours)
    with pytest.raises(InputError, match="names must name parameters of model, got 'wte'"):
        to_hugging_face(ours.state_dict(), ours, {"wte": "wte"})
    with pytest.raises(InputError, match=r"1 absent: head\.weight"):
        to_hugging_face(without(ours.state_dict(), "head.weight"), ours, NAMED)
