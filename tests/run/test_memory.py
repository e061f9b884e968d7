"""Memory is linear in the sequence length: the reference uses blocks, structured masks ranges, kernels tiles."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from largest import Largest
from torch import Tensor

import undivided
from undivided import masks
from undivided.backends import reference, torch_flash
from undivided.masks.normal_form import pairs
from undivided.request.normalise import normalise
from undivided.request.request import Request

pytestmark = pytest.mark.usefixtures("seen_inside")

GIB = 1 << 30
MIB = 1 << 20


def qkv(length: int, heads: int = 1, dim: int = 8, grad: bool = True, layout: str = "bshd") -> list[Tensor]:
    shape = (length, heads, dim) if layout == "thd" else (1, length, heads, dim)
    make = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=make).requires_grad_(grad) for _ in range(3)]


def forward_and_backward(x: list[Tensor], **arguments: Any) -> tuple[Tensor, ...]:
    out = undivided.attention(*x, **arguments)
    return torch.autograd.grad(out, x, torch.ones_like(out))  # type: ignore[arg-type,no-any-return]


def test_the_recorder_detects_a_score_matrix() -> None:
    q = torch.randn(512, 8)
    with Largest() as seen:
        torch.softmax(q @ q.T, -1) @ q
    assert seen.bytes == 512 * 512 * 4


# The reference


PEAK = """
import resource, sys, torch, undivided
from undivided import masks
length = int(sys.argv[1])
mask = {"none": None, "causal": masks.causal(), "window": masks.window(1024, 0)}[sys.argv[2]]
q, k, v = (torch.randn(1, length, 1, 16).requires_grad_() for _ in range(3))
small = torch.randn(1, 64, 1, 16, requires_grad=True)
undivided.attention(small, small, small, layout="bshd", mask=mask, backend="reference").sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out = undivided.attention(q, k, v, layout="bshd", mask=mask, backend="reference")
torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read as Linux counts it")
def test_the_reference_at_32k_by_32k_stays_under_two_gib() -> None:
    """Measured as the operating system counts it, in a process of its own: the score matrix alone would be 4 GiB."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(32 * 1024), "causal"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * GIB


CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(64, 64)},
    "global-window": {"mask": masks.window(64, 0) | masks.prefix(4)},
    "padded": {"mask": masks.causal() & masks.lengths([750], [750])},
    "predicate": {"mask": masks.predicate(lambda b, h, i, j: (i - j) % 2 == 0)},
    "alibi": {"mask": masks.causal(), "alibi_slopes": torch.tensor([0.1])},
    "broadcast-bias": {"bias": torch.randn(1, 1, 1, 1024)},
    "dropout": {"dropout_p": 0.1, "dropout_seed": 1},
    "sinks-softcap": {"sinks": torch.zeros(1), "softcap": 10.0},
}


@pytest.mark.parametrize("name", CASES)
def test_the_reference_creates_no_tensor_much_larger_than_its_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 Ki scores per block: int64 temporaries (dropout's counters, four words each) are 1 MiB, S x S would be 4 MiB,
    of int64 8 MiB, and of bool 1 MiB."""
    monkeypatch.setattr(reference, "SCORES_PER_BLOCK", 1 << 15)
    monkeypatch.setattr(reference, "MAX_ROWS", 32)
    monkeypatch.setattr(pairs, "BLOCK_PAIRS", 1 << 15)
    x = qkv(1024)
    with Largest() as seen:
        forward_and_backward(x, layout="bshd", backend="reference", **CASES[name])
    assert seen.bytes <= (2 * MIB if name == "dropout" else MIB // 2)
    assert seen.bytes >= 1024 * 8 * 4, "the recorder saw nothing"


def test_the_reference_never_expands_keys_and_values_to_the_query_heads() -> None:
    q = torch.randn(1, 5, 64, 8).requires_grad_()
    k, v = (torch.randn(1, 16, 1, 8).requires_grad_() for _ in range(2))
    with Largest() as seen:
        forward_and_backward([q, k, v], layout="bshd", backend="reference", mask=masks.window(3, 3, "top_left"))
    scores, expanded = 64 * 5 * 16, 64 * 16 * 8
    assert seen.bytes < expanded * 4
    assert seen.bytes >= scores * 4 // 2, "the recorder saw nothing"


# torch_flash


FLASH: dict[str, dict[str, Any]] = {
    "full": {"layout": "bshd"},
    "causal": {"layout": "bshd", "mask": masks.causal()},
    "window": {"layout": "bshd", "mask": masks.window(128, 0)},
    "documents": {"layout": "thd", "mask": masks.documents(list(range(0, 8193, 512))) & masks.causal()},
    "padded": {"layout": "bshd", "mask": masks.causal() & masks.lengths([6000], [6000])},
    "window-alibi": {"layout": "bshd", "mask": masks.window(128, 0), "alibi_slopes": torch.tensor([0.1])},
}


@pytest.mark.parametrize("name", FLASH)
def test_torch_flash_creates_no_tensor_of_the_squared_length(name: str) -> None:
    """A block of 256 rows against its keys: 256 x 8192 fp32 scores would be 8 MiB, S x S is 256 MiB."""
    x = qkv(8192, layout=FLASH[name]["layout"])
    with Largest() as seen:
        forward_and_backward(x, backend="torch_flash", **FLASH[name])
    assert seen.bytes <= MIB, seen.bytes


def test_torch_flash_divides_a_batch_with_slopes_whose_mask_alone_is_small() -> None:
    """How a call is divided is cached in its mask; the division without slopes, whose mask has no heads, served calls
    with slopes."""
    q, mask = torch.zeros(8, 512, 8, 8), masks.causal() | masks.prefix(3)
    for slopes, batches in ((None, {8}), (torch.ones(8, 8), {1})):
        request = Request.from_keywords(q, q, q, layout="bshd", mask=mask, alibi_slopes=slopes)
        calls = list(torch_flash._calls(*normalise(request)))
        assert {call.block.batch.stop - call.block.batch.start for call in calls} == batches


def test_torch_flash_with_a_window_costs_in_proportion_to_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs: list[int] = []
    kernel = torch_flash._forward

    def counted(q: Tensor, k: Tensor, *others: Any, **options: Any) -> Any:
        pairs.append(q.shape[-2] * k.shape[-2])
        return kernel(q, k, *others, **options)

    def computed(length: int) -> int:
        pairs.clear()
        undivided.attention(
            *qkv(length, grad=False),  # type: ignore[call-overload]
            layout="bshd",
            mask=masks.window(64, 0),
            backend="torch_flash",
        )
        return sum(pairs)

    monkeypatch.setattr(torch_flash, "_forward", counted)
    assert 0 < computed(8192) < 2.5 * computed(4096), "twice the tokens; the square would be 4 times"


# Masks


MILLION = 1 << 20


def documents_of(count: int) -> masks.Mask:
    return masks.documents([n * (MILLION // count) for n in range(count + 1)])


STRUCTURED: dict[str, Callable[[], masks.Mask]] = {
    "causal": lambda: masks.causal(),
    "window": lambda: masks.window(4096, 128),
    "global-window": lambda: masks.window(4096, 0) | masks.prefix(64),
    "prefix-lm": lambda: masks.causal() | masks.prefix(1000),
    "chunks": lambda: masks.chunks(8192) & masks.causal(),
    "lengths": lambda: masks.causal() & masks.lengths([MILLION - 5], [MILLION - 5]),
    "documents": lambda: documents_of(4096) & masks.causal(),
    "document-ids": lambda: masks.document_ids(torch.arange(MILLION) // 300) & masks.causal(),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_masks_of_a_million_tokens_are_linear(name: str) -> None:
    """Ranges are int32 [1, S, 2 or 4]: 16 MiB; no temporary exceeds the int64 bounds, 32 MiB."""
    with Largest() as seen:
        form = STRUCTURED[name]().normal_form(1, 1, MILLION, MILLION, "cpu")
        some = form.allowed(slice(0, 1), slice(MILLION - 3, MILLION), slice(MILLION - 3, MILLION), slice(0, 1))
    assert form.exact
    assert form.ranges.dtype == torch.int32
    assert seen.bytes <= MILLION * 4 * 8
    assert some.shape[-2:] == (3, 3)


def test_attention_over_packed_documents_creates_no_tensor_of_the_squared_length() -> None:
    x = qkv(1 << 17, layout="thd", grad=False, dim=8)
    mask = masks.documents(list(range(0, (1 << 17) + 1, 1 << 8))) & masks.causal()
    with Largest() as seen:
        out = undivided.attention(*x, layout="thd", mask=mask, backend="torch_flash")  # type: ignore[call-overload]
    assert seen.bytes <= 8 * MIB
    assert bool(out.isfinite().all())
