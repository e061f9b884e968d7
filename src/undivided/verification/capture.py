"""Checks that a call on a GPU neither waits for the device nor breaks a CUDA graph or torch.compile.

    no-sync     the second call, forward and backward, with PyTorch's synchronisation checks set to raise
    graph       forward and backward captured once, replayed on other values (and other lengths) in the same memory
    compile     ``torch.compile(fullgraph=True)`` of the public call, forward and backward

    python -m undivided.verification.capture --device cuda --jobs 4 --json capture.json

Each check runs for every backend that can compute the problem, and for the backend that the library chooses ("chosen").
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undivided import masks
from undivided.errors import NoBackendError
from undivided.functional import attention
from undivided.machine import Machine
from undivided.verification.contract import COMPILES, available
from undivided.verification.lines import Line, Task, command_parser, run

CHOSEN = "chosen"
TASK_SECONDS = 240.0
"""Time limit of one check on all backends, compiling included."""

_attend: Callable[..., Tensor] = attention


class StaticProblem(NamedTuple):
    """A problem in fixed memory: the arguments of `attention`, the leaves to differentiate, the gradient of the output.

    change: writes new values into the same memory.
    """

    arguments: dict[str, Any]
    leaves: tuple[Tensor, ...]
    grad: Tensor
    change: Callable[[], None]


def _static_problem(
    device: str,
    *,
    q_len: int,
    kv_len: int,
    layout: str = "bshd",
    batch: int = 2,
    train: bool = True,
    mask: Callable[[], tuple[Any, Callable[[], None]]],
) -> StaticProblem:
    """A problem with 4 query and 2 key/value heads of size 64, in bf16."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int, heads: int) -> Tensor:
        shape = (length, heads, 64) if layout == "thd" else (batch, length, heads, 64)
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    leaves = draw(q_len, 4), draw(kv_len, 2), draw(kv_len, 2)
    grad = draw(q_len, 4)
    mask_value, change_mask = mask()

    def change() -> None:
        with torch.no_grad():
            for tensor in (*leaves, grad):
                tensor.copy_(draw(tensor.shape[-3], tensor.shape[-2]))
        change_mask()

    arguments = dict(zip("qkv", leaves, strict=True)) | {"layout": layout, "mask": mask_value}
    return StaticProblem(arguments, tuple(leaf.requires_grad_() for leaf in leaves) if train else (), grad, change)


def _nothing() -> None:
    pass


def _lengths(device: str) -> tuple[Any, Callable[[], None]]:
    lengths = torch.tensor([300, 17], dtype=torch.int32, device=device)

    def change() -> None:
        lengths.sub_(5)

    return masks.lengths(lengths) & masks.causal("bottom_right"), change


def _documents(device: str) -> tuple[Any, Callable[[], None]]:
    offsets = torch.tensor([0, 70, 200, 256], dtype=torch.int32, device=device)
    return masks.documents(offsets, max_q=256, max_kv=256) & masks.causal(), _nothing


PROBLEMS: dict[str, Callable[[str], StaticProblem]] = {
    "full": lambda device: _static_problem(device, q_len=200, kv_len=300, mask=lambda: (None, _nothing)),
    "causal": lambda device: _static_problem(device, q_len=256, kv_len=256, mask=lambda: (masks.causal(), _nothing)),
    "window-global": lambda device: _static_problem(
        device, q_len=256, kv_len=256, mask=lambda: (masks.window(32, 0) | masks.prefix(4), _nothing)
    ),
    "documents": lambda device: _static_problem(
        device, q_len=256, kv_len=256, layout="thd", mask=lambda: _documents(device)
    ),
    "decode-lengths": lambda device: _static_problem(
        device, q_len=1, kv_len=320, train=False, mask=lambda: _lengths(device)
    ),
}


def _step(problem: StaticProblem, backend: str | None) -> tuple[Tensor, ...]:
    """The output, and the gradients if the problem has any."""
    out = _attend(**problem.arguments, backend=backend)
    if not problem.leaves:
        return (out,)
    return out.detach(), *torch.autograd.grad(out, problem.leaves, problem.grad)


def _no_sync(problem: StaticProblem, backend: str | None) -> None:
    _step(problem, backend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _step(problem, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _graph(problem: StaticProblem, backend: str | None) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # compile and allocate before the capture, as PyTorch's notes on CUDA graphs require
        for _ in range(3):
            _step(problem, backend)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = _step(problem, backend)
    for _ in range(2):
        problem.change()
        graph.replay()
        results = [x.clone() for x in captured]
        _assert_close(results, _step(problem, backend))


def _compiled(problem: StaticProblem, backend: str | None) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda **arguments: _attend(**arguments), fullgraph=True)
    out = compiled(**problem.arguments, backend=backend)
    results: tuple[Tensor, ...] = (out,)
    if problem.leaves:
        results = (out.detach(), *torch.autograd.grad(out, problem.leaves, problem.grad))
    _assert_close(results, _step(problem, backend))


def _assert_close(actual: Any, expected: Any) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


CHECKS: dict[str, Callable[[StaticProblem, str | None], None]] = {
    "no-sync": _no_sync,
    "graph": _graph,
    "compile": _compiled,
}


def task_lines(task: Task) -> list[Line]:
    """One line for each backend of one check ("check/problem"); the dtype is always bf16."""
    check, problem = task.case.split("/")
    return [Line(task.case, task.dtype, name, *_verdict(check, problem, name, task.device)) for name in task.backends]


def _verdict(check: str, problem: str, name: str, device: str) -> tuple[str, tuple[str, ...]]:
    try:
        CHECKS[check](PROBLEMS[problem](device), None if name == CHOSEN else name)
    except NoBackendError as refused:
        return "refused", tuple(refused.decision.reasons.get(name, ())) or (str(refused),)
    except Exception as error:
        return "wrong", (f"raised {type(error).__name__}: {error}", traceback.format_exc(limit=-8))
    return "right", ()


def tasks(device: str) -> list[Task]:
    """One task for every check of every problem, with all backends of the machine. A CPU has only those of
    torch.compile: the others ask whether a call waits for a GPU, and about its graphs."""
    checks = CHECKS if torch.device(device).type == "cuda" else ["compile"]
    names = [backend.name for backend in available(device) if backend.name not in ("reference", *COMPILES)]
    return [
        Task(device, f"{check}/{problem}", "bfloat16", (CHOSEN, *names)) for check in checks for problem in PROBLEMS
    ]


def main() -> int:
    """Run the command; the exit code is 1 if anything was wrong, 2 if something was not run."""
    parser = command_parser(__doc__, "run only checks whose check/problem contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    arguments = parser.parse_args()
    print(f"{Machine.this(arguments.device)}", flush=True)
    planned = [task for task in tasks(arguments.device) if arguments.filter in task.case]
    return run(planned, task_lines, arguments, TASK_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
