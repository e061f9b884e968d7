"""Masks that a model of the transformers library computes with, slices or gets from its user."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from undivided.errors import InputError
from undivided.integrations.transformers import ModelMask, _positions, attention, model_mask, register
from undivided.integrations.transformers._masks import within_documents

masking_utils = pytest.importorskip("transformers.masking_utils", reason="the transformers library is not installed")


transformers = pytest.importorskip("transformers")


register()


def no_padding(batch: int) -> Tensor:
    return torch.zeros(batch, dtype=torch.int64)


def chunked(size: int) -> Callable[[Tensor], Any]:
    return lambda start: masking_utils.chunked_causal_mask_function(size, start)


COMPUTED: dict[str, Callable[[Any], Any]] = {
    "sliced": lambda mask: mask[:, :, 1:, :2],
    "sliced-row": lambda mask: mask[:, 0],
    "joined": lambda mask: mask & torch.tensor([True, False, True]),
    "joined-right": lambda mask: torch.tensor([True, False, True]) & mask,
    "inverted": lambda mask: ~mask,
    "added": lambda mask: torch.zeros(3) + mask,
    "multiplied": lambda mask: mask * 2.0,
    "compared": lambda mask: mask == 0,
    "where": lambda mask: torch.where(mask, 0.0, -1.0),
    "padded": lambda mask: torch.nn.functional.pad(mask, (0, 1)),
    "joined-up": lambda mask: torch.cat([mask, mask], dim=-1),
    "method": lambda mask: mask.repeat(1, 2, 1, 1).reshape(-1, 3, 3).sum(-1),
    "masked-fill": lambda mask: torch.zeros(2, 4, 3, 3).masked_fill(mask, 1.0),
    "to-float": lambda mask: mask.to(torch.float64),
    "to-by-name": lambda mask: mask.to(device="cpu", dtype=torch.int32),
    "float": lambda mask: mask.float(),
    "iterated": lambda mask: torch.stack(list(mask)),
}


OF_BOOLEANS = {"joined", "joined-right", "inverted", "where", "masked-fill"}


@pytest.mark.parametrize(
    ("name", "booleans"),
    [(name, True) for name in COMPUTED] + [(name, False) for name in COMPUTED if name not in OF_BOOLEANS],
)
def test_a_model_that_computes_with_its_mask_gets_what_the_dense_mask_gives(name: str, booleans: bool) -> None:
    """Gemma 4 slices its mask, LightGlue reshapes it, PP-DocLayout's reading order adds it to scores: each as with the
    mask of "sdpa", or of "eager" if the model supports nothing else."""
    made = masking_utils.causal_mask_function
    real = torch.tensor([[True, True, True], [False, True, True]])
    options = {"batch_size": 2, "q_length": 3, "kv_length": 3, "mask_function": made, "attention_mask": real}
    model = transformers.LlamaModel if booleans else transformers.BloomModel
    library = masking_utils.sdpa_mask if booleans else masking_utils.eager_mask
    dense = library(**options, dtype=torch.float32, allow_is_causal_skip=False)
    mask: Any = model_mask(**options, config=model.config_class(), dtype=torch.float32)
    assert (mask.dtype, mask.shape, mask.device) == (dense.dtype, dense.shape, dense.device)
    with nullcontext() if booleans else pytest.warns(UserWarning, match="as with attn_implementation='eager'"):
        found = COMPUTED[name](mask)
    expected = COMPUTED[name](dense)
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype


@pytest.mark.parametrize(
    "passed_on",
    [
        lambda mask: mask[:, :, :, :3],
        lambda mask: mask[:],
        lambda mask: mask.to("cpu"),
        lambda mask: mask.to(torch.device("cpu"), non_blocking=True),
        lambda mask: mask.to(dtype=torch.bool),
        lambda mask: mask.to(torch.zeros(1, dtype=torch.bool)),
        lambda mask: mask.contiguous().detach(),
    ],
    ids=["whole-slice", "whole", "device", "device-not-blocking", "dtype", "tensor", "memory"],
)
def test_operations_that_do_not_change_the_mask_keep_its_structure(passed_on: Callable[[Any], Any]) -> None:
    mask = model_mask(1, 3, 3, mask_function=masking_utils.causal_mask_function)
    assert passed_on(mask) is mask
    assert (mask.dim(), mask.size(), mask.size(-1), mask.requires_grad) == (4, (1, 1, 3, 3), 3, False)
    assert "dense" not in vars(mask)
    with pytest.raises(AttributeError, match="no attribute '_made_up'"):
        mask._made_up  # noqa: B018
    assert mask in {mask}
    assert copy.deepcopy(mask).shape == mask.shape


def test_a_mask_that_moves_to_another_device_keeps_its_structure() -> None:
    """A model whose layers are on several GPUs gave every layer of the others a dense mask."""
    real, positions = torch.ones(2, 6), torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)
    real[1, :2] = 0
    functions = {
        "window": masking_utils.sliding_window_causal_mask_function(3),
        "documents": masking_utils.and_masks(
            masking_utils.packed_sequence_mask_function((positions == 0).cumsum(1) - 1),
            masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, positions),
        ),
        "chunks": masking_utils.chunked_causal_mask_function(2, torch.tensor([0, 1])),
    }
    for name, function in functions.items():
        mask: Any = model_mask(2, 6, 6, mask_function=function, attention_mask=None if name == "documents" else real)
        moved = mask.to("meta", non_blocking=True)
        assert isinstance(moved, ModelMask)
        assert repr(moved.mask.structure) == repr(mask.mask.structure)
        assert {tensor.device.type for tensor in moved.mask.tensors} <= {"meta"}
        assert moved is mask.to(torch.device("meta")), "one copy for all layers of a device"
        assert moved.to("meta") is moved
        assert "dense" not in vars(mask)
    function = model_mask(2, 6, 6, mask_function=lambda b, h, q, k: k <= q + real[b, k])
    assert function.to("meta").device.type == "meta"  # type: ignore[attr-defined]
    assert mask.to("cpu", torch.float32).dtype == torch.float32


def test_a_slice_of_the_mask_is_accepted_as_a_tensor() -> None:
    """A mask that a model has changed is a boolean or a floating-point tensor."""
    q, k = torch.randn(1, 2, 2, 4), torch.randn(1, 2, 3, 4)
    mask: Any = model_mask(1, 3, 3, mask_function=masking_utils.causal_mask_function)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask.dense[:, :, 1:])
    for given in (mask[:, :, 1:], torch.zeros(1, 1, 2, 3).masked_fill(~mask[:, :, 1:], torch.finfo().min)):
        torch.testing.assert_close(attention(Layer(), q, k, k, given)[0], expected.transpose(1, 2))


class Layer(torch.nn.Module):
    is_causal = False


@pytest.mark.parametrize("argument", ["head_mask", "cache"])
def test_unsupported_arguments_that_change_the_result_are_refused(argument: str) -> None:
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(InputError, match=f"{argument} must be None"):
        attention(Layer(), q, q, q, None, **{argument: torch.zeros(1)})


def test_a_mask_of_one_row_is_for_all_queries() -> None:
    """LightGlue creates the mask of one query and passes it to a layer with many."""
    q, k = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 6, 8)
    real = torch.tensor([[True] * 6, [True] * 2 + [False] * 4])
    made = masking_utils.bidirectional_mask_function
    mask = model_mask(2, 1, 6, mask_function=made, attention_mask=real)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=real[:, None, None])
    torch.testing.assert_close(attention(Layer(), q, k, k, mask)[0], expected.transpose(1, 2))


def eager(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and weights with a logit more for each query, in the denominator alone."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~allowed, torch.finfo().min)
    weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    return (weights @ v).transpose(1, 2), weights


def test_sinks_of_single_tokens() -> None:
    """Inkling's: a logit for each query and head."""
    tensors = [torch.randn(2, 4, 6, 8).requires_grad_() for _ in range(3)] + [torch.randn(2, 4, 6, 1).requires_grad_()]
    mask: Any = model_mask(2, 6, 6, mask_function=masking_utils.causal_mask_function)
    found = attention(Layer(), *tensors[:3], mask, sinks=tensors[3], output_attentions=True)
    expected = eager(*tensors[:3], mask.to_dense(), tensors[3])
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(out.square().sum(), tensors) for out, _ in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_keys_chosen_by_index() -> None:
    """DeepSeek 3.2 and its like: some keys for each query, beside the mask."""
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    mask: Any = model_mask(2, 6, 6, mask_function=masking_utils.causal_mask_function)
    indices = torch.stack([torch.stack([torch.randperm(6)[:3] for _ in range(6)]) for _ in range(2)])
    chosen = (indices[..., None] == torch.arange(6)).any(-2)[:, None] & mask.to_dense()
    rows = chosen.any(-1)[:, 0]
    found = attention(Layer(), q, k, k, mask, indices=indices.to(torch.int32))[0]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=chosen, enable_gqa=True)
    torch.testing.assert_close(found[rows], expected.transpose(1, 2)[rows])
    assert not found[~rows].any()


def test_blocks_of_keys_chosen_by_index() -> None:
    """MiniMax M3: some blocks of keys for each query and group of heads; -1 is none, and the last block is not full."""
    layer: Any = Layer()
    layer.indexer = torch.nn.Identity()
    layer.indexer.block_size = 2
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 5, 8)
    blocks = torch.tensor([[[[0, 2], [1, -1], [2, 0]], [[1, 0], [2, -1], [0, -1]]]])
    kept = (blocks[..., None] == torch.arange(5) // 2).any(-2).repeat_interleave(2, dim=1)
    full: Any = model_mask(1, 3, 5, mask_function=masking_utils.bidirectional_mask_function)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=kept, enable_gqa=True)
    for mask in (full, None):
        found = attention(layer, q, k, k, mask, block_indices=blocks)[0]
        torch.testing.assert_close(found, expected.transpose(1, 2))


def test_a_mask_for_other_sizes_is_refused() -> None:
    """A bottom-right causal mask for 5 keys differs from one for 6: it must not be silently aligned again."""
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 6, 4)
    mask = model_mask(1, 3, 5, 2, mask_function=masking_utils.causal_mask_function)
    with pytest.raises(InputError, match="attention_mask must be for 3 queries and 6 keys"):
        attention(Layer(), q, k, k, mask)


def test_a_mask_tensor_for_more_keys_than_the_layer_has_is_refused() -> None:
    """A layer with a window keeps the last keys; the mask lost its last columns, and the result was wrong."""
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 7, 4)
    mask = torch.ones(1, 1, 3, 13, dtype=torch.bool).tril(10)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask[..., -7:]).transpose(1, 2)
    for tensor in (mask, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)):
        with pytest.raises(
            InputError, match=r"(?s)must have 7 keys.*keeps the last 7 keys: attention_mask\[..., -7:\]"
        ):
            attention(Layer(), q, k, k, tensor)
        torch.testing.assert_close(attention(Layer(), q, k, k, tensor[..., -7:])[0], expected)


def test_without_a_mask_the_layer_says_whether_it_is_causal() -> None:
    """As it is for transformers' own ``sdpa``; the keyword replaces what the layer says."""
    layer, q = Layer(), torch.randn(1, 2, 3, 4)
    full = torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2)
    causal = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(attention(layer, q, q, q, None)[0], full)
    torch.testing.assert_close(attention(layer, q, q, q, None, is_causal=True)[0], causal)
    torch.testing.assert_close(attention(torch.nn.Identity(), q, q, q, None)[0], causal)


@pytest.mark.parametrize("numbers", [False, True], ids=["boolean", "numbers"])
def test_masks_given_by_the_user(numbers: bool) -> None:
    """A 4-D tensor passes through transformers unchanged."""
    q, k = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 5, 4)
    mask = torch.rand(2, 1, 3, 5) > 0.3
    mask[..., 0] = True
    given = torch.zeros(2, 1, 3, 5).masked_fill(~mask, torch.finfo(torch.float32).min) if numbers else mask
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=given).transpose(1, 2)
    torch.testing.assert_close(attention(Layer(), q, k, k, given)[0], expected)


def test_the_weights_are_those_of_the_output() -> None:
    """With dropout the same entries drop out in both, and sinks take their share."""
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    mask = model_mask(2, 6, 6, mask_function=masking_utils.sliding_window_causal_mask_function(3))
    out, weights = attention(
        Layer(), q, k, k, mask, dropout=0.3, s_aux=torch.randn(4), softcap=2.0, output_attentions=True
    )
    assert weights is not None
    assert tuple(weights.shape) == (2, 4, 6, 6)
    assert not weights.masked_select(~mask.to_dense()).any()
    assert bool((weights.masked_select(mask.to_dense()) == 0).any())
    values = k.repeat_interleave(2, dim=1)
    torch.testing.assert_close((weights @ values).transpose(1, 2), out)


def test_documents_from_cumulative_lengths() -> None:
    """``cu_seq_lens_q`` in the attention's keywords, as flash attention's collator makes them: documents within the
    pattern."""
    q = torch.randn(1, 2, 9, 4)
    cu = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    made = masking_utils.sliding_window_causal_mask_function(2)
    mask: Any = model_mask(1, 9, 9, mask_function=made)
    document = torch.repeat_interleave(torch.arange(3), cu.diff())
    allowed = mask.to_dense() & (document[:, None] == document)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=allowed).transpose(1, 2)
    options = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 5, "max_length_k": 5}
    torch.testing.assert_close(attention(Layer(), q, q, q, mask, **options)[0], expected)
    assert within_documents(mask, cu, cu, 5, 5) is within_documents(mask, cu, cu, 5, 5)
    same = document[:, None] == document
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=same).transpose(1, 2)
    torch.testing.assert_close(attention(Layer(), q, q, q, None, **options)[0], expected)
    mine = torch.rand(1, 1, 9, 9) > 0.2
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, q, q, attn_mask=(same & mine).masked_fill(~(same & mine).any(-1, keepdim=True), True)
    ).transpose(1, 2)
    rows = (same & mine).any(-1)[0, 0]
    torch.testing.assert_close(attention(Layer(), q, q, q, mine, **options)[0][:, rows], expected[:, rows])


def test_cumulative_lengths_and_the_ids_of_a_mask_function_apply_both() -> None:
    cu, ids = torch.tensor([0, 3, 9], dtype=torch.int32), torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1]])
    causal = masking_utils.causal_mask_function
    mask = model_mask(
        1, 9, 9, mask_function=masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(ids))
    )
    found = within_documents(mask, cu, cu, None, None).to_dense(1, 1, 9, 9)[0, 0]
    document = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    assert torch.equal(found, (document[:, None] == document).tril())


def test_documents_in_chunks_from_cumulative_lengths() -> None:
    cu = torch.tensor([0, 3, 9], dtype=torch.int32)
    mask = model_mask(1, 9, 9, mask_function=chunked(2)(no_padding(1)))
    found = within_documents(mask, cu, cu, None, None).to_dense(1, 1, 9, 9)[0, 0]
    position = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5])
    document = torch.tensor([0] * 3 + [1] * 6)
    same = (document[:, None] == document) & (position[:, None] // 2 == position // 2)
    assert torch.equal(found, same & torch.ones(9, 9, dtype=torch.bool).tril())


def test_cumulative_lengths_of_keys_alone_are_refused() -> None:
    """They were ignored, so that the documents attended to each other."""
    q = torch.randn(1, 2, 9, 4)
    with pytest.raises(InputError, match="cu_seq_lens_q must be given with cu_seq_lens_k"):
        attention(Layer(), q, q, q, None, cu_seq_lens_k=torch.tensor([0, 3, 9]))


RESTART = [0, 1, 2, 0, 1]
POSITIONS: dict[str, tuple[bool, list[int], list[int] | None]] = {
    "documents": (True, RESTART, None),
    "documents-in-a-padded-batch": (True, RESTART, [1, 1, 1, 1, 0]),
    "one-document": (False, [0, 1, 2, 3, 4], None),
    "padding-on-the-left": (False, [1, 1, 0, 1, 2], [0, 0, 1, 1, 1]),
    "padding-on-the-right": (False, [0, 1, 2, 0, 0], [1, 1, 1, 0, 0]),
}


@pytest.mark.parametrize(("is_reported", "positions", "real"), POSITIONS.values(), ids=POSITIONS)
def test_positions_that_restart_without_documents_in_the_mask_are_reported(
    is_reported: bool, positions: list[int], real: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-OSS does not read documents from its positions; with a mask of ones no model does. They attended to each
    other without a word."""
    monkeypatch.setattr(_positions, "_reported", set())
    config = transformers.GptOssConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        attn_implementation="undivided",
    )
    model = transformers.GptOssForCausalLM(config)
    inputs = {"input_ids": torch.arange(5)[None] + 3, "position_ids": torch.tensor([positions]), "use_cache": False}
    if real is not None:
        inputs["attention_mask"] = torch.tensor([real])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(**inputs)
        cu = torch.tensor([0, 3, 5], dtype=torch.int32)
        model(**inputs, cu_seq_lens_q=cu, cu_seq_lens_k=cu)
    named = [str(warning.message) for warning in caught if "GptOssAttention start again at 0" in str(warning.message)]
    assert len(named) == is_reported


def test_documents_that_a_mask_has_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_positions, "_reported", set())
    positions = torch.tensor([RESTART])
    config = transformers.LlamaConfig(num_attention_heads=2, attn_implementation="undivided")
    mask = masking_utils.create_causal_mask(config, torch.randn(1, 5, 8), None, None, position_ids=positions)
    assert isinstance(mask, ModelMask)
    q = torch.randn(1, 2, 5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(Layer(), q, q, q, mask, position_ids=positions)
    assert _positions._reported == set()
