"""The arguments of the operator `undivided::attention` and of its backward: their schema, and how they are saved."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from undivided.request.request import Tensors

SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, Tensor? alibi_slopes, Tensor[] mask, "
    "Tensor? dropout_seed, Tensor? pages, str spec, float? scale, float? softcap, float dropout_p, "
    "SymInt[] numbers, Tensor? mask_handle"
)
"""The arguments of the operator without the scales, which are also the first of its backward."""


class Arguments(NamedTuple):
    """The arguments of the operator, and the first of its backward, in the order of the schema."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    mask: list[Tensor]
    dropout_seed: Tensor | None
    pages: Tensor | None
    spec: str
    scale: float | None
    softcap: float | None
    dropout_p: float
    numbers: Sequence[int]
    mask_handle: Tensor | None
    """See `shared_masks`."""
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def tensors(self) -> Tensors:
        """Those that may have gradients."""
        return Tensors(self.q, self.k, self.v, self.bias, self.sinks, self.alibi_slopes)

    @property
    def of_backward(self) -> tuple[Any, ...]:
        """The first arguments of the backward: it has no scales, because quantised inputs have no gradients."""
        return self[: self._fields.index("k_scale")]

    @property
    def saved(self) -> tuple[Tensor | None, ...]:
        """The tensors that the backward needs; `SavedArguments.read` is the inverse."""
        return (*self.tensors, *self.mask, self.dropout_seed, self.pages, self.mask_handle)

    @property
    def constants(self) -> tuple[str, float | None, float | None, float, Sequence[int]]:
        """The arguments that are not tensors."""
        return self.spec, self.scale, self.softcap, self.dropout_p, self.numbers


class BackwardArguments(NamedTuple):
    """The arguments of the backward operator: those of the forward, its results, and the gradients of these."""

    of_forward: Arguments
    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None

    @staticmethod
    def read(arguments: Sequence[Any]) -> BackwardArguments:
        """The arguments in the order of the schema."""
        *of_forward, out, lse, grad_out, grad_lse = arguments
        return BackwardArguments(Arguments(*of_forward), out, lse, grad_out, grad_lse)


class SavedArguments(NamedTuple):
    """What a backward reads from its context: the arguments of the operator, and the tensors saved after them."""

    args: Arguments
    others: Sequence[Any]

    @staticmethod
    def write(ctx: Any, args: Arguments, *others: Tensor | None) -> None:
        """Save the arguments and the other tensors in the context."""
        ctx.save_for_backward(*args.saved, *others)
        ctx.mask_tensor_count, ctx.constants = len(args.mask), args.constants
        ctx.set_materialize_grads(False)

    @staticmethod
    def read(ctx: Any) -> SavedArguments:
        """What `write` has saved, without the scales."""
        saved = ctx.saved_tensors  # read once, because saved-tensor hooks unpack at every read
        tensors, after_tensors = saved[: len(Tensors._fields)], saved[len(Tensors._fields) :]
        mask, after_mask = after_tensors[: ctx.mask_tensor_count], after_tensors[ctx.mask_tensor_count :]
        seed, pages, handle, *others = after_mask
        args: tuple[Any, ...] = (*tensors, list(mask), seed, pages, *ctx.constants, handle)
        return SavedArguments(Arguments(*args), others)


ANY_SWITCHES = "-"
"""In place of PyTorch's switches, for a call that does not depend on them."""

FLAGS = {str(flag): flag for flag in (None, True, False)}


NO_BAR = "//"
"""In place of "|" in a layout, which may be any text until it is checked."""


class Spec(NamedTuple):
    """The static part of a call; the operator takes it as one string."""

    layout: str
    mask: str
    needs: str
    """A letter y or n for each differentiable input: what needs a gradient. The operator has what is known when a graph
    is recorded; the backward has letters of its own, and computes the log-sum-exp if the operator did not."""
    deterministic: str
    return_lse: str
    switches: str = ANY_SWITCHES
    """PyTorch's switches when the graph was traced; "" if those count that are set when it runs."""
    batch_invariant: str = "None"
    backend: str = ""
    """The caller's choice, which may be any text, after "="; or nothing."""

    @staticmethod
    @functools.lru_cache(256)
    def read(text: str) -> Spec:
        """The inverse of ``"|".join(spec)``."""
        layout, *others = text.split("|", len(Spec._fields) - 1)
        return Spec(layout.replace(NO_BAR, "|"), *others)

    @property
    def requested_backend(self) -> str | None:
        """The caller's choice of a backend."""
        return self.backend[1:] if self.backend else None

    @property
    def needed(self) -> tuple[bool, ...]:
        """Which differentiable inputs need a gradient."""
        return tuple([letter == "y" for letter in self.needs])

    @property
    def reads_lse(self) -> bool:
        """Whether the caller or a backward reads the log-sum-exp; if not, it is a tensor without elements."""
        return self.return_lse == "y" or "y" in self.needs
