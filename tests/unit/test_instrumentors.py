"""Whether and where something is counted: vLLM's plugin, the instrumentor, the environment, the application."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from otel_specdec import VLLMSpecDecInstrumentor, instrumentors
from otel_specdec.instrumentors import vllm_plugin
from tests.unit.collected import Meter, points, totals
from tests.unit.scripts import run
from tests.unit.vllm_stand_in import Steps, importable, write

Import = Callable[[], ModuleType]


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[Import]:
    write(tmp_path)
    with importable(tmp_path) as load:
        yield load


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[InMemoryMetricReader]:
    """The readers that were made for exporters, with no exporter behind them."""
    made: list[InMemoryMetricReader] = []

    class Reader(InMemoryMetricReader):
        def __init__(self, exporter: object) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr("opentelemetry.sdk.metrics.export.PeriodicExportingMetricReader", Reader)
    return made


def one_step(module: ModuleType) -> Steps:
    steps = Steps(module)
    steps.add("a")
    steps.step(a=(4, 3))
    return steps


# The plugin


def test_the_plugin_does_nothing_unless_metrics_are_asked_for(
    vllm: Import, instrumentor: VLLMSpecDecInstrumentor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        vllm_plugin()
    assert not instrumentor.is_instrumented_by_opentelemetry
    assert caplog.records == []


@pytest.mark.parametrize(
    "environ",
    [{"OTEL_METRICS_EXPORTER": "console"}, {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:9"}],
)
def test_the_plugin_counts_into_a_provider_of_its_own_where_the_environment_asks(
    vllm: Import,
    instrumentor: VLLMSpecDecInstrumentor,
    monkeypatch: pytest.MonkeyPatch,
    readers: list[InMemoryMetricReader],
    environ: dict[str, str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    vllm_plugin()
    assert readers == []  # nothing is made before an engine with speculation is there
    steps = one_step(vllm())
    (reader,) = readers
    found = [point.value for point in points(reader.get_metrics_data()) if point.name == "specdec.accepted_tokens"]
    assert found == [2]
    assert steps


def test_the_plugin_makes_one_provider_for_all_engines(
    vllm: Import,
    instrumentor: VLLMSpecDecInstrumentor,
    monkeypatch: pytest.MonkeyPatch,
    readers: list[InMemoryMetricReader],
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    vllm_plugin()
    module = vllm()
    engines = [one_step(module) for _ in range(3)]
    (reader,) = readers
    assert totals(points(reader.get_metrics_data()))["accepted"] == 6
    assert engines


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_METRICS_EXPORTER": "none"},
        {"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:9"},
        {"OTEL_METRICS_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_METRICS_EXPORTER": "console", "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "specdec_vllm"},
        {"OTEL_METRICS_EXPORTER": "console", "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "requests, specdec_vllm"},
        {"OTEL_METRICS_EXPORTER": "console", "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "*"},
    ],
)
def test_the_plugin_can_be_disabled(
    vllm: Import, instrumentor: VLLMSpecDecInstrumentor, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    vllm_plugin()
    assert not instrumentor.is_instrumented_by_opentelemetry


def test_the_plugin_may_be_called_again_and_again(
    vllm: Import,
    instrumentor: VLLMSpecDecInstrumentor,
    monkeypatch: pytest.MonkeyPatch,
    readers: list[InMemoryMetricReader],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    for _ in range(3):
        vllm_plugin()
    steps = one_step(vllm())
    vllm_plugin()
    steps.step(a=(4, 3))
    (reader,) = readers
    assert totals(points(reader.get_metrics_data()))["accepted"] == 4
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_plugin_leaves_the_instrumentor_s_work_alone(
    vllm: Import, instrumentor: VLLMSpecDecInstrumentor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    meter = Meter()
    instrumentor.instrument(meter_provider=meter.provider)
    vllm_plugin()
    assert one_step(vllm())
    assert meter.totals()["accepted"] == 2


@pytest.mark.parametrize("at", ["before the import", "after the import", "after the engine was built"])
def test_an_explicit_instrument_takes_over_from_the_plugin(
    vllm: Import,
    instrumentor: VLLMSpecDecInstrumentor,
    monkeypatch: pytest.MonkeyPatch,
    readers: list[InMemoryMetricReader],
    caplog: pytest.LogCaptureFixture,
    at: str,
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    vllm_plugin()
    module = None if at == "before the import" else vllm()
    steps = one_step(module) if module and at == "after the engine was built" else None
    meter = Meter()
    instrumentor.instrument(meter_provider=meter.provider)
    counted_before = 2 if steps else 0
    steps = steps or one_step(module or vllm())
    steps.step(a=(4, 5))
    assert meter.totals()["accepted"] == 6 - counted_before
    assert [totals(points(reader.get_metrics_data()))["accepted"] for reader in readers] == [2] * bool(counted_before)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_second_explicit_instrument_does_not_take_over(
    vllm: Import, instrumentor: VLLMSpecDecInstrumentor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    vllm_plugin()
    first, second = Meter(), Meter()
    instrumentor.instrument(meter_provider=first.provider)
    instrumentor.instrument(meter_provider=second.provider)
    assert one_step(vllm())
    assert first.totals()["accepted"] == 2
    assert second.points() == []


def test_the_plugin_never_raises(
    instrumentor: VLLMSpecDecInstrumentor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> bool:
        raise RuntimeError("no environment")

    monkeypatch.setattr(instrumentors, "metrics_asked_for", fail)
    vllm_plugin()
    (line,) = caplog.records
    assert line.levelno == logging.WARNING


def test_an_exporter_that_cannot_be_made_leaves_vllm_alone_with_one_warning(
    vllm: Import,
    instrumentor: VLLMSpecDecInstrumentor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "unknown")
    vllm_plugin()
    module = vllm()
    for _ in range(2):
        assert one_step(module)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


# Which provider, and who flushes it


SCRIPT = """
import json, logging, sys, threading, time
from pathlib import Path
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, PeriodicExportingMetricReader
import otel_specdec.provider
from otel_specdec import VLLMSpecDecInstrumentor
from otel_specdec.instrumentors import vllm_plugin
from tests.unit.collected import points, totals
from tests.unit.vllm_stand_in import MODULE, Steps

otel_specdec.provider.IDLE_SECONDS = 0.05
exported = []
arrived = threading.Condition()

class Exporter(MetricExporter):
    def export(self, data, timeout_millis=10_000, **kwargs):
        with arrived:
            exported.append(totals(points(data)).get("accepted"))
            arrived.notify_all()
        return MetricExportResult.SUCCESS
    def force_flush(self, timeout_millis=10_000):
        return True
    def shutdown(self, timeout_millis=30_000, **kwargs):
        pass

class Provider(MeterProvider):
    flushed_by = []
    def force_flush(self, timeout_millis=10_000):
        self.flushed_by.append(threading.current_thread().name)
        return super().force_flush(timeout_millis)

provider = Provider([PeriodicExportingMetricReader(Exporter())], shutdown_on_exit=False)

def use():
    import importlib
    steps = Steps(importlib.import_module(MODULE))
    steps.add("a", limit=3)
    steps.step(a=(4, 3))
    return steps
"""


def value(tmp_path: Path, script: str, **variables: str) -> Any:
    write(tmp_path)
    return run(SCRIPT + script, env=variables, path=tmp_path).value


def test_under_opentelemetry_instrument_births_and_idle_engines_are_flushed_off_the_engine_s_thread(
    tmp_path: Path,
) -> None:
    exported, flushed_by = value(
        tmp_path,
        """
import opentelemetry.instrumentation.auto_instrumentation
metrics.set_meter_provider(provider)
VLLMSpecDecInstrumentor().instrument()
steps = use()
with arrived:
    arrived.wait_for(lambda: 2 in exported, 10)
print(json.dumps([exported, sorted(set(Provider.flushed_by))]))
""",
    )
    assert exported[-1] == 2
    assert flushed_by == ["otel-specdec-flush"]


def test_an_application_s_global_provider_is_never_flushed_by_us(tmp_path: Path) -> None:
    exported, flushed_by = value(
        tmp_path,
        """
VLLMSpecDecInstrumentor().instrument()
metrics.set_meter_provider(provider)  # an engine comes up later, and finds it
steps = use()
time.sleep(0.3)
before = list(exported)
provider.force_flush()
print(json.dumps([before + exported, Provider.flushed_by]))
""",
    )
    assert exported == [2]
    assert flushed_by == ["MainThread"]


def test_the_plugin_counts_into_the_provider_that_the_process_has(tmp_path: Path) -> None:
    exported = value(
        tmp_path,
        """
metrics.set_meter_provider(provider)
vllm_plugin()
steps = use()
provider.force_flush()
print(json.dumps(exported))
""",
    )
    assert exported == [2]


@pytest.mark.parametrize("asked", [True, False])
def test_an_explicit_instrument_asks_the_environment_only_where_there_is_no_provider(
    tmp_path: Path, asked: bool
) -> None:
    exported, line = value(
        tmp_path,
        """
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("vllm.otel_specdec").addHandler(handler)
logging.getLogger("vllm.otel_specdec").setLevel(logging.INFO)
metrics.set_meter_provider(provider)
VLLMSpecDecInstrumentor().instrument()
steps = use()
provider.force_flush()
(line,) = lines
print(json.dumps([exported, line]))
""",
        **({"OTEL_METRICS_EXPORTER": "console"} if asked else {}),
    )
    assert exported == [2]
    assert "the application's global MeterProvider" in line


def test_a_provider_of_our_own_exports_when_the_process_ends(tmp_path: Path) -> None:
    write(tmp_path)
    ended = run(
        SCRIPT.replace("\nprovider = ", "\n# ")
        + "vllm_plugin()\nsteps = use()\nsteps.add('b')\nsteps.step(b=(4, 5))\n",
        env={"OTEL_METRICS_EXPORTER": "console"},
        path=tmp_path,
    )
    decoder, text, last = json.JSONDecoder(), ended.output.strip(), None
    while text:
        last, end = decoder.raw_decode(text)
        text = text[end:].strip()
    assert last is not None
    values = {
        metric["name"]: sum(point["value"] for point in metric["data"]["data_points"])
        for metric in last["resource_metrics"][0]["scope_metrics"][0]["metrics"]
    }
    assert values["specdec.accepted_tokens"] == 2 + 4
    assert values["specdec.generations"] == 1


def test_a_given_provider_beats_the_environment(
    vllm: Import,
    instrumentor: VLLMSpecDecInstrumentor,
    monkeypatch: pytest.MonkeyPatch,
    readers: list[InMemoryMetricReader],
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    meter = Meter()
    instrumentor.instrument(meter_provider=meter.provider)
    assert one_step(vllm())
    assert readers == []
    assert meter.totals()["accepted"] == 2


def test_nothing_is_made_without_speculation(
    vllm: Import,
    instrumentor: VLLMSpecDecInstrumentor,
    monkeypatch: pytest.MonkeyPatch,
    readers: list[InMemoryMetricReader],
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")
    threads = threading.active_count()
    vllm_plugin()
    steps = Steps(vllm(), speculation=False)
    steps.add("a")
    steps.step(a=(0, 1))
    assert readers == []
    assert threading.active_count() == threads


def test_instrument_without_vllm_is_refused_by_its_dependencies(
    instrumentor: VLLMSpecDecInstrumentor, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instrumentors, "_is_installed", lambda *_: False)
    instrumentor.instrument()
    assert not instrumentor.is_instrumented_by_opentelemetry
    (line,) = caplog.records
    assert "vllm" in line.getMessage()


@pytest.mark.parametrize("spec", [None, "no attribute"])
def test_a_vllm_without_a_spec_is_there_all_the_same(
    instrumentor: VLLMSpecDecInstrumentor, monkeypatch: pytest.MonkeyPatch, spec: str | None
) -> None:
    """As in a notebook or a test that puts modules of its own into `sys.modules`."""
    module = ModuleType("vllm")
    if spec:
        del module.__spec__
    monkeypatch.setitem(sys.modules, "vllm", module)
    assert instrumentor.instrumentation_dependencies() == ()


def test_a_vllm_that_may_not_be_imported_is_not_there(
    instrumentor: VLLMSpecDecInstrumentor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # Python's own way to say so
    monkeypatch.setattr(instrumentors, "distribution", not_installed)
    assert instrumentor.instrumentation_dependencies() == ("vllm",)


def not_installed(name: str) -> None:
    raise PackageNotFoundError(name)


def test_one_flusher_serves_all_engines_of_a_provider() -> None:
    providers = [MeterProvider(shutdown_on_exit=False) for _ in range(2)]
    first = instrumentors.flusher_for(providers[0], when_idle=False)
    assert instrumentors.flusher_for(providers[0], when_idle=False) is first
    assert instrumentors.flusher_for(providers[1], when_idle=False) is not first
