"""Every argument of every public function, class and method, with values that it may not have."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from public_calls import CALLS
from torch import distributed
from wrong_value_checks import wrong_outcomes

import undivided
from undivided import benchmarking, cache, context_parallel, diagnosis, masks, nn, parallel, quantization, verification
from undivided.integrations import checkpoints, torch_sdpa
from undivided.parallel import plan as training_plan


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A process group of this process alone, which meshes need."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_value_is_an_input_error_and_changes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's and PyTorch's errors did not name the argument; some values were accepted and had no effect."""
    monkeypatch.chdir(tmp_path)  # some values are paths
    assert wrong_outcomes(CALLS[name]) == []


MODULES = {
    undivided: "",
    masks: "masks.",
    nn: "",
    cache: "",
    parallel: "parallel.",
    context_parallel: "",
    quantization: "quantization.",
    verification: "",
    benchmarking: "benchmarking.",
    diagnosis: "",
    checkpoints: "checkpoints.",
    torch_sdpa: "",
    training_plan: "",
}
RESULTS = {
    *("Decision", "Placement", "Plan", "benchmarking.Plan", "Traffic", "parallel.Checkpoint", "quantization.Quantized"),
    *("Report", "Row", "Diagnosis", "Entry", "Finding", "Replacement", "masks.Mask", "masks.NormalForm"),
    *("masks.Structure", "Axis", "Bytes", "MeshOption", "TrainingPlan", "InputError", "NoBackendError", "RankError"),
    *("quantization.Format", "CacheFullError"),
}
"""What the library returns or raises; nobody builds one by hand."""
INTERNAL = {
    # what `attention`, the caches and the layers call with requests that they have checked
    *("ContextParallel.attention", "ContextParallel.explain", "MultiheadAttention.check"),
    *(f"{layer}.whole_on_ranks" for layer in ("DotProductAttention", "MultiheadAttention", "TransformerLayer")),
    # what operators call, and backends for sizes that `Mask.check` has accepted
    *("Mask.flatten", "Mask.unflatten"),
    *(f"Mask.{name}" for name in "cached check normal_form resolved_align take with_padded_kv".split()),
    *(f"NormalForm.{name}" for name in "allowed counts covers hull shard tiles".split()),
    # arithmetic of `plan_training`, and results that are read
    *("Cluster.seconds", "Model.layer_parameters", "Entry.find", "InputError.as_also", "Report.of"),
    "CacheFullError.as_also",
}
"""Methods without an underscore that callers of the library do not need."""


def _public() -> Iterator[str]:
    for module, prefix in MODULES.items():
        for name in module.__all__:
            value = getattr(module, name)
            if not callable(value) or isinstance(value, masks.Mask):
                continue
            full = name if hasattr(undivided, name) and module is not masks else f"{prefix}{name}"
            if full not in RESULTS and _arguments(value):
                yield full
            if inspect.isclass(value):
                yield from (f"{name}.{method}" for method in _methods(value))


def _methods(owner: Any) -> Iterator[str]:
    for name in dir(owner):
        method = inspect.getattr_static(owner, name)
        defined = next((c for c in owner.__mro__ if name in c.__dict__), object)
        if name.startswith("_") or isinstance(method, property) or not defined.__module__.startswith("undivided"):
            continue
        if callable(getattr(owner, name)) and _arguments(getattr(owner, name)):
            yield name


def _arguments(function: Any) -> list[str]:
    try:
        return [name for name in inspect.signature(function).parameters if name != "self"]
    except ValueError:  # an exception of Python
        return []


def test_the_table_has_every_public_function_and_method_that_takes_arguments() -> None:
    public = set(_public())
    assert public - INTERNAL - {re.sub(" .*", "", name) for name in CALLS} == set()
    assert public >= INTERNAL


def test_a_value_that_ends_in_another_error_is_reported() -> None:
    """Without this, the table above could pass because it sees nothing."""
    from public_call_inputs import PublicCall

    def function(size: int) -> int:
        return size + 1

    outcomes = wrong_outcomes(lambda: PublicCall(function, {"size": 1}))
    assert "size=text: TypeError" in " ".join(outcomes)
    assert "size=1.5 is accepted as int" in outcomes

    class Owner:
        __module__ = "undivided.test"

        def __init__(self) -> None:
            self.size = 0

        def set(self, size: int) -> None:
            self.size = size
            undivided.alibi_slopes(size)

    def make() -> PublicCall:
        owner = Owner()
        return PublicCall(owner.set, {"size": 1}, owner)

    assert "size=text changed the object, then raised InputError" in wrong_outcomes(make)
    assert torch.is_tensor(undivided.alibi_slopes(1))
