"""Random requests against a dense float64 formula, and random damage to valid calls; deterministic, so that CI repeats
it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import levels
import pytest
import torch
from brute_force import error
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import undivided
from undivided import masks

FUZZ = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


LAYOUTS = ("bshd", "sbhd", "bhsd")


ORDER = {"bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3), "bhsd": (0, 1, 2, 3)}  # of [B, H, S, D]


BACK = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3)}


@dataclass
class Request:
    """One call: tensors are views in `layout`; pairs is its mask as bool [B, H, Sq, Sk], distance is |i + d - j|."""

    layout: str
    tensors: tuple[Tensor, Tensor, Tensor]
    mask: masks.Mask | None
    pairs: Tensor
    distance: Tensor
    features: dict[str, Any]
    backend: str | None

    def heads_first(self, tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1).unsqueeze(0) if self.layout == "thd" else tensor.permute(BACK[self.layout])


def stored(draw: st.DrawFn, values: Tensor, layout: str) -> Tensor:
    """[B, H, S, D] values as a view in this layout, over memory of a random shape."""
    x = values[0].transpose(0, 1) if layout == "thd" else values.permute(ORDER[layout])
    kind = draw(st.sampled_from(["contiguous", "permuted", "strided-last", "sliced", "packed", "expanded"]))
    if kind == "permuted":
        axes = draw(st.permutations(range(x.dim())))
        inverse = [axes.index(n) for n in range(x.dim())]
        return x.permute(axes).contiguous().permute(inverse)
    if kind == "strided-last":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]
    if kind == "sliced":
        padded = torch.full([n + 2 for n in x.shape], math.nan, dtype=x.dtype)
        inner = tuple(slice(1, n + 1) for n in x.shape)
        padded[inner] = x
        return padded[inner]
    if kind == "packed":
        return torch.stack([x, torch.full_like(x, math.nan), x], dim=-2)[..., 0, :]
    if kind == "expanded":
        axis = draw(st.integers(0, x.dim() - 2))
        return x.narrow(axis, 0, min(1, x.shape[axis])).expand(x.shape)
    return x.contiguous()


def positions(length: int) -> Tensor:
    return torch.arange(length)


@st.composite
def masks_of(
    draw: st.DrawFn, batch: int, heads: int, q_len: int, kv_len: int
) -> tuple[masks.Mask | None, Tensor, Tensor]:
    """(mask, pairs, distance): a random composition, and the same pairs from their definition on dense index
    tensors."""
    i, j = (positions(q_len)[None, :, None].expand(batch, -1, 1), positions(kv_len)[None, None].expand(batch, 1, -1))
    pairs = torch.ones(batch, q_len, kv_len, dtype=torch.bool)
    mask: masks.Mask = masks.window(None, None)
    n = torch.full((batch, 1, 1), kv_len - q_len)
    ints = lambda high: st.lists(st.integers(0, high), min_size=batch, max_size=batch)  # noqa: E731
    if draw(st.booleans()):
        q, kv = draw(ints(q_len)), draw(ints(kv_len))
        q_start, kv_start = ([0] * batch, [0] * batch)
        if draw(st.booleans()):
            q_start = [draw(st.integers(0, q_len - size)) for size in q]
            kv_start = [draw(st.integers(0, kv_len - size)) for size in kv]
        mask = mask & masks.lengths(kv, q, kv_start, q_start)
        q_, kv_, qs, ks = (torch.tensor(x)[:, None, None] for x in (q, kv, q_start, kv_start))
        i, j, n = i - qs, j - ks, kv_ - q_
        pairs &= (i >= 0) & (i < q_) & (j >= 0) & (j < kv_)
    align = draw(st.sampled_from(["top_left", "bottom_right"]))
    d = n if align == "bottom_right" else torch.zeros_like(n)
    side = st.one_of(st.none(), st.integers(0, 5))
    kind = draw(st.sampled_from(["none", "causal", "window", "causal|prefix", "window|prefix"]))
    band: masks.Mask = masks.window(None, None, align)  # type: ignore[arg-type]
    allowed = torch.ones_like(pairs)
    if kind != "none":
        left, right = (None, 0) if kind.startswith("causal") else (draw(side), draw(side))
        band = masks.window(left, right, align)  # type: ignore[arg-type]
        middle = i + d
        allowed &= (j >= middle - left) if left is not None else True
        allowed &= (j <= middle + right) if right is not None else True
        if kind.endswith("prefix"):
            first = draw(st.integers(0, 4))
            band, allowed = band | masks.prefix(first), allowed | (j < first)
    mask, pairs = band & mask, pairs & allowed
    if draw(st.integers(0, 3)) == 0:
        size = draw(st.integers(1, 5))
        mask &= masks.chunks(size)
        pairs &= torch.div(i + d, size, rounding_mode="floor") == torch.div(j, size, rounding_mode="floor")
    if draw(st.integers(0, 3)) == 0:
        first = draw(st.integers(0, 6))
        mask &= masks.prefix(first)
        pairs &= j < first
    if draw(st.integers(0, 3)) == 0:
        make = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        ids_q, ids_kv = (torch.randint(-1, 2, (batch, size), generator=make) for size in (q_len, kv_len))
        mask &= masks.document_ids(ids_q, ids_kv)
        pairs &= (ids_q[:, :, None] == ids_kv[:, None]) & (ids_q[:, :, None] >= 0)
    whole = pairs[:, None].expand(batch, heads, q_len, kv_len)
    if draw(st.integers(0, 3)) == 0:
        make = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        shape = [size if draw(st.booleans()) else 1 for size in (batch, heads, q_len, kv_len)]
        tensor = torch.rand(shape, generator=make) < 0.7
        mask &= masks.dense(tensor)
        whole = whole & tensor
    if draw(st.integers(0, 5)) == 0:
        step = draw(st.integers(2, 3))
        mask &= masks.predicate(lambda b, h, q, k: (q + k + h) % step != 0)
        raw = positions(q_len)[None, None, :, None] + positions(kv_len) + positions(heads)[None, :, None, None]
        whole = whole & (raw % step != 0)
    given = None if kind == "none" and mask.is_full and q_len == kv_len else mask
    return given, whole, (i + d - j).abs()[:, None].double()


@st.composite
def packed_masks(draw: st.DrawFn) -> tuple[masks.Mask, Tensor, Tensor, int, int]:
    """Documents with slots of their own: (mask, pairs [1, 1, Tq, Tk], distance, Tq, Tk)."""
    sizes = draw(st.lists(st.tuples(*[st.tuples(st.integers(0, 5), st.integers(0, 2))] * 2), min_size=1, max_size=4))
    align = draw(st.sampled_from(["top_left", "bottom_right"]))
    sides = []
    for which in (0, 1):
        real, slots, place = [0], [0], []
        for number, document in enumerate(sizes):
            size, gap = document[which]
            real.append(real[-1] + size)
            slots.append(slots[-1] + size + gap)
            place += [(number, x) for x in range(size)] + [(-1, 0)] * gap
        sides.append((real, slots, torch.tensor(place, dtype=torch.int64).reshape(-1, 2)))
    (cu_q, slots_q, rows), (cu_kv, slots_kv, keys) = sides
    n = torch.tensor([kv[0] - q[0] for q, kv in sizes])
    d = n[rows[:, 0].clamp(min=0)] if align == "bottom_right" else torch.zeros(len(rows), dtype=torch.int64)
    offset = (rows[:, 1] + d)[:, None] - keys[None, :, 1]
    pairs = (rows[:, :1] == keys[None, :, 0]) & (rows[:, :1] >= 0)
    mask = masks.documents(cu_q, cu_kv, slots_q, slots_kv) & masks.window(None, None, align)  # type: ignore[arg-type]
    left, right = draw(st.sampled_from([(None, None), (None, 0), (2, 0), (1, 1)]))
    mask &= masks.window(left, right)
    pairs &= (offset <= left) if left is not None else True
    pairs &= (offset >= -right) if right is not None else True
    return mask, pairs[None, None], offset.abs()[None, None].double(), len(rows), len(keys)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    layout = draw(st.sampled_from((*LAYOUTS, "thd")))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * group
    dim = draw(st.integers(1, 9))
    v_dim = draw(st.sampled_from([dim, dim, draw(st.integers(1, 9))]))
    dtype = draw(st.sampled_from(list(ROUNDING)))
    if layout == "thd":
        batch = 1
        mask, pairs, distance, q_len, kv_len = draw(packed_masks())
        pairs = pairs.expand(1, heads, q_len, kv_len)
    else:
        batch, q_len, kv_len = draw(st.integers(1, 3)), draw(st.integers(0, 9)), draw(st.integers(0, 9))
        found, pairs, distance = draw(masks_of(batch, heads, q_len, kv_len))
        mask = found  # type: ignore[assignment]
    make = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    random = lambda *shape: torch.randn(shape, generator=make, dtype=torch.float64).to(dtype)  # noqa: E731
    values = (
        random(batch, heads, q_len, dim),
        random(batch, kv_heads, kv_len, dim),
        random(batch, kv_heads, kv_len, v_dim),
    )
    tensors = tuple(stored(draw, x, layout) for x in values)
    features: dict[str, Any] = {}
    if draw(st.booleans()):
        features["scale"] = draw(st.floats(-2, 2))
    if draw(st.integers(0, 2)) == 0:
        shape = [size if draw(st.booleans()) else 1 for size in (batch, heads, q_len, kv_len)]
        bias = random(*shape)
        features["bias"] = torch.where(
            torch.rand(shape, generator=make) < 0.1, torch.tensor(-math.inf, dtype=dtype), bias
        )
    if draw(st.integers(0, 2)) == 0:
        features["alibi_slopes"] = random(heads).abs()
    if draw(st.integers(0, 2)) == 0:
        features["sinks"] = random(heads)
    if draw(st.integers(0, 2)) == 0:
        features["softcap"] = draw(st.floats(0.5, 20))
    backend = draw(st.sampled_from([None, "reference"]))
    return Request(layout, tensors, mask, pairs, distance, features, backend)  # type: ignore[arg-type]


def formula(request: Request, q: Tensor, k: Tensor, v: Tensor, features: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The dense float64 formula: nothing shared with the library. [B, H, S, D] in and out."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    score = torch.einsum("bhid,bhjd->bhij", q, k) * features.get("scale", 1 / math.sqrt(q.shape[-1]))
    if "softcap" in features:
        score = features["softcap"] * torch.tanh(score / features["softcap"])
    if "alibi_slopes" in features:
        score = score - features["alibi_slopes"][:, None, None] * request.distance
    pairs = request.pairs
    if "bias" in features:
        pairs = pairs & (features["bias"] != -math.inf)
        score = score + features["bias"].masked_fill(features["bias"] == -math.inf, 0.0)
    exponential = torch.where(pairs, torch.exp(score), 0.0)
    total = exponential.sum(-1)
    lse = torch.where(total > 0, torch.where(total > 0, total, 1.0).log(), -math.inf)
    denominator = total + (features["sinks"].exp()[:, None] if "sinks" in features else 0.0)
    weights = exponential / torch.where(denominator > 0, denominator, 1.0).unsqueeze(-1)
    return weights @ v, lse


def close(got: Tensor, want: Tensor, rounding: float, scale: float) -> bool:
    """The error is a few roundings of the result, or of its terms if they cancel."""
    want = want.detach()
    if not want.numel():
        return got.shape == want.shape
    finite = want > -math.inf
    limit = 40 * rounding * max(float(want[finite].norm()), scale)
    return error(got, want) * (float(want[finite].norm()) or 1.0) <= limit + 1e-300


@FUZZ
@given(requests())
def test_any_request_equals_the_formula_forward_and_backward(request: Request) -> None:
    check(request)


@pytest.mark.slow
@pytest.mark.parametrize("level", levels.here())
@FUZZ
@given(requests(), st.integers(1, 3))
def test_any_request_equals_the_formula_on_every_level_of_the_native_kernel(
    level: str, request: Request, threads: int
) -> None:
    assume(request.tensors[0].dtype != torch.float64)
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in request.tensors)  # it refuses the others
    with levels.running(level, threads):
        check(replace(request, tensors=(q, k, v), backend="native"))


def check(request: Request) -> None:
    leaves = [t.detach().requires_grad_() for t in request.tensors]
    extras = {n: f.clone().requires_grad_() if isinstance(f, Tensor) else f for n, f in request.features.items()}
    given_extras = dict(extras)
    if request.layout == "thd" and "bias" in extras:
        given_extras["bias"] = extras["bias"][0]
    out, lse = undivided.attention(
        *leaves,
        layout=request.layout,
        mask=request.mask,
        backend=request.backend,
        return_lse=True,
        **given_extras,  # type: ignore[call-overload]
    )
    wide = [request.heads_first(t).detach().double().requires_grad_() for t in request.tensors]
    wide_extras = {n: f.detach().double().requires_grad_() if isinstance(f, Tensor) else f for n, f in extras.items()}
    want, want_lse = formula(request, *wide, wide_extras)
    rounding = ROUNDING[out.dtype]
    out_, lse_ = request.heads_first(out), lse.unsqueeze(0) if request.layout == "thd" else lse
    assert close(out_, want, rounding, 0.0)
    assert close(lse_, want_lse, min(rounding, 2.0**-24), 10.0 * want_lse.numel() ** 0.5)
    pull = torch.randn(want.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(out.dtype)
    seen = want_lse > -math.inf
    inputs = [*leaves, *(f for f in extras.values() if isinstance(f, Tensor))]
    wide_inputs = [*wide, *(f for f in wide_extras.values() if isinstance(f, Tensor))]
    got = torch.autograd.grad((out_ * pull).sum() + lse_[seen].sum(), inputs, allow_unused=True, materialize_grads=True)
    goal = (want * pull.double()).sum() + want_lse[seen].sum()
    expected = torch.autograd.grad(goal, wide_inputs, allow_unused=True, materialize_grads=True)
    size = max([float(g.norm()) for g in expected], default=0.0)
    for n, (a, b) in enumerate(zip(got, expected, strict=True)):
        a = request.heads_first(a) if n < 3 else a
        assert bool(a.isfinite().all())
        assert float((a.double() - b).norm()) <= 40 * rounding * max(size, 1e-30) * (1 + float(pull.double().norm())), n
