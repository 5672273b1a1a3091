"""Python in a process of its own: for global providers, forks, and what an import brings along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Ended(NamedTuple):
    """A process that has ended well."""

    output: str
    log: str

    @property
    def value(self) -> Any:
        """The last line of the output, which is JSON."""
        return json.loads(self.output.splitlines()[-1])


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without what OpenTelemetry would read from it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "PYTHONPATH"))}
    return inherited | {"PYTHONPATH": str(ROOT)} | variables


def run(script: str, *, env: Mapping[str, str] | None = None, path: Path | None = None, limit: float = 60) -> Ended:
    """Runs `script` to its end, `path` first on its import path. Fails if it fails, or takes longer than `limit`."""
    variables = environment(**(env or {}))
    if path is not None:
        variables["PYTHONPATH"] = os.pathsep.join([str(path), variables["PYTHONPATH"]])
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert process.returncode == 0, f"exit status {process.returncode}\n{process.stdout}\n{process.stderr}"
    return Ended(process.stdout, process.stderr)
