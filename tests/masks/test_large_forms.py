"""The memory of large forms that masks keep is limited for the whole process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.masks import Mask
from undivided.masks.normal_form import NormalForm, ranges
from undivided.masks.normal_form.large_forms import LARGE

TOKENS = 1 << 15
FORM = (2 * 16 + 8) * TOKENS
"""Bytes of the form of a window and sinks for this many tokens, with the copy for kernels and the positions."""


@pytest.fixture(autouse=True)
def small_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ranges._shared_forms.clear()
    monkeypatch.setattr(LARGE, "_records", {})  # without the forms that masks of other tests keep
    monkeypatch.setattr(LARGE, "most", 4 * FORM)
    yield
    ranges._shared_forms.clear()


def streaming(left: int = 100) -> Mask:
    return masks.window(left, 0) | masks.sinks(4)


def form(mask: Mask, tokens: int = TOKENS) -> NormalForm:
    return mask.normal_form(1, 1, tokens, tokens, "cpu")


def bytes_of_ranges() -> int:
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is Tensor and x.dtype == torch.int32 and x.numel() > TOKENS]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


BUILDERS: dict[str, Callable[[int], NormalForm]] = {
    "sizes of one mask": lambda n: form(streaming(), TOKENS - n),
    "sizes of one mask, not shared": lambda n: form(streaming(), 3 * TOKENS - n),
    "masks of one size": lambda n: form(streaming(n + 1)),
    "masks with tensors": lambda n: form(masks.lengths([TOKENS - n], [TOKENS - n]) & masks.window(3, 0)),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_large_forms_of_many_sizes_and_masks_do_not_accumulate(name: str) -> None:
    before = bytes_of_ranges()
    for n in range(24):
        _ = BUILDERS[name](n).table
    assert bytes_of_ranges() - before <= 2 * LARGE.most
    assert LARGE.size <= max(LARGE.most, 2 * 3 * FORM)


def test_calls_of_many_lengths_do_not_accumulate_forms() -> None:
    before = bytes_of_ranges()
    for n in range(12):
        q = torch.randn(1, TOKENS - n, 1, 8)
        undivided.attention(q, q, q, layout="bshd", mask=streaming(15))
    assert bytes_of_ranges() - before <= LARGE.most


def test_repeated_calls_of_the_same_sizes_find_their_forms() -> None:
    first = [form(streaming(), TOKENS - n) for n in range(4)]
    for _ in range(3):
        assert all(form(streaming(), TOKENS - n) is first[n] for n in range(4))


def test_repeated_calls_of_the_same_sizes_build_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    build = ranges.build
    monkeypatch.setattr(ranges, "build", lambda *arguments: built.append(arguments) or build(*arguments))
    inputs = [torch.randn(1, TOKENS - n, 1, 8) for n in range(3)]
    for _ in range(3):
        for q in inputs:
            undivided.attention(q, q, q, layout="bshd", mask=streaming(15))
    assert len(built) == 3


def test_the_form_that_is_used_stays_among_others_of_many_sizes() -> None:
    first = form(streaming())
    for n in range(1, 20):
        form(streaming(), TOKENS - n)
        assert form(streaming()) is first


def test_two_forms_above_the_limit_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LARGE, "most", 1)
    both = [form(streaming(left)) for left in (3, 5)]
    assert [form(streaming(left)) for left in (3, 5)] == both


def test_small_forms_and_forms_of_dropped_masks_are_not_counted() -> None:
    form(streaming(), 64)
    assert not LARGE.size
    mask = masks.lengths([TOKENS - 3])
    form(mask)
    assert LARGE.size
    del mask
    gc.collect()
    assert not LARGE.size
