from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from otel_specdec import provider as provider_module
from otel_specdec.provider import (
    Flusher,
    instrumentation_disabled,
    metrics_asked_for,
    provider_from_environment,
)
from tests.unit.fake_distributions import install
from tests.unit.scripts import run

ENDPOINT = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
LOCAL = "http://127.0.0.1:9/v1/metrics"


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, False),
        ({"OTEL_METRICS_EXPORTER": ""}, False),
        ({"OTEL_METRICS_EXPORTER": "  ,"}, False),
        ({"OTEL_METRICS_EXPORTER": "none"}, False),
        ({"OTEL_METRICS_EXPORTER": " None "}, False),
        ({"OTEL_METRICS_EXPORTER": "none", ENDPOINT: LOCAL}, False),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, True),
        ({"OTEL_METRICS_EXPORTER": "console"}, True),
        ({"OTEL_METRICS_EXPORTER": "otlp,console"}, True),
        ({"OTEL_METRICS_EXPORTER": "something-unknown"}, True),
        ({ENDPOINT: LOCAL}, True),
        ({ENDPOINT: " "}, False),
        ({"OTEL_METRICS_EXPORTER": "", ENDPOINT: LOCAL}, True),
        # Traces alone, or an endpoint for every signal, ask for no metrics.
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": LOCAL}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_METRICS_EXPORTER": "otlp"}, False),
        ({"OTEL_SDK_DISABLED": " TRUE ", ENDPOINT: LOCAL}, False),
        ({"OTEL_SDK_DISABLED": "false", "OTEL_METRICS_EXPORTER": "otlp"}, True),
        ({"OTEL_SDK_DISABLED": "1", "OTEL_METRICS_EXPORTER": "otlp"}, True),  # only `true` disables, says OpenTelemetry
    ],
)
def test_metrics_are_asked_for_by_an_exporter_or_a_metrics_endpoint(environ: dict[str, str], asked: bool) -> None:
    assert metrics_asked_for(environ) is asked


@pytest.mark.parametrize(
    ("value", "disabled"),
    [
        (None, False),
        ("", False),
        ("specdec_vllm", True),
        ("requests, specdec_vllm ,flask", True),
        ("*", True),
        ("requests,*", True),
        ("vllm", False),  # another package's name
        ("specdec_sglang", False),
        ("specdec_vllm_else", False),
        ("specdec*", False),
    ],
)
def test_an_instrumentation_is_disabled_by_its_own_name_or_by_all(value: str | None, disabled: bool) -> None:
    environ = {} if value is None else {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": value}
    assert instrumentation_disabled("specdec_vllm", environ) is disabled


@pytest.fixture
def exporters(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The exporters of which a periodic reader was made; there is no thread behind it, so nothing is exported."""
    made: list[Any] = []

    class Reader(InMemoryMetricReader):
        def __init__(self, exporter: Any) -> None:
            super().__init__()
            made.append(exporter)

    monkeypatch.setattr("opentelemetry.sdk.metrics.export.PeriodicExportingMetricReader", Reader)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")  # read by the exporters themselves
    return made


GRPC = "opentelemetry.exporter.otlp.proto.grpc"
HTTP = "opentelemetry.exporter.otlp.proto.http"
CONSOLE = "opentelemetry.sdk.metrics"


@pytest.mark.parametrize(
    ("environ", "modules"),
    [
        ({"OTEL_METRICS_EXPORTER": "console"}, [CONSOLE]),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, [GRPC]),
        ({ENDPOINT: LOCAL}, [GRPC]),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, [GRPC]),
        ({"OTEL_METRICS_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, [HTTP]),
        ({ENDPOINT: LOCAL, "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf"}, [HTTP]),
        (
            {
                "OTEL_METRICS_EXPORTER": "otlp",
                "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            },
            [GRPC],
        ),
        ({"OTEL_METRICS_EXPORTER": "otlp_proto_http"}, [HTTP]),
        ({"OTEL_METRICS_EXPORTER": " console , none, otlp "}, [CONSOLE, GRPC]),
    ],
)
def test_a_provider_is_made_as_the_environment_says(
    environ: dict[str, str], modules: list[str], exporters: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    made = provider_from_environment(environ)
    assert isinstance(made, MeterProvider)
    made.shutdown()
    assert len(exporters) == len(modules)
    for exporter, module in zip(exporters, modules, strict=True):
        assert type(exporter).__module__.startswith(module)
    assert caplog.records == []


def test_only_where_grpc_is_not_installed_http_is_the_default(
    exporters: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_grpc(**which: Any) -> Any:
        found: Any = entry_points(**which)
        return [point for point in found if point.name != "otlp_proto_grpc"]

    monkeypatch.setattr(provider_module, "entry_points", without_grpc)
    made = provider_from_environment({"OTEL_METRICS_EXPORTER": "otlp"})
    assert isinstance(made, MeterProvider)
    made.shutdown()
    assert type(exporters[0]).__module__.startswith(HTTP)


def test_a_provider_of_our_own_is_never_the_global_one(exporters: list[Any]) -> None:
    made = provider_from_environment({"OTEL_METRICS_EXPORTER": "console"})
    assert isinstance(made, MeterProvider)
    made.shutdown()
    assert metrics.get_meter_provider() is not made


@pytest.mark.parametrize("name", ["unknown", "zipkin"])
def test_an_unknown_exporter_gives_one_warning_and_no_provider(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert provider_from_environment({"OTEL_METRICS_EXPORTER": name}) is None
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert name in line.getMessage()
    assert "OTEL_METRICS_EXPORTER" in line.getMessage()
    assert not line.exc_info


def test_one_exporter_that_cannot_be_made_leaves_the_others(
    exporters: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    made = provider_from_environment({"OTEL_METRICS_EXPORTER": "unknown,console"})
    assert isinstance(made, MeterProvider)
    made.shutdown()
    assert len(exporters) == len(caplog.records) == 1


def test_any_exporter_or_reader_with_an_entry_point_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exporters: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    install(
        tmp_path,
        "some-exporters",
        entry_points="[opentelemetry_metrics_exporter]\npull=some_exporters:Pull\nbroken=some_exporters:broken\n",
    )
    (tmp_path / "some_exporters.py").write_text(
        "from opentelemetry.sdk.metrics.export import InMemoryMetricReader\n"
        "class Pull(InMemoryMetricReader): pass\n"
        "def broken(): raise OSError('port is taken')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_exporters", raising=False)
    made = provider_from_environment({"OTEL_METRICS_EXPORTER": "pull"})
    assert isinstance(made, MeterProvider)
    assert exporters == []  # the reader itself, not a periodic one around it
    made.shutdown()
    assert provider_from_environment({"OTEL_METRICS_EXPORTER": "broken"}) is None
    (line,) = caplog.messages
    assert "port is taken" in line


# Flushes


class Provider:
    """Notes its flushes; each lasts until it is released."""

    def __init__(self, *, blocking: bool = False, error: Exception | None = None) -> None:
        self.flushes: list[tuple[float, str, float]] = []
        self.flushing = threading.Event()
        self.released = threading.Event()
        self.error = error
        if not blocking:
            self.released.set()

    def force_flush(self, timeout_millis: float = 0) -> bool:
        self.flushes.append((time.monotonic(), threading.current_thread().name, timeout_millis))
        self.flushing.set()
        self.released.wait(30)
        if self.error is not None:
            raise self.error
        return True


def eventually(holds: Callable[[], bool], limit: float = 10) -> bool:
    end = time.monotonic() + limit
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


@pytest.fixture
def idle_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_module, "IDLE_SECONDS", 0.02)


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.released.set()


def flusher(provider: Any, *, when_idle: bool = True) -> Flusher:
    return Flusher(provider, when_idle=when_idle)


def test_births_are_flushed_at_once_off_the_caller_s_thread(provider: Provider) -> None:
    flusher(provider).watch(lambda: False)
    assert provider.flushing.wait(5)
    ((_, thread, timeout),) = provider.flushes
    assert thread != threading.current_thread().name
    assert 0 < timeout <= 5_000


def test_an_idle_engine_is_flushed_within_about_a_second(provider: Provider) -> None:
    made = flusher(provider)
    made.watch(lambda: True)
    assert eventually(lambda: len(provider.flushes) == 1)
    time.sleep(0.05)
    idle_at = time.monotonic()
    made.idle()
    assert eventually(lambda: len(provider.flushes) == 2)
    assert provider.flushes[1][0] - idle_at < 1.5
    assert provider.flushes[1][1] != threading.current_thread().name


@pytest.mark.usefixtures("idle_soon")
def test_an_engine_that_went_on_working_is_not_flushed(provider: Provider) -> None:
    busy, made = threading.Event(), flusher(provider)
    made.watch(lambda: not busy.is_set())
    assert eventually(lambda: len(provider.flushes) == 1)
    busy.set()
    for _ in range(3):
        made.idle()
        time.sleep(0.03)
    assert len(provider.flushes) == 1
    busy.clear()
    made.idle()
    assert eventually(lambda: len(provider.flushes) == 2)


@pytest.mark.usefixtures("idle_soon")
def test_one_busy_engine_of_several_keeps_the_others_waiting() -> None:
    provider, busy = Provider(blocking=True), threading.Event()
    made = flusher(provider)
    busy.set()
    made.watch(lambda: True)
    assert provider.flushing.wait(5)
    made.watch(lambda: not busy.is_set())
    provider.released.set()
    assert eventually(lambda: len(provider.flushes) == 2)  # each has had the flush of its births
    time.sleep(0.05)
    made.idle()
    time.sleep(0.1)
    assert len(provider.flushes) == 2
    busy.clear()
    made.idle()
    assert eventually(lambda: len(provider.flushes) == 3)


@pytest.mark.usefixtures("idle_soon")
def test_a_flush_that_blocks_blocks_nobody_else() -> None:
    provider = Provider(blocking=True)
    made = flusher(provider)
    try:
        made.watch(lambda: True)
        assert provider.flushing.wait(5)
        start = time.monotonic()
        for _ in range(1_000):
            made.idle()
            made.watch(lambda: True)
        assert time.monotonic() - start < 1
        assert len(provider.flushes) == 1
    finally:
        provider.released.set()


@pytest.mark.usefixtures("idle_soon")
def test_what_became_idle_during_a_flush_is_flushed_after_it() -> None:
    provider = Provider(blocking=True)
    made = flusher(provider)
    made.watch(lambda: True)
    assert provider.flushing.wait(5)
    made.idle()
    provider.released.set()
    assert eventually(lambda: len(provider.flushes) >= 2)


@pytest.mark.usefixtures("idle_soon")
def test_a_flush_that_fails_does_not_end_the_flushing(caplog: pytest.LogCaptureFixture) -> None:
    provider = Provider(error=ConnectionError("no collector"))
    made = flusher(provider)
    made.watch(lambda: True)
    assert eventually(lambda: len(provider.flushes) == 1)
    time.sleep(0.05)
    made.idle()
    assert eventually(lambda: len(provider.flushes) == 2)
    assert caplog.records == []


@pytest.mark.usefixtures("idle_soon")
def test_an_engine_that_cannot_say_whether_it_is_idle_does_not_end_the_flushing(provider: Provider) -> None:
    made, asked = flusher(provider), threading.Event()

    def broken() -> bool:
        asked.set()
        raise RuntimeError("no such engine")

    made.watch(broken)
    assert provider.flushing.wait(5)
    time.sleep(0.05)
    made.idle()
    assert asked.wait(5)
    time.sleep(0.05)
    before = len(provider.flushes)
    made.watch(lambda: True)
    assert eventually(lambda: len(provider.flushes) > before)


@pytest.mark.usefixtures("idle_soon")
def test_a_provider_that_is_not_ours_is_not_flushed_at_birth_or_when_idle(provider: Provider) -> None:
    threads = threading.active_count()
    made = flusher(provider, when_idle=False)
    made.watch(lambda: True)
    made.idle()
    assert threading.active_count() == threads
    time.sleep(0.1)
    assert provider.flushes == []


def test_a_provider_without_flush_is_left_alone() -> None:
    flusher(object(), when_idle=False).at_exit()


def test_the_last_flush_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_module, "FLUSH_MILLIS", 50)
    provider = Provider(blocking=True)
    start = time.monotonic()
    flusher(provider, when_idle=False).at_exit()
    assert time.monotonic() - start < 2
    assert [timeout for _, _, timeout in provider.flushes] == [50]
    provider.released.set()


def test_the_last_flush_is_waited_for() -> None:
    provider = Provider()
    flusher(provider, when_idle=False).at_exit()
    assert len(provider.flushes) == 1


CHILD = """
import json, logging, multiprocessing, os, time
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, PeriodicExportingMetricReader
from otel_specdec import provider as ours
from otel_specdec.instrumentors import EngineCounters
from tests.unit.collected import points, totals
from tests.unit.engine_stand_in import HandTally, description

class Exporter(MetricExporter):
    def export(self, data, timeout_millis=10_000, **kwargs):
        print(json.dumps([os.getpid() == parent, totals(points(data)).get("accepted", 0)]), flush=True)
        return MetricExportResult.SUCCESS
    def force_flush(self, timeout_millis=10_000):
        return True
    def shutdown(self, timeout_millis=30_000, **kwargs):
        pass

parent = os.getpid()
provider = MeterProvider([PeriodicExportingMetricReader(Exporter())], shutdown_on_exit=False)

def serve():
    tally = HandTally()
    EngineCounters(provider, logging.getLogger("test")).engine_started(description(), tally, lambda: True)
    tally.put(7)

def child():
    serve()
    raise SystemExit(3)
"""


def test_a_forked_child_flushes_at_its_end_an_application_s_provider_too() -> None:
    ended = run(
        CHILD
        + """
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(30)
assert process.exitcode == 3
"""
    )
    assert ended.output == "[false, 7]\n"


def test_a_process_that_nobody_forked_is_flushed_by_its_own_provider_only() -> None:
    assert run(CHILD + "serve()").output == ""


def test_a_forked_child_with_a_stuck_exporter_ends_all_the_same() -> None:
    ended = run(
        CHILD
        + """
ours.FLUSH_MILLIS = 100
Exporter.export = lambda self, data, **kwargs: time.sleep(30)
process = multiprocessing.get_context("fork").Process(target=child)
start = time.monotonic()
process.start()
process.join(20)
print(json.dumps([process.exitcode, time.monotonic() - start < 10]))
"""
    )
    assert ended.value == [3, True]
