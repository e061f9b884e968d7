"""A backend from another package: the example of CONTRIBUTING, installed beside ours."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import undivided
from undivided.backends import _entry_points
from undivided.backends._table import BackendRow
from undivided.selection import decision

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = sys.modules["undivided.backends"]  # the attribute of this name is the public function
BLOCK = re.compile(r"```(python|toml)\n(.*?)```", re.DOTALL)
EXAMPLE = dict(BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
"""The module of the example, and its pyproject.toml."""


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Backends are found and decided anew, before and after each test."""
    caches = (PACKAGE.all_backends, PACKAGE.names_and_families)
    for cached in caches:
        cached.cache_clear()
    decision._by_class.clear()
    decision._decisions.clear()
    yield
    for cached in caches:
        cached.cache_clear()
    decision._by_class.clear()
    decision._decisions.clear()
    for name in ("undivided_plain", "broken_backend"):
        sys.modules.pop(name, None)


def _install(folder: Path, source: str, entry_points: dict[str, str], module: str = "undivided_plain") -> None:
    """A module, and the metadata that pip writes for it."""
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n", encoding="utf-8")
    lines = "".join(f"{name} = {value}\n" for name, value in entry_points.items())
    (info / "entry_points.txt").write_text(f"[{_entry_points.GROUP}]\n{lines}", encoding="utf-8")


def _row(name: str) -> BackendRow:
    (row,) = [row for row in undivided.backends() if row.name == name]
    return row


def test_the_example_of_contributing_is_listed_explained_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tomllib.loads(EXAMPLE["toml"])["project"]
    _install(tmp_path, EXAMPLE["python"], project["entry-points"][_entry_points.GROUP])
    monkeypatch.syspath_prepend(tmp_path)
    assert _row("plain").available
    names = [row.name for row in undivided.backends()]
    assert names == sorted(names)
    q = torch.randn(1, 6, 2, 8)
    assert "plain" in undivided.explain(q, q, q, layout="bshd").reasons
    assert undivided.explain(q, q, q, layout="bshd", backend="plain").backend.name == "plain"
    out = undivided.attention(q, q, q, layout="bshd", backend="plain")
    torch.testing.assert_close(out, undivided.attention(q, q, q, layout="bshd", backend="reference"))
    assert undivided.verify(q, q, q, layout="bshd", backends=["plain"]).ok
    with undivided.use_backends("plain"), pytest.raises(undivided.NoBackendError, match="a causal mask"):
        undivided.attention(q, q, q, layout="bshd", mask=undivided.masks.causal())


@pytest.mark.slow
def test_pip_installs_the_example(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="builds the example with setuptools: pip install -e '.[dev]'")
    pytest.importorskip("pip", reason="installs the example with pip")
    (tmp_path / "undivided_plain.py").write_text(EXAMPLE["python"], encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(EXAMPLE["toml"], encoding="utf-8")
    target = tmp_path / "target"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps"]
    done = subprocess.run(
        [*pip, "--no-build-isolation", "--target", str(target), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r}); import undivided\n"
        "print([row.available for row in undivided.backends() if row.name == 'plain'])"
    )
    listed = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert listed.stdout == "[True]\n", listed.stderr


BROKEN = {
    "import-fails": ("raise ImportError('no module named cuda_thing')", "ImportError: no module named cuda_thing"),
    "value-missing": ("x = 1", "AttributeError: module 'broken_backend' has no attribute 'BACKEND'"),
    "class-not-instance": (
        "from undivided.backends import Backend as BACKEND",
        "must be an instance of undivided.backends.Backend, got <class",
    ),
    "no-name": ("from undivided.backends import Backend\nBACKEND = Backend()", "its attribute name must be a str"),
    "no-limits": (
        "from undivided.backends import Backend\nBACKEND = Backend()\n"
        "BACKEND.name = BACKEND.family = BACKEND.summary = 'other'",
        "its attribute limits must be a Limits",
    ),
    "another-name": (
        "import dataclasses\nfrom undivided.backends import Backend\nfrom undivided.backends._base import Limits\n"
        "BACKEND = Backend()\nBACKEND.name = BACKEND.family = BACKEND.summary = 'second'\n"
        "BACKEND.limits = Limits(frozenset(), frozenset())",
        "its name must be that of its entry point, got 'second'",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_entry_point_is_a_reason_and_stops_nothing(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cause = BROKEN[fault]
    _install(tmp_path, source, {"other": "broken_backend:BACKEND"}, "broken_backend")
    monkeypatch.syspath_prepend(tmp_path)
    row = _row("other")
    assert not row.available
    assert cause in row.why_not
    assert "broken_backend" in row.why_not
    q = torch.randn(1, 6, 2, 8)
    assert undivided.attention(q, q, q, layout="bshd").shape == q.shape
    assert cause in undivided.explain(q, q, q, layout="bshd").reasons["other"][-1]
    with pytest.raises(undivided.NoBackendError, match="gave no backend"):
        undivided.attention(q, q, q, layout="bshd", backend="other")


def test_a_name_that_is_taken_is_logged_and_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _install(tmp_path, "raise RuntimeError", {"reference": "broken_backend:BACKEND"}, "broken_backend")
    monkeypatch.syspath_prepend(tmp_path)
    with caplog.at_level(logging.WARNING, logger="undivided"):
        assert _row("reference").available
    assert "reference = broken_backend:BACKEND of broken_backend is ignored" in caplog.text


def test_entry_points_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first decision, and at no later call, whatever its shape."""
    reads = []

    def read(**parameters: str) -> importlib.metadata.EntryPoints:
        reads.append(parameters)
        return importlib.metadata.EntryPoints()

    monkeypatch.setattr(_entry_points, "entry_points", read)
    for length in (5, 6, 7):
        q = torch.randn(1, length, 3, 24)
        undivided.explain(q, q, q, layout="bshd")
    assert reads == [{"group": "undivided.backends"}]
