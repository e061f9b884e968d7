"""`parallelize`: an unmodified model on a mesh, its checks, and the hooks around its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.dropout import _DropoutNd

from undivided.arguments.signature import checked_call
from undivided.context_parallel import ContextParallel
from undivided.context_parallel._groups import check_device_type
from undivided.context_parallel.exchange.collectives import Communicator, ProcessGroup, SingleRank
from undivided.context_parallel.exchange.groups import group_of
from undivided.context_parallel.exchange.handshake import SharedArguments, bit_sum, prepare_on_all_ranks
from undivided.errors import InputError
from undivided.integrations.transformers._active import TENSOR_RANKS, set_active_batch
from undivided.integrations.transformers.parallel._axes import AXES, checked_mesh, size
from undivided.integrations.transformers.parallel._balance import COEFFICIENT, spread_balancing_loss
from undivided.integrations.transformers.parallel._shard import SequenceShard
from undivided.integrations.transformers.parallel._tensor import check_plan, divide
from undivided.nn.blocks.tensor_ranks import TensorRanks

ModelT = TypeVar("ModelT", bound=nn.Module)

MODEL_TYPES = ("gemma2", "gemma3_text", "gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Models whose layers use other tokens in the attention alone, and that are tested on several ranks."""
NOISE = "router_jitter_noise"
"""The option of a configuration that draws random numbers, which would differ between ranks."""
WHOLE = {
    "use_cache": "a cache would have to hold the keys of all ranks",
    "cache": "a cache would have to hold the keys of all ranks",  # transformers 5.24; before, it was past_key_values
    "past_key_values": "a cache would have to hold the keys of all ranks",
    "output_attentions": "the weights would have to cover the keys of all ranks",
    "logits_to_keep": "the last tokens of a rank are not the last tokens of the sequence",
}
"""Arguments of a model that need the tokens of all ranks, and why."""


@checked_call
def parallelize(model: ModelT, mesh: DeviceMesh | ContextParallel) -> ModelT:
    """The model on the ranks of a mesh, by the names of the axes; it is changed in place.

    - "context": each rank has a part of every sequence. Pass ``shard_batch(batch, mesh)`` to the model.
    - "tensor": each rank has some heads and features, by the model's own plan (``model.tp_plan``), as DTensors.
    - "data": nothing changes here. Apply ``torch.distributed.fsdp.fully_shard`` over ``mesh["data", "context"]``
      afterwards.

    All ranks call it with the same parameters. Attention dropout is that of one process whose generator has the state
    of the first context and tensor rank's: the ranks agree on a seed in every attention. Other dropout is refused on
    several context or tensor ranks.

    Args:
        model: a causal language model of transformers with ``attn_implementation="undivided"``.
        mesh: a `DeviceMesh` with axes named "data", "context" and "tensor", or some of them; or a `ContextParallel`,
            if only the sequence is spread over ranks.

    Returns:
        The same model.

    Raises:
        InputError: an axis is unknown, the model is not supported, has another attention implementation, options that
            would differ between ranks, no plan for "tensor" or sizes that the ranks do not divide; or its parameters
            differ between ranks. The model is unchanged.
        RankError: another rank refused its model, or failed.

    Source: the plans of Hugging Face Transformers ("Tensor parallelism" in its documentation).

    >>> import torch, torch.distributed as dist, transformers, undivided.integrations.transformers as hf
    >>> hf.register()
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("context",))
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    ...     num_key_value_heads=2, attn_implementation="undivided")
    >>> model = hf.parallelize(transformers.LlamaForCausalLM(config), mesh)
    >>> tokens = torch.tensor([[3, 1, 4, 1, 5]])
    >>> model(**hf.shard_batch({"input_ids": tokens, "labels": tokens}, mesh)).logits.shape
    torch.Size([1, 5, 50])
    >>> dist.destroy_process_group()
    """
    if not isinstance(mesh, ContextParallel):
        checked_mesh(mesh)
    context_ranks, tensor_ranks = _rank_counts(mesh)
    for axes in _axes_of_all_ranks(mesh):
        prepare_on_all_ranks(axes, True, lambda: _check_model(model, context_ranks, tensor_ranks))
    if isinstance(mesh, DeviceMesh):
        check_device_type(mesh, next(model.parameters()).device.type)
    if tensor_ranks > 1:
        assert isinstance(mesh, DeviceMesh)
        divide(model, mesh["tensor"] if mesh.ndim > 1 else mesh)
        ranks = TensorRanks(group_of(mesh, "tensor"), None)
        for layer in model.modules():
            setattr(layer, TENSOR_RANKS, ranks)
    hooks = _Hooks(context_ranks, _token_ranks(mesh))
    model.register_forward_pre_hook(hooks.enter, with_kwargs=True)
    model.register_forward_hook(hooks.leave, always_call=True)
    model._undivided_hooks = hooks  # type: ignore[assignment]
    return model


def _token_ranks(mesh: DeviceMesh | ContextParallel) -> list[Communicator]:
    """The groups over which the tokens of a step are divided."""
    if isinstance(mesh, ContextParallel):
        return list(mesh._group_axes())
    return [ProcessGroup(group_of(mesh, axis)) for axis in ("context", "data") if size(mesh, axis) > 1]


def _rank_counts(mesh: DeviceMesh | ContextParallel) -> tuple[int, int]:
    """(number of context ranks, number of tensor ranks)."""
    if isinstance(mesh, ContextParallel):
        return mesh.world, 1
    return size(mesh, "context"), size(mesh, "tensor")


def _axes_of_all_ranks(mesh: DeviceMesh | ContextParallel) -> list[Sequence[Communicator]]:
    """Pairs of axes that together connect all ranks."""
    if isinstance(mesh, ContextParallel):
        return [mesh._group_axes()]
    groups: list[Communicator] = [ProcessGroup(group_of(mesh, axis)) for axis in AXES if size(mesh, axis) > 1]
    return [(SingleRank(), group) for group in groups or [SingleRank()]]


def _check_model(model: Any, context_ranks: int, tensor_ranks: int) -> tuple[bool, SharedArguments]:
    """True, and a description of the model that must be the same on all ranks; raises InputError."""
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = type(model).__name__
    if isinstance(model, nn.Module) and any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        raise InputError("model", "have plain parameters", "DTensors", hint="call parallelize before fully_shard")
    if not isinstance(model, PreTrainedModel) or name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise InputError("model", "be a causal language model of transformers", name)
    if hasattr(model, "_undivided_hooks"):
        raise InputError("model", "be parallelized once", "a model that already is")
    config = model.config.get_text_config()
    if config._attn_implementation != "undivided":
        hint = "undivided.integrations.transformers.register(); model.set_attn_implementation('undivided')"
        raise InputError("attn_implementation", "be 'undivided'", repr(config._attn_implementation), hint=hint)
    if context_ranks > 1 and config.model_type not in MODEL_TYPES:
        raise InputError(
            "model",
            f"be of a type whose layers are known to share tokens in the attention alone: {', '.join(MODEL_TYPES)}",
            repr(config.model_type),
            hint="use a mesh without the axis 'context'",
        )
    if tensor_ranks > 1:
        check_plan(model, tensor_ranks)
    if context_ranks * tensor_ranks > 1:
        _check_noise(model, config)
    parameters = list(model.parameters())
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1 or devices == ["meta"]:
        hint = "load or initialise the parameters, the same on all ranks, and move the model to one device"
        raise InputError("model", "have parameters with values on one device", ", ".join(devices), hint=hint)
    total = sum(bit_sum(parameter) for parameter in parameters)
    return True, {"model": f"{name} of {len(parameters)} parameters with the checksum {total & (2**64 - 1):016x}"}


def _check_noise(model: nn.Module, config: Any) -> None:
    """Raise InputError for random numbers outside of the attention."""
    hint = "the generators of the ranks would draw different numbers"
    if getattr(config, NOISE, 0):
        raise InputError(NOISE, "be 0 on several context or tensor ranks", getattr(config, NOISE), hint=hint)
    dropout = [f"{name} (p={m.p:g})" for name, m in model.named_modules() if isinstance(m, _DropoutNd) and m.p]
    if dropout:
        must = "have no dropout outside of the attention on several context or tensor ranks"
        raise InputError("model", must, f"{len(dropout)}: {', '.join(dropout[:3])}", hint=hint)


class _Hooks:
    """Hooks before and after the forward pass; between them, masks and attention read the shard from `active_batch`."""

    def __init__(self, context_ranks: int, token_ranks: Sequence[Communicator]) -> None:
        self.context_ranks, self.token_ranks = context_ranks, token_ranks
        self.coefficient: float | None = None
        self.real: Tensor | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(args, options) without the shard; InputError if the model cannot compute with them."""
        shard = options.pop("shard", None)
        if self.context_ranks == 1:
            self._take_balancing_loss(module, options, options.get("attention_mask"))
            return args, options
        if not isinstance(shard, SequenceShard):
            hint = "model(**shard_batch(batch, mesh)); generate with a model that is not parallelized"
            must = f"come from shard_batch: the model is on {self.context_ranks} context ranks"
            raise InputError("batch", must, f"the arguments {', '.join(options) or len(args)}", hint=hint)
        if shard.context.world != self.context_ranks:
            raise InputError("shard", f"be of the {self.context_ranks} context ranks of the model", shard.context.world)
        for name, why in WHOLE.items():
            if not isinstance(options.get(name), int | None) or options.get(name):
                raise InputError(name, "be absent on several context ranks", repr(options[name]), hint=why)
        if options.get("labels") is not None and options.get("shift_labels") is None:
            must = "be shifted before they are divided"
            raise InputError("labels", must, "labels without shift_labels", hint="pass labels to shard_batch")
        real = None if shard.padding is None else shard.context.shard(shard.padding, dim=1)
        self._take_balancing_loss(module, options, real)
        set_active_batch(shard)
        return args, options

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forget the shard, and add the balancing loss of experts over the tokens of all ranks."""
        set_active_batch(None)
        if self.coefficient is None:
            return
        coefficient, self.coefficient = self.coefficient, None
        setattr(module, COEFFICIENT, coefficient)
        if output is not None:  # None: the forward pass has raised
            spread_balancing_loss(output, coefficient, module, self.real, self.token_ranks)

    def _take_balancing_loss(self, module: nn.Module, options: dict[str, Any], real: Tensor | None) -> None:
        """Let the model add 0 times the balancing loss of its own tokens, if it computes one and tokens are divided."""
        if not self.token_ranks or not hasattr(module, COEFFICIENT):
            return
        config: Any = module.config
        requested = options.get("output_router_logits")
        if not (config.output_router_logits if requested is None else requested):
            return
        as_output = options.get("return_dict")
        if not (getattr(config, "return_dict", True) if as_output is None else as_output):
            hint = "the balancing loss over the tokens of all ranks is added to the output by its name"
            raise InputError("return_dict", "be True with output_router_logits on several ranks", False, hint=hint)
        self.coefficient, self.real = float(getattr(module, COEFFICIENT)), real
        setattr(module, COEFFICIENT, 0.0)
