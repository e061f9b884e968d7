"""Large, infinite and NaN numbers: finite scores give finite results, and what is not finite stays in its document.

On the native kernel at every level that this machine has, and on the reference, the specification.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import levels
import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.masks import Mask

RUNS = ["reference", *levels.here()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALLOWED = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
"""Relative errors of the norm, as in test_native_backward.py: fp32 some roundings, 16-bit types one per operand."""

each_run = pytest.mark.parametrize("run", RUNS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@contextmanager
def running(run: str) -> Iterator[str]:
    """The backend of a run, on its level."""
    with nullcontext() if run == "reference" else levels.running(run, threads=1):
        yield "reference" if run == "reference" else "native"


def error(got: Tensor, want: Tensor, least: float = 1e-30) -> float:
    """The error relative to the norm of the expected tensor, or to `least`."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm()) / max(float(want.norm()), least)


# ---- large scores


def large(dtype: torch.dtype, exponents: tuple[int, int], q_len: int, kv_len: int, heads: int = 2) -> list[Tensor]:
    """q, k, v [1, H, S, D] whose scores are exact in fp32, in any order of summation, all different, and as large as
    can be."""
    torch.manual_seed(0)
    q = torch.randint(-3, 4, (1, heads, q_len, 32)).float()
    k = torch.randint(-3, 4, (1, 2, kv_len, 32)).float()
    q[..., 30], q[..., 31] = 2**-6, 2**-12
    k[..., 30], k[..., 31] = torch.arange(kv_len) // 64, torch.arange(kv_len) % 64
    v = torch.randn(1, 2, kv_len, 32)
    return [t.to(dtype) for t in (q * 2.0 ** exponents[0], k * 2.0 ** exponents[1], v)]


LARGE: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "prefill": (130, 150, 2, {}),
    "causal": (130, 150, 2, {"mask": masks.causal("bottom_right")}),
    "window": (130, 150, 2, {"mask": masks.window(20, 9, "top_left")}),
    "global-keys": (70, 150, 2, {"mask": masks.window(9, 0, "bottom_right") | masks.prefix(3)}),
    "dense-mask": (70, 150, 2, {"mask": masks.dense((torch.arange(150) % 3 != 1).expand(70, 150))}),
    "small-heads": (16, 16, 2, {}),
    "few-keys": (9, 3, 2, {}),
    "decoding": (1, 200, 8, {}),
    "parts-of-the-keys": (30, 2100, 2, {}),
    "softcap": (70, 150, 2, {"softcap": 20.0}),
    "softcap-decoding": (1, 200, 8, {"softcap": 20.0}),
    "alibi": (70, 150, 2, {"alibi_slopes": torch.tensor([0.5, 0.1]), "mask": masks.causal("bottom_right")}),
    "bias": (70, 150, 2, {"bias": torch.linspace(-4, 4, 150).view(1, 1, 1, 150)}),
    "sinks": (70, 150, 2, {"sinks": torch.tensor([0.3, -2.0])}),
    "sinks-decoding": (1, 200, 8, {"sinks": torch.linspace(-2, 2, 8)}),
    "negative-scale": (70, 150, 2, {"scale": -0.1}),
    "negative-scale-small": (16, 16, 2, {"scale": -0.1}),
    "negative-scale-decoding": (1, 200, 8, {"scale": -0.1}),
    "dropout": (70, 150, 2, {"dropout_p": 0.3, "dropout_seed": 5}),
}


def exponents_of(dtype: torch.dtype) -> list[tuple[int, int]]:
    """Powers of two that q and k are multiplied by: scores of some 300 times 2^22 in fp16, 2^34 and up to 2^118
    elsewhere."""
    return [(13, 9)] if dtype == torch.float16 else [(17, 17), (59, 59)]


@each_run
@each_dtype
@pytest.mark.parametrize("case", LARGE)
def test_large_scores_give_what_small_ones_do(case: str, dtype: torch.dtype, run: str) -> None:
    """Scores were once multiplied by log2(e) and rounded before the maximum was subtracted: half of the rows were
    NaN."""
    q_len, kv_len, heads, arguments = LARGE[case]
    for exponents in exponents_of(dtype):
        leaves = [t.requires_grad_() for t in large(dtype, exponents, q_len, kv_len, heads)]
        grads = torch.randn_like(leaves[0]), torch.randn(1, heads, q_len)
        found, wanted = [], []
        with running(run) as backend:
            out = undivided.attention(*leaves, layout="bhsd", backend=backend, return_lse=True, **arguments)
            found = [*out, *torch.autograd.grad(out, leaves, [g.to(o) for g, o in zip(grads, out, strict=True)])]
        exact = [t.detach().double().requires_grad_() for t in leaves]
        of_fp64 = {n: x.double() if isinstance(x, Tensor) else x for n, x in arguments.items()}
        out = undivided.attention(*exact, layout="bhsd", backend="reference", return_lse=True, **of_fp64)
        wanted = [*out, *torch.autograd.grad(out, exact, [g.to(o) for g, o in zip(grads, out, strict=True)])]
        for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
            assert got.isfinite().all(), (exponents, name)
            # the others cancel: one key has all the weight
            if name in ("out", "lse", "dv"):
                assert error(got, want) < ALLOWED[dtype], (exponents, name)


@each_run
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("q_len", "kv_len"), [(70, 150), (16, 16), (1, 200), (30, 2100)])
def test_scores_above_fp32_are_nan_and_scores_below_it_have_weight_0(
    q_len: int, kv_len: int, dtype: torch.dtype, run: str
) -> None:
    q, k, v = (
        t.to(dtype) for t in (torch.zeros(1, 2, q_len, 32), torch.zeros(1, 2, kv_len, 32), torch.ones(1, 2, kv_len, 32))
    )
    q[:, 0, :, 0], q[:, 1, :, 0] = 2.0**66, -(2.0**66)
    k[:, 0, :, 0] = 2.0**66  # the first head's scores are +inf, or of every third key 0
    k[:, 0, ::3, 0] = 0
    k[:, 1, :, 0] = 2.0**66  # the second's -inf, some 0 in the latter half of the rows
    with running(run) as backend:
        out, lse = undivided.attention(q, k, v, layout="bhsd", backend=backend, return_lse=True)
        assert out[:, 0].isnan().all()
        assert lse[:, 0].isnan().all()
        assert not out[:, 1].any()
        assert (lse[:, 1] == -torch.inf).all()
        k[:, 1, ::3, 0] = 0
        out, lse = undivided.attention(q, k, v, layout="bhsd", backend=backend, return_lse=True)
    assert error(out[:, 1], torch.ones_like(out[:, 1])) < ALLOWED[dtype]
    assert error(lse[:, 1], torch.full_like(lse[:, 1], math.log(len(range(0, kv_len, 3))))) < ALLOWED[dtype]


@each_run
def test_a_sink_far_above_the_scores_leaves_the_gradient_through_lse(run: str) -> None:
    """The weights with the sink are 0 then, those of the log-sum-exp are not."""
    q, k, v = large(torch.float32, (0, 0), 20, 150)
    q[..., 29], k[..., 29] = 1, -100  # scores around -100
    found, sinks = [], torch.tensor([30.0, 0.0])
    for backend_of, dtype in ((run, torch.float32), ("reference", torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        with running(backend_of) as backend:
            out, lse = undivided.attention(
                *leaves, layout="bhsd", scale=1.0, sinks=sinks.to(dtype), return_lse=True, backend=backend
            )
            found.append(torch.autograd.grad(lse.sum() + out.sum(), leaves[:2]))
    for got, want in zip(*found, strict=True):
        assert error(got, want) < 128 * 2**-24, "what the rounding of a log-sum-exp of some -100 makes of the weights"


# ---- documents

LENGTHS = {"short": [3, 1, 5, 2, 7, 1, 1, 4, 9, 6], "one-token": [1] * 21, "longer": [17, 40, 1, 33, 64, 5, 100]}


def document_mask(kind: str, lengths: list[int]) -> tuple[Mask, Tensor, Tensor]:
    """(mask, document of each query, of each key)."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    offsets = [0, *itertools.accumulate(lengths)]
    if kind == "ids":
        return masks.document_ids(ids[None]), ids, ids
    if kind == "ids-in-turns":
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))]
        return masks.document_ids(ids[None]), ids, ids
    if kind == "cross":
        more = [n + 2 for n in lengths]
        keys = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(more))
        return masks.documents(offsets, [0, *itertools.accumulate(more)]), ids, keys
    mask = masks.documents(offsets)
    return (mask & masks.causal() if kind == "causal" else mask), ids, ids


def with_gradients(backend: str, mask: Mask, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """out, dq, dk and dv, [S, H, D]."""
    leaves = [t[None].clone().requires_grad_() for t in (q, k, v)]
    layout = "bshd"
    if "documents" in mask.kinds:
        layout, leaves = "thd", [t.clone().requires_grad_() for t in (q, k, v)]
    out = undivided.attention(*leaves, layout=layout, mask=mask, backend=backend)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad.view(out.shape))]
    return [t.flatten(0, -3) for t in found]


@each_run
@each_dtype
@pytest.mark.parametrize("kind", ["documents", "causal", "cross", "ids", "ids-in-turns"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_non_finite_values_stay_in_their_document(lengths: str, kind: str, dtype: torch.dtype, run: str) -> None:
    """Documents in one block are multiplied with weights of 0, and 0 * NaN is NaN: NaN of one document reached the
    gradients of others."""
    mask, of_q, of_k = document_mask(kind, LENGTHS[lengths])
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(n, h, 32).to(dtype) for n, h in zip(map(len, (of_q, of_k, of_k, of_q)), (4, 2, 2, 4), strict=True)
    )
    inputs, documents = ({"q": q, "k": k, "v": v, "grad": grad}, {"q": of_q, "k": of_k, "v": of_k, "grad": of_q})
    with running(run) as backend:
        clean = with_gradients(backend, mask, *inputs.values())
        largest = max(float(t.double().norm()) for t in clean)
        for name, value in itertools.product(inputs, (math.nan, math.inf)):
            document = len(LENGTHS[lengths]) // 2
            row = int((documents[name] == document).nonzero()[-1])
            spoilt = dict(inputs) | {name: inputs[name].index_fill(0, torch.tensor(row), value)}
            found = with_gradients(backend, mask, *spoilt.values())
            assert not all(t.isfinite().all() for t in found)
            for result, got, want, own in zip(
                ("out", "dq", "dk", "dv"), found, clean, (of_q, of_q, of_k, of_k), strict=True
            ):
                others = own != document
                assert got[others].isfinite().all(), (name, value, result)
                assert error(got[others], want[others], 0.3 * largest) < ALLOWED[dtype], (name, value, result)
                # on AMX other types than bf16 are computed again in vectors, all of the problem
                if result == "out" and backend == "native" and (dtype == torch.bfloat16 or not run.startswith("amx")):
                    assert torch.equal(got[others], want[others]), "a row takes nothing from rows beside it"


@each_run
def test_non_finite_values_stay_in_their_batch_element(run: str) -> None:
    torch.manual_seed(0)
    for mask in (None, masks.causal(), masks.lengths(torch.tensor([70, 31, 50]))):
        inputs = {name: torch.randn(3, 70, 2, 32) for name in ("q", "k", "v", "grad")}
        with running(run) as backend:
            for name in inputs:
                spoilt = {n: t.clone() for n, t in inputs.items()}
                spoilt[name][1, 30] = math.nan
                leaves = [spoilt[n].requires_grad_() for n in "qkv"]
                out = undivided.attention(*leaves, layout="bshd", mask=mask, backend=backend)
                for t in (out, *torch.autograd.grad(out, leaves, spoilt["grad"])):
                    assert t[[0, 2]].isfinite().all()
                    assert out[1].isnan().any() or name == "grad"


@each_run
def test_a_non_finite_bias_stays_in_its_rows(run: str) -> None:
    torch.manual_seed(0)
    lengths = [3, 1, 5, 20, 7]
    mask, ids, _ = document_mask("documents", lengths)
    leaves = [torch.randn(len(ids), 2, 32).requires_grad_() for _ in range(3)]
    bias = torch.randn(1, 2, len(ids), len(ids))
    bias[:, :, ids == 2] = math.nan
    bias.requires_grad_()
    with running(run) as backend:
        out = undivided.attention(*leaves, layout="thd", mask=mask, bias=bias, backend=backend)
        grads = torch.autograd.grad(out.sum(), [*leaves, bias])
    for t in (out, *grads[:3]):
        assert t[ids != 2].isfinite().all()
    assert grads[3][:, :, ids != 2].isfinite().all()
    assert not grads[3][:, :, ids == 2][..., ids != 2].any()
    assert out[ids == 2].isnan().all()


@each_run
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [3, 20, 64])
def test_a_key_hidden_by_its_bias_is_hidden_beside_a_nan_bias_too(rows: int, dtype: torch.dtype, run: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 64).to(dtype) for length in (rows, 150, 150))
    bias = torch.randn(1, 2, rows, 150).to(dtype)
    k[:, :, 5] = v[:, :, 5] = math.nan
    bias[..., 5] = -math.inf
    bias[:, :, 1, 0] = math.nan  # read in one vector with the key
    with running(run) as backend:
        out = undivided.attention(q, k, v, layout="bhsd", bias=bias, backend=backend)
    assert out[:, :, 1].isnan().all()
    assert out[:, :, torch.arange(rows) != 1].isfinite().all()


@pytest.mark.parametrize("run", levels.here())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gradients_computed_pair_by_pair_equal_those_of_blocks(dtype: torch.dtype, run: str) -> None:
    """With all features, in a problem where one document is NaN: the others' gradients are those in the reference."""
    torch.manual_seed(0)
    lengths = [30, 4, 1, 50, 15]
    mask, ids, _ = document_mask("causal", lengths)
    tokens = len(ids)
    q, k, v = torch.randn(tokens, 4, 40), torch.randn(tokens, 2, 40), torch.randn(tokens, 2, 24)
    given = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": v.to(dtype),
        "bias": torch.randn(1, 4, tokens, tokens),
        "sinks": torch.randn(4),
        "alibi_slopes": torch.rand(len(lengths), 4),
    }
    grads = torch.randn(tokens, 4, 24).to(dtype), torch.randn(4, tokens)
    found = []
    for backend_of, computed in ((run, None), ("reference", torch.float64)):
        leaves = {n: (t if computed is None else t.to(computed)).clone().requires_grad_() for n, t in given.items()}
        if computed is None:  # of the last document, so that what is summed over all rows is left out of the comparison
            with torch.no_grad():
                leaves["v"][ids == 4] = math.nan
        with running(backend_of) as backend:
            out, lse = undivided.attention(
                **leaves,
                layout="thd",
                mask=mask,
                softcap=3.0,
                dropout_p=0.2,
                dropout_seed=3,
                return_lse=True,
                backend=backend,
            )
            returned = [grads[0].to(out), grads[1].to(lse)]
            found.append(
                torch.autograd.grad((out, lse), [leaves[n] for n in ("q", "k", "v", "bias", "alibi_slopes")], returned)
            )
    *of_rows, of_bias, of_slopes = zip(*found, strict=True)
    for got, want in of_rows:
        assert error(got[ids != 4], want[ids != 4]) < ALLOWED[dtype]
    assert error(of_bias[0][:, :, ids != 4], of_bias[1][:, :, ids != 4]) < ALLOWED[dtype]
    assert error(of_slopes[0][:4], of_slopes[1][:4]) < ALLOWED[dtype]


def test_second_derivatives_do_not_mix_documents() -> None:
    torch.manual_seed(0)
    mask, ids, _ = document_mask("documents", [3, 5, 9])
    leaves = [torch.randn(17, 2, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]
    with torch.no_grad():
        leaves[1][ids == 1] = math.nan
    out = undivided.attention(*leaves, layout="thd", mask=mask, backend="reference")
    first = torch.autograd.grad(out[ids != 1].square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g[ids != 1].square().sum() for g in first), leaves)
    for t in (*first, *second):
        assert t[ids != 1].isfinite().all()


@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_torch_flash_reads_no_keys_beyond_the_last_query(dtype: torch.dtype, layout: str) -> None:
    """PyTorch's kernel multiplies them with a weight of 0, and 0 * NaN is NaN."""
    q, k, v = torch.randn(1, 4, 2, 16), torch.randn(1, 9, 2, 16), torch.randn(1, 9, 2, 16)
    k[:, 4:] = v[:, 4:] = math.nan
    mask = masks.causal("top_left")
    leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    inputs = leaves
    if layout == "thd":
        inputs, mask = [t[0] for t in leaves], masks.documents([0, 4], [0, 9]) & mask
    out = undivided.attention(*inputs, layout=layout, mask=mask, backend="torch_flash")
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out.sum(), leaves):
        assert gradient.isfinite().all()


@each_run
@each_dtype
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 4), (20, 20), (70, 150), (1, 2100)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_dropout_hides_no_nan(bad: float, q_len: int, kv_len: int, dtype: torch.dtype, run: str) -> None:
    """Neither of a score, nor of a value whose weight is 0; also if everything is dropped."""
    q, k, v = (torch.randn(1, n, 2, 16).to(dtype) for n in (q_len, kv_len, kv_len))
    k_with, v_with = k.clone(), v.clone()
    k_with[:, 0] = v_with[:, 0] = bad
    with running(run) as backend:
        for seed in range(4):
            for p in (0.9, 1.0):
                options: dict[str, Any] = {"dropout_p": p, "dropout_seed": seed, "backend": backend, "layout": "bshd"}
                assert undivided.attention(q, k_with, v, **options).isnan().all()
                out = undivided.attention(q, k, v_with, **options)
                assert not out.isfinite().any()
                assert p < 1 or out.isnan().all()
        assert not undivided.attention(q, k, v, dropout_p=1.0, layout="bshd", backend=backend).any()
