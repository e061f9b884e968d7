"""The texts and pictures of masks: repr, str, drawings and plots of each part, and which argument an error names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import undivided
from undivided import InputError, masks
from undivided.masks import Mask, _predicate
from undivided.masks._drawing import density, describe_structure, draw, natural_sizes
from undivided.masks._predicate import find_predicate


def is_even(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q + k) % 2 == 0


class Near:
    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < 2


TEXTS: dict[str, Callable[[], Mask]] = {
    "every pair": lambda: masks.window(None, None),
    "window(None, None, align='top_left')": lambda: masks.window(None, None, "top_left"),
    "causal(align='top_left')": lambda: masks.causal("top_left"),
    "window(3, 1) & prefix(5)": lambda: masks.window(3, 1) & masks.prefix(5),
    "window(3, 1, align='top_left') | prefix(2)": lambda: masks.window(3, 1, "top_left") | masks.prefix(2),
    "window(3, 1) | prefix([1, 2])": lambda: masks.window(3, 1) | masks.prefix([1, 2]),
    "(window(3, 0) | sinks(2)) & lengths(kv=[4, 5])": lambda: (
        (masks.window(3, 0) | masks.sinks(2)) & masks.lengths([4, 5])
    ),
    "lengths(kv=[4], q=[3], kv_start=[1], q_start=[2])": lambda: masks.lengths([4], [3], [1], [2]),
    "lengths(kv=<int32 [9]>)": lambda: masks.lengths([1] * 9),
    "documents([0, 2, 4])": lambda: masks.documents([0, 2, 4]),
    "documents([0, 2], padded_q=[0, 4], max_q=3, total_q=6)": lambda: masks.documents(
        [0, 2], padded_q=[0, 4], max_q=3, total_q=6
    ),
    "documents([0, 2], [0, 3], padded_kv=[0, 5], max_kv=3, total_kv=6)": lambda: masks.documents(
        [0, 2], [0, 3], padded_kv=[0, 5], max_kv=3, total_kv=6
    ),
    "documents([0, 2], [0, 3], padded_q=[0, 4], padded_kv=[0, 4], max_q=2, max_kv=3, total_q=6, total_kv=6)": lambda: (
        masks.documents([0, 2], [0, 3], [0, 4], [0, 4], 2, 3, 6, 6)
    ),
    "document_ids(<int32 [1, 3]>)": lambda: masks.document_ids([0, 0, 1]),
    "document_ids(<int32 [1, 3]>, <int32 [1, 2]>)": lambda: masks.document_ids([0, 0, 1], [0, 1]),
    "chunks(4)": lambda: masks.chunks(4),
    "chunks(4, align='top_left', offset=[1, 2])": lambda: masks.chunks(4, "top_left", [1, 2]),
    "dense(<bool [1, 1, 2, 3]>)": lambda: masks.dense(torch.ones(2, 3, dtype=torch.bool)),
    "causal(align='bottom_right') & tree([-1, 0, 0])": lambda: masks.tree([-1, 0, 0]),
    "causal(align='bottom_right') & tree(<int64 [2, 2]>)": lambda: masks.tree(torch.tensor([[-1, 0], [-1, -1]])),
    "blocks(2, 4, <int64 [1, 1, 1, 2]>)": lambda: masks.blocks(2, 4, [[0, 1]]),
    "pages(<int64 [1, 1, 1, 2]>, 4)": lambda: masks.pages([0, 1], 4),
    "predicate(is_even)": lambda: masks.predicate(is_even),
    "predicate(Near)": lambda: masks.predicate(Near()),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_mask_reads_as_the_calls_that_build_it(text: str) -> None:
    assert repr(TEXTS[text]()) == text


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (masks.causal() | masks.prefix(2), "(causal | prefix)"),
        (masks.window(3, 1, "top_left") | masks.prefix(2), "(window(3, 1) | prefix) (top-left)"),
        (masks.window(3, 0, "bottom_right") | masks.sinks(2), "(window(3, 0) | sinks) (bottom-right)"),
        (masks.window(3, 1) & masks.chunks(4) & masks.prefix(2), "window(3, 1) & chunks(4) & prefix"),
        (masks.window(None, 2), "window(None, 2)"),
        (masks.window(None, None), "every pair"),
    ],
)
def test_the_structure_of_a_mask_reads_without_values(mask: Mask, text: str) -> None:
    assert describe_structure(mask.structure) == text


@pytest.mark.parametrize(
    ("mask", "sizes"),
    [
        (masks.causal(), (1, 1, 8, 8)),
        (masks.lengths([2, 5], kv_start=[1, 2]), (2, 1, 7, 7)),
        (masks.lengths([2, 5], [3, 1], q_start=[4, 0]), (2, 1, 7, 5)),
        (masks.documents([0, 2, 5], [0, 3, 9]), (1, 1, 5, 9)),
        (masks.document_ids(torch.zeros(1, 4).int(), torch.zeros(3, 5).int()), (3, 1, 4, 5)),
        (masks.document_ids(torch.zeros(3, 4).int(), torch.zeros(1, 5).int()), (3, 1, 4, 5)),
        (masks.tree(torch.tensor([[-1, 0], [-1, -1]])), (2, 1, 2, 2)),
        (masks.blocks(3, 4, torch.zeros(2, 3, 2, 1).int()), (2, 3, 6, 4)),
        (masks.pages([0, 2], 4), (1, 1, 1, 12)),
        (masks.blocks(3, 4, torch.zeros(1, 2, 0).int()), (1, 1, 6, 4)),
        (masks.dense(torch.ones(2, 3, 4, 5, dtype=torch.bool)), (2, 3, 4, 5)),
        (masks.dense(torch.ones(1, 2, 4, 5).bool()) & masks.blocks(2, 5, torch.zeros(1, 3, 2, 1).int()), (1, 6, 4, 5)),
        (masks.prefix([1, 2, 3]), (3, 1, 8, 8)),
        (masks.chunks(2, "top_left", [0, 1]), (2, 1, 8, 8)),
        (masks.prefix([1, 2]) & masks.documents([0, 2, 4]), (1, 1, 4, 4)),
    ],
    ids=repr,
)
def test_a_mask_without_sizes_is_drawn_at_sizes_that_show_it(mask: Mask, sizes: tuple[int, ...]) -> None:
    assert natural_sizes(mask) == sizes


def test_a_drawing_shows_its_head_and_batch_element() -> None:
    table = torch.tensor([[[[0]], [[1]]], [[[1]], [[0]]]])
    form = masks.blocks(2, 1, table).normal_form(2, 2, 2, 2, "cpu")
    assert draw(form) == draw(form, 0, 0) == draw(form, 1, 1) == "  0 1\n0 ■ ·\n1 ■ ·"
    assert draw(form, 0, 1) == draw(form, 1, 0) == "  0 1\n0 · ■\n1 · ■"
    with pytest.raises(InputError) as caught:
        draw(masks.causal().normal_form(1, 1, 2, 2, "meta"))
    assert str(caught.value) == "mask must hold readable values to be drawn, got fake, traced or wrapped tensors"


def test_the_ruler_of_a_drawing_has_the_last_digit_of_each_key() -> None:
    assert masks.window(None, None).draw(1, 12) == "  0 1 2 3 4 5 6 7 8 9 0 1\n0 " + " ".join("■" * 12)
    with pytest.raises(InputError) as caught:
        masks.causal().draw(100_000, 100_000)
    assert caught.value.hint == "mask.plot(q_len, kv_len, path) draws any size"


def test_a_tensor_whose_memory_was_freed_is_shown_by_its_shape() -> None:
    lengths = torch.tensor([2, 3])
    mask = masks.lengths(lengths)
    lengths.untyped_storage().resize_(0)
    assert repr(mask) == "lengths(kv=<int64 [2]>)"


def test_the_structure_says_which_values_are_tensors() -> None:
    assert masks.lengths([2], q=[1]).structure.detail == (("lengths", "tensor", "tensor", None, None),)


def test_the_density_of_a_pixel_is_its_share_of_allowed_pairs() -> None:
    found = density(masks.causal().normal_form(1, 1, 4, 4, "cpu"), 2, 2)
    assert found.dtype == torch.float32
    assert found.tolist() == [[0.75, 0.0], [1.0, 0.75]]


def test_a_plot_has_square_pixels_for_as_many_keys_as_queries(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for kv_len, aspect in ((6, 1.0), (9, "auto")):
        axes, _ = masks.causal("top_left").plot(6, kv_len).axes
        assert axes.get_aspect() == aspect
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("key", "query")
        (image,) = axes.images
        assert image.get_clim() == (0, 1)
        assert list(image.get_extent()) == [0, kv_len, 6, 0]
    with pytest.raises(InputError) as caught:
        masks.causal().plot(4, 4, tmp_path / "mask.txt")
    assert caught.value.argument == "path"
    assert caught.value.hint == "mask.png"
    assert str(caught.value).startswith("path must end in .")
    assert ", .pdf, .pgf, .png, " in str(caught.value)
    assert repr(str(tmp_path / "mask.txt")) in str(caught.value)


# argument that the error names, call
WRONG: list[tuple[str, Callable[[], object]]] = [
    ("kv", lambda: masks.lengths([0.5])),
    ("q", lambda: masks.lengths([1], [0.5])),
    ("kv_start", lambda: masks.lengths([1], kv_start=[0.5])),
    ("q_start", lambda: masks.lengths([1], [1], q_start=[0.5])),
    ("q", lambda: masks.lengths([1], [1, 2])),
    ("kv_start", lambda: masks.lengths([1], kv_start=[1, 2])),
    ("q_start", lambda: masks.lengths([1], [1], q_start=[1, 2])),
    ("cu_seqlens_q", lambda: masks.documents([0.5])),
    ("cu_seqlens_kv", lambda: masks.documents([0, 1], [0.5])),
    ("padded_q", lambda: masks.documents([0, 1], padded_q=[0.5])),
    ("padded_kv", lambda: masks.documents([0, 1], [0, 1], padded_kv=[0.5])),
    ("cu_seqlens_kv", lambda: masks.documents([0, 1], [0])),
    ("padded_q", lambda: masks.documents([0, 1], padded_q=[0])),
    ("padded_kv", lambda: masks.documents([0, 1], [0, 1], padded_kv=[0])),
    ("max_q", lambda: masks.documents([0, 1], max_q=-1)),
    ("max_kv", lambda: masks.documents([0, 1], max_kv=-1)),
    ("total_q", lambda: masks.documents([0, 1], total_q=-1)),
    ("total_kv", lambda: masks.documents([0, 1], total_kv=-1)),
    ("max_q", lambda: masks.documents([0, 4], max_q=3)),
    ("ids_q", lambda: masks.document_ids(torch.zeros(1, 1, 1).int())),
    ("ids_kv", lambda: masks.document_ids([0], torch.zeros(1, 1, 1).int())),
    ("left", lambda: masks.window(-2, 0)),
    ("right", lambda: masks.window(0, -2)),
    ("n", lambda: masks.prefix(2**31)),
    ("offset", lambda: masks.chunks(2, offset=2**31)),
    ("size", lambda: masks.chunks(0)),
    ("q_block", lambda: masks.blocks(0, 1, [[0]])),
    ("kv_block", lambda: masks.blocks(1, 0, [[0]])),
    ("page_size", lambda: masks.pages([0], 0)),
    ("table", lambda: masks.pages([-2], 1)),
    ("parents", lambda: masks.tree([0])),
    ("fn", lambda: masks.predicate(lambda b, h: True)),  # type: ignore[arg-type, misc]
]


@pytest.mark.parametrize(("argument", "call"), WRONG, ids=[f"{n}-{name}" for n, (name, _) in enumerate(WRONG)])
def test_an_error_names_the_argument_that_is_wrong(argument: str, call: Callable[[], object]) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.argument.partition("[")[0] == argument  # an entry of a list has its index
    assert str(caught.value).startswith(f"{caught.value.argument} must ")


def test_errors_of_sizes_name_the_value() -> None:
    with pytest.raises(InputError, match=r"^n must be at most 2147483647, got 2147483648$"):
        masks.prefix(2**31)
    with pytest.raises(InputError, match=r"^ids_kv must have the batch size of ids_q \(2\), got 3$"):
        masks.document_ids(torch.zeros(2, 4).int(), torch.zeros(3, 5).int())
    with pytest.raises(InputError, match=r"of 3 heads, got \[1, 2, 1, 1\]$"):
        masks.blocks(4, 4, torch.zeros(1, 2, 1, 1).int()).to_dense(1, 3, 4, 4)


def message(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)


def test_a_predicate_inside_a_compiled_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert message(lambda: masks.predicate(is_even)) == (
        "mask must be built outside of torch.compile if it holds a predicate, got masks.predicate(fn)\n"
        "  HINT: build the mask before the compiled function and pass it in"
    )


def test_a_predicate_that_was_released_is_refused() -> None:
    assert message(lambda: find_predicate(0)) == (
        "mask must be kept alive while its compiled graph runs, got a released predicate (handle 0)\n"
        "  HINT: keep the mask that masks.predicate returned in a variable outside of the compiled function"
    )


def test_a_predicate_of_another_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first predicate of the process that loaded a program was once taken for that of the program."""
    mask, q = masks.predicate(is_even), torch.randn(1, 2, 1, 8)

    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return undivided.attention(q, q, q, layout="bshd", mask=mask)

    programs = [torch.export.export(Model(), (q,), strict=strict).module() for strict in (True, False)]
    programs.append(torch.jit.trace(Model(), (q,)))
    for program in programs:
        torch.testing.assert_close(program(q), Model()(q))
    monkeypatch.setattr(_predicate, "_PROCESS", _predicate._PROCESS + (1 << 32))
    for program in programs[:2]:
        assert message(lambda program=program: program(q)) == (
            "mask must be of tensors in a program that is saved, "
            "got masks.predicate with a function of the process that saved it\n"
            "  HINT: masks.dense(mask.to_dense(batch, heads, q_len, kv_len)) before torch.export or torch.jit.trace"
        )
    with pytest.raises(RuntimeError, match="a function of the process that saved it"):
        programs[2](q)


def test_a_table_that_does_not_fit_the_call_is_refused_with_its_shape() -> None:
    table = torch.zeros(1, 1, 2, 1, dtype=torch.int32)

    def call(mask: Mask, batch: int, q_len: int, kv_len: int) -> str:
        return message(lambda: mask.to_dense(batch, 1, q_len, kv_len))

    wanted = "mask must have a block table for 1 query blocks, of 4 of 4 queries, got [1, 1, 2, 1]"
    assert call(masks.blocks(4, 4, table), 1, 4, 4) == wanted
    wanted = "mask must have a block table for 1 or 3 sequences, got [2, 1, 1, 1]"
    assert call(masks.pages(torch.zeros(2, 1).int(), 4), 3, 4, 4) == wanted
    wanted = "mask must choose key blocks of at most 1: 6 keys in blocks of 4, got 2"
    assert call(masks.pages([2], 4), 1, 4, 6) == wanted


def test_lengths_beyond_32_bits_are_refused_with_the_length() -> None:
    assert message(lambda: masks.causal().intervals(1, 2**31)) == (
        "mask must be for a kv length of at most 2147483647: positions have 32 bits, got 2147483648"
    )


def test_intervals_span_the_heads_of_every_table_and_tensor() -> None:
    table = torch.tensor([[[[0]], [[1]], [[0]]]])  # 3 groups of heads
    mask = masks.blocks(2, 2, table) & masks.dense(torch.ones(1, 6, 2, 4, dtype=torch.bool))
    assert mask.intervals(2, 4).tolist() == [[[0, 4], [0, 4]]]


def test_tensors_behind_an_empty_cell_of_a_predicate_are_found() -> None:
    """They may change in place, and the mask must notice."""

    def build(values: Tensor, is_known: bool) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        def fn(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (a_limit if is_known else 0) < values[k] + 0 * q  # `a_limit` comes before `values` in the closure

        if is_known:
            a_limit = 3
        return fn

    values = torch.tensor([0, 1, 2])
    mask = masks.predicate(build(values, is_known=False))
    assert mask.to_dense(1, 1, 1, 3).flatten().tolist() == [False, True, True]
    values.copy_(torch.tensor([1, 0, 0]))
    assert mask.to_dense(1, 1, 1, 3).flatten().tolist() == [True, False, False]
