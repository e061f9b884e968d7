"""Measured ranks: synthetic tables on described machines, their files, and the conversion of a report."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import undivided
from undivided import InputError, Machine, masks
from undivided.benchmarking import __main__ as plainly
from undivided.benchmarking import ranks as made
from undivided.benchmarking import timing
from undivided.benchmarking.catalogue import GPU_SUITES, benchmarks
from undivided.benchmarking.competitors import selectable_backends
from undivided.benchmarking.runs import Settings
from undivided.benchmarking.suites import empty_report
from undivided.cli._app import app
from undivided.cli.commands import bench
from undivided.request.problem import Problem
from undivided.selection import decision as selection
from undivided.selection import measured as _measured
from undivided.selection.measured import Entry, Place, Run, Table
from undivided.verification import workers

PACKAGES = {"triton": "3.5.0", "flash_attn": "2.8.3", "cudnn_frontend": "1.15.0"}
H100 = Machine("cuda", "H100", (9, 0), "9.16.0", {**PACKAGES, "flash_attn_3": "3.0.0"})
A100 = Machine("cuda", "A100", (8, 0), "9.13.0", PACKAGES)
RUN = Run("2027-01-02T03:04:05+00:00", "NVIDIA H100", "abcdef0", "2.13.0", "made.json")
CAUSAL = "sm90/bfloat16/forward/128/causal"

Measured = Callable[[Table], None]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Make selection use only this table, with empty decision caches."""

    def install(table: Table) -> None:
        monkeypatch.setattr(_measured, "tables", lambda: (table,))
        monkeypatch.setattr(selection, "_decisions", {})
        monkeypatch.setattr(selection, "_by_class", {})

    return install


def q(length: int = 4096, dtype: torch.dtype = torch.bfloat16, heads: int = 16) -> torch.Tensor:
    return torch.empty(4, length, heads, 128, dtype=dtype, device="meta")


def explain(length: int = 4096, machine: Machine = H100, **arguments: Any) -> undivided.Decision:
    x = q(length)
    return undivided.explain(x, x, x, layout="bshd", machine=machine, **{"mask": masks.causal(), **arguments})


def table(kind: str = CAUSAL, length: int = 4096, run: Run = RUN, **rates: float) -> Table:
    """One entry, where `explain(length)` stands."""
    at = _measured.place(explain(length).problem, H100)
    assert at is not None
    return {kind: {(at.length, at.work): Entry(run, rates)}}


def order(decision: undivided.Decision) -> list[str]:
    """Those that can run, in order."""
    return [verdict.backend.name for verdict in decision.verdicts if verdict.can_run]


DEFAULT_ORDER = ["cudnn", "torch_cudnn", "flash_attn", "torch_flash", "torch_efficient", "triton", "reference"]


class TestOrder:
    def test_without_a_measurement_it_is_the_default_rank(self, measured: Measured) -> None:
        measured({})
        decision = explain()
        assert order(decision) == DEFAULT_ORDER
        assert "  cudnn            chosen (fused); default rank: not measured on sm90" in str(decision)
        assert all(verdict.estimate is None for verdict in decision.verdicts)

    def test_measured_backends_are_sorted_among_their_places_and_the_others_keep_theirs(
        self, measured: Measured
    ) -> None:
        measured(table(cudnn=3e14, flash_attn=5e14, triton=4e14))
        assert order(explain()) == [
            "flash_attn",
            "torch_cudnn",
            "triton",
            "torch_flash",
            "torch_efficient",
            "cudnn",
            "reference",
        ]

    def test_one_measured_backend_changes_nothing(self, measured: Measured) -> None:
        measured(table(triton=9e14))
        assert order(explain()) == DEFAULT_ORDER
        (verdict,) = (verdict for verdict in explain().verdicts if verdict.estimate)
        assert explain().standing(verdict).startswith("est. ")  # nothing to compare it with

    @pytest.mark.parametrize(("length", "unit"), [(1, "B"), (64, "FLOP")])
    def test_the_rate_of_decoding_is_in_bytes_and_that_of_other_steps_in_operations(
        self, length: int, unit: str
    ) -> None:
        problem = undivided.explain(
            q(length), q(), q(), layout="bshd", mask=masks.causal("bottom_right"), machine=H100
        ).problem
        found = _measured.estimate(Entry(RUN, {"triton": 2e9}), "triton", problem)
        assert found is not None
        assert (found.unit, found.seconds) == (unit, _measured.work(problem) / 2e9)
        assert _measured.estimate(Entry(RUN, {"triton": 2e9}), "cudnn", problem) is None

    def test_within_five_hundredths_the_default_rank_decides(self, measured: Measured) -> None:
        measured(table(cudnn=4.80e14, flash_attn=5e14))
        assert explain().backend.name == "cudnn"
        measured(table(cudnn=4.74e14, flash_attn=5e14))
        assert explain().backend.name == "flash_attn"

    @pytest.mark.parametrize(
        ("processor", "chosen"), [("AMD Ryzen", "torch_flash"), ("Intel(R) Xeon(R)", "native"), ("", "torch_flash")]
    )
    def test_a_close_order_from_a_cpu_of_another_vendor_does_not_count(
        self, measured: Measured, processor: str, chosen: str
    ) -> None:
        here = Machine("cpu", isa="avx2", processor=processor)
        x = torch.empty(1, 512, 8, 64, device="cpu")
        problem = undivided.explain(x, x, x, layout="bshd", machine=here).problem
        at = _measured.place(problem, here)
        assert at is not None
        run = RUN._replace(machine="AMD EPYC, 1 thread")
        measured({at.kind: {(at.length, at.work): Entry(run, {"native": 5.5e10, "torch_flash": 1.0e11})}})
        decision = undivided.explain(x, x, x, layout="bshd", machine=here)
        assert decision.backend.name == chosen
        assert ("measured rank, another vendor: est." in str(decision)) == (chosen == "native")
        measured({at.kind: {(at.length, at.work): Entry(run, {"native": 4.5e10, "torch_flash": 1.0e11})}})
        assert undivided.explain(x, x, x, layout="bshd", machine=here).backend.name == "torch_flash"

    def test_backends_that_cannot_run_keep_their_place(self, measured: Measured) -> None:
        measured(table(cudnn=3e14, flash_attn=5e14))
        without = Machine("cuda", "H100", (9, 0), "9.16.0", {"triton": "3.5.0", "cudnn_frontend": "1.15.0"})
        decision = explain(machine=without)
        assert decision.backend.name == "cudnn"
        assert {v.backend.name: v.estimate is not None for v in decision.verdicts}["flash_attn"] is False

    def test_an_unknown_backend_in_a_table_is_ignored(self, measured: Measured) -> None:
        measured(table(cudnn=3e14, somebody=9e15))
        assert order(explain()) == DEFAULT_ORDER

    def test_the_callers_order_comes_first_and_a_family_is_ordered_by_measurement(self, measured: Measured) -> None:
        measured(table(cudnn=3e14, torch_cudnn=4e14, flash_attn=5e14))
        with undivided.use_backends("cudnn", "flash_attn"):
            assert explain().backend.name == "cudnn"
        with undivided.use_backends("fused", "flash"):
            assert order(explain())[:3] == ["torch_cudnn", "cudnn", "flash_attn"]
        assert explain(backend="cudnn").backend.name == "cudnn"

    def test_another_architecture_dtype_pass_head_size_or_mask_is_another_kind(self, measured: Measured) -> None:
        measured(table(cudnn=3e14, triton=5e14))
        assert explain().backend.name == "triton"
        assert explain(mask=None).backend.name == "cudnn"
        assert explain(machine=A100).backend.name == "flash_attn"
        wide = torch.empty(4, 4096, 16, 256, dtype=torch.bfloat16, device="meta")
        assert (
            undivided.explain(wide, wide, wide, layout="bshd", mask=masks.causal(), machine=H100).backend.name
            == "cudnn"
        )
        half = q(dtype=torch.float16)
        assert (
            undivided.explain(half, half, half, layout="bshd", mask=masks.causal(), machine=H100).backend.name
            == "cudnn"
        )
        trained = q().requires_grad_()
        assert (
            undivided.explain(trained, q(), q(), layout="bshd", mask=masks.causal(), machine=H100).backend.name
            == "cudnn"
        )

    @pytest.mark.parametrize(
        ("length", "batch", "near"),
        [
            (1024, 64, False),
            (2048, 16, True),
            (2048, 4, True),
            (2050, 4, True),
            (4096, 1, True),
            (4096, 33, False),
            (8192, 1, True),
            (8192, 4, True),
            (8192, 9, False),
            (16384, 1, False),
        ],
    )
    def test_twice_the_keys_and_four_times_the_work_are_near(
        self, measured: Measured, length: int, batch: int, near: bool
    ) -> None:
        measured(table(cudnn=3e14, triton=5e14))
        x = q(length)[:1].expand(batch, -1, -1, -1)
        decision = undivided.explain(x, x, x, layout="bshd", mask=masks.causal(), machine=H100)
        assert (decision.backend.name == "triton") == near

    @pytest.mark.parametrize(("length", "near"), [(8, False), (9, True), (16, True), (17, False), (32, False)])
    def test_of_short_sequences_only_the_same_length_is_near(self, measured: Measured, length: int, near: bool) -> None:
        """torch_flash may be the fastest for 16 keys and not for 8: measured, by up to 1.6x."""
        measured(table(length=16, cudnn=3e14, triton=5e14))
        assert (explain(length).backend.name == "triton") == near

    def test_the_nearest_counts(self, measured: Measured) -> None:
        near, far = table(cudnn=3e14, triton=5e14), table(length=16384, cudnn=5e14, triton=3e14)
        measured({CAUSAL: {**near[CAUSAL], **far[CAUSAL]}})
        found = [explain(n).backend.name for n in (2048, 4096, 8192, 16384, 32768)]
        assert found == ["triton", "triton", "triton", "cudnn", "cudnn"]

    def test_the_users_table_comes_before_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        users, ours = table(length=8192, cudnn=5e14, triton=3e14), table(cudnn=3e14, triton=5e14)
        monkeypatch.setattr(_measured, "tables", lambda: (users, ours))
        assert explain().backend.name == "cudnn", "near, in the user's table, before exact, in ours"

    def test_an_activated_flash_kernel_is_another_architecture(self, measured: Measured) -> None:
        measured(table(cudnn=3e14, torch_flash=5e14))
        assert explain().backend.name == "torch_flash"
        assert explain(machine=dataclasses.replace(H100, flash_impl="FA3")).backend.name == "cudnn"

    def test_amd_has_no_architecture_here(self) -> None:
        amd = Machine("cuda", "MI300X", None, None, {"triton": "3.5.0"}, hip=True)
        assert "default rank: not measured on this machine" in str(explain(machine=amd))


class TestTableOfThePackage:
    def test_every_level_that_could_be_measured_has_entries(self) -> None:
        levels = {kind.split("/")[0] for kind in _measured.read(_measured.OURS)}
        assert {"generic", "avx2", "avx512", "avx512_bf16", "amx"} <= levels

    def test_every_run_names_its_processor_threads_date_commit_version_and_report(self) -> None:
        reports = Path(undivided.__file__).parents[2] / "benchmarks"
        runs = {entry.run for places in _measured.read(_measured.OURS).values() for entry in places.values()}
        for run in runs:
            assert _measured._vendor(run.machine) in ("amd", "intel")
            assert "thread" in run.machine
            assert run.when[:2] == "20"
            assert run.commit
            assert run.torch[:1].isdigit()
            assert not reports.exists() or (reports / run.report).exists(), run.report

    def test_an_order_that_another_vendor_measured_clearly_holds_here_too(self) -> None:
        """Of the entries at x86 levels, those within a factor of two change nothing on a CPU of another vendor."""
        for kind, places in _measured.read(_measured.OURS).items():
            for entry in places.values():
                other = Machine("cpu", processor="Intel(R)" if "AMD" in entry.run.machine else "AMD")
                tie = _measured.tie(entry, "cpu", other)
                names = [name for name in ("native", "torch_flash") if name in entry.rates]
                order = list(_measured.fastest_first(names, entry.rates, tie))
                if len(names) == 2 and entry.rates["torch_flash"] < 2 * entry.rates["native"]:
                    assert order == names, kind


class TestEstimates:
    def test_an_estimate_is_work_over_rate(self, measured: Measured) -> None:
        measured(table(cudnn=3e14, triton=6e14))
        found = {v.backend.name: v.estimate for v in explain().verdicts}
        pairs = 4 * 16 * 4096 * 4097 // 2
        assert found["triton"] == (2 * pairs * 256 / 6e14, 6e14, "FLOP", RUN)
        assert found["torch_flash"] is None
        lines = str(explain()).splitlines()
        assert (
            "  triton           chosen (flash); measured rank: est. 458 us, from bench 2027-01-02, NVIDIA H100" in lines
        )
        second = "  cudnn            can run, ranked after triton; measured rank: est. 916 us, from bench 2027-01-02"
        assert f"{second}, NVIDIA H100" in lines
        assert "  reference        can run, ranked after triton; default rank: not measured on sm90" in lines

    def test_with_the_callers_order_no_rank_is_called_a_default(self, measured: Measured) -> None:
        measured(table(cudnn=3e14, triton=6e14))
        assert "default rank" not in str(explain(backend="torch_flash"))
        with undivided.use_backends("torch_flash", "cudnn"):
            text = str(explain())
        assert "default rank" not in text
        assert "  torch_flash      chosen (flash)" in text.splitlines()

    @pytest.mark.parametrize(
        "mask",
        [
            masks.causal("top_left"),
            masks.causal("bottom_right"),
            masks.window(3, 2, "bottom_right"),
            masks.window(9, None, "top_left"),
            masks.window(None, 5, "bottom_right"),
        ],
    )
    @pytest.mark.parametrize("sizes", [(7, 7), (5, 11), (11, 5), (1, 6), (6, 1)])
    def test_the_pairs_of_a_band_are_counted(self, mask: masks.Mask, sizes: tuple[int, int]) -> None:
        x, kv = torch.empty(1, sizes[0], 1, 8), torch.empty(1, sizes[1], 1, 8)
        problem = undivided.explain(x, kv, kv, layout="bshd", mask=mask).problem
        assert _measured._pairs(problem, *sizes) == int(mask.to_dense(1, 1, *sizes).sum())

    def test_decoding_is_rated_by_bytes_and_a_causal_mask_of_its_last_query_is_none(self) -> None:
        one, kv = (torch.empty(2, 1, 8, 64, dtype=torch.float16), torch.empty(2, 100, 2, 64, dtype=torch.float16))
        problem = undivided.explain(one, kv, kv, layout="bshd", mask=masks.causal("bottom_right")).problem
        at = _measured.place(problem, Machine("cpu", isa="amx"))
        assert at is not None
        assert at.kind == "amx/float16/decode/64/gqa"
        assert _measured.work(problem) == 2 * 100 * 2 * 128 * 2

    def test_packed_documents_count_by_the_longest(self) -> None:
        x = torch.empty(100, 1, 8)
        problem = undivided.explain(x, x, x, layout="thd", mask=masks.documents([0, 50, 100]) & masks.causal()).problem
        assert _measured.work(problem) == 2 * (50 * 51) * 16
        assert _measured._structure(problem) == "causal+documents"


class TestFiles:
    @pytest.fixture
    def users(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        monkeypatch.delenv("UNDIVIDED_RANKS", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        _measured.tables.cache_clear()
        yield tmp_path / "undivided" / "ranks.json"
        _measured.tables.cache_clear()

    def test_a_written_table_is_read_and_used(self, users: Path) -> None:
        _measured.write(users, table(cudnn=3e14, triton=5e14))
        assert _measured.read(users) == table(cudnn=3e14, triton=5e14)
        _measured.tables.cache_clear()
        assert explain().backend.name == "triton"
        assert len(_measured.tables()) == 2

    def test_entries_are_replaced_one_by_one(self) -> None:
        old, new = table(cudnn=1.0), table(length=8192, cudnn=2.0)
        both = _measured.merged(old, new)
        assert len(both[CAUSAL]) == 2
        assert _measured.merged(both, table(triton=3.0)) == _measured.merged(table(triton=3.0), new)

    def test_places_are_counted_with_the_date_of_the_newest(self, users: Path) -> None:
        before = _measured.count_places("sm90")
        older = table(run=RUN._replace(when="2026-11-30T00:00:00+00:00"), cudnn=1.0)
        _measured.write(users, _measured.merged(older, table(length=8192, cudnn=2.0)))
        _measured.tables.cache_clear()
        assert _measured.count_places("sm90") == (2, before.ours, "2027-01-02")
        assert _measured.count_places("sm80").users == 0

    def test_no_file_is_an_empty_table(self, users: Path) -> None:
        assert _measured.read(users) == {}
        assert explain().backend is not None

    def test_a_variable_that_names_a_missing_file_gives_one_warning(
        self, users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A misspelt path was once treated as an empty table, without a message."""
        monkeypatch.setenv("UNDIVIDED_RANKS", str(tmp_path / "rank.json"))
        with pytest.warns(RuntimeWarning, match=r"UNDIVIDED_RANKS must name a file that exists, got .*rank\.json"):
            assert explain().backend is not None
        assert explain().backend is not None, "once is enough"

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("{", "Expecting property name"),
            ("[]", "indices"),
            ("{}", "schema"),
            ('{"schema": 9, "runs": {}, "rates": {}}', "schema 9"),
            ('{"schema": 1, "runs": {}, "rates": {"k": {"1/2": ["0", {}]}}}', "'0'"),
            ('{"schema": 1, "runs": {}, "rates": {"k": {"one": ["0", {}]}}}', "invalid literal"),
            ('{"schema": 1, "runs": {"0": {}}, "rates": {}}', "missing"),
        ],
    )
    def test_a_file_that_is_not_a_table_is_ignored_with_a_warning(self, users: Path, text: str, said: str) -> None:
        users.parent.mkdir()
        users.write_text(text)
        with pytest.raises(InputError, match=said):
            _measured.read(users)
        with pytest.warns(
            RuntimeWarning, match=r"ranks\.json must be a table of ranks.*the package's own ranks are used"
        ):
            assert explain().backend is not None
        assert explain().backend is not None, "once is enough"

    @pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
    def test_an_invalid_rate_is_refused(self, users: Path, rate: float) -> None:
        _measured.write(users, table(cudnn=rate))
        with pytest.raises(InputError, match="is not a positive number"):
            _measured.read(users)

    def test_the_packages_table_is_right_and_its_reports_are_kept(self) -> None:
        found = _measured.read(_measured.OURS)
        kept = {path.name for path in (Path(__file__).parents[2] / "benchmarks").glob("*.json")}
        for kind, places in found.items():
            assert kind.count("/") == 4
            for entry in places.values():
                assert entry.run.report in kept
                assert set(entry.rates) <= {backend.name for backend in selection.all_backends()}


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
        "place": Place(kind, 13, 40)._asdict() | {"operations_or_bytes": 3.5e12 if backward else 1e12},
    }


def report(*cases: dict[str, Any]) -> dict[str, Any]:
    machine = {"gpu": "NVIDIA H100", "torch": "2.13.0", "processor": "x", "threads": 1}
    return {"when": RUN.when, "machine": machine, "commit": "abcdef0", "cases": list(cases)}


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"}, catch_exceptions=False)


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
            return (workers.Done(task, function(task)) for task in tasks)

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

    def test_a_filter_without_a_match_is_refused(self) -> None:
        done = command("ranks", "--into", str(_measured.OURS), "--filter", "forwards")
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
        assert entry == Entry(RUN, {"cudnn": 4e14, "triton": 4e14})

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
        assert _measured.place(decision.problem, H100) is not None
        if len([name for name in order(decision) if name not in ("reference", "flex")]) < 2:
            alone.append(benchmark.name)
    assert alone == ALONE[suite]


def test_rivals_of_the_cpu() -> None:
    assert "torch_flash" in selectable_backends("cpu")
    assert not {"reference", "flex", "triton"} & set(selectable_backends("cpu"))


@pytest.mark.parametrize("machine", [H100, Machine("cpu", isa="amx")])
def test_a_place_depends_on_lengths_by_their_class_only(machine: Machine) -> None:
    def place(length: int) -> Place | None:
        return _measured.place(explain(length).problem._replace(device=machine.device or "cpu"), machine)

    assert place(2049) == place(4096) != place(4097)
    problem: Problem = explain().problem
    assert selection.selection_key(problem._replace(q_len=4160, kv_len=4160)) == selection.selection_key(
        problem._replace(q_len=8128, kv_len=8128)
    )
    assert place(4160) == place(8128)
