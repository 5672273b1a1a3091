"""The site builds with every warning an error and without a network, and asks for nothing from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest

import otel_specdec
from tests.docs.pages import ROOT

NO_NETWORK = """
import socket

def refuse(*arguments, **keywords):
    raise OSError("the site asked for the network")

socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = socket.gethostbyname = refuse
"""


def build(source: Path, to: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site of a checkout in a process that can reach nobody."""
    path.mkdir(exist_ok=True)
    (path / "sitecustomize.py").write_text(NO_NETWORK)
    mkdocs = Path(sys.executable).with_name("mkdocs")
    return subprocess.run(
        [str(mkdocs), "build", "--strict", "--site-dir", str(to)],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(path), "NO_MKDOCS_2_WARNING": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


class Found(HTMLParser):
    """What one page loads, what it links to, and the places in it that can be linked to."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value is not None}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif "src" in found:
            self.loads.append(found["src"])
        elif tag == "link" and "href" in found and found.get("rel") != "canonical":
            self.loads.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder / "site", folder / "path")
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Found]:
    pages = {}
    for path in site.rglob("*.html"):
        pages[path.relative_to(site).as_posix()] = found = Found()
        found.feed(path.read_text(encoding="utf-8"))
    return pages


def test_every_page_is_there(pages: dict[str, Found]) -> None:
    for source in (ROOT / "docs").glob("*.md"):
        name = "index.html" if source.stem == "index" else f"{source.stem}/index.html"
        assert name in pages


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[str, Found]) -> None:
    assert sum(len(page.loads) for page in pages.values()) > 50
    outside = {load for page in pages.values() for load in page.loads if urlsplit(load).netloc}
    assert outside == set()
    for style in site.rglob("*.css"):
        loaded = re.findall(r"(?:url\(|@import)\s*[\"']?(https?:)?//", style.read_text(encoding="utf-8"))
        assert loaded == [], style


def local(pages: dict[str, Found]) -> Iterator[tuple[str, str]]:
    for name, page in pages.items():
        if name != "404.html":  # its links are absolute: nobody knows where it will be shown
            yield from ((name, link) for link in page.links + page.loads if not urlsplit(link).scheme)


def test_every_link_and_anchor_leads_somewhere(site: Path, pages: dict[str, Found]) -> None:
    broken, checked = [], 0
    for name, link in local(pages):
        path, anchor = urldefrag(urljoin(f"http://site/{name}", link))
        target = unquote(urlsplit(path).path).lstrip("/")
        target = f"{target}index.html" if target.endswith("/") or not target else target
        checked += 1
        anchors = pages[target].anchors if target in pages else {anchor}
        if not (site / target).is_file() or (anchor and unquote(anchor) not in anchors):
            broken.append((name, link))
    assert broken == []
    assert checked > 500


def test_every_public_name_has_its_entry(pages: dict[str, Found]) -> None:
    names = {f"otel_specdec.{name}" for name in otel_specdec.__all__ if name != "__version__"}
    assert names <= pages["reference/index.html"].anchors


def test_a_page_of_the_source_holds_it(site: Path) -> None:
    text = (site / "source/tests/unit/recorded.py/index.html").read_text(encoding="utf-8")
    assert "DIFFERENT_SGLANG" in text


@pytest.mark.parametrize(
    ("page", "line", "says"),
    [
        ("index.md", "[x](nowhere.md)", "nowhere.md"),
        ("index.md", "[x](counters.md#nowhere)", "#nowhere"),
        ("index.md", "[x](/counters/)", "absolute"),
        ("index.md", "[x](../tests/nowhere.py)", "which is not there"),
        ("index.md", "![x](images/nowhere.png)", "images/nowhere.png"),
        ("reference.md", "::: otel_specdec.Nowhere", "otel_specdec.Nowhere"),
        ("lonely.md", "nobody leads here", "lonely.md"),
    ],
)
def test_a_mistake_ends_the_build(tmp_path: Path, page: str, line: str, says: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for each in ROOT.iterdir():
        if each.name not in ("build", "docs"):
            (source / each.name).symlink_to(each)
    shutil.copytree(ROOT / "docs", source / "docs")
    with (source / "docs" / page).open("a") as file:
        file.write(f"\n{line}\n")
    built = build(source, tmp_path / "site", tmp_path / "path")
    assert built.returncode != 0
    assert says in built.stdout + built.stderr
