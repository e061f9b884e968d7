"""The generated parts of the documentation: pictures, plots and tables. ``python scripts/site`` writes them.

``--check`` writes nothing, and lists those that differ from what the library generates now.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import svg

DOCS = Path(__file__).resolve().parents[2] / "docs"


def generated() -> Iterator[tuple[str, str]]:
    """(path below docs/, content) of every generated file."""
    import matrices
    import options
    import pictures
    import plots
    import roofline
    import speed

    readme = DOCS.parent / "README.md"
    yield "../README.md", speed.readme(readme.read_text(encoding="utf-8"))
    yield "stylesheets/pictures.css", svg.SHEET
    for name, picture in pictures.PICTURES.items():
        yield f"pictures/{name}.svg", str(picture())
    yield "reference/options.md", options.page()
    yield "reference/roofline.md", roofline.page()
    for name, text in {**plots.plots(), **roofline.pictures()}.items():
        yield f"pictures/{name}.svg", text
    for name, page in matrices.PAGES.items():
        path = DOCS / "reference" / f"{name}.md"
        yield f"reference/{name}.md", page(path.read_text(encoding="utf-8") if path.exists() else "")


def main(arguments: list[str]) -> int:
    """Write the files, or list the stale ones; 1 if there are any."""
    stale = []
    for name, content in generated():
        path = DOCS / name
        if path.exists() and path.read_text(encoding="utf-8") == content:
            continue
        stale.append(name)
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    if stale and "--check" in arguments:
        print("stale, run `scripts/docs --write`:", *(f"docs/{name}" for name in stale), sep="\n  ", file=sys.stderr)
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
