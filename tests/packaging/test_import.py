"""``import undivided``: what it imports at once, and what at first use."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import forked_processes
import pytest

import undivided

AT_FIRST_USE = ("benchmarking", "cache", "cli", "context_parallel", "diagnosis", "integrations", "nn", "verification")


def _run(code: str) -> str:
    """What a new process prints, with every warning an error."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def _run_beside_torch(code: str) -> str:
    """The same in a process that has imported torch, which takes seconds, and nothing of this package."""
    done = forked_processes.run(code, warnings_are_errors=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


def test_the_import_is_quiet_and_leaves_out_what_is_built_on_attention() -> None:
    loaded = _run("import undivided, sys; print(*sys.modules)").split()
    assert not [name for name in AT_FIRST_USE if f"undivided.{name}" in loaded]
    assert "undivided.functional" in loaded


def test_the_import_reads_no_entry_points() -> None:
    code = (
        "import undivided, sys; from undivided.backends import all_backends; print(all_backends.cache_info().currsize)"
    )
    assert _run_beside_torch(code) == "0\n"


@pytest.mark.parametrize("name", undivided.__all__)
def test_every_public_name_is_in_a_new_process(name: str) -> None:
    """In this process other tests have imported everything; the table of names must be right by itself."""
    assert hasattr(undivided, name)
    assert name in dir(undivided)


def test_names_and_packages_are_imported_at_first_use() -> None:
    printed = _run_beside_torch(
        "import sys, undivided\n"
        "print(undivided.nn.DotProductAttention is undivided.DotProductAttention, 'undivided.nn' in sys.modules)\n"
        "print('undivided.verification' in sys.modules)\n"
        "from undivided import verify, verification, cache, diagnosis, integrations, context_parallel\n"
        "print(verify is undivided.verify is verification.verify, 'verify' in vars(undivided))\n"
        "print(all(hasattr(undivided, name) for name in dir(undivided)))\n"
    )
    assert printed.splitlines() == ["True True", "False", "True True", "True"]


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("from undivided import nn; print(nn.TransformerLayer.__name__)", id="from-import"),
        pytest.param("import undivided.nn; print(undivided.nn.TransformerLayer.__name__)", id="import"),
        pytest.param("import undivided; print(undivided.nn.TransformerLayer.__name__)", id="attribute"),
        pytest.param("from undivided import TransformerLayer as T; print(T.__name__)", id="class"),
        pytest.param("from undivided import *; print(TransformerLayer.__name__)", id="star"),
    ],
)
def test_every_form_of_import_finds_a_layer(code: str) -> None:
    assert _run_beside_torch(code) == "TransformerLayer\n"


def test_a_pickle_of_a_lazy_name_loads_in_a_new_process() -> None:
    pickled = pickle.dumps((undivided.KVCache, undivided.verify, undivided.DotProductAttention))
    assert "KVCache" in _run_beside_torch(f"import pickle; print(pickle.loads({pickled!r}))")


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'undivided' has no attribute 'attention_of_all'"):
        undivided.attention_of_all  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'attention_of_all'"):
        exec("from undivided import attention_of_all")


def test_the_parallel_layers_are_imported_at_first_use() -> None:
    printed = _run(
        "import sys, undivided.parallel.plan\n"
        "print('undivided.parallel.tensor' in sys.modules, 'torch.distributed.checkpoint' in sys.modules)\n"
        "from undivided.parallel import *\n"
        "print(parallelize.__name__, all(hasattr(undivided.parallel, name) for name in dir(undivided.parallel)))\n"
    )
    assert printed.splitlines() == ["False False", "parallelize True"]
    with pytest.raises(AttributeError, match=r"module 'undivided\.parallel' has no attribute 'parallel'"):
        undivided.parallel.parallel  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("first", "imported"), [("explain", ["explain"]), ("init-example", ["init_example"]), ("--version", [])]
)
def test_the_command_line_imports_the_command_that_runs(first: str, imported: list[str]) -> None:
    printed = _run_beside_torch(
        "import sys; from undivided.cli._app import COMMANDS, application\n"
        f"application({first!r})\n"
        "print([name for name in COMMANDS if f'undivided.cli.commands.{name}' in sys.modules])\n"
    )
    assert printed == f"{imported}\n"


@pytest.mark.parametrize("package", [undivided, undivided.parallel], ids=lambda package: package.__name__)
def test_type_checkers_see_the_names_that_are_imported_at_first_use(package: ModuleType) -> None:
    tree = ast.parse(Path(str(package.__file__)).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == {name: f"undivided.{module}" for name, module in package._LAZY.items()}
