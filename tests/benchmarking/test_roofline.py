"""The roofline model: its parts follow from sizes and peaks, and each case that it covers has a prediction."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from undivided import masks
from undivided.benchmarking import roofline
from undivided.benchmarking.catalogue import benchmarks
from undivided.benchmarking.roofline import LEVELS, Prediction, Rates, case_predictions, decode, prefill

RATES = Rates(products=2e11, vectors=2e11, reads=4e10)
LEVEL = LEVELS["avx512"]
REPORT = Path(__file__).parents[2] / "benchmarks/2026-11-23-native-zen5-avx512-bf16.json"


def terms(lengths: list[int], rates: Rates = RATES, **options: Any) -> dict[str, float]:
    options = {"causal": False, **options}
    return dict(prefill(lengths, 2, 64, 128, LEVEL, rates, **options).terms)


class TestPrefill:
    def test_products_are_the_operations_of_the_allowed_pairs_at_the_peak(self) -> None:
        assert terms([480])["products"] == pytest.approx(2 * 2 * 480 * 480 * (64 + 128) / 2e11)
        assert terms([480], causal=True)["products"] == pytest.approx(2 * 2 * (480 * 481 // 2) * (64 + 128) / 2e11)

    def test_a_softmax_costs_its_instructions_at_the_rate_of_multiply_adds(self) -> None:
        per_pair = 2 * (LEVEL.softmax + 128 / roofline.KEY_BLOCK) / 2e11
        assert terms([480])["softmax"] == pytest.approx(2 * 480 * 480 * per_pair)
        slower = terms([480], RATES._replace(vectors=1e11))
        assert slower["softmax"] == pytest.approx(2 * terms([480])["softmax"])
        assert slower["products"] == terms([480])["products"], "tiles do not slow with the vectors"

    def test_rows_that_fill_their_vectors_have_no_edges_without_a_mask(self) -> None:
        assert terms([480])["edges"] == 0
        assert terms([481])["edges"] > 0

    def test_the_shorter_the_documents_the_larger_their_edges(self) -> None:
        shares = []
        for length in (1024, 256, 64, 16):
            found = terms([length] * (1024 // length), causal=True)
            shares.append(found["edges"] / found["products"])
        assert shares == sorted(shares)
        assert shares[-1] > 0.5

    @pytest.mark.parametrize(("rows", "padded", "keys"), [(1, 1, 1), (16, 16, 8), (48, 16, 1), (8, 8, 4)])
    @pytest.mark.parametrize("left", [None, 0, 5, 100])
    @pytest.mark.parametrize("causal", [False, True])
    def test_computed_pairs_are_those_of_a_brute_force_count(
        self, rows: int, padded: int, keys: int, left: int | None, causal: bool
    ) -> None:
        length = 77
        i, j = torch.arange(length)[:, None], torch.arange(length)[None]
        allowed = (j <= i if causal else j >= 0) & (j >= i - length if left is None else j >= i - left)
        total = 0
        for first in range(0, length, rows):
            seen = allowed[first : first + rows].any(0).nonzero().flatten()
            span = int(seen.max() - seen.min()) + 1
            count = min(rows, length - first)
            total += -(-count // padded) * padded * (-(-span // keys) * keys)
        assert roofline._pairs(length, rows, padded, keys, causal, left) == total

    def test_memory_is_each_tensor_once_and_the_result_twice(self) -> None:
        assert terms([480])["memory"] == pytest.approx(480 * 2 * (64 + 64 + 128 + 2 * 128) * 4 / 4e10)
        assert terms([480], sixteen_bit=True)["memory"] == pytest.approx(terms([480])["memory"] / 2)

    def test_only_sixteen_bit_types_pack(self) -> None:
        assert terms([480])["packing"] == 0
        found = terms([512], sixteen_bit=True)
        assert found["packing"] / found["products"] == pytest.approx(LEVEL.packing / 512)


class TestDecode:
    def test_the_slower_of_reading_and_multiplying_counts(self) -> None:
        assert decode(4e9, 1e9, RATES).seconds == pytest.approx(0.1)
        assert decode(4e9, 1e9, RATES).bound == "reads"
        assert decode(4e6, 2e11, RATES) == Prediction({"reads": 1e-4, "products": 1.0}, overlap=True)
        assert decode(4e6, 2e11, RATES).bound == "products"


class TestBound:
    @pytest.mark.parametrize(
        ("found", "bound"),
        [
            ({"products": 0.95, "softmax": 0.05, "memory": 0.0}, "products"),
            ({"products": 0.80, "softmax": 0.05, "memory": 0.15}, "memory"),
            ({"products": 0.89, "softmax": 0.06, "memory": 0.05}, "softmax"),
        ],
    )
    def test_parts_other_than_products_count_from_a_tenth_on(self, found: dict[str, float], bound: str) -> None:
        assert Prediction(found).bound == bound


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    if not REPORT.exists():
        pytest.skip("needs the reports of a checkout")
    found: dict[str, Any] = json.loads(REPORT.read_text(encoding="utf-8"))
    return found


class TestReport:
    def test_every_forward_window_document_and_decoding_case_has_a_line(self, report: dict[str, Any]) -> None:
        found = {case.name: case for case in case_predictions(report)}
        covered = [
            one.name
            for suite in ("forward", "mask", "decode")
            for one in benchmarks(suite)
            if roofline.kind_of(one) is not None
        ]
        measured = {case["name"] for case in report["cases"]}
        assert set(found) == set(covered) & measured
        assert {case.kind for case in found.values()} == {"prefill", "window", "documents", "decode"}

    def test_the_allowed_pairs_are_those_that_the_report_counted(self, report: dict[str, Any]) -> None:
        for case in case_predictions(report):
            if not case.predicted.overlap:
                assert case.predicted.terms["products"] == pytest.approx(case.peak), case.name

    def test_the_model_expects_no_call_to_be_slower_than_it_is(self, report: dict[str, Any]) -> None:
        """What it leaves out only adds time, so on a processor without matrix units it is a lower bound."""
        for case in case_predictions(report):
            if not case.disturbed:
                assert case.ratio > 0.97, case.name

    def test_levels_and_dtypes_that_are_not_modelled_have_no_line(self, report: dict[str, Any]) -> None:
        generic = {**report, "machine": {**report["machine"], "native": "generic"}}
        assert not list(case_predictions(generic))
        tiles = {**report, "machine": {**report["machine"], "native": "amx"}}
        assert not [case for case in case_predictions(tiles) if case.kind != "decode" and case.name.startswith("fp32")]

    def test_documents_are_found_in_their_mask(self) -> None:
        """The lengths follow from the ranges of the mask; here they are compared with how the benchmark draws them."""
        draw = torch.Generator().manual_seed(0)
        offsets = [0]
        while offsets[-1] < 8192:
            offsets.append(offsets[-1] + int(torch.randint(16, 129, (), generator=draw)))
        offsets[-1] = 8192
        lengths = [after - first for first, after in itertools.pairwise(offsets)]
        one = next(one for one in benchmarks("mask") if one.name == "fp32-documents-16-128")
        assert roofline._predict_prefill(one, LEVEL, RATES) == prefill(lengths, 8, 128, 128, LEVEL, RATES, causal=True)
        assert isinstance(one.case.mask(), masks.Mask)  # type: ignore[misc]
