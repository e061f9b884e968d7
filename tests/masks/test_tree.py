"""masks.tree against ancestors that are followed one by one."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import undivided
from undivided import InputError, masks


def ancestors(parents: list[int]) -> Tensor:
    found = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        at = node
        while at >= 0:
            found[node, at] = True
            at = parents[at]
    return found


def random_parents(rng: random.Random, nodes: int) -> list[int]:
    return [rng.randint(-1, node - 1) for node in range(nodes)]


@pytest.mark.parametrize("seed", range(30))
def test_nodes_see_the_prefix_and_their_ancestors(seed: int) -> None:
    rng = random.Random(seed)
    batch = rng.randint(1, 3)
    q_lens, prefixes = ([rng.randint(low, 12) for _ in range(batch)] for low in (1, 0))
    kv_lens = [prefix + nodes for prefix, nodes in zip(prefixes, q_lens, strict=True)]
    trees = [random_parents(rng, nodes) for nodes in q_lens]
    q_len, kv_len = max(q_lens), max(kv_lens)
    parents, pairs = torch.full((batch, q_len), -1), torch.zeros(batch, 1, q_len, kv_len, dtype=torch.bool)
    for b, (prefix, nodes) in enumerate(zip(prefixes, q_lens, strict=True)):
        parents[b, :nodes] = torch.tensor(trees[b])
        pairs[b, 0, :nodes, :prefix] = True
        pairs[b, 0, :nodes, prefix : prefix + nodes] = ancestors(trees[b])
    mask = masks.tree(parents) & masks.lengths(kv_lens, q_lens)
    assert torch.equal(mask.to_dense(batch, 1, q_len, kv_len), pairs)
    cu_q, cu_kv = (torch.tensor([0, *lens]).cumsum(0) for lens in (q_lens, kv_lens))
    packed = masks.tree([parent for tree in trees for parent in tree]) & masks.documents(cu_q, cu_kv)
    dense = packed.to_dense(1, 1, int(cu_q[-1]), int(cu_kv[-1]))[0, 0]
    for b, (nodes, keys) in enumerate(zip(q_lens, kv_lens, strict=True)):
        rows = dense[int(cu_q[b]) : int(cu_q[b + 1])]
        assert torch.equal(rows[:, int(cu_kv[b]) : int(cu_kv[b + 1])], pairs[b, 0, :nodes, :keys])
        assert int(rows.sum()) == int(pairs[b].sum())


def test_padding_may_stand_before_a_sequence() -> None:
    tree, pairs = [-1, 0, 0], torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    for b, (row, key) in enumerate(((2, 1), (0, 2))):
        pairs[b, 0, row : row + 3, key : key + 2] = True
        pairs[b, 0, row : row + 3, key + 2 : key + 5] = ancestors(tree)
    padded = masks.tree([[-1, -1, *tree], [*tree, -1, -1]])
    mask = padded & masks.lengths([5, 5], [3, 3], kv_start=[1, 2], q_start=[2, 0])
    assert torch.equal(mask.to_dense(2, 1, 5, 7), pairs)
    pack = masks.tree([-1, -1, *tree, -1]) & masks.documents([0, 3], [0, 5], padded_q=[2, 6], padded_kv=[1, 8])
    dense = pack.to_dense(1, 1, 6, 8)
    assert torch.equal(dense[0, 0, :5, :7], pairs[0, 0])
    assert int(dense.sum()) == int(pairs[0].sum())
    late = masks.tree([[-1, -1, -1, 1, 0]]) & masks.lengths([3], [3], q_start=[2])
    with pytest.raises(InputError, match="got 1 for query 1"):
        late.to_dense(1, 1, 5, 3)


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_batch_of_no_sequences_has_trees(backend: str) -> None:
    q = torch.randn(0, 4, 2, 8, requires_grad=True)
    tree = torch.zeros(0, 4, dtype=torch.int64) - 1
    nothing = masks.lengths(tree[:, 0])
    for mask in (masks.tree(tree), masks.tree(tree) & nothing, masks.tree([-1, 0, 0, 2]) & nothing):
        assert mask.to_dense(0, 1, 4, 4).shape == (0, 1, 4, 4)
        out = undivided.attention(q, q, q, layout="bshd", mask=mask, backend=backend)
        assert out.shape == q.shape
        assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


def test_a_chain_is_causal() -> None:
    chain, causal = masks.tree(list(range(-1, 6))), masks.causal("bottom_right")
    assert torch.equal(chain.to_dense(1, 1, 7, 11), causal.to_dense(1, 1, 7, 11))


def test_each_path_gives_what_decoding_it_alone_gives() -> None:
    torch.manual_seed(0)
    parents = [-1, 0, 0, 2, 1, 3]
    cache = undivided.PagedKVCache(num_pages=20, page_size=8, kv_heads=2, head_dim=16, batch=1, dtype=torch.float32)
    prompt, draft = (torch.randn(1, n, 2, 16) for n in (21, 6))
    q = torch.randn(1, 6, 4, 16)
    cache.append(prompt, prompt)
    cache.append(draft, draft)
    out = cache.attend(q, masks.tree(parents))
    for node in range(6):
        path = [n for n in range(6) if ancestors(parents)[node, n]]
        keys = torch.cat([prompt, draft[:, path]], 1)
        alone = undivided.attention(q[:, node : node + 1], keys, keys, layout="bshd")
        assert torch.allclose(out[:, node], alone[:, 0], atol=1e-5)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([-1, 1], r"earlier query of the same sequence, got parents\[0, 1\] = 1"),
        ([0], r"got parents\[0, 0\] = 0"),
        ([-2], r"got parents\[0, 0\] = -2"),
        (torch.zeros(2, 2, 2, dtype=torch.int32), "parents must have shape"),
        (torch.zeros(2), "parents must have an integer dtype"),
    ],
    ids=str,
)
def test_wrong_parents_are_refused(parents: list[int] | Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        masks.tree(parents)


def test_parents_that_do_not_fit_the_call_are_refused() -> None:
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(InputError, match=r"mask must have tree\(parents\) of shape \[3\]"):
        undivided.attention(q, q, q, layout="bshd", mask=masks.tree([-1, 0]))
    pack = masks.tree([-1, -1, 1]) & masks.documents([0, 1, 3])
    with pytest.raises(InputError, match="1 for query 1\n  HINT: in a pack, indices start at 0 in every document"):
        undivided.attention(q[0], q[0], q[0], layout="thd", mask=pack)


def test_trees_of_each_sequence_may_be_lists_of_lists() -> None:
    lists, tensor = masks.tree([[-1, 0, 0], [-1, -1, 1]]), masks.tree(torch.tensor([[-1, 0, 0], [-1, -1, 1]]))
    sizes = {"batch": 2, "heads": 1, "q_len": 3, "kv_len": 5}
    assert torch.equal(lists.to_dense(**sizes), tensor.to_dense(**sizes))
    with pytest.raises(InputError, match=r"parents must have lists of equal length, got lengths \[1, 2\]\n  HINT: pad"):
        masks.tree([[-1, 0], [-1]])


def test_a_tree_is_not_joined_to_another_mask_by_or() -> None:
    with pytest.raises(InputError, match="HINT: a tree and chosen blocks are joined to other masks by `&` alone"):
        masks.tree([-1, 0]) | masks.causal()
