"""Graphs of torch.compile compute what follows from a mask once for all their calls."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.masks import Mask

LAYERS = 3
OFFSETS = torch.tensor([0, 3, 10, 15])


def layers(x: Tensor, mask: Mask) -> Tensor:
    for _ in range(LAYERS):
        x = undivided.attention(x, x, x, layout="thd", mask=mask)
    return x


def model(x: Tensor, offsets: Tensor) -> Tensor:
    return layers(x, masks.documents(offsets, max_q=7) & masks.causal())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_layers_of_a_graph_share_the_ranges_of_a_mask(builds: list[object], backend: str) -> None:
    x = torch.randn(15, 4, 16)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        compiled(x, OFFSETS)
        want, offsets = model(x, OFFSETS), OFFSETS.clone()
        builds.clear()
        out = compiled(x, offsets)
    assert len(builds) == 1
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("documents", [3, 3000], ids=["small offsets", "large offsets"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_forward_and_backward_of_a_graph_share_the_ranges_of_a_mask(
    builds: list[object], documents: int, backend: str
) -> None:
    offsets = torch.arange(0, 2 * documents + 1, 2)
    x, other = (torch.randn(2 * documents, 1, 16, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        other.copy_(x)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    model(x, offsets).sum().backward()
    compiled(other, offsets).sum().backward()
    torch.testing.assert_close(other.grad, x.grad)
    offsets = offsets.clone()
    builds.clear()
    compiled(other, offsets).sum().backward()
    assert len(builds) == 1


def two_masks_of_lengths(x: Tensor, lengths: Tensor) -> Tensor:
    """Two masks whose tensors have the same size, dtype and purpose: Inductor may give both one buffer."""
    first, second = torch.cumsum(lengths, 0), torch.cumsum(lengths.flip(0), 0)
    x = undivided.attention(x, x, x, layout="bshd", mask=masks.lengths(first))
    return undivided.attention(x, x, x, layout="bshd", mask=masks.lengths(second))


def offsets_that_change(x: Tensor, offsets: Tensor) -> Tensor:
    """A mask before and after its tensor changes in place."""
    x = layers(x, masks.documents(offsets, max_q=15))
    offsets[1:-1] += 1
    return layers(x, masks.documents(offsets, max_q=15))


def one_mask_that_changes(x: Tensor, offsets: Tensor) -> Tensor:
    """The same mask before and after its tensor changes in place."""
    mask = masks.documents(offsets, max_q=15)
    x = layers(x, mask)
    offsets[1:-1] += 1
    return layers(x, mask)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("function", "shape", "numbers"),
    [
        (two_masks_of_lengths, (3, 9, 2, 16), [1, 3, 2]),
        (offsets_that_change, (15, 2, 16), [0, 3, 9, 15]),
        (one_mask_that_changes, (15, 2, 16), [0, 3, 9, 15]),
    ],
)
def test_masks_of_one_graph_keep_their_own_values(
    function: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...], numbers: list[int], backend: str
) -> None:
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for _ in range(2):
        x, change = torch.randn(shape), torch.randint(0, 2, ()).item()
        tensor = torch.tensor(numbers)
        tensor[1] += change
        torch.testing.assert_close(compiled(x, tensor.clone()), function(x, tensor.clone()))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_mask_from_outside_of_the_graph_follows_changes_of_its_tensor(backend: str) -> None:
    x, mask = torch.randn(15, 4, 16), masks.documents(OFFSETS.clone(), max_q=15)
    compiled = torch.compile(layers, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x, mask), layers(x, mask))
    mask.tensors[0][1] = 4
    torch.testing.assert_close(compiled(x, mask), layers(x, mask))


def test_no_large_memory_is_kept_for_a_small_view_of_it() -> None:
    x, table = torch.randn(2, 9, 2, 16), torch.full((2, 1 << 16), 5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x: Tensor, lengths: Tensor) -> Tensor:
        return undivided.attention(x, x, x, layout="bshd", mask=masks.lengths(lengths))

    with torch.no_grad():
        layer(x, table[:, 0])
    storage = weakref.ref(table.untyped_storage())
    del table
    gc.collect()  # a cycle of the compiler's
    assert storage() is None


def test_a_mask_inside_of_a_compiled_vmap_has_the_lengths_of_each_element() -> None:
    x, lengths = torch.randn(2, 3, 9, 2, 16), torch.tensor([[1, 9, 4], [9, 2, 3]])

    def each(x: Tensor, lengths: Tensor) -> Tensor:
        return undivided.attention(x, x, x, layout="bshd", mask=masks.lengths(lengths))

    compiled = torch.compile(torch.func.vmap(each), backend="aot_eager")
    torch.testing.assert_close(compiled(x, lengths), torch.stack(list(map(each, x, lengths))))


def test_a_mask_that_a_graph_returns_is_usable_outside() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def build(x: Tensor, offsets: Tensor) -> tuple[Tensor, Mask]:
        mask = masks.documents(offsets, max_q=15)
        return layers(x, mask), mask

    x = torch.randn(15, 4, 16)
    out, mask = build(x, OFFSETS)
    torch.testing.assert_close(out, layers(x, mask))
    again = torch.compile(layers, fullgraph=True, backend="aot_eager")(x, mask)
    torch.testing.assert_close(again, out)
