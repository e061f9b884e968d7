"""Plans: their counts equal those of runs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from context_parallel_check import MASKS, PLACEMENTS
from typer.testing import CliRunner

import undivided
from undivided import masks
from undivided.cli._app import application
from undivided.context_parallel import Traffic, plan, simulate
from undivided.context_parallel.exchange.simulate import SimulatedGroup
from undivided.masks import Mask

WORLDS: dict[str, int | tuple[int, int]] = {"ring": 4, "all_gather": 4, "all_to_all": 4, "ring+all_to_all": (2, 2)}
EXACT = {name: mask for name, mask in MASKS.items() if "31-keys" not in name}


def counted(
    strategy: str, placement: str, mask: Mask | None, heads: tuple[int, int], batch: int
) -> list[tuple[int, ...]]:
    """(pairs, bytes forward, bytes backward) of every rank in a run of 23 tokens, head sizes 6 and 4, fp32."""

    def rank(group: SimulatedGroup) -> tuple[int, ...]:
        cp = undivided.ContextParallel(group, strategy, placement).bind(23, mask=mask)  # type: ignore[arg-type]
        return run(cp, mask, heads, batch)

    return simulate(WORLDS[strategy], rank)


def run(cp: undivided.ContextParallel, mask: Mask | None, heads: tuple[int, int], batch: int) -> tuple[int, ...]:
    """(pairs, bytes forward, bytes backward) of this rank."""
    rows = cp.positions(within_documents=False).numel()
    q, k, v = (
        torch.randn(batch, rows, h, d, requires_grad=True) for h, d in ((heads[0], 6), (heads[1], 6), (heads[1], 4))
    )
    out = undivided.attention(q, k, v, layout="bshd", mask=mask, context_parallel=cp)
    forward: Traffic = cp.traffic
    pairs, sent = forward.pairs, forward.bytes_sent
    out.sum().backward()
    return pairs, sent, cp.traffic.bytes_sent - sent


@pytest.mark.parametrize("strategy", WORLDS)
@pytest.mark.parametrize("name", EXACT)
def test_counts_are_those_of_a_run(name: str, strategy: str) -> None:
    turn = list(EXACT).index(name) + list(WORLDS).index(strategy)
    # `bind` cannot know the heads that a predicate tells apart, so that "balanced" would be another placement
    placement = "zigzag" if name == "predicate" else PLACEMENTS[turn % 3]
    heads = ((4, 4), (6, 2), (4, 2))[turn // 3 % 3]
    made = EXACT[name]
    mask = None if made is None else made()
    batch = 1 if name.startswith("documents") else 2
    (option,) = plan(
        23,
        heads[0],
        6,
        mask,
        4,
        strategy,
        placement,
        kv_heads=heads[1],
        value_dim=4,
        batch=batch,
        dtype=torch.float32,  # type: ignore[arg-type]
    ).options
    runs = counted(strategy, placement, mask, heads, batch)
    assert list(zip(option.pairs.tolist(), option.forward.tolist(), option.backward.tolist(), strict=True)) == runs


def test_cross_attention_is_counted_too() -> None:
    mask = masks.window(5, 2, align="bottom_right")

    def rank(group: SimulatedGroup) -> int:
        cp = undivided.ContextParallel(group, "ring", "contiguous").bind(9, 30, mask)
        q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 10, 2, 8)
        undivided.attention(q, k, k, layout="bshd", mask=mask, context_parallel=cp)
        return cp.traffic.bytes_sent

    found = plan(9, 2, 8, mask, 3, "ring", "contiguous", kv_len=30, dtype=torch.float32)
    assert found.best.forward.tolist() == simulate(3, rank)


def test_all_pairs_are_counted_once_by_every_option() -> None:
    found = plan(1000, 12, 64, masks.causal(), 8, kv_heads=4)
    assert len(found.options) == 12
    assert {int(option.pairs.sum()) for option in found.options} == {12 * 1000 * 1001 // 2}


def test_a_million_tokens_on_a_thousand_ranks_are_planned_from_ranges() -> None:
    """Under a window a rank needs 4,095 keys of its neighbours, whatever the length; it has 1,024 of its own."""
    found = plan(1 << 20, 8, 128, masks.window(4095, 0), 1024, "ring", "contiguous", kv_heads=1)
    sent = found.best.forward
    assert sent[:-4].unique().tolist() == [4095 * 2 * 128 * 2]
    keys = sent // (2 * 128 * 2)
    assert keys[-4:].tolist() == [1024 * 3, 1024 * 2, 1024, 0], "the last ranks have fewer after them"
    assert found.best.balance < 1.01


def test_recommends_with_a_reason() -> None:
    causal = plan(65536, 32, 128, masks.causal(), 8, kv_heads=8)
    assert causal.best.balance <= 1.02
    assert str(causal).endswith(f"Recommended: {causal.reason}")
    assert causal.best.seconds <= 1.01 * min(option.seconds for option in causal.options)
    window = plan(1 << 18, 32, 128, masks.window(255, 0), 8, kv_heads=8)
    assert window.best.strategy in ("ring", "all_gather")
    assert window.best.placement in ("contiguous", "balanced"), "neighbours only"
    assert int(window.best.forward.max()) == 255 * 8 * 2 * 128 * 2


def test_a_mesh_of_two_axes_is_omitted_if_impossible() -> None:
    prime = plan(64, 4, 8, None, 7)
    assert {option.strategy for option in prime.options} == {"ring", "all_gather", "all_to_all"}
    with pytest.raises(undivided.InputError, match="strategy must have a mesh for 7 ranks and 4 key heads"):
        plan(64, 4, 8, None, 7, "ring+all_to_all")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 4, 8), "seq_len must be a positive number, got 0"),
        ((8, 4, 8, None, -1), "world must be a positive number, got -1"),
        ((8, 4, 8, None, 2, "rings"), "strategy must be one of"),
        ((8, 4, 8, None, 2, "ring", "even"), "placement must be one of"),
        ((8, 4, 8, masks.lengths([9])), "mask must have lengths"),
    ],
    ids=["length", "world", "strategy", "placement", "mask"],
)
def test_bad_sizes_are_refused(arguments: tuple[object, ...], text: str) -> None:
    with pytest.raises(undivided.InputError, match=text):
        plan(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"value_dim": 0}, "value_dim must be a positive number, got 0"),
        ({"flops": 0}, "flops must be a positive number, got 0"),
        ({"bandwidth": float("nan")}, "bandwidth must be a positive number, got nan"),
        ({"mask": 3}, "mask must be an undivided.masks.Mask or None, got int"),
        ({"dtype": "bfloat16"}, "dtype must be a torch.dtype, got 'bfloat16'"),
    ],
    ids=["value-size", "flops", "bandwidth", "mask", "dtype"],
)
def test_bad_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(undivided.InputError, match=text):
        plan(8, 4, 8, **options)


def test_key_heads_must_divide_heads() -> None:
    with pytest.raises(undivided.InputError, match=r"kv_heads must divide heads \(4\), got 3"):
        plan(8, 4, 8, kv_heads=3)


class TestCommand:
    """``undivided plan``."""

    def test_json_holds_every_rank(self) -> None:
        ranks = ["--world", "4", "--heads", "2", "--head-dim", "8", "--strategy", "ring", "--placement", "contiguous"]
        found = json.loads(command("256", "--mask", "window(7, 0)", *ranks, "--json", "--by-rank"))
        (option,) = found["options"]
        assert option["forward"] == [7 * 2 * 2 * 8 * 2] * 3 + [0]
        assert sum(option["pairs"]) == 2 * (256 * 8 - 28)

    def test_the_table_ends_with_the_recommendation(self) -> None:
        text = command("4096", "--mask", "causal()", "--world", "8", "--kv-heads", "8", "--by-rank")
        assert "Recommended: " in text
        assert all(name in text for name in ("ring+all_to_all", "all_gather", "zigzag", "balanced", "sent backward"))

    def test_the_table_of_a_thousand_ranks_fits_in_eighty_columns(self) -> None:
        """Cells that wrap or are cut cannot be compared."""
        text = command("65536", "--mask", "causal()", "--world", "1024", "--kv-heads", "8", columns=80)
        table = text[text.index("strategy") :].splitlines()[:13]
        assert "…" not in text
        assert all(len(line) <= 80 and line.split()[0] in ("strategy", *WORLDS) for line in table), text

    def test_wrong_arguments_are_refused(self) -> None:
        assert "heads must be a positive number" in command("64", "--heads", "0", code=2)


def command(*arguments: str, code: int = 0, columns: int = 120) -> str:
    done = CliRunner().invoke(application("plan"), ["plan", *arguments], env={"COLUMNS": str(columns), "NO_COLOR": "1"})
    assert done.exit_code == code, done.output
    return done.output
