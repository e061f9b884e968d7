"""What to do where the library is missing: the command that builds it, for this installation."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[4]


def not_built() -> str:
    """Why there is no library, and the command that builds it."""
    return (
        "the native kernel's library was not built: the installation found no C++ compiler, or the build failed; "
        f"install g++ or clang++, then run: {command()}"
    )


def command() -> str:
    """A command that installs this version again, library included, or fails and says why.

    pip would take the wheel without library from its cache, hence --no-cache-dir; with wheel.cmake=true a build that
    fails is an error, where otherwise such a wheel is made.
    """
    pip = f"{shlex.quote(sys.executable)} -m pip install --force-reinstall --no-deps --no-cache-dir"
    return f"{pip} -C wheel.cmake=true {_requirement()}"


def _requirement() -> str:
    """What pip is to install: the checkout that this file lies in, or else what the package was installed from."""
    if (CHECKOUT / "cmake" / "CMakeLists.txt").is_file():
        return f"-e {shlex.quote(str(CHECKOUT))}"
    try:
        installed = importlib.metadata.distribution("undivided")
    except importlib.metadata.PackageNotFoundError:
        return "undivided"
    origin = json.loads(installed.read_text("direct_url.json") or "{}")  # PEP 610; none if it came from an index
    if not origin:
        return f"undivided=={installed.version} --no-binary undivided"
    vcs = origin.get("vcs_info")
    url = f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}" if vcs else origin["url"]
    return shlex.quote(f"undivided @ {url}")
