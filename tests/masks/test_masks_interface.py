"""Masks except their pairs: structure, alignment, errors, memory, changes in place, compilation, pictures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from undivided import masks
from undivided.errors import InputError
from undivided.masks import FULL, Mask

CPU = torch.device("cpu")


causal, window, lengths, documents, prefix = (masks.causal, masks.window, masks.lengths, masks.documents, masks.prefix)


IDS = torch.tensor([0, 0, 1])


ALL = torch.ones(3, 3, dtype=torch.bool)


def everywhere(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q == q


@pytest.mark.parametrize(
    ("mask", "kinds"),
    [
        (FULL, set()),
        (window(None, -1), set()),
        (causal(), {"causal"}),
        (window(3, 0) & causal(), {"window"}),
        (window(None, 3) & causal(), {"causal"}),
        (lengths([1]), {"lengths"}),
        (lengths([1], [1]), {"lengths", "q_lengths"}),
        (lengths([1], kv_start=[2]), {"lengths", "starts"}),
        (documents([0, 1]), {"documents"}),
        (documents([0, 1], padded_q=[0, 4]), {"documents", "padded"}),
        (documents([0, 1], [0, 1], padded_kv=[0, 4]), {"documents", "padded"}),
        (masks.document_ids(IDS) & lengths([3]), {"document_ids", "lengths"}),
        (prefix(2), {"prefix"}),
        (causal() | prefix(2), {"global"}),
        (masks.chunks(4) & masks.dense(ALL), {"chunks", "dense"}),
        (masks.predicate(everywhere), {"predicate"}),
    ],
    ids=lambda value: repr(value) if isinstance(value, Mask) else "",
)
def test_kinds_name_the_contents_of_a_mask(mask: Mask, kinds: set[str]) -> None:
    assert mask.kinds == kinds


def test_the_intersection_of_bands_has_the_narrower_sides() -> None:
    assert (window(4, None) & window(7, 1) & causal()).band == (4, 0)
    assert (window(None, 2) & FULL).band == (None, 2)


def test_structure_is_equal_for_masks_that_a_kernel_treats_alike() -> None:
    one, other = causal("top_left") & lengths([1, 2]), causal("top_left") & lengths([5, 6])
    assert one.structure == other.structure
    assert hash(one.structure) == hash(other.structure)
    assert one.structure is one.structure
    assert masks.chunks(4, offset=1).structure == masks.chunks(4, offset=2).structure
    assert documents([0, 1], max_q=1).structure == documents([0, 3], max_q=3).structure
    assert (causal() | prefix(3)).structure == (causal() | prefix(4)).structure
    assert (causal() & prefix(3)).structure == (causal() & prefix(4)).structure


def test_structure_differs_for_masks_that_a_kernel_treats_differently() -> None:
    every = [
        FULL,
        causal(),
        causal("top_left"),
        window(1, 0),
        window(2, 0),
        window(1, 1),
        prefix(1),
        prefix([1]),
        causal() | prefix(1),
        window(1, 0) | prefix(1),
        masks.chunks(2),
        masks.chunks(3),
        lengths([1]),
        lengths([1], [1]),
        lengths([1], kv_start=[1]),
        documents([0, 1]),
        documents([0, 1], padded_q=[0, 2]),
        masks.dense(ALL),
        masks.dense(ALL[None, None].expand(1, 2, 3, 3)),
        masks.predicate(everywhere),
        masks.document_ids(IDS),
        masks.dense(ALL) & masks.dense(ALL),
    ]
    assert len({mask.structure for mask in every}) == len(every)
    assert len({masks.describe(mask.structure) for mask in every}) > 12


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("causal", causal("top_left")),
        ("window", window(2, 0, "top_left")),
        ("band", causal("top_left")),
        ("lengths", lengths([1])),
        ("documents", documents([0, 1])),
        ("dense", masks.dense(ALL)),
        ("predicate", masks.predicate(everywhere)),
        ("document_ids", masks.document_ids(IDS)),
        ("prefix", prefix(2)),
        ("global", causal("top_left") | prefix(2)),
        ("chunks", masks.chunks(2)),
    ],
)
def test_take_gives_the_part_and_leaves_the_rest(name: str, part: Mask) -> None:
    value, rest = part.take(name)
    assert value is not None
    assert rest.is_full
    assert rest.align == part.align
    other = prefix(9) if name != "prefix" else lengths([7])
    value, rest = (part & other).take(name)
    assert value is not None
    assert rest.kinds == other.kinds
    assert other.take(name) == (None, other)


def test_take_refuses_a_name_that_no_mask_has() -> None:
    """It gave None, as for a mask without such a part."""
    with pytest.raises(InputError, match=r"(?s)name must be one of band, .*got 'casual'.*did you mean 'causal'"):
        causal().take("casual")


def test_take_gives_values_that_kernels_use() -> None:
    n, cu = torch.tensor([1, 2]), torch.tensor([0, 4])
    assert (causal() & prefix(1)).take("causal")[0] is True
    assert causal().take("window")[0] is None
    assert window(3, 0).take("causal")[0] is None
    assert window(3, 0).take("window")[0] == (3, 0)
    assert causal().take("band")[0] == (None, 0)
    assert lengths(n, n).take("lengths")[0].q is n
    numbers = [1, 2]
    same = lengths(numbers, numbers).take("lengths")[0]
    assert same.q is same.kv
    assert documents(cu, max_q=4).take("documents")[0].cu_seqlens_kv is cu
    assert documents(cu, max_q=4).take("documents")[0].max_kv == 4
    tensor = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    assert masks.dense(tensor).take("dense")[0][0] is tensor
    assert masks.predicate(everywhere).take("predicate")[0] == (everywhere,)
    assert masks.chunks(7).take("chunks")[0][0].size == 7


def test_the_same_part_twice_is_that_part_once() -> None:
    padded = lengths([1, 2])
    assert ((padded & causal("top_left")) & (padded & window(1, 0))).kinds == {"lengths", "window"}


def test_tensors_are_the_callers_and_each_is_listed_once() -> None:
    n = torch.tensor([1, 2])
    assert [t is n for t in (lengths(n, n) & prefix(n)).tensors] == [True]


def test_document_sizes_are_read_if_the_host_knows_them() -> None:
    assert documents([0, 2, 7], [0, 1, 2]).document_sizes == (2, 5, 1)
    assert documents([0]).document_sizes == (0, 0, 0)
    on_meta = torch.zeros(3, dtype=torch.int32, device="meta")
    assert documents(on_meta).document_sizes == (2, None, None)
    assert documents(on_meta, max_q=9).document_sizes == (2, 9, 9)
    assert causal().document_sizes is None


def test_the_same_offsets_for_queries_and_keys_share_their_gaps_and_sizes() -> None:
    offsets = [0, 2, 3]
    assert str(documents(offsets, offsets, padded_q=[0, 3, 5])) == str(documents(offsets, padded_q=[0, 3, 5]))
    assert str(documents(offsets, offsets, max_q=2, total_q=5)) == str(documents(offsets, max_q=2, total_q=5))


def test_padded_keys_move_each_documents_keys() -> None:
    mask = documents([0, 1, 2], [0, 2, 3]).with_padded_kv(torch.tensor([0, 4, 8], dtype=torch.int32))
    assert mask.intervals(2, 8).tolist() == [[[0, 2], [4, 5]]]


SAME = torch.tensor([2, 3])


@pytest.mark.parametrize(
    ("mask", "sizes", "resolved"),
    [
        (causal(), (1, 4, 4), "both"),
        (causal("bottom_right"), (1, 4, 4), "both"),
        (causal("bottom_right"), (1, 4, 5), "bottom_right"),
        (window(1, 1, "top_left"), (1, 4, 5), "top_left"),
        (prefix(2), (1, 4, 5), None),
        (window(None, None, "bottom_right"), (1, 4, 5), None),
        (causal() & lengths(SAME, SAME), (2, 4, 9), "both"),
        (causal() & lengths([2, 3], [2, 3]), (2, 4, 9), "both"),
        (causal() & lengths([4, 4]), (2, 4, 9), "both"),
        (causal() & documents([0, 2, 3]), (1, 4, 9), "both"),
        (causal() & documents([0, 2, 3], [0, 2, 3]), (1, 4, 9), "both"),
        (causal() & documents(SAME.new_zeros(3).to("meta")), (1, 4, 9), "both"),
    ],
    ids=lambda value: repr(value),
)
def test_alignments_agree_for_as_many_queries_as_keys(
    mask: Mask, sizes: tuple[int, int, int], resolved: str | None
) -> None:
    assert mask.resolved_align(*sizes) == resolved


@pytest.mark.parametrize(
    ("mask", "sizes", "hint"),
    [
        (causal(), (1, 3, 4), "align='bottom_right'"),
        (window(1, None), (1, 3, 4), "align='top_left'"),
        (masks.chunks(2), (1, 3, 4), "align="),
        (causal() | prefix(1), (1, 3, 4), "align="),
        (causal() & lengths([2, 3]), (2, 3, 3), r"lengths\(n, n\)"),
        (causal() & lengths([2, 3], [2, 2]), (2, 3, 3), "align="),
        (causal() & documents([0, 2, 3], [0, 1, 3]), (1, 3, 3), "align="),
        (causal() & lengths(SAME.to("meta")), (2, 3, 3), "one tensor for both"),
        (causal() & lengths(SAME.to("meta"), SAME.to("meta")), (2, 3, 3), "one tensor for both"),
    ],
    ids=lambda value: repr(value),
)
def test_a_missing_alignment_is_an_error_if_it_matters(mask: Mask, sizes: tuple[int, int, int], hint: str) -> None:
    with pytest.raises(InputError, match=f"top-left and bottom-right differ(.|\n)*HINT(.|\n)*{hint}"):
        mask.resolved_align(*sizes)
    with pytest.raises(InputError, match="align must"):
        mask.normal_form(sizes[0], 1, *sizes[1:], CPU)


def test_alibi_needs_an_alignment_that_a_mask_may_carry_alone() -> None:
    assert FULL.resolved_align(1, 3, 3, needed=True) == "both"
    assert window(None, None, "bottom_right").resolved_align(1, 3, 5, needed=True) == "bottom_right"
    assert causal("bottom_right").take("causal")[1].resolved_align(1, 3, 5, needed=True) == "bottom_right"
    with pytest.raises(InputError, match="align must"):
        FULL.resolved_align(1, 3, 5, needed=True)
    form = window(None, None, "bottom_right").normal_form(1, 1, 3, 5, CPU)
    assert form.shift.tolist() == [[2, 2, 2]]


I8 = torch.tensor([1, 2])


CONSTRUCTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "align-unknown": (lambda: causal("middle"), "align must be"),  # type: ignore[arg-type]
    "window-side-negative": (lambda: window(-2, 0), "left must be at least 0.* got -2"),
    "window-side-float": (lambda: window(0, 1.5), "right must be an int, got 1.5"),  # type: ignore[arg-type]
    "window-side-bool": (lambda: window(True, 0), "left must be an int"),
    "lengths-float": (lambda: lengths(torch.rand(2)), "kv must have an integer dtype, got torch.float32"),
    "lengths-number": (lambda: lengths(3), "kv must be an int tensor or a list"),  # type: ignore[arg-type]
    "lengths-two-dimensions": (lambda: lengths(I8[None]), r"kv must have one dimension, got shape \[1, 2\]"),
    "lengths-negative": (lambda: lengths([1, -1]), "kv must be at least 0, got -1"),
    "lengths-q-negative": (lambda: lengths([1], [-3]), "q must be at least 0, got -3"),
    "lengths-entries-differ": (lambda: lengths([1, 2], [1]), "q must have an entry for each of kv's 2, got 1"),
    "lengths-start-negative": (lambda: lengths([1], kv_start=[-1]), "kv_start must be at least 0"),
    "lengths-q-start-without-q": (lambda: lengths([1], q_start=[0]), "q must be given with q_start"),
    "lengths-list-of-floats": (lambda: lengths([1.0]), r"kv\[0\] must be an int"),  # type: ignore[list-item]
    "lengths-too-large": (lambda: lengths([2**31]), "kv must hold values of at most"),
    "documents-not-from-zero": (lambda: documents([1, 2]), "cu_seqlens_q must start at 0, got 1"),
    "documents-decrease": (lambda: documents([0, 3, 2]), "cu_seqlens_q must never decrease"),
    "documents-decrease-in-uint8": (lambda: documents(torch.tensor([0, 3, 1], dtype=torch.uint8)), "never decrease"),
    "documents-gap-in-uint8": (
        lambda: documents([0, 5, 10], padded_q=torch.tensor([0, 8, 4], dtype=torch.uint8)),
        "padded_q must leave room for document 1 of length 5, got -4 slots",
    ),
    "documents-no-offsets": (lambda: documents([]), "cu_seqlens_q must hold N"),
    "documents-keys-differ": (lambda: documents([0, 1], [0, 1, 2]), "cu_seqlens_kv must have as many entries"),
    "documents-gap-too-small": (lambda: documents([0, 3], padded_q=[0, 2]), "padded_q must leave room for document 0"),
    "documents-kv-gap-too-small": (lambda: documents([0, 3], [0, 3], padded_kv=[0, 2]), "padded_kv must leave room"),
    "documents-max-too-small": (lambda: documents([0, 3], max_q=2), "max_q must be at least the longest document"),
    "documents-max-kv-too-small": (lambda: documents([0, 1], [0, 3], max_kv=2), "max_kv must be at least"),
    "ids-float": (lambda: masks.document_ids(torch.rand(3)), "ids_q must have an integer dtype"),
    "ids-three-dimensions": (lambda: masks.document_ids(I8[None, None]), r"ids_q must have shape \[B, S\]"),
    "ids-batches-differ": (lambda: masks.document_ids(I8[None].repeat(2, 1), I8[None].repeat(3, 1)), "ids_kv must"),
    "prefix-negative": (lambda: prefix(-1), "n must be at least 0, got -1"),
    "prefix-tensor-negative": (lambda: prefix(torch.tensor([2, -2])), "n must be at least 0, got -2"),
    "prefix-text": (lambda: prefix("2"), "n must be an int"),  # type: ignore[arg-type]
    "chunks-empty": (lambda: masks.chunks(0), "size must be at least 1, got 0"),
    "chunks-offset-float": (lambda: masks.chunks(2, offset=0.5), "offset must be an int"),  # type: ignore[arg-type]
    "dense-numbers": (lambda: masks.dense(torch.zeros(2, 2)), r"tensor must be boolean(.|\n)*bias="),
    "dense-three-dimensions": (lambda: masks.dense(ALL[None]), r"tensor must have 2 dimensions(.|\n)*\[None\]"),
    "predicate-no-function": (lambda: masks.predicate(3), "fn must be a function"),  # type: ignore[arg-type]
    "and-aligns-differ": (lambda: causal("top_left") & window(1, 0, "bottom_right"), "mask must have one alignment"),
    "or-aligns-differ": (lambda: causal("top_left") | Mask("bottom_right", parts=prefix(1).parts), "one alignment"),
    "and-two-lengths": (lambda: lengths([1]) & lengths([1]), "mask must describe its sequences once"),
    "and-two-documents": (lambda: documents([0, 1]) & documents([0, 1]), "mask must describe its sequences once"),
    "and-lengths-documents": (lambda: documents([0, 1]) & lengths([1]), "mask must describe its sequences once"),
    "and-tensor": (lambda: causal() & ALL, r"mask must be joined to another mask by `&`(.|\n)*masks.dense"),
    "and-none": (lambda: causal() & None, "mask must be joined to another mask"),  # type: ignore[operator]
    "or-two-bands": (lambda: causal() | window(1, 0), "mask must join causal or window to a bare prefix"),
    "or-two-prefixes": (lambda: prefix(1) | prefix(2), "mask must join causal or window to a bare prefix"),
    "or-lengths": (lambda: causal() & lengths([1]) | prefix(1), r"bare prefix(.|\n)*\(causal\(\) \| prefix\(n\)\) &"),
    "or-prefix-and-lengths": (lambda: causal() | prefix(1) & lengths([1]), "bare prefix"),
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_a_wrong_construction_names_argument_value_and_limit(name: str) -> None:
    construct, message = CONSTRUCTIONS[name]
    with pytest.raises(InputError, match=message):
        construct()


CALLS: dict[str, tuple[Mask, tuple[int, int, int, int], bool, str]] = {
    "lengths-of-another-batch": (lengths([1, 2]), (3, 1, 4, 4), False, "entry of lengths for each of the 3 batch"),
    "lengths-beyond-the-keys": (lengths([1, 5]), (2, 1, 4, 4), False, r"lengths\(kv\) of at most 4.* got 5"),
    "lengths-beyond-the-queries": (lengths([1], [5]), (1, 1, 4, 4), False, r"lengths\(q\) of at most 4.* got 5"),
    "lengths-and-start-beyond": (lengths([3], kv_start=[2]), (1, 1, 4, 4), False, r"kv_start \+ kv.* got 5"),
    "lengths-and-start-beyond-in-int8": (
        lengths(torch.tensor([100], dtype=torch.int8), kv_start=torch.tensor([100], dtype=torch.int8)),
        (1, 1, 150, 150),
        False,
        r"kv_start \+ kv.* got 200",
    ),
    "lengths-packed": (lengths([3]), (1, 1, 4, 4), True, r"packed tokens by documents(.|\n)*cu_seqlens"),
    "documents-of-a-batch": (documents([0, 4]), (2, 1, 4, 4), False, "a batch of 1, got a batch of 2"),
    "documents-beyond-the-tokens": (documents([0, 5]), (1, 1, 4, 5), True, r"cu_seqlens_q\[-1\] of at most 4"),
    "documents-keys-beyond": (documents([0, 4], [0, 6]), (1, 1, 4, 5), True, r"cu_seqlens_kv\[-1\] of at most 5"),
    "documents-slots-beyond": (documents([0, 1], padded_q=[0, 6]), (1, 1, 5, 6), True, r"padded_q\[-1\] of at most 5"),
    "ids-of-another-length": (masks.document_ids(IDS), (2, 1, 4, 3), False, r"ids_q\) of shape \[2 or 1, 4\]"),
    "ids-of-other-keys": (masks.document_ids(IDS), (1, 1, 3, 4), False, r"ids_kv\) of shape \[1, 4\](.|\n)*ids_kv"),
    "ids-of-another-batch": (masks.document_ids(IDS[None].repeat(3, 1)), (2, 1, 3, 3), False, r"got \[3, 3\]"),
    "prefix-of-another-batch": (prefix([1, 2, 3]), (2, 1, 4, 4), False, "for each of the 2 sequences, got 3"),
    "prefix-of-other-documents": (prefix([1]) & documents([0, 1, 2]), (1, 1, 2, 2), True, "each of the 2 sequences"),
    "global-of-another-batch": (causal() | prefix([1]), (2, 1, 4, 4), False, "for each of the 2 sequences"),
    "offset-of-another-batch": (masks.chunks(2, offset=[1]), (2, 1, 4, 4), False, "for each of the 2 sequences"),
    "dense-of-other-sizes": (masks.dense(ALL), (1, 1, 3, 4), False, r"broadcastable to .* \[1, 1, 3, 4\]"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_mask_that_does_not_fit_the_call_is_refused(name: str) -> None:
    mask, sizes, packed, message = CALLS[name]
    for _ in range(2):  # an error is not cached as a success
        with pytest.raises(InputError, match=f"attn_mask must (.|\n)*{message}"):
            mask.check(*sizes, packed=packed, device=CPU, argument="attn_mask")


def test_tensors_on_the_wrong_device_are_refused() -> None:
    mask = lengths(SAME.to("meta"))
    with pytest.raises(
        InputError, match=r"mask must be on the CPU, as q is on cpu, got meta\n  HINT: mask.to\(q.device\)"
    ):
        mask.check(2, 1, 4, 4, packed=False, device=CPU)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda b, h, q, k: q - k, "fn must return a bool tensor, got torch.int64"),
        (lambda b, h, q, k: None, "fn must return a bool tensor, got NoneType"),
        (lambda b, h, q, k: (q >= k)[0, 0, 0].repeat(2), "fn must return a tensor broadcastable"),
    ],
    ids=["numbers", "nothing", "another-shape"],
)
def test_a_predicate_that_does_not_return_a_mask_is_refused(fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        masks.predicate(fn).intervals(3, 3)


def test_python_bools_are_predicates_too() -> None:
    assert masks.predicate(lambda b, h, q, k: True).intervals(2, 3).tolist() == [[[0, 3], [0, 3]]]  # type: ignore[arg-type, return-value]


def adapted(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
        return fn(q, k)

    return wrapper


@pytest.mark.parametrize(
    "fn",
    [
        lambda *indices: indices[2] >= indices[3],
        lambda b, h, q, k, limit=0: q - k >= limit,
        functools.partial(lambda limit, b, h, q, k: q - k >= limit, 0),
        adapted(lambda q, k: q >= k),
    ],
    ids=["starred", "default", "partial", "decorated"],
)
def test_a_predicate_is_any_callable_of_four_indices(fn: Callable[..., Any]) -> None:
    assert masks.predicate(fn).intervals(2, 2).tolist() == [[[0, 1], [0, 2]]]


def test_a_predicate_without_a_signature_is_accepted() -> None:
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(max)
    assert masks.predicate(max).kinds == {"predicate"}
