"""What every test file has: Triton's interpreter, the option --quick, and fixtures."""

import contextlib
import gc
import importlib
import os
import random
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

# Before anything imports Triton: its kernels run under its interpreter here, and need no GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

import checked_interpreter
import pytest
import quick_interpreter
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from undivided import functional, sdpa, set_backends
from undivided.masks import _constructors, _kept
from undivided.run import autograd
from undivided.selection import decision, policy
from undivided.selection import measured as measured_tables
from undivided.selection.measured import Table

# PyTorch 2.10 keeps what the first thread to enter this mode sets, and crashes after that thread has ended.
with FakeTensorMode():
    pass

QUICK = {
    "test_backends": r"^(?!.*-(triton|flex)\])",
    "test_bad_input": "",
    "test_cli": "TestDoctor|TestExplain|TestMask",
    "test_cli_output": "TestPaths",
    "test_decision_caches": "",
    "test_decision_log": "",
    "test_mask_changes": "",
    "test_mask_pictures": "",
    "test_masks": "",
    "test_masks_interface": "",
    "test_masks_of_sequences": "",
    "test_merge": "",
    "test_moved_masks": "",
    "test_policy": "",
    "test_prose": "",
    "test_random_masks": "",
    "test_selection": "",
    "test_semantics": "",
    "test_semantics_of_masks": "",
    "test_semantics_of_padding": "",
    "test_signatures": "",
}
"""The tests of --quick: a test file (without .py), and a regular expression that its tests' names must match."""

quick_interpreter.install()
checked_interpreter.install()
# Garbage is collected more rarely while tests are collected: it looks through all that there are, a sixth of the time.
gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True)
def new_masks() -> None:
    """No test gets a mask, and what is cached in it, of an earlier test: equal masks are one object."""
    _constructors._kept_band.cache_clear()
    _kept._recent.clear()


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """A test draws the same numbers in each run, alone or beside others."""
    seed = zlib.crc32(request.node.nodeid.encode())
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a traceback for CUDA, too
    random.seed(seed)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = (
        "the core of the tests, for use while editing: under two minutes on two cores (see QUICK in tests/conftest.py)"
    )
    parser.addoption("--quick", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Without paths on the command line, --quick collects only its own files."""
    if config.getoption("--quick") and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args[:] = [str(path) for path in sorted(Path(__file__).parent.rglob("test_*.py")) if path.stem in QUICK]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    chosen = [item for item in items if re.search(QUICK.get(item.path.stem, "$^"), item.nodeid.partition("::")[2])]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def pytest_collection_finish(session: pytest.Session) -> None:
    """No collection of garbage looks through many collected tests again; some libraries force one in every call."""
    if len(session.items) > 1000:
        with contextlib.suppress(ImportError):  # it looks for references once, and finds none in what is frozen
            hypothesis = importlib.import_module("hypothesis")
            settings = hypothesis.settings(database=None)
            hypothesis.find(hypothesis.strategies.none(), lambda _: True, settings=settings)
        gc.collect()
        gc.freeze()


@pytest.fixture
def seen_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TorchDispatchMode of the test sees the operations of a backend, not the one operator that a mode sees
    otherwise."""
    for module in (functional, autograd, sdpa):
        monkeypatch.setattr(module, "is_observed", lambda *_: False)


@pytest.fixture
def default_policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable set, every backend allowed, before and after."""
    for name in policy._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    set_backends()
    yield
    set_backends()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Table], None]:
    """Make selection use only this table, with empty decision caches."""

    def install(table: Table) -> None:
        monkeypatch.setattr(measured_tables.table, "tables", lambda: (table,))
        monkeypatch.setattr(decision, "_decisions", {})
        monkeypatch.setattr(decision, "_by_class", {})

    return install
