"""The most that a rank holds at one time, moment by moment as a run goes through them.

What is counted are the tensors of a call: the caller's q, k, v and output (and their gradients), what was traded, keys
that are being used and on their way, sums, and what a kernel gives back. Not counted are a kernel's own scratch and the
mask with its schedule, which all layers share. Keys that are a run of a rank's own are sent without a copy; that they
are is taken for granted unless they are of several documents.

Legend: W ranks, T rounds; everything is bytes, int64 [W] or [W, T].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from undivided.context_parallel.plan.counts import Counts


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
        rows, keys = (torch.tensor([part.numel() for part in parts]) for parts in (work.ranks.rows, work.ranks.keys))
        self._wide = sizes.lse // sizes.entry
        """Bytes of an entry that is summed, by those of an entry of the inputs."""
        self._traded = work.ranks.members > 1
        entry, heads = sizes.entry, rows * sizes.heads
        self._q, self._out, self._lse = (heads * sizes.qk_dim * entry, heads * sizes.v_dim * entry, heads * sizes.lse)
        self._q_t, self._out_t = work.entries * sizes.qk_dim * entry, work.entries * sizes.v_dim * entry
        self._lse_t = work.entries * sizes.lse
        self._kv = keys * sizes.kv_heads * counts.of_key
        self._kv_t = (work.keys_come + work.keys_stay) * counts.of_key if self._traded else self._kv
        """With _t: of what this rank computes, which is what it has unless rows were traded for heads."""
        self._rounds = self._in_rounds()
        self._several = (self._rounds.held > 0).any(1) & (not self._gathers)
        """Ranks that add up results of several rounds."""
        self._alone = ~self._several & (work.shares == 1) & (self._share == 1)
        """Ranks of one piece, whose results are taken as they are."""

    @property
    def _gathers(self) -> bool:
        return self._counts.strategy == "all_gather"

    def _in_rounds(self) -> _Rounds:
        counts, of_key = self._counts, self._counts.of_key
        if self._gathers:
            groups = counts.groups
            came, gone = (counts.by_rank(counts.arriving.sum(dim))[:, None] * of_key // groups for dim in (1, 0))
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
        return torch.stack(list(self._forward_moments().values())).amax(0)

    def backward(self) -> Tensor:
        """Of a forward pass and the backward pass after it."""
        held = self._q + self._kv + 2 * self._out + self._lse
        if self._traded:
            held = held + self._q_t + self._kv_t + self._out_t + self._lse_t
        moments = self._in_backward(held) | (self._backward_trades(held) if self._traded else {})
        return torch.stack([self.forward(), *moments.values()]).amax(0)

    def _forward_moments(self) -> dict[str, Tensor]:
        rounds, held = self._rounds, self._q + self._kv
        inputs = held + (self._q_t + self._kv_t if self._traded else 0)
        sums = self._out_t * torch.where(self._several, self._wide, 1) + self._lse_t
        rounds_sums = self._several & (self._wide > 1)
        result = self._part(self._out_t + self._lse_t)
        # half types are summed in fp32, an eighth of the rows at a time
        result += torch.where(rounds_sums, result * self._wide // 8, 0)
        moments = {
            "a round": inputs + torch.where(self._alone, 0, sums) + result + (rounds.held + rounds.flight).amax(1),
            "sums rounded": inputs + sums + torch.where(rounds_sums, self._out_t, 0),
        }
        return moments | (self._forward_trades(held, inputs) if self._traded else {})

    def _forward_trades(self, held: Tensor, inputs: Tensor) -> dict[str, Tensor]:
        work, of_key, sizes = self._work, self._counts.of_key, self._sizes
        row, back = sizes.qk_dim * sizes.entry, sizes.v_dim * sizes.entry + sizes.lse
        keys, results = (work.keys_leave + work.keys_come) * of_key, self._out_t + self._lse_t
        return {
            "rows and keys on their way": held + (work.rows_leave + work.rows_come) * row + keys,
            "rows joined": held + 2 * self._q_t + keys,
            "keys joined": inputs + work.keys_come * of_key,
            "results on their way": inputs + results + (work.rows_come + work.rows_leave) * back,
            "results placed": inputs + results + work.rows_leave * back + self._out + self._lse,
        }

    def _in_backward(self, held: Tensor) -> dict[str, Tensor]:
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
        return {"a round": held + upstream + during.amax(1), "sums rounded": held + dq_sum + dkv_sum + rounded}

    def _sums(self) -> tuple[Tensor, Tensor]:
        """Bytes of the sums of dq, and of dk and dv, at the end: as wide as the inputs where one piece is all."""
        one_key = (self._work.shares == 1) & (self._rounds.gone.sum(1) == 0) & (not self._gathers)
        return self._q_t * torch.where(self._alone, 1, self._wide), self._kv_t * torch.where(one_key, 1, self._wide)

    def _backward_trades(self, held: Tensor) -> dict[str, Tensor]:
        work, of_key, sizes = self._work, self._counts.of_key, self._sizes
        row, back = sizes.qk_dim * sizes.entry, sizes.v_dim * sizes.entry
        dq_sum, dkv_sum = self._sums()
        keys = (work.keys_leave + work.keys_come) * of_key
        kv = self._kv * (1 if self._disjoint else 1 + self._wide)
        return {
            "gradients of the output on their way": held + (work.rows_leave + work.rows_come) * back,
            "and joined": held + 2 * self._out_t,
            "gradients on their way": held + dq_sum + dkv_sum + (work.rows_leave + work.rows_come) * row + keys,
            "of queries placed": held + dq_sum + dkv_sum + work.rows_leave * row + self._q + keys,
            "of keys placed": held + self._q + dkv_sum + work.keys_leave * of_key + kv,
        }

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
