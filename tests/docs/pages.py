"""The pages, and what is in their fences."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


class Block(NamedTuple):
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str


def blocks(*languages: str) -> Iterator[Block]:
    """Every block of these languages, of all pages; of every one if none is named."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
            if not languages or match[2] in languages:
                line = text.count("\n", 0, match.start()) + 1
                yield Block(page.name, line, match[2], match[3])


def commands() -> list[tuple[Block, list[str]]]:
    """Every command line of every block of shell, as words: comments and continued lines as a shell takes them."""
    return [
        (block, words)
        for block in blocks("sh")
        for line in re.sub(r"\\\n\s*", " ", block.text).splitlines()
        if (words := shlex.split(line, comments=True))
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
