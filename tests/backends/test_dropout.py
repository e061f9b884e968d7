"""Dropout is a function of seed, sequence, head and positions alone; the same entries drop however the call is made."""

from __future__ import annotations

import brute_force
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import undivided
from undivided import masks
from undivided.backends import reference
from undivided.kernels import philox

SEED = 20240229
P = 0.25


def words(rounds: int, counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    kept, philox.ROUNDS = philox.ROUNDS, rounds
    try:
        found = philox.philox4x32(
            tuple(torch.tensor(c) for c in counter),
            (torch.tensor(key[0]), torch.tensor(key[1])),  # type: ignore[arg-type]
        )
    finally:
        philox.ROUNDS = kept
    return [int(word) for word in found]


ONES, PI = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
KNOWN = {  # Random123's kat_vectors
    "7-rounds-zeros": (7, (0, 0, 0, 0), (0, 0), "5f6fb709 0d893f64 4f121f81 4f730a48"),
    "10-rounds-zeros": (10, (0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "10-rounds-ones": (10, (ONES,) * 4, (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "10-rounds-pi": (10, PI, (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_philox_gives_the_known_answers(name: str) -> None:
    rounds, counter, key, answer = KNOWN[name]
    want = [int(word, 16) for word in answer.split()]
    assert words(rounds, counter, key) == want
    assert list(brute_force.philox4x32(counter, key, rounds)) == want


def test_dropout_uses_seven_rounds() -> None:
    assert philox.ROUNDS == 7


def test_a_weight_is_kept_by_the_16_bit_draw_of_its_key_within_the_block_of_eight() -> None:
    i, j = torch.arange(5)[:, None], torch.arange(37)[None]
    seed = 2**33 + 5
    got = philox.keep(seed, torch.tensor(3), torch.tensor(2), i, j, P)
    want = [[brute_force.survival(seed, 3, 2, a, b, P) > 0 for b in range(37)] for a in range(5)]
    assert got.tolist() == want


def pattern(q: Tensor, k: Tensor, layout: str, mask: masks.Mask | None = None, seed: int | Tensor = SEED) -> Tensor:
    """The weights themselves, [B, H, Sq, Sk]: attention over one-hot values; 0 is a dropped (or hidden) entry."""
    kv_len = k.shape[{"bshd": 1, "sbhd": 0, "bhsd": 2, "thd": 0}[layout]]
    one_hot = torch.eye(kv_len)
    shape = {"bshd": (1, kv_len, 1, -1), "sbhd": (kv_len, 1, 1, -1), "bhsd": (1, 1, kv_len, -1), "thd": (kv_len, 1, -1)}
    v = one_hot.view(shape[layout]).expand(*k.shape[:-1], kv_len)
    out = undivided.attention(q, k, v, layout=layout, mask=mask, dropout_p=P, dropout_seed=seed)  # type: ignore[call-overload]
    order = {"bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3), "bhsd": (0, 1, 2, 3), "thd": (1, 0, 2)}[layout]
    return out.permute(order) if layout != "thd" else out.permute(order).unsqueeze(0)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_pattern_does_not_depend_on_the_layout() -> None:
    q, k = random(2, 3, 11, 4), random(2, 3, 21, 4, seed=1)
    want = pattern(q, k, "bhsd")
    assert 0 < int((want == 0).sum()) < want.numel()
    for layout, order in (("bshd", (0, 2, 1, 3)), ("sbhd", (2, 0, 1, 3))):
        assert torch.equal(pattern(q.permute(order), k.permute(order), layout) == 0, want == 0), layout


def test_the_pattern_does_not_depend_on_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = random(2, 4, 65, 4), random(2, 2, 75, 4, seed=1)
    v = random(2, 2, 75, 5, seed=2)
    mask = masks.window(9, 3, "top_left")

    def run() -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = undivided.attention(*leaves, layout="bhsd", mask=mask, dropout_p=P, dropout_seed=SEED)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    want = run()
    for scores, rows in ((16, 7), (2000, 13), (1 << 22, 64)):
        monkeypatch.setattr(reference, "SCORES_PER_BLOCK", scores)
        monkeypatch.setattr(reference, "MAX_ROWS", rows)
        monkeypatch.setattr(reference, "MIN_ROWS", 3)
        for got, expected in zip(run(), want, strict=True):
            assert brute_force.error(got, expected) < 1e-5


@pytest.mark.parametrize(
    "mask", [masks.FULL, masks.causal("top_left"), masks.lengths([21, 9], [21, 9]) & masks.window(4, 2)]
)
def test_the_pattern_of_some_heads_is_theirs_in_the_whole_call(mask: masks.Mask) -> None:
    q, k = random(2, 6, 21, 4), random(2, 3, 21, 4, seed=1)
    whole = pattern(q, k, "bhsd", mask)
    part = pattern(q[:, 2:4], k[:, 1:2], "bhsd", mask.with_first_head(2))
    assert torch.equal(part == 0, whole[:, 2:4] == 0)
    assert not torch.equal(part == 0, whole[:, :2] == 0)
    compiled = torch.compile(pattern, backend="eager", fullgraph=True, dynamic=False)
    assert torch.equal(compiled(q[:, 2:4], k[:, 1:2], "bhsd", mask.with_first_head(2)), part)


def test_a_mask_with_a_first_head_keeps_it() -> None:
    def first_head(mask: masks.Mask) -> int:
        return mask.normal_form(1, 2, 3, 3, torch.device("cpu")).first_head

    mask = masks.causal().with_first_head(4)
    assert mask.with_first_head(4) is mask
    assert masks.causal().with_first_head(0).kinds == {"causal"}
    assert first_head(mask.with_first_head(2)) == 2
    both = masks.lengths([3]) & mask
    assert repr(both) == "causal() & lengths(kv=[3]) & heads from 4"
    assert first_head(both) == first_head(both.take("lengths")[1]) == first_head(both.take("causal")[1]) == 4
    assert first_head(masks.Mask.unflatten(*both.flatten())) == 4
    assert "heads from 4" in repr(both.to("meta"))
    with pytest.raises(undivided.InputError, match=r"mask must have one first head, got .*heads from 4 & .*from 2"):
        mask & masks.causal().with_first_head(2)
    with pytest.raises(undivided.InputError, match="first_head must be at least 0, got -1"):
        mask.with_first_head(-1)


def test_the_pattern_of_a_row_does_not_depend_on_the_rest_of_the_batch() -> None:
    q, k = random(3, 2, 9, 4), random(3, 2, 17, 4, seed=1)
    together, first = pattern(q, k, "bhsd"), pattern(q[:1], k[:1], "bhsd")
    assert torch.equal(together[:1] == 0, first == 0)
    longer = pattern(random(1, 2, 12, 4), random(1, 2, 40, 4, seed=1), "bhsd")
    assert torch.equal(longer[:, :, :9, :17] == 0, first == 0)


def test_batch_rows_heads_and_positions_each_have_their_own_pattern() -> None:
    dropped = pattern(torch.zeros(2, 2, 16, 4), torch.zeros(2, 2, 64, 4), "bhsd") == 0
    assert not torch.equal(dropped[0], dropped[1])
    assert not torch.equal(dropped[:, 0], dropped[:, 1])
    assert not torch.equal(dropped[:, :, 0], dropped[:, :, 1])
    assert not torch.equal(dropped[..., :8], dropped[..., 8:16])


def test_a_packed_document_drops_what_the_same_batch_row_drops() -> None:
    sizes, cu = [5, 17, 9], [0, 5, 22, 31]
    q, k = random(31, 2, 4), random(31, 2, 4, seed=1)
    packed = pattern(q, k, "thd", masks.documents(cu))
    for n, (start, size) in enumerate(zip(cu, sizes, strict=False)):
        padded_q, padded_k = torch.zeros(3, 17, 2, 4), torch.zeros(3, 17, 2, 4)
        padded_q[n, :size], padded_k[n, :size] = q[start : start + size], k[start : start + size]
        lengths = torch.tensor(sizes)
        dense = pattern(padded_q, padded_k, "bshd", masks.lengths(lengths, lengths))[n, :, :size, :size]
        mine = packed[0, :, start : start + size, start : start + size]
        assert 0 < int((mine == 0).sum()) < mine.numel()
        assert brute_force.error(mine, dense) < 1e-6, f"document {n}"


def test_a_document_alone_in_a_dense_batch_of_one_drops_what_it_drops_first_in_a_pack() -> None:
    q, k = random(12, 2, 4), random(12, 2, 4, seed=1)
    packed = pattern(q, k, "thd", masks.documents([0, 9, 12]))[:, :, :9, :9]
    alone = pattern(q[None, :9], k[None, :9], "bshd")
    assert brute_force.error(packed, alone) < 1e-6


def test_left_padding_and_slots_count_positions_from_the_first_real_token() -> None:
    q, k = random(1, 7, 2, 4), random(1, 7, 2, 4, seed=1)
    want = pattern(q[:, 3:], k[:, 3:], "bshd")
    left = pattern(q, k, "bshd", masks.lengths([4], [4], kv_start=[3], q_start=[3]))
    assert brute_force.error(left[:, :, 3:, 3:], want) < 1e-6
    slots = pattern(q[0].roll(-3, 0), k[0].roll(-3, 0), "thd", masks.documents([0, 4], padded_q=[0, 7]))
    assert brute_force.error(slots[:, :, :4, :4], want) < 1e-6


def test_the_rate_is_p_and_survivors_are_scaled_up_by_what_was_dropped() -> None:
    weights = pattern(torch.zeros(2, 4, 64, 4), torch.zeros(2, 4, 256, 4), "bhsd")
    share = (weights == 0).double().mean().item()
    assert abs(share - P) < 5 * (P * (1 - P) / weights.numel()) ** 0.5
    survivors = weights[weights > 0] * 256
    assert brute_force.error(survivors, torch.full_like(survivors, 1 / (1 - P))) < 1e-6


def test_p_is_rounded_to_a_16_bit_threshold_and_the_scale_follows() -> None:
    assert philox.threshold(0.1) == 6554
    assert philox.survivor_scale(0.1) == 1 / (1 - 6554 / 65536)


def test_p_of_zero_drops_nothing_and_p_of_one_drops_all() -> None:
    q, k, v = (random(1, 5, 2, 4, seed=s).requires_grad_() for s in range(3))
    none = undivided.attention(q, k, v, layout="bshd", dropout_p=0.0, dropout_seed=1)
    assert torch.equal(none, undivided.attention(q, k, v, layout="bshd"))
    out = undivided.attention(q, k, v, layout="bshd", dropout_p=1.0, dropout_seed=1)
    assert torch.equal(out, torch.zeros_like(out))
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_lse_is_that_of_the_weights_before_dropout() -> None:
    q, k, v = (random(1, 5, 2, 4, seed=s) for s in range(3))
    _, with_dropout = undivided.attention(q, k, v, layout="bshd", dropout_p=0.5, dropout_seed=1, return_lse=True)
    _, without = undivided.attention(q, k, v, layout="bshd", return_lse=True)
    assert brute_force.error(with_dropout, without) < 1e-6


def test_a_seed_may_be_an_int_or_a_tensor_and_other_seeds_drop_others() -> None:
    q, k = random(1, 1, 32, 4), random(1, 1, 32, 4, seed=1)
    want = pattern(q, k, "bhsd", seed=5)
    assert torch.equal(pattern(q, k, "bhsd", seed=torch.tensor(5)), want)
    assert not torch.equal(pattern(q, k, "bhsd", seed=6) == 0, want == 0)
    assert not torch.equal(pattern(q, k, "bhsd", seed=5 + 2**32) == 0, want == 0)  # the high word counts


def test_without_a_seed_torchs_generator_decides() -> None:
    q, k, v = (random(1, 9, 2, 4, seed=s) for s in range(3))

    def run() -> Tensor:
        return undivided.attention(q, k, v, layout="bshd", dropout_p=0.5)

    torch.manual_seed(1)
    first, second = run(), run()
    torch.manual_seed(1)
    assert torch.equal(run(), first)
    assert not torch.equal(first, second)


def test_no_seed_is_drawn_without_dropout() -> None:
    q = random(1, 9, 2, 4)
    before = torch.get_rng_state()
    undivided.attention(q, q, q, layout="bshd")
    assert torch.equal(torch.get_rng_state(), before)


def test_explain_and_refused_calls_draw_no_seed() -> None:
    q = random(1, 9, 2, 4)
    before = torch.get_rng_state()
    undivided.explain(q, q, q, layout="bshd", dropout_p=0.5)
    with pytest.raises(undivided.NoBackendError):
        undivided.attention(q, q, q, layout="bshd", dropout_p=0.5, backend="torch_flash")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_tensor_counted_up_in_place_does_not_change_the_backward() -> None:
    q, k, v = (random(1, 9, 2, 4, seed=s).requires_grad_() for s in range(3))
    seed = torch.tensor(5)
    out = undivided.attention(q, k, v, layout="bshd", dropout_p=0.5, dropout_seed=seed)
    seed += 1
    got = torch.autograd.grad(out.sum(), (q, k, v))
    out = undivided.attention(q, k, v, layout="bshd", dropout_p=0.5, dropout_seed=5)
    for a, b in zip(got, torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved-tensor-hooks", "reentrant"])
def test_checkpoint_recomputation_repeats_the_pattern(use_reentrant: bool) -> None:
    q, k, v = (random(1, 9, 2, 4, seed=s).requires_grad_() for s in range(3))

    def run(*x: Tensor) -> Tensor:
        return undivided.attention(*x, layout="bshd", dropout_p=0.5)

    torch.manual_seed(3)
    want = torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v))
    torch.manual_seed(3)
    checkpoint(run, q, k, v, use_reentrant=use_reentrant).square().sum().backward()
    for t, grad in zip((q, k, v), want, strict=True):
        assert t.grad is not None
        assert torch.equal(t.grad, grad)


def test_a_backend_that_draws_its_own_pattern_refuses() -> None:
    q = random(1, 9, 2, 4)
    decision = undivided.explain(q, q, q, layout="bshd", dropout_p=0.1)
    assert decision.backend.name not in ("torch_flash", "torch_efficient")
    assert "no support for dropout (PyTorch's CPU kernel has none)" in decision.reasons["torch_flash"]
