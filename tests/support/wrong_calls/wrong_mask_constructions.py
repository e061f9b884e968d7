"""Wrong calls of the functions that build masks."""

# type checkers refuse these calls too
# mypy: ignore-errors

from __future__ import annotations

import torch
from wrong_call_inputs import WrongCalls, t

from undivided import masks

CONSTRUCTIONS: WrongCalls = {
    # masks.*
    "causal-align": (
        lambda: masks.causal("topleft"),
        'align must be "top_left", "bottom_right" or None, got \'topleft\'',
        "did you mean 'top_left'?",
    ),
    "window-align": (
        lambda: masks.window(1, 0, "left"),
        'align must be "top_left", "bottom_right" or None, got \'left\'',
        "did you mean 'top_left'?",
    ),
    "window-negative": (
        lambda: masks.window(-2, 0),
        "left must be at least 0, or None (or -1) for an unbounded side, got -2",
        "window(3, 0) is the query's own key and the 3 keys before it",
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
        "kv.squeeze(0)",
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
    "lengths-of-a-bool-mask": (
        lambda: masks.lengths(torch.ones(2, 7, dtype=torch.bool)),
        "kv must have an integer dtype, got torch.bool",
        "kv.sum(-1), if it is True for each real token",
    ),
    "lengths-of-an-int-mask": (
        lambda: masks.lengths(torch.ones(2, 7, dtype=torch.int32)),
        "kv must have one dimension, got shape [2, 7]",
        "kv.sum(-1), if it has a 1 for each real token",
    ),
    "causal-align-of-pytorch": (
        lambda: masks.causal("lower_right"),
        'align must be "top_left", "bottom_right" or None, got \'lower_right\'',
        "did you mean 'bottom_right'?",
    ),
    "predicate-of-a-tensor": (
        lambda: masks.predicate(torch.ones(2, 2, dtype=torch.bool)),
        "fn must be a function fn(b, h, q_idx, kv_idx), got Tensor",
        "masks.dense(tensor), for a boolean tensor",
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
    "max-q-float": (lambda: masks.documents([0, 3, 5], max_q=3.0), "max_q must be an int, got 3.0", "write 3"),
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
    "prefix-float": (lambda: masks.prefix(1.0), "n must be an int, got 1.0", "write 1"),
    "prefix-string": (lambda: masks.prefix("4"), "n must be an int, got '4'", None),
    "chunks-zero": (lambda: masks.chunks(0), "size must be at least 1, got 0", None),
    "chunks-float": (lambda: masks.chunks(2.0), "size must be an int, got 2.0", "write 2"),
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
    "dense-1d": (
        lambda: masks.dense(torch.ones(3, dtype=torch.bool)),
        "tensor must have 2 dimensions [Sq, Sk] or 4 [B|1, H|1, Sq, Sk], got shape [3]",
        "make it two: tensor[None] for [Sk]",
    ),
    "dense-0d": (
        lambda: masks.dense(torch.tensor(True)),
        "tensor must have 2 dimensions [Sq, Sk] or 4 [B|1, H|1, Sq, Sk], got shape []",
        None,
    ),
    "dense-list": (lambda: masks.dense([[True]]), "tensor must be a torch.Tensor, got list", "torch.tensor(tensor)"),
    "dense-array": (
        lambda: masks.dense(torch.ones(1, 1).bool().numpy()),
        "tensor must be a torch.Tensor, got ndarray",
        "torch.from_numpy(tensor)",
    ),
    "documents-array": (
        lambda: masks.documents(torch.tensor([0, 2]).numpy()),
        "cu_seqlens_q must be an int tensor or a list of ints, got ndarray",
        "torch.from_numpy(cu_seqlens_q)",
    ),
    "tensor-and-mask": (
        lambda: torch.ones(1, 1).bool() & masks.causal(),
        "mask must be joined to another mask by `&`, got Tensor",
        "masks.dense(tensor) turns a boolean tensor into a mask",
    ),
    "predicate-none": (
        lambda: masks.predicate(None),
        "fn must be a function fn(b, h, q_idx, kv_idx), got NoneType",
        None,
    ),
    "predicate-of-two": (
        lambda: masks.predicate(lambda q, k: q >= k),
        "fn must take (b, h, q_idx, kv_idx), got (q, k)",
        "lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, for example; b and h may be unused",
    ),
    "predicate-keyword-only": (
        lambda: masks.predicate(lambda b, h, q, k, *, limit: k < limit),
        "fn must take (b, h, q_idx, kv_idx), got (b, h, q, k, *, limit)",
        "lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, for example; b and h may be unused",
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
        "`&` restricts causal to documents; a union of other masks is masks.dense(a.to_dense(...) | b.to_dense(...))",
    ),
    "or-documents": (
        lambda: masks.causal() | masks.documents([0, 4, 8]),
        "mask must join causal or window to a bare prefix or sinks with `|`, got causal() | documents([0, 4, 8])",
        "`&` restricts causal to documents; a union of other masks is masks.dense(a.to_dense(...) | b.to_dense(...))",
    ),
    "or-lengths": (
        lambda: masks.causal() | masks.lengths([3]),
        "mask must join causal or window to a bare prefix or sinks with `|`, got causal() | lengths(kv=[3])",
        "`&` restricts causal to documents; a union of other masks is masks.dense(a.to_dense(...) | b.to_dense(...))",
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
    **{
        f"joined-by-{word}": (
            call,
            "mask must be joined by & or |, got 'and', 'or', 'not' or 'if'",
            "masks.documents(offsets) & masks.causal(); `mask is not None` asks whether there is a mask",
        )
        for word, call in {
            "and": lambda: masks.documents([0, 2, 4]) and masks.causal(),
            "or": lambda: masks.causal() or masks.prefix(2),
            "not": lambda: not masks.causal(),
            "if": lambda: 1 if masks.causal() else 2,
        }.items()
    },
    "inverted": (
        lambda: ~masks.causal(),
        "mask must be joined by & or |, got ~causal()",
        "masks.dense(~mask.to_dense(batch, heads, q_len, kv_len))",
    ),
}
