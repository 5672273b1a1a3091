"""An engine in a Ray actor: Ray starts and ends processes in ways of its own, and vLLM's plugin is what reaches them.

A real Ray on this machine, vLLM's scheduler as the stand-in, a real OTLP export.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.unit import vllm_stand_in
from tests.unit.otlp_backend import Backend
from tests.unit.test_provider import eventually

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else it keeps a token in the home folder
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Backend()
    vllm_stand_in.write(tmp_path / "path")
    # What a user's environment says: metrics are asked for, and nobody has instrumented the process.
    variables = {
        "OTEL_METRICS_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{made.port}",
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "path"), str(ROOT)]),
    }
    sessions = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets lie in it, whose names may have 107 characters
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        runtime_env={"env_vars": variables},
        _temp_dir=sessions,
    )
    yield made
    ray.shutdown()
    made.stop()
    shutil.rmtree(sessions, ignore_errors=True)


class Engine:
    """What vLLM does in an actor of its own: load the plugins, make a scheduler, step."""

    def __init__(self) -> None:
        from otel_specdec.instrumentors import vllm_plugin

        vllm_plugin()
        self.steps = vllm_stand_in.Steps(importlib.import_module(vllm_stand_in.MODULE))

    def serve(self, name: str) -> int:
        """A generation with 4 accepted tokens; the process that it ran in."""
        self.steps.add(name, limit=6)
        for lengths in ((0, 1), (4, 5)):
            step: dict[str, Any] = {name: lengths}
            self.steps.step(**step)
        return os.getpid()


def accepted(backend: Backend) -> int:
    return backend.last.get("specdec.accepted_tokens", 0)


def started(backend: Backend) -> Any:
    """An actor that has served one generation, of which the backend heard when it became idle."""
    actor = ray.remote(Engine).options(num_cpus=0).remote()
    assert ray.get(actor.serve.remote("a"), timeout=120) != os.getpid()
    assert eventually(lambda: accepted(backend) == 4, 20), backend.last
    return actor


@pytest.mark.parametrize(
    ("end", "kept"),
    [("killed", 4), ("ended in an orderly way", 8)],
)
def test_an_actor_s_engine_loses_at_most_what_came_after_its_last_idle_moment(
    backend: Backend, end: str, kept: int
) -> None:
    actor = started(backend)
    ray.get(actor.serve.remote("b"), timeout=60)
    if end == "killed":
        ray.kill(actor)
        time.sleep(2)
    else:
        actor.__ray_terminate__.remote()
        eventually(lambda: accepted(backend) == 8, 20)
    assert accepted(backend) == kept
