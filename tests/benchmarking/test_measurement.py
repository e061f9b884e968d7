"""`undivided ranks --measure`: what is measured, what counts, and that the user's table changes once or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from undivided.benchmarking import measurement, runs, suites
from undivided.benchmarking.catalogue.coverage import coverage
from undivided.benchmarking.measurement import SOURCE, measure, order_is_steady, replace_measured
from undivided.cli._app import application
from undivided.cli.commands import _measure_ranks
from undivided.kernels import cpu
from undivided.machine import Machine
from undivided.selection import decision as selection
from undivided.selection import measured as _measured
from undivided.selection.measured import MeasuredRates, Run, Table

ONE = "fp32-full-h8-16-d64"
"""A problem that takes tenths of a second, with its backward."""

needs_two_backends = pytest.mark.skipif(isinstance(cpu.load(), str), reason="needs the native library")


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The path of a user's table that does not exist yet; no decision of another table is remembered."""
    path = tmp_path / "undivided" / "ranks.json"
    monkeypatch.delenv("UNDIVIDED_RANKS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("UNDIVIDED_BACKENDS", raising=False)
    forget(monkeypatch)
    yield path
    _measured.tables.cache_clear()


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the tables again, as a new process does."""
    _measured.tables.cache_clear()
    monkeypatch.setattr(selection, "_decisions", {})
    monkeypatch.setattr(selection, "_by_class", {})


def command(*arguments: str) -> Any:
    return CliRunner().invoke(
        application(*arguments[:1]), list(arguments), env={"COLUMNS": "160"}, catch_exceptions=False
    )


def level() -> str:
    found = _measured.architecture("cpu", Machine.this("cpu"))
    assert found is not None
    return found


def table(kind: str, source: str, **rates: float) -> Table:
    return {kind: {(5, 20): MeasuredRates(Run("2027-01-02T03:04:05+00:00", "a CPU", "abc", "2", source), rates)}}


@needs_two_backends
class TestCommand:
    def test_from_measuring_to_explain_and_doctor(self, users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measurement, "order_is_steady", lambda times: True)  # whatever else this machine does
        monkeypatch.setattr(_measured.table, "PACKAGE_TABLE", users.with_name("none.json"))
        offered = json.loads(command("doctor", "--json").stdout)["ranks"]
        assert offered["command"] == "undivided ranks --measure"
        assert f"no table for level {level()}: " in " ".join(command("doctor").stdout.split())
        kept = users.parent.parent / "kept.json"
        done = command("ranks", "--measure", "--seconds", "20", "--filter", ONE, "--report", str(kept))
        assert done.exit_code == 0, done.output
        assert f"undivided: 1/2 {ONE}" in done.stderr.splitlines(), "plain lines if stderr is not a terminal"
        assert "2 places measured" in done.stderr
        assert f"{level()}/float32/training/64/full" in done.stdout
        found = _measured.read(users)
        assert {kind.split("/")[2] for kind in found} == {"forward", "training"}
        assert all(set(entry.rates) == {"native", "torch_flash"} for at in found.values() for entry in at.values())
        assert [path.name for path in users.parent.iterdir()] == ["ranks.json"], "no temporary file is left"
        assert {entry.run.report for at in found.values() for entry in at.values()} == {"kept.json"}
        again = users.with_name("again.json")
        assert command("ranks", str(kept), "--into", str(again)).exit_code == 0
        assert _measured.read(again) == found, "the report gives the same table"
        forget(monkeypatch)
        explained = command("explain", "--q", "1x16x8x64", "--kv", "1x16x8x64").stdout
        assert "chosen; measured rank: est." in " ".join(explained.split())
        told = json.loads(command("doctor", "--json").stdout)["ranks"]
        assert (told["users"], told["command"], told["file"]) == (2, None, str(users))
        doctor = " ".join(command("doctor").stdout.split())
        assert re.search(f"level {level()}: your table of [0-9-]+ with 2 measured problems[,;]", doctor)

    def test_a_report_is_continued_without_timing_its_problems_again(
        self, users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(measurement, "order_is_steady", lambda times: True)
        report, other = tmp_path / "report.json", ONE.replace("d64", "d128")
        words = ("ranks", "--measure", "--seconds", "20", "--report", str(report), "--resume")
        assert command(*words, "--filter", ONE).exit_code == 0, "a first part needs no report"
        first = json.loads(report.read_text())["cases"]
        timed: list[str] = []
        real = measurement._timed_case
        monkeypatch.setattr(
            measurement, "_timed_case", lambda benchmark, *rest: timed.append(benchmark.name) or real(benchmark, *rest)
        )
        done = command(*words, "--filter", ONE.rpartition("-")[0])
        assert done.exit_code == 0, done.output
        assert "2 problems are there already" in done.stderr
        assert timed == [other, f"{other}-backward"]
        both = json.loads(report.read_text())["cases"]
        assert both[:2] == first
        assert [case["name"] for case in both[2:]] == timed
        assert sum(map(len, _measured.read(users).values())) == 4, "the table has the rates of both parts"

    def test_a_report_of_another_machine_is_not_continued(self, users: Path, tmp_path: Path) -> None:
        report = tmp_path / "report.json"
        report.write_text(json.dumps({"machine": {**suites.machine(), "processor": "another"}, "cases": []}))
        words = ("ranks", "--measure", "--report", str(report), "--resume")
        done = command(*words)
        assert (done.exit_code, done.stdout) == (2, "")
        assert "--resume must continue a report of the same processor" in done.stderr
        report.write_text("[]")
        assert "--report must be a report that --measure wrote" in command(*words).stderr
        assert not users.exists()

    def test_another_level_is_measured_in_a_process_of_its_own(self, users: Path) -> None:
        done = command("ranks", "--measure", "--seconds", "20", "--filter", ONE, "--level", "generic", "--json")
        assert done.exit_code in (0, 1), done.output
        kinds = {row["kind"].split("/")[0] for row in json.loads(done.stdout)}
        assert kinds <= {"generic"}
        assert kinds or "no problem was measured" in done.stderr
        assert users.exists() == bool(kinds)

    def test_an_interrupt_leaves_the_table_as_it_was(self, users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        _measured.write(users, table("amx/float32/forward/64/full", "a.json", native=1.0))
        before = users.read_bytes()

        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(_measure_ranks, "measure", interrupted)
        done = command("ranks", "--measure")
        assert (done.exit_code, f"interrupted: {users} is as it was" in done.stderr) == (130, True)
        assert users.read_bytes() == before
        assert [path.name for path in users.parent.iterdir()] == ["ranks.json"]

    def test_without_a_steady_order_nothing_is_written(self, users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measurement, "order_is_steady", lambda times: False)
        monkeypatch.setenv("UNDIVIDED_RANKS", str(users))  # which does not exist yet: no warning
        done = command("ranks", "--measure", "--seconds", "20", "--filter", ONE)
        assert done.exit_code == 1
        assert "the backends' order changed between turns" in done.stderr
        assert f"no problem was measured: {users} is as it was" in done.stderr
        assert not users.exists()

    def test_a_wrong_result_is_named_and_not_timed(self, users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = runs.verify

        def verify(participants: Sequence[Any]) -> Any:
            entries, right = real(participants)
            entries[-1] |= {"ok": False, "note": "made wrong"}
            return entries, right[:-1]

        monkeypatch.setattr(runs, "verify", verify)
        done = command("ranks", "--measure", "--seconds", "20", "--filter", ONE)
        assert done.exit_code == 1
        assert f"is wrong at {ONE}: made wrong" in done.stderr
        assert not users.exists(), "one backend alone is no order"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--measure", "--seconds", "4"), "--seconds must be between 5 and 3600, got 4.0"),
            (("--measure", "--seconds", "nan"), "--seconds must be between 5 and 3600, got nan"),
            (("--measure", "--level", "avx9"), "--level must be one of "),
            (("--measure", "--filter", "nothing"), "--filter must be contained in the name of a problem"),
            (("--measure", "report.json"), "--measure must be given without REPORT"),
            (("--seconds", "9"), "--seconds must be given together with --measure, got 9.0"),
            (
                ("--measure", "--level", "all", "--report", "r.json"),
                "--report must be given without --level, got r.json",
            ),
            (("--report", "r.json"), "--report must be given together with --measure, got r.json"),
            (("--measure", "--resume"), "--resume must be given together with --report, got no report"),
            (("--level", "avx2"), "--level must be given together with --measure, got ['avx2']"),
        ],
    )
    def test_a_bad_request_is_one_message(
        self, users: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
    ) -> None:
        monkeypatch.setattr(_measure_ranks, "measure", lambda *_, **__: pytest.fail("it was measured"))
        done = command("ranks", *words)
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in done.stderr
        assert len([line for line in done.stderr.strip().splitlines() if not line.startswith("  HINT: ")]) == 1

    def test_another_file_is_not_overwritten(self, users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_measure_ranks, "measure", lambda *_, **__: pytest.fail("minutes were spent"))
        users.parent.mkdir()
        users.write_text("a letter")
        done = command("ranks", "--measure")
        assert (done.exit_code, "must be a table of ranks" in done.stderr) == (2, True)
        assert users.read_text() == "a letter"

    def test_with_one_backend_there_is_nothing_to_compare(self, users: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_measure_ranks, "selectable_backends", lambda device: ("torch_flash",))
        done = command("ranks", "--measure")
        assert done.exit_code == 2
        assert "--measure must have two backends to compare on the CPU, got torch_flash" in done.stderr

    def test_backends_that_the_environment_forbids_are_refused(
        self, users: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("UNDIVIDED_BACKENDS", "native")
        done = command("ranks", "--measure")
        assert (done.exit_code, "UNDIVIDED_BACKENDS must be unset" in done.stderr) == (2, True)


class TestMeasurement:
    def test_the_time_limit_ends_it(self) -> None:
        found = measure(0.0)
        assert (found.table, found.measured) == ({}, 0)
        assert len(found.left_out["time limit"]) == sum(map(len, coverage()))
        assert found.seconds < 5

    def test_every_problem_has_a_name_of_its_own_and_a_backward_follows_its_forward(self) -> None:
        groups = list(coverage())
        names = [one.name for group in groups for one in group]
        assert len(set(names)) == len(names)
        for group in groups:
            assert not group[0].backward
            assert all(later.name == f"{first.name}-backward" for first, later in pairwise(group))

    @pytest.mark.parametrize(
        ("others", "steady"),
        [
            ([2.0, 2.1, 1.9, 2.0, 2.0], True),
            ([1.01, 0.99, 1.0, 1.02, 0.98], True),
            ([2.0, 2.0, 2.0, 2.0, 0.5], True),
            ([2.0, 0.5, 2.0, 0.5, 1.2], False),
        ],
        ids=["slower", "equal", "one-turn-disturbed", "both-ways"],
    )
    def test_a_problem_counts_if_its_turns_agree(self, others: list[float], steady: bool) -> None:
        assert order_is_steady({"a": [1.0] * 5, "b": others}) == steady

    def test_a_second_measurement_replaces_the_first_at_its_level_alone(self) -> None:
        kind = "avx2/float32/{}/64/full"
        old = _measured.merged(
            _measured.merged(table(kind.format("forward"), SOURCE, native=1.0), table("amx/x", SOURCE, native=1.0)),
            table(kind.format("decode"), "report.json", native=1.0),
        )
        new = table(kind.format("training"), SOURCE, native=2.0)
        assert set(replace_measured(old, new)) == {"amx/x", kind.format("decode"), kind.format("training")}
        assert set(replace_measured(old, new, "d64")) == {*old, *new}, "a filter replaces the same problems alone"
