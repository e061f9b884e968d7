"""Rotary embeddings, compared with complex numbers, with the transformers library, and between formats."""

# ruff: noqa: E501 (tables of messages)

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary

import undivided
from undivided import InputError, RotaryPositionEmbedding, apply_rotary_pos_emb


def as_complex(t: Tensor, interleaved: bool) -> Tensor:
    """The pairs of the last axis as complex numbers [.., r]."""
    pairs = t.unflatten(-1, (-1, 2)) if interleaved else t.unflatten(-1, (2, -1)).transpose(-1, -2)
    return torch.view_as_complex(pairs.double().contiguous())


def as_channels(z: Tensor, interleaved: bool) -> Tensor:
    pairs = torch.view_as_real(z)
    return (pairs if interleaved else pairs.transpose(-1, -2)).flatten(-2)


def oracle(t: Tensor, positions: Tensor, size: int, interleaved: bool = False, base: float = 10000.0) -> Tensor:
    """Each pair times exp(i p w): t [.., h, d], positions the axes of t before h."""
    frequency = base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions.double()[..., None, None] * frequency)
    turned = as_channels(as_complex(t[..., :size], interleaved) * turn, interleaved)
    return torch.cat((turned, t[..., size:].double()), -1)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half-split", "interleaved"])
@pytest.mark.parametrize("percent", [1.0, 0.5], ids=["all", "partial"])
@pytest.mark.parametrize("start", [None, [3, 0]], ids=["from-0", "own-starts"])
@pytest.mark.parametrize("format", ["sbhd", "bshd", "thd"])
def test_pairs_rotate_like_complex_numbers(
    format: str, start: list[int] | None, percent: float, interleaved: bool
) -> None:
    """Forward and backward; positions count within each packed sequence."""
    rope = RotaryPositionEmbedding(12, percent, interleaved=interleaved)
    starts = None if start is None else torch.tensor(start)
    first = torch.zeros(2, dtype=torch.int64) if starts is None else starts
    cu_seqlens = None
    if format == "thd":
        t = torch.randn(7, 3, 12, dtype=torch.float64, requires_grad=True)
        cu_seqlens = torch.tensor([0, 2, 7], dtype=torch.int32)
        positions = torch.cat((torch.arange(2) + first[0], torch.arange(5) + first[1]))
    else:
        t = torch.randn(2, 5, 3, 12, dtype=torch.float64)
        t = (t.transpose(0, 1) if format == "sbhd" else t).requires_grad_()
        positions = first[:, None] + torch.arange(5)
        positions = positions.T if format == "sbhd" else positions
    out = apply_rotary_pos_emb(t, rope(16), format, starts, interleaved, cu_seqlens=cu_seqlens)
    wanted = oracle(t, positions, rope.dim, interleaved)
    torch.testing.assert_close(out, wanted, rtol=0, atol=3e-6)  # angles are fp32
    weight = torch.randn_like(out)
    (grad,) = torch.autograd.grad((out * weight).sum(), t)
    (wanted_grad,) = torch.autograd.grad((wanted * weight).sum(), t)
    torch.testing.assert_close(grad, wanted_grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    """Cosines in bf16 would add an error of up to 2^-9."""
    t = torch.randn(1, 300, 2, 64).to(dtype)
    out = apply_rotary_pos_emb(t, RotaryPositionEmbedding(64)(300), "bshd")
    assert out.dtype == dtype
    wanted = oracle(t, torch.arange(300)[None], 64)
    torch.testing.assert_close(
        out.double(), wanted, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-3 * torch.finfo(dtype).eps + 4e-5
    )


def test_a_score_depends_only_on_the_distance() -> None:
    rope = RotaryPositionEmbedding(32)
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64)

    def score(i: int, j: int) -> Tensor:
        at = [apply_rotary_pos_emb(x, rope(1, offset=n), "bshd") for x, n in ((q, i), (k, j))]
        return (at[0] * at[1]).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(score(7, 3), score(7, 4), rtol=1e-3)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 256,
    "short_factor": [1.0 + 0.01 * pair for pair in range(32)],
    "long_factor": [1.0 + 0.5 * pair for pair in range(32)],
    "factor": 32.0,
}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 256},
    "yarn": YARN,
    "yarn-betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn-attention-factor": YARN | {"attention_factor": 1.0},
    "yarn-mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8},
    "llama3": LLAMA3,
    "longrope": LONGROPE,
    "longrope-attention-factor": {key: value for key, value in LONGROPE.items() if key != "factor"}
    | {"attention_factor": 1.19},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
    "proportional-half": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("length", [64, 700], ids=["within-training", "beyond-training"])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_the_rotation_equals_that_of_the_transformers_library(scaling: dict[str, Any] | None, length: int) -> None:
    given = {"rope_type": "default"} if scaling is None else dict(scaling)
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters=given | {"rope_theta": 20000.0},
    )
    q, k = torch.randn(2, 4, length, 64), torch.randn(2, 2, length, 64)
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(length)[None])
    rope = RotaryPositionEmbedding(64, rotary_base=20000.0, scaling=scaling)
    for theirs, t in zip(llama_rotary(q, k, cos, sin), (q, k), strict=True):
        for freqs in (rope(length), rope.cos_sin(length)):
            ours = apply_rotary_pos_emb(t.transpose(1, 2), freqs, "bshd").transpose(1, 2)
            rounding = 4 * length * torch.finfo(torch.float32).eps  # of the last angle, times the largest entries
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=rounding)
    if length > 256 and scaling is not None:
        plain = apply_rotary_pos_emb(
            q.transpose(1, 2), RotaryPositionEmbedding(64, rotary_base=20000.0)(length), "bshd"
        )
        assert not torch.allclose(plain.transpose(1, 2), llama_rotary(q, k, cos, sin)[0], atol=0.1)


def test_interpolated_positions() -> None:
    """TransformerEngine's interpolation: by the factor, and by length / trained beyond factor * trained."""
    rope = RotaryPositionEmbedding(8, seq_len_interpolation_factor=4, pretrained_max_position_embeddings=10)
    plain = RotaryPositionEmbedding(8)
    torch.testing.assert_close(rope(40)[::4], plain(10))
    torch.testing.assert_close(rope(80)[::8], plain(10))
    torch.testing.assert_close(rope(4, offset=8)[::4], plain(1, offset=2))
    torch.testing.assert_close(rope(5, offset=75), rope(80)[75:])


@pytest.mark.parametrize("cp_size", [2, 3])
@pytest.mark.parametrize("format", ["sbhd", "bshd", "thd"])
def test_ranks_rotate_their_chunks_like_the_whole_sequence(format: str, cp_size: int) -> None:
    """Chunks rank and 2 * cp_size - 1 - rank of every sequence."""
    freqs = RotaryPositionEmbedding(8)(64)
    lengths = [2 * cp_size * n for n in ((3, 1, 2) if format == "thd" else (3,))]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0) if format == "thd" else None
    whole = torch.randn(sum(lengths), 3, 8) if format == "thd" else torch.randn(lengths[0], 2, 3, 8)
    axis = 0
    if format == "bshd":
        whole, axis = whole.transpose(0, 1), 1
    turned = apply_rotary_pos_emb(whole, freqs, format, cu_seqlens=cu_seqlens)

    def of_rank(t: Tensor, rank: int) -> Tensor:
        parts = []
        for sequence in t.split(lengths, axis):
            chunks = sequence.chunk(2 * cp_size, axis)
            parts += [chunks[rank], chunks[2 * cp_size - 1 - rank]]
        return torch.cat(parts, axis)

    for rank in range(cp_size):
        ours = apply_rotary_pos_emb(
            of_rank(whole, rank), freqs, format, cu_seqlens=cu_seqlens, cp_size=cp_size, cp_rank=rank
        )
        torch.testing.assert_close(ours, of_rank(turned, rank), rtol=0, atol=0)


def test_padding_between_and_behind_packed_sequences_needs_no_rows() -> None:
    """Tokens after the last sequence need no row of angles."""
    t = torch.randn(9, 2, 8)
    out = apply_rotary_pos_emb(t, RotaryPositionEmbedding(8)(4), "thd", cu_seqlens=torch.tensor([0, 4, 4, 7]))
    alone = apply_rotary_pos_emb(t[None, 4:7], RotaryPositionEmbedding(8)(3), "bshd")[0]
    torch.testing.assert_close(out[4:7], alone, rtol=0, atol=0)
    torch.testing.assert_close(out[7:], t[7:], rtol=0, atol=0)


def test_angles_may_differ_per_sequence() -> None:
    """Angles per sequence, [s, b, 1, d2], for any positions, such as those of left-padded sequences."""
    rope = RotaryPositionEmbedding(8)
    positions = torch.tensor([[0, 0, 1, 2], [5, 6, 7, 8]])
    t = torch.randn(2, 4, 3, 8)
    own = rope(16)[positions.T, 0]  # [s, b, 1, d2]
    torch.testing.assert_close(
        apply_rotary_pos_emb(t, own, "bshd").double(), oracle(t, positions, 8), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(
        apply_rotary_pos_emb(t.transpose(0, 1), own, "sbhd"), apply_rotary_pos_emb(t, own, "bshd").transpose(0, 1)
    )


@pytest.mark.parametrize("scaling", [YARN, LONGROPE], ids=["yarn", "longrope"])
def test_the_frequencies_stay_fp32_and_move_with_the_module(scaling: dict[str, Any]) -> None:
    """In bf16 positions 256 and 257 have the same angles; .to(bfloat16) of a model must not do that."""
    rope = RotaryPositionEmbedding(64, scaling=scaling)
    angles = rope(300)
    assert torch.equal(copy.deepcopy(rope).bfloat16()(300), angles)
    assert torch.equal(pickle.loads(pickle.dumps(rope))(300), angles)
    assert list(rope.state_dict()) == ["inv_freq"]
    meta = RotaryPositionEmbedding(64, scaling=scaling, device="meta")
    assert meta(300).is_meta
    there = meta.to_empty(device="cpu")
    assert torch.equal(there(300), angles), "they follow from the arguments; once they were undefined"
    torch.nn.init.zeros_(there.inv_freq)
    there.reset_parameters()
    assert torch.equal(there(300), angles)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rope(300), angles)


def test_compiled_in_one_graph() -> None:
    rope = RotaryPositionEmbedding(8)
    cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)

    def function(t: Tensor, cu_seqlens: Tensor) -> Tensor:
        return apply_rotary_pos_emb(t, rope(8), "thd", cu_seqlens=cu_seqlens)

    t = torch.randn(7, 2, 8)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(t, cu_seqlens), function(t, cu_seqlens))


def test_derivatives_of_higher_order() -> None:
    t = torch.randn(2, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    freqs = RotaryPositionEmbedding(8).cos_sin(3).double().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda t, f: apply_rotary_pos_emb(t, f, "sbhd"), (t, freqs[:2]))


T = torch.randn(2, 5, 3, 8)
PACKED = torch.randn(7, 3, 8)
FREQS = RotaryPositionEmbedding(8)(5)


@pytest.mark.parametrize(
    ("arguments", "message_start"),
    [
        (
            {"tensor_format": None},
            "tensor_format must be given (there is no default), got None\n  HINT: 'sbhd' is [seq, batch, ",
        ),
        ({"tensor_format": "bhsd"}, "tensor_format must be one of 'sbhd', 'bshd', 'thd', got 'bhsd'"),
        ({"t": PACKED}, "t must have the axes [b, s, h, d] in tensor_format='bshd', got [7, 3, 8]"),
        ({"t": T.int()}, "t must be a floating-point tensor, got torch.int32"),
        (
            {"freqs": RotaryPositionEmbedding(8)},
            "freqs must be a floating-point tensor, got RotaryPositionEmbedding\n  HINT: rope(length), or rope.cos_sin",
        ),
        (
            {"freqs": FREQS[:, 0]},
            "freqs must have the axes [s, 1, 1, d2], or [s, 1, 1, 2, d2 / 2] of cos_sin, got [5, 1, 8]",
        ),
        (
            {"freqs": FREQS[:4]},
            "freqs must have a row for each of 5 positions, got 4\n  HINT: RotaryPositionEmbedding(...)(5)",
        ),
        (
            {"freqs": FREQS.bfloat16()},
            "freqs must be float32, got torch.bfloat16\n  HINT: in a half-precision dtype, neighbouring positions",
        ),
        (
            {"freqs": RotaryPositionEmbedding(10)(5)},
            "freqs must have an even number of channels, at most the head size (8), got 10",
        ),
        ({"freqs": FREQS.expand(5, 3, 1, 8)}, "freqs must have 1 or batch (2) at axis 1, got 3 in [5, 3, 1, 8]"),
        ({"start_positions": torch.tensor([0, 1])}, "freqs must have a row for each of 6 positions, got 5"),
        ({"start_positions": torch.tensor([0, -1])}, "start_positions must be at least 0, got -1"),
        (
            {"start_positions": torch.tensor([0])},
            "start_positions must have one position for each of 2 sequences, got [1]",
        ),
        (
            {"start_positions": torch.tensor([0.0, 1])},
            "start_positions must be an int32 or int64 tensor, got torch.float32",
        ),
        (
            {"start_positions": torch.tensor([0, 0]), "freqs": FREQS.expand(5, 2, 1, 8)},
            "start_positions must be None if freqs have a batch axis",
        ),
        (
            {"interleaved": True},
            "freqs must have one angle for both channels of a pair with interleaved=True, got two\n  HINT: RotaryPositionEmbedding(..., interleaved=True), or its cos_sin",
        ),
        (
            {"interleaved": True, "freqs": FREQS.flip(0)},  # the last row is that of position 0
            "freqs must have one angle for both channels of a pair with interleaved=True, got two",
        ),
        ({"interleaved": 1}, "interleaved must be True or False, got 1"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens must be None in tensor_format='bshd', got a tensor"),
        ({"cp_size": 2}, "t must have an even number of tokens (two chunks) with cp_size above 1, got 5"),
        ({"cp_size": 2, "cp_rank": 2}, "cp_rank must be below cp_size (2), got 2"),
        ({"t": PACKED, "tensor_format": "thd"}, "cu_seqlens must be given in tensor_format='thd', got None"),
        (
            {"t": PACKED, "tensor_format": "thd", "cu_seqlens": torch.tensor([1, 7])},
            "cu_seqlens must start at 0 and never decrease",
        ),
        (
            {"t": PACKED, "tensor_format": "thd", "cu_seqlens": torch.tensor([0, 9])},
            "cu_seqlens must end at the tokens of t at most (7), got 9",
        ),
        (
            {"t": PACKED, "tensor_format": "thd", "cu_seqlens": torch.tensor([0.0, 7])},
            "cu_seqlens must be int32 or int64, got torch.float32",
        ),
        (
            {"t": PACKED, "tensor_format": "thd", "cu_seqlens": torch.tensor([0, 7]), "cp_size": 2},
            "cu_seqlens must hold lengths that 2 * cp_size (4) divides, got [7]",
        ),
        (
            {"t": PACKED, "tensor_format": "thd", "cu_seqlens": torch.tensor([0, 7])},
            "freqs must have a row for each of 7 positions, got 5",
        ),
    ],
)
def test_errors_of_wrong_calls(arguments: dict[str, Any], message_start: str) -> None:
    with pytest.raises(InputError) as caught:
        apply_rotary_pos_emb(**({"t": T, "freqs": FREQS, "tensor_format": "bshd"} | arguments))
    assert str(caught.value).startswith(message_start)


@pytest.mark.parametrize(
    ("arguments", "message_start"),
    [
        ({"dim": 7}, "dim must be an even number of rotated channels, got 7"),
        ({"dim": 8, "rotary_percent": 0.4}, "dim must be an even number of rotated channels, got 8 * 0.4 = 3"),
        ({"rotary_percent": 1.5}, "rotary_percent must be a number above 0 and up to 1, got 1.5"),
        ({"rotary_base": 1.0}, "rotary_base must be a number above 1, got 1.0"),
        (
            {"seq_len_interpolation_factor": 4},
            "seq_len_interpolation_factor must be given with pretrained_max_position_embeddings, got 4",
        ),
        (
            {"seq_len_interpolation_factor": 4, "pretrained_max_position_embeddings": 8, "scaling": LLAMA3},
            "seq_len_interpolation_factor must be None with scaling",
        ),
        ({"scaling": "yarn"}, "scaling must be a dictionary or None, got 'yarn'"),
        (
            {"scaling": {"rope_type": "ntk"}},
            "scaling['rope_type'] must be one of 'default', 'linear', 'dynamic', 'yarn', 'llama3', 'longrope', 'proportional', got 'ntk'",
        ),
        ({"scaling": {"rope_type": "linear"}}, "scaling must have 'factor' with rope_type 'linear', got []"),
        (
            {"scaling": LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "scaling['low_freq_factor'] must be below scaling['high_freq_factor'], got 4.0 and 4.0",
        ),
        ({"scaling": {"type": "linear", "factor": 0.5}}, "scaling['factor'] must be a number of at least 1, got 0.5"),
        (
            {"scaling": YARN | {"beta": 3}},
            "scaling must not have 'beta' with rope_type 'yarn', got 3\n  HINT: allowed: factor, ",
        ),
        (
            {"dim": 64, "scaling": LONGROPE | {"factor": None}},
            "scaling must have 'factor' or 'attention_factor' with rope_type 'longrope', got ['factor', 'long_factor', ",
        ),
        (
            {"dim": 64, "scaling": LONGROPE | {"short_factor": [1.0] * 64}},
            "scaling['short_factor'] must be a list of 32 numbers, got 64 numbers\n  HINT: one number per pair",
        ),
        (
            {"dim": 64, "scaling": LONGROPE | {"long_factor": [1.0] * 31 + [0.0]}},
            "scaling['long_factor'][31] must be a positive number, got 0.0",
        ),
        (
            {"dim": 64, "scaling": LONGROPE | {"original_max_position_embeddings": 1}},
            "scaling['original_max_position_embeddings'] must be at least 2, got 1",
        ),
        (
            {"scaling": {"rope_type": "proportional", "partial_rotary_factor": 1.5}},
            "scaling['partial_rotary_factor'] must be a number from 0 to 1, got 1.5",
        ),
        (
            {"scaling": YARN | {"rope_theta": 5e5}},
            "scaling must not have 'rope_theta' with rope_type 'yarn', got 500000.0\n  HINT: pass rotary_base=500000.0 at construction",
        ),
    ],
)
def test_errors_of_wrong_constructions(arguments: dict[str, Any], message_start: str) -> None:
    with pytest.raises(InputError) as caught:
        RotaryPositionEmbedding(**({"dim": 8} | arguments))
    assert str(caught.value).startswith(message_start)


def test_the_training_length_may_be_given_to_the_constructor() -> None:
    """The configuration of a "dynamic" model omits it."""
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    ours = RotaryPositionEmbedding(8, scaling=scaling, pretrained_max_position_embeddings=16)
    torch.testing.assert_close(ours(16), RotaryPositionEmbedding(8)(16))
    assert not torch.equal(ours(17)[:16], ours(16))


def test_the_longest_wave_of_llama3_is_stretched_by_the_factor() -> None:
    plain, ours = RotaryPositionEmbedding(64), RotaryPositionEmbedding(64, scaling=LLAMA3)
    ratio = plain.inv_freq / ours.inv_freq
    assert ratio[0] == 1.0
    assert math.isclose(ratio[-1], 8.0, rel_tol=1e-6)
    assert undivided.RotaryPositionEmbedding is RotaryPositionEmbedding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_conversion_keeps_loaded_frequencies(dtype: torch.dtype) -> None:
    """They were computed again, for the base of the constructor."""
    rope = RotaryPositionEmbedding(16)
    rope.load_state_dict(RotaryPositionEmbedding(16, rotary_base=500000).state_dict())
    expected = rope(300)
    rope.to(dtype)
    assert rope.inv_freq.dtype == torch.float32
    assert torch.equal(rope(300), expected)
