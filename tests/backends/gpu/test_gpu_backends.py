"""How the flash kernels of PyTorch and of the flash-attn packages are called, without a GPU.

The adapters run against stand-ins (`fake_gpu_kernels`) that keep each kernel's conventions; what a real kernel computes
is not tested here. PyTorch's efficient kernel and its cuDNN are in `test_torch_efficient.py` and `test_torch_cudnn.py`,
cuDNN's own in `test_cudnn.py`, FlexAttention in `test_flex.py`, selection in `test_gpu_selection.py`.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import fake_gpu_kernels as fake
import pytest
import torch
from adapter_check import MASKS, Recorder, check, tensors
from calls import call_of
from torch import Tensor

from undivided import masks
from undivided.backends import flash_attn
from undivided.backends.flash_attn import version_2, version_3, version_4
from undivided.backends.torch_flash import cuda
from undivided.machine import Machine
from undivided.masks import Mask
from undivided.request.problem import Problem


def flash_sides(causal: bool, left: int, right: int) -> fake.Band:
    return None if left == -1 else left, 0 if causal else None if right == -1 else right


@pytest.fixture
def aten(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """PyTorch's CUDA operators, with their schemas' argument order."""
    record = Recorder()

    def flash_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, debug, *, scale, window_size_left, window_size_right
    ):
        record.add(
            "flash_forward",
            q=q,
            cu_q=cu_q,
            max_q=max_q,
            causal=is_causal,
            left=window_size_left,
            right=window_size_right,
        )
        assert dropout_p == 0.0
        assert debug is False
        assert fake.are_aligned(q, k, v)
        sides = flash_sides(is_causal, window_size_left, window_size_right)
        return *fake.flash(q, k, v, scale, sides, cu_q=cu_q, cu_k=cu_k), None, None, None

    def flash_backward(
        grad,
        q,
        k,
        v,
        out,
        lse,
        cu_q,
        cu_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        rng,
        unused,
        *,
        scale,
        window_size_left,
        window_size_right,
    ):
        record.add("flash_backward", lse=lse, deterministic=torch.are_deterministic_algorithms_enabled())
        assert grad.is_contiguous()
        assert fake.are_aligned(grad, q, k, v, out)
        sides = flash_sides(is_causal, window_size_left, window_size_right)

        def run(q, k, v):
            return fake.flash(q, k, v, scale, sides, cu_q=cu_q, cu_k=cu_k)

        want = run(q, k, v)[1]
        written = ~want.isnan()
        assert torch.equal(lse[written] == torch.inf, want[written] == torch.inf), "the kernel's own lse comes back"
        grads = fake.gradients(run, (q, k, v), grad)
        if cu_q is not None:  # the real kernel leaves tokens after the last document unwritten
            for g, cu in zip(grads, (cu_q, cu_k, cu_k), strict=True):
                g[int(cu[-1]) :] = torch.nan
        return grads

    for name, function in (("_flash_attention_forward", flash_forward), ("_flash_attention_backward", flash_backward)):
        monkeypatch.setattr(cuda, "OPS", types.SimpleNamespace(**vars_of(cuda.OPS), **{name: function}))
    return record


def vars_of(ops: Any) -> dict[str, Any]:
    return vars(ops) if isinstance(ops, types.SimpleNamespace) else {}


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("mask", MASKS)
def test_torch_flash_dense(aten: Recorder, mask: str, layout: str) -> None:
    check(cuda, *tensors(3, 5, layout), layout=layout, mask=MASKS[mask]())
    call = aten.last("flash_forward")
    assert call["q"].shape == (2, 3, 4, 8)
    assert (call["causal"], call["left"], call["right"]) == {
        "full": (False, -1, -1),
        "causal": (True, -1, 0),
        "window-2-1": (False, 2, 1),
        "left-only": (False, 0, -1),
        "right-only": (False, -1, 1),
    }[mask]


def test_torch_flash_copies_rows_that_do_not_start_at_16_bytes(aten: Recorder) -> None:
    rows = torch.randn(2, 7, 4, 9, dtype=torch.float64)
    q, k, v = (rows[:, :n, :, at : at + 8].detach() for n, at in ((5, 1), (7, 0), (7, 1)))
    check(cuda, q, k, v)


def test_torch_flash_rows_without_keys(aten: Recorder) -> None:
    """Three more queries than keys: their rows are 0 and -inf, although the kernel returns +inf."""
    check(cuda, *tensors(6, 3), mask=masks.causal("bottom_right"))
    assert (aten.last("flash_backward")["lse"][..., :3] == torch.inf).all()


def test_torch_flash_packed_documents_with_a_tail(aten: Recorder) -> None:
    """Tokens after the last document are never written by the kernel, forward or backward."""
    cu = torch.tensor([0, 3, 3, 8])
    q, k, v = tensors(10, 10, "thd")
    check(cuda, q, k, v, layout="thd", mask=masks.documents(cu, total_q=10) & masks.causal())
    call = aten.last("flash_forward")
    assert call["q"].shape == (10, 4, 8)
    assert call["cu_q"].dtype == torch.int32
    assert call["max_q"] >= 5


def test_the_determinism_flag_is_set_for_one_call_only(aten: Recorder) -> None:
    q, k, v = tensors()
    call, given = call_of(q, k, v, layout="bshd", device="cuda")
    result = cuda.forward(call, given)
    cuda.backward(call.with_problem(call.problem._replace(deterministic=True)), given, result, torch.ones_like(q), None)
    assert aten.last("flash_backward")["deterministic"]
    assert not torch.are_deterministic_algorithms_enabled()


UNSEEN: dict[str, tuple[int, int, Callable[[], Mask]]] = {
    "keys before a window": (3, 7, lambda: masks.window(1, 0, "bottom_right")),
    "many keys before a window": (2, 135, lambda: masks.window(2, 1, "bottom_right")),
    "all keys but one": (1, 129, lambda: masks.window(0, 0, "bottom_right")),
    "rows before the first key": (6, 3, lambda: masks.causal("bottom_right")),
    "rows before and after a window": (9, 3, lambda: masks.window(1, 1, "bottom_right")),
}


def unseen(name: str) -> tuple[tuple[Tensor, ...], Mask]:
    """q, k, v with NaN in every key that no row sees and every row that sees none, and the mask."""
    q_len, kv_len, make = UNSEEN[name]
    (q, k, v), mask = tensors(q_len, kv_len), make()
    allowed = mask.to_dense(1, 1, q_len, kv_len)[0, 0]
    q[:, ~allowed.any(1)], k[:, ~allowed.any(0)], v[:, ~allowed.any(0)] = (torch.nan,) * 3
    assert any(t.isnan().any() for t in (q, k, v))
    return (q, k, v), mask


def unseen_in_documents() -> tuple[tuple[Tensor, ...], Mask]:
    """Packed documents with fewer and with more queries than keys, under a window."""
    cu_q, cu_kv = torch.tensor([0, 2, 7]), torch.tensor([0, 6, 8])
    q, k, v = tensors(7, 8, "thd")
    mask = masks.documents(cu_q, cu_kv) & masks.window(1, 0, "bottom_right")
    allowed = mask.to_dense(1, 1, 7, 8)[0, 0]
    q[~allowed.any(1)], k[~allowed.any(0)], v[~allowed.any(0)] = (torch.nan,) * 3
    assert all(t.isnan().any() for t in (q, k, v))
    return (q, k, v), mask


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("name", [*UNSEEN, "documents"])
def test_torch_flash_clears_what_no_pair_reads(aten: Recorder, name: str, backward: bool) -> None:
    """The kernel multiplies keys before a window and rows without keys by 0, if their tile has others."""
    given, mask = unseen_in_documents() if name == "documents" else unseen(name)
    check(cuda, *given, layout="thd" if name == "documents" else "bshd", mask=mask, backward=backward)


def test_torch_flash_copies_no_more_than_it_must(aten: Recorder) -> None:
    """Not for a few queries under a window, nor for documents with as many queries as keys."""
    check(cuda, *tensors(1, 200), mask=masks.window(2, 0, "bottom_right"), backward=False)
    q, k, v = tensors(9, 9, "thd")
    call, given = call_of(
        q, k, v, layout="thd", mask=masks.documents(torch.tensor([0, 4, 9])) & masks.window(1, 0), device="cuda"
    )
    cuda.forward(call, given)
    assert aten.last("flash_forward")["q"].data_ptr() == q.data_ptr()


def flash_attn_module(record: Recorder, version: int) -> types.ModuleType:
    """The functions of one of the flash-attn packages, by their own argument names."""
    module = types.ModuleType("fake")

    def sides(given: dict[str, Any]) -> fake.Band:
        causal = given.get("causal", given.get("is_causal"))
        left, right = given["window_size_left"], given["window_size_right"]
        if version == 4:
            return left, 0 if causal else right
        return flash_sides(causal, left, right)

    def options(given: dict[str, Any]) -> dict[str, Any]:
        sinks = given.get("learnable_sink")
        return {
            "cu_q": given.get("cu_seqlens_q"),
            "cu_k": given.get("cu_seqlens_k"),
            "softcap": given["softcap"] or 0.0,
            "slopes": given.get("alibi_slopes"),
            "sinks": sinks,
            "empty_lse": torch.inf if version == 2 else -torch.inf,
        }

    def forward(q, k, v, **given):
        record.add("forward", **given)
        assert version == 2 or not any(t.isnan().any() for t in (q, k, v)), "garbage would be multiplied by 0"
        return *fake.flash(q, k, v, given["softmax_scale"], sides(given), **options(given)), None, None

    def backward(grad, q, k, v, out, lse, *buffers, **given):
        record.add("backward", **given)
        dq, dk, dv = buffers or (given["dq"], given["dk"], given["dv"])
        inputs = (q, k, v) if given.get("learnable_sink") is None else (q, k, v, given["learnable_sink"])

        def run(q, k, v, sinks=None):
            return fake.flash(q, k, v, given["softmax_scale"], sides(given), **options(given) | {"sinks": sinks})

        want = run(*inputs)[1]
        real = want.isfinite()
        torch.testing.assert_close(lse[real], want[real])  # with the sinks in it
        grads = fake.gradients(run, inputs, grad, given.get("dlse"))
        for buffer, g in zip((dq, dk, dv), grads, strict=False):
            buffer.copy_(g)
        return (dq, dk, dv, *grads[3:]) if version == 4 else None

    def with_cache(q, k, v, **given):
        record.add("with_cache", **given)
        lengths, found = given["cache_seqlens"], []
        left, right = given["window_size"]
        for b in range(len(q)):
            table = given["block_table"]
            keys, values = (t[b] if table is None else t[table[b].long()].flatten(0, 1) for t in (k, v))
            n = int(lengths[b])
            found.append(
                fake.flash(
                    q[b : b + 1],
                    keys[None, :n],
                    values[None, :n],
                    given["softmax_scale"],
                    flash_sides(given["causal"], left, right),
                )
            )
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    def backward_4(q, k, v, out, grad, lse, **given):
        return backward(grad, q, k, v, out, lse, **given)

    module._flash_attn_forward = module._flash_attn_varlen_forward = module._flash_attn_fwd = forward  # type: ignore[attr-defined]
    module._flash_attn_backward = module._flash_attn_varlen_backward = backward  # type: ignore[attr-defined]
    module._flash_attn_bwd, module.flash_attn_with_kvcache = backward_4, with_cache  # type: ignore[attr-defined]
    return module


VERSIONS = {
    2: (version_2, "flash_attn.flash_attn_interface"),
    3: (version_3, "flash_attn_3.flash_attn_interface"),
    4: (version_4, "flash_attn.cute.interface"),
}


def installed(monkeypatch: pytest.MonkeyPatch, version: int) -> tuple[Any, Recorder]:
    """The adapter of a version, with a fake of its package."""
    record = Recorder()
    module, name = VERSIONS[version]
    parts = name.split(".")
    for n in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:n]), types.ModuleType(".".join(parts[:n])))
    monkeypatch.setitem(sys.modules, name, flash_attn_module(record, version))
    return module, record


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_flash_attn_dense(monkeypatch: pytest.MonkeyPatch, version: int, mask: str) -> None:
    module, record = installed(monkeypatch, version)
    check(module, *tensors(3, 5, "sbhd"), layout="sbhd", mask=MASKS[mask](), softcap=2.0)
    call = record.last("forward")
    unbounded = None if version == 4 else -1
    assert call["causal"] == (mask == "causal")
    assert call["window_size_left"] == {"window-2-1": 2, "left-only": 0}.get(mask, unbounded)
    assert record.last("backward")["deterministic"] is False


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("name", [*UNSEEN, "documents"])
@pytest.mark.parametrize("version", VERSIONS)
def test_flash_attn_gets_0_where_no_pair_reads(
    monkeypatch: pytest.MonkeyPatch, version: int, name: str, backward: bool
) -> None:
    module, _ = installed(monkeypatch, version)
    given, mask = unseen_in_documents() if name == "documents" else unseen(name)
    check(module, *given, layout="thd" if name == "documents" else "bshd", mask=mask, backward=backward)


@pytest.mark.parametrize("version", VERSIONS)
def test_flash_attn_packed(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Documents of different lengths for queries and keys, an empty one, and garbage after the last."""
    module, record = installed(monkeypatch, version)
    q, k, v = tensors(10, 12, "thd")
    with torch.no_grad():
        k[11:], v[11:], q[9:] = torch.nan, torch.nan, torch.nan
    cu_q, cu_kv = torch.tensor([0, 3, 5, 9]), torch.tensor([0, 4, 4, 11])
    mask = masks.documents(cu_q, cu_kv, total_q=10, total_kv=12) & masks.causal("bottom_right")
    check(module, q, k, v, layout="thd", mask=mask)
    call = record.last("forward")
    assert call["cu_seqlens_q"].dtype == call["cu_seqlens_k"].dtype == torch.int32
    assert call["cu_seqlens_k"].tolist() == [0, 4, 4, 11]
    assert call["max_seqlen_q"] >= 4
    assert call["max_seqlen_k"] >= 7


def test_flash_attn_2_against_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    module, record = installed(monkeypatch, 2)
    q, k, v = tensors(2, 9)
    k[0, 4:], v[0, 4:] = torch.nan, torch.nan
    mask = masks.lengths(torch.tensor([4, 9])) & masks.causal("bottom_right")
    check(module, q, k, v, mask=mask, backward=False)
    call = record.last("with_cache")
    assert call["cache_seqlens"].dtype == torch.int32
    assert call["window_size"] == (-1, 0)


def test_flash_attn_2_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    module, record = installed(monkeypatch, 2)
    q, _, _ = tensors(1, 1)
    k, v = torch.randn(5, 4, 2, 8, dtype=q.dtype), torch.randn(5, 4, 2, 8, dtype=q.dtype)
    pages = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32)
    call, given = call_of(q, k, v, layout="bshd", mask=masks.lengths(torch.tensor([6, 3])), pages=pages, device="cuda")
    result = module.forward(call, given)
    for b, length in enumerate((6, 3)):
        keys, values = (t[pages[b].long()].flatten(0, 1)[:length].transpose(0, 1) for t in (k, v))
        want, _ = fake.plain(q[b].transpose(0, 1), keys, values, call.scale, torch.ones(1, length, dtype=torch.bool))
        torch.testing.assert_close(result.out[b].transpose(0, 1), want)
    assert record.last("with_cache")["block_table"] is pages


def test_flash_attn_2_alibi(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = installed(monkeypatch, 2)
    slopes = torch.rand(2, 4, dtype=torch.float64).float()
    check(module, *tensors(3, 5), mask=masks.causal("bottom_right"), alibi_slopes=slopes)


def test_flash_attn_4_sinks_and_the_gradient_through_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's lse contains the sinks, ours does not; a sink far above the scores must not spoil the gradients."""
    module, _ = installed(monkeypatch, 4)
    sinks = torch.tensor([-20.0, 0.0, 3.0, 12.0], dtype=torch.float64)
    check(module, *tensors(6, 4), mask=masks.causal("bottom_right"), sinks=sinks)
    check(module, *tensors(6, 4), mask=masks.causal("bottom_right"), grad_lse=True)


def test_the_flash_attn_version_follows_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"flash_attn": "2.8.3", "flash_attn_3": "3.0.0", "flash_attn_4": "4.0.0"}
    q = torch.zeros(1, 4, 2, 8, dtype=torch.bfloat16)
    call, given = call_of(q, q, q, layout="bshd", device="cuda")
    for gpu, number in (("a100", 2), ("h100", 3), ("b200", 4)):
        monkeypatch.setattr(Machine, "this", staticmethod(lambda device, gpu=gpu: Machine.named(gpu, None, packages)))
        assert flash_attn.BACKEND._pick(call, given).number == number
    alibi = call.problem._replace(features=frozenset({"alibi"}))
    assert flash_attn.BACKEND._pick(call.with_problem(alibi), given).number == 2


def test_the_flash_attn_version_is_chosen_once_per_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of the versions take longer than the rest of a call."""
    asked: list[int] = []
    reasons = flash_attn._Version.reasons

    def noted(version: flash_attn._Version, problem: Problem, machine: Machine) -> list[str]:
        asked.append(version.number)
        return reasons(version, problem, machine)

    monkeypatch.setattr(flash_attn._Version, "reasons", noted)
    h100 = Machine.named("h100", None, {"flash_attn_3": "3.0.0"})
    monkeypatch.setattr(Machine, "this", staticmethod(lambda device: h100))
    q = torch.zeros(1, 23, 2, 8, dtype=torch.bfloat16)
    for _ in range(2):
        assert flash_attn.BACKEND._pick(*call_of(q, q, q, layout="bshd", device="cuda")).number == 3
    assert asked == [3]
