"""`parallelize`: the attention heads and the feed-forward features of a layer, divided over the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from undivided.arguments.checks import check_type, checked_flag
from undivided.arguments.signature import checked_call
from undivided.context_parallel._groups import check_device_type
from undivided.context_parallel.exchange.collectives import ProcessGroup, SingleRank
from undivided.context_parallel.exchange.failures import rank_errors
from undivided.context_parallel.exchange.groups import check_ascending, group_of
from undivided.context_parallel.exchange.handshake import CALL, SharedArguments, prepare_on_all_ranks
from undivided.errors import InputError, nearest_name
from undivided.nn import MultiheadAttention, TransformerLayer
from undivided.nn.arguments.formats import Heads
from undivided.nn.arguments.tensor_parallel import TensorArguments, checked_tensor_arguments
from undivided.nn.blocks.linear import Linear
from undivided.nn.blocks.normalization import Normalization
from undivided.parallel.state import check_not_parametrized
from undivided.parallel.styles import MLP, OUTPUT, REPLICATED, SINKS, OwnScores, heads_style

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
Layer = MultiheadAttention | TransformerLayer


@checked_call
def parallelize(module: ModuleT, mesh: DeviceMesh, sequence_parallel: bool = False, *, check: bool = True) -> ModuleT:
    """The module, with every `MultiheadAttention` and `TransformerLayer` in it divided over the ranks of a mesh.

    Parameters become DTensors under their old names. Each rank computes its own attention heads and feed-forward
    features; the output projections sum over ranks. All ranks call it with the same parameters: rank 0's are sent.
    A gated activation such as swiglu exchanges features between ranks after its first map. Score biases, slopes
    and masks of a call describe all heads; each rank takes its own, and gradients of a bias are summed over ranks.
    Attention dropout and hidden dropout are those of one process whose generator has the state of rank 0's; the ranks
    agree on seeds and states in every training call, which costs one broadcast per attention and one per layer.

    Args:
        module: a layer, or a module that contains layers. It is changed in place.
        mesh: a `DeviceMesh` with one axis, such as ``mesh["tensor"]`` of a larger one.
        sequence_parallel: whether a rank's hidden states are its consecutive part of the sequence, between the
            attention and the feed-forward block too. Then the sequence length is a multiple of the number of ranks.
        check: whether the ranks compare the arguments of every call of a layer on the CPU, in one exchange of 16 bytes.
            All of them then raise an error if one has other arguments or does not call the layer.

    Returns:
        The same module.

    Raises:
        InputError: the mesh has more than one axis or does not contain this process, the module has no layer, the ranks
            do not divide the heads or the features, an option of a layer is not supported, or a parameter has hooks or
            belongs to two modules; or the other arguments, or the options or parameters of the layers, differ between
            ranks. The module is unchanged.
        RankError: another rank refused its arguments, or failed.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053); Korthikanti et al. 2022 (arXiv:2205.05198), sequence parallelism.

    >>> import torch, torch.distributed as dist, undivided
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
    >>> layer = parallelize(undivided.TransformerLayer(64, 128, 4, attn_input_format="bshd"), mesh)
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    >>> dist.destroy_process_group()
    """
    _check_mesh(mesh)
    group = group_of(mesh)

    def prepare() -> tuple[dict[str, Layer], SharedArguments]:
        checked_flag("sequence_parallel", sequence_parallel)
        checked_flag("check", check)
        layers = _checked_layers(module, mesh)
        options = {"sequence_parallel": sequence_parallel, "check": check}
        return layers, {CALL: "parallelize()", **options, **_description(module, layers)}

    has_other_ranks = distributed.get_backend(group) != "fake"  # PyTorch's, for dry runs
    layers = prepare_on_all_ranks((SingleRank(), ProcessGroup(group)), has_other_ranks, prepare)
    with rank_errors("parallelize", mesh):
        for layer in layers.values():
            if isinstance(layer, TransformerLayer):
                layer.tensor_parallel = _arguments(mesh, sequence_parallel, layer.attn_input_format, check)
                _divide_feed_forward(layer, mesh)
            else:
                layer.tensor_parallel = _arguments(mesh, sequence_parallel, layer.qkv_format, check)
                _divide_attention(layer, mesh)
    return module


def _check_mesh(mesh: object) -> None:
    """Raise InputError unless it is a mesh with one axis."""
    if not isinstance(mesh, DeviceMesh):
        hint = 'torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))'
        raise InputError("mesh", "be a DeviceMesh with one axis", type(mesh).__name__, hint=hint)
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        name = nearest_name("tensor", names) or nearest_name("tp", names) or (names[-1] if names else None)
        hint = "give its axes names by mesh_dim_names" if name is None else f"select one axis, such as mesh[{name!r}]"
        raise InputError("mesh", "be a DeviceMesh with one axis", f"{mesh.ndim} axes {names}", hint=hint)
    check_ascending(mesh)


def _checked_layers(module: torch.nn.Module, mesh: DeviceMesh) -> dict[str, Layer]:
    """The layers of the module by name; raises InputError unless they can be divided over the ranks of the mesh."""
    check_type("module", module, torch.nn.Module, "a torch.nn.Module")
    layers = {name: m for name, m in module.named_modules() if isinstance(m, Layer)}
    if not layers:
        hint = "pass a MultiheadAttention or TransformerLayer, or a module that contains one"
        raise InputError("module", "contain a layer of undivided", type(module).__name__, hint=hint)
    for layer in layers.values():
        _check(layer, mesh)
    _check_parameters(module, list(layers.values()))
    return layers


def _description(module: torch.nn.Module, layers: Mapping[str, Layer]) -> dict[str, str]:
    """The layers in their order, their options and their parameters, which all ranks must have: the ranks exchange the
    parameters in this order, and the options decide which heads and features each rank gets."""
    names = ", ".join(f"{name or 'module'} ({type(layer).__name__})" for name, layer in layers.items())
    texts = {"the layers of module": f"{len(layers)}: {names}"}
    for prefix, layer in layers.items():
        for name, inner in layer.named_modules(prefix=prefix):
            texts[f"module.{name}" if name else "module"] = f"{type(inner).__name__}({inner.extra_repr()})"
    divided = {parameter for layer in layers.values() for parameter in layer.parameters()}
    for name, parameter in module.named_parameters():
        if parameter in divided:
            gradient = ", requires_grad" if parameter.requires_grad else ""
            texts[f"module.{name}"] = (
                f"{list(parameter.shape)}, {parameter.dtype}, on {parameter.device.type}{gradient}"
            )
    return texts


def _divide_feed_forward(layer: TransformerLayer, mesh: DeviceMesh) -> None:
    """Divide what a layer has besides its attentions."""
    ranks = layer.tensor_parallel.ranks
    if not layer.layernorm_mlp.has_consecutive_rows:  # otherwise a layer before this one has the same block
        parallelize_module(layer.layernorm_mlp, mesh, MLP)
        layer.layernorm_mlp.ranks, layer.layernorm_mlp.has_consecutive_rows = ranks, True
    if layer.output_layernorm:
        parallelize_module(layer.layernorm, mesh, REPLICATED)
        layer.layernorm.ranks = None if layer.tensor_parallel.sequence_axis is None else ranks


def _divide_attention(layer: MultiheadAttention, mesh: DeviceMesh) -> None:
    """Divide the projections, the norms of heads and the sinks of an attention."""
    heads, core = layer.heads, layer.core_attention
    core.tensor_parallel = layer.tensor_parallel
    projections = _projections(layer)
    for projection in projections:
        parallelize_module(projection, mesh, heads_style(projection, heads.kv, mesh.size()))
        projection.used_rows = _used_rows(heads, mesh)
    parallelize_module(layer.proj, mesh, OUTPUT)
    norms = [norm for norm in (layer.q_norm, layer.k_norm) if isinstance(norm, Normalization)]
    for norm in norms:
        parallelize_module(norm, mesh, REPLICATED)
    for block in (*projections, layer.proj, *norms):
        block.ranks = layer.tensor_parallel.ranks
    parallelize_module(core, mesh, SINKS)
    layer.heads = core.heads = heads._replace(q=heads.q // mesh.size(), kv=max(1, heads.kv // mesh.size()))
    core.register_forward_pre_hook(OwnScores(heads.q), with_kwargs=True)


def _used_rows(heads: Heads, mesh: DeviceMesh) -> dict[str, tuple[int, int]]:
    """The rows of the projections of keys and values that a rank uses, if there are fewer key heads than ranks."""
    if heads.kv % mesh.size() == 0:
        return {}
    head = mesh.get_local_rank() * heads.kv // mesh.size()
    return {"key_": (head * heads.qk_dim, heads.qk_dim), "value_": (head * heads.v_dim, heads.v_dim)}


def _arguments(mesh: DeviceMesh, sequence_parallel: bool, format: str, check: bool) -> TensorArguments:
    """The ranks of the mesh, as the layers need them for dropout and to compare their arguments."""
    arguments = checked_tensor_arguments(mesh.get_group(), mesh.size(), sequence_parallel, None, format)
    return arguments.with_group(mesh.get_group(), check)._replace(is_parallelized=True)


def _projections(layer: MultiheadAttention) -> list[Linear]:
    """The maps to queries, keys and values."""
    if layer.attention_type == "self":
        return [layer.layernorm_qkv if layer.input_layernorm else layer.qkv]
    return [layer.layernorm_query if layer.input_layernorm else layer.query_layer, layer.key_value]


def _check(layer: Layer, mesh: DeviceMesh) -> None:
    """Raise InputError for a layer that cannot be divided over the ranks of a mesh."""
    ranks = mesh.size()
    check_not_parametrized(layer)
    if any(hasattr(parameter, "device_mesh") for parameter in layer.parameters()):
        raise InputError(
            "module", "have plain parameters", "DTensors", hint="call parallelize once, before fully_shard"
        )
    devices = sorted({str(parameter.device) for parameter in layer.parameters()})
    if len(devices) > 1:
        raise InputError("module", "have the parameters of each layer on one device", ", ".join(devices))
    check_device_type(mesh, next(layer.parameters()).device.type)
    if layer.tensor_parallel.size > 1:
        hint = "parallelize divides whole layers; a layer with tp_size has its part already"
        raise InputError("tp_size", "be 1 for parallelize", layer.tensor_parallel.size, hint=hint)
    if isinstance(layer, TransformerLayer):
        features = layer.layernorm_mlp.fc2_weight.shape[1]
        if features % ranks:
            raise InputError("ffn_hidden_size", f"be a multiple of the {ranks} ranks of mesh", features)
        return
    if layer.return_bias:
        raise InputError("return_bias", "be False for tensor parallelism", True)
    _check_heads(layer.heads, ranks, layer.fuse_qkv_params, layer.qkv_weight_interleaved)


def _check_parameters(module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> None:
    """Raise InputError if a parameter of a layer has what its replacement would lose: another owner, or hooks."""
    places: dict[Tensor, list[str]] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(prefix, recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append(name)
    for parameter in {parameter: None for layer in layers for parameter in layer.parameters()}:
        first, *others = places[parameter]
        if others:
            hint = "share the module that has it: parallelize replaces each parameter by a new one"
            got = f"the same one as {first} and {others[0]}"
            raise InputError("module", "have each parameter of its layers in one place", got, hint=hint)
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            hint = "register hooks after parallelize, which replaces each parameter by a new one"
            raise InputError("module", "have no hooks on the parameters of its layers", f"hooks on {first}", hint=hint)


def _check_heads(heads: Heads, ranks: int, fused: bool, interleaved: bool) -> None:
    if heads.q % ranks:
        hint = f"use a mesh axis of a size that divides {heads.q}"
        raise InputError("num_attention_heads", f"be a multiple of the {ranks} ranks of mesh", heads.q, hint=hint)
    if heads.kv % ranks and ranks % heads.kv:
        hint = f"use a mesh axis of a size that divides {heads.kv}, or that {heads.kv} divides"
        rule = f"be a multiple or a divisor of the {ranks} ranks of mesh"
        raise InputError("num_gqa_groups", rule, heads.kv, hint=hint)
    if fused and ranks > 1 and not interleaved:
        hint = "with qkv_weight_interleaved=True or fuse_qkv_params=False, the rows of a rank are consecutive"
        raise InputError("qkv_weight_interleaved", "be True for tensor parallelism of one weight", False, hint=hint)
    if fused and heads.kv % ranks:
        hint = "with fuse_qkv_params=False, the weights of keys and values are replicated"
        rule = f"be a multiple of the {ranks} ranks of mesh with fuse_qkv_params"
        raise InputError("num_gqa_groups", rule, heads.kv, hint=hint)
