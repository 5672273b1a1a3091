"""Fixtures: rule files of this checkout, and an OTLP receiver in the place of a backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from collector.mixin import recording
from examples.vllm_demo.otlp_receiver import OtlpReceiver
from tests.collector.processes import COLLECTOR

RULES = COLLECTOR / "prometheus" / "rules"


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver(grpc=False) as backend:
        yield backend


@pytest.fixture
def short_exact_rules(tmp_path: Path) -> Path:
    """The exact rules with windows of 5 s instead of a minute, 8 s late instead of 30; nothing else differs."""
    path = tmp_path / "exact.rules.yml"
    path.write_text(recording.exact_file("5s", "8s"))
    return path
