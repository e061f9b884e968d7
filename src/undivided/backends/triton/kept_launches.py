"""The launches of a forward or a backward, kept for the next call with tensors of the same kind.

The next call finds them in an object that such calls share: the checked mask, or the strides if there is no mask. It
allocates the results and launches, which takes Python about a third of the time of a first call. Launches are
kept for calls whose only tensors are q, k, v, their scales, a block table, sinks and the mask's ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.arguments.tensors import empty_rows_like, is_traced
from undivided.backends._base import Gradients
from undivided.backends.triton import descriptors
from undivided.backends.triton.inputs import KernelInputs, as_bytes_of_fp8, fp32_in_order, precision, scale_rows
from undivided.backends.triton.launches import ALIGNMENT, Launch
from undivided.kernels.triton import config
from undivided.masks.normal_form import NormalForm
from undivided.request.call import Call
from undivided.request.request import Tensors
from undivided.request.result import Result, sink_factor

MAX_KEPT = 16
"""Calls with one mask, or with one kind of tensors: all are forgotten if there are more (a scale that always
changes)."""

_MORE_TENSORS = frozenset({"bias", "alibi", "dropout"})


_OF_THE_MASK = frozenset({"tiles", "ranges", "columns", "places"})
"""The tensors of a launch that belong to the mask, and are the same in the next call with it."""


class KeptLaunch(NamedTuple):
    """One launch of a kernel.

    tensors: tables and ranges of the mask, which the kernel reads.
    descriptors: tensor descriptors by the names of the tensors that they replace, without their tensors.
    """

    launch: Launch
    tensors: Mapping[str, Tensor]
    descriptors: Mapping[str, Any]

    @staticmethod
    def from_launch(launch: Launch, tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> KeptLaunch:
        """What is kept of a launch with these tensors and tensor descriptors."""
        kept = {name: tensor for name, tensor in tensors.items() if name in _OF_THE_MASK}
        return KeptLaunch(launch, kept, {name: descriptors.with_tensor(one, None) for name, one in described.items()})

    def run(self, given: Mapping[str, Tensor]) -> None:
        """Launch with these tensors, by name."""
        described = {name: descriptors.with_tensor(one, given[name]) for name, one in self.descriptors.items()}
        self.launch.run({**given, **self.tensors, **described})


class ForwardLaunch(NamedTuple):
    """The launches for some rows of a forward.

    kept: of the kernel. merge: of partial results, None if keys are not split.
    partial_sizes: [splits, B, H, rows, Dv].
    tensors_of: computes the tensors of `kept` for another mask of the same structure; None if that needs a new launch.
    """

    kept: KeptLaunch
    merge: Launch | None
    partial_sizes: tuple[int, ...]
    tensors_of: Callable[[NormalForm], Mapping[str, Tensor]] | None

    def run(self, given: Mapping[str, Tensor], out: Tensor, lse: Tensor) -> None:
        """Write these rows into `out`, in any layout, and `lse` [B, H, Sq]. Kernels take addresses, so that no views
        are made."""
        if self.merge is None:
            self.kept.run({**given, "out": out, "lse": lse})
            return
        partials = torch.empty(self.partial_sizes, dtype=torch.float32, device=out.device)
        partial_lses = torch.empty(self.partial_sizes[:-1], dtype=torch.float32, device=out.device)
        self.kept.run({**given, "out": partials, "lse": partial_lses})
        results = {"partials": partials, "partial_lses": partial_lses, "out": out, "lse": lse}
        self.merge.run({**given, **self.kept.tensors, **results})


class ForwardLaunches(NamedTuple):
    """The launches of a forward, each of some of its rows."""

    launches: Sequence[ForwardLaunch]

    def with_form(self, form: NormalForm) -> ForwardLaunches | None:
        """The launches for another mask of the same structure; None if they need new ones."""
        new = [
            one._replace(kept=one.kept._replace(tensors=one.tensors_of(form)))
            for one in self.launches
            if one.tensors_of is not None
        ]
        return ForwardLaunches(new) if len(new) == len(self.launches) else None

    def run(self, call: Call, tensors: Tensors) -> Result:
        """The results for these tensors."""
        problem, q = call.problem, tensors.q
        batch, heads, q_len = problem.batch, problem.heads, problem.q_len
        out_BSHD = layout.empty(problem.layout, (batch, q_len, heads, problem.v_dim), q)
        lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q.device)
        k, v = as_bytes_of_fp8(tensors.k, tensors.v, problem)
        given = {"q": q, "k": k, "v": v}
        if call.pages is not None:
            given["pages"] = call.pages.contiguous()
        if tensors.sinks is not None:
            given["sinks"] = fp32_in_order(tensors.sinks)
        if call.k_scale is not None and call.v_scale is not None:
            given["k_scale"], given["v_scale"] = (scale_rows(t, problem) for t in (call.k_scale, call.v_scale))
        for launch in self.launches:
            launch.run(given, out_BSHD, lse)
        return Result(out_BSHD, lse).in_layout(problem.layout)


class BackwardLaunches(NamedTuple):
    """The launches of a backward, in order; they read and write tensors in any layout, by address."""

    launches: Sequence[KeptLaunch]

    def run(self, call: Call, tensors: Tensors, result: Result, grad_out: Tensor) -> Gradients:
        """The gradients of q, k, v and the sinks that the call needs."""
        (q, k, v, _, sinks, _), (needs_q, needs_k, needs_v, _, needs_sinks, _) = tensors, call.needs
        given = {"q": q, "k": k, "v": v, "g": grad_out, "out": result.out, "lse": result.lse}
        given["delta"] = torch.empty_like(result.lse)
        if needs_q:
            given["dq"] = empty_rows_like(q)
        if needs_k or needs_v:  # one pass computes both
            given["dk"], given["dv"] = empty_rows_like(k).zero_(), empty_rows_like(v).zero_()
        if sinks is not None:
            given["factor"] = sink_factor(result.lse, fp32_in_order(sinks)).contiguous()
        for launch in self.launches:
            launch.run(given)
        dk, dv = given.get("dk") if needs_k else None, given.get("dv") if needs_v else None
        dsinks = None
        if sinks is not None and needs_sinks:
            dsinks = sink_gradient(result.lse, given["factor"], given["delta"]).to(sinks.dtype)
        return [given.get("dq"), dk, dv, None, dsinks, None]


def sink_gradient(lse: Tensor, factor: Tensor, delta: Tensor) -> Tensor:
    """``-sum over rows of sigmoid(sink - lse) * delta``, fp32 [H]; rows without keys contribute 0."""
    return torch.where(lse == -torch.inf, 0.0, (factor - 1) * delta).sum((0, 2))


def find(call: Call, tensors: Tensors) -> ForwardLaunches | None:
    """The launches of an earlier call with the same mask and tensors of the same kind, or by those with the mask of an
    earlier step; None if there are none."""
    kept, checked = _kept(call), call.checked_mask
    kept_earlier = {} if checked is None else checked.derived_earlier
    if kept is None or not (kept or kept_earlier) or is_traced():
        return None
    key = _key(call, tensors)
    found: ForwardLaunches | None = kept.get(key)
    if found is None and (earlier := kept_earlier.get(key)) is not None:
        found = earlier.with_form(call.normal_form(tensors.q))
        if found is not None:
            kept[key] = found
    return found


class LaunchReplay:
    """The forward of a call for other tensors: by its launches, which the first run keeps.

    Those tensors may have other axes than the call's, as whole pools or packed queries. Their elements lie as its do.
    """

    def __init__(self, call: Call, tensors: Tensors, forward: Callable[[Call, Tensors], Result]) -> None:
        self._call, self._forward = call.with_memory(None, None, None), forward
        own = *tensors[:3], call.k_scale, call.v_scale
        self._axes = tuple([None if tensor is None else (tensor.shape, tensor.stride()) for tensor in own])

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        pages: Tensor | None,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> Tensor:
        assert bias is None
        given = (q, k, v, k_scale, v_scale)
        own_q, own_k, own_v, k_scale, v_scale = map(_with_axes, given, self._axes)
        assert own_q is not None and own_k is not None and own_v is not None
        call, tensors = self._call.with_memory(pages, k_scale, v_scale), Tensors(own_q, own_k, own_v, sinks=sinks)
        found = find(call, tensors)
        out = (self._forward(call, tensors) if found is None else found.run(call, tensors)).out
        return out if out.dim() == q.dim() else out.flatten(0, 1)  # packed queries of a padded batch without padding


def _with_axes(tensor: Tensor | None, axes: tuple[torch.Size, tuple[int, ...]] | None) -> Tensor | None:
    if tensor is None or axes is None or (tensor.shape, tensor.stride()) == axes:
        return tensor
    return tensor.as_strided(*axes)


def replay(call: Call, tensors: Tensors, forward: Callable[[Call, Tensors], Result]) -> LaunchReplay | None:
    """The forward of this call for other tensors, if launches of such calls are kept."""
    return None if _kept(call) is None else LaunchReplay(call, tensors, forward)


def find_gradients(call: Call, tensors: Tensors, result: Result, grad_out: Tensor) -> BackwardLaunches | None:
    """As `find`, for the backward of a call whose lse has no gradient."""
    kept = _kept(call)
    if not kept or is_traced():
        return None
    found: BackwardLaunches | None = kept.get(_gradient_key(call, tensors, result, grad_out))
    return found


def keep(call: Call, inputs: KernelInputs, launches: Sequence[ForwardLaunch | None]) -> None:
    """Keep the launches of a forward, if such calls share an object to keep them in. None: of Triton's interpreter."""
    compiled = [launch for launch in launches if launch is not None]
    if len(compiled) == len(launches):
        _keep(call, inputs, _key(call, inputs.tensors), ForwardLaunches(compiled))


def keep_gradients(
    call: Call, inputs: KernelInputs, result: Result, grad_out: Tensor, launches: Sequence[KeptLaunch | None]
) -> None:
    """As `keep`, for a backward of all rows at once that copied none of its tensors."""
    compiled = [launch for launch in launches if launch is not None]
    if len(compiled) == len(launches):
        _keep(call, inputs, _gradient_key(call, inputs.tensors, result, grad_out), BackwardLaunches(compiled))


def _keep(call: Call, inputs: KernelInputs, key: Hashable, launches: ForwardLaunches | BackwardLaunches) -> None:
    kept, form = _kept(call), inputs.form
    if kept is None or is_traced() or (form is not None and not form.exact):
        return
    if len(kept) >= MAX_KEPT:
        kept.clear()
    kept[key] = launches


def _kept(call: Call) -> dict[Hashable, Any] | None:
    """Where the launches of such calls are kept; None if they are not. Calls without `strides` have other tensors."""
    problem = call.problem
    if call.strides is None or problem.batch_invariant or not _MORE_TENSORS.isdisjoint(problem.features):
        return None
    return call.strides.derived if call.checked_mask is None else call.checked_mask.derived


def _key(call: Call, tensors: Tensors) -> Hashable:
    """What launches depend on besides the object that they are kept in, which stands for dtypes, sizes, strides, device
    and mask."""
    q, k, v, _, sinks, _ = tensors
    pages, k_address, v_address = call.pages, k.data_ptr(), v.data_ptr()
    return (
        call.scale,
        call.softcap,
        q.data_ptr() % ALIGNMENT == 0,
        k_address % ALIGNMENT == 0,
        v_address % ALIGNMENT == 0,
        k_address == v_address,
        pages is None or (pages.data_ptr() % ALIGNMENT == 0, pages.is_contiguous()),
        sinks is None or _is_fp32_in_order(sinks),
        call.k_scale is None or call.k_scale.data_ptr() % ALIGNMENT == 0,
        call.v_scale is None or call.v_scale.data_ptr() % ALIGNMENT == 0,
        config.revision(),
        precision(call.problem),
    )


def _gradient_key(call: Call, tensors: Tensors, result: Result, grad_out: Tensor) -> Hashable:
    """The same for a backward, which reads the result and its gradient too."""
    out, lse = result.out, result.lse
    return (
        _key(call, tensors),
        call.needs,
        out.stride(),
        out.data_ptr() % ALIGNMENT == 0,
        lse.stride(),
        grad_out.dtype,
        grad_out.stride(),
        grad_out.data_ptr() % ALIGNMENT == 0,
    )


def _is_fp32_in_order(sinks: Tensor) -> bool | None:
    """Whether the kernels read the sinks in place, and then whether they are aligned; None if they read a copy."""
    if sinks.dtype != torch.float32 or not sinks.is_contiguous():
        return None
    return sinks.data_ptr() % ALIGNMENT == 0
