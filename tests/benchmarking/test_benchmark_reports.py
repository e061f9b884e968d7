"""Reports of benchmarks, and the command."""

from __future__ import annotations

import errno
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_benchmarks import QUIET, hurried, tiny
from typer.testing import CliRunner

import undivided
from undivided import benchmarking, masks
from undivided._units import duration
from undivided.benchmarking import competitors, memory, peak, suites
from undivided.benchmarking.catalogue import Goal
from undivided.cli._app import application
from undivided.cli.commands import bench


@pytest.fixture(scope="module")
def small_report() -> dict[str, Any]:
    """A report of one problem of every suite, in no time: small sizes, a machine that is not asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak, "arithmetic_probe", lambda dtype, device, clock: QUIET)
        patch.setattr(peak, "read_probe", lambda size, device, clock: QUIET)
        patch.setattr(peak, "witness_call", lambda: None)
        patch.setattr(
            memory,
            "memory",
            lambda lengths, step: [
                {
                    "tokens": 4096,
                    "dtype": "float32",
                    "backend": "native",
                    "bytes": 5 << 20,
                    "bytes_a_token": 1280.0,
                    "tensors": 4 << 20,
                    "error": 1e-7,
                    "budget": 3e-7,
                },
                {
                    "tokens": 16384,
                    "dtype": "float32",
                    "backend": "native",
                    "bytes": 21 << 20,
                    "bytes_a_token": 1344.0,
                    "tensors": 16 << 20,
                    "error": 1e-7,
                    "budget": 3e-7,
                    "growth": 1.05,
                    "met": True,
                },
            ],
        )
        patch.setattr(suites, "_OVERHEAD", {True: (1, 1), False: (1, 1)})
        goal = Goal(fraction=1e9, faster=(("sdpa", 1e-9),))
        single = (
            tiny(goal=goal),
            tiny(name="documents", layout="thd", mask=lambda: masks.documents([0, 9, 24])),
            replace(tiny(name="decode", q_len=1, kv_len=24, reads=True), suite="decode"),
        )
        small = (replace(tiny(name="b1", goal=Goal(allowance=(1e-9, 1e-9))), suite="small"),)
        plan = benchmarking.Plan(single, (small,), overhead=True, memory=True, quick=True)
        steps: list[str] = []
        report = benchmarking.execute(plan, hurried(), threads=1, step=steps.append)
        assert len(steps) == plan.steps - 2, "the memory's own steps are faked away"
    return report


@pytest.mark.usefixtures("quiet")
def test_an_interrupted_run_keeps_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = benchmarking.Plan((tiny(), tiny(name="second")), (), overhead=True, memory=False, quick=True)

    def interrupt(name: str) -> None:
        if "second" in name:
            raise KeyboardInterrupt

    report = benchmarking.execute(plan, hurried(), step=interrupt)
    assert report["interrupted"]
    assert [case["name"] for case in report["cases"]] == ["fp32-tiny"]
    assert "interrupted" in benchmarking.markdown(report).splitlines()[0]


class TestReport:
    def test_json_holds_machine_commit_and_settings(self, small_report: dict[str, Any]) -> None:
        assert json.loads(json.dumps(small_report, allow_nan=False)) == json.loads(json.dumps(small_report))
        assert small_report["schema"] == suites.SCHEMA
        machine = small_report["machine"]
        assert {"processor", "isa", "native", "threads", "torch", "UNDIVIDED_ISA", "onnxruntime", "cores"} <= set(
            machine
        )
        assert machine["threads"] == 1
        assert small_report["commit"] is None or len(small_report["commit"]) >= 7

    def test_every_case_has_its_problem_and_how_it_was_measured(self, small_report: dict[str, Any]) -> None:
        for case in small_report["cases"]:
            assert {
                "suite",
                "name",
                "problem",
                "operations",
                "bytes",
                "turns",
                "rate",
                "entries",
                "absent",
                "goals",
            } <= set(case)
            assert {"contended", "attempts"} <= set(case["rate"])
            for entry in case["entries"]:
                assert entry["ok"], (case["name"], entry)
                assert {"name", "label", "ok", "errors", "seconds", "per_second", "of_ours"} <= set(entry)

    def test_tables_show_every_case_once(self, small_report: dict[str, Any]) -> None:
        found = {table.title: table for table in benchmarking.tables(small_report)}
        assert list(found) == ["Forward", "Decoding", "Small problems", "Overhead of a call", "Memory"]
        for table in found.values():
            assert all(len(row) == len(table.columns) for row in table.rows)
        assert [row[0].text for row in found["Forward"].rows] == ["fp32-tiny", "fp32-documents"]
        assert found["Decoding"].columns[:3] == ("case", "time", "reads")
        assert found["Forward"].columns == ("case", "time", "peak", "sdpa", "math", "goal")

    def test_products_and_reads_in_one_table_have_their_own_units(self, small_report: dict[str, Any]) -> None:
        by_suite = {case["suite"]: {**case, "suite": "serving"} for case in small_report["cases"]}
        reads = {**by_suite["decode"], "rate": {**by_suite["decode"]["rate"], "what": "a read", "unit": "B/s"}}
        serving = benchmarking.tables({**small_report, "cases": [by_suite["forward"], reads]})[0]
        assert serving.columns[2] == "peak"
        assert serving.notes[1] == "Peaks: a rate 1 GFLOP/s, a read 1 GB/s."

    def test_a_goal_that_is_missed_says_by_how_much(self, small_report: dict[str, Any]) -> None:
        goal = benchmarking.tables(small_report)[0].rows[0][-1]
        assert goal.tone == "bad"
        assert "peak -100 %" in goal.text
        assert "x sdpa met" in goal.text

    def test_markdown_is_the_same_tables(self, small_report: dict[str, Any]) -> None:
        text = benchmarking.markdown(small_report)
        lines = text.splitlines()
        assert ", 1 thread," in lines[0]
        assert text.endswith("\n")
        for table in benchmarking.tables(small_report):
            start = lines.index(f"**{table.title}**") + 2
            rows = lines[start : start + 2 + len(table.rows)]
            assert all(row.count(" | ") == len(table.columns) - 1 for row in rows)
            assert rows[1].count("--:") == len(table.numbers)

    def test_a_contended_case_is_marked(self, small_report: dict[str, Any]) -> None:
        copy = json.loads(json.dumps(small_report))
        copy["cases"][0]["rate"]["contended"] = True
        table = benchmarking.tables(copy)[0]
        assert table.rows[0][0].text.endswith("~")
        assert any(note.startswith("~") for note in table.notes)

    def test_the_command_explains_the_mark_once(
        self, small_report: dict[str, Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        copy = json.loads(json.dumps(small_report))
        for case in copy["cases"]:
            case["rate"]["contended"] = True
        marked = {table.title for table in benchmarking.tables(copy) if table.rows[0][0].text.endswith(" ~")}
        assert len(marked) == 3, "forward, decode and small"
        bench._show(copy)
        text = capsys.readouterr().out
        assert text.count("~: other load on the machine disturbed every attempt") == 1

    def test_a_wrong_competitor_has_a_word_where_its_figure_would_be(self, small_report: dict[str, Any]) -> None:
        copy = json.loads(json.dumps(small_report))
        for entry in copy["cases"][0]["entries"]:
            if entry["name"] == "sdpa":
                entry["ok"] = False
                for key in ("seconds", "per_second", "of_ours", "fraction"):
                    del entry[key]
        row = benchmarking.tables(copy)[0].rows[0]
        assert [cell.text for cell in row].count("WRONG") == 1

    @pytest.mark.parametrize("bad", [{}, {"schema": 0}, []], ids=["empty", "old", "list"])
    def test_what_is_no_report_is_refused(self, bad: Any) -> None:
        with pytest.raises(undivided.InputError, match="schema"):
            benchmarking.tables(bad)

    @pytest.mark.parametrize(
        ("seconds", "text"), [(2.5, "2.5 s"), (0.00123, "1.23 ms"), (4e-6, "4 us"), (0.9997, "1 s"), (0.9994, "999 ms")]
    )
    def test_spans(self, seconds: float, text: str) -> None:
        assert duration(seconds) == text


class TestMemory:
    def test_growth_is_relative_to_the_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fake(command: list[str], **rest: Any) -> Any:
            tokens = int(command[-2])
            row = {"tokens": tokens, "bytes": 1000 * tokens if tokens < 60 else 30 * tokens**2}
            return type("Done", (), {"returncode": 0, "stdout": json.dumps(row), "stderr": ""})

        monkeypatch.setattr("undivided.benchmarking.memory.subprocess.run", fake)
        rows = memory.memory((20, 40, 80))
        assert [row.get("met") for row in rows] == [None, True, False]

    def test_a_process_that_fails_ends_it(self) -> None:
        with pytest.raises(RuntimeError, match="no_such_dtype"):
            memory.memory((16,), "no_such_dtype")

    @pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read as Linux counts it")
    def test_a_short_sequence_is_measured_in_a_process_of_its_own(self) -> None:
        (row,) = memory.memory((2048,))
        assert row["error"] <= row["budget"]
        assert row["tensors"] == 4 * 2048 * memory.HEAD_SIZE * 4
        assert row["tensors"] <= row["bytes"] < 2048**2 * 4, "less than one matrix of scores"


def command(*arguments: str) -> Any:
    return CliRunner().invoke(
        application("bench"), ["bench", *arguments], env={"COLUMNS": "120"}, catch_exceptions=False
    )


@pytest.mark.usefixtures("quiet")
class TestCommand:
    SMALL = ("--suite", "small", "--filter", "small/fp32-b1-h1-1-d32", "--dtype", "fp32")

    def test_json_goes_to_a_file_and_its_tables_to_the_terminal(self, tmp_path: Path) -> None:
        path = tmp_path / "found" / "here.json"
        done = command(*self.SMALL, "--quick", "--suite", "small", "--filter", "fp32-b1-h8-1-d64", "--json", str(path))
        assert done.exit_code == 0, done.output
        assert "Small problems" in done.stdout
        written = json.loads(path.read_text())
        assert [case["name"] for case in written["cases"]] == ["fp32-b1-h8-1-d64", "fp32-b1-h8-1-d64-backward"]
        shown = command("--markdown", str(path))
        assert shown.exit_code == 0
        assert shown.stdout == benchmarking.markdown(written)

    def test_json_goes_to_stdout(self) -> None:
        done = command("--quick", "--suite", "small", "--filter", "fp32-b1-h8-1-d64", "--json", "-", "--threads", "1")
        assert json.loads(done.stdout)["machine"]["threads"] == 1

    def test_a_report_that_cannot_be_written_is_shown(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def fail(path: Path, text: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        path = tmp_path / "report.json"
        path.write_text("old")
        monkeypatch.setattr("undivided.cli.commands.bench.replace_text", fail)
        words = ("--quick", "--suite", "small", "--filter", "fp32-b1-h8-1-d64", "--threads", "1", "--json", str(path))
        done = command(*words)
        assert done.exit_code == 2
        assert "Small problems" in done.stdout
        assert f"{path} (No space left on device)" in " ".join(done.stderr.split())
        assert path.read_text() == "old"

    def test_exit_code_is_1_where_the_library_is_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attention = competitors.attention
        monkeypatch.setattr(competitors, "attention", lambda *t, **kw: 1.01 * attention(*t, **kw))
        done = command("--quick", "--suite", "small", "--filter", "fp32-b1-h8-1-d64")
        assert done.exit_code == 1

    def test_nothing_is_timed_where_the_overhead_is_red(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Red:
            ok = False

        monkeypatch.setattr("undivided.benchmarking.overhead.verify", lambda *tensors, **arguments: Red())
        done = command("--suite", "overhead", "--quick")
        assert done.exit_code == 1
        assert "verification failed" in done.stderr

    def test_the_overhead_names_its_unit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(suites, "_OVERHEAD", {True: (1, 1)})
        done = command("--suite", "overhead", "--quick")
        assert done.exit_code == 0
        assert "microseconds" in done.stdout

    def test_processor_time_is_named_in_the_report_and_above_its_tables(self) -> None:
        words = ("--quick", "--suite", "small", "--filter", "fp32-b1-h8-1-d64", "--threads", "1", "--processor-time")
        report = json.loads(command(*words, "--json", "-").stdout)
        assert report["settings"]["clock"] == "processor time"
        assert "processor time" in benchmarking.markdown(report).splitlines()[0]

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["--suite", "speed"], "forward"),
            (["--processor-time", "--threads", "2"], "for one thread of a CPU"),
            (["--dtype", "fp8"], "bf16"),
            (["--competitor", "abacus"], "onnxruntime"),
            (["--backend", "warp_drive", "--quick", "--suite", "decode", "--filter", "bf16-bhsd-batch1"], "warp_drive"),
            (["--filter", "nothing like this"], "forward/bf16"),
            (["--markdown", "no_such_file.json"], "no_such_file.json"),
            (["--device", "cuda"], "no CUDA device"),
        ],
        ids=["suite", "processor-time", "dtype", "competitor", "backend", "filter", "file", "device"],
    )
    def test_wrong_input_is_one_message_and_exit_code_2(
        self, arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        done = command(*arguments)
        assert done.exit_code == 2
        assert expected in done.stderr
        assert "Traceback" not in done.output
