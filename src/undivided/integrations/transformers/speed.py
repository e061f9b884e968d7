"""The time of a whole model with each attention implementation: prefill, decoding and a training step.

``python -m undivided.integrations.transformers.speed`` builds a Llama with random weights and times it with "eager",
"sdpa" and "undivided", interleaved in one run. A figure is the minimum over the turns, because other load on a machine
only adds time. The results of the three implementations are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from undivided.arguments.tensors import dtype_name
from undivided.integrations.transformers import register
from undivided.integrations.transformers._names import cache_name

IMPLEMENTATIONS = ("eager", "sdpa", "undivided")
Clock = Callable[[], float]
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of the model, and the lengths of its inputs in tokens."""

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 2
    prefill: int = 4096
    cached: int = 4096
    steps: int = 16
    training: int = 2048


@dataclass(frozen=True)
class SpeedRow:
    """One kind of work in one dtype: the minimum time of each implementation, in seconds."""

    work: str
    dtype: str
    seconds: dict[str, float]

    def speedup(self, other: str) -> float:
        """The time of another implementation, divided by that of undivided."""
        return self.seconds[other] / self.seconds["undivided"]


def measure(
    sizes: ModelSizes, turns: int, clock: Clock = time.perf_counter, step: Callable[[str], None] = lambda _: None
) -> list[SpeedRow]:
    """The times of prefill, decoding and a training step in fp32 and bf16.

    Args:
        sizes: of the model and its inputs.
        turns: number of timed runs of each implementation.
        clock: returns seconds; ``time.process_time`` excludes other processes of a busy machine, and sums over threads.
        step: called with the name of each piece of work before it starts.

    Raises:
        RuntimeError: an implementation's results are too far from the exact ones; nothing is timed then.
    """
    register()
    rows = []
    for dtype in DTYPES:
        model = _model(sizes, dtype)
        _compare(model)
        for work, make in {"prefill": _prefill, "decoding": _decoding, "training step": _training}.items():
            name = dtype_name(dtype)
            step(f"{work}, {name}")
            rows.append(SpeedRow(work, name, _minimum_seconds(model, make(model, sizes), turns, clock)))
    return rows


def _model(sizes: ModelSizes, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden * 11 // 4,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.cached + sizes.prefill,
    )
    model: Any = LlamaForCausalLM(config)
    return model.to(dtype)


def _text(length: int) -> Tensor:
    return torch.randint(3, 4096, (1, length), generator=torch.Generator().manual_seed(0))


def _compare(model: Any) -> None:
    """Check the results: an error against float64 may be at most twice that of eager in the model's dtype."""
    text, dtype = _text(256), model.dtype
    results: dict[str, Tensor] = {}
    with torch.no_grad():
        for name in IMPLEMENTATIONS:
            model.set_attn_implementation(name)
            results[name] = model(text).logits.double()
        model.set_attn_implementation("eager")
        exact = model.double()(text).logits
        model.to(dtype)
    errors = {name: float((result - exact).norm() / exact.norm()) for name, result in results.items()}
    wrong = [name for name, error in errors.items() if not error <= 2 * errors["eager"]]
    if wrong:
        raise RuntimeError(f"errors of the logits {errors}: {wrong} exceed twice eager's, so nothing is timed")


def _minimum_seconds(model: Any, work: Callable[[], object], turns: int, clock: Clock) -> dict[str, float]:
    """The minimum time of each implementation in seconds, interleaved."""
    minimum = dict.fromkeys(IMPLEMENTATIONS, float("inf"))
    for turn in range(turns + 1):
        for name in IMPLEMENTATIONS:
            model.set_attn_implementation(name)
            start = clock()
            work()
            if turn:  # the first run fills caches and starts threads
                minimum[name] = min(minimum[name], clock() - start)
    return minimum


def _prefill(model: Any, sizes: ModelSizes) -> Callable[[], object]:
    """The forward pass of a prompt, with the logits of the last token."""
    text = _text(sizes.prefill)

    @torch.inference_mode()
    def work() -> object:
        return model(text, use_cache=True, logits_to_keep=1)

    model.eval()
    return work


def _decoding(model: Any, sizes: ModelSizes) -> Callable[[], object]:
    """Single tokens with a cache, which is cropped afterwards."""
    model.eval()
    name = cache_name(model)
    with torch.inference_mode():
        cache = model(_text(sizes.cached), use_cache=True, logits_to_keep=1)[name]
    token = _text(1)

    @torch.inference_mode()
    def work() -> None:
        for _ in range(sizes.steps):
            model(token, use_cache=True, **{name: cache})
        cache.crop(-sizes.steps)

    return work


def _training(model: Any, sizes: ModelSizes) -> Callable[[], object]:
    """Forward and backward of a text, without the optimizer step, which is the same for all."""
    model.train()
    text = _text(sizes.training)

    def work() -> None:
        model.zero_grad()
        model(text, labels=text, use_cache=False).loss.backward()

    return work


def table(rows: Sequence[SpeedRow]) -> str:
    """The rows as a table in Markdown."""
    lines = [
        "| | dtype | eager, s | sdpa, s | undivided, s | speed-up over eager | speed-up over sdpa |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        seconds = " | ".join(f"{row.seconds[name]:.3f}" for name in IMPLEMENTATIONS)
        lines.append(
            f"| {row.work} | {row.dtype} | {seconds} | {row.speedup('eager'):.2f} | {row.speedup('sdpa'):.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table. The defaults take a few minutes on two cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="timed runs of each implementation (5)")
    parser.add_argument(
        "--processor-time", action="store_true", help="time.process_time, for one thread on a busy machine"
    )
    for name, value in vars(ModelSizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"({value})")
    options = vars(parser.parse_args(arguments))
    turns = options.pop("turns")
    clock = time.process_time if options.pop("processor_time") else time.perf_counter
    sizes = ModelSizes(**options)
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads, {platform.machine()}; {sizes}")
    print(f"seconds by {clock.__name__}, the minimum of {turns} runs")
    print(table(measure(sizes, turns, clock)))


if __name__ == "__main__":
    main()
