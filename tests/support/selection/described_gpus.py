"""Described GPUs and problems for the tests of selection, and the check of a row of their tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from calls import problem_of

from undivided import masks
from undivided.machine import Machine
from undivided.request.problem import Problem
from undivided.selection.decision import decide
from undivided.selection.policy import Policy

ALL = ("flash_attn", "torch_flash", "torch_efficient", "torch_cudnn", "cudnn", "flex")
PACKAGES = {"flash_attn": "2.8.3", "cudnn_frontend": "1.23.0", "triton": "3.4.0"}


def described(name: str, cudnn: str | None = None, packages: dict[str, str] | None = None) -> Machine:
    """A described machine with PyTorch 2.13, whatever version the tests run with."""
    return replace(Machine.named(name, cudnn, packages), torch="2.13.0")


A100_OLD = described("a100", "8.9.7", PACKAGES)
A100 = described("a100", "9.8.0", PACKAGES)
H100 = described("h100", "9.20.0", PACKAGES | {"flash_attn_3": "3.0.0"})
B200 = described("b200", "9.20.0", PACKAGES | {"flash_attn_4": "4.0.0"})
T4 = described("t4", "9.8.0", {"triton": "3.4.0"})
RTX4090 = described("rtx4090", "9.8.0", PACKAGES)
BARE_H100 = described("h100")

HALF, FULL = torch.bfloat16, torch.float32


def ask(
    shape: tuple[int, int, int, int], kv_heads: int = 0, kv_len: int = 0, v_dim: int = 0, dtype: torch.dtype = HALF,
    layout: str = "bshd", grad: bool = False, deterministic: bool = False, **more: Any,
) -> Problem:  # fmt: skip
    """The problem of q [batch, length, heads, head_dim] in `layout`, from meta tensors."""
    batch, q_len, heads, qk_dim = shape
    sizes = [(heads, q_len, qk_dim), *((kv_heads or heads, kv_len or q_len, d) for d in (qk_dim, v_dim or qk_dim))]
    axes = [{"b": batch, "s": s, "h": h, "d": d, "t": batch * s} for h, s, d in sizes]
    shapes = [[one[letter] for letter in layout] for one in axes]
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad) for shape in shapes)
    problem = problem_of(q, k, v, layout=layout, device="cuda", **more)
    return problem._replace(deterministic=deterministic)


def ask_pages(page: int, queries: int = 1, mask: masks.Mask = masks.FULL, dim: int = 128) -> Problem:
    """Two sequences against a paged cache of eight pages each."""
    q, pool = (
        torch.empty(2, queries, 16, dim, dtype=HALF, device="meta"),
        torch.empty(64, page, 16, dim, dtype=HALF, device="meta"),
    )
    pages = torch.empty(2, 8, dtype=torch.int32, device="meta")
    mask = mask & masks.lengths(torch.tensor([77, 99]))
    return problem_of(q, pool, pool, layout="bshd", mask=mask, pages=pages, device="cuda")


CU = torch.tensor([0, 1000, 4096], dtype=torch.int32)
DOCUMENTS = masks.documents(CU)
SQUARE = (2, 4096, 16, 128)


class Row(NamedTuple):
    """A machine, a problem, the chosen backend, and a part of every reason of each backend that cannot run."""

    id: str
    machine: Machine
    problem: Problem
    chosen: str
    refused: dict[str, list[str]]


def check_row(row: Row) -> None:
    """Assert that every backend gives the reasons of the row, and that the chosen one is chosen."""
    allowed = (*ALL, "reference")
    decision = decide(row.problem, row.machine, Policy(allowed=allowed, allowed_by="test"))
    for verdict in decision.verdicts:
        if verdict.backend.name in ALL:
            reasons = verdict.backend.reasons(row.problem, row.machine)
            expected = row.refused.get(verdict.backend.name, [])
            assert len(reasons) == len(expected), (verdict.backend.name, reasons)
            for piece in expected:
                assert any(piece in reason for reason in reasons), (verdict.backend.name, piece, reasons)
    ranked = decide(row.problem, row.machine, Policy(disabled=(("triton", "test"), ("native", "test"))))
    assert ranked.chosen is not None
    assert ranked.chosen.name == row.chosen
