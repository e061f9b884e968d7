"""A few dozen cases of `fuzz_commands`, and the faults that it found; CONTRIBUTING.md describes how to run more."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from fuzz_commands import VALUES, changed_json, command, fuzz

from undivided import InputError, masks
from undivided.cli._mask_words import parse
from undivided.kernels.triton import config
from undivided.selection import measured

UNPARSED = ["\x00", "\ud800", "(" * 300, "-" * 5000 + "1", "causal & " * 3000 + "causal", "window({[]: 1})"]


@pytest.mark.slow
def test_changed_texts_and_files_end_in_a_result_or_one_message() -> None:
    assert fuzz(150, first=1_000_000) == {}


@pytest.mark.parametrize("text", UNPARSED)
def test_text_that_python_cannot_parse_is_no_mask(text: str) -> None:
    with pytest.raises(InputError, match="mask must be made of"):
        parse(text)


def test_a_mask_of_another_size_is_refused_before_it_is_drawn() -> None:
    command("mask", "dense([[True, False], [True, True]])", "--q-len", "4", code=(2,))


def test_intervals_of_a_mask_whose_block_tables_differ_by_head() -> None:
    mask = masks.blocks(2, 2, [[[[0]], [[1]]]])
    assert mask.intervals(2, 4).tolist() == [[[0, 4], [0, 4]]]


def table(**changes: object) -> dict[str, object]:
    run = {"when": "2026-01-01", "machine": "a", "commit": "b", "torch": "c", "report": "d"}
    return {
        "schema": measured.SCHEMA,
        "runs": {"0": run},
        "rates": {"kind": {"1/1": ["0", {"native": 1.0}]}},
        **changes,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"runs": {"0": {"when": [], "machine": "a", "commit": "b", "torch": "c", "report": "d"}}},
        {"rates": {"kind": {"1/1": ["0", {"native": 10**400}]}}},
    ],
    ids=["run", "rate"],
)
def test_a_malformed_table_of_ranks_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps(table()))
    assert measured.read(path)
    path.write_text(json.dumps(table(**changes)))
    command("ranks", "--into", str(path), code=(2,))


@pytest.mark.parametrize(
    "arguments", [["ranks"], ["ranks", "--into"], ["bench", "--markdown"], ["bench", "--from"]], ids=" ".join
)
def test_json_that_is_nested_too_deeply_is_refused(arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    command(*arguments, str(path), code=(2,))


def test_a_table_and_tiles_that_are_nested_too_deeply_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    monkeypatch.setenv("UNDIVIDED_RANKS", str(path))
    with pytest.warns(RuntimeWarning, match="nested too deeply"):
        assert len(measured.tables.__wrapped__()) == 1
    with pytest.warns(RuntimeWarning, match="nested too deeply"):
        assert config._tuned.__wrapped__(path) == {}


@pytest.mark.parametrize("tile", [[128, "x", 4, 3], [128, 64, 4, -1], [128, 64, True, 3], [128, 64, 4, 3, 1]])
def test_malformed_tiles_are_left_out_with_a_warning(tile: list[object], tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({"tiles": {"sm90/forward/16/64": tile}}))
    with pytest.warns(RuntimeWarning, match="the package's own are used"):
        assert config._tuned.__wrapped__(path) == {}


@pytest.mark.parametrize("flag", ["--lengths", "--documents", "--window", "--prefix", "--chunks"])
def test_a_number_beyond_64_bits_is_refused(flag: str) -> None:
    text = "0," + "9" * 20 if flag == "--window" else "9" * 20
    command("explain", flag, text, code=(2,))


def test_a_case_of_the_fuzz_changes_no_value_that_a_later_case_draws() -> None:
    before = repr(VALUES)
    rng = random.Random(0)
    for _ in range(300):
        changed_json(rng, {"a": {"b": [1, {"c": 2}]}})
    assert repr(VALUES) == before
