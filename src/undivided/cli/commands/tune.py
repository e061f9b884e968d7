"""``undivided tune``: measures and stores the fastest tiles of the Triton kernels on this GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.table import Table

from undivided.cli._options import DTYPES, Dtype, dtype_flag
from undivided.cli._paths import file_to_write
from undivided.cli._terminal import console, print_json, print_table, progress, table
from undivided.errors import InputError
from undivided.kernels.triton import config

if TYPE_CHECKING:
    from undivided.benchmarking.tuning import TuneResult


def tune(
    dtype: Annotated[list[Dtype] | None, dtype_flag("Dtype of queries, keys and values; default: bf16.")] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="Head size, 64, 128, 256 or 512; default: the first three.")
    ] = None,
    length: Annotated[int, typer.Option(min=16, help="Number of tokens of the measured sequence.")] = 4096,
    turns: Annotated[int, typer.Option(min=1, help="Timings per candidate.")] = 5,
    device: Annotated[str, typer.Option(help="The GPU.")] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Measure tile sizes of the Triton kernels on this GPU, and use the fastest from then on.

    The result is written to UNDIVIDED_TUNED, or to a file in your cache folder; delete the file to return to the
    default tiles. Tuning never starts by itself. All sizes together take tens of minutes, mostly for Triton to compile.
    """
    widths = head_dim or [64, 128, 256]
    for width in widths:
        if width not in config.WIDTHS:
            raise InputError("--head-dim", f"be one of {', '.join(map(str, config.WIDTHS))}", width)
    if not _is_here(device):
        raise InputError(
            "--device",
            "be a CUDA device of this machine",
            repr(device),
            hint="tune on the machine whose GPU will run the kernels",
        )
    file_to_write("UNDIVIDED_TUNED", config.tuned_path())
    from undivided.backends.triton.inputs import architecture
    from undivided.benchmarking.tuning import tune as measure

    dtypes = [DTYPES[one] for one in dtype or [Dtype.bf16]]
    with progress(3 * len(dtypes) * len(widths), as_json) as step:
        results = list(measure(device, dtypes, widths, length=length, turns=turns, step=step))
    path = config.remember(
        architecture(torch.device(device)), {(one.name, one.itemsize, one.width): one.tile for one in results}
    )
    if as_json:
        print_json({"file": str(path), "tiles": [_as_json(one) for one in results]})
        return
    screen = console()
    print_table(screen, _table(results))
    screen.print(str(path))


def _as_json(one: TuneResult) -> dict[str, Any]:
    return {
        "pass": one.name,
        "bits": 8 * one.itemsize,
        "head_dim": one.width,
        "tile": one.tile._asdict(),
        "seconds": one.seconds,
        "before": one.before,
        "right_candidates": one.tried,
    }


def _table(results: list[TuneResult]) -> Table:
    rows = table(
        "pass",
        "bits",
        "head size",
        "rows x keys",
        "warps",
        "stages",
        "time",
        "before",
        right=("bits", "head size", "warps", "stages", "time", "before"),
    )
    for one in results:
        rows.add_row(
            one.name,
            str(8 * one.itemsize),
            str(one.width),
            f"{one.tile.block_m} x {one.tile.block_n}",
            str(one.tile.warps),
            str(one.tile.stages),
            f"{1e6 * one.seconds:.0f} us",
            f"{1e6 * one.before:.0f} us",
        )
    return rows


def _is_here(device: str) -> bool:
    """Whether it is a GPU that PyTorch can use, or the CPU under Triton's interpreter."""
    try:
        parsed = torch.device(device)
    except RuntimeError:
        return False
    if parsed.type == "cpu":
        return config.is_interpreted()
    return parsed.type == "cuda" and (parsed.index or 0) < torch.cuda.device_count()
