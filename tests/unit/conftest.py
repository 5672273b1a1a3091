"""What hooks and instrumentors leave in a process is taken back after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from otel_specdec import VLLMSpecDecInstrumentor, instrumentors
from otel_specdec.engines import vllm as adapter

OTEL_VARIABLES = (
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
    "OTEL_METRICS_EXEMPLAR_FILTER",
    "OTEL_METRICS_EXPORTER",
    "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_SDK_DISABLED",
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in OTEL_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def instrumentor(monkeypatch: pytest.MonkeyPatch) -> Iterator[VLLMSpecDecInstrumentor]:
    """The one instrumentor of this process, as if it had just started."""
    monkeypatch.setattr(instrumentors, "_private", [])
    monkeypatch.setattr(VLLMSpecDecInstrumentor, "_instance", None)
    monkeypatch.setattr(VLLMSpecDecInstrumentor, "_by_plugin", False)
    monkeypatch.setattr(adapter.Hooks, "_installed", None)
    monkeypatch.setattr(adapter.Hooks, "_awaiting_import", False)
    made = VLLMSpecDecInstrumentor()
    yield made
    if made.is_instrumented_by_opentelemetry:
        made.uninstrument()
