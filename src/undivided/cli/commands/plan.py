"""``undivided plan``: what parallel training would send, compute and hold, before a cluster is rented."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from undivided import masks
from undivided._units import human
from undivided.cli._flags import flag_name, flags, refuse_together
from undivided.cli._options import DTYPES, Dtype, MaskFlags, dtype_flag
from undivided.cli._terminal import console, print_json, print_table, print_text, table
from undivided.cli.commands._plan_mesh import ClusterFlags, ModelFlags, mesh_facts, show_meshes
from undivided.context_parallel.plan import BANDWIDTH, COLUMNS, FLOPS, LEGEND, CachedStep, Plan, cached_step, cells
from undivided.context_parallel.plan import plan as make_plan
from undivided.errors import InputError
from undivided.parallel.plan import TrainingPlan, plan_training

WORLD, HEADS, HEAD_DIM, PAGE_SIZE = 8, 32, 128, 64
MAX_WORLD = 1024
"""Ranks: the time grows with their square, to more than 40 seconds at 1000."""


@dataclass(frozen=True)
class CallFlags:
    """The flags of an attention call over ranks; a plan for a cluster takes some of them."""

    world: Annotated[int | None, typer.Option(help=f"Number of ranks; default: {WORLD}.")] = None
    heads: Annotated[int | None, typer.Option(help=f"Number of query heads; default: {HEADS}, or the model's.")] = None
    kv_heads: Annotated[
        int | None, typer.Option(help="Number of key heads; default: that of query heads, or the model's.")
    ] = None
    head_dim: Annotated[int | None, typer.Option(help=f"Head size; default: {HEAD_DIM}, or the model's.")] = None
    value_dim: Annotated[int | None, typer.Option(help="Head size of the values; default: --head-dim.")] = None
    kv_len: Annotated[
        int | None, typer.Option(help="Number of keys, if they are not the same tokens as the queries.")
    ] = None
    cached: Annotated[
        int | None,
        typer.Option(help="Generation: SEQ_LEN new tokens per sequence over a cache with this many, paged over ranks."),
    ] = None
    page_size: Annotated[int | None, typer.Option(help=f"Tokens of a page, with --cached; default: {PAGE_SIZE}.")] = (
        None
    )
    batch: Annotated[
        int | None, typer.Option(help="Number of sequences; default: 1; with a cluster, per step, one per GPU.")
    ] = None
    dtype: Annotated[Dtype, dtype_flag("Dtype of q, k and v.")] = Dtype.bf16
    strategy: Annotated[
        str | None, typer.Option(help="Count only ring, all_gather, all_to_all or ring+all_to_all.")
    ] = None
    placement: Annotated[str | None, typer.Option(help="Count only zigzag, contiguous or balanced.")] = None
    tflops: Annotated[float, typer.Option(min=0.001, help="TFLOP/s that attention reaches on a rank.")] = FLOPS / 1e12
    gigabytes: Annotated[float, typer.Option(min=0.001, help="GB/s that a rank sends.")] = BANDWIDTH / 1e9
    by_rank: Annotated[
        bool, typer.Option("--by-rank", help="Also print pairs and bytes of every rank for the best option.")
    ] = False

    def refuse(self, flag: str, *names: str) -> None:
        """Refuse the fields of these names, together with another flag."""
        refuse_together(flag, {flag_name(name): getattr(self, name) for name in names})

    def ranks(self) -> int:
        """The number of ranks."""
        world = WORLD if self.world is None else self.world
        if world > MAX_WORLD:
            hint = f"undivided plan --nodes {-(-world // 8)} --gpus 8 plans the mesh of a cluster"
            raise InputError("--world", f"be at most {MAX_WORLD}: every pair of ranks is counted", world, hint)
        return world

    def sizes(self) -> dict[str, Any]:
        """The sizes of the call, as arguments."""
        return {
            "heads": HEADS if self.heads is None else self.heads,
            "head_dim": HEAD_DIM if self.head_dim is None else self.head_dim,
            "world": self.ranks(),
            "kv_heads": self.kv_heads,
            "value_dim": self.value_dim,
            "dtype": DTYPES[self.dtype],
            "batch": 1 if self.batch is None else self.batch,
        }


@flags(mask_flags=MaskFlags, cluster=ClusterFlags, model=ModelFlags, call=CallFlags)
def plan(
    mask_flags: MaskFlags,
    cluster: ClusterFlags,
    model: ModelFlags,
    call: CallFlags,
    seq_len: Annotated[
        int | None,
        typer.Argument(
            help="Number of tokens of the whole sequence; with a cluster, 8192 by default.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Count the bytes sent, the work and the memory of every rank, before anything runs.

    With SEQ_LEN: attention over ranks, for each strategy and placement; with --cached, a step of generation over paged
    ranks. With --nodes or --gpus: training of a model, for each mesh of data, context and tensor ranks. Exit code 1 if
    no mesh fits into the memory.

    Example: undivided plan 1048576 --mask 'window(4095, 0)' --world 64 --kv-heads 8

    Example: undivided plan 32768 --nodes 16 --gpus 8 --link 400gbit --memory 141GB --model 70b
    """
    if cluster.is_cluster:
        meshes = _meshes(8192 if seq_len is None else seq_len, mask_flags, cluster, model, call)
        if as_json:
            print_json(mesh_facts(meshes))
        else:
            show_meshes(meshes)
        raise typer.Exit(0 if meshes.best else 1)
    _refuse_cluster_options(cluster, model)
    if seq_len is None:
        hint = "undivided plan 1048576 --world 8, or undivided plan --nodes 2 --gpus 8"
        raise InputError("SEQ_LEN", "be given, or a cluster", "none", hint)
    if call.cached is not None:
        _show_cached(_cached_steps(seq_len, call.cached, call), seq_len, call.cached, as_json)
        return
    result = _strategies(seq_len, mask_flags, call)
    if as_json:
        print_json(_facts(result, call.by_rank))
    else:
        speeds = f"{call.tflops:g} TFLOP/s and {call.gigabytes:g} GB/s per rank (--tflops, --gigabytes)"
        _show(result, speeds, call.by_rank)


def _meshes(
    seq_len: int, mask_flags: MaskFlags, cluster: ClusterFlags, model: ModelFlags, call: CallFlags
) -> TrainingPlan:
    """The meshes of a cluster that train a model."""
    call.refuse("--nodes, --gpus", "world", "kv_len", "value_dim", "cached", "page_size", "by_rank")
    mask = mask_flags.build(seq_len, seq_len)
    return plan_training(
        model.sizes(call.heads, call.kv_heads, call.head_dim),
        cluster.cluster(call.tflops * 1e12),
        seq_len,
        call.batch,
        masks.causal() if mask is None and mask_flags.mask is None else mask,
        DTYPES[call.dtype],
        recompute=model.recompute,
        data=model.data,
        context=model.context,
        tensor=model.tensor,
        strategy=call.strategy,  # type: ignore[arg-type]
        placement=call.placement or "zigzag",  # type: ignore[arg-type]
    )


def _cached_steps(seq_len: int, cached: int, call: CallFlags) -> list[CachedStep]:
    """A step of generation with all new tokens on every rank, and one with a part of them on each."""
    sizes = call.sizes()
    call.refuse("--cached", "kv_len", "strategy", "placement", "by_rank")
    page = PAGE_SIZE if call.page_size is None else call.page_size
    return [cached_step(seq_len, cached, page_size=page, sharded=sharded, **sizes) for sharded in (False, True)]


def _strategies(seq_len: int, mask_flags: MaskFlags, call: CallFlags) -> Plan:
    """The strategies and placements of one call over ranks."""
    sizes = call.sizes()
    if call.page_size is not None:
        raise InputError("--page-size", "be given together with --cached", repr(call.page_size))
    return make_plan(
        seq_len,
        mask=mask_flags.build(seq_len, call.kv_len or seq_len),
        strategy=call.strategy,  # type: ignore[arg-type]
        placement=call.placement,  # type: ignore[arg-type]
        kv_len=call.kv_len,
        flops=call.tflops * 1e12,
        bandwidth=call.gigabytes * 1e9,
        **sizes,
    )


def _show_cached(steps: list[CachedStep], new: int, cached: int, as_json: bool) -> None:
    """Print what a step of generation sends, with all new tokens on every rank and with a part of them."""
    if as_json:
        print_json([asdict(step) | {"sent": step.sent} for step in steps])
        return
    screen = console()
    tokens = f"{new:,} new token{'' if new == 1 else 's'}"
    screen.print(Text(f"{tokens} per sequence over {cached:,} cached; one layer", "bold"))
    rows = table("new tokens on a rank", "queries", "keys, values", "results", "sent", "cache")
    for step in steps:
        sizes = (step.queries, step.keys, step.results, step.sent, step.cache)
        rows.add_row("its part (sharded=True)" if step.sharded else "all", *(human(size, "B") for size in sizes))
    print_table(screen, rows, indent=0)
    legend = "sent: by the rank that sends the most. cache: keys and values on the rank that holds the most."
    screen.print(Padding(Text(legend, "dim"), (1, 0, 0, 0)))


def _refuse_cluster_options(cluster: ClusterFlags, model: ModelFlags) -> None:
    """InputError if an option is given that only a plan for a cluster uses."""
    for name, value in (vars(cluster) | vars(model)).items():
        if value is not None:
            raise InputError(flag_name(name), "be given together with --nodes or --gpus", repr(value))


def _show(result: Plan, speeds: str, by_rank: bool) -> None:
    """Print the table of options and the recommendation. speeds: of the estimated times, for the legend."""
    screen = console()
    screen.print(Text(result.title, "bold"))
    rows = table(*COLUMNS)
    for option in result.options:
        rows.add_row(*cells(option), style="bold green" if option is result.best else None)
    print_table(screen, rows, indent=0)  # its columns fill 80 characters
    note = (
        f"{LEGEND} memory: peak of one layer's attention, both passes, without scratch memory of kernels. time: an "
        f"estimate for both passes, at {speeds}."
    )
    print_text(screen, note, "dim")
    print_text(screen, f"Recommended: {result.reason}")
    if by_rank:
        print_table(screen, _ranks(result), before=1)


def _ranks(result: Plan) -> Table:
    """A table of the best option with one row per rank."""
    names = ("rank", "pairs", "sent forward", "sent backward", "memory")
    rows = table(*names, right=names)
    best = result.best
    for rank, row in enumerate(zip(best.pairs, best.forward, best.backward, best.memory, strict=True)):
        rows.add_row(str(rank), *(f"{int(count):,}" for count in row))
    return rows


def _facts(result: Plan, by_rank: bool) -> dict[str, Any]:
    options = []
    for option in result.options:
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
    return {"title": result.title, "reason": result.reason, "options": options}
