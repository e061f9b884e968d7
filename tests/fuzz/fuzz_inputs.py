"""Whether any input that Python can hand over ends the process, or gets an error that is not ours.

    python tests/fuzz/fuzz_inputs.py 100000 --workers 2

Every case is a number, from which all of it follows: ``--case 1234`` shows one. Cases run
in worker processes under a limit of memory; one that ends its worker, by a signal or by taking too long, is reported
with its number, and another worker goes on behind it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import importlib.util
import io
import json
import os
import random
import resource
import select
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_spec = importlib.util.find_spec("undivided")
assert _spec is not None
assert _spec.origin is not None
PACKAGE = Path(_spec.origin).parent
SECONDS = 120
"""That a case may take, where others use the machine too."""
MEMORY = 3 << 30
"""Bytes of address space that a worker may have beyond what importing takes."""


def run_case(number: int) -> str:
    """The outcome: "ok", or the kind of error and its origin."""
    import torch
    from fuzz_calls import ENTRIES

    if number < 0:
        os.abort()  # for the test of the report
    rng = random.Random(number)
    torch.manual_seed(number)
    makers, weights = zip(*ENTRIES, strict=True)
    call = rng.choices(makers, weights)[0](rng)
    spoiled = rng.choice((0, 1, 1, 1, 2, 3))
    try:
        with _surroundings(rng), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            found = call.function(**_spoiled(rng, call.arguments, spoiled))
            _differentiate(rng, found)
            for method in call.then:
                if rng.random() < 0.8:
                    method.function(found, **_spoiled(rng, method.arguments, rng.choice((0, 0, 1, 2))))
    except Exception as error:
        return _kind(error)
    return "ok"


def _spoiled(rng: random.Random, arguments: dict[str, Any], count: int) -> dict[str, Any]:
    from fuzz_values import wild_tensor, wrong
    from torch import Tensor

    arguments = dict(arguments)
    for name in rng.sample(sorted(arguments), min(count, len(arguments))):
        value = arguments[name]
        if isinstance(value, Tensor) and rng.random() < 0.85:
            arguments[name] = wild_tensor(rng, value)
        elif isinstance(value, list) and value and rng.random() < 0.7:
            n = rng.randrange(len(value))
            new = wild_tensor(rng, value[n]) if isinstance(value[n], Tensor) else wrong(rng)
            arguments[name] = [*value[:n], new, *value[n + 1 :]]
        else:
            arguments[name] = wrong(rng)
    return arguments


def _surroundings(rng: random.Random) -> Any:
    """The modes and contexts of a call: mostly none."""
    import torch
    from fuzz_values import FAKE
    from torch.utils.flop_counter import FlopCounterMode

    makers = (
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: FAKE,
        lambda: FlopCounterMode(display=False),
        lambda: torch.device("meta"),
        torch.enable_grad,
    )
    return rng.choice(makers)() if rng.random() < 0.3 else contextlib.nullcontext()


def _differentiate(rng: random.Random, found: Any) -> None:
    """The backward, with a gradient of any kind."""
    import torch
    from fuzz_values import wild_tensor

    out = found[0] if isinstance(found, tuple) and found else found
    if not isinstance(out, torch.Tensor) or not out.requires_grad or out.numel() > 1 << 16:
        return
    grad = torch.ones_like(out)
    try:
        out.backward(wild_tensor(rng, grad) if rng.random() < 0.5 else grad)
    except RuntimeError as error:  # PyTorch checks a gradient before we see it
        if "undivided" not in _where(error):
            return
        raise


def _where(error: BaseException) -> str:
    """The innermost line of ours, and the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if Path(f.filename).is_relative_to(PACKAGE)]
    last = frames[-1] if frames else None
    if not ours:
        return f"{Path(last.filename).name}:{last.lineno}" if last else ""
    return f"undivided/{Path(ours[-1].filename).relative_to(PACKAGE).as_posix()}:{ours[-1].lineno}"


_OUT_OF_MEMORY = (
    "not enough memory",
    "can't allocate memory",
    "bad_alloc",
    "Storage size calculation overflowed",
    "numel: integer multiplication overflow",
)
_PYTORCHS = (
    "Please convert all Tensors to FakeTensors first",  # of every operation under a FakeTensorMode, its own included
    "Inference tensors cannot be saved for backward",
    "Cannot set version_counter for inference tensor",  # of a wrapper, by any view under inference_mode
    "Multiple dispatch failed for",  # two modes or classes, of which neither takes the other
    "Unexpected floating ScalarType in at::autocast",  # which has no float64 among the operands of one operation
    '"neg_cpu" not implemented',  # a negated view of booleans, which only torch._neg_view makes
    "Creating a new Tensor subclass",  # of one class's result by another
    "got mixed torch.Tensor and DTensor",  # a DTensor as the gradient of a wrapper
    "mutating a non-functional tensor with a functional tensor",
)
"""Messages with which PyTorch itself refuses inputs under its own modes."""


def _kind(error: Exception) -> str:
    import torch

    import undivided

    if isinstance(error, undivided.InputError | undivided.NoBackendError):
        return type(error).__name__
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "out of memory"
    text = " ".join(str(error).split())
    if isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY):
        return "out of memory"
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, TypeError) and _where(error).startswith("undivided/masks/normal_form/predicate_pairs.py"):
        return "raised by the caller's predicate"
    if any(name.endswith("utils/module_tracker.py") for name in files):  # of the FLOP counter
        return "refused by PyTorch"
    if any(words in text for words in _PYTORCHS) or "torch_sdpa" in _where(error):  # which passes nested tensors on
        return "refused by PyTorch"
    return f"! {type(error).__name__} at {_where(error)}: {text[:160]}"


def work(first: int, step: int, stop: int) -> None:
    """A worker: prints the number of a case before it runs, and its outcome afterwards."""
    import torch
    import torch.distributed.tensor
    import torch.testing._internal.distributed.fake_pg

    import undivided  # noqa: F401

    torch.set_num_threads(1)
    faulthandler.enable()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.dup(1)
    for number in range(first, stop, step):
        os.write(answers, f"{number}\n".encode())
        os.write(answers, f"{json.dumps(run_case(number))}\n".encode())


class _Worker:
    """One process, and those that follow it."""

    def __init__(self, first: int, step: int, stop: int) -> None:
        self.next, self.step, self.stop = first, step, stop
        self.buffer = b""
        self.running: int | None = None
        self._start()

    def _start(self) -> None:
        command = [sys.executable, __file__, "--worker", str(self.next), str(self.step), str(self.stop)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        self.since, self.stderr = time.monotonic(), b""

    def lines(self) -> Iterator[tuple[int, str]]:
        """The new lines of the worker: (case, outcome). A crash or a timeout is an outcome too."""
        out, err = self.process.stdout, self.process.stderr
        assert out is not None
        assert err is not None
        ready, _, _ = select.select([out, err], [], [], 0.05)
        if err in ready:
            self.stderr = (self.stderr + os.read(err.fileno(), 1 << 16))[-16000:]
        if out in ready:
            data = os.read(out.fileno(), 1 << 16)
            self.since = time.monotonic()
            yield from self._read(data) if data else self._ended()
        elif time.monotonic() - self.since > SECONDS:
            self.process.kill()

    def _read(self, data: bytes) -> Iterator[tuple[int, str]]:
        *complete, self.buffer = (self.buffer + data).split(b"\n")
        for line in complete:
            if self.running is None:
                self.running = int(line)
                continue
            number = self.running
            self.running, self.next = None, number + self.step
            yield number, json.loads(line)

    def _ended(self) -> Iterator[tuple[int, str]]:
        code = self.close()
        if self.running is None and code == 0:
            self.next = self.stop
            return
        number = self.next if self.running is None else self.running
        why = "took too long" if code == -9 else f"ended by signal {-code}" if code < 0 else f"exit {code}"
        yield number, f"!! {why}: {_last_words(self.stderr.decode(errors='replace'))}"
        self.running, self.buffer, self.next = None, b"", number + self.step
        if self.next < self.stop:
            self._start()

    def close(self) -> int:
        """Wait for its end, and return its exit code."""
        out, err = self.process.stdout, self.process.stderr
        assert out is not None
        assert err is not None
        out.close()
        self.stderr += err.read()
        err.close()
        return self.process.wait()


def _last_words(stderr: str) -> str:
    """The end of a process's stderr; of a fatal error the beginning, before the stacks that Python lists."""
    fatal = stderr.find("Fatal Python error")
    return stderr[-1500:] if fatal < 0 else stderr[fatal:][:1500]


def fuzz(count: int, workers: int = 1, first: int = 0, progress: bool = False) -> dict[str, list[int]]:
    """The cases by outcome."""
    running = [_Worker(first + n, workers, first + count) for n in range(workers)]
    found: dict[str, list[int]] = collections.defaultdict(list)
    while active := [worker for worker in running if worker.next < worker.stop]:
        for worker in active:
            for number, outcome in worker.lines():
                found[outcome].append(number)
                if progress and sum(map(len, found.values())) % 5000 == 0:
                    print(f"... case {number}", file=sys.stderr)
    for worker in running:
        worker.close()
    return found


def failures(found: dict[str, list[int]]) -> dict[str, list[int]]:
    """Those that ended the process, or whose error is not ours."""
    return {outcome: numbers for outcome, numbers in found.items() if outcome.startswith("!")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--case", type=int, help="run one, here")
    parser.add_argument("--worker", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(*options.worker)
        return 0
    if options.case is not None:
        faulthandler.enable()
        print(run_case(options.case))
        return 0
    found = fuzz(options.count, options.workers, options.first, progress=True)
    for outcome, numbers in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(numbers):7} {outcome}" + (f"   cases {numbers[:5]}" if outcome.startswith("!") else ""))
    print(f"{sum(map(len, found.values()))} cases, {sum(map(len, failures(found).values()))} failures")
    return bool(failures(found))


if __name__ == "__main__":
    sys.exit(main())
