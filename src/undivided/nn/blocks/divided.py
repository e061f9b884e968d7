"""The base class of the modules whose heads and features tensor parallel ranks may divide."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from undivided.arguments.checks import checked_flag
from undivided.context_parallel import ContextParallel
from undivided.nn.arguments.tensor_parallel import TensorArguments
from undivided.nn.blocks.initial_weights import DividedInit
from undivided.nn.blocks.module import Module
from undivided.nn.blocks.tensor_ranks import TensorRanks

_RATES = ("hidden_dropout", "drop_path_rate", "attention_dropout")


class DividedModule(Module):
    """A module with TransformerEngine's arguments of tensor parallelism.

    Attributes:
        tensor_parallel: the checked arguments.
        layer_number: the number of the layer.
    """

    tensor_parallel: TensorArguments
    layer_number: Any
    _options_at_first_call: dict[str, str] | None = None

    def set_tensor_parallel_group(self, tp_group: Any, check: bool = True) -> None:
        """Set the ranks that hold the other heads, and the other parts of the weights.

        Weights stay as they are. Those that were drawn before the group was known assume that tensor ranks are
        consecutive processes; otherwise, ranks with equal seeds have equal parts, which is a warning. Then call
        ``reset_parameters()``, or load a checkpoint.

        Args:
            tp_group: a `torch.distributed` process group of tp_size ranks; None: unknown ranks.
            check: whether the ranks compare the arguments of every call on the CPU, in one exchange of 16 bytes.

        Raises:
            InputError: it is not a process group, has another number of ranks, or the layer was divided by
                `undivided.parallel.parallelize`.
        """
        self.tensor_parallel = self.tensor_parallel.with_group(tp_group, checked_flag("check", check))
        self._set_ranks_of_blocks(tp_group, check)
        if self.tensor_parallel.ranks is not None:
            self._warn_of_equal_weights(self.tensor_parallel.ranks)

    def _warn_of_equal_weights(self, ranks: TensorRanks) -> None:
        """Warn if ranks with equal seeds have drawn equal weights, because the ranks were unknown."""
        inits = [value for block in self.children() for value in vars(block).values() if isinstance(value, DividedInit)]
        if any(init.may_be_equal(ranks.group) for init in inits):
            warnings.warn(
                f"the weights of {type(self).__name__} {self.layer_number} were drawn before its tensor parallel rank "
                "was known, so ranks with equal seeds have equal parts; call reset_parameters(), or load a checkpoint",
                stacklevel=4,
            )

    def _shared_state(self) -> dict[str, object]:
        """What tensor parallel ranks share besides the arguments of a call: modes, frozen parameters, rates of dropout,
        and the options of the layer and the modules in it as they were at the first call."""
        if self._options_at_first_call is None:
            self._options_at_first_call = {
                f"layer.{name}" if name else "the options of the layer": f"{type(inner).__name__}({inner.extra_repr()})"
                for name, inner in self.named_modules()
            }
        return {
            "training": self.training,
            "frozen parameters": ", ".join(n for n, p in self.named_parameters() if not p.requires_grad) or "none",
            "sequence_parallel": self.tensor_parallel.sequence_axis is not None,
            "torch.is_grad_enabled()": torch.is_grad_enabled(),
            "torch.autocast": torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
            **self._dropout_rates(),
            **self._options_at_first_call,
        }

    def _contexts(self) -> list[ContextParallel]:
        """The context parallel ranks of each attention of a call that has any, in the order of the call."""
        names = ("self_attention", "inter_attention")
        attentions = [getattr(self, name) for name in names if getattr(self, name, None) is not None] or [self]
        contexts = (getattr(getattr(a, "core_attention", a), "context_parallel", None) for a in attentions)
        return [cp for cp in contexts if cp is not None]

    def _dropout_rates(self) -> dict[str, object]:
        """The probabilities of dropping something, by argument: of the layer, and of the attention in it."""
        core: torch.nn.Module = self
        for name in ("self_attention", "core_attention"):
            core = getattr(core, name, core)
        return {name: getattr(module, name) for module in (self, core) for name in _RATES if hasattr(module, name)}

    def _set_ranks_of_blocks(self, tp_group: Any, check: bool) -> None:
        """Pass the ranks on to the blocks and modules that hold the parameters."""
