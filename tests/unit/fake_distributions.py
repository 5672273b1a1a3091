"""Folders for the import path: with distributions that are metadata alone, and with some of the real ones alone."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from tests.unit.scripts import ROOT


def install(folder: Path, name: str, version: str = "1.0", *, entry_points: str = "") -> None:
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(entry_points)


def install_only(folder: Path, *names: str) -> None:
    """Real distributions of this environment, with what they require, as links in an otherwise empty folder.

    For a Python that looks nowhere else: `python -S` with this folder as PYTHONPATH. Our own package is there always.
    """
    todo, seen = ["otel-specdec", *names], set[str]()
    while todo:
        name = re.split(r"[^\w.-]", todo.pop())[0].lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        try:
            found = distribution(name)
        except PackageNotFoundError:  # for another Python than this one
            continue
        todo += [each for each in found.requires or () if "extra ==" not in each]
        for file in found.files or ():
            if ".." not in file.parts and "__pycache__" not in file.parts and file.suffix != ".pth":
                link = folder / file
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(Path(str(found.locate_file(file))).absolute())
    (folder / "otel_specdec").symlink_to(ROOT / "otel_specdec")
