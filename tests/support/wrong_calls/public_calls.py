"""A valid small call of every public function, class and method: what `test_wrong_values` spoils, one argument at a
time."""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import undivided
from undivided import masks, parallel, quantization
from undivided.context_parallel import ContextPagedKVCache, Placement, plan, simulate
from undivided.context_parallel.plan import cached_step
from undivided.integrations import checkpoints
from undivided.integrations.torch_sdpa import replace_sdpa
from undivided.parallel.plan import Cluster, Model, bytes_in, bytes_per_second, plan_training

FP32: dict[str, Any] = {"dtype": torch.float32}


class PublicCall(NamedTuple):
    """A function, valid arguments by name, the object whose state an error must not change, arguments that stay as they
    are, because another call has them and each valid value takes long, and whether the call as it is has a result."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    owner: Any = None
    constant: tuple[str, ...] = ()
    is_valid: bool = True


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


Q, K, V = t(2, 3, 2, 8), t(2, 3, 1, 8), t(2, 3, 1, 8)
OPTIONS: dict[str, Any] = {
    "layout": "bshd",
    "mask": None,
    "bias": None,
    "scale": None,
    "softcap": None,
    "alibi_slopes": None,
    "sinks": None,
    "dropout_p": 0.0,
    "dropout_seed": None,
    "backend": None,
    "deterministic": None,
    "batch_invariant": None,
    "return_lse": False,
    "pages": None,
    "k_scale": None,
    "v_scale": None,
}
QKV = {"q": Q, "k": K, "v": V}


def _method(owner: Any, method: str, **arguments: Any) -> PublicCall:
    return PublicCall(getattr(owner, method), arguments, owner)


# --- caches


def _kv(paged: bool = False, appended: bool = True, **options: Any) -> Any:
    if paged:
        cache: Any = undivided.PagedKVCache(8, 2, 1, 8, batch=2, **FP32 | options)
    else:
        cache = undivided.KVCache(2, 8, 1, 8, **FP32 | options)
    if appended:
        cache.append(K, V)
    return cache


def _context(**options: Any) -> Any:
    return undivided.ContextParallel(_group(), **options)


def _group() -> Any:
    return simulate(1, lambda group: group)[0]


def _context_cache(appended: bool = True) -> Any:
    cache = ContextPagedKVCache(_context(), 8, 2, 1, 8, batch=2, **FP32)
    if appended:
        cache.append(K, V)
    return cache


ATTEND = {
    name: OPTIONS[name]
    for name in (
        "mask",
        "bias",
        "scale",
        "softcap",
        "alibi_slopes",
        "sinks",
        "backend",
        "deterministic",
        "batch_invariant",
        "return_lse",
    )
} | {"q": Q, "q_lengths": None}


def _cache_calls(name: str, make: Callable[..., Any], paged: bool) -> dict[str, Callable[[], PublicCall]]:
    calls: dict[str, Callable[[], PublicCall]] = {
        "append": lambda: _method(make(), "append", k=K, v=V, lengths=None),
        "attend": lambda: _method(make(), "attend", **ATTEND),
        "fork": lambda: _method(make(), "fork", src=0, dst=1),
        "free": lambda: _method(make(), "free", i=0),
        "keep": lambda: _method(make(), "keep", indices=[[0, 1], [0]]),
        "truncate": lambda: _method(make(), "truncate", lengths=[1, 2]),
    }
    if paged:
        calls |= {
            "evict": lambda: _method(make(), "evict", mask=masks.window(1, 0)),
            "match": lambda: _method(make(False), "match", tokens=[1, 2, 3], i=0),
            "remember": lambda: _method(make(), "remember", tokens=[1, 2, 3], i=0),
        }
    return {f"{name}.{method}": call for method, call in calls.items()}


CACHE = {
    "kv_heads": 1,
    "head_dim": 8,
    "batch": 2,
    "value_dim": None,
    "dtype": torch.float32,
    "device": "cpu",
    "layout": "bshd",
    "quantize": None,
    "mesh": None,
}


def _params(paged: bool = True, stepped: bool = True) -> Any:
    params = undivided.InferenceParams(
        2, 8, num_heads_kv=1, head_dim_k=8, **FP32, is_paged=paged, page_size=2 if paged else None
    )
    if stepped:
        params.pre_step({"a": 3})
        params.attend(1, Q[:1], K[:1], V[:1])
    return params


def _param_calls() -> dict[str, Callable[[], PublicCall]]:
    attend = {"q": Q[:1], "new_k": K[:1], "new_v": V[:1], "qkv_format": "bshd", "mask": None}
    calls = {
        "allocate_memory": lambda: _method(_params(), "allocate_memory", layer_number=2),
        "attend": lambda: _method(
            _params(),
            "attend",
            layer_number=1,
            **attend,
            **{n: v for n, v in ATTEND.items() if n not in ("q", "mask", "q_lengths")},
        ),
        "convert_paged_to_nonpaged": lambda: _method(_params(), "convert_paged_to_nonpaged", layer_number=1),
        "evict": lambda: _method(_params(), "evict", mask=masks.window(1, 0)),
        "fork": lambda: _method(_params(), "fork", src="a", dst="b"),
        "free": lambda: _method(_params(), "free", seq_id="a"),
        "has_memory": lambda: _method(_params(), "has_memory", layer_number=1),
        "keep": lambda: _method(_params(), "keep", indices={"a": [0, 1]}),
        "match": lambda: _method(_params(), "match", tokens=[1, 2, 3], seq_id="b"),
        "pre_step": lambda: _method(_params(), "pre_step", step_dict={"a": 1, "b": 2}, sharded=False),
        "remember": lambda: _method(_params(), "remember", tokens=[1, 2, 3], seq_id="a"),
        "shard": lambda: _method(_sharded_params(), "shard", tensor=K[:1]),
        "step": lambda: _method(_params(), "step", layer_number=1, new_k=K[:1], new_v=V[:1], qkv_format=None),
        "truncate": lambda: _method(_params(), "truncate", seq_id="a", length=1),
        "unshard": lambda: _method(_sharded_params(), "unshard", tensor=K[:1]),
    }
    return {f"InferenceParams.{name}": call for name, call in calls.items()}


def _sharded_params() -> Any:
    params = undivided.InferenceParams(
        2, 8, num_heads_kv=1, head_dim_k=8, **FP32, is_paged=True, page_size=2, context_parallel=_context()
    )
    params.pre_step({"a": 3}, sharded=True)
    return params


# --- context parallelism


def _context_calls() -> dict[str, Callable[[], PublicCall]]:
    def bound() -> Any:
        return undivided.ContextParallel(rank=0, world=2).bind(8)

    shared = {n: OPTIONS[n] for n in ("layout", "mask", "bias", "scale", "softcap", "alibi_slopes")}
    calls = {
        "bind": lambda: _method(undivided.ContextParallel(rank=0, world=2), "bind", q_len=8, kv_len=None, mask=None),
        "decode": lambda: _method(
            _context(),
            "decode",
            **QKV,
            positions=torch.arange(3),
            kv_len=3,
            **shared,
            sinks=None,
            backend=None,
            deterministic=None,
            by="all_gather",
        ),
        "max_logit": lambda: _method(_context().bind(3), "max_logit", q=Q, k=K, **shared),
        "placed": lambda: _method(
            undivided.ContextParallel(rank=0, world=2), "placed", q_len=8, kv_len=8, mask=masks.FULL
        ),
        "positions": lambda: _method(bound(), "positions", of="q", within_documents=True),
        "shard": lambda: _method(bound(), "shard", tensor=t(1, 8, 2, 4), layout=None, of="q", dim=1),
        "shard with a layout": lambda: _method(bound(), "shard", tensor=t(1, 8, 2, 4), layout="bshd", of="q", dim=None),
        "unshard": lambda: _method(bound(), "unshard", shards=[t(1, 4, 2, 4)] * 2, layout=None, of="q", dim=1),
    }
    return {f"ContextParallel.{name}": call for name, call in calls.items()}


PLAN = {"kv_heads": 2, "value_dim": None, "batch": 1, "dtype": torch.bfloat16}


# --- layers


def _all_options(owner: Callable[..., Any], **required: Any) -> dict[str, Any]:
    """Every parameter of a function with its default."""
    found = {
        name: p.default
        for name, p in inspect.signature(owner).parameters.items()
        if p.default is not p.empty and p.kind is not p.VAR_KEYWORD
    }
    return found | required


def _dot() -> Any:
    return undivided.DotProductAttention(2, 8, qkv_format="bshd")


def _mha(**options: Any) -> Any:
    return undivided.MultiheadAttention(16, 2, attention_dropout=0.0, qkv_format="bshd", **options)


def _layer(**options: Any) -> Any:
    return undivided.TransformerLayer(
        16, 16, 2, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd", **options
    )


HIDDEN = t(2, 3, 16)


def _layer_calls() -> dict[str, Callable[[], PublicCall]]:
    mha, layer, rope = undivided.MultiheadAttention, undivided.TransformerLayer, undivided.RotaryPositionEmbedding(8)
    dot = _all_options(undivided.DotProductAttention, num_attention_heads=2, kv_channels=8, qkv_format="bshd")
    attention = _all_options(mha, hidden_size=16, num_attention_heads=2, qkv_format="bshd")
    whole = _all_options(layer, hidden_size=16, ffn_hidden_size=16, num_attention_heads=2, attn_input_format="bshd")
    shared = tuple(attention.keys() - {"backend", "device", "hidden_size", "name", "window_size"})
    return {
        "DotProductAttention": lambda: PublicCall(undivided.DotProductAttention, dot),
        "MultiheadAttention": lambda: PublicCall(mha, attention),
        "TransformerLayer": lambda: PublicCall(layer, whole, constant=shared),
        "RotaryPositionEmbedding": lambda: PublicCall(
            undivided.RotaryPositionEmbedding, _all_options(undivided.RotaryPositionEmbedding, dim=8)
        ),
        "RotaryPositionEmbedding.forward": lambda: PublicCall(rope, {"max_seq_len": 4, "offset": 0}, rope),
        "RotaryPositionEmbedding.cos_sin": lambda: _method(rope, "cos_sin", max_seq_len=4, offset=0),
        "apply_rotary_pos_emb": lambda: PublicCall(
            undivided.apply_rotary_pos_emb,
            _all_options(undivided.apply_rotary_pos_emb, t=Q, freqs=rope(3), tensor_format="bshd"),
        ),
        **_layer_methods(_dot, {"query_layer": Q, "key_layer": Q, "value_layer": Q}),
        **_layer_methods(_mha, {"hidden_states": HIDDEN}),
        **_layer_methods(_layer, {"hidden_states": HIDDEN}, tuple(_all_options(mha.forward))),
    }


def _layer_methods(
    make: Callable[[], Any], given: dict[str, Any], constant: tuple[str, ...] = ()
) -> dict[str, Callable[[], PublicCall]]:
    """The forward of a layer and the methods that set its groups."""
    owner = type(make())

    def forward() -> PublicCall:
        layer = make()
        return PublicCall(layer, _all_options(owner.forward) | given, layer, constant)

    return {
        f"{owner.__name__}.forward": forward,
        f"{owner.__name__}.set_context_parallel_group": lambda: _method(
            make(), "set_context_parallel_group", **_all_options(owner.set_context_parallel_group, cp_group=None)
        ),
        f"{owner.__name__}.set_tensor_parallel_group": lambda: _method(
            make(), "set_tensor_parallel_group", tp_group=None, check=True
        ),
    }


# --- masks


def _mask_calls() -> dict[str, Callable[[], PublicCall]]:
    made: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "blocks": (masks.blocks, {"q_block": 2, "kv_block": 2, "table": [[[0, 1]]]}),
        "causal": (masks.causal, {"align": None}),
        "chunks": (masks.chunks, {"size": 2, "align": None, "offset": None}),
        "dense": (masks.dense, {"tensor": torch.ones(3, 3, dtype=torch.bool)}),
        "describe": (masks.describe, {"structure": masks.causal().structure}),
        "document_ids": (masks.document_ids, {"ids_q": [0, 0, 1], "ids_kv": None}),
        "documents": (masks.documents, _all_options(masks.documents, cu_seqlens_q=torch.tensor([0, 1, 3]))),
        "lengths": (masks.lengths, _all_options(masks.lengths, kv=[1, 2])),
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
        "draw": lambda: _method(mask, "draw", **sized),
        "intervals": lambda: _method(mask, "intervals", **sized, device="cpu"),
        "to_dense": lambda: _method(mask, "to_dense", **sized, heads=1, device="cpu"),
        "plot": lambda: _method(mask, "plot", **sized, path=None, heads=1, pixels=16)._replace(
            constant=(*sized, "heads")
        ),
        "to": lambda: _method(mask, "to", device="cpu"),
        "with_first_head": lambda: _method(mask, "with_first_head", first_head=1),
    }
    return calls | {f"Mask.{name}": call for name, call in methods.items()}


# --- the rest


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
        layer = _layer()
        state = layer.state_dict()
        if name == "from_hugging_face":
            state = checkpoints.to_hugging_face(state, layer)
        function: Any = getattr(checkpoints, name)
        return PublicCall(function, _all_options(function, state=state, model=layer), layer)

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
        layer = _layer()
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
        return PublicCall(
            parallel.parallelize, {"module": layer, "mesh": mesh, "sequence_parallel": False, "check": True}, layer
        )

    def own_state() -> PublicCall:
        layer = _layer()
        return PublicCall(parallel.own_state_dict, {"module": layer, "state": layer.state_dict()}, layer)

    def whole_state() -> PublicCall:
        layer = _layer()
        return PublicCall(parallel.whole_state_dict, {"module": layer}, layer)

    def clip() -> PublicCall:
        layer = _linear()
        return PublicCall(
            parallel.clip_grad_norm_, _all_options(parallel.clip_grad_norm_, module=layer, max_norm=1.0), layer
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
            _all_options(undivided.scaled_dot_product_attention, query=Q, key=Q, value=Q),
        ),
        "merge": lambda: PublicCall(
            undivided.merge, {"outs": [Q, Q], "lses": [lse, lse], "sinks": None, "layout": "bshd"}
        ),
        "alibi_slopes": lambda: PublicCall(undivided.alibi_slopes, {"heads": 4, "device": "cpu"}),
        "backends": lambda: PublicCall(undivided.backends, {"machine": machine}),
        "diagnose": lambda: PublicCall(undivided.diagnose, {"problem": "No available kernel."}),
        "Machine": lambda: PublicCall(
            undivided.Machine, _all_options(undivided.Machine, device="cuda", compute_capability=(8, 0), packages={})
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
            ContextPagedKVCache, CACHE | {"num_pages": 8, "page_size": 2, "context": _context()}
        ),
        "InferenceParams": lambda: PublicCall(
            undivided.InferenceParams,
            _all_options(
                undivided.InferenceParams, max_batch_size=2, max_sequence_length=8, num_heads_kv=1, head_dim_k=8, **FP32
            ),
        ),
        "ContextParallel": lambda: PublicCall(
            undivided.ContextParallel, _all_options(undivided.ContextParallel, group=_group())
        ),
        "ContextParallel without a group": lambda: PublicCall(
            undivided.ContextParallel, _all_options(undivided.ContextParallel, rank=0, world=2)
        ),
        "Decision.standing": lambda: PublicCall(decision.standing, {"verdict": decision.verdicts[0]}),
        "Placement.of": lambda: PublicCall(
            Placement.of, {"name": "zigzag", "world": 2, "q_len": 8, "kv_len": None, "mask": None}
        ),
        "Placement.length": lambda: PublicCall(Placement.of("zigzag", 2, 8, None).length, {"side": "q"}),
        "Placement.rows": lambda: PublicCall(Placement.of("zigzag", 2, 8, None).rows, {"side": "q"}),
        "plan": lambda: PublicCall(plan, _all_options(plan, seq_len=8, heads=2, head_dim=8, world=2)),
        "cached_step": lambda: PublicCall(
            cached_step, _all_options(cached_step, new=2, cached=3, heads=2, head_dim=8, world=2)
        ),
        "simulate": lambda: PublicCall(simulate, {"world": 2, "function": lambda group: 1, "timeout": 60.0}),
        "plan_training": lambda: PublicCall(
            plan_training,
            _all_options(plan_training, model=Model(2, 16, 2, 2, 8, 16, 10), cluster=Cluster(1, 2), seq_len=8),
        ),
        "Cluster": lambda: PublicCall(Cluster, cluster),
        "bytes_in": lambda: PublicCall(bytes_in, {"argument": "memory", "text": "80GB"}, constant=("argument",)),
        "bytes_per_second": lambda: PublicCall(
            bytes_per_second, {"argument": "link", "text": "400gbit"}, constant=("argument",)
        ),
        "Cluster.group": lambda: PublicCall(Cluster(1, 2).group, {"size": 2, "stride": 1}),
        "Model": lambda: PublicCall(
            Model, _all_options(Model, layers=2, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=16, vocabulary=10)
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
        "plan": (benchmarking.plan, _all_options(benchmarking.plan, suites=["small"])),
        "execute": (benchmarking.execute, _all_options(benchmarking.execute, planned=nothing, settings=settings)),
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
    mask = _all_options(hf.model_mask, batch_size=1, q_length=3, kv_length=3, mask_function=lambda b, h, q, k: k <= q)
    return {
        "transformers.attention": lambda: PublicCall(
            hf.attention, _all_options(hf.attention, module=layer, query=q, key=k, value=k, is_causal=True)
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
    **_cache_calls("KVCache", lambda appended=True: _kv(False, appended), False),
    **_cache_calls("PagedKVCache", lambda appended=True: _kv(True, appended), True),
    **_cache_calls("ContextPagedKVCache", _context_cache, True),
    **_param_calls(),
    **_context_calls(),
    **_layer_calls(),
    **_mask_calls(),
    **_benchmark_calls(),
}
