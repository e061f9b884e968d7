"""What a decision prints of a problem, and the checks that one block table needs only once."""

from __future__ import annotations

import pytest
import torch

import undivided
from undivided import InputError, masks
from undivided.request import normalise


def test_the_text_of_a_problem_has_its_sizes_alignment_and_needs() -> None:
    q, k, v = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 16)
    problem = undivided.explain(q, k, v, layout="bshd", mask=masks.causal("bottom_right"), batch_invariant=True).problem
    assert str(problem) == (
        "q 2x3x4x8 (BxSxHxD), kv 2x5x2x8/16; float32 bshd on cpu; mask causal (bottom-right); "
        "needs backward, gqa, value_dim, batch_invariant"
    )


def test_page_numbers_are_checked_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []
    monkeypatch.setattr(normalise, "check_page_numbers", lambda *given: checks.append(given))
    q, pool = torch.randn(1, 1, 2, 8), torch.randn(4, 4, 2, 8)
    pages, mask = torch.tensor([[1, 3]], dtype=torch.int32), masks.lengths([6])

    def call(pool: torch.Tensor = pool) -> int:
        undivided.attention(q, pool, pool, layout="bshd", mask=mask, pages=pages)
        return len(checks)

    assert [call(), call()] == [1, 1]
    pages[0, 0] = 2
    assert [call(), call()] == [2, 2]
    assert call(torch.randn(5, 4, 2, 8)) == 3


def test_keys_in_pages_are_as_many_as_the_pages_of_a_sequence_hold() -> None:
    q, pool, pages = torch.randn(2, 1, 2, 8), torch.randn(9, 4, 2, 8), torch.zeros(2, 3, dtype=torch.int32)
    mask = masks.lengths([6, 12])
    assert undivided.explain(q, pool, pool, layout="bshd", mask=mask, pages=pages).problem.kv_len == 12


@pytest.mark.parametrize("number", [4, -1])
def test_each_document_may_use_only_pages_that_exist(number: int) -> None:
    """Two documents of 6 and 3 keys in pages of 4, so that the second page of the second document is not used."""
    q, pool = torch.randn(3, 2, 8), torch.randn(4, 4, 2, 8)
    pages = torch.tensor([[1, 3], [2, number]], dtype=torch.int32)
    mask = masks.documents([0, 2, 3], [0, 6, 9], padded_kv=[0, 8, 16])
    unused = undivided.attention(q, pool, pool, layout="thd", mask=mask, pages=pages)
    pages[1, 1] = 0
    assert torch.equal(undivided.attention(q, pool, pool, layout="thd", mask=mask, pages=pages), unused)
    pages[0, 1] = number
    with pytest.raises(InputError, match="pages"):
        undivided.attention(q, pool, pool, layout="thd", mask=mask, pages=pages)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_last_axis_with_gaps_is_a_feature_of_the_problem(name: str) -> None:
    def features(size: int) -> frozenset[str]:
        x = {other: torch.randn(1, 4, 2, size) for other in "qkv"}
        x[name] = torch.randn(1, 4, 2, 2 * size)[..., ::2]
        return undivided.explain(**x, layout="bshd").problem.features

    assert "strided" in features(8)
    assert "strided" not in features(1), "a stride that no step uses"


def test_a_mask_is_checked_anew_for_each_problem_also_if_the_cache_of_problems_is_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result of the check is found by the id of the problem's entry, which must not be used again for another."""
    monkeypatch.setattr(normalise._problems, "most", 0)
    mask = masks.causal()
    for n in range(1, 60):
        x = torch.randn(1, n, 2, 8)
        assert undivided.explain(x, x, x, layout="bshd", mask=mask).problem.q_len == n
