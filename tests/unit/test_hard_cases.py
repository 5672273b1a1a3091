"""Hard cases of sums, provider, instrumentors and hooks: each of these was wrong once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from otel_specdec import SpecDecRecorder, VLLMSpecDecInstrumentor, sums
from otel_specdec.instrumentors import vllm_plugin
from otel_specdec.names import Metric
from otel_specdec.provider import provider_from_environment
from otel_specdec.sums import Harvest, Series, pool_for
from tests.unit.collected import ERRORS, Meter
from tests.unit.fake_distributions import install
from tests.unit.scripts import run
from tests.unit.test_fork import PRELUDE as FORK
from tests.unit.test_global_provider import PRELUDE as GLOBAL
from tests.unit.test_sums import Recording, final
from tests.unit.test_vllm_hooks import drive
from tests.unit.vllm_stand_in import SOURCE, Steps, importable, write

Import = Callable[[], ModuleType]


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[Import]:
    write(tmp_path)
    with importable(tmp_path) as load:
        yield load


# sums.py


class Many:
    """A source with more new attribute sets than a counter may have."""

    ended = False

    def take(self) -> Harvest:
        return Harvest([(Series.of(Metric.ACCEPTED, {"n": n}), 1) for n in range(2_100)])


@pytest.mark.parametrize("by", ["one call", "a source"])
def test_many_new_series_at_once_stop_at_two_thousand_too(meter: Meter, by: str) -> None:
    pool = pool_for(meter.provider)
    if by == "a source":
        pool.attach(Many())
    else:
        pool.add(Many().take().sums)
    found = {tuple(point.attributes.items()): point.value for point in meter.points("specdec.accepted_tokens")}
    assert len(found) == 2_000
    assert found[("otel.metric.overflow", True),] == 2_100 - 1_999


def test_a_counter_that_fails_at_birth_reaches_no_caller_and_the_others_are_counted() -> None:
    provider: Any = Recording(refuses="specdec.accepted_tokens")
    SpecDecRecorder(provider).record(final("g", 1, 2))
    provider.collect()
    assert ("specdec.proposed_tokens", 2) in {(name, amount) for name, amount, _ in provider.added}


def test_a_source_that_cannot_say_whether_it_has_ended_does_not_lose_the_others_sums(meter: Meter) -> None:
    class Broken:
        @property
        def ended(self) -> bool:
            raise ValueError("who knows")

        def take(self) -> Harvest:
            return Harvest(())

    pool_for(meter.provider).attach(Broken())
    SpecDecRecorder(meter.provider).record(final("g", 5))
    assert meter.totals()["accepted"] == 5


def test_the_first_error_is_not_born_inside_a_collection(meter: Meter) -> None:
    pool_for(meter.provider).error(ValueError(), "testing")
    time.sleep(0.001)
    before = time.time_ns()
    (point,) = meter.points(ERRORS)
    assert point.start < before


def test_an_engine_on_the_provider_and_a_recorder_from_before_it_was_set_are_both_counted() -> None:
    script = """
recorder = SpecDecRecorder()
report(recorder, "g")
start_engine(real)
tally.put(10)
metrics.set_meter_provider(real)
report(recorder, "h")
print(accepted())
"""
    assert run(GLOBAL + script).value == 12


def test_the_proxy_that_somebody_kept_is_the_provider_behind_it() -> None:
    script = """
proxy = metrics.get_meter_provider()
metrics.set_meter_provider(real)
start_engine(real)
tally.put(10)
report(SpecDecRecorder(proxy), "g")
print(accepted())
"""
    assert run(GLOBAL + script).value == 11


def test_a_zero_from_before_the_provider_was_set_is_a_zero() -> None:
    script = """
recorder = SpecDecRecorder()
recorder.record(GenerationReport("g", SpecCounts(0, 8)))
metrics.set_meter_provider(real)
print(json.dumps(totals(points(reader.get_metrics_data()))))
"""
    assert run(GLOBAL + script).value == {"accepted": 0, "proposed": 8, "generations": 1}


def test_series_from_before_the_provider_was_set_begin_before_the_next_collection() -> None:
    script = """
import time
recorder = SpecDecRecorder()
report(recorder, "g")
metrics.set_meter_provider(real)
report(recorder, "h")
time.sleep(0.001)
before = time.time_ns()
print(json.dumps([point.name for point in points(reader.get_metrics_data()) if point.start >= before]))
"""
    assert run(GLOBAL + script).value == []


def test_an_early_recorder_does_not_cost_the_engine_its_plain_role() -> None:
    script = """
from opentelemetry.sdk.resources import Resource
named = in_memory_reader(delta=False)
provider = MeterProvider([named], Resource({"service.instance.id": "pod-7"}), shutdown_on_exit=False)
SpecDecRecorder()
metrics.set_meter_provider(provider)
start_engine()
print(json.dumps(sorted({point.attributes["specdec.process"] for point in points(named.get_metrics_data())})))
"""
    assert run(GLOBAL + script).value == ["engine-0"]


def test_a_child_whose_streams_cannot_be_cleared_is_silent(meter: Meter, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = SpecDecRecorder(meter.provider)
    monkeypatch.setattr(sums, "_forget_streams", lambda counter: False)
    pool_for(meter.provider).after_fork_in_child()
    recorder.record(final("g", 1))
    assert meter.points() == []


@pytest.mark.parametrize("lock", ["consumer._lock", "next(iter(consumer._reader_storages.values()))._lock"])
def test_a_fork_during_a_collection_hangs_no_child(lock: str) -> None:
    script = f"""
consumer = provider._measurement_consumer
recorder = SpecDecRecorder(provider)
report(recorder, "g", 1)
held, done = threading.Event(), threading.Event()
def hold():
    with {lock}:
        held.set()
        done.wait(30)
thread = threading.Thread(target=hold)
thread.start()
held.wait(30)
def work():
    report(recorder, "h", 7)
    return accepted(reader)
try:
    print(json.dumps(in_child(work)))
finally:
    done.set()
    thread.join(30)
"""
    assert run(FORK + script).value == 7


# engines/vllm.py


def test_hooks_beneath_somebody_else_s_wrapper_count_once(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    module = vllm()
    instrumentor.instrument(meter_provider=Meter().provider)
    ours = module.Scheduler.update_from_output

    def theirs(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        return ours(self, scheduler_output, model_runner_output)

    module.Scheduler.update_from_output = theirs
    instrumentor.uninstrument()
    instrumentor.instrument(meter_provider=meter.provider)
    expected = drive(Steps(module))
    assert meter.totals() == expected


def test_hooks_may_come_while_another_thread_imports_vllm(
    tmp_path: Path, meter: Meter, instrumentor: VLLMSpecDecInstrumentor, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, "import tests.unit.test_hard_cases as test\ntest.importing.set()\ntest.go_on.wait(10)\n" + SOURCE)
    with importable(tmp_path) as load:
        importer = threading.Thread(target=load)
        importer.start()
        assert importing.wait(10)
        hooker = threading.Thread(target=lambda: instrumentor.instrument(meter_provider=meter.provider))
        hooker.start()
        time.sleep(0.05)
        go_on.set()
        importer.join(10)
        hooker.join(10)
        expected = drive(Steps(load()))
        assert meter.totals() == expected
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


importing, go_on = threading.Event(), threading.Event()


def test_a_scheduler_that_is_no_class_can_be_uninstrumented(
    tmp_path: Path, meter: Meter, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    write(tmp_path, SOURCE + "\nScheduler = object()\n")
    with importable(tmp_path) as load:
        load()
        instrumentor.instrument(meter_provider=meter.provider)
        instrumentor.uninstrument()


# instrumentors.py and provider.py


def test_otel_sdk_disabled_holds_for_the_plugin_where_there_is_a_provider_too(tmp_path: Path) -> None:
    write(tmp_path)
    script = """
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from otel_specdec import VLLMSpecDecInstrumentor
from otel_specdec.instrumentors import vllm_plugin
metrics.set_meter_provider(MeterProvider())
vllm_plugin()
print(int(VLLMSpecDecInstrumentor().is_instrumented_by_opentelemetry))
"""
    assert run(script, env={"OTEL_SDK_DISABLED": "true"}, path=tmp_path).value == 0


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are asked for; of exporters no reader with a thread is made."""

    class Reader(InMemoryMetricReader):
        def __init__(self, exporter: object) -> None:
            super().__init__()

    monkeypatch.setattr("opentelemetry.sdk.metrics.export.PeriodicExportingMetricReader", Reader)
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "console")


@pytest.mark.usefixtures("console")
def test_an_explicit_instrument_takes_over_from_the_plugin_a_second_time_too(
    meter: Meter, vllm: Import, instrumentor: VLLMSpecDecInstrumentor
) -> None:
    vllm_plugin()
    instrumentor.uninstrument()
    vllm_plugin()
    instrumentor.instrument(meter_provider=meter.provider)
    expected = drive(Steps(vllm()))
    assert meter.totals() == expected


@pytest.mark.usefixtures("console")
def test_the_second_engine_of_a_provider_of_our_own_is_told_so_too(
    vllm: Import, instrumentor: VLLMSpecDecInstrumentor, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_plugin()
    module = vllm()
    with caplog.at_level(logging.INFO):
        assert [Steps(module), Steps(module)]
    assert ["of its own" in line for line in caplog.messages] == [True, True]


def test_where_no_provider_could_be_made_the_log_does_not_claim_one(
    vllm: Import,
    instrumentor: VLLMSpecDecInstrumentor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "unknown")
    vllm_plugin()
    with caplog.at_level(logging.INFO):
        assert Steps(vllm())
    assert "the application's global MeterProvider" not in caplog.text


def test_an_exporter_s_name_may_have_capitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point = "MyReader=opentelemetry.sdk.metrics.export:InMemoryMetricReader\n"
    install(tmp_path, "some-exporters", entry_points=f"[opentelemetry_metrics_exporter]\n{point}")
    monkeypatch.syspath_prepend(tmp_path)
    made = provider_from_environment({"OTEL_METRICS_EXPORTER": "MyReader"})
    assert isinstance(made, MeterProvider)
    made.shutdown()
