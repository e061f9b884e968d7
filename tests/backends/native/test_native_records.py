"""The library refuses records that do not describe a problem, instead of reading or writing out of bounds."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any

import pytest
import torch

from undivided.kernels import cpu

pytestmark = pytest.mark.skipif(isinstance(cpu.load(), str), reason="the native kernel is not built")
BAD_RECORD = 1


FIRST_KEYS = ([0, 1, 5], [1, 1, 5], [0, 2, 5], [0, -1, 5], [0, 1, 6])
"""Of each row; only the first ones are none that a row sees an earlier key than."""


def fields(**changed: Any) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The fields of a problem with 1 sequence, 2 heads on 1, 3 rows, 5 keys, and the tensors that they point to."""
    q, out = torch.randn(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)  # the backward reads out
    k, v = torch.randn(1, 1, 5, 8), torch.randn(1, 1, 5, 8)
    ranges = torch.tensor([[0, 5], [1, 4], [5, 5]], dtype=torch.int32)
    bad_ranges = torch.tensor([[0, 5], [-1, 4], [0, 6]], dtype=torch.int32)
    table = torch.zeros(8, dtype=torch.int32)
    record: dict[str, Any] = dict.fromkeys(cpu.FIELDS, 0)
    record |= {"size": cpu.RECORD.size, "batch": 1, "heads": 2, "kv_heads": 1, "q_len": 3, "kv_len": 5, "qk_dim": 8}
    record |= {"v_dim": 8, "threads": 1, "scale": 0.3, "columns": 2, "survivor_scale": 1.0}
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        record[name] = tensor.data_ptr()
        record |= {f"{name}_{axis}": tensor.stride(n) for n, axis in enumerate("bhs")}
    scales = torch.ones(1, 1, 5)
    named = {"SCALES": scales, "RANGES": ranges, "BAD_RANGES": bad_ranges, "TABLE": table}
    named["ROWS"] = torch.zeros(1, 2, 3, 32)
    named |= {f"FIRST_{keys}": torch.tensor(keys, dtype=torch.int32) for keys in FIRST_KEYS}
    record |= {name: named[value].data_ptr() if value in named else value for name, value in changed.items()}
    return record, [q, k, v, out, *named.values()]


def status(record: dict[str, Any]) -> int:
    library = ctypes.CDLL(str(cpu.path()))
    library.undivided_forward.argtypes = [ctypes.c_char_p]
    return int(library.undivided_forward(cpu.RECORD.pack(*(record[name] for name in cpu.FIELDS))))


INT8 = {"format": 1, "k_scale": "SCALES", "v_scale": "SCALES", "k_scale_s": 1, "v_scale_s": 1}
DROPOUT = {"dropout": 100} | dict.fromkeys(("dropout_row", "dropout_sequence", "key_position"), "TABLE")
FIRST = {"batch_invariant": 1, "ranges": "RANGES", "first_key_b": 3}
ONE_PAGE = {"pages": "TABLE", "pages_b": 1, "page_size": 5, "page_count": 1}
INT4 = INT8 | {"format": 4, "qk_dim": 32, "v_dim": 32} | dict.fromkeys(("k_b", "k_h", "k_s", "v_b", "v_h", "v_s"), 0)
INT4 |= {"q": "ROWS", "out": "ROWS", "q_h": 96, "q_s": 32, "out_h": 96, "out_s": 32}
TREE = {"dense": "TABLE", "dense_from": "TABLE", "dense_keys": 2, "dense_q": 2, "dense_k": 1}
BROADCAST = dict.fromkeys((f"{name}_{axis}" for name in "qkv" for axis in "bhs"), 0)
OUT_OF_8_COLUMNS = {"out_s": 8, "out_h": 8 << 21, "out_b": 8 << 21}

GOOD: list[dict[str, Any]] = [
    {},
    {"ranges": "RANGES"},
    {"band": 1, "band_start": -3, "band_stop": 1},
    ONE_PAGE,
    FIRST | {"first_key": "FIRST_[0, 1, 5]"},
    INT4,
    TREE,
    TREE | {"dense_keys": 0},
    {"batch": 0, "q": 0},
    {"kv_len": 0, "k": 0, "v": 0, "slopes": "TABLE", "row_position": "TABLE"},
    {"band": 1, "band_start": 1 << 31, "band_stop": 1 << 31},  # no row sees a key
    {"kv_len": 1, "k_s": 1 << 62, "v_s": 1 << 62},  # the stride of a single key is not used
    dict.fromkeys(("q_b", "k_b", "k_h", "v_b", "v_h", "out_b"), (1 << 63) - 1),  # nor those of one sequence or head
    DROPOUT | {"dropout_head": (1 << 32) - 3},
    INT8,
    INT8 | ONE_PAGE,
    INT8 | {"kv_len": 0, "k": 0, "v": 0, "k_scale": 0, "v_scale": 0},
]


# The largest numbers that are taken, in a record without queries, of which no kernel runs.
LARGEST = {"kv_len": (1 << 31) - 1, "q_len": (1 << 31) - 1, "qk_dim": 1 << 20, "v_dim": 1 << 20, "threads": 1 << 16}


@pytest.mark.parametrize(("name", "largest"), LARGEST.items())
def test_the_largest_sizes_are_taken_and_one_more_is_refused(name: str, largest: int) -> None:
    assert status(fields(batch=0, q=0, **{name: largest})[0]) == 0
    assert status(fields(batch=0, q=0, **{name: largest + 1})[0]) == BAD_RECORD


@pytest.mark.parametrize("changed", GOOD, ids=str)
def test_good_records_run(changed: dict[str, Any]) -> None:
    record, held = fields(**changed)
    assert status(record) == 0
    assert held[3].isfinite().all() or changed.get("batch") == 0


BAD: list[dict[str, Any]] = [
    {"size": cpu.RECORD.size - 8},
    {"dtype": 3},
    {"dtype": -1},
    {"batch": -1},
    {"heads": 3, "kv_heads": 2},
    {"kv_heads": 0},
    {"q_len": 1 << 31},
    {"kv_len": -5},
    {"qk_dim": 0},
    {"v_dim": -8},
    {"v_dim": 1 << 40},
    {"threads": 0},
    {"scale": math.nan},
    {"scale": math.inf},
    {"scale": 1e39},  # infinite in fp32
    {"softcap": 1e39},
    {"softcap": -1.0},
    {"q": 0},
    {"v": 0},
    {"out": 0},
    {"q_s": -8},
    {"out_s": 0},
    {"out_s": 7},
    {"out_h": 16},
    {"k_s": 1 << 62},
    {"bias_k": -(1 << 63)},
    {"ranges": "BAD_RANGES"},
    {"ranges": "RANGES", "columns": 3},
    {"ranges": "RANGES", "band": 1},
    {"pages": "TABLE", "page_size": 0, "page_count": 1},
    {"pages": "TABLE", "page_size": 5, "page_count": -1},
    {"pages": "TABLE", "page_size": 5, "page_count": 0},
    ONE_PAGE | {"pages_b": -1},
    {"bias": "TABLE", "bias_dtype": 7},
    {"slopes": "TABLE"},
    TREE | {"dense_keys": -1},
    TREE | {"dense_keys": 1 << 31},
    TREE | {"dense_k": -1},
    TREE | {"dense_from_b": -1, "batch": 2},
    TREE | {"dense_origin": 1},  # of documents, within the library
    {"dropout": 1 << 17},
    {"dropout": 100},
    DROPOUT | {"dropout_head": -1},
    DROPOUT | {"dropout_head": (1 << 63) - 1},
    # each beyond one limit only: numbers of queries and outputs, of pairs, and rows of a sequence
    BROADCAST | OUT_OF_8_COLUMNS | {"batch": 1 << 20, "heads": 1, "q_len": 1 << 19, "qk_dim": 1 << 20},
    BROADCAST | OUT_OF_8_COLUMNS | {"batch": 1 << 20, "heads": 1, "q_len": 1 << 20, "kv_len": (1 << 31) - 1},
    BROADCAST | OUT_OF_8_COLUMNS | {"heads": 1 << 21, "q_len": 1 << 21},
    INT8 | {"format": 5},
    INT8 | {"format": -1},
    INT8 | {"format": 0},
    INT8 | {"k_scale": 0},
    INT8 | {"v_scale": 0},
    INT8 | {"k_scale_s": -1},
    INT8 | {"v_scale_h": -1},
    INT8 | {"k_scale_b": 1 << 62, "batch": 2},
    INT8 | {"format": 4},  # head sizes that are not whole groups
    INT4 | {"v_dim": 24},
    INT4 | {"qk_dim": 24},
    *(FIRST | {"first_key": f"FIRST_{keys}"} for keys in FIRST_KEYS[1:]),
    FIRST | {"first_key": "FIRST_[0, 1, 5]"} | ONE_PAGE,  # the second begins within a page
    FIRST | {"first_key": "FIRST_[0, 1, 5]", "batch_invariant": 0},
    FIRST | {"first_key": "FIRST_[0, 1, 5]", "ranges": 0},
    FIRST | {"first_key": "FIRST_[0, 1, 5]", "first_key_b": -1, "batch": 2},
    # strides of tensors that are absent
    {"band": 1, "band_start": -3, "band_stop": 1, "ranges_b": -(1 << 62)},
    *({name: -1} for name in ("ranges_b", "first_key_b", "lse_b", "lse_h", "k_scale_s", "v_scale_h")),
]


@pytest.mark.parametrize("changed", BAD, ids=str)
def test_bad_records_are_refused(changed: dict[str, Any]) -> None:
    record, held = fields(**changed)
    held[3].fill_(7)
    assert status(record) == BAD_RECORD
    assert (held[3] == 7).all()


# 3 sequences of 2 tokens in pools of 12 rows of one head
APPEND: dict[str, Any] = dict.fromkeys(cpu.APPEND_FIELDS, 0) | {
    "size": cpu.APPEND_RECORD.size,
    "threads": 2,
    "batch": 3,
}
APPEND |= {"length": 2, "kv_heads": 1, "k_dim": 8, "v_dim": 8, "first_row": 1, "page_rows": 4, "row_count": 12}
APPEND |= {"k_b": 16, "k_h": 8, "k_s": 8, "v_b": 16, "v_h": 8, "v_s": 8}


@pytest.mark.parametrize(
    ("changed", "good"),
    [
        ({}, True),
        ({"first_row": 2}, True),
        ({"first_row": 3}, False),  # the second token in the first row of the next sequence
        ({"page_rows": 2}, False),
        ({"page_rows": 0, "first_row": 0}, False),  # all sequences in the same rows
        ({"batch": 1, "page_rows": 0}, True),
        ({"row_count": 10}, False),
    ],
    ids=str,
)
def test_sequences_of_new_tokens_have_rows_of_their_own(changed: dict[str, Any], good: bool) -> None:
    """Threads would write the rows of two sequences at the same time."""
    tokens, pools = torch.randn(2, 3, 2, 8), torch.zeros(2, 12, 8)
    record = APPEND | {"k": tokens[0].data_ptr(), "v": tokens[1].data_ptr()} | changed
    record |= {"k_pool": pools[0].data_ptr(), "v_pool": pools[1].data_ptr()}
    library = ctypes.CDLL(str(cpu.path()))
    library.undivided_append.argtypes = [ctypes.c_char_p]
    found = library.undivided_append(cpu.APPEND_RECORD.pack(*(record[name] for name in cpu.APPEND_FIELDS)))
    assert found == (0 if good else BAD_RECORD)
    assert bool(pools.any()) == good


def backward_status(record: dict[str, Any], gradients: dict[str, Any]) -> int:
    library = ctypes.CDLL(str(cpu.path()))
    library.undivided_backward.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    packed = cpu.GRADIENT_RECORD.pack(*(gradients[name] for name in cpu.GRADIENT_FIELDS))
    return int(library.undivided_backward(cpu.RECORD.pack(*(record[name] for name in cpu.FIELDS)), packed))


def gradient_fields(**changed: Any) -> tuple[dict[str, Any], dict[str, Any], list[torch.Tensor]]:
    """A problem, its gradients of q, k, v and of a bias for every pair, and the tensors. "a." begins a changed name of
    the problem."""
    bias, d_bias, lse = torch.randn(1, 2, 3, 5), torch.zeros(1, 2, 3, 5), torch.zeros(1, 2, 3)
    strides = {f"bias_{axis}": bias.stride(n) for n, axis in enumerate("bhqk")}
    problem = {"bias": bias.data_ptr(), "lse": lse.data_ptr(), "lse_b": 6, "lse_h": 3} | strides
    problem |= {name.removeprefix("a."): value for name, value in changed.items() if name.startswith("a.")}
    record, held = fields(**problem)
    gradients: dict[str, Any] = dict.fromkeys(cpu.GRADIENT_FIELDS, 0)
    gradients |= {"size": cpu.GRADIENT_RECORD.size, "bias": d_bias.data_ptr()} | strides
    results = [d_bias]
    for name, shape in (("grad_out", held[3]), ("dq", held[0]), ("dk", held[1]), ("dv", held[2])):
        tensor = torch.zeros_like(shape)
        gradients[name] = tensor.data_ptr()
        gradients |= {f"{name}_{axis}": tensor.stride(n) for n, axis in enumerate("bhs")}
        results.append(tensor)
    gradients |= {name: value for name, value in changed.items() if not name.startswith("a.")}
    return record, gradients, [*results, *held, bias, lse]


GOOD_GRADIENTS: list[dict[str, Any]] = [
    {},
    {"bias_h": 0},
    {"bias_k": 0},
    {"bias_h": 0, "bias_q": 0},
    {"bias": 0, "a.bias": 0},
    {"dq": 0, "dk": 0, "dv": 0},
    {"accumulate": 1},
    {"attempt": 3},
    {"bias_b": (1 << 63) - 1, "dq_b": (1 << 63) - 1},  # strides of one sequence are not used
]


@pytest.mark.parametrize("changed", GOOD_GRADIENTS, ids=str)
def test_good_gradient_records_run(changed: dict[str, Any]) -> None:
    record, gradients, held = gradient_fields(**changed)
    assert backward_status(record, gradients) == 0
    assert all(tensor.isfinite().all() for tensor in held[:5])


BAD_GRADIENTS: list[dict[str, Any]] = [
    {"size": 8},
    {"type": 1},  # neither fp32 nor the type of the problem
    {"type": 3},
    {"a.dtype": 1, "type": 1, "accumulate": 1},
    {"attempt": -1},
    {"grad_out": 0},
    {"a.lse": 0},
    {"a.bias": 0},
    {"bias_h": 0, "bias_k": 0},
    {"bias_q": 0, "bias_k": 0},
    {"slopes": "TABLE", "rows_h": 3},  # of a problem without slopes
    {"a.pages": "TABLE", "a.pages_b": 1, "a.page_size": 5, "a.page_count": 1},
    {f"a.{name}": value for name, value in INT8.items()},
    *(
        {name: -1}
        for name in ("grad_out_h", "grad_lse_h", "dq_h", "dk_s", "dv_s", "rows_h", "bias_h", "bias_q", "bias_k")
    ),
    *({name: 1 << 62} for name in ("grad_out_s", "grad_lse_h", "dq_s", "dk_s", "dv_s", "rows_h", "bias_q", "bias_k")),
    *({name: 0} for name in ("dq_h", "dq_s", "dk_s", "dv_s")),  # two rows of a result in one place
    {"sinks": "TABLE", "rows_h": 0},
    {"slopes": "TABLE", "rows_h": 0},
]


@pytest.mark.parametrize("changed", BAD_GRADIENTS, ids=str)
def test_bad_gradient_records_are_refused(changed: dict[str, Any]) -> None:
    table = torch.zeros(64)
    record, gradients, held = gradient_fields(
        **{n: table.data_ptr() if n in ("sinks", "slopes") else v for n, v in changed.items()}
    )
    for tensor in held[:5]:
        tensor.fill_(7)
    assert backward_status(record, gradients) == BAD_RECORD
    assert all((tensor == 7).all() for tensor in (*held[:5],))


def test_a_record_without_heads_shares_no_keys() -> None:
    """Counting the rows of a key head divided by the number of key heads."""
    library = ctypes.CDLL(str(cpu.path()))
    library.undivided_shared_keys.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64]
    library.undivided_shared_keys.restype = ctypes.c_int64
    record, _held = fields(heads=0, kv_heads=0, **ONE_PAGE)
    packed = cpu.RECORD.pack(*(record[name] for name in cpu.FIELDS))
    assert library.undivided_shared_keys(packed, None, 0) == 0


def test_heads_that_share_a_bias_of_all_rows_add_to_it_in_one_order() -> None:
    """Threads once added to it at the same time, each for another head."""
    heads, length, dim = 8, 300, 16
    torch.manual_seed(0)
    q, k, v, out, grad = (torch.randn(1, heads, length, dim) for _ in range(5))
    lse, bias = (q @ k.mT * 0.3).logsumexp(-1), torch.zeros(1, heads, length, length)
    sizes = {"heads": heads, "kv_heads": heads, "q_len": length, "kv_len": length, "qk_dim": dim, "v_dim": dim}
    problem = dict.fromkeys(cpu.FIELDS, 0) | sizes | {"size": cpu.RECORD.size, "batch": 1, "scale": 0.3, "columns": 2}
    problem |= {"bias": bias.data_ptr(), "bias_h": length**2, "bias_q": length, "bias_k": 1, "survivor_scale": 1.0}
    problem |= {"lse": lse.data_ptr(), "lse_h": length}
    gradients = dict.fromkeys(cpu.GRADIENT_FIELDS, 0) | {"size": cpu.GRADIENT_RECORD.size, "bias_k": 1}
    for record, tensors in ((problem, {"q": q, "k": k, "v": v, "out": out}), (gradients, {"grad_out": grad})):
        for name, tensor in tensors.items():
            record |= {name: tensor.data_ptr(), f"{name}_h": length * dim, f"{name}_s": dim}
    sums = [torch.zeros(length) for _ in range(10)]
    for n, result in enumerate(sums):
        status = backward_status(problem | {"threads": 1 + n % 2}, gradients | {"bias": result.data_ptr()})
        assert status == 0
    weights = (q @ k.mT * 0.3 - lse[..., None]).exp()
    expected = (weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))).sum((0, 1, 2))
    torch.testing.assert_close(sums[0], expected, rtol=1e-4, atol=1e-3)
    assert all(torch.equal(result, sums[0]) for result in sums)


def test_a_backward_without_queries_needs_keys() -> None:
    """It writes zeros to the gradients of the keys, so that it prepares them."""
    record, _held = fields(q_len=0, q=0, out=0, k=0)
    assert (
        backward_status(record, dict.fromkeys(cpu.GRADIENT_FIELDS, 0) | {"size": cpu.GRADIENT_RECORD.size})
        == BAD_RECORD
    )


def test_random_records_are_refused() -> None:
    """Records of random bits, of the right size: nothing is read through their pointers."""
    library = ctypes.CDLL(str(cpu.path()))
    library.undivided_forward.argtypes = [ctypes.c_char_p]
    make = torch.Generator().manual_seed(0)
    for _ in range(2000):
        bits = torch.randint(-(1 << 62), 1 << 62, (len(cpu.FIELDS),), generator=make).tolist()
        assert library.undivided_forward(struct.pack(f"{len(bits)}q", cpu.RECORD.size, *bits[1:])) == BAD_RECORD
