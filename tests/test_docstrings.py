"""Docstrings of the public surface: a summary, and sections for arguments, results, errors and examples."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

# Modules whose public objects (those in `__all__`) are checked. To widen the check, add a module and fix what it finds.
MODULES = [
    "undivided",
    "undivided.benchmarking",
    "undivided.cache",
    "undivided.context_parallel",
    "undivided.parallel",
    "undivided.errors",
    "undivided.integrations.torch_sdpa",
    "undivided.integrations.transformers",
    "undivided.masks",
    "undivided.nn",
    "undivided.verification",
]

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "api"
HOOKS = {"extra_repr"}  # PyTorch defines and calls them
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Source", "Sources")


class Documented(NamedTuple):
    """A public class, function, method or property, with its docstring."""

    name: str
    target: Any
    owner: type | None = None
    """The class of a method or property."""

    @property
    def function(self) -> Any:
        """The function whose body is checked; the constructor of a class."""
        if isinstance(self.target, property | staticmethod | classmethod):
            return self.target.fget if isinstance(self.target, property) else self.target.__func__
        return inspect.unwrap(self.target) if isinstance(self.target, FunctionType) else self.target

    @property
    def text(self) -> str:
        return inspect.cleandoc(getattr(self.target, "__doc__", None) or "")


def public_objects(module: ModuleType) -> Iterator[Documented]:
    """The functions and classes in `__all__`, and the public methods of the classes."""
    for name in module.__all__:
        found = getattr(module, name)
        if isinstance(found, type):
            yield Documented(f"{module.__name__}.{name}", found)
            yield from public_members(f"{module.__name__}.{name}", found)
        elif isinstance(found, FunctionType):
            yield Documented(f"{module.__name__}.{name}", found)


def public_members(prefix: str, owner: type) -> Iterator[Documented]:
    """The public methods and properties of a class that this package defines."""
    seen: set[str] = set()
    for base in owner.__mro__:
        if not base.__module__.startswith("undivided"):
            continue
        for name, member in vars(base).items():
            is_code = isinstance(member, FunctionType | property | staticmethod | classmethod)
            if is_code and not name.startswith("_") and name not in seen | HOOKS:
                yield Documented(f"{prefix}.{name}", member, owner)
            seen.add(name)


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring by name."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def parameters(checked: Documented) -> list[str]:
    """The names of the parameters, without `self`."""
    if isinstance(checked.target, type) and checked.target.__init__ in (object.__init__, RuntimeError.__init__):
        return list(getattr(checked.target, "_fields", ()))
    function = checked.target.__init__ if isinstance(checked.target, type) else checked.function
    given = inspect.signature(function).parameters
    # *more and **unknown are there for the error that they become
    names = [name for name, one in given.items() if str(one).split(":")[0] not in ("*more", "**unknown")]
    is_bound = isinstance(checked.target, type) or (
        checked.owner is not None and not isinstance(checked.target, staticmethod)
    )
    return names[1:] if is_bound else names


def raises_input_error(function: Callable[..., Any]) -> bool:
    """Whether the body has a ``raise InputError(...)``."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(
        isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) == "InputError"
        for node in ast.walk(tree)
    )


def missing(checked: Documented) -> list[str]:
    """What the docstring lacks."""
    text, found = checked.text, []
    if not text.partition("\n")[0].endswith("."):
        found.append("a first line that ends with a period")
    named = sections(text)
    is_class, is_property = isinstance(checked.target, type), isinstance(checked.target, property)
    described = (
        named.get("Args", "")
        + named.get("Attributes", "")
        + sections(inspect.getdoc(checked.owner) or "").get("Args", "")
    )
    if not is_property:
        unnamed = [name for name in parameters(checked) if not re.search(rf"\b{name}\b", described)]
        found += [f"Args: {name}" for name in unnamed]
    if not is_class and not is_property:
        returned = inspect.signature(checked.function).return_annotation
        if returned not in (None, "None", "NoReturn", "Never", inspect.Signature.empty) and "Returns" not in named:
            found.append("Returns:")
    if checked.owner is None and ">>>" not in text:
        found.append("an example (>>>)")
    body = checked.target.__init__ if is_class else checked.function
    if (
        isinstance(body, FunctionType)
        and not _is_generated(body)
        and raises_input_error(body)
        and "Raises" not in named
    ):
        found.append("Raises:")
    return found


def _is_generated(function: FunctionType) -> bool:
    """Whether a dataclass generated the function, which then has no source."""
    return inspect.unwrap(function).__code__.co_filename.startswith("<")


def _public_objects_once() -> dict[str, Documented]:
    """All public objects by name; an object that several modules export has its first name."""
    found: dict[int, Documented] = {}
    for module in MODULES:
        for checked in public_objects(importlib.import_module(module)):
            found.setdefault(id(checked.target), checked)
    return {checked.name: checked for checked in found.values()}


PUBLIC = _public_objects_once()


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_docstring_is_complete(name: str) -> None:
    assert not missing(PUBLIC[name])


def test_the_reference_lists_every_public_function_and_class() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md")))
    names = [name.rsplit(".", 1)[1] for name, checked in PUBLIC.items() if checked.owner is None]
    assert not [name for name in names if not re.search(rf"\b{name}\b", pages)]


def test_an_incomplete_docstring_is_found() -> None:
    def incomplete(a: int, b: int) -> int:
        """A sum

        Args:
            a: a number.
        """
        if a < 0:
            raise InputError("a", "be at least 0", a)
        return a + b

    from undivided import InputError

    wrong = ["a first line that ends with a period", "Args: b", "Returns:", "an example (>>>)", "Raises:"]
    assert missing(Documented("incomplete", incomplete)) == wrong
