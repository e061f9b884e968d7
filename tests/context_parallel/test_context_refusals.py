"""Meshes in another order, and arguments that one of several processes refuses: an error on all of them at once."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh

import undivided
from undivided import masks
from undivided.context_parallel import simulate

ORDERS = ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3, 2], [1, 0]])
WRONG_ORDERS = ([[0, 1], [3, 2]], [[0, 3], [2, 1]], [[0, 3], [1, 2]])


def outcome_of_mesh(order: list[list[int]], as_pair: bool) -> float | str:
    """The difference from one process, or the text of the error."""
    mesh = DeviceMesh("cpu", order, mesh_dim_names=("ring", "heads"))
    group: Any = (mesh.get_group("heads"), mesh.get_group("ring")) if as_pair else mesh
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 16, 4, 8, dtype=torch.float64)
    try:
        cp = undivided.ContextParallel(group, "ring+all_to_all", "contiguous").bind(16)
        own = [cp.shard(t, "bshd") for t in (q, k, v)]
        out = undivided.attention(*own, layout="bshd", mask=masks.causal(), context_parallel=cp)
    except undivided.InputError as error:
        return str(error)
    expected = undivided.attention(q, k, v, layout="bshd", mask=masks.causal())
    return float((out - cp.shard(expected, "bshd")).abs().max())


def outcome_of_refusal(kind: str) -> tuple[str, float]:
    """The type of the error of a call of which rank 0 refuses an argument, and how long it took."""
    rank = torch.distributed.get_rank()
    cp = undivided.ContextParallel().bind(8)
    q = torch.randn(1, 4, 2, 8)
    start = time.perf_counter()
    wrong: dict[str, Any] = {"backend": "nope"} if "backend" in kind else {"deterministic": "x"}
    options = wrong if rank == 0 else {}
    try:
        if "decode" in kind:
            cp.decode(q[:, :1], q, q, torch.arange(4) * 2 + rank, 8, layout="bshd", **options)
        else:
            undivided.attention(q, q, q, layout="bshd", context_parallel=cp, **options)
    except Exception as error:
        return type(error).__name__, time.perf_counter() - start
    return "", 0.0


def dtypes_under_autocast() -> list[torch.dtype]:
    rank, cp = torch.distributed.get_rank(), undivided.ContextParallel()
    q, own = torch.randn(1, 1, 2, 8), torch.arange(4) * 2 + rank
    with torch.autocast("cpu", torch.bfloat16):
        caches = [torch.randn(1, 4, 2, 8, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
        return [cp.decode(q, k, k, own, 8, layout="bshd")[0].dtype for k in caches]


@pytest.fixture(scope="module")
def of_four_ranks() -> list[list[Any]]:
    cases = [(order, pair) for order in (*ORDERS, *WRONG_ORDERS) for pair in (False, True)]
    return run_ranks(4, *[functools.partial(outcome_of_mesh, *case) for case in cases])


def test_a_mesh_is_a_grid_or_refused_on_all_ranks(of_four_ranks: list[list[Any]]) -> None:
    """PyTorch sorts the processes of a group; parts were exchanged if its order is not that of the mesh."""
    for found in of_four_ranks[: 2 * len(ORDERS)]:
        assert max(found) < 1e-12
    for found in of_four_ranks[2 * len(ORDERS) :]:
        assert all("same order" in text for text in found)


KINDS = ["attention backend", "attention deterministic", "decode backend"]


@pytest.fixture(scope="module")
def of_two_ranks() -> list[list[Any]]:
    return run_ranks(2, *[functools.partial(outcome_of_refusal, kind) for kind in KINDS], dtypes_under_autocast)


def test_what_one_rank_refuses_is_an_error_on_all_at_once(of_two_ranks: list[list[Any]]) -> None:
    """The other rank waited for the timeout of the group."""
    for (first, _), (second, seconds) in of_two_ranks[: len(KINDS)]:
        assert (first, second) == ("InputError", "RankError")
        assert seconds < 60


def test_decoding_casts_under_autocast(of_two_ranks: list[list[Any]]) -> None:
    assert of_two_ranks[-1] == [[torch.bfloat16] * 2] * 2


LAYER_ERRORS: dict[str, dict[str, Any]] = {
    "width": {"hidden_states": torch.zeros(2, 4, 24)},
    "dtype": {"hidden_states": torch.zeros(2, 4, 32, dtype=torch.float64)},
    "no tensor": {"hidden_states": None},
    "mask type": {"self_attn_mask_type": "casual"},
    "window": {"window_size": (3,)},
    "mask": {"self_attn_mask_type": "padding", "attention_mask": torch.zeros(2, 1, 1, 9, dtype=torch.bool)},
    "offsets": {"self_attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 3, 99])},
    "bias": {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, 4, 4, 9)},
    "bias type": {"core_attention_bias_type": "some_bias"},
    "rotary": {"rotary_pos_emb": torch.zeros(8, 1, 1, 30)},
    "unknown": {"self_attn_mask": "causal"},
    "encoder_output": {"encoder_output": torch.zeros(2, 4, 32)},
    "cache": {"inference_params": undivided.InferenceParams(2, 8, 4, 8, torch.float32)},
}
"""Arguments of a layer that it refuses before its attention."""


def errors_of_layer(options: dict[str, Any], wrong: dict[str, Any], training: bool = False) -> list[str]:
    """The error on each of three ranks, the last of which has wrong arguments, and "" for a later call of all ranks."""

    def rank(group: Any) -> list[str]:
        torch.manual_seed(0)
        layer = undivided.TransformerLayer(32, 64, 4, attn_input_format="bshd", **options).train(training)
        layer.set_context_parallel_group(undivided.ContextParallel(group))
        right = {"hidden_states": torch.randn(2, 4, 32)}
        if options:
            right["encoder_output"] = torch.randn(2, 4, 32)
        found = []
        for arguments in (right | wrong if group.rank == 2 else right, right):
            try:
                layer(**arguments)
                found.append("")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    found, later = zip(*simulate(3, rank, timeout=20.0), strict=True)
    assert later == ("",) * 3
    return list(found)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", LAYER_ERRORS)
def test_an_argument_that_a_layer_refuses_on_one_rank_is_an_error_on_all_at_once(name: str, training: bool) -> None:
    """The other ranks waited for the timeout of the group; in training they exchange the dropout's seed first."""
    *others, own = errors_of_layer({}, LAYER_ERRORS[name], training)
    assert own.startswith(("InputError: ", "TypeError: "))
    for text in others:
        first_line = own.partition(": ")[2].splitlines()[0]
        assert text.startswith(f"RankError: another rank refused its arguments: rank 2: {first_line}")


CROSS_ERRORS: dict[str, dict[str, Any]] = {
    "width": {"encoder_output": torch.zeros(2, 4, 24)},
    "mask": {"enc_dec_attn_mask_type": "padding", "enc_dec_attn_mask": torch.zeros(2, 1, 1, 9, dtype=torch.bool)},
    "offsets": {"enc_dec_attn_mask_type": "padding", "cu_seqlens_kv": torch.tensor([0, 3, 99])},
}


@pytest.mark.parametrize("drop_path", [0.0, 0.5])
@pytest.mark.parametrize("name", CROSS_ERRORS)
def test_an_argument_that_the_second_attention_refuses_is_an_error_on_all_ranks(name: str, drop_path: float) -> None:
    options = {"layer_type": "decoder", "drop_path_rate": drop_path}
    *others, own = errors_of_layer(options, CROSS_ERRORS[name], training=True)
    assert own.startswith("InputError: ")
    assert all(text.startswith("RankError: another rank refused its arguments: rank 2: ") for text in others)


def test_an_error_after_the_last_attention_is_not_told() -> None:
    """The other ranks may have ended their call: they would take it for another one."""

    def rank(group: Any) -> bool:
        torch.manual_seed(0)
        layer = undivided.TransformerLayer(32, 64, 4, attn_input_format="bshd").eval()
        cp = undivided.ContextParallel(group)
        layer.set_context_parallel_group(cp)
        if group.rank == 1:
            layer.layernorm_mlp.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                layer(torch.randn(2, 4, 32))
        else:
            layer(torch.randn(2, 4, 32))
        return cp.seed() >= 0

    assert simulate(2, rank, timeout=20.0) == [True, True]


def outcomes_of_layers(arguments: list[dict[str, Any]], numbers: tuple[int, int] = (1, 1)) -> list[str]:
    """The error on each of two ranks that call a layer with these arguments, "" for none; both layers are equal."""

    def rank(group: Any) -> str:
        torch.manual_seed(0)
        layer = undivided.MultiheadAttention(32, 4, qkv_format="bshd", layer_number=numbers[group.rank]).eval()
        layer.set_context_parallel_group(undivided.ContextParallel(group))
        try:
            layer(torch.randn(1, 4, 32), **arguments[group.rank])
        except undivided.InputError as error:
            return str(error).splitlines()[0]
        return ""

    return simulate(2, rank, timeout=20.0)


def test_layers_over_context_ranks_compare_their_tables_of_angles() -> None:
    """The ranks computed with different positions, in silence."""
    angles = undivided.RotaryPositionEmbedding(8)(16)
    assert outcomes_of_layers([{"rotary_pos_emb": angles}, {"rotary_pos_emb": angles.clone()}]) == ["", ""]
    one = outcomes_of_layers([{"rotary_pos_emb": angles}, {}])
    start = "rotary_pos_emb must be the same on every rank, got "
    assert one[0] == one[1]
    assert one[0].startswith(start + "[16, 1, 1, 8], torch.float32 (")
    assert one[0].endswith("on rank 0; None on rank 1")
    for other in (angles[:12], angles.double(), angles.flip(0), angles * 2, (angles, angles)):
        assert all(
            text.startswith(start)
            for text in outcomes_of_layers([{"rotary_pos_emb": angles}, {"rotary_pos_emb": other}])
        )


def test_context_ranks_compare_which_layer_they_call() -> None:
    expected = (
        "layer must be the same on every rank, got MultiheadAttention 1 on rank 0; MultiheadAttention 2 on rank 1"
    )
    assert outcomes_of_layers([{}, {}], (1, 2)) == [expected, expected]


def test_a_call_without_a_layer_is_not_compared_with_that_of_a_layer() -> None:
    """A layer that torch.compile runs on some ranks only says nothing of its call."""

    def rank(group: Any) -> Any:
        torch.manual_seed(0)
        cp = undivided.ContextParallel(group)
        core = undivided.DotProductAttention(2, 8, qkv_format="bshd", attn_mask_type="no_mask").eval()
        core.set_context_parallel_group(cp)
        q = torch.randn(1, 4, 2, 8)
        if group.rank:
            return core(q, q, q)
        mask = undivided.masks.window(None, None, align="bottom_right")
        return undivided.attention(q, q, q, mask=mask, layout="bshd", context_parallel=cp).flatten(2)

    first, second = simulate(2, rank, timeout=20.0)
    assert torch.allclose(first, second, atol=1e-6)
