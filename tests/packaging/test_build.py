"""What is published: the archive of the sources, the wheels, and an installation without a compiler."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from check_dist import faults, main, needed_libraries

pytest.importorskip("scikit_build_core", reason="builds with scikit-build-core: pip install -e '.[dev]'")

from undivided.kernels import cpu

ROOT = Path(__file__).resolve().parents[2]


def _build(kind: str, source: Path, folder: Path, settings: str = "None", **environment: str) -> Path:
    """Build a wheel or an sdist offline, as pip does with --no-build-isolation."""
    code = f"from scikit_build_core.build import build_{kind}; build_{kind}({str(folder)!r}, {settings})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "output.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
    (built,) = folder.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir())


@pytest.fixture(scope="module")
def wheel_without_compiler(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return _build("wheel", unpacked, folder, CXX="/nonexistent/c++", CMAKE_GENERATOR="Ninja")


@pytest.mark.slow
def test_the_archive_of_the_sources_is_complete(sdist: Path, unpacked: Path) -> None:
    assert not faults(sdist)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    found = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert {name.partition("/")[0] for name in tracked - found} <= {"benchmarks"}


def test_without_a_compiler_the_wheel_is_pure_and_the_build_says_so(wheel_without_compiler: Path) -> None:
    assert wheel_without_compiler.name.endswith("-py3-none-any.whl")
    assert not faults(wheel_without_compiler)
    output = (wheel_without_compiler.parent / "output.txt").read_text(encoding="utf-8")
    assert "The native CPU kernel was not built" in output
    assert "undivided doctor" in output


def test_the_wheel_has_every_module_and_example(wheel_without_compiler: Path, unpacked: Path) -> None:
    with zipfile.ZipFile(wheel_without_compiler) as archive:
        names = {name for name in archive.namelist() if name.endswith(".py")}
    modules = {path.relative_to(unpacked / "src").as_posix() for path in unpacked.glob("src/**/*.py")}
    examples = {f"undivided/{path.relative_to(unpacked).as_posix()}" for path in unpacked.glob("examples/**/*.py")}
    assert examples
    assert names == modules | examples


@pytest.mark.slow
def test_the_pure_wheel_runs_and_says_what_is_missing(wheel_without_compiler: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel_without_compiler) as archive:
        archive.extractall(tmp_path)
    code = (
        # an editable installation has a finder of its own, which comes before every path
        "import sys; sys.meta_path = [finder for finder in sys.meta_path if 'Scikit' not in type(finder).__name__]\n"
        "import torch, undivided; print(undivided.__file__)\n"
        "q = torch.randn(1, 8, 2, 16)\n"
        "print(undivided.attention(q, q, q, layout='bshd').shape)\n"
        "print(*undivided.explain(q, q, q, layout='bshd').reasons['native'])"
    )
    warning = "calls on the CPU run on PyTorch's kernels, which are slower"
    command = [sys.executable, "-W", "error", "-W", f"always:{warning}", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(warning) == 1, done.stderr
    place, shape, reason = done.stdout.splitlines()
    assert place.startswith(str(tmp_path))
    assert shape == "torch.Size([1, 8, 2, 16])"
    assert reason.startswith("the native kernel's library was not built: this is the pure Python wheel")
    assert "pip install" in reason


def test_a_requested_native_build_that_fails_is_an_error(unpacked: Path, tmp_path: Path) -> None:
    """`undivided doctor` prints this setting, so that a failed build does not end in a pure wheel again."""
    with pytest.raises(AssertionError, match=r"CMake|compiler"):
        _build("wheel", unpacked, tmp_path, "{'wheel.cmake': 'true'}", CXX="/nonexistent/c++", CMAKE_GENERATOR="Ninja")


def test_the_native_library_links_no_openmp() -> None:
    """torch has its own runtime. A second one in the process would compete for the cores, or hang after a fork."""
    if not cpu.path().exists():
        pytest.skip("the native library is not built")
    needed = needed_libraries(cpu.path().read_bytes())
    assert not [name for name in needed if "omp" in name]
    assert needed or sys.platform != "linux"


def test_a_faulty_wheel_is_found(wheel_without_compiler: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel_without_compiler) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["undivided/kernels/cpu/libundivided_cpu.so"] = _elf("libgomp.so.1")
    parts["undivided-0.2.0.dist-info/METADATA"] += b"\n[page](docs/page.md)\n"
    del parts["undivided/py.typed"]
    faulty = tmp_path / wheel_without_compiler.name
    with zipfile.ZipFile(faulty, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    found = "\n".join(faults(faulty))
    for part in ("has 0 native library", "links ['libgomp.so.1']", "links of the description", "a data file"):
        assert part in found
    assert main(str(tmp_path)) == 1


def _elf(needed: str) -> bytes:
    """A file with the ELF sections that say which library it links, and nothing else."""
    header = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", 64)
    header = header.ljust(0x3C, b"\0") + struct.pack("<H", 2)
    strings, dynamic = 64 + 2 * 64, 64 + 2 * 64 + 32
    sections = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, strings, 32, 0, 0, 0, 0)
    sections += struct.pack("<IIQQQQIIQQ", 0, 6, 0, 0, dynamic, 32, 0, 0, 0, 0)
    return header.ljust(64, b"\0") + sections + needed.encode().ljust(32, b"\0") + struct.pack("<QQQQ", 1, 0, 0, 0)
