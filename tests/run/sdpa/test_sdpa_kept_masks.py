"""scaled_dot_product_attention analyses a boolean mask once for all layers that get the same tensor, unless the kernel
reads masks as they are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor

import undivided
from undivided.masks import _kept
from undivided.run.sdpa import masks as sdpa_masks
from undivided.run.sdpa import repeated

sdp = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture
def analysed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads no mask."""
    monkeypatch.setattr(repeated, "_reads_mask", lambda *_: False)


def inputs(length: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 2, 4, length, 16)
    return q, k, v


def random_mask(*shape: int) -> Tensor:
    return (torch.rand(shape) < 0.6) | torch.eye(shape[-1], dtype=torch.bool)[: shape[-2]]


@pytest.mark.usefixtures("analysed")
@pytest.mark.parametrize("shape", [(9, 9), (4, 9, 9), (2, 1, 9, 9), (1, 1, 1, 9), (1, 1, 161, 161)])
def test_a_mask_is_analysed_once(builds: list[object], shape: tuple[int, ...]) -> None:
    mask = random_mask(*shape)
    for _ in range(4):
        q, k, v = inputs(shape[-1])
        torch.testing.assert_close(undivided.scaled_dot_product_attention(q, k, v, mask), sdp(q, k, v, mask))
    assert len(builds) == 1


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "padding of each sequence": lambda real: real[:, None, None, :9],
    "first keys": lambda real: real[:1, :9],
    "expanded": lambda real: real[:, None, None, :9].expand(2, 1, 9, 9),
}


@pytest.mark.usefixtures("analysed")
@pytest.mark.parametrize(
    ("mode", "keys"),
    [(torch.no_grad, 11), (torch.no_grad, 20_000), (torch.inference_mode, 11), (torch.enable_grad, 20_000)],
)
@pytest.mark.parametrize("view", VIEWS)
def test_a_mask_of_which_each_layer_makes_a_view_is_analysed_once(
    builds: list[object], view: str, keys: int, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    """It was analysed in each layer: a step of decoding took several times as long."""
    with mode():
        real = torch.arange(keys) < torch.tensor([[3], [7]])
        for _ in range(4):
            (q, k, v), part = inputs(), VIEWS[view](real)
            torch.testing.assert_close(undivided.scaled_dot_product_attention(q, k, v, part), sdp(q, k, v, part))
            del part
    assert len(builds) == 1


@pytest.mark.usefixtures("analysed")
@pytest.mark.parametrize(("size", "most"), [(40, 16), (300, 5), (900, 2)], ids=["small", "large", "larger"])
def test_few_masks_of_large_views_are_kept(size: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer of a model, of which each step takes other rows, would otherwise have sixteen pairs of copies."""
    monkeypatch.setattr(_kept, "_VIEW_BYTES", 5 * 300**2)
    gc.collect()
    before, whole = len(sdpa_masks._recent), random_mask(size, size)
    for length in range(size - 20, size):
        (q, k, v), part = inputs(length), whole[:length, :length]
        torch.testing.assert_close(undivided.scaled_dot_product_attention(q, k, v, part), sdp(q, k, v, part))
    assert len(sdpa_masks._recent) <= before + most
    assert sdpa_masks.kept_calls(whole[: size - 1, : size - 1], False) is not None


def test_views_of_one_mask_are_masks_of_their_own() -> None:
    mask = random_mask(18, 18)
    views = {
        "first rows": lambda: mask[:9, :9],
        "other rows": lambda: mask[9:, :9],
        "other columns": lambda: mask[:9, 9:],
        "transposed": lambda: mask.T[:9, :9],
        "every second row": lambda: mask[::2, :9],
        "one row for all": lambda: mask[:1, :9],
        "other type": lambda: mask.view(torch.uint8)[:9, :9].view(torch.bool)[:, :9],
    }
    q, k, v = inputs()
    for _ in range(2):
        for view in views.values():
            torch.testing.assert_close(undivided.scaled_dot_product_attention(q, k, v, view()), sdp(q, k, v, view()))


@pytest.mark.parametrize("length", [9, 160])
def test_a_change_of_a_mask_counts_in_the_views_that_layers_make(length: int) -> None:
    (q, k, v), mask = inputs(length), random_mask(length, length)
    for change in (set_one, write_through_data, write_to_storage, replace_memory):
        for _ in range(2):
            undivided.scaled_dot_product_attention(q, k, v, mask[None])
        change(mask)
        torch.testing.assert_close(
            undivided.scaled_dot_product_attention(q, k, v, mask[None]), sdp(q, k, v, mask[None])
        )


def set_one(mask: Tensor) -> None:
    mask[0, 3] = ~mask[0, 3]


def write_through_data(mask: Tensor) -> None:
    mask.data[2] = True


def write_to_storage(mask: Tensor) -> None:
    """As `torch.distributed` does: without a new version of the tensor."""
    mask.untyped_storage().fill_(1)


def replace_memory(mask: Tensor) -> None:
    mask.data = random_mask(*mask.shape)


def replace_strides(mask: Tensor) -> None:
    mask.data = mask.data.t()


@pytest.mark.parametrize("length", [9, 160, 161])
@pytest.mark.parametrize("change", [set_one, write_through_data, write_to_storage, replace_memory, replace_strides])
def test_a_mask_that_changes_counts_with_its_new_values(change: Callable[[Tensor], None], length: int) -> None:
    (q, k, v), mask = inputs(length), random_mask(length, length)
    for _ in range(2):  # the second call runs what the first has prepared
        undivided.scaled_dot_product_attention(q, k, v, mask)
    change(mask)
    for _ in range(2):
        torch.testing.assert_close(undivided.scaled_dot_product_attention(q, k, v, mask), sdp(q, k, v, mask))


@pytest.mark.parametrize("rank", [4, 5])
@pytest.mark.parametrize("length", [9, 160])
@pytest.mark.parametrize("change", [set_one, write_through_data, write_to_storage])
def test_the_backward_has_the_values_of_the_forward(change: Callable[[Tensor], None], length: int, rank: int) -> None:
    q, k, v = (t[(None,) * (rank - 4)].requires_grad_() for t in inputs(length))
    gradients = []
    for function in (undivided.scaled_dot_product_attention, sdp):
        torch.manual_seed(0)
        mask = random_mask(length, length)
        out = function(q, k, v, mask)
        change(mask)
        gradients.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    torch.testing.assert_close(*gradients)


@pytest.mark.usefixtures("analysed")
@pytest.mark.parametrize("length", [9, 160])
def test_a_mask_that_another_thread_changes_while_it_is_analysed(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept was compared with a copy of the later values, and so the earlier ones counted from then on."""
    (q, k, v), mask = inputs(length), random_mask(length, length)
    dense = sdpa_masks.masks.dense

    def with_a_change_meanwhile(tensor: Tensor) -> undivided.Mask:
        mask.data.fill_(True)
        return dense(tensor)

    monkeypatch.setattr(sdpa_masks.masks, "dense", with_a_change_meanwhile)
    undivided.scaled_dot_product_attention(q, k, v, mask)
    for _ in range(2):
        torch.testing.assert_close(undivided.scaled_dot_product_attention(q, k, v, mask), sdp(q, k, v))


def test_a_large_mask_in_memory_of_numpy_counts_with_its_new_values() -> None:
    (q, k, v), array = inputs(160), random_mask(160, 160).numpy().copy()
    mask = torch.from_numpy(array)
    undivided.scaled_dot_product_attention(q, k, v, mask)
    array[7] = True
    torch.testing.assert_close(undivided.scaled_dot_product_attention(q, k, v, mask), sdp(q, k, v, mask))


@pytest.mark.parametrize(
    ("heads", "transposed", "count"), [(2, False, 0), (300, False, 0), (2, True, 0), (300, True, 3)]
)
def test_masks_that_the_kernel_reads_are_not_analysed(
    heads: int, transposed: bool, count: int, builds: list[object]
) -> None:
    """Each new mask took 300 microseconds, more than the kernel. It reads transposed ones of small problems only."""
    for _ in range(3):
        q, k, v = torch.randn(3, 1, heads, 16, 16)
        mask = random_mask(16, 16)
        mask = mask.mT if transposed else mask
        torch.testing.assert_close(undivided.scaled_dot_product_attention(q, k, v, mask), sdp(q, k, v, mask))
    assert len(builds) == count


def test_is_causal_is_another_mask() -> None:
    (q, k, v), mask = inputs(), torch.ones(9, 9, dtype=torch.bool)
    full = undivided.scaled_dot_product_attention(q, k, v, mask)
    causal = undivided.scaled_dot_product_attention(q, k, v, mask, is_causal=True)
    torch.testing.assert_close(causal, sdp(q, k, v, is_causal=True))
    torch.testing.assert_close(full, sdp(q, k, v))


@pytest.mark.usefixtures("analysed")
def test_masks_go_with_their_tensors() -> None:
    gc.collect()
    before = len(sdpa_masks._recent)
    mask = random_mask(9, 9)
    undivided.scaled_dot_product_attention(*inputs(), mask)
    assert len(sdpa_masks._recent) == before + 1
    calls = sdpa_masks.kept_calls(mask, False)
    assert calls is not None
    assert len(calls) == 1
    prepared = weakref.ref(next(iter(calls.values()))[0])
    del mask, calls
    assert len(sdpa_masks._recent) == before
    assert prepared() is None
    base = random_mask(9, 10)
    undivided.scaled_dot_product_attention(*inputs(), base[:, :9])
    assert len(sdpa_masks._recent) == before + 1
    del base
    assert len(sdpa_masks._recent) == before
    for _ in range(20):  # their ids repeat
        (q, k, v), mask = inputs(), random_mask(9, 9)
        torch.testing.assert_close(undivided.scaled_dot_product_attention(q, k, v, mask), sdp(q, k, v, mask))
