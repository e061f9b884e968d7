# ruff: noqa: E501 (tables of messages)
"""MultiheadAttention: weight order, checkpoints, results, and caches under DotProductAttention."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import plain_layer
import pytest
import torch
from torch import Tensor

import undivided
from undivided import InputError, MultiheadAttention, RotaryPositionEmbedding, TransformerLayer

HIDDEN, HEADS, GROUPS = 24, 4, 2


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


SHAPES: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    # hidden 24, 4 query heads and 2 key/value heads of 6, feed-forward 20, as transformer_engine.pytorch names them
    "gpt": (
        {},
        {
            "self_attention.layernorm_qkv.layer_norm_weight": (24,),
            "self_attention.layernorm_qkv.layer_norm_bias": (24,),
            "self_attention.layernorm_qkv.query_weight": (24, 24),
            "self_attention.layernorm_qkv.query_bias": (24,),
            "self_attention.layernorm_qkv.key_weight": (12, 24),
            "self_attention.layernorm_qkv.key_bias": (12,),
            "self_attention.layernorm_qkv.value_weight": (12, 24),
            "self_attention.layernorm_qkv.value_bias": (12,),
            "self_attention.proj.weight": (24, 24),
            "self_attention.proj.bias": (24,),
            "layernorm_mlp.layer_norm_weight": (24,),
            "layernorm_mlp.layer_norm_bias": (24,),
            "layernorm_mlp.fc1_weight": (20, 24),
            "layernorm_mlp.fc1_bias": (20,),
            "layernorm_mlp.fc2_weight": (24, 20),
            "layernorm_mlp.fc2_bias": (24,),
        },
    ),
    "llama": (
        {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "fuse_qkv_params": True},
        {
            "self_attention.layernorm_qkv.layer_norm_weight": (24,),
            "self_attention.layernorm_qkv.weight": (48, 24),
            "self_attention.proj.weight": (24, 24),
            "layernorm_mlp.layer_norm_weight": (24,),
            "layernorm_mlp.fc1_weight": (40, 24),
            "layernorm_mlp.fc2_weight": (24, 20),
        },
    ),
    "bert": (
        {"output_layernorm": True, "fuse_qkv_params": True},
        {
            "self_attention.qkv.weight": (48, 24),
            "self_attention.qkv.bias": (48,),
            "self_attention.proj.weight": (24, 24),
            "self_attention.proj.bias": (24,),
            "layernorm_mlp.layer_norm_weight": (24,),
            "layernorm_mlp.layer_norm_bias": (24,),
            "layernorm_mlp.fc1_weight": (20, 24),
            "layernorm_mlp.fc1_bias": (20,),
            "layernorm_mlp.fc2_weight": (24, 20),
            "layernorm_mlp.fc2_bias": (24,),
            "layernorm.weight": (24,),
            "layernorm.bias": (24,),
        },
    ),
    "decoder-with-norms-and-sinks": (
        {
            "layer_type": "decoder",
            "bias": False,
            "normalization": "RMSNorm",
            "qk_norm_type": "LayerNorm",
            "softmax_type": "learnable",
        },
        {
            "self_attention.layernorm_qkv.layer_norm_weight": (24,),
            "self_attention.layernorm_qkv.query_weight": (24, 24),
            "self_attention.layernorm_qkv.key_weight": (12, 24),
            "self_attention.layernorm_qkv.value_weight": (12, 24),
            "self_attention.q_norm.weight": (6,),
            "self_attention.q_norm.bias": (6,),
            "self_attention.k_norm.weight": (6,),
            "self_attention.k_norm.bias": (6,),
            "self_attention.core_attention.softmax_offset": (4,),
            "self_attention.proj.weight": (24, 24),
            "inter_attention.layernorm_query.layer_norm_weight": (24,),
            "inter_attention.layernorm_query.query_weight": (24, 24),
            "inter_attention.key_value.key_weight": (12, 24),
            "inter_attention.key_value.value_weight": (12, 24),
            "inter_attention.q_norm.weight": (6,),
            "inter_attention.q_norm.bias": (6,),
            "inter_attention.k_norm.weight": (6,),
            "inter_attention.k_norm.bias": (6,),
            "inter_attention.core_attention.softmax_offset": (4,),
            "inter_attention.proj.weight": (24, 24),
            "layernorm_mlp.layer_norm_weight": (24,),
            "layernorm_mlp.fc1_weight": (20, 24),
            "layernorm_mlp.fc2_weight": (24, 20),
        },
    ),
}


EXTRA_STATES = (
    "self_attention.layernorm_qkv._extra_state",
    "self_attention.proj._extra_state",
    "layernorm_mlp._extra_state",
    "self_attention.core_attention._extra_state",
    "self_attention.core_attention.fused_attention._extra_state",
)


@pytest.mark.parametrize(("options", "shapes"), SHAPES.values(), ids=SHAPES)
def test_a_checkpoint_of_transformer_engine_loads(options: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    """Names and shapes are TransformerEngine's; FP8 states are dropped, other unknown entries are errors."""
    layer = TransformerLayer(HIDDEN, 20, HEADS, GROUPS, attn_input_format="bshd", **options)
    state: dict[str, Any] = {name: torch.randn(shape) for name, shape in shapes.items()}
    model = torch.nn.Sequential(layer)
    checkpoint = {f"0.{name}": value for name, value in state.items()}
    checkpoint |= {f"0.{name}": torch.zeros(5, dtype=torch.uint8) for name in EXTRA_STATES}
    model.load_state_dict(checkpoint)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, state.pop(name))
    assert not state
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(checkpoint | {"0.self_attention.proj.scale": torch.zeros(1)})
    del checkpoint["0.layernorm_mlp.fc2_weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(checkpoint)


class Counted(TransformerLayer):
    """A layer with a state of its own, and an inner module with one."""

    def __init__(self, calls: int) -> None:
        super().__init__(HIDDEN, 20, HEADS, GROUPS, attn_input_format="bshd")
        self.calls, self.self_attention.q_norm = calls, Inner(calls + 1)
        self.register_buffer("an_extra_state", torch.full((1,), calls))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Inner(torch.nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def test_extra_states_of_subclasses_and_modules_in_a_layer_are_loaded() -> None:
    """They were dropped as TransformerEngine's FP8 states are, so that loading failed for a missing key."""
    saved, model = Counted(3), Counted(0)
    checkpoint = saved.state_dict() | {name: torch.zeros(5, dtype=torch.uint8) for name in EXTRA_STATES}
    assert str(model.load_state_dict(checkpoint)) == "<All keys matched successfully>"
    assert (model.calls, model.self_attention.q_norm.value, model.an_extra_state.item()) == (3, 4, 3)


def fused_rows(kind: str, sizes: tuple[int, int], cross: bool) -> list[int]:
    """Row numbers of the concatenated weights, in the order of a fused weight."""
    d, d_v = sizes
    q = [[h * d + n for n in range(d)] for h in range(HEADS)]
    first = 0 if cross else HEADS * d
    k = [[first + g * d + n for n in range(d)] for g in range(GROUPS)]
    v = [[first + GROUPS * d + g * d_v + n for n in range(d_v)] for g in range(GROUPS)]
    if kind == "interleaved":
        share = HEADS // GROUPS
        of_groups = [([] if cross else q[g * share : (g + 1) * share]) + [k[g], v[g]] for g in range(GROUPS)]
        return list(itertools.chain(*itertools.chain(*of_groups)))
    return list(itertools.chain(*([] if cross else q), *k, *v))


@pytest.mark.parametrize("kind", ["interleaved", "stacked"])
@pytest.mark.parametrize("sizes", [(6, 6), (6, 10)], ids=["one-head-size", "two-head-sizes"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("format", ["sbhd", "bshd", "thd"])
def test_a_fused_weight_has_the_rows_of_three_in_its_order(
    format: str, cross: bool, sizes: tuple[int, int], kind: str
) -> None:
    options: dict[str, Any] = {
        "kv_channels": sizes,
        "num_gqa_groups": GROUPS,
        "attention_dropout": 0.0,
        "params_dtype": torch.float64,
        "attention_type": "cross" if cross else "self",
        "attn_mask_type": "padding",
        "qkv_format": format,
    }
    apart = MultiheadAttention(HIDDEN, HEADS, **options)
    plain_layer.with_random_parameters(apart)
    fused = MultiheadAttention(
        HIDDEN, HEADS, fuse_qkv_params=True, qkv_weight_interleaved=kind == "interleaved", **options
    )
    state, name = apart.state_dict(), "key_value" if cross else "qkv"
    for what in ("weight", "bias"):
        parts = [
            state.pop(f"{name}.{part}_{what}") for part in (("key", "value") if cross else ("query", "key", "value"))
        ]
        state[f"{name}.{what}"] = torch.cat(parts)[fused_rows(kind, sizes, cross)]
    fused.load_state_dict(state)
    x = torch.randn(*((5,) if format == "thd" else (1, 5) if format == "bshd" else (5, 1)), HIDDEN, dtype=torch.float64)
    call: dict[str, Any] = {"cu_seqlens_q": torch.tensor([0, 5])}
    if cross:
        call |= {"encoder_output": torch.randn_like(x), "cu_seqlens_kv": torch.tensor([0, 5])}
    torch.testing.assert_close(fused(x, **call), apart(x, **call))


def test_the_init_functions_are_called_on_their_weights() -> None:
    """init_method on q, k, v and fc1, the other on proj and fc2, biases 0, normalisations as the identity."""
    shapes: dict[str, list[tuple[int, ...]]] = {"in": [], "out": []}

    def record(which: str) -> Callable[[Tensor], None]:
        def init(weight: Tensor) -> None:
            shapes[which].append(tuple(weight.shape))
            weight.fill_(1.0 if which == "in" else 2.0)

        return init

    layer = TransformerLayer(
        HIDDEN,
        20,
        HEADS,
        GROUPS,
        init_method=record("in"),
        output_layer_init_method=record("out"),
        attn_input_format="thd",
    )
    assert shapes == {"in": [(24, 24), (12, 24), (12, 24), (20, 24)], "out": [(24, 24), (24, 20)]}
    for name, parameter in layer.named_parameters():
        value = (
            0.0 if "bias" in name else 1.0 if "norm_weight" in name else 2.0 if "proj" in name or "fc2" in name else 1.0
        )
        assert bool((parameter == value).all()), name
    weight = MultiheadAttention(256, 4, qkv_format="thd", fuse_qkv_params=True).qkv.weight
    assert 0.022 < weight.std() < 0.024
    assert (
        MultiheadAttention(HIDDEN, HEADS, qkv_format="thd", params_dtype=torch.bfloat16).proj.weight.dtype
        == torch.bfloat16
    )


@pytest.mark.parametrize("bias", [True, False])
def test_the_bias_and_the_normalised_input_may_be_returned(bias: bool) -> None:
    options: dict[str, Any] = {"qkv_format": "bshd", "input_layernorm": True, "bias": bias, "attention_dropout": 0.0}
    plain = MultiheadAttention(HIDDEN, HEADS, **options)
    plain_layer.with_random_parameters(plain)
    x = torch.randn(2, 5, HIDDEN)
    whole = plain(x)
    assert isinstance(whole, Tensor)
    both = MultiheadAttention(HIDDEN, HEADS, return_bias=True, return_layernorm_output=True, **options)
    both.load_state_dict(plain.state_dict())
    out, returned_bias, normed = both(x)
    assert returned_bias is both.proj.bias
    torch.testing.assert_close(out if returned_bias is None else out + returned_bias, whole)
    wanted = torch.nn.functional.layer_norm(
        x, (HIDDEN,), plain.layernorm_qkv.layer_norm_weight, plain.layernorm_qkv.layer_norm_bias
    )
    torch.testing.assert_close(normed, wanted)
    alone = MultiheadAttention(HIDDEN, HEADS, return_layernorm_output=True, **options)
    assert len(alone(x)) == 2


@pytest.mark.parametrize("format", ["sbhd", "bshd", "thd"])
def test_attention_without_other_options_in_every_format(format: str) -> None:
    """Alone, with cross-attention over keys of other lengths with their own rotary positions."""
    module = MultiheadAttention(
        HIDDEN,
        HEADS,
        num_gqa_groups=GROUPS,
        attention_type="cross",
        attn_mask_type="padding",
        qkv_format=format,
        attention_dropout=0.0,
        params_dtype=torch.float64,
    )
    plain_layer.with_random_parameters(module)
    x, encoder = (torch.randn(2, 3, HIDDEN, dtype=torch.float64), torch.randn(2, 5, HIDDEN, dtype=torch.float64))
    rope = RotaryPositionEmbedding(6)(5)
    options = {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_gqa_groups": GROUPS,
        "input_layernorm": False,
        "rotary": True,
    }
    state = dict(module.named_parameters())
    allowed = torch.ones(3, 5, dtype=torch.bool)
    wanted = torch.stack([plain_layer.multihead(state, "", x[n], encoder[n], allowed, options)[0] for n in range(2)])

    def flat(t: Tensor) -> Tensor:
        return t.flatten(0, 1) if format == "thd" else t if format == "bshd" else t.transpose(0, 1)

    out = module(
        flat(x),
        encoder_output=flat(encoder),
        cu_seqlens_q=torch.tensor([0, 3, 6]),
        cu_seqlens_kv=torch.tensor([0, 5, 10]),
        rotary_pos_emb=(rope, rope),
    )
    torch.testing.assert_close(out, flat(wanted), rtol=1e-4, atol=1e-5)


def test_a_named_backend_runs_or_gives_reasons() -> None:
    x = torch.randn(1, 5, HIDDEN)
    module = MultiheadAttention(HIDDEN, HEADS, qkv_format="bshd", backend="reference")
    assert module(x).shape == x.shape
    with pytest.raises(undivided.NoBackendError, match="cudnn"):
        MultiheadAttention(HIDDEN, HEADS, qkv_format="bshd", backend="cudnn")(x)


@pytest.mark.parametrize(
    ("options", "call", "expected"),
    [
        (
            {"qkv_format": None},
            None,
            "qkv_format must be given (there is no default): one of 'sbhd', 'bshd', 'thd', got None\n  HINT: look at hidden_states.shape",
        ),
        ({"attention_type": "both"}, None, "attention_type must be one of 'self', 'cross', got 'both'"),
        (
            {"return_layernorm_output": True},
            None,
            "return_layernorm_output must be False without input_layernorm, got True",
        ),
        ({"return_bias": 1}, None, "return_bias must be True or False, got 1"),
        ({"kv_channels": (6, 6, 6)}, None, "kv_channels must be an int or a pair"),
        ({"attn_mask_type": "all"}, None, "attn_mask_type must be one of"),
        ({"ub_overlap_ag": True}, None, "ub_overlap_ag must be False, got True"),
        ({"ub_bulk_dgrad": True}, None, "ub_bulk_dgrad must be False, got True"),
        ({"ub_bulk_wgrad": True}, None, "ub_bulk_wgrad must be False, got True"),
        ({"ub_overlap_rs": True}, None, "ub_overlap_rs must be False, got True"),
        ({"ub_overlap_rs_dgrad": True}, None, "ub_overlap_rs_dgrad must be False, got True"),
        ({"set_parallel_mode": 1}, None, "set_parallel_mode must be True or False, got 1"),
        (
            {"tp_size": 2, "set_parallel_mode": True},
            None,
            "tp_group must be set before a call with tp_size=2, got None",
        ),
        ({"softcap": 0.0}, None, "softcap must be a positive number or None, got 0.0"),
        (
            {},
            {"encoder_output": torch.randn(2, 5, HIDDEN)},
            "encoder_output must be None with attention_type='self', got a tensor [2, 5, 24]\n  HINT: MultiheadAttention projects",
        ),
        ({"attention_type": "cross"}, {}, "encoder_output must be a torch.Tensor, got None"),
        ({}, {"is_first_microbatch": "no"}, "is_first_microbatch must be True or False, got 'no'"),
        (
            {"qkv_format": "sbhd", "attn_mask_type": "padding"},
            {"cu_seqlens_q": torch.tensor([0, 5, 8])},
            "qkv_format must agree with cu_seqlens_q (2 sequences)",
        ),
    ],
)
def test_errors_of_wrong_arguments(options: dict[str, Any], call: dict[str, Any] | None, expected: str) -> None:
    given: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "qkv_format": "bshd"} | options

    def run() -> None:
        module = MultiheadAttention(**given)
        module(torch.randn(2, 5, HIDDEN), **(call or {}))

    with pytest.raises(InputError) as caught:
        run()
    assert str(caught.value).startswith(expected)
    assert caught.value.argument == expected.split(" ")[0]
