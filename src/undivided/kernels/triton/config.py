"""Tile sizes: one frozen table an architecture, and what `undivided tune` has measured on this machine in its place.

Nothing in the tables was measured by this project yet. They begin with what FlashAttention-2 (csrc/flash_attn,
flash_fwd_launch_template.h and flash_bwd_launch_template.h) and PyTorch's FlexAttention (torch/_inductor,
template_heuristics/triton.py) use for the same work, and keep of these what our kernels compile to without spilling in
the loop over whole tiles, and with loads in flight: bf16, causal, Triton 3.4 to 3.7 for sm80, sm89, sm90, sm100 and
sm120 (`tests/support/triton_compile.py` prints registers, spills and shared memory; docs/decisions/2026-11-21-triton-kernels.md
says what it showed). `undivided tune` measures on yours; nothing is tuned at a first call.
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

from undivided._files import users_file


class Config(NamedTuple):
    """Rows and keys of a tile, warps of a program, loads in flight; whether what is visited is read by tensor
    descriptors (Hopper's copy engine, TMA) where its memory allows it; whether dk and dv have a launch of their own
    each, so that a program holds one of the two sums; whether loads, products and softmax have warps of their own (see
    `SPECIALISING`)."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    descriptors: bool = False
    apart: bool = False
    specialise: bool = False


# (pass, bytes of an element, largest head size up to) -> tiles. The passes of the backward: "rows" keeps block_m rows
# and visits block_n keys at a time, "keys" keeps block_m keys and visits block_n rows.
_TABLE: Mapping[tuple[str, int, int], Config] = {
    ("forward", 2, 64): Config(128, 64, 4, 3),
    ("forward", 2, 128): Config(128, 64, 8, 3),
    ("forward", 2, 256): Config(64, 64, 8, 2),
    ("forward", 4, 64): Config(64, 32, 8, 2),
    ("forward", 4, 128): Config(64, 16, 8, 2),
    ("forward", 4, 256): Config(32, 32, 8, 1),
    ("decode", 2, 64): Config(16, 128, 4, 3),
    ("decode", 2, 128): Config(16, 64, 4, 3),
    ("decode", 2, 256): Config(16, 32, 4, 2),
    ("decode", 4, 64): Config(16, 64, 4, 2),
    ("decode", 4, 128): Config(16, 32, 8, 2),
    ("decode", 4, 256): Config(16, 16, 4, 2),
    ("rows", 2, 64): Config(128, 64, 8, 2),
    ("keys", 2, 64): Config(128, 32, 8, 2),
    ("rows", 2, 128): Config(64, 64, 8, 2),
    ("keys", 2, 128): Config(64, 64, 8, 2),
    ("rows", 2, 256): Config(64, 32, 8, 2),
    ("keys", 2, 256): Config(64, 32, 8, 2, apart=True),
    ("rows", 4, 64): Config(32, 32, 8, 1),
    ("keys", 4, 64): Config(32, 32, 8, 1),
    ("rows", 4, 128): Config(32, 16, 8, 1),
    ("keys", 4, 128): Config(32, 16, 8, 1),
    ("rows", 4, 256): Config(16, 16, 4, 1),
    ("keys", 4, 256): Config(16, 16, 4, 1),
    # heads contracted in steps: what is not held in registers is read again for every tile
    ("forward", 2, 512): Config(64, 32, 4, 2),
    ("forward", 4, 512): Config(32, 32, 4, 1),
    ("decode", 2, 512): Config(16, 32, 4, 2),
    ("decode", 4, 512): Config(16, 16, 4, 1),
    ("rows", 2, 512): Config(32, 32, 4, 1),
    ("keys", 2, 512): Config(32, 32, 4, 1),
    ("rows", 4, 512): Config(16, 16, 4, 1),
    ("keys", 4, 512): Config(16, 16, 4, 1),
}

_HOPPER: Mapping[tuple[str, int, int], Config] = {
    # 64 rows a group of 4 warps, as wgmma takes them; keys and values by the copy engine, whose addresses cost no
    # registers
    ("forward", 2, 64): Config(128, 64, 4, 3, True),
    ("forward", 2, 128): Config(128, 128, 8, 2, True),
    ("forward", 2, 256): Config(128, 64, 8, 2, True),
    ("rows", 2, 64): Config(128, 64, 8, 2, True),
    ("rows", 2, 128): Config(128, 64, 8, 2, True),
    ("rows", 2, 256): Config(128, 32, 8, 2, True),
    ("keys", 2, 64): Config(128, 64, 8, 2, True),
    ("keys", 2, 128): Config(128, 64, 8, 2, True),
    ("keys", 2, 256): Config(128, 32, 8, 2, True, apart=True),
    ("decode", 2, 64): Config(16, 128, 4, 3, True),
    ("decode", 2, 128): Config(16, 64, 4, 3, True),
    ("decode", 2, 256): Config(16, 32, 4, 3, True),
}

_BLACKWELL: Mapping[tuple[str, int, int], Config] = {
    # sums in tensor memory: 128 rows, or 64 where shared memory holds no more
    ("forward", 2, 64): Config(128, 64, 4, 3, True),
    ("forward", 2, 128): Config(128, 64, 8, 3, True),
    ("forward", 2, 256): Config(64, 64, 8, 2, True),
    ("rows", 2, 64): Config(128, 64, 8, 2, True),
    ("rows", 2, 128): Config(128, 64, 8, 2, True),
    ("rows", 2, 256): Config(64, 32, 8, 2, True),
    ("keys", 2, 64): Config(128, 64, 8, 2, True),
    ("keys", 2, 128): Config(64, 64, 8, 2, True),
    ("keys", 2, 256): Config(64, 32, 8, 2, True, apart=True),
    ("decode", 2, 64): Config(16, 128, 4, 3, True),
    ("decode", 2, 128): Config(16, 64, 4, 3, True),
    ("decode", 2, 256): Config(16, 32, 4, 2, True),
}

_OWN = {"sm90": _HOPPER, "sm100": _BLACKWELL, "sm103": _BLACKWELL}
"""Architectures with rows of their own."""

_LITTLE_SHARED = frozenset({"sm86", "sm87", "sm89", "sm120", "sm121"})
"""99 KiB of shared memory a program instead of 163 and more (CUDA programming guide, compute capabilities): a load less
in flight for head sizes above 128; what serves smaller ones fits."""

WIDTHS = (64, 128, 256, 512)
"""Head sizes up to each have tiles of their own; the last stands for all that are larger."""
WIDEST = 256
"""Head sizes up to here are one step; larger ones are contracted STEP columns at a time."""
STEP = 128

LIGHT = 32
"""Keys (or rows) visited at once under dropout, a bias or a dense mask; with 8 warps nothing spills on sm80 and
sm90."""

CANDIDATES = tuple(
    Config(m, n, warps, stages, descriptors)
    for m in (16, 32, 64, 128)
    for n in (16, 32, 64, 128)
    for warps in (4, 8)
    for stages in (1, 2, 3, 4)
    for descriptors in (False, True)
    if not descriptors or (m >= 64 and n >= 32)
)
"""What `undivided tune` tries for every pass; small tiles are not worth the copy engine."""

SPECIALISING = frozenset({"sm100", "sm103"})
"""Where Triton 3.4 to 3.7 gives loads, products and softmax of our loops warps of their own
(`tl.range(warp_specialize=True)`). Its pass for Hopper takes one loop a kernel, ours have two
(docs/decisions/2026-11-21-triton-kernels.md)."""

INTERPRETED = Config(32, 32, 1, 1)
"""Under Triton's interpreter, where only the numbers matter: small, so that short sequences have several tiles."""


def step_of(dim: int) -> int:
    """Columns of a head held at once: a power of two, as Triton's tiles are."""
    return STEP if dim > WIDEST else max(16, 1 << (dim - 1).bit_length())


def is_interpreted() -> bool:
    """Whether kernels run under Triton's interpreter, on the CPU: set before Triton is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def config(name: str, itemsize: int, dim: int, architecture: str) -> Config:
    """Tiles of a pass ("forward", "decode", "rows", "keys") for this head size on this architecture ("sm90",
    "gfx942")."""
    if name in _trials:
        return _trials[name]
    if is_interpreted():
        return INTERPRETED
    width = next(width for width in WIDTHS if dim <= width or width == WIDTHS[-1])
    tuned = _tuned(tuned_path()).get(_key(architecture, name, itemsize, width))
    if tuned is not None:
        return tuned
    found = _TABLE[name, itemsize, width]
    found = _OWN.get(architecture, {}).get((name, itemsize, width), found)
    if architecture in _LITTLE_SHARED and width >= WIDEST:
        found = found._replace(stages=max(found.stages - 1, 1))
    return found


def lighter(tile: Config) -> Config:
    """These tiles for problems with more to work out for each pair, which would spill: fewer pairs a thread."""
    if tile.block_m < 64:
        return tile
    return tile._replace(block_n=min(tile.block_n, LIGHT), warps=8)


def candidates(name: str, architecture: str) -> tuple[Config, ...]:
    """What `undivided tune` tries for a pass."""
    found = CANDIDATES
    if name == "decode":
        few = (one for one in CANDIDATES if one.block_m == 16 and one.block_n >= 32)
        found += tuple(one._replace(descriptors=True) for one in few)
    if name == "keys":
        found += tuple(one._replace(apart=True) for one in CANDIDATES if one.block_m >= 64)
    if name in ("forward", "rows") and architecture in SPECIALISING:
        found += tuple(one._replace(specialise=True) for one in CANDIDATES if one.descriptors)
    return found


_trials: dict[str, Config] = {}


@contextmanager
def trial(name: str, tile: Config) -> Iterator[None]:
    """Inside the block this pass runs with these tiles: for measuring them."""
    _trials[name] = tile
    try:
        yield
    finally:
        del _trials[name]


def _key(architecture: str, name: str, itemsize: int, width: int) -> str:
    return f"{architecture}/{name}/{8 * itemsize}/{width}"


def tuned_path() -> Path:
    """Where `undivided tune` writes and `config` reads: UNDIVIDED_TUNED, or a file in the user's cache folder."""
    return users_file("UNDIVIDED_TUNED", "triton-tiles.json")


@functools.cache
def _tuned(path: Path) -> Mapping[str, Config]:
    try:
        return {key: Config(*value) for key, value in json.loads(path.read_text())["tiles"].items()}
    except FileNotFoundError:  # nothing was tuned yet
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())
        warnings.warn(
            f"no tiles of `undivided tune` in {path} ({why}); the package's own are used", RuntimeWarning, stacklevel=2
        )
        return {}


def remember(architecture: str, found: Mapping[tuple[str, int, int], Config], path: Path | None = None) -> Path:
    """Write measured tiles beside those of other architectures; calls from now on use them.

    Args:
        found: (pass, bytes of an element, head size up to) -> tiles.
    """
    path = path or tuned_path()
    tiles = {key: list(value) for key, value in _tuned(path).items()}
    for (name, itemsize, width), tile in found.items():
        tiles[_key(architecture, name, itemsize, width)] = list(tile)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"tiles": tiles}, indent=1) + "\n")
    fresh.replace(path)
    _tuned.cache_clear()
    return path
