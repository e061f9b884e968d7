"""Checks of calls that are repeated on a GPU: by a loop, by a CUDA graph, and by torch.compile.

    repeat      four calls with one mask and tensors of the same kind, each with other values in other memory, forward
                and backward, against the reference: later calls run what the first prepared
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
REPEAT_TOLERANCE = 1e-2
"""Largest distance of a repeated result from the reference, relative to its norm: a few roundings of bf16."""
TASK_SECONDS = 240.0
"""Time limit of one check on all backends, compiling included."""

_attend: Callable[..., Tensor] = attention

MaskAndChange = tuple[masks.Mask | None, Callable[[], None]]
"""A mask, and a function that writes new values into its memory."""


class StaticProblem(NamedTuple):
    """A problem in fixed memory: the arguments of `attention`, the leaves to differentiate, the gradient of the output.

    change: writes new values into the same memory.
    """

    arguments: dict[str, Any]
    leaves: tuple[Tensor, ...]
    grad: Tensor
    change: Callable[[], None]


def _keep_values() -> None:
    """The change of a mask without values."""


def _static_problem(
    device: str,
    *,
    q_len: int = 256,
    kv_len: int = 256,
    layout: str = "bshd",
    train: bool = True,
    mask: Callable[[str], MaskAndChange] = lambda device: (None, _keep_values),
    page_size: int | None = None,
    **more: Tensor,
) -> StaticProblem:
    """A problem with 2 sequences, 4 query and 2 key/value heads of size 64, in bf16.

    page_size: tokens per page, of which the keys are a whole number; None: keys are not paged. more: other arguments.
    """
    batch = 2
    generator = torch.Generator().manual_seed(0)

    def draw(length: int, heads: int) -> Tensor:
        shape = (length, heads, 64) if layout == "thd" else (batch, length, heads, 64)
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    leaves: tuple[Tensor, ...] = draw(q_len, 4), draw(kv_len, 2), draw(kv_len, 2)
    grad = draw(q_len, 4)
    if page_size is not None:
        count = batch * kv_len // page_size
        pools = (torch.randn(count, page_size, 2, 64, generator=generator) for _ in "kv")
        leaves = leaves[0], *(pool.to(device, torch.bfloat16) for pool in pools)
        more["pages"] = torch.randperm(count, generator=generator).view(batch, -1).int()
    mask_value, change_mask = mask(device)
    others = {name: tensor.to(device) for name, tensor in more.items()}

    def change() -> None:
        with torch.no_grad():
            for tensor in (*leaves, grad):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        change_mask()

    arguments = dict(zip("qkv", leaves, strict=True)) | {"layout": layout, "mask": mask_value} | others
    return StaticProblem(arguments, tuple(leaf.requires_grad_() for leaf in leaves) if train else (), grad, change)


def _causal(device: str) -> MaskAndChange:
    return masks.causal(), _keep_values


def _lengths(device: str, new: int = 1, other: masks.Mask | None = None) -> MaskAndChange:
    """Two sequences with `new` queries each, and their mask: causal, or another one."""
    lengths = torch.tensor([300, 17], dtype=torch.int32, device=device)
    mask = masks.causal("bottom_right") if other is None else other
    if new > 1:
        mask &= masks.lengths(lengths, torch.full_like(lengths, new))
    else:
        mask = masks.lengths(lengths) & mask

    def change() -> None:
        lengths.sub_(1)

    return mask, change


def _documents(device: str) -> MaskAndChange:
    offsets = torch.tensor([0, 70, 200, 256], dtype=torch.int32, device=device)
    return masks.documents(offsets, max_q=256, max_kv=256) & masks.causal(), _keep_values


def _packed_steps(device: str) -> MaskAndChange:
    q_ends, kv_ends = (torch.tensor(ends, dtype=torch.int32, device=device) for ends in ([0, 1, 70], [0, 300, 500]))

    def change() -> None:
        kv_ends[1:].sub_(5)

    return masks.documents(q_ends, kv_ends, max_q=69, max_kv=320) & masks.causal("bottom_right"), change


PROBLEMS: dict[str, dict[str, Any]] = {
    "full": {"q_len": 200, "kv_len": 300},
    "causal": {"mask": _causal},
    "window-global": {"mask": lambda device: (masks.window(32, 0) | masks.prefix(4), _keep_values)},
    "documents": {"layout": "thd", "mask": _documents},
    "alibi": {"mask": _causal, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},
    "sinks": {"mask": _causal, "sinks": torch.zeros(4)},
    "decode-lengths": {"q_len": 1, "kv_len": 320, "train": False, "mask": _lengths},
    "decode-pages": {"q_len": 1, "kv_len": 320, "train": False, "mask": _lengths, "page_size": 64},
    "decode-tree": {
        "q_len": 4, "kv_len": 320, "train": False,
        "mask": lambda device: _lengths(device, 4, masks.tree([-1, 0, 0, 1])),
    },
    "packed-steps": {
        "q_len": 70, "kv_len": 320, "layout": "thd", "train": False, "mask": _packed_steps, "page_size": 64,
    },
}  # fmt: skip
"""The arguments of `_static_problem` by name."""


def _step(problem: StaticProblem, backend: str | None) -> tuple[Tensor, ...]:
    """The output, and the gradients if the problem has any."""
    out = _attend(**problem.arguments, backend=backend)
    if not problem.leaves:
        return (out,)
    return out.detach(), *torch.autograd.grad(out, problem.leaves, problem.grad)


def _check_repeat(problem: StaticProblem, backend: str | None) -> None:
    for _ in range(4):
        problem.change()
        moved = {name: problem.arguments[name].detach().clone() for name in "qkv"}
        leaves = tuple(moved[name].requires_grad_() for name in "qkv"[: len(problem.leaves)])
        other = problem._replace(arguments=problem.arguments | moved, leaves=leaves)
        for one, expected in zip(_step(other, backend), _step(other, "reference"), strict=True):
            error = (one - expected).float().norm() / expected.float().norm()
            if not error <= REPEAT_TOLERANCE:
                raise AssertionError(f"differs from the reference by {float(error):.1e} of its norm")


def _check_no_sync(problem: StaticProblem, backend: str | None) -> None:
    _step(problem, backend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _step(problem, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _check_graph(problem: StaticProblem, backend: str | None) -> None:
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


def _check_compile(problem: StaticProblem, backend: str | None) -> None:
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


CHECKS: dict[str, Callable[[StaticProblem, str | None], None]] = {  # each raises if it fails
    "repeat": _check_repeat,
    "no-sync": _check_no_sync,
    "graph": _check_graph,
    "compile": _check_compile,
}


def task_lines(task: Task) -> list[Line]:
    """One line for each backend of one check ("check/problem"); the dtype is always bf16."""
    check, problem = task.case.split("/")
    return [Line(task.case, task.dtype, name, *_verdict(check, problem, name, task.device)) for name in task.backends]


def _verdict(check: str, problem: str, name: str, device: str) -> tuple[str, tuple[str, ...]]:
    try:
        CHECKS[check](_static_problem(device, **PROBLEMS[problem]), None if name == CHOSEN else name)
    except NoBackendError as refused:
        return "refused", tuple(refused.decision.reasons.get(name, ())) or (str(refused),)
    except Exception as error:
        return "wrong", (f"raised {type(error).__name__}: {error}", traceback.format_exc(limit=-8))
    return "right", ()


def tasks(device: str) -> list[Task]:
    """One task for every check of every problem, with all backends of the machine.

    On a CPU only two checks run: the other two are about waiting for a GPU, and about CUDA graphs.
    """
    checks = CHECKS if torch.device(device).type == "cuda" else ["repeat", "compile"]
    names = [backend.name for backend in available(device) if backend.name not in ("reference", *COMPILES)]
    return [
        Task(device, f"{check}/{problem}", "bfloat16", (CHOSEN, *names)) for check in checks for problem in PROBLEMS
    ]


def main() -> int:
    """The exit code of the command: 1 if anything was wrong, 2 if something was not run."""
    parser = command_parser(__doc__, "run only checks whose check/problem contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes")
    arguments = parser.parse_args()
    print(f"{Machine.this(arguments.device)}", flush=True)
    planned = [task for task in tasks(arguments.device) if arguments.filter in task.case]
    return run(planned, task_lines, arguments, TASK_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
