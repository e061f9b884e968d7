"""Kept launches of forwards and backwards of the `triton` backend.

There is no GPU, so Triton's interpreter runs the kernels, in place of a compiler that returns kernels to launch again.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import undivided
from undivided import masks
from undivided.backends import triton
from undivided.backends.shared.chosen import block_pairs
from undivided.backends.triton import forward, gradients, kept_launches, launches
from undivided.kernels.triton import config
from undivided.request.call import Call
from undivided.request.normalise import normalise
from undivided.request.request import Request, Tensors
from undivided.verification import inputs
from undivided.verification.cases import CASES, Case


class Compiled:
    """A launch of an interpreted kernel."""

    def __init__(self, kernel: Any, options: dict[str, Any]) -> None:
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *values: self.kernel[grid](
            **dict(zip(self.kernel.arg_names, values, strict=True)), **self.options
        )


class Compiler:
    """An interpreted kernel that returns what Triton's own returns from a launch: a compiled kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.arg_names = kernel, kernel.arg_names

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled]:
        def run(**arguments: Any) -> Compiled:
            self.kernel[grid](**arguments)
            options = {name: value for name, value in arguments.items() if name not in self.arg_names}
            return Compiled(self.kernel, options)

        return run


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[kept_launches.ForwardLaunches]:
    """Remembered launches of interpreted kernels; the list has the launches of every forward that ran some."""
    compilers: dict[int, Compiler] = {}

    def launch(kernel: Any, *arguments: Any, **more: Any) -> launches.Launch | None:
        compiler = compilers.setdefault(id(kernel), Compiler(kernel))
        return launches.launch(compiler, *arguments, **more)

    found: list[kept_launches.ForwardLaunches] = []
    find = kept_launches.find

    def noted(call: Call, tensors: Tensors) -> kept_launches.ForwardLaunches | None:
        kept = find(call, tensors)
        if kept is not None:
            found.append(kept)
        return kept

    monkeypatch.setattr(launches, "_launches", {})
    monkeypatch.setattr(forward, "launch", launch)
    monkeypatch.setattr(gradients, "launch", launch)
    monkeypatch.setattr(kept_launches, "find", noted)
    return found


@pytest.fixture
def backwards(
    runs: list[kept_launches.ForwardLaunches], monkeypatch: pytest.MonkeyPatch
) -> list[kept_launches.BackwardLaunches]:
    """As `runs`, with the launches of every backward that ran one."""
    found: list[kept_launches.BackwardLaunches] = []
    find = kept_launches.find_gradients

    def noted(*arguments: Any) -> kept_launches.BackwardLaunches | None:
        kept = find(*arguments)
        if kept is not None:
            found.append(kept)
        return kept

    monkeypatch.setattr(kept_launches, "find_gradients", noted)
    return found


@functools.cache
def kinds_of_calls() -> dict[str, Case]:
    """A case of the contract for each layout, paged or not, for each kind of mask, feature and format whose launches
    are kept, and one with another feature: the one with the fewest pairs, because kernels are interpreted."""
    chosen: dict[Any, str] = {}
    for name, case in sorted(CASES.items(), key=lambda item: math.prod(item[1].sizes[:4])):
        call, _ = normalise(Request.from_keywords(**inputs.build(case, case.dtypes[0]).arguments))
        problem = call.problem
        if 0 in (problem.batch, problem.q_len, problem.kv_len) or "strided" in problem.features:
            continue
        if kept_launches._kept(call) is None:
            chosen.setdefault("another feature", name)
            continue
        chosen.setdefault((problem.layout, problem.page_size is None), name)
        for kind in (*problem.mask.kinds, *problem.features, problem.quantized):
            chosen.setdefault(kind, name)
    return {name: CASES[name] for name in chosen.values()}


@pytest.mark.parametrize("name", kinds_of_calls())
def test_a_repeated_call_has_the_bits_of_a_first_one(name: str, runs: list[kept_launches.ForwardLaunches]) -> None:
    case = CASES[name]
    dtype = next(dtype for dtype in case.dtypes if dtype != torch.float64)
    arguments = dict(inputs.build(case, dtype).arguments)
    first, given = normalise(Request.from_keywords(**arguments))
    with torch.no_grad():
        triton.BACKEND.forward(first, given)
        is_part_of_k = arguments["v"].data_ptr() == arguments["k"].data_ptr()
        for name in ("q", "k", "v", "sinks", "k_scale", "v_scale"):  # other memory, other values, the same strides
            if arguments.get(name) is None:
                continue
            needs, arguments[name] = arguments[name].requires_grad, copy.deepcopy(arguments[name].detach())
            arguments[name].requires_grad_(needs)
            if arguments[name].dtype.itemsize > 1:
                arguments[name] *= 1.5 if name.endswith("scale") else -1.5
            else:  # quantised
                arguments[name].copy_(arguments[name].flip(1))
        if is_part_of_k:
            arguments["v"] = arguments["k"][..., : arguments["v"].shape[-1]]
    second, given = normalise(Request.from_keywords(**arguments))
    home = kept_launches._kept(second)
    with torch.no_grad():
        assert not runs
        found = triton.BACKEND.forward(second, given)
        serves = not second.mask.parts or second.normal_form(given.q).exact
        serves = serves or block_pairs(second, given, reads_values=False) is not None
        assert bool(runs) == (home is not None and serves)
        if home:
            home.clear()
        expected = triton.BACKEND.forward(second, given)
    assert torch.equal(found.out, expected.out)
    assert torch.equal(found.lse, expected.lse)


def decode(q: torch.Tensor, k: torch.Tensor, **options: Any) -> torch.Tensor:
    out: torch.Tensor = undivided.attention(q, k, k, layout="bshd", backend="triton", **options)
    return out


def test_decoding_splits_its_keys_in_kept_launches_too(runs: list[kept_launches.ForwardLaunches]) -> None:
    k = torch.randn(1, 600, 2, 16)
    outs = [decode(torch.full((1, 1, 4, 16), n), k) for n in (1.0, 2.0)]
    assert [launch.partial_sizes[0] for found in runs for launch in found.launches] == [2]
    for n, out in enumerate(outs, 1):
        expected = undivided.attention(torch.full((1, 1, 4, 16), float(n)), k, k, layout="bshd", backend="reference")
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_tensor_descriptors_of_kept_launches_are_those_of_their_call(runs: list[kept_launches.ForwardLaunches]) -> None:
    with config.trial("forward", config.INTERPRETED._replace(descriptors=True)):
        for _ in range(3):
            q, k = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16)
            torch.testing.assert_close(decode(q, k), undivided.attention(q, k, k, layout="bshd", backend="reference"))
    assert len(runs) == 2
    described = [one for found in runs for launch in found.launches for one in launch.kept.descriptors.values()]
    assert len(described) == 2 * 2
    assert all(one.base is None for one in described)


@pytest.mark.parametrize(
    "change", ["scale", "softcap", "alignment of q", "alignment of k", "v is no part of k", "tile sizes", "mask"]
)
def test_other_calls_have_other_launches(change: str, runs: list[kept_launches.ForwardLaunches]) -> None:
    q, k, mask = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16), masks.causal()
    options: dict[str, Any] = {"mask": mask, "scale": 0.5, "softcap": 2.0}
    decode(q, k, **options)
    decode(q, k, **options)
    assert len(runs) == 1
    if change in ("scale", "softcap"):
        decode(q, k, **{**options, change: 3.0})
    elif change == "tile sizes":
        with config.trial("forward", config.INTERPRETED._replace(block_n=16)):
            decode(q, k, **options)
    elif change == "v is no part of k":
        v = torch.randn_like(k)
        found, right = (
            undivided.attention(q, k, v, layout="bshd", backend=name, **options) for name in ("triton", "reference")
        )
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    elif change == "mask":
        decode(q, k, **{**options, "mask": masks.causal("top_left")})
    else:
        moved = [
            torch.randn(x.numel() + 1)[1:].view(x.shape) if change.endswith(n) else x for n, x in (("q", q), ("k", k))
        ]
        decode(*moved, **options)
    assert len(runs) == 1


def test_a_mask_that_changed_keeps_no_launches(runs: list[kept_launches.ForwardLaunches]) -> None:
    q, k, lengths = torch.randn(2, 40, 4, 16), torch.randn(2, 40, 2, 16), torch.tensor([40, 40])
    mask = masks.lengths(lengths)
    for length in (30, 7):
        lengths[0] = length
        expected = undivided.attention(q, k, k, layout="bshd", mask=masks.lengths([length, 40]), backend="reference")
        for _ in range(2):
            torch.testing.assert_close(decode(q, k, mask=mask), expected, rtol=1e-5, atol=1e-5)
    assert len(runs) == 2


class TestChosenPages:
    """The call of the virtual sequences has launches, which are kept with the caller's mask."""

    chosen, lengths = torch.tensor([[0, 3], [2, -1]]), torch.tensor([30, 20])

    def run(self, operands: dict[str, torch.Tensor], mask: masks.Mask, **options: Any) -> None:
        q = torch.randn(2, 1, 4, 16)
        out, expected = (
            undivided.attention(q, **operands, layout="bshd", mask=mask, backend=backend, **options)
            for backend in ("triton", "reference")
        )
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)

    def operands(self) -> dict[str, torch.Tensor]:
        k, v = torch.randn(2, 8, 8, 2, 16)
        return {"k": k, "v": v, "pages": torch.randperm(8).view(2, 4).int()}

    def test_a_repeated_call_launches_only(
        self, runs: list[kept_launches.ForwardLaunches], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Other queries, keys, scale and softcap have the same tables."""
        mask, operands = masks.lengths(self.lengths) & masks.pages(self.chosen, 8), self.operands()
        self.run(operands, mask)
        assert not runs
        self.run({**self.operands(), "pages": operands["pages"]}, mask)
        assert len(runs) == 1
        for options in ({"scale": 0.7}, {"softcap": 1.0}, {"softcap": 3.0}):
            self.run(operands, mask, **options)
        assert len(runs) == 1
        self.run(operands, mask, softcap=1.0)
        assert len(runs) == 2

    def test_other_tables_have_other_launches(self, runs: list[kept_launches.ForwardLaunches]) -> None:
        chosen, lengths, operands = self.chosen.clone(), self.lengths.clone(), self.operands()
        mask = masks.lengths(lengths) & masks.pages(chosen, 8)
        self.run(operands, mask)
        operands["pages"].copy_(operands["pages"].flip(1))
        self.run(operands, mask)
        self.run({**operands, "pages": operands["pages"].flip(0)}, mask)
        chosen.copy_(torch.tensor([[1, 2], [0, 1]]))
        self.run(operands, mask)
        lengths.copy_(torch.tensor([9, 32]))
        self.run(operands, mask)
        assert not runs

    def test_other_strides_have_other_launches(self, runs: list[kept_launches.ForwardLaunches]) -> None:
        mask, operands = masks.lengths(self.lengths) & masks.pages(self.chosen, 8), self.operands()
        wide = {name: x if name == "pages" else torch.cat([x, x], 2)[:, :, :2] for name, x in operands.items()}
        for given, kept in ((operands, 0), (wide, 0), (operands, 1), (wide, 2)):
            self.run(given, mask)
            assert len(runs) <= kept

    def test_nothing_is_kept_in_a_capture(
        self, runs: list[kept_launches.ForwardLaunches], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The memory of a CUDA graph holds nothing before a replay."""
        mask, operands = masks.lengths(self.lengths) & masks.pages(self.chosen, 8), self.operands()
        call, given = normalise(Request.from_keywords(torch.randn(2, 1, 4, 16), **operands, layout="bshd", mask=mask))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        for _ in range(2):
            triton.BACKEND.forward(call, given)
        assert not runs
        assert call.checked_mask is not None
        assert not call.checked_mask.derived


LAYOUTS, STORED = ("bshd", "sbhd", "thd"), (None, "int8", "int4")


# every pair of a layout, a format, and paged or not; the interpreter takes half a second for each
@pytest.mark.parametrize(
    ("layout", "is_paged", "quantize"),
    [(layout, (i + j) % 2 == 0, quantize) for i, layout in enumerate(LAYOUTS) for j, quantize in enumerate(STORED)],
)
def test_the_layers_of_a_step_share_their_launches(
    layout: str, is_paged: bool, quantize: str | None, runs: list[kept_launches.ForwardLaunches]
) -> None:
    """The first layer of a step makes it; the others have their own keys, values and queries, in any layout."""
    options = {"is_paged": is_paged, "page_size": 16 if is_paged else None, "qkv_format": layout, "quantize": quantize}
    params, plain = (undivided.InferenceParams(4, 64, 2, 32, torch.float32, **options) for _ in range(2))
    for step, counts in enumerate(({"a": 7, "b": 7}, {"a": 13, "b": 6}, {"a": 1, "b": 1}, {"b": 1, "c": 1})):
        params.pre_step(counts)
        plain.pre_step(counts)
        before = len(runs)
        for layer in (1, 2, 3):
            q, k, v = (new_tokens(layout, tuple(counts.values()), heads, 32) for heads in (4, 2, 2))
            out = params.attend(layer, q, k, v, backend="triton")
            expected = plain.attend(layer, q, k, v, backend="reference")
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert len(runs) - before >= 2, step  # 3 if an equal mask has the launches of an earlier step


# every pair of a layout, a format and a mask; the interpreter takes a second for each
@pytest.mark.parametrize(
    ("layout", "quantize", "mask"),
    [
        pytest.param(layout, quantize, (None, masks.window(20, 0))[(i + j) % 2], id=f"{layout}-{quantize}")
        for i, layout in enumerate(("bshd", "thd"))
        for j, quantize in enumerate(STORED)
    ],
)
def test_the_steps_of_decoding_share_their_launches(
    layout: str, quantize: str | None, mask: masks.Mask | None, runs: list[kept_launches.ForwardLaunches]
) -> None:
    """The first step makes it; the ranges and the tables of tiles are those of each step."""
    options = {"is_paged": True, "page_size": 64, "qkv_format": layout, "quantize": quantize}
    params, plain = (undivided.InferenceParams(4, 256, 2, 32, torch.float32, **options) for _ in range(2))
    steps = [{"a": 70, "b": 9}, *[{"a": 1, "b": 1}] * 3, {"b": 1, "a": 1}, {"a": 1, "b": 1}]
    for step, counts in enumerate(steps):
        params.pre_step(counts)
        plain.pre_step(counts)
        before = len(runs)
        for layer in (1, 2):
            q, k, v = (new_tokens(layout, tuple(counts.values()), heads, 32) for heads in (4, 2, 2))
            out = params.attend(layer, q, k, v, mask=mask, backend="triton")
            expected = plain.attend(layer, q, k, v, mask=mask, backend="reference")
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert len(runs) - before == 2 or step < 2, step


def new_tokens(layout: str, counts: tuple[int, ...], heads: int, dim: int) -> torch.Tensor:
    """Random numbers of new tokens."""
    longest = max(counts)
    shapes = {"bshd": (len(counts), longest), "sbhd": (longest, len(counts)), "thd": (sum(counts),)}
    return torch.randn(*shapes[layout], heads, dim)


def test_the_layers_of_quantised_caches_read_their_own_scales(runs: list[kept_launches.ForwardLaunches]) -> None:
    new, q = torch.randn(3, 2, 20, 2, 32), torch.randn(3, 2, 1, 4, 32)
    for quantize in ("int8", "fp8_e4m3", "int4"):
        mask, before = masks.causal(), len(runs)
        for layer in range(3):
            cache = undivided.PagedKVCache(8, 16, 2, 32, batch=2, dtype=torch.float32, quantize=quantize)
            cache.append(new[layer] * (layer + 1), new[layer])
            out, expected = (cache.attend(q[layer], mask, backend=name) for name in ("triton", "reference"))
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert len(runs) - before == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_has_its_own_sinks(dtype: torch.dtype, runs: list[kept_launches.ForwardLaunches]) -> None:
    mask, k = masks.causal("bottom_right"), torch.randn(1, 600, 2, 16)
    for n in range(3):
        q, sinks = torch.randn(1, 1, 4, 16), torch.randn(4).to(dtype) + n
        out, expected = (
            undivided.attention(q, k, k, layout="bshd", mask=mask, sinks=sinks, backend=name)
            for name in ("triton", "reference")
        )
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert len(runs) == 2
    assert all(launch.merge is not None for found in runs for launch in found.launches)  # which adds the sinks


def test_a_replay_without_its_launches_keeps_them_again(runs: list[kept_launches.ForwardLaunches]) -> None:
    cache = undivided.PagedKVCache(8, 16, 2, 16, batch=2, dtype=torch.float32)
    new, q = torch.randn(2, 20, 2, 16), torch.randn(2, 1, 4, 16)
    cache.append(new, new)
    mask = masks.causal()
    first = cache.attend(q, mask, backend="triton")
    moved = torch.randn(q.numel() + 1)[1:].view(q.shape).copy_(q)  # other alignment: other launches
    for n, query in enumerate((moved, q, moved), 1):
        assert torch.equal(cache.attend(query, mask, backend="triton"), first)
        assert len(runs) == n - 1


def test_kept_launches_are_bounded_and_keep_placeholders_alone(
    runs: list[kept_launches.ForwardLaunches], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_launches, "MAX_KEPT", 3)
    q, k, mask = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16), masks.causal()
    for n in range(1, 9):
        decode(q, k, mask=mask, scale=n / 8)
    call, _ = normalise(Request.from_keywords(q=q, k=k, v=k, layout="bshd", mask=mask))
    kept = kept_launches._kept(call)
    assert kept is not None
    assert 0 < len(kept) <= 3
    for found in kept.values():
        assert isinstance(found, kept_launches.ForwardLaunches)
        values = [value for launch in found.launches for value in launch.kept.launch.arguments]
        assert all(value.numel() == 1 for value in values if isinstance(value, torch.Tensor))


def differentiable_cases() -> dict[str, Case]:
    """The cases of `kinds_of_calls` that have gradients."""
    cases = {name: (case, inputs.build(case, case.dtypes[0])) for name, case in kinds_of_calls().items()}
    return {name: case for name, (case, built) in cases.items() if built.arguments["q"].requires_grad}


def scaled(given: Tensors, factor: float) -> Tensors:
    """Other memory, other values, the same strides."""
    copies = Tensors._make(None if t is None else copy.deepcopy(t.detach()) for t in given)
    for tensor in copies:
        if tensor is not None:
            tensor *= factor
    return copies


@pytest.mark.parametrize("name", differentiable_cases())
def test_a_repeated_backward_has_the_bits_of_a_first_one(
    name: str, backwards: list[kept_launches.BackwardLaunches]
) -> None:
    case = CASES[name]
    dtype = next(dtype for dtype in case.dtypes if dtype != torch.float64)
    call, given = normalise(Request.from_keywords(**inputs.build(case, dtype).arguments))

    def gradients_of(given: Tensors) -> list[torch.Tensor | None]:
        with torch.no_grad():
            result = triton.BACKEND.forward(call, given)
            return triton.BACKEND.backward(call, given, result, result.out.cos(), None)

    gradients_of(given)
    assert not backwards
    second, home = scaled(given, -1.5), kept_launches._kept(call)
    found = gradients_of(second)
    serves = not call.mask.parts or call.normal_form(given.q).exact
    assert bool(backwards) == (home is not None and serves)
    if home:
        home.clear()
    for actual, expected in zip(found, gradients_of(second), strict=True):
        assert (actual is None) == (expected is None)
        if actual is not None and expected is not None:
            assert torch.equal(actual, expected)
            assert actual.stride() == expected.stride()


def causal_gradients(
    q: torch.Tensor, k: torch.Tensor, grad_out: torch.Tensor, backend: str, mask: masks.Mask, **options: Any
) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (q, k)]
    out = undivided.attention(leaves[0], leaves[1], leaves[1], layout="bshd", mask=mask, backend=backend, **options)
    return torch.autograd.grad(out, leaves, grad_out)


@pytest.mark.parametrize("change", ["strides", "no last axis", "alignment", "values"])
def test_a_backward_reads_its_own_gradient(change: str, backwards: list[kept_launches.BackwardLaunches]) -> None:
    q, k, mask = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16), masks.causal()
    dense = torch.randn(1, 40, 4, 16)
    for _ in range(2):
        causal_gradients(q, k, dense, "triton", mask)
    assert len(backwards) == 1
    other = {
        "strides": torch.randn(1, 4, 40, 16).transpose(1, 2),
        "no last axis": torch.randn(1, 40, 4, 1).expand(-1, -1, -1, 16),
        "alignment": torch.randn(dense.numel() + 1)[1:].view(dense.shape),
        "values": torch.randn_like(dense),
    }[change]
    for _ in range(2):
        found = causal_gradients(q, k, other, "triton", mask)
        for actual, expected in zip(found, causal_gradients(q, k, other, "reference", mask), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert len(backwards) == {"strides": 2, "no last axis": 1, "alignment": 2, "values": 3}[change]


def test_other_gradients_have_other_launches(backwards: list[kept_launches.BackwardLaunches]) -> None:
    """Which of q, k and v need one decides what is launched."""
    q, k, mask = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16), masks.causal()
    wanted = [(True, True), (True, False), (False, True)]
    for round in range(2):
        for needs in wanted:
            leaves = [t.detach().requires_grad_(need) for t, need in zip((q, k), needs, strict=True)]
            grads = []
            for backend in ("triton", "reference"):
                out = undivided.attention(leaves[0], leaves[1], k, layout="bshd", mask=mask, backend=backend)
                grads.append(torch.autograd.grad(out, [t for t in leaves if t.requires_grad], torch.ones_like(out) * 2))
            for actual, expected in zip(*grads, strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        assert len(backwards) == 3 * round


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_has_the_gradient_of_its_own_sinks(
    dtype: torch.dtype, backwards: list[kept_launches.BackwardLaunches]
) -> None:
    mask = masks.causal()
    for n in range(3):
        leaves = [torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16), (torch.randn(4) + n).to(dtype)]
        q, k, sinks = (leaf.requires_grad_() for leaf in leaves)
        grads = []
        for backend in ("triton", "reference"):
            out = undivided.attention(q, k, k, layout="bshd", mask=mask, sinks=sinks, backend=backend)
            grads.append(torch.autograd.grad(out.square().sum(), (q, k, sinks)))
        for actual, expected in zip(*grads, strict=True):
            rtol = 1e-2 if actual.dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-4)
    assert len(backwards) == 2


def test_the_gradient_of_an_lse_keeps_no_launches(backwards: list[kept_launches.BackwardLaunches]) -> None:
    q = torch.randn(1, 40, 2, 16, requires_grad=True)
    for _ in range(2):
        out, lse = undivided.attention(q, q, q, layout="bshd", backend="triton", return_lse=True)
        (out.sum() + lse.sum()).backward()
    assert not backwards


def test_tensor_descriptors_of_a_backward_are_those_of_its_call(
    backwards: list[kept_launches.BackwardLaunches],
) -> None:
    tile, mask = config.INTERPRETED._replace(descriptors=True), masks.causal()
    with config.trial("rows", tile), config.trial("keys", tile):
        for _ in range(3):
            q, k, grad_out = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16), torch.randn(1, 40, 4, 16)
            found = causal_gradients(q, k, grad_out, "triton", mask)
            for actual, expected in zip(found, causal_gradients(q, k, grad_out, "reference", mask), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert len(backwards) == 2
    described = [one for found in backwards for kept in found.launches for one in kept.descriptors.values()]
    assert len(described) == 2 * 4
    assert all(one.base is None for one in described)


def test_a_backward_keeps_no_memory_of_a_call(backwards: list[kept_launches.BackwardLaunches]) -> None:
    q, k, mask = torch.randn(1, 40, 4, 16), torch.randn(1, 40, 2, 16), masks.causal()
    for _ in range(2):
        causal_gradients(q, k, torch.ones_like(q), "triton", mask)
    (found,) = backwards
    values = [value for one in found.launches for value in one.launch.arguments]
    assert all(value.numel() == 1 for value in values if isinstance(value, torch.Tensor))
    assert all({*one.tensors} <= {"tiles", "ranges", "columns"} for one in found.launches)
