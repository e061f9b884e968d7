"""Whether all backends agree on random problems whose sizes lie at the edges of the kernels' tiles.

    python tests/fuzz/fuzz_backends.py --seconds 3600 --workers 2
    python tests/fuzz/fuzz_backends.py --case 1234               one case, with its report
    UNDIVIDED_ISA=avx2 python tests/fuzz/fuzz_backends.py --seconds 600
    python tests/fuzz/fuzz_backends.py --interpreted             the GPU kernels of `triton`, on the CPU, small problems

Each case is a number, from which its problem follows. `undivided.verify` compares every backend that can run it with an
fp64 oracle. A problem that fails is made smaller as long as it still fails, and printed as one line of JSON;
`past_failures.json` keeps such lines, and the tests run them again.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import undivided
from undivided import masks
from undivided.cli._mask_words import parse
from undivided.verification.report import Row

EDGES = tuple(sorted({1, 2, 3, 5, 7, 9, *(n + d for n in (16, 32, 48, 64, 128, 192, 256, 320) for d in (-1, 0, 1))}))
LONG_EDGES = tuple(n + d for n in (512, 1024, 2048, 4096) for d in (-1, 0, 1))
"""Key lengths of few rows: beyond these, the keys of a sequence are divided into chunks or parts."""
HEAD_SIZES = (1, 8, 16, 17, 31, 32, 40, 63, 64, 65, 80, 96, 127, 128, 129, 192, 256)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PAGE_SIZES = (1, 16, 17, 64, 128)
MAX_PAIRS = 1 << 20
"""Of a problem, so that the oracle takes milliseconds."""
MAX_INTERPRETED_PAIRS = 1 << 14
"""The same, so that Triton's interpreter takes a second."""


@dataclass(frozen=True)
class Spec:
    """A problem in plain values: one query and key length per sequence, a mask as text, and optional inputs by name."""

    seed: int
    dtype: str
    layout: str
    kv_heads: int
    group: int
    dim: int
    v_dim: int
    q_lens: list[int]
    kv_lens: list[int]
    mask: str = ""
    page_size: int = 0
    factor: float = 1.0
    threads: int = 1
    options: dict[str, float] = field(default_factory=dict)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def pairs(self) -> int:
        if self.layout == "thd":
            return self.heads * sum(self.q_lens) * sum(self.kv_lens)
        return self.heads * len(self.q_lens) * max(self.q_lens) * max(self.kv_lens)


def draw(number: int, max_pairs: int = MAX_PAIRS) -> Spec:
    """The problem of a case."""
    rng = random.Random(number)
    while True:
        spec = _draw(rng, number)
        if spec.pairs <= max_pairs:
            return spec


def _draw(rng: random.Random, number: int) -> Spec:
    layout = rng.choice(("bshd", "sbhd", "bhsd", "thd", "thd"))
    count = rng.choice((1, 2, 3, 5)) if layout == "thd" else rng.choice((1, 1, 2, 3))
    kind = rng.choice(("same", "any", "decode", "long-decode"))
    edges = (*EDGES[-9:], *LONG_EDGES, *LONG_EDGES) if kind == "long-decode" else EDGES
    kv_lens = [rng.choice((0, *edges) if count > 1 else edges) for _ in range(count)]
    q_lens = {
        "same": list(kv_lens),
        "any": [rng.choice(EDGES) for _ in range(count)],
        "decode": [rng.choice((1, 1, 2, 4, 8)) for _ in range(count)],
        "long-decode": [rng.choice((1, 1, 2, 4, 8, 17)) for _ in range(count)],
    }[kind]
    if layout != "thd":
        q_lens, kv_lens = [max(n, 1) for n in q_lens], [max(n, 1) for n in kv_lens]
    dim = rng.choice(HEAD_SIZES)
    return Spec(
        seed=number,
        dtype=rng.choice(tuple(DTYPES)),
        layout=layout,
        kv_heads=rng.choice((1, 1, 2, 3)),
        group=rng.choice((1, 1, 2, 4, 5)),
        dim=dim,
        v_dim=rng.choice((dim, dim, dim, rng.choice(HEAD_SIZES))),
        q_lens=q_lens,
        kv_lens=kv_lens,
        mask=_mask_text(rng),
        page_size=rng.choice(PAGE_SIZES) if rng.random() < 0.25 else 0,
        factor=rng.choice((1.0, 1.0, 1.0, 8.0)),
        threads=rng.choice((1, 2, 3)),
        options={name: make(rng) for name, make in OPTIONS.items() if rng.random() < 0.2},
    )


def _mask_text(rng: random.Random) -> str:
    """A mask without lengths or documents: these follow from the lengths of the problem."""
    align = rng.choice(("'bottom_right'", "'bottom_right'", "'top_left'"))
    left, right = (rng.choice(("None", "0", "1", "15", "16", "31", "63", "64", "100")) for _ in range(2))
    band = rng.choice(("", f"causal({align})", f"causal({align})", f"window({left}, {right}, {align})"))
    if band and rng.random() < 0.2:
        band = f"({band} | {rng.choice(('prefix', 'sinks'))}({rng.choice((1, 4, 16, 33))}))"
    if rng.random() < 0.1:
        chunks = f"chunks({rng.choice((1, 16, 50, 64))}, {align})"
        return f"{band} & {chunks}" if band else chunks
    return band


OPTIONS: dict[str, Callable[[random.Random], float]] = {
    "scale": lambda rng: rng.choice((0.5, 0.1, -0.2)),
    "softcap": lambda rng: rng.choice((1.0, 20.0)),
    "bias": lambda rng: rng.choice((1, 2, 4, 8, 3, 5, 6, 12, 15)),  # bits: which axes of [B, H, Sq, Sk] are not 1
    "alibi": lambda rng: 1,
    "sinks": lambda rng: 1,
    "dropout": lambda rng: rng.choice((0.1, 0.5)),
    "dense": lambda rng: rng.choice((0.1, 0.7)),
}


def arguments(spec: Spec) -> dict[str, Any]:
    """The arguments of `undivided.verify` for the problem."""
    make = torch.Generator().manual_seed(spec.seed)
    dtype = DTYPES[spec.dtype]
    packed = spec.layout == "thd"
    batch = 1 if packed else len(spec.q_lens)
    q_len, kv_len = (sum(lens) if packed else max(lens) for lens in (spec.q_lens, spec.kv_lens))

    def random_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make)

    def stored(length: int, heads: int, dim: int) -> Tensor:
        sizes = {"b": batch, "s": length, "h": heads, "d": dim, "t": length}
        return (spec.factor * random_tensor(*(sizes[axis] for axis in spec.layout))).to(dtype)

    found: dict[str, Any] = {"layout": spec.layout, "mask": _mask(spec)}
    found["q"] = stored(q_len, spec.heads, spec.dim)
    if spec.page_size:
        found |= _paged(spec, make)
    else:
        found["k"], found["v"] = stored(kv_len, spec.kv_heads, spec.dim), stored(kv_len, spec.kv_heads, spec.v_dim)
    for name in ("scale", "softcap"):
        if name in spec.options:
            found[name] = spec.options[name]
    if "alibi" in spec.options:
        found["alibi_slopes"] = random_tensor(spec.heads).abs()
    if "sinks" in spec.options:
        found["sinks"] = random_tensor(spec.heads)
    if "dropout" in spec.options:
        found["dropout_p"], found["dropout_seed"] = spec.options["dropout"], spec.seed
    if spec.page_size:
        return found
    axes = (batch, spec.heads, q_len, kv_len)
    if "bias" in spec.options:
        bits = int(spec.options["bias"])
        shape = [size if bits >> n & 1 else 1 for n, size in enumerate(axes)]
        found["bias"] = random_tensor(*(shape[1:] if packed else shape)).to(dtype)
    if "dense" in spec.options:
        allowed = torch.rand(axes[2:], generator=make) < spec.options["dense"]
        found["mask"] = masks.dense(allowed) if found["mask"] is None else found["mask"] & masks.dense(allowed)
    return found


def _mask(spec: Spec) -> masks.Mask | None:
    band = parse(spec.mask) if spec.mask else None
    if band is None and "alibi" in spec.options:
        band = masks.window(None, None, "bottom_right")
    if spec.layout == "thd":
        cu_q, cu_kv = ([0, *itertools.accumulate(lens)] for lens in (spec.q_lens, spec.kv_lens))
        lengths = masks.documents(cu_q, cu_kv)
    elif spec.page_size or len(set(spec.q_lens)) > 1 or len(set(spec.kv_lens)) > 1:
        lengths = masks.lengths(spec.kv_lens, spec.q_lens)
    else:
        return band
    return lengths if band is None else band & lengths


def _paged(spec: Spec, make: torch.Generator) -> dict[str, Tensor]:
    """Pools of pages in random order, whose rows without a key are NaN, and a block table."""
    rows = max(math.ceil(n / spec.page_size) for n in spec.kv_lens) + 1
    count = len(spec.kv_lens) * rows
    table = torch.randperm(count, generator=make).to(torch.int32).reshape(-1, rows)
    found: dict[str, Tensor] = {"pages": table}
    for name, dim in (("k", spec.dim), ("v", spec.v_dim)):
        pool = torch.full((count, spec.page_size, spec.kv_heads, dim), math.nan, dtype=DTYPES[spec.dtype])
        for sequence, length in enumerate(spec.kv_lens):
            values = (spec.factor * torch.randn(length, spec.kv_heads, dim, generator=make)).to(pool.dtype)
            for start in range(0, length, spec.page_size):
                piece = values[start : start + spec.page_size]
                pool[int(table[sequence, start // spec.page_size]), : len(piece)] = piece
        found[name] = pool
    return found


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
    return "\n".join(f"{row.backend} {row.quantity}: {row.error:.1e} of {row.budget:.1e} {row.note}" for row in wrong)


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
