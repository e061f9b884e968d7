"""The native kernel on caches: pages read in place, few rows, unequal lengths, on every level and thread count.

`test_backends.py` tests paged calls for every backend. This file tests that nothing is copied, that only real keys are
read, and that neither pages, nor strides, nor threads change a bit of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import forked_processes
import levels
import pytest
import torch
from largest import Largest
from native_oracle import ALLOWED, apart, needs_library
from torch import Tensor

import undivided
from undivided import masks
from undivided.masks import Mask

pytestmark = needs_library

GARBAGE = (-1, -(2**31), 2**31 - 1, 10**6)


def cache(
    lengths: list[int], page_size: int, heads: int, dim: int, dtype: torch.dtype, spare: int = 3, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(k, v contiguous [B, Sk, N, D]; pools of shuffled pages; block table). Everything beyond the lengths is NaN or
    garbage."""
    make = torch.Generator().manual_seed(seed)
    most = max(-(-n // page_size) for n in lengths) + 1
    shape = (len(lengths), most * page_size, heads, dim)
    k, v = (torch.randn(shape, generator=make).to(dtype) for _ in range(2))
    for b, n in enumerate(lengths):
        k[b, n:] = v[b, n:] = torch.nan
    used = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(used) + spare, generator=make)
    pools = [torch.full((len(order), page_size, heads, dim), torch.nan, dtype=dtype) for _ in range(2)]
    table = torch.tensor(GARBAGE, dtype=torch.int32).repeat(most)[: len(lengths) * most].view(-1, most).clone()
    at = 0
    for b, count in enumerate(used):
        for page in range(count):
            table[b, page] = order[at]
            for pool, x in zip(pools, (k, v), strict=True):
                pool[order[at]] = x[b, page * page_size : (page + 1) * page_size]
            at += 1
    return k, v, pools[0], pools[1], table


# strides of a pool: each function gives a tensor [pages, page_size, N, D] of the same values
POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "heads-first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "fused": lambda x: torch.cat((x, torch.full_like(x, torch.nan)), -1)[..., : x.shape[-1]],
    "every-other-page": lambda x: torch.stack((x, torch.full_like(x, torch.nan)), 1)[:, 0],
    "unaligned": lambda x: torch.cat((x.new_full((1,), torch.nan), x.flatten())).as_strided(x.shape, x.stride(), 1),
}
# (lengths, page size, query rows, H, N, D): one-token decoding, speculation, chunked prefill; odd pages; an empty
# sequence
CACHES: dict[str, tuple[list[int], int, int, int, int, int]] = {
    "page-of-one": ([5, 70], 1, 1, 4, 2, 64),
    "page-of-three": ([301, 64], 3, 1, 8, 2, 64),
    "page-of-sixteen": ([1000, 1, 0, 517], 16, 1, 8, 2, 64),
    "page-of-a-tile": ([700, 129], 128, 1, 4, 4, 128),
    "page-of-all": ([300], 512, 1, 2, 1, 32),
    "seven-rows-a-group": ([130, 260], 16, 1, 7, 1, 64),
    "two-and-a-half-loads": ([200, 33], 16, 2, 4, 2, 80),
    "odd-head": ([200, 33], 16, 2, 4, 2, 17),
    "speculation": ([400, 90], 16, 4, 8, 2, 64),
    "twelve-rows-a-group": ([500, 90], 16, 3, 8, 2, 80),
    "nineteen-rows-a-group": ([200, 700], 7, 19, 2, 2, 128),
    "thirty-rows-a-group": ([2100, 3000], 16, 15, 4, 2, 64),
    "chunked-prefill": ([400, 90], 7, 40, 4, 2, 64),
    "prefill": ([300, 300], 48, 300, 2, 2, 32),
    "prefill-tiles": ([500, 300], 256, 300, 2, 1, 32),
}
MASKS: dict[str, Callable[[Tensor], Mask]] = {
    "lengths": lambda n: masks.lengths(n),
    "causal": lambda n: masks.lengths(n) & masks.causal("bottom_right"),
    "window": lambda n: masks.lengths(n) & masks.window(33, 0, "bottom_right"),
    "globals": lambda n: masks.lengths(n) & (masks.window(9, 0, "bottom_right") | masks.prefix(3)),
    "predicate": lambda n: masks.lengths(n) & masks.predicate(lambda b, h, i, j: (i + j + h) % 3 != 0),
}


@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", CACHES)
def test_pages_do_not_change_a_bit(size: str, mask: str, dtype: torch.dtype) -> None:
    """The same bits as without pages, whatever unused pages and entries hold; and the result of the reference."""
    lengths, page_size, q_len, heads, kv_heads, dim = CACHES[size]
    k, v, k_pool, v_pool, table = cache(lengths, page_size, kv_heads, dim, dtype)
    q = torch.randn(len(lengths), q_len, heads, dim).to(dtype)
    asked = {"layout": "bshd", "mask": MASKS[mask](torch.tensor(lengths)), "return_lse": True}
    out, lse = undivided.attention(q, k_pool, v_pool, pages=table, backend="native", **asked)
    plain, plain_lse = undivided.attention(q, k, v, backend="native", **asked)
    assert torch.equal(out, plain)
    assert torch.equal(lse, plain_lse)
    want, _ = undivided.attention(q.double(), k.double(), v.double(), backend="reference", **asked)
    assert apart(out, want) < ALLOWED[dtype]


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_a_table_without_pages(layout: Any) -> None:
    q, pool = torch.randn(2, 2, 8), torch.randn(1, 4, 2, 8)
    packed = layout == "thd"
    mask = masks.documents([0, 2], [0, 0], padded_kv=[0, 0]) if packed else masks.lengths([0])
    pages = torch.empty(1, 0, dtype=torch.int32)
    out = undivided.attention(q if packed else q[None], pool, pool, layout=layout, mask=mask, pages=pages)
    assert not out.any()


@pytest.mark.parametrize(
    "pools", [*((pool, pool) for pool in POOLS), ("plain", "heads-first"), ("heads-first", "fused")], ids="-".join
)
@pytest.mark.parametrize("size", ["page-of-three", "page-of-a-tile", "chunked-prefill", "prefill"])
def test_pools_may_have_any_strides(size: str, pools: tuple[str, str]) -> None:
    lengths, page_size, q_len, heads, kv_heads, dim = CACHES[size]
    k, v, k_pool, v_pool, table = cache(lengths, page_size, kv_heads, dim, torch.bfloat16)
    table = torch.stack((table, table), 2)[:, :, 0]
    q = torch.randn(len(lengths), q_len, heads, dim).to(torch.bfloat16)
    mask = masks.lengths(torch.tensor(lengths))
    out = undivided.attention(
        q, POOLS[pools[0]](k_pool), POOLS[pools[1]](v_pool), layout="bshd", mask=mask, pages=table, backend="native"
    )
    want = undivided.attention(q.double(), k.double(), v.double(), layout="bshd", mask=mask, backend="reference")
    assert apart(out, want) < ALLOWED[torch.bfloat16]


@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("q_lengths", [[1, 1, 1], [3, 0, 40], [1, 200, 1]], ids=str)
def test_packed_queries_over_pages(q_lengths: list[int], dtype: torch.dtype) -> None:
    lengths = [60, 500, 201]
    _, _, k_pool, v_pool, table = cache(lengths, 16, 2, 64, dtype)
    q = torch.randn(sum(q_lengths), 4, 64).to(dtype)
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (q_lengths, lengths))
    mask = masks.documents(cu_q, cu_k) & masks.causal("bottom_right")
    asked = {"layout": "thd", "mask": mask, "pages": table}
    out = undivided.attention(q, k_pool, v_pool, backend="native", **asked)
    wide = (x.double() for x in (q, k_pool, v_pool))
    assert apart(out, undivided.attention(*wide, backend="reference", **asked)) < ALLOWED[dtype]


@pytest.mark.parametrize("q_len", [1, 30])
def test_bias_slopes_softcap_and_sinks_over_pages(q_len: int) -> None:
    lengths = [333, 47]
    k, v, k_pool, v_pool, table = cache(lengths, 5, 2, 64, torch.float32)
    q = torch.randn(2, q_len, 4, 64)
    asked = {
        "layout": "bshd",
        "mask": masks.lengths(torch.tensor(lengths)) & masks.causal("bottom_right"),
        "bias": torch.randn(1, 4, 1, k.shape[1]),
        "alibi_slopes": torch.rand(4),
        "softcap": 3.0,
        "sinks": torch.randn(4),
    }
    out = undivided.attention(q, k_pool, v_pool, pages=table, backend="native", **asked)
    want = undivided.attention(q.double(), k.double(), v.double(), backend="reference", **asked)
    assert apart(out, want) < ALLOWED[torch.float32]


# (q rows, H, N, keys): few enough blocks that the keys are divided too; decoding of several chunks
THREADED = {
    "one-row": (1, 8, 2, 5000),
    "speculation": (4, 4, 2, 5000),
    "nine-rows": (9, 2, 2, 5000),
    "twenty-rows": (5, 8, 2, 5000),
    "thirty-two-rows": (8, 8, 2, 5000),
    "sixty-rows-shared-heads": (60, 8, 2, 3000),
    "two-blocks": (100, 1, 1, 4100),
}


@functools.lru_cache(maxsize=len(ALLOWED))
def unequal_lengths(size: str, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], dict[str, Any], tuple[Tensor, Tensor]]:
    """Queries, keys, values and both in pages with their table; arguments; the right output and log-sum-exp."""
    torch.manual_seed(0)
    q_len, heads, kv_heads, most = THREADED[size]
    lengths = [most, most // 3, 1, 0]
    k, v, *paged = cache(lengths, 16, kv_heads, 64, dtype)
    q = torch.randn(4, q_len, heads, 64).to(dtype)
    asked = {"mask": masks.lengths(torch.tensor(lengths)), "sinks": torch.randn(heads), "return_lse": True}
    right = undivided.attention(q.double(), k.double(), v.double(), layout="bshd", backend="reference", **asked)
    return (q, k, v, *paged), asked, right


@pytest.mark.parametrize("dtype", ALLOWED, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "paged"])
@pytest.mark.parametrize("size", THREADED)
def test_few_rows_over_unequal_lengths_on_any_number_of_threads(size: str, layout: str, dtype: torch.dtype) -> None:
    """The same bits, and the right result: with sinks, a log-sum-exp, an almost empty sequence and an empty one."""
    (q, k, v, k_pool, v_pool, table), given, (want, want_lse) = unequal_lengths(size, dtype)
    asked = dict(given)
    operands, asked["layout"] = (q, k, v), "bshd"
    if layout == "paged":
        operands, asked["pages"] = (q, k_pool, v_pool), table
    elif layout == "bhsd":
        operands, asked["layout"] = tuple(t.transpose(1, 2).contiguous() for t in operands), "bhsd"
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(undivided.attention(*operands, backend="native", **asked))
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
    out, lse = results[0]
    assert apart(out.transpose(1, 2) if layout == "bhsd" else out, want) < ALLOWED[dtype]
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("mask", MASKS)
def test_divided_keys_follow_every_mask(mask: str) -> None:
    lengths = [4500, 2100]
    k, v, *_ = cache(lengths, 16, 1, 32, torch.float32)
    q = torch.randn(2, 20, 2, 32)
    asked = {"layout": "bshd", "mask": MASKS[mask](torch.tensor(lengths))}
    out = undivided.attention(q, k, v, backend="native", **asked)
    want = undivided.attention(q.double(), k.double(), v.double(), backend="reference", **asked)
    assert apart(out, want) < ALLOWED[torch.float32]


def test_page_numbers_outside_the_pool_are_refused_before_the_kernel_runs() -> None:
    """Only if it is within a length, whatever the other entries hold."""
    _, _, k_pool, v_pool, table = cache([40, 17], 16, 1, 32, torch.float32)
    q, mask = torch.randn(2, 1, 1, 32), masks.lengths(torch.tensor([40, 17]))
    asked = {"layout": "bshd", "mask": mask, "backend": "native"}
    undivided.attention(q, k_pool, v_pool, pages=table, **asked)
    for wrong in (-1, k_pool.shape[0]):
        table[1, 1] = wrong
        with pytest.raises(undivided.InputError, match=f"pages must number pages of the pool.* got {wrong}"):
            undivided.attention(q, k_pool, v_pool, pages=table, **asked)


@pytest.mark.parametrize("q_len", [1, 100])
def test_pages_are_not_copied(q_len: int) -> None:
    """Eight sequences share their pages, as after a common prompt: copies of them would need eight pools."""
    k_pool, v_pool = torch.randn(2, 300, 16, 2, 32)
    table = torch.randperm(300)[:250].int().repeat(8, 1)
    q, mask = torch.randn(8, q_len, 4, 32), masks.lengths(torch.full((8,), 4000))
    with Largest() as seen:
        undivided.attention(q, k_pool, v_pool, layout="bshd", mask=mask, pages=table, backend="native")
    assert seen.bytes == q.untyped_storage().nbytes(), "the largest storage is that of the output"


@pytest.mark.slow
@pytest.mark.parametrize("level", levels.others())
def test_every_other_level_of_this_machine(level: str) -> None:
    """Results of a level are those of the oracle, and with pages those without."""
    program = (
        "import test_native_decode as t\n"
        "for size in t.CACHES:\n"
        "  for mask in ('causal', 'globals'):\n"
        "    for dtype in t.ALLOWED:\n"
        "      t.test_pages_do_not_change_a_bit(size, mask, dtype)\n"
        "for size in t.THREADED:\n"
        "  for dtype in t.ALLOWED:\n"
        "    t.test_few_rows_over_unequal_lengths_on_any_number_of_threads(size, 'bshd', dtype)\n"
    )
    ran = forked_processes.run(program, environment={"UNDIVIDED_ISA": level})
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": True}, {"window": 8001}], ids=str)
@pytest.mark.parametrize(("dtype", "group"), [(torch.float32, 1), (torch.float32, 3), (torch.bfloat16, 2)], ids=str)
def test_keys_too_many_for_the_caches_are_decoded_right(
    dtype: torch.dtype, group: int, options: dict[str, Any]
) -> None:
    """From 24 MiB on, keys whose heads are side by side are decoded by units of their own."""
    heads = 4 * group
    q = torch.randn(2, 1, heads, 64).to(dtype)
    k, v = (torch.randn(2, 12_501 if dtype == torch.float32 else 25_001, 4, 64).to(dtype) for _ in range(2))
    mask = masks.lengths([k.shape[1], 9_001])
    if "window" in options:
        mask = mask & masks.window(options["window"], 0, "bottom_right")
    sinks = torch.linspace(-1, 1, heads) if "sinks" in options else None

    def decoded(backend: str, *tensors: Tensor) -> Tensor:
        rest = {"softcap": options.get("softcap"), "sinks": sinks, "backend": backend}
        out: Tensor = undivided.attention(*tensors, layout="bshd", mask=mask, **rest)
        return out.double()

    found, expected = decoded("native", q, k, v), decoded("reference", *(x.double() for x in (q, k, v)))
    assert apart(found, expected) < ALLOWED[dtype]


@pytest.mark.parametrize(
    ("heads", "qk_dim", "v_dim"), [(128, 528, 528), (1, 64, 70000)], ids=["many-heads", "one-head"]
)
def test_few_keys_each_of_which_is_larger_than_a_chunk(heads: int, qk_dim: int, v_dim: int) -> None:
    """The number of keys of a chunk was 0 then, and dividing by it ended the process."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, length, heads, dim) for length, dim in ((1, qk_dim), (10, qk_dim), (10, v_dim)))
    got, want = (undivided.attention(q, k, v, layout="bshd", backend=name) for name in ("native", "reference"))
    assert apart(got, want.double()) < ALLOWED[torch.float32]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("q_len", [1, 3, 40])
@pytest.mark.parametrize("tokens", [4, 256, 300, 700])
def test_keys_between_sink_tokens_and_a_window_change_nothing(tokens: int, q_len: int, layout: Any) -> None:
    """The next chunk begins after them, whether the sink tokens fill part of a chunk, one, or more."""
    torch.manual_seed(0)
    q = torch.randn(2, q_len, 4, 128)
    k, v = (torch.randn(2, 5000, 2, 128) for _ in range(2))
    mask = masks.window(900, 0, align="bottom_right") | masks.sinks(tokens)
    unseen = slice(tokens, 5000 - q_len - 900)
    k[:, unseen] = v[:, unseen] = torch.nan
    if layout == "bhsd":
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    out = undivided.attention(q, k, v, layout=layout, mask=mask, backend="native")
    want = undivided.attention(q.double(), k.double(), v.double(), layout=layout, mask=mask, backend="reference")
    assert apart(out, want) < ALLOWED[torch.float32]
