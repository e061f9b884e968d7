"""Kept launches of forwards of the `triton` backend.

There is no GPU, so Triton's interpreter runs the kernels, in place of a compiler that returns kernels to launch again.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from interpreted_launches import kinds_of_calls

import undivided
from undivided import masks
from undivided.backends import triton
from undivided.backends.shared.chosen import block_pairs
from undivided.backends.triton import kept_launches
from undivided.kernels.triton import config
from undivided.request.normalise import normalise
from undivided.request.request import Request
from undivided.verification import inputs
from undivided.verification.cases import CASES


@pytest.mark.parametrize("name", kinds_of_calls())
def test_a_repeated_call_has_the_bits_of_a_first_one(name: str, runs: list[kept_launches.ForwardLaunches]) -> None:
    case = CASES[name]
    dtype = next(dtype for dtype in case.dtypes if dtype != torch.float64)
    arguments = dict(inputs.build(case, dtype).arguments)
    first, given = normalise(Request.from_keywords(**arguments))
    with torch.no_grad():
        triton.BACKEND.forward(first, given)
        is_part_of_k = arguments["v"].data_ptr() == arguments["k"].data_ptr()
        for name in ("q", "k", "v", "sinks", "k_scale", "v_scale"):  # other memory, other values, the same strides
            if arguments.get(name) is None:
                continue
            needs, arguments[name] = arguments[name].requires_grad, copy.deepcopy(arguments[name].detach())
            arguments[name].requires_grad_(needs)
            if arguments[name].dtype.itemsize > 1:
                arguments[name] *= 1.5 if name.endswith("scale") else -1.5
            else:  # quantised
                arguments[name].copy_(arguments[name].flip(1))
        if is_part_of_k:
            arguments["v"] = arguments["k"][..., : arguments["v"].shape[-1]]
    second, given = normalise(Request.from_keywords(**arguments))
    home = kept_launches._kept(second)
    with torch.no_grad():
        assert not runs
        found = triton.BACKEND.forward(second, given)
        serves = not second.mask.parts or second.normal_form(given.q).exact
        serves = serves or block_pairs(second, given, reads_values=False) is not None
        assert bool(runs) == (home is not None and serves)
        if home:
            home.clear()
        expected = triton.BACKEND.forward(second, given)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


def decode(q: torch.Tensor, k: torch.Tensor, **options: Any) -> torch.Tensor:
    out: torch.Tensor = undivided.attention(q, k, k, layout="bshd", backend="triton", **options)
    return out


def test_decoding_splits_its_keys_in_kept_launches_too(runs: list[kept_launches.ForwardLaunches]) -> None:
    k = torch.randn(1, 600, 2, 16)
    outs = [decode(torch.full((1, 1, 4, 16), n), k) for n in (1.0, 2.0)]
    assert [launch.partial_sizes[0] for found in runs for launch in found.launches] == [2]
    for n, out in enumerate(outs, 1):
        expected = undivided.attention(torch.full((1, 1, 4, 16), float(n)), k, k, layout="bshd", backend="reference")
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_tensor_descriptors_of_kept_launches_are_those_of_their_call(runs: list[kept_launches.ForwardLaunches]) -> None:
    with config.trial("forward", config.INTERPRETED._replace(descriptors=True)):
        for _ in range(3):
            q, k = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16)
            torch.testing.assert_close(decode(q, k), undivided.attention(q, k, k, layout="bshd", backend="reference"))
    assert len(runs) == 2
    described = [one for found in runs for launch in found.launches for one in launch.kept.descriptors.values()]
    assert len(described) == 2 * 2
    assert all(one.base is None for one in described)


@pytest.mark.parametrize(
    "change", ["scale", "softcap", "alignment of q", "alignment of k", "v is no part of k", "tile sizes", "mask"]
)
def test_other_calls_have_other_launches(change: str, runs: list[kept_launches.ForwardLaunches]) -> None:
    q, k, mask = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16), masks.causal()
    options: dict[str, Any] = {"mask": mask, "scale": 0.5, "softcap": 2.0}
    decode(q, k, **options)
    decode(q, k, **options)
    assert len(runs) == 1
    if change in ("scale", "softcap"):
        decode(q, k, **{**options, change: 3.0})
    elif change == "tile sizes":
        with config.trial("forward", config.INTERPRETED._replace(block_n=16)):
            decode(q, k, **options)
    elif change == "v is no part of k":
        v = torch.randn_like(k)
        found, right = (
            undivided.attention(q, k, v, layout="bshd", backend=name, **options) for name in ("triton", "reference")
        )
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    elif change == "mask":
        decode(q, k, **{**options, "mask": masks.causal("top_left")})
    else:
        moved = [
            torch.randn(x.numel() + 1)[1:].view(x.shape) if change.endswith(n) else x for n, x in (("q", q), ("k", k))
        ]
        decode(*moved, **options)
    assert len(runs) == 1


def test_a_mask_that_changed_keeps_no_launches(runs: list[kept_launches.ForwardLaunches]) -> None:
    q, k, lengths = torch.randn(2, 40, 4, 16), torch.randn(2, 40, 2, 16), torch.tensor([40, 40])
    mask = masks.lengths(lengths)
    for length in (30, 7):
        lengths[0] = length
        expected = undivided.attention(q, k, k, layout="bshd", mask=masks.lengths([length, 40]), backend="reference")
        for _ in range(2):
            torch.testing.assert_close(decode(q, k, mask=mask), expected, rtol=1e-5, atol=1e-5)
    assert len(runs) == 2


class TestChosenPages:
    """The call of the virtual sequences has launches, which are kept with the caller's mask."""

    chosen, lengths = torch.tensor([[0, 3], [2, -1]]), torch.tensor([30, 20])

    def run(self, operands: dict[str, torch.Tensor], mask: masks.Mask, **options: Any) -> None:
        q = torch.randn(2, 1, 4, 16)
        out, expected = (
            undivided.attention(q, **operands, layout="bshd", mask=mask, backend=backend, **options)
            for backend in ("triton", "reference")
        )
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)

    def operands(self) -> dict[str, torch.Tensor]:
        k, v = torch.randn(2, 8, 8, 2, 16)
        return {"k": k, "v": v, "pages": torch.randperm(8).view(2, 4).int()}

    def test_a_repeated_call_launches_only(
        self, runs: list[kept_launches.ForwardLaunches], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Other queries, keys, scale and softcap have the same tables."""
        mask, operands = masks.lengths(self.lengths) & masks.pages(self.chosen, 8), self.operands()
        self.run(operands, mask)
        assert not runs
        self.run({**self.operands(), "pages": operands["pages"]}, mask)
        assert len(runs) == 1
        for options in ({"scale": 0.7}, {"softcap": 1.0}, {"softcap": 3.0}):
            self.run(operands, mask, **options)
        assert len(runs) == 1
        self.run(operands, mask, softcap=1.0)
        assert len(runs) == 2

    def test_other_tables_have_other_launches(self, runs: list[kept_launches.ForwardLaunches]) -> None:
        chosen, lengths, operands = self.chosen.clone(), self.lengths.clone(), self.operands()
        mask = masks.lengths(lengths) & masks.pages(chosen, 8)
        self.run(operands, mask)
        operands["pages"].copy_(operands["pages"].flip(1))
        self.run(operands, mask)
        self.run({**operands, "pages": operands["pages"].flip(0)}, mask)
        chosen.copy_(torch.tensor([[1, 2], [0, 1]]))
        self.run(operands, mask)
        lengths.copy_(torch.tensor([9, 32]))
        self.run(operands, mask)
        assert not runs

    def test_other_strides_have_other_launches(self, runs: list[kept_launches.ForwardLaunches]) -> None:
        mask, operands = masks.lengths(self.lengths) & masks.pages(self.chosen, 8), self.operands()
        wide = {name: x if name == "pages" else torch.cat([x, x], 2)[:, :, :2] for name, x in operands.items()}
        for given, kept in ((operands, 0), (wide, 0), (operands, 1), (wide, 2)):
            self.run(given, mask)
            assert len(runs) <= kept

    def test_nothing_is_kept_in_a_capture(
        self, runs: list[kept_launches.ForwardLaunches], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The memory of a CUDA graph holds nothing before a replay."""
        mask, operands = masks.lengths(self.lengths) & masks.pages(self.chosen, 8), self.operands()
        call, given = normalise(Request.from_keywords(torch.randn(2, 1, 4, 16), **operands, layout="bshd", mask=mask))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(2):
            triton.BACKEND.forward(call, given)
        assert not runs
        assert call.checked_mask is not None
        assert not call.checked_mask.derived


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_has_its_own_sinks(dtype: torch.dtype, runs: list[kept_launches.ForwardLaunches]) -> None:
    mask, k = masks.causal("bottom_right"), torch.randn(1, 600, 2, 16)
    for n in range(3):
        q, sinks = torch.randn(1, 1, 4, 16), torch.randn(4).to(dtype) + n
        out, expected = (
            undivided.attention(q, k, k, layout="bshd", mask=mask, sinks=sinks, backend=name)
            for name in ("triton", "reference")
        )
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert len(runs) == 2
    assert all(launch.merge is not None for found in runs for launch in found.launches)  # which adds the sinks


def test_kept_launches_are_bounded_and_keep_placeholders_alone(
    runs: list[kept_launches.ForwardLaunches], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_launches, "MAX_KEPT", 3)
    q, k, mask = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16), masks.causal()
    for n in range(1, 9):
        decode(q, k, mask=mask, scale=n / 8)
    call, _ = normalise(Request.from_keywords(q=q, k=k, v=k, layout="bshd", mask=mask))
    kept = kept_launches._kept(call)
    assert kept is not None
    assert 0 < len(kept) <= 3
    for found in kept.values():
        assert isinstance(found, kept_launches.ForwardLaunches)
        values = [value for launch in found.launches for value in launch.kept.launch.arguments]
        assert all(value.numel() == 1 for value in values if isinstance(value, torch.Tensor))
