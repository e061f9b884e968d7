"""Generation over tensor ranks, and over context and tensor ranks together, equals one process."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh

import undivided
from undivided import InferenceParams, InputError, KVCache, PagedKVCache, TransformerLayer, masks
from undivided.context_parallel import ContextPagedKVCache
from undivided.parallel import parallelize

HIDDEN, HEADS, SIZE = 32, 4, 8
STEPS = ({"a": 5, "b": 3}, {"a": 1, "b": 1}, {"b": 2, "c": 4})


def make_layer(groups: int, window: tuple[int, int]) -> TransformerLayer:
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd", "window_size": window}
    return TransformerLayer(HIDDEN, 64, HEADS, num_gqa_groups=groups, layer_number=1, **options).eval()


def generate(layer: Any, params: InferenceParams) -> list[Tensor]:
    """The layer's output at every step, for the same hidden states in every process."""
    draw = torch.Generator().manual_seed(1)
    found = []
    for step in STEPS:
        params.pre_step(OrderedDict(step))
        x = torch.randn(len(step), max(step.values()), HIDDEN, generator=draw)
        x = layer(x, inference_params=params)
        found += [x[n, :count] for n, count in enumerate(step.values())]
    return found


@torch.no_grad()
def layers_over_tensor_ranks() -> list[tuple[Any, float]]:
    """The largest difference from one process for key heads that the ranks divide, and that they replicate."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tensor",))
    found = []
    for groups, paged, quantize in ((4, False, None), (2, True, "int8")):
        window = (4, 0) if paged else (-1, 0)
        options: dict[str, Any] = {"is_paged": paged, "page_size": 4 if paged else None, "quantize": quantize}

        def cache(mesh: Any, groups: int = groups, options: Any = options) -> InferenceParams:
            return InferenceParams(3, 32, groups, SIZE, torch.float32, mesh=mesh, **options)

        expected = generate(make_layer(groups, window), cache(None))
        own = cache(mesh["tensor"])
        assert own.num_heads_kv == max(1, groups // mesh.size())
        outs = generate(parallelize(make_layer(groups, window), mesh["tensor"]), own)
        largest = max(float((a - b).abs().max()) for a, b in zip(outs, expected, strict=True))
        found.append(((groups, paged, quantize), largest))
    return found


@torch.no_grad()
def pages_over_context_and_tensor_ranks() -> float:
    """Pages over two context ranks, and heads over two tensor ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
    tensor, context = mesh["tensor"], undivided.ContextParallel(mesh["context"])
    sizes = {"page_size": 4, "kv_heads": 2, "head_dim": SIZE, "batch": 2, "dtype": torch.float32}
    whole = PagedKVCache(16, **sizes)
    own = ContextPagedKVCache(context, 8, **sizes, mesh=tensor)
    torch.manual_seed(0)
    differences = []
    for count in (11, 1, 1):
        q, k, v = (torch.randn(2, count, heads, SIZE) for heads in (HEADS, 2, 2))
        whole.append(k, v)
        expected = whole.attend(q, masks.window(7, 0) | masks.sinks(2))
        q, k, v, expected = (t.chunk(2, 2)[tensor.get_local_rank()] for t in (q, k, v, expected))
        own.append(k, v)
        out = own.attend(q, masks.window(7, 0) | masks.sinks(2), by="ring")
        differences.append(float((out - expected).abs().max()))
    return max(differences)


@torch.no_grad()
def layers_over_context_and_tensor_ranks() -> list[tuple[Any, float]]:
    """A prompt that the context ranks divide, then single tokens, in layers that the tensor ranks divide."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
    freqs = undivided.RotaryPositionEmbedding(SIZE)(64)
    found: list[tuple[Any, float]] = []
    for groups, window, quantize in ((4, (-1, 0), None), (2, (6, 0), "int8"), (1, (-1, 0), None)):

        def run(layer: Any, sharded: bool, params: InferenceParams) -> list[Tensor]:
            draw = torch.Generator().manual_seed(1)
            outs = []
            for step in ({"a": 19, "b": 6}, {"a": 1, "b": 1}, {"a": 5}, {"a": 1}):
                shard = sharded and step["a"] > 1
                params.pre_step(OrderedDict(step), **({"sharded": True} if shard else {}))
                x = torch.randn(len(step), step["a"], HIDDEN, generator=draw)
                x = layer(params.shard(x) if shard else x, inference_params=params, rotary_pos_emb=freqs)
                x = params.unshard(x) if shard else x
                outs += [x[n, :count] for n, count in enumerate(step.values())]
            return outs

        sizes = 3, 32, groups, SIZE, torch.float32
        made: dict[str, Any] = {"is_paged": True, "page_size": 4, "quantize": quantize}
        expected = run(make_layer(groups, window), False, InferenceParams(*sizes, **made))
        layer = parallelize(make_layer(groups, window), mesh["tensor"])
        context = undivided.ContextParallel(mesh["context"])
        layer.set_context_parallel_group(context)
        own = InferenceParams(*sizes, **made, mesh=mesh["tensor"], context_parallel=context)
        largest = max(float((a - b).abs().max()) for a, b in zip(run(layer, True, own), expected, strict=True))
        found.append(((groups, window, quantize), largest))
    return found


@functools.cache
def results() -> list[list[Any]]:
    return run_ranks(
        4, layers_over_tensor_ranks, pages_over_context_and_tensor_ranks, layers_over_context_and_tensor_ranks
    )


def test_divided_layers_generate_what_one_process_does() -> None:
    for answer in results()[0]:
        assert isinstance(answer, list), answer
        assert all(difference < 1e-5 for _, difference in answer), answer


def test_pages_over_context_ranks_and_heads_over_tensor_ranks() -> None:
    for answer in results()[1]:
        assert isinstance(answer, float), answer
        assert answer < 1e-5


def test_layers_with_pages_over_context_ranks_and_heads_over_tensor_ranks() -> None:
    for answer in results()[2]:
        assert isinstance(answer, list), answer
        assert all(difference < 1e-5 for _, difference in answer), answer


class _Mesh:
    """A mesh of three ranks, of which only the size is read."""

    ndim = 1

    def size(self) -> int:
        return 3

    def get_local_rank(self) -> int:
        return 0


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match="num_heads_kv must be a multiple or a divisor of the 3 ranks of mesh, got 4"):
        InferenceParams(1, 8, 4, 8, torch.float32, mesh=_Mesh())  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"mesh must be a DeviceMesh with one axis, or None, got int\n.*select one"):
        KVCache(1, 8, 4, 8, dtype=torch.float32, mesh=2)  # type: ignore[arg-type]
    cache = PagedKVCache(4, 4, 6, 8, batch=1, dtype=torch.float32, mesh=_Mesh())  # type: ignore[arg-type]
    assert cache.k.shape == (4, 4, 2, 8)


def test_a_cache_of_all_heads_says_how_to_divide_them() -> None:
    cache = KVCache(1, 8, 4, 8, dtype=torch.float32)
    with pytest.raises(InputError, match=r"(?s)k must have shape.*HINT: if the heads are divided over ranks: mesh="):
        cache.append(torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8))
