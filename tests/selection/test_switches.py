"""PyTorch's switches for scaled_dot_product_attention as a short string, and the families that it switches off."""

from __future__ import annotations

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from undivided.selection import switches

FLASH, EFFICIENT, CUDNN, MATH = (
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH,
)  # fmt: skip


def test_the_default_is_the_empty_string() -> None:
    assert switches.read() == ""


@pytest.mark.parametrize(
    ("allowed", "state"),
    [([MATH], "fec:"), ([FLASH], "ecm:"), ([EFFICIENT, CUDNN], "fm:"), ([FLASH, EFFICIENT, CUDNN], "m:")],
)
def test_a_letter_stands_for_each_switch_that_is_off(allowed: list[SDPBackend], state: str) -> None:
    with sdpa_kernel(allowed):
        assert switches.read() == state


def test_an_order_that_was_requested_follows_the_colon() -> None:
    with sdpa_kernel([MATH, EFFICIENT, FLASH, CUDNN], set_priority=True):
        state = switches.read()
        assert state.startswith(":0213")
        assert switches.order(state) == ("math", "efficient", "flash", "flex", "fused")
    assert switches.order("fe:") == ()
    assert switches.order("") == ()


def test_a_family_that_is_off_says_which_switch() -> None:
    assert switches.disabled("fc:12") == (
        ("flash", "sdpa_kernel or torch.backends.cuda.enable_flash_sdp(False)"),
        ("flex", "sdpa_kernel or torch.backends.cuda.enable_flash_sdp(False)"),
        ("fused", "sdpa_kernel or torch.backends.cuda.enable_cudnn_sdp(False)"),
    )
    assert switches.disabled(":0") == switches.disabled("") == ()


def test_a_graph_without_dynamo_keeps_the_state_in_which_it_was_recorded() -> None:
    assert switches.read_for_graph() == ""
    with sdpa_kernel(MATH):
        assert switches.read_for_graph() == "fec:"
