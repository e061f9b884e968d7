"""``undivided init-example``: copies an example to the current folder."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from undivided.cli._terminal import console, print_json, print_table, table
from undivided.errors import InputError, did_you_mean

PACKAGE = Path(__file__).resolve().parents[2]
FOLDERS = (PACKAGE / "examples", PACKAGE.parent.parent / "examples")
"""The examples of an installed wheel, and those of a checkout."""


def init_example(
    name: Annotated[
        str | None, typer.Argument(help="Name of the example, with or without its number. Default: list them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Copy an example to the current folder, ready to run. Existing files are never overwritten."""
    paths = examples()
    if name is None:
        _show(paths, as_json)
        return
    path = _find(name, paths)
    target = Path(path.name)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(path.read_text(encoding="utf-8"))
    except FileExistsError:
        raise InputError(
            "init-example", "not overwrite a file", f"{target} exists here", hint=f"rename or remove {target} first"
        ) from None
    if as_json:
        print_json({"file": str(target), "run": f"python {target}"})
    else:
        console().print(f"written {target}; run it: python {target}", markup=False, soft_wrap=True)


def examples() -> dict[str, Path]:
    """The examples by name, such as "01_packed_documents".

    Raises:
        InputError: the installation has none.
    """
    for folder in FOLDERS:
        if paths := {path.stem: path for path in sorted(folder.glob("[0-9]*.py"))}:
            return paths
    hint = "pip install . in a checkout, whose folder examples/ has them too"
    raise InputError("init-example", "find the examples of the package", f"none in {FOLDERS[0]}", hint)


def _find(name: str, paths: dict[str, Path]) -> Path:
    requested = name.removesuffix(".py")
    matches = [path for stem, path in paths.items() if requested in (stem, re.sub(r"^\d+_", "", stem))]
    if not matches:
        near = did_you_mean(name, [re.sub(r"^\d+_", "", stem) for stem in paths])
        raise InputError("NAME", "be the name of an example", repr(name), near or "undivided init-example lists them")
    return matches[0]


def _show(paths: dict[str, Path], as_json: bool) -> None:
    titles = {name: _title(path) for name, path in paths.items()}
    if as_json:
        print_json(titles)
        return
    rows = table("name", "example")
    for name, title in titles.items():
        rows.add_row(Text(name), Text(title))
    screen = console()
    print_table(screen, rows, after=1, indent=0)
    screen.print("Copy one: undivided init-example NAME", markup=False, soft_wrap=True)


def _title(path: Path) -> str:
    """The first line of an example's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
