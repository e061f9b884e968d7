"""A call on a GPU never waits: no value is read on the host, no tensor is copied from or to it.

These tests need no GPU: the calls run on meta tensors, which have no values to read, with fake kernels, and every
operation that would wait is recorded. Inside a CUDA graph such an operation is an error; outside of one it empties the
queue.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import call_of
from fake_cudnn import FakeCudnn, FakeGraph
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from undivided import masks
from undivided.backends import get, torch_cudnn, torch_efficient
from undivided.backends.cudnn import graph
from undivided.backends.triton import blocks, chosen, inputs, tables
from undivided.machine import Machine
from undivided.request.slopes import usual_slopes

pytestmark = pytest.mark.usefixtures("seen_inside")

READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "is_nonzero")


class Made(TorchFunctionMode):
    """Records tensors that are created for the device from numbers on the host."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        made = func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor)
        if made and torch.device(given.get("device") or "cpu").type != "cpu":
            self.found.append(f"{func.__name__}({args[0]})")
        return func(*args, **given)


class Waits(TorchDispatchMode):
    """Records operations that read a value on the host, or copy between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, name = kwargs or {}, str(func)
        if any(word in name for word in READS):
            self.found.append(name)
        source = args[1] if "aten.copy_" in name else args[0] if args else None
        target = args[0].device if "aten.copy_" in name else given.get("device")
        moves = ("_to_copy" in name or "aten.copy_" in name) and target is not None
        if moves and torch.device(target).type != source.device.type:
            self.found.append(f"{name} {tuple(source.shape)} from {source.device} to {target}")
        if "index.Tensor" in name and any(i is not None and i.dtype == torch.bool for i in args[1]):
            self.found.append(f"{name} by a mask")
        return func(*args, **given)


def _int32(*values: int) -> Tensor:
    """On the GPU, as training and serving loops hold them."""
    return torch.zeros(len(values), dtype=torch.int32, device="meta")


def _table(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device="meta")


MASKS: dict[str, Callable[[], Any]] = {
    "full": lambda: None,
    "causal": masks.causal,
    "window": lambda: masks.window(16, 0),
    "window-global": lambda: masks.window(16, 0) | masks.prefix(4),
    "lengths": lambda: masks.lengths(_int32(3, 4)) & masks.causal("bottom_right"),
    "documents": lambda: masks.documents(_int32(0, 3, 9), max_q=64, max_kv=64) & masks.causal(),
    "documents-of-steps": lambda: (
        masks.documents(_int32(0, 3, 9), _int32(0, 30, 60), max_q=64, max_kv=64) & masks.causal("bottom_right")
    ),
    "dense": lambda: masks.dense(torch.ones(2, 1, 64, 64, dtype=torch.bool, device="meta")),
    "ids": lambda: masks.document_ids(torch.zeros(2, 64, dtype=torch.int64, device="meta")),
    "blocks": lambda: masks.blocks(16, 8, _table(1, 2, 4, 3)) & masks.causal(),
    "blocks-padded": lambda: (
        masks.blocks(16, 8, _table(2, 1, 4, 3))
        & masks.lengths(_int32(60, 9), _int32(3, 4), _int32(1, 0), _int32(8, 0))
        & masks.causal("bottom_right")
    ),
    "blocks-documents": lambda: (
        masks.blocks(16, 8, _table(2, 1, 4, 3)) & masks.documents(_int32(0, 3, 9), max_q=64, max_kv=64)
    ),
}
PACKED = ("documents", "documents-of-steps", "blocks-documents")
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "everything": lambda: {
        "alibi_slopes": torch.ones(4, device="meta", requires_grad=True),
        "softcap": 20.0,
        "sinks": torch.ones(4, device="meta", requires_grad=True),
        "dropout_p": 0.1,
        "dropout_seed": 7,
        "bias": torch.zeros(1, 4, 64, 64, device="meta", requires_grad=True),
    },
}


def _asked(name: str, train: bool, kv_heads: int = 2, **options: Any) -> tuple[Any, Any]:
    packed = name in PACKED
    shape = (64,) if packed else (2, 64)
    q, k, v = (
        torch.zeros(*shape, heads, 64, dtype=torch.bfloat16, device="meta", requires_grad=train)
        for heads in (4, kv_heads, kv_heads)
    )
    return call_of(q, k, v, layout="thd" if packed else "bshd", mask=MASKS[name](), **options)


def _waits(backend: Any, call: Any, given: Any) -> list[str]:
    """The operations of forward and backward, if there is one, that wait."""
    with Waits() as waits, Made(waits.found), torch.no_grad():
        result = backend.forward(call, given)
        if "backward" in call.problem.features:
            grad = torch.zeros_like(given.q)
            backend.backward(call, given, result, grad, None)
    return waits.found


class Launch:
    """A fake of a Triton kernel."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **named: None


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, "plain") for name in MASKS] + [(name, "everything") for name in MASKS if name not in PACKED],
)
def test_triton(name: str, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed, and the tables of a call without a mask, were once created on the host and copied at every call."""
    _fake_kernels(monkeypatch)
    assert _waits(get("triton"), *_asked(name, True, **OPTIONS[options]())) == []


@pytest.mark.parametrize("name", ["full", "causal", "window", "window-global", "lengths", "documents"])
def test_triton_with_batch_invariant_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many pieces the sequences have is known on the device only."""
    _fake_kernels(monkeypatch)
    assert _waits(get("triton"), *_asked(name, False, batch_invariant=True)) == []


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("quantize", [False, True])
def test_triton_with_chosen_pages(packed: bool, quantize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of sequences, pages and documents are known on the device only."""
    _fake_kernels(monkeypatch)
    monkeypatch.setattr(chosen, "MAX_EXCESS", 1)  # as many rows as there are
    q = torch.zeros(*((2, 4, 64) if packed else (2, 1, 4, 64)), dtype=torch.bfloat16, device="meta")
    pool = torch.zeros(9, 16, 2, 64, dtype=torch.int8 if quantize else q.dtype, device="meta")
    scales = {name: torch.zeros(9, 16, 2, device="meta") for name in ("k_scale", "v_scale") if quantize}
    lengths = masks.documents(_int32(0, 1, 2), _int32(0, 3, 43), max_q=1) if packed else masks.lengths(_int32(3, 40))
    options = {"layout": "thd" if packed else "bshd", "pages": _table(2, 3), **scales}
    call, given = call_of(q, pool, pool, mask=masks.pages(_table(2, 2, 4), 8) & lengths, **options)
    call = call.with_problem(call.problem._replace(device="cuda"))
    assert _waits(get("triton"), call, given) == []
    assert get("triton").notes(call, given) == ["only the chosen key blocks are computed, in the forward"]


def _fake_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from undivided.kernels.triton import backward, forward, merging
    from undivided.kernels.triton import blocks as block_kernels

    kernels = (
        (forward, ("forward",)),
        (merging, ("combine", "merge_pieces")),
        (backward, ("delta", "rows", "keys", "pairs")),
        (block_kernels, ("document_blocks",)),
    )
    for module, names in kernels:
        for one in names:
            monkeypatch.setattr(module, f"{one}_kernel", Launch(getattr(module, f"{one}_kernel")))
    for module in (inputs, blocks):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    monkeypatch.setattr(inputs, "architecture", lambda device: "sm90")


@pytest.mark.parametrize("name", ["full", "causal", "window", "documents"])
def test_pytorchs_kernels(name: str) -> None:
    h100, ran = Machine(device="cuda", compute_capability=(9, 0), cudnn="9.15.0"), []
    for backend in ("torch_flash", "torch_efficient"):  # torch_cudnn's operator has no meta function
        # the meta function of the efficient backward (torch 2.13) does not take its own operator's arguments
        call, given = _asked(name, backend != "torch_efficient", kv_heads=4)
        call = call.with_problem(call.problem._replace(device="cuda"))
        if not get(backend).reasons(call.problem, h100):
            ran.append(backend)
            assert _waits(get(backend), call, given) == [], backend
    assert ran


@pytest.mark.parametrize("align", ["top_left", "bottom_right", None])
def test_the_padded_log_sum_exp_of_packed_documents(align: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathered and scattered by positions that are computed on the device, in the forward and in the backward."""

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> tuple[Any, ...]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None

    forward = torch_efficient.OPS._efficient_attention_forward
    fakes = types.SimpleNamespace(_efficient_attention_forward=forward, _efficient_attention_backward=backward)
    monkeypatch.setattr(torch_efficient, "OPS", fakes)
    mask = masks.documents(_int32(0, 3, 9), _int32(0, 3, 9), max_q=40, max_kv=40)
    mask = mask & masks.causal(align) if align else mask
    q, k, v = (torch.zeros(64, 4, 64, device="meta", requires_grad=True) for _ in range(3))
    call, given = call_of(q, k, v, layout="thd", mask=mask)
    assert _waits(get("torch_efficient"), call, given) == []
    result = torch_efficient.BACKEND.forward(call, given)
    assert result.lse.shape == (1, 4, 64)


@pytest.mark.parametrize("align", ["top_left", None])
def test_pytorchs_cudnn_with_documents(align: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> tuple[Any, ...]:
        return torch.empty_like(q), torch.empty(*q.shape[:2], 1, device=q.device), *(None,) * 7

    monkeypatch.setattr(torch_cudnn, "OPS", types.SimpleNamespace(_cudnn_attention_forward=forward))
    mask = masks.documents(_int32(0, 3, 9), _int32(0, 3, 9))
    mask = mask & masks.causal(align) if align else mask
    q, k, v = (torch.zeros(64, 4, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    call, given = call_of(q, k, v, layout="thd", mask=mask)
    assert _waits(get("torch_cudnn"), call, given) == []


CUDNN_OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "sinks": lambda: {"sinks": torch.ones(4, device="meta", requires_grad=True)},
    "bias": lambda: {"bias": torch.zeros(1, 4, 64, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)},
    "alibi": lambda: {"alibi_slopes": usual_slopes(4, "meta")},
}


@pytest.fixture
def cudnn_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", FakeCudnn())
    monkeypatch.setattr(FakeGraph, "execute", lambda *arguments, **named: None)
    monkeypatch.setattr(graph, "_graphs", {})
    monkeypatch.setattr(graph, "_handles", graph._Handles())


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, how) for name in ("full", "causal", "window", "lengths", "documents") for how in ("plain", "sinks")]
    + [("full", "bias"), ("causal", "bias"), ("causal", "alibi")],
)
def test_cudnn(name: str, options: str, cudnn_module: None) -> None:
    call, given = _asked(name, True, **CUDNN_OPTIONS[options]())
    assert _waits(get("cudnn"), call.with_problem(call.problem._replace(device="cuda")), given) == []


def test_cudnn_pages(cudnn_module: None) -> None:
    q, pool = (torch.zeros(*shape, dtype=torch.bfloat16, device="meta") for shape in ((2, 1, 4, 64), (9, 16, 2, 64)))
    pages = torch.zeros(2, 3, dtype=torch.int32, device="meta")
    mask = masks.lengths(_int32(3, 40)) & masks.causal("bottom_right")
    call, given = call_of(q, pool, pool, layout="bshd", mask=mask, pages=pages)
    assert _waits(get("cudnn"), call, given) == []


class TestCapture:
    """What is cached while a CUDA graph is captured, whose kernels have not run yet."""

    @pytest.fixture
    def capturing(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

        def set_to(value: bool) -> None:
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: value)

        set_to(False)
        return set_to

    def test_values_computed_in_a_capture_are_not_cached(self, capturing: Callable[[bool], None]) -> None:
        """Its memory belongs to the graph and holds nothing before a replay: eager calls would read garbage."""
        mask = masks.window(3, 1)
        capturing(True)
        form = mask.normal_form(1, 1, 40, 40, "cpu")
        inside = tables.cached_tables(form, 40, 40, 16, 16, torch.device("cpu"))
        plain = tables.cached_tables(None, 40, 40, 16, 16, torch.device("cpu"))
        capturing(False)
        assert mask.normal_form(1, 1, 40, 40, "cpu") is not form
        assert tables.cached_tables(form, 40, 40, 16, 16, torch.device("cpu")) is not inside
        assert tables.cached_tables(None, 40, 40, 16, 16, torch.device("cpu")) is not plain

    def test_lengths_on_the_gpu_are_read_again_by_the_graph(self, capturing: Callable[[bool], None]) -> None:
        """Values computed before the capture would keep the old lengths permanently."""
        mask = masks.lengths(_int32(3, 4))
        before = mask.normal_form(2, 1, 40, 40, "meta")
        assert mask.normal_form(2, 1, 40, 40, "meta") is before
        capturing(True)
        assert mask.normal_form(2, 1, 40, 40, "meta") is not before

    def test_lengths_on_the_cpu_keep_their_values_from_before_the_capture(
        self, capturing: Callable[[bool], None]
    ) -> None:
        """A copy from the host is forbidden in a capture."""
        mask = masks.lengths([3, 4])
        before = mask.normal_form(2, 1, 40, 40, "meta")
        capturing(True)
        assert mask.normal_form(2, 1, 40, 40, "meta") is before
