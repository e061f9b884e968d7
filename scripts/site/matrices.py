"""The table of features by backend, from each backend's `Limits`, and the index of the reference."""

from __future__ import annotations

from collections.abc import Callable

from undivided.backends import all_backends
from undivided.backends._base import _MASK_WORDS, ALL_MASKS
from undivided.request.problem import FEATURES


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *[":-:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def backends(_: str) -> str:
    """docs/reference/backends.md."""
    every = all_backends()
    names = [f"`{backend.name}`" for backend in every]
    mark = lambda has: "yes" if has else "-"  # noqa: E731
    dtypes = ("float16", "bfloat16", "float32", "float64")
    limits = [
        ["devices", *(", ".join(sorted(b.limits.devices)) for b in every)],
        *([name, *(mark(any(str(d) == f"torch.{name}" for d in b.limits.dtypes)) for b in every)] for name in dtypes),
        ["largest head size", *(str(b.limits.max_head_dim or "any") for b in every)],
        ["head size a multiple of", *(str(b.limits.head_dim_multiple) for b in every)],
        ["compute capability from", *(_capability(b.limits.compute_capability[0]) for b in every)],
        ["packages", *(", ".join(f"`{name}`" for name, _, _ in b.limits.packages) or "-" for b in every)],
    ]
    masks = [
        [_MASK_WORDS[kind], *(mark(kind in b.limits.masks) for b in every)]
        for kind in sorted(ALL_MASKS, key=_MASK_WORDS.get)
    ]
    alignments = [
        [f"{align.replace('_', '-')} if the two differ", *(mark(align in b.limits.alignments) for b in every)]
        for align in ("top_left", "bottom_right")
    ]
    features = [[words, *(mark(name in b.limits.features) for b in every)] for name, words in FEATURES.items()]
    return f"""# Features by backend

What each backend declares. A feature that a backend does not declare is refused with a reason, never approximated.
"yes" is necessary, not sufficient: a backend also has rules about combinations, versions and sizes, and
`undivided.explain` answers for one exact problem. [Selection](../learn/selection.md#the-backends) says what each
backend is. No GPU backend has run on a GPU yet.

## Limits

{_table(["", *names], limits)}

## Masks that run natively

{_table(["", *names], masks + alignments)}

## Options and results

{_table(["", *names], features)}

*This page is generated from each backend's `Limits`: `scripts/docs --write`.*
"""


def _capability(lowest: tuple[int, int] | None) -> str:
    return f"{lowest[0]}.{lowest[1]}" if lowest else "-"


PAGES: dict[str, Callable[[str], str]] = {"backends": backends}
