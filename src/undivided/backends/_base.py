"""What a backend is: limits as data, reasons, forward, backward.

A backend is one file or folder here that ends in ``BACKEND = <an instance>``. It declares its limits as a `Limits`,
adds the rules that data cannot express in `reasons`, and computes. Rules and computation are in one place, so that they
stay consistent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from undivided.arguments.tensors import dtype_name
from undivided.machine import Machine, Version, format_version
from undivided.request.call import Call
from undivided.request.problem import FEATURES, Problem
from undivided.request.request import Tensors
from undivided.request.result import Result

Gradients = Sequence[Tensor | None]
"""Gradients of (q, k, v, bias, sinks, alibi_slopes), in the inputs' shapes and dtypes; None if not needed."""

_Optional = Tensor | None

Replay = Callable[[Tensor, Tensor, Tensor, _Optional, _Optional, _Optional, _Optional, _Optional], Tensor]
"""Runs the forward of a call on other tensors (q, k, v, bias, sinks, pages, k_scale, v_scale) of the same dtypes. An
element must be as far from the data pointer as in the call's tensors; shapes may differ (a whole pool for a slice of
it, packed queries for a padded batch). Returns out with the axes of q. Nothing is checked."""

KeyRange = tuple[int, int]
"""The keys ``[start, stop)``."""

ALL_FEATURES = frozenset(FEATURES)

_MASK_WORDS = {
    "causal": "a causal mask",
    "window": "a sliding window",
    "lengths": "per-sequence lengths",
    "q_lengths": "per-sequence query lengths",
    "starts": "left padding",
    "documents": "packed documents",
    "padded": "documents with padding between them",
    "document_ids": "document ids",
    "prefix": "a key prefix",
    "global": "global keys joined to a window",
    "chunks": "chunked attention",
    "dense": "a dense boolean mask",
    "predicate": "a mask predicate",
    "tree": "a draft tree",
    "blocks": "chosen key blocks",
    "ranges": "row ranges of a part of the sequence",
    "origin": "dropout for a part of the batch or of the heads",
}
ALL_MASK_KINDS = frozenset(_MASK_WORDS)
"""All kinds of mask, also those of calls of several ranks: row ranges (`NormalForm.shard`), the origin of dropout."""
ORDINARY_MASK_KINDS = ALL_MASK_KINDS - {"ranges", "tree", "blocks", "origin"}
"""All kinds except ranges of ranks, the origin of dropout, draft trees and chosen key blocks."""


@dataclass(frozen=True)
class Limits:
    """What a backend can do, as data. By default no mask and no feature is supported: each is declared.

    devices: device types. dtypes: of q, k, v.
    max_head_dim, head_dim_multiple: of both head sizes; None / 1 for any.
    masks: kinds of mask (`Mask.kinds`) that run natively.
    alignments: supported alignments of causal masks and windows, for problems where the two alignments differ.
    features: a subset of `FEATURES`.
    compute_capability: (lowest, highest), None if unlimited; only on CUDA.
    packages: required packages: (name, lowest version or None, first version that no longer works or None).
    batch_invariant: a row's result can be made to depend on its own query, keys and values only.
    """

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    masks: frozenset[str] = frozenset()
    alignments: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    compute_capability: tuple[tuple[int, int] | None, tuple[int, int] | None] = (None, None)
    packages: tuple[tuple[str, Version | None, Version | None], ...] = ()
    batch_invariant: bool = False
    notes: dict[str, str] = field(default_factory=dict)
    """Why a feature or mask kind is missing, added in brackets to its reason."""


class Backend:
    """The protocol of a backend. Subclasses set the class attributes and implement `forward` and `backward`; those of
    other packages implement `rank` too."""

    name: ClassVar[str]
    family: ClassVar[str]
    summary: ClassVar[str]
    """One line for the table of backends."""
    limits: ClassVar[Limits]
    how_to_get: ClassVar[str] = ""
    """How to make it available, e.g. "pip install flash-attn"."""

    def rank(self, problem: Problem, machine: Machine) -> float:
        """The default rank of a backend that the table in `undivided.selection.order` does not have.

        Backends are tried from the lowest to the highest; the reference has 100. Backends that were measured on such a
        problem are ordered by their measured rates instead (`undivided.selection.measured`).
        """
        raise NotImplementedError

    def unavailable(self, machine: Machine) -> str | None:
        """Why this machine cannot run any problem with it; None if it can."""
        return _missing_package(self.limits, machine)

    def runs_on(self, device: str) -> bool:
        """Whether it has kernels for "cpu" or "cuda" tensors."""
        return device in self.limits.devices

    def needs_gpu(self, machine: Machine) -> bool:
        """Whether the machine lacks a GPU for it, so that no package would help."""
        has_gpu = machine.compute_capability is not None or machine.hip
        return not has_gpu and not self.runs_on("cpu")

    def summary_on(self, machine: Machine) -> str:
        """Its line in the table on this machine."""
        return self.summary

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """Every reason why it cannot run exactly this problem; empty means it can.

        A reason states value and limit. Of lengths, `reasons`, `rank` and `only_when_asked` may use only comparisons
        with each other and with powers of two, and divisibility by 8, 16, 32 or 64: lengths that agree in these share
        a decision (`undivided.selection.decision.selection_key`).
        """
        return limit_reasons(self.limits, problem, machine)

    def only_when_asked(self, problem: Problem, machine: Machine) -> str | None:
        """Why it is chosen only if requested by name, although it could run; None if it is chosen without a request."""
        return None

    def notes(self, call: Call, tensors: Tensors) -> list[str]:
        """Facts for `explain` that depend on the tensors' values, such as keys that sequences share."""
        return []

    def last_notes(self, problem: Problem) -> list[str]:
        """As `notes`, for the last call of this thread, which had this problem."""
        return []

    def forward(self, call: Call, tensors: Tensors) -> Result:
        """Attention. Autograd does not record here.

        Args:
            call: the problem, which this backend has no reason to refuse, and its options.
            tensors: q, k and v in the problem's layout (k and v are pools if the call has pages), and a bias with four
                axes.

        Returns:
            out in the problem's layout, with any strides, and lse [B, H, Sq].
        """
        raise NotImplementedError

    def backward(
        self, call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """Gradients by recomputation from (out, lse).

        With the feature "partial" the call has only some of the keys, and (out, lse) are over all keys: the weights are
        exp(score - lse).

        Args:
            call, tensors: as for `forward`.
            result: what `forward` of this or another backend returned.
            grad_out: the gradient of out, in the problem's layout, with any strides.
            grad_lse: the gradient of lse [B, H, Sq], or None.

        Returns:
            The gradient of each of `tensors`; None if ``call.needs`` is False for it.
        """
        raise NotImplementedError

    def replay(self, call: Call, tensors: Tensors) -> Replay | None:
        """The forward of this call for other tensors of the same sizes; None if the backend prepares each call anew."""
        return None

    def replay_with_mask(self, call: Call, tensors: Tensors, attn_mask: Tensor) -> Replay | None:
        """As `replay`, for a call that a boolean mask restricts further: a replay gets it in place of a bias.

        Args:
            call: without that mask. tensors: without a bias.
            attn_mask: [B|1, H|1, Sq|1, Sk|1]; those of later calls have the same shape and strides.
        """
        return None

    def replay_keys(
        self, replay: Replay, problem: Problem, keys: Sequence[KeyRange] | None, k: Tensor, v: Tensor
    ) -> Replay | None:
        """A result of `replay` for a problem with another number of keys; None if `replay` must prepare it.

        Args:
            replay: for one query per sequence, with a mask of lengths or without a mask; neither pages nor scales.
            problem: the call's own but for the number of keys.
            keys: which of them each sequence attends to; None: all, as without a mask.
            k, v: as those of the call, but for the number of keys and all strides but the last.
        """
        return None

    def recorded(self, call: Call, tensors: Tensors) -> Tensor | None:
        """The output [B, H, Sq, Dv] of a PyTorch operator that autograd records itself; None to use `forward`.

        Called while autograd records and only q, k and v need gradients. It saves the Python call of an autograd node
        of our own. The operator's node must save query, key, value, output and logsumexp under these names: they are
        read for the second derivative.
        """
        return None

    def __reduce__(self) -> Any:
        """Copies and pickles of a backend are the backend itself: decisions compare them by identity."""
        is_global = getattr(sys.modules[type(self).__module__], "BACKEND", None) is self
        return "BACKEND" if is_global else super().__reduce__()

    def __repr__(self) -> str:
        return f"<backend {self.name}>"


def limit_reasons(limits: Limits, problem: Problem, machine: Machine) -> list[str]:
    """The reasons that follow from `Limits` alone."""
    reasons = []
    if problem.device not in limits.devices:
        reasons.append(f"device={problem.device} (runs on {', '.join(sorted(limits.devices))})")
    if (missing := _missing_package(limits, machine)) is not None:
        reasons.append(missing)
    if problem.device == "cuda" and "cuda" in limits.devices:
        reasons += _capability_reasons(limits, machine)
    if problem.dtype not in limits.dtypes:
        reasons.append(
            f"dtype={dtype_name(problem.dtype)} (supports {', '.join(sorted(map(dtype_name, limits.dtypes)))})"
        )
    reasons += _head_dim_reasons(limits, problem)
    for kind in sorted(problem.mask.kinds - limits.masks):
        reasons.append(_with_note(f"no support for {_MASK_WORDS[kind]}", limits.notes.get(kind)))
    if problem.align in ("top_left", "bottom_right") and problem.align not in limits.alignments:
        reasons.append(f"{problem.align.replace('_', '-')} alignment, and the two differ here")
    for feature in sorted(problem.features - limits.features):
        reasons.append(_with_note(f"no support for {FEATURES[feature]}", limits.notes.get(feature)))
    if problem.batch_invariant and not limits.batch_invariant:
        reasons.append("no support for batch-invariant results (its order of sums depends on the batch)")
    elif problem.batch_invariant and "document_ids" in problem.mask.kinds:
        reasons.append(
            "no support for batch-invariant results of document ids (masks.documents says where each one starts)"
        )
    return reasons


def _head_dim_reasons(limits: Limits, problem: Problem) -> list[str]:
    reasons = []
    sizes = {"head_dim": problem.qk_dim}
    if problem.v_dim != problem.qk_dim:
        sizes["value_dim"] = problem.v_dim
    for name, size in sizes.items():
        if limits.max_head_dim is not None and size > limits.max_head_dim:
            reasons.append(f"{name}={size} (max {limits.max_head_dim})")
        if size % limits.head_dim_multiple:
            reasons.append(f"{name}={size} (must be a multiple of {limits.head_dim_multiple})")
    return reasons


def _missing_package(limits: Limits, machine: Machine) -> str | None:
    for name, lowest, first_broken in limits.packages:
        version = machine.version(name)
        required = f" {format_version(lowest)} or later" if lowest else ""
        if version is None:
            return f"{name}{required} is not installed"
        if lowest is not None and version < lowest:
            return f"{name} {format_version(version)} (needs{required})"
        if first_broken is not None and version >= first_broken:
            return f"{name} {format_version(version)} (must be before {format_version(first_broken)})"
    return None


def _capability_reasons(limits: Limits, machine: Machine) -> list[str]:
    lowest, highest = limits.compute_capability
    if machine.compute_capability is None:
        return []
    have = format_version(machine.compute_capability)
    if lowest is not None and machine.compute_capability < lowest:
        return [f"compute capability {have} (min {lowest[0]}.{lowest[1]})"]
    if highest is not None and machine.compute_capability > highest:
        return [f"compute capability {have} (max {highest[0]}.{highest[1]})"]
    return []


def _with_note(reason: str, note: str | None) -> str:
    return f"{reason} ({note})" if note else reason
