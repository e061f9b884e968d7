"""``undivided plan --nodes``: the meshes of a described cluster, for a described model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from undivided._units import human
from undivided.cli._terminal import console, print_table, print_text, table
from undivided.errors import InputError
from undivided.parallel.plan import PRESETS, Cluster, MeshOption, Model, TrainingPlan, bytes_in, bytes_per_second

ROWS = 10

_cluster = partial(typer.Option, rich_help_panel="Cluster (with --nodes or --gpus)")
_model = partial(typer.Option, rich_help_panel="Model (with --nodes or --gpus)")


@dataclass(frozen=True)
class ClusterFlags:
    """The flags of a cluster."""

    nodes: Annotated[int | None, _cluster(help="Number of nodes.")] = None
    gpus: Annotated[int | None, _cluster(help="GPUs per node; default: 8.")] = None
    link: Annotated[str | None, _cluster(help="Network rate per GPU; default: 400gbit.")] = None
    intra: Annotated[str | None, _cluster(help="Rate per GPU within a node; default: 450GB/s.")] = None
    memory: Annotated[str | None, _cluster(help="Memory per GPU; default: 80GB.")] = None
    reserve: Annotated[
        str | None, _cluster(help="Memory per GPU for driver, buffers, fragmentation; default: 6GB.")
    ] = None

    @property
    def is_cluster(self) -> bool:
        """Whether a cluster is described."""
        return self.nodes is not None or self.gpus is not None

    def cluster(self, flops: float) -> Cluster:
        """The cluster."""
        values: dict[str, Any] = {"nodes": 1 if self.nodes is None else self.nodes}
        values["gpus"] = 8 if self.gpus is None else self.gpus
        for name, read in (("link", bytes_per_second), ("intra", bytes_per_second), ("memory", bytes_in)):
            if (text := getattr(self, name)) is not None:
                values[name] = read(f"--{name}", text)
        if self.reserve is not None:
            values["reserve"] = 0 if self.reserve.strip() == "0" else bytes_in("--reserve", self.reserve)
        return Cluster(flops=flops, **values)


@dataclass(frozen=True)
class ModelFlags:
    """The flags of a model, which change the sizes of a preset, and of the meshes to try."""

    model: Annotated[str | None, _model(help=f"{', '.join(PRESETS)}; default: 8b.")] = None
    layers: Annotated[int | None, _model(help="Number of layers.")] = None
    hidden: Annotated[int | None, _model(help="Features of the hidden states.")] = None
    ffn: Annotated[int | None, _model(help="Feed-forward features.")] = None
    vocabulary: Annotated[int | None, _model(help="Number of tokens.")] = None
    gated: Annotated[bool | None, _model("--gated/--plain", help="Gated feed-forward blocks.")] = None
    recompute: Annotated[bool | None, _model("--recompute/--keep", help="Recompute activations; default: both.")] = None
    data: Annotated[int | None, _model(help="Only meshes with this data axis.")] = None
    context: Annotated[int | None, _model(help="Only meshes with this context axis.")] = None
    tensor: Annotated[int | None, _model(help="Only meshes with this tensor axis.")] = None

    def sizes(self, heads: int | None, kv_heads: int | None, head_dim: int | None) -> Model:
        """The model: a preset with the given sizes."""
        name = self.model or "8b"
        if name not in PRESETS:
            raise InputError("--model", f"be one of {', '.join(PRESETS)}", repr(name), hint="or give the sizes")
        preset = PRESETS[name]
        sizes = {name: getattr(self, name) for name in ("layers", "hidden", "ffn", "vocabulary", "gated")}
        sizes |= {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        changed: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
        if heads is not None and kv_heads is None and heads % preset.kv_heads:
            changed["kv_heads"] = heads
        if head_dim is None and (self.hidden is not None or heads is not None):
            width, count = changed.get("hidden", preset.hidden), changed.get("heads", preset.heads)
            if count < 1 or width % count:
                raise InputError("--hidden", f"be a multiple of {count} heads, or be given with --head-dim", width)
            changed["head_dim"] = width // count
        return replace(preset, **changed)


def show_meshes(plan: TrainingPlan) -> None:
    """Print the table of meshes and the recommendation."""
    screen, cluster, model = console(), plan.cluster, plan.model
    screen.print(
        Text(
            f"{human(model.parameters)} parameters, {plan.batch} sequences of {plan.seq_len:,} tokens per step, "
            f"{cluster.nodes} nodes of {cluster.gpus} GPUs with {human(cluster.memory, 'B')}",
            "bold",
        )
    )
    columns = ("mesh", "context by", "recompute", "network", "intra", "memory", "longest", "step")
    rows = table(*columns, right=columns[3:])
    for option in plan.options[:ROWS]:
        style = "bold green" if option is plan.best else "" if option.fits else "dim"
        rows.add_row(*_cells(option), style=style)
    print_table(screen, rows, indent=0)
    more = f" The first {ROWS} of {len(plan.options)}." if len(plan.options) > ROWS else ""
    note = (
        "mesh: data x context x tensor ranks. network, intra: bytes that a rank sends per step between and within "
        f"nodes. memory: of a rank, of which {human(cluster.memory - cluster.reserve, 'B')} are available. longest: "
        f"tokens of a sequence that fit. step: an estimate at {human(cluster.flops, 'FLOP/s')}.{more}"
    )
    print_text(screen, note, "dim")
    if plan.best is None:
        _show_no_fit(plan)
        return
    print_text(screen, f"Recommended: {_reason(plan, plan.best)}", after=1)
    print_table(screen, _axes(plan.best))
    print_table(screen, _memory(plan.best), before=1)


def _show_no_fit(plan: TrainingPlan) -> None:
    option, cluster = plan.smallest, plan.cluster
    text = (
        f"No mesh fits {plan.seq_len:,} tokens: {option.mesh} needs least, {human(option.memory.total, 'B')} of "
        f"{human(cluster.memory - cluster.reserve, 'B')}."
    )
    longest = plan.longest
    if longest.longest:
        again = " with recomputed activations" if longest.recompute else ""
        text += f" {longest.longest:,} tokens fit on {longest.mesh}{again}."
    else:
        text += " Its parameters alone do not fit: use more GPUs."
    print_text(console(), text)


def _reason(plan: TrainingPlan, best: MeshOption) -> str:
    tokens = plan.batch * plan.seq_len / best.seconds
    text = f"{best.data} data x {best.context} context x {best.tensor} tensor ranks, {human(tokens)} tokens/s"
    if best.context > 1:
        text += f", context by {best.strategy} ({best.placement})"
    if best.recompute:
        text += ", recomputed activations"
    longest = plan.longest
    return f"{text}. Longest sequence on this cluster: {longest.longest:,} tokens on {longest.mesh}."


def _cells(option: MeshOption) -> tuple[str, ...]:
    return (
        option.mesh,
        option.strategy or "-",
        "yes" if option.recompute else "no",
        human(option.network, "B"),
        human(option.intra, "B"),
        human(option.memory.total, "B"),
        f"{option.longest:,}",
        f"{option.seconds:.3g} s",
    )


def _axes(best: MeshOption) -> Table:
    words = {
        "data": "parameters and gradients (data and context ranks)",
        "context": "keys, values and their gradients",
        "tensor": "hidden states",
    }
    rows = table("axis", "ranks", "sends", "bytes", "network", "time", right=("ranks", "bytes", "network", "time"))
    for axis in best.axes:
        row = (axis.name, str(axis.size), words[axis.name], human(axis.sent, "B"), human(axis.network, "B"))
        rows.add_row(*row, f"{axis.seconds:.3g} s")
    return rows


def _memory(best: MeshOption) -> Table:
    words = {
        "states": "parameters, gradients, Adam's moments: 16 B per parameter, shared",
        "parameters": "gathered parameters, gradients before they are scattered",
        "activations": "kept for the backward pass",
        "attention": "one layer at its fullest moment",
        "logits": "logits, their softmax and gradient",
    }
    rows = table("memory", "bytes", "what", right=("bytes",))
    for name, count in best.memory._asdict().items():
        rows.add_row(name, human(count, "B"), words[name])
    return rows


def mesh_facts(plan: TrainingPlan) -> dict[str, Any]:
    """The plan as plain values for JSON."""
    options = [
        {
            "mesh": {"data": one.data, "context": one.context, "tensor": one.tensor},
            "recompute": one.recompute,
            "strategy": one.strategy or None,
            "placement": one.placement or None,
            "micro_batches": one.micro_batches,
            "fits": one.fits,
            "seconds": one.seconds,
            "longest": one.longest,
            "network": one.network,
            "intra": one.intra,
            "memory": one.memory._asdict() | {"total": one.memory.total},
            "axes": [vars(axis) for axis in one.axes],
        }
        for one in plan.options
    ]
    return {
        "model": vars(plan.model) | {"parameters": plan.model.parameters},
        "cluster": vars(plan.cluster),
        "seq_len": plan.seq_len,
        "batch": plan.batch,
        "fits": plan.best is not None,
        "options": options,
    }
