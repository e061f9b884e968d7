"""The most that a rank holds at one time, moment by moment as a run goes through them.

What is counted are the tensors of a call: the caller's q, k, v and output (and their gradients), what was traded, keys that
are being used and on their way, sums, and what a kernel gives back. Not counted are a kernel's own scratch and the mask with
its schedule, which all layers share. Keys that are a run of a rank's own are sent without a copy; that they are is taken for
granted unless they are of several documents.

Legend: W ranks, T rounds; everything is bytes, int64 [W] or [W, T].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undivided.context_parallel._counts import Counts


@dataclass(frozen=True)
class _Rounds:
    """Keys and values by round: held while they are used, on their way for it, sent for it (and copied for that)."""

    held: Tensor
    came: Tensor
    gone: Tensor
    copied: Tensor

    @property
    def flight(self) -> Tensor:
        """Held for the next round while one is computed."""
        return _next(self.came + self.copied)


class Memory:
    """Bytes at the fullest moment of a forward pass alone, and of a forward and a backward pass."""

    def __init__(self, counts: Counts, scattered: bool) -> None:
        """scattered: keys that a rank sends are of several documents, and so of several stretches of its own."""
        self._scattered = scattered
        work, sizes = counts.work, counts.sizes
        self._counts, self._work, self._sizes = counts, work, sizes
        rows, keys = (
            torch.tensor([part.numel() for part in parts]) for parts in (work.ranks.rows, work.ranks.keys)
        )
        self._wide = sizes.lse // sizes.entry
        """Bytes of an entry that is summed, by those of an entry of the inputs."""
        self._q, self._out = (
            rows * sizes.heads * sizes.qk_dim * sizes.entry,
            rows * sizes.heads * sizes.v_dim * sizes.entry,
        )
        self._kv = keys * sizes.kv_heads * counts.of_key
        self._lse = rows * sizes.heads * sizes.lse
        self._traded = work.ranks.members > 1
        self._q_t, self._out_t = (work.entries * size * sizes.entry for size in (sizes.qk_dim, sizes.v_dim))
        self._lse_t = work.entries * sizes.lse
        self._kv_t = (work.keys_come + work.keys_stay) * counts.of_key if self._traded else self._kv
        self._rounds = self._in_rounds()
        partial = (
            ((self._rounds.held > 0).sum(1) > 0)
            if counts.strategy != "all_gather"
            else torch.zeros_like(rows)
        )
        self._several = partial.to(torch.bool)
        """Ranks that add up results of several rounds."""

    @property
    def _gathers(self) -> bool:
        return self._counts.strategy == "all_gather"

    def _in_rounds(self) -> _Rounds:
        counts, of_key = self._counts, self._counts.of_key
        if self._gathers:
            groups = counts.groups
            came, gone = (
                counts.by_rank(counts.arriving.sum(dim))[:, None] * of_key // groups for dim in (1, 0)
            )
            came, gone = came.expand(-1, groups), gone.expand(-1, groups)
            copied = gone if groups > 1 or self._sizes.batch > 1 else torch.zeros_like(gone)
            return _Rounds(came + (self._kv // groups)[:, None], came, gone, copied)
        came, gone = counts.by_rank(counts.came) * of_key, counts.by_rank(counts.gone) * of_key
        some = (gone < self._kv_t[:, None]) & (self._scattered or self._sizes.batch > 1)
        return _Rounds(came, came, gone, gone * some)

    @property
    def _share(self) -> Tensor:
        """Rows x heads of the largest piece, by those of all."""
        groups = self._counts.groups if self._gathers else 1
        return self._work.largest / self._work.entries.clamp(min=1) / groups

    def forward(self) -> Tensor:
        """Of a forward pass alone."""
        held = self._q + self._kv
        wide = torch.where(self._several, self._wide, 1)
        sums = self._out_t * wide + self._lse_t
        inputs = held + (self._q_t + self._kv_t if self._traded else 0)
        rounds = self._rounds
        alone = ~self._several & (self._work.shares == 1) & (self._share == 1)
        result = self._part(self._out_t + self._lse_t)
        # half types are summed in fp32, an eighth of the rows at a time
        result += torch.where(self._several & (self._wide > 1), result * self._wide // 8, 0)
        in_rounds = inputs + torch.where(alone, 0, sums) + result + (rounds.held + rounds.flight).amax(1)
        rounded = inputs + sums + torch.where(wide > 1, self._out_t, 0)
        return torch.stack([in_rounds, rounded, *self._forward_trades(held, inputs)]).amax(0)

    def _forward_trades(self, held: Tensor, inputs: Tensor) -> list[Tensor]:
        if not self._traded:
            return []
        work, of_key, sizes = self._work, self._counts.of_key, self._sizes
        row, back = sizes.qk_dim * sizes.entry, sizes.v_dim * sizes.entry + sizes.lse
        keys = (work.keys_leave + work.keys_come) * of_key
        joining = held + 2 * self._q_t + keys
        joining_keys = inputs + work.keys_come * of_key
        results = self._out_t + self._lse_t
        sent = inputs + results + work.rows_come * back + work.rows_leave * back
        placed = inputs + results + work.rows_leave * back + self._out + self._lse
        return [
            held + work.rows_leave * row + work.rows_come * row + keys,
            joining,
            joining_keys,
            sent,
            placed,
        ]

    def backward(self) -> Tensor:
        """Of a forward pass and the backward pass after it."""
        held = self._q + self._kv + 2 * self._out + self._lse
        if self._traded:
            held = held + self._q_t + self._kv_t + self._out_t + self._lse_t
        moments = [self.forward(), *self._in_backward(held), *self._backward_trades(held)]
        return torch.stack(moments).amax(0)

    def _in_backward(self, held: Tensor) -> list[Tensor]:
        """Round by round, and the sums rounded at the end."""
        rounds = self._rounds
        upstream = self._out_t if self._traded else 0
        begun = torch.arange(rounds.held.shape[1]) > 0
        dq = self._part(self._q_t)[:, None] * ((rounds.held > 0) | ~begun)
        # a piece gives the gradients of its keys as they are sent; those of several shares are added up first
        dkv = rounds.held.clone()
        if not self._gathers:
            dkv[:, 0] = self._kv_t
        dkv = dkv + torch.where(self._work.shares[:, None] > 1, dkv * self._wide, 0)
        returning = _previous(rounds.came + rounds.gone)
        dq_sum, dkv_sum = self._sums()
        sums = (dq_sum + dkv_sum)[:, None] * (begun | self._gathers)
        during = dq + dkv + sums + rounds.held + rounds.flight + returning
        rounded = torch.where(self._several & (self._wide > 1) & (not self._traded), self._q_t, 0)
        return [held + upstream + during.amax(1), held + dq_sum + dkv_sum + rounded]

    def _sums(self) -> tuple[Tensor, Tensor]:
        """Bytes of the sums of dq, and of dk and dv, at the end: as wide as the inputs where one piece is all."""
        one = ~self._several & (self._work.shares == 1) & (self._share == 1)
        one_key = (self._work.shares == 1) & (self._rounds.gone.sum(1) == 0) & (not self._gathers)
        return self._q_t * torch.where(one, 1, self._wide), self._kv_t * torch.where(one_key, 1, self._wide)

    def _backward_trades(self, held: Tensor) -> list[Tensor]:
        if not self._traded:
            return []
        work, of_key, sizes = self._work, self._counts.of_key, self._sizes
        row, back = sizes.qk_dim * sizes.entry, sizes.v_dim * sizes.entry
        dq_sum, dkv_sum = self._sums()
        keys = (work.keys_leave + work.keys_come) * of_key
        grads = held + 2 * self._out_t
        posted = held + dq_sum + dkv_sum + (work.rows_leave + work.rows_come) * row + keys
        placed = held + dq_sum + dkv_sum + work.rows_leave * row + self._q + keys
        kv = self._kv * (1 if self._disjoint else 1 + self._wide)
        placed_keys = held + self._q + dkv_sum + work.keys_leave * of_key + kv
        return [grads, held + (work.rows_leave + work.rows_come) * back, posted, placed, placed_keys]

    @property
    def _disjoint(self) -> bool:
        """Whether no key head is at two ranks."""
        return int(self._work.ranks.key_heads.sum()) == self._sizes.kv_heads

    def _part(self, whole: Tensor) -> Tensor:
        return (whole * self._share).to(torch.int64)


def _next(by_round: Tensor) -> Tensor:
    """What is of the next round; nothing after the last."""
    return torch.nn.functional.pad(by_round[:, 1:], (0, 1))


def _previous(by_round: Tensor) -> Tensor:
    return torch.nn.functional.pad(by_round[:, :-1], (1, 0))
