"""The tensor parallel plan of a model: its linear maps, embeddings and experts divided over ranks as DTensors.

The plan and its styles are those of transformers (5.23), applied to a model that already has its parameters. One style
is ours: parameters of norms over the heads of a rank, whose gradient is summed over ranks in the backward pass itself,
so that gradients of several batches can be accumulated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from undivided.context_parallel.exchange.groups import group_of
from undivided.errors import InputError
from undivided.nn.blocks.exchanged import exchanged

SUMMED = "replicated_with_grad_allreduce"
"""The style of replicated parameters of which each rank has a partial gradient."""
HEADS = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
"""The sizes of a configuration that a plan divides."""


def divide(model: Any, mesh: DeviceMesh) -> None:
    """Divide the parameters of a model over the ranks of a mesh with one axis, by the model's own plan.

    Args:
        model: a `PreTrainedModel` with the same plain parameters on all ranks.
        mesh: with one axis.

    Raises:
        InputError: the installed transformers has other styles.
    """
    try:
        from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
    except ImportError as error:
        from transformers import __version__

        hint = "pip install -U transformers"
        raise InputError("transformers", "apply plans as DTensors (version 5.23)", __version__, hint=hint) from error
    tied = _tied_names(model)
    for name in tied:
        module, key = _owner(model, name)
        module._parameters[key] = nn.Parameter(module._parameters[key].detach().clone())  # type: ignore[union-attr]
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for name, style in _styles(model):
        if name in parameters:
            module, key = _owner(model, name)
            ALL_PARALLEL_STYLES[style].shard_param(module, key, mesh)
        elif style == SUMMED:
            modules[name].forward = _with_summed_gradients(modules[name], mesh)
        else:
            ALL_PARALLEL_STYLES[style].install_forward(modules[name], mesh)
    for name, source in tied.items():
        (module, key), (first, first_key) = _owner(model, name), _owner(model, source)
        module._parameters[key] = first._parameters[first_key]


def check_plan(model: Any, ranks: int) -> None:
    """Raise InputError if a model has no plan, or has sizes that a number of ranks does not divide.

    Args:
        model: a `PreTrainedModel`.
        ranks: on the tensor axis.
    """
    if not model.tp_plan:
        raise InputError(
            "model",
            f"have a tensor parallel plan for the {ranks} ranks of the axis 'tensor'",
            f"{type(model).__name__} without one",
            hint="set model.tp_plan, or use a mesh without this axis",
        )
    config = model.config.get_text_config()
    for name in HEADS:
        size = getattr(config, name, None)
        if size is not None and size % ranks:
            raise InputError(name, f"be a multiple of the {ranks} ranks of the axis 'tensor'", size)


def _styles(model: Any) -> Iterator[tuple[str, str]]:
    """(name of a parameter or a module, style), the parameters of a module before the module itself."""
    for module_name, module in model.named_modules():
        module_style = _style(module_name, model.tp_plan)
        for key, _ in module.named_parameters(recurse=False):
            name = f"{module_name}.{key}" if module_name else key
            style = _style(name, model.tp_plan) or module_style
            if style is not None and style != SUMMED:
                yield name, style
        if module_style is not None:
            yield module_name, module_style


def _style(name: str, plan: dict[str, str]) -> str | None:
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))


def _tied_names(model: Any) -> dict[str, str]:
    """The names of parameters that are also parameters of an earlier module, with the earlier names."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        earlier = first.setdefault(id(parameter), name)
        if earlier != name:
            tied[name] = earlier
    return tied


def _owner(model: Any, name: str) -> tuple[nn.Module, str]:
    """The module of a parameter, and the name of the parameter within it."""
    module_name, _, key = name.rpartition(".")
    return model.get_submodule(module_name), key


def _with_summed_gradients(module: nn.Module, mesh: DeviceMesh) -> Callable[..., Any]:
    """The forward pass of a module with parameters whose gradients are summed over ranks."""
    forward, group = module.forward, group_of(mesh)

    def same(x: Tensor, _: str) -> Tensor:
        return x.view_as(x)

    def total(x: Tensor, _: str) -> Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(x, group=group)
        return x

    def run(*args: Any, **options: Any) -> Any:
        own = dict(module._parameters)
        summed: dict[str, Any] = {
            k: p if p is None else exchanged(p, "a shared parameter", same, total) for k, p in own.items()
        }
        module._parameters.update(summed)
        try:
            return forward(*args, **options)
        finally:
            module._parameters.update(own)

    return run
