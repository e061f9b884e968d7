"""`parallelize` on ranks whose arguments, layers or groups differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gloo_ranks
import pytest
import torch
from gloo_ranks import run_ranks
from tensor_layers import BATCH, HIDDEN, LENGTH
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from undivided import ContextParallel, InputError, TransformerLayer
from undivided.context_parallel import RankError
from undivided.parallel import parallelize, rank_errors


def make_layer(**options: Any) -> TransformerLayer:
    sizes = {"hidden_size": HIDDEN, "ffn_hidden_size": 64, "num_attention_heads": 4, "hidden_dropout": 0.0}
    return TransformerLayer(**sizes | {"attn_input_format": "bshd"} | options)


def hooked() -> TransformerLayer:
    layer = make_layer()
    layer.self_attention.proj.bias.register_hook(lambda gradient: gradient)
    return layer


def frozen() -> TransformerLayer:
    layer = make_layer()
    layer.self_attention.proj.bias.requires_grad_(False)
    return layer


DIFFERENCES: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], torch.nn.Module], dict[str, Any], str]] = {
    "bias": (make_layer, lambda: make_layer(bias=False), {}, "module.* must be the same on every rank, got "),
    "feed-forward": (make_layer, lambda: make_layer(ffn_hidden_size=48), {}, "module.* must be the same on every rank"),
    "dtype": (
        make_layer,
        lambda: make_layer().to(torch.bfloat16),
        {},
        r"module\.self_attention\.\S+ must be the same on every rank, got \[[\d, ]+\], torch\.float32, .* on rank 0; "
        r"\[[\d, ]+\], torch\.bfloat16",
    ),
    "layers": (
        lambda: torch.nn.ModuleList([make_layer()]),
        lambda: torch.nn.ModuleList([make_layer(), make_layer()]),
        {},
        r"the layers of module must be the same on every rank, got 2: 0 .* on rank 0; 4: 0 ",
    ),
    "order": (
        lambda: torch.nn.ModuleDict({"a": make_layer(), "b": make_layer()}),
        lambda: torch.nn.ModuleDict({"b": make_layer(), "a": make_layer()}),
        {},
        r"the layers of module must be the same on every rank, got 4: a .* on rank 0; 4: b ",
    ),
    "heads": (
        make_layer,
        lambda: make_layer(num_attention_heads=8),
        {},
        r"module.* must be the same on every rank, got .*\b4\b.* on rank 0; .*\b8\b",
    ),
    "frozen": (
        make_layer,
        frozen,
        {},
        r"module\.self_attention\.proj\.bias must be the same .*, requires_grad on rank",
    ),
    "refused": (make_layer, hooked, {}, "another rank refused its arguments: rank 1: module must have no hooks on"),
    "sequence_parallel": (
        make_layer,
        make_layer,
        {"sequence_parallel": True},
        "sequence_parallel must be the same on every rank, got False on rank 0; True on rank 1",
    ),
    "check": (
        make_layer,
        make_layer,
        {"check": False},
        "check must be the same on every rank, got True on rank 0; False on rank 1",
    ),
}


def errors_of_different_ranks() -> list[tuple[str, str, bool]]:
    """(name, error or "", whether the parameters are still plain) of each difference."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tensor",))
    found = []
    for name, (first, second, options, _) in DIFFERENCES.items():
        is_first = distributed.get_rank() == 0
        module, text = first() if is_first else second(), ""
        try:
            parallelize(module, mesh, **{} if is_first else options)
        except (InputError, RankError) as error:
            text = str(error)
        found.append((name, text, not any(isinstance(parameter, DTensor) for parameter in module.parameters())))
    layer = parallelize(make_layer(), mesh)  # the next call works
    found.append(("no difference", "", layer(torch.ones(BATCH, LENGTH, HIDDEN)).shape == (BATCH, LENGTH, HIDDEN)))
    return found


def test_ranks_with_other_layers_or_arguments_raise_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo ended a process, ranks waited until the timeout, or got parts of different sizes without an error."""
    monkeypatch.setattr(gloo_ranks, "TIMEOUT", 5.0)
    (answers,) = run_ranks(2, errors_of_different_ranks, patience=100.0)
    for rank, found in enumerate(answers):
        assert isinstance(found, list), found
        assert [name for name, *_ in found] == [*DIFFERENCES, "no difference"]
        for name, text, is_unchanged in found:
            assert is_unchanged, name
            if name in DIFFERENCES:
                expected = "module must have no hooks on" if (name, rank) == ("refused", 1) else DIFFERENCES[name][3]
                assert re.match(expected, text), f"{name}: {text}"


def errors_of_other_processes() -> list[str]:
    """The errors of what gets a mesh or a group without this process; of process 0, which is in them, nothing."""
    mesh, group = DeviceMesh("cpu", [0]), distributed.new_group([0])
    uses: list[Callable[[], object]] = [
        lambda: parallelize(make_layer(), mesh),
        lambda: ContextParallel(mesh),
        lambda: ContextParallel(group),
        lambda: rank_errors("a step", mesh).__enter__(),
        lambda: rank_errors("a step", group).__enter__(),
    ]
    if distributed.get_rank() == 0:
        return [str(use())[:0] for use in uses]
    found = []
    for use in uses:
        with pytest.raises(InputError) as error:
            use()
        found.append(str(error.value))
    return found


def test_groups_and_meshes_of_other_processes_are_refused() -> None:
    """Meshes raised IndexError: list index out of range."""
    expected = [
        "mesh must contain this process (1), got the processes [0]",
        "group must contain this process (1), got the processes [0]",
        "group must contain this process (1), got a group of other processes",
        "group must contain this process (1), got the processes [0]",
        "group must contain this process (1), got a group of other processes",
    ]
    ((nothing, found),) = run_ranks(2, errors_of_other_processes, patience=100.0)
    assert nothing == [""] * len(expected), nothing
    assert [text.partition("\n")[0] for text in found] == expected, found
