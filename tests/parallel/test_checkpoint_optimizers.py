"""The state of an optimizer in checkpoints: gradients at loading, parameters without state, closures."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import refused
from torch import nn

from undivided.parallel import load_checkpoint, save_checkpoint


def make(trained: tuple[str, ...] = ("used", "unused")) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of two maps, and Adam for some of them."""
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(2, 2)})
    return model, torch.optim.AdamW([p for name in trained for p in model[name].parameters()])


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model["used"](torch.ones(1, 3)).square().sum().backward()
    optimizer.step()


def moments(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]


def equal(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)


def test_the_state_of_an_optimizer_is_loaded_although_parameters_have_gradients(tmp_path: Path) -> None:
    """PyTorch creates the state that is loaded only without gradients, such as those of a warm-up before a restart."""
    model, optimizer = make(("used",))
    step(model, optimizer)
    save_checkpoint(tmp_path, 1, model, optimizer)
    other, its = make(("used",))
    other["used"](torch.ones(1, 3)).sum().backward()
    gradient = other["used"].weight.grad
    expected = gradient.clone()
    assert load_checkpoint(tmp_path, other, its) is not None
    assert equal(moments(its), moments(optimizer))
    assert other["used"].weight.grad is gradient
    assert torch.equal(gradient, expected)


def test_the_state_of_an_optimizer_without_one_is_refused(tmp_path: Path) -> None:
    model, optimizer = make()
    save_checkpoint(tmp_path, 1, model, optimizer)
    message = refused(lambda: load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters())))
    assert message.startswith("optimizer must have the 12 tensors of step-00000001, got without 12 that it has: unused")


@pytest.mark.parametrize("trained", [0, 1])
def test_a_parameter_without_gradients_has_no_state_after_loading_either(trained: int, tmp_path: Path) -> None:
    """Neither in a new optimizer nor in one that has made other steps since."""
    model, optimizer = make()
    step(model, optimizer)
    save_checkpoint(tmp_path, 1, model, optimizer)
    other, its = make()
    for _ in range(trained):
        sum(p.sum() for p in other.parameters()).backward()  # type: ignore[union-attr]
        its.step()
    assert load_checkpoint(tmp_path, other, its) is not None
    assert len(moments(its)) == 2
    assert equal(moments(its), moments(optimizer))
    optimizer.zero_grad()
    its.zero_grad()
    step(model, optimizer)
    step(other, its)
    assert all(torch.equal(a, b) for a, b in zip(model["used"].parameters(), other["used"].parameters(), strict=True))


def test_an_optimizer_with_state_for_some_parameters_loads_that_of_all(tmp_path: Path) -> None:
    model, optimizer = make()
    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    save_checkpoint(tmp_path, 1, model, optimizer)
    other, its = make()
    step(other, its)
    assert load_checkpoint(tmp_path, other, its) is not None
    assert equal(moments(its), moments(optimizer))


def test_parameters_of_another_optimizer_and_single_absent_moments_are_refused(tmp_path: Path) -> None:
    model, optimizer = make(("used",))
    save_checkpoint(tmp_path, 1, model, optimizer)
    other, its = make()
    found = refused(lambda: load_checkpoint(tmp_path, other, its))
    assert found.startswith("optimizer must have the 6 tensors of step-00000001, got 6 that the checkpoint lacks: unus")
    assert found.endswith("build the optimizer of the checkpoint: the same class, options and trained parameters")
    assert not its.state  # as before the call
    amsgrad = torch.optim.AdamW(model["used"].parameters(), amsgrad=True)
    found = refused(lambda: load_checkpoint(tmp_path, model, amsgrad))
    assert "got 2 that the checkpoint lacks: used.bias.max_exp_avg_sq, used.weight.max_exp_avg_sq" in found


def test_a_save_before_the_first_step_does_not_change_the_training(tmp_path: Path) -> None:
    """PyTorch creates the state by a step that it counts."""
    model, optimizer = make()
    other = copy.deepcopy(model)
    its = torch.optim.AdamW(other.parameters())
    save_checkpoint(tmp_path, 0, model, optimizer)
    assert not optimizer.state
    step(model, optimizer)
    step(other, its)
    assert equal(moments(optimizer), moments(its))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_an_optimizer_that_needs_a_closure_is_refused_by_name(tmp_path: Path) -> None:
    model, _ = make()
    optimizer = torch.optim.LBFGS(model.parameters())
    for call in (save_checkpoint, load_checkpoint):
        arguments: tuple[Any, ...] = (1, model, optimizer) if call is save_checkpoint else (model, optimizer)
        message = refused(lambda call=call, arguments=arguments: call(tmp_path, *arguments))
        assert message.startswith("optimizer must have a step() that needs no closure, which creates its state, got LB")
        assert "HINT: pass values={'optimizer': optimizer.state_dict()} instead" in message
    save_checkpoint(tmp_path, 1, model, values={"optimizer": optimizer.state_dict()})
    found = load_checkpoint(tmp_path, model)
    assert found is not None
    optimizer.load_state_dict(found.values["optimizer"])
