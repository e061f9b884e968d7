"""The `triton` backend under Triton's interpreter, beyond the contract suite: its tables, decoding, pages, head sizes
in steps, blocks of rows; and that every kernel compiles for GPUs that this machine lacks."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from contextlib import ExitStack
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
from undivided.backends.triton import tables
from undivided.benchmarking import tuning
from undivided.kernels.triton import config
from undivided.machine import Machine
from undivided.quantization import FORMATS
from undivided.request.result import Result
from undivided.verification import contract
from undivided.verification.cases import CASES

SHARED = {"sm80": 163 * 1024, "sm89": 99 * 1024, "sm90": 227 * 1024, "sm100": 227 * 1024, "sm120": 99 * 1024}
"""Bytes of shared memory that a program may have (CUDA programming guide, compute capabilities)."""

SPILLED = {
    ("sm90", "keys_kernel", "plain-bf16-128"): 32,
    ("sm90", "keys_kernel", "plain-bf16-256"): 84,
    ("sm80", "rows_kernel", "everything-fp16-64"): 32,
    ("sm80", "keys_kernel", "everything-fp16-64"): 24,
}
"""Bytes per thread that a kernel may spill, on Hopper all in its loop over partial tiles; all other kernels spill
none."""

QUANTIZED = tuple(f"{name}-{format}" for name in ("forward", "decode") for format in FORMATS)
"""Problems of `triton_compile.py` over quantised keys and values."""

PASSES = ["forward", "rows", "keys", "decode"]

HERE = Machine.this("cpu")

MASKS = {
    "causal": masks.causal(),
    "window": masks.window(7, 3),
    "global": masks.window(6, 0) | masks.prefix(5),
    "lengths": masks.lengths([70, 3]) & masks.causal("top_left"),
    "chunks": masks.chunks(13),
    "nothing": masks.lengths([0, 0]),
}


def _close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (32, 16), (16, 64)])
@pytest.mark.parametrize("group", [1, 3])
def test_tables_cover_every_allowed_pair_and_mark_only_full_tiles_as_full(
    name: str, block_m: int, block_n: int, group: int
) -> None:
    q_len, kv_len = 75, 75
    form = MASKS[name].normal_form(2, 1, q_len, kv_len, "cpu")
    rows = tables.cached_tables(form, q_len, kv_len, block_m, block_n, torch.device("cpu"), group=group).rows
    dense = form.allowed(slice(0, 2), slice(0, q_len), slice(0, kv_len), slice(0, 1)).expand(2, 1, -1, -1)[:, 0]
    dense = dense.repeat_interleave(group, 1)
    for b in range(2):
        for block, run in enumerate(rows[min(b, rows.shape[0] - 1)].tolist()):
            first, full, full_end, last, first2, full2, full_end2, last2 = run
            assert first <= full <= full_end <= last and first2 <= full2 <= full_end2 <= last2  # noqa: PT018
            visited = [*range(first, last), *range(first2, last2)]
            assert len(visited) == len(set(visited)), "a tile is visited once"
            own = dense[b, block * block_m : (block + 1) * block_m]
            for tile in range(-(-kv_len // block_n)):
                pairs = own[:, tile * block_n : (tile + 1) * block_n]
                assert tile in visited or not pairs.any()
                if tile in [*range(full, full_end), *range(full2, full_end2)]:
                    assert pairs.all()
                    assert pairs.shape[1] == block_n


@pytest.mark.parametrize(
    ("lengths", "more", "unseen"),
    [
        pytest.param(([0, 5, 5, 12], [0, 7, 15, 20]), None, slice(7, 15), id="no-queries"),
        pytest.param(
            ([0, 5, 7, 12], [0, 7, 27, 34]), masks.window(2, 0, "bottom_right"), slice(7, 23), id="before-a-window"
        ),
        pytest.param(
            ([0, 5, 7, 12], [0, 7, 27, 34]), masks.causal("top_left"), slice(9, 27), id="after-the-last-query"
        ),
    ],
)
def test_keys_that_no_query_of_their_document_attends_to_may_be_nan(
    lengths: tuple[list[int], list[int]], more: masks.Mask | None, unseen: slice
) -> None:
    """Keys between two documents of one tile were multiplied with weights of 0: results and gradients were NaN."""
    torch.manual_seed(0)
    mask = masks.documents(*lengths) if more is None else masks.documents(*lengths) & more
    q, grad = (torch.randn(lengths[0][-1], 2, 32) for _ in range(2))
    k, v = (torch.randn(lengths[1][-1], 2, 32) for _ in range(2))
    results = []
    for number in (0.0, torch.nan):
        k[unseen] = v[unseen] = number
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = undivided.attention(*leaves, layout="thd", mask=mask, backend="triton")
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    for got, want in zip(*reversed(results), strict=True):
        assert torch.equal(got, want)


def test_a_window_visits_only_its_tiles() -> None:
    form = masks.window(63, 0).normal_form(1, 1, 4096, 4096, "cpu")
    rows = tables.cached_tables(form, 4096, 4096, 64, 64, torch.device("cpu")).rows
    assert int((rows[..., 3] - rows[..., 0]).max()) <= 2


@pytest.mark.parametrize("name", ["causal", "window", "global", "chunks"])
def test_columns_name_every_block_of_rows_that_needs_a_tile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "PAIRS_AT_ONCE", 10)  # several chunks
    form = MASKS[name].normal_form(1, 1, 75, 75, "cpu")
    found = tables.cached_tables(form, 75, 75, 16, 16, torch.device("cpu"), columns=True)
    assert found.columns is not None
    for tile, (part, part_end, whole, whole_end) in enumerate(found.columns[0].tolist()):
        for block, run in enumerate(found.rows[0].tolist()):
            is_full = run[1] <= tile < run[2] or run[5] <= tile < run[6]
            is_needed = run[0] <= tile < run[3] or run[4] <= tile < run[7]
            assert not is_full or whole <= block < whole_end
            assert is_full or not is_needed or part <= block < part_end


def _decode(pages: bool, q_len: int, dim: int, **options: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(triton, reference) of a few rows over unequal caches; unused memory and table entries are garbage."""
    torch.manual_seed(0)
    lengths, page = torch.tensor([700, 5, 64], dtype=torch.int32), 16
    q, table = torch.randn(3, q_len, 6, dim), torch.full((3, 48), 2**20, dtype=torch.int32)
    k, v = torch.full((120, page, 2, dim), torch.nan), torch.full((120, page, 2, dim), torch.nan)
    free = torch.randperm(120).tolist()
    for b, length in enumerate(lengths.tolist()):
        for n in range(-(-length // page)):
            table[b, n] = free.pop()
            used = min(page, length - n * page)
            k[table[b, n], :used], v[table[b, n], :used] = torch.randn(2, used, 2, dim)
    if not pages:
        index = table.clamp(0, 119).long()
        k, v = k[index].flatten(1, 2), v[index].flatten(1, 2)
    mask = masks.lengths(lengths) & masks.causal("bottom_right")
    given: dict[str, Any] = {"layout": "bshd", "mask": mask, "pages": table if pages else None, "return_lse": True}
    answers = [undivided.attention(q, k, v, backend=name, **given, **options) for name in ("triton", "reference")]
    return answers[0], answers[1]


@pytest.mark.parametrize("memory", ["contiguous", "described", "paged"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_decoding_splits_the_keys_and_merges_them(memory: str, q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With descriptors, as for TMA, whose loads include the NaN beyond the lengths."""
    cut = []
    splits = backend._splits

    def counted(*arguments: int) -> int:
        cut.append(splits(*arguments))
        return cut[-1]

    monkeypatch.setattr(backend, "_splits", counted)
    for options in ({}, {"sinks": torch.randn(6), "softcap": 3.0, "alibi_slopes": torch.rand(6)}):
        described = memory == "described"
        with config.trial("decode", config.INTERPRETED._replace(descriptors=described)):
            ours, theirs = _decode(memory == "paged", q_len, 16 if described else 24, **options)
        _close(ours[0], theirs[0])
        _close(ours[1], theirs[1])
    assert cut == [2, 2], "the keys were cut"


@pytest.mark.parametrize(("qk_dim", "v_dim"), [(300, 40), (24, 272), (260, 300)])
def test_head_sizes_in_steps(qk_dim: int, v_dim: int) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 35, 2, qk_dim), torch.randn(1, 35, 1, qk_dim)
    v, g = torch.randn(1, 35, 1, v_dim), torch.randn(1, 35, 2, v_dim)
    found = []
    for name in ("triton", "reference"):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = undivided.attention(*leaves, layout="bshd", mask=masks.causal(), backend=name)
        found.append((out.detach(), *torch.autograd.grad(out, leaves, g)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("name", ["full", "causal", "lengths"])
def test_keys_and_values_by_tensor_descriptors(name: str, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMA loads under the interpreter: odd lengths, heads that share keys, NaN beyond the lengths; and the two passes
    of the backward, which must not read the NaN."""
    torch.manual_seed(0)
    used: list[bool] = []
    descriptors = _triton_inputs.Inputs.descriptors

    def watched(*arguments: Any) -> Any:
        found = descriptors(*arguments)
        used.append(found is not None)
        return found

    monkeypatch.setattr(_triton_inputs.Inputs, "descriptors", watched)
    lengths = [37, 3]
    mask = {"full": None, "causal": masks.causal("bottom_right"), "lengths": masks.lengths(lengths, q=lengths)}[name]
    draw = {"bshd": (2, 41, 0), "sbhd": (41, 2, 0), "bhsd": (2, 0, 41)}[layout]
    q, k, v, g = (torch.randn([n or heads for n in draw] + [16]) for heads in (2, 1, 1, 2))
    if name == "lengths":
        for tensor in (q, k, v, g):
            of_batch = tensor.transpose(0, 1) if layout == "sbhd" else tensor
            for b, length in enumerate(lengths):
                (of_batch[b][:, length:] if layout == "bhsd" else of_batch[b][length:]).fill_(torch.nan)
    found = []
    with ExitStack() as trials:
        for one in ("forward", "rows", "keys"):
            tile = config.Config(32, 32, 1, 1, descriptors=True, split_gradients=layout == "sbhd")
            trials.enter_context(config.trial(one, tile))
        for backend_name in ("triton", "reference"):
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            out, lse = undivided.attention(*leaves, layout=layout, mask=mask, return_lse=True, backend=backend_name)
            found.append((out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, g)))
    assert used == [True, True, True]
    for ours, theirs in zip(*found, strict=True):
        _close(ours, theirs)


def test_head_strides_beyond_32_bits() -> None:
    """The pass over rows computed head offsets in 32 bits: the third head is 2^31 elements after the first."""
    torch.manual_seed(0)
    store = torch.empty(2**31 + 4096, dtype=torch.float16)  # 4 GiB of addresses, 3 pages of memory
    far = store.as_strided((1, 3, 20, 16), (0, 2**30, 16, 1)).copy_(torch.randn(1, 3, 20, 16))
    k, v, g = (torch.randn(1, 3, 20, 16).half() for _ in range(3))
    found = []
    for q in (far, far.contiguous()):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = undivided.attention(*leaves, layout="bhsd", mask=masks.causal(), backend="triton")
        found.append((out.detach(), *torch.autograd.grad(out, leaves, g)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_dropout_of_some_heads_equals_that_of_the_same_heads_among_all() -> None:
    """As with heads divided over ranks; they were once refused."""
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 40, 4, 16) for _ in range(4))
    options: dict[str, Any] = {"layout": "bshd", "mask": masks.causal(), "dropout_p": 0.4, "dropout_seed": 5}
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = undivided.attention(*leaves, **options, backend="reference")
    want = [out.detach(), *torch.autograd.grad(out, leaves, g)]
    leaves = [t[:, :, 2:].clone().requires_grad_() for t in (q, k, v)]
    call, given = call_of(*leaves, **options)
    form = dataclasses.replace(call.normal_form(given.q), first_head=2)
    assert call.checked_mask is not None
    call.checked_mask.form = form
    assert not backend.BACKEND.reasons(call.problem._replace(features=call.problem.features | {"some_heads"}), HERE)
    with torch.no_grad():
        result = backend.BACKEND.forward(call, given)
        found = backend.BACKEND.backward(call, given, result, g[:, :, 2:], None)[:3]
    for ours, theirs in zip((result.out, *found), want, strict=True):
        _close(ours, theirs[:, :, 2:])


def test_tensors_that_tma_cannot_read_are_loaded_by_address() -> None:
    """TMA needs strides that are positive multiples of 16 bytes."""
    tile = config.Config(32, 32, 1, 1, descriptors=True)
    base = torch.randn(2, 40, 2, 20)
    for k in (base[..., :16].half(), base[..., 1:17], base[:, :, :1, :16].expand(2, 40, 2, 16), base):
        q = torch.randn(2, 40, 4, k.shape[-1], dtype=k.dtype)
        inputs = _triton_inputs.Inputs(*call_of(q, k, k, layout="bshd"))
        found = inputs.descriptors(tile, inputs.k, inputs.v, tile.block_n)
        odd_start = k.dtype == torch.float32 and k.shape[-1] == 16 and k.stride(2) != 0
        assert (found is None) == (odd_start or k.stride(2) == 0 or k.shape[-1] == 20)


def test_hopper_has_its_own_tile_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNDIVIDED_TUNED", str(tmp_path / "none.json"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert config.config("forward", 2, 128, "sm90").descriptors
    assert not config.config("forward", 2, 128, "sm80").descriptors
    assert config.config("decode", 4, 128, "sm90") == config.config("decode", 4, 128, "sm80")


def test_a_predicate_is_evaluated_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton_inputs, "MASK_PAIRS", 1)
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 150, 2, 16) for _ in range(4))
    bias = torch.randn(1, 2, 150, 150)
    mask = masks.predicate(lambda b, h, i, j: (i - j) % 3 != h) & masks.causal()
    call, given = call_of(q, k, v, layout="bshd", mask=mask)
    assert len(list(_triton_inputs.Inputs(call, given).parts())) == 2
    found = []
    for name in ("triton", "reference"):
        leaves = [t.clone().requires_grad_() for t in (q, k, v, bias)]
        out = undivided.attention(*leaves[:3], bias=leaves[3], layout="bshd", mask=mask, backend=name)
        found.append((out.detach(), *torch.autograd.grad(out, leaves, g)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


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
    with pytest.warns(RuntimeWarning, match=r"no tiles of `undivided tune` in .*tiles\.json"):
        assert config.config("forward", 2, 128, "sm90") == before


def test_tune_measures_only_correct_candidates_and_stores_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNDIVIDED_TUNED", str(tmp_path / "tiles.json"))
    right, wrong = config.Config(16, 32, 1, 1), config.Config(16, 7, 1, 1)  # 7 keys are no tile of Triton's
    found = list(tuning.tune("cpu", [torch.float32], [64], length=40, turns=1, candidates=(right, wrong)))
    assert [(one.name, one.tried) for one in found] == [(name, 1) for name in PASSES]
    monkeypatch.setattr(tuning.tune, "__kwdefaults__", tuning.tune.__kwdefaults__ | {"candidates": (right,)})
    from undivided.cli._app import app

    app(
        ["tune", "--device", "cpu", "--dtype", "fp32", "--head-dim", "64", "--length", "20", "--turns", "1", "--json"],
        standalone_mode=False,
    )
    printed = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "tiles.json").read_text())["tiles"]
    assert [row["pass"] for row in printed["tiles"]] == PASSES
    assert set(written) == {f"interpreter/{name}/32/64" for name in PASSES}


def test_tune_requires_a_gpu_and_a_known_head_size() -> None:
    from undivided.cli._app import app

    for arguments, message in (
        (["--head-dim", "80"], "--head-dim must be one of"),
        ([], "--device must be a CUDA device of this machine"),
        (["--device", "tpu"], "--device must be a CUDA device of this machine, got 'tpu'"),
        (["--device", "cuda:99"], "--device must be a CUDA device of this machine, got 'cuda:99'"),
    ):
        done = CliRunner().invoke(app, ["tune", *arguments])
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
    program = Path(__file__).parents[1] / "support" / "triton_compile.py"
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
        ("sm80", ("plain-bf16-128", "everything-fp16-64", "mla-bf16-320", "decode-bf16-128", "decode-int4-128")),
        ("sm90", ()),
    ],
    ids=["sm80", "sm90"],
)
def test_every_kernel_compiles_for_a_gpu_that_is_not_there(
    architecture: str, problems: tuple[str, ...], tmp_path: Path
) -> None:
    compiled = _compiled(tmp_path, architecture, *problems)
    assert {row["kernel"] for row in compiled} == {
        "forward_kernel",
        "combine_kernel",
        "rows_kernel",
        "keys_kernel",
        "pairs_kernel",
    }
    hopper = architecture == "sm90"
    for row in compiled:
        if row["problem"].startswith(QUANTIZED):
            assert row["spilled"] == 0, row
        if row["problem"].startswith(("plain", "everything")):
            assert row["spilled"] <= SPILLED.get((architecture, row["kernel"], row["problem"]), 0), row
        if row["problem"].startswith("plain"):
            assert (row["wgmma"] > 0) == hopper, row
            assert (row["descriptor_loads"] > 0) == hopper, row
            assert row["descriptor_loads"] or row["async_copies"], row


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
    ways = ("prefill", "decode", "steps", "padding", "pages")
    compiled = _compiled(tmp_path, architecture, *(f"invariant-{kind}-{way}" for kind in kinds for way in ways))
    assert {row["kernel"] for row in compiled} == {"forward_kernel"}
    arithmetic = {row["problem"]: row["arithmetic"] for row in compiled}
    for kind in kinds:
        prefill = arithmetic[f"invariant-{kind}-prefill"]
        assert len(prefill) > 100
        for way in ways:
            assert arithmetic[f"invariant-{kind}-{way}"] == prefill, (kind, way)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "problem"), [("sm100", "plain-bf16-128"), ("sm120", "plain-bf16-256")])
def test_blackwell_and_small_shared_memory(architecture: str, problem: str, tmp_path: Path) -> None:
    """The pass over keys took 112 KiB at head size 256, and so ran on no GPU with 99, which Ada has too."""
    compiled = _compiled(tmp_path, architecture, problem)
    assert {row["kernel"] for row in compiled} == {"forward_kernel", "rows_kernel", "keys_kernel"}
    for row in compiled:
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
        inputs = _triton_inputs.Inputs(*call_of(q, q, q, layout="bshd", **options))
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
