"""Dropout as a pure function of (seed, sequence, head, query position, key position), on integer tensors.

Philox4x32 with 7 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011). The key is
the seed (low and high 32 bits), the counter is (j // 8, i, h, b). Its four 32-bit words are eight 16-bit draws for the
keys 8 * (j // 8) .. + 7: word w serves keys 2w (low half) and 2w + 1 (high half). An entry is dropped if its draw is
below round(65536 p); survivors are scaled by 1 / (1 - round(65536 p) / 65536).

PyTorch has no unsigned 64-bit product, so a 32 x 32 -> 64 bit product is computed as two 16 x 32 bit products in int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from undivided.arguments.tensors import readable

ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def _product(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """(high, low) 32 bits of constant * word; word is int64 holding 32 bits."""
    high_half = (word >> 16) * constant
    low_half = (word & 0xFFFF) * constant
    high = (high_half + (low_half >> 16)) >> 16
    return high, (word * constant) & _LOW


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four 32-bit words for each counter, in int64 tensors of the counters' broadcast shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    words: tuple[Tensor, ...] = torch.broadcast_tensors(c0, c1, c2, c3)
    return words


def threshold(dropout_p: float) -> int:
    """Draws below this are dropped: round(65536 p)."""
    return round(65536 * dropout_p)


def survivor_scale(dropout_p: float) -> float:
    """The factor of the survivors; 0 if everything is dropped."""
    kept = 1 - threshold(dropout_p) / 65536
    return 1 / kept if kept > 0 else 0.0


def keep(
    seed: int | Tensor, sequence: Tensor, head: Tensor, q_position: Tensor, kv_position: Tensor, dropout_p: float
) -> Tensor:
    """Which entries survive: a boolean tensor of the arguments' broadcast shape.

    Args:
        seed: the key, an int or a 0-d int64 tensor.
        sequence, head, q_position, kv_position: integer tensors that broadcast against each other. kv_position may hold
            any keys in any order.
        dropout_p: probability of dropping, 0 to 1.
    """
    device = q_position.device
    seed_tensor = torch.as_tensor(seed, dtype=torch.int64, device=device)
    key = (seed_tensor & _LOW, (seed_tensor >> 32) & _LOW)
    j, i, h, b = (x.to(torch.int64) for x in (kv_position, q_position, head, sequence))
    counter = (i & _LOW, h & _LOW, b & _LOW)
    draws = _draws_by_group(j, counter, key) if readable(j) else None
    return (_draws(j, counter, key) if draws is None else draws) >= threshold(dropout_p)


def _draws(j: Tensor, counter: tuple[Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor:
    """The 16-bit draw of every entry, with one generator call each, so that no value is read from the device."""
    words = torch.stack(philox4x32((j // 8 & _LOW, *counter), key), dim=-1)
    which = (j % 8 // 2).expand(words.shape[:-1]).unsqueeze(-1)
    return (words.gather(-1, which).squeeze(-1) >> (j % 2 * 16)) & 0xFFFF


def _draws_by_group(j: Tensor, counter: tuple[Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Tensor | None:
    """The same with one generator call per eight keys; None if the keys on the last axis are too far apart."""
    if j.numel() == 0 or any(x.shape[-1:] not in ((), (1,)) for x in counter):
        return None
    first, last = int(j.min()) // 8, int(j.max()) // 8
    if last - first >= j.shape[-1]:
        return None
    groups = torch.arange(first, last + 1, device=j.device)
    words = torch.stack(philox4x32((groups & _LOW, *counter), key), dim=-1)
    draws = torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten(-3)  # eight per group, in the order of the keys
    index = j - 8 * first
    if index.numel() == index.shape[-1]:
        return draws.index_select(-1, index.flatten())
    shape = torch.broadcast_shapes((*draws.shape[:-1], 1), index.shape)
    return draws.expand(*shape[:-1], draws.shape[-1]).gather(-1, index.expand(shape))
