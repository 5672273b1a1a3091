"""Backends that are not there, slow, or refuse: the engine's thread never waits, nothing grows, and totals come right.

The real OTLP exporter and SDK, a real socket, and the scheduler of the stand-in. That no step waits is shown by order,
not by a clock: all steps are done while the backend still holds its answer back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from otel_specdec import VLLMSpecDecInstrumentor
from otel_specdec.sums import pool_for
from tests.unit.collected import points, totals
from tests.unit.otlp_backend import Backend
from tests.unit.test_provider import eventually
from tests.unit.vllm_stand_in import Steps, importable, write

STEPS = 2_000


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[ModuleType]:
    write(tmp_path)
    with importable(tmp_path) as load:
        yield load()


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = Backend()
    yield made
    made.stop()


def exporting_to(exporter: MetricExporter) -> MeterProvider:
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=100, export_timeout_millis=500)
    return MeterProvider([reader], Resource({}), shutdown_on_exit=False)


def otlp(port: int, host: str = "127.0.0.1") -> MetricExporter:
    return OTLPMetricExporter(endpoint=f"http://{host}:{port}/v1/metrics", timeout=1)


def work(vllm: ModuleType, number: int = STEPS) -> dict[str, int]:
    """Steps of one request, on this thread; what they must count."""
    steps = Steps(vllm)
    steps.add("a", limit=10 * number)
    for _ in range(number):
        assert steps.step(a=(4, 3)) is steps.scheduler.returned
    return {"specdec.accepted_tokens": 2 * number, "specdec.completion_tokens": 3 * number}


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "otel_specdec" in record.name]


@pytest.mark.parametrize("mode", ["slow", "busy", "refuse", "broken", "hangs up"])
def test_a_bad_backend_holds_up_no_step_and_has_all_of_it_when_it_is_good_again(
    vllm: ModuleType,
    backend: Backend,
    instrumentor: VLLMSpecDecInstrumentor,
    caplog: pytest.LogCaptureFixture,
    mode: str,
) -> None:
    backend.mode = mode
    provider = exporting_to(otlp(backend.port))
    instrumentor.instrument(meter_provider=provider)
    try:
        first = work(vllm, 10)
        assert backend.asked.wait(20)
        second = work(vllm)
        assert backend.last == {}  # so all steps were done while it still had given no good answer
        pool = pool_for(provider)
        series = sum(map(len, pool._born.values()))
        third = work(vllm)
        assert sum(map(len, pool._born.values())) == series  # nothing is kept for later but sums
        assert len(pool._pending) <= series
        backend.mode = "ok"
        backend.answer.set()
        expected = {name: first[name] + second[name] + third[name] for name in first}
        assert eventually(lambda: expected.items() <= backend.last.items(), 30), backend.last
        assert ours(caplog) == []
    finally:
        backend.answer.set()
        provider.shutdown(timeout_millis=2_000)


def test_a_backend_that_comes_late_goes_away_and_comes_back_has_all_of_it(
    vllm: ModuleType, instrumentor: VLLMSpecDecInstrumentor, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Backend()
    backend.stop()
    provider = exporting_to(otlp(backend.port))
    instrumentor.instrument(meter_provider=provider)
    try:
        done = work(vllm)
        late = Backend(backend.port)
        assert eventually(lambda: done.items() <= late.last.items(), 30), late.last
        late.stop()
        more = work(vllm)
        back = Backend(backend.port)
        expected = {name: done[name] + more[name] for name in done}
        assert eventually(lambda: expected.items() <= back.last.items(), 30), back.last
        back.stop()
        assert ours(caplog) == []
    finally:
        provider.shutdown(timeout_millis=2_000)


def test_a_name_that_cannot_be_resolved_holds_up_no_step(
    vllm: ModuleType,
    instrumentor: VLLMSpecDecInstrumentor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked, answer = threading.Event(), threading.Event()

    def resolve(*args: Any, **kwargs: Any) -> Any:
        asked.set()
        answer.wait(30)
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    provider = exporting_to(otlp(4318, "collector.invalid"))
    instrumentor.instrument(meter_provider=provider)
    try:
        work(vllm, 10)
        assert asked.wait(20)
        work(vllm)
        assert not answer.is_set()
        assert ours(caplog) == []
    finally:
        answer.set()
        provider.shutdown(timeout_millis=2_000)


class Raising(MetricExporter):
    """Raises until it is told to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.bad = True
        self.asked = threading.Event()
        self.last: dict[str, int] = {}

    def export(self, metrics_data: Any, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        self.asked.set()
        if self.bad:
            raise RuntimeError("this exporter is broken")
        self.last = totals(points(metrics_data))
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None: ...


def test_an_exporter_that_raises_reaches_no_step_and_gets_all_of_it_when_it_works_again(
    vllm: ModuleType, instrumentor: VLLMSpecDecInstrumentor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "opentelemetry.sdk")
    exporter = Raising()
    provider = exporting_to(exporter)
    instrumentor.instrument(meter_provider=provider)
    try:
        first = work(vllm)
        assert exporter.asked.wait(20)
        second = work(vllm)
        exporter.bad = False
        expected = first["specdec.accepted_tokens"] + second["specdec.accepted_tokens"]
        assert eventually(lambda: exporter.last.get("accepted") == expected, 20), exporter.last
        assert ours(caplog) == []
    finally:
        provider.shutdown(timeout_millis=2_000)
