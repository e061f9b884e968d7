"""Sequences of a cache start, end, fork and lose rejected tokens, each independently of the others."""

from __future__ import annotations

import pytest
import torch
from cache_steps import DIM, KINDS, KV_HEADS, VALUE_DIM, Kind, in_one_pass, new_cache, new_sequences, step

from undivided import InputError, PagedKVCache


@pytest.mark.parametrize("kind", KINDS)
def test_a_rejected_draft_leaves_no_trace(kind: str) -> None:
    """Speculative decoding: four draft tokens per step, of which some are kept."""
    sequences, cache = new_sequences((12, 12)), new_cache(kind, batch=2)
    step(cache, [[t[:5] for t in s] for s in sequences], Kind(None))
    draft = new_sequences((4, 4))
    for n in (1, 2):
        draft[0][n][:2], draft[1][n][:3] = sequences[0][n][5:7], sequences[1][n][5:8]
    outs = step(cache, draft, Kind(None))
    assert len(outs[0]) == 4
    cache.truncate([7, 8])
    outs = step(cache, [[t[7:] for t in sequences[0]], [t[8:] for t in sequences[1]]], Kind(None))
    for out, sequence, start in zip(outs, sequences, (7, 8), strict=True):
        torch.testing.assert_close(out, in_one_pass(sequence, Kind(None))[start:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_continues_independently(kind: str) -> None:
    """Three sequences are forks of the first, in the middle of a page; each continues with its own tokens."""
    cache, start = new_cache(kind), new_sequences((6,))[0]
    nothing = [t[:0] for t in start]
    step(cache, [start, nothing, nothing], Kind(None))
    cache.fork([0, 0], [1, 2])
    assert cache.lengths == (6, 6, 6)
    endings = new_sequences((1, 4, 5))
    outs = step(cache, endings, Kind(None))
    for out, ending in zip(outs, endings, strict=True):
        whole = [torch.cat([a, b]) for a, b in zip(start, ending, strict=True)]
        torch.testing.assert_close(out, in_one_pass(whole, Kind(None))[6:])


def test_forks_share_pages_until_one_is_written_to() -> None:
    cache, (sequence,) = new_cache("paged"), new_sequences((6,))
    nothing = [t[:0] for t in sequence]
    step(cache, [sequence, nothing, nothing], Kind(None))
    assert cache.free_pages == 10
    cache.fork([0, 0], [1, 2])
    assert cache.free_pages == 10
    assert cache.block_table.tolist() == [[0, 1]] * 3
    one = [t[:1] for t in sequence]
    step(cache, [nothing, one, nothing], Kind(None))  # only its partially filled page is copied
    assert cache.block_table.tolist() == [[0, 1], [0, 2], [0, 1]]
    step(cache, [one, one, one], Kind(None))  # of the two that still share it, only one copies it
    assert cache.block_table.tolist() == [[0, 3], [0, 2], [0, 1]]
    for n in range(3):
        cache.free(n)
    assert cache.free_pages == 12


@pytest.mark.parametrize("kind", KINDS)
def test_forks_at_once_permute(kind: str) -> None:
    """Beam search: every sequence becomes a copy of another one, in one call."""
    sequences, cache = new_sequences(), new_cache(kind)
    step(cache, [[t[:6] for t in s] for s in sequences], Kind(None))
    order = [2, 0, 1]
    cache.fork(order, [0, 1, 2])
    moved = [sequences[n] for n in order]
    outs = step(cache, [[t[6:8] for t in s] for s in moved], Kind(None))
    for out, sequence in zip(outs, moved, strict=True):
        torch.testing.assert_close(out, in_one_pass(sequence, Kind(None))[6:8])


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_end_and_others_start(kind: str) -> None:
    first, second, cache = new_sequences(), new_sequences((9,))[0], new_cache(kind)
    step(cache, first, Kind(None))
    cache.free(1)
    assert cache.lengths == (13, 0, 10)
    nothing = [t[:0] for t in second]
    out = step(cache, [nothing, second, nothing], Kind(None))[1]
    torch.testing.assert_close(out, in_one_pass(second, Kind(None)))


def test_more_sequences_than_pages_for_all() -> None:
    """Eight sequences share six pages: as many run as fit, and the next one starts when one has ended."""
    cache = PagedKVCache(6, 4, KV_HEADS, DIM, batch=8, value_dim=VALUE_DIM, dtype=torch.float32)
    waiting, done = dict(enumerate(new_sequences((8, 3, 7, 12, 4, 5, 8, 1)))), 0
    while waiting:
        for n, (q, k, v) in list(waiting.items()):
            tokens = [[t[:0] for t in (q, k, v)] if m != n else [q, k, v] for m in range(8)]
            if cache.free_pages * 4 < len(q):
                with pytest.raises(InputError, match=r"k must fit into the \d free pages of 6"):
                    step(cache, tokens, Kind(None))
                continue
            out = step(cache, tokens, Kind(None))[n]
            torch.testing.assert_close(out, in_one_pass([q, k, v], Kind(None)))
            del waiting[n]
            done += 1
        for n in range(8):
            cache.free(n)
    assert done == 8
    assert cache.free_pages == 6
