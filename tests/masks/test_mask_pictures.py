"""Pictures of masks, as text and as plots, and what large masks cost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from largest import Largest
from torch import Tensor

from undivided import masks
from undivided.errors import InputError
from undivided.masks import Mask
from undivided.masks._drawing import density

CPU = torch.device("cpu")


causal, window, lengths, documents, prefix = (masks.causal, masks.window, masks.lengths, masks.documents, masks.prefix)


IDS = torch.tensor([0, 0, 1])


def everywhere(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q == q


SAME = torch.tensor([2, 3])


S = 1 << 20


LONG = {
    "causal": lambda: causal(),
    "window-with-prefix": lambda: window(4096, 0) | prefix(128),
    "chunks": lambda: masks.chunks(8192) & causal(),
    "lengths": lambda: lengths([S - 5]) & causal("bottom_right"),
    "documents": lambda: documents(list(range(0, S + 1, 1024))) & causal(),
    "document-ids": lambda: masks.document_ids(torch.arange(S) // 1000) & causal(),
    "scattered-document-ids": lambda: masks.document_ids(torch.arange(S) % 1000) & causal(),
    "two-unions": lambda: (causal() | prefix(5)) & (window(99, 0) | prefix(3)) & (window(9, 0) | prefix(7)),
}


@pytest.mark.parametrize("name", LONG)
def test_a_million_tokens_take_memory_in_proportion(name: str) -> None:
    with Largest() as largest:
        form = LONG[name]().normal_form(1, 1, S, S, CPU)
        form.allowed(slice(0, 1), slice(S - 64, S), slice(S - 256, S), slice(0, 1))
        form.hull(slice(0, 1), slice(0, 128))
        for lazy in (form.q_position, form.kv_position, form.shift, form.q_sequence):
            assert lazy.shape[1] == S
        if form.exact:
            form.tiles(4096, 4096)
            assert form.rows_allowed.any()
        if form.exact or name == "two-unions":
            assert form.pairs > S
            density(form, 24, 48)
    assert largest.elements <= 4 * S


def test_dense_masks_and_predicates_are_evaluated_block_by_block() -> None:
    size = 4096
    mask = masks.predicate(lambda b, h, q, k: (q - k) % 3 == 0) & causal()
    with Largest() as largest:
        form = mask.normal_form(1, 8, size, size, CPU)
        tiles = form.tiles(512, 512)
        assert form.rows_allowed.all()
    assert largest.elements <= size * size // 3
    assert tiles[0, 0].tolist() == [[1 if j <= i else 0 for j in range(8)] for i in range(8)]


def test_masks_are_built_inside_compiled_functions() -> None:
    def build(x: Tensor, n: Tensor, cu: Tensor) -> tuple[list[str], list[Tensor]]:
        specs, tensors = [], []
        for mask in (
            causal() & lengths(n, n),
            (window(3, 0, "bottom_right") | prefix(n)) & lengths(n) & masks.chunks(4, offset=n),
            documents(cu) & causal() & masks.dense(x > 0),
            masks.document_ids(n) & window(1, 1),
            lengths([1, 2]) & causal("top_left"),
        ):
            spec, parts = mask.flatten()
            specs.append(spec)
            tensors += parts
        one = causal() & lengths(n, n)
        one.check(2, 1, 4, 4, packed=False, device=x.device)
        specs.append(str(one.resolved_align(2, 4, 4)))
        specs.append(str("causal" in one.kinds and not one.is_full))
        return specs, [t + 0 for t in tensors]

    arguments = (torch.rand(3, 3), torch.tensor([1, 2]), torch.tensor([0, 1, 3]))
    specs, tensors = build(*arguments)
    compiled_specs, compiled_tensors = torch.compile(build, fullgraph=True, backend="eager")(*arguments)
    assert compiled_specs == specs
    assert all(torch.equal(a, b) for a, b in zip(compiled_tensors, tensors, strict=True))


def test_a_predicate_mask_built_outside_is_used_in_a_compiled_function() -> None:
    mask = masks.predicate(everywhere)

    def use(x: Tensor) -> tuple[Tensor, str]:
        return x + 1, (mask & causal()).flatten()[0]

    _, spec = torch.compile(use, fullgraph=True, backend="eager")(torch.ones(1))
    assert Mask.unflatten(spec, []).intervals(2, 2).tolist() == [[[0, 1], [0, 2]]]


def test_a_predicate_built_while_compiling_is_refused() -> None:
    def build(x: Tensor) -> Tensor:
        masks.predicate(everywhere)
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported, match="predicate"):
        torch.compile(build, fullgraph=True, backend="eager")(torch.ones(1))


@pytest.mark.parametrize(
    ("mask", "picture"),
    [
        (
            causal("bottom_right") & lengths([3, 2], [2, 2]),
            """causal(align='bottom_right') & lengths(kv=[3, 2], q=[2, 2])
  0 1 2
0 ■ ■ ·
1 ■ ■ ■""",
        ),
        (
            window(0, 0) | prefix(1),
            """window(0, 0) | prefix(1)
  0 1 2 3 4 5 6 7
0 ■ · · · · · · ·
1 ■ ■ · · · · · ·
2 ■ · ■ · · · · ·
3 ■ · · ■ · · · ·
4 ■ · · · ■ · · ·
5 ■ · · · · ■ · ·
6 ■ · · · · · ■ ·
7 ■ · · · · · · ■""",
        ),
        (
            documents([0, 1, 3], padded_q=[0, 2, 4]) & causal(),
            """causal() & documents([0, 1, 3], padded_q=[0, 2, 4])
  0 1 2 3
0 ■ · · ·
1 · · · ·
2 · · ■ ·
3 · · ■ ■""",
        ),
        (
            (causal() | prefix(2)) & masks.document_ids(IDS),
            """(causal() | prefix(2)) & document_ids(<int64 [1, 3]>)
  0 1 2
0 ■ ■ ·
1 ■ ■ ·
2 · · ■""",
        ),
        (
            masks.dense(torch.eye(2, 3).bool()),
            """dense(<bool [1, 1, 2, 3]>)
  0 1 2
0 ■ · ·
1 · ■ ·""",
        ),
        (documents([0, 100]), "documents([0, 100])"),
        (masks.predicate(everywhere) & lengths([2, 2]).take("lengths")[1], None),
        (lengths(SAME.to("meta")), "lengths(kv=<int64 [2]>)"),
    ],
    ids=lambda value: repr(value) if isinstance(value, Mask) else "",
)
def test_str_draws_a_small_example(mask: Mask, picture: str | None) -> None:
    assert str(mask) == picture or (picture is None and str(mask).startswith("predicate(everywhere)\n"))


def test_str_of_an_ambiguous_mask_contains_the_error_instead_of_raising() -> None:
    assert "align must be given" in str(causal() & lengths([1, 2]))


def test_a_text_picture_that_is_too_large_is_refused() -> None:
    """It would need 10 GB of characters, and as many pairs."""
    with pytest.raises(InputError, match=r"batch \* q_len \* kv_len must be at most 4194304 .* got 10000000000"):
        causal().draw(100_000, 100_000)


def test_a_text_picture_that_is_too_large_is_refused_before_any_pair_is_evaluated() -> None:
    def never(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        raise AssertionError

    with pytest.raises(InputError, match="be at most 4194304 for a picture in text, got 100000000"):
        masks.predicate(never).draw(10_000, 10_000)


def test_str_contains_the_error_of_a_predicate() -> None:
    assert "(KeyError: 'layer')" in str(masks.predicate(lambda b, h, q, k: {}["layer"]))


def test_str_of_offsets_in_small_integers() -> None:
    hundred = torch.tensor([100], dtype=torch.int8)
    assert str(lengths(hundred, kv_start=hundred)) == "lengths(kv=[100], kv_start=[100])"


def test_draw_shows_every_batch_element() -> None:
    assert lengths([1, 2]).draw(1, 2, batch=2) == "  0 1\n0 ■ ·\n\n  0 1\n0 ■ ■"


def test_a_long_title_stays_above_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    mask = causal("top_left") & lengths([3, 2], [3, 2]) & masks.chunks(4, "top_left") & masks.document_ids(IDS)
    figure = mask.plot(3, 3, tmp_path / "mask.png", batch=2)
    title = figure._suptitle
    assert title.get_text().replace("\n", " ") == repr(mask)
    place = title.get_window_extent()
    assert 0 <= place.x0 < place.x1 <= figure.bbox.width
    assert all(axes.get_window_extent().y1 < place.y0 for axes in figure.axes)


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"Mask\.plot must have matplotlib installed") as error:
        window(2, 0).plot(8, 8)
    assert error.value.hint == "pip install 'undivided[plot]'"


def test_plot_counts_pairs_under_each_pixel(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "mask.png"
    with Largest() as largest:
        figure = (window(1 << 16, 0) | prefix(1 << 14)).plot(S, S, path, pixels=64)
    assert path.stat().st_size > 1000
    assert largest.elements <= 4 * S
    image = figure.axes[0].images[0].get_array()
    assert image.shape == (64, 64)
    assert float(image[10, 10]) == pytest.approx(0.5, abs=1e-4)
    assert float(image[63, 0]) == 1
    assert float(image[63, 30]) == 0
    dense = masks.dense(torch.eye(100).bool()).plot(100, 100, pixels=10).axes[0].images[0].get_array()
    assert float(dense[3, 3]) == pytest.approx(0.1)
    assert float(dense[3, 4]) == 0
