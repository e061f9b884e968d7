"""``undivided mask``: draws a mask."""

from __future__ import annotations

import operator
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.text import Text

from undivided import masks
from undivided.cli._flags import flags
from undivided.cli._options import MaskFlags
from undivided.cli._paths import file_to_write
from undivided.cli._terminal import console, print_json, shaded
from undivided.errors import InputError
from undivided.masks._drawing import LARGEST_PICTURE, check_format, natural_sizes, require_matplotlib

SIZED = frozenset({"lengths", "documents", "document_ids", "dense", "tree", "blocks"})
"""The parts from which the lengths of the sequences follow."""

MAX_ROWS = 1 << 24
"""Most rows of a mask that is drawn: their ranges take some gigabytes."""


@flags(mask_flags=MaskFlags)
def mask(
    mask_flags: MaskFlags,
    expression: Annotated[
        str | None, typer.Argument(help="Expression as in Python: 'causal() & documents([0, 3, 10])'.")
    ] = None,
    q_len: Annotated[int | None, typer.Option(min=1, help="Number of queries.")] = None,
    kv_len: Annotated[int | None, typer.Option(min=1, help="Number of keys; default: that of queries.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Number of batch elements.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write a picture (PNG) of the first batch element to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the key ranges of every row as JSON.")] = False,
) -> None:
    """Draw which queries may attend to which keys: rows are queries, columns are keys.

    Example: undivided mask 'window(3, 0) | sinks(1)' --q-len 12
    """
    if out is not None:
        file_to_write("--out", out)
        require_matplotlib("--out")
        check_format("--out", out)
    built, sizes = _build(mask_flags, expression, q_len, kv_len, batch)
    rows, queries, keys = sizes
    if as_json:
        print_json(_facts(built, rows, queries, keys))
    else:
        _show(built, rows, queries, keys)
    if out is not None:
        built.plot(queries, keys, out, batch=rows)
        if not as_json:
            console().print(f"written to {out}", markup=False, soft_wrap=True)


def _facts(built: masks.Mask, rows: int, queries: int, keys: int) -> dict[str, Any]:
    form = built.normal_form(rows, 1, queries, keys, "cpu")
    return {
        "mask": repr(built),
        "batch": rows,
        "q_len": queries,
        "kv_len": keys,
        "pairs": form.pairs,
        "share": form.pairs / max(rows * queries * keys, 1),
        "ranges": form.ranges.tolist(),
    }


def _show(built: masks.Mask, rows: int, queries: int, keys: int) -> None:
    screen, form = console(), built.normal_form(rows, 1, queries, keys, "cpu")
    share = form.pairs / max(rows * queries * keys, 1)
    screen.print(Text(repr(built), "bold"), soft_wrap=True)
    counted = f"{queries} queries, {keys} keys: {form.pairs:,} pairs allowed, {share:.1%}"
    screen.print(Text(counted), soft_wrap=True)
    is_small = max(queries, keys) <= LARGEST_PICTURE
    picture = built.draw(queries, keys, rows) if is_small else shaded(form)
    screen.print(Text(picture), soft_wrap=True)


def _build(
    mask_flags: MaskFlags, expression: str | None, q_len: int | None, kv_len: int | None, batch: int | None
) -> tuple[masks.Mask, tuple[int, int, int]]:
    """The mask, and (batch, queries, keys): as given, otherwise sizes that show its structure."""
    own = MaskFlags(mask=expression).build(0, 0) if expression else None

    def joined(queries: int, keys: int) -> masks.Mask:
        present = [part for part in (own, mask_flags.build(queries, keys)) if part is not None]
        if not present:
            raise InputError(
                "mask", "be given", "none", hint="undivided mask 'causal() & documents([0, 3, 10])', or --window 3,0"
            )
        return reduce(operator.and_, present)

    first = joined(0, 0)
    natural = natural_sizes(first)
    has_own = bool(first.kinds & SIZED)
    queries = q_len or (natural[2] if has_own or kv_len is None else kv_len)
    keys = kv_len or (natural[3] if has_own or q_len is None else q_len)
    batch = batch or natural[0]
    built = joined(queries, keys)  # --lengths are those of the queries too if there are as many queries as keys
    if batch * queries > MAX_ROWS:
        raise InputError("batch * queries", f"be at most {MAX_ROWS}", batch * queries, hint="--q-len, --batch")
    built.check(batch, 1, queries, keys, packed=False, device=torch.device("cpu"))
    return built, (batch, queries, keys)
