"""The table of features by backend, from each backend's `Limits`, and the index of the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from undivided.backends import all_backends, flash_attn
from undivided.backends._base import _MASK_WORDS, ORDINARY_MASK_KINDS, Limits
from undivided.backends.torch_flash.cuda import LIMITS as CUDA_FLASH
from undivided.request.problem import FEATURES

DETERMINISTIC_GRADIENTS = {
    "`cudnn`": "part",
    "`flash_attn` 3": "part",
    "`flash_attn` 4": "part",
    "`flex`": "part",
    "`torch_cudnn`": "-",
}
"""The backends that refuse `deterministic=True` with gradients, always (-) or in part; the note is on the page."""

LARGEST_HEADS_DEPEND = {"`cudnn`", "`flash_attn` 3", "`flash_attn` 4", "`torch_cudnn`"}
"""The backends whose largest head size depends on the version, the GPU or the gradients; the note is on the page."""


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *[":-:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _columns() -> list[tuple[str, Limits]]:
    """A name and its limits; a backend with separate limits per device or version has several columns."""
    columns = []
    for backend in all_backends():
        if not type(backend).__module__.startswith("undivided."):
            continue  # of another package that is installed here
        if backend.name == "torch_flash":
            columns += [("`torch_flash` CPU", backend.limits), ("`torch_flash` CUDA", CUDA_FLASH)]
        elif backend.name == "flash_attn":
            versions = ((2, flash_attn._VERSION_2), (3, flash_attn._VERSION_3), (4, flash_attn._VERSION_4))
            columns += [(f"`flash_attn` {number}", version.limits) for number, version in versions]
        else:
            columns.append((f"`{backend.name}`", backend.limits))
    return columns


def backends(_: str) -> str:
    """docs/reference/backends.md."""
    names, every = zip(*_columns(), strict=True)
    mark = lambda has: "yes" if has else "-"  # noqa: E731
    dtypes = ("float16", "bfloat16", "float32", "float64")
    rows = [
        ["devices", *(", ".join(sorted(limits.devices)) for limits in every)],
        *([name, *(mark(getattr(torch, name) in limits.dtypes) for limits in every)] for name in dtypes),
        ["largest head size", *(_largest_head(name, limits) for name, limits in zip(names, every, strict=True))],
        ["head size a multiple of", *(str(limits.head_dim_multiple) for limits in every)],
        ["compute capability from", *(_capability(limits.compute_capability[0]) for limits in every)],
        ["packages", *(", ".join(f"`{name}`" for name, _, _ in limits.packages) or "-" for limits in every)],
    ]
    kinds = sorted(ORDINARY_MASK_KINDS | {"tree", "blocks"}, key=lambda kind: _MASK_WORDS[kind])
    masks = [[_MASK_WORDS[kind], *(mark(kind in limits.masks) for limits in every)] for kind in kinds]
    alignments = [
        [f"{align.replace('_', '-')} if the two differ", *(mark(align in limits.alignments) for limits in every)]
        for align in ("top_left", "bottom_right")
    ]
    features = [[words, *(mark(name in limits.features) for limits in every)] for name, words in FEATURES.items()]
    features += [
        ["gradients that repeat bit for bit, `deterministic`", *(DETERMINISTIC_GRADIENTS.get(n, "yes") for n in names)],
        ["results that do not depend on the batch, `batch_invariant`", *(mark(one.batch_invariant) for one in every)],
    ]
    return f"""# Features by backend

What each backend declares. A feature that a backend does not declare is refused with a reason, never approximated.
"yes" is necessary, not sufficient: a backend also has rules about combinations, versions and sizes, and
`undivided.explain` answers for one exact problem. [Selection](../learn/selection.md#the-backends) says what each
backend is; `flex` has no gradients on a CPU, and `triton` runs there under Triton's interpreter only. [Which of them
ran on a GPU](../how-to/run-on-a-gpu.md).

## Limits

{_table(["", *names], rows)}

Largest head sizes that depend on the version and the GPU: `flash_attn` 3 up to 256, values up to 512 with queries of up
to 64; `flash_attn` 4 up to 256 on compute capability 9.x, up to 128 elsewhere, on 10.x and 11.x also 256, and 192 with
values of 128; `cudnn` and `torch_cudnn` any without gradients from cuDNN 9.10.2, with gradients up to 256 on 9.x and
128 elsewhere, with exceptions that a reason names.

## Masks

{_table(["", *names], masks + alignments)}

## Options and results

{_table(["", *names], features)}

Deterministic gradients in part: `cudnn` on compute capability 9.x, and on 10.x from cuDNN 9.18.1; `flash_attn` 3 with
heads of up to 192; `flash_attn` 4 below compute capability 12.0; `flex` without the gradient of a bias or of ALiBi
slopes.

*This page is generated from each backend's `Limits`: `scripts/docs --write`.*
"""


def _largest_head(name: str, limits: Limits) -> str:
    return "by version and GPU" if name in LARGEST_HEADS_DEPEND else str(limits.max_head_dim or "any")


def _capability(lowest: tuple[int, int] | None) -> str:
    return f"{lowest[0]}.{lowest[1]}" if lowest else "-"


PAGES: dict[str, Callable[[str], str]] = {"backends": backends}
