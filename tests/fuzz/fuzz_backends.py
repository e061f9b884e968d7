"""Whether all backends agree on random problems whose sizes lie at the edges of the kernels' tiles.

    python tests/fuzz/fuzz_backends.py --seconds 3600 --workers 2
    python tests/fuzz/fuzz_backends.py --case 1234               one case, with its report
    UNDIVIDED_ISA=avx2 python tests/fuzz/fuzz_backends.py --seconds 600
    python tests/fuzz/fuzz_backends.py --interpreted             the GPU kernels of `triton`, on the CPU, small problems

Each case is a number, from which its problem follows. `undivided.verify` compares every backend that can run it with an
fp64 oracle; `native` with batch_invariant must give each sequence alone the same bits. A problem that fails is made
smaller as long as it still fails, and printed as one line of JSON; `past_failures.json` keeps such lines, and the tests
run them again.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from fuzz_bits import other_bits
from fuzz_problems import DTYPES, MAX_INTERPRETED_PAIRS, MAX_PAIRS, Spec, arguments, draw

import undivided
from undivided.verification.report import Row

BACKENDS = ["native", "reference", "torch_flash"]
"""FlexAttention would compile for each problem, half a second on average."""
SLACK, SLACK_OF_FEW, FEW_ROWS, FEW_KEYS = 2, 4, 32, 8
"""Times the budget, which is a statistic: the error of a problem of few numbers exceeds it by chance."""
SLACK_OF_NOISE, NO_DIGITS = 64, 0.1
"""For gradients that nearly cancel: few rows or keys, or large scores, whose weights the backward recomputes from the
log-sum-exp (an error of its size, which grows with the square of `factor`, times 2^-24). In heads of one or two entries
plain attention has none of it by chance. From the second budget on, plain attention has no digit right."""
CANCELLING = ("chunks(1,", "window(0, 0,")
"""Masks of one key per row, whose gradients of q and k are 0."""
REFUSED = "the problem is refused"


def _is_wrong(spec: Spec, row: Row) -> bool:
    few = sum(spec.q_lens) * spec.heads < FEW_ROWS
    if row.quantity in ("out", "lse"):
        return row.error > (SLACK_OF_FEW if few else SLACK) * row.budget
    if row.budget > NO_DIGITS:
        return False
    if few or spec.factor > 1 or max(spec.kv_lens) < FEW_KEYS or any(text in spec.mask for text in CANCELLING):
        noise = max(torch.finfo(DTYPES[spec.dtype]).eps, spec.factor**2 * torch.finfo(torch.float32).eps)
        return row.error > SLACK_OF_NOISE * max(row.budget, noise)
    return row.error > SLACK * row.budget


def failure(spec: Spec, backends: list[str] | None = None) -> str:
    """What is wrong with the results of the problem; an empty text if nothing is."""
    before = torch.get_num_threads()
    torch.set_num_threads(spec.threads)
    try:
        report = undivided.verify(**arguments(spec), gradients=not spec.page_size, backends=backends)
    except undivided.InputError as error:
        return f"{REFUSED}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.set_num_threads(before)
    wrong = (row for row in report.failures if _is_wrong(spec, row))
    lines = [f"{row.backend} {row.quantity}: {row.error:.1e} of {row.budget:.1e} {row.note}" for row in wrong]
    if "native" in report.backends and "batch_invariant" in spec.options:
        lines += other_bits(spec)
    return "\n".join(lines)


def shrink(spec: Spec, backends: list[str] | None = None) -> Spec:
    """A smaller problem that fails too, found in a minute at most."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        smaller = next(
            (one for one in _smaller(spec) if (found := failure(one, backends)) and REFUSED not in found), None
        )
        if smaller is None:
            break
        spec = smaller
    return spec


def _smaller(spec: Spec) -> Iterator[Spec]:
    """Problems that are smaller in one respect, the largest steps first."""
    for name in spec.options:
        yield replace(spec, options={n: v for n, v in spec.options.items() if n != name})
    if spec.mask:
        yield replace(spec, mask="")
    plain = {"page_size": 0, "threads": 1, "factor": 1.0, "group": 1, "kv_heads": 1}
    for name, value in plain.items():
        if getattr(spec, name) != value:
            yield replace(spec, **{name: value})  # type: ignore[arg-type]
    for n in range(len(spec.q_lens) if len(spec.q_lens) > 1 else 0):
        yield replace(
            spec, q_lens=spec.q_lens[:n] + spec.q_lens[n + 1 :], kv_lens=spec.kv_lens[:n] + spec.kv_lens[n + 1 :]
        )
    for name in ("q_lens", "kv_lens"):
        lens = getattr(spec, name)
        for n, length in enumerate(lens):
            for less in _less(length):
                yield replace(spec, **{name: [*lens[:n], less, *lens[n + 1 :]]})  # type: ignore[arg-type]
    for less in _less(spec.dim):
        yield replace(spec, dim=less, v_dim=less if spec.v_dim == spec.dim else spec.v_dim)
    for less in _less(spec.v_dim):
        yield replace(spec, v_dim=less)


def _less(size: int) -> Iterator[int]:
    return (n for n in (1, size // 2, size - 16, size - 1) if 0 < n < size)


def _interpret() -> None:
    """Run the kernels of `triton` on the CPU, where one that leaves its tensors raises an error."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.append(str(Path(__file__).parents[1] / "support/gpus"))
    for name in ("quick_interpreter", "checked_interpreter"):
        importlib.import_module(name).install()


def _run(job: tuple[int, int, list[str] | None]) -> tuple[int, str, Spec | None]:
    number, max_pairs, backends = job
    spec = draw(number, max_pairs)
    found = failure(spec, backends)
    return number, found, shrink(spec, backends) if found else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--backends", type=lambda text: text.split(","), default=BACKENDS, help="default: %(default)s")
    parser.add_argument("--case", type=int, help="run only this case, and print its report")
    text = "only `triton`, under Triton's interpreter, which raises an error if a kernel leaves its tensors"
    parser.add_argument("--interpreted", action="store_true", help=text)
    options = parser.parse_args()
    max_pairs, prepare = MAX_PAIRS, None
    if options.interpreted:
        options.backends, max_pairs, prepare = ["triton"], MAX_INTERPRETED_PAIRS, _interpret
        _interpret()
    if options.case is not None:
        spec = draw(options.case, max_pairs)
        print(spec)
        report = undivided.verify(**arguments(spec), gradients=not spec.page_size, backends=options.backends)
        print(report)
        return not report.ok
    end, ran, failures = time.monotonic() + options.seconds, 0, 0
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, spawn, prepare) as pool:  # raises if a worker ends
        jobs = ((number, max_pairs, options.backends) for number in itertools.count(options.start))
        run = pool.map if options.workers > 1 else map
        while time.monotonic() < end:
            batch = list(itertools.islice(jobs, 64 * options.workers))
            for number, found, smaller in run(_run, batch):
                ran += 1
                if smaller is not None:
                    failures += 1
                    print(f"case {number}\n{found}\n{json.dumps(dataclasses.asdict(smaller))}", flush=True)
    print(f"{ran} problems, {failures} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
