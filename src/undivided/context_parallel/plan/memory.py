"""The peak memory of a rank: the bytes that it holds at every moment of a call.

It counts the tensors of a call: the caller's q, k, v and output (and their gradients), the tensors of the all-to-all
exchanges, keys that are in use or in flight, sums, and the results of kernels. It does not count the scratch memory of
kernels and the mask with its schedule, which all layers share. Keys that are consecutive on their owner are sent
without a copy; they are assumed to be consecutive unless they belong to several documents.

Legend: W ranks, T rounds; all values are bytes, int64 [W] or [W, T].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from undivided.context_parallel.plan.counts import Counts


@dataclass(frozen=True)
class _Rounds:
    """Keys and values per round: in use, received for it, sent for it, and copied in order to be sent."""

    in_use: Tensor
    received: Tensor
    sent: Tensor
    copied: Tensor

    @property
    def in_flight(self) -> Tensor:
        """Bytes held for the next round while one is computed; 0 during the last."""
        return functional.pad((self.received + self.copied)[:, 1:], (0, 1))

    @property
    def returning(self) -> Tensor:
        """Bytes of gradients of the previous round, which return while one is computed; 0 during the first."""
        return functional.pad((self.received + self.sent)[:, :-1], (1, 0))


class PeakMemory:
    """The peak bytes of a forward pass alone, and of a forward and a backward pass.

    Attributes with the suffix `_local` describe what a rank computes with; they differ from what it holds only after an
    all-to-all. scattered: the keys that a rank sends belong to several documents, so they are not consecutive.
    """

    def __init__(self, counts: Counts, scattered: bool) -> None:
        self._scattered = scattered
        work, sizes = counts.work, counts.sizes
        self._counts, self._work, self._sizes = counts, work, sizes
        rows, keys = (
            torch.tensor([own.numel() for own in positions]) for positions in (work.ranks.rows, work.ranks.keys)
        )
        self._widening = sizes.lse_bytes // sizes.entry_bytes
        """Bytes of an entry of a sum divided by those of an entry of the inputs."""
        self._has_all_to_all = work.ranks.group_size > 1
        entry, entries = sizes.entry_bytes, rows * sizes.heads
        self._q, self._out = entries * sizes.qk_dim * entry, entries * sizes.v_dim * entry
        self._lse = entries * sizes.lse_bytes
        self._q_local, self._out_local = work.entries * sizes.qk_dim * entry, work.entries * sizes.v_dim * entry
        self._lse_local = work.entries * sizes.lse_bytes
        self._kv = keys * sizes.kv_heads * counts.key_bytes
        self._kv_local = self._kv
        if self._has_all_to_all:
            self._kv_local = (work.keys_received + work.keys_kept) * counts.key_bytes
        self._rounds = self._count_rounds()
        self._sums_rounds = (self._rounds.in_use > 0).any(1) & (not self._is_all_gather)
        """Ranks that add up the results of several rounds."""
        self._is_one_piece = ~self._sums_rounds & (work.shares == 1) & (self._largest_fraction == 1)
        """Ranks with a single piece, whose result is used without a copy."""

    @property
    def _is_all_gather(self) -> bool:
        return self._counts.strategy == "all_gather"

    def _count_rounds(self) -> _Rounds:
        counts, key_bytes = self._counts, self._counts.key_bytes
        if self._is_all_gather:
            groups = counts.head_groups
            received, sent = (counts.by_rank(counts.arrivals.sum(dim))[:, None] * key_bytes // groups for dim in (1, 0))
            received, sent = received.expand(-1, groups), sent.expand(-1, groups)
            copied = sent if groups > 1 or self._sizes.batch > 1 else torch.zeros_like(sent)
            return _Rounds(received + (self._kv // groups)[:, None], received, sent, copied)
        received, sent = counts.by_rank(counts.received) * key_bytes, counts.by_rank(counts.sent) * key_bytes
        is_copied = (sent < self._kv_local[:, None]) & (self._scattered or self._sizes.batch > 1)
        return _Rounds(received, received, sent, sent * is_copied)

    @property
    def _largest_fraction(self) -> Tensor:
        """Rows x heads of the largest piece divided by those of all pieces."""
        groups = self._counts.head_groups if self._is_all_gather else 1
        return self._work.largest / self._work.entries.clamp(min=1) / groups

    def forward(self) -> Tensor:
        """The peak of a forward pass alone."""
        return torch.stack(list(self._forward_moments().values())).amax(0)

    def backward(self) -> Tensor:
        """The peak of a forward pass and the backward pass after it."""
        held = self._q + self._kv + 2 * self._out + self._lse
        if self._has_all_to_all:
            held = held + self._q_local + self._kv_local + self._out_local + self._lse_local
        moments = self._backward_rounds(held)
        if self._has_all_to_all:
            moments |= self._backward_exchanges(held)
        return torch.stack([self.forward(), *moments.values()]).amax(0)

    def _forward_moments(self) -> dict[str, Tensor]:
        rounds, held = self._rounds, self._q + self._kv
        inputs = held + (self._q_local + self._kv_local if self._has_all_to_all else 0)
        sums = self._out_local * torch.where(self._sums_rounds, self._widening, 1) + self._lse_local
        widens = self._sums_rounds & (self._widening > 1)
        result = self._largest_piece(self._out_local + self._lse_local)
        # half types are summed in fp32, an eighth of the rows at a time
        result += torch.where(widens, result * self._widening // 8, 0)
        during_round = torch.where(self._is_one_piece, 0, sums) + result + (rounds.in_use + rounds.in_flight).amax(1)
        moments = {
            "during a round": inputs + during_round,
            "sums are rounded": inputs + sums + torch.where(widens, self._out_local, 0),
        }
        return moments | (self._forward_exchanges(held, inputs) if self._has_all_to_all else {})

    def _forward_exchanges(self, held: Tensor, inputs: Tensor) -> dict[str, Tensor]:
        work, key_bytes, sizes = self._work, self._counts.key_bytes, self._sizes
        row, back = sizes.qk_dim * sizes.entry_bytes, sizes.v_dim * sizes.entry_bytes + sizes.lse_bytes
        keys, results = (work.keys_sent + work.keys_received) * key_bytes, self._out_local + self._lse_local
        return {
            "rows and keys in flight": held + (work.rows_sent + work.rows_received) * row + keys,
            "rows are joined": held + 2 * self._q_local + keys,
            "keys are joined": inputs + work.keys_received * key_bytes,
            "results in flight": inputs + results + (work.rows_received + work.rows_sent) * back,
            "results are written": inputs + results + work.rows_sent * back + self._out + self._lse,
        }

    def _backward_rounds(self, held: Tensor) -> dict[str, Tensor]:
        rounds = self._rounds
        grad_out = self._out_local if self._has_all_to_all else 0
        is_later = torch.arange(rounds.in_use.shape[1]) > 0
        dq = self._largest_piece(self._q_local)[:, None] * ((rounds.in_use > 0) | ~is_later)
        # the gradients of keys of one piece are sent directly; those of several shares are summed first
        dkv = rounds.in_use.clone()
        if not self._is_all_gather:
            dkv[:, 0] = self._kv_local
        dkv = dkv + torch.where(self._work.shares[:, None] > 1, dkv * self._widening, 0)
        dq_sum, dkv_sum = self._gradient_sums()
        sums = (dq_sum + dkv_sum)[:, None] * (is_later | self._is_all_gather)
        during_round = dq + dkv + sums + rounds.in_use + rounds.in_flight + rounds.returning
        widens = self._sums_rounds & (self._widening > 1) & (not self._has_all_to_all)
        rounded = torch.where(widens, self._q_local, 0)
        return {
            "during a round": held + grad_out + during_round.amax(1),
            "sums are rounded": held + dq_sum + dkv_sum + rounded,
        }

    def _gradient_sums(self) -> tuple[Tensor, Tensor]:
        """The sums of dq, and of dk and dv, at the end; in the dtype of the inputs if they come from one piece."""
        is_single = (self._work.shares == 1) & (self._rounds.sent.sum(1) == 0) & (not self._is_all_gather)
        dq = self._q_local * torch.where(self._is_one_piece, 1, self._widening)
        return dq, self._kv_local * torch.where(is_single, 1, self._widening)

    def _backward_exchanges(self, held: Tensor) -> dict[str, Tensor]:
        work, key_bytes, sizes = self._work, self._counts.key_bytes, self._sizes
        row, back = sizes.qk_dim * sizes.entry_bytes, sizes.v_dim * sizes.entry_bytes
        dq_sum, dkv_sum = self._gradient_sums()
        keys = (work.keys_sent + work.keys_received) * key_bytes
        is_disjoint = int(work.ranks.key_heads.sum()) == sizes.kv_heads  # no key head is on two ranks
        dkv = self._kv * (1 if is_disjoint else 1 + self._widening)
        return {
            "gradients of the output in flight": held + (work.rows_sent + work.rows_received) * back,
            "gradients of the output are joined": held + 2 * self._out_local,
            "gradients in flight": held + dq_sum + dkv_sum + (work.rows_sent + work.rows_received) * row + keys,
            "gradients of queries are written": held + dq_sum + dkv_sum + work.rows_sent * row + self._q + keys,
            "gradients of keys are written": held + self._q + dkv_sum + work.keys_sent * key_bytes + dkv,
        }

    def _largest_piece(self, total: Tensor) -> Tensor:
        """The part of the bytes of all pieces that belongs to the largest piece."""
        return (total * self._largest_fraction).to(torch.int64)
