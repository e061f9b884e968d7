"""`clip_grad_norm_`: the norm of all gradients of a module whose parameters are divided in several ways.

`torch.nn.utils.clip_grad_norm_` refuses DTensors of different meshes, and plain tensors beside DTensors. It takes the
parts that a rank has of layers built with `tp_group` for the whole, so that each rank would scale by another factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from undivided.arguments.checks import check_type, checked_flag
from undivided.arguments.signature import checked_call
from undivided.context_parallel.exchange.failures import rank_errors
from undivided.context_parallel.exchange.groups import group_of
from undivided.errors import InputError
from undivided.nn.arguments.checks import checked_number
from undivided.parallel.state import divisions

Groups = tuple[Any, ...]
"""Process groups, each of which has parts of a tensor."""


class _GradientPart(NamedTuple):
    """This rank's part of a parameter's gradient.

    memory: the local tensor, which is scaled in place. values: what counts in the norm: `memory`, with partial sums
    added up over ranks. Both are None if there is no gradient. groups: the process groups that divide it.
    """

    memory: Tensor | None
    values: Tensor | None
    groups: Groups
    device: torch.device


@torch.no_grad()
@checked_call
def clip_grad_norm_(
    module: torch.nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """The norm of all gradients of a module over all ranks, after scaling them in place to at most `max_norm`.

    It is `torch.nn.utils.clip_grad_norm_` for modules that `parallelize`, `tp_group` and FSDP2 have divided, each in
    part or together. Every gradient counts once, as in one process. All ranks must call it; a rank sends one number for
    each set of process groups that divides a parameter, such as three for a mesh of data, context and tensor ranks;
    two numbers instead of one for the norm ``math.inf``.

    Args:
        module: a module after ``backward()``. Divided parameters are those of undivided's layers and all DTensors.
        max_norm: the largest norm, at least 0. ``math.inf`` only measures.
        norm_type: the exponent p of the norm (sum |g|^p)^(1/p), at least 0.001; ``math.inf`` for the largest |g|.
        error_if_nonfinite: whether a norm that is NaN or infinite is an error, which waits for the device.

    Returns:
        The norm before scaling, a plain 0-d tensor in fp32 (fp64 if a gradient is), the same on every rank.

    Raises:
        InputError: an argument is wrong, or the norm is not finite and `error_if_nonfinite` is True.
        RankError: a rank ended or did not call it in time.

    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
    >>> clip_grad_norm_(layer, 1.0), layer.weight.grad.norm()
    (tensor(5.), tensor(1.0000))
    """
    check_type("module", module, torch.nn.Module, "a torch.nn.Module")
    max_norm = _number_or_inf("max_norm", max_norm, 0.0, "a number of at least 0")
    norm_type = _number_or_inf("norm_type", norm_type, 1e-3, "a number greater than 0, at least 0.001")
    checked_flag("error_if_nonfinite", error_if_nonfinite)
    parts = list(_parts(module))
    norm = _norm(parts, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        hint = "error_if_nonfinite=False, and leave the step out on all ranks"
        raise InputError("module", "have gradients of a finite norm", float(norm), hint=hint)
    if max_norm == math.inf:  # the factor of an infinite norm would be NaN
        return norm
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for part in parts:
        if part.memory is not None:
            part.memory.mul_(factor.to(part.memory.device))
    return norm


def _number_or_inf(argument: str, value: object, least: float, words: str) -> float:
    if isinstance(value, float) and value == math.inf:
        return math.inf
    return checked_number(argument, value, least, math.inf, words)


def _parts(module: torch.nn.Module) -> Iterator[_GradientPart]:
    """This rank's part of every gradient; all ranks have the same groups in the same order."""
    # by parameter: wrappers such as that of recomputation change the names of named_parameters()
    tensor_groups = {id(module.get_parameter(name)): ranks.group for name, _, _, ranks in divisions(module)}
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        groups: Groups = (tensor_groups[id(parameter)],) if id(parameter) in tensor_groups else ()
        memory = values = parameter.grad
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            # of FSDP2 around `parallelize`, one placement is a _StridedShard, which is_shard() does not know
            shards = [axis for axis, place in enumerate(parameter.placements) if not place.is_replicate()]
            groups += tuple(group_of(mesh, axis) for axis in shards)
            if isinstance(memory, DTensor):
                values = memory.redistribute(placements=parameter.placements).to_local()
                memory = memory.to_local()
        yield _GradientPart(memory, values, groups, parameter.device)


def _norm(parts: list[_GradientPart], norm_type: float) -> Tensor:
    """The norm of all gradients."""
    sums: dict[tuple[Groups, torch.device], Tensor] = {}
    has_fp64 = any(part.values is not None and part.values.dtype == torch.float64 for part in parts)
    dtype = torch.float64 if has_fp64 else torch.float32
    for part in parts:
        key = part.groups, part.device
        total = sums.setdefault(key, torch.zeros((), dtype=dtype, device=part.device))
        if part.values is None or not part.values.numel():
            continue
        own = torch.linalg.vector_norm(part.values, norm_type, dtype=dtype)
        sums[key] = torch.maximum(total, own) if norm_type == math.inf else total + own**norm_type
    for (groups, _), total in sums.items():
        for group in groups:
            with rank_errors("the norm of gradients", group):
                if norm_type == math.inf:
                    _reduce_maximum(total, group)
                else:
                    distributed.all_reduce(total, group=group)
    if not sums:
        return torch.zeros(())
    device = parts[0].device
    totals = torch.stack([total.to(device) for total in sums.values()])
    return totals.amax() if norm_type == math.inf else totals.sum() ** (1 / norm_type)


def _reduce_maximum(total: Tensor, group: Any) -> None:
    """Replace a 0-d tensor by its maximum over ranks, NaN if one of them has NaN, which gloo's maximum ignores."""
    is_nan = total.isnan()
    pair = torch.stack([is_nan.to(total.dtype), total.masked_fill(is_nan, 0.0)])
    distributed.all_reduce(pair, distributed.ReduceOp.MAX, group=group)
    total.copy_(pair[1].masked_fill(pair[0] > 0, math.nan))
