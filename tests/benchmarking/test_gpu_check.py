"""`scripts/gpu-check` and what it runs, rehearsed on a CPU: it is run once, far away, and must not fail there by
itself."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked_processes
import pytest
import torch
import worker_faults
from torch import Tensor

from undivided.backends import get
from undivided.benchmarking import __main__ as bench
from undivided.benchmarking import competitors, report, runs
from undivided.benchmarking.catalogue import GPU_SUITES, SUITES, Goal, benchmarks
from undivided.verification import capture, contract, inputs, workers
from undivided.verification.cases import CASES
from undivided.verification.lines import Line, Lines, Task, in_processes, pending

ROOT = Path(__file__).parents[2]


class TestWorkers:
    @pytest.fixture(autouse=True)
    def forked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """New processes that need not import torch again."""
        context = forked_processes.context()
        monkeypatch.setattr(workers.multiprocessing, "get_context", lambda method: context)

    def test_a_process_that_dies_hangs_or_raises_costs_its_task_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(workers, "START_SECONDS", 20.0)
        tasks = ["raises", "first", "dies", "second", "hangs"]
        found = {}
        for done in workers.work(tasks, worker_faults.misbehave, jobs=1, task_seconds=1.0):
            found[done.task] = done
        assert set(found) == set(tasks)
        assert "exit code -9" in found["dies"].failure
        assert "took too long" in found["hangs"].failure
        assert "ArithmeticError: of its own" in found["raises"].failure
        assert str(found["first"].value).split()[-1] != str(found["second"].value).split()[-1], "a fresh process"

    def test_a_run_ends_when_its_time_is_over(self) -> None:
        begun = time.monotonic()
        assert list(workers.work(["hangs"], worker_faults.misbehave, seconds=0.3)) == []
        assert time.monotonic() - begun < 10

    def test_the_backend_that_ends_its_process_is_found_and_the_others_are_judged(self) -> None:
        task = Task("cpu", "case", "float32", ("good", "bad"))
        lines = list(in_processes([task], worker_faults.one_backend_kills, jobs=1, seconds=60.0, task_seconds=30.0))
        assert {line.backend: line.verdict for line in lines} == {"good": "right", "bad": "wrong"}
        assert "its process ended" in next(line for line in lines if line.backend == "bad").detail[0]


class TestLines:
    def test_what_is_known_is_not_run_again(self) -> None:
        tasks = [Task("cpu", "a", "float32", ("x", "y")), Task("cpu", "b", "float32", ("x",))]
        known = [Line("a", "float32", "x", "right", ()), Line("b", "float32", "x", "wrong", ("far",))]
        assert pending(tasks, known) == [Task("cpu", "a", "float32", ("y",))]

    def test_the_file_is_there_before_the_end_and_is_read_back(self, tmp_path: Path) -> None:
        path = tmp_path / "contract.json"
        report = Lines(path)
        report.add(Line("a", "float32", "x", "wrong", ("far", "off")))
        assert [row["backend"] for row in json.loads(path.read_text())] == ["x"]
        assert Lines(path, resume=True).lines == report.lines
        assert Lines(path).lines == []

    def test_the_exit_code_says_wrong_before_unfinished(self) -> None:
        planned = [Task("cpu", "a", "float32", ("x", "y"))]
        report = Lines()
        assert report.end(planned) == 2
        report.add(Line("a", "float32", "x", "right", ()))
        report.add(Line("a", "float32", "y", "refused", ("no",)))
        assert report.end(planned) == 0
        report.add(Line("b", "float32", "x", "undecided", ("no digit",)))
        assert report.end(planned) == 2
        report.add(Line("b", "float32", "y", "wrong", ("far",)))
        assert report.end(planned) == 1


def test_every_case_is_seen_in_one_dtype_before_any_is_seen_twice() -> None:
    """And a kernel that compiles for seconds sees its sample: asked for in a dtype that no case had, it was never
    run."""
    planned = contract.tasks("cpu", (get("reference"), get("flex")), tuple(CASES.values()))
    halves = [task.dtype == "bfloat16" for task in planned]
    assert halves == sorted(halves, reverse=True)
    assert {task.case for task in planned if "flex" in task.backends} == contract.SAMPLE


def test_a_quantity_of_which_plain_attention_has_no_digit_right_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    build = inputs.build

    def with_huge_queries(*arguments: Any, **options: Any) -> inputs.Inputs:
        built = build(*arguments, **options)
        return replace(built, arguments={**built.arguments, "q": built.arguments["q"] * 1e8})

    monkeypatch.setattr(inputs, "build", with_huge_queries)
    task = Task("cpu", "gqa-4", "float32", ("reference", "torch_cudnn"))
    undecided, refused = contract.task_lines(task)
    assert (undecided.verdict, refused.verdict) == ("undecided", "refused")
    assert "dq: " in undecided.detail[0]
    assert "no digit right" in undecided.detail[0]


class FakeGraph:
    """A CUDA graph without CUDA: a replay computes again, into the memory of the first time (or, `stale`, does not)."""

    def __init__(self, stale: bool) -> None:
        self.stale, self.held = stale, None
        self.recorded: list[tuple[tuple[Tensor, ...], Callable[[], tuple[Tensor, ...]]]] = []

    def replay(self) -> None:
        for outputs, again in self.recorded if not self.stale else ():
            for old, new in zip(outputs, again(), strict=True):
                old.copy_(new)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """What `capture` asks of torch.cuda, without CUDA."""

    def install(stale: bool) -> None:
        step, graph, recording = capture._step, FakeGraph(stale), []

        def recorded(held: capture.StaticProblem, backend: str | None) -> tuple[Tensor, ...]:
            found = step(held, backend)
            if recording:
                graph.recorded.append((found, lambda: step(held, backend)))
            return found

        @contextlib.contextmanager
        def capturing(_: object) -> Iterator[None]:
            recording.append(1)
            yield
            recording.clear()

        class Stream:
            def wait_stream(self, _: object) -> None: ...

        for name, stand_in in {
            "Stream": Stream,
            "current_stream": Stream,
            "stream": contextlib.nullcontext,
            "graph": capturing,
            "CUDAGraph": lambda: graph,
            "synchronize": lambda: None,
            "set_sync_debug_mode": lambda _: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(capture, "_step", recorded)

    return install


def test_a_cpu_is_not_asked_about_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal with --device cpu called every backend wrong, because torch had no CUDA."""
    monkeypatch.setattr(capture, "available", lambda device: [])
    assert {task.case.partition("/")[0] for task in capture.tasks("cpu")} == {"repeat", "compile"}
    assert {task.case.partition("/")[0] for task in capture.tasks("cuda")} == set(capture.CHECKS)


@pytest.mark.parametrize("problem", capture.PROBLEMS)
@pytest.mark.parametrize("check", ["graph", "no-sync"])
def test_the_checks_of_a_captured_call_pass_where_it_is_right(
    no_cuda: Callable[[bool], None], check: str, problem: str
) -> None:
    no_cuda(False)
    lines = capture.task_lines(Task("cpu", f"{check}/{problem}", "bfloat16", ("chosen", "reference")))
    assert [line.verdict for line in lines] == ["right", "right"], lines


@pytest.mark.parametrize("problem", capture.PROBLEMS)
def test_a_graph_that_keeps_old_values_is_wrong(no_cuda: Callable[[bool], None], problem: str) -> None:
    no_cuda(True)
    line = capture.task_lines(Task("cpu", f"graph/{problem}", "bfloat16", ("reference",)))[0]
    assert line.verdict == "wrong"
    assert "AssertionError" in line.detail[0]


def test_a_backend_that_cannot_is_refused_with_its_reason() -> None:
    line = capture.task_lines(Task("cpu", "compile/causal", "bfloat16", ("torch_cudnn",)))[0]
    assert line.verdict == "refused"
    assert "device=cpu" in line.detail[0]


class TestBenchmarks:
    def test_every_suite_has_a_title_and_its_tables_are_made(self) -> None:
        """A report of the GPU's suite could not be printed: it had no title."""
        assert {*SUITES, *GPU_SUITES} <= set(report.TITLES)

    def test_reads_and_products_do_not_share_a_table(self) -> None:
        for suite in GPU_SUITES:
            assert len({benchmark.reads for benchmark in benchmarks(suite)}) == 1

    def test_a_competitor_that_fails_takes_no_part(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The forward of a backward's benchmark ran outside of any guard: one failing kernel ended the whole run."""

        def fails(prepared: object) -> Any:
            raise RuntimeError("no kernel image")

        monkeypatch.setattr(competitors, "_MAKERS", {**competitors._MAKERS, "math": fails})
        prepared = competitors.prepare(benchmarks("small")[0])
        found, absent = competitors.competitors(prepared, (), ("sdpa", "math"))
        assert [one.name for one in found] == ["undivided", "sdpa"]
        assert absent == {"math": "raised RuntimeError: no kernel image"}

    def test_goals_of_a_gpu(self) -> None:
        goal = Goal(best=1.03, kernel=0.65, pairs=1.15, kernel_faster=(("flex", 1.0),))
        benchmark = benchmarks("small")[0]
        benchmark = type(benchmark)("gpu", benchmark.case, torch.bfloat16, goal=goal)
        entries = [
            {"name": "undivided", "label": "torch_cudnn", "seconds": 1.0, "of_ours": 1.0, "fraction": 0.7},
            {"name": "triton", "label": "triton", "seconds": 1.25, "of_ours": 1.25, "fraction": 0.56},
            {"name": "without", "label": "torch_cudnn", "seconds": 4.0, "of_ours": 4.0, "fraction": 0.7},
            {"name": "flex", "label": "flex", "seconds": 2.5, "of_ours": 2.5, "fraction": 0.28},
        ]
        found = {g["what"]: g for g in runs._goals({"entries": entries, "share_of_pairs": 0.2}, benchmark)}
        assert found["peak by triton"]["found"] == 0.56
        assert not found["peak by triton"]["met"]
        assert found["x flex by triton"]["found"] == 2.0
        assert found["x its pairs"]["found"] == 1.25
        assert found["x the best other"]["found"] == 0.8
        assert found["x the best other"]["met"]

    def test_the_command_keeps_what_it_has_and_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        case = {
            "suite": "forward",
            "rate": {"what": "a rate", "unit": "FLOP/s", "used": 1.0, "contended": False},
            "bytes": None,
            "entries": [{"name": "triton", "label": "triton", "ok": False, "errors": {}, "note": "raised"}],
        }
        asked: list[str] = []

        def inline(tasks: list[Any], function: Any, **_: Any) -> Iterator[workers.TaskResult[Any, Any]]:
            for task in tasks[:2]:
                asked.append(task.name)
                value = None if "full" in task.name else {**case, "name": task.name}
                yield workers.TaskResult(task, value, "" if value else "its process ended")

        monkeypatch.setattr(bench.workers, "work", inline)
        path = tmp_path / "b.json"
        command = ["bench", "--device", "cpu", "--suite", "forward", "--filter", "bf16-d128-2048", "--json", str(path)]
        monkeypatch.setattr(sys, "argv", command)
        assert bench.main() == 1
        assert "FAILED forward/bf16-d128-2048-full: its process ended" in capsys.readouterr().out
        found = json.loads(path.read_text())
        assert [one["name"] for one in found["cases"]] == ["bf16-d128-2048-causal"]
        asked.clear()
        monkeypatch.setattr(sys, "argv", [*command, "--resume"])
        assert bench.main() == 1
        assert asked == ["bf16-d128-2048-full"], "what failed is tried again, what is known is not"


def gpu_check(*arguments: str, without: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(without or "")}
    return subprocess.run(
        [str(ROOT / "scripts/gpu-check"), *arguments], capture_output=True, text=True, env=environment, check=False
    )


class TestScript:
    @pytest.mark.slow
    def test_it_runs_from_the_sources_with_torch_alone(self, tmp_path: Path) -> None:
        """As on a machine where nothing can be installed: none of the packages that the tests have."""
        away = tmp_path / "away"
        away.mkdir()
        for name in ("typer", "rich", "pytest", "hypothesis", "onnx", "onnxruntime", "matplotlib", "transformers"):
            (away / f"{name}.py").write_text("raise ImportError('not on this machine')\n")
        done = gpu_check(
            str(tmp_path / "out"),
            "--device",
            "cpu",
            "--only",
            "machine",
            "--only",
            "contract",
            "--only",
            "host",
            "--filter",
            "gqa-of-a-prime",
            "--jobs",
            "1",
            "--seconds",
            "100",
            without=away,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "reference: 2 right, 0 wrong, 0 refused" in done.stdout
        assert {row["case"] for row in json.loads((tmp_path / "out/contract.json").read_text())} == {
            "gqa-of-a-prime-7-heads"
        }
        assert "torch_flash" in (tmp_path / "out/machine.txt").read_text()
        times = json.loads((tmp_path / "out/host.json").read_text())["times"]
        assert {(row["problem"], row["competitor"]) for row in times} >= {
            ("causal, 128 tokens", "chosen"),
            ("causal, 128 tokens", "sdpa"),
            ("3 packed documents", "torch_flash"),
        }
        assert all(row["microseconds"] > 0 for row in times)

    def test_it_uses_all_cores_however_many_threads_a_process_has(self, tmp_path: Path) -> None:
        """nproc prints OMP_NUM_THREADS, which the script sets to 1."""
        for name, text in (("nproc", "echo ${OMP_NUM_THREADS:-7}"), ("python", "echo $@")):
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "python", "OMP_NUM_THREADS": "1"}
        command = [str(ROOT / "scripts/gpu-check"), str(tmp_path), "--device", "cpu", "--only", "contract"]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables, check=False)
        assert "-m undivided.verification.contract --device cpu --jobs 7 " in done.stdout

    def test_without_a_gpu_it_says_so(self, tmp_path: Path) -> None:
        done = gpu_check(str(tmp_path))
        assert (done.returncode, "no torch that finds a GPU" in done.stderr) == (3, True)

    def test_an_unknown_stage_is_refused_before_anything_runs(self, tmp_path: Path) -> None:
        done = gpu_check(str(tmp_path), "--only", "everything")
        assert (done.returncode, "got everything" in done.stderr) == (64, True)
