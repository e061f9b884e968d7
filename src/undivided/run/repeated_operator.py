"""Calls of the operator like an earlier one, which run what that one has prepared.

A compiled graph calls it in each layer and each step with tensors of the same sizes. As for repeated calls of
`scaled_dot_product_attention`, what is kept depends on sizes, strides and dtypes, never on which tensors these are.
Calls whose mask has tensors, small ones, are kept with the `Mask` that `shared_masks` finds for them.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from torch import Tensor

from undivided._bounded import Bounded
from undivided.arguments.tensors import have_small_storages
from undivided.masks._predicate import Predicate
from undivided.masks._spec import names_tensors
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.run import shared_masks
from undivided.run.operator_arguments import Arguments, Spec
from undivided.run.replay import PreparedCall, bias_key, is_untransformed, prepared_call, tensors_key
from undivided.selection.decision import Decision
from undivided.selection.policy import Policy


def call_key(args: Arguments) -> object:
    """The key under which later calls find the prepared call: everything the call depends on except the policy
    and the addresses of its tensors.

    None if the call must be prepared: it returns the log-sum-exp, has a mask of large tensors or an optional tensor
    other than a bias, or runs under a mode or autocast.
    """
    q, k, v, bias = args[:4]
    if not (type(q) is type(k) is type(v) is Tensor and q.is_cpu) or not _may_repeat(args.spec):
        return None
    if args.dropout_p or not args.sinks is args.alibi_slopes is args.pages is args.k_scale is args.v_scale is None:
        return None
    if not is_untransformed(q, k, v) or (_has_mask_tensors(args.spec) and not have_small_storages(args.mask)):
        return None
    bias_part = None
    if bias is not None and (bias_part := bias_key(bias)) is None:
        return None
    return args.spec, tuple(args.numbers), args.scale, args.softcap, tensors_key(q, k, v), bias_part


@functools.lru_cache(256)
def _may_repeat(text: str) -> bool:
    """Whether the static part of a call, its spec, has neither a log-sum-exp nor a mask that is a function."""
    spec = Spec.read(text)
    return not spec.reads_lse and Predicate.name not in spec.mask


@functools.lru_cache(256)
def _has_mask_tensors(text: str) -> bool:
    """Whether the mask of a spec has tensors."""
    return names_tensors(Spec.read(text).mask)


class _Calls(Bounded[object, PreparedCall]):
    """Calls by call_key and policy."""

    was_offered = False
    """Whether a call was offered to be kept. The first is not kept: a mask whose tensors are new in each call has no
    second."""


def _kept_calls(args: Arguments) -> _Calls:
    """Where calls are kept: with their mask, as long as its tensors do not change, if it has any."""
    if not _has_mask_tensors(args.spec):
        return _calls
    mask = shared_masks.read(args.mask_handle, Spec.read(args.spec).mask, args.mask, args.numbers)
    return mask.cached("calls of the operator", _Calls, 16)


def run(call_key: object, args: Arguments, policy: Policy) -> Tensor | None:
    """The result of an earlier call with this key and policy for other tensors; None if there was none, or memory is
    missing."""
    prepared = _kept_calls(args).get((call_key, policy))
    return None if prepared is None else prepared.run(args.q, args.k, args.v, args.bias)


def keep(call_key: object, args: Arguments, decision: Decision, call: Call, tensors: Tensors) -> None:
    """Keep a call for later ones with its key, if its backend runs calls again."""
    calls = _kept_calls(args)
    if not calls.was_offered:
        calls.was_offered = True
        return
    # a copy of the mask, because what a mask caches must not keep it alive
    prepared = prepared_call(decision, call.with_problem(call.problem, mask=replace(call.mask)), tensors)
    if prepared is not None:
        calls[call_key, decision.policy] = prepared


_calls = _Calls(1024)
_calls.was_offered = True
