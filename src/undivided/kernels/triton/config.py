"""Tile sizes: one table per architecture, replaced by the sizes that `undivided tune` measured on this machine.

The rows of sm90 for 16-bit types were measured on an H100 (docs/decisions/2026-11-26-first-run-on-an-h100.md). The others
are derived from FlashAttention-2 (csrc/flash_attn, flash_fwd_launch_template.h and flash_bwd_launch_template.h) and
PyTorch's FlexAttention (torch/_inductor, template_heuristics/triton.py), restricted to sizes with which our kernels
compile without spills in the loop over full tiles, and with pipelined loads: bf16, causal, Triton 3.4 to 3.7 for sm80,
sm89, sm90, sm100 and sm120. `tests/support/gpus/triton_compile.py` prints registers, spills and shared memory;
docs/decisions/2026-11-21-triton-kernels.md has the results. Nothing is tuned automatically.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from undivided._files import read_json, replace_text, users_file


class Config(NamedTuple):
    """The tile sizes of a pass.

    block_m, block_n: rows and keys of a tile. warps: per program. stages: pipelined loads.
    descriptors: load the tiles of the loop by tensor descriptors (TMA), if their memory allows it.
    split_gradients: compute dk and dv in separate launches, so that a program has one accumulator and not two.
    specialise: run loads, products and softmax on separate warps (see `SPECIALISING`).
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    descriptors: bool = False
    split_gradients: bool = False
    specialise: bool = False


# (pass, bytes of an element, largest head size) -> tile sizes; 1 or 0.5 bytes: quantised keys, 16-bit queries. Passes of the
# backward: "rows" has block_m rows per program and loops over block_n keys at a time, "keys" has block_m keys and loops
# over block_n rows.
_TABLE: Mapping[tuple[str, float, int], Config] = {
    ("forward", 2, 64): Config(128, 64, 4, 3),
    ("forward", 2, 128): Config(128, 64, 8, 3),
    ("forward", 2, 256): Config(64, 64, 8, 2),
    ("forward", 4, 64): Config(64, 32, 8, 2),
    ("forward", 4, 128): Config(64, 16, 8, 2),
    ("forward", 4, 256): Config(32, 32, 8, 1),
    ("decode", 2, 64): Config(16, 128, 4, 3),
    ("decode", 2, 128): Config(16, 64, 4, 3),
    ("decode", 2, 256): Config(16, 32, 4, 2),
    ("decode", 1, 64): Config(16, 128, 4, 3),
    ("decode", 1, 128): Config(16, 64, 4, 3),
    ("decode", 1, 256): Config(16, 32, 4, 2),
    ("decode", 4, 64): Config(16, 64, 4, 2),
    ("decode", 4, 128): Config(16, 32, 8, 2),
    ("decode", 4, 256): Config(16, 16, 4, 2),
    ("rows", 2, 64): Config(128, 64, 8, 2),
    ("keys", 2, 64): Config(128, 32, 8, 2),
    ("rows", 2, 128): Config(64, 64, 8, 2),
    ("keys", 2, 128): Config(64, 64, 8, 2),
    ("rows", 2, 256): Config(64, 32, 8, 2),
    ("keys", 2, 256): Config(64, 32, 8, 2, split_gradients=True),
    ("rows", 4, 64): Config(32, 32, 8, 1),
    ("keys", 4, 64): Config(32, 32, 8, 1),
    ("rows", 4, 128): Config(32, 16, 8, 1),
    ("keys", 4, 128): Config(32, 16, 8, 1),
    ("rows", 4, 256): Config(16, 16, 4, 1),
    ("keys", 4, 256): Config(16, 16, 4, 1),
    # large heads are contracted in steps, and what does not fit into registers is loaded again for every tile
    ("forward", 2, 512): Config(64, 32, 4, 2),
    ("forward", 4, 512): Config(32, 32, 4, 1),
    ("decode", 2, 512): Config(16, 32, 4, 2),
    ("decode", 1, 512): Config(16, 32, 4, 2),
    ("decode", 4, 512): Config(16, 16, 4, 1),
    ("rows", 2, 512): Config(32, 32, 4, 1),
    ("keys", 2, 512): Config(32, 32, 4, 1),
    ("rows", 4, 512): Config(16, 16, 4, 1),
    ("keys", 4, 512): Config(16, 16, 4, 1),
}

_HOPPER: Mapping[tuple[str, float, int], Config] = {
    # 64 rows per group of 4 warps, for wgmma; keys and values by TMA, which needs no registers for addresses. Two or
    # three programs of 4 warps share a processor: one multiplies while another computes exponentials
    ("forward", 2, 64): Config(64, 128, 4, 2, True),
    ("forward", 2, 128): Config(64, 64, 4, 3, True),
    ("forward", 2, 256): Config(128, 64, 8, 2, True),
    ("rows", 2, 64): Config(64, 128, 4, 3, True),
    ("rows", 2, 128): Config(128, 64, 8, 3, True),
    ("rows", 2, 256): Config(64, 32, 4, 3, True),
    ("keys", 2, 64): Config(64, 128, 4, 2, True),
    ("keys", 2, 128): Config(64, 64, 4, 2, True),
    ("keys", 2, 256): Config(128, 32, 8, 2, True, split_gradients=True),
    # without TMA: a descriptor takes the host longer than it saves the GPU (3 % of a single sequence)
    ("decode", 2, 64): Config(16, 128, 4, 3),
    ("decode", 2, 128): Config(16, 64, 4, 3),
    ("decode", 2, 256): Config(16, 32, 4, 3, True),
    # measured on an H200: 8 bits with 2 warps (int8 .91 of 4 warps with 128 keys), int4 with 1 (.84 of 2), latents with 3
    # stages (.75 of 2)
    ("decode", 1, 128): Config(16, 64, 2, 3),
    ("decode", 0.5, 128): Config(16, 32, 1, 3),
    ("decode", 2, 512): Config(16, 32, 4, 3),
}

_BLACKWELL: Mapping[tuple[str, float, int], Config] = {
    # accumulators are in tensor memory: 128 rows, or 64 if shared memory is too small
    ("forward", 2, 64): Config(128, 64, 4, 3, True),
    ("forward", 2, 128): Config(128, 64, 8, 3, True),
    ("forward", 2, 256): Config(64, 64, 8, 2, True),
    ("rows", 2, 64): Config(128, 64, 8, 2, True),
    ("rows", 2, 128): Config(128, 64, 8, 2, True),
    ("rows", 2, 256): Config(64, 32, 8, 2, True),
    ("keys", 2, 64): Config(128, 64, 8, 2, True),
    ("keys", 2, 128): Config(64, 64, 8, 2, True),
    ("keys", 2, 256): Config(64, 32, 8, 2, True, split_gradients=True),
    ("decode", 2, 64): Config(16, 128, 4, 3, True),
    ("decode", 2, 128): Config(16, 64, 4, 3, True),
    ("decode", 2, 256): Config(16, 32, 4, 2, True),
}

_BY_ARCHITECTURE = {"sm90": _HOPPER, "sm100": _BLACKWELL, "sm103": _BLACKWELL}
"""Architectures with a table of their own; `_TABLE` has the passes that it lacks."""

_LITTLE_SHARED = frozenset({"sm86", "sm87", "sm89", "sm120", "sm121"})
"""99 KiB of shared memory per program instead of 163 or more (CUDA programming guide, compute capabilities): one stage
less for head sizes above 128; smaller heads fit."""

WIDTHS = (64, 128, 256, 512)
"""The tables have an entry for head sizes up to each of these; the last also serves larger heads."""
WIDEST = 256
"""Head sizes up to this are contracted in one step, larger ones STEP columns at a time."""
WIDEST_DECODING = 512
"""As WIDEST, for 16-bit types in decoding, whose tiles have few rows."""
STEP = 128

MAX_DECODE_ROWS = 64
"""Rows of a block of decoding, at most."""
_WIDE_ROWS = {"sm90": Config(64, 32, 8, 3)}
"""Tiles of decoding for many rows of heads above `WIDEST`. On an H200 128 heads of latents, two blocks of 64 rows, took 654
us, and eight blocks of 16 took 990: so 32 rows stay two blocks of 16. Other architectures were not measured."""
MAX_KEYS_WITH_TERMS = 32
"""Keys per iteration, at most (rows in the pass over keys), if a pair has more values: dropout, a bias or a dense mask."""
ROWS_PER_WARP = 16
"""Rows of a warp in such problems, at most: with as many, nothing spills on sm80 and sm90; with fewer, warps compute the
same rows twice."""

CANDIDATES = tuple(
    Config(m, n, warps, stages, descriptors)
    for m in (16, 32, 64, 128)
    for n in (16, 32, 64, 128)
    for warps in (4, 8)
    for stages in (1, 2, 3, 4)
    for descriptors in (False, True)
    if not descriptors or (m >= 64 and n >= 32)
)
"""The tile sizes that `undivided tune` tries for every pass; TMA does not pay off for small tiles."""

SPECIALISING = frozenset({"sm100", "sm103"})
"""Architectures on which Triton 3.4 to 3.7 can specialise the warps of our loops (`tl.range(warp_specialize=True)`).
Its pass for Hopper supports one loop per kernel, and ours have two (docs/decisions/2026-11-21-triton-kernels.md)."""

INTERPRETED = Config(32, 32, 1, 1)
"""The tile sizes under Triton's interpreter: small, so that short test sequences have several tiles."""


def column_step(dim: int) -> int:
    """Columns of a head that are loaded at once: a power of two, as Triton requires."""
    return STEP if dim > WIDEST else max(16, 1 << (dim - 1).bit_length())


class Steps(NamedTuple):
    """Columns that a forward loads at once: of q and k first, of q and k thereafter, and of v per program."""

    first: int
    more: int
    values: int


def column_steps(qk_dim: int, v_dim: int, decoding: bool) -> Steps:
    """The steps of a forward.

    Args:
        qk_dim, v_dim: head sizes.
        decoding: the tiles have few rows, of numbers of 16 bits. If one program has all columns of v, keys are read once,
            and not once for each step of v.

    >>> column_steps(576, 512, decoding=True)
    Steps(first=512, more=64, values=512)
    """
    first, values = column_step(qk_dim), column_step(v_dim)
    more = first
    if decoding and qk_dim > WIDEST:
        first = min(1 << qk_dim.bit_length() - 1, WIDEST_DECODING)
        more = column_step(min(qk_dim - first, STEP))
    if decoding and WIDEST < v_dim <= WIDEST_DECODING:
        values = WIDEST_DECODING
    return Steps(first, more, values)


def is_interpreted() -> bool:
    """Whether kernels run under Triton's interpreter, on the CPU: set before Triton is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def config(name: str, itemsize: float, dim: int, architecture: str) -> Config:
    """The tile sizes of a pass ("forward", "decode", "rows", "keys") for a head size and an architecture ("sm90",
    "gfx942")."""
    if name in _trials:
        return _trials[name]
    if is_interpreted():
        return INTERPRETED
    width = next(width for width in WIDTHS if dim <= width or width == WIDTHS[-1])
    tuned = _tuned(tuned_path()).get(_key(architecture, name, itemsize, width))
    if tuned is not None:
        return tuned
    of_architecture = _BY_ARCHITECTURE.get(architecture, {})
    key = (name, itemsize, width)
    if itemsize < 1 and key not in of_architecture:
        key = (name, 1, width)  # few tables have rows for int4
    tile = of_architecture.get(key) or _TABLE[key]
    if architecture in _LITTLE_SHARED and width >= WIDEST:
        tile = tile._replace(stages=max(tile.stages - 1, 1))
    return tile


def with_fewer_pairs(tile: Config) -> Config:
    """Tile sizes with fewer pairs per thread, for problems with more values per pair, which would spill otherwise."""
    if tile.block_m < 64:
        return tile
    return tile._replace(
        block_n=min(tile.block_n, MAX_KEYS_WITH_TERMS), warps=max(tile.warps, tile.block_m // ROWS_PER_WARP)
    )


def for_rows(tile: Config, rows: int, dim: int, architecture: str) -> Config:
    """Tile sizes of decoding for so many rows per key/value head, which one block has if it can: each block of rows
    reads the keys again.

    >>> for_rows(Config(16, 64, 4, 3), rows=20, dim=128, architecture="sm90").block_m
    32
    """
    if architecture.startswith("gfx"):  # not measured, and with less shared memory
        return tile
    if dim > WIDEST:
        return _WIDE_ROWS.get(architecture, tile) if rows > 2 * tile.block_m and "decode" not in _trials else tile
    return tile._replace(block_m=max(tile.block_m, min(MAX_DECODE_ROWS, 1 << (rows - 1).bit_length())))


def candidates(name: str, architecture: str) -> tuple[Config, ...]:
    """The tile sizes that `undivided tune` tries for a pass."""
    tiles = CANDIDATES
    if name == "decode":
        few_rows = (tile for tile in CANDIDATES if tile.block_m == 16 and tile.block_n >= 32)
        tiles += tuple(tile._replace(descriptors=True) for tile in few_rows)
    if name == "keys":
        tiles += tuple(tile._replace(split_gradients=True) for tile in CANDIDATES if tile.block_m >= 64)
    if name in ("forward", "rows") and architecture in SPECIALISING:
        tiles += tuple(tile._replace(specialise=True) for tile in CANDIDATES if tile.descriptors)
    return tiles


_trials: dict[str, Config] = {}
_changes = 0
"""How often `_trials` or the file of tile sizes changed in this process."""


def revision() -> tuple[int, str | None]:
    """What differs once `config` may choose other tile sizes."""
    return _changes, os.environ.get("UNDIVIDED_TUNED")


def _changed() -> None:
    global _changes
    _changes += 1


@contextmanager
def trial(name: str, tile: Config) -> Iterator[None]:
    """In the ``with`` block this pass runs with these tile sizes, to measure them."""
    _trials[name] = tile
    _changed()
    try:
        yield
    finally:
        del _trials[name]
        _changed()


def _key(architecture: str, name: str, itemsize: float, width: int) -> str:
    return f"{architecture}/{name}/{8 * itemsize:g}/{width}"


def tuned_path() -> Path:
    """The file that `undivided tune` writes and `config` reads: UNDIVIDED_TUNED, or one in the user's cache folder."""
    return users_file("UNDIVIDED_TUNED", "triton-tiles.json")


def _checked(tile: Config) -> Config:
    numbers, switches = tile[:4], tile[4:]
    if not all(type(n) is int and 0 < n <= 1024 for n in numbers) or not all(type(s) is bool for s in switches):
        raise ValueError(f"{list(tile)} are not tile sizes")
    return tile


@functools.cache
def _tuned(path: Path) -> Mapping[str, Config]:
    try:
        return {key: _checked(Config(*value)) for key, value in read_json(path)["tiles"].items()}
    except FileNotFoundError:  # nothing was tuned yet
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())
        warnings.warn(
            f"the tile sizes of `undivided tune` in {path} cannot be read ({why}); the package's own are used",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}


def remember(architecture: str, measured: Mapping[tuple[str, int, int], Config], path: Path | None = None) -> Path:
    """Add measured tile sizes to the file, and return its path; later calls use them.

    Args:
        measured: (pass, bytes of an element, largest head size) -> tile sizes.
    """
    path = path or tuned_path()
    tiles = {key: list(value) for key, value in _tuned(path).items()}
    for (name, itemsize, width), tile in measured.items():
        tiles[_key(architecture, name, itemsize, width)] = list(tile)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps({"tiles": tiles}, indent=1) + "\n")
    _tuned.cache_clear()
    _changed()
    return path
