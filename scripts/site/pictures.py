"""The pictures of the Learn pages. The library computes what they show: strides, masks, placements, block tables."""

from __future__ import annotations

from collections.abc import Callable

import torch
from svg import COLOURS, Picture

import undivided
from undivided import masks
from undivided.context_parallel import Placement
from undivided.context_parallel.sharding import row_pairs

CELL = 15


def grid(
    picture: Picture, x: float, y: float, allowed: torch.Tensor, colours: list[str] | None = None, cell: float = CELL
) -> None:
    """A mask: one row per query, one column per key."""
    for i, row in enumerate(allowed.tolist()):
        for j, one in enumerate(row):
            picture.rect(
                x + j * cell, y + i * cell, cell - 2, cell - 2, (colours[i] if colours else "a") if one else "empty"
            )


def axes(picture: Picture, x: float, y: float, q_len: int, kv_len: int, cell: float = CELL) -> None:
    """The words beside a mask."""
    picture.text(x, y - 6, "keys →", fill="soft", size=11)
    picture.text(x - 6, y + 10, "queries", fill="soft", size=11, anchor="end")
    picture.text(x - 6, y + 24, "↓", fill="soft", size=11, anchor="end")


def flow() -> Picture:
    """A call, from the arguments to the result."""
    picture = Picture(760, 250, "A call: request, normalise, select, run, result")
    boxes = [
        (10, "request", ["q, k, v, layout,", "mask, options"]),
        (165, "normalise", ["layout: strides", "mask: key ranges"]),
        (320, "select", ["problem, machine,", "policy"]),
        (475, "one backend", ["native, triton,", "torch_flash, ..."]),
        (630, "result", ["out, gradients,", "log-sum-exp"]),
    ]
    for x, name, lines in boxes:
        picture.rect(x, 40, 122, 82, "empty", stroke="line", rx=8)
        picture.text(x + 61, 64, name, anchor="middle", bold=True)
        for number, line in enumerate(lines):
            picture.text(x + 61, 86 + 17 * number, line, fill="soft", size=12, anchor="middle")
        if x < 630:
            picture.line(x + 124, 81, x + 152, 81, arrow=True)
    picture.line(381, 124, 381, 168, arrow=True)
    picture.rect(276, 172, 210, 58, "empty", stroke="c", rx=8)
    picture.text(381, 196, "NoBackendError", anchor="middle", bold=True)
    picture.text(381, 215, "the reasons of each backend", fill="soft", size=12, anchor="middle")
    picture.text(392, 151, "none can run it", fill="soft", size=12)
    picture.text(536, 30, "can run exactly this", fill="soft", size=12, anchor="middle")
    return picture


def layouts() -> Picture:
    """The same tokens in memory, in four layouts, with the strides that PyTorch gives them."""
    batch, length, heads, size = 2, 3, 2, 4
    picture = Picture(760, 330, "The order of tokens and heads in memory, for each layout")
    shapes = {
        "bshd": (batch, length, heads, size),
        "sbhd": (length, batch, heads, size),
        "bhsd": (batch, heads, length, size),
    }
    picture.text(
        10, 18, "One box is one head of one token. Colour: the sequence. Pale: the second head.", fill="soft", size=12
    )
    for row, layout in enumerate([*shapes, "thd"]):
        y = 40 + 70 * row
        picture.text(10, y + 20, layout, bold=True, size=15)
        if layout == "thd":
            lengths = [3, 1]
            places = [(b, s, h) for b, n in enumerate(lengths) for s in range(n) for h in range(heads)]
            strides = torch.empty(sum(lengths), heads, size).stride()
            note = f"strides {strides}; 3 + 1 tokens, no padding; offsets [0, 3, 4]"
        else:
            shape = shapes[layout]
            tensor = torch.empty(shape)
            axis = {name: shape_axis for shape_axis, name in enumerate(layout)}
            offset = lambda b, s, h, axis=axis, tensor=tensor: sum(  # noqa: E731
                value * tensor.stride(axis[name]) for name, value in (("b", b), ("s", s), ("h", h))
            )
            places = [(b, s, h) for b in range(batch) for s in range(length) for h in range(heads)]
            places.sort(key=lambda place: offset(*place))
            note = f"shape {shape}, strides {tensor.stride()}"
        for n, (b, s, h) in enumerate(places):
            x = 75 + 54 * n
            real = s < (3, 1)[b]
            picture.rect(
                x, y, 50, 30, COLOURS[b] if real else "empty", opacity=1 if h == 0 or not real else 0.6, stroke="line"
            )
            picture.text(
                x + 25, y + 20, f"s{s} h{h}", anchor="middle", size=12, fill="on" if real and h == 0 else "ink"
            )
        picture.text(75, y + 48, note, fill="soft", size=12)
    picture.text(10, 322, "Grey boxes are padding: sequence 1 has one real token.", fill="soft", size=12)
    return picture


GALLERY = [
    ("causal()", masks.causal()),
    ("window(2, 1)", masks.window(2, 1)),
    ("window(2, 0) | sinks(1)", masks.window(2, 0) | masks.sinks(1)),
    ("causal() | prefix(4)", masks.causal() | masks.prefix(4)),
    ("chunks(3) & causal()", masks.chunks(3) & masks.causal()),
    ("lengths(6, 6) & causal()", masks.lengths([6], [6]) & masks.causal()),
    ("documents(...) & causal()", masks.documents([0, 3, 9]) & masks.causal()),
    ("predicate(even sum)", masks.predicate(lambda b, h, q, k: (q + k) % 2 == 0)),
]


def gallery() -> Picture:
    """Eight masks of nine tokens."""
    picture = Picture(760, 390, "Eight masks of nine tokens: rows are queries, columns are keys")
    for n, (name, mask) in enumerate(GALLERY):
        x, y = 12 + 187 * (n % 4), 38 + 190 * (n // 4)
        picture.text(x, y - 10, name, size=11.5, bold=True)
        grid(picture, x, y, mask.to_dense(1, 1, 9, 9)[0, 0], cell=16)
    return picture


def alignment() -> Picture:
    """Causal for three queries and seven keys."""
    picture = Picture(760, 190, "Causal with 3 queries and 7 keys: top-left and bottom-right")
    for n, (align, words) in enumerate(
        (("top_left", "query 0 is aligned with key 0"), ("bottom_right", "the last query is aligned with the last key"))
    ):
        x = 70 + 380 * n
        picture.text(x, 22, f'causal("{align}")', bold=True)
        picture.text(x, 42, words, fill="soft", size=12)
        axes(picture, x, 76, 3, 7, 24)
        allowed = masks.causal(align=align).to_dense(1, 1, 3, 7)[0, 0]
        grid(picture, x, 76, allowed, cell=24)
        first = int(allowed[0].nonzero()[-1])
        picture.text(x, 168, f"query 0 attends to {first + 1} of 7 keys", fill="soft", size=12)
    return picture


def chunked_prefill() -> Picture:
    """A prompt of nine tokens in chunks of four, three and two."""
    picture = Picture(760, 260, "Chunked prefill: three calls together compute the causal mask of the whole prompt")
    whole = masks.causal().to_dense(1, 1, 9, 9)[0, 0]
    sizes = [4, 3, 2]
    colours = [COLOURS[n] for n, size in enumerate(sizes) for _ in range(size)]
    picture.text(60, 24, "the whole prompt at once", bold=True)
    grid(picture, 60, 60, whole, colours, cell=20)
    axes(picture, 60, 56, 9, 9)
    y, keys = 60, 0
    picture.text(430, 24, "three calls, bottom-right", bold=True)
    for n, size in enumerate(sizes):
        keys += size
        grid(
            picture, 430, y, masks.causal("bottom_right").to_dense(1, 1, size, keys)[0, 0], [COLOURS[n]] * size, cell=20
        )
        picture.text(430 + 9 * 20 + 10, y + 14, f"{size} queries, {keys} keys", fill="soft", size=12)
        y += size * 20 + 8
    return picture


def packing() -> Picture:
    """Three documents, padded and packed."""
    lengths = [3, 7, 5]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    picture = Picture(760, 420, "Three documents of 3, 7 and 5 tokens: padded, packed, and their mask")
    picture.text(10, 20, "padded, bshd: 21 places for 15 tokens; lengths [3, 7, 5]", bold=True)
    for b, n in enumerate(lengths):
        for s in range(7):
            picture.rect(10 + 26 * s, 32 + 26 * b, 24, 24, COLOURS[b] if s < n else "empty", stroke="line")
    picture.text(10, 140, "packed, thd: 15 places", bold=True)
    for b, n in enumerate(lengths):
        for s in range(n):
            picture.rect(10 + 26 * (int(offsets[b]) + s), 152, 24, 24, COLOURS[b])
    for offset in offsets.tolist():
        picture.line(9 + 26 * offset, 148, 9 + 26 * offset, 188)
        picture.text(9 + 26 * offset, 202, offset, anchor="middle", size=12)
    picture.text(430, 202, "cu_seqlens = [0, 3, 10, 15]", size=13)
    picture.text(10, 236, "documents(cu_seqlens) & causal()", bold=True)
    mask = (masks.documents(offsets) & masks.causal()).to_dense(1, 1, 15, 15)[0, 0]
    colours = [COLOURS[b] for b, n in enumerate(lengths) for _ in range(n)]
    grid(picture, 10, 246, mask, colours, cell=11)
    allowed, dense = int(mask.sum()), 3 * 7 * 7
    picture.text(210, 270, f"{allowed} pairs per head", size=13)
    picture.text(210, 292, f"a padded batch with a dense mask: {dense}", fill="soft", size=13)
    return picture


def pages() -> Picture:
    """A pool of eight pages while sequences start, fork and grow."""
    pool = undivided.PagedKVCache(num_pages=8, page_size=4, kv_heads=1, head_dim=8, batch=3, dtype=torch.float32)
    picture = Picture(760, 362, "A paged cache: which sequence has which page")
    new = lambda n: torch.zeros(3, n, 1, 8)  # noqa: E731
    steps: list[tuple[str, Callable[[], None]]] = [
        ("append: sequence 0 gets 6 tokens, sequence 1 gets 3", lambda: pool.append(new(6), new(6), lengths=[6, 3, 0])),
        ("fork(0, 2): sequence 2 starts with the tokens of 0", lambda: pool.fork(0, 2)),
        (
            "append: one token each; the shared last page is copied",
            lambda: pool.append(new(1), new(1), lengths=[1, 1, 1]),
        ),
        ("free(0): a page that another sequence has stays", lambda: pool.free(0)),
    ]
    for row, (words, step) in enumerate(steps):
        step()
        y = 30 + 86 * row
        picture.text(10, y - 8, words, bold=True)
        table, lengths = pool.block_table.tolist(), pool.lengths
        owners = {page: [s for s in range(3) if page in table[s][: -(-lengths[s] // 4)]] for page in range(8)}
        for page, sequences in owners.items():
            x = 10 + 64 * page
            picture.rect(x, y, 58, 36, "empty", stroke="line")
            for n, owner in enumerate(sequences):
                width = 58 / len(sequences)
                picture.rect(x + width * n, y, width, 36, COLOURS[owner], opacity=0.85)
            picture.text(x + 29, y + 50, f"page {page}", fill="soft", size=10.5, anchor="middle")
        picture.text(532, y + 16, f"lengths {lengths}", size=12)
        picture.text(532, y + 34, f"free pages {pool.free_pages}", fill="soft", size=12)
    for sequence in range(3):
        picture.rect(560 + 64 * sequence, 8, 12, 12, COLOURS[sequence])
        picture.text(576 + 64 * sequence, 18, f"seq {sequence}", size=11, fill="soft")
    return picture


def ring() -> Picture:
    """Pairs per rank and round of a causal ring of four ranks."""
    world, length = 4, 64
    picture = Picture(760, 270, "A causal ring of four ranks: pairs that each rank computes in each round")
    mask = masks.causal()
    dense, form = mask.to_dense(1, 1, length, length)[0, 0], mask.normal_form(1, 1, length, length, "cpu")
    for n, name in enumerate(("contiguous", "zigzag")):
        x = 60 + 375 * n
        ranks = Placement.of(name, world, length, None, mask, form).q
        picture.text(x, 22, f"{name}: 64 tokens on 4 ranks", bold=True)
        pairs = [[int(dense[ranks[r]][:, ranks[(r - t) % world]].sum()) for t in range(world)] for r in range(world)]
        largest = max(map(max, pairs))
        for r in range(world):
            picture.text(x - 8, 82 + 38 * r, f"rank {r}", fill="soft", size=12, anchor="end")
            for t in range(world):
                count = pairs[r][t]
                picture.rect(x + 56 * t, 60 + 38 * r, 52, 34, "empty", stroke="line")
                if count:
                    picture.rect(x + 56 * t, 60 + 38 * r, 52 * count / largest, 34, "a", opacity=0.35)
                picture.text(x + 56 * t + 26, 82 + 38 * r, count, anchor="middle", size=12)
            picture.text(x + 56 * world + 8, 82 + 38 * r, f"= {sum(pairs[r])}", size=12)
        for t in range(world):
            picture.text(x + 56 * t + 26, 52, f"round {t}", fill="soft", size=11, anchor="middle")
        worst = max(map(sum, pairs)) * world / sum(map(sum, pairs))
        picture.text(x, 236, f"largest rank / mean: {worst:.2f}", size=12)
    picture.text(
        60,
        260,
        "In round t rank r attends to the keys of rank r - t. 0: nothing is sent or computed.",
        fill="soft",
        size=12,
    )
    return picture


def placements() -> Picture:
    """Which rank has which tokens."""
    length, world = 16, 4
    picture = Picture(760, 150, "Sixteen tokens on four ranks")
    mask = masks.causal()
    form = mask.normal_form(1, 1, length, length, "cpu")
    for row, name in enumerate(("contiguous", "zigzag")):
        y = 30 + 56 * row
        picture.text(10, y + 20, name, bold=True)
        for rank, tokens in enumerate(Placement.of(name, world, length, None, mask, form).q):
            for token in tokens.tolist():
                picture.rect(110 + 36 * token, y, 33, 30, COLOURS[rank])
                picture.text(126 + 36 * token, y + 20, rank, anchor="middle", size=12, fill="on")
    picture.text(110, 18, "tokens in the order of the sequence; the number is the rank", fill="soft", size=12)
    return picture


def balance() -> Picture:
    """Pairs by rank, for three placements and three masks."""
    world, length = 8, 1024
    picture = Picture(760, 352, "Pairs by rank for three placements and three masks, on eight ranks")
    offsets = [0, 300, 320, 410, 420, 820, 821, 941, 1024]
    rows = {
        "causal": masks.causal(),
        "documents": masks.documents(offsets) & masks.causal(),
        "prefix": masks.causal() | masks.prefix(340),
    }
    for row, (name, mask) in enumerate(rows.items()):
        y = 40 + 98 * row
        picture.text(10, y + 40, name, bold=True)
        form = mask.normal_form(1, 1, length, length, "cpu")
        per_row = row_pairs(form)
        for column, placement in enumerate(("contiguous", "zigzag", "balanced")):
            x = 110 + 220 * column
            pairs = [
                int(per_row[tokens].sum()) for tokens in Placement.of(placement, world, length, None, mask, form).q
            ]
            mean = sum(pairs) / world
            for rank, count in enumerate(pairs):
                height = 30 * count / mean
                picture.rect(x + 22 * rank, y + 66 - height, 18, height, "a")
            picture.line(x - 4, y + 36, x + 22 * world, y + 36, "c")
            picture.text(x, y + 82, f"largest / mean {max(pairs) / mean:.2f}", fill="soft", size=12)
            if row == 0:
                picture.text(x, 20, placement, bold=True)
    picture.text(110, 346, "One bar is one rank; the line is the mean.", fill="soft", size=12)
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "flow": flow,
    "layouts": layouts,
    "mask-gallery": gallery,
    "alignment": alignment,
    "chunked-prefill": chunked_prefill,
    "packing": packing,
    "cache-pages": pages,
    "ring-rounds": ring,
    "placements": placements,
    "balance": balance,
}
