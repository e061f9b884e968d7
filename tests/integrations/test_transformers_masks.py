"""Masks of transformers: the same pairs as the library's dense mask, with structure if it is known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from undivided.errors import InputError
from undivided.integrations.transformers import _patterns, attention, model_mask, register
from undivided.integrations.transformers._masks import within_documents

masking_utils = pytest.importorskip("transformers.masking_utils", reason="the transformers library is not installed")
transformers = pytest.importorskip("transformers")
register()

STRUCTURE = {"causal", "window", "chunks", "prefix", "lengths", "starts", "documents", "document_ids"}


def no_padding(batch: int) -> Tensor:
    return torch.zeros(batch, dtype=torch.int64)


def chunked(size: int) -> Callable[[Tensor], Any]:
    return lambda start: masking_utils.chunked_causal_mask_function(size, start)


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "causal": lambda start: masking_utils.causal_mask_function,
    "window-1": lambda start: masking_utils.sliding_window_causal_mask_function(1),
    "window-4": lambda start: masking_utils.sliding_window_causal_mask_function(4),
    "window-99": lambda start: masking_utils.sliding_window_causal_mask_function(99),
    "chunks-3": chunked(3),
    "chunks-99": chunked(99),
    "bidirectional": lambda start: masking_utils.bidirectional_mask_function,
    "bidirectional-window-2": lambda start: masking_utils.sliding_window_bidirectional_mask_function(2),
}
CALLS: dict[str, dict[str, int]] = {
    "prefill": {"q_length": 9, "kv_length": 9},
    "decoding": {"q_length": 1, "kv_length": 9, "q_offset": 8},
    "chunked-prefill": {"q_length": 4, "kv_length": 9, "q_offset": 5},
    "forgetful-cache": {"q_length": 1, "kv_length": 4, "q_offset": 8, "kv_offset": 5},
    "forgetful-cache-3-tokens": {"q_length": 3, "kv_length": 6, "q_offset": 6, "kv_offset": 3},
    "static-prefill": {"q_length": 5, "kv_length": 12},
    "static-decoding": {"q_length": 1, "kv_length": 12, "q_offset": 8},
    "static-3-tokens": {"q_length": 3, "kv_length": 12, "q_offset": 6},
}
PADDING: dict[str, list[list[int]] | None] = {
    "none": None,
    "all-real": [[1] * 9] * 3,
    "left": [[1] * 9, [0] * 3 + [1] * 6, [0] + [1] * 8],
    "right": [[1] * 9, [1] * 6 + [0] * 3, [1] * 8 + [0]],
    "both-sides": [[1] * 9, [0] * 2 + [1] * 5 + [0] * 2, [0] * 9],
    "holes": [[1] * 9, [0, 1, 1, 0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 1, 0, 1, 0, 1]],
}


@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_same_pairs_as_the_dense_mask_of_transformers(
    function: str, call: dict[str, int], padding: list[list[int]] | None
) -> None:
    seen = call["q_length"] + call.get("q_offset", 0)
    real = None if padding is None else torch.tensor(padding, dtype=torch.bool)[:, :seen]
    start = no_padding(3) if real is None else (real.cumsum(-1) == 0).sum(-1)
    options = {"batch_size": 3, "mask_function": FUNCTIONS[function](start), "attention_mask": real, **call}
    expected = masking_utils.sdpa_mask(**options, allow_is_causal_skip=False)
    found = model_mask(**options)
    assert torch.equal(found.to_dense(), expected)
    assert tuple(found.shape) == tuple(expected.shape)


@pytest.mark.parametrize("padding", [name for name in PADDING if name != "holes"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_known_masks_stay_structure(function: str, call: str, padding: str) -> None:
    """Ranges alone, never a tensor with an entry for each pair. (The exception is a window that looks ahead into a
    partly filled static cache: lengths cannot express it.)"""
    given = PADDING[padding]
    seen = CALLS[call]["q_length"] + CALLS[call].get("q_offset", 0)
    real = None if given is None else torch.tensor(given, dtype=torch.bool)[:, :seen]
    made = FUNCTIONS[function](no_padding(3))
    mask = model_mask(3, mask_function=made, attention_mask=real, **CALLS[call]).mask
    assert mask.kinds <= STRUCTURE or (function == "bidirectional-window-2" and "static" in call)


def test_limits_that_hide_nothing_are_omitted() -> None:
    """A decoding step without padding attends to all keys that are there: no mask at all."""
    causal = masking_utils.causal_mask_function
    real = torch.ones(2, 9, dtype=torch.bool)
    assert model_mask(2, 1, 9, 8, mask_function=causal, attention_mask=real).mask.is_full
    assert model_mask(2, 9, 9, mask_function=causal, attention_mask=real).mask.kinds == {"causal"}
    window = masking_utils.sliding_window_causal_mask_function(9)
    assert model_mask(2, 9, 9, mask_function=window).mask.kinds == {"causal"}
    assert model_mask(2, 9, 9, mask_function=chunked(9)(no_padding(2))).mask.kinds == {"causal"}
    assert model_mask(2, 4, 9, mask_function=masking_utils.bidirectional_mask_function).mask.is_full


def test_a_long_mask_costs_memory_in_proportion_to_its_length() -> None:
    """A dense mask of these sizes would hold 10^12 entries."""
    length = 1_000_000
    real = torch.ones(1, length, dtype=torch.bool)
    real[:, :10] = False
    fn = masking_utils.sliding_window_causal_mask_function(4096)
    mask = model_mask(1, length, length, mask_function=fn, attention_mask=real).mask
    assert mask.intervals(length, length)[0, -1].tolist() == [length - 4096, length]


IDS = {"one-row": [[0, 0, 0, 1, 2, 2, 2, 2, 2]], "two-rows": [[0, 0, 0, 1, 2, 2, 2, 2, 2], [0] * 5 + [1] * 4]}


@pytest.mark.parametrize("function", [name for name in FUNCTIONS if not name.startswith("bidirectional")])
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_packed_documents_stay_structure(function: str, ids: list[list[int]]) -> None:
    """From position_ids that begin again; a first document may begin late, and chunks count from its first position
    0."""
    document = torch.tensor(ids)
    positions = torch.stack([torch.cat([torch.arange(int(n)) for n in row.bincount()]) for row in document])
    positions[:, :3] += 2
    made = masking_utils.packed_sequence_compatibility_function(
        FUNCTIONS[function](no_padding(len(ids))), positions, masking_utils.find_packed_sequence_indices(positions)
    )
    expected = masking_utils.sdpa_mask(len(ids), 9, 9, mask_function=made, allow_is_causal_skip=False)
    found = model_mask(len(ids), 9, 9, mask_function=made)
    assert torch.equal(found.to_dense(), expected)
    assert found.mask.kinds <= STRUCTURE
    assert ("documents" in found.mask.kinds) == (len(ids) == 1)


@pytest.mark.parametrize("swapped", [False, True])
def test_packed_documents_among_other_conditions(swapped: bool) -> None:
    """Padding is a mask of keys; chunks that do not begin with the documents, and other documents, are evaluated as
    functions."""
    positions, others = (torch.tensor([row]) for row in ([0, 1, 2, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 0, 1, 2, 3]))

    def packed(at: Tensor) -> Any:
        ids = masking_utils.find_packed_sequence_indices(at)
        return masking_utils.packed_sequence_compatibility_function(masking_utils.causal_mask_function, at, ids)

    real = torch.tensor([[True] * 4 + [False] + [True] * 4])
    beside = {
        "padding": masking_utils.padding_mask_function(real),
        "chunks": masking_utils.chunked_overlay(2, no_padding(1)),
        "documents": packed(others),
        "window": masking_utils.sliding_window_overlay(2),
    }
    for other in beside.values():
        both = (other, packed(positions)) if swapped else (packed(positions), other)
        made = masking_utils.and_masks(*both)
        expected = masking_utils.sdpa_mask(1, 9, 9, mask_function=made, allow_is_causal_skip=False)
        assert torch.equal(model_mask(1, 9, 9, mask_function=made).to_dense(), expected)


def test_unknown_functions_are_evaluated_pair_by_pair() -> None:
    """Image tokens that see each other: a union. The rest of an intersection keeps its structure."""
    blocks = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1]] * 2)
    causal = masking_utils.causal_mask_function
    union = masking_utils.or_masks(causal, masking_utils.blockwise_overlay(blocks))
    both = masking_utils.and_masks(union, masking_utils.sliding_window_overlay(4))
    for made, kinds in ((union, {"predicate"}), (both, {"predicate", "window"})):
        for real in (None, torch.tensor([[True] * 9, [False] * 2 + [True] * 7])):
            options = {"batch_size": 2, "q_length": 4, "kv_length": 9, "q_offset": 5, "mask_function": made}
            found = model_mask(**options, attention_mask=real)
            expected = masking_utils.sdpa_mask(**options, attention_mask=real, allow_is_causal_skip=False)
            assert torch.equal(found.to_dense(), expected)
            assert found.mask.kinds >= kinds


def test_functions_of_single_positions_are_vmapped() -> None:
    """Functions added by a user may be written for single positions, and may index tables."""
    table = torch.tensor([0, 0, 1, 1, 0, 2, 2, 0, 1])

    def mine(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (table[q] == table[k]) & (q >= 0)

    made = masking_utils.and_masks(masking_utils.causal_mask_function, mine)
    options = {"batch_size": 2, "q_length": 4, "kv_length": 9, "q_offset": 5, "mask_function": made, "use_vmap": True}
    found = model_mask(**options)
    assert torch.equal(found.to_dense(), masking_utils.sdpa_mask(**options, allow_is_causal_skip=False))


def test_a_closure_that_changes_its_meaning_is_no_longer_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version of transformers may count a window differently: then the function itself is evaluated."""

    def sliding_window_overlay(sliding_window: int) -> Callable[..., Tensor]:
        def inner_mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return k >= q - sliding_window  # one more than today

        return inner_mask

    monkeypatch.setattr(masking_utils, "sliding_window_overlay", sliding_window_overlay)
    monkeypatch.setattr(_patterns, "_readers", {})
    monkeypatch.delattr(masking_utils, "chunked_overlay")
    _patterns.learn(masking_utils)
    assert _patterns.read(masking_utils.causal_mask_function).right == 0
    assert _patterns.read(sliding_window_overlay(3)).rest
    mask = model_mask(1, 9, 9, mask_function=sliding_window_overlay(3))
    assert "predicate" in mask.mask.kinds
    assert mask.to_dense()[0, 0].sum().item() == 9 * 9 - 5 * 6 // 2


def test_windows_of_nothing_and_masks_without_a_function() -> None:
    nothing = masking_utils.sliding_window_causal_mask_function(0)
    assert not model_mask(1, 3, 3, mask_function=nothing).to_dense().any()
    assert model_mask(1, 3, 3).mask.is_full


def test_an_existing_mask_is_returned() -> None:
    """``generate`` with a static cache creates the masks before the model, which then passes them again."""
    mask = model_mask(2, 1, 12, 8, mask_function=masking_utils.causal_mask_function)
    assert model_mask(2, 1, 1, attention_mask=mask) is mask
    assert mask.contiguous() is mask
    assert (mask.ndim, mask.shape) == (4, (2, 1, 1, 12))
    assert repr(mask) == "<ModelMask [2, 1, 1, 12]: lengths(kv=[9, 9])>"


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
        lambda mask: mask.contiguous().detach(),
    ],
    ids=["whole-slice", "whole", "device", "device-not-blocking", "dtype", "memory"],
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
    """A 4-D tensor passes through transformers unchanged; one for a whole static cache is sliced."""
    q, k = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 5, 4)
    mask = torch.rand(2, 1, 3, 8) > 0.3
    mask[..., 0] = True
    given = torch.zeros(2, 1, 3, 8).masked_fill(~mask, torch.finfo(torch.float32).min) if numbers else mask
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=given[..., :5]).transpose(1, 2)
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


def test_documents_in_chunks_from_cumulative_lengths() -> None:
    cu = torch.tensor([0, 3, 9], dtype=torch.int32)
    mask = model_mask(1, 9, 9, mask_function=chunked(2)(no_padding(1)))
    found = within_documents(mask, cu, cu, None, None).to_dense(1, 1, 9, 9)[0, 0]
    position = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4, 5])
    document = torch.tensor([0] * 3 + [1] * 6)
    same = (document[:, None] == document) & (position[:, None] // 2 == position // 2)
    assert torch.equal(found, same & torch.ones(9, 9, dtype=torch.bool).tril())
