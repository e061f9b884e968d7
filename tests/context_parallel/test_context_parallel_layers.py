"""The modules under context parallelism: outputs and gradients of parameters are those of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from context_parallel_check import everyone
from torch import Tensor

import undivided
from undivided import DotProductAttention, MultiheadAttention, RotaryPositionEmbedding, TransformerLayer
from undivided.context_parallel import simulate
from undivided.context_parallel.exchange.simulate import SimulatedGroup

WORLDS: dict[str, int | tuple[int, int]] = {"p2p": 3, "all_gather": 2, "a2a": 4, "a2a+p2p": (2, 2)}
OFFSETS = torch.tensor([0, 10, 13, 24], dtype=torch.int32)
REAL = torch.tensor([0, 7, 10, 19], dtype=torch.int32)
CALLS: dict[str, dict[str, Any]] = {
    "causal-bshd": {"qkv_format": "bshd", "attn_mask_type": "causal"},
    "window-sbhd": {"qkv_format": "sbhd", "attn_mask_type": "causal", "window_size": (5, 0)},
    "padding-by-offsets-bshd": {
        "qkv_format": "bshd",
        "attn_mask_type": "padding_causal",
        "cu_seqlens_q": torch.tensor([0, 17, 41], dtype=torch.int32),
    },
    "padding-by-mask-sbhd": {
        "qkv_format": "sbhd",
        "attn_mask_type": "padding",
        "attention_mask": torch.arange(24)[None, None, None] >= torch.tensor([20, 9])[:, None, None, None],
    },
    "packed": {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": OFFSETS},
    "packed-with-gaps": {
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal",
        "cu_seqlens_q": REAL,
        "cu_seqlens_q_padded": OFFSETS,
        "pad_between_seqs": True,
    },
    "arbitrary-bshd": {
        "qkv_format": "bshd",
        "attn_mask_type": "arbitrary",
        "attention_mask": torch.arange(24)[:, None] % 5 < torch.arange(24) % 3,
    },
    "alibi-bshd": {"qkv_format": "bshd", "attn_mask_type": "causal", "core_attention_bias_type": "alibi"},
}
AXIS = {"bshd": 1, "sbhd": 0, "thd": 0}
NEW = {"qkv_format", "attn_mask_type", "window_size"}


def bound(group: SimulatedGroup, comm: str, call: dict[str, Any]) -> undivided.ContextParallel:
    """24 tokens with documents are not divisible by every number of ranks, so the ranks are bound."""
    strategy: Any = {"p2p": "ring", "a2a": "all_to_all", "a2a+p2p": "ring+all_to_all"}.get(comm, comm)
    cp = undivided.ContextParallel(group, strategy)
    documents = undivided.masks.documents(OFFSETS) if call["qkv_format"] == "thd" else None
    return cp.bind(24, mask=documents)


def compare(module: torch.nn.Module, x: Tensor, call: dict[str, Any], comm: str, **more: Any) -> None:
    """The module over ranks and alone: outputs, gradients of the input and of every parameter."""
    axis = AXIS[call["qkv_format"]]
    shared = {name: value for name, value in call.items() if name not in NEW}
    weights = torch.randn_like(x)

    def run(module: Any, x: Tensor, weights: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        out = module(x, **shared, **more)
        (out * weights.reshape(out.shape)).sum().backward()
        return [out.detach(), x.grad, *(p.grad for p in module.parameters())]  # type: ignore[list-item]

    def rank(group: SimulatedGroup) -> list[Tensor]:
        cp = bound(group, comm, call)
        mine = copy.deepcopy(module)
        mine.set_context_parallel_group(cp, None, None, comm)  # type: ignore[operator]
        out, dx, *grads = run(mine, cp.shard(x, dim=axis), cp.shard(weights, dim=axis))
        return [
            cp.unshard(out, dim=axis),
            cp.unshard(dx, dim=axis),
            *(torch.stack(everyone(cp, g)).sum(0) for g in grads),
        ]

    for found, right in zip(simulate(WORLDS[comm], rank)[-1], run(copy.deepcopy(module), x, weights), strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-10)


class Core(torch.nn.Module):
    """`DotProductAttention` of one tensor, so that it is called as the other modules are."""

    def __init__(self, call: dict[str, Any], **options: Any) -> None:
        super().__init__()
        self.core = DotProductAttention(4, 8, **{n: v for n, v in call.items() if n in NEW}, **options)

    def set_context_parallel_group(self, *arguments: Any) -> None:
        self.core.set_context_parallel_group(*arguments)

    def forward(self, x: Tensor, **shared: Any) -> Tensor:
        q = x.unflatten(-1, (4, 8))
        return self.core(q, q.flip(-1), q * 0.5, **shared)


def tokens(call: dict[str, Any]) -> Tensor:
    shape = {"bshd": (2, 24, 32), "sbhd": (24, 2, 32), "thd": (24, 32)}[call["qkv_format"]]
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("comm", WORLDS)
@pytest.mark.parametrize("name", CALLS)
def test_dot_product_attention(name: str, comm: str) -> None:
    call = CALLS[name]
    module = Core(call, softmax_type="learnable").double()
    torch.nn.init.normal_(module.core.softmax_offset)  # type: ignore[arg-type]
    compare(module, tokens(call), call, comm)


@pytest.mark.parametrize("comm", ["p2p", "a2a"])
@pytest.mark.parametrize("name", ["causal-bshd", "window-sbhd", "packed", "packed-with-gaps"])
def test_multihead_attention_rotates_tokens_by_their_global_positions(name: str, comm: str) -> None:
    call = CALLS[name]
    options = {n: v for n, v in call.items() if n in NEW}
    module = MultiheadAttention(32, 4, num_gqa_groups=2, attention_dropout=0.0, params_dtype=torch.float64, **options)
    compare(module, tokens(call), call, comm, rotary_pos_emb=RotaryPositionEmbedding(8)(24))


@pytest.mark.parametrize("comm", ["p2p", "a2a+p2p"])
def test_transformer_layer(comm: str) -> None:
    call = CALLS["causal-bshd"]
    module = TransformerLayer(
        32,
        64,
        4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type="causal",
        attn_input_format="bshd",
        params_dtype=torch.float64,
    )
    compare(module, tokens(call), {"qkv_format": "bshd"}, comm, rotary_pos_emb=RotaryPositionEmbedding(8)(24))


def test_recomputed_attention_communicates_again() -> None:
    compare(
        Core(CALLS["causal-bshd"]).double(),
        tokens(CALLS["causal-bshd"]),
        CALLS["causal-bshd"],
        "p2p",
        checkpoint_core_attention=True,
    )


@pytest.mark.parametrize(("format", "positions"), [("bshd", 24), ("thd", 11)])
def test_every_rank_refuses_angles_of_too_few_positions(format: str, positions: int) -> None:
    """Packed tokens had the angles of the last row; otherwise only the rank of the last tokens raised an error, and the
    others waited for it."""
    call = {"qkv_format": format, "attn_mask_type": "padding_causal"}
    offsets = OFFSETS if format == "thd" else torch.tensor([0, 24], dtype=torch.int32)

    def rank(group: SimulatedGroup) -> str:
        layer = MultiheadAttention(32, 4, attention_dropout=0.0, **call)
        cp = bound(group, "p2p", call)
        layer.set_context_parallel_group(cp)
        x = cp.shard(torch.randn((24, 32) if format == "thd" else (1, 24, 32)), format)  # type: ignore[arg-type]
        assert layer(x, rotary_pos_emb=RotaryPositionEmbedding(8)(positions), cu_seqlens_q=offsets).shape == x.shape
        with pytest.raises(undivided.InputError) as caught:
            layer(x, rotary_pos_emb=RotaryPositionEmbedding(8)(positions - 1), cu_seqlens_q=offsets)
        return str(caught.value).partition("\n")[0]

    expected = f"rotary_pos_emb must have a row for each of {positions} positions, got {positions - 1}"
    assert simulate(3, rank, timeout=30) == [expected] * 3


def test_dropout_uses_one_seed_for_all_ranks() -> None:
    """The first rank draws it, so that the pattern is that of one process with the same seed."""
    call, x = CALLS["causal-bshd"], tokens(CALLS["causal-bshd"])

    def rank(group: SimulatedGroup) -> tuple[Tensor, int]:
        cp = bound(group, "p2p", call)
        seeds: list[int] = []
        draw = cp.seed
        cp.seed = lambda: seeds.append(draw()) or seeds[-1]  # type: ignore[method-assign, func-returns-value]
        module = Core(call, attention_dropout=0.4)
        module.set_context_parallel_group(cp)
        return cp.unshard(module(cp.shard(x, dim=1)), dim=1), seeds[0]

    results = simulate(3, rank)
    out, seed = results[0]
    assert {s for _, s in results} == {seed}
    q = x.unflatten(-1, (4, 8))
    alone = undivided.attention(
        q, q.flip(-1), q * 0.5, layout="bshd", mask=undivided.masks.causal(), dropout_p=0.4, dropout_seed=seed
    )
    torch.testing.assert_close(out, alone.flatten(-2), rtol=1e-9, atol=1e-10)


def test_an_unbound_group_has_the_chunks_of_transformer_engine() -> None:
    """24 tokens on 3 ranks: chunks of 4, rank r holds r and 5 - r; a rank says nothing more than its tokens."""
    call, x = CALLS["causal-bshd"], tokens(CALLS["causal-bshd"])
    module = MultiheadAttention(32, 4, attention_dropout=0.0, params_dtype=torch.float64, qkv_format="bshd")
    freqs = RotaryPositionEmbedding(8)(24)
    alone = module(x, rotary_pos_emb=freqs)

    def rank(group: SimulatedGroup) -> Tensor:
        mine = copy.deepcopy(module)
        mine.set_context_parallel_group(group, [0, 1, 2], None)
        chunks = [x.split(4, 1)[n] for n in (group.rank, 5 - group.rank)]
        return mine(torch.cat(chunks, 1), rotary_pos_emb=freqs)

    for number, out in enumerate(simulate(3, rank)):
        right = torch.cat([alone.split(4, 1)[n] for n in (number, 5 - number)], 1)
        torch.testing.assert_close(out, right, rtol=1e-9, atol=1e-10)
    assert call["qkv_format"] == "bshd"


WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "comm-type": ((None, None, None, "ring"), "cp_comm_type must be one of 'p2p', 'all_gather', 'a2a', 'a2a\\+p2p'"),
    "ranks-without-group": ((None, [0, 1]), "cp_global_ranks must be None without cp_group"),
    "group": ((object(),), "group must be a process group"),
    "ranks": ((undivided.ContextParallel(rank=0, world=2), [0]), "cp_global_ranks must be the 2 ranks of cp_group"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_groups_are_refused(name: str) -> None:
    arguments, text = WRONG[name]
    with pytest.raises(undivided.InputError, match=text):
        DotProductAttention(2, 8, qkv_format="bshd").set_context_parallel_group(*arguments)


@pytest.mark.parametrize("comm", WORLDS)
@pytest.mark.parametrize("name", ["window-sbhd", "packed", "alibi-bshd"])
def test_the_largest_score_of_each_head_is_that_of_one_process(name: str, comm: str) -> None:
    """The largest score of some heads is of a pair that only one rank computes."""
    call = CALLS[name]
    format, new = (call["qkv_format"], {key: value for key, value in call.items() if key in NEW - {"qkv_format"}})
    given = {key: value for key, value in call.items() if key not in NEW}
    module = DotProductAttention(6, 8, num_gqa_groups=3, qkv_format=format, return_max_logit=True, **new)
    shape = {"bshd": (2, 24), "sbhd": (24, 2), "thd": (24,)}[format]
    q, k, v = (torch.randn(*shape, heads, 8) for heads in (6, 3, 3))
    out, right = module(q, k, v, **given)

    def rank(group: SimulatedGroup) -> tuple[Tensor, Tensor]:
        cp, mine = bound(group, comm, call), copy.deepcopy(module)
        mine.set_context_parallel_group(cp)
        part, largest = mine(*(cp.shard(t, dim=AXIS[format]) for t in (q, k, v)), **given)
        return cp.unshard(part, dim=AXIS[format]), largest

    for found, largest in simulate(WORLDS[comm], rank):
        torch.testing.assert_close(found, out)
        torch.testing.assert_close(largest, right)


@pytest.mark.parametrize("format", ["thd", "bshd"])
def test_all_ranks_drop_the_paths_of_the_same_sequences(format: str) -> None:
    layer = TransformerLayer(32, 16, 4, hidden_dropout=0.0, drop_path_rate=0.5, attn_input_format=format)
    layer.self_attn_mask_type = "padding_causal" if format == "thd" else "causal"
    x = tokens({"qkv_format": format}).float()
    offsets = {"cu_seqlens_q": OFFSETS} if format == "thd" else {}

    def rank(group: SimulatedGroup) -> list[list[Tensor]]:
        cp = bound(group, "p2p", {"qkv_format": format})
        mine, axis = copy.deepcopy(layer), AXIS[format]
        mine.set_context_parallel_group(cp)
        found = []
        for _ in range(32):
            changed = cp.unshard((mine(own := cp.shard(x, dim=axis), **offsets) != own).any(-1), dim=axis)
            found.append(list(changed.tensor_split(OFFSETS[1:-1].tolist()) if format == "thd" else changed))
        return found

    draws = simulate(3, rank)[0]
    assert all(sequence.all() or not sequence.any() for sequences in draws for sequence in sequences)
    assert len({tuple(bool(sequence.any()) for sequence in sequences) for sequences in draws}) > 1
