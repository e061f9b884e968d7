"""What commands print: long sequences, tables, streams, files; and flags that are refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked_processes
import pytest
from command_runs import QUICK, answer, command_line, refused, run
from largest import Largest

import undivided


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One run of the demo, as JSON."""
    return answer(*QUICK, "--rounds", "1", "--out", str(tmp_path_factory.mktemp("demo")))


class TestLongSequences:
    @pytest.mark.parametrize("length", [100_000, 1_000_000])
    @pytest.mark.parametrize("words", ["causal", "(window(99, 0) | prefix(3)) & (window(9, 0) | prefix(7))"])
    def test_pairs_are_counted_without_a_dense_mask(self, words: str, length: int) -> None:
        """The command built every pair to count them, and was killed."""
        with Largest() as largest:
            done = run("mask", words, "--q-len", str(length))
        assert done.exit_code == 0, done.output
        pairs = length * (length + 1) // 2 if words == "causal" else 13 * length + 285
        assert f"{pairs:,} pairs allowed" in done.stdout
        assert largest.elements <= 10 * length

    def test_rows_that_no_memory_holds_are_refused(self) -> None:
        assert "batch * queries must be at most 16777216" in refused("mask", "causal", "--q-len", "99999999999")


def whole_words(text: str) -> set[str]:
    return set(re.findall(r"[\w./+-]{4,}", text))


COMMANDS = {
    "ranks": ("ranks", "--filter", "forward/128"),
    "plan": ("plan", "65536", "--mask", "causal", "--by-rank"),
    "doctor": ("doctor",),
    "explain": ("explain", "--q", "48x16534x18x128", "--dtype", "bf16", "--device", "a100", "--cudnn", "8.9.7"),
    "diagnose": ("diagnose", "No valid execution plans built"),
    "diagnose-list": ("diagnose", "--list"),
}


class TestTables:
    """Words were cut at the edge of a column, or folded in their middle."""

    @pytest.mark.parametrize("name", COMMANDS)
    @pytest.mark.parametrize("columns", ["80", "200"])
    def test_no_word_is_cut(self, name: str, columns: str) -> None:
        whole = whole_words(run(*COMMANDS[name], env={"COLUMNS": ""}).stdout)
        narrow = run(*COMMANDS[name], env={"COLUMNS": columns}).stdout
        assert "…" not in narrow
        assert whole <= whole_words(narrow) | {word for word in whole if len(word) > 60}

    def test_a_terminal_too_narrow_for_columns_gets_a_block_for_each_row(self) -> None:
        narrow = run(*COMMANDS["plan"], env={"COLUMNS": "40"}).stdout
        assert max(map(len, narrow.splitlines())) <= 40
        assert "  ring\n    placement: zigzag\n    mesh: 8x1\n" in narrow

    def test_the_overhead_table_is_whole_at_80_columns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        row = {
            "problem": "8 tokens, recording for the backward",
            "call": 1234.5,
            "backend_alone": 1123.4,
            "sdpa": 8.4,
            "above_backend": 111.1,
        }
        study = {"turns": 31, "calls": 200, "budget_microseconds": 15.0, "problems": [row]}
        monkeypatch.setattr("undivided.benchmarking.suites._overhead", lambda *given: study)
        out = run("bench", "--suite", "overhead", env={"COLUMNS": "80"}).stdout
        assert max(map(len, out.splitlines())) <= 80
        for word in (
            "backend alone",
            "overhead",
            "torch SDPA",
            "8 tokens, recording for the backward",
            "1234.5",
            "1123.4",
        ):
            assert word in out

    def test_without_a_terminal_nothing_is_wrapped(self) -> None:
        text = run("diagnose", "No valid execution plans built", env={"COLUMNS": ""}).stdout
        assert max(map(len, text.splitlines())) > 200
        assert not any(line.endswith(" ") for line in text.splitlines())


class TestStreams:
    @pytest.mark.parametrize(
        "arguments", [("mask", "causal", "--q-len", "3"), ("mask", "causal", "--q-len", "90"), ("--help",)]
    )
    def test_ascii_is_enough(self, arguments: tuple[str, ...]) -> None:
        """UnicodeEncodeError."""
        done = command_line(*arguments, PYTHONIOENCODING="ascii")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout
        assert done.stdout.isascii()
        if arguments[-1] == "3":
            assert "0 # . .\n1 # # .\n2 # # #" in done.stdout

    def test_json_keeps_every_character_in_ascii(self) -> None:
        done = command_line("diagnose", "--list", "--json", PYTHONIOENCODING="ascii")
        assert json.loads(done.stdout) == json.loads(
            command_line("diagnose", "--list", "--json", PYTHONIOENCODING="utf-8").stdout
        )

    def test_bytes_that_are_no_text_can_be_diagnosed(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "undivided", "diagnose"],
            input=b"\xff\xfe No available kernel. Aborting execution.\xc3",
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"sdpa-no-kernel" in done.stdout

    def test_a_reader_that_leaves_is_no_error(self) -> None:
        running = subprocess.Popen(
            [sys.executable, "-m", "undivided", "mask", "causal", "--q-len", "20000", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.readline()
        running.stdout.close()
        assert running.stderr.read() == b""
        running.stderr.close()
        running.wait()

    def test_version(self) -> None:
        assert command_line("--version").stdout.split() == ["undivided", undivided.__version__]


@pytest.fixture
def somewhere(tmp_path: Path) -> Path:
    """A folder with a file and a folder in it."""
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    return tmp_path


WRONG = {
    "demo-file": (("demo", "--quick", "--out", "file"), "--out must be a folder, got the file"),
    "demo-below-a-file": (("demo", "--quick", "--out", "file/x"), "--out must be a folder that can be created"),
    "demo-checkpoint": (("demo", "--train", "--checkpoint", "folder"), "--checkpoint must be a file, got the folder"),
    "mask-format": (("mask", "causal", "--out", "x.nope"), "--out must end in "),
    "mask-no-format": (("mask", "causal", "--out", "picture"), "--out must end in "),
    "mask-folder": (("mask", "causal", "--out", "folder"), "--out must be a file, got the folder"),
    "mask-below-a-file": (("mask", "causal", "--out", "file/x.png"), "the folder of --out must be a folder"),
    "bench-folder": (("bench", "--quick", "--json", "folder"), "--json must be a file, got the folder"),
    "bench-ranks": (("bench", "--quick", "--ranks", "folder"), "--ranks must be a file, got the folder"),
    "bench-markdown": (("bench", "--markdown", "file"), "--markdown must be a report that --json wrote"),
    "bench-not-there": (("bench", "--markdown", "none"), "--markdown must be a report that --json wrote"),
    "ranks-into": (("ranks", "report.json", "--into", "folder"), "--into must be a file, got the folder"),
    "ranks-report": (("ranks", "folder"), "REPORT must be a report of"),
}


class TestPaths:
    @pytest.mark.parametrize("name", WRONG)
    def test_a_wrong_path_is_one_message(self, name: str, somewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """FileExistsError, IsADirectoryError, matplotlib's ValueError, some of them after minutes of work."""
        monkeypatch.chdir(somewhere)
        monkeypatch.setattr("undivided.cli.commands.bench.execute", lambda *given: pytest.fail("minutes were spent"))
        arguments, message = WRONG[name]
        assert message in refused(*arguments)
        assert (somewhere / "file").read_text() == "precious"

    @pytest.mark.parametrize("text", ["{}", "[]", "3", '{"schema": 1, "cases": []}'])
    def test_json_that_is_no_report_is_one_message(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "report.json").write_text(text)
        wanted = "must be a report" if "schema" in text else "report must have schema 1"
        assert wanted in refused("bench", "--markdown", str(tmp_path / "report.json"))
        assert "must be" in refused("ranks", str(tmp_path / "report.json"), "--into", str(tmp_path / "into.json"))

    def test_the_folder_of_a_picture_is_made(self, tmp_path: Path) -> None:
        assert run("mask", "causal", "--out", str(tmp_path / "a" / "b.png")).exit_code == 0
        assert (tmp_path / "a" / "b.png").is_file()

    def test_what_the_system_refuses_is_one_message(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*given: object) -> None:
            raise OSError(28, "No space left on device", "x.png")

        monkeypatch.setattr("undivided.masks._drawing.plot", full)
        done = run("mask", "causal", "--out", "x.png")
        assert (done.exit_code, done.stderr) == (2, "undivided: No space left on device: x.png\n")


IGNORED = {
    "steps": (("demo", "--quick", "--steps", "5"), "--steps must be given together with --train"),
    "checkpoint": (("demo", "--checkpoint", "x"), "--checkpoint must be given together with --train"),
    "kv-documents": (("explain", "--kv-documents", "1,2"), "--kv-documents must be given together with --documents"),
    "q-lengths": (("explain", "--q-lengths", "3,4"), "--q-lengths must be given together with --lengths"),
    "kv-heads": (("explain", "--kv", "2x256x8x64", "--kv-heads", "2"), "--kv-heads must be given without --kv"),
    "cudnn-of-a-cpu": (("explain", "--device", "cpu", "--cudnn", "9.1"), "--cudnn must describe a GPU"),
    "markdown": (("bench", "--markdown", "x", "--quick", "--dtype", "fp32"), "got --dtype, --quick"),
    "bench-backend": (("bench", "--suite", "forward", "--backend", "warp"), "backend must be one of"),
    "bench-overhead": (("bench", "--suite", "overhead", "--threads", "2"), "overhead must be given without"),
    "list": (("diagnose", "--list", "an error"), "--list must be given without TEXT"),
    "negative-heads": (("explain", "--kv-heads", "-1"), "--kv-heads"),
    "large-seed": (("verify", "--seed", "99999999999999999999"), "--seed"),
    "too-large": (("verify", "--q", "1x99999999999x8x64"), "--q, --kv must have sizes that fit into memory"),
}


@pytest.mark.parametrize("name", IGNORED)
def test_a_flag_that_would_be_ignored_is_refused(name: str) -> None:
    arguments, message = IGNORED[name]
    assert message in refused(*arguments)


def test_a_flag_that_is_given_wins_over_quick() -> None:
    report = answer("demo", "--quick", "--documents", "9", "--rounds", "0")
    assert len(report["documents"]) == 9


class TestWithoutAGpu:
    def test_no_package_is_proposed_where_a_gpu_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`pip install flash-attn`, on a laptop."""
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        rows = {row.name: row for row in undivided.backends(undivided.Machine.named("cpu"))}
        for name in ("cudnn", "flash_attn", "torch_cudnn", "torch_efficient", "triton"):
            assert (rows[name].available, rows[name].why_not, rows[name].how_to_get) == (False, "needs a CUDA GPU", "")

    def test_a_missing_package_is_proposed_where_a_gpu_is(self) -> None:
        rows = {row.name: row for row in undivided.backends(undivided.Machine.named("h100", "9.10"))}
        assert "pip install" in rows["flash_attn"].how_to_get
        assert "installed" in rows["flash_attn"].why_not


def test_doctor_says_that_a_file_does_not_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNDIVIDED_TUNED", str(tmp_path / "tiles.json"))
    entries = {entry["name"]: entry["meaning"] for entry in answer("doctor")["environment"]}
    assert entries["UNDIVIDED_TUNED"].endswith("; this file does not exist")


def test_doctor_refuses_a_wrong_variable_in_json_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDIVIDED_LOG", "loud")
    assert "UNDIVIDED_LOG must be" in refused("doctor", "--json")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_typer_or_rich_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from undivided.cli.main import main; main()"
    done = forked_processes.run(code)
    assert done.returncode == 2
    assert "pip install 'undivided[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run([sys.executable, "-m", "undivided.cli", "mask", "foo()"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("undivided: mask must")
    assert command_line("mask", "foo()").stderr == done.stderr


def test_the_backends_package_is_a_function_too() -> None:
    from undivided.backends import all_backends

    table = undivided.backends()
    assert [row.name for row in table] == [backend.name for backend in all_backends()]
    assert str(table).splitlines()[0].startswith("name")
    a100 = undivided.Machine.named("a100", packages={"flash_attn": "2.8.4"})
    described = {row.name: row for row in undivided.backends(machine=a100)}
    assert described["flash_attn"].available
    assert described["flash_attn"].version == "flash_attn 2.8.4"


@pytest.mark.parametrize(("command", "extras"), [("doctor", "cli"), ("report", "cli,report")])
def test_without_typer_a_command_names_the_extras_that_it_needs(command: str, extras: str) -> None:
    code = f"import sys; sys.modules['typer'] = None; sys.argv[1:] = [{command!r}]\n"
    code += "from undivided.cli.main import main; main()"
    done = forked_processes.run(code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"undivided: the command line needs typer: pip install 'undivided[{extras}]'\n"


def test_sizes_with_commas_have_a_hint() -> None:
    assert refused("explain", "--q", "2,256,8,64").endswith("got '2,256,8,64'\n  HINT: 2x256x8x64\n")
    assert "HINT" not in refused("explain", "--q", "2x256x8")


def test_the_hint_of_a_wrong_mask_call_is_the_last_line() -> None:
    """It stood in the middle of the message, within brackets."""
    first, hint, *_ = refused("mask", "window(3)").splitlines()
    assert first.endswith("(right must be given to window, got no value), got 'window(3)'")
    assert hint == "  HINT: window(left, right, ...)"


def test_a_misspelt_suite_has_a_hint() -> None:
    assert "did you mean 'forward'?" in refused("bench", "--suite", "forwrd")


@pytest.mark.parametrize("arguments", [("ranks",), ("bench", "--markdown"), ("report", "--bench")])
def test_an_absent_report_is_named_without_the_number_of_the_error(arguments: tuple[str, ...], tmp_path: Path) -> None:
    absent = tmp_path / "report.json"
    assert refused(*arguments, str(absent)).rstrip().endswith("report.json (No such file or directory)")
