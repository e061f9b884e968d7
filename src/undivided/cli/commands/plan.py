"""``undivided plan``: what context parallelism would send, compute and hold, before a cluster is rented."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from undivided.cli._flags import flags
from undivided.cli._options import DTYPES, Dtype, MaskFlags
from undivided.cli._terminal import console, print_json, print_table, table
from undivided.context_parallel.plan import BANDWIDTH, COLUMNS, FLOPS, LEGEND, Plan, cells
from undivided.context_parallel.plan import plan as counted


@flags(said=MaskFlags)
def plan(
    said: MaskFlags,
    seq_len: Annotated[int, typer.Argument(help="Tokens of the whole sequence.")],
    world: Annotated[int, typer.Option(help="Ranks.")] = 8,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(help="Key heads; as many as query heads if not given.")] = None,
    head_dim: Annotated[int, typer.Option(help="Head size.")] = 128,
    value_dim: Annotated[int | None, typer.Option(help="Head size of the values, where it differs.")] = None,
    kv_len: Annotated[int | None, typer.Option(help="Keys, where they are other tokens than the queries.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences side by side.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Of q, k and v.")] = Dtype.bf16,
    strategy: Annotated[str | None, typer.Option(help="Only ring, all_gather, all_to_all or ring+all_to_all.")] = None,
    placement: Annotated[str | None, typer.Option(help="Only zigzag, contiguous or balanced.")] = None,
    tflops: Annotated[float, typer.Option(min=0.001, help="TFLOP/s that attention reaches on a rank.")] = FLOPS / 1e12,
    gigabytes: Annotated[float, typer.Option(min=0.001, help="GB/s that a rank sends at.")] = BANDWIDTH / 1e9,
    by_rank: Annotated[
        bool, typer.Option("--by-rank", help="Pairs and bytes of every rank, of the best option.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Bytes sent, work and memory of every rank, for each strategy and placement. Counts, and runs nothing.

    Example: undivided plan 1048576 --mask 'window(4095, 0)' --world 64 --kv-heads 8
    """
    found = counted(
        seq_len,
        heads,
        head_dim,
        said.build(seq_len, kv_len or seq_len),
        world,
        strategy,  # type: ignore[arg-type]
        placement,  # type: ignore[arg-type]
        kv_len=kv_len,
        kv_heads=kv_heads,
        value_dim=value_dim,
        batch=batch,
        dtype=DTYPES[dtype],
        flops=tflops * 1e12,
        bandwidth=gigabytes * 1e9,
    )
    if as_json:
        print_json(_facts(found, by_rank))
        return
    screen = console()
    screen.print(Text(found.title, "bold"))
    made = table(*COLUMNS)
    for option in found.options:
        made.add_row(*cells(option), style="bold green" if option is found.best else None)
    print_table(screen, made, indent=0)  # its ten columns fill 80
    said_of = (
        f"{LEGEND} memory: of a layer's attention, forward and backward, without kernels' scratch. "
        f"time: an estimate, forward and backward, at {tflops:g} TFLOP/s and {gigabytes:g} GB/s a "
        f"rank (--tflops, --gigabytes)."
    )
    screen.print(Padding(Text(said_of, "dim"), (0, 2), expand=False))
    screen.print(Padding(Text(f"Recommended: {found.reason}"), (0, 2), expand=False))
    if by_rank:
        print_table(screen, _ranks(found), before=1)


def _ranks(found: Plan) -> Table:
    """The best option, rank by rank."""
    names = ("rank", "pairs", "sent forward", "sent backward", "memory")
    made = table(*names, right=names)
    best = found.best
    for rank, row in enumerate(zip(best.pairs, best.forward, best.backward, best.memory, strict=True)):
        made.add_row(str(rank), *(f"{int(count):,}" for count in row))
    return made


def _facts(found: Plan, by_rank: bool) -> dict[str, Any]:
    options = []
    for option in found.options:
        counts = {
            "pairs": option.pairs,
            "exchanges": option.steps,
            "forward": option.forward,
            "backward": option.backward,
            "inference": option.inference,
            "memory": option.memory,
        }
        facts = {
            "strategy": option.strategy,
            "placement": option.placement,
            "mesh": list(option.shape),
            "balance": option.balance,
            "seconds": option.seconds,
        }
        options.append(facts | {name: t.tolist() if by_rank else int(t.max()) for name, t in counts.items()})
    return {"title": found.title, "reason": found.reason, "options": options}
