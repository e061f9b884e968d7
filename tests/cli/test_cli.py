"""The command line: what each command prints, its JSON, its exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command_runs import QUICK, answer, refused, run

import undivided
from undivided import masks
from undivided._units import human
from undivided.cli._mask_words import parse
from undivided.cli._terminal import shaded
from undivided.cli.demo import documents
from undivided.cli.demo.batch import embed
from undivided.kernels import cpu


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One run of the demo, as JSON."""
    return answer(*QUICK, "--rounds", "1", "--out", str(tmp_path_factory.mktemp("demo")))


class TestDemo:
    def test_report_is_green_and_its_counts_are_exact(self, demo: Any) -> None:
        lengths = [document["tokens"] for document in demo["documents"]]
        assert demo["ok"]
        assert len(lengths) == 5
        assert max(lengths) <= 128
        assert demo["tokens"] == {"packed": sum(lengths), "padded": 5 * max(lengths)}
        assert demo["pairs"]["packed"] == sum(n * (n + 1) // 2 for n in lengths)
        assert demo["pairs"]["padded"] == 5 * max(lengths) ** 2
        assert demo["bytes"]["packed"] == sum(lengths) * (8 + 2 + 2 + 8) * 64 * 4
        for path in demo["files"]:
            assert Path(path).read_bytes().startswith(b"\x89PNG")

    def test_every_way_is_checked_before_it_is_timed(self, demo: Any) -> None:
        runs = {run["name"]: run for run in demo["runs"]}
        assert sum(run["ours"] for run in runs.values()) == 5
        poisoned = {name for name, run in runs.items() if run["padding_held_nan"]}
        assert poisoned == {"padded, bshd", "padded, sbhd", "padded, bhsd"}
        for found in runs.values():
            assert set(found["errors"]) == {"out", "dq", "dk", "dv"} == set(demo["budget"])
            assert all(0 < found["errors"][name] <= demo["budget"][name] for name in found["errors"])
        assert {row["name"] for row in demo["times"]} <= set(runs)
        assert demo["times"][0]["ratio"] == 1
        assert demo["decision"]["chosen"]

    def test_fp64_has_a_budget_of_rounding(self) -> None:
        report = answer("demo", "--documents", "2", "--longest", "64", "--rounds", "0", "--dtype", "fp64")
        assert report["ok"]
        assert all(2.3e-16 < budget < 2e-15 for budget in report["budget"].values())

    def test_a_training_step_has_the_same_loss_and_gradients_in_every_format(self, demo: Any) -> None:
        rows = demo["training"]
        assert [row["format"] for row in rows] == ["thd", "sbhd", "bshd"]
        assert all(row["ok"] for row in rows)
        assert all(row["loss_after"] < row["loss"] for row in rows)
        assert len({round(row["loss"], 4) for row in rows}) == 1

    def test_running_documents_as_one_sequence_is_shown_to_be_wrong(self, demo: Any) -> None:
        lengths = [document["tokens"] for document in demo["documents"]]
        crossing = sum(a * b for i, a in enumerate(lengths) for b in lengths[:i])
        assert demo["leak"]["pairs"] == crossing
        assert demo["leak"]["error"] > 100 * demo["budget"]["out"]

    def test_no_speed_is_reported_on_a_red_check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("undivided.cli.commands.demo._budget", lambda plain, dtype: dict.fromkeys(plain, 0.0))
        done = run(*QUICK, "--rounds", "1")
        assert done.exit_code == 1
        assert "did NOT return the same result" in " ".join(done.stdout.split())
        assert "How long" not in done.stdout

    @pytest.mark.parametrize("columns", ["80", "120"])
    def test_what_it_says_fits_the_terminal(self, columns: str) -> None:
        done = run(*QUICK, "--rounds", "1", env={"COLUMNS": columns})
        assert done.exit_code == 0, done.output
        assert max(map(len, done.stdout.splitlines())) <= int(columns)
        titles = "The documents, Do they agree?, What packing saves, Which kernel, How long, What you saw"
        for title in titles.split(", "):
            assert title in done.stdout

    def test_low_precision_has_its_own_budget(self) -> None:
        report = answer(*QUICK, "--dtype", "bf16")
        assert report["ok"]
        assert report["times"] == []
        assert report["budget"]["out"] > 1e-3


def test_documents_are_the_same_each_time_and_spread_in_length() -> None:
    found = documents.collect(8, 48, 512)
    assert found == documents.collect(8, 48, 512)
    assert len({document.name for document in found}) == 8
    lengths = [len(document) for document in found]
    assert min(lengths) < 128
    assert max(lengths) > 256


@pytest.mark.parametrize("layout", ["thd", "bshd", "sbhd", "bhsd"])
def test_a_batch_is_packed_again_as_it_was(layout: str) -> None:
    batch = embed(documents.collect(4, 48, 128), torch.float32)
    arranged = batch.arrange(batch.k, layout, fill=float("nan"))
    assert batch.pack(arranged, layout).equal(batch.k)
    assert arranged.isnan().sum() == batch.padding(arranged, layout).numel()


class TestDoctor:
    def test_json_holds_machine_backends_environment_and_check(self) -> None:
        found = answer("doctor")
        assert set(found) == {"machine", "backends", "ranks", "environment", "self_check"}
        assert found["self_check"]["ok"]
        assert {row["name"] for row in found["backends"]} == {row.name for row in undivided.backends()}
        for row in found["backends"]:
            assert row["available"] or row["why_not"]

    def test_says_which_level_of_the_native_kernel_runs(self) -> None:
        library = cpu.load()
        level = "not loaded" if isinstance(library, str) else f"level {library.level}"
        assert level in answer("doctor")["machine"]["native kernel"]

    def test_text_names_every_backend(self) -> None:
        done = run("doctor")
        assert done.exit_code == 0
        for row in undivided.backends():
            assert row.name in done.stdout

    def test_variables_in_force_are_explained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
        monkeypatch.setenv("UNDIVIDED_SPELLING", "1")
        entries = {entry["name"]: entry["meaning"] for entry in answer("doctor")["environment"]}
        assert "fused" in entries["NVTE_FUSED_ATTN"]
        assert "ignored" in entries["UNDIVIDED_SPELLING"]

    def test_a_variable_that_makes_no_sense_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UNDIVIDED_BACKENDS", "warp_drive")
        assert "warp_drive" in refused("doctor")


class TestExplain:
    OLD = ("explain", "--q", "48x16534x18x128", "--dtype", "bf16", "--device", "a100", "--cudnn", "8.9.7")

    def test_reasons_state_value_and_limit(self) -> None:
        found = answer(*self.OLD, "--mask", "causal")
        reasons = {row["name"]: row["reasons"] for row in found["backends"]}
        assert "query length 16534 is not a multiple of 64 (cuDNN 8.9.7; any length from 9.0)" in reasons["cudnn"]
        assert found["chosen"] not in (None, "cudnn")

    def test_exit_code_is_1_where_nothing_can_run(self) -> None:
        done = run(*self.OLD, "--backend", "cudnn")
        assert done.exit_code == 1
        assert "no backend can run this problem" in done.stdout
        assert "never falls back" in done.stdout

    def test_packed_documents_with_every_extra(self) -> None:
        words = "--layout thd --q 576x8x64 --kv-heads 2 --documents 64,512 --window 256,0 --softcap 30 --sinks --alibi"
        found = answer("explain", *words.split(), "--dropout", "0.1", "--grad", "--lse", "--bias", "1h11")
        for word in ("documents", "window(256, 0)", "softcap", "sinks", "alibi", "dropout", "gqa", "bias_grad", "lse"):
            assert word in found["problem"]
        assert found["chosen"] == "native"

    def test_packages_of_the_described_machine(self) -> None:
        found = answer(*self.OLD, "--package", "flash_attn=2.8.4")
        assert found["chosen"] == "flash_attn"

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            pytest.param(["--q", "3x4"], "BxSxHxD", id="too-few-sizes"),
            pytest.param(["--layout", "thd", "--q", "3x4xq"], "TxHxD", id="no-numbers"),
            pytest.param(["--device", "abacus"], "a100", id="unknown-device"),
            pytest.param(["--cudnn", "9.1"], "--device", id="cudnn-of-what"),
            pytest.param(["--device", "a100", "--package", "flash_attn"], "NAME=VERSION", id="package-without-version"),
            pytest.param(["--device", "a100", "--package", "left_pad=1"], "left_pad", id="unknown-package"),
            pytest.param(["--kv", "2x512x8x64", "--mask", "causal"], "bottom_right", id="alignment-not-given"),
            pytest.param(["--align", "sideways"], "sideways", id="no-such-alignment"),
            pytest.param(["--mask", "__import__('os')"], "causal", id="mask-is-not-evaluated"),
            pytest.param(["--window", "3"], "LEFT,RIGHT", id="one-sided-window"),
            pytest.param(["--documents", "3,x"], "whole numbers", id="documents-not-numbers"),
            pytest.param(["--layout", "thd", "--q", "9x8x64"], "documents", id="thd-without-documents"),
            pytest.param(["--bias", "hq"], "bhqk", id="bias-axes"),
            pytest.param(["--backend", "warp_drive"], "warp_drive", id="unknown-backend"),
            pytest.param(["--softcap", "-1"], "softcap", id="negative-softcap"),
        ],
    )
    def test_wrong_input_is_one_message_and_exit_code_2(self, arguments: list[str], expected: str) -> None:
        assert expected in refused("explain", *arguments)


class TestVerify:
    SMALL = ("verify", "--q", "2x17x4x16", "--kv-heads", "2", "--mask", "causal", "--lengths", "17,9")

    def test_report_is_green(self) -> None:
        report = answer(*self.SMALL, "--backend", "reference")
        assert report["ok"]
        assert {"out", "dq", "dk", "dv"} <= {row["quantity"] for row in report["rows"] if row["backend"] == "reference"}

    def test_text_is_the_report(self) -> None:
        done = run(*self.SMALL, "--no-gradients", "--backend", "reference")
        assert done.exit_code == 0
        assert "reference" in done.stdout
        assert "dq" not in done.stdout

    def test_text_fits_the_terminal(self) -> None:
        done = run(*self.SMALL, env={"COLUMNS": "80"})
        lines = done.stdout.splitlines()
        assert max(map(len, lines)) <= 80
        assert " ".join(done.stdout.split()).count("refused: device=cpu (runs on cuda)") == 4

    def test_red_report_has_exit_code_1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("undivided.verification.Report.ok", False)
        assert run(*self.SMALL, "--backend", "reference").exit_code == 1

    def test_a_device_that_is_not_here_is_refused(self) -> None:
        assert "tpu" in refused("verify", "--device", "tpu")


class TestMask:
    def test_small_mask_is_drawn_pair_by_pair(self) -> None:
        done = run("mask", "causal() & documents([0, 2, 3])")
        assert done.exit_code == 0
        assert "0 ■ · ·\n1 ■ ■ ·\n2 · · ■" in done.stdout
        assert "4 pairs" in done.stdout

    def test_json_holds_the_ranges(self) -> None:
        found = answer("mask", "window(1, 0) | prefix(1)", "--q-len", "4")
        assert found["pairs"] == 9
        assert found["ranges"][0][3] == [0, 1, 2, 4]

    def test_flags_and_expression_are_intersected(self) -> None:
        found = answer("mask", "causal", "--window", "0,-1", "--q-len", "5")
        assert found["pairs"] == 5

    def test_large_mask_is_shaded_and_saved(self, tmp_path: Path) -> None:
        done = run("mask", "--mask", "causal", "--q-len", "4000", "--out", str(tmp_path / "causal.png"))
        assert done.exit_code == 0
        assert "█" in done.stdout
        assert (tmp_path / "causal.png").read_bytes().startswith(b"\x89PNG")

    def test_alignment_that_matters_is_required(self) -> None:
        assert "align" in refused("mask", "causal", "--q-len", "2", "--kv-len", "5")
        assert answer("mask", "causal", "--align", "bottom_right", "--q-len", "2", "--kv-len", "5")["pairs"] == 9

    def test_a_mask_is_required(self) -> None:
        assert "HINT" in refused("mask")

    @pytest.mark.parametrize(
        ("given", "q_len", "kv_len", "pairs"),
        [
            ("--lengths 3,5", 5, 5, 34),
            ("--lengths 3,5 --q-len 5", 5, 5, 34),
            ("--lengths 3,5 --kv-len 8", 5, 8, 40),
            ("--lengths 3,5 --kv-len 8 --q-len 5", 5, 8, 40),
            ("--lengths 3,5 --q-len 1", 1, 5, 8),
            ("tree([-1,0,0]) --kv-len 5", 3, 5, 11),
            ("blocks(2,2,[[0,-1],[1,-1]]) --kv-len 6", 4, 6, 8),
        ],
    )
    def test_lengths_are_those_of_queries_only_if_there_are_as_many(
        self, given: str, q_len: int, kv_len: int, pairs: int
    ) -> None:
        """The same sizes gave another mask if they were not written out."""
        found = answer("mask", *given.split())
        assert (found["q_len"], found["kv_len"], found["pairs"]) == (q_len, kv_len, pairs)

    def test_a_misspelt_mask_gives_the_name_that_is_meant(self) -> None:
        assert "did you mean 'sinks'?" in refused("mask", "window(3, 0) | sink(1)")


@pytest.mark.parametrize(
    "text", ["causal", "causal()", "window(2, 0) | prefix(1)", "(causal() | prefix(3)) & lengths([2, 5], q=[2, 5])"]
)
def test_mask_text_means_what_python_means(text: str) -> None:
    meant = eval(text if text != "causal" else "causal()", vars(masks).copy())
    assert parse(text).to_dense(2, 1, 5, 5).equal(meant.to_dense(2, 1, 5, 5))


@pytest.mark.parametrize("text", ["", "causal(", "foo()", "causal() + causal()", "causal", "window(1)", "window(x, 0)"])
def test_other_text_is_refused(text: str) -> None:
    if text == "causal":
        return
    with pytest.raises(undivided.InputError):
        parse(text)


def test_a_shaded_mask_shows_every_pair_that_is_there() -> None:
    picture = shaded(masks.causal().normal_form(1, 1, 640, 640, "cpu"), 8, 4).splitlines()
    assert len(picture) == 4
    assert picture[0][-1] == " "
    assert picture[-1].startswith("█")


NUMBERS = [(0, "0"), (999, "999"), (56_623_104, "56.6 M"), (1500, "1.5 k"), (999_700, "1 M"), (999_400, "999 k")]


@pytest.mark.parametrize(("count", "text"), NUMBERS)
def test_human_numbers(count: int, text: str) -> None:
    assert human(count) == text
