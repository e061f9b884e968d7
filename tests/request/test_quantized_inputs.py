"""`attention` over quantised keys and values: what it computes, where it runs, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.errors import InputError, NoBackendError
from undivided.quantization import FORMATS, Format, dequantize, quantize

HEADS, KV_HEADS, KEYS, SIZE = 4, 2, 70, 64


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(format: Format = "int8", q_len: int = 1, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Those of a batch of two in layout bhsd."""
    k, k_scale = quantize(draw(2, KV_HEADS, KEYS, SIZE, seed=1), format)
    v, v_scale = quantize(draw(2, KV_HEADS, KEYS, SIZE, seed=2), format)
    q = draw(2, HEADS, q_len, SIZE, dtype=dtype)
    return {"q": q, "k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale, "layout": "bhsd"}


def floating(given: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The same arguments with k and v as numbers."""
    rest = {name: value for name, value in given.items() if not name.endswith("_scale")}
    k, v = (dequantize(given[name], given[f"{name}_scale"], dtype) for name in "kv")
    return {**rest, "k": k, "v": v}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("q_len", [1, 40])
def test_it_is_attention_over_the_dequantised_numbers(format: Format, q_len: int) -> None:
    given = arguments(format, q_len) | {"mask": masks.causal("bottom_right")}
    for backend in (None, "reference"):
        torch.testing.assert_close(
            undivided.attention(**given, backend=backend), undivided.attention(**floating(given))
        )


@pytest.mark.parametrize("format", FORMATS)
def test_explain_names_the_format_and_refuses_elsewhere(format: Format) -> None:
    given = arguments(format, dtype=torch.bfloat16)
    decision = undivided.explain(**given)
    assert f"keys and values in {format}" in str(decision)
    assert any("quantised keys and values" in reason for reason in decision.reasons["torch_flash"])
    with pytest.raises(NoBackendError, match="no support for quantised keys and values"):
        undivided.attention(**given, backend="torch_flash")
    meta = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in given.items()}
    assert undivided.explain(**meta).chosen is not None
    assert undivided.attention(**meta).shape == given["q"].shape


@pytest.mark.parametrize("format", FORMATS)
def test_verify_checks_it(format: Format) -> None:
    report = undivided.verify(**arguments(format, 3), backends=["reference", "native"])
    assert report.ok
    assert sorted(report.of("reference")) == ["lse", "out"]


@pytest.mark.parametrize("format", ["fp8_e4m3", "int4"])
def test_torch_compile_and_fake_tensors(format: Format) -> None:
    given = arguments(format, 2)
    compiled = torch.compile(lambda **kwargs: undivided.attention(**kwargs) * 2, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**given), undivided.attention(**given) * 2)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in given.items()}
        assert undivided.attention(**fake).shape == given["q"].shape


def test_flops_are_those_of_the_numbers() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for given in (arguments("int4"), arguments("int8"), floating(arguments("int8"))):
        with FlopCounterMode(display=False) as counter:
            undivided.attention(**given)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == counts[2] > 0


@pytest.mark.parametrize("format", ["fp8_e5m2", "int8"])
def test_autocast_casts_only_the_queries(format: Format) -> None:
    given = arguments(format)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = undivided.attention(**given)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), undivided.attention(**given), rtol=0.02, atol=0.02)


def test_forward_mode_goes_through_the_reference() -> None:
    given = arguments("int8")
    q = given.pop("q")
    out, tangent = torch.func.jvp(lambda q: undivided.attention(q, **given), (q,), (torch.ones_like(q),))
    numbers = {name: x for name, x in floating(given).items() if name != "q"}
    expected = torch.func.jvp(lambda q: undivided.attention(q, **numbers), (q,), (torch.ones_like(q),))
    torch.testing.assert_close((out, tangent), expected)


def wrong(**changes: Any) -> dict[str, Any]:
    given = arguments("int8")
    return given | {name: change(given[name]) if callable(change) else change for name, change in changes.items()}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (wrong(k_scale=None), r"k_scale must be given if v_scale is, got None\n  HINT: values, scale = undivided\.quant"),
    (wrong(v_scale=None), r"v_scale must be given if k_scale is, got None\n  HINT"),
    (
        wrong(k_scale=None, v_scale=None),
        r"k must have the dtype of q .*got torch\.int8\n  HINT: .* require k_scale= and v",
    ),
    (wrong(k_scale=1.0), r"k_scale must be a torch\.Tensor, got float"),
    (
        wrong(k_scale=lambda s: s.half()),
        r"k_scale must be a float32 tensor, got torch\.float16\n  HINT: k_scale\.float",
    ),
    (
        wrong(v_scale=lambda s: s[..., None]),
        r"v_scale must have one number per row of v, shape \[2, 2, 70\], got \[2, 2, 7",
    ),
    (
        wrong(k_scale=lambda s: s[:, :1]),
        r"k_scale must have one number per row of k, shape \[2, 2, 70\], got \[2, 1, 70\]",
    ),
    (
        wrong(k=lambda k: k.float()),
        r"k must be quantised if k_scale is given \(int8 for int8, .*\), got torch\.float32\n",
    ),
    (wrong(k=lambda k: k.int()), r"k must be quantised if k_scale is given .* got torch\.int32"),
    (
        wrong(v=lambda v: v.view(torch.float8_e4m3fn)),
        r"v must have the format of k \(torch\.int8 for int8\), got torch\.fl",
    ),
    (wrong(q=lambda q: q.to(torch.float8_e5m2)), r"q must be float16, bfloat16, float32 or float64, got torch\.float8"),
    (wrong(q=lambda q: q[..., :32]), r"k must have the head size of q \(32\), got 64 in"),
    (
        wrong(q=lambda q: q.requires_grad_()),
        r"q must not require a gradient if k and v are quantised .*\n  HINT: call under",
    ),
    (wrong(v_scale=lambda s: s.requires_grad_()), r"v_scale must not require a gradient if k and v are quantised"),
    (wrong(k=lambda k: k.to("meta")), r"k must be on the device of q \(cpu\), got meta"),
    (wrong(k_scale=lambda s: s.to("meta")), r"k_scale must be on the device of k \(cpu\), got meta"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        undivided.attention(**given)
    with pytest.raises(InputError, match=message):
        undivided.explain(**given)


def test_int4_needs_whole_groups_and_their_scales() -> None:
    given = arguments("int4")
    with pytest.raises(
        InputError, match=r"k_scale must have one number per 32 numbers of k, shape \[2, 2, 70, 2\], got"
    ):
        undivided.attention(**given | {"k_scale": given["k_scale"][..., 0]})
    narrow = {name: given[name][..., :24].contiguous() for name in ("k", "v")}
    with pytest.raises(InputError, match="k must have a last axis that is a multiple of 32 for int4, got 48\n  HINT"):
        undivided.attention(**given | narrow)


def test_a_gradient_is_refused_only_if_one_is_recorded() -> None:
    given = arguments("int8")
    given["q"].requires_grad_()
    given["k_scale"].requires_grad_()
    with torch.no_grad():
        assert not undivided.attention(**given).requires_grad


def test_paged_scales_have_the_shape_of_the_pool() -> None:
    given = arguments("int8")
    paged = {name: given[name].transpose(1, 2).reshape(28, 5, *given[name].shape[1:2], *given[name].shape[3:])
             for name in ("k", "v", "k_scale", "v_scale")}  # fmt: skip
    table = torch.arange(28, dtype=torch.int32).view(2, 14)
    rest = {"q": given["q"], "layout": "bhsd", "pages": table, "mask": masks.lengths([70, 70])}
    torch.testing.assert_close(undivided.attention(**paged, **rest), undivided.attention(**given))
    with pytest.raises(
        InputError, match=r"k_scale must have one number per row of k, shape \[28, 5, 2\], got \[28, 2, 5\]"
    ):
        undivided.attention(**paged | {"k_scale": paged["k_scale"].transpose(1, 2)}, **rest)
