"""The examples as a user runs them, on this machine's CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from examples.vllm_demo.tiny_model import Models
from tests.sglang.serving import CPU, KERNELS, SETTINGS, arguments

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    env |= {**CPU, "PYTHONPATH": f"{ROOT}{os.pathsep}{KERNELS}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=700, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    print(done.stdout)
    return done.stdout


def test_the_server(models: Models) -> None:
    said = run("examples.sglang", str(models.target), "--", *arguments())
    assert "specdec.generations" in said
    assert "acceptance_length" in said
    lines = dict(line.split(maxsplit=1) for line in said.splitlines() if line.startswith(("specdec.", "acc", "tok")))
    assert lines["specdec.generations"] == "8"
    assert lines["specdec.completion_tokens"] == str(8 * 64)
    assert 1 <= float(lines["acceptance_length"]) <= 4
    assert lines["accept_rate"] == "not known here"


def test_the_offline_engine(models: Models) -> None:
    settings = [f"{name}={'true' if value is True else value}" for name, value in SETTINGS.items()]
    said = run("examples.sglang.offline", str(models.target), *settings)
    assert "generations=3" in said
    assert "'acceptance_length'" in said
