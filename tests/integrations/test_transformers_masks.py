"""Masks of transformers: the same pairs as the library's dense mask, with structure if it is known."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from undivided.errors import InputError
from undivided.integrations.transformers import _masks, _patterns, model_mask, register

masking_utils = pytest.importorskip("transformers.masking_utils", reason="the transformers library is not installed")
from transformers import LlamaConfig  # noqa: E402

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


def packed(within: Any, positions: Tensor, ids_first: bool = True) -> Any:
    """Documents as transformers builds them: with the ids first before 5.24, and last from then on."""
    ids = masking_utils.packed_sequence_mask_function(masking_utils.find_packed_sequence_indices(positions))
    remapped = masking_utils.remap_positions_for_packed_sequence(within, positions)
    return masking_utils.and_masks(*((ids, remapped) if ids_first else (remapped, ids)))


@pytest.mark.parametrize("ids_first", [True, False])
@pytest.mark.parametrize("function", [name for name in FUNCTIONS if not name.startswith("bidirectional")])
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_packed_documents_stay_structure(function: str, ids: list[list[int]], ids_first: bool) -> None:
    """From position_ids that begin again; a first document may begin late, and chunks count from its first position
    0."""
    document = torch.tensor(ids)
    positions = torch.stack([torch.cat([torch.arange(int(n)) for n in row.bincount()]) for row in document])
    positions[:, :3] += 2
    made = packed(FUNCTIONS[function](no_padding(len(ids))), positions, ids_first)
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
    causal = masking_utils.causal_mask_function
    real = torch.tensor([[True] * 4 + [False] + [True] * 4])
    beside = {
        "padding": masking_utils.padding_mask_function(real),
        "chunks": masking_utils.chunked_overlay(2, no_padding(1)),
        "documents": packed(causal, others),
        "window": masking_utils.sliding_window_overlay(2),
    }
    for other in beside.values():
        both = (other, packed(causal, positions)) if swapped else (packed(causal, positions), other)
        made = masking_utils.and_masks(*both)
        expected = masking_utils.sdpa_mask(1, 9, 9, mask_function=made, allow_is_causal_skip=False)
        assert torch.equal(model_mask(1, 9, 9, mask_function=made).to_dense(), expected)


def from_transformers(config: Any, positions: Tensor, **options: Any) -> Any:
    """The causal mask that transformers builds for a model with this configuration, without a cache."""
    return masking_utils.create_causal_mask(config, torch.zeros(*positions.shape, 8), None, None, positions, **options)


def test_the_packed_documents_of_a_model_stay_structure() -> None:
    """In whatever order the installed version of transformers combines the functions."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])
    ours, eager = (LlamaConfig(attn_implementation=name) for name in ("undivided", "sdpa"))
    found = from_transformers(ours, positions)
    assert found.mask.kinds == {"causal", "documents"} or found.mask.kinds == {"window", "documents"}
    assert torch.equal(found.to_dense(), from_transformers(eager, positions))
    blocks = {"block_sequence_ids": torch.tensor([[-1, 0, 0, 0, 0, -1, 1, 1, -1]])}  # images, one in two documents
    found = from_transformers(ours, positions, **blocks)
    assert torch.equal(found.to_dense(), from_transformers(eager, positions, **blocks))


IDS_ALONE = {
    "ascending": ([[0, 0, 0, 1, 2, 2, 2, 2, 2]], True),
    "rows": ([[0, 0, 0, 1, 2, 2, 2, 2, 2], [4] * 5 + [7] * 4], True),
    "in-parts": ([[0, 0, 1, 1, 0, 0, 2, 2, 2]], False),
    "negative": ([[-1, -1, 0, 0, 0, 0, 2, 2, 2]], False),
}


@pytest.mark.parametrize(("ids", "is_known"), IDS_ALONE.values(), ids=IDS_ALONE)
def test_ids_of_documents_beside_other_functions(ids: list[list[int]], is_known: bool) -> None:
    """Documents limit an unknown function to their own pairs, and bands and chunks count the tokens of the row."""
    documents = masking_utils.packed_sequence_mask_function(torch.tensor(ids))
    blocks = masking_utils.blockwise_overlay(torch.tensor([[-1, 0, 0, 0, 0, -1, 1, 1, -1]] * len(ids)))
    union = masking_utils.or_masks(masking_utils.causal_mask_function, blocks)
    others = {name: make(no_padding(len(ids))) for name, make in FUNCTIONS.items()} | {"union": union}
    for name, other in others.items():
        made = masking_utils.and_masks(other, documents)
        found = model_mask(len(ids), 9, 9, mask_function=made)
        expected = masking_utils.sdpa_mask(len(ids), 9, 9, mask_function=made, allow_is_causal_skip=False)
        assert torch.equal(found.to_dense(), expected), name
        assert bool(found.mask.kinds & {"documents", "document_ids"}) == is_known, name


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


@pytest.mark.parametrize(
    "removed", ["chunked_overlay", "packed_sequence_mask_function", "padding_mask_function", "sliding_window_overlay"]
)
def test_a_function_that_is_removed_costs_the_structure_of_its_own_masks_only(
    monkeypatch: pytest.MonkeyPatch, removed: str
) -> None:
    """Transformers 5.24 removed a function; all intersections must not become unknown with it."""
    made = {"window": masking_utils.sliding_window_causal_mask_function(3), "chunks": chunked(3)(no_padding(1))}
    made |= {"documents": packed(masking_utils.causal_mask_function, torch.tensor([[0, 1, 2, 0, 1, 2, 3]]))}
    monkeypatch.setattr(_patterns, "_readers", {})
    monkeypatch.delattr(masking_utils, removed)
    _patterns.learn(masking_utils)
    unknown = {name for name, fn in made.items() if _patterns.read(fn).rest}
    expected = {"chunked_overlay": {"chunks"}, "packed_sequence_mask_function": {"documents"}}
    assert unknown == expected.get(removed, {"window"} if removed == "sliding_window_overlay" else set())


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


def test_a_long_mask_without_known_structure_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time and memory in proportion to all pairs would otherwise be noticed late, or never."""
    monkeypatch.setattr(_masks, "_reported", set())

    def every_other_key(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q + k) % 2 == 0

    made = masking_utils.and_masks(masking_utils.causal_mask_function, every_other_key)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model_mask(1, 2048, 2048, mask_function=masking_utils.causal_mask_function)
        model_mask(1, 1, 2048, mask_function=made)
    with pytest.warns(RuntimeWarning, match=r"every_other_key is unknown: .* here 2048 x 4096; causal masks"):
        model_mask(1, 2048, 4096, mask_function=made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model_mask(1, 2048, 4096, mask_function=made)


@pytest.mark.parametrize("padding", [0, 1, 2, 3])
@pytest.mark.parametrize(("q_len", "offset"), [(4, 0), (1, 3), (2, 2)])
def test_chunks_that_start_late_are_dropped_only_if_padding_hides_what_is_before_them(
    padding: int, q_len: int, offset: int
) -> None:
    """They were dropped if one chunk is as long as the text."""
    function = masking_utils.chunked_overlay(4, torch.tensor([2]))
    real = torch.arange(4)[None] >= padding
    mask = model_mask(1, q_len, 4, q_offset=offset, mask_function=function, attention_mask=real)
    queries, keys = torch.arange(q_len)[:, None] + offset, torch.arange(4)
    zero = torch.zeros((), dtype=torch.long)
    expected = function(zero, zero, queries, keys) & real
    rows = queries[:, 0] >= padding  # others are padding themselves
    assert torch.equal(mask.to_dense()[0, 0][rows], expected[rows])
    assert ("chunks" in mask.mask.kinds) == (padding < 2)


def test_a_padding_mask_of_other_rows_than_the_text_is_refused() -> None:
    """One row with a hole was used for every row."""
    for rows in (1, 3):
        real = torch.tensor([[1, 1, 0, 1, 1]]).repeat(rows, 1)
        with pytest.raises(InputError, match=f"attention_mask must have a row for each of the 2 .*got {rows} rows"):
            model_mask(2, 5, 5, mask_function=masking_utils.causal_mask_function, attention_mask=real)
        assert model_mask(2, 5, 5, attention_mask=torch.ones_like(real)).shape[0] == 2
