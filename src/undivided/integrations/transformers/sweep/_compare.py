"""One architecture: outputs and gradients with "undivided" compared with those with "eager", case by case."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undivided.integrations.transformers import _weights
from undivided.integrations.transformers.sweep._inputs import CASES, LENGTH, Inputs, candidates, real_tokens
from undivided.integrations.transformers.sweep._models import VARIANTS, Unbuildable, Variant, build

TOLERANCE = 2e-4
"""Allowed error in float32, relative to a tensor's norm."""
AMPLIFIED = 2e-2
"""The same for models that amplify rounding errors; they must agree to `EXACT` in float64."""
EXACT = 1e-9
FLOOR = 1e-5
"""Relative to the norm of all gradients: a smaller gradient is rounding noise around 0, such as that of a key's
bias."""


class ModelOutcome(NamedTuple):
    """``state``: equal, differs, fails, unused (no attention ran on Undivided) or unbuilt (the library's own limit)."""

    state: str
    detail: str = ""


def compare(model_type: str) -> dict[str, ModelOutcome]:
    """The outcome of each case of an architecture; ``{"": ModelOutcome}`` if there is no model or no input for it.

    >>> from undivided.integrations.transformers import register
    >>> register()
    >>> {case: outcome.state for case, outcome in compare("llama").items()}
    {'none': 'equal', 'right': 'equal', 'left': 'equal', 'packed': 'equal', 'weights': 'equal'}
    """
    first, unused = None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for variant in VARIANTS:
            if unused and variant.layers == VARIANTS[0].layers:
                continue  # with more layers, one may have attention
            try:
                outcomes = _cases(model_type, variant)
            except Exception as error:  # the library raises many kinds for sizes that do not fit together
                first = first or ModelOutcome("unbuilt", _in_a_line(error))
                if isinstance(error, Unbuildable | ImportError):
                    break
                continue
            if any(outcome.state != "unused" for outcome in outcomes.values()):
                return outcomes
            unused = unused or outcomes
    return unused or {"": first or ModelOutcome("unbuilt")}


def _in_a_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, Unbuildable) else f"{type(error).__name__}: {text}"


def _cases(model_type: str, variant: Variant) -> dict[str, ModelOutcome]:
    eager, ours = build(model_type, "eager", variant), None
    outcomes: dict[str, ModelOutcome] = {}
    seen: list[str] = []
    for case in CASES:
        try:
            inputs, expected = find_inputs(eager, case)
        except Exception:
            if case == "none":
                raise
            continue
        case_key = repr({name: value for name, value in inputs.items() if not _is_noise(value)})
        if case_key in seen:  # the model has no argument for the mask or the positions of this case
            continue
        seen.append(case_key)
        try:
            ours = ours or build(model_type, "undivided", variant)
            outcomes[case] = _outcome(eager, ours, inputs, case, expected)
        except Exception as error:
            outcomes[case] = ModelOutcome("fails", _in_a_line(error))
        if outcomes[case].state == "unused":
            break
    return outcomes


def _is_noise(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _outcome(eager: nn.Module, ours: nn.Module, inputs: Inputs, case: str, expected: dict[str, Tensor]) -> ModelOutcome:
    with count_calls() as calls:
        actual = step(ours, inputs, case)
    words = difference(actual, expected, TOLERANCE)
    if not words:
        return ModelOutcome("equal" if calls else "unused")
    if not difference(actual, expected, AMPLIFIED):
        exact = {name: v.double() if _is_noise(v) else v for name, v in inputs.items()}
        try:
            actual, expected = (step(one.double(), exact, case) for one in (ours, eager))
        except RuntimeError:  # a model that creates float32 tensors itself
            return ModelOutcome("differs", words)
        finally:
            ours.float(), eager.float()
        if not difference(actual, expected, EXACT):
            return ModelOutcome("equal", f"in float64; in float32 {words}")
    return ModelOutcome("differs", words)


@contextlib.contextmanager
def count_calls() -> Iterator[list[None]]:
    """A list with one entry per call of attention in the ``with`` block, with gradients: without them, layers run what
    `_repeated` has prepared."""
    calls: list[None] = []
    module = vars(_weights)
    attend = module["attend"]

    def counting(*args: Any, **options: Any) -> Any:
        calls.append(None)
        return attend(*args, **options)

    module["attend"] = counting
    try:
        yield calls
    finally:
        module["attend"] = attend


def output_tensors(value: Any, label: str = "out") -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors of a model's output, with names; caches are left out."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield label, value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            if "past_key_values" not in name and "cache" not in name:
                yield from output_tensors(one, str(name))
    elif isinstance(value, list | tuple):
        for n, one in enumerate(value):
            yield from output_tensors(one, f"{label}[{n}]")


def step(network: nn.Module, inputs: Inputs, case: str) -> dict[str, Tensor]:
    """The outputs of the real tokens, and the gradients of their sum with random weights."""
    torch.manual_seed(0)
    real = real_tokens(case) if "attention_mask" in inputs else None
    results: dict[str, Tensor] = {}
    loss = torch.zeros(())
    generator = torch.Generator().manual_seed(2)
    for label, tensor in output_tensors(network(**inputs)):
        if real is not None and tensor.shape[0] == len(real) and tensor.dim() > 1 and tensor.shape[1] >= LENGTH:
            keep = torch.nn.functional.pad(real.bool(), (0, tensor.shape[1] - LENGTH), value=True)
            tensor = tensor[keep]  # tokens that a model adds come after the text
        results[label] = tensor
        if tensor.requires_grad:
            loss = loss + (tensor * torch.randn(tensor.shape, generator=generator).to(tensor)).sum()
    if loss.requires_grad:
        weights = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, [p for _, p in weights], allow_unused=True)
        results |= {f"grad {name}": g for (name, _), g in zip(weights, gradients, strict=True) if g is not None}
    return {name: tensor.detach() for name, tensor in results.items()}


def difference(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> str:
    """A description of the tensor that differs most; empty if all agree."""
    if actual.keys() != expected.keys():
        return f"other results: {sorted(actual.keys() ^ expected.keys())[:3]}"
    scale = max((float(t.norm()) for name, t in expected.items() if name.startswith("grad")), default=0.0)
    worst, words = 1.0, ""
    for name, other in expected.items():
        one, size = actual[name], float(other.double().norm())
        if one.shape != other.shape:
            return f"{name}: shape {list(one.shape)} instead of {list(other.shape)}"
        floor = FLOOR * tolerance / TOLERANCE * (scale if name.startswith("grad") else 1e-2)
        error = float((one.double() - other.double()).norm())
        ratio = error / (tolerance * size + floor + 1e-30)
        if not ratio <= worst:
            worst, words = ratio, f"{name}: {error / max(size, 1e-30):.1e} of its norm"
    return words


def find_inputs(network: nn.Module, case: str) -> tuple[Inputs, dict[str, Tensor]]:
    """(inputs, results) of the first inputs for which the model runs and returns finite results."""
    first: Exception | None = None
    for inputs in candidates(network, case):
        try:
            results = step(network, inputs, case)
        except Exception as error:
            first = first or error
            continue
        if results and all(bool(t.isfinite().all()) for t in results.values()):
            return inputs, results
        first = first or ValueError("eager's results are not finite")
    raise first or Unbuildable("no inputs are known for its signature")
