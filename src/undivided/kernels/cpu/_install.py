"""The command that builds a missing library, for this installation."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[4]


def not_built() -> str:
    """Why the library is missing, and the command that builds it."""
    if sys.platform == "win32":
        return "the native kernel's library was not built: it has no build for Windows"
    cause = "the installation found no C++ compiler, or the build failed"
    if is_pure_wheel():
        cause = f"this is the pure Python wheel; no other fits this platform, or {cause}"
    return f"the native kernel's library was not built: {cause}; install g++ or clang++, then run: {command()}"


def is_pure_wheel() -> bool:
    """Whether the package was installed from a wheel without a library."""
    return "py3-none-any" in wheel_tags() and not (CHECKOUT / "cmake" / "CMakeLists.txt").is_file()


def wheel_tags() -> list[str]:
    """The tags of the wheel that was installed, such as "py3-none-any"; none without an installation."""
    try:
        text = importlib.metadata.distribution("undivided").read_text("WHEEL") or ""
    except importlib.metadata.PackageNotFoundError:
        return []
    return [line.removeprefix("Tag: ") for line in text.splitlines() if line.startswith("Tag: ")]


def command() -> str:
    """A command that installs this version again, library included, or fails and says why.

    --no-cache-dir, because pip would take the wheel without a library from its cache. wheel.cmake=true makes a failed
    build an error; without it, the result of a failed build is a wheel without a library.
    """
    pip = f"{shlex.quote(sys.executable)} -m pip install --force-reinstall --no-deps --no-cache-dir"
    return f"{pip} -C wheel.cmake=true {_requirement()}"


def _requirement() -> str:
    """The requirement for pip: the checkout that contains this file, or else the origin of the installed package."""
    if (CHECKOUT / "cmake" / "CMakeLists.txt").is_file():
        return f"-e {shlex.quote(str(CHECKOUT))}"
    try:
        installed = importlib.metadata.distribution("undivided")
    except importlib.metadata.PackageNotFoundError:
        return "undivided"
    origin = json.loads(installed.read_text("direct_url.json") or "{}")  # PEP 610; absent if it came from an index
    if not origin:
        return f"undivided=={installed.version} --no-binary undivided"
    vcs = origin.get("vcs_info")
    url = f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs else origin["url"]
    return shlex.quote(f"undivided @ {url}")
