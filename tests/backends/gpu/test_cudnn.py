"""cuDNN's graphs, run by a fake that computes what cudnn-frontend's sources specify."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import pytest
import torch
from adapter_check import MASKS, check, expected, tensors
from calls import call_of, problem_of
from fake_cudnn import FakeCudnn

import undivided
from undivided import DotProductAttention, masks
from undivided.backends import cudnn, reference
from undivided.backends.cudnn import graph as _cudnn_graph
from undivided.backends.cudnn import scores
from undivided.backends.cudnn.graph import CudnnCall
from undivided.machine import Machine
from undivided.masks import Mask
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.slopes import usual_slopes
from undivided.run import prepare
from undivided.selection.decision import Decision, select
from undivided.selection.policy import Policy
from undivided.verification.cases import CASES, Case
from undivided.verification.inputs import Inputs, build


@pytest.fixture
def cudnn_module(monkeypatch: pytest.MonkeyPatch) -> FakeCudnn:
    module = FakeCudnn()
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(_cudnn_graph, "_graphs", {})
    monkeypatch.setattr(_cudnn_graph, "_handles", _cudnn_graph._Handles())
    monkeypatch.setattr(
        _cudnn_graph, "_types", lambda _: dict.fromkeys((torch.float64, torch.float32, torch.int32, torch.int64), "any")
    )
    return module


CUDNN_MASKS: dict[str, Callable[[], Mask | None]] = MASKS | {
    "top-left": lambda: masks.causal("top_left"),
    "top-left-window": lambda: masks.window(1, 0, "top_left"),
}


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("mask", CUDNN_MASKS)
def test_cudnn_dense(cudnn_module: FakeCudnn, mask: str, layout: str) -> None:
    """cuDNN's window excludes its left edge: left=2 is passed as 3."""
    check(cudnn.BACKEND, *tensors(3, 5, layout, v_dim=16), layout=layout, mask=CUDNN_MASKS[mask]())
    forward, backward = cudnn_module.graphs
    for arguments in (forward.inputs, backward.inputs):
        assert arguments["diagonal_band_left_bound"] == {"window-2-1": 3, "left-only": 1, "top-left-window": 2}.get(
            mask
        )
        assert arguments["diagonal_alignment"] == (
            "top_left" if "top-left" in mask or mask == "full" else "bottom_right"
        )
    assert forward.inputs["use_padding_mask"] is False
    assert backward.inputs["use_padding_mask"] is True  # the last tile of keys is not full


UNSEEN: dict[str, tuple[int, int, Callable[[], Mask]]] = {
    "keys before a window": (3, 7, lambda: masks.window(1, 0, "bottom_right")),
    "many keys before a window": (2, 135, lambda: masks.window(2, 1, "bottom_right")),
    "all keys but one": (2, 129, lambda: masks.window(0, 0, "bottom_right")),
    "keys after the last query": (3, 7, lambda: masks.causal("top_left")),
    "keys after a window": (3, 70, lambda: masks.window(1, 1, "top_left")),
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("name", UNSEEN)
def test_cudnn_gets_0_where_no_pair_reads(cudnn_module: FakeCudnn, name: str, backward: bool) -> None:
    """It multiplies what it masks by 0. For a forward alone most keys before a window are left out."""
    q_len, kv_len, make = UNSEEN[name]
    (q, k, v), mask = tensors(q_len, kv_len), make()
    unseen = ~mask.to_dense(1, 1, q_len, kv_len)[0, 0].any(0)
    assert unseen.any()
    k[:, unseen], v[:, unseen] = torch.nan, torch.nan
    check(cudnn.BACKEND, q, k, v, mask=mask, backward=backward)
    left_out = 0 if backward else {"many keys before a window": 128, "all keys but one": 64}.get(name, 0)
    assert cudnn_module.graphs[0].inputs["k"].attributes["dim"][2] == kv_len - left_out


def test_cudnn_lengths(cudnn_module: FakeCudnn) -> None:
    """A padded batch with NaN in the padding of q, k and v."""
    q, k, v = tensors(5, 7)
    q[0, 2:], k[0, 4:], v[0, 4:] = torch.nan, torch.nan, torch.nan
    mask = masks.lengths(torch.tensor([4, 7]), torch.tensor([2, 5])) & masks.causal("bottom_right")
    check(cudnn.BACKEND, q, k, v, mask=mask)
    arguments = cudnn_module.graphs[0].inputs
    assert arguments["use_padding_mask"] is True
    assert arguments["seq_len_q"].attributes["dim"] == [2, 1, 1, 1]


@pytest.mark.parametrize("padded", [False, True])
def test_cudnn_documents(cudnn_module: FakeCudnn, padded: bool) -> None:
    """Ragged rows: offsets in elements, separate real lengths, NaN in the gaps between documents."""
    q, k, v = tensors(14, 14, "thd", v_dim=16)
    cu, where = torch.tensor([0, 3, 5, 9]), torch.tensor([0, 4, 8, 13])
    if padded:
        for t in (q, k, v):
            t[[3, 6, 7, 12, 13]] = torch.nan
    slots = where if padded else None
    mask = masks.documents(cu, padded_q=slots, padded_kv=slots, total_q=14)
    check(cudnn.BACKEND, q, k, v, layout="thd", mask=mask & masks.window(1, 0))
    forward, backward = cudnn_module.graphs
    assert forward.inputs["q"].attributes["dim"][:2] == [3, 4]
    assert backward.inputs["max_total_seq_len_q"] == 1024


def test_cudnn_keeps_its_graphs(cudnn_module: FakeCudnn) -> None:
    """Other lengths in the same packed shape need no new graph; another shape does."""
    q, k, v = tensors(12, 12, "thd")
    for cu in ([0, 3, 12], [0, 7, 9]):
        call, operands = call_of(
            q, k, v, layout="thd", mask=masks.documents(torch.tensor(cu), total_q=12), device="cuda"
        )
        cudnn.BACKEND.forward(call, operands)
    assert len(cudnn_module.graphs) == 1
    assert cudnn_module.graphs[0].executed == 2
    call, operands = call_of(q[:, :2], k, v, layout="thd", mask=masks.documents(torch.tensor([0, 12])), device="cuda")
    cudnn.BACKEND.forward(call, operands)
    assert len(cudnn_module.graphs) == 2


def test_cudnn_full_tiles_need_no_padding_mask_backward(cudnn_module: FakeCudnn) -> None:
    check(cudnn.BACKEND, *tensors(4, 256))
    assert [graph.inputs["use_padding_mask"] for graph in cudnn_module.graphs] == [False, False]


def test_cudnn_one_query_backward(cudnn_module: FakeCudnn) -> None:
    check(cudnn.BACKEND, *tensors(1, 128))
    assert cudnn_module.graphs[1].inputs["use_padding_mask"] is True


def test_cudnn_copies_misaligned_rows(cudnn_module: FakeCudnn) -> None:
    """Views and rows of heads that do not start at multiples of 16 bytes: cuDNN would return wrong numbers."""
    base, odd = (torch.randn(2, 3, 4 * 8 + 1, dtype=torch.float64), torch.randn(2, 5, 2, 9, dtype=torch.float64))
    q, k, v = base[..., 1:].unflatten(2, (4, 8)), odd[..., :8], odd[..., 1:]
    call, operands = call_of(q, k, v, layout="bshd", device="cuda")
    result = cudnn.BACKEND.forward(call, operands)
    expected_out = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True
    )
    torch.testing.assert_close(result.out, expected_out.transpose(1, 2))


BIAS_SHAPES = {"1hqk": (4, 5, 7), "11qk": (5, 7), "b1qk": (2, 1, 5, 7), "bhqk": (2, 4, 5, 7)}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("axes", BIAS_SHAPES)
def test_cudnn_bias(cudnn_module: FakeCudnn, axes: str, causal: bool) -> None:
    """Entries of -inf, a whole row of them, and under the causal mask a row whose only finite keys are masked."""
    torch.manual_seed(0)
    bias = torch.randn(BIAS_SHAPES[axes], dtype=torch.float64)
    bias[..., 1, 2], bias[..., 0, 1], bias[..., 3, :], bias[..., 2, :3] = (-torch.inf,) * 4
    mask = masks.causal("top_left") if causal else None
    check(cudnn.BACKEND, *tensors(5, 7, "sbhd"), layout="sbhd", mask=mask, bias=bias)
    forward, backward = (graph.inputs for graph in cudnn_module.graphs)
    assert forward["bias"].attributes["dim"] == [1] * (4 - bias.dim()) + list(bias.shape)
    assert backward["dBias"].attributes["dim"] == forward["bias"].attributes["dim"]


def test_cudnn_bias_without_a_gradient(cudnn_module: FakeCudnn) -> None:
    q, k, v = (t.requires_grad_() for t in tensors(5, 7))
    bias = torch.randn(4, 5, 7, dtype=torch.float64)
    call, operands = call_of(q, k, v, layout="bshd", bias=bias, device="cuda")
    with torch.no_grad():
        result = cudnn.BACKEND.forward(call, operands)
        gradients = cudnn.BACKEND.backward(call, operands, result, torch.ones_like(result.out), None)
    assert gradients[3] is None
    assert cudnn_module.graphs[1].inputs["dBias"] is None


def test_cudnn_bias_of_the_lowest_finite_numbers(cudnn_module: FakeCudnn) -> None:
    """Rows whose finite bias is the lowest number of the dtype attend only to those keys, not to the keys at -inf."""
    bias = torch.full((5, 7), torch.finfo(torch.float64).min, dtype=torch.float64)
    bias[:, 3:] = -torch.inf
    call, operands = call_of(*tensors(5, 7), layout="bshd", bias=bias, device="cuda")
    value = operands.v[:, :3].repeat_interleave(2, 2).mean(1, keepdim=True).expand(2, 5, 4, 8)
    torch.testing.assert_close(cudnn.BACKEND.forward(call, operands).out, value)


@pytest.mark.parametrize(("q_len", "kv_len"), [(6, 6), (6, 9), (6, 4)])
@pytest.mark.parametrize("heads", [4, 6])
def test_cudnn_alibi(cudnn_module: FakeCudnn, heads: int, q_len: int, kv_len: int) -> None:
    """cuDNN's own slopes, also for a number of heads that is not a power of two."""
    q, k, v = tensors(q_len, kv_len, heads=heads)
    check(cudnn.BACKEND, q, k, v, mask=masks.causal("top_left"), alibi_slopes=usual_slopes(heads))
    assert [graph.inputs["use_alibi_mask"] for graph in cudnn_module.graphs] == [True, True]


def test_cudnn_runs_only_alibi_slopes_that_are_known_to_be_the_usual_ones() -> None:
    """Equal numbers from elsewhere, and slopes that were written to, are not known to be the usual ones."""
    q, k, v = (t.half() for t in tensors(6, 6))
    written, own = usual_slopes(4), undivided.alibi_slopes(4)
    written[0] = own[0] = 3.0
    for slopes, known in (
        (usual_slopes(4), True),
        (usual_slopes(4).clone(), False),
        (written, False),
        (undivided.alibi_slopes(4), True),
        (copy.deepcopy(undivided.alibi_slopes(4)), False),
        (own, False),
    ):
        problem = problem_of(q, k, v, layout="bshd", mask=masks.causal(), alibi_slopes=slopes, device="cuda")
        assert problem.usual_slopes is known
        reasons = cudnn.BACKEND.reasons(problem, Machine.named("h100", "9.20.0", {"cudnn_frontend": "1.23"}))
        assert [reason[:40] for reason in reasons] == ([] if known else ["ALiBi slopes that are not known to be th"])


def test_alibi_slopes_returns_a_new_tensor_at_every_call() -> None:
    """A shared tensor that one model trains as a parameter would change in every other model."""
    first, second = undivided.alibi_slopes(4), undivided.alibi_slopes(4)
    torch.nn.Parameter(first).data.zero_()
    assert torch.equal(second, usual_slopes(4))
    assert undivided.alibi_slopes(4, "meta").is_meta
    for heads in (0, -1, 2.0, None):
        with pytest.raises(undivided.InputError, match="heads must be"):
            undivided.alibi_slopes(heads)  # type: ignore[arg-type]


def test_a_layer_without_slopes_uses_the_usual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine's ``core_attention_bias_type="alibi"``: cuDNN runs only slopes that are known to be the usual
    ones."""
    seen: list[Problem] = []

    def noted(problem: Problem, machine: Machine, policy: Policy) -> Decision:
        seen.append(problem)
        return select(problem, machine, policy)

    monkeypatch.setattr(prepare, "select", noted)
    module = DotProductAttention(4, 8, 2, qkv_format="bshd", attn_mask_type="causal")
    module(*(t.float() for t in tensors(6, 6)), core_attention_bias_type="alibi")
    assert [problem.usual_slopes for problem in seen] == [True]


SINKS = torch.tensor([-20.0, 0.0, 3.0, 12.0], dtype=torch.float64)
"""Sinks far below the scores, among them, and far above them; gradients must stay exact."""


@pytest.mark.parametrize("mask", CUDNN_MASKS)
def test_cudnn_sinks(cudnn_module: FakeCudnn, mask: str) -> None:
    check(cudnn.BACKEND, *tensors(3, 5, "bhsd"), layout="bhsd", mask=CUDNN_MASKS[mask](), sinks=SINKS.clone())
    forward, backward = (graph.inputs for graph in cudnn_module.graphs)
    assert forward["sink_token"].attributes["dim"] == [1, 4, 1, 1]
    assert "sink_token" not in backward  # the statistics hold them


@pytest.mark.parametrize("keys", [5, 128])
def test_a_backward_call_has_no_sinks(keys: int) -> None:
    """The inputs of a call become tensors of its graph: with keys that do not fill a tile, a sink came with them."""
    q, k, v = tensors(3, keys)
    call, operands = call_of(q, k, v, layout="bshd", sinks=SINKS.clone(), device="cuda")
    cudnn_call = CudnnCall.from_call(call, operands, scores.extra(call, operands))
    assert cudnn_call.extra.keys() == {"sink"}
    assert cudnn_call.for_backward().extra == {}


def test_cudnn_sinks_with_documents_and_a_tail(cudnn_module: FakeCudnn) -> None:
    """An empty document, and tokens after the last one, which add nothing to the gradient of the sinks."""
    q, k, v = tensors(12, 12, "thd")
    q[9:], k[9:], v[9:] = (torch.nan,) * 3
    mask = masks.documents(torch.tensor([0, 3, 3, 9]), total_q=12) & masks.causal()
    check(cudnn.BACKEND, q, k, v, layout="thd", mask=mask, sinks=SINKS.clone())


def test_cudnn_sinks_with_a_bias(cudnn_module: FakeCudnn) -> None:
    bias = torch.randn(4, 5, 7, dtype=torch.float64)
    bias[:, 2] = -torch.inf
    check(cudnn.BACKEND, *tensors(5, 7), bias=bias, sinks=SINKS.clone())


def paged(lengths: list[int], page: int, width: int) -> tuple[torch.Tensor, ...]:
    """q, pools and a table: NaN in every unused slot, and page numbers beyond the pool in every unused entry."""
    torch.manual_seed(page)
    pool = torch.full((len(lengths) * width + 1, page, 2, 24), torch.nan, dtype=torch.float64)
    table = torch.full((len(lengths), width), 10_000, dtype=torch.int32)
    free = iter(torch.randperm(len(pool)).tolist())
    for n, length in enumerate(lengths):
        for start in range(0, length, page):
            table[n, start // page] = number = next(free)
            pool[number, : length - start] = torch.randn(min(page, length - start), 2, 24, dtype=torch.float64)
    return torch.randn(len(lengths), 1, 4, 8, dtype=torch.float64), pool[..., :8], pool[..., 8:], table


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize(("page", "width"), [(16, 3), (64, 5), (256, 1)])
def test_cudnn_pages(cudnn_module: FakeCudnn, page: int, width: int, sinks: torch.Tensor | None) -> None:
    """Lengths that end at the end of a page and within one, shorter than a page, and 0; garbage in all unused slots."""
    lengths = [page, page * width, 5, 0, page * width - 3, page * (width - 1) + 1]
    q, k, v, table = paged(lengths, page, width)
    mask = masks.lengths(torch.tensor(lengths)) & masks.causal("bottom_right")
    call, operands = call_of(q, k, v, layout="bshd", mask=mask, pages=table, sinks=sinks, device="cuda")
    result = cudnn.BACKEND.forward(call, operands)
    clean = [torch.nan_to_num(t)[table.clamp(max=len(k) - 1).long()].flatten(1, 2) for t in (k, v)]
    dense = call_of(q, *clean, layout="bshd", mask=mask, sinks=sinks, device="cuda")
    out, lse, _ = expected(*dense, torch.ones(len(lengths), 1, 4, 16, dtype=torch.float64))
    torch.testing.assert_close(result.out, out)
    torch.testing.assert_close(result.lse, lse)
    assert cudnn_module.graphs[0].inputs["use_padding_mask"] is True
    assert cudnn_module.graphs[0].inputs["seq_len_kv"].attributes["dim"] == [6, 1, 1, 1]


def test_cudnn_pages_share_a_graph_while_the_table_grows(cudnn_module: FakeCudnn) -> None:
    for width in (5, 6, 7, 8):
        q, k, v, table = paged([70, 3], 16, width)
        k, v = torch.nan_to_num(k)[:9], torch.nan_to_num(v)[:9]
        table = table.clamp(max=8)
        mask = masks.lengths(torch.tensor([70, 3]))
        call, operands = call_of(q, k, v, layout="bshd", mask=mask, pages=table, device="cuda")
        cudnn.BACKEND.forward(call, operands)
    assert len(cudnn_module.graphs) == 1


H100 = Machine.named("h100", "9.20.0", {"cudnn_frontend": "1.23.0"})


def build_call(case: Case) -> tuple[Call, Tensors, Inputs]:
    """A case of the catalogue in fp64, the precision of the fake, with NaN in all memory that must not be read."""
    built = build(case, torch.float64, poison=True)
    return *call_of(**built.arguments, device="cuda"), built


def allowed_on_an_h100(case: Case) -> bool:
    """Whether cuDNN may run the case in bf16."""
    problem = build_call(case)[0].problem
    bias = torch.bfloat16 if problem.bias_dtype == torch.float64 else problem.bias_dtype
    return not cudnn.BACKEND.reasons(problem._replace(dtype=torch.bfloat16, bias_dtype=bias), H100)


CATALOGUE = [case for case in CASES.values() if allowed_on_an_h100(case)]


@pytest.mark.parametrize("case", CATALOGUE, ids=lambda case: case.name)
def test_cudnn_equals_the_reference(cudnn_module: FakeCudnn, case: Case) -> None:
    call, operands, built = build_call(case)
    operands = Tensors._make(None if t is None else t.detach() for t in operands)
    with torch.no_grad():
        expected_result, result = (backend.forward(call, operands) for backend in (reference.BACKEND, cudnn.BACKEND))
    torch.testing.assert_close(result.out, expected_result.out)
    torch.testing.assert_close(result.lse, expected_result.lse)
    if "backward" in call.problem.features:
        expected_gradients, gradients = (
            backend.backward(call, operands, result, built.grad_out, None)
            for backend, result in ((reference.BACKEND, expected_result), (cudnn.BACKEND, result))
        )
        for name, one, other in zip(("q", "k", "v", "bias", "sinks"), expected_gradients, gradients, strict=False):
            if one is not None:  # the reference computes only the requested gradients, cuDNN all or none
                torch.testing.assert_close(other, one, msg=lambda text, name=name: f"{name}: {text}")


def test_the_catalogue_has_cases_of_every_feature_of_the_adapter() -> None:
    problems = [build_call(case)[0].problem for case in CATALOGUE]
    features = frozenset().union(*(problem.features for problem in problems))
    assert features >= {"bias", "bias_grad", "alibi", "sinks", "sinks_grad", "paged", "gqa", "value_dim"}
