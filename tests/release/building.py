"""`make dist` into a folder of its own, and Pythons to install the wheel with."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "otel_specdec"
UV = ROOT / "build" / "venvs" / "tools" / "bin" / "uv"


class Built(NamedTuple):
    """What was built, and what was said about it."""

    wheel: Path
    sdist: Path
    said: str


def environment(**more: str) -> dict[str, str]:
    """Without what would reach into a clean environment, or this process's make."""
    ours = ("OTEL_", "PYTHON", "MAKE", "MFLAGS", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {
        "UV_PYTHON_DOWNLOADS": "never",
        **more,
    }


def run(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, limit: float = 300) -> str:
    """Runs a command to its end and returns all that it says; fails if it fails."""
    done = subprocess.run(
        command, cwd=cwd, env=dict(env or environment()), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=limit, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def build(folder: Path) -> Built:
    """`make dist`, as whoever releases calls it."""
    # The Python that the environments were made with, or make would ask for one that may not be there.
    said = run("make", "--silent", f"PYTHON={sys._base_executable}", f"DIST={folder}", "dist")  # type: ignore[attr-defined]
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist, said)
