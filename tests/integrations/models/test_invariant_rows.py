"""Documents in several rows of a model's batch under batch_invariant=True: the bits of each row and document alone.

Positions that restart become ids of documents, which do not say where one starts: every backend refused them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="the transformers library is not installed")

import transformers
import transformers_models as models
from native_oracle import needs_library
from transformers import masking_utils

import undivided
from undivided.errors import InputError
from undivided.integrations.transformers import ModelMask, attention, model_mask, register, use_latents

pytestmark = needs_library

LENGTHS = (7, 33, 10), (1, 20, 29), (50,)
IDS = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS])
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
HEADS, DIM = 4, 16


@pytest.fixture(autouse=True)
def _invariant() -> Iterator[None]:
    register()
    undivided.set_backends(batch_invariant=True)
    yield
    undivided.set_backends()


class Layer(nn.Module):
    is_causal = True


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, ``[B, H, S, D]``."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 50, heads, DIM).to(dtype).transpose(1, 2) for heads in (HEADS, 2, 2))
    return q, k, v


def causal(rows: slice) -> Any:
    return model_mask_of(masking_utils.causal_mask_function, rows)


def window(rows: slice) -> Any:
    return model_mask_of(masking_utils.sliding_window_causal_mask_function(9), rows)


def chunked(rows: slice) -> Any:
    none = torch.zeros(len(IDS[rows]), dtype=torch.int64)
    return model_mask_of(masking_utils.chunked_causal_mask_function(8, none), rows)


def padded(rows: slice) -> Any:
    real = (torch.arange(50) >= torch.tensor([[3], [0], [12]]))[rows]
    return model_mask_of(masking_utils.causal_mask_function, rows, attention_mask=real)


def model_mask_of(within: Any, rows: slice, **more: Any) -> ModelMask:
    """The mask of a model whose rows have documents."""
    same = masking_utils.packed_sequence_mask_function(IDS[rows])
    inner = masking_utils.remap_positions_for_packed_sequence(within, POSITIONS[rows])
    return model_mask(len(IDS[rows]), 50, 50, mask_function=masking_utils.and_masks(inner, same), **more)


MASKS: dict[str, Callable[[slice], Any]] = {"causal": causal, "window": window, "chunked": chunked, "padded": padded}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_the_bits_are_those_of_each_row_alone(mask: Callable[[slice], Any], dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype)
    options: dict[str, Any] = {"softcap": 3.0, "s_aux": torch.linspace(-1, 1, HEADS), "output_attentions": True}
    together, weights = attention(Layer(), q, k, v, mask(slice(None)), **options)
    assert weights is not None
    for row in (slice(n, n + 1) for n in range(3)):
        alone, of_row = attention(Layer(), q[row], k[row], v[row], mask(row), **options)
        assert of_row is not None
        assert torch.equal(together[row], alone)
        assert torch.equal(weights[row], of_row)
    undivided.set_backends()
    expected, of_reference = attention(Layer(), q, k, v, mask(slice(None)), **options)
    assert of_reference is not None
    close: dict[str, Any] = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(together, expected, **close)
    torch.testing.assert_close(weights, of_reference, **close)


def test_the_bits_are_those_of_each_document_alone_and_so_are_the_gradients() -> None:
    states = q, k, v = inputs(torch.float32)
    for state in states:
        state.requires_grad_()
    out, _ = attention(Layer(), q, k, v, causal(slice(None)))
    found = torch.autograd.grad(out.square().sum(), states)
    for row, lengths in enumerate(LENGTHS):
        stop = 0
        for length in lengths:
            start, stop = stop, stop + length
            parts = [state[row : row + 1, :, start:stop].detach().requires_grad_() for state in states]
            alone, _ = attention(Layer(), parts[0], parts[1], parts[2], model_mask_alone(length))
            assert torch.equal(out[row : row + 1, start:stop], alone)
            expected = torch.autograd.grad(alone.square().sum(), parts)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one[row : row + 1, :, start:stop], other)


def model_mask_alone(length: int) -> ModelMask:
    return model_mask(1, length, length, mask_function=masking_utils.causal_mask_function)


def test_rows_that_follow_one_another_in_memory_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from undivided.integrations.transformers import _weights

    addresses: list[int] = []

    def recorded(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        addresses.extend(t.data_ptr() for t in (q, k, v))
        return torch.zeros_like(q)

    q, k, v = inputs(torch.float32)
    monkeypatch.setattr(_weights, "attend", recorded)
    attention(Layer(), q.requires_grad_(), k, v, causal(slice(None)))
    assert addresses == [state.data_ptr() for state in (q, k, v)]


def test_a_copy_of_the_mask_has_the_rows_too() -> None:
    mask = causal(slice(None))
    copy = mask._moved(torch.device("meta"))
    assert isinstance(copy, ModelMask)
    assert copy.in_one_row is not None
    assert copy.in_one_row.device.type == "meta"


def test_a_mask_is_joined_only_if_results_must_be_invariant_and_it_has_documents() -> None:
    assert model_mask_alone(50).in_one_row is None
    assert model_mask(2, 50, 50, mask_function=masking_utils.causal_mask_function).in_one_row is None
    assert causal(slice(0, 1)).in_one_row is None
    assert causal(slice(None)).in_one_row is not None
    undivided.set_backends()
    assert causal(slice(None)).in_one_row is None


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma-2", "llama-4"])
def test_models_train_on_rows_of_documents(name: str) -> None:
    text = torch.randint(3, 50, (3, 50), generator=torch.Generator().manual_seed(0))
    losses = []
    for implementation in ("eager", "undivided"):
        network = models.build(name, implementation)
        out = network(text, position_ids=POSITIONS, labels=text, use_cache=False, output_attentions=True)
        out.loss.backward()
        assert out.attentions[0].shape == (3, 4, 50, 50)
        losses.append(out.loss.item())
    assert math.isclose(*losses, rel_tol=1e-5)


def test_latent_attention_over_rows_of_documents() -> None:
    sizes: dict[str, Any] = {
        **models.LM,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    config = transformers.DeepseekV3Config(**sizes, attn_implementation="undivided")
    network = transformers.DeepseekV3ForCausalLM(config).eval()
    text = torch.randint(3, 50, (3, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = network(text, position_ids=POSITIONS, use_cache=False).logits
        use_latents(network)
        torch.testing.assert_close(network(text, position_ids=POSITIONS, use_cache=False).logits, expected)


def test_states_that_do_not_fit_are_an_input_error() -> None:
    q, k, v = inputs(torch.float32)
    with pytest.raises(InputError, match="attention_mask must be for 50 queries and 40 keys"):
        attention(Layer(), q, k[:, :, :40], v[:, :, :40], causal(slice(None)))
