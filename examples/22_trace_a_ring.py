"""What overlaps in a ring of ranks: transfers of keys and attention, as a Chrome trace and a picture.

    python examples/22_trace_a_ring.py [FOLDER] [--ranks 4] [--tokens 8192]

Each rank is a process; they communicate over gloo. torch.profiler records the spans that context parallelism names
(`undivided::attend 1`, ...). ring.json has the traces of all ranks, for https://ui.perfetto.dev or chrome://tracing.
ring.png shows one call, forward and backward (it needs matplotlib): per rank, attention above and transfers below. A
transfer runs from the moment it is posted until its keys are needed, or until they arrive if that is later; then the
rank waits, which is drawn in red.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn
from torch.profiler import ProfilerActivity, profile

import undivided
from undivided import masks

PREFIX = "undivided::"
BUSY = ("attend", "gradients")


def main():
    parser = argparse.ArgumentParser(description="Trace a ring of ranks.")
    parser.add_argument("folder", nargs="?", type=Path, help="default: a new one for temporary files")
    parser.add_argument("--ranks", type=int, default=2, choices=range(2, 9))
    parser.add_argument("--tokens", type=int, default=2048)
    given = parser.parse_args()
    if given.tokens < 2 * given.ranks:
        parser.error(f"--tokens must be at least twice the ranks, got {given.tokens}")
    given.folder = given.folder or Path(tempfile.mkdtemp(prefix="undivided-ring-"))
    given.folder.mkdir(parents=True, exist_ok=True)
    spawn(rank_main, (given.ranks, given.tokens, given.folder), given.ranks)
    traces = [json.loads((given.folder / f"rank{rank}.json").read_text()) for rank in range(given.ranks)]
    spans = [read_spans(trace) for trace in traces]
    start = min(begin for own in spans for _, _, begin, _ in own)
    write_trace(given.folder / "ring.json", spans, start)
    for rank in range(given.ranks):
        (given.folder / f"rank{rank}.json").unlink()
    print(
        f"{given.tokens} tokens on {given.ranks} ranks, causal, zigzag; milliseconds of one call, forward and backward"
    )
    for rank, own in enumerate(spans):
        computed = sum(length for what, _, _, length in own if what in BUSY)
        waited = sum(length for what, number, _, length in own if what == "wait for keys" and number)
        in_flight = sum(length for _, _, _, length in flights(own))
        print(
            f"rank {rank}: attention {computed / 1e3:.1f}, waited for keys {waited / 1e3:.1f}, "
            f"{1 - waited / in_flight:.0%} of the time that keys were in flight it computed"
        )
    print(f"written {given.folder / 'ring.json'}")
    draw(given.folder / "ring.png", spans, start)


def rank_main(rank, ranks, tokens, folder):
    """One call after a first one, recorded."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / f'store-{os.getppid()}'}", rank=rank, world_size=ranks
    )
    context = undivided.ContextParallel(dist.group.WORLD, "ring").bind(tokens, mask=masks.causal())
    torch.manual_seed(rank)
    rows = context.positions(within_documents=False).numel()
    q, k, v = (torch.randn(1, rows, heads, 64, requires_grad=True) for heads in (8, 2, 2))

    def step():
        out = undivided.attention(q, k, v, layout="bshd", mask=masks.causal(), context_parallel=context)
        out.sum().backward()

    step()
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    recorded.export_chrome_trace(str(folder / f"rank{rank}.json"))
    dist.barrier()
    dist.destroy_process_group()


def read_spans(trace):
    """(what, round, start, length) of a rank's spans, in microseconds, in the order of time."""
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event["name"].startswith(PREFIX) and event.get("cat") == "user_annotation":
            what, number = event["name"].removeprefix(PREFIX).rsplit(" ", 1)
            found.append((what, int(number), base + event["ts"], event["dur"]))
    return sorted(found, key=lambda span: span[2])


def flights(spans):
    """Keys in flight: from the end of their post to the end of the wait for them."""
    posted = {}
    for what, number, begin, length in spans:
        if what == "post keys" and number:  # the first round has the rank's own keys
            posted[number] = begin + length
        elif what == "wait for keys" and number in posted:
            begun = posted.pop(number)
            yield "keys in flight", number, begun, begin + length - begun


def write_trace(path, spans, start):
    """All ranks in one trace: a process per rank, with a row for computing and one for transfers."""
    events = []
    for rank, own in enumerate(spans):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for row, name in enumerate(("compute and wait", "transfer")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}})
        for row, part in enumerate((own, flights(own))):
            for what, number, begin, length in part:
                where = {"pid": rank, "tid": row, "ts": begin - start, "dur": length}
                events.append({"ph": "X", "name": f"{what}, round {number}", "cat": what, **where})
    path.write_text(json.dumps({"traceEvents": events}) + "\n")


def draw(path, spans, start):
    """The picture."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: pip install 'undivided[plot]'")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(11, 1.2 + 0.9 * len(spans)), layout="constrained")
    colours = [pyplot.get_cmap("tab10").colors[number] for number in (0, 1, 2, 4, 5, 8, 9)]  # red is for waits
    for rank, own in enumerate(spans):
        for what, number, begin, length in own:
            if what in BUSY or what.startswith("wait"):
                colour = "crimson" if what.startswith("wait") else colours[number % len(colours)]
                axes.broken_barh([((begin - start) / 1e3, length / 1e3)], (rank - 0.38, 0.42), color=colour, lw=0)
            if what in BUSY and length > 300:
                centre = ((begin - start + length / 2) / 1e3, rank - 0.17)
                axes.annotate(f"{number}", centre, color="white", ha="center", va="center", fontsize=8)
        for _, number, begin, length in flights(own):
            box = [((begin - start) / 1e3, length / 1e3)]
            axes.broken_barh(
                box, (rank + 0.1, 0.2), facecolor=(*colours[number % len(colours)], 0.35), edgecolor="grey", lw=0.5
            )
    axes.set_yticks(range(len(spans)), [f"rank {rank}" for rank in range(len(spans))])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(
        "A ring, forward and backward: attention with the keys of each round, and keys in flight", fontsize=11
    )
    legend = [
        Patch(color=colours[1], label="attention and its gradients (number: round)"),
        Patch(color="crimson", label="wait"),
    ]
    legend.append(Patch(facecolor=(*colours[1], 0.35), edgecolor="grey", label="keys in flight"))
    axes.legend(handles=legend, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    print(f"written {path}")


if __name__ == "__main__":
    main()
