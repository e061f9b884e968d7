"""The commands that measure and show ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_tables import H100, RUN, Measured, explain, order
from typer.testing import CliRunner

import undivided
from undivided import InputError, Machine
from undivided.benchmarking import __main__ as plainly
from undivided.benchmarking import ranks as made
from undivided.benchmarking import timing
from undivided.benchmarking.catalogue import GPU_SUITES, benchmarks
from undivided.benchmarking.competitors import selectable_backends
from undivided.benchmarking.runs import Settings
from undivided.benchmarking.suites import empty_report
from undivided.cli._app import application
from undivided.cli.commands import bench
from undivided.request.problem import Problem
from undivided.selection import decision as selection
from undivided.selection import measured as _measured
from undivided.selection.measured import MeasuredRates, TableCell
from undivided.verification import workers


def case(
    name: str, backward: bool = False, contended: bool = False, problem: str = "p", **seconds: float
) -> dict[str, Any]:
    """A case of a report: "undivided" chose the first backend."""
    (first, _), *_ = seconds.items()
    entries = [
        {"name": "undivided" if backend == first else backend, "label": backend, "ok": True, "seconds": time}
        for backend, time in seconds.items()
    ]
    kind = "sm90/bfloat16/training/128/full" if backward else "sm90/bfloat16/forward/128/full"
    return {
        "name": name,
        "backward": backward,
        "problem": problem + ("; needs backward" if backward else ""),
        "entries": entries,
        "rate": {"contended": contended},
        "place": TableCell(kind, 13, 40)._asdict() | {"operations_or_bytes": 3.5e12 if backward else 1e12},
    }


def report(*cases: dict[str, Any]) -> dict[str, Any]:
    machine = {"gpu": "NVIDIA H100", "torch": "2.13.0", "processor": "x", "threads": 1}
    return {"when": RUN.when, "machine": machine, "commit": "abcdef0", "cases": list(cases)}


def command(*arguments: str) -> Any:
    return CliRunner().invoke(
        application(*arguments[:1]), list(arguments), env={"COLUMNS": "160"}, catch_exceptions=False
    )


def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run counts as disturbed, whatever else this machine does: neither the probes around a run nor a witness say
    so."""
    monkeypatch.setattr(timing, "disturbance", lambda before, after, best: 0.0)
    monkeypatch.setattr(timing.Witness, "slowness", lambda witness: 1.0)


class TestCommands:
    def test_from_a_run_to_explain(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Really timed, here: `bench` into a table and a report, the report into the user's table, `explain` reads
        it."""
        quiet(monkeypatch)
        kept, into = tmp_path / "report.json", tmp_path / "ranks.json"
        done = command(
            "bench",
            "--quick",
            "--suite",
            "small",
            "--filter",
            "small/fp32-b1-h8-100-d64",
            "--competitor",
            "sdpa",
            "--json",
            str(kept),
            "--ranks",
            str(into),
        )
        assert done.exit_code == 0, done.output
        assert "2 places, 2 of them with two backends or more" in done.stderr
        assert {"native", "torch_flash"} <= {
            entry["label"] for entry in json.loads(kept.read_text())["cases"][0]["entries"]
        }
        monkeypatch.setenv("UNDIVIDED_RANKS", str(tmp_path / "users.json"))  # which `ranks` makes
        _measured.tables.cache_clear()
        assert command("ranks", str(kept)).exit_code == 0
        assert _measured.read(tmp_path / "users.json") == _measured.read(into)
        _measured.tables.cache_clear()
        found = json.loads(command("explain", "--q", "1x100x8x64", "--json").stdout)
        estimates = {one["name"]: one["estimate"] for one in found["backends"] if one["estimate"]}
        assert set(estimates) == {"native", "torch_flash"}
        assert estimates[found["chosen"]]["seconds"] <= 1.06 * min(one["seconds"] for one in estimates.values())
        assert estimates["native"]["run"]["report"] == "report.json"
        assert "est. " in command("explain", "--q", "1x100x8x64").stdout
        shown = command("ranks", "--filter", "float32/training/64").stdout
        assert "training/64/full" in shown
        assert "native" in shown
        _measured.tables.cache_clear()

    def test_a_machine_with_torch_alone_writes_it_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`python -m undivided.benchmarking`, as scripts/gpu-check runs it; here in one process."""
        quiet(monkeypatch)

        def here(tasks: Any, function: Any, **_: object) -> Any:
            return (workers.TaskResult(task, function(task)) for task in tasks)

        monkeypatch.setattr(plainly.workers, "work", here)
        words = ["--device", "cpu", "--suite", "small", "--filter", "small/bf16-b1-h8-100-d64", "--patience", "0.01"]
        files = ["--json", str(tmp_path / "report.json"), "--ranks", str(tmp_path / "ranks.json")]
        monkeypatch.setattr(sys, "argv", ["bench", *words, *files])
        assert plainly.main() == 0
        rates = [
            entry.rates for places in _measured.read(tmp_path / "ranks.json").values() for entry in places.values()
        ]
        assert [set(one) for one in rates] == [{"native", "torch_flash"}] * 2

    def test_on_a_gpu_its_own_suites_run_with_every_backend_that_is_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The CPU's suites ran with the native kernel: no backend that selection considers on a GPU was timed."""
        seen: list[Any] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(bench, "selectable_backends", lambda device: ("cudnn", "triton"))
        monkeypatch.setattr(bench, "execute", lambda *given: seen.extend(given) or empty_report(given[0], Settings()))
        command("bench", "--device", "cuda", "--json", str(tmp_path / "h100.json"))
        assert _measured.read(tmp_path / "h100.ranks.json") == {}, "written, beside the report"
        assert {benchmark.suite for benchmark in seen[0].single} == set(GPU_SUITES)
        assert seen[0].small == ()
        assert seen[1].backends == ("cudnn", "triton")

    def test_a_file_that_is_not_a_report_is_one_message(self, tmp_path: Path) -> None:
        for text in ("{", "{}", "[]"):
            (tmp_path / "other.json").write_text(text)
            done = command("ranks", str(tmp_path / "other.json"), "--into", str(tmp_path / "ranks.json"))
            assert done.exit_code == 2, done.output
            assert "must be" in done.stderr
        assert not (tmp_path / "ranks.json").exists()

    def test_a_table_does_not_overwrite_another_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kept, into = tmp_path / "report.json", tmp_path / "precious.txt"
        kept.write_text(json.dumps(report(case("a", cudnn=1.0))))
        into.write_text("a letter")
        done = command("ranks", str(kept), "--into", str(into))
        assert done.exit_code == 2
        assert "must be a table of ranks" in done.stderr
        monkeypatch.setattr(bench, "execute", lambda *given: pytest.fail("minutes were spent"))
        done = command("bench", "--quick", "--ranks", str(into))
        assert (done.exit_code, "must be a table of ranks" in done.stderr) == (2, True)
        assert into.read_text() == "a letter"

    def test_an_empty_table_is_reported(self, tmp_path: Path) -> None:
        _measured.write(tmp_path / "none.json", {})
        done = command("ranks", "--into", str(tmp_path / "none.json"))
        assert "ordered by their default ranks" in done.stdout

    @pytest.mark.parametrize("by", ["--into", "UNDIVIDED_RANKS"])
    def test_a_table_that_does_not_exist_is_refused(
        self, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both were once shown as an empty table, or as the package's own."""
        path = str(tmp_path / "rnaks.json")
        if by == "UNDIVIDED_RANKS":
            monkeypatch.setenv(by, path)
        done = command("ranks", *(["--into", path] if by == "--into" else []))
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"{by} must be a file that exists" in done.stderr

    @pytest.mark.parametrize(
        ("text", "why"), [("[1]", "another type (list)"), ("{}", "no 'schema'"), ("", "Expecting value")]
    )
    @pytest.mark.parametrize("by", ["--into", "UNDIVIDED_RANKS"])
    def test_a_table_that_cannot_be_parsed_is_refused(
        self, by: str, text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of a table in UNDIVIDED_RANKS the command gave a warning, and showed the package's own."""
        path = tmp_path / "ranks.json"
        path.write_text(text)
        if by == "UNDIVIDED_RANKS":
            monkeypatch.setenv(by, str(path))
        done = command("ranks", *(["--into", str(path)] if by == "--into" else []))
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"{path} must be a table of ranks" in done.stderr
        assert why in done.stderr

    def test_a_filter_without_a_match_is_refused(self) -> None:
        done = command("ranks", "--into", str(_measured.PACKAGE_TABLE), "--filter", "forwards")
        assert (done.exit_code, done.stdout) == (2, "")
        assert "--filter must be contained in a kind" in done.stderr

    def test_reports_are_not_shown(self, tmp_path: Path) -> None:
        kept = tmp_path / "report.json"
        kept.write_text(json.dumps(report(case("a", cudnn=1.0))))
        done = command("ranks", str(kept), "--into", str(tmp_path / "into.json"), "--filter", "amx")
        assert done.exit_code == 2
        assert "REPORT must be given without --filter, --json, got --filter" in done.stderr


class TestReports:
    def test_a_rate_is_the_work_of_a_places_cases_over_their_time(self) -> None:
        found = made.ranks(
            report(case("a", cudnn=0.002, triton=0.004), case("b", cudnn=0.003, triton=0.001)), "made.json"
        )
        entry = found.table["sm90/bfloat16/forward/128/full"][13, 40]
        assert entry == MeasuredRates(RUN, {"cudnn": 4e14, "triton": 4e14})

    def test_training_is_forward_and_backward(self) -> None:
        both = case("a", cudnn=0.002, triton=0.004), case("a-backward", True, triton=0.004, cudnn=0.005)
        found = made.ranks(report(*both), "made.json")
        rates = found.table["sm90/bfloat16/training/128/full"][13, 40].rates
        assert rates == {"cudnn": 5e14, "triton": 4.375e14}

    @pytest.mark.parametrize(
        "forward", [case("b", cudnn=1.0), case("a", contended=True, cudnn=1.0), case("a", problem="another", cudnn=1.0)]
    )
    def test_a_backward_without_its_forward_is_left_out(self, forward: dict[str, Any]) -> None:
        found = made.ranks(report(forward, case("a-backward", True, cudnn=1.0)), "made.json")
        assert not any("/training/" in kind for kind in found.table)
        assert found.left_out["no undisturbed forward for the backward"] == ("a-backward",)

    def test_disturbed_wrong_and_foreign_results_do_not_count(self) -> None:
        wrong = case("a", cudnn=0.001, triton=0.001, flash_attn=0.001)
        wrong["entries"][1] |= {"ok": False}
        wrong["entries"] += [
            {"name": "sdpa", "label": "torch SDPA", "ok": True, "seconds": 1.0},
            {"name": "without", "label": "cudnn", "ok": True, "seconds": 1.0},
            {"name": "torch_flash", "label": "torch_flash", "ok": True},
        ]
        found = made.ranks(report(wrong, case("b", contended=True, cudnn=1.0, triton=1.0)), "made.json")
        assert found.table["sm90/bfloat16/forward/128/full"][13, 40].rates == {"cudnn": 1e15, "flash_attn": 1e15}
        assert found.left_out == {"disturbed": ("b",)}

    def test_a_backend_that_missed_a_case_of_a_place_is_omitted(self) -> None:
        found = made.ranks(report(case("a", cudnn=0.001, triton=0.001), case("b", cudnn=0.001)), "made.json")
        assert set(found.table["sm90/bfloat16/forward/128/full"][13, 40].rates) == {"cudnn"}

    def test_an_older_report_is_refused_with_a_reason(self) -> None:
        old = case("a", cudnn=1.0)
        del old["place"]
        found = made.ranks(report(old), "made.json")
        assert not found.table
        assert list(found.left_out.values()) == [("a",)]
        with pytest.raises(
            InputError, match=r"report must be one that `undivided bench --json` wrote, got other\.json"
        ):
            made.ranks({"cases": []}, "other.json")

    def test_a_report_is_put_into_a_file_that_selection_reads(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Measured
    ) -> None:
        path = tmp_path / "ranks.json"
        problem = explain().problem
        place = made.describe_place(problem, H100)
        one = case("a", cudnn=0.002, triton=0.001) | {"place": place}
        made.add(report(one), "made.json", path)
        measured(_measured.read(path))
        decision = explain()
        assert decision.backend.name == "triton"
        assert {v.backend.name: v.estimate.seconds for v in decision.verdicts if v.estimate} == pytest.approx(
            {"cudnn": 0.002, "triton": 0.001}, rel=1e-3
        )
        made.add(report(one | {"entries": case("a", cudnn=0.001, triton=0.002)["entries"]}), "again.json", path)
        measured(_measured.read(path))
        assert explain().backend.name == "cudnn"
        assert "again.json" in path.read_text()
        assert "made.json" not in path.read_text(), "a run that nothing is left of is forgotten"


ALONE = {
    "gpu": ["bf16-prefix-lm-16384", "bf16-prefix-lm-16384-backward", "bf16-sinks-8192", "bf16-sinks-8192-backward"],
    "gpu-decode": ["bf16-paged16-batch64-8192", "bf16-paged16-batch8-32768"],
}
"""Cases that only our own kernel can run: they are there for its goals."""


@pytest.mark.parametrize("suite", GPU_SUITES)
def test_every_case_for_a_gpu_has_competitors_there_and_a_place(suite: str) -> None:
    """On meta tensors: all but a few would be timed with two backends or more of an H100 with everything installed."""
    alone = []
    for benchmark in benchmarks(suite):
        case = benchmark.case
        batch, q_len, kv_len, heads, kv_heads, qk_dim, v_dim = case.sizes
        lead = () if case.layout == "thd" else (batch,)
        kv = (8, case.page_size) if case.page_size else (*lead, kv_len)
        shapes = (*lead, q_len, heads, qk_dim), (*kv, kv_heads, qk_dim), (*kv, kv_heads, v_dim)
        q, k, v = (
            torch.empty(s, dtype=benchmark.dtype, device="meta", requires_grad=benchmark.backward) for s in shapes
        )
        per_head = torch.empty(heads, device="meta")
        decision = undivided.explain(
            q,
            k,
            v,
            layout="thd" if case.layout == "thd" else "bshd",
            mask=case.mask and case.mask(),
            softcap=case.softcap,
            alibi_slopes=per_head if case.alibi else None,
            sinks=per_head if case.sinks else None,
            machine=H100,
            pages=torch.empty(batch, kv_len // case.page_size, dtype=torch.int32, device="meta")
            if case.page_size
            else None,
        )
        assert _measured.table_cell(decision.problem, H100) is not None
        if len([name for name in order(decision) if name not in ("reference", "flex")]) < 2:
            alone.append(benchmark.name)
    assert alone == ALONE[suite]


def test_rivals_of_the_cpu() -> None:
    assert "torch_flash" in selectable_backends("cpu")
    assert not {"reference", "flex", "triton"} & set(selectable_backends("cpu"))


@pytest.mark.parametrize("machine", [H100, Machine("cpu", isa="amx")])
def test_a_place_depends_on_lengths_by_their_class_only(machine: Machine) -> None:
    def place(length: int) -> TableCell | None:
        return _measured.table_cell(explain(length).problem._replace(device=machine.device or "cpu"), machine)

    assert place(2049) == place(4096) != place(4097)
    problem: Problem = explain().problem
    assert selection.selection_key(problem._replace(q_len=4160, kv_len=4160)) == selection.selection_key(
        problem._replace(q_len=8128, kv_len=8128)
    )
    assert place(4160) == place(8128)
