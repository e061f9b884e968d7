"""Whole checkpoints of layers built with `tp_group`, whose ranks have parts of the parameters: divided and gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.nn.utils.parametrize import is_parametrized

from undivided.arguments.checks import check_tensor, check_type, listed
from undivided.arguments.signature import checked_call
from undivided.errors import InputError
from undivided.nn import DotProductAttention, MultiheadAttention, TransformerLayer
from undivided.nn.blocks.linear import Linear, OutputLinear
from undivided.nn.blocks.mlp import LayerNormMLP
from undivided.nn.blocks.projections import kv_features, qkv_features
from undivided.nn.blocks.tensor_ranks import TensorRanks

_LAYERS = (DotProductAttention, MultiheadAttention, TransformerLayer)
_STATE_HINT = (
    "get_model_state_dict and set_model_state_dict of torch.distributed.checkpoint.state_dict, with "
    "StateDictOptions(full_state_dict=True); or undivided.parallel.save_checkpoint"
)


class Division(NamedTuple):
    """How tensor parallel ranks divide a parameter.

    Attributes:
        name: of the parameter, in its module.
        axis: the divided axis.
        sizes: of this rank's parts along it, such as its queries, keys and values in one weight.
        ranks: the ranks.
    """

    name: str
    axis: int
    sizes: tuple[int, ...]
    ranks: TensorRanks


_RECOMPUTED = "_checkpoint_wrapped_module"
WRAPPED = (_RECOMPUTED, "_orig_mod")
"""Names under which a recomputed and a compiled module have the original one."""

_OwnDivision = tuple[str, int, tuple[int, ...]]
"""(name, axis, sizes) of a `Division` in a layer that knows its ranks."""


@checked_call
def own_state_dict(module: torch.nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of a state dict of whole parameters, for layers built with `tp_group` or `tp_size`.

    TransformerEngine's layers have other checkpoints on every rank. This divides one checkpoint of the same layers
    without tensor parallelism. After `parallelize`, `torch.distributed.checkpoint` loads the DTensors instead.

    Args:
        module: a layer, or a module that contains layers, after `set_tensor_parallel_group`.
        state: the state dict of the same module with whole parameters, such as that of one process.

    Returns:
        A state dict for ``module.load_state_dict``. Parameters that all ranks have are those of `state`; the others are
        views of them where their rows are consecutive.

    Raises:
        InputError: a divided parameter is missing in `state`, or has another size than the parts of all ranks; or
            `parallelize` has divided the layers.

    >>> import torch, torch.distributed as dist, undivided
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> sizes = {"hidden_size": 64, "num_attention_heads": 4, "qkv_format": "bshd"}
    >>> whole = undivided.MultiheadAttention(**sizes)
    >>> layer = undivided.MultiheadAttention(**sizes, tp_group=dist.group.WORLD, set_parallel_mode=True)
    >>> layer.load_state_dict(own_state_dict(layer, whole.state_dict()))
    <All keys matched successfully>
    >>> dist.destroy_process_group()
    """
    _check_not_parallelized(module)
    check_type("state", state, Mapping, "a mapping of names to tensors")
    own = dict(state)
    for long_name, axis, sizes, ranks in divisions(module):
        name = _name_in_state(long_name)
        if name not in state:
            raise InputError("state", f"have the parameter {name!r} of module", f"{len(state)} other parameters")
        whole, expected = state[name], sum(sizes) * ranks.size
        check_tensor(f"state[{name!r}]", whole)
        if whole.dim() <= axis or whole.shape[axis] != expected:
            hint = "pass the parameters of the layer with tp_size=1"
            raise InputError(f"state[{name!r}]", f"have size {expected} on axis {axis}", list(whole.shape), hint=hint)
        parts = [ranks.own(part, axis) for part in whole.split([size * ranks.size for size in sizes], axis)]
        own[name] = parts[0] if len(parts) == 1 else torch.cat(parts, axis)
    return own


@checked_call
def whole_state_dict(module: torch.nn.Module) -> dict[str, Tensor]:
    """The state dict of whole parameters, gathered from layers built with `tp_group` or `tp_size`.

    It is the inverse of `own_state_dict`. All ranks of the group must call it.

    Args:
        module: a layer, or a module that contains layers, after `set_tensor_parallel_group`.

    Returns:
        The state dict of the same module without tensor parallelism, the same on every rank. Divided parameters are new
        tensors, the others are those of the module.

    Raises:
        InputError: the group of a layer is unknown, or parameters are DTensors.

    >>> import torch, torch.distributed as dist, undivided
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> sizes = {"hidden_size": 64, "num_attention_heads": 4, "qkv_format": "bshd"}
    >>> layer = undivided.MultiheadAttention(**sizes, tp_group=dist.group.WORLD, set_parallel_mode=True)
    >>> undivided.MultiheadAttention(**sizes).load_state_dict(whole_state_dict(layer))
    <All keys matched successfully>
    >>> dist.destroy_process_group()
    """
    _check_not_parallelized(module)
    if any(hasattr(parameter, "placements") for parameter in module.parameters()):
        raise InputError("module", "have plain parameters", "DTensors", hint=_STATE_HINT)
    state: dict[str, Tensor] = module.state_dict()
    for long_name, axis, sizes, ranks in divisions(module):
        name = _name_in_state(long_name)
        own = state[name].contiguous()
        gathered = [torch.empty_like(own) for _ in range(ranks.size)]
        with ranks.errors(f"the gather of {name}"):
            distributed.all_gather(gathered, own, group=ranks.group)
        by_map = zip(*(tensor.split(sizes, axis) for tensor in gathered), strict=True)
        state[name] = torch.cat([tensor for of_map in by_map for tensor in of_map], axis)
    return state


def _name_in_state(name: str) -> str:
    """The name of a parameter in the module's state dict, which leaves out the wrappers for recomputation."""
    return name.replace(f"{_RECOMPUTED}.", "")


def divisions(module: torch.nn.Module) -> Iterator[Division]:
    """The divisions of all parameters of which ranks have parts as plain tensors; FSDP2 may have divided them again."""
    for prefix, layer in module.named_modules():
        prefix = f"{prefix}." if prefix else ""
        if not isinstance(layer, _LAYERS) or layer.tensor_parallel.is_parallelized:
            continue
        if layer.tensor_parallel.size > 1:
            check_not_parametrized(layer)
        own = list(_own_divisions(layer))
        if own:
            layer.tensor_parallel.check_ranks()
        if (ranks := layer.tensor_parallel.ranks) is not None:
            for name, axis, sizes in own:
                yield Division(f"{prefix}{name}", axis, sizes, ranks)


def check_not_parametrized(layer: torch.nn.Module) -> None:
    """Raise InputError if a weight of a layer is computed from others: ranks have parts of those, not of the weight."""
    blocks = [("", layer), *((f"{name}.", block) for name, block in _blocks(layer))]
    must = "have no parametrized weights in layers that ranks divide"
    names = [
        f"{prefix}{name}"
        for prefix, block in blocks
        if is_parametrized(block)
        for name, _ in block.get_submodule("parametrizations").named_children()
    ]
    if names:
        hint = "torch.nn.utils.parametrize.remove_parametrizations(block, name), before ranks divide the layer"
        raise InputError("module", must, listed(names), hint=hint)
    names = [f"{prefix}{name}" for prefix, block in blocks for name in _computed_by_hooks(block)]
    if names:
        hint = "torch.nn.utils.remove_weight_norm, remove_spectral_norm or prune.remove, before ranks divide the layer"
        raise InputError("module", must, listed(names), hint=hint)


def _computed_by_hooks(block: torch.nn.Module) -> list[str]:
    """The weights that a hook computes before every call, as the older functions of torch.nn.utils register them."""
    others = [key for key, parameter in block.named_parameters(recurse=False) if parameter is not None]
    tensors = [name for name, value in vars(block).items() if isinstance(value, Tensor)]
    return [name for name in tensors if any(key.startswith(f"{name}_") for key in others)]


def _check_not_parallelized(module: torch.nn.Module) -> None:
    check_type("module", module, torch.nn.Module, "a torch.nn.Module")
    layers = (layer for layer in module.modules() if isinstance(layer, _LAYERS))
    if any(layer.tensor_parallel.is_parallelized for layer in layers):
        raise InputError("module", "have layers built with tp_group", "layers divided by parallelize", hint=_STATE_HINT)


def _own_divisions(layer: DotProductAttention | MultiheadAttention | TransformerLayer) -> Iterator[_OwnDivision]:
    """The divisions of a layer's parameters, without those of the layers in it."""
    if isinstance(layer, MultiheadAttention):
        yield from _projection_divisions(layer)
    elif isinstance(layer, TransformerLayer):
        yield from _mlp_divisions(layer)
    elif isinstance(layer.softmax_offset, torch.nn.Parameter):
        yield "softmax_offset", 0, (layer.heads.q,)


def _projection_divisions(layer: MultiheadAttention) -> Iterator[_OwnDivision]:
    for child, block in _blocks(layer):
        if isinstance(block, OutputLinear):
            yield f"{child}.weight", 1, (block.in_features,)
        elif isinstance(block, Linear):
            for name, (weight, bias) in zip(block.names, block.maps(), strict=True):
                sizes: tuple[int, ...] = (weight.shape[0],)
                if name == "" and layer.fuse_qkv_params and not layer.qkv_weight_interleaved:
                    sizes = _rows_of_fused(layer, child)
                yield f"{child}.{name}weight", 0, sizes
                if bias is not None:
                    yield f"{child}.{name}bias", 0, sizes


def _rows_of_fused(layer: MultiheadAttention, child: str) -> tuple[int, ...]:
    """The rows of queries, keys and values in one weight in that order."""
    if child.split(".")[0] == "key_value":
        return tuple(kv_features(layer.heads, False).values())
    sizes = tuple(qkv_features(layer.heads, False).values())
    return sizes if layer.attention_type == "self" else sizes[:1]


def _mlp_divisions(layer: TransformerLayer) -> Iterator[_OwnDivision]:
    name, mlp = next((name, block) for name, block in _blocks(layer) if isinstance(block, LayerNormMLP))
    features = mlp.fc2_weight.shape[1]
    rows = (features, features) if mlp.activation.gated else (features,)
    yield f"{name}.fc1_weight", 0, rows
    if mlp.fc1_bias is not None:
        yield f"{name}.fc1_bias", 0, rows
    yield f"{name}.fc2_weight", 1, (features,)


def _blocks(layer: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The blocks of a layer by name, inside of their wrappers."""
    for name, block in layer.named_children():
        while wrapper := next((wrapper for wrapper in WRAPPED if wrapper in block._modules), None):
            name, block = f"{name}.{wrapper}", block.get_submodule(wrapper)
        yield name, block
