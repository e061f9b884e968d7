"""Mask expressions for tests: every constructor, alone and nested, with odd and unequal lengths and empty rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from undivided.cli._mask_words import parse
from undivided.masks._drawing import natural_sizes


class Sized(NamedTuple):
    """An expression, and the sizes of its call."""

    text: str
    q_len: int
    kv_len: int


FIXED = (
    Sized("causal()", 5, 5),
    Sized("causal", 1, 1),
    Sized("causal('top_left')", 7, 3),
    Sized("causal(align='bottom_right')", 7, 3),
    Sized('causal(align="bottom_right")', 3, 11),
    Sized("window(None, None)", 4, 9),
    Sized("window(-1, 0)", 6, 6),
    Sized("window(0, 0, 'bottom_right')", 9, 2),
    Sized("window(2, None, align='top_left')", 3, 9),
    Sized("window(3_000_000_000, 1)", 5, 5),
    Sized("window(0x2, 0b1)", 5, 5),
    Sized("lengths([5])", 5, 7),
    Sized("lengths([0])", 3, 3),
    Sized("lengths([3], [2], kv_start=[1], q_start=[4])", 7, 5),
    Sized("lengths(kv=[2, 5], q=[2, 5]) & causal()", 5, 5),
    Sized("documents([0], total_q=3)", 3, 3),
    Sized("documents([0, 3, 3, 10]) & causal()", 10, 10),
    Sized("documents([0, 2, 5], [0, 4, 9]) & causal('bottom_right')", 5, 9),
    Sized("documents([0, 1, 3], padded_q=[0, 2, 4])", 4, 4),
    Sized("documents([0, 2, 3], total_q=5, max_q=2) & window(1, 0)", 5, 5),
    Sized("documents((0, 2, 3), None, None, [0, 4, 9], total_q=7, total_kv=9)", 7, 9),
    Sized("document_ids([7, 7, -1, 3])", 4, 4),
    Sized("document_ids([0, 1, 0, 1, 2], ids_kv=[1, 0, 0, 5, 1, 1, -1])", 5, 7),
    Sized("document_ids([0, 0, 1], [0, 1, 1, 0]) & causal('bottom_right')", 3, 4),
    Sized("prefix(2)", 3, 5),
    Sized("prefix(0)", 3, 5),
    Sized("prefix([1, 3]) & documents([0, 2, 7])", 7, 7),
    Sized("sinks(2)", 5, 5),
    Sized("sinks(2, 'bottom_right')", 3, 7),
    Sized("window(1, 0) | sinks(2)", 9, 9),
    Sized("sinks(3, align='bottom_right') | window(1, 1)", 9, 4),
    Sized("causal() | prefix(4)", 5, 5),
    Sized("causal() | sinks(2)", 5, 5),
    Sized("window(None, None) | prefix(1)", 2, 3),
    Sized("(window(2, 0) | sinks(1)) & (causal() | prefix(3))", 8, 8),
    Sized("(window(1, 0) | prefix([1, 2, 0])) & documents([0, 4, 9, 12]) & chunks(3)", 12, 12),
    Sized("chunks(3)", 10, 10),
    Sized("chunks(3, align='bottom_right')", 2, 9),
    Sized("chunks(4, 'top_left', offset=3)", 5, 9),
    Sized("chunks(4, 'bottom_right', [-2]) & causal()", 5, 9),
    Sized("dense([[True, False, True], [0, 0, 0]])", 2, 3),
    Sized("dense([[1, 0, 1, 1]]) & causal()", 4, 4),
    Sized("dense([[1], [0], [1]]) & prefix(2)", 3, 5),
    Sized("predicate(lambda b, h, q, k: (q + k) % 2 == 0)", 3, 5),
    Sized("predicate(lambda b, h, i, j: (i // 2 >= j - 1) & ~(j % 3 == 1)) & causal()", 7, 7),
    Sized("predicate(fn=lambda b, h, q, k: (q - k < -2 + 1) | (q * 2 == k) ^ (b != 0))", 5, 8),
    Sized(" ( causal() ) & ( lengths( [ 4 , ] , [4] ) ) ", 6, 6),
    Sized("causal() # the past", 3, 3),
    Sized("window(\n  1,\n  0,\n)", 4, 4),
    Sized("chunks(size=+2, align='top_' 'left')", 5, 3),
)
"""Expressions with a purpose of their own; the first batch element is compared."""


def generated(count: int, seed: int = 0) -> list[Sized]:
    """Random intersections and unions, with odd lengths."""
    draw = random.Random(seed)
    return [_expression(draw) for _ in range(count)]


def _expression(draw: random.Random) -> Sized:
    q_len, kv_len = draw.choice([1, 3, 7, 13, 17, 31]), draw.choice([1, 2, 5, 13, 19, 33])
    align = draw.choice(["top_left", "bottom_right"])
    parts = [_part(draw, align) for _ in range(draw.randint(0, 2))]
    sequences = draw.choice([_lengths, _documents, _ids, None])
    if sequences is not None:
        parts.append(sequences(draw, q_len, kv_len))
    parts.append(
        f"causal(align={align!r})" if draw.random() < 0.5 else f"window({_side(draw)}, {_side(draw)}, {align!r})"
    )
    draw.shuffle(parts)
    text = parts[0]
    for part in parts[1:]:
        text = f"{text} & {part}" if draw.random() < 0.7 else f"({text}) & ({part})"
    return Sized(text, q_len, kv_len)


def _part(draw: random.Random, align: str) -> str:
    makers: list[Callable[[], str]] = [
        lambda: f"prefix({draw.randint(0, 9)})",
        lambda: f"sinks({draw.randint(0, 5)}, align={align!r})",
        lambda: f"chunks({draw.randint(1, 6)}, {align!r})",
        lambda: f"chunks({draw.randint(1, 6)}, align={align!r}, offset={draw.randint(-4, 9)})",
        lambda: f"(window({draw.randint(0, 4)}, {_side(draw)}, align={align!r}) | prefix({draw.randint(0, 5)}))",
        lambda: f"(sinks({draw.randint(0, 5)}) | window({_side(draw)}, {draw.randint(0, 2)}))",
        lambda: f"predicate(lambda b, h, q, k: (q + {draw.randint(1, 5)} * k) % {draw.randint(2, 5)} < 2)",
    ]
    return draw.choice(makers)()


def _side(draw: random.Random) -> str:
    return draw.choice(["None", "-1", "0", "1", "3", "8"])


def _lengths(draw: random.Random, q_len: int, kv_len: int) -> str:
    kv, q = draw.randint(0, kv_len), draw.randint(0, q_len)
    starts = f", kv_start=[{draw.randint(0, kv_len - kv)}], q_start=[{draw.randint(0, q_len - q)}]"
    return f"lengths([{kv}], [{q}]{starts if draw.random() < 0.5 else ''})"


def _documents(draw: random.Random, q_len: int, kv_len: int) -> str:
    count = draw.randint(1, 4)
    q, kv = ([0, *sorted(draw.randint(0, size) for _ in range(count - 1)), size] for size in (q_len, kv_len))
    if draw.random() < 0.3:  # padding after the last document
        return f"documents({q[:-1] or [0]}, {kv[:-1] or [0]}, total_q={q_len}, total_kv={kv_len})"
    return f"documents({q}, cu_seqlens_kv={kv})"


def _ids(draw: random.Random, q_len: int, kv_len: int) -> str:
    q, kv = ([draw.randint(-1, 2) for _ in range(size)] for size in (q_len, kv_len))
    return f"document_ids({q}, {kv})"


def exact(sized: Sized) -> list[list[int]]:
    """The pairs of the first batch element as ranges per row, from `undivided.masks`."""
    mask = parse(sized.text)
    pairs = mask.to_dense(natural_sizes(mask)[0], 1, sized.q_len, sized.kv_len)[0, 0]
    rows = []
    for row in pairs.tolist():
        edges = [key for key, (a, b) in enumerate(zip([False, *row], [*row, False], strict=True)) if a != b]
        rows.append(edges)
    return rows
