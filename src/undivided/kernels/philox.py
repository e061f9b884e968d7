"""Dropout as a pure function of (seed, sequence, head, query position, key position), on integer tensors.

Philox4x32 with 7 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; SC 2011). The key is the
seed (low and high 32 bits), the counter is (j // 8, i, h, b). Its four 32-bit words are eight 16-bit draws for the keys
8 * (j // 8) .. + 7: word w serves keys 2w (low half) and 2w + 1 (high half). An entry is dropped where
draw < round(65536 p); survivors are scaled by 1 / (1 - round(65536 p) / 65536).

Torch has no unsigned 64-bit product, so a 32 x 32 -> 64 bit product is put together from two of 16 x 32 bits in int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    """What survivors are multiplied by; 0 where nothing survives."""
    kept = 1 - threshold(dropout_p) / 65536
    return 1 / kept if kept > 0 else 0.0


def keep(
    seed: int | Tensor,
    sequence: Tensor,
    head: Tensor,
    q_position: Tensor,
    kv_position: Tensor,
    dropout_p: float,
) -> Tensor:
    """Which entries survive: a boolean tensor of the arguments' broadcast shape.

    Args:
        seed: the key, an int or a 0-d int64 tensor.
        sequence, head, q_position, kv_position: integer tensors that broadcast against each other. Every kv_position is
            computed on its own, so any set of keys may be asked for.
        dropout_p: probability of dropping, 0 to 1.
    """
    device = q_position.device
    seed_tensor = torch.as_tensor(seed, dtype=torch.int64, device=device)
    key = (seed_tensor & _LOW, (seed_tensor >> 32) & _LOW)
    j, i, h, b = (x.to(torch.int64) for x in (kv_position, q_position, head, sequence))
    words = torch.stack(philox4x32((j // 8 & _LOW, i & _LOW, h & _LOW, b & _LOW), key), dim=-1)
    which = (j % 8 // 2).expand(words.shape[:-1]).unsqueeze(-1)
    word = words.gather(-1, which).squeeze(-1)
    draw = (word >> (j % 2 * 16)) & 0xFFFF
    return draw >= threshold(dropout_p)
