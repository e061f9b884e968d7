"""Attention of DTensors equals one process: outputs, log-sum-exps and gradients, placed as the inputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import undivided
from undivided import InputError, masks
from undivided.masks._slice import CallSlice, slice_mask

BATCH, LENGTH, HEADS, KV_HEADS, SIZE = 4, 16, 8, 4, 8
WHOLE = Replicate()
NAMES = ("q", "k", "v", "bias", "sinks", "alibi_slopes")
LENGTHS = torch.tensor([16, 3, 9, 12])
IDS = (torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % LENGTH) // torch.tensor([[4], [5], [6], [16]])
DENSE = torch.rand(BATCH, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.7
BLOCKS = torch.tensor([[[0, -1], [1, 0], [2, 1], [3, 0]], [[0, -1], [1, -1], [2, 0], [3, 1]]])


def by_head(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx <= q_idx + h + b


CASES: dict[str, tuple[str, dict[str, Sequence[Any]], Callable[[], dict[str, Any]]]] = {
    "gqa-batch-and-heads-replicated-keys": (
        "bshd",
        {
            "q": (Shard(0), Shard(2)),
            "k": (Shard(0), WHOLE),
            "v": (WHOLE, WHOLE),
            "bias": (WHOLE, Shard(1)),
            "sinks": (WHOLE, Shard(0)),
            "alibi_slopes": (WHOLE, WHOLE),
        },
        lambda: {"mask": masks.causal() & masks.lengths(LENGTHS, LENGTHS)},
    ),
    "dropout-of-a-part-of-batch-and-heads": (
        "bhsd",
        {"q": (Shard(0), Shard(1)), "k": (Shard(0), Shard(1)), "v": (Shard(0), Shard(1)), "bias": (Shard(0), WHOLE)},
        lambda: {"mask": masks.document_ids(IDS) & masks.dense(DENSE), "dropout_p": 0.3, "dropout_seed": 5},
    ),
    "heads-over-both-axes": (
        "sbhd",
        {"q": (Shard(2), Shard(2)), "k": (Shard(2), Shard(2)), "v": (WHOLE, WHOLE), "alibi_slopes": (Shard(0), WHOLE)},
        lambda: {"mask": masks.causal() & masks.blocks(4, 4, BLOCKS) & masks.predicate(by_head)},
    ),
    "packed-heads-with-dropout": (
        "thd",
        {"q": (WHOLE, Shard(1)), "k": (WHOLE, Shard(1)), "v": (WHOLE, WHOLE), "sinks": (WHOLE, WHOLE)},
        lambda: {"mask": masks.documents([0, 5, 16]) & masks.causal(), "dropout_p": 0.2, "dropout_seed": 7},
    ),
    "replicated": (
        "bshd",
        {"q": (WHOLE, WHOLE), "k": (WHOLE, WHOLE), "v": (WHOLE, WHOLE), "bias": (WHOLE, WHOLE)},
        lambda: {"mask": masks.window(3, 0), "softcap": 4.0},
    ),
}
"""Layout, placements over two mesh axes of two ranks, and options."""


def draw(layout: str, names: Sequence[str]) -> dict[str, Tensor]:
    """The whole tensors, the same on every rank."""
    torch.manual_seed(0)
    axes = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3), "thd": (1, 2, 3)}[layout]

    def tokens(heads: int) -> Tensor:
        sizes = (BATCH, LENGTH, heads, SIZE)
        return torch.randn([sizes[axis] for axis in axes], requires_grad=True)

    shapes = {"bias": (1 if layout == "bshd" else BATCH, HEADS, LENGTH, LENGTH), "sinks": (HEADS,)}
    made = {"q": tokens(HEADS), "k": tokens(KV_HEADS), "v": tokens(KV_HEADS)}
    for name in names[3:]:
        made[name] = torch.randn(shapes.get(name, (HEADS,)), requires_grad=True)
    return made


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.detach() - expected.detach()).norm() / expected.detach().norm().clamp(min=1e-3))


def compare_case(name: str) -> dict[str, float]:
    """Relative differences from one process by the name of the result."""
    layout, placements, options = CASES[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    whole = draw(layout, list(placements))
    parts = {
        n: distribute_tensor(t.detach(), mesh, placements[n], src_data_rank=None).requires_grad_()
        for n, t in whole.items()
    }

    def run(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return undivided.attention(**tensors, layout=layout, return_lse=True, **options())

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        return (out * out).sum() + lse.where(lse.isfinite(), 0.0).square().sum()

    expected, found = run(whole), run(parts)
    assert isinstance(found[0], DTensor)
    assert found[0].placements == parts["q"].placements
    assert found[0].shape == expected[0].shape
    assert found[1].shape == expected[1].shape
    finite = expected[1].isfinite()
    loss(*expected).backward()
    # the mean over replicas: each of the two mesh axes counts its ranks once
    for part, whole_part in zip(found, expected, strict=True):
        gradient = whole_part.detach().where(whole_part.isfinite(), 0.0) * 2
        part.backward(distribute_tensor(gradient, mesh, part.placements, src_data_rank=None), retain_graph=True)
    return {
        "out": relative(found[0].full_tensor(), expected[0]),
        "lse": relative(found[1].full_tensor().where(finite, 0.0), expected[1].where(finite, 0.0)),
        **{n: relative(parts[n].grad.full_tensor(), whole[n].grad) for n in whole},
    }


def compare_context() -> dict[str, float]:
    """Sequences over context ranks and heads over tensor ranks, with dropout."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tensor"))
    context = undivided.ContextParallel(mesh["context"]).bind(LENGTH)
    whole = draw("bshd", NAMES)
    sequence, heads = {"q": 1, "k": 1, "v": 1, "bias": 2}, {"q": 2, "k": 2, "v": 2, "bias": 1, "sinks": 0}

    def own(name: str, t: Tensor) -> Tensor:
        t = context.shard(t, dim=sequence[name]) if name in sequence else t
        rank = mesh["tensor"].get_local_rank()
        return t.chunk(2, heads[name])[rank] if name in heads else t

    def placed(name: str) -> list[Any]:
        return [Shard(sequence[name]) if name in sequence else WHOLE, Shard(heads[name]) if name in heads else WHOLE]

    parts = {
        n: DTensor.from_local(own(n, t.detach()).contiguous(), mesh, placed(n)).requires_grad_()
        for n, t in whole.items()
    }
    options = {"layout": "bshd", "mask": masks.causal(), "dropout_p": 0.3, "dropout_seed": 11}
    expected = undivided.attention(**whole, **options)
    expected.square().sum().backward()
    found = undivided.attention(**parts, **options, context_parallel=context)
    found.backward(DTensor.from_local(2 * own("q", expected.detach()), mesh, placed("q")))
    differences = {"out": relative(found.to_local(), own("q", expected))}
    for n, t in whole.items():
        gradient = parts[n].grad
        if n in sequence:
            differences[n] = relative(gradient.to_local(), own(n, t.grad))
        else:
            differences[n] = relative(gradient.full_tensor(), t.grad)
    decision = undivided.explain(**parts, **options, context_parallel=context)
    assert decision.problem.heads == HEADS // 2
    return differences


def compare_sdpa() -> dict[str, float]:
    """PyTorch's function with masks as plain tensors and as DTensors."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = draw("bhsd", NAMES[:3])
    parts = {n: distribute_tensor(t.detach(), mesh, [Shard(0), Shard(1)], src_data_rank=None) for n, t in whole.items()}
    differences = {}
    for kind in ("plain", "distributed", "added"):
        mask = DENSE.to(torch.float32) if kind == "added" else DENSE
        expected = undivided.scaled_dot_product_attention(*whole.values(), mask, enable_gqa=True)
        own = mask if kind == "plain" else distribute_tensor(mask, mesh, [Shard(0), WHOLE], src_data_rank=None)
        found = undivided.scaled_dot_product_attention(*parts.values(), own, enable_gqa=True)
        differences[kind] = relative(found.full_tensor(), expected)
    return differences


@functools.cache
def results() -> list[list[Any]]:
    return run_ranks(4, *[functools.partial(compare_case, name) for name in CASES], compare_context, compare_sdpa)


@pytest.mark.parametrize("case", [*CASES, "context", "sdpa"])
def test_four_ranks_equal_one_process(case: str) -> None:
    answers = dict(zip([*CASES, "context", "sdpa"], results(), strict=True))[case]
    for answer in answers:
        assert isinstance(answer, dict), answer
        assert all(difference < 1e-5 for difference in answer.values()), answer


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A mesh of 2 x 2 ranks that never communicate; this process is the last."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    distributed.destroy_process_group()


def part(mesh: Any, shape: Sequence[int], *placements: Any, gradient: bool = False) -> Any:
    """A DTensor of this local shape, with random values."""
    return DTensor.from_local(torch.randn(*shape), mesh, placements or [WHOLE, WHOLE]).requires_grad_(gradient)


def attend(mesh: Any, q: Any, k: Any = None, **options: Any) -> Any:
    k = part(mesh, (4, 6, 2, 8)) if k is None else k
    return undivided.attention(q, k, k, **{"layout": "bshd", **options})


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "plain-k": (
        lambda m: attend(m, part(m, (4, 6, 4, 8)), torch.randn(4, 6, 2, 8)),
        "k must be a DTensor as q is, not a mixture, got a plain tensor\n  HINT: torch.distributed.tensor.distribute",
    ),
    "plain-q": (lambda m: attend(m, torch.randn(4, 6, 4, 8)), "q must be a DTensor as k is, not a mixture"),
    "plain-sinks": (lambda m: attend(m, part(m, (4, 6, 4, 8)), sinks=torch.zeros(4)), "sinks must be a DTensor as q"),
    "partial": (
        lambda m: attend(m, part(m, (4, 6, 4, 8), WHOLE, Partial())),
        r"q must be sharded or replicated, got P\(sum\) over mesh axis 'tensor'\n"
        r"  HINT: q.redistribute\(placements=\[Replicate\(\), Replicate\(\)\]\)",
    ),
    "head-size": (
        lambda m: attend(m, part(m, (2, 6, 4, 4), Shard(0), Shard(3))),
        r"q must not be sharded on the head size.*got S\(3\).*\n.*placements=\[Shard\(0\), Replicate\(\)\]\)",
    ),
    "sequence": (
        lambda m: attend(m, part(m, (4, 3, 4, 8), WHOLE, Shard(1))),
        r"q must be replicated or sharded on batch or heads, without context_parallel, got S\(1\)",
    ),
    "other-axis": (
        lambda m: attend(m, part(m, (4, 6, 2, 8), WHOLE, Shard(2)), part(m, (2, 6, 2, 8), WHOLE, Shard(0))),
        r"k must follow q, which shards its heads there, got S\(0\) over mesh axis 'tensor'\n"
        r"  HINT: k.redistribute\(placements=\[Replicate\(\), Shard\(2\)\]\)",
    ),
    "only-k": (
        lambda m: attend(m, part(m, (4, 6, 4, 8)), part(m, (4, 6, 1, 8), WHOLE, Shard(2))),
        r"k must follow q, which is replicated there.*\n.*placements=\[Replicate\(\), Replicate\(\)\]",
    ),
    "second-axis-alone": (
        lambda m: attend(m, part(m, (4, 6, 1, 8), Shard(2), Shard(2)), part(m, (4, 6, 1, 8), WHOLE, Shard(2))),
        "k must shard its heads over the axis before too, as q does, or be replicated",
    ),
    "uneven": (
        lambda m: attend(
            m,
            distribute_tensor(torch.randn(3, 6, 4, 8), m, [Shard(0), WHOLE], src_data_rank=None),
            part(m, (3, 6, 2, 8)),
        ),
        r"q must have equal shards: 3 is not a multiple of 2 ranks, got S\(0\) over mesh axis 'data'",
    ),
    "uneven-keys": (
        lambda m: attend(
            m,
            part(m, (4, 6, 3, 8), WHOLE, Shard(2)),
            distribute_tensor(torch.randn(4, 6, 3, 8), m, [WHOLE, Shard(2)], src_data_rank=None),
        ),
        "k must have equal shards: 3 is not a multiple of 2 ranks",
    ),
    "groups": (
        lambda m: attend(m, part(m, (4, 6, 6, 8), WHOLE, Shard(2)), part(m, (4, 6, 3, 8))),
        "q must have whole groups on each rank .4 query heads per key head.*got 6 query heads",
    ),
    "another-mesh": (
        lambda m: attend(m, part(m, (4, 6, 4, 8)), DTensor.from_local(torch.randn(4, 6, 2, 8), m["data"], [WHOLE])),
        "k must be on the mesh of q",
    ),
    "dropout-without-seed": (
        lambda m: attend(m, part(m, (4, 6, 4, 8)), dropout_p=0.1),
        "dropout_seed must be given with DTensors",
    ),
    "pages": (
        lambda m: attend(m, part(m, (4, 6, 4, 8)), pages=torch.zeros(4, 1, dtype=torch.int32)),
        "pages must be None with DTensors",
    ),
    "mask-of-one-rank": (
        lambda m: attend(m, part(m, (2, 6, 4, 8), Shard(0), WHOLE), mask=masks.lengths([1, 2])),
        "mask must have one entry of lengths for each of the 4 batch elements, got 2 entries",
    ),
    "mask-of-dtensors": (
        lambda m: masks.lengths(DTensor.from_local(torch.tensor([1, 2]), m, [Shard(0), WHOLE])),
        r"kv must be a plain tensor, got a DTensor\n.*kv.full_tensor\(\)",
    ),
    "wrong-size": (
        lambda m: attend(m, part(m, (4, 6, 2, 8), WHOLE, Shard(2)), part(m, (4, 6, 2, 9))),
        "head size of q",
    ),
    "context-of-other-ranks": (
        lambda m: attend(m, part(m, (4, 6, 4, 8)), context_parallel=undivided.ContextParallel(m["data"])),
        r"q must be sharded on its sequence .axis 1. over the ranks of context_parallel, \[\[1, 3\]\], got .*none",
    ),
    "keys-outside-of-the-context": (
        lambda m: attend(
            m,
            part(m, (4, 3, 4, 8), Shard(1), WHOLE),
            part(m, (4, 6, 2, 8)),
            context_parallel=undivided.ContextParallel(m["data"]),
        ),
        r"k must follow q, which shards its sequence there, got R over.*\n  HINT: DTensor.from_local\(context.shard\(k",
    ),
    "unequal-parts-of-a-context": (
        lambda m: attend(
            m,
            part(m, (4, 4, 4, 8), Shard(1), WHOLE),
            part(m, (4, 4, 2, 8), Shard(1), WHOLE),
            context_parallel=undivided.ContextParallel(m["data"]).bind(9),
        ),
        r"context_parallel must give every rank equally many tokens if q, k and v are DTensors, got \[.*\] tokens of q"
        r"\n  HINT: pad the sequence",
    ),
    "explain": (
        lambda m: undivided.explain(
            part(m, (4, 6, 2, 4), WHOLE, Shard(3)), *[part(m, (4, 6, 2, 8))] * 2, layout="bshd"
        ),
        "q must not be sharded on the head size",
    ),
    "sdpa-of-three-axes": (
        lambda m: undivided.scaled_dot_product_attention(*[part(m, (4, 6, 8))] * 3),
        r"query must be \[B, H, S, D\] as key is, if they are DTensors",
    ),
    "sdpa-dropout": (
        lambda m: undivided.scaled_dot_product_attention(*[part(m, (4, 2, 6, 8))] * 3, dropout_p=0.5),
        "dropout_seed must be given with DTensors",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_placements_that_would_need_communication_are_refused(mesh: Any, case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(InputError, match=rf"(?s){message}"):
        call(mesh)


def test_explain_shows_the_local_decision(mesh: Any) -> None:
    q, k = part(mesh, (2, 6, 4, 8), Shard(0), Shard(2)), part(mesh, (2, 6, 1, 8), Shard(0), Shard(2))
    decision = undivided.explain(q, k, k, layout="bshd", mask=masks.causal())
    assert (decision.problem.batch, decision.problem.heads, decision.problem.kv_heads) == (2, 4, 1)


def test_gradients_of_replicated_keys_are_partial_sums(mesh: Any) -> None:
    q, k = part(mesh, (4, 6, 2, 8), WHOLE, Shard(2), gradient=True), part(mesh, (4, 6, 2, 8), gradient=True)
    attend(mesh, q, k).sum().backward()
    assert q.grad.placements == q.placements
    assert k.grad.placements == (WHOLE, Partial())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_call_equals_the_eager_one(mesh: Any) -> None:
    q, k = part(mesh, (2, 6, 4, 8), Shard(0), Shard(2), gradient=True), part(mesh, (2, 6, 2, 8), Shard(0), WHOLE)

    def call(q: Any, k: Any) -> Any:
        return attend(
            mesh, q, k, mask=masks.causal() & masks.lengths(LENGTHS[:4].clamp(max=6), LENGTHS[:4].clamp(max=6))
        )

    compiled = torch.compile(call, backend="aot_eager")
    expected = call(q, k)
    torch.testing.assert_close(compiled(q, k).to_local(), expected.to_local())
    torch._dynamo.reset()


def test_autocast_casts_the_local_parts(mesh: Any) -> None:
    q = part(mesh, (4, 6, 2, 8), WHOLE, Shard(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(mesh, q).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["native", "reference", "triton"])
def test_every_backend_drops_for_a_part_what_it_drops_in_the_whole(mesh: Any, backend: str) -> None:
    """The last rank has the second half of the batch and of the heads."""
    whole = draw("bshd", NAMES[:3])
    parts = {n: distribute_tensor(t.detach(), mesh, [Shard(0), Shard(2)], src_data_rank=None) for n, t in whole.items()}
    parts = {n: t.requires_grad_() for n, t in parts.items()}
    options = {"layout": "bshd", "mask": masks.causal(), "dropout_p": 0.5, "dropout_seed": 3, "backend": backend}
    own = (slice(BATCH // 2, None), slice(None))
    expected, found = undivided.attention(**whole, **options), undivided.attention(**parts, **options)
    torch.testing.assert_close(found.to_local(), expected[(*own, slice(HEADS // 2, None))])
    expected.square().sum().backward()
    found.to_local().square().sum().backward()
    for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        right = whole[name].grad[(*own, slice(heads // 2, None))]
        torch.testing.assert_close(parts[name].grad.to_local(), right, rtol=1e-4, atol=1e-5)


def test_verify_knows_what_a_part_of_the_batch_drops(mesh: Any) -> None:
    """A mask with the numbers of the first sequence and head, as a rank's own call has it."""
    mask = slice_mask(masks.causal(), CallSlice(BATCH, (2, 4), HEADS, (4, 8)), with_origin=True)
    q, k = torch.randn(2, LENGTH, 4, SIZE), torch.randn(2, LENGTH, 2, SIZE)
    report = undivided.verify(q, k, k, layout="bshd", mask=mask, dropout_p=0.3, dropout_seed=4, backend="native")
    assert report.ok, report


def test_a_result_is_on_the_mesh_of_its_query(mesh: Any) -> None:
    """It was on an equal mesh of an earlier call, whose process groups may have been destroyed."""
    equal = init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names)
    assert equal == mesh
    assert equal is not mesh
    for own in (mesh, equal):
        assert attend(own, part(own, (4, 6, 2, 8), WHOLE, Shard(2))).device_mesh is own
