"""Measured ranks: synthetic tables on described machines, their files, and the conversion of a report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_tables import CAUSAL, H100, PACKAGES, RUN, Measured, explain, order, q, table

import undivided
from undivided import Machine, masks
from undivided.selection import measured as _measured
from undivided.selection.measured import MeasuredRates

A100 = Machine("cuda", "A100", (8, 0), "9.13.0", PACKAGES)


DEFAULT_ORDER = ["cudnn", "torch_cudnn", "flash_attn", "torch_flash", "torch_efficient", "triton", "reference"]


class TestOrder:
    def test_without_a_measurement_it_is_the_default_rank(self, measured: Measured) -> None:
        measured({})
        decision = explain()
        assert order(decision) == DEFAULT_ORDER
        rank = "default rank: no measurement near this problem on sm90"
        assert f"  cudnn            chosen (fused); {rank}" in str(decision)
        assert all(verdict.estimate is None for verdict in decision.verdicts)

    @pytest.mark.parametrize(
        ("options", "mask", "chosen"),
        [
            ({}, None, "torch_flash"),
            ({}, masks.causal(), "torch_flash"),
            ({}, masks.causal("top_left"), "torch_flash"),
            ({}, masks.window(3, 0), "native"),
            ({"bias": torch.zeros(8, 8)}, None, "native"),
            ({"alibi_slopes": torch.ones(2)}, masks.causal(), "native"),
            ({"return_lse": True}, None, "native"),
        ],
    )
    def test_gradients_of_few_tokens_run_on_torch_flash_only_if_pytorch_records_its_operator(
        self, measured: Measured, options: dict[str, Any], mask: masks.Mask | None, chosen: str
    ) -> None:
        measured({})
        x = torch.ones(1, 8, 2, 16, device="cpu", requires_grad=True)
        here = Machine("cpu", isa="avx2", processor="AMD EPYC")
        decision = undivided.explain(x, x, x, layout="bshd", mask=mask, machine=here, **options)
        assert decision.backend.name == chosen

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
        found = _measured.estimate(MeasuredRates(RUN, {"triton": 2e9}), "triton", problem)
        assert found is not None
        assert (found.unit, found.seconds) == (unit, _measured.work(problem) / 2e9)
        assert _measured.estimate(MeasuredRates(RUN, {"triton": 2e9}), "cudnn", problem) is None

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
        at = _measured.table_cell(problem, here)
        assert at is not None
        run = RUN._replace(machine="AMD EPYC, 1 thread")
        measured({at.kind: {(at.length, at.work): MeasuredRates(run, {"native": 5.5e10, "torch_flash": 1.0e11})}})
        decision = undivided.explain(x, x, x, layout="bshd", machine=here)
        assert decision.backend.name == chosen
        assert ("measured rank, another vendor: est." in str(decision)) == (chosen == "native")
        measured({at.kind: {(at.length, at.work): MeasuredRates(run, {"native": 4.5e10, "torch_flash": 1.0e11})}})
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
        measured(table(length=16, torch_cudnn=3e14, triton=5e14))
        assert (explain(length).backend.name == "triton") == near

    def test_the_nearest_counts(self, measured: Measured) -> None:
        near, far = table(cudnn=3e14, triton=5e14), table(length=16384, cudnn=5e14, triton=3e14)
        measured({CAUSAL: {**near[CAUSAL], **far[CAUSAL]}})
        found = [explain(n).backend.name for n in (2048, 4096, 8192, 16384, 32768)]
        assert found == ["triton", "triton", "triton", "cudnn", "cudnn"]

    def test_the_users_table_comes_before_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        users, ours = table(length=8192, cudnn=5e14, triton=3e14), table(cudnn=3e14, triton=5e14)
        monkeypatch.setattr(_measured.table, "tables", lambda: (users, ours))
        assert explain().backend.name == "cudnn", "near, in the user's table, before exact, in ours"

    def test_an_activated_flash_kernel_is_another_architecture(self, measured: Measured) -> None:
        measured(table(cudnn=3e14, torch_flash=5e14))
        assert explain().backend.name == "torch_flash"
        assert explain(machine=dataclasses.replace(H100, flash_impl="FA3")).backend.name == "cudnn"

    def test_amd_has_no_architecture_here(self) -> None:
        amd = Machine("cuda", "MI300X", None, None, {"triton": "3.5.0"}, hip=True)
        assert "default rank: no measurement near this problem on this machine" in str(explain(machine=amd))


class TestTableOfThePackage:
    def test_every_level_that_could_be_measured_has_entries(self) -> None:
        levels = {kind.split("/")[0] for kind in _measured.read(_measured.PACKAGE_TABLE)}
        assert {"generic", "avx2", "avx512", "avx512_bf16", "amx", "sm90"} <= levels

    def test_every_run_names_its_processor_threads_date_commit_version_and_report(self) -> None:
        reports = Path(undivided.__file__).parents[2] / "benchmarks"
        runs = {entry.run for places in _measured.read(_measured.PACKAGE_TABLE).values() for entry in places.values()}
        for run in runs:
            vendor = _measured.estimates._vendor(run.machine)
            assert vendor in ("amd", "intel", "nvidia")
            assert "thread" in run.machine or vendor == "nvidia"
            assert run.when[:2] == "20"
            assert run.commit
            assert run.torch[:1].isdigit()
            assert not reports.exists() or (reports / run.report).exists(), run.report

    def test_an_order_that_another_vendor_measured_clearly_holds_here_too(self) -> None:
        """Of the entries at x86 levels, those within a factor of two change nothing on a CPU of another vendor."""
        for kind, places in _measured.read(_measured.PACKAGE_TABLE).items():
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
        rank = "default rank: no measurement near this problem on sm90"
        assert f"  reference        can run, ranked after triton; {rank}" in lines

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
        assert _measured.cells._pairs(problem, *sizes) == int(mask.to_dense(1, 1, *sizes).sum())

    def test_decoding_is_rated_by_bytes_and_a_causal_mask_of_its_last_query_is_none(self) -> None:
        one, kv = (torch.empty(2, 1, 8, 64, dtype=torch.float16), torch.empty(2, 100, 2, 64, dtype=torch.float16))
        problem = undivided.explain(one, kv, kv, layout="bshd", mask=masks.causal("bottom_right")).problem
        at = _measured.table_cell(problem, Machine("cpu", isa="amx"))
        assert at is not None
        assert at.kind == "amx/float16/decode/64/gqa"
        assert _measured.work(problem) == 2 * 100 * 2 * 128 * 2

    def test_packed_documents_count_by_the_longest(self) -> None:
        x = torch.empty(100, 1, 8)
        problem = undivided.explain(x, x, x, layout="thd", mask=masks.documents([0, 50, 100]) & masks.causal()).problem
        assert _measured.work(problem) == 2 * (50 * 51) * 16
        assert _measured.cells._structure(problem) == "causal+documents"
