"""Wrong calls under torch.compile: the errors of eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_calls import qkv
from torch import Tensor

import undivided
from undivided import masks
from undivided.run.prepare import prepare

pytestmark = pytest.mark.usefixtures("fresh_compiler")


ON_META = torch.zeros(1, 1, 3, 3, device="meta")
WRONG_AT_RUN_TIME: dict[str, Callable[[Tensor], dict[str, object]]] = {
    "align": lambda q: {"k": q[:, :2], "v": q[:, :2], "mask": masks.causal()},
    "layout": lambda q: {"layout": "BSHD"},
    "layout-with-a-bar": lambda q: {"layout": "bs|hd"},
    "backend": lambda q: {"backend": "natif"},
    "backend-without-a-name": lambda q: {"backend": ""},
    "axes": lambda q: {"q": q.flatten(2)},
    "no-axes": lambda q: {"q": q[0, 0, 0, 0]},
    "device-of-k": lambda q: {"k": q.to("meta")},
    "device-of-bias": lambda q: {"bias": ON_META},
    "device-of-mask": lambda q: {"mask": masks.dense(ON_META == 0)},
}


@pytest.mark.parametrize("wrong", WRONG_AT_RUN_TIME.values(), ids=WRONG_AT_RUN_TIME)
def test_a_wrong_call_raises_the_same_error_as_in_eager_mode(wrong: Callable[[Tensor], dict[str, object]]) -> None:
    """Wrong axes were an IndexError of the compiler, and with a tensor on meta the output was uninitialised memory."""

    def layer(q: Tensor) -> Tensor:
        arguments: dict[str, Any] = {"q": q, "k": q, "v": q, "layout": "bshd", **wrong(q)}
        return undivided.attention(**arguments)

    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(undivided.InputError) as eager:
        layer(q)
    with pytest.raises(undivided.InputError) as compiled:
        torch.compile(layer, fullgraph=True, backend="aot_eager")(q)
    assert str(compiled.value) == str(eager.value)


WRONG_TYPES: dict[str, Any] = {
    "k": [1.0],
    "v": None,
    "alibi_slopes": [1.0, 2.0],
    "layout": 3,
    "scale": "1",
    "softcap": [30.0],
    "dropout_p": True,
    "return_lse": 1,
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_an_argument_of_a_wrong_type_raises_the_same_error_as_in_eager_mode(name: str) -> None:
    """They were errors of the compiler or of Python, or were taken for something else."""

    def layer(q: Tensor) -> Tensor:
        return undivided.attention(**{"q": q, "k": q, "v": q, "layout": "bshd", name: WRONG_TYPES[name]})

    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(undivided.InputError) as eager:
        layer(q)
    with pytest.raises(undivided.InputError) as compiled:
        torch.compile(layer, backend="aot_eager")(q)
    assert str(compiled.value) == str(eager.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"deterministic": "yes"},
        {"backend": 3},
        {"layout": None},
        {"dropout_p": 0.5, "dropout_seed": -1},
        {"dropout_p": 0.5, "dropout_seed": "1"},
    ],
    ids=lambda wrong: f"{list(wrong)[-1]}-{list(wrong.values())[-1]}",
)
def test_a_constant_of_the_wrong_kind_is_an_input_error_when_compiled(wrong: dict[str, object]) -> None:
    """A KeyError, TypeErrors, and a negative seed that was accepted."""
    torch._dynamo.reset()
    q = torch.randn(1, 4, 2, 8)
    arguments = {"layout": "bshd", **wrong}
    with pytest.raises(undivided.InputError, match=f"{list(wrong)[-1]} must"):
        torch.compile(lambda x: undivided.attention(x, x, x, **arguments), backend="aot_eager")(q)


def test_a_call_that_cannot_be_traced_runs_unseen_by_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it traces the selection, and writes a guard per entry of its caches: 57 seconds for 3000 of them."""
    seen = []

    def recorded(*arguments: Any) -> Any:
        seen.append(callable(torch._C._dynamo.eval_frame.get_eval_frame_callback()))
        return prepare(*arguments)

    for module in (undivided.functional, undivided.run.dispatch):
        monkeypatch.setattr(module, "prepare", recorded)
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(undivided.InputError, match="dropout_seed must"):
        torch.compile(
            lambda x: undivided.attention(x, x, x, layout="bshd", dropout_p=0.5, dropout_seed=-1), backend="eager"
        )(q)
    assert seen == [False]


def test_an_explicit_backend_that_cannot_run_raises_with_its_reasons() -> None:
    layer = torch.compile(
        lambda q, k, v: undivided.attention(q, k, v, layout="bshd", softcap=3.0, backend="torch_flash"),
        fullgraph=True,
        backend="aot_eager",
    )
    with pytest.raises(undivided.NoBackendError, match="no support for softcap"):
        layer(*qkv(6, grad=False))


def test_the_reason_of_a_graph_break_names_the_method_that_runs_outside() -> None:
    """It named a function of the library's own, the same for every method."""
    cache, x = undivided.KVCache(1, 8, 1, 8, dtype=torch.float32), torch.zeros(1, 1, 1, 8)
    for name, call in (("Cache.append", lambda: cache.append(x, x)), ("Cache.attend", lambda: cache.attend(x))):
        with pytest.raises(
            RuntimeError, match=rf"reason: {name} reads numbers, decides or raises an error on the host"
        ):
            torch.compile(call, backend="eager", fullgraph=True)()
