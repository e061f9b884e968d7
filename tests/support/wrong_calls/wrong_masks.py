"""Calls of `attention` with a wrong mask."""

# type checkers refuse these calls too
# mypy: ignore-errors

from __future__ import annotations

import torch
from wrong_call_inputs import WrongCalls, att, square, t, thd

from undivided import masks

MASKS: WrongCalls = {
    # mask
    "mask-float-tensor": (
        lambda: square(mask=t(5, 5)),
        "mask must be an undivided.masks.Mask or None, got Tensor",
        "masks.dense(tensor) for booleans (True = attend); bias=tensor for numbers that are added",
    ),
    "mask-bool-tensor": (
        lambda: square(mask=t(5, 5).bool()),
        "mask must be an undivided.masks.Mask or None, got Tensor",
        "masks.dense(tensor) for booleans (True = attend); bias=tensor for numbers that are added",
    ),
    "mask-string": (
        lambda: square(mask="causal"),
        "mask must be an undivided.masks.Mask or None, got str",
        "a mask is built by a call: mask=masks.causal()",
    ),
    "mask-foreign-string": (
        lambda: square(mask="padding_causal"),
        "mask must be an undivided.masks.Mask or None, got str",
        "a mask is built by a call, such as mask=masks.causal() or mask=masks.window(256, 0)",
    ),
    "mask-true": (
        lambda: square(mask=True),
        "mask must be an undivided.masks.Mask or None, got bool",
        "mask=masks.causal(), or None for every pair",
    ),
    "mask-function": (
        lambda: square(mask=masks.causal),
        "mask must be an undivided.masks.Mask or None, got function",
        "add the parentheses: mask=masks.causal()",
    ),
    "mask-window-not-called": (
        lambda: square(mask=masks.window),
        "mask must be an undivided.masks.Mask or None, got function",
        "add the parentheses: mask=masks.window(...)",
    ),
    "mask-another-function": (
        lambda: square(mask=len),
        "mask must be an undivided.masks.Mask or None, got builtin_function_or_method",
        "masks.predicate(fn), for fn(b, h, q_idx, kv_idx)",
    ),
    "mask-of-flex": (
        lambda: square(mask=lambda b, h, i, j: i >= j),
        "mask must be an undivided.masks.Mask or None, got function",
        "masks.predicate(fn), for fn(b, h, q_idx, kv_idx)",
    ),
    "mask-a-class": (lambda: square(mask=masks.Mask), "mask must be an undivided.masks.Mask or None, got type", None),
    "thd-no-mask": (
        lambda: thd(),
        "mask must contain documents or document_ids in layout 'thd', got every pair",
        "mask=masks.documents(cu_seqlens) & ..., or masks.document_ids(ids) & ..., so that packed documents cannot see "
        "each other",
    ),
    "thd-causal-only": (
        lambda: thd(mask=masks.causal()),
        "mask must contain documents or document_ids in layout 'thd', got causal",
        "mask=masks.documents(cu_seqlens) & ..., or masks.document_ids(ids) & ..., so that packed documents cannot see "
        "each other",
    ),
    "thd-lengths": (
        lambda: thd(mask=masks.lengths([9])),
        "mask must contain documents or document_ids in layout 'thd', got lengths",
        "mask=masks.documents(cu_seqlens) & ..., or masks.document_ids(ids) & ..., so that packed documents cannot see "
        "each other",
    ),
    "thd-lengths-and-documents": (
        lambda: thd(mask=masks.documents([0, 9]) & masks.lengths([9])),
        "mask must describe its sequences once, got documents([0, 9]) & lengths(kv=[9])",
        "keep one of lengths(...) and documents(...)",
    ),
    "documents-on-a-batch": (
        lambda: square(mask=masks.documents([0, 5])),
        "mask must have layout 'thd' for masks.documents, or a dense layout with a batch of 1, got a batch of 2",
        "use layout='thd', or masks.lengths for a padded batch, or masks.document_ids [B, S]",
    ),
    "documents-too-long": (
        lambda: thd(mask=masks.documents([0, 4, 10])),
        "mask must have cu_seqlens_q[-1] of at most 9, the q tokens, got 10",
        "the last offset is the number of tokens: documents of 3 and 7 tokens are [0, 3, 10]",
    ),
    "documents-kv-too-long": (
        lambda: thd(mask=masks.documents([0, 4, 9], [0, 4, 11])),
        "mask must have cu_seqlens_kv[-1] of at most 9, the kv tokens, got 11",
        "the last offset is the number of tokens: documents of 3 and 7 tokens are [0, 3, 10]",
    ),
    "padded-too-long": (
        lambda: thd(mask=masks.documents([0, 4, 8], padded_q=[0, 5, 10])),
        "mask must have padded_q[-1] of at most 9, the q tokens, got 10",
        "the last offset is the number of tokens: documents of 3 and 7 tokens are [0, 3, 10]",
    ),
    "documents-too-short": (
        lambda: thd(mask=masks.documents([0, 4])),
        "mask must have cu_seqlens_q[-1] of 9, the q tokens, got 4",
        (
            "append the missing offsets; if the last 5 tokens are padding, "
            "pass masks.documents total_q=9, or padded offsets that end there"
        ),
    ),
    "documents-kv-too-short": (
        lambda: thd(mask=masks.documents([0, 4, 9], [0, 4, 8])),
        "mask must have cu_seqlens_kv[-1] of 9, the kv tokens, got 8",
        (
            "append the missing offsets; if the last 1 tokens are padding, "
            "pass masks.documents total_kv=9, or padded offsets that end there"
        ),
    ),
    "padded-too-short": (
        lambda: thd(mask=masks.documents([0, 4, 8], padded_q=[0, 4, 8])),
        "mask must have padded_q[-1] of 9, the q tokens, got 8",
        (
            "append the missing offsets; if the last 1 tokens are padding, "
            "pass masks.documents total_q=9, or padded offsets that end there"
        ),
    ),
    "documents-total-of-another-call": (
        lambda: thd(mask=masks.documents([0, 4], total_q=8)),
        "mask must have total_q of 9, the q tokens of the call, got 8",
        None,
    ),
    "documents-total-too-small": (
        lambda: thd(mask=masks.documents([0, 4, 10], total_q=9)),
        "mask must have cu_seqlens_q[-1] of at most 9, the q tokens, got 10",
        "the last offset is the number of tokens: documents of 3 and 7 tokens are [0, 3, 10]",
    ),
    "documents-total-a-float": (
        lambda: masks.documents([0, 4], total_q=9.0),
        "total_q must be an int, got 9.0",
        "write 9",
    ),
    "lengths-too-long": (
        lambda: att(mask=masks.lengths([7, 8])),
        "mask must have lengths(kv) of at most 7, the kv length of the call, got 8",
        "lengths are numbers of tokens, one for each batch element; cumulative lengths go to masks.documents",
    ),
    "lengths-q-too-long": (
        lambda: att(mask=masks.lengths([7, 7], [5, 6])),
        "mask must have lengths(q) of at most 5, the q length of the call, got 6",
        "lengths are numbers of tokens, one for each batch element; cumulative lengths go to masks.documents",
    ),
    "lengths-start-too-long": (
        lambda: att(mask=masks.lengths([7, 7], kv_start=[0, 1])),
        "mask must have lengths(kv_start + kv) of at most 7, the kv length of the call, got 8",
        None,
    ),
    "lengths-batch": (
        lambda: att(mask=masks.lengths([7, 7, 7])),
        "mask must have one entry of lengths for each of the 2 batch elements, got 3 entries",
        "cu_seqlens.diff(), if these are cumulative lengths",
    ),
    "ids-shape": (
        lambda: square(mask=masks.document_ids(torch.zeros(2, 4, dtype=torch.int32))),
        "mask must have document_ids(ids_q) of shape [2 or 1, 5], got [2, 4]",
        None,
    ),
    "ids-kv-shape": (
        lambda: att(mask=masks.document_ids(torch.zeros(2, 5, dtype=torch.int32))),
        "mask must have document_ids(ids_kv) of shape [2 or 1, 7], got [2, 5]",
        "pass ids_kv too: queries and keys differ in length",
    ),
    "dense-shape": (
        lambda: att(mask=masks.dense(torch.ones(5, 5, dtype=torch.bool))),
        "mask must have dense(tensor) broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [5, 5]",
        "it is for 5 keys, and the call has 7",
    ),
    "dense-transposed": (
        lambda: att(mask=masks.dense(torch.ones(7, 5, dtype=torch.bool))),
        "mask must have dense(tensor) broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [7, 5]",
        "did you mean masks.dense(tensor.transpose(-1, -2))?",
    ),
    "dense-of-keys": (
        lambda: att(mask=masks.dense(torch.ones(2, 7, dtype=torch.bool))),
        "mask must have dense(tensor) broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [2, 7]",
        "did you mean masks.dense(tensor[:, None, None])?",
    ),
    "dense-heads-first": (
        lambda: att(mask=masks.dense(torch.ones(4, 2, 5, 7, dtype=torch.bool))),
        "mask must have dense(tensor) broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [4, 2, 5, 7]",
        "did you mean masks.dense(tensor.transpose(0, 1))?",
    ),
    "dense-heads-last": (
        lambda: att(mask=masks.dense(torch.ones(2, 5, 7, 4, dtype=torch.bool))),
        "mask must have dense(tensor) broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [2, 5, 7, 4]",
        "did you mean masks.dense(tensor.permute(0, 3, 1, 2))?",
    ),
    "dense-of-key-heads": (
        lambda: att(mask=masks.dense(torch.ones(2, 2, 5, 7, dtype=torch.bool))),
        "mask must have dense(tensor) broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [2, 2, 5, 7]",
        "did you mean masks.dense(tensor.repeat_interleave(2, -3))?",
    ),
    "dense-two-sizes": (
        lambda: att(mask=masks.dense(torch.ones(6, 8, dtype=torch.bool))),
        "mask must have dense(tensor) broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [6, 8]",
        None,
    ),
    "dense-batch": (
        lambda: att(mask=masks.dense(torch.ones(3, 1, 5, 7, dtype=torch.bool))),
        "mask must have dense(tensor) broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [3, 1, 5, 7]",
        "it is for 3 batch elements, and the call has 2",
    ),
    "prefix-entries": (
        lambda: square(mask=masks.causal() | masks.prefix([1, 2, 3])),
        "mask must have one entry of prefix(n) for each of the 2 sequences, got 3 entries",
        None,
    ),
    "chunks-entries": (
        lambda: square(mask=masks.chunks(2, offset=[1, 2, 3])),
        "mask must have one entry of chunks(offset) for each of the 2 sequences, got 3 entries",
        None,
    ),
    "causal-ambiguous": (
        lambda: att(mask=masks.causal()),
        (
            "align must be given if top-left and bottom-right differ (queries and keys of unequal length), got"
            " None for query length 5, key length 7"
        ),
        "write align='top_left' or align='bottom_right' in causal, window, chunks or predicate",
    ),
    "window-ambiguous": (
        lambda: att(mask=masks.window(3, 0)),
        (
            "align must be given if top-left and bottom-right differ (queries and keys of unequal length), got"
            " None for query length 5, key length 7"
        ),
        "write align='top_left' or align='bottom_right' in causal, window, chunks or predicate",
    ),
    "lengths-ambiguous": (
        lambda: square(mask=masks.causal() & masks.lengths([5, 4])),
        (
            "align must be given if top-left and bottom-right differ (queries and keys of unequal length), got"
            " None for lengths with q=None at query length 5, key length 5"
        ),
        (
            "write align='top_left' or align='bottom_right' in causal, window, chunks or predicate; for a padded "
            "self-attention batch pass the lengths of the queries too: lengths(n, n)"
        ),
    ),
    "documents-ambiguous": (
        lambda: thd(mask=masks.causal() & masks.documents([0, 4, 9], [0, 5, 9])),
        (
            "align must be given if top-left and bottom-right differ (queries and keys of unequal length), got"
            " None for documents whose cu_seqlens_q and cu_seqlens_kv are different"
        ),
        "write align='top_left' or align='bottom_right' in causal, window, chunks or predicate",
    ),
    "alibi-ambiguous": (
        lambda: att(alibi_slopes=t(4)),
        (
            "align must be given if top-left and bottom-right differ (queries and keys of unequal length), got"
            " None for query length 5, key length 7"
        ),
        "for ALiBi without a mask: masks.window(None, None, align='top_left' or 'bottom_right')",
    ),
    "predicate-not-bool": (
        lambda: square(mask=masks.predicate(lambda b, h, i, j: i - j)),
        "fn must return a bool tensor, got torch.int64",
        "predicates are fn(b, h, q_idx, kv_idx) -> bool",
    ),
    "predicate-shape": (
        lambda: square(mask=masks.predicate(lambda b, h, i, j: torch.ones(3, dtype=torch.bool))),
        "fn must return a tensor broadcastable to [2, 4, 1, 1], got [3]",
        "compute with the indices alone, and look up tensors by them: table[b, q_idx] == table[b, kv_idx]",
    ),
    "mask-device": (
        lambda: square(mask=masks.lengths(torch.zeros(2, dtype=torch.int32, device="meta"))),
        "mask must be on the CPU, as q is on cpu, got meta",
        "mask.to(q.device)",
    ),
}
