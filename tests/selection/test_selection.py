"""Selection: which backend runs what on which machine, and why not the others.

`GOLDEN` is the one table that a new backend changes. Machines are described, tensors are on the meta device: nothing
runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from calls import problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

import undivided
from undivided import InputError, Machine, NoBackendError, masks
from undivided.backends import all_backends, reference
from undivided.request.problem import Problem
from undivided.selection import decision as selection
from undivided.selection.policy import Policy, policy

EVERYTHING = {"triton": "3.5.0", "flash_attn": "2.8.3", "cudnn_frontend": "1.15.0"}
TORCH = "2.13.0"


def gpu(name: str, capability: tuple[int, int], cudnn: str | None, **packages: str) -> Machine:
    return Machine("cuda", name, capability, cudnn, packages, TORCH)


MACHINES = {
    "cpu": Machine("cpu", torch=TORCH, isa="AVX512"),
    "amx": Machine("cpu", torch=TORCH, isa="amx"),
    "t4": gpu("T4", (7, 5), "9.13.0", **EVERYTHING),
    "a100-bare": gpu("A100", (8, 0), "8.9.7", triton="3.5.0"),
    "a100": gpu("A100", (8, 0), "9.13.0", **EVERYTHING),
    "h100": gpu("H100", (9, 0), "9.16.0", flash_attn_3="3.0.0", **EVERYTHING),
    "b200": gpu("B200", (10, 0), "9.16.0", flash_attn_4="4.0.0", triton="3.5.0", cudnn_frontend="1.15.0"),
    "amd": Machine("cuda", "MI300X", None, None, {"triton": "3.5.0"}, TORCH, hip=True),
}

BF16, FP32 = torch.bfloat16, torch.float32


def meta(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def case(
    mask: masks.Mask | None = None,
    *,
    q_len: int = 1024,
    kv_len: int = 1024,
    heads: int = 16,
    kv_heads: int = 16,
    dim: int = 128,
    v_dim: int | None = None,
    dtype: torch.dtype = BF16,
    grad: bool = False,
    layout: str = "bshd",
    page_size: int | None = None,
    quantized: torch.dtype | None = None,
    **features: Any,
) -> dict[str, Any]:
    """Arguments of `explain`."""
    lead = () if layout == "thd" else (2,)
    kv = (64, page_size, kv_heads) if page_size else (*lead, kv_len, kv_heads)
    arguments = {
        "q": meta(*lead, q_len, heads, dim, dtype=dtype, grad=grad),
        "k": meta(*kv, dim, dtype=quantized or dtype, grad=grad),
        "v": meta(*kv, v_dim or dim, dtype=quantized or dtype, grad=grad),
        "layout": layout,
        "mask": mask,
        **features,
    }
    if quantized is not None:
        arguments |= {name: meta(*kv, dtype=FP32) for name in ("k_scale", "v_scale")}
    return arguments | ({"pages": torch.empty(2, 8, dtype=torch.int32, device="meta")} if page_size else {})


BR = "bottom_right"
PACKED = masks.documents([0, 300, 1024])
PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": case(),
    "plain-fp16": case(dtype=torch.float16),
    "plain-fp32": case(dtype=FP32),
    "plain-fp64": case(dtype=torch.float64),
    "train-causal": case(masks.causal(), grad=True),
    "train-causal-fp32": case(masks.causal(), grad=True, dtype=FP32),
    "short-fp32": case(q_len=16, kv_len=16, heads=4, kv_heads=4, dim=64, dtype=FP32),
    "train-short-fp32": case(q_len=16, kv_len=16, heads=4, kv_heads=4, dim=64, dtype=FP32, grad=True),
    "train-4-tokens": case(q_len=4, kv_len=4, grad=True),
    "train-1-token": case(q_len=1, kv_len=1, heads=4, kv_heads=4, grad=True),
    "train-gqa": case(masks.causal(), grad=True, kv_heads=4),
    "decode": case(masks.causal(BR), q_len=1, kv_len=4096, kv_heads=4),
    "decode-lengths": case(masks.causal(BR) & masks.lengths([9, 99]), q_len=1, kv_len=4096, kv_heads=4),
    "decode-pages-16": case(masks.causal(BR) & masks.lengths([9, 99]), q_len=1, kv_heads=4, page_size=16),
    "decode-pages-256": case(masks.causal(BR) & masks.lengths([9, 99]), q_len=1, kv_heads=4, page_size=256),
    "decode-int8": case(masks.causal(BR), q_len=1, kv_len=4096, kv_heads=4, quantized=torch.int8),
    "decode-pages-fp8": case(masks.lengths([9, 99]), q_len=1, kv_heads=4, page_size=16, quantized=torch.float8_e4m3fn),
    "prefill-top-left": case(masks.causal("top_left"), q_len=512),
    "prefill-bottom-right": case(masks.causal(BR), q_len=512),
    "train-window": case(masks.window(128, 0), grad=True),
    "two-sided-window": case(masks.window(128, 64)),
    "window-with-globals": case(masks.window(128, 0) | masks.prefix(4)),
    "prefix-lm": case(masks.causal() | masks.prefix(4)),
    "train-packed": case(PACKED & masks.causal(), grad=True, layout="thd"),
    "train-packed-slots": case(
        masks.documents([0, 300, 1000], padded_q=[0, 320, 1024]) & masks.causal(), grad=True, layout="thd"
    ),
    "train-padded": case(masks.causal() & masks.lengths([9, 99], [9, 99]), grad=True),
    "left-padded": case(masks.causal() & masks.lengths([9, 99], [9, 99], [3, 4], [3, 4])),
    "dense-mask": case(masks.dense(torch.ones(1024, 1024, dtype=torch.bool))),
    "predicate": case(masks.predicate(lambda b, h, i, j: i >= j)),
    "chunks": case(masks.chunks(128)),
    "bias": case(bias=meta(1, 16, 1024, 1024)),
    "train-bias-fp32": case(bias=meta(1, 16, 1024, 1024, dtype=FP32, grad=True), grad=True, dtype=FP32),
    "alibi": case(masks.causal(), alibi_slopes=meta(16, dtype=FP32)),
    "train-softcap": case(masks.causal(), grad=True, softcap=50.0),
    "train-sinks": case(masks.causal(), grad=True, sinks=meta(16, grad=True)),
    "train-dropout": case(masks.causal(), grad=True, dropout_p=0.1),
    "train-lse": case(masks.causal(), grad=True, return_lse=True),
    "train-mla": case(masks.causal(), grad=True, dim=192, v_dim=128),
    "train-head-320": case(masks.causal(), grad=True, dim=320),
    "head-100": case(dim=100),
    "no-keys": case(kv_len=0),
}

# One row per problem, one column per machine; R reference, F torch_flash, E torch_efficient, T torch_cudnn,
# A flash_attn, C cudnn, X flex, N native, G triton (ours on a GPU). A new backend changes this table, on purpose;
# so does a measurement: of these machines `cpu` (level avx512) and `amx` were measured (benchmarks/*-ranks-*.json).
NAMES = {
    "R": "reference",
    "F": "torch_flash",
    "E": "torch_efficient",
    "T": "torch_cudnn",
    "A": "flash_attn",
    "C": "cudnn",
    "X": "flex",
    "N": "native",
    "G": "triton",
}
GOLDEN = """
                        cpu  amx  t4  a100-bare  a100  h100  b200  amd
plain                   N    N    R   F          A     C     C     G
plain-fp16              N    N    E   F          A     C     C     G
plain-fp32              N    N    E   E          E     E     E     G
plain-fp64              F    F    R   R          R     R     R     R
train-causal            N    N    R   F          A     C     C     G
train-causal-fp32       N    N    E   E          E     E     E     G
short-fp32              N    N    E   E          E     E     E     G
train-short-fp32        F    F    E   E          E     E     E     G
train-4-tokens          N    N    R   F          A     C     C     G
train-1-token           F    F    R   F          A     A     A     G
train-gqa               N    N    R   F          A     C     C     G
decode                  N    N    R   F          A     C     C     G
decode-lengths          N    N    R   G          A     A     G     G
decode-pages-16         N    N    R   G          G     G     G     G
decode-pages-256        N    N    R   G          A     A     G     G
decode-int8             N    N    R   G          G     G     G     G
decode-pages-fp8        N    N    R   G          G     G     G     G
prefill-top-left        N    N    R   E          T     C     C     G
prefill-bottom-right    N    N    R   F          A     C     C     G
train-window            N    N    R   F          A     C     C     G
two-sided-window        N    N    R   F          A     C     C     G
window-with-globals     N    N    R   G          G     G     G     G
prefix-lm               N    N    R   G          G     G     G     G
train-packed            N    N    R   F          A     C     C     G
train-packed-slots      N    N    R   G          G     C     C     G
train-padded            N    N    R   G          C     C     C     G
left-padded             N    N    R   G          G     G     G     G
dense-mask              N    N    R   G          G     G     G     G
predicate               N    N    R   G          G     G     G     G
chunks                  N    N    R   G          G     G     G     G
bias                    N    N    R   E          C     C     C     G
train-bias-fp32         N    N    E   E          E     E     E     G
alibi                   N    N    R   F          A     A     F     G
train-softcap           N    N    R   G          A     A     A     G
train-sinks             N    N    R   G          G     G     A     G
train-dropout           N    N    R   G          G     G     G     G
train-lse               N    N    R   G          G     G     A     G
train-mla               N    N    R   E          E     C     C     G
train-head-320          N    N    R   E          E     E     E     G
head-100                N    N    R   G          G     G     G     G
no-keys                 N    N    R   R          R     R     R     R
"""


def golden() -> Iterator[tuple[str, str, str]]:
    header, *rows = [line.split() for line in GOLDEN.strip().splitlines()]
    assert header == list(MACHINES)
    assert [row[0] for row in rows] == list(PROBLEMS)
    for name, *letters in rows:
        for machine, letter in zip(header, letters, strict=True):
            yield name, machine, NAMES[letter]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_golden_table(machine: str) -> None:
    wrong = []
    for name, on, want in golden():
        if on == machine:
            got = undivided.explain(**PROBLEMS[name], machine=MACHINES[machine])
            if got.backend.name != want:
                wrong.append(f"{name}: {got.backend.name}, not {want}")
    assert wrong == []


def test_the_golden_table_names_every_backend() -> None:
    assert set(NAMES.values()) == {backend.name for backend in all_backends()}


# An explicit request runs or raises


def test_an_explicit_backend_runs_although_another_would_be_chosen() -> None:
    q = torch.randn(1, 8, 2, 16)
    assert undivided.explain(q, q, q, layout="bshd").backend.name != "reference"
    assert undivided.explain(q, q, q, layout="bshd", backend="reference").backend.name == "reference"
    assert undivided.explain(q, q, q, layout="bshd", backend="math").backend.name == "reference"
    assert undivided.explain(q, q, q, layout="bshd", backend="unfused").backend.name == "reference"


@pytest.mark.parametrize("backend", ["torch_flash", "flash", "torch_efficient", "fused", "flex"])
def test_an_explicit_request_never_falls_back(backend: str) -> None:
    q = torch.randn(1, 8, 2, 16, dtype=torch.float64)  # native takes no fp64, torch_flash no dropout
    with pytest.raises(NoBackendError) as caught:
        undivided.attention(q, q, q, layout="bshd", dropout_p=0.1, backend=backend)
    decision = caught.value.decision
    assert decision.chosen is None
    assert str(caught.value) == str(decision)
    assert str(decision).endswith(
        f"HINT: an explicit backend={backend!r} never falls back; leave it out to let selection choose"
    )
    assert decision.reasons["reference"] == (f"not requested: backend={backend!r}",)


def test_a_failed_request_leaves_nothing_behind() -> None:
    q = torch.randn(1, 8, 2, 16)
    before = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(NoBackendError):
            undivided.attention(q, q, q, layout="bshd", backend="torch_efficient")
    assert torch.equal(torch.get_rng_state(), before)
    assert undivided.attention(q, q, q, layout="bshd").isfinite().all()


def test_a_backend_for_requests_only_runs_if_named_but_not_by_family_or_default() -> None:
    arguments = PROBLEMS["predicate"]
    machine = MACHINES["t4"]
    by_default = undivided.explain(**arguments, machine=machine)
    assert by_default.backend.name == "reference"
    assert by_default.reasons["flex"] == ("compiles for seconds per shape; request it with backend='flex'",)
    assert undivided.explain(**arguments, machine=machine, backend="flex").backend.name == "flex"
    with undivided.use_backends("flex"):
        assert undivided.explain(**arguments, machine=machine).backend.name == "flex"


# Reasons


REASONS = {
    "head-size": ("train-head-320", "a100", "flash_attn", "flash-attn 2: head_dim=320 (max 256)"),
    "head-multiple": ("head-100", "a100", "torch_flash", "head_dim=100 (must be a multiple of 8)"),
    "dtype": ("plain-fp32", "a100", "torch_flash", "dtype=float32 (supports bfloat16, float16)"),
    "device": ("plain", "cpu", "torch_efficient", "device=cpu (runs on cuda)"),
    "capability": ("plain-fp16", "t4", "torch_flash", "compute capability 7.5 (min 8.0)"),
    "package": ("plain", "a100-bare", "flash_attn", "flash-attn 2: flash_attn 2.7.3 or later is not installed"),
    "alignment": ("prefill-top-left", "a100", "torch_flash", "top-left alignment, and the two differ here"),
    "mask": ("dense-mask", "a100", "torch_flash", "no support for a dense boolean mask"),
    "feature": ("train-softcap", "cpu", "torch_flash", "no support for softcap"),
    "feature-with-note": (
        "train-dropout",
        "cpu",
        "torch_flash",
        "no support for dropout (PyTorch's CPU kernel has none)",
    ),
    "rank": ("plain", "cpu", "reference", "can run, ranked after native"),
}


@pytest.mark.parametrize("name", REASONS)
def test_every_refusal_states_value_and_limit(name: str) -> None:
    problem, machine, backend, reason = REASONS[name]
    assert reason in undivided.explain(**PROBLEMS[problem], machine=MACHINES[machine]).reasons[backend]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_backend_but_the_chosen_one_has_reasons(name: str, machine: str) -> None:
    decision = undivided.explain(**PROBLEMS[name], machine=MACHINES[machine])
    assert set(decision.reasons) == {backend.name for backend in all_backends()}
    for backend, reasons in decision.reasons.items():
        assert bool(reasons) == (backend != decision.backend.name), (backend, reasons)
        assert all(reason and reason == reason.strip() for reason in reasons)


def test_a_decision_prints_as_a_table() -> None:
    decision = undivided.explain(**PROBLEMS["train-softcap"], machine=MACHINES["cpu"], backend="torch_flash")
    lines = str(decision).splitlines()
    assert lines[:3] == [
        "no backend can run this problem",
        "  problem: q 2x1024x16x128 (BxSxHxD), kv 2x1024x16x128; bfloat16 bshd on cpu; mask causal; "
        "needs backward, softcap",
        "  machine: cpu, AVX512, torch 2.13.0",
    ]
    assert lines[3] == "  torch_flash      no support for softcap"  # the requested backend first
    assert "  reference        not requested: backend='torch_flash'" in lines
    without_a_table = Machine("cpu", torch=TORCH, isa="neon")
    chosen = str(undivided.explain(**PROBLEMS["plain"], machine=without_a_table)).splitlines()
    assert chosen[0] == "native runs"
    assert "  native           chosen (flash); default rank: not measured on neon" in chosen
    assert chosen[-1] == "  reference        can run, ranked after native; default rank: not measured on neon"
    measured = str(undivided.explain(**PROBLEMS["plain"], machine=MACHINES["cpu"]))
    assert "\n  native           chosen (flash); measured rank: est. " in measured


# Meta tensors and described machines


def test_explain_reads_meta_tensors_and_runs_nothing() -> None:
    q = torch.empty(64, 2**20, 32, 128, dtype=torch.bfloat16, device="meta")
    decision = undivided.explain(q, q, q, layout="bshd", mask=masks.window(4096, 0))
    assert decision.problem.q_len == 2**20
    assert decision.chosen is not None


def test_a_described_machine_replaces_the_tensors_device() -> None:
    q = torch.randn(1, 64, 2, 64, dtype=torch.bfloat16)
    decision = undivided.explain(q, q, q, layout="bshd", machine=MACHINES["a100"])
    assert decision.problem.device == "cuda"
    assert decision.backend.name == "flash_attn"


def test_deterministic_is_part_of_the_problem_that_backends_see() -> None:
    assert undivided.explain(**PROBLEMS["plain"], machine=MACHINES["cpu"], deterministic=True).problem.deterministic
    assert not undivided.explain(
        **PROBLEMS["plain"], machine=MACHINES["cpu"], deterministic=False
    ).problem.deterministic


# Caching


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems that were really decided, with the caches emptied first."""
    for cache in (selection._decisions, selection._by_class):
        monkeypatch.setattr(selection, {id(selection._decisions): "_decisions"}.get(id(cache), "_by_class"), {})
    seen: list[Problem] = []
    decide = selection.decide

    def counting(problem: Problem, machine: Machine, policy: Policy) -> selection.Decision:
        seen.append(problem)
        return decide(problem, machine, policy)

    monkeypatch.setattr(selection, "decide", counting)
    return seen


def test_a_repeated_problem_is_decided_once(decided: list[Problem]) -> None:
    q = torch.randn(1, 40, 2, 16)
    for _ in range(3):
        undivided.attention(q, q, q, layout="bshd")
    assert len(decided) == 1
    undivided.attention(q, q, q, layout="bshd", softcap=1.0)
    assert len(decided) == 2


def test_decoding_shares_decisions_between_lengths(decided: list[Problem]) -> None:
    q, kv = torch.randn(1, 1, 2, 8), torch.randn(1, 1024, 2, 8)
    for length in range(513, 1025):
        out = undivided.attention(q, kv[:, :length], kv[:, :length], layout="bshd", mask=masks.causal("bottom_right"))
        assert out.shape == q.shape
    assert len(decided) == 7  # one for every divisibility by 1, 2, ..., 64
    select = selection.select(problem_of(q, kv[:, :700], kv[:, :700], layout="bshd"), Machine.this(), policy())
    assert select.problem.kv_len == 700, "a shared decision still prints the problem it is for"


def test_the_identity_of_a_predicate_does_not_affect_the_decision(decided: list[Problem]) -> None:
    q = torch.randn(1, 8, 2, 8)
    for shift in range(5):
        mask = masks.predicate(lambda b, h, i, j, shift=shift: i + shift >= j)  # type: ignore[misc]
        undivided.attention(q, q, q, layout="bshd", mask=mask)
    assert len(decided) == 1


def test_values_of_lengths_do_not_affect_the_decision(decided: list[Problem]) -> None:
    q = torch.randn(2, 8, 2, 8)
    for n in range(1, 9):
        undivided.attention(q, q, q, layout="bshd", mask=masks.lengths([n, 1]))
    assert len(decided) == 1


def test_gradients_affect_the_decision(decided: list[Problem]) -> None:
    q = torch.randn(1, 8, 2, 8)
    undivided.attention(q, q, q, layout="bshd")
    undivided.attention(q.requires_grad_(), q, q, layout="bshd")
    assert ["backward" in problem.features for problem in decided] == [False, True]


def test_policies_and_machines_affect_the_decision(decided: list[Problem]) -> None:
    problem = problem_of(*(torch.randn(1, 8, 2, 8) for _ in range(3)), layout="bshd")
    anything = Policy()
    first = selection.select(problem, MACHINES["cpu"], anything)
    assert selection.select(problem, MACHINES["cpu"], anything) is first
    assert selection.select(problem, MACHINES["cpu"], Policy()).backend is first.backend
    assert selection.select(problem, MACHINES["cpu"], Policy(forced="reference")).backend.name == "reference"
    twin = Machine("cpu", torch=TORCH, isa="AVX512")
    assert selection.select(problem, twin, Policy()).machine is twin
    assert len(decided) == 3


def test_the_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_MAX_DECISIONS", 5)
    monkeypatch.setattr(selection, "_decisions", {})
    for length in range(1, 20):
        q = torch.randn(1, length, 1, 4)
        undivided.attention(q, q, q, layout="bshd")
        assert len(selection._decisions) <= 5


def test_reasons_are_built_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original = type(reference.BACKEND).reasons

    def reasons(self: Any, problem: Problem, machine: Machine) -> list[str]:
        asked.append(self.name)
        return original(self, problem, machine)

    monkeypatch.setattr(type(reference.BACKEND), "reasons", reasons)
    decision = undivided.explain(**PROBLEMS["plain"], machine=MACHINES["cpu"])
    assert asked == []
    assert decision.reasons
    assert asked == ["reference"]


# What decisions share: backends look at nothing else


STRUCTURES = [arguments["mask"].structure for arguments in PROBLEMS.values() if arguments["mask"] is not None]


@st.composite
def lengths_of_one_class(draw: st.DrawFn) -> tuple[int, int]:
    """Two lengths that selection must not distinguish."""
    if draw(st.booleans()):
        length = draw(st.integers(0, 16))
        return length, length
    bits, step = draw(st.integers(5, 34)), 2 ** draw(st.integers(0, 6))
    low, high = 2 ** (bits - 1), 2**bits  # in (low, high]
    assert low % step == 0 or step > low
    numbers = st.integers(low // step, high // step).map(lambda n: n * step)
    fitting = numbers.filter(lambda x: low < x <= high and (step == 64 or x // step % 2 == 1))
    first = 64 * max(1, high // 64) if step == 64 and high < 64 else draw(fitting)
    return (first, first) if step == 64 and high < 64 else (first, draw(fitting))


@st.composite
def problems_of_one_key(draw: st.DrawFn) -> tuple[Problem, Problem]:
    q, kv, count, most_q, most_kv = (draw(lengths_of_one_class()) for _ in range(5))
    packed = draw(st.booleans())
    heads, kv_heads = draw(st.sampled_from([(8, 8), (8, 2)]))
    dims = draw(st.tuples(*[st.sampled_from([8, 40, 64, 96, 100, 128, 192, 200, 256, 320, 512])] * 2))
    features = draw(st.frozensets(st.sampled_from(sorted(reference.BACKEND.limits.features))))
    base = Problem(
        device=draw(st.sampled_from(["cpu", "cuda"])),
        dtype=draw(st.sampled_from([BF16, torch.float16, FP32])),
        layout="thd" if packed else "bshd",
        batch=1 if packed else draw(st.sampled_from([0, 1, 7])),
        heads=heads,
        kv_heads=kv_heads,
        q_len=q[0],
        kv_len=kv[0],
        qk_dim=dims[0],
        v_dim=dims[1],
        mask=draw(st.sampled_from([masks.FULL.structure, *STRUCTURES])),
        align=draw(st.sampled_from([None, "both", "top_left", "bottom_right"])),
        features=features,
        bias=draw(st.sampled_from(["bhqk", "1h1k"])) if "bias" in features else None,
        documents=(count[0], most_q[0], most_kv[0]) if packed else None,
        page_size=draw(st.sampled_from([16, 256])) if "paged" in features else None,
        deterministic=draw(st.booleans()),
    )
    documents = (count[1], most_q[1], most_kv[1]) if packed else None
    return base, base._replace(q_len=q[1], kv_len=kv[1], documents=documents)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(problems_of_one_key(), st.sampled_from(sorted(MACHINES)))
def test_problems_with_one_selection_key_get_the_same_reasons_from_every_backend(
    pair: tuple[Problem, Problem], name: str
) -> None:
    one, other = pair
    if selection.selection_key(one) != selection.selection_key(other):
        return  # the two lengths compare differently
    machine = MACHINES[name]
    for backend in all_backends():
        reasons = [backend.reasons(problem, machine) for problem in pair]
        assert bool(reasons[0]) == bool(reasons[1]), (backend, one, other, reasons)
        assert backend.rank(one, machine) == backend.rank(other, machine)
        assert backend.only_when_asked(one, machine) == backend.only_when_asked(other, machine)


@pytest.mark.parametrize(("one", "other"), [(100, 101), (64, 65), (1023, 1025), (3, 4), (0, 1), (128, 96)])
def test_lengths_that_a_backend_may_distinguish_have_different_keys(one: int, other: int) -> None:
    problem = problem_of(*(torch.empty(1, 1, 1, 8) for _ in range(3)), layout="bshd")
    keys = {selection.selection_key(problem._replace(kv_len=length)) for length in (one, other)}
    assert len(keys) == 2


def test_whether_queries_outnumber_keys_is_in_the_key() -> None:
    problem = problem_of(*(torch.empty(1, 1, 1, 8) for _ in range(3)), layout="bshd")
    sizes = [(129, 131), (131, 129), (131, 131)]
    keys = {selection.selection_key(problem._replace(q_len=q, kv_len=kv)) for q, kv in sizes}
    assert len(keys) == 3


# Describing machines


def test_machines_are_described_by_name_and_compare_by_value() -> None:
    assert Machine.named("A100", cudnn="9.1.0") == Machine("cuda", "A100", (8, 0), "9.1.0")
    assert Machine.named("cpu").device == "cpu"
    assert hash(Machine.named("h100")) == hash(Machine.named("H100"))


def test_this_machine_is_probed_once() -> None:
    assert Machine.this() is Machine.this("cpu")
    assert Machine.this().probed
    assert Machine.this().torch == torch.__version__
    assert Machine.this().version("torch") == tuple(int(n) for n in torch.__version__.split("+")[0].split("."))


def test_an_unknown_machine_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"device must be cpu or one of v100, t4, a100.*got 'a1000'"):
        Machine.named("a1000")
