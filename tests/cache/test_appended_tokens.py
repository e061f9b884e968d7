"""New tokens that the native kernel writes: the bits of the tensor operations that define them, in every format."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import levels
import pytest
import torch
from difficult_rows import difficult_rows
from native_oracle import needs_library
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import undivided
from undivided.cache import _appended
from undivided.cache._storage import NewTokens, Storage, TokenSpec
from undivided.errors import InputError
from undivided.kernels import cpu

pytestmark = needs_library

FORMATS = (None, "int8", "fp8_e4m3", "fp8_e5m2", "int4")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def appended(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call wrote its tokens by the kernel."""
    seen: list[bool] = []
    append = _appended.append

    def noted(*arguments: object, **options: object) -> bool:
        seen.append(append(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(_appended, "append", noted)
    return seen


def bits(storage: Storage) -> list[Tensor]:
    """The bytes of the pools and scales; NaN has one form in scales."""
    return [
        (part.nan_to_num(nan=1e38) if part.dtype == torch.float32 else part).view(torch.uint8)
        for part in storage._all_pools
    ]


def written(
    write: Callable[[Storage], None],
    spec: TokenSpec,
    pages: int,
    page_size: int,
    by_kernel: bool,
    monkey: pytest.MonkeyPatch,
) -> Storage:
    storage = Storage(pages, page_size, spec, torch.device("cpu"))
    for part in storage._all_pools:
        part.view(torch.uint8).zero_()
    with monkey.context() as patched:
        if not by_kernel:
            patched.setattr(_appended, "append", lambda *_, **__: False)
        write(storage)
    return storage


@pytest.mark.parametrize("dims", [(128, 128), (64, 32), (96, 160)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_rows_have_the_bits_of_their_definition(
    format: str | None, dtype: torch.dtype, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch, appended: list[bool]
) -> None:
    compare(format, dtype, dims, monkeypatch)
    assert all(appended)
    assert len(appended) == 2 * len(levels.here())


@pytest.mark.parametrize("dims", [(1, 3), (5, 17), (33, 7)], ids=str)
@pytest.mark.parametrize("format", FORMATS[:-1])
def test_rows_of_any_size(format: str | None, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in DTYPES:
        compare(format, dtype, dims, monkeypatch)


def compare(format: str | None, dtype: torch.dtype, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TokenSpec.checked(3, *dims, dtype, quantize=format)
    k, v = (difficult_rows((2, 9, 3, dim), dtype, seed) for seed, dim in enumerate(dims))
    new = NewTokens(k, v, (9, 9), False)
    rows = torch.randperm(40)[:18].tolist()

    def scatter(storage: Storage) -> None:
        storage.write(storage.rows(rows), new)

    def fill(storage: Storage) -> None:
        storage.fill(4, new)

    for write, pages, page_size in ((scatter, 5, 8), (fill, 2, 16)):
        expected = bits(written(write, spec, pages, page_size, False, monkeypatch))
        for level in levels.here():
            with levels.running(level, 1):
                found = bits(written(write, spec, pages, page_size, True, monkeypatch))
            for name, mine, theirs in zip(("k", "v", "k_scale", "v_scale"), found, expected, strict=False):
                assert torch.equal(mine, theirs), (level, write.__name__, name)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("format", FORMATS)
def test_threads_share_many_tokens(format: str | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TokenSpec.checked(2, 64, 64, torch.float32, quantize=format)
    k, v = (difficult_rows((2, 700, 2, 64), torch.float32, seed) for seed in (0, 1))
    assert k.numel() + v.numel() > 2 * 64 << 10

    def fill(storage: Storage) -> None:
        storage.fill(3, NewTokens(k, v, (700, 700), False))

    expected = bits(written(fill, spec, 2, 710, False, monkeypatch))
    with levels.running(levels.here()[-1], threads):
        found = bits(written(fill, spec, 2, 710, True, monkeypatch))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd", "thd"])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_layouts_paddings_and_strides(
    format: str | None, paged: bool, layout: str, monkeypatch: pytest.MonkeyPatch, appended: list[bool]
) -> None:
    options = {"batch": 3, "head_dim": 32, "kv_heads": 2, "dtype": torch.bfloat16, "layout": layout, "quantize": format}
    make = (
        (lambda: undivided.PagedKVCache(16, 4, **options))
        if paged
        else (lambda: undivided.KVCache(max_len=16, **options))
    )
    mine, theirs = make(), make()
    for length, counts in ((5, [5, 2, 4]), (1, [1, 1, 1]), (3, [0, 3, 1]), (2, [2, 2, 2])):
        shapes = {"bshd": (3, length, 4), "sbhd": (length, 3, 4), "bhsd": (3, 4, length), "thd": (sum(counts), 4)}
        k, v = (torch.randn(*shapes[layout], 40).bfloat16()[..., :32] for _ in range(2))
        axis = 1 if layout == "bhsd" else -2
        k, v = k.narrow(axis, 0, 2), v.narrow(axis, 2, 2)
        mine.append(k, v, lengths=counts)
        with monkeypatch.context() as patched:
            patched.setattr(_appended, "append", lambda *_, **__: False)
            theirs.append(k, v, lengths=counts)
    assert appended
    assert all(appended)
    q = torch.randn({"bshd": (3, 1, 2), "sbhd": (1, 3, 2), "bhsd": (3, 2, 1), "thd": (3, 2)}[layout] + (32,)).bfloat16()
    counts = {"q_lengths": [1, 1, 1]} if layout == "thd" else {}
    assert torch.equal(mine.attend(q, **counts), theirs.attend(q, **counts))


def test_other_tokens_are_written_by_tensor_operations(appended: list[bool]) -> None:
    """fp64, a dtype that is converted, tokens of the cache itself, negated views, and tokens that a mode looks at."""

    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, arguments=(), options=None):  # type: ignore[no-untyped-def]
            return function(*arguments, **(options or {}))

    new = torch.randn(1, 2, 2, 8)
    double = undivided.KVCache(1, 16, 2, 8, dtype=torch.float64)
    double.append(new.double(), new.double())
    cache = undivided.KVCache(1, 16, 2, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        cache.append(new.bfloat16(), new.bfloat16())
    cache.append(cache.k[:, :2], cache.v[:, :2])
    negative = torch.imag(torch.conj(torch.complex(new, new)))
    assert negative.is_neg()
    cache.append(negative.contiguous() if negative.stride(-1) != 1 else negative, new)
    with Looking():
        cache.append(new, new)
    cache.append(*(new.transpose(2, 3).contiguous().transpose(2, 3) for _ in range(2)))
    assert appended[:3] == [False] * 3
    assert appended[4:] == [False] * 2
    torch.testing.assert_close(cache.k[:, 2:4], cache.k[:, :2])
    assert torch.equal(cache.k[:, 6:8], new)
    assert torch.equal(cache.k[:, 8:10], new)


def test_a_pool_that_a_graph_has_saved_is_known_to_have_changed() -> None:
    cache = undivided.KVCache(1, 16, 2, 8, dtype=torch.float32)
    new, q = torch.randn(1, 2, 2, 8), torch.randn(1, 1, 2, 8, requires_grad=True)
    cache.append(new, new)
    loss = cache.attend(q).sum()
    with torch.no_grad():
        cache.append(new, new)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("format", FORMATS)
def test_a_cache_can_be_copied_and_saved(format: str | None) -> None:
    cache, new = undivided.KVCache(1, 16, 2, 32, dtype=torch.float32, quantize=format), torch.randn(1, 2, 2, 32)
    cache.append(new, new)
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    for other in (copy.deepcopy(cache), torch.load(file, weights_only=False), pickle.loads(pickle.dumps(cache))):
        assert (other.k.dtype, other.v.dtype) == (cache.k.dtype, cache.v.dtype)
        other.append(new, new)
        assert other.lengths == (4,)
        assert torch.equal(other.k[:, 2:4].view(torch.uint8), other.k[:, :2].view(torch.uint8))


@pytest.mark.parametrize("name", ["k", "k_scale"])
def test_pools_that_were_taken_away_are_refused(name: str) -> None:
    cache, new = undivided.KVCache(1, 16, 2, 32, dtype=torch.float32, quantize="int8"), torch.randn(1, 2, 2, 32)
    getattr(cache, name).untyped_storage().resize_(0)
    with pytest.raises((InputError, RuntimeError)):
        cache.append(new, new)


@pytest.mark.parametrize("size", [0, 128, 3000])
@pytest.mark.parametrize("format", [None, "int8"])
@pytest.mark.parametrize("paged", [False, True])
def test_pools_whose_memory_was_taken_away_in_part_are_refused(paged: bool, format: str | None, size: int) -> None:
    options = {"kv_heads": 1, "head_dim": 32, "dtype": torch.float32, "quantize": format}

    def make() -> undivided.KVCache | undivided.PagedKVCache:
        cache = undivided.PagedKVCache(40, 4, batch=2, **options) if paged else undivided.KVCache(2, 160, **options)
        cache.append(new, new)
        for pool in (cache.k, cache.v):
            pool.untyped_storage().resize_(size)
        return cache

    new = torch.randn(2, 9, 1, 32)
    calls: list[Callable[[undivided.KVCache | undivided.PagedKVCache], object]] = [
        lambda cache: cache.append(new, new),
        lambda cache: cache.append(new, new, lengths=[3, 9]),
        lambda cache: cache.keep([[2, 4], [0, 8]]),
        lambda cache: cache._storage.gather(torch.tensor([[0, 1]])),
        lambda cache: cache._storage.with_page_size(0, 3, 8),
    ]
    if not paged:
        calls.append(lambda cache: cache.fork(0, 1))
    for call in calls:
        cache = make()
        with pytest.raises(InputError, match=rf"cache.k must have its \d+ bytes in memory, got a storage of {size} "):
            call(cache)
        assert cache.lengths == (9, 9)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tokens_in_the_memory_of_the_cache_are_appended(dtype: torch.dtype, paged: bool) -> None:
    options = {"kv_heads": 1, "head_dim": 8, "dtype": dtype}
    cache = undivided.PagedKVCache(8, 8, batch=1, **options) if paged else undivided.KVCache(1, 32, **options)
    new = torch.randn(1, 5, 1, 8, dtype=dtype)
    cache.append(new, -new)
    cache.append(cache.k[:1, :3], cache.v[:1, :3])
    cache.append(cache.v[:1, 7:8], cache.k[:1, 7:8])
    cache.truncate([5])
    cache.append(cache.v[:1, 4:7], cache.k[:1, 4:7])  # where the tokens are, each a row further
    rows = torch.cat([new, -new[:, 4:], -new[:, :2]], 1)
    for found, expected in ((cache.k, rows), (cache.v, -rows)):
        assert torch.equal(found.flatten(0, 1)[None, :8], expected)


def good_record() -> tuple[dict[str, int], list[Tensor]]:
    k, pool, rows = torch.randn(2, 3, 2, 32), torch.zeros(10, 2, 32), torch.arange(6)
    record = dict.fromkeys(cpu.APPEND_FIELDS, 0)
    record |= {"size": cpu.APPEND_RECORD.size, "threads": 1, "batch": 2, "length": 3, "kv_heads": 2}
    record |= {"k_dim": 32, "v_dim": 32, "row_count": 10, "page_rows": 5, "rows": rows.data_ptr()}
    for name in "kv":
        record |= {name: k.data_ptr(), f"{name}_b": 192, f"{name}_s": 64, f"{name}_h": 32}
        record[f"{name}_pool"] = pool.data_ptr()
    return record, [k, pool, rows]


def status(record: dict[str, int]) -> int:
    library = cpu.load()
    assert isinstance(library, cpu.Library)
    return int(library._append(cpu.APPEND_RECORD.pack(*(record[name] for name in cpu.APPEND_FIELDS))))


def test_a_good_record_is_written() -> None:
    record, (k, pool, _) = good_record()
    assert status(record) == 0
    assert torch.equal(pool[:6].flatten(), k.flatten())
    assert pool[6:].abs().sum() == 0
    record |= {"rows": 0, "first_row": 2}
    assert status(record) == 0
    assert torch.equal(pool[7:10].flatten(), k[1].flatten())


BAD = [
    {"size": 8},
    {"dtype": 3},
    {"format": 5},
    {"format": 1},
    {"threads": 0},
    {"batch": -1},
    {"length": 1 << 40},
    {"k_dim": 0},
    {"v_dim": -1},
    {"row_count": 5},
    {"row_count": -1},
    {"rows": 0, "first_row": 3},
    {"rows": 0, "first_row": -1},
    {"rows": 0, "page_rows": -5},
    {"rows": 0, "page_rows": 1 << 62},
    {"k": 0},
    {"v_pool": 0},
    {"k_b": -1},
    {"v_s": 1 << 61},
]


@pytest.mark.parametrize("changed", BAD, ids=str)
def test_a_bad_record_is_refused_and_nothing_is_written(changed: dict[str, int]) -> None:
    record, (_, pool, _) = good_record()
    assert status(record | changed) == 1
    assert pool.abs().sum() == 0


def test_groups_of_int4_divide_the_head_sizes() -> None:
    record, kept = good_record()
    scale = torch.zeros(10, 2, 1)
    record |= {"format": 4, "k_scale": scale.data_ptr(), "v_scale": scale.data_ptr()}
    assert status(record) == 0
    for name in ("k_dim", "v_dim"):
        assert status(record | {name: 16}) == 1
    assert len(kept) == 3


@pytest.mark.parametrize("row", [-1, 10, 1 << 62, -(1 << 62)])
def test_rows_outside_of_the_pools_are_refused(row: int) -> None:
    record, (_, pool, rows) = good_record()
    rows[4] = row
    assert status(record) == 1
    assert pool.abs().sum() == 0
