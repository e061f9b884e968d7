"""The competitors of the suite "serving": implementations that take a packed batch apart, and vLLM's.

Each gets the sequences in its own best form: keys and values that it cannot read from pages are gathered in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from undivided import masks
from undivided.benchmarking.competitors import Absent, Competitor, PreparedBenchmark
from undivided.benchmarking.serving import vllm
from undivided.cache import PagedKVCache
from undivided.functional import attention
from undivided.masks._parts import Blocks, Tree, find_part

__all__ = ["MAKERS", "Group", "groups"]


class Group(NamedTuple):
    """Consecutive sequences with the same number of new tokens: B sequences, S new tokens each.

    Args:
        q: [B, S, H, D].
        k, v: one [L, N, D] per sequence.
        first: number of the first sequence in the batch.
        tree: the parent of each new token [B, S]; None if the new tokens follow one another.
    """

    q: Tensor
    k: list[Tensor]
    v: list[Tensor]
    first: int
    tree: Tensor | None

    @property
    def lengths(self) -> list[int]:
        """The cached tokens of each sequence."""
        return [len(k) for k in self.k]


def groups(prepared: PreparedBenchmark) -> list[Group]:
    """The sequences of a packed batch, grouped.

    >>> from undivided.benchmarking.catalogue import benchmarks
    >>> from undivided.benchmarking.competitors import prepare
    >>> grouped = groups(prepare(next(one for one in benchmarks("serving") if "drafts-2" in one.name)))
    >>> [(group.q.shape, group.lengths[0]) for group in grouped]
    [(torch.Size([8, 2, 32, 128]), 4096)]
    """
    q, (k, v) = prepared.tensors.q.detach(), prepared.floating_kv
    documents, _ = prepared.call.mask.take("documents")
    tree = find_part(prepared.call.mask.parts, Tree)
    new, cached = (offsets.diff().tolist() for offsets in (documents.cu_seqlens_q, documents.cu_seqlens_kv))
    if (pages := prepared.call.pages) is None:
        keys, values = list(k.split(cached)), list(v.split(cached))
    else:
        keys, values = (
            [pool[row.long()].flatten(0, 1)[:length] for row, length in zip(pages, cached, strict=True)]
            for pool in (k, v)
        )
    result, first_token, first = [], 0, 0
    for count, run in groupby(new):
        size = len(list(run))
        rows, tokens = slice(first, first + size), slice(first_token, first_token + size * count)
        parents = None if tree is None else tree.parents.flatten()[tokens].view(size, count)
        result.append(Group(q[tokens].unflatten(0, (size, count)), keys[rows], values[rows], first, parents))
        first_token, first = tokens.stop, rows.stop
    return result


def _chosen_pages(prepared: PreparedBenchmark) -> Tensor | None:
    """The pages that the queries of each sequence see, [B, n]; None if all."""
    blocks = find_part(prepared.call.mask.parts, Blocks)
    return None if blocks is None else blocks.table[:, 0, 0]


def _visible_groups(prepared: PreparedBenchmark) -> list[Group]:
    """`groups`, with only the keys and values of the chosen pages, for implementations that cannot choose."""
    all_groups, chosen = groups(prepared), _chosen_pages(prepared)
    if chosen is None:
        return all_groups
    page = torch.arange(prepared.tensors.k.shape[1])

    def chosen_tokens(tensors: list[Tensor], first: int) -> list[Tensor]:
        rows = [(pages[:, None] * len(page) + page).flatten() for pages in chosen[first:]]
        return [x[index[index < len(x)]] for x, index in zip(tensors, rows, strict=False)]

    return [
        group._replace(k=chosen_tokens(group.k, group.first), v=chosen_tokens(group.v, group.first))
        for group in all_groups
    ]


PartialCall = Callable[[], Tensor]
"""A part of the work; returns [B, S, H, D]."""


def _competitor(name: str, label: str, prepared: PreparedBenchmark, calls: Sequence[PartialCall]) -> Competitor:
    def call() -> list[Tensor]:
        return [call() for call in calls]

    def results() -> dict[str, Tensor]:
        return {"out": torch.cat([out.flatten(0, 1) for out in call()]).transpose(0, 1)[None]}

    return Competitor(name, label, prepared, call, results)


def _separate(prepared: PreparedBenchmark) -> Competitor:
    """Our own calls, one for each group, of a dense batch."""
    all_groups = groups(prepared)
    if len(all_groups) == 1 and all_groups[0].q.shape[0] == 1:
        raise Absent("the batch is one sequence")
    k, v = _copied_keys(prepared)
    calls = [_dense(prepared, one, k, v) for one in all_groups]
    return _competitor("separate", "undivided, one call per group", prepared, calls)


def _copied_keys(prepared: PreparedBenchmark) -> tuple[Tensor, Tensor]:
    """Keys and values in memory of their own: the packed call, timed just before, leaves some of its keys in caches."""
    k, v = prepared.tensors.k, prepared.tensors.v
    is_latent = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    k_copy = k.clone()
    return k_copy, k_copy[..., : v.shape[-1]] if is_latent else v.clone()


def _dense(prepared: PreparedBenchmark, group: Group, k: Tensor, v: Tensor) -> PartialCall:
    lengths = masks.lengths(torch.tensor(group.lengths, dtype=torch.int32))
    causal = masks.causal("bottom_right") if group.tree is None else masks.tree(group.tree)
    chosen = _chosen_pages(prepared)
    if chosen is not None:
        rows = chosen[group.first : group.first + len(group.k)]
        lengths = lengths & masks.pages(rows[:, None], prepared.tensors.k.shape[1])
    options = {name: prepared.inputs.arguments.get(name) for name in ("k_scale", "v_scale", "batch_invariant")}
    if (pages := prepared.call.pages) is not None:
        rows = pages[group.first : group.first + len(group.k)]
        pages = rows[:, : -(-max(group.lengths) // prepared.tensors.k.shape[1])].contiguous()
        mask = lengths if group.q.shape[1] == 1 else lengths & causal
    else:
        if len(set(group.lengths)) > 1:
            raise Absent("sequences of unequal lengths are packed")
        k, v, mask = torch.stack(group.k), torch.stack(group.v), causal
    return partial(attention, group.q, k, v, layout="bshd", mask=mask, pages=pages, **options)


def _sdpa(prepared: PreparedBenchmark) -> Competitor:
    """PyTorch's function, one call per sequence."""
    calls = [
        _one_sdpa(q, k, v, group.tree if group.tree is None else group.tree[b])
        for group in _visible_groups(prepared)
        for b, (q, k, v) in enumerate(zip(group.q, group.k, group.v, strict=True))
    ]
    return _competitor("sdpa", "torch SDPA, one call per sequence", prepared, calls)


def _one_sdpa(q: Tensor, k: Tensor, v: Tensor, tree: Tensor | None) -> PartialCall:
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
    rows, keys = q.shape[2], k.shape[2]
    mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows) if 1 < rows < keys else None
    if tree is not None:
        mask = masks.tree(tree).to_dense(batch=1, heads=1, q_len=rows, kv_len=keys)[0, 0]
    call: PartialCall = partial(
        scaled_dot_product_attention, q, k, v, attn_mask=mask, is_causal=1 < rows == keys, enable_gqa=True
    )
    return lambda: call().transpose(1, 2)


def _causal_groups(prepared: PreparedBenchmark) -> list[Group]:
    """`_visible_groups`, for operators without masks."""
    all_groups = _visible_groups(prepared)
    if any(group.tree is not None for group in all_groups):
        raise Absent("its operator is causal, without trees")
    return all_groups


def _onnxruntime(prepared: PreparedBenchmark) -> Competitor:
    """onnxruntime's GroupQueryAttention: one call per group, or per sequence if several tokens follow cached ones."""
    from undivided.benchmarking import onnx

    if prepared.problem.qk_dim != prepared.problem.v_dim:
        raise Absent("GroupQueryAttention has one head size for keys and values")
    calls, label = [], ""
    for group in _causal_groups(prepared):
        rows_of_calls: list[slice] = [slice(None)]
        if 1 < group.q.shape[1] < min(group.lengths):
            rows_of_calls = [slice(b, b + 1) for b in range(len(group.k))]
        for rows in rows_of_calls:
            attend = onnx.group_query_attention(prepared.call.scale, group.q[rows], group.k[rows], group.v[rows])
            calls.append(attend.out)
            label = attend.label
    return _competitor("onnxruntime", label, prepared, calls)


def _vllm(prepared: PreparedBenchmark) -> Competitor:
    """vLLM's operator for CPUs on the packed batch, with pages of its own format."""
    all_groups = _causal_groups(prepared)
    attend = vllm.attention(
        torch.cat([group.q.flatten(0, 1) for group in all_groups]),
        [k for group in all_groups for k in group.k],
        [v for group in all_groups for v in group.v],
        [group.q.shape[1] for group in all_groups for _ in group.k],
        prepared.call.scale,
    )
    return _competitor("vllm", "vLLM cpu_attention_with_kv_cache", prepared, [lambda: attend()[None]])


def _cache(prepared: PreparedBenchmark) -> Competitor:
    """A step of `PagedKVCache`: append the new tokens, attend, and truncate again."""
    if prepared.call.pages is None:
        raise Absent("the keys are not paged")
    case = prepared.benchmark.case
    if case.memory == "latent":
        raise Absent("it stores values beside the latents")
    if case.shared_pages:
        raise Absent("its sequences are appended one by one, and share nothing")
    all_groups = groups(prepared)
    keys, values = ([x for group in all_groups for x in getattr(group, name)] for name in "kv")
    new = [group.q.shape[1] for group in all_groups for _ in group.k]
    past = [len(k) - count for k, count in zip(keys, new, strict=True)]
    page = prepared.tensors.k.shape[1]
    _, kv_heads, dim = keys[0].shape
    pages = sum(-(-len(k) // page) for k in keys)
    cache = PagedKVCache(
        pages,
        page,
        kv_heads,
        dim,
        value_dim=values[0].shape[2],
        batch=len(keys),
        dtype=keys[0].dtype,
        layout="thd",
        quantize=case.quantized,
    )
    mask = None
    if all_groups[0].tree is not None:
        mask = masks.tree(torch.cat([group.tree.flatten() for group in all_groups if group.tree is not None]))
    if (chosen := _chosen_pages(prepared)) is not None:
        mask = masks.pages(chosen[:, None], page)

    def packed(tensors: list[Tensor], is_past: bool) -> Tensor:
        return torch.cat([x[:n] if is_past else x[n:] for x, n in zip(tensors, past, strict=True)])

    if any(past):
        cache.append(packed(keys, True), packed(values, True), lengths=past)
    q, k, v = prepared.tensors.q.detach(), packed(keys, False), packed(values, False)

    def step() -> Tensor:
        cache.append(k, v, lengths=new)
        out = cache.attend(
            q, mask, scale=prepared.call.scale, batch_invariant=prepared.benchmark.batch_invariant or None
        )
        cache.truncate(past)
        return out[None]

    return _competitor("cache", "undivided.PagedKVCache: append, attend, truncate", prepared, [step])


MAKERS: Mapping[str, Callable[[PreparedBenchmark], Competitor]] = {
    "separate": _separate,
    "cache": _cache,
    "sdpa": _sdpa,
    "onnxruntime": _onnxruntime,
    "vllm": _vllm,
}
"""The competitors by name; the first two are this library in another way and always take part."""
