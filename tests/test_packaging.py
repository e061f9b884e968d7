"""The package as a whole: the cost of importing it, the direction of its imports, its exports, its scripts."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import grimp
import networkx
import pytest
import torch
from calls import call_of

import undivided
from undivided.backends import reference
from undivided.machine import Machine

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"


OPTIONAL = {
    "typer",
    "rich",
    "matplotlib",
    "numpy",
    "triton",
    "flash_attn",
    "transformers",
    "cudnn",
    "xformers",
    "onnx",
    "onnxruntime",
    "hypothesis",
}
SLOW_PARTS_OF_TORCH = ("torch.distributed", "torch._dynamo", "torch._inductor", "torch.onnx")


def test_importing_the_package_imports_nothing_optional_and_nothing_slow() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import undivided; print(*(set(sys.modules) - before), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    beyond_torch = set(done.stdout.split())
    assert "undivided" in beyond_torch
    optional = {name for name in beyond_torch if name.split(".")[0] in OPTIONAL}
    assert not optional, "optional packages must be imported where they are first needed"
    slow = {name for name in beyond_torch if any(f"{name}.".startswith(f"{part}.") for part in SLOW_PARTS_OF_TORCH)}
    assert not slow, "these parts of torch are imported by the function that uses them, or not at all"


def _modules() -> dict[str, Path]:
    """Every module of the package: dotted name -> file."""
    found = {}
    for path in sorted(SOURCE.glob("undivided/**/*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


class _Imports(ast.NodeVisitor):
    """Collect (line, dotted name) of everything imported, lazily or not; what only type checkers see does not count."""

    def __init__(self, module: str, is_package: bool) -> None:
        self.package = module if is_package else module.rpartition(".")[0]
        self.found: list[tuple[int, str]] = []

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(node.lineno, alias.name) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            package = self.package.split(".")
            base = ".".join(package[: len(package) - node.level + 1] + ([base] if base else []))
        self.found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
                    self.found.append((node.lineno, name))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        # torch imports its distributed package by itself, so an attribute is enough to use it
        if ast.unparse(node) == "torch.distributed":
            self.found.append((node.lineno, "torch.distributed"))
        self.generic_visit(node)


def _imported_module(name: str) -> str:
    """The module behind an imported name: ``undivided.errors.InputError`` -> ``undivided.errors``."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name


def test_the_contracts_of_imports_are_kept() -> None:
    """`[tool.importlinter]` in pyproject.toml: which way imports run."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kept, 0 broken" in done.stdout


def test_no_modules_import_each_other() -> None:
    """No circle, also among the modules of one package, lazily, or for types alone."""
    graph = grimp.build_graph("undivided", cache_dir=None)
    edges = ((module, to) for module in graph.modules for to in graph.find_modules_directly_imported_by(module))
    circles = [
        sorted(found) for found in networkx.strongly_connected_components(networkx.DiGraph(edges)) if len(found) > 1
    ]
    assert not circles


KNOWS_PROCESS_GROUPS = (
    "cli",
    "benchmarking",
    "context_parallel",
    "diagnosis",
    "integrations",
    "nn",
    "parallel",
    "verification",
)
TAKES_DTENSORS = "undivided.run.dtensors"  # imports torch.distributed once it is given a DTensor
SHARED_BY_BACKENDS = ("_base", "_table", "shared")


def _violations(module: str, source: str, is_package: bool = False) -> Iterator[str]:
    """Rules that import contracts cannot express: parts of torch, and that backends do not import each other."""
    imports = _Imports(module, is_package)
    imports.visit(ast.parse(source))
    for line, name in imports.found:
        here = f"{module}:{line} imports {name}"
        part = module.split(".")[1] if "." in module else ""
        knows = part in (*KNOWS_PROCESS_GROUPS, "") or module == TAKES_DTENSORS
        if f"{name}.".startswith("torch.distributed.") and not knows:
            yield f"{here}, and nothing at or below functional may know process groups"
        own, other = _backend(module), _backend(_imported_module(name))
        if own and other and own != other:
            yield f"{here}: a backend never imports another; what they share goes to backends/shared"


def _backend(module: str) -> str | None:
    """The name of the backend that a module belongs to."""
    parts = module.split(".")
    is_backend = parts[:2] == ["undivided", "backends"] and len(parts) > 2 and parts[2] not in SHARED_BY_BACKENDS
    return parts[2] if is_backend else None


@pytest.mark.parametrize("module", MODULES)
def test_imports_have_one_direction(module: str) -> None:
    path = MODULES[module]
    found = list(_violations(module, path.read_text(encoding="utf-8"), path.name == "__init__.py"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        pytest.param("undivided.backends.new", "from undivided.backends.reference import x", id="backend-to-backend"),
        pytest.param("undivided.backends.new", "from undivided.backends import reference", id="by-package"),
        pytest.param("undivided.backends.new", "from . import reference", id="relative"),
        pytest.param(
            "undivided.backends.native.new", "from undivided.backends.triton.tables import x", id="part-of-it"
        ),
        pytest.param("undivided.functional", "import torch.distributed as dist", id="functional-to-distributed"),
        pytest.param("undivided.request.problem", "torch.distributed.get_rank()", id="problem-uses-distributed"),
        pytest.param("undivided.kernels.new", "from torch import distributed", id="kernel-to-distributed"),
    ],
)
def test_an_import_in_the_wrong_direction_is_found(module: str, source: str) -> None:
    assert list(_violations(module, source))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        pytest.param("undivided.backends.new", "from undivided.backends._base import Backend", id="backend-to-base"),
        pytest.param("undivided.backends.native.new", "from undivided.backends.native import x", id="within-one"),
        pytest.param("undivided.context_parallel.new", "import torch.distributed as dist", id="context-parallel"),
    ],
)
def test_an_import_in_the_right_direction_is_accepted(module: str, source: str) -> None:
    assert not list(_violations(module, source))


def test_all_is_what_the_package_reexports() -> None:
    tree = ast.parse(MODULES["undivided"].read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    # submodules become attributes when anything imports them; they are public only where __init__ says so
    visible = {
        name for name in dir(undivided) if name in imported or not isinstance(getattr(undivided, name), ModuleType)
    }
    public = {name for name in visible if not name.startswith("_")} - {"annotations"}
    assert set(undivided.__all__) == public
    assert len(undivided.__all__) == len(set(undivided.__all__))


def test_the_version_is_that_of_the_installed_package() -> None:
    assert undivided.__version__ == importlib.metadata.version("undivided")
    assert "__version__" not in undivided.__all__


SCRIPTS = [*sorted(path for path in (ROOT / "scripts").glob("*") if path.is_file()), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_script_is_executable_and_parses(script: Path) -> None:
    is_sourced = script.name.startswith("_")
    assert is_sourced or os.access(script, os.X_OK), f"chmod +x {script.relative_to(ROOT)}"
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_the_backend_in_contributing_runs() -> None:
    """The example that newcomers copy computes what the reference computes, gradients included."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    example: dict[str, Any] = {"__name__": "example"}
    exec(text.split("```python\n")[1].split("```")[0], example)
    q, k, v, grad = (torch.randn(2, 5, 3, 8) for _ in range(4))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    call, given = call_of(q, k, v, layout="bshd")
    assert not example["BACKEND"].reasons(call.problem, Machine.this())
    results = []
    for backend in (example["BACKEND"], reference.BACKEND):
        with torch.no_grad():
            result = backend.forward(call, given)
            gradients = backend.backward(call, given, result, grad, None)
        results.append([*result, *gradients[:3]])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_new_backend_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of CONTRIBUTING as a file of the package, and nothing else: it is listed, explained and runs."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (tmp_path / "plain.py").write_text(text.split("```python\n")[1].split("```")[0], encoding="utf-8")
    package = sys.modules["undivided.backends"]  # the attribute of this name is the public function
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    caches = (package.all_backends, package.names_and_families)
    for cached in caches:
        cached.cache_clear()
    try:
        q = torch.randn(1, 6, 2, 8)
        assert [row.available for row in undivided.backends() if row.name == "plain"] == [True]
        assert undivided.explain(q, q, q, layout="bshd", backend="plain").backend.name == "plain"
        out = undivided.attention(q, q, q, layout="bshd", backend="plain")
        torch.testing.assert_close(out, undivided.attention(q, q, q, layout="bshd", backend="reference"))
        with pytest.raises(undivided.NoBackendError, match="no support for a causal mask"):
            undivided.attention(q, q, q, layout="bshd", mask=undivided.masks.causal(), backend="plain")
    finally:
        for cached in caches:
            cached.cache_clear()
        sys.modules.pop("undivided.backends.plain", None)


def test_every_development_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["cli"], *extras["plot"], *extras["dev"]]
    names = {re.split(r"[<>=\[; ]", requirement)[0] for requirement in wanted} - {"undivided"}
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert not names - {pin.split("==")[0] for pin in pins if "==" in pin}


# In pieces, so that this file passes its own test.
OF_ONE_MACHINE = re.compile(
    r"(?<![\w.:~$}/-])/(?:home|root|Users|work|opt|mnt)/\w"
    r"|(?:py" + r"pi|python" + r"hosted|download\.py" + r"torch)\.org"
    r"|file:" + r"///"
)


def _tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_machine_or_a_package_registry() -> None:
    found = []
    for path in _tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := OF_ONE_MACHINE.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    assert not found, "\n".join(found)


def test_a_machine_path_or_a_registry_host_is_found() -> None:
    for text in ("/" + "home/me/x", "see /" + "work/y", "https://py" + "pi.org/simple", "'/" + "opt/z'"):
        assert OF_ONE_MACHINE.search(text), text
    for text in ("docs/work/x", "https://example.org/home/x", "~/home/x", "$HOME/work/x"):
        assert not OF_ONE_MACHINE.search(text), text
