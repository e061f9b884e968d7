"""Our own CPU kernel: C++ with SIMD behind a C ABI (`undivided.kernels.cpu`).

The kernel takes any strides whose last one is 1, reads a range of keys for every row (the mask's normal form), and
computes only the pairs in it. What ranges cannot express is passed as a boolean tensor, in blocks of query rows, so
that memory stays O(S * block). What a call passes is valid before the kernel runs; the library still refuses records
whose sizes, strides or ranges contradict each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from undivided.arguments import layout
from undivided.arguments.tensors import has_dispatch
from undivided.backends._base import (
    ALL_FEATURES,
    ALL_MASK_KINDS,
    Backend,
    Gradients,
    KeyRange,
    Limits,
    Replay,
    limit_reasons,
)
from undivided.backends.native import chosen, gradients
from undivided.backends.native.call import Records, is_plain, page_fields, plain_record, with_dense
from undivided.backends.native.memory import as_kernel_sinks, contiguous_groups, with_addresses
from undivided.backends.native.replay import UNSUPPORTED_FEATURES, KernelReplay, new_output
from undivided.backends.shared.chosen import VirtualSequences, block_pairs
from undivided.kernels import cpu
from undivided.machine import Machine
from undivided.masks.normal_form import BlockPairs
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors, new_tuple
from undivided.request.result import UNREAD, Result


class Native(Backend):
    """The C++ kernel as a backend."""

    name = "native"
    family = "flash"
    summary = "our C++ kernel: SIMD, any mask, threads of PyTorch's OpenMP"
    limits = Limits(
        devices=frozenset({"cpu"}),
        dtypes=frozenset(cpu.DTYPES),
        masks=ALL_MASK_KINDS,
        alignments=frozenset({"top_left", "bottom_right"}),
        features=ALL_FEATURES - {"strided"},
        batch_invariant=True,
        notes={"strided": "its rows are contiguous"},
    )

    def unavailable(self, machine: Machine) -> str | None:
        """The reason if the library is not built or does not load; otherwise None. A described machine has it."""
        if not machine.probed:
            return None
        library = cpu.load()
        return library if isinstance(library, str) else None

    def reasons(self, problem: Problem, machine: Machine) -> list[str]:
        """The limits, and whether the library loads."""
        reasons = limit_reasons(self.limits, problem, machine)
        if problem.device == "cpu" and machine.probed:
            cpu.warn_if_slower()
        if problem.device == "cpu" and (missing := self.unavailable(machine)) is not None:
            reasons.append(missing)
        return reasons

    def notes(self, call: Call, tensors: Tensors) -> list[str]:
        """The keys that are read once for several sequences, because their block tables begin with the same pages."""
        library = cpu.load()
        restrictions = [] if isinstance(library, str) else _restrictions(library)
        if "blocks" in call.problem.mask.kinds and call.problem.device == "cpu":
            return restrictions + chosen.notes(call, tensors)
        if isinstance(library, str) or not _has_readable_pages(call, tensors):
            return restrictions
        views = _kernel_views(call, tensors)
        # nothing is computed: q stands for the output
        records = Records(call, tensors, (*views, views[0], UNREAD), takes_pages=True)
        return restrictions + _shared_notes(library.shared_keys(records.record(slice(0, call.problem.q_len))))

    def last_notes(self, problem: Problem) -> list[str]:
        """As `notes`, of this thread's last forward."""
        library = cpu.load()
        if "paged" not in problem.features or isinstance(library, str):
            return []
        return _shared_notes(library.shared_keys(None))

    def forward(self, call: Call, tensors: Tensors) -> Result:
        """One call of the kernel, or one per block of rows if the mask is more than ranges."""
        library = cpu.load()
        assert isinstance(library, cpu.Library)
        problem = call.problem
        if "blocks" in problem.mask.kinds and (pairs := block_pairs(call, tensors, reads_values=True)) is not None:
            return self._forward_of_blocks(call, tensors, pairs)
        q, k, v, _, _, _ = tensors
        addresses, strides = (q.data_ptr(), k.data_ptr(), v.data_ptr()), call.strides
        if 0 in addresses or q.is_neg() or k.is_neg() or v.is_neg():
            (tensors, addresses), strides = with_addresses(tensors), None
        out, lse = new_output(problem, q), UNREAD
        features = problem.features
        if "lse" in features or "backward" in features:  # `Problem.lse_is_read`, without the cost of a property
            lse = out.new_empty((problem.batch, problem.heads, problem.q_len), dtype=torch.float32)
        if call.k_scale is not None:
            call = contiguous_groups(call)
        if is_plain(call, tensors):
            _table, pages = page_fields(call, tensors)
            sinks = as_kernel_sinks(tensors.sinks)
            library.forward(plain_record(call, tensors, addresses, strides, out, lse, pages, sinks))
            return new_tuple(Result, (out, lse))
        out_BHSD = layout.heads_first(out, problem.layout)
        records = Records(call, tensors, (*_kernel_views(call, tensors), out_BHSD, lse), takes_pages=True)
        for rows in records.slices():
            library.forward(records.record(rows))
        return Result(out, lse)

    def _forward_of_blocks(self, call: Call, tensors: Tensors, pairs: BlockPairs) -> Result:
        """One call for the sequences that the query blocks become."""
        problem, (tensors, _) = call.problem, with_addresses(tensors)
        virtual = VirtualSequences.of_call(call, tensors, pairs, joins_heads=True)
        result = self.forward(*virtual.paged_call())
        out = torch.zeros_like(new_output(problem, tensors.q))
        virtual.rows.put_heads(result.out, layout.heads_first(out, problem.layout).transpose(1, 2))
        if result.lse is UNREAD:
            return Result(out, UNREAD)
        lse = out.new_full((problem.batch, problem.heads, problem.q_len), -torch.inf, dtype=torch.float32)
        virtual.rows.put_heads(result.lse[..., None], lse.transpose(1, 2)[..., None])
        return Result(out, lse)

    def replay(self, call: Call, tensors: Tensors) -> Replay | None:
        """The forward by one record, if it points to the mask as stored and reads no optional tensor but a bias
        and sinks."""
        library, problem = cpu.load(), call.problem
        if isinstance(library, str) or not problem.features.isdisjoint(UNSUPPORTED_FEATURES):
            return None
        if "blocks" in problem.mask.kinds or (tensors.bias is not None and tensors.bias.dtype not in cpu.DTYPES):
            return None
        if call.k_scale is not None and contiguous_groups(call) is not call:
            return None
        out = new_output(problem, tensors.q)
        if is_plain(call, tensors):
            own, addresses = with_addresses(tensors)
            strides, (_table, pages) = call.strides if own is tensors else None, page_fields(call, tensors)
            sinks = as_kernel_sinks(tensors.sinks)
            plain = plain_record(call, own, addresses, strides, out, UNREAD, pages, sinks)
            return KernelReplay(library, plain, call, is_plain=True)
        views = *_kernel_views(call, tensors), layout.heads_first(out, problem.layout), UNREAD
        records = Records(call, tensors, views, takes_pages=True)
        if not records.mask_is_stored():
            return None
        return KernelReplay(library, records.record(slice(0, problem.q_len)), call, records.mask_memory)

    def replay_with_mask(self, call: Call, tensors: Tensors, attn_mask: Tensor) -> Replay | None:
        """The record of the call, with the mask's strides."""
        library, problem = cpu.load(), call.problem
        if (
            isinstance(library, str)
            or not problem.features.isdisjoint(UNSUPPORTED_FEATURES)
            or tensors.sinks is not None
            or not is_plain(call, tensors)
        ):
            return None
        own, addresses = with_addresses(tensors)
        strides = call.strides if own is tensors else None
        plain = plain_record(call, own, addresses, strides, new_output(problem, tensors.q), UNREAD)
        mask = attn_mask.expand(problem.batch, problem.heads, problem.q_len, problem.kv_len)
        return KernelReplay(library, with_dense(plain, mask), call, takes_mask=True)

    def replay_keys(
        self, replay: Replay, problem: Problem, keys: Sequence[KeyRange] | None, k: Tensor, v: Tensor
    ) -> Replay | None:
        """The record of the first call with the keys of this one, if it is that of a plain call."""
        return replay.with_keys(problem, keys, k, v) if isinstance(replay, KernelReplay) else None

    def backward(
        self, call: Call, tensors: Tensors, result: Result, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Gradients:
        """One call of the kernel, or one per block of rows, summed in fp32."""
        if "blocks" in call.problem.mask.kinds and (pairs := block_pairs(call, tensors, reads_values=True)) is not None:
            return chosen.gradients(call, tensors, pairs, result, grad_out, grad_lse)
        return gradients.backward(call, tensors, result, grad_out, grad_lse)


def status() -> str:
    """How the kernel runs in this process, in one line of text."""
    library = cpu.load()
    if isinstance(library, str):
        return "not loaded: PyTorch's kernels run on the CPU (the row native below says why, and what builds it)"
    line = "; ".join([f"runs at level {library.level} (UNDIVIDED_ISA forces another)", *_restrictions(library)])
    if library.is_forked():
        line += "; this process was forked: the kernel starts its own threads, and PyTorch's may wait for the parent's"
    return line


def _restrictions(library: cpu.Library) -> list[str]:
    """What the library cannot use in this process."""
    restrictions = [library.lost_level] if library.lost_level else []
    if not library.has_openmp:
        restrictions.append("it starts its own threads, because this process has no OpenMP runtime that it can use")
    return restrictions


def _kernel_views(call: Call, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, Sq, Dk]; k and v [B, N, Sk, D], or views of the pools of a paged cache, [pages, N, page_size, D]."""
    if call.pages is None:
        return tensors.heads_first(call.problem.layout)
    q = layout.heads_first(tensors.q, call.problem.layout)
    return q, tensors.k.transpose(1, 2), tensors.v.transpose(1, 2)


def _has_readable_pages(call: Call, tensors: Tensors) -> bool:
    """Whether the call has a block table, values on the CPU, and a mask of ranges."""
    if call.pages is None or call.problem.device != "cpu":
        return False
    operands = (tensors.q, tensors.k, tensors.v, call.pages)
    if any(has_dispatch(tensor) or not tensor.is_cpu for tensor in operands):
        return False
    return call.normal_form(tensors.q).exact


def _shared_notes(groups: list[tuple[int, int, int]]) -> list[str]:
    return [f"{count} sequences share keys {key} to {key + keys - 1}" for count, key, keys in groups]


BACKEND = Native()
