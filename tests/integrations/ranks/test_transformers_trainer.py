"""`transformers.Trainer` on two context ranks; it requires accelerate, which the library does not."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from transformers_models import build, tokens

from undivided.integrations.transformers import parallelize, register, shard_batch

RATE, STEPS, ACCUMULATED = 0.05, 2, 2


def texts() -> list[dict[str, Tensor]]:
    return [{"input_ids": row} for row in tokens(2 * STEPS * ACCUMULATED, 22)]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def train_alone() -> Any:
    """The model after the same steps by hand, in one process."""
    model, rows = build("llama", "undivided").train(), texts()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    batches = [collate(rows[n : n + 2]) for n in range(0, len(rows), 2)]
    for step in range(STEPS):
        for batch in batches[step * ACCUMULATED : (step + 1) * ACCUMULATED]:
            (model(**batch, use_cache=False).loss / ACCUMULATED).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def train_on_ranks() -> float:
    """In each rank: the largest difference of a parameter from `train_alone`, after training by the Trainer."""
    from transformers import Trainer, TrainingArguments

    rank, world = distributed.get_rank(), distributed.get_world_size()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # read, but not used: the group exists
    register()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("context",))
    model = parallelize(build("llama", "undivided"), mesh)

    class EveryBatch(Trainer):  # type: ignore[misc]
        """All context ranks read the same batches."""

        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, 2, collate_fn=self.data_collator)

    arguments = TrainingArguments(
        output_dir="unused",
        max_steps=STEPS,
        gradient_accumulation_steps=ACCUMULATED,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    trainer = EveryBatch(
        model, arguments, train_dataset=texts(), data_collator=lambda rows: shard_batch(collate(rows), mesh)
    )
    trainer.train()
    pairs = zip(model.parameters(), train_alone().parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


@pytest.mark.slow
def test_a_trainer_on_context_ranks_equals_one_process() -> None:
    pytest.importorskip("accelerate")
    (differences,) = run_ranks(2, train_on_ranks)
    for difference in differences:
        assert isinstance(difference, float), difference
        assert difference < 1e-6
