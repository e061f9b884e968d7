"""Hooks of the documentation site (`mkdocs.yml`).

Pages are also read on GitHub, so they link to files outside of ``docs/`` by relative paths. Here each such file becomes
a part of the site: Markdown and code become pages below ``project/``, everything else is copied.
Pictures are put into the page itself, so that their colours follow the theme that the reader has chosen.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = ("DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Pages outside of docs/ that stand in the navigation."""
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
MERMAID = re.compile(r"^```mermaid\n.*?^```$", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r'<img alt="([^"]*)" src="[^"]*pictures/([\w-]+)\.svg"[^>]*>')
LANGUAGES = {".py": "python", ".h": "cpp", ".cc": "cpp", ".sh": "bash", "": "bash"}

_origin: dict[str, str] = {}
"""Path in the repository by path in the site, for the files outside of docs/."""


def _in_repository(uri: str) -> str:
    return _origin.get(uri, f"docs/{uri}")


def _in_site(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if Path(path).suffix in LANGUAGES:
        return f"project/{path}.md"
    return f"project/{path}"


def _targets(path: str, text: str) -> set[str]:
    """The files outside of docs/ to which a page links."""
    links = (posixpath.normpath(posixpath.join(posixpath.dirname(path), link[1])) for link in LINK.finditer(text))
    return {link for link in links if not link.startswith(("docs", "..")) and (ROOT / link).is_file()}


def _content(path: str) -> str | bytes:
    language = LANGUAGES.get(Path(path).suffix)
    if path.endswith(".md"):
        return (ROOT / path).read_text(encoding="utf-8")
    if language is not None:
        return f"# {path}\n\n````{language}\n{(ROOT / path).read_text(encoding='utf-8')}````\n"
    return (ROOT / path).read_bytes()


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside of docs/ that a page needs."""
    pages = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    waiting = set(ALWAYS).union(*(_targets(path, text) for path, text in pages))
    while waiting:
        path = waiting.pop()
        uri = _in_site(path)
        if uri in _origin and files.get_file_from_path(uri) is not None:
            continue
        _origin[uri] = path
        content = _content(path)
        level = InclusionLevel.INCLUDED if path in ALWAYS else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, uri, content=content, inclusion=level))
        if path.endswith(".md"):
            waiting |= _targets(path, str(content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to the site instead of the repository; the flow as a picture: Mermaid would come from a CDN."""
    here = page.file.src_uri
    folder = posixpath.dirname(_in_repository(here))

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[1]))
        if here in _origin or not path.startswith("docs/"):
            if (ROOT / path).is_dir():
                path = f"{path}/README.md"
            if (ROOT / path).is_file():
                return posixpath.relpath(_in_site(path), posixpath.dirname(here) or ".") + (match[2] or "")
        return match[0]

    flow = posixpath.relpath("pictures/flow.svg", posixpath.dirname(here) or ".")
    markdown = MERMAID.sub(f"![The flow of a call]({flow})", markdown)
    if here == "reference/hugging-face.md":  # messages such as `found['x']` would become references
        markdown = markdown.replace("['", r"\['")
    parts, last = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(link, markdown[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, LINK.sub(link, markdown[last:])])


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Pictures in the page itself, without their own colours: the style sheet of the site has them for both themes."""

    def inline(match: re.Match[str]) -> str:
        svg = (ROOT / "docs" / "pictures" / f"{match[2]}.svg").read_text(encoding="utf-8")
        svg = re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<style id=\"theme\">.*?</style>", "", svg, flags=re.DOTALL)
        svg = svg.replace("<svg ", f'<svg role="img" aria-label="{match[1]}" ', 1)
        # narrow screens scroll a picture instead of making its text too small; a focus lets the keyboard scroll it
        return f'<div class="picture" role="group" aria-label="{match[1]}" tabindex="0">{svg.strip()}</div>'

    return IMAGE.sub(inline, html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """A name for the search dialog, which the theme leaves without one."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )
