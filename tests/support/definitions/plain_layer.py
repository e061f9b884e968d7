"""A transformer layer for one sequence, from a state_dict: loops over heads, no formats, no kernels.

The layers of the package are compared with it. It shares no code with them: the formulas are those of the papers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

State = Mapping[str, Tensor]


def norm(state: State, prefix: str, x: Tensor, kind: str, eps: float, zero_centered: bool) -> Tensor:
    """`prefix` + weight, bias; kind "LayerNorm", "RMSNorm" or "L2Normalization"."""
    if kind == "L2Normalization":
        return x / (x.pow(2).sum(-1, keepdim=True) + eps).sqrt()
    weight = state[f"{prefix}weight"] + (1 if zero_centered else 0)
    if kind == "RMSNorm":
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight + state[f"{prefix}bias"]


def linear(state: State, name: str, x: Tensor, prefix: str = "") -> Tensor:
    """`name`.`prefix`weight and bias."""
    out = x @ state[f"{name}.{prefix}weight"].T
    bias = state.get(f"{name}.{prefix}bias")
    return out if bias is None else out + bias


def rotate(x: Tensor, start: int, interleaved: bool, base: float = 10000.0) -> Tensor:
    """Rotary embeddings of [s, d], pair by pair."""
    s, d = x.shape
    columns: list[Tensor] = list(x.unbind(-1))
    for pair in range(d // 2):
        i, j = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + d // 2)
        angle = torch.arange(start, start + s, dtype=torch.float64) * base ** (-2 * pair / d)
        a, b = columns[i], columns[j]
        columns[i], columns[j] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return torch.stack(columns, -1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, options: dict[str, Any], sink: Tensor | None
) -> Tensor:
    """One head: q [sq, d], k [skv, d], v [skv, dv], allowed [sq, skv]."""
    scores = scale * q @ k.T
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    weights = torch.where(allowed, scores.exp(), 0)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + sink.exp()
    return weights / total @ v


def multihead(
    state: State, prefix: str, x: Tensor, encoder: Tensor | None, allowed: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(output, normalised input) of an attention module with three weights for q, k, v."""
    heads, groups = (options["num_attention_heads"], options.get("num_gqa_groups") or options["num_attention_heads"])
    size = options.get("kv_channels") or options["hidden_size"] // heads
    size, v_size = size if isinstance(size, tuple) else (size, size)
    kind, eps = options.get("normalization", "LayerNorm"), options.get("layernorm_epsilon", 1e-5)
    normed = x
    q_name, kv_name = ("qkv", "qkv") if encoder is None else ("query_layer", "key_value")
    q_prefix = "query_" if encoder is None else ""
    if options["input_layernorm"]:
        q_name, q_prefix = ("layernorm_qkv" if encoder is None else "layernorm_query"), "query_"
        kv_name = q_name if encoder is None else kv_name
        normed = norm(state, f"{prefix}{q_name}.layer_norm_", x, kind, eps, options.get("zero_centered_gamma", False))
    source = normed if encoder is None else encoder
    q = linear(state, prefix + q_name, normed, q_prefix).split(size, -1)
    k = linear(state, prefix + kv_name, source, "key_").split(size, -1)
    v = linear(state, prefix + kv_name, source, "value_").split(v_size, -1)
    qk_norm = options.get("qk_norm_type")

    def prepared(t: Tensor, name: str) -> Tensor:
        def normalise(t: Tensor) -> Tensor:
            return (
                t
                if qk_norm is None
                else norm(state, f"{prefix}{name}.", t, qk_norm, options.get("qk_norm_eps", 1e-6), False)
            )

        first = options.get("qk_norm_before_rope", False)
        t = normalise(t) if first else t
        t = rotate(t, 0, options.get("rotary_pos_interleaved", False)) if options.get("rotary") else t
        return t if first else normalise(t)

    scale = options.get("softmax_scale") or 1 / math.sqrt(size)
    sinks = {"vanilla": None, "off-by-one": torch.zeros(heads)}.get(
        options.get("softmax_type", "vanilla"), state.get(f"{prefix}core_attention.softmax_offset")
    )
    outs = []
    for h in range(heads):
        g = h // (heads // groups)
        sink = None if sinks is None else sinks[h].to(x.dtype)
        outs.append(attend(prepared(q[h], "q_norm"), prepared(k[g], "k_norm"), v[g], allowed, scale, options, sink))
    return linear(state, f"{prefix}proj", torch.cat(outs, -1)), normed


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def quick(x: Tensor) -> Tensor:
    return x * sigmoid(1.702 * x)


def positive(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0)


SINGLE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "qgelu": quick,
    "relu": positive,
    "srelu": lambda x: positive(x) ** 2,
    "silu": lambda x: x * sigmoid(x),
}
GATES = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}


def activation(name: str, x: Tensor, parameters: dict[str, float] | None = None) -> Tensor:
    """The activation of [.., f] (gated: [.., 2 f]), as [.., f]."""
    if name in SINGLE:
        return SINGLE[name](x)
    half = x.shape[-1] // 2
    gate, up = x[..., :half], x[..., half:]
    if name == "glu":
        return sigmoid(gate) * up
    if name != "clamped_swiglu":
        return SINGLE[GATES[name]](gate) * up
    limit, alpha, offset = (
        (parameters or {}).get(key, default)
        for key, default in (("limit", 7.0), ("alpha", 1.702), ("glu_linear_offset", 1.0))
    )
    gate = torch.where(gate > limit, limit, gate)
    up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return gate * sigmoid(alpha * gate) * (up + offset)


def layer(
    state: State,
    options: dict[str, Any],
    x: Tensor,
    allowed: Tensor,
    encoder: Tensor | None = None,
    cross: Tensor | None = None,
) -> Tensor:
    """A whole layer for one sequence x [s, hidden]; `allowed` [s, s], `cross` [s, encoder's s]."""
    kind, eps, zero = (
        options.get("normalization", "LayerNorm"),
        options.get("layernorm_epsilon", 1e-5),
        options.get("zero_centered_gamma", False),
    )
    output_norm, post = (
        options.get("output_layernorm", False),
        options.get("apply_residual_connection_post_layernorm", False),
    )
    attended, normed = multihead(
        state, "self_attention.", x, None, allowed, options | {"input_layernorm": not output_norm}
    )

    def fed(x: Tensor) -> tuple[Tensor, Tensor]:
        normed = norm(state, "layernorm_mlp.layer_norm_", x, kind, eps, zero)
        inner = linear(state, "layernorm_mlp", normed, "fc1_")
        inner = activation(options.get("activation", "gelu"), inner, options.get("activation_params"))
        return linear(state, "layernorm_mlp", inner, "fc2_"), normed

    if options.get("parallel_attention_mlp"):
        return x + attended + fed(x)[0]
    x = (normed if post and not output_norm else x) + attended
    if encoder is not None:
        assert cross is not None
        attended, normed = multihead(state, "inter_attention.", x, encoder, cross, options | {"input_layernorm": True})
        x = (normed if post else x) + attended
    out, normed = fed(x)
    x = (normed if post else x) + out
    return norm(state, "layernorm.", x, kind, eps, zero) if output_norm else x


def with_random_parameters(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """The module with random parameters: biases of 0 and scales of 1 would hide omitted terms."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
            parameter.copy_(noise * spread + (1.0 if name.endswith(("norm_weight", "norm.weight")) else 0.0))
    return module
