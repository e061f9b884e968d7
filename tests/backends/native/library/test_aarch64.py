"""The native kernel's contract on 64-bit ARM, in an emulator: the levels neon and neon_bf16, on one and two threads.

UNDIVIDED_AARCH64=all (scripts/aarch64) runs every case; by default a few cases run. Nothing is measured: the time of an
emulated program says nothing about a processor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import emulated
import levels
import pytest
import stored_numbers
import torch
from difficult_rows import difficult_rows
from torch import Tensor

import undivided
from undivided.backends import get
from undivided.cache._storage import NewTokens, Storage, TokenSpec
from undivided.kernels import cpu
from undivided.quantization import FORMATS, Format
from undivided.verification import contract, runs
from undivided.verification.cases import CASES

MISSING = emulated.missing()
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.slow,  # compiles three levels
]

SELECTION = (
    "lengths-67-by-129",
    "head-size-17",
    "mla-latents-decode",
    "causal-bottom-right-chunked-prefill",
    "lengths-decode-gqa",
    "documents-window-thd-gqa",
    "dense-with-holes",
    "everything-together",
    "dropout-thd",
    "paged-thd-mixed-prefill-and-decode",
    "int8-thd-paged-mixed",
    "fp8_e4m3-prefill-causal",
    "int4-paged-decode",
)
NAMES = list(CASES) if os.environ.get("UNDIVIDED_AARCH64") == "all" else SELECTION


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return emulated.build(tmp_path_factory.mktemp("aarch64"))


@pytest.fixture(scope="module")
def libraries(programs: tuple[Path, Path]) -> Iterator[dict[str, emulated.EmulatedLibrary]]:
    found = {level: emulated.EmulatedLibrary(*programs, level) for level in emulated.LEVELS[1:]}
    yield found
    for library in found.values():
        library.close()


def test_the_processor_selects_the_level(programs: tuple[Path, Path]) -> None:
    for processor, requested, level in (
        ("max", "", "neon_bf16"),
        ("max", "neon", "neon"),
        ("max", "generic", "generic"),
        ("cortex-a57", "", "neon"),
        ("cortex-a57", "neon_bf16", "neon"),
    ):
        library = emulated.EmulatedLibrary(*programs, requested, processor)
        assert library.level == level
        library.close()


@pytest.mark.parametrize("name", NAMES)
def test_every_case_is_within_its_budget_and_equal_on_any_number_of_threads(
    libraries: dict[str, emulated.EmulatedLibrary], name: str
) -> None:
    case = CASES[name]
    for dtype in case.dtypes:
        if dtype == torch.float64:
            continue
        _, trial = contract.build_case_trial(case, dtype)
        for level, library in libraries.items():
            outcomes = []
            for threads in (1, 2):
                before = library.calls
                with levels.running_library(library, threads):
                    outcomes.append(runs.run(get("native"), trial).rows)
            assert library.level == level
            assert outcomes[0] or name.startswith("last-axis-strided"), (level, dtype)
            assert library.calls > before or not outcomes[0]
            wrong = [f"{row.quantity}: {row.error:.2e} of {row.budget:.2e}" for row in outcomes[0] if not row.ok]
            assert not wrong, (level, dtype, wrong)
            errors = [[(row.quantity, row.error) for row in some] for some in outcomes]
            assert errors[1] == errors[0], (level, dtype)


def test_matrix_products_give_the_bits_of_dot_products(libraries: dict[str, emulated.EmulatedLibrary]) -> None:
    """Three columns of V take BFDOT, and 64 take BFMMLA."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, 64).bfloat16() for length in (70, 40, 40))
    with levels.running_library(libraries["neon_bf16"], 1):
        narrow = undivided.attention(q, k, v[..., :3].contiguous(), layout="bhsd", backend="native")
        wide = undivided.attention(q, k, v, layout="bhsd", backend="native")
    assert torch.equal(narrow, wide[..., :3])


def test_a_head_of_more_tokens_than_a_panel_has_rows_stays_in_its_memory(
    libraries: dict[str, emulated.EmulatedLibrary],
) -> None:
    """A panel has 12 rows on ARM; small heads of bf16 with dot products have up to 16 tokens on other processors."""
    torch.manual_seed(0)
    for tokens in (12, 13, 16):
        q, k, v = (torch.randn(1, 2, tokens, 64).bfloat16() for _ in range(3))
        exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
        for library in libraries.values():
            with levels.running_library(library, 1):
                out = undivided.attention(q, k, v, layout="bhsd", backend="native")
            assert (out.double() - exact).norm() < 4e-3 * exact.norm(), (library.level, tokens)


@pytest.mark.parametrize("format", [None, *FORMATS])
def test_keys_and_values_are_decoded_whatever_their_format_and_shape(
    libraries: dict[str, emulated.EmulatedLibrary], format: Format | None
) -> None:
    for library in libraries.values():
        with levels.running_library(library, 1):
            for heads in (1, 2, 4, 7):
                for size, keys in (((64, 96), 21), ((128, 32), 70)):
                    stored_numbers.decode(format, heads, size, keys)
                if format != "int4":
                    stored_numbers.decode(format, heads, (20, 44), 19)
            if format in stored_numbers.BYTES:
                for heads in (1, 2, 4):
                    stored_numbers.read_values(heads, format, torch.float32)
                stored_numbers.read_keys(2, format)


@pytest.mark.parametrize("format", [None, *FORMATS])
def test_new_tokens_have_the_bits_of_their_definition(
    libraries: dict[str, emulated.EmulatedLibrary], format: Format | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        k, v = (difficult_rows((2, 9, 3, 64), dtype, seed) for seed in range(2))
        spec = TokenSpec.checked(3, 64, 64, dtype, quantize=format)

        def written(library: object, k: Tensor = k, v: Tensor = v, spec: TokenSpec = spec) -> list[Tensor]:
            storage = Storage(5, 8, spec, torch.device("cpu"))
            for part in storage._all_pools:
                part.view(torch.uint8).zero_()
            with monkeypatch.context() as patched:
                patched.setattr(cpu, "load", lambda: library)
                storage.write(storage.rows(list(range(3, 39, 2))), NewTokens(k, v, (9, 9), False))
            parts = (part.nan_to_num(1e38) if part.dtype == torch.float32 else part for part in storage._all_pools)
            return [part.view(torch.uint8) for part in parts]

        expected = written("no library")
        for level, library in libraries.items():
            calls = library.calls
            assert all(map(torch.equal, written(library), expected)), (level, dtype)
            assert library.calls == calls + 1
