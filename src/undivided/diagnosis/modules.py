"""Layers and caches on a device, against the same on the CPU: what the contract of `attention` alone does not reach.

    python -m undivided.diagnosis.modules --device cuda --jobs 4 --json modules.json

Each check is a small program of the public interface. It runs on the CPU and on the device, from the same numbers, and
its results must agree; in bf16 to a few roundings of each layer.
"""

from __future__ import annotations

import copy
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from undivided import masks
from undivided.cache import InferenceParams, KVCache, PagedKVCache
from undivided.nn import DotProductAttention, MultiheadAttention, RotaryPositionEmbedding, TransformerLayer
from undivided.quantization import FORMATS
from undivided.sdpa import scaled_dot_product_attention
from undivided.verification.lines import Line, Task, command_parser, run

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest distance of a result, relative to its norm. A wrong token or head changes it by tenths."""

TASK_SECONDS = 120.0
"""Time limit of one check."""

Numbers = Callable[..., Tensor]
"""Returns new random numbers of a shape, on the device and in the dtype of a check; the same on every device."""


def _train(layer: torch.nn.Module, x: Tensor, **arguments: object) -> list[Tensor]:
    """The output of a layer, the gradient of its input, and those of its weights."""
    moved = copy.deepcopy(layer).to(x.device, x.dtype)
    x = x.requires_grad_()
    out = moved(x, **arguments)
    out.float().square().mean().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *_parameter_gradients(moved)]


def _parameter_gradients(layer: torch.nn.Module) -> list[Tensor]:
    """The gradients of a layer's parameters, in order, with that of a key bias appended to that of the query bias.

    Without rounding the gradient of a key bias is 0, because softmax does not change if one vector is added to all
    keys. Devices return different rounding errors, so their difference is relative to the norm of both gradients.
    """
    gradients = {name: weight.grad for name, weight in layer.named_parameters() if weight.grad is not None}
    for name in [name for name in gradients if name.endswith("key_bias")]:
        queries = name.removesuffix("key_bias") + "query_bias"
        gradients[queries] = torch.cat([gradients[queries], gradients.pop(name)])
    return list(gradients.values())


def _transformer_layer(attn_input_format: str) -> TransformerLayer:
    return TransformerLayer(
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_gqa_groups=2,
        layer_number=1,
        attn_input_format=attn_input_format,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="padding_causal",
    )


def _offsets(like: Tensor) -> Tensor:
    return torch.tensor([0, 5, 30, 40], dtype=torch.int32, device=like.device)


def layer_packed(numbers: Numbers) -> list[Tensor]:
    """A transformer layer on three packed documents, with rotary positions; forward and backward."""
    x = numbers(40, 64)
    rope = RotaryPositionEmbedding(16).to(x.device).cos_sin(40)
    return _train(_transformer_layer("thd"), x, cu_seqlens_q=_offsets(x), rotary_pos_emb=rope)


def layer_padded(numbers: Numbers) -> list[Tensor]:
    """The same layer on a padded batch."""
    x = numbers(3, 25, 64)
    return _train(_transformer_layer("bshd"), x, cu_seqlens_q=_offsets(x))


def multihead_window(numbers: Numbers) -> list[Tensor]:
    """Multi-head attention with a window, in sbhd; forward and backward."""
    layer = MultiheadAttention(
        64, 4, num_gqa_groups=2, qkv_format="sbhd", attention_dropout=0.0, window_size=(7, 0), input_layernorm=True
    )
    return _train(layer, numbers(30, 2, 64))


def core_attention(numbers: Numbers) -> list[Tensor]:
    """DotProductAttention on packed documents, with dropout and softcap."""
    core = DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="thd", attn_mask_type="padding_causal", softcap=20.0)
    q, k, v = numbers(40, 4, 16), numbers(40, 2, 16), numbers(40, 2, 16)
    return [core.to(q.device)(q, k, v, cu_seqlens_q=_offsets(q))]


def _packed_params(sequences: int, is_paged: bool, dtype: torch.dtype) -> InferenceParams:
    """Caches for 64 tokens of each sequence, for layers of 2 key/value heads of 16 over packed tokens."""
    return InferenceParams(
        max_batch_size=sequences,
        max_sequence_length=64,
        num_heads_kv=2,
        head_dim_k=16,
        dtype=dtype,
        is_paged=is_paged,
        page_size=16 if is_paged else None,
        qkv_format="thd",
    )


def generation(numbers: Numbers) -> list[Tensor]:
    """Two prompts and four more tokens through a layer with a cache; one sequence ends and another begins."""
    layer = copy.deepcopy(_transformer_layer("thd"))
    x = numbers(60, 64)
    layer = layer.to(x.device, x.dtype).eval()
    params = _packed_params(4, True, x.dtype)
    results, start = [], 0
    for step in ({"a": 7, "b": 20}, {"a": 1, "b": 1}, {"a": 1, "b": 1}, {"b": 1, "c": 9}, {"b": 1, "c": 1}):
        params.pre_step(OrderedDict(step))
        count = sum(step.values())
        with torch.no_grad():
            results.append(layer(x[start : start + count], inference_params=params))
        start += count
    return results


def generation_layers(numbers: Numbers) -> list[Tensor]:
    """Three layers without residuals that share the steps of a generation, in a contiguous and in a paged cache."""
    layers = [
        MultiheadAttention(
            64, 4, num_gqa_groups=2, layer_number=n, qkv_format="thd", attn_mask_type="padding_causal"
        ).eval()
        for n in (1, 2, 3)
    ]
    results = []
    for is_paged in (False, True):
        x = numbers(24, 64)
        layers = [layer.to(x.device, x.dtype) for layer in layers]
        params = _packed_params(2, is_paged, x.dtype)
        start = 0
        for step in ({"a": 5, "b": 5}, {"a": 3, "b": 5}, {"a": 1, "b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1}):
            params.pre_step(OrderedDict(step))
            tokens = x[start : start + sum(step.values())]
            start += sum(step.values())
            for layer in layers:
                with torch.no_grad():
                    tokens = layer(tokens, inference_params=params)
                results.append(tokens)
    return results


def cache_contiguous(numbers: Numbers, quantize: str | None = None) -> list[Tensor]:
    """A contiguous cache: prompts of different lengths, then one token each."""
    k, v, q = numbers(2, 9, 2, 32), numbers(2, 9, 2, 32), numbers(2, 9, 8, 32)
    cache = KVCache(batch=2, max_len=64, kv_heads=2, head_dim=32, dtype=k.dtype, device=k.device, quantize=quantize)
    cache.append(k[:, :6], v[:, :6], lengths=[6, 3])
    results = [cache.attend(q[:, :6])]
    for t in (6, 7, 8):
        cache.append(k[:, t : t + 1], v[:, t : t + 1])
        results.append(cache.attend(q[:, t : t + 1], mask=masks.window(3, 0)))
    return results


def cache_int8(numbers: Numbers) -> list[Tensor]:
    """The same with int8."""
    return cache_contiguous(numbers, "int8")


def cache_paged(numbers: Numbers) -> list[Tensor]:
    """A paged cache: a prompt, a fork of it, and other tokens in each."""
    k, v, q = numbers(2, 9, 2, 32), numbers(2, 9, 2, 32), numbers(2, 9, 8, 32)
    cache = PagedKVCache(num_pages=16, page_size=4, kv_heads=2, head_dim=32, batch=2, dtype=k.dtype, device=k.device)
    cache.append(k[:, :6], v[:, :6], lengths=[6, 0])
    cache.fork(0, 1)
    results = []
    for t in (6, 7, 8):
        cache.append(k[:, t : t + 1], v[:, t : t + 1])
        results.append(cache.attend(q[:, t : t + 1]))
    return results


def cache_steps(numbers: Numbers) -> list[Tensor]:
    """Steps of decoding over pages of each format, which differ in their lengths only; and the int8 keys of one
    sequence, as they are stored."""
    k, v, q, window = numbers(2, 12, 2, 64), numbers(2, 12, 2, 64), numbers(2, 12, 8, 64), masks.window(3, 0)
    results = []
    for quantize in (None, *FORMATS):
        cache = PagedKVCache(
            num_pages=4,
            page_size=16,
            kv_heads=2,
            head_dim=64,
            batch=2,
            dtype=k.dtype,
            device=k.device,
            quantize=quantize,
        )
        cache.append(k[:, :6], v[:, :6], lengths=[6, 3])
        for t in range(6, 12):
            cache.append(k[:, t : t + 1], v[:, t : t + 1])
            results += [cache.attend(q[:, t : t + 1], mask) for mask in (None, window)]
        if quantize == "int8":
            results.append(cache.k[int(cache.block_table[0, 0]), :12].float())
    return results


def pytorchs_function(numbers: Numbers) -> list[Tensor]:
    """scaled_dot_product_attention with grouped heads and a boolean mask, with gradients."""
    q, k, v = (numbers(2, heads, 20, 16).requires_grad_() for heads in (4, 2, 2))
    mask = torch.ones(20, 20, dtype=torch.bool, device=q.device).tril()
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), numbers(2, 4, 20, 16))]


CHECKS: dict[str, Callable[[Numbers], list[Tensor]]] = {
    check.__name__.replace("_", "-"): check
    for check in (
        layer_packed,
        layer_padded,
        multihead_window,
        core_attention,
        generation,
        generation_layers,
        cache_contiguous,
        cache_int8,
        cache_paged,
        cache_steps,
        pytorchs_function,
    )
}


def run_check(name: str, device: str, dtype: torch.dtype) -> list[Tensor]:
    """The results of a check on a device, from the same weights and numbers as on any other."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # the weights of layers, which are made on the CPU

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return CHECKS[name](numbers)


def task_lines(task: Task) -> list[Line]:
    """The line of a check."""
    dtype = getattr(torch, task.dtype)
    try:
        found, right = run_check(task.case, task.device, dtype), run_check(task.case, "cpu", dtype)
        detail = _differences(found, right, TOLERANCE[dtype])
    except Exception as error:
        detail = (f"raised {type(error).__name__}: {error}", traceback.format_exc(limit=-6))
    return [Line(task.case, task.dtype, name, "wrong" if detail else "right", detail) for name in task.backends]


def _differences(found: Sequence[Tensor], right: Sequence[Tensor], tolerance: float) -> tuple[str, ...]:
    """The results that differ by more than the tolerance."""
    lines = []
    for number, (one, other) in enumerate(zip(found, right, strict=True)):
        a, b = one.detach().cpu().double(), other.detach().double()
        error = float((a - b).norm()) / (float(b.norm()) or 1.0)
        if not error <= tolerance:
            lines.append(
                f"result {number} {list(b.shape)}: differs by {error:.1e} of its norm, at most {tolerance:.0e}"
            )
    return tuple(lines)


def main() -> int:
    """The exit code of the command: 1 if anything was wrong, 2 if something was not run."""
    parser = command_parser(__doc__, "run only checks whose names contain this text")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    options = parser.parse_args()
    planned = [
        Task(options.device, name, dtype, ("chosen",))
        for dtype in ("bfloat16", "float32")
        for name in CHECKS
        if options.filter in name
    ]
    return run(planned, task_lines, options, TASK_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
