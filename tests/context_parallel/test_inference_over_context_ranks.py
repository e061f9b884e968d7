"""Layers with a cache whose pages are spread over context ranks generate what one process does."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from token_lists import joined
from torch import Tensor

import undivided
from undivided import (
    DotProductAttention,
    InferenceParams,
    InputError,
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
    masks,
)
from undivided.context_parallel import RankError, simulate

HIDDEN, HEADS, GROUPS, SIZE = 32, 4, 2, 8
FREQS = RotaryPositionEmbedding(SIZE)(64)
STEPS = (  # new tokens by sequence, and whether ranks divide them
    ({"a": 13, "b": 5}, True),
    ({"a": 1, "b": 1}, False),
    ({"b": 3, "c": 9}, True),
    ({"c": 0, "b": 2}, True),
    ({"b": 1, "c": 1}, False),
)
STRATEGIES: dict[str, int | tuple[int, int]] = {"ring": 3, "all_to_all": 2, "ring+all_to_all": (2, 2)}


@functools.cache
def layers(format: str, window: tuple[int, int]) -> list[TransformerLayer]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "window_size": window}
    mask = "padding_causal" if format == "thd" else "causal"
    options |= {"num_gqa_groups": GROUPS, "attn_input_format": format, "self_attn_mask_type": mask}
    return [TransformerLayer(HIDDEN, 64, HEADS, layer_number=n, **options).eval() for n in (1, 2)]


class Model:
    """Two layers and their caches, in one process or on one rank of a context."""

    def __init__(self, format: str, window: tuple[int, int] = (-1, 0), cp: Any = None, **options: Any) -> None:
        self.layers = copy.deepcopy(layers(format, window))
        for layer in self.layers:
            if cp is not None:
                layer.set_context_parallel_group(cp)
        made = {"is_paged": True, "page_size": 4, "qkv_format": format, "context_parallel": cp, **options}
        self.params = InferenceParams(3, 64, GROUPS, SIZE, torch.float32, **made)
        self.draws, self.format = torch.Generator().manual_seed(1), format

    @torch.no_grad()
    def step(self, new: dict[str, int], sharded: bool = False) -> list[Tensor]:
        """The outputs for new tokens of each sequence; they do not depend on the format."""
        sharded = sharded and self.params.context_parallel is not None
        self.params.pre_step(OrderedDict(new), sharded=sharded)
        rows = [torch.randn(count, 1, HIDDEN, generator=self.draws) for count in new.values()]
        x = joined(rows, self.format).squeeze(-2).nan_to_num(7.0)
        x = self.params.shard(x) if sharded else x
        for layer in self.layers:
            x = layer(x, inference_params=self.params, rotary_pos_emb=FREQS)
        x = self.params.unshard(x) if sharded else x
        if self.format == "thd":
            return list(x.split(list(new.values())))
        x = x if self.format == "bshd" else x.transpose(0, 1)
        return [row[:count] for row, count in zip(x, new.values(), strict=True)]


def on_ranks(
    world: Any, run: Callable[[Model], list[Tensor]], *arguments: Any, strategy: str = "ring", **options: Any
) -> None:
    """Asserts that every rank gets what one process gets."""
    expected = run(Model(*arguments, **options))

    def rank(group: Any) -> list[Tensor]:
        context: Any = undivided.ContextParallel(group, strategy)  # type: ignore[arg-type]
        return run(Model(*arguments, cp=context, **options))

    for found in simulate(world, rank):
        for out, right in zip(found, expected, strict=True):
            torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)


def all_steps(model: Model) -> list[Tensor]:
    return [out for new, sharded in STEPS for out in model.step(new, sharded)]


@pytest.mark.parametrize("window", [(-1, 0), (5, 0)], ids=["causal", "window"])
@pytest.mark.parametrize("format", ["bshd", "sbhd", "thd"])
def test_prompts_over_ranks_and_tokens_equal_one_process(format: str, window: tuple[int, int]) -> None:
    on_ranks(3, all_steps, format, window)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies(strategy: str) -> None:
    """A strategy decides how a prompt is divided, and how many groups of ranks there are."""
    on_ranks(STRATEGIES[strategy], all_steps, "bshd", strategy=strategy)


@pytest.mark.parametrize("quantize", ["int8", "fp8_e4m3"])
def test_quantised_pages(quantize: str) -> None:
    on_ranks(2, all_steps, "thd", quantize=quantize)


def test_more_ranks_than_new_tokens() -> None:
    on_ranks(4, lambda model: model.step({"a": 2}, True) + model.step({"a": 3}, True), "bshd")


def between_steps(model: Model) -> list[Tensor]:
    """Everything that changes sequences between two steps."""
    params = model.params
    found = model.step({"a": 11}, True)
    params.remember(list(range(11)), "a")
    params.fork("a", "b")
    found += model.step({"a": 1, "b": 3})
    params.keep({"b": [0, 2]})
    found += model.step({"a": 4, "b": 1})
    params.truncate("a", 13)
    found += model.step({"a": 5, "b": 1}, True)
    params.free("a")
    assert params.match(list(range(11)), "c") == 8
    found += model.step({"b": 2, "c": 6}, True)
    return found


def test_forks_drafts_and_shared_prompts() -> None:
    on_ranks(3, between_steps, "bshd")
    on_ranks(2, between_steps, "thd", quantize="int8")


def streaming(model: Model) -> list[Tensor]:
    found = model.step({"a": 20}, True)
    for _ in range(30):
        model.params.evict(masks.window(5, 0))
        found += model.step({"a": 1})
    return found


def test_a_stream_holds_the_pages_of_its_window() -> None:
    """Three pages of one process; over two ranks two of each, of which the prompt needs three."""
    on_ranks(2, streaming, "bshd", (5, 0), total_num_pages=5)


def test_options_of_attention() -> None:
    def run(params: InferenceParams) -> list[Tensor]:
        found = []
        draws = torch.Generator().manual_seed(2)
        for count in (9, 2):
            params.pre_step({"a": count, "b": count - 1})
            q, k, v = (torch.randn(2, count, heads, SIZE, generator=draws) for heads in (HEADS, GROUPS, GROUPS))
            keys = max(params.sequences.values())
            bias = torch.randn(2, 1, count, keys, generator=draws)
            options: dict[str, Any] = {"bias": bias, "sinks": torch.ones(HEADS), "softcap": 5.0, "return_lse": True}
            options["alibi_slopes"] = undivided.alibi_slopes(HEADS)
            found += list(params.attend(1, q, k, v, mask=masks.window(6, 0), **options))
        return found

    made: dict[str, Any] = {"is_paged": True, "page_size": 4}
    expected = run(InferenceParams(2, 32, GROUPS, SIZE, torch.float32, **made))

    def rank(group: Any) -> list[Tensor]:
        context = undivided.ContextParallel(group)
        return run(InferenceParams(2, 32, GROUPS, SIZE, torch.float32, **made, context_parallel=context))

    for found in simulate(2, rank):
        for out, right in zip(found, expected, strict=True):
            torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("format", "world"), [("sbhd", 3), ("thd", 2), ("bshd", (2, 2))])
def test_a_sharded_step_returns_the_log_sum_exps_of_its_queries(format: str, world: Any) -> None:
    """Two axes of ranks merge the results in two steps."""
    draws = torch.Generator().manual_seed(3)
    tensors = [torch.randn(5, 2, heads, SIZE, generator=draws) for heads in (HEADS, GROUPS, GROUPS)]
    if format != "sbhd":
        tensors = [t.transpose(0, 1).contiguous() if format == "bshd" else t.flatten(0, 1) for t in tensors]
    made: dict[str, Any] = {"is_paged": True, "page_size": 2, "qkv_format": format}
    new = {"a": 5, "b": 5}

    def attend(params: InferenceParams, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        found = params.attend(1, *tensors, sinks=torch.ones(HEADS), return_lse=True)
        assert isinstance(found, tuple)
        return found

    params = InferenceParams(2, 32, GROUPS, SIZE, torch.float32, **made)
    params.pre_step(new)
    expected = attend(params, tensors)

    def rank(group: Any) -> tuple[Tensor, ...]:
        cp = undivided.ContextParallel(group, "ring" if isinstance(world, int) else "ring+all_to_all")
        params = InferenceParams(2, 32, GROUPS, SIZE, torch.float32, **made, context_parallel=cp)
        params.pre_step(new, sharded=True)
        out, lse = attend(params, [params.shard(t) for t in tensors])
        return params.unshard(out), cp.bind(params.sharded_length).unshard(lse.contiguous(), dim=-1)

    for found in simulate(world, rank):
        for out, right in zip(found, expected, strict=True):
            torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)


def test_the_default_number_of_pages_is_divided_over_the_ranks() -> None:
    def rank(group: Any) -> tuple[int, Any]:
        params = Model("bshd", cp=undivided.ContextParallel(group)).params
        params.pre_step(dict.fromkeys(range(3), 64))
        return params.total_num_pages, params._batch.paged_ledger("count").free_pages

    assert simulate(3, rank) == [(18, (0, 3, 3))] * 3  # 16 pages per sequence: 6, 5 and 5


def attempt(call: Callable[[Model, Any], Any], group: Any) -> str:
    context = undivided.ContextParallel(group)
    model = Model("bshd", cp=context, total_num_pages=2)
    model.step({"a": 6})
    before = dict(model.params.sequences), model.params._batch.paged_ledger("count").free_pages
    try:
        call(model, context)
    except (InputError, RankError) as error:
        if dict(model.params.sequences) == before[0]:
            assert model.params._batch.paged_ledger("count").free_pages == before[1]
        return str(error)
    return "no error"


def without_group(model: Model, context: Any) -> None:
    for layer in model.layers:
        layer.set_context_parallel_group(None)
    model.step({"a": 1})


def one_process_cache(model: Model, context: Any) -> None:
    model.params = InferenceParams(3, 64, GROUPS, SIZE, torch.float32)
    model.step({"a": 1})


def whole_tokens_in_a_sharded_step(model: Model, context: Any) -> None:
    model.params.pre_step({"a": 3}, sharded=True)
    model.layers[0](torch.randn(1, 3, HIDDEN), inference_params=model.params)


def different_tokens(model: Model, context: Any) -> None:
    model.step({"a": 1 + context.rank})


def different_sequences(model: Model, context: Any) -> None:
    """Lengths agree, but on one rank two sequences share a page."""
    if context.rank:
        model.params.pre_step({"a": 0, "b": 4})
        # as if the layers had run, for which ranks meet
        model.params._missing_tokens.called.update(model.params._storages)
    else:
        model.params.fork("a", "b")
        model.params.truncate("b", 4)
    model.step({"a": 1, "b": 1})


def different_paths(model: Model, context: Any) -> None:
    model.step({"a": 3})
    model.params.keep({"a": [0, 1 + context.rank]})


def bias_in_a_sharded_step(model: Model, context: Any) -> None:
    model.params.pre_step({"a": 2}, sharded=True)
    x = model.params.shard(torch.randn(1, 2, HIDDEN))
    bias = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, 1, 1, 8)}
    model.layers[0](x, inference_params=model.params, **bias)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (without_group, "inference_params must be a cache of one process for a layer without a context group"),
        (one_process_cache, "inference_params must have its pages on the 2 ranks of the layer's context group"),
        (lambda m, cp: m.step({"a": 20}), "step_dict must fit into the 1 free pages of 2 on rank 0 (page_size 4)"),
        (lambda m, cp: m.step({"a": 20}), "increase total_num_pages, the pages of each rank"),
        (whole_tokens_in_a_sharded_step, "of the step's 3 tokens at axis 1 in 'bshd'"),
        (whole_tokens_in_a_sharded_step, "HINT: inference_params.shard(hidden_states)"),
        (bias_in_a_sharded_step, "bias must be None in a sharded step"),
        (different_tokens, "be the same on every rank"),
        (different_sequences, "cache must be the same on every rank"),
        (different_paths, "indices must be the same on every rank"),
        (lambda m, cp: m.params.shard(torch.zeros(1, 1)), "inference_params must have a sharded step"),
        (lambda m, cp: m.params.pre_step({"a": 1}, sharded=1), "sharded must be True or False"),
        (lambda m, cp: m.params.step(1, torch.zeros(1), torch.zeros(1)), "context_parallel must be None for step()"),
        (lambda m, cp: m.params.convert_paged_to_nonpaged(1), "context_parallel must be None for a contiguous copy"),
        (lambda m, cp: m.params.attend(1, *[torch.zeros(1, 6, 4, 8)] * 3, dropout_p=0.1), "new_k must have shape"),
    ],
)
def test_wrong_calls_are_refused_on_every_rank(call: Callable[[Model, Any], Any], message: str) -> None:
    for text in simulate(2, functools.partial(attempt, call)):
        assert message in text, text


def test_wrong_caches_are_refused() -> None:
    made: dict[str, Any] = {"is_paged": True, "page_size": 4}
    with pytest.raises(InputError, match=r"context_parallel must be an undivided.* or None, got int"):
        InferenceParams(1, 8, 2, 8, torch.float32, **made, context_parallel=2)
    cp = undivided.ContextParallel(rank=0, world=2)
    with pytest.raises(InputError, match="have a group to attend with"):
        InferenceParams(1, 8, 2, 8, torch.float32, **made, context_parallel=cp)
    params = InferenceParams(1, 8, 2, 8, torch.float32, **made)
    with pytest.raises(InputError, match="sharded must be True or False, and False without context_parallel"):
        params.pre_step({"a": 1}, sharded=True)

    def contiguous(group: Any) -> None:
        InferenceParams(1, 8, 2, 8, torch.float32, context_parallel=undivided.ContextParallel(group))

    with pytest.raises(InputError, match="is_paged must be True with context_parallel"):
        simulate(1, contiguous)


def test_a_cache_of_other_ranks_is_refused() -> None:
    """A cache over both axes of a mesh, and a layer over one of them."""

    def rank(group: Any) -> str:
        params = Model("bshd", cp=undivided.ContextParallel(group, "ring+all_to_all")).params
        module = DotProductAttention(HEADS, SIZE, num_gqa_groups=GROUPS, qkv_format="bshd", layer_number=1).eval()
        module.set_context_parallel_group(undivided.ContextParallel(group.axis(0)))
        params.pre_step({"a": 1})
        with pytest.raises(InputError) as found:
            module(torch.randn(1, 1, HEADS, SIZE), *torch.randn(2, 1, 1, GROUPS, SIZE), inference_params=params)
        return str(found.value)

    for text in simulate((2, 2), rank):
        assert "on the ranks of the layer's context group, rank" in text


def test_cross_attention_with_a_cache_is_refused() -> None:
    layer = MultiheadAttention(HIDDEN, HEADS, attention_type="cross", qkv_format="bshd", layer_number=1).eval()
    layer.set_context_parallel_group(undivided.ContextParallel(rank=0, world=2))
    x, params = torch.randn(1, 2, HIDDEN), InferenceParams(1, 8, HEADS, SIZE, torch.float32)
    params.pre_step({"a": 2})
    with pytest.raises(InputError, match="inference_params must be None for cross-attention with a context group"):
        layer(x, encoder_output=x, inference_params=params)
