"""Padding may hold anything; documents, gradients, layouts and pages follow the definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import brute_force
import pytest
import torch
import torch.nn.functional as F
from brute_force import Places, causal, error, packed, padded, window
from semantics_inputs import BACKENDS, EXACT, NAN, assert_defined, heads_first, in_layout, qkv, random
from torch import Tensor

import undivided
from undivided import masks

LAYOUTS = ("bhsd", "bshd", "sbhd")


def poisoned(
    tensors: tuple[Tensor, Tensor, Tensor], mask: masks.Mask, layout: str, backend: str, hidden: tuple[Tensor, Tensor]
) -> None:
    """NaN in the hidden rows and keys (bool [B, S]) changes no output, and no gradient; hidden gradients are 0."""

    def run(x: tuple[Tensor, ...]) -> list[Tensor]:
        leaves = [in_layout(t, layout).requires_grad_() for t in x]
        out = undivided.attention(*leaves, layout=layout, mask=mask, backend=backend)  # type: ignore[call-overload]
        pull = in_layout(random(*tensors[0].shape[:3], tensors[2].shape[-1], seed=9), layout)
        return [heads_first(t, layout) for t in (out, *torch.autograd.grad(out, leaves, pull))]

    rows, keys = hidden
    bad = [t.clone() for t in tensors]
    for t, where in zip(bad, (rows, keys, keys), strict=True):
        t.transpose(1, 2)[where] = NAN
    assert sum(int(t.isnan().sum()) for t in bad) > 0
    for name, got, want in zip(("out", "dq", "dk", "dv"), run(tuple(bad)), run(tensors), strict=True):
        assert error(got, want) < EXACT, name
        unseen = keys if name in ("dk", "dv") else rows
        assert bool((got.transpose(1, 2)[unseen] == 0).all()), f"{name} of what is hidden"


def outside(places: Places) -> tuple[Tensor, Tensor]:
    return tuple(torch.tensor([[p is None for p in line] for line in side]) for side in (places.rows, places.keys))  # type: ignore[return-value]


POISON = {
    "lengths": (masks.lengths([6, 3], [4, 2]), padded(2, 4, 6, [6, 3], [4, 2])),
    "lengths-of-keys": (masks.lengths([6, 3]), padded(2, 4, 6, [6, 3])),
    "left-padding": (
        masks.lengths([4, 3], [2, 3], kv_start=[2, 3], q_start=[2, 1]),
        padded(2, 4, 6, [4, 3], [2, 3], [2, 3], [2, 1]),
    ),
    "no-keys": (masks.lengths([0, 3], [4, 0]), padded(2, 4, 6, [0, 3], [4, 0])),
    "causal-lengths": (masks.causal("bottom_right") & masks.lengths([6, 3], [4, 2]), padded(2, 4, 6, [6, 3], [4, 2])),
    "window-left-padding": (
        masks.window(1, 1, "bottom_right") & masks.lengths([4, 3], [2, 3], kv_start=[2, 3], q_start=[2, 1]),
        padded(2, 4, 6, [4, 3], [2, 3], [2, 3], [2, 1]),
    ),
    "global-window": (
        (masks.window(1, 0, "bottom_right") | masks.prefix(1)) & masks.lengths([6, 3], [4, 2]),
        padded(2, 4, 6, [6, 3], [4, 2]),
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", POISON)
def test_padding_may_be_nan(name: str, layout: str, backend: str) -> None:
    mask, places = POISON[name]
    rows, keys = outside(places)
    if name == "no-keys":
        rows[0], keys[1] = True, True  # no key to attend to, and no query that attends to it
    poisoned(qkv(q_len=4, kv_len=6, heads=4, kv_heads=2), mask, layout, backend, (rows, keys))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causally", [False, True], ids=["all", "causal"])
def test_padding_between_and_after_documents_may_be_nan(backend: str, causally: bool) -> None:
    mask = masks.documents([0, 3, 5, 9], padded_q=[0, 4, 8, 13], total_q=15)
    places = packed([0, 3, 5, 9], slots_q=[0, 4, 8, 13], tokens_q=15, tokens_kv=15)
    poisoned(qkv(1, q_len=15, kv_len=15), mask & masks.causal() if causally else mask, "thd", backend, outside(places))


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_with_a_negative_id_may_be_nan(backend: str) -> None:
    ids = torch.tensor([[0, 0, 1, -1, -1], [-1, 4, 4, 2, -1]])
    poisoned(qkv(), masks.document_ids(ids) & masks.causal(), "bshd", backend, (ids < 0, ids < 0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["dense", "predicate"])
def test_keys_and_rows_that_a_dense_mask_hides_may_be_nan(backend: str, kind: str) -> None:
    keys = torch.tensor([[True, False, True, True, False], [False, True, True, True, True]])
    rows = torch.tensor([[True, True, False, True, True], [True, True, True, True, False]])
    tensor = (rows[:, :, None] & keys[:, None, :])[:, None]
    mask = masks.dense(tensor) if kind == "dense" else masks.predicate(lambda b, h, i, j: rows[b, i] & keys[b, j])
    poisoned(qkv(), mask, "bhsd", backend, (~rows, ~keys))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_hidden_from_one_head_alone_is_clean_for_the_others(backend: str) -> None:
    q, k, v = qkv(heads=4, kv_heads=2)
    seen = torch.ones(1, 4, 1, 5, dtype=torch.bool)
    seen[:, 2:, :, 3] = False  # both query heads of key head 1
    clean = undivided.attention(q, k, v, layout="bhsd", mask=masks.dense(seen), backend=backend)
    k[:, 1, 3], v[:, 1, 3] = NAN, NAN
    assert torch.equal(undivided.attention(q, k, v, layout="bhsd", mask=masks.dense(seen), backend=backend), clean)


def test_padding_stays_out_with_every_feature_on() -> None:
    mask, places = POISON["window-left-padding"]
    rows, keys = outside(places)
    q, k, v = qkv(q_len=4, kv_len=6)
    features = {
        "alibi_slopes": random(2, 2, seed=5),
        "sinks": random(2, seed=6),
        "bias": random(2, 2, 4, 6, seed=4),
        "softcap": 2.0,
        "dropout_p": 0.3,
        "dropout_seed": 5,
    }

    def run() -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        extra = {n: f.clone().requires_grad_() if isinstance(f, Tensor) else f for n, f in features.items()}
        out, lse = undivided.attention(*leaves, layout="bhsd", mask=mask, return_lse=True, **extra)  # type: ignore[call-overload]
        wanted = [*leaves, *(t for t in extra.values() if isinstance(t, Tensor))]
        return [out, *torch.autograd.grad(out.sum() + lse[lse > -math.inf].sum(), wanted)]

    clean = run()
    q.transpose(1, 2)[rows] = NAN
    k.transpose(1, 2)[keys] = NAN
    v.transpose(1, 2)[keys] = NAN
    features["bias"].transpose(1, 2)[rows] = NAN  # type: ignore[union-attr]
    features["bias"].permute(0, 3, 1, 2)[keys] = NAN  # type: ignore[union-attr]
    for got, want in zip(run(), clean, strict=True):
        assert error(got, want) < EXACT


GRADCHECKS = {
    "plain": {},
    "causal-gqa": {"mask": masks.causal("bottom_right"), "kv_heads": 1},
    "window-sinks-softcap": {"mask": masks.window(1, 1, "top_left"), "sinks": True, "softcap": 1.3},
    "bias-alibi": {"mask": masks.causal("bottom_right"), "bias": (2, 1, 3, 4), "alibi_slopes": (2, 2)},
    "broadcast-bias": {"bias": (2, 1, 4), "v_dim": 2},
    "lengths-everything": {
        "mask": masks.causal("bottom_right") & masks.lengths([4, 2], [3, 1]),
        "bias": (1, 2, 1, 4),
        "sinks": True,
        "alibi_slopes": (2,),
        "softcap": 2.0,
        "dropout_p": 0.3,
        "dropout_seed": 11,
    },
}


@pytest.mark.parametrize("name", GRADCHECKS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    case = dict(GRADCHECKS[name])
    x = qkv(q_len=3, kv_len=4, dim=2, kv_heads=case.pop("kv_heads", None), v_dim=case.pop("v_dim", None))  # type: ignore[arg-type]
    if case.pop("sinks", False):
        case["sinks"] = random(2, seed=6)
    for extra in ("bias", "alibi_slopes"):
        if extra in case:
            case[extra] = random(*case[extra], seed=4).abs()  # type: ignore[misc]
    names = [n for n, value in case.items() if isinstance(value, Tensor)]
    inputs = [t.requires_grad_() for t in (*x, *(case[n] for n in names))]  # type: ignore[union-attr]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        arguments = {**case, **dict(zip(names, tensors[3:], strict=True))}
        out, lse = undivided.attention(*tensors[:3], layout="bhsd", return_lse=True, **arguments)  # type: ignore[call-overload]
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(run, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_backward_repeats_bit_for_bit_on_the_cpu(backend: str) -> None:
    x = [t.float().requires_grad_() for t in qkv(heads=4, kv_heads=2, q_len=90, kv_len=90, dim=16)]

    def run() -> tuple[Tensor, ...]:
        out = undivided.attention(*x, layout="bhsd", mask=masks.causal(), backend=backend, deterministic=True)  # type: ignore[call-overload]
        return torch.autograd.grad(out, x, torch.ones_like(out))

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_documents_attend_only_to_themselves(backend: str, dtype: torch.dtype) -> None:
    cu = torch.tensor([0, 3, 3, 4, 9], dtype=dtype)
    mask = masks.documents(cu) & masks.causal()
    assert_defined(qkv(1, q_len=9, kv_len=9), mask, packed(cu.tolist()), [causal()], layout="thd", backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_may_have_padded_slots(backend: str) -> None:
    real, slots = [0, 3, 5, 9], [0, 4, 8, 13]
    mask = masks.documents(real, padded_q=slots) & masks.causal()
    x = qkv(1, q_len=13, kv_len=13)
    assert_defined(x, mask, packed(real, slots_q=slots), [causal()], layout="thd", backend=backend)
    out, lse = undivided.attention(
        *(in_layout(t, "thd") for t in x), layout="thd", mask=mask, backend=backend, return_lse=True
    )
    for token in (3, 6, 7, 12):
        assert bool((out[token] == 0).all())
        assert bool((lse[:, token] == -math.inf).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_documents_of_unequal_queries_and_keys_with_slots_of_their_own(backend: str, align: str) -> None:
    cu_q, cu_kv, slots_q, slots_kv = [0, 2, 3, 6], [0, 4, 4, 9], [0, 3, 4, 8], [0, 5, 6, 11]
    mask = masks.documents(cu_q, cu_kv, slots_q, slots_kv) & masks.causal(align)  # type: ignore[arg-type]
    places = packed(cu_q, cu_kv, slots_q, slots_kv)
    assert_defined(
        qkv(1, q_len=8, kv_len=11, heads=4, kv_heads=2), mask, places, [causal(align)], layout="thd", backend=backend
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_in_a_dense_batch_of_one_equal_packed_documents(backend: str) -> None:
    mask = masks.documents([0, 2, 5]) & masks.causal()
    for layout in LAYOUTS:
        assert_defined(qkv(1), mask, packed([0, 2, 5]), [causal()], layout=layout, backend=backend)


def test_every_feature_in_documents_equals_the_definition() -> None:
    cu_q, cu_kv = [0, 2, 3, 6], [0, 4, 5, 9]
    assert_defined(
        qkv(1, heads=4, kv_heads=2, q_len=6, kv_len=9, v_dim=3),
        masks.documents(cu_q, cu_kv) & masks.window(2, 1, "bottom_right"),
        packed(cu_q, cu_kv),
        [window(2, 1, "bottom_right")],
        align="bottom_right",
        layout="thd",
        alibi_slopes=random(3, 4, seed=5),
        sinks=random(4, seed=6),
        bias=random(4, 6, 9, seed=4),
        softcap=2.0,
        dropout_p=0.25,
        dropout_seed=13,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_only_strides(layout: str, backend: str) -> None:
    x = qkv(heads=4, kv_heads=2, q_len=3, kv_len=5)
    assert_defined(x, masks.causal("bottom_right"), None, [causal("bottom_right")], layout=layout, backend=backend)
    out = undivided.attention(*(in_layout(t, layout) for t in x), layout=layout, backend=backend)  # type: ignore[call-overload]
    assert out.is_contiguous()


def paged(kv: Tensor, lengths: Sequence[int], size: int, table: Tensor) -> Tensor:
    """[B, N, S, D] scattered into a pool [pages, size, N, D] that is NaN wherever nothing was written."""
    pool = torch.full((int(table.max()) + 3, size, kv.shape[1], kv.shape[3]), NAN, dtype=kv.dtype)
    for b, length in enumerate(lengths):
        for j in range(length):
            pool[table[b, j // size], j % size] = kv[b, :, j]
    return pool


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_paged_keys_and_values_equal_unpaged_ones(layout: str, page_size: int) -> None:
    lengths = [7, 2]
    q, k, v = qkv(heads=4, kv_heads=2, q_len=2, kv_len=8)
    count = 8 // page_size
    table = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0)).view(2, count).to(torch.int32)
    table[1, (2 + page_size - 1) // page_size :] = -1  # entries beyond the length are never followed
    mask = masks.causal("bottom_right") & masks.lengths(lengths)
    want, want_lse = brute_force.attend(q, k, v, padded(2, 2, 8, lengths), [causal("bottom_right")])
    pools = [paged(t, lengths, page_size, table) for t in (k, v)]
    out, lse = undivided.attention(
        in_layout(q, layout),
        *pools,
        layout=layout,
        mask=mask,
        pages=table,
        return_lse=True,  # type: ignore[call-overload]
    )
    assert error(heads_first(out, layout), want) < EXACT
    assert error(lse, want_lse) < EXACT


def test_paged_keys_and_values_of_packed_queries_equal_unpaged_ones() -> None:
    cu_q, lengths = [0, 3, 4, 6], [5, 1, 6]
    cu_kv = [0, 5, 6, 12]
    q, k, v = qkv(1, heads=4, kv_heads=2, q_len=6, kv_len=12)
    want, want_lse = brute_force.attend(q, k, v, packed(cu_q, cu_kv), [causal("bottom_right")])
    table = torch.tensor([[4, 0, 7], [2, 2, 2], [6, 1, 5]], dtype=torch.int32)
    pools = []
    for t in (k, v):
        rows = torch.stack([F.pad(t[0, :, a:b], (0, 0, 0, 6 - (b - a))) for a, b in itertools.pairwise(cu_kv)])
        pools.append(paged(rows, lengths, 2, table))
    mask = masks.documents(cu_q, cu_kv) & masks.causal("bottom_right")
    out, lse = undivided.attention(in_layout(q, "thd"), *pools, layout="thd", mask=mask, pages=table, return_lse=True)
    assert error(heads_first(out, "thd"), want) < EXACT
    assert error(lse.unsqueeze(0), want_lse) < EXACT


def test_the_default_device_and_dtype_change_nothing() -> None:
    """The check of the page numbers created a tensor on the default device, and comparing it with one on the CPU
    failed."""
    q, pool = random(2, 3, 2, 8), random(4, 4, 2, 8)
    pages = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)

    def run() -> Tensor:
        mask = masks.lengths([5, 7]) & masks.causal(align="bottom_right")
        return undivided.attention(q, pool, pool, layout="bshd", mask=mask, pages=pages)

    want, dtype = run(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            got = run()
    finally:
        torch.set_default_dtype(dtype)
    assert torch.equal(got, want)
