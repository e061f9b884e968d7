"""Selection on described GPUs: the limits of other libraries' kernels on sizes, dtypes, layouts and masks, as a table.

Each row is a machine and a problem; a backend that is not named in it can run. Nothing here needs a GPU. What is added
to the scores (biases, sinks, dropout) is in `test_gpu_selection_of_scores.py`.
"""

from __future__ import annotations

import pytest
import torch
from calls import problem_of
from described_gpus import (
    A100,
    A100_OLD,
    ALL,
    B200,
    BARE_H100,
    CU,
    DOCUMENTS,
    FULL,
    H100,
    PACKAGES,
    RTX4090,
    SQUARE,
    T4,
    Row,
    ask,
    ask_pages,
    check_row,
    described,
)

from undivided import masks
from undivided.backends import all_backends, cudnn, flash_attn, torch_cudnn, torch_efficient
from undivided.backends._base import Backend
from undivided.backends.shared import cudnn_rules
from undivided.machine import Machine

NO_WINDOW_IN = {"torch_efficient": ["sliding window (its backward"], "torch_cudnn": ["sliding window (PyTorch"]}
TABLE = [
    Row(
        "16534-not-a-multiple-of-64-cudnn-8.9.7",
        A100_OLD, ask((48, 16534, 18, 128), mask=masks.causal(), grad=True), "flash_attn",
        {
            "torch_cudnn": ["cuDNN 8.9.7 (min 9.0)", "query length 16534 is not a multiple of 64", "key length 16534"],
            "cudnn": [
                "query length 16534 is not a multiple of 64 (cuDNN 8.9.7; any length from 9.0)",
                "key length 16534 is not a multiple of 64 (cuDNN 8.9.7; any length from 9.0)",
            ],
        },
    ),
    Row("16534-cudnn-9", A100, ask((48, 16534, 18, 128), mask=masks.causal(), grad=True), "flash_attn", {}),
    Row("plain-h100", H100, ask(SQUARE, mask=masks.causal(), grad=True), "cudnn", {}),
    Row("plain-b200", B200, ask(SQUARE, mask=masks.causal(), grad=True), "cudnn", {}),
    Row(
        "nothing-installed-h100", BARE_H100, ask(SQUARE, mask=masks.causal()), "torch_flash",
        {
            "flash_attn": ["flash-attn 3: flash_attn_3 3 or later is not installed"],
            "torch_cudnn": ["cuDNN 9.0 or later is not installed"],
            "cudnn": ["cudnn_frontend 1.14 or later is not installed", "cuDNN 8.9.3 or later is not installed"],
            "flex": ["triton is not installed"],
        },
    ),
    Row(
        "one-query-training-h100", H100, ask((2, 1, 16, 128), kv_len=512, grad=True), "cudnn",
        {"torch_cudnn": ["gradients for one query on compute capability 9.x"]},
    ),
    Row(
        "one-query-b200", B200, ask((2, 1, 16, 128), kv_len=512), "flash_attn",
        {name: ["one query on compute capability 10.0 (cuDNN 9.20.0 computes wrong"] for name in ("torch_cudnn", "cudnn")},
    ),
    Row(
        "gqa-h100", H100, ask(SQUARE, kv_heads=2, mask=masks.causal(), grad=True), "cudnn",
        {"torch_efficient": ["fewer key/value heads than query heads (its kernel"]},
    ),
    Row(
        "mla-192-128-h100-inference", H100, ask((2, 4096, 16, 192), v_dim=128, mask=masks.causal()), "cudnn",
        {"torch_flash": ["a value head size other than the query's"]},
    ),
    Row(
        "mla-192-128-a100-training",
        A100, ask((2, 4096, 16, 192), v_dim=128, mask=masks.causal(), grad=True), "torch_efficient",
        {
            "flash_attn": ["flash-attn 2: no support for a value head size other than the query's"],
            "torch_flash": ["a value head size other than the query's"],
            "torch_cudnn": ["head_dim=192, value_dim=128 (max 128 with gradients; cuDNN 9.8.0 on compute capability 8.0)"],
            "cudnn": ["head_dim=192, value_dim=128 (max 128 with gradients"],
        },
    ),
    Row(
        "head-dim-320-h100", H100, ask((2, 4096, 16, 320), mask=masks.causal(), grad=True), "torch_efficient",
        {
            "flash_attn": ["flash-attn 3: head_dim=320 (max 256)", "flash-attn 2: head_dim=320 (max 256)"],
            "torch_flash": ["head_dim=320 (max 256)"],
            "torch_cudnn": ["head_dim=320 (max 256 with gradients"],
            "cudnn": ["head_dim=320 (max 256 with gradients"],
        },
    ),
    Row(
        "head-dim-256-b200-training", B200, ask((2, 4096, 16, 256), grad=True), "flash_attn",
        {"torch_cudnn": ["256 with gradients from 9.23"], "cudnn": ["256 with gradients from 9.23", "frontend from 1.24"]},
    ),
    Row("head-dim-224-rtx4090-inference", RTX4090, ask((2, 512, 16, 224)), "flash_attn", {
        "torch_cudnn": ["head_dim=224 (max 128, any without gradients from 9.10.2"], "cudnn": ["head_dim=224 (max 128"],
    }),
    Row(
        "head-dim-224-rtx4090-training", RTX4090, ask((2, 512, 16, 224), grad=True), "torch_efficient",
        {
            "flash_attn": ["flash-attn 2: head_dim=224 (gradients on compute capability 8.9 only up to 192 or above 224)"],
            "torch_flash": ["head_dim=224 (gradients on compute capability 8.9"],
            "torch_cudnn": ["head_dim=224 (max 128 with gradients"], "cudnn": ["head_dim=224 (max 128 with gradients"],
        },
    ),
    Row(
        "fp32-h100", H100, ask(SQUARE, dtype=FULL, mask=masks.causal(), grad=True), "torch_efficient",
        {
            "flash_attn": ["flash-attn 3: dtype=float32", "flash-attn 2: dtype=float32"],
            "torch_flash": ["dtype=float32 (supports bfloat16, float16)"],
            "torch_cudnn": ["dtype=float32"], "cudnn": ["dtype=float32"],
        },
    ),
    Row(
        "fp16-t4", T4, ask(SQUARE, dtype=torch.float16, mask=masks.causal(), grad=True), "torch_efficient",
        {
            "flash_attn": ["is not installed", "compute capability 7.5 (min 8.0)"],
            "torch_flash": ["compute capability 7.5 (min 8.0)"],
            "torch_cudnn": ["compute capability 7.5 (min 8.0)"],
            "cudnn": ["is not installed", "compute capability 7.5 (min 8.0)"],
        },
    ),
    Row(
        "top-left-cross-attention-a100", A100, ask(SQUARE, kv_len=8192, mask=masks.causal("top_left")), "torch_cudnn",
        {"flash_attn": ["top-left alignment"], "torch_flash": ["top-left alignment"]},
    ),
    Row(
        "bottom-right-cross-attention-a100", A100, ask(SQUARE, kv_len=8192, mask=masks.causal("bottom_right")), "flash_attn",
        {"torch_cudnn": ["bottom-right alignment"]},
    ),
    Row(
        "bottom-right-more-queries-than-keys-h100",
        H100, ask(SQUARE, kv_len=100, mask=masks.causal("bottom_right")), "flash_attn",
        {
            "torch_cudnn": ["bottom-right alignment"], "cudnn": ["more queries than keys (at most as many)"],
            "torch_efficient": ["more queries than keys"],
        },
    ),
    Row("window-h100", H100, ask(SQUARE, mask=masks.window(512, 0), grad=True), "cudnn", NO_WINDOW_IN),
    Row(
        "window-cudnn-9.8-not-causal", A100, ask(SQUARE, mask=masks.window(512, 512)), "flash_attn",
        NO_WINDOW_IN | {"cudnn": ["a window that is not causal (cuDNN 9.8.0; from 9.10.2)"]},
    ),
    Row(
        "thd-causal-h100", H100, ask((1, 4096, 16, 128), layout="thd", mask=DOCUMENTS & masks.causal(), grad=True), "cudnn",
        {"torch_cudnn": ["gradients of packed documents (PyTorch's operator uses the head size"]},
    ),
    Row(
        "thd-causal-sm80",
        A100, ask((1, 4096, 16, 128), layout="thd", mask=DOCUMENTS & masks.causal(), grad=True), "flash_attn",
        {
            "torch_cudnn": ["packed documents on compute capability 8.0 (min 9.0)", "gradients of packed documents"],
            "cudnn": ["packed documents on compute capability 8.0 (min 9.0)"],
        },
    ),
    Row(
        "fp32-one-key-h100", H100, ask((2, 64, 16, 128), kv_len=1, dtype=FULL, grad=True), "reference",
        {
            "torch_efficient": ["float32 gradients with a single key"],
            "flash_attn": ["flash-attn 3: dtype=float32", "flash-attn 2: dtype=float32"],
            "torch_flash": ["dtype=float32"], "torch_cudnn": ["dtype=float32", "key length 1"],
            "cudnn": ["dtype=float32", "key length 1"],
        },
    ),
    Row(
        "thd-fp32-a100", A100, ask((1, 4096, 16, 128), dtype=FULL, layout="thd", mask=DOCUMENTS & masks.causal(), grad=True),
        "torch_efficient",
        {
            "flash_attn": ["flash-attn 2: dtype=float32"], "torch_flash": ["dtype=float32"],
            "torch_cudnn": ["dtype=float32", "packed documents on compute", "gradients of packed documents"],
            "cudnn": ["dtype=float32", "packed documents on compute"],
        },
    ),
    Row(
        "thd-fp16-bottom-right-t4", T4,
        ask((1, 4096, 16, 128), kv_len=8192, dtype=torch.float16, layout="thd",
            mask=masks.documents(CU, 2 * CU) & masks.causal("bottom_right"), grad=True), "torch_efficient",
        {
            "flash_attn": ["is not installed", "compute capability 7.5 (min 8.0)"],
            "torch_flash": ["compute capability 7.5 (min 8.0)"],
            "torch_cudnn": [
                "compute capability 7.5 (min 8.0)", "packed documents on compute", "bottom-right", "gradients of packed",
            ],
            "cudnn": ["is not installed", "compute capability 7.5 (min 8.0)", "packed documents on compute"],
        },
    ),
    Row(
        "thd-padded-between-h100", H100,
        ask((1, 4352, 16, 128), layout="thd", mask=masks.documents(CU, padded_q=torch.tensor([0, 1024, 4352])), grad=True),
        "cudnn",
        {
            "flash_attn": [
                "flash-attn 3: no support for documents with padding",
                "flash-attn 2: no support for documents with pad",
            ],
            "torch_flash": ["documents with padding between them"],
            "torch_efficient": ["documents with padding between them (its documents follow one another"],
            "torch_cudnn": ["documents with padding between them (PyTorch's offsets", "gradients of packed documents"],
        },
    ),
    Row(
        "padded-batch-training-h100", H100,
        ask(SQUARE, mask=masks.lengths(torch.tensor([4096, 77]), torch.tensor([4096, 77])), grad=True), "cudnn",
        {
            "flash_attn": [
                "flash-attn 3: no support for per-sequence lengths", "flash-attn 3: no support for per-sequence query lengths",
                "flash-attn 2: no support for per-sequence query lengths", "flash-attn 2: gradients with per-sequence lengths",
            ],
            "torch_flash": ["per-sequence lengths (PyTorch's operator", "per-sequence query lengths"],
            "torch_efficient": ["per-sequence lengths", "per-sequence query lengths"],
            "torch_cudnn": ["per-sequence lengths", "per-sequence query lengths"],
        },
    ),
    Row(
        "decode-against-a-cache-a100", A100,
        ask((2, 1, 16, 128), kv_len=4096, kv_heads=4, mask=masks.lengths(torch.tensor([77, 4096]))), "flash_attn",
        {
            "torch_flash": ["per-sequence lengths"], "torch_efficient": ["per-sequence lengths", "fewer key/value heads"],
            "torch_cudnn": ["per-sequence lengths"], "cudnn": ["per-sequence lengths for one query"],
        },
    ),
    Row(
        "pages-b200", B200, ask_pages(16), "reference",
        {name: ["paged", "per-seq"] for name in ("torch_flash", "torch_efficient")}
        | {
            "torch_cudnn": ["paged", "per-seq", "one query on compute capability 10.0"],
            "cudnn": ["one query on compute capability 10.0 (cuDNN 9.20.0 computes wrong attention"],
            "flash_attn": [
                "flash-attn 4: no support for paged", "flash-attn 4: no support for per-seq", "flash-attn 2: page_size=16",
            ],
            "flex": ["paged"],
        },
    ),
    Row(
        "pages-that-cudnn-does-not-read", described("l4", "9.4.0", {"cudnn_frontend": "1.23.0", "triton": "3.4.0"}),
        ask_pages(48, queries=2, mask=masks.window(9, 0, "top_left"), dim=256), "reference",
        {
            "torch_flash": ["paged", "per-seq", "top-left"],
            "torch_efficient": ["paged", "per-seq", "sliding"], "torch_cudnn": ["paged", "per-seq", "sliding", "head_dim=256"],
            "flash_attn": [
                "flash_attn 2.7.3 or later is not installed", "top-left", "windows with per-sequence lengths or pages",
                "page_size=48",
            ],
            "flex": ["paged"],
            "cudnn": [
                "paged keys with more than one query", "paged keys with window", "paged keys with top-left alignment",
                "page_size=48 (must be a power of two)", "head_dim=256 (max 128", "paged keys (cuDNN 9.4.0; from 9.5)",
                "paged keys with head sizes above 128", "paged keys on compute capability 8.9",
            ],
        },
    ),
    Row(
        "lse-gradient-b200", B200, ask(SQUARE, return_lse=True, grad=True), "flash_attn",
        {name: ["the gradient through the log-sum-exp"] for name in ("torch_flash", "torch_efficient", "torch_cudnn", "cudnn")},
    ),
    Row(
        "deterministic-backward-a100", A100, ask(SQUARE, deterministic=True, grad=True), "flash_attn",
        {
            "torch_cudnn": ["deterministic gradients (PyTorch's operator"],
            "cudnn": ["deterministic gradients on compute capability 8.0 (9.x, and 10.x from cuDNN 9.18.1)"],
        },
    ),
    Row(
        "deterministic-backward-h100", H100, ask(SQUARE, deterministic=True, grad=True), "cudnn",
        {"torch_cudnn": ["deterministic gradients (PyTorch's operator"]},
    ),
    Row(
        "predicate", H100, ask(SQUARE, mask=masks.predicate(lambda b, h, i, j: i >= j)), "reference",
        {name: ["a mask predicate"] * (2 if name == "flash_attn" else 1) for name in ALL if name != "flex"},
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.id)
def test_selection_on_a_described_machine(row: Row) -> None:
    check_row(row)


@pytest.mark.parametrize(
    ("version", "piece"),
    [
        ("9.10.0", "computes wrong attention (9.10.2 fixes it)"),
        ("9.6.0", "cuDNN 9.6.0 on compute capability 10.0 (min 9.7)"),
        ("9.14.0", "more than 1024 keys (cuDNN 9.14.0; 9.14.1 fixes it)"),
    ],
)
def test_cudnn_versions_that_are_known_to_be_wrong(version: str, piece: str) -> None:
    problem = ask(SQUARE, mask=masks.window(64, 64))
    machine = Machine.named("b200", version, PACKAGES)
    assert any(piece in reason for reason in cudnn_rules.reasons(problem, machine))


def test_flash_attn_versions_have_bounds() -> None:
    problem = ask(SQUARE)
    for version, piece in (("2.5.8", "flash_attn 2.5.8 (needs 2.7.3 or later)"), ("3.0", "must be before 3")):
        reasons = flash_attn.BACKEND.reasons(problem, Machine.named("a100", None, {"flash_attn": version}))
        assert any(piece in reason for reason in reasons), reasons
    on_blackwell = Machine.named("b200", None, {"flash_attn": "2.7.4"})
    assert any("before 2.8" in reason for reason in flash_attn.BACKEND.reasons(problem, on_blackwell))


def test_unavailable_names_what_is_missing() -> None:
    cpu = Machine(device="cpu")
    for backend in (flash_attn, torch_efficient, torch_cudnn, cudnn):
        assert backend.BACKEND.unavailable(cpu) == "no CUDA device"
        assert backend.BACKEND.how_to_get
    assert "none of flash-attn" in (flash_attn.BACKEND.unavailable(BARE_H100) or "")
    assert cudnn.BACKEND.unavailable(BARE_H100) == "cuDNN is not installed"
    assert cudnn.BACKEND.unavailable(H100) is None
    assert "AMD" in (cudnn.BACKEND.unavailable(Machine(device="cuda", hip=True)) or "")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("backend", all_backends(), ids=str)
def test_a_backend_says_on_which_devices_it_runs(backend: Backend, device: str) -> None:
    """The checks and benchmarks of a device run these backends."""
    q = torch.empty(1, 8, 2, 64, dtype=torch.bfloat16)
    reasons = backend.reasons(problem_of(q, q, q, layout="bshd", device=device), H100)
    assert backend.runs_on(device) is not any(reason.startswith(f"device={device} (runs on") for reason in reasons)


@pytest.mark.parametrize(("mask", "lse", "refused"), [
    (masks.causal(), True, True), (masks.causal(), False, False), (masks.window(9, 9), True, False),
])  # fmt: skip
def test_flash_attn_2_returns_no_log_sum_exp_of_causal_alibi(mask: masks.Mask, lse: bool, refused: bool) -> None:
    """Its kernel adds slope * j under a causal mask, which gives the same weights: its lse was returned as it is."""
    slopes = torch.empty(16, device="meta")
    problem = ask(SQUARE, mask=mask, alibi_slopes=slopes, return_lse=lse)
    reasons = flash_attn.BACKEND.reasons(problem, A100)
    assert any("the log-sum-exp of ALiBi under a causal mask" in reason for reason in reasons) == refused, reasons
