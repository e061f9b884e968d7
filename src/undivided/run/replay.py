"""Running a prepared call again, for callers whose calls differ only in where their tensors lie.

The layers of a model that decodes make such calls: one mask and the same sizes, but each layer its own cache. Checks,
selection and the kernel's record take several times as long as the kernel takes for a short cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from undivided.arguments.layout import SEQUENCE_AXIS
from undivided.arguments.tensors import footprint, is_dense, is_lazy, is_traced, jit_trace
from undivided.backends._base import KeyRange, Replay
from undivided.masks import Mask
from undivided.masks.normal_form import NormalForm, Ranges
from undivided.request.call import Call
from undivided.request.request import Request, Tensors
from undivided.run.autograd import any_autocast, is_on_other_gpu
from undivided.run.autograd import run as run_call
from undivided.run.prepare import prepare
from undivided.selection.decision import Decision, set_last
from undivided.selection.policy import Policy

SCALAR_TYPES = frozenset({float, type(None)})
"""The types of the scale and the softcap of calls that run again; others, a tensor too, are checked anew."""


def may_replay(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nothing but the backend sees a call with these tensors: no gradient, and `is_untransformed`."""
    return is_untransformed(q, k, v) and not needs_gradients(q, k, v)


def needs_gradients(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> bool:
    """Whether a call with these tensors is recorded."""
    if not torch.is_grad_enabled():
        return False
    return q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)


def is_untransformed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call with these tensors has no mode, transform or autocast, no GPU but the current one, and memory that
    strides describe."""
    return (
        (q.is_cpu or (q.is_cuda and not is_on_other_gpu(q)))
        and type(q) is Tensor
        and is_dense(q)
        and is_dense(k)
        and is_dense(v)
        and not (is_lazy(q) or is_lazy(k) or is_lazy(v))
        and not any_autocast()
        and not is_traced()
        and forward_ad._current_level < 0
        and jit_trace() is None
    )


def tensors_key(q: Tensor, k: Tensor, v: Tensor) -> tuple[object, ...]:
    """The part of the key of a repeated call that its tensors have, q on the CPU: everything about them except their
    addresses and values."""
    return (
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        v.dtype,
        (k.is_cpu and v.is_cpu) or (k.device, v.device),
        (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()) or (q.stride(), k.stride(), v.stride()),
    )


def bias_key(bias: object) -> tuple[object, ...] | None:
    """As `tensors_key`, of a bias; None if calls with it must be prepared."""
    if type(bias) is not Tensor or not bias.is_cpu or not is_dense(bias) or is_lazy(bias):
        return None
    return bias.shape, bias.stride(), bias.dtype, torch.is_grad_enabled() and bias.requires_grad


def sinks_key(sinks: Tensor | None) -> tuple[object, ...] | None:
    """As `tensors_key`, of sinks, empty without them; None if calls with them must be prepared."""
    if sinks is None:
        return ()
    if type(sinks) not in (Tensor, Parameter) or not is_dense(sinks) or is_lazy(sinks):
        return None
    if sinks.requires_grad and torch.is_grad_enabled():
        return None
    return sinks.shape, sinks.stride(), sinks.dtype, sinks.device


class PreparedCall:
    """A call that was prepared, for tensors of the same sizes, strides and dtypes.

    Args:
        decision: which backend runs.
        replay: its forward.
        call: the call. Its block table and scales are not kept alive.
        footprints: bytes that q, k, v, the bias, the sinks and the scales need, from their first element on.
    """

    def __init__(self, decision: Decision, replay: Replay, call: Call, footprints: tuple[int, ...]) -> None:
        self._decision, self._replay, self._call, self._footprints = decision, replay, call, footprints

    @staticmethod
    def prepare(request: Request, policy: Policy) -> PreparedCall | None:
        """The call of a request; None if its backend prepares each call anew.

        Raises:
            InputError, NoBackendError: as `prepare`.
        """
        return prepared_call(*prepare(request, policy))

    def with_form(
        self, form: NormalForm, q: Tensor, k: Tensor, v: Tensor, pages: Tensor | None, scales: Sequence[Tensor]
    ) -> PreparedCall | None:
        """The same call, for a mask of the same structure with this normal form. Unlike `prepare`, it checks nothing.

        Args:
            form: for the sizes of the call.
            q, k, v, pages, scales: as those of the call: the same sizes and strides.
        """
        k_scale, v_scale = scales or (None, None)
        call = self._call.with_form(Mask(parts=(Ranges(form),)), form).with_memory(pages, k_scale, v_scale)
        return prepared_call(self._decision, call, Tensors(q, k, v))

    def with_keys(self, keys: Sequence[KeyRange] | None, k: Tensor, v: Tensor) -> PreparedCall | None:
        """The same call of one query per sequence for another number of keys of the same `length_class`; None if the
        backend must prepare it. Unlike `prepare`, it checks nothing. Not for pages or quantised keys.

        Args:
            keys: those that each sequence attends to, if the call has a mask of lengths; None if it has no mask.
            k, v: as those of the call, but for the number of keys and all strides but the last.
        """
        decision, call = self._decision, self._call
        problem = call.problem._replace(kv_len=k.shape[SEQUENCE_AXIS[call.problem.layout]])
        replay = decision.backend.replay_keys(self._replay, problem, keys, k, v)
        if replay is None:
            return None
        decision = Decision(problem, decision.machine, decision.policy, decision.chosen)
        footprints = (self._footprints[0], _needed_bytes(k), _needed_bytes(v), 0, self._footprints[4], 0, 0)
        return PreparedCall(decision, replay, call, footprints)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        pages: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor | None:
        """The output for other tensors; None if one of them has lost its memory."""
        q_bytes, k_bytes, v_bytes, bias_bytes, sinks_bytes, k_scale_bytes, v_scale_bytes = self._footprints
        if not (_holds(q, q_bytes) and _holds(k, k_bytes) and _holds(v, v_bytes)):
            return None
        if not (_holds(bias, bias_bytes) and _holds(sinks, sinks_bytes)):
            return None
        if not (_holds(k_scale, k_scale_bytes) and _holds(v_scale, v_scale_bytes)):
            return None
        set_last(self._decision)
        return self._replay(q, k, v, bias, sinks, pages, k_scale, v_scale)


class RecordedCall:
    """A call with gradients that was prepared, for tensors of the same sizes, strides and dtypes that need the same
    gradients.

    Args:
        decision: which backend runs.
        call: the call, without dropout.
        footprints: bytes that q, k, v and the bias need, from their first element on.
    """

    def __init__(self, decision: Decision, call: Call, tensors: Tensors) -> None:
        self._decision, self._call = decision, call
        self._footprints = tuple(map(_needed_bytes, tensors[:4]))

    def run(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """The output for other tensors; None if one of them has lost its memory."""
        if not all(map(_holds, (q, k, v, bias), self._footprints)):
            return None
        set_last(self._decision)
        return run_call(self._decision.backend, self._call, Tensors(q, k, v, bias))  # type: ignore[return-value]  # no lse


def prepared_call(decision: Decision, call: Call, tensors: Tensors) -> PreparedCall | None:
    """The call that `prepare` has returned; None if its backend prepares each call anew."""
    replay = decision.backend.replay(call, tensors)
    if replay is None:
        return None
    footprints = tuple(map(_needed_bytes, (*tensors[:5], call.k_scale, call.v_scale)))
    return PreparedCall(decision, replay, call.with_memory(None, None, None), footprints)


def prepared_call_with_mask(decision: Decision, call: Call, tensors: Tensors, attn_mask: Tensor) -> PreparedCall | None:
    """The call that `prepare` has returned for a boolean mask, for any mask of its shape and strides, which it gets in
    place of a bias; None if its backend prepares each call anew.

    Args:
        call: whose mask has the pairs of one boolean tensor.
        attn_mask: that tensor as the caller's memory holds it, [B|1, H|1, Sq|1, Sk|1].
    """
    _, rest = call.mask.take("dense")
    call = call.with_problem(call.problem._replace(mask=rest.structure), mask=rest, checked_mask=None)
    replay = decision.backend.replay_with_mask(call, tensors, attn_mask)
    if replay is None:
        return None
    footprints = (*map(_needed_bytes, (*tensors[:3], attn_mask)), 0, 0, 0)
    return PreparedCall(decision, replay, call, footprints)


def _needed_bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else footprint(tensor) * tensor.itemsize


def _holds(tensor: Tensor | None, needed: int) -> bool:
    """Whether the storage, which can be resized at any time, has this many bytes from the tensor's first element on."""
    if tensor is None:
        return True
    try:
        return tensor.untyped_storage().nbytes() >= tensor.storage_offset() * tensor.itemsize + needed
    except NotImplementedError:  # tensors of torch.func have no storage
        return False
