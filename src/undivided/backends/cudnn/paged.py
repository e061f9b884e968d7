"""cuDNN on a paged cache, one query per sequence: cuDNN computes the full pages, PyTorch the last one; both are merged.

cuDNN multiplies what it masks by 0 (cudnn-frontend issue 624: rows behind the last key "must be finite"), and unused
slots of a cache's last page may hold NaN. So cuDNN gets lengths that end with the last full page, and a table whose
unused entries repeat the sequence's first page: everything that it can load is a real key of that sequence. The keys of
the last, partly filled page are gathered and computed in fp32.

Source: cudnn-frontend, docs/operations/Attention.md (1.10: ``K[table[b, 0, s // page, 0], h, s % page, d]``, pages of a
power of two) and sdpa_support_surface.h; TransformerEngine 2.20 (fused_attn.cpp, dot_product_attention/utils.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments import layout as _layout
from undivided.backends.cudnn import graph
from undivided.backends.cudnn.graph import CudnnCall
from undivided.backends.shared import cudnn_rules
from undivided.backends.shared.cudnn_rules import cudnn_name
from undivided.backends.shared.documents import as_offsets, sequence_lengths
from undivided.backends.shared.empty_rows import blank_rows
from undivided.backends.shared.gpu_rules import capability_name
from undivided.backends.shared.kernel_inputs import align
from undivided.machine import Machine
from undivided.masks import FULL
from undivided.request.call import Call
from undivided.request.problem import Problem
from undivided.request.request import Tensors
from undivided.request.result import Result, lse_dtype, merge


def reasons(problem: Problem, machine: Machine) -> list[str]:
    """Every reason why cuDNN cannot read this paged cache."""
    reasons = []
    if problem.q_len != 1:
        reasons.append("paged keys with more than one query per sequence (its last page is computed separately)")
    if other_kinds := problem.mask.kinds - {"lengths", "causal"}:
        reasons.append(f"paged keys with {', '.join(sorted(other_kinds))}")
    if problem.align == "top_left" and problem.mask.right is not None:
        reasons.append("paged keys with top-left alignment")
    if unfit := problem.features & {"backward", "bias", "alibi"}:
        reasons.append(f"paged keys with {', '.join(sorted(unfit))}")
    size = problem.page_size or 0
    if size & (size - 1):
        reasons.append(f"page_size={size} (must be a power of two)")
    version, capability = machine.version("cudnn"), machine.compute_capability
    # cuDNN needs no band: a single query under a bottom-right causal mask sees every key
    reasons += cudnn_rules.reasons(problem._replace(mask=FULL.structure, align=None), machine, plain=True)
    if version is None or capability is None:
        return reasons
    if version < (9, 5):
        reasons.append(f"paged keys ({cudnn_name(version)}; from 9.5)")
    if max(problem.qk_dim, problem.v_dim) > 128 and version <= (9, 9, 0):
        reasons.append(f"paged keys with head sizes above 128 ({cudnn_name(version)}; after 9.9.0)")
    if capability == (8, 9) or capability >= (12, 0):
        reasons.append(f"paged keys on {capability_name(capability)} (TransformerEngine: a bug in cuDNN)")
    return reasons


def forward(call: Call, tensors: Tensors) -> Result:
    """Attention of one query per sequence; the log-sum-exp is over the keys, sinks enter in the merge."""
    problem = call.problem
    assert call.pages is not None and problem.page_size is not None
    sequences = sequence_lengths(call)
    assert sequences is not None, "a paged problem carries the lengths"
    lengths = as_offsets(sequences.kv, tensors.q)
    full, rest = lengths // problem.page_size, lengths % problem.page_size
    pages = call.pages.clamp(0, tensors.k.shape[0] - 1)
    results = (_full_pages(call, tensors, pages, full), _last_page(call, tensors, pages, full, rest))
    out, lse = merge([r.out for r in results], [r.lse for r in results], tensors.sinks, layout="bshd")
    return Result(out.to(problem.dtype), lse)


def _full_pages(call: Call, tensors: Tensors, pages: Tensor, full: Tensor) -> Result:
    """cuDNN over the first `full` pages of each sequence: out [B, 1, H, Dv] and lse [B, H, 1], both in the precision
    of the softmax."""
    problem = call.problem
    page = problem.page_size or 1
    # each table width needs a graph of its own: widths are powers of two, so that a growing cache needs few graphs
    width = 1 << (pages.shape[1] - 1).bit_length()
    column = torch.arange(width, device=pages.device)
    table = torch.where(column < full.unsqueeze(1), pages[:, column.clamp(max=pages.shape[1] - 1)], pages[:, :1])
    table = table.to(torch.int32).contiguous().view(problem.batch, 1, width, 1)
    # cuDNN needs at least one key: a sequence without a full page reads one of some page, and its result is discarded
    lengths = torch.where(full > 0, full * page, 1).to(torch.int32)
    q, k, v = (align(t) for t in (_layout.canonical(tensors.q, problem.layout), tensors.k, tensors.v))
    cudnn_call = CudnnCall(
        problem._replace(kv_len=width * page, mask=FULL.structure, align=None),
        call.scale,
        (None, None),
        q,
        k,
        v,
        {"q": graph.full_lengths(problem.batch, 1, q), "kv": lengths},
        {},
        {"table_k": table, "table_v": table},
    )
    out = torch.empty(problem.batch, 1, problem.heads, problem.v_dim, dtype=q.dtype, device=q.device)
    stats = cudnn_call.empty_stats(lse_dtype(problem.dtype))
    cudnn_call.run(graph.forward_graph, {"o": out, "stats": stats})
    return blank_rows(out.to(stats.dtype), stats, (full == 0)[:, None, None])


def _last_page(call: Call, tensors: Tensors, pages: Tensor, full: Tensor, rest: Tensor) -> Result:
    """Attention to the first `rest` keys of each sequence's page number `full`; shapes as in `_full_pages`."""
    problem = call.problem
    precision = lse_dtype(problem.dtype)
    last = pages.gather(1, full.clamp(max=pages.shape[1] - 1).long().unsqueeze(1)).squeeze(1)
    real = torch.arange(problem.page_size or 1, device=pages.device) < rest.unsqueeze(1)
    k, v = (torch.where(real[..., None, None], t[last], 0.0).to(precision) for t in (tensors.k, tensors.v))
    q = _layout.canonical(tensors.q, problem.layout)[:, 0].to(precision).unflatten(1, (problem.kv_heads, -1))
    score = call.scale * torch.einsum("bngd,bpnd->bngp", q, k)
    score = score.masked_fill(~real[:, None, None], -torch.inf)
    lse = score.logsumexp(-1, keepdim=True)
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0))
    out = torch.einsum("bngp,bpnd->bngd", weight, v)
    return Result(out.flatten(1, 2).unsqueeze(1), lse.flatten(1, 2))
