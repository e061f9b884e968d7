"""Calls of `attention` with a wrong layout, wrong tensors, or sizes that do not fit."""

# type checkers refuse these calls too
# mypy: ignore-errors

from __future__ import annotations

import torch
from wrong_call_inputs import NESTED, K, Q, V, WrongCalls, att, autocast, t, thd

from undivided import masks

TENSORS: WrongCalls = {
    # layout
    "layout-unknown": (
        lambda: att(layout="bhds"),
        "layout must be one of 'bshd', 'sbhd', 'bhsd', 'thd', got 'bhds'",
        (
            "did you mean 'sbhd'? b batch, s sequence, h heads, d head size, t packed tokens; "
            "the letters are the order of q's axes"
        ),
    ),
    "layout-upper": (
        lambda: att(layout="BSHD"),
        "layout must be one of 'bshd', 'sbhd', 'bhsd', 'thd', got 'BSHD'",
        (
            "did you mean 'bshd'? b batch, s sequence, h heads, d head size, t packed tokens; "
            "the letters are the order of q's axes"
        ),
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
    "q-int": (lambda: att(q=Q.int()), "q must be float16, bfloat16, float32 or float64, got torch.int32", "q.float()"),
    "q-complex": (
        lambda: att(q=Q.to(torch.complex64), k=K.to(torch.complex64), v=V.to(torch.complex64)),
        "q must be float16, bfloat16, float32 or float64, got torch.complex64",
        None,
    ),
    "q-bool": (
        lambda: att(q=Q.bool(), k=K.bool(), v=V.bool()),
        "q must be float16, bfloat16, float32 or float64, got torch.bool",
        "q.float()",
    ),
    "q-float8": (
        lambda: att(q=Q.to(torch.float8_e4m3fn), k=K.to(torch.float8_e4m3fn), v=V.to(torch.float8_e4m3fn)),
        "q must be float16, bfloat16, float32 or float64, got torch.float8_e4m3fn",
        "keys and values can be quantised, queries cannot",
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
        "for jagged q, k, v [B, S, H, D]: undivided.attention(q.values(), k.values(), v.values(), layout='thd', "
        "mask=masks.documents(q.offsets())); [B, H, S, D]: undivided.scaled_dot_product_attention(q, k, v)",
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
            " layout='bshd'\n        one sequence is q[None]; packed tokens are layout='thd'"
        ),
    ),
    "q-2d": (lambda: att(q=t(5, 8)), "q must have 4 axes [b, s, h, d], got 2 axes [5, 8]", None),
    "k-3d": (
        lambda: att(k=t(2, 7, 16)),
        "k must have 4 axes [b, s, h, d], got 3 axes [2, 7, 16]",
        (
            "a [batch, seq, hidden] tensor has its heads still together: x.unflatten(-1, (heads, head_dim)), then"
            " layout='bshd'\n        one sequence is k[None]; packed tokens are layout='thd'"
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
    "k-head-size": (
        lambda: att(k=t(2, 7, 2, 16)),
        "k must have the head size of q (8), got 16 in [2, 7, 2, 16]",
        "q and k share a head size; only v may have another",
    ),
    "k-batch": (
        lambda: att(k=t(3, 7, 2, 8), v=t(3, 7, 2, 8)),
        "k must have the batch size of q (2), got 3 in [3, 7, 2, 8]",
        None,
    ),
    "k-batch-of-one": (
        lambda: att(k=t(1, 7, 2, 8), v=t(1, 7, 2, 8)),
        "k must have the batch size of q (2), got 1 in [1, 7, 2, 8]",
        "the batch axis is not broadcast: expand k and v, which copies nothing",
    ),
    "v-batch": (
        lambda: att(v=t(3, 7, 2, 8)),
        "v must have the batch size of k (2), got 3 in [3, 7, 2, 8]",
        "k and v may differ in their head sizes only",
    ),
    "v-length": (
        lambda: att(v=t(2, 6, 2, 8)),
        "v must have the length of k (7), got 6 in [2, 6, 2, 8]",
        "k and v may differ in their head sizes only",
    ),
    "v-heads": (
        lambda: att(v=t(2, 7, 4, 8)),
        "v must have the number of heads of k (2), got 4 in [2, 7, 4, 8]",
        "k and v may differ in their head sizes only",
    ),
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
        "k and v may differ in their head sizes only",
    ),
}
