"""Tile sizes of the Triton kernels, their tuning, and what they compile to for GPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import call_of
from torch import Tensor
from typer.testing import CliRunner

import undivided
from undivided import masks
from undivided.backends import get
from undivided.backends import triton as backend
from undivided.backends.triton import inputs as _triton_inputs
from undivided.benchmarking import tuning
from undivided.kernels.triton import config
from undivided.quantization import FORMATS
from undivided.request.result import Result
from undivided.verification import contract
from undivided.verification.cases import CASES

SHARED = {"sm80": 163 * 1024, "sm89": 99 * 1024, "sm90": 227 * 1024, "sm100": 227 * 1024, "sm120": 99 * 1024}
"""Bytes of shared memory that a program may have (CUDA programming guide, compute capabilities)."""


SPILLED = {
    ("sm90", "keys_kernel", "plain-bf16-64"): 312,
    ("sm90", "keys_kernel", "plain-bf16-128"): 32,
    ("sm90", "keys_kernel", "plain-bf16-256"): 84,
    **{
        ("sm90", "forward_kernel", f"{problem}-bf16-128"): 12
        for problem in ("pages", "chosen-pages", "pack-decode", "pack-mixed")
    },
    ("sm90", "forward_kernel", "decode-wide-pages-bf16"): 20,
    ("sm90", "forward_kernel", "decode-many-bf16"): 76,
    **{("sm90", "forward_kernel", f"decode-{format}-256"): 4 for format in ("fp8_e4m3", "fp8_e5m2")},
    ("sm80", "rows_kernel", "everything-fp16-64"): 32,
    ("sm80", "keys_kernel", "everything-fp16-64"): 24,
}
"""Bytes per thread that a kernel may spill; all others spill none. On Hopper these tile sizes were the fastest of those
that were measured, spills included; decoding of pages reads at the rate of a copy."""


QUANTIZED = tuple(f"{name}-{format}" for name in ("forward", "decode") for format in FORMATS)
"""Problems of `triton_compile.py` over quantised keys and values."""


CHOSEN = ("pages-bf16-128", "chosen-pages-bf16-128", "chosen-blocks-bf16-128")
"""Decoding with a block table, and chosen key blocks, which the same kernel computes."""


PASSES = ["forward", "rows", "keys", "decode"]


def _close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_tuned_tile_sizes_are_read_back_and_others_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDIVIDED_TUNED", str(tmp_path / "deep" / "tiles.json"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    before = config.config("forward", 2, 128, "sm90")
    config.remember("sm80", {("forward", 2, 128): config.Config(16, 32, 4, 1)})
    config.remember("sm90", {("forward", 2, 128): config.Config(32, 32, 4, 1)})
    assert config.config("forward", 2, 100, "sm90") == config.Config(32, 32, 4, 1) != before
    assert config.config("forward", 2, 128, "sm80") == config.Config(16, 32, 4, 1)
    assert config.config("rows", 2, 128, "sm90") == config._HOPPER["rows", 2, 128]
    (tmp_path / "deep" / "tiles.json").write_text("not json")
    config._tuned.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"tile sizes of `undivided tune` in .*tiles\.json cannot be read"):
        assert config.config("forward", 2, 128, "sm90") == before


def test_tune_measures_only_correct_candidates_and_stores_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNDIVIDED_TUNED", str(tmp_path / "tiles.json"))
    right, wrong = config.Config(16, 32, 1, 1), config.Config(16, 7, 1, 1)  # 7 keys are no tile of Triton's
    found = list(tuning.tune("cpu", [torch.float32], [64], length=40, turns=1, candidates=(right, wrong)))
    assert [(one.name, one.tried) for one in found] == [(name, 1) for name in PASSES]
    monkeypatch.setattr(tuning.tune, "__kwdefaults__", tuning.tune.__kwdefaults__ | {"candidates": (right,)})
    from undivided.cli._app import application

    application("tune")(
        ["tune", "--device", "cpu", "--dtype", "fp32", "--head-dim", "64", "--length", "20", "--turns", "1", "--json"],
        standalone_mode=False,
    )
    printed = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "tiles.json").read_text())["tiles"]
    assert [row["pass"] for row in printed["tiles"]] == PASSES
    assert set(written) == {f"interpreter/{name}/32/64" for name in PASSES}


def test_tune_requires_a_gpu_and_a_known_head_size() -> None:
    from undivided.cli._app import application

    for arguments, message in (
        (["--head-dim", "80"], "--head-dim must be one of"),
        ([], "--device must be a CUDA device of this machine"),
        (["--device", "tpu"], "--device must be a CUDA device of this machine, got 'tpu'"),
        (["--device", "cuda:99"], "--device must be a CUDA device of this machine, got 'cuda:99'"),
    ):
        done = CliRunner().invoke(application("tune"), ["tune", *arguments])
        assert done.exit_code == 2
        assert message in done.stderr


def test_a_wrong_kernel_gives_a_line_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (CASES["gqa-4"], CASES["plain-bshd"])
    right = contract.contract("cpu", (get("reference"), get("triton")), cases[:1])
    assert {line.verdict for line in right} <= {"right", "refused"}
    monkeypatch.setattr(backend.Triton, "forward", lambda *arguments: 1 / 0)
    lines = contract.contract("cpu", (get("triton"),), cases)
    assert {line.verdict for line in lines if line.dtype == "float32"} == {"wrong"}
    assert "ZeroDivisionError" in next(line.detail[0] for line in lines if line.verdict == "wrong")


def test_without_interpreter_or_gpu_there_is_a_reason() -> None:
    program = (
        "import torch, undivided; q = torch.zeros(1, 4, 2, 16); "
        "print(undivided.explain(q, q, q, layout='bshd').reasons['triton']); import sys; assert "
        "'triton' not in sys.modules"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert "only under Triton's interpreter: TRITON_INTERPRET=1" in done.stdout


def _compiled(folder: Path, architecture: str, *problems: str) -> list[dict[str, Any]]:
    """The output of `triton_compile.py`; every kernel fits the shared memory of the architecture."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    program = Path(__file__).parents[2] / "support/gpus/triton_compile.py"
    done = subprocess.run(
        [sys.executable, str(program), architecture, *problems],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(row["shared"] <= SHARED[architecture] for row in compiled), compiled
    return compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    (
        "architecture",
        "problems",
    ),  # none: all. sm80 compiles those that differ there: no descriptors, less shared memory
    [
        (
            "sm80",
            (
                *("plain-bf16-128", "everything-fp16-64", "mla-bf16-320", "decode-bf16-128", "decode-int4-128"),
                *("pack-mixed-bf16-128", "decode-latents-bf16", *CHOSEN),
            ),
        ),
        ("sm90", ()),
    ],
    ids=["sm80", "sm90"],
)
def test_every_kernel_compiles_for_a_gpu_that_is_not_there(
    architecture: str, problems: tuple[str, ...], tmp_path: Path
) -> None:
    compiled, hopper = _compiled(tmp_path, architecture, *problems), architecture == "sm90"
    assert {row["kernel"] for row in compiled} == {
        *(("append_kernel",) if hopper else ()),
        "document_blocks_kernel",
        "forward_kernel",
        "combine_kernel",
        "delta_kernel",
        "rows_kernel",
        "keys_kernel",
        "pairs_kernel",
    }
    registers = {(row["kernel"], row["problem"]): row["registers"] for row in compiled}
    for row in compiled:
        if row["problem"].startswith((*QUANTIZED, *CHOSEN, "pack", "decode", "plain", "everything")):
            assert row["spilled"] <= SPILLED.get((architecture, row["kernel"], row["problem"]), 0), row
        if row["problem"] == "chosen-pages-bf16-128" and row["kernel"] == "forward_kernel":
            assert row["registers"] == registers["forward_kernel", "pages-bf16-128"], row
        if row["problem"].startswith("plain") and row["kernel"] != "delta_kernel":  # it has no product
            assert (row["wgmma"] > 0) == hopper, row
            assert (row["descriptor_loads"] > 0) == hopper, row
            assert row["descriptor_loads"] or row["async_copies"], row


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "format"), [("sm80", "fp8_e4m3"), ("sm90", "int4")])
def test_new_tokens_are_divided_as_the_format_says(architecture: str, format: str, tmp_path: Path) -> None:
    """By divisions that round to the nearest, not by reciprocals, and without spilled registers."""
    (row,) = _compiled(tmp_path, architecture, f"append-{format}-bfloat16")
    assert row["spilled"] == 0
    divisions = {name for name in row["arithmetic"] if "div" in name or "rcp" in name}
    assert divisions == {"div.rn.f32"}, row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "kinds"),
    [("sm80", ("plain",)), ("sm90", ("plain", "fp32", "wide", "int8", "scores"))],
    ids=["sm80", "sm90"],
)
def test_batch_invariant_calls_of_every_kind_compile_to_the_same_arithmetic(
    architecture: str, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    """Prefill, decoding, packs and pages are compiled apart, because sizes of 1 and aligned strides are constants."""
    ways = ("prefill", "decode", "steps", "padding", "pages", "shared")
    compiled = _compiled(tmp_path, architecture, *(f"invariant-{kind}-{way}" for kind in kinds for way in ways))
    assert {row["kernel"] for row in compiled} == {"forward_kernel", "merge_pieces_kernel"}
    found = {row["problem"]: row for row in compiled if row["kernel"] == "forward_kernel"}
    for kind in kinds:
        prefill = found[f"invariant-{kind}-prefill"]
        assert 50 < len(prefill["loop"]) < len(prefill["arithmetic"])
        for way in ways:
            row = found[f"invariant-{kind}-{way}"]
            assert row["loop"] == prefill["loop"], (kind, way)
            if way != "shared":  # there another kernel merges the pieces
                assert sorted(row["arithmetic"]) == sorted(prefill["arithmetic"]), (kind, way)


@pytest.mark.slow
def test_registers_of_merged_pieces_are_not_spilled_for_every_tile(tmp_path: Path) -> None:
    """The sums of earlier pieces need registers beside those of the loop: the rest is stored once per piece."""
    (row,) = _compiled(tmp_path, "sm90", "invariant-plain-prefill")
    assert 0 < row["spilled"] <= 48, row
    assert row["spilled_in_loop"] == 0, row


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "problem"), [("sm100", "plain-bf16-128"), ("sm120", "plain-bf16-256")])
def test_blackwell_and_small_shared_memory(architecture: str, problem: str, tmp_path: Path) -> None:
    """The pass over keys took 112 KiB at head size 256, and so ran on no GPU with 99, which Ada has too."""
    compiled = _compiled(tmp_path, architecture, problem)
    assert {row["kernel"] for row in compiled} == {"forward_kernel", "delta_kernel", "rows_kernel", "keys_kernel"}
    for row in compiled:
        if row["kernel"] == "delta_kernel":  # it has no product
            continue
        large = architecture == "sm100"
        assert (row["tcgen05"] > 0) == (row["descriptor_loads"] > 0) == large, row
        assert row["spilled"] <= 32, row


@pytest.mark.slow
def test_loads_products_and_softmax_run_on_separate_warps_on_request(tmp_path: Path) -> None:
    """On Blackwell, by Triton's own pass: `setmaxnreg` moves registers from one group of warps to another."""
    tile = config.Config(128, 64, 8, 3, descriptors=True, specialise=True)
    tuned = tmp_path / "tiles.json"
    config.remember("sm100", {("forward", 2, 64): tile}, tuned)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNDIVIDED_TUNED", str(tuned))
        row = _compiled(tmp_path, "sm100", "forward-bf16-64")[0]
    assert row["setmaxnreg"] > 0, row
    assert row["descriptor_loads"] > 0, row
    assert row["spilled"] <= 16, row


def test_warp_specialisation_is_used_only_for_loops_that_compile_with_it() -> None:
    """Triton 3.7 fails with an assertion on others, so tile sizes measured by `tune` must not apply to them."""
    tile = config.Config(32, 32, 1, 1, descriptors=True, specialise=True)
    q = torch.randn(1, 40, 2, 16)
    for options, sound in (
        ({"mask": masks.causal()}, True),
        ({"mask": masks.lengths([30])}, False),
        ({"softcap": 5.0}, False),
        ({"dropout_p": 0.1, "dropout_seed": 1}, False),
        ({"bias": torch.zeros(1, 1, 40, 40)}, False),
    ):
        inputs = _triton_inputs.KernelInputs(*call_of(q, q, q, layout="bshd", **options))
        assert inputs.uses_warp_specialisation(tile, has_descriptors=True) == sound, options
        assert not inputs.uses_warp_specialisation(tile, has_descriptors=False)
        assert not inputs.uses_warp_specialisation(tile._replace(specialise=False), has_descriptors=True)


def test_warp_specialisation_is_tried_only_on_architectures_that_support_it() -> None:
    for name, architecture, offered in (
        ("forward", "sm100", True),
        ("forward", "sm90", False),
        ("keys", "sm100", False),
    ):
        assert any(one.specialise for one in config.candidates(name, architecture)) == offered
    assert any(one.split_gradients for one in config.candidates("keys", "sm90"))
    assert not any(one.split_gradients for one in config.candidates("rows", "sm90"))


def test_its_name_is_its_file() -> None:
    assert get("triton") is backend.BACKEND


def test_the_gradient_of_some_keys_follows_from_out_and_lse_of_all_keys() -> None:
    """The feature that context parallelism needs: gradients of some keys from (out, lse) of all keys."""
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 40, 2, 16) for _ in range(4))
    out, lse = undivided.attention(q, k, v, layout="bshd", return_lse=True, backend="reference")
    whole = Result(out, lse)
    total = [torch.zeros_like(t) for t in (q, k, v)]
    for keys in (slice(0, 13), slice(13, 40)):
        leaves = [t.clone().requires_grad_() for t in (q, k[:, keys], v[:, keys])]
        call, given = call_of(*leaves, layout="bshd")
        with torch.no_grad():
            dq, dk, dv = backend.BACKEND.backward(call, given, whole, g, None)[:3]
        total[0] += dq
        total[1][:, keys], total[2][:, keys] = dk, dv
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(undivided.attention(*leaves, layout="bshd", backend="reference"), leaves, g)
    for ours, right in zip(total, want, strict=True):
        _close(ours, right)
