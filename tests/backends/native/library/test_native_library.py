"""The native library in its process: its records, the level in UNDIVIDED_ISA, compilers, a missing library."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import forked_processes
import pytest
import torch

import undivided
from undivided import Machine
from undivided.backends import native
from undivided.kernels import cpu
from undivided.kernels.cpu import _install

ROOT = Path(__file__).resolve().parents[4]
SOURCES = cpu.path().parent
LIBRARY = cpu.load()
needs_library = pytest.mark.skipif(isinstance(LIBRARY, str), reason="the native kernel is not built")


# Records


def fields_of(struct: str) -> list[tuple[str, str]]:
    """(type, name) of every field of a struct in abi/attention.h."""
    header = re.sub("//.*", "", (SOURCES / "abi" / "attention.h").read_text(encoding="utf-8"))
    body = header.split(f"struct {struct} {{")[1].split("};")[0]
    fields = []
    for declaration in body.split(";"):
        words = declaration.replace("*", "* ").split()
        kind = "double" if words[:1] == ["double"] else "8 bytes"
        fields += [(kind, name.strip(" *")) for name in " ".join(words).removeprefix("const ").split(",")]
    return [(kind, name.split()[-1]) for kind, name in fields if name]


STRUCTS = [("Attention", cpu.FIELDS), ("Gradients", cpu.GRADIENT_FIELDS), ("Append", cpu.APPEND_FIELDS)]


@pytest.mark.parametrize(("struct", "names"), STRUCTS)
def test_the_records_have_the_fields_of_the_c_structs(struct: str, names: list[str]) -> None:
    fields = fields_of(struct)
    assert [name for _, name in fields] == names
    assert [name for kind, name in fields if kind == "double"] == [name for name in names if name in cpu.DOUBLES]


# Levels

FLAGS = {
    "avx2": {"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512_bf16"},
    "amx_bf16": {"amx_tile", "amx_bf16"},
    "amx": {"amx_fp16"},
}
if platform.machine() in ("aarch64", "arm64"):
    FLAGS = {"neon": {"asimd"}, "neon_bf16": {"bf16"}}
"""The flags that each level needs in addition to the level below it, by Linux's names."""


def flags_of_this_processor() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((set(line.split(":")[1].split()) for line in lines if line.startswith(("flags", "Features"))), set())


@needs_library
@pytest.mark.skipif(not os.path.exists("/proc/cpuinfo"), reason="this system has no /proc/cpuinfo")
def test_the_levels_are_those_of_the_processor() -> None:
    assert isinstance(LIBRARY, cpu.Library)
    flags, levels = flags_of_this_processor(), ["generic"]
    for level, needed in FLAGS.items():
        if not needed <= flags:
            break
        levels.append(level)
    assert list(LIBRARY.levels) == levels


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels are left out on x86 only")
@pytest.mark.skipif(shutil.which("cmake") is None or shutil.which("c++") is None, reason="no cmake or c++ in PATH")
def test_a_build_for_this_machine_leaves_out_what_it_cannot_run_and_the_rest_compiles(tmp_path: Path) -> None:
    """scripts/test compiles the levels of its machine only; the compiler's front end checks the others."""
    levels = {highest: _level_commands(tmp_path / f"highest-{highest}", highest) for highest in ("", "native")}
    if isinstance(LIBRARY, cpu.Library) and LIBRARY.lost_level is None:
        assert {"amx" if "amx" in level else level for level in LIBRARY.levels} == levels["native"].keys()
    for level in levels[""].keys() - levels["native"].keys():
        command = [*levels[""][level], "-fsyntax-only"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert (done.returncode, done.stderr) == (0, ""), level


def test_no_line_is_wider_than_the_column_limit_of_clang_format() -> None:
    """clang-format leaves comments as they are (ReflowComments: false)."""
    (limit,) = map(int, re.findall(r"^ColumnLimit: (\d+)", (ROOT / ".clang-format").read_text("utf-8"), re.MULTILINE))
    paths = [path for folder in (SOURCES, ROOT / "tests") for kind in ("h", "cc") for path in folder.rglob(f"*.{kind}")]
    lines = [
        (path.name, number, line)
        for path in paths
        for number, line in enumerate(path.read_text("utf-8").split("\n"), 1)
    ]
    assert len(lines) > 10_000
    assert [line for line in lines if len(line[2]) > limit] == []


def test_every_instruction_of_avx512_has_an_emulation() -> None:
    """scripts/avx512, which runs the levels above AVX2 anywhere, compiles nothing else."""
    kernels = ROOT / "src/undivided/kernels/cpu"
    texts = {path.name: path.read_text("utf-8") for path in kernels.glob("*/*") if path.suffix in (".h", ".cc")}
    emulations = "".join(texts.pop(name) for name in ("avx512_emulated.h", "avx512_emulated_lanes.h"))
    defined = set(re.findall(r"^(?:EMULATED|LOWERED) \w+ (_mm\w+)\(", emulations, re.MULTILINE))
    used = set(re.findall(r"\b_mm(?:512_|(?:256)?_mask)\w+", "".join(texts.values())))
    assert len(used) > 80
    assert used <= defined


def _level_commands(folder: Path, highest: str) -> dict[str, list[str]]:
    """The compiler's command for each level of a build that leaves out the levels above `highest`."""
    options = ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", f"-DUNDIVIDED_HIGHEST_LEVEL={highest}"]
    configure = ["cmake", "-S", ROOT / "cmake", "-B", folder, *options]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL, timeout=300)
    commands = [entry["command"] for entry in json.loads((folder / "compile_commands.json").read_text("utf-8"))]
    levels = [re.search(r"-DUNDIVIDED_LEVEL=(\w+)", command) for command in commands]
    return {level[1]: shlex.split(command) for level, command in zip(levels, commands, strict=True) if level}


DECODE = """
import torch, undivided
q, k = torch.randn(1, 1, 8, 128), torch.randn(1, 4096, 2, 128)
out, same = (undivided.attention(q, k, k, layout="bshd", backend=name) for name in ("native", "reference"))
print((out - same).abs().max().item() < 1e-5)
"""


@needs_library
def test_the_first_call_of_a_process_has_memory_to_decode_one_sequence() -> None:
    """A thread keeps its scratch memory, so a size that is too small shows in its first call only."""
    assert forked_processes.run(DECODE, timeout=120).stdout == "True\n"


CALL = """
import torch, undivided
q = torch.randn(1, 4, 2, 8)
print(undivided.explain(q, q, q, layout="bshd"))
undivided.attention(q, q, q, layout="bshd", backend="native")
"""


def test_an_unknown_level_is_an_error_that_names_the_known_ones() -> None:
    """The highest level ran instead, without a message."""
    for program in (
        CALL,
        "from undivided.cli.main import main; import sys; sys.argv = ['undivided', 'doctor']; main()",
    ):
        done = forked_processes.run(program, environment={"UNDIVIDED_ISA": "avx1024"})
        assert done.returncode != 0
        known = "generic, avx2, avx512, avx512_bf16, amx_bf16, amx, neon, neon_bf16"
        assert f"UNDIVIDED_ISA must be one of {known}, got 'avx1024'" in done.stderr


@needs_library
@pytest.mark.parametrize("level", ["generic", "avx512_bf16", "amx", "neon"])
def test_a_level_runs_or_is_refused(level: str) -> None:
    """A level that the processor lacks was replaced by its highest, without a message."""
    assert isinstance(LIBRARY, cpu.Library)
    done = forked_processes.run(CALL, environment={"UNDIVIDED_ISA": level})
    if level in LIBRARY.levels:
        assert done.returncode == 0, done.stderr
    else:
        reason = f"UNDIVIDED_ISA={level} (this processor and this build have {', '.join(LIBRARY.levels)})"
        assert reason in done.stdout
        assert "NoBackendError" in done.stderr
        assert reason in done.stderr


# A library that is missing


def test_a_missing_library_is_a_reason_and_another_backend_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu, "path", lambda: tmp_path / "libundivided_cpu.so")
    missing = cpu.load.__wrapped__()
    monkeypatch.setattr(cpu, "load", lambda: missing)
    monkeypatch.setattr(cpu, "warn_if_slower", lambda: None)
    assert missing.startswith("the native kernel's library was not built")
    assert missing.endswith(f"install g++ or clang++, then run: {_install.command()}")
    q = torch.randn(1, 8, 2, 16)
    assert native.BACKEND.unavailable(Machine.this()) == missing
    decision = undivided.explain(q, q, q, layout="bshd", backend="native")
    assert decision.chosen is None
    assert decision.reasons["native"] == (missing,)
    assert undivided.explain(q, q, q, layout="bshd").backend.name == "torch_flash"


def lost_speed(code: str, **variables: str) -> list[str]:
    """The warnings of three calls in a process of its own."""
    code = (
        f"import torch, undivided\n{code}\nq = torch.randn(1, 8, 2, 16)\n"
        + "undivided.attention(q, q, q, layout='bshd')\n" * 3
    )
    done = forked_processes.run(code, environment=variables)
    assert done.returncode == 0, done.stderr
    return [line.partition("RuntimeWarning: ")[2] for line in done.stderr.splitlines() if "RuntimeWarning" in line]


def test_lost_speed_is_warned_of_once_per_process(tmp_path: Path) -> None:
    absent = (
        f"from undivided.kernels import cpu\ncpu.path = lambda: __import__('pathlib').Path({str(tmp_path / 'x')!r})"
    )
    (warning,) = lost_speed(absent)
    assert warning.startswith(
        "calls on the CPU run on PyTorch's kernels, which are slower: the native kernel's library was"
    )
    denied = "from undivided.kernels import cpu\ncpu.load().lost_level = 'the system denied it'"
    if isinstance(LIBRARY, cpu.Library):
        found = f"the native kernel runs at level {LIBRARY.level}, slower than it could: the system denied it"
        assert lost_speed(denied, UNDIVIDED_ISA="") == [found]
        assert lost_speed(denied, UNDIVIDED_ISA="generic") == []
        other = next(level for level in cpu.LEVELS if level not in LIBRARY.levels)
        (warning,) = lost_speed("", UNDIVIDED_ISA=other)
        assert f"UNDIVIDED_ISA={other} (this processor and this build have" in warning
    assert lost_speed("", UNDIVIDED_ISA="generic") == []


@pytest.mark.skipif(isinstance(LIBRARY, str), reason="the native kernel is not built")
def test_doctor_and_explain_name_a_level_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(LIBRARY, cpu.Library)
    assert LIBRARY.has_openmp
    monkeypatch.setattr(LIBRARY, "lost_level", "the system denied it")
    monkeypatch.setattr(LIBRARY, "has_openmp", False)
    monkeypatch.setattr(cpu, "warn_if_slower", lambda: None)
    assert native.status().endswith(
        "; the system denied it; it starts its own threads, because this process has no OpenMP runtime that it can use"
    )
    q = torch.randn(1, 8, 2, 16)
    explained = str(undivided.explain(q, q, q, layout="bshd", backend="native"))
    assert "the system denied it" in explained
    assert "no OpenMP runtime" in explained


def test_a_library_that_does_not_load_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libundivided_cpu.so"
    broken.write_text("not a library", encoding="utf-8")
    monkeypatch.setattr(cpu, "path", lambda: broken)
    why = cpu.load.__wrapped__()
    assert why.startswith("the native kernel does not load (")
    assert why.endswith(f"build it again: {_install.command()}")


FOLDER = Path("/sources/a b").as_uri()
ORIGINS = {
    "index": ("", "undivided==1.2 --no-binary undivided"),
    "folder": (json.dumps({"url": FOLDER, "dir_info": {}}), f"'undivided @ {FOLDER}'"),
    "git": (
        '{"url": "https://host/undivided", "vcs_info": {"vcs": "git", "commit_id": "abc"}}',
        "'undivided @ git+https://host/undivided@abc'",
    ),
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_the_command_installs_what_was_installed(origin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the printed command pip installed the wheel from its cache, which has no library."""
    url, requirement = ORIGINS[origin]
    info = tmp_path / "undivided-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: undivided\nVersion: 1.2\n", encoding="utf-8")
    if url:
        (info / "direct_url.json").write_text(url, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_install, "CHECKOUT", tmp_path)
    monkeypatch.setattr(sys, "executable", "/my python")
    options = "--force-reinstall --no-deps --no-cache-dir -C wheel.cmake=true"
    assert _install.command() == f"'/my python' -m pip install {options} {requirement}"


def test_the_command_builds_the_running_checkout() -> None:
    assert _install.command().endswith(f" -e {shlex.quote(str(ROOT))}")
