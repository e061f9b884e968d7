"""Calls of `attention` with a wrong option or wrong pages."""

# type checkers refuse these calls too
# mypy: ignore-errors

from __future__ import annotations

import math

import torch
from torch.nn.attention import SDPBackend
from wrong_call_inputs import BACKENDS, POOL, TABLE, P, WrongCalls, att, paged, square, t, thd

import undivided
from undivided import masks, use_backends

OPTIONS: WrongCalls = {
    # bias, slopes, sinks
    "bias-bool": (
        lambda: att(bias=torch.ones(5, 7, dtype=torch.bool)),
        "bias must be a floating-point tensor, got torch.bool",
        "a boolean mask goes to mask=masks.dense(tensor), True = attend",
    ),
    "bias-int": (
        lambda: att(bias=torch.ones(5, 7, dtype=torch.int64)),
        "bias must be a floating-point tensor, got torch.int64",
        "bias.to(q.dtype)",
    ),
    "bias-shape": (
        lambda: att(bias=t(5, 5)),
        "bias must be broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [5, 5]",
        "it is for 5 keys, and the call has 7",
    ),
    "bias-per-batch": (
        lambda: att(bias=t(2, 5, 7)),
        "bias must be broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [2, 5, 7]",
        "did you mean bias[:, None]?",
    ),
    "bias-transposed": (
        lambda: att(bias=t(4, 7, 5)),
        "bias must be broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [4, 7, 5]",
        "did you mean bias.transpose(-1, -2)?",
    ),
    "sinks-a-number": (
        lambda: att(sinks=4),
        "sinks must be a torch.Tensor, got int",
        "mask=masks.window(left, 0) | masks.sinks(4) keeps the first 4 keys in a window; sinks= is one logit per head",
    ),
    "sinks-4d": (
        lambda: att(sinks=t(1, 4, 1, 1)),
        "sinks must have shape [heads] = [4], got [1, 4, 1, 1]",
        "sinks.flatten()",
    ),
    "slopes-true": (
        lambda: att(alibi_slopes=True),
        "alibi_slopes must be a torch.Tensor, got bool",
        "undivided.alibi_slopes(heads) are the usual slopes",
    ),
    "slopes-false": (
        lambda: att(alibi_slopes=False),
        "alibi_slopes must be a torch.Tensor, got bool",
        "None, for no slopes",
    ),
    "slopes-3d": (
        lambda: square(alibi_slopes=t(4, 1, 1)),
        "alibi_slopes must have shape [heads] = [4] or [sequences, heads] = [2, 4], got [4, 1, 1]",
        "alibi_slopes.flatten()",
    ),
    "dropout-percentage": (
        lambda: att(dropout_p=10),
        "dropout_p must be a number from 0 to 1, got 10",
        "0.1, if it is a percentage",
    ),
    "pages-heads-before-page-size": (
        lambda: paged(k=t(6, 2, 7, 8), v=t(6, 2, 7, 8)),
        "k must have a number of heads that divides q's (4), got 7 in [6, 2, 7, 8]",
        "did you mean k.transpose(1, 2)? Pools are [pages, page size, kv heads, head size]",
    ),
    "bias-heads": (
        lambda: att(bias=t(2, 2, 5, 7)),
        "bias must be broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [2, 2, 5, 7]",
        "did you mean bias.repeat_interleave(2, -3)?",
    ),
    "bias-5d": (
        lambda: att(bias=t(1, 1, 1, 5, 7)),
        "bias must be broadcastable to [batch, heads, Sq, Sk] = [2, 4, 5, 7], got [1, 1, 1, 5, 7]",
        None,
    ),
    "bias-thd": (
        lambda: thd(bias=t(4, 9, 8), mask=masks.documents([0, 9])),
        "bias must be broadcastable to [heads, Tq, Tk] = [4, 9, 9], got [4, 9, 8]",
        "it is for 8 keys, and the call has 9",
    ),
    "bias-number": (lambda: att(bias=1.0), "bias must be a torch.Tensor, got float", None),
    "bias-device": (
        lambda: att(bias=t(5, 7, device="meta")),
        "bias must be on the device of q (cpu), got meta",
        "bias.to(q.device)",
    ),
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
        "alibi_slopes.to(q.dtype)",
    ),
    "slopes-list": (
        lambda: square(alibi_slopes=[1, 2, 3, 4]),
        "alibi_slopes must be a torch.Tensor, got list",
        "torch.tensor(alibi_slopes)",
    ),
    "sinks-shape": (
        lambda: square(sinks=t(2)),
        "sinks must have shape [heads] = [4], got [2]",
        "one sink for each query head",
    ),
    "sinks-scalar": (
        lambda: square(sinks=t()),
        "sinks must have shape [heads] = [4], got []",
        "one sink for each query head",
    ),
    "sinks-number": (lambda: square(sinks=0.0), "sinks must be a torch.Tensor, got float", None),
    "sinks-device": (
        lambda: square(sinks=t(4, device="meta")),
        "sinks must be on the device of q (cpu), got meta",
        "sinks.to(q.device)",
    ),
    # numbers
    "scale-nan": (
        lambda: square(scale=math.nan),
        "scale must be a number from -1e30 to 1e30, or None for 1/sqrt(head size), got nan",
        None,
    ),
    "scale-inf": (
        lambda: square(scale=math.inf),
        "scale must be a number from -1e30 to 1e30, or None for 1/sqrt(head size), got inf",
        None,
    ),
    "scale-string": (
        lambda: square(scale="1"),
        "scale must be a number from -1e30 to 1e30, or None for 1/sqrt(head size), got '1'",
        None,
    ),
    "scale-tensor": (
        lambda: square(scale=t()),
        "scale must be a number from -1e30 to 1e30, or None for 1/sqrt(head size), got tensor(0.)",
        "float(scale); if it is learned, scale=1.0 and q * scale",
    ),
    "scale-bool": (
        lambda: square(scale=True),
        "scale must be a number from -1e30 to 1e30, or None for 1/sqrt(head size), got True",
        None,
    ),
    "scale-complex": (
        lambda: square(scale=1j),
        "scale must be a number from -1e30 to 1e30, or None for 1/sqrt(head size), got 1j",
        None,
    ),
    "softcap-zero": (
        lambda: square(softcap=0.0),
        "softcap must be a number from 1e-30 to 1e30, or None, got 0.0",
        "softcap=None, for no cap",
    ),
    "softcap-negative": (
        lambda: square(softcap=-1),
        "softcap must be a number from 1e-30 to 1e30, or None, got -1",
        None,
    ),
    "softcap-inf": (
        lambda: square(softcap=math.inf),
        "softcap must be a number from 1e-30 to 1e30, or None, got inf",
        None,
    ),
    "softcap-nan": (
        lambda: square(softcap=math.nan),
        "softcap must be a number from 1e-30 to 1e30, or None, got nan",
        None,
    ),
    "softcap-larger-than-a-float": (
        lambda: square(softcap=2**1024),
        f"softcap must be a number from 1e-30 to 1e30, or None, got {2**1024}",
        None,
    ),
    "scale-larger-than-a-float": (
        lambda: square(scale=-(2**1024)),
        f"scale must be a number from -1e30 to 1e30, or None for 1/sqrt(head size), got {-(2**1024)}",
        None,
    ),
    "softcap-list": (
        lambda: square(softcap=[30.0]),
        "softcap must be a number from 1e-30 to 1e30, or None, got [30.0]",
        None,
    ),
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
        "dropout_seed.long().squeeze()",
    ),
    "seed-1d": (
        lambda: square(dropout_p=0.1, dropout_seed=torch.tensor([1])),
        "dropout_seed must be an int or a 0-d int64 tensor, got torch.int64 [1]",
        "dropout_seed.long().squeeze()",
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
    "backend-of-pytorch": (
        lambda: square(backend=SDPBackend.MATH),
        f"backend must be one of {BACKENDS}, got <SDPBackend.MATH: 0>",
        "'math' is the family of PyTorch's SDPBackend.MATH",
    ),
    "backend-list": (
        lambda: square(backend=["reference"]),
        f"backend must be one of {BACKENDS}, got ['reference']",
        "did you mean 'reference'? several: with undivided.use_backends('native', 'reference')",
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
        "did you mean 'reference'? several: with undivided.use_backends('native', 'reference')",
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
        "lengths are numbers of tokens, one for each batch element; cumulative lengths go to masks.documents",
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
    "pages-device": (
        lambda: paged(pages=TABLE.to("meta")),
        "pages must be on the device of q (cpu), got meta",
        "pages.to(q.device)",
    ),
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
}
