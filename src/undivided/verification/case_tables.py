"""The named cases, in groups. Sizes are odd and small, so that every kernel runs its tails and all cases take seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from undivided import masks
from undivided.masks import Mask
from undivided.quantization import FORMATS
from undivided.verification.case import EVERY_DTYPE, Case


def _tagged(tag: str, *cases: Case) -> Iterable[Case]:
    """The cases with one more tag."""
    return (replace(case, tags=case.tags | {tag}) for case in cases)


SMOKE = frozenset({"smoke"})
"""A small selection, for backends that are slow to start (compilers, interpreters)."""


def _even_distance(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q - k) % 2 == 0


def _by_head_and_batch(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k - h) & (k != b + 3)


def _with_holes(*shape: int) -> Tensor:
    """True for most pairs; row 2 and column 1 are all False, and whole 4 x 4 tiles are empty."""
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.7
    allowed[..., 2, :] = False
    allowed[..., :, 1] = False
    allowed[..., 4:8, 8:12] = False
    return allowed


def _chosen_blocks(batch: int, heads: int, q_blocks: int, kv_blocks: int) -> Tensor:
    """A block table in which some entries are -1 and some blocks come twice."""
    shape = batch, heads, q_blocks, kv_blocks
    return torch.randint(-1, kv_blocks, shape, generator=torch.Generator().manual_seed(6))


PLAIN = _tagged(
    "plain",
    Case("plain-bshd", dtypes=EVERY_DTYPE, tags=SMOKE),
    Case("plain-sbhd", layout="sbhd", dtypes=EVERY_DTYPE),
    Case("plain-bhsd", layout="bhsd", dtypes=EVERY_DTYPE),
    Case("plain-thd-one-document", layout="thd", batch=1, mask=lambda: masks.documents([0, 13])),
    Case("more-keys-than-queries", layout="bhsd", q_len=7, kv_len=29),
    Case("more-queries-than-keys", layout="sbhd", q_len=29, kv_len=7),
    Case("lse-returned-and-differentiated", return_lse=True, dtypes=EVERY_DTYPE),
    Case("lse-thd", layout="thd", batch=1, q_len=10, mask=lambda: masks.documents([0, 3, 10]), return_lse=True),
    Case("only-q-needs-a-gradient", needs=("q",)),
    Case("only-k-needs-a-gradient", layout="sbhd", needs=("k",)),
    Case("only-v-needs-a-gradient", layout="bhsd", needs=("v",)),
    Case("no-gradient", needs=()),
)

MEMORY = _tagged(
    "memory",
    Case("packed-qkv-bshd", memory="packed-qkv"),
    Case("packed-qkv-sbhd-gqa", layout="sbhd", memory="packed-qkv", kv_heads=2, mask=masks.causal),
    Case(
        "packed-qkv-thd",
        layout="thd",
        batch=1,
        memory="packed-qkv",
        mask=lambda: masks.documents([0, 4, 13]) & masks.causal(),
    ),
    Case("every-second-row-bshd", memory="sliced"),
    Case("every-second-row-bhsd-causal", layout="bhsd", memory="sliced", mask=masks.causal),
    Case("last-axis-strided", memory="strided-last"),
    Case("last-axis-strided-thd", layout="thd", batch=1, memory="strided-last", mask=lambda: masks.documents([0, 13])),
    Case("keys-shared-by-the-batch", memory="shared-kv", batch=3),
)

SIZES = _tagged(
    "sizes",
    Case("one-query-one-key", q_len=1),
    Case("one-query-many-keys", q_len=1, kv_len=67, kv_heads=2),
    Case("many-queries-one-key", q_len=67, kv_len=1),
    Case("no-queries", q_len=0, kv_len=5),
    Case("no-keys", q_len=5, kv_len=0, return_lse=True),
    Case("no-batch", batch=0),
    Case("no-documents", layout="thd", batch=1, q_len=0, mask=lambda: masks.documents([0])),
    Case("lengths-67-by-129", q_len=67, kv_len=129, heads=2, qk_dim=32),
    Case("one-past-a-tile-257", batch=1, q_len=257, heads=2, qk_dim=32, mask=masks.causal),
    Case("one-short-of-tiles-511-by-1023", batch=1, q_len=511, kv_len=1023, heads=1, qk_dim=32),
    Case("single-head", heads=1), Case("nine-heads-batch-five", heads=9, batch=5, layout="sbhd"),
    *(Case(f"head-size-{d}", qk_dim=d, heads=2, q_len=17, kv_len=19, mask=lambda: masks.causal("bottom_right"))
      for d in (1, 3, 17, 64, 80, 128, 256)),
    Case("head-size-320", qk_dim=320, heads=1),
)  # fmt: skip

HEADS = _tagged(
    "heads",
    Case("gqa-4", heads=8, kv_heads=2, tags=SMOKE),
    Case("gqa-2-causal-sbhd", layout="sbhd", kv_heads=2, mask=masks.causal),
    Case("mqa-causal", kv_heads=1, layout="bhsd", mask=masks.causal),
    Case("gqa-of-a-prime-7-heads", heads=7, kv_heads=1, q_len=9),
    Case("window-left3-gqa4-odd", heads=8, kv_heads=2, q_len=37, mask=lambda: masks.window(3, 0)),
    Case("value-head-wider", qk_dim=8, v_dim=24),
    Case("value-head-narrower-thd", layout="thd", batch=1, qk_dim=24, v_dim=8, mask=lambda: masks.documents([0, 6, 13])),
    Case("mla-prefill-192-128", heads=2, qk_dim=192, v_dim=128, mask=masks.causal),
    Case("mla-decode-576-512-mqa", q_len=1, kv_len=21, kv_heads=1, qk_dim=576, v_dim=512,
         mask=lambda: masks.lengths([21, 9]), needs=()),
    Case("mla-latents-decode", q_len=1, kv_len=70, heads=16, kv_heads=1, qk_dim=576, v_dim=512, memory="latent",
         mask=lambda: masks.lengths([70, 9]), scale=0.07, needs=()),
    Case("mla-latents-prefill", q_len=20, kv_len=33, heads=5, kv_heads=1, qk_dim=96, v_dim=64, memory="latent",
         mask=lambda: masks.causal("bottom_right"), needs=()),
)  # fmt: skip

CAUSAL = _tagged(
    "causal",
    Case("causal-square", mask=masks.causal, dtypes=EVERY_DTYPE, tags=SMOKE),
    Case("causal-square-bhsd", layout="bhsd", mask=masks.causal),
    Case("causal-top-left-more-keys", q_len=7, kv_len=29, mask=lambda: masks.causal("top_left")),
    Case("causal-top-left-fewer-keys", q_len=29, kv_len=7, mask=lambda: masks.causal("top_left")),
    Case("causal-bottom-right-chunked-prefill", q_len=7, kv_len=29, kv_heads=2, mask=lambda: masks.causal("bottom_right")),
    Case("causal-bottom-right-fewer-keys-empty-rows", q_len=29, kv_len=7, return_lse=True,
         mask=lambda: masks.causal("bottom_right")),
    Case("causal-bottom-right-decode", q_len=1, kv_len=67, kv_heads=1, mask=lambda: masks.causal("bottom_right")),
    Case("window-left3", mask=lambda: masks.window(3, 0), tags=SMOKE),
    Case("window-left0", layout="sbhd", mask=lambda: masks.window(0, 0)),
    Case("window-both-sides", layout="bhsd", q_len=41, mask=lambda: masks.window(5, 2)),
    Case("window-right-only", mask=lambda: masks.window(None, 2)),
    Case("window-left-only", mask=lambda: masks.window(4, None)),
    Case("window-bottom-right-chunked-prefill", q_len=9, kv_len=33, mask=lambda: masks.window(6, 0, "bottom_right")),
    Case("window-top-left-fewer-keys-empty-rows", q_len=33, kv_len=9, mask=lambda: masks.window(2, 1, "top_left")),
    Case("window-bottom-right-fewer-keys-empty-rows", q_len=33, kv_len=9, mask=lambda: masks.window(2, 1, "bottom_right")),
    Case("window-long-300", batch=1, q_len=300, heads=2, mask=lambda: masks.window(17, 0)),
    Case("chunks-5", mask=lambda: masks.chunks(5)),
    Case("chunks-5-causal", layout="sbhd", mask=lambda: masks.chunks(5) & masks.causal()),
    Case("chunks-bottom-right-decode", q_len=2, kv_len=23, mask=lambda: masks.chunks(8, "bottom_right")),
    Case("chunks-with-offset", q_len=13, mask=lambda: masks.chunks(5, offset=3) & masks.causal()),
    Case("chunks-with-an-offset-each", q_len=13, mask=lambda: masks.chunks(5, offset=[3, 11]) & masks.causal()),
    Case("prefix-4-bare", mask=lambda: masks.prefix(4)),
    Case("prefix-lm", layout="bhsd", mask=lambda: masks.causal() | masks.prefix(5)),
    Case("prefix-lm-a-length-each", mask=lambda: masks.causal() | masks.prefix([0, 6])),
    Case("window-with-4-global-keys", q_len=37, mask=lambda: masks.window(5, 0) | masks.prefix(4)),
    Case("window-with-4-sinks", q_len=37, mask=lambda: masks.window(5, 0) | masks.sinks(4)),
    Case("prefix-lm-left-padded", mask=lambda: (masks.causal() | masks.prefix(3)) & _left_padded([13, 8], 13)),
)  # fmt: skip


def _left_padded(real: list[int], length: int) -> Mask:
    sizes = torch.tensor(real)
    starts = length - sizes
    return masks.lengths(sizes, sizes, starts, starts)


_IDS: list[list[int]] = [[0, 0, 0, 1, 1, 1, 1, 1, 2, -1, -1, -1, -1], [5] * 12 + [9]]

PADDED = _tagged(
    "padded",
    Case("lengths-keys-only", mask=lambda: masks.lengths([13, 5])),
    Case("lengths-zero-and-one", batch=3, layout="sbhd", mask=lambda: masks.lengths([0, 1, 13]), return_lse=True),
    Case("lengths-both-causal", batch=3, mask=lambda: _right_padded([13, 1, 6]) & masks.causal(), tags=SMOKE),
    Case("lengths-left-padding-causal", layout="bhsd", mask=lambda: _left_padded([13, 6], 13) & masks.causal()),
    Case("lengths-left-padding-keys-only", q_len=3, kv_len=11, mask=lambda: masks.lengths([11, 4], kv_start=[0, 7])),
    Case("lengths-window-bottom-right", q_len=5, kv_len=29, kv_heads=2,
         mask=lambda: masks.lengths([29, 11], [5, 2]) & masks.window(7, 0, "bottom_right")),
    Case("lengths-decode-gqa", q_len=1, kv_len=40, batch=3, heads=8, kv_heads=2, mask=lambda: masks.lengths([40, 1, 23])),
    Case("lengths-all-padding", mask=lambda: masks.lengths([0, 0], [0, 0])),
    Case("lengths-chunked-prefill-causal", layout="sbhd", q_len=6, kv_len=21,
         mask=lambda: masks.lengths([21, 9], [6, 4]) & masks.causal("bottom_right")),
    Case("document-ids-bshd-with-padding", mask=lambda: masks.document_ids(torch.tensor(_IDS)) & masks.causal()),
    Case("document-ids-interleaved", layout="bhsd", mask=lambda: masks.document_ids(torch.tensor([[0, 1] * 6 + [0], _IDS[1]]))),
    Case("documents-in-a-dense-batch-of-one", batch=1, q_len=13, mask=lambda: masks.documents([0, 5, 13]) & masks.causal()),
)  # fmt: skip


def _right_padded(real: list[int]) -> Mask:
    sizes = torch.tensor(real, dtype=torch.int32)
    return masks.lengths(sizes, sizes)


PACKED = _tagged(
    "packed",
    Case("documents-thd-causal", layout="thd", batch=1, q_len=20, kv_heads=2,
         mask=lambda: masks.documents([0, 3, 4, 20]) & masks.causal(), tags=SMOKE),
    Case("documents-thd-every-pair", layout="thd", batch=1, q_len=20, mask=lambda: masks.documents([0, 3, 4, 20])),
    Case("documents-empty-ones-thd", layout="thd", batch=1, q_len=9,
         mask=lambda: masks.documents([0, 0, 4, 4, 9, 9]) & masks.causal(), return_lse=True),
    Case("documents-padded-offsets-thd", layout="thd", batch=1, q_len=13,
         mask=lambda: masks.documents([0, 3, 5, 9], padded_q=[0, 4, 8, 13]) & masks.causal()),
    Case("documents-cross-attention-thd", layout="thd", batch=1, q_len=9, kv_len=16,
         mask=lambda: masks.documents([0, 2, 9], [0, 11, 16])),
    Case("documents-queries-without-keys-thd", layout="thd", batch=1, q_len=9, kv_len=11, return_lse=True,
         mask=lambda: masks.documents([0, 2, 6, 9], [0, 5, 5, 11])),
    Case("documents-keys-without-queries-thd", layout="thd", batch=1, q_len=9, kv_len=14,
         mask=lambda: masks.documents([0, 4, 9, 9], [0, 5, 10, 14])),
    Case("documents-fewer-keys-bottom-right-thd", layout="thd", batch=1, q_len=97, kv_len=123,
         mask=lambda: masks.documents([0, 70, 73, 97], [0, 30, 30, 123]) & masks.causal("bottom_right")),
    Case("documents-chunked-prefill-thd", layout="thd", batch=1, q_len=7, kv_len=30,
         mask=lambda: masks.documents([0, 2, 7], [0, 11, 30]) & masks.causal("bottom_right")),
    Case("documents-window-thd-gqa", layout="thd", batch=1, q_len=40, heads=8, kv_heads=2,
         mask=lambda: masks.documents([0, 17, 40]) & masks.window(4, 0)),
    Case("documents-window-padded-bottom-right-thd", layout="thd", batch=1, q_len=12, kv_len=24,
         mask=lambda: masks.documents([0, 3, 9], [0, 9, 20], [0, 5, 12], [0, 12, 24]) & masks.window(4, 1, "bottom_right")),
    Case("documents-chunks-thd", layout="thd", batch=1, q_len=20, mask=lambda: masks.documents([0, 7, 20]) & masks.chunks(4)),
    Case("documents-prefix-lm-thd", layout="thd", batch=1, q_len=20,
         mask=lambda: masks.documents([0, 7, 20]) & (masks.causal() | masks.prefix([2, 5]))),
    Case("documents-many-short-thd", layout="thd", batch=1, q_len=45,
         mask=lambda: masks.documents([0, *torch.arange(1, 10).cumsum(0).tolist()]) & masks.causal()),
    Case("document-ids-thd", layout="thd", batch=1, mask=lambda: masks.document_ids(torch.tensor(_IDS[0])) & masks.causal()),
)  # fmt: skip

ARBITRARY = _tagged(
    "arbitrary",
    Case("dense-with-holes", mask=lambda: masks.dense(_with_holes(13, 13)), tags=SMOKE),
    Case("dense-each-head-and-batch", layout="bhsd", mask=lambda: masks.dense(_with_holes(2, 4, 13, 13)), return_lse=True),
    Case("dense-broadcast-over-heads", layout="sbhd", mask=lambda: masks.dense(_with_holes(2, 1, 13, 13))),
    Case("dense-nothing-allowed", mask=lambda: masks.dense(torch.zeros(13, 13, dtype=torch.bool)), return_lse=True),
    Case("dense-and-causal-and-lengths", kv_heads=2,
         mask=lambda: masks.dense(_with_holes(13, 13)) & masks.causal() & _right_padded([13, 7])),
    Case("dense-thd", layout="thd", batch=1, mask=lambda: masks.documents([0, 5, 13]) & masks.dense(_with_holes(13, 13))),
    Case("predicate-even-distances", mask=lambda: masks.predicate(_even_distance)),
    Case("tree-after-a-prefix", q_len=6, kv_len=30, kv_heads=2, mask=lambda: masks.tree([-1, 0, 0, 2, 1, 3])),
    Case("tree-of-each-sequence-lengths", q_len=4, kv_len=21, kv_heads=2, return_lse=True,
         mask=lambda: masks.tree(torch.tensor([[-1, 0, 0, 1], [-1, -1, 1, -1]])) & masks.lengths([21, 9], [4, 3])),
    Case("tree-thd", layout="thd", batch=1, q_len=7, kv_len=40, kv_heads=2,
         mask=lambda: masks.tree([-1, 0, 0, 2, -1, 0, 0]) & masks.documents([0, 4, 7], [0, 25, 40])),
    Case("blocks-each-key-head-causal", layout="bhsd", q_len=37, kv_len=37, heads=4, kv_heads=2, return_lse=True,
         mask=lambda: masks.blocks(8, 8, _chosen_blocks(1, 2, 5, 5)) & masks.causal()),
    Case("blocks-each-head-left-padding", q_len=20, kv_len=45, heads=4, kv_heads=2,
         mask=lambda: masks.blocks(4, 16, _chosen_blocks(2, 4, 5, 3)) & masks.lengths([45, 30], [20, 11], [0, 15], [0, 9])),
    Case("blocks-window-and-sinks", q_len=33, kv_len=33, mask=lambda: masks.blocks(16, 8, _chosen_blocks(2, 1, 3, 5))
         & (masks.window(9, 0) | masks.sinks(2))),
    Case("blocks-bias", q_len=12, kv_len=20, bias="1hqk", mask=lambda: masks.blocks(4, 4, _chosen_blocks(1, 1, 3, 5))),
    Case("blocks-thd", layout="thd", batch=1, q_len=33, kv_len=48, kv_heads=2,
         mask=lambda: masks.blocks(8, 8, _chosen_blocks(2, 1, 3, 3)) & masks.documents([0, 20, 33], [0, 24, 48])
         & masks.causal("bottom_right")),
    Case("predicate-by-head-and-batch-causal", layout="sbhd",
         mask=lambda: masks.predicate(_by_head_and_batch) & masks.causal()),
    Case("predicate-and-window-tall", batch=1, q_len=70, heads=2,
         mask=lambda: masks.predicate(_even_distance) & masks.window(9, 3)),
)  # fmt: skip

SCORES = _tagged(
    "scores",
    Case("scale-positive", scale=0.3),
    Case("scale-zero", scale=0.0),
    Case("scale-zero-causal", scale=0.0, mask=masks.causal),
    Case("scale-negative", scale=-0.25),
    Case("scale-negative-causal", scale=-0.25, mask=masks.causal),
    Case("scale-negative-documents-thd", layout="thd", batch=1, scale=-0.25,
         mask=lambda: masks.documents([0, 4, 13]) & masks.causal()),
    Case("scale-negative-window", layout="bhsd", scale=-0.25, mask=lambda: masks.window(3, 1)),
    Case("large-logits", magnitude=4.0, qk_dim=64),
    Case("large-logits-causal-float16", magnitude=4.0, qk_dim=64, mask=masks.causal,
         dtypes=(torch.float16, torch.float32)),
    Case("small-logits", magnitude=0.01),
    Case("softcap-20-causal", softcap=20.0, magnitude=3.0, mask=masks.causal),
    Case("softcap-1-saturated", softcap=1.0, magnitude=4.0, layout="sbhd"),
    Case("bias-full", bias="bhqk"),
    Case("bias-full-bhsd-causal", layout="bhsd", bias="bhqk", mask=masks.causal),
    Case("bias-broadcast-batch", bias="1hqk", layout="sbhd"),
    Case("bias-broadcast-heads-3d", bias="1qk"),
    Case("bias-two-dimensions", bias="qk", kv_heads=2),
    Case("bias-of-keys", bias="b11k", mask=lambda: masks.window(6, 2)),
    Case("bias-of-rows", bias="b1q1"),
    Case("bias-of-heads", bias="1h11", layout="bhsd"),
    Case("bias-with-minus-infinity", bias="bhqk", bias_holes=True, return_lse=True),
    Case("bias-with-minus-infinity-causal-gqa", bias="1hqk", bias_holes=True, kv_heads=2, mask=masks.causal),
    Case("bias-float32-beside-half", bias="1hqk", bias_dtype=torch.float32, dtypes=(torch.bfloat16, torch.float16)),
    Case("bias-not-differentiated", bias="bhqk", needs=("q", "k", "v")),
    Case("bias-thd", layout="thd", batch=1, bias="hqk", mask=lambda: masks.documents([0, 4, 13])),
    Case("alibi-causal", alibi="h", mask=masks.causal),
    Case("alibi-usual-slopes", alibi="usual", mask=masks.causal, needs=("q", "k", "v")),
    Case("alibi-every-pair", alibi="h", layout="sbhd", needs=("q", "k", "v")),
    Case("alibi-slopes-of-each-sequence", alibi="bh", layout="bhsd", mask=masks.causal),
    Case("alibi-bottom-right-chunked-prefill", alibi="h", q_len=5, kv_len=19, mask=lambda: masks.causal("bottom_right"),
         needs=("q", "k", "v")),
    Case("alibi-left-padding", alibi="bh", mask=lambda: _left_padded([13, 7], 13) & masks.causal()),
    Case("alibi-documents-thd", layout="thd", batch=1, alibi="bh", mask=lambda: masks.documents([0, 4, 13]) & masks.causal()),
    Case("sinks", sinks=True),
    Case("sinks-causal-window-gqa", layout="sbhd", sinks=True, kv_heads=2, return_lse=True, mask=lambda: masks.window(4, 0)),
    Case("sinks-empty-rows", sinks=True, q_len=17, kv_len=6, mask=lambda: masks.causal("bottom_right")),
    Case("sinks-documents-thd", layout="thd", batch=1, sinks=True,
         mask=lambda: masks.documents([0, 4, 4, 13]) & masks.causal()),
    Case("softcap-alibi-bias-together", softcap=5.0, alibi="h", bias="1hqk", kv_heads=2, mask=masks.causal),
    Case("everything-together", softcap=5.0, alibi="bh", bias="bhqk", bias_holes=True, sinks=True, kv_heads=2, v_dim=24,
         dropout_p=0.2, return_lse=True, mask=lambda: masks.window(9, 2) & _right_padded([13, 8])),
)  # fmt: skip

DROPOUT = _tagged(
    "dropout",
    Case("dropout-bshd", dropout_p=0.25),
    Case("dropout-sbhd-causal-gqa", dropout_p=0.1, layout="sbhd", kv_heads=2, mask=masks.causal),
    Case("dropout-bhsd-window", dropout_p=0.5, layout="bhsd", q_len=37, mask=lambda: masks.window(5, 0)),
    Case("dropout-thd", dropout_p=0.25, layout="thd", batch=1, mask=lambda: masks.documents([0, 4, 13]) & masks.causal()),
    Case("dropout-thd-padded-offsets", dropout_p=0.25, layout="thd", batch=1,
         mask=lambda: masks.documents([0, 3, 5, 9], padded_q=[0, 4, 8, 13])),
    Case("dropout-left-padding", dropout_p=0.25, mask=lambda: _left_padded([13, 7], 13) & masks.causal()),
    Case("dropout-sinks-lse", dropout_p=0.25, sinks=True, return_lse=True),
    Case("dropout-of-the-last-heads", dropout_p=0.25, kv_heads=2,
         mask=lambda: (masks.causal() & _right_padded([13, 8])).with_first_head(4)),
    Case("dropout-of-everything", dropout_p=1.0),
    Case("dropout-64-bit-seed", dropout_p=0.25, dropout_seed=(1 << 62) + 12345),
)  # fmt: skip

PAGED = _tagged(
    "paged",
    Case("paged-decode", q_len=1, kv_len=24, batch=3, heads=8, kv_heads=2, page_size=4, needs=(),
         mask=lambda: masks.lengths([24, 1, 9])),
    Case("paged-decode-page-of-16-mla", q_len=1, kv_len=32, kv_heads=1, qk_dim=32, v_dim=24, page_size=16, needs=(),
         mask=lambda: masks.lengths([32, 17])),
    Case("paged-latents-decode", q_len=1, kv_len=96, heads=12, kv_heads=1, qk_dim=96, v_dim=64, page_size=16,
         memory="latent", mask=lambda: masks.lengths([90, 17]), needs=()),
    Case("paged-latents-thd", layout="thd", batch=1, q_len=6, kv_len=48, heads=4, kv_heads=1, qk_dim=48, v_dim=32,
         page_size=8, memory="latent", needs=(),
         mask=lambda: masks.documents([0, 5, 6], [0, 14, 37]) & masks.causal("bottom_right")),
    Case("paged-tree", q_len=5, kv_len=32, kv_heads=2, page_size=8, needs=(),
         mask=lambda: masks.tree([-1, 0, 0, 2, 2]) & masks.lengths([30, 11])),
    Case("paged-tree-thd", layout="thd", batch=1, q_len=7, kv_len=64, heads=4, kv_heads=2, page_size=8, needs=(),
         mask=lambda: masks.tree([-1, 0, 0, 2, -1, 0, 0]) & masks.documents([0, 4, 7], [0, 25, 40])),
    Case("paged-latents-tree", q_len=4, kv_len=64, heads=8, kv_heads=1, qk_dim=48, v_dim=32, page_size=16, memory="latent",
         mask=lambda: masks.tree([-1, 0, 0, 2]) & masks.lengths([60, 21]), needs=()),
    Case("paged-chosen-pages-decode", q_len=1, kv_len=64, heads=8, kv_heads=2, page_size=8, needs=(), return_lse=True,
         mask=lambda: masks.pages(_chosen_blocks(2, 2, 1, 4)[:, :, 0], 16) & masks.lengths([61, 30])),
    Case("paged-chosen-pages-thd", layout="thd", batch=1, q_len=3, kv_len=64, heads=4, kv_heads=2, page_size=16, needs=(),
         mask=lambda: masks.pages(_chosen_blocks(2, 1, 1, 3)[:, 0, 0], 8) & masks.documents([0, 1, 3], [0, 20, 50])
         & masks.causal("bottom_right")),
    Case("paged-chosen-blocks-query-gradient", q_len=6, kv_len=16, page_size=4, needs=("q",),
         mask=lambda: masks.blocks(4, 4, _chosen_blocks(1, 1, 2, 4)) & masks.lengths([16, 9], [6, 5])),
    Case("paged-empty-sequence", q_len=1, kv_len=12, batch=3, page_size=4, needs=(), return_lse=True,
         mask=lambda: masks.lengths([0, 12, 5])),
    Case("paged-chunked-prefill-causal", layout="sbhd", q_len=5, kv_len=20, page_size=4, needs=(),
         mask=lambda: masks.lengths([20, 7], [5, 3]) & masks.causal("bottom_right")),
    Case("paged-window-decode", q_len=1, kv_len=20, page_size=4, needs=(),
         mask=lambda: masks.lengths([20, 7]) & masks.window(5, 0, "bottom_right")),
    Case("paged-thd-mixed-prefill-and-decode", layout="thd", batch=1, q_len=6, kv_len=24, kv_heads=2, page_size=4, needs=(),
         mask=lambda: masks.documents([0, 1, 6], [0, 11, 18]) & masks.causal("bottom_right")),
    Case("paged-shared-prefix-decode", q_len=1, kv_len=192, batch=5, heads=8, kv_heads=2, page_size=16, shared_pages=9,
         needs=(), return_lse=True, mask=lambda: masks.lengths([192, 145, 150, 160, 144])),
    Case("paged-shared-prefix-drafts-sinks-softcap", q_len=3, kv_len=176, batch=3, heads=4, kv_heads=2, page_size=16,
         shared_pages=10, needs=(), sinks=True, softcap=9.0,
         mask=lambda: masks.lengths([176, 163, 170]) & masks.causal("bottom_right")),
    Case("paged-shared-prefix-window", q_len=1, kv_len=192, batch=4, heads=8, kv_heads=2, page_size=16, shared_pages=10,
         needs=(), mask=lambda: masks.lengths([192, 170, 161, 180]) & masks.window(60, 0, "bottom_right")),
    Case("paged-shared-prefix-thd", layout="thd", batch=1, q_len=4, kv_len=704, heads=8, kv_heads=2, page_size=16,
         shared_pages=9, needs=(),
         mask=lambda: masks.documents([0, 1, 2, 3, 4], [0, 150, 325, 470, 640]) & masks.causal("bottom_right")),
    Case("paged-query-gradient", q_len=3, kv_len=12, page_size=4, needs=("q",),
         mask=lambda: masks.lengths([12, 6], [3, 2]) & masks.causal("bottom_right")),
)  # fmt: skip

QUANTIZED = _tagged(
    "quantized",
    *(Case(f"{format}-{name}", quantized=format, needs=(), qk_dim=32, **case)  # type: ignore[arg-type]
      for format in FORMATS
      for name, case in {
          "decode-gqa": {"q_len": 1, "kv_len": 300, "heads": 8, "kv_heads": 2, "mask": lambda: masks.lengths([300, 41])},
          "prefill-causal": {"q_len": 67, "layout": "bhsd", "kv_heads": 2, "return_lse": True, "mask": masks.causal},
          "paged-decode": {"q_len": 1, "kv_len": 96, "batch": 3, "heads": 8, "kv_heads": 1, "page_size": 16,
                           "mask": lambda: masks.lengths([96, 1, 39])},
          "thd-paged-mixed": {"layout": "thd", "batch": 1, "q_len": 46, "kv_len": 192, "kv_heads": 2, "page_size": 8,
                              "mask": lambda: masks.documents([0, 1, 6, 46], [0, 31, 48, 101]) & masks.causal("bottom_right")},
      }.items()),
    Case("int8-decode-several-rows-sliced", quantized="int8", needs=(), q_len=3, kv_len=160, kv_heads=2, qk_dim=48, v_dim=80,
         memory="sliced", mask=lambda: masks.causal("bottom_right")),
    Case("int8-head-size-24-sbhd", quantized="int8", needs=(), layout="sbhd", q_len=5, kv_len=70, qk_dim=24, v_dim=17),
    Case("fp8_e4m3-thd-documents-alibi", quantized="fp8_e4m3", needs=(), layout="thd", batch=1, q_len=45, alibi="h",
         mask=lambda: masks.documents([0, 12, 45]) & masks.causal()),
    Case("fp8_e5m2-window-sinks-softcap", quantized="fp8_e5m2", needs=(), q_len=37, qk_dim=64, softcap=5.0, sinks=True,
         mask=lambda: masks.window(9, 2)),
    Case("int4-decode-head-size-128-sliced", quantized="int4", needs=(), q_len=1, kv_len=200, heads=8, kv_heads=2, qk_dim=128,
         v_dim=64, memory="sliced", return_lse=True, mask=lambda: masks.window(120, 0, "bottom_right")),
    Case("int8-bias-dense-dropout", quantized="int8", needs=(), bias="1hqk", dropout_p=0.2, mask=lambda: masks.dense(_with_holes(13, 13))),
    Case("int8-keys-shared-by-the-batch", quantized="int8", needs=(), q_len=1, kv_len=130, batch=3, memory="shared-kv"),
    Case("int8-paged-chosen-pages", quantized="int8", needs=(), q_len=1, kv_len=96, heads=8, kv_heads=2, page_size=16,
         mask=lambda: masks.pages(_chosen_blocks(2, 2, 1, 4)[:, :, 0], 16) & masks.lengths([90, 64])),
    Case("int8-paged-shared-prefix-decode", quantized="int8", needs=(), q_len=1, kv_len=192, batch=5, heads=8, kv_heads=2,
         page_size=16, shared_pages=9, return_lse=True, mask=lambda: masks.lengths([192, 145, 150, 160, 144])),
    Case("int4-paged-shared-prefix-thd", quantized="int4", needs=(), layout="thd", batch=1, q_len=4, kv_len=704, heads=8,
         kv_heads=2, page_size=16, shared_pages=9, qk_dim=64,
         mask=lambda: masks.documents([0, 1, 2, 3, 4], [0, 150, 325, 470, 640]) & masks.causal("bottom_right")),
    Case("fp8_e4m3-paged-tree", quantized="fp8_e4m3", needs=(), q_len=5, kv_len=32, kv_heads=2, page_size=8,
         mask=lambda: masks.tree([-1, 0, 0, 2, 2]) & masks.lengths([30, 11])),
    Case("int4-tree-of-each-sequence", quantized="int4", needs=(), q_len=4, kv_len=45, kv_heads=1, qk_dim=32,
         mask=lambda: masks.tree(torch.tensor([[-1, 0, 0, 1], [-1, -1, 1, -1]])) & masks.lengths([45, 20], [4, 3])),
    Case("fp8_e5m2-blocks-causal", quantized="fp8_e5m2", needs=(), q_len=33, kv_heads=2,
         mask=lambda: masks.blocks(8, 8, _chosen_blocks(1, 2, 5, 3)) & masks.causal()),
    Case("int8-no-keys", quantized="int8", needs=(), q_len=5, kv_len=0, return_lse=True),
)  # fmt: skip
