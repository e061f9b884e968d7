"""``undivided doctor``: the machine, its backends, the environment variables, and a self-check."""

from __future__ import annotations

import dataclasses
import os
import platform
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.nn.functional import scaled_dot_product_attention

from undivided import masks
from undivided._version import __version__
from undivided.backends import native
from undivided.backends._table import backends as table_of_backends
from undivided.cli._terminal import console, mark, pairs, print_json, print_table, print_text, table
from undivided.functional import attention, explain
from undivided.kernels.cpu import _install
from undivided.machine import Machine, processor_name
from undivided.selection import measured
from undivided.selection.policy import current_policy
from undivided.verification.budget import FACTOR, relative_error

VARIABLES = {
    "UNDIVIDED_BACKENDS": "the only backends or families that may run, in this order",
    "UNDIVIDED_LOG": "info prints each new Decision on stderr, debug adds the reasons",
    "UNDIVIDED_DETERMINISTIC": "1 requires results that repeat bit for bit",
    "UNDIVIDED_BATCH_INVARIANT": "1 requires results that do not depend on the batch",
    "UNDIVIDED_ISA": "the instruction set of the native kernel",
    "UNDIVIDED_TUNED": "the file with tiles that `undivided tune` measured",
    "UNDIVIDED_RANKS": "the file with your own measurements, which order the backends",
    "UNDIVIDED_VLLM_LIBRARY": "vLLM's operator, for `undivided bench`",
    "NVTE_FLASH_ATTN": "0 switches the flash family off",
    "NVTE_FUSED_ATTN": "0 switches the fused family off",
    "NVTE_UNFUSED_ATTN": "0 switches the math family off",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0 is the same as UNDIVIDED_DETERMINISTIC=1",
    "NVTE_DEBUG": "1 logs at the level of NVTE_DEBUG_LEVEL",
    "NVTE_DEBUG_LEVEL": "1 is UNDIVIDED_LOG=info, 2 is debug",
}
"""The environment variables and their effects; `undivided.selection.policy` reads most of them."""

NEXT = {
    "undivided demo --quick": "attention over real documents, checked and timed",
    "undivided report": "one HTML file: this machine, verification, benchmarks, a mask explorer",
    "undivided init-example": "examples to copy and run",
}
"""The commands to try after this one."""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Show this machine, the backends that can run, how to install the others, and a self-check.

    Exit code 1 if the self-check fails, 2 if an environment variable is invalid.
    """
    current_policy()  # raises if a variable is invalid
    report = findings() | {"self_check": _self_check()}
    if as_json:
        print_json(report)
    else:
        _show(console(), report)
    if not report["self_check"]["ok"]:
        raise typer.Exit(1)


def findings() -> dict[str, Any]:
    """The machine, its backends and the environment variables."""
    return {
        "machine": _machine(),
        "backends": [dataclasses.asdict(row) for row in table_of_backends()],
        "ranks": _ranks(),
        "environment": _environment(),
    }


def _machine() -> dict[str, str]:
    threads, cores = _count(torch.get_num_threads(), "thread"), _count(os.cpu_count() or 1, "core")
    values = {
        "undivided": __version__,
        "installed from": _origin(),
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "PyTorch": torch.__version__,
        "CPU": f"{processor_name()}, {torch.backends.cpu.get_cpu_capability()}, {threads} of {cores}",
        "native kernel": native.status(),
    }
    for index in range(torch.cuda.device_count()):
        values[f"GPU {index}"] = str(Machine.this(f"cuda:{index}"))
    if not torch.cuda.is_available():
        values["GPU"] = "none that PyTorch can use"
    return values


def _ranks() -> dict[str, Any]:
    """Whether the backends were measured at the level of this process; a command if not. A GPU has its own table."""
    level = measured.architecture("cpu", Machine.this("cpu"))
    counts = measured.count_entries(level or "")
    path = str(measured.user_table_path())
    return {
        "level": level,
        **counts._asdict(),
        "file": path,
        "command": None if counts.users or counts.ours else "undivided ranks --measure",
    }


def _rank_words(ranks: dict[str, Any]) -> str:
    if ranks["users"]:
        also = f", then the package's with {ranks['ours']}" if ranks["ours"] else ""
        yours = _count(ranks["users"], "measured problem")
        return f"level {ranks['level']}: your table of {ranks['when']} with {yours}{also}; {ranks['file']}"
    if ranks["ours"]:
        return f"level {ranks['level']}: the package's table with {_count(ranks['ours'], 'measured problem')}"
    return (
        f"no table for level {ranks['level']}: backends are tried in the order of their default ranks. "
        f"`{ranks['command']}` measures them in under three minutes and writes {ranks['file']}"
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _origin() -> str:
    """The kind of installation, which decides whether there is a native kernel."""
    tags = ", ".join(_install.wheel_tags())
    if (_install.CHECKOUT / "cmake" / "CMakeLists.txt").is_file():
        return f"a checkout, {_install.CHECKOUT}"
    return f"the wheel {tags}{', pure Python without the native kernel' if _install.is_pure_wheel() else ''}"


def _environment() -> list[dict[str, str]]:
    """The variables with our prefixes that are set, including those that have no effect."""
    names = sorted(name for name in os.environ if name.startswith(("UNDIVIDED_", "NVTE_")))
    return [
        {
            "name": name,
            "value": os.environ[name],
            "meaning": VARIABLES.get(name, "unknown to undivided, ignored") + _missing_file(name),
        }
        for name in names
    ]


def _missing_file(name: str) -> str:
    """A note for a variable that names a file that does not exist."""
    names_file = name in ("UNDIVIDED_RANKS", "UNDIVIDED_TUNED", "UNDIVIDED_VLLM_LIBRARY") and os.environ[name]
    return "; this file does not exist" if names_file and not os.path.isfile(os.environ[name]) else ""


def _self_check() -> dict[str, Any]:
    """The error of two packed documents, compared with PyTorch's plain attention in fp64, one document at a time."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(10, heads, 64, generator=draw) for heads in (8, 2, 2))
    mask = masks.documents([0, 3, 10]) & masks.causal()

    def plain(dtype: torch.dtype) -> torch.Tensor:
        split = (x.to(dtype).transpose(0, 1).split([3, 7], dim=1) for x in (q, k, v))
        outs = [
            scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)
            for a, b, c in zip(*split, strict=True)
        ]
        return torch.cat(outs, dim=1).transpose(0, 1)

    decision = explain(q, k, v, layout="thd", mask=mask)
    truth = plain(torch.float64)
    error = relative_error(attention(q, k, v, layout="thd", mask=mask), truth)
    budget = FACTOR * relative_error(plain(torch.float32), truth) + torch.finfo(torch.float32).eps
    return {"backend": decision.backend.name, "error": error, "budget": budget, "ok": error <= budget}


def _show(screen: Console, findings: dict[str, Any]) -> None:
    _section(screen, "This machine", pairs(findings["machine"].items()))
    backends = table("backend", "family", "", "description, or why it cannot run")
    for row in findings["backends"]:
        sign = Text("✓", "green") if row["available"] else Text("✗", "dim")
        words = f"{row['summary']} ({row['version']})" if row["available"] else row["why_not"]
        how = f"\nto install: {row['how_to_get']}" if row["how_to_get"] and not row["available"] else ""
        backends.add_row(row["name"], row["family"], sign, Text(words + how, "" if row["available"] else "dim"))
    _section(screen, "Backends", backends)
    _section(screen, "Measured ranks", Text(_rank_words(findings["ranks"])))
    if findings["environment"]:
        rows = [(f"{entry['name']}={entry['value']}", entry["meaning"]) for entry in findings["environment"]]
        _section(screen, "Environment", pairs(rows))
    else:
        _section(screen, "Environment", Text("none of the variables that undivided reads is set (UNDIVIDED_*, NVTE_*)"))
    check = findings["self_check"]
    words = f"{check['backend']}: relative error {check['error']:.1e} against fp64 (allowed: {check['budget']:.1e})"
    _section(screen, "Self-check", mark(check["ok"]) + Text(f" {words}"))
    _section(screen, "Try next", pairs(NEXT.items()))


def _section(screen: Console, title: str, body: Table | Text) -> None:
    screen.print(Text(title, "bold"))
    if isinstance(body, Table):
        print_table(screen, body, after=1)
    else:
        print_text(screen, body, after=1)
