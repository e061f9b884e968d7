"""A valid small call of every public function, class and method: what `test_wrong_values` spoils, one argument at a
time."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from public_cache_calls import CACHE, cache_calls, context_of_one_rank, group_of_one_rank
from public_call_inputs import FP32, OPTIONS, QKV, K, PublicCall, Q, V, all_options, method_call, t
from public_layer_calls import layer_calls, transformer_layer

import undivided
from undivided import masks, parallel, quantization
from undivided.context_parallel import ContextPagedKVCache, Placement, plan, simulate
from undivided.context_parallel.plan import cached_step
from undivided.integrations import checkpoints
from undivided.integrations.torch_sdpa import replace_sdpa
from undivided.parallel.plan import Cluster, Model, bytes_in, bytes_per_second, plan_training


def _mask_calls() -> dict[str, Callable[[], PublicCall]]:
    made: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "blocks": (masks.blocks, {"q_block": 2, "kv_block": 2, "table": [[[0, 1]]]}),
        "causal": (masks.causal, {"align": None}),
        "chunks": (masks.chunks, {"size": 2, "align": None, "offset": None}),
        "dense": (masks.dense, {"tensor": torch.ones(3, 3, dtype=torch.bool)}),
        "describe": (masks.describe, {"structure": masks.causal().structure}),
        "document_ids": (masks.document_ids, {"ids_q": [0, 0, 1], "ids_kv": None}),
        "documents": (masks.documents, all_options(masks.documents, cu_seqlens_q=torch.tensor([0, 1, 3]))),
        "lengths": (masks.lengths, all_options(masks.lengths, kv=[1, 2])),
        "pages": (masks.pages, {"table": [[0, 1]], "page_size": 2}),
        "predicate": (masks.predicate, {"fn": lambda b, h, q, k: q >= k}),
        "prefix": (masks.prefix, {"n": 2}),
        "sinks": (masks.sinks, {"n": 2, "align": None}),
        "tree": (masks.tree, {"parents": [-1, 0, 0]}),
        "window": (masks.window, {"left": 1, "right": 0, "align": None}),
    }
    calls = {f"masks.{name}": functools.partial(PublicCall, *call) for name, call in made.items()}
    mask = masks.causal("bottom_right") & masks.lengths([3, 2])
    sized = {"q_len": 3, "kv_len": 3, "batch": 2}
    methods = {
        "and": lambda: PublicCall(lambda other: mask & other, {"other": masks.causal()}, mask),
        "or": lambda: PublicCall(lambda other: masks.causal() | other, {"other": masks.prefix(1)}, mask),
        "draw": lambda: method_call(mask, "draw", **sized),
        "intervals": lambda: method_call(mask, "intervals", **sized, device="cpu"),
        "to_dense": lambda: method_call(mask, "to_dense", **sized, heads=1, device="cpu"),
        "plot": lambda: method_call(mask, "plot", **sized, path=None, heads=1, pixels=16)._replace(
            constant=(*sized, "heads")
        ),
        "to": lambda: method_call(mask, "to", device="cpu"),
        "with_first_head": lambda: method_call(mask, "with_first_head", first_head=1),
    }
    return calls | {f"Mask.{name}": call for name, call in methods.items()}


def _replace() -> None:
    with replace_sdpa():
        pass


def _use(names: Any) -> None:
    with undivided.use_backends(*names if isinstance(names, list | tuple | set) else [names]):
        pass


def _disable(names: Any) -> None:
    with undivided.use_backends.disable(*names if isinstance(names, list | tuple | set) else [names]):
        pass


def _set(names: Any, disable: Any, batch_invariant: Any) -> None:
    try:
        undivided.set_backends(
            *names if isinstance(names, list | tuple | set) else [names],
            disable=disable,
            batch_invariant=batch_invariant,
        )
    finally:
        undivided.set_backends()


def _linear() -> Any:
    layer = torch.nn.Linear(2, 1)
    layer(torch.ones(1, 2)).sum().backward()
    return layer


HOUSE = functools.cache(tempfile.mkdtemp)


def _other_calls() -> dict[str, Callable[[], PublicCall]]:
    machine = undivided.Machine(device="cuda", compute_capability=(8, 0))
    decision = undivided.explain(Q, K, V, layout="bshd")
    quantized = {"values": torch.ones(2, 4, dtype=torch.int8), "scale": t(2), "dtype": torch.float32}
    lse = t(2, 2, 3)

    def state_call(name: str) -> PublicCall:
        layer = transformer_layer()
        state = layer.state_dict()
        if name == "from_hugging_face":
            state = checkpoints.to_hugging_face(state, layer)
        function: Any = getattr(checkpoints, name)
        return PublicCall(function, all_options(function, state=state, model=layer), layer)

    def optimized() -> tuple[Any, Any]:
        layer = torch.nn.Linear(2, 1)
        return layer, torch.optim.SGD(layer.parameters())

    def save() -> PublicCall:
        layer, optimizer = optimized()
        given = {"folder": HOUSE(), "step": 1, "model": layer, "optimizer": optimizer, "values": {"a": 1}, "keep": 1}
        return PublicCall(parallel.save_checkpoint, given, layer)

    def load() -> PublicCall:
        layer, optimizer = optimized()
        folder = HOUSE()
        parallel.save_checkpoint(folder, 1, layer, optimizer)
        return PublicCall(
            parallel.load_checkpoint, {"folder": folder, "model": layer, "optimizer": optimizer, "step": None}, layer
        )

    def tensor_parallel() -> PublicCall:
        layer = transformer_layer()
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
        return PublicCall(
            parallel.parallelize, {"module": layer, "mesh": mesh, "sequence_parallel": False, "check": True}, layer
        )

    def own_state() -> PublicCall:
        layer = transformer_layer()
        return PublicCall(parallel.own_state_dict, {"module": layer, "state": layer.state_dict()}, layer)

    def whole_state() -> PublicCall:
        layer = transformer_layer()
        return PublicCall(parallel.whole_state_dict, {"module": layer}, layer)

    def clip() -> PublicCall:
        layer = _linear()
        return PublicCall(
            parallel.clip_grad_norm_, all_options(parallel.clip_grad_norm_, module=layer, max_norm=1.0), layer
        )

    cluster = {
        "nodes": 1,
        "gpus": 2,
        "link": 50e9,
        "intra": 450e9,
        "memory": 80_000_000_000,
        "flops": 4e14,
        "reserve": 0,
    }
    return {
        "attention": lambda: PublicCall(undivided.attention, QKV | OPTIONS | {"context_parallel": None}),
        "explain": lambda: PublicCall(undivided.explain, QKV | OPTIONS | {"context_parallel": None, "machine": None}),
        "verify": lambda: PublicCall(
            undivided.verify,
            QKV | OPTIONS | {"backends": ("reference",), "gradients": False},
            constant=tuple(name for name in OPTIONS if name not in ("layout", "mask", "dropout_p", "dropout_seed")),
        ),
        "scaled_dot_product_attention": lambda: PublicCall(
            undivided.scaled_dot_product_attention,
            all_options(undivided.scaled_dot_product_attention, query=Q, key=Q, value=Q),
        ),
        "merge": lambda: PublicCall(
            undivided.merge, {"outs": [Q, Q], "lses": [lse, lse], "sinks": None, "layout": "bshd"}
        ),
        "alibi_slopes": lambda: PublicCall(undivided.alibi_slopes, {"heads": 4, "device": "cpu"}),
        "backends": lambda: PublicCall(undivided.backends, {"machine": machine}),
        "diagnose": lambda: PublicCall(undivided.diagnose, {"problem": "No available kernel."}),
        "Machine": lambda: PublicCall(
            undivided.Machine, all_options(undivided.Machine, device="cuda", compute_capability=(8, 0), packages={})
        ),
        "Machine.named": lambda: PublicCall(undivided.Machine.named, {"name": "h100", "cudnn": None, "packages": None}),
        "Machine.this": lambda: PublicCall(undivided.Machine.this, {"device": "cpu"}),
        "Machine.version": lambda: PublicCall(machine.version, {"package": "triton"}, machine),
        "set_backends": lambda: PublicCall(_set, {"names": ["reference"], "disable": [], "batch_invariant": None}),
        "use_backends": lambda: PublicCall(_use, {"names": ["reference"]}),
        "use_backends.disable": lambda: PublicCall(_disable, {"names": ["native"]}),
        "replace_sdpa": lambda: PublicCall(_replace, {}),
        "quantization.quantize": lambda: PublicCall(quantization.quantize, {"x": t(2, 32), "format": "int8"}),
        "quantization.dequantize": lambda: PublicCall(quantization.dequantize, quantized),
        "quantization.empty": lambda: PublicCall(
            quantization.empty, {"format": "int8", "shape": (2, 3), "device": "cpu"}
        ),
        "quantization.format_of": lambda: PublicCall(quantization.format_of, {"dtype": torch.int8}),
        "KVCache": lambda: PublicCall(undivided.KVCache, CACHE | {"max_len": 8}),
        "PagedKVCache": lambda: PublicCall(undivided.PagedKVCache, CACHE | {"num_pages": 8, "page_size": 2}),
        "ContextPagedKVCache": lambda: PublicCall(
            ContextPagedKVCache, CACHE | {"num_pages": 8, "page_size": 2, "context": context_of_one_rank()}
        ),
        "InferenceParams": lambda: PublicCall(
            undivided.InferenceParams,
            all_options(
                undivided.InferenceParams, max_batch_size=2, max_sequence_length=8, num_heads_kv=1, head_dim_k=8, **FP32
            ),
        ),
        "ContextParallel": lambda: PublicCall(
            undivided.ContextParallel, all_options(undivided.ContextParallel, group=group_of_one_rank())
        ),
        "ContextParallel without a group": lambda: PublicCall(
            undivided.ContextParallel, all_options(undivided.ContextParallel, rank=0, world=2)
        ),
        "Decision.standing": lambda: PublicCall(decision.standing, {"verdict": decision.verdicts[0]}),
        "Placement.of": lambda: PublicCall(
            Placement.of, {"name": "zigzag", "world": 2, "q_len": 8, "kv_len": None, "mask": None}
        ),
        "Placement.length": lambda: PublicCall(Placement.of("zigzag", 2, 8, None).length, {"side": "q"}),
        "Placement.rows": lambda: PublicCall(Placement.of("zigzag", 2, 8, None).rows, {"side": "q"}),
        "plan": lambda: PublicCall(plan, all_options(plan, seq_len=8, heads=2, head_dim=8, world=2)),
        "cached_step": lambda: PublicCall(
            cached_step, all_options(cached_step, new=2, cached=3, heads=2, head_dim=8, world=2)
        ),
        "simulate": lambda: PublicCall(simulate, {"world": 2, "function": lambda group: 1, "timeout": 60.0}),
        "plan_training": lambda: PublicCall(
            plan_training,
            all_options(plan_training, model=Model(2, 16, 2, 2, 8, 16, 10), cluster=Cluster(1, 2), seq_len=8),
        ),
        "Cluster": lambda: PublicCall(Cluster, cluster),
        "bytes_in": lambda: PublicCall(bytes_in, {"argument": "memory", "text": "80GB"}, constant=("argument",)),
        "bytes_per_second": lambda: PublicCall(
            bytes_per_second, {"argument": "link", "text": "400gbit"}, constant=("argument",)
        ),
        "Cluster.group": lambda: PublicCall(Cluster(1, 2).group, {"size": 2, "stride": 1}),
        "Model": lambda: PublicCall(
            Model, all_options(Model, layers=2, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=16, vocabulary=10)
        ),
        "checkpoints.from_hugging_face": lambda: state_call("from_hugging_face"),
        "checkpoints.to_hugging_face": lambda: state_call("to_hugging_face"),
        "checkpoints.from_transformer_engine": lambda: state_call("from_transformer_engine"),
        "parallel.checkpoint_steps": lambda: PublicCall(parallel.checkpoint_steps, {"folder": HOUSE()}),
        "parallel.clip_grad_norm_": clip,
        "parallel.load_checkpoint": load,
        "parallel.save_checkpoint": save,
        "parallel.own_state_dict": own_state,
        "parallel.whole_state_dict": whole_state,
        "parallel.parallelize": tensor_parallel,
        "parallel.rank_errors": lambda: PublicCall(parallel.rank_errors, {"step": "a step", "group": None}),
    }


def _benchmark_calls() -> dict[str, Callable[[], PublicCall]]:
    from undivided import benchmarking
    from undivided.benchmarking.runs import Settings

    settings = Settings(backends=(), others=(), small_patience=0.0, attempts=1)
    nothing = benchmarking.Plan((), (), False, False, True)
    report = benchmarking.execute(nothing, settings)
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "plan": (benchmarking.plan, all_options(benchmarking.plan, suites=["small"])),
        "execute": (benchmarking.execute, all_options(benchmarking.execute, planned=nothing, settings=settings)),
        "markdown": (benchmarking.markdown, {"report": report}),
        "tables": (benchmarking.tables, {"report": report}),
    }
    return {f"benchmarking.{name}": functools.partial(PublicCall, *call) for name, call in calls.items()}


def transformers_calls() -> dict[str, Callable[[], PublicCall]]:
    """The calls of the integration of transformers, which takes seconds to import."""
    from undivided.integrations import transformers as hf

    layer = torch.nn.Module()
    q, k = t(1, 2, 3, 8), t(1, 1, 3, 8)
    tokens = torch.arange(8)[None]
    context = undivided.ContextParallel(rank=0, world=2)
    mask = all_options(hf.model_mask, batch_size=1, q_length=3, kv_length=3, mask_function=lambda b, h, q, k: k <= q)
    return {
        "transformers.attention": lambda: PublicCall(
            hf.attention, all_options(hf.attention, module=layer, query=q, key=k, value=k, is_causal=True)
        ),
        "transformers.model_mask": lambda: PublicCall(hf.model_mask, mask, constant=("config",)),  # imports models
        "transformers.use_latents": lambda: PublicCall(hf.use_latents, {"model": layer}, is_valid=False),
        "transformers.Cache": lambda: PublicCall(hf.Cache, {"config": None, "quantize": None, "max_len": None}),
        "transformers.parallelize": lambda: PublicCall(
            hf.parallelize, {"model": layer, "mesh": context}, is_valid=False
        ),
        "transformers.shard_batch": lambda: PublicCall(
            hf.shard_batch,
            {"batch": {"input_ids": tokens, "labels": tokens}, "ranks": context, "strategy": None, "placement": None},
        ),
    }


CALLS: dict[str, Callable[[], PublicCall]] = {
    **_other_calls(),
    **cache_calls(),
    **layer_calls(),
    **_mask_calls(),
    **_benchmark_calls(),
}
