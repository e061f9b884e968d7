"""A valid small call of every public method of the caches and of `ContextParallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from public_call_inputs import FP32, OPTIONS, QKV, K, PublicCall, Q, V, method_call, t

import undivided
from undivided import masks
from undivided.context_parallel import ContextPagedKVCache, simulate


def _kv(paged: bool = False, appended: bool = True, **options: Any) -> Any:
    if paged:
        cache: Any = undivided.PagedKVCache(8, 2, 1, 8, batch=2, **FP32 | options)
    else:
        cache = undivided.KVCache(2, 8, 1, 8, **FP32 | options)
    if appended:
        cache.append(K, V)
    return cache


def context_of_one_rank(**options: Any) -> Any:
    return undivided.ContextParallel(group_of_one_rank(), **options)


def group_of_one_rank() -> Any:
    return simulate(1, lambda group: group)[0]


def _context_cache(appended: bool = True) -> Any:
    cache = ContextPagedKVCache(context_of_one_rank(), 8, 2, 1, 8, batch=2, **FP32)
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


def _calls_of(name: str, make: Callable[..., Any], paged: bool) -> dict[str, Callable[[], PublicCall]]:
    calls: dict[str, Callable[[], PublicCall]] = {
        "append": lambda: method_call(make(), "append", k=K, v=V, lengths=None),
        "attend": lambda: method_call(make(), "attend", **ATTEND),
        "fork": lambda: method_call(make(), "fork", src=0, dst=1),
        "free": lambda: method_call(make(), "free", i=0),
        "keep": lambda: method_call(make(), "keep", indices=[[0, 1], [0]]),
        "truncate": lambda: method_call(make(), "truncate", lengths=[1, 2]),
    }
    if paged:
        calls |= {
            "evict": lambda: method_call(make(), "evict", mask=masks.window(1, 0)),
            "match": lambda: method_call(make(False), "match", tokens=[1, 2, 3], i=0),
            "remember": lambda: method_call(make(), "remember", tokens=[1, 2, 3], i=0),
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
        "allocate_memory": lambda: method_call(_params(), "allocate_memory", layer_number=2),
        "attend": lambda: method_call(
            _params(),
            "attend",
            layer_number=1,
            **attend,
            **{n: v for n, v in ATTEND.items() if n not in ("q", "mask", "q_lengths")},
        ),
        "convert_paged_to_nonpaged": lambda: method_call(_params(), "convert_paged_to_nonpaged", layer_number=1),
        "evict": lambda: method_call(_params(), "evict", mask=masks.window(1, 0)),
        "fork": lambda: method_call(_params(), "fork", src="a", dst="b"),
        "free": lambda: method_call(_params(), "free", seq_id="a"),
        "has_memory": lambda: method_call(_params(), "has_memory", layer_number=1),
        "keep": lambda: method_call(_params(), "keep", indices={"a": [0, 1]}),
        "match": lambda: method_call(_params(), "match", tokens=[1, 2, 3], seq_id="b"),
        "pre_step": lambda: method_call(_params(), "pre_step", step_dict={"a": 1, "b": 2}, sharded=False),
        "remember": lambda: method_call(_params(), "remember", tokens=[1, 2, 3], seq_id="a"),
        "shard": lambda: method_call(_sharded_params(), "shard", tensor=K[:1]),
        "step": lambda: method_call(_params(), "step", layer_number=1, new_k=K[:1], new_v=V[:1], qkv_format=None),
        "truncate": lambda: method_call(_params(), "truncate", seq_id="a", length=1),
        "unshard": lambda: method_call(_sharded_params(), "unshard", tensor=K[:1]),
    }
    return {f"InferenceParams.{name}": call for name, call in calls.items()}


def _sharded_params() -> Any:
    params = undivided.InferenceParams(
        2, 8, num_heads_kv=1, head_dim_k=8, **FP32, is_paged=True, page_size=2, context_parallel=context_of_one_rank()
    )
    params.pre_step({"a": 3}, sharded=True)
    return params


def _context_calls() -> dict[str, Callable[[], PublicCall]]:
    def bound() -> Any:
        return undivided.ContextParallel(rank=0, world=2).bind(8)

    shared = {n: OPTIONS[n] for n in ("layout", "mask", "bias", "scale", "softcap", "alibi_slopes")}
    calls = {
        "bind": lambda: method_call(
            undivided.ContextParallel(rank=0, world=2), "bind", q_len=8, kv_len=None, mask=None
        ),
        "decode": lambda: method_call(
            context_of_one_rank(),
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
        "max_logit": lambda: method_call(context_of_one_rank().bind(3), "max_logit", q=Q, k=K, **shared),
        "placed": lambda: method_call(
            undivided.ContextParallel(rank=0, world=2), "placed", q_len=8, kv_len=8, mask=masks.FULL
        ),
        "positions": lambda: method_call(bound(), "positions", of="q", within_documents=True),
        "shard": lambda: method_call(bound(), "shard", tensor=t(1, 8, 2, 4), layout=None, of="q", dim=1),
        "shard with a layout": lambda: method_call(
            bound(), "shard", tensor=t(1, 8, 2, 4), layout="bshd", of="q", dim=None
        ),
        "tell_of_error": lambda: method_call(context_of_one_rank(), "tell_of_error", error=ValueError("a wrong width")),
        "unshard": lambda: method_call(bound(), "unshard", shards=[t(1, 4, 2, 4)] * 2, layout=None, of="q", dim=1),
    }
    return {f"ContextParallel.{name}": call for name, call in calls.items()}


def cache_calls() -> dict[str, Callable[[], PublicCall]]:
    """The calls by the name of their class and method."""
    return {
        **_calls_of("KVCache", lambda appended=True: _kv(False, appended), False),
        **_calls_of("PagedKVCache", lambda appended=True: _kv(True, appended), True),
        **_calls_of("ContextPagedKVCache", _context_cache, True),
        **_param_calls(),
        **_context_calls(),
    }
