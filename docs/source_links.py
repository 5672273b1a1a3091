"""A hook of mkdocs: what a page links to outside docs/ becomes a page of the site, as text.

Links such as `../tests/unit/recorded.py` work where the repository is read, and the site has to stand by itself,
without a server of somebody's to point at. A link to what is not there ends the build.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# The place in a text that a link may name besides is not a place of the page that shows it.
OUTWARD = re.compile(r"(?<=\]\()\.\./(?P<path>[^)#\s]+)(?:#[^)\s]*)?")
LANGUAGES = {".py": "python", ".md": "markdown", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each thing that is linked to."""
    linked = {path for file in files.documentation_pages() for path in _linked(file)}
    for path in sorted(linked):
        files.append(File.generated(config, f"source/{path}.md", content=_page(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page there."""
    if page.file.src_uri.startswith("source/"):
        return markdown
    return OUTWARD.sub(lambda match: f"source/{normpath(match['path'])}.md", markdown)


def _linked(file: File) -> Iterator[str]:
    for match in OUTWARD.finditer(file.content_string):
        if "/" in file.src_uri:
            raise PluginError(f"{file.src_uri}: only pages directly in docs/ may link outside it")
        if not (ROOT / match["path"]).exists():
            raise PluginError(f"{file.src_uri} links to ../{match['path']}, which is not there")
        yield normpath(match["path"])


def _page(path: str) -> str:
    place = ROOT / path
    if place.is_dir():
        text, language = "\n".join(sorted(each.name for each in place.iterdir() if each.name[0] not in "._")), "text"
    else:
        text, language = place.read_text(encoding="utf-8"), LANGUAGES.get(place.suffix, "text")
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text)), 3)
    return f"---\nsearch: {{exclude: true}}\n---\n# `{path}`\n\n{fence}{language}\n{text}\n{fence}\n"
