"""Layers in training: dropout, recomputation, compilation, devices, copies, autocast."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import plain_layer
import pytest
import torch
from layer_cases import FORMATS, HIDDEN, LENGTHS, PADDING, cu, in_format, layer, split_sequences
from rng_tracker import Tracker
from torch import Tensor, distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.flop_counter import FlopCounterMode

from undivided import RotaryPositionEmbedding


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_seed_drops_the_same_entries(format: str) -> None:
    module = layer(format, hidden_dropout=0.3, attention_dropout=0.3, self_attn_mask_type="padding_causal")
    xs = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in LENGTHS]
    call = {"cu_seqlens_q": cu(LENGTHS)}

    def once(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return torch.cat(split_sequences(module(in_format(xs, format, PADDING), **call), LENGTHS, format))

    assert torch.equal(once(1), once(1))
    assert not torch.allclose(once(1), once(2))
    module.eval()
    assert torch.equal(once(1), once(2))


def test_attention_drops_the_same_weights_in_every_format() -> None:
    """Dropout is a function of the sequence and the positions."""
    outs = []
    xs = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in LENGTHS]
    for format in FORMATS:
        torch.manual_seed(3)
        module = layer(format, attention_dropout=0.4, self_attn_mask_type="padding_causal")
        plain_layer.with_random_parameters(module)
        torch.manual_seed(4)
        out = module(in_format(xs, format), cu_seqlens_q=cu(LENGTHS))
        outs.append(torch.cat(split_sequences(out, LENGTHS, format)))
    torch.testing.assert_close(outs[0], outs[1])
    torch.testing.assert_close(outs[0], outs[2])


@pytest.mark.parametrize("format", FORMATS)
def test_a_dropped_path_leaves_a_whole_sequence_out(format: str) -> None:
    """Each block of each sequence is either scaled by two or omitted; TransformerEngine drops along axis 0."""
    module = layer(format, drop_path_rate=0.5, self_attn_mask_type="padding_causal")
    plain_layer.with_random_parameters(module)
    whole = layer(format, self_attn_mask_type="padding_causal")
    whole.load_state_dict(module.state_dict())
    xs = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in LENGTHS]
    x, call = in_format(xs, format, PADDING), {"cu_seqlens_q": cu(LENGTHS)}
    attended = split_sequences(whole.self_attention(x, attn_mask_type="padding_causal", **call), LENGTHS, format)
    seen = set()
    for _ in range(40):
        out = split_sequences(module(x, **call), LENGTHS, format)
        for n, sequence in enumerate(xs):
            possible = {}
            for kept_attention, kept_mlp in itertools.product((0, 2), repeat=2):
                between = sequence + kept_attention * attended[n]
                possible[kept_attention, kept_mlp] = between + kept_mlp * whole.layernorm_mlp(between)[0]
            found = [key for key, value in possible.items() if torch.allclose(out[n], value)]
            assert len(found) == 1
            seen.add((n, *found[0]))
    assert len(seen) == 8, "each sequence has each of its four outcomes"


def test_dropping_every_path_and_none() -> None:
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    assert torch.equal(layer("bshd", drop_path_rate=1.0)(x), x)
    module = layer("bshd", drop_path_rate=1.0).eval()
    assert not torch.allclose(module(x), x)


def test_hidden_dropout_keeps_the_mean() -> None:
    """Kept entries are scaled by 1 / (1 - p), in each of a decoder's three blocks."""
    x = torch.zeros(1, 400, HIDDEN, dtype=torch.float64)
    module = layer("bshd", hidden_dropout=0.5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.self_attention.proj.bias.fill_(1.0)
    out = module(x)
    assert set(out.unique().tolist()) == {0.0, 2.0}
    assert 0.45 < (out == 0).double().mean() < 0.55


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_recomputing_the_attention_changes_nothing(p: float) -> None:
    module = layer("bshd", attention_dropout=p, num_gqa_groups=2, softmax_type="learnable")
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)

    def run(recompute: bool) -> list[Tensor]:
        torch.manual_seed(1)
        out = module(x, checkpoint_core_attention=recompute)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("whole", [False, True], ids=["attention", "layer"])
def test_a_counter_around_both_passes_of_a_checkpoint(whole: bool) -> None:
    """As the documentation says; around one of them, the recomputation saves other tensors, which PyTorch refuses."""
    module = layer("bshd")
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
    (want,) = torch.autograd.grad(module(x).square().sum(), x)
    with FlopCounterMode(display=False) as counter:
        if whole:
            out = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
        else:
            out = module(x, checkpoint_core_attention=True)
        out.square().sum().backward()
    torch.testing.assert_close(x.grad, want)
    assert counter.get_total_flops() > 0


def repeat_states(tracker: Tracker) -> tuple[Any, Any]:
    """As in the documentation."""
    before = tracker.get_states()

    @contextlib.contextmanager
    def recomputation() -> Iterator[None]:
        after = tracker.get_states()
        tracker.set_states(before)
        try:
            yield
        finally:  # a recomputation ends early, by an exception
            tracker.set_states(after)

    return contextlib.nullcontext(), recomputation()


@pytest.mark.parametrize("whole", [False, True], ids=["attention", "layer"])
def test_a_checkpoint_repeats_the_dropout_of_a_tracker(whole: bool) -> None:
    results = []
    for recompute in (False, True):
        torch.manual_seed(0)
        tracker = Tracker(5)
        module = layer("bshd", attention_dropout=0.5, get_rng_state_tracker=lambda tracker=tracker: tracker)
        x = torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
        run: Any = functools.partial(module, checkpoint_core_attention=recompute and not whole)
        if recompute and whole:
            states = functools.partial(repeat_states, tracker)
            run = functools.partial(torch.utils.checkpoint.checkpoint, module, use_reentrant=False, context_fn=states)
        outs = [run(x) for _ in range(2)]
        loss = sum(out.square().sum() for out in outs)
        results.append([*outs, *torch.autograd.grad(loss, [x, *module.parameters()]), tracker.state])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("format", [pytest.param("bshd", marks=pytest.mark.slow), "thd"])
def test_compiled_in_one_graph(format: str) -> None:
    options = {
        "num_gqa_groups": 2,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "window_size": (2, 0),
        "qk_norm_type": "RMSNorm",
    }
    module = layer(format, self_attn_mask_type="padding_causal", **options)
    xs = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in LENGTHS]
    x = in_format(xs, format, PADDING).requires_grad_()
    call = {"cu_seqlens_q": cu(LENGTHS), "rotary_pos_emb": RotaryPositionEmbedding(6)(8)}
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = []
    for function in (module, compiled):
        out = function(x, **call)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("format", ["bshd", "sbhd"])
def test_exported_for_lengths_that_include_the_batch_size(format: str) -> None:
    """The format's check compared the two axes, so that the program was for one order of them only."""
    module = layer(format).eval()
    axis = 1 if format == "bshd" else 0
    x, other = (torch.randn(*((2, n) if format == "bshd" else (n, 2)), HIDDEN, dtype=torch.float64) for n in (5, 2))
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(module, (x,), dynamic_shapes={"hidden_states": {axis: length}})
    for hidden in (x, other):
        torch.testing.assert_close(program.module()(hidden), module(hidden))


@pytest.mark.slow
def test_a_compiled_decoder_layer() -> None:
    module = layer("bshd", layer_type="decoder", drop_path_rate=0.2, hidden_dropout=0.1)
    x, encoder = (torch.randn(2, 5, HIDDEN, dtype=torch.float64), torch.randn(2, 4, HIDDEN, dtype=torch.float64))
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert compiled(x, encoder_output=encoder).shape == x.shape
    module.eval()
    torch.testing.assert_close(compiled(x, encoder_output=encoder), module(x, encoder_output=encoder))


def test_created_on_the_meta_device_and_initialised_later() -> None:
    """Nothing is allocated; after `to_empty` and `reset_parameters` every parameter is initialised."""
    init = functools.partial(torch.nn.init.constant_, val=0.5)
    options = {
        "layer_type": "decoder",
        "output_layernorm": True,
        "qk_norm_type": "LayerNorm",
        "softmax_type": "learnable",
    }
    module = layer("bshd", device="meta", init_method=init, **options)
    assert all(parameter.is_meta for parameter in module.parameters())
    x = torch.empty(2, 5, HIDDEN, dtype=torch.float64, device="meta")
    assert module(x, encoder_output=x).is_meta
    module = module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    module.reset_parameters()
    fresh = layer("bshd", init_method=init, **options)
    for name, parameter in module.named_parameters():
        assert not parameter.isnan().any(), name
        if "proj" not in name and "fc2" not in name:
            assert torch.equal(parameter, fresh.state_dict()[name]), name
    with torch.device("meta"):
        assert layer("bshd").layernorm_mlp.fc1_weight.is_meta


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_full_backward_hooks_see_the_gradients_of_every_block(kind: str) -> None:
    module = layer("bshd", layer_type=kind)
    seen = {}
    for name, block in module.named_modules():
        block.register_full_backward_hook(lambda block, inputs, outputs, name=name: seen.update({name: outputs[0]}))
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
    module(x, **({"encoder_output": x} if kind == "decoder" else {})).sum().backward()
    assert set(seen) == {name for name, _ in module.named_modules()}
    proj = module.self_attention.proj
    torch.testing.assert_close(seen["self_attention.proj"].flatten(0, 1).sum(0), proj.bias.grad)


def test_copies_are_the_same_layer() -> None:
    module = layer("bshd", num_gqa_groups=2, activation="clamped_swiglu", qk_norm_type="L2Normalization")
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x))
        assert str(other) == str(module)
    half = copy.deepcopy(module).bfloat16()
    assert half(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(half(x.bfloat16()).double(), module(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_under_autocast_the_residual_keeps_its_precision(normalization: str) -> None:
    module = layer("bshd", params_dtype=torch.float32, normalization=normalization, qk_norm_type="RMSNorm")
    x = torch.randn(2, 5, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x, rotary_pos_emb=RotaryPositionEmbedding(6)(5))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, module(x, rotary_pos_emb=RotaryPositionEmbedding(6)(5)), rtol=0.05, atol=0.05)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_activation_checkpointing_of_the_whole_layer() -> None:
    module = layer("bshd", hidden_dropout=0.2, attention_dropout=0.2, drop_path_rate=0.2)
    x = torch.randn(3, 5, HIDDEN, dtype=torch.float64, requires_grad=True)

    def run(function: Any) -> list[Tensor]:
        torch.manual_seed(5)
        out = function(x)
        return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]

    recomputed = functools.partial(torch.utils.checkpoint.checkpoint, module, use_reentrant=False)
    for a, b in zip(run(recomputed), run(module), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.parametrize("parts", [False, True], ids=["whole-layer", "each-part"])
def test_sharded_with_half_precision(parts: bool) -> None:
    """Shards are fp32 while the module computes in bf16: the dtype check once compared with the shard."""
    module = layer("bshd", params_dtype=torch.float32)
    x = torch.randn(2, 5, HIDDEN)
    want = module(x)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        shard = functools.partial(fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        for part in (module.self_attention.layernorm_qkv, module.self_attention.proj, module.layernorm_mlp):
            if parts:
                shard(part)
        shard(module)
        out = module(x)
        out.sum().backward()
    finally:
        distributed.destroy_process_group()
    torch.testing.assert_close(out.float(), want, rtol=0.05, atol=0.05)


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_learnable_sinks_are_sharded_apart_from_parameters_of_16_bits() -> None:
    """As the documentation says: FSDP2 refuses two dtypes in one module."""
    module = layer("bshd", params_dtype=torch.bfloat16, softmax_type="learnable")
    x = torch.randn(2, 5, HIDDEN, dtype=torch.bfloat16)
    want = module(x)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        fully_shard(module.self_attention.core_attention, mesh=mesh)
        fully_shard(module, mesh=mesh)
        out = module(x)
        out.sum().backward()
        sinks = module.self_attention.core_attention.softmax_offset
        assert sinks.grad.dtype == torch.float32
        assert sinks.grad.full_tensor().abs().min() > 0
    finally:
        distributed.destroy_process_group()
    assert torch.equal(out, want)
