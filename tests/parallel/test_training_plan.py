"""Plans of meshes: their bytes equal those of runs over gloo, their memory that of the tensors that layers keep."""

from __future__ import annotations

import functools
import itertools
import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from counted_bytes import CountedBytes
from gloo_ranks import run_ranks
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import undivided
from undivided import InputError, TransformerLayer, masks
from undivided.cli._app import application
from undivided.parallel import parallelize
from undivided.parallel.plan import PRESETS, Cluster, Model, bytes_in, bytes_per_second, plan_training
from undivided.parallel.plan.memory import activation_bytes, logit_bytes
from undivided.parallel.plan.traffic import PassBytes, parameter_bytes, tensor_bytes

HIDDEN, FFN, VOCABULARY, LENGTH, BATCH = 32, 64, 48, 16, 2
PLAIN = Model(2, HIDDEN, 4, 2, 8, FFN, VOCABULARY, gated=False, bias=True, norm_bias=True)
GATED = Model(2, HIDDEN, 4, 2, 8, FFN, VOCABULARY)


def make_layer(model: Model, dtype: torch.dtype = torch.float32) -> TransformerLayer:
    torch.manual_seed(0)
    return TransformerLayer(
        model.hidden,
        model.ffn,
        model.heads,
        model.kv_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_input_format="bshd",
        self_attn_mask_type="causal",
        activation="swiglu" if model.gated else "gelu",
        normalization="LayerNorm" if model.norm_bias else "RMSNorm",
        bias=model.bias,
        params_dtype=dtype,
    )


class Decoder(torch.nn.Module):
    """The logits of the next token."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(model.vocabulary, model.hidden)
        self.layers = torch.nn.ModuleList(make_layer(model) for _ in range(model.layers))
        self.norm = torch.nn.LayerNorm(model.hidden, bias=model.norm_bias)
        self.head = torch.nn.Linear(model.hidden, model.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def passes(forward: CountedBytes, backward: CountedBytes) -> PassBytes:
    return PassBytes(forward.sent, backward.sent)


def count_tensor_ranks() -> list[tuple[bool, bool, bool, PassBytes, int]]:
    """(gated, sequence parallel, recomputed, bytes of a layer, its parameters on this rank)."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tensor",))
    found = []
    for model, sequence_parallel, recompute in itertools.product((PLAIN, GATED), (False, True), (False, True)):
        layer = parallelize(make_layer(model), mesh["tensor"], sequence_parallel)
        length = LENGTH // mesh.size() if sequence_parallel else LENGTH
        x = torch.randn(BATCH, length, HIDDEN, requires_grad=True)
        forward, backward = CountedBytes(), CountedBytes()
        with forward:
            out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        with backward:
            out.sum().backward()
        own = sum(p.to_local().numel() for p in layer.parameters())
        found.append((model.gated, sequence_parallel, recompute, passes(forward, backward), own))
    return found


def count_data_ranks() -> tuple[PassBytes, int, int]:
    """(bytes of a model whose parameters are shared, its parameters, those of this rank)."""
    model = Decoder(PLAIN)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("data",))
    count = sum(p.numel() for p in model.parameters())
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    forward, backward = CountedBytes(), CountedBytes()
    with forward:
        out = model(torch.zeros(1, LENGTH, dtype=torch.int64))
    with backward:
        out.float().sum().backward()
    return passes(forward, backward), count, sum(p.to_local().numel() for p in model.parameters())


def count_context_ranks() -> dict[tuple[str, bool], PassBytes]:
    """The bytes of a layer by strategy, kept or recomputed."""
    found = {}
    for strategy, recompute in itertools.product(("ring", "all_gather", "all_to_all"), (False, True)):
        layer = make_layer(PLAIN)
        context = undivided.ContextParallel(distributed.group.WORLD, strategy).bind(LENGTH, mask=masks.causal())
        layer.set_context_parallel_group(context)
        x = context.shard(torch.randn(1, LENGTH, HIDDEN), dim=1).requires_grad_()
        out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        used = layer.self_attention.core_attention.context_parallel or context
        forward = used.traffic.bytes_sent
        out.sum().backward()
        found[strategy, recompute] = PassBytes(forward, used.traffic.bytes_sent - forward)
    return found


@functools.cache
def runs() -> list[list[Any]]:
    """What the three counts found, by rank of two."""
    return run_ranks(2, count_tensor_ranks, count_data_ranks, count_context_ranks)


def test_tensor_ranks_send_what_is_planned() -> None:
    for answers in runs()[0]:
        assert isinstance(answers, list), answers
        assert len(answers) == 8
        for gated, sequence_parallel, recompute, sent, own in answers:
            model = GATED if gated else PLAIN
            planned = tensor_bytes(
                model, BATCH * LENGTH, 2, 4, sequence_parallel=sequence_parallel, recompute=recompute
            )
            assert sent == planned, (gated, sequence_parallel, recompute)
            assert own == model.layer_parameters(2)
            if sequence_parallel:
                (option,) = plan_training(
                    model, Cluster(1, 2), LENGTH, BATCH, None, torch.float32, tensor=2, data=1, recompute=recompute
                ).options
                one = tensor_bytes(model, LENGTH, 2, 4, sequence_parallel=True, recompute=recompute)
                assert option.axes[2].sent == model.layers * BATCH * one.both, "one sequence is one batch"


def test_ranks_that_share_parameters_send_what_is_planned() -> None:
    for answer in runs()[1]:
        assert isinstance(answer, tuple), answer
        sent, count, own = answer
        assert count == PLAIN.parameters
        assert own == PLAIN.parameters // 2
        assert sent == parameter_bytes(PLAIN, 1, 2, 2, 4)
        (option,) = plan_training(PLAIN, Cluster(1, 2), LENGTH, 4, data=2, recompute=False).options
        assert option.micro_batches == 2
        assert option.axes[0].sent == 2 * sent.both


def test_context_ranks_send_what_is_planned() -> None:
    answers = runs()[2]
    assert all(isinstance(answer, dict) for answer in answers), answers
    for strategy, recompute in answers[0]:
        busiest = max(answer[strategy, recompute].both for answer in answers)
        cluster = Cluster(1, 2)
        planned = plan_training(
            PLAIN, cluster, LENGTH, 1, masks.causal(), torch.float32, context=2, recompute=recompute, strategy=strategy
        )
        (option,) = planned.options
        assert option.strategy == strategy
        assert option.axes[1].sent == PLAIN.layers * busiest
        assert busiest > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", [PLAIN, GATED, Model(1, 64, 8, 8, 8, 96, 10)], ids=["plain", "gated", "mha"])
def test_activations_are_the_tensors_that_a_layer_keeps(model: Model, dtype: torch.dtype) -> None:
    layer = make_layer(model, dtype)
    x = torch.randn(BATCH, 64, model.hidden, dtype=dtype, requires_grad=True)
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = layer(x)
    planned = activation_bytes(model, 1, dtype.itemsize, sequence_parallel=False, recompute=False)
    assert out.requires_grad
    assert sum(kept.values()) == planned * BATCH * 64


def test_activations_of_megatron() -> None:
    """Equation 2 of Korthikanti et al. without scores and dropout: 32 h bytes; all but 2 h numbers divided by t."""
    model = Model(1, 1024, 16, 16, 64, 4096, 10, gated=False, norm_bias=True)
    whole = activation_bytes(model, 1, 2, sequence_parallel=False, recompute=False)
    assert whole == 32 * 1024 + 4 * 16 + 8
    divided = activation_bytes(model, 4, 2, sequence_parallel=True, recompute=False)
    assert divided == 4 * 1024 + (whole - 4 * 1024) / 4
    assert activation_bytes(model, 4, 2, sequence_parallel=True, recompute=True) == 2 * 1024 / 4


def test_the_parameters_of_the_presets_are_the_published_ones() -> None:
    counts = {name: round(model.parameters / 1e9, 1) for name, model in PRESETS.items()}
    assert counts == {"1b": 1.5, "8b": 8.0, "70b": 70.6, "405b": 405.9, "gpt3": 175.2}  # 1b: its head is its own


class TestSearch:
    CLUSTER = Cluster(2, 4, memory=40_000_000_000)

    def test_every_mesh_divides_ranks_heads_and_batch(self) -> None:
        found = plan_training(PRESETS["1b"], self.CLUSTER, 4096, 4, masks.causal())
        for option in found.options:
            assert option.data * option.context * option.tensor == 8
            assert 4 % option.data == 0
            assert option.micro_batches * option.data == 4
            assert PRESETS["1b"].heads % option.tensor == 0
        assert {option.tensor for option in found.options} == {1, 2, 4}, "at most the GPUs of a node"

    def test_those_that_fit_come_first_and_the_fastest_of_them_is_the_best(self) -> None:
        found = plan_training(PRESETS["8b"], self.CLUSTER, 8192, 8, masks.causal())
        fits = [option.fits for option in found.options]
        assert sorted(fits, reverse=True) == fits
        assert found.best is not None
        assert found.best.seconds == min(option.seconds for option in found.options if option.fits)

    def test_the_longest_sequence_fits_and_a_longer_one_does_not(self) -> None:
        arguments: dict[str, Any] = {"data": 1, "context": 4, "tensor": 2, "recompute": True}
        (option,) = plan_training(PRESETS["1b"], self.CLUSTER, 8192, 1, masks.causal(), **arguments).options
        longest = option.longest
        assert longest > 8192
        (there,) = plan_training(PRESETS["1b"], self.CLUSTER, longest, 1, masks.causal(), **arguments).options
        assert there.fits
        (beyond,) = plan_training(
            PRESETS["1b"], self.CLUSTER, int(longest * 1.02), 1, masks.causal(), **arguments
        ).options
        assert not beyond.fits

    def test_a_group_on_one_node_sends_nothing_over_the_network(self) -> None:
        found = plan_training(PRESETS["1b"], self.CLUSTER, 4096, 2, masks.causal(), recompute=False)
        by_mesh = {option.mesh: option for option in found.options}
        data, context, tensor = by_mesh["2x2x2"].axes
        assert (context.network, tensor.network) == (0, 0)
        assert data.size == 4, "data and context ranks share parameters"
        assert data.network == data.sent / 2, "two consecutive ranks of the ring on each node"
        assert by_mesh["1x8x1"].axes[1].network == by_mesh["1x8x1"].axes[1].sent * 4 / 7

    def test_the_links_decide_the_mesh(self) -> None:
        """On a slow network the context ranks stay on one node; parameters are gathered while they compute."""
        slow = Cluster(2, 4, link=1e8, intra=9e11, memory=80_000_000_000)
        found = plan_training(PRESETS["1b"], slow, 32768, 2, masks.causal())
        assert found.best is not None
        assert all(axis.network == 0 for axis in found.best.axes[1:])

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"seq_len": 0}, "seq_len must be an integer from 1 to"),
            ({"batch": True}, "batch must be an integer from 1 to"),
            ({"tensor": 3}, "tensor must fit a mesh of 8 ranks"),
            ({"data": 0}, "data must be a positive integer or None, got 0"),
            ({"batch": 3, "context": 1}, "context must fit a mesh of 8 ranks"),
            ({"strategy": "rings"}, "strategy must be one of 'ring'"),
            ({"context": 2, "tensor": 4, "strategy": "ring+all_to_all"}, "must fit a mesh of 8 ranks"),
        ],
    )
    def test_wrong_sizes_are_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=re.escape(message)):
            plan_training(PRESETS["1b"], self.CLUSTER, **{"seq_len": 4096, **changes})

    @pytest.mark.parametrize("field", ["layers", "hidden", "vocabulary"])
    @pytest.mark.parametrize("value", [0, -1, 1.5, True, 1 << 40])
    def test_wrong_models_are_refused(self, field: str, value: Any) -> None:
        sizes = {"layers": 1, "hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 8, "vocabulary": 9}
        with pytest.raises(InputError, match=f"{field} must be an integer from 1"):
            Model(**{**sizes, field: value})

    def test_wrong_clusters_are_refused(self) -> None:
        for changes in ({"nodes": 0}, {"link": -1.0}, {"memory": float("inf")}, {"reserve": 80_000_000_000}):
            (name,) = changes
            with pytest.raises(InputError, match=f"{name} must be"):
                Cluster(**{"nodes": 2, "gpus": 8, **changes})


@pytest.mark.parametrize(
    ("text", "rate"),
    [("400gbit", 5e10), ("400 Gbit/s", 5e10), ("200 gbitps", 2.5e10), ("900GB/s", 9e11), ("1GiB", 2.0**30)],
)
def test_rates(text: str, rate: float) -> None:
    assert bytes_per_second("link", text) == rate


@pytest.mark.parametrize("text", ["400", "", "gbit", "-1GB", "0GB", "nan GB", "1Gb", "1e999GB", "1iB", "٣GB"])
def test_texts_without_a_unit_or_a_number_are_refused(text: str) -> None:
    for read in (bytes_per_second, bytes_in):
        with pytest.raises(InputError, match="must be a"):
            read("link", text)


def test_a_rate_is_not_a_size() -> None:
    assert bytes_in("memory", "141GB") == 141_000_000_000
    for text in ("141GB/s", "141gbit", "0.1B"):
        with pytest.raises(InputError, match="memory must be a size in bytes"):
            bytes_in("memory", text)


def test_logits_are_divided_with_the_sequence() -> None:
    assert logit_bytes(PLAIN, 2, 2, sequence_parallel=True) == VOCABULARY * 10 / 2


class TestCommand:
    """`undivided plan --nodes`."""

    SMALL = ("plan", "2048", "--nodes", "2", "--gpus", "2", "--model", "1b")

    @staticmethod
    def run(*words: str, columns: str = "80") -> Any:
        return CliRunner().invoke(
            application(*words[:1]), list(words), env={"COLUMNS": columns}, catch_exceptions=False
        )

    def test_prints_the_meshes_the_best_one_and_its_costs(self) -> None:
        done = self.run(*self.SMALL)
        assert done.exit_code == 0, done.output
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "1.5 G parameters, 4 sequences of 2,048 tokens per step" in " ".join(done.stdout.split())
        assert "Recommended: 4 data x 1 context x 1 tensor ranks" in done.stdout
        for word in ("network", "intra", "longest", "states", "activations", "logits"):
            assert word in done.stdout

    def test_json_has_every_mesh(self) -> None:
        done = self.run(*self.SMALL, "--json", "--link", "200gbit", "--layers", "3", "--mask", "none")
        found = json.loads(done.stdout)
        assert (found["cluster"]["link"], found["model"]["layers"], found["fits"]) == (2.5e10, 3, True)
        (option,) = plan_training(
            replace(PRESETS["1b"], layers=3), Cluster(2, 2, link=2.5e10), 2048, data=4, recompute=False
        ).options
        same = next(one for one in found["options"] if one["mesh"]["data"] == 4 and not one["recompute"])
        assert same["seconds"] == option.seconds
        assert same["memory"]["total"] == option.memory.total

    def test_if_nothing_fits_it_names_the_least_and_the_longest(self) -> None:
        done = self.run(*self.SMALL, "--memory", "12GB", "--batch", "4", columns="200")
        assert done.exit_code == 1
        assert "No mesh fits 2,048 tokens" in done.stdout
        assert json.loads(self.run(*self.SMALL, "--memory", "12GB", "--json").stdout)["fits"] is False

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--nodes", "2", "--link", "400"), "--link must be a rate"),
            (("--nodes", "2", "--memory", "80"), "--memory must be a size in bytes"),
            (("--nodes", "2", "--reserve", "90GB"), "reserve must be at least 0 and less than memory"),
            (("--nodes", "2", "--model", "9b"), "--model must be one of 1b, 8b"),
            (("--nodes", "2", "--heads", "7"), "--hidden must be a multiple of 7 heads"),
            (("--nodes", "2", "--world", "4"), "--nodes, --gpus must be given without --world"),
            (("4096", "--layers", "3"), "--layers must be given together with --nodes or --gpus"),
            (("4096", "--intra", "1GB"), "--intra must be given together with --nodes or --gpus"),
            ((), "SEQ_LEN must be given, or a cluster"),
        ],
    )
    def test_bad_requests_are_refused(self, words: tuple[str, ...], message: str) -> None:
        done = self.run("plan", *words)
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in done.stderr
