"""All ranks in one process: every mask and feature with every strategy, the bytes that are sent, and refused calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import call_of
from context_parallel_check import PLACEMENTS, alone, differences, everyone, grid, in_double, of_rank
from torch import Tensor

import undivided
from undivided import masks
from undivided.arguments import layout as _layout
from undivided.context_parallel import RankError, simulate
from undivided.context_parallel.exchange.simulate import SimulatedGroup
from undivided.verification.budget import budget_for
from undivided.verification.cases import CASES, Case, get
from undivided.verification.inputs import Inputs, build
from undivided.verification.oracle import Upstream

WORLDS: dict[str, int | tuple[int, int]] = {"ring": 4, "all_gather": 3, "all_to_all": 4, "ring+all_to_all": (2, 2)}
UNPAGED = [case for case in CASES.values() if case.page_size is None and case.quantized is None]
TURNS = dict(zip([case.name for case in UNPAGED], itertools.cycle(itertools.product(WORLDS, PLACEMENTS)), strict=False))


def simulated(inputs: Inputs, strategy: str, placement: str) -> dict[str, Tensor]:
    """The result that the last rank gathers."""

    def rank(group: SimulatedGroup) -> dict[str, Tensor]:
        return of_rank(inputs, undivided.ContextParallel(group, strategy, placement))  # type: ignore[arg-type]

    return simulate(WORLDS[strategy], rank, timeout=30)[-1]


@pytest.mark.parametrize("strategy", WORLDS)
@pytest.mark.parametrize(("case", "placement"), [pytest.param(*both, id=both[0].name) for both in grid()])
def test_every_mask_with_every_strategy_and_placement(case: Case, placement: str, strategy: str) -> None:
    inputs = in_double(case)
    assert not differences(simulated(inputs, strategy, placement), alone(inputs, backend="reference"))


@pytest.mark.parametrize("case", UNPAGED, ids=lambda case: case.name)
def test_every_case_of_the_catalogue(case: Case) -> None:
    """Bias, sinks, slopes, softcap, dropout, scales, memory layouts, empty tensors, NaN in the padding."""
    inputs = in_double(case)
    assert not differences(simulated(inputs, *TURNS[case.name]), alone(inputs, backend="reference"))


@pytest.mark.parametrize("case", UNPAGED, ids=lambda case: case.name)
def test_within_the_budget_of_a_single_kernel(case: Case) -> None:
    """Partial results are merged in fp32, and gradients summed in it, so that many ranks are no less exact than one."""
    for dtype in case.dtypes[:2]:
        inputs = build(case, dtype)
        grad_lse = inputs.grad_lse
        if grad_lse is not None and case.layout == "thd":
            grad_lse = grad_lse.unsqueeze(0)
        budget = budget_for(*call_of(**inputs.arguments), Upstream(inputs.grad_out, grad_lse))
        found = simulated(inputs, *TURNS[case.name])
        wrong = {
            name: (budget.error(name, t), budget.allowed[name]) for name, t in found.items() if not budget.met(name, t)
        }
        assert not wrong, (dtype, wrong)


@pytest.mark.parametrize("heads", [(18, 18), (18, 6), (2, 2), (3, 1), (10, 2)], ids=lambda h: f"{h[0]}-for-{h[1]}")
def test_all_to_all_with_heads_that_the_ranks_do_not_divide(heads: tuple[int, int]) -> None:
    """18 heads on 4 ranks are 4.5 per rank: a head that two ranks share is split by rows at half of its work."""
    inputs = in_double(Case("", q_len=61, heads=heads[0], kv_heads=heads[1], qk_dim=4, mask=masks.causal))
    assert not differences(simulated(inputs, "all_to_all", "zigzag"), alone(inputs, backend="reference"))
    q, k, v = (inputs.arguments[name].detach() for name in "qkv")

    def rank(group: SimulatedGroup) -> int:
        cp = undivided.ContextParallel(group, "all_to_all").bind(61)
        of = [cp.shard(t, "bshd") for t in (q, k, v)]
        undivided.attention(*of, layout="bshd", mask=masks.causal(), context_parallel=cp)
        return cp.traffic.pairs

    pairs = simulate(4, rank)
    assert sum(pairs) == 2 * heads[0] * 61 * 62 // 2
    assert max(pairs) <= 1.05 * sum(pairs) / 4


@pytest.mark.parametrize("strategy", WORLDS)
def test_another_mask_than_the_bound_one_is_correct_too(strategy: str) -> None:
    """Layers with different masks share one placement."""
    inputs = in_double(Case("", q_len=23, heads=4, mask=lambda: masks.window(2, 9)))

    def rank(group: SimulatedGroup) -> dict[str, Tensor]:
        cp = undivided.ContextParallel(group, strategy, "balanced")  # type: ignore[arg-type]
        return of_rank(inputs, cp.bind(23, mask=masks.causal() | masks.prefix(9)))

    for found in simulate(WORLDS[strategy], rank):
        assert not differences(found, alone(inputs, backend="reference"))


@pytest.mark.parametrize("placement", ["zigzag", "contiguous"])
def test_unbound_ranks_take_the_length_from_their_own_tokens(placement: str) -> None:
    inputs = in_double(Case("", q_len=24, heads=4, layout="sbhd", mask=masks.causal))

    def rank(group: SimulatedGroup) -> Tensor:
        cp = undivided.ContextParallel(group, "ring", placement)  # type: ignore[arg-type]
        q, k, v = (cp.shard(inputs.arguments[name].detach(), "sbhd") for name in "qkv")
        return cp.unshard(undivided.attention(q, k, v, layout="sbhd", mask=masks.causal(), context_parallel=cp), "sbhd")

    right = alone(inputs, backend="reference")["out"]
    assert not differences({"out": simulate(3, rank)[0]}, {"out": right})


def test_packed_documents_of_transformer_engine_need_no_binding() -> None:
    """Its partition: 2 * ranks chunks of every document, rank r holds r and 2 * ranks - 1 - r."""
    offsets = torch.tensor([0, 8, 24])
    inputs = in_double(
        Case("", layout="thd", batch=1, q_len=24, mask=lambda: masks.documents(offsets) & masks.causal())
    )
    held = [[0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23], [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19]]

    def rank(group: SimulatedGroup) -> Tensor:
        cp = undivided.ContextParallel(group)
        q, k, v = (inputs.arguments[name].detach()[held[cp.rank]] for name in "qkv")
        return undivided.attention(q, k, v, layout="thd", mask=inputs.arguments["mask"], context_parallel=cp)

    right = alone(inputs, backend="reference")["out"]
    for rows, out in zip(held, simulate(2, rank), strict=True):
        assert not differences({"out": out}, {"out": right[rows]})


def test_a_bias_of_one_row_is_this_ranks_row_if_others_have_more() -> None:
    """7 rows on 4 ranks are 1 or 2 per rank: the bias of the last rank's single row could be taken for one of all
    rows."""
    inputs = in_double(Case("", q_len=7, heads=2, bias="1hqk"))
    for check in (True, False):

        def rank(group: SimulatedGroup, check: bool = check) -> dict[str, Tensor]:
            return of_rank(inputs, undivided.ContextParallel(group, "all_to_all", "contiguous", check=check))

        assert not differences(simulate(4, rank)[0], alone(inputs, backend="reference"))


def sent(
    strategy: str, placement: str, length: int, mask: masks.Mask, world: int, heads: int = 1
) -> list[undivided.context_parallel.Traffic]:
    """The traffic of every rank in one forward pass, head size 4, fp32."""
    q = torch.randn(1, length, heads, 4)

    def rank(group: SimulatedGroup) -> undivided.context_parallel.Traffic:
        cp = undivided.ContextParallel(group, strategy, placement).bind(length, mask=mask)  # type: ignore[arg-type]
        mine = cp.shard(q, "bshd")
        undivided.attention(mine, mine, mine, layout="bshd", mask=mask, context_parallel=cp)
        return cp.traffic

    return simulate(world, rank)


@pytest.mark.parametrize("length", [512, 4096])
def test_a_ring_under_a_window_sends_the_window_whatever_the_length(length: int) -> None:
    """Rank r needs only the 16 keys before its range; no rank needs those of the last one."""
    traffic = sent("ring", "contiguous", length, masks.window(16, 0), 8)
    bytes_of_a_key = 2 * 4 * 4
    assert [t.bytes_sent for t in traffic] == [16 * bytes_of_a_key] * 7 + [0]
    assert [t.messages for t in traffic] == [2] * 7 + [0]


def test_a_causal_zigzag_ring_sends_three_quarters() -> None:
    """The late chunk of a rank is requested only by ranks whose own late chunk is later."""
    traffic = sent("ring", "zigzag", 64, masks.causal(), 4)
    tokens = [t.bytes_sent // (2 * 4 * 4) for t in traffic]
    assert tokens == [8 * 3 + 8 * later for later in (0, 1, 2, 3)]


def test_documents_that_are_whole_on_a_rank_send_nothing() -> None:
    mask = masks.documents(torch.tensor([0, 16, 32, 48, 64])) & masks.causal()
    for strategy in ("ring", "all_gather"):
        traffic = sent(strategy, "contiguous", 64, mask, 4)
        assert [(t.bytes_sent, t.pairs) for t in traffic] == [(0, 136)] * 4


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_to_all"])
def test_dropout_drops_what_one_process_drops(strategy: str) -> None:
    inputs = in_double(Case("", q_len=29, heads=5, dropout_p=0.4, mask=masks.causal))
    one = alone(inputs, backend="reference")
    assert not differences(simulated(inputs, strategy, "zigzag"), one)
    other = alone(inputs, backend="reference", dropout_seed=7)
    assert differences(one, other), "another seed drops others, so that the test can fail"


def test_the_same_backends_run_forward_and_backward() -> None:
    inputs = build(Case("", q_len=24, heads=4, mask=masks.causal), torch.float32)

    def rank(group: SimulatedGroup, backend: str) -> dict[str, Tensor]:
        return of_rank(inputs, undivided.ContextParallel(group), backend=backend)

    for name in ("torch_flash", "reference"):
        found = simulate(4, lambda group, name=name: rank(group, name))[0]  # type: ignore[misc]
        for quantity, right in alone(inputs, backend="reference").items():
            torch.testing.assert_close(found[quantity], right)
    with pytest.raises(undivided.NoBackendError, match="runs on cuda"):
        simulate(2, lambda group: rank(group, "torch_efficient"))


def test_explain_gives_the_decision_of_a_rank_without_communication() -> None:
    q = torch.empty(1, 16, 2, 8, dtype=torch.float32)
    cp = undivided.ContextParallel(rank=1, world=4).bind(64)
    decision = undivided.explain(q, q, q, layout="bshd", mask=masks.causal(), context_parallel=cp, backend="reference")
    assert decision.backend.name == "reference"
    assert (decision.problem.q_len, decision.problem.kv_len) == (16, 16)


H100 = undivided.Machine(device="cuda", compute_capability=(9, 0), packages={"flash_attn": "2.8.4"})


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_explain_decides_for_the_described_machine(device: str, strategy: str) -> None:
    """It once used the device of the tensors: for a described GPU it chose CPU kernels, and meta tensors raised
    NotImplementedError."""
    q = torch.empty(2, 256, 8, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    cp = undivided.ContextParallel(rank=1, world=4, strategy=strategy).bind(1024, mask=masks.causal())
    n = torch.tensor([1000, 1024])
    mask = masks.causal() & masks.lengths(n, n)
    decision = undivided.explain(q, q, q, layout="bshd", mask=mask, context_parallel=cp, machine=H100)
    assert decision.problem.device == "cuda"
    assert decision.machine is H100
    assert decision.reasons["native"][0] == "device=cuda (runs on cpu)"
    assert decision.backend.limits.devices >= {"cuda"}


def test_explain_takes_meta_tensors_of_every_kind_for_this_machine() -> None:
    q, sinks = torch.empty(1, 4, 16, 8, device="meta"), torch.empty(4, device="meta")
    bias = torch.empty(4, 16, 64, device="meta")
    cp = undivided.ContextParallel(rank=1, world=4).bind(64)
    arguments = {
        "layout": "bhsd",
        "bias": bias,
        "sinks": sinks,
        "alibi_slopes": sinks,
        "dropout_p": 0.1,
        "dropout_seed": 3,
    }
    decision = undivided.explain(q, q, q, **arguments, context_parallel=cp)
    assert decision.chosen is not None
    assert decision.problem.device == ("cuda" if torch.cuda.is_available() else "cpu")


def test_values_are_required_if_the_plan_depends_on_them() -> None:
    q, n = torch.empty(1, 16, 2, 8, device="meta"), torch.tensor([60], device="meta")
    cp = undivided.ContextParallel(rank=1, world=4).bind(64)
    with pytest.raises(undivided.InputError, match="mask must hold values under context parallelism"):
        undivided.explain(q, q, q, layout="bshd", mask=masks.lengths(n), context_parallel=cp)

    def rank(group: SimulatedGroup) -> None:
        undivided.attention(q, q, q, layout="bshd", context_parallel=undivided.ContextParallel(group))

    with pytest.raises(undivided.InputError, match="q must hold values under context parallelism"):
        simulate(2, rank)


def test_a_compiled_model_runs_the_exchange_outside_its_graph() -> None:
    q = torch.randn(1, 12, 2, 8)

    def rank(group: SimulatedGroup) -> Tensor:
        cp = undivided.ContextParallel(group).bind(12)

        def model(x: Tensor) -> Tensor:
            return 2 * undivided.attention(x, x, x, layout="bshd", mask=masks.causal(), context_parallel=cp)

        found = torch.compile(model, backend="eager")(q)
        torch.testing.assert_close(found, model(q))
        return found

    assert simulate(1, rank)[0].shape == q.shape


DECODED: dict[str, dict[str, Any]] = {
    "next-token": {"rows": 1},
    "three-tokens": {"rows": 3},
    "window": {"rows": 3, "mask": masks.window(6, 0, align="bottom_right")},
    "global-keys": {"rows": 2, "mask": masks.window(3, 0, align="bottom_right") | masks.prefix(2)},
    "dense": {"rows": 2, "mask": masks.dense(torch.arange(2)[:, None] < torch.arange(17) % 3)},
    "lengths": {"rows": 1, "mask": masks.lengths([9, 17])},
    "alibi-sinks-bias": {
        "rows": 3,
        "alibi_slopes": torch.rand(4).double(),
        "sinks": torch.randn(4).double(),
        "softcap": 3.0,
        "bias": torch.randn(4, 3, 17).double(),
    },
}


@pytest.mark.parametrize("by", ["all_gather", "ring"])
@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("name", DECODED)
def test_a_cache_distributed_over_ranks_equals_one_cache(name: str, layout: Any, by: Any) -> None:
    """Two of 17 keys are on rank 1, none on rank 2; those of the other ranks alternate."""
    options = dict(DECODED[name])
    q, k, v = (
        _layout.restore(torch.randn(2, length, heads, 8, dtype=torch.float64), layout)
        for length, heads in ((options.pop("rows"), 4), (17, 2), (17, 2))
    )
    held = [[*range(5), *range(7, 17, 2)], [5, 6], [], list(range(8, 17, 2))]
    axis = {"bshd": 1, "sbhd": 0, "bhsd": 2}[layout]

    def rank(group: SimulatedGroup) -> tuple[Tensor, Tensor]:
        mine = torch.tensor(held[group.rank], dtype=torch.int64)
        keys = (t.index_select(axis, mine) for t in (k, v))
        cp = undivided.ContextParallel(group)
        return cp.decode(q, *keys, mine, 17, layout=layout, by=by, **options)

    whole = {"mask": masks.causal(align="bottom_right"), **options}
    right = undivided.attention(q, k, v, layout=layout, return_lse=True, backend="reference", **whole)
    results = simulate(4, rank)
    for out, lse in results:
        assert not differences({"out": out, "lse": lse}, dict(zip(("out", "lse"), right, strict=True)))
        assert torch.equal(out, results[0][0]), "the next token must not depend on the rank"


def test_a_zigzag_prefill_and_steps_after_it_are_one_causal_sequence() -> None:
    """Each rank keeps what it prefilled, and rank n % world appends token n: 29 tokens at once, then 6."""
    q, k, v = (torch.randn(1, 35, heads, 16) for heads in (4, 2, 2))

    def rank(group: SimulatedGroup) -> Tensor:
        cp = undivided.ContextParallel(group).bind(29, mask=masks.causal())
        mine = [cp.shard(t[:, :29], "bshd") for t in (q, k, v)]
        first = undivided.attention(*mine, layout="bshd", mask=masks.causal(), context_parallel=cp)
        outs, positions = [cp.unshard(first, "bshd")], cp.positions(of="kv")
        cache = undivided.KVCache(1, 35, 2, 16, dtype=torch.float32)
        cache.append(*mine[1:])
        for n in range(29, 35):
            if n % cp.world == cp.rank:
                cache.append(k[:, n : n + 1], v[:, n : n + 1])
                positions = torch.cat([positions, torch.tensor([n])])
            keys = (t[:, : positions.numel()] for t in (cache.k, cache.v))
            outs.append(cp.decode(q[:, n : n + 1], *keys, positions, n + 1, layout="bshd")[0])
        return torch.cat(outs, 1)

    right = undivided.attention(q, k, v, layout="bshd", mask=masks.causal())
    for out in simulate(3, rank):
        torch.testing.assert_close(out, right)


@pytest.mark.parametrize("world", [3, (2, 2)])
def test_decoding_sends_the_documented_number_of_bytes(world: Any) -> None:
    """With n bytes per partial result: (W - 1) n by all_gather, 2 (W - 1) n / W by ring, for any number of keys."""
    n, strategy = 12 * 6 * (8 + 1) * 4, "ring" if world == 3 else "ring+all_to_all"

    def rank(group: SimulatedGroup) -> list[int]:
        cp, sent = undivided.ContextParallel(group, strategy), []  # type: ignore[arg-type]
        q, k = torch.randn(1, 12, 6, 8), torch.randn(1, 100, 6, 8)
        positions = torch.arange(100) * cp.world + cp.rank
        for by in ("all_gather", "ring"):
            cp.traffic.reset()
            cp.decode(q, k, k, positions, 100 * cp.world, layout="bshd", by=by)  # type: ignore[arg-type]
            sent.append(cp.traffic.bytes_sent)
        return sent

    of_axes = (3,) if world == 3 else world
    gathered, rung = sum(n * (w - 1) for w in of_axes), sum(2 * n * (w - 1) // w for w in of_axes)
    assert simulate(world, rank) == [[gathered, rung]] * (3 if world == 3 else 4)


def test_different_generation_steps_are_an_error_on_each_rank() -> None:
    def rank(group: SimulatedGroup) -> None:
        cp, q, k = undivided.ContextParallel(group), torch.randn(1, 1, 2, 8), torch.randn(1, 4, 2, 8)
        mine = torch.arange(4) * 2 + cp.rank
        with pytest.raises(undivided.InputError, match="kv_len must be the same on every rank, got 8 on rank 0; 9"):
            cp.decode(q, k, k, mine, 8 + cp.rank, layout="bshd")
        with pytest.raises(undivided.InputError if cp.rank else RankError, match="by must be 'all_gather' or 'ring'"):
            cp.decode(q, k, k, mine, 8, layout="bshd", by="rings" if cp.rank else "ring")  # type: ignore[arg-type]

    simulate(2, rank, timeout=20)


def shards(cp: undivided.ContextParallel, length: int, **changes: Any) -> dict[str, Any]:
    """Arguments of a call of one rank."""
    q = cp.bind(length).shard(torch.randn(1, length, 2, 4), "bshd")
    return {"q": q, "k": q, "v": q, "layout": "bshd", "context_parallel": cp.bind(length), **changes}


DIFFERENT: dict[str, Callable[[undivided.ContextParallel], dict[str, Any]]] = {
    "mask": lambda cp: shards(cp, 12, mask=masks.causal() if cp.rank else masks.window(3, 0)),
    "mask-values": lambda cp: shards(cp, 12, mask=masks.lengths([12 - cp.rank])),
    "q": lambda cp: shards(cp, 12 if cp.rank else 15),
    "q-heads": lambda cp: shards(cp, 12, q=torch.randn(1, 4, 2 + 2 * (cp.rank == 2), 4)),
    "scale": lambda cp: shards(cp, 12, scale=0.3 if cp.rank else None),
    "dropout_p": lambda cp: shards(cp, 12, dropout_p=0.5, dropout_seed=cp.rank),
    "requires_grad": lambda cp: shards(cp, 12, v=torch.randn(1, 4, 2, 4, requires_grad=cp.rank == 1)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_arguments_are_an_error_on_each_rank(what: str) -> None:
    def rank(group: SimulatedGroup) -> str:
        with pytest.raises(undivided.InputError, match=f"{what.split('-')[0]} must be the same on every rank"):
            undivided.attention(**DIFFERENT[what](undivided.ContextParallel(group)))
        return "raised"

    assert simulate(3, rank, timeout=20) == ["raised"] * 3


def test_different_strategies_are_an_error_on_each_rank() -> None:
    def rank(group: SimulatedGroup) -> None:
        cp = undivided.ContextParallel(group, "ring" if group.rank else "all_gather")
        with pytest.raises(undivided.InputError, match=r"all_gather on rank 0; ring on ranks 1, 2"):
            undivided.attention(**shards(cp, 12))

    simulate(3, rank, timeout=20)


def test_a_rank_that_refuses_its_arguments_is_an_error_on_the_others() -> None:
    def rank(group: SimulatedGroup) -> str:
        cp = undivided.ContextParallel(group)
        with pytest.raises(undivided.InputError if cp.rank == 1 else RankError) as raised:
            undivided.attention(**shards(cp, 12, scale=float("nan") if cp.rank == 1 else None))
        return str(raised.value)

    texts = simulate(3, rank, timeout=20)
    assert texts[0] == texts[2]
    assert "rank 1: scale must be a finite number" in texts[0]


def test_a_rank_that_dies_is_an_error_on_the_others() -> None:
    told: dict[int, str] = {}

    def rank(group: SimulatedGroup) -> None:
        if group.rank == 2:
            raise ZeroDivisionError
        try:
            undivided.attention(**shards(undivided.ContextParallel(group), 12))
        except RankError as error:
            told[group.rank] = str(error)

    with pytest.raises(ZeroDivisionError):
        simulate(3, rank, timeout=20)
    assert all("rank 2 failed" in told[r] or f"rank {1 - r}" in told[r] for r in (0, 1)), told


def test_a_mask_changed_between_forward_and_backward_is_an_error() -> None:
    def rank(group: SimulatedGroup) -> None:
        cp = undivided.ContextParallel(group).bind(12)
        n = torch.tensor([9])
        q = torch.randn(1, 6, 2, 4, requires_grad=True)
        out = undivided.attention(q, q, q, layout="bshd", mask=masks.lengths(n), context_parallel=cp)
        n.fill_(5)
        with pytest.raises(RuntimeError, match="changed in place"):
            out.sum().backward()

    simulate(2, rank)


def test_create_graph_is_refused_and_not_silently_wrong() -> None:
    def rank(group: SimulatedGroup) -> None:
        q = torch.randn(1, 6, 2, 4, requires_grad=True)
        cp = undivided.ContextParallel(group).bind(12)
        out = undivided.attention(q, q, q, layout="bshd", context_parallel=cp)
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    simulate(2, rank)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "strategy": (lambda: undivided.ContextParallel(rank=0, world=2, strategy="rings"), "strategy must be one of"),  # type: ignore[arg-type]
    "placement": (lambda: undivided.ContextParallel(rank=0, world=2, placement="even"), "placement must be one of"),  # type: ignore[arg-type]
    "rank": (lambda: undivided.ContextParallel(rank=2, world=2), "rank must be given with world"),
    "no-group": (lambda: undivided.ContextParallel(), "group must be a process group"),
    "length": (lambda: undivided.ContextParallel(rank=0, world=2).bind(-1), "q_len must be a number of tokens"),
    "mask": (
        lambda: undivided.ContextParallel(rank=0, world=2).bind(8, mask=masks.lengths([9])),
        "mask must have lengths",
    ),
    "shard-length": (
        lambda: undivided.ContextParallel(rank=0, world=2).bind(8).shard(torch.ones(9), dim=0),
        "tensor must have the 8 tokens that were bound",
    ),
    "not-divisible": (
        lambda: undivided.ContextParallel(rank=0, world=2).shard(torch.ones(9), dim=0),
        "be bound: 9 tokens are not a multiple of 2 ranks",
    ),
    "axis": (lambda: undivided.ContextParallel(rank=0, world=2).shard(torch.ones(8)), "layout must be given"),
    "of": (
        lambda: undivided.ContextParallel(rank=0, world=2).bind(8).shard(torch.ones(8), dim=0, of="k"),  # type: ignore[arg-type]
        "of must be 'q' or 'kv'",
    ),
    "balanced-unbound": (
        lambda: undivided.ContextParallel(rank=0, world=2, placement="balanced").shard(torch.ones(8), dim=0),
        "be bound for placement='balanced'",
    ),
    "attend-without-a-group": (
        lambda: undivided.attention(**shards(undivided.ContextParallel(rank=0, world=2), 8)),
        "context_parallel must have a group to attend with",
    ),
    "not-one": (
        lambda: undivided.attention(*torch.ones(3, 1, 4, 2, 8), layout="bshd", context_parallel=4),  # type: ignore[call-overload]
        "context_parallel must be an undivided.ContextParallel or None",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_before_anything_is_sent(name: str) -> None:
    call, text = WRONG[name]
    with pytest.raises(undivided.InputError, match=text):
        call()


WRONG_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "rows": ({"q": torch.randn(1, 5, 2, 4)}, "q must have rank . of 12 tokens|q must have rank .'s 6 of 12 tokens"),
    "keys": ({"k": torch.randn(1, 7, 2, 4)}, "k must have rank .'s 6 of 12 tokens"),
    "layout": ({"layout": "bsd"}, "layout must be one of"),
    "seed": ({"dropout_p": 0.1}, "dropout_seed must be given under context parallelism"),
    "bias": ({"bias": torch.zeros(2, 12, 12)}, "bias must have 1 or this rank's 6 query rows"),
    "bias-keys": ({"bias": torch.zeros(2, 6, 6)}, "bias must be broadcastable to"),
    "mask": ({"mask": masks.lengths([13])}, "mask must have lengths"),
    "sinks": ({"sinks": torch.zeros(3)}, "sinks must have shape"),
    "pages": ({"pages": torch.zeros(1, 3, dtype=torch.int32)}, "pages must be None under context parallelism"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_wrong_arguments_of_a_call_are_the_callers_errors(name: str) -> None:
    changes, text = WRONG_CALLS[name]

    def rank(group: SimulatedGroup) -> None:
        with pytest.raises(undivided.InputError, match=text):
            undivided.attention(**{**shards(undivided.ContextParallel(group), 12), **changes})

    simulate(2, rank, timeout=20)


def test_axes_of_the_group_must_be_those_of_the_strategy() -> None:
    with pytest.raises(undivided.InputError, match=r"group must have 2 axes \[ring, heads\]"):
        simulate(4, lambda group: undivided.ContextParallel(group, "ring+all_to_all"))
    with pytest.raises(undivided.InputError, match="group must have 1 axis"):
        simulate((2, 2), lambda group: undivided.ContextParallel(group, "ring"))
    with pytest.raises(undivided.InputError, match="world must be a positive number"):
        simulate(0, lambda group: None)


def test_the_helper_everyone_gathers_the_tensors_of_all_ranks() -> None:
    """The helper of these tests returns the tensors in the order of the ranks."""

    def rank(group: SimulatedGroup) -> list[Tensor]:
        return everyone(undivided.ContextParallel(group, "ring+all_to_all"), torch.tensor([float(group.rank)]))

    for found in simulate((2, 3), rank):
        assert torch.cat(found).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_window_of_the_catalogue_is_wrong_if_positions_are_mixed_up() -> None:
    """These tests can fail: with another placement for the result than for the inputs, the result differs."""
    inputs = in_double(get("window-left3"))
    right = alone(inputs, backend="reference")
    shuffled = {name: t.flip(1) if name == "out" else t for name, t in right.items()}
    assert differences(shuffled, right)
