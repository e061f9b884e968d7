"""Kernels of Triton's interpreter that return launches to repeat, as compiled ones do, and calls that keep launches."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from undivided.backends.triton import kept_launches
from undivided.request.normalise import normalise
from undivided.request.request import Request
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
