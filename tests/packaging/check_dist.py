"""Check the files that are published: python tests/packaging/check_dist.py dist.

Needs nothing but Python, so that `scripts/package` and the release workflow run it before they publish.
"""

from __future__ import annotations

import re
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path

LIBRARY = "undivided/kernels/cpu/libundivided_cpu"


def faults(path: Path) -> list[str]:
    """What is wrong with a wheel or with the archive of the sources."""
    return list(_of_wheel(path) if path.suffix == ".whl" else _of_sources(path))


def _of_wheel(path: Path) -> Iterator[str]:
    name, version, python, abi, platform = path.stem.split("-")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        yield from _of_metadata(archive.read(f"{name}-{version}.dist-info/METADATA"), version)
        libraries = [found for found in names if re.search(r"\.(so|dylib|dll|pyd)\b", found)]
        elf = [archive.read(found) for found in libraries]
    if (python, abi) != ("py3", "none"):
        yield f"a wheel is for every Python (py3-none), got {python}-{abi}"
    expected = 0 if platform == "any" else 1
    if len(libraries) != expected or not all(found.startswith(LIBRARY) for found in libraries):
        yield f"a wheel for {platform} has {expected} native library, got {libraries}"
    for binary in elf:
        if runtimes := [needed for needed in needed_libraries(binary) if re.search("gomp|omp", needed)]:
            yield f"the native library links {runtimes}: torch has its own OpenMP runtime, and a process needs one"
    if "undivided/py.typed" not in names or "undivided/selection/measured/rates.json" not in names:
        yield "a data file of the package is missing"
    if extra := [found for found in names if found.endswith((".cc", ".h", ".pyc"))]:
        yield f"a wheel has no sources of the native library, got {extra[:3]}"


def _of_sources(path: Path) -> Iterator[str]:
    version = path.name.removeprefix("undivided-").removesuffix(".tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        metadata = archive.extractfile(f"undivided-{version}/PKG-INFO")
        assert metadata is not None
        yield from _of_metadata(metadata.read(), version)
    for name in (
        "LICENSE",
        "pyproject.toml",
        "constraints.txt",
        "cmake/CMakeLists.txt",
        "cmake/glibc_2_28.h",
        "src/undivided/kernels/cpu/abi/kernels.cc",
        "tests/conftest.py",
        "scripts/test",
        ".ci/run",
        "docs/glossary.md",
        "examples/04_masks.py",
    ):
        if name not in names:
            yield f"{name} is missing"
    if built := [name for name in names if name.endswith((".so", ".o", ".pyc", ".whl"))]:
        yield f"built files are among the sources: {built[:3]}"


def _of_metadata(text: bytes, version: str) -> Iterator[str]:
    metadata: Message = message_from_bytes(text)
    if metadata["Version"] != version:
        yield f"the version is {metadata['Version']}, the file's name has {version}"
    if metadata["Description-Content-Type"] != "text/markdown":
        yield "the description is not Markdown"
    page = metadata.get_payload() if not metadata["Description"] else metadata["Description"]
    if relative := re.findall(r"\]\((?!https?:|#)[^)]+\)", str(page)):
        yield f"links of the description are relative: {relative[:3]}"
    if "```mermaid" in str(page):
        yield "the description has a diagram that a package index does not draw"


def needed_libraries(binary: bytes) -> list[str]:
    """The names of the libraries that a 64-bit little-endian ELF file links (DT_NEEDED); none for other formats."""
    if binary[:6] != b"\x7fELF\x02\x01":
        return []
    (start,), (count,) = struct.unpack_from("<Q", binary, 0x28), struct.unpack_from("<H", binary, 0x3C)
    sections = [struct.unpack_from("<IIQQQQIIQQ", binary, start + 64 * index) for index in range(count)]
    needed = []
    for section in sections:
        if section[1] != 6:  # SHT_DYNAMIC; section[6] is the section of its strings
            continue
        strings = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], 16):
            tag, value = struct.unpack_from("<QQ", binary, at)
            if tag == 1:  # DT_NEEDED
                needed.append(binary[strings + value : binary.index(b"\0", strings + value)].decode())
    return needed


def main(folder: str) -> int:
    """Print the faults of every file in a folder; 1 if there is one."""
    files = sorted(path for path in Path(folder).iterdir() if path.name.endswith((".whl", ".tar.gz")))
    found = [f"{path.name}: {fault}" for path in files for fault in faults(path)]
    print(*(found or [f"{path.name}: complete" for path in files] or ["nothing to check"]), sep="\n")
    return int(bool(found) or not files)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
