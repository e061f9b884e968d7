"""Selection: which backend runs what on which machine, and why not the others.

`GOLDEN` is the one table that a new backend changes. Machines are described, tensors are on the meta device: nothing
runs.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from selection_problems import MACHINES, PROBLEMS, TORCH

import undivided
from undivided import Machine, NoBackendError, masks
from undivided.backends import all_backends

# One row per problem, one column per machine; R reference, F torch_flash, E torch_efficient, T torch_cudnn,
# A flash_attn, C cudnn, X flex, N native, G triton (ours on a GPU). A new backend changes this table, on purpose;
# so does a measurement: of these machines `cpu` (level avx512), `amx` and `h100` were measured (benchmarks/).
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
plain                   N    N    R   F          A     T     T     G
plain-fp16              N    N    E   F          A     T     T     G
plain-fp32              N    N    E   E          E     E     E     G
plain-fp64              F    F    R   R          R     R     R     R
train-causal            N    N    R   F          A     T     T     G
train-causal-fp32       N    N    E   E          E     E     E     G
short-fp32              N    N    E   E          E     E     E     G
train-short-fp32        F    F    E   E          E     E     E     G
train-4-tokens          N    N    R   F          A     T     T     G
train-1-token           F    F    R   F          A     A     A     G
train-gqa               N    N    R   F          A     T     T     G
decode                  N    N    R   F          A     F     C     G
decode-lengths          N    N    R   G          A     A     G     G
decode-pages-16         N    N    R   G          G     G     G     G
decode-pages-256        N    N    R   G          A     A     G     G
decode-int8             N    N    R   G          G     G     G     G
decode-pages-fp8        N    N    R   G          G     G     G     G
prefill-top-left        N    N    R   E          T     T     T     G
prefill-bottom-right    N    N    R   F          A     C     C     G
train-window            N    N    R   F          A     C     C     G
two-sided-window        N    N    R   F          A     C     C     G
window-with-globals     N    N    R   G          G     G     G     G
prefix-lm               N    N    R   G          G     G     G     G
train-packed            N    N    R   F          A     G     C     G
train-packed-slots      N    N    R   G          G     G     C     G
train-padded            N    N    R   G          C     G     C     G
left-padded             N    N    R   G          G     G     G     G
dense-mask              N    N    R   G          G     G     G     G
predicate               N    N    R   G          G     G     G     G
chunks                  N    N    R   G          G     G     G     G
bias                    N    N    R   E          C     C     C     G
train-bias-fp32         N    N    E   E          E     E     E     G
alibi                   N    N    R   G          A     A     G     G
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
    hint = f"HINT: an explicit backend={backend!r} never falls back; leave it out to let selection choose"
    assert str(decision).endswith(hint)
    message = str(caught.value)
    assert message.endswith(f"\n  could run: reference\n  {hint}")
    assert "not requested" not in message, "the reasons of the others are in the decision"
    assert all(reason in message for reason in decision.verdicts[0].reasons)
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
    rank = "default rank: no measurement near this problem on neon"
    assert f"  native           chosen (flash); {rank}" in chosen
    assert chosen[-1] == f"  reference        can run, ranked after native; {rank}"
    measured = str(undivided.explain(**PROBLEMS["plain"], machine=MACHINES["cpu"]))
    assert "\n  native           chosen (flash); measured rank: est. " in measured


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


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_a_decision_choose_the_same_backend(copied: Callable[[Any], Any]) -> None:
    q = torch.zeros(1, 8, 2, 16)
    decision = undivided.explain(q, q, q, layout="bshd")
    other = copied(decision)
    assert other.chosen is decision.chosen
    assert str(other) == str(decision)
