"""`scripts/tune-cpu`: its thresholds exist, a variant differs in one of them alone, and it changes no file.

Each value of abi/tuning.h and abi/tuning_levels.h has a source, and the vendor is that of this processor.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import forked_processes
import levels
import pytest

from undivided.kernels import cpu

ROOT = Path(__file__).parents[4]
TOOL = ROOT / "scripts/tuning"
SOURCES = ROOT / "src/undivided/kernels/cpu"
HEADERS = [SOURCES / "abi/tuning.h", SOURCES / "abi/tuning_levels.h"]
DECLARATION = re.compile(r"^ *(?:constexpr )?\w+ ([a-zA-Z]\w* = [^;]*);", re.MULTILINE)
INSTANCES = re.compile(r"^constexpr Tuning (?:\w+\([^)]*\) \{.*?^\}|k\w+ = [^;]*;)$", re.MULTILINE | re.DOTALL)
"""Instances of the struct, whose fields have sources."""

pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="needs a checkout")
needs_library = pytest.mark.skipif(isinstance(cpu.load(), str), reason="needs the native library")
needs_compiler = pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("c++")), reason="needs cmake and a C++ compiler"
)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the tool."""
    monkeypatch.syspath_prepend(str(TOOL))
    import measure
    import thresholds
    import variants

    return type("Tool", (), {"measure": measure, "thresholds": thresholds, "variants": variants})


def sources() -> str:
    """A checksum of everything that a measurement must leave as it is."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "src/undivided/kernels").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(path.read_bytes())
    return found.hexdigest()


class Value:
    """A value of the header: its name, the names of its block's "tune-cpu:" lines, and its "set by:" lines."""

    def __init__(self, name: str, comment: str) -> None:
        self.name = name
        self.measured = [one for line in re.findall(r"tune-cpu: (.*)", comment) for one in line.split(", ")]
        self.reasons = re.findall(r"set by: (.+)", comment)

    @property
    def own(self) -> list[str]:
        """What `scripts/tune-cpu` measures of it."""
        return [one for one in self.measured if one.partition(".")[0] == self.name]


def all_values() -> list[Value]:
    """The values of both headers."""
    return [one for path in HEADERS for one in values(path.read_text("utf-8"))]


def values(header: str) -> list[Value]:
    """The values that a header declares, each with the comment before it."""
    header = header[header.index("namespace undivided::tuning") :]
    header = INSTANCES.sub("", header)
    found, comment, fresh = [], "", True
    for line in header.splitlines():
        text = line.strip()
        if text.startswith("//"):
            comment, fresh = (comment if not fresh else "") + text[2:] + "\n", False
        elif declared := DECLARATION.match(line):
            names = re.findall(r"(?:^|[,}] ?)(\w+) = ", re.sub(r"\{[^}]*\}", "{}", declared[1]))
            found += [Value(name, comment) for name in names]
            fresh = True
    return found


class TestSources:
    def test_the_headers_are_read_as_the_compiler_reads_it(self) -> None:
        found = {one.name: one for one in all_values()}
        assert {"rows_32", "rows_16", "decode_prefetch", "kMinSplitFill", "kAllHeads", "kEvenKeys"} <= set(found)
        assert len(found) > 60
        assert found["block_bytes"].own == ["block_bytes"]
        assert found["kOneHead"].own == ["kOneHead.min_bytes", "kOneHead.max_keys"]

    def test_every_value_is_measured_by_the_tool_or_has_a_reason(self) -> None:
        without = [one.name for one in all_values() if not one.own and not one.reasons]
        assert without == []

    def test_a_value_without_a_source_is_found(self) -> None:
        header = "namespace undivided::tuning {\n// tune-cpu: kA\nconstexpr int64_t kA = 1, kB = 2;\nint64_t c = 3;\n"
        assert [(one.name, one.own, one.reasons) for one in values(header)] == [
            ("kA", ["kA"], []),
            ("kB", [], []),
            ("c", [], []),
        ]

    def test_the_tool_measures_what_the_header_says(self, tool: Any) -> None:
        measured = [own for one in all_values() for own in one.own]
        assert sorted(measured) == sorted(tool.thresholds.BY_NAME)

    def test_a_source_stands_at_its_value(self) -> None:
        found = all_values()
        declared = {one.name for one in found}
        for one in found:
            for name in one.measured:
                assert name.partition(".")[0] in declared, name


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86")
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
def test_the_vendor_is_that_of_the_processor(tmp_path: Path) -> None:
    system = Path("/proc/cpuinfo")
    if not system.exists():
        pytest.skip("needs Linux")
    program = tmp_path / "vendor"
    main = 'int main() { printf("%d", undivided::CpuFeatures::read().intel); }'
    program.with_suffix(".cc").write_text(f'#include <cstdio>\n#include "abi/cpu_features.h"\n{main}\n', "utf-8")
    flags = ["-std=c++17", "-DUNDIVIDED_X86", f"-I{SOURCES}"]
    subprocess.run(["c++", *flags, str(program.with_suffix(".cc")), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert printed == str(int("GenuineIntel" in system.read_text("utf-8")))


class TestVariants:
    def test_every_threshold_is_a_constant_of_one_header(self, tool: Any) -> None:
        for one in tool.thresholds.THRESHOLDS:
            headers = tool.variants.changed_headers({one.name: 12345})
            assert ["12345" in text for text in headers.values()].count(True) == 1
            assert len(one.values) > 1
            assert one.problems

    def test_one_constant_changes_in_every_branch_of_the_preprocessor(self, tool: Any) -> None:
        header = "#if A\nconstexpr int64_t kOne = 1, kTwo = 2 << 10;\n#else\nconstexpr int64_t kTwo = 3;\n#endif\n"
        assert tool.variants.replaced(header, "kTwo", 7) == header.replace("2 << 10", "7").replace("= 3", "= 7")

    def test_a_field_of_a_struct_changes_alone(self, tool: Any) -> None:
        struct = "struct Limits {\n  int64_t chunks, bytes;\n};\n// both\n"
        header = f"{struct}constexpr Limits kA = {{64, 256 << 10}}, kB = {{1, 2}};\n"
        assert tool.variants.replaced(header, "kA.bytes", 7) == header.replace("256 << 10", "7")
        assert tool.variants.replaced(header, "kB.chunks", 7) == header.replace("{1, 2}", "{7, 2}")

    def test_an_unknown_constant_is_an_error(self, tool: Any) -> None:
        with pytest.raises(tool.variants.BuildError, match="no constant kNone"):
            tool.variants.replaced("constexpr int kSome = 1;", "kNone", 2)

    @needs_compiler
    def test_a_value_that_the_compiler_refuses_is_reported(self, tool: Any) -> None:
        builder = tool.variants.Builder("generic")
        with pytest.raises(tool.variants.BuildError, match="kNoSuchThreshold"):
            builder.values(["kNoSuchThreshold"])
        assert builder.values(["kOneHead.max_keys", "block_keys"]).keys() == {"kOneHead.max_keys", "block_keys"}


class TestMeasurement:
    def test_a_value_is_recommended_if_it_is_clearly_faster_and_loses_nowhere(self, tool: Any) -> None:
        def row(**ratios: float) -> Any:
            return tool.measure.Row("a problem", {int(name[1:]): ratio for name, ratio in ratios.items()}, 0.0, ())

        recommended = tool.measure.recommended
        assert recommended([row(v64=1.10, v96=1.05), row(v64=1.10, v96=1.05)], 128) == 64
        assert recommended([row(v64=1.30, v96=1.05), row(v64=0.90, v96=1.05)], 128) == 96, "64 loses a tenth"
        assert recommended([row(v64=1.01), row(v64=1.01)], 128) == 128, "a hundredth is noise"
        assert recommended([], 128) == 128

    @needs_library
    def test_two_equal_libraries_are_equally_fast_and_the_loaded_one_stays(self, tool: Any) -> None:
        loaded = cpu.load
        library = cpu.load()
        assert isinstance(library, cpu.Library)
        problem = next(one for one in tool.thresholds.BY_NAME["max_small_forward_32"].problems if "-12-" in one.name)
        row = tool.measure.measure(problem, {1: library, 2: levels._library(library.level)}, 1, 0.05)
        assert row.ratios.keys() == {2}
        assert row.wrong == ()
        assert cpu.load is loaded

    @needs_library
    def test_a_wrong_result_is_not_timed(self, tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        library = cpu.load()
        assert isinstance(library, cpu.Library)
        broken = levels._library(library.level)
        right = broken.forward

        def twice_the_scale(record: bytes) -> None:
            values = list(cpu.RECORD.unpack(record))
            values[cpu.FIELDS.index("scale")] *= 2
            right(cpu.RECORD.pack(*values))

        monkeypatch.setattr(broken, "forward", twice_the_scale)
        problem = tool.thresholds.BY_NAME["max_small_forward_32"].problems[0]
        row = tool.measure.measure(problem, {1: library, 2: broken}, 1, 0.05)
        assert (row.ratios, row.wrong) == ({}, (2,))


@needs_library
@needs_compiler
class TestCommand:
    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return forked_processes.run(TOOL, "--level", "generic", *words, environment={"OMP_NUM_THREADS": "1"})

    @pytest.mark.slow
    def test_one_threshold_is_built_timed_and_judged(self, tmp_path: Path) -> None:
        before, report = sources(), tmp_path / "report.json"
        words = ("kMinParallelWork", "--values", "65536", "--filter", "fp32-8-", "--seconds", "0.1")
        done = self.run(*words, "--optimize=-O0", "--json", str(report))
        assert done.returncode == 0, done.stderr
        assert "| problem | 65536 | spread |" in done.stdout
        assert "kMinParallelWork: " in done.stdout.splitlines()[-1]
        found = json.loads(report.read_text())
        assert found["machine"]["native"] == "generic"
        [threshold] = found["thresholds"]
        assert [row["problem"] for row in threshold["rows"]] == ["fp32-8-d64-h8"]
        assert sources() == before, "a measurement changes no source and no library"

    def test_the_list_has_each_threshold_with_its_value(self) -> None:
        done = self.run("--list")
        assert done.returncode == 0, done.stderr
        assert "block_keys = 128: keys of a key block; tries 128, 192, 256, 384" in done.stdout
        assert "max_row_major_keys" not in done.stdout, "it decides nothing at this level"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("kNone",), "NAME must be one of rows_32, "),
            (("--values", "1,2"), "--values must be given for one threshold"),
            (("--level", "avx9"), "UNDIVIDED_ISA must be one of "),
        ],
    )
    def test_a_bad_request_is_one_message(self, words: tuple[str, ...], message: str) -> None:
        done = self.run(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
