"""The `triton` backend under Triton's interpreter, beyond the contract suite: its tables, decoding, pages, head sizes
in steps, blocks of rows; and that every kernel compiles for GPUs that this machine lacks."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import quick_interpreter
import torch
from calls import call_of
from torch import Tensor

import undivided
from undivided import masks
from undivided.backends import triton as backend
from undivided.backends.triton import blocks, rows, tables
from undivided.backends.triton import inputs as _triton_inputs
from undivided.kernels.triton import config
from undivided.machine import Machine
from undivided.masks import Mask
from undivided.masks.normal_form import Ranges

HERE = Machine.this("cpu")


def test_the_quick_interpreter_gives_the_bits_of_tritons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """quick_interpreter.py leaves out work that Triton repeats; no result may depend on it."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch_builtin, looked = interpreter._patch_builtin, [0]

    def counted(*arguments: Any) -> None:
        looked[0] += 1
        patch_builtin(*arguments)

    def results() -> tuple[int, list[Tensor]]:
        looked[0], leaves = 0, [x.clone().requires_grad_() for x in (q, k, k)]
        out = undivided.attention(*leaves, layout="bshd", mask=masks.window(9, 0), backend="triton")
        return looked[0], [out, *torch.autograd.grad(out.square().sum(), leaves)]

    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    q, k = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16)
    few, quick = results()
    for owner, name in quick_interpreter.REPLACED:
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions())
    many, own = results()
    assert 5 * few < many
    assert all(torch.equal(a, b) for a, b in zip(quick, own, strict=True))


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


@pytest.mark.parametrize(("group", "block_m", "block_n"), [(4, 16, 64), (8, 4, 32), (40, 16, 32)])
@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("always_masked", [False, True])
def test_the_table_of_one_query_is_that_of_as_many_equal_rows(
    group: int, block_m: int, block_n: int, columns: int, always_masked: bool
) -> None:
    generator = torch.Generator().manual_seed(columns)
    ranges = torch.randint(0, 300, (50, 1, columns), dtype=torch.int32, generator=generator).sort(-1).values
    ranges[:10, :, 1] = ranges[:10, :, 0]  # rows without keys
    one = tables._row_table(ranges, block_m, block_n, group, always_masked)
    assert torch.equal(one, tables._row_table(ranges.expand(-1, group, -1), block_m, block_n, 1, always_masked))


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
    splits = blocks._splits

    def counted(*arguments: int) -> int:
        cut.append(splits(*arguments))
        return cut[-1]

    monkeypatch.setattr(blocks, "_splits", counted)
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
    descriptors = _triton_inputs.KernelInputs.descriptors

    def watched(*arguments: Any, **looped: torch.Tensor) -> Any:
        found = descriptors(*arguments, **looped)
        used.append(bool(found))
        return found

    monkeypatch.setattr(_triton_inputs.KernelInputs, "descriptors", watched)
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


@pytest.mark.parametrize(("q_len", "kv_len"), [(40, 40), (1, 3000)], ids=["one part", "parts of the keys"])
def test_the_log_sum_exp_of_a_row_with_a_nan_score_is_nan(q_len: int, kv_len: int) -> None:
    """It was -inf, that of a row without keys."""
    q, k = torch.randn(1, q_len, 1, 16), torch.randn(1, kv_len, 1, 16)
    k[0, -1, 0, 3] = torch.nan
    mask = masks.causal("bottom_right")
    out, lse = undivided.attention(q, k, k, layout="bshd", mask=mask, backend="triton", return_lse=True)
    assert out[0, -1].isnan().all()
    assert lse[0, 0, -1].isnan()
    assert lse[0, 0, :-1].isfinite().all()


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
        inputs = _triton_inputs.KernelInputs(*call_of(q, k, k, layout="bshd"))
        found = inputs.descriptors(tile, k=inputs.k, v=inputs.v)
        odd_start = k.dtype == torch.float32 and k.shape[-1] == 16 and k.stride(2) != 0
        assert (not found) == (odd_start or k.stride(2) == 0 or k.shape[-1] == 20)


def test_hopper_has_its_own_tile_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("UNDIVIDED_TUNED", str(tmp_path / "none.json"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert config.config("forward", 2, 128, "sm90").descriptors
    assert not config.config("forward", 2, 128, "sm80").descriptors
    assert config.config("decode", 4, 128, "sm90") == config.config("decode", 4, 128, "sm80")


def test_a_predicate_is_evaluated_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MASK_PAIRS", 1)
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, 150, 2, 16) for _ in range(4))
    bias = torch.randn(1, 2, 150, 150)
    mask = masks.predicate(lambda b, h, i, j: (i - j) % 3 != h) & masks.causal()
    call, given = call_of(q, k, v, layout="bshd", mask=mask)
    assert len(list(_triton_inputs.KernelInputs(call, given).rows())) == 2
    found = []
    for name in ("triton", "reference"):
        leaves = [t.clone().requires_grad_() for t in (q, k, v, bias)]
        out = undivided.attention(*leaves[:3], bias=leaves[3], layout="bshd", mask=mask, backend=name)
        found.append((out.detach(), *torch.autograd.grad(out, leaves, g)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["after the keys", "between documents"])
def test_unused_keys_of_finished_ranges_reach_nothing(name: str) -> None:
    """Context parallelism passes a part of the ranges of a whole sequence, which says nothing of padding."""
    mask = masks.lengths([50], [50]) & masks.causal()
    unused = torch.arange(50, 70)
    if name == "between documents":
        padded = {"padded_q": [0, 30, 70], "padded_kv": [0, 30, 70]}
        mask = masks.documents([0, 20, 60], [0, 25, 60], **padded) & masks.causal("bottom_right")
        unused = torch.cat((torch.arange(25, 30), torch.arange(65, 70)))
    q, k, v = (torch.randn(1, 70, 2, 16) for _ in range(3))
    k[:, unused] = v[:, unused] = torch.nan
    ranges = Mask(parts=(Ranges(mask.normal_form(1, 2, 70, 70, "cpu")),))
    results = []
    for backend_name in ("triton", "reference"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = undivided.attention(*leaves, layout="bshd", mask=ranges, backend=backend_name)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for found, right in zip(*results, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=2e-5)
