"""Distributions that are installed as far as their metadata goes, in a folder for the import path."""

from __future__ import annotations

from pathlib import Path


def install(folder: Path, name: str, version: str = "1.0", *, entry_points: str = "") -> None:
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(entry_points)
