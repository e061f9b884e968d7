"""Wrong batches and meshes that `shard_batch` and `parallelize` of models of transformers refuse in any process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers_models import build

import undivided
from undivided.integrations.transformers import parallelize, register, shard_batch

IDS = torch.arange(3, 11)[None]
OFFSETS = torch.tensor([0, 3, 8])
WRONG: dict[str, tuple[Any, str]] = {
    "a list": ([IDS], "batch must be a mapping of names to tensors, got list"),
    "nothing": ({}, "batch must have either input_ids or inputs_embeds, got neither"),
    "both": (
        {"input_ids": IDS, "inputs_embeds": IDS},
        "batch must have either input_ids or inputs_embeds, got input_ids",
    ),
    "numbers": ({"input_ids": IDS.float()}, "input_ids must have an integer dtype, got torch.float32"),
    "short labels": ({"input_ids": IDS, "labels": IDS[:, 1:]}, "labels must have the 1 x 8 tokens of the batch"),
    "4-D mask": (
        {"input_ids": IDS, "attention_mask": IDS[None]},
        "attention_mask must be a tensor [B, S], got [1, 1, 8]",
    ),
    "list of offsets": ({"input_ids": IDS, "cu_seq_lens_q": [0, 8]}, "cu_seq_lens_q must be a tensor [documents + 1]"),
    "short offsets": ({"input_ids": IDS, "cu_seq_lens_q": OFFSETS[:2]}, "cu_seq_lens_q must go from 0 to the 8 tokens"),
    "rows": ({"input_ids": IDS.expand(2, 8), "cu_seq_lens_q": OFFSETS}, "input_ids must have one row if cu_seq_lens_q"),
    "key offsets": (
        {"input_ids": IDS, "cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS[[0, 2]]},
        "cu_seq_lens_k must equal cu_seq_lens_q, got [0, 8]",
    ),
    "no offsets": ({"input_ids": IDS, "max_length_q": 8}, "cu_seq_lens_q must be given with max_length_q, got None"),
    "labels elsewhere": (
        {"input_ids": IDS, "labels": IDS.to("meta")},
        "labels must be on the device of the tokens (cpu), got meta",
    ),
    "no values": (
        {"input_ids": IDS.to("meta")},
        "input_ids must have values, which all ranks compare, got a tensor on meta",
    ),
    "offsets elsewhere": (
        {"input_ids": IDS, "cu_seq_lens_q": OFFSETS.to("meta")},
        "cu_seq_lens_q must be on the device of the tokens (cpu) or on the CPU, got meta",
    ),
    "count": (
        {"input_ids": IDS, "labels": IDS, "num_items_in_batch": 0},
        "num_items_in_batch must be a positive number of labels, got 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_batch_is_refused(name: str) -> None:
    batch, message = WRONG[name]
    with pytest.raises(undivided.InputError, match=re.escape(message)):
        shard_batch(batch, undivided.ContextParallel(rank=0, world=2))


def test_a_misspelt_axis_is_an_error_with_the_axes_and_the_name_that_was_meant() -> None:
    register()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "contxt"))
        for call in (lambda: parallelize(build("llama", "undivided"), mesh), lambda: shard_batch({}, mesh)):
            with pytest.raises(undivided.InputError) as error:
                call()
            names = (
                "mesh must have axes with names out of 'data', 'context', 'tensor', got the names ('data', 'contxt')"
            )
            assert str(error.value) == f"{names}\n  HINT: did you mean 'context'?"
    finally:
        distributed.destroy_process_group()


def errors_of_other_processes() -> list[str]:
    """The errors of process 2 for meshes without it; it makes them with the others, which are in them."""
    register()
    found = []
    for axis in ("data", "context", "tensor"):
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=(axis,))
        if distributed.get_rank() < 2:
            continue
        for call in (
            lambda m: parallelize(build("llama", "undivided"), m),
            lambda m: shard_batch({"input_ids": IDS}, m),
        ):
            with pytest.raises(undivided.InputError) as error:
                call(mesh)
            found.append(str(error.value).partition("\n")[0])
    return found


@pytest.mark.slow
def test_a_mesh_of_other_processes_is_refused() -> None:
    """It was an IndexError: list index out of range."""
    ((*inside, found),) = run_ranks(3, errors_of_other_processes, patience=100.0)
    assert inside == [[], []]
    assert found == ["mesh must contain this process (2), got the processes [0, 1]"] * 6
