# ruff: noqa: E501 (tables of messages)
"""DotProductAttention as a module: copies, checkpoints, devices, compilation and training over ranks."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from torch import Tensor, distributed
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from undivided import DotProductAttention, TransformerLayer
from undivided.nn.arguments import sequences

Q = torch.randn(2, 6, 4, 8)


T = torch.randn(12, 4, 8)


CU = torch.tensor([0, 5, 12], dtype=torch.int32)


def padding(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


PACKED = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}


def learnable(**arguments: Any) -> DotProductAttention:
    module = DotProductAttention(4, 8, qkv_format="bshd", softmax_type="learnable", **arguments)
    assert module.softmax_offset is not None
    torch.nn.init.normal_(module.softmax_offset)
    return module


def test_copies_pickles_and_checkpoints_compute_the_same() -> None:
    module = learnable(window_size=(3, 0))
    want = module(Q, Q, Q)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = DotProductAttention(4, 8, qkv_format="bshd", softmax_type="learnable", window_size=(3, 0))
    loaded.load_state_dict(torch.load(file))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert torch.equal(other(Q, Q, Q), want)
    assert list(module.state_dict()) == ["softmax_offset"]
    assert not DotProductAttention(4, 8, softmax_type="off-by-one").state_dict()


def test_a_checkpoint_of_transformer_engine_loads() -> None:
    offset = torch.randn(4)
    model = torch.nn.Sequential(learnable())
    saved = {"0.softmax_offset": offset, "0._extra_state": io.BytesIO(b"scales")}
    model.load_state_dict(saved)
    assert torch.equal(model[0].softmax_offset, offset)
    assert "0._extra_state" in saved, "the caller's dictionary is left as it is"
    with pytest.raises(RuntimeError, match="softmax_offset"):
        DotProductAttention(4, 8).load_state_dict({"softmax_offset": offset})


def test_a_layer_has_no_extra_state_and_says_so_without_an_error() -> None:
    """PyTorch's own method raises an error that asks to file an issue with PyTorch."""
    for module in (learnable(), TransformerLayer(16, 32, 2, attn_input_format="bshd")):
        assert module.get_extra_state() is None
        assert not [name for name in module.state_dict() if "extra_state" in name]
        copied = pickle.loads(pickle.dumps(copy.deepcopy(module)))
        assert copied.get_extra_state() is None


def test_a_module_created_on_the_meta_device_is_initialised_by_reset_parameters() -> None:
    module = DotProductAttention(4, 8, qkv_format="bshd", softmax_type="learnable", device="meta").to_empty(
        device="cpu"
    )
    module.reset_parameters()
    plain = DotProductAttention(4, 8, qkv_format="bshd", softmax_type="off-by-one")
    # a learnable sink needs gradients, so another backend may run
    torch.testing.assert_close(module(Q, Q, Q), plain(Q, Q, Q))


def test_meta_tensors_give_shapes() -> None:
    module = learnable(return_max_logit=True).to("meta")
    out, largest = module(*(t.to("meta") for t in (Q, Q, Q)))
    assert (out.shape, largest.shape) == ((2, 6, 32), (4,))


def test_autocast_casts_as_it_casts_sdpa() -> None:
    module = learnable(return_max_logit=True)
    with torch.autocast("cpu", torch.bfloat16):
        out, largest = module(Q, Q.double().float(), Q.bfloat16())
    assert (out.dtype, largest.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.float(), module(Q, Q, Q)[0], rtol=2e-2, atol=2e-2)


COMPILED: dict[str, tuple[dict[str, Any], tuple[Tensor, ...], dict[str, Any]]] = {
    "causal": ({}, (Q, Q, Q), {}),
    "packed": (PACKED, (T, T, T), {"cu_seqlens_q": CU}),
    "packed with gaps": (PACKED, (T, T, T), {"cu_seqlens_q": torch.tensor([0, 3, 6]), "cu_seqlens_q_padded": CU}),
    "lengths": ({"attn_mask_type": "padding"}, (Q, Q, Q), {"cu_seqlens_q": torch.tensor([0, 4, 10])}),
    "boolean padding with holes": (
        {"attn_mask_type": "padding_causal"}, (Q, Q, Q), {"attention_mask": torch.tensor([0, 0, 1, 0, 1, 1] * 2).bool().view(2, 1, 1, 6)},
    ),
    "arbitrary": ({"attn_mask_type": "arbitrary"}, (Q, Q, Q), {"attention_mask": torch.ones(6, 6).tril(-1).bool()}),
    "alibi and the largest score": ({"return_max_logit": True}, (Q, Q, Q), {"core_attention_bias_type": "alibi"}),
    "window, recomputed": ({"window_size": (2, 0)}, (Q, Q, Q), {"checkpoint_core_attention": True}),
}  # fmt: skip


@pytest.mark.parametrize(("made", "tensors", "call"), COMPILED.values(), ids=COMPILED)
def test_it_compiles_into_one_graph(made: dict[str, Any], tensors: tuple[Tensor, ...], call: dict[str, Any]) -> None:
    torch._dynamo.reset()
    module = DotProductAttention(4, 8, softmax_type="learnable", **({"qkv_format": "bshd"} | made))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    tensors = tuple(t.clone().requires_grad_() for t in tensors)
    results = []
    for run in (module, compiled):
        found = run(*tensors, **call)
        outs = found if isinstance(found, tuple) else (found,)
        results.append([*outs, *torch.autograd.grad(outs[0].square().sum(), (*tensors, module.softmax_offset))])
    for eager, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)


DYNAMIC: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, Any]]]] = {
    "a bias of each head": (
        {},
        lambda n: {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.randn(1, 4, n, n)},
    ),
    "the largest score, recomputed": ({"return_max_logit": True}, lambda n: {"checkpoint_core_attention": True}),
}


@pytest.mark.parametrize(("made", "call"), DYNAMIC.values(), ids=DYNAMIC)
def test_it_compiles_for_sizes_that_vary(made: dict[str, Any], call: Callable[[int], dict[str, Any]]) -> None:
    torch._dynamo.reset()
    module = DotProductAttention(4, 8, qkv_format="bshd", **made)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (6, 7):
        q, options = torch.randn(2, n, 4, 8, requires_grad=True), call(n)
        torch.testing.assert_close(compiled(q, q, q, **options), module(q, q, q, **options))


class Layer(torch.nn.Module):
    """A minimal layer with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)
        self.attention = DotProductAttention(4, 8, qkv_format="bshd", softmax_type="learnable")

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(qkv_layer=self.qkv(x).unflatten(-1, (3, 4, 8)))


def _train_on_a_rank() -> dict[str, list[Any]]:
    """Gradients of a batch divided over the ranks: data parallel, sharded by wrapper, sharded in place."""
    rank, found = distributed.get_rank(), {}
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))[rank : rank + 1]
    for name, wrap in WRAPPERS.items():
        torch.manual_seed(0)
        model = wrap(Layer())
        model(x).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        found[name] = model(x).tolist()
    return found


def _sharded(layer: Layer) -> torch.nn.Module:
    mesh = distributed.init_device_mesh("cpu", (2,))
    return fully_shard(layer, mesh=mesh)


WRAPPERS: dict[str, Callable[[Layer], torch.nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": lambda layer: FullyShardedDataParallel(layer, device_id=torch.device("cpu")),
    "fully_shard": _sharded,
}


@pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")
def test_data_parallel_and_sharded_training_equal_one_process() -> None:
    torch.manual_seed(0)
    layer = Layer()
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))
    (layer(x).square().sum() / 2).backward()  # ranks average
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    want = layer(x).detach()
    [results] = run_ranks(2, _train_on_a_rank)
    for rank, found in enumerate(results):
        assert isinstance(found, dict), found
        assert list(found) == list(WRAPPERS)
        for name, out in found.items():
            torch.testing.assert_close(torch.tensor(out), want[rank : rank + 1], msg=name)


def test_layers_share_the_mask_of_an_attention_mask_which_goes_with_it() -> None:
    layers = [DotProductAttention(4, 8, attn_mask_type="arbitrary", qkv_format="bshd") for _ in range(2)]
    attention_mask = torch.rand(6, 6) < 0.3
    first, second = (layer(Q, Q, Q, attention_mask=attention_mask) for layer in layers)
    assert torch.equal(first, second)
    (shared,) = {entry.mask for entry in sequences._recent._entries.values() if entry.owners[0]() is attention_mask}
    attention_mask[:, 1] = ~attention_mask[:, 1]
    changed = layers[0](Q, Q, Q, attention_mask=attention_mask)
    assert not torch.equal(first, changed)
    torch.testing.assert_close(changed, layers[0](Q, Q, Q, attention_mask=attention_mask.clone()))
    (other,) = {entry.mask for entry in sequences._recent._entries.values() if entry.owners[0]() is attention_mask}
    assert other is not shared
    memory = weakref.ref(other.tensors[0])
    del other, shared, attention_mask
    assert memory() is None
