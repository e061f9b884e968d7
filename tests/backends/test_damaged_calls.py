"""A damaged call runs, or raises one of the library's two errors."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import undivided
from undivided import InputError, NoBackendError, masks

FUZZ = settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def damaged_calls() -> st.SearchStrategy[tuple[str, Any]]:
    """(argument, value): one argument of a valid call replaced by something that may or may not be wrong."""
    dtypes = st.sampled_from([torch.float32, torch.float64, torch.int32, torch.bool, torch.complex64, torch.uint8])
    shapes = st.lists(st.integers(0, 4), max_size=5)
    tensors = st.builds(lambda s, t: torch.ones(s, dtype=t), shapes, dtypes)
    strange = st.sampled_from(
        [
            None,
            True,
            False,
            0,
            1,
            -1,
            2**70,
            2**2000,
            0.0,
            0.5,
            -0.5,
            math.nan,
            math.inf,
            1j,
            "x",
            "bshd",
            "reference",
            b"",
            [],
            [1.0],
            (),
            {},
            set(),
            object(),
            torch.float32,
            torch.device("cpu"),
            Ellipsis,
            slice(None),
            print,
            int,
        ]
    )
    anything = st.one_of(
        tensors,
        strange,
        tensors.map(lambda t: t.to("meta")),
        tensors.map(lambda t: t.to_sparse()),
        st.sampled_from(
            [masks.causal("top_left"), masks.lengths([2]), masks.documents([0, 2]), masks.prefix([1, 2, 3])]
        ),
    )
    names = st.sampled_from(
        "q k v layout mask bias scale softcap alibi_slopes sinks dropout_p dropout_seed backend "
        "deterministic return_lse "
        "pages".split()
    )
    return st.tuples(names, anything)


@settings(FUZZ, max_examples=600)
@given(st.lists(damaged_calls(), min_size=1, max_size=2), st.booleans())
def test_a_damaged_call_runs_or_raises_one_of_the_two_errors(damage: list[tuple[str, Any]], packed: bool) -> None:
    arguments: dict[str, Any] = {n: torch.ones(2, 3, 2, 4) for n in "qkv"} | {"layout": "bshd", "dropout_p": 0.5}
    if packed:
        arguments |= {n: torch.ones(3, 2, 4) for n in "qkv"} | {"layout": "thd", "mask": masks.documents([0, 1, 3])}
    arguments |= dict(damage)
    q, k, v = (arguments.pop(n) for n in "qkv")
    try:
        out = undivided.attention(q, k, v, **arguments)
    except (InputError, NoBackendError):
        return
    out = out[0] if isinstance(out, tuple) else out
    assert out.shape[:-1] == q.shape[:-1]


@settings(FUZZ, max_examples=400)
@given(st.data())
def test_damaged_masks_raise_one_of_the_two_errors(data: st.DataObject) -> None:
    number = st.one_of(
        st.integers(-3, 9), st.floats(allow_nan=True), st.none(), st.booleans(), st.just("x"), st.just(2**40)
    )
    vector = st.one_of(st.lists(st.integers(-2, 6), max_size=4), st.lists(number, max_size=3), number)
    tensor = st.builds(
        lambda s, t: torch.ones(s, dtype=t),
        st.lists(st.integers(0, 3), max_size=4),
        st.sampled_from([torch.int32, torch.int64, torch.float32, torch.bool]),
    )
    some = st.one_of(vector, tensor)
    name, count = data.draw(
        st.sampled_from(
            [
                ("causal", 1),
                ("window", 3),
                ("lengths", 4),
                ("documents", 6),
                ("document_ids", 2),
                ("prefix", 1),
                ("chunks", 3),
                ("dense", 1),
                ("predicate", 1),
            ]
        )
    )
    values = [data.draw(some) for _ in range(data.draw(st.integers(1, count)))]
    q = torch.ones(2, 3, 2, 4)
    try:
        if name == "window" and len(values) < 2:
            values.append(0)
        mask = getattr(masks, name)(*values)
        str(mask)
        undivided.attention(q, q, q, layout="bshd", mask=mask & masks.causal("top_left"))
    except (InputError, NoBackendError):
        return
