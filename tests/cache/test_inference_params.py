"""`InferenceParams`: sequences start, grow by any number of tokens, fork and end, in all layers at once."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from token_lists import POISON, joined, parted
from torch import Tensor

import undivided
from undivided import InferenceParams, InputError, masks
from undivided.cache._batch import Batch
from undivided.masks.normal_form import ranges

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 5
FORMATS = ("bshd", "sbhd", "thd")
LAYERS = (1, 2)


def new_params(paged: bool, format: str = "bshd", **changes: Any) -> InferenceParams:
    """Room for 3 sequences of 20 tokens, filled with NaN; if paged, 11 pages of 4 tokens, too few for all at once."""
    pool = {"is_paged": True, "page_size": 4, "total_num_pages": 11} if paged else {}
    sizes: dict[str, Any] = {"dtype": torch.float32, "head_dim_v": VALUE_DIM, "qkv_format": format, "device": "cpu"}
    lengths = {"max_batch_size": 3, "max_sequence_length": 20}
    params = InferenceParams(num_heads_kv=KV_HEADS, head_dim_k=DIM, **lengths | pool | sizes | changes)
    for layer in LAYERS:
        params.allocate_memory(layer)
        for pool_of_layer in (params._storages[layer].k, params._storages[layer].v):
            pool_of_layer.fill_(POISON)
    return params


def new_tokens(count: int) -> list[Tensor]:
    """[q, k, v] of some tokens, [n, H, D]."""
    return [torch.randn(count, h, d) for h, d in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))]


def in_one_pass(tokens: list[Tensor], mask: masks.Mask | None = None) -> Tensor:
    q, k, v = (t[None] for t in tokens)
    return undivided.attention(
        q, k, v, layout="bshd", mask=masks.causal() if mask is None else mask, backend="reference"
    )[0]


class Model:
    """Two layers of attention, and all tokens of each sequence as plain tensors."""

    def __init__(self, params: InferenceParams, mask: masks.Mask | None = None) -> None:
        self.params, self.mask = params, mask
        self.seen: dict[object, list[list[Tensor]]] = {}

    def step(self, new: dict[object, int]) -> None:
        """One iteration, compared with one pass over all tokens."""
        self.params.pre_step(OrderedDict(new))
        for name in set(self.seen) - set(new):
            del self.seen[name]
        for layer in LAYERS:
            tokens = {name: new_tokens(count) for name, count in new.items()}
            q, k, v = (joined([t[n] for t in tokens.values()], self.params.qkv_format) for n in range(3))
            out = self.params.attend(layer, q, k, v, mask=self.mask)
            assert isinstance(out, Tensor)
            found = parted(out, self.params.qkv_format, list(new.values()))
            for (name, brought), got in zip(tokens.items(), found, strict=True):
                layers = self.seen.setdefault(name, [new_tokens(0) for _ in LAYERS])
                layers[layer - 1] = [torch.cat(pair) for pair in zip(layers[layer - 1], brought, strict=True)]
                want = in_one_pass(layers[layer - 1], self.mask)
                torch.testing.assert_close(got, want[len(want) - len(got) :])
        assert self.params.sequences == OrderedDict((n, len(self.seen[n][0][0])) for n in new)


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


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_prompts_that_are_refused(paged: bool) -> None:
    model = Model(new_params(paged))
    model.step({"a": 3, "b": 3, "c": 0})
    before = state(model.params)
    cases = [
        (lambda: model.params.match([1, 2], "a"), "seq_id must not be the id of a sequence in the batch"),
        (lambda: model.params.match([1, 2], "d"), "seq_id must be one of at most max_batch_size=3"),
        (lambda: model.params.remember([1, 2], "d"), "seq_id must be the id of a sequence"),
        (lambda: model.params.remember([1] * 4, "a"), "tokens must be at most the 3 cached tokens of 'a'"),
        (lambda: model.params.match("ab", "e"), "tokens must be a list of ints"),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message if paged or "list" in message else "is_paged must be True"):
            call()
        assert state(model.params) == before
    model.step({"b": 1, "a": 4})


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


def state(params: InferenceParams) -> tuple[object, ...]:
    storages = [t.nan_to_num(1e9).tolist() for s in params._storages.values() for t in (s.k, s.v)]
    ledger = params._batch.ledger
    pages = (
        (list(ledger.unused[0]), list(ledger.references), [list(t) for t in ledger.tables]) if params.is_paged else ()
    )
    return params.sequences, params.batch_size, dict(params._batch.slots), ledger.lengths, pages, storages


K, V, Q = (torch.randn(2, 3, KV_HEADS, DIM), torch.randn(2, 3, KV_HEADS, VALUE_DIM), torch.randn(2, 3, HEADS, DIM))
REFUSED: dict[str, tuple[Callable[[InferenceParams], object], str]] = {
    "too-many-sequences": (
        lambda p: p.pre_step(dict.fromkeys(range(4), 1)),
        "step_dict must hold at most max_batch_size=3",
    ),
    "too-long": (
        lambda p: p.pre_step({"a": 1, "b": 19}),
        r"step_dict\['b'\] must leave the sequence within max_sequence_l",
    ),
    "negative": (lambda p: p.pre_step({"a": -1}), r"step_dict\['a'\] must be at least 0"),
    "ids-that-are-tensors": (
        lambda p: p.pre_step(dict.fromkeys(torch.tensor([0, 1]), 1)),
        r"step_dict must have ids that equal those of the next step(.|\n)*seq_ids\.tolist\(\)",
    ),
    "not-a-mapping": (lambda p: p.pre_step([1, 1]), "step_dict must map the id of each sequence"),
    "k-of-another-batch": (lambda p: p.attend(1, Q, K[:1], V[:1]), r"new_k must have shape \[2, new, 2, 8\] in 'bshd'"),
    "k-too-short": (
        lambda p: p.step(1, K[:, :1], V[:, :1]),
        r"new_k must have the 2 tokens per sequence that pre_step announced, got 1",
    ),
    "q-unlike-k": (lambda p: p.attend(1, Q[:, :2], K, V), r"q must have the tokens of new_k \(3\), got 2"),
    "q-of-another-batch": (lambda p: p.attend(1, Q[:1], K, V), "q must have the batch size of the cache"),
    "another-dtype": (lambda p: p.step(1, K.double(), V.double()), "new_k must have the dtype of the cache"),
    "a-format-that-is-none": (lambda p: p.step(1, K, V, "bhsd"), "qkv_format must be one of(.|\n)*x.transpose"),
    "packed-tokens-too-many": (lambda p: p.step(1, K[0, :2], V[0, :2], "thd"), "new_k must have the 3 tokens that"),
    "k-of-other-heads": (
        lambda p: p.step(1, Q[:, :, :3], V),
        r"new_k must have shape(.|\n)*HINT: num_heads_kv=3 at the construction of InferenceParams",
    ),
    "fork-of-nobody": (lambda p: p.fork("z", "y"), "src must be the id of a sequence(.|\n)*the batch has 'a', 'b'"),
    "fork-onto-somebody": (lambda p: p.fork("a", "b"), "dst must not be the id of a sequence"),
    "fork-of-a-list": (lambda p: p.fork(["a"], "z"), r"src must be hashable, got \['a'\]"),
    "fork-onto-a-list": (lambda p: p.fork("a", ["z"]), r"dst must be hashable, got \['z'\]"),
    "truncate-nobody": (lambda p: p.truncate("z", 0), "seq_id must be the id"),
    "truncate-up": (lambda p: p.truncate("a", 6), "length must be at most the 4 cached tokens of 'a'"),
    "no-such-layer": (lambda p: p.convert_paged_to_nonpaged(7), "layer_number must be that of a layer with a cache"),
    "layer-no-number": (lambda p: p.step("first", K, V), "layer_number must be an int"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_refused_and_nothing_changed(paged: bool, case: str) -> None:
    model = Model(new_params(paged))
    model.step({"a": 3, "b": 3})
    model.step({"a": 1, "b": 2})
    before = state(model.params)
    call, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        call(model.params)
    assert state(model.params) == before
    model.step({"b": 1, "a": 4})  # the cache still works


def test_no_pages_and_nothing_changed() -> None:
    """Half of the batch fits, and one sequence ends: still all or nothing."""
    model = Model(new_params(True, max_sequence_length=100))
    model.step({"a": 10, "b": 10, "c": 10})
    before = state(model.params)
    with pytest.raises(InputError, match="step_dict must fit into the 5 free pages of 11") as refusal:
        model.params.pre_step({"d": 3, "a": 1, "b": 40})
    assert "total_num_pages" in str(refusal.value)
    assert state(model.params) == before
    model.step({"a": 1, "b": 2, "c": 0})


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


def test_a_full_batch_cannot_fork() -> None:
    params = new_params(False)
    params.pre_step(dict.fromkeys("abc", 1))
    with pytest.raises(InputError, match="dst must be one of at most max_batch_size=3"):
        params.fork("a", "d")


@pytest.mark.parametrize("call", [lambda p: p.attend(1, Q, K, V), lambda p: p.step(1, K, V)], ids=["attend", "step"])
@pytest.mark.parametrize("after", ["construction", "fork", "truncate", "an-empty-step"])
def test_a_layer_before_its_step(after: str, call: Callable[[InferenceParams], object]) -> None:
    """A fork or a truncation invalidates the last step: `pre_step` is required again."""
    params = new_params(False)
    if after != "construction":
        params.pre_step({"a": 3, "b": 3})
        {
            "fork": lambda: params.fork("a", "c"),
            "truncate": lambda: params.truncate("a", 1),
            "an-empty-step": lambda: params.pre_step({}),
        }[after]()
    with pytest.raises(InputError, match="inference_params must have a step"):
        call(params)


SIZES: dict[str, Any] = {
    "max_batch_size": 3,
    "max_sequence_length": 20,
    "num_heads_kv": KV_HEADS,
    "head_dim_k": DIM,
    "dtype": torch.float32,
    "head_dim_v": None,
    "is_paged": True,
    "page_size": 4,
    "total_num_pages": 4,
    "max_ctx_len": None,
    "qkv_format": "thd",
    "custom_cache_manager": None,
}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_batch_size", 0),
        ("max_sequence_length", 1.5),
        ("num_heads_kv", None),
        ("head_dim_k", None),
        ("dtype", None),
        ("dtype", torch.int8),
        ("head_dim_v", 0),
        ("page_size", None),
        ("page_size", 0),
        ("total_num_pages", 0),
        ("max_ctx_len", 21),
        ("max_ctx_len", 0),
        ("qkv_format", "bhsd"),
        ("custom_cache_manager", object()),
    ],
)
def test_invalid_params_are_refused(argument: str, value: object) -> None:
    with pytest.raises(InputError, match=f"^{argument} must"):
        InferenceParams(**SIZES | {argument: value})
