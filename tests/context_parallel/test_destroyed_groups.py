"""Contexts, layers and meshes that were made before ``torch.distributed.destroy_process_group()``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gloo_ranks import run_ranks
from tensor_layers import BATCH, HIDDEN, LENGTH, make_layer
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import undivided
from undivided import ContextParallel, InferenceParams, InputError
from undivided.parallel import clip_grad_norm_, parallelize, rank_errors, whole_state_dict


def refusals(again: Path | None) -> dict[str, str]:
    """The error of each use of a destroyed group, or what it returned; again: a store for new groups."""
    rank, group = distributed.get_rank(), distributed.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    context = ContextParallel(group)
    paged = InferenceParams(1, 8, 2, 8, torch.float32, is_paged=True, page_size=4, context_parallel=context)
    paged.pre_step({"a": 1})
    divided = make_layer({}, "bshd", tp_group=group, set_parallel_mode=True)
    parallelized = parallelize(make_layer({}, "bshd"), mesh)
    q, x = torch.randn(1, 4, 2, 8), torch.randn(BATCH, LENGTH, HIDDEN)
    q_leaf = q.clone().requires_grad_()
    attended = undivided.attention(q_leaf, q, q, layout="bshd", context_parallel=context)
    divided(x).sum().backward()
    hidden = parallelized(x)
    distributed.destroy_process_group()
    if again is not None:
        distributed.init_process_group("gloo", init_method=f"file://{again}", rank=rank, world_size=2)
    token = torch.randn(1, 1, 2, 8)
    uses: dict[str, Callable[[], object]] = {
        "attention": lambda: undivided.attention(q, q, q, layout="bshd", context_parallel=context),
        "gradients of attention": lambda: attended.sum().backward(),
        "paged cache": lambda: paged.attend(1, token, token, token),
        "divided layer": lambda: divided(x),
        "set_tensor_parallel_group": lambda: divided.set_tensor_parallel_group(group),
        "parallelized layer": lambda: parallelized(x),
        "gradients of a layer": lambda: hidden.sum().backward(),
        "whole_state_dict": lambda: whole_state_dict(divided),
        "clip_grad_norm_": lambda: clip_grad_norm_(divided, 1.0),
        "rank_errors": lambda: rank_errors("a step", group).__enter__(),
    }
    if again is not None:
        uses["ContextParallel"] = lambda: ContextParallel(group)
    else:
        uses["parallelize"] = lambda: parallelize(make_layer({}, "bshd"), mesh)
    found = {}
    for name, use in uses.items():
        try:
            found[name] = repr(use())
        except InputError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize("again", [False, True], ids=["no-groups", "new-groups"])
def test_what_was_made_from_a_destroyed_group_is_refused(again: bool, tmp_path: Path) -> None:
    """Otherwise collectives fail with an error about registration, or return without doing anything."""
    for found in run_ranks(2, functools.partial(refusals, tmp_path / "store" if again else None))[0]:
        assert isinstance(found, dict), found
        for name, text in found.items():
            kind = "DeviceMesh" if name == "parallelize" else "process group"
            assert f"must exist, got a {kind} from before torch.distributed.destroy_process_group()" in text, name
            assert "HINT: after init_process_group, make the groups and meshes again" in text
