"""One table of wrong calls: each raises InputError with exactly this message, and no other exception.

A message names the argument, what it must be, and what it was; a HINT follows where one step fixes it.
"""

from __future__ import annotations

import inspect
import math
import pickle
import re
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import undivided
from undivided import InputError, Machine, explain, masks, merge, use_backends
from undivided.backends import names_and_families
from undivided.request import foreign as _foreign

BACKENDS = ", ".join(sorted(names_and_families()))


def t(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


# 5 queries of 4 heads, 7 keys of 2; packed tokens; an output and its log-sum-exp; a pool of 6 pages of 4 keys and its
# table
Q, K, V, P = t(2, 5, 4, 8), t(2, 7, 2, 8), t(2, 7, 2, 6), t(9, 4, 8)
OUT, LSE = t(2, 5, 4, 8), t(2, 4, 5)
POOL, TABLE = t(6, 4, 2, 8), t(2, 3, dtype=torch.int32)
NESTED = torch.nested.nested_tensor([torch.zeros(3, 4, 8), torch.zeros(2, 4, 8)], layout=torch.jagged)


def att(q: Any = Q, k: Any = K, v: Any = V, layout: Any = "bshd", **arguments: Any) -> Any:
    return undivided.attention(q, k, v, layout=layout, **arguments)


def square(**arguments: Any) -> Any:
    return att(Q, Q, Q, **arguments)


def thd(q: Any = P, k: Any = P, v: Any = P, **arguments: Any) -> Any:
    return att(q, k, v, "thd", **arguments)


def paged(pages: Any = TABLE, mask: Any = masks.lengths([3, 9]), k: Any = POOL, v: Any = POOL) -> Any:  # noqa: B008
    return att(Q, k, v, pages=pages, mask=mask)


def autocast(call: Callable[[], Any]) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return call()


# call, message, hint
CALLS: dict[str, tuple[Callable[[], Any], str, str | None]] = {
    # layout
    "layout-unknown": (
        lambda: att(layout="bhds"),
        "layout must be one of 'bshd', 'sbhd', 'bhsd', 'thd', got 'bhds'",
        "b batch, s sequence, h heads, d head size, t packed tokens; the letters are the order of q's axes",
    ),
    "layout-upper": (
        lambda: att(layout="BSHD"),
        "layout must be one of 'bshd', 'sbhd', 'bhsd', 'thd', got 'BSHD'",
        "b batch, s sequence, h heads, d head size, t packed tokens; the letters are the order of q's axes",
    ),
    "layout-none": (
        lambda: att(layout=None),
        "layout must be one of 'bshd', 'sbhd', 'bhsd', 'thd', got None",
        "b batch, s sequence, h heads, d head size, t packed tokens; the letters are the order of q's axes",
    ),
    "layout-list": (
        lambda: att(layout=["bshd"]),
        "layout must be one of 'bshd', 'sbhd', 'bhsd', 'thd', got ['bshd']",
        "b batch, s sequence, h heads, d head size, t packed tokens; the letters are the order of q's axes",
    ),
    "layout-int": (
        lambda: att(layout=3),
        "layout must be one of 'bshd', 'sbhd', 'bhsd', 'thd', got 3",
        "b batch, s sequence, h heads, d head size, t packed tokens; the letters are the order of q's axes",
    ),
    # tensors
    "q-numpy": (lambda: att(q=Q.numpy()), "q must be a torch.Tensor, got ndarray", "torch.from_numpy(q)"),
    "q-none": (lambda: att(q=None), "q must be a torch.Tensor, got NoneType", None),
    "k-list": (lambda: att(k=[1.0]), "k must be a torch.Tensor, got list", "torch.tensor(k)"),
    "v-none": (lambda: att(v=None), "v must be a torch.Tensor, got NoneType", None),
    "q-int": (lambda: att(q=Q.int()), "q must be float16, bfloat16, float32 or float64, got torch.int32", None),
    "q-complex": (
        lambda: att(q=Q.to(torch.complex64), k=K.to(torch.complex64), v=V.to(torch.complex64)),
        "q must be float16, bfloat16, float32 or float64, got torch.complex64",
        None,
    ),
    "q-bool": (
        lambda: att(q=Q.bool(), k=K.bool(), v=V.bool()),
        "q must be float16, bfloat16, float32 or float64, got torch.bool",
        None,
    ),
    "q-float8": (
        lambda: att(q=Q.to(torch.float8_e4m3fn), k=K.to(torch.float8_e4m3fn), v=V.to(torch.float8_e4m3fn)),
        "q must be float16, bfloat16, float32 or float64, got torch.float8_e4m3fn",
        None,
    ),
    "k-other-dtype": (
        lambda: att(k=K.double()),
        "k must have the dtype of q (torch.float32), got torch.float64",
        "k.to(q.dtype), or run under torch.autocast",
    ),
    "v-other-dtype": (
        lambda: att(v=V.half()),
        "v must have the dtype of q (torch.float32), got torch.float16",
        "v.to(q.dtype), or run under torch.autocast",
    ),
    "k-other-device": (lambda: att(k=K.to("meta")), "k must be on the device of q (cpu), got meta", "k.to(q.device)"),
    "v-other-device": (lambda: att(v=V.to("meta")), "v must be on the device of q (cpu), got meta", "v.to(q.device)"),
    "q-nested": (
        lambda: att(q=NESTED, k=NESTED, v=NESTED),
        "q must be a dense (strided) tensor, got a nested tensor",
        "pass its values in layout='thd' with mask=masks.documents(offsets)",
    ),
    "q-sparse": (lambda: att(q=Q.to_sparse()), "q must be a dense (strided) tensor, got torch.sparse_coo", None),
    "k-sparse": (lambda: att(k=K.to_sparse()), "k must be a dense (strided) tensor, got torch.sparse_coo", None),
    "autocast-q-list": (lambda: autocast(lambda: att(q=[1])), "q must be a torch.Tensor, got list", "torch.tensor(q)"),
    "autocast-k-none": (lambda: autocast(lambda: att(k=None)), "k must be a torch.Tensor, got NoneType", None),
    # ranks
    "q-hidden": (
        lambda: att(q=t(2, 5, 32), k=t(2, 7, 16), v=t(2, 7, 16)),
        "q must have 4 axes [b, s, h, d], got 3 axes [2, 5, 32]",
        (
            "a [batch, seq, hidden] tensor has its heads still together: x.unflatten(-1, (heads, head_dim)), then"
            " layout='bshd'"
        ),
    ),
    "q-2d": (lambda: att(q=t(5, 8)), "q must have 4 axes [b, s, h, d], got 2 axes [5, 8]", None),
    "k-3d": (
        lambda: att(k=t(2, 7, 16)),
        "k must have 4 axes [b, s, h, d], got 3 axes [2, 7, 16]",
        (
            "a [batch, seq, hidden] tensor has its heads still together: x.unflatten(-1, (heads, head_dim)), then"
            " layout='bshd'"
        ),
    ),
    "q-0d": (lambda: att(q=t()), "q must have 4 axes [b, s, h, d], got 0 axes []", None),
    "thd-4d": (
        lambda: thd(q=Q, k=Q, v=Q, mask=masks.documents([0, 9])),
        "q must have 3 axes [t, h, d], got 4 axes [2, 5, 4, 8]",
        "thd is for packed tokens without a batch axis; a padded batch is 'bshd', 'sbhd' or 'bhsd'",
    ),
    "thd-2d": (
        lambda: thd(q=t(9, 8), mask=masks.documents([0, 9])),
        "q must have 3 axes [t, h, d], got 2 axes [9, 8]",
        None,
    ),
    # shapes
    "k-head-size": (lambda: att(k=t(2, 7, 2, 16)), "k must have the head size of q (8), got 16 in [2, 7, 2, 16]", None),
    "k-batch": (
        lambda: att(k=t(3, 7, 2, 8), v=t(3, 7, 2, 8)),
        "k must have the batch size of q (2), got 3 in [3, 7, 2, 8]",
        None,
    ),
    "v-batch": (lambda: att(v=t(3, 7, 2, 8)), "v must have the batch size of k (2), got 3 in [3, 7, 2, 8]", None),
    "v-length": (lambda: att(v=t(2, 6, 2, 8)), "v must have the length of k (7), got 6 in [2, 6, 2, 8]", None),
    "v-heads": (lambda: att(v=t(2, 7, 4, 8)), "v must have the heads of k (2), got 4 in [2, 7, 4, 8]", None),
    "heads-not-divisible": (
        lambda: att(k=t(2, 7, 3, 8), v=t(2, 7, 3, 8)),
        "k must have a number of heads that divides q's (4), got 3 in [2, 7, 3, 8]",
        "grouped-query attention needs 1, 2 or 4 key heads for 4 query heads, so that each serves equally many",
    ),
    "kv-heads-not-dividing-and-another-layout-that-fits": (
        lambda: att(q=t(2, 256, 8, 64), k=t(2, 256, 3, 64), v=t(2, 256, 3, 64)),
        "k must have a number of heads that divides q's (8), got 3 in [2, 256, 3, 64]",
        "grouped-query attention needs 1, 2, 4 or 8 key heads for 8 query heads, so that each serves equally many",
    ),
    "another-batch-and-another-layout-that-fits": (
        lambda: att(q=t(4, 16, 8, 64), k=t(3, 16, 8, 64), v=t(3, 16, 8, 64)),
        "k must have the batch size of q (4), got 3 in [3, 16, 8, 64]",
        None,
    ),
    "wrong-layout-while-decoding": (
        lambda: att(q=t(2, 8, 1, 64), k=t(2, 8, 100, 64), v=t(2, 8, 100, 64)),
        "k must have a number of heads that divides q's (1), got 100 in [2, 8, 100, 64]",
        "these shapes would fit layout='bhsd'",
    ),
    "more-kv-heads": (
        lambda: att(k=t(2, 7, 8, 8), v=t(2, 7, 8, 8)),
        "k must have a number of heads that divides q's (4), got 8 in [2, 7, 8, 8]",
        "k has more heads than q: were q and k given in the other order?",
    ),
    "no-kv-heads": (
        lambda: att(k=t(2, 7, 0, 8), v=t(2, 7, 0, 8)),
        "k must have a number of heads that divides q's (4), got 0 in [2, 7, 0, 8]",
        "grouped-query attention needs 1, 2 or 4 key heads for 4 query heads, so that each serves equally many",
    ),
    "wrong-layout-hint": (
        lambda: att(q=t(2, 4, 5, 8), k=t(2, 2, 7, 8), v=t(2, 2, 7, 8)),
        "k must have a number of heads that divides q's (5), got 7 in [2, 2, 7, 8]",
        "these shapes would fit layout='bhsd'",
    ),
    "wrong-layout-sbhd": (
        lambda: att(q=t(5, 2, 4, 8), k=t(7, 2, 2, 8), v=t(7, 2, 2, 8)),
        "k must have the batch size of q (5), got 7 in [7, 2, 2, 8]",
        "these shapes would fit layout='sbhd'",
    ),
    "head-size-0": (
        lambda: att(q=t(2, 5, 4, 0), k=t(2, 7, 2, 0)),
        "q must have at least one head and a head size of at least 1, got [2, 5, 4, 0]",
        None,
    ),
    "value-size-0": (
        lambda: att(v=t(2, 7, 2, 0)),
        "v must have at least one head and a head size of at least 1, got [2, 7, 2, 0]",
        None,
    ),
    "no-heads": (
        lambda: att(q=t(2, 5, 0, 8), k=t(2, 7, 0, 8), v=t(2, 7, 0, 8)),
        "q must have at least one head and a head size of at least 1, got [2, 5, 0, 8]",
        None,
    ),
    "thd-v-length": (
        lambda: thd(v=t(8, 4, 8), mask=masks.documents([0, 9])),
        "v must have the length of k (9), got 8 in [8, 4, 8]",
        None,
    ),
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
        None,
    ),
    "thd-no-mask": (
        lambda: thd(),
        "mask must say where the documents are in layout 'thd', got every pair",
        "mask=masks.documents(cu_seqlens) & ..., so that packed documents cannot see each other",
    ),
    "thd-causal-only": (
        lambda: thd(mask=masks.causal()),
        "mask must say where the documents are in layout 'thd', got causal",
        "mask=masks.documents(cu_seqlens) & ..., so that packed documents cannot see each other",
    ),
    "thd-lengths": (
        lambda: thd(mask=masks.lengths([9])),
        "mask must say where the documents are in layout 'thd', got lengths",
        "mask=masks.documents(cu_seqlens) & ..., so that packed documents cannot see each other",
    ),
    "thd-lengths-and-documents": (
        lambda: thd(mask=masks.documents([0, 9]) & masks.lengths([9])),
        "mask must describe its sequences once, got documents([0, 9]) & lengths(kv=[9])",
        "keep one of lengths(...) and documents(...)",
    ),
    "documents-on-a-batch": (
        lambda: square(mask=masks.documents([0, 5])),
        "mask must be used with packed documents on a batch of one, got a batch of 2",
        "use layout='thd', or masks.lengths for a padded batch, or masks.document_ids [B, S]",
    ),
    "documents-too-long": (
        lambda: thd(mask=masks.documents([0, 4, 10])),
        "mask must have cu_seqlens_q[-1] of at most 9, the q tokens, got 10",
        None,
    ),
    "documents-kv-too-long": (
        lambda: thd(mask=masks.documents([0, 4, 9], [0, 4, 11])),
        "mask must have cu_seqlens_kv[-1] of at most 9, the kv tokens, got 11",
        None,
    ),
    "padded-too-long": (
        lambda: thd(mask=masks.documents([0, 4, 8], padded_q=[0, 5, 10])),
        "mask must have padded_q[-1] of at most 9, the q tokens, got 10",
        None,
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
        None,
    ),
    "documents-total-a-float": (lambda: masks.documents([0, 4], total_q=9.0), "total_q must be an int, got 9.0", None),
    "lengths-too-long": (
        lambda: att(mask=masks.lengths([7, 8])),
        "mask must have lengths(kv) of at most 7, the kv length of the call, got 8",
        None,
    ),
    "lengths-q-too-long": (
        lambda: att(mask=masks.lengths([7, 7], [5, 6])),
        "mask must have lengths(q) of at most 5, the q length of the call, got 6",
        None,
    ),
    "lengths-start-too-long": (
        lambda: att(mask=masks.lengths([7, 7], kv_start=[0, 1])),
        "mask must have lengths(kv_start + kv) of at most 7, the kv length of the call, got 8",
        None,
    ),
    "lengths-batch": (
        lambda: att(mask=masks.lengths([7, 7, 7])),
        "mask must have one entry of lengths for each of the 2 batch elements, got 3 entries",
        None,
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
        "mask must have dense(tensor) broadcastable to [batch, heads, q, kv] = [2, 4, 5, 7], got [1, 1, 5, 5]",
        None,
    ),
    "dense-batch": (
        lambda: att(mask=masks.dense(torch.ones(3, 1, 5, 7, dtype=torch.bool))),
        "mask must have dense(tensor) broadcastable to [batch, heads, q, kv] = [2, 4, 5, 7], got [3, 1, 5, 7]",
        None,
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
        "write align='top_left' or align='bottom_right' in causal, window or chunks",
    ),
    "window-ambiguous": (
        lambda: att(mask=masks.window(3, 0)),
        (
            "align must be given if top-left and bottom-right differ (queries and keys of unequal length), got"
            " None for query length 5, key length 7"
        ),
        "write align='top_left' or align='bottom_right' in causal, window or chunks",
    ),
    "lengths-ambiguous": (
        lambda: square(mask=masks.causal() & masks.lengths([5, 4])),
        (
            "align must be given if top-left and bottom-right differ (queries and keys of unequal length), got"
            " None for lengths with q=None at query length 5, key length 5"
        ),
        (
            "write align='top_left' or align='bottom_right' in causal, window or chunks; for a padded "
            "self-attention batch pass the lengths of the queries too: lengths(n, n)"
        ),
    ),
    "documents-ambiguous": (
        lambda: thd(mask=masks.causal() & masks.documents([0, 4, 9], [0, 5, 9])),
        (
            "align must be given if top-left and bottom-right differ (queries and keys of unequal length), got"
            " None for documents whose cu_seqlens_q and cu_seqlens_kv are different"
        ),
        "write align='top_left' or align='bottom_right' in causal, window or chunks",
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
        None,
    ),
    "mask-device": (
        lambda: square(mask=masks.lengths(torch.zeros(2, dtype=torch.int32, device="meta"))),
        "mask must be on cpu, as the query, or on the CPU, got meta",
        None,
    ),
    # masks.*
    "causal-align": (
        lambda: masks.causal("topleft"),
        'align must be "top_left", "bottom_right" or None, got \'topleft\'',
        None,
    ),
    "window-align": (
        lambda: masks.window(1, 0, "left"),
        'align must be "top_left", "bottom_right" or None, got \'left\'',
        None,
    ),
    "window-negative": (
        lambda: masks.window(-2, 0),
        "left must be at least 0, or None (or -1) for an unbounded side, got -2",
        None,
    ),
    "window-float": (lambda: masks.window(1.5, 0), "left must be an int, got 1.5", None),
    "window-bool": (lambda: masks.window(True, 0), "left must be an int, got True", None),
    "lengths-float": (
        lambda: masks.lengths(torch.tensor([1.0])),
        "kv must have an integer dtype, got torch.float32",
        "kv.to(torch.int32)",
    ),
    "lengths-2d": (
        lambda: masks.lengths(torch.zeros(1, 2, dtype=torch.int32)),
        "kv must have one dimension, got shape [1, 2]",
        None,
    ),
    "lengths-int": (lambda: masks.lengths(5), "kv must be an int tensor or a list of ints, got int", None),
    "lengths-negative": (lambda: masks.lengths([3, -1]), "kv must be at least 0, got -1", None),
    "lengths-list-float": (lambda: masks.lengths([3, 1.5]), "kv[1] must be an int, got 1.5", None),
    "lengths-q-entries": (
        lambda: masks.lengths([3, 1], [3]),
        "q must have an entry for each of kv's 2, got 1 entries",
        None,
    ),
    "lengths-q-start-alone": (
        lambda: masks.lengths([3, 1], q_start=[1, 1]),
        "q must be given with q_start, got None",
        "q is the number of real rows from q_start on",
    ),
    "cu-not-zero": (
        lambda: masks.documents([1, 3]),
        "cu_seqlens_q must start at 0, got 1",
        "cu_seqlens are cumulative: documents of length 3 and 2 are [0, 3, 5]",
    ),
    "cu-decreasing": (
        lambda: masks.documents([0, 5, 3]),
        "cu_seqlens_q must never decrease, got [0, 5, 3]",
        "cu_seqlens are cumulative: documents of length 3 and 2 are [0, 3, 5]",
    ),
    "cu-float": (
        lambda: masks.documents(torch.tensor([0.0, 3.0])),
        "cu_seqlens_q must have an integer dtype, got torch.float32",
        "cu_seqlens_q.to(torch.int32)",
    ),
    "cu-bool": (
        lambda: masks.documents(torch.tensor([False, True])),
        "cu_seqlens_q must have an integer dtype, got torch.bool",
        "cu_seqlens_q.to(torch.int32)",
    ),
    "cu-empty": (
        lambda: masks.documents([]),
        "cu_seqlens_q must hold N + 1 offsets for N documents, got none",
        "no documents are [0]",
    ),
    "cu-kv-entries": (
        lambda: masks.documents([0, 3, 5], [0, 5]),
        "cu_seqlens_kv must have as many entries as cu_seqlens_q (3), got 2 entries",
        None,
    ),
    "cu-none": (
        lambda: masks.documents(None),
        "cu_seqlens_q must be an int tensor or a list of ints, got NoneType",
        None,
    ),
    "padded-too-small": (
        lambda: masks.documents([0, 3, 5], padded_q=[0, 2, 5]),
        "padded_q must leave room for document 0 of length 3, got 2 slots",
        "padded_q holds the offset of each document in memory, then the total",
    ),
    "padded-negative": (
        lambda: masks.documents([0, 3, 5], padded_q=[-1, 3, 5]),
        "padded_q must be at least 0, got -1",
        None,
    ),
    "max-q-too-small": (
        lambda: masks.documents([0, 3, 5], max_q=2),
        "max_q must be at least the longest document (3), got 2",
        None,
    ),
    "max-q-float": (lambda: masks.documents([0, 3, 5], max_q=3.0), "max_q must be an int, got 3.0", None),
    "ids-float": (
        lambda: masks.document_ids(torch.zeros(2, 3)),
        "ids_q must have an integer dtype, got torch.float32",
        "ids_q.to(torch.int32)",
    ),
    "ids-3d": (
        lambda: masks.document_ids(torch.zeros(2, 3, 4, dtype=torch.int32)),
        "ids_q must have shape [B, S], [1, S] or [S], got [2, 3, 4]",
        None,
    ),
    "ids-batches": (
        lambda: masks.document_ids(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, 3, dtype=torch.int32)),
        "ids_kv must have the batch size of ids_q (2), got 3",
        None,
    ),
    "prefix-negative": (lambda: masks.prefix(-1), "n must be at least 0, got -1", None),
    "prefix-float": (lambda: masks.prefix(1.0), "n must be an int, got 1.0", None),
    "prefix-string": (lambda: masks.prefix("4"), "n must be an int, got '4'", None),
    "chunks-zero": (lambda: masks.chunks(0), "size must be at least 1, got 0", None),
    "chunks-float": (lambda: masks.chunks(2.0), "size must be an int, got 2.0", None),
    "chunks-offset-float": (lambda: masks.chunks(2, offset=1.5), "offset must be an int, got 1.5", None),
    "dense-float": (
        lambda: masks.dense(t(3, 3)),
        "tensor must be boolean, True = attend, got torch.float32",
        "scores to add to q . k go to bias=",
    ),
    "dense-3d": (
        lambda: masks.dense(torch.ones(2, 3, 3, dtype=torch.bool)),
        "tensor must have 2 dimensions [Sq, Sk] or 4 [B|1, H|1, Sq, Sk], got shape [2, 3, 3]",
        "make it four: tensor[:, None] for [B, Sq, Sk], tensor[None] for [H, Sq, Sk]",
    ),
    "dense-list": (
        lambda: masks.dense([[True]]),
        "tensor must be boolean, True = attend, got list",
        "scores to add to q . k go to bias=",
    ),
    "predicate-none": (
        lambda: masks.predicate(None),
        "fn must be a function fn(b, h, q_idx, kv_idx), got NoneType",
        None,
    ),
    "predicate-of-two": (
        lambda: masks.predicate(lambda q, k: q >= k),
        "fn must take (b, h, q_idx, kv_idx), got (q, k)",
        None,
    ),
    "predicate-keyword-only": (
        lambda: masks.predicate(lambda b, h, q, k, *, limit: k < limit),
        "fn must take (b, h, q_idx, kv_idx), got (b, h, q, k, *, limit)",
        None,
    ),
    "mask-batch-negative": (lambda: masks.causal().intervals(3, 3, batch=-1), "batch must be at least 0, got -1", None),
    "mask-heads-negative": (lambda: masks.causal().to_dense(1, -2, 3, 3), "heads must be at least 0, got -2", None),
    "mask-q-len-negative": (lambda: masks.causal("top_left").draw(-3, 3), "q_len must be at least 0, got -3", None),
    "mask-kv-len-negative": (
        lambda: masks.causal("top_left").intervals(3, -4),
        "kv_len must be at least 0, got -4",
        None,
    ),
    "or-non-prefix": (
        lambda: masks.causal() | masks.window(3, 0),
        "mask must join causal or window to a bare prefix or sinks with `|`, got causal() | window(3, 0)",
        "`&` binds tighter than `|`: write (causal() | prefix(n)) & lengths(kv)",
    ),
    "or-lengths": (
        lambda: masks.causal() | masks.lengths([3]),
        "mask must join causal or window to a bare prefix or sinks with `|`, got causal() | lengths(kv=[3])",
        "`&` binds tighter than `|`: write (causal() | prefix(n)) & lengths(kv)",
    ),
    "or-prefix-and-lengths": (
        lambda: masks.causal() | masks.prefix(2) & masks.lengths([3]),
        (
            "mask must join causal or window to a bare prefix or sinks with `|`, got causal() | prefix(2) & "
            "lengths(kv=[3])"
        ),
        "`&` binds tighter than `|`: write (causal() | prefix(n)) & lengths(kv)",
    ),
    "or-tensor": (
        lambda: masks.causal() | torch.ones(3, 3, dtype=torch.bool),
        "mask must be joined to another mask by `|`, got Tensor",
        "masks.dense(tensor) turns a boolean tensor into a mask",
    ),
    "and-tensor": (
        lambda: masks.causal() & torch.ones(3, 3, dtype=torch.bool),
        "mask must be joined to another mask by `&`, got Tensor",
        "masks.dense(tensor) turns a boolean tensor into a mask",
    ),
    "and-none": (lambda: masks.causal() & None, "mask must be joined to another mask by `&`, got NoneType", None),
    "and-two-aligns": (
        lambda: masks.causal("top_left") & masks.window(3, 0, "bottom_right"),
        "mask must have one alignment, got causal(align='top_left') & window(3, 0, align='bottom_right')",
        "pass the same align to both, or to only one of them",
    ),
    # bias, slopes, sinks
    "bias-bool": (
        lambda: att(bias=torch.ones(5, 7, dtype=torch.bool)),
        "bias must be a floating-point tensor, got torch.bool",
        "a boolean mask goes to mask=masks.dense(tensor), True = attend",
    ),
    "bias-int": (
        lambda: att(bias=torch.ones(5, 7, dtype=torch.int64)),
        "bias must be a floating-point tensor, got torch.int64",
        None,
    ),
    "bias-shape": (
        lambda: att(bias=t(5, 5)),
        "bias must be broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [5, 5]",
        None,
    ),
    "bias-heads": (
        lambda: att(bias=t(2, 2, 5, 7)),
        "bias must be broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [2, 2, 5, 7]",
        None,
    ),
    "bias-5d": (
        lambda: att(bias=t(1, 1, 1, 5, 7)),
        "bias must be broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [1, 1, 1, 5, 7]",
        None,
    ),
    "bias-thd": (
        lambda: thd(bias=t(4, 9, 8), mask=masks.documents([0, 9])),
        "bias must be broadcastable to [heads, Tq, Tk] = [4, 9, 9], got [4, 9, 8]",
        None,
    ),
    "bias-number": (lambda: att(bias=1.0), "bias must be a torch.Tensor, got float", None),
    "bias-device": (lambda: att(bias=t(5, 7, device="meta")), "bias must be on the device of q (cpu), got meta", None),
    "slopes-shape": (
        lambda: square(alibi_slopes=t(2)),
        "alibi_slopes must have shape [heads] = [4] or [sequences, heads] = [2, 4], got [2]",
        None,
    ),
    "slopes-2d": (
        lambda: square(alibi_slopes=t(3, 4)),
        "alibi_slopes must have shape [heads] = [4] or [sequences, heads] = [2, 4], got [3, 4]",
        None,
    ),
    "slopes-int": (
        lambda: square(alibi_slopes=torch.ones(4, dtype=torch.int32)),
        "alibi_slopes must be a floating-point tensor, got torch.int32",
        None,
    ),
    "slopes-list": (
        lambda: square(alibi_slopes=[1, 2, 3, 4]),
        "alibi_slopes must be a torch.Tensor, got list",
        "torch.tensor(alibi_slopes)",
    ),
    "sinks-shape": (lambda: square(sinks=t(2)), "sinks must have shape [heads] = [4], got [2]", None),
    "sinks-scalar": (lambda: square(sinks=t()), "sinks must have shape [heads] = [4], got []", None),
    "sinks-number": (lambda: square(sinks=0.0), "sinks must be a torch.Tensor, got float", None),
    "sinks-device": (
        lambda: square(sinks=t(4, device="meta")),
        "sinks must be on the device of q (cpu), got meta",
        None,
    ),
    # numbers
    "scale-nan": (
        lambda: square(scale=math.nan),
        "scale must be a finite number or None (1/sqrt(head size)), got nan",
        None,
    ),
    "scale-inf": (
        lambda: square(scale=math.inf),
        "scale must be a finite number or None (1/sqrt(head size)), got inf",
        None,
    ),
    "scale-string": (
        lambda: square(scale="1"),
        "scale must be a finite number or None (1/sqrt(head size)), got '1'",
        None,
    ),
    "scale-tensor": (
        lambda: square(scale=t()),
        "scale must be a finite number or None (1/sqrt(head size)), got tensor(0.)",
        None,
    ),
    "scale-bool": (
        lambda: square(scale=True),
        "scale must be a finite number or None (1/sqrt(head size)), got True",
        None,
    ),
    "scale-complex": (
        lambda: square(scale=1j),
        "scale must be a finite number or None (1/sqrt(head size)), got 1j",
        None,
    ),
    "softcap-zero": (lambda: square(softcap=0.0), "softcap must be a positive number or None, got 0.0", None),
    "softcap-negative": (lambda: square(softcap=-1), "softcap must be a positive number or None, got -1", None),
    "softcap-inf": (lambda: square(softcap=math.inf), "softcap must be a positive number or None, got inf", None),
    "softcap-nan": (lambda: square(softcap=math.nan), "softcap must be a positive number or None, got nan", None),
    "softcap-larger-than-a-float": (
        lambda: square(softcap=2**1024),
        f"softcap must be a positive number or None, got {2**1024}",
        None,
    ),
    "scale-larger-than-a-float": (
        lambda: square(scale=-(2**1024)),
        f"scale must be a finite number or None (1/sqrt(head size)), got {-(2**1024)}",
        None,
    ),
    "softcap-list": (lambda: square(softcap=[30.0]), "softcap must be a positive number or None, got [30.0]", None),
    "dropout-above-one": (lambda: square(dropout_p=1.1), "dropout_p must be a number from 0 to 1, got 1.1", None),
    "dropout-negative": (lambda: square(dropout_p=-0.1), "dropout_p must be a number from 0 to 1, got -0.1", None),
    "dropout-nan": (lambda: square(dropout_p=math.nan), "dropout_p must be a number from 0 to 1, got nan", None),
    "dropout-none": (lambda: square(dropout_p=None), "dropout_p must be a number from 0 to 1, got None", None),
    "dropout-bool": (lambda: square(dropout_p=True), "dropout_p must be a number from 0 to 1, got True", None),
    "dropout-list": (lambda: square(dropout_p=[0.1]), "dropout_p must be a number from 0 to 1, got [0.1]", None),
    "dropout-tensor": (
        lambda: square(dropout_p=torch.tensor([0.1, 0.2])),
        "dropout_p must be a number from 0 to 1, got tensor([0.1000, 0.2000])",
        None,
    ),
    "seed-float": (
        lambda: square(dropout_p=0.1, dropout_seed=1.0),
        "dropout_seed must be an int from 0 to 2**63 - 1 or a 0-d int64 tensor, got 1.0",
        None,
    ),
    "seed-negative": (
        lambda: square(dropout_p=0.1, dropout_seed=-1),
        "dropout_seed must be an int from 0 to 2**63 - 1 or a 0-d int64 tensor, got -1",
        None,
    ),
    "seed-too-large": (
        lambda: square(dropout_p=0.1, dropout_seed=2**63),
        "dropout_seed must be an int from 0 to 2**63 - 1 or a 0-d int64 tensor, got 9223372036854775808",
        None,
    ),
    "seed-bool": (
        lambda: square(dropout_p=0.1, dropout_seed=True),
        "dropout_seed must be an int from 0 to 2**63 - 1 or a 0-d int64 tensor, got True",
        None,
    ),
    "seed-int32": (
        lambda: square(dropout_p=0.1, dropout_seed=torch.tensor(1, dtype=torch.int32)),
        "dropout_seed must be an int or a 0-d int64 tensor, got torch.int32 []",
        None,
    ),
    "seed-1d": (
        lambda: square(dropout_p=0.1, dropout_seed=torch.tensor([1])),
        "dropout_seed must be an int or a 0-d int64 tensor, got torch.int64 [1]",
        None,
    ),
    "return-lse-int": (lambda: square(return_lse=1), "return_lse must be True or False, got 1", None),
    "return-lse-none": (lambda: square(return_lse=None), "return_lse must be True or False, got None", None),
    "return-lse-string": (
        lambda: square(return_lse="yes", softcap=1.0),
        "return_lse must be True or False, got 'yes'",
        None,
    ),
    # backend, deterministic
    "backend-unknown": (
        lambda: square(backend="flash2"),
        f"backend must be one of {BACKENDS}, got 'flash2'",
        "did you mean 'flash'?",
    ),
    "backend-int": (lambda: square(backend=3), f"backend must be one of {BACKENDS}, got 3", None),
    "backend-list": (
        lambda: square(backend=["reference"]),
        f"backend must be one of {BACKENDS}, got ['reference']",
        "did you mean 'reference'?",
    ),
    "deterministic-string": (
        lambda: square(deterministic="yes"),
        "deterministic must be True, False or None, got 'yes'",
        None,
    ),
    "deterministic-list": (lambda: square(deterministic=[]), "deterministic must be True, False or None, got []", None),
    "deterministic-int": (lambda: square(deterministic=2), "deterministic must be True, False or None, got 2", None),
    "use-backends-unknown": (
        lambda: use_backends("flash2"),
        f"backend must be one of {BACKENDS}, got 'flash2'",
        "did you mean 'flash'?",
    ),
    "use-backends-int": (lambda: use_backends(3), f"backend must be one of {BACKENDS}, got 3", None),
    "use-backends-list": (
        lambda: use_backends(["reference"]),
        f"backend must be one of {BACKENDS}, got ['reference']",
        "did you mean 'reference'?",
    ),
    "disable-unknown": (
        lambda: use_backends.disable("flash2"),
        f"backend must be one of {BACKENDS}, got 'flash2'",
        "did you mean 'flash'?",
    ),
    # pages
    "pages-int64": (
        lambda: paged(pages=TABLE.long()),
        "pages must be an int32 block table [sequences, max_pages], got torch.int64 [2, 3]",
        "pages.to(torch.int32)",
    ),
    "pages-1d": (
        lambda: paged(pages=TABLE[0]),
        "pages must be an int32 block table [sequences, max_pages], got torch.int32 [3]",
        None,
    ),
    "pages-list": (lambda: paged(pages=[[0]]), "pages must be a torch.Tensor, got list", "torch.tensor(pages)"),
    "pages-rows": (
        lambda: paged(pages=torch.zeros(3, 3, dtype=torch.int32)),
        "pages must have one row per sequence of q (2), got [3, 3]",
        None,
    ),
    "pages-no-mask": (
        lambda: paged(mask=None),
        "mask must contain the keys' lengths if pages is given, got every pair",
        "mask=masks.lengths(kv_lengths), or masks.documents(cu_seqlens_q, cu_seqlens_kv) in thd",
    ),
    "pages-causal-only": (
        lambda: paged(mask=masks.causal("bottom_right")),
        "mask must contain the keys' lengths if pages is given, got causal (bottom-right)",
        "mask=masks.lengths(kv_lengths), or masks.documents(cu_seqlens_q, cu_seqlens_kv) in thd",
    ),
    "pages-lengths-too-long": (
        lambda: paged(mask=masks.lengths([3, 13])),
        "mask must have lengths(kv) of at most 12, the kv length of the call, got 13",
        None,
    ),
    "pages-k-rank": (
        lambda: paged(k=POOL[0], v=POOL[0]),
        "k must have 4 axes [pages, page size, kv heads, head size], got 3 axes [4, 2, 8]",
        None,
    ),
    "pages-v-shape": (
        lambda: paged(v=t(6, 5, 2, 8)),
        "v must have the pages, page size and heads of k [6, 4, 2], got [6, 5, 2, 8]",
        None,
    ),
    "pages-head-size": (
        lambda: paged(k=t(6, 4, 2, 9), v=t(6, 4, 2, 9)),
        "k must have the head size of q (8), got 9 in [6, 4, 2, 9]",
        None,
    ),
    "pages-heads": (
        lambda: paged(k=t(6, 4, 3, 8), v=t(6, 4, 3, 8)),
        "k must have a number of heads that divides q's (4), got 3 in [6, 4, 3, 8]",
        "grouped-query attention needs 1, 2 or 4 key heads for 4 query heads, so that each serves equally many",
    ),
    "pages-grad": (
        lambda: paged(k=POOL.clone().requires_grad_()),
        (
            "pages must be used without gradients of k and v (a cache is read, not trained through), got k or v "
            "with requires_grad=True"
        ),
        "call under torch.no_grad(), or pass k and v unpaged",
    ),
    "pages-device": (lambda: paged(pages=TABLE.to("meta")), "pages must be on the device of q (cpu), got meta", None),
    "pages-out-of-range": (
        lambda: paged(pages=TABLE + 100),
        "pages must number pages of the pool, 0 to 5, wherever a sequence has keys, got 100",
        "only entries beyond a sequence's length may hold anything else",
    ),
    "pages-none-pool": (
        lambda: paged(k=t(0, 4, 2, 8), v=t(0, 4, 2, 8)),
        "k must have at least one page of at least one key when pages is given, got [0, 4, 2, 8]",
        None,
    ),
    "pages-size-0": (
        lambda: paged(k=t(6, 0, 2, 8), v=t(6, 0, 2, 8), mask=masks.lengths([0, 0])),
        "k must have at least one page of at least one key when pages is given, got [6, 0, 2, 8]",
        None,
    ),
    "pages-thd-rows": (
        lambda: undivided.attention(
            P, t(6, 4, 2, 8), t(6, 4, 2, 8), layout="thd", pages=TABLE, mask=masks.documents([0, 3, 6, 9], [0, 2, 4, 6])
        ),
        "pages must have one row per document of the mask (3), got [2, 3]",
        None,
    ),
    "pages-thd-too-long": (
        lambda: undivided.attention(
            P, t(6, 4, 2, 8), t(6, 4, 2, 8), layout="thd", pages=TABLE, mask=masks.documents([0, 3, 9], [0, 20, 22])
        ),
        "padded_kv must leave room for document 0 of length 20, got 12 slots",
        "padded_kv holds the offset of each document in memory, then the total",
    ),
    "pages-v-none": (lambda: paged(v=None), "v must be a torch.Tensor, got NoneType", None),
    # explain
    "explain-layout-none": (
        lambda: explain(Q, Q, Q, layout=None),
        "layout must be one of 'bshd', 'sbhd', 'bhsd', 'thd', got None",
        "b batch, s sequence, h heads, d head size, t packed tokens; the letters are the order of q's axes",
    ),
    "explain-unknown": (
        lambda: explain(Q, Q, Q, layout="bshd", softcapp=1),
        (
            "explain must be given only its own arguments (alibi_slopes, backend, batch_invariant, bias, "
            "context_parallel, deterministic, dropout_p, dropout_seed, k_scale, layout, machine, mask, pages, "
            "return_lse, scale, sinks, softcap, v_scale), got ['softcapp']"
        ),
        "softcap=",
    ),
    "explain-foreign-keyword": (
        lambda: explain(Q, Q, Q, layout="bshd", window_size=(3, 0)),
        (
            "explain must be given only its own arguments (alibi_slopes, backend, batch_invariant, bias, "
            "context_parallel, deterministic, dropout_p, dropout_seed, k_scale, layout, machine, mask, pages, "
            "return_lse, scale, sinks, softcap, v_scale), got ['window_size']"
        ),
        "mask=masks.window(left, right)",
    ),
    "explain-machine-string": (
        lambda: explain(Q, Q, Q, layout="bshd", machine="a100"),
        "machine must be an undivided.Machine or None, got str",
        "Machine.named('a100')",
    ),
    "explain-q-none": (lambda: explain(None, Q, Q, layout="bshd"), "q must be a torch.Tensor, got NoneType", None),
    "explain-backend": (
        lambda: explain(Q, Q, Q, layout="bshd", backend="x"),
        f"backend must be one of {BACKENDS}, got 'x'",
        None,
    ),
    # merge
    "merge-nothing": (
        lambda: merge([], []),
        "lses must be one for each of outs, and at least one, got 0 for 0 outs",
        None,
    ),
    "merge-counts": (
        lambda: merge([OUT], [LSE, LSE]),
        "lses must be one for each of outs, and at least one, got 2 for 1 outs",
        None,
    ),
    "merge-shapes": (
        lambda: merge([OUT, OUT[:1]], [LSE, LSE]),
        (
            "outs must be tensors like the first, [2, 5, 4, 8] torch.float32 on cpu, got [1, 5, 4, 8] "
            "torch.float32 on cpu"
        ),
        None,
    ),
    "merge-lse-shapes": (
        lambda: merge([OUT, OUT], [LSE, LSE[:1]]),
        ("lses must be tensors like the first, [2, 4, 5] torch.float32 on cpu, got [1, 4, 5] torch.float32 on cpu"),
        None,
    ),
    "merge-dtypes": (
        lambda: merge([OUT, OUT.double()], [LSE, LSE]),
        (
            "outs must be tensors like the first, [2, 5, 4, 8] torch.float32 on cpu, got [2, 5, 4, 8] "
            "torch.float64 on cpu"
        ),
        None,
    ),
    "merge-not-tensors": (
        lambda: merge([OUT, None], [LSE, LSE]),
        "outs must be floating-point tensors, got NoneType",
        None,
    ),
    "merge-first-not-tensor": (
        lambda: merge([None, OUT], [LSE, LSE]),
        "outs must be floating-point tensors, got NoneType",
        None,
    ),
    "merge-none": (lambda: merge(None, None), "outs must be a sequence of tensors, got NoneType", None),
    "merge-ambiguous": (
        lambda: merge([t(2, 4, 4, 8)], [t(2, 4, 4)]),
        "layout must be given, as [2, 4, 4, 8] fits bshd and bhsd, got None",
        "merge(outs, lses, layout='bshd')",
    ),
    "merge-fits-none": (
        lambda: merge([OUT], [t(2, 5, 4, 1)]),
        (
            "lses must be [B, H, Sq] for outs in bshd, sbhd or bhsd, [H, T] in thd, got [2, 5, 4, 1] for outs of "
            "[2, 5, 4, 8]"
        ),
        None,
    ),
    "merge-wrong-layout": (
        lambda: merge([OUT], [LSE], layout="bhsd"),
        "lses must be [B, H, Sq] for outs in bhsd, [H, T] in thd, got [2, 4, 5] for outs of [2, 5, 4, 8]",
        "these shapes would fit layout='bshd'",
    ),
    "merge-unknown-layout": (
        lambda: merge([OUT], [LSE], layout="bhds"),
        "layout must be one of 'bshd', 'sbhd', 'bhsd', 'thd', or None, got 'bhds'",
        None,
    ),
    "merge-sinks-shape": (lambda: merge([OUT], [LSE], t(3)), "sinks must have shape [heads] = [4], got [3]", None),
    "merge-sinks-number": (lambda: merge([OUT], [LSE], 0.0), "sinks must be a floating-point tensor, got float", None),
    "merge-lse-int": (lambda: merge([OUT], [LSE.int()]), "lses must be floating-point tensors, got torch.int32", None),
    "merge-out-int": (lambda: merge([OUT.int()], [LSE]), "outs must be floating-point tensors, got torch.int32", None),
    "merge-sinks-int": (
        lambda: merge([OUT], [LSE], t(4).bool()),
        "sinks must be a floating-point tensor, got torch.bool",
        None,
    ),
    "merge-lse-device": (
        lambda: merge([OUT], [LSE.to("meta")]),
        "lses must be on the device of outs (cpu), got meta",
        None,
    ),
    # Machine
    "machine-device": (lambda: Machine(device="gpu"), "Machine.device must be 'cpu', 'cuda' or None, got 'gpu'", None),
    "machine-no-capability": (
        lambda: Machine(device="cuda"),
        "Machine.compute_capability must be given for a CUDA device, got None",
        "for example (8, 0) for an A100, (9, 0) for an H100",
    ),
    "machine-capability-string": (
        lambda: Machine(device="cuda", compute_capability="8.0"),
        "Machine.compute_capability must be two ints, got '8.0'",
        "for example (8, 0) for an A100, (9, 0) for an H100",
    ),
    "machine-capability-int": (
        lambda: Machine(device="cuda", compute_capability=80),
        "Machine.compute_capability must be two ints, got 80",
        "for example (8, 0) for an A100, (9, 0) for an H100",
    ),
    "machine-package": (
        lambda: Machine(packages={"flashattn": "2"}),
        (
            "Machine.packages must name only flash_attn, flash_attn_3, flash_attn_4, cudnn_frontend, triton, got "
            "['flashattn']"
        ),
        None,
    ),
    "machine-packages-list": (
        lambda: Machine(packages=["flash_attn"]),
        "Machine.packages must map names to versions, as {'flash_attn': '2.8.4'}, got list",
        None,
    ),
    "machine-package-version": (
        lambda: Machine(packages={"flash_attn": "new"}),
        "Machine.packages['flash_attn'] must be a version such as '9.1.0', got 'new'",
        None,
    ),
    "machine-package-none": (
        lambda: Machine(packages={"flash_attn": None}),
        "Machine.packages['flash_attn'] must be a version such as '9.1.0', got None",
        None,
    ),
    "machine-cudnn": (
        lambda: Machine(device="cuda", compute_capability=(8, 0), cudnn="v9"),
        "Machine.cudnn must be a version such as '9.1.0', got 'v9'",
        None,
    ),
    "machine-cudnn-int": (
        lambda: Machine(device="cuda", compute_capability=(8, 0), cudnn=9),
        "Machine.cudnn must be a version such as '9.1.0', got 9",
        None,
    ),
    "machine-torch": (
        lambda: Machine(torch="nightly"),
        "Machine.torch must be a version such as '9.1.0', got 'nightly'",
        None,
    ),
    "machine-named": (
        lambda: Machine.named("a1000"),
        (
            "device must be cpu or one of v100, t4, a100, a10, rtx3090, l4, l40s, rtx4090, h100, h200, b200, "
            "b300, rtx5090, got 'a1000'"
        ),
        "did you mean 'a100'?",
    ),
    "machine-named-none": (
        lambda: Machine.named(None),
        (
            "device must be cpu or one of v100, t4, a100, a10, rtx3090, l4, l40s, rtx4090, h100, h200, b200, "
            "b300, rtx5090, got None"
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_raises_its_message(name: str) -> None:
    call, message, hint = CALLS[name]
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value) == (message if hint is None else f"{message}\n  HINT: {hint}")
    assert caught.value.hint == hint
    assert message.startswith(f"{caught.value.argument} must ")


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith(("merge", "machine"))])
def test_a_repeated_wrong_call_raises_the_same_error(name: str) -> None:
    """Nothing that is cached from the first call makes the second one pass."""
    call, message, _ = CALLS[name]
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            call()
        assert str(caught.value).startswith(message)


def test_explain_refuses_what_attention_refuses() -> None:
    for arguments in ({"layout": "bhds"}, {"layout": "bshd", "scale": math.nan}, {"layout": "bshd", "sinks": t(3)}):
        messages = []
        for function in (undivided.attention, explain):
            with pytest.raises(InputError) as caught:
                function(Q, Q, Q, **arguments)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_values_of_a_mask_changed_in_place_are_checked_again() -> None:
    n = torch.tensor([5, 3])
    mask = masks.lengths(n, n)
    square(mask=mask)
    n[0] = 6
    with pytest.raises(InputError, match=r"lengths\(kv\) of at most 5, the kv length of the call, got 6"):
        square(mask=mask)


def test_page_numbers_beyond_a_sequences_length_may_be_anything() -> None:
    table = torch.tensor([[0, -1, 99], [1, 2, 3]], dtype=torch.int32)
    assert paged(pages=table).shape == Q.shape
    table[0, 0] = 6
    with pytest.raises(InputError, match=r"pages must number pages of the pool, 0 to 5, .*, got 6"):
        paged(pages=table)


def test_tensors_without_a_value_on_the_host_are_checked_by_structure_alone() -> None:
    meta = {"device": "meta"}
    q = t(2, 5, 4, 8, **meta)
    n = t(2, dtype=torch.int32, **meta)
    assert explain(q, q, q, layout="bshd", mask=masks.causal() & masks.lengths(n, n)).chosen is not None
    with pytest.raises(InputError, match="values on a GPU are not compared"):
        explain(q, q, q, layout="bshd", mask=masks.causal() & masks.lengths(n, n.clone()))


def test_an_input_error_is_a_value_error_and_survives_pickling() -> None:
    with pytest.raises(ValueError, match="layout must be one of") as caught:
        att(layout="bhds")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, InputError)
    assert (str(copy), copy.argument, copy.hint) == (str(caught.value), "layout", caught.value.hint)  # type: ignore[attr-defined]


FOREIGN = {
    "is_causal": (True, "mask=masks.causal(); "),
    "causal": (True, "mask=masks.causal(); "),
    "attn_mask": (None, "mask=masks.dense(tensor) for booleans"),
    "cu_seqlens_q": (None, 'layout="thd" and mask=masks.documents('),
    "window_size": ((3, 0), "mask=masks.window(left, right)"),
    "softmax_scale": (0.5, "scale="),
    "softcapp": (0.5, "softcap="),
    "softmax_scal": (0.5, "scale="),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_keyword_of_another_library_gives_a_hint_with_ours(name: str, compiled: bool) -> None:
    """The error was once a bare "unexpected keyword argument"."""
    call = torch.compile(undivided.attention, backend="eager") if compiled else undivided.attention
    value, hint = FOREIGN[name]
    with pytest.raises(InputError, match=rf"attention must be given only its own .*, got \['{name}'\]") as caught:
        call(Q, Q, Q, layout="bshd", **{name: value})  # type: ignore[call-overload]
    assert (caught.value.hint or "").startswith(hint)
    assert isinstance(caught.value, TypeError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy), copy.hint) == (type(caught.value), str(caught.value), caught.value.hint)


def test_every_foreign_keyword_is_one_that_attention_does_not_have() -> None:
    own = set(inspect.signature(undivided.attention).parameters)
    assert not own & set(_foreign._WRITTEN)
    for hint in _foreign._WRITTEN.values():
        word = re.match(r"(\w+)=", hint)
        assert word is None or word[1] in own


def test_the_typed_signature_takes_no_other_keyword() -> None:
    for overload in typing.get_overloads(undivided.attention):
        kinds = {p.kind for p in inspect.signature(overload).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds


@pytest.mark.parametrize("name", ["bias", "sinks"])
def test_a_sparse_input_is_refused_after_a_dense_one_of_its_shape(name: str) -> None:
    """The cache key of a call once did not distinguish the two."""
    tensor = torch.ones(2)
    q = torch.randn(1, 2, 2, 8)
    undivided.attention(q, q, q, layout="bshd", **{name: tensor})
    with pytest.raises(InputError, match=f"{name} must be a dense"):
        undivided.attention(q, q, q, layout="bshd", **{name: tensor.to_sparse()})


def test_a_numpy_scale_is_a_number() -> None:
    """Comparing it to the largest double warned of an overflow in its own precision."""
    numpy = pytest.importorskip("numpy")
    q = torch.randn(1, 2, 2, 8)
    want = undivided.attention(q, q, q, layout="bshd", scale=0.5)
    assert torch.equal(undivided.attention(q, q, q, layout="bshd", scale=numpy.float32(0.5)), want)
    with pytest.raises(InputError, match="scale must be a finite number"):
        undivided.attention(q, q, q, layout="bshd", scale=numpy.float16("inf"))


def test_a_block_table_is_checked_again_once_it_was_changed_in_place() -> None:
    q, pool = torch.randn(1, 1, 2, 16), torch.randn(4, 8, 2, 16)
    pages, mask = torch.tensor([[0, 1]], dtype=torch.int32), masks.lengths([12])
    given = {"layout": "bshd", "mask": mask, "pages": pages}
    for _ in range(2):
        undivided.attention(q, pool, pool, **given)
    pages[0, 1] = 4
    with pytest.raises(undivided.InputError, match="pages must number pages of the pool, 0 to 3"):
        undivided.attention(q, pool, pool, **given)
    pages[0, 1] = 3
    undivided.attention(q, pool, pool, **given)
    with pytest.raises(undivided.InputError, match="0 to 1"):  # the same table, a smaller pool
        undivided.attention(q, pool[:2], pool[:2], **given)


def test_a_hint_does_not_search_billions_of_heads() -> None:
    """It lists the divisors of the query heads: for 2^31 - 1 heads that took a minute and a half."""
    q, k = torch.empty(1).expand(1, 4, 2**31 - 1, 1), torch.empty(1).expand(1, 5, 3, 1)
    with pytest.raises(InputError, match="a number of key heads that divides the query heads"):
        undivided.explain(q, k, k, layout="bshd")
