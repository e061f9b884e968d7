"""Names in the trace of a profiler: what a rank posts, waits for and computes in each round.

They cost nothing but a check if no profiler records.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

PREFIX = "undivided::"


def profiled_round(what: str, number: int) -> AbstractContextManager[object]:
    """A context that appears in the trace of `torch.profiler` as ``undivided::<what> <number>``.

    what: "post keys", "wait for keys", "attend", "gradients" or "wait for key gradients". number: of the round.

    >>> with torch.profiler.profile() as profile, profiled_round("attend", 2):
    ...     pass
    >>> [event.name for event in profile.events() if event.name.startswith(PREFIX)]
    ['undivided::attend 2']
    """
    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return record_function(f"{PREFIX}{what} {number}")
