"""FlexAttention: the real one on this CPU, its GPU half with a fake."""

from __future__ import annotations

from typing import Any

import fake_gpu_kernels as fake
import pytest
import torch
from adapter_check import check, expected, tensors
from calls import call_of, problem_of
from torch import Tensor

import undivided
from undivided import masks
from undivided.backends import flex
from undivided.machine import Machine

# ---- FlexAttention really runs on this CPU ----

needs_compiler = pytest.mark.skipif(
    flex._no_compiler(Machine.this()) is not None, reason=str(flex._no_compiler(Machine.this()))
)


slow = pytest.mark.slow  # each compiles a kernel
NAMES_ON_THE_CPU = [
    pytest.param("gqa-causal-softcap-alibi-bias", marks=slow),
    pytest.param("lengths-nan-predicate", marks=slow),
    pytest.param("global-window-dense", marks=slow),
]
PROBLEMS_OF_ONE_QUERY = [
    ("causal", 1),
    pytest.param("causal", 601, marks=slow),
    pytest.param("window-prefix", 9, marks=slow),
    pytest.param("alibi-bias", 9, marks=slow),
]


def flex_case(name: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    q, k, v = (t.float() for t in tensors(130, 140))
    if name == "gqa-causal-softcap-alibi-bias":
        extra = {"softcap": 5.0, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 1.0]), "bias": torch.randn(4, 1, 140)}
        return (q, k, v), extra | {"mask": masks.causal("bottom_right")}
    if name == "lengths-nan-predicate":
        k[0, 20:], v[0, 20:], k[1], v[1] = torch.nan, torch.nan, torch.nan, torch.nan
        return (q, k, v), {
            "mask": masks.lengths(torch.tensor([20, 0])) & masks.predicate(lambda b, h, i, j: (i + j) % 3 > 0)
        }
    dense = torch.rand(1, 4, 130, 140) > 0.3
    return (q, k, v), {"mask": (masks.window(9, 2, "top_left") | masks.prefix(3)) & masks.dense(dense)}


@needs_compiler
@pytest.mark.parametrize("name", NAMES_ON_THE_CPU)
def test_flex_on_the_cpu(name: str) -> None:
    (q, k, v), more = flex_case(name)
    call, given = call_of(q, k, v, layout="bshd", **more)
    assert flex.BACKEND.reasons(call.problem, Machine.this()) == []
    with torch.no_grad():
        result = flex.BACKEND.forward(call, given)
    want, _, _ = expected(call, given, torch.ones(2, 130, 4, 8))
    torch.testing.assert_close(result.out, want, atol=1e-5, rtol=1e-5)
    assert result.lse.isnan().all()


def of_one_query(name: str, kv_len: int) -> dict[str, Any]:
    causal = masks.causal("bottom_right")
    return {
        "causal": lambda: {"mask": causal},
        "window-prefix": lambda: {"mask": masks.window(3, 0, "bottom_right") | masks.prefix(3)},
        "alibi-bias": lambda: {"mask": causal, "alibi_slopes": torch.rand(4), "bias": torch.randn(2, 4, 1, kv_len)},
    }[name]()


@needs_compiler
@pytest.mark.parametrize(("name", "kv_len"), PROBLEMS_OF_ONE_QUERY)
def test_flex_on_the_cpu_with_one_query(name: str, kv_len: int) -> None:
    """Inductor failed with an internal error: it was handed the columns of the row ranges as views of one buffer."""
    q, k, v = (t.float() for t in tensors(1, kv_len))
    call, given = call_of(q, k, v, layout="bshd", **of_one_query(name, kv_len))
    assert flex.BACKEND.reasons(call.problem, Machine.this()) == []
    with torch.no_grad():
        result = flex.BACKEND.forward(call, given)
    want, _, _ = expected(call, given, torch.ones(2, 1, 4, 8))
    torch.testing.assert_close(result.out, want, atol=1e-5, rtol=1e-5)


@needs_compiler
def test_flex_on_the_cpu_takes_parameters_under_no_grad() -> None:
    q, k, v = (t.float().requires_grad_() for t in tensors(1, 9))
    with torch.no_grad():
        out = undivided.attention(q, k, v, layout="bshd", backend="flex")
        torch.testing.assert_close(out, undivided.attention(q, k, v, layout="bshd", backend="reference"))


def hiding_mask(name: str) -> masks.Mask:
    """A mask of 48 rows and keys, of two key/value heads, that hides some keys from every row."""
    dense = torch.rand(1, 4, 48, 48) < 0.5
    dense[..., 7] = False
    dense[:, 2:, :, 30] = False  # from both query heads of a key/value head
    return {
        "dense": masks.dense(dense),
        "documents-dense": masks.documents([0, 12, 48]) & masks.dense(dense[:, :1]),
        "predicate": masks.predicate(lambda b, h, i, j: j % 3 > 0),
        "prefix": masks.prefix(20),
    }[name]


@needs_compiler
@pytest.mark.parametrize(
    "name", ["dense", *(pytest.param(n, marks=slow) for n in ("documents-dense", "predicate", "prefix"))]
)
def test_keys_that_a_mask_hides_from_every_row_may_be_nan_in_flex(name: str) -> None:
    """Keys outside of all ranges alone were set to 0: those that a dense mask hides reached every row."""
    torch.manual_seed(0)
    mask, layout = hiding_mask(name), "thd" if "documents" in name else "bshd"
    seen = mask.to_dense(1, 4, 48, 48).expand(1, 4, 48, 48).unflatten(1, (2, 2)).any(2).any(2)[0].T  # [Sk, N]
    q, k, v = (torch.randn(48, heads, 8) for heads in (4, 2, 2))
    k[~seen], v[~seen] = torch.nan, torch.nan
    assert k.isnan().any()
    inputs = [t if layout == "thd" else t[None] for t in (q, k, v)]
    found, expected = (
        undivided.attention(*inputs, layout=layout, mask=mask, backend=backend)  # type: ignore[call-overload]
        for backend in ("flex", "reference")
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_rows_and_keys_without_pairs_get_no_nan_from_flex_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda: fake.flex)
    torch.manual_seed(0)
    dense = torch.rand(6, 4) < 0.7
    dense[2], dense[:, 1] = False, False
    q, k, v = tensors(6, 4)
    q[:, 2], k[:, 1], v[:, 1] = torch.nan, torch.nan, torch.nan
    check(flex.BACKEND, q, k, v, mask=masks.dense(dense), grad_lse=True)


def test_flex_on_the_cpu_gives_reasons() -> None:
    cpu = Machine(device="cpu")
    q = torch.zeros(1, 4, 2, 8, requires_grad=True)
    problem = problem_of(q, q, q, layout="bshd", return_lse=True, sinks=torch.zeros(2))
    reasons = flex.BACKEND.reasons(problem, cpu)
    for piece in ("gradients on the CPU", "log-sum-exp returned on the CPU", "sinks"):
        assert any(piece in reason for reason in reasons), reasons
    assert "backend='flex'" in (flex.BACKEND.only_when_asked(problem, cpu) or "")
    wide = problem_of(*(torch.zeros(1, 4, 2, 8, dtype=torch.float64),) * 3, layout="bshd")
    assert any("float64" in reason for reason in flex.BACKEND.reasons(wide, cpu))


@pytest.mark.parametrize(("isa", "kv_len", "refused"), [("AVX2", 24, True), ("AVX2", 25, False), ("AVX512", 24, False)])
def test_key_lengths_that_flex_computes_wrong_are_refused(isa: str, kv_len: int, refused: bool) -> None:
    """Rows are wrong, with and without a mask, if the last 16 keys are 8: plain calls of flex_attention show it too."""
    q, k = torch.zeros(1, 4, 2, 8), torch.zeros(1, kv_len, 2, 8)
    reasons = flex.BACKEND.reasons(problem_of(q, k, k, layout="bshd"), Machine(isa=isa))
    assert [f"key length {kv_len} on AVX2" in reason for reason in reasons] == [True] * refused


def test_flex_needs_a_compiler_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    problem = problem_of(*(torch.zeros(1, 4, 2, 8),) * 3, layout="bshd")
    assert any("no C++ compiler" in reason for reason in flex.BACKEND.reasons(problem, Machine.this()))


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_flex_gradients_by_recomputation(monkeypatch: pytest.MonkeyPatch, align: Any) -> None:
    """The GPU half of the adapter: gradients of q, k, v, a broadcast bias and slopes, and through the lse."""
    monkeypatch.setattr(flex, "_compiled", lambda: fake.flex)
    torch.manual_seed(0)
    more = {"bias": torch.randn(4, 1, 4, dtype=torch.float64), "alibi_slopes": torch.rand(4, dtype=torch.float64)}
    check(flex.BACKEND, *tensors(6, 4), mask=masks.causal(align), grad_lse=True, **more)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "kv_len"), [(9, 13), (8, 12)])
def test_flex_block_mask_names_every_tile(
    monkeypatch: pytest.MonkeyPatch, q_len: int, kv_len: int, causal: bool
) -> None:
    """Tiles in neither list are empty, tiles in the full list lie inside the matrix and are full."""
    monkeypatch.setattr(flex, "_BLOCK", 4)
    mask = masks.lengths(torch.tensor([kv_len, 5]))
    if causal:
        mask = mask & masks.causal("bottom_right")
    call, given = call_of(*tensors(q_len, kv_len), layout="bshd", mask=mask)
    block_mask = flex._block_mask(call.problem, call.normal_form(given.q))
    dense = mask.to_dense(2, 1, q_len, kv_len)
    listed = torch.zeros(2, -(-q_len // 4), -(-kv_len // 4), dtype=torch.int)
    for worth, (count, which) in enumerate(
        (
            (block_mask.kv_num_blocks, block_mask.kv_indices),
            (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
        ),
        1,
    ):
        for b in range(2):
            for row in range(listed.shape[1]):
                listed[b, row, which[b, 0, row, : count[b, 0, row]].long()] += worth
    for b, row, column in torch.cartesian_prod(*map(torch.arange, listed.shape)).tolist():
        tile = dense[b, 0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        want = 0 if not tile.any() else 2 if tile.all() and tile.numel() == 16 else 1
        assert listed[b, row, column] == want
