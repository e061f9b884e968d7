"""Subnormal numbers with `torch.set_flush_denormal(True)`, which holds for the caller's thread only."""

from __future__ import annotations

from collections.abc import Iterator

import levels
import pytest
import torch
from torch import Tensor

import undivided
from undivided.kernels import cpu
from undivided.quantization import Format, quantize

pytestmark = [
    pytest.mark.skipif(isinstance(cpu.load(), str), reason="the native kernel is not built"),
    pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush subnormal numbers"),
]


@pytest.fixture
def _restored() -> Iterator[None]:
    yield
    torch.set_flush_denormal(False)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("level", levels.here())
def test_a_result_does_not_depend_on_the_number_of_threads(level: str) -> None:
    """Only the first of the threads has the caller's setting by itself."""
    q, k, v = (draw(1, 8, 300, 64, seed=n).requires_grad_() for n in range(3))
    small = (v * 1e-39).detach().requires_grad_()

    def results() -> list[Tensor]:
        out = undivided.attention(q, k, small, layout="bhsd", backend="native")
        return [out.detach(), *torch.autograd.grad(out, (q, k, small), torch.full_like(out, 1e-39))]

    with levels.running(level, 2):
        results()  # the threads start without the setting
        torch.set_flush_denormal(True)
        shared = [results() for _ in range(5)]
    with levels.running(level, 1):
        alone = results()
        torch.set_flush_denormal(False)
        exact = results()
    for some in shared:
        assert all(map(torch.equal, alone, some))
    assert (alone[0] == 0).all()
    assert (exact[0] != 0).all()


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("level", levels.here())
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 100])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_small_numbers_of_fp8_are_read(
    format: Format, batch_invariant: bool, rows: int, threads: int, level: str
) -> None:
    """They are subnormal in fp8, but not in fp32. In E4M3 they begin at a 29000th of a row's largest magnitude."""
    q, k, v = draw(1, 4, rows, 64, seed=0), draw(1, 4, 200, 64, seed=1), draw(1, 4, 200, 64, seed=2)
    q[..., 0], k[..., 0], v[..., 0] = 0, 30000, 30000
    (k_numbers, k_scale), (v_numbers, v_scale) = quantize(k, format), quantize(v, format)
    with levels.running(level, threads):

        def out() -> Tensor:
            return undivided.attention(
                q, k_numbers, v_numbers, layout="bhsd", k_scale=k_scale, v_scale=v_scale, backend="native",
                batch_invariant=batch_invariant,
            )  # fmt: skip

        exact = out()
        torch.set_flush_denormal(True)
        assert torch.equal(out(), exact)


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("level", levels.here())
def test_subnormal_numbers_of_fp16_are_read(level: str) -> None:
    """A single key has the weight 1, so the output is its value."""
    v = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.float16).view(256, 1, 1, 256)
    v = v.masked_fill(v == 0, 0)
    with levels.running(level, 1):
        torch.set_flush_denormal(True)
        out = undivided.attention(torch.zeros_like(v), torch.zeros_like(v), v, layout="bhsd", backend="native")
    assert torch.equal(out.view(torch.int16)[~v.isnan()], v.view(torch.int16)[~v.isnan()])
    assert out[v.isnan()].isnan().all()
