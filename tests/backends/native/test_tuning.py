"""The thresholds of the native kernel, abi/tuning.h: each has a source, and the vendor is the one of this processor."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "src/undivided/kernels/cpu"
HEADER = SOURCES / "abi/tuning.h"
TOOL = ROOT / "scripts/tuning"
DECLARATION = re.compile(r"^ *(?:constexpr )?\w+ ([a-zA-Z]\w* = [^;]*);", re.MULTILINE)
COMPUTED = re.compile(r"^constexpr Tuning k\w+ = [^;]*;$", re.MULTILINE)
"""Instances of the struct, whose fields have sources."""

pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="needs a checkout")


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


def values(header: str) -> list[Value]:
    """The values that a header declares, each with the comment before it."""
    header = header[header.index("namespace undivided::tuning") :]
    header = re.sub(r"^constexpr Tuning \w+\([^)]*\) \{.*?^\}$", "", header, flags=re.MULTILINE | re.DOTALL)
    header = COMPUTED.sub("", header)
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


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `scripts/tune-cpu` measures."""
    monkeypatch.syspath_prepend(str(TOOL))
    import thresholds

    return thresholds.BY_NAME


class TestSources:
    def test_the_header_is_read_as_the_compiler_reads_it(self) -> None:
        found = {one.name: one for one in values(HEADER.read_text("utf-8"))}
        assert {"rows_32", "rows_16", "decode_prefetch", "kMinSplitFill", "kOneHead", "kAllHeads", "kEvenKeys"} <= set(
            found
        )
        assert len(found) > 60
        assert found["block_bytes"].own == ["block_bytes"]
        assert found["kOneHead"].own == ["kOneHead.min_bytes", "kOneHead.max_keys"]

    def test_every_value_is_measured_by_the_tool_or_has_a_reason(self) -> None:
        without = [one.name for one in values(HEADER.read_text("utf-8")) if not one.own and not one.reasons]
        assert without == []

    def test_a_value_without_a_source_is_found(self) -> None:
        header = "namespace undivided::tuning {\n// tune-cpu: kA\nconstexpr int64_t kA = 1, kB = 2;\nint64_t c = 3;\n"
        assert [(one.name, one.own, one.reasons) for one in values(header)] == [
            ("kA", ["kA"], []),
            ("kB", [], []),
            ("c", [], []),
        ]

    def test_the_tool_measures_what_the_header_says(self, names: Any) -> None:
        measured = [own for one in values(HEADER.read_text("utf-8")) for own in one.own]
        assert sorted(measured) == sorted(names)

    def test_a_source_stands_at_its_value(self) -> None:
        found = values(HEADER.read_text("utf-8"))
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
