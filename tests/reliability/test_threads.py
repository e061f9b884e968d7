"""Many Python threads at once: every result has the bits that one thread computes."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.backends.triton import tables
from undivided.masks import Mask
from undivided.masks.normal_form import NormalForm
from undivided.request.normalise import normalise
from undivided.request.request import Request

THREADS, CALLS = 8, 12


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    """Python changes between threads a thousand times as often as by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def decode(n: int) -> list[Tensor]:
    make = torch.Generator().manual_seed(n)
    q, k = torch.randn(3, 1, 8, 64, generator=make), torch.randn(3, 200 + 31 * n, 2, 64, generator=make)
    lengths = masks.lengths([100, 200, 150 + n])
    return [undivided.attention(q.bfloat16(), k.bfloat16(), k.bfloat16(), layout="bshd", mask=lengths)]


def pack(n: int) -> list[Tensor]:
    make = torch.Generator().manual_seed(n)
    q = torch.randn(90 + n, 4, 32, generator=make)
    mask = masks.documents(torch.tensor([0, 7, 40, 90 + n])) & masks.causal()
    return [undivided.attention(q, q, q, layout="thd", mask=mask)]


def train(n: int) -> list[Tensor]:
    make = torch.Generator().manual_seed(n)
    leaves = [torch.randn(1, 70 + n, 4, 32, generator=make).requires_grad_() for _ in range(3)]
    out = undivided.attention(*leaves, layout="bshd", mask=masks.window(20, 0), softcap=5.0)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def cache(n: int) -> list[Tensor]:
    make = torch.Generator().manual_seed(n)
    paged = undivided.PagedKVCache(num_pages=16, page_size=8, kv_heads=2, head_dim=32, batch=2, dtype=torch.float32)
    outs = []
    for count in (9, 1, 1 + n % 3):
        q, k = torch.randn(2, count, 4, 32, generator=make), torch.randn(2, count, 2, 32, generator=make)
        paged.append(k, k)
        outs.append(paged.attend(q))
    return outs


WORK = [decode, pack, train, cache]


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_threads_compute_the_bits_of_one(work: Callable[[int], list[Tensor]]) -> None:
    expected = [work(n) for n in range(CALLS)]
    start = threading.Barrier(THREADS)

    def run(thread: int) -> bool:
        start.wait()
        order = [(thread + n) % CALLS for n in range(CALLS)]
        return all(torch.equal(a, b) for n in order for a, b in zip(work(n), expected[n], strict=True))

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(run, range(THREADS)))


def documents() -> Mask:
    return masks.documents(torch.tensor([0, 7, 40, 90]), torch.tensor([0, 50, 120, 300])) & masks.causal("bottom_right")


SHARED: dict[str, tuple[Callable[[], Mask], str, dict[str, Any]]] = {
    "lengths": (lambda: masks.lengths([100, 200, 150]), "bshd", {}),
    "sinks": (lambda: masks.lengths([100, 200, 150]), "bshd", {"sinks": torch.zeros(4)}),
    "slopes": (
        lambda: masks.lengths([100, 200, 150]) & masks.causal("bottom_right"),
        "bshd",
        {"alibi_slopes": torch.rand(4)},
    ),
    "dropout": (lambda: masks.lengths([100, 200, 150]), "bshd", {"dropout_p": 0.2, "dropout_seed": 3}),
    "invariant": (documents, "thd", {"batch_invariant": True}),
    "documents": (documents, "thd", {}),
    "dense": (lambda: masks.dense(torch.ones(30, 300, dtype=torch.bool).tril()), "bshd", {}),
    "predicate": (lambda: masks.predicate(lambda b, h, q, k: (q + k) % 3 > 0), "bshd", {}),
    "blocks": (lambda: masks.blocks(30, 50, torch.tensor([[0, 2, 5]])), "bshd", {}),
}


@pytest.mark.parametrize("rounds", [20, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SHARED)
def test_threads_may_share_a_mask_that_none_has_used(name: str, rounds: int) -> None:
    """All of them compute what the kernel reads of the mask, and one of these results stays."""
    new_mask, layout, options = SHARED[name]
    shapes = ((90, 4, 32), (300, 2, 32)) if layout == "thd" else ((3, 30, 4, 32), (3, 300, 2, 32))
    make = torch.Generator().manual_seed(0)
    q, k = (torch.randn(shape, generator=make, requires_grad=True) for shape in shapes)

    def results(mask: Mask) -> list[Tensor]:
        out = undivided.attention(q, k, k, layout=layout, mask=mask, **options)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k))]

    expected = results(new_mask())
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(rounds):
            mask, start = new_mask(), threading.Barrier(THREADS)

            def run(_: int, mask: Mask = mask, start: threading.Barrier = start) -> bool:
                start.wait()
                return all(torch.equal(a, b) for _ in range(2) for a, b in zip(results(mask), expected, strict=True))

            assert all(pool.map(run, range(THREADS)))


def test_the_first_normal_form_of_a_mask_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 6, 2, 8)
    call, _ = normalise(Request.from_keywords(q, q, q, layout="bshd", mask=masks.lengths([4])))
    build, of_others = Mask.normal_form, []

    def interrupted(mask: Mask, *arguments: Any) -> NormalForm:
        """Another thread builds and keeps the form in the meantime."""
        monkeypatch.setattr(Mask, "normal_form", build)
        of_others.append(call.normal_form(q))
        return dataclasses.replace(build(mask, *arguments))

    monkeypatch.setattr(Mask, "normal_form", interrupted)
    assert call.normal_form(q) is of_others[0]
    assert call.normal_form(q) is of_others[0]


def test_the_first_table_of_a_normal_form_stays() -> None:
    together = threading.Barrier(2)

    class Ranges(Tensor):
        """Whose clamp returns when two threads have called it."""

        def clamp(self, *_: Any) -> Tensor:
            together.wait(60)
            return torch.zeros(1, 3, 2, dtype=torch.int32)

    form = NormalForm(torch.zeros(1, 3, 2, dtype=torch.int32).as_subclass(Ranges), 5)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: form.table, range(2))
    assert first is second is form.table
    assert form.table_place[0] == form.table.data_ptr()


def test_the_number_of_threads_may_change_between_and_during_calls() -> None:
    expected = [train(n) for n in range(CALLS)]
    before = torch.get_num_threads()
    stop = threading.Event()

    def change() -> None:
        count = 1
        while not stop.wait(0.0005):
            count = count % 5 + 1
            torch.set_num_threads(count)

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(5):
            for n in range(CALLS):
                torch.set_num_threads(n % 4 + 1)
                assert all(torch.equal(a, b) for a, b in zip(train(n), expected[n], strict=True))
    finally:
        stop.set()
        changer.join()
        torch.set_num_threads(before)


def test_threads_share_a_bounded_number_of_tables_of_tiles() -> None:
    def look_up(first: int) -> None:
        for length in range(first, 3200, 16):
            tables.cached_tables(None, length, 16, 16, 16, torch.device("cpu"))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(look_up, (16, 32, 1600, 1616)))
    found = tables._plain_tables.cache_info()
    assert found.currsize == found.maxsize


def test_settings_of_a_block_hold_in_its_own_thread_only() -> None:
    q = torch.randn(1, 8, 2, 16)
    inside, outside = threading.Event(), threading.Event()
    seen: list[str] = []

    def other() -> None:
        inside.wait()
        seen.append(undivided.explain(q, q, q, layout="bshd").backend.name)
        outside.set()

    thread = threading.Thread(target=other)
    default = undivided.explain(q, q, q, layout="bshd").backend.name
    thread.start()
    with undivided.use_backends("reference"):
        inside.set()
        outside.wait()
    thread.join()
    assert seen == [default] != ["reference"]
