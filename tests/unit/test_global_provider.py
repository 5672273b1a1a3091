"""The global provider can be set once in a process, so each of these tests has one of its own."""

from __future__ import annotations

from typing import Any

from tests.unit.scripts import run

PRELUDE = """
import json, logging
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from otel_specdec import GenerationReport, SpecCounts, SpecDecRecorder
from otel_specdec.instrumentors import EngineCounters
from tests.unit.collected import in_memory_reader, points, totals
from tests.unit.engine_stand_in import HandTally, description

reader = in_memory_reader(delta=False)
real = MeterProvider([reader], shutdown_on_exit=False)
tally = HandTally()

def report(recorder, generation, accepted=1):
    recorder.record(GenerationReport(generation, SpecCounts(accepted)))

def start_engine(provider=None):
    EngineCounters(provider, logging.getLogger("test")).engine_started(description(), tally, lambda: True)

def accepted():
    return totals(points(reader.get_metrics_data())).get("accepted", 0)
"""


def value(script: str, **variables: str) -> Any:
    return run(PRELUDE + script, env=variables).value


def test_a_recorder_made_before_the_provider_is_set_counts_afterwards() -> None:
    counted = value("""
recorder = SpecDecRecorder()
metrics.set_meter_provider(real)
report(recorder, "g")
print(accepted())
""")
    assert counted == 1


def test_reports_from_before_the_provider_is_set_are_not_lost() -> None:
    counted = value("""
recorder = SpecDecRecorder()
report(recorder, "g")
report(recorder, "h", 10)
metrics.set_meter_provider(real)
report(recorder, "i", 100)
print(json.dumps([accepted(), accepted()]))
""")
    assert counted == [111, 111]


def test_an_early_recorder_shares_the_pool_of_the_later_provider_with_everybody_else() -> None:
    counted = value("""
early = [SpecDecRecorder(), SpecDecRecorder()]
for recorder in early:
    report(recorder, "before")
metrics.set_meter_provider(real)
late = [SpecDecRecorder(), SpecDecRecorder(real)]
start_engine()
seen = []
for n in range(3):
    for recorder in early + late:
        report(recorder, str(n), 10)
    tally.put(100)
    seen.append(accepted())
print(json.dumps(seen))
""")
    assert counted == [142, 282, 422]


def test_an_instrumentor_with_the_real_provider_and_an_early_recorder_double_nothing() -> None:
    counted = value("""
early = SpecDecRecorder()
metrics.set_meter_provider(real)
start_engine(real)
late = SpecDecRecorder(real)
for n in range(2):
    tally.put(100)
    report(early, str(n), 10)
    report(late, str(n))
print(json.dumps([accepted(), accepted()]))
""")
    assert counted == [222, 222]


def test_another_provider_beside_the_global_one_keeps_its_own_sums() -> None:
    counted = value("""
early = SpecDecRecorder()
report(early, "g", 1)
other = in_memory_reader(delta=False)
beside = SpecDecRecorder(MeterProvider([other], shutdown_on_exit=False))
report(beside, "g", 10)
metrics.set_meter_provider(real)
print(json.dumps([accepted(), totals(points(other.get_metrics_data()))["accepted"]]))
""")
    assert counted == [1, 10]


def test_an_engine_that_starts_before_the_provider_is_set_is_counted_afterwards() -> None:
    counted = value("""
start_engine()
tally.put(3, 4, 1, 4, 4)
metrics.set_meter_provider(real)
tally.put(3, 4, 1, 4, 4)
print(accepted())
""")
    assert counted == 6


def test_a_disabled_sdk_emits_nothing_and_nothing_fails() -> None:
    counted = value(
        """
metrics.set_meter_provider(real)
start_engine()
recorder = SpecDecRecorder()
report(recorder, "g")
report(recorder, "g")
tally.put(1)
print(accepted())
""",
        OTEL_SDK_DISABLED="true",
    )
    assert counted == 0
