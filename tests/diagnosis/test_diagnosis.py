"""`diagnose`: every known error is recognised in reported messages, and provoked for real if a CPU can."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from provoked_errors import FIELD, ids, q, raised
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import undivided
from undivided.diagnosis._entry import Entry
from undivided.diagnosis._page import page
from undivided.diagnosis.entries import TABLE

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


FRAMES = """\
Traceback (most recent call last):
  File "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1751, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "model.py", line 203, in attention
    output = self.attention(xq, xk, xv, attn_mask)
"""


def only(*kernels: SDPBackend) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with sdpa_kernel(list(kernels)):
            return sdpa(*arguments, **options)

    return call


def twice() -> Any:
    x = q(requires_grad=True)
    (gradient,) = torch.autograd.grad(sdpa(x, x, x, is_causal=True).sum(), x, create_graph=True)
    return gradient.sum().backward()


def forward_mode() -> Any:
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(q(), q())
        return sdpa(x, x, x)


def jagged(call: Callable[..., Any], **options: Any) -> Any:
    x = torch.nested.nested_tensor([q(3, 8, 16), q(5, 8, 16)], layout=torch.jagged).transpose(1, 2)
    return call(x, x, x, **options)


def strided_nested() -> Any:
    x = torch.nested.nested_tensor([q(3, 8, 16), q(5, 8, 16)]).transpose(1, 2)
    return sdpa(x, x, x, is_causal=True)


def varlen() -> Any:
    offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    return varlen_attn(q(10, 8, 64), q(10, 8, 64), q(10, 8, 64), offsets, offsets, 7, 7)


def other_lengths() -> Any:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    return flex_attention(q(1, 1, 256, 16), q(1, 1, 256, 16), q(1, 1, 256, 16), block_mask=mask)


def mha(*shape: int, **options: Any) -> Any:
    return torch.nn.MultiheadAttention(16, 4, batch_first=True)(q(*shape), q(*shape), q(*shape), **options)


MASK = torch.ones(4, 4, dtype=torch.bool).tril()


PROVOKED: list[tuple[str, Callable[[], Any]]] = [
    ("sdpa-head-count", lambda: sdpa(q(), q(1, 2, 4, 16), q(1, 2, 4, 16))),
    ("sdpa-head-count", lambda: sdpa(q(2, 8, 4, 16), q(2, 8, 4, 16), q(2, 8, 4, 16), MASK[None].repeat(2, 1, 1))),
    ("sdpa-gqa-divide", lambda: sdpa(q(), q(1, 3, 4, 16), q(1, 3, 4, 16), enable_gqa=True)),
    ("sdpa-mask-and-causal", lambda: only(SDPBackend.MATH)(q(), q(), q(), MASK, is_causal=True)),
    ("sdpa-mask-dtype", lambda: sdpa(q(), q(), q(), MASK.long())),
    ("sdpa-mask-shape", lambda: sdpa(q(), q(), q(), torch.ones(5, 7, dtype=torch.bool))),
    ("sdpa-dtypes", lambda: sdpa(q(), q().bfloat16(), q())),
    ("sdpa-devices", lambda: sdpa(q(), q().to("meta"), q())),
    ("sdpa-head-size", lambda: sdpa(q(), q(1, 8, 4, 32), q(1, 8, 4, 32))),
    ("sdpa-no-kernel", lambda: only(SDPBackend.FLASH_ATTENTION)(q(), q(), q(), dropout_p=0.1)),
    ("sdpa-no-viable-backend", lambda: only(SDPBackend.EFFICIENT_ATTENTION)(q(), q(), q())),
    ("sdpa-double-backward", twice),
    ("sdpa-forward-ad", forward_mode),
    ("sdpa-fp8", lambda: sdpa(*(q().to(torch.float8_e4m3fn) for _ in range(3)))),
    ("varlen-on-cpu", varlen),
    ("mha-mask-shape", lambda: mha(2, 4, 16, attn_mask=torch.zeros(3, 3, dtype=torch.bool))),
    ("mha-embedding", lambda: mha(2, 4, 8)),
    ("mha-causal-hint", lambda: mha(2, 4, 16, is_causal=True)),
    ("flex-cpu-backward", lambda: flex_attention(q(requires_grad=True), q(), q())),
    ("flex-heads", lambda: flex_attention(q(), q(1, 2, 4, 16), q(1, 2, 4, 16))),
    ("flex-rank", lambda: flex_attention(q(8, 4, 16), q(8, 4, 16), q(8, 4, 16))),
    ("flex-head-sizes", lambda: flex_attention(q(), q(1, 8, 4, 8), q(1, 8, 4, 8))),
    ("flex-block-mask-size", other_lengths),
    ("flex-nested", lambda: jagged(flex_attention)),
    ("nested-causal", lambda: only(SDPBackend.MATH)(*[strided()] * 3, is_causal=True)),
    ("nested-contiguous", strided_nested),
    ("undivided-input", lambda: undivided.attention(q(), q(1, 3, 4, 16), q(1, 3, 4, 16), layout="bhsd")),
    ("undivided-no-backend", lambda: undivided.attention(q(), q(), q(), layout="bhsd", backend="cudnn")),
]


def strided() -> torch.Tensor:
    return torch.nested.nested_tensor([q(8, 3, 16), q(8, 5, 16)])


def entries() -> Any:
    return pytest.mark.parametrize("entry", TABLE, ids=lambda entry: entry.id)


class TestTable:
    def test_ids_are_unique(self) -> None:
        assert len({entry.id for entry in TABLE}) == len(TABLE)
        assert len(TABLE) >= 40

    @entries()
    def test_its_example_is_recognised_first(self, entry: Entry) -> None:
        assert ids(undivided.diagnose(entry.example))[0] == entry.id

    @entries()
    def test_its_example_is_recognised_in_a_traceback(self, entry: Entry) -> None:
        assert ids(undivided.diagnose(FRAMES + entry.example))[0] == entry.id

    @entries()
    def test_every_field_has_a_text(self, entry: Entry) -> None:
        words = entry.to_dict()
        assert all(words.values()), words
        assert entry.cause.endswith((".", ")"))
        assert "undivided." in entry.call
        assert max(map(len, entry.call.splitlines())) <= 74

    @entries()
    def test_its_snippet_runs(self, entry: Entry) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(entry.snippet, entry.id, "exec"), {})

    def test_page_is_up_to_date(self) -> None:
        assert PAGE.read_text() == page(), "python -m undivided.diagnosis > docs/troubleshooting.md"


class TestField:
    @pytest.mark.parametrize(("name", "call"), PROVOKED, ids=[name for name, _ in PROVOKED])
    def test_provoked_error(self, name: str, call: Callable[[], Any]) -> None:
        if name == "flex-cpu-backward" and torch.__version__ < "2.11":
            pytest.skip("PyTorch 2.10 computes these gradients, uncompiled")
        error = raised(call)
        assert ids(undivided.diagnose(error))[0] == name
        assert ids(undivided.diagnose(f"{type(error).__module__}.{type(error).__name__}: {error}"))[0] == name

    @pytest.mark.parametrize("name", FIELD)
    def test_traceback_of_the_field(self, name: str) -> None:
        assert ids(undivided.diagnose(FIELD[name]))[0] == name

    @pytest.mark.parametrize(
        "text",
        [
            "KeyError: 'x'",
            FRAMES.replace("attention", "forward").replace("attn_", "")
            + "RuntimeError: The size of tensor a (3) must match the size of tensor b (9) at non-singleton dimension 1",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            '  File "x.py", line 3, in f\n    nan = mask.float().mean()  # nan where the mask is empty\nIndexError: 3',
            "RuntimeError: size mismatch for lm_head.weight: copying a param with shape torch.Size([3, 4])",
        ],
        ids=["unrelated", "broadcast", "memory", "access", "code-in-a-frame", "checkpoint"],
    )
    def test_errors_of_other_code_do_not_match(self, text: str) -> None:
        answer = undivided.diagnose(text)
        assert not answer.known, ids(answer)
        assert "NVTE_DEBUG_LEVEL=2" in str(answer)
        assert "undivided doctor" in str(answer)


class TestValues:
    @pytest.mark.parametrize(
        ("text", "fact"),
        [
            (
                FIELD["te-cp-only"] + "\nseq_length=16534 cudnn 8.9.7",
                "Length 16534 is 22 over a multiple of 64 (the next",
            ),
            (FIELD["te-cp-only"] + "\nseq_length=16534 cudnn 8.9.7", "cuDNN 8.9.7 refuses it"),
            (
                FIELD["te-cp-only"] + "\nseq_length=16544 cudnn 8.9.7",
                "16544 is 32 over a multiple of 64 (the next is 16576)",
            ),
            (FIELD["te-no-backend"], "The log says: Disabling FusedAttention as no backend supports"),
            (FIELD["sdpa-no-kernel"], "PyTorch says: Flash Attention does not support non-null attn_mask."),
            (FIELD["cudnn-execution-failed"], "a library problem"),
            (FIELD["flash-undefined-symbol"], "changed in PyTorch 2.3"),
            (FIELD["attention-out-of-memory"], "32 heads up to length 11,585"),
            (FIELD["xformers-no-operator"], "fa3F: requires device with capability <= (9, 0)"),
            (
                "AssertionError: Sequence length per GPU needs to be divisible by 2! seq_len 4098, cp_size=4",
                "Length 4098 is not a multiple of 2 * 4 ranks = 8; the next is 4104.",
            ),
            ("tensor a (32) must match the size of tensor b (8) at non-singleton dimension 1", "4 query heads per key"),
            ("tensor a (16) must match the size of tensor b (12) at non-singleton dimension 1", "does not divide"),
            (
                "NYI: Currently non power of 2 embedding dimension are not supported. Got E=72 and Ev=72",
                "power of 2 is 128",
            ),
        ],
    )
    def test_values_in_the_text_give_facts(self, text: str, fact: str) -> None:
        if text.startswith("tensor a"):
            text = f"RuntimeError: The size of {text}"
        assert fact in " ".join(undivided.diagnose(text).findings[0].facts)

    def test_length_is_no_reason_for_a_newer_cudnn(self) -> None:
        answer = undivided.diagnose(FIELD["te-cp-only"] + "\nseq_length=16534 cudnn 9.1.0")
        assert answer.findings[0].facts == ()

    @pytest.mark.parametrize(
        ("text", "seen"),
        [
            ("CuDNN (v90100 70)", {"cuDNN": "9.1.0"}),
            ("cudnn_version: 8907", {"cuDNN": "8.9.7"}),
            (
                "torch==2.3.0 flash-attn: 2.5.7 sm_86",
                {"torch": "2.3.0", "flash-attn": "2.5.7", "compute capability": "8.6"},
            ),
            ("head_dim_qk=192, max_seqlen_q: 4096", {"length": "4096", "head size": "192"}),
            ("query : shape=(1, 257, 6, 64)", {"shape": "[1, 257, 6, 64]"}),
        ],
    )
    def test_versions_and_sizes_are_read(self, text: str, seen: dict[str, str]) -> None:
        assert dict(undivided.diagnose(f"unknown {text}").observed) == seen

    def test_hint_of_our_own_error_is_passed_on(self) -> None:
        error = raised(lambda: undivided.attention(q(1, 4, 8, 16), q(1, 4, 3, 16), q(1, 4, 3, 16), layout="bshd"))
        assert isinstance(error, undivided.InputError)
        assert f"Its HINT: {error.hint}." in undivided.diagnose(error).findings[0].facts
