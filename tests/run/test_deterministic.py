"""``deterministic=True`` reaches what runs, forward and backward, through every public entry point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import KVCache, PagedKVCache, masks
from undivided.backends import all_backends, reference
from undivided.cache._masks import CAUSAL
from undivided.context_parallel.exchange.simulate import SimulatedGroup, simulate
from undivided.request.call import Call
from undivided.request.problem import Problem

PASSES = ("forward", "replay", "recorded", "backward")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Problem]]]:
    """Every (pass, problem) that a backend was given, by any backend."""
    found: list[tuple[str, Problem]] = []

    def recording(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def record(call: Call, *rest: Any, **options: Any) -> Any:
            found.append((name, call.problem))
            return run(call, *rest, **options)

        return record

    for backend in all_backends():
        for name in PASSES:
            monkeypatch.setattr(backend, name, recording(name, getattr(backend, name)))
    for name in ("plain_operations", "score_blocks"):
        if hasattr(reference, name):
            monkeypatch.setattr(reference, name, recording(name, getattr(reference, name)))
    double = reference.BACKEND.double_backward
    monkeypatch.setattr(reference.BACKEND, "double_backward", recording("double_backward", double))
    CAUSAL.__dict__.pop("_entries", None)  # what earlier calls of caches prepared
    torch.manual_seed(0)
    yield found
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()


def leaves(*shape: int) -> list[Tensor]:
    return [torch.randn(shape or (1, 6, 2, 16), requires_grad=True) for _ in range(3)]


def attend(*qkv: Tensor, **options: Any) -> Tensor:
    return undivided.attention(*qkv, layout="bshd", mask=masks.causal(), deterministic=True, **options)


def eager() -> None:
    with torch.no_grad():
        attend(*leaves())


def with_gradients() -> None:
    attend(*leaves()).sum().backward()


def with_gradients_of_long_rows() -> None:
    attend(*leaves(2, 300, 2, 16)).sum().backward()


def with_gradients_of_gradients() -> None:
    qkv = leaves()
    (first,) = torch.autograd.grad(attend(*qkv).square().sum(), qkv[:1], create_graph=True)
    first.sum().backward()


def by_the_switch_of_torch() -> None:
    torch.use_deterministic_algorithms(True)
    undivided.attention(*leaves(), layout="bshd").sum().backward()


def compiled(backend: str) -> Callable[[], None]:
    def call() -> None:
        torch.compile(attend, fullgraph=True, backend=backend)(*leaves()).sum().backward()

    return call


def sdpa() -> None:
    torch.use_deterministic_algorithms(True)
    undivided.scaled_dot_product_attention(*leaves(), is_causal=True).sum().backward()


def compiled_sdpa() -> None:
    torch.use_deterministic_algorithms(True)
    torch.compile(undivided.scaled_dot_product_attention, backend="aot_eager")(*leaves()).sum().backward()


def replaced_sdpa() -> None:
    torch.use_deterministic_algorithms(True)
    with undivided.replace_sdpa():
        torch.nn.functional.scaled_dot_product_attention(*leaves()).sum().backward()


def module() -> None:
    torch.use_deterministic_algorithms(True)
    layer = undivided.DotProductAttention(2, 16, attention_dropout=0.0, qkv_format="bshd")
    layer(*leaves()).sum().backward()


def contiguous_cache() -> None:
    cache = KVCache(1, 16, 2, 16, dtype=torch.float32)
    q, k, v = (t.detach() for t in leaves())
    cache.append(k, v)
    cache.attend(q.requires_grad_(), deterministic=True).sum().backward()


def paged_cache() -> None:
    cache = PagedKVCache(8, 4, 2, 16, batch=1, dtype=torch.float32)
    q, k, v = (t.detach() for t in leaves())
    cache.append(k, v)
    cache.attend(q, deterministic=True)


def context_parallel() -> None:
    whole = leaves(1, 12, 2, 16)

    def step(group: SimulatedGroup) -> None:
        cp = undivided.ContextParallel(group).bind(12)
        mine = [cp.shard(t.detach(), layout="bshd").requires_grad_() for t in whole]
        attend(*mine, context_parallel=cp).sum().backward()

    simulate(2, step)


def context_parallel_decoding() -> None:
    k = torch.randn(1, 6, 2, 16)

    def step(group: SimulatedGroup) -> None:
        cp = undivided.ContextParallel(group)
        positions = torch.arange(group.rank, 6, 2)
        mine = k[:, positions]
        cp.decode(k[:, :1], mine, mine, positions, 6, layout="bshd", deterministic=True)

    simulate(2, step)


def function_transforms() -> None:
    qkv = leaves()
    torch.func.grad(lambda q: attend(q, *qkv[1:]).sum())(qkv[0].detach())
    torch.func.vmap(lambda q, k, v: attend(q[None], k[None], v[None]))(*(t.detach() for t in qkv))


def forward_mode() -> None:
    q, k, v = (t.detach() for t in leaves())
    torch.func.jvp(lambda q: attend(q, k, v), (q,), (q,))


BOTH = {"forward": ("forward", "replay", "answer", "recorded"), "backward": ("backward", "gradients", "recorded")}
FORWARD = {"forward": ("forward", "replay", "answer")}
PLAIN_OPERATIONS = {"forward": ("plain_operations",)}

ENTRIES: dict[str, tuple[Callable[[], None], dict[str, tuple[str, ...]]]] = {
    "attention": (eager, FORWARD),
    "attention-gradients": (with_gradients, BOTH),
    "attention-long-gradients": (with_gradients_of_long_rows, BOTH),
    "attention-second-derivative": (with_gradients_of_gradients, BOTH | {"twice": ("double_backward",)}),
    "attention-by-torchs-switch": (by_the_switch_of_torch, BOTH),
    "compiled-eager": (compiled("eager"), BOTH),
    "compiled-aot-eager": (compiled("aot_eager"), BOTH),
    "sdpa": (sdpa, BOTH),
    "compiled-sdpa": (compiled_sdpa, BOTH),
    "replaced-sdpa": (replaced_sdpa, BOTH),
    "dot-product-attention": (module, BOTH),
    "kv-cache": (contiguous_cache, BOTH),
    "paged-kv-cache": (paged_cache, FORWARD),
    "context-parallel": (context_parallel, BOTH),
    "context-parallel-decode": (context_parallel_decoding, FORWARD),
    "func": (function_transforms, PLAIN_OPERATIONS),
    "jvp": (forward_mode, PLAIN_OPERATIONS),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_deterministic_reaches_every_pass(entry: str, seen: list[tuple[str, Problem]]) -> None:
    """`explain` showed it, but the kernel once got the problem as it was before the decision."""
    call, passes = ENTRIES[entry]
    call()
    names = {name for name, _ in seen}
    for wanted in passes.values():
        assert names & set(wanted), f"{wanted}: {names}"
    assert [name for name, problem in seen if not problem.deterministic] == []


@pytest.mark.parametrize("entry", [name for name in ENTRIES if not name.startswith("context-parallel")])
def test_the_kernel_gets_the_decided_problem(entry: str, seen: list[tuple[str, Problem]]) -> None:
    """A backend gets the problem that `last_decision` explains (of its thread: simulated ranks have their own)."""
    ENTRIES[entry][0]()
    decision = undivided.last_decision()
    assert decision is not None
    assert any(problem == decision.problem for _, problem in seen)


def test_nothing_is_deterministic_by_default(seen: list[tuple[str, Problem]]) -> None:
    undivided.attention(*leaves(), layout="bshd").sum().backward()
    assert seen
    assert not any(problem.deterministic for _, problem in seen)
