"""pyproject.toml against the code, and the pages that repeat parts of it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from undivided.backends import all_backends, flash_attn
from undivided.backends._base import Limits
from undivided.machine import _PACKAGES

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
URL = PROJECT["urls"]["Homepage"]


def _limits() -> list[Limits]:
    """The limits of every backend; flash_attn has one per version."""
    from undivided.backends.shared import flash_attn_rules

    found = [value for value in vars(flash_attn_rules).values() if isinstance(value, Limits)]
    assert flash_attn.BACKEND in all_backends()
    assert found, "flash_attn_rules has the limits of every version of flash-attn"
    return found + [backend.limits for backend in all_backends()]


def _extras() -> dict[str, Requirement]:
    """The requirement of an extra by the name of its distribution."""
    requirements = [Requirement(text) for texts in PROJECT["optional-dependencies"].values() for text in texts]
    return {requirement.name: requirement for requirement in requirements}


PACKAGES = sorted({bounds for limits in _limits() for bounds in limits.packages if bounds[0] != "torch"}, key=str)


@pytest.mark.parametrize("bounds", PACKAGES, ids=lambda bounds: bounds[0])
def test_an_extra_installs_what_its_backend_accepts(bounds: tuple[str, tuple[int, ...], tuple[int, ...]]) -> None:
    """The extras allowed cudnn-frontend 1.12 and flash-attn 2.7, which their backends refuse."""
    name, lowest, first_broken = bounds
    requirement = _extras().get(_PACKAGES[name][0])
    if requirement is None:
        assert name in ("flash_attn_3", "flash_attn_4"), "a package that a backend needs has an extra"
        return
    accepted = Version(".".join(map(str, lowest)))
    lower = [Version(part.version) for part in requirement.specifier if part.operator == ">="]
    assert lower == [accepted], f"{requirement} and the backend's lowest version, {accepted}"
    upper = [Version(part.version) for part in requirement.specifier if part.operator == "<"]
    assert upper == ([] if first_broken is None else [Version(".".join(map(str, first_broken)))])


def test_the_version_is_in_one_place_and_has_a_release_in_the_changelog() -> None:
    version = PROJECT["version"]
    releases = re.findall(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert version in releases
    assert releases == sorted(set(releases), key=lambda name: Version("999" if name == "Unreleased" else name))[::-1]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [version]


def test_every_page_names_the_same_repository() -> None:
    owner = URL.rpartition("/")[0]
    for path in [*ROOT.glob("*.*"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").rglob("*.yml")]:
        if path.is_file() and path.suffix in {".md", ".toml", ".cff", ".yml"}:
            text = path.read_text(encoding="utf-8")
            for found in re.findall(r"https://github\.com/[\w.-]+/undivided\b", text):
                assert found == URL, path
            assert f"{owner}/undivided-" not in text, path


def test_the_classifiers_name_the_pythons_that_the_workflows_test() -> None:
    classified = {text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", text)}
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    assert classified == set(re.findall(r'"(3\.\d+)"', workflow))
    assert "Operating System :: OS Independent" not in PROJECT["classifiers"]


def test_every_relative_link_of_the_readme_names_a_file() -> None:
    """The description on a package index links to these paths in the repository."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert targets
    assert not [target for target in targets if not (ROOT / target).exists()]
