"""Which level of the native library runs: abi/level.cc, compiled for this processor and for pretended ones."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from undivided.kernels import cpu

SOURCES = cpu.path().parent
LIBRARY = cpu.load()
needs_library = pytest.mark.skipif(isinstance(LIBRARY, str), reason="the native kernel is not built")

LEVELS_PROGRAM = """
#include <stdio.h>

#include <string>

#include "abi/level.h"
namespace undivided {
const Kernels kernels_generic = {"generic"};
#ifdef UNDIVIDED_X86
const Kernels kernels_avx2 = {"avx2"}, kernels_avx512 = {"avx512"}, kernels_avx512_bf16 = {"avx512_bf16"},
              kernels_amx_bf16 = {"amx_bf16"}, kernels_amx = {"amx"};
#else
const Kernels kernels_neon = {"neon"}, kernels_neon_bf16 = {"neon_bf16"};
#endif
}
int main() {
  for (int i = 0; undivided::level_name(i); i++) puts(undivided::level_name(i));
}
"""


@needs_library
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_every_compiler_builds_the_choice_of_a_level(compiler: str, tmp_path: Path) -> None:
    """clang before 18 has no __builtin_cpu_supports("f16c"): the build failed, and the wheel was pure Python."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} in PATH")
    assert isinstance(LIBRARY, cpu.Library)
    program, levels = tmp_path / "levels.cc", tmp_path / "levels"
    program.write_text(LEVELS_PROGRAM, encoding="utf-8")
    if platform.machine() in ("x86_64", "AMD64"):
        built = ["-DUNDIVIDED_X86"] + ["-DUNDIVIDED_AMX"] * sys.platform.startswith("linux")
    else:
        built = ["-DUNDIVIDED_NEON", "-DUNDIVIDED_NEON_BF16"]
    options = [*built, "-std=c++17", "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror", f"-I{SOURCES}"]
    subprocess.run([compiler, *options, program, SOURCES / "abi" / "level.cc", "-o", levels], check=True, timeout=120)
    found = subprocess.run([levels], capture_output=True, text=True, check=True).stdout.split()
    assert tuple(found) == LIBRARY.levels


# Replaces abi/cpu_features.h in a build of abi/level.cc.
PRETENDED_PROCESSOR = """
#include "{features}"
#define syscall(...) ({permission})
namespace undivided {{
struct Pretended : CpuFeatures {{
  static Pretended read() {{
    Pretended all;
    all.ecx1 = all.ebx7 = all.ecx7 = all.edx7 = all.eax7_1 = all.ecx_extended = ~0u;
    all.xcr0 = {saved};
    {more}
    return all;
  }}
}};
}}
#define CpuFeatures Pretended
"""
DENIED = {
    # name: saved registers, options, levels, and why there are no more
    "tiles": ("0xe6", ["-DUNDIVIDED_AMX"], 4, "the operating system denied this process the tile registers of AMX"),
    "assembler": ("0xe6", [], 4, "this build has no AMX: its assembler did not know it, or the system is not Linux"),
    "zmm": ("6", ["-DUNDIVIDED_AMX"], 2, "the operating system does not save vector registers that this processor has"),
    "ymm": ("0", ["-DUNDIVIDED_AMX"], 1, "the operating system does not save vector registers that this processor has"),
    "left out above avx512_bf16": ("0xe6", ["-DUNDIVIDED_LEVELS=4"], 4, "this build leaves out the levels above"),
    "left out above avx2": ("0xe6", ["-DUNDIVIDED_LEVELS=2"], 2, "this build leaves out the levels above"),
}


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="of Linux on x86")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ in PATH")
@pytest.mark.parametrize("name", DENIED)
def test_a_level_that_the_system_or_the_build_denies_is_named(name: str, tmp_path: Path) -> None:
    """A processor with AVX-512 whose registers the system does not save ran at a lower level without a message."""
    saved, options, levels, why = DENIED[name]
    binary = build_on_pretended(tmp_path, options, ["undivided::lost_level()"], saved)
    found = subprocess.run([binary], capture_output=True, text=True, check=True).stdout.splitlines()
    assert found == [why, *cpu.LEVELS[:levels]]


def build_on_pretended(
    folder: Path, options: list[str], lines: list[str], saved: str = "0xe6", permission: str = "-1L", more: str = ""
) -> Path:
    """A program that prints these lines, then the levels of a pretended processor."""
    program, binary, header = folder / "levels.cc", folder / "levels", folder / "abi" / "cpu_features.h"
    header.parent.mkdir()
    features = SOURCES / "abi" / "cpu_features.h"
    text = PRETENDED_PROCESSOR.format(features=features, saved=saved, permission=permission, more=more)
    header.write_text(text, encoding="utf-8")
    printed = "".join(f"  puts({line});\n" for line in lines)
    program.write_text(LEVELS_PROGRAM.replace("  for", f"{printed}  for"), encoding="utf-8")
    command = ["g++", "-std=c++17", "-DUNDIVIDED_X86", *options, f"-I{folder}", f"-I{SOURCES}"]
    subprocess.run([*command, program, SOURCES / "abi" / "level.cc", "-o", binary], check=True, timeout=120)
    return binary


NO_AMX = "all.edx7 = 0;"
CHOICES = {
    # name: vendor, missing features, whether tiles are permitted, chosen level, highest level
    "Intel with AMX": ("intel", "", True, "amx", "amx"),
    "Intel without fp16 tiles": ("intel", "all.eax7_1 = 1 << 5;", True, "amx_bf16", "amx_bf16"),
    "Intel with denied tiles": ("intel", "", False, "avx512", "avx512_bf16"),
    "Intel without AMX": ("intel", NO_AMX, True, "avx512", "avx512_bf16"),
    "Intel without bf16": ("intel", NO_AMX + "all.eax7_1 = 0;", True, "avx512", "avx512"),
    "Intel without AVX-512": ("intel", "all.ebx7 = 1 << 3 | 1 << 5 | 1 << 8;", True, "avx2", "avx2"),
    "AMD": ("amd", NO_AMX, True, "avx512_bf16", "avx512_bf16"),
    "AMD without bf16": ("amd", NO_AMX + "all.eax7_1 = 0;", True, "avx512", "avx512"),
    "AMD without AVX-512": ("amd", "all.ebx7 = 1 << 3 | 1 << 5 | 1 << 8;", True, "avx2", "avx2"),
    "another vendor": ("", NO_AMX, True, "avx512_bf16", "avx512_bf16"),
}


KERNELS_OF_PROBLEMS = """[] {
  static std::string line;
  Attention a{};
  for (long dtype : {kBFloat16, kFloat16, kFloat32})
    for (long invariant : {0, 1})
      for (long format : {0, 1}) {
        a.dtype = dtype, a.batch_invariant = invariant, a.format = format;
        line += std::string(undivided::kernels(a).name) + " ";
      }
  return line.c_str();
}()"""


Choice = tuple[str, Path]


@pytest.fixture(scope="module", params=CHOICES)
def choice(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Choice:
    """A processor of `CHOICES`, and a program that prints the chosen level, and the levels of some problems."""
    vendor, missing, permitted, _, _ = CHOICES[request.param]
    more, permission = (f"all.{vendor} = true; " if vendor else "") + missing, "0L" if permitted else "-1L"
    lines, folder = ["undivided::kernels().name", KERNELS_OF_PROBLEMS], tmp_path_factory.mktemp("choice")
    return request.param, build_on_pretended(folder, ["-DUNDIVIDED_AMX"], lines, permission=permission, more=more)


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="of Linux on x86")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ in PATH")
def test_the_highest_level_runs_but_intels_slow_dot_products_only_on_request(choice: Choice) -> None:
    """bf16 took twice the time on Intel's processors whose AMX was hidden."""
    name, binary = choice
    chosen, highest = CHOICES[name][3:]
    levels = cpu.LEVELS[: cpu.LEVELS.index(highest) + 1]
    for requested, running in [("", chosen), ("neon", chosen), *((level, level) for level in levels)]:
        environment = {**os.environ, "UNDIVIDED_ISA": requested}
        printed = subprocess.run([binary], capture_output=True, text=True, check=True, env=environment).stdout
        first, _, *found = printed.splitlines()
        assert [first, *found] == [running, *levels], requested


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="of Linux on x86")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ in PATH")
def test_what_tiles_do_not_run_goes_to_vectors_and_bf16_to_multiply_adds_on_intels(choice: Choice) -> None:
    """By dot products batch-invariant bf16 took 1.7 times the time there, prefill over int8 keys 1.4 times."""
    name, binary = choice
    vendor, _, _, chosen, _ = CHOICES[name]
    environment = {**os.environ, "UNDIVIDED_ISA": ""}
    printed = subprocess.run([binary], capture_output=True, text=True, check=True, env=environment).stdout
    found = printed.splitlines()[1].split()
    others = "avx512_bf16" if chosen.startswith("amx") else chosen
    bf16 = "avx512" if chosen.startswith("amx") and vendor == "intel" else others
    assert found == [chosen, *[bf16] * 3, *[chosen, *[others] * 3] * 2]
