"""What is logged and remembered of decisions, and the settings that are refused."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import undivided
from undivided import InputError, NoBackendError, masks, set_backends, use_backends
from undivided.selection import decision as selection
from undivided.selection import policy

# fp64, which our own kernel refuses: so nothing here depends on whether it was built
Q = torch.randn(1, 8, 2, 16, dtype=torch.float64)


pytestmark = pytest.mark.usefixtures("default_policy")


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    """Standard error, with empty decision caches."""
    monkeypatch.setattr(selection, "_decisions", {})
    monkeypatch.setattr(selection, "_by_class", {})
    return capsys


def run(**arguments: object) -> None:
    undivided.attention(Q, Q, Q, layout="bshd", **arguments)  # type: ignore[call-overload]


def test_nothing_is_printed_by_default(logged: pytest.CaptureFixture[str]) -> None:
    run()
    assert logged.readouterr() == ("", "")


def test_info_prints_one_line_once_for_every_new_decision(
    logged: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDIVIDED_LOG", "info")
    for _ in range(3):
        run()
    line = "undivided: torch_flash for q 1x8x2x16 (BxSxHxD), kv 1x8x2x16; float64 bshd on cpu; mask every pair\n"
    assert logged.readouterr() == ("", line)
    run(mask=masks.causal())
    assert logged.readouterr().err.count("\n") == 1


def test_debug_adds_the_reasons(logged: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDIVIDED_LOG", "debug")
    run(softcap=1.0)
    run(softcap=1.0)
    text = logged.readouterr().err
    assert text.startswith("undivided: reference runs\n")
    assert text.count("no support for softcap") == str(undivided.explain(Q, Q, Q, layout="bshd", softcap=1.0)).count(
        "no support for softcap"
    )


def test_a_failure_is_logged_too(logged: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDIVIDED_LOG", "info")
    with pytest.raises(NoBackendError):
        run(softcap=1.0, backend="torch_flash")
    assert logged.readouterr().err.startswith("undivided: no backend for ")


@pytest.mark.parametrize(
    ("debug", "level", "want"),
    [("0", "2", ""), ("1", "0", ""), ("1", "1", "info"), ("1", "2", "debug"), ("1", "3", "debug")],
)
def test_transformer_engines_debug_variables_are_aliases(
    monkeypatch: pytest.MonkeyPatch, debug: str, level: str, want: str
) -> None:
    monkeypatch.setenv("NVTE_DEBUG", debug)
    monkeypatch.setenv("NVTE_DEBUG_LEVEL", level)
    assert policy.current_policy().log == want
    monkeypatch.setenv("UNDIVIDED_LOG", "info")
    assert policy.current_policy().log == "info"


def test_transformer_engines_debug_variable_alone_prints_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As there, where the level is 0 by default."""
    monkeypatch.setenv("NVTE_DEBUG", "1")
    assert policy.current_policy().log == ""


def test_a_log_level_of_0_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDIVIDED_LOG", "0")
    assert policy.current_policy().log == ""


def test_batch_invariance_is_that_of_the_argument_then_of_set_backends_then_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not policy.current_policy().batch_invariant
    monkeypatch.setenv("UNDIVIDED_BATCH_INVARIANT", "1")
    assert policy.current_policy().batch_invariant
    assert not policy.current_policy(batch_invariant=False).batch_invariant
    set_backends(batch_invariant=False)
    try:
        assert not policy.current_policy().batch_invariant
        assert policy.current_policy(batch_invariant=True).batch_invariant
    finally:
        set_backends()


def test_an_unknown_log_level_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDIVIDED_LOG", "verbose")
    with pytest.raises(InputError, match=r"^UNDIVIDED_LOG must be 'info' or 'debug', got 'verbose'$"):
        run()


def test_reading_the_policy_again_is_a_cache_look_up() -> None:
    assert policy.current_policy() is policy.current_policy()


def test_switching_on_logging_later_prints_the_decisions_made_from_then_on(
    logged: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run()
    monkeypatch.setenv("UNDIVIDED_LOG", "info")
    run()
    assert logged.readouterr().err.startswith("undivided: torch_flash for ")


def records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "undivided"]


def test_the_logger_gets_one_record_for_each_new_decision(
    logged: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "undivided"):
        run()
        run()
    (record,) = records(caplog)
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("torch_flash for q 1x8x2x16")
    assert record.decision is undivided.last_decision()  # type: ignore[attr-defined]
    assert logged.readouterr() == ("", "")


def test_at_debug_level_the_record_is_the_table(
    logged: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "undivided"):
        run(softcap=1.0)
    (record,) = records(caplog)
    assert record.getMessage() == str(undivided.last_decision())


def test_a_record_can_be_written_as_json_and_keeps_what_a_factory_added(
    logged: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Formatters of Ray and of python-json-logger write every attribute that is not logging's own."""

    class Traced(logging.LogRecord):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.trace = "7f"

    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(Traced)
    try:
        with caplog.at_level(logging.INFO, "undivided"):
            run()
    finally:
        logging.setLogRecordFactory(before)
    (record,) = records(caplog)
    assert json.loads(json.dumps(record.__dict__))["trace"] == "7f"
    assert copy.copy(record).decision is undivided.last_decision()  # type: ignore[attr-defined]


def test_undivided_log_leaves_the_logger_as_it_is(
    logged: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("undivided")
    before = logger.level, list(logger.handlers)
    monkeypatch.setenv("UNDIVIDED_LOG", "info")
    run()
    assert (logger.level, logger.handlers) == before
    assert logged.readouterr().err.startswith("undivided: torch_flash for ")


def test_last_decision_is_that_of_the_last_call_of_this_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(undivided.last_decision).result() is None
        run(backend="reference")
        assert undivided.last_decision().backend.name == "reference"  # type: ignore[union-attr]
        pool.submit(run, backend="torch_flash").result()
        assert pool.submit(undivided.last_decision).result().backend.name == "torch_flash"
    assert undivided.last_decision().backend.name == "reference"  # type: ignore[union-attr]


def test_last_decision_is_set_by_a_repeated_call_too() -> None:
    for backend in ("reference", "torch_flash", "reference"):
        run(backend=backend)
        assert undivided.last_decision().backend.name == backend  # type: ignore[union-attr]


def test_explain_and_a_refused_call_leave_the_last_decision_as_it_was() -> None:
    run(backend="reference")
    before = undivided.last_decision()
    undivided.explain(Q, Q, Q, layout="bshd", backend="torch_flash")
    with pytest.raises(NoBackendError):
        run(softcap=1.0, backend="torch_flash")
    assert undivided.last_decision() is before


def test_every_way_to_call_sets_the_last_decision() -> None:
    calls: dict[str, Callable[[], object]] = {
        "sdpa": lambda: undivided.scaled_dot_product_attention(Q, Q, Q),
        "layer": lambda: undivided.DotProductAttention(2, 16, qkv_format="bshd", attn_mask_type="no_mask")(Q, Q, Q),
        "cache": lambda: attend_in_a_cache(),
    }
    for name, call in calls.items():
        run(backend="reference")
        before = undivided.last_decision()
        call()
        assert undivided.last_decision() is not before, name


def attend_in_a_cache() -> object:
    cache = undivided.KVCache(1, 8, 2, 16, dtype=Q.dtype)
    cache.append(Q, Q)
    return cache.attend(Q)


def test_a_compiled_graph_sets_the_last_decision_when_it_runs() -> None:
    torch._dynamo.reset()  # graphs of other tests count towards PyTorch's limit
    compiled = torch.compile(undivided.attention, backend="aot_eager", fullgraph=True)
    compiled(Q, Q, Q, layout="bshd")
    for backend in ("reference", "torch_flash"):
        with use_backends(backend):
            compiled(Q, Q, Q, layout="bshd")
        assert undivided.last_decision().backend.name == backend  # type: ignore[union-attr]


@pytest.mark.parametrize("value", ["yes", "true", "2", "False"])
def test_another_word_for_determinism_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """ "False" switched it on."""
    monkeypatch.setenv("UNDIVIDED_DETERMINISTIC", value)
    with pytest.raises(InputError, match=rf"^UNDIVIDED_DETERMINISTIC must be 0 or 1, got '{value}'$"):
        run()


def test_an_empty_list_of_backends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone comma forbade every backend."""
    monkeypatch.setenv("UNDIVIDED_BACKENDS", " , ")
    with pytest.raises(InputError, match=r"^UNDIVIDED_BACKENDS must name at least one of .*, got ' , '$"):
        run()


@pytest.mark.parametrize("variable", ["NVTE_FLASH_ATTN", "NVTE_UNFUSED_ATTN", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"])
def test_a_switch_of_transformer_engine_must_be_a_number(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """ "off" switched nothing off. TransformerEngine itself reads these with int()."""
    monkeypatch.setenv(variable, "off")
    with pytest.raises(InputError, match=rf"^{variable} must be 0 or 1, got 'off'$"):
        run()
