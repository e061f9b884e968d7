"""Packed documents for `torch_efficient`: offsets, and the layout of its log-sum-exp.

The kernel takes [1, T, H, D] and int32 offsets of the documents, which follow one another without gaps. Its log-sum-exp
is padded: [N, H, L], with L the longest document rounded up to 32 rows; rows after a document's last block of 32 are
not written. Everything here is computed on the device, so that nothing waits for a length.

Source: PyTorch 2.13, mem_eff_attention/kernel_forward.h and kernel_backward.h (`advance_to_block`), the operators'
checks in cuda/mem_eff_attention and cuda/attention_backward.cu.

Legend: N documents as the kernel counts them, T tokens, H heads, L rows of a document's log-sum-exp.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from undivided.backends.shared.documents import packed_documents
from undivided.backends.shared.flash_attn_arguments import packing_arguments
from undivided.request.call import Call
from undivided.request.request import Tensors

LSE_ROWS = 32
"""kAlignLSE: the backward reads the log-sum-exp in blocks of this many rows."""
MAX_DOCUMENTS = 1 << 14
"""The grid's third axis ends at 65535, and a document may count as two (see `_split_rows_without_keys`)."""


class Packing(NamedTuple):
    """The documents of one call: int32 offsets [N + 1] of queries and keys, and the longest of each."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    one_split: bool
    """Whether the backward must not split keys: if it does, without a causal mask, it divides by the number of queries,
    which may be 0."""

    @staticmethod
    def from_call(call: Call, tensors: Tensors) -> Packing | None:
        """The packing of this call; None for dense sequences."""
        problem = call.problem
        offsets = packing_arguments(call, tensors)
        if not offsets:
            return None
        cu_q, cu_k = offsets["cu_seqlens_q"], offsets["cu_seqlens_k"]
        causal = "causal" in problem.mask.kinds
        if causal and problem.align == "bottom_right":
            cu_q, cu_k = _split_rows_without_keys(cu_q, cu_k)
        documents = packed_documents(call)
        assert documents is not None
        same = documents.cu_seqlens_q is documents.cu_seqlens_kv
        return Packing(cu_q, cu_k, offsets["max_seqlen_q"], offsets["max_seqlen_k"], one_split=not (same or causal))

    @property
    def documents(self) -> int:
        """The number of documents, N."""
        return self.cu_q.shape[0] - 1

    @property
    def rows(self) -> int:
        """The rows of a document's log-sum-exp, L."""
        return self.max_q + -self.max_q % LSE_ROWS

    def gather(self, lse_NHL: Tensor, tokens: int) -> Tensor:
        """The kernel's log-sum-exp as [1, H, T]; arbitrary for tokens after the last document."""
        document, position = self._places(tokens)
        lse_TH = lse_NHL[document.clamp(max=self.documents - 1), :, position]
        return lse_TH.T.unsqueeze(0).contiguous()

    def scatter(self, lse_1HT: Tensor) -> Tensor:
        """A log-sum-exp [1, H, T] in the kernel's layout [N, H, L]; +inf in rows that do not exist."""
        _, heads, tokens = lse_1HT.shape
        document, position = self._places(tokens)
        # one document more than the kernel gets, for the tokens after the last
        room = lse_1HT.new_full((self.documents + 1, heads, self.rows), torch.inf)
        room[document, :, position] = lse_1HT[0].T
        return room[: self.documents]

    def _places(self, tokens: int) -> tuple[Tensor, Tensor]:
        """(document, position in it) of each token, int64 [T]; document N for tokens after the last one."""
        token = torch.arange(tokens, dtype=torch.int32, device=self.cu_q.device)
        document = torch.searchsorted(self.cu_q[1:], token, right=True)
        return document, (token - self.cu_q[document]).long().clamp(max=self.rows - 1)


def _split_rows_without_keys(cu_q: Tensor, cu_k: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets with each document split in two: the surplus first rows without keys, and the rest with all keys.

    Under a bottom-right mask the surplus rows have no key. In one document, the kernel's unsigned offset of the
    diagonal would be negative, and its comparison would leave the whole tile unmasked.
    """
    start_q, start_k = cu_q[:-1], cu_k[:-1]
    surplus = (cu_q.diff() - cu_k.diff()).clamp(min=0)
    twice_q = torch.stack([start_q, start_q + surplus], 1).flatten()
    twice_k = torch.stack([start_k, start_k], 1).flatten()
    return torch.cat([twice_q, cu_q[-1:]]), torch.cat([twice_k, cu_k[-1:]])
