"""The spans of a ring in a profiler's trace, and the example that draws them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import forked_processes
import torch

from undivided.context_parallel.exchange.profiles import PREFIX, profiled_round

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "22_trace_a_ring.py"


def test_the_keys_of_a_round_are_in_flight_while_the_round_before_is_computed(tmp_path: Path) -> None:
    done = forked_processes.run(EXAMPLE, str(tmp_path), "--ranks", "3", "--tokens", "240")
    assert done.returncode == 0, done.stderr
    ranks = [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("rank ")]
    assert ranks == ["rank 0", "rank 1", "rank 2"]  # Gloo of PyTorch 2.10 prints lines of its own
    events = json.loads((tmp_path / "ring.json").read_text())["traceEvents"]
    for rank in range(3):
        found = [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        for what in ("attend", "gradients"):
            assert {event["name"] for event in found if event["cat"] == what} == {
                f"{what}, round {n}" for n in range(3)
            }
        flights = [event for event in found if event["cat"] == "keys in flight"]
        assert [event["name"][-1] for event in flights] == ["1", "2", "1", "2"], "forward, then backward"
        for flight, what in zip(flights, ("attend", "attend", "gradients", "gradients"), strict=True):
            number = int(flight["name"][-1]) - 1
            pieces = [event for event in found if event["name"] == f"{what}, round {number}"]
            assert pieces
            assert flight["ts"] <= min(piece["ts"] for piece in pieces)
            assert flight["ts"] + flight["dur"] >= max(piece["ts"] + piece["dur"] for piece in pieces)
    names = {path.name for path in tmp_path.iterdir() if not path.name.startswith("store")}
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    assert names == {"ring.json", "ring.png"} if has_matplotlib else {"ring.json"}


def test_without_a_profiler_there_is_no_span() -> None:
    first = profiled_round("attend", 1)
    with torch.profiler.profile() as recorded:
        second = profiled_round("attend", 1)
        with first, second:
            pass
    assert type(first) is not type(second)
    assert [event.name for event in recorded.events()].count(f"{PREFIX}attend 1") == 1
