"""`undivided report`, `bench --plot` and `bench --compare`: what they write, and what they refuse."""

from __future__ import annotations

import copy
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from command_runs import verify_once
from typer.testing import CliRunner

from undivided.benchmarking import execute, plan
from undivided.benchmarking.competitors import OTHERS
from undivided.benchmarking.runs import Settings
from undivided.cli._app import application
from undivided.functional import attention, explain
from undivided.report import chart_data, compare, plots
from undivided.report.page import render
from undivided.verification import Report, Row
from undivided.verification.case import Case
from undivided.verification.inputs import build


def run(*arguments: str) -> Any:
    return CliRunner().invoke(
        application(*arguments[:1]), list(arguments), env={"COLUMNS": "100"}, catch_exceptions=False
    )


@pytest.fixture(scope="session")
def measured() -> dict[str, Any]:
    """A short benchmark report at 512 tokens, and the same cases again under the name of 1024 tokens."""
    settings = Settings(backends=(), others=("sdpa",), patience=0.001, small_patience=0.001, attempts=1)
    report = execute(plan(["forward"], ["fp32"], "fp32-d64-512"), settings)
    longer = json.loads(json.dumps(report["cases"]).replace("-512-", "-1024-").replace("x512x", "x1024x"))
    report["cases"] += longer
    return report


@pytest.fixture
def saved(measured: dict[str, Any], tmp_path: Path) -> Path:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(measured), encoding="utf-8")
    return path


@pytest.fixture
def page(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    verify_once(monkeypatch)
    out = tmp_path / "a folder" / "report.html"
    done = run("report", "--out", str(out), "--bench", str(saved))
    assert done.exit_code == 0, done.output
    return out.read_text(encoding="utf-8")


def test_report_is_one_file_without_references(page: str) -> None:
    links: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            links.extend(str(value) for name, value in attributes if name in ("src", "href", "action"))

    Links().feed(page)
    assert links
    assert [link for link in links if not link.startswith(("#", "data:"))] == []
    assert "undividedMasks" in page
    assert re.search(r"on \d{4}-\d\d-\d\d\.</p>", page)
    for heading in ("Machine", "Backends", "Verification", "Benchmarks", "Mask explorer"):
        assert f">{heading}</h2>" in page


def test_values_are_escaped(measured: dict[str, Any]) -> None:
    hostile = "<script>alert(1)</script>\"'&"
    report = copy.deepcopy(measured)
    report["machine"]["processor"] = hostile
    report["cases"][0]["name"] = hostile
    findings = {
        "machine": {hostile: hostile},
        "environment": [{"name": hostile, "value": hostile, "meaning": hostile}],
        "backends": [
            {"name": hostile, "family": hostile, "available": available, "why_not": hostile, "version": hostile,
             "summary": hostile, "how_to_get": hostile}
            for available in (True, False)
        ],
    }  # fmt: skip
    verified = [(hostile, Report(hostile, (Row(hostile, hostile, 1.0, 0.0, hostile),), {hostile: (hostile,)}))]
    page = render(findings, verified, report, hostile)
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 10


def test_plot_writes_charts_of_a_measured_and_of_a_saved_report(saved: Path, tmp_path: Path) -> None:
    done = run("bench", "--from", str(saved), "--plot", str(tmp_path / "charts"))
    assert done.exit_code == 0, done.output
    names = {path.name for path in (tmp_path / "charts").iterdir()}
    assert names == {"throughput.png", "ratios.png", "roofline.png"}


def test_points_have_the_sizes_of_their_problems(measured: dict[str, Any]) -> None:
    points = chart_data.points(measured)
    assert len(points) == sum(len(case["entries"]) for case in measured["cases"])
    for point in points:
        assert f"-{point.length}-" in point.case
        assert str(point.length) not in point.line.split("-")
        assert 0 < point.intensity < 1e5


def test_the_roofline_counts_values_and_output_by_their_own_head_size() -> None:
    """Values of another head size were counted as wide as the keys."""
    case = Case("sizes", layout="bshd", batch=1, q_len=5, kv_len=7, heads=4, kv_heads=2, qk_dim=8, v_dim=3)
    arguments = build(case).arguments
    tensors = [arguments[name] for name in "qkv"] + [attention(**arguments)]
    problem = str(explain(**arguments).problem)
    assert chart_data._sizes(problem) == (7, sum(tensor.numel() for tensor in tensors))


@pytest.mark.parametrize("ratio", [2.76, 2.78, 2.82, 2.93])
def test_a_group_of_one_case_has_a_ratio_without_a_range(measured: dict[str, Any], ratio: float) -> None:
    """The geometric mean of one number may differ from it by a rounding, and an error bar must not be negative."""
    report = copy.deepcopy(measured)
    report["cases"] = report["cases"][:1]
    for entry in report["cases"][0]["entries"]:
        entry["of_ours"] = ratio
    assert "ratios" in [chart.name for chart in plots.charts(report)]


def test_a_case_has_the_colour_of_the_peak_of_its_dtype_in_the_roofline(measured: dict[str, Any]) -> None:
    """Otherwise nobody sees which of the lines limits a case."""
    from matplotlib.colors import to_hex

    report = copy.deepcopy(measured)
    for case in report["cases"]:
        case["rate"]["what"] = "float32 multiply-adds"
    halves = copy.deepcopy(report["cases"][0])
    halves["problem"] = halves["problem"].replace("float32", "bfloat16")
    halves["rate"]["what"] = "bfloat16 matrix product"
    report["cases"].append(halves)
    axes = next(chart for chart in plots.charts(report) if chart.name == "roofline").figure.axes[0]
    peaks = {str(line.get_label()).split()[0]: to_hex(line.get_color()) for line in axes.lines}
    colours = [to_hex(colour) for group in axes.collections for colour in group.get_edgecolors()]
    assert len(set(peaks.values())) == 2
    assert colours.count(peaks["bfloat16"]) == 1
    assert colours.count(peaks["float32"]) == len(report["cases"]) - 1


class TestCompare:
    def scaled(self, report: dict[str, Any], ours: float, others: float = 1.0, contended: bool = False) -> Any:
        """The report with all times of ours, and of the others, multiplied by a factor, on a steady machine."""
        changed = copy.deepcopy(report)
        for case in changed["cases"]:
            case["rate"] |= {"before": 1e9, "after": 1e9, "contended": contended}
            for entry in case["entries"]:
                entry["seconds"] *= ours if entry["name"] == "undivided" else others
        return changed

    def verdicts(self, report: dict[str, Any], **changed: Any) -> set[str]:
        old = self.scaled(report, 1.0)
        return {change.verdict for change in compare.changes(old, self.scaled(report, **changed))}

    def test_a_change_beyond_seven_percent_counts(self, measured: dict[str, Any]) -> None:
        assert self.verdicts(measured, ours=1.1) == {"slower"}
        assert self.verdicts(measured, ours=0.9) == {"faster"}
        assert self.verdicts(measured, ours=1.05) == {"same"}

    def test_a_change_that_the_competitors_share_is_noise(self, measured: dict[str, Any]) -> None:
        assert self.verdicts(measured, ours=1.2, others=1.3) == {"same"}
        assert self.verdicts(measured, ours=1.4, others=1.3) == {"slower"}

    @pytest.mark.parametrize("name", OTHERS)
    def test_every_other_implementation_is_such_a_competitor(self, measured: dict[str, Any], name: str) -> None:
        """vLLM's operator counted as a backend of this library, whose code may have changed."""
        old = self.scaled(measured, 1.0)
        for case in old["cases"]:
            next(entry for entry in case["entries"] if entry["name"] == "sdpa")["name"] = name
        new = self.scaled(old, ours=1.2, others=1.3)
        assert {change.verdict for change in compare.changes(old, new)} == {"same"}

    def test_a_disturbed_case_never_counts(self, measured: dict[str, Any]) -> None:
        assert self.verdicts(measured, ours=3.0, contended=True) == {"disturbed"}

    def test_probes_that_drift_widen_the_noise(self, measured: dict[str, Any]) -> None:
        old, new = self.scaled(measured, 1.0), self.scaled(measured, 1.2)
        for case in new["cases"]:
            case["rate"]["after"] = 1.3e9
        assert {change.verdict for change in compare.changes(old, new)} == {"same"}

    def test_command_names_the_rule_and_other_conditions(self, measured: dict[str, Any], tmp_path: Path) -> None:
        old, new = self.scaled(measured, 1.0), self.scaled(measured, 2.0)
        old["machine"]["torch"] = "2.10.0"
        for name, report in (("old", old), ("new", new)):
            (tmp_path / f"{name}.json").write_text(json.dumps(report), encoding="utf-8")
        done = run("bench", "--from", str(tmp_path / "new.json"), "--compare", str(tmp_path / "old.json"))
        text = " ".join(done.stdout.split())
        assert done.exit_code == 0
        assert "2.00 x slower" in text
        assert "A case that either run marks as disturbed (~) never counts." in text
        assert "torch 2.10.0 and" in text


def refused(*arguments: str) -> str:
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


class TestRefusals:
    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 1}', '{"schema": 99, "cases": []}', "\x00"])
    @pytest.mark.parametrize("flags", [("report", "--bench"), ("bench", "--from"), ("bench", "--compare")])
    def test_files_that_are_no_reports(self, tmp_path: Path, flags: tuple[str, str], text: str) -> None:
        path = tmp_path / "bad.json"
        path.write_text(text, encoding="utf-8")
        out = ("--out", str(tmp_path / "x.html")) if flags[0] == "report" else ()
        assert f"{flags[1]} must be a report" in refused(*flags, str(path), *out)
        assert not (tmp_path / "x.html").exists()

    def test_files_that_do_not_exist(self, tmp_path: Path) -> None:
        missing = str(tmp_path / "missing.json")
        assert "No such file" in refused("report", "--bench", missing, "--out", str(tmp_path / "x.html"))

    def test_places_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert "--out must be a file" in refused("report", "--no-bench", "--out", str(tmp_path))
        assert "must be a folder" in refused("report", "--no-bench", "--out", str(tmp_path / "file" / "x.html"))
        assert "--plot must be a folder" in refused("bench", "--plot", str(tmp_path / "file"))

    def test_a_typo_in_the_mask(self, tmp_path: Path) -> None:
        assert "mask must" in refused("report", "--no-bench", "--mask", "casual()", "--out", str(tmp_path / "x.html"))

    @pytest.mark.parametrize(
        ("package", "extra", "arguments"),
        [
            ("jinja2", "report", ("report", "--no-bench")),
            ("matplotlib", "plot", ("report",)),
            ("matplotlib", "plot", ("bench", "--plot", "charts")),
            ("matplotlib", "plot", ("demo", "--out", "charts")),
        ],
    )
    def test_a_missing_package_is_one_line_with_its_extra(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, extra: str, arguments: tuple[str, ...]
    ) -> None:
        import importlib.util

        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name, *rest)
        )
        monkeypatch.chdir(tmp_path)
        text = refused(*arguments)
        assert f"pip install 'undivided[{extra}]'" in text
        assert not list(tmp_path.iterdir())


def test_no_bench_needs_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("undivided.masks._drawing.require_matplotlib", lambda argument: pytest.fail("required"))
    verify_once(monkeypatch)
    out = tmp_path / "report.html"
    done = run("report", "--no-bench", "--out", str(out), "--json")
    answer = json.loads(done.stdout)
    assert answer["ok"]
    assert answer["bytes"] == out.stat().st_size
    assert not re.search("<h2[^>]*>Benchmarks", out.read_text(encoding="utf-8"))
