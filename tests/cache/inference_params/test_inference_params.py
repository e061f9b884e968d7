"""`InferenceParams`: sequences start, grow by any number of tokens, fork and end, in all layers at once."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from itertools import accumulate

import pytest
import torch
from inference_steps import DIM, KV_HEADS, Model, new_params, new_tokens
from token_lists import joined
from torch import Tensor

from undivided import InferenceParams, InputError, masks
from undivided.cache._batch import Batch
from undivided.masks.normal_form import ranges

FORMATS = ("bshd", "sbhd", "thd")


def pages_needed(params: InferenceParams, new: dict[object, int]) -> int:
    """Pages in use after a step, counted anew: those held, those that lengths add, those copied because they are
    shared."""
    if not params.is_paged:
        return 0
    lengths = {name: params.sequences.get(name, 0) for name in new}
    tables = {n: params._batch.ledger.tables[params._batch.slots[n]] for n in new if n in params._batch.slots}
    added = sum(-(-(lengths[name] + count) // 4) - -(-lengths[name] // 4) for name, count in new.items())
    open_pages = {name: table[-1] for name, table in tables.items() if lengths[name] % 4}
    holders = Counter(page for table in tables.values() for page in set(table))
    writers = Counter(page for name, page in open_pages.items() if new[name])
    copied = sum(min(count, holders[page] - 1) for page, count in writers.items())
    return len(holders) + added + copied


@pytest.mark.parametrize("mask", [None, masks.window(3, 0)], ids=["causal", "window"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_any_traffic_equals_one_pass_per_sequence(paged: bool, format: str, mask: masks.Mask | None) -> None:
    """Sequences start and end, in any order of the batch, with 0 to 6 tokens per step; some are forked or truncated."""
    chance = random.Random(f"{paged} {format}")
    model = Model(new_params(paged, format), mask)
    params, fresh, refused = model.params, iter(range(1000)), 0
    for _ in range(40):
        names = [name for name in model.seen if chance.random() < 0.8]
        names += [next(fresh) for _ in range(chance.randint(0 if names else 1, 3 - len(names)))]
        chance.shuffle(names)
        new = {name: min(chance.randint(0, 6), 20 - params.sequences.get(name, 0)) for name in names}
        if pages_needed(params, new) <= 11:
            model.step(new)
        else:
            refused += 1
            with pytest.raises(InputError, match=r"step_dict must fit into the \d+ free pages of 11"):
                params.pre_step(new)
            model.step(dict.fromkeys(list(model.seen)[:1], 0) or {next(fresh): 1})
        name = chance.choice(list(model.seen))
        if chance.random() < 0.3 and len(model.seen) < 3:
            other = next(fresh)
            params.fork(name, other)
            model.seen[other] = [list(layer) for layer in model.seen[name]]
        elif chance.random() < 0.3:
            length = chance.randint(0, params.sequences[name])
            params.truncate(name, length)
            model.seen[name] = [[t[:length] for t in layer] for layer in model.seen[name]]
    assert refused > 0 or not paged
    params.pre_step({})
    assert not paged or len(params._batch.ledger.unused[0]) == 11


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_the_loop_of_transformer_engine(paged: bool) -> None:
    """Prompts, then one token per step, while sequences end and new ones start, as in the documentation."""
    model = Model(new_params(paged, total_num_pages=15 if paged else None))
    for new in ({0: 5, 1: 3}, {0: 1, 1: 1}, {0: 1, 1: 1, 2: 4}, {0: 1, 2: 1}, {2: 1, 3: 9}):
        model.step(dict(new))
    params = model.params
    assert params.batch_size == 2
    assert params.sequences == OrderedDict({2: 6, 3: 9})
    assert params.sequences_pre_step == OrderedDict({2: 5, 3: 0})
    assert params.get_seqlens_pre_step().tolist() == [5, 0, 0]
    assert params.cu_seqlens_q.tolist() == [0, 1, 10, 10]
    assert params.cu_seqlens_kv.tolist() == [0, 6, 15, 15]
    assert params.cu_seqlens_q.dtype == torch.int32
    params.reset()
    assert params.sequences == {}
    assert params.cu_seqlens_kv.tolist() == [0, 0, 0, 0]
    model.seen.clear()
    model.step({"again": 20})


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_step_returns_the_whole_cache(paged: bool, format: str) -> None:
    """The results of TransformerEngine's `step`, in the order of the batch, for custom attention."""
    params = new_params(paged, format)
    held: dict[object, list[Tensor]] = {name: new_tokens(0) for name in "abc"}
    for new in (OrderedDict(a=5, b=3), OrderedDict(c=2, b=6)):
        tokens = {name: new_tokens(count) for name, count in new.items()}
        for name, brought in tokens.items():
            held[name] = [torch.cat(pair) for pair in zip(held[name], brought, strict=True)]
        params.pre_step(new)
        k, v = (joined([t[n] for t in tokens.values()], format) for n in (1, 2))
        for _ in range(2):  # a second call, as under recomputation, changes nothing
            k_cache, v_cache, cu_q, cu_kv, longest, output = params.step(1, k, v, format)
        assert torch.equal(cu_q, params.cu_seqlens_q)
        assert cu_kv.tolist() == [0, *accumulate(params.sequences.values()), cu_kv[-1]]
        assert (longest, output) == (20, {"bshd": "bshd"}.get(format, f"{format}_2bshd"))
        assert tuple(k_cache.shape) == ((11, 4, KV_HEADS, DIM) if paged else (2, 20, KV_HEADS, DIM))
        if paged:
            k_cache, v_cache = (pool[params.page_table.long()].flatten(1, 2) for pool in (k_cache, v_cache))
            for cache, copy in zip((k_cache, v_cache), params.convert_paged_to_nonpaged(1), strict=True):
                torch.testing.assert_close(cache, copy, equal_nan=True)
        for row, name in enumerate(new):
            assert torch.equal(k_cache[row, : len(held[name][1])], held[name][1])
            assert torch.equal(v_cache[row, : len(held[name][2])], held[name][2])


def test_layers_share_the_mask_and_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer computes what all layers need, also in inference mode."""
    built = []
    build = ranges.build
    monkeypatch.setattr(ranges, "build", lambda *arguments: built.append(1) or build(*arguments))
    params, tokens = new_params(True), [new_tokens(7), new_tokens(1)]
    q, k, v = (joined([t[n] for t in tokens], "bshd") for n in range(3))
    with torch.inference_mode():
        params.pre_step({"a": 7, "b": 1})
        for layer in range(5):
            params.attend(layer, q, k, v)
    assert len(built) == 1
    assert params.page_table.tolist() == [[0, 1], [2, 0]]


def test_prompts_share_their_pages() -> None:
    """Twenty tokens of a common prompt of three sequences are stored once."""
    model = Model(new_params(True, max_sequence_length=40))
    model.step({"prompt": 18})
    for name in ("a", "b"):
        model.params.fork("prompt", name)
        model.seen[name] = [list(layer) for layer in model.seen["prompt"]]
    assert len(model.params._batch.ledger.unused[0]) == 11 - 5
    model.step({"a": 3, "b": 1})  # the prompt itself has ended
    assert len(model.params._batch.ledger.unused[0]) == 11 - 4 - 3


def matched(model: Model, prompt: list[int], name: object, source: object) -> int:
    """Start a sequence with the indexed pages of a prompt, whose tokens are those of `source`."""
    known = model.params.match(prompt, name)
    if known:
        model.seen[name] = [[t[:known] for t in layer] for layer in model.seen[source]]
    return known


def test_a_prompt_that_begins_as_another_is_computed_from_there() -> None:
    model, prompt = Model(new_params(True)), list(range(11))
    assert matched(model, prompt, "a", "a") == 0
    model.step({"a": 11})
    model.params.remember(prompt, "a")
    assert matched(model, [*range(9), 77, 78], "b", "a") == 8
    model.step({"a": 1, "b": 3})
    assert model.params.page_table[0, :2].tolist() == model.params.page_table[1, :2].tolist()
    assert dict(model.params.sequences) == {"a": 12, "b": 11}
    assert matched(model, prompt[:8], "c", "a") == 4  # the last token of a prompt is always computed
    model.step({"c": 4, "a": 1})


def test_pages_of_a_prompt_outlive_their_sequence_until_they_are_needed() -> None:
    model, prompts = Model(new_params(True)), [list(range(16)), list(range(50, 66))]
    for name, prompt in zip("ab", prompts, strict=True):
        model.step({name: 16})
        model.params.remember(prompt, name)
    model.step({"b": 0, "c": 20})  # "c" needs 5 pages of 11, so the last 2 of "a" are given up
    model.step({"b": 0})
    seen = model.seen["b"]
    model.params.pre_step({})
    model.seen = {"b": seen}
    assert matched(model, [*prompts[1], 0], "d", "b") == 16
    model.step({"d": 1})
    assert model.params.match([*prompts[0], 0], "e") == 8
    model.params.reset()
    assert model.params.match([*prompts[1], 0], "d") == 0


def test_memory_is_allocated_on_the_device_of_the_first_keys() -> None:
    params = InferenceParams(2, 8, KV_HEADS, DIM, torch.float32)
    params.allocate_memory(1)
    assert params.has_memory(1)
    assert not params.has_memory(2)
    params.pre_step({0: 2})
    k = torch.randn(1, 2, KV_HEADS, DIM)
    params.step(1, k, k)
    params.step(2, k, k)
    assert params.has_memory(2)
    assert params.device == torch.device("cpu")


def test_changes_between_two_steps_do_not_read_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    params = InferenceParams(20, 64, 1, 8, torch.float32, is_paged=True, page_size=4)
    params.pre_step(dict.fromkeys(range(20), 5))
    reads: list[Batch] = []
    read = Batch.sequences.fget
    assert read is not None
    monkeypatch.setattr(Batch, "sequences", property(lambda batch: reads.append(batch) or read(batch)))
    before = params.sequences
    for name in range(10):
        params.truncate(name, 3)
        params.free(name + 10)
    assert not reads
    assert before == dict.fromkeys(range(20), 5)
    assert params.sequences == dict.fromkeys(range(10), 3)
    assert params.sequences is params.sequences
    assert len(reads) == 1
    assert not params.cu_seqlens_q.any()
