"""Calls of the operator like an earlier one, which run what that one has prepared.

A compiled graph calls it in each layer and each step with tensors of the same sizes. As for repeated calls of
`scaled_dot_product_attention`, what is kept depends on sizes, strides and dtypes, never on which tensors these are.
"""

from __future__ import annotations

import functools

from torch import Tensor

from undivided._bounded import Bounded
from undivided.arguments.tensors import is_dense, is_lazy
from undivided.masks._spec import names_tensors
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.run.operator_arguments import Arguments, Spec
from undivided.run.replay import PreparedCall, is_untransformed, prepared_call
from undivided.selection.decision import Decision
from undivided.selection.policy import Policy


def kind(args: Arguments) -> object:
    """All that a forward on the CPU depends on, but the policy and where its tensors lie; None if it must be prepared.

    That is: with the log-sum-exp, a mask of tensors, optional tensors other than a bias, a mode or autocast.
    """
    q, k, v, bias = args[:4]
    if not (type(q) is type(k) is type(v) is Tensor and q.is_cpu) or not _may_repeat(args.spec):
        return None
    if args.dropout_p or not args.sinks is args.alibi_slopes is args.pages is args.k_scale is args.v_scale is None:
        return None
    if not is_untransformed(q, k, v):
        return None
    bias_kind = None
    if bias is not None:
        if type(bias) is not Tensor or not bias.is_cpu or not is_dense(bias) or is_lazy(bias):
            return None
        bias_kind = bias.shape, bias.stride(), bias.dtype
    return (
        args.spec,
        tuple(args.numbers),
        args.scale,
        args.softcap,
        q.shape,
        k.shape,
        v.shape,
        (q.dtype, k.dtype, v.dtype),
        (k.device, v.device),
        (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()) or (q.stride(), k.stride(), v.stride()),
        bias_kind,
    )


@functools.lru_cache(256)
def _may_repeat(text: str) -> bool:
    """Whether the static part of a call, the operator's spec, has neither a mask of tensors nor a log-sum-exp."""
    spec = Spec.read(text)
    return not spec.reads_lse and not names_tensors(spec.mask)


def run(kind: object, args: Arguments, policy: Policy) -> Tensor | None:
    """The result of an earlier call of this kind and policy for other tensors; None if there was none, or memory is
    missing."""
    prepared = _calls.get((kind, policy))
    return None if prepared is None else prepared.run(args.q, args.k, args.v, args.bias)


def keep(kind: object, decision: Decision, call: Call, tensors: Tensors) -> None:
    """Keep a call for later ones of its kind, if its backend runs calls again."""
    prepared = prepared_call(decision, call, tensors)
    if prepared is not None:
        _calls[kind, decision.policy] = prepared


_calls: Bounded[object, PreparedCall] = Bounded(1024)
